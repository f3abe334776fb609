"""KV storage: the tensors that the pages of a pool live in."""

from __future__ import annotations

import torch

from kvcache import ops

LAYOUTS = ("NHD", "HND")


class KVStorage:
    """K and V of all layers: per layer one tensor [2, num_blocks, block_size, heads, head_size].

    `layout` is the order in memory of tokens (N), heads (H) and head elements (D) within a block; the
    shape seen is the same for both, strides tell them apart. Memory is not initialised, except block
    0, the null block, which is zero: padded and slid-out table entries read it.

    >>> storage = KVStorage(num_blocks=4, block_size=16, num_kv_heads=2, head_size=8, layout="HND")
    >>> storage.key_cache(0).shape, storage.key_cache(0).stride()
    (torch.Size([4, 16, 2, 8]), (256, 8, 128, 1))
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        num_layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("num_kv_heads", num_kv_heads),
            ("head_size", head_size),
            ("num_layers", num_layers),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}: expected 1 or more")
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}: expected one of {', '.join(LAYOUTS)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.layout = layout
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_caches = [self._allocate() for _ in range(num_layers)]

    @property
    def num_layers(self) -> int:
        """Layers, counted from 0."""
        return len(self.kv_caches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(cache.numel() * cache.element_size() for cache in self.kv_caches)

    def key_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_size], a view."""
        return self.kv_caches[self._checked(layer)][0]

    def value_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_size], a view."""
        return self.kv_caches[self._checked(layer)][1]

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes key, value [n, num_kv_heads, head_size] at slots int64[n]; see `ops.write_kv`."""
        ops.write_kv(key, value, self.key_cache(layer), self.value_cache(layer), slot_mapping)

    def gather(self, layer: int, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, value), each [n, num_kv_heads, head_size], of the tokens at slots int64[n]."""
        shape = (len(slot_mapping), self.num_kv_heads, self.head_size)
        key = torch.empty(shape, dtype=self.dtype, device=self.device)
        value = torch.empty_like(key)
        ops.gather_kv(self.key_cache(layer), self.value_cache(layer), slot_mapping, key, value)
        return key, value

    def _allocate(self) -> torch.Tensor:
        tokens_or_heads = (self.block_size, self.num_kv_heads)
        if self.layout == "HND":
            tokens_or_heads = tokens_or_heads[::-1]
        shape = (2, self.num_blocks, *tokens_or_heads, self.head_size)
        cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        cache[:, 0] = 0
        return cache.transpose(2, 3) if self.layout == "HND" else cache

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}: expected 0 to {self.num_layers - 1}")
        return layer
