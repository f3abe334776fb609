# SPDX-License-Identifier: Apache-2.0
"""Tracks the blocks of each request, from the information that a worker receives."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcache.sanitizer import Sanitizer


class Holds:
    """Reports allocations and frees to a sanitizer.

    Args:
        sanitizer: The sanitizer.
        gids: vLLM's number of each sanitized group.
        sizes: Tokens per block of each sanitized group.
    """

    def __init__(self, sanitizer: Sanitizer, gids: list[int], sizes: list[int]) -> None:
        self._sanitizer, self._gids, self._sizes = sanitizer, gids, sizes
        self._blocks: dict[str, list[list[int]]] = {}  # per group and column; 0: released
        self._left: dict[str, list[int]] = {}  # number of leading columns that are no longer read
        self._holders: dict[int, set[tuple[str, int]]] = {}  # (request, group) pairs per block
        self.scheduled: Iterable[str] = ()

    def take(self, name: str, blocks: tuple[list[int], ...], num_computed: int) -> None:
        """Append blocks to a request.

        Blocks that hold the first `num_computed` tokens may be shared.
        """
        held = self._blocks.setdefault(name, [[] for _ in self._gids])
        self._left.setdefault(name, [0] * len(self._gids))
        for g, gid in enumerate(self._gids):
            num_shared = max(num_computed // self._sizes[g] - len(held[g]), 0)
            new = [block for block in blocks[gid] if block]
            for i, block in enumerate(blocks[gid]):
                if block:
                    self._take_over(block, name, g, is_shared=i < num_shared)
            held[g].extend(blocks[gid])
            if new:
                self._sanitizer.observe_allocation(name, new, group=g)

    def exclusive(self, name: str, g: int, blocks: list[int]) -> list[int]:
        """Return the blocks, with 0 for blocks that other requests also hold, because loads do not
        fill these.
        """
        own = {(name, g)}
        return [block if self._holders.get(block) == own else 0 for block in blocks]

    def of(self, name: str) -> list[list[int]]:
        """Return the blocks of a request per group, by column. Released blocks are 0."""
        return self._blocks.get(name) or [[] for _ in self._gids]

    def release(self, name: str) -> None:
        """Release all blocks of a request."""
        self._left.pop(name, None)
        for g, blocks in enumerate(self._blocks.pop(name, ())):
            self._free(name, g, [block for block in blocks if block])

    def leave(self, names: list[str], num_computed: list[int]) -> None:
        """Release the blocks that are no longer in a request's window or used by its recurrent state."""
        counts = np.array(num_computed, np.int64)
        for g, spec in enumerate(self._sanitizer.groups):
            if spec.kind == "full":
                continue
            for name, column in zip(names, (spec.first_needed(counts) // self._sizes[g]).tolist()):
                left = self._left.get(name)
                if left is not None and column > left[g]:
                    blocks, before, left[g] = self._blocks[name][g], left[g], column
                    self._free(name, g, [block for block in blocks[before:column] if block])
                    blocks[before:column] = [0] * len(blocks[before:column])

    def _take_over(self, block: int, name: str, g: int, is_shared: bool) -> None:
        """Release a block from requests that cannot hold it any longer.

        If the scheduler releases blocks of a request that is not in the current step, it does not
        inform the worker. However, if a block is assigned to another group or newly assigned to a
        request, its earlier holders must have released it.
        """
        for holder, group in list(self._holders.get(block, ())):
            waits = holder not in self.scheduled and holder != name
            if group != g or (waits and not is_shared):
                self._free(holder, group, [block])
                blocks = self._blocks[holder][group]
                blocks[blocks.index(block)] = 0
        self._holders.setdefault(block, set()).add((name, g))

    def _free(self, name: str, g: int, blocks: list[int]) -> None:
        if blocks:
            self._sanitizer.observe_free(name, blocks, group=g)
        for block in blocks:
            self._holders[block].discard((name, g))
