"""The worker's side of a step: applies a `StepPlan` to tables and storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.plan import PLAN_VERSION, StepPlan, StepReport
from kvcache.worker.block_table import BlockTable
from kvcache.worker.multi_group import MultiGroupBlockTable
from kvcache.worker.storage import KVStorage, check_page_moves, move_pages


class Worker:
    """Storage and block tables of one device; `apply` brings them to what a plan says.

    `tables`: a `MultiGroupBlockTable`, its groups in the manager's order, or one group's `BlockTable`.
    `storage`: one that serves all groups, or one per group, all over the same pages
    (`KVStorage.over`). Block sizes of storage and table must agree, except where a group has no slots
    (recurrent state). `host`: the pages of the manager's host tier, if it has one: per layer one tensor
    of the shape of the storage's (`KVStorage.pages`) but for the number of pages, in host memory.

    >>> storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=1, head_size=8)
    >>> worker = Worker(storage, BlockTable(16, 4, 8, 64, False, "cpu", 16))
    """

    def __init__(
        self,
        storage: KVStorage | Sequence[KVStorage],
        tables: BlockTable | MultiGroupBlockTable,
        host: Sequence[torch.Tensor] | None = None,
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
        if host is not None:
            _check_host(host, self.storage)
        self.host = host
        self.tables = tables

    def apply(self, plan: StepPlan) -> StepReport:
        """Swaps pages out, copies and clears pages, swaps in, updates and uploads the tables.

        A plan that does not fit raises, and changes nothing.
        """
        if plan.version != PLAN_VERSION:
            raise ValueError(f"plan has version {plan.version}: expected {PLAN_VERSION}")
        swaps = len(plan.swap_out) > 0 or len(plan.swap_in) > 0
        if swaps and self.host is None:
            section = "swap_out" if len(plan.swap_out) else "swap_in"
            raise ValueError(f"plan has {section}: expected a worker that was given host pages")
        moves_pages = swaps or len(plan.copy) > 0 or len(plan.zero) > 0
        if moves_pages:
            check_page_moves(
                plan.copy,
                plan.zero,
                self.storage.num_blocks,
                plan.swap_out,
                plan.swap_in,
                len(self.host[0]) if swaps else 0,
            )
        # On the host only, and checked as a whole: what it refuses has moved no byte yet.
        self.tables.apply(plan, self.storage.num_blocks)
        if moves_pages:
            if swaps:
                move_pages(self.storage.pages, self.host, plan.swap_out)
            self.storage.copy_pages(plan.copy)
            self.storage.zero_pages(plan.zero)
            if swaps:
                move_pages(self.host, self.storage.pages, plan.swap_in)
        self.tables.commit_updates()
        return StepReport(plan.step_id, completed=True)


def _check_fits(group: int, storage: KVStorage, table: BlockTable) -> None:
    if table.layout.has_slots and table.block_size != storage.block_size:
        raise ValueError(
            f"storage has block_size {storage.block_size}, group {group} {table.block_size}: "
            "expected the same"
        )


def _check_host(host: Sequence[torch.Tensor], storage: KVStorage) -> None:
    if len(host) != storage.num_layers:
        raise ValueError(f"host has {len(host)} layers: expected {storage.num_layers}")
    for layer, (mine, theirs) in enumerate(zip(host, storage.pages)):
        if mine.shape[1:] != theirs.shape[1:] or mine.dtype != theirs.dtype:
            raise ValueError(
                f"host[{layer}] has pages of {mine.dtype}{list(mine.shape[1:])}: "
                f"expected {theirs.dtype}{list(theirs.shape[1:])}, as the storage"
            )
        if len(mine) != len(host[0]) or mine.device.type != "cpu":
            raise ValueError(
                f"host[{layer}] has {len(mine)} pages on {mine.device}: "
                f"expected {len(host[0])} on cpu, in each layer"
            )


def _check_same_pages(group: int, storage: KVStorage, whole: KVStorage) -> None:
    for mine, theirs in zip(storage.pages, whole.pages):
        if (mine.data_ptr(), mine.shape) != (theirs.data_ptr(), theirs.shape):
            raise ValueError(
                f"storage of group {group} is not over the pages of the other groups: "
                "expected KVStorage.over of the same ones"
            )
