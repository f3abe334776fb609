# SPDX-License-Identifier: Apache-2.0
"""Stages: a replay on the GPU that verifies every block; the slow build at first use."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import process, say
from benchmarks.gpu.sizes import REHEARSAL

_ALL, _CUDA = ("_core", "libkvcache_cpu", "libkvcache_cuda"), "libkvcache_cuda"


def jit_check(devices: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return a program that calls an op on these devices and checks that the libraries were
    built.
    """
    return f"""
import torch, kvcache
from kvcache.native import load
answers = []
for device in {devices!r}:
    shape = kvcache.TableShape(16, 8)
    table = kvcache.BlockTables([shape], max_num_reqs=4, max_num_tokens=64, device=device)[0]
    table.add_row([1, 2, 3, 4], 0)
    table.add_row([5, 6, 7, 8], 1)
    table.commit_block_table(2)
    rows = torch.tensor([0, 1, -1], dtype=torch.int32, device=device)
    table.compute_slot_mapping(rows, torch.tensor([0, 63, 5], device=device))
    answers.append(table.slot_mapping.gpu[:5].tolist())
assert all(answer == [16, 143, -1, -1, -1] for answer in answers), answers
how = load.describe()
assert all(how[name].startswith("JIT") for name in {names!r}), how
"""


# `kvcache replay`, which is found by an entry point only where kvcache-lab is installed.
_REPLAY = """
import argparse, sys
from kvcache_lab.cli.replay import COMMAND
parser = argparse.ArgumentParser()
COMMAND.add_options(parser)
sys.exit(COMMAND.run(parser.parse_args()))
"""


def main(arguments: list[str]) -> int:
    if arguments == ["replay"]:
        with say.attempt("replay --verify"):
            replay()
    else:
        with say.attempt("build at first use"):
            build_at_first_use()
    return say.exit_code()


def replay() -> None:
    """Replay interleaved chats with a small cache and a host tier, and verify every token."""
    command = (sys.executable, "-c", _REPLAY, "--verify", "--json", "--device", "cuda")
    command += ("--num-blocks", "301", "--host-blocks", "4001", "--concurrency", "4")
    if REHEARSAL:
        command += ("--requests", "20")
    lines, seconds = output_of(command, dict(os.environ))
    report = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    say.row(part="replay", seconds=seconds, **report)
    say.learned(
        f"replay: {report['verified_tokens']:,} tokens of {report['requests']:,} requests verified "
        f"on the GPU in {seconds:.0f} s"
    )


def build_at_first_use() -> None:
    """Build all libraries at first use in an empty folder, then load them again.

    A rehearsal only rebuilds the CUDA library, because the tests without a GPU build the others.
    """
    names = (_CUDA,) if REHEARSAL else _ALL
    if REHEARSAL:
        Path(f"kvcache/{_CUDA}.so").unlink()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "KVCACHE_JIT_DIR": folder}
        environment |= {} if REHEARSAL else {"KVCACHE_JIT": "1"}
        command = (sys.executable, "-c", jit_check(("cpu", "cuda"), names))
        _, first = output_of(command, environment)
        _, second = output_of(command, environment)
    say.row(part="jit", libraries=names, seconds=first, seconds_once_built=second)
    say.learned(
        f"the build at first use of {', '.join(names)} took {first:.0f} s, {second:.0f} s once built"
    )


def output_of(command: tuple[str, ...], environment: dict[str, str]) -> tuple[list[str], float]:
    """Run a command, and return its output lines and its duration. Raises RuntimeError if it fails."""
    lines: list[str] = []

    def take(line: str) -> None:
        print("  " + line[:2000], flush=True)
        lines.append(line)

    start = time.monotonic()
    ended = process.run(command, max(say.seconds_left(), 1), take, environment=environment)
    if ended.status != "ok":
        raise RuntimeError(f"{ended.status}; {lines[-1] if lines else 'no output'}")
    return lines, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
