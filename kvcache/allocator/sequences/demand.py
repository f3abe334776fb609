"""How many blocks a sequence asks for, and whether they are there. Arithmetic alone."""

from __future__ import annotations

from enum import Enum, auto


class AllocStatus(Enum):
    """Answer of `can_allocate` and `can_swap_in`."""

    OK = auto()
    LATER = auto()  # not now
    NEVER = auto()  # more than the device has


def num_skipped_blocks(num_tokens: int, block_size: int, window: int | None) -> int:
    """Leading blocks of a prompt that nothing behind its end reads, so that they are never held."""
    return 0 if window is None else max(num_tokens - window + 1, 0) // block_size
