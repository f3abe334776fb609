# SPDX-License-Identifier: Apache-2.0
"""Runs the simulator.

    python -m tests.simulator [--seed N] [--seconds S | --operations N] [--as-found]

Runs consecutive seeds. The first failure ends the run: its operations are reduced to the few that still
fail, and the calls that these make are printed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

import torch

from tests.simulator.world import OPERATIONS_PER_SEED, run, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=0.0, help="run seeds for this time")
    parser.add_argument("--operations", type=int, default=OPERATIONS_PER_SEED, help="in all")
    parser.add_argument("--as-found", action="store_true", help="do not reduce a failing run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    begun, seed, operations = time.monotonic(), options.seed, 0
    counts = Counter()
    while operations < options.operations or time.monotonic() - begun < options.seconds:
        try:
            world = run(seed)
        except Exception as error:
            print(f"seed {seed} fails after {operations:,} operations: {error}", flush=True)
            if options.as_found:
                return 1
            left, smallest = shrunk(seed)
            print(f"{len(left)} operations fail: {smallest}\n" + "\n".join(smallest.script))
            return 1
        operations += OPERATIONS_PER_SEED
        counts += world.counts()
        seed += 1
    found = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    print(
        f"seeds {options.seed} to {seed - 1}: {operations:,} operations, {found}, "
        f"{time.monotonic() - begun:.0f} s, nothing wrong"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
