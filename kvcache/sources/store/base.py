# SPDX-License-Identifier: Apache-2.0
"""The interface of a store, which is a key-value store outside the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class StoreError(RuntimeError):
    """Raised if a store fails or is unavailable.

    A tier counts the error and treats the failed call as a miss.
    """


class BlockStore(ABC):
    """A key-value store with text keys and values of equal size, accessed in batches.

    A `StoreTier` calls all methods in one separate thread, beginning with `open`. A call may take
    any time, because the tier has deadlines, and may raise any exception, which the tier treats as
    a failure of the whole call. A store may lose values at any time and may return wrong bytes,
    which the tier detects by the digest in each value.

    To add a store, implement these methods in a subclass. The tier calls no others.
    """

    knows_keys = False
    """Whether the store implements `keys` and `take_evicted`. If False, the tier emits no events
    for the store's content.
    """

    @abstractmethod
    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Open the store. Called before all other methods, and again after a failure.

        Args:
            memory: uint8[n]. The memory that contains all values passed to `put` and `get`.
            value_bytes: Bytes per value.
        """

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether the store has a value for it."""

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Store values, each uint8[value_bytes]. Return, for each value, whether the store now has
        it. False means that the store is full.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[int]:
        """Read values into `values`.

        Return the size of each value in bytes, or -1 for a key without a value.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys whose values are invalid. Unknown keys are ignored."""

    def keys(self) -> list[str]:
        """Return all keys. Required if `knows_keys` is True."""
        return []

    def take_evicted(self) -> list[str]:
        """Return the keys that were evicted since the last call. Required if `knows_keys` is True."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the store. Also called after `open` has failed."""
