# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.states`: hit rates of hybrid models, depending on which states and window
blocks are kept.

The hit rates are measured on a conversation trace and a coding-agent trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.eviction import BLOCK_SIZE, markdown, print_tables, read
from kvcache import GroupSpec
from kvcache_lab import Replayer, ReplayReport, WorkloadRequest

# All pages have the same size: a state takes as many bytes as a block of 512 tokens.
FULL = GroupSpec("full_attention", BLOCK_SIZE)
GROUPS = {
    "states": [FULL, GroupSpec("recurrent", BLOCK_SIZE)],
    "3 of states": [FULL, *3 * [GroupSpec("recurrent", BLOCK_SIZE)]],
    "windows of 4,096": [FULL, GroupSpec("sliding_window", BLOCK_SIZE, {"window": 4_096})],
    "3 of windows of 2,048": [
        FULL,
        *3 * [GroupSpec("sliding_window", BLOCK_SIZE, {"window": 2_048})],
    ],
}
CAPACITIES = {"others": (5_000, 10_000, 30_000), "agents": (2_000, 4_000)}
EVICTIONS = ("lru", "learned")
STATE_GROUPS = {"others": ("states", "3 of states"), "agents": ("states",)}
INTERVALS = {"others": (None, 16_384, 0), "agents": (None, 0)}
CHUNKS = (2_048, 8_192)  # tokens of a prefill chunk


def main() -> int:
    return print_tables("states", __doc__, TABLES, lambda path: path)


def replayed(
    requests: Sequence[WorkloadRequest],
    groups: str,
    capacity: int,
    eviction: str,
    interval: int | None,
    chunk_tokens: int = CHUNKS[1],
) -> ReplayReport:
    """Replay requests one at a time. The capacity excludes the null block."""
    replayer = Replayer(
        groups=GROUPS[groups],
        num_blocks=capacity + 1,
        chunk_tokens=chunk_tokens,
        retention_interval=interval,
        eviction=eviction,
    )
    return replayer.run(requests)


def num_kept(report: ReplayReport) -> int:
    """Return the number of pages that were cached for states or window blocks."""
    return sum(group["stored_blocks"] for group in report.groups[1:])


def retention_table(
    requests: list[WorkloadRequest],
    groups: Sequence[str],
    intervals: Sequence[int | None],
    capacities: Sequence[int],
) -> str:
    """Return token hit rates by capacity, and the numbers of cached and evicted pages.

    The numbers of pages are those at the second capacity.
    """
    heads = ["groups", "`retention_interval`", "eviction", *(f"{each:,}" for each in capacities)]
    heads += [f"pages cached at {capacities[1]:,}", "evicted"]
    rows = [heads, ["---"] * len(heads)]
    for name in groups:
        for interval in intervals:
            for eviction in EVICTIONS:
                reports = [
                    replayed(requests, name, size, eviction, interval) for size in capacities
                ]
                rates = [f"{report.token_hit_rate:.4f}" for report in reports]
                pages = [num_kept(reports[1]), reports[1].evicted_blocks]
                shown = "None" if interval is None else f"{interval:,}"
                rows.append([name, shown, eviction, *rates, *(f"{each:,}" for each in pages)])
    return markdown(rows)


def states_table(trace: str) -> Callable[[dict[str, Path]], str]:
    return lambda traces: retention_table(
        read(traces[trace]), STATE_GROUPS[trace], INTERVALS[trace], CAPACITIES[trace]
    )


def windows_table(trace: str) -> Callable[[dict[str, Path]], str]:
    return lambda traces: retention_table(
        read(traces[trace]), list(GROUPS)[2:], (None, 0), CAPACITIES[trace]
    )


def chunks_table(traces: dict[str, Path]) -> str:
    heads = ["`retention_interval`", "eviction", "chunk", "token hit rate", "states cached"]
    rows = [heads, ["---"] * len(heads)]
    requests, capacity = read(traces["others"]), CAPACITIES["others"][0]
    for interval in (None, 0):
        for eviction in EVICTIONS:
            for chunk in CHUNKS:
                report = replayed(requests, "states", capacity, eviction, interval, chunk)
                rate = f"{report.token_hit_rate:.4f}"
                rows.append([str(interval), eviction, f"{chunk:,}", rate, f"{num_kept(report):,}"])
    return markdown(rows)


def answers_table(traces: dict[str, Path]) -> str:
    """Return the maximum number of hit tokens that states at the ends of answers could add."""
    heads = ["trace", "tokens of prompts", "tokens of answers that hits could add, at most"]
    rows = [heads, ["---"] * len(heads)]
    for name, shown in (("others", "conversations"), ("agents", "agents")):
        requests = read(traces[name])
        tokens, total = answer_tokens(requests), sum(each.num_tokens for each in requests)
        rows.append([shown, f"{total:,}", f"{tokens:,} ({tokens / total:.2%})"])
    return markdown(rows)


def answer_tokens(requests: Sequence[WorkloadRequest]) -> int:
    """Return the number of tokens in full blocks that are completed by answers.

    The number is summed over all requests that start with all full blocks of an earlier prompt. If
    there are several such prompts, the longest one is used.
    """
    ends: dict[
        int, tuple[int, int]
    ] = {}  # hash of full blocks -> tokens with and without the answer
    tokens = 0
    for each in requests:
        size = BLOCK_SIZE * each.token_ids.itemsize
        data, full = each.token_ids.tobytes(), each.num_tokens // BLOCK_SIZE
        prefix, found = 0, None
        for block in range(full):
            prefix = hash((prefix, data[block * size : (block + 1) * size]))
            found = ends.get(prefix, found)
        if found is not None:
            tokens += max(min(found[0], full * BLOCK_SIZE) - found[1], 0)
        with_answer = (each.num_tokens + each.output_length) // BLOCK_SIZE * BLOCK_SIZE
        ends[prefix] = with_answer, full * BLOCK_SIZE
    return tokens


TABLES = {
    "state_conversations": states_table("others"),
    "state_agents": states_table("agents"),
    "state_chunks": chunks_table,
    "state_answers": answers_table,
    "window_conversations": windows_table("others"),
    "window_agents": windows_table("agents"),
}


if __name__ == "__main__":
    sys.exit(main())
