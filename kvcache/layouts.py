"""Cache layouts: how attention backends shape their caches, and where each element then lies in memory.

A dimension is named by its role: "kv" (K, V), "block", "token" (within a block), "head", "element" (of a
head), and "layer" where the layers of a block are packed together. A layout is a *memory order*: these
roles, outermost first. `place_elements` turns one into offsets and strides; storages, descriptions for
other engines, topologies and copies of blocks all read the same order, so a new layout is one
`AttentionBackend`, registered in a file of one's own.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvcache.checks import check_name, flag, integer, listed, shown
from kvcache.specs import LAYOUTS

ROLES = ("kv", "block", "token", "head", "element")
_NEEDED = {"block", "token", "element"}

_log = logging.getLogger("kvcache")

# The sizes by which the dimensions of an engine's backend are told apart. 4096 is a multiple of the block
# sizes that backends accept; no two are equal, nor is one twice another.
_PROBE = {"block": 7919, "token": 4096, "head": 11, "element": 576}


class EngineBackend(Protocol):
    """An engine's own backend class, or an object of it, which answers for the engine that is running.

    `get_kv_cache_stride_order` (the dimensions of the shape in the order of memory, outermost first;
    with the argument, those of all layers packed together, the layer being dimension 0) may be missing,
    lack the argument, or raise NotImplementedError.
    """

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]: ...

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class AttentionBackend:
    """The layout of one backend's cache.

    `dims`: the dimensions' roles as the backend indexes them. `nhd`, `hnd`: their order in memory,
    outermost first; None: as `dims`, for HND with token and head exchanged. `nhd_cross_layers`,
    `hnd_cross_layers`: the order, with "layer", of all layers packed into one tensor; None: the backend
    does not pack. `unequal_head_sizes`: the last dimension holds a head's K and then its V, each of its
    own size; without it V is as large as K, or, where there is no "kv", there is no V.

    ValueError for roles that are unknown, missing or named twice, and orders of other dimensions.

    >>> paged = AttentionBackend("PAGED", ("block", "kv", "token", "head", "element"))
    >>> paged.shape(num_blocks=100, block_size=16, num_kv_heads=8, head_size=128)
    (100, 2, 16, 8, 128)
    >>> paged.stride_order("HND")
    (0, 1, 3, 2, 4)
    """

    name: str
    dims: tuple[str, ...]
    nhd: tuple[str, ...] | None = None
    hnd: tuple[str, ...] | None = None
    nhd_cross_layers: tuple[str, ...] | None = None
    hnd_cross_layers: tuple[str, ...] | None = None
    unequal_head_sizes: bool = False

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        flag(self.unequal_head_sizes, "unequal_head_sizes")
        dims = _roles(self.dims, "dims")
        if len(set(dims)) != len(dims) or not _NEEDED <= set(dims) <= set(ROLES):
            raise ValueError(
                f"dims is {dims}: expected each at most once of {', '.join(ROLES)}, "
                f"with {', '.join(sorted(_NEEDED))} among them"
            )
        if self.unequal_head_sizes and "kv" in dims:
            raise ValueError(f"dims is {dims}: expected no 'kv' with unequal_head_sizes")
        nhd = dims if self.nhd is None else _roles(self.nhd, "nhd")
        exchanged = {"token": "head", "head": "token"} if "head" in dims else {}
        hnd = (
            tuple(exchanged.get(d, d) for d in nhd) if self.hnd is None else _roles(self.hnd, "hnd")
        )
        orders = {"dims": dims, "nhd": nhd, "hnd": hnd}
        for name in ("nhd_cross_layers", "hnd_cross_layers"):
            order = getattr(self, name)
            orders[name] = None if order is None else _roles(order, name)
        for name, order in orders.items():
            expected = ("layer", *dims) if name.endswith("cross_layers") else dims
            if order is not None and sorted(order) != sorted(expected):
                raise ValueError(f"{name} is {order}: expected an order of {expected}")
            object.__setattr__(self, name, order)

    @classmethod
    def from_engine(
        cls, backend: EngineBackend, *, head_size: int = _PROBE["element"]
    ) -> AttentionBackend:
        """The layout that an engine's own backend class answers, whatever the engine's version.

        Orders in memory differ between versions of an engine, and with its settings: a name of this
        module is one of them, the class is the one that runs. The class answers for the layout to which
        the engine is set, so both `layout`s of the result are that order. An order that the class does
        not have is the order of its dimensions, with packed layers the layer first. head_size: one that
        the backend accepts.

        TypeError for an object without `get_kv_cache_shape`; ValueError for a shape with dimensions other
        than blocks, tokens, heads, elements (or twice as many: K, then V) and K and V, and for a stride
        order that is not one of the shape. What the class raises otherwise passes through.

        >>> class EngineBackend:
        ...     def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        ...         return (num_blocks, 2, block_size, num_kv_heads, head_size)
        ...     def get_kv_cache_stride_order(include_num_layers_dimension=False):
        ...         return (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
        >>> found = AttentionBackend.from_engine(EngineBackend)
        >>> found.dims
        ('block', 'kv', 'token', 'head', 'element')
        >>> found.memory_order(cross_layers=True)
        ('block', 'head', 'layer', 'kv', 'token', 'element')
        """
        dims, shape = engine_dims(backend, head_size)
        if None in dims:
            raise ValueError(
                f"backend gives the shape {shape} for {_PROBE['block']} blocks of {_PROBE['token']} "
                f"tokens, {_PROBE['head']} heads and head_size {head_size}: expected no dimension but "
                "these, twice head_size, and 2 for K and V"
            )
        own, packed = (engine_order(backend, dims, cross_layers=each) for each in (False, True))
        name = getattr(backend, "get_name", None)
        return cls(
            str(name()) if callable(name) else getattr(backend, "__name__", type(backend).__name__),
            dims,
            nhd=own,
            hnd=own,
            nhd_cross_layers=packed,
            hnd_cross_layers=packed,
            # Built-in MLA has it too: the latent, then its rotary part.
            unequal_head_sizes="kv" not in dims and ("head" not in dims or 2 * head_size in shape),
        )

    @property
    def is_mla(self) -> bool:
        """One latent vector per token: neither K and V nor heads."""
        return "kv" not in self.dims and "head" not in self.dims

    @property
    def blocks_first(self) -> bool:
        """The first dimension counts blocks, K and V of a block together; not MLA, which has no V."""
        return blocks_first(self.dims, self.is_mla)

    def shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
    ) -> tuple[int, ...]:
        """The cache of one layer as the backend indexes it; heads are those of one rank.

        `v_head_size` None: as K's, or none for a backend without V, which takes 0 too. ValueError where
        K and V must be of one size and are not, and for a size of V where there is no V. MLA has no use
        for `num_kv_heads`.

        >>> backend("FLASH_ATTN_DIFFKV").shape(100, 16, 8, 192, v_head_size=128)
        (100, 16, 8, 320)
        """
        sizes = {
            "kv": 2,
            "block": integer(num_blocks, "num_blocks", 0),
            "token": integer(block_size, "block_size", 1),
            "head": integer(num_kv_heads, "num_kv_heads", 1),
            "element": integer(head_size, "head_size", 1),
        }
        v_size = self.v_size(head_size, v_head_size)
        if "kv" not in self.dims:
            sizes["element"] += v_size
        elif v_size != head_size:
            raise ValueError(
                f"head_size is {head_size}, v_head_size is {v_head_size}: "
                f"expected equal ones for backend {self.name!r}"
            )
        return tuple(sizes[dim] for dim in self.dims)

    def v_size(self, head_size: int, v_head_size: int | None = None) -> int:
        """V's head size where `v_head_size` is given, or None: K's, or 0 for a backend without V.

        ValueError for V of a backend that has none.
        """
        if v_head_size is not None:
            v_head_size = integer(v_head_size, "v_head_size", 0)
        has_v = "kv" in self.dims or self.unequal_head_sizes
        if v_head_size and not has_v:
            raise ValueError(
                f"v_head_size is {v_head_size}: expected 0 or None for backend {self.name!r}, "
                "which has no V"
            )
        if v_head_size is not None:
            return v_head_size
        return head_size if has_v and not self.is_mla else 0

    def stride_order(self, layout: str = "NHD", cross_layers: bool = False) -> tuple[int, ...]:
        """The permutation from the indexed shape to the order in memory, outermost first.

        With `cross_layers` dimension 0 is the layer: the indexed shape is `(num_layers, *shape)`.
        ValueError for a layout other than "NHD" and "HND", and for a backend that does not pack.

        >>> backend("FLASH_ATTN").stride_order("NHD", cross_layers=True)  # blocks, layers, K and V, ...
        (2, 0, 1, 3, 4, 5)
        """
        dims = ("layer", *self.dims) if flag(cross_layers, "cross_layers") else self.dims
        return tuple(dims.index(role) for role in self.memory_order(layout, cross_layers))

    def memory_order(self, layout: str = "NHD", cross_layers: bool = False) -> tuple[str, ...]:
        """The roles in memory, outermost first. ValueError as `stride_order`.

        >>> backend("MLA").memory_order(cross_layers=True)
        ('block', 'layer', 'token', 'element')
        """
        check_layout(layout, "layout")
        order = getattr(
            self, layout.lower() + ("_cross_layers" if flag(cross_layers, "cross_layers") else "")
        )
        if order is None:
            raise ValueError(
                f"layout is {layout!r} with cross_layers: backend {self.name!r} has no order for it, "
                "expected one that packs layers together"
            )
        return order

    def physical_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
        *,
        layout: str = "NHD",
        num_layers: int | None = None,
    ) -> tuple[int, ...]:
        """The shape in memory; with `num_layers` that of all layers packed. ValueError as above.

        >>> backend("TRITON_ATTN").physical_shape(100, 16, 8, 128, layout="HND", num_layers=32)
        (100, 8, 32, 2, 16, 128)
        """
        shape = self.shape(num_blocks, block_size, num_kv_heads, head_size, v_head_size)
        if num_layers is not None:
            shape = (integer(num_layers, "num_layers", 1), *shape)
        return tuple(shape[i] for i in self.stride_order(layout, num_layers is not None))


def _roles(order: Sequence[str], name: str) -> tuple[str, ...]:
    """The roles of dimensions in some order. TypeError or ValueError."""
    roles = tuple(listed(order, name, f"an order of {', '.join(ROLES)}"))
    if isinstance(order, str) or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"{name} is {shown(order)}: expected an order of {', '.join(ROLES)}")
    return roles


def blocks_first(dims: Sequence[str | None], is_mla: bool) -> bool:
    """Whether dimensions of these roles begin with blocks that hold both K and V."""
    return dims[0] == "block" and not is_mla


@dataclass(frozen=True)
class Placement:
    """Where each element of a page lies, for one memory order and sizes; made by `place_elements`.

    A page is one stretch of bytes in each of several regions. All arrays are int64, read-only, in
    bytes; p counts K and, if there is any, V. Element e of a head of a token begins
    `kv_offsets[layer, p] + token * token_strides[p] + head * head_strides[p] + e * element_bytes`
    bytes behind where the page begins in region `regions[layer, p] + head * head_regions`.
    """

    regions: np.ndarray  # [num_layers, p]
    kv_offsets: np.ndarray  # [num_layers, p]
    token_strides: np.ndarray  # [p]
    head_strides: np.ndarray  # [p]
    head_bytes: np.ndarray  # [p]: one head of one token
    region_bytes: np.ndarray  # [r]: of a page
    scale_regions: np.ndarray  # [num_layers], of the scales of a layer
    scale_offsets: np.ndarray  # [num_layers]
    token_count: int  # of a page
    head_count: int
    scale_bytes_per_token: int
    head_regions: int = 0  # from the region of a head to that of the next; 0: they share one

    @functools.cached_property
    def is_contiguous(self) -> bool:
        """Whether K of a page in a layer is one stretch of bytes, and V too."""
        if self.head_regions:
            return False
        counts = ((self.token_strides, self.token_count), (self.head_strides, self.head_count))
        volume = self.head_bytes * (self.token_count * self.head_count)
        extent = self.head_bytes + sum(stride * (count - 1) for stride, count in counts)
        return bool((extent == volume).all())

    @property
    def has_kv_together(self) -> bool:
        """Whether K and V of a page in a layer lie in one region."""
        return bool((self.regions == self.regions[:, :1]).all())

    @functools.cached_property
    def has_equal_layers(self) -> bool:
        """Whether V of a page lies in the region of its K, equally far behind it in all layers."""
        behind = self.kv_offsets - self.kv_offsets[:, :1]
        return self.has_kv_together and bool((behind == behind[0]).all())

    def with_scales_as_part(self) -> Placement:
        """The same with the scales as one more p, of which each head of a token has an equal share."""
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
        """int64[n, 3]: (region, offset, length) of the stretches of K or V of a layer, merged."""
        token, head = np.indices((self.token_count, self.head_count)).reshape(2, -1)
        begins = token * self.token_strides[p] + head * self.head_strides[p]
        table = np.empty((len(begins), 3), np.int64)
        table[:, 0] = self.regions[layer, p] + head * self.head_regions
        table[:, 1] = begins + self.kv_offsets[layer, p]
        table[:, 2] = self.head_bytes[p]
        return merged_runs(table[np.lexsort((table[:, 1], table[:, 0]))])

    def of_head(self, head: int) -> Placement:
        """The placement of one head, as if there were no other."""
        return replace(
            self,
            regions=_read_only(self.regions + head * self.head_regions),
            kv_offsets=_read_only(self.kv_offsets + head * self.head_strides),
            head_count=1,
            head_regions=0,
        )

    def layer_runs(self, layer: int, num_parts: int | None = None) -> np.ndarray:
        """int64[n, 3]: as `runs`, K and V of a layer together, or the first `num_parts` of its parts."""
        table = np.concatenate(
            [self.runs(layer, p) for p in range(num_parts or len(self.head_bytes))]
        )
        return merged_runs(table[np.lexsort((table[:, 1], table[:, 0]))])


def merged_runs(table: np.ndarray) -> np.ndarray:
    """Runs int64[n, 3], ascending, with those that meet in a region made one."""
    begins = np.ones(len(table), bool)
    ends = table[:-1, 1] + table[:-1, 2]
    begins[1:] = (table[1:, 0] != table[:-1, 0]) | (table[1:, 1] != ends)
    first = np.flatnonzero(begins)
    merged = table[first]
    merged[:, 2] = np.add.reduceat(table[:, 2], first)
    return merged


def check_memory_order(order: Sequence[str], name: str = "memory_order") -> tuple[str, ...]:
    """The order as a tuple. ValueError unless a page can be read by its blocks.

    Block, token and element are needed; element is the last; before block come layer, kv and head alone.
    Without "layer" each layer lies by itself; without "kv" V of a head follows its K; without "head"
    there is one.
    """
    roles = listed(order, name, "a sequence of roles")
    if isinstance(order, str) or not all(isinstance(role, str) for role in roles):
        raise TypeError(f"{name} is {shown(order)}: expected a sequence of roles")
    order = tuple(roles)
    known = {"layer", *ROLES}
    if len(set(order)) != len(order) or not _NEEDED <= set(order) <= known:
        raise ValueError(
            f"{name} is {order}: expected each at most once of layer, {', '.join(ROLES)}, "
            f"with {', '.join(sorted(_NEEDED))} among them"
        )
    if order[-1] != "element" or not set(order[: order.index("block")]) <= {"layer", "kv", "head"}:
        raise ValueError(
            f"{name} is {order}: expected element last, and no role but layer, kv and head before block"
        )
    return order


def full_memory_order(order: Sequence[str]) -> tuple[str, ...]:
    """All six roles: what a checked order leaves out, put where it means.

    >>> full_memory_order(("block", "token", "element"))
    ('layer', 'block', 'token', 'head', 'kv', 'element')
    """
    full = list(order)
    if "layer" not in full:
        full.insert(0, "layer")
    if "head" not in full:
        full.insert(len(full) - 1, "head")
    if "kv" not in full:
        full.insert(len(full) - 1, "kv")
    return tuple(full)


def layout_of(order: Sequence[str]) -> str:
    """ "NHD" or "HND": which of tokens and heads comes first in memory.

    >>> layout_of(backend("FLASHINFER").memory_order("HND"))
    'HND'
    """
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
    """Where the elements of a page lie, in as few regions as the order allows.

    Roles before "block" count regions. Scales of a layer (all heads of a token together) follow K and
    V of the layer in the page, or have a region of their own where "kv" comes before "block".
    ValueError for an order that has no blocks of tokens, for "head" left out where there are several,
    and for scales where a layer's K and V of a page do not lie together.

    >>> sizes = dict(num_layers=2, block_size=4, num_kv_heads=2, head_size=8, v_head_size=8)
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
    volume = head_bytes.copy()  # of what lies further inside, for K and for V
    kv_inside = "kv" in inner
    if scale_bytes and "head" in outer:
        raise ValueError(
            f"scale_bytes_per_token is {scale_bytes_per_token}: expected 0 with the memory order "
            f"{order}, in which the heads of a token do not lie together"
        )
    for n, role in reversed(list(enumerate(inner))):
        if role == "kv":
            kv_starts = np.cumsum(volume) - volume
            volume = np.full_like(volume, volume.sum())
        elif role == "layer" and scale_bytes:
            if n > 0 or not kv_inside:
                raise ValueError(
                    f"scale_bytes_per_token is {scale_bytes_per_token}: expected 0 with the memory "
                    f"order {order}, in which a layer's K and V of a page do not lie together"
                )
            scale_start, volume = int(volume[0]), volume + scale_bytes
            strides[role], volume = volume, volume * num_layers
        else:
            strides[role], volume = volume, volume * counts[role]
    scales_apart = bool(scale_bytes) and not kv_inside
    if scale_bytes and kv_inside and "layer" in outer:
        scale_start, volume = int(volume[0]), volume + scale_bytes
    layer, p = np.indices((num_layers, len(sizes)))
    # A region for each choice of what comes before the blocks, the last role's the fastest.
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


_BACKENDS: dict[str, AttentionBackend] = {}


def register_backend(described: AttentionBackend) -> AttentionBackend:
    """Makes a backend known by its name, and returns it.

    The same again is no error; another one of a known name is a ValueError.

    >>> _ = register_backend(AttentionBackend("FLAT", ("block", "token", "head", "element")))
    >>> backend("FLAT").shape(10, 16, 8, 64)
    (10, 16, 8, 64)
    """
    if not isinstance(described, AttentionBackend):
        raise TypeError(f"backend is {shown(described)}: expected an AttentionBackend")
    known = _BACKENDS.setdefault(described.name, described)
    if known != described:
        raise ValueError(
            f"name is {shown(described.name)}, registered as {known}: expected the same, or another name"
        )
    return described


def backend(name: str) -> AttentionBackend:
    """The backend of this name. ValueError, with the known names, for another.

    >>> backend("FLASH_ATTN").shape(100, 16, 8, 128), backend("MLA").shape(100, 16, 1, 576)
    ((2, 100, 16, 8, 128), (100, 16, 576))
    """
    if not isinstance(name, str) or name not in _BACKENDS:
        raise ValueError(f"backend is {shown(name)}: expected one of {', '.join(backend_names())}")
    return _BACKENDS[name]


def described_backend(given: str | AttentionBackend | EngineBackend) -> AttentionBackend:
    """A registered name, a description, or an engine's own class, as a description.

    TypeError for anything else; otherwise as `backend` and `AttentionBackend.from_engine`.
    """
    if isinstance(given, AttentionBackend):
        return given
    if isinstance(given, str):
        return backend(given)
    return AttentionBackend.from_engine(given)


def engine_dims(
    given: EngineBackend, head_size: int = _PROBE["element"]
) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """The roles of the dimensions of an engine's own backend, None where unknown, and the shape.

    TypeError for an object without `get_kv_cache_shape`; ValueError where blocks or tokens have no
    dimension.
    """
    ask = getattr(given, "get_kv_cache_shape", None) or getattr(given, "shape", None)
    if not callable(ask) or isinstance(given, str):
        raise TypeError(
            f"backend is {shown(given)}: expected a name, an AttentionBackend or an object with "
            "get_kv_cache_shape"
        )
    sizes = {**_PROBE, "element": head_size}

    def shape_for(heads: int) -> tuple[int, ...]:
        sizes["head"] = heads
        return tuple(
            ask(
                num_blocks=sizes["block"],
                block_size=sizes["token"],
                num_kv_heads=heads,
                head_size=head_size,
            )
        )

    try:
        shape = shape_for(_PROBE["head"])
    except Exception:  # a backend with one latent may refuse several heads
        shape = shape_for(1)
    roles = {2: "kv", 2 * head_size: "element"} | {size: role for role, size in sizes.items()}
    dims = tuple(roles.get(size) for size in shape)
    if any(dims.count(role) != 1 for role in ("block", "token")):
        raise ValueError(
            f"backend gives the shape {shape} for {sizes['block']} blocks of {sizes['token']} tokens: "
            "expected one dimension of each"
        )
    return dims, shape


def engine_order(
    given: EngineBackend, dims: tuple[str | None, ...], *, cross_layers: bool
) -> tuple[str | None, ...]:
    """The roles in memory, outermost first, as an engine's own backend answers; as `dims` without one.

    ValueError for a stride order that is not one of these dimensions.
    """
    if cross_layers:
        dims = ("layer", *dims)
    ask = getattr(given, "get_kv_cache_stride_order", None)
    if ask is None or (
        cross_layers and "include_num_layers_dimension" not in inspect.signature(ask).parameters
    ):
        return dims
    try:
        order = ask(include_num_layers_dimension=True) if cross_layers else ask()
    except NotImplementedError:
        return dims
    if sorted(order) != list(range(len(dims))):
        raise ValueError(
            f"backend gives the stride order {tuple(order)}: expected one of 0 to {len(dims) - 1}"
        )
    return tuple(dims[i] for i in order)


def backend_of_shape(shape: Sequence[int], name: str) -> AttentionBackend:
    """The built-in backend that a layer's cache of this shape is of: K and V in a dimension, or MLA.

    ValueError where it is of none, or of two (both first dimensions are 2).
    """
    shape = list(shape)
    if len(shape) == 3:
        return backend("MLA")
    if len(shape) != 5 or 2 not in shape[:2]:
        raise ValueError(
            f"{name} has shape {shape}: expected [2, num_blocks, block_size, num_kv_heads, head_size], "
            "[num_blocks, 2, ...], [num_blocks, block_size, head_size], or a backend that says what "
            "its dimensions are"
        )
    if shape[:2] == [2, 2]:
        raise ValueError(
            f"{name} has shape {shape}, which may be either way round: expected a backend"
        )
    return backend("FLASH_ATTN" if shape[0] == 2 else "FLASHINFER")


def backend_names() -> list[str]:
    """Names of all registered backends, sorted."""
    return sorted(_BACKENDS)


# The orders of packed layers are those of the serving engines, so that a tensor of theirs is understood;
# BLOCK_MAJOR is this library's: of a page one layer follows the other, in HND too.
_NHD_PACKED = ("block", "layer", "kv", "token", "head", "element")
_HND_PACKED = ("block", "head", "layer", "kv", "token", "element")
for _described in (
    AttentionBackend(
        "FLASH_ATTN",
        ("kv", "block", "token", "head", "element"),
        nhd_cross_layers=_NHD_PACKED,
        hnd_cross_layers=_HND_PACKED,
    ),
    AttentionBackend(
        "FLASH_ATTN_DIFFKV",
        ("block", "token", "head", "element"),
        nhd_cross_layers=("block", "layer", "token", "head", "element"),
        hnd_cross_layers=("block", "head", "layer", "token", "element"),
        unequal_head_sizes=True,
    ),
    AttentionBackend(
        "FLASHINFER",
        ("block", "kv", "token", "head", "element"),
        nhd_cross_layers=_NHD_PACKED,
        hnd_cross_layers=("block", "kv", "head", "layer", "token", "element"),
    ),
    AttentionBackend(
        "TRITON_ATTN",
        ("block", "kv", "token", "head", "element"),
        nhd_cross_layers=_NHD_PACKED,
        hnd_cross_layers=_HND_PACKED,
    ),
    AttentionBackend(
        "MLA",
        ("block", "token", "element"),
        nhd_cross_layers=("block", "layer", "token", "element"),
        hnd_cross_layers=("block", "layer", "token", "element"),
        unequal_head_sizes=True,
    ),
    AttentionBackend(
        "BLOCK_MAJOR",
        ("block", "kv", "token", "head", "element"),
        nhd_cross_layers=_NHD_PACKED,
        hnd_cross_layers=("block", "layer", "kv", "head", "token", "element"),
    ),
):
    register_backend(_described)


def choose_layout(required: str | None | Iterable[str | None] | Mapping[str, str | None]) -> str:
    """The cache layout that connectors ask for: "HND" or "NHD"; "NHD" where none asks.

    required: what one connector requires (None: nothing), or several, or several by name. That none
    asks is logged once per process. ValueError where two ask for different layouts, and for any other.

    >>> choose_layout("HND"), choose_layout({"nixl": "HND", "offload": None})
    ('HND', 'HND')
    """
    if required is None or isinstance(required, str):
        required = [required]
    if not isinstance(required, Mapping):
        required = dict(enumerate(listed(required, "required")))
    asked = {connector: layout for connector, layout in required.items() if layout is not None}
    for connector, layout in asked.items():
        check_layout(layout, f"the layout that connector {connector!r} requires")
    if len(set(asked.values())) > 1:
        wishes = ", ".join(f"connector {c!r} requires {layout!r}" for c, layout in asked.items())
        raise ValueError(f"{wishes}: expected one layout")
    if not asked:
        _log_default()
        return "NHD"
    return next(iter(asked.values()))


@functools.cache
def _log_default() -> None:
    _log.info("no connector requires a cache layout: taking NHD")


def check_layout(layout: str, name: str) -> None:
    """ValueError for a name of no layout."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name} is {shown(layout)}: expected 'NHD' or 'HND'")
