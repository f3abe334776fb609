# SPDX-License-Identifier: Apache-2.0
"""Views for the parts of vLLM's manager that schedulers and connectors access directly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, Protocol

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvcache import allocator


class RequestBlocks(Protocol):
    """The blocks that a request holds."""

    request: allocator.Request


class ManagerParts(Protocol):
    """The manager's attributes that these views read."""

    native: allocator.KVCacheManager
    block_sizes: Sequence[int]
    max_model_len: int

    @property
    def usage(self) -> float:
        """Fraction of blocks that are held."""

    def held(self, request_id: str) -> RequestBlocks | None:
        """Return the blocks of a request, or None if it has none."""

    def publish_computed(self) -> None:
        """Cache the blocks that requests have filled with computed tokens."""


class KeptBlocks:
    """Blocks of a finished request whose release is deferred."""

    def __init__(self, request: allocator.Request) -> None:
        self.request = request


class PoolBlock:
    """A block of the pool, with the part of vLLM's `KVCacheBlock` that connectors use."""

    __slots__ = ("_pool", "block_id")
    __hash__ = None  # as in vLLM

    block_hash_num_tokens = None  # unknown; vLLM uses it for hits that end inside blocks

    def __init__(self, pool: BlockPoolView, block_id: int) -> None:
        self._pool, self.block_id = pool, block_id

    @property
    def is_null(self) -> bool:
        """Whether this is the null block."""
        return self.block_id == 0

    @property
    def ref_cnt(self) -> int:
        """Number of references to the block."""
        return 0 if self.is_null else int(self._pool.native.pool.ref_counts([self.block_id])[0])

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """The hash under which the block is cached, or None."""
        return None if self.is_null else self._pool.hash_of(self.block_id)

    def __getattr__(self, name: str) -> NoReturn:
        _fail_name("block", name)


class PoolBlocks(Sequence[PoolBlock]):
    """The blocks of the pool by id."""

    def __init__(self, pool: BlockPoolView) -> None:
        self._pool = pool
        self._made: dict[int, PoolBlock] = {}  # one object per block, as in vLLM

    def __len__(self) -> int:
        return self._pool.native.pool.num_blocks

    def __getitem__(self, block_id: int) -> PoolBlock:
        if not 0 <= block_id < len(self):
            raise IndexError(f"block_id is {block_id}: expected 0 to {len(self) - 1}")
        if block_id == 0:
            return self._pool.null_block
        return self._made.setdefault(block_id, PoolBlock(self._pool, block_id))


class BlockPoolView:
    """The part of vLLM's `BlockPool` that schedulers and connectors use.

    Attributes:
        cached_block_hashes_by_block: Empty, because no block is cached under several hashes.
    """

    cached_block_hashes_by_block: Mapping[int, set[BlockHashWithGroupId]] = MappingProxyType({})

    def __init__(self, manager: ManagerParts) -> None:
        self._manager, self.native = manager, manager.native
        self.blocks = PoolBlocks(self)
        self.null_block = KVCacheBlock(0, is_null=True)
        self._is_current = False

    def touch(self, blocks: Iterable[PoolBlock | KVCacheBlock]) -> None:
        """Add a reference to each block, until `free_blocks`."""
        self.native.hold_blocks([each.block_id for each in blocks if not each.is_null])

    def free_blocks(self, blocks: Iterable[KeptBlocks | PoolBlock | KVCacheBlock]) -> None:
        """Release blocks that `touch` holds, and the blocks that `pop_blocks_for_free` returned."""
        blocks = list(blocks)
        kept = [each for each in blocks if isinstance(each, KeptBlocks)]
        others = [each for each in blocks if not isinstance(each, KeptBlocks)]
        self.native.release_blocks([each.block_id for each in others if not each.is_null])
        for each in kept:
            self.native.release_blocks(each.request)

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[PoolBlock] | None:
        """Return the block that is cached under the hash in each group, or None if a group has none."""
        self._publish()
        find = self.native.cache.find
        found = [int(find([block_hash], group).device[0]) for group in kv_cache_group_ids]
        return None if min(found) < 0 else [self.blocks[block_id] for block_id in found]

    def hash_of(self, block_id: int) -> BlockHashWithGroupId | None:
        """Return the hash under which a block is cached, or None."""
        self._publish()
        (block_hash,), (group,) = self.native.cache.hashes_of([block_id])
        if group < 0:
            return None
        return make_block_hash_with_group_id(BlockHash(block_hash.tobytes()), int(group))

    def expire(self) -> None:
        """Publish computed blocks again before the next hash is read."""
        self._is_current = False

    def _publish(self) -> None:
        if not self._is_current:
            self._manager.publish_computed()
            self._is_current = True

    def get_num_free_blocks(self) -> int:
        """Return the number of available blocks."""
        return self.native.pool.num_free

    def get_usage(self) -> float:
        """Return the fraction of blocks that are held."""
        return self._manager.usage

    def __getattr__(self, name: str) -> NoReturn:
        _fail_name("block_pool", name)


