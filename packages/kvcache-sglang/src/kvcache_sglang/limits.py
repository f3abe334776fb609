# SPDX-License-Identifier: Apache-2.0
"""Checks at startup that a configuration of SGLang can exchange KV."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcache_exchange.plugins.model import has_variable_rope
from kvcache_sglang.layout import FP8, POOLS
from kvcache_sglang.options import resolved
from kvcache_sglang.prefix_cache import SGLangPrefixCache


def check_scheduler(scheduler: Any) -> None:
    """Raise a one-line ValueError if a scheduler's KV cannot be exchanged."""
    arguments, tree = scheduler.server_args, scheduler.tree_cache
    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    names = ("pp_size", "dp_size", "attn_cp_size", "dcp_size")
    sizes = {name: resolved(arguments, name) for name in names}
    unsupported = {f"{name} {size}": size != 1 for name, size in sizes.items()}
    unsupported |= {
        "--page-size 1": scheduler.page_size == 1,
        "--disable-radix-cache": arguments.disable_radix_cache,
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "--disaggregation-mode": scheduler.disaggregation_mode.value != "null",
        "an external cache linker": arguments.enable_unified_cache_external_linker,
        "streaming sessions": arguments.enable_streaming_session,
        "--enable-return-routed-experts": arguments.enable_return_routed_experts,
        "--enable-return-indexer-topk": arguments.enable_return_indexer_topk,
        "a diffusion language model": scheduler.dllm_config is not None,
        "rotary embeddings that depend on the batch": has_variable_rope(
            scheduler.model_config.hf_text_config
        ),
        "--enable-memory-saver": arguments.enable_memory_saver,
        f"KV of {pool.dtype}": pool.dtype.itemsize == 1 and pool.dtype not in FP8,
        "KV with a quantization method": getattr(pool, "is_quantized_kv_cache", False),
        "the Rust server": scheduler.rust_server is not None,
        "KVCACHE_SANITIZE": hasattr(scheduler, "kvcache_sanitizer"),
        f"radix cache {type(tree).__name__}": type(tree)
        not in (UnifiedRadixCache, SGLangPrefixCache),
        f"KV pool {type(pool).__name__}": type(pool) not in POOLS,
        f"allocator {type(allocator).__name__}": type(allocator) is not PagedTokenToKVPoolAllocator,
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise ValueError(
            f"KVCACHE_EXCHANGE is set, and SGLang uses {', '.join(found)}: not supported"
        )
