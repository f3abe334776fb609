# SPDX-License-Identifier: Apache-2.0
"""The reference scheduler, which supports chunked prefill, admission, preemption and resumption."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, TypeVar

import numpy as np

from kvcache.allocator import Admit, External, KVCacheManager, Request
from kvcache.allocator.request import last_tokens
from kvcache.checks import (
    MAX_INT32,
    check_range,
    instance,
    integer,
    integers,
    num_entries,
    one_of,
    shown,
)
from kvcache.kinds import make_kind
from kvcache.sources import KVSource
from kvcache.step import NO_IDS, Answers, Status, StepAnswers, StepPlan, StepReport
from kvcache_exchange.hints import HintExecutor
from kvcache_serve.engine.loading import Loading
from kvcache_serve.engine.sequence import Sequence, State

_log = logging.getLogger("kvcache.serve")
_DRAFTS = attrgetter("drafts")
_Asked = TypeVar("_Asked")


@dataclass(eq=False, slots=True)
class Decoding:
    """Running sequences without drafts whose only token to compute is the last one, ordered by rank.

    The scheduler keeps these arrays from step to step, so that a decode step does no work per
    sequence in Python. `num_computed[i]` is the number of computed tokens of `sequences[i]`, and
    `max_tokens[i]` is the number of known tokens at which this sequence ends. `num_computed` is updated
    in place, and `last_tokens` is replaced. All other attributes are constant and shared by steps.
    """

    sequences: list[Sequence]
    requests: list[Request]
    rows: np.ndarray  # int32[n]
    num_computed: np.ndarray  # int64[n]
    max_tokens: np.ndarray  # int64[n]
    last_tokens: np.ndarray  # int32[n]: the tokens to compute
    zeros: np.ndarray  # int64[n]: the number of drafts of each sequence
    ones: np.ndarray  # int64[n]: the number of tokens (and of logits) of each sequence

    def __len__(self) -> int:
        return len(self.sequences)

    @classmethod
    def nothing(cls) -> Decoding:
        none = np.zeros(0, np.int64)
        return cls([], [], NO_IDS, none, none, NO_IDS, none, none)

    def first(self, count: int) -> Decoding:
        """Return the first `count` sequences, with views of the arrays."""
        return Decoding(*(getattr(self, each.name)[:count] for each in fields(self)))


def _end_of(sequence: Sequence) -> int:
    return MAX_INT32 if sequence.max_tokens is None else sequence.max_tokens


@dataclass(eq=False, slots=True)
class ScheduledStep:
    """A scheduled step: its plan, the sequences to compute, and their inputs.

    Entry i of each list or array belongs to `sequences[i]`, which has row `rows[i]`. For this sequence,
    the step computes `token_ids[i]` starting at position `starts[i]`. The last `num_drafts[i]` of these
    tokens are drafts. The logits of the last `num_logits[i]` tokens are needed. `num_logits[i]` is 0 if
    the sequence has further known tokens to compute after this step. Do not change the lists and
    arrays, because later steps may share them.

    - `token_ids`: one array per sequence. If every sequence computes one token, int32[n, 1].
    - `decoding`: the sequences at the beginning of the step that compute one token each.
    - `refused`: sequences that do not fit even into an empty pool, and are therefore finished.
    - `loading`: sequences that were admitted to be loaded from a source. See
      `Scheduler.begin_loads`.
    """

    plan: StepPlan
    sequences: list[Sequence]
    rows: np.ndarray
    starts: np.ndarray
    token_ids: list[np.ndarray] | np.ndarray
    num_drafts: np.ndarray
    num_logits: np.ndarray
    decoding: Decoding
    refused: list[Sequence]
    loading: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        num_decoding = len(self.decoding)
        if num_decoding == len(self.token_ids):
            return num_decoding
        return num_decoding + sum(map(len, self.token_ids[num_decoding:]))


class Scheduler:
    """Schedules sequences step by step. Decoding has priority, prompts are computed in chunks, and
    sequences may be preempted.

    A step computes at most `max_num_batched_tokens` tokens. Decoding sequences are scheduled first,
    followed by chunks of prompts, swapped-out sequences and new sequences, each in order of rank and,
    for equal ranks, of admission. If a running sequence does not fit, it waits, and the last running
    sequence after it is preempted before the next step. With `preemption="swap"`, the preempted
    sequence's blocks are swapped out to the host. With "recompute", or if the blocks do not fit on the
    host, the sequence is freed. It is later recomputed, except for the part that is still cached.

    Every sequence ends, because a token is sampled after a bounded number of steps. Assume that none is
    sampled. Each sequence that is served then computes a chunk of its known tokens. The first sequence in
    order that lacks blocks loses none: later ones are preempted for it. If no sequence is served, those
    that decoding sequences keep from the token budget are preempted, too, until one decodes. A sequence
    that exceeds the whole pool is refused. A sequence that waits for its first blocks lets no later one
    pass.

    After `schedule`, call `complete` or `fail` for the step before the next `schedule`. During the
    step, the caller applies the plan, runs the model, and reports sampled tokens (`accept`), new
    children (`fork`) and ended sequences (`finish`).

    `sources` supply KV for new sequences. The first source that has KV for more tokens than the local
    hit loads them, and the remaining tokens are computed. A sequence whose source has not returned a
    result yet does not block other sequences. If a load fails, its tokens are computed instead.

    Args:
        manager: A `KVCacheManager` whose `step` is called only by this scheduler.
        synchronize: Called before loads begin. Must wait until the device has completed the work of
            all steps. None: no wait is needed, because the device works synchronously.

    Raises:
        TypeError, ValueError: An option is invalid.

    >>> from kvcache import KVCacheManager, Request
    >>> scheduler = Scheduler(KVCacheManager(16, 9, 128, max_num_reqs=4), max_num_batched_tokens=64)
    >>> scheduler.add(Sequence(Request("r1", range(100))))
    >>> step = scheduler.schedule()
    >>> step.starts, len(step.token_ids[0]), step.num_logits
    (array([0]), 64, array([0]))
    >>> scheduler.complete(step)
    >>> step = scheduler.schedule()
    >>> step.starts, len(step.token_ids[0]), step.num_logits
    (array([64]), 36, array([1]))
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_batched_tokens: int,
        preemption: Literal["swap", "recompute"] = "swap",
        sources: SequenceOf[KVSource] = (),
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        instance(manager, KVCacheManager, "manager")
        one_of(preemption, "preemption", ("swap", "recompute"))
        self.manager = manager
        self.max_num_batched_tokens = integer(
            max_num_batched_tokens, "max_num_batched_tokens", least=1
        )
        self.preemption = preemption
        self._loading, self._synchronize = Loading(sources), synchronize
        self.hints = HintExecutor(manager, sources=self.sources)
        self.waiting: list[Sequence] = []  # sequences without a row, ordered by rank
        self.admitted: list[Sequence] = []  # sequences with a row, ordered by rank
        self.num_swapped_out = self.num_recomputed = 0
        self.max_num_rows = manager.options.max_num_reqs or MAX_INT32
        kinds = [make_kind(group.kind, group.options) for group in manager.groups]
        of_states = [kind.num_speculative_blocks for kind in kinds if not kind.pages.has_slots]
        self._has_states = bool(of_states)
        self._max_drafts = min(of_states, default=MAX_INT32)
        self._decoding: Decoding | None = None  # None: must be rebuilt
        self._others: list[Sequence] = []  # other running sequences, ordered by rank
        # Whether sequences have started or stopped running since `_decoding` was built.
        self._has_changed = False
        self._victim: Sequence | None = None
        self._first_stuck: Sequence | None = None  # waiting sequence that the last step did not fit
        self._is_short = False  # whether the last step lacked blocks for a running sequence
        self._in_flight: ScheduledStep | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that are waiting or have a row."""
        return len(self.waiting) + len(self.admitted)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. Raises ValueError if it was added before or needs too many rows."""
        instance(sequence, Sequence, "sequence")
        if sequence.state is not State.WAITING or sequence in self.waiting:
            raise ValueError(
                f"sequence {sequence.request.request_id!r} is {sequence.state.value}: expected a new "
                "sequence"
            )
        if sequence.num_rows > self.max_num_rows:
            raise ValueError(
                f"sequence {sequence.request.request_id!r} needs {sequence.num_rows} rows: expected at "
                f"most {self.max_num_rows}, the manager's max_num_reqs"
            )
        self._insert(self.waiting, sequence)

    def num_pending(self, sequence: Sequence) -> int:
        """Return the number of known tokens that are not computed."""
        instance(sequence, Sequence, "sequence")
        return self._num_pending(sequence)

    def _num_pending(self, sequence: Sequence) -> int:
        if sequence.state is State.WAITING:
            return sequence.request.num_tokens
        return sequence.request.num_tokens - self.manager.num_computed_tokens(sequence.request)

    @property
    def sources(self) -> list[KVSource]:
        """The sources of KV outside the engine, in order of preference."""
        return self._loading.sources

    @property
    def is_waiting_for_sources(self) -> bool:
        """Whether sequences are loading, or a source has not returned a result yet."""
        return len(self._loading) > 0 or self._loading.is_matching

    def schedule(self) -> ScheduledStep | None:
        """Return the next step, or None if no work can be done now (see `is_waiting_for_sources`).

        Raises:
            RuntimeError: A step is in progress.
        """
        if self._in_flight is not None:
            raise RuntimeError(
                f"step {self._in_flight.plan.step_id} is in progress: call complete or fail first"
            )
        if self.sources:
            self._poll()
        self.hints.expire()
        guests, num_guests = [], self.hints.num_rows
        leaving = [] if self._victim is None else self._leaving()
        decoding, asked, budget = self._running(leaving)
        new: list[tuple[Sequence, int, int]] = []
        if not leaving:
            swapped, budget = self._swapped(budget)
            asked += swapped
            if not ((decoding or asked) and (swapped or self._is_short)):
                new = self._new(budget)
        if self.hints.num_pending:
            guests = self._guests(new, leaving)
        if not (decoding or asked or new or leaving or guests):
            if self.is_waiting_for_sources or num_guests:
                return None
            if self.num_unfinished:
                raise RuntimeError(
                    f"none of the {self.num_unfinished} unfinished sequences has tokens to compute "
                    "or can get a row: call accept() or finish() first"
                )
            return None
        manager = self.manager
        rows, counts = decoding.rows, decoding.ones
        if asked:
            more = [(manager.row(sequence.request), count) for sequence, count in asked]
            more_rows, more_counts = np.array(more, np.int32).T
            rows, counts = np.concatenate((rows, more_rows)), np.concatenate((counts, more_counts))
        try:
            plan = manager.step(
                rows,
                counts,
                new=[
                    Admit(
                        sequence.request,
                        count,
                        External(external, delayed=True) if external else None,
                    )
                    for sequence, count, external in new
                ]
                + guests,
                swap_out=[manager.row(sequence.request) for sequence in leaving],
            )
        except BaseException:
            self._decoding = None  # rebuild it, because a sequence to preempt is still running
            self.hints.failed()
            raise
        if guests:
            self.hints.planned(plan.answers.new.status[len(new) :].tolist())
        return self._answered(plan, decoding, asked, leaving, new)

    def complete(self, step: ScheduledStep, report: StepReport | None = None) -> None:
        """Record that a step's plan was applied.

        If `report` contains failed pages, call this method before the model runs and skip the
        model. The contents of these pages are recomputed.

        Args:
            step: The step in progress.
            report: The worker's report. None: the step succeeded.
        """
        self._check_in_flight(step)
        if report is None:
            report = StepReport(step.plan.step_id, True)
        else:
            report = self._checked_report(report)
        self.manager.report(report)
        self._in_flight = None
        if report.completed:
            step.decoding.num_computed += 1
            if self.hints.num_pending:
                self.hints.completed()
        else:
            self.hints.failed()
            self._decoding = None
            self._cancel_loads(step)

    @staticmethod
    def _checked_report(report: StepReport) -> StepReport:
        """Return the report of a step whose tokens were not computed, if the report contains failed
        pages.
        """
        instance(report, StepReport, "report")
        failed = (report.failed_pages, report.failed_host_pages)
        if any(num_entries(pages, "failed pages of the report") for pages in failed):
            return StepReport(report.step_id, False, *failed)
        return report

    def begin_loads(self, step: ScheduledStep) -> None:
        """Start the loads of `step.loading`. Call this method after the step's plan was applied."""
        self._check_in_flight(step)
        if self._synchronize is not None and (step.loading or self.hints.num_pending):
            self._synchronize()  # pages are zeroed before sources write to them
        while step.loading:
            sequence = step.loading.pop(0)
            if not self._loading.begin(sequence):
                self._wait_again(sequence)
        if self.hints.num_pending:
            self.hints.begin()

    def fail(self, step: ScheduledStep) -> None:
        """Undo a step whose plan was not applied or whose model failed."""
        self._check_in_flight(step)
        self.manager.abort(step.plan.step_id)
        self._in_flight = self._decoding = None
        self.hints.failed()
        self._cancel_loads(step)

    def accept(self, sequence: Sequence, token_ids: list[int], num_rejected: int = 0) -> None:
        """Append sampled tokens: the accepted drafts and one more token. Rejected drafts are
        dropped.

        Raises:
            TypeError, ValueError: Tokens are invalid, more drafts are rejected than were computed,
                or the sequence has no row.
        """
        instance(sequence, Sequence, "sequence")
        if sequence.state is State.FINISHED:
            raise ValueError("sequence is finished: expected an unfinished sequence")
        if type(token_ids) is not list:
            token_ids = integers(token_ids, "token_ids", ()).tolist()
        for token in token_ids:
            if type(token) is not int or not 0 <= token <= MAX_INT32:
                token_ids = integers(token_ids, "token_ids", ())
                check_range("token_ids", "is", token_ids, 0, MAX_INT32 + 1)
                break
        if type(num_rejected) is not int or num_rejected:
            num_rejected = integer(num_rejected, "num_rejected")
            self.manager.reject_tokens(sequence.request, num_rejected)
            self._decoding = None
        sequence.drafts = []
        sequence.request.append_tokens(token_ids)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Share the blocks of `parent` with `child`. Returns False if the child has to wait.

        The child waits for admission if no row is free or the parent has no blocks on the device.
        It then uses the parent's blocks that are still cached as its prefix hit.
        """
        for name, each in (("parent", parent), ("child", child)):
            instance(each, Sequence, name)
        if not self._knows(parent):
            raise ValueError(f"parent is {parent.state.value}: expected a sequence that was added")
        if child.state is not State.WAITING or child.has_begun or self._knows(child):
            raise ValueError(f"child is {child.state.value}: expected a new sequence")
        is_there = parent.state is State.RUNNING
        has_row = is_there and self.manager.fork(parent.request, child.request) >= 0
        parent.num_rows = max(1, parent.num_rows - child.num_rows)
        child.has_begun = True
        if has_row:
            child.state = State.RUNNING
            child.num_cached_tokens = self.manager.num_computed_tokens(child.request)
            self._insert(self.admitted, child)
            self._has_changed = True
            return True
        self._insert(self.waiting, child)
        return False

    def finish(
        self,
        sequence: Sequence,
        *,
        free: Callable[[Request], object] | None = None,
        **release: object,
    ) -> None:
        """Free a sequence in any state. Has no effect on a finished sequence.

        Args:
            sequence: The sequence to free.
            free: Function that is called instead of `KVCacheManager.free` for the request of a running
                sequence, for example `Connector.publish`.
            release: Arguments of `KVCacheManager.free` for eviction policies.
        """
        instance(sequence, Sequence, "sequence")
        if free is not None and not callable(free):
            raise TypeError(f"free is {shown(free)}: expected a callable or None")
        if sequence.state is State.FINISHED:
            return
        if not self._knows(sequence):
            raise ValueError(
                f"sequence is {sequence.state.value}: expected a sequence that was added"
            )
        if sequence.state is State.RUNNING and free is not None:
            free(sequence.request)
        elif sequence.state is not State.LOADING:
            self.manager.free(sequence.request, **release)
        self._loading.forget(sequence)
        (self.waiting if sequence.state is State.WAITING else self.admitted).remove(sequence)
        sequence.state, self._has_changed = State.FINISHED, True
        if self._victim is sequence:
            self._victim = None

    def _check_in_flight(self, step: ScheduledStep) -> None:
        instance(step, ScheduledStep, "step")
        if step is not self._in_flight:
            raise ValueError(
                "step is not in progress: expected the last step that schedule returned"
            )

    def _knows(self, sequence: Sequence) -> bool:
        """Return whether the sequence is in the queue that matches its state."""
        queue = self.waiting if sequence.state is State.WAITING else self.admitted
        return sequence in queue

    def _leaving(self) -> list[Sequence]:
        """Return the victim if it will be swapped out. If it will be recomputed, free it immediately."""
        victim, self._victim = self._victim, None
        if self.preemption == "swap" and self.manager.host_pool is not None:
            return [victim]
        self._recompute(victim)
        return []

    def _recompute(self, sequence: Sequence) -> None:
        self.manager.free(sequence.request)
        sequence.num_preemptions += 1
        self.num_recomputed += 1
        self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        """Queue a freed sequence for admission again."""
        self.admitted.remove(sequence)
        sequence.state, self._has_changed = State.WAITING, True
        self._insert(self.waiting, sequence)

    def _poll(self) -> None:
        self._loading.is_matching = False
        for sequence, arrived in self._loading.poll(self.hints):
            if arrived.num_computed_tokens is None:
                self._wait_again(sequence)
                continue
            sequence.state, self._has_changed = State.RUNNING, True
            loaded = arrived.num_loaded_tokens if arrived.are_cached else 0
            self._count_cached(sequence, 0 if sequence.num_preemptions else loaded)

    def _cancel_loads(self, step: ScheduledStep) -> None:
        """Put sequences whose loads have not started back into the queue."""
        while step.loading:
            sequence = step.loading.pop(0)
            self._loading.give_up(sequence)
            self._wait_again(sequence)

    def _running(self, leaving: list[Sequence]) -> tuple[Decoding, list[tuple[Sequence, int]], int]:
        """Return the running sequences to compute and the remaining token budget of the step.

        The result contains the decoding sequences, then a list with every other sequence and its number
        of tokens to compute, and finally the budget. If any sequence has drafts, all sequences are in
        the list, beginning with the sequences that have one known token to compute.
        """
        if leaving or not self._is_current():
            self._collect(leaving)
        budget = self.max_num_batched_tokens
        decoding = self._decoding
        if len(decoding) > budget:
            decoding = decoding.first(budget)
        budget -= len(decoding)
        asked: list[tuple[Sequence, int]] = []
        if not self._others:
            return decoding, asked, budget
        pending = [(sequence, self._num_pending(sequence)) for sequence in self._others]
        for sequence, count in sorted(pending, key=lambda each: each[1] > 1):
            if count and budget:
                sequence.drafts = self._fitting_drafts(sequence, count, budget)
                taken = self._chunk(sequence, min(count + len(sequence.drafts), budget))
                asked.append((sequence, taken))
                budget -= taken
        return decoding, asked, budget

    def _is_current(self) -> bool:
        """Update the last tokens in `_decoding`. Return False if other sequences are decoding now."""
        decoding = self._decoding
        if decoding is None or self._has_changed:
            return False
        if any(map(_DRAFTS, decoding.sequences)):
            return False
        others = self._others
        if others and any(each.drafts or self._num_pending(each) == 1 for each in others):
            return False
        tokens = last_tokens(decoding.requests, decoding.num_computed)
        if tokens is None:
            self._decoding = None
            return False
        decoding.last_tokens = tokens
        return True

    def _collect(self, leaving: list[Sequence]) -> None:
        """Collect the running sequences, in the order of `admitted`. Sequences that were already
        decoding are not looked up again.
        """
        known = Decoding.nothing() if self._decoding is None else self._decoding
        places = {each: i for i, each in enumerate(known.sequences)}
        running = [
            each for each in self.admitted if each.state is State.RUNNING and each not in leaving
        ]
        have_drafts = any(each.drafts for each in running)
        order: list[int] = []
        started, sequences, others = [], [], []
        for each in running:
            place = places.get(each)
            if have_drafts or (place is None and self._num_pending(each) != 1):
                others.append(each)
                continue
            if place is None:
                place = len(known) + len(started)
                started.append(each)
            order.append(place)
            sequences.append(each)
        more = [
            (self.manager.row(each.request), each.request.num_tokens - 1, _end_of(each))
            for each in started
        ]
        rows, num_computed, max_tokens = np.array(more, np.int64).reshape(-1, 3).T
        requests = [each.request for each in sequences]
        num_computed = np.concatenate((known.num_computed, num_computed))[order]
        tokens = last_tokens(requests, num_computed)
        if tokens is None:  # the state of some sequences has changed
            self._decoding = None
            self._collect(leaving)
            return
        self._decoding = Decoding(
            sequences,
            requests,
            np.concatenate((known.rows, rows.astype(np.int32)))[order],
            num_computed,
            np.concatenate((known.max_tokens, max_tokens))[order],
            tokens,
            np.zeros(len(sequences), np.int64),
            np.ones(len(sequences), np.int64),
        )
        self._others, self._has_changed = others, False

    def _swapped(self, budget: int) -> tuple[list[tuple[Sequence, int]], int]:
        asked: list[tuple[Sequence, int]] = []
        if len(self._decoding) + len(self._others) == len(self.admitted):
            return asked, budget  # no sequence is swapped out
        for sequence in self.admitted:
            if sequence.state is State.SWAPPED and budget:
                sequence.drafts = []
                taken = self._chunk(sequence, min(self._num_pending(sequence), budget))
                if taken:
                    asked.append((sequence, taken))
                    budget -= taken
        return asked, budget

    def _new(self, budget: int) -> list[tuple[Sequence, int, int]]:
        """Return the sequences to admit and, for each, the number of tokens to compute and the number
        of tokens to load from a source.
        """
        if not self.waiting:
            return []
        rows = self.max_num_rows - sum(each.num_rows for each in self.admitted)
        new = []
        for sequence in sorted(self.waiting, key=lambda each: not each.has_begun):
            rows -= sequence.num_rows
            if rows < self.hints.num_rows:
                self.hints.give_way()
            if rows < self.hints.num_rows or budget == 0:
                break
            external = None
            if not self.hints.is_loading(sequence.request):
                external = self._loading.match(sequence)
            if external is None:
                rows += sequence.num_rows
                continue
            sequence.drafts = []
            taken, request = 0, sequence.request
            if not external:
                num_cached = self.manager.cache.cached_tokens(request).with_host
                most = min(request.num_tokens - num_cached, budget, sequence.most_new)
                taken = self._chunk(sequence, most)
            self.hints.look(request)
            new.append((sequence, taken, external))
            budget -= taken
            if sequence is self._first_stuck:
                break
        return new

    def _guests(self, new: list[tuple[Sequence, int, int]], leaving: list[Sequence]) -> list[Admit]:
        """Return the requests to admit for hints, which are served after all sequences that fit."""
        rows = self.max_num_rows - sum(each.num_rows for each in self.admitted)
        rows -= self.hints.num_rows + sum(sequence.num_rows for sequence, _, _ in new)
        is_swapped = any(each.state is State.SWAPPED for each in self.admitted)
        may_admit = not (leaving or is_swapped or self._is_short or len(self.waiting) > len(new))
        return self.hints.admits(may_admit, max(rows, 0))

    def _chunk(self, sequence: Sequence, count: int) -> int:
        """Return how many of `count` tokens to compute, so that the step ends at a position whose
        recurrent states should be kept.
        """
        if self._has_states and count > 1 and not sequence.drafts:
            return self.manager.checkpoint_tokens(sequence.request, count)
        return count

    def _fitting_drafts(self, sequence: Sequence, count: int, budget: int) -> list[int]:
        """Return the drafts to compute.

        Drafts are computed only if they directly follow the last known token, and only within
        `max_tokens`.
        """
        if count > 1:
            return []
        most = self.manager.max_model_len
        if sequence.max_tokens is not None:
            most = min(most, sequence.max_tokens - 1)
        room = min(most - sequence.request.num_tokens, budget - count, self._max_drafts)
        return sequence.drafts[: max(room, 0)]

    def _answered(
        self,
        plan: StepPlan,
        decoding: Decoding,
        asked: list[tuple[Sequence, int]],
        leaving: list[Sequence],
        new: list[tuple[Sequence, int, int]],
    ) -> ScheduledStep:
        k = len(decoding)
        # `count_nonzero` is several times as fast as `any`.
        has_moved = np.count_nonzero(plan.num_computed_tokens[:k] != decoding.num_computed)
        are_served = not (np.count_nonzero(plan.status[:k]) or has_moved)  # status 0 is SERVED
        if are_served and k == len(plan.status):
            self._is_short = False
            self._in_flight = step = _scheduled(plan, decoding, [], [], [])
            return step
        running = [sequence for sequence, _ in asked]
        if not are_served:
            running = decoding.sequences + running
            decoding, k, self._decoding = decoding.first(0), 0, None
        results = self._results(plan.answers, running, k, new)
        self._leave(leaving, plan.answers.swap_out.status.tolist())
        for sequence, *_ in results.entries:
            self._run(sequence)
        for sequence, num_external in results.loading:
            self._load(sequence, num_external)
        for sequence in results.refused:
            self.finish(sequence)
        self._note_stuck(results, is_busy=bool(decoding or leaving))
        loading = [sequence for sequence, _ in results.loading]
        self._in_flight = step = _scheduled(
            plan, decoding, results.entries, results.refused, loading
        )
        return step

    def _results(
        self,
        answers: StepAnswers,
        running: list[Sequence],
        first: int,
        new: list[tuple[Sequence, int, int]],
    ) -> _Results:
        """Sort the sequences by the answers of the manager. Those of `running` start at `first`."""
        results = _Results()
        for sequence, row, status, start, count in _answers_of(answers.rows, first, running):
            if status == Status.SERVED:
                results.entries.append((sequence, row, start, count))
            elif status == Status.NEVER:
                results.refused.append(sequence)
            else:
                results.stuck.append(sequence)
        for asked, row, status, start, count in _answers_of(answers.new, 0, new):
            sequence, most, num_external = asked
            if status == Status.SERVED and num_external:
                results.loading.append((sequence, num_external))
            elif status == Status.SERVED:
                results.entries.append((sequence, row, start, count))
            elif status == Status.NEVER and num_external:  # may fit without external tokens
                self._loading.give_up(sequence, "it does not fit if the source's tokens are loaded")
            elif status == Status.NEVER and not self._shrink(sequence, most):
                results.refused.append(sequence)
            else:
                results.stuck.append(sequence)
        return results

    def _leave(self, leaving: list[Sequence], statuses: list[int]) -> None:
        """Record the swap-out of preempted sequences. Those that the host cannot hold recompute."""
        for sequence, status in zip(leaving, statuses):
            if status == Status.SERVED:
                sequence.state, self._has_changed = State.SWAPPED, True
                sequence.num_preemptions += 1
                self.num_swapped_out += 1
            else:
                self._recompute(sequence)

    def _run(self, sequence: Sequence) -> None:
        if sequence.state is not State.RUNNING:
            self._has_changed = True
        if sequence.state is State.WAITING:
            self._admit(sequence)
            self._count_cached(sequence)
            self.hints.hit(sequence.request)
        sequence.state, sequence.most_new = State.RUNNING, MAX_INT32

    def _load(self, sequence: Sequence, num_external: int) -> None:
        self._admit(sequence)
        sequence.state, sequence.num_external_tokens = State.LOADING, num_external
        self.hints.hit(sequence.request)
        self._loading.admitted(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._insert(self.admitted, sequence)
        sequence.has_begun = True
        if sequence.admitted_at is None:
            sequence.admitted_at = time.monotonic()
        self._explain_misses(sequence)

    def _note_stuck(self, results: _Results, is_busy: bool) -> None:
        """Give way to sequences that wait for blocks. `is_busy`: others are served or leave."""
        stuck = results.stuck
        if stuck:
            self.hints.give_way()
        is_busy = is_busy or bool(results.entries or results.refused) or self.is_waiting_for_sources
        self._first_stuck = next((each for each in stuck if each.state is State.WAITING), None)
        self._choose_victim(stuck, nothing_done=bool(stuck) and not is_busy)

    def _count_cached(self, sequence: Sequence, num_loaded: int = 0) -> None:
        sequence.num_cached_loads += num_loaded
        found = self.manager.cache.hit_tokens(sequence.request) + sequence.num_cached_loads
        sequence.num_cached_tokens = max(found, sequence.num_cached_tokens or 0)

    def _explain_misses(self, sequence: Sequence) -> None:
        """Log why prompt tokens were not found in the cache, if the manager records the reasons."""
        if self.manager.options.explain_misses is not None and _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.manager.cache.explain(sequence.request))

    def _shrink(self, sequence: Sequence, count: int | None) -> bool:
        """Halve the first chunk of a new sequence that never fits in one chunk, because admission leaves
        the watermark free. Return False if smaller chunks do not fit either.
        """
        if count is None or count == 1:
            return False
        if self.manager.would_fit(Admit(sequence.request, 1), whole=True) == Status.NEVER:
            return False
        sequence.most_new = count // 2
        return True

    def _choose_victim(self, stuck: list[Sequence], nothing_done: bool) -> None:
        """Choose the last running sequence as the victim, if a running sequence before it waits for
        blocks.

        A victim is also chosen if no sequence was served. In this case, all sequences with blocks wait
        for blocks, or were not asked because others took the token budget.
        """
        self._is_short = any(each.state is State.RUNNING for each in stuck)
        if not (self._is_short or nothing_done):
            return
        running = [each for each in self.admitted if each.state is State.RUNNING]
        short = {*stuck}
        first = next((i for i, each in enumerate(running) if each in short), -1)
        behind = running[first + 1 :] or (running[:first] if nothing_done else [])
        self._victim = behind[-1] if behind else None

    @staticmethod
    def _insert(queue: list[Sequence], sequence: Sequence) -> None:
        """Insert a sequence after all sequences with an equal or smaller rank."""
        at = len(queue)
        while at and queue[at - 1].rank > sequence.rank:
            at -= 1
        queue.insert(at, sequence)


@dataclass(slots=True)
class _Results:
    """What the manager answered to the sequences of a step."""

    entries: list[tuple[Sequence, int, int, int]] = field(default_factory=list)  # row, start, count
    loading: list[tuple[Sequence, int]] = field(default_factory=list)  # external tokens
    refused: list[Sequence] = field(default_factory=list)
    stuck: list[Sequence] = field(default_factory=list)  # wait for blocks


def _answers_of(
    answers: Answers, first: int, asked: list[_Asked]
) -> Iterator[tuple[_Asked, int, int, int, int]]:
    """Return (asked, row, status, start, count) for the answers from `first` on."""
    return zip(asked, *(each[first:].tolist() for each in answers))


def _scheduled(
    plan: StepPlan,
    decoding: Decoding,
    entries: list[tuple[Sequence, int, int, int]],
    refused: list[Sequence],
    loading: list[Sequence],
) -> ScheduledStep:
    k = len(decoding)
    token_ids, sequences, rows = decoding.last_tokens[:, None], decoding.sequences, decoding.rows
    num_drafts, num_logits = decoding.zeros, decoding.ones
    # Copy the array, because `complete` updates the scheduler's array in place.
    starts = decoding.num_computed.copy()
    if entries or not k:
        token_ids, drafts_of, logits_of = list(token_ids), [], []
        for sequence, _, start, count in entries:
            known, stop = sequence.request.num_tokens, start + count
            drafts = sequence.drafts[: max(stop - known, 0)]
            tokens = sequence.request.token_ids[start : min(stop, known)]
            token_ids.append(np.concatenate([tokens, drafts]) if drafts else tokens)
            drafts_of.append(len(drafts))
            logits_of.append(1 + len(drafts) if stop >= known else 0)
        sequences = sequences + [sequence for sequence, *_ in entries]
        rows = np.concatenate((rows, np.array([row for _, row, _, _ in entries], np.int32)))
        starts = np.concatenate((starts, np.array([start for _, _, start, _ in entries], np.int64)))
        num_drafts = np.concatenate((num_drafts, np.array(drafts_of, np.int64)))
        num_logits = np.concatenate((num_logits, np.array(logits_of, np.int64)))
    return ScheduledStep(
        plan=plan,
        sequences=sequences,
        rows=rows,
        starts=starts,
        token_ids=token_ids,
        num_drafts=num_drafts,
        num_logits=num_logits,
        decoding=decoding,
        refused=refused,
        loading=loading,
    )
