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
    """A key-value store that is accessed in batches. Keys are strings, and all values have the same
    size.

    A `StoreTier` calls all methods in one separate thread, beginning with `open`. Calls may take
    arbitrarily long, because the tier enforces deadlines. A call may raise any exception; the tier
    then treats the whole call as failed. A store may lose values at any time and may return wrong
    bytes; the tier detects wrong bytes by the digest in each value.

    To add a store, implement the methods below in a subclass. The tier calls no other methods.
    """

    knows_keys = False
    """Whether the store implements `keys` and `take_evicted`. If False, the tier emits no events
    for the store's content.
    """

    @abstractmethod
    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Open the store. Called before all other methods, and again after a failure.

        Args:
            memory: uint8[n]. The memory in which all values passed to `put` and `get` lie.
            value_bytes: Bytes per value.
        """

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether the store contains a value."""

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Store values, each uint8[value_bytes]. Return, for each value, whether the store now
        contains it. False means that the store is full.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[int]:
        """Read values into `values`.

        Return the size of each value in bytes, or -1 for a key whose value is missing or cannot be
        read. `exists` must then return False, so that the value is stored again.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys whose values are invalid. Unknown keys are ignored.

        Raise an exception unless all values are known to be removed. The tier then repeats the call
        before any other call.
        """

    def keys(self) -> list[str]:
        """Return all keys. Required if `knows_keys` is True."""
        return []

    def take_evicted(self) -> list[str]:
        """Return the keys that were evicted since the last call. Required if `knows_keys` is True."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the store. Also called after `open` has failed."""
