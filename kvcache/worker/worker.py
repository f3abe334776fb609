"""The worker's side of a step: applies a `StepPlan` to tables and storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from kvcache.checks import MAX_INT64, instance, integer, integers, refuse_pickle, shown
from kvcache.step import PLAN_VERSION, StepPlan, StepReport
from kvcache.worker.pages.page_checks import PageMoves, checked_page_moves
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.storage import KVStorage
from kvcache.worker.swap.engine import SwapEngine
from kvcache.worker.swap.job import SwapError, SwapJob, until
from kvcache.worker.swap.page_copy import PageCopy
from kvcache.worker.swap.streams import streams_of
from kvcache.worker.tables.block_table import BlockTable
from kvcache.worker.tables.multi_group import MultiGroupBlockTable


class PendingStep:
    """A step whose plan has been started: its swaps may still be under way."""

    def __init__(
        self, step_id: int, engine: SwapEngine | None, earlier: PendingStep | None
    ) -> None:
        self.step_id = step_id
        self.errors: list[SwapError] = []  # known when the report is
        self._engine = engine
        self._earlier = earlier
        self._report: StepReport | None = None
        self._out: SwapJob | None = None
        self._in: SwapJob | None = None

    def poll(self) -> StepReport | None:
        """The report, once all bytes of this step and of all earlier ones have moved; None before.

        It lists pages with invalid content. A manager takes a report as one for all earlier steps too, so
        reports come in order.
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
        """The report, when it is there. TimeoutError where that takes longer."""
        names = ", ".join(job.name for job in self._jobs()) or "a step before"
        until(lambda: self.poll() is not None, timeout_s, names)
        return self._report

    def wait_layer(self, layer: int) -> None:
        """Makes the calling stream wait until this layer of the plan's swap-ins has arrived.

        Call it before each layer of the step if the worker has `layers_per_event`. Without that, `start`
        has made the stream wait for all layers.
        """
        if self._in is not None:
            self._engine.before_read(self._in, layer)

    def may_wait(self) -> bool:
        """Whether the report may have to wait for bytes that move."""
        return self._report is None and bool(self._earlier or self._out or self._in)

    def _jobs(self) -> list[SwapJob]:
        return [job for job in (self._out, self._in) if job is not None]

    def _invalid_pages(self, job: SwapJob | None) -> list[int]:
        return [] if job is None else self._engine.invalid_pages(job).tolist()


