# SPDX-License-Identifier: Apache-2.0
"""Estimates token hit rates at all pool sizes (miss-ratio curves) by sampling a workload in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kvcache.checks import instance, integer, number, plain_fields, shown
from kvcache_lab.comparison import Comparison, checked_policies, checked_rates, checked_sizes
from kvcache_lab.miniature import Miniature
from kvcache_lab.sampling import BlockSample, sampled
from kvcache_lab.traces.block_ids import BlockIdRequest
from kvcache_lab.workload import WorkloadRequest

if TYPE_CHECKING:
    from rich.table import Table

CURVE_POLICIES = ("lru", "learned")
_SIZES_PER_OCTAVE = 2
_LEAST_SAMPLED = 512  # number of sampled blocks that fit into a pool of the smallest default size
_MOST_OCTAVES = 8


@dataclass(frozen=True)
class HitRateCurve:
    """Estimated token hit rates of eviction policies by pool size.

    Attributes:
        trace: Name of the trace.
        requests: Number of requests.
        blocks: Number of block uses, including partial last blocks.
        distinct_blocks: Estimated number of distinct full blocks. Pools of this size evict nothing.
        block_size: Tokens per block.
        rate: Fraction of blocks that were sampled. 1: all blocks.
        sampled_requests: Number of requests that contain a sampled block.
        sizes: Pool sizes in blocks, without the null block, ascending.
        token_hit_rates: Estimated hit rates per size, keyed by policy as `name[:option=value]...`.
        exact: Hit rates of complete replays; see `with_exact`.
    """

    trace: str
    requests: int
    blocks: int
    distinct_blocks: int
    block_size: int
    rate: float
    sampled_requests: int
    sizes: tuple[int, ...]
    token_hit_rates: dict[str, list[float]]
    exact: dict[str, list[float]] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        num_sizes = len(checked_sizes(self.sizes))
        checked_rates(self.token_hit_rates, "token_hit_rates", num_sizes)
        if self.exact is not None:
            checked_rates(self.exact, "exact", num_sizes)
            if [*self.exact] != [*self.token_hit_rates]:
                raise ValueError(
                    f"exact has the policies {', '.join(self.exact)}: expected the policies "
                    f"of token_hit_rates, {', '.join(self.token_hit_rates)}"
                )

    def with_exact(self, comparison: Comparison) -> HitRateCurve:
        """Return the curve extended with the hit rates of complete replays from `compare`.

        Raises:
            ValueError: Sizes, policies, block size or number of requests differ.
        """
        instance(comparison, Comparison, "comparison")
        for name in ("sizes", "block_size", "requests"):
            theirs, ours = getattr(comparison, name), getattr(self, name)
            if theirs != ours:
                raise ValueError(f"comparison has {name} {shown(theirs)}: expected {shown(ours)}")
        return replace(self, exact=dict(comparison.token_hit_rates))

    @property
    def errors(self) -> dict[str, list[float]] | None:
        """Estimated minus exact hit rates per size, keyed by policy, in percentage points."""
        if self.exact is None:
            return None
        return {
            name: [
                100 * (mine - theirs) for mine, theirs in zip(rates, self.exact[name], strict=True)
            ]
            for name, rates in self.token_hit_rates.items()
        }

    def to_dict(self) -> dict:
        """Return the curve as plain data for JSON, without the fields that are None."""
        found = {**asdict(self), "errors": self.errors}
        return {name: value for name, value in found.items() if value is not None}


def hit_rate_curve(
    workload: Iterable[WorkloadRequest | BlockIdRequest],
    policies: Sequence[str] = CURVE_POLICIES,
    sizes: Sequence[int] | None = None,
    *,
    block_size: int,
    rate: float | None = None,
    trace: str = "",
    on_request: Callable[[], None] | None = None,
) -> HitRateCurve:
    """Estimate the token hit rates at all pool sizes from one pass over the workload.

    A sample of the blocks, selected by hash, is replayed at each size with each policy, in a pool
    that is scaled down by the same factor (SHARDS, Waldspurger et al., FAST'15; miniature
    simulation, USENIX ATC'17). The results estimate the hit rates of `Replayer` with one
    full-attention group and one request at a time. With `rate=1`, the estimates are exact for all
    policies except `learned`, which also samples by hash and here uses different hashes than in a
    manager.

    Args:
        workload: The requests, for example from `read_trace` or, faster, `read_block_ids`. They are
            read once, and only the sample is kept.
        policies: Policies as `name[:option=value]...`, at least one.
        sizes: Pool sizes in blocks, without the null block, at least one. None: two sizes per
            octave, up to the number of distinct blocks.
        block_size: Tokens per block.
        rate: Fraction of the blocks to sample, above 0 and at most 1. None: the largest power of
            two for which the sample has at most 2^20 requests and 2^22 block uses.
        trace: Name of the trace in the result.
        on_request: Called after each request is read.

    Returns:
        The curve.

    Raises:
        ValueError: A policy is unknown, an argument is invalid, or no block is sampled.

    Example:
        >>> from kvcache_lab import chat_workload
        >>> curve = hit_rate_curve(chat_workload(100), ["lru"], [100, 1000], block_size=16)
        >>> curve.rate, curve.requests
        (1.0, 100)
    """
    chosen = checked_policies(policies)
    sizes = None if sizes is None else sorted({*checked_sizes(sizes)})
    if sizes is not None and not sizes:
        raise ValueError("sizes is empty: expected one or more")
    block_size = integer(block_size, "block_size", 1)
    if rate is not None:
        rate = number(rate, "rate", "a number above 0, at most 1")
        if not 0 < rate <= 1:
            raise ValueError(f"rate is {rate}: expected a number above 0, at most 1")
    instance(trace, str, "trace")
    if on_request is not None and not callable(on_request):
        raise TypeError(f"on_request is {shown(on_request)}: expected a function or None")
    sample = sampled(workload, block_size, rate, on_request)
    if rate is not None and len(sample.keys) == 0 and sample.num_blocks > 0:
        raise ValueError(
            f"rate is {rate}: expected a higher rate, because none of the {sample.num_blocks} blocks is "
            "sampled"
        )
    sizes = default_sizes(sample) if sizes is None else sizes
    miniature = Miniature(sample)
    rates = {
        text: [miniature.hit_rate(name, options, size) for size in sizes]
        for text, (name, options) in chosen.items()
    }
    return HitRateCurve(
        trace,
        sample.num_requests,
        sample.num_blocks,
        sample.num_distinct,
        block_size,
        sample.rate,
        len(sample.num_tokens),
        tuple(sizes),
        rates,
    )


def default_sizes(sample: BlockSample) -> list[int]:
    """Return sizes for a curve: two per octave, up to the number of distinct blocks."""
    most = max(sample.num_distinct, 1)
    least = max(most / 2**_MOST_OCTAVES, min(_LEAST_SAMPLED / sample.rate, most), 1)
    num = math.floor(_SIZES_PER_OCTAVE * math.log2(most / least))
    sizes = (most / 2 ** (i / _SIZES_PER_OCTAVE) for i in range(num + 1))
    return sorted({_rounded(size) for size in sizes})


def _rounded(size: float) -> int:
    """Round up to two significant digits."""
    digit = 10 ** max(math.floor(math.log10(size)) - 1, 0)
    return math.ceil(size / digit) * digit


def curve_table(curve: HitRateCurve) -> Table:
    """Return the curve as a rich table, one row per size."""
    from rich.markup import escape
    from rich.table import Table

    instance(curve, HitRateCurve, "curve")
    errors = curve.errors
    table = Table(
        title=f"Token hit rate by number of blocks: {escape(curve.trace)}",
        caption=_caption(curve),
    )
    table.add_column("blocks", justify="right", style="cyan")
    for name in curve.token_hit_rates:
        table.add_column(escape(name), justify="right", overflow="fold")
        if errors is not None:
            table.add_column("exact", justify="right")
            table.add_column("error, points", justify="right", style="dim")
    for i, size in enumerate(curve.sizes):
        cells = []
        for name, rates in curve.token_hit_rates.items():
            cells.append(f"{rates[i]:.4f}")
            if errors is not None and curve.exact is not None:
                cells += [f"{curve.exact[name][i]:.4f}", f"{errors[name][i]:+.2f}"]
        table.add_row(f"{size:,}", *cells)
    return table


def _caption(curve: HitRateCurve) -> str:
    text = (
        f"{curve.requests:,} requests, {curve.blocks:,} blocks of {curve.block_size:,} tokens, about "
        f"{curve.distinct_blocks:,} distinct; sampled: {curve.rate:.4%} of the blocks, "
        f"{curve.sampled_requests:,} requests"
    )
    for name, errors in (curve.errors or {}).items():
        largest = max(map(abs, errors))
        mean = sum(map(abs, errors)) / len(errors)
        text += f"\nerror of {name}: at most {largest:.2f} percentage points, {mean:.2f} on average"
    return text
