# SPDX-License-Identifier: Apache-2.0
"""Tracks the blocks that were published to the readers of an event stream, with their attributes.

Routers that keep a tree per medium ignore a block whose parent they do not know on that medium. If a
request hits blocks on the host, the manager reports the request's new blocks before the load has
completed, so the events of the new blocks are held until their parents are on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvcache.events import BlockStored
from kvcache_exchange.router_events.chains import chains
from kvcache_exchange.router_events.wire import CPU, GPU, STORAGE, WireHash, WireStored

# The names that routers and vLLM use for attention kinds. Kinds not listed here keep their names.
_WIRE_KINDS = {
    "chunked_local": "chunked_local_attention",
    "circular_window": "sliding_window",
    "recurrent": "mamba",
}
_MEDIUM_BITS = {GPU: 1, CPU: 2, STORAGE: 4}
_MOST_STEPS_HELD = 64  # older events are published without their parent, which may never be loaded


class KnownBlock:
    """Attributes of a block that are the same on every medium.

    `tokens`: token IDs as int32 bytes, or b"" if unknown.
    """

    __slots__ = ("extra_keys", "lora_name", "mediums", "parent", "tokens")

    def __init__(self) -> None:
        self.parent: WireHash | None = None
        self.tokens = b""
        self.lora_name: str | None = None
        self.extra_keys: tuple[Any, ...] | None = None
        self.mediums = 0  # bit mask of the mediums that hold the block


class _WaitingEvent(NamedTuple):
    """Blocks on the device whose event is held until their parent is on the device."""

    step: int  # when the event was held
    parent: WireHash
    hashes: list[WireHash]
    session_id: str | None


class GroupBlocks:
    """The blocks of one cache group, keyed by hash. Removed blocks stay known until `end_step`."""

    def __init__(self, group: int, event: BlockStored) -> None:
        self._group, self._block_size = group, event.block_size
        self._kind = _WIRE_KINDS.get(event.group_kind, event.group_kind)
        self._window = event.window
        self._blocks: dict[WireHash, KnownBlock] = {}
        self._removed: set[WireHash] = set()
        self._step = 0
        self.held: set[WireHash] = set()  # device blocks that are not published yet
        self._waiting: dict[WireHash, list[_WaitingEvent]] = {}  # keyed by the hash of the parent
        self._oldest: deque[_WaitingEvent] = deque()  # may include released events

    def store(self, stored: WireStored, tokens: bytes) -> Iterator[WireStored]:
        """Record stored blocks with their parents.

        Yields the events to publish. If this event is held, yields no events. Otherwise, yields this
        event and then the events that were held until its blocks were on the device.

        Args:
            stored: The event.
            tokens: Token IDs of the blocks as int32 bytes.
        """
        first = parent = stored.parent_block_hash
        size = 4 * self._block_size
        for i, block_hash in enumerate(stored.block_hashes):
            block = self._blocks.get(block_hash)
            if block is None:
                block = self._blocks[block_hash] = KnownBlock()
            block.parent = parent
            block.tokens = tokens[i * size : (i + 1) * size]
            block.lora_name = stored.lora_name
            block.extra_keys = None if stored.extra_keys is None else stored.extra_keys[i]
            parent = block_hash
        missing = ()
        if stored.medium == GPU and self._is_loading(first):
            missing = [each for each in stored.block_hashes if not self._is_on_device(each)]
        if missing:
            self.held.update(missing)
            event = _WaitingEvent(self._step, first, stored.block_hashes, stored.session_id)
            self._waiting.setdefault(first, []).append(event)
            self._oldest.append(event)
            return
        self._place(stored.block_hashes, stored.medium)
        yield stored
        if stored.medium == GPU and self._waiting:
            self.held.difference_update(stored.block_hashes)
            yield from self._release(stored.block_hashes)

    def _is_loading(self, block_hash: WireHash | None) -> bool:
        """Return whether a block is still being loaded, given that its child was just computed."""
        block = self._blocks.get(block_hash)
        if self._kind != "full_attention" or block is None or self._is_on_device(block_hash):
            return False  # other kinds release blocks that later blocks do not need
        return block.mediums != 0 or block_hash in self.held

    def _is_on_device(self, block_hash: WireHash) -> bool:
        return self._blocks[block_hash].mediums & _MEDIUM_BITS[GPU] != 0

    def _place(self, hashes: Iterable[WireHash], medium: str) -> None:
        for block_hash in hashes:
            self._blocks[block_hash].mediums |= _MEDIUM_BITS[medium]

    def _release(self, hashes: Iterable[WireHash]) -> Iterator[WireStored]:
        """Yield the events held for these parents and, recursively, for the blocks of these events."""
        parents = [*hashes]
        while parents:
            for held in self._waiting.pop(parents.pop(), ()):
                found = [each for each in held.hashes if each in self.held]
                self.held.difference_update(found)
                self._place(found, GPU)
                parents += found
                for event in self._stored(found, GPU):
                    event.session_id = held.session_id
                    yield event

    def end_step(self) -> Iterator[WireStored]:
        """End a batch of events. Yield events that were held for too long, parents first."""
        self._step += 1
        while self._oldest and self._oldest[0].step <= self._step - _MOST_STEPS_HELD:
            event = self._oldest.popleft()
            if not any(each is event for each in self._waiting.get(event.parent, ())):
                continue  # already released
            first = event.parent
            while first in self.held:
                first = self._blocks[first].parent
            yield from self._release([first])
        self._forget_removed()

    def store_known(self, hashes: Iterable[WireHash], medium: str) -> Iterator[WireStored]:
        """Record that a medium now holds these known blocks.

        Yield the events of these blocks, with the attributes that were recorded earlier.
        """
        hashes = list(hashes)
        for block_hash in hashes:
            self._blocks.setdefault(block_hash, KnownBlock())
        self._place(hashes, medium)
        yield from self._stored(hashes, medium)

    def remove(self, hashes: Iterable[WireHash], medium: str) -> list[WireHash]:
        """Record that a medium no longer holds these blocks. Return those whose event was published."""
        published = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if medium == GPU and block_hash in self.held:
                self.held.remove(block_hash)
            else:
                published.append(block_hash)
            if block is None:
                continue
            block.mediums &= ~_MEDIUM_BITS[medium]
            if block.mediums == 0:
                self._removed.add(block_hash)
        return published

    def hashes(self, medium: str) -> list[WireHash]:
        """Return the hashes of the blocks on a medium."""
        bit = _MEDIUM_BITS[medium]
        return [each for each, block in self._blocks.items() if block.mediums & bit]

    def to_clear(self, medium: str) -> list[WireHash]:
        """Return the hashes of a medium's blocks, including blocks whose event is held."""
        return [*self.hashes(medium), *(self.held if medium == GPU else ())]

    def _forget_removed(self) -> None:
        """Discard blocks that are on no medium.

        Called after all events of a step, because an evicted block may be written to the host at
        the end of the step.
        """
        for block_hash in self._removed:
            if self._blocks[block_hash].mediums == 0 and block_hash not in self.held:
                del self._blocks[block_hash]
        self._removed.clear()

    def everything(self, medium: str) -> Iterator[WireStored]:
        """Yield events for all blocks of a medium, for a reader with an empty view."""
        yield from self._stored(self.hashes(medium), medium)

    def _stored(self, hashes: list[WireHash], medium: str) -> Iterator[WireStored]:
        known = {each: self._blocks[each].parent for each in hashes if self._blocks[each].tokens}
        for run in chains(known):
            yield self._event(run, medium)
        if unknown := [each for each in hashes if each not in known]:
            yield self._event(unknown, medium)

    def _event(self, run: list[WireHash], medium: str) -> WireStored:
        blocks = [self._blocks[each] for each in run]
        has_keys = any(block.extra_keys for block in blocks)
        return WireStored(
            run,
            blocks[0].parent,
            np.frombuffer(b"".join(block.tokens for block in blocks), np.int32).tolist(),
            self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=blocks[0].lora_name,
            extra_keys=[block.extra_keys for block in blocks] if has_keys else None,
            **self.labels,
        )

    @property
    def labels(self) -> dict[str, Any]:
        """Return the attributes that all "stored" events of the group have in common."""
        return {
            "group_idx": self._group,
            "kv_cache_spec_kind": self._kind,
            "kv_cache_spec_sliding_window": self._window,
        }
