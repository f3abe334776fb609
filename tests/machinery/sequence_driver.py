# SPDX-License-Identifier: Apache-2.0
"""Makes the same random calls to `BlockSpaceManager` and to its reference model, and simulates the
pages.

Block tables, copy pairs, counts and hits are compared after every call. A simulated engine
represents the KV of a token by all inputs from which it would be computed, and writes this value to
the page in the block table. The engine executes copies and swaps in call order, and reads back
everything that a sequence would read. The seed is added to any error as a note.
"""

from __future__ import annotations

import random
import sys
import time
from enum import Enum

import pytest

from kvcache.compat import AllocStatus, BlockSpaceManager
from kvcache.events import AllBlocksCleared, BlockStored
from tests.machinery.sequence_model import ModelSpace

OPERATIONS_PER_SEED = 200
Status = Enum("Status", ["WAITING", "RUNNING", "SWAPPED", "FINISHED_STOPPED"])


class Seq:
    def __init__(self, seq_id, tokens, status=Status.WAITING, extra=None, readable=True):
        self.seq_id = seq_id
        self.tokens = tokens
        self.status = status
        self.extra = extra
        self.readable = readable

    def get_len(self):
        return len(self.tokens)

    def get_token_ids(self):
        assert self.readable, "the manager reads token ids although caching is disabled"
        return self.tokens

    def extra_hash(self):
        return self.extra


class Group:
    def __init__(self, request_id, seqs, encoder=None):
        self.request_id = request_id
        self.seqs = seqs
        self.encoder = encoder
        self.num_computed = 0  # number of prompt tokens computed, including the hit
        self.num_prompt = 0

    def get_seqs(self):
        return self.seqs

    def is_encoder_decoder(self):
        return self.encoder is not None

    def get_encoder_seq(self):
        return self.encoder

    @property
    def cross_key(self):
        return None if self.encoder is None else ("cross", self.request_id)

    def set_status(self, status):
        for seq in self.seqs:
            seq.status = status


