"""Value objects that describe a deployment, and the plan of its memory; no torch, no state."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

MAX_GROUPS = 32  # kMaxGroups in csrc/ops/table_groups.h
_MAX_INT32 = 2**31 - 1  # ids and sizes of blocks are int32
_MAX_INT64 = 2**63 - 1

ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}

# The option that says how far a query of this kind sees, in tokens.
_REACH = {"sliding_window": "window", "chunked_local": "chunk_size"}


@dataclass(frozen=True)
class ContextParallel:
    """Sizes and ranks of prefill (PCP) and decode (DCP) context parallelism.

    A group's tokens are spread over `world_size` workers; this one is `rank`.

    >>> ContextParallel(pcp_world_size=2, pcp_rank=1, dcp_world_size=4, dcp_rank=2).rank
    6
    """

    pcp_world_size: int = 1
    pcp_rank: int = 0
    dcp_world_size: int = 1
    dcp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("pcp", "dcp"):
            size, rank = getattr(self, f"{kind}_world_size"), getattr(self, f"{kind}_rank")
            if size < 1:
                raise ValueError(f"{kind}_world_size is {size}: expected 1 or more")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank is {rank}: expected 0 to {size - 1}")

    @property
    def world_size(self) -> int:
        """Workers that one group's tokens are spread over."""
        return self.pcp_world_size * self.dcp_world_size

    @property
    def rank(self) -> int:
        """Place of this worker among them: `pcp_rank * dcp_world_size + dcp_rank`."""
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank


