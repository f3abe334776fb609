# SPDX-License-Identifier: Apache-2.0
"""Hints in replays: when hints are due, and a source that loads their tokens from the simulated
store.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from kvcache.allocator import KVCacheManager, Request
from kvcache.hints import Hint
from kvcache.replay.service import ServiceClock
from kvcache.replay.stored import SimulatedStore
from kvcache.replay.workload import MAX_LEAD_MS, RequestHint, WorkloadRequest, check_arrival
from kvcache.sources.base import Arrived, LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache.step import StepReport


class DueHint(NamedTuple):
    """A hint that is sent ahead of a request, and the time at which it is sent."""

    at_ms: float
    hint: Hint
    item: WorkloadRequest


def with_prefetches(
    workload: Iterable[WorkloadRequest], lead_s: float
) -> Iterator[WorkloadRequest]:
    """Add a prefetch hint to each request, sent `lead_s` seconds before the request arrives."""
    hint = RequestHint(Hint(intent="prefetch"), round(1000 * lead_s))
    for item in workload:
        yield replace(item, hints=(*item.hints, hint))


def without_hints(workload: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Remove all hints."""
    for item in workload:
        yield replace(item, hints=())


def in_order(
    workload: Iterable[WorkloadRequest], *, is_timed: bool
) -> Iterator[WorkloadRequest | DueHint]:
    """Yield requests and the hints that are sent ahead of them, in order of time.

    In workloads without times, the hints immediately precede their request. In workloads with
    times, the requests of the next `MAX_LEAD_MS` milliseconds are read ahead.
    """
    ahead: list[tuple[float, int, WorkloadRequest | DueHint]] = []
    numbers, last_ms = itertools.count(), 0
    for item in workload:
        if is_timed:
            check_arrival(item, last_ms)
            last_ms = item.arrival_ms
        for each in item.hints:
            if each.lead_ms is not None:
                at_ms = max(item.arrival_ms - each.lead_ms, 0) if is_timed else item.arrival_ms
                due = DueHint(at_ms, each.hint, item)
                if not is_timed:
                    yield due
                    continue
                heapq.heappush(ahead, (at_ms, next(numbers), due))
        if not is_timed:
            yield item
            continue
        heapq.heappush(ahead, (item.arrival_ms, next(numbers), item))
        while ahead[0][0] < item.arrival_ms - MAX_LEAD_MS:
            yield heapq.heappop(ahead)[2]
    while ahead:
        yield heapq.heappop(ahead)[2]


class StoreSource:
    """The simulated store as a source for hints. The clock determines how long loads take.

    Args:
        manager: The manager.
        store: The store.
        now_ms: A function that returns the current time of the replay.
        clock: The clock of a timed replay. None: loads take no time.
    """

    name = "store"
    is_busy = False
    num_quarantined_blocks = 0

    def __init__(
        self,
        manager: KVCacheManager,
        store: SimulatedStore,
        now_ms: Callable[[], float],
        clock: ServiceClock | None,
    ) -> None:
        self._store, self._now_ms, self._clock = store, now_ms, clock
        self.stats = LoadStats()
        self._loads: SourceLoads[float] = SourceLoads(manager, self.stats)

    @property
    def num_loading_requests(self) -> int:
        """Number of loads that have not ended."""
        return len(self._loads)

    def match(self, request: Request) -> int:
        """Return the number of tokens that can be loaded."""
        count = self._store.match(request, self._now_ms())
        if count and request not in self._loads:
            first = self._store.hit_tokens(request)
            self._loads.match(request, first, first + count)
            return count
        return 0

    def begin(self, request: Request) -> None:
        """Start to load the tokens that `match` found."""
        load = self._loads.admitted(request)
        count = load.end_token - load.first_token
        load.detail = self._now_ms()
        if self._clock is not None:
            load.detail = self._clock.load("store", count)
        self._loads.begin(load)
        self._store.load(request, load.end_token, count)

    @property
    def last_ready_ms(self) -> float:
        """The time at which the last of the current loads ends."""
        return max((each.detail for each in self._loads.under_way), default=0.0)

    def poll(self, until_ms: float | None = None) -> list[Arrived]:
        """Finish the loads that are complete by `until_ms`. None: the current time."""
        until_ms = self._now_ms() if until_ms is None else until_ms
        ready = [each for each in self._loads.under_way if each.detail <= until_ms]
        return [self._loads.finish(load) for load in ready]

    def save(self, report: StepReport) -> None:
        """Has no effect: the replayer saves blocks itself."""

    def cancel(self, request: Request) -> None:
        """Free a request and cancel its load."""
        self._loads.forget(request.request_id)
        if request in self._loads:
            self._loads.finish(self._loads[request.request_id], 0, "it was canceled")
        self._loads.free(request)

    def close(self) -> None:
        """Has no effect."""
