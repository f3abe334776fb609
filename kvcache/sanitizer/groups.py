# SPDX-License-Identifier: Apache-2.0
"""Cache groups, which define the tokens that a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.checks import integer, shown
from kvcache.native.load import core
from kvcache.sanitizer.arguments import checked_int64

_KINDS = {"full": None, "window": "window", "chunk": "chunk", "circular": "window", "state": None}


@dataclass(frozen=True)
class SanitizedGroup:
    """A cache group: its block size, and the tokens that each of its queries attends to.

    - `kind`: "full"; "window" or "circular", with the option `window`; "chunk", with the option
      `chunk`; or "state" for recurrent states, one per page.
    - `block_size`: tokens per block.
    - `window`: number of tokens that a query attends to, including itself.
    - `chunk`: tokens per chunk. A query attends to the tokens from the start of its chunk.
    - `columns`: for "circular", the number of table columns, which form a circular buffer.

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
                "the sanitizer does not support other kinds"
            )
        object.__setattr__(self, "block_size", integer(self.block_size, "block_size", 1))
        needed = {_KINDS[self.kind]} | ({"columns"} if self.kind == "circular" else set())
        for name in ("window", "chunk", "columns"):
            value = integer(getattr(self, name), name, 1 if name in needed else 0)
            object.__setattr__(self, name, value)

    def first_needed(self, starts: np.ndarray) -> np.ndarray:
        """Return, for each row, the first token that its queries attend to.

        Args:
            starts: int64[n]. Position of the first token that is computed in each row.

        Returns:
            int64[n].
        """
        return self._native(0).first_needed(checked_int64(starts, "starts"))

    def _native(self, index: int) -> core.SlotGroup:
        """Return the arguments from which native code creates the group with this index."""
        return core.SlotGroup(
            index, self.kind, self.block_size, self.window, self.chunk, self.columns
        )


class CheckedGroup:
    """A group, together with its native checks."""

    def __init__(
        self, index: int, spec: SanitizedGroup, shadow: core.Shadow, tags: core.RequestTags
    ) -> None:
        self.index, self.spec = index, spec
        self.slots = spec._native(index)
        self.reads = core.SlotReads(self.slots, shadow, tags)