class _Options(Mapping[str, int]):
    """An immutable dictionary that hashes and pickles."""

    def __init__(self, values: Mapping[str, int]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"options is {values!r}: expected a mapping of names to integers")
        for name in values:
            if not isinstance(name, str):
                raise TypeError(f"options is {dict(values)!r}: expected names as keys")
        self._values = {
            name: _integer(value, f"options[{name!r}]", -_MAX_INT64, _MAX_INT64)
            for name, value in values.items()
        }

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True)
class GroupSpec:
    """A cache group: layers of one attention kind that share block tables.

    `kind` is a name of an open registry; only generic properties are checked here. Raises TypeError
    or ValueError.

    >>> group = GroupSpec("sliding_window", block_size=16, options={"window": 1024})
    >>> group.tokens_per_block(ContextParallel(dcp_world_size=2))
    32
    """

    kind: str
    block_size: int  # tokens of an allocation block on one context-parallel rank
    options: Mapping[str, int] = field(default_factory=dict)  # parameters of the kind
    replicated: bool = False  # held whole by every context-parallel rank
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.kind, "kind")
        _settle_integer(self, "block_size", 1)
        if isinstance(self.layers, str):
            raise TypeError(f"layers is {self.layers!r}: expected a sequence of names")
        for name in self.layers:
            _check_name(name, "a name in layers")
        object.__setattr__(self, "options", _Options(self.options))
        object.__setattr__(self, "layers", tuple(self.layers))

    def tokens_per_block(self, context_parallel: ContextParallel) -> int:
        """Tokens, over all context-parallel ranks, that an allocation block stands for."""
        return self.block_size * (1 if self.replicated else context_parallel.world_size)


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches on one rank: K and V of each token, or one state of each request.

    A layer with `state_bytes` (kind "recurrent") leaves heads and sizes 0; a state can be stored
    after every `block_size` tokens. MLA stores one latent vector per token: one head, `v_head_size`
    0. A packed format is `uint8` with the head size in bytes. "sliding_window" needs the option
    `window` (tokens a query sees, with itself), "chunked_local" `chunk_size`.

    Raises TypeError or ValueError.

    >>> layer = LayerSpec("layers.0", "full_attention", 16, num_kv_heads=8, head_size=128)
    >>> layer.bytes_per_token, layer.page_bytes(16)
    (4096, 65536)
    """

    name: str
    kind: str
    block_size: int  # tokens on one context-parallel rank: the smallest block the kernel takes
    num_kv_heads: int = 0
    head_size: int = 0  # elements
    v_head_size: int | None = None  # elements; None: as head_size
    dtype: str = "bfloat16"
    options: Mapping[str, int] = field(default_factory=dict)
    replicated: bool = False  # held whole by every context-parallel rank
    state_bytes: int = 0  # of one request
    scale_bytes_per_token: int = 0  # of all heads, stored next to quantised K and V

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        _check_name(self.kind, "kind")
        _settle_integer(self, "block_size", 1)
        object.__setattr__(self, "options", _Options(self.options))
        self._check_reach()
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(ELEMENT_BYTES)}")
        self._check_sizes()

    def _check_reach(self) -> None:
        option = _REACH.get(self.kind)
        if option is None:
            return
        if option not in self.options:
            raise ValueError(f"options is {self.options}: expected {option!r} for {self.kind!r}")
        _integer(self.options[option], option, 1)

    def _check_sizes(self) -> None:
        has_state = self.kind == "recurrent" or self.state_bytes != 0
        least = 0 if has_state else 1
        _settle_integer(self, "state_bytes", 1 - least)
        _settle_integer(self, "num_kv_heads", least)
        _settle_integer(self, "head_size", least)
        if self.v_head_size is not None:
            _settle_integer(self, "v_head_size", 0)
        _settle_integer(self, "scale_bytes_per_token", 0)
        if not has_state:
            return
        for name in ("num_kv_heads", "head_size", "v_head_size", "scale_bytes_per_token"):
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 for a state")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's K, V and scales; 0 for a state."""
        v_head_size = self.head_size if self.v_head_size is None else self.v_head_size
        elements = self.num_kv_heads * (self.head_size + v_head_size)
        return elements * ELEMENT_BYTES[self.dtype] + self.scale_bytes_per_token

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens; of a state, whatever the block size."""
        return self.state_bytes or self.bytes_per_token * block_size


@dataclass(frozen=True)
class CachePlan:
    """How one pool of equal pages serves all groups; made by `plan_cache`.

    A page holds a block of one group. It is cut into equal shares of `layer_page_bytes`: the i-th
    layer of the group has the i-th share, and its data come before the padding.

    >>> layers = [LayerSpec(f"layers.{i}", "full_attention", 16, 8, 128) for i in range(32)]
    >>> plan = plan_cache(layers, 2**30, max_model_len=4096)
    >>> plan.num_pages, plan.pages_per_request(4096), round(plan.max_concurrency, 2)
    (512, 256, 2.0)
    """

    groups: tuple[GroupSpec, ...]
    page_bytes: int
    num_pages: int  # with the null page
    layer_page_bytes: int  # a layer's share of a page
    padding_bytes: tuple[int, ...]  # per group: bytes of a page that hold no data
    max_model_len: int
    max_num_batched_tokens: int
    context_parallel: ContextParallel

    def pages_per_request(self, num_tokens: int) -> int:
        """Pages, over all groups, that one request of `num_tokens` holds at most at one time.

        A request is computed in steps of up to `max_num_batched_tokens`, and what slid out of a
        window is released before each. A recurrent group holds the running state and the one it is
        copied from. Of an encoder at most `num_tokens` tokens are assumed.
        """
        num_tokens = _integer(num_tokens, "num_tokens", 1)
        step, cp = self.max_num_batched_tokens, self.context_parallel
        return sum(_pages_of(group, num_tokens, step, cp) for group in self.groups)

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` that fit at once."""
        return (self.num_pages - 1) / self.pages_per_request(self.max_model_len)


