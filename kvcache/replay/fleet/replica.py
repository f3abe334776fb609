# SPDX-License-Identifier: Apache-2.0
"""A simulated replica with a real manager and a clock."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

from kvcache.allocator import CachedTokens, KVCacheManager, Request
from kvcache.events import BlockStored
from kvcache.replay.fleet.hardware import Hardware
from kvcache.replay.fleet.kv_bytes import KVBytes
from kvcache.replay.fleet.router_index import RouterIndex
from kvcache.replay.fleet.sizes import Fleet
from kvcache.replay.fleet.token_sources import ComputedPrompts, StoreAndPeers
from kvcache.replay.policies import parse_eviction
from kvcache.replay.replayer import Replayer
from kvcache.replay.running import Running
from kvcache.replay.stored import ExternalTokens, Outage, SimulatedStore, StoreContents
from kvcache.replay.workload import WorkloadRequest


class Replica:
    """A replica with its own manager and clock.

    With `fails`, the replica may die, and routers track its cache through its events
    (`RouterIndex`).

    Attributes:
        peers: The replicas from which this replica can load tokens.
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
        self._bytes = KVBytes(fleet, hardware)
        self._index = RouterIndex(fleet.group_specs()) if fails else None
        self._follows_events = fails or fleet.peers
        self._outages: Sequence[Outage] = ()
        # Requests and their tasks. Recorded only with `fails`.
        self._serving: list[tuple[Running, Any]] = []
        self._compute_ms = hardware.service.compute_ms
        self.num_served, self.computed_ms = 0, 0.0
        self._last_end_ms = 0.0  # when the last request ended before the replica died
        self.reachable_ms = 0.0  # time from which the router can reach the replica
        self.up_ms = 0.0  # time from which the replica is alive
        self.peers: Sequence[Replica] = ()
        self._start()

    @property
    def _loads(self) -> bool:
        """Whether tokens are loaded from a store or from other replicas."""
        return self._fleet.store_blocks > 0 or self._fleet.peers

    def _start(self) -> None:
        """Start with an empty cache."""
        fleet = self._fleet
        name, values = parse_eviction(fleet.eviction)
        options: dict[str, Any] = {"eviction": name, "eviction_options": values}
        if fleet.host_blocks:
            options |= {"host_eviction": name, "host_eviction_options": values}
            options["num_host_blocks"] = fleet.host_blocks
        if self._follows_events or fleet.store_blocks:
            options["enable_events"] = True
            options["announce_reused"] = self._index is not None
        self._in_store: SimulatedStore | None = None
        self._incomplete: dict[bytes, float] = {}  # when a block's prefill ends, by hash
        self._ended: list[float] = []  # when requests ended in the replay, in ascending order
        self._running: list[Running] = []  # requests whose end may still be delayed
        self._links: dict[str, float] = {}  # when the last load over each link ends
        self._replayer = Replayer(
            num_blocks=fleet.num_blocks,
            groups=fleet.group_specs(),
            concurrency=fleet.concurrency,
            service=self._hardware.service,
            num_preallocate_tokens=fleet.num_preallocate_tokens,
            source=self._source if self._loads else None,
            **options,
        )

    def _source(self, manager: KVCacheManager) -> ExternalTokens:
        """Create the source of tokens: the store, other replicas, or both."""
        if self._fleet.store_blocks:
            self._in_store = SimulatedStore(
                *(manager, self._store_blocks),
                announce=self._follows_events,
                contents=self._store,
            )
            self._in_store.outages = self._outages
        self._tokens_from = self._in_store
        if self._fleet.peers:
            self._tokens_from = StoreAndPeers(manager, self._in_store, self._peer_tokens)
        return self._tokens_from

    def _peer_tokens(self, request: Request, now_ms: float) -> int:
        """Return the largest number of the request's tokens that any other replica has cached."""
        found = (each.complete_tokens(request, now_ms) for each in self.peers if each is not self)
        return max(found, default=0)

    def complete_tokens(self, request: Request, now_ms: float) -> int:
        """Return how many of the request's tokens are cached and computed at `now_ms`."""
        if now_ms < self.up_ms:
            return 0
        cache = self._replayer.manager.cache
        num_tokens, size = cache.cached_tokens(request).with_host, cache.hash_block_size
        if self._incomplete and num_tokens:
            for i, each in enumerate(cache.hashes(request)[: num_tokens // size]):
                if self._incomplete.get(each.tobytes(), 0.0) > now_ms:
                    step = max(self._replayer.manager.block_sizes)
                    return i * size // step * step
        return num_tokens

    def set_outages(self, outages: Sequence[Outage]) -> None:
        """Set the periods during which the replica cannot reach the store."""
        self._outages = outages
        if self._in_store is not None:
            self._in_store.outages = outages

    def clear_index(self) -> None:
        """Make the router forget which blocks the replica has cached."""
        if self._index is not None:
            self._index.clear()

    def die(self, now_ms: float, until_ms: float) -> list[tuple[Running, Any]]:
        """Lose the cache and all requests that have not ended by `now_ms`.

        Returns the lost requests with their tasks.
        """
        self.up_ms = max(self.up_ms, until_ms)
        lost = [(each, task) for each, task in self._serving if each.end_ms > now_ms]
        for each, _ in lost:
            own_ms = self._compute_ms(each.item.num_tokens, each.num_hit)
            left_ms = min(max(each.first_ms - now_ms, 0.0), own_ms)
            self.computed_ms = max(self.computed_ms - left_ms, 0.0)
        self.num_served -= len(lost)
        self._last_end_ms = min(self.last_end_ms, now_ms)
        if self._in_store is not None:
            self._in_store.forget_incomplete(now_ms)
        self._serving = []
        self.clear_index()
        self._start()
        return lost

    def num_unfinished(self, now_ms: float) -> int:
        """Return the number of requests that have not ended."""
        return len(self._ended) - bisect_right(self._ended, now_ms) + len(self._later_ends(now_ms))

    def _later_ends(self, now_ms: float) -> list[float]:
        """Return the end times after `now_ms` of the requests in `_running`."""
        return [each.end_ms for each in self._running if each.end_ms > now_ms]

    @property
    def last_end_ms(self) -> float:
        """The time at which the last request ends, or 0.0 without requests."""
        return max([self._last_end_ms, *self._ended[-1:], *self._later_ends(0.0)])

    def wait_ms(self, now_ms: float) -> float:
        """Return how long a prefill would wait for earlier prefills and for a running request to
        end.
        """
        start = max(now_ms, self._replayer.prefill_free_ms)
        too_many = self.num_unfinished(now_ms) - self._fleet.concurrency + 1
        if too_many > 0:
            last = bisect_right(self._ended, now_ms) + too_many - 1
            if last < len(self._ended):
                start = max(start, self._ended[last])
            else:
                start = max(start, sorted(self._later_ends(now_ms))[last - len(self._ended)])
        return start - now_ms

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return the time to first token that a request would have if this replica served it.

        Blocks in the store are not considered, because all replicas can load them.
        """
        cached = self._cached(request)
        num_cached = min(cached.with_host, item.num_tokens - 1)
        wait_ms = self.wait_ms(now_ms)
        num_bytes = self._bytes.between(min(cached.on_device, num_cached), num_cached)
        loaded_ms = self._loaded_ms(now_ms, "host", num_bytes) - now_ms
        begin_ms = self._replayer.begin_ms(now_ms + max(wait_ms, loaded_ms))
        return begin_ms - now_ms + self._compute_ms(item.num_tokens, num_cached)

    def _cached(self, request: Request) -> CachedTokens:
        """Return the cached tokens of a request, as far as the router knows."""
        cache = self._replayer.manager.cache
        if self._index is None:
            return cache.cached_tokens(request)
        return self._index.cached_tokens(cache.hashes(request), cache.hash_block_size)

    def serve(
        self, item: WorkloadRequest, request: Request, task: Any, hold_ms: float = 0.0
    ) -> Running | None:
        """Serve a task's request, and hold its blocks for `hold_ms` after the request ends.

        Returns the request with its hits and times, or None if the request does not fit.
        """
        served = self._replayer.arrive(item, request, self._load_ms)
        if served is not None:
            served.end_ms += hold_ms
            self.num_served += 1
            for each in self._running:
                if each.end_ms <= self._replayer.now_ms:
                    insort(self._ended, each.end_ms)
            self._running = [each for each in self._running if each.end_ms > self._replayer.now_ms]
            self._running.append(served)
            self.computed_ms += self._compute_ms(item.num_tokens, served.num_hit)
        if self._follows_events:
            self._observe(item.arrival_ms, 0.0 if served is None else served.first_ms)
        if self._index is not None:
            now_ms = item.arrival_ms
            self._serving = [each for each in self._serving if each[0].end_ms > now_ms]
            if served is not None:
                self._serving.append((served, task))
        return served

    def _observe(self, now_ms: float, ready_ms: float) -> None:
        """Process the cache events of a request whose prefill ends at `ready_ms`."""
        events = self._replayer.drain_events()
        if self._index is not None:
            self._index.observe(events)
        if not self._fleet.peers:
            return
        kept = {key: ms for key, ms in self._incomplete.items() if ms > now_ms}
        for event in events:
            if isinstance(event, BlockStored) and event.medium == "gpu" and not event.is_reused:
                kept |= dict.fromkeys((each.tobytes() for each in event.block_hashes), ready_ms)
        self._incomplete = kept

    def _load_ms(self, running: Running) -> float:
        now_ms, end_ms = self._replayer.now_ms, self._replayer.now_ms
        if running.num_store_hit:
            running.link = self._tokens_from.link
        stop = running.num_hit
        for link, count in ((running.link, running.num_store_hit), ("host", running.num_host_hit)):
            if count:
                num_bytes = self._bytes.between(stop - count, stop)
                running.num_loaded_bytes += num_bytes
                self._links[link] = self._loaded_ms(now_ms, link, num_bytes)
                end_ms = max(end_ms, self._links[link])
            stop -= count
        return end_ms - now_ms

    def _loaded_ms(self, now_ms: float, link: str, num_bytes: int) -> float:
        """Return the time at which a load ends if it begins after all earlier loads over the link."""
        if not num_bytes:
            return now_ms
        return max(now_ms, self._links.get(link, 0.0)) + self._hardware.load_ms(link, num_bytes)


class DecodeReplica(Replica):
    """A replica that loads computed prompts from prefill replicas and generates the answers."""

    _loads = True

    def _source(self, manager: KVCacheManager) -> ExternalTokens:
        self._tokens_from = ComputedPrompts(manager)
        return self._tokens_from

    def missing_bytes(self, item: WorkloadRequest, request: Request) -> int:
        """Return how many bytes of a prompt are not cached on this replica, as far as the router
        knows.
        """
        return self._bytes.between(self._cached(request).on_device, item.num_tokens)

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return how long a request would wait until this replica has loaded its prompt."""
        loaded_ms = self._loaded_ms(now_ms, "transfer", self.missing_bytes(item, request))
        return max(self.wait_ms(now_ms), loaded_ms - now_ms)
