# SPDX-License-Identifier: Apache-2.0
"""Cache groups, and what a step computes and has checked in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.checks import integer, shown
from kvcache.sanitizer.arguments import checked_int64
from kvcache.sanitizer.tags import grown

_KINDS = {"full": None, "window": "window", "chunk": "chunk", "circular": "window"} | dict.fromkeys(
    ("state", "cross")
)


@dataclass(frozen=True)
class SanitizedGroup:
    """A cache group: its block size, and the tokens that its queries read.

    - `kind`: "full"; "window" and "circular" with the option `window`; "chunk" with `chunk`; "state"
      for recurrent states, one per page; "cross" for tokens of an encoder, which all queries read.
    - `block_size`: tokens per block.
    - `window`: number of tokens that a query attends to, including itself.
    - `chunk`: tokens per chunk. A query reads from the start of its chunk.
    - `columns`: for "circular", the number of table columns, which are used in turn.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The kind is unknown, or an option is missing or out of range.

    Example:
        >>> SanitizedGroup("window", 16, window=1024).first_needed(np.array([0, 2000]))
        array([  0, 977])
    """

    kind: str
    block_size: int
    window: int = 0
    chunk: int = 0
    columns: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _KINDS:
            raise ValueError(
                f"kind is {shown(self.kind)}: expected one of {', '.join(map(repr, _KINDS))}; "
                "the sanitizer does not know what other kinds read"
            )
        object.__setattr__(self, "block_size", integer(self.block_size, "block_size", 1))
        needed = {_KINDS[self.kind]} | ({"columns"} if self.kind == "circular" else set())
        for name in ("window", "chunk", "columns"):
            value = integer(getattr(self, name), name, 1 if name in needed else 0)
            object.__setattr__(self, name, value)

    def first_needed(self, starts: np.ndarray) -> np.ndarray:
        """Return the first token that each row reads.

        Args:
            starts: int64[n]. Position of the first token that each row computes.

        Returns:
            int64[n].
        """
        starts = checked_int64(starts, "starts")
        if self.kind in ("window", "circular"):
            return np.maximum(starts - (self.window - 1), 0)
        return starts // self.chunk * self.chunk if self.kind == "chunk" else np.zeros_like(starts)


class CheckedRows:
    """A group, and for each request the part of its table that was checked before."""

    def __init__(self, index: int, spec: SanitizedGroup) -> None:
        self.index, self.spec = index, spec
        self.tables = np.full((64, 16), -1, np.int32)
        self.first = np.zeros(64, np.int64)  # tokens [first, checked) were checked
        self.checked = np.zeros(64, np.int64)
        self.checked_at = np.zeros(64, np.int64)  # version of the shadow at the last check

    def reserve(self, num_rows: int, width: int) -> None:
        self.tables = grown(self.tables, (num_rows, width), -1)
        self.first = grown(self.first, (num_rows,))
        self.checked = grown(self.checked, (num_rows,))
        self.checked_at = grown(self.checked_at, (num_rows,))

    def forget(self, row: int) -> None:
        if row < len(self.checked):
            self.tables[row], self.first[row] = -1, 0
            self.checked[row] = self.checked_at[row] = 0


@dataclass(slots=True)
class StepTokens:
    """The tokens of a step. The arrays over tokens are int64[t], except for the tags."""

    starts: np.ndarray  # int64[n] or as passed
    query_lens: np.ndarray
    stops: np.ndarray
    of_tokens: np.ndarray  # index in the batch
    rows: np.ndarray
    positions: np.ndarray
    tags: np.ndarray
    serials: np.ndarray
    origins: np.ndarray
