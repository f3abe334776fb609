# SPDX-License-Identifier: Apache-2.0
"""The placement of a pool's pages in memory, and what the pages contain."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvcache.checks import check_count, instance, instances, integer, integers


class PageContents(NamedTuple):
    """A description of a page's contents, made of plain values that can be compared.

    The bytes of a page are all of its fragments, concatenated in the order of `Pages.sizes`, which
    is how swaps and stores copy them. Neither the fragments' placement in memory nor a backend's
    indexing affects the description.
    """

    storages: tuple[tuple, ...]  # for each storage over the pages, the parts of a block
    cp_interleave: int | None = None  # interleave in tokens, as in the block tables; None: unknown
    groups: tuple[str, ...] = ()  # `GroupSpec.summary` of each group; (): unknown


class PageMemory:
    """Memory regions, each of which contains one fragment per page. `Pages` documents the fields."""

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
            check_count(each, len(self.offsets), name, "offset")
        self.pages_per_chunk = pages_per_chunk  # number of pages pinned per call; 0: all pages
        self.formats = formats  # block formats, if known, for comparison by `PageCopy`
        self.contents = contents  # page contents, used by stores; None until a storage sets it
        self.num_storages = 0  # over these pages
        # The fp8 scales that belong to the content, by the number of the storage. None: all are 1.
        self.scales: dict[int, tuple[list, list] | None] = {}
        # Ranks that have described these pages to other engines or to stores.
        self.described_by: weakref.WeakSet[object] = weakref.WeakSet()
        self.base = memory.data_ptr()
        self._owners = owners
        self._keep = keep

    @property
    def device(self) -> torch.device:
        """The device that holds all regions."""
        return self.memory.device

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.layers[-1]) + 1 if len(self.layers) else 0

    @property
    def page_bytes(self) -> int:
        """Number of bytes per page, summed over all layers."""
        return int(self.sizes.sum())

    @property
    def num_bytes(self) -> int:
        """Total size of all pages in bytes."""
        return self.page_bytes * self.num_blocks

    @property
    def is_pinned(self) -> bool:
        """Whether the pages are in pinned host memory, which kernels can access."""
        tensors = {id(tensor): tensor for tensor in (self.memory, *self._owners)}
        return self.device.type == "cpu" and all(t.is_pinned() for t in tensors.values())

    def owner(self, region: int) -> torch.Tensor:
        """Return the tensor whose memory contains a region. Raises TypeError or ValueError."""
        return self._owners[integer(region, "region", most=len(self.sizes) - 1)]

    def fragment(self, region: int) -> torch.Tensor:
        """Return a view of a region's fragments, uint8[num_blocks, bytes]."""
        region = integer(region, "region", most=len(self.sizes) - 1)
        shape = (self.num_blocks, int(self.sizes[region]))
        return self._view(region, shape)

    def layer(self, number: int) -> torch.Tensor:
        """Return a view of a layer's bytes in each page, uint8[num_blocks, bytes].

        Args:
            number: The layer.

        Raises:
            ValueError: The layer does not exist, or its bytes in a page are not contiguous.
        """
        number = integer(number, "number", most=self.num_layers - 1)
        regions = np.flatnonzero(self.layers == number)
        ends = self.offsets[regions] + self.sizes[regions]
        storages = {self._owners[r].untyped_storage().data_ptr() for r in regions}
        if (ends[:-1] != self.offsets[regions][1:]).any() or len(storages) > 1:
            raise ValueError(
                f"the bytes of layer {number} in a page are {len(regions)} separate fragments: "
                "expected contiguous bytes"
            )
        return self._view(int(regions[0]), (self.num_blocks, int(self.sizes[regions].sum())))

    @cached_property
    def others(self) -> list[torch.Tensor]:
        """The tensors that contain regions outside of `memory`, one tensor per allocation."""
        found = {owner.untyped_storage().data_ptr(): owner for owner in self._owners}
        found.pop(self.memory.untyped_storage().data_ptr(), None)
        return list(found.values())

    def _view(self, region: int, shape: tuple[int, int]) -> torch.Tensor:
        """Return a uint8 view in the region's memory. torch would enlarge the storage beyond it."""
        storage = self._owners[region].untyped_storage()
        start = self.base + int(self.offsets[region]) - storage.data_ptr()
        strides = (int(self.strides[region]), 1)
        end = start + (shape[0] - 1) * strides[0] + shape[1]
        if start < 0 or end > storage.nbytes():
            raise ValueError(f"region {region} does not lie in the tensor that owns it")
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            storage, start, shape, strides
        )
