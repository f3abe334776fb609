# SPDX-License-Identifier: Apache-2.0
"""A reader's view of a publisher's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvcache.checks import check_name, instance, integer, listed, shown
from kvcache_exchange.router_events.wire import (
    WireCleared,
    WireEvent,
    WireHash,
    WireRemoved,
    WireStored,
)


class CachedBlock(NamedTuple):
    """A cached block, as described by the event that stored it.

    Attributes:
        parent: Hash of the previous block. None for the first block of a prompt, or if unknown.
        token_ids: `block_size` token ids. Empty if unknown.
    """

    parent: WireHash | None
    token_ids: tuple[int, ...]
    block_size: int  # tokens per block
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class EventView(Protocol):
    """Interface of an object that an `EventSubscriber` updates with its publisher's events."""

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Apply the events of a batch in order.

        Args:
            events: The events.
        """

    def clear(self) -> None:
        """Forget all blocks."""


class CacheView:
    """The blocks that a publisher has stored and not removed, by medium, cache group and hash.

    Mediums are "GPU", "CPU" and "STORAGE", as on the wire. Hashes are unsigned 64-bit integers, or
    bytes from publishers that send complete digests. An event without a medium refers to "GPU", and
    an event without a group refers to group 0.

    vLLM announces each of several blocks with the same hash, and each of their removals. A block
    therefore stays in the view until it was removed as often as it was stored.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], dict[WireHash, CachedBlock]] = {}
        # How often blocks were announced again since they were stored, by medium, group and hash.
        self._copies: dict[tuple[str, int, WireHash], int] = {}

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Apply the events of a decoded batch in order.

        Args:
            events: The events.

        Raises:
            TypeError: An entry is not a wire event.
        """
        events = listed(events, "events", "events of a batch")
        for i, event in enumerate(events):
            instance(event, WireEvent, f"events[{i}]")
        for event in events:
            if isinstance(event, WireCleared):
                self.clear()
                continue
            place = event.medium or "GPU", event.group_idx or 0
            blocks = self._blocks.setdefault(place, {})
            if isinstance(event, WireStored):
                self._store(blocks, event, place)
            elif isinstance(event, WireRemoved):
                for block_hash in event.block_hashes:
                    num_copies = self._copies.pop((*place, block_hash), 0)
                    if num_copies > 1:
                        self._copies[(*place, block_hash)] = num_copies - 1
                    elif num_copies == 0:
                        blocks.pop(block_hash, None)

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self._copies.clear()

    @property
    def places(self) -> list[tuple[str, int]]:
        """Return all (medium, group) pairs that have blocks."""
        return [place for place, blocks in self._blocks.items() if blocks]

    def hashes(self, medium: str = "GPU", group: int = 0) -> set[WireHash]:
        """Return the hashes of a group's blocks on a medium."""
        return set(self._at(medium, group))

    def block(
        self, block_hash: WireHash, medium: str = "GPU", group: int = 0
    ) -> CachedBlock | None:
        """Return a block, or None if it is not cached on this medium."""
        return self._at(medium, group).get(_checked_hash(block_hash, "block_hash"))

    def num_leading(
        self,
        block_hashes: Sequence[WireHash],
        group: int = 0,
        mediums: Sequence[str] = ("GPU", "CPU", "STORAGE"),
    ) -> int:
        """Return the number of leading blocks of a prompt that are on any of the mediums.

        Args:
            block_hashes: The prompt's block hashes, in order.
            group: The cache group.
            mediums: The mediums to consider.
        """
        mediums = listed(mediums, "mediums", "a sequence of mediums")
        tiers = [self._at(medium, group, f"mediums[{i}]") for i, medium in enumerate(mediums)]
        hashes = listed(block_hashes, "block_hashes", "a sequence of hashes")
        for i, block_hash in enumerate(hashes):
            _checked_hash(block_hash, f"block_hashes[{i}]")
            if not any(block_hash in tier for tier in tiers):
                return i
        return len(hashes)

    def _store(
        self, blocks: dict[WireHash, CachedBlock], event: WireStored, place: tuple[str, int]
    ) -> None:
        size, parent = event.block_size, event.parent_block_hash
        knows_chain = bool(
            event.token_ids
        )  # without tokens, the blocks may belong to several chains
        for i, block_hash in enumerate(event.block_hashes):
            if block_hash in blocks:
                key = (*place, block_hash)
                self._copies[key] = self._copies.get(key, 0) + 1
            blocks[block_hash] = CachedBlock(
                parent if knows_chain else None,
                tuple(event.token_ids[i * size : (i + 1) * size]),
                size,
                event.lora_name,
                None if event.extra_keys is None else event.extra_keys[i],
            )
            parent = block_hash

    def _at(self, medium: str, group: int, name: str = "medium") -> dict[WireHash, CachedBlock]:
        """Return the blocks of a group on a medium. Raises TypeError or ValueError."""
        check_name(medium, name)
        return self._blocks.get((medium, integer(group, "group")), {})

    def __len__(self) -> int:
        """Return the number of blocks, counting a block once per medium."""
        return sum(map(len, self._blocks.values()))


def _checked_hash(value: WireHash, name: str) -> WireHash:
    if type(value) is not int and not isinstance(value, bytes):
        raise TypeError(f"{name} is {shown(value)}: expected an integer or bytes")
    return value
