# SPDX-License-Identifier: Apache-2.0
"""Counts collected by the eviction policy `learned`, for inspection and for another manager."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.checks import as_array, shown

NUM_CLASSES, NUM_AGES = 82, 26  # must equal the sizes in csrc/core/eviction/learned/
_MOST = 1e15


@dataclass(frozen=True, eq=False)
class LearnedReuse:
    """Counts of sampled released blocks, by class (row) and age (column).

    Attributes:
        reached: float64[82, 26]. Number of blocks that reached an age without being used.
        used: float64[82, 26]. Number of blocks that were used again at that age. Because old counts
            decay, `used` may exceed `reached`.

    Row 12 * gap + 4 * added + answer counts blocks used by a single conversation:

    - gap: 0 for the first turn. For later turns, a class of the time since the previous turn was
      released: 1 for less than 12 seconds, 2 for less than 30, 3 for less than 120, 4 for less than
      480, and 5 otherwise.
    - added: 0 if the turn added fewer than 2,560 tokens, 1 if fewer than 20,480, and 2 otherwise.
    - answer: 0 if the answer had fewer than 100 tokens, 1 if fewer than 300, 2 if fewer than 1,000,
      and 3 otherwise.

    Rows 72 to 75 count blocks that conversations share, by the observed number of forks of the
    block's chain: 1, at least 2, at least 4, and at least 16. Row 76 counts blocks that a
    conversation abandoned when it continued from an earlier point.

    Rows 77 to 81 count window blocks and states that running requests no longer need: row 77 for
    blocks that only unlikely hits would use, such as those at the ends of chunks; row 78 for blocks
    that were cached for a repeated prompt or a shared prefix; and rows 79 to 81 for blocks that
    were hit once, twice, or more often.

    Column k covers a range of ages that is 2 * 2**(k / 2) seconds wide and begins at the end of the
    previous column's range.

    Raises:
        ValueError: An array has the wrong shape, or an entry is not a valid count.
    """

    reached: np.ndarray
    used: np.ndarray

    def __post_init__(self) -> None:
        for name in ("reached", "used"):
            try:
                counts = as_array(getattr(self, name), name).astype(np.float64)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(
                    f"{name} is not an array of numbers ({shown(getattr(self, name))}): expected "
                    f"[{NUM_CLASSES}, {NUM_AGES}] numbers that fit in a float"
                ) from None
            if counts.shape != (NUM_CLASSES, NUM_AGES):
                raise ValueError(
                    f"{name} has shape {list(counts.shape)}: expected [{NUM_CLASSES}, {NUM_AGES}]"
                )
            if not ((counts >= 0) & (counts <= _MOST)).all():
                raise ValueError(f"{name} has numbers that are not counts: expected 0 to {_MOST:g}")
            counts.setflags(write=False)
            object.__setattr__(self, name, counts)


def reuse_of(native: np.ndarray) -> LearnedReuse | None:
    """Convert the native policy's counts to `LearnedReuse`. Return None for other policies."""
    if not native.size:
        return None
    return LearnedReuse(*native.reshape(2, NUM_CLASSES, NUM_AGES))
