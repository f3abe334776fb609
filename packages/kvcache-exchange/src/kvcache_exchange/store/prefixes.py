# SPDX-License-Identifier: Apache-2.0
"""Determines which blocks the tokens after a hit need, and how many of these tokens a store can
supply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import instance, instances, integer
from kvcache.kinds import make_kind
from kvcache_exchange.store.value_format import BlockKey


class NeededBlock(NamedTuple):
    """A block that a request needs: its key, its column in the group's block table, and the range
    of tokens that it holds.
    """

    key: BlockKey
    column: int
    first_token: int
    stop_token: int


class StoredPrefixes:
    """Determines which blocks a store must hold to extend a request's hit.

    Args:
        manager: The manager.

    Raises:
        ValueError: A store cannot fill the manager's groups. It contains only cached blocks, but
            external tokens must be loaded in all transferred groups.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        instance(manager, KVCacheManager, "manager")
        self._manager = manager
        self._kinds = [make_kind(spec.kind, spec.options) for spec in manager.groups]
        for g, (spec, kind) in enumerate(zip(manager.groups, self._kinds)):
            if not kind.pages.is_transferable and spec.transferred:
                raise ValueError(
                    f"group {g} has kind {spec.kind!r}: expected transferred=False, or a kind whose "
                    "blocks are cached, because a store contains only cached blocks"
                )
            if spec.cached != spec.transferred:
                raise ValueError(
                    f"group {g} has cached={spec.cached} and transferred={spec.transferred}: expected "
                    "both or neither, because a store has only cached blocks"
                )
        self._groups = [g for g, spec in enumerate(manager.groups) if spec.cached]
        if not self._groups or not manager.options.enable_caching:
            raise ValueError("the manager caches no blocks: expected at least one cached group")
        self._step = math.lcm(*(manager.block_sizes[g] for g in self._groups))
        self._drafts = any(spec.drafts for spec in manager.groups)

    def hit_tokens(self, request: Request) -> int:
        """Return the number of the request's tokens that are cached on the device and the host."""
        instance(request, Request, "request")
        return self._manager.cache.cached_tokens(request).with_host

    def longest(self, request: Request) -> int:
        """Return the maximum number of tokens to load. Only whole blocks with known hashes are
        loaded, and at least one token must be computed.
        """
        instance(request, Request, "request")
        cache = self._manager.cache
        num_hashed = len(cache.hashes(request)) * cache.hash_block_size
        return min(request.num_tokens - 1, num_hashed) // self._step * self._step

    def candidates(self, request: Request, first_token: int) -> list[BlockKey]:
        """Return the keys of all blocks that may be needed to load the tokens after a hit that ends
        at `first_token`.
        """
        stop, first_token = self.longest(request), integer(first_token, "first_token")
        hashes = self._manager.cache.hashes(request)
        return [
            self._key(hashes, group, column)
            for group in self._groups
            for column in range(first_token // self._size(group), stop // self._size(group))
        ]

    def reach(self, request: Request, first_token: int, found: Iterable[BlockKey]) -> int:
        """Return the end of the longest token range for which all needed blocks were found, or
        `first_token`.
        """
        longest, first_token = self.longest(request), integer(first_token, "first_token")
        found = frozenset(instances(found, BlockKey, "found"))
        hashes = self._manager.cache.hashes(request)
        missing = {
            group: np.cumsum(
                [0]
                + [
                    column >= first_token // self._size(group)
                    and self._key(hashes, group, column) not in found
                    for column in range(longest // self._size(group))
                ]
            )
            for group in self._groups
        }
        num_left_out = 1 if self._drafts else 0  # a drafter recomputes the last block
        for stop in range(longest, first_token, -self._step):
            spans = ((group, *self._columns(group, first_token, stop)) for group in self._groups)
            if all(missing[g][first] == missing[g][last] for g, first, last in spans):
                if num_left_out == 0:
                    return stop
                num_left_out -= 1
        return first_token

    def needed(self, request: Request, first_token: int, stop: int) -> list[NeededBlock]:
        """Return the blocks to load for the given range of tokens, ordered by the last token that
        they hold.
        """
        longest = self.longest(request)
        stop = integer(stop, "stop", most=longest)
        first_token = integer(first_token, "first_token", most=stop)
        hashes = self._manager.cache.hashes(request)
        needed = []
        for group in self._groups:
            size = self._size(group)
            for column in range(*self._columns(group, first_token, stop)):
                first = column * size
                key = self._key(hashes, group, column)
                needed.append(NeededBlock(key, column, first, first + size))
        return sorted(needed, key=lambda block: block.stop_token)

    def _columns(self, group: int, first_token: int, stop: int) -> tuple[int, int]:
        """Return the range of block table columns to load: the blocks that token `stop` attends to,
        excluding the blocks in the hit.
        """
        size, kind = self._size(group), self._kinds[group]
        if not kind.pages.has_slots:
            return stop // size - 1, stop // size
        first = max(kind.first_needed_token(stop), first_token) // size
        return min(first, stop // size), stop // size

    def _size(self, group: int) -> int:
        return self._manager.block_sizes[group]

    def _key(self, hashes: np.ndarray, group: int, column: int) -> BlockKey:
        per_block = self._size(group) // self._manager.cache.hash_block_size
        return BlockKey(group, hashes[(column + 1) * per_block - 1].tobytes())
