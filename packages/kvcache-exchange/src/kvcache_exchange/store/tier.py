# SPDX-License-Identifier: Apache-2.0
"""A cache tier that connects an external store to a manager and its pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import MAX_INT64, flag, instance, integer, listed, seconds, shown
from kvcache.events import BlockRemoved, CacheEvent
from kvcache.kinds import kind_class
from kvcache.sources import Arrived
from kvcache.sources.loads import SourceLoad, SourceLoads
from kvcache.step import StepReport
from kvcache.worker import KVStorage, Pages
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.store.announcements import removed_event, stored_event
from kvcache_exchange.store.base import BlockStore
from kvcache_exchange.store.identity import Share, cache_identity, check_shares
from kvcache_exchange.store.orders import (
    Found,
    GiveUp,
    Held,
    LoadBlocks,
    Loaded,
    LookUp,
    Order,
    PageOfBlock,
    RankDescription,
    RemoveBlocks,
    Removed,
    Result,
    SaveBlocks,
    Saved,
    StartEpoch,
    StoreRankLink,
    StoreResults,
)
from kvcache_exchange.store.prefixes import StoredPrefixes
from kvcache_exchange.store.rank import StoreRank
from kvcache_exchange.store.stats import StoreStats
from kvcache_exchange.store.value_format import BlockKey
from kvcache_exchange.store.writes import Described, WaitingBlocks

_MOST_LOOKUPS = 4096  # maximum number of cached lookup results; the oldest is dropped first
_MEDIUMS = {"device": "gpu", "host": "cpu"}
_OUTCOMES = ("dropped", "refused", "stored", "known")  # in order of precedence among ranks


@dataclass(eq=False)
class _Lookup:
    """The result of looking up a request's blocks in the store."""

    number: int
    request: Request  # compared by identity, because IDs may be reused
    first_token: int  # end of the hit at the time of the lookup
    pending: set[int]  # ranks that have not answered
    deadline: float  # deadline of the ranks' answers; afterwards, expiry of the result
    root: bytes | None  # `PrefixCache.adapter_root` of the request
    found: frozenset[BlockKey] = frozenset()  # blocks found by every rank that has answered
    # For the last `match`: the end of the hit and the number of the request's tokens, and the end
    # of the tokens that were found.
    reach: tuple[tuple[int, int], int] | None = None


@dataclass(eq=False)
class _Arrival:
    """A load of blocks into the pages of a request."""

    number: int
    pending: set[int]  # ranks that may still write to the pages
    deadline: float
    first_token: int
    arrived_until: int  # first token that will not arrive
    keys: frozenset[BlockKey]  # keys of all blocks
    error: str | None = None

    def fail_at(self, token: int, error: str) -> None:
        """Record that token `token` and later tokens will not arrive."""
        self.arrived_until = max(min(self.arrived_until, token), self.first_token)
        self.error = self.error or error


_PageLoad = SourceLoad[_Arrival]


@dataclass(eq=False)
class _Save:
    """Blocks that ranks are storing."""

    keys: tuple[BlockKey, ...]
    described: list[Described | None]
    epoch: int
    pending: set[int]  # ranks that have not answered
    # One entry per rank that has answered, with the outcome for each block.
    outcomes: list[tuple[str, ...] | None] = field(default_factory=list)


