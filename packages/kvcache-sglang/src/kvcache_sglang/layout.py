# SPDX-License-Identifier: Apache-2.0
"""Describes the KV pool of an SGLang scheduler to other engines."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvcache.transfer import CacheDescription
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.plugins.model import model_values

POOLS = (MHATokenToKVPool, MLATokenToKVPool)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
_ORDER = ("layer", "kv", "block", "token", "head", "element")
# The attention backends that divide K and V by the layer's scales before they write them.
_SCALING = {"fa3", "flashinfer", "triton"}


def layout_of_pool(
    pool: Any,
    layers: tuple[str, ...],
    num_kv_heads: int,
    engine_id: str,
    tp_size: int = 1,
    scales: tuple[list, list] | None = None,
) -> tuple[GroupLayout, list[torch.Tensor]]:
    """Return a pool's layout, and the pool's tensors in the order of the layout's regions.

    Args:
        pool: A pool whose type is in `POOLS`. Its slots are grouped into pages. Page 0 is padding.
        layers: Names of the layers.
        num_kv_heads: Number of KV heads of the model. Not used for MLA.
        engine_id: Name of the engine.
        tp_size: Number of tensor-parallel ranks.
        scales: Result of `scales_of`.

    Raises:
        ValueError: The tensors are not contiguous, or have an unexpected dtype or number of heads.
    """
    is_mla = isinstance(pool, MLATokenToKVPool)
    parts = [pool.kv_buffer] if is_mla else [pool.k_buffer, pool.v_buffer]
    tensors = [each for of_layer in zip(*parts) for each in of_layer]
    num_kv_heads = 1 if is_mla else num_kv_heads
    num_pages = len(tensors[0]) // pool.page_size
    num_own = max(num_kv_heads // tp_size, 1)
    expected = [num_pages * pool.page_size, num_own]
    for tensor in tensors:
        found = [len(tensor) // pool.page_size * pool.page_size, *tensor.shape[1:-1]]
        if not tensor.is_contiguous() or found != expected or tensor.dtype != pool.store_dtype:
            raise ValueError(
                f"the pool has a tensor of {tensor.dtype}{list(tensor.shape)} with strides "
                f"{tensor.stride()}: expected contiguous {pool.store_dtype}[slots, {num_own}, head size]"
            )
    k_scale, v_scale = scales or (None, None)
    description = CacheDescription(
        engine_id=engine_id,
        num_layers=len(layers),
        total_num_kv_heads=num_kv_heads,
        head_size=tensors[0].shape[-1],
        v_head_size=0 if is_mla else tensors[1].shape[-1],
        block_size=pool.page_size,
        is_mla=is_mla,
        memory_order=tuple(each for each in _ORDER if each != "kv" or not is_mla),
        tp_size=tp_size,
        dtype=str(pool.store_dtype).removeprefix("torch."),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return GroupLayout(layers, description, 1, num_pages), tensors


def attention_layers(model: torch.nn.Module, num_layers: int) -> dict[str, RadixAttention]:
    """Return the attention layers, in the order of the pool's layers, by the names that vLLM uses.

    Of the two modules that a layer with MLA has, this is the one that reads latent vectors.

    Raises:
        ValueError: The model does not have one attention layer per layer of the pool.
    """
    found = {
        module.layer_id: (name.removesuffix("_mqa"), module)
        for name, module in model.named_modules()
        if isinstance(module, RadixAttention) and not name.endswith("attn_mha")
    }
    if sorted(found) != list(range(num_layers)):
        raise ValueError(
            f"the model has attention layers {sorted(found)}: expected 0 to {num_layers - 1}, one per "
            "layer of the KV pool"
        )
    return dict(found[number] for number in range(num_layers))


def scales_of(
    layers: dict[str, RadixAttention], pool: Any, backends: set[str]
) -> tuple[list, list] | None:
    """Return `k_scale` and `v_scale` of layers with fp8 KV, in the form of `CacheDescription`.

    None stands for scales of 1.

    Args:
        layers: Result of `attention_layers`.
        pool: The layers' pool.
        backends: Names of the attention backends.

    Raises:
        ValueError: A scale is not 1, and it is not known that the KV is divided by it.
    """
    names = "k_scale", "v_scale"
    values = {
        layer: [1.0 if (scale := getattr(own, name)) is None else float(scale) for name in names]
        for layer, own in layers.items()
    }
    scaled = {layer: each for layer, each in values.items() if each != [1.0, 1.0]}
    if pool.dtype not in FP8 or not scaled:
        return None
    if isinstance(pool, MLATokenToKVPool) or not backends <= _SCALING:
        layer, each = next(iter(scaled.items()))
        raise ValueError(
            f"k_scale and v_scale of layer {layer} are {each}, with {type(pool).__name__} and attention "
            f"backends {sorted(backends)}: expected scales of 1, or MHATokenToKVPool and backends among "
            f"{sorted(_SCALING)}; use --kv-cache-dtype auto"
        )
    k_scales, v_scales = ([[each[kv]] for each in values.values()] for kv in (0, 1))
    return k_scales, v_scales


def model_of(scheduler: Any) -> dict[str, Any]:
    """Return, as plain values, the model properties that must be equal in both engines."""
    model, arguments = scheduler.model_config, scheduler.server_args
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    cache_dtype = arguments.kv_cache_dtype
    if pool.dtype in FP8:  # fp8_e4m3, fp8_e4m3fnuz or fp8_e5m2, also if the option is auto
        cache_dtype = str(pool.dtype).replace("torch.float8", "fp8").removesuffix("fn")
    return model_values(
        model.hf_config,
        model.hf_text_config,
        num_kv_heads=model.num_key_value_heads,
        head_size=pool.kv_cache_dim if type(pool) is MLATokenToKVPool else model.head_dim,
        dtype=model.dtype,
        cache_dtype=cache_dtype,
        quantization=model.quantization,
        name=model.model_path,
        revision=model.revision,
        max_model_len=model.context_len,
        has_weights=arguments.load_format != "dummy",
    )