class GroupView:
    """The part of vLLM's single-group manager that schedulers and connectors use."""

    def __init__(
        self, spec: KVCacheSpec, block_size: int, max_blocks: int | None, block_pool: BlockPoolView
    ) -> None:
        self.kv_cache_spec = spec
        self.block_size = block_size  # tokens per block, over all context-parallel ranks
        self.max_admission_blocks_per_request = max_blocks
        self.block_pool = block_pool

    def num_skipped_blocks(self, num_computed: int) -> int:
        """Return the number of leading blocks that no token from `num_computed` on attends to."""
        spec, first = self.kv_cache_spec, 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(num_computed - spec.sliding_window + 1, 0)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = num_computed // spec.attention_chunk_size * spec.attention_chunk_size
        return first // self.block_size

    def num_new_blocks(self, num_tokens: int, num_held: int, *, has_cap: bool) -> int:
        """Return the number of additional blocks that a request with `num_held` blocks, null blocks
        included, needs for `num_tokens` tokens. `has_cap`: it frees blocks that have left its window.
        """
        num_needed = -(-num_tokens // self.block_size)
        if has_cap and self.max_admission_blocks_per_request is not None:
            num_needed = min(num_needed, self.max_admission_blocks_per_request)
        num_new = max(num_needed - num_held, 0)
        spec = self.kv_cache_spec
        if isinstance(spec, CrossAttentionSpec):
            return 0
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            return min(num_new, 1)
        return num_new


class Coordinator:
    """The part of vLLM's coordinator that schedulers and connectors use."""

    enable_partial_hash_hits = False
    num_reprefillable_tokens = 0

    def __init__(
        self,
        manager: ManagerParts,
        specs: list[KVCacheSpec],
        max_in_flight_tokens: int,
        block_pool: BlockPoolView,
    ) -> None:
        self._manager = manager
        limits = {
            "max_in_flight_tokens": max_in_flight_tokens,
            "max_model_len": manager.max_model_len,
        }
        caps = [
            spec.max_admission_blocks_per_request(**limits)
            if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
            else None
            for spec in specs
        ]
        self.single_type_managers = tuple(
            GroupView(*each, block_pool) for each in zip(specs, manager.block_sizes, caps)
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *_args: object,
        apply_admission_cap: bool = False,
        **_more: object,
    ) -> int:
        """Return the number of additional blocks that a request needs for `num_tokens` tokens."""
        held = self._manager.held(request_id)
        num_held = [0] * len(self.single_type_managers)
        if held is not None:
            native = self._manager.native
            num_held = [len(native.block_ids(held.request, g)) for g in range(len(num_held))]
        return sum(
            group.num_new_blocks(num_tokens, count, has_cap=apply_admission_cap)
            for group, count in zip(self.single_type_managers, num_held)
        )


def _fail_name(part: str, name: str) -> NoReturn:
    raise AttributeError(
        f"{part}.{name} of vLLM's KV cache manager was read, which kvcache's does not have: serve with "
        "vLLM's own scheduler, or choose another connector"
    )
