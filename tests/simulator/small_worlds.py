# SPDX-License-Identifier: Apache-2.0
"""Makes every sequence of calls to small managers, up to a depth, and checks what each page holds.

    python -m tests.simulator.small_worlds 600           # 600 s for all worlds together
    python -m tests.simulator.small_worlds 60 full/swap  # 60 s for this world

A world is a manager with 5 or 6 blocks, at most three requests, and a set of calls. States are visited
breadth first. The native manager cannot be copied, so a state is the sequence of calls that leads to
it, which a fresh manager repeats. A simulated worker carries out the plans. The content of a token is
the number of what its KV depends on: its adapter, all tokens up to it, and the weights that computed
them. After each call, all that rows and later hits can read must hold the content of their tokens,
events must add up to what is cached, and all blocks must be free once every request is freed. Where
`docs/kernel_in_200_lines.py` has the group and the calls, all ids and answers are compared with it.

Two sequences lead to equal states if their keys (`Run.parts`) are equal. A key contains, for rows in
their order, what the caller knows of them and their blocks; the reference count, hash and content of
each block; the order in which free blocks are taken; the worker's tables; and, for each step in
flight, what an abort undoes. Blocks are named in the order in which they occur in the key, because ids
decide nothing, except those of blocks that move between the tiers. References that no row holds are
known by the step since when. To test keys, one in 100 states that are reached again is expanded from
both sequences, and the calls must lead to equal states.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import combinations, product
from typing import Any

from kvcache import Admit, KVCacheManager, Request, Status, StepReport
from kvcache.allocator import RequestState, check_invariants
from kvcache.events import AllBlocksCleared, BlockStored
from tests.machinery.group_mixes import (
    CROSS,
    ENCODER,
    FULL,
    RECURRENT,
    RECURRENT_1,
    STATE,
    TOKENS,
    ModelGroup,
    chunked_of,
    state_column,
    window_of,
)
from tests.machinery.kernel_driver import Comparison

LONGEST, SIZE, NUM_HOST = 8, 2, 5
BAD = -1  # content that must never be read
ADAPTER = ("adapter", "/adapter")
ALL = LONGEST
UNIQUE = b"unique"  # begins the keys of states that no other sequence leads to
Move = tuple  # name of a call and its arguments


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    options: dict = field(default_factory=dict)  # of `Request`


LONG = (0, 1, 2, 3, 4)
PROMPTS = {
    "long": Prompt(LONG),
    "short": Prompt((0, 1, 7)),  # shares a block with the long prompt
    "encoder": Prompt((0, 1, 2), {"num_encoder_tokens": 3}),
    "adapter": Prompt(LONG, {"lora": ADAPTER}),
    "private": Prompt(LONG, {"write_cache": False}),
    "computed": Prompt(LONG, {"read_cache": False}),
}
CALLS = {
    "share": "new run all mix fork free",
    "drafts": "new run draft reject ahead idle fork free",
    "swap": "new run leave exchange fork free report",
    "fail": "new run fork abort lose free report",
    "torn": "new run leave abort free report",
    "cache": "new run free evict reset epoch",
    "direct": "admit extend reject_alone free",
}
KINDS = {
    "full": FULL,
    "window": window_of(3),
    "chunked": chunked_of(3),
    "recurrent": RECURRENT,
    "cross": CROSS,
}


class World:
    """A manager of these kinds of groups, and a set of calls, with a name in CALLS."""

    def __init__(
        self, kinds: tuple[str, ...], calls: str, size: int = SIZE, hash_size: int | None = None
    ) -> None:
        self.kinds, self.calls, self.size, self.hash_size = kinds, calls, size, hash_size
        self.name = "+".join(kinds) + (f"/{size}" * bool(hash_size)) + f"/{calls}"
        of_kind = {**KINDS, "recurrent": RECURRENT_1 if calls == "drafts" else RECURRENT}
        self.specs = [of_kind[name].spec(size) for name in kinds]
        self.groups = [of_kind[name].model(size) for name in kinds]
        self.has_state = "recurrent" in kinds
        self.num_host = NUM_HOST if calls in ("swap", "torn") else 0
        self.prompts = ["long", "short"] + ["encoder"] * ("cross" in kinds)
        self.prompts += ["adapter", "private", "computed"] * (calls == "cache")
        self.num_blocks = 6 if len(kinds) == 1 else 7  # including the null block
        self.reports = "report" in CALLS[calls].split()  # otherwise, each step is reported at once
        self.can_abort = calls in ("fail", "torn")
        of_kernel = kinds in (("full",), ("window",)) and hash_size is None
        self.has_kernel = of_kernel and calls in ("share", "swap")
        self.prefixes: dict[bytes, tuple] = {}  # hash -> (adapter, tokens)
        self.hashed: set[tuple] = set()  # (adapter, tokens) whose hashes are known
        self.numbers: dict[tuple, int] = {}  # content -> its number

    def caller(self) -> Plain | Comparison:
        if self.has_kernel:
            window = 3 if self.kinds == ("window",) else None
            return Comparison(self.size, window, self.num_blocks, self.num_host, LONGEST)
        return Plain(self)

    def number(self, content: tuple) -> int:
        return self.numbers.setdefault(content, len(self.numbers) + 1)

    def note_hashes(self, manager: KVCacheManager, adapter: Any, tokens: tuple) -> None:
        if (adapter, tokens) not in self.hashed:
            self.hashed.add((adapter, tokens))
            hashes = manager.cache.hashes(Request("probe", tokens, lora=adapter))
            for i, each in enumerate(hashes):
                n = (i + 1) * manager.cache.hash_block_size
                self.prefixes[each.tobytes()] = (adapter, tokens[:n])


def all_worlds() -> list[World]:
    """Return each kind and each pair of kinds with each set of calls, and blocks with parts."""
    mixes = [(name,) for name in KINDS] + [*combinations(KINDS, 2)]
    found = [World(kinds, calls) for calls in CALLS for kinds in mixes]
    found += [World(("full",), calls, 4, 2) for calls in CALLS]
    found += [World(("full", "window"), calls, 4, 2) for calls in ("share", "drafts", "cache")]
    # Without a plan, nothing copies states.
    return [each for each in found if each.calls != "direct" or not each.has_state]


class Plain:
    """Makes calls to a manager, with the names and arguments of `Comparison`."""

    def __init__(self, world: World) -> None:
        fixed = {"num_preallocate_tokens": 0, "enable_events": True, "prefault": False}
        sizes = world.num_blocks, LONGEST
        of_world = {"num_host_blocks": world.num_host, "hash_block_size": world.hash_size}
        of_world["fence_frees"] = world.can_abort
        self.manager = KVCacheManager.for_groups(world.specs, *sizes, **of_world, **fixed)
        self.requests: dict[int, Request] = {}

    def step(self, rows=(), counts=(), ids=(), new=(), limits=(), leaving=(), rejected=0, ahead=0):
        plan = self.manager.step(
            rows,
            counts,
            new=[Admit(request, limit) for request, limit in zip(new, limits)],
            token_ids=[token for each in ids for token in each],
            num_token_ids=[len(each) for each in ids],
            num_rejected_tokens=[rejected] * len(rows),
            num_lookahead_tokens=ahead,
            swap_out=leaving,
        )
        for request, row in zip(new, plan.answers.new.rows.tolist()):
            if row >= 0:
                self.requests[row] = request
        return plan

    def fork(self, parent: Request, child: Request) -> int:
        row = self.manager.fork(parent, child)
        self.requests[row] = child
        return row

    def free(self, row: int) -> None:
        self.manager.free(self.requests.pop(row))

    def report(self, step: int) -> None:
        self.manager.report(StepReport(step, completed=True))

    def admit(self, request: Request) -> tuple | None:
        """Return the row, its hit and pages to copy, or None if the request does not fit."""
        hit = self.manager.cache.find_prefix(request)
        if self.manager.admit(request, hit) is None:
            return None
        row = self.manager.row(request)
        self.requests[row] = request
        return row, hit.num_tokens, self.manager.take_copies().tolist()


@dataclass
class Running:
    """What the caller knows of a request."""

    name: str = field(repr=False)  # keys do not contain it
    prompt: str  # a name in PROMPTS, whose options the request has
    tokens: tuple[int, ...]  # all that it will have, unless a draft is rejected
    known: int  # number of tokens that the manager knows
    computed: int
    epochs: tuple[int, ...] = ()  # of each computed token: the weights that computed it
    sure: int = 0  # later tokens are drafts
    drafts: int = 0  # computed tokens that may be rejected
    is_out: bool = False
    encoder: int = 0  # number of its encoder's content; 0: none
    forked: int = 0  # 1: has shared its blocks; 2: before an abort or a loss


def request_of(name: str, prompt: str) -> Request:
    return Request(name, PROMPTS[prompt].tokens, **PROMPTS[prompt].options)


def rejecting(each: Running) -> tuple[int, ...]:
    """Return the request's tokens if another token than its draft is sampled."""
    return (*each.tokens[: each.known], 90 + each.known, *each.tokens[each.known + 1 :])


