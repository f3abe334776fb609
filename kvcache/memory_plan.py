# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a cache: groups, a uniform page size and the number of pages. The functions do not
need torch and keep no state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, overload

from kvcache.checks import (
    MAX_INT32,
    MAX_INT64,
    byte_count,
    flag,
    instance,
    integer,
    integers,
    listed,
    num_entries,
    shown,
)
from kvcache.formats import SCALE_BYTES
from kvcache.kinds import KindProperties, check_planned_pages, checked_max_pages, make_kind
from kvcache.specs import (
    ELEMENT_BYTES,
    MAX_GROUPS,
    ContextParallel,
    GroupSpec,
    LayerSpec,
    checked_context_parallel,
)

# A plan with fewer groups may need up to this many times the optimal number of bytes per request.
_SLACK = 1.1


@dataclass(frozen=True)
class CachePlan:
    """Memory layout of a pool of equal pages that all groups share. Created by `plan_cache`.

    Each page stores a block of one group and is divided into equal shares of `layer_page_bytes`. Share
    `i` contains the data of the group's layer `i`, followed by padding.

    Example:
        >>> layers = [LayerSpec(f"layers.{i}", "full_attention", 16, 8, 128) for i in range(32)]
        >>> plan = plan_cache(layers, 2**30, max_model_len=4096)
        >>> plan.num_pages, plan.pages_per_request(4096), round(plan.max_concurrency, 2)
        (512, 256, 2.0)
    """

    layers: tuple[LayerSpec, ...]  # all layers, in the given order
    groups: tuple[GroupSpec, ...]
    page_bytes: int
    num_pages: int  # including the null page
    layer_page_bytes: int  # a layer's share of a page
    padding_bytes: tuple[int, ...]  # padding bytes in a page, for each group
    max_model_len: int
    max_num_batched_tokens: int
    context_parallel: ContextParallel
    max_encoder_tokens: int = 0  # encoder tokens per request; 0: no layer's kind has an encoder
    # A layer of each group, which another pipeline stage may hold. Empty: each group has layers.
    examples: tuple[LayerSpec, ...] = ()

    def __post_init__(self) -> None:
        for name in ("page_bytes", "num_pages", "layer_page_bytes", "max_model_len"):
            integer(getattr(self, name), f"{name} of the plan", 1, MAX_INT64)
        integer(self.max_num_batched_tokens, "max_num_batched_tokens of the plan", 1, MAX_INT64)
        integer(self.max_encoder_tokens, "max_encoder_tokens of the plan", 0, MAX_INT64)
        specs = ("layers", LayerSpec), ("groups", GroupSpec), ("examples", LayerSpec)
        for name, kind in specs:
            for i, each in enumerate(listed(getattr(self, name), f"{name} of the plan")):
                instance(each, kind, f"{name}[{i}] of the plan")
        integers(self.padding_bytes, "padding_bytes of the plan", ())
        instance(self.context_parallel, ContextParallel, "context_parallel of the plan")

    def pages_per_request(self, num_tokens: int) -> int:
        """Return the maximum total number of pages, in all groups, that one request holds at the same
        time.

        A request is computed in steps of up to `max_num_batched_tokens`. Blocks outside the window
        are released before each step. The attention kind of each group determines how many blocks
        remain (`kvcache.kinds.KindProperties.max_pages`). The request is assumed to have
        `max_encoder_tokens` encoder tokens.

        Args:
            num_tokens: Number of tokens in the request.
        """
        num_tokens = integer(num_tokens, "num_tokens", 1)
        # Groups with equal specs share one kind object, because a kind may cache its results.
        specs = [(group.kind, group.options) for group in self.groups]
        made = {spec: make_kind(*spec) for spec in specs}
        kinds, depths = [made[spec] for spec in specs], [1] * len(specs)
        step, encoder_tokens = self.max_num_batched_tokens, self.max_encoder_tokens
        share, cp = self.layer_page_bytes, self.context_parallel
        demand = _Demand(self.groups, depths, kinds, share, step, encoder_tokens, cp)
        return demand.request_pages(1, num_tokens)

    @property
    def transferred_groups(self) -> tuple[int, ...]:
        """The groups with `GroupSpec.transferred`, whose blocks may be sent to other engines."""
        return tuple(g for g, group in enumerate(self.groups) if group.transferred)

    @property
    def max_concurrency(self) -> float:
        """Number of requests with `max_model_len` tokens that fit at the same time."""
        return (self.num_pages - 1) / self.pages_per_request(self.max_model_len)


