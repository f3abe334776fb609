"""Tensors as regions: where each contiguous piece that a tensor has of a block lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

Region = tuple[
    int, int, int
]  # address of block 0's piece, bytes from block to block, bytes of a piece
_MOST_PIECES = 4096  # of a block; more are a dimension mistaken for that of blocks


def regions_of(tensor: torch.Tensor, block_dim: int, name: str) -> list[Region]:
    """The pieces of a block, in the order of memory. ValueError where elements share memory."""
    item = tensor.element_size()
    block_dim %= tensor.ndim
    if math.prod(tensor.shape) == 0:
        return []
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
    blocks = (tensor.stride(block_dim), tensor.shape[block_dim])
    extent = size
    for stride, count in sorted([*outer, *([blocks] if blocks[1] > 1 else [])]):
        if stride < extent:
            raise ValueError(
                f"{name} has elements that share memory (stride {stride}): expected none"
            )
        extent += stride * (count - 1)
    if math.prod(count for _, count in outer) > _MOST_PIECES:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}: expected blocks "
            f"in dimension {block_dim} of at most {_MOST_PIECES} pieces each"
        )
    pieces = np.zeros(1, np.int64)
    for stride, count in reversed(outer):
        pieces = (pieces[:, None] + np.arange(count) * stride).ravel()
    step = blocks[0] * item if blocks[1] > 1 else size * item
    return [(tensor.data_ptr() + int(at) * item, step, size * item) for at in pieces]


def check_apart(regions: np.ndarray, layers: Sequence[int], num_blocks: int) -> None:
    """ValueError where two regions share memory; int64[r, 3] as `regions_of` gives them."""
    ends = regions[:, 0] + (num_blocks - 1) * regions[:, 1] + regions[:, 2]
    order = np.argsort(regions[:, 0], kind="stable")
    # Regions whose spans meet, as those of a packed page do, must lie beside each other in every page.
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
    places = sorted(((int(regions[i, 0]) - int(regions[first, 0])) % step, i) for i in which)
    places.append((places[0][0] + step, places[0][1]))
    for (at, i), (following, j) in pairwise(places):
        if regions[j, 1] != step or at + regions[i, 2] > following:
            raise ValueError(
                f"layer {layers[i]} and layer {layers[j]} share memory: expected memory of their own"
            )


def format_of(tensor: torch.Tensor, block_dim: int) -> tuple:
    """What a block is: dtype, shape, and the order of its dimensions in memory."""
    block_dim %= tensor.ndim
    dims = [d for d in range(tensor.ndim) if d != block_dim]
    # Those of one element have no place in the order.
    order = sorted((d for d in dims if tensor.shape[d] > 1), key=tensor.stride)
    places = [dims.index(d) for d in order]
    return (str(tensor.dtype), tuple(tensor.shape[d] for d in dims), tuple(places))
