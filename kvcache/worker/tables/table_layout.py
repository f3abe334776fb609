"""The layout of one cache group's table, and the arguments that it is made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache.checks import integer
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


def kernel_size_of(
    block_size: int, kernel_block_size: int | None, kernel_sizes: Sequence[int] | None
) -> int:
    """The kernel's block, from the one size given or from candidates."""
    if kernel_block_size is not None and kernel_sizes is not None:
        raise ValueError(
            f"kernel_block_size is {kernel_block_size} and kernel_sizes {list(kernel_sizes)}: "
            "expected one of the two"
        )
    if kernel_block_size is not None:
        if isinstance(kernel_block_size, Iterable):
            raise TypeError(
                f"kernel_block_size is {kernel_block_size!r}: expected an integer; pass candidates by "
                f"keyword: kernel_sizes={kernel_block_size!r}"
            )
        integer(kernel_block_size, "kernel_block_size", least=1)
        if block_size % kernel_block_size:
            raise ValueError(
                f"kernel_block_size {kernel_block_size} does not divide block_size {block_size}"
            )
        return kernel_block_size
    if kernel_sizes is None:
        return block_size
    if not isinstance(kernel_sizes, Iterable) or isinstance(kernel_sizes, str):
        raise TypeError(
            f"kernel_sizes is {kernel_sizes!r}: expected a list of candidates; pass one size by "
            f"keyword: kernel_block_size={kernel_sizes!r}"
        )
    if list(kernel_sizes) == [0]:
        return block_size
    for size in kernel_sizes:
        if size > 0 and block_size % size == 0:
            return size
    raise ValueError(f"none of kernel_sizes {list(kernel_sizes)} divides block_size {block_size}")


def layout_of(
    block_size: int,
    kernel_block_size: int,
    max_num_blocks: int,
    cp: ContextParallel,
    interleave: int,
    window: int | None,
    has_slots: bool,
) -> TableLayout:
    integer(interleave, "cp_kv_cache_interleave_size", least=1)
    if cp.world_size > 1 and kernel_block_size % interleave:
        raise ValueError(
            f"cp_kv_cache_interleave_size {interleave} does not divide "
            f"the kernel block size {kernel_block_size}"
        )
    if window is not None:
        integer(window, "window", least=1)
    return TableLayout(
        block_size,
        kernel_block_size,
        max_num_blocks,
        cp.world_size,
        cp.rank,
        interleave if cp.world_size > 1 else 1,
        window or 0,
        bool(has_slots),
    )


def check_by_keyword(others: tuple[object, ...], most: int, names: str) -> None:
    """TypeError for positional arguments beyond those that a table takes by position."""
    if others:
        raise TypeError(
            f"{most + len(others)} positional arguments, the last {others[-1]!r}: expected at most "
            f"{most}; pass {names} and what follows by keyword"
        )