def copied(tables: dict[int, list[list[int]]]) -> dict[int, list[list[int]]]:
    return {row: [[*each] for each in table] for row, table in tables.items()}


def place(group: ModelGroup, i: int, num_sure: int) -> tuple[int, int]:
    """Return the column and the slot of the KV of token i, or of the state after it."""
    if group.pages == STATE:
        return state_column(group, i + 1, num_sure), 0
    return divmod(i, group.block_size)


@dataclass
class Flight:
    """A step in flight: what there was before it, and what it did."""

    pages: dict[int, tuple]
    host: dict[int, tuple]
    tables: dict[int, list[list[int]]]
    rows_before: list[tuple]  # see `Run.held_rows`
    rows_after: list[tuple] = field(default_factory=list)
    moves: list[list] = field(default_factory=list)  # copies, swap-ins, swap-outs
    reads: set[int] = field(default_factory=set)


# Calls of `Run.step`: name -> its arguments.
STEPS = {
    "new": lambda run, *new: {"new": new},
    "run": lambda run, row: {"rows": [row]},
    "all": lambda run: {"rows": sorted(run.rows)},
    "mix": lambda run, prompt: {"rows": run.runnable(), "new": (prompt, ALL)},
    "draft": lambda run, row: {"rows": [row], "draft": 1},
    "reject": lambda run, row: {"rows": [row], "rejected": 1},
    "ahead": lambda run, row: {"rows": [row], "ahead": 2},
    "idle": lambda run, row: {"rows": [row], "idle": True},
    "leave": lambda run, row: {"leaving": [row]},
    "exchange": lambda run, row, prompt: {"leaving": [row], "new": (prompt, ALL)},
}


