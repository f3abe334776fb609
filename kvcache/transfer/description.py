# SPDX-License-Identifier: Apache-2.0
"""The description of a KV cache that engines exchange. It defines each rank's content and page
layout.

A page consists of one fragment in each region (`Pages`). The regions, and the position of each
element in them, follow from about a dozen numbers, so no torch and no addresses are needed. The
number of regions is the minimum that the memory order allows. `region_addresses` returns their
addresses in a storage's `Pages`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.checks import (
    MAX_LAYERS,
    Count,
    Size,
    Text,
    check_range,
    dtype_name,
    instance,
    instances,
    integer,
    integer_array,
    plain_fields,
    shown,
)
from kvcache.placement import Placement, check_memory_order, layout_of, place_elements
from kvcache.specs import ELEMENT_BYTES, GroupSpec, LayerSpec
from kvcache.transfer.sharding import (
    PipelineStage,
    check_page_stride,
    check_stages,
    check_stages_of,
    check_world_size,
    equal_stages,
    heads_of_rank,
    layers_of_rank,
    layers_of_stages,
)

if TYPE_CHECKING:
    from typing_extensions import Self

DESCRIPTION_VERSION = 1


def check_version(version: object, engine_id: object) -> None:
    """Raise ValueError for another version of the format than that of this library."""
    if type(version) is not int or version != DESCRIPTION_VERSION:
        raise ValueError(
            f"version is {shown(version)}, of engine {shown(engine_id)}: "
            f"expected {DESCRIPTION_VERSION}, the version of this library"
        )


class Coordinates(NamedTuple):
    """A rank's coordinates within its engine."""

    cp_rank: int
    pp_rank: int
    tp_rank: int


class EngineDescription:
    """The numbers of an engine's ranks, and the fields of a description as JSON values.

    A rank is identified by its context-parallel rank, its pipeline stage and its tensor-parallel rank
    in this stage. Ranks are numbered in this order.
    """

    num_layers: int
    tp_size: int
    pp_size: int
    cp_world_size: int
    stages: tuple[PipelineStage, ...] | None

    def to_dict(self) -> dict[str, object]:
        """Return the fields, keyed by name, as JSON values."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Create a description from the result of `to_dict`.

        Raises:
            TypeError: `values` is not a mapping.
            ValueError: The format version is not the version of this library, or fields are unknown
                or missing.
        """
        check_mapping(values)
        check_version(values.get("version"), values.get("engine_id"))
        check_fields(cls, values)
        return cls(**values)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return type(self).from_dict, (self.to_dict(),)  # unpickling validates the values

    @property
    def world_size(self) -> int:
        """Number of ranks in the engine."""
        return self.cp_world_size * self._first_ranks[-1]

    @cached_property
    def pipeline_stages(self) -> tuple[PipelineStage, ...]:
        """The number of layers and ranks in each stage, from `stages` or as `pp_size` equal stages."""
        if self.stages is not None:
            return self.stages
        return equal_stages(self.num_layers, self.pp_size, self.tp_size)

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """The first rank of each stage in a context-parallel rank, and the number of all these ranks."""
        return tuple(accumulate((stage.tp_size for stage in self.pipeline_stages), initial=0))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank. Raises ValueError if the rank is out of range."""
        rank = integer(rank, "rank", 0, self.world_size - 1)
        cp_rank, rest = divmod(rank, self._first_ranks[-1])
        pp_rank = bisect_right(self._first_ranks, rest) - 1
        return Coordinates(cp_rank, pp_rank, rest - self._first_ranks[pp_rank])

    def rank_of(self, at: Coordinates) -> int:
        """Return the index of the rank at these coordinates."""
        instance(at, Coordinates, "at")
        return at.cp_rank * self._first_ranks[-1] + self._first_ranks[at.pp_rank] + at.tp_rank


def plain(value: object) -> object:
    """Return a field's value with tuples converted to lists."""
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def check_mapping(values: object, where: str = "") -> None:
    """Raise TypeError unless the values are a mapping."""
    if not isinstance(values, Mapping):
        raise TypeError(f"values{where} is a {type(values).__name__}: expected a mapping")


def check_fields(cls: type, values: Mapping[str, object], where: str = "") -> None:
    """Raise ValueError unless the keys are the fields of a dataclass, without optional ones."""
    known = {each.name for each in fields(cls)}
    required = {each.name for each in fields(cls) if each.default is MISSING}
    if unknown := sorted(set(values) - known, key=str):
        raise ValueError(f"unknown fields {unknown}{where}: expected {sorted(known)}")
    if missing := sorted(required - set(values)):
        raise ValueError(f"missing fields {missing}{where}: expected {sorted(required)}")


