"""What a tier asks of a store, which keeps values under keys outside of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class StoreError(RuntimeError):
    """A store that failed, or is not there. A tier takes it for a miss, and counts it."""


class BlockStore(ABC):
    """Values of one size under text keys, in batches.

    A `StoreTier` calls all methods in one thread of its own, `open` first. Each may take as long as it
    does, and may raise whatever it raises: the tier has deadlines, and takes any exception for a failure
    of the whole call. A store may forget a value at any time, and need not be right: values carry a
    digest.

    A class of your own has these methods and no others that a tier calls.
    """

    knows_keys = False
    """Whether `keys` and `take_evicted` say what the store has. If not, no events are made of it."""

    @abstractmethod
    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Before all other calls; again where it failed.

        memory: uint8[n], the bytes in which all values of `put` and `get` lie. value_bytes: of a value.
        """

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which keys have a value."""

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Keeps values, each uint8[value_bytes]; which of them it has now. False: it is full."""

    @abstractmethod
    def get(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[int]:
        """Writes values, and returns how many bytes each has; -1 for a key that has none."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Forgets keys, whose values were found to be wrong; those that it has not, too."""

    def keys(self) -> list[str]:
        """All keys, with `knows_keys`."""
        return []

    def take_evicted(self) -> list[str]:
        """Keys that were forgotten since the last call, with `knows_keys`."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Ends its use; also after an `open` that failed."""
