# SPDX-License-Identifier: Apache-2.0
"""A cache tier that connects an external store to a manager and its pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import MAX_INT64, flag, instance, integer, seconds, shown
from kvcache.checks import number as checked_number
from kvcache.events import BlockRemoved, CacheEvent
from kvcache.sources.base import Arrived
from kvcache.sources.circuit import Circuit
from kvcache.sources.loads import SourceLoad, SourceLoads
from kvcache.sources.store import answers
from kvcache.sources.store.announcements import removed_event, stored_event
from kvcache.sources.store.base import BlockStore
from kvcache.sources.store.identity import fingerprint
from kvcache.sources.store.prefixes import NeededBlock, StoredPrefixes
from kvcache.sources.store.staging import ValueStaging
from kvcache.sources.store.stats import StoreStats
from kvcache.sources.store.thread import READ, WRITE, Call, StoreThread
from kvcache.sources.store.values import BlockKey, faults, key_of_text, key_text, seal
from kvcache.sources.store.writes import Described, WaitingBlocks
from kvcache.step import StepReport
from kvcache.worker import KVStorage, Pages, SwapEngine, SwapJob
from kvcache.worker.pages.page_copy import PageCopy

_MOST_LOOKUPS = 4096  # maximum number of cached lookup results; the oldest is dropped first
# Limits on bytes and blocks per call. They are small enough that a read waits only milliseconds for
# a write, and large enough that many blocks share the fixed cost of a call. Mooncake accepts at
# most 1,024 keys.
_BYTES_PER_CALL, _LEAST_PER_CALL, _MOST_PER_CALL = 8 << 20, 8, 1024
_TOO_LATE = "the store did not answer in time"
_WRONG = {
    "missing": "the store no longer has a block",
    "corrupt": "the digest of a block is wrong",
    "misfit": "a block has the wrong size or key",
    "error": "a call to the store failed",
}
_MEDIUMS = {"device": "gpu", "host": "cpu"}


@dataclass(eq=False)
class _Lookup:
    """The result of looking up a request's blocks in the store."""

    request: Request  # the object, because IDs may be reused by requests with other tokens
    first_token: int  # end of the hit at the lookup
    call: Call | None
    deadline: float  # deadline of the call, then expiry of its result
    found: frozenset[BlockKey] = frozenset()
    # The arguments of the last `match` (end of the hit, number of the request's tokens), and the
    # end of the tokens found for them.
    reach: tuple[tuple[int, int], int] | None = None


@dataclass(eq=False)
class _Arrival:
    """A load of blocks into the pages of a request."""

    blocks: deque[tuple[NeededBlock, int]]  # blocks still to be requested, with their pages
    deadline: float
    first_token: int
    arrived_until: int  # position of the first token that will not arrive
    keys: frozenset[BlockKey]  # keys of all blocks
    calls: list[Call] = field(default_factory=list)  # number of calls in flight
    error: str | None = None

    def fail_at(self, token: int, error: str) -> None:
        """Record that tokens from `token` onwards will not arrive, and stop requesting blocks."""
        self.arrived_until = max(min(self.arrived_until, token), self.first_token)
        self.blocks.clear()
        self.error = self.error or error


_PageLoad = SourceLoad[_Arrival]


@dataclass(eq=False)
class _Get:
    """A call of `get`, with the staged values and the blocks and pages that they are read for."""

    load: _PageLoad
    numbers: list[int]
    blocks: list[tuple[NeededBlock, int]]
    fingerprint: bytes


@dataclass(eq=False)
class _Put:
    """A call of `put`."""

    numbers: list[int]
    keys: list[BlockKey]
    described: list[Described | None]
    fingerprint: bytes
    invalid: set[BlockKey] = field(default_factory=set)  # invalidated after the call started


