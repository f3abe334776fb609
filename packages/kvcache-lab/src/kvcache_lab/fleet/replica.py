# SPDX-License-Identifier: Apache-2.0
"""A simulated replica with a real manager and a clock."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

from kvcache.allocator import KVCacheManager, Request
from kvcache.events import BlockStored
from kvcache_exchange.cli.policy_text import parse_eviction
from kvcache_lab.fleet.hardware import Hardware
from kvcache_lab.fleet.kv_bytes import KVBytes
from kvcache_lab.fleet.sizes import Fleet
from kvcache_lab.fleet.token_sources import ComputedPrompts, StoreAndPeers
from kvcache_lab.replayer import Replayer
from kvcache_lab.running import Running
from kvcache_lab.stored import ExternalTokens, SimulatedStore, StoreContents
from kvcache_lab.workload import WorkloadRequest


class Replica:
    """A replica with its own manager and clock.

    Attributes:
        peers: The replicas from which this replica can load tokens.
    """

    def __init__(
        self,
        fleet: Fleet,
        hardware: Hardware,
        store: StoreContents,
    ) -> None:
        self._fleet, self._hardware = fleet, hardware
        self._store = store
        self._bytes = KVBytes(fleet, hardware)
        self._compute_ms = hardware.service.compute_ms
        self.num_served, self.computed_ms = 0, 0.0
        self.peers: Sequence[Replica] = ()
        name, values = parse_eviction(fleet.eviction)
        options: dict[str, Any] = {"eviction": name, "eviction_options": values}
        if fleet.host_blocks:
            options |= {"host_eviction": name, "host_eviction_options": values}
            options["num_host_blocks"] = fleet.host_blocks
        if fleet.peers or fleet.store_blocks:
            options["enable_events"] = True
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

    @property
    def _loads(self) -> bool:
        """Whether tokens are loaded from a store or from other replicas."""
        return self._fleet.store_blocks > 0 or self._fleet.peers

    def _source(self, manager: KVCacheManager) -> ExternalTokens:
        """Create the source of tokens: the store, other replicas, or both."""
        if self._fleet.store_blocks:
            self._in_store = SimulatedStore(
                *(manager, self._fleet.store_blocks),
                announce=self._fleet.peers,
                contents=self._store,
            )
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
        cache = self._replayer.manager.cache
        num_tokens, size = cache.cached_tokens(request).with_host, cache.hash_block_size
        if self._incomplete and num_tokens:
            for i, each in enumerate(cache.hashes(request)[: num_tokens // size]):
                if self._incomplete.get(each.tobytes(), 0.0) > now_ms:
                    step = max(self._replayer.manager.block_sizes)
                    return i * size // step * step
        return num_tokens

    def num_unfinished(self, now_ms: float) -> int:
        """Return the number of requests that have not ended."""
        return len(self._ended) - bisect_right(self._ended, now_ms) + len(self._later_ends(now_ms))

    def _later_ends(self, now_ms: float) -> list[float]:
        """Return the end times after `now_ms` of the requests in `_running`."""
        return [each.end_ms for each in self._running if each.end_ms > now_ms]

    @property
    def last_end_ms(self) -> float:
        """The time at which the last request ends, or 0.0 without requests."""
        return max([0.0, *self._ended[-1:], *self._later_ends(0.0)])

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
        cached = self._replayer.manager.cache.cached_tokens(request)
        num_cached = min(cached.with_host, item.num_tokens - 1)
        wait_ms = self.wait_ms(now_ms)
        num_bytes = self._bytes.between(min(cached.on_device, num_cached), num_cached)
        loaded_ms = self._loaded_ms(now_ms, "host", num_bytes) - now_ms
        begin_ms = self._replayer.begin_ms(now_ms + max(wait_ms, loaded_ms))
        return begin_ms - now_ms + self._compute_ms(item.num_tokens, num_cached)

    def serve(
        self, item: WorkloadRequest, request: Request, hold_ms: float = 0.0
    ) -> Running | None:
        """Serve a request, and hold its blocks for `hold_ms` after the request ends.

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
        if self._fleet.peers:
            self._observe(item.arrival_ms, 0.0 if served is None else served.first_ms)
        return served

    def _observe(self, now_ms: float, ready_ms: float) -> None:
        """Process the cache events of a request whose prefill ends at `ready_ms`."""
        kept = {key: ms for key, ms in self._incomplete.items() if ms > now_ms}
        for event in self._replayer.drain_events():
            if isinstance(event, BlockStored) and event.medium == "gpu":
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
        """Return how many bytes of a prompt are not cached on this replica."""
        cached = self._replayer.manager.cache.cached_tokens(request)
        return self._bytes.between(cached.on_device, item.num_tokens)

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return how long a request would wait until this replica has loaded its prompt."""
        loaded_ms = self._loaded_ms(now_ms, "transfer", self.missing_bytes(item, request))
        return max(self.wait_ms(now_ms), loaded_ms - now_ms)
