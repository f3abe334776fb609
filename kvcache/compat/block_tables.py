# SPDX-License-Identifier: Apache-2.0
"""Block tables with the constructor arguments of vLLM and of vLLM's NPU variant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcache.checks import flag, integer, shown
from kvcache.specs import ContextParallel, checked_context_parallel
from kvcache.worker.tables.block_tables import BlockTables
from kvcache.worker.tables.group_table import GroupTable
from kvcache.worker.tables.table_shape import TableShape, num_blocks_for


class BlockTable(GroupTable):
    """The block table of one group, with the constructor arguments of vLLM's `BlockTable`.

    Pass arguments by keyword, because engines order them differently.

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

    Example:
        >>> table = BlockTable(16, 4, 8, 64, False, "cpu", 16)
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
        super().__init__(tables._tables, 0)


class MultiGroupBlockTable(BlockTables):
    """The block tables of all groups, with the constructor arguments of vLLM's `MultiGroupBlockTable`.

    Pass arguments by keyword, because engines order them differently. Lists have one entry per group.

    Args:
        max_num_reqs: Maximum number of requests, each with its own row.
        max_model_len: Maximum number of tokens of a request.
        max_num_batched_tokens: Maximum number of tokens in a step.
        pin_memory: Whether to pin the host side.
        device: Device of the mirror.
        block_sizes: Tokens per allocation block.
        kernel_block_sizes: Tokens per block of the attention kernel.
        num_speculative_tokens: Maximum number of draft tokens of a request in a step.
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
        >>> [table.max_num_blocks_per_req for table in tables.block_tables]
        [4, 2]
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        num_speculative_tokens: int = 0,
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
        names = "num_speculative_tokens, max_num_blocks, kernel_sizes"
        _check_by_keyword(others, 9, names)
        if not _is_list(block_sizes):
            raise TypeError(
                f"block_sizes is {shown(block_sizes)}: expected a list, one size per group"
            )
        if kernel_block_sizes is not None and not _is_list(kernel_block_sizes):
            raise TypeError(
                f"kernel_block_sizes is {shown(kernel_block_sizes)}: expected a list, one size per "
                f"group; pass {names} by keyword"
            )
        if _is_list(num_speculative_tokens):
            raise TypeError(
                f"num_speculative_tokens is {shown(num_speculative_tokens)}: expected an integer; "
                f"pass {names} by keyword"
            )
        if len(block_sizes) == 0:
            raise ValueError("block_sizes is empty: expected one size per group")
        if kernel_sizes is not None and _is_list(kernel_sizes) and len(kernel_sizes) == 1:
            kernel_sizes = list(kernel_sizes) * len(block_sizes)

        def per_group(values: Sequence | None, name: str, default: object) -> Sequence:
            if values is None:
                return [default] * len(block_sizes)
            if not _is_list(values):
                raise TypeError(f"{name} is {shown(values)}: expected a list, one entry per group")
            if len(values) != len(block_sizes):
                raise ValueError(
                    f"{name} has {len(values)} entries, but block_sizes has {len(block_sizes)}: "
                    "expected equal lengths"
                )
            return values

        cp = checked_context_parallel(context_parallel)
        max_model_len = integer(max_model_len, "max_model_len", least=1)
        num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
        shapes = []
        for g, (block_size, kernel_size, candidates, width, has_slots, whole) in enumerate(
            zip(
                block_sizes,
                per_group(kernel_block_sizes, "kernel_block_sizes", None),
                per_group(kernel_sizes, "kernel_sizes", None),
                per_group(max_num_blocks, "max_num_blocks", None),
                per_group(slot_mapping, "slot_mapping", True),
                per_group(replicated, "replicated", False),
            )
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


def _check_by_keyword(others: tuple[object, ...], most: int, names: str) -> None:
    """Raise TypeError if more than `most` positional arguments are given."""
    if others:
        raise TypeError(
            f"{most + len(others)} positional arguments, the last {shown(others[-1])}: expected at most "
            f"{most}; pass {names} and later arguments by keyword"
        )


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
