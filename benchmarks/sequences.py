"""The sequence-group manager: a sequence of 2,001 tokens, blocks of 16, each call by itself.

And all calls of a scheduler per decode step and sequence together, at 2,001 and 16,001 tokens.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from time import perf_counter

import numpy as np

from benchmarks import peers
from benchmarks.measure import Result
from kvcache import BlockSpaceManager

NUM_TOKENS, BLOCK_SIZE, NUM_BLOCKS = 2001, 16, 4001
NUM_ROUNDS, NUM_APPENDS = 300, 64

# Bar, goal, and what a serving engine's own functions take (PEER_FIGURES), in us: without and with
# caching. The peer below is the plain form of them, without caching.
ASKED = {
    "allocate": (20, 5, (133, 1056)),
    "fork": (10, 2, (188, 277)),
    "append": (1, 0.3, (3.3, 4.9)),
    "free": (10, 2, (82, 309)),
    "swap out": (50, 10, (70_000, 70_000)),
    "swap in": (50, 10, (70_000, 70_000)),
}

# The same of all calls of a decode step, by length, in us; a bar of a tenth of an engine's.
STEP_LENGTHS = {NUM_TOKENS: (13.6, 40.4), 16_001: (15.4, 50.2)}
NUM_STEPS, BATCH_SIZE = 1_000, 16


class Sequence:
    def __init__(self, seq_id: int, token_ids: list[int], status: str = "WAITING") -> None:
        self.seq_id = seq_id
        self.token_ids = token_ids
        self.status = status

    def get_len(self) -> int:
        return len(self.token_ids)

    def get_token_ids(self) -> list[int]:
        return self.token_ids


class Group:
    request_id = "request"

    def __init__(self, sequence: Sequence) -> None:
        self.sequences = [sequence]

    def get_seqs(self) -> list[Sequence]:
        return self.sequences

    def is_encoder_decoder(self) -> bool:
        return False


def rounds_of_ours(caching: bool) -> Iterator[dict[str, float]]:
    """Seconds of each call, in the life of one sequence after the other."""
    manager = BlockSpaceManager(BLOCK_SIZE, NUM_BLOCKS, NUM_BLOCKS, enable_caching=caching)
    random = np.random.default_rng(0)
    for i in range(NUM_ROUNDS):
        first = Sequence(2 * i, random.integers(0, 152_000, NUM_TOKENS).tolist())
        group = Group(first)
        seconds = {"hash": seconds_of(lambda: manager.get_num_cached_tokens(first))}  # noqa: B023
        seconds["allocate"] = seconds_of(manager.allocate, group)
        first.status = "RUNNING"
        manager.mark_blocks_as_computed(group, NUM_TOKENS)
        child = Sequence(2 * i + 1, [*first.token_ids], "RUNNING")
        seconds["fork"] = seconds_of(manager.fork, first, child)
        manager.free(child)
        appending = can_appending = 0.0
        for _ in range(NUM_APPENDS):
            first.token_ids.append(5)
            can_appending += seconds_of(manager.can_append_slots, group, 0)
            appending += seconds_of(manager.append_slots, first, 0)
        seconds["append"] = appending / NUM_APPENDS
        seconds["can append"] = can_appending / NUM_APPENDS
        seconds["table"] = seconds_of(manager.get_block_table, first)
        seconds["swap out"] = seconds_of(manager.swap_out, group)
        first.status = "SWAPPED"
        seconds["swap in"] = seconds_of(manager.swap_in, group)
        seconds["free"] = seconds_of(manager.free, first)
        yield seconds


def steps_of_ours(num_tokens: int, caching: bool) -> Iterator[dict[str, float]]:
    """Seconds of the calls of each decode step of a sequence that began behind a hit."""
    manager = BlockSpaceManager(BLOCK_SIZE, NUM_BLOCKS, NUM_BLOCKS, enable_caching=caching)
    token_ids = np.random.default_rng(0).integers(0, 152_000, num_tokens).tolist()
    sequence = first = Sequence(0, token_ids)
    for sequence in (first, Sequence(1, [*token_ids])):
        group = Group(sequence)
        group.request_id = str(sequence.seq_id)
        manager.allocate(group)
        sequence.status = "RUNNING"
        manager.mark_blocks_as_computed(group, num_tokens)
    for i in range(NUM_STEPS):
        sequence.token_ids.append(5)
        start = perf_counter()
        manager.can_append_slots(group, 0)
        manager.append_slots(sequence, 0)
        manager.get_block_table(sequence)
        manager.access_all_blocks_in_seq(sequence, float(i))
        manager.get_common_computed_block_ids([sequence])
        manager.mark_blocks_as_computed(group, 1)
        yield {"calls of a decode step": perf_counter() - start}
    waiting = Group(Sequence(-1, token_ids))
    for _ in range(NUM_ROUNDS):
        seconds = {"can_allocate": seconds_of(manager.can_allocate, waiting)}
        child = Sequence(2, [*sequence.token_ids, 6], "RUNNING")
        manager.fork(sequence, child)
        seconds["append after a fork"] = seconds_of(manager.append_slots, child, 0)
        manager.free(child)
        yield seconds


def batches_of_ours(num_tokens: int, caching: bool) -> Iterator[dict[str, float]]:
    """Seconds per sequence of the same, where tables are views and slots are asked for in one call."""
    num_blocks = BATCH_SIZE * (num_tokens // BLOCK_SIZE + 100)
    manager = BlockSpaceManager(BLOCK_SIZE, num_blocks, 0, enable_caching=caching)
    random = np.random.default_rng(0)
    groups = []
    for i in range(BATCH_SIZE):
        sequence = Sequence(i, random.integers(0, 152_000, num_tokens).tolist())
        group = Group(sequence)
        group.request_id = str(i)
        manager.allocate(group)
        sequence.status = "RUNNING"
        manager.mark_blocks_as_computed(group, num_tokens)
        manager.get_block_table(sequence)
        groups.append(group)
    for i in range(NUM_STEPS):
        for group in groups:
            group.sequences[0].token_ids.append(5)
        start = perf_counter()
        manager.append_group_slots(groups, 0)
        if caching:
            for group in groups:
                manager.access_all_blocks_in_seq(group.sequences[0], float(i))
                manager.mark_blocks_as_computed(group, 1)
        yield {"the same in cheap forms": (perf_counter() - start) / BATCH_SIZE}


def steps_of_peer(num_tokens: int, caching: bool) -> Iterator[dict[str, float]]:
    """The same of the plain form."""
    blocks = peers.SequenceBlocks(NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE)
    blocks.allocate(0, [0] * num_tokens)
    if caching:
        blocks.computed.update(blocks.block_table(0))
    for i in range(NUM_STEPS):
        start = perf_counter()
        blocks.can_append({0: blocks.lengths[0] + 1}, 0)
        blocks.append(0, [5])
        blocks.block_table(0)
        blocks.access(0, float(i))
        blocks.common_computed([0])
        blocks.mark_computed()
        yield {"calls of a decode step": perf_counter() - start}
    for _ in range(NUM_ROUNDS):
        seconds = {"can_allocate": seconds_of(blocks.can_allocate, num_tokens, 0, 40)}
        blocks.fork(0, 1)
        seconds["append after a fork"] = seconds_of(blocks.append, 1, [6])
        blocks.free(1)
        yield seconds


def rounds_of_peer() -> Iterator[dict[str, float]]:
    """The same of the plain form."""
    blocks = peers.SequenceBlocks(NUM_BLOCKS, NUM_BLOCKS, BLOCK_SIZE)
    random = np.random.default_rng(0)
    for i in range(NUM_ROUNDS):
        first, child = 2 * i, 2 * i + 1
        token_ids = random.integers(0, 152_000, NUM_TOKENS).tolist()
        seconds = {"allocate": seconds_of(blocks.allocate, first, token_ids)}
        seconds["fork"] = seconds_of(blocks.fork, first, child)
        blocks.free(child)
        appending = sum(seconds_of(blocks.append, first, [5]) for _ in range(NUM_APPENDS))
        seconds["append"] = appending / NUM_APPENDS
        seconds["swap out"] = seconds_of(blocks.swap_out, [first])
        seconds["swap in"] = seconds_of(blocks.swap_in, [first])
        seconds["free"] = seconds_of(blocks.free, first)
        yield seconds


def seconds_of(call: Callable, *arguments: object) -> float:
    start = perf_counter()
    call(*arguments)
    return perf_counter() - start


def medians(*lives: Iterator[dict[str, float]]) -> list[dict[str, float]]:
    """Median us of each call, of lives that are taken in turns."""
    times: list[dict[str, list[float]]] = [defaultdict(list) for _ in lives]
    for each_round in zip_longest(*lives, fillvalue={}):
        for taken, seconds in zip(times, each_round):
            for name, value in seconds.items():
                taken[name].append(value)
    return [
        {name: statistics.median(each) * 1e6 for name, each in taken.items()} for taken in times
    ]


def all_results() -> Iterator[Result]:
    plain, caching, peer = medians(rounds_of_ours(False), rounds_of_ours(True), rounds_of_peer())
    for i, (ours, what) in enumerate([(plain, ""), (caching, ", caching")]):
        for name, (bar, goal, engine) in ASKED.items():
            against = f"Python, block by block; an engine's: {engine[i]:,}"
            title = f"sequence of 2,001 tokens{what}: {name}"
            if what and name == "allocate":
                against = "the same; an engine's, hashing too: 1,056"
                title += ", hashes given"
            yield Result(title, "us", ours[name], peer[name], against, bar, goal)
        yield Result("  can_append_slots", "us", ours["can append"])
        yield Result("  get_block_table", "us", ours["table"])
    yield from step_results()
    yield Result("  what was before its allocate: reading and hashing", "us", caching["hash"])


def step_results() -> Iterator[Result]:
    for num_tokens, engine in STEP_LENGTHS.items():
        for caching in (False, True):
            lives = steps_of_ours, batches_of_ours, steps_of_peer
            ours, batch, peer = medians(*(life(num_tokens, caching) for life in lives))
            title = f"{num_tokens:,} tokens{', caching' if caching else ''}: "
            name = "calls of a decode step"
            against = f"Python, block by block; an engine's: {engine[caching]}"
            bar = engine[caching] / 10
            yield Result(title + name, "us", ours[name], peer[name], against, bar, bar / 2)
            ours |= batch
            yield Result(
                f"  {title}the same in cheap forms",
                "us",
                ours["the same in cheap forms"],
                peer[name],
                against,
                bar,
                bar / 2,
            )
            for name in ("can_allocate", "append after a fork"):
                yield Result(f"  {title}{name}", "us", ours[name], peer[name], "Python")
