# SPDX-License-Identifier: Apache-2.0
"""The calls that `GroupTable` makes for one cache group and `BlockTables` for all of them."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.step import StepPlan
from kvcache.worker.tables.table_set import Ids, TableSet


class TableCalls:
    """Changes and uploads rows of one group or of all groups. If a call fails, no group changes."""

    table_set: TableSet
    _group: int  # index of the group, or `ALL_GROUPS`

    def apply(self, plan: StepPlan, num_blocks: int = -1) -> None:
        """Apply the table changes of a plan to all rows and groups in one native call.

        Args:
            plan: The plan of a step.
            num_blocks: Number of blocks in the pool, used to check block IDs. -1 disables the
                check.

        Raises:
            ValueError: A row or column is out of range, a row would overflow, or a block ID is outside
                [0, num_blocks). Nothing has changed.
        """
        self.table_set.apply(plan, num_blocks)

    def clear_row(self, row: int) -> None:
        """Clear a row by setting its block IDs to the null block."""
        self.clear_rows([row])

    def clear_rows(self, rows: Ids) -> None:
        """Clear several rows in one call."""
        self.table_set.for_write().clear_rows(rows, self._group)

    def move_row(self, src: int, tgt: int) -> None:
        """Move row `src` to row `tgt` and clear `src`. If `src` equals `tgt`, nothing changes."""
        self.move_rows([src], [tgt])

    def move_rows(self, src: Ids, tgt: Ids) -> None:
        """Move several rows in order, in one call. See `move_row`."""
        self.table_set.for_write().move_rows(src, tgt, self._group)

    def swap_row(self, src: int, tgt: int) -> None:
        """Swap two rows."""
        self.swap_rows([src], [tgt])

    def swap_rows(self, src: Ids, tgt: Ids) -> None:
        """Swap pairs of rows in order, in one call. See `swap_row`."""
        self.table_set.for_write().swap_rows(src, tgt, self._group)

    def commit_updates(self) -> None:
        """Upload all changes to the device, with one copy and one launch for all groups."""
        self.table_set.commit_updates()

    def compute_slot_mapping(
        self,
        req_indices: np.ndarray | torch.Tensor | None = None,
        positions: np.ndarray | torch.Tensor | None = None,
        *,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
    ) -> None:
        """Compute the slots of a step's tokens.

        If the arguments are numpy arrays or CPU tensors, slots are written to the host side. Upload
        them with `commit_slot_mapping`. If the arguments are device tensors, slots are computed on
        the device from the device tables. One launch serves all groups with ordinary positions, and
        each circular group requires one additional launch.

        The slot is -1 for tokens in padding requests and for tokens on another context-parallel
        rank. Entries after the last token are reset to -1 if an earlier call filled them. Entries
        that the caller wrote remain until `commit_slot_mapping`.

        `BlockTables` skips encoder groups, because their tokens have different positions: for an encoder
        group `g`, call `tables[g].compute_slot_mapping` and `tables[g].commit_slot_mapping` when the
        encoder's output is written.

        Args:
            req_indices: Rows, or -1 for padding requests. Without `query_start_loc`, int32[n] with
                one row per token. With `query_start_loc`, int32[r] with one row per request. None:
                request `i` has row `i`.
            positions: int64[n]. Token positions within their requests.
            query_start_loc: int32[r + 1]. Start of each request's tokens.

        Raises:
            ValueError: A row or position on the host is out of range. Nothing was written.
            RuntimeError: With `KVCACHE_CHECKED=1`, a row or position on a GPU is out of range.
                Otherwise, the slots of such tokens are -1.
        """
        self.table_set.compute_slots(req_indices, positions, query_start_loc, self._group)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Upload computed slots in one copy, with -1 for all entries after the first `num_tokens`."""
        self.table_set.commit_slots(num_tokens, self._group)

    def clear(self) -> None:
        """Zero block IDs and counts, on the host and on the device."""
        self.table_set.clear(self._group)
