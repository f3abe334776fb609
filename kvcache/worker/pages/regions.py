# SPDX-License-Identifier: Apache-2.0
"""Computes a tensor's regions, that is, the positions of all contiguous fragments of its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

# A region: (address of block 0's fragment, block stride in bytes, bytes per fragment).
Region = tuple[int, int, int]
# Maximum number of fragments per block. A higher number suggests that `block_dim` is wrong.
_MAX_FRAGMENTS = 4096


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise TypeError or ValueError unless a tensor has memory that directly holds its elements."""
    if tensor.is_meta:
        raise TypeError(f"{name} is on {tensor.device}: expected a device with memory")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name} is a lazily conjugated or negated view: expected resolve_conj() or resolve_neg() "
            "of it"
        )


def regions_of(tensor: torch.Tensor, block_dim: int, name: str) -> list[Region]:
    """Return a tensor's regions in memory order. Raises ValueError if elements share memory."""
    check_memory(tensor, name)
    item = tensor.element_size()
    block_dim %= tensor.ndim
    if math.prod(tensor.shape) == 0:
        return []
    # The stride of a dimension with size 1 is meaningless.
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
    blocks = (tensor.stride(block_dim), tensor.shape[block_dim])
    extent = size
    for stride, count in sorted([*outer, *([blocks] if blocks[1] > 1 else [])]):
        if stride < extent:
            raise ValueError(
                f"{name} has elements that share memory (stride {stride}): expected none"
            )
        extent += stride * (count - 1)
    if math.prod(count for _, count in outer) > _MAX_FRAGMENTS:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}: expected blocks "
            f"in dimension {block_dim} of at most {_MAX_FRAGMENTS} fragments each"
        )
    offsets = np.zeros(1, np.int64)
    for stride, count in reversed(outer):
        offsets = (offsets[:, None] + np.arange(count) * stride).ravel()
    step = blocks[0] * item if blocks[1] > 1 else size * item
    return [(tensor.data_ptr() + int(at) * item, step, size * item) for at in offsets]


def matched_regions(
    source: torch.Tensor, destination: torch.Tensor, block_dim: int, name: str
) -> tuple[list[Region], list[Region]]:
    """Return the regions of two tensors whose shapes differ only in the number of blocks.

    Corresponding regions hold the same elements. Each fragment extends as far as elements are
    contiguous in both tensors. Raises ValueError if there are too many fragments.
    """
    both = (source, destination)
    item = source.element_size()
    block_dim %= source.ndim
    if source.numel() == 0 or destination.numel() == 0:
        return [], []
    dims = [d for d in range(source.ndim) if d != block_dim and source.shape[d] > 1]
    dims.sort(key=lambda d: (destination.stride(d), source.stride(d)))
    size = 1
    while dims and all(tensor.stride(dims[0]) == size for tensor in both):
        size *= source.shape[dims.pop(0)]
    if math.prod(source.shape[d] for d in dims) > _MAX_FRAGMENTS:
        raise ValueError(
            f"{name} has strides {source.stride()} and {destination.stride()}: expected blocks in "
            f"dimension {block_dim} that share at most {_MAX_FRAGMENTS} fragments"
        )
    found = []
    for tensor in both:
        offsets = np.zeros(1, np.int64)
        for d in reversed(dims):
            offsets = (offsets[:, None] + np.arange(tensor.shape[d]) * tensor.stride(d)).ravel()
        step = tensor.stride(block_dim) * item if tensor.shape[block_dim] > 1 else size * item
        found.append([(tensor.data_ptr() + int(at) * item, step, size * item) for at in offsets])
    return found[0], found[1]


def check_apart(regions: np.ndarray, layers: Sequence[int], num_blocks: int) -> None:
    """Raise ValueError if any two regions share memory. `regions`: int64[r, 3] from `regions_of`."""
    ends = regions[:, 0] + (num_blocks - 1) * regions[:, 1] + regions[:, 2]
    order = np.argsort(regions[:, 0], kind="stable")
    # If the address ranges of regions overlap, as in packed pages, the regions must be disjoint
    # within each page.
    together = [int(order[0])]
    reach = ends[order[0]]
    for i in map(int, order[1:]):
        if regions[i, 0] >= reach:
            _check_together(regions, layers, together)
            together = []
        together.append(i)
        reach = max(reach, ends[i])
    _check_together(regions, layers, together)


def _check_together(regions: np.ndarray, layers: Sequence[int], which: list[int]) -> None:
    if len(which) == 1:
        return
    first = which[0]
    step = int(regions[first, 1])
    offsets = sorted(((int(regions[i, 0]) - int(regions[first, 0])) % step, i) for i in which)
    offsets.append((offsets[0][0] + step, offsets[0][1]))
    for (at, i), (following, j) in pairwise(offsets):
        if regions[j, 1] != step or at + regions[i, 2] > following:
            raise ValueError(
                f"layer {layers[i]} and layer {layers[j]} share memory: expected memory of their own"
            )


def format_of(tensor: torch.Tensor, block_dim: int) -> tuple:
    """Return a block's format: its dtype, its shape, and the order of its dimensions in memory."""
    block_dim %= tensor.ndim
    dims = [d for d in range(tensor.ndim) if d != block_dim]
    # Dimensions with size 1 are omitted from the order.
    order = sorted((d for d in dims if tensor.shape[d] > 1), key=tensor.stride)
    indices = [dims.index(d) for d in order]
    return (str(tensor.dtype), tuple(tensor.shape[d] for d in dims), tuple(indices))