@dataclass
class Run:
    """A manager after some calls, and a simulated worker."""

    world: World
    caller: Any
    calls: list[Callable] = field(default_factory=list)
    pages: dict[int, tuple] = field(default_factory=dict)
    host: dict[int, tuple] = field(default_factory=dict)
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    rows: dict[int, Running] = field(default_factory=dict)
    flight: dict[int, Flight] = field(default_factory=dict)  # by step
    fences: dict[tuple, tuple] = field(default_factory=dict)  # see `note_fences`
    is_aborted: dict[int, bool] = field(default_factory=dict)  # of steps that no report covers
    epoch: int = 0
    count: int = 0  # of requests

    def branch(self) -> Run:
        """Return a copy with a manager of its own."""
        caller = self.world.caller()
        for call in self.calls:
            call(caller)
        names = "calls", "pages", "host", "flight", "fences", "is_aborted"
        copies = {name: copy(getattr(self, name)) for name in names}
        rows = {row: replace(each) for row, each in self.rows.items()}
        return replace(self, caller=caller, tables=copied(self.tables), rows=rows, **copies)

    @property
    def manager(self) -> KVCacheManager:
        return self.caller.manager

    def call(self, call: Callable) -> Any:
        """Make a call that a branch repeats. It gets the caller."""
        self.calls.append(call)
        return call(self.caller)

    # Moves -----------------------------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        """List the calls that are valid now."""
        rows = dict(sorted(self.rows.items()))
        here = [row for row in rows if not rows[row].is_out]
        can_run, can_leave = self.runnable(), [row for row in here if self.can_leave(row)]
        prompts = self.world.prompts if len(rows) < 2 else []
        can_all = len(can_run) > 1 and len(rows) - len(here) <= 1
        drafting = [row for row in can_run if self.next_tokens(row, draft=1)[1]]
        drafted = [row for row in rows if rows[row].drafts]
        tellable = [r for r in here if not rows[r].drafts and rows[r].computed <= rows[r].known]
        limits = (ALL,) if self.world.can_abort else (ALL, 2)
        ends = ["first", "last"][: len(self.flight)]  # of the steps in flight
        arguments = {
            "new": [(p, n) for p in prompts for n in limits[: 1 + (p == "long")]],
            **{name: [(row,) for row in can_run] for name in ("run", "ahead")},
            **{name: [(row,) for row in rows] for name in ("idle", "free")},
            "all": [()] * can_all,
            "mix": [(p,) for p in prompts if can_run],
            "draft": [(row,) for row in drafting],
            "reject": [(row,) for row in can_run if rows[row].drafts],
            "fork": [(row,) for row in tellable if len(rows) < 3 and rows[row].computed < LONGEST],
            "leave": [(row,) for row in can_leave],
            "exchange": [*product(can_leave, prompts)],
            "report": [(end,) for end in ends],
            "abort": [*product(ends, ("lost", "torn"))],
            "lose": [(row, *each) for row in here for each in self.ends_of(row)],
            "evict": [(0,), (1,)],
            "reset": [()],
            "epoch": [()] * (self.epoch < 2),
            "admit": [(p,) for p in prompts],
            "extend": [*product(can_run, (0,), (0, 2)), *product(drafting, (1,), (0,))],
            "reject_alone": [(row,) for row in drafted],
        }
        for name in CALLS[self.world.calls].split():
            yield from ((name, *each) for each in arguments[name])

    def runnable(self) -> list[int]:
        return [row for row in sorted(self.rows) if self.next_tokens(row)[1]]

    def held_rows(self) -> list[tuple]:
        """List (row, what the caller knows, blocks)."""
        rows = sorted(self.rows.items())
        return [(row, replace(each), [] if each.is_out else self.blocks(row)) for row, each in rows]

    def live(self, medium: str, pool: Any, pages: dict) -> dict[int, tuple]:
        """Return the pages that are held or cached."""
        ids = range(1, pool.num_blocks)
        found = zip(ids, pool.ref_counts(ids), self.manager.cache.hashes_of(ids, medium)[1])
        return {page: pages[page] for page, refs, g in found if page in pages and (refs or g >= 0)}

    def note_fences(self) -> None:
        """Note for each page how many of its references are no row's, and since which step."""
        held = Counter(page for _, _, table in self.held_rows() for each in table for page in each)
        for medium, pool, _ in self.tiers():
            for page, refs in enumerate(pool.ref_counts(range(1, pool.num_blocks)).tolist(), 1):
                others = refs - held[page] * (medium == "gpu")
                if self.fences.get((medium, page), (0, 0))[0] != others:
                    self.fences.pop((medium, page), None)  # they are in the order of their changes
                    self.fences[medium, page] = others, max(self.flight, default=-1)

    def ends_of(self, row: int) -> set[tuple[int, int]]:
        """Return (group, column) of the first and the last page that the row has in each group."""
        held = [[i for i, page in enumerate(each) if page] for each in self.blocks(row)]
        return {(g, i) for g, each in enumerate(held) if each for i in (each[0], each[-1])}

    def next_tokens(self, row: int, draft: int = 0, rejected: int = 0) -> tuple[list[int], int]:
        """Return the ids to tell, and how many tokens to compute, 0 if there is no room."""
        each = self.rows[row]
        start, known = each.computed - rejected, each.known
        if start >= known:  # drafts are accepted or rejected, and one more token is sampled
            known = start + 1
        count = known - start + draft
        tokens = rejecting(each) if rejected else each.tokens
        return [*tokens[each.known : known]], count if start + count <= LONGEST else 0

    def can_leave(self, row: int) -> bool:
        each = self.rows[row]
        if not each.computed or (each.drafts and self.world.has_state):
            return False
        return not self.world.has_kernel or self.caller.can_leave(self.caller.requests[row])

    def do(self, move: Move) -> None:
        name, *arguments = move
        if name in STEPS:
            self.step(**STEPS[name](self, *arguments))
        else:
            getattr(self, f"do_{name}")(*arguments)
        self.note_fences()
        if self.world.calls == "direct" and not self.world.hash_size:
            # Without plans, nothing says when a page is fresh.
            ids = range(1, self.world.num_blocks)
            refs, groups = self.manager.pool.ref_counts(ids), self.manager.cache.hashes_of(ids)[1]
            for page, is_held, g in zip(ids, refs, groups):
                if not is_held and g < 0:
                    self.pages.pop(page, None)

    def do_fork(self, row: int) -> None:
        parent, name = self.rows[row], self.next_name()
        n = parent.computed
        tokens = parent.tokens[:n] + tuple(50 + token for token in parent.tokens[n:])
        options = PROMPTS[parent.prompt].options

        def call(caller):
            child = Request(name, tokens[: n + 1], **options)
            return caller.fork(caller.requests[row], child)

        child = self.call(call)
        parent.forked = 1  # decides how often its blocks are looked at
        self.rows[child] = replace(parent, name=name, tokens=tokens, known=n + 1)
        self.tables.setdefault(child, [[] for _ in self.world.kinds])  # until the next plan

    def do_free(self, row: int) -> None:
        self.call(lambda caller: caller.free(row))
        del self.rows[row]

    def at(self, end: str) -> int:
        return min(self.flight) if end == "first" else max(self.flight)

    def do_report(self, end: str) -> None:
        step = self.at(end)
        self.call(lambda caller: caller.report(step))
        self.flight = {each: kept for each, kept in self.flight.items() if each > step}
        self.is_aborted = {each: was for each, was in self.is_aborted.items() if each > step}

    def do_abort(self, end: str, how: str) -> None:
        """Abort a step and all later ones. Their writes are not made, or are garbage."""
        step = self.at(end)
        before, garbage = self.flight[step], (BAD,) * self.world.size
        for now, kept in ((self.pages, before.pages), (self.host, before.host)):
            for page, slots in now.items():
                old = kept.get(page, garbage)
                torn = tuple(x if x == y else BAD for x, y in zip(slots, old))
                now[page] = old if how == "lost" else torn
        if how == "lost":
            self.tables = copied(before.tables)
        report = StepReport(step, completed=False)
        self.restart(self.call(lambda caller: caller.manager.report(report)))
        self.flight = {each: kept for each, kept in self.flight.items() if each < step}
        self.is_aborted = {each: was or each >= step for each, was in self.is_aborted.items()}
        for row, each in self.rows.items():
            state = self.manager.state(self.caller.requests[row])
            each.is_out = state is RequestState.SWAPPED_OUT

    def do_lose(self, row: int, group: int, column: int) -> None:
        page = self.blocks(row)[group][column]
        self.pages[page] = (BAD,) * self.world.size
        self.restart(self.call(lambda caller: caller.manager.invalidate([page])))

    def do_evict(self, i: int) -> None:
        hashes = self.manager.cache.hashes(Request("probe", LONG))
        page = self.manager.cache.find(hashes).device[i : i + 1].tolist()
        if page and page[0] > 0:
            self.call(lambda caller: caller.manager.cache.evict(page))

    def do_reset(self) -> None:
        assert self.call(lambda caller: caller.manager.cache.reset()) or self.rows

    def do_epoch(self) -> None:
        self.epoch += 1
        version = f"version {self.epoch}"
        self.call(lambda caller: caller.manager.cache.start_epoch(version))

    def do_admit(self, prompt: str) -> None:
        name = self.next_name()
        found = self.call(lambda caller: caller.admit(request_of(name, prompt)))
        if found is not None:
            row, hit, copies = found
            self.pages.update([(to, self.slots(page)) for page, to in copies])
            n = len(PROMPTS[prompt].tokens) - hit
            self.compute([self.admitted(row, name, prompt, hit, n)])

    def do_extend(self, row: int, draft: int, ahead: int) -> None:
        ids, count = self.next_tokens(row, draft)

        def call(caller):
            request = caller.requests[row]
            request.append_tokens(ids)
            return caller.manager.extend(request, count, ahead)

        each, fits = self.rows[row], self.call(call) is not None
        each.known += len(ids)
        each.drafts = 0  # they are known
        if fits:
            self.compute([(row, each.computed, count)])

    def do_reject_alone(self, row: int) -> None:
        self.call(lambda caller: caller.manager.reject_tokens(caller.requests[row], 1))
        each = self.rows[row]
        each.tokens, each.computed, each.drafts = rejecting(each), each.computed - 1, 0
        each.epochs = each.epochs[:-1]

    # Steps -----------------------------------------------------------------------------------------

    def next_name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def step(self, rows=(), new=None, leaving=(), draft=0, rejected=0, ahead=0, idle=False) -> None:
        """Make a step, and carry out its plan. `new`: the prompt of a request, and its limit."""
        told = [self.next_tokens(row, draft, rejected) for row in rows]
        told = [([], 0)] * len(rows) if idle else told
        ids, counts = [each for each, _ in told], [each for _, each in told]
        options = {} if self.world.has_kernel else {"rejected": rejected, "ahead": ahead}
        name, (prompt, limit) = self.next_name(), new or ("", 0)

        def call(caller):
            requests = [request_of(name, prompt)] if new else []
            return caller.step(rows, counts, ids, requests, [limit], leaving, **options)

        contents = [self.live(*each) for each in self.tiers()]
        contents.append({})  # without a host
        before = Flight(contents[0], contents[1], copied(self.tables), self.held_rows())
        plan = self.call(call)
        self.flight[plan.step_id] = before
        self.is_aborted[plan.step_id] = False
        before.moves = [each.tolist() for each in (plan.copy, plan.swap_in, plan.swap_out)]
        self.carry_out(plan)
        answers = plan.answers
        for row, status in zip(leaving, answers.swap_out.status):
            self.rows[row].is_out = status == Status.SERVED
        jobs = []
        found = zip(rows, answers.rows.status, answers.rows.num_computed_tokens.tolist())
        for (row, status, start), new_ids, n in zip(found, ids, counts):
            if status == Status.SERVED:
                each = self.rows[row]
                each.tokens = rejecting(each) if rejected else each.tokens
                each.known += len(new_ids)
                jobs.append((row, start, n))
        found = (answers.new.rows, answers.new.num_computed_tokens, answers.new.num_tokens)
        for row, hit, n in zip(*(each.tolist() for each in found)):
            if row >= 0:
                jobs.append(self.admitted(row, name, prompt, hit, n))
        for row, each in self.rows.items():
            assert each.is_out or self.tables[row] == self.blocks(row), "a worker's table differs"
        self.compute(jobs)
        before.rows_after = self.held_rows()
        if not self.world.reports:
            self.do_report("last")
        elif not self.world.can_abort and not self.manager.pool.num_loading:
            self.flight = {plan.step_id: before}  # earlier reports would have no effect

    def admitted(self, row: int, name: str, prompt: str, hit: int, n: int) -> tuple:
        """Note a new request with a hit. Return its job."""
        tokens = PROMPTS[prompt].tokens
        all_tokens = tokens + tuple(range(10 + len(tokens), 10 + LONGEST + 1))
        serial = self.count % 3 + 1 if prompt == "encoder" else 0
        each = Running(name, prompt, all_tokens, len(tokens), hit, (self.epoch,) * hit)
        each.encoder, each.sure = serial, hit
        self.rows[row] = each
        return row, hit, n

    def compute(self, jobs: list[tuple[int, int, int]]) -> None:
        """Compute tokens of rows, as (row, first token, number of tokens)."""
        for row, start, n in jobs:
            each = self.rows[row]
            each.sure = min(max(each.known, start + 1), start + n) if n else min(each.sure, start)
            self.check_reads(row, start, start)
        for row, start, n in jobs:
            each = self.rows[row]
            each.computed, each.is_out = start + n, False
            each.drafts = each.computed - each.sure
            each.epochs = each.epochs[:start] + (self.epoch,) * n
            for cell in self.encoder_cells(row) if start == 0 else ():
                self.write(*cell)
            for group, blocks in zip(self.world.groups, self.blocks(row)):
                for i in range(start, start + n) if group.pages != ENCODER else ():
                    column, slot = place(group, i, each.sure)
                    assert blocks[column], f"row {row} writes token {i} to the null page"
                    self.write(blocks[column], slot, self.content(each, i))
        for row, start, n in jobs:
            self.check_reads(row, start, start + n)

    def carry_out(self, plan) -> None:
        """Carry out a plan's sections in their order."""
        pages, size = self.pages, self.world.size
        lists = plan.copy[:, 1], plan.zero, plan.fresh, plan.swap_in[:, 1]
        written = [page for each in lists for page in each.tolist()]
        assert len(written) == len(set(written)), "a page is written twice"
        served = [row for row, n in zip(plan.rows.tolist(), plan.num_tokens.tolist()) if n]
        reads = set().union(*(each.reads for each in self.flight.values()))
        assert not (self.world.can_abort and reads & set(written)), "a step in flight reads it"
        empty = (0,) * size
        for page, to in plan.swap_out.tolist():
            self.host[to] = pages.get(page, empty)
        pages.update([(to, pages.get(page, empty)) for page, to in plan.copy.tolist()])
        pages.update(dict.fromkeys([*plan.zero.tolist(), *plan.fresh.tolist()], empty))
        pages.update([(to, self.host.get(page, empty)) for page, to in plan.swap_in.tolist()])
        for row in plan.clear_rows.tolist():
            self.tables[row] = [[] for _ in self.world.kinds]
        for g in range(len(self.world.kinds)):
            splits, ids = plan.append_splits[g].tolist(), plan.append_ids[g].tolist()
            for i, row in enumerate(plan.append_rows.tolist()):
                self.tables[row][g] += ids[splits[i] : splits[i + 1]]
            for row, column, page in plan.replace[g].tolist():
                self.tables[row][g][column] = page
        now = self.flight[plan.step_id].reads
        now.update(*(each for row in served for each in self.tables[row]))
        now.update(plan.copy[:, 0].tolist(), plan.swap_out[:, 0].tolist())

    def write(self, page: int, slot: int, content: int) -> None:
        slots = self.slots(page)
        self.pages[page] = (*slots[:slot], content, *slots[slot + 1 :])

    def slots(self, page: int) -> tuple:
        return self.pages.get(page, (0,) * self.world.size)

    def restart(self, affected: dict[str, int]) -> None:
        """Note where rows continue after an abort or a loss."""
        for each in self.rows.values():
            if each.name in affected:
                n = affected[each.name]
                each.computed, each.sure, each.drafts, each.epochs = n, n, 0, (self.epoch,) * n
                each.forked = min(2 * each.forked, 2)

    # Contents --------------------------------------------------------------------------------------

    def content(self, each: Running, i: int) -> int:
        adapter = PROMPTS[each.prompt].options.get("lora")
        return self.world.number((adapter, each.tokens[: i + 1], each.epochs[: i + 1]))

    def blocks(self, row: int) -> list[list[int]]:
        request = self.caller.requests[row]
        return [self.manager.block_ids(request, g).tolist() for g in range(len(self.world.kinds))]

    def encoder_cells(self, row: int) -> Iterator[tuple[int, int, int]]:
        """List (page, slot, content) of what the row's encoder has written."""
        each = self.rows[row]
        for group, blocks in zip(self.world.groups, self.blocks(row)):
            if group.pages == ENCODER and each.encoder:
                for i in range(PROMPTS[each.prompt].options["num_encoder_tokens"]):
                    content = self.world.number(("encoder", each.encoder, i))
                    yield blocks[i // group.block_size], i % group.block_size, content

    def check_reads(self, row: int, start: int, stop: int) -> None:
        """Check what token `start` reads, up to token `stop`, and the row's states."""
        each = self.rows[row]
        for group, blocks in zip(self.world.groups, self.blocks(row)):
            tokens = range(0)
            if group.pages == TOKENS:
                tokens = range(group.reads_from(start), stop)
            if group.pages == STATE:
                tokens = range(max(start, stop - each.drafts, 1) - 1, stop)
            for i in tokens:
                column, slot = place(group, i, max(each.sure, 1))
                page, want = blocks[column], self.content(each, i)
                is_right = page and self.slots(page)[slot] == want
                assert is_right, f"row {row} reads wrong KV of token {i} in page {page}"
        for page, slot, content in self.encoder_cells(row) if stop else ():
            assert page and self.slots(page)[slot] == content, f"row {row}: encoder"

    def check(self) -> None:
        """Check what rows and hits can read, events, and that no block is held in the end."""
        manager, world = self.manager, self.world
        for row, each in self.rows.items():
            request = self.caller.requests[row]
            is_out = manager.state(request) is RequestState.SWAPPED_OUT
            assert is_out == each.is_out and manager.num_computed_tokens(request) == each.computed
            assert request.token_ids.tolist() == [*each.tokens[: each.known]], "tokens"
            adapter = PROMPTS[each.prompt].options.get("lora")
            world.note_hashes(manager, adapter, each.tokens[:LONGEST])
            if not is_out:
                self.check_reads(row, each.computed - each.drafts, each.computed)
        cached = set()
        for medium, pool, pages in self.tiers():
            hashes, groups = manager.cache.hashes_of(range(1, pool.num_blocks), medium)
            for page, (found, g) in enumerate(zip(hashes, groups.tolist()), 1):
                if g >= 0:
                    cached.add((medium, g, found.tobytes()))
                    self.check_cached(world.groups[g], g, found.tobytes(), pages[page])
        if world.has_kernel:
            self.caller.compare([*LONG, 15, 16, 17])
        else:
            check_invariants(manager)
            assert cached == self.cached_by_events(), "events do not add up to what is cached"

    def tiers(self) -> list[tuple]:
        found = [("gpu", self.manager.pool, self.pages)]
        return found + [("cpu", self.manager.host_pool, self.host)] * bool(self.world.num_host)

    def check_cached(self, group: ModelGroup, g: int, found: bytes, slots: tuple) -> None:
        adapter, tokens = self.world.prefixes[found]
        n, epochs = len(tokens), (self.epoch,) * len(tokens)
        is_state = group.pages == STATE
        for i in range(n - 1 if is_state else (n - 1) // group.block_size * group.block_size, n):
            want = self.world.number((adapter, tokens[: i + 1], epochs[: i + 1]))
            slot = 0 if is_state else i % group.block_size
            assert slots[slot] == want, f"group {g} caches wrong KV of token {i} of {tokens}"

    def cached_by_events(self) -> set[tuple]:
        view: set[tuple] = set()
        for event in self.manager.cache.drain_events():
            if isinstance(event, AllBlocksCleared):
                view = {each for each in view if each[0] != event.medium}
                continue
            hashes = [each.tobytes() for each in event.block_hashes]
            named = {(event.medium, event.group, each) for each in hashes}
            is_stored = isinstance(event, BlockStored)
            assert not named & view if is_stored else named <= view
            view = view | named if is_stored else view - named
        return view

    # Keys ------------------------------------------------------------------------------------------

    def key(self, moves: tuple[Move, ...]) -> bytes:
        """Return the digest of the state, or the moves if no others lead to it. Ends the run."""
        value = self.parts()
        digest = blake2b(repr(value).encode(), digest_size=16).digest()
        return digest if value is not None else UNIQUE + repr(moves).encode()

    def parts(self) -> tuple | None:
        """Return what decides later calls, or None if it is not visible. Ends the run."""
        if self.world.hash_size:
            return None  # which parts of blocks are cached is not visible
        manager, names = self.manager, {0: 0}
        if self.world.num_host:  # rows of several groups move in the order of their ids
            names = {page: page for page in range(self.world.num_blocks)}

        def named(table: list[list[int]]) -> list[list[int]]:
            return [[names.setdefault(page, len(names)) for page in each] for each in table]

        rows = []
        for row, each, blocks in self.held_rows():
            is_stale = manager.cache.is_stale(self.caller.requests[row])
            rows.append((row, each, is_stale, named(blocks)))
        found = [self.epoch, min(len(self.flight), 2), rows, manager.quiet_until.tolist()]
        found += [*self.is_aborted.values()] * self.world.can_abort
        found += [self.count % 3] * ("cross" in self.world.kinds)
        described = [self.described(*each) for each in self.tiers()]
        if None in described or sum(self.is_aborted.values()) > 1:
            return None  # the order of fences of several aborts is not visible
        on_host = {0: 0}
        natives = [(manager._native.pool, names), (manager._native.host, on_host)]
        for (native, known), pages in [*zip(natives, described)][::-1]:  # the host first
            order = native.allocate(native.num_free)
            for page in [*order.tolist(), *sorted(pages, key=pages.__getitem__)]:
                known.setdefault(page, len(known))
            medium, steps = "gpu" if known is names else "cpu", sorted(self.flight)
            for page, each in sorted(pages.items(), key=lambda item: known[item[0]]):
                count, step = self.fences.get((medium, page), (0, -1))
                since = steps.index(step) if count and step in steps else -1
                found.append((known[page], *each, count, since))
            found.append([known[page] for page in order.tolist()])
            native.release(order)
        waiting = [page for (medium, page), (n, _) in self.fences.items() if n and medium == "gpu"]
        found.append(named([waiting]))
        found.append([(row, named(table)) for row, table in sorted(self.tables.items())])
        found += [self.shown(self.flight[step], names, on_host) for step in sorted(self.flight)]
        return tuple(found)

    def shown(self, step: Flight, names: dict[int, int], on_host: dict[int, int]) -> tuple:
        """Return what an abort of the step would undo, with the names of pages."""

        def named(table: list[list[int]]) -> list[list[int]]:
            return [[names[page] for page in group] for group in table]

        sides = (names, names), (on_host, names), (names, on_host)
        both = zip(sides, step.moves, strict=True)
        moves = [[(a[x], b[y]) for x, y in pairs] for (a, b), pairs in both]
        rows = []
        for row, each, table in (*step.rows_before, *step.rows_after):
            is_same = row in self.rows and self.rows[row].name == each.name
            rows.append((row, is_same, each, named(table)))
        tables = [(row, named(table)) for row, table in sorted(step.tables.items())]
        known = (names, step.pages), (on_host, step.host)
        contents = [sorted((name[x], slots) for x, slots in pages.items()) for name, pages in known]
        return moves, rows, tables, contents, len(step.rows_before)

    def described(self, medium: str, pool: Any, pages: dict) -> dict[int, tuple] | None:
        """Return (references, group, hash, whether it is found, content) of each page. None: more than
        two pages have one hash, and the order in which they are found is not visible.
        """
        ids = range(1, pool.num_blocks)
        hashes, groups = self.manager.cache.hashes_of(ids, medium)
        found: dict[int, tuple] = {}
        copies: Counter[tuple] = Counter()
        for page, refs, each, g in zip(ids, pool.ref_counts(ids).tolist(), hashes, groups.tolist()):
            name, is_found = each.tobytes() if g >= 0 else b"", False
            if g >= 0:
                where = self.manager.cache.find([name], g)
                is_found = (where.device if medium == "gpu" else where.host)[0] == page
                copies[g, name] += 1
            content = pages.get(page) if refs or g >= 0 else None
            found[page] = (refs, g, name, is_found, repr(content))
        return None if max(copies.values(), default=0) > 2 else found

    def end(self) -> None:
        """Check that nothing is held once all requests are freed and the last step is reported."""
        for row in self.rows:
            self.caller.free(row)
        if self.world.reports and self.manager.last_step_id >= 0:
            self.caller.report(self.manager.last_step_id)
        check_invariants(self.manager)
        for _, pool, _ in self.tiers():
            assert pool.num_free == pool.num_total, "blocks are held in the end"


# Exploration -----------------------------------------------------------------------------------------


@dataclass
class Result:
    name: str
    depth: int = 0  # all sequences of so many calls were made
    num_states: int = 1
    num_sequences: int = 1  # of `depth` calls
    num_calls: int = 0
    num_tested: int = 0  # states whose key was tested
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name:28} depth {self.depth:2}  {self.num_states:8,} states  "
            f"{self.num_sequences:14,} sequences  {self.num_calls:9,} calls  "
            f"{self.num_tested:5,} keys tested  {self.seconds:6.1f} s"
        )


