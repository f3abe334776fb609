# SPDX-License-Identifier: Apache-2.0
"""Makes the same random calls to the manager and to its plain model, and compares every result.

The choices are drawn either by hypothesis, which shrinks failing examples, or from a seeded
generator, which is faster. An error names the seed of the failing run. Add a regression test for
each failure. `make soak SECONDS=600` runs new seeds for 600 seconds.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    Request,
    Status,
    StepReport,
    hash_blocks,
)
from kvcache.allocator import RequestState, check_invariants
from kvcache.allocator.hashing import DEFAULT_ALGORITHM, DEFAULT_SEED, hash_seed
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcache.kinds import AttentionKind, register
from tests.machinery.model import (
    CIRCULAR,
    ENCODER,
    STATE,
    TOKENS,
    ModelGroup,
    ModelManager,
    ModelRequest,
)


@register("test_sinks_and_stride")
class Strided(AttentionKind):
    """A user-defined attention kind. A token attends to the earlier tokens of its own stride and to
    all tokens of the previous stride.
    """

    def __init__(self, *, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens // self.stride - 1, 0) * self.stride


class Chooser:
    """Draws choices from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def pick(self, values: Sequence):
        return values[self.integer(0, len(values) - 1)]

    def chance(self, one_in: int) -> bool:
        return self.integer(1, one_in) == 1


@dataclass(frozen=True)
class Kind:
    spec: Callable[[int], GroupSpec]  # a function of the block size
    model: Callable[[int], ModelGroup]


def _window(window: int) -> Kind:
    return Kind(
        lambda size: GroupSpec("sliding_window", size, {"window": window}),
        lambda size: ModelGroup(size, lambda n: max(n - window + 1, 0), sparse=True),
    )


FULL = Kind(
    lambda size: GroupSpec("full_attention", size),
    lambda size: ModelGroup(size, keeps_all=True),
)
UNCACHED = Kind(
    lambda size: GroupSpec("full_attention", size, cached=False),
    lambda size: ModelGroup(size, keeps_all=True, cached=False),
)
UNCACHED_WINDOW = Kind(
    lambda size: GroupSpec("sliding_window", size, {"window": 6}, cached=False),
    lambda size: ModelGroup(size, lambda n: max(n - 5, 0), cached=False),
)


def _circular(window: int, buffer: int, cached: bool) -> Kind:
    return Kind(
        lambda size: GroupSpec(
            "circular_window", size, {"window": window, "buffer": buffer}, cached=cached
        ),
        lambda size: ModelGroup(
            size,
            lambda n: max(n - window + 1, 0),
            CIRCULAR,
            cached=False,
            buffer=buffer,
            ends_caching=cached,
        ),
    )


