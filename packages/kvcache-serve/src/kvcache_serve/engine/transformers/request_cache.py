# SPDX-License-Identifier: Apache-2.0
"""The cache that is passed to a model for a single request. It behaves like a dense cache, but
stores K and V in pages.

A model that computes one request at a time creates masks, biases and positions itself, as it does in
`generate`. Any form of attention is therefore supported.
"""

from __future__ import annotations

import torch
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.transformers.layer_places import Place
from kvcache_serve.engine.transformers.layer_shapes import LayerShape
from kvcache_serve.engine.transformers.layer_states import LayerStates
from kvcache_serve.engine.transformers.segments import Segment

# The class with which transformers represents layers without a cache.
_NoLayer = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)


class _PagedLayer(CacheLayerMixin):
    """The K and V of one request in one layer, starting with the first token that the segment attends
    to.
    """

    is_compileable = False

    def __init__(self, place: Place, batch: Batch, request: int, segment: Segment) -> None:
        super().__init__()
        self._place, self._start = place, segment.start
        kind, context = batch.kind(place.group), batch.context(place.group)
        self.is_sliding = batch.cache.plan.groups[place.group].kind != "full_attention"
        self._first = kind.first_needed_token(segment.start)
        self._new = batch.slots(place.group)[segment.first : segment.stop]
        at = int(context.ends[request] - context.lengths[request] - context.firsts[request])
        num_tokens = segment.stop - segment.first
        self._seen = context.slots[at + self._first : at + segment.start + num_tokens]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because pages already exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `key` and `value`, [1, heads, t, size], of the segment.

        Returns the K and V of earlier tokens and of the segment.
        """
        self._place.write(key_states, value_states, self._new)
        return self._place.read(self._seen, key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens whose K and V `update` returns, and the position of the first
        token.
        """
        return self._start + query_length - self._first, self._first

    def get_seq_length(self) -> int:
        """Return the number of tokens before the segment."""
        return self._start

    def get_max_length(self) -> int:
        """Return -1, because there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # the name of this method in transformers 5.23


class _PagedHybridLayer(LinearAttentionLayer, _PagedLayer):
    """A layer with K, V and a recurrent state."""

    is_compileable = False

    def __init__(self, number_of_states: int, *args: object) -> None:
        _PagedLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Initialize the states only."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    get_max_length = _PagedLayer.get_max_length
    get_max_cache_shape = get_max_length


class RequestCache(Cache):
    """The cache for one segment of a request.

    `store` writes the states at the end of the segment to pages.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        places: dict[int, Place],
        states: dict[int, LayerStates],
        batch: Batch,
        request: int,
        segment: Segment,
    ) -> None:
        self._states = states
        self._pages = {
            group: batch.state_pages(group)[request]
            for group in {each.group for each in states.values()}
        }
        self._after = segment.after
        made: list[object] = [_NoLayer() for _ in range(layers[-1].index + 1)]
        for layer in layers:
            rest = (batch, request, segment)
            if layer.state is None:
                made[layer.index] = _PagedLayer(places[layer.index], *rest)
                continue
            own = states[layer.index]
            if layer.attention is None:
                kept = LinearAttentionLayer(number_of_states=own.number_of_states)
            else:
                kept = _PagedHybridLayer(own.number_of_states, places[layer.index], *rest)
            before = segment.before
            own.fill(kept, None if before is None else self._page(own, before), 1)
            made[layer.index] = kept
        super().__init__(layers=made)

    def store(self) -> None:
        """Write the model's states to the pages at the end of the segment."""
        for index, own in self._states.items():
            own.store(self.layers[index], self._page(own, self._after))

    def _page(self, own: LayerStates, number: int):
        return self._pages[own.group][number : number + 1]
