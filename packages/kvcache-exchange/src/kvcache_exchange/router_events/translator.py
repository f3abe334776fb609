# SPDX-License-Identifier: Apache-2.0
"""Translates the events of a manager into wire events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvcache.allocator.hashing import hash_seed
from kvcache.checks import instance, integer, shown, text
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvcache_exchange.router_events.known_blocks import GroupBlocks
from kvcache_exchange.router_events.wire import (
    CPU,
    GPU,
    STORAGE,
    WireCleared,
    WireEvent,
    WireHash,
    WireRemoved,
    WireStored,
    wire_hash,
    wire_hashes,
)

_MEDIUMS = {"gpu": GPU, "cpu": CPU, "storage": STORAGE}
# Prefix of hash algorithms of engines, in which the first block of a chain has no parent hash.
_ENGINE = "engine:"


class EventTranslator:
    """Translates one manager's events in order, and tracks the blocks that were published.

    Events of the host tier and events of blocks that a store already had (medium "storage") contain
    only hashes. The translator adds the parents and tokens from earlier device events, because
    every host block was previously on the device. If these device events were dropped
    (`AllBlocksCleared.num_dropped`), the host block's event has neither parent nor tokens.

    `seed` is the manager's `hash_seed`. It determines the parent hash of each chain's first block,
    which is sent as None on the wire.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        hash_seed(seed, "hash_seed")  # raise an error immediately if the seed is invalid
        self._roots: dict[str, int] = {}  # parent hash of first blocks, by hash algorithm
        self._groups: dict[int, GroupBlocks] = {}

    def translate(self, events: Sequence[CacheEvent]) -> list[WireEvent]:
        """Return the wire events of one complete `drain_events()` result."""
        translated: list[WireEvent] = []
        for i, event in enumerate(events):
            if isinstance(event, BlockStored):
                translated += self._stored(event)
            elif isinstance(event, BlockRemoved):
                translated += self._removed(event.group, wire_hashes(event), event.medium)
            else:
                following = events[i + 1] if i + 1 < len(events) else None
                translated += self._cleared(event, following)
        for group in self._groups.values():
            translated += group.end_step()
        return translated

    def snapshot(self) -> list[WireEvent]:
        """Return events for all cached blocks, for a reader without a valid view."""
        stored = (
            each
            for medium in _MEDIUMS.values()
            for group in self._groups.values()
            for each in group.everything(medium)
        )
        return [WireCleared(), *stored]

    def _stored(self, event: BlockStored) -> Iterator[WireStored]:
        group = self._groups.get(event.group)
        if group is None:
            group = self._groups[event.group] = GroupBlocks(event.group, event)
        medium = _MEDIUMS[event.medium]
        if event.medium != "gpu" and len(event.token_ids) == 0:
            yield from group.store_known(wire_hashes(event), medium)
            return
        stored = WireStored(
            wire_hashes(event),
            self._parent(event),
            event.token_ids.tolist(),
            event.block_size,
            lora_id=None,
            medium=medium,
            lora_name=None if event.lora is None else event.lora[0],
            extra_keys=_extra_keys(event),
            session_id=event.session,
            **group.labels,
        )
        yield from group.store(stored, event.token_ids.astype(np.int32, copy=False).tobytes())

    def _parent(self, event: BlockStored) -> WireHash | None:
        if event.parent_hash in (None, event.root_hash):
            return None
        parent = wire_hash(event.parent_hash)
        if event.hash_algorithm.startswith(_ENGINE):
            return parent
        if event.hash_algorithm not in self._roots:
            root = hash_seed(self._seed, "hash_seed", event.hash_algorithm)
            self._roots[event.hash_algorithm] = wire_hash(root)
        return None if parent == self._roots[event.hash_algorithm] else parent

    def _removed(self, group: int, hashes: list[WireHash], medium: str) -> list[WireRemoved]:
        if group in self._groups:
            hashes = self._groups[group].remove(hashes, _MEDIUMS[medium])
        return [WireRemoved(hashes, _MEDIUMS[medium], group)] if hashes else []

    def _cleared(
        self, event: AllBlocksCleared, following: CacheEvent | None
    ) -> Iterable[WireEvent]:
        """Emit one event that clears all mediums.

        The manager clears its tiers one after another, and each tier emits a separate event.
        """
        is_followed = isinstance(following, AllBlocksCleared) and following.medium != event.medium
        cleared = {event.medium, following.medium} if is_followed else {event.medium}
        others = [medium for medium in _MEDIUMS if medium not in cleared]
        has_others = any(
            group.hashes(_MEDIUMS[medium]) for group in self._groups.values() for medium in others
        )
        removed = [
            each
            for number, group in self._groups.items()
            for each in self._removed(number, group.to_clear(_MEDIUMS[event.medium]), event.medium)
        ]
        if has_others:
            return removed
        return [] if is_followed else [WireCleared()]


