# SPDX-License-Identifier: Apache-2.0
"""Detects the caches of a model's layers by computing one token with the model's own cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from kvcache.checks import dtype_name, instance, integer
from kvcache.formats import format_names
from kvcache.specs import ELEMENT_BYTES, LayerSpec
from kvcache_serve.engine.transformers.calls import call_arguments, undisturbed
from kvcache_serve.engine.transformers.unsupported import UnsupportedModel

_ALIGNMENT = 16  # alignment of each part of a state, in bytes
# The cache layers of transformers whose contents are known. Subclasses are excluded, because they may
# add tensors.
_KNOWN_LAYERS = [
    getattr(cache_utils, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    )
    if hasattr(cache_utils, name)
]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state, [*shape], stored at byte `offset` of the state."""

    is_conv: bool  # True: last inputs of a convolution; False: a recurrent state
    number: int  # index among the layer's parts of the same kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The cache of a layer: K and V of each token (`attention`), a state (`state_parts`), or both.

    `mixer`: the name of the module that updates the state but no K and V. None if there is no such
    module.
    """

    index: int
    attention: LayerSpec | None
    state: LayerSpec | None
    state_parts: tuple[StatePart, ...] = ()
    mixer: str | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The cache of each layer of a model, and the number of logits per token."""

    layers: list[LayerShape]
    vocab_size: int

    @property
    def specs(self) -> list[LayerSpec]:
        """The specs of all layers for `plan_cache`."""
        both = ((layer.attention, layer.state) for layer in self.layers)
        return [spec for pair in both for spec in pair if spec is not None]


def attention_name(layer: int) -> str:
    """Return the name of a layer's K and V in specs and plans."""
    return f"layers.{layer}"


def state_name(layer: int) -> str:
    """Return the name of a layer's recurrent state in specs and plans."""
    return f"layers.{layer}.state"


def layer_specs(
    model: PreTrainedModel,
    *,
    block_size: int = 16,
    kv_cache_dtype: torch.dtype | str | None = None,
    num_speculative_tokens: int = 0,
) -> list[LayerSpec]:
    """Return the layers of a transformers model as specs for `plan_cache`.

    The model computes one token with its own `DynamicCache`, whose tensors reveal the heads, sizes,
    dtypes and states of each layer. The model's configuration determines windows and chunks.

    Args:
        model: A causal language model of transformers.
        block_size: Tokens per block.
        kv_cache_dtype: The dtype of K and V, or the name of a quantized format (`kvcache.formats`). None:
            the model's dtype.
        num_speculative_tokens: Maximum number of draft tokens per step. A recurrent state is kept
            after each draft token.

    Raises:
        ValueError: A layer is not supported.


    >>> from kvcache_serve.engine.transformers.tiny_models import tiny_model
    >>> [spec.kind for spec in layer_specs(tiny_model("bamba"))]
    ['recurrent', 'full_attention', 'recurrent', 'full_attention']
    """
    instance(model, PreTrainedModel, "model")
    block_size = integer(block_size, "block_size", least=1)
    num_drafts = integer(num_speculative_tokens, "num_speculative_tokens")
    return model_shape(model, FilledCache(model), block_size, kv_cache_dtype, num_drafts).specs


