# SPDX-License-Identifier: Apache-2.0
"""The shape of one cache group's block table, the arguments that define it, and how ops find tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import accumulate

import torch

from kvcache.checks import MAX_INT32, Count, Size, instances, integer, listed, plain_fields, shown
from kvcache.specs import ContextParallel, checked_context_parallel


@dataclass(frozen=True)
class TableShape:
    """The shape of one cache group's block table. Block sizes are in tokens on one rank.

    Args:
        block_size: Number of tokens per allocation block.
        max_num_blocks: Number of allocation blocks per row.
        kernel_block_size: The attention kernel's block size in tokens. Must divide `block_size`.
            Allocation block `b` becomes `ratio` kernel blocks, numbered from `b * ratio`. None:
            `block_size` itself.
        kernel_sizes: Candidates for the kernel block size, as an alternative to
            `kernel_block_size`. The first positive candidate that divides `block_size` is used.
            [0]: `block_size` itself.
        window: Number of tokens that a query attends to. None: all tokens.
        slot_mapping: Whether the group has slots. Groups of recurrent states do not.
        context_parallel: Context-parallel sizes and ranks over which tokens are spread. Must be
            equal for all groups in a `BlockTables`.
        replicated: Whether every context-parallel rank holds all of the group's tokens.
        cp_kv_cache_interleave_size: Number of consecutive tokens stored on one context-parallel
            rank before the next rank follows. Must divide the kernel block size.
        encoder: Whether the group holds encoder tokens for cross-attention. Calls for all groups
            leave the slots of encoder groups unchanged.
        circular: Whether columns are reused as a circular buffer. The token at position `p` is in
            column `p // block_size % max_num_blocks`.
        num_speculative_blocks: Number of columns for the states after draft tokens.
            `max_num_blocks` includes these columns.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, no kernel block size divides `block_size`,
            `cp_kv_cache_interleave_size` does not divide the kernel block size, or both `encoder` and
            `circular` are True.

    Example:
        >>> shape = TableShape(block_size=64, max_num_blocks=8, kernel_sizes=[48, 16])
        >>> shape.kernel_block_size, shape.ratio, shape.num_columns
        (16, 4, 32)
    """

    block_size: Size
    max_num_blocks: Size
    kernel_block_size: int | None = None
    kernel_sizes: InitVar[Sequence[int] | None] = None
    window: Size | None = None
    slot_mapping: bool = True
    context_parallel: ContextParallel | None = None  # None becomes ContextParallel()
    replicated: bool = False
    cp_kv_cache_interleave_size: Size = 1
    encoder: bool = False
    circular: bool = False
    num_speculative_blocks: Count = 0

    def __post_init__(self, kernel_sizes: Sequence[int] | None) -> None:
        put = partial(object.__setattr__, self)
        put("context_parallel", checked_context_parallel(self.context_parallel))
        block_size = integer(self.block_size, "block_size", 1)
        size = kernel_size_of(block_size, self.kernel_block_size, kernel_sizes)
        put("kernel_block_size", size)
        plain_fields(self)
        if self.world_size > 1 and size % self.cp_kv_cache_interleave_size:
            raise ValueError(
                f"cp_kv_cache_interleave_size {self.cp_kv_cache_interleave_size} does not divide "
                f"the kernel block size {size}"
            )
        if self.world_size == 1:
            put("cp_kv_cache_interleave_size", 1)
        if self.encoder and self.circular:
            raise ValueError("a group has both encoder and circular set: expected at most one")

    @property
    def world_size(self) -> int:
        """Number of context-parallel ranks that share the group's tokens."""
        return 1 if self.replicated else self.context_parallel.world_size

    @property
    def rank(self) -> int:
        """Index of this rank among the ranks that share the group's tokens."""
        return 0 if self.replicated else self.context_parallel.rank

    @property
    def ratio(self) -> int:
        """Number of kernel blocks per allocation block."""
        return self.block_size // self.kernel_block_size

    @property
    def num_columns(self) -> int:
        """Number of table entries per row."""
        return self.max_num_blocks * self.ratio

    @property
    def tokens_per_column(self) -> int:
        """Number of tokens per table entry, summed over all ranks."""
        return self.kernel_block_size * self.world_size

    @property
    def num_places(self) -> int:
        """Number of tokens that fit into a row, summed over all ranks."""
        return self.num_columns * self.tokens_per_column


