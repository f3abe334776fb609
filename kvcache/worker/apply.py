"""The worker's side of a step: applies a `StepPlan` to tables and storage."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.plan import PLAN_VERSION, StepPlan, StepReport
from kvcache.worker.block_table import BlockTable
from kvcache.worker.storage import KVStorage


class Worker:
    """Storage and block tables of one device; `apply` brings them to what a plan says.

    `tables`: one `BlockTable` per cache group, in the manager's order.

    >>> storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=1, head_size=8)
    >>> worker = Worker(storage, [BlockTable(16, 4, 8, 64, False, "cpu", 16)])
    """

    def __init__(self, storage: KVStorage, tables: Sequence[BlockTable]) -> None:
        self.storage = storage
        self.tables = list(tables)

    def apply(self, plan: StepPlan) -> StepReport:
        """Updates and uploads the tables. A plan that does not fit raises, and changes nothing."""
        self._check(plan)
        parts = zip(plan.append_splits, plan.append_ids, plan.replace, strict=True)
        changes = [(plan.clear_rows, plan.append_rows, *part) for part in parts]
        for table, change in zip(self.tables, changes, strict=True):
            table.check(*change)
        for table, change in zip(self.tables, changes, strict=True):
            table.apply(*change)
            table.commit_block_table(table.max_num_reqs)
        return StepReport(plan.step_id, completed=True)

    def _check(self, plan: StepPlan) -> None:
        if plan.version != PLAN_VERSION:
            raise ValueError(f"plan has version {plan.version}: expected {PLAN_VERSION}")
        if len(plan.append_ids) != len(self.tables):
            raise ValueError(
                f"plan has {len(plan.append_ids)} groups: expected {len(self.tables)}, one per table"
            )
        for ids in plan.append_ids:
            if len(ids) and not (ids.min() > 0 and ids.max() < self.storage.num_blocks):
                raise ValueError(
                    f"append_ids holds blocks {ids.min()} to {ids.max()}: "
                    f"expected 1 to {self.storage.num_blocks - 1}, the blocks of the storage"
                )
        for section in ("swap_out", "copy", "zero", "swap_in"):
            if len(getattr(plan, section)):
                raise NotImplementedError(f"this worker cannot apply the plan's {section} yet")
