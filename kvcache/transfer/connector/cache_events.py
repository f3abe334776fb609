"""Cache events of several workers: all of them, and those that every worker reported."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np

from kvcache.checks import instance, integer, listed
from kvcache.transfer.sharding import MAX_RANKS


class KVCacheEvents:
    """Cache events by worker, in the order of their reports.

    A new object has one worker. Events are those of `kvcache.events`, compared by content, or any that
    compare and hash. Events are not copied.

    >>> events = KVCacheEvents(["stored a", "stored b"])
    >>> events.merge(KVCacheEvents(["stored b"])).get_number_of_workers()
    2
    >>> events.get_common_events(), events.num_workers_with("stored a")
    (['stored b'], 1)
    """

    def __init__(self, events: Iterable[object] = ()) -> None:
        self._by_worker = [listed(events, "events")]

    def add_events(self, events: Iterable[object]) -> None:
        """Adds events of the last worker."""
        self._by_worker[-1].extend(listed(events, "events"))

    def increment_workers(self, count: int = 1) -> None:
        """Adds workers without events. `add_events` then adds to the last of them.

        ValueError for a count below 1, or of more workers than an engine has.
        """
        count = integer(count, "count", 1, MAX_RANKS)
        self._by_worker += [[] for _ in range(count)]

    def merge(self, other: KVCacheEvents) -> KVCacheEvents:
        """Appends the workers of another object; returns itself."""
        instance(other, KVCacheEvents, "other")
        self._by_worker += [list(events) for events in other._by_worker]
        return self

    def get_number_of_workers(self) -> int:
        """The number of workers, those without events included."""
        return len(self._by_worker)

    def get_all_events(self) -> list:
        """All events, worker by worker, each as often as it was reported."""
        return [event for events in self._by_worker for event in events]

    def get_common_events(self) -> list:
        """The events that every worker reported, in the order of the first worker.

        An event comes as often as every worker reported it. Empty where one worker has no events.

        TypeError for events that do not hash.
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

    def num_workers_with(self, event: object) -> int:
        """How many workers reported this event."""
        wanted = _content(event)
        return sum(wanted in map(_content, events) for events in self._by_worker)

    def clear_events(self) -> None:
        """Drops all events; the workers stay."""
        self._by_worker = [[] for _ in self._by_worker]

    def __bool__(self) -> bool:
        """Whether any worker reported an event."""
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
    """A value that is equal for equal events."""
    if not dataclasses.is_dataclass(event):
        return event
    values = (getattr(event, field.name) for field in dataclasses.fields(event))
    return type(event), *(
        (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values
    )
