# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a store tier. It copies blocks between the rank's pages and a store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.checks import MAX_INT64, instance, integer, listed, seconds
from kvcache.checks import number as checked_number
from kvcache.worker import KVStorage, Pages, SwapEngine, SwapJob
from kvcache.worker.pages.page_copy import PageCopy
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.store import answers
from kvcache_exchange.store.base import BlockStore
from kvcache_exchange.store.identity import Share, cache_identity, identity_of
from kvcache_exchange.store.orders import (
    Evicted,
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
    SaveBlocks,
    Saved,
    StoreResults,
)
from kvcache_exchange.store.staging import ValueStaging
from kvcache_exchange.store.thread import READ, WRITE, Call, StoreThread
from kvcache_exchange.store.value_format import BlockKey, faults, key_of_text, key_text, seal

# Limits on bytes and blocks per call. The limits are small enough that a read waits only
# milliseconds for a write, and large enough to spread the fixed cost of a call over many blocks.
# Mooncake accepts at most 1,024 keys per call.
_BYTES_PER_CALL, _LEAST_PER_CALL, _MOST_PER_CALL = 8 << 20, 8, 1024
_LISTED = "listed"  # tag of the call that lists the keys
_TOO_LATE = "the store did not answer in time"
_WRONG = {
    "missing": "the store no longer has a block",
    "corrupt": "the digest of a block is wrong",
    "misfit": "a block has the wrong size or key",
    "error": "a call to the store failed",
}


@dataclass(eq=False)
class _Load:
    """A load in flight."""

    number: int
    blocks: deque[PageOfBlock]  # blocks still to be requested
    deadline: float
    calls: list[Call] = field(default_factory=list)  # calls to the store in flight
    failed_at: int | None = None
    error: str | None = None

    def fail_at(self, token: int, error: str) -> None:
        """Record that token `token` and later tokens will not arrive, and stop requesting
        blocks.
        """
        self.failed_at = token if self.failed_at is None else min(self.failed_at, token)
        self.blocks.clear()
        self.error = self.error or error


@dataclass(eq=False)
class _Get:
    """A call to `get`, with the staged values into which the blocks are read."""

    load: _Load
    numbers: list[int]
    blocks: list[PageOfBlock]
    fingerprint: bytes


@dataclass(eq=False)
class _Put:
    """A call to `put`."""

    order: SaveBlocks
    numbers: list[int]
    fingerprint: bytes
    invalid: set[BlockKey] = field(default_factory=set)  # invalidated in the meantime


