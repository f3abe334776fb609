"""Block ids in place of vLLM's lists of block objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_IN_CACHE = BlockHashWithGroupId(b"in the cache")


class BlockIds(KVCacheBlocks):
    """Ids of each group: lists, or int32[k]. Block objects are made for those who ask for them.

    num_cached: of each group, how many of the first blocks are in the cache; None: of no group any.
    Objects of these have a hash, which says no more than that.
    """

    num_cached: Sequence[int] | None = None

    def __init__(
        self, ids: Sequence[list[int] | np.ndarray], num_cached: Sequence[int] | None = None
    ) -> None:
        self.ids, self.num_cached = ids, num_cached

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """A block object for each id."""
        found = []
        for ids, num_cached in zip(self.ids, self.num_cached or [0] * len(self.ids)):
            blocks = [KVCacheBlock(block_id, is_null=block_id == 0) for block_id in _listed(ids)]
            for block in blocks[:num_cached]:
                if not block.is_null:
                    block._block_hash = _IN_CACHE
            found.append(blocks)
        return tuple(found)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """The ids of each group, or of some; None where there are none and `allow_none`."""
        ids = self.ids if group_ids is None else [self.ids[group] for group in group_ids]
        if allow_none and not any(map(len, ids)):
            return None
        return tuple(map(_listed, ids))

    def new_empty(self) -> KVCacheBlocks:
        """As many groups without blocks."""
        return KVCacheBlocks(tuple(() for _ in self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Both, one behind the other."""
        return BlockIds([_listed(own) + more for own, more in zip(self.ids, other.get_block_ids())])


class NoBlocks(KVCacheBlocks):
    """Groups without blocks, the answer to most requests of a step: asked for ids, it says so at once."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(tuple(() for _ in range(num_groups)))

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """As `BlockIds`."""
        if allow_none:
            return None
        return super().get_block_ids(group_ids=group_ids)


class NewBlocks(BlockIds):
    """A list of ids for each group, one of them not empty, as a request's new blocks are."""

    def __init__(self, ids: tuple[list[int], ...]) -> None:
        self.ids = ids

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """As `BlockIds`."""
        if group_ids is None:
            return self.ids
        return super().get_block_ids(allow_none, group_ids=group_ids)


def _listed(ids: list[int] | np.ndarray) -> list[int]:
    return ids if isinstance(ids, list) else ids.tolist()
