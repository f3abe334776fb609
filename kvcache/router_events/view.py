"""What a reader of cache events knows of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvcache.checks import check_name, instance, integer, listed, shown
from kvcache.router_events.wire import (
    WireCleared,
    WireEvent,
    WireHash,
    WireRemoved,
    WireStored,
)


class CachedBlock(NamedTuple):
    """A block as its event has described it.

    `parent`: hash of the block before; None for the first of a prompt, and where it is unknown.
    `token_ids`: `block_size` of them; empty where they are unknown.
    """

    parent: WireHash | None
    token_ids: tuple[int, ...]
    block_size: int  # tokens
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


class CacheView:
    """The blocks that a publisher has stored and not removed, by medium, cache group and hash.

    Mediums are those of the wire: "GPU", "CPU", "STORAGE". Hashes are unsigned integers of 64 bits, or
    bytes from publishers that send whole digests. An event that names no medium means "GPU", one that
    names no group means group 0.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], dict[WireHash, CachedBlock]] = {}

    def apply(self, events: Iterable[WireEvent]) -> None:
        """The events of a batch that was decoded, in their order. TypeError for what is no event."""
        events = listed(events, "events", "events of a batch")
        for i, event in enumerate(events):
            instance(event, WireEvent, f"events[{i}]")
        for event in events:
            if isinstance(event, WireCleared):
                self._blocks.clear()
                continue
            blocks = self._blocks.setdefault((event.medium or "GPU", event.group_idx or 0), {})
            if isinstance(event, WireStored):
                _store(blocks, event)
            elif isinstance(event, WireRemoved):
                for block_hash in event.block_hashes:
                    blocks.pop(block_hash, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._blocks.clear()

    @property
    def places(self) -> list[tuple[str, int]]:
        """(medium, group) of all blocks."""
        return [place for place, blocks in self._blocks.items() if blocks]

    def hashes(self, medium: str = "GPU", group: int = 0) -> set[WireHash]:
        """Those that are found on a medium for a group."""
        return set(self._at(medium, group))

    def block(
        self, block_hash: WireHash, medium: str = "GPU", group: int = 0
    ) -> CachedBlock | None:
        """What is known of a block; None where it is not cached there."""
        return self._at(medium, group).get(_checked_hash(block_hash, "block_hash"))

    def num_leading(
        self,
        block_hashes: Sequence[WireHash],
        group: int = 0,
        mediums: Sequence[str] = ("GPU", "CPU", "STORAGE"),
    ) -> int:
        """How many of a prompt's blocks, from its first on, are on any of these mediums."""
        mediums = listed(mediums, "mediums", "a sequence of mediums")
        tiers = [self._at(medium, group, f"mediums[{i}]") for i, medium in enumerate(mediums)]
        hashes = listed(block_hashes, "block_hashes", "a sequence of hashes")
        for i, block_hash in enumerate(hashes):
            _checked_hash(block_hash, f"block_hashes[{i}]")
            if not any(block_hash in tier for tier in tiers):
                return i
        return len(hashes)

    def _at(self, medium: str, group: int, name: str = "medium") -> dict[WireHash, CachedBlock]:
        """The blocks on a medium for a group. TypeError or ValueError."""
        check_name(medium, name)
        return self._blocks.get((medium, integer(group, "group")), {})

    def __len__(self) -> int:
        """Blocks, those on two mediums counted twice."""
        return sum(map(len, self._blocks.values()))


def _checked_hash(value: WireHash, name: str) -> WireHash:
    if type(value) is not int and not isinstance(value, bytes):
        raise TypeError(f"{name} is {shown(value)}: expected an integer or bytes")
    return value


def _store(blocks: dict[WireHash, CachedBlock], event: WireStored) -> None:
    size, parent = event.block_size, event.parent_block_hash
    knows_chain = bool(event.token_ids)  # without tokens the blocks need not be of one chain
    for i, block_hash in enumerate(event.block_hashes):
        blocks[block_hash] = CachedBlock(
            parent if knows_chain else None,
            tuple(event.token_ids[i * size : (i + 1) * size]),
            size,
            event.lora_name,
            None if event.extra_keys is None else event.extra_keys[i],
        )
        parent = block_hash
