"""The parts of vLLM's manager that its schedulers and connectors ask besides the manager itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvcache import allocator

if TYPE_CHECKING:
    from kvcache.integrations.vllm.manager import VllmCacheManager


class KeptBlocks:
    """Blocks of a request that has ended, which are released later."""

    def __init__(self, request: allocator.Request) -> None:
        self.request = request


class BlockPoolView:
    """What schedulers and connectors ask vLLM's BlockPool."""

    def __init__(self, manager: VllmCacheManager) -> None:
        self._manager = manager
        self.null_block = KVCacheBlock(0, is_null=True)

    def free_blocks(self, blocks: Iterable[KeptBlocks]) -> None:
        """Releases what `pop_blocks_for_free` took."""
        for each in blocks:
            self._manager.native.release_blocks(each.request)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._manager.native.pool.num_free

    def get_usage(self) -> float:
        """The share of blocks that are held."""
        return self._manager.usage


class GroupView:
    """What is asked of vLLM's manager of one group."""

    def __init__(self, spec: KVCacheSpec, block_size: int) -> None:
        self.kv_cache_spec = spec
        self.block_size = block_size  # of all ranks of a context together


class Coordinator:
    """What schedulers and connectors ask vLLM's coordinator."""

    enable_partial_hash_hits = False
    num_reprefillable_tokens = 0

    def __init__(self, manager: VllmCacheManager, specs: list[KVCacheSpec]) -> None:
        self._manager = manager
        self.single_type_managers = tuple(map(GroupView, specs, manager.block_sizes))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *_args: object, **_more: object
    ) -> int:
        """Blocks that a request with blocks lacks for so many tokens; windows free none of them."""
        manager = self._manager
        held = manager.held(request_id)
        num_computed = 0 if held is None else held.num_computed
        return sum(
            max(-(-num_tokens // size) - -(-num_computed // size), 0)
            for size in manager.block_sizes
        )
