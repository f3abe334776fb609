# SPDX-License-Identifier: Apache-2.0
"""The cache that is passed to a model. It writes new K and V, and reads contexts, by slots."""

from __future__ import annotations

import torch
from transformers import Cache

from kvcache.assembly import KVCache
from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.transformers.attention import Parts, parts_of
from kvcache_serve.engine.transformers.layer_places import places_of
from kvcache_serve.engine.transformers.layer_shapes import LayerShape
from kvcache_serve.engine.transformers.layer_states import LayerStates
from kvcache_serve.engine.transformers.request_cache import RequestCache
from kvcache_serve.engine.transformers.segments import Segment


class PagedCache(Cache):
    """Accesses the K and V of a batch in a `KVCache`, one batch at a time (`begin`)."""

    def __init__(self, cache: KVCache, layers: list[LayerShape], resumes: bool) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.resumes = resumes
        self.batch: Batch | None = None
        self._layers = layers
        self._places = places_of(cache, layers)
        self._parts: dict[int, Parts] = {}
        self._written: set[int] = set()  # layers that updated K and V in this forward pass
        self._unread: set[int] = set()  # subset of `_written` that attention has not read yet
        self.states = {
            shape.index: LayerStates(cache, shape) for shape in layers if shape.state is not None
        }

    def begin(self, batch: Batch | None) -> None:
        """Set the batch of the next forward pass, or None for no batch."""
        self.batch = batch
        self._parts = {}
        self._written.clear()
        self._unread.clear()

    def group_of(self, layer: int) -> int:
        """Return the cache group of a layer's K and V."""
        return self._places[layer].group

    def parts_of(self, group: int) -> Parts:
        """Return the parts into which the batch is split for attention in this group."""
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
        """Write `key` and `value`, [1, heads, t, size], of the batch's tokens, and return the K and V
        to attend to.

        Returns:
            The K and V in `Parts.slots`, [1, heads, c, size].
        """
        if layer_idx in self._written:
            raise RuntimeError(f"layer {layer_idx} updates its K and V twice")
        self._written.add(layer_idx)
        self._unread.add(layer_idx)
        place = self._places[layer_idx]
        place.write(key_states, value_states, self.batch.slots(place.group))
        return place.read(self.parts_of(place.group).slots, key_states)

    def attend(self, layer: int | None) -> int:
        """Return the layer whose KV a module with this layer index attends to, which is the layer that
        was updated last.

        Raises:
            RuntimeError: The module has not updated K and V.
        """
        # A module that is reused for several layers keeps the index of the first one.
        if layer not in self._unread and len(self._unread) == 1:
            layer = next(iter(self._unread))
        if layer not in self._written:
            raise RuntimeError(f"layer {layer} attends to K and V that it has not updated")
        self._unread.discard(layer)
        return layer

    def end(self) -> None:
        """Check a finished forward pass. Raises RuntimeError if the model bypassed paged attention."""
        if self._unread:
            raise RuntimeError(
                f"layers {sorted(self._unread)} update K and V, but do not attend through "
                "transformers' attention interface"
            )

    def of_request(self, request: int, segment: Segment) -> RequestCache:
        """Return the cache for one request of the batch and one segment of its tokens."""
        return RequestCache(self._layers, self._places, self.states, self.batch, request, segment)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because `PagedModel.forward` passes the positions of all tokens."""
        return 0
