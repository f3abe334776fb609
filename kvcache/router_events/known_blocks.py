# SPDX-License-Identifier: Apache-2.0
"""Tracks the blocks that were published to the readers of an event stream, with their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvcache.events import BlockStored
from kvcache.router_events.chains import chains
from kvcache.router_events.wire import CPU, GPU, STORAGE, WireHash, WireStored

# The names that routers and vLLM use for attention kinds. Kinds not listed here keep their names.
_WIRE_KINDS = {
    "chunked_local": "chunked_local_attention",
    "circular_window": "sliding_window",
    "recurrent": "mamba",
}
_MEDIUM_BITS = {GPU: 1, CPU: 2, STORAGE: 4}


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


class GroupBlocks:
    """The blocks of one cache group by hash.

    A removed block stays known until `forget_removed` is called.
    """

    def __init__(self, group: int, event: BlockStored) -> None:
        self._group, self._block_size = group, event.block_size
        self._kind = _WIRE_KINDS.get(event.group_kind, event.group_kind)
        self._window = event.window
        self._blocks: dict[WireHash, KnownBlock] = {}
        self._removed: set[WireHash] = set()

    def store(self, stored: WireStored, tokens: bytes) -> None:
        """Record stored blocks with their parents. `tokens` are their token IDs as int32 bytes."""
        parent = stored.parent_block_hash
        size = 4 * self._block_size
        for i, block_hash in enumerate(stored.block_hashes):
            block = self._blocks.get(block_hash)
            if block is None:
                block = self._blocks[block_hash] = KnownBlock()
            block.parent = parent
            block.tokens = tokens[i * size : (i + 1) * size]
            block.lora_name = stored.lora_name
            block.extra_keys = None if stored.extra_keys is None else stored.extra_keys[i]
            block.mediums |= _MEDIUM_BITS[stored.medium]
            parent = block_hash

    def store_known(self, hashes: Iterable[WireHash], medium: str) -> Iterator[WireStored]:
        """Record that a medium now holds these known blocks.

        Yield the events of these blocks, with the attributes that were recorded earlier.
        """
        hashes = list(hashes)
        for block_hash in hashes:
            self._blocks.setdefault(block_hash, KnownBlock()).mediums |= _MEDIUM_BITS[medium]
        yield from self._stored(hashes, medium)

    def remove(self, hashes: Iterable[WireHash], medium: str) -> None:
        """Record that a medium no longer holds these blocks."""
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.mediums &= ~_MEDIUM_BITS[medium]
            if block.mediums == 0:
                self._removed.add(block_hash)

    def hashes(self, medium: str) -> list[WireHash]:
        """Return the hashes of the blocks on a medium."""
        bit = _MEDIUM_BITS[medium]
        return [each for each, block in self._blocks.items() if block.mediums & bit]

    def forget_removed(self) -> None:
        """Discard blocks that are on no medium.

        Called after all events of a step, because an evicted block may be written to the host at
        the end of the step.
        """
        for block_hash in self._removed:
            if self._blocks[block_hash].mediums == 0:
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
