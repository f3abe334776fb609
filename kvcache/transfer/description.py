"""The description of a KV cache that engines exchange: which rank holds what, and where in a page.

A page is one fragment in each of several regions (`Pages`). The regions, and the position of each element
in them, follow from a dozen numbers, without torch and without addresses. There are as few regions as the
memory order allows; `region_addresses` finds them in a storage's `Pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvcache.checks import integer
from kvcache.layouts import Placement, check_memory_order, layout_of, place_elements
from kvcache.specs import ELEMENT_BYTES, GroupSpec, LayerSpec
from kvcache.transfer.sharding import heads_of_rank, layers_of_rank

DESCRIPTION_VERSION = 1


class Coordinates(NamedTuple):
    """A rank's coordinates in its engine."""

    cp_rank: int
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, kw_only=True)
class CacheDescription:
    """An engine's KV cache. All ranks have the same description, for their own tokens, layers and heads.

    Tokens are spread over context-parallel ranks. With N = `cp_world_size` (PCP times DCP) and I =
    `cp_interleave`, the token at position p is on rank `p // I % N`, as its token number
    `p // (N * I) * I + p % I`, in blocks of `block_size`. Layers are spread over pipeline ranks, heads
    over tensor-parallel ranks (`kvcache.transfer.sharding`). A rank's number is
    `(cp_rank * pp_size + pp_rank) * tp_size + tp_rank`. `tp_size` counts no rank twice: an engine
    whose context parallelism reuses n of its TP ranks gives `tp_size // n`.

    `memory_order`: the dimensions in memory, outermost first, as `AttentionBackend.memory_order` gives
    them (`kvcache.layouts`): "layer" (without it, each layer has its own memory), "kv" (without it, V of
    a head follows its K), "block", "token", "head" (without it, there is one head) and "element".
    Dimensions before "block" count regions. `page_stride` is for padded pages (shared with other cache
    groups), where K and V of a page lie in one region. `is_mla`: one latent vector of `head_size`
    elements per token (its rotary part included), on every tensor-parallel rank; then
    `total_num_kv_heads` is 1 and `v_head_size` is 0.

    Holds plain values: it pickles, and `to_dict` gives values for JSON. ValueError or TypeError for
    values out of range, sizes that do not divide, or another version.

    >>> from kvcache.layouts import backend
    >>> cache = CacheDescription(engine_id="prefill-0", num_layers=32, total_num_kv_heads=8,
    ...     head_size=128, block_size=16, tp_size=4,
    ...     memory_order=backend("FLASH_ATTN").memory_order("HND"))
    >>> cache.heads(rank=1), cache.region_bytes[:2].tolist()
    (range(2, 4), [8192, 8192])
    >>> CacheDescription.from_dict(cache.to_dict()) == cache
    True
    """

    engine_id: str
    num_layers: int
    total_num_kv_heads: int
    head_size: int  # elements
    block_size: int  # tokens of a page on one context-parallel rank
    v_head_size: int | None = None  # elements; None: as head_size, or 0 with MLA
    is_mla: bool = False
    tp_size: int = 1
    pp_size: int = 1
    cp_world_size: int = 1
    cp_interleave: int = 1  # tokens
    memory_order: tuple[str, ...] = ("kv", "block", "token", "head", "element")
    page_stride: int | None = None  # bytes from page to page; None: pages are contiguous
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
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(ELEMENT_BYTES)}")
        object.__setattr__(self, "memory_order", check_memory_order(self.memory_order))
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
        least = int(self.placement.region_bytes[0])  # ValueError where the sizes cannot be placed
        if self.page_stride is None:
            return
        if not self.placement.has_kv_together:
            raise ValueError(
                f"page_stride is {self.page_stride}: expected None where K and V have regions of "
                f"their own, as memory_order is {self.memory_order}"
            )
        object.__setattr__(self, "page_stride", integer(self.page_stride, "page_stride", least))

    @classmethod
    def of_group(
        cls,
        group: GroupSpec,
        layers: Iterable[LayerSpec],
        *,
        engine_id: str,
        total_num_kv_heads: int | None = None,
        cp_world_size: int = 1,
        **sizes: object,
    ) -> CacheDescription:
        """The description of one group of a plan: of `plan.groups[g]` and `plan.layers`.

        Layers, heads per rank, head sizes, block size and dtype are those of the group.
        `total_num_kv_heads`: of the model; by default each rank has heads of its own. Of a replicated
        group `cp_world_size` is 1. `sizes`: the other fields. ValueError for a group whose blocks are
        not transferred or hold no tokens.

        >>> from kvcache import plan_cache
        >>> layers = [LayerSpec("a", "full_attention", 16, 2, 64)]
        >>> layers += [LayerSpec("b", "full_attention", 16, 2, 64, transferred=False)]
        >>> plan = plan_cache(layers, 2**20, max_model_len=64)
        >>> cache = CacheDescription.of_group(plan.groups[0], plan.layers, engine_id="x", tp_size=4)
        >>> cache.total_num_kv_heads, cache.block_size
        (8, 16)
        >>> CacheDescription.of_group(plan.groups[1], plan.layers, engine_id="x")
        Traceback (most recent call last):
        ...
        ValueError: group with layers ('b',) has transferred=False: expected one that is transferred
        """
        if not group.transferred:
            raise ValueError(
                f"group with layers {group.layers} has transferred=False: expected one that is "
                "transferred"
            )
        by_name = {layer.name: layer for layer in layers}
        missing = [name for name in group.layers if name not in by_name]
        if missing or not group.layers:
            raise ValueError(
                f"group has layers {group.layers}, of which {missing} are not among layers: expected "
                "the group and the layers of one plan"
            )
        layer = by_name[group.layers[0]]
        if layer.state_bytes:
            raise ValueError(f"layer {layer.name!r} keeps a state: expected a group of K and V")
        is_mla = layer.num_kv_heads == 1 and layer.v_head_size == 0
        if total_num_kv_heads is None:
            total_num_kv_heads = 1 if is_mla else layer.num_kv_heads * sizes.get("tp_size", 1)
        return cls(
            engine_id=engine_id,
            num_layers=len(group.layers) * sizes.get("pp_size", 1),
            total_num_kv_heads=total_num_kv_heads,
            head_size=layer.head_size,
            v_head_size=layer.v_head_size,
            block_size=group.block_size,
            is_mla=is_mla,
            dtype=layer.dtype,
            cp_world_size=1 if group.replicated else cp_world_size,
            **sizes,
        )

    def to_dict(self) -> dict[str, int | str | bool | list[str]]:
        """The fields by name, as values for JSON."""
        return {**asdict(self), "memory_order": list(self.memory_order)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> CacheDescription:
        """The inverse of `to_dict`. ValueError for another version, unknown or missing fields."""
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
        return CacheDescription.from_dict, (self.to_dict(),)  # unpickling checks the values

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

    @property
    def layout(self) -> str:
        """ "NHD" or "HND": which of tokens and heads comes first in memory."""
        return layout_of(self.memory_order)

    @cached_property
    def placement(self) -> Placement:
        """Where the elements of a rank's pages lie. Layers and heads are numbered within the rank.

        >>> from kvcache.layouts import backend
        >>> cache = CacheDescription(engine_id="", num_layers=2, total_num_kv_heads=1, head_size=8,
        ...     block_size=4, memory_order=backend("BLOCK_MAJOR").memory_order(cross_layers=True))
        >>> cache.placement.regions.tolist(), cache.placement.kv_offsets.tolist()
        ([[0, 0], [0, 0]], [[0, 64], [128, 192]])
        """
        return place_elements(
            self.memory_order,
            num_layers=self.layers_per_rank,
            block_size=self.block_size,
            num_kv_heads=self.heads_per_rank,
            head_size=self.head_size,
            v_head_size=self.v_head_size,
            element_bytes=ELEMENT_BYTES[self.dtype],
        )

    @property
    def head_bytes(self) -> np.ndarray:
        """int64[p]: bytes of one head of one token in K and, if there is any, in V."""
        return self.placement.head_bytes

    @property
    def region_bytes(self) -> np.ndarray:
        """int64[r]: bytes of a page in each region."""
        return self.placement.region_bytes

    @cached_property
    def region_strides(self) -> np.ndarray:
        """int64[r]: bytes from page to page in each region."""
        if self.page_stride is None:
            return self.region_bytes
        return _fixed(np.full_like(self.region_bytes, self.page_stride))

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank; ValueError for a rank out of range."""
        rest, tp_rank = divmod(integer(rank, "rank", 0, self.world_size - 1), self.tp_size)
        return Coordinates(*divmod(rest, self.pp_size), tp_rank)

    def rank_of(self, at: Coordinates) -> int:
        """The number of the rank at these coordinates."""
        return (at.cp_rank * self.pp_size + at.pp_rank) * self.tp_size + at.tp_rank

    def layers(self, rank: int) -> range:
        """The model's layers that a rank holds."""
        return layers_of_rank(self.num_layers, self.pp_size, self.coordinates(rank).pp_rank)

    def heads(self, rank: int) -> range:
        """The model's KV heads that a rank holds."""
        return heads_of_rank(self.total_num_kv_heads, self.tp_size, self.coordinates(rank).tp_rank)

    def offset_of(
        self, layer: np.ndarray, kv: np.ndarray, token: np.ndarray, head: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(region, offset) of the first element of heads; the arguments broadcast.

        layer, head: numbered within the rank. kv: 0 for K, 1 for V. token: within the page. offset: in
        bytes, from where the page begins in the region.

        >>> from kvcache.layouts import backend
        >>> cache = CacheDescription(engine_id="", num_layers=2, total_num_kv_heads=2, head_size=8,
        ...     block_size=4, memory_order=backend("FLASHINFER").memory_order("NHD"))
        >>> region, offset = cache.offset_of(1, np.array([0, 1]), 0, 1)
        >>> region.tolist(), offset.tolist()
        ([1, 1], [16, 144])
        """
        placed = self.placement
        within = np.asarray(token) * placed.token_strides[kv]
        within = within + np.asarray(head) * placed.head_strides[kv]
        offset = placed.kv_offsets[layer, kv] + within
        return np.broadcast_arrays(placed.regions[layer, kv], offset)


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
    """The array made read-only, because all callers get the same one."""
    array.setflags(write=False)
    return array
