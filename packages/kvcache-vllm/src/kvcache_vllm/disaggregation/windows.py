# SPDX-License-Identifier: Apache-2.0
"""Computes which tokens a group's layers read, so that blocks outside a window are not loaded."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)


def check_kinds(config: KVCacheConfig) -> None:
    """Raise ValueError for groups whose blocks contain anything other than the K and V of tokens."""
    for group in config.transfer_group_ids:
        spec = config.kv_cache_groups[group].kv_cache_spec
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
            raise ValueError(
                f"the model has a KV cache group of {type(spec).__name__}: this connector transfers "
                "FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec; "
                "serve it without the connector"
            )


def first_needed(spec: KVCacheSpec, next_token: int) -> int:
    """Return the first token that is read when `next_token` is computed."""
    if window := getattr(spec, "sliding_window", None):
        return max(0, next_token - window + 1)
    if chunk := getattr(spec, "attention_chunk_size", None):
        return next_token // chunk * chunk
    return 0
