# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest fleet that meets a target for the time to first token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcache.checks import (
    MAX_INT32,
    flag,
    instance,
    instances,
    integer,
    listed,
    number,
    shown,
    text,
)
from kvcache_lab.fleet.hardware import Hardware
from kvcache_lab.fleet.simulation import FleetReport, Workload, repeatable, simulate_fleet
from kvcache_lab.fleet.sizes import Fleet, fleet_size

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class FleetPlan:
    """The simulated fleets, and which of them is recommended.

    Attributes:
        p99_ms: The required 99th percentile of the time to first token.
        reports: One report per simulated fleet.
        recommended: The fleet with the fewest replicas, and then with the smallest tiers, that
            meets `p99_ms` and serves all requests. None: there is no such fleet.
        reason: Why no fleet is recommended. None if a fleet is recommended.
    """

    p99_ms: float
    reports: list[FleetReport] = field(default_factory=list)
    recommended: FleetReport | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        self.p99_ms = float(number(self.p99_ms, "p99_ms"))
        instances(self.reports, FleetReport, "reports", "reports")
        if self.recommended is not None:
            instance(self.recommended, FleetReport, "recommended")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        return asdict(self)


def plan_fleet(
    workload: Workload,
    fleet: Fleet,
    *,
    p99_ms: float,
    routers: Sequence[str] | None = None,
    host_blocks: Sequence[int] | None = None,
    store_blocks: Sequence[int] | None = None,
    peers: Sequence[bool] | None = None,
    replicas: Sequence[int] | None = None,
    decode_replicas: Sequence[int | None] | None = None,
    most_replicas: int = 1024,
    hardware: Hardware | None = None,
    on_report: Callable[[FleetReport], None] | None = None,
) -> FleetPlan:
    """Simulate fleets with several sizes, tiers and routers, and recommend the smallest fleet
    that meets the target.

    For each router and each combination of tiers, the number of replicas is doubled until the fleet
    meets `p99_ms`. Bisection then searches for a smaller sufficient number. The result is the
    smallest sufficient number if more replicas are never slower. This does not always hold, because
    with more replicas a router may spread a session over more of them. If the number of decode
    replicas is searched too, both numbers are doubled together. The search then minimizes the
    number of replicas and, for this number, the number of decode replicas.

    Args:
        workload: The requests in order of arrival: a list, or a function that returns an iterator
            over them. The function is called once per simulation.
        fleet: The sizes that are not varied. The search begins with the number of replicas of this
            fleet.
        p99_ms: Required 99th percentile of the time to first token, in milliseconds.
        routers: Routers to simulate. None: the router of `fleet`.
        host_blocks: Sizes of the host tier to simulate. None: the size in `fleet`.
        store_blocks: Sizes of the store to simulate. None: the size in `fleet`.
        peers: Values of `Fleet.peers` to simulate: whether replicas load from each other. None: the
            value in `fleet`.
        replicas: Numbers of replicas to simulate, instead of a search.
        decode_replicas: Numbers of decode replicas to simulate. 0: all replicas both prefill
            prompts and generate answers. A None in the sequence: search for the smallest sufficient
            number. None instead of a sequence: the number in `fleet`.
        most_replicas: Largest number of replicas, and of decode replicas, that the search simulates.
        hardware: Speeds. None: the defaults of `Hardware`.
        on_report: Called with the report of each simulation.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError: An argument is invalid, or the workload has no arrival times.

    Example:
        >>> from kvcache_lab import chat_workload
        >>> fleet = Fleet(replicas=1, num_blocks=4_001)
        >>> plan = plan_fleet(lambda: chat_workload(300), fleet, p99_ms=500)
        >>> plan.recommended.fleet["replicas"]
        1
    """
    workload = repeatable(workload)
    instance(fleet, Fleet, "fleet")
    p99_ms = number(p99_ms, "p99_ms")
    if not 0 < p99_ms < float("inf"):
        raise ValueError(f"p99_ms is {shown(p99_ms)}: expected more than 0 milliseconds")
    varied = {
        "routers": [fleet.router] if routers is None else routers,
        "host_blocks": [fleet.host_blocks] if host_blocks is None else host_blocks,
        "store_blocks": [fleet.store_blocks] if store_blocks is None else store_blocks,
        "peers": [fleet.peers] if peers is None else peers,
    }
    if replicas is not None:
        varied["replicas"] = replicas
    varied["decode_replicas"] = (
        [fleet.decode_replicas] if decode_replicas is None else decode_replicas
    )
    for name, values in varied.items():
        found = listed(values, name)
        for i, each in enumerate(found):
            if name == "routers":
                text(each, f"routers[{i}]")
            elif name == "peers":
                flag(each, f"peers[{i}]")
            elif name != "decode_replicas" or each is not None:
                integer(each, f"{name}[{i}]", int(name == "replicas"))
        if not found:
            raise ValueError(f"{name} is empty: expected one value or more")
        varied[name] = [*dict.fromkeys(found)]
    integer(most_replicas, "most_replicas", 1, MAX_INT32)
    if on_report is not None and not callable(on_report):
        raise TypeError(f"on_report is {shown(on_report)}: expected a function or None")
    # Check all sizes before the first simulation.
    bases = [
        replace(fleet, router=router, host_blocks=host, store_blocks=store, peers=loads)
        for router, host, store, loads in itertools.product(
            *(varied[name] for name in ("routers", "host_blocks", "store_blocks", "peers"))
        )
    ]
    counts = varied.get("replicas", [None])
    pairs = [*itertools.product(counts, varied["decode_replicas"])]
    for base, (count, decoding) in itertools.product(bases, pairs):
        replace(base, replicas=count or 1, decode_replicas=decoding or 0)
    plan = FleetPlan(p99_ms)

    def simulate(sized: Fleet) -> FleetReport:
        report = simulate_fleet(workload, sized, hardware)
        plan.reports.append(report)
        if on_report is not None:
            on_report(report)
        return report

    for base in bases:
        for pair in pairs:
            _search(simulate, base, pair, p99_ms, most_replicas)
    _recommend(plan)
    return plan


