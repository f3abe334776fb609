# SPDX-License-Identifier: Apache-2.0
"""Defines where the bytes of a page are stored. No other module computes these positions.

Dimensions are named by role: "kv" (K or V), "block", "token" (within a block), "head", "element" (within
a head), and "layer" if the layers of a block are packed together. A *memory order* lists these roles,
outermost first. `place_elements` converts an order to offsets and strides. Storages, descriptions
for other engines, transfers and block copies all derive positions from these offsets and strides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcache.checks import listed, shown

ROLES = ("kv", "block", "token", "head", "element")
NEEDED_ROLES = {"block", "token", "element"}


@dataclass(frozen=True)
class Placement:
    """The position of each element of a page, for a given memory order and sizes.

    Created by `place_elements`. A page consists of one byte range in each region. All arrays are
    read-only, and offsets, strides and sizes are in bytes (int64). Index p is 0 for K and, if the cache
    has V, 1 for V. Element e of a token's head is in region `regions[layer, p] + head * head_regions`,
    `kv_offsets[layer, p] + token * token_strides[p] + head * head_strides[p] + e * element_bytes`
    bytes after the start of the page.
    """

    regions: np.ndarray  # [num_layers, p]
    kv_offsets: np.ndarray  # [num_layers, p]
    token_strides: np.ndarray  # [p]
    head_strides: np.ndarray  # [p]
    head_bytes: np.ndarray  # [p]: bytes of one head of one token
    region_bytes: np.ndarray  # [r]: bytes per page
    scale_regions: np.ndarray  # [num_layers]: region of the layer's scales
    scale_offsets: np.ndarray  # [num_layers]: offset of the layer's scales in that region
    token_count: int  # tokens per page
    head_count: int
    scale_bytes_per_token: int
    head_regions: int = 0  # regions between consecutive heads; 0: all heads share one region

    @functools.cached_property
    def is_contiguous(self) -> bool:
        """Whether the K and the V of a layer are each contiguous within a page."""
        if self.head_regions:
            return False
        counts = ((self.token_strides, self.token_count), (self.head_strides, self.head_count))
        volume = self.head_bytes * (self.token_count * self.head_count)
        extent = self.head_bytes + sum(stride * (count - 1) for stride, count in counts)
        return bool((extent == volume).all())

    @property
    def has_kv_together(self) -> bool:
        """Whether a layer's K and V in a page are in the same region."""
        return bool((self.regions == self.regions[:, :1]).all())

    @functools.cached_property
    def has_equal_layers(self) -> bool:
        """Whether V is in the same region as K and at the same distance from K in all layers."""
        behind = self.kv_offsets - self.kv_offsets[:, :1]
        return self.has_kv_together and bool((behind == behind[0]).all())

    def with_scales_as_part(self) -> Placement:
        """Return the placement with scales as an additional index p, divided among the heads."""
        size = self.scale_bytes_per_token // self.head_count

        def appended(array: np.ndarray, value: object) -> np.ndarray:
            return _read_only(np.concatenate([array, np.atleast_1d(value)]))

        def beside(array: np.ndarray, column: np.ndarray) -> np.ndarray:
            return _read_only(np.concatenate([array, column[:, None]], axis=1))

        return replace(
            self,
            regions=beside(self.regions, self.scale_regions),
            kv_offsets=beside(self.kv_offsets, self.scale_offsets),
            token_strides=appended(self.token_strides, self.scale_bytes_per_token),
            head_strides=appended(self.head_strides, size),
            head_bytes=appended(self.head_bytes, size),
        )

    def runs(self, layer: int, p: int) -> np.ndarray:
        """Return the merged byte ranges of a layer's K or V: int64[n, 3], (region, offset, length)."""
        token, head = np.indices((self.token_count, self.head_count)).reshape(2, -1)
        begins = token * self.token_strides[p] + head * self.head_strides[p]
        table = np.empty((len(begins), 3), np.int64)
        table[:, 0] = self.regions[layer, p] + head * self.head_regions
        table[:, 1] = begins + self.kv_offsets[layer, p]
        table[:, 2] = self.head_bytes[p]
        return merged_runs(table[np.lexsort((table[:, 1], table[:, 0]))])

    def of_head(self, head: int) -> Placement:
        """Return the placement of one head, as if the cache had only this head."""
        return replace(
            self,
            regions=_read_only(self.regions + head * self.head_regions),
            kv_offsets=_read_only(self.kv_offsets + head * self.head_strides),
            head_count=1,
            head_regions=0,
        )

    def layer_runs(self, layer: int, num_parts: int | None = None) -> np.ndarray:
        """Return a layer's byte ranges, as `runs` does, for the first `num_parts` indices p."""
        table = np.concatenate(
            [self.runs(layer, p) for p in range(num_parts or len(self.head_bytes))]
        )
        return merged_runs(table[np.lexsort((table[:, 1], table[:, 0]))])


