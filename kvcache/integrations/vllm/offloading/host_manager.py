"""Which chunk of host memory holds which blocks: the scheduler's side of the host tier."""

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
from kvcache.integrations.vllm.offloading import metrics
from kvcache.integrations.vllm.offloading.options import SELECTIVE, HostTierOptions
from kvcache.integrations.vllm.offloading.request_keys import RequestKeys

if TYPE_CHECKING:  # since 0.32
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

_MOST_COUNTED = 65_536  # keys of which "selective" counts the requests


@dataclass(frozen=True)
class HostChunks(LoadStoreSpec):
    """Chunks of host memory, in the order of the keys. `counts`: how many of each group in turn."""

    chunks: np.ndarray
    counts: list[int]


class HostManager(OffloadingManager):
    """Chunks by key, over a `BlockPool`: the policy chooses among those that no transfer holds.

    `num_chunks` of host memory, 1 or more. `tokens_per_chunk`: of each KV cache group, by number.
    `chained_groups`: numbers of groups in which a chunk is found only behind all before it. No chunk of
    these is evicted before one that follows it.

    Chunks of a request are released when they were stored or loaded, and once more when it has ended:
    its last chunk first, so that its first ones stay longest.
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

    # --- hits ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks that are hits on the device are offered again, so that they count as used here."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded, or will be once its store is done."""
        if key not in self._chunk_of:
            return LookupResult.MISS
        if not req_context.load_tier_filter.allows(Medium.CPU, Locality.LOCAL):
            return LookupResult.MISS
        return LookupResult.HIT_PENDING if key in self._storing else LookupResult.HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Host memory. vLLM 0.31 does not ask."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostChunks:
        """Holds the chunks until `complete_load`. KeyError, and nothing is held, for one that is none."""
        keys = list(keys)
        chunks = self._chunks(keys)
        self._pool.retain(chunks)
        self._note_hits(keys, req_context)
        for key, chunk in zip(keys, chunks.tolist()):
            self._reading[key].append(chunk)
        return HostChunks(chunks, _counts(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Releases what `prepare_load` held."""
        chunks = []
        for key in _last_first(keys, req_context):
            held = self._reading[key]
            chunks.append(held.pop(0))
            if not held:
                del self._reading[key]
        self._pool.release(chunks)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Counts a use of those that are stored."""
        self._touch([key for key in keys if key in self._chunk_of])

    # --- stores ---

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Chunks for keys that have none; None where transfers hold too many others."""
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
        self._pool.retain(kept)  # of this request: nothing of it goes to make room for it
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
        """Makes stored chunks hits; without `success` they are forgotten."""
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
        """Forgets chunks of which a load failed: they are misses, and can be stored anew."""
        chunks = [
            self._chunk_of[key]
            for key in keys
            if key in self._chunk_of and key not in self._storing
        ]
        self._tell(self._forget(chunks), removed=True)
        self._pool.evict(chunks)
        self._stats.increase_counter(metrics.FAILED_LOADS)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Its chunks are released once more, in order, as soon as all are stored."""
        state = self._state(req_context)
        state.has_ended = True
        if not state.storing:
            self._end(state)

    def reset_cache(self) -> None:
        """Forgets all. What is under way is not completed here: vLLM discards it."""
        options = self.options
        self._pool = BlockPool(self.num_chunks + 1, options.eviction, options.eviction_options)
        self._chunk_of: dict[OffloadKey, int] = {}
        self._key_of: list[OffloadKey | None] = [None] * (self.num_chunks + 1)
        self._storing: set[OffloadKey] = set()
        self._reading: defaultdict[OffloadKey, list[int]] = defaultdict(list)

    # --- what it tells ---

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The events since the last call."""
        told, self._events = self._events, None if self._events is None else []
        return told or ()

    def get_stats(self) -> OffloadingConnectorStats:
        """The metrics since the last call."""
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
        """AssertionError where the chunks and the pool disagree; for tests."""
        self._pool.check_invariants()
        for key, chunk in self._chunk_of.items():
            assert self._key_of[chunk] == key, "a chunk has another key"
        assert len(self._chunk_of) == sum(key is not None for key in self._key_of)
        assert len(self._chunk_of) == self._pool.num_cached + len(self._storing)

    # --- inside ---

    def _chunks(self, keys: Sequence[OffloadKey]) -> np.ndarray:
        return np.array([self._chunk_of[key] for key in keys], np.int32)

    def _state(self, req_context: ReqContext) -> RequestKeys:
        state = req_context.get_state(RequestKeys)
        if state is None or state.pool is not self._pool:
            state = RequestKeys(self._pool)
            req_context.set_state(state)
        return state

    def _wanted(self, new: list[OffloadKey], state: RequestKeys) -> list[OffloadKey]:
        """Those that are to be stored: all, or those that enough requests had."""
        if self.options.store != SELECTIVE:
            return new
        counts, wanted = self._num_requests, []
        for key in new:
            if key not in state.counted:
                state.counted.add(key)
                counts[key] = counts.pop(key, 0) + 1  # now the youngest
            if counts.get(key, 0) >= self.options.num_requests_to_store:
                wanted.append(key)
        while len(counts) > _MOST_COUNTED:
            counts.popitem(last=False)
        self._stats.increase_counter(metrics.SKIPPED, len(new) - len(wanted))
        return wanted

    def _note_hits(self, keys: list[OffloadKey], req_context: ReqContext) -> None:
        """Tells the policy, once of each request; what the request has stored itself is no hit."""
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
        """Makes chunks findable in the pool; keys in the order of their tokens."""
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
        """Releases an ended request's chunks together, so that the policy sees them as one request's."""
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
        """Takes the keys from chunks; those that there were."""
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
    """uint8[n, 32]; shorter hashes are filled up."""
    packed = b"".join([get_offload_block_hash(key).ljust(32, b"\0") for key in keys])
    return np.frombuffer(packed, np.uint8).reshape(-1, 32)


def _counts(keys: Sequence[OffloadKey]) -> list[int]:
    """How many keys of each group there are in turn."""
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
    """By position, the end of the request first: in this order they are evicted."""
    return sorted(sorted(keys), key=req_context.get_offload_key_position, reverse=True)


def _runs(keys: list[OffloadKey], size: int, req_context: ReqContext) -> list[list[OffloadKey]]:
    """Keys of one group, cut where one does not follow the other. `size`: tokens of a chunk."""
    runs: list[list[OffloadKey]] = []
    expected = None
    for key in keys:
        position = req_context.get_offload_key_position(key)
        if position != expected:
            runs.append([])
        runs[-1].append(key)
        expected = position + size
    return runs
