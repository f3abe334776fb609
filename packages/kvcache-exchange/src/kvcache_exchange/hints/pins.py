# SPDX-License-Identifier: Apache-2.0
"""Pins that are set by hints. Each pin has a deadline, and all pins together are limited to a share
of the pool.
"""

from __future__ import annotations

import itertools

from kvcache.allocator import KVCacheManager
from kvcache_exchange.hints import limits
from kvcache_exchange.hints.limits import Ledger, Spent
from kvcache_exchange.hints.prefixes import HintedPrefix
from kvcache_exchange.hints.receipts import PendingHint, ReceiptWriter


class HintPins:
    """Pins prefixes on the device, and removes the pins at their deadlines."""

    def __init__(self, manager: KVCacheManager, receipts: ReceiptWriter) -> None:
        self._manager, self._receipts = manager, receipts
        self.ledger = Ledger(int(limits.SHARE * manager.pool.num_total))
        self._numbers = itertools.count()

    def pin(self, pending: PendingHint, prefix: HintedPrefix, now: float) -> None:
        """Pin the part of a prefix that is on the device, and create the hint's receipt."""
        hint, cached, ledger = pending.hint, prefix.on_device(), self.ledger
        if not cached:
            reason = "no block of the prefix is on the device: send a prefetch first"
            self._receipts.refuse(pending, reason, prefix.num_asked_tokens)
            return
        key = ("session", hint.session)
        if hint.session is None:
            key = ("content", prefix.hashes(prefix.num_tokens)[-1])
        granted = limits.TTL_S if hint.ttl_s is None else min(hint.ttl_s, limits.MAX_TTL_S)
        num_tokens = min(cached, prefix.tokens_in(ledger.room(without=key)))
        reason = f"a pin lasts at most {granted:g} seconds"
        if num_tokens < cached:
            reason = f"pins may use at most {ledger.most} blocks"
        elif cached < prefix.num_tokens:
            reason = "the other blocks are not on the device"
        if not num_tokens:
            self._receipts.refuse(pending, reason, prefix.num_asked_tokens)
            return
        earlier = ledger.entries.pop(key, None)
        name = f"kv-hint-pin:{next(self._numbers)}" if earlier is None else earlier.name
        self._manager.cache.pin(name, prefix.guest(name, num_tokens))
        num_blocks, hashes = prefix.num_blocks(num_tokens), prefix.hashes(num_tokens)
        ledger.add(key, Spent(num_blocks, now + granted, hashes, num_tokens, name))
        self._receipts.carried_out(pending, prefix, num_tokens, reason, ttl_s=granted)

    def expire(self, now: float) -> None:
        """Remove the pins whose deadline has passed."""
        for each in self.ledger.pop_expired(now):
            self._manager.cache.unpin(each.name)
