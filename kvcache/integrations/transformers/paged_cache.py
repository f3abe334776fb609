"""The cache that a model gets: it writes new K and V by slots, and reads whole contexts by slots."""

from __future__ import annotations

import torch
from transformers import Cache

from kvcache.assembly import KVCache
from kvcache.integrations.transformers.attention import Part, parts_of
from kvcache.integrations.transformers.flashinfer_attention import FlashInferAttention, Place
from kvcache.integrations.transformers.layer_shapes import LayerShape, attention_name
from kvcache.integrations.transformers.layer_states import LayerStates
from kvcache.serving.batch import Batch

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedCache(Cache):
    """K and V of a batch in a `KVCache`, one batch at a time (`begin`)."""

    def __init__(self, cache: KVCache, shapes: list[LayerShape]) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.batch: Batch | None = None
        self.kernels: FlashInferAttention | None = None
        self._places: dict[int, Place] = {}
        for shape in shapes:
            if shape.attention is not None:
                group = cache.group(attention_name(shape.index))
                layers = cache.plan.groups[group].layers
                place = layers.index(attention_name(shape.index))
                self._places[shape.index] = Place(cache.storages[group], place, group)
        self._parts: dict[int, list[Part]] = {}
        self.states = {
            shape.index: LayerStates(cache, shape) for shape in shapes if shape.state is not None
        }

    def use_flashinfer(self, layers_with_sinks: set[int], model_dtype: torch.dtype) -> None:
        """Attention of the layers that FlashInfer serves is its own from now on."""
        self.kernels = FlashInferAttention(self.cache, self._places, layers_with_sinks, model_dtype)

    def begin(self, batch: Batch | None) -> None:
        """The batch of the forward pass to come; None: there is none."""
        self.batch = batch
        self._parts = {}
        if self.kernels is not None:
            self.kernels.begin(batch)

    def kernels_of(self, layer: int) -> FlashInferAttention | None:
        """What computes the attention of a layer without its context; None: the context is gathered."""
        return self.kernels if self.kernels is not None and self.kernels.serves(layer) else None

    def group_of(self, layer: int) -> int:
        """The cache group of a layer's K and V."""
        return self._places[layer].group

    def parts_of(self, group: int) -> list[Part]:
        """How the batch is cut for attention in this group."""
        if group not in self._parts:
            self._parts[group] = parts_of(self.batch, group)
        return self._parts[group]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes key, value [1, heads, t, size] of the batch's tokens; those of all contexts, [1, heads,
        c, size], request after request. What was given, where kernels read pages themselves.
        """
        storage, layer, group = self._places[layer_idx]
        # Scales are single-precision numbers, so fp8 is made of no wider ones.
        narrow = torch.float32 if key_states.dtype == torch.float64 else key_states.dtype
        dtype = narrow if storage.dtype in _FLOAT8 else storage.dtype
        key, value = (x[0].transpose(0, 1).to(dtype) for x in (key_states, value_states))
        storage.write(layer, key, value, self.batch.slots(group))
        if self.kernels_of(layer_idx) is not None:
            return key_states, value_states
        context = self.batch.context(group)
        return tuple(
            x.to(key_states.dtype).transpose(0, 1)[None]
            for x in storage.gather(layer, context.slots, dtype)
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: the caller gives positions."""
        return 0
