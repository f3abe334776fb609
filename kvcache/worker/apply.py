"""The worker's side of a step: applies a `StepPlan` to tables and storage."""

from __future__ import annotations

from kvcache.plan import PLAN_VERSION, StepPlan, StepReport
from kvcache.worker.block_table import BlockTable
from kvcache.worker.multi_group import MultiGroupBlockTable
from kvcache.worker.storage import KVStorage


class Worker:
    """Storage and block tables of one device; `apply` brings them to what a plan says.

    `tables`: a `MultiGroupBlockTable`, its groups in the manager's order, or one group's `BlockTable`.

    >>> storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=1, head_size=8)
    >>> worker = Worker(storage, BlockTable(16, 4, 8, 64, False, "cpu", 16))
    """

    def __init__(self, storage: KVStorage, tables: BlockTable | MultiGroupBlockTable) -> None:
        groups = [tables] if isinstance(tables, BlockTable) else tables.block_tables
        for g, table in enumerate(groups):
            if table.block_size != storage.block_size:
                raise ValueError(
                    f"storage has block_size {storage.block_size}, group {g} {table.block_size}: "
                    "expected the same"
                )
        self.storage = storage
        self.tables = tables

    def apply(self, plan: StepPlan) -> StepReport:
        """Updates and uploads the tables. A plan that does not fit raises, and changes nothing."""
        if plan.version != PLAN_VERSION:
            raise ValueError(f"plan has version {plan.version}: expected {PLAN_VERSION}")
        for section in ("swap_out", "copy", "zero", "swap_in"):
            if len(getattr(plan, section)):
                raise NotImplementedError(f"this worker cannot apply the plan's {section} yet")
        self.tables.apply(plan, self.storage.num_blocks)
        self.tables.commit_updates()
        return StepReport(plan.step_id, completed=True)
