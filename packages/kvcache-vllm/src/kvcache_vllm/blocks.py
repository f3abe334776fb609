# SPDX-License-Identifier: Apache-2.0
"""Replaces vLLM's lists of block objects with block ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from kvcache_vllm import private

_IN_CACHE = BlockHashWithGroupId(b"in the cache")


class BlockIds(KVCacheBlocks):
    """The block ids of each group, as lists or int32[k]. Block objects are created on demand.

    `num_cached` is the number of leading cached blocks per group (None: 0). The block objects of
    cached blocks have a placeholder hash, whose only purpose is to mark them as cached.
    """

    num_cached: Sequence[int] | None = None

    def __init__(
        self, ids: Sequence[list[int] | np.ndarray], num_cached: Sequence[int] | None = None
    ) -> None:
        self.ids, self.num_cached = ids, num_cached

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """Return a block object for each id."""
        found = []
        for ids, num_cached in zip(self.ids, self.num_cached or [0] * len(self.ids)):
            blocks = [KVCacheBlock(block_id, is_null=block_id == 0) for block_id in _listed(ids)]
            for block in blocks[:num_cached]:
                if not block.is_null:
                    private.set_block_hash(block, _IN_CACHE)
            found.append(blocks)
        return tuple(found)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the ids of all groups or of `group_ids`; None if `allow_none` is set and all are
        empty.
        """
        ids = self.ids if group_ids is None else [self.ids[group] for group in group_ids]
        if allow_none and not any(map(len, ids)):
            return None
        return tuple(map(_listed, ids))

    def new_empty(self) -> KVCacheBlocks:
        """Return an object with the same number of groups, each without blocks."""
        return KVCacheBlocks(tuple(() for _ in self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Concatenate the blocks of each group."""
        return BlockIds([_listed(own) + more for own, more in zip(self.ids, other.get_block_ids())])


class NoBlocks(KVCacheBlocks):
    """Groups without blocks, which is the most frequent result in a step.

    Ids are returned without inspecting the groups.
    """

    def __init__(self, num_groups: int) -> None:
        super().__init__(tuple(() for _ in range(num_groups)))

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the same as `BlockIds.get_block_ids`."""
        if allow_none:
            return None
        return super().get_block_ids(group_ids=group_ids)


class NewBlocks(BlockIds):
    """New blocks of a request: a list of ids per group, at least one of which is not empty."""

    def __init__(self, ids: tuple[list[int], ...]) -> None:
        self.ids = ids

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the same as `BlockIds.get_block_ids`."""
        if group_ids is None:
            return self.ids
        return super().get_block_ids(allow_none, group_ids=group_ids)


def _listed(ids: list[int] | np.ndarray) -> list[int]:
    return ids if isinstance(ids, list) else ids.tolist()
