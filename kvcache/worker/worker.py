# SPDX-License-Identifier: Apache-2.0
"""The worker, which applies a `StepPlan` to block tables and storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from kvcache.checks import (
    MAX_INT64,
    check_count,
    instance,
    integer,
    integers,
    listed,
    one_of,
    refuse_pickle,
    shown,
)
from kvcache.native.load import core
from kvcache.step import NO_IDS, PLAN_VERSION, StepPlan, StepReport
from kvcache.worker.pages.page_checks import PageMoves, checked_page_moves
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.storage import KVStorage
from kvcache.worker.swap.engine import SwapEngine
from kvcache.worker.swap.job import SwapError, SwapJob, until
from kvcache.worker.swap.streams import streams_of
from kvcache.worker.tables.block_tables import BlockTables
from kvcache.worker.tables.group_table import GroupTable

_TABLES, _PAGES = 1, 2  # return values of `core.plan_work`; 0 means that there is nothing to do


class PendingStep:
    """A started step, whose swaps may still be in flight."""

    def __init__(
        self, step_id: int, engine: SwapEngine | None, earlier: PendingStep | None
    ) -> None:
        self.step_id = step_id
        self.errors: list[SwapError] = []  # errors from failed swaps, set together with the report
        self._engine = engine
        self._earlier = earlier
        self._report: StepReport | None = None
        self._out: SwapJob | None = None
        self._in: SwapJob | None = None

    def poll(self) -> StepReport | None:
        """Return the step's report once all copies in this step and earlier steps have finished.

        Reports are returned in step order, because the manager assumes that a report also covers
        all earlier steps.

        Returns:
            The report, which lists pages with invalid content, or None while copies are in flight.
        """
        if self._report is not None:
            return self._report
        if self._earlier is not None and self._earlier.poll() is None:
            return None
        jobs = self._jobs()
        if not all(job.poll() for job in jobs):
            return None
        self._earlier = None
        self.errors = [job.error for job in jobs if job.error is not None]
        self._report = StepReport(
            self.step_id,
            completed=True,
            failed_host_pages=self._invalid_pages(self._out),
            failed_pages=self._invalid_pages(self._in),
        )
        return self._report

    def wait(self, timeout_s: float | None = None) -> StepReport:
        """Wait for the step's report.

        Args:
            timeout_s: Maximum time to wait, in seconds. None waits indefinitely.

        Returns:
            The report, as returned by `poll`.

        Raises:
            TimeoutError: The report did not arrive in time.
        """
        names = ", ".join(job.name for job in self._jobs()) or "a step before"
        until(lambda: self.poll() is not None, timeout_s, names)
        return self._report

    def may_wait(self) -> bool:
        """Return whether copies in flight may still delay the report."""
        return self._report is None and bool(self._earlier or self._out or self._in)

    def _jobs(self) -> list[SwapJob]:
        return [job for job in (self._out, self._in) if job is not None]

    def _invalid_pages(self, job: SwapJob | None) -> list[int]:
        return [] if job is None else self._engine.invalid_pages(job).tolist()


class Worker:
    """Applies plans to the storage and block tables of one device.

    Args:
        storage: A storage that serves all groups, or one storage per group, all over the same pages
            (`KVStorage.over`). Storage and table must have the same block size, except for groups
            without slots (recurrent state).
        tables: `BlockTables` with the manager's groups in the same order, or a `GroupTable` for a
            single group.
        host: The pages of the manager's host tier (`Pages.on_host`), if it has one.
        last_step_id: The ID of the last step whose plan was applied to `tables`. If another worker
            filled the tables, this is that worker's `last_step_id`. -1 if no plan was applied.
        clear: Which pages a plan zeroes: "zero", only its section `zero`, or "fresh", also its new
            pages (`StepPlan.fresh`), so that no kernel reads bytes that an earlier owner left.
        swap_options: Options for `SwapEngine`. All of them except `streams` require `host`.

    Example:
        >>> from kvcache import TableShape
        >>> storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=1, head_size=8)
        >>> host = storage.pages.on_host(num_blocks=33)
        >>> shape = TableShape(block_size=16, max_num_blocks=8)
        >>> tables = BlockTables([shape], max_num_reqs=4, max_num_tokens=64)
        >>> worker = Worker(storage, tables, host)
    """

    def __init__(
        self,
        storage: KVStorage | Sequence[KVStorage],
        tables: GroupTable | BlockTables,
        host: Pages | None = None,
        *,
        last_step_id: int = -1,
        clear: str = "zero",
        **swap_options: object,
    ) -> None:
        instance(tables, GroupTable | BlockTables, "tables")
        # ID of the last step whose plan was applied to the tables.
        self._last_step_id = integer(last_step_id, "last_step_id", -1, MAX_INT64)
        self.clear = one_of(clear, "clear", ("zero", "fresh"))
        groups = [tables] if isinstance(tables, GroupTable) else tables.block_tables
        if host is not None:
            instance(host, Pages, "host")
        if isinstance(storage, list | tuple):
            self.storages = list(storage)
            for g, each in enumerate(self.storages):
                instance(each, KVStorage, f"storage[{g}]")
        else:
            instance(storage, KVStorage, "storage")
            self.storages = [storage] * len(groups)
        check_count(self.storages, len(groups), "storage", "group")
        self.pages = self.storages[0].pages
        for g, (each, table) in enumerate(zip(self.storages, groups)):
            _check_fits(g, each, table)
            if each.pages is not self.pages:
                raise ValueError(
                    f"storage of group {g} does not use the pages of the other groups: "
                    "expected storages created by KVStorage.over with the same pages"
                )
        unused = [name for name in swap_options if name != "streams"] if host is None else []
        if unused:
            raise TypeError(
                f"{unused[0]} is given without host pages: expected host, or no swap options"
            )
        self.tables = tables
        self._table_set = tables.table_set
        self.host = host
        self.engine = None if host is None else SwapEngine(self.pages, host, **swap_options)
        self._within = PageCopy(self.pages, self.pages)
        self._streams = swap_options.get("streams") or streams_of(self.pages.device)
        self._last: PendingStep | None = None  # most recent step that may have copies in flight
        # The ID of the step in progress, or of the step during which the worker broke.
        self._begun: int | None = None
        self._process = os.getpid()
        # Called for each section of a plan with "swap_out", "copy", "zero" or "swap_in" and the
        # section's pages.
        self.on_move: Callable[[str, np.ndarray], object] | None = None

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "its plans and reports, which pass between processes")

    @property
    def last_step_id(self) -> int:
        """The ID of the last applied step, or -1 if there is none."""
        return self._last_step_id

    def apply(self, plan: StepPlan) -> StepReport:
        """Apply a plan and wait for its swaps.

        Apply every plan exactly once and in step order, including plans that change nothing. The
        plans of aborted steps may be skipped. Clearing a row beyond the table is allowed.

        If a plan is rejected, nothing changes. Abort its step (`KVCacheManager.abort`), so that the
        next plan repeats the missing changes. If the plan was rejected because the tables have too
        few rows, also free requests. A failure after the plan's copies have begun breaks the
        worker: every later plan raises RuntimeError.

        Args:
            plan: The plan of the next step.

        Returns:
            The report of the completed step. It lists pages with invalid content.

        Raises:
            ValueError: The plan does not fit the storage or tables, was already applied, or follows a
                step whose plan was never applied. Apply the missing plan first or abort its step.
            RuntimeError: A CUDA graph is being captured on the stream while the plan has swaps or
                earlier swaps are in flight, the worker is broken or belongs to another process, or a
                signal handler or another thread applied a plan during this call.
        """
        step = self._begin(plan)
        return StepReport(plan.step_id, True) if step is None else step.wait()

    def start(self, plan: StepPlan) -> PendingStep:
        """Apply a plan without waiting for its swaps.

        Work launched on the current stream afterwards sees the plan's pages and tables, even while
        swaps are in flight. The rules and errors are the same as for `apply`.

        Args:
            plan: The plan of the next step.

        Returns:
            The started step. Call `poll` or `wait` on it to obtain the report.
        """
        step = self._begin(plan)
        return PendingStep(plan.step_id, None, None) if step is None else step

    def _begin(self, plan: StepPlan) -> PendingStep | None:
        """Apply a plan. Returns its step, or None if the step has already completed."""
        instance(plan, StepPlan, "plan")
        last, num_applied = self._last_step_id, self._table_set.num_applied
        self._check_order(plan)
        work = core.plan_work(plan, self.clear == "fresh")
        if work == _PAGES or not self._has_no_moves():
            return self._start(plan, num_applied)
        if work == _TABLES:
            self._apply_to_tables(plan, num_applied)
            self.tables.commit_updates()
            self._begun = None
            return None
        self._table_set.begin_step()
        if self._last_step_id != last:  # no signal handler can run from here to the end
            self._fail_nested()
        self._last_step_id = plan.step_id
        return None

    def _start(self, plan: StepPlan, num_applied: int) -> PendingStep:
        for name in ("swap_out", "swap_in"):
            if self.engine is None and len(integers(getattr(plan, name), name, (2,))):
                raise ValueError(f"plan has {name}: expected a worker that was given host pages")
        num_host_blocks = 0 if self.host is None else self.host.num_blocks
        clears_fresh = self.clear == "fresh"
        moves = checked_page_moves(plan, self.pages.num_blocks, num_host_blocks, clears_fresh)
        if self.engine is not None:
            swaps = len(moves.swap_out) or len(moves.swap_in)
            if swaps or not self.engine.is_idle:
                self.engine.check_not_captured("Worker.start")
        step = PendingStep(plan.step_id, self.engine, self._earlier())
        may_overlap = self.engine is not None and (len(moves.swap_out) or not self.engine.is_idle)
        written = _written_pages(plan, moves) if may_overlap else NO_IDS
        self._apply_to_tables(plan, num_applied)
        if self.engine is not None:
            self.engine.order_after_swap_ins()
            # Swap out first, because swap-outs must read pages before any page is written.
            self._swap_out(written, moves, step)
        self._copy(moves)
        self._zero(moves)
        self._swap_in(moves, step)
        self.tables.commit_updates()
        self._last = step if step.may_wait() else None
        self._begun = None
        return step

    def _apply_to_tables(self, plan: StepPlan, num_applied: int) -> None:
        """Apply a plan to the host tables, if `num_applied` plans were applied before it."""
        now = self._table_set.num_applied
        self._begun = plan.step_id
        try:
            is_applied = self._table_set.apply(plan, self.pages.num_blocks, num_applied)
            if is_applied:
                self._last_step_id = plan.step_id
        except BaseException:
            if self._table_set.num_applied == now:
                self._begun = None
            raise
        if not is_applied:
            self._begun = None
            self._fail_nested()

    def _fail_nested(self) -> NoReturn:
        raise RuntimeError(
            "another call applied a plan during this call (from a signal handler or another thread): "
            "only one call can run at a time; this plan was not applied"
        )

    def _check_order(self, plan: StepPlan) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the worker belongs to process {self._process}, but this is process {os.getpid()}: "
                "expected a worker created in this process, because a forked process cannot use the "
                "device or the worker's threads"
            )
        if self._begun is not None:
            raise RuntimeError(
                "the worker is broken: memory ran out within `start`, a launch failed, or an interrupt "
                f"occurred, during step {self._begun}: create a new worker"
            )
        if type(plan.version) is not int or plan.version != PLAN_VERSION:
            raise ValueError(f"plan has version {shown(plan.version)}: expected {PLAN_VERSION}")
        last, previous = self._last_step_id, plan.previous_step_id
        for name, number in (("step_id", plan.step_id), ("previous_step_id", previous)):
            if type(number) is not int:
                raise TypeError(f"plan has {name} {shown(number)}: expected an int")
        if plan.step_id <= last:
            raise ValueError(
                f"plan has step_id {plan.step_id}: expected {last + 1} or later, because step {last} was "
                "applied last, and each plan is applied once, in order"
            )
        if previous > last:
            was = f"step {last} was applied last" if last >= 0 else "no plan was applied yet"
            missing = (
                f"plan of step {previous} first, or abort this step"
                if previous == last + 1
                else f"plans of steps {last + 1} to {previous} first, or abort these steps"
            )
            raise ValueError(
                f"plan has step_id {plan.step_id} and follows step {previous}, but {was}: apply the "
                f"{missing}"
            )

    def _has_no_moves(self) -> bool:
        """Return whether a step can complete without waiting for copies in flight."""
        return self._last is None and (self.engine is None or self.engine.is_idle)

    def _earlier(self) -> PendingStep | None:
        """Return the previous step, or None if that step has completed."""
        last = self._last
        return None if last is None or last.poll() is not None else last

    def _swap_out(self, written: np.ndarray, moves: PageMoves, step: PendingStep) -> None:
        if len(moves.swap_out):
            self._note("swap_out", moves.swap_out)
            step._out = self.engine.swap_out(moves.swap_out)
        if not self.engine.is_idle:
            self.engine.before_write(written)

    def _copy(self, moves: PageMoves) -> None:
        self._move("copy", moves.copy, self._within.copy)

    def _zero(self, moves: PageMoves) -> None:
        self._move("zero", moves.zero, self._within.zero)

    def _move(self, section: str, pages: np.ndarray, work: Callable[[np.ndarray], None]) -> None:
        """Run a section that moves pages within the device, on the current stream."""
        if len(pages):
            self._note(section, pages)
            self._streams.launch(self._streams.current(), lambda: work(pages))

    def _swap_in(self, moves: PageMoves, step: PendingStep) -> None:
        if len(moves.swap_in) == 0:
            return
        self._note("swap_in", moves.swap_in)
        step._in = self.engine.swap_in(moves.swap_in)
        self.engine.before_read(step._in)

    def _note(self, section: str, pages: np.ndarray) -> None:
        if self.on_move is not None:
            self.on_move(section, pages)


def _written_pages(plan: StepPlan, moves: PageMoves) -> np.ndarray:
    """Return the pages that the plan or the model writes for the first time in this step, int64[n]."""
    append_ids, replace = listed(plan.append_ids, "append_ids"), listed(plan.replace, "replace")
    appended = [integers(each, f"append_ids[{g}]", ()) for g, each in enumerate(append_ids)]
    replaced = [integers(each, f"replace[{g}]", (3,))[:, 2] for g, each in enumerate(replace)]
    return np.concatenate([*appended, *replaced, moves.copy[:, 1], moves.zero])


def _check_fits(group: int, storage: KVStorage, table: GroupTable) -> None:
    if table.shape.slot_mapping and table.shape.block_size != storage.block_size:
        raise ValueError(
            f"storage has block_size {storage.block_size}, but group {group} has "
            f"{table.shape.block_size}: expected equal block sizes"
        )
