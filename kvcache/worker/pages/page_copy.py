# SPDX-License-Identifier: Apache-2.0
"""Copies pages within a pool or between two pools."""

from __future__ import annotations

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import MAX_INT32, check_range, integer_array, integers
from kvcache.worker.pages.memory import PageMemory


class PageCopy:
    """Copies pages within a pool or between two pools. The region table for `ops.copy_blocks` is
    built once.

    Regions that are contiguous on both sides are merged.
    """

    def __init__(self, source: PageMemory, destination: PageMemory) -> None:
        if len(source.sizes) != len(destination.sizes):
            raise ValueError(
                f"the source's pages have {len(source.sizes)} fragments in {source.num_layers} "
                f"layers, but the destination's have {len(destination.sizes)} in "
                f"{destination.num_layers}: expected equal numbers of fragments"
            )
        unequal = np.flatnonzero(
            (source.sizes != destination.sizes) | (source.layers != destination.layers)
        )
        if len(unequal):
            at = unequal[0]
            raise ValueError(
                f"fragment {at} has {source.sizes[at]} bytes of layer {source.layers[at]} in the "
                f"source, but {destination.sizes[at]} bytes of layer {destination.layers[at]} in the "
                "destination: expected equal sizes and layers"
            )
        _check_formats(source, destination)
        self.source, self.destination = source, destination
        self._within = source is destination or _share_memory(source, destination)
        table = _merged(source, destination)
        self.regions = torch.from_numpy(table)
        # Whether consecutive pages are contiguous on both sides.
        self.is_dense = bool(((table[:, 1] == table[:, 4]) & (table[:, 3] == table[:, 4])).all())
        on_host = source if source.device.type == "cpu" else destination
        self._pages_per_run = on_host.pages_per_chunk
        # Host memory that others pinned is known to be pinned once a kernel has copied it. This object
        # keeps the memory alive, so no other memory can take over its addresses.
        is_asked = source.device.type != destination.device.type and self._pages_per_run == 0
        self._must_locate, self._is_located = is_asked, False
        self._others = destination.others if self._within else source.others + destination.others

    def copy(
        self,
        pairs: np.ndarray | torch.Tensor,
        *,
        engine: int = ops.KERNEL,
        num_thread_blocks: int = 0,
    ) -> None:
        """Copy pages in all layers. See `ops.copy_blocks`."""
        pages_per_run = ops.LOCATED if self._is_located else self._pages_per_run
        source, destination = self.source, self.destination
        ops.copy_blocks(
            None if self._within else source.memory,
            destination.memory,
            self.regions,
            pairs_tensor(pairs),
            source.num_blocks,
            destination.num_blocks,
            engine,
            pages_per_run,
            num_thread_blocks,
            self._others,
        )
        if self._must_locate and engine == ops.KERNEL and len(pairs) > 0:
            self._is_located = True

    def zero(self, ids: np.ndarray) -> None:
        """Zero whole pages in the destination. `ids`: int32[n]."""
        ids = integers(ids, "ids", ())
        check_range("ids", "is page", ids, 0, self.destination.num_blocks)
        self.copy(np.stack([np.full(len(ids), -1), ids], axis=1))


def pairs_tensor(pairs: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Convert page pairs, if they are no tensor, to int32[n, 2]. Raises ValueError or TypeError."""
    if isinstance(pairs, torch.Tensor):
        return pairs
    array = integer_array(pairs, "pairs")
    if array.ndim != 2 or array.shape[1] != 2:
        if array.size:
            raise ValueError(f"pairs has shape {list(array.shape)}: expected [n, 2]")
        array = array.reshape(0, 2)
    if array.dtype != np.int32 and array.size:
        are_wrong = (array < -MAX_INT32 - 1) | (array > MAX_INT32)
        if np.count_nonzero(are_wrong):
            i, j = np.argwhere(are_wrong)[0]
            raise ValueError(f"pairs[{i}] has page {array[i, j]}: expected int32")
    # Copy the array, because torch aborts the process if memory runs out within `from_numpy`.
    tensor = torch.empty(array.shape, dtype=torch.int32, device="cpu")
    tensor.numpy()[:] = array
    return tensor


def _merged(source: PageMemory, destination: PageMemory) -> np.ndarray:
    """Return the op's table of merged regions, int64[r, 5]."""
    table = np.stack(
        [source.offsets, source.strides, destination.offsets, destination.strides, source.sizes], 1
    )
    joined = (
        (table[:-1, 0] + table[:-1, 4] == table[1:, 0])
        & (table[:-1, 2] + table[:-1, 4] == table[1:, 2])
        & (table[:-1, 1] == table[1:, 1])
        & (table[:-1, 3] == table[1:, 3])
    )
    first = np.flatnonzero(np.concatenate([np.ones(min(len(table), 1), bool), ~joined]))
    merged = table[first]
    if len(first):
        merged[:, 4] = np.add.reduceat(table[:, 4], first)
    return merged


def _check_formats(source: PageMemory, destination: PageMemory) -> None:
    """Raise ValueError if both sides' block formats are known but differ."""
    mine, other = source.formats, destination.formats
    if mine is None or other is None or mine[0] != other[0]:
        return
    for i, (one, two) in enumerate(zip(mine[1:], other[1:])):
        if one != two:
            raise ValueError(
                f"tensor {i} has blocks of (dtype, shape, dimensions from the innermost) {one} in "
                f"the source, but {two} in the destination: expected identical formats"
            )


def _share_memory(source: PageMemory, destination: PageMemory) -> bool:
    """Return whether both sides are the same pages. Raises ValueError for other overlaps."""
    if source.device != destination.device:
        return False
    spans = [_span(pages) for pages in (source, destination)]
    if spans[0][0] >= spans[1][1] or spans[1][0] >= spans[0][1]:
        return False
    same = (source.offsets + source.base == destination.offsets + destination.base).all()
    if same and (source.strides == destination.strides).all():
        return True
    if len(source.sizes) and _meet(source, destination):
        raise ValueError(
            "source and destination share memory: expected the same pages, or pages that share no memory"
        )
    return False


def _span(pages: PageMemory) -> tuple[int, int]:
    """Return the range of addresses, [begin, end), that covers all regions."""
    if len(pages.sizes) == 0 or pages.page_bytes == 0:
        return pages.base, pages.base
    ends = pages.offsets + (pages.num_blocks - 1) * pages.strides + pages.sizes
    return pages.base + int(pages.offsets.min()), pages.base + int(ends.max())


def _meet(source: PageMemory, destination: PageMemory) -> bool:
    """Return whether the address ranges of any two regions of different sides overlap."""
    starts = source.base + source.offsets
    ends = starts + (source.num_blocks - 1) * source.strides + source.sizes
    others = destination.base + destination.offsets
    other_ends = others + (destination.num_blocks - 1) * destination.strides + destination.sizes
    order = np.argsort(others)
    reach = np.maximum.accumulate(other_ends[order])  # maximum end of the regions so far
    before = np.searchsorted(others[order], ends) - 1  # the last region that starts before the end
    return bool((reach[before] > starts)[before >= 0].any())
