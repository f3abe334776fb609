# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: runs the CPU benchmarks, and prints the figures that fell behind.

A figure falls behind its bar, which is declared next to the benchmark, or behind the committed ratio
to its peer, if its ratio is 1.5 times lower. The exit code does not depend on speed.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from benchmarks.measure import HEADER, TOLERANCE, add_json, save

COMMITTED = Path(__file__).with_name("results") / "cpu.json"
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
    parser.add_argument("--all", action="store_true", help="print all figures")
    add_json(parser)
    args = parser.parse_args()
    committed, num_figures, num_behind = committed_ratios(), 0, 0
    if args.all:
        print(HEADER)
    for suite in [args.only] if args.only else SUITES:
        results = []
        for result in SUITES[suite]():
            results.append(result)
            behind = result.fell_behind(committed)
            num_behind += bool(behind)
            if args.all or behind:
                print(result.line() + (f"\n{'':9} {behind}" if behind else ""), flush=True)
        num_figures += len(results)
        save(args.json, suite, {"results": [each.row() for each in results]})
    print(
        f"{num_behind} of {num_figures} figures fell behind their bars or, by more than {TOLERANCE} "
        f"times, behind the ratios in {COMMITTED.name}"
    )
    return 0


def committed_ratios() -> dict[str, float | None]:
    sections = json.loads(COMMITTED.read_text())
    rows = (row for suite in SUITES if suite in sections for row in sections[suite]["results"])
    return {row["name"]: row["ratio"] for row in rows}


if __name__ == "__main__":
    sys.exit(main())
