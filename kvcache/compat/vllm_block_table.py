# SPDX-License-Identifier: Apache-2.0
"""vLLM's block tables (`vllm/v1/worker/block_table.py`), over `kvcache.BlockTables`.

A caller replaces `from vllm.v1.worker.block_table import` by
`from kvcache.compat.vllm_block_table import`.

| there | here |
|---|---|
| `BlockTable(block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens, pin_memory, device, kernel_block_size, cp_kv_cache_interleave_size)` | the same |
| `MultiGroupBlockTable(..., kernel_block_sizes, num_speculative_tokens or max_num_blocks, cp_kv_cache_interleave_size)` | the same; an integer in the eighth place is `num_speculative_tokens`, a list `max_num_blocks` |
| `compute_slot_mapping(num_reqs, query_start_loc, positions)`, or in older versions `(req_indices, positions)` | the same; slots that were computed on the host are uploaded by `commit_slot_mapping`, as in older versions |
| `map_to_kernel_blocks(ids, ratio, arange)` | the same; `arange` is not needed |
| `block_size`, `max_num_blocks_per_req` of a table are in kernel blocks | the same; `shape` has the allocator's |
| `slot_mapping_cpu`, `block_table_np` and the like of older versions | `slot_mapping.cpu`, `block_table.np`, as in newer versions |
| `get_dcp_group()`, a global of the process | `context_parallel=ContextParallel(...)`: a library has no such global. A group that is not distributed is `replicated` |
| widths are rounded up to 128 tokens in newer versions | not rounded: pass `max_num_blocks` |
| `move_row` leaves the old row as it was | clears it, because stale rows have been read as live ones |
| a position for which the row has no block gets a slot of block 0 | `ValueError` if slots are computed on the host |
| a row that is too long is cut off, or NumPy raises an error | `ValueError`, and nothing is written |

>>> table = BlockTable(16, 4, 8, 64, False, "cpu", 16, 1)
>>> table.add_row([7, 9], 0)
>>> table.compute_slot_mapping(1, np.array([0, 2], np.int32), np.array([3, 17]))
>>> table.slot_mapping.np[:3]
array([115, 145,  -1])
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcache.checks import flag, integer, shown
from kvcache.specs import ContextParallel, checked_context_parallel
from kvcache.worker import BlockTables, GroupTable, TableShape
from kvcache.worker.tables.table_set import Ids
from kvcache.worker.tables.table_shape import num_blocks_for

Tokens = np.ndarray | torch.Tensor


class BlockTable(GroupTable):
    """The block table of one group, as in vLLM.

    Args:
        block_size: Tokens per allocation block.
        max_num_reqs: Maximum number of requests, each with its own row.
        max_num_blocks_per_req: Allocation blocks per row.
        max_num_batched_tokens: Maximum number of tokens in a step.
        pin_memory: Whether to pin the host side.
        device: Device of the mirror.
        kernel_block_size: Tokens per block of the attention kernel.
        cp_kv_cache_interleave_size: Consecutive tokens per context-parallel rank.
        kernel_sizes: Candidates for the kernel block size, instead of `kernel_block_size`.
        context_parallel: Context-parallel sizes and ranks.
        num_speculative_tokens: Maximum number of draft tokens of a request in a step.
        slot_mapping: Whether the group has slots.
        replicated: Whether every context-parallel rank stores all tokens.
        slot_mapping_dtype: `torch.int64` or `torch.int32`.
        pcp_padding: Whether to pad the slot mapping, as in `BlockTables`.

    Raises:
        TypeError: An argument has the wrong type, or more than eight arguments are positional.
        ValueError: An argument is out of range.
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
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> None:
        _check_by_keyword(others, 8, "kernel_sizes, num_speculative_tokens")
        shape = TableShape(
            block_size,
            integer(max_num_blocks_per_req, "max_num_blocks_per_req", least=1),
            kernel_block_size,
            kernel_sizes,
            slot_mapping=slot_mapping,
            context_parallel=context_parallel,
            replicated=replicated,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
        )
        tables = BlockTables(
            [shape],
            max_num_reqs=max_num_reqs,
            max_num_tokens=integer(max_num_batched_tokens, "max_num_batched_tokens", least=1),
            device=device,
            pin_memory=flag(pin_memory, "pin_memory"),
            num_speculative_tokens=num_speculative_tokens,
            slot_mapping_dtype=slot_mapping_dtype,
            pcp_padding=pcp_padding,
        )
        self._show(tables, 0)

    def _show(self, tables: BlockTables, group: int) -> None:
        """Show one group of `tables`. Sizes are in kernel blocks, as in vLLM."""
        super().__init__(tables.table_set, group)
        self.block_size = self.kernel_block_size
        self.use_hybrid_blocks = self.blocks_per_kv_block > 1
        self.max_num_blocks_per_req = self.shape.num_columns

    def compute_slot_mapping(
        self,
        req_indices: Tokens | int | None = None,
        *others: Tokens,
        positions: Tokens | None = None,
        query_start_loc: Tokens | None = None,
        num_reqs: int | None = None,
    ) -> None:
        """Compute the slots of a step's tokens. See `GroupTable.compute_slot_mapping`.

        Args:
            req_indices: The row of each token, followed by `positions`. With three positional
                arguments, `num_reqs`, followed by `query_start_loc` and `positions`.
            *others: See `req_indices`.
            positions: int64[n]. Token positions within their requests.
            query_start_loc: int32[num_reqs + 1]. Start of each request's tokens.
            num_reqs: Number of requests, in the first rows.
        """
        given = _slot_arguments(req_indices, others, positions, query_start_loc, num_reqs)
        super().compute_slot_mapping(*given[:2], query_start_loc=given[2])

    @staticmethod
    def map_to_kernel_blocks(
        block_ids: Ids, blocks_per_kv_block: int, kernel_block_arange: object = None
    ) -> np.ndarray:
        """Split allocation blocks into kernel blocks. `kernel_block_arange` has no effect."""
        return GroupTable.map_to_kernel_blocks(block_ids, blocks_per_kv_block)


