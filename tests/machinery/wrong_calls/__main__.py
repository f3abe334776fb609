# SPDX-License-Identifier: Apache-2.0
"""python -m tests.machinery.wrong_calls [--calls N | --seconds S] [--seed N] [--scene NAME]..."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from tests.machinery.wrong_calls import driver, surface

CHUNK = 4_000  # number of calls between checks of the time limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--calls", type=int, default=0, help="number of calls; 0: until --seconds have passed"
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--seed", type=int, default=None, help="default: random; the seed is printed"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--scene", action="append", default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    surface.targets()
    for name, reason in (surface.EXCLUDED_MODULES | surface.LACKS | surface.EXCLUDED).items():
        print(f"left out: {name}: {reason}", flush=True)
    counts, first, chunk = driver.Counts(), options.first, options.calls or CHUNK
    started, told = time.monotonic(), 0
    while True:
        driver.run(seed, first, chunk, options.scene, counts)
        first += chunk
        took = time.monotonic() - started
        print(
            f"{counts.calls} calls in {took:.0f} s",
            *map(json.dumps, counts.findings[told:]),
            sep="\n",
        )
        sys.stdout.flush()
        told = len(counts.findings)
        if options.calls or took > options.seconds:
            break
    print(*driver.summary(counts), sep="\n")
    is_unclear = driver.share_unclear(counts) > driver.MOST_UNCLEAR
    return 1 if counts.findings or is_unclear else 0


sys.exit(main())