class StoreTier:
    """A cache tier in an external store, below the device and the host tier.

    All methods must be called in the manager's thread. The store is called in a separate thread
    that accesses only the tier's staging memory. Pages are copied on the current stream. The
    store's failures are counted in `stats` and never raised by the tier. After several consecutive
    failures, the tier stops calling the store for some time.

    The constructor creates a tier for a process that holds all pages. `StoreTier.over` creates one for
    several ranks.

    Args:
        manager: The manager, created with `enable_events`. The tier drains the manager's events. To
            receive the events yourself, set `announce` and call the tier's `drain_events`.
        pages: The device's pages.
        store: The store.
        model: See `fingerprint`. Only engines with equal fingerprints share blocks.
        rank: See `fingerprint`.
        contents: See `fingerprint`.
        cp_kv_cache_interleave_size: See `fingerprint`.
        host_pages: The pages of the host tier.
        write_from: "device": store each block once it is full. "host": store the blocks that the
            manager writes to its host tier (see `host_write`). None: store nothing. "auto": "host"
            if there is a host tier, otherwise "device".
        staging_bytes: Size in bytes of the host memory through which blocks are copied. Half of it is
            reserved for writes.
        timeout_s: Seconds after which a lookup or a complete load is abandoned and counts as a
            miss.
        announce: Whether to keep events for `drain_events`: the manager's events and, if the store
            can list its keys (`BlockStore.knows_keys`), the store's.
        circuit: Circuit breaker for a failing store.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The manager emits no events, a store cannot fill the manager's groups (see
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
        rank: str | Share = "",
        contents: str | Sequence[KVStorage] | None = None,
        cp_kv_cache_interleave_size: int | None = None,
        host_pages: Pages | None = None,
        write_from: Literal["auto", "device", "host"] | None = "auto",
        staging_bytes: int = 64 << 20,
        timeout_s: float = 2.0,
        announce: bool = False,
        circuit: Circuit | None = None,
    ) -> None:
        medium = _medium(manager, write_from)
        instance(pages, Pages, "pages")
        _check_pages("pages", pages.num_blocks, manager.pool.num_blocks)
        if medium == "host":
            if host_pages is None:
                raise ValueError(
                    "write_from is 'host': expected a manager with num_host_blocks, and host_pages"
                )
            instance(host_pages, Pages, "host_pages")
            _check_pages("host_pages", host_pages.num_blocks, manager.host_pool.num_blocks)
        prefixes = StoredPrefixes(manager)
        flag(announce, "announce")
        link = StoreRank(
            *(manager, pages, store),
            model=model,
            rank=rank,
            contents=contents,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            host_pages=host_pages if medium == "host" else None,
            staging_bytes=staging_bytes,
            timeout_s=timeout_s,
            circuit=circuit,
        )
        self._set_up(manager, [link], prefixes, medium, announce)

    @classmethod
    def over(
        cls,
        manager: KVCacheManager,
        ranks: Sequence[StoreRankLink],
        *,
        write_from: Literal["auto", "device", "host"] | None = "auto",
        announce: bool = False,
    ) -> StoreTier:
        """Create a tier over several ranks that together hold each block (tensor, pipeline and
        context parallelism).

        The tier makes the decisions for all ranks: only blocks that all ranks find are loaded, a
        request continues from the first token that any rank has not loaded, and a rank that fails
        or does not answer causes a miss. No rank waits for another rank.

        Args:
            manager: See `StoreTier`.
            ranks: For each rank, a `StoreRank` or a connection to one (`StoreRankLink`).
            write_from: See `StoreTier`.
            announce: See `StoreTier`.

        Returns:
            The tier.

        Raises:
            TypeError, ValueError: An argument is invalid, a rank was created for another manager or
                model, or the ranks together do not hold whole blocks (`Share`).
        """
        medium = _medium(manager, write_from)
        links = listed(ranks, "ranks")
        if not links:
            raise ValueError("ranks is empty: expected one rank or more")
        described = [_description(each, f"ranks[{i}]") for i, each in enumerate(links)]
        for i, each in enumerate(described):
            _check_rank(f"ranks[{i}]", each, manager, described[0].model, medium)
            for j in range(i):
                if links[i] is links[j]:
                    raise ValueError(f"ranks[{i}] is ranks[{j}]: expected another rank")
        has_states = not all(kind_class(each.kind).pages.has_slots for each in manager.groups)
        check_shares([each.rank for each in described], has_states)
        tier = cls.__new__(cls)
        prefixes = StoredPrefixes(manager)
        tier._set_up(manager, links, prefixes, medium, flag(announce, "announce"))
        return tier

    def _set_up(
        self,
        manager: KVCacheManager,
        ranks: list[StoreRankLink],
        prefixes: StoredPrefixes,
        medium: str | None,
        announce: bool,
    ) -> None:
        self._manager, self._ranks, self._prefixes = manager, ranks, prefixes
        described = [each.description for each in ranks]
        self._medium, self._model = medium, described[0].model
        self._epoch, self._store_epoch = manager.cache.epoch, 0
        self._epoch_of_rank = [0] * len(ranks)  # the tier's epoch when the rank joined
        self._timeout_s = max(each.timeout_s for each in described)
        self._num_writes = min(each.num_writes for each in described)
        self._per_call = min(each.num_per_call for each in described)
        self._keeps_events = announce
        self._announces = announce and all(each.knows_keys for each in described)
        self.stats = StoreStats()
        self._waiting = None
        if medium is not None:
            most = max(16 * self._num_writes, 4096)
            self._waiting = WaitingBlocks(_MEDIUMS[medium], most, describes=self._announces)
        self._number = 0
        self._lookups: dict[str, _Lookup] = {}
        self._asked: dict[int, _Lookup] = {}  # lookups that some ranks have not answered
        self._loads: SourceLoads[_Arrival] = SourceLoads(manager, self.stats)
        self._loading: dict[int, _PageLoad] = {}
        self._saves: dict[int, _Save] = {}
        # Removals of invalid blocks, and the ranks that have not confirmed them.
        self._removals: dict[int, tuple[RemoveBlocks, set[int]]] = {}
        self._states = [StoreResults() for _ in ranks]  # each rank's last results
        self._drained: list[CacheEvent] = []  # manager events that have not been processed yet
        self._events: list[CacheEvent] = []
        self._holders: dict[BlockKey, int] = {}  # one bit per rank: its store contains the block

    # Reads -----------------------------------------------------------------------------------------

    def match(self, request: Request) -> int | None:
        """Return the number of tokens after a new request's local hit that can be loaded from the
        store.

        The first call starts a lookup, and later calls return its result. If the result is older
        than `timeout_s`, the lookup is repeated. Call this method immediately before the step, and
        pass the number as `Admit.external` with `delayed=True`. Do not pass other external tokens
        or `max_host_blocks` for this request.

        Args:
            request: A request that has not been admitted.

        Returns:
            The number of tokens, or None while the lookup is running. 0 if the lookup takes longer
            than `timeout_s`, or while the circuit breaker prevents calls to the store.
        """
        instance(request, Request, "request")
        self._follow_epoch()
        self._take_over()
        first = self._prefixes.hit_tokens(request)
        lookup = self._lookups.get(request.request_id)
        now = time.monotonic()
        root = self._manager.cache.adapter_root(request)
        is_of_another = lookup is None or lookup.request is not request or lookup.root != root
        is_old = not is_of_another and not lookup.pending and now >= lookup.deadline
        if is_of_another or is_old or first < lookup.first_token:
            lookup = self._ask(request, first)
        if lookup.pending:
            if now < lookup.deadline:
                return None
            self.stats.timeouts += 1
            self._tell(GiveUp(lookup.number, is_late=True), ranks=lookup.pending)
            lookup.found = frozenset()
            self._has_ended(lookup)
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
        """Start to load the tokens that `match` found. The plan that admits the request must have
        been applied, or sent to all ranks.

        The request is in the receiving state until `poll` returns it.

        Raises:
            ValueError: The request was not matched, was admitted without `External.delayed`, or was
                admitted with a different number of tokens. Nothing has changed.
        """
        instance(request, Request, "request")
        self._follow_epoch()
        load = self._loads.admitted(request)
        first, stop = load.first_token, load.end_token
        groups = range(len(self._manager.groups))
        tables = [self._manager.block_ids(request, g).tolist() for g in groups]
        blocks = tuple(
            PageOfBlock(block.key, page, block.first_token)
            for block in self._prefixes.needed(request, first, stop)
            if (page := tables[block.key.group][block.column]) > 0
        )
        # A rank itself ends a load after `timeout_s`. The tier's deadline is later, to allow for
        # the time that messages to and from a rank in another process take.
        load.detail = _Arrival(
            number=self._next_number(),
            pending=self._all_ranks(),
            deadline=time.monotonic() + 2 * self._timeout_s,
            first_token=first,
            arrived_until=stop,
            keys=frozenset(block.key for block in blocks),
        )
        self._loads.begin(load)
        self._loading[load.detail.number] = load
        self._forget(request.request_id)
        self._tell(LoadBlocks(load.detail.number, blocks))

    def poll(self) -> list[Arrived]:
        """Copy arrived blocks into their pages, and return the loads that have ended.

        Call this method once per step, outside graph captures. Work that is launched on the current
        stream afterwards sees the filled pages.
        """
        self._follow_epoch()
        self._take_over()
        now = time.monotonic()
        arrived = []
        for load in self._loads.under_way:
            if load.detail.pending and now >= load.detail.deadline:
                self.stats.timeouts += 1
                self._abandon(load, "a rank did not answer in time")
            if not load.detail.pending:
                arrived += self._end(load)
        return arrived

    def cancel(self, request: Request) -> None:
        """Free a request that is matched or loading, and cancel its load.

        After a rank has received the order to stop, it no longer writes to the blocks. This order
        precedes all later plans, so the blocks can be reused immediately.
        """
        instance(request, Request, "request")
        self._forget(request.request_id)
        if request in self._loads:
            load = self._loads[request.request_id]
            self._abandon(load, "it was canceled")
            self._end(load)
        self._loads.free(request)

    @property
    def num_loading_requests(self) -> int:
        """Number of requests that have a load in flight."""
        return len(self._loads)

    @property
    def num_quarantined_blocks(self) -> int:
        """Always 0, because blocks can be reused as soon as their load is abandoned."""
        return self._loads.num_quarantined_blocks

    @property
    def is_busy(self) -> bool:
        """Whether loads, puts or removals are in flight, or blocks are waiting to be put."""
        is_moving = len(self._loads) > 0 or len(self._removals) > 0
        is_moving = is_moving or any(each.is_busy for each in self._states)
        return is_moving or self.num_waiting_blocks > 0

    def _follow_epoch(self) -> None:
        """Stop using blocks of the old weights if the manager has started a new epoch."""
        cache = self._manager.cache
        if cache.epoch == self._epoch:
            return
        self._epoch = cache.epoch
        self._store_epoch += 1
        self._events += map(removed_event, filter(self._is_on_all_ranks, self._holders))
        self._holders.clear()
        self._lookups.clear()
        self._asked.clear()
        self._loads.forget_all()
        for load in self._loads.under_way:
            self._abandon(load, "the weights have changed")
        self._tell(StartEpoch(cache.model_version))

    def _ask(self, request: Request, first: int) -> _Lookup:
        self._forget(request.request_id)
        keys = self._prefixes.candidates(request, first) if request.read_cache else []
        deadline = time.monotonic() + self._timeout_s
        root = self._manager.cache.adapter_root(request)
        lookup = _Lookup(self._next_number(), request, first, set(), deadline, root)
        self._lookups[request.request_id] = lookup
        if len(self._lookups) > _MOST_LOOKUPS:
            self._forget(next(iter(self._lookups)))
        if keys:
            lookup.found, lookup.pending = frozenset(keys), self._all_ranks()
            self._asked[lookup.number] = lookup
            self._tell(LookUp(lookup.number, tuple(keys)))
            self._take_over()  # a rank that may not call its store has already answered
        return lookup

    def _forget(self, request_id: str) -> None:
        """Discard the lookup of a request that is not loading."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            self._asked.pop(lookup.number, None)
        self._loads.forget(request_id)

    def _abandon(self, load: _PageLoad, error: str) -> None:
        """Cancel a request's load on all ranks. The request receives no tokens."""
        arrival = load.detail
        arrival.fail_at(load.first_token, error)
        self._tell(GiveUp(arrival.number, is_late=False), ranks=arrival.pending)
        arrival.pending = set()

    def _end(self, load: _PageLoad) -> list[Arrived]:
        arrival = load.detail
        del self._loading[arrival.number]
        if not self._loads.is_receiving(load):
            self._loads.drop(load)
            return []
        num_arrived = arrival.arrived_until - load.first_token
        return [self._loads.finish(load, num_arrived, arrival.error)]

    # Writes ----------------------------------------------------------------------------------------

    def save(self, report: StepReport) -> None:
        """Start to put new blocks into the store. Call this method after `KVCacheManager.report`
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
        self._follow_epoch()
        self._take_over()
        self._drain()
        if self._waiting is None:
            return
        if is_completed and step_id == self._manager.last_step_id:
            self._put_waiting()
        self.stats.dropped_blocks += self._waiting.num_dropped
        self._waiting.num_dropped = 0

    def _put_waiting(self) -> None:
        while len(self._waiting):
            count = min(self._num_writes - self._num_writing, self._per_call)
            if count <= 0 or not all(each.may_write for each in self._states):
                return
            taken = self._waiting.take(self._manager, count)
            if not taken:
                continue
            keys, pages, described = zip(*taken)
            number = self._next_number()
            self._saves[number] = _Save(keys, described, self._store_epoch, self._all_ranks())
            self._tell(SaveBlocks(number, keys, pages))

    def _has_saved(self, number: int, rank: int, outcomes: tuple[str, ...] | None) -> None:
        save = self._saves.get(number)
        if save is None or rank not in save.pending:
            return
        save.pending.discard(rank)
        save.outcomes.append(outcomes)
        if save.epoch == self._store_epoch:
            for key, described, each in zip(save.keys, save.described, outcomes or ()):
                if each in ("stored", "known"):
                    self._tell_stored(key, rank, described)
        if save.pending:
            return
        del self._saves[number]
        if None in save.outcomes:  # a rank's call failed
            return
        for of_ranks in zip(*save.outcomes):
            name = f"{min(of_ranks, key=_OUTCOMES.index)}_blocks"
            setattr(self.stats, name, getattr(self.stats, name) + 1)

    # Events ----------------------------------------------------------------------------------------

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager and of the store since the last call, in order.

        The medium of the store's events is "storage". Without `announce`, the list is empty.
        """
        self._follow_epoch()
        self._drain()
        events, self._events = self._events, []
        return events

    def _drain(self) -> list[CacheEvent]:
        """Return the manager's events since the last call."""
        events, self._drained = self._drained + self._manager.cache.drain_events(), []
        if self._waiting is not None:
            self._waiting.observe(events)
        if self._keeps_events:
            self._events += events
        return events

    def _tell_stored(self, key: BlockKey, rank: int, described: Described | None = None) -> None:
        """Record that a rank's store contains a block. Emit an event if the stores of all ranks now
        contain it.
        """
        held = self._holders.get(key, 0)
        if not self._announces or held >> rank & 1:
            return
        self._holders[key] = held | 1 << rank
        if self._is_on_all_ranks(key):
            self._events.append(stored_event(self._manager, key, described))

    def _tell_evicted(self, keys: Sequence[BlockKey], rank: int) -> None:
        for key in keys:
            if self._is_on_all_ranks(key):
                self._events.append(removed_event(key))
            if left := self._holders.pop(key, 0) & ~(1 << rank):
                self._holders[key] = left

    def _tell_found(self, keys: Sequence[BlockKey], rank: int) -> None:
        """Report the blocks that a newly opened store contains."""
        for key in keys:
            if key.group >= len(self._manager.groups):
                continue
            if len(key.block_hash) == self._manager.cache.hash_bytes:
                self._tell_stored(key, rank)

    def _is_on_all_ranks(self, key: BlockKey) -> bool:
        return self._holders.get(key, 0) == (1 << len(self._ranks)) - 1

    # Common ----------------------------------------------------------------------------------------

    def invalidate(self, ids: np.ndarray) -> dict[str, int]:
        """Call `KVCacheManager.invalidate`, and remove the affected blocks from the store, too.

        This includes blocks that are being put. If the removal fails, it is repeated before the
        next call to the store. Blocks that were computed from invalid blocks, but had already been
        evicted from the cache, remain in the store. If the store may contain such blocks, start
        a new epoch.

        Args:
            ids: See `KVCacheManager.invalidate`.

        Returns: The result of `KVCacheManager.invalidate`.
        """
        self._follow_epoch()
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
        for load in self._loads.under_way:
            if not keys.isdisjoint(load.detail.keys):
                self._abandon(load, "its blocks were found to be invalid")
        order = RemoveBlocks(self._next_number(), tuple(keys), self._manager.cache.model_version)
        self._removals[order.number] = order, self._all_ranks()
        self._tell(order)
        return affected

    def replace_rank(self, index: int, rank: StoreRankLink) -> None:
        """Replace a rank whose process has died.

        The other ranks keep their state. Loads in flight end without any tokens, and lookups in
        flight find nothing. The new rank removes the invalid blocks that the dead rank has not
        removed from the store. The pages of the new rank are empty, so free the running requests
        and reset the cache before the next step.

        Args:
            index: Index of the rank.
            rank: The new rank, created with the current `cache_identity` of the manager.

        Raises:
            TypeError, ValueError: An argument is invalid, or the new rank's description differs
                from that of the dead rank. Nothing has changed.
        """
        index = integer(index, "index", 0, len(self._ranks) - 1)
        new = _description(rank, "rank")
        self._follow_epoch()
        _check_rank("rank", new, self._manager, self._model, self._medium)
        for i, each in enumerate(self._ranks):
            if each is rank:
                raise ValueError(f"rank is already rank {i} of this tier: expected a new one")
        described = self._ranks[index].description
        for name in ("rank", "num_writes", "num_per_call", "knows_keys"):
            given, expected = getattr(new, name), getattr(described, name)
            if given != expected:
                raise ValueError(
                    f"rank has {name} {shown(given)}: expected {shown(expected)}, as before"
                )
        self._ranks[index] = rank
        self._states[index] = StoreResults()
        for order, pending in self._removals.values():
            if index in pending:
                self._tell(order, ranks={index})
        for load in self._loads.under_way:
            self._abandon(load, "a rank was replaced")
        for lookup in [*self._asked.values()]:
            self._has_found(lookup.number, index, frozenset())
        self._epoch_of_rank[index] = self._store_epoch
        self._tell_evicted([*self._holders], index)
        for number in [*self._saves]:
            self._has_saved(number, index, None)

    @property
    def is_dead(self) -> bool:
        """Whether the store is considered dead after repeated failures, so that only occasional
        trial calls are made.
        """
        return any(each.is_dead for each in self._states)

    @property
    def num_waiting_blocks(self) -> int:
        """Number of blocks that are waiting to be put or being put."""
        return self._num_writing + (0 if self._waiting is None else len(self._waiting))

    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancel all loads, wait for the puts in flight, and stop the store's thread.

        Args:
            timeout_s: Maximum time to wait for each rank, in seconds.

        Returns:
            Whether the thread has ended. If not, the thread continues in the background and keeps
            its memory allocated.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        for load in self._loads.under_way:
            self._abandon(load, "the tier was closed")
            self._end(load)
        is_over = [rank.close(timeout_s) for rank in self._ranks]
        self._take_over()
        return all(is_over)

    @property
    def _num_writing(self) -> int:
        """Number of blocks that are being stored."""
        return sum(len(save.keys) for save in self._saves.values())

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _all_ranks(self) -> set[int]:
        return set(range(len(self._ranks)))

    def _tell(self, order: Order, ranks: set[int] | None = None) -> None:
        """Send an order to the given ranks, or to all ranks."""
        for i, rank in enumerate(self._ranks):
            if ranks is None or i in ranks:
                state = self._states[i]
                state.is_busy = True
                state.may_write &= not state.is_dead  # the order may be the trial call
                rank.begin([order])

    def _take_over(self) -> None:
        """Process the results that the ranks have returned since the last call of this method."""
        for load in self._loads.under_way:
            if load.detail.pending and not self._loads.is_receiving(load):
                self._abandon(load, "its request was freed")
        for i, rank in enumerate(self._ranks):
            while (results := rank.take_results()) is not None:
                self._states[i] = results
                for name, count in results.counts.items():
                    setattr(self.stats, name, getattr(self.stats, name) + count)
                for entry in results.entries:
                    self._process(entry, i)

    def _process(self, entry: Result, rank: int) -> None:
        if isinstance(entry, Found):
            self._has_found(entry.number, rank, entry.keys)
        elif isinstance(entry, Loaded):
            load = self._loading.get(entry.number)
            if load is not None and rank in load.detail.pending:
                load.detail.pending.discard(rank)
                if entry.failed_at is not None:
                    load.detail.fail_at(entry.failed_at, entry.error)
        elif isinstance(entry, Saved):
            self._has_saved(entry.number, rank, entry.outcomes)
        elif isinstance(entry, Removed):
            _, pending = self._removals.get(entry.number, (None, set()))
            pending.discard(rank)
            if not pending:
                self._removals.pop(entry.number, None)
        elif entry.epoch + self._epoch_of_rank[rank] == self._store_epoch:
            tell = self._tell_found if isinstance(entry, Held) else self._tell_evicted
            tell(entry.keys, rank)

    def _has_found(self, number: int, rank: int, keys: frozenset[BlockKey]) -> None:
        lookup = self._asked.get(number)
        if lookup is None or rank not in lookup.pending:
            return
        lookup.pending.discard(rank)
        lookup.found &= keys
        if not lookup.pending or not lookup.found:  # later answers cannot change the result
            self._has_ended(lookup)

    def _has_ended(self, lookup: _Lookup) -> None:
        """Record that the result of a lookup is now known."""
        del self._asked[lookup.number]
        lookup.pending, lookup.deadline = set(), time.monotonic() + self._timeout_s


