"""What the bytes of a page mean: where each head of each token lies in it, and in which dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from kvcache.worker.pages.pages import Pages
    from kvcache.worker.pages.storage import KVStorage


class PageContents(NamedTuple):
    """What the bytes of a page mean, as plain values that are equal where the meaning is.

    The bytes are those of all fragments, one after another in the order of `Pages.sizes`, as swaps and
    stores copy them. How they lie in memory makes no difference, nor how a backend indexes them.
    """

    storages: tuple[tuple, ...]  # one for each storage over the pages: the parts of its blocks
    cp_interleave: int | None = None  # tokens, as the block tables have it; None: not known

    @classmethod
    def of(
        cls, pages: Pages, storages: Sequence[KVStorage], cp_interleave: int | None = None
    ) -> PageContents:
        """Read off the views of storages over `pages`, or over parts of them.

        ValueError for a storage whose blocks do not lie in these pages.
        """
        return cls(tuple(_of_storage(pages, each) for each in storages), cp_interleave)


def _of_storage(pages: Pages, storage: KVStorage) -> tuple:
    """(name, dtype, [blocks of a page, tokens, heads, elements], digest of positions) of each part."""
    layers = range(storage.num_layers)
    parts = {
        "key": [storage.key_cache(layer) for layer in layers],
        "value": [storage.value_cache(layer) for layer in layers if storage.v_head_size],
    }
    if storage.has_scales:
        parts["scales"] = [storage.scale_cache(layer).unsqueeze(2) for layer in layers]
    found = []
    for name, views in parts.items():
        if not views:
            continue
        shape = (storage.blocks_per_page, *views[0].shape[1:])
        positions = np.stack([_positions(pages, view, shape[0]) for view in views])
        digest = hashlib.sha256(positions.astype("<i8").tobytes()).hexdigest()
        found.append((name, str(views[0].dtype), (len(views), *shape), digest))
    return tuple(found)


def _positions(pages: Pages, view: torch.Tensor, num_blocks: int) -> np.ndarray:
    """int64[blocks, tokens, heads]: the byte of a page at which each head of each token begins.

    view: [num_blocks, tokens, heads, elements], of which the last is contiguous.
    """
    counts = (num_blocks, *view.shape[1:3])
    steps = [stride * view.element_size() for stride in view.stride()[:3]]
    address = np.full(counts, view.data_ptr(), np.int64)
    for axis, (count, step) in enumerate(zip(counts, steps)):
        along = [1, 1, 1]
        along[axis] = count
        address += (np.arange(count) * step).reshape(along)
    begins = pages.base + pages.offsets  # of page 0
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