class MultiGroupBlockTable(BlockTables):
    """The block tables of all groups, as in vLLM. Lists have one entry per group.

    Args:
        max_num_reqs: Maximum number of requests, each with its own row.
        max_model_len: Maximum number of tokens of a request.
        max_num_batched_tokens: Maximum number of tokens in a step.
        pin_memory: Whether to pin the host side.
        device: Device of the mirror.
        block_sizes: Tokens per allocation block.
        kernel_block_sizes: Tokens per block of the attention kernel.
        num_speculative_tokens: Maximum number of draft tokens of a request in a step. A list, or None,
            is taken as `max_num_blocks`, which newer versions have here.
        cp_kv_cache_interleave_size: Consecutive tokens per context-parallel rank.
        kernel_sizes: Lists of candidates for the kernel block size. A single list applies to all groups.
        context_parallel: Context-parallel sizes and ranks.
        max_num_blocks: Allocation blocks per row. None:
            `max(ceil(max_model_len / (block_size * world_size)), 1 + num_speculative_tokens)`.
        slot_mapping: Whether the group has slots.
        replicated: Whether every context-parallel rank stores all tokens of the group.
        slot_mapping_dtype: `torch.int64` or `torch.int32`.
        pcp_padding: Whether to pad the slot mapping, as in `BlockTables`.

    Raises:
        TypeError: An argument has the wrong type, or more than nine arguments are positional.
        ValueError: An argument is out of range, or a list has the wrong length.

    Example:
        >>> tables = MultiGroupBlockTable(4, 64, 32, False, "cpu", [16, 32], [16, 16])
        >>> [table.get_cpu_tensor().shape[1] for table in tables.block_tables]
        [4, 4]
    """

    _table_type: type[BlockTable] = BlockTable
    block_tables: list[BlockTable]

    if TYPE_CHECKING:

        def __getitem__(self, group: int) -> BlockTable: ...

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        num_speculative_tokens: int | Sequence[int | None] | None = 0,
        cp_kv_cache_interleave_size: int = 1,
        *others: object,
        kernel_sizes: Sequence[Sequence[int] | None] | None = None,
        context_parallel: ContextParallel | None = None,
        max_num_blocks: Sequence[int | None] | None = None,
        slot_mapping: Sequence[bool] | None = None,
        replicated: Sequence[bool] | None = None,
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> None:
        _check_by_keyword(others, 9, "num_speculative_tokens, max_num_blocks, kernel_sizes")
        if num_speculative_tokens is None or _is_list(num_speculative_tokens):
            if max_num_blocks is not None:
                raise TypeError(
                    f"num_speculative_tokens is {shown(num_speculative_tokens)}: expected an integer, "
                    "because max_num_blocks is given, too"
                )
            max_num_blocks, num_speculative_tokens = num_speculative_tokens, 0
        if not _is_list(block_sizes):
            raise TypeError(
                f"block_sizes is {shown(block_sizes)}: expected a list, one size per group"
            )
        if len(block_sizes) == 0:
            raise ValueError("block_sizes is empty: expected one size per group")
        if kernel_sizes is not None and _is_list(kernel_sizes) and len(kernel_sizes) == 1:
            kernel_sizes = list(kernel_sizes) * len(block_sizes)
        cp = checked_context_parallel(context_parallel)
        max_model_len = integer(max_model_len, "max_model_len", least=1)
        num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
        given = {
            "kernel_block_sizes": (kernel_block_sizes, None),
            "kernel_sizes": (kernel_sizes, None),
            "max_num_blocks": (max_num_blocks, None),
            "slot_mapping": (slot_mapping, True),
            "replicated": (replicated, False),
        }
        each = [_per_group(name, *value, len(block_sizes)) for name, value in given.items()]
        shapes = []
        for g, (block_size, kernel_size, candidates, width, has_slots, whole) in enumerate(
            zip(block_sizes, *each)
        ):
            block_size = integer(block_size, f"block_sizes[{g}]", least=1)
            world_size = 1 if flag(whole, f"replicated[{g}]") else cp.world_size
            if width is None:
                width = num_blocks_for(max_model_len, block_size * world_size, num_drafts)
            shapes.append(
                TableShape(
                    block_size,
                    integer(width, f"max_num_blocks[{g}]", least=1),
                    kernel_size,
                    candidates,
                    slot_mapping=has_slots,
                    context_parallel=cp,
                    replicated=whole,
                    cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
                )
            )
        super().__init__(
            shapes,
            max_num_reqs=max_num_reqs,
            max_num_tokens=integer(max_num_batched_tokens, "max_num_batched_tokens", least=1),
            device=device,
            pin_memory=flag(pin_memory, "pin_memory"),
            num_speculative_tokens=num_drafts,
            slot_mapping_dtype=slot_mapping_dtype,
            pcp_padding=pcp_padding,
        )
        for g in range(len(shapes)):
            self.block_tables[g] = table = self._table_type.__new__(self._table_type)
            table._show(self, g)

    def compute_slot_mapping(
        self,
        req_indices: Tokens | int | None = None,
        *others: Tokens,
        positions: Tokens | None = None,
        query_start_loc: Tokens | None = None,
        num_reqs: int | None = None,
    ) -> None:
        """Compute the slots of all groups. See `BlockTable.compute_slot_mapping`."""
        given = _slot_arguments(req_indices, others, positions, query_start_loc, num_reqs)
        super().compute_slot_mapping(*given[:2], query_start_loc=given[2])


