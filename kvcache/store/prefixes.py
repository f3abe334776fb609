"""Which blocks the tokens behind a hit need, in every group, and how far those that a store has reach."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import instance, instances, integer
from kvcache.kinds import make_kind
from kvcache.store.values import BlockKey


class NeededBlock(NamedTuple):
    """A block of a request: its key, its place in the group's table, and its tokens."""

    key: BlockKey
    column: int
    first_token: int
    stop_token: int


class StoredPrefixes:
    """Asks of a request what a store would have to have.

    ValueError for a manager whose groups a store cannot fill: a store has what is cached, and tokens
    that come from elsewhere come for all groups that are transferred.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        instance(manager, KVCacheManager, "manager")
        self._manager = manager
        self._kinds = [make_kind(spec.kind, spec.options) for spec in manager.groups]
        for g, (spec, kind) in enumerate(zip(manager.groups, self._kinds)):
            if kind.pages in ("encoder", "circular") and spec.transferred:
                raise ValueError(
                    f"group {g} has kind {spec.kind!r}: expected kinds whose blocks are cached, or "
                    "transferred=False, as a store has nothing of it"
                )
            if spec.cached != spec.transferred:
                raise ValueError(
                    f"group {g} has cached={spec.cached} and transferred={spec.transferred}: expected "
                    "both or none, as a store has what is cached"
                )
        self._groups = [g for g, spec in enumerate(manager.groups) if spec.cached]
        if not self._groups or not manager.options.enable_caching:
            raise ValueError("manager caches nothing: expected a group that is cached")
        self._step = math.lcm(*(manager.block_sizes[g] for g in self._groups))
        self._drafts = any(spec.drafts for spec in manager.groups)

    def hit_tokens(self, request: Request) -> int:
        """Tokens that the device and the host have."""
        instance(request, Request, "request")
        return self._manager.cached_tokens(request).with_host

    def longest(self, request: Request) -> int:
        """The most tokens of a request that can come: whole blocks, and one token is left to compute."""
        instance(request, Request, "request")
        return (request.num_tokens - 1) // self._step * self._step

    def candidates(self, request: Request, first_token: int) -> list[BlockKey]:
        """All blocks that the tokens from `first_token` on, the end of the hit, may need."""
        stop, first_token = self.longest(request), integer(first_token, "first_token")
        hashes = self._manager.block_hashes(request)
        return [
            self._key(hashes, group, column)
            for group in self._groups
            for column in range(first_token // self._size(group), stop // self._size(group))
        ]

    def reach(self, request: Request, first_token: int, found: Iterable[BlockKey]) -> int:
        """Up to which token the found blocks hold all that is needed; `first_token` for none."""
        longest, first_token = self.longest(request), integer(first_token, "first_token")
        found = frozenset(instances(found, BlockKey, "found"))
        hashes = self._manager.block_hashes(request)
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
        num_left_out = 1 if self._drafts else 0  # a drafter computes the last blocks anew
        for stop in range(longest, first_token, -self._step):
            spans = ((group, *self._columns(group, first_token, stop)) for group in self._groups)
            if all(missing[g][first] == missing[g][last] for g, first, last in spans):
                if num_left_out == 0:
                    return stop
                num_left_out -= 1
        return first_token

    def needed(self, request: Request, first_token: int, stop: int) -> list[NeededBlock]:
        """The blocks that are to come for these tokens, in the order of their last tokens."""
        longest = self.longest(request)
        stop = integer(stop, "stop", most=longest)
        first_token = integer(first_token, "first_token", most=stop)
        hashes = self._manager.block_hashes(request)
        needed = []
        for group in self._groups:
            size = self._size(group)
            for column in range(*self._columns(group, first_token, stop)):
                first = column * size
                key = self._key(hashes, group, column)
                needed.append(NeededBlock(key, column, first, first + size))
        return sorted(needed, key=lambda block: block.stop_token)

    def _columns(self, group: int, first_token: int, stop: int) -> tuple[int, int]:
        """Columns of the blocks that come: those that the token at `stop` reads and no hit has."""
        size, kind = self._size(group), self._kinds[group]
        if kind.pages == "state":
            return stop // size - 1, stop // size
        first = max(kind.first_needed_token(stop), first_token) // size
        return min(first, stop // size), stop // size

    def _size(self, group: int) -> int:
        return self._manager.block_sizes[group]

    def _key(self, hashes: np.ndarray, group: int, column: int) -> BlockKey:
        per_block = self._size(group) // self._manager.hash_block_size
        return BlockKey(group, hashes[(column + 1) * per_block - 1].tobytes())
