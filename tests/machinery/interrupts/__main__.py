# SPDX-License-Identifier: Apache-2.0
import argparse
import random
import sys
import time

from tests.machinery.interrupts.engines import EngineRun
from tests.machinery.interrupts.instants import Alarm
from tests.machinery.interrupts.managers import Serving

PER_SEED = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machinery.interrupts")
    parser.add_argument("--of", choices=["manager", "engine"], default="manager")
    parser.add_argument("--count", type=int, default=10_000, help="interrupts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    args = parser.parse_args()
    started, num_calls, done = time.monotonic(), 0, 0
    print(f"seed {args.seed}", flush=True)
    with Alarm() as alarm:
        while done < args.count:
            count = min(PER_SEED, args.count - done)
            make = Serving if args.of == "manager" else EngineRun
            num_calls += make(args.seed + done).run(alarm, count)
            done += count
    seconds = time.monotonic() - started
    print(f"{done} interrupts in {num_calls} calls: invariants held after each ({seconds:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
