# SPDX-License-Identifier: Apache-2.0
"""Serves requests with prefill and decode processes that are randomly killed, paused and restarted.

    python -m benchmarks.disaggregation                  # 1,000 requests, 32 kills, 32 stops
    python -m benchmarks.disaggregation --seed 7 --json benchmarks/results/cpu.json

Both processes check every byte that they read. The run fails if an answer is wrong, if a request waits
more than a second longer than its deadline (not counting time without CPU), or if a pool is not empty
at the end.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from benchmarks.measure import add_json, save
from tests.machinery.disaggregation_faults import LEASE_S, MARGIN_S, Faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--stops", type=int, default=32)
    parser.add_argument("--transport", default="tcp", choices=("tcp", "nixl"))
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    add_json(parser)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    begun = time.monotonic()
    found = Faults(
        args.seed,
        num_requests=args.requests,
        num_kills=args.kills,
        num_stops=args.stops,
        transport=args.transport,
        progress=True,
    ).run()
    reasons = found.pop("reasons")
    for name, value in found.items():
        print(f"{name:14} {value}")
    for reason, count in sorted(reasons.items(), key=lambda each: -each[1]):
        print(f"{count:14} {reason}")
    figures = {"lease_s": LEASE_S, "margin_s": MARGIN_S, **found, "reasons": reasons}
    figures["duration_s"] = round(time.monotonic() - begun)
    save(args.json, f"disaggregation, {args.transport}", figures)
    return 1 if found["wrong"] or found["hanging"] or found["leaked"] else 0


if __name__ == "__main__":
    sys.exit(main())
