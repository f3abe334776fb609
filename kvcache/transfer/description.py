"""What one engine tells another about its KV cache: who holds what, and where in a page it lies.

A page is one fragment in each of several regions (`Pages`). Which regions these are, and
which byte of them is which element, follows from a dozen numbers: no torch, no addresses. Regions here
are as few as the packing allows; `region_addresses` finds them in a storage's `Pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvcache.checks import integer
from kvcache.specs import ELEMENT_BYTES, LAYOUTS
from kvcache.transfer.sharding import heads_of_rank, layers_of_rank

DESCRIPTION_VERSION = 1
PACKINGS = ("apart", "blocks_first", "block_major")


class Coordinates(NamedTuple):
    """A rank's place in its engine."""

    cp_rank: int
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, kw_only=True)
class CacheDescription:
    """An engine's KV cache, the same on all its ranks but for which tokens, layers and heads.

    Tokens are spread over context-parallel ranks: N = `cp_world_size` (PCP times DCP), I =
    `cp_interleave`; the token at position p is on rank `p // I % N`, there the
    `p // (N * I) * I + p % I`-th, in blocks of `block_size`. Layers are spread over pipeline ranks, heads
    over tensor-parallel ones (`kvcache.transfer.sharding`). Ranks are numbered
    `(cp_rank * pp_size + pp_rank) * tp_size + tp_rank`. `tp_size` counts no rank twice: an engine
    whose context parallelism reuses n of its TP ranks gives `tp_size // n`.

    `packing`: "apart" is a region for K and one for V of each layer, "blocks_first" a region per
    layer in which V of a page follows K, "block_major" one region in which the layers of a page follow
    each other; in these two, `page_stride` says so where pages are padded (shared with other cache
    groups). `layout` is the order of tokens and heads within K or V of a page. `is_mla`: one latent
    vector of `head_size` elements per token (its rotary part counted), on every tensor-parallel rank;
    then `total_num_kv_heads` is 1 and `v_head_size` 0.

    Plain values: pickles, and goes through JSON by `to_dict`. ValueError or TypeError for values out of
    range, sizes that do not divide, or another version.

    >>> cache = CacheDescription(engine_id="prefill-0", num_layers=32, total_num_kv_heads=8,
    ...     head_size=128, block_size=16, tp_size=4, layout="HND")
    >>> cache.heads(rank=1), cache.region_bytes[:2].tolist()
    (range(2, 4), [8192, 8192])
    >>> CacheDescription.from_dict(cache.to_dict()) == cache
    True
    """

    engine_id: str
    num_layers: int
    total_num_kv_heads: int
    head_size: int  # elements
    block_size: int  # tokens of a page, on one context-parallel rank
    v_head_size: int | None = None  # elements; None: as head_size, or 0 with MLA
    is_mla: bool = False
    tp_size: int = 1
    pp_size: int = 1
    cp_world_size: int = 1
    cp_interleave: int = 1  # tokens
    layout: str = "NHD"
    packing: str = "apart"
    page_stride: int | None = None  # bytes from page to page; None: what the region's pages take
    dtype: str = "bfloat16"
    version: int = DESCRIPTION_VERSION

    def __post_init__(self) -> None:
        if self.version is True or self.version != DESCRIPTION_VERSION:
            raise ValueError(
                f"version is {self.version!r}, of engine {self.engine_id!r}: "
                f"expected {DESCRIPTION_VERSION}, that of this library"
            )
        if not isinstance(self.is_mla, bool):
            raise TypeError(f"is_mla is {self.is_mla!r}: expected True or False")
        for name, choices in (
            ("layout", LAYOUTS),
            ("packing", PACKINGS),
            ("dtype", tuple(ELEMENT_BYTES)),
        ):
            if getattr(self, name) not in choices:
                came, wanted = getattr(self, name), ", ".join(map(str, choices))
                raise ValueError(f"{name} is {came!r}: expected one of {wanted}")
        if not isinstance(self.engine_id, str):
            raise TypeError(f"engine_id is {self.engine_id!r}: expected a string")
        if self.v_head_size is None:
            object.__setattr__(self, "v_head_size", 0 if self.is_mla else self.head_size)
        for name in _SIZES:
            least = 0 if name == "v_head_size" else 1
            object.__setattr__(self, name, integer(getattr(self, name), name, least))
        for name, wanted in (("total_num_kv_heads", 1), ("v_head_size", 0)):
            if self.is_mla and getattr(self, name) != wanted:
                raise ValueError(f"{name} is {getattr(self, name)}: expected {wanted} with is_mla")
        if self.block_size % self.cp_interleave:
            raise ValueError(
                f"cp_interleave is {self.cp_interleave}: "
                f"expected a divisor of block_size, {self.block_size}"
            )
        heads_of_rank(self.total_num_kv_heads, self.tp_size, 0)
        layers_of_rank(self.num_layers, self.pp_size, 0)
        if self.page_stride is None:
            return
        if self.packing == "apart":
            raise ValueError(
                f"page_stride is {self.page_stride}: expected None with packing 'apart'"
            )
        least = int(self.region_bytes[0])
        object.__setattr__(self, "page_stride", integer(self.page_stride, "page_stride", least))

    def to_dict(self) -> dict[str, int | str | bool]:
        """The fields by name: what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> CacheDescription:
        """What `to_dict` gave. ValueError for another version, unknown fields or missing ones."""
        if not isinstance(values, Mapping):
            raise TypeError(f"values is a {type(values).__name__}: expected a mapping")
        if values.get("version") != DESCRIPTION_VERSION:
            raise ValueError(
                f"version is {values.get('version')!r}, of engine {values.get('engine_id')!r}: "
                f"expected {DESCRIPTION_VERSION}, that of this library"
            )
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown fields {unknown}: expected {sorted(known)}")
        if missing := sorted(required - set(values)):
            raise ValueError(f"missing fields {missing}: expected {sorted(required)}")
        return cls(**values)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return CacheDescription.from_dict, (self.to_dict(),)  # checked where it arrives

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.cp_world_size * self.pp_size * self.tp_size

    @property
    def tokens_per_page(self) -> int:
        """Tokens that one page on each context-parallel rank holds together."""
        return self.block_size * self.cp_world_size

    @cached_property
    def heads_per_rank(self) -> int:
        """Heads that each rank holds."""
        return len(heads_of_rank(self.total_num_kv_heads, self.tp_size, 0))

    @cached_property
    def layers_per_rank(self) -> int:
        """Layers that each rank holds."""
        return self.num_layers // self.pp_size

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """int64[p]: bytes of one head of one token in each part of a layer: K and, if any, V."""
        sizes = [size for size in (self.head_size, self.v_head_size) if size]
        return _fixed(np.array(sizes, np.int64) * ELEMENT_BYTES[self.dtype])

    @cached_property
    def part_bytes(self) -> np.ndarray:
        """int64[p]: bytes of a page in each part of a layer."""
        return _fixed(self.row_bytes * (self.block_size * self.heads_per_rank))

    @cached_property
    def region_bytes(self) -> np.ndarray:
        """int64[r]: bytes of a page in each region."""
        if self.packing == "apart":
            return _fixed(np.tile(self.part_bytes, self.layers_per_rank))
        per_layer = self.part_bytes.sum(keepdims=True)
        if self.packing == "blocks_first":
            return _fixed(np.tile(per_layer, self.layers_per_rank))
        return _fixed(per_layer * self.layers_per_rank)

    @cached_property
    def region_strides(self) -> np.ndarray:
        """int64[r]: bytes from page to page in each region."""
        if self.page_stride is None:
            return self.region_bytes
        return _fixed(np.full_like(self.region_bytes, self.page_stride))

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is; ValueError for a rank that is not there."""
        rest, tp_rank = divmod(integer(rank, "rank", 0, self.world_size - 1), self.tp_size)
        return Coordinates(*divmod(rest, self.pp_size), tp_rank)

    def rank_of(self, at: Coordinates) -> int:
        """The number of the rank at a place."""
        return (at.cp_rank * self.pp_size + at.pp_rank) * self.tp_size + at.tp_rank

    def layers(self, rank: int) -> range:
        """The model's layers that a rank holds."""
        return layers_of_rank(self.num_layers, self.pp_size, self.coordinates(rank).pp_rank)

    def heads(self, rank: int) -> range:
        """The model's KV heads that a rank holds."""
        return heads_of_rank(self.total_num_kv_heads, self.tp_size, self.coordinates(rank).tp_rank)

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """(region, offset), int64[layers of a rank, p] each: where K and V of a page begin.

        >>> cache = CacheDescription(engine_id="", num_layers=2, total_num_kv_heads=1, head_size=8,
        ...     block_size=4, packing="block_major")
        >>> [array.tolist() for array in cache.parts]
        [[[0, 0], [0, 0]], [[0, 64], [128, 192]]]
        """
        sizes = self.part_bytes
        layer, part = np.indices((self.layers_per_rank, len(sizes)))
        within = (np.cumsum(sizes) - sizes)[part]
        if self.packing == "apart":
            region, offset = layer * len(sizes) + part, np.zeros_like(within)
        elif self.packing == "blocks_first":
            region, offset = layer, within
        else:
            region, offset = np.zeros_like(layer), layer * sizes.sum() + within
        return _fixed(region), _fixed(offset)

    def row(self, token: np.ndarray, head: np.ndarray) -> np.ndarray:
        """int64: which row of K or of V of a page is that of a token of it and a rank's n-th head."""
        if self.layout == "NHD":
            return token * self.heads_per_rank + head
        return head * self.block_size + token

    def place(
        self, layer: np.ndarray, part: np.ndarray, token: np.ndarray, head: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(region, offset) of elements, whatever the arguments' shapes broadcast to.

        layer, head: counted among those of a rank. part: 0 for K, 1 for V. token: in the page.
        offset: bytes from where the page begins in the region to the element's first one.

        >>> cache = CacheDescription(engine_id="", num_layers=2, total_num_kv_heads=2, head_size=8,
        ...     block_size=4, packing="blocks_first")
        >>> region, offset = cache.place(1, np.array([0, 1]), 0, 1)
        >>> region.tolist(), offset.tolist()
        ([1, 1], [16, 144])
        """
        region, begin = self.parts
        within = self.row(np.asarray(token), np.asarray(head)) * self.row_bytes[part]
        return np.broadcast_arrays(region[layer, part], begin[layer, part] + within)


_SIZES = (
    "num_layers",
    "total_num_kv_heads",
    "head_size",
    "block_size",
    "v_head_size",
    "tp_size",
    "pp_size",
    "cp_world_size",
    "cp_interleave",
)


def _fixed(array: np.ndarray) -> np.ndarray:
    """Read-only: it is handed out again."""
    array.setflags(write=False)
    return array