def _search(
    simulate: Callable[[Fleet], FleetReport],
    base: Fleet,
    pair: tuple[int | None, int | None],
    p99_ms: float,
    most: int,
) -> None:
    """Simulate a fleet with the given numbers of replicas and decode replicas. A number of None is
    replaced by the smallest sufficient number.
    """
    reports: dict[tuple[int, int], FleetReport] = {}

    def report_of(count: int, decoding: int) -> FleetReport:
        if (count, decoding) not in reports:
            sized = replace(base, replicas=count, decode_replicas=decoding)
            reports[count, decoding] = simulate(sized)
        return reports[count, decoding]

    def fewest_of(report_of: Callable[[int], FleetReport], first: int) -> int | None:
        return _smallest(report_of, p99_ms, min(first, most), most)

    count, decoding = pair
    if count is None and decoding is None:
        both = fewest_of(lambda count: report_of(count, count), base.replicas)
        if both is None:
            return
        count = fewest_of(lambda count: report_of(count, both), both)
        fewest_of(lambda decoding: report_of(count, decoding), both)
    elif count is None:
        fewest_of(lambda count: report_of(count, decoding), base.replicas)
    elif decoding is None:
        fewest_of(lambda decoding: report_of(count, decoding), 1)
    else:
        report_of(count, decoding)


def _smallest(
    report_of: Callable[[int], FleetReport], p99_ms: float, first: int, most: int
) -> int | None:
    """Return the smallest sufficient count, found by doubling from `first` and bisection, or
    None. Doubling ends if it has twice in a row made the fleet less than 1 % faster, although no
    replica is overloaded.
    """
    count, too_few, times = first, 0, list[float]()
    while not _is_fast(report := report_of(count), p99_ms):
        times.append(report.p99_ms_to_first_token)
        # With more replicas, an overloaded one may still pass requests to others.
        is_limited = len(times) > 2 and report.busiest_share <= 1 and times[-1] > 0.99 * times[-3]
        if count == most or report.rejected_requests or is_limited:
            return None  # more replicas would not help
        too_few, count = count, min(2 * count, most)
    while count - too_few > 1:
        middle = (count + too_few) // 2
        if _is_fast(report_of(middle), p99_ms):
            count = middle
        else:
            too_few = middle
    return count


