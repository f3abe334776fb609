# SPDX-License-Identifier: Apache-2.0
"""Applies transfer plans to memory: computes region addresses and permutes pages. Needs torch."""

from __future__ import annotations

import numpy as np

from kvcache.checks import instance
from kvcache.placement import Placement
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import ReceivePermutation
from kvcache.transfer.receive import permute_received_blocks
from kvcache.transfer.states import StateDescription
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.storage import KVStorage


def region_addresses(
    description: CacheDescription | StateDescription, pages: Pages, rank: int | None = None
) -> np.ndarray:
    """Return the start address of each of a description's regions in one rank's pages.

    A plan's byte b in region r is located at `addresses[r] + b`. For a `StateDescription`, pages
    have one fragment per layer, and each fragment is large enough for a state.

    Args:
        description: The description.
        pages: The rank's pages.
        rank: The rank. None: all ranks have the same page layout.

    Returns:
        int64[r].

    Raises:
        ValueError: The pages differ from the description in layers, sizes, memory order or
            `page_stride`, or contain bytes that it does not describe.

    Example:
        >>> storage = KVStorage(9, 4, num_kv_heads=2, head_size=8, num_layers=2, backend="FLASHINFER")
        >>> cache = CacheDescription(engine_id="a", num_layers=2, total_num_kv_heads=2, head_size=8,
        ...     block_size=4, memory_order=storage.memory_order)
        >>> (region_addresses(cache, storage.pages) - storage.pages.base).tolist()
        [0, 2304]
    """
    instance(description, CacheDescription | StateDescription, "description")
    instance(pages, Pages, "pages")
    if isinstance(description, StateDescription):
        return _state_addresses(description, pages, rank)
    if rank is None:
        placed, strides = description.placement, description.region_strides
    else:
        stage = description.stage_of(rank)
        placed, strides = stage.placement, stage.region_strides
    if pages.num_layers != len(placed.regions):
        raise ValueError(
            f"pages have {pages.num_layers} layers, but the description has "
            f"{len(placed.regions)} per rank: expected equal numbers of layers"
        )
    found: dict[int, int] = {}
    for layer in range(len(placed.regions)):
        for (region, offset, _), (address, stride) in _matched(placed, strides, pages, layer):
            wanted = int(strides[region])
            if found.setdefault(region, address - offset) != address - offset or stride != wanted:
                raise ValueError(
                    f"layer {layer} has a fragment at byte {address - pages.base}, in pages {stride} "
                    f"bytes apart: expected pages {wanted} bytes apart, in memory_order "
                    f"{description.memory_order}"
                )
    return np.array([found[number] for number in range(len(found))], np.int64)


def permute_pages(
    storage: KVStorage, pages: np.ndarray, permutation: ReceivePermutation | None
) -> None:
    """Permute received pages into the local order, for K and V of all layers.

    Args:
        storage: The storage.
        pages: int[groups, pages per group]. Indices of the pages.
        permutation: Permutation of the transfer plan. None: the pages are not changed.

    Raises:
        TypeError: The pages are not integers.
        ValueError: See `permute_received_blocks`.
    """
    instance(storage, KVStorage, "storage")
    if permutation is None:
        return
    instance(permutation, ReceivePermutation, "permutation")
    layers = range(storage.num_layers)
    keys = [storage.key_cache(layer) for layer in layers]
    values = [storage.value_cache(layer) for layer in layers if storage.v_head_size]
    if keys[0].stride() == (values or keys)[0].stride() and storage.v_head_size in (
        0,
        storage.head_size,
    ):
        keys, values = keys + values, []
    for caches in (keys, values):
        if caches:
            permute_received_blocks(
                caches,
                pages,
                remote_block_size=permutation.remote_block_size,
                remote_layout=permutation.remote_layout,
            )


def _state_addresses(description: StateDescription, pages: Pages, rank: int | None) -> np.ndarray:
    if rank is None and len(set(description.pipeline_stages)) > 1:
        raise ValueError(f"stages of engine {description.engine_id!r} differ: pass a rank")
    pp_rank = description.coordinates(rank or 0).pp_rank
    num_layers = description.pipeline_stages[pp_rank].num_layers
    least, stride = description.state_bytes(rank or 0), description.stride_of(pp_rank)
    for layer in range(max(num_layers, pages.num_layers)):
        own = np.flatnonzero(pages.layers == layer)
        found = [(int(pages.sizes[i]), int(pages.strides[i])) for i in own]
        if layer >= num_layers or len(own) != 1 or found[0][0] < least or found[0][1] != stride:
            raise ValueError(
                f"layer {layer} of the pages has fragments (bytes, bytes from page to page) {found}: "
                f"expected {num_layers} layers of one fragment, {least} bytes or more, {stride} apart"
            )
    return pages.base + pages.offsets


def _matched(
    placed: Placement, strides: np.ndarray, pages: Pages, layer: int
) -> list[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Return a layer's runs (region, offset, length), each with its (address, page stride in bytes).

    A layer's K, V and scales may be separate fragments of a page, or one fragment if they are
    contiguous.
    """
    own = np.flatnonzero(pages.layers == layer)
    sizes = pages.sizes[own].tolist()
    at = [(pages.base + int(pages.offsets[i]), int(pages.strides[i])) for i in own]
    together = placed.layer_runs(layer).tolist()
    num_parts = len(placed.head_bytes)
    apart = [run for p in range(num_parts) for run in placed.runs(layer, p).tolist()]
    candidates = [together, apart]
    if placed.scale_bytes_per_token:
        scales = placed.runs(layer, num_parts - 1).tolist()
        candidates.append(placed.layer_runs(layer, num_parts - 1).tolist() + scales)
    for runs in candidates:
        if sizes == [length for _, _, length in runs]:
            return list(zip(map(tuple, runs), at))
    if len(own) == len(together) == 1 and sizes[0] == strides[together[0][0]]:  # padded page
        return [(tuple(together[0]), at[0])]
    raise ValueError(
        f"layer {layer} of the pages has fragments of {sizes} bytes: expected "
        f"{[length for _, _, length in apart]}, as described"
    )
