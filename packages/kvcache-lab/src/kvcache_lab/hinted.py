# SPDX-License-Identifier: Apache-2.0
"""Prefetches in replays: when they are due, and a source that loads their tokens from the simulated
store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvcache.allocator import KVCacheManager, Request
from kvcache.sources import Arrived, LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache.step import StepReport
from kvcache_lab.service import ServiceClock
from kvcache_lab.stored import SimulatedStore
from kvcache_lab.workload import WorkloadRequest, check_arrival


class DuePrefetch(NamedTuple):
    """A prefetch hint that is sent ahead of a request, and the time at which it is sent."""

    at_ms: float
    item: WorkloadRequest


def with_prefetches(
    workload: Iterable[WorkloadRequest], lead_ms: float, *, is_timed: bool
) -> Iterator[WorkloadRequest | DuePrefetch]:
    """Yield requests and a prefetch for each of them, in order of time.

    A prefetch is due `lead_ms` milliseconds before its request arrives or, in workloads without
    times, immediately before its request.
    """
    waiting: deque[WorkloadRequest] = deque()
    last_ms = 0
    for item in workload:
        if not is_timed:
            yield DuePrefetch(item.arrival_ms, item)
            yield item
            continue
        check_arrival(item, last_ms)
        last_ms = item.arrival_ms
        at_ms = max(item.arrival_ms - lead_ms, 0)
        while waiting and waiting[0].arrival_ms <= at_ms:
            yield waiting.popleft()
        yield DuePrefetch(at_ms, item)
        waiting.append(item)
    yield from waiting


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
