# SPDX-License-Identifier: Apache-2.0
"""A simulated replica, with a real manager and a clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from kvcache.allocator import Request
from kvcache.replay.fleet.hardware import Hardware
from kvcache.replay.fleet.router_index import RouterIndex
from kvcache.replay.fleet.sizes import Fleet
from kvcache.replay.policies import parse_eviction
from kvcache.replay.replayer import Replayer
from kvcache.replay.running import Running
from kvcache.replay.stored import Outage, StoreContents
from kvcache.replay.workload import WorkloadRequest


class Replica:
    """A replica with its own manager and clock.

    With `fails`, the replica may die, and routers know its cache from its events (`RouterIndex`).
    """

    def __init__(
        self,
        number: int,
        fleet: Fleet,
        hardware: Hardware,
        store: StoreContents,
        store_blocks: int,
        fails: bool,
    ) -> None:
        self.number = number
        self._fleet, self._hardware = fleet, hardware
        self._store, self._store_blocks = store, store_blocks
        self._index = RouterIndex(fleet.block_size) if fails else None
        self._outages: Sequence[Outage] = ()
        self._serving: list[Running] = []  # only if it may die
        self.num_served = self.num_computed = 0
        self.last_end_ms = 0.0
        self.reachable_ms = 0.0  # from when the router reaches it
        self._start()

    def _start(self) -> None:
        """Start with an empty cache."""
        fleet = self._fleet
        name, values = parse_eviction(fleet.eviction)
        options: dict[str, Any] = {"eviction": name, "eviction_options": values}
        if fleet.host_blocks:
            options |= {"host_eviction": name, "host_eviction_options": values}
            options["num_host_blocks"] = fleet.host_blocks
        if self._index is not None:
            options |= {"enable_events": True, "announce_reused": True}
        self._ends: list[float] = []  # a heap
        self._links = {"host": 0.0, "store": 0.0}  # when their loads have ended
        self._replayer = Replayer(
            num_blocks=fleet.num_blocks,
            block_size=fleet.block_size,
            concurrency=fleet.concurrency,
            service=self._hardware.service,
            num_preallocate_tokens=fleet.num_preallocate_tokens,
            num_store_blocks=self._store_blocks,
            store_contents=self._store,
            **options,
        )
        self.set_outages(self._outages)

    def set_outages(self, outages: Sequence[Outage]) -> None:
        """Set the times in which the replica cannot reach the store."""
        self._outages = outages
        if self._replayer.store is not None:
            self._replayer.store.outages = outages

    def clear_index(self) -> None:
        """Let the router forget what the replica has cached."""
        if self._index is not None:
            self._index.clear()

    def die(self, now_ms: float) -> list[Running]:
        """Lose the cache and all requests that have not ended, which are returned."""
        lost = [each for each in self._serving if each.end_ms > now_ms]
        for each in lost:
            own = each.item.num_tokens - each.num_hit
            left = (each.first_ms - now_ms) * self._hardware.prefill_speed / 1000
            self.num_computed -= round(min(max(left, 0.0), own))
        self.num_served -= len(lost)
        self.last_end_ms = min(self.last_end_ms, now_ms)
        if self._replayer.store is not None:
            self._replayer.store.forget_incomplete(now_ms)
        self._serving = []
        self.clear_index()
        self._start()
        return lost

    def num_unfinished(self, now_ms: float) -> int:
        """Return the number of requests that have not ended."""
        while self._ends and self._ends[0] <= now_ms:
            heapq.heappop(self._ends)
        return len(self._ends)

    def wait_ms(self, now_ms: float) -> float:
        """Return how long a prefill would wait for earlier ones and for a running request to end."""
        start = max(now_ms, self._replayer.prefill_free_ms)
        too_many = self.num_unfinished(now_ms) - self._fleet.concurrency + 1
        if too_many > 0:
            start = max(start, heapq.nsmallest(too_many, self._ends)[-1])
        return start - now_ms

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return the time to the first token of a request, if it were served here.

        Blocks in the store are not considered, because all replicas can load them.
        """
        cache = self._replayer.manager.cache
        if self._index is None:
            cached = cache.cached_tokens(request)
        else:
            cached = self._index.cached_tokens(cache.hashes(request))
        num_cached = min(cached.with_host, item.num_tokens - 1)
        wait_ms = self.wait_ms(now_ms)
        loaded_ms = self._loaded_ms(now_ms, "host", max(num_cached - cached.on_device, 0)) - now_ms
        computed_ms = 1000 * (item.num_tokens - num_cached) / self._hardware.prefill_speed
        return max(wait_ms, loaded_ms) + computed_ms

    def serve(self, item: WorkloadRequest, request: Request) -> Running | None:
        """Serve a request. Return it with its hits and times, or None if it does not fit."""
        served = self._replayer.arrive(item, request, self._load_ms)
        if served is not None:
            self.num_served += 1
            heapq.heappush(self._ends, served.end_ms)
            self.last_end_ms = max(self.last_end_ms, served.end_ms)
            self.num_computed += item.num_tokens - served.num_hit
        if self._index is not None:
            self._index.observe(self._replayer.drain_events())
            now_ms = item.arrival_ms
            self._serving = [each for each in self._serving if each.end_ms > now_ms]
            if served is not None:
                self._serving.append(served)
        return served

    def _load_ms(self, running: Running) -> float:
        now_ms = self._replayer.now_ms
        tokens = {"host": running.num_host_hit, "store": running.num_store_hit}
        for link, count in tokens.items():
            if count:
                self._links[link] = self._loaded_ms(now_ms, link, count)
        ended = [self._links[link] for link, count in tokens.items() if count]
        return max(ended, default=now_ms) - now_ms

    def _loaded_ms(self, now_ms: float, link: str, num_tokens: int) -> float:
        """Return when a load that begins after earlier ones has ended."""
        if not num_tokens:
            return now_ms
        bytes_per_ms = 1e6 * getattr(self._hardware, f"{link}_gb_per_s")
        duration_ms = num_tokens * self._hardware.bytes_per_token / bytes_per_ms
        return max(now_ms, self._links[link]) + duration_ms
