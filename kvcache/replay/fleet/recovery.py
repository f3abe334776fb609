# SPDX-License-Identifier: Apache-2.0
"""Simulates failures of a fleet, and measures the recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.checks import MAX_INT32, instance, integer, number, plain_fields, shown
from kvcache.replay.fleet.failures import Failure, checked_failures
from kvcache.replay.fleet.hardware import Hardware
from kvcache.replay.fleet.outcomes import HIT_FIELDS, Outcomes, percentile
from kvcache.replay.fleet.simulation import (
    FleetReport,
    Simulation,
    Workload,
    checked_hardware,
    repeatable,
    with_prices,
)
from kvcache.replay.fleet.sizes import Fleet, fleet_size

if TYPE_CHECKING:
    from rich.table import Table

_MOST_POINTS = 500  # maximum number of points in a curve


@dataclass
class FailurePhase:
    """Statistics of the requests that arrive during one phase of a simulation with failures.

    Attributes:
        requests: Number of requests.
        token_hit_rate: Hit tokens of all tiers per prompt token.
        p99_ms_to_first_token: 99th percentile of the time to first token.
        undisturbed_hit_rate: Hit rate of these requests without failures.
        undisturbed_p99_ms: 99th percentile for these requests without failures.
    """

    requests: int = 0
    token_hit_rate: float = 0.0
    p99_ms_to_first_token: float = 0.0
    undisturbed_hit_rate: float = 0.0
    undisturbed_p99_ms: float = 0.0

    def __post_init__(self) -> None:
        plain_fields(self)


@dataclass
class FailureReport:
    """A fleet with failures, compared to the same fleet and workload without failures.

    Attributes:
        failures: The failures as text (`Failure.parse`).
        report: Totals of the simulation with failures.
        undisturbed: Totals of the simulation without failures.
        phases: `before`: before the first failure. `during`: from the first failure until the fleet has
            recovered. `after`: after the recovery.
        recovery_s: Seconds from the first failure until all failures are repaired and the moving
            hit rate stays within `tolerance` of the undisturbed hit rate. None: the fleet has not
            recovered by the end of the workload.
        tolerance: How far the moving hit rate may be below the undisturbed hit rate after recovery.
        window: Number of requests over which the moving hit rates are computed.
        resent_requests: Requests that were resent because their replica died.
        delayed_requests: Requests that waited because the router was down or could not reach a
            replica.
        time_s: Times of the points in the two hit rate curves, in seconds from the first arrival.
        hit_rates: Moving hit rate with failures.
        undisturbed_hit_rates: Moving hit rate without failures.
    """

    failures: list[str]
    report: FleetReport
    undisturbed: FleetReport
    phases: dict[str, FailurePhase]
    recovery_s: float | None
    tolerance: float
    window: int
    resent_requests: int = 0
    delayed_requests: int = 0
    time_s: list[float] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)
    undisturbed_hit_rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        plain_fields(self)
        instance(self.report, FleetReport, "report")
        instance(self.undisturbed, FleetReport, "undisturbed")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def simulate_failures(
    workload: Workload,
    fleet: Fleet,
    failures: Sequence[Failure],
    hardware: Hardware | None = None,
    *,
    tolerance: float = 0.02,
    window: int = 100,
) -> FailureReport:
    """Replay a timed workload through a fleet twice, without and with failures.

    All replicas are simulated, even if `simulate_fleet` would sample a fleet of this size. A
    request whose replica dies is resent to a replica that the router can reach, and starts over. If
    the request already had a first token, the time of this token is reported. Requests wait if no
    replica can be reached. Loads that began before an outage of the store are completed. Blocks
    whose prefill ends during an outage are not stored. The router learns the contents of the caches
    from the replicas' events. After a restart, it learns only of blocks that are stored or hit
    after the restart. The router's index may therefore be wrong, which causes unnecessary prefills,
    but no errors.

    Args:
        workload: The requests, as in `simulate_fleet`.
        fleet: The fleet.
        failures: The failures, one or more.
        hardware: Speeds and prices. None: the defaults of `Hardware`.
        tolerance: How far the moving hit rate may be below the undisturbed hit rate after recovery.
        window: Number of requests over which the moving hit rate is computed.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is invalid, the fleet lacks the replica or store that fails, or
            the workload is not valid for `simulate_fleet`.

    Example:
        >>> from kvcache.replay import chat_workload
        >>> fleet = Fleet(replicas=2, num_blocks=2_001)
        >>> found = simulate_failures(
        ...     lambda: chat_workload(400), fleet, [Failure.parse("replica:0@60s+10s")]
        ... )
        >>> during = found.phases["during"]
        >>> during.token_hit_rate < during.undisturbed_hit_rate
        True
    """
    workload = repeatable(workload)
    instance(fleet, Fleet, "fleet")
    failures = checked_failures(failures, fleet)
    if not failures:
        raise ValueError("failures is empty: expected one failure or more")
    hardware = checked_hardware(hardware, fleet)
    tolerance = number(tolerance, "tolerance")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is {shown(tolerance)}: expected more than 0, less than 1")
    window = integer(window, "window", 1, MAX_INT32)
    undisturbed, failing = (
        Simulation(fleet, hardware),
        Simulation(fleet, hardware, failures=failures),
    )
    for each in (undisturbed, failing):
        with_prices(each.run(workload()), fleet, hardware)
    return _compared(undisturbed, failing, failures, tolerance, window)


def _compared(
    undisturbed: Simulation,
    failing: Simulation,
    failures: list[Failure],
    tolerance: float,
    window: int,
) -> FailureReport:
    arrivals_s = undisturbed.outcomes.column("arrival_ms") / 1000
    arrivals_s = arrivals_s - arrivals_s[0]
    begin_s = failures[0].at_s
    end_s = max(each.end_ms for each in failures) / 1000
    rates, expected = (_moving_rate(each.outcomes, window) for each in (failing, undisturbed))
    recovered_s = _recovered_s(arrivals_s, expected - rates <= tolerance, end_s, window)
    until_s = np.inf if recovered_s is None else recovered_s
    is_before, is_after = arrivals_s < begin_s, arrivals_s >= until_s
    parts = {"before": is_before, "during": ~is_before & ~is_after, "after": ~is_before & is_after}
    points = np.unique(np.linspace(0, len(rates) - 1, _MOST_POINTS).astype(int))
    return FailureReport(
        failures=[str(each) for each in failures],
        report=failing.report,
        undisturbed=undisturbed.report,
        phases={
            name: _phase(part, failing.outcomes, undisturbed.outcomes)
            for name, part in parts.items()
        },
        recovery_s=None if recovered_s is None else recovered_s - begin_s,
        tolerance=tolerance,
        window=window,
        resent_requests=failing.num_resent,
        delayed_requests=failing.num_delayed,
        time_s=arrivals_s[points].tolist(),
        hit_rates=rates[points].tolist(),
        undisturbed_hit_rates=expected[points].tolist(),
    )


def _moving_rate(outcomes: Outcomes, window: int) -> np.ndarray:
    """Return the moving hit rate: for each request, the hit rate over the last `window`
    requests.
    """
    hits, tokens = (
        np.concatenate([[0], np.cumsum(each)])
        for each in (_hit_tokens(outcomes), outcomes.column("prompt_tokens"))
    )
    last = np.arange(1, len(hits))
    first = np.maximum(last - window, 0)
    return (hits[last] - hits[first]) / np.maximum(tokens[last] - tokens[first], 1)


def _recovered_s(
    arrivals_s: np.ndarray, is_close: np.ndarray, end_s: float, window: int
) -> float | None:
    """Return the first time after the end of all failures, `end_s`, from which `is_close` holds for
    a whole window.
    """
    close_s, num_close = None, 0
    for time_s, close in zip(arrivals_s.tolist(), is_close.tolist()):
        if time_s < end_s or not close:
            close_s, num_close = None, 0
            continue
        close_s, num_close = time_s if close_s is None else close_s, num_close + 1
        if num_close == window:
            return close_s
    return None


def _phase(part: np.ndarray, failing: Outcomes, undisturbed: Outcomes) -> FailurePhase:
    rates, p99s = [], []
    for each in (failing, undisturbed):
        rates.append(
            float(_hit_tokens(each)[part].sum() / max(each.column("prompt_tokens")[part].sum(), 1))
        )
        times = (each.first_ms - each.column("arrival_ms"))[part]
        times = times[np.isfinite(times)]
        p99s.append(percentile(times, 99) if len(times) else 0.0)
    return FailurePhase(int(part.sum()), rates[0], p99s[0], rates[1], p99s[1])


def _hit_tokens(outcomes: Outcomes) -> np.ndarray:
    return sum(outcomes.column(name) for name in HIT_FIELDS)


def failure_table(found: FailureReport) -> Table:
    """Return the report of failures as a rich table."""
    instance(found, FailureReport, "found")
    from rich.table import Table

    fleet = found.report.fleet
    table = Table(
        title=f"{fleet_size(fleet)}, {fleet['router']}: {', '.join(found.failures)}",
        caption=_caption(found),
    )
    for name in ("", "requests", "hits", "without failure", "p99 ms", "without failure"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, each in found.phases.items():
        cells = (
            f"{each.requests:,}",
            f"{each.token_hit_rate:.1%}",
            f"{each.undisturbed_hit_rate:.1%}",
        )
        times = each.p99_ms_to_first_token, each.undisturbed_p99_ms
        table.add_row(name, *cells, *(f"{time:,.0f}" for time in times))
    return table


def _caption(found: FailureReport) -> str:
    parts = ["not recovered at the end of the workload"]
    if found.recovery_s is not None:
        parts = [f"recovered after {found.recovery_s:,.0f} s"]
    if found.resent_requests:
        parts.append(f"sent again: {found.resent_requests:,}")
    if found.delayed_requests:
        parts.append(f"delayed: {found.delayed_requests:,}")
    return "; ".join(parts)
