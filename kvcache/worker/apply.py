"""The worker's side of a step: applies a `StepPlan` to tables and storage."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.plan import PLAN_VERSION, StepPlan, StepReport
from kvcache.worker.block_table import BlockTable
from kvcache.worker.multi_group import MultiGroupBlockTable
from kvcache.worker.storage import KVStorage, check_page_moves


class Worker:
    """Storage and block tables of one device; `apply` brings them to what a plan says.

    `tables`: a `MultiGroupBlockTable`, its groups in the manager's order, or one group's `BlockTable`.
    `storage`: one that serves all groups, or one per group, all over the same pages
    (`KVStorage.over`). Block sizes of storage and table must agree, except where a group has no slots
    (recurrent state).

    >>> storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=1, head_size=8)
    >>> worker = Worker(storage, BlockTable(16, 4, 8, 64, False, "cpu", 16))
    """

    def __init__(
        self, storage: KVStorage | Sequence[KVStorage], tables: BlockTable | MultiGroupBlockTable
    ) -> None:
        groups = [tables] if isinstance(tables, BlockTable) else tables.block_tables
        shared = isinstance(storage, KVStorage)
        self.storages = [storage] * len(groups) if shared else list(storage)
        if len(self.storages) != len(groups):
            raise ValueError(
                f"storage has {len(self.storages)} entries: expected {len(groups)}, one per group"
            )
        for g, (each, table) in enumerate(zip(self.storages, groups)):
            _check_fits(g, each, table)
        # Groups with fewer layers see part of the pages; this one sees whole ones.
        self.storage = max(self.storages, key=lambda each: each.num_layers)
        for g, each in enumerate(self.storages):
            _check_same_pages(g, each, self.storage)
        self.tables = tables

    def apply(self, plan: StepPlan) -> StepReport:
        """Copies and clears pages, updates and uploads the tables.

        A plan that does not fit raises, and changes nothing.
        """
        if plan.version != PLAN_VERSION:
            raise ValueError(f"plan has version {plan.version}: expected {PLAN_VERSION}")
        for section in ("swap_out", "swap_in"):
            if len(getattr(plan, section)):
                raise NotImplementedError(f"this worker cannot apply the plan's {section} yet")
        moves_pages = len(plan.copy) > 0 or len(plan.zero) > 0
        if moves_pages:
            check_page_moves(plan.copy, plan.zero, self.storage.num_blocks)
        # On the host only, and checked as a whole: what it refuses has moved no byte yet.
        self.tables.apply(plan, self.storage.num_blocks)
        if moves_pages:
            self.storage.copy_pages(plan.copy)
            self.storage.zero_pages(plan.zero)
        self.tables.commit_updates()
        return StepReport(plan.step_id, completed=True)


def _check_fits(group: int, storage: KVStorage, table: BlockTable) -> None:
    if table.layout.has_slots and table.block_size != storage.block_size:
        raise ValueError(
            f"storage has block_size {storage.block_size}, group {group} {table.block_size}: "
            "expected the same"
        )


def _check_same_pages(group: int, storage: KVStorage, whole: KVStorage) -> None:
    for mine, theirs in zip(storage.pages, whole.pages):
        if (mine.data_ptr(), mine.shape) != (theirs.data_ptr(), theirs.shape):
            raise ValueError(
                f"storage of group {group} is not over the pages of the other groups: "
                "expected KVStorage.over of the same ones"
            )
