"""Cache events of several workers in one: all of them, and those that every worker reported."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable

import numpy as np


class KVCacheEvents:
    """Cache events by worker, in the order of their reports.

    A new one is of one worker. Events are those of `kvcache.events`, compared by content, or any that
    compare and hash. No event is copied.

    >>> events = KVCacheEvents(["stored a", "stored b"])
    >>> events.merge(KVCacheEvents(["stored b"])).get_number_of_workers()
    2
    >>> events.get_common_events(), events.num_workers_with("stored a")
    (['stored b'], 1)
    """

    def __init__(self, events: Iterable[object] = ()) -> None:
        self._by_worker = [list(events)]

    def add_events(self, events: Iterable[object]) -> None:
        """More events of the worker that was added last."""
        self._by_worker[-1].extend(events)

    def increment_workers(self, count: int = 1) -> None:
        """More workers, without events so far: what is added from now on is the last one's.

        ValueError for a count below 1.
        """
        if count < 1:
            raise ValueError(f"count is {count}: expected 1 or more")
        self._by_worker += [[] for _ in range(count)]

    def merge(self, other: KVCacheEvents) -> KVCacheEvents:
        """Takes in the workers of another, behind its own; returns itself."""
        self._by_worker += [list(events) for events in other._by_worker]
        return self

    def get_number_of_workers(self) -> int:
        """Workers whose reports these are."""
        return len(self._by_worker)

    def get_all_events(self) -> list:
        """Every event as often as it was reported, worker by worker."""
        return [event for events in self._by_worker for event in events]

    def get_common_events(self) -> list:
        """What every worker reported, as often as each of them did, in the first one's order.

        Nothing, where one of them is without events: every worker counts.

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

    def __deepcopy__(self, memo: dict) -> KVCacheEvents:
        copied = KVCacheEvents()
        copied._by_worker = [list(events) for events in self._by_worker]
        return copied

    def __repr__(self) -> str:
        return (
            f"<KVCacheEvents workers={len(self._by_worker)}, events={len(self.get_all_events())}>"
        )


def _content(event: object) -> Hashable:
    """What two reports of one event have in common."""
    if not dataclasses.is_dataclass(event):
        return event
    values = (getattr(event, field.name) for field in dataclasses.fields(event))
    return type(event), *(
        (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in values
    )
