"""KV storage: the tensors that attention kernels see over the pages of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcache import ops
from kvcache.memory_plan import CachePlan
from kvcache.specs import LAYOUTS, LayerSpec
from kvcache.worker.pages.pages import Pages, Tensors
from kvcache.worker.pages.regions import format_of
from kvcache.worker.pages.views import both, key_and_value, stacked


class KVStorage:
    """K and V of all layers in pages, as attention kernels see them: views, never copies.

    `layout` is the order in memory of tokens (N), heads (H) and head elements (D) within a block; the
    shape seen is the same for both, strides tell them apart. `kv_caches[layer]` is what a kernel
    takes, by where K and V lie:

    - apart (FlashAttention): [2, num_blocks, block_size, num_kv_heads, head_size];
    - `blocks_first` (FlashInfer, Triton): [num_blocks, 2, block_size, num_kv_heads, head_size];
    - `block_major`: the same shape, but all layers of a page lie together: one piece per swap;
    - `mla`: [num_blocks, block_size, head_size + v_head_size], K (the latent) and V (its rotary part,
      maybe none) of a token side by side; one head;
    - K and V of unequal head size: the pair (K, V), each [num_blocks, ...].

    `scale_bytes_per_token` > 0 gives every token room for scales of one's own quantisation
    (`scale_cache`), which moves with its page. Scales of a layer (fp8): `set_scales`.

    Memory is not initialised, except block 0, the null block, which is zero: padded and slid-out table
    entries read it. `over` is how one of several groups sees pages that they share, `from_tensors`
    takes an engine's own. `pages` is the memory by page.

    >>> storage = KVStorage(num_blocks=4, block_size=16, num_kv_heads=2, head_size=8, layout="HND")
    >>> storage.key_cache(0).shape, storage.key_cache(0).stride()
    (torch.Size([4, 16, 2, 8]), (256, 8, 128, 1))
    >>> packed = KVStorage(4, 16, 2, 8, num_layers=3, block_major=True)
    >>> packed.kv_caches[1].shape, packed.kv_caches[1].stride()
    (torch.Size([4, 2, 16, 2, 8]), (1536, 256, 16, 8, 1))
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        v_head_size: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
        blocks_first: bool = False,
        block_major: bool = False,
        mla: bool = False,
        scale_bytes_per_token: int = 0,
    ) -> None:
        _check_least(1, num_blocks=num_blocks, num_layers=num_layers)
        _check_least(0, scale_bytes_per_token=scale_bytes_per_token)
        if mla and v_head_size is None:
            v_head_size = 0
        self._describe(num_blocks, block_size, num_kv_heads, head_size, v_head_size, dtype, layout)
        if mla and num_kv_heads != 1:
            raise ValueError(f"num_kv_heads is {num_kv_heads}: expected 1 with mla")
        tokens = block_size * num_kv_heads * dtype.itemsize
        key, value = tokens * head_size, tokens * self.v_head_size
        parts = [key + value] if mla else [key, value]
        scales = scale_bytes_per_token * block_size
        if scales and (blocks_first or block_major) and (sum(parts) + scales) % dtype.itemsize:
            raise ValueError(
                f"scale_bytes_per_token is {scale_bytes_per_token}: expected a block's scales to fill "
                f"whole elements of {dtype}, whose blocks lie behind them"
            )
        self.pages = Pages.allocate(
            num_blocks,
            [[size for size in (*parts, scales) if size]] * num_layers,
            device=device,
            blocks_first=blocks_first,
            block_major=block_major,
        )
        self.kv_caches, self._keys, self._values, self._scale_caches = [], [], [], []
        together = (blocks_first or block_major) and self.v_head_size == head_size
        for layer in range(num_layers):
            self._add_layer(layer, mla, together, scale_bytes_per_token)

    @classmethod
    def over(
        cls,
        pages: Pages,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        v_head_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "NHD",
        layers: Sequence[int] | None = None,
        scale_bytes_per_token: int = 0,
    ) -> KVStorage:
        """One group's view of pages that all groups share; a page belongs to one group at a time.

        A page has its bytes of a layer in one place; they begin with K of the block, V follows, then
        the scales, and what remains is padding. ValueError where a block does not fit. `layers`: which
        of the pages' layers the group's layers are (default: all). A recurrent state is one token as
        wide as the state.

        >>> pages = Pages.allocate(num_blocks=9, sizes=[[1024]])
        >>> full = KVStorage.over(pages, 16, num_kv_heads=2, head_size=8)
        >>> local = KVStorage.over(pages, 32, num_kv_heads=1, head_size=8)
        >>> full.key_cache(0).shape, local.key_cache(0).shape
        (torch.Size([9, 16, 2, 8]), torch.Size([9, 32, 1, 8]))
        """
        if not isinstance(pages, Pages):
            raise TypeError(f"pages is a {type(pages).__name__}: expected Pages")
        self = cls.__new__(cls)
        self._describe(
            pages.num_blocks, block_size, num_kv_heads, head_size, v_head_size, dtype, layout
        )
        self.pages = pages
        _check_least(0, scale_bytes_per_token=scale_bytes_per_token)
        self.kv_caches, self._keys, self._values, self._scale_caches = [], [], [], []
        for layer in range(pages.num_layers) if layers is None else layers:
            self._add_shared(pages.layer(layer), scale_bytes_per_token)
        return self

    @classmethod
    def for_plan(
        cls, plan: CachePlan, *, device: torch.device | str = "cpu", layout: str = "NHD"
    ) -> list[KVStorage]:
        """One storage per group of the plan, all over the same new `pages`.

        Heads, sizes, dtype and scales are those of the group's layers; the i-th layer of a storage is
        `plan.groups[g].layers[i]`. MLA is a layer with `v_head_size` 0 and one head. Of a layer with
        `state_bytes` a page is one token: one head, as many elements of `dtype` as the state has, no V.
        Scales of fp8 layers are set with `set_scales`.

        ValueError for layers of one group that differ in heads, sizes or dtype, and for a state that
        is no whole number of elements.

        >>> from kvcache import LayerSpec, plan_cache
        >>> layers = [LayerSpec("a", "full_attention", 16, num_kv_heads=2, head_size=8)]
        >>> layers += [LayerSpec("b", "recurrent", 1, dtype="float32", state_bytes=4096)]
        >>> plan = plan_cache(layers, 2**20, max_model_len=256)
        >>> [tuple(storage.key_cache(0).shape) for storage in KVStorage.for_plan(plan)]
        [(256, 32, 2, 8), (256, 1, 1, 1024)]
        """
        if not isinstance(plan, CachePlan):
            raise TypeError(f"plan is a {type(plan).__name__}: expected a CachePlan")
        specs = {layer.name: layer for layer in plan.layers}
        groups = [
            (group.block_size, [specs[name] for name in group.layers]) for group in plan.groups
        ]
        shapes = [_shape_of_group(block_size, layers) for block_size, layers in groups]
        layers_per_page = plan.page_bytes // plan.layer_page_bytes
        sizes = [[plan.layer_page_bytes]] * layers_per_page
        pages = Pages.allocate(plan.num_pages, sizes, device=device)
        return [
            cls.over(pages, **shape, layout=layout, layers=range(len(layers)))
            for (_, layers), shape in zip(groups, shapes)
        ]

    @classmethod
    def from_tensors(
        cls, kv_caches: Sequence[Tensors], *, block_dim: int | None = None
    ) -> KVStorage:
        """An engine's own tensors, as they are; one entry per layer, all alike.

        Shapes, NHD or HND by strides: [2, num_blocks, block_size, num_kv_heads, head_size],
        [num_blocks, 2, ...], [num_blocks, block_size, head_size] (MLA), or a pair (K, V) of
        [num_blocks, block_size, num_kv_heads, (v_)head_size]. `block_dim` says which of the first two
        it is where both dimensions are 2. ValueError where a shape is none of these, or layers
        differ. For anything else (recurrent states) `Pages.over` suffices: it moves any bytes.
        """
        if isinstance(kv_caches, Mapping):
            raise TypeError("kv_caches is a mapping: expected a sequence, one entry per layer")
        if len(kv_caches) == 0:
            raise ValueError("kv_caches is empty: expected one entry per layer")
        self = cls.__new__(cls)
        self.kv_caches, self._keys, self._values, self._scale_caches = [], [], [], []
        dims = []
        for number, cache in enumerate(kv_caches):
            key, value, dim = key_and_value(cache, block_dim, f"kv_caches[{number}]")
            if key.shape[3] > 1 and key.stride(3) != 1:
                raise ValueError(
                    f"kv_caches[{number}] has stride {key.stride(3)} in its last dimension: expected 1"
                )
            dims.append(dim)
            self.kv_caches.append(cache)
            self._keys.append(key)
            self._values.append(value)
            first = (self._keys[0], self._values[0])
            for mine, other in zip((key, value), first):
                kinds = [format_of(each, 0) for each in (mine, other)]
                if kinds[0] != kinds[1] or mine.shape != other.shape:
                    raise ValueError(
                        f"kv_caches[{number}] has blocks of {mine.dtype}{list(mine.shape)} with "
                        f"strides {mine.stride()}, kv_caches[0] of {other.dtype}{list(other.shape)} "
                        f"with {other.stride()}: expected the same order in memory"
                    )
        key, value = self._keys[0], self._values[0]
        num_blocks, block_size, num_kv_heads, head_size = key.shape
        layout = "HND" if key.stride(2) > key.stride(1) and num_kv_heads > 1 else "NHD"
        self._describe(
            num_blocks, block_size, num_kv_heads, head_size, value.shape[3], key.dtype, layout
        )
        self.pages = Pages.over(kv_caches, dims)
        return self

    def _describe(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None,
        dtype: torch.dtype,
        layout: str,
    ) -> None:
        _check_least(1, block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size)
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}: expected one of {', '.join(LAYOUTS)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        _check_least(0, v_head_size=self.v_head_size)
        self.layout = layout
        self.dtype = dtype
        self.k_scale = self.v_scale = None

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.pages.device

    @property
    def num_layers(self) -> int:
        """Layers, counted from 0."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all layers."""
        caches = [*self._keys, *self._values]
        return sum(cache.numel() * cache.element_size() for cache in caches)

    def key_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, head_size], a view."""
        return self._keys[self._checked(layer)]

    def value_cache(self, layer: int) -> torch.Tensor:
        """[num_blocks, block_size, num_kv_heads, v_head_size], a view."""
        return self._values[self._checked(layer)]

    def scale_cache(self, layer: int) -> torch.Tensor:
        """uint8[num_blocks, block_size, scale_bytes_per_token], a view."""
        if not self._scale_caches:
            raise ValueError("the storage has no scales: expected scale_bytes_per_token > 0")
        return self._scale_caches[self._checked(layer)]

    def set_scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """What fp8 values are multiplied by: float32[num_layers, 1], or [num_layers, num_kv_heads]."""
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if not isinstance(scale, torch.Tensor):
                raise TypeError(f"{name} is {scale!r}: expected a tensor")
            wanted = ([self.num_layers, 1], [self.num_layers, self.num_kv_heads])
            if list(scale.shape) not in wanted or scale.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {scale.dtype}{list(scale.shape)}: "
                    f"expected torch.float32{wanted[0]} or {wanted[1]}"
                )
        self.k_scale = k_scale.to(self.device).contiguous()
        self.v_scale = v_scale.to(self.device).contiguous()

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor | None,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes key, value [n, num_kv_heads, (v_)head_size] at slots int64[n]; see `ops.write_kv`.

        Of fp8 storage they may be bfloat16, float16 or float32, and are divided by the scales. value
        is None where V has no elements (MLA without a part of its own).
        """
        cache = self.key_cache(layer)
        if value is None:
            value = key[:, :, :0]
        scales = self._scales(layer, key.dtype)
        ops.write_kv(key, value, cache, self.value_cache(layer), slot_mapping, *scales)

    def gather(
        self, layer: int, slot_mapping: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, value), [n, num_kv_heads, (v_)head_size], of the tokens at slots int64[n].

        `dtype`: of the answer, for fp8 storage (then times the scales); default the storage's.
        """
        shape = (len(slot_mapping), self.num_kv_heads)
        dtype = dtype or self.dtype
        key = torch.empty((*shape, self.head_size), dtype=dtype, device=self.device)
        value = torch.empty((*shape, self.v_head_size), dtype=dtype, device=self.device)
        caches = self.key_cache(layer), self.value_cache(layer)
        ops.gather_kv(*caches, slot_mapping, key, value, *self._scales(layer, dtype))
        return key, value

    def write_layers(
        self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """As `write`, of all layers: key, value [num_layers, n, num_kv_heads, (v_)head_size]."""
        for layers, *caches in self._stacks():
            scales = self._scales(layers, key.dtype)
            ops.write_kv(key[layers], value[layers], *caches, slot_mapping, *scales)

    def gather_layers(
        self, slot_mapping: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `gather`, of all layers: (key, value), [num_layers, n, num_kv_heads, (v_)head_size].

        What an offload by tokens takes: one launch where layers lie at equal distances.
        """
        dtype = dtype or self.dtype
        shape = (self.num_layers, len(slot_mapping), self.num_kv_heads)
        key = torch.empty((*shape, self.head_size), dtype=dtype, device=self.device)
        value = torch.empty((*shape, self.v_head_size), dtype=dtype, device=self.device)
        for layers, *caches in self._stacks():
            scales = self._scales(layers, dtype)
            ops.gather_kv(*caches, slot_mapping, key[layers], value[layers], *scales)
        return key, value

    def _stacks(self) -> list[tuple[slice | int, torch.Tensor, torch.Tensor]]:
        """K and V of all layers as one [num_layers, num_blocks, ...] each, or layer by layer."""
        whole = [stacked(caches) for caches in (self._keys, self._values)]
        if None not in whole:
            return [(slice(None), *whole)]
        return list(zip(range(self.num_layers), self._keys, self._values))

    def _scales(self, layers: int | slice, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        if dtype == self.dtype:
            return ()
        if self.k_scale is None:
            raise ValueError(
                f"tokens are {dtype}, the storage {self.dtype}: expected the same, or fp8 storage "
                "with scales (set_scales)"
            )
        return self.k_scale[layers], self.v_scale[layers]

    def _add_layer(self, layer: int, mla: bool, together: bool, scale_bytes: int) -> None:
        """Views over the regions of a layer that the constructor allocated."""
        first = layer * (len(self.pages.sizes) // self.pages.num_layers)
        if mla:
            cache = self._elements(first, self.head_size + self.v_head_size)
            self._keys.append(cache[..., : self.head_size])
            self._values.append(cache[..., self.head_size :])
            self.kv_caches.append(cache[:, :, 0])
            last = first
        else:
            last = first + (1 if self.v_head_size else 0)
            key = self._elements(first, self.head_size)
            value = self._elements(last, self.v_head_size) if self.v_head_size else key[..., :0]
            self._keys.append(key)
            self._values.append(value)
            self.kv_caches.append((key, value))
            if self.v_head_size == self.head_size:
                self.kv_caches[-1] = both(key, value, 1 if together else 0)
        if scale_bytes:
            scales = self.pages.fragment(last + 1)
            self._scale_caches.append(scales.unflatten(1, (self.block_size, scale_bytes)))

    def _elements(self, region: int, head_size: int) -> torch.Tensor:
        """[num_blocks, block_size, heads, head_size] over one region."""
        cache = self.pages.fragment(region).view(self.dtype)
        if self.layout == "HND":
            shape = (self.num_kv_heads, self.block_size, head_size)
            return cache.unflatten(1, shape).transpose(1, 2)
        return cache.unflatten(1, (self.block_size, self.num_kv_heads, head_size))

    def _add_shared(self, page: torch.Tensor, scale_bytes: int) -> None:
        """K, then V, then scales, at the beginning of a layer's uint8[num_blocks, bytes]."""
        heads = self.block_size * self.num_kv_heads
        item = self.dtype.itemsize
        sizes = [heads * self.head_size * item, heads * self.v_head_size * item]
        sizes.append(self.block_size * scale_bytes)
        if page.shape[1] < sum(sizes) or page.stride(0) % item:
            raise ValueError(
                f"pages have {page.shape[1]} bytes, {page.stride(0)} apart: expected a multiple of "
                f"{item}, and {sum(sizes)} or more for a block of {self.block_size} tokens"
            )
        order = (self.block_size, self.num_kv_heads)
        caches = []
        for begin, size, head_size in (
            (0, sizes[0], self.head_size),
            (sizes[0], sizes[1], self.v_head_size),
        ):
            part = page[:, begin : begin + size].view(self.dtype)
            if self.layout == "HND":
                cache = part.unflatten(1, (*order[::-1], head_size)).transpose(1, 2)
            else:
                cache = part.unflatten(1, (*order, head_size))
            caches.append(cache)
        self._keys.append(caches[0])
        self._values.append(caches[1])
        if self.v_head_size == self.head_size:
            self.kv_caches.append(both(*caches, 1))
        elif self.v_head_size == 0 and self.num_kv_heads == 1:
            self.kv_caches.append(caches[0][:, :, 0])
        else:
            self.kv_caches.append(tuple(caches))
        if scale_bytes:
            scales = page[:, sum(sizes[:2]) : sum(sizes)]
            self._scale_caches.append(scales.unflatten(1, (self.block_size, scale_bytes)))

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}: expected 0 to {self.num_layers - 1}")
        return layer


def _shape_of_group(block_size: int, layers: Sequence[LayerSpec]) -> dict[str, object]:
    """The arguments of `KVStorage.over` that the layers of one group agree on."""
    first, shape = layers[0], _shape_of_layer(layers[0], block_size)
    for layer in layers[1:]:
        if (other := _shape_of_layer(layer, block_size)) != shape:
            name = next(name for name in shape if shape[name] != other[name])
            raise ValueError(
                f"layer {layer.name!r} has {name} {other[name]}, layer {first.name!r} of its group "
                f"{shape[name]}: expected the same"
            )
    return shape


def _shape_of_layer(layer: LayerSpec, block_size: int) -> dict[str, object]:
    dtype = getattr(torch, layer.dtype)
    if layer.state_bytes:
        if layer.state_bytes % dtype.itemsize:
            raise ValueError(
                f"state_bytes is {layer.state_bytes}, of layer {layer.name!r}: "
                f"expected whole elements of its dtype, {layer.dtype}"
            )
        num_elements = layer.state_bytes // dtype.itemsize
        sizes = {"block_size": 1, "num_kv_heads": 1, "head_size": num_elements, "v_head_size": 0}
        return {**sizes, "dtype": dtype, "scale_bytes_per_token": 0}
    return {
        "block_size": block_size,
        "num_kv_heads": layer.num_kv_heads,
        "head_size": layer.head_size,
        "v_head_size": layer.head_size if layer.v_head_size is None else layer.v_head_size,
        "dtype": dtype,
        "scale_bytes_per_token": layer.scale_bytes_per_token,
    }


def _check_least(least: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < least:
            raise ValueError(f"{name} is {value}: expected {least} or more")
