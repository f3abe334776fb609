# SPDX-License-Identifier: Apache-2.0
"""A scheduler written for vLLM's v0 block manager, which runs with its import line changed.

A simulated worker writes each token to its slot, and makes the copies and swaps. Each sequence must
read back its own tokens. Counts are compared with the tables.
"""

import random

import pytest

from kvcache.compat import block_space_manager
from kvcache.compat.block_space_manager import AllocStatus, BlockSpaceManager
from tests.compat.callers import load

THERE, HERE = "vllm.core.block_manager", "kvcache.compat.block_space_manager"


class Worker:
    """Pages of tokens, by block and place in the block. Encoders are written by request."""

    def __init__(self, block_size):
        self.size, self.device, self.host = block_size, {}, {}

    def move(self, pairs, source, target):
        for src, dst in pairs:
            target[dst] = list(source.get(src, [None] * self.size))

    def write(self, table, tokens, first=0):
        for i in range(first, len(tokens)):
            page = self.device.setdefault(table[i // self.size], [None] * self.size)
            page[i % self.size] = tuple(tokens[: i + 1])

    def check(self, table, tokens, num_read):
        """Check the tokens that the next one reads. A prompt is computed in one step, so earlier
        tokens need no block.
        """
        for i in range(max(len(tokens) - num_read, 0), len(tokens)):
            page = self.device[table[i // self.size]]
            assert page[i % self.size] == tuple(tokens[: i + 1]), (i, table)


def held(scheduler):
    """Return the device blocks of all running sequences, with those of encoders."""
    blocks = set()
    for group in scheduler.running:
        for seq in group.seqs:
            blocks |= {*scheduler.manager.get_block_table(seq)}
        if group.encoder is not None:
            blocks |= {*scheduler.manager.get_cross_block_table(group)}
    return blocks - {0}


@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])
@pytest.mark.parametrize("seed", range(2))
def test_caller_reads_its_own_tokens(seed, caching, window):
    caller = load("group_scheduler", THERE, HERE)
    rng = random.Random(seed)
    size, num_blocks = rng.choice([2, 4]), rng.choice([14, 30])
    scheduler = caller.Scheduler(size, num_blocks, 12, 0.1, window, caching)
    worker, num_steps, num_swaps, num_copies, num_hits = Worker(size), 0, 0, 0, 0
    stems = [[rng.randint(1, 9) for _ in range(8)] for _ in range(2)]
    names = iter(range(10**6))
    for _ in range(150):
        if rng.random() < 0.3 and len(scheduler.waiting) < 3:
            prompt = rng.choice(stems) + [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
            seqs = [caller.Sequence(next(names), prompt) for _ in range(rng.choice([1, 1, 2]))]
            encoder = caller.Sequence(next(names), [1] * rng.randint(1, 6))
            has_encoder = not caching and window is None and rng.random() < 0.3
            scheduler.waiting.append(
                caller.Group(next(names), seqs, encoder if has_encoder else None)
            )
        outs, ins, copies, prompts, runs = scheduler.step()
        worker.move(outs, worker.device, worker.host)
        worker.move(ins, worker.host, worker.device)
        worker.move(copies, worker.device, worker.device)
        num_swaps, num_copies = num_swaps + len(outs) + len(ins), num_copies + len(copies)
        for group, computed in prompts:
            table = scheduler.manager.get_block_table(group.seqs[0])
            assert table[: len(computed)] == computed
            num_hits += len(computed)
            worker.write(table, group.seqs[0].tokens, len(computed) * size)
        for group in scheduler.running:
            for seq in group.seqs:
                table = scheduler.manager.get_block_table(seq)
                worker.write(table, seq.tokens, len(seq.tokens) - 1)
                worker.check(table, seq.tokens, 10**6 if window is None else window - 1)
        num_free = scheduler.manager.get_num_free_gpu_blocks()
        assert num_free == num_blocks - 1 - len(held(scheduler))
        scheduler.manager.check_invariants()
        num_steps += len(runs)
        for group in [*scheduler.running]:
            if rng.random() < 0.08:
                scheduler.finish(group)
            elif rng.random() < 0.2 and len(group.seqs) < 3 and group.encoder is None:
                parent = rng.choice(group.seqs)
                scheduler.fork(group, parent, caller.Sequence(next(names), parent.tokens))
        for group in scheduler.running:
            for seq in group.seqs:
                seq.tokens.append(rng.randint(1, 3))
    assert num_steps > 50 and num_swaps and num_copies and bool(num_hits) == caching


def test_full_name_is_the_same_class():
    assert block_space_manager.SelfAttnBlockSpaceManager is BlockSpaceManager


def test_can_allocate_answers_by_the_formula():
    caller = load("group_scheduler", THERE, HERE)
    for num_gpu_blocks in (5, 9, 21):
        for watermark in (0.0, 0.1, 0.5):
            manager = BlockSpaceManager(4, num_gpu_blocks, 0, watermark)
            first = caller.Group(0, [caller.Sequence(0, range(8))])
            manager.allocate(first)
            total, kept = num_gpu_blocks - 1, int(watermark * num_gpu_blocks)
            for length in range(1, 4 * num_gpu_blocks + 5):
                group = caller.Group(1, [caller.Sequence(1, range(length))])
                needed, expected = -(-(length + 3) // 4), AllocStatus.LATER
                if total - needed < kept:
                    expected = AllocStatus.NEVER
                elif total - 2 - needed >= kept:
                    expected = AllocStatus.OK
                assert manager.can_allocate(group, 3) is expected


def group_of(caller, name, length):
    return caller.Group(f"g{name}", [caller.Sequence(name, range(length))])


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda m, g, n: m.can_allocate(3), TypeError, "seq_group is 3"),
    (lambda m, g, n: m.append_slots(g.seqs[0], 100), ValueError, "seq 0 cannot get"),
    (lambda m, g, n: m.get_block_table(3), TypeError, "seq is 3: expected .* seq_id"),
    (lambda m, g, n: m.mark_blocks_as_computed(g, -1), ValueError, "token_chunk_size is -1"),
])  # fmt: skip
def test_bad_arguments_are_named_and_change_nothing(call, error, message):
    caller = load("group_scheduler", THERE, HERE)
    manager = BlockSpaceManager(4, 9, 9, 0.1, None, True)
    group, new = group_of(caller, 0, 10), group_of(caller, 1, 5)
    manager.allocate(group)
    group.seqs[0].status = caller.Status.RUNNING
    with pytest.raises(error, match=message):
        call(manager, group, new)
    assert manager.get_num_free_gpu_blocks() == 5 and manager.get_block_table(group.seqs[0]) == [
        1,
        2,
        3,
    ]
    manager.check_invariants()
