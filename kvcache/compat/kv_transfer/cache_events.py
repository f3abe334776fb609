# SPDX-License-Identifier: Apache-2.0
"""Collects the cache events of several workers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np

from kvcache.checks import instance, integer, listed
from kvcache.transfer.sharding import MAX_RANKS


class KVCacheEvents:
    """Cache events grouped by worker, in report order.

    A new object has one worker. Events may be `kvcache.events` objects, which are compared by
    content, or any hashable objects. Events are not copied.

    Args:
        events: Events of the first worker.

    Example:
        >>> events = KVCacheEvents(["stored a", "stored b"])
        >>> events.merge(KVCacheEvents(["stored b"])).get_number_of_workers()
        2
        >>> events.get_common_events()
        ['stored b']
    """

    def __init__(self, events: Iterable[object] = ()) -> None:
        self._by_worker = [listed(events, "events")]

    def add_events(self, events: Iterable[object]) -> None:
        """Add events to the last worker."""
        self._by_worker[-1].extend(listed(events, "events"))

    def increment_workers(self, count: int = 1) -> None:
        """Add workers without events. Later `add_events` calls add to the last worker.

        Args:
            count: Number of workers to add, at least 1.

        Raises:
            ValueError: `count` is below 1 or exceeds the maximum number of workers of an engine.
        """
        count = integer(count, "count", 1, MAX_RANKS)
        self._by_worker += [[] for _ in range(count)]

    def merge(self, other: KVCacheEvents) -> KVCacheEvents:
        """Append the workers and events of another `KVCacheEvents`, and return this object."""
        instance(other, KVCacheEvents, "other")
        self._by_worker += [list(events) for events in other._by_worker]
        return self

    def get_number_of_workers(self) -> int:
        """Return the number of workers, including workers without events."""
        return len(self._by_worker)

    def get_all_events(self) -> list:
        """Return all events, worker by worker, including duplicates."""
        return [event for events in self._by_worker for event in events]

    def get_common_events(self) -> list:
        """Return the events that every worker reported, in the order of the first worker.

        Returns:
            Each common event, repeated according to the smallest number of times that a worker reported
            it. Empty if any worker has no events.

        Raises:
            TypeError: An event is not hashable.
        """
        first, *others = self._by_worker
        left = Counter(map(_content, first))
        for events in others:
            left &= Counter(map(_content, events))
        common = []
        for event in first:
            if left[content := _content(event)] > 0:
                left[content] -= 1
                common.append(event)
        return common

    def clear_events(self) -> None:
        """Remove all events, but keep the number of workers."""
        self._by_worker = [[] for _ in self._by_worker]

    def __bool__(self) -> bool:
        """Return whether any worker reported an event."""
        return any(self._by_worker)

    def __deepcopy__(self, memo: dict) -> KVCacheEvents:
        copied = KVCacheEvents()
        copied._by_worker = [list(events) for events in self._by_worker]
        return copied

    def __repr__(self) -> str:
        return (
            f"<KVCacheEvents workers={len(self._by_worker)}, events={len(self.get_all_events())}>"
        )


def _content(event: object) -> Hashable:
    """Return a key that is equal for events with equal content."""
    if not dataclasses.is_dataclass(event):
        return event
    values = (getattr(event, field.name) for field in dataclasses.fields(event))
    return type(event), *(
        (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values
    )
