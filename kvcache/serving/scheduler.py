"""The reference scheduler: who is computed in the next step, who waits, who leaves and comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.checks import MAX_INT32, check_range, instance, integer, integers, num_entries, shown
from kvcache.kinds import make_kind
from kvcache.serving.sequence import Sequence, State
from kvcache.step import Status, StepPlan, StepReport


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step: its plan, and the sequences that are computed in it, each with what a batch needs.

    Entry i of each list is of `sequences[i]`, which has row `rows[i]`, computes `token_ids[i]` from
    position `starts[i]` on, the last `num_drafts[i]` of them drafts, and wants the logits of its last
    `num_logits[i]` tokens: none where known tokens remain to be computed. `refused`: sequences that do
    not fit into the whole pool; they are finished.
    """

    plan: StepPlan
    sequences: list[Sequence]
    rows: np.ndarray
    starts: np.ndarray
    token_ids: list[np.ndarray]
    num_drafts: list[int]
    num_logits: list[int]
    refused: list[Sequence]


class Scheduler:
    """Asks a manager for blocks, step after step: chunked prefill, decode first, preemption.

    A step has at most `max_num_batched_tokens` tokens. Decoding sequences come first, then prompts in
    chunks, then those that were swapped out, then new ones, each by rank. A sequence that does not fit
    stays; the sequence of the last rank is preempted for it before the next step: `preemption` "swap"
    moves its blocks to the host, or, where the host has no room or there is none, does as "recompute":
    frees it, to be computed again behind what is still cached of it.

    One `schedule` follows the other only after `complete` or `fail` of the step. Between them the caller
    applies the plan, runs the model, and says what was sampled (`accept`), which children a sequence has
    (`fork`) and who has ended (`finish`).

    `manager`: any `KVCacheManager` whose requests no one else steps. TypeError or ValueError for wrong
    options.

    >>> from kvcache import KVCacheManager, Request
    >>> scheduler = Scheduler(KVCacheManager(16, 9, 128, max_num_reqs=4), max_num_batched_tokens=64)
    >>> scheduler.add(Sequence(Request("r1", range(100))))
    >>> step = scheduler.schedule()
    >>> step.starts, len(step.token_ids[0]), step.num_logits
    (array([0]), 64, [0])
    >>> scheduler.complete(step)
    >>> step = scheduler.schedule()
    >>> step.starts, len(step.token_ids[0]), step.num_logits
    (array([64]), 36, [1])
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_batched_tokens: int,
        preemption: Literal["swap", "recompute"] = "swap",
    ) -> None:
        instance(manager, KVCacheManager, "manager")
        if not isinstance(preemption, str) or preemption not in ("swap", "recompute"):
            raise ValueError(f"preemption is {shown(preemption)}: expected 'swap' or 'recompute'")
        self.manager = manager
        self.max_num_batched_tokens = integer(
            max_num_batched_tokens, "max_num_batched_tokens", least=1
        )
        self.preemption = preemption
        self.waiting: list[Sequence] = []  # by rank
        self.admitted: list[Sequence] = []  # those with a row, by rank
        self.num_swapped_out = self.num_recomputed = 0
        self.max_num_rows = manager.options.max_num_reqs or MAX_INT32
        kinds = [make_kind(group.kind, group.options) for group in manager.groups]
        of_states = [kind.num_speculative_blocks for kind in kinds if kind.pages == "state"]
        self._has_states = bool(of_states)
        self._max_drafts = min(of_states, default=MAX_INT32)
        self._victim: Sequence | None = None
        self._is_short = False  # a running sequence got no blocks in the last step
        self._in_flight: ScheduledStep | None = None

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait or have a row."""
        return len(self.waiting) + len(self.admitted)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in. ValueError for one that was added before, or needs too many rows."""
        instance(sequence, Sequence, "sequence")
        if sequence.state is not State.WAITING or sequence in self.waiting:
            raise ValueError(
                f"sequence {sequence.request.request_id!r} is {sequence.state.value}: expected a new one"
            )
        if sequence.num_rows > self.max_num_rows:
            raise ValueError(
                f"sequence {sequence.request.request_id!r} needs {sequence.num_rows} rows: expected at "
                f"most {self.max_num_rows}, max_num_reqs of the manager"
            )
        self._insert(self.waiting, sequence)

    def num_pending(self, sequence: Sequence) -> int:
        """Known tokens that are not computed."""
        instance(sequence, Sequence, "sequence")
        return self._num_pending(sequence)

    def _num_pending(self, sequence: Sequence) -> int:
        if sequence.state is State.WAITING:
            return sequence.request.num_tokens
        return sequence.request.num_tokens - self.manager.num_computed_tokens(sequence.request)

    def schedule(self) -> ScheduledStep | None:
        """The next step, None where there is nothing to do. RuntimeError while a step is under way."""
        if self._in_flight is not None:
            raise RuntimeError(
                f"step {self._in_flight.plan.step_id} is under way: expected complete or fail first"
            )
        leaving = self._leaving()
        asked = self._running(leaving)
        budget = self.max_num_batched_tokens - sum(count for _, count in asked)
        new: list[tuple[Sequence, int]] = []
        if not leaving:
            swapped, budget = self._swapped(budget)
            asked += swapped
            if not (asked and (swapped or self._is_short)):
                new = self._new(budget)
        if not (asked or new or leaving):
            if self.waiting and self.admitted:
                # Beams that wait for each other hold all rows: one is computed again later.
                self._recompute(max(self.admitted, key=lambda each: each.rank))
                return self.schedule()
            if self.num_unfinished:
                raise RuntimeError(
                    f"none of {self.num_unfinished} sequences has tokens to compute, or a row to get: "
                    "expected tokens by accept, or finish"
                )
            return None
        manager = self.manager
        plan = manager.step(
            [manager.row(sequence.request) for sequence, _ in asked],
            [count for _, count in asked],
            new=[sequence.request for sequence, _ in new],
            new_num_tokens=[count for _, count in new],
            swap_out=[manager.row(sequence.request) for sequence in leaving],
        )
        return self._answered(plan, asked, leaving, new)

    def complete(self, step: ScheduledStep, report: StepReport | None = None) -> None:
        """The step's plan was carried out. `report`: the worker's, by default that all went well.

        With failed pages in it, call this before the model runs, and do not run it: what the pages held
        is computed again.
        """
        self._check_in_flight(step)
        report = StepReport(step.plan.step_id, True) if report is None else report
        instance(report, StepReport, "report")
        failed = (report.failed_pages, report.failed_host_pages)
        if any(num_entries(pages, "failed pages of the report") for pages in failed):
            # What the step was to compute is not computed.
            report = StepReport(
                report.step_id, False, report.failed_pages, report.failed_host_pages
            )
        self.manager.report(report)
        self._in_flight = None

    def fail(self, step: ScheduledStep) -> None:
        """The step's plan was not carried out, or the model failed: it is as if it had not been."""
        self._check_in_flight(step)
        self.manager.abort(step.plan.step_id)
        self._in_flight = None

    def accept(self, sequence: Sequence, token_ids: list[int], num_rejected: int = 0) -> None:
        """Appends what was sampled: accepted drafts and one token more; the other drafts go.

        TypeError or ValueError for wrong tokens, more rejected ones than were computed, and a sequence
        that has no row.
        """
        instance(sequence, Sequence, "sequence")
        if sequence.state is State.FINISHED:
            raise ValueError("sequence is finished: expected one that is being served")
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
        sequence.drafts = []
        sequence.request.append_tokens(token_ids)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Gives `child` the blocks of `parent`; False where it waits to be admitted instead.

        That is so where no row is free and where the parent has no blocks on the device; what is cached
        of the child's tokens will be its hit.
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
            return True
        self._insert(self.waiting, child)
        return False

    def finish(self, sequence: Sequence, **release: object) -> None:
        """Frees a sequence in whatever state it is; of a finished one nothing.

        `release`: what `KVCacheManager.free` takes besides, for eviction policies.
        """
        instance(sequence, Sequence, "sequence")
        if sequence.state is State.FINISHED:
            return
        if not self._knows(sequence):
            raise ValueError(f"sequence is {sequence.state.value}: expected one that was added")
        self.manager.free(sequence.request, **release)
        (self.waiting if sequence.state is State.WAITING else self.admitted).remove(sequence)
        sequence.state = State.FINISHED
        if self._victim is sequence:
            self._victim = None

    def _check_in_flight(self, step: ScheduledStep) -> None:
        instance(step, ScheduledStep, "step")
        if step is not self._in_flight:
            raise ValueError("step is not under way: expected the one that schedule returned last")

    def _knows(self, sequence: Sequence) -> bool:
        """Whether it is in the queue that its state says."""
        queue = self.waiting if sequence.state is State.WAITING else self.admitted
        return sequence in queue

    def _leaving(self) -> list[Sequence]:
        """The sequence that is to leave for the host; one that is to be computed again has left."""
        victim, self._victim = self._victim, None
        if victim is None:
            return []
        if self.preemption == "swap" and self.manager.host_pool is not None:
            return [victim]
        self._recompute(victim)
        return []

    def _recompute(self, sequence: Sequence) -> None:
        self.manager.free(sequence.request)
        self.admitted.remove(sequence)
        sequence.state = State.WAITING
        sequence.num_preemptions += 1
        self.num_recomputed += 1
        self._insert(self.waiting, sequence)

    def _running(self, leaving: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Sequences with blocks on the device and how many tokens each asks for: decoding ones first."""
        budget, pending = self.max_num_batched_tokens, []
        for sequence in self.admitted:
            if sequence.state is State.RUNNING and sequence not in leaving:
                count = self._num_pending(sequence)
                if count:
                    pending.append((count > 1, sequence, count))
        asked = []
        for _, sequence, count in sorted(pending, key=lambda each: each[0]):
            if budget == 0:
                break
            sequence.drafts = self._fitting_drafts(sequence, count, budget)
            taken = self._chunk(sequence, min(count + len(sequence.drafts), budget))
            asked.append((sequence, taken))
            budget -= taken
        return asked

    def _swapped(self, budget: int) -> tuple[list[tuple[Sequence, int]], int]:
        asked = []
        for sequence in self.admitted:
            if sequence.state is State.SWAPPED and budget:
                sequence.drafts = []
                taken = self._chunk(sequence, min(self._num_pending(sequence), budget))
                if taken:
                    asked.append((sequence, taken))
                    budget -= taken
        return asked, budget

    def _new(self, budget: int) -> list[tuple[Sequence, int]]:
        rows = self.max_num_rows - sum(each.num_rows for each in self.admitted)
        new = []
        for sequence in sorted(self.waiting, key=lambda each: not each.has_begun):
            rows -= sequence.num_rows
            if rows < 0 or budget == 0:
                break
            sequence.drafts = []
            request = sequence.request
            num_cached = self.manager.cached_tokens(request).with_host
            taken = self._chunk(sequence, min(request.num_tokens - num_cached, budget))
            new.append((sequence, taken))
            budget -= taken
        return new

    def _chunk(self, sequence: Sequence, count: int) -> int:
        """Tokens to compute at once of the `count` that could be: states are kept where a step ends."""
        if self._has_states and count > 1 and not sequence.drafts:
            return self.manager.checkpoint_tokens(sequence.request, count)
        return count

    def _fitting_drafts(self, sequence: Sequence, count: int, budget: int) -> list[int]:
        """Drafts are computed where all known tokens are, and as long as the sequence may grow."""
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
        asked: list[tuple[Sequence, int]],
        leaving: list[Sequence],
        new: list[tuple[Sequence, int]],
    ) -> ScheduledStep:
        answers = plan.answers
        entries, refused, stuck = [], [], []
        for of, sequences in ((answers.rows, asked), (answers.new, new)):
            for (sequence, _), row, status, start, count in zip(
                sequences, *map(np.ndarray.tolist, of)
            ):
                if status == Status.SERVED:
                    entries.append((sequence, row, start, count))
                elif status == Status.NEVER:
                    refused.append(sequence)
                else:
                    stuck.append(sequence)
        for sequence, status in zip(leaving, answers.swap_out.status.tolist()):
            if status == Status.SERVED:
                sequence.state = State.SWAPPED
                sequence.num_preemptions += 1
                self.num_swapped_out += 1
            else:
                self._recompute(sequence)
        for sequence, _, start, _ in entries:
            if sequence.state is State.WAITING:
                self.waiting.remove(sequence)
                self._insert(self.admitted, sequence)
                sequence.has_begun = True
                if sequence.num_cached_tokens is None:
                    sequence.num_cached_tokens = start
            sequence.state = State.RUNNING
        for sequence in refused:
            self.finish(sequence)
        self._choose_victim(stuck, nothing_done=not (entries or leaving or refused))
        step = self._in_flight = _scheduled(plan, entries, refused)
        return step

    def _choose_victim(self, stuck: list[Sequence], nothing_done: bool) -> None:
        """The running sequence of the last rank, if one that waits for blocks comes before it.

        Also where no sequence was served: then those that hold blocks have nothing to compute, beams
        that wait for one without blocks.
        """
        self._is_short = any(each.state is State.RUNNING for each in stuck)
        if not (self._is_short or nothing_done):
            return
        first = min(stuck, key=lambda each: (each.state is not State.RUNNING, each.rank))
        behind = [
            each
            for each in self.admitted
            if each.state is State.RUNNING
            and each is not first
            and (nothing_done or each.rank >= first.rank)
        ]
        self._victim = max(behind, key=lambda each: each.rank, default=None)

    @staticmethod
    def _insert(queue: list[Sequence], sequence: Sequence) -> None:
        """Behind all of a smaller or the same rank."""
        at = len(queue)
        while at and queue[at - 1].rank > sequence.rank:
            at -= 1
        queue.insert(at, sequence)


def _scheduled(
    plan: StepPlan, entries: list[tuple[Sequence, int, int, int]], refused: list[Sequence]
) -> ScheduledStep:
    token_ids, num_drafts, num_logits = [], [], []
    for sequence, _, start, count in entries:
        known, stop = sequence.request.num_tokens, start + count
        drafts = sequence.drafts[: max(stop - known, 0)]
        tokens = sequence.request.token_ids[start : min(stop, known)]
        token_ids.append(np.concatenate([tokens, drafts]) if drafts else tokens)
        num_drafts.append(len(drafts))
        num_logits.append(1 + len(drafts) if stop >= known else 0)
    return ScheduledStep(
        plan=plan,
        sequences=[sequence for sequence, *_ in entries],
        rows=np.array([row for _, row, _, _ in entries], np.int32),
        starts=np.array([start for _, _, start, _ in entries], np.int64),
        token_ids=token_ids,
        num_drafts=num_drafts,
        num_logits=num_logits,
        refused=refused,
    )