def merged_runs(table: np.ndarray) -> np.ndarray:
    """Merge adjacent byte ranges within a region. `table`: int64[n, 3], in ascending order."""
    begins = np.ones(len(table), bool)
    ends = table[:-1, 1] + table[:-1, 2]
    begins[1:] = (table[1:, 0] != table[:-1, 0]) | (table[1:, 1] != ends)
    first = np.flatnonzero(begins)
    merged = table[first]
    merged[:, 2] = np.add.reduceat(table[:, 2], first)
    return merged


def checked_roles(order: Sequence[str], name: str) -> tuple[str, ...]:
    """Return a sequence of dimension roles as a tuple. Raises TypeError or ValueError."""
    roles = tuple(listed(order, name, f"a sequence of {', '.join(ROLES)}"))
    if isinstance(order, str) or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"{name} is {shown(order)}: expected a sequence of {', '.join(ROLES)}")
    return roles


def check_memory_order(order: Sequence[str], name: str = "memory_order") -> tuple[str, ...]:
    """Validate a memory order for pages that consist of blocks, and return it as a tuple.

    "block", "token" and "element" are required, and "element" must be last. Only "layer", "kv" and "head"
    may precede "block". Without "layer", each layer is stored separately. Without "kv", a head's V
    follows its K. Without "head", there is a single head.

    Raises:
        ValueError: The order violates these rules.
    """
    order = checked_roles(order, name)
    known = {"layer", *ROLES}
    if len(set(order)) != len(order) or not NEEDED_ROLES <= set(order) <= known:
        raise ValueError(
            f"{name} is {order}: expected some of layer, {', '.join(ROLES)}, each at most once, "
            f"including {', '.join(sorted(NEEDED_ROLES))}"
        )
    if order[-1] != "element" or not set(order[: order.index("block")]) <= {"layer", "kv", "head"}:
        raise ValueError(
            f"{name} is {order}: expected element last, and only layer, kv and head before block"
        )
    return order


def full_memory_order(order: Sequence[str]) -> tuple[str, ...]:
    """Return a memory order with all six roles, the omitted ones at their implied positions."""
    full = list(order)
    if "layer" not in full:
        full.insert(0, "layer")
    if "head" not in full:
        full.insert(len(full) - 1, "head")
    if "kv" not in full:
        full.insert(len(full) - 1, "kv")
    return tuple(full)


def layout_of(order: Sequence[str]) -> str:
    """Return "NHD" if tokens precede heads in memory, and "HND" otherwise."""
    full = full_memory_order(order)
    return "NHD" if full.index("token") < full.index("head") else "HND"


