# SPDX-License-Identifier: Apache-2.0
"""Compares eviction policies: replays one workload with each policy at several pool sizes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvcache.allocator import hash_blocks
from kvcache.checks import flag, instance, integer, listed, number, plain_fields, shown
from kvcache.checks import text as checked_text
from kvcache_exchange.cli.policy_text import parse_eviction
from kvcache_lab.replayer import Replayer
from kvcache_lab.workload import WorkloadRequest, checked_requests

if TYPE_CHECKING:
    from rich.table import Table

COMPARED = ("lru", "learned")
"""Default policies of `kvcache replay --compare`. They use neither access times nor priorities, which
traces do not contain.
"""
_CLOSE = 0.01  # minimum gain, as a fraction of the hits, that justifies a slower policy


@dataclass(frozen=True)
class Comparison:
    """Token hit rates of eviction policies by pool size.

    Attributes:
        trace: Name of the trace.
        requests: Number of requests.
        block_size: Tokens per block.
        sizes: Pool sizes in blocks, without the null block.
        token_hit_rates: Hit rates per size, keyed by policy as `name[:option=value]...`.
        optimum: Hit rates per size with knowledge of the future; see the function `optimum`.
    """

    trace: str
    requests: int
    block_size: int
    sizes: tuple[int, ...]
    token_hit_rates: dict[str, list[float]]
    optimum: list[float] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        num_sizes = len(_checked_sizes(self.sizes))
        _checked_rates(self.token_hit_rates, "token_hit_rates", num_sizes)
        if self.optimum is not None:
            _checked_rates({"optimum": self.optimum}, "token_hit_rates", num_sizes)

    def to_dict(self) -> dict:
        """Return the comparison as plain data for JSON."""
        return {**asdict(self), "choose": self.choice}

    @property
    def choice(self) -> str:
        """The recommended policy and the reason.

        Example:
            >>> rates = {"lru": [0.2, 0.5], "learned": [0.3, 0.502]}
            >>> Comparison("", 9, 16, (10, 20), rates).choice
            'learned: most hits at 2 of 2 sizes, up to 50.0 % more than lru'
        """
        rates = self.token_hit_rates
        if not any(map(any, rates.values())):
            return (
                "none: no policy has a hit at any of these sizes; try a block size below "
                f"{self.block_size}"
            )
        best = [max(at_size) for at_size in zip(*rates.values(), strict=True)]
        behind = {
            name: [
                0.0 if most == 0 else 1 - rate / most for rate, most in zip(each, best, strict=True)
            ]
            for name, each in rates.items()
        }
        if "lru" in rates and max(behind["lru"]) < _CLOSE:
            return f"lru: no other policy has {_CLOSE:.0%} more hits at any of these sizes"
        name = min(rates, key=lambda each: sum(behind[each]))
        num_best = sum(share == 0 for share in behind[name])
        text = f"{name}: most hits at {num_best} of {len(best)} sizes"
        if num_best < len(best):
            text += f", at the others at most {100 * max(behind[name]):.1f} % fewer than the best policy"
        gains = [
            mine / other - 1 for mine, other in zip(rates[name], rates.get("lru", [])) if other
        ]
        return text if not gains else f"{text}, up to {100 * max(gains):.1f} % more than lru"


def compare(
    requests: Sequence[WorkloadRequest],
    policies: Sequence[str],
    sizes: Sequence[int],
    *,
    trace: str = "",
    with_optimum: bool = True,
    on_request: Callable[[], None] | None = None,
    **options: Any,
) -> Comparison:
    """Replay the requests with each policy at each pool size.

    Args:
        requests: The workload.
        policies: Policies as `name[:option=value]...`, at least one.
        sizes: Pool sizes in blocks, without the null block, at least one.
        trace: Name of the trace in the result.
        with_optimum: Also compute the optimum, for one full-attention group of `block_size`.
        on_request: Called after each request of each replay.
        options: Options for `Replayer`.

    Returns:
        The hit rates.

    Raises:
        ValueError: A policy is unknown, or an argument is invalid.
    """
    requests = checked_requests(requests, "requests")
    sizes = _checked_sizes(sizes)
    instance(trace, str, "trace")
    with_optimum = flag(with_optimum, "with_optimum")
    if not sizes:
        raise ValueError("sizes is empty: expected one or more")
    chosen = _checked_policies(policies)
    rates: dict[str, list[float]] = {text: [] for text in chosen}
    reports = []
    for text, (name, values) in chosen.items():
        for size in sizes:
            replayer = Replayer(
                num_blocks=size + 1, eviction=name, eviction_options=values, **options
            )
            reports.append(replayer.run(requests, trace, on_request))
            rates[text].append(reports[-1].token_hit_rate)
    block_size = reports[0].block_size
    best = [optimum(requests, block_size, size) for size in sizes] if with_optimum else None
    return Comparison(trace, len(requests), block_size, tuple(sizes), rates, best)


def _checked_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the pool sizes as a list. Raises TypeError or ValueError for invalid sizes."""
    return [integer(each, f"sizes[{i}]", 1) for i, each in enumerate(listed(sizes, "sizes"))]


