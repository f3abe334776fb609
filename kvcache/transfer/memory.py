"""A transfer plan and the memory that it speaks of. Needs torch."""

from __future__ import annotations

import numpy as np

from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import ReceivePermutation
from kvcache.transfer.receive import permute_received_blocks
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.storage import KVStorage


def region_addresses(description: CacheDescription, pages: Pages) -> np.ndarray:
    """int64[r]: where each of a description's regions begins, in the pages of one of its ranks.

    What a plan calls byte b of region r is at `addresses[r] + b`. ValueError where the pages are not
    laid out as described: other layers, bytes or packing, pages at another distance (`page_stride`), or
    bytes that a description has no word for, such as scales.

    >>> storage = KVStorage(9, 4, num_kv_heads=2, head_size=8, num_layers=2, blocks_first=True)
    >>> cache = CacheDescription(engine_id="a", num_layers=2, total_num_kv_heads=2, head_size=8,
    ...     block_size=4, packing="blocks_first")
    >>> (region_addresses(cache, storage.pages) - storage.pages.base).tolist()
    [0, 2304]
    """
    region, offset = description.parts
    if pages.num_layers != len(region):
        raise ValueError(
            f"pages have {pages.num_layers} layers, the description {len(region)} per rank: "
            "expected the same"
        )
    found: dict[int, int] = {}
    for layer in range(len(region)):
        places = _places(description, pages, layer)
        for part, (address, stride) in enumerate(places):
            number = int(region[layer, part])
            begin = address - int(offset[layer, part])
            wanted = int(description.region_strides[number])
            if found.setdefault(number, begin) != begin or stride != wanted:
                raise ValueError(
                    f"{'KV'[part]} of layer {layer} begins at byte {address - pages.base}, pages "
                    f"{stride} bytes apart: expected {wanted}, and packing {description.packing!r}"
                )
    return np.array([found[number] for number in range(len(found))], np.int64)


def permute_pages(
    storage: KVStorage, pages: np.ndarray, permutation: ReceivePermutation | None
) -> None:
    """What a plan says is to be done to the pages that have arrived: int[groups, pages per group].

    All layers of the storage, K and V; None: nothing. ValueError as `permute_received_blocks`.
    """
    if permutation is None:
        return
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


def _places(description: CacheDescription, pages: Pages, layer: int) -> list[tuple[int, int]]:
    """(address, bytes from page to page) of K and V of a layer; pages may hold both in one piece."""
    held = [
        (pages.base + int(pages.offsets[i]), int(pages.sizes[i]), int(pages.strides[i]))
        for i in np.flatnonzero(pages.layers == layer)
    ]
    sizes = description.part_bytes.tolist()
    whole = held[0][1] if len(held) == 1 else 0
    padded = description.page_stride is not None and whole == description.page_stride
    if len(held) == 1 and (whole == sum(sizes) or (padded and whole >= sum(sizes))):
        address, _, stride = held[0]
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        return [(address + begin, stride) for begin in begins]
    if [size for _, size, _ in held] != sizes:
        raise ValueError(
            f"layer {layer} of the pages has pieces of {[size for _, size, _ in held]} bytes: expected "
            f"{sizes}, as described"
        )
    return [(address, stride) for address, _, stride in held]
