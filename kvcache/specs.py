# SPDX-License-Identifier: Apache-2.0
"""Immutable value objects that describe a deployment. They do not need torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvcache.checks import (
    MAX_INT32,
    MAX_INT64,
    Count,
    Name,
    Size,
    check_name,
    dtype_name,
    instance,
    instances,
    integer,
    listed,
    plain_fields,
    shown,
)
from kvcache.formats import SCALE_BYTES, format_named

if TYPE_CHECKING:
    from kvcache.kinds import KindProperties

T = TypeVar("T")

MAX_GROUPS = 32  # must equal kMaxGroups in csrc/ops/table_groups.h

LAYOUTS = ("NHD", "HND")  # memory orders of tokens (N), heads (H) and elements (D) in a block

ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
    "float64": 8,
}


@dataclass(frozen=True)
class ContextParallel:
    """Sizes and ranks of prefill context parallelism (PCP) and decode context parallelism (DCP).

    A group's tokens are distributed over `world_size` workers.

    Args:
        pcp_world_size: Number of PCP ranks.
        pcp_rank: Rank of this worker in PCP.
        dcp_world_size: Number of DCP ranks.
        dcp_rank: Rank of this worker in DCP.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: A size or rank is out of range.

    Example:
        >>> ContextParallel(pcp_world_size=2, pcp_rank=1, dcp_world_size=4, dcp_rank=2).rank
        6
    """

    pcp_world_size: int = 1
    pcp_rank: int = 0
    dcp_world_size: int = 1
    dcp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("pcp", "dcp"):
            _set_integer(self, f"{kind}_world_size", 1)
            _set_integer(self, f"{kind}_rank", 0, getattr(self, f"{kind}_world_size") - 1)

    @property
    def world_size(self) -> int:
        """Number of workers over which a group's tokens are distributed."""
        return self.pcp_world_size * self.dcp_world_size

    @property
    def rank(self) -> int:
        """Rank of this worker among all workers: `pcp_rank * dcp_world_size + dcp_rank`."""
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank


