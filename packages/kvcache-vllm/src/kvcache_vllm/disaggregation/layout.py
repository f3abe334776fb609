# SPDX-License-Identifier: Apache-2.0
"""Describes the layout of a vLLM worker's tensors to other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcache.checks import shown
from kvcache.transfer import CacheDescription
from kvcache_exchange.disaggregation.layout import BY_TOKEN, VEC, GroupLayout

_ORDERS = {
    "HND": ("layer", "block", "head", "token", "element"),
    "NHD": ("layer", "block", "token", "head", "element"),
}


def layout_of_group(
    layers: Sequence[str],
    tensors: Sequence[torch.Tensor],
    *,
    engine_id: str,
    num_blocks: int,
    total_num_kv_heads: int,
    tp_size: int,
    is_mla: bool = False,
    head_size: int | None = None,
    interior: str = BY_TOKEN,
    scales: tuple[list, list] | None = None,
) -> GroupLayout:
    """Return the layout of a rank's tensors [pages, heads, tokens, content], one per layer.

    Args:
        layers: Names of the layers.
        tensors: The cache of each layer.
        engine_id: Name of the engine.
        num_blocks: Blocks of the group.
        total_num_kv_heads: Number of KV heads of the model. Each rank holds an equal share of them,
            or one replicated head.
        tp_size: Tensor-parallel size.
        is_mla: Whether the layers use MLA.
        head_size: Elements of K per head. V follows K. None: the content is described as one
            vector, and only vLLM engines can read it.
        interior: Order of the elements within a page.
        scales: Result of `scales_of`. None: the layers have no scales.

    Raises:
        ValueError: Pages are not contiguous, or differ between layers, or their scales cannot be
            described.
    """
    first = tensors[0]
    if first.ndim == 3 and is_mla:
        tensors = [tensor.unsqueeze(1) for tensor in tensors]
        first = tensors[0]
    like = {(tuple(each.shape), each.stride(), each.dtype) for each in tensors}
    if len(like) > 1 or first.ndim != 4:
        raise ValueError(
            f"layers {', '.join(layers)} have caches of shapes "
            f"{sorted({tuple(each.shape) for each in tensors})}: expected one shape, "
            "[blocks, heads, tokens, content]"
        )
    num_pages, heads, tokens, content = first.shape
    _, head_stride, token_stride, stride = first.stride()
    orders = {"HND": (tokens * content, content), "NHD": (content, heads * content)}
    order = next(
        (
            name
            for name, strides in orders.items()
            if stride == 1
            and (heads == 1 or head_stride == strides[0])
            and (tokens == 1 or token_stride == strides[1])
        ),
        None,
    )
    if order is None or num_pages % num_blocks:
        raise ValueError(
            f"layer {layers[0]} has a cache of shape {tuple(first.shape)} and strides "
            f"{first.stride()}, for {num_blocks} blocks: expected each block's heads, tokens and "
            "content together, as in vLLM's layouts LBHNC, LBNHC, BLHNC and BLNHC"
        )
    if interior != BY_TOKEN and order != "HND":
        raise ValueError(f"layer {layers[0]} has the order {order}: expected HND on a CPU")
    if interior == VEC and head_size is None:
        head_size = content // 2
    total = heads * tp_size
    if total != total_num_kv_heads and heads == 1 and total_num_kv_heads < tp_size:
        total = total_num_kv_heads
    k_scale, v_scale = scales or (None, None)
    if head_size is None or head_size == content:  # without V
        if k_scale != v_scale:
            raise ValueError(
                f"layer {layers[0]} has scales {k_scale[0]} of K and {v_scale[0]} of V: expected equal "
                "scales, because its cache is exchanged as one vector"
            )
        v_scale = None
    description = CacheDescription(
        engine_id=engine_id,
        num_layers=len(layers),
        total_num_kv_heads=1 if is_mla else total,
        head_size=content if head_size is None else head_size,
        v_head_size=0 if head_size is None else content - head_size,
        block_size=tokens,
        is_mla=is_mla,
        tp_size=tp_size,
        memory_order=_ORDERS[order],
        page_stride=first.stride(0) * first.element_size(),
        dtype=str(first.dtype).removeprefix("torch."),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return GroupLayout(tuple(layers), description, num_pages // num_blocks, num_blocks, interior)


def scales_of(layers: Sequence[str], attention: Mapping[str, Any]) -> tuple[list, list]:
    """Return `k_scale` and `v_scale` of layers with fp8 caches, in the form of `CacheDescription`.

    `attention` contains vLLM's attention layers by name. Raises ValueError if a layer's scales are
    unknown, change at runtime, or differ by head.
    """
    found: tuple[list, list] = ([], [])
    for layer in layers:
        own = attention.get(layer)
        is_computed = getattr(own, "calculate_kv_scales", False)
        for name, scales in zip(("_k_scale", "_v_scale"), found):
            scale = getattr(own, name, None)
            if is_computed or not isinstance(scale, torch.Tensor) or scale.numel() != 1:
                raise ValueError(
                    f"{name} of layer {layer} is {'computed' if is_computed else shown(scale)}: expected "
                    "one fixed scale per layer, by which the other engine reads fp8 KV as well; use "
                    "--kv-cache-dtype auto"
                )
            scales.append([float(scale)])
    return found