class Pages:
    """The simulated contents of the pages on both tiers.

    Each slot stores all inputs from which its KV would be computed.
    """

    def __init__(self, block_size):
        self.size = block_size
        self.gpu, self.cpu = {}, {}

    def copy(self, pairs, source, target):
        for src, dst in pairs:
            target[dst] = list(source.get(src, [None] * self.size))

    def write(self, table, position, value):
        page = table[position // self.size]
        if page:  # the window may have replaced the page by the null page
            self.gpu.setdefault(page, [None] * self.size)[position % self.size] = value

    def read(self, pages, table, position):
        return pages[table[position // self.size]][position % self.size]


def values_of(tokens, seed):
    """Return, for each token, a value that depends on this token, all previous tokens, and the seed."""
    value, values = hash(seed), []
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


class Driver:
    def __init__(self, seed):
        self.random = random.Random(seed)
        pick = self.random.choice
        self.caching = pick([False, True])
        options = {
            "block_size": pick([1, 2, 3, 4, 8]),
            "num_gpu_blocks": pick([6, 12, 25, 60]),
            "num_cpu_blocks": pick([0, 1, 8, 40]),
            "watermark": pick([0, 0.01, 0.1, 0.3]),
            "sliding_window": pick([None, None, 2, 5, 8, 13]),
            "enable_caching": self.caching,
        }
        self.size, self.window = options["block_size"], options["sliding_window"]
        self.has_host = options["num_cpu_blocks"] > 1
        self.manager = BlockSpaceManager(**options, enable_events=True)
        # The hashes that are cached, according to the events.
        self.findable = {"gpu": set(), "cpu": set()}
        self.model = ModelSpace(**options)
        self.pages = Pages(self.size)
        self.waiting, self.running, self.swapped = [], [], []
        self.prompts = [[1]]
        self.num_ids = 0
        self.now = 0.0

    def new_id(self):
        self.num_ids += 1
        return self.num_ids

    def run(self, num_operations):
        operations = [
            (self.arrive, 3),
            (self.admit, 5),
            (self.compute, 4),
            (self.append, 12),
            (self.fork, 3),
            (self.finish, 4),
            (self.preempt, 1),
            (self.swap_out, 2),
            (self.swap_in, 3),
            (self.mark, 4),
            (self.access, 2),
            (self.reset, 1),
            (self.ask, 2),
            (self.wrong_call, 1),
        ]
        calls, weights = zip(*operations)
        for call in self.random.choices(calls, weights, k=num_operations):
            call()
            self.compare()

    # Requests --------------------------------------------------------------------------------------

    def arrive(self):
        if len(self.waiting) > 3:
            return
        pick, most = self.random.choice, self.random.randint
        base = pick(self.prompts)
        tokens = base[: most(0, len(base))] + [most(0, 1) for _ in range(most(1, pick([4, 40])))]
        self.prompts = self.prompts[-20:] + [tokens]
        extra = pick([None, None, None, "a", 7])
        seqs = [
            Seq(self.new_id(), [*tokens], extra=extra, readable=self.caching)
            for _ in range(pick([1, 1, 2, 3]))
        ]
        encoder = Seq(-1, [0] * most(1, 20), readable=False) if most(1, 6) == 1 else None
        self.waiting.append(Group(self.new_id(), seqs, encoder))

    def num_encoder_tokens(self, group):
        return 0 if group.encoder is None else len(group.encoder.tokens)

    def admit(self):
        if not self.waiting:
            return
        group = self.random.choice(self.waiting)
        first, num_encoder = group.seqs[0], self.num_encoder_tokens(group)
        if self.caching and self.random.random() < 0.5:
            num_hit = self.model.hit_length(first.tokens, first.extra)
            assert self.manager.get_num_cached_tokens(first) == num_hit
        if self.random.random() < 0.1:
            self.manager.remove_seq_from_computed_blocks_tracker(first)
        for lookahead in (self.random.randint(0, 9), 0):
            answer = self.manager.can_allocate(group, lookahead)
            assert answer.name == self.model.can_allocate(len(first.tokens), lookahead, num_encoder)
        keys = [seq.seq_id for seq in group.seqs]
        if not self.model.allocate(keys, first.tokens, first.extra, group.cross_key, num_encoder):
            assert answer != AllocStatus.OK
            with pytest.raises(ValueError, match="can_allocate"):
                self.manager.allocate(group)
            if answer == AllocStatus.NEVER:
                self.waiting.remove(group)
            return
        self.manager.allocate(group)
        self.waiting.remove(group)
        group.set_status(Status.RUNNING)
        self.running.append(group)
        group.num_computed, group.num_prompt = 0, len(first.tokens)
        if group.cross_key:
            table = self.manager.get_cross_block_table(group)
            for position, value in enumerate(values_of(group.encoder.tokens, group.request_id)):
                self.pages.write(table, position, value)
        num_cached = self.manager.get_num_cached_tokens(first)
        assert num_cached == self.model.sequences[first.seq_id].num_cached
        self.check_reads(group, first, num_cached, self.pages.gpu)
        if self.window is not None:
            self.compute_prompt(group, group.num_prompt)  # the prompt is not computed in chunks

    # The engine ------------------------------------------------------------------------------------

    def values(self, group, seq):
        return values_of(seq.tokens, (seq.extra, group.encoder and group.request_id))

    def compute(self):
        groups = [group for group in self.running if group.num_computed < group.num_prompt]
        if groups:
            group = self.random.choice(groups)
            self.compute_prompt(group, self.random.randint(1, 12))

    def compute_prompt(self, group, chunk):
        """Compute a chunk of the prompt. The tokens of the prefix hit count toward the first
        chunk.
        """
        first = group.seqs[0]
        num_cached = self.model.sequences[first.seq_id].num_cached
        start = max(group.num_computed, num_cached)
        stop = min(start + chunk, group.num_prompt)
        values, table = self.values(group, first), self.manager.get_block_table(first)
        for position in range(start, stop):
            self.pages.write(table, position, values[position])
        if self.random.random() < 0.8:
            self.mark_group(group, stop - group.num_computed)
        group.num_computed = stop

    def end_prompt(self, group):
        if group.num_computed < group.num_prompt:
            self.compute_prompt(group, group.num_prompt)

    def mark_group(self, group, count):
        if not self.model.can_mark([seq.seq_id for seq in group.seqs], count):
            with pytest.raises(ValueError, match="is computed in one step: expected"):
                self.manager.mark_blocks_as_computed(group, count)
            return
        self.manager.mark_blocks_as_computed(group, count)
        for seq in group.seqs:
            self.model.mark(seq.seq_id, count)

    def mark(self):
        done = [group for group in self.running if group.num_computed == group.num_prompt]
        if done:
            group = self.random.choice(done)
            most = self.random.choice([1, 9, group.num_prompt])
            self.mark_group(group, self.random.randint(0, most))

    def append(self):
        if not self.running:
            return
        group = self.random.choice(self.running)
        self.end_prompt(group)
        grown = [seq for seq in group.seqs if self.random.random() < 0.7]
        for seq in grown:
            seq.tokens += [
                self.random.randint(0, 1) for _ in range(self.random.choice([1, 1, 1, 5]))
            ]
        lookahead = self.random.choice([0, 0, 0, 1, 6])
        lengths = {seq.seq_id: len(seq.tokens) for seq in group.seqs}
        can_append = self.manager.can_append_slots(group, lookahead)
        assert can_append == self.model.can_append(lengths, lookahead)
        for seq in group.seqs:
            self.append_to(group, seq, lookahead, can_append)

    def append_to(self, group, seq, lookahead, must_fit):
        known = len(self.model.sequences[seq.seq_id].tokens)
        want = self.model.append(seq.seq_id, seq.tokens[known:], lookahead)
        if want is None:
            assert not must_fit
            with pytest.raises(ValueError, match="can_append_slots"):
                self.manager.append_slots(seq, lookahead)
            return
        pairs = self.manager.append_slots(seq, lookahead)
        assert pairs == want
        self.pages.copy(pairs, self.pages.gpu, self.pages.gpu)
        values, table = self.values(group, seq), self.manager.get_block_table(seq)
        for position in range(known, len(seq.tokens)):
            self.pages.write(table, position, values[position])
        assert self.manager.append_slots(seq, 0) == []

    def fork(self):
        if not self.running:
            return
        group = self.random.choice(self.running)
        if len(group.seqs) > 4:
            return
        self.end_prompt(group)
        parent = self.random.choice(group.seqs)
        known = len(self.model.sequences[parent.seq_id].tokens)
        tokens = parent.tokens[: self.random.randint(known, len(parent.tokens))]
        child = Seq(self.new_id(), tokens, Status.RUNNING, parent.extra, self.caching)
        self.manager.fork(parent, child)
        self.model.fork(parent.seq_id, child.seq_id)
        group.seqs.append(child)

    def finish(self):
        """Free one sequence or the whole group."""
        groups = self.running + self.swapped
        if not groups:
            return
        group = self.random.choice(groups)
        if group in self.running:
            self.end_prompt(group)
        num_left = self.random.choice([0, len(group.seqs) - 1])
        while len(group.seqs) > num_left:
            seq = group.seqs.pop(self.random.randrange(len(group.seqs)))
            seq.status = Status.FINISHED_STOPPED
            for _ in range(2):  # the second call passes an unknown sequence
                self.manager.free(seq)
            self.model.free(seq.seq_id)
        if not group.seqs:
            self.end(group)

    def end(self, group):
        for _ in range(2):
            self.manager.free_cross(group)
        if group.cross_key:
            self.model.free(group.cross_key)
        (self.running if group in self.running else self.swapped).remove(group)

    def preempt(self):
        """Preempt a group by recomputation: the group waits again and keeps its generated
        tokens.
        """
        groups = [group for group in self.running if len(group.seqs) == 1]
        if not groups:
            return
        group = self.random.choice(groups)
        seq = group.seqs[0]
        self.manager.free(seq)
        self.model.free(seq.seq_id)
        self.end(group)
        seq.status = Status.WAITING
        self.waiting.append(group)

    def swap_out(self):
        if not self.running:
            return
        group = self.random.choice(self.running)
        self.end_prompt(group)
        keys = self.keys(group)
        can_swap = self.manager.can_swap_out(group)
        assert can_swap == (self.has_host and self.model.can_swap_out(keys))
        if not can_swap:
            with pytest.raises(ValueError):
                self.manager.swap_out(group)
            return
        pairs = self.manager.swap_out(group)
        assert pairs == self.model.swap_out(keys)
        self.pages.copy(pairs, self.pages.gpu, self.pages.cpu)
        self.running.remove(group)
        self.swapped.append(group)
        group.set_status(Status.SWAPPED)

    def swap_in(self):
        if not self.swapped:
            return
        group, lookahead = self.random.choice(self.swapped), self.random.choice([0, 0, 7])
        keys = self.keys(group)
        if self.random.random() < 0.3:
            group.seqs[0].tokens.append(1)  # these tokens were sampled before the swap-out
        lengths = {seq.seq_id: len(seq.tokens) for seq in group.seqs}
        answer = self.manager.can_swap_in(group, lookahead)
        assert answer.name == self.model.can_swap_in(keys, lengths, lookahead)
        pairs = self.model.swap_in(keys)
        if pairs is None:
            assert answer != AllocStatus.OK
            with pytest.raises(ValueError, match="can_swap_in"):
                self.manager.swap_in(group)
            return
        assert self.manager.swap_in(group) == pairs
        self.pages.copy(pairs, self.pages.cpu, self.pages.gpu)
        self.swapped.remove(group)
        self.running.append(group)
        group.set_status(Status.RUNNING)

    def keys(self, group):
        return [seq.seq_id for seq in group.seqs] + [group.cross_key] * (group.encoder is not None)

    def access(self):
        self.now += self.random.choice([0, 1])
        for group in self.running:
            if self.random.random() < 0.5:
                seq = self.random.choice(group.seqs)
                self.manager.access_all_blocks_in_seq(seq, self.now)
                self.model.access(seq.seq_id, self.now)

    def reset(self):
        device = self.random.choice(["gpu", "cpu"])
        pool = {"gpu": self.model.gpu, "cpu": self.model.cpu}[device]
        assert self.manager.reset_prefix_cache(device) == pool.reset()

    def ask(self):
        """Call the query methods, which must not change anything."""
        for group in self.running:
            states = [self.model.sequences[seq.seq_id] for seq in group.seqs]
            hits = [each.blocks[: each.num_cached // self.size] for each in states]
            common = [row[0] for row in zip(*hits) if len({*row}) == 1]
            shortest = min(map(len, hits))
            if common[:shortest] == hits[0][: len(common)]:
                assert self.manager.get_common_computed_block_ids(group.seqs) == common
        rate = self.manager.get_prefix_cache_hit_rate("gpu")
        if self.caching:
            queries = self.model.query_blocks
            assert rate == (self.model.hit_blocks / queries if queries else 0.0)
        else:
            assert rate == -1.0

    def wrong_call(self):
        """Make invalid calls. `compare` then checks that the state is unchanged."""
        manager, stranger = self.manager, Seq(-5, [1], Status.RUNNING)
        strangers = Group(-6, [stranger])
        calls = [
            lambda: manager.append_slots(stranger, 0),
            lambda: manager.fork(stranger, Seq(-7, [1])),
            lambda: manager.can_append_slots(strangers, 0),
            lambda: manager.can_append_slots(strangers, -1),
            lambda: manager.swap_out(strangers),
            lambda: manager.swap_in(strangers),
            lambda: manager.allocate(strangers),
            lambda: manager.get_block_table(stranger),
            lambda: manager.get_cross_block_table(strangers),
            lambda: manager.access_all_blocks_in_seq(stranger, 1),
        ]
        if self.running:
            group = self.random.choice(self.running)
            seq = group.seqs[0]
            short = Seq(seq.seq_id, [], readable=False)
            again = Group(group.request_id, [Seq(seq.seq_id, [1])])
            calls += [
                lambda: manager.append_slots(short, 3),
                lambda: manager.fork(seq, seq),
                lambda: manager.fork(seq, short),
                lambda: manager.append_slots(seq, -1),
                lambda: manager.swap_in(group),
                lambda: manager.allocate(again),
            ]
            if self.caching and group.encoder is None:
                known = self.model.sequences[seq.seq_id].tokens
                changed = self.random.randrange(max(len(known) - self.size, 0), len(known))
                other = Seq(-7, [*known], Status.RUNNING, seq.extra)
                other.tokens[changed] += 1
                calls.append(lambda: manager.fork(seq, other))
        if self.swapped:
            away = self.random.choice(self.swapped)
            gone = away.seqs[0]
            still = Seq(gone.seq_id, gone.tokens[: len(self.model.sequences[gone.seq_id].tokens)])
            known = len(self.model.sequences[gone.seq_id].tokens)
            longer = Seq(gone.seq_id, [*gone.tokens[:known], 1])
            calls += [
                lambda: manager.append_slots(longer, 0),
                lambda: manager.append_slots(still, 0),
                lambda: manager.fork(gone, Seq(-7, [*gone.tokens])),
                lambda: manager.swap_out(away),
                lambda: manager.get_block_table(gone),
                lambda: manager.access_all_blocks_in_seq(gone, 1),
            ]
        with pytest.raises(ValueError):
            self.random.choice(calls)()

    # Comparison ------------------------------------------------------------------------------------

    def compare(self):
        manager, model = self.manager, self.model
        manager.check_invariants()
        self.compare_events()
        assert manager.get_num_free_gpu_blocks() == model.gpu.num_free()
        assert manager.get_num_free_cpu_blocks() == model.cpu.num_free()
        for group in self.running:
            for seq in group.seqs:
                state = model.sequences[seq.seq_id]
                assert manager.get_block_table(seq) == state.blocks
                assert manager.get_num_cached_tokens(seq) == model.num_cached_tokens(seq.seq_id)
                num_computed = min(group.num_computed, group.num_prompt)
                if num_computed == group.num_prompt:
                    num_computed = len(state.tokens)
                self.check_reads(group, seq, num_computed, self.pages.gpu)
            if group.cross_key:
                table = manager.get_cross_block_table(group)
                assert table == model.sequences[group.cross_key].blocks
                for position, value in enumerate(values_of(group.encoder.tokens, group.request_id)):
                    assert self.pages.read(self.pages.gpu, table, position) == value
        for group in self.swapped:
            for seq in group.seqs:
                num_tokens = len(model.sequences[seq.seq_id].tokens)
                assert manager.get_num_cached_tokens(seq) == model.num_cached_tokens(seq.seq_id)
                self.check_reads(group, seq, num_tokens, self.pages.cpu)

    def compare_events(self):
        """Check that the number of cached hashes according to the events equals the number of
        distinct cached blocks in the model.
        """
        for event in self.manager.drain_events():
            found = self.findable[event.medium]
            if isinstance(event, AllBlocksCleared):
                found.clear()
                continue
            hashes = {each.tobytes() for each in event.block_hashes}
            stored = isinstance(event, BlockStored)
            assert hashes.isdisjoint(found) if stored else hashes <= found
            found ^= hashes
        for medium, pool in (("gpu", self.model.gpu), ("cpu", self.model.cpu)):
            assert len(self.findable[medium]) == len({*pool.content.values()})

    def check_reads(self, group, seq, num_computed, pages):
        """Check that the next token would read the values written for this sequence."""
        first = 0 if self.window is None else max(num_computed - self.window + 1, 0)
        table, values = self.model.sequences[seq.seq_id].blocks, self.values(group, seq)
        for position in range(first, num_computed):
            assert self.pages.read(pages, table, position) == values[position]


def drive(seed, num_operations=OPERATIONS_PER_SEED):
    """Run one seed. The seed is added to any error as a note, so that the run can be repeated."""
    try:
        Driver(seed).run(num_operations)
    except BaseException as error:
        error.add_note(f"found by sequence_driver.drive({seed}, {num_operations})")
        raise


def soak(seconds, first_seed):
    """Run consecutive seeds, starting with `first_seed`, for this number of seconds."""
    seed, start = first_seed, time.monotonic()
    while time.monotonic() - start < seconds:
        drive(seed)
        seed += 1
    print(f"{(seed - first_seed) * OPERATIONS_PER_SEED:,} operations, no difference found")


if __name__ == "__main__":
    soak(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 10**9)
