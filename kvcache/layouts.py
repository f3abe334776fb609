# SPDX-License-Identifier: Apache-2.0
"""Cache layouts. A layout is the shape of an attention backend's cache and the memory order of its
dimensions.

To add a layout, register an `AttentionBackend`; no other code is needed. `kvcache.placement` derives the
position of each element from the memory order.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.checks import check_name, flag, integer, listed, one_of, shown
from kvcache.extensions import load_extensions
from kvcache.placement import NEEDED_ROLES, ROLES, checked_roles
from kvcache.specs import LAYOUTS

_log = logging.getLogger("kvcache")

# Distinct probe sizes that identify the dimensions in the shape that an engine's backend returns.
# 4096 is a multiple of the block sizes that backends accept. No size is twice another, because some
# backends store K and V in one dimension of twice the head size.
_PROBE = {"block": 7919, "token": 4096, "head": 11, "element": 576}


class EngineBackend(Protocol):
    """An engine's own backend class, or an instance of it, that reports the layout of the running engine.

    `get_kv_cache_stride_order` returns the order of the shape's dimensions in memory, outermost first.
    If its argument is True, it returns the order for all layers packed together, where dimension 0 is
    the layer. The method may be missing, lack the argument, or raise NotImplementedError.
    """

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]: ...

    def get_kv_cache_stride_order(
        self, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class AttentionBackend:
    """The cache layout of one attention backend.

    Args:
        name: Name of the backend.
        dims: Roles of the dimensions, in the order in which the backend indexes them.
        nhd: Memory order of the dimensions for layout "NHD", outermost first. None: `dims`.
        hnd: Memory order for layout "HND". None: `dims` with "token" and "head" exchanged.
        nhd_cross_layers: Memory order, including "layer", if all layers are packed into one tensor.
            None: the backend does not pack layers.
        hnd_cross_layers: The same for "HND".
        unequal_head_sizes: Whether the last dimension contains a head's K followed by its V, which may
            differ in size. If False, K and V have the same size, or there is no V if `dims` lacks "kv".

    Raises:
        ValueError: A role is unknown, missing or repeated, or an order is not a permutation of the
            roles in `dims`.

    Example:
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
        dims = checked_roles(self.dims, "dims")
        if len(set(dims)) != len(dims) or not NEEDED_ROLES <= set(dims) <= set(ROLES):
            raise ValueError(
                f"dims is {dims}: expected some of {', '.join(ROLES)}, each at most once, "
                f"including {', '.join(sorted(NEEDED_ROLES))}"
            )
        if self.unequal_head_sizes and "kv" in dims:
            raise ValueError(f"dims is {dims}: expected no 'kv' with unequal_head_sizes")
        nhd = dims if self.nhd is None else checked_roles(self.nhd, "nhd")
        exchanged = {"token": "head", "head": "token"} if "head" in dims else {}
        hnd = tuple(exchanged.get(d, d) for d in nhd)
        if self.hnd is not None:
            hnd = checked_roles(self.hnd, "hnd")
        orders = {"dims": dims, "nhd": nhd, "hnd": hnd}
        for name in ("nhd_cross_layers", "hnd_cross_layers"):
            order = getattr(self, name)
            orders[name] = None if order is None else checked_roles(order, name)
        for name, order in orders.items():
            expected = ("layer", *dims) if name.endswith("cross_layers") else dims
            if order is not None and sorted(order) != sorted(expected):
                raise ValueError(f"{name} is {order}: expected a permutation of {expected}")
            object.__setattr__(self, name, order)

    @classmethod
    def from_engine(
        cls, backend: EngineBackend, *, head_size: int = _PROBE["element"]
    ) -> AttentionBackend:
        """Derive the layout from an engine's own backend class. Works for any version of the
        engine.

        Memory orders depend on an engine's version and settings. The backends registered in this
        module describe a single engine version, whereas the class describes the running engine. The
        class reports only the configured layout, so the result uses this order for both "NHD" and
        "HND". If the class reports no order, the order of its dimensions is used, preceded by the
        layer if layers are packed.

        Args:
            backend: The class or an instance.
            head_size: A head size that the backend accepts.

        Returns:
            The layout.

        Raises:
            TypeError: The object has no `get_kv_cache_shape`.
            ValueError: The shape has a dimension other than blocks, tokens, heads, K/V, and
                elements (of K, or of K followed by V), or the stride order does not match the
                shape. Other exceptions raised by the class are not caught.

        Example:
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
                f"backend returned the shape {shape} for {_PROBE['block']} blocks of {_PROBE['token']} "
                f"tokens, {_PROBE['head']} heads and head_size {head_size}: expected only dimensions of "
                "these sizes, of twice head_size, and of 2 (K and V)"
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
            # Also True for the built-in MLA backend, where the rotary part follows the latent.
            unequal_head_sizes="kv" not in dims and ("head" not in dims or 2 * head_size in shape),
        )

    @property
    def is_mla(self) -> bool:
        """Whether the cache has one latent vector per token, without heads or a dimension for K and V."""
        return "kv" not in self.dims and "head" not in self.dims

    @property
    def blocks_first(self) -> bool:
        """Whether each block contains both K and V, because it is the first dimension."""
        return blocks_first(self.dims, self.is_mla)

    def shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache in the backend's dimension order.

        Args:
            num_blocks: Number of blocks.
            block_size: Tokens per block.
            num_kv_heads: KV heads on this rank. Ignored by MLA.
            head_size: Elements of K per head.
            v_head_size: Elements of V per head. None: `head_size`, or 0 for a backend without V.

        Returns:
            The shape.

        Raises:
            ValueError: K and V differ in size although the backend requires equal sizes, or
                `v_head_size` is given for a backend without V.

        Example:
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
                f"expected equal sizes for backend {self.name!r}"
            )
        return tuple(sizes[dim] for dim in self.dims)

    def v_size(self, head_size: int, v_head_size: int | None = None) -> int:
        """Return the head size of V. Defaults to the head size of K, or to 0 for a backend without
        V.

        Args:
            head_size: Elements of K per head.
            v_head_size: Elements of V per head, or None.

        Raises:
            ValueError: `v_head_size` is positive, but the backend has no V.
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
        """Return the dimensions of the indexed shape in memory order, outermost first.

        Args:
            layout: "NHD" or "HND".
            cross_layers: Whether all layers are packed. The indexed shape is then `(num_layers, *shape)`.

        Raises:
            ValueError: The layout is unknown, or the backend does not pack layers.

        Example:
            >>> backend("FLASH_ATTN").stride_order("NHD", cross_layers=True)  # block, layer, kv, ...
            (2, 0, 1, 3, 4, 5)
        """
        dims = ("layer", *self.dims) if flag(cross_layers, "cross_layers") else self.dims
        return tuple(dims.index(role) for role in self.memory_order(layout, cross_layers))

    def memory_order(self, layout: str = "NHD", cross_layers: bool = False) -> tuple[str, ...]:
        """Return the roles in memory order, outermost first. Takes the arguments of `stride_order`
        and raises the same errors.

        Example:
            >>> backend("MLA").memory_order(cross_layers=True)
            ('block', 'layer', 'token', 'element')
        """
        check_layout(layout, "layout")
        order = getattr(
            self, layout.lower() + ("_cross_layers" if flag(cross_layers, "cross_layers") else "")
        )
        if order is None:
            raise ValueError(
                f"layout is {layout!r} with cross_layers: expected a backend that packs layers together, "
                f"but backend {self.name!r} has no order for it"
            )
        return order


