# SPDX-License-Identifier: Apache-2.0
"""Measures each call to the sequence-group manager, over the life of a sequence of 2,001 tokens and
in decode steps of 16 sequences. The baseline receives the same calls with the same objects.
"""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from time import perf_counter

import numpy as np

from benchmarks import peers
from benchmarks.measure import Result
from benchmarks.peers import Group, GroupMember
from kvcache.compat import BlockSpaceManager

NUM_TOKENS, BLOCK_SIZE, NUM_BLOCKS = 2001, 16, 4001
NUM_ROUNDS, NUM_APPENDS = 300, 64

# For each call, the times of a serving engine's function without and with caching (PEER_FIGURES), in
# us. The target is half of these times. The measured baseline is a plain implementation of these
# functions without caching.
ASKED = {
    "allocate": (133, 1056),
    "fork": (188, 277),
    "append": (3.3, 4.9),
    "free": (82, 309),
    "swap out": (70_000, 70_000),
    "swap in": (70_000, 70_000),
}

# A serving engine's times for all calls of a decode step, by sequence length, in us. The target is
# half of these times.
STEP_LENGTHS = {NUM_TOKENS: (13.6, 40.4), 16_001: (15.4, 50.2)}
NUM_STEPS, BATCH_SIZE = 200, 16
STEP_CALLS = (
    "can_append_slots",
    "append_slots",
    "get_block_table",
    "access_all_blocks_in_seq",
    "get_common_computed_block_ids",
    "mark_blocks_as_computed",
)

Manager = BlockSpaceManager | peers.SequenceBlocks


def rounds(make: Callable[..., Manager], caching: bool) -> Iterator[dict[str, float]]:
    """For one sequence after another, yield the duration of each call in seconds."""
    manager = make(BLOCK_SIZE, NUM_BLOCKS, NUM_BLOCKS, enable_caching=caching)
    random = np.random.default_rng(0)
    for i in range(NUM_ROUNDS):
        first = GroupMember(2 * i, random.integers(0, 152_000, NUM_TOKENS).tolist())
        group = Group(first)
        seconds = {}
        if caching:
            seconds["hash"] = seconds_of(manager.get_num_cached_tokens, first)
        seconds["allocate"] = seconds_of(manager.allocate, group)
        first.status = "RUNNING"
        manager.mark_blocks_as_computed(group, NUM_TOKENS)
        seconds["table"] = seconds_of(manager.get_block_table, first)
        child = GroupMember(2 * i + 1, [*first.token_ids], "RUNNING")
        seconds["fork"] = seconds_of(manager.fork, first, child)
        manager.free(child)
        appending = 0.0
        for _ in range(NUM_APPENDS):
            first.token_ids.append(5)
            appending += seconds_of(manager.append_slots, first, 0)
        seconds["append"] = appending / NUM_APPENDS
        seconds["swap out"] = seconds_of(manager.swap_out, group)
        first.status = "SWAPPED"
        seconds["swap in"] = seconds_of(manager.swap_in, group)
        seconds["free"] = seconds_of(manager.free, first)
        yield seconds


def running_groups(manager: Manager, num_tokens: int) -> list[Group]:
    """Create sequences with the same prompt.

    With caching, every sequence except the first starts with a prefix hit.
    """
    token_ids = np.random.default_rng(0).integers(0, 152_000, num_tokens).tolist()
    groups = [Group(GroupMember(i, [*token_ids])) for i in range(BATCH_SIZE)]
    for group in groups:
        manager.allocate(group)
        group.sequences[0].status = "RUNNING"
        manager.mark_blocks_as_computed(group, num_tokens)
    return groups


