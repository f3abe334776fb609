# SPDX-License-Identifier: Apache-2.0
"""Allocates memory for pages whose elements were placed by `kvcache.placement.place_elements`."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.placement import Placement
from kvcache.worker.pages.pages import ALIGNMENT, Pages


def region_starts(placed: Placement, num_blocks: int) -> np.ndarray:
    """Return the byte offsets of the regions of pages, and the end of the last one: int64[r + 1].

    If K and V are in separate regions, these two regions are contiguous, so they form one tensor.
    Each layer starts at a multiple of `ALIGNMENT`.
    """
    sizes = placed.region_bytes * num_blocks
    own = np.arange(len(sizes))
    own[placed.regions] = placed.regions[:, :1]  # first region of each layer
    own[placed.scale_regions] = placed.regions[:, 0]
    room = np.bincount(own, weights=sizes, minlength=len(sizes)).astype(np.int64)
    room = -(-room // ALIGNMENT) * ALIGNMENT
    first = np.cumsum(room) - room
    starts = first[own]
    for layer, kv in enumerate(placed.regions):
        if len(kv) > 1 and kv[0] != kv[1]:
            starts[kv[1]] = first[kv[0]] + sizes[kv[0]]
        scales = placed.scale_regions[layer]
        if scales not in kv:
            starts[scales] = first[kv[0]] + sizes[np.unique(kv)].sum()
    return np.append(starts, room.sum())


def placed_pages(
    placed: Placement, num_blocks: int, starts: np.ndarray, device: torch.device | str
) -> Pages:
    """Allocate pages. Only page 0, the null block, is initialized (to zeros).

    A layer's K, V and scales form one fragment each if each of them is contiguous in a page.
    Otherwise, the layer's fragments are the contiguous runs that contain K and V together.
    """
    runs, layers = [], []
    for layer in range(len(placed.regions)):
        kv = range(len(placed.head_bytes))
        if placed.is_contiguous:
            found = np.concatenate([placed.runs(layer, p) for p in kv])
        else:
            found = placed.layer_runs(layer)
        if placed.scale_bytes_per_token:
            scales = placed.scale_regions[layer], placed.scale_offsets[layer]
            size = placed.scale_bytes_per_token * placed.token_count
            found = np.concatenate([found, [[*scales, size]]])
        runs.append(found)
        layers += [layer] * len(found)
    table = np.concatenate(runs)
    memory = torch.empty(int(starts[-1]), dtype=torch.uint8, device=device)
    offsets, strides = starts[table[:, 0]] + table[:, 1], placed.region_bytes[table[:, 0]]
    pages = Pages(memory, num_blocks, offsets, strides, table[:, 2], layers)
    pages.zero(np.zeros(1, np.int32))
    return pages
