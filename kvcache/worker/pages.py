"""Where the bytes of a pool's pages lie, and how pages move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvcache import ops
from kvcache.worker.pinning import allocate_host

Tensors = torch.Tensor | Sequence[torch.Tensor]
_ALIGNMENT = 256  # bytes; of what begins a layer, as an allocator would give it


class Pages:
    """Pages of a pool, over all layers: one page is a fragment in each of several regions.

    A region is a stretch of memory with one fragment per page, at equal distances: K of a layer where
    K and V lie apart, K and V of a layer where they lie together, a page's bytes of all layers where
    those are packed together. `copy_blocks` moves pages by their numbers between any two `Pages` whose
    regions have the same bytes, wherever these lie.

    memory: a tensor that the regions' offsets count from. offsets, strides, sizes: int64[r], in bytes:
    from memory's first byte to the region's page 0, from page to page, of a fragment. layers:
    int32[r], ascending: whose region it is. keep: what must live as long as this.

    >>> pages = Pages.allocate(num_blocks=9, sizes=[[512, 512]] * 4)
    >>> pages.num_layers, pages.page_bytes, len(pages.sizes)
    (4, 4096, 8)
    >>> host = pages.on_host(num_blocks=100)
    >>> host.copy_from(pages, np.array([[1, 7], [2, 8]]))
    """

    def __init__(
        self,
        memory: torch.Tensor,
        num_blocks: int,
        offsets: np.ndarray,
        strides: np.ndarray,
        sizes: np.ndarray,
        layers: np.ndarray,
        *,
        keep: object = None,
        pages_per_chunk: int = 0,
    ) -> None:
        self.memory = memory
        self.num_blocks = num_blocks
        self.offsets = np.asarray(offsets, np.int64)
        self.strides = np.asarray(strides, np.int64)
        self.sizes = np.asarray(sizes, np.int64)
        self.layers = np.asarray(layers, np.int32)
        self.pages_per_chunk = pages_per_chunk  # that were pinned in one piece; 0: all
        self._keep = keep

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        sizes: Sequence[Sequence[int]],
        *,
        device: torch.device | str = "cpu",
        blocks_first: bool = False,
        block_major: bool = False,
    ) -> Pages:
        """New memory for pages; not initialised, except page 0, the null block, which is zero.

        sizes: per layer the bytes of each of its parts (K, V, scales). A layer's parts lie apart, each
        with all its blocks; with `blocks_first` together, block by block; with `block_major` a page's
        bytes of all layers lie together, so that a page is one fragment.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: expected 1 or more")
        parts = np.array([size for layer in sizes for size in layer], np.int64)
        layers = np.repeat(np.arange(len(sizes)), [len(layer) for layer in sizes])
        if block_major:
            strides = np.full(len(parts), parts.sum())
            offsets = np.cumsum(parts) - parts
            total = int(parts.sum()) * num_blocks
        else:
            of_layer = np.array([sum(layer) for layer in sizes], np.int64)
            room = -(-of_layer * num_blocks // _ALIGNMENT) * _ALIGNMENT
            before = (np.cumsum(parts) - parts) - (np.cumsum(of_layer) - of_layer)[layers]
            starts = (np.cumsum(room) - room)[layers]
            strides = of_layer[layers] if blocks_first else parts
            offsets = starts + (before if blocks_first else before * num_blocks)
            total = int(room.sum())
        memory = torch.empty(total, dtype=torch.uint8, device=device)
        pages = cls(memory, num_blocks, offsets, strides, parts, layers)
        pages.zero(np.zeros(1, np.int32))
        return pages

    @classmethod
    def over(cls, layers: Sequence[Tensors], block_dim: int | Sequence[int] = 0) -> Pages:
        """An engine's own tensors, as they are: per layer one, or several (K and V, states).

        `block_dim`: the dimension that counts blocks, of all tensors or per layer. Any dtypes and
        strides; what of a block is not contiguous becomes several regions. The tensors must lie on one
        device, with one number of blocks and memory that no two of their elements share; else a
        ValueError.
        """
        flat = [
            (number, tensor)
            for number, layer in enumerate(layers)
            for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)
        ]
        if not flat:
            raise ValueError("there are no tensors: expected one or more per layer")
        dims = [block_dim] * len(layers) if isinstance(block_dim, int) else list(block_dim)
        if len(dims) != len(layers):
            raise ValueError(
                f"block_dim has {len(dims)} entries: expected {len(layers)}, one per layer"
            )
        first, dim = flat[0][1], dims[0]
        base, found = first.data_ptr(), []
        for number, tensor in flat:
            if not -tensor.ndim <= dims[number] < tensor.ndim:
                raise ValueError(
                    f"layer {number} has shape {list(tensor.shape)}: "
                    f"expected a dimension {dims[number]}, which counts blocks"
                )
            if tensor.device != first.device or tensor.shape[dims[number]] != first.shape[dim]:
                raise ValueError(
                    f"layer {number} has {tensor.shape[dims[number]]} blocks on {tensor.device}, "
                    f"layer 0 {first.shape[dim]} on {first.device}: expected the same"
                )
            regions = _regions_of(tensor, dims[number], number)
            found += [(tensor.data_ptr() - base + at, *rest, number) for at, *rest in regions]
        offsets, strides, sizes, numbers = zip(*found)
        memory = first.detach()
        return cls(
            memory,
            first.shape[dim],
            offsets,
            strides,
            sizes,
            numbers,
            keep=[tensor for _, tensor in flat],
        )

    def on_host(
        self,
        num_blocks: int,
        *,
        pin_memory: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pages:
        """New pages in host memory that these can be swapped to and from.

        Page-major: all bytes of a page lie together. Pinned, in parallel pieces, unless
        `pin_memory` says no (the usual for pages of the CPU); where pinning fails, a warning says so
        and the memory stays pageable. `progress(done, total)` is told bytes; without it, what takes
        long is logged. MemoryError where the host has less memory.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: expected 1 or more")
        pin = self.device.type == "cuda" if pin_memory is None else pin_memory
        stride = self._packed_bytes
        memory, per_chunk, keep = allocate_host(num_blocks, stride, pin, progress)
        host = self._packed(memory, num_blocks, stride, keep=keep, pages_per_chunk=per_chunk)
        host.zero(np.zeros(1, np.int32))
        return host

    def staging(self, num_bytes: int) -> Pages:
        """Pages on the same device, page-major as those of the host, in `num_bytes` or a page."""
        stride = self._packed_bytes
        num_blocks = max(num_bytes // max(stride, 1), 1)
        memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device=self.device)
        return self._packed(memory, num_blocks, stride)

    @property
    def _packed_bytes(self) -> int:
        """From page to page where they are packed: whole cache lines, so that no two share one."""
        return -(-self.page_bytes // 64) * 64

    def _packed(
        self, memory: torch.Tensor, num_blocks: int, stride: int, **options: object
    ) -> Pages:
        """The same regions, all of a page together, pages `stride` bytes apart."""
        offsets = np.cumsum(self.sizes) - self.sizes
        strides = np.full(len(self.sizes), stride)
        return Pages(memory, num_blocks, offsets, strides, self.sizes, self.layers, **options)

    @property
    def device(self) -> torch.device:
        """Where all regions lie."""
        return self.memory.device

    @property
    def num_layers(self) -> int:
        """Layers, counted from 0."""
        return int(self.layers[-1]) + 1 if len(self.layers) else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all layers."""
        return int(self.sizes.sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * self.num_blocks

    @property
    def is_pinned(self) -> bool:
        """Whether a device can reach it by itself: host memory that is pinned."""
        return self.device.type == "cpu" and self.memory.is_pinned()

    def fragment(self, region: int) -> torch.Tensor:
        """uint8[num_blocks, bytes]: one region's fragments, a view."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        storage = self.memory.untyped_storage()
        start = self.memory.data_ptr() - storage.data_ptr() + int(self.offsets[region])
        shape = (self.num_blocks, int(self.sizes[region]))
        return whole.set_(storage, start, shape, (int(self.strides[region]), 1))

    def layer(self, number: int) -> torch.Tensor:
        """uint8[num_blocks, bytes]: a layer's bytes of each page, a view.

        ValueError for a layer whose bytes of a page do not lie together.
        """
        regions = np.flatnonzero(self.layers == number)
        if len(regions) == 0:
            raise ValueError(f"layer is {number}: expected 0 to {self.num_layers - 1}")
        ends = self.offsets[regions] + self.sizes[regions]
        if (ends[:-1] != self.offsets[regions][1:]).any():
            raise ValueError(
                f"the bytes that layer {number} has of a page lie in {len(regions)} places: "
                "expected them together (blocks_first)"
            )
        view = self.fragment(int(regions[0]))
        shape = (self.num_blocks, int(self.sizes[regions].sum()))
        return view.as_strided(shape, view.stride(), view.storage_offset())

    def copy_from(self, source: Pages, pairs: np.ndarray | torch.Tensor, **options: int) -> None:
        """Copies whole pages here; see `ops.copy_blocks`, also for what else can be said.

        pairs: int32[n, 2], page of `source` and page here. ValueError where the two do not fit.
        """
        Route(source, self).copy(pairs, **options)

    def zero(self, ids: np.ndarray) -> None:
        """Clears whole pages; ids: int32[n]."""
        Route(self, self).zero(ids)


class Route:
    """The way from one pool's pages to another's (or within one): what `ops.copy_blocks` takes.

    Regions that lie side by side on both sides are one; with `by_layer`, only those of one layer, so
    that single layers can be copied.
    """

    def __init__(self, source: Pages, destination: Pages, *, by_layer: bool = False) -> None:
        if len(source.sizes) != len(destination.sizes):
            raise ValueError(
                f"the source's pages have {len(source.sizes)} fragments over {source.num_layers} "
                f"layers, the destination's {len(destination.sizes)} over "
                f"{destination.num_layers}: expected the same"
            )
        wrong = np.flatnonzero(
            (source.sizes != destination.sizes) | (source.layers != destination.layers)
        )
        if len(wrong):
            at = wrong[0]
            raise ValueError(
                f"fragment {at} has {source.sizes[at]} bytes of layer {source.layers[at]} in the "
                f"source, {destination.sizes[at]} of layer {destination.layers[at]} in the "
                "destination: expected the same"
            )
        self.source, self.destination = source, destination
        table, self._layers = _merged(source, destination, by_layer)
        self.regions = torch.from_numpy(table)
        # Whether neighbouring pages lie side by side on both sides.
        self.is_dense = bool(((table[:, 1] == table[:, 4]) & (table[:, 3] == table[:, 4])).all())
        on_host = source if source.device.type == "cpu" else destination
        self._pages_per_run = on_host.pages_per_chunk

    def copy(
        self,
        pairs: np.ndarray | torch.Tensor,
        *,
        engine: int = ops.KERNEL,
        num_thread_blocks: int = 0,
        layers: slice | None = None,
    ) -> None:
        """Copies pages, of all layers or (`by_layer`) of those; see `ops.copy_blocks`."""
        regions = self.regions
        if layers is not None:
            first, last = np.searchsorted(self._layers, [layers.start, layers.stop])
            regions = regions[first:last]
        source, destination = self.source, self.destination
        ops.copy_blocks(
            None if source is destination else source.memory,
            destination.memory,
            regions,
            pairs_tensor(pairs),
            source.num_blocks,
            destination.num_blocks,
            engine,
            self._pages_per_run,
            num_thread_blocks,
        )

    def zero(self, ids: np.ndarray) -> None:
        """Clears whole pages of the destination; ids: int32[n]."""
        self.copy(np.stack([np.full(len(ids), -1, np.int32), np.asarray(ids)], axis=1))


def pairs_tensor(pairs: np.ndarray | torch.Tensor) -> torch.Tensor:
    """int32[n, 2]; tensors as they are. ValueError or TypeError for anything but integers."""
    if isinstance(pairs, torch.Tensor):
        return pairs
    array = np.asarray(pairs)
    if array.ndim != 2 or array.shape[1] != 2:
        if array.size:
            raise ValueError(f"pairs has shape {list(array.shape)}: expected [n, 2]")
        array = array.reshape(0, 2)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"pairs has dtype {array.dtype}: expected integers")
    limits = np.iinfo(np.int32)
    if array.dtype != np.int32 and array.size:
        wrong = np.argwhere((array < limits.min) | (array > limits.max))
        if len(wrong):
            i, j = wrong[0]
            raise ValueError(f"pairs[{i}] has page {array[i, j]}: expected int32")
    array = np.ascontiguousarray(array, np.int32)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _merged(source: Pages, destination: Pages, by_layer: bool) -> tuple[np.ndarray, np.ndarray]:
    """int64[r, 5] as the op takes it, neighbours merged; and the layer in which each begins."""
    table = np.stack(
        [source.offsets, source.strides, destination.offsets, destination.strides, source.sizes], 1
    )
    joined = (
        (table[:-1, 0] + table[:-1, 4] == table[1:, 0])
        & (table[:-1, 2] + table[:-1, 4] == table[1:, 2])
        & (table[:-1, 1] == table[1:, 1])
        & (table[:-1, 3] == table[1:, 3])
    )
    if by_layer:
        joined &= source.layers[:-1] == source.layers[1:]
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(table), 1), bool), ~joined]))
    merged = table[starts]
    if len(starts):
        merged[:, 4] = np.add.reduceat(table[:, 4], starts)
    return merged, source.layers[starts]


def _regions_of(tensor: torch.Tensor, block_dim: int, layer: int) -> list[tuple[int, int, int]]:
    """(offset, stride, size) in bytes of each contiguous piece that a tensor has of a block."""
    item = tensor.element_size()
    block_dim %= tensor.ndim
    # Dimensions of one element have no stride.
    dims = sorted(
        (tensor.stride(d), tensor.shape[d])
        for d in range(tensor.ndim)
        if d != block_dim and tensor.shape[d] > 1
    )
    size, outer = 1, []
    for stride, count in dims:
        if stride == size and not outer:
            size *= count
        else:
            outer.append((stride, count))
    extents = sorted([*outer, (tensor.stride(block_dim), tensor.shape[block_dim])])
    extent = size
    for stride, count in extents:
        if stride < extent and count > 1:
            raise ValueError(
                f"layer {layer} has elements that share memory (stride {stride}): expected none"
            )
        extent = stride * count
    pieces = np.zeros(1, np.int64)
    for stride, count in reversed(outer):
        pieces = (pieces[:, None] + np.arange(count) * stride).ravel()
    if math.prod(tensor.shape) == 0:
        return []
    stride = tensor.stride(block_dim) * item
    return [(int(at) * item, stride, size * item) for at in pieces]
