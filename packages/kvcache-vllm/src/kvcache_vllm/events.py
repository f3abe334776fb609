# SPDX-License-Identifier: Apache-2.0
"""Converts kvcache's cache events to vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvcache_vllm.hashing import RequestHashes

_MOST_DISCARDED = 4096  # maximum number of blocks for which discarded tokens are recorded
MEDIUM = "GPU"  # vLLM's name for the pool's memory on any device


class VllmEventTranslator:
    """Translates the events of one manager, and adds the fields that vLLM reports for each group."""

    def __init__(self, config: KVCacheConfig) -> None:
        self._kinds = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in config.kv_cache_groups
        ]

        self._adapter_ids: dict[str, int] = {}  # LoRA adapters that requests have used
        self._discarded: dict[bytes, list[int]] = {}

    def follow(self, hashes: Sequence[bytes]) -> None:
        """Record tokens that a session discards even though a hash in its list covers them.

        vLLM keeps the hash in this case, because a drafter's KV depends on these tokens.
        """
        if isinstance(hashes, RequestHashes):
            hashes.discarded = self._discarded
            while len(self._discarded) > _MOST_DISCARDED:
                del self._discarded[next(iter(self._discarded))]

    def labels_of(self, request: Request) -> dict[str, Any]:
        """Return the `Request` options that determine the extra keys in the events of the request's
        blocks.

        Extra keys for prompt embeddings are omitted.
        """
        labels: dict[str, Any] = {"session": request.session_id}
        if request.prompt_embeds is not None:
            return labels
        if request.lora_request:
            name = request.lora_request.lora_name
            self._adapter_ids[name] = request.lora_request.adapter_id
            labels["lora"] = (name, request.lora_request.lora_path)
        labels["mm_items"] = [
            (each.identifier, each.mm_position.offset, each.mm_position.length)
            for each in request.mm_features
        ]
        return labels | {"cache_salt": request.cache_salt}

    def translate(self, event: CacheEvent) -> kv_events.KVCacheEvent:
        """Translate one event of the device pool."""
        if isinstance(event, AllBlocksCleared):
            return kv_events.AllBlocksCleared()
        if isinstance(event, BlockRemoved):
            return kv_events.BlockRemoved(
                block_hashes=_hashes(event), medium=MEDIUM, group_idx=event.group
            )
        return self._stored(event)

    def _stored(self, event: BlockStored) -> kv_events.BlockStored:
        kind, window = self._kinds[event.group]
        lookahead = {}
        if event.lookahead_token_ids is not None:
            own = [self._discarded.get(each.tobytes()) for each in event.block_hashes]
            known = event.lookahead_token_ids.tolist()
            lookahead["lookahead_token_ids"] = [a or b for a, b in zip(own, known)]
        is_first = event.parent_hash in (None, kv_cache_utils.NONE_HASH)
        return kv_events.BlockStored(
            block_hashes=_hashes(event),
            parent_block_hash=None if is_first else _external(event.parent_hash),
            token_ids=event.token_ids.tolist(),
            block_size=event.block_size,
            lora_id=self._adapter_ids[event.lora[0]] if event.lora else None,
            medium=MEDIUM,
            lora_name=event.lora[0] if event.lora else None,
            extra_keys=_extra_keys(event),
            session_id=event.session,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            **lookahead,
        )


def _extra_keys(event: BlockStored) -> list[tuple[Any, ...] | None] | None:
    """Return one entry per block, or None if blocks are hashed in parts."""
    if event.hash_block_size != event.block_size:
        return None
    if event.extra_keys is None:
        return [None] * len(event.block_hashes)
    return kv_cache_utils.to_event_extra_keys(event.extra_keys)


def _hashes(event: BlockStored | BlockRemoved) -> list[ExternalBlockHash]:
    return [_external(each.tobytes()) for each in event.block_hashes]


def _external(block_hash: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(block_hash))
