"""Block ids in place of vLLM's lists of block objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockIds(KVCacheBlocks):
    """Ids of each group: lists, or int32[k]. Block objects are made for those who ask for them."""

    def __init__(self, ids: Sequence[list[int] | np.ndarray]) -> None:
        self.ids = ids

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """A block object for each id."""
        return tuple(
            [KVCacheBlock(block_id, is_null=block_id == 0) for block_id in _listed(ids)]
            for ids in self.ids
        )

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