def kernel_size_of(
    block_size: int, kernel_block_size: int | None, kernel_sizes: Sequence[int] | None
) -> int:
    """Return the kernel block size that was given, or the one chosen from the candidates."""
    if kernel_block_size is not None and kernel_sizes is not None:
        raise ValueError(
            f"kernel_block_size is {kernel_block_size} and kernel_sizes {kernel_sizes}: "
            "expected one of the two"
        )
    if kernel_block_size is not None:
        if isinstance(kernel_block_size, Iterable):
            raise TypeError(
                f"kernel_block_size is {shown(kernel_block_size)}: expected an integer; pass "
                f"candidates by keyword: kernel_sizes={shown(kernel_block_size)}"
            )
        kernel_block_size = integer(kernel_block_size, "kernel_block_size", least=1)
        if block_size % kernel_block_size:
            raise ValueError(
                f"kernel_block_size {kernel_block_size} does not divide block_size {block_size}"
            )
        return kernel_block_size
    if kernel_sizes is None:
        return block_size
    candidates = checked_candidates(kernel_sizes, "kernel_sizes")
    if candidates == [0]:
        return block_size
    for size in candidates:
        if size > 0 and block_size % size == 0:
            return size
    raise ValueError(f"none of kernel_sizes {candidates} divides block_size {block_size}")


def checked_candidates(kernel_sizes: Sequence[int], name: str) -> list[int]:
    """Return the candidates for the kernel block size, in tokens. Raises TypeError or ValueError."""
    if not isinstance(kernel_sizes, Iterable) or isinstance(kernel_sizes, str):
        raise TypeError(
            f"{name} is {shown(kernel_sizes)}: expected a list of candidates, such as [{kernel_sizes}]"
        )
    sizes = listed(kernel_sizes, name, "a list of candidates")
    return [integer(size, f"{name}[{i}]", -MAX_INT32) for i, size in enumerate(sizes)]


def num_blocks_for(num_tokens: int, tokens_per_block: int, num_speculative_tokens: int) -> int:
    """Return the allocation blocks of a row for `num_tokens` tokens and a step's drafts."""
    return max(-(-num_tokens // tokens_per_block), 1 + num_speculative_tokens)


def table_groups(shapes: Sequence[TableShape], num_rows: int) -> torch.Tensor:
    """Return the argument `groups` of the ops that read block tables, such as `ops.slot_mapping`.

    The tables of all groups are concatenated in one tensor, each of shape [num_rows, num_columns].

    Args:
        shapes: The shape of each group's table.
        num_rows: Number of rows of each table.

    Returns:
        int64[len(shapes), 8] on the CPU. For each group: offset of its table, columns, kernel block
        size, context-parallel world size, rank, interleave, window (0: none), and the group's number,
        which is its row in `num_blocks_per_row`.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> table_groups([TableShape(16, 4), TableShape(16, 4, window=24)], num_rows=8).tolist()
        [[0, 4, 16, 1, 0, 1, 0, 0], [32, 4, 16, 1, 0, 1, 24, 1]]
    """
    shapes = instances(shapes, TableShape, "shapes")
    num_rows = integer(num_rows, "num_rows", 1)
    offsets = accumulate((each.num_columns * num_rows for each in shapes), initial=0)
    fields = [
        (
            offset,
            each.num_columns,
            each.kernel_block_size,
            each.world_size,
            each.rank,
            each.cp_kv_cache_interleave_size,
            each.window or 0,
            group,
        )
        for group, (offset, each) in enumerate(zip(offsets, shapes))
    ]
    return torch.tensor(fields, dtype=torch.int64, device="cpu").view(-1, 8)