def _medium(manager: KVCacheManager, write_from: object) -> str | None:
    """Return the source of blocks to store: "device", "host" or None. Raises TypeError or
    ValueError.
    """
    instance(manager, KVCacheManager, "manager")
    if not manager.options.enable_events:
        raise ValueError(
            "manager has enable_events=False: expected True, because the tier reads its events"
        )
    if isinstance(write_from, str) and write_from == "auto":
        return "device" if manager.host_pool is None else "host"
    if write_from is not None and (not isinstance(write_from, str) or write_from not in _MEDIUMS):
        raise ValueError(
            f"write_from is {shown(write_from)}: expected 'auto', 'device', 'host' or None"
        )
    if write_from == "host" and manager.host_pool is None:
        raise ValueError(
            "write_from is 'host': expected a manager with num_host_blocks, and host_pages"
        )
    return write_from


def _check_pages(name: str, num_pages: int, expected: int) -> None:
    if num_pages < expected:
        where = "the manager's host tier" if "host" in name else "the manager's pool"
        raise ValueError(f"{name} has {num_pages} pages: expected {expected}, as in {where}")


def _description(rank: StoreRankLink, name: str) -> RankDescription:
    found = getattr(rank, "description", None)
    if not isinstance(found, RankDescription):
        raise TypeError(f"{name} is {shown(rank)}: expected a StoreRank, or a StoreRankLink")
    return found


def _check_rank(
    name: str, rank: RankDescription, manager: KVCacheManager, model: str, medium: str | None
) -> None:
    if rank.identity != cache_identity(manager):
        raise ValueError(
            f"{name} was created for a manager with other groups, hashes or version of the weights: "
            "expected the current cache_identity of this manager"
        )
    if rank.model != model:
        raise ValueError(f"{name} has model {shown(rank.model)}: expected {shown(model)}")
    world_size = manager.cache.context_parallel.world_size
    if isinstance(rank.rank, Share) and rank.rank.cp_world_size != world_size:
        raise ValueError(
            f"{name} has rank {rank.rank} with cp_world_size={rank.rank.cp_world_size}: expected "
            f"cp_world_size={world_size}, as in the manager"
        )
    _check_pages(name, rank.num_pages, manager.pool.num_blocks)
    if medium == "host":
        _check_pages(f"{name}.host_pages", rank.num_host_pages, manager.host_pool.num_blocks)
    elif medium == "device" and rank.num_host_pages:
        raise ValueError(f"{name} has host_pages: expected none, because write_from is 'device'")
