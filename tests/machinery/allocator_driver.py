# SPDX-License-Identifier: Apache-2.0
"""Makes random calls to a manager with a mix of groups, and checks laws that a caller can observe.

The driver knows what a caller knows: its requests, their tokens, and the plans. It does not predict
block ids. For one group, `kernel_driver` predicts them, with docs/kernel_in_200_lines.py as the oracle;
`test_allocator_contents` checks what each page contains.

The choices are drawn either by hypothesis, which shrinks failing examples, or from a seeded
generator, which is faster. An error names the seed of the failing run. Add a regression test for
each failure.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from math import gcd, lcm

import pytest

from kvcache import Admit, External, KVCacheManager, Request, Status, StepReport, hash_blocks
from kvcache.allocator import RequestState, check_invariants
from kvcache.allocator.hashing import DEFAULT_ALGORITHM, DEFAULT_SEED, hash_seed
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.machinery.group_mixes import (
    CIRCULAR,
    ENCODER,
    MIXES,
    STATE,
    TOKENS,
    Chooser,
    ModelGroup,
    ceil_div,
    groups_of,
)

ENGINE = "engine:blake2b"  # block hashes are supplied with each request
LONGEST = 40
OPERATIONS_PER_SEED = 500


@dataclass(eq=False)
class Running:
    """What the caller knows about a request that has a row."""

    request: Request
    by_step: bool
    start: int  # first token of the last step that served the row
    sure: int  # tokens before this one are not drafts
    num_undecided: int = 0  # tokens before `start` that could be rejected at that time
    num_drafts: int = 0  # of the last step, if groups keep the states of drafts
    received: tuple[int, int] = (0, 0)  # hit length and number of external tokens in transfer
    is_disturbed: bool = False  # something was aborted or invalid since the row began to receive
    is_stale: bool = False


class Driver:
    """A manager, the block tables of a simulated worker, and the requests of a caller."""

    def __init__(self, choose: Chooser, mix: tuple | None = None) -> None:
        self.choose = choose
        kinds, hash_block_size = choose.pick(MIXES) if mix is None else mix
        self.num_blocks = choose.integer(6, 20) * len(kinds)
        specs, self.groups = groups_of(choose, kinds)
        sizes = [group.block_size for group in self.groups]
        self.hash_size = hash_block_size or gcd(*sizes)
        of_tokens = [g for g in self.groups if g.pages not in (ENCODER, CIRCULAR)]
        self.cached_groups = [g for g, each in enumerate(self.groups) if each.cached]
        whole = [g for g in self.cached_groups if self.groups[g].keeps_all]
        of_any = [g for g in self.cached_groups if self.groups[g].pages == TOKENS]
        self.shared_groups = whole or of_any  # `num_shared_tokens` is a hit in these groups
        self.whole_unit = lcm(*(g.block_size for g in of_tokens))
        self.unit = lcm(
            *(
                self.hash_size
                if hash_block_size and self.hash_size < g.block_size
                else g.block_size
                for g in of_tokens
                if g.cached
            )
        )
        self.fence_frees, self.num_preallocate = choose.chance(4), choose.pick([0, 0, 5, 12])
        self.max_num_reqs, self.watermark = choose.integer(2, 6), choose.pick([0.0, 0.0, 0.2])
        enable_caching = not choose.chance(10)
        self.caching = enable_caching and not any(group.ends_caching for group in self.groups)
        self.retention_interval = None
        if choose.chance(3) and any(group.sparse and group.cached for group in self.groups):
            self.retention_interval = self.unit * choose.pick([0, 0, 1, 2, 3])
        self.num_host = choose.integer(2, 30) * len(kinds) if choose.chance(2) else 0
        self.algorithm = choose.pick([DEFAULT_ALGORITHM, "xxh3_128_cbor", ENGINE])
        self.hash_bytes = choose.pick([5, 16, 31, 32]) if self.algorithm == ENGINE else None
        host_write, prefault = choose.pick(["back", "back", "through"]), choose.chance(2)

        def make_manager() -> KVCacheManager:
            return KVCacheManager.for_groups(
                specs,
                self.num_blocks,
                LONGEST,
                max_num_reqs=self.max_num_reqs,
                num_preallocate_tokens=self.num_preallocate,
                hash_block_size=hash_block_size,
                fence_frees=self.fence_frees,
                enable_caching=enable_caching,
                retention_interval=self.retention_interval,
                num_host_blocks=self.num_host,
                host_write=host_write,
                watermark=self.watermark,
                enable_events=True,
                prefault=prefault,
                hash_algorithm=self.algorithm,
                hash_bytes=self.hash_bytes,
            )

        self.make_manager, self.manager = make_manager, make_manager()
        states = [group.num_speculative for group in self.groups if group.pages == STATE]
        self.has_state, self.max_drafts = bool(states), min(states, default=0)
        self.takes_external = not any(  # same condition as the native `is_cached`
            group.cached and not group.transferred and group.pages not in (ENCODER, CIRCULAR)
            for group in self.groups
        )
        self.has_encoder = any(group.pages == ENCODER for group in self.groups)
        self.num_groups = len(kinds)
        self.rows: dict[int, Running] = {}
        self.waiting: list[Request] = []
        self.kept: list[tuple[Request, set[int]]] = []  # freed requests, blocks held for connectors
        self.loads: dict[int, set[int]] = {}  # step -> destinations of its swap-ins
        self.tables: dict[int, list[list[int]]] = {}
        self.ended: set[int] = set()  # rows that ended since the last step
        self.before: dict[int, dict] = {}  # step -> block tables before that step
        self.num_steps = self.num_completed = self.count = 0
        self.aborted: set[int] = set()  # steps
        self.hashes: dict[tuple, bytes] = {}  # prefix -> hash
        self.prefixes: dict[bytes, tuple] = {}  # hash -> prefix
        self.view: set[tuple] = set()  # (medium, group, hash) of what events say is cached
        self.operations = [
            (10, self.step),
            (3, self.free),
            (3, self.tokens_arrive),
            (5 if self.num_host else 2, self.report),
            (2, self.fork),
            (1, self.abort),
            (1, self.invalidate),
            (1, self.reset),
            (1, self.wrong_call),
            (1, self.ask),
            (2, self.finish_receiving),
            (1, self.release_blocks),
        ]
        if not self.has_state:
            self.operations += [(2, self.admit_alone), (3, self.extend), (2, self.advance)]
        if not self.has_state or self.max_drafts:
            self.operations += [(1, self.reject)]
        self.weighted = [each for weight, each in self.operations for _ in range(weight)]

    def run(self, num_operations: int) -> None:
        """Run random operations and check the laws after each one."""
        for _ in range(num_operations):
            self.choose.pick(self.weighted)()
            self.compare()

    # Requests --------------------------------------------------------------------------------------

    def new_request(self) -> Request:
        """Return a new request or repeat an earlier one."""
        choose = self.choose
        again = [request for request in self.waiting if request.num_tokens <= LONGEST]
        if again and choose.chance(2):
            request = choose.pick(again)
            self.waiting.remove(request)
            return request
        length, differs = choose.integer(1, LONGEST), choose.pick([0, 3, 7, 16, 99, 99, 99])
        tokens = [self.token(i, differs) for i in range(length)]
        reads, writes = choose.pick([(1, 1), (1, 1), (1, 1), (0, 1), (1, 0)])
        return self.make_request(
            tokens,
            read_cache=bool(reads),
            write_cache=bool(writes),
            num_encoder_tokens=choose.pick([0, 3, 5]) if self.has_encoder else 0,
        )

    def make_request(self, tokens: list[int], **options) -> Request:
        """Make a request. In a mix with engine hashes, supply the request's block hashes."""
        self.count += 1
        hashes = [] if self.algorithm == ENGINE else None
        request = Request(f"r{self.count}", tokens, block_hashes=hashes, **options)
        self.extend_hashes(request, tokens)
        return request

    def extend_hashes(self, request: Request, tokens: list[int]) -> None:
        """Note the hashes of the tokens, and append them to the request, as an engine does before it
        reports the tokens.
        """
        size = self.hash_size
        hashes = [self.hash_of(tuple(tokens[:n])) for n in range(size, len(tokens) + 1, size)]
        if request.block_hashes is not None:
            request.block_hashes.extend(hashes[len(request.block_hashes) :])

    @staticmethod
    def token(position: int, differs: int) -> int:
        return position + (1000 if position >= differs else 0)

    def later_tokens(self, request: Request, n: int) -> list[int]:
        """Return up to `n` new tokens.

        The sequence may be one token longer than max_model_len, because the last sampled token is
        not computed.
        """
        known = request.num_tokens
        return [self.token(known + i, 99) for i in range(min(n, LONGEST + 1 - known))]

    def computed(self, row: int) -> int:
        return self.manager.num_computed_tokens(self.rows[row].request)

    def state(self, row: int) -> RequestState:
        return self.manager.state(self.rows[row].request)

    def on_device(self, by_step: bool | None = None) -> list[int]:
        """Return the rows that are neither swapped out nor receiving."""
        return [
            row
            for row in sorted(self.rows)
            if self.state(row) is RequestState.RUNNING and by_step in (None, self.rows[row].by_step)
        ]

    def room_of_rows(self, by_step: bool) -> dict[int, int]:
        """Return, for each row that is not full, the number of tokens that can still be added."""
        rooms = {
            row: LONGEST - self.computed(row)
            for row in sorted(self.rows)
            if self.rows[row].by_step == by_step and self.state(row) is not RequestState.RECEIVING
        }
        return {row: room for row, room in rooms.items() if room}

    def blocks(self, row: int) -> list[list[int]]:
        """Return the blocks of a row per group, or [] if it is swapped out."""
        if self.state(row) is RequestState.SWAPPED_OUT:
            return []
        request = self.rows[row].request
        return [self.manager.block_ids(request, g).tolist() for g in range(self.num_groups)]

    def lowest_free_row(self) -> int:
        row = min({*range(len(self.rows) + 1)} - self.rows.keys())
        return row if row < self.max_num_reqs else -1

    # Bounds of correct calls -------------------------------------------------------------------------

    def undecided(self, row: int, start: int, num_known: int) -> int:
        """Return how many of the first `start` tokens may still be rejected."""
        if self.max_drafts or num_known >= start:
            return 0  # with states of drafts, a step knows the result of earlier drafts
        each = self.rows[row]
        num_certain = each.start - each.num_undecided + 1
        return max(min(self.computed(row) - each.sure, start - num_certain), 0)

    def most_slots(self, start: int, undecided: int = 0) -> int:
        """Return the maximum number of slots, including lookahead, of a step from token `start`."""
        return min(
            (
                min(ceil_div(LONGEST, g.block_size), g.num_places()) * g.block_size
                - (start - g.reads_from(start - undecided))
                for g in self.groups
                if g.pages == CIRCULAR
            ),
            default=10**9,
        )

    def most_with_drafts(self, row: int, start: int, num_ids: int = 0) -> int:
        """Return the maximum number of known tokens and drafts that a step from `start` computes."""
        known = self.rows[row].request.num_tokens + num_ids
        return max(known - start, 1) + self.max_drafts if self.max_drafts else LONGEST

    def most_rejected(self, row: int) -> int:
        """Return how many drafts, none of which is known yet, can be rejected."""
        each, computed = self.rows[row], self.computed(row)
        if self.has_state:
            return min(each.num_drafts, max(computed - max(each.sure, each.request.num_tokens), 0))
        return max(computed - max(each.sure, each.request.num_tokens), 0)

    def is_decided(self, row: int, back: int, num_ids: int) -> bool:
        """Whether the row's states can continue, because all drafts are rejected or known."""
        known = self.rows[row].request.num_tokens + num_ids
        return self.rows[row].num_drafts - back <= 0 or known >= self.computed(row) - back

    def note_served(self, row: int, start: int, num_known: int, undecided: int = 0) -> None:
        """Record a step or call that has served a row from `start` on."""
        each = self.rows[row]
        each.num_undecided = undecided
        each.start, each.sure = start, max(start + 1, num_known)
        each.num_drafts = max(self.computed(row) - each.sure, 0) if self.max_drafts else 0

    def note_affected(self, affected: dict[str, int]) -> None:
        """Check where requests continue after an abort or an invalidation."""
        for row, each in self.rows.items():
            each.is_disturbed = True
            if each.request.request_id in affected:
                assert self.computed(row) == affected[each.request.request_id]
                each.start = each.sure = self.computed(row)
                each.num_drafts = each.num_undecided = 0

    # Operations ------------------------------------------------------------------------------------

    def step(self) -> None:
        choose, manager = self.choose, self.manager
        rooms = self.room_of_rows(by_step=True)
        rows = [row for row in rooms if not choose.chance(3)]
        leaving = []
        if self.num_host:
            leaving = [row for row in self.on_device(by_step=True) if choose.chance(6)]
            rows = [row for row in rows if row not in leaving]
        if choose.chance(2):
            rows.reverse()
        counts = [
            choose.integer(0, min(rooms[row], choose.pick([1, 1, 4, LONGEST]))) for row in rows
        ]
        rejected = [0] * len(rows)
        if choose.chance(3):
            rejected = [choose.integer(0, min(3, self.most_rejected(row))) for row in rows]
        ids: list[list[int]] = [[] for _ in rows]
        if choose.chance(2):
            ids = [
                self.later_tokens(self.rows[row].request, choose.pick([0, 1, 1, 3])) for row in rows
            ]
        starts = [self.computed(row) - back for row, back in zip(rows, rejected)]
        known = [self.rows[row].request.num_tokens + len(new) for row, new in zip(rows, ids)]
        undecided = [self.undecided(*each) for each in zip(rows, starts, known)]
        most = [self.most_slots(*each) for each in zip(starts, undecided)]
        for i, (row, back, new) in enumerate(zip(rows, rejected, ids)):
            can = self.is_decided(row, back, len(new))
            counts[i] = min(counts[i], most[i], self.most_with_drafts(row, starts[i], len(new)))
            counts[i] = counts[i] if can and not choose.chance(12) else 0
        requests = [self.new_request() for _ in range(choose.pick([0, 0, 1, 1, 2, 3]))]
        caps = [choose.pick([0, 2, 99, 99]) for _ in requests]
        is_read = [choose.pick([None, None, True, False]) for _ in requests]
        hits = [self.hit_tokens(*each) for each in zip(requests, caps, is_read)]
        external = [self.num_external(*each) for each in zip(requests, hits, is_read)]
        delays = [n > 0 and choose.chance(2) for n in external]
        most += [self.most_slots(hit + n if n else 0) for hit, n in zip(hits, external)]
        limits = [choose.pick([1, 4, 8, LONGEST, LONGEST]) for _ in requests]
        limits = [min(limit, n) for limit, n in zip(limits, most[len(rows) :])]
        limits = [0 if delay else limit for limit, delay in zip(limits, delays)]
        ahead = [choose.pick([0, 0, 0, 3, 9]) for _ in most]
        ahead = [min(n, room - count) for n, room, count in zip(ahead, most, [*counts, *limits])]
        reserved = choose.pick([0, 0, 0, 4])
        for row, new in zip(rows, ids):
            request = self.rows[row].request
            self.extend_hashes(request, [*request.token_ids.tolist(), *new])
        asks = [
            Admit(request, limit, External(*other), n, reserved, cap, reads)
            for request, limit, other, n, cap, reads in zip(
                requests, limits, zip(external, delays), ahead[len(rows) :], caps, is_read
            )
        ]
        expected = self.first_status(rows, counts, rejected, ids, ahead, leaving, asks)
        self.before[self.num_steps] = copy.deepcopy(self.tables)
        held = {row: self.blocks(row) for row in self.rows}
        tokens = {row: self.rows[row].request.token_ids.tolist() for row in rows}
        num_free, is_alone = manager.pool.num_free, self.hold_all(rows) and not any(undecided)
        plan = manager.step(
            rows,
            counts,
            new=asks,
            token_ids=[token for each in ids for token in each],
            num_token_ids=[len(each) for each in ids],
            num_rejected_tokens=rejected,
            num_lookahead_tokens=ahead[: len(rows)],
            swap_out=leaving,
        )
        assert plan.step_id == self.num_steps
        self.num_steps += 1
        self.check_plan(plan)
        running, left, new = plan.answers
        assert running.rows.tolist() == rows and left.rows.tolist() == leaving
        assert running.num_computed_tokens.tolist() == starts
        if expected is not None:
            assert [*running.status.tolist(), *new.status.tolist()][0] == expected
        for i, (row, status) in enumerate(zip(rows, running.status.tolist())):
            each, is_served = self.rows[row], status == Status.SERVED
            assert running.num_tokens[i] == counts[i] * is_served
            if is_served and counts[i]:
                self.note_served(row, starts[i], known[i], undecided[i])
                assert self.computed(row) == starts[i] + counts[i]
                self.check_slots(row, starts[i], ahead[i], undecided[i], held[row])
                self.check_same_ids(row, held)
                self.check_published(row, starts[i])
            elif is_served:
                each.num_drafts -= min(rejected[i], each.num_drafts)
            else:
                assert (
                    self.computed(row) == starts[i] + rejected[i] and self.blocks(row) == held[row]
                )
            new_ids = ids[i] if is_served else []
            assert each.request.token_ids.tolist() == tokens[row] + new_ids
            if status == Status.NEVER:
                stop = min(starts[i] + counts[i], LONGEST)
                self.check_never(each.request, starts[i], stop, counts[i], ahead[i])
        for row, status in zip(leaving, left.status.tolist()):
            assert (self.state(row) is RequestState.SWAPPED_OUT) == (status == Status.SERVED)
            if status == Status.SERVED:
                self.rows[row].num_drafts = 0
            else:
                assert self.blocks(row) == held[row]
        for i, ask in enumerate(asks):
            self.note_admitted(ask, [int(each[i]) for each in new], hits[i])
        if is_alone and len(rows) + len(asks) == 1 and not (leaving or reserved or any(external)):
            waits = Status.WAIT in plan.status.tolist()
            assert not waits, "a request that is alone in the pool waits forever"
        if not leaving and Status.SERVED not in plan.status.tolist():
            # The plan may hold blocks that it writes to the host.
            assert 0 <= num_free - manager.pool.num_free <= len(plan.swap_out)

    def first_status(self, rows, counts, rejected, ids, ahead, leaving, asks) -> Status | None:
        """Return the status of the step's first request according to `would_fit`, unless it is
        unknown.
        """
        if leaving or (rows and (rejected[0] or ids[0] or not counts[0])):
            return None
        if rows:
            request = self.rows[rows[0]].request
            ask = Admit(request, counts[0], num_lookahead_tokens=ahead[0])
            return self.manager.would_fit(ask)
        if not asks or (asks[0].external.num_tokens and asks[0].external.delayed):
            return None
        return self.manager.would_fit(asks[0])

    def note_admitted(self, ask: Admit, answer: list[int], hit: int) -> None:
        row, status, start, num_tokens = answer
        request, external = ask.request, ask.external
        if status == Status.SERVED:
            assert row == self.lowest_free_row()
            self.rows[row] = each = Running(
                request, True, start, max(start + 1, request.num_tokens)
            )
            if external.num_tokens:
                assert start == hit + external.num_tokens
            if external.delayed:
                each.received = hit, external.num_tokens
            stop = start if external.delayed else min(start + ask.num_tokens, request.num_tokens)
            assert (self.computed(row), num_tokens) == (stop, stop - start)
            assert (self.state(row) is RequestState.RECEIVING) == external.delayed
            self.check_slots(row, start, ask.num_lookahead_tokens, 0, [[]] * self.num_groups)
            if not external.delayed:
                self.check_published(row, start)
            return
        assert (row, num_tokens) == (-1, 0)
        self.waiting.append(request)
        has_fewer = self.has_state and start > 0  # a state of a hit needs one page more
        if status == Status.NEVER and not has_fewer and start % self.whole_unit == 0:
            stop = min(start + max(ask.num_tokens, 1), request.num_tokens)
            self.check_never(request, start, stop, stop - start, ask.num_lookahead_tokens)

    def hold_all(self, rows: list[int]) -> bool:
        """Return whether only these rows hold blocks, and released blocks become free immediately."""
        is_fenced = self.fence_frees and self.num_steps > self.num_completed
        others = self.kept or self.loads or self.manager.pool.num_fenced
        return len(rows) == len(self.rows) and not others and not is_fenced

    def check_never(self, request: Request, start: int, stop: int, chunk: int, ahead: int) -> None:
        """Check that a request with the status NEVER does not fit into an empty manager either.

        The request is computed token by token up to `start`, and then in chunks.
        """
        if self.max_drafts and (ahead or stop > request.num_tokens):
            return  # known tokens need no draft pages
        tokens = request.token_ids.tolist()[:stop]
        tokens += [0] * (stop - len(tokens))
        again = self.make_request(tokens, num_encoder_tokens=request.num_encoder_tokens)
        manager, n = self.make_manager(), 0
        while n < stop:
            count, more = (1, 0) if n < start else (min(chunk, stop - n), ahead)
            if count + more > self.most_slots(n):
                return  # the manager rejects tokens that exceed the row's slots
            rows = ([0], [count]) if n else ()
            new = [] if n else [Admit(again, count, num_lookahead_tokens=more)]
            plan = manager.step(*rows, new=new, num_lookahead_tokens=more)
            if plan.status[0] != Status.SERVED:
                return
            manager.report(StepReport(plan.step_id, completed=True))
            n += count
        raise AssertionError(f"NEVER, but the request fits: {start} to {stop} by {chunk}")

    def hit_tokens(self, request: Request, cap: int, reads: bool | None) -> int:
        """Return the length of the hit of whole blocks that the next step finds."""
        found = self.manager.cache.cached_tokens(request, read_cache=reads)
        return found.with_host if found.num_host_blocks <= cap else found.on_device

    def num_external(self, request: Request, hit: int, reads: bool | None) -> int:
        """Choose how many tokens after the request's hit are external."""
        is_read = request.read_cache if reads is None else reads
        if not self.takes_external or not is_read or request.num_encoder_tokens:
            return 0
        most = request.num_tokens - 1 - hit
        return self.choose.integer(1, most) if most > 0 and self.choose.chance(4) else 0

    def finish_receiving(self) -> None:
        rows = [row for row in sorted(self.rows) if self.state(row) is RequestState.RECEIVING]
        if not rows:
            return
        row = self.choose.pick(rows)
        each, (num_hit, most) = self.rows[row], self.rows[row].received
        with pytest.raises(ValueError, match=f"expected 0 to {most}"):
            self.manager.finish_receiving(each.request, most + 1)
        count = self.choose.pick([most, self.choose.integer(0, most)])
        found = self.manager.finish_receiving(each.request, None if count == most else count)
        assert found == self.computed(row)  # a row that restarts may hit more than has arrived
        if count == most and not each.is_disturbed:
            assert found == num_hit + most
        each.start, each.sure, each.num_undecided = found, found, 0
        each.received = 0, 0

    def release_blocks(self) -> None:
        if self.kept:
            request, _ = self.kept.pop(self.choose.integer(0, len(self.kept) - 1))
            self.manager.release_blocks(request)

    def fork(self) -> None:
        forkable = self.on_device(by_step=True)
        if not forkable:
            return
        row = self.choose.pick(forkable)
        parent, num_shared = self.rows[row].request, self.computed(row)
        differs = self.choose.pick([num_shared, 99])
        length = max(1, min(num_shared + self.choose.integer(0, 5), LONGEST))
        tokens = parent.token_ids.tolist()[:num_shared]
        tokens += [self.token(i, differs) for i in range(len(tokens), length)]
        child = self.make_request(
            tokens,
            write_cache=bool(self.choose.integer(0, 3)),
            num_encoder_tokens=parent.num_encoder_tokens,
        )
        if parent.num_tokens < num_shared:  # the shared tokens include unconfirmed drafts
            with pytest.raises(ValueError, match="are known"):
                self.manager.fork(parent, child)
            return
        free, num_free = self.lowest_free_row(), self.manager.pool.num_free
        assert self.manager.fork(parent, child) == free
        if free < 0:
            return
        of = self.rows[row]
        of.num_drafts = 0
        of.sure = max(of.sure, num_shared) if self.has_state else of.sure
        self.rows[free] = Running(child, True, num_shared, num_shared, is_stale=of.is_stale)
        assert self.computed(free) == num_shared
        if not self.max_drafts:  # otherwise, the parent may release pages of drafts
            assert self.manager.pool.num_free == num_free and self.blocks(free) == self.blocks(row)

    def admit_alone(self) -> None:
        request = self.new_request()
        inside = self.manager.cache.find_prefix(request).num_tokens
        ids, num_hit, num_shared = self.manager.cache.find_prefix(request, whole_blocks=True)
        assert num_hit == self.hit_by_definition(request)
        assert num_shared == self.hit_by_definition(request, only=self.shared_groups)
        # If a block has several copies, a drafting group may not find the next hash block in one
        # copy, but find the whole block in another copy.
        assert num_hit <= inside or any(each.drafts for each in self.groups)
        ids = [ids] if self.num_groups == 1 else ids
        if self.choose.chance(4):
            num_hit, ids = 0, [[] for _ in ids]
        external = self.num_external(request, num_hit, None)
        delay = external > 0 and self.choose.chance(2)
        slots = self.most_slots(num_hit + external if external else 0)
        count = 0 if delay else self.choose.integer(1, min(LONGEST - num_hit - external, slots))
        ahead = min(self.choose.pick([0, 0, 3]), slots - count)
        num_prompt = self.choose.pick([None, None, self.choose.integer(1, request.num_tokens)])
        ask = Admit(
            request,
            num_tokens=count,
            external=External(external, delayed=delay),
            num_lookahead_tokens=ahead,
            num_prompt_tokens=num_prompt,
            num_shared_tokens=self.choose.pick([0, num_shared, num_shared]),
        )
        num_free, row = self.manager.pool.num_free, self.lowest_free_row()
        found = self.manager.admit(ask, ids[0] if self.num_groups == 1 else ids)
        if found is None:
            assert self.manager.pool.num_free == num_free
            self.waiting.append(request)
            return
        assert self.manager.row(request) == row
        start = num_hit + external
        self.rows[row] = each = Running(request, False, start, max(start + 1, request.num_tokens))
        each.received = (num_hit, external) if delay else (0, 0)
        stop = start if delay else min(start + count, request.num_tokens)
        assert self.computed(row) == stop
        self.check_slots(row, start, ahead, 0, [[]] * self.num_groups)
        if not delay:
            self.check_published(row, start)
        for g, (new, blocks) in enumerate(
            zip([found] if self.num_groups == 1 else found, self.blocks(row))
        ):
            is_in_order = self.groups[g].pages in (ENCODER, CIRCULAR)
            num_old = 0 if is_in_order else num_hit // self.groups[g].block_size
            assert new.tolist() == blocks[num_old:]

    def extend(self) -> None:
        rooms = self.room_of_rows(by_step=False)
        if not rooms:
            return
        row = self.choose.pick([*rooms])
        start, known = self.computed(row), self.rows[row].request.num_tokens
        undecided = self.undecided(row, start, known)
        most = min(rooms[row], self.most_slots(start, undecided))
        if most < 1 or not self.is_decided(row, 0, 0):
            return
        count = self.choose.integer(1, most)
        ahead, held = min(self.choose.pick([0, 0, 3]), most - count), self.blocks(row)
        found = self.manager.extend(self.rows[row].request, count, ahead)
        if found is None:
            assert self.computed(row) == start and self.blocks(row) == held
            return
        self.check_extended(row, start, count, ahead, undecided, held, found)

    def check_extended(self, row, start, count, ahead, undecided, held, found) -> None:
        self.note_served(row, start, self.rows[row].request.num_tokens, undecided)
        assert self.computed(row) == start + count
        self.check_slots(row, start, ahead, undecided, held)
        self.check_published(row, start)
        found = [found] if self.num_groups == 1 else found
        for new, blocks, old in zip(found, self.blocks(row), held):
            assert [*new] == blocks[len(old) :]

    def advance(self) -> None:
        choose = self.choose
        rows = [row for row in self.room_of_rows(by_step=False) if choose.chance(2)]
        spans, ahead = [], choose.pick([0, 0, 3])
        for row in rows:
            computed, each = self.computed(row), self.rows[row]
            least = max(each.start, each.request.num_tokens // self.hash_size * self.hash_size)
            slots = [
                computed if group.pages == CIRCULAR else len(blocks) * group.block_size
                for group, blocks in zip(self.groups, self.blocks(row))
                if group.pages in (TOKENS, CIRCULAR)
            ]
            most = max(min([*slots, LONGEST - 1]), computed)
            start = choose.integer(min(least, computed), most)
            most = min(9, LONGEST - start, self.most_slots(start) - ahead)
            spans.append((start, start + choose.integer(1, max(most, 1))))
        if any(
            stop > LONGEST or stop - start + ahead > self.most_slots(start) for start, stop in spans
        ):
            return
        later = [
            self.later_tokens(self.rows[row].request, choose.pick([0, 0, 2, 5])) for row in rows
        ]
        for i, (row, (start, _)) in enumerate(zip(rows, spans)):
            request = self.rows[row].request
            if start < min(self.computed(row), request.num_tokens):
                later[i] = []  # known tokens are computed again
            self.extend_hashes(request, [*request.token_ids.tolist(), *later[i]])
        held = [self.blocks(row) for row in rows]
        before = [(self.computed(row), self.rows[row].request.token_ids.tolist()) for row in rows]
        found = self.manager.advance(
            rows,
            [start for start, _ in spans],
            [stop for _, stop in spans],
            ahead,
            token_ids=[each for more in later for each in more],
            num_token_ids=[len(more) for more in later],
        )
        for i, (row, (start, stop)) in enumerate(zip(rows, spans)):
            computed, tokens = before[i]
            if found[i] is None:
                assert (self.computed(row), self.blocks(row)) == (computed, held[i])
                assert self.rows[row].request.token_ids.tolist() == tokens
                continue
            assert self.rows[row].request.token_ids.tolist() == tokens + later[i]
            new = found[i] or [[]] * self.num_groups
            new = new[0] if self.num_groups == 1 else new
            self.check_extended(row, start, stop - start, ahead, 0, held[i], new)

    def reject(self) -> None:
        if not self.rows:
            return
        row = self.choose.pick(sorted(self.rows))
        count, computed = self.choose.integer(0, self.most_rejected(row)), self.computed(row)
        self.manager.reject_tokens(self.rows[row].request, count)
        self.rows[row].num_drafts -= min(count, self.rows[row].num_drafts)
        assert self.computed(row) == computed - count

    def tokens_arrive(self) -> None:
        requests = [*(each.request for each in self.rows.values()), *self.waiting]
        if requests:
            request = self.choose.pick(requests)
            tokens = self.later_tokens(request, self.choose.integer(1, 4))
            self.extend_hashes(request, [*request.token_ids.tolist(), *tokens])
            request.append_tokens(tokens)

    def free(self) -> None:
        rows = []
        for _ in range(min(len(self.rows), self.choose.pick([1, 1, 1, 2, 3]))):
            row = self.choose.pick(sorted({*self.rows} - {*rows}))
            state, request = self.state(row), self.rows[row].request
            keep = state is not RequestState.SWAPPED_OUT and request not in [
                r for r, _ in self.kept
            ]
            keep &= state is RequestState.RECEIVING or self.choose.chance(5)
            if keep:
                pages = {
                    block
                    for group, blocks in zip(self.groups, self.blocks(row))
                    for block in blocks
                    if block and group.transferred
                }
                self.manager.free(request, keep_blocks=True)
                self.kept.append((request, pages))
                self.forget(row)
                break
            if state is RequestState.RECEIVING:
                break
            rows.append(row)
        self.manager.free(*(self.rows[row].request for row in rows))
        for row in rows:
            self.forget(row)

    def forget(self, row: int) -> None:
        each = self.rows.pop(row)
        self.ended |= {row} if each.by_step else set()
        self.waiting.append(each.request)

    def report(self) -> None:
        least = max(self.num_completed, self.num_steps - 60)
        if least >= self.num_steps:
            return
        step = self.choose.integer(least, self.num_steps - 1)
        failed = self.some_blocks() if self.choose.chance(4) else []
        pages = []
        if self.num_host and self.choose.chance(6):
            pages = [self.choose.integer(1, self.num_host - 1)]
        hashes = self.hashes_of(failed)
        self.note_affected(self.manager.report(StepReport(step, True, failed, pages)))
        self.num_completed = step + 1
        self.loads = {of: blocks for of, blocks in self.loads.items() if of > step}
        self.check_not_found(hashes)

    def abort(self) -> None:
        """Abort a step that is in flight or has already been aborted."""
        least = max(self.num_completed, self.num_steps - 4)
        if least >= self.num_steps:
            return
        step = self.choose.integer(least, self.num_steps - 1)
        was_aborted = step in self.aborted
        found = self.manager.report(StepReport(step, completed=False))
        assert not (was_aborted and found)
        self.note_affected(found)
        if not was_aborted:
            self.aborted |= {*range(step, self.num_steps)}
            self.loads = {of: blocks for of, blocks in self.loads.items() if of < step}
            if self.choose.chance(2):  # the aborted plans were never applied
                self.tables = copy.deepcopy(self.before[step])

    def invalidate(self) -> None:
        ids = self.some_blocks()
        hashes = self.hashes_of(ids)
        self.note_affected(self.manager.invalidate(ids))
        self.check_not_found(hashes)

    def hashes_of(self, ids: list[int]) -> list[tuple[int, bytes]]:
        """Return the groups and hashes under which device blocks are cached."""
        blocks = {block for block in ids if block}
        found = []
        for prefix, each in [*self.hashes.items()] if blocks else ():
            for g in self.cached_groups:
                if len(prefix) % self.groups[g].block_size == 0 and prefix:
                    where = self.manager.cache.find([each], g).device
                    found += [(g, each)] if int(where[0]) in blocks else []
        return found

    def check_not_found(self, hashes: list[tuple[int, bytes]]) -> None:
        """Check that no copy of invalid content can be hit."""
        for g, each in hashes:
            where = self.manager.cache.find([each], g)
            assert where.device[0] <= 0 and where.host[0] <= 0, "invalid content is cached"

    def some_blocks(self) -> list[int]:
        """Return some blocks: any, or the last ones of a request."""
        rows = self.on_device()
        if self.choose.chance(2) or not rows:
            return [self.choose.integer(1, self.num_blocks - 1)]
        blocks = self.blocks(self.choose.pick(rows))[self.choose.integer(0, self.num_groups - 1)]
        return [each for each in blocks if each][-2:]

    def reset(self) -> None:
        pools = [self.manager.pool, *([self.manager.host_pool] if self.num_host else [])]
        if self.choose.chance(3):
            self.manager.cache.start_epoch()
            for row, each in self.rows.items():
                each.is_stale = True
                assert self.manager.cache.is_stale(self.rows[row].request)
        elif not self.manager.cache.reset():
            assert any(pool.num_free < pool.num_total for pool in pools)
            return
        assert not any(pool.num_cached for pool in pools)

    def ask(self) -> None:
        """Call the manager's query methods. `compare` then checks that they changed nothing."""
        request = self.new_request()
        self.waiting.append(request)
        found = self.manager.cache.cached_tokens(request)
        assert found.on_device == self.hit_by_definition(request)
        assert found.with_host == self.hit_by_definition(request, with_host=True)
        prefix = self.manager.cache.find_prefix(request, whole_blocks=True)
        assert prefix.num_shared_tokens == self.hit_by_definition(request, only=self.shared_groups)
        rows = self.on_device()
        if rows:
            row, group = self.choose.pick(rows), self.choose.integer(0, self.num_groups - 1)
            running = self.choose.integer(1, 3)
            count = self.manager.cache.num_common_prefix_blocks(
                self.rows[row].request, running, group
            )
            assert count == self.num_common(row, running, group)
        before = self.manager.pool.num_free, self.manager.pool.num_cached
        ask = Admit(request, min(self.choose.pick([1, 8, LONGEST, LONGEST]), self.most_slots(0)))
        self.manager.would_fit(ask, whole=True)
        statuses = [self.make_manager().would_fit(ask, whole=whole) for whole in (False, True)]
        assert Status.WAIT not in statuses, "a request waits for an empty manager"
        self.manager.checkpoint_tokens(request, self.choose.integer(1, LONGEST))
        assert before == (self.manager.pool.num_free, self.manager.pool.num_cached)

    def num_common(self, row: int, num_running: int, group: int) -> int:
        held = [block for each in self.rows for blocks in self.blocks(each) for block in blocks]
        blocks = self.blocks(row)[group]
        ends = (
            i for i, block in enumerate(blocks) if not block or held.count(block) != num_running
        )
        return next(ends, len(blocks))

    def wrong_call(self) -> None:
        """Make invalid calls. `compare` then checks that the state is unchanged."""
        manager, stranger = self.manager, Request("stranger", [1, 2])
        calls = [
            lambda: manager.step([len(self.tables) + 50], [1]),
            lambda: manager.step([0], [1, 2]),
            lambda: manager.step(new=[stranger, stranger]),
            lambda: manager.step(new=[Admit(stranger, num_tokens=0)]),
            lambda: manager.step(token_ids=[1]),
            lambda: manager.step(new=[Admit(stranger, num_reserved_blocks=-1)]),
            lambda: manager.extend(stranger, 1),
            lambda: manager.reject_tokens(stranger, 1),
            lambda: manager.advance([len(self.tables) + 50], [0], [1]),
            lambda: manager.invalidate([0]),
            lambda: manager.invalidate([self.num_blocks]),
            lambda: manager.abort(self.num_steps),
            lambda: manager.report(StepReport(self.num_steps, completed=True)),
            lambda: manager.report(StepReport(0, completed=True, failed_pages=[0])),
            lambda: manager.step(new=[Request("long", range(LONGEST + 1))]),
            lambda: manager.step(new=[Request("odd", [1], block_hashes=[bytes(32)] * 9)]),
            lambda: manager.step(new=[Request("none yet", [])]),
            lambda: manager.step(swap_out=[len(self.tables) + 50]),
            lambda: manager.step(new=[Admit(stranger, max_host_blocks=-1)]),
            lambda: manager.step(new=[Admit(stranger, num_prompt_tokens=-1)]),
            lambda: manager.step(new=[Admit(stranger, num_shared_tokens=-1)]),
            lambda: manager.fork(stranger, Request("child", [1, 2])),
            lambda: manager.state(stranger) is RequestState.SWAPPED_OUT,
            lambda: manager.finish_receiving(stranger),
            lambda: manager.release_blocks(stranger),
            lambda: manager.step(new=[Admit(stranger, external=External(2))]),
            lambda: manager.step(new=[Admit(stranger, external=External(-1))]),
            lambda: manager.step(new=[Admit(stranger, external=External(0, delayed=True))]),
        ]
        receiving = [row for row in self.rows if self.state(row) is RequestState.RECEIVING]
        if receiving:
            receiver = self.rows[receiving[0]].request
            calls += [
                lambda: manager.step([receiving[0]], [1]),
                lambda: manager.extend(receiver, 1),
                lambda: manager.fork(receiver, Request("child", receiver.token_ids)),
                lambda: manager.finish_receiving(receiver, -1),
                lambda: manager.finish_receiving(receiver, LONGEST),
                lambda: manager.free(receiver),
                lambda: manager.step(swap_out=[receiving[0]]),
            ]
        on_host = [row for row in self.rows if self.state(row) is RequestState.SWAPPED_OUT]
        if on_host:
            away = self.rows[on_host[0]].request
            calls += [
                lambda: manager.step(swap_out=[on_host[0]]),
                lambda: manager.fork(away, Request("child", away.token_ids)),
                lambda: manager.block_ids(away),
                lambda: manager.cache.num_common_prefix_blocks(away, 1),
            ]
        rows = self.room_of_rows(by_step=True)
        if rows:
            row = self.choose.pick([*rows])
            request, most = self.rows[row].request, self.computed(row) - self.rows[row].start
            calls += [
                lambda: manager.step([row, row], [1, 1]),
                lambda: manager.step([row], [-1]),
                lambda: manager.step([row], [rows[row] + 1]),
                lambda: manager.step([row], [1], token_ids=[5, 6]),
                lambda: manager.step([row], [1], token_ids=[5] * 60, num_token_ids=[60]),
                lambda: manager.step([row], [1], num_rejected_tokens=[most + 1]),
                lambda: manager.step([row], [1], new=[request]),
                lambda: manager.extend(request, 1),
                lambda: manager.fork(request, request),
                lambda: manager.step([row], [1], swap_out=[row]),
            ]
            drafts = self.most_with_drafts(row, self.computed(row))
            if drafts < rows[row]:
                calls.append(lambda: manager.step([row], [drafts + 1]))
            if self.algorithm != ENGINE:  # with engine hashes, the given hashes define the content
                calls.append(lambda: manager.step([row], [1], token_ids=[-1]))
        others = self.room_of_rows(by_step=False)
        if others:
            row2 = self.choose.pick([*others])
            other = self.rows[row2].request
            calls += [
                lambda: manager.step([row2], [1]),
                lambda: manager.extend(other, others[row2] + 1),
                lambda: manager.step(swap_out=[row2]),
                lambda: manager.fork(other, Request("child", other.token_ids)),
            ]
        with pytest.raises(ValueError):
            self.choose.pick(calls)()

    # Laws ------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Check the laws that hold between any two calls."""
        manager = self.manager
        check_invariants(manager)
        held = {block for row in self.rows for blocks in self.blocks(row) for block in blocks}
        held |= {block for _, blocks in self.kept for block in blocks}
        held |= {block for blocks in self.loads.values() for block in blocks}
        num_held = manager.pool.num_total - manager.pool.num_free
        if self.fence_frees and self.num_completed < self.num_steps:
            assert num_held >= len(held - {0})
        else:
            assert num_held == len(held - {0}), "blocks leak, or are free while they are held"
        is_out = any(self.state(row) is RequestState.SWAPPED_OUT for row in self.rows)
        if self.num_host and not (is_out or self.loads):
            assert manager.host_pool.num_free == manager.host_pool.num_total
        stats = manager.cache.stats
        assert 0 <= stats.host_hit_tokens <= stats.hit_tokens <= stats.query_tokens
        self.compare_events()

    def compare_events(self) -> None:
        """Check that the events say what can be found, and that they describe it correctly."""
        for event in self.manager.cache.drain_events():
            if isinstance(event, AllBlocksCleared):
                self.view = {each for each in self.view if each[0] != event.medium}
                continue
            hashes = [each.tobytes() for each in event.block_hashes]
            each = {(event.medium, event.group, found) for found in hashes}
            if isinstance(event, BlockRemoved):
                assert each <= self.view, "an event removes a block that no event has stored"
                self.view -= each
                continue
            assert not each & self.view, "an event stores a block twice"
            self.view |= each
            if event.medium == "gpu":
                self.check_stored(event, hashes)
            else:
                assert (event.parent_hash, len(event.token_ids)) == (None, 0)
        for medium, pool in (("gpu", self.manager.pool), ("cpu", self.manager.host_pool)):
            num_known = sum(each[0] == medium for each in self.view)
            assert num_known <= (pool.num_cached if pool else 0)
        for g in self.cached_groups:
            size = self.groups[g].block_size
            hashes = [
                each for prefix, each in self.hashes.items() if prefix and len(prefix) % size == 0
            ]
            found = self.manager.cache.find(hashes, g) if hashes else None
            for each, device, host in zip(hashes, *(found or ((), ()))):
                assert (device > 0) == (("gpu", g, each) in self.view)
                assert (host > 0) == (("cpu", g, each) in self.view)

    def check_stored(self, event: BlockStored, hashes: list[bytes]) -> None:
        size, parent = event.block_size, event.parent_hash
        assert len(event.token_ids) == size * len(hashes) and event.hash_algorithm == self.algorithm
        for i, each in enumerate(hashes):
            prefix = self.prefixes[each]
            assert parent == self.parent_of(prefix[:-size])
            assert self.is_worth_caching(self.groups[event.group], len(prefix))
            assert tuple(event.token_ids[i * size : (i + 1) * size].tolist()) == prefix[-size:]
            parent = each

    def is_worth_caching(self, group: ModelGroup, end: int) -> bool:
        """Whether some hit reads the block that ends after these tokens, or a drafter does."""
        if group.keeps_all or group.drafts or self.retention_interval is not None:
            return True
        return group.reads_from(ceil_div(end, self.unit) * self.unit) < end

    def check_plan(self, plan) -> None:
        """Check that each page is written at most once, that no copy reads a page that the plan
        writes, and that a worker's tables then list the blocks of the rows.
        """
        written = [*plan.zero.tolist(), *plan.fresh.tolist()]
        written += [*plan.copy[:, 1].tolist(), *plan.swap_in[:, 1].tolist()]
        assert len(written) == len(set(written))
        assert not set(plan.copy[:, 0].tolist()) & set(written)
        to_host = plan.swap_out[:, 1].tolist()
        assert len(to_host) == len(set(to_host))
        if len(plan.swap_in):
            self.loads[plan.step_id] = {*plan.swap_in[:, 1].tolist()}
        sections = (
            *(plan.clear_rows, plan.append_rows, plan.swap_out, plan.copy, plan.zero, plan.fresh),
            *(plan.swap_in, *plan.append_ids, *plan.replace),
        )
        assert plan.is_empty == (not any(map(len, sections)))
        assert len(set(plan.clear_rows.tolist())) == len(plan.clear_rows)
        assert self.ended <= {*plan.clear_rows.tolist()}, "the table of a row that ended is kept"
        self.ended.clear()
        for row in plan.clear_rows.tolist():
            self.tables[row] = [[] for _ in range(self.num_groups)]
        for g in range(self.num_groups):
            splits, ids = plan.append_splits[g].tolist(), plan.append_ids[g].tolist()
            assert len(splits) == len(plan.append_rows) + 1
            for i, row in enumerate(plan.append_rows.tolist()):
                self.tables[row][g] += ids[splits[i] : splits[i + 1]]
            for row, column, block in plan.replace[g].tolist():
                self.tables[row][g][column] = block
        new = plan.answers.new
        for row, each in self.rows.items():
            if each.by_step and self.state(row) is not RequestState.SWAPPED_OUT:
                assert self.tables[row] == self.blocks(row)
        assert all(row in self.tables for row in new.rows.tolist() if row >= 0)

    def check_slots(self, row: int, start: int, ahead: int, undecided: int, held: list) -> None:
        """Check that the row has blocks for all its tokens from the first one that is read, and no
        other blocks than these.
        """
        stop = self.computed(row) + ahead
        for g, (group, blocks) in enumerate(zip(self.groups, self.blocks(row))):
            size, num_old = group.block_size, len(held[g]) if held else 0
            if group.pages == CIRCULAR:
                assert min(ceil_div(stop, size), group.num_places()) <= len(blocks) and all(blocks)
            if group.pages == STATE and self.computed(row) > 0:
                pages = [block for block in blocks if block]
                most = 1 + (group.num_speculative if self.max_drafts else 0)
                assert 1 + self.rows[row].num_drafts <= len(pages) <= max(most, 1)
                column = (self.computed(row) - self.rows[row].num_drafts - 1) // size
                assert blocks.index(pages[0]) == column
            if group.pages != TOKENS:
                continue
            need = ceil_div(min(stop, LONGEST), size)
            most = max(
                need + ceil_div(self.num_preallocate, size),
                num_old,
                group.reads_from(start) // size,
            )
            assert need <= len(blocks) and (len(blocks) <= most or not held)
            first = group.reads_from(max(start - undecided, 0)) // size
            if group.cached or start == 0:
                assert all(blocks[first:need])
            assert not any(blocks[:first]), "blocks are held that no token reads"

    def check_same_ids(self, row: int, held: dict[int, list[list[int]]]) -> None:
        """Check that the ids of a row changed only where a block left the window or is shared."""
        others = {b for each in held if each != row for blocks in held[each] for b in blocks}
        others |= {block for _, blocks in self.kept for block in blocks}
        for group, old, new in zip(self.groups, held[row], self.blocks(row)):
            for before, after in zip(old, new) if group.pages in (TOKENS, ENCODER) else ():
                assert before == after or not after or before in others, "an id changed"

    def check_published(self, row: int, start: int) -> None:
        """Check that the blocks that a step has filled with known tokens can be hit from now on."""
        each = self.rows[row]
        request = each.request
        if (
            not (self.caching and request.write_cache)
            or each.is_stale
            or request.num_encoder_tokens
        ):
            return
        tokens, stop = request.token_ids.tolist(), min(self.computed(row), request.num_tokens)
        for g, (group, blocks) in enumerate(zip(self.groups, self.blocks(row))):
            size = group.block_size
            if not group.cached or group.pages not in (TOKENS, STATE):
                continue
            if group.sparse and self.retention_interval is not None:
                continue
            for end in range((start // size + 1) * size, stop + 1, size):
                next_hit = ceil_div(end, self.unit) * self.unit
                is_read = group.keeps_all or group.reads_from(next_hit) < end
                if group.pages == STATE:
                    is_read &= end == self.computed(row) - each.num_drafts
                elif not blocks[end // size - 1]:
                    is_read = False  # it has left the window
                if is_read:
                    where = self.manager.cache.find([self.hash_of(tuple(tokens[:end]))], g)
                    assert where.device[0] > 0, f"tokens up to {end} are not cached in group {g}"

    def hit_by_definition(
        self, request: Request, with_host: bool = False, only: list[int] | None = None
    ) -> int:
        """Return the longest prefix of whole blocks for which every group (`only`: of these) has
        cached what the next token reads, and a drafting group also the block after it.
        """
        groups = self.cached_groups if only is None else only
        if not request.read_cache or not self.caching or not groups:
            return 0
        if request.num_encoder_tokens:
            return 0
        tokens = request.token_ids.tolist()
        is_cached = {}
        for g in groups:
            size = self.groups[g].block_size
            ends = range(size, len(tokens) + 1, size)
            hashes = [self.hash_of(tuple(tokens[:end])) for end in ends]
            found = self.manager.cache.find(hashes, g) if hashes else ((), ())
            is_cached[g] = [d > 0 or (with_host and h > 0) for d, h in zip(*found)]

        def has_all(n: int) -> bool:
            for g in groups:
                group = self.groups[g]
                if group.pages == ENCODER:
                    continue
                if not all(
                    is_cached[g][group.reads_from(n) // group.block_size : n // group.block_size]
                ):
                    return False
                after = is_cached[g][n // group.block_size :][:1]
                if group.drafts and n > 0 and after != [True]:
                    return False
            return True

        return max(n for n in range(0, len(tokens), self.whole_unit) if has_all(n))

    def parent_of(self, before: tuple) -> bytes | None:
        """Return the parent hash of a block that follows these tokens.

        With engine hashes, the first block of a sequence has no parent hash.
        """
        if before:
            return self.hash_of(before)
        if self.algorithm == ENGINE:
            return None
        return hash_seed(DEFAULT_SEED, "seed", self.algorithm)

    def hash_of(self, prefix: tuple) -> bytes:
        if prefix not in self.hashes:
            self.hashes[prefix] = self.make_hash(prefix)
            self.prefixes[self.hashes[prefix]] = prefix
        return self.hashes[prefix]

    def make_hash(self, prefix: tuple) -> bytes:
        if self.algorithm == ENGINE:
            return hashlib.blake2b(repr(prefix).encode(), digest_size=self.hash_bytes).digest()
        return hash_blocks(prefix, self.hash_size, algorithm=self.algorithm)[-1].tobytes()


def drive(seed: int, num_operations: int) -> None:
    """Run one seed, which also selects the mix. If the run fails, a note on the error contains the
    call that repeats it.
    """
    try:
        Driver(Chooser(seed), MIXES[seed % len(MIXES)]).run(num_operations)
    except BaseException as error:
        error.add_note(f"found by allocator_driver.drive({seed}, {num_operations})")
        raise
