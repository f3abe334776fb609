# SPDX-License-Identifier: Apache-2.0
"""Writes and reads a layer's K and V by slots."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcache.assembly import KVCache
from kvcache.worker import KVStorage
from kvcache_serve.engine.transformers.layer_shapes import LayerShape, attention_name

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Place(NamedTuple):
    """The K and V of one layer of the model, stored as layer `layer` of a group's storage."""

    storage: KVStorage
    layer: int
    group: int

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write `key` and `value`, [1, heads, t, size], to slots [t]."""
        dtype = self._dtype(key)
        key, value = (x[0].transpose(0, 1).to(dtype) for x in (key, value))
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            key, value = key.contiguous(), value.contiguous()
        self.storage.write(self.layer, key, value, slots)

    def read(self, slots: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V [1, heads, c, size] in slots [c], in the dtype of `key`."""
        return tuple(
            x.to(key.dtype).transpose(0, 1)[None]
            for x in self.storage.gather(self.layer, slots, self._dtype(key))
        )

    def _dtype(self, key: torch.Tensor) -> torch.dtype:
        kv_format = self.storage.kv_format
        if kv_format is not None and kv_format.is_row:
            return torch.bfloat16
        # Scales are float32, so wider dtypes are converted to float32 before quantization.
        narrow = torch.float32 if key.dtype == torch.float64 else key.dtype
        return narrow if kv_format or self.storage.dtype in _FLOAT8 else self.storage.dtype


def places_of(cache: KVCache, shapes: list[LayerShape]) -> dict[int, Place]:
    """Return, for each layer that caches K and V, where they are stored."""
    places = {}
    for shape in shapes:
        if shape.attention is not None:
            name = attention_name(shape.index)
            group = cache.group(name)
            layer = cache.plan.groups[group].layers.index(name)
            places[shape.index] = Place(cache.storages[group], layer, group)
    return places
