# SPDX-License-Identifier: Apache-2.0
"""The recurrent states of a layer, stored in pages of bytes and viewed as the tensors that
transformers uses.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from kvcache.assembly import KVCache
from kvcache_serve.engine.transformers.layer_shapes import LayerShape, StatePart, state_name


class LayerStates:
    """The pages of one layer's states, [num_pages, bytes], viewed as the tensors of the state."""

    def __init__(self, cache: KVCache, shape: LayerShape) -> None:
        self.group = cache.group(state_name(shape.index))
        self._index = shape.index
        self._pages = cache.kv_cache(state_name(shape.index))[:, 0]
        self._parts = shape.state_parts
        self.number_of_states = 1 + max(part.number for part in shape.state_parts)

    def load(self, pages: np.ndarray | None, num_requests: int) -> Cache:
        """Return a transformers cache with the states in the given pages. None: initial states."""
        layer = LinearAttentionLayer(number_of_states=self.number_of_states)
        self.fill(layer, pages, num_requests)
        return Cache(layers=[LinearAttentionLayer()] * self._index + [layer])

    def fill(
        self, layer: LinearAttentionLayer, pages: np.ndarray | None, num_requests: int
    ) -> None:
        """Copy the states in the given pages to a transformers layer. None: set initial states."""
        index = None if pages is None else self._on_device(pages)
        for part in self._parts:
            states, is_there = (
                (layer.conv_states, layer.is_conv_states_initialized)
                if part.is_conv
                else (layer.recurrent_states, layer.is_recurrent_states_initialized)
            )
            if index is None:
                shape = (num_requests, *part.shape)
                states[part.number] = torch.zeros(
                    shape, dtype=part.dtype, device=self._pages.device
                )
            else:
                states[part.number] = self._view(self._pages[index], part)
            is_there[part.number] = True
            layer.has_previous_state[part.number] = index is not None
            if part.is_conv:
                layer.conv_kernel_size[part.number] = part.shape[-1]
            layer.dtype, layer.device = part.dtype, self._pages.device

    def store(self, layer: LinearAttentionLayer, pages: np.ndarray) -> None:
        """Write the states of a transformers layer to the given pages."""
        index = self._on_device(pages)
        for part in self._parts:
            state = (layer.conv_states if part.is_conv else layer.recurrent_states)[part.number]
            flat = state.to(part.dtype).reshape(len(pages), -1).view(torch.uint8)
            self._pages[index, part.offset : part.offset + part.num_bytes] = flat

    def _view(self, pages: torch.Tensor, part: StatePart) -> torch.Tensor:
        data = pages[:, part.offset : part.offset + part.num_bytes].contiguous()
        return data.view(part.dtype).view(len(pages), *part.shape)

    def _on_device(self, pages: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._pages.device)
