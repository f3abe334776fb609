"""The tier that joins a store to a manager and its pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import MAX_INT64, flag, instance, integer, seconds, shown
from kvcache.checks import number as checked_number
from kvcache.events import BlockRemoved, CacheEvent
from kvcache.step import StepReport
from kvcache.store import answers
from kvcache.store.announcements import removed_event, stored_event
from kvcache.store.base import BlockStore
from kvcache.store.circuit import Circuit
from kvcache.store.identity import fingerprint
from kvcache.store.prefixes import NeededBlock, StoredPrefixes
from kvcache.store.staging import Staging
from kvcache.store.stats import StoreStats
from kvcache.store.thread import READ, WRITE, Call, StoreThread
from kvcache.store.values import BlockKey, faults, key_of_text, key_text, seal
from kvcache.store.writes import Described, WaitingBlocks
from kvcache.worker import KVStorage, Pages, SwapEngine, SwapJob
from kvcache.worker.swap.page_copy import PageCopy

_MOST_LOOKUPS = 4096  # that are remembered; the oldest is asked again
# A call moves as much, so that reads wait for a write no longer than some milliseconds, and few blocks
# share the cost of one. Mooncake takes at most 1,024.
_BYTES_PER_CALL, _LEAST_PER_CALL, _MOST_PER_CALL = 8 << 20, 8, 1024
_MEDIUMS = {"device": "gpu", "host": "cpu"}


class Received(NamedTuple):
    """A request whose load is over."""

    request: Request
    num_computed_tokens: int  # behind which it goes on
    num_loaded_tokens: int  # that came from the store


@dataclass(eq=False)
class _Lookup:
    """What the store said of a request's blocks."""

    request: Request  # names are used again, by requests with other tokens
    first_token: int  # the end of the hit when it was asked
    call: Call | None
    deadline: float  # of the call; then, until when its answer holds
    found: frozenset[BlockKey] = frozenset()
    # The end of a hit and the request's tokens, and up to which token the found reach then.
    reach: tuple[tuple[int, int], int] | None = None


@dataclass(eq=False)
class _Load:
    """Blocks that are on their way into the pages of a request."""

    request: Request
    first_token: int
    stop: int
    blocks: deque[tuple[NeededBlock, int]]  # to be asked for, with their pages
    deadline: float
    arrived_until: int  # the first token that does not arrive
    keys: frozenset[BlockKey]  # of all blocks
    calls: list[Call] = field(default_factory=list)  # under way

    def fail_at(self, token: int) -> None:
        """Tokens from here on do not arrive; nothing more is asked for."""
        self.arrived_until = max(min(self.arrived_until, token), self.first_token)
        self.blocks.clear()


@dataclass(eq=False)
class _Get:
    """A call of `get`: values, and the blocks and pages that they are for."""

    load: _Load
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
    invalid: set[BlockKey] = field(default_factory=set)  # since it was begun


