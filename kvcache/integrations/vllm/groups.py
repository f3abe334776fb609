"""vLLM's KV cache groups as kvcache's; what kvcache does not have is refused by name."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvcache.specs import GroupSpec


def group_specs(config: KVCacheConfig, use_eagle: bool) -> list[GroupSpec]:
    """A group for each of vLLM's. ValueError for kinds that are not supported.

    `use_eagle`: a drafter needs the last block of a hit computed anew, in its groups; in all, where none
    is said to be its.
    """
    groups = config.kv_cache_groups
    of_drafter = [bool(group.is_eagle_group) for group in groups]
    if use_eagle and not any(of_drafter):
        of_drafter = [True] * len(groups)
    return [
        _group_spec(group.kv_cache_spec, use_eagle and drafts)
        for group, drafts in zip(groups, of_drafter)
    ]


def _group_spec(spec: KVCacheSpec, drafts: bool) -> GroupSpec:
    kind = type(spec)
    if kind is SlidingWindowSpec:
        options = {"window": spec.sliding_window}
        return GroupSpec("sliding_window", spec.block_size, options, drafts=drafts)
    if kind is ChunkedLocalAttentionSpec:
        options = {"chunk_size": spec.attention_chunk_size}
        return GroupSpec("chunked_local", spec.block_size, options, drafts=drafts)
    if kind in (FullAttentionSpec, MLAAttentionSpec) and spec.sliding_window is None:
        return GroupSpec("full_attention", spec.block_size, drafts=drafts)
    supported = "FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec"
    raise ValueError(
        f"the model has a KV cache group of {kind.__name__}: kvcache's scheduler for vLLM supports "
        f"{supported}; serve it with vLLM's own scheduler"
    )
