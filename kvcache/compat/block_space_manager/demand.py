# SPDX-License-Identifier: Apache-2.0
"""Computes how many blocks a sequence needs, and whether they are available."""

from __future__ import annotations

from enum import Enum, auto


class AllocStatus(Enum):
    """Result of `can_allocate` and `can_swap_in`."""

    OK = auto()
    LATER = auto()  # the sequences may fit once other blocks have been freed
    NEVER = auto()  # the sequences need more blocks than the device has


def num_skipped_blocks(num_tokens: int, block_size: int, window: int | None) -> int:
    """Return the number of leading prompt blocks to which no later token attends."""
    return 0 if window is None else max(num_tokens - window + 1, 0) // block_size