class StoreTier:
    """A cache tier in an external store, below the device and the host tier.

    All methods must be called in the manager's thread. The store is called in a separate thread
    that accesses only the tier's staging memory. Pages are copied on the current stream. The
    store's failures are counted in `stats` and never raised by the tier. After several consecutive
    failures, the tier stops calling the store for some time.

    Args:
        manager: The manager, created with `enable_events`. The tier drains the manager's events. To
            read them yourself, set `announce` and call the tier's `drain_events`.
        pages: The device's pages.
        store: The store.
        model: See `fingerprint`. Only engines with equal fingerprints share blocks.
        rank: See `fingerprint`.
        contents: See `fingerprint`.
        cp_kv_cache_interleave_size: See `fingerprint`.
        host_pages: The pages of the manager's host tier.
        write_from: "device": store each block once it is full. "host": store the blocks that the
            manager writes to its host tier (see `host_write`). None: store nothing. "auto": "host"
            if there is a host tier, otherwise "device".
        staging_bytes: Size in bytes of the host memory through which blocks are copied. Writes use
            at most half of it.
        timeout_s: Seconds after which a lookup or a whole load is abandoned and counts as a miss.
        announce: Whether to keep events for `drain_events`: the manager's events and, if the store
            can list its keys (`BlockStore.knows_keys`), the store's.
        circuit: Circuit breaker for a failing store.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The manager emits no events, a store cannot fill its groups (see
            `StoredPrefixes`), or an argument is invalid.
        MemoryError: The host does not have enough memory for staging.
    """

    name = "store"

    def __init__(
        self,
        manager: KVCacheManager,
        pages: Pages,
        store: BlockStore,
        *,
        model: str,
        rank: str = "",
        contents: str | Sequence[KVStorage] | None = None,
        cp_kv_cache_interleave_size: int | None = None,
        host_pages: Pages | None = None,
        write_from: Literal["auto", "device", "host"] | None = "auto",
        staging_bytes: int = 64 << 20,
        timeout_s: float = 2.0,
        announce: bool = False,
        circuit: Circuit | None = None,
    ) -> None:
        instance(manager, KVCacheManager, "manager")
        instance(pages, Pages, "pages")
        instance(store, BlockStore, "store")
        if circuit is not None:
            instance(circuit, Circuit, "circuit")
        if isinstance(write_from, str) and write_from == "auto":
            write_from = "device" if manager.host_pool is None else "host"
        self._check(manager, pages, host_pages, write_from)
        self._manager, self._pages, self._host = manager, pages, host_pages
        self._prefixes = StoredPrefixes(manager)
        self._identity = {
            "rank": rank,
            "contents": contents,
            "cp_kv_cache_interleave_size": cp_kv_cache_interleave_size,
        }
        self._fingerprint = fingerprint(manager, pages, model=model, **self._identity)
        self._epoch = manager.cache.epoch
        self._timeout_s = checked_number(timeout_s, "timeout_s", "seconds")
        if not 0 < self._timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}: expected seconds, more than 0")
        self._announces = flag(announce, "announce") and store.knows_keys
        self._circuit = Circuit() if circuit is None else circuit
        self.stats = StoreStats()
        self._staging = ValueStaging(pages, integer(staging_bytes, "staging_bytes", most=MAX_INT64))
        fitting = _BYTES_PER_CALL // self._staging.value_bytes
        self._per_call = min(max(fitting, _LEAST_PER_CALL), _MOST_PER_CALL)
        self._swaps = SwapEngine(pages, self._staging.pages)
        self._from_host = None
        if write_from == "host":
            self._from_host = PageCopy(host_pages, self._staging.pages)
        self._waiting = None
        if write_from is not None:
            most = max(8 * self._staging.num_values, 4096)
            medium = _MEDIUMS[write_from]
            self._waiting = WaitingBlocks(medium, most, describes=self._announces)
        self._lookups: dict[str, _Lookup] = {}
        self._loads: SourceLoads[_Arrival] = SourceLoads(manager, self.stats)
        self._num_writing = 0  # number of staged values being written
        self._puts: set[_Put] = set()  # calls of `put` in flight
        self._invalid: deque[list[str]] = deque()  # keys still to be removed from the store
        self._removal: Call | None = None  # the removal in flight
        # Copies in flight, and the staged values that they read.
        self._arriving: list[tuple[SwapJob, list[int]]] = []
        self._drained: list[CacheEvent] = []  # manager events that were not processed yet
        self._events: list[CacheEvent] = []
        self._announced: set[BlockKey] = set()
        self._slow: Call | None = None  # the last call that was counted as too slow
        self._store = store
        self._thread = StoreThread(store, self._open)
        self._thread.submit(lambda: None, READ)  # open the store before the first lookup

    @staticmethod
    def _check(
        manager: KVCacheManager, pages: Pages, host_pages: Pages | None, write_from: object
    ) -> None:
        if not manager.options.enable_events:
            raise ValueError(
                "manager has enable_events=False: expected True, because the tier reads its events"
            )
        if write_from is not None and (
            not isinstance(write_from, str) or write_from not in _MEDIUMS
        ):
            raise ValueError(
                f"write_from is {shown(write_from)}: expected 'auto', 'device', 'host' or None"
            )
        if pages.num_blocks < manager.pool.num_blocks:
            raise ValueError(
                f"pages has {pages.num_blocks} pages: expected {manager.pool.num_blocks}, as in the "
                "manager's pool"
            )
        if write_from != "host":
            return
        if manager.host_pool is None or host_pages is None:
            raise ValueError(
                "write_from is 'host': expected a manager with num_host_blocks, and host_pages"
            )
        instance(host_pages, Pages, "host_pages")
        if host_pages.num_blocks < manager.host_pool.num_blocks:
            raise ValueError(
                f"host_pages has {host_pages.num_blocks} pages: expected {manager.host_pool.num_blocks}, "
                "as in the manager's host tier"
            )

    # Reads -----------------------------------------------------------------------------------------

    def match(self, request: Request) -> int | None:
        """Return the number of tokens after a new request's local hit that can be loaded from the
        store.

        The first call starts a lookup, and later calls return its result. If the result is older
        than `timeout_s`, the lookup is repeated. Call this method immediately before the step, and
        pass the number as `Admit.external` with `delayed=True`, without other external tokens and
        without `max_host_blocks`.

        Args:
            request: A request that is not admitted.

        Returns:
            The number of tokens, or None while the lookup is running. The number is 0 if the lookup
            takes longer than `timeout_s`, or while the circuit breaker prevents calls to the store.
        """
        instance(request, Request, "request")
        self._check_epoch()
        self._take_over()
        first = self._prefixes.hit_tokens(request)
        lookup = self._lookups.get(request.request_id)
        now = time.monotonic()
        is_of_another = lookup is None or lookup.request is not request
        is_old = not is_of_another and lookup.call is None and now >= lookup.deadline
        if is_of_another or is_old or first < lookup.first_token:
            lookup = self._ask(request, first)
        if lookup.call is not None:
            if now < lookup.deadline:
                return None
            self._give_up(lookup.call)
            lookup.call, lookup.deadline = None, now + self._timeout_s
        of = first, request.num_tokens
        if lookup.found and (lookup.reach is None or lookup.reach[0] != of):
            lookup.reach = of, self._prefixes.reach(request, first, lookup.found)
        stop = lookup.reach[1] if lookup.found else first
        if stop <= first or request in self._loads:
            self._loads.forget(request.request_id)
            return 0
        self._loads.match(request, first, stop)
        return stop - first

    def begin(self, request: Request) -> None:
        """Begin to load the tokens that `match` found. The plan that admits the request must have
        been applied.

        The request is in the receiving state until `poll` returns it.

        Raises:
            ValueError: The request was not matched, was admitted without `External.delayed`, or was
                admitted with a different number of tokens. Nothing has changed.
        """
        instance(request, Request, "request")
        load = self._loads.admitted(request)
        first, stop = load.first_token, load.end_token
        groups = range(len(self._manager.groups))
        tables = [self._manager.block_ids(request, g).tolist() for g in groups]
        blocks = deque(
            (block, page)
            for block in self._prefixes.needed(request, first, stop)
            if (page := tables[block.key.group][block.column]) > 0
        )
        deadline = time.monotonic() + self._timeout_s
        keys = frozenset(block.key for block, _ in blocks)
        load.detail = _Arrival(blocks, deadline, first, stop, keys)
        self._loads.begin(load)
        self._lookups.pop(request.request_id, None)
        self._ask_for_blocks(load)

    def poll(self) -> list[Arrived]:
        """Copy arrived blocks into their pages, and return the loads that have ended.

        Call this method once per step, outside graph captures. Work that is launched on the current
        stream afterwards sees the filled pages.
        """
        self._take_over()
        now = time.monotonic()
        arrived = []
        for load in self._loads.under_way:
            coming = load.detail
            if coming.blocks and now >= coming.deadline:
                coming.fail_at(coming.blocks[0][0].first_token, _TOO_LATE)
            self._ask_for_blocks(load)
            if now >= coming.deadline:
                for call in coming.calls:
                    coming.fail_at(call.tag.blocks[0][0].first_token, _TOO_LATE)
                    self._give_up(call)
                coming.calls.clear()
            if not coming.blocks and not coming.calls:
                arrived += self._end(load)
        return arrived

    def cancel(self, request: Request) -> None:
        """Free a request that is matched or loading, and end its load.

        The store's thread writes only to staging memory, so the blocks can be reused immediately.
        """
        instance(request, Request, "request")
        self._forget(request.request_id)
        if request in self._loads:
            load = self._loads[request.request_id]
            load.detail.fail_at(load.first_token, "it was canceled")
            self._end(load)
        self._loads.free(request)

    @property
    def num_loading_requests(self) -> int:
        """Number of requests with a load in flight."""
        return len(self._loads)

    @property
    def num_quarantined_blocks(self) -> int:
        """Always 0, because the store's thread never writes to the blocks of a request."""
        return self._loads.num_quarantined_blocks

    @property
    def is_busy(self) -> bool:
        """Whether loads or puts are in flight, or blocks are waiting to be put."""
        is_moving = len(self._loads) > 0 or bool(self._arriving)
        return is_moving or self.num_waiting_blocks > 0 or bool(self._invalid)

    def _check_epoch(self) -> None:
        if self._manager.cache.epoch != self._epoch:
            raise RuntimeError(
                "start_epoch of the manager's cache was called: call StoreTier.start_epoch instead, with "
                "a new model string, because the store still has KV of the old weights"
            )

    def _ask(self, request: Request, first: int) -> _Lookup:
        self._forget(request.request_id)
        keys = self._prefixes.candidates(request, first) if request.read_cache else []
        lookup = _Lookup(request, first, None, time.monotonic() + self._timeout_s)
        self._lookups[request.request_id] = lookup
        if len(self._lookups) > _MOST_LOOKUPS:
            self._forget(next(iter(self._lookups)))
        if not keys:
            return lookup
        if not self._may_ask():
            self.stats.unasked += 1
            return lookup
        self.stats.lookups += 1
        texts = self._texts(keys)
        lookup.call = self._thread.submit(lambda: self._exists(texts), READ, tag=(lookup, keys))
        return lookup

    def _forget(self, request_id: str) -> None:
        """Forget the lookup of a request that is not loading."""
        self._lookups.pop(request_id, None)
        self._loads.forget(request_id)

    def _ask_for_blocks(self, load: _PageLoad) -> None:
        waiting = load.detail.blocks
        while waiting and self._staging.num_free:
            count = min(len(waiting), self._staging.num_free, self._per_call)
            blocks = [waiting.popleft() for _ in range(count)]
            numbers = [self._staging.take() for _ in blocks]
            get = _Get(load, numbers, blocks, self._fingerprint)
            call = self._thread.submit(lambda g=get: self._get(g), READ, tag=get)
            load.detail.calls.append(call)

    def _get(self, get: _Get) -> list[str | None]:
        """Read blocks. Runs in the store's thread. Returns each block's fault, or None for a valid
        block.
        """
        own, numbers, keys = get.fingerprint, get.numbers, [block.key for block, _ in get.blocks]
        texts = [key_text(own, key) for key in keys]
        self._remove_invalid()
        sizes = self._store.get(texts, self._staging.of(numbers))
        sizes = answers.sizes(sizes, len(texts), "get")
        found = faults(self._staging.values, numbers, sizes, own, keys)
        wrong = [text for text, each in zip(texts, found) if each in ("corrupt", "misfit")]
        if wrong:
            self._store.remove(wrong)
        return found

    def _got(self, call: Call) -> None:
        """Process a finished call's blocks, and copy those that belong to active loads into their
        pages.
        """
        get: _Get = call.tag
        load, coming = get.load, get.load.detail
        if call in coming.calls:
            coming.calls.remove(call)
        each_found = ["error"] * len(get.blocks) if call.result is None else call.result
        right = []
        for number, (block, page), found in zip(get.numbers, get.blocks, each_found):
            if found is None:
                right.append((number, page, block))
                continue
            coming.fail_at(block.first_token, _WRONG[found])
            if found != "error":
                name = f"{found}_blocks"
                setattr(self.stats, name, getattr(self.stats, name) + 1)
        pairs = np.array([pair[:2] for pair in right], np.int64).reshape(-1, 2)
        if not len(pairs) or not self._loads.is_receiving(load):
            self._staging.give_back(get.numbers)
            return
        job = self._swaps.swap_in(pairs)
        self._swaps.before_read(job)
        if job.error is not None:
            first = min(block.first_token for _, _, block in right)
            coming.fail_at(first, f"blocks were not copied: {job.error}")
        self.stats.loaded_blocks += len(pairs)
        self.stats.loaded_bytes += len(pairs) * self._pages.page_bytes
        self._arriving.append((job, get.numbers))

    def _end(self, load: _PageLoad) -> list[Arrived]:
        coming = load.detail
        for call in coming.calls:
            call.is_given_up = True
        if not self._loads.is_receiving(load):
            self._loads.drop(load)
            return []
        num_arrived = coming.arrived_until - load.first_token
        return [self._loads.finish(load, num_arrived, coming.error)]

    # Writes ----------------------------------------------------------------------------------------

    def save(self, report: StepReport) -> None:
        """Begin to put new blocks into the store. Call this method after `KVCacheManager.report`
        for the most recently planned step.

        Blocks are copied on the current stream, after the step's work. The stream must not be
        capturing a graph. If a later step is already planned, or the step was not completed, blocks
        remain queued for the next call.

        Args:
            report: The report of the step.
        """
        instance(report, StepReport, "report")
        is_completed = flag(report.completed, "report.completed")
        step_id = integer(report.step_id, "report.step_id", most=MAX_INT64)
        self._check_epoch()
        self._take_over()
        self._drain()
        if self._waiting is None:
            return
        if is_completed and step_id == self._manager.last_step_id:
            self._put_waiting()
        self.stats.dropped_blocks += self._waiting.num_dropped
        self._waiting.num_dropped = 0

    def _put_waiting(self) -> None:
        half = max(self._staging.num_values // 2, 1)
        while len(self._waiting):
            count = min(half - self._num_writing, self._staging.num_free, self._per_call)
            if count <= 0 or not self._may_ask():
                return
            taken = self._waiting.take(self._manager, count)
            if not taken:
                continue
            put = _Put(
                [self._staging.take() for _ in taken],
                [key for key, _, _ in taken],
                [described for _, _, described in taken],
                self._fingerprint,
            )
            pairs = np.array([(page, n) for (_, page, _), n in zip(taken, put.numbers)], np.int64)
            job = None
            if self._from_host is not None:
                self._from_host.copy(pairs)
            else:
                job = self._swaps.swap_out(pairs)
                self._swaps.before_write(pairs[:, 0])
            self._num_writing += len(taken)
            self._puts.add(put)
            self._thread.submit(lambda p=put, j=job: self._put(p, j), WRITE, tag=put)

    def _put(self, put: _Put, job: SwapJob | None) -> list[str]:
        """Put blocks into the store.

        Runs in the store's thread. Returns "stored", "known", "refused" or "dropped" for each
        block.
        """
        own, keys, numbers = put.fingerprint, put.keys, put.numbers
        if job is not None:
            job.wait()
        texts = [key_text(own, key) for key in keys]
        found = ["known" if each else "refused" for each in self._exists(texts)]
        # Blocks that are invalidated after this line are removed after this call.
        found = ["dropped" if key in put.invalid else each for key, each in zip(keys, found)]
        new = [i for i, each in enumerate(found) if each == "refused"]
        if not new:
            return found
        of_new = [numbers[i] for i in new]
        seal(self._staging.values, of_new, own, [keys[i] for i in new])
        taken = self._store.put([texts[i] for i in new], self._staging.of(of_new))
        for i, is_taken in zip(new, answers.flags(taken, len(new), "put")):
            found[i] = "stored" if is_taken else "refused"
        return found

    def _exists(self, texts: list[str]) -> list[bool]:
        """Look up keys. Runs in the store's thread."""
        self._remove_invalid()
        return answers.flags(self._store.exists(texts), len(texts), "exists")

    def _remove_invalid(self) -> None:
        """Remove invalid blocks from the store.

        Runs in the store's thread before every other call, so that no call finds an invalid block.
        If the store fails, the blocks are removed later, and the call counts as failed.
        """
        while self._invalid:
            self._store.remove(self._invalid[0])
            self._invalid.popleft()

    def _has_put(self, call: Call) -> None:
        put: _Put = call.tag
        self._puts.remove(put)
        self._num_writing -= len(put.numbers)
        self._staging.give_back(put.numbers)
        if call.error is not None:
            return
        for key, described, answer in zip(put.keys, put.described, call.result):
            name = f"{answer}_blocks"
            setattr(self.stats, name, getattr(self.stats, name) + 1)
            if answer == "stored":
                self.stats.stored_bytes += self._pages.page_bytes
            if answer in ("stored", "known") and put.fingerprint == self._fingerprint:
                self._tell_stored(key, described)

    # Events ----------------------------------------------------------------------------------------

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager and of the store since the last call, in order.

        The medium of the store's events is "storage". Without `announce`, the list is empty.
        """
        self._drain()
        events, self._events = self._events, []
        return events

    def _drain(self) -> list[CacheEvent]:
        """Return the manager's events since the last drain."""
        events, self._drained = self._drained + self._manager.cache.drain_events(), []
        if self._waiting is not None:
            self._waiting.observe(events)
        if self._announces:
            self._events += events
        return events

    def _tell_stored(self, key: BlockKey, described: Described | None) -> None:
        if not self._announces or key in self._announced:
            return
        self._announced.add(key)
        self._events.append(stored_event(self._manager, key, described))

    def _tell_evicted(self, texts: list[str]) -> None:
        self.stats.evicted_blocks += len(texts)
        for text in texts:
            key = key_of_text(self._fingerprint, text)
            if key is not None and key in self._announced:
                self._announced.remove(key)
                self._events.append(removed_event(key))

    def _tell_found(self, texts: list[str]) -> None:
        """Emit events for all blocks in a store that was just opened."""
        for text in texts:
            key = key_of_text(self._fingerprint, text)
            if key is None or key.group >= len(self._manager.groups):
                continue
            if len(key.block_hash) == self._manager.cache.hash_bytes:
                self._tell_stored(key, None)

    # Common -----------------------------------------------------------------------------------------

    def start_epoch(self, model: str) -> None:
        """Start a new epoch in the manager, and stop using blocks computed with the old weights.

        At the next `poll`, loads in flight end without any tokens.

        Args:
            model: A new value of `model` for `fingerprint`.

        Raises:
            ValueError: `model` is the current value, under which the store still holds KV of the
                old weights.
        """
        new = fingerprint(self._manager, self._pages, model=model, **self._identity)
        if new == self._fingerprint:
            raise ValueError(
                f"model is {shown(model)}: expected a new string, because the store still has KV of the "
                "old weights under the current string"
            )
        self._manager.cache.start_epoch()
        self._epoch, self._fingerprint = self._manager.cache.epoch, new
        self._events += map(removed_event, self._announced)
        self._announced.clear()
        for request_id in list(self._lookups):
            self._forget(request_id)
        for load in self._loads.under_way:
            load.detail.fail_at(load.first_token, "the weights have changed")

    def invalidate(self, ids: np.ndarray) -> dict[str, int]:
        """Call `KVCacheManager.invalidate`, and remove the affected blocks from the store, too.

        This includes blocks that are being put. If the store fails, the blocks are removed before
        the next call. Blocks that were computed from invalid blocks, but had already been evicted
        from the cache, stay in the store. If the store may contain such blocks, change `model` with
        `start_epoch`.

        Args:
            ids: As for `KVCacheManager.invalidate`.

        Returns:
            As for `KVCacheManager.invalidate`.
        """
        self._drained += self._manager.cache.drain_events()
        affected = self._manager.invalidate(ids)
        num_before = len(self._drained)
        keys = {
            BlockKey(event.group, each.tobytes())
            for event in self._drain()[num_before:]
            if isinstance(event, BlockRemoved)
            for each in event.block_hashes
        }
        if not keys:
            return affected
        for put in self._puts:  # set before the removal, which may start immediately
            put.invalid.update(keys.intersection(put.keys))
        for load in self._loads.under_way:
            if not keys.isdisjoint(load.detail.keys):
                load.detail.fail_at(load.first_token, "its blocks were found to be invalid")
        self._invalid.append(self._texts([*keys]))
        self._removal = self._thread.submit(self._remove_invalid, READ)
        return affected

    @property
    def is_dead(self) -> bool:
        """Whether the store is considered dead after repeated failures, so that only occasional
        trial calls are made.
        """
        return self._circuit.is_open

    @property
    def num_waiting_blocks(self) -> int:
        """Number of blocks that are waiting to be put or are being put."""
        return self._num_writing + (0 if self._waiting is None else len(self._waiting))

    def close(self, timeout_s: float = 10.0) -> bool:
        """End all loads, wait for the puts in flight, and stop the store's thread.

        Args:
            timeout_s: Maximum time to wait, in seconds.

        Returns:
            Whether the thread has ended. If not, it continues in the background and keeps its
            memory.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        for load in self._loads.under_way:
            load.detail.fail_at(load.first_token, "the tier was closed")
            self._end(load)
        if self._invalid:  # one last attempt, in case an earlier one has failed
            self._thread.submit(self._remove_invalid, READ)
        is_over = self._thread.close(timeout_s)
        self._take_over()
        return is_over

    def _open(self) -> list[str]:
        """Open the store. Runs in the store's thread."""
        self._store.open(self._staging.memory, self._staging.value_bytes)
        return answers.texts(self._store.keys(), "keys")

    def _texts(self, keys: list[BlockKey]) -> list[str]:
        return [key_text(self._fingerprint, key) for key in keys]

    def _may_ask(self) -> bool:
        """Return whether the store may be called, that is, whether it is alive or due for a trial
        call.
        """
        running, now = self._thread.running, time.monotonic()
        if running is None or now - running.begun_at <= self._timeout_s:
            return self._circuit.allows()
        if running is not self._slow:
            self._slow = running
            self.stats.timeouts += 1
            self._circuit.failed()
        return False

    def _give_up(self, call: Call) -> None:
        """Abandon a call, because its result is no longer needed."""
        call.is_given_up = True
        self.stats.timeouts += 1
        self._circuit.failed()

    def _take_over(self) -> None:
        """Process the calls that the thread has finished since the last time."""
        self._arriving = [each for each in self._arriving if not self._has_arrived(*each)]
        for call in self._thread.take_over():
            if call.tag == "opened":
                self._tell_found(call.result)
                continue
            if call.error is not None:
                self.stats.errors += 1
                self._circuit.failed()
            elif not call.is_given_up:
                self._circuit.worked()
            if isinstance(call.tag, _Get):
                self._got(call)
            elif isinstance(call.tag, _Put):
                self._has_put(call)
            elif call.tag is not None:
                lookup, keys = call.tag
                lookup.call = None
                if call.error is None and call.result is not None:
                    lookup.found = frozenset(k for k, has in zip(keys, call.result) if has)
            self._tell_evicted(call.evicted)
        if self._invalid and self._removal.is_over and self._may_ask():  # the call failed
            self._removal = self._thread.submit(self._remove_invalid, READ)

    def _has_arrived(self, job: SwapJob, numbers: list[int]) -> bool:
        if not job.poll():
            return False
        self._staging.give_back(numbers)
        return True
