"""The layout of one cache group's table, and the arguments that it is made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache.checks import MAX_INT32, flag, integer, listed, shown
from kvcache.specs import ContextParallel


@dataclass(frozen=True)
class TableLayout:
    """One group's table. Widths in allocation blocks, sizes in tokens."""

    block_size: int  # of an allocation block, on one rank
    kernel_block_size: int  # of a table entry, on one rank; divides block_size
    max_num_blocks: int  # allocation blocks per row
    world_size: int = 1  # context-parallel workers that the tokens are spread over
    rank: int = 0
    interleave: int = 1  # consecutive tokens on one of them; divides kernel_block_size
    window: int = 0  # tokens that a query sees, 0 for all
    has_slots: bool = True
    is_encoder: bool = False  # its positions are those of an encoder's tokens
    is_circular: bool = False  # its columns are written round
    num_speculative_blocks: int = 0  # of max_num_blocks: columns for states after drafts

    @property
    def ratio(self) -> int:
        """Kernel blocks per allocation block."""
        return self.block_size // self.kernel_block_size

    @property
    def num_columns(self) -> int:
        """Table entries per row."""
        return self.max_num_blocks * self.ratio

    @property
    def tokens_per_column(self) -> int:
        """Tokens, over all ranks, that a table entry stands for."""
        return self.kernel_block_size * self.world_size

    @property
    def num_places(self) -> int:
        """Tokens that a row has columns for."""
        return self.num_columns * self.tokens_per_column


def kernel_size_of(
    block_size: int,
    kernel_block_size: int | None,
    kernel_sizes: Sequence[int] | None,
    name: str = "kernel_sizes",
) -> int:
    """The kernel's block, from the one size given or from candidates, which the caller calls `name`."""
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
    candidates = checked_candidates(kernel_sizes, name)
    if candidates == [0]:
        return block_size
    for size in candidates:
        if size > 0 and block_size % size == 0:
            return size
    raise ValueError(f"none of kernel_sizes {candidates} divides block_size {block_size}")


def checked_candidates(kernel_sizes: Sequence[int], name: str) -> list[int]:
    """Candidates for the kernel's block, in tokens. TypeError or ValueError."""
    if not isinstance(kernel_sizes, Iterable) or isinstance(kernel_sizes, str):
        raise TypeError(
            f"{name} is {shown(kernel_sizes)}: expected a list of candidates, such as [{kernel_sizes}]"
        )
    sizes = listed(kernel_sizes, name, "a list of candidates")
    return [integer(size, f"{name}[{i}]", -MAX_INT32) for i, size in enumerate(sizes)]


def layout_of(
    block_size: int,
    kernel_block_size: int,
    max_num_blocks: int,
    cp: ContextParallel,
    interleave: int,
    window: int | None,
    has_slots: bool,
    is_encoder: bool = False,
    is_circular: bool = False,
    num_speculative_blocks: int = 0,
) -> TableLayout:
    """A group's table, from what its arguments say, the sizes already checked but for two."""
    interleave = integer(interleave, "cp_kv_cache_interleave_size", least=1)
    if cp.world_size > 1 and kernel_block_size % interleave:
        raise ValueError(
            f"cp_kv_cache_interleave_size {interleave} does not divide "
            f"the kernel block size {kernel_block_size}"
        )
    window = 0 if window is None else integer(window, "window", least=1)
    if flag(is_encoder, "encoder") and flag(is_circular, "circular"):
        raise ValueError("a group has encoder and circular: expected one of the two")
    return TableLayout(
        block_size,
        kernel_block_size,
        max_num_blocks,
        cp.world_size,
        cp.rank,
        interleave if cp.world_size > 1 else 1,
        window,
        flag(has_slots, "slot_mapping"),
        flag(is_encoder, "encoder"),
        flag(is_circular, "circular"),
        num_speculative_blocks,
    )


def check_by_keyword(others: tuple[object, ...], most: int, names: str) -> None:
    """TypeError for positional arguments beyond those that a table takes by position."""
    if others:
        raise TypeError(
            f"{most + len(others)} positional arguments, the last {shown(others[-1])}: expected at most "
            f"{most}; pass {names} and what follows by keyword"
        )
