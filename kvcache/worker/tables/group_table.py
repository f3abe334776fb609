# SPDX-License-Identifier: Apache-2.0
"""The block table of one cache group, which lists the blocks that hold each row's tokens."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.checks import as_array, check_range, instance, integer
from kvcache.worker.tables.buffer import BufferView
from kvcache.worker.tables.table_calls import TableCalls
from kvcache.worker.tables.table_set import Ids, TableSet, cpu_tensor, host_tensor


class GroupTable(TableCalls):
    """The block IDs in each row of one cache group, and the slots of a step's tokens.

    `block_table` is int32[rows, width] in kernel blocks, `slot_mapping` is
    int64[max_num_tokens], and `num_blocks_per_row` is int32[rows]. The first two have a host
    side (`.np`, `.cpu`) and a device side (`.gpu`) at fixed addresses, so captured CUDA graphs stay
    valid. On a CPU device, both sides share memory.

    Methods change the host side. `commit_updates` uploads all changes made through methods, whereas
    `commit_block_table` and `commit_slot_mapping` upload whole rows. Uploads are asynchronous, in
    the order of the current stream. Before it changes the host side, a method waits for uploads
    that still read it. To write to `.np` directly, call `block_table.before_write()` first, also
    set `num_blocks_per_row`, and upload with `commit_block_table`. Changes and uploads cannot be
    captured in a CUDA graph.

    For devices other than CPU and CUDA, tables and slots are computed on the CPU and then copied to
    the device.

    Args:
        tables: The tables of all groups. `BlockTables` creates them, and `tables[g]` returns the
            `GroupTable` of group `g`.
        group: Index of the group.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `group` is out of range.

    Example:
        >>> from kvcache import BlockTables, TableShape
        >>> table = BlockTables([TableShape(16, max_num_blocks=8)], max_num_reqs=4, max_num_tokens=64)[0]
        >>> table.add_row([7, 9], 0)
        >>> table.compute_slot_mapping(np.array([0, 0], np.int32), np.array([3, 17]))
        >>> table.slot_mapping.np[:3]
        array([115, 145,  -1])
    """

    def __init__(self, tables: TableSet, group: int) -> None:
        instance(tables, TableSet, "tables")
        group = integer(group, "group", 0, len(tables.shapes) - 1)
        self.max_num_reqs = tables.max_num_reqs
        self.table_set, self._group = tables, group
        self.shape = tables.shapes[group]
        self.block_size = self.shape.block_size
        self.kernel_block_size = self.shape.kernel_block_size
        self.blocks_per_kv_block = self.shape.ratio
        self.max_num_blocks_per_req = self.shape.max_num_blocks
        self.device = tables.device
        self.block_table: BufferView = tables.tables[group]
        self.num_blocks_per_row: np.ndarray = tables.counts[group]

    @property
    def slot_mapping(self) -> BufferView:
        """The slot mapping, [max_num_tokens]. Raises ValueError for a group without a slot mapping."""
        return self.table_set.slot_mapping(self._group)

    @property
    def num_computed_slots(self) -> int | None:
        """Number of tokens, including padding, for which the last `compute_slot_mapping` computed
        slots that are on the device.

        None if a replayed CUDA graph may have changed the slots. Raises ValueError for a group
        without a slot mapping.
        """
        return self.table_set.num_computed_slots(self._group)

    def append_row(self, block_ids: Ids, row: int) -> None:
        """Append allocation blocks to a row. Raises ValueError if the row would overflow."""
        self.table_set.for_write().append_row(self._group, row, block_ids, False)

    def add_row(self, block_ids: Ids, row: int) -> None:
        """Replace a row's content with the given allocation blocks."""
        self.table_set.for_write().append_row(self._group, row, block_ids, True)

    def commit_block_table(self, num_reqs: int) -> None:
        """Upload the first `num_reqs` rows, whether or not they have changed."""
        self.table_set.commit_rows(self._group, num_reqs)

    def slots_of(
        self,
        req_indices: np.ndarray | torch.Tensor | None = None,
        positions: np.ndarray | torch.Tensor | None = None,
        *,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the slots of arbitrary tokens, for example, to read a context. `slot_mapping`
        stays unchanged.

        Arguments and errors are the same as for `compute_slot_mapping`, with any number of tokens.
        Arguments on the host are looked up in the host tables, and arguments on the device in the
        device tables.

        Returns:
            int64[n] on the device, in new memory.
        """
        return self.table_set.slots_of(req_indices, positions, query_start_loc, self._group)

    def state_pages(
        self,
        req_indices: np.ndarray | torch.Tensor,
        num_tokens: np.ndarray | torch.Tensor,
        num_drafts: np.ndarray | torch.Tensor,
    ) -> torch.Tensor:
        """Return the pages that a step's recurrent states use.

        For row i of the result, a kernel reads the state before the step from page [i, 0], and
        writes the state after the last non-draft token to the same page. It writes the state after
        the j-th draft token to page [i, j]. Unused entries contain the null page. Arguments on the
        host are looked up in the host table, and tensors on the device in the device table.

        Args:
            req_indices: int[n]. Rows.
            num_tokens: int[n]. Number of tokens in each row after the step, including draft tokens.
            num_drafts: int[n]. Number of draft tokens in each row, at most
                `num_speculative_blocks`. The draft tokens are the last tokens in the row.

        Returns:
            int32[n, 1 + num_speculative_blocks].

        Raises:
            ValueError: The group has slots, or there are too many draft tokens (checked only for
                arguments on the host).

        Example:
            >>> from kvcache import GroupSpec, BlockTables
            >>> tables = BlockTables.for_groups(
            ...     [GroupSpec("recurrent", 16, {"num_speculative_blocks": 2})],
            ...     max_num_reqs=4, max_model_len=64, max_num_tokens=32,
            ... )
            >>> tables.add_row([[0, 5, 8, 9]], 0)
            >>> tables[0].state_pages([0, 0], [20, 19], [2, 0])
            tensor([[5, 8, 9],
                    [5, 0, 0]], dtype=torch.int32)
        """
        if self.shape.slot_mapping:
            raise ValueError("the group has a slot mapping: expected a recurrent group")
        on_device = isinstance(num_tokens, torch.Tensor) and num_tokens.device.type != "cpu"
        if on_device and not num_tokens.is_cuda:  # without kernels, compute on the host
            names = ("req_indices", "num_tokens", "num_drafts")
            given = [
                cpu_tensor(each, name) if isinstance(each, torch.Tensor) else each
                for each, name in zip((req_indices, num_tokens, num_drafts), names)
            ]
            return self.state_pages(*given).to(num_tokens.device)
        table = self.block_table.gpu if on_device else self.block_table.cpu
        most = self.shape.num_speculative_blocks
        given = {"req_indices": req_indices, "num_tokens": num_tokens, "num_drafts": num_drafts}
        if on_device:
            given = [torch.as_tensor(each, device=table.device).long() for each in given.values()]
        else:
            given = [host_tensor(each, torch.int64, name) for name, each in given.items()]
            for name, each in zip(("num_tokens", "num_drafts"), given[1:]):
                if each.ndim != 1 or each.shape != given[0].shape:
                    raise ValueError(
                        f"{name} has shape {list(each.shape)} and req_indices has shape "
                        f"{list(given[0].shape)}: expected [n] for both"
                    )
            check_range("req_indices", "is row", given[0].numpy(), 0, len(table))
        rows, num_tokens, num_drafts = given
        if not on_device and (num_drafts > most).any():
            raise ValueError(
                f"num_drafts is {num_drafts.tolist()}: expected at most num_speculative_blocks ({most})"
            )
        index = torch.arange(1 + most, device=table.device)
        tokens_per_block = self.shape.block_size * self.shape.world_size
        columns = ((num_tokens - num_drafts - 1) // tokens_per_block)[:, None] + index
        pages = table[rows[:, None], columns.clamp(0, table.shape[1] - 1)]
        return pages.masked_fill_(index > num_drafts[:, None], 0)

    def gather(
        self,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Gather the rows of a batch in batch order, int32[n, width]. See `BlockTables.gather`."""
        return self.table_set.gather(idx_mapping, num_computed_tokens, max_num_tokens)[self._group]

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """Return a view int32[num_reqs, width] of the device side."""
        if num_reqs is not None:
            num_reqs = integer(num_reqs, "num_reqs", most=len(self.block_table.gpu))
        return self.block_table.gpu[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """Return a view int32[rows, width] of the host side."""
        return self.block_table.cpu

    def get_numpy_array(self) -> np.ndarray:
        """Return a numpy view of the host side."""
        return self.block_table.np

    @staticmethod
    def map_to_kernel_blocks(block_ids: Ids, blocks_per_kv_block: int) -> np.ndarray:
        """Split each allocation block into its kernel blocks.

        Args:
            block_ids: Allocation blocks.
            blocks_per_kv_block: Kernel blocks per allocation block.

        Returns:
            int32[n * blocks_per_kv_block].

        Example:
            >>> GroupTable.map_to_kernel_blocks([0, 2], 4)
            array([ 0,  1,  2,  3,  8,  9, 10, 11], dtype=int32)
        """
        blocks_per_kv_block = integer(blocks_per_kv_block, "blocks_per_kv_block", least=1)
        ids = as_array(block_ids, "block_ids")
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"block_ids has dtype {ids.dtype}: expected a list of integers")
        wrong = np.flatnonzero((ids < 0) | (ids >= 2**31 // blocks_per_kv_block))
        if wrong.size:
            raise ValueError(
                f"block_ids[{wrong[0]}] is {ids[wrong[0]]}: "
                f"expected 0 to {2**31 // blocks_per_kv_block - 1}"
            )
        ids = ids.astype(np.int32).reshape(-1, 1) * np.int32(blocks_per_kv_block)
        return (ids + np.arange(blocks_per_kv_block, dtype=np.int32)).reshape(-1)