def _checked_rates(rates: Mapping[str, list[float]], name: str, num_sizes: int) -> None:
    """Raise TypeError or ValueError unless `rates` maps policies to one hit rate per size."""
    if not isinstance(rates, Mapping):
        raise TypeError(f"{name} is {shown(rates)}: expected a mapping")
    for policy, of in rates.items():
        what = f"token hit rates of {checked_text(policy, name)}"
        for rate in listed(of, what):
            number(rate, what)
        if len(of) != num_sizes:
            raise ValueError(f"{what} are {shown(of)}: expected {num_sizes}, one per size")


def _checked_policies(policies: Sequence[str]) -> dict[str, tuple[str, dict[str, float]]]:
    """Return each policy's name and options.

    Raises TypeError or ValueError for invalid policies.
    """
    texts = [
        checked_text(each, f"policies[{i}]") for i, each in enumerate(listed(policies, "policies"))
    ]
    if not texts:
        raise ValueError("policies is empty: expected one or more")
    return {text: _parsed(i, text) for i, text in enumerate(texts)}


def _parsed(i: int, text: str) -> tuple[str, dict[str, float]]:
    try:
        return parse_eviction(text)
    except ValueError as error:
        raise ValueError(f"policies[{i}] is {error}") from None


def optimum(
    requests: Sequence[WorkloadRequest],
    block_size: int,
    num_blocks: int,
    *,
    holds_running: bool = False,
) -> float:
    """Return the token hit rate of the optimal policy, which evicts the block whose next use is the
    farthest in the future (Belady 1966).

    Requests run one at a time. Only full blocks occupy space. Among the blocks of one request, the
    block at the latest position is evicted first.

    Args:
        requests: The workload.
        block_size: Tokens per block.
        num_blocks: Pool size, without the null block.
        holds_running: Whether, as in an engine, a request needs all of its blocks at once and is
            rejected if they do not fit. By default, a running request may leave some of its blocks
            out of the cache, which no engine can do.

    Example:
        >>> from kvcache_lab import chat_workload
        >>> requests = list(chat_workload(20))
        >>> optimum(requests, 16, 100) >= optimum(requests, 16, 100, holds_running=True)
        True
    """
    requests = checked_requests(requests, "requests")
    block_size = integer(block_size, "block_size", 1)
    num_blocks = integer(num_blocks, "num_blocks", 1)
    holds_running = flag(holds_running, "holds_running")
    chains = [[bytes(each) for each in hash_blocks(r.token_ids, block_size)] for r in requests]
    uses: dict[bytes, list[int]] = {}  # indices of the requests that use each block, descending
    for i in reversed(range(len(chains))):
        for key in chains[i]:
            uses.setdefault(key, []).append(i)
    cached: dict[bytes, int] = {}  # index of the next request that uses the block
    farthest: list[tuple[int, int, bytes]] = []
    num_hits = num_tokens = 0
    for chain, request in zip(chains, requests, strict=True):
        for key in chain:
            uses[key].pop()
        if holds_running and len(chain) > num_blocks:
            continue
        num_tokens += request.num_tokens
        num_hits += next((i for i, key in enumerate(chain) if key not in cached), len(chain))
        if holds_running:
            for key in chain:
                cached[key] = -1  # matches no heap entry, so the block is not evicted
            _evict_farthest(cached, farthest, num_blocks)
        for depth, key in enumerate(chain):
            cached[key] = uses[key][-1] if uses[key] else len(chains)
            heapq.heappush(farthest, (-cached[key], -depth, key))
        _evict_farthest(cached, farthest, num_blocks)
    return num_hits * block_size / max(num_tokens, 1)


def _evict_farthest(
    cached: dict[bytes, int], farthest: list[tuple[int, int, bytes]], num_blocks: int
) -> None:
    while len(cached) > num_blocks:
        use, _, key = heapq.heappop(farthest)
        if cached.get(key) == -use:
            del cached[key]


def comparison_table(comparison: Comparison) -> Table:
    """Return the comparison as a rich table."""
    from rich.markup import escape
    from rich.table import Table

    instance(comparison, Comparison, "comparison")
    table = Table(title=f"Token hit rate by number of blocks: {escape(comparison.trace)}")
    table.add_column("eviction", style="cyan", overflow="fold")
    for size in comparison.sizes:
        table.add_column(f"{size:,}", justify="right", overflow="fold")
    rows: Mapping[str, list[float]] = comparison.token_hit_rates
    best = [max(at_size) for at_size in zip(*rows.values(), strict=True)]
    for name, rates in rows.items():
        cells = (
            f"[bold]{rate:.4f}[/]" if rate == most else f"{rate:.4f}"
            for rate, most in zip(rates, best, strict=True)
        )
        table.add_row(escape(name), *cells)
    if comparison.optimum is not None:
        table.add_section()
        table.add_row("optimum", *(f"{rate:.4f}" for rate in comparison.optimum), style="dim")
    return table
