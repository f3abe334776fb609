# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the host tier: assigns host memory chunks to blocks."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

from kvcache.allocator import BlockPool
from kvcache_vllm.offloading import metrics
from kvcache_vllm.offloading.options import SELECTIVE, HostTierOptions
from kvcache_vllm.offloading.request_keys import RequestKeys

if TYPE_CHECKING:  # available since 0.32
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

_MOST_COUNTED = 65_536  # maximum number of keys whose requests are counted for store="selective"


@dataclass(frozen=True)
class HostChunks(LoadStoreSpec):
    """The host memory chunks of a list of keys, in order. `counts`: number of chunks per group."""

    chunks: np.ndarray
    counts: list[int]


class HostManager(OffloadingManager):
    """Maps keys to chunks, based on a `BlockPool`. Only chunks that no transfer holds can be
    evicted.

    A request's chunks are released when they have been stored or loaded, and once more when the
    request ends. The last chunk is released first, so the first chunks stay cached longest.

    Args:
        num_chunks: Chunks of host memory, at least 1.
        tokens_per_chunk: Tokens of a chunk, by group number.
        chained_groups: Numbers of the groups in which a chunk can be hit only if all earlier chunks
            are hits. In these groups, a chunk is never evicted before a chunk that follows it.
    """

    def __init__(
        self,
        num_chunks: int,
        options: HostTierOptions,
        tokens_per_chunk: dict[int, int],
        chained_groups: Collection[int] = (),
        *,
        enable_events: bool = False,
    ) -> None:
        self.num_chunks = num_chunks
        self.options = options
        self.chained_groups = frozenset(chained_groups)
        self._tokens_per_chunk = tokens_per_chunk
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._num_requests: OrderedDict[OffloadKey, int] = OrderedDict()
        self._stats = OffloadingConnectorStats()
        self.reset_cache()

    # --- prefix hits ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return a context with which vLLM also offers chunks that were hit on the device.

        Offering a chunk that the host already stores counts as a use of the chunk.
        """
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk can be loaded now, or once its pending store has completed."""
        if key not in self._chunk_of:
            return LookupResult.MISS
        if not req_context.load_tier_filter.allows(Medium.CPU, Locality.LOCAL):
            return LookupResult.MISS
        return LookupResult.HIT_PENDING if key in self._storing else LookupResult.HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return host memory as the source of the load. vLLM 0.31 does not call this method."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostChunks:
        """Hold the chunks until `complete_load` is called.

        If a key is unknown, raises KeyError and holds no chunks.
        """
        keys = list(keys)
        chunks = self._chunks(keys)
        self._pool.retain(chunks)
        self._note_hits(keys, req_context)
        for key, chunk in zip(keys, chunks.tolist()):
            self._reading[key].append(chunk)
        return HostChunks(chunks, _counts(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release the chunks that `prepare_load` held."""
        chunks = []
        for key in _last_first(keys, req_context):
            held = self._reading[key]
            chunks.append(held.pop(0))
            if not held:
                del self._reading[key]
        self._pool.release(chunks)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of the stored chunks."""
        self._touch([key for key in keys if key in self._chunk_of])

    # --- stores ---

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Allocate chunks for new keys. Return None if transfers hold too many chunks."""
        keys = list(keys)
        state = self._state(req_context)
        known = [key for key in keys if key in self._chunk_of]
        wanted = self._wanted([key for key in keys if key not in self._chunk_of], state)
        state.add(keys, req_context)
        self._note_hits(known, req_context)
        if not wanted:
            self._touch(known)
            return PrepareStoreOutput([], HostChunks(np.empty(0, np.int32), []), [])
        self._stats.observe_histogram(metrics.ALLOCATION_SIZE, len(wanted))
        kept = self._chunks(known[::-1])
        self._pool.retain(kept)  # so that the allocation below does not evict this request's chunks
        chunks = self._pool.allocate(len(wanted))
        self._pool.release(kept)
        if chunks is None:
            return None
        evicted = self._forget(chunks.tolist())
        for key, chunk in zip(wanted, chunks.tolist()):
            self._chunk_of[key], self._key_of[chunk] = chunk, key
        self._storing.update(wanted)
        state.own.update(wanted)
        state.storing.update(wanted)
        self._stats.increase_counter(metrics.EVICTED, len(evicted))
        self._tell(evicted, removed=True)
        return PrepareStoreOutput(wanted, HostChunks(chunks, _counts(wanted)), evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Publish stored chunks, or discard them if `success` is false."""
        keys = _last_first([key for key in keys if key in self._storing], req_context)
        state = self._state(req_context)
        chunks = self._chunks(keys)
        self._storing.difference_update(keys)
        state.storing.difference_update(keys)
        if success:
            self._publish(keys[::-1], state, req_context)
            self._tell(keys[::-1], removed=False)
        else:
            self._forget(chunks.tolist())
        self._pool.release(chunks)
        if state.has_ended and not state.storing:
            self._end(state)

    def distrust(self, keys: Collection[OffloadKey]) -> None:
        """Discard chunks whose load failed.

        Lookups of these chunks then miss, and the chunks can be stored again.
        """
        chunks = [
            self._chunk_of[key]
            for key in keys
            if key in self._chunk_of and key not in self._storing
        ]
        self._tell(self._forget(chunks), removed=True)
        self._pool.evict(chunks)
        self._stats.increase_counter(metrics.FAILED_LOADS)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the request's chunks once more, in order, as soon as all of them are stored."""
        state = self._state(req_context)
        state.has_ended = True
        if not state.storing:
            self._end(state)

    def reset_cache(self) -> None:
        """Clear the cache. Transfers in flight are not completed, because vLLM discards them."""
        options = self.options
        self._pool = BlockPool(self.num_chunks + 1, options.eviction, options.eviction_options)
        self._chunk_of: dict[OffloadKey, int] = {}
        self._key_of: list[OffloadKey | None] = [None] * (self.num_chunks + 1)
        self._storing: set[OffloadKey] = set()
        self._reading: defaultdict[OffloadKey, list[int]] = defaultdict(list)

    # --- events and metrics ---

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""
        told, self._events = self._events, None if self._events is None else []
        return told or ()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the metrics since the last call."""
        stats, self._stats = self._stats, OffloadingConnectorStats()
        held = self._pool.num_total - self._pool.num_free
        written = len(self._storing)
        for name, count in (
            (metrics.HELD, held),
            (metrics.WRITTEN, written),
            (metrics.READ, held - written),
            (metrics.CACHED, self._pool.num_cached),
        ):
            stats.set_gauge(name, count / self.num_chunks)
        return stats

    def check_invariants(self) -> None:
        """Raise AssertionError if the chunks and the pool are inconsistent. Used by tests."""
        self._pool.check_invariants()
        for key, chunk in self._chunk_of.items():
            assert self._key_of[chunk] == key, "a chunk has another key"
        assert len(self._chunk_of) == sum(key is not None for key in self._key_of)
        assert len(self._chunk_of) == self._pool.num_cached + len(self._storing)

    # --- internals ---

    def _chunks(self, keys: Sequence[OffloadKey]) -> np.ndarray:
        return np.array([self._chunk_of[key] for key in keys], np.int32)

    def _state(self, req_context: ReqContext) -> RequestKeys:
        state = req_context.get_state(RequestKeys)
        if state is None or state.pool is not self._pool:
            state = RequestKeys(self._pool)
            req_context.set_state(state)
        return state

    def _wanted(self, new: list[OffloadKey], state: RequestKeys) -> list[OffloadKey]:
        """Return the keys to store: all keys, or only those that enough requests have used."""
        if self.options.store != SELECTIVE:
            return new
        counts, wanted = self._num_requests, []
        for key in new:
            if key not in state.counted:
                state.counted.add(key)
                counts[key] = counts.pop(key, 0) + 1  # move the key to the end, as the most recent
            if counts.get(key, 0) >= self.options.num_requests_to_store:
                wanted.append(key)
        while len(counts) > _MOST_COUNTED:
            counts.popitem(last=False)
        self._stats.increase_counter(metrics.SKIPPED, len(new) - len(wanted))
        return wanted

    def _note_hits(self, keys: list[OffloadKey], req_context: ReqContext) -> None:
        """Notify the policy of hits, once per request.

        Chunks stored by the request itself do not count.
        """
        state = self._state(req_context)
        hits = [
            key
            for key in keys
            if key not in state.hits and key not in state.own and key not in self._storing
        ]
        state.hits.update(hits)
        state.add(hits, req_context)
        chunks = self._chunks(hits)
        self._pool.retain(chunks)
        self._pool.hit(chunks)
        self._pool.release(chunks[::-1])

    def _touch(self, known: list[OffloadKey]) -> None:
        chunks = self._chunks([key for key in reversed(known) if key not in self._storing])
        self._pool.retain(chunks)
        self._pool.release(chunks)

    def _publish(self, keys: list[OffloadKey], state: RequestKeys, req_context: ReqContext) -> None:
        """Publish chunks in the pool. `keys` are in token order."""
        by_group = defaultdict(list)
        for key in keys:
            by_group[get_offload_group_idx(key)].append(key)
        for group, own in by_group.items():
            if group not in self.chained_groups:
                self._pool.publish(self._chunks(own), _hashes(own), group, is_chain=False)
                continue
            size = self._tokens_per_chunk[group]
            for run in _runs(own, size, req_context):
                before = state.key_at(group, req_context.get_offload_key_position(run[0]) - size)
                is_cached = before in self._chunk_of and before not in self._storing
                parent = _hashes([before]).tobytes() if is_cached else None
                self._pool.publish(self._chunks(run), _hashes(run), group, parent)

    def _end(self, state: RequestKeys) -> None:
        """Release a finished request's chunks in one call, so that the policy sees a single release."""
        for group, last_first in state.by_group().items():
            last_first = [
                (position, key)
                for position, key in last_first
                if key in self._chunk_of and key not in self._storing
            ]
            chunks = self._chunks([key for _, key in last_first])
            self._pool.retain(chunks)
            if self._pool.has_policy:
                hits = [position for position, key in last_first if key in state.hits]
                self._pool.notify_release(
                    chunks,
                    [position for position, _ in last_first],
                    tokens_per_block=self._tokens_per_chunk[group],
                    num_prefix_tokens=max(hits, default=0),
                    num_new_blocks=len(chunks) - len(hits),
                )
            self._pool.release(chunks)

    def _forget(self, chunks: Sequence[int]) -> list[OffloadKey]:
        """Remove the keys of chunks, and return them."""
        keys = [key for chunk in chunks if (key := self._key_of[chunk]) is not None]
        for chunk in chunks:
            self._key_of[chunk] = None
        for key in keys:
            del self._chunk_of[key]
        return keys

    def _tell(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed))


def _hashes(keys: Sequence[OffloadKey]) -> np.ndarray:
    """Return the hashes as uint8[n, 32]. Shorter hashes are padded."""
    packed = b"".join([get_offload_block_hash(key).ljust(32, b"\0") for key in keys])
    return np.frombuffer(packed, np.uint8).reshape(-1, 32)


def _counts(keys: Sequence[OffloadKey]) -> list[int]:
    """Return the number of keys per group."""
    counts: list[int] = []
    last = None
    for key in keys:
        group = get_offload_group_idx(key)
        if group == last:
            counts[-1] += 1
        else:
            counts.append(1)
        last = group
    return counts


def _last_first(keys: Iterable[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    """Sort by position, from the end of the request to its start. This is the eviction order."""
    return sorted(sorted(keys), key=req_context.get_offload_key_position, reverse=True)


def _runs(keys: list[OffloadKey], size: int, req_context: ReqContext) -> list[list[OffloadKey]]:
    """Split the keys of one group at gaps. `size`: tokens per chunk."""
    runs: list[list[OffloadKey]] = []
    expected = None
    for key in keys:
        position = req_context.get_offload_key_position(key)
        if position != expected:
            runs.append([])
        runs[-1].append(key)
        expected = position + size
    return runs
