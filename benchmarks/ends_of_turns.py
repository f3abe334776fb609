# SPDX-License-Identifier: Apache-2.0
"""What `free(ends_turn=)` is worth if the hint is always right, by trace and capacity.

    python -m benchmarks.ends_of_turns TRACE.jsonl [--blocks 1000 3000]

Requests are served one at a time. A request continues another one if it starts with all full blocks of
its prompt; `ends_turn` is True for each request that no other one continues within a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.eviction import rate_table
from benchmarks.trace_forms import read
from kvcache import KVCacheManager, Request, Status

BLOCK, NEVER = 512, float("inf")
LIMITS_S = {"not given": None, "not within 30 s": 30.0, "not within 120 s": 120.0, "never": NEVER}


def continued_after_s(rows: list[dict]) -> list[float]:
    """Return, for each request, the seconds until another request continues it."""
    next_with: dict[int, int] = {}  # chained hash of the first blocks -> next request with them
    found = [NEVER] * len(rows)
    for i in range(len(rows) - 1, -1, -1):
        prefixes = [0]
        for each in rows[i]["hash_ids"][: rows[i]["input_length"] // BLOCK]:
            prefixes.append(hash((prefixes[-1], each)))
        if prefixes[-1] in next_with and len(prefixes) > 1:
            found[i] = (rows[next_with[prefixes[-1]]]["timestamp"] - rows[i]["timestamp"]) / 1000
        next_with.update(dict.fromkeys(prefixes[1:], i))
    return found


def hit_rate(rows: list[dict], gaps: list[float], num_blocks: int, limit_s: float | None) -> float:
    manager = KVCacheManager(
        BLOCK, num_blocks + 1, 2**24, num_preallocate_tokens=0, eviction="learned"
    )
    num_hit = num_tokens = 0
    for i, (row, gap) in enumerate(zip(rows, gaps)):
        manager.cache.set_now(row["timestamp"] / 1000)
        tokens = np.repeat(np.array(row["hash_ids"], np.int32), BLOCK)[: row["input_length"]]
        request = Request(str(i), tokens)
        plan = manager.step(new=[request])
        if plan.status[0] != Status.SERVED:
            continue
        num_hit += int(plan.num_computed_tokens[0])
        num_tokens += len(tokens)
        ends = None if limit_s is None else gap > limit_s or gap == NEVER
        manager.free(request, num_output_tokens=row["output_length"], ends_turn=ends)
    return num_hit / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 3_000])
    options = parser.parse_args()
    rows = read(options.trace)
    gaps = continued_after_s(rows)
    rates = {
        (name,): [hit_rate(rows, gaps, n, limit_s) for n in options.blocks]
        for name, limit_s in LIMITS_S.items()
    }
    print(rate_table(("`ends_turn`",), rates, options.blocks), end="")


if __name__ == "__main__":
    main()