class FrozenDict(Mapping[str, T]):
    """An immutable mapping that can be hashed and pickled."""

    def __init__(self, values: Mapping[str, T]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


def _checked_options(values: Mapping[str, int]) -> FrozenDict[int]:
    if not isinstance(values, Mapping):
        raise TypeError(f"options is {shown(values)}: expected a mapping of names to integers")
    if not all(isinstance(name, str) for name in values):
        raise TypeError(f"options is {shown(dict(values))}: expected string keys")
    return FrozenDict(
        {
            name: integer(value, f"options[{name!r}]", -MAX_INT64, MAX_INT64)
            for name, value in values.items()
        }
    )


@dataclass(frozen=True)
class GroupSpec:
    """A cache group: layers of one attention kind that share a block table.

    `kind` and `options` are checked when the kind is created (`kvcache.kinds.make_kind`).

    A drafter such as EAGLE or MTP needs the hidden states of the tokens in the last block of a prefix
    hit, so this block must be recomputed. In a group with `drafts`, a hit therefore uses one cached
    block fewer than the lookup found (one hash block fewer, if hits may end inside blocks). Other
    groups do not need the additional block. Only groups whose pages contain K and V of tokens can draft.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.

    Example:
        >>> group = GroupSpec("sliding_window", block_size=16, options={"window": 1024})
        >>> group.tokens_per_block(ContextParallel(dcp_world_size=2))
        32
    """

    kind: Name  # name of a registered attention kind
    block_size: Size  # tokens per allocation block on one context-parallel rank
    options: Mapping[str, int] = field(default_factory=dict)  # parameters of the attention kind
    replicated: bool = False  # True: every context-parallel rank stores all tokens of the group
    layers: tuple[str, ...] = ()  # names of the group's layers
    cached: bool = True  # False: blocks are never hits and do not limit hits of other groups
    transferred: bool = True  # False: the group's blocks are not transferred to other engines
    drafts: bool = False  # True: a drafter's layers, so the last block of a hit is recomputed

    def __post_init__(self) -> None:
        plain_fields(self)
        if isinstance(self.layers, str) or not isinstance(self.layers, Iterable):
            raise TypeError(f"layers is {shown(self.layers)}: expected a sequence of names")
        object.__setattr__(self, "layers", tuple(listed(self.layers, "layers")))
        for name in self.layers:
            check_name(name, "a name in layers")
        object.__setattr__(self, "options", _checked_options(self.options))

    @property
    def summary(self) -> str:
        """All fields except the layers as text, which must be equal on all ranks.

        >>> GroupSpec("sliding_window", 16, {"window": 48}, cached=False).summary
        'sliding_window(window=48) in blocks of 16 tokens, cached=False'
        """
        options = ", ".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        text = f"{self.kind}({options}) in blocks of {self.block_size} tokens"
        flags = {"replicated": False, "cached": True, "transferred": True, "drafts": False}
        given = {name: getattr(self, name) for name in flags}
        return text + "".join(f", {n}={v}" for n, v in given.items() if v != flags[n])

    def tokens_per_block(self, context_parallel: ContextParallel) -> int:
        """Return the number of tokens, over all context-parallel ranks, in an allocation block."""
        context_parallel = checked_context_parallel(context_parallel)
        return self.block_size * (1 if self.replicated else context_parallel.world_size)


@dataclass(frozen=True)
class LayerSpec:
    """The cache of one layer on one rank. It stores the K and V of each token, or one state per
    request.

    `kind` is a registered attention kind (`kvcache.kinds`), and `options` are its parameters:
    "sliding_window" requires `window` (number of tokens that a query attends to, including itself),
    and "chunked_local" requires `chunk_size`.

    For a kind that keeps a state ("recurrent"), set `state_bytes` and leave `num_kv_heads`,
    `head_size` and `v_head_size` at their defaults. A state can be stored after every `block_size`
    tokens and, with `num_speculative_blocks`, after each of the first `num_speculative_blocks`
    draft tokens.

    With `kv_format`, sizes are those before quantization, and `dtype` and `scale_bytes_per_token` are
    derived. For a packed format of your own, use `uint8` and specify the head size in bytes.

    An MLA layer has one head, as in `KVStorage` and `kvcache.transfer.CacheDescription`. `head_size` is
    the size of the latent, and `v_head_size` is the size of the rotary part. If `head_size` includes
    the rotary part, which is the default with `is_mla`, `v_head_size` is 0.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the options are invalid for the kind.

    Example:
        >>> layer = LayerSpec("layers.0", "full_attention", 16, num_kv_heads=8, head_size=128)
        >>> layer.bytes_per_token, layer.page_bytes(16)
        (4096, 65536)
    """

    name: Name  # unique among the layers of a plan
    kind: Name  # name of a registered attention kind
    block_size: Size  # smallest block size of the kernel, in tokens on one context-parallel rank
    num_kv_heads: int = 0  # KV heads on one rank
    head_size: int = 0  # elements of K per head
    v_head_size: Count | None = None  # elements of V per head; None: head_size, or 0 with MLA
    dtype: str = "bfloat16"  # name of a dtype, or a torch.dtype
    options: Mapping[str, int] = field(default_factory=dict)  # parameters of the attention kind
    replicated: bool = False  # True: every context-parallel rank stores all tokens of the layer
    state_bytes: int = 0  # bytes of one state
    scale_bytes_per_token: Count = 0  # scales of all heads, stored with quantized K and V
    is_mla: bool = False  # True: stores a latent and its rotary part instead of K and V
    # False: blocks are never hits, and the layer attends only to tokens that its request computed.
    cached: bool = True
    transferred: bool = True  # False: blocks are not transferred to other engines
    drafts: bool = False  # a drafter's layer; see `GroupSpec`
    kv_format: str | None = None  # name of a quantized format (`kvcache.formats`)

    def __post_init__(self) -> None:
        check_name(self.kind, "kind")
        object.__setattr__(self, "options", _checked_options(self.options))
        object.__setattr__(self, "dtype", dtype_name(self.dtype, ELEMENT_BYTES))
        pages = self._make_kind().pages
        has_state = not pages.has_slots
        self._check_sizes(has_state)
        plain_fields(self)
        if not pages.has_slots and not self.cached:
            raise ValueError(
                f"cached is False: expected True for kind {self.kind!r}, whose state would be missing "
                "after a hit of other layers"
            )
        if self.drafts and not (pages.has_slots and pages.is_transferable):
            raise ValueError(
                f"drafts is True: expected False for kind {self.kind!r}, whose pages hold no K and V of "
                "tokens"
            )
        if self.is_mla:
            if has_state or self.num_kv_heads != 1:
                raise ValueError(
                    f"is_mla is True, num_kv_heads {self.num_kv_heads} and kind {shown(self.kind)}: "
                    "expected one head and no state"
                )
            if self.v_head_size is None:
                object.__setattr__(self, "v_head_size", 0)
        if self.kv_format is not None:
            self._check_format(has_state)

    def _check_format(self, has_state: bool) -> None:
        """Set what the format defines."""
        known = format_named(self.kv_format)
        if has_state:
            raise ValueError(
                f"kv_format is {shown(known.name)}: expected None for kind {shown(self.kind)}, which "
                "keeps a state"
            )
        if known.is_row and not self.is_mla:
            raise ValueError(
                f"kv_format is {shown(known.name)}: expected is_mla, whose latent it holds"
            )
        if self.is_mla and self.v_head_size and not known.is_row:
            raise ValueError(
                f"kv_format is {shown(known.name)} with is_mla and v_head_size {self.v_head_size}: "
                "expected v_head_size 0, because a latent and its rotary part are one vector in the page"
            )
        sizes = known.stored(self.num_kv_heads, self.head_size, self.sizes_before_format[1])
        for name in ("dtype", "scale_bytes_per_token"):
            derived, default = getattr(sizes, name), getattr(LayerSpec, name)
            if getattr(self, name) not in (derived, default):
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))}: expected {shown(derived)}, from kv_format "
                    f"{shown(known.name)}"
                )
            object.__setattr__(self, name, derived)
        if sizes.scale_bytes_per_token and self._data_bytes * self.block_size % SCALE_BYTES:
            raise ValueError(
                f"block_size is {self.block_size}: expected a multiple with which a block's data, "
                f"{self._data_bytes} bytes per token, ends at a multiple of {SCALE_BYTES} bytes"
            )

    @property
    def sizes_before_format(self) -> tuple[int, int]:
        """Elements of K and of V per head, as tokens have them."""
        return self.head_size, self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def stored_sizes(self) -> tuple[int, int]:
        """Elements of `dtype` per head that the cache holds for K and for V."""
        if self.kv_format is None:
            return self.sizes_before_format
        sizes = format_named(self.kv_format).stored(self.num_kv_heads, *self.sizes_before_format)
        return sizes.head_size, sizes.v_head_size

    @property
    def _data_bytes(self) -> int:
        return self.num_kv_heads * sum(self.stored_sizes) * ELEMENT_BYTES[self.dtype]

    def _make_kind(self) -> KindProperties:
        # Imported here, so that sizes and layouts can be used without the native library.
        from kvcache.kinds import make_kind

        return make_kind(self.kind, self.options)

    def _check_sizes(self, has_state: bool) -> None:
        least = 0 if has_state else 1
        _set_integer(self, "state_bytes", 1 - least)
        _set_integer(self, "num_kv_heads", least)
        _set_integer(self, "head_size", least)
        if not has_state:
            if self.state_bytes:
                raise ValueError(
                    f"state_bytes is {self.state_bytes}: expected 0 for kind {self.kind!r}, "
                    "which keeps no state"
                )
            return
        for name in ("num_kv_heads", "head_size", "v_head_size", "scale_bytes_per_token"):
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 for a state")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the K, V and scales of one token. 0 for a state."""
        return self._data_bytes + self.scale_bytes_per_token

    def page_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens or, for a recurrent layer, of a state."""
        block_size = integer(block_size, "block_size", 1)
        return self.state_bytes or self.bytes_per_token * block_size


def checked_groups(groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """Return 1 to `MAX_GROUPS` groups as a tuple. Raises TypeError or ValueError."""
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise TypeError(f"groups is {shown(groups)}: expected a sequence of GroupSpec")
    instances(groups, GroupSpec, "groups")
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ValueError(f"groups has {len(groups)} entries: expected 1 to {MAX_GROUPS}")
    return tuple(groups)


def checked_context_parallel(context_parallel: ContextParallel | None) -> ContextParallel:
    """Return `context_parallel`, or a single worker for None. Raises TypeError for any other type."""
    if context_parallel is None:
        return ContextParallel()
    instance(context_parallel, ContextParallel, "context_parallel")
    return context_parallel


def _set_integer(spec: object, name: str, least: int, most: int = MAX_INT32) -> None:
    object.__setattr__(spec, name, integer(getattr(spec, name), name, least, most))
