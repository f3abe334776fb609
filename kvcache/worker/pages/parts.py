# SPDX-License-Identifier: Apache-2.0
"""Locates the heads of all tokens in a page, based on the views of the storages over the page."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache.specs import GroupSpec
from kvcache.worker.pages.memory import PageContents, PageMemory


class BlockParts(NamedTuple):
    """A storage's blocks per page, and its caches by part ("key", "value" or "scales")."""

    blocks_per_page: int
    # For each part, one tensor per layer: [num_blocks, block_size, num_kv_heads, elements].
    views: dict[str, list[torch.Tensor]]


def contents_of(
    pages: PageMemory,
    storages: Sequence[BlockParts],
    cp_interleave: int | None = None,
    groups: Sequence[GroupSpec] = (),
) -> PageContents:
    """Return a description of the contents of `pages`, given the parts of each storage over these
    pages.

    Raises ValueError if a storage's blocks are not in these pages.
    """
    described = tuple(_described(pages, each) for each in storages)
    return PageContents(described, cp_interleave, tuple(group.summary for group in groups))


def _described(pages: PageMemory, storage: BlockParts) -> tuple:
    """Return (name, dtype, [blocks per page, tokens, heads, elements], digest) for each part."""
    found = []
    for name, views in storage.views.items():
        shape = (storage.blocks_per_page, *views[0].shape[1:])
        positions = np.stack([_positions(pages, view, shape[0]) for view in views])
        digest = hashlib.sha256(positions.astype("<i8").tobytes()).hexdigest()
        found.append((name, str(views[0].dtype), (len(views), *shape), digest))
    return tuple(found)


def _positions(pages: PageMemory, view: torch.Tensor, num_blocks: int) -> np.ndarray:
    """Return the byte offset of each token's heads within a page, int64[blocks, tokens, heads].

    `view`: [num_blocks, tokens, heads, elements] with contiguous elements.
    """
    counts = (num_blocks, *view.shape[1:3])
    steps = [stride * view.element_size() for stride in view.stride()[:3]]
    address = np.full(counts, view.data_ptr(), np.int64)
    for axis, (count, step) in enumerate(zip(counts, steps)):
        along = [1, 1, 1]
        along[axis] = count
        address += (np.arange(count) * step).reshape(along)
    begins = pages.base + pages.offsets  # start of each region in page 0
    order = np.argsort(begins, kind="stable")
    order = order[pages.sizes[order] > 0]
    region = order[np.maximum(np.searchsorted(begins[order], address, "right") - 1, 0)]
    within = address - begins[region]
    last = within + view.shape[3] * view.element_size()
    if (within < 0).any() or (last > pages.sizes[region]).any():
        raise ValueError(
            f"contents has a storage with blocks of {list(counts)} (blocks of a page, tokens, heads): "
            "expected storages over these pages"
        )
    return (np.cumsum(pages.sizes) - pages.sizes)[region] + within
