# SPDX-License-Identifier: Apache-2.0
"""The pages of a pool, as memory regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property

import numpy as np
import torch

from kvcache.checks import (
    MAX_INT32,
    MAX_INT64,
    check_count,
    check_range,
    flag,
    instance,
    integer,
    integers,
    listed,
)
from kvcache.worker.pages.memory import PageMemory
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pinning import allocate_host
from kvcache.worker.pages.regions import Region, check_apart, format_of, regions_of

Tensors = torch.Tensor | Sequence[torch.Tensor]
ALIGNMENT = 256  # alignment of each layer's memory in bytes


class Pages(PageMemory):
    """The pages of a pool, covering all layers. Each page has one fragment in each region.

    A region holds one fragment per page, at a constant stride. Depending on the layout, a fragment
    contains a layer's K or V (if they are separate), a layer's K and V (if they are contiguous), or
    the bytes of all layers (if layers are packed). `copy_blocks` moves pages between any two
    `Pages` whose regions have fragments of the same sizes.

    All torch devices are supported. On devices other than CPU and CUDA, pages are copied with torch
    operations.

    Args:
        memory: The tensor to which `offsets` refer.
        num_blocks: Number of pages.
        offsets: int64[r]. Byte offset of page 0 in each region.
        strides: int64[r]. Distance in bytes between consecutive pages.
        sizes: int64[r]. Bytes per fragment.
        layers: int32[r], ascending. The layer to which each region belongs.
        owners: The tensor that contains each region. Empty: `memory` contains all regions.
        keep: An object to keep alive as long as the pages exist.

    Example:
        >>> pages = Pages.allocate(num_blocks=9, sizes=[[512, 512]] * 4)
        >>> pages.num_layers, pages.page_bytes, len(pages.sizes)
        (4, 4096, 8)
        >>> host = pages.on_host(num_blocks=100)
        >>> host.num_blocks, host.page_bytes
        (100, 4096)
    """

    @classmethod
    def allocate(
        cls, num_blocks: int, sizes: Sequence[Sequence[int]], *, device: torch.device | str = "cpu"
    ) -> Pages:
        """Allocate memory for pages. Only page 0, the null block, is initialized (to zeros).

        Args:
            num_blocks: Number of pages, including the null block.
            sizes: For each layer, the sizes in bytes of its fragments in a page. Each fragment has
                its own region.
            device: Device of the memory.

        Returns:
            The pages.
        """
        num_blocks = integer(num_blocks, "num_blocks", 1)
        sizes = _checked_sizes(sizes, num_blocks)
        fragments = np.array([size for layer in sizes for size in layer], np.int64)
        layers = np.repeat(np.arange(len(sizes)), [len(layer) for layer in sizes])
        of_layer = np.array([sum(layer) for layer in sizes], np.int64)
        room = -(-of_layer * num_blocks // ALIGNMENT) * ALIGNMENT
        before = (np.cumsum(fragments) - fragments) - (np.cumsum(of_layer) - of_layer)[layers]
        offsets = (np.cumsum(room) - room)[layers] + before * num_blocks
        memory = torch.empty(int(room.sum()), dtype=torch.uint8, device=device)
        pages = cls(memory, num_blocks, offsets, fragments, fragments, layers)
        pages.zero(np.zeros(1, np.int32))
        return pages

    @classmethod
    def over(cls, layers: Sequence[Tensors], block_dim: int | Sequence[int] = 0) -> Pages:
        """Create pages over an engine's own tensors.

        Any dtypes and strides are accepted. If a block is not contiguous in its tensor, it is
        divided into several regions. Pinned host memory must stay pinned as long as the pages are
        used. It must not be pinned in several chunks, because copies across an unknown chunk
        boundary fail. Since `on_host` pins large memory in chunks, use the pages that it returns
        and do not wrap their memory.

        Args:
            layers: For each layer, one tensor or several tensors (such as K and V, or states).
            block_dim: The dimension that indexes blocks, as one value for all layers or one value
                per layer.

        Returns:
            The pages.

        Raises:
            ValueError: The tensors are on different devices, have different numbers of blocks, or contain
                elements that share memory.
        """
        layers = listed(layers, "layers")
        flat = [
            (number, tensor)
            for number, layer in enumerate(layers)
            for tensor in (
                [layer] if isinstance(layer, torch.Tensor) else listed(layer, f"layer {number}")
            )
        ]
        for number, tensor in flat:
            instance(tensor, torch.Tensor, f"layer {number}")
        if not flat:
            raise ValueError("there are no tensors: expected one or more per layer")
        if isinstance(block_dim, int):
            dims = [block_dim] * len(layers)
        else:
            dims = listed(block_dim, "block_dim", "an integer, or one per layer")
        dims = [integer(each, "block_dim", -MAX_INT32) for each in dims]
        check_count(dims, len(layers), "block_dim", "layer")
        first, dim = flat[0][1], dims[0]
        found: list[tuple[Region, int, torch.Tensor]] = []
        for number, tensor in flat:
            if not -tensor.ndim <= dims[number] < tensor.ndim:
                raise ValueError(
                    f"block_dim is {dims[number]}, and layer {number} has shape {list(tensor.shape)}: "
                    "expected the index of the dimension that counts blocks"
                )
            if tensor.device != first.device or tensor.shape[dims[number]] != first.shape[dim]:
                raise ValueError(
                    f"layer {number} has {tensor.shape[dims[number]]} blocks on {tensor.device}, "
                    f"but layer 0 has {first.shape[dim]} on {first.device}: expected equal numbers of "
                    "blocks on one device"
                )
            regions = regions_of(tensor, dims[number], f"layer {number}")
            found += [(region, number, tensor) for region in regions]
        if not found:
            raise ValueError(f"layer 0 has shape {list(first.shape)}: expected elements in a block")
        regions = np.array([region for region, _, _ in found], np.int64)
        check_apart(regions, [number for _, number, _ in found], first.shape[dim])
        return cls(
            first.detach(),
            first.shape[dim],
            regions[:, 0] - first.data_ptr(),
            regions[:, 1],
            regions[:, 2],
            [number for _, number, _ in found],
            owners=[tensor for _, _, tensor in found],
            formats=("raw", *(format_of(tensor, dims[number]) for number, tensor in flat)),
        )

    def on_host(
        self,
        num_blocks: int,
        *,
        pin_memory: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pages:
        """Allocate host pages to which these pages can be swapped.

        In host memory, all bytes of a page are contiguous. The memory is pinned in chunks, in
        parallel. If pinning fails, a warning is issued and the memory stays pageable.

        Args:
            num_blocks: Number of pages, including the null block.
            pin_memory: Whether to pin the memory. None: only for pages on a CUDA device.
            progress: Called as `progress(done, total)`, in bytes. None: slow progress is logged.

        Returns:
            The host pages.

        Raises:
            MemoryError: The host does not have enough memory.
        """
        num_blocks = integer(num_blocks, "num_blocks", 1)
        own = self.device.type == "cuda"
        pin = own if pin_memory is None else flag(pin_memory, "pin_memory")
        stride = self._packed_bytes
        memory, per_chunk, keep = allocate_host(
            num_blocks, stride, self.device if pin else None, progress
        )
        host = self._packed(memory, num_blocks, stride, keep=keep, pages_per_chunk=per_chunk)
        host.zero(np.zeros(1, np.int32))
        return host

    def staging(self, num_bytes: int) -> Pages:
        """Allocate two or more staging pages of up to `num_bytes`, in the layout of host pages."""
        num_bytes, stride = integer(num_bytes, "num_bytes", most=MAX_INT64), self._packed_bytes
        num_blocks = max(num_bytes // max(stride, 1), 2)
        try:
            memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise MemoryError(f"num_bytes is {num_bytes}: expected fewer bytes: {error}") from error
        return self._packed(memory, num_blocks, stride)

    @property
    def _packed_bytes(self) -> int:
        """Distance in bytes between packed pages, which do not share cache lines."""
        return -(-self.page_bytes // 64) * 64

    def _packed(
        self, memory: torch.Tensor, num_blocks: int, stride: int, **options: object
    ) -> Pages:
        """Return the same regions in `memory`, with contiguous pages that are `stride` bytes apart."""
        offsets = np.cumsum(self.sizes) - self.sizes
        strides = np.full(len(self.sizes), stride)
        return Pages(
            memory,
            num_blocks,
            offsets,
            strides,
            self.sizes,
            self.layers,
            formats=self.formats,
            contents=self.contents,
            **options,
        )

    def copy(self, pairs: np.ndarray | torch.Tensor) -> None:
        """Copy pages within this memory, in all layers. Used for copy-on-write, for example.

        The pairs are copied in order. A later pair may read or write a page that an earlier pair
        writes, at the cost of an additional launch. On a GPU, the copy is enqueued on the current
        stream.

        Args:
            pairs: int32[n, 2]. Source and destination pages, for example, from
                `BlockSpaceManager.append_slots`, `KVCacheManager.take_copies` or a plan's `copy`.
                Pairs on a GPU are not checked; these must not read or write pages that other pairs
                write.

        Raises:
            TypeError: The pairs are not integers. Nothing has been copied.
            ValueError: A page is out of range or the shape is wrong. Nothing has been copied.

        Example:
            >>> layers = [torch.arange(12.0).view(2, 3, 2) for _ in range(2)]  # K and V of 3 blocks each
            >>> pages = Pages.over(layers, block_dim=1)  # an engine's own tensors; create once
            >>> pages.copy([(1, 2)])
            >>> layers[1][:, 2].tolist()
            [[2.0, 3.0], [8.0, 9.0]]
        """
        if isinstance(pairs, torch.Tensor) and pairs.device.type != "cpu":
            self._within.copy(pairs)
            return
        pairs = integers(pairs, "pairs", (2,))
        check_range("pairs", "reads page", pairs[:, 0], 0, self.num_blocks)
        check_range("pairs", "writes to page", pairs[:, 1], 0, self.num_blocks)
        for some in _independent(pairs[pairs[:, 0] != pairs[:, 1]]):
            self._within.copy(some)

    def zero(self, ids: np.ndarray) -> None:
        """Zero whole pages. `ids`: int32[n]."""
        self._within.zero(ids)

    @cached_property
    def _within(self) -> PageCopy:
        twin = copy(self)  # without a reference cycle, which would keep the memory alive
        return PageCopy(twin, twin)


def _independent(pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Split pairs into runs in which no pair reads or writes a page that another pair writes."""
    first = 0
    read, written = set(), set()
    for i, (source, destination) in enumerate(pairs.tolist()):
        if source in written or destination in written or destination in read:
            yield pairs[first:i]
            first, read, written = i, set(), set()
        read.add(source)
        written.add(destination)
    if len(pairs) > first:
        yield pairs[first:]


def _checked_sizes(sizes: Sequence[Sequence[int]], num_blocks: int) -> list[list[int]]:
    """Return the fragment sizes per layer, if all pages have fewer than 2^63 bytes in all."""
    checked = [
        [integer(size, f"sizes[{i}][{j}]", most=MAX_INT64) for j, size in enumerate(fragments)]
        for i, fragments in enumerate(
            listed(layer, f"sizes[{i}]") for i, layer in enumerate(listed(sizes, "sizes"))
        )
    ]
    page_bytes = sum(map(sum, checked))
    total = (page_bytes + ALIGNMENT * len(checked)) * num_blocks
    if total > MAX_INT64:
        raise ValueError(
            f"sizes has {page_bytes} bytes a page and num_blocks is {num_blocks}: expected fewer than "
            "2^63 bytes in all"
        )
    return checked