def plan_cache(
    layers: Iterable[LayerSpec],
    budget_bytes: int,
    *,
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    context_parallel: ContextParallel | None = None,
) -> CachePlan:
    """Groups, a uniform page and the number of pages, from a budget of bytes on one rank.

    `max_num_batched_tokens` is the most tokens of a step, by default `max_model_len`. The pool must
    hold the null page and one request of `max_model_len` tokens, not more; it never has more than
    2**31 - 1 pages.

    Layers of equal kind, options, block size and bytes make groups of one size, the last of which
    may be smaller; the size is the one with which a request needs the fewest bytes. A layer's share
    of a page has the size of the largest block: smaller blocks get more tokens (a multiple of
    `LayerSpec.block_size`), and where a recurrent state is larger than every block, blocks grow
    until one holds it, as in vLLM's hybrid models. What then remains is padding.

    Raises ValueError if no plan fits, saying how many bytes are missing and what would fit;
    TypeError or ValueError for wrong arguments.

    >>> local = {"kind": "sliding_window", "options": {"window": 1024}}
    >>> layers = [LayerSpec(f"local.{i}", block_size=16, num_kv_heads=8, head_size=128, **local)
    ...           for i in range(10)]
    >>> layers += [LayerSpec(f"full.{i}", "full_attention", 16, 8, 128) for i in range(2)]
    >>> plan = plan_cache(layers, 2**30, max_model_len=32768, max_num_batched_tokens=2048)
    >>> [len(group.layers) for group in plan.groups], plan.page_bytes, plan.num_pages
    ([2, 2, 2, 2, 2, 2], 131072, 8192)
    >>> plan_cache(layers, 2**20, max_model_len=4096)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: budget_bytes is 1048576 (0.00 GiB): one request of max_model_len 4096 needs ...
    """
    step = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
    budget_bytes = _integer(budget_bytes, "budget_bytes", 0, _MAX_INT64)
    max_model_len = _integer(max_model_len, "max_model_len", 1)
    step = _integer(step, "max_num_batched_tokens", 1)
    by_name = _by_name(layers)
    layer_page, buckets = _buckets(by_name.values())
    demand = _Demand(buckets, layer_page, step, context_parallel or ContextParallel())
    size = demand.best_group_size(budget_bytes, max_model_len)
    if size is None:
        raise ValueError(demand.shortfall(budget_bytes, max_model_len))
    groups, page_bytes = _split(buckets, size), size * layer_page
    return CachePlan(
        groups,
        page_bytes,
        min(budget_bytes // page_bytes, _MAX_INT32),
        layer_page,
        tuple(page_bytes - _data_bytes(group, by_name) for group in groups),
        max_model_len,
        step,
        demand.context_parallel,
    )


@dataclass(frozen=True)
class _Demand:
    """What one request needs if buckets (groups not yet split) become groups of some size."""

    buckets: Sequence[GroupSpec]
    layer_page: int
    max_num_batched_tokens: int
    context_parallel: ContextParallel

    def num_groups(self, size: int) -> int:
        return sum(_ceil_div(len(bucket.layers), size) for bucket in self.buckets)

    def group_sizes(self) -> list[int]:
        """Numbers of layers per group that may be chosen."""
        largest = max(len(bucket.layers) for bucket in self.buckets)
        if self.num_groups(largest) > MAX_GROUPS:
            raise ValueError(
                f"layers are of {self.num_groups(largest)} different specs: "
                f"expected at most {MAX_GROUPS}"
            )
        return [n for n in range(1, largest + 1) if self.num_groups(n) <= MAX_GROUPS]

    def request_bytes(self, size: int, num_tokens: int) -> int:
        step, cp = self.max_num_batched_tokens, self.context_parallel
        pages = sum(
            _ceil_div(len(bucket.layers), size) * _pages_of(bucket, num_tokens, step, cp)
            for bucket in self.buckets
        )
        return pages * size * self.layer_page

    def pool_bytes(self, size: int, num_tokens: int) -> int:
        """Of the smallest pool: a request, and the null page."""
        return self.request_bytes(size, num_tokens) + size * self.layer_page

    def least_bytes(self, num_tokens: int) -> int:
        return min(self.pool_bytes(size, num_tokens) for size in self.group_sizes())

    def best_group_size(self, budget: int, num_tokens: int) -> int | None:
        # Only among sizes that fit: where a request needs least, the null page may be too large.
        fit = [n for n in self.group_sizes() if self.pool_bytes(n, num_tokens) <= budget]
        if not fit:
            return None
        return min(fit, key=lambda n: (self.request_bytes(n, num_tokens), self.num_groups(n)))

    def shortfall(self, budget: int, max_model_len: int) -> str:
        needed = self.least_bytes(max_model_len)
        # More tokens never need fewer bytes, so the lengths that fit come first.
        fits = bisect_right(range(1, max_model_len), budget, key=self.least_bytes)
        return (
            f"budget_bytes is {_with_gib(budget)}: one request of max_model_len {max_model_len} "
            f"needs {_with_gib(needed)}, {_with_gib(needed - budget)} more; "
            f"the budget holds a max_model_len of at most {fits}"
        )


def _pages_of(group: GroupSpec, num_tokens: int, step: int, cp: ContextParallel) -> int:
    """Pages that a request of `num_tokens` holds at most in a group, in steps of `step` tokens."""
    if group.kind == "recurrent":
        return 2
    tokens = group.tokens_per_block(cp)
    pages = _ceil_div(num_tokens, tokens)
    if group.kind == "sliding_window":
        alive = group.options["window"] - 1 + step
    elif group.kind == "chunked_local":
        alive = group.options["chunk_size"] + step
    else:
        return pages
    return min(pages, _ceil_div(alive, tokens) + 1)  # one more: they may begin inside a block


def _buckets(layers: Iterable[LayerSpec]) -> tuple[int, list[GroupSpec]]:
    """The bytes of a layer's share of a page, and layers that may share groups."""
    layers = list(layers)
    layer_page, base_block_size = _layer_page(layers)
    names: dict[tuple[GroupSpec, int], list[str]] = {}
    for layer in layers:
        block_size = _block_size(layer, layer_page, base_block_size)
        group = GroupSpec(layer.kind, block_size, layer.options, layer.replicated)
        names.setdefault((group, layer.page_bytes(block_size)), []).append(layer.name)
    return layer_page, [replace(key[0], layers=tuple(some)) for key, some in names.items()]


def _layer_page(layers: list[LayerSpec]) -> tuple[int, int | None]:
    """Bytes of the largest block, and its tokens; without attention, of the largest state."""
    states = [layer for layer in layers if layer.state_bytes]
    attention = [layer for layer in layers if not layer.state_bytes]
    largest_state = max((layer.state_bytes for layer in states), default=0)
    if not attention:
        return largest_state, None
    base = max(attention, key=lambda layer: layer.page_bytes(layer.block_size))
    # A state is stored at the end of a block, which its own block size must divide.
    block_size = math.lcm(base.block_size, *(layer.block_size for layer in states))
    block_size *= max(1, _ceil_div(largest_state, base.page_bytes(block_size)))
    return base.page_bytes(block_size), block_size


def _block_size(layer: LayerSpec, layer_page: int, base_block_size: int | None) -> int:
    """Tokens of the layer's block in a page whose largest block has `base_block_size`."""
    if base_block_size is None:
        return layer.block_size
    if layer.state_bytes:
        return base_block_size
    smallest = layer.page_bytes(layer.block_size)
    block_size = layer_page // smallest * layer.block_size
    if layer_page % smallest == 0:
        return block_size
    # There is padding anyway: rather more of it than block sizes whose common multiple is huge, for
    # a prefix hit over all groups ends only there.
    common = math.lcm(layer.block_size, base_block_size)
    return block_size // common * common or block_size


def _split(buckets: Sequence[GroupSpec], size: int) -> tuple[GroupSpec, ...]:
    return tuple(
        replace(bucket, layers=bucket.layers[first : first + size])
        for bucket in buckets
        for first in range(0, len(bucket.layers), size)
    )


def _data_bytes(group: GroupSpec, by_name: Mapping[str, LayerSpec]) -> int:
    return sum(by_name[name].page_bytes(group.block_size) for name in group.layers)


def _by_name(layers: Iterable[LayerSpec]) -> dict[str, LayerSpec]:
    by_name: dict[str, LayerSpec] = {}
    for layer in layers:
        if not isinstance(layer, LayerSpec):
            raise TypeError(f"a layer is {layer!r}: expected a LayerSpec")
        if layer.name in by_name:
            raise ValueError(f"the name of two layers is {layer.name!r}: expected different names")
        by_name[layer.name] = layer
    if not by_name:
        raise ValueError("layers is empty: expected at least one LayerSpec")
    return by_name


def _integer(value: int, name: str, least: int, most: int = _MAX_INT32) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}: expected an integer")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}: expected {least} to {most}")
    return int(value)  # numpy's would overflow


def _settle_integer(spec: object, name: str, least: int) -> None:
    object.__setattr__(spec, name, _integer(getattr(spec, name), name, least))


def _check_name(value: str, name: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: expected a string")
    if not value:
        raise ValueError(f"{name} is {value!r}: expected a name that is not empty")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _with_gib(num_bytes: int) -> str:
    return f"{num_bytes} ({num_bytes / 2**30:.2f} GiB)"
