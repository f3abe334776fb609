# SPDX-License-Identifier: Apache-2.0
"""KV storage: the tensors through which attention kernels access a pool's pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import MAX_LAYERS, dtype_name, instance, integer, listed, num_entries, shown
from kvcache.formats import SCALE_BYTES, format_named
from kvcache.layouts import AttentionBackend, EngineBackend, described_backend
from kvcache.memory_plan import CachePlan
from kvcache.placement import Placement, full_memory_order, place_elements
from kvcache.specs import ELEMENT_BYTES, LayerSpec
from kvcache.worker.pages.pages import Pages, Tensors
from kvcache.worker.pages.parts import BlockParts, contents_of
from kvcache.worker.pages.placed import placed_pages, region_starts
from kvcache.worker.pages.regions import format_of
from kvcache.worker.pages.views import as_indexed, key_and_value


class KVStorage:
    """K and V of all layers, stored in pages and exposed as views for attention kernels.

    `kv_caches[layer]` is the tensor that a kernel uses. Its shape depends on the backend:

    - FLASH_ATTN: [2, num_blocks, block_size, num_kv_heads, head_size];
    - FLASHINFER, TRITON_ATTN, BLOCK_MAJOR: [num_blocks, 2, block_size, num_kv_heads, head_size];
    - MLA: [num_blocks, block_size, head_size + v_head_size], with a single head. K is the latent, and V
      is its rotary part, adjacent to K. V is empty if K includes the rotary part;
    - FLASH_ATTN_DIFFKV: [num_blocks, block_size, num_kv_heads, head_size + v_head_size];
    - Backends with a dimension for K and V, if the head sizes of K and V differ: a pair (K, V),
    each
      [num_blocks, block_size, num_kv_heads, ...].

    Only block 0, the null block, is initialized (to zeros), because kernels read it for padding
    entries and for entries outside a sliding window. `pages` provides access to the same memory by
    page, and `memory_order` is the resulting order of dimensions.

    `over` creates one group's storage over pages that several groups share. `for_plan` creates the
    storages for all groups of a plan. `from_tensors` creates a storage over an engine's own
    tensors.

    Args:
        num_blocks: Number of blocks, including the null block.
        block_size: Tokens per block.
        num_kv_heads: Number of KV heads on this rank.
        head_size: Number of K elements per head.
        v_head_size: Number of V elements per head. None: `head_size`, or 0 for a backend without V.
        num_layers: Number of layers.
        dtype: A torch.dtype or its name.
        device: Device of the pages.
        backend: The attention backend, which defines how a kernel indexes a layer's cache and the
            order of its dimensions in memory. A name from `kvcache.layouts`, an `AttentionBackend`,
            or an engine's backend class (`AttentionBackend.from_engine`).
        layout: Memory order of tokens (N), heads (H) and elements (D) within a block, "NHD" or
            "HND". For both layouts, the views have the same shape, but different strides.
        cross_layers: Whether a page's layers are contiguous, in the backend's order for packed
            layers.
        scale_bytes_per_token: Bytes per token for the scales of your own quantization
            (`scale_cache`). These scales are part of the page and move with it. For one fp8 scale
            per layer or head, use `set_scales`.
        kv_format: Name of a quantized format (`kvcache.formats`), which defines `dtype` and
            `scale_bytes_per_token`. Head sizes are those before quantization.

    Raises:
        ValueError: The memory order is not valid for pages that consist of blocks
            (`kvcache.placement.check_memory_order`), the backend does not support the sizes, or the
            format requires a newer device.

    Example:
        >>> storage = KVStorage(num_blocks=4, block_size=16, num_kv_heads=2, head_size=8, layout="HND")
        >>> storage.key_cache(0).shape, storage.key_cache(0).stride()
        (torch.Size([4, 16, 2, 8]), (512, 8, 128, 1))
        >>> packed = KVStorage(4, 16, 2, 8, num_layers=3, backend="FLASHINFER", cross_layers=True)
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
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: str | AttentionBackend | EngineBackend = "FLASHINFER",
        layout: str = "NHD",
        cross_layers: bool = False,
        scale_bytes_per_token: int = 0,
        kv_format: str | None = None,
    ) -> None:
        num_blocks = integer(num_blocks, "num_blocks", 1)
        num_layers = integer(num_layers, "num_layers", 1, MAX_LAYERS)
        scale_bytes_per_token = self._describe(
            num_blocks,
            block_size,
            num_kv_heads,
            head_size,
            v_head_size,
            dtype,
            layout,
            backend,
            scale_bytes_per_token,
            kv_format,
        )
        self.memory_order = self.backend.memory_order(layout, cross_layers)
        placed = self._place(num_layers, scale_bytes_per_token)
        if placed.has_kv_together and (placed.region_bytes % self.dtype.itemsize).any():
            raise ValueError(
                f"scale_bytes_per_token is {scale_bytes_per_token}: expected a value for which a block's "
                f"scales fill whole elements of {self.dtype}, because K and V follow the scales"
            )
        starts = region_starts(placed, num_blocks)
        self._use(placed_pages(placed, num_blocks, starts, device))
        for layer in range(num_layers):
            self._add_layer(self.pages.memory, 0, starts, placed.region_bytes, placed, layer)
        self.pages.contents = contents_of(self.pages, [self.parts])
        self.pages.num_storages = 1

    @classmethod
    def over(
        cls,
        pages: Pages,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        v_head_size: int | None = None,
        dtype: torch.dtype | str = torch.bfloat16,
        backend: str | AttentionBackend | EngineBackend = "FLASHINFER",
        layout: str = "NHD",
        layers: Sequence[int] | None = None,
        scale_bytes_per_token: int = 0,
        kv_format: str | None = None,
        num_null_blocks: int = 1,
    ) -> KVStorage:
        """Create one group's storage over pages that all groups share.

        Each page belongs to one group at a time. A layer's bytes in a page are contiguous: first
        the block's K and V in the order of `backend`, then scales and padding. A recurrent state is
        stored as a single token whose only head contains the whole state.

        Args:
            pages: The shared pages.
            block_size: Tokens per block.
            num_kv_heads: Number of KV heads on this rank.
            head_size: Number of K elements per head.
            v_head_size: Number of V elements per head, as in the constructor.
            dtype: A torch.dtype or its name.
            backend: The attention backend, as in the constructor.
            layout: "NHD" or "HND".
            layers: The layers of `pages` that the group uses. None: all layers.
            scale_bytes_per_token: Bytes per token for your own scales, as in the constructor.
            kv_format: Name of a quantized format, as in the constructor.
            num_null_blocks: Number of leading blocks that are never read or written. It is greater
                than 1 if each page is divided into several blocks.

        Returns:
            The storage.

        Raises:
            ValueError: A block does not fit into a page, or the backend keeps a block's K and V in
                separate regions.

        Example:
            >>> pages = Pages.allocate(num_blocks=9, sizes=[[1024]])
            >>> full = KVStorage.over(pages, 16, num_kv_heads=2, head_size=8)
            >>> local = KVStorage.over(pages, 32, num_kv_heads=1, head_size=8)
            >>> full.key_cache(0).shape, local.key_cache(0).shape
            (torch.Size([9, 16, 2, 8]), torch.Size([9, 32, 1, 8]))
        """
        instance(pages, Pages, "pages")
        self = cls.__new__(cls)
        num_null_blocks = integer(num_null_blocks, "num_null_blocks", 1)
        scale_bytes_per_token = self._describe(
            pages.num_blocks,
            block_size,
            num_kv_heads,
            head_size,
            v_head_size,
            dtype,
            layout,
            backend,
            scale_bytes_per_token,
            kv_format,
        )
        self._num_null_blocks = num_null_blocks
        self.memory_order = self.backend.memory_order(layout)
        placed = self._place(1, scale_bytes_per_token)
        if not placed.has_kv_together:
            raise ValueError(
                f"backend is {shown(self.backend.name)}: expected a backend that keeps K and V of "
                "a block together"
            )
        self._use(pages)
        num_bytes = int(placed.region_bytes[0])
        item = SCALE_BYTES if self.kv_format else self.dtype.itemsize
        chosen = range(pages.num_layers) if layers is None else listed(layers, "layers")
        most = pages.num_layers
        if len(chosen) > most:
            raise ValueError(f"layers has {len(chosen)} entries: expected at most {most}")
        for i, layer in enumerate(chosen):
            page = pages.layer(integer(layer, f"layers[{i}]", most=most - 1))
            if page.shape[1] < num_bytes or page.stride(0) % item or page.data_ptr() % item:
                raise ValueError(
                    f"pages have {page.shape[1]} bytes, {page.stride(0)} apart: expected a multiple of "
                    f"{item}, and {num_bytes} or more for a block of {self.block_size} tokens"
                )
            self._add_layer(
                page, page.storage_offset(), np.zeros(1, np.int64), [page.stride(0)], placed, 0
            )
        pages.num_storages += 1  # a failed call changes nothing
        return self

    @classmethod
    def for_plan(
        cls,
        plan: CachePlan,
        *,
        device: torch.device | str = "cpu",
        backend: str | AttentionBackend | EngineBackend | None = None,
        layout: str = "NHD",
    ) -> list[KVStorage]:
        """Create one storage per group of a plan, all over the same new `pages`.

        Heads, sizes, dtype and scales are taken from each group's layers. Layer `i` of a storage is
        `plan.groups[g].layers[i]`. A group without layers has a storage without layers. Layers with
        `is_mla`, or with one head and `v_head_size` 0, use the MLA backend. In layers with
        `state_bytes`, a page has the same shape as for MLA without V: one token with one head,
        whose elements are the state. Set the scales of fp8 layers with `set_scales`.

        Args:
            plan: The plan.
            device: Device of the pages.
            backend: Backend for layers with K and V. None: FLASHINFER.
            layout: "NHD" or "HND".

        Returns:
            One storage per group.

        Raises:
            ValueError: A group's layers differ in heads, sizes or dtype, or a state is not a whole
                number of elements.

        Example:
            >>> from kvcache import LayerSpec, plan_cache
            >>> layers = [LayerSpec("a", "full_attention", 16, num_kv_heads=2, head_size=8)]
            >>> layers += [LayerSpec("b", "recurrent", 1, dtype="float32", state_bytes=4096)]
            >>> plan = plan_cache(layers, 2**20, max_model_len=256)
            >>> [tuple(storage.key_cache(0).shape) for storage in KVStorage.for_plan(plan)]
            [(256, 64, 2, 8), (256, 1, 1, 1024)]
        """
        instance(plan, CachePlan, "plan")
        specs = {layer.name: layer for layer in plan.layers}
        for group in plan.groups:
            if missing := [name for name in group.layers if name not in specs]:
                raise ValueError(f"plan.layers lacks {missing}: expected the layers of all groups")
        groups = [[specs[name] for name in group.layers] for group in plan.groups]
        # The format of a group without layers on this stage is that of its layers on other stages.
        like = [layers or plan.examples[g : g + 1] for g, layers in enumerate(groups)]
        if not all(like):
            raise ValueError(
                f"plan.groups[{like.index(())}] has no layers: expected layers, or plan.examples"
            )
        shapes = [
            _shape_of_group(group.block_size, layers) for group, layers in zip(plan.groups, like)
        ]
        layers_per_page = max((len(group.layers) for group in plan.groups), default=0)
        if plan.page_bytes != layers_per_page * plan.layer_page_bytes:
            raise ValueError(
                f"plan.page_bytes is {plan.page_bytes}: expected {layers_per_page} layers of "
                f"plan.layer_page_bytes {plan.layer_page_bytes}, as many as the largest group has"
            )
        sizes = [[plan.layer_page_bytes]] * layers_per_page
        pages = Pages.allocate(plan.num_pages, sizes, device=device)
        storages = []
        for layers, (first, *_), shape in zip(groups, like, shapes):
            has_one_part = shape["num_kv_heads"] == 1 and shape["v_head_size"] == 0
            has_one_part |= first.is_mla
            seen = "MLA" if has_one_part else "FLASHINFER" if backend is None else backend
            options = {"backend": seen, "layout": layout, "layers": range(len(layers))}
            storages.append(cls.over(pages, **shape, **options))
        parts = [each.parts for each in storages]
        pages.contents = contents_of(pages, parts, groups=plan.groups)
        return storages

    @classmethod
    def from_tensors(
        cls,
        kv_caches: Sequence[Tensors],
        *,
        backend: str | AttentionBackend | EngineBackend | None = None,
        v_head_size: int | None = None,
    ) -> KVStorage:
        """Create a storage over an engine's own tensors.

        Strides determine whether the layout is NHD or HND. For other content, such as recurrent states,
        use `Pages.over`, which moves arbitrary bytes.

        Args:
            kv_caches: One tensor, or one pair (K, V), per layer. All layers must have the same
                format.
            backend: How the tensors are indexed. None: derived from the shape, which must be [2,
                num_blocks, block_size, num_kv_heads, head_size], [num_blocks, 2, ...], [num_blocks,
                block_size, head_size] (MLA), or a pair (K, V) of [num_blocks, block_size,
                num_kv_heads, (v_)head_size].
            v_head_size: Number of V elements per head, for a backend that keeps a head's K and V in
                one dimension. None: half of that dimension, or 0 for MLA.

        Returns:
            The storage.

        Raises:
            ValueError: The shape does not fit the backend, the shape is ambiguous, or the layers differ.
        """
        if isinstance(kv_caches, Mapping):
            raise TypeError("kv_caches is a mapping: expected a sequence, one entry per layer")
        if not isinstance(kv_caches, torch.Tensor):
            kv_caches = listed(kv_caches, "kv_caches")
        if len(kv_caches) == 0:
            raise ValueError("kv_caches is empty: expected one entry per layer")
        self = cls.__new__(cls)
        described = None if backend is None else described_backend(backend)
        self._start()
        dims = []
        for number, cache in enumerate(kv_caches):
            name = f"kv_caches[{number}]"
            key, value, dim = key_and_value(cache, described, v_head_size, name)
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
                        f"strides {mine.stride()}, but kv_caches[0] has blocks of "
                        f"{other.dtype}{list(other.shape)} with strides {other.stride()}: expected equal "
                        "dtypes, shapes and orders in memory"
                    )
        key, value = self._keys[0], self._values[0]
        self.num_blocks, self.block_size, self.num_kv_heads, self.head_size = key.shape
        self.v_head_size, self.dtype = value.shape[3], key.dtype
        self.kv_format, self.token_sizes = None, (self.head_size, self.v_head_size)
        self.layout = "HND" if key.stride(2) > key.stride(1) and self.num_kv_heads > 1 else "NHD"
        self.backend = described
        self.memory_order = None  # unknown; the engine determines the strides
        self._use(Pages.over(kv_caches, dims))
        self.pages.contents = contents_of(self.pages, [self.parts])
        self.pages.num_storages = 1
        return self

    def _start(self) -> None:
        self._num_null_blocks = 1
        self.kv_caches: list[Tensors] = []
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._scale_caches: list[torch.Tensor] = []
        self.k_scale = self.v_scale = None

    def _use(self, pages: Pages) -> None:
        if self.kv_format is not None:
            self.kv_format.check_device(pages.device)
        self.pages = pages
        # The pages that record this storage's scales, and its number among their storages.
        self.scale_home = pages, pages.num_storages

    def _describe(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None,
        dtype: torch.dtype | str,
        layout: str,
        backend: str | AttentionBackend | EngineBackend,
        scale_bytes_per_token: int,
        format_name: str | None,
    ) -> int:
        """Set the sizes of the caches. Return the bytes of scales per token."""
        self._start()
        own_scales = integer(scale_bytes_per_token, "scale_bytes_per_token")
        self.backend = described_backend(backend)
        self.num_blocks, self.layout, self.dtype = num_blocks, layout, _torch_dtype(dtype)
        self.head_size = integer(head_size, "head_size", 1)
        self.block_size = integer(block_size, "block_size", 1)
        self.num_kv_heads = integer(num_kv_heads, "num_kv_heads", 1)
        self.kv_format = None if format_name is None else format_named(format_name)
        if self.kv_format is None or not self.kv_format.is_row:
            v_head_size = self.backend.v_size(self.head_size, v_head_size)
        # Elements per head before quantization. `head_size` and `v_head_size` are as stored.
        self.token_sizes = self.head_size, integer(v_head_size or 0, "v_head_size", 0)
        if self.kv_format is None:
            self.v_head_size = v_head_size
            return own_scales
        if own_scales:
            raise ValueError(
                f"scale_bytes_per_token is {own_scales}: expected 0 with kv_format "
                f"{shown(self.kv_format.name)}, which has scales of its own"
            )
        sizes = self.kv_format.stored(self.num_kv_heads, *self.token_sizes)
        if self.dtype not in (torch.bfloat16, _torch_dtype(sizes.dtype)):
            raise ValueError(
                f"dtype is {self.dtype}: expected {sizes.dtype}, from kv_format "
                f"{shown(self.kv_format.name)}"
            )
        self.dtype = _torch_dtype(sizes.dtype)
        self.head_size, self.v_head_size = sizes.head_size, sizes.v_head_size
        data = self.block_size * self.num_kv_heads * (self.head_size + self.v_head_size)
        if data % SCALE_BYTES:
            raise ValueError(
                f"block_size is {self.block_size}: expected a multiple with which the data of a block, "
                f"{data} bytes, end at a multiple of {SCALE_BYTES}"
            )
        return sizes.scale_bytes_per_token

    def _place(self, num_layers: int, scale_bytes_per_token: int) -> Placement:
        order = full_memory_order(self.memory_order)
        if order.index("head") < order.index("block"):
            raise ValueError(
                f"backend is {self.backend.name!r}, with the memory order {self.memory_order}: expected "
                "one that keeps the heads of a block together"
            )
        return place_elements(
            self.memory_order,
            num_layers=num_layers,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            v_head_size=self.v_head_size,
            element_bytes=self.dtype.itemsize,
            scale_bytes_per_token=scale_bytes_per_token,
        )

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.pages.device

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._keys)

    @property
    def blocks_per_page(self) -> int:
        """Number of blocks in the null page: more than 1 if each page is divided into blocks."""
        return self._num_null_blocks

    @property
    def has_scales(self) -> bool:
        """Whether `scale_cache` has views."""
        return bool(self._scale_caches)

    @property
    def num_bytes(self) -> int:
        """Total size of K and V in all layers, in bytes."""
        caches = [*self._keys, *self._values]
        return sum(cache.numel() * cache.element_size() for cache in caches)

    @property
    def parts(self) -> BlockParts:
        """The caches of all layers, keyed by part. Parts that the storage does not have are omitted."""
        layers = range(self.num_layers)
        views = {"key": [self.key_cache(layer) for layer in layers]}
        if self.v_head_size:
            views["value"] = [self.value_cache(layer) for layer in layers]
        if self.has_scales:
            views["scales"] = [self.scale_cache(layer).unsqueeze(2) for layer in layers]
        if self.kv_format is not None:  # equal bytes of two formats have different meanings
            views = {f"{name} {self.kv_format.name}": each for name, each in views.items()}
        return BlockParts(self.blocks_per_page, views if self.num_layers else {})

    def key_cache(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's K, [num_blocks, block_size, num_kv_heads, head_size]."""
        return self._keys[self._checked(layer)]

    def value_cache(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's V, [num_blocks, block_size, num_kv_heads, v_head_size]."""
        return self._values[self._checked(layer)]

    def scale_cache(self, layer: int) -> torch.Tensor:
        """Return a view of a layer's scales, uint8[num_blocks, block_size, scale_bytes_per_token]."""
        if not self.has_scales:
            raise ValueError("the storage has no scales: expected scale_bytes_per_token > 0")
        return self._scale_caches[self._checked(layer)]

    def set_scales(self, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """Set the scales with which K and V are quantized to fp8 or int8.

        Args:
            k_scale: float32[num_layers, 1] or float32[num_layers, num_kv_heads], positive.
            v_scale: The scales for V, with the same shape as `k_scale`.

        Raises:
            ValueError: The storage is not fp8 or int8, a scale is not positive, or a rank (`CacheRank`,
                `StoreRank`, `StoreTier`) has already described the scales to others. Nothing has
                changed.
        """
        if self.kv_format is not None:
            raise ValueError(
                f"the storage has format {shown(self.kv_format.name)}: expected none, because its "
                "scales are computed when tokens are written"
            )
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            raise ValueError(
                f"the storage has dtype {self.dtype}: expected float8_e4m3fn, float8_e5m2 or int8 for "
                "scales"
            )
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            instance(scale, torch.Tensor, name)
            wanted = ([self.num_layers, 1], [self.num_layers, self.num_kv_heads])
            if list(scale.shape) not in wanted or scale.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {scale.dtype}{list(scale.shape)}: "
                    f"expected torch.float32{wanted[0]} or {wanted[1]}"
                )
            if scale.layout != torch.strided or scale.is_meta:
                raise TypeError(
                    f"{name} is {scale.layout} on {scale.device}: expected a dense tensor"
                )
            on_host = scale.cpu()
            if not (torch.isfinite(on_host) & (on_host > 0)).all():
                raise ValueError(f"{name} is {scale.tolist()}: expected finite numbers above 0")
        home, number = self.scale_home
        if home.described_by:
            raise ValueError(
                "the scales are already known to other engines or to a store, which use KV by them: "
                "expected set_scales before CacheRank, StoreRank or StoreTier is created, or after it "
                "is closed"
            )
        shape = self.num_layers, self.num_kv_heads
        told = tuple(each.cpu().expand(shape).tolist() for each in (k_scale, v_scale))
        is_one = {value for part in told for row in part for value in row} == {1.0}
        # Copy the scales, because the caller's tensors may change.
        self.k_scale, self.v_scale = (
            scale.to(self.device, copy=True).contiguous() for scale in (k_scale, v_scale)
        )
        home.scales[number] = None if is_one else told

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor | None, slot_mapping: torch.Tensor
    ) -> None:
        """Write the K and V of tokens to their slots. See `ops.write_kv`.

        Tokens at slot -1 or in the null block (block 0) are skipped, because they are padding or
        have left a window.

        Args:
            layer: The layer.
            key: [n, num_kv_heads, head_size], with any strides for tokens and heads. For K in HND order,
                [num_kv_heads, n, head_size], pass `key.transpose(0, 1)`. For fp8 storage, bfloat16,
                float16 and float32 are accepted and divided by the scales.
            value: [n, num_kv_heads, v_head_size], with the same rules as for `key`. None if V is
                empty (MLA without a rotary part).
            slot_mapping: int64[n].
        """
        given = key if value is None else value
        _check_tensors(key=key, value=given, slot_mapping=slot_mapping)
        if value is None:
            value = key[:, :, :0]
        slots = self._of_tokens(slot_mapping)
        rule = self.kv_format.scale_rule if self.kv_format else ops.TOKEN_HEAD
        caches = self._token_caches(layer, key.dtype)
        ops.write_kv(key, value, *caches[:2], slots, *caches[2:], rule)

    def gather(
        self, layer: int, slot_mapping: torch.Tensor, dtype: torch.dtype | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the K and V of tokens at the given slots. Slot -1 and slots in the null block yield
        zeros.

        Args:
            layer: The layer.
            slot_mapping: int64[n].
            dtype: Dtype of the result, for quantized storage. The values are then multiplied by the
                scales. None: the storage's dtype, without multiplication; with a `kv_format`,
                bfloat16.

        Returns:
            (key, value), each [n, num_kv_heads, (v_)head_size].
        """
        _check_tensors(slot_mapping=slot_mapping)
        shape = (len(slot_mapping), self.num_kv_heads)
        default = torch.bfloat16 if self.kv_format else self.dtype
        dtype = default if dtype is None else _torch_dtype(dtype)
        key, value = (
            torch.empty((*shape, size), dtype=dtype, device=self.device)
            for size in self.token_sizes
        )
        slots, caches = self._of_tokens(slot_mapping), self._token_caches(layer, dtype)
        ops.gather_kv(*caches[:2], slots, key, value, *caches[2:])
        return key, value

    def _of_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """Replace slots in null blocks with -1, because the ops recognize only block 0."""
        if self._num_null_blocks == 1:
            return slots
        # Devices other than GPUs may lack these operations.
        computed = slots if slots.is_cuda else slots.cpu()
        is_null = (computed >= 0) & (computed < self._num_null_blocks * self.block_size)
        return torch.where(is_null, -1, computed).to(slots.device)

    def _token_caches(
        self, layer: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return (key_cache, value_cache, k_scale, v_scale) for tokens of this dtype."""
        caches = self.key_cache(layer), self.value_cache(layer)
        if self.kv_format is not None:
            scales = self.scale_cache(layer) if self.has_scales else None
            return self.kv_format.parts(*caches, scales, *self.token_sizes, dtype)
        return *caches, *self._scales(layer, dtype)

    def _scales(
        self, layer: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if dtype == self.dtype:
            return None, None
        if self.k_scale is None:
            raise ValueError(
                f"tokens are {dtype}, but the storage is {self.dtype}: expected the same dtype, or fp8 "
                "storage with scales (set_scales)"
            )
        return self.k_scale[layer], self.v_scale[layer]

    def _add_layer(
        self,
        memory: torch.Tensor,
        begin: int,
        starts: np.ndarray,
        block_strides: Sequence[int],
        placed: Placement,
        layer: int,
    ) -> None:
        """Add a layer's views. Its regions start at bytes `begin + starts` in the storage of `memory`."""
        storage = memory.untyped_storage()
        caches = []
        for p in range(len(placed.head_bytes)):
            region = int(placed.regions[layer, p])
            strides = block_strides[region], placed.token_strides[p], placed.head_strides[p]
            offset = begin + int(starts[region] + placed.kv_offsets[layer, p])
            head_size = self.v_head_size if p else self.head_size
            shape = (self.num_blocks, self.block_size, self.num_kv_heads, head_size)
            item = self.dtype.itemsize
            view = torch.empty(0, dtype=self.dtype, device=memory.device)
            steps = [int(stride) // item for stride in strides]
            caches.append(view.set_(storage, offset // item, shape, (*steps, 1)))
        if not self.v_head_size:
            caches.append(caches[0][..., :0])
        self._keys.append(caches[0])
        self._values.append(caches[1])
        self.kv_caches.append(as_indexed(*caches, self.backend.dims))
        scale_region = int(placed.scale_regions[layer])
        scale_bytes = placed.scale_bytes_per_token
        if scale_bytes:
            offset = begin + int(starts[scale_region] + placed.scale_offsets[layer])
            view = torch.empty(0, dtype=torch.uint8, device=memory.device)
            shape = (self.num_blocks, self.block_size, scale_bytes)
            stride = int(block_strides[scale_region])
            self._scale_caches.append(view.set_(storage, offset, shape, (stride, scale_bytes, 1)))

    def _checked(self, layer: int) -> int:
        return integer(layer, "layer", most=self.num_layers - 1)


def _check_tensors(**arguments: object) -> None:
    """Raise TypeError or ValueError unless all are tensors with dimensions of known size."""
    for name, value in arguments.items():
        instance(value, torch.Tensor, name)
        if value.ndim == 0:
            raise ValueError(f"{name} has 0 dimensions: expected 1 or more")
        num_entries(value, name)


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Convert a cache dtype, or its name, to a torch.dtype. Raises TypeError or ValueError."""
    return getattr(torch, dtype_name(dtype, ELEMENT_BYTES))


def _shape_of_group(block_size: int, layers: Sequence[LayerSpec]) -> dict[str, object]:
    """Return the arguments for `KVStorage.over` that all layers of a group have in common."""
    first, shape = layers[0], _shape_of_layer(layers[0], block_size)
    for layer in layers[1:]:
        if (other := _shape_of_layer(layer, block_size)) != shape:
            name = next(name for name in shape if shape[name] != other[name])
            raise ValueError(
                f"layer {layer.name!r} has {name} {other[name]}, but layer {first.name!r} of its group "
                f"has {shape[name]}: expected equal values"
            )
    return shape


def _shape_of_layer(layer: LayerSpec, block_size: int) -> dict[str, object]:
    dtype = getattr(torch, layer.dtype)
    if layer.state_bytes:
        if layer.state_bytes % dtype.itemsize:
            raise ValueError(
                f"state_bytes is {layer.state_bytes}, of layer {shown(layer.name)}: "
                f"expected whole elements of its dtype, {layer.dtype}"
            )
        num_elements = layer.state_bytes // dtype.itemsize
        sizes = {"block_size": 1, "num_kv_heads": 1, "head_size": num_elements, "v_head_size": 0}
        return {**sizes, "dtype": dtype, "scale_bytes_per_token": 0, "kv_format": None}
    head_size, v_head_size = layer.sizes_before_format
    has_format = layer.kv_format is not None
    return {
        "block_size": block_size,
        "num_kv_heads": layer.num_kv_heads,
        "head_size": head_size,
        "v_head_size": v_head_size,
        "dtype": dtype,
        "scale_bytes_per_token": 0 if has_format else layer.scale_bytes_per_token,
        "kv_format": layer.kv_format,
    }
