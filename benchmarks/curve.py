# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.curve`: error and speed of hit-rate curves estimated from a sample of
blocks.

    python -m benchmarks.curve --write docs/replay.md    # all tables
    python -m benchmarks.curve --only speed --blocks 300000000

The error is the difference between a curve and complete replays, measured on a conversation trace
and a coding-agent trace. The speed is measured on generated traces in Mooncake's format, which are
written to a temporary file.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.eviction import (
    AGENT_CAPACITIES,
    AGENTS,
    BLOCK_SIZE,
    CAPACITIES,
    TRACE,
    markdown,
    with_table,
)
from benchmarks.gpu.machine import processor
from kvcache_lab import CURVE_POLICIES, compare, hit_rate_curve, read_block_ids, read_mooncake

RATES = (None, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
LONG_BLOCKS, LONG_SIZES = 6_000_000, (4_000, 8_000, 16_000, 32_000, 64_000)
LONG_RATES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
TABLES = ("curve", "errors", "long", "speed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curve", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=TABLES, default=TABLES, help="names of tables")
    parser.add_argument(
        "--blocks", type=int, default=50_000_000, help="number of blocks in each generated trace"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="replace the tables in this page"
    )
    args = parser.parse_args()
    tables = dict(accuracy_tables()) if {"curve", "errors"} & {*args.only} else {}
    if "long" in args.only:
        tables["long"] = long_table()
    if "speed" in args.only:
        tables["speed"] = speed_table(args.blocks)
    for name in args.only:
        print(tables[name])
        if args.write:
            args.write.write_text(with_table(args.write.read_text(), f"curve {name}", tables[name]))
    return 0


def accuracy_tables() -> Iterator[tuple[str, str]]:
    """Yield a table of curves and complete replays, and a table of errors at lower sampling rates."""
    rows = [
        ["trace", "blocks", *(f"{name}{x}" for name in CURVE_POLICIES for x in ("", ", exact"))]
    ]
    heads = [
        "trace",
        "policy",
        "rate",
        "sampled at the smallest size",
        "largest error",
        "mean error",
    ]
    errors = [heads]
    for name, path, sizes in (
        ("conversations", TRACE, CAPACITIES),
        ("agents", AGENTS, AGENT_CAPACITIES),
    ):
        exact = compare(
            list(read_mooncake(path)),
            CURVE_POLICIES,
            sizes,
            block_size=BLOCK_SIZE,
            with_optimum=False,
        )
        for rate in RATES:
            curve = hit_rate_curve(
                read_block_ids(path), CURVE_POLICIES, sizes, block_size=BLOCK_SIZE, rate=rate
            ).with_exact(exact)
            for policy, of in curve.errors.items():
                points = np.abs(of)
                least = f"{curve.rate * sizes[0]:,.0f} blocks"
                shown = f"{curve.rate:g}" + (" (automatic)" if rate is None else "")
                largest, mean = f"{points.max():.2f}", f"{points.mean():.2f}"
                errors.append([name, policy, shown, least, largest, mean])
            if rate is not None:
                continue
            for i, size in enumerate(sizes):
                rates = (
                    f"{of[policy][i]:.4f}"
                    for policy in CURVE_POLICIES
                    for of in (curve.token_hit_rates, curve.exact)
                )
                rows.append([name, f"{size:,}", *rates])
    yield "curve", table(rows)
    yield "errors", table(errors)


def long_table() -> str:
    """Return a table of the errors of curves for generated traces, relative to replays of all
    blocks.
    """
    rows = [["blocks per prompt", "policy", "rate", *(f"{size:,}" for size in LONG_SIZES)]]
    for per_prompt in (24, 240):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            write_trace(path, LONG_BLOCKS, per_prompt)
            whole, *sampled = (
                hit_rate_curve(
                    read_block_ids(path),
                    CURVE_POLICIES,
                    LONG_SIZES,
                    block_size=BLOCK_SIZE,
                    rate=rate,
                )
                for rate in (1.0, *LONG_RATES)
            )
        shown = f"{whole.blocks / whole.requests:.0f}"
        for policy, rates in whole.token_hit_rates.items():
            rows.append([shown, policy, "1: hit rate", *(f"{rate:.4f}" for rate in rates)])
            for curve in sampled:
                points = 100 * (np.array(curve.token_hit_rates[policy]) - rates)
                errors = (f"{each:+.2f}" for each in points)
                rows.append([shown, policy, f"1/{1 / curve.rate:.0f}: error", *errors])
    return table(rows)


def speed_table(num_blocks: int) -> str:
    """Return a table of the times for generated traces with two different prompt lengths."""
    heads = ["blocks per prompt", "requests", "blocks", "rate", "read and sampled", "replayed"]
    rows = [[*heads, "a trace of 10^9 blocks", "memory"]]
    for per_prompt in (24, 240):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            write_trace(path, num_blocks, per_prompt)
            start = perf_counter()
            seen = [start]
            curve = hit_rate_curve(
                read_block_ids(path),
                block_size=BLOCK_SIZE,
                on_request=lambda: seen.__setitem__(0, perf_counter()),  # noqa: B023
            )
            end = perf_counter()
        reading, replays = seen[0] - start, end - seen[0]
        minutes = (reading * 1e9 / curve.blocks + replays) / 60
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append(
            [f"{curve.blocks / curve.requests:.0f}", f"{curve.requests:,}", f"{curve.blocks:,}"]
            + [
                f"1/{1 / curve.rate:.0f}",
                f"{reading:.0f} s, {1e9 * reading / curve.blocks:.0f} ns per block",
            ]
            + [f"{replays:.0f} s for {2 * len(curve.sizes)} pools", f"{minutes:.0f} minutes"]
            + [f"{memory:.1f} GiB"]
        )
    return table(rows) + f"\nMeasured on one thread of {processor()}.\n"


def write_trace(path: str | os.PathLike, num_blocks: int, per_prompt: int) -> None:
    """Write a generated conversation trace. Each turn adds a quarter of the mean prompt length.

    All prompts start with the same two blocks. One in ten requests starts a conversation.
    """
    rng = np.random.default_rng(0)
    added = max(per_prompt // 4, 1)
    running: list[list[str]] = []
    written = next_id = 0
    next_id = 2
    with open(path, "w") as file:
        for i in range(num_blocks):
            if written >= num_blocks:
                break
            if len(running) < 500 or rng.random() < 0.1:
                running.append(["0", "1"])
            at = int(rng.integers(len(running)))
            count = int(rng.integers(1, 2 * added))
            running[at] += map(str, range(next_id, next_id + count))
            next_id += count
            ids = running[at]
            file.write(
                f'{{"timestamp": {100 * i}, "input_length": {BLOCK_SIZE * len(ids) - 9}, '
                f'"output_length": {int(rng.integers(1, 1500))}, "hash_ids": [{", ".join(ids)}]}}\n'
            )
            written += len(ids)
            if len(ids) > 2 * per_prompt:
                running[at] = running[-1]
                running.pop()


def table(rows: list[list[str]]) -> str:
    return markdown([rows[0], ["---"] * len(rows[0]), *rows[1:]])


if __name__ == "__main__":
    sys.exit(main())