def place_elements(
    order: Sequence[str],
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    element_bytes: int,
    scale_bytes_per_token: int = 0,
) -> Placement:
    """Place the elements of a page in as few regions as the order allows.

    Each combination of indices of the roles before "block" gets a separate region. The scales of a
    layer (all heads of a token together) follow the layer's K and V in the page. If "kv" precedes
    "block", the scales are in a separate region.

    Args:
        order: The memory order.
        num_layers: Number of layers.
        block_size: Tokens per block.
        num_kv_heads: KV heads on this rank.
        head_size: Elements of K per head.
        v_head_size: Elements of V per head.
        element_bytes: Bytes per element.
        scale_bytes_per_token: Bytes of a token's scales, for all heads together.

    Raises:
        ValueError: The order is invalid, it lacks "head" although there are several heads, or there are
            scales although a layer's K and V in a page are in separate regions.

    Example:
        >>> sizes = dict(num_layers=2, block_size=4, num_kv_heads=2, head_size=8, v_head_size=8)
        >>> from kvcache.layouts import backend
        >>> placed = place_elements(backend("FLASHINFER").memory_order("HND"), **sizes, element_bytes=2)
        >>> placed.kv_offsets.tolist(), placed.token_strides.tolist(), placed.head_strides.tolist()
        ([[0, 128], [0, 128]], [16, 16], [64, 64])
    """
    order = check_memory_order(order)
    if "head" not in order and num_kv_heads != 1:
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}: expected 1 with the memory order {order}, "
            "which has no heads"
        )
    full = full_memory_order(order)
    at_block = full.index("block")
    outer, inner = full[:at_block], full[at_block + 1 : -1]
    sizes = [head_size, v_head_size] if v_head_size else [head_size]
    head_bytes = np.array(sizes, np.int64) * element_bytes
    counts = {"layer": num_layers, "token": block_size, "head": num_kv_heads}
    strides = {role: np.zeros_like(head_bytes) for role in counts}
    kv_starts, scale_start = np.zeros_like(head_bytes), 0
    scale_bytes = scale_bytes_per_token * block_size
    volume = head_bytes.copy()  # bytes of the inner dimensions, for K and for V
    kv_inside = "kv" in inner
    if scale_bytes and "head" in outer:
        raise ValueError(
            f"scale_bytes_per_token is {scale_bytes_per_token}: expected 0 with the memory order "
            f"{order}, in which the heads of a token are in separate regions"
        )
    for n, role in reversed(list(enumerate(inner))):
        if role == "kv":
            kv_starts = np.cumsum(volume) - volume
            volume = np.full_like(volume, volume.sum())
        elif role == "layer" and scale_bytes:
            if n > 0 or not kv_inside:
                raise ValueError(
                    f"scale_bytes_per_token is {scale_bytes_per_token}: expected 0 with the memory "
                    f"order {order}, in which K and V of a layer's page are not contiguous"
                )
            scale_start, volume = int(volume[0]), volume + scale_bytes
            strides[role], volume = volume, volume * num_layers
        else:
            strides[role], volume = volume, volume * counts[role]
    scales_apart = bool(scale_bytes) and not kv_inside
    if scale_bytes and kv_inside and "layer" in outer:
        scale_start, volume = int(volume[0]), volume + scale_bytes
    layer, p = np.indices((num_layers, len(sizes)))
    # One region per combination of indices of the roles before "block". The last index varies fastest.
    outer_counts = [{**counts, "kv": len(sizes)}[role] for role in outer]
    region_of = np.arange(math.prod(outer_counts)).reshape(outer_counts)
    step = {role: region_of.strides[n] // region_of.itemsize for n, role in enumerate(outer)}
    regions = layer * step.get("layer", 0) + p * step.get("kv", 0)
    which_kv = np.zeros(len(region_of.ravel()), np.int64)
    if not kv_inside:
        which_kv = region_of.ravel() // step["kv"] % len(sizes)
    region_bytes = volume[which_kv].tolist()
    offsets = layer * strides["layer"] + kv_starts
    if scales_apart:
        scale_regions = len(region_bytes) + np.arange(num_layers)
        region_bytes = [*region_bytes, *[scale_bytes] * num_layers]
        scale_offsets = np.zeros(num_layers, np.int64)
    else:
        scale_regions = regions[:, 0].copy()
        scale_offsets = np.arange(num_layers) * strides["layer"][0] + scale_start
    arrays = (
        regions,
        offsets,
        strides["token"],
        strides["head"],
        head_bytes,
        np.array(region_bytes, np.int64),
        scale_regions,
        scale_offsets,
    )
    return Placement(
        *(_read_only(array) for array in arrays),
        block_size,
        num_kv_heads,
        scale_bytes_per_token,
        step.get("head", 0) if num_kv_heads > 1 else 0,
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array, np.int64)
    array.setflags(write=False)
    return array
