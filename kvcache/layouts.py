"""How attention backends shape their caches and order them in memory: a registry, open for more.

A dimension is named by its role: "kv" (K, V), "block", "token" (within a block), "head", "element" (of a
head), and "layer" where the layers of a block are packed together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcache.checks import integer
from kvcache.specs import LAYOUTS

ROLES = ("kv", "block", "token", "head", "element")
_NEEDED = {"block", "token", "element"}

_log = logging.getLogger("kvcache")


@dataclass(frozen=True)
class AttentionBackend:
    """What one backend's cache looks like.

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
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name is {self.name!r}: expected a name that is not empty")
        dims = tuple(self.dims)
        if len(set(dims)) != len(dims) or not _NEEDED <= set(dims) <= set(ROLES):
            raise ValueError(
                f"dims is {dims}: expected each at most once of {', '.join(ROLES)}, "
                f"with {', '.join(sorted(_NEEDED))} among them"
            )
        if self.unequal_head_sizes and "kv" in dims:
            raise ValueError(f"dims is {dims}: expected no 'kv' with unequal_head_sizes")
        nhd = dims if self.nhd is None else tuple(self.nhd)
        exchanged = {"token": "head", "head": "token"} if "head" in dims else {}
        hnd = tuple(exchanged.get(d, d) for d in nhd) if self.hnd is None else tuple(self.hnd)
        settled = {"dims": dims, "nhd": nhd, "hnd": hnd}
        for name in ("nhd_cross_layers", "hnd_cross_layers"):
            order = getattr(self, name)
            settled[name] = None if order is None else tuple(order)
        for name, order in settled.items():
            expected = ("layer", *dims) if name.endswith("cross_layers") else dims
            if order is not None and sorted(order) != sorted(expected):
                raise ValueError(f"{name} is {order}: expected an order of {expected}")
            object.__setattr__(self, name, order)

    @property
    def is_mla(self) -> bool:
        """One latent vector per token: neither K and V nor heads."""
        return "kv" not in self.dims and "head" not in self.dims

    @property
    def blocks_first(self) -> bool:
        """The first dimension counts blocks, K and V of a block together; not MLA, which has no V."""
        return self.dims[0] == "block" and not self.is_mla

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
        if v_head_size is not None:
            integer(v_head_size, "v_head_size", 0)
        if self.unequal_head_sizes:
            alike = head_size if "head" in self.dims else 0
            sizes["element"] += alike if v_head_size is None else v_head_size
        elif "kv" not in self.dims:
            if v_head_size:
                raise ValueError(
                    f"v_head_size is {v_head_size}: expected 0 or None for backend {self.name!r}, "
                    "which has no V"
                )
        elif v_head_size not in (None, head_size):
            raise ValueError(
                f"head_size is {head_size}, v_head_size is {v_head_size}: "
                f"expected equal ones for backend {self.name!r}"
            )
        return tuple(sizes[dim] for dim in self.dims)

    def stride_order(self, layout: str = "NHD", cross_layers: bool = False) -> tuple[int, ...]:
        """The permutation from the indexed shape to the order in memory, outermost first.

        With `cross_layers` dimension 0 is the layer: the indexed shape is `(num_layers, *shape)`.
        ValueError for a layout other than "NHD" and "HND", and for a backend that does not pack.

        >>> backend("FLASH_ATTN").stride_order("NHD", cross_layers=True)  # blocks, layers, K and V, ...
        (2, 0, 1, 3, 4, 5)
        """
        dims = ("layer", *self.dims) if cross_layers else self.dims
        return tuple(dims.index(role) for role in self.memory_order(layout, cross_layers))

    def memory_order(self, layout: str = "NHD", cross_layers: bool = False) -> tuple[str, ...]:
        """The roles in memory, outermost first. ValueError as `stride_order`.

        >>> backend("MLA").memory_order(cross_layers=True)
        ('block', 'layer', 'token', 'element')
        """
        _check_layout(layout, "layout")
        order = getattr(self, layout.lower() + ("_cross_layers" if cross_layers else ""))
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


_BACKENDS: dict[str, AttentionBackend] = {}


def register_backend(described: AttentionBackend) -> AttentionBackend:
    """Makes a backend known by its name, and returns it.

    The same again is no error; another one of a known name is a ValueError.

    >>> _ = register_backend(AttentionBackend("FLAT", ("block", "token", "head", "element")))
    >>> backend("FLAT").shape(10, 16, 8, 64)
    (10, 16, 8, 64)
    """
    if not isinstance(described, AttentionBackend):
        raise TypeError(f"backend is {described!r}: expected an AttentionBackend")
    known = _BACKENDS.setdefault(described.name, described)
    if known != described:
        raise ValueError(
            f"name is {described.name!r}, registered as {known}: expected the same, or another name"
        )
    return described


def backend(name: str) -> AttentionBackend:
    """The backend of this name. ValueError, with the known names, for another.

    >>> backend("FLASH_ATTN").shape(100, 16, 8, 128), backend("MLA").shape(100, 16, 1, 576)
    ((2, 100, 16, 8, 128), (100, 16, 576))
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend is {name!r}: expected one of {', '.join(backend_names())}")
    return _BACKENDS[name]


def backend_names() -> list[str]:
    """Names of all registered backends, sorted."""
    return sorted(_BACKENDS)


# The orders of packed layers are those of the serving engines, so that a tensor of theirs is understood.
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
        required = dict(enumerate(required))
    asked = {connector: layout for connector, layout in required.items() if layout is not None}
    for connector, layout in asked.items():
        _check_layout(layout, f"the layout that connector {connector!r} requires")
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


def _check_layout(layout: str, name: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{name} is {layout!r}: expected 'NHD' or 'HND'")
