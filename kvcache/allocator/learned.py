# SPDX-License-Identifier: Apache-2.0
"""Counts collected by the eviction policy `learned`, for inspection and for reuse in a later process."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcache.checks import as_array, shown
from kvcache.checks import path as checked_path

VERSION = 4  # version of the file format; incremented when the classes or ages change
NUM_CLASSES, NUM_AGES = 298, 26  # must equal the sizes in csrc/core/eviction/learned/
_MOST = 1e15
_MOST_BYTES = 1 << 22  # maximum size of a file in bytes; saved files are smaller than 2**20


@dataclass(frozen=True, eq=False)
class LearnedReuse:
    """Counts of sampled released blocks, by class (row) and age (column).

    Attributes:
        reached: float64[298, 26]. Number of blocks that reached an age without being used.
        used: float64[298, 26]. Number of blocks that were used again at that age. Because old counts
            decay, `used` may exceed `reached`.

    Row 72 * request + 12 * gap + 4 * added + answer counts blocks used by a single conversation:

    - request: 0 without a `request_class`, 1 for class 0, 2 for class 1, and 3 for higher classes.
    - gap: 0 for the first turn. For later turns, a class of the time since the previous turn was
      released: 1 for less than 12 seconds, 2 for less than 30, 3 for less than 120, 4 for less than
      480, and 5 otherwise.
    - added: 0 if the turn added fewer than 2,560 tokens, 1 if fewer than 20,480, and 2 otherwise.
    - answer: 0 if the answer had fewer than 100 tokens, 1 if fewer than 300, 2 if fewer than 1,000,
      and 3 otherwise.

    Rows 288 to 291 count blocks that conversations share, by the observed number of forks of the
    block's chain: 1, at least 2, at least 4, and at least 16. Row 292 counts blocks that a
    conversation abandoned when it continued from an earlier point.

    Rows 293 to 297 count window blocks and states that running requests no longer need: row 293 for
    blocks that only unlikely hits would use, such as those at the ends of chunks; row 294 for blocks
    that were cached for a repeated prompt or a shared prefix; and rows 295 to 297 for blocks that
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

    def save(self, path: str | os.PathLike) -> None:
        """Write the counts to a JSON file atomically. Raises OSError if that fails."""
        path = Path(checked_path(path, "path"))
        if not path.name:
            raise ValueError(f"path is {shown(path)}: expected the name of a file")
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        content = {"kvcache": "learned reuse", "version": VERSION}
        content |= {"reached": self.reached.tolist(), "used": self.used.tolist()}
        try:
            draft.write_text(json.dumps(content) + "\n")
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike) -> LearnedReuse | None:
        """Load a file that `save` wrote.

        Returns:
            The counts. If the file is missing, damaged, larger than 4 MiB, or has another format or
            version, logs a warning and returns None, so that a process can always start.
        """
        path = checked_path(path, "path")
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            content = json.loads(data)
            if not isinstance(content, dict) or content.get("kvcache") != "learned reuse":
                raise ValueError("it is not a file of learned reuse")
            if content.get("version") != VERSION:
                raise ValueError(
                    f"its version is {shown(content.get('version'))}: expected {VERSION}"
                )
            return cls(content.get("reached"), content.get("used"))
        except (OSError, ValueError, RecursionError) as error:
            warnings.warn(f"{path} is ignored: {error}", stacklevel=2)
            return None


def reuse_of(native: np.ndarray) -> LearnedReuse | None:
    """Convert the native policy's counts to `LearnedReuse`. Return None for other policies."""
    if not native.size:
        return None
    return LearnedReuse(*native.reshape(2, NUM_CLASSES, NUM_AGES))
