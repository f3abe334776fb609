# SPDX-License-Identifier: Apache-2.0
"""Converts vLLM's KV cache groups to kvcache's.

Unsupported kinds are rejected with an error that names them.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from kvcache.specs import GroupSpec
from kvcache_vllm.refusals import REFUSALS, refused

# Names of spec classes, because versions of vLLM have different ones.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "HiddenStateCacheSpec")
_WINDOWS = ("SlidingWindowSpec", "SlidingWindowMLASpec")


def group_specs(
    config: KVCacheConfig,
    use_eagle: bool,
    context_parallel_size: int = 1,
    *,
    max_model_len: int,
    hash_block_size: int,
) -> list[GroupSpec]:
    """Convert each of vLLM's groups.

    Args:
        config: vLLM's cache configuration.
        use_eagle: Whether a drafter requires the last block of a hit to be recomputed in the
            drafter's groups. If no group is marked as belonging to the drafter, this applies to all
            groups except state groups.
        context_parallel_size: Number of workers over which tokens are distributed, for groups that
            are not replicated.
        max_model_len: Maximum number of tokens of a request.
        hash_block_size: Tokens per block hash, over all context-parallel workers.

    Raises:
        ValueError: A group's kind is not supported.
    """
    groups = config.kv_cache_groups
    of_drafter = [bool(group.is_eagle_group) for group in groups]
    if use_eagle and not any(of_drafter):
        of_drafter = [not isinstance(group.kv_cache_spec, MambaSpec) for group in groups]
    # One block of this size holds any request.
    longest = -(-max_model_len // hash_block_size) * hash_block_size
    return [
        _group_spec(group.kv_cache_spec, use_eagle and drafts, context_parallel_size, longest)
        for group, drafts in zip(groups, of_drafter)
    ]


def _group_spec(
    spec: KVCacheSpec, drafts: bool, context_parallel_size: int, longest: int
) -> GroupSpec:
    kind = type(spec).__name__
    size = spec.block_size * (context_parallel_size if spec.dcp_sharded else 1)
    if kind == "MambaSpec":
        return _state_group(spec)
    if kind == "CrossAttentionSpec":
        return GroupSpec("cross_attention", size)
    if kind == "CircularBufferSpec":  # one block per request, whatever its length
        return GroupSpec("circular_window", longest, {"window": 1, "buffer": longest}, cached=False)
    if kind in _WINDOWS:
        if getattr(spec, "bounded_replay", False):
            raise refused("replayed windows", "bounded_replay is True")
        return GroupSpec("sliding_window", size, {"window": spec.sliding_window}, drafts=drafts)
    if kind == "ChunkedLocalAttentionSpec":
        options = {"chunk_size": spec.attention_chunk_size}
        return GroupSpec("chunked_local", size, options, drafts=drafts)
    # Without vLLM's hybrid manager, layers with windows keep all blocks (`spec.sliding_window`).
    if kind in _FULL:
        return GroupSpec("full_attention", size, drafts=drafts)
    name = kind if kind in REFUSALS else "another group"
    raise refused(name, f"the model has a KV cache group of {kind}")


def _state_group(spec: MambaSpec) -> GroupSpec:
    drafts = spec.num_speculative_blocks
    if spec.mamba_cache_mode == "all":
        if drafts:
            raise refused("drafts in mode all", f"num_speculative_blocks is {drafts}")
        # Each block holds one state, and the next token reads the last state.
        return GroupSpec("sliding_window", spec.block_size, {"window": 2})
    if drafts:
        return GroupSpec("recurrent", spec.block_size, {"num_speculative_blocks": drafts})
    if spec.mamba_cache_mode == "none":  # one block with the maximum number of tokens
        return GroupSpec("full_attention", spec.block_size)
    return GroupSpec("recurrent", spec.block_size)