class StoreTier:
    """Blocks of a cache in a store outside of the engine, under the device and the host tier.

    `manager`: with `enable_events`; the tier drains its events, and gives them out by `drain_events`.
    `pages`: those of the device, and `host_pages` those of the manager's host tier. `model` and `rank`:
    see `fingerprint`; only engines that are equal in all of that see each other's blocks. `contents` and
    `cp_kv_cache_interleave_size`: what it needs to know of pages that do not know what their bytes mean.

    `write_from`: "device" puts blocks as they fill; "host" puts those that the manager writes to its host
    tier (`host_write` says which); None puts none. "auto": "host" where there is a host tier.

    `staging_bytes`: host memory through which blocks go, of which writes use at most half. `timeout_s`:
    a lookup, or a load from its beginning, that takes longer is a miss. `announce`: `drain_events` also
    says what the store has, where it knows (`BlockStore.knows_keys`).

    One thread calls a tier, the manager's. The store is called in a thread of its own, which reads and
    writes the tier's staging memory alone: pages are copied by the caller, on its stream. No failure of
    the store raises here; `stats` counts them. After failures in a row it is not asked for a while.

    TypeError or ValueError for a manager without events, for groups that a store cannot fill
    (`StoredPrefixes`), and for wrong arguments. MemoryError for too much staging memory.
    """

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
        self._timeout_s = checked_number(timeout_s, "timeout_s", "seconds")
        if not 0 < self._timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}: expected seconds, more than 0")
        self._announces = flag(announce, "announce") and store.knows_keys
        self._circuit = Circuit() if circuit is None else circuit
        self.stats = StoreStats()
        self._staging = Staging(pages, integer(staging_bytes, "staging_bytes", most=MAX_INT64))
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
        self._loads: dict[str, _Load] = {}
        self._num_writing = 0  # values
        self._puts: set[_Put] = set()  # under way
        self._invalid: deque[list[str]] = deque()  # to be removed; the thread takes what it removed
        self._removal: Call | None = None  # of them, under way
        self._arriving: list[tuple[SwapJob, list[int]]] = []  # values that are read still
        self._drained: list[CacheEvent] = []  # of the manager, to be observed
        self._events: list[CacheEvent] = []
        self._announced: set[BlockKey] = set()
        self._slow: Call | None = None  # the call that was counted as too slow
        self._store = store
        self._thread = StoreThread(store, self._open)
        self._thread.submit(lambda: None, READ)  # opens the store before it is needed

    @staticmethod
    def _check(
        manager: KVCacheManager, pages: Pages, host_pages: Pages | None, write_from: object
    ) -> None:
        if not manager.options.enable_events:
            raise ValueError(
                "manager has enable_events=False: expected True, as events say what is new"
            )
        if write_from is not None and (
            not isinstance(write_from, str) or write_from not in _MEDIUMS
        ):
            raise ValueError(
                f"write_from is {shown(write_from)}: expected 'auto', 'device', 'host' or None"
            )
        if pages.num_blocks < manager.pool.num_blocks:
            raise ValueError(
                f"pages has {pages.num_blocks} pages: expected {manager.pool.num_blocks}, those of the "
                "manager"
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
                "those of the manager's host tier"
            )

    # Reads -----------------------------------------------------------------------------------------

    def match(self, request: Request) -> int | None:
        """How many tokens behind the hit of a new request the store has; None: ask again later.

        For `num_external_computed_tokens` of `KVCacheManager.step`, with `delay_cache_blocks` and no
        tokens of its own (`new_num_tokens` 0), but not with `max_host_blocks`: ask just before. The
        first call asks the store, and later ones say what came of it; a request that waits longer than
        `timeout_s` is asked for again. 0 after `timeout_s` without an answer, and while the store is not
        asked.
        """
        instance(request, Request, "request")
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
        if not lookup.found:
            return 0
        of = first, request.num_tokens
        if lookup.reach is None or lookup.reach[0] != of:
            lookup.reach = of, self._prefixes.reach(request, first, lookup.found)
        return lookup.reach[1] - first

    def load(self, request: Request, num_tokens: int) -> None:
        """Begins to load what `match` has said, when the plan that admitted the request was applied.

        `num_tokens`: as `match` said. `poll` says when it is over; until then the request is receiving.
        ValueError for a request that is not, and for one that is being loaded.
        """
        instance(request, Request, "request")
        if not self._manager.is_receiving(request) or request.request_id in self._loads:
            raise ValueError(
                f"request {request.request_id!r} is not receiving, or is being loaded: expected one that "
                "was admitted with delay_cache_blocks"
            )
        stop = self._manager.num_computed_tokens(request)
        first = stop - integer(num_tokens, "num_tokens", 1, stop)
        self._lookups.pop(request.request_id, None)
        groups = range(len(self._manager.groups))
        tables = [self._manager.block_ids(request, g).tolist() for g in groups]
        blocks = deque(
            (block, page)
            for block in self._prefixes.needed(request, first, stop)
            if (page := tables[block.key.group][block.column]) > 0
        )
        deadline = time.monotonic() + self._timeout_s
        keys = frozenset(block.key for block, _ in blocks)
        load = _Load(request, first, stop, blocks, deadline, stop, keys)
        self._loads[request.request_id] = load
        self.stats.hit_tokens += num_tokens
        self._ask_for_blocks(load)

    def poll(self) -> list[Received]:
        """Brings blocks that have come into their pages, and ends loads; the requests that go on.

        Call it once per step, outside of graphs. Work that is launched next on the calling stream finds
        the pages filled.
        """
        self._take_over()
        now = time.monotonic()
        received = []
        for load in list(self._loads.values()):
            if load.blocks and now >= load.deadline:
                load.fail_at(load.blocks[0][0].first_token)
            self._ask_for_blocks(load)
            if now >= load.deadline:
                for call in load.calls:
                    load.fail_at(call.tag.blocks[0][0].first_token)
                    self._give_up(call)
                load.calls.clear()
            if not load.blocks and not load.calls:
                received += self._end(load)
        return received

    def cancel(self, request: Request) -> Received | None:
        """Ends the load of a request, for which no more comes; None where there is none.

        Call it before a request that is receiving is freed.
        """
        instance(request, Request, "request")
        self._lookups.pop(request.request_id, None)
        load = self._loads.get(request.request_id)
        if load is None:
            return None
        load.fail_at(load.first_token)
        return next(iter(self._end(load)), None)

    def _ask(self, request: Request, first: int) -> _Lookup:
        self._lookups.pop(request.request_id, None)
        keys = self._prefixes.candidates(request, first) if request.read_cache else []
        lookup = _Lookup(request, first, None, time.monotonic() + self._timeout_s)
        self._lookups[request.request_id] = lookup
        if len(self._lookups) > _MOST_LOOKUPS:
            del self._lookups[next(iter(self._lookups))]
        if not keys:
            return lookup
        if not self._may_ask():
            self.stats.unasked += 1
            return lookup
        self.stats.lookups += 1
        texts = self._texts(keys)
        lookup.call = self._thread.submit(lambda: self._exists(texts), READ, tag=(lookup, keys))
        return lookup

    def _ask_for_blocks(self, load: _Load) -> None:
        while load.blocks and self._staging.num_free:
            count = min(len(load.blocks), self._staging.num_free, self._per_call)
            blocks = [load.blocks.popleft() for _ in range(count)]
            numbers = [self._staging.take() for _ in blocks]
            get = _Get(load, numbers, blocks, self._fingerprint)
            call = self._thread.submit(lambda g=get: self._get(g), READ, tag=get)
            load.calls.append(call)

    def _get(self, get: _Get) -> list[str | None]:
        """In the thread: what is wrong with each block."""
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
        """Blocks have come: those of a load that goes on move into their pages."""
        get: _Get = call.tag
        load = get.load
        if call in load.calls:
            load.calls.remove(call)
        each_found = ["error"] * len(get.blocks) if call.result is None else call.result
        right = []
        for number, (block, page), found in zip(get.numbers, get.blocks, each_found):
            if found is None:
                right.append((number, page, block))
                continue
            load.fail_at(block.first_token)
            if found != "error":
                name = f"{found}_blocks"
                setattr(self.stats, name, getattr(self.stats, name) + 1)
        pairs = np.array([pair[:2] for pair in right], np.int64).reshape(-1, 2)
        if not len(pairs) or not self._goes_on(load):
            self._staging.give_back(get.numbers)
            return
        job = self._swaps.swap_in(pairs)
        self._swaps.before_read(job)
        if job.error is not None:
            load.fail_at(min(block.first_token for _, _, block in right))
        self.stats.loaded_blocks += len(pairs)
        self.stats.loaded_bytes += len(pairs) * self._pages.page_bytes
        self._arriving.append((job, get.numbers))

    def _goes_on(self, load: _Load) -> bool:
        """Whether the pages of a load are still the request's to be written."""
        if self._loads.get(load.request.request_id) is not load:
            return False
        try:
            return self._manager.is_receiving(load.request)
        except ValueError:  # it was freed
            return False

    def _end(self, load: _Load) -> list[Received]:
        goes_on = self._goes_on(load)
        del self._loads[load.request.request_id]
        for call in load.calls:
            call.is_given_up = True
        if not goes_on:
            return []
        arrived = load.arrived_until - load.first_token
        computed = self._manager.finish_receiving(load.request, arrived)
        loaded = max(min(computed, load.arrived_until) - load.first_token, 0)
        self.stats.loaded_tokens += loaded
        return [Received(load.request, computed, loaded)]

    # Writes ----------------------------------------------------------------------------------------

    def save(self, report: StepReport) -> None:
        """Begins to put blocks, after `KVCacheManager.report` of the step that was planned last.

        Behind the step on the calling stream; outside of graphs. Where a later step is planned already,
        or the step was not completed, blocks wait for the next call.
        """
        instance(report, StepReport, "report")
        is_completed = flag(report.completed, "report.completed")
        step_id = integer(report.step_id, "report.step_id", most=MAX_INT64)
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
        """In the thread: "stored", "known", "refused" or "dropped" for each block."""
        own, keys, numbers = put.fingerprint, put.keys, put.numbers
        if job is not None:
            job.wait()
        texts = [key_text(own, key) for key in keys]
        found = ["known" if each else "refused" for each in self._exists(texts)]
        # A block that becomes invalid behind this line is removed behind this call.
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
        """In the thread."""
        self._remove_invalid()
        return answers.flags(self._store.exists(texts), len(texts), "exists")

    def _remove_invalid(self) -> None:
        """In the thread, before anything is asked: what is invalid is neither found nor kept.

        Where the store fails it stays to be removed, and the call that asks is a failure.
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
        """The events of the manager since the last call, in order, and with `announce` the store's.

        Only with `announce` are they kept; the medium of the store's is "storage".
        """
        self._drain()
        events, self._events = self._events, []
        return events

    def _drain(self) -> list[CacheEvent]:
        """The manager's events since the last time."""
        events, self._drained = self._drained + self._manager.drain_events(), []
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
        """What the store had when it was opened."""
        for text in texts:
            key = key_of_text(self._fingerprint, text)
            if key is None or key.group >= len(self._manager.groups):
                continue
            if len(key.block_hash) == self._manager.hash_bytes:
                self._tell_stored(key, None)

    # All -------------------------------------------------------------------------------------------

    def start_epoch(self, model: str) -> None:
        """`KVCacheManager.start_epoch`, and another `model`: what the store has is not found any more.

        Loads that are under way end with nothing, by the next `poll`.
        """
        new = fingerprint(self._manager, self._pages, model=model, **self._identity)
        self._manager.start_epoch()
        self._fingerprint = new
        self._events += map(removed_event, self._announced)
        self._announced.clear()
        self._lookups.clear()
        for load in self._loads.values():
            load.fail_at(load.first_token)

    def invalidate(self, ids: np.ndarray) -> dict[str, int]:
        """`KVCacheManager.invalidate`; what leaves the cache by it is removed from the store, too.

        Also where it is being put. Where the store fails, it is removed before the store is asked for
        anything else. Blocks that were computed from it, and that the cache no longer had, stay in the
        store: where that may be, change `model` (`start_epoch`).
        """
        self._drained += self._manager.drain_events()
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
        for put in self._puts:  # before the removal, which may be begun at once
            put.invalid.update(keys.intersection(put.keys))
        for load in self._loads.values():
            if not keys.isdisjoint(load.keys):
                load.fail_at(load.first_token)
        self._invalid.append(self._texts([*keys]))
        self._removal = self._thread.submit(self._remove_invalid, READ)
        return affected

    @property
    def is_dead(self) -> bool:
        """Whether the store failed so often that it is asked only from time to time."""
        return self._circuit.is_open

    @property
    def num_waiting_blocks(self) -> int:
        """Blocks that are to be put, or are being put."""
        return self._num_writing + (0 if self._waiting is None else len(self._waiting))

    def close(self, timeout_s: float = 10.0) -> bool:
        """Ends all loads and the thread, behind the puts under way; False where that takes longer.

        The thread then goes on alone: it keeps the memory that it uses.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        for load in list(self._loads.values()):
            load.fail_at(load.first_token)
            self._end(load)
        if self._invalid:  # the last try, where one has failed
            self._thread.submit(self._remove_invalid, READ)
        is_over = self._thread.close(timeout_s)
        self._take_over()
        return is_over

    def _open(self) -> list[str]:
        """In the thread."""
        self._store.open(self._staging.memory, self._staging.value_bytes)
        return answers.texts(self._store.keys(), "keys")

    def _texts(self, keys: list[BlockKey]) -> list[str]:
        return [key_text(self._fingerprint, key) for key in keys]

    def _may_ask(self) -> bool:
        """Whether the store is taken for alive, or is to be tried again."""
        running, now = self._thread.running, time.monotonic()
        if running is None or now - running.begun_at <= self._timeout_s:
            return self._circuit.allows()
        if running is not self._slow:
            self._slow = running
            self.stats.timeouts += 1
            self._circuit.failed()
        return False

    def _give_up(self, call: Call) -> None:
        """Nobody waits for it any longer."""
        call.is_given_up = True
        self.stats.timeouts += 1
        self._circuit.failed()

    def _take_over(self) -> None:
        """What the thread has done since the last time."""
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
        if self._invalid and self._removal.is_over and self._may_ask():  # it failed
            self._removal = self._thread.submit(self._remove_invalid, READ)

    def _has_arrived(self, job: SwapJob, numbers: list[int]) -> bool:
        if not job.poll():
            return False
        self._staging.give_back(numbers)
        return True