@dataclass(frozen=True, eq=False)
class StageCache:
    """What each rank of one pipeline stage holds.

    Attributes:
        layers: The model's layers in this stage.
        tp_size: Number of tensor-parallel ranks in the stage.
        placement: Positions of a page's elements. Layers and heads are numbered within the rank.
            Scales are treated as an additional V and have the last index.
        region_strides: int64[r]. Distance in bytes between consecutive pages in each region.
    """

    layers: range
    tp_size: int
    heads_per_rank: int
    placement: Placement
    region_strides: np.ndarray


@dataclass(frozen=True, kw_only=True)
class CacheDescription(EngineDescription):
    """Describes an engine's KV cache. One description covers all ranks, which hold different
    tokens, layers and heads.

    Tokens are spread over context-parallel ranks. With N = `cp_world_size` (PCP times DCP) and
    I = `cp_interleave`, the token at position p is on rank `p // I % N`, as token number
    `p // (N * I) * I + p % I` of that rank, in blocks of `block_size`. Layers are spread over pipeline
    ranks, and heads over tensor-parallel ranks (`kvcache.transfer.sharding`). The index of a rank
    is `(cp_rank * pp_size + pp_rank) * tp_size + tp_rank`.

    Transfers copy bytes without rescaling, so both engines must use the same quantization scales:
    plans refuse descriptions with different `k_scale` or `v_scale`.

    A description consists of plain values, so it can be pickled, and `to_dict` returns JSON values.

    Args:
        engine_id: Name of the engine.
        num_layers: Number of the model's layers in this cache.
        total_num_kv_heads: Number of KV heads in the model. 1 for MLA.
        head_size: Number of K elements per head.
        block_size: Tokens per page on one context-parallel rank.
        v_head_size: Number of V elements per head. None: `head_size`, or 0 for MLA. For MLA, a
            value given here is the size of the rotary part; it is added to `head_size`, and
            `v_head_size` becomes 0.
        tp_size: Number of tensor-parallel ranks within each context-parallel rank. If context
            parallelism reuses tensor-parallel ranks in groups of n, pass the engine's
            `tp_size // n`.
        stages: (layers, tp_size) of each pipeline stage, if the stages differ. In this case, leave
            `pp_size` and `tp_size` at 1; ranks are numbered stage by stage within a
            context-parallel rank.
        memory_order: Dimensions in memory, outermost first, from `AttentionBackend.memory_order`
            (`kvcache.layouts`): "layer" (if missing, each layer has its own memory), "kv" (if missing, a
            head's V follows its K), "block", "token", "head" (if missing, there is one head) and
            "element". Each combination of indices before "block" has its own region. "head" may
            precede "block".
        page_stride: Distance in bytes between padded pages (shared with other cache groups), as one
            value for all stages or one per stage. Requires that a page's K and V are in one region.
        is_mla: Whether each token has a single latent vector of `head_size` elements, which every
            tensor-parallel rank holds.
        scale_bytes_per_head: Bytes of scales per token and head, for K and V together. In the page,
            a layer's scales follow its K and V, token by token, or have their own region if "kv"
            precedes "block". Scales are transferred together with their heads. A storage's
            `scale_bytes_per_token` is `scale_bytes_per_head` times the heads per rank.
        kv_format: Name of the quantized format (`kvcache.formats`), of which the sizes above describe
            what is stored. "": none.
        k_scale: Quantization scales of fp8 K values, per layer or per layer and KV head, as in
            `KVStorage.set_scales`. None: all scales are 1.
        v_scale: Scales of V values, in the same form as `k_scale`.
        hash_algorithm: The engine's hash algorithm (`CacheOptions.hash_algorithm`), which shows
            both engines whether their block hashes are comparable.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, sizes do not divide each other, or the version differs.

    Example:
        >>> from kvcache.layouts import backend
        >>> cache = CacheDescription(engine_id="prefill-0", num_layers=32, total_num_kv_heads=8,
        ...     head_size=128, block_size=16, tp_size=4,
        ...     memory_order=backend("FLASH_ATTN").memory_order("HND"))
        >>> cache.heads(rank=1), cache.region_bytes[:2].tolist()
        (range(2, 4), [8192, 8192])
        >>> CacheDescription.from_dict(cache.to_dict()) == cache
        True
    """

    engine_id: Text
    num_layers: Size
    total_num_kv_heads: Size
    head_size: Size  # K elements per head
    block_size: Size  # tokens per page on one context-parallel rank
    v_head_size: Count | None = None  # V elements per head; None: head_size, or 0 with MLA
    is_mla: bool = False
    tp_size: Size = 1
    pp_size: Size = 1
    cp_world_size: Size = 1
    cp_interleave: Size = 1  # consecutive tokens per context-parallel rank
    memory_order: tuple[str, ...] = ("block", "kv", "token", "head", "element")
    page_stride: int | tuple[int, ...] | None = None  # bytes from page to page; None: contiguous
    dtype: str = "bfloat16"  # dtype name, or a torch.dtype
    stages: tuple[PipelineStage, ...] | None = None
    scale_bytes_per_head: Count = 0
    kv_format: Text = ""
    k_scale: tuple[tuple[float, ...], ...] | None = None
    v_scale: tuple[tuple[float, ...], ...] | None = None
    hash_algorithm: Text = "sha256_cbor"
    version: int = DESCRIPTION_VERSION

    def __post_init__(self) -> None:
        check_version(self.version, self.engine_id)
        object.__setattr__(self, "dtype", dtype_name(self.dtype, ELEMENT_BYTES))
        object.__setattr__(self, "memory_order", check_memory_order(self.memory_order))
        integer(self.num_layers, "num_layers", 1, MAX_LAYERS)
        plain_fields(self)
        if self.v_head_size is None:
            object.__setattr__(self, "v_head_size", 0 if self.is_mla else self.head_size)
        if self.is_mla:
            if self.total_num_kv_heads != 1:
                raise ValueError(
                    f"total_num_kv_heads is {self.total_num_kv_heads}: expected 1 with is_mla"
                )
            object.__setattr__(self, "head_size", self.head_size + self.v_head_size)
            object.__setattr__(self, "v_head_size", 0)
        if self.block_size % self.cp_interleave:
            raise ValueError(
                f"cp_interleave is {self.cp_interleave}: "
                f"expected a divisor of block_size, {self.block_size}"
            )
        self._check_stages()
        check_world_size(self.world_size)
        for name in ("k_scale", "v_scale"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, self._checked_scale(given, name))
        self._check_page_stride()
        _ = self.stage_caches  # raises ValueError if the sizes cannot be placed

    def _check_stages(self) -> None:
        if self.stages is None:
            heads_of_rank(self.total_num_kv_heads, self.tp_size, 0)
            layers_of_rank(self.num_layers, self.pp_size, 0)
            return
        stages = check_stages_of(
            self.stages, self.num_layers, pp_size=self.pp_size, tp_size=self.tp_size
        )
        object.__setattr__(self, "stages", stages)
        for stage in stages:
            heads_of_rank(self.total_num_kv_heads, stage.tp_size, 0)

    def _check_page_stride(self) -> None:
        given, placements = self.page_stride, self._placements
        if given is None:
            return
        if not all(placed.has_kv_together for placed in placements):
            raise ValueError(
                f"page_stride is {given}: expected None, because K and V have separate regions "
                f"with memory_order {self.memory_order}"
            )
        page_bytes = [int(placed.region_bytes.max(initial=0)) for placed in placements]
        object.__setattr__(self, "page_stride", check_page_stride(given, page_bytes))

    def _checked_scale(self, given: object, name: str) -> tuple[tuple[float, ...], ...]:
        if ELEMENT_BYTES[self.dtype] != 1:
            raise ValueError(
                f"{name} is given: expected None with dtype {self.dtype!r}, which is not fp8"
            )
        if name == "v_scale" and not self.v_head_size:
            raise ValueError("v_scale is given: expected None, because there is no V")
        values = np.asarray(given, float)
        if values.shape not in ((self.num_layers, 1), (self.num_layers, self.total_num_kv_heads)):
            raise ValueError(
                f"{name} has shape {list(values.shape)}: expected [{self.num_layers}, 1] or "
                f"[{self.num_layers}, {self.total_num_kv_heads}]"
            )
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"{name} is {values.tolist()}: expected finite numbers above 0")
        return tuple(map(tuple, values.tolist()))

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
        """Create the description of one group of a plan. Pass `plan.groups[g]` and `plan.layers`.

        The layers, heads per rank, head sizes, block size, dtype and bytes of scales are taken from
        the group.

        Args:
            group: The group.
            layers: The plan's layers.
            engine_id: Name of the engine.
            total_num_kv_heads: Number of KV heads in the model. None: no two tensor-parallel ranks
                hold the same heads. Required if `stages` have different `tp_size`, because the number
                of heads per rank then differs between stages.
            cp_world_size: Number of context-parallel ranks. Treated as 1 for a replicated group.
            sizes: Further fields of the description.

        Returns:
            The description.

        Raises:
            ValueError: The group's blocks are not transferred, hold no tokens, or form a circular
                buffer, or its scales do not belong to heads.

        Example:
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
            ValueError: group with layers ('b',) has transferred=False: expected a transferred group
        """
        instance(group, GroupSpec, "group")
        layers = instances(layers, LayerSpec, "layers")
        if not group.transferred:
            raise ValueError(
                f"group with layers {group.layers} has transferred=False: expected a "
                "transferred group"
            )
        by_name = {layer.name: layer for layer in layers}
        missing = [name for name in group.layers if name not in by_name]
        if missing or not group.layers:
            raise ValueError(
                f"group has layers {group.layers}, but layers lacks {missing}: expected the group and "
                "the layers of the same plan"
            )
        layer = by_name[group.layers[0]]
        if layer.state_bytes:
            raise ValueError(f"layer {layer.name!r} keeps a state: expected a group of K and V")
        head_size, v_head_size = layer.stored_sizes
        is_mla = layer.is_mla or (layer.num_kv_heads == 1 and v_head_size == 0)
        from kvcache.kinds import kind_class  # imported here because it loads the native library

        if kind_class(group.kind).pages.wraps:
            raise ValueError(
                f"group with layers {group.layers} is circular: expected a group whose blocks hold "
                "consecutive tokens"
            )
        num_layers, tp_size = len(group.layers), sizes.get("tp_size", 1)
        if sizes.get("stages") is not None:
            stages = check_stages(sizes["stages"])
            num_layers, tp_size = sum(stage.num_layers for stage in stages), stages[0].tp_size
            differs = any(stage.tp_size != tp_size for stage in stages)
            if total_num_kv_heads is None and differs and not is_mla:
                raise ValueError(
                    "total_num_kv_heads is None with stages: expected the model's number of KV heads"
                )
        else:
            num_layers *= integer(sizes.get("pp_size", 1), "pp_size", 1)
        if total_num_kv_heads is None:
            total_num_kv_heads = 1 if is_mla else layer.num_kv_heads * tp_size
        if layer.scale_bytes_per_token % layer.num_kv_heads:
            raise ValueError(
                f"layer {layer.name!r} has scale_bytes_per_token {layer.scale_bytes_per_token}: expected "
                f"a multiple of its {layer.num_kv_heads} KV heads, with which its scales are transferred"
            )
        sizes.setdefault("scale_bytes_per_head", layer.scale_bytes_per_token // layer.num_kv_heads)
        return cls(
            engine_id=engine_id,
            num_layers=num_layers,
            total_num_kv_heads=total_num_kv_heads,
            head_size=head_size,
            v_head_size=v_head_size,
            kv_format=layer.kv_format or "",
            block_size=group.block_size,
            is_mla=is_mla,
            dtype=layer.dtype,
            cp_world_size=1 if group.replicated else cp_world_size,
            **sizes,
        )

    @cached_property
    def stage_caches(self) -> tuple[StageCache, ...]:
        """What each rank holds, per pipeline stage."""
        page_strides = self.page_stride
        if not isinstance(page_strides, tuple):
            page_strides = (page_strides,) * len(self.pipeline_stages)
        stages = zip(
            *(layers_of_stages(self.pipeline_stages), self.pipeline_stages),
            *(self._placements, page_strides),
        )
        return tuple(
            StageCache(layers, stage.tp_size, placed.head_count, placed, _strides(placed, stride))
            for layers, stage, placed, stride in stages
        )

    @property
    def tokens_per_page(self) -> int:
        """Number of tokens in one page, summed over all context-parallel ranks."""
        return self.block_size * self.cp_world_size

    @property
    def heads_per_rank(self) -> int:
        """Heads per rank. This and the properties below raise ValueError if stages differ."""
        return self._each_rank("heads_per_rank").heads_per_rank

    @property
    def layout(self) -> str:
        """The layout, "NHD" if tokens precede heads in memory and "HND" otherwise."""
        return layout_of(self.memory_order)

    @property
    def placement(self) -> Placement:
        """Positions of the elements in each rank's pages. Layers and heads are numbered within the
        rank.

        Example:
            >>> from kvcache.layouts import backend
            >>> cache = CacheDescription(engine_id="", num_layers=2, total_num_kv_heads=1, head_size=8,
            ...     block_size=4, memory_order=backend("BLOCK_MAJOR").memory_order(cross_layers=True))
            >>> cache.placement.regions.tolist(), cache.placement.kv_offsets.tolist()
            ([[0, 0], [0, 0]], [[0, 64], [128, 192]])
        """
        return self._each_rank("placement").placement

    @property
    def head_bytes(self) -> np.ndarray:
        """int64[p]: bytes per token and head of K, of V and of scales, if present."""
        return self._placements[0].head_bytes

    @property
    def region_bytes(self) -> np.ndarray:
        """int64[r]: bytes that a page occupies in each region."""
        return self._each_rank("region_bytes").placement.region_bytes

    @property
    def region_strides(self) -> np.ndarray:
        """int64[r]: distance in bytes between consecutive pages in each region."""
        return self._each_rank("region_strides").region_strides

    def stage_of(self, rank: int) -> StageCache:
        """Return what a rank holds.

        Stages may differ. Raises ValueError if the rank is out of range.
        """
        return self.stage_caches[self.coordinates(rank).pp_rank]

    def _each_rank(self, name: str) -> StageCache:
        if len(set(self.pipeline_stages)) > 1 or isinstance(self.page_stride, tuple):
            raise ValueError(
                f"{name} of engine {self.engine_id!r} differs by stage: use stage_of(rank)"
            )
        return self.stage_caches[0]

    @cached_property
    def _placements(self) -> tuple[Placement, ...]:
        """The placement of each stage. Stages with equal sizes share one placement."""
        made: dict[PipelineStage, Placement] = {}
        for stage in self.pipeline_stages:
            if stage in made:
                continue
            heads = len(heads_of_rank(self.total_num_kv_heads, stage.tp_size, 0))
            placed = place_elements(
                self.memory_order,
                num_layers=stage.num_layers,
                block_size=self.block_size,
                num_kv_heads=heads,
                head_size=self.head_size,
                v_head_size=self.v_head_size,
                element_bytes=ELEMENT_BYTES[self.dtype],
                scale_bytes_per_token=self.scale_bytes_per_head * heads,
            )
            made[stage] = placed.with_scales_as_part() if self.scale_bytes_per_head else placed
        return tuple(made[stage] for stage in self.pipeline_stages)

    def layers(self, rank: int) -> range:
        """Return the model's layers that a rank holds."""
        return self.stage_of(rank).layers

    def heads(self, rank: int) -> range:
        """Return the model's KV heads that a rank holds."""
        at = self.coordinates(rank)
        tp_size = self.pipeline_stages[at.pp_rank].tp_size
        return heads_of_rank(self.total_num_kv_heads, tp_size, at.tp_rank)

    def offset_of(
        self, layer: np.ndarray, kv: np.ndarray, token: np.ndarray, head: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the (region, offset) at which a token's head starts. The arguments broadcast.

        Args:
            layer: Layer, numbered within the rank.
            kv: 0 for K, 1 for V. The last index stands for scales.
            token: Token within the page.
            head: Head, numbered within the rank.

        Returns:
            Regions, and offsets in bytes from the start of the page in the region.

        Example:
            >>> from kvcache.layouts import backend
            >>> cache = CacheDescription(engine_id="", num_layers=2, total_num_kv_heads=2, head_size=8,
            ...     block_size=4, memory_order=backend("FLASHINFER").memory_order("NHD"))
            >>> region, offset = cache.offset_of(1, np.array([0, 1]), 0, 1)
            >>> region.tolist(), offset.tolist()
            ([1, 1], [16, 144])
        """
        placed = self.placement
        sizes = (*placed.regions.shape, self.block_size, placed.head_count)
        names = ("layer", "kv", "token", "head")
        layer, kv, token, head = (
            _indices(each, name, size)
            for each, name, size in zip((layer, kv, token, head), names, sizes)
        )
        try:
            np.broadcast_shapes(layer.shape, kv.shape, token.shape, head.shape)
        except ValueError as error:
            raise ValueError(
                f"{', '.join(names)}: expected shapes that broadcast: {error}"
            ) from None
        within = token * placed.token_strides[kv] + head * placed.head_strides[kv]
        offset = placed.kv_offsets[layer, kv] + within
        region = placed.regions[layer, kv] + head * placed.head_regions
        return np.broadcast_arrays(region, offset)


def _indices(values: np.ndarray, name: str, size: int) -> np.ndarray:
    """Return integers in [0, size) as an array of any shape. Raises TypeError or ValueError."""
    array = integer_array(values, name)
    check_range(name, "is", array.ravel(), 0, size)
    return array.astype(np.int64)


def _strides(placed: Placement, page_stride: int | None) -> np.ndarray:
    """Return the distance in bytes between pages in each region, read-only."""
    if page_stride is None:
        return placed.region_bytes
    strides = np.full_like(placed.region_bytes, page_stride)
    strides.setflags(write=False)
    return strides
