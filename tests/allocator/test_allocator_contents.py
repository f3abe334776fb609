# SPDX-License-Identifier: Apache-2.0
"""Page contents: plans run on simulated pages, and every read must find the correct KV.

A token's KV depends on that token and all tokens before it, so the simulation represents the KV by
this prefix. A page is a dict of slots. Steps read and write pages through the block tables, with
drafts, late tokens and fences. The writes of an aborted step are executed, skipped or replaced by
garbage. Pages lose their contents before or after a step computes, and a step may be aborted before
the loss is reported. Requests are forked, swapped out and in, and restarted from the cache. Evicted
blocks go to a second tier under any eviction policy. External KV arrives within a step or later,
completely or in part, and a connector reads the blocks of freed requests. Rows of one step may
share blocks that the step fills, provided that the plan lists the dependency.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from math import gcd

import pytest

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    Request,
    Status,
    StepPlan,
    StepReport,
    eviction_names,
    host_eviction_names,
)
from kvcache.allocator import RequestState, check_invariants
from tests.machinery.group_mixes import (
    CIRCULAR,
    ENCODER,
    FULL,
    MIXES,
    STATE,
    Begins,
    Cell,
    Chooser,
    cells_of,
    groups_of,
    state_column,
    window_of,
)
from tests.machinery.shared import sampled

NUM_SEEDS, SEEDS_PER_TEST, NUM_OPERATIONS = 150, 25, 150
LONGEST = 48
# The manager does not track blocks released by steps older than this, so the simulation never
# aborts such steps.
MOST_STEPS_BACK = 60
BAD = "bad"  # marks content that must never be read
KV_MIXES = [
    *(mix for mix in MIXES if all(kind.model(size).pages != ENCODER for kind, size in mix[0])),
    ([(FULL, 8), (window_of(9), 12)], 2),
    ([(window_of(20), 4), (window_of(6), 8)], None),
]

Content = tuple[int, ...] | str | None
Pages = dict[int, dict[int | str, Content]]  # page -> slot (STATE: its only slot) -> content
Tables = dict[int, list[list[int]]]  # row -> group -> pages


@dataclass(eq=False)
class Conversation:
    """A request together with all tokens that it will eventually have."""

    request: Request
    tokens: list[int]
    num_sampled: int  # tokens sampled so far, including those unknown to the manager
    # Rejected drafts of the last step that are not yet reported to the manager.
    num_rejected: int = 0
    begins: Begins = (0, 0)
    external: tuple[int, int] = (0, 0)  # start and end of the external tokens
    is_receiving: bool = False
    num_sure: int = 0  # tokens up to the last step that the manager does not treat as drafts

    def __post_init__(self) -> None:
        self.contents = [tuple(self.tokens[: i + 1]) for i in range(len(self.tokens))]

    def content(self, position: int) -> Content:
        """Return the KV of a token or the state after the token, or None before the first token."""
        return self.contents[position] if position >= 0 else None

    def late_tokens(self) -> list[int]:
        return self.tokens[self.request.num_tokens : self.num_sampled]


@dataclass
class StepInFlight:
    """A step in flight: the simulation's state before the step, and the pages that the step reads."""

    pages: Pages
    host: Pages
    tables: Tables
    reads: set[int] = field(default_factory=set)
    host_reads: set[int] = field(default_factory=set)


@dataclass
class Kept:
    """The blocks of a freed request that a connector still uses."""

    request: Request
    read: Pages  # contents of the pages that the connector sends
    written: set[int]  # pages that the connector still writes to
    num_aborts: int  # number of aborts when the blocks were kept


def pages_of(table: list[list[int]]) -> set[int]:
    return {page for blocks in table for page in blocks}


def copy_pages(pages: Pages) -> Pages:
    return {page: dict(slots) for page, slots in pages.items()}