def _slot_arguments(
    first: Tokens | int | None,
    others: tuple[Tokens, ...],
    positions: Tokens | None,
    query_start_loc: Tokens | None,
    num_reqs: int | None,
) -> tuple[Tokens | None, Tokens | None, Tokens | None]:
    """Return `req_indices`, `positions` and `query_start_loc`."""
    if len(others) > 2 or (others and positions is not None):
        raise TypeError(
            f"{1 + len(others)} positional arguments: expected (req_indices, positions) or "
            "(num_reqs, query_start_loc, positions), and positions once"
        )
    if len(others) == 2:
        for name, value in (("num_reqs", num_reqs), ("query_start_loc", query_start_loc)):
            if value is not None:
                raise TypeError(f"{name} is {shown(value)}: expected it once, by position")
        num_reqs, (query_start_loc, positions), first = first, others, None
        num_reqs = integer(num_reqs, "num_reqs")
    elif others:
        positions = others[0]
    if num_reqs is not None:
        count = integer(num_reqs, "num_reqs") + 1
        if not np.ndim(query_start_loc) or len(query_start_loc) < count:
            raise ValueError(
                f"query_start_loc is {shown(query_start_loc)}: expected {count} entries, because "
                f"num_reqs is {count - 1}"
            )
        query_start_loc = query_start_loc[:count]
    return first, positions, query_start_loc


def _per_group(
    name: str, values: Sequence[Any] | None, default: object, num_groups: int
) -> Sequence[Any]:
    if values is None:
        return [default] * num_groups
    if not _is_list(values):
        raise TypeError(f"{name} is {shown(values)}: expected a list, one entry per group")
    check_one_per_group(values, num_groups, name)
    return values


def check_one_per_group(values: Sequence[object], num_groups: int, name: str) -> None:
    """Raise ValueError unless a list has as many entries as `block_sizes`."""
    if len(values) != num_groups:
        raise ValueError(
            f"{name} has {len(values)} entries, but block_sizes has {num_groups}: expected equal "
            "lengths"
        )


def _check_by_keyword(others: tuple[object, ...], most: int, names: str) -> None:
    """Raise TypeError if more than `most` positional arguments are given."""
    if others:
        raise TypeError(
            f"{most + len(others)} positional arguments, the last {shown(others[-1])}: expected at most "
            f"{most}; pass {names} and later arguments by keyword"
        )


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
