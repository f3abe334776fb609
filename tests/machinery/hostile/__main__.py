# SPDX-License-Identifier: Apache-2.0
"""Makes the right calls wrong:

python -m tests.machinery.hostile wrong [--calls N | --seconds S] [--seed N] [--first N] [NAME...]
python -m tests.machinery.hostile memory [NAME...]        each allocation fails
python -m tests.machinery.hostile interrupts|engine [--count N] [--seed N]   random instants
python -m tests.machinery.hostile device [NAME...]        tensors on a device other than CPU and CUDA

NAME is the name of a scene or the start of a public name.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import random
import sys
import time

CHUNK = 4_000  # number of calls between checks of the time limit


def wrong(options: argparse.Namespace) -> int:
    from tests.machinery.hostile import surface, wrong_calls

    surface.targets()
    for name, reason in (surface.EXCLUDED_MODULES | surface.LACKS | surface.EXCLUDED).items():
        print(f"left out: {name}: {reason}", flush=True)
    counts, first, chunk = wrong_calls.Counts(), options.first, options.calls or CHUNK
    started, told, took = time.monotonic(), 0, 0.0
    while first == options.first or (not options.calls and took <= options.seconds):
        wrong_calls.run(options.seed, first, chunk, options.names, counts)
        first += chunk
        took = time.monotonic() - started
        found = map(json.dumps, counts.findings[told:])
        print(f"{counts.calls} calls in {took:.0f} s", *found, sep="\n", flush=True)
        told = len(counts.findings)
    print(*wrong_calls.summary(counts), sep="\n")
    return bool(counts.findings or wrong_calls.is_unclear(counts))


def memory(options: argparse.Namespace) -> int:
    from tests.machinery.hostile.out_of_memory import BROKEN_SAID, UNCHANGED, survey
    from tests.machinery.hostile.scenes import SCENES

    total: collections.Counter = collections.Counter()
    for scene in options.names or [*SCENES, "kvcache."]:
        for name, counts in survey(scene).items():
            print(f"{scene}: {name}: {dict(counts)}", flush=True)
            total += counts
    print(f"{total.total()} allocations that failed: {dict(total)}")
    return total.total() != total[UNCHANGED] + total[BROKEN_SAID]


def interrupts(options: argparse.Namespace) -> int:
    from tests.machinery.hostile.instants import Alarm

    of_engine = options.of == "engine"
    module = importlib.import_module(f"tests.machinery.hostile.{options.of}{'s' * of_engine}")
    make = module.EngineRun if of_engine else module.Serving
    started, num_calls = time.monotonic(), 0
    with Alarm() as alarm:
        for done in range(0, options.count, 100):
            num_calls += make(options.seed + done).run(alarm, min(100, options.count - done))
    seconds = time.monotonic() - started
    print(f"{options.count} interrupts in {num_calls} calls: all checks passed ({seconds:.0f} s)")
    return 0


def device(options: argparse.Namespace) -> int:
    from tests.machinery.hostile.other_device import table

    rows = table(options.names)
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.outcome:<8}  {row.detail}".rstrip())
    return any(row.is_wrong for row in rows)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        kind, name, first, first_n = sys.argv[2:]
        of = {"memory": "out_of_memory", "device": "other_device"}[kind]
        child = importlib.import_module(f"tests.machinery.hostile.{of}").child
        for line in child(name, int(first), int(first_n)):
            print(json.dumps(line), flush=True)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = {"wrong": wrong, "memory": memory, "device": device}
    parser.add_argument("of", choices=[*run, "interrupts", "engine"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--calls", type=int, default=0, help="0: until --seconds have passed")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--count", type=int, default=10_000, help="number of interrupts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_intermixed_args()
    print(f"seed {options.seed}", flush=True)
    return int(run.get(options.of, interrupts)(options))


if __name__ == "__main__":
    sys.exit(main())