class Worker:
    """Applies plans to the storage and block tables of one device.

    `tables`: a `MultiGroupBlockTable`, its groups in the manager's order, or one group's `BlockTable`.
    `storage`: one that serves all groups, or one per group, all over the same pages
    (`KVStorage.over`). Block sizes of storage and table must agree, except where a group has no slots
    (recurrent state). `host`: the pages of the manager's host tier, if it has one (`Pages.on_host`);
    `last_step_id`: the step whose plan tables that were filled by another worker have already, its
    `last_step_id`; -1: none. `swap_options`: what `SwapEngine` takes.

    >>> storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=1, head_size=8)
    >>> host = storage.pages.on_host(num_blocks=33)
    >>> table = BlockTable(
    ...     block_size=16, max_num_reqs=4, max_num_blocks_per_req=8, max_num_batched_tokens=64
    ... )
    >>> worker = Worker(storage, table, host)
    """

    def __init__(
        self,
        storage: KVStorage | Sequence[KVStorage],
        tables: BlockTable | MultiGroupBlockTable,
        host: Pages | None = None,
        *,
        last_step_id: int = -1,
        **swap_options: object,
    ) -> None:
        instance(tables, BlockTable | MultiGroupBlockTable, "tables")
        # The last plan that was applied to the tables.
        self._last_step_id = integer(last_step_id, "last_step_id", -1, MAX_INT64)
        groups = [tables] if isinstance(tables, BlockTable) else tables.block_tables
        if host is not None:
            instance(host, Pages, "host")
        if isinstance(storage, list | tuple):
            self.storages = list(storage)
            for g, each in enumerate(self.storages):
                instance(each, KVStorage, f"storage[{g}]")
        else:
            instance(storage, KVStorage, "storage")
            self.storages = [storage] * len(groups)
        if len(self.storages) != len(groups):
            raise ValueError(
                f"storage has {len(self.storages)} entries: expected {len(groups)}, one per group"
            )
        self.pages = self.storages[0].pages
        for g, (each, table) in enumerate(zip(self.storages, groups)):
            _check_fits(g, each, table)
            if each.pages is not self.pages:
                raise ValueError(
                    f"storage of group {g} is not over the pages of the other groups: "
                    "expected KVStorage.over of the same ones"
                )
        unused = [name for name in swap_options if name != "streams"] if host is None else []
        if unused:
            raise TypeError(
                f"{unused[0]} is given without host pages, for which it says how to swap"
            )
        self.tables = tables
        self._table_set = tables._tables
        self.host = host
        self.engine = None if host is None else SwapEngine(self.pages, host, **swap_options)
        self._within = PageCopy(self.pages, self.pages)
        self._streams = swap_options.get("streams") or streams_of(self.pages.device)
        self._last: PendingStep | None = (
            None  # whose bytes, or those of a step before, may still move
        )
        # The step that is being carried out, or that broke the worker.
        self._begun: int | None = None
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "its plans and reports, which pass between processes")

    @property
    def last_step_id(self) -> int:
        """The step whose plan was carried out last; -1: none."""
        return self._last_step_id

    def apply(self, plan: StepPlan) -> StepReport:
        """Carries a plan out, swaps included, and waits for them; a plan without swaps waits for none.

        Each plan is applied once, in the order of the steps; one that changes nothing too. ValueError
        for a plan that came before, and for one that follows a step whose plan did not come: apply that
        one first, or abort its step (`KVCacheManager.abort`). Plans of aborted steps need not come.

        A plan that does not fit raises, and changes nothing; so does, with RuntimeError, a plan with
        swaps, or any while swaps are under way, on a stream that is captured in a CUDA graph. One that
        fails in the midst of its moves breaks the worker, and every later plan says so. Abort the
        step of a plan that was refused: the next plan sends what it should have said. Where tables have
        too few rows for the requests, free requests too; a row that the tables have not is empty there,
        so plans may clear it.
        """
        instance(plan, StepPlan, "plan")
        if plan.is_empty and self._has_no_moves():
            self._begin_empty(plan)
            return StepReport(plan.step_id, True)
        return self.start(plan).wait()

    def start(self, plan: StepPlan) -> PendingStep:
        """As `apply`, but does not wait: work launched next on the calling stream finds pages and tables
        as the plan says, while swaps may still run."""
        instance(plan, StepPlan, "plan")
        if plan.is_empty and self._has_no_moves():
            self._begin_empty(plan)
            return PendingStep(plan.step_id, None, None)
        self._check_order(plan)
        for name in ("swap_out", "swap_in"):
            if self.engine is None and len(integers(getattr(plan, name), name, (2,))):
                raise ValueError(f"plan has {name}: expected a worker that was given host pages")
        moves = checked_page_moves(
            plan, self.pages.num_blocks, 0 if self.host is None else self.host.num_blocks
        )
        if self.engine is not None:
            swaps = len(moves.swap_out) or len(moves.swap_in)
            if swaps or not self.engine.is_idle:
                self.engine.check_not_captured("Worker.start")
        step = PendingStep(plan.step_id, self.engine, self._earlier())
        self._apply_to_tables(plan)
        if self.engine is not None:
            self.engine.order_after_swap_ins()
            self._swap_out(plan, moves, step)  # first: its pages are read before any is written
        self._copy(moves)
        self._zero(moves)
        self._swap_in(moves, step)
        self.tables.commit_updates()
        self._last = step if step.may_wait() else None
        self._begun = None
        return step

    def _apply_to_tables(self, plan: StepPlan) -> None:
        """On the host only, and checked as a whole: what it refuses has moved no byte yet."""
        num_applied = self._table_set.num_applied
        self._begun = plan.step_id
        try:
            self.tables.apply(plan, self.pages.num_blocks)
            self._last_step_id = plan.step_id
        except BaseException:
            if self._table_set.num_applied == num_applied:
                self._begun = None
            raise

    def _check_order(self, plan: StepPlan) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the worker belongs to process {self._process}, and this is {os.getpid()}: expected one "
                "made in this process, as a forked one has no use of the device and its threads"
            )
        if self._begun is not None:
            raise RuntimeError(
                "the worker is broken: memory ran out within `start`, a launch failed, or an "
                f"interrupt came, in the midst of step {self._begun}: make a new one"
            )
        if type(plan.version) is not int or plan.version != PLAN_VERSION:
            raise ValueError(f"plan has version {shown(plan.version)}: expected {PLAN_VERSION}")
        last, previous = self._last_step_id, plan.previous_step_id
        for name, number in (("step_id", plan.step_id), ("previous_step_id", previous)):
            if type(number) is not int:
                raise TypeError(f"plan has {name} {shown(number)}: expected an int")
        if plan.step_id <= last:
            raise ValueError(
                f"plan has step_id {plan.step_id}: expected {last + 1} or later, since step {last} was "
                "applied last, and each plan is applied once, in order"
            )
        if previous > last:
            was = f"step {last} was applied last" if last >= 0 else "no plan was applied yet"
            raise ValueError(
                f"plan has step_id {plan.step_id} and follows step {previous}, but {was}: expected the "
                f"plans from step {last + 1} to {previous} first, or an abort of these steps"
            )

    def _has_no_moves(self) -> bool:
        """Whether no bytes move that a step would have to wait for, or be ordered after."""
        return self._last is None and (self.engine is None or self.engine.is_idle)

    def _begin_empty(self, plan: StepPlan) -> None:
        """A step whose plan changes nothing."""
        self._check_order(plan)
        self._table_set.begin_step()
        self._last_step_id = plan.step_id

    def _earlier(self) -> PendingStep | None:
        """The step before, unless it is over."""
        last = self._last
        return None if last is None or last.poll() is not None else last

    def _swap_out(self, plan: StepPlan, moves: PageMoves, step: PendingStep) -> None:
        if len(moves.swap_out):
            step._out = self.engine.swap_out(moves.swap_out)
        if self.engine.is_idle:
            return
        # All that the step writes, here or by computing, lies in pages that it takes.
        replaced = [np.asarray(each).reshape(-1, 3)[:, 2] for each in plan.replace]
        taken = [*plan.append_ids, *replaced, moves.copy[:, 1], moves.zero]
        # int64 also of lists, and where there are none.
        self.engine.before_write(np.concatenate(taken).astype(np.int64))

    def _copy(self, moves: PageMoves) -> None:
        if len(moves.copy):
            self._launch(lambda: self._within.copy(moves.copy))

    def _zero(self, moves: PageMoves) -> None:
        if len(moves.zero):
            self._launch(lambda: self._within.zero(moves.zero))

    def _swap_in(self, moves: PageMoves, step: PendingStep) -> None:
        if len(moves.swap_in) == 0:
            return
        step._in = self.engine.swap_in(moves.swap_in)
        if not self.engine.layers_per_event:
            self.engine.before_read(step._in)

    def _launch(self, work: Callable[[], None]) -> None:
        """Runs `work` on the calling stream."""
        self._streams.launch(self._streams.current(), work)


def _check_fits(group: int, storage: KVStorage, table: BlockTable) -> None:
    if table.layout.has_slots and table.block_size != storage.block_size:
        raise ValueError(
            f"storage has block_size {storage.block_size}, group {group} {table.block_size}: "
            "expected the same"
        )