def blocks_first(dims: Sequence[str | None], is_mla: bool) -> bool:
    """Return whether the block is the first dimension, so that each block contains both K and V."""
    return dims[0] == "block" and not is_mla


_BACKENDS: dict[str, AttentionBackend] = {}


def register_backend(described: AttentionBackend) -> AttentionBackend:
    """Register a backend under its name.

    Registering an identical backend again has no effect.

    Args:
        described: The backend.

    Returns:
        The same backend.

    Raises:
        ValueError: The name already belongs to a different backend.

    Example:
        >>> _ = register_backend(AttentionBackend("FLAT", ("block", "token", "head", "element")))
        >>> backend("FLAT").shape(10, 16, 8, 64)
        (10, 16, 8, 64)
    """
    if not isinstance(described, AttentionBackend):
        raise TypeError(f"backend is {shown(described)}: expected an AttentionBackend")
    known = _BACKENDS.setdefault(described.name, described)
    if known != described:
        raise ValueError(
            f"name is {shown(described.name)}, which is already registered for {known}: expected an "
            "identical backend, or a different name"
        )
    return described


def backend(name: str) -> AttentionBackend:
    """Return the backend registered under a name.

    Raises:
        ValueError: The name is unknown. The message lists the known names.

    Example:
        >>> backend("FLASH_ATTN").shape(100, 16, 8, 128), backend("MLA").shape(100, 16, 1, 576)
        ((2, 100, 16, 8, 128), (100, 16, 576))
    """
    if not isinstance(name, str) or (name not in _BACKENDS and name not in backend_names()):
        raise ValueError(f"backend is {shown(name)}: expected one of {', '.join(backend_names())}")
    return _BACKENDS[name]