def _extra_keys(event: BlockStored) -> list[tuple[Any, ...] | None] | None:
    """Return the extra keys as one entry per block, without tags.

    The keys are adapter names, (item, start) pairs, salts and embedding digests.
    """
    if event.extra_keys is None:
        return None
    per_block = event.block_size // event.hash_block_size
    return [
        _keys_of_block(event.extra_keys[first : first + per_block], event.hash_block_size)
        for first in range(0, len(event.extra_keys), per_block)
    ]


def _keys_of_block(
    hash_blocks: Sequence[tuple[tuple[Any, ...], ...] | None], hash_block_size: int
) -> tuple[Any, ...] | None:
    found: dict[Any, None] = {}  # removes duplicates and keeps the order
    for i, keys in enumerate(hash_blocks):
        for kind, value, *more in keys or ():
            found[(value, more[0] + i * hash_block_size) if kind == "mm" else value] = None
    return tuple(found) or None


def check_event(event: CacheEvent, name: str) -> None:
    """Check that an event is valid, in constant time.

    Raises a TypeError or ValueError that names the invalid field.
    """
    if not isinstance(event, CacheEvent):
        raise TypeError(f"{name} is {shown(event)}: expected an event of kvcache.events")
    if not isinstance(event.medium, str) or event.medium not in _MEDIUMS:
        raise ValueError(
            f"{name}.medium is {shown(event.medium)}: expected one of {', '.join(_MEDIUMS)}"
        )
    if isinstance(event, AllBlocksCleared):
        return
    hashes = event.block_hashes
    if not (isinstance(hashes, np.ndarray) and hashes.dtype == np.uint8 and hashes.ndim == 2):
        raise TypeError(f"{name}.block_hashes is {shown(hashes)}: expected uint8[n, hash_bytes]")
    integer(event.group, f"{name}.group")
    if isinstance(event, BlockStored):
        _check_stored(event, name)


def _check_stored(event: BlockStored, name: str) -> None:
    if event.parent_hash is not None:
        instance(event.parent_hash, bytes, f"{name}.parent_hash")
    tokens, size = event.token_ids, integer(event.block_size, f"{name}.block_size", 1)
    if not (isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu" and tokens.ndim == 1):
        raise TypeError(f"{name}.token_ids is {shown(tokens)}: expected int32[n * block_size]")
    if len(tokens) not in (0, len(event.block_hashes) * size):
        raise ValueError(
            f"{name}.token_ids has {len(tokens)} entries: expected {len(event.block_hashes)} blocks of "
            f"{size}, or none"
        )
    integer(event.hash_block_size, f"{name}.hash_block_size", 1)
    for field in ("hash_algorithm", "group_kind"):
        text(getattr(event, field), f"{name}.{field}")
    if event.lora is not None and not (
        isinstance(event.lora, tuple) and all(isinstance(each, str) for each in event.lora)
    ):
        raise TypeError(f"{name}.lora is {shown(event.lora)}: expected (name, path) or None")
    if event.session is not None:
        text(event.session, f"{name}.session")
    if event.root_hash is not None:
        instance(event.root_hash, bytes, f"{name}.root_hash")
