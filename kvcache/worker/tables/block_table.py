"""The worker's block tables: which block holds which part of each row's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcache.checks import as_array, check_range, flag, integer
from kvcache.specs import ContextParallel, checked_context_parallel
from kvcache.step import StepPlan
from kvcache.worker.tables.buffer import BufferView
from kvcache.worker.tables.table_layout import check_by_keyword, kernel_size_of, layout_of
from kvcache.worker.tables.table_set import (
    Ids,
    TableSet,
    cpu_tensor,
    host_tensor,
    make_table_set,
)

BY_KEYWORD = "kernel_sizes, num_speculative_tokens"  # where other engines pass them by position


class BlockTable:
    """Block ids per row of one cache group, on the host with a mirror on the device, and its slots.

    `block_table`: int32[rows, width], kernel blocks. `slot_mapping`: int64[max_num_batched_tokens].
    Both have the sides `.np`, `.cpu` and `.gpu`, one memory where the device is the CPU, at addresses
    that never change: a CUDA graph captured once stays valid. `num_blocks_per_row`: int32[rows].

    Sizes are in tokens, widths in allocation blocks. `kernel_block_size`: the attention kernel's
    block, which must divide `block_size`; each id `b` becomes `ratio` ids from `b * ratio` on.
    `kernel_sizes` instead: candidates, of which the first positive one that divides is taken, and
    None or [0] means no split. `context_parallel` spreads tokens over workers, `cp_kv_cache_
    interleave_size` (which must divide the kernel block) of them at a time; there are then
    `1 + num_speculative_tokens` rows per request. `pcp_padding` lengthens the slot mapping by
    `2 * pcp_world_size * max_num_reqs`. `slot_mapping_dtype`: torch.int64 or torch.int32.

    `pin_memory`: whether the host side is pinned, which uploads to a GPU want.

    Changes go to the host side. `commit_updates` brings the device up to date with all changes made
    by the methods here; `commit_block_table` and `commit_slot_mapping` upload whole rows. All are
    asynchronous, in the order of the current stream. The methods may be called again at once (they
    wait for an upload that still reads by themselves); who writes into `.np` directly calls
    `block_table.before_write()` first, sets `num_blocks_per_row` too, and uploads by
    `commit_block_table`. Not inside a CUDA graph capture: changes and uploads are the host's.

    Devices that are neither CPU nor CUDA: tables and slots are computed on the CPU and copied.

    Pass arguments by keyword: engines order them differently.

    >>> table = BlockTable(
    ...     block_size=16, max_num_reqs=4, max_num_blocks_per_req=8, max_num_batched_tokens=64
    ... )
    >>> table.add_row([7, 9], 0)
    >>> table.compute_slot_mapping(np.array([0, 0], np.int32), np.array([3, 17]))
    >>> table.slot_mapping.np[:3]
    array([115, 145,  -1])
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool = False,
        device: torch.device | str = "cpu",
        kernel_block_size: int | None = None,
        cp_kv_cache_interleave_size: int = 1,
        *others: object,
        kernel_sizes: Sequence[int] | None = None,
        context_parallel: ContextParallel | None = None,
        num_speculative_tokens: int = 0,
        slot_mapping: bool = True,
        replicated: bool = False,
        window: int | None = None,
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> None:
        check_by_keyword(others, 8, BY_KEYWORD)
        cp = checked_context_parallel(context_parallel)
        block_size = integer(block_size, "block_size", least=1)
        layout = layout_of(
            block_size,
            kernel_size_of(block_size, kernel_block_size, kernel_sizes),
            integer(max_num_blocks_per_req, "max_num_blocks_per_req", least=1),
            ContextParallel() if flag(replicated, "replicated") else cp,
            cp_kv_cache_interleave_size,
            window,
            slot_mapping,
        )
        self._bind(
            make_table_set(
                [layout],
                cp,
                max_num_reqs,
                max_num_batched_tokens,
                num_speculative_tokens,
                pin_memory,
                device,
                slot_mapping_dtype,
                pcp_padding,
            ),
            0,
        )

    @classmethod
    def _of(cls, tables: TableSet, group: int) -> BlockTable:
        self = cls.__new__(cls)
        self._bind(tables, group)
        return self

    def _bind(self, tables: TableSet, group: int) -> None:
        self.max_num_reqs = tables.max_num_reqs
        self._tables, self._group = tables, group
        self.layout = tables.layouts[group]
        self.block_size = self.layout.block_size
        self.kernel_block_size = self.layout.kernel_block_size
        self.blocks_per_kv_block = self.layout.ratio
        self.max_num_blocks_per_req = self.layout.max_num_blocks
        self.device = tables.device
        self.block_table: BufferView = tables.tables[group]
        self.num_blocks_per_row: np.ndarray = tables.counts[group]

    @property
    def slot_mapping(self) -> BufferView:
        """[max_num_batched_tokens]; ValueError for a group without slot mapping."""
        return self._tables.slot_mapping(self._group)

    @property
    def num_computed_slots(self) -> int | None:
        """Tokens of the last `compute_slot_mapping`, padded ones among them, whose slots the device has.

        None where the replay of a captured CUDA graph may have computed others. ValueError for a
        group without slot mapping.
        """
        return self._tables.num_computed_slots(self._group)

    def apply(self, plan: StepPlan, num_blocks: int = -1) -> None:
        """The table part of a step's plan; see `MultiGroupBlockTable.apply`."""
        self._tables.apply(plan, num_blocks)

    def append_row(self, block_ids: Ids, row: int) -> None:
        """Adds allocation blocks behind those of a row; none is a no-op, an overflow a ValueError."""
        self._tables.append_row(self._group, block_ids, row)

    def add_row(self, block_ids: Ids, row: int) -> None:
        """Sets a row to these allocation blocks."""
        self._tables.append_row(self._group, block_ids, row, reset=True)

    def clear_row(self, row: int) -> None:
        """Empties a row: its ids become the null block."""
        self._tables.clear_rows([row], self._group)

    def clear_rows(self, rows: Ids) -> None:
        """Empties rows, in one call."""
        self._tables.clear_rows(rows, self._group)

    def move_row(self, src: int, tgt: int) -> None:
        """Row `tgt` takes over what `src` holds, and `src` is cleared; onto itself: nothing."""
        self._tables.move_rows([src], [tgt], self._group)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchanges two rows."""
        self._tables.swap_rows([src], [tgt], self._group)

    def move_rows(self, src: Ids, tgt: Ids) -> None:
        """`move_row` for pairs of rows, one after the other, in one call."""
        self._tables.move_rows(src, tgt, self._group)

    def swap_rows(self, src: Ids, tgt: Ids) -> None:
        """`swap_row` for pairs of rows, one after the other, in one call."""
        self._tables.swap_rows(src, tgt, self._group)

    def commit_updates(self) -> None:
        """Brings the device up to date: what changed, in one copy and one launch for all groups."""
        self._tables.commit_updates()

    def commit_block_table(self, num_reqs: int) -> None:
        """Uploads the first `num_reqs` rows whole."""
        self._tables.commit_rows(self._group, num_reqs)

    def compute_slot_mapping(
        self,
        req_indices: np.ndarray | torch.Tensor | None = None,
        positions: np.ndarray | torch.Tensor | None = None,
        *,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
    ) -> None:
        """Slots of a step's tokens at `positions` (int64[n], in tokens of the request).

        Their rows: `req_indices`, int32[n], one per token; or `query_start_loc`, int32[r + 1], where
        each request's tokens begin, and then `req_indices`, int32[r], one per request (default: row
        i for request i). Row -1 is a dummy request. Its tokens, tokens that another context-parallel
        rank holds, and all entries behind the last token are -1.

        numpy arrays (and CPU tensors) fill the host side, to be uploaded by `commit_slot_mapping`;
        tensors on the device fill the device side at once, by one launch, from the tables there. A
        row or position out of range is a ValueError with nothing written (on a GPU: a RuntimeError with
        KVCACHE_CHECKED=1, else such tokens get -1). Entries behind the last token that an earlier call
        has filled become -1; those that the caller itself wrote stay until `commit_slot_mapping`.
        """
        self._tables.compute_slots(req_indices, positions, query_start_loc, self._group)

    def slots_of(
        self,
        req_indices: np.ndarray | torch.Tensor | None = None,
        positions: np.ndarray | torch.Tensor | None = None,
        *,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots of any tokens, int64[n] on the device, in a buffer of their own: to read a context.

        Arguments and errors as of `compute_slot_mapping`, any number of tokens; `slot_mapping` stays as
        it is. Tokens on the host are looked up in the tables there, tokens on the device in those of the
        device.
        """
        return self._tables.slots_of(req_indices, positions, query_start_loc, self._group)

    def state_pages(
        self,
        req_indices: np.ndarray | torch.Tensor,
        num_tokens: np.ndarray | torch.Tensor,
        num_drafts: np.ndarray | torch.Tensor,
    ) -> torch.Tensor:
        """Pages of a step's recurrent states: int32[n, 1 + num_speculative_blocks].

        Row req_indices[i] has num_tokens[i] tokens when the step has run, of which the last
        num_drafts[i] are drafts (at most `num_speculative_blocks`). A kernel reads the state before the
        step from page [i, 0], writes the state after the last token that is no draft there, too, and
        the state after the j-th draft to page [i, j]. Pages behind are the null page.

        Arguments on the host are looked up in the table there, tensors on the device in that of the
        device. ValueError for a group with slots and, on the host, for more drafts.

        >>> from kvcache import GroupSpec, MultiGroupBlockTable
        >>> tables = MultiGroupBlockTable.for_groups(
        ...     [GroupSpec("recurrent", 16, {"num_speculative_blocks": 2})],
        ...     max_num_reqs=4, max_model_len=64, max_num_batched_tokens=32,
        ... )
        >>> tables.add_row([[0, 5, 8, 9]], 0)
        >>> tables[0].state_pages([0, 0], [20, 19], [2, 0])
        tensor([[5, 8, 9],
                [5, 0, 0]], dtype=torch.int32)
        """
        if self.layout.has_slots:
            raise ValueError("the group has a slot mapping: expected one of recurrent states")
        on_device = isinstance(num_tokens, torch.Tensor) and num_tokens.device.type != "cpu"
        if on_device and not num_tokens.is_cuda:  # computed on the host, as slots are
            names = ("req_indices", "num_tokens", "num_drafts")
            given = [
                cpu_tensor(each, name) if isinstance(each, torch.Tensor) else each
                for each, name in zip((req_indices, num_tokens, num_drafts), names)
            ]
            return self.state_pages(*given).to(num_tokens.device)
        table = self.block_table.gpu if on_device else self.block_table.cpu
        most = self.layout.num_speculative_blocks
        given = {"req_indices": req_indices, "num_tokens": num_tokens, "num_drafts": num_drafts}
        if on_device:
            given = [torch.as_tensor(each, device=table.device).long() for each in given.values()]
        else:
            given = [host_tensor(each, torch.int64, name) for name, each in given.items()]
            for name, each in zip(("num_tokens", "num_drafts"), given[1:]):
                if each.ndim != 1 or each.shape != given[0].shape:
                    raise ValueError(
                        f"{name} has shape {list(each.shape)}, req_indices {list(given[0].shape)}: "
                        "expected [n] of both"
                    )
            check_range("req_indices", "is row", given[0].numpy(), 0, len(table))
        rows, num_tokens, num_drafts = given
        if not on_device and (num_drafts > most).any():
            raise ValueError(
                f"num_drafts is {num_drafts.tolist()}: expected at most {most}, num_speculative_blocks"
            )
        index = torch.arange(1 + most, device=table.device)
        tokens_per_block = self.block_size * self.layout.world_size
        columns = ((num_tokens - num_drafts - 1) // tokens_per_block)[:, None] + index
        pages = table[rows[:, None], columns.clamp(0, table.shape[1] - 1)]
        return pages.masked_fill_(index > num_drafts[:, None], 0)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Uploads the slot mapping: what lies behind `num_tokens` is -1 on the device too."""
        self._tables.commit_slots(num_tokens, self._group)

    def gather(
        self,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Rows in batch order, int32[n, width] on the device; see `MultiGroupBlockTable.gather`."""
        return self._tables.gather(idx_mapping, num_computed_tokens, max_num_tokens)[self._group]

    def clear(self) -> None:
        """Zeroes this group's ids and counts, on the host and on the device."""
        self._tables.clear(self._group)

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """int32[num_reqs, width] on the device, a view."""
        if num_reqs is not None:
            num_reqs = integer(num_reqs, "num_reqs")
        return self.block_table.gpu[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """int32[rows, width] on the host, a view."""
        return self.block_table.cpu

    def get_numpy_array(self) -> np.ndarray:
        """The host side as numpy, a view."""
        return self.block_table.np

    @staticmethod
    def map_to_kernel_blocks(block_ids: Ids, blocks_per_kv_block: int) -> np.ndarray:
        """int32[n * ratio]: each allocation block as the kernel blocks it is cut into.

        >>> BlockTable.map_to_kernel_blocks([0, 2], 4)
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
