"""The memory of a pool's pages, as regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvcache.checks import (
    MAX_INT32,
    MAX_INT64,
    check_range,
    flag,
    instance,
    instances,
    integer,
    integers,
    listed,
)
from kvcache.worker.pages.contents import PageContents
from kvcache.worker.pages.pinning import allocate_host
from kvcache.worker.pages.regions import Region, check_apart, format_of, regions_of

if TYPE_CHECKING:
    from kvcache.worker.swap.page_copy import PageCopy

Tensors = torch.Tensor | Sequence[torch.Tensor]
ALIGNMENT = 256  # bytes: the alignment of each layer's memory


class Pages:
    """The pages of a pool, over all layers: one page is a fragment in each of several regions.

    A region is memory with one fragment per page, at equal distances: K of a layer where K and V are
    separate, K and V of a layer where they are contiguous, or a page's bytes of all layers where those
    are packed together. `copy_blocks` moves pages by number between any two `Pages` whose regions have
    fragments of the same sizes.

    memory: the tensor from which the regions' offsets count. offsets, strides, sizes: int64[r], in bytes:
    where the region's page 0 begins, from page to page, and of a fragment. layers: int32[r], ascending:
    the layer of each region. owners: per region the tensor in which it lies (default: memory). keep: an
    object that is kept alive.

    On any device of torch; on those that are neither CPU nor CUDA by torch's copies.

    >>> pages = Pages.allocate(num_blocks=9, sizes=[[512, 512]] * 4)
    >>> pages.num_layers, pages.page_bytes, len(pages.sizes)
    (4, 4096, 8)
    >>> host = pages.on_host(num_blocks=100)
    >>> host.num_blocks, host.page_bytes
    (100, 4096)
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
        owners: Sequence[torch.Tensor] = (),
        keep: object = None,
        pages_per_chunk: int = 0,
        formats: object = None,
        contents: PageContents | None = None,
    ) -> None:
        instance(memory, torch.Tensor, "memory")
        self.memory = memory
        self.num_blocks = integer(num_blocks, "num_blocks")
        self.offsets = integers(offsets, "offsets", ())
        self.strides = integers(strides, "strides", ())
        self.sizes = integers(sizes, "sizes", ())
        self.layers = integers(layers, "layers", ()).astype(np.int32)
        owners = instances(owners, torch.Tensor, "owners") or [memory] * len(self.sizes)
        for name, each in (
            ("strides", self.strides),
            ("sizes", self.sizes),
            ("layers", self.layers),
            ("owners", owners),
        ):
            if len(each) != len(self.offsets):
                raise ValueError(
                    f"{name} has {len(each)} entries: expected {len(self.offsets)}, as offsets has"
                )
        self.pages_per_chunk = pages_per_chunk  # pages that were pinned with one call; 0: all
        self.formats = formats  # the formats of blocks where known; `PageCopy` compares them
        self.contents = contents  # what the bytes mean where storages have said it; for stores
        self.base = memory.data_ptr()
        self._owners = owners
        self._keep = keep

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        sizes: Sequence[Sequence[int]],
        *,
        device: torch.device | str = "cpu",
        block_major: bool = False,
    ) -> Pages:
        """New memory for pages; not initialised, except page 0, the null block, which is zero.

        sizes: per layer the bytes of each of its fragments in a page. Each fragment has its own region;
        with `block_major` all bytes of a page are contiguous.
        """
        num_blocks = integer(num_blocks, "num_blocks", 1)
        sizes = _checked_sizes(sizes, num_blocks)
        block_major = flag(block_major, "block_major")
        fragments = np.array([size for layer in sizes for size in layer], np.int64)
        layers = np.repeat(np.arange(len(sizes)), [len(layer) for layer in sizes])
        if block_major:
            strides = np.full(len(fragments), fragments.sum())
            offsets = np.cumsum(fragments) - fragments
            total = int(fragments.sum()) * num_blocks
        else:
            of_layer = np.array([sum(layer) for layer in sizes], np.int64)
            room = -(-of_layer * num_blocks // ALIGNMENT) * ALIGNMENT
            before = (np.cumsum(fragments) - fragments) - (np.cumsum(of_layer) - of_layer)[layers]
            strides = fragments
            offsets = (np.cumsum(room) - room)[layers] + before * num_blocks
            total = int(room.sum())
        memory = torch.empty(total, dtype=torch.uint8, device=device)
        pages = cls(memory, num_blocks, offsets, strides, fragments, layers)
        pages.zero(np.zeros(1, np.int32))
        return pages

    @classmethod
    def over(cls, layers: Sequence[Tensors], block_dim: int | Sequence[int] = 0) -> Pages:
        """Pages over an engine's own tensors: per layer one, or several (K and V, states).

        `block_dim`: the dimension that counts blocks, for all tensors or per layer. Dtypes and strides
        are free; a block that is not contiguous in a tensor becomes several regions. ValueError unless
        the tensors are on one device, have the same number of blocks, and no two elements share memory.

        Host memory must not have been pinned in several chunks: this does not know their borders, and
        copies across them fail. `on_host` pins large memory in chunks; use the pages that it returns.
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
        if len(dims) != len(layers):
            raise ValueError(
                f"block_dim has {len(dims)} entries: expected {len(layers)}, one per layer"
            )
        first, dim = flat[0][1], dims[0]
        found: list[tuple[Region, int, torch.Tensor]] = []
        for number, tensor in flat:
            if not -tensor.ndim <= dims[number] < tensor.ndim:
                raise ValueError(
                    f"block_dim is {dims[number]}, and layer {number} has shape {list(tensor.shape)}: "
                    "expected a dimension, which counts blocks"
                )
            if tensor.device != first.device or tensor.shape[dims[number]] != first.shape[dim]:
                raise ValueError(
                    f"layer {number} has {tensor.shape[dims[number]]} blocks on {tensor.device}, "
                    f"layer 0 {first.shape[dim]} on {first.device}: expected the same"
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
        """New pages in host memory to which these pages can be swapped.

        All bytes of a page are contiguous. The memory is pinned in parallel chunks unless `pin_memory` is
        False (None: pinned for pages on a CUDA device). Where pinning fails, a warning says so and the
        memory stays pageable. `progress(done, total)` is called with bytes; without it, slow progress is
        logged. MemoryError where the host has less memory.
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
        """Pages on this device in the layout of host pages, in `num_bytes`, but at least two."""
        num_bytes, stride = integer(num_bytes, "num_bytes", most=MAX_INT64), self._packed_bytes
        num_blocks = max(num_bytes // max(stride, 1), 2)
        try:
            memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise MemoryError(f"num_bytes is {num_bytes}: expected fewer, {error}") from error
        return self._packed(memory, num_blocks, stride)

    @property
    def _packed_bytes(self) -> int:
        """Bytes from page to page in packed pages: a multiple of a cache line, so that none is shared."""
        return -(-self.page_bytes // 64) * 64

    def _packed(
        self, memory: torch.Tensor, num_blocks: int, stride: int, **options: object
    ) -> Pages:
        """The same regions in `memory`, all bytes of a page contiguous, pages `stride` bytes apart."""
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
        """Whether kernels can access the pages in host memory: all of it is pinned."""
        tensors = {id(tensor): tensor for tensor in (self.memory, *self._owners)}
        return self.device.type == "cpu" and all(t.is_pinned() for t in tensors.values())

    def owner(self, region: int) -> torch.Tensor:
        """The tensor in whose memory a region lies. TypeError or ValueError."""
        return self._owners[integer(region, "region", most=len(self.sizes) - 1)]

    def fragment(self, region: int) -> torch.Tensor:
        """uint8[num_blocks, bytes]: one region's fragments, a view. TypeError or ValueError."""
        region = integer(region, "region", most=len(self.sizes) - 1)
        shape = (self.num_blocks, int(self.sizes[region]))
        return self._view(region, shape)

    def layer(self, number: int) -> torch.Tensor:
        """uint8[num_blocks, bytes]: a layer's bytes of each page, a view.

        ValueError where the layer's bytes of a page are not contiguous.
        """
        number = integer(number, "number", most=self.num_layers - 1)
        regions = np.flatnonzero(self.layers == number)
        ends = self.offsets[regions] + self.sizes[regions]
        storages = {self._owners[r].untyped_storage().data_ptr() for r in regions}
        if (ends[:-1] != self.offsets[regions][1:]).any() or len(storages) > 1:
            raise ValueError(
                f"the bytes that layer {number} has of a page are {len(regions)} fragments: "
                "expected them together"
            )
        return self._view(int(regions[0]), (self.num_blocks, int(self.sizes[regions].sum())))

    @cached_property
    def others(self) -> list[torch.Tensor]:
        """A tensor of each further memory, beyond that of `memory`, in which regions lie."""
        found = {owner.untyped_storage().data_ptr(): owner for owner in self._owners}
        found.pop(self.memory.untyped_storage().data_ptr(), None)
        return list(found.values())

    def _view(self, region: int, shape: tuple[int, int]) -> torch.Tensor:
        """A uint8 view of the region's memory. Beyond its end torch would enlarge the storage, so that is
        refused."""
        storage = self._owners[region].untyped_storage()
        start = self.base + int(self.offsets[region]) - storage.data_ptr()
        strides = (int(self.strides[region]), 1)
        end = start + (shape[0] - 1) * strides[0] + shape[1]
        if start < 0 or end > storage.nbytes():
            raise ValueError(f"region {region} does not lie in the tensor that owns it")
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            storage, start, shape, strides
        )

    def copy(self, pairs: np.ndarray | torch.Tensor) -> None:
        """Copies pages within this memory, over all layers: copy-on-write pairs, in one launch.

        pairs: int32[n, 2] (source, destination), as `BlockSpaceManager.append_slots`,
        `KVCacheManager.take_copies` and the `copy` of a plan give them. They are copied in their order: a
        page that an earlier pair writes may be a later one's source, or its destination (that takes a
        launch more). On a GPU this is enqueued on the current stream.

        ValueError or TypeError, with nothing copied, for pages out of range and pairs of another shape or
        dtype. Pairs that lie on a GPU are not checked, and none may read or write what another writes.

        >>> layers = [torch.arange(12.0).view(2, 3, 2) for _ in range(2)]  # K and V of 3 blocks each
        >>> pages = Pages.over(layers, block_dim=1)  # an engine's own tensors; make it once
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
        """Clears whole pages; ids: int32[n]."""
        self._within.zero(ids)

    @cached_property
    def _within(self) -> PageCopy:
        from kvcache.worker.swap.page_copy import PageCopy  # imports this module

        twin = copy(self)  # no cycle of references keeps the memory
        return PageCopy(twin, twin)


def _independent(pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Runs of pairs of which none reads or writes what another one of its run writes."""
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
    """Bytes of fragments, per layer, that int64 counts for all pages. TypeError or ValueError."""
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
