# SPDX-License-Identifier: Apache-2.0
"""The interface of a store, which keeps values under keys outside the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class StoreError(RuntimeError):
    """Raised if a store fails or is unavailable.

    A tier counts the error and treats it as a miss.
    """


class BlockStore(ABC):
    """A store of values of equal size under text keys, accessed in batches.

    A `StoreTier` calls all methods in one separate thread, beginning with `open`. A call may take
    any time and may raise any exception, because the tier has deadlines and treats an exception as
    a failure of the whole call. A store may lose values at any time and may return wrong bytes. The
    tier detects wrong bytes by the digest in each value.

    To add a store, subclass this class. The tier calls no other methods.
    """

    knows_keys = False
    """Whether `keys` and `take_evicted` report the store's content. If False, the tier emits no
    events for the store.
    """

    @abstractmethod
    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Open the store. Called before all other methods, and again after a failure.

        Args:
            memory: uint8[n]. The memory that contains all values of `put` and `get`.
            value_bytes: Bytes per value.
        """

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key has a value."""

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Store values, each uint8[value_bytes]. Return whether each value is now stored. False
        means that the store is full.
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
        """Return all keys. Required with `knows_keys`."""
        return []

    def take_evicted(self) -> list[str]:
        """Return the keys that were evicted since the last call. Required with `knows_keys`."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the store. Also called after `open` has failed."""