def described_backend(given: str | AttentionBackend | EngineBackend) -> AttentionBackend:
    """Return the backend with a registered name, of an engine's own class, or the given one."""
    if isinstance(given, AttentionBackend):
        return given
    if isinstance(given, str):
        return backend(given)
    return AttentionBackend.from_engine(given)


def engine_dims(
    given: EngineBackend, head_size: int = _PROBE["element"]
) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """Return the role of each dimension (None: unknown) of an engine backend's cache, and its shape.

    Raises TypeError if there is no `get_kv_cache_shape`, and ValueError for an unknown block or token
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
    except Exception:  # a backend with a single latent may reject more than one head
        shape = shape_for(1)
    roles = {2: "kv", 2 * head_size: "element"} | {size: role for role, size in sizes.items()}
    dims = tuple(roles.get(size) for size in shape)
    if any(dims.count(role) != 1 for role in ("block", "token")):
        raise ValueError(
            f"backend returned the shape {shape} for {sizes['block']} blocks of {sizes['token']} tokens: "
            "expected one dimension of each"
        )
    return dims, shape


def engine_order(
    given: EngineBackend, dims: tuple[str | None, ...], *, cross_layers: bool
) -> tuple[str | None, ...]:
    """Return the memory order that an engine's backend reports, outermost first, or else `dims`."""
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
            f"backend returned the stride order {tuple(order)}: expected a permutation of 0 to "
            f"{len(dims) - 1}"
        )
    return tuple(dims[i] for i in order)


def backend_of_shape(shape: Sequence[int], name: str) -> AttentionBackend:
    """Return the built-in backend whose cache for one layer has this shape. Raises ValueError."""
    shape = list(shape)
    if len(shape) == 3:
        return backend("MLA")
    if len(shape) != 5 or 2 not in shape[:2]:
        raise ValueError(
            f"{name} has shape {shape}: expected [2, num_blocks, block_size, num_kv_heads, head_size], "
            "[num_blocks, 2, ...], [num_blocks, block_size, head_size], or a backend that defines the "
            "dimensions"
        )
    if shape[:2] == [2, 2]:
        raise ValueError(f"{name} has shape {shape}, which is ambiguous: pass a backend")
    return backend("FLASH_ATTN" if shape[0] == 2 else "FLASHINFER")


def backend_names() -> list[str]:
    """Return the sorted names of all registered backends, including those of extensions."""
    load_extensions()
    return sorted(_BACKENDS)


# The memory orders of packed layers match those of the serving engines, so that the engines' tensors
# can be used directly.
# BLOCK_MAJOR is specific to this library. In both NHD and HND, a page stores all data of one layer
# before the next layer.
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
    """Choose the cache layout that the connectors require.

    If no connector requires a layout, a message is logged once per process.

    Args:
        required: The layout that one connector requires (None: no requirement), an iterable of such
            requirements, or a mapping from connector name to requirement.

    Returns:
        "HND" or "NHD". Defaults to "NHD" if there is no requirement.

    Raises:
        ValueError: Two connectors require different layouts, or a layout is unknown.

    Example:
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
    _log.info("no connector requires a cache layout: using NHD")


def check_layout(layout: str, name: str) -> None:
    """Raise ValueError unless `layout` is "NHD" or "HND"."""
    one_of(layout, name, LAYOUTS)