def steps(
    make: Callable[..., Manager], num_tokens: int, caching: bool
) -> Iterator[dict[str, float]]:
    """Yield the seconds per sequence of each call in a decode step.

    Each call is timed over the whole batch.
    """
    num_blocks = 2 * BATCH_SIZE * (num_tokens // BLOCK_SIZE + 100)
    manager = make(BLOCK_SIZE, num_blocks, 0, enable_caching=caching)
    groups = running_groups(manager, num_tokens)
    sequences = [group.sequences[0] for group in groups]
    for i in range(NUM_STEPS):
        for sequence in sequences:
            sequence.token_ids.append(5)
        now = float(i)
        arguments = (
            [(group, 0) for group in groups],
            [(sequence, 0) for sequence in sequences],
            [(sequence,) for sequence in sequences],
            [(sequence, now) for sequence in sequences],
            [([sequence],) for sequence in sequences],
            [(group, 1) for group in groups],
        )
        taken = {
            name: seconds_of_each(getattr(manager, name), each)
            for name, each in zip(STEP_CALLS, arguments, strict=True)
        }
        yield {"step": sum(taken.values())} | taken


def seconds_of(call: Callable, *arguments: object) -> float:
    start = perf_counter()
    call(*arguments)
    return perf_counter() - start


def seconds_of_each(call: Callable, arguments: list[tuple]) -> float:
    """Return the mean seconds per call over these arguments."""
    start = perf_counter()
    for each in arguments:
        call(*each)
    return (perf_counter() - start) / len(arguments)


def medians(lives: Iterable[Iterator[dict[str, float]]]) -> list[dict[str, float]]:
    """Time each call, alternating between the managers, and return the median times in microseconds."""
    lives = list(lives)
    times: list[dict[str, list[float]]] = [defaultdict(list) for _ in lives]
    for each_round in zip_longest(*lives, fillvalue={}):
        for taken, seconds in zip(times, each_round):
            for name, value in seconds.items():
                taken[name].append(value)
    return [
        {name: statistics.median(each) * 1e6 for name, each in taken.items()} for taken in times
    ]


def all_results() -> Iterator[Result]:
    """Run without Python's garbage collector, which would traverse every block object of the baseline."""
    gc.disable()
    try:
        yield from life_results()
        for num_tokens in STEP_LENGTHS:
            for caching in (False, True):
                yield from step_results(num_tokens, caching)
    finally:
        gc.enable()


def life_results() -> Iterator[Result]:
    plain, caching, peer = medians(
        (
            rounds(BlockSpaceManager, False),
            rounds(BlockSpaceManager, True),
            rounds(peers.SequenceBlocks, False),
        )
    )
    for i, (ours, what) in enumerate([(plain, ""), (caching, ", caching")]):
        for name, engine in ASKED.items():
            against = f"Python, block by block; an engine's: {engine[i]:,}"
            title = f"sequence of 2,001 tokens{what}: {name}"
            if what and name == "allocate":
                against = "the same; an engine's, hashing too: 1,056"
                title += ", hashes given"
            yield Result(title, "us", ours[name], peer[name], against, engine[i] / 2)
    for ours, what in ((plain, ""), (caching, ", caching")):
        name = f"sequence of 2,001 tokens{what}: first get_block_table"
        yield Result(name, "us", ours["table"], peer["table"], "Python, block by block")
    name = "sequence of 2,001 tokens, caching: reading and hashing the tokens"
    yield Result(name, "us", caching["hash"])


def step_results(num_tokens: int, caching: bool) -> Iterator[Result]:
    ours, peer = medians(
        (
            steps(BlockSpaceManager, num_tokens, caching),
            steps(peers.SequenceBlocks, num_tokens, caching),
        )
    )
    engine = STEP_LENGTHS[num_tokens][caching]
    title = f"{num_tokens:,} tokens{', caching' if caching else ''}: "
    against = f"Python, block by block; an engine's: {engine}"
    name = title + "calls of a decode step"
    yield Result(name, "us", ours["step"], peer["step"], against, engine / 2)
    for name in STEP_CALLS:
        yield Result(f"{title}{name}", "us", ours[name], peer[name], "Python")
