# SPDX-License-Identifier: Apache-2.0
"""Converts vLLM's KV cache groups to kvcache's.

Unsupported kinds are rejected with an error that names them.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvcache.specs import GroupSpec

SUPPORTED = (
    *(FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec),
    *(MambaSpec, CrossAttentionSpec),
)


def group_specs(
    config: KVCacheConfig, use_eagle: bool, context_parallel_size: int = 1
) -> list[GroupSpec]:
    """Convert each of vLLM's groups.

    Args:
        config: vLLM's cache configuration.
        use_eagle: Whether a drafter requires the last block of a hit to be recomputed in the
            drafter's groups. If no group is marked as belonging to the drafter, this applies to all
            groups except state groups.
        context_parallel_size: Number of workers over which tokens are distributed, for groups that
            are not replicated.

    Raises:
        ValueError: A group's kind is not supported.
    """
    groups = config.kv_cache_groups
    of_drafter = [bool(group.is_eagle_group) for group in groups]
    if use_eagle and not any(of_drafter):
        of_drafter = [not isinstance(group.kv_cache_spec, MambaSpec) for group in groups]
    return [
        _group_spec(group.kv_cache_spec, use_eagle and drafts, context_parallel_size)
        for group, drafts in zip(groups, of_drafter)
    ]


def _group_spec(spec: KVCacheSpec, drafts: bool, context_parallel_size: int) -> GroupSpec:
    kind = type(spec)
    size = spec.block_size * (context_parallel_size if spec.dcp_sharded else 1)
    if kind is MambaSpec:
        return _state_group(spec)
    if kind is CrossAttentionSpec:
        return GroupSpec("cross_attention", size)
    if kind is SlidingWindowSpec:
        return GroupSpec("sliding_window", size, {"window": spec.sliding_window}, drafts=drafts)
    if kind is ChunkedLocalAttentionSpec:
        options = {"chunk_size": spec.attention_chunk_size}
        return GroupSpec("chunked_local", size, options, drafts=drafts)
    # Without vLLM's hybrid manager, layers with windows keep all blocks (`spec.sliding_window`).
    if kind in (FullAttentionSpec, MLAAttentionSpec):
        return GroupSpec("full_attention", size, drafts=drafts)
    names = ", ".join(each.__name__ for each in SUPPORTED)
    raise ValueError(
        f"the model has a KV cache group of {kind.__name__}: kvcache's scheduler for vLLM supports "
        f"{names}; serve it with vLLM's own scheduler"
    )


def _state_group(spec: MambaSpec) -> GroupSpec:
    if spec.num_speculative_blocks:
        raise ValueError(
            f"the model keeps states of drafts (num_speculative_blocks {spec.num_speculative_blocks}): "
            "kvcache's scheduler for vLLM supports 0; leave out --speculative-config, or serve it with "
            "vLLM's own scheduler"
        )
    if spec.mamba_cache_mode == "none":  # one block with the maximum number of tokens
        return GroupSpec("full_attention", spec.block_size)
    # Each block holds one state, and the next token reads the last state.
    if spec.mamba_cache_mode == "all":
        return GroupSpec("sliding_window", spec.block_size, {"window": 2})
    return GroupSpec("recurrent", spec.block_size)