class Simulation:
    """A manager, and the pages and tables of a simulated device that executes its plans."""

    def __init__(self, choose: Chooser, *, lose_pages: bool) -> None:
        self.choose = choose
        kinds, hash_block_size = choose.pick(KV_MIXES)
        specs, self.groups = groups_of(choose, kinds)
        self.has_state = any(group.pages == STATE for group in self.groups)
        self.has_circular = any(group.pages == CIRCULAR for group in self.groups)
        self.takes_external = all(group.transferred or not group.cached for group in self.groups)
        self.max_drafts = min(
            (group.num_speculative for group in self.groups if group.pages == STATE), default=4
        )
        self.hash_size = hash_block_size or gcd(*(size for _, size in kinds))
        self.fences = choose.chance(2)
        tiers = {"eviction": choose.pick(eviction_names())}
        if choose.chance(2):
            tiers |= {
                "num_host_blocks": choose.integer(4, 40) * len(kinds),
                "host_eviction": choose.pick(host_eviction_names()),
                "host_write": choose.pick(["back", "through"]),
            }
            if tiers["host_eviction"] == "learned":
                tiers["eviction"] = "learned"
                tiers["min_gain_to_write"] = choose.pick([None, None, 0.0, 0.05])
        self.manager = KVCacheManager.for_groups(
            specs,
            choose.integer(8, 24) * len(kinds),
            LONGEST,
            max_num_reqs=6,
            num_preallocate_tokens=choose.pick([0, 5]),
            hash_block_size=hash_block_size,
            fence_frees=self.fences,
            **tiers,
        )
        self.pages: Pages = {}
        self.host: Pages = {}
        self.tables: Tables = {}  # tables remain after their rows are freed
        self.running: dict[int, Conversation] = {}  # keyed by row
        self.idle: list[Conversation] = []
        self.num_conversations = 0
        self.num_steps = 0
        self.in_flight: dict[int, StepInFlight] = {}  # keyed by step
        self.last_written: list[int] = []
        self.lost_page: int | None = None  # page whose loss was not yet reported to the manager
        self.lost_slots: dict[int | str, Content] = {}
        self.lost_at = 0
        self.failing: int | None = None  # page whose writes fail in this step
        self.lost_on_host: tuple[int, int] | None = None  # (step that failed to write, page)
        self.lose_pages = lose_pages
        self.written_by: dict[int, int] = {}  # this step: page -> row
        self.writing_row = -1
        self.kept: list[Kept] = []
        self.num_aborts = 0
        self.is_over = False
        operations = [
            (12, self.step),
            (3, self.free),
            (2, self.fork),
            (1, self.pin),
            (2 if self.manager.host_pool is None else 8, self.report),
            (2, self.abort),
            (2, self.finish_receiving),
            (1, self.release_blocks),
            (1, self.evict),
            (1, self.reset),
        ]
        if lose_pages:
            operations.append((1, self.lose_or_invalidate))
        self.weighted = [each for weight, each in operations for _ in range(weight)]

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.choose.pick(self.weighted)()
            check_invariants(self.manager)
            if self.is_over:
                return

    # Conversations ---------------------------------------------------------------------------------

    def next_conversation(self) -> Conversation:
        """Return an idle conversation, or begin a new one."""
        choose = self.choose
        if self.idle and choose.chance(2):
            return self.idle.pop(choose.integer(0, len(self.idle) - 1))
        self.num_conversations += 1
        differs, num_prompt = choose.pick([0, 3, 6, 9, 14, 99, 99]), choose.integer(1, 30)
        tokens = [i + (1000 * choose.integer(1, 2) if i >= differs else 0) for i in range(LONGEST)]
        request = Request(f"r{self.num_conversations}", tokens[:num_prompt])
        return Conversation(request, tokens, num_prompt)

    def num_tokens_next(self, conversation: Conversation) -> int:
        """Return the number of tokens to compute next, including drafts after the last sampled token.

        A result of 0 leaves the conversation out of the step.
        """
        choose = self.choose
        if conversation.is_receiving:
            return 0
        computed = self.manager.num_computed_tokens(conversation.request)
        computed -= conversation.num_rejected
        missing = conversation.num_sampled - computed
        if missing <= 0 or choose.chance(3):
            return 0
        most = self.most_slots(computed)
        count = choose.integer(1, min(missing, most))
        if choose.chance(2):
            count = min(self.manager.checkpoint_tokens(conversation.request, count), missing)
        if count == missing and choose.chance(2):
            count += choose.integer(0, self.max_drafts)
        if self.has_state and self.max_drafts:  # tokens unknown to the manager are drafts
            num_known = max(conversation.request.num_tokens - computed, 1)
            count = min(count, num_known + self.max_drafts)
        return min(count, LONGEST - computed, most)

    def most_slots(self, start: int) -> int:
        """Return the largest number of tokens, from `start` on, that every circular buffer can
        accept in one step.
        """
        return min(
            group.num_places() * group.block_size - (start - group.reads_from(start))
            for group in self.groups
        )

    def restart(self, affected: dict[str, int]) -> None:
        """Record the position from which each affected conversation continues.

        Their pending drafts are discarded.
        """
        for conversation in self.running.values():
            if conversation.request.request_id in affected:
                conversation.num_rejected = 0
                going_on = affected[conversation.request.request_id]
                conversation.begins = going_on, going_on
                conversation.num_sure = going_on

    # Operations ------------------------------------------------------------------------------------

    def step(self) -> None:
        choose = self.choose
        counts = {row: self.num_tokens_next(each) for row, each in self.running.items()}
        counts = {row: count for row, count in counts.items() if count}
        batch = [self.running[row] for row in counts]
        # A recurrent state continues after the last accepted draft, which must be known then.
        is_told = self.has_state and self.max_drafts > 0
        late = [each.late_tokens() if choose.chance(2) or is_told else [] for each in batch]
        admitted = [self.next_conversation() for _ in range(choose.pick([0, 1, 1, 2]))]
        leaving = self.rows_to_swap_out(counts)
        for row in leaving if self.has_state else ():
            self.decide(self.running[row])  # the draft pages are not swapped out with the row
        held_before = self.pages_held()
        most = [choose.pick([0, 3, 99, 99]) for _ in admitted]
        spans = [self.external_span(each, cap) for each, cap in zip(admitted, most)]
        external = [stop - first for first, stop in spans]
        for each, n in zip(admitted, external):
            each.is_receiving = n > 0 and choose.chance(2)
        plan = self.manager.step(
            [*counts],
            [*counts.values()],
            new=[
                Admit(
                    each.request,
                    0
                    if each.is_receiving
                    else min(
                        choose.pick([3, 8, LONGEST]), self.most_slots(stop if stop > first else 0)
                    ),
                    External(stop - first, each.is_receiving),
                    max_host_blocks=cap,
                )
                for each, (first, stop), cap in zip(admitted, spans, most)
            ],
            token_ids=[token for tokens in late for token in tokens],
            num_token_ids=[len(tokens) for tokens in late],
            num_rejected_tokens=[each.num_rejected for each in batch],
            swap_out=leaving,
        )
        assert plan.step_id == self.num_steps
        self.num_steps += 1
        if admitted:
            starts = plan.num_computed_tokens[-len(admitted) :].tolist()
            for each, n, start in zip(admitted, external, starts):
                each.external = start - n, start
        self.execute(
            plan, batch + [self.running[row] for row in leaving] + admitted, leaving, held_before
        )

    def external_span(self, conversation: Conversation, most_host_blocks: int) -> tuple[int, int]:
        """Return the range of external tokens that follow the hit."""
        cached = self.manager.cache.cached_tokens(conversation.request)
        with_host = cached.num_host_blocks <= most_host_blocks
        num_hit = cached.with_host if with_host else cached.on_device
        most = conversation.request.num_tokens - 1 - num_hit
        can = most > 0 and self.takes_external
        count = self.choose.integer(1, most) if can and self.choose.chance(3) else 0
        return num_hit, num_hit + count

    def pages_held(self) -> dict[int, set[int]]:
        """Return the pages of each row according to the manager."""
        return {
            row: pages_of([self.block_ids(each.request, g) for g in range(len(self.groups))])
            for row, each in self.running.items()
            if self.manager.state(each.request) is not RequestState.SWAPPED_OUT
        }

    def rows_to_swap_out(self, served: dict[int, int]) -> list[int]:
        if self.manager.host_pool is None:
            return []
        return [
            row
            for row, each in self.running.items()
            if row not in served
            and not each.is_receiving
            and self.manager.state(each.request) is not RequestState.SWAPPED_OUT
            and self.choose.chance(4)
        ]

    def rows_on_device(self) -> list[Conversation]:
        """Return the rows that are neither swapped out nor receiving."""
        return [
            each
            for each in self.running.values()
            if self.manager.state(each.request) is not RequestState.SWAPPED_OUT
            and not each.is_receiving
        ]

    def fork(self) -> None:
        """Fork a conversation after its computed tokens."""
        on_device = self.rows_on_device()
        if not on_device:
            return
        parent = self.choose.pick(on_device)
        self.decide(parent)
        parent.request.append_tokens(parent.late_tokens())
        shared = self.manager.num_computed_tokens(parent.request)
        if shared >= LONGEST:
            return
        self.num_conversations += 1
        other = 1000 * self.choose.integer(0, 2)
        tokens = parent.tokens[:shared] + [token + other for token in parent.tokens[shared:]]
        request = Request(f"r{self.num_conversations}", tokens[: shared + 1])
        row = self.manager.fork(parent.request, request)
        if row >= 0:
            parent.num_sure = shared
            child = Conversation(request, tokens, shared + 1, begins=parent.begins, num_sure=shared)
            self.running[row] = child
            self.tables[row] = [[] for _ in self.groups]

    def decide(self, conversation: Conversation) -> None:
        """Report the rejected drafts of the last step to the manager."""
        if conversation.num_rejected:
            self.manager.reject_tokens(conversation.request, conversation.num_rejected)
            conversation.num_rejected = 0

    def pin(self) -> None:
        session = self.choose.pick(["one", "two"])
        if self.idle and self.choose.chance(2):
            self.manager.cache.pin(session, self.choose.pick(self.idle).request)
        else:
            self.manager.cache.unpin(session)

    def free(self) -> None:
        if not self.running:
            return
        row = self.choose.pick([*self.running])
        conversation = self.running[row]
        request, is_kept = conversation.request, False
        if self.manager.state(request) is not RequestState.SWAPPED_OUT:
            is_kept = conversation.is_receiving or self.choose.chance(4)
        if is_kept and any(each.request is request for each in self.kept):
            return
        del self.running[row]
        self.decide(conversation)
        request.append_tokens(conversation.late_tokens())
        if is_kept:
            self.keep(conversation)
        self.manager.free(request, keep_blocks=is_kept)
        conversation.is_receiving = False
        self.idle.append(conversation)

    def keep(self, conversation: Conversation) -> None:
        table = [self.block_ids(conversation.request, g) for g in range(len(self.groups))]
        sent = [blocks for group, blocks in zip(self.groups, table) if group.transferred]
        pages, written = pages_of(sent) - {0}, set()
        if conversation.is_receiving:
            first, stop = conversation.external
            written = {page for page, _, _ in self.cells_received(table, first, stop, stop)}
        read = {page: dict(self.pages.get(page, {})) for page in pages - written}
        self.kept.append(Kept(conversation.request, read, written, self.num_aborts))

    def release_blocks(self) -> None:
        """Release the blocks that a connector keeps. Check that the pages it sent are unchanged."""
        if not self.kept:
            return
        kept = self.kept.pop(self.choose.integer(0, len(self.kept) - 1))
        if not self.lose_pages and kept.num_aborts == self.num_aborts:
            for page, slots in kept.read.items():
                now = self.pages.get(page, {})
                assert all(now.get(slot) == slots[slot] for slot in slots), (
                    "sent blocks were reused"
                )
        for page in kept.written:
            for pages in self.pages_of_all_times():
                pages[page] = dict.fromkeys(range(16), BAD) | {STATE: BAD}
        if self.may_lose():
            self.check_what_is_kept("after a connector wrote to blocks of a request that had left")
        self.manager.release_blocks(kept.request)

    def finish_receiving(self) -> None:
        """Finish receiving all or some of the external tokens.

        The slots of tokens that did not arrive contain garbage.
        """
        rows = [row for row, each in self.running.items() if each.is_receiving]
        if not rows:
            return
        conversation = self.running[self.choose.pick(rows)]
        request, (first, stop) = conversation.request, conversation.external
        table = [self.block_ids(request, g) for g in range(len(self.groups))]
        count = self.choose.pick([stop - first, self.choose.integer(0, stop - first)])
        self.receive(conversation, table, first, stop, first + count)
        going_on = self.manager.finish_receiving(request, count)
        conversation.external, conversation.is_receiving = (0, 0), False
        is_moved = not all(
            self.block_ids(request, g) == blocks[: len(self.block_ids(request, g))]
            for g, blocks in enumerate(table)
        )
        conversation.begins = going_on if is_moved else conversation.begins[0], going_on
        conversation.num_sure = going_on
        assert going_on == self.manager.num_computed_tokens(request)
        if self.may_lose():  # otherwise, pages may hold incorrect KV that was not yet reported
            self.check_what_is_kept("after KV was received")

    def cells_received(self, table: list[list[int]], first: int, stop: int, end: int) -> list[Cell]:
        """Return the cells of the received tokens that have slots.

        For a recurrent group, return only the cell that contains the state after the last token.

        A step that ends at `end` updates the received state in place. A circular buffer receives
        only the most recent tokens that fit in it.
        """
        cells = []
        for group, blocks in zip(self.groups, table):
            if not group.transferred:
                continue
            if group.pages == STATE:
                cells.append((blocks[(end - 1) // group.block_size], STATE, stop - 1))
                continue
            size, columns = group.block_size, group.num_places()
            cells += [
                (blocks[i // size % columns], i % size, i)
                for i in range(max(first, stop - columns * size), stop)
                if blocks[i // size % columns]
            ]
        return cells

    def receive(
        self,
        conversation: Conversation,
        table: list[list[int]],
        first: int,
        stop: int,
        arrived: int,
    ) -> None:
        for page, slot, position in self.cells_received(table, first, stop, stop):
            content = conversation.content(position) if position < arrived else BAD
            for pages in self.pages_of_all_times():
                pages.setdefault(page, {})[slot] = content
            self.last_written.append(page)

    def pages_of_all_times(self) -> list[Pages]:
        """Return current and saved pages.

        An external write must be applied to all of them, because it persists even if a step in
        flight is aborted.
        """
        return [self.pages, *(each.pages for each in self.in_flight.values())]

    def report(self) -> None:
        """Report the oldest step as completed, unless a lost page has not been reported yet."""
        if self.in_flight and self.lost_page is None and self.lost_on_host is None:
            step = min(self.in_flight)
            del self.in_flight[step]
            self.manager.report(StepReport(step, completed=True))

    def abort(self) -> None:
        """Abort a step and all later ones, and discard their writes.

        If a lost page has not been reported yet, only steps after the loss are aborted.
        """
        least = 0 if self.lost_page is None else self.lost_at
        steps = [step for step in self.in_flight if step >= least]
        if not steps or self.lost_on_host is not None:
            return
        if min(self.in_flight) <= self.num_steps - MOST_STEPS_BACK:
            return
        self.num_aborts += 1
        first = self.choose.pick(steps)
        aborted = self.in_flight[first]
        self.in_flight = {step: each for step, each in self.in_flight.items() if step < first}
        outcome = self.choose.pick(["carried out", "not carried out", "garbled"])
        if outcome == "not carried out":
            self.pages, self.host, self.tables = aborted.pages, aborted.host, aborted.tables
            for row in self.running:
                self.tables.setdefault(row, [[] for _ in self.groups])
        elif outcome == "garbled":
            self.garble_what_changed(self.pages, aborted.pages)
            self.garble_what_changed(self.host, aborted.host)
        self.restart(self.manager.report(StepReport(first, completed=False)))
        if self.may_lose():
            self.check_what_is_kept(f"after an abort, {outcome}")

    @staticmethod
    def garble_what_changed(pages: Pages, before: Pages) -> None:
        for page, slots in pages.items():
            for slot, content in slots.items():
                if before.get(page, {}).get(slot) != content:
                    slots[slot] = BAD

    def evict(self) -> None:
        most = self.manager.pool.num_total
        count = self.choose.integer(0, 4)
        self.manager.cache.evict([self.choose.integer(1, most) for _ in range(count)])

    def reset(self) -> None:
        self.manager.cache.reset(self.choose.pick([None, *range(len(self.groups))]))
        if self.may_lose():
            self.check_what_is_kept("after a reset")

    def lose_or_invalidate(self) -> None:
        """Lose a page's contents, or report an earlier loss."""
        if self.lost_on_host is not None:
            (last, page), self.lost_on_host = self.lost_on_host, None
            self.in_flight = {step: each for step, each in self.in_flight.items() if step > last}
            self.restart(self.manager.report(StepReport(last, True, failed_host_pages=[page])))
            self.check_what_is_kept("after a write to a host page failed")
        elif self.lost_page is None:
            self.lose_page()
        else:
            page, self.lost_page = self.lost_page, None
            if self.in_flight and self.choose.chance(2):
                step = min(self.in_flight)
                del self.in_flight[step]
                self.restart(self.manager.report(StepReport(step, True, failed_pages=[page])))
            else:
                self.restart(self.manager.invalidate([page]))
            self.check_what_is_kept("after an invalidation")

    def lose_page(self) -> None:
        if not self.last_written:
            return
        page = self.choose.pick(self.last_written)
        if not self.may_lose():
            return
        if any(page in pages_of(table) for table in self.tables.values()):
            self.pages[page] = dict.fromkeys(self.pages.get(page, {}), BAD)
            self.lost_page, self.lost_slots = page, dict(self.pages[page])
            self.lost_at = self.num_steps

    # The device ------------------------------------------------------------------------------------

    def execute(
        self,
        plan: StepPlan,
        asked: list[Conversation],
        leaving: list[int],
        held_before: dict[int, set[int]],
    ) -> None:
        """Execute a plan and compute the served conversations in `asked`."""
        fenced = set()
        if self.fences:
            fenced = set().union(*(each.reads for each in self.in_flight.values()))
        tables = copy.deepcopy(self.tables)
        step = StepInFlight(copy_pages(self.pages), copy_pages(self.host), tables)
        step.reads.update(plan.copy[:, 0].tolist(), plan.swap_out[:, 0].tolist())
        self.check_host_pages(plan)
        step.host_reads.update(plan.swap_in[:, 0].tolist())
        self.in_flight[plan.step_id] = step
        self.check_destinations(plan, fenced)
        self.swap_out(plan)
        self.carry_out_copies(plan)
        self.pages.update({page: {} for page in plan.zero.tolist()})
        self.swap_in(plan)
        self.update_tables(plan)
        self.notice_reuse_of_lost_page(plan, held_before)
        self.written_by = {}
        served = self.take_answers(plan, asked, leaving)
        self.fail_page([row for row, _ in served])
        for row, start in served:
            self.compute(row, start, step.reads, fenced - held_before.get(row, set()))
        if self.failing is not None:
            self.lost_slots, self.failing = dict(self.pages[self.failing]), None

    def fail_page(self, served: list[int]) -> None:
        """Make all writes to one of this step's pages fail: the plan's copies as well as computed
        KV.
        """
        if not (self.lose_pages and served and self.may_lose() and self.choose.chance(4)):
            return
        table = self.choose.pick([each for each in self.tables[self.choose.pick(served)] if each])
        page = self.choose.pick(table[-2:])
        if page:
            self.pages[page] = dict.fromkeys([*range(16), STATE], BAD)
            self.failing = self.lost_page = page
            self.lost_at = self.num_steps

    def check_destinations(self, plan: StepPlan, fenced: set[int]) -> None:
        """Check that no page is written twice or while a step in flight reads it, and that no copy
        reads a page that the plan writes.
        """
        written = [*plan.copy[:, 1].tolist(), *plan.zero.tolist(), *plan.swap_in[:, 1].tolist()]
        assert len(written) == len(set(written)), "a page is written twice"
        assert not set(plan.copy[:, 0].tolist()) & set(written), "a copy reads a page being written"
        assert not fenced & set(written), "a plan writes a page that a step in flight reads"
        self.last_written = written

    def check_host_pages(self, plan: StepPlan) -> None:
        """Check that no host page is written twice or while a step reads it."""
        written = plan.swap_out[:, 1].tolist()
        assert len(written) == len(set(written)), "a page of the host is written twice"
        read = set(plan.swap_in[:, 0].tolist())
        read = read.union(*(each.host_reads for each in self.in_flight.values()))
        assert not read & set(written), "a page of the host is written while it is read"

    def swap_out(self, plan: StepPlan) -> None:
        for page, target in plan.swap_out.tolist():
            self.host[target] = dict(self.pages.get(page, {}))
        if self.lose_pages and len(plan.swap_out) and self.may_lose() and self.choose.chance(8):
            target = self.choose.pick(plan.swap_out[:, 1].tolist())
            self.host[target] = dict.fromkeys(self.host[target], BAD)
            self.lost_on_host = plan.step_id, target

    def may_lose(self) -> bool:
        return self.lost_page is None and self.lost_on_host is None

    def swap_in(self, plan: StepPlan) -> None:
        for page, target in plan.swap_in.tolist():
            self.pages[target] = dict(self.host.get(page, {}))

    def carry_out_copies(self, plan: StepPlan) -> None:
        """Execute the copies. All sources are read before any destination is written."""
        copies = plan.copy.tolist()
        self.pages.update({target: dict(self.pages.get(source, {})) for source, target in copies})

    def update_tables(self, plan: StepPlan) -> None:
        for row in plan.clear_rows.tolist():
            self.tables[row] = [[] for _ in self.groups]
        for g in range(len(self.groups)):
            splits, ids = plan.append_splits[g].tolist(), plan.append_ids[g].tolist()
            for i, row in enumerate(plan.append_rows.tolist()):
                self.tables[row][g] += ids[splits[i] : splits[i + 1]]
            for row, column, page in plan.replace[g].tolist():
                self.tables[row][g][column] = page

    def notice_reuse_of_lost_page(self, plan: StepPlan, held_before: dict[int, set[int]]) -> None:
        """Stop tracking a lost page once it is reallocated. Invalidating the page would then affect
        its new owner instead of the requests that lost its contents.
        """
        lost = self.lost_page
        if lost is None:
            return
        if self.num_steps - self.lost_at > MOST_STEPS_BACK:
            self.is_over = True
        held = any(lost in pages for pages in held_before.values())
        written = self.last_written  # so far, pages moved to or zeroed by the plan
        appended = any(lost in ids.tolist() for ids in plan.append_ids)
        shared = any(
            lost in pages_of(table) and lost not in held_before.get(row, ())
            for row, table in self.tables.items()
        )
        refilled = self.pages.get(lost) != self.lost_slots
        if lost in written or (appended and not held) or (shared and refilled):
            self.is_over = True

    def take_answers(
        self, plan: StepPlan, asked: list[Conversation], leaving: list[int]
    ) -> list[tuple[int, int]]:
        """Return (row, first token) of served conversations.

        A rejected new request becomes idle.
        """
        served = []
        answers = zip(plan.rows.tolist(), plan.status.tolist(), plan.num_computed_tokens.tolist())
        for conversation, (row, status, start) in zip(asked, answers, strict=True):
            if row in leaving:
                is_out = self.manager.state(conversation.request) is RequestState.SWAPPED_OUT
                if is_out:
                    conversation.num_sure = start
                assert is_out == (status == Status.SERVED)
            elif status == Status.SERVED:
                if row not in self.running:
                    first, stop = conversation.external
                    conversation.begins = first if stop > first else start, start
                conversation.num_rejected = 0
                self.running[row] = conversation
                if not conversation.is_receiving:
                    served.append((row, start))
            elif conversation not in self.running.values():
                conversation.external, conversation.is_receiving = (0, 0), False
                self.idle.append(conversation)
        return served

    def compute(self, row: int, start: int, reads: set[int], forbidden: set[int]) -> None:
        """Read and write KV through the row's table, and accept some of the row's drafts.

        `reads` collects the pages that are read. A page in `forbidden` must not be written.
        """
        conversation, table = self.running[row], self.tables[row]
        request = conversation.request
        assert table == [self.block_ids(request, g) for g in range(len(self.groups))], "table"
        self.writing_row = row
        first, stop = conversation.external
        if start == stop and stop > first:
            self.load(conversation, table, forbidden)
        conversation.external = 0, 0
        end = num_accepted = self.manager.num_computed_tokens(request)
        sure = end
        if self.has_state and self.max_drafts:
            sure = min(end, max(start + 1, request.num_tokens))
        conversation.num_sure = sure
        if end > conversation.num_sampled:
            num_accepted = self.choose.integer(conversation.num_sampled, end)
        for position in range(start, end):
            cells = self.cells_read(table, position, sure, conversation.begins)
            reads.update(page for page, _, _ in cells)
            others = {self.written_by.get(page, row) for page, _, _ in cells} - {row}
            assert not others, "a row reads blocks that another row fills in the same step"
            assert all(page for page, _, _ in cells), f"row {row} reads the null page"
            accepted = [cell for cell in cells if cell[2] < num_accepted]
            wrong = self.wrong_cells(conversation, accepted)
            assert not wrong or not self.may_lose(), f"row {row} reads wrong KV: {wrong}"
            is_right = not wrong and position < num_accepted
            content = conversation.content(position) if is_right else BAD
            self.write(table, position, sure, content, forbidden)
        if self.has_circular and not self.has_state and start < end:
            # A kernel writes all tokens of the step before any token reads.
            cells = self.cells_read(table, start, sure, conversation.begins)
            wrong = self.wrong_cells(
                conversation, [cell for cell in cells if cell[2] < num_accepted]
            )
            assert not wrong or not self.may_lose(), f"row {row} wrote over what it reads: {wrong}"
        conversation.num_rejected = end - num_accepted
        if conversation.num_sampled <= num_accepted < LONGEST:
            conversation.num_sampled = num_accepted + 1

    def load(self, conversation: Conversation, table: list[list[int]], forbidden: set[int]) -> None:
        """Load external tokens within the step."""
        first, stop = conversation.external
        end = self.manager.num_computed_tokens(conversation.request)
        for page, slot, position in self.cells_received(table, first, stop, end):
            assert page not in forbidden, "KV is loaded to a page that a step in flight reads"
            content = BAD if page == self.failing else conversation.content(position)
            self.pages.setdefault(page, {})[slot] = content
            self.last_written.append(page)
            self.written_by[page] = self.writing_row

    def write(
        self,
        table: list[list[int]],
        position: int,
        sure: int,
        content: Content,
        forbidden: set[int],
    ) -> None:
        """Write a token's KV and the state after the token. The state after each draft has its own
        page.
        """
        for group, blocks in zip(self.groups, table):
            is_state = group.pages == STATE
            column = position // group.block_size
            if is_state:
                column = state_column(group, position + 1, sure)
            page = blocks[column % group.num_places()]
            assert page, "KV is written to the null page"
            assert page not in forbidden, "KV is written to a page that a step in flight reads"
            slot = STATE if is_state else position % group.block_size
            self.pages.setdefault(page, {})[slot] = BAD if page == self.failing else content
            self.last_written.append(page)
            self.written_by[page] = self.writing_row

    # Checks ----------------------------------------------------------------------------------------

    def block_ids(self, request: Request, group: int) -> list[int]:
        return self.manager.block_ids(request, group).tolist()

    def cells_read(
        self, table: list[list[int]], position: int, sure: int, begins: Begins
    ) -> list[Cell]:
        """Return the cells that the token at `position` reads in a step whose drafts begin at
        `sure`.
        """
        return [
            cell
            for group, blocks in zip(self.groups, table)
            for cell in cells_of(group, blocks, position, sure, begins)
        ]

    def wrong_cells(self, conversation: Conversation, cells: list[Cell]) -> list[Cell]:
        """Return the cells that do not hold the conversation's correct KV."""
        return [
            (page, slot, position)
            for page, slot, position in cells
            if not page or self.pages.get(page, {}).get(slot) != conversation.content(position)
        ]

    def check_what_is_kept(self, when: str) -> None:
        """Check that all blocks of all rows and all possible hits hold the correct content."""
        for row, conversation in self.running.items():
            is_out = self.manager.state(conversation.request) is RequestState.SWAPPED_OUT
            if not is_out and not conversation.is_receiving:
                self.check_row(row, conversation, when)
        for conversation in [*self.running.values(), *self.idle]:
            self.check_hit(conversation, when)
            self.check_cached(conversation, when)

    def check_row(self, row: int, conversation: Conversation, when: str) -> None:
        computed = self.manager.num_computed_tokens(conversation.request)
        if computed:
            table = [self.block_ids(conversation.request, g) for g in range(len(self.groups))]
            real = min(conversation.num_sampled, computed - conversation.num_rejected)
            cells = self.cells_read(table, computed, conversation.num_sure, conversation.begins)
            cells = [cell for cell in cells if cell[2] < real]
            for group, blocks in zip(self.groups, table):
                # The next step continues from this state.
                if group.pages == STATE and real >= conversation.num_sure:
                    column = state_column(group, real, conversation.num_sure)
                    cells.append((blocks[column], STATE, real - 1))
            wrong = self.wrong_cells(conversation, cells)
            assert not wrong, f"{when}, row {row} keeps wrong KV: {wrong}"

    def check_hit(self, conversation: Conversation, when: str) -> None:
        probe = Request("probe", conversation.tokens)
        found, num_hit, _ = self.manager.cache.find_prefix(probe)
        if num_hit:
            found = [found] if len(self.groups) == 1 else found
            table = [ids.tolist() for ids in found]
            wrong = self.wrong_cells(
                conversation, self.cells_read(table, num_hit, num_hit, (num_hit, num_hit))
            )
            assert not wrong, f"{when}, a hit of {num_hit} tokens has wrong KV: {wrong}"

    def check_cached(self, conversation: Conversation, when: str) -> None:
        """Check every cached device block that a hit could read in full, even if no such hit is
        possible now.
        """
        tokens = conversation.tokens
        hashes = self.manager.cache.hashes(Request("probe", tokens))
        for g, group in enumerate(self.groups):
            if not (group.keeps_all or group.pages == STATE):
                continue
            size = group.block_size
            num_hashes = size // self.hash_size
            for column, page in enumerate(
                self.manager.cache.find(hashes[num_hashes - 1 :: num_hashes], g).device.tolist()
            ):
                end = (column + 1) * size
                first = end - 1 if group.pages == STATE else column * size
                cells = [
                    (page, STATE if group.pages == STATE else i % size, i)
                    for i in range(first, end)
                ]
                wrong = self.wrong_cells(conversation, cells) if page > 0 else []
                assert not wrong, f"{when}, group {g} caches wrong KV: {wrong}"


def simulate(seed: int, *, lose_pages: bool) -> None:
    """Run the simulation with one seed. The seed is added to any error as a note."""
    try:
        Simulation(Chooser(seed), lose_pages=lose_pages).run(NUM_OPERATIONS)
    except BaseException as error:
        error.add_note(f"found by simulate({seed}, lose_pages={lose_pages})")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("lose_pages", [False, True], ids=["intact", "lost_pages"])
@pytest.mark.parametrize("first", sampled(range(0, NUM_SEEDS, SEEDS_PER_TEST)))
def test_every_read_finds_the_correct_kv(first, lose_pages):
    for seed in range(first, first + SEEDS_PER_TEST):
        simulate(seed, lose_pages=lose_pages)


@pytest.mark.parametrize("reset", [False, True], ids=["evict", "reset"])
def test_block_that_left_the_cache_before_its_failure_is_reported(reset):
    """Regression: blocks that were computed from the failed block stayed in the cache if the failed
    block was evicted after its request had been freed.
    """
    groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 32})]
    options = {"num_preallocate_tokens": 0, "fence_frees": True}
    manager = KVCacheManager.for_groups(groups[: 1 + reset], 100, 1024, **options)
    request = Request("a", range(70))
    plan = manager.step(new=[request])
    failed = int(manager.block_ids(request, int(reset))[0])
    manager.free(request)
    if reset:
        assert manager.cache.reset(1)
    else:
        manager.cache.evict([failed])
    manager.report(StepReport(plan.step_id, True, failed_pages=[failed]))
    # Another request computes the first block again, so that a lookup passes it.
    again = Request("b", range(70 if reset else 17))
    manager.report(StepReport(manager.step(new=[again]).step_id, True))
    expected = 64 if reset else 16
    assert manager.num_computed_tokens(again) == len(again.token_ids)
    hit = manager.cache.find_prefix(Request("c", range(70)))
    assert hit.num_tokens == expected
    blocks = manager.block_ids(again, 0)[: expected // 16].tolist()
    assert hit.block_ids[0].tolist() == blocks if reset else hit.block_ids.tolist() == blocks


@pytest.mark.parametrize("is_first", [False, True])
def test_evicted_block_that_another_request_has_computed_too_is_traced(is_first):
    """Regression: a lookup returned the other request's block with the same hash."""
    options = {"num_preallocate_tokens": 0, "fence_frees": True}
    manager = KVCacheManager(16, 100, 1024, **options)
    short, long = Request("a", range(17)), Request("b", range(70))
    plan = manager.step(new=[long, short] if is_first else [short, long])
    failed = int(manager.block_ids(long, 0)[0])
    manager.free(long)
    manager.cache.evict([failed])
    manager.report(StepReport(plan.step_id, True, failed_pages=[failed]))
    assert manager.cache.find_prefix(Request("c", range(70))).num_tokens <= 16


def test_every_mix_is_simulated():
    mixes = {KV_MIXES.index(Chooser(seed).pick(KV_MIXES)) for seed in range(NUM_SEEDS)}
    assert mixes == set(range(len(KV_MIXES)))


# Planted defects, which the simulation must detect ----------------------------------------------------


def test_skipped_copies_are_detected(monkeypatch):
    monkeypatch.setattr(Simulation, "carry_out_copies", lambda self, plan: None)
    expect_error("reads wrong KV", lose_pages=False)


def test_invalidation_without_effect_is_detected(monkeypatch):
    report = KVCacheManager.report
    monkeypatch.setattr(KVCacheManager, "invalidate", lambda self, ids: {})
    monkeypatch.setattr(
        KVCacheManager,
        "report",
        lambda self, of: report(self, StepReport(of.step_id, of.completed)),
    )
    # Detected after the loss is reported, or when the page is read.
    expect_error("wrong KV", lose_pages=True)


def test_abort_without_effect_is_detected(monkeypatch):
    report = KVCacheManager.report
    monkeypatch.setattr(
        KVCacheManager, "report", lambda self, of: report(self, of) if of.completed else {}
    )
    expect_error("after an abort, .* wrong KV", lose_pages=False)


def test_missing_fences_are_detected(monkeypatch):
    for_groups = KVCacheManager.for_groups
    monkeypatch.setattr(
        KVCacheManager,
        "for_groups",
        lambda *args, **options: for_groups(*args, **{**options, "fence_frees": False}),
    )
    expect_error("a step in flight reads", lose_pages=False)


def test_missing_external_kv_is_detected(monkeypatch):
    monkeypatch.setattr(Simulation, "receive", lambda self, *args: None)
    expect_error("after KV was received, .* wrong KV", lose_pages=False)


def expect_error(message: str, *, lose_pages: bool) -> None:
    with pytest.raises(AssertionError, match=message):
        for seed in range(NUM_SEEDS):
            simulate(seed, lose_pages=lose_pages)