class StoreRank:
    """A rank's part of a `StoreTier`: the rank's pages, and a store for their blocks.

    A tier over several ranks sends orders to each of them (`StoreTier.over`). The rank starts to
    execute orders in `begin`, and returns their results from `take_results`. Call both methods in
    the thread that launches the rank's steps, outside graph captures. The store is called in a
    separate thread that accesses only the rank's staging memory; pages are copied on the current
    stream. Store failures never raise exceptions. Each rank serves a single tier, because tiers
    number their orders independently.

    Args:
        manager: The manager, or its `cache_identity` if the manager is in another process.
        pages: The rank's device pages.
        store: The rank's store.
        model: See `fingerprint`.
        rank: See `fingerprint`.
        contents: See `fingerprint`.
        cp_kv_cache_interleave_size: See `fingerprint`.
        host_pages: The rank's host tier pages.
        staging_bytes: Size in bytes of the host memory through which blocks are copied. Half of it is
            reserved for writes.
        timeout_s: Seconds after which a load is abandoned.
        circuit: Circuit breaker for a failing store.

    Raises:
        TypeError, ValueError: An argument is invalid.
        MemoryError: The host does not have enough memory for staging.

    Example:
        >>> from kvcache import KVStorage
        >>> from kvcache_exchange.store import DiskStore
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, enable_events=True)
        >>> storages = [KVStorage(9, 16, num_kv_heads=4, head_size=64) for _ in range(2)]
        >>> ranks = [
        ...     StoreRank(manager, each.pages, DiskStore(f"/var/cache/kv/{i}", "1GiB"), model="m",
        ...               rank=Share.of_rank(num_layers=1, num_heads=8, tp_rank=i, tp_size=2))
        ...     for i, each in enumerate(storages)
        ... ]  # doctest: +SKIP
        >>> tier = StoreTier.over(manager, ranks)  # doctest: +SKIP
    """

    def __init__(
        self,
        manager: KVCacheManager | str,
        pages: Pages,
        store: BlockStore,
        *,
        model: str,
        rank: str | Share = "",
        contents: str | Sequence[KVStorage] | None = None,
        cp_kv_cache_interleave_size: int | None = None,
        host_pages: Pages | None = None,
        staging_bytes: int = 64 << 20,
        timeout_s: float = 2.0,
        circuit: Circuit | None = None,
    ) -> None:
        instance(pages, Pages, "pages")
        instance(store, BlockStore, "store")
        if host_pages is not None:
            instance(host_pages, Pages, "host_pages")
        if circuit is not None:
            instance(circuit, Circuit, "circuit")
        identity = manager if isinstance(manager, str) else cache_identity(manager)
        self._pages, self._store = pages, store
        described = rank, contents, cp_kv_cache_interleave_size
        self._identity = identity_of(identity, pages, model, *described)
        own = self._identity.digest
        self._fingerprint, self._epoch = own, 0
        self._timeout_s = checked_number(timeout_s, "timeout_s", "seconds")
        if not 0 < self._timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}: expected seconds, more than 0")
        self._circuit = Circuit() if circuit is None else circuit
        self._staging = ValueStaging(pages, integer(staging_bytes, "staging_bytes", most=MAX_INT64))
        fitting = _BYTES_PER_CALL // self._staging.value_bytes
        self.description = RankDescription(
            identity=identity,
            model=model,
            rank=rank,
            fingerprint=own,
            num_pages=pages.num_blocks,
            num_host_pages=0 if host_pages is None else host_pages.num_blocks,
            num_writes=max(self._staging.num_values // 2, 1),
            num_per_call=min(max(fitting, _LEAST_PER_CALL), _MOST_PER_CALL),
            timeout_s=self._timeout_s,
            knows_keys=store.knows_keys,
        )
        self._swaps = SwapEngine(pages, self._staging.pages)
        self._from_host = None
        if host_pages is not None:
            self._from_host = PageCopy(host_pages, self._staging.pages)
        self._lookups: dict[int, Call] = {}
        self._loads: dict[int, _Load] = {}
        self._puts: set[_Put] = set()  # puts in flight
        self._invalid: deque[list[str]] = deque()  # keys still to be removed from the store
        self._removing: deque[int] = deque()  # orders without a reported result
        self._removal: Call | None = None  # the removal in flight
        # Copies in flight, and the staged values from which they read.
        self._arriving: list[tuple[SwapJob, list[int]]] = []
        self._slow: Call | None = None  # the last call that was counted as overdue
        self._results = StoreResults()
        self._reported: tuple[bool, bool, bool] | None = None  # the last reported state
        pages.described_by.add(self)
        self._thread = StoreThread(store, self._open)
        self._thread.submit(lambda: None, READ)  # open the store before the first lookup

    def begin(self, orders: Sequence[Order]) -> None:
        """Start to execute a tier's orders. Blocks to be stored are copied on the current stream.

        Args:
            orders: The orders. The caller must have applied all step plans that were sent before
                them.

        Raises:
            TypeError: An order is of an unknown type.
        """
        orders = listed(orders, "orders")
        for i, order in enumerate(orders):
            instance(order, Order, f"orders[{i}]")
        self._reported = None
        for order in orders:
            if isinstance(order, LookUp):
                self._look_up(order)
            elif isinstance(order, LoadBlocks):
                deadline = time.monotonic() + self._timeout_s
                load = _Load(order.number, deque(order.blocks), deadline)
                self._loads[order.number] = load
                self._ask_for_blocks(load)
            elif isinstance(order, SaveBlocks):
                self._save(order)
            elif isinstance(order, GiveUp):
                self._give_up(order)
            elif isinstance(order, RemoveBlocks):
                self._remove(order)
            else:
                self._identity = replace(self._identity, version=order.version)
                self._fingerprint = self._identity.digest
                self._epoch += 1
                if self._store.knows_keys:  # it may have blocks of the new version
                    self._thread.submit(self._list, READ, tag=_LISTED)

    def take_results(self) -> StoreResults | None:
        """Copy arrived blocks into their pages, and return the results since the last call. None: nothing
        has changed.

        Call this method regularly, also between steps. Work that is launched on the current stream
        afterwards sees the filled pages.
        """
        self._take_over()
        now = time.monotonic()
        for load in [*self._loads.values()]:
            if load.blocks and now >= load.deadline:
                load.fail_at(load.blocks[0].first_token, _TOO_LATE)
            self._ask_for_blocks(load)
            if now >= load.deadline:
                for call in load.calls:
                    load.fail_at(call.tag.blocks[0].first_token, _TOO_LATE)
                    self._abandon_late(call)
                load.calls.clear()
            if not load.blocks and not load.calls:
                del self._loads[load.number]
                self._results.entries.append(Loaded(load.number, load.failed_at, load.error))
        while len(self._removing) > len(self._invalid):
            self._results.entries.append(Removed(self._removing.popleft()))
        may_write = not self._is_slow() and self._circuit.would_allow
        is_busy = bool(self._arriving or self._puts or self._invalid)
        state = may_write, self._circuit.is_open, is_busy
        if state == self._reported and not self._results.entries and not self._results.counts:
            return None
        results, self._results, self._reported = self._results, StoreResults(), state
        results.may_write, results.is_dead, results.is_busy = state
        return results

    def close(self, timeout_s: float = 10.0) -> bool:
        """Abandon all loads, wait for the puts in flight, and stop the store's thread.

        Args:
            timeout_s: Maximum time to wait, in seconds.

        Returns:
            Whether the thread has ended. If not, the thread continues in the background and keeps
            its memory allocated.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        for number in [*self._loads]:
            self._give_up(GiveUp(number, is_late=False))
        if self._invalid:  # one last attempt, in case an earlier removal has failed
            self._thread.submit(self._remove_invalid, READ)
        is_over = self._thread.close(timeout_s)
        self._take_over()
        self._pages.described_by.discard(self)
        return is_over

    # Reads -----------------------------------------------------------------------------------------

    def _look_up(self, order: LookUp) -> None:
        if not self._may_ask():
            self._count("unasked")
            self._results.entries.append(Found(order.number, frozenset()))
            return
        self._count("lookups")
        texts = self._texts(order.keys)
        call = self._thread.submit(lambda: self._exists(texts), READ, tag=order)
        self._lookups[order.number] = call

    def _ask_for_blocks(self, load: _Load) -> None:
        while load.blocks:
            # Do not use the staged values that are reserved for puts.
            reserved = self.description.num_writes - self._num_writing
            count = min(len(load.blocks), self._staging.num_free - reserved)
            if count <= 0:
                return
            count = min(count, self.description.num_per_call)
            blocks = [load.blocks.popleft() for _ in range(count)]
            numbers = [self._staging.take() for _ in blocks]
            get = _Get(load, numbers, blocks, self._fingerprint)
            load.calls.append(self._thread.submit(lambda g=get: self._get(g), READ, tag=get))

    def _get(self, get: _Get) -> list[str | None]:
        """Read blocks. Runs in the store's thread. Returns each block's fault, or None for a valid
        block.
        """
        own, numbers, keys = get.fingerprint, get.numbers, [block.key for block in get.blocks]
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
        """Process the blocks that a finished call has read, and copy blocks of active loads into
        their pages.
        """
        get: _Get = call.tag
        load = get.load
        if call in load.calls:
            load.calls.remove(call)
        each_found = ["error"] * len(get.blocks) if call.result is None else call.result
        right = []
        for number, block, found in zip(get.numbers, get.blocks, each_found):
            if found is None:
                right.append((number, block.page, block))
                continue
            load.fail_at(block.first_token, _WRONG[found])
            if found != "error":
                self._count(f"{found}_blocks")
        pairs = np.array([pair[:2] for pair in right], np.int64).reshape(-1, 2)
        if not len(pairs) or self._loads.get(load.number) is not load:
            self._staging.give_back(get.numbers)
            return
        job = self._swaps.swap_in(pairs)
        self._swaps.before_read(job)
        if job.error is not None:
            first = min(block.first_token for _, _, block in right)
            load.fail_at(first, f"blocks were not copied: {job.error}")
        self._count("loaded_blocks", len(pairs))
        self._count("loaded_bytes", len(pairs) * self._pages.page_bytes)
        self._arriving.append((job, get.numbers))

    def _give_up(self, order: GiveUp) -> None:
        call = self._lookups.pop(order.number, None)
        if call is not None and order.is_late:  # the tier counts the timeout
            call.is_given_up = True
            self._circuit.failed()
        load = self._loads.pop(order.number, None)
        for call in [] if load is None else load.calls:
            call.is_given_up = True

    # Writes ----------------------------------------------------------------------------------------

    def _save(self, order: SaveBlocks) -> None:
        num_free = self.description.num_writes - self._num_writing
        if len(order.keys) > num_free or not self._may_ask():
            self._results.entries.append(Saved(order.number, ("dropped",) * len(order.keys)))
            return
        put = _Put(order, [self._staging.take() for _ in order.keys], self._fingerprint)
        pairs = np.array([*zip(order.pages, put.numbers)], np.int64).reshape(-1, 2)
        job = None
        if self._from_host is not None:
            self._from_host.copy(pairs)
        else:
            job = self._swaps.swap_out(pairs)
            self._swaps.before_write(pairs[:, 0])
        self._puts.add(put)
        self._thread.submit(lambda: self._put(put, job), WRITE, tag=put)

    def _put(self, put: _Put, job: SwapJob | None) -> list[str]:
        """Put blocks into the store.

        Runs in the store's thread. Returns "stored", "known", "refused" or "dropped" for each
        block.
        """
        own, keys, numbers = put.fingerprint, put.order.keys, put.numbers
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

    def _has_put(self, call: Call) -> None:
        put: _Put = call.tag
        self._puts.remove(put)
        self._staging.give_back(put.numbers)
        outcomes = None if call.error is not None else tuple(call.result)
        if outcomes is not None:
            self._count("stored_bytes", outcomes.count("stored") * self._pages.page_bytes)
        self._results.entries.append(Saved(put.order.number, outcomes))

    def _remove(self, order: RemoveBlocks) -> None:
        for put in self._puts:  # first, because the removal may start immediately
            put.invalid.update(set(order.keys).intersection(put.order.keys))
        own = replace(self._identity, version=order.version).digest
        self._invalid.append([key_text(own, key) for key in order.keys])
        self._removing.append(order.number)
        self._removal = self._thread.submit(self._remove_invalid, READ)

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

    # Common ----------------------------------------------------------------------------------------

    def _list(self) -> list[str]:
        """Return the store's keys. Runs in the store's thread."""
        self._remove_invalid()
        return answers.texts(self._store.keys(), "keys")

    def _open(self) -> list[str]:
        """Open the store. Runs in the store's thread."""
        self._store.open(self._staging.memory, self._staging.value_bytes)
        return answers.texts(self._store.keys(), "keys")

    @property
    def _num_writing(self) -> int:
        """Number of staged values that are being written."""
        return sum(len(put.numbers) for put in self._puts)

    def _texts(self, keys: Sequence[BlockKey]) -> list[str]:
        return [key_text(self._fingerprint, key) for key in keys]

    def _keys(self, texts: Sequence[str]) -> tuple[BlockKey, ...]:
        """Return the store's keys that belong to the current epoch."""
        found = (key_of_text(self._fingerprint, text) for text in texts)
        return tuple(key for key in found if key is not None)

    def _count(self, name: str, number: int = 1) -> None:
        counts = self._results.counts
        counts[name] = counts.get(name, 0) + number

    def _may_ask(self) -> bool:
        """Return whether the store may be called: it is not considered dead, or a trial call is
        due.
        """
        return not self._is_slow() and self._circuit.allows()

    def _is_slow(self) -> bool:
        """Return whether the call in progress is overdue. Each overdue call is counted once."""
        running = self._thread.running
        if running is None or time.monotonic() - running.begun_at <= self._timeout_s:
            return False
        if running is not self._slow:
            self._slow = running
            self._count("timeouts")
            self._circuit.failed()
        return True

    def _abandon_late(self, call: Call) -> None:
        """Abandon a call whose deadline has passed."""
        call.is_given_up = True
        self._count("timeouts")
        self._circuit.failed()

    def _take_over(self) -> None:
        """Process the calls that the thread has finished since the last call of this method."""
        self._arriving = [each for each in self._arriving if not self._has_arrived(*each)]
        for call in self._thread.take_over():
            if call.tag == "opened":
                self._results.entries.append(Held(self._keys(call.result), self._epoch))
                continue
            if call.error is not None:
                self._count("errors")
                self._circuit.failed()
            elif not call.is_given_up:
                self._circuit.worked()
            if isinstance(call.tag, _Get):
                self._got(call)
            elif isinstance(call.tag, _Put):
                self._has_put(call)
            elif isinstance(call.tag, LookUp):
                self._has_looked_up(call)
            elif call.tag == _LISTED and call.result is not None:
                self._results.entries.append(Held(self._keys(call.result), self._epoch))
            if call.evicted:
                self._count("evicted_blocks", len(call.evicted))
                self._results.entries.append(Evicted(self._keys(call.evicted), self._epoch))
        if self._invalid and self._removal.is_over and self._may_ask():  # the call failed
            self._removal = self._thread.submit(self._remove_invalid, READ)

    def _has_looked_up(self, call: Call) -> None:
        order: LookUp = call.tag
        if self._lookups.pop(order.number, None) is None:
            return  # the lookup was abandoned
        keys = frozenset()
        if call.error is None and call.result is not None:
            keys = frozenset(key for key, has in zip(order.keys, call.result) if has)
        self._results.entries.append(Found(order.number, keys))

    def _has_arrived(self, job: SwapJob, numbers: list[int]) -> bool:
        if not job.poll():
            return False
        self._staging.give_back(numbers)
        return True