def model_shape(
    model: PreTrainedModel,
    cache: FilledCache,
    block_size: int,
    kv_cache_dtype: torch.dtype | str | None,
    num_drafts: int,
) -> ModelShape:
    """Return the cache shapes of all layers, including the tensors of each state. `cache` is the cache
    that the model filled.
    """
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or []
    shapes = []
    for index, layer in enumerate(cache.layers):
        attention = state = None
        parts: tuple[StatePart, ...] = ()
        if type(layer) not in _KNOWN_LAYERS:
            raise UnsupportedModel(
                model,
                f"layer {index} keeps a {type(layer).__name__}, which holds more than K, V and states",
            )
        if getattr(layer, "keys", None) is not None:
            attention = _attention_spec(
                model,
                index,
                layer,
                types[index] if index < len(types) else "full_attention",
                block_size,
                kv_cache_dtype,
            )
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            parts = _parts_of(layer)
        if parts:
            end = parts[-1].offset + parts[-1].num_bytes
            state = LayerSpec(
                state_name(index),
                "recurrent",
                block_size,
                dtype="uint8",
                state_bytes=-(-end // _ALIGNMENT) * _ALIGNMENT,
                options={"num_speculative_blocks": num_drafts} if num_drafts else {},
            )
        if attention or state:  # other layers, such as experts, have no cache
            mixer = cache.mixers.get(index)
            shapes.append(LayerShape(index, attention, state, parts, mixer))
    if not shapes:
        raise UnsupportedModel(model, "none of its layers stores anything in the cache")
    return ModelShape(shapes, cache.vocab_size)


class FilledCache(DynamicCache):
    """A cache filled by running the model on a single token. Also records which modules updated
    recurrent states.

    `mixers`: for each layer, the name of the module that updates the state, unless the module also
    updates K and V. `vocab_size`: the number of logits per token. Raises `UnsupportedModel` if the
    model cannot compute a token with this cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.config.is_encoder_decoder:
            raise UnsupportedModel(
                model,
                "each layer reads an encoder's output, which an engine for token IDs does not compute",
            )
        self.mixers: dict[int, str] = {}
        self._calls: list[str] = []  # layer modules whose forward is running, outermost first
        self._attention: set[str] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        try:
            super().__init__(config=model.config)
            for name, module in model.named_modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    self._watch(name, module)
            with undisturbed(model):
                output = model(**call_arguments(model, token, 0, cache=self))
            self.vocab_size = output.logits.shape[-1]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        # The model's code may raise any exception if it requires other inputs or another cache.
        except Exception as error:
            raise UnsupportedModel(
                model, f"it cannot compute a token with a cache ({type(error).__name__}: {error})"
            ) from error
        finally:
            for hook in self._hooks:
                hook.remove()
        self.mixers = {
            layer: name for layer, name in self.mixers.items() if name not in self._attention
        }

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        def begin(*_: object) -> None:
            self._calls.append(name)

        def end(*_: object) -> None:  # a hook's return value would replace the module's output
            self._calls.pop()

        self._hooks.append(module.register_forward_pre_hook(begin))
        self._hooks.append(module.register_forward_hook(end, always_call=True))

    def update(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same as `DynamicCache`, and record the calling module."""
        self._attention.update(self._calls[-1:])
        return super().update(*args, **kwargs)

    def update_conv_state(self, states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Do the same as `DynamicCache`, and record the calling module."""
        self._note(layer_idx)
        return super().update_conv_state(states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Do the same as `DynamicCache`, and record the calling module."""
        self._note(layer_idx)
        return super().update_recurrent_state(states, layer_idx, *args, **kwargs)

    def _note(self, layer: int) -> None:
        if self._calls:
            self.mixers[layer] = self._calls[-1]


def _attention_spec(
    model: PreTrainedModel,
    index: int,
    layer: DynamicLayer,
    kind: str,
    block_size: int,
    kv_cache_dtype: torch.dtype | str | None,
) -> LayerSpec:
    config = model.config.get_text_config(decoder=True)
    _, num_heads, _, head_size = layer.keys.shape
    _, num_v_heads, _, v_head_size = layer.values.shape
    if num_heads != num_v_heads:
        raise UnsupportedModel(
            model, f"layer {index} has {num_heads} K heads, but {num_v_heads} V heads"
        )
    is_mla = num_heads == 1 and getattr(config, "kv_lora_rank", None) == head_size
    options = {}
    if kind == "chunked_attention":
        kind, options = "chunked_local", {"chunk_size": config.attention_chunk_size}
    elif getattr(layer, "is_sliding", False):
        kind, options = "sliding_window", {"window": int(layer.sliding_window)}
    else:
        kind = "full_attention"
    formats = format_names()
    dtype = layer.keys.dtype if kv_cache_dtype is None else kv_cache_dtype
    floats = [each for each in ELEMENT_BYTES if "float" in each]
    name = dtype_name(dtype, [*floats, *formats], "kv_cache_dtype")
    stored = {"kv_format": name} if name in formats else {"dtype": name}
    return LayerSpec(
        attention_name(index),
        kind,
        block_size,
        num_kv_heads=num_heads,
        head_size=head_size,
        v_head_size=v_head_size,
        options=options,
        is_mla=is_mla,
        **stored,
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