def _chunked(chunk: int) -> Kind:
    return Kind(
        lambda size: GroupSpec("chunked_local", size, {"chunk_size": chunk}),
        lambda size: ModelGroup(size, lambda n: n // chunk * chunk),
    )


CHUNKED = _chunked(10)


def _recurrent(num_speculative: int) -> Kind:
    options = {"num_speculative_blocks": num_speculative} if num_speculative else {}
    return Kind(
        lambda size: GroupSpec("recurrent", size, options),
        lambda size: ModelGroup(
            size, lambda n: max(n - 1, 0), STATE, num_speculative=num_speculative, sparse=True
        ),
    )


RECURRENT, RECURRENT_1, RECURRENT_3 = _recurrent(0), _recurrent(1), _recurrent(3)
CROSS = Kind(
    lambda size: GroupSpec("cross_attention", size),
    lambda size: ModelGroup(size, pages=ENCODER),
)
STRIDED = Kind(
    lambda size: GroupSpec("test_sinks_and_stride", size, {"stride": 6}),
    lambda size: ModelGroup(size, lambda n: max(n // 6 - 1, 0) * 6),
)

# Manager configurations to drive: (kinds with block sizes, hash block size).
MIXES = [
    ([(FULL, 4)], None),
    ([(_window(6), 4)], None),
    ([(FULL, 4), (_window(6), 4)], None),
    ([(FULL, 4), (_window(5), 2), (CHUNKED, 4)], None),
    ([(FULL, 4), (RECURRENT, 4)], None),
    ([(RECURRENT, 4), (_window(9), 2), (RECURRENT, 4)], None),
    ([(FULL, 8)], 2),
    ([(FULL, 8), (_window(5), 4)], 2),
    ([(CHUNKED, 8), (_window(7), 8)], 4),
    ([(FULL, 8), (RECURRENT, 4)], 2),
    ([(FULL, 4), (CROSS, 2)], None),
    ([(STRIDED, 4), (FULL, 2)], None),
    ([(_window(1), 2), (STRIDED, 2)], 1),
    ([(FULL, 8), (FULL, 12)], 2),
    ([(FULL, 6), (_window(7), 4)], None),
    ([(FULL, 12), (RECURRENT, 8)], 2),
    ([(RECURRENT, 12), (_window(5), 4), (FULL, 8)], 2),
    ([(RECURRENT, 8), (RECURRENT, 6)], 2),
    ([(FULL, 4), (UNCACHED, 6)], None),
    ([(FULL, 8), (UNCACHED_WINDOW, 4), (RECURRENT, 4)], 2),
    ([(UNCACHED, 4), (UNCACHED_WINDOW, 2)], None),
    ([(FULL, 4), (_circular(6, 13, True), 2)], None),
    ([(FULL, 8), (_circular(5, 12, False), 4), (_window(6), 4)], 2),
    ([(FULL, 4), (RECURRENT_1, 4)], None),
    ([(FULL, 4), (RECURRENT_3, 4)], None),
    ([(RECURRENT_3, 2), (_window(9), 2), (RECURRENT_3, 4)], None),
    ([(RECURRENT_3, 1), (FULL, 2)], None),
    ([(FULL, 8), (RECURRENT_3, 4), (RECURRENT_1, 6)], 2),
    ([(RECURRENT_3, 12), (_window(5), 4), (FULL, 8)], 2),
    ([(FULL, 4), (_chunked(3), 8)], 1),
    ([(FULL, 2), (_window(6), 8)], None),
    ([(FULL, 2), (RECURRENT, 4)], 2),
]


def groups_of(
    choose: Chooser, kinds: Sequence[tuple[Kind, int]]
) -> tuple[list[GroupSpec], list[ModelGroup]]:
    """Return the groups of a mix and the matching model groups. Some groups are randomly marked as
    used by a drafter.
    """
    specs, groups = [], []
    for kind, size in kinds:
        group = kind.model(size)
        drafts = group.pages == TOKENS and choose.chance(8)
        options = {"drafts": drafts, "transferred": not choose.chance(8)}
        specs.append(replace(kind.spec(size), **options))
        groups.append(replace(group, **options))
    return specs, groups


ENGINE = "engine:blake2b"  # block hashes are supplied with each request
LONGEST = 40
OPERATIONS_PER_SEED = 500


class Driver:
    """The state of a run: a manager, its model, the block tables of a simulated worker, and the
    live requests.
    """

    def __init__(self, choose: Chooser, mix: tuple | None = None) -> None:
        self.choose = choose
        kinds, hash_block_size = choose.pick(MIXES) if mix is None else mix
        num_blocks = choose.integer(6, 20) * len(kinds)
        options = {
            "max_num_reqs": choose.integer(2, 6),
            "num_preallocate_tokens": choose.pick([0, 0, 5, 12]),
            "hash_block_size": hash_block_size,
            "fence_frees": choose.chance(4),
            "enable_caching": not choose.chance(10),
        }
        specs, groups = groups_of(choose, kinds)
        if choose.chance(3) and any(group.sparse and group.cached for group in groups):
            unit = ModelManager(groups, 2, LONGEST, hash_block_size=hash_block_size).unit
            options["retention_interval"] = unit * choose.pick([0, 0, 1, 2, 3])
        if choose.chance(2):
            options |= {
                "num_host_blocks": choose.integer(2, 30) * len(kinds),
                "host_write": choose.pick(["back", "back", "through"]),
            }
        self.algorithm = choose.pick([DEFAULT_ALGORITHM, "xxh3_128_cbor", ENGINE])
        self.hash_bytes = choose.pick([5, 16, 31, 32]) if self.algorithm == ENGINE else None
        watermark = choose.pick([0.0, 0.0, 0.2])
        prefault = choose.chance(2)

        def make_manager() -> KVCacheManager:
            return KVCacheManager.for_groups(
                specs,
                num_blocks,
                LONGEST,
                watermark=watermark,
                enable_events=True,
                prefault=prefault,
                hash_algorithm=self.algorithm,
                hash_bytes=self.hash_bytes,
                **options,
            )

        self.make_manager = make_manager
        self.manager = make_manager()
        self.model = ModelManager(
            groups,
            num_blocks,
            LONGEST,
            watermark_blocks=int(watermark * num_blocks),
            **options,
        )
        self.has_state = any(group.pages == STATE for group in self.model.groups)
        self.takes_external = not any(  # same condition as the native `is_cached`
            group.cached and not group.transferred and group.pages not in (ENCODER, CIRCULAR)
            for group in groups
        )
        self.has_encoder = any(group.pages == ENCODER for group in self.model.groups)
        self.num_groups = len(kinds)
        self.requests: dict[int, tuple[Request, ModelRequest]] = {}  # row -> (request, its model)
        self.waiting: list[tuple[Request, ModelRequest]] = []
        self.kept: list[Request] = []  # freed requests whose blocks are kept for a connector
        self.tables: dict[int, list[list[int]]] = {}
        self.before: dict[int, dict] = {}  # step -> block tables before that step
        self.fresh: dict[int, set[int]] = {}  # step -> new blocks that its plan listed
        self.aborted: set[int] = set()  # new blocks of plans aborted since the last step
        self.count = 0
        self.hashes: dict[tuple, bytes] = {}  # prefix -> hash
        self.operations = [
            (10, self.step),
            (3, self.free),
            (3, self.tokens_arrive),
            (2 if self.model.host is None else 5, self.report),
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
            self.operations += [
                (2, self.admit_alone),
                (3, self.extend),
                (2, self.advance),
            ]
        if not self.has_state or self.model.max_drafts:
            self.operations += [(1, self.reject)]
        self.weighted = [each for weight, each in self.operations for _ in range(weight)]

    def run(self, num_operations: int) -> None:
        """Run random operations and compare the full state after each one."""
        for _ in range(num_operations):
            self.choose.pick(self.weighted)()
            self.compare()

    # Requests --------------------------------------------------------------------------------------

    def new_request(self) -> tuple[Request, ModelRequest]:
        """Return a new request or repeat an earlier one."""
        choose = self.choose
        again = [pair for pair in self.waiting if len(pair[1].tokens) <= LONGEST]
        if again and choose.chance(2):
            pair = choose.pick(again)
            self.waiting.remove(pair)
            return pair
        length, differs = choose.integer(1, LONGEST), choose.pick([0, 3, 7, 16, 99, 99, 99])
        tokens = [self.token(i, differs) for i in range(length)]
        reads, writes = choose.pick([(1, 1), (1, 1), (1, 1), (0, 1), (1, 0)])
        encoder = choose.pick([0, 3, 5]) if self.has_encoder else 0
        request = self.make_request(
            tokens,
            read_cache=bool(reads),
            write_cache=bool(writes),
            num_encoder_tokens=encoder,
        )
        can = not encoder
        return request, ModelRequest(tokens, bool(reads) and can, bool(writes) and can, encoder)

    def make_request(self, tokens: list[int], **options) -> Request:
        """Make a request. In a mix with engine hashes, supply the request's block hashes."""
        self.count += 1
        hashes = [] if self.algorithm == ENGINE else None
        request = Request(f"r{self.count}", tokens, block_hashes=hashes, **options)
        self.extend_hashes(request, tokens)
        return request

    def extend_hashes(self, request: Request, tokens: list[int]) -> None:
        """Append the hashes of new tokens to the request, as an engine does before it reports the
        tokens.
        """
        if request.block_hashes is not None:
            size = self.model.hash_size
            for n in range(len(request.block_hashes) + 1, len(tokens) // size + 1):
                request.block_hashes.append(self.hash_of(tuple(tokens[: n * size])))

    @staticmethod
    def token(position: int, differs: int) -> int:
        return position + (1000 if position >= differs else 0)

    def later_tokens(self, model: ModelRequest, n: int) -> list[int]:
        """Return up to `n` new tokens.

        The sequence may be one token longer than max_model_len, because the last sampled token is
        not computed.
        """
        n = min(n, LONGEST + 1 - len(model.tokens))
        return [self.token(len(model.tokens) + i, 99) for i in range(n)]

    def rows(self, by_step: bool) -> dict[int, int]:
        """Return, for each row that is not full, the number of tokens that can still be added."""
        rooms = {
            row: LONGEST - self.model.rows[row].num_computed
            for row in sorted(self.requests)
            if self.model.rows[row].by_step == by_step and not self.model.rows[row].receiving
        }
        return {row: room for row, room in rooms.items() if room}

    def record_row(self, pair: tuple, row: int) -> None:
        """Record whether the request waits or runs, and in which row."""
        if row >= 0:
            self.requests[row] = pair
        else:
            self.waiting.append(pair)

    # Operations ------------------------------------------------------------------------------------

    def step(self) -> None:
        choose = self.choose
        rooms = self.rows(by_step=True)
        rows = [row for row in rooms if not choose.chance(3)]
        leaving = []
        if self.model.host:
            leaving = [
                row
                for row in sorted(self.requests)
                if self.model.rows[row].by_step
                and not self.model.rows[row].on_host
                and not self.model.rows[row].receiving
                and choose.chance(6)
            ]
            rows = [row for row in rows if row not in leaving]
        if choose.chance(2):
            rows.reverse()
        counts = [
            choose.integer(0, min(rooms[row], choose.pick([1, 1, 4, LONGEST]))) for row in rows
        ]
        counts = [0 if choose.chance(12) else count for count in counts]
        rejected = [0] * len(rows)
        if choose.chance(3):
            rejected = [choose.integer(0, min(3, self.model.most_rejected(row))) for row in rows]
        ids = [[] for _ in rows]
        if choose.chance(2):
            ids = [
                self.later_tokens(self.requests[row][1], choose.pick([0, 1, 1, 3])) for row in rows
            ]
        counts = [
            min(
                count,
                self.most_with_drafts(row, self.model.rows[row].num_computed - back, len(new)),
            )
            for row, count, back, new in zip(rows, counts, rejected, ids)
        ]
        counts = [
            count if self.model.is_decided(row, back, len(new)) else 0
            for row, count, back, new in zip(rows, counts, rejected, ids)
        ]
        pairs = [self.new_request() for _ in range(choose.pick([0, 0, 1, 1, 2, 3]))]
        limits = [choose.pick([1, 4, 8, LONGEST, LONGEST]) for _ in pairs]
        ahead = [choose.pick([0, 0, 0, 3, 9]) for _ in range(len(rows) + len(pairs))]
        most, undecided = [], []
        for row, back, new in zip(rows, rejected, ids):
            state = self.model.rows[row]
            start, known = state.num_computed - back, len(state.request.tokens) + len(new)
            undecided.append(self.model.undecided(row, start, known))
            most.append(self.model.most_slots(start, undecided[-1]))
        most += [self.model.most_slots(0)] * len(pairs)
        reserved = choose.pick([0, 0, 0, 4])
        caps = [choose.pick([0, 2, 99, 99]) for _ in pairs]
        reads, own_reads = self.reads_of_call(pairs)
        external = [self.num_external(model, cap) for (_, model), cap in zip(pairs, caps)]
        delays = [n > 0 and choose.chance(2) for n in external]
        for i, ((_, model), cap, n) in enumerate(zip(pairs, caps, external), len(rows)):
            if n > 0:
                most[i] = self.model.most_slots(self.model.capped_hit(model, cap)[0] + n)
        counts = [min(count, n) for count, n in zip(counts, most)]
        limits = [min(limit, n) for limit, n in zip(limits, most[len(rows) :])]
        limits = [0 if delay else limit for limit, delay in zip(limits, delays)]
        asked = [*counts, *limits]
        ahead = [min(each, n - count) for each, n, count in zip(ahead, most, asked)]
        self.before[self.model.num_steps] = copy.deepcopy(self.tables)
        for row, new_ids in zip(rows, ids):
            request, model = self.requests[row]
            self.extend_hashes(request, model.tokens + new_ids)
        plan = self.manager.step(
            rows,
            counts,
            new=[
                Admit(
                    request,
                    limits[i],
                    External(external[i], delays[i]),
                    ahead[len(rows) + i],
                    reserved,
                    caps[i],
                    None if reads is None else reads[i],
                )
                for i, (request, _) in enumerate(pairs)
            ],
            token_ids=[token for each in ids for token in each],
            num_token_ids=[len(each) for each in ids],
            num_rejected_tokens=rejected,
            num_lookahead_tokens=ahead[: len(rows)],
            swap_out=leaving,
        )
        is_alone = self.hold_all(rows) and not any(undecided)
        models = [model for _, model in pairs]
        known = [self.requests[row][1] for row in rows] + models
        want = self.model.step(
            rows,
            counts,
            ids,
            rejected,
            models,
            limits,
            ahead,
            reserved,
            leaving,
            caps,
            external,
            delays,
        )
        for model, own in zip(models, own_reads):
            model.reads = own
        assert plan.rows.tolist() == want.rows
        assert plan.status.tolist() == want.status
        assert plan.num_computed_tokens.tolist() == want.computed
        assert plan.num_tokens.tolist() == want.tokens
        assert (plan.num_running, plan.num_leaving) == (len(rows), len(leaving))
        assert plan.is_empty == self.changes_nothing(plan)
        assert plan.clear_rows.tolist() == sorted(want.clear)
        assert sorted(map(tuple, plan.copy.tolist())) == sorted(want.copy)
        assert plan.zero.tolist() == want.zero
        self.check_fresh(plan, want.given)
        assert list(map(tuple, plan.swap_out.tolist())) == want.swap_out
        assert list(map(tuple, plan.swap_in.tolist())) == want.swap_in
        self.check_destinations(plan)
        self.apply(plan)
        answers = [*range(len(rows)), *range(len(rows) + len(leaving), len(want.status))]
        starts = [[want.computed[i]] for i in range(len(rows))] + want.tried
        has_state = any(group.pages == STATE for group in self.model.groups)
        for i, tried, model, count, lookahead in zip(answers, starts, known, asked, ahead):
            for start in tried if want.status[i] == Status.NEVER else ():
                if has_state and start > 0 and i >= len(rows):
                    continue  # a state from a hit or an external source needs one more page
                most = LONGEST if i < len(rows) else len(model.tokens)
                stop = min(start + max(count, 1), most)
                self.check_never(model, start, stop, stop - start, lookahead)
        if is_alone and len(answers) == 1 and not leaving and not reserved and not any(external):
            assert want.status != [Status.WAIT], "a request that is alone in the pool waits forever"
        for pair, row in zip(pairs, want.rows[len(rows) + len(leaving) :]):
            self.record_row(pair, row)

    def hold_all(self, rows: list[int]) -> bool:
        """Return whether only these rows hold blocks and released blocks become free
        immediately.
        """
        model = self.model
        is_fenced = model.fence_frees and model.last_issued >= model.num_completed
        others = [*model.kept.values(), *model.fences, *model.loads]
        return len(rows) == len(model.rows) and not others and not is_fenced

    def most_with_drafts(self, row: int, start: int, num_ids: int = 0) -> int:
        """Return the maximum number of known tokens and drafts that a step from `start` computes."""
        if not self.model.max_drafts:
            return LONGEST
        known = len(self.requests[row][1].tokens) + num_ids
        return max(known - start, 1) + self.model.max_drafts

    def check_never(
        self, model: ModelRequest, start: int, stop: int, chunk: int, lookahead: int
    ) -> None:
        """Check that a request with the status NEVER does not fit into an empty manager either.

        The request is computed token by token up to `start`, and then in chunks.
        """
        if self.model.max_drafts and (lookahead or stop > len(model.tokens)):
            return  # known tokens need no draft pages
        tokens = model.tokens[:stop] + [0] * (stop - len(model.tokens))
        request = self.make_request(tokens, num_encoder_tokens=model.num_encoder_tokens)
        manager, n = self.make_manager(), 0
        while n < stop:
            count, ahead = (1, 0) if n < start else (min(chunk, stop - n), lookahead)
            if count + ahead > self.model.most_slots(n):
                return  # the manager rejects tokens that exceed the row's slots
            rows = ([0], [count]) if n else ()
            new = [] if n else [Admit(request, count, num_lookahead_tokens=ahead)]
            plan = manager.step(*rows, new=new, num_lookahead_tokens=ahead)
            if plan.status[0] != Status.SERVED:
                return
            manager.report(StepReport(plan.step_id, completed=True))
            n += count
        raise AssertionError(
            f"the status was NEVER, but the request fits: {start} to {stop} by {chunk}"
        )

    def num_external(self, model: ModelRequest, cap: int = 0) -> int:
        """Choose how many tokens after the request's hit are external."""
        if not self.takes_external or not model.reads:
            return 0
        most = len(model.tokens) - 1 - self.model.capped_hit(model, cap)[0]
        return self.choose.integer(1, most) if most > 0 and self.choose.chance(4) else 0

    def finish_receiving(self) -> None:
        rows = [row for row in sorted(self.requests) if self.model.rows[row].receiving]
        if not rows:
            return
        row = self.choose.pick(rows)
        state, request = self.model.rows[row], self.requests[row][0]
        most = state.num_computed - state.num_hit
        with pytest.raises(ValueError, match=f"expected 0 to {most}"):
            self.manager.finish_receiving(request, most + 1)
        count = self.choose.pick([most, self.choose.integer(0, most)])
        found = self.manager.finish_receiving(request, None if count == most else count)
        assert found == self.model.finish_receiving(row, count)

    def release_blocks(self) -> None:
        if self.kept:
            request = self.kept.pop(self.choose.integer(0, len(self.kept) - 1))
            self.manager.release_blocks(request)
            self.model.release_kept(request.request_id)

    @staticmethod
    def changes_nothing(plan) -> bool:
        sections = (
            plan.clear_rows,
            plan.append_rows,
            plan.swap_out,
            plan.copy,
            plan.zero,
            plan.fresh,
            plan.swap_in,
        )
        return not any(map(len, [*sections, *plan.append_ids, *plan.replace]))

    def reads_of_call(self, pairs: list[tuple]) -> tuple[list[bool | None] | None, list[bool]]:
        """Choose `read_cache` for a call. Return it and the previous setting of each request."""
        own = [model.reads for _, model in pairs]
        if not self.choose.chance(4):
            return None, own
        reads = [self.choose.pick([None, True, False]) for _ in pairs]
        for (_, model), value in zip(pairs, reads):
            if value is not None:
                model.reads = value and not model.num_encoder_tokens
        return reads, own

    def check_destinations(self, plan) -> None:
        """Check that each page is written at most once and that no copy reads a page written by the
        plan.
        """
        written = [*plan.zero.tolist(), *plan.fresh.tolist()]
        written += [*plan.copy[:, 1].tolist(), *plan.swap_in[:, 1].tolist()]
        assert len(written) == len(set(written))
        assert not set(plan.copy[:, 0].tolist()) & set(written)
        to_host = plan.swap_out[:, 1].tolist()
        assert len(to_host) == len(set(to_host))
        assert not set(to_host) & {load["host"] for load in self.model.loads}

    def check_fresh(self, plan, given: list[int]) -> None:
        """Check that `fresh` lists the blocks that rows were given, unless the plan fills them, and
        otherwise only blocks that an aborted plan gave.
        """
        filled = {*plan.zero.tolist(), *plan.copy[:, 1].tolist(), *plan.swap_in[:, 1].tolist()}
        fresh = set(plan.fresh.tolist())
        assert set(given) - filled <= fresh
        assert fresh - set(given) <= self.aborted
        self.aborted, self.fresh[plan.step_id] = set(), fresh

    def apply(self, plan) -> None:
        for row in plan.clear_rows.tolist():
            self.tables[row] = [[] for _ in range(self.num_groups)]
        for g in range(self.num_groups):
            splits, ids = plan.append_splits[g].tolist(), plan.append_ids[g].tolist()
            assert len(splits) == len(plan.append_rows) + 1
            assert max(ids, default=0) < self.model.num_blocks
            for i, row in enumerate(plan.append_rows.tolist()):
                assert not self.model.rows[row].on_host
                self.tables[row][g] += ids[splits[i] : splits[i + 1]]
            for row, column, block in plan.replace[g].tolist():
                assert column < len(self.tables[row][g])
                self.tables[row][g][column] = block

    def fork(self) -> None:
        forkable = [
            row
            for row in sorted(self.requests)
            if self.model.rows[row].by_step
            and not self.model.rows[row].on_host
            and not self.model.rows[row].receiving
        ]
        if not forkable:
            return
        row = self.choose.pick(forkable)
        state, (parent, known) = self.model.rows[row], self.requests[row]
        num_shared = state.num_computed
        differs = self.choose.pick([num_shared, 99])
        length = max(1, min(num_shared + self.choose.integer(0, 5), LONGEST))
        tokens = known.tokens[:num_shared]
        tokens += [self.token(i, differs) for i in range(len(tokens), length)]
        writes = bool(self.choose.integer(0, 3))
        encoder = known.num_encoder_tokens
        request = self.make_request(tokens, write_cache=writes, num_encoder_tokens=encoder)
        if len(known.tokens) < num_shared:  # the shared tokens include unconfirmed drafts
            with pytest.raises(ValueError, match="are known"):
                self.manager.fork(parent, request)
            return
        model = ModelRequest(tokens, not encoder, writes and not encoder, encoder)
        found = self.manager.fork(parent, request)
        assert found == self.model.fork(row, model)
        if found >= 0:
            self.requests[found] = request, model

    def admit_alone(self) -> None:
        request, model = pair = self.new_request()
        # The model allocates after whole-block hits. Partial-block hits are looked up but not used.
        inside = self.manager.cache.find_prefix(request).num_tokens
        ids, num_hit, num_shared = self.manager.cache.find_prefix(request, whole_blocks=True)
        assert num_shared == self.model.hit_length(model, only_shared=True)
        assert num_hit == self.model.hit_length(model)
        # If a block has several copies, a drafting group may not find the next hash block in one
        # copy, but find the whole block in another copy.
        assert num_hit <= inside or any(each.drafts for each in self.model.groups)
        assert inside <= self.model.hit_length(model, partial=True)
        want = [held.blocks for held in self.model.hit_blocks(model, num_hit)]
        ids = [ids] if self.num_groups == 1 else ids
        assert [each.tolist() for each in ids] == want
        if self.choose.chance(4):
            num_hit, ids = 0, [[] for _ in ids]
        most = len(model.tokens) - 1 - num_hit
        can = most > 0 and self.takes_external and model.reads
        external = self.choose.integer(1, most) if can and self.choose.chance(4) else 0
        delay = external > 0 and self.choose.chance(2)
        slots = self.model.most_slots(num_hit + external if external else 0)
        count = 0 if delay else self.choose.integer(1, min(LONGEST - num_hit - external, slots))
        ahead = min(self.choose.pick([0, 0, 3]), slots - count)
        computed = ids[0] if self.num_groups == 1 else ids
        num_prompt = self.choose.pick([None, None, self.choose.integer(1, len(model.tokens))])
        num_shared = self.choose.pick([0, num_shared, num_shared])
        found = self.manager.admit(
            Admit(
                request,
                num_tokens=count,
                external=External(external, delayed=delay),
                num_lookahead_tokens=ahead,
                num_prompt_tokens=num_prompt,
                num_shared_tokens=num_shared,
            ),
            computed,
        )
        wanted = self.model.allocate(
            model, count, num_hit, ahead, external, delay, num_shared, num_prompt
        )
        assert (found is None) == (wanted is None)
        if wanted is not None:
            found = [found] if self.num_groups == 1 else found
            assert (self.manager.row(request), [each.tolist() for each in found]) == wanted
        self.record_row(pair, -1 if wanted is None else wanted[0])

    def extend(self) -> None:
        rooms = self.rows(by_step=False)
        if not rooms:
            return
        row = self.choose.pick([*rooms])
        state = self.model.rows[row]
        start, known = state.num_computed, len(state.request.tokens)
        most = min(
            rooms[row], self.model.most_slots(start, self.model.undecided(row, start, known))
        )
        if most < 1 or not self.model.is_decided(row, 0, 0):
            return
        count = self.choose.integer(1, most)
        ahead = min(self.choose.pick([0, 0, 3]), most - count)
        found = self.manager.extend(self.requests[row][0], count, ahead)
        want = self.model.append(row, count, ahead)
        if found is not None:
            found = [each.tolist() for each in ([found] if self.num_groups == 1 else found)]
        assert found == want

    def advance(self) -> None:
        choose, model = self.choose, self.model
        rows = [row for row in self.rows(by_step=False) if choose.chance(2)]
        spans, ahead = [], choose.pick([0, 0, 3])
        for row in rows:
            computed = model.rows[row].num_computed
            most = min(model.num_slots(row), LONGEST - 1)
            start = choose.integer(computed - model.most_undone(row), max(most, computed))
            count = choose.integer(
                1, max(min(9, LONGEST - start, model.most_slots(start) - ahead), 1)
            )
            spans.append((start, start + count))
        if any(
            stop > LONGEST or stop - start + ahead > model.most_slots(start)
            for start, stop in spans
        ):
            return
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        later = [
            self.later_tokens(model.rows[row].request, choose.pick([0, 0, 2, 5])) for row in rows
        ]
        for i, (row, start) in enumerate(zip(rows, starts)):
            state = model.rows[row]
            if start < min(state.num_computed, len(state.request.tokens)):
                later[i] = []  # known tokens are computed again
        for row, more in zip(rows, later):
            request, known = self.requests[row]
            self.extend_hashes(request, known.tokens + more)
        flat, counts = [each for more in later for each in more], [len(more) for more in later]
        found = self.manager.advance(
            rows, starts, stops, ahead, token_ids=flat, num_token_ids=counts
        )
        for row, start, stop, more, answer in zip(rows, starts, stops, later, found):
            known = model.rows[row].request.tokens
            known.extend(more)
            want = model.append(row, stop - start, ahead, start)
            if want is None:
                del known[len(known) - len(more) :]
            else:
                want = tuple(want) if any(want) else ()
            assert answer == want

    def reject(self) -> None:
        if not self.requests:
            return
        row = self.choose.pick(sorted(self.requests))
        count = self.choose.integer(0, self.model.most_rejected(row))
        self.manager.reject_tokens(self.requests[row][0], count)
        self.model.reject(row, count)

    def tokens_arrive(self) -> None:
        pairs = [*self.requests.values(), *self.waiting]
        if pairs:
            request, model = self.choose.pick(pairs)
            tokens = self.later_tokens(model, self.choose.integer(1, 4))
            self.extend_hashes(request, model.tokens + tokens)
            request.append_tokens(tokens)
            model.tokens.extend(tokens)

    def free(self) -> None:
        pairs = []
        for _ in range(min(len(self.requests), self.choose.pick([1, 1, 1, 2, 3]))):
            row = self.choose.pick(sorted(self.requests))
            pair, state = self.requests[row], self.model.rows[row]
            keep = not state.on_host and pair[0] not in self.kept
            keep &= state.receiving or self.choose.chance(5)
            if state.receiving or keep:  # one request per call here; the other rows are freed below
                if keep:
                    del self.requests[row]
                    self.manager.free(pair[0], keep_blocks=True)
                    self.model.free(row, keep_as=pair[0].request_id)
                    self.kept.append(pair[0])
                    self.waiting.append(pair)
                break
            pairs.append((row, self.requests.pop(row)))
        self.manager.free(*(pair[0] for _, pair in pairs))
        for row, pair in pairs:
            self.model.free(row)
            self.waiting.append(pair)

    def report(self) -> None:
        if self.model.num_steps == 0:
            return
        least = max(self.model.num_completed, self.model.num_steps - 60)
        if least >= self.model.num_steps:
            return
        step = self.choose.integer(least, self.model.num_steps - 1)
        failed = self.some_blocks() if self.choose.chance(4) else []
        pages = []
        if self.model.host and self.choose.chance(6):
            pages = [self.choose.integer(1, self.model.host.num_blocks - 1)]
        found = self.manager.report(StepReport(step, True, failed, pages))
        want = self.model.invalidate(failed, pages) if failed or pages else {}
        self.model.complete(step)
        assert found == self.by_request(want)

    def abort(self) -> None:
        """Abort a step that is in flight or has already been aborted."""
        least = max(self.model.num_completed, self.model.num_steps - 4)
        if least >= self.model.num_steps:
            return
        step = self.choose.integer(least, self.model.num_steps - 1)
        steps = {each["id"] for each in self.model.in_flight}
        self.aborted.update(*(self.fresh[each] for each in steps if each >= step and step in steps))
        found = self.manager.report(StepReport(step, completed=False))
        assert found == self.by_request(self.model.abort(step))
        if step in steps and self.choose.chance(2):  # the aborted plans were never applied
            self.tables = copy.deepcopy(self.before[step])
            for row in self.requests:
                self.tables.setdefault(row, [[] for _ in range(self.num_groups)])

    def invalidate(self) -> None:
        ids = self.some_blocks()
        found = self.manager.invalidate(ids)
        assert found == self.by_request(self.model.invalidate(ids))

    def some_blocks(self) -> list[int]:
        """Return some blocks: arbitrary ones, those of a request, or recently dropped ones."""
        choose = self.choose
        dropped = [block for step in self.model.in_flight for _, _, block, _ in step["dropped"]]
        if dropped and choose.chance(3):
            return [choose.pick(dropped[-3:])]
        rows = [row for row in sorted(self.requests) if not self.model.rows[row].on_host]
        if choose.chance(2) or not rows:
            return [choose.integer(1, self.model.num_blocks - 1)]
        row, group = choose.pick(rows), choose.integer(0, self.num_groups - 1)
        return [each for each in self.model.blocks(row, group) if each][-2:]

    def by_request(self, affected: dict[int, int]) -> dict[str, int]:
        return {self.requests[row][0].request_id: n for row, n in affected.items()}

    def reset(self) -> None:
        if self.choose.chance(3):
            self.manager.cache.start_epoch()
            self.model.start_epoch()
        else:
            assert self.manager.cache.reset() == self.model.reset()

    def ask(self) -> None:
        """Call the manager's query methods. `compare` then checks that they changed nothing."""
        request, model = pair = self.new_request()
        self.waiting.append(pair)
        num_hit = self.model.hit_length(model, partial=True)
        tokens = self.manager.cache.cached_tokens(request)
        assert tokens.on_device == self.model.hit_length(model)
        assert tokens.with_host == self.model.hit_length(model, with_host=True)
        count = self.choose.integer(1, LONGEST)
        found = self.manager.checkpoint_tokens(request, count)
        assert found == self.model.checkpoint_tokens(model, None, count)
        if self.requests:
            row = self.choose.pick(sorted(self.requests))
            running, known = self.requests[row]
            found = self.manager.checkpoint_tokens(running, count)
            assert found == self.model.checkpoint_tokens(known, row, count)
        trial, chunk = copy.deepcopy(self.model), self.choose.pick([1, 3, 8, LONGEST])
        cap = self.choose.pick([0, 99])
        external = self.num_external(model, cap)
        start = self.model.capped_hit(model, cap)[0] + external if external else 0
        slots = self.model.most_slots(start)
        chunk = min(chunk, slots)
        ahead, reserved = self.choose.pick([0, 0, 3]), self.choose.pick([0, 0, 4])
        ahead = min(ahead, slots - chunk)
        ask = Admit(request, chunk, None, ahead, reserved, cap)
        asked = [], [], [], [], [model], [chunk], [ahead], reserved, (), [cap], [external]
        status = trial.step(*asked).status[0]
        assert self.manager.would_fit(ask._replace(external=External(external))) == status
        status, tried = self.model.would_fit_whole(model, chunk, ahead, reserved, cap)
        assert self.manager.would_fit(ask, whole=True) == status
        for start in tried if status == Status.NEVER else ():
            self.check_never(model, start, len(model.tokens), chunk, ahead)
        rooms = self.rows(by_step=True) | self.rows(by_step=False)
        on_host = [row for row in sorted(rooms) if self.model.rows[row].on_host]
        for row in [self.choose.pick(sorted(rooms)), *on_host] if rooms else []:
            slots = self.model.most_slots(self.model.rows[row].num_computed)
            drafts = self.most_with_drafts(row, self.model.rows[row].num_computed)
            count = self.choose.integer(1, min(rooms[row], slots, drafts))
            ahead = min(ahead, slots - count)
            status = copy.deepcopy(self.model).would_extend(row, count, ahead)
            found = self.manager.would_fit(
                Admit(self.requests[row][0], num_tokens=count, num_lookahead_tokens=ahead)
            )
            assert found == status
        assert self.model.hit_length(model, partial=True) == num_hit
        rows = [row for row in sorted(self.requests) if not self.model.rows[row].on_host]
        if rows:
            row = self.choose.pick(rows)
            group = self.choose.integer(0, self.num_groups - 1)
            running = self.choose.integer(1, 3)
            found = self.manager.cache.num_common_prefix_blocks(
                self.requests[row][0], running, group
            )
            assert found == self.model.num_common_prefix_blocks(row, running, group)

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
            lambda: manager.invalidate([self.model.num_blocks]),
            lambda: manager.abort(self.model.num_steps),
            lambda: manager.report(StepReport(self.model.num_steps, completed=True)),
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
        receiving = [row for row in self.requests if self.model.rows[row].receiving]
        if receiving:
            receiver = self.requests[receiving[0]][0]
            calls += [
                lambda: manager.step([receiving[0]], [1]),
                lambda: manager.extend(receiver, 1),
                lambda: manager.fork(receiver, Request("child", receiver.token_ids)),
                lambda: manager.finish_receiving(receiver, -1),
                lambda: manager.finish_receiving(receiver, LONGEST),
                lambda: manager.free(receiver),
                lambda: manager.step(swap_out=[receiving[0]]),
            ]
        on_host = [row for row in self.requests if self.model.rows[row].on_host]
        if on_host:
            away = self.requests[on_host[0]][0]
            calls += [
                lambda: manager.step(swap_out=[on_host[0]]),
                lambda: manager.fork(away, Request("child", away.token_ids)),
                lambda: manager.block_ids(away),
                lambda: manager.cache.num_common_prefix_blocks(away, 1),
            ]
        rows = self.rows(by_step=True)
        if rows:
            row = self.choose.pick([*rows])
            most = self.model.most_rejected(row)
            calls += [
                lambda: manager.step([row, row], [1, 1]),
                lambda: manager.step([row], [-1]),
                lambda: manager.step([row], [rows[row] + 1]),
                lambda: manager.step([row], [1], token_ids=[5, 6]),
                lambda: manager.step([row], [1], token_ids=[5] * 60, num_token_ids=[60]),
                lambda: manager.step([row], [1], num_rejected_tokens=[most + 1]),
                lambda: manager.step([row], [1], new=[self.requests[row][0]]),
                lambda: manager.extend(self.requests[row][0], 1),
                lambda: manager.fork(self.requests[row][0], self.requests[row][0]),
                lambda: manager.step([row], [1], swap_out=[row]),
            ]
            drafts = self.most_with_drafts(row, self.model.rows[row].num_computed)
            if drafts < rows[row]:
                calls.append(lambda: manager.step([row], [drafts + 1]))
            if self.algorithm != ENGINE:  # with engine hashes, the given hashes define the content
                calls.append(lambda: manager.step([row], [1], token_ids=[-1]))
        others = self.rows(by_step=False)
        if others:
            row2 = self.choose.pick([*others])
            calls += [
                lambda: manager.step([row2], [1]),
                lambda: manager.extend(self.requests[row2][0], others[row2] + 1),
                lambda: manager.step(swap_out=[row2]),
                lambda: manager.fork(
                    self.requests[row2][0], Request("child", self.requests[row2][0].token_ids)
                ),
            ]
        with pytest.raises(ValueError):
            self.choose.pick(calls)()

    # Comparison ------------------------------------------------------------------------------------

    def compare(self) -> None:
        manager, model = self.manager, self.model
        check_invariants(manager)
        pools = [(manager.pool, model.pool)]
        if model.host:
            pools.append((manager.host_pool, model.host))
            assert manager.pool.num_loading == len(model.loads)
        for pool, known in pools:
            assert pool.num_free == known.num_free()
            assert pool.num_cached == len(known.content)
        assert manager.pool.num_kept == sum(map(len, model.kept.values()))
        assert manager.pool.num_fenced == sum(len(blocks) for _, blocks in model.fences)
        stats = manager.cache.stats
        assert (stats.query_tokens, stats.hit_tokens) == (model.query_tokens, model.hit_tokens)
        assert stats.host_hit_tokens == model.host_hit_tokens
        for row, (request, known) in self.requests.items():
            state = model.rows[row]
            assert manager.num_computed_tokens(request) == state.num_computed
            assert request.token_ids.tolist() == known.tokens
            assert (manager.state(request) is RequestState.SWAPPED_OUT) == state.on_host
            assert (manager.state(request) is RequestState.RECEIVING) == state.receiving
            if state.on_host:
                continue
            blocks = [manager.block_ids(request, g).tolist() for g in range(self.num_groups)]
            assert blocks == [held.blocks for held in state.held]
            if state.by_step and not state.resend:
                assert self.tables[row] == blocks
        self.compare_events()

    def compare_events(self) -> None:
        """Check that the events equal the model's events, in order."""
        found = []
        for event in self.manager.cache.drain_events():
            if isinstance(event, AllBlocksCleared):
                found.append(("cleared", event.medium))
            elif isinstance(event, BlockRemoved):
                what = "removed", event.medium, event.group
                found += [(*what, each.tobytes()) for each in event.block_hashes]
            elif event.medium == "cpu":
                what = "stored", "cpu", event.group
                found += [(*what, each.tobytes()) for each in event.block_hashes]
                assert (event.parent_hash, len(event.token_ids)) == (None, 0)
            else:
                found += self.stored(event)
        want = []
        for kind, medium, *rest in self.model.events:
            if kind == "cleared":
                want.append((kind, medium))
                continue
            group, prefix = rest
            event = (kind, medium, group, self.hash_of(prefix))
            if kind == "stored" and medium == "gpu":
                size = self.model.groups[group].block_size
                event += (self.parent_of(prefix[:-size]), prefix[-size:])
            want.append(event)
        assert found == want
        self.model.events.clear()

    def stored(self, event: BlockStored) -> list[tuple]:
        found, size, parent = [], event.block_size, event.parent_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.hash_algorithm == self.algorithm
        for i, each in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * size : (i + 1) * size].tolist())
            found.append(("stored", "gpu", event.group, each.tobytes(), parent, tokens))
            parent = each.tobytes()
        return found

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
        return self.hashes[prefix]

    def make_hash(self, prefix: tuple) -> bytes:
        if self.algorithm == ENGINE:
            return hashlib.blake2b(repr(prefix).encode(), digest_size=self.hash_bytes).digest()
        return hash_blocks(prefix, self.model.hash_size, algorithm=self.algorithm)[-1].tobytes()


def drive(seed: int, num_operations: int) -> None:
    """Run one seed, which also selects the mix. If the run fails, a note on the error contains the
    call that repeats it.
    """
    try:
        Driver(Chooser(seed), MIXES[seed % len(MIXES)]).run(num_operations)
    except BaseException as error:
        error.add_note(f"found by allocator_driver.drive({seed}, {num_operations})")
        raise


def soak(seconds: float, first_seed: int) -> None:
    """Run consecutive seeds from `first_seed` until the time is up."""
    seed, start = first_seed, time.monotonic()
    print(f"seeds from {first_seed}, {OPERATIONS_PER_SEED} operations each, for {seconds:.0f} s")
    while time.monotonic() - start < seconds:
        drive(seed, OPERATIONS_PER_SEED)
        seed += 1
    print(f"{(seed - first_seed) * OPERATIONS_PER_SEED:,} operations, no difference found")


if __name__ == "__main__":
    soak(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 10**9)
