# SPDX-License-Identifier: Apache-2.0
"""Sequence groups of a `BlockSpaceManager`: a caller, and pages that hold what tokens depend on."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum

from kvcache.compat import AllocStatus, BlockSpaceManager
from kvcache.events import AllBlocksCleared, BlockStored
from tests.simulator.content import extended, owner_of
from tests.simulator.row import Wrong

Status = Enum("Status", ["WAITING", "RUNNING", "SWAPPED", "FINISHED_STOPPED"])
Pages = dict[int, dict[int, int]]  # page -> slot -> digest


class Seq:
    """A sequence as vLLM 0.10 passes it."""

    def __init__(self, seq_id, tokens, status=Status.WAITING, extra=None, readable=True):
        self.seq_id, self.tokens, self.status = seq_id, tokens, status
        self.extra, self.readable = extra, readable
        self.num_known = 0  # tokens that the manager knows

    def get_len(self):
        return len(self.tokens)

    def get_token_ids(self):
        assert self.readable, "the manager reads token ids although caching is disabled"
        return self.tokens

    def extra_hash(self):
        return self.extra


class Group:
    """A sequence group as vLLM 0.10 passes it."""

    def __init__(self, request_id, seqs, encoder=None):
        self.request_id, self.seqs, self.encoder = request_id, seqs, encoder
        self.num_computed = self.num_prompt = 0  # of the prompt, with the hit

    def get_seqs(self):
        return self.seqs

    def is_encoder_decoder(self):
        return self.encoder is not None

    def get_encoder_seq(self):
        return self.encoder

    def set_status(self, status):
        for seq in self.seqs:
            seq.status = status


class Sequences:
    """A sequence-group manager and its caller, as one actor of the world."""

    def __init__(self, name: str, rng: random.Random, log: Callable) -> None:
        self.name, self.rng, self.log = name, rng, log
        self.caching, self.size = rng.random() < 0.8, rng.choice([1, 2, 3, 4, 8])
        self.window = rng.choice([None, None, None, None, 2, 5, 8, 13])
        self.num_gpu, self.num_cpu = rng.choice([6, 12, 25, 60]), rng.choice([0, 1, 8, 40])
        self.manager = BlockSpaceManager(
            self.size,
            self.num_gpu,
            self.num_cpu,
            watermark=rng.choice([0, 0.01, 0.1, 0.3]),
            sliding_window=self.window,
            enable_caching=self.caching,
            enable_events=True,
        )
        self.gpu: Pages = {}
        self.cpu: Pages = {}
        self.view: dict[str, set[bytes]] = {"gpu": set(), "cpu": set()}
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self.swapped: list[Group] = []
        self.prompts, self.count, self.num_hits = [[1]], 0, 0
        self.operations = {
            **{self.arrive: 3, self.admit: 5, self.compute: 4, self.append: 12, self.fork: 3},
            **{self.finish: 4, self.preempt: 1, self.swap_out: 2, self.swap_in: 3, self.mark: 4},
            **{self.access: 2, self.reset: 0.5, self.wrong_call: 1},
        }

    def operate(self, rng: random.Random) -> None:
        self.rng = rng
        operation = rng.choices([*self.operations], [*self.operations.values()])[0]
        self.log(f"{self.name}: {operation.__name__}")
        operation()
        self.check_all()

    # What must hold --------------------------------------------------------------------------------

    def contents(self, group: Group, seq: Seq) -> list[int]:
        of_encoder = group.encoder and group.request_id
        return extended([], seq.tokens, owner_of(seq.extra, of_encoder))

    def encoded(self, group: Group) -> list[int]:
        return extended([], group.encoder.tokens, group.request_id) if group.encoder else []

    def check_pages(self, table: list[int], contents: list[int], first: int, what: str) -> None:
        for i in range(first, len(contents)):
            page = table[i // self.size]
            found = self.gpu.get(page, {}) if page else {}
            if found.get(i % self.size) != contents[i]:
                raise Wrong(f"{self.name}: {what} has wrong bytes of token {i} in page {page}")

    def first_read(self, num_computed: int) -> int:
        return 0 if self.window is None else max(num_computed - self.window + 1, 0)

    def check_all(self) -> None:
        manager, held = self.manager, set()
        manager.check_invariants()
        self.follow_events()
        for group in self.running:
            for seq in group.seqs:
                n = group.num_computed if group.num_computed < group.num_prompt else seq.num_known
                table = manager.get_block_table(seq)
                held |= {*table}
                self.check_pages(
                    table,
                    self.contents(group, seq)[:n],
                    self.first_read(n),
                    f"sequence {seq.seq_id}",
                )
            if group.encoder:
                table = manager.get_cross_block_table(group)
                held |= {*table}
                self.check_pages(table, self.encoded(group), 0, f"encoder of {group.request_id}")
        num_free = manager.get_num_free_gpu_blocks()
        if num_free != max(self.num_gpu - 1, 0) - len(held - {0}):
            raise Wrong(f"{self.name}: {num_free} blocks are free while {len(held)} are held")

    def follow_events(self) -> None:
        for event in self.manager.drain_events():
            found = self.view[event.medium]
            if isinstance(event, AllBlocksCleared):
                found.clear()
                continue
            hashes = {each.tobytes() for each in event.block_hashes}
            is_stored = isinstance(event, BlockStored)
            if not (hashes.isdisjoint(found) if is_stored else hashes <= found):
                raise Wrong(f"{self.name}: an event does not follow from earlier ones: {event}")
            found ^= hashes

    def call(self, is_able: bool | None, function: Callable, *args: object) -> object:
        """Make a call that must succeed (True), must be rejected (False), or may do either (None).
        A rejected call must change nothing, and returns None.
        """
        before = self.snapshot()
        try:
            found = function(*args)
        except ValueError as error:
            if is_able:
                raise Wrong(f"{self.name}: {function.__name__} is rejected: {error}") from error
            if self.snapshot() != before:
                raise Wrong(
                    f"{self.name}: a rejected {function.__name__} changes blocks"
                ) from error
            return None
        if is_able is False:
            raise Wrong(f"{self.name}: {function.__name__} is not rejected")
        return found

    def snapshot(self) -> tuple:
        manager = self.manager
        tables = [[*manager.get_block_table(s)] for group in self.running for s in group.seqs]
        return tables, manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()

    # Operations ------------------------------------------------------------------------------------

    def new_id(self) -> int:
        self.count += 1
        return self.count

    def arrive(self) -> None:
        pick, most = self.rng.choice, self.rng.randint
        if len(self.waiting) > 3:
            return
        base = pick(self.prompts)
        tokens = base[: pick([99, most(0, len(base))])] + [
            most(0, 1) for _ in range(most(1, pick([4, 40])))
        ]
        self.prompts = self.prompts[-20:] + [tokens]
        extra, n = pick([None, None, None, "a", 7]), pick([1, 1, 2, 3])
        seqs = [Seq(self.new_id(), [*tokens], extra=extra, readable=self.caching) for _ in range(n)]
        encoder = Seq(-1, [0] * most(1, 20), readable=False) if most(1, 6) == 1 else None
        self.waiting.append(Group(self.new_id(), seqs, encoder))

    def admit(self) -> None:
        if not self.waiting:
            return
        group = self.rng.choice(self.waiting)
        first, answer = group.seqs[0], self.manager.can_allocate(group)
        if answer != AllocStatus.OK:
            if answer == AllocStatus.NEVER:
                self.waiting.remove(group)
            return
        self.call(True, self.manager.allocate, group)
        self.waiting.remove(group)
        group.set_status(Status.RUNNING)
        for seq in group.seqs:
            seq.num_known = len(seq.tokens)
        self.running.append(group)
        group.num_prompt, group.num_computed = len(first.tokens), 0
        if group.encoder:
            self.write(self.manager.get_cross_block_table(group), self.encoded(group), 0)
        hit = self.manager.get_num_cached_tokens(first)
        self.num_hits += hit > 0
        table = self.manager.get_block_table(first)
        contents = self.contents(group, first)[:hit]
        self.check_pages(table, contents, self.first_read(hit), f"the hit of {first.seq_id}")
        if self.window is not None:
            self.compute_prompt(group, group.num_prompt)  # the prompt is not computed in chunks

    def write(self, table: list[int], contents: list[int], start: int) -> None:
        for i in range(start, len(contents)):
            if page := table[i // self.size]:  # the window may have replaced it by the null page
                self.gpu.setdefault(page, {})[i % self.size] = contents[i]

    def compute(self) -> None:
        groups = [each for each in self.running if each.num_computed < each.num_prompt]
        if groups:
            self.compute_prompt(self.rng.choice(groups), self.rng.randint(1, 12))

    def compute_prompt(self, group: Group, chunk: int) -> None:
        """Compute a chunk of the prompt. The tokens of the hit count toward the first chunk."""
        first = group.seqs[0]
        start = max(group.num_computed, self.manager.get_num_cached_tokens(first))
        start = min(start, group.num_prompt)
        stop = min(start + chunk, group.num_prompt)
        table = self.manager.get_block_table(first)
        self.write(table, self.contents(group, first)[:stop], start)
        if self.rng.random() < 0.8:
            self.call(None, self.manager.mark_blocks_as_computed, group, stop - group.num_computed)
        group.num_computed = stop

    def end_prompt(self, group: Group) -> None:
        if group.num_computed < group.num_prompt:
            self.compute_prompt(group, group.num_prompt)

    def mark(self) -> None:
        done = [each for each in self.running if each.num_computed == each.num_prompt]
        if done:
            group = self.rng.choice(done)
            most = self.rng.choice([1, 9, group.num_prompt])
            self.call(None, self.manager.mark_blocks_as_computed, group, self.rng.randint(0, most))

    def append(self) -> None:
        if not self.running:
            return
        rng, group = self.rng, self.rng.choice(self.running)
        self.end_prompt(group)
        for seq in group.seqs:
            if rng.random() < 0.7:
                seq.tokens += [rng.randint(0, 1) for _ in range(rng.choice([1, 1, 1, 5]))]
        lookahead = rng.choice([0, 0, 0, 1, 6])
        is_able = self.manager.can_append_slots(group, lookahead)
        for seq in group.seqs:
            pairs = self.call(is_able or None, self.manager.append_slots, seq, lookahead)
            if pairs is None:
                continue
            self.copy(pairs, self.gpu, self.gpu)
            table = self.manager.get_block_table(seq)
            self.write(table, self.contents(group, seq), seq.num_known)
            seq.num_known = len(seq.tokens)
            if self.manager.append_slots(seq, 0):
                raise Wrong(f"{self.name}: slots are appended twice")

    @staticmethod
    def copy(pairs: list[tuple[int, int]], source: Pages, target: Pages) -> None:
        for of, to in pairs:
            target[to] = {**source.get(of, {})}

    def fork(self) -> None:
        if not self.running:
            return
        group = self.rng.choice(self.running)
        if len(group.seqs) > 4:
            return
        self.end_prompt(group)
        parent = self.rng.choice(group.seqs)
        tokens = parent.tokens[: self.rng.randint(parent.num_known, len(parent.tokens))]
        child = Seq(self.new_id(), tokens, Status.RUNNING, parent.extra, self.caching)
        child.num_known = parent.num_known
        self.manager.fork(parent, child)
        group.seqs.append(child)

    def finish(self) -> None:
        """Free one sequence or the whole group."""
        if groups := self.running + self.swapped:
            group = self.rng.choice(groups)
            if group in self.running:
                self.end_prompt(group)
            self.free(group, self.rng.choice([0, len(group.seqs) - 1]))

    def free(self, group: Group, num_left: int) -> None:
        while len(group.seqs) > num_left:
            seq = group.seqs.pop(self.rng.randrange(len(group.seqs)))
            seq.status = Status.FINISHED_STOPPED
            for _ in range(2):  # the second call passes an unknown sequence
                self.manager.free(seq)
        if not group.seqs:
            self.manager.free_cross(group)
            (self.running if group in self.running else self.swapped).remove(group)

    def preempt(self) -> None:
        """Let a group wait again, with its generated tokens."""
        groups = [each for each in self.running if len(each.seqs) == 1]
        if groups:
            group = self.rng.choice(groups)
            seq = group.seqs[0]
            self.free(group, 0)
            group.seqs, seq.status = [seq], Status.WAITING
            self.waiting.append(group)

    def swap_out(self) -> None:
        if self.running:
            group = self.rng.choice(self.running)
            self.end_prompt(group)
            is_able = self.manager.can_swap_out(group)
            if (pairs := self.call(is_able, self.manager.swap_out, group)) is not None:
                self.copy(pairs, self.gpu, self.cpu)
                self.move(group, self.running, self.swapped, Status.SWAPPED)

    def swap_in(self) -> None:
        if self.swapped:
            group, lookahead = self.rng.choice(self.swapped), self.rng.choice([0, 0, 7])
            if self.rng.random() < 0.3:
                group.seqs[0].tokens.append(1)  # sampled before the swap-out
            is_able = self.manager.can_swap_in(group, lookahead) == AllocStatus.OK
            if (pairs := self.call(is_able or None, self.manager.swap_in, group)) is not None:
                self.copy(pairs, self.cpu, self.gpu)
                self.move(group, self.swapped, self.running, Status.RUNNING)

    def move(self, group: Group, source: list, target: list, status: Status) -> None:
        source.remove(group)
        target.append(group)
        group.set_status(status)

    def access(self) -> None:
        for group in self.running:
            self.manager.access_all_blocks_in_seq(
                self.rng.choice(group.seqs), self.rng.randint(0, 9)
            )

    def reset(self) -> None:
        self.manager.reset_prefix_cache(self.rng.choice(["gpu", "cpu"]))

    def wrong_call(self) -> None:
        manager, stranger = self.manager, Seq(-5, [1], Status.RUNNING)
        group = Group(-6, [stranger])
        calls = [
            *((each, group) for each in (manager.swap_out, manager.swap_in, manager.allocate)),
            *((manager.append_slots, stranger, n) for n in (0, -1)),
            (manager.fork, stranger, Seq(-7, [1])),
            *((manager.can_append_slots, group, n) for n in (0, -1)),
            (manager.get_block_table, stranger),
            (manager.get_cross_block_table, group),
        ]
        if self.running:
            seq = self.rng.choice(self.running).seqs[0]
            short = Seq(seq.seq_id, [], readable=False)
            calls += [(manager.append_slots, short, 3), (manager.fork, seq, seq)]
        function, *args = self.rng.choice(calls)
        self.call(False, function, *args)

    # The end ---------------------------------------------------------------------------------------

    def close(self, rng: random.Random) -> None:
        self.rng = rng
        for group in [*self.running, *self.swapped]:
            self.free(group, 0)

    def check_end(self) -> None:
        self.check_all()
        if self.manager.get_num_free_cpu_blocks() != max(self.num_cpu - 1, 0):
            raise Wrong(f"{self.name}: host blocks are held at the end")
