# SPDX-License-Identifier: Apache-2.0
"""Carries out hints between an engine's steps."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

from kvcache.allocator import Admit, External, KVCacheManager, Request
from kvcache.checks import flag, instance, integer, listed, shown
from kvcache.sources import Arrived, KVSource
from kvcache.step import Status
from kvcache_exchange.hints import limits
from kvcache_exchange.hints.guests import Guest, Stage
from kvcache_exchange.hints.limits import Ledger, Spent
from kvcache_exchange.hints.pins import HintPins
from kvcache_exchange.hints.prefixes import HintedPrefix
from kvcache_exchange.hints.receipts import PendingHint, ReceiptWriter
from kvcache_exchange.hints.stats import HintStats
from kvcache_exchange.hints.vocabulary import Hint, Receipt

_GAVE_WAY = "requests needed the blocks"


class HintExecutor:
    """Carries out hints for one manager, within limits.

    Pins take effect immediately. Prefetches need steps, in which the executor admits guests:
    internal requests that hold blocks but are never computed. The engine makes these calls in each
    step, in the manager's thread:

        hints.expire()
        for request in new: hints.look(request)
        admits = hints.admits()                       # guests, after all other new requests
        plan = manager.step(..., new=[..., *admits])
        hints.planned(the statuses of the admits)
        for request in those that were admitted: hints.hit(request)
        ...                                           # apply the plan
        hints.begin()
        ...                                           # compute, and report the step to the manager
        hints.completed()                             # or `failed`, after `KVCacheManager.abort`

    In addition, the engine calls `arrived` for each guest load that a source's `poll` returns, and
    `give_way` if a request has to wait for blocks or a row.

    Guests use only free or evictable blocks, and never pinned blocks. They give way to requests,
    except to requests that are admitted in the same step.

    Args:
        manager: The manager.
        sources: The engine's sources, in order of preference.
        clock: Returns the time in seconds.

    Raises:
        TypeError: An argument has the wrong type.

    Example:
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> request = Request("r1", range(40))
        >>> plan = manager.step(new=[request])
        >>> HintExecutor(manager).submit(request, Hint(intent="pin", ttl_s=5)).receipt.num_tokens
        32
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        sources: Sequence[KVSource] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        instance(manager, KVCacheManager, "manager")
        self._manager, self._sources = manager, listed(sources, "sources", "a sequence of sources")
        if not callable(clock):
            raise TypeError(f"clock is {shown(clock)}: expected a function that returns seconds")
        self._clock = clock
        self.stats = HintStats()
        self._receipts = ReceiptWriter(self.stats)
        self._prefetched = Ledger(int(limits.SHARE * manager.pool.num_total))
        self._pins = HintPins(manager, self._receipts)
        self._guests: list[Guest] = []
        self._asked: list[Guest] = []  # guests of the last `admits`
        self._numbers = itertools.count()
        self._looked: dict[str, int] = {}  # number of tokens on the device, by request ID
        self._gives_way = False
        # Called after tokens [first, stop) of a guest have been loaded from a source, before the
        # guest is freed.
        self.on_load: Callable[[Request, int, int], object] | None = None
        is_cached = any(group.cached for group in manager.groups)
        self._cannot: str | None = None
        if not (is_cached and manager.options.enable_caching):
            self._cannot = "the manager caches no blocks"
        elif manager.options.hash_algorithm.startswith("engine:"):
            self._cannot = "the hashes of the manager are computed by the engine"
        self._has_steps = not (
            manager.options.engine_copies_states
            and any(group.options.get("num_speculative_blocks") for group in manager.groups)
        )

    # Called by clients ------------------------------------------------------------------------------

    def submit(
        self,
        of: Request,
        hint: Hint,
        *,
        on_receipt: Callable[[Receipt], object] | None = None,
    ) -> PendingHint:
        """Submit a hint about a request's tokens. The manager does not need to know the request.

        Args:
            of: A request with the prefix's tokens, adapter, images and salt. It is not modified.
            hint: The hint.
            on_receipt: Called with the receipt.

        Returns:
            The submitted hint, which already has a receipt if no step is needed.

        Raises:
            TypeError: An argument has the wrong type.
        """
        instance(of, Request, "of")
        instance(hint, Hint, "hint")
        if on_receipt is not None and not callable(on_receipt):
            raise TypeError(f"on_receipt is {shown(on_receipt)}: expected a function or None")
        pending = PendingHint(hint, on_receipt)
        if self._cannot is not None:
            return self._receipts.refuse(pending, self._cannot, of.num_tokens)
        count = of.num_tokens if hint.num_tokens is None else hint.num_tokens
        if count > of.num_tokens:
            wrong = f"num_tokens is {count}: expected at most {of.num_tokens}, the number of tokens"
            return self._receipts.refuse(pending, wrong)
        self.expire()
        prefix = HintedPrefix(self._manager, of, count)
        if not prefix.num_tokens:
            return self._receipts.refuse(pending, "the tokens fill no whole block", count)
        if hint.intent == "pin":
            self._pins.pin(pending, prefix, self._clock())
        elif not self._has_steps:
            return self._receipts.refuse(pending, "the manager serves no steps", count)
        else:
            self._prefetch(pending, prefix)
        return pending

    def _prefetch(self, pending: PendingHint, prefix: HintedPrefix) -> None:
        if prefix.on_device() == prefix.num_tokens:
            self._receipts.carried_out(pending, prefix, prefix.num_tokens)
        elif self._manager.host_pool is None and not self._sources:
            self._finish_prefetch(pending, prefix, "there is neither a host tier nor a source")
        else:
            self._queue(pending, prefix)

    def _queue(self, pending: PendingHint, prefix: HintedPrefix) -> None:
        if len(self._guests) >= limits.MAX_PENDING:
            self._receipts.refuse(
                pending,
                f"{len(self._guests)} hints are waiting: expected fewer than {limits.MAX_PENDING}",
                prefix.num_asked_tokens,
            )
            return
        wait_s = limits.PREFETCH_TIMEOUT_S
        if pending.hint.ttl_s is not None:
            wait_s = min(pending.hint.ttl_s, wait_s)
        name = f"kv-hint:{next(self._numbers)}"
        self._guests.append(Guest(pending, prefix, name, self._clock() + wait_s))

    # Called by the engine ---------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of hints that have no receipt yet."""
        return len(self._guests)

    @property
    def num_rows(self) -> int:
        """Number of rows of the manager that guests occupy."""
        return sum(each.stage is not Stage.WAITING for each in self._guests)

    @property
    def num_pinned_blocks(self) -> int:
        """Number of blocks of the share of pins that are in use."""
        return self._pins.ledger.most - self._pins.ledger.room()

    def expire(self) -> None:
        """Remove pins whose deadline has passed, and release the shares of expired prefetches.

        Call this method before each step. `submit` calls it as well.
        """
        now = self._clock()
        self._looked.clear()
        self._pins.expire(now)
        for each in self._prefetched.pop_expired(now):
            self.stats.unused_tokens += each.num_tokens

    def admits(self, may_admit: bool = True, num_rows: int | None = None) -> list[Admit]:
        """Return the guests to admit in the next step, after all other new requests.

        Args:
            may_admit: Whether new guests may be admitted. False if requests are waiting for blocks.
            num_rows: Maximum number of guests. None: no limit.

        Returns:
            The guests. Pass their statuses to `planned`.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        flag(may_admit, "may_admit")
        if num_rows is not None:
            integer(num_rows, "num_rows", 0)
        if self._gives_way:
            self._leave()
        self._refuse_late()
        self._asked, admits = [], []
        most = limits.MAX_ACTIVE - self.num_rows
        if num_rows is not None:
            most = min(most, num_rows)
        if not may_admit:
            return []
        for guest in list(self._guests):
            if len(admits) >= most:
                break
            if guest.stage is Stage.WAITING and (admit := self._admit(guest)) is not None:
                self._asked.append(guest)
                admits.append(admit)
        return admits

    def planned(self, statuses: Sequence[int]) -> None:
        """Process the statuses that a plan returned for the guests of the last `admits`.

        Args:
            statuses: The guests' statuses, in order.

        Raises:
            ValueError: The number of statuses is wrong.
        """
        if len(statuses) != len(self._asked):
            raise ValueError(
                f"statuses has {len(statuses)} entries: expected {len(self._asked)}, one per guest"
            )
        asked, self._asked = self._asked, []
        for guest, status in zip(asked, statuses):
            if status == Status.SERVED:
                guest.stage = Stage.PLANNED
                computed = self._manager.num_computed_tokens(guest.request)
                guest.first_token = computed - guest.num_external
            elif status == Status.NEVER:
                self._end_unserved(guest, "the prefix does not fit into the pool")

    def begin(self) -> None:
        """Start the loads of the guests that the step admitted. Call this method after the plan has
        been applied.
        """
        for guest in self._in(Stage.PLANNED):
            if guest.source is None:
                continue
            try:
                guest.source.begin(guest.request)
            except ValueError as error:
                self._end_unserved(guest, str(error))
            else:
                guest.stage = Stage.LOADING

    def completed(self) -> None:
        """Continue the guests of a step that was reported to the manager as completed."""
        for guest in self._in(Stage.PLANNED):
            self._finish(guest)

    def failed(self) -> None:
        """Handle a step that was undone. Its guests are admitted again later."""
        self._asked = []
        for guest in self._in(Stage.PLANNED):
            self._forget(guest)
            guest.stage, guest.source = Stage.WAITING, None

    def arrived(self, arrived: Arrived) -> bool:
        """Process a load that a source has ended. Returns False if the load does not belong to a
        guest.

        Args:
            arrived: The load.
        """
        guest = next((each for each in self._guests if each.request is arrived.request), None)
        if guest is None:
            return False
        guest.limit = arrived.error or guest.limit
        stop = guest.first_token + arrived.num_loaded_tokens
        if self.on_load is not None and stop > guest.first_token:
            self.on_load(guest.request, guest.first_token, stop)
        if arrived.num_computed_tokens is None:  # its blocks are in quarantine
            self._end_unserved(guest, arrived.error or "its blocks are in quarantine")
        else:
            self._finish(guest)
        return True

    def is_loading(self, request: Request) -> bool:
        """Return whether a request should wait because a guest is loading tokens that the request
        could hit.

        Args:
            request: A request that has not been admitted.
        """
        loading = [each for each in self._guests if each.stage is Stage.LOADING]
        if not loading:
            return False
        hit = self._manager.cache.cached_tokens(request).with_host
        return any(
            hit < each.num_tokens < request.num_tokens
            and self._has(request, each.prefix.hashes(each.num_tokens))
            for each in loading
        )

    def look(self, request: Request) -> None:
        """Record how many of a request's tokens are on the device before a step that may admit the
        request.

        Args:
            request: The request.
        """
        if self._prefetched.entries:
            found = self._manager.cache.cached_tokens(request).on_device
            self._looked[request.request_id] = found

    def hit(self, request: Request) -> None:
        """Record that the step admitted a request that was passed to `look`.

        Args:
            request: The request.
        """
        found = self._looked.pop(request.request_id, None)
        if found is None:
            return
        entries, size = self._prefetched.entries, self._manager.cache.hash_block_size
        for key in [key for key, each in entries.items() if self._has(request, each.hashes)]:
            spent = entries.pop(key)
            num_missed = max(len(spent.hashes) * size - found, 0)
            num_used = max(spent.num_tokens - num_missed, 0)
            self.stats.used_tokens += num_used
            self.stats.unused_tokens += spent.num_tokens - num_used

    def give_way(self) -> None:
        """Cancel the loads of guests before the next step, because a request is waiting for blocks
        or a row.
        """
        self._gives_way = True

    def close(self) -> None:
        """Refuse all hints that have no receipt, and remove all pins."""
        for guest in list(self._guests):
            self._end_unserved(guest, "the engine is closing")
        self._pins.expire(math.inf)

    # Guests -----------------------------------------------------------------------------------------

    def _in(self, stage: Stage) -> list[Guest]:
        return [each for each in self._guests if each.stage is stage]

    def _admit(self, guest: Guest) -> Admit | None:
        """Return how to admit a waiting guest, or None if the guest continues to wait or has
        ended.
        """
        if guest.prefix.on_device() < guest.num_before:
            self._forget(guest)
            guest.request = (
                None  # blocks were evicted, so the guest needs a larger part of the share
            )
        if guest.request is None and not self._choose(guest):
            return None
        guest.source = None
        num_reserved = self._manager.pool.num_pinned
        if self._sources and not guest.request.write_cache:
            guest.request = guest.prefix.guest(guest.name, guest.num_tokens, write_cache=True)
        for source in self._sources:
            try:
                count = source.match(guest.request)
            except ValueError as error:
                guest.limit = str(error)
                continue
            if count is None:
                return None
            if count:
                guest.source, guest.num_external = source, count
                external = External(count, delayed=True)
                return Admit(guest.request, None, external, num_reserved_blocks=num_reserved)
        if guest.prefix.on_device_or_host() <= guest.num_before:
            self._end_unserved(guest, "no tier and no source has more of the prefix")
            return None
        if guest.request.write_cache:
            # The token after the hit is assigned a slot but is not computed, so it must not be
            # cached.
            self._forget(guest)
            guest.request = guest.prefix.guest(guest.name, guest.num_tokens)
        most = guest.prefix.num_blocks(guest.num_tokens - guest.num_before)
        return Admit(guest.request, 1, num_reserved_blocks=num_reserved, max_host_blocks=most)

    def _choose(self, guest: Guest) -> bool:
        """Choose a guest's tokens within the share. Returns False if the guest has ended."""
        prefix = guest.prefix
        self._prefetched.entries.pop(guest.name, None)
        guest.num_before, count = prefix.on_device(), prefix.num_tokens
        room = prefix.tokens_in(self._prefetched.room())
        if count > guest.num_before + room:
            count = prefix.whole(guest.num_before + room)
            guest.limit = f"prefetches may use at most {self._prefetched.most} blocks"
        if count <= guest.num_before:
            self._end_unserved(guest, guest.limit or "the prefix is on the device")
            return False
        guest.request = prefix.guest(guest.name, prefix.whole(count))
        # Reserve the blocks now, so that later guests cannot exceed the share.
        needed = prefix.num_blocks(max(guest.num_tokens - guest.num_before, 0))
        self._prefetched.add(guest.name, Spent(needed))
        return True

    def _spend(self, guest: Guest, num_tokens: int) -> None:
        """Count the tokens that a guest has loaded against the share, until a request hits
        them.
        """
        self._prefetched.entries.pop(guest.name, None)
        if num_tokens > 0:
            spent = Spent(
                guest.prefix.num_blocks(num_tokens),
                self._clock() + limits.PREFETCH_TTL_S,
                guest.prefix.hashes(guest.num_before + num_tokens),
                num_tokens,
            )
            self._prefetched.add(guest.name, spent)

    def _finish(self, guest: Guest) -> None:
        """Complete the hint of a guest whose blocks are on the device, and free the guest."""
        self._forget(guest)
        self._guests.remove(guest)
        on_device = guest.prefix.on_device()
        num_tokens = max(min(on_device, guest.num_tokens) - guest.num_before, 0)
        self._spend(guest, num_tokens)
        self.stats.prefetched_tokens += num_tokens
        self._finish_prefetch(guest.pending, guest.prefix, guest.limit)

    def _finish_prefetch(
        self, pending: PendingHint, prefix: HintedPrefix, reason: str | None
    ) -> None:
        reason = reason or "no tier and no source has more of the prefix"
        num_tokens = prefix.on_device()
        if num_tokens:
            self._receipts.carried_out(pending, prefix, num_tokens, reason)
        else:
            self._receipts.refuse(pending, reason, prefix.num_asked_tokens)

    def _forget(self, guest: Guest) -> None:
        """Cancel a guest's lookups in all sources and its load, and free its blocks."""
        if guest.request is None:
            return
        # Cancel the chosen source first, because it may still write to blocks that the other
        # sources would free.
        for source in sorted(self._sources, key=lambda each: each is not guest.source):
            source.cancel(guest.request)
        self._manager.free(guest.request)

    def _end_unserved(self, guest: Guest, reason: str) -> None:
        """End a guest whose hint was not carried out."""
        self._forget(guest)
        self._guests.remove(guest)
        self._prefetched.entries.pop(guest.name, None)
        self._finish_prefetch(guest.pending, guest.prefix, reason)

    def _leave(self) -> None:
        """Cancel all loads of guests, because requests need the blocks."""
        self._gives_way = False
        for guest in self._in(Stage.LOADING):
            self._end_unserved(guest, _GAVE_WAY)

    def _refuse_late(self) -> None:
        now = self._clock()
        for guest in self._in(Stage.WAITING):
            if guest.deadline <= now:
                self._end_unserved(guest, "neither blocks nor sources were available in time")

    def _has(self, request: Request, hashes: tuple[bytes, ...]) -> bool:
        """Return whether a request begins with the prefix that is identified by these hashes."""
        own = self._manager.cache.hashes(request)
        return 0 < len(hashes) <= len(own) and own[len(hashes) - 1].tobytes() == hashes[-1]
