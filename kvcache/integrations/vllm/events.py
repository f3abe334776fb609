"""KV cache events of kvcache as vLLM's."""

from __future__ import annotations

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

MEDIUM = "GPU"  # as vLLM calls the pool's memory, on any device


class EventTranslator:
    """Translates events of one manager; knows what vLLM tells of each group besides."""

    def __init__(self, config: KVCacheConfig) -> None:
        self._kinds = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in config.kv_cache_groups
        ]

    def translate(self, event: CacheEvent) -> kv_events.KVCacheEvent:
        """One event of the device's pool."""
        if isinstance(event, AllBlocksCleared):
            return kv_events.AllBlocksCleared()
        if isinstance(event, BlockRemoved):
            return kv_events.BlockRemoved(
                block_hashes=_hashes(event), medium=MEDIUM, group_idx=event.group
            )
        return self._stored(event)

    def _stored(self, event: BlockStored) -> kv_events.BlockStored:
        kind, window = self._kinds[event.group]
        is_first = event.parent_hash in (None, kv_cache_utils.NONE_HASH)
        return kv_events.BlockStored(
            block_hashes=_hashes(event),
            parent_block_hash=None if is_first else _external(event.parent_hash),
            token_ids=event.token_ids.tolist(),
            block_size=event.block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


def _hashes(event: BlockStored | BlockRemoved) -> list[ExternalBlockHash]:
    return [_external(each.tobytes()) for each in event.block_hashes]


def _external(block_hash: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(block_hash))
