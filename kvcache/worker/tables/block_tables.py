# SPDX-License-Identifier: Apache-2.0
"""The block tables of a model with several cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch

from kvcache.checks import flag, instance, integer, listed, num_entries, shown
from kvcache.kinds import make_kind
from kvcache.specs import ContextParallel, GroupSpec, checked_context_parallel, checked_groups
from kvcache.step import NO_IDS, NO_REPLACE, StepPlan
from kvcache.worker.tables.group_table import GroupTable
from kvcache.worker.tables.table_calls import TableCalls
from kvcache.worker.tables.table_set import ALL_GROUPS, Ids, TableSet, checked_device
from kvcache.worker.tables.table_shape import TableShape, checked_candidates, num_blocks_for


class BlockTables(TableCalls):
    """The block tables of all cache groups, in one shared buffer. Each call serves all groups at once.

    `tables[g]` is the `GroupTable` of group `g`, and `block_tables` lists them. `for_groups`
    derives the shapes from a plan's groups.

    Args:
        shapes: The shape of each group's table, in the order of the groups.
        max_num_reqs: Maximum number of requests, each with its own row.
        max_num_tokens: Maximum number of tokens in a step.
        device: Device that holds the mirror of the tables.
        pin_memory: Whether to pin the host side, which makes uploads to a GPU asynchronous. None: only if
            the device is a GPU.
        num_speculative_tokens: Maximum number of draft tokens per request in a step. With context
            parallelism, the tables have `1 + num_speculative_tokens` rows per request.
        slot_mapping_dtype: `torch.int64` or `torch.int32`.
        pcp_padding: Whether to lengthen the slot mapping by `2 * pcp_world_size * max_num_reqs`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the groups differ in `context_parallel`.

    Example:
        >>> shapes = [TableShape(16, 4), TableShape(32, 2, kernel_block_size=16)]
        >>> tables = BlockTables(shapes, max_num_reqs=4, max_num_tokens=32, device="cpu")
        >>> tables.add_row(([5, 6], [2]), 0)
        >>> tables.compute_slot_mapping(np.array([0, 0]), np.array([1, 17]))
        >>> tables[0].slot_mapping.np[:2], tables[1].slot_mapping.np[:2]
        (array([81, 97]), array([65, 81]))
    """

    _group = ALL_GROUPS

    def __init__(
        self,
        shapes: Sequence[TableShape],
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        device: torch.device | str = "cpu",
        pin_memory: bool | None = None,
        num_speculative_tokens: int = 0,
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> None:
        shapes = listed(shapes, "shapes", "a list of TableShape, one per group")
        if not shapes:
            raise ValueError("shapes is empty: expected one TableShape per group")
        for g, shape in enumerate(shapes):
            instance(shape, TableShape, f"shapes[{g}]")
        cp = shapes[0].context_parallel
        for g, shape in enumerate(shapes):
            if shape.context_parallel != cp:
                raise ValueError(
                    f"shapes[{g}] has {shape.context_parallel}: expected the context_parallel of "
                    f"shapes[0], {cp}"
                )
        max_num_reqs = integer(max_num_reqs, "max_num_reqs", least=1)
        max_num_tokens = integer(max_num_tokens, "max_num_tokens", least=1)
        num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
        device = checked_device(device)
        if not any(slot_mapping_dtype is dtype for dtype in (torch.int64, torch.int32)):
            raise ValueError(
                f"slot_mapping_dtype is {shown(slot_mapping_dtype)}: expected int64 or int32"
            )
        pinned = device.type == "cuda" if pin_memory is None else flag(pin_memory, "pin_memory")
        padding = 2 * cp.pcp_world_size * max_num_reqs if flag(pcp_padding, "pcp_padding") else 0
        self.table_set = TableSet(
            shapes,
            max_num_reqs,
            max_num_reqs * (1 + num_drafts if cp.world_size > 1 else 1),
            max_num_tokens + padding,
            pinned,
            device,
            slot_mapping_dtype,
        )
        self.block_tables = [GroupTable(self.table_set, g) for g in range(len(shapes))]

    @staticmethod
    def for_groups(
        groups: Sequence[GroupSpec],
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_num_tokens: int,
        device: torch.device | str = "cpu",
        pin_memory: bool | None = None,
        kernel_sizes: Sequence[int] | None = None,
        context_parallel: ContextParallel | None = None,
        max_encoder_tokens: int | None = None,
        cp_kv_cache_interleave_size: int = 1,
        num_speculative_tokens: int = 0,
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> BlockTables:
        """Create tables for a manager's groups (`CachePlan.groups`), in the same order.

        The table shapes are derived from the groups and their kinds. Arguments that are not listed
        here have the same meaning as in the constructor.

        Args:
            groups: The manager's groups.
            max_model_len: Maximum number of tokens per request.
            kernel_sizes: Candidates for the kernel block size of all groups with slots.
            context_parallel: Context-parallel sizes and ranks.
            max_encoder_tokens: Maximum number of encoder tokens per request
                (`CachePlan.max_encoder_tokens`). None: `max_model_len`.
            cp_kv_cache_interleave_size: Number of consecutive tokens stored on one context-parallel
                rank before the next rank follows.

        Returns:
            The tables.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of range, or `max_encoder_tokens` is given without an encoder
                group.

        Example:
            >>> groups = [
            ...     GroupSpec("full_attention", 16), GroupSpec("sliding_window", 32, {"window": 64})
            ... ]
            >>> tables = BlockTables.for_groups(
            ...     groups, max_num_reqs=4, max_model_len=64, max_num_tokens=32
            ... )
            >>> [(table.block_size, table.shape.window) for table in tables.block_tables]
            [(16, None), (32, 64)]
        """
        groups = checked_groups(groups)
        cp = checked_context_parallel(context_parallel)
        max_model_len = integer(max_model_len, "max_model_len", least=1)
        num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
        if kernel_sizes is not None:
            kernel_sizes = checked_candidates(kernel_sizes, "kernel_sizes")
        kinds = [make_kind(group.kind, group.options) for group in groups]
        num_encoder_tokens = max_model_len
        if max_encoder_tokens is not None:
            num_encoder_tokens = integer(max_encoder_tokens, "max_encoder_tokens", least=1)
            if not any(kind.pages.of_encoder for kind in kinds):
                raise ValueError(
                    f"max_encoder_tokens is {num_encoder_tokens}: expected None, as no group's kind has "
                    "an encoder"
                )
        shapes = []
        for group, kind in zip(groups, kinds):
            pages, per_block = kind.pages, group.tokens_per_block(cp)
            if pages.wraps:
                width = -(-min(max_model_len, kind.buffer) // per_block)
            elif pages.of_encoder and max_encoder_tokens is not None:
                width = -(-num_encoder_tokens // per_block)
            else:
                width = num_blocks_for(max_model_len, per_block, num_drafts)
            shapes.append(
                TableShape(
                    group.block_size,
                    width + kind.num_speculative_blocks,
                    kernel_sizes=kernel_sizes if pages.has_slots else None,
                    window=None if pages.wraps else kind.window,
                    slot_mapping=pages.has_slots,
                    context_parallel=cp,
                    replicated=group.replicated,
                    cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
                    encoder=pages.of_encoder,
                    circular=pages.wraps,
                    num_speculative_blocks=kind.num_speculative_blocks,
                )
            )
        return BlockTables(
            shapes,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            device=device,
            pin_memory=pin_memory,
            num_speculative_tokens=num_drafts,
            slot_mapping_dtype=slot_mapping_dtype,
            pcp_padding=pcp_padding,
        )

    def __getitem__(self, group: int) -> GroupTable:
        try:
            return self.block_tables[index(group)]
        except IndexError:
            raise IndexError(f"group is {shown(group)}: expected 0 to {len(self) - 1}") from None
        except TypeError:
            raise TypeError(f"group is {shown(group)}: expected an integer") from None

    def __len__(self) -> int:
        return len(self.block_tables)

    def append_row(self, block_ids: Sequence[Ids], row: int) -> None:
        """Append `block_ids[g]` to a row of each group `g`."""
        self.table_set.apply(self._row_plan(block_ids, row, clear=False))

    def add_row(self, block_ids: Sequence[Ids], row: int) -> None:
        """Replace a row of each group `g` with `block_ids[g]`."""
        self.table_set.apply(self._row_plan(block_ids, row, clear=True))

    def commit_block_table(self, num_reqs: int) -> None:
        """Upload the first `num_reqs` rows of every group, whether or not they have changed."""
        for group in range(len(self)):
            self.table_set.commit_rows(group, num_reqs)

    def gather(
        self,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> list[torch.Tensor]:
        """Gather the rows of a batch on the device, in batch order, with one launch for all groups.

        The result is always at the same address, and the next call overwrites it.

        Args:
            idx_mapping: int32[n], on the device. The row of each request in the batch, or -1 for a
                padding request, whose result is filled with the null block.
            num_computed_tokens: int32[n]. Number of tokens before each request's first query. If
                given, entries for blocks that have left a group's window are replaced by the null
                block, so that kernels that read masked tiles do not read other requests' NaN
                values.
            max_num_tokens: Maximum length of a row, in tokens. None: the current maximum. When
                capturing a CUDA graph, pass `max_model_len` (or the number of encoder tokens, if
                greater).

        Returns:
            One tensor int32[n, width] per group.
        """
        return self.table_set.gather(idx_mapping, num_computed_tokens, max_num_tokens)

    def _row_plan(self, block_ids: Sequence[Ids], row: int, clear: bool) -> StepPlan:
        row = integer(row, "row")
        shape = getattr(block_ids, "shape", None) or (num_entries(block_ids, "block_ids"),)
        if shape[0] != len(self):
            raise ValueError(
                f"block_ids has {shape[0]} groups: expected {len(self)}, one per table"
            )
        groups = listed(block_ids, "block_ids")
        for g, ids in enumerate(groups):
            self.table_set.for_write().check_room(g, row, ids, clear)
        rows = [row]
        return StepPlan(
            step_id=-1,
            rows=rows,
            status=NO_IDS,
            num_computed_tokens=NO_IDS,
            clear_rows=rows if clear else NO_IDS,
            append_rows=rows,
            append_splits=[
                [0, num_entries(ids, f"block_ids[{g}]")] for g, ids in enumerate(groups)
            ],
            append_ids=groups,
            replace=[NO_REPLACE] * len(self),
        )