def _is_fast(report: FleetReport, p99_ms: float) -> bool:
    return report.p99_ms_to_first_token <= p99_ms and not report.rejected_requests


def _best(reports: list[FleetReport], p99_ms: float) -> FleetReport:
    """Return the smallest fleet that meets `p99_ms`, or the fastest fleet if none does."""
    fast = [each for each in reports if _is_fast(each, p99_ms)]
    return (
        min(fast, key=_size) if fast else min(reports, key=lambda each: each.p99_ms_to_first_token)
    )


def _recommend(plan: FleetPlan) -> None:
    best = _best(plan.reports, plan.p99_ms)
    if _is_fast(best, plan.p99_ms):
        plan.recommended = best
        return
    rejected = [each for each in plan.reports if each.rejected_requests]
    if len(rejected) == len(plan.reports):
        least = min(rejected, key=lambda each: each.rejected_requests)
        plan.reason = (
            f"{least.rejected_requests} of {least.requests} requests do not fit into a replica with "
            f"{least.fleet['num_blocks'] - 1} blocks of {least.fleet['block_size']} tokens: use larger "
            "replicas"
        )
        return
    is_largest = best.fleet["replicas"] == max(each.fleet["replicas"] for each in plan.reports)
    plan.reason = (
        f"the fastest fleet, {fleet_size(best.fleet)}, has a p99 of "
        f"{best.p99_ms_to_first_token:,.0f} ms: use {'more or faster' if is_largest else 'faster'} "
        f"replicas, or allow more than {plan.p99_ms:g} ms"
    )


def _size(report: FleetReport) -> tuple[float, ...]:
    tiers = report.fleet["host_blocks"], report.fleet["store_blocks"]
    p99_ms = report.p99_ms_to_first_token
    count = report.fleet["replicas"] + report.fleet["decode_replicas"]
    return (count, *tiers, p99_ms)


def fleet_plan_table(plan: FleetPlan) -> Table:
    """Return the plan as a rich table, with the smallest fleets first. In the table, "2 + 1"
    denotes two prefill replicas and one decode replica.
    """
    instance(plan, FleetPlan, "plan")
    from rich.table import Table

    reports = sorted(plan.reports, key=_size)
    columns: dict[str, Callable[[FleetReport], str]] = {
        "replicas": _replicas,
        "router": lambda each: each.fleet["router"],
    }
    for tier in ("host", "store"):
        if any(each.fleet[f"{tier}_blocks"] for each in reports):
            columns[tier] = lambda each, tier=tier: f"{each.fleet[f'{tier}_blocks']:,}"
    if any(each.fleet["peers"] for each in reports):
        columns["peers"] = lambda each: "yes" if each.fleet["peers"] else "no"
    columns["hits"] = lambda each: f"{each.token_hit_rate:.1%}"
    columns["p99 ms"] = lambda each: f"{each.p99_ms_to_first_token:,.0f}"
    columns["busy"] = lambda each: f"{each.busy_share:.0%}"
    columns[""] = lambda each: _note(each, plan)
    table = Table(title=f"Fleets for a time to first token of {plan.p99_ms:g} ms at p99")
    for name in columns:
        justify = "left" if name in ("router", "") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for each in reports:
        style = "green" if each is plan.recommended else None
        table.add_row(*(text(each) for text in columns.values()), style=style)
    return table


def _replicas(report: FleetReport) -> str:
    decoding = report.fleet["decode_replicas"]
    return f"{report.fleet['replicas']:,}" + (f" + {decoding:,}" if decoding else "")


def _note(report: FleetReport, plan: FleetPlan) -> str:
    if report is plan.recommended:
        return "recommended"
    if report.rejected_requests:
        return f"{report.rejected_requests:,} requests do not fit"
    if report.busiest_share > 1:
        return "overloaded"
    return "" if report.p99_ms_to_first_token <= plan.p99_ms else "too slow"
