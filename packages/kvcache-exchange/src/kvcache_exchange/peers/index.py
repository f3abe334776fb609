# SPDX-License-Identifier: Apache-2.0
"""Indexes of the prefixes that other engines have cached on their devices, fed by cache events."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import check_name, instance, integer, shown
from kvcache_exchange.router_events.view import CacheView, EventView
from kvcache_exchange.router_events.wire import GPU, WireCleared, WireEvent, WireStored, wire_hash
from kvcache_exchange.store.prefixes import StoredPrefixes

_log = logging.getLogger(__name__)
_MOST_TOKENS = 2**31 - 1


class PrefixIndex(Protocol):
    """Maps a request to the peers that have cached its prefix.

    The result is only a hint, because a peer may have evicted blocks in the meantime. `num_tokens`
    is called in the engine's thread, while the views are updated in other threads.
    """

    def view(self, peer: str) -> EventView:
        """Return a peer's view, which must be updated with the peer's events.

        Args:
            peer: Name of the peer.
        """

    def num_tokens(self, request: Request) -> Mapping[str, int]:
        """Return how many leading tokens of a request each peer has cached, keyed by the peer's
        name.

        Args:
            request: The request.
        """


class EventIndex:
    """A `PrefixIndex` of the block hashes in cache events.

    The peers must hash blocks in the same way as the manager, with equal block sizes.

    Args:
        manager: The manager of this engine. It computes the hashes of requests.

    Raises:
        ValueError: The manager has a group that cannot be filled from cached blocks.

    Example:
        >>> from kvcache_exchange.router_events.translator import EventTranslator
        >>> peer = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, enable_events=True)
        >>> plan = peer.step(new=[Request("r1", range(40))])
        >>> index = EventIndex(KVCacheManager(16, num_gpu_blocks=9, max_model_len=128))
        >>> events = EventTranslator(peer.options.hash_seed).translate(peer.cache.drain_events())
        >>> index.view("peer").apply(events)
        >>> index.num_tokens(Request("r2", range(50)))
        {'peer': 32}
    """

    def __init__(self, manager: KVCacheManager) -> None:
        instance(manager, KVCacheManager, "manager")
        self._prefixes = StoredPrefixes(manager)
        self._views: dict[str, CacheView] = {}

    def view(self, peer: str) -> CacheView:
        """Return a peer's view, which must be updated with the peer's events."""
        check_name(peer, "peer")
        return self._views.setdefault(peer, CacheView())

    def num_tokens(self, request: Request) -> dict[str, int]:
        """Return how many leading tokens of a request each peer has cached on its device."""
        instance(request, Request, "request")
        keys = self._prefixes.candidates(request, 0)
        hashes = [wire_hash(key.block_hash) for key in keys]
        counts = {}
        for peer, view in self._views.items():
            found = [
                key
                for key, block_hash in zip(keys, hashes)
                if view.block(block_hash, GPU, key.group) is not None
            ]
            if found and (count := self._prefixes.reach(request, 0, found)):
                counts[peer] = count
        return counts


class RadixTreeIndex:
    """A `PrefixIndex` that uses a router's radix tree, such as the one in NVIDIA Dynamo.

    Because such trees identify a block only by its tokens, requests and blocks with adapters,
    images or salts are not looked up, and the manager must have a single cache group.

    Args:
        tree: An object with the methods `apply_event`, `find_matches` and `remove_worker` of
            `RadixTree` in `dynamo._core` (`ai-dynamo-runtime`).
        hash_tokens: Function that takes tokens and a block size, and returns the hashes by which
            the tree identifies blocks, such as `compute_block_hash_for_seq` in `dynamo._core`.
        block_size: Tokens per block.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `block_size` is less than 1.
    """

    def __init__(
        self, tree: Any, hash_tokens: Callable[[list[int], int], Sequence[int]], block_size: int
    ) -> None:
        for method in ("apply_event", "find_matches", "remove_worker"):
            if not callable(getattr(tree, method, None)):
                raise TypeError(f"tree is {shown(tree)}: expected an object with {method}")
        if not callable(hash_tokens):
            raise TypeError(
                f"hash_tokens is {shown(hash_tokens)}: expected a function of tokens and a block size"
            )
        self._tree, self._hash_tokens = tree, hash_tokens
        self._block_size = integer(block_size, "block_size", 1, _MOST_TOKENS)
        self._views: dict[str, _TreeView] = {}

    def view(self, peer: str) -> EventView:
        """Return a peer's view, which must be updated with the peer's events."""
        check_name(peer, "peer")
        if peer not in self._views:
            worker = len(self._views)
            self._views[peer] = _TreeView(self._tree, self._hash_tokens, self._block_size, worker)
        return self._views[peer]

    def num_tokens(self, request: Request) -> dict[str, int]:
        """Return how many leading tokens of a request each peer has cached on its device."""
        instance(request, Request, "request")
        keys = request.lora, request.cache_salt, request.mm_items or None, request.prompt_embeds
        if any(each is not None for each in keys):
            return {}
        size = self._block_size
        hashes = self._hash_tokens(request.token_ids.tolist(), size)
        scores = self._tree.find_matches(list(hashes)).scores
        by_worker = {worker: count for (worker, _), count in scores.items()}
        return {
            peer: size * by_worker[view.worker]
            for peer, view in self._views.items()
            if by_worker.get(view.worker)
        }


class _TreeView:
    """Translates a peer's events into events of a tree in which the peer is a worker."""

    def __init__(
        self,
        tree: Any,
        hash_tokens: Callable[[list[int], int], Sequence[int]],
        block_size: int,
        worker: int,
    ) -> None:
        self._tree, self._hash_tokens, self._block_size = tree, hash_tokens, block_size
        self.worker = worker
        self._num_events = 0
        self._known: set[Any] = set()  # hashes of the blocks in the tree

    def apply(self, events: Iterable[WireEvent]) -> None:
        for event in events:
            if isinstance(event, WireCleared):
                self.clear()
            elif event.medium in (GPU, None):
                self._store(event) if isinstance(event, WireStored) else self._remove(event)

    def clear(self) -> None:
        self._tree.remove_worker(self.worker)
        self._known.clear()

    def _store(self, event: WireStored) -> None:
        parent = event.parent_block_hash
        is_plain = event.lora_name is None and not any(event.extra_keys or ())
        is_known = parent is None or parent in self._known
        if not (is_plain and is_known and event.token_ids and event.block_size == self._block_size):
            return
        hashes = self._hash_tokens(list(event.token_ids), self._block_size)
        blocks = [
            {"block_hash": block_hash, "tokens_hash": tokens_hash}
            for block_hash, tokens_hash in zip(event.block_hashes, hashes)
        ]
        self._send({"stored": {"parent_hash": parent, "blocks": blocks}})
        self._known.update(event.block_hashes)

    def _remove(self, event: Any) -> None:
        known = [each for each in event.block_hashes if each in self._known]
        if known:
            self._send({"removed": {"block_hashes": known}})
            self._known.difference_update(known)

    def _send(self, data: Mapping[str, Any]) -> None:
        self._num_events += 1
        event = {"event_id": self._num_events, "data": data, "dp_rank": 0}
        try:
            self._tree.apply_event(self.worker, json.dumps(event).encode())
        except RuntimeError as error:  # the tree drops a block together with its parent
            _log.debug("an event was not added to the index: %s", error)
