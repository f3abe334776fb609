# SPDX-License-Identifier: Apache-2.0
"""Stage: a replay on the GPU that verifies every block."""

from __future__ import annotations

import json
import sys

from benchmarks.gpu import process, say
from benchmarks.gpu.sizes import REHEARSAL

# `kvcache replay`, which is found by an entry point only where kvcache-lab is installed.
_REPLAY = """
import argparse, sys
from kvcache_lab.cli.replay import COMMAND
parser = argparse.ArgumentParser()
COMMAND.add_options(parser)
sys.exit(COMMAND.run(parser.parse_args()))
"""


def main() -> int:
    with say.attempt("replay --verify"):
        replay()
    return say.exit_code()


def replay() -> None:
    """Replay interleaved chats with a small cache and a host tier, and verify every token."""
    command = (sys.executable, "-c", _REPLAY, "--verify", "--json", "--device", "cuda")
    command += ("--num-blocks", "301", "--host-blocks", "4001", "--concurrency", "4")
    command += ("--requests", "20") if REHEARSAL else ()
    lines: list[str] = []

    def take(line: str) -> None:
        print("  " + line[:2000], flush=True)
        lines.append(line)

    ended = process.run(command, max(say.seconds_left(), 1), take)
    if ended.status != "ok":
        raise RuntimeError(f"{ended.status}; {lines[-1] if lines else 'no output'}")
    report = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    say.row(part="replay", seconds=ended.seconds, **report)
    say.learned(
        f"replay: {report['verified_tokens']:,} tokens of {report['requests']:,} requests verified "
        f"on the GPU in {ended.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