def run_of(world: World, moves: tuple[Move, ...]) -> Run:
    run = Run(world, world.caller())
    for move in moves:
        run.do(move)
    return run


def successors(world: World, moves: tuple[Move, ...]) -> Iterator[tuple[Move, bytes]]:
    """Make each valid call after these calls. Yield it and the key of the state."""
    run = run_of(world, moves)
    for move in run.moves():
        branch, after = run.branch(), (*moves, move)
        try:
            branch.do(move)
            branch.check()
            key = branch.key(after)
            branch.end()
        except Exception as error:
            error.add_note(f"found by replay({world.name!r}, {after!r})")
            raise
        yield move, key


def check_key(world: World, first: tuple[Move, ...], second: tuple[Move, ...]) -> None:
    """Check that the same calls lead from both sequences to equal states."""
    found = [dict(successors(world, moves)) for moves in (first, second)]
    assert [*found[0]] == [*found[1]], f"{world.name}: after {first} and {second}, other calls"
    for move, state in found[0].items():
        other = found[1][move]
        is_equal = state == other or (state.startswith(UNIQUE) and other.startswith(UNIQUE))
        assert is_equal, f"{world.name}: {move} after {first} and {second} differs"


def explore(world: World, most_calls: int, seconds: float = 1e9, test_every: int = 100) -> Result:
    """Visit all states up to the depth that takes at most so many calls or so much time."""
    result, start = Result(world.name), time.monotonic()
    numbers = {run_of(world, ()).key(()): 0}  # key -> number of the state
    paths, edges, layer = [()], [], [()]
    branching, rate = 8.0, 0.0
    while layer:
        expected = len(layer) * branching
        left = seconds - (time.monotonic() - start)
        if result.num_calls + expected > most_calls or expected * rate > left:
            break
        calls_before, num_layer, after = result.num_calls, len(layer), []
        for moves in layer:
            edges.append([])
            for move, key in successors(world, moves):
                result.num_calls += 1
                number = numbers.setdefault(key, len(paths))
                edges[-1].append(number)
                if number == len(paths):
                    paths.append((*moves, move))
                    after.append(paths[-1])
                elif result.num_calls % test_every == 0:
                    check_key(world, paths[number], (*moves, move))
                    result.num_tested += 1
        layer, result.depth = after, result.depth + 1
        branching = (result.num_calls - calls_before) / num_layer
        rate = (time.monotonic() - start) / result.num_calls
    result.num_states, result.seconds = len(paths), time.monotonic() - start
    result.num_sequences = count_sequences(edges, result.depth)
    return result


def count_sequences(edges: list[list[int]], depth: int) -> int:
    ways = Counter({0: 1})
    for _ in range(depth):
        after: Counter[int] = Counter()
        for number, count in ways.items():
            for other in edges[number]:
                after[other] += count
        ways = after
    return sum(ways.values())


def replay(name: str, moves: tuple[Move, ...]) -> None:
    """Repeat a sequence that failed."""
    world = next(each for each in all_worlds() if each.name == name)
    run = run_of(world, moves)
    run.check()
    run.key(moves)
    run.end()


def main(seconds: float, names: list[str]) -> None:
    worlds = [each for each in all_worlds() if not names or each.name in names]
    start, results = time.monotonic(), []
    for i, world in enumerate(worlds):
        left = seconds - (time.monotonic() - start)
        results.append(explore(world, sys.maxsize, left / (len(worlds) - i)))
        print(results[-1], flush=True)
    total = [sum(getattr(each, f"num_{what}") for each in results) for what in ("states", "calls")]
    print(f"{len(worlds)} worlds, {total[0]:,} states, {total[1]:,} calls, no difference found")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
