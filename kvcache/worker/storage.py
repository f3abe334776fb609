"""KV storage: the tensors that the pages of a pool live in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcache import ops
from kvcache.plan import NO_IDS, NO_PAIRS

LAYOUTS = ("NHD", "HND")


class KVStorage:
    """K and V of all layers: per layer one tensor [2, num_blocks, block_size, heads, head_size].

    `layout` is the order in memory of tokens (N), heads (H) and head elements (D) within a block; the
    shape seen is the same for both, strides tell them apart. Memory is not initialised, except block
    0, the null block, which is zero: padded and slid-out table entries read it.

    The constructor allocates; `over` is how one of several groups sees memory that they share. `pages`
    is the memory by page: per layer a tensor whose first dimension is the block.

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
        _check_positive(num_blocks=num_blocks, num_layers=num_layers)
        self._describe(num_blocks, block_size, num_kv_heads, head_size, dtype, device, layout)
        self.kv_caches = [self._allocate() for _ in range(num_layers)]
        self.pages = [cache.transpose(0, 1) for cache in self.kv_caches]

    @classmethod
    def over(
        cls,
        pages: Sequence[torch.Tensor],
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "NHD",
    ) -> KVStorage:
        """One group's view of pages that all groups share; a page belongs to one group at a time.

        `pages`: per layer uint8[num_blocks, page_bytes], as `allocate_pages` makes them. A page begins
        with K of the block, V follows, and what then remains is padding. ValueError where a block does
        not fit. A recurrent state is one token as wide as the state.

        >>> pages = allocate_pages(num_blocks=9, page_bytes=1024)
        >>> full = KVStorage.over(pages, 16, num_kv_heads=2, head_size=8)
        >>> local = KVStorage.over(pages, 32, num_kv_heads=1, head_size=8)
        >>> full.key_cache(0).shape, local.key_cache(0).shape
        (torch.Size([9, 16, 2, 8]), torch.Size([9, 32, 1, 8]))
        """
        self = cls.__new__(cls)
        _check_shared(pages)
        self._describe(
            len(pages[0]), block_size, num_kv_heads, head_size, dtype, pages[0].device, layout
        )
        self.pages = list(pages)
        self.kv_caches = [self._view(page) for page in pages]
        return self

    def _describe(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: str,
    ) -> None:
        _check_positive(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size)
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}: expected one of {', '.join(LAYOUTS)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.layout = layout
        self.dtype = dtype
        self.device = torch.device(device)

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

    def copy_pages(self, pairs: np.ndarray) -> None:
        """Copies whole pages of all layers; `pairs`: int32[n, 2], source and destination.

        All are read before the first is written. ValueError, with nothing copied, for a page that is
        not there, a destination named twice, and the null block as one.
        """
        check_page_moves(pairs, NO_IDS, self.num_blocks)
        move_pages(self.pages, self.pages, pairs)

    def zero_pages(self, ids: np.ndarray) -> None:
        """Clears whole pages of all layers; `ids`: int32[n]. ValueError as for `copy_pages`."""
        check_page_moves(NO_PAIRS, ids, self.num_blocks)
        ids = _ids_on(self.device, ids)
        for pages in self.pages:
            pages.index_fill_(0, ids, 0)

    def _allocate(self) -> torch.Tensor:
        shape = (2, self.num_blocks, *self._block_shape())
        cache = torch.empty(shape, dtype=self.dtype, device=self.device)
        cache[:, 0] = 0
        return cache.transpose(2, 3) if self.layout == "HND" else cache

    def _view(self, page: torch.Tensor) -> torch.Tensor:
        """[2, num_blocks, block_size, heads, head_size] over uint8[num_blocks, page_bytes]."""
        elements = 2 * self.block_size * self.num_kv_heads * self.head_size
        num_bytes = elements * self.dtype.itemsize
        if page.shape[1] < num_bytes or page.shape[1] % self.dtype.itemsize:
            raise ValueError(
                f"pages have {page.shape[1]} bytes: expected a multiple of {self.dtype.itemsize}, "
                f"and {num_bytes} or more for a block of {self.block_size} tokens"
            )
        cache = page[:, :num_bytes].view(self.dtype)
        cache = cache.view(self.num_blocks, 2, *self._block_shape()).transpose(0, 1)
        return cache.transpose(2, 3) if self.layout == "HND" else cache

    def _block_shape(self) -> tuple[int, int, int]:
        """In the order of memory."""
        if self.layout == "HND":
            return (self.num_kv_heads, self.block_size, self.head_size)
        return (self.block_size, self.num_kv_heads, self.head_size)

    def _checked(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}: expected 0 to {self.num_layers - 1}")
        return layer


def allocate_pages(
    num_blocks: int, page_bytes: int, *, num_layers: int = 1, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Per layer uint8[num_blocks, page_bytes]: the memory that `KVStorage.over` shows to each group.

    Not initialised, except block 0, the null block, which is zero.
    """
    _check_positive(num_blocks=num_blocks, page_bytes=page_bytes, num_layers=num_layers)
    shape = (num_blocks, page_bytes)
    pages = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(num_layers)]
    for page in pages:
        page[0] = 0
    return pages


def move_pages(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: np.ndarray
) -> None:
    """Copies whole pages of all layers, unchecked; `pairs`: int32[n, 2], source and destination.

    Per layer, all are read before the first is written. The two may lie on different devices.
    """
    if len(pairs) == 0:
        return
    read = _ids_on(sources[0].device, pairs[:, 0])
    written = _ids_on(destinations[0].device, pairs[:, 1])
    for source, destination in zip(sources, destinations):
        pages = source.index_select(0, read).to(destination.device)
        destination.index_copy_(0, written, pages)


def check_page_moves(
    copy: np.ndarray,
    zero: np.ndarray,
    num_blocks: int,
    swap_out: np.ndarray = NO_PAIRS,
    swap_in: np.ndarray = NO_PAIRS,
    num_host_blocks: int = 0,
) -> None:
    """ValueError or TypeError unless all pages are there, and each is written at most once.

    Sections of a plan, in the order of its application. A page of the host is not both written and
    read: which of the two comes first on a device is the business of its streams.
    """
    out = _integers(swap_out, "swap_out", (2,))
    copy = _integers(copy, "copy", (2,))
    zero = _integers(zero, "zero", ())
    back = _integers(swap_in, "swap_in", (2,))
    host = "host page"
    for name, what, ids, least, size in (
        ("swap_out", "reads page", out[:, 0], 1, num_blocks),
        ("swap_out", f"writes to {host}", out[:, 1], 1, num_host_blocks),
        ("copy", "reads page", copy[:, 0], 0, num_blocks),
        ("copy", "writes to page", copy[:, 1], 1, num_blocks),
        ("zero", "writes to page", zero, 1, num_blocks),
        ("swap_in", f"reads {host}", back[:, 0], 1, num_host_blocks),
        ("swap_in", "writes to page", back[:, 1], 1, num_blocks),
    ):
        wrong = np.flatnonzero((ids < least) | (ids >= size))
        if len(wrong):
            raise ValueError(
                f"{name}[{wrong[0]}] {what} {ids[wrong[0]]}: expected {least} to {size - 1}"
            )
    _check_once("copy, zero and swap_in write to page", copy[:, 1], zero, back[:, 1])
    _check_once(f"swap_out writes to {host}", out[:, 1])
    both = np.intersect1d(out[:, 1], back[:, 0])
    if len(both):
        raise ValueError(
            f"swap_out writes to {host} {both[0]}, and swap_in reads it: expected one of the two"
        )


def _check_once(what: str, *written: np.ndarray) -> None:
    ids, counts = np.unique(np.concatenate(written), return_counts=True)
    if len(ids) and counts.max() > 1:
        raise ValueError(f"{what} {ids[counts.argmax()]} twice: expected one write per page")


def _ids_on(device: torch.device, ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(ids, np.int64)).to(device)


def _integers(values: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """int64[n, *shape]; nothing is cut off."""
    array = np.asarray(values)
    if array.shape[1:] != shape or array.ndim != 1 + len(shape):
        wanted = ", ".join(["n", *map(str, shape)])
        raise ValueError(f"{name} has shape {list(array.shape)}: expected [{wanted}]")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array.astype(np.int64)


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more")


def _check_shared(pages: Sequence[torch.Tensor]) -> None:
    if len(pages) == 0:
        raise ValueError("pages is empty: expected one tensor per layer")
    for i, page in enumerate(pages):
        if page.dtype != torch.uint8 or page.ndim != 2 or not page.is_contiguous():
            raise ValueError(
                f"pages[{i}] is {page.dtype}{list(page.shape)}: "
                "expected a contiguous uint8[num_blocks, page_bytes]"
            )
        if page.shape != pages[0].shape or page.device != pages[0].device:
            raise ValueError(
                f"pages[{i}] is {list(page.shape)} on {page.device}, "
                f"pages[0] {list(pages[0].shape)} on {pages[0].device}: expected the same"
            )
