# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: runs the CPU benchmarks and their baselines, and prints one table."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks import (
    attention_metadata,
    control_plane,
    moving,
    receive,
    sanitizer,
    sequences,
    steps,
    tables,
    tails,
    token_io,
    transfer_plan,
)
from benchmarks.gpu.machine import commit, processor, write_results
from benchmarks.measure import Result, lines_of

SUITES = {
    "control": control_plane.all_results,
    "sequences": sequences.all_results,
    "steps": steps.all_results,
    "sanitizer": sanitizer.all_results,
    "tails": tails.all_results,
    "tables": tables.all_results,
    "attention_metadata": attention_metadata.all_results,
    "moving": moving.all_results,
    "token_io": token_io.all_results,
    "receive": receive.all_results,
    "transfer_plan": transfer_plan.all_results,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=SUITES, help="run only this suite (default: all)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    args = parser.parse_args()
    results = []
    print(f"{'':58}{'ours':>12}{'peer':>12}{'ratio':>8}{'bar':>9}{'goal':>8}")
    for suite in [args.only] if args.only else SUITES:
        for result in SUITES[suite]():
            results.append(result)
            print("\n".join(lines_of(result)), flush=True)
    if args.json:
        write_results(args.json, report(results))
    return 0


def report(results: list[Result]) -> dict:
    """Return the results together with a description of the machine."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {processor()}",
        "python": platform.python_version(),
        "commit": commit(),
        "results": [{**asdict(r), "ratio": r.ratio} for r in results],
    }


if __name__ == "__main__":
    sys.exit(main())
