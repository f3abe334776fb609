"""The cache that a model gets: it writes new K and V by slots, and reads whole contexts by slots."""

from __future__ import annotations

import torch
from transformers import Cache

from kvcache.assembly import KVCache
from kvcache.integrations.transformers.attention import Part, parts_of
from kvcache.integrations.transformers.flashinfer_attention import FlashInferAttention
from kvcache.integrations.transformers.layer_places import places_of
from kvcache.integrations.transformers.layer_shapes import LayerShape
from kvcache.integrations.transformers.layer_states import LayerStates
from kvcache.integrations.transformers.request_cache import RequestCache
from kvcache.integrations.transformers.segments import Segment
from kvcache.serving.batch import Batch


class PagedCache(Cache):
    """K and V of a batch in a `KVCache`, one batch at a time (`begin`)."""

    def __init__(self, cache: KVCache, layers: list[LayerShape], resumes: bool) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.resumes = resumes
        self.batch: Batch | None = None
        self.kernels: FlashInferAttention | None = None
        self._layers = layers
        self._places = places_of(cache, layers)
        self._parts: dict[int, list[Part]] = {}
        self._written: set[int] = set()  # the layers that have updated K and V in this pass
        self._unread: set[int] = set()  # those of them that no attention has read yet
        self.states = {
            shape.index: LayerStates(cache, shape) for shape in layers if shape.state is not None
        }

    def use_flashinfer(self, layers_with_sinks: set[int]) -> None:
        """Attention of the layers that FlashInfer serves is its own from now on."""
        self.kernels = FlashInferAttention(self.cache, self._places, layers_with_sinks)

    def begin(self, batch: Batch | None) -> None:
        """The batch of the forward pass to come; None: there is none."""
        self.batch = batch
        self._parts = {}
        self._written.clear()
        self._unread.clear()
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
        if layer_idx in self._written:
            raise RuntimeError(f"layer {layer_idx} updates its K and V twice")
        self._written.add(layer_idx)
        self._unread.add(layer_idx)
        place = self._places[layer_idx]
        place.write(key_states, value_states, self.batch.slots(place.group))
        if self.kernels_of(layer_idx) is not None:
            return key_states, value_states
        return place.read(self.batch.context(place.group).slots, key_states)

    def attend(self, layer: int | None) -> int:
        """The layer that a module of this number attends to: that of the K and V just updated.

        RuntimeError where the module has updated none.
        """
        # Modules that are run again for other layers keep the number of the first.
        if layer not in self._unread and len(self._unread) == 1:
            layer = next(iter(self._unread))
        if layer not in self._written:
            raise RuntimeError(f"layer {layer} attends to K and V that it has not updated")
        self._unread.discard(layer)
        return layer

    def end(self) -> None:
        """The forward pass is over. RuntimeError where another attention than the paged one read it."""
        if self._unread:
            raise RuntimeError(
                f"layers {sorted(self._unread)} update K and V, and attend by other ways than "
                "transformers' attention interface"
            )

    def of_request(self, request: int, segment: Segment) -> RequestCache:
        """The cache of one request of the batch alone, for some of its tokens."""
        return RequestCache(self._layers, self._places, self.states, self.batch, request, segment)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: the caller gives positions."""
        return 0
