"""The caches of a model's layers, found by letting it fill a cache of its own with one token."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvcache.checks import integer
from kvcache.specs import ELEMENT_BYTES, LayerSpec

_ALIGNMENT = 16  # bytes: where each part of a state begins


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of a recurrent state: [*shape] of `dtype`, at `offset` bytes of the state."""

    is_conv: bool  # a convolution's last inputs; else a recurrent state
    number: int  # a layer may have several of each
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer caches: K and V of each token (`attention`), a state (`state_parts`), or both."""

    index: int
    attention: LayerSpec | None
    state: LayerSpec | None
    state_parts: tuple[StatePart, ...] = ()


def attention_name(layer: int) -> str:
    """The name of a layer's K and V in specs and plans."""
    return f"layers.{layer}"


def state_name(layer: int) -> str:
    """The name of a layer's recurrent state in specs and plans."""
    return f"layers.{layer}.state"


def layer_specs(
    model: PreTrainedModel,
    *,
    block_size: int = 16,
    kv_cache_dtype: torch.dtype | str | None = None,
    num_speculative_tokens: int = 0,
) -> list[LayerSpec]:
    """The layers of a transformers model as `plan_cache` takes them.

    The model computes one token into its own `DynamicCache`, whose tensors say how many heads, which
    sizes, dtypes and states each layer has; its configuration says which layers see a window or a chunk.
    `kv_cache_dtype`: of K and V; None: the model's. `num_speculative_tokens`: drafts of a step, after
    each of which a recurrent state is kept. ValueError for layers that nothing here can serve.

    >>> from kvcache.integrations.transformers.tiny_models import tiny_model
    >>> [spec.kind for spec in layer_specs(tiny_model("bamba"))]
    ['recurrent', 'full_attention', 'recurrent', 'full_attention']
    """
    shapes = layer_shapes(
        model,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        num_speculative_tokens=num_speculative_tokens,
    )
    return specs_of(shapes)


def specs_of(shapes: list[LayerShape]) -> list[LayerSpec]:
    """All specs, layer after layer."""
    return [spec for shape in shapes for spec in (shape.attention, shape.state) if spec is not None]


def layer_shapes(
    model: PreTrainedModel,
    *,
    block_size: int,
    kv_cache_dtype: torch.dtype | str | None,
    num_speculative_tokens: int,
) -> list[LayerShape]:
    """As `layer_specs`, with the tensors of each state."""
    block_size = integer(block_size, "block_size", least=1)
    num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"model has num_kv_shared_layers {config.num_kv_shared_layers}: expected 0, layers that read "
            "another layer's K and V are not supported"
        )
    cache = _filled_cache(model)
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    shapes = []
    for index, layer in enumerate(cache.layers):
        attention = state = None
        parts: tuple[StatePart, ...] = ()
        if getattr(layer, "keys", None) is not None:
            attention = _attention_spec(
                index, layer, types[index], config, block_size, kv_cache_dtype
            )
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            parts = _parts_of(layer)
            end = parts[-1].offset + parts[-1].num_bytes
            state = LayerSpec(
                state_name(index),
                "recurrent",
                block_size,
                dtype="uint8",
                state_bytes=-(-end // _ALIGNMENT) * _ALIGNMENT,
                options={"num_speculative_blocks": num_drafts} if num_drafts else {},
            )
        if attention or state:  # others cache nothing: experts, say
            shapes.append(LayerShape(index, attention, state, parts))
    if not shapes:
        raise ValueError(
            f"model is a {type(model).__name__}: expected one whose layers cache something"
        )
    return shapes


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model takes its cache: `cache` since transformers 5.24."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _filled_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    return cache


def _attention_spec(
    index: int,
    layer: object,
    kind: str,
    config: object,
    block_size: int,
    kv_cache_dtype: torch.dtype | str | None,
) -> LayerSpec:
    if hasattr(layer, "update_indexer"):
        raise ValueError(
            f"layer {index} of the model has an indexer of its own keys: such layers are not supported"
        )
    _, num_heads, _, head_size = layer.keys.shape
    _, num_v_heads, _, v_head_size = layer.values.shape
    if num_heads != num_v_heads:
        raise ValueError(
            f"layer {index} of the model has {num_heads} heads of K and {num_v_heads} of V: expected "
            "as many"
        )
    is_mla = num_heads == 1 and getattr(config, "kv_lora_rank", None) == head_size
    options = {}
    if kind == "chunked_attention":
        kind, options = "chunked_local", {"chunk_size": config.attention_chunk_size}
    elif getattr(layer, "is_sliding", False):
        kind, options = "sliding_window", {"window": int(layer.sliding_window)}
    else:
        kind = "full_attention"
    dtype = (
        str(layer.keys.dtype).removeprefix("torch.") if kv_cache_dtype is None else kv_cache_dtype
    )
    if isinstance(dtype, str) and dtype not in ELEMENT_BYTES:
        raise ValueError(f"kv_cache_dtype is {dtype!r}: expected one of {', '.join(ELEMENT_BYTES)}")
    return LayerSpec(
        attention_name(index),
        kind,
        block_size,
        num_kv_heads=num_heads,
        head_size=head_size,
        v_head_size=v_head_size,
        dtype=dtype,
        options=options,
        is_mla=is_mla,
    )


def _parts_of(layer: LinearAttentionCacheLayerMixin) -> tuple[StatePart, ...]:
    parts: list[StatePart] = []
    offset = 0
    for is_conv, states in ((True, layer.conv_states), (False, layer.recurrent_states)):
        for number, state in states.items():
            if state is not None:
                part = StatePart(is_conv, number, tuple(state.shape[1:]), state.dtype, offset)
                parts.append(part)
                offset += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(parts)
