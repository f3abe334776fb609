# SPDX-License-Identifier: Apache-2.0
"""Describes the KV pool of an SGLang scheduler to other engines."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvcache.transfer import CacheDescription
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.plugins.model import model_values

POOLS = (MHATokenToKVPool,)
_ORDER = ("layer", "kv", "block", "token", "head", "element")


def layout_of_pool(
    pool: Any, layers: tuple[str, ...], num_kv_heads: int, engine_id: str, tp_size: int = 1
) -> tuple[GroupLayout, list[torch.Tensor]]:
    """Return a pool's layout, and the pool's tensors in the order of the layout's regions.

    Args:
        pool: A pool whose type is in `POOLS`. Its slots are grouped into pages. Page 0 is padding.
        layers: Names of the layers.
        num_kv_heads: Number of KV heads of the model.
        engine_id: Name of the engine.
        tp_size: Number of tensor-parallel ranks.

    Raises:
        ValueError: The tensors are not contiguous, or have an unexpected dtype or number of heads.
    """
    tensors = [each for pair in zip(pool.k_buffer, pool.v_buffer) for each in pair]
    key, value, page_size = tensors[0], tensors[1], pool.page_size
    num_pages = len(key) // page_size
    num_own = max(num_kv_heads // tp_size, 1)
    expected = [num_pages * page_size, num_own]
    for tensor in tensors:
        found = [len(tensor) // page_size * page_size, *tensor.shape[1:-1]]
        if not tensor.is_contiguous() or found != expected or tensor.dtype != pool.dtype:
            raise ValueError(
                f"the pool has a tensor of {tensor.dtype}{list(tensor.shape)} with strides "
                f"{tensor.stride()}: expected contiguous {pool.dtype}[slots, {num_own}, head size]"
            )
    description = CacheDescription(
        engine_id=engine_id,
        num_layers=len(layers),
        total_num_kv_heads=num_kv_heads,
        head_size=key.shape[-1],
        v_head_size=value.shape[-1],
        block_size=page_size,
        memory_order=_ORDER,
        tp_size=tp_size,
        dtype=str(pool.dtype).removeprefix("torch."),
    )
    return GroupLayout(layers, description, 1, num_pages), tensors


def layer_names(model: torch.nn.Module, num_layers: int) -> tuple[str, ...]:
    """Return the names of the attention layers. vLLM uses the same names.

    Raises:
        ValueError: The model does not have one attention layer per layer of the pool.
    """
    names = {
        module.layer_id: name
        for name, module in model.named_modules()
        if isinstance(module, RadixAttention)
    }
    if sorted(names) != list(range(num_layers)):
        raise ValueError(
            f"the model has attention layers {sorted(names)}: expected 0 to {num_layers - 1}, one per "
            "layer of the KV pool"
        )
    return tuple(names[number] for number in range(num_layers))


def model_of(scheduler: Any) -> dict[str, Any]:
    """Return, as plain values, the model properties that must be equal in both engines."""
    model, arguments = scheduler.model_config, scheduler.server_args
    return model_values(
        model.hf_config,
        model.hf_text_config,
        num_kv_heads=model.num_key_value_heads,
        head_size=model.head_dim,
        dtype=model.dtype,
        cache_dtype=arguments.kv_cache_dtype,
        quantization=model.quantization,
        name=model.model_path,
        revision=model.revision,
        max_model_len=model.context_len,
        has_weights=arguments.load_format != "dummy",
    )