@overload
def plan_cache(
    layers: Iterable[LayerSpec], budget_bytes: int | str, **options: Any
) -> CachePlan: ...


@overload
def plan_cache(
    layers: None = None,
    budget_bytes: int | str = ...,
    *,
    stages: Sequence[Iterable[LayerSpec]],
    **options: Any,
) -> tuple[CachePlan, ...]: ...


def plan_cache(
    layers: Iterable[LayerSpec] | None = None,
    budget_bytes: int | str | None = None,
    *,
    max_model_len: int,
    stages: Sequence[Iterable[LayerSpec]] | None = None,
    fit_max_model_len: bool = False,
    max_num_batched_tokens: int | None = None,
    max_encoder_tokens: int | None = None,
    state_interval: int | None = None,
    context_parallel: ContextParallel | None = None,
    layer_page_bytes: int | None = None,
) -> CachePlan | tuple[CachePlan, ...]:
    """Choose groups, a uniform page size and the number of pages for a memory budget on one rank.

    Layers with the same kind, options, block size, number of heads, head sizes, dtype, scales and state
    size are divided into groups with the same number of layers; only the last group may be smaller.
    Because each group adds a block table and a lookup, the plan uses the fewest groups whose bytes per
    request are within 10 % of the optimum. Draft layers (`LayerSpec.drafts`) share groups with other
    layers of their kind. Their groups have `GroupSpec.drafts` set.

    A layer's share of a page has the size of the largest block, rounded up to whole elements of every
    dtype. Layers with smaller blocks get more tokens per block (a multiple of `LayerSpec.block_size`).
    If a recurrent state is larger than every block, blocks are enlarged until a share can hold the
    state, as in vLLM's hybrid models. The unused part of a share is padding.

    The attention kind of a group determines how many pages a request holds. For a custom kind without a
    page formula, the number is computed by calling `first_needed_token` at every position below
    `max_model_len`. A custom kind's formula is validated against `first_needed_token` at
    `max_model_len`.

    With pipeline parallelism, pass the layers of all stages as `stages`. The plans of the stages have
    the same groups in the same order and the same number of pages, so that one manager serves all
    stages. A group has no layers on a stage that lacks layers of its kind.

    Args:
        layers: The layers of one rank.
        budget_bytes: Memory for the pool on each rank, as a number or with a unit ("2GiB"). It must
            hold the null page and one request of `max_model_len` tokens. The pool never has more than
            2**31 - 1 pages.
        max_model_len: Maximum number of tokens of a request.
        stages: The layers that a rank of each pipeline stage holds, instead of `layers`.
        fit_max_model_len: Whether to reduce `max_model_len` to the largest length that fits into the
            budget.
        max_num_batched_tokens: Maximum number of tokens in a step. None: the plan's `max_model_len`.
        max_encoder_tokens: Maximum number of encoder tokens of a request, for layers with
            cross-attention. None: the plan's `max_model_len`.
        state_interval: Block size of recurrent groups, in tokens. Must be a multiple of the `block_size`
            of every recurrent layer. If a step ends at a multiple of the interval, the state at this
            position is kept in a separate page, and later requests can hit it. None: the attention
            block size. If the interval is smaller than the attention block size, the manager's
            `hash_block_size` must divide both.
        context_parallel: Context-parallel sizes and ranks.
        layer_page_bytes: Size in bytes of each layer's share of a page. Set it if pages must have a given
            size, for example to match another engine or to be a multiple of 4096. Must be at least
            the size of the largest block, and a whole number of elements of every dtype. Block sizes
            do not change; the additional bytes are padding.

    Returns:
        The plan. With `stages`, a tuple with one plan per stage.

    Raises:
        ValueError: No plan fits, or an argument is out of range. If no plan fits, the message
            states how many bytes are missing and what would fit.
        KindError: An attention kind returned an invalid value.
        TypeError: An argument has the wrong type.

    Example:
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
        ValueError: budget_bytes is 1048576 (1.00 MiB): one request of max_model_len 4096 needs ...
        >>> plan_cache(layers, 2**23, max_model_len=4096, fit_max_model_len=True).max_model_len
        160
        >>> stages = [layers[:6], layers[6:]]
        >>> plans = plan_cache(stages=stages, budget_bytes=2**30, max_model_len=4096)
        >>> [[len(group.layers) for group in plan.groups] for plan in plans]
        [[2, 2, 2, 0], [2, 2, 0, 2]]
    """
    budget_bytes = byte_count(budget_bytes, "budget_bytes", 0)
    max_model_len = integer(max_model_len, "max_model_len", 1)
    fits_length = flag(fit_max_model_len, "fit_max_model_len")
    step = None
    if max_num_batched_tokens is not None:
        step = integer(max_num_batched_tokens, "max_num_batched_tokens", 1)
    cp = checked_context_parallel(context_parallel)
    by_name, of_stages = _by_name(layers, stages)
    interval = _checked_interval(state_interval, by_name.values())
    layer_page, buckets = _buckets(by_name.values(), interval)
    if layer_page_bytes is not None:
        layer_page = _checked_layer_page(layer_page_bytes, layer_page, by_name.values())
    kinds = [make_kind(bucket.kind, bucket.options) for bucket in buckets]
    has_encoder = any(kind.pages.of_encoder for kind in kinds)
    encoder_tokens = _checked_encoder_tokens(max_encoder_tokens, has_encoder)
    # For each bucket, the names of its layers on each stage.
    names = [[[n for n in bucket.layers if n in own] for own in of_stages] for bucket in buckets]
    depths = [max(map(len, of_bucket)) for of_bucket in names]
    demand = _Demand(buckets, depths, kinds, layer_page, step, encoder_tokens, cp)
    length = demand.longest(budget_bytes, max_model_len) if fits_length else max_model_len
    size = demand.best_group_size(budget_bytes, length) if length else None
    if size is None:
        raise ValueError(demand.shortfall(budget_bytes, max_model_len))
    demand.check_bounds(length)
    counts = [_ceil_div(depth, size) for depth in depths]  # groups per bucket
    examples = tuple(
        by_name[bucket.layers[0]] for bucket, count in zip(buckets, counts) for _ in range(count)
    )
    plans = []
    for own, groups in zip(of_stages, _split(buckets, counts, names, by_name)):
        page_bytes = max(len(group.layers) for group in groups) * layer_page
        plans.append(
            CachePlan(
                tuple(own.values()),
                groups,
                page_bytes,
                min(budget_bytes // (size * layer_page), MAX_INT32),
                layer_page,
                tuple(page_bytes - _data_bytes(group, by_name) for group in groups),
                length,
                step or length,
                cp,
                encoder_tokens or (length if has_encoder else 0),
                () if stages is None else examples,
            )
        )
    return plans[0] if stages is None else tuple(plans)


@dataclass(frozen=True)
class _Demand:
    """Computes the pages and bytes of one request for a given number of layers per group.

    A bucket contains all layers that may share groups, before they are split into groups.
    """

    buckets: Sequence[GroupSpec]
    depths: Sequence[int]  # for each bucket, the largest number of layers that a stage holds
    kinds: Sequence[KindProperties]  # one per bucket
    layer_page: int
    max_num_batched_tokens: int | None  # None: the request's number of tokens
    max_encoder_tokens: int | None  # None: the request's number of tokens
    context_parallel: ContextParallel

    def num_groups(self, size: int) -> int:
        return sum(_ceil_div(depth, size) for depth in self.depths)

    def group_sizes(self) -> list[int]:
        """Return the candidate numbers of layers per group."""
        largest = max(self.depths)
        if self.num_groups(largest) > MAX_GROUPS:
            raise ValueError(
                f"layers have {self.num_groups(largest)} different specs: "
                f"expected at most {MAX_GROUPS}"
            )
        return [n for n in range(1, largest + 1) if self.num_groups(n) <= MAX_GROUPS]

    def request_pages(self, size: int, num_tokens: int) -> int:
        step, pages = self.max_num_batched_tokens or num_tokens, 0
        for bucket, depth, kind in zip(self.buckets, self.depths, self.kinds):
            tokens_per_page = bucket.tokens_per_block(self.context_parallel)
            most = checked_max_pages(kind, self._most(kind, num_tokens), step, tokens_per_page)
            pages += _ceil_div(depth, size) * most
        return pages

    def _most(self, kind: KindProperties, num_tokens: int) -> int:
        """Return how many tokens of a request the kind's groups may hold."""
        return self.max_encoder_tokens or num_tokens if kind.pages.of_encoder else num_tokens

    def request_bytes(self, size: int, num_tokens: int) -> int:
        return self.request_pages(size, num_tokens) * size * self.layer_page

    def pool_bytes(self, size: int, num_tokens: int) -> int:
        """Return the size in bytes of a pool for one request and the null page."""
        return self.request_bytes(size, num_tokens) + size * self.layer_page

    def least_bytes(self, num_tokens: int) -> int:
        return min(self.pool_bytes(size, num_tokens) for size in self.group_sizes())

    def best_group_size(self, budget: int, num_tokens: int) -> int | None:
        # Consider only group sizes that fit the budget. With the group size that minimizes the bytes
        # of the request, the null page may be too large.
        fit = [n for n in self.group_sizes() if self.pool_bytes(n, num_tokens) <= budget]
        if not fit:
            return None
        most = _SLACK * min(self.request_bytes(n, num_tokens) for n in fit)
        good = [n for n in fit if self.request_bytes(n, num_tokens) <= most]
        return min(good, key=lambda n: (self.num_groups(n), self.request_bytes(n, num_tokens)))

    def longest(self, budget: int, max_model_len: int) -> int:
        """Return the largest request length up to `max_model_len` that fits the budget, or 0."""
        # Bisection works because the required memory never decreases with the number of tokens.
        return bisect_right(range(1, max_model_len + 1), budget, key=self.least_bytes)

    def check_bounds(self, num_tokens: int) -> None:
        """Raise KindError if a kind's page formula is below what `first_needed_token` requires."""
        step = self.max_num_batched_tokens or num_tokens
        for bucket, kind in zip(self.buckets, self.kinds):
            tokens_per_page = bucket.tokens_per_block(self.context_parallel)
            check_planned_pages(kind, self._most(kind, num_tokens), step, tokens_per_page)

    def shortfall(self, budget: int, max_model_len: int) -> str:
        needed = self.least_bytes(max_model_len)
        fits = self.longest(budget, max_model_len - 1)
        encoder = self.max_encoder_tokens
        encoder = f"and max_encoder_tokens {encoder} " if encoder else ""
        return (
            f"budget_bytes is {_with_unit(budget)}: one request of max_model_len {max_model_len} "
            f"{encoder}needs {_with_unit(needed)}, {_with_unit(needed - budget)} more; "
            f"the budget holds a max_model_len of at most {fits}"
        )


def _checked_encoder_tokens(max_encoder_tokens: int | None, has_encoder: bool) -> int | None:
    if max_encoder_tokens is None:
        return None
    if not has_encoder:
        raise ValueError(
            f"max_encoder_tokens is {shown(max_encoder_tokens)}: expected None, as no layer's kind "
            "has an encoder"
        )
    return integer(max_encoder_tokens, "max_encoder_tokens", 1)


def _checked_layer_page(layer_page_bytes: int, least: int, layers: Iterable[LayerSpec]) -> int:
    value = integer(layer_page_bytes, "layer_page_bytes", least, MAX_INT64)
    item = _common_element_bytes(layers)
    if value % item:
        raise ValueError(
            f"layer_page_bytes is {value}: expected a multiple of {item}, so that it holds whole "
            "elements of every layer's dtype"
        )
    return value


def _common_element_bytes(layers: Iterable[LayerSpec]) -> int:
    has_scales = any(layer.kv_format for layer in layers)
    elements = (ELEMENT_BYTES[layer.dtype] for layer in layers)
    return math.lcm(*elements, SCALE_BYTES if has_scales else 1)


def _checked_interval(state_interval: int | None, layers: Iterable[LayerSpec]) -> int | None:
    if state_interval is None:
        return None
    steps = [layer.block_size for layer in layers if layer.state_bytes]
    if not steps:
        raise ValueError(
            f"state_interval is {shown(state_interval)}: expected None, as no layer keeps a state"
        )
    interval, common = integer(state_interval, "state_interval", 1), math.lcm(*steps)
    if interval % common:
        raise ValueError(
            f"state_interval is {interval}: expected a multiple of {common}, because the block_size of "
            "every layer that keeps a state must divide it"
        )
    return interval


def _buckets(layers: Iterable[LayerSpec], interval: int | None) -> tuple[int, list[GroupSpec]]:
    """Return the bytes of a layer's share of a page, and the layers that may share groups.

    Layers may share groups if they differ only in name and smallest block size, so that one storage
    can hold them.
    """
    layers = list(layers)
    layer_page, base_block_size = _layer_page(layers, interval)
    names: dict[tuple[GroupSpec, LayerSpec], list[str]] = {}
    for layer in layers:
        block_size = _block_size(layer, layer_page, base_block_size, interval)
        group = GroupSpec(
            layer.kind,
            block_size,
            layer.options,
            layer.replicated,
            cached=layer.cached,
            transferred=layer.transferred,
        )
        v_head_size = layer.head_size if layer.v_head_size is None else layer.v_head_size
        size = SCALE_BYTES if layer.kv_format else 1  # any size that the format accepts
        alike = replace(layer, name="any", block_size=size, v_head_size=v_head_size, drafts=False)
        names.setdefault((group, alike), []).append(layer.name)
    # Pages are adjacent, so the page size must be a multiple of every dtype's element size for each
    # page to start at a whole element.
    item = _common_element_bytes(layers)
    layer_page = _ceil_div(layer_page, item) * item
    return layer_page, [replace(key[0], layers=tuple(some)) for key, some in names.items()]


def _layer_page(layers: list[LayerSpec], interval: int | None) -> tuple[int, int | None]:
    """Return the bytes and tokens of the largest block.

    Without attention layers, return the bytes of the largest state, and None.
    """
    states = [layer for layer in layers if layer.state_bytes]
    attention = [layer for layer in layers if not layer.state_bytes]
    largest_state = max((layer.state_bytes for layer in states), default=0)
    if not attention:
        return largest_state, None
    base = max(attention, key=lambda layer: layer.page_bytes(layer.block_size))
    # Without an interval, a state is stored at the end of each block, so the state's block size
    # must divide the block.
    steps = [] if interval else [layer.block_size for layer in states]
    block_size = math.lcm(base.block_size, *steps)
    block_size *= max(1, _ceil_div(largest_state, base.page_bytes(block_size)))
    return base.page_bytes(block_size), block_size


def _block_size(
    layer: LayerSpec, layer_page: int, base_block_size: int | None, interval: int | None
) -> int:
    """Return the layer's block size if the largest block of a page has `base_block_size` tokens."""
    if layer.state_bytes and interval:
        return interval
    if base_block_size is None:
        return layer.block_size
    if layer.state_bytes:
        return base_block_size
    smallest = layer.page_bytes(layer.block_size)
    block_size = layer_page // smallest * layer.block_size
    if layer_page % smallest == 0:
        return block_size
    # Padding is preferable to block sizes with a huge common multiple, because a prefix hit in all
    # groups can end only at a common multiple of their block sizes.
    common = math.lcm(layer.block_size, base_block_size)
    return block_size // common * common or block_size


def _split(
    buckets: Sequence[GroupSpec],
    counts: Sequence[int],
    names: Sequence[Sequence[Sequence[str]]],
    by_name: Mapping[str, LayerSpec],
) -> list[tuple[GroupSpec, ...]]:
    """Return the groups of each stage. Bucket `b` is divided into `counts[b]` groups."""
    groups: list[list[GroupSpec]] = [[] for _ in names[0]]
    sizes = [  # for each stage, the largest number of layers in a group
        max(_ceil_div(len(own), count) for own, count in zip(of_stage, counts))
        for of_stage in zip(*names)
    ]
    for bucket, count, of_stages in zip(buckets, counts, names):
        for i in range(count):
            parts = [own[i * size : (i + 1) * size] for own, size in zip(of_stages, sizes)]
            drafts = any(by_name[name].drafts for part in parts for name in part)
            for of_stage, part in zip(groups, parts):
                of_stage.append(replace(bucket, layers=tuple(part), drafts=drafts))
    return list(map(tuple, groups))


def _data_bytes(group: GroupSpec, by_name: Mapping[str, LayerSpec]) -> int:
    return sum(by_name[name].page_bytes(group.block_size) for name in group.layers)


def _by_name(
    layers: Iterable[LayerSpec] | None, stages: Sequence[Iterable[LayerSpec]] | None
) -> tuple[dict[str, LayerSpec], list[dict[str, LayerSpec]]]:
    """Return all layers, and the layers of each stage, keyed by name."""
    if stages is None:
        given = {"layers": layers}
    elif layers is not None:
        raise TypeError(f"layers is {shown(layers)}: expected no layers with stages")
    else:
        given = {f"stages[{i}]": own for i, own in enumerate(listed(stages, "stages"))}
        if not given:
            raise ValueError("stages is empty: expected the layers of at least one stage")
    by_name: dict[str, LayerSpec] = {}
    of_stages: list[dict[str, LayerSpec]] = []
    for what, own in given.items():
        try:
            entries = iter(own)
        except TypeError:  # for example, an array without dimensions
            raise TypeError(f"{what} is {shown(own)}: expected an iterable of LayerSpec") from None
        if isinstance(own, Sized):
            num_entries(own, what)
        of_stage: dict[str, LayerSpec] = {}
        for layer in entries:
            instance(layer, LayerSpec, "a layer")
            if layer.name in by_name:
                raise ValueError(
                    f"two layers have the name {shown(layer.name)}: expected unique names"
                )
            by_name[layer.name] = of_stage[layer.name] = layer
        if not of_stage:
            raise ValueError(f"{what} is empty: expected at least one LayerSpec")
        of_stages.append(of_stage)
    return by_name, of_stages


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _with_unit(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes} ({num_bytes / 2**30:.2f} GiB)"
    if num_bytes >= 2**20:
        return f"{num_bytes} ({num_bytes / 2**20:.2f} MiB)"
    return f"{num_bytes} ({num_bytes / 2**10:.2f} KiB)"
