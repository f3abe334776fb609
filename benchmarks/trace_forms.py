# SPDX-License-Identifier: Apache-2.0
"""Evaluates eviction policies on perturbed traces, for which the policies have not been tuned.

    python -m benchmarks.trace_forms TRACE.jsonl                    # learned and lru, on each variant
    python -m benchmarks.trace_forms TRACE.jsonl --policy priority --forms scans loop
    python -m benchmarks.trace_forms AGENTS.jsonl.gz --sizes 500 1000 2000 3000 6000 10000
    python -m benchmarks.trace_forms TRACE.jsonl --write DIR        # writes DIR/NAME.jsonl for each

A trace has one request per line: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`,
one id per block of 512 tokens; equal ids mean equal prefixes. Each perturbed trace contains the
same conversations, but they continue at different times, or additional requests are inserted. The
perturbations are deterministic. For each trace and pool size, the program prints the ratio of the
policy's hits to LRU's hits, counted in blocks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.eviction import read as read_requests
from benchmarks.eviction import replayed

BLOCK = 512  # tokens
CAPACITIES = (1_000, 3_000, 5_859, 10_000, 30_000, 50_000)  # blocks
Trace = list[dict]


def conversations(trace: Trace) -> list[Trace]:
    """Return each conversation's requests in order.

    Each request extends the prompt of the previous one.
    """
    ended: dict[int, int] = {}  # conversations, keyed by the id of their last full block
    found: list[Trace] = []
    for request in trace:
        ids = request["hash_ids"][: request["input_length"] // BLOCK]
        at = next((ended.pop(i) for i in reversed(ids) if i in ended), None)
        if at is None:
            at = len(found)
            found.append([])
        found[at].append(request)
        if ids:
            ended[ids[-1]] = at
    return found


def _sorted(requests: Iterator[dict]) -> Trace:
    return sorted(requests, key=lambda request: request["timestamp"])


def _renumbered(trace: Trace, first: int) -> Trace:
    """Return the same trace with different block ids."""
    return [{**r, "hash_ids": [i + first for i in r["hash_ids"]]} for r in trace]


def _fresh(trace: Trace) -> int:
    """Return an id that is greater than all ids in the trace."""
    return 1 + max(max(r["hash_ids"], default=0) for r in trace)


def at_speed(trace: Trace, factor: float) -> Trace:
    return [{**r, "timestamp": int(r["timestamp"] / factor)} for r in trace]


def with_think_times(trace: Trace, factor: float) -> Trace:
    """Multiply the time between requests of a conversation by a factor."""

    def shifted() -> Iterator[dict]:
        for requests in conversations(trace):
            first = requests[0]["timestamp"]
            for r in requests:
                yield {**r, "timestamp": int(first + factor * (r["timestamp"] - first))}

    return _sorted(shifted())


def permuted(trace: Trace, seed: int) -> Trace:
    """Change the order in which conversations start, but keep their durations."""
    rng = random.Random(seed)
    all_of = conversations(trace)
    starts = [requests[0]["timestamp"] for requests in all_of]
    rng.shuffle(starts)

    def moved() -> Iterator[dict]:
        for start, requests in zip(starts, all_of, strict=True):
            for r in requests:
                yield {**r, "timestamp": start + r["timestamp"] - requests[0]["timestamp"]}

    return _sorted(moved())


def shuffled_nearby(trace: Trace, seed: int) -> Trace:
    """Shift requests by up to a minute, keeping the order within conversations."""
    rng = random.Random(seed)

    def moved() -> Iterator[dict]:
        for requests in conversations(trace):
            times = [r["timestamp"] + rng.randint(-60_000, 60_000) for r in requests]
            for time, r in zip(sorted(times), requests, strict=True):
                yield {**r, "timestamp": max(time, 0)}

    return _sorted(moved())


def with_scans(trace: Trace, share: float, num_blocks: int, seed: int) -> Trace:
    """After a fraction `share` of the requests, insert a request whose prompt never recurs."""
    rng = random.Random(seed)
    fresh, found = _fresh(trace), []
    for r in trace:
        found.append(r)
        if rng.random() >= share:
            continue
        ids = list(range(fresh, fresh + num_blocks))
        fresh += num_blocks
        scan = {"input_length": BLOCK * num_blocks, "output_length": 100, "hash_ids": ids}
        found.append({"timestamp": r["timestamp"], **scan})
    return found


def with_loop(trace: Trace, num_documents: int, num_blocks: int) -> Trace:
    """After every tenth request, insert a request for the next of several documents, in a cycle.

    Cyclic access is the worst case for LRU.
    """
    fresh, found = _fresh(trace), []
    for i, r in enumerate(trace):
        found.append(r)
        if i % 10:
            continue
        first = fresh + i // 10 % num_documents * num_blocks
        ids = [*range(first, first + num_blocks)]
        loop = {
            "input_length": BLOCK * num_blocks + 1,
            "output_length": 50,
            "hash_ids": [*ids, 2 * fresh + i],
        }
        found.append({"timestamp": r["timestamp"], **loop})
    return found


def mixed_with_itself(trace: Trace) -> Trace:
    """Add a second service with different content, whose conversations start in a different order."""
    return _sorted([*trace, *_renumbered(permuted(trace, 5), _fresh(trace))])


def half_of_conversations(trace: Trace) -> Trace:
    return _sorted(r for i, requests in enumerate(conversations(trace)) if i % 2 for r in requests)


def change_of_phase(trace: Trace) -> Trace:
    """Append a phase in which only system prompts recur.

    This phase is followed by the whole trace with different content.
    """
    end = trace[-1]["timestamp"] + 1000
    firsts = _renumbered([requests[0] for requests in conversations(trace)], _fresh(trace))
    again = _renumbered(trace, 2 * _fresh(trace))
    return [
        *trace,
        *({**r, "timestamp": r["timestamp"] + end} for r in _sorted(iter(firsts))),
        *({**r, "timestamp": r["timestamp"] + 2 * end} for r in again),
    ]


def slow_then_fast(trace: Trace) -> Trace:
    """Reduce think times to a quarter in the second half of the trace."""
    middle = len(trace) // 2
    fast = with_think_times(trace[middle:], 0.25)
    return [*trace[:middle], *fast]


FORMS: dict[str, Callable[[Trace], Trace]] = {
    "half_speed": lambda t: at_speed(t, 0.5),
    "double_speed": lambda t: at_speed(t, 2),
    "think_quarter": lambda t: with_think_times(t, 0.25),
    "think_half": lambda t: with_think_times(t, 0.5),
    "think_double": lambda t: with_think_times(t, 2),
    "think_x4": lambda t: with_think_times(t, 4),
    "permuted": lambda t: permuted(t, 1),
    "permuted_again": lambda t: permuted(t, 2),
    "shuffled_nearby": lambda t: shuffled_nearby(t, 3),
    "scans": lambda t: with_scans(t, 0.1, 40, 4),
    "many_scans": lambda t: with_scans(t, 0.5, 24, 4),
    "loop": lambda t: with_loop(t, 40, 30),
    "two_services": mixed_with_itself,
    "half_of_conversations": half_of_conversations,
    "change_of_phase": change_of_phase,
    "slow_then_fast": slow_then_fast,
}


def read(path: Path) -> Trace:
    with gzip.open(path) if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def ratios(path: Path, policy: str, capacities: Sequence[int] = CAPACITIES) -> list[float]:
    """Return the ratio of the policy's hit tokens to LRU's hit tokens, by capacity in blocks."""
    requests = read_requests(path)
    return [
        replayed(requests, size, policy).hit_tokens / replayed(requests, size, "lru").hit_tokens
        for size in capacities
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_forms", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("trace", type=Path, help="JSONL file in Mooncake's format")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the variants to this folder"
    )
    parser.add_argument("--policy", default="learned", help="policy[:option=value]")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=CAPACITIES, metavar="N", help="capacities in blocks"
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="form")
    options = parser.parse_args()
    trace = read(options.trace)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        for name in options.forms:
            write(FORMS[name](trace), options.write / f"{name}.jsonl")
        return 0
    found: list[float] = []
    print(f"{'':22}" + "".join(f"{size:>9,}" for size in options.sizes))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.forms:
            path = Path(folder) / f"{name}.jsonl"
            write(FORMS[name](trace), path)
            of_form = ratios(path, options.policy, options.sizes)
            print(f"{name:22}" + "".join(f"{ratio:9.3f}" for ratio in of_form), flush=True)
            found += of_form
    mean = math.exp(sum(map(math.log, found)) / len(found))
    print(f"lowest {min(found):.3f}, geometric mean {mean:.3f} of {len(found)}")
    return 0


def write(trace: Trace, path: Path) -> None:
    with path.open("w") as out:
        out.writelines(json.dumps(request) + "\n" for request in trace)


if __name__ == "__main__":
    sys.exit(main())
