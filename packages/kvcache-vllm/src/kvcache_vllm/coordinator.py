# SPDX-License-Identifier: Apache-2.0
"""Views for the parts of vLLM's manager that schedulers and connectors access directly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvcache import allocator


class RequestBlocks(Protocol):
    """The blocks that a request holds."""

    num_computed: int


class ManagerParts(Protocol):
    """The manager's attributes that these views read."""

    native: allocator.KVCacheManager
    block_sizes: tuple[int, ...]

    @property
    def usage(self) -> float:
        """Fraction of blocks that are held."""

    def held(self, request_id: str) -> RequestBlocks | None:
        """Return the blocks of a request, or None if it has none."""


class KeptBlocks:
    """Blocks of a finished request whose release is deferred."""

    def __init__(self, request: allocator.Request) -> None:
        self.request = request


class BlockPoolView:
    """The part of vLLM's `BlockPool` that schedulers and connectors use."""

    def __init__(self, manager: ManagerParts) -> None:
        self._manager = manager
        self.null_block = KVCacheBlock(0, is_null=True)

    def free_blocks(self, blocks: Iterable[KeptBlocks]) -> None:
        """Release the blocks that `pop_blocks_for_free` returned."""
        for each in blocks:
            self._manager.native.release_blocks(each.request)

    def get_num_free_blocks(self) -> int:
        """Return the number of available blocks."""
        return self._manager.native.pool.num_free

    def get_usage(self) -> float:
        """Return the fraction of blocks that are held."""
        return self._manager.usage


class GroupView:
    """The part of vLLM's single-group manager that schedulers and connectors use."""

    def __init__(self, spec: KVCacheSpec, block_size: int) -> None:
        self.kv_cache_spec = spec
        self.block_size = block_size  # tokens per block, over all context-parallel ranks


class Coordinator:
    """The part of vLLM's coordinator that schedulers and connectors use."""

    enable_partial_hash_hits = False
    num_reprefillable_tokens = 0

    def __init__(self, manager: ManagerParts, specs: list[KVCacheSpec]) -> None:
        self._manager = manager
        self.single_type_managers = tuple(map(GroupView, specs, manager.block_sizes))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *_args: object, **_more: object
    ) -> int:
        """Return the number of additional blocks that a request needs for `num_tokens` tokens,
        ignoring windows.
        """
        manager = self._manager
        held = manager.held(request_id)
        num_computed = 0 if held is None else held.num_computed
        return sum(
            max(-(-num_tokens // size) - -(-num_computed // size), 0)
            for size in manager.block_sizes
        )
