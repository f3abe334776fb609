"""Which tokens a group's layers read, so that blocks of a window that are gone are not asked for."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)


def check_kinds(config: KVCacheConfig) -> None:
    """ValueError for groups whose blocks are not K and V of tokens."""
    for group in config.transfer_group_ids:
        spec = config.kv_cache_groups[group].kv_cache_spec
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
            raise ValueError(
                f"the model has a KV cache group of {type(spec).__name__}: this connector transfers "
                "FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec; "
                "serve it without the connector"
            )


def first_needed(spec: KVCacheSpec, next_token: int) -> int:
    """The first token that is read when `next_token` is computed."""
    if window := getattr(spec, "sliding_window", None):
        return max(0, next_token - window + 1)
    if chunk := getattr(spec, "attention_chunk_size", None):
        return next_token // chunk * chunk
    return 0


def is_complete(blocks: Sequence[int], block_size: int, first_token: int, end_token: int) -> bool:
    """Whether blocks hold the tokens [first_token, end_token): none is 0 or behind the last."""
    if first_token >= end_token:
        return True
    first, last = first_token // block_size, (end_token - 1) // block_size
    return last < len(blocks) and all(blocks[first : last + 1])
