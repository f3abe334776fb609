# SPDX-License-Identifier: Apache-2.0
"""Plots the progress of a replay (hit rate, evictions, blocks in use), hit rates by size, and fleets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.checks import path as checked_path
from kvcache_lab.comparison import Comparison
from kvcache_lab.fleet.planning import FleetPlan
from kvcache_lab.replayer import Series
from kvcache_lab.report import ReplayReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HITS, _EVICTIONS, _USED = "#1b7837", "#b2182b", "#2166ac"
_FIRST_TOKEN = "#762a83"
_GRAY = "#444444"
_COLORS = ("#2166ac", "#1b7837", "#b2182b", "#e08214", "#762a83", "#35978f")  # one per policy
# One color per miss reason.
_SHADES = ("#b2182b", "#2166ac", "#e08214", "#762a83", "#35978f", "#999999", "#1b7837", "#c2a5cf")
_ONE_PANEL = (9, 5.5)  # size in inches
_WINDOW_SHARE = 50  # moving averages cover 1/50 of the requests


def draw(series: Series, report: ReplayReport, path: str | os.PathLike) -> None:
    """Plot the progress of a replay, and write the figure to `path`.

    Requires matplotlib. Raises OSError if the file cannot be written.

    The time axis of a timed replay shows the arrival of each request.
    """
    is_timed = bool(series.arrival_ms)
    if is_timed:
        times, label = _minutes_or_seconds(np.array(series.arrival_ms) / 1000, "arrival")
    else:
        times, label = np.arange(1, len(series.prompt_tokens) + 1), "requests replayed"
    num_panels = 3 + is_timed + bool(series.missed_tokens)
    with _panels(_title(report), num_panels, times, label, path) as panels:
        _draw_hit_rate(panels[0], times, series, report)
        _draw_evictions(panels[1], times, series)
        _draw_used_blocks(panels[2], times, series, report)
        if series.missed_tokens:
            _draw_misses(panels[num_panels - 1], times, series)
        if is_timed:
            _draw_first_token(panels[3], times, series.ms_to_first_token, report)


@contextmanager
def _figure(title: str, path: str | os.PathLike, **options: object) -> Iterator[Any]:
    """Yield the axes of a new figure, then write the figure. `options` are those of `subplots`."""
    import matplotlib

    matplotlib.use("Agg")  # writes only files, so no display is needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(layout="constrained", **options)
    try:
        yield axes
        style = {"fontsize": 11, "linespacing": 1.5, "parse_math": False}
        figure.suptitle(title, x=0.02, ha="left", **style)
        figure.savefig(checked_path(path, "path"), dpi=130)
    finally:
        plt.close(figure)


@contextmanager
def _panels(
    title: str, num_panels: int, times: np.ndarray, label: str, path: str | os.PathLike
) -> Iterator[Sequence[Axes]]:
    """Yield vertically stacked panels with a shared time axis, then write the figure."""
    from matplotlib.ticker import MaxNLocator

    options = {"sharex": True, "figsize": (9, 2 + 2 * num_panels)}
    options["height_ratios"] = (3, *[2] * (num_panels - 1))
    with _figure(title, path, nrows=num_panels, **options) as panels:
        for axes in panels[1:]:
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_formatter("{x:,.0f}")
        yield panels
        panels[-1].set_xlabel(label)
        panels[-1].xaxis.set_major_locator(
            MaxNLocator(8, steps=[1, 2, 5, 10], integer=bool(len(times)) and times[-1] > 7)
        )
        panels[-1].xaxis.set_major_formatter("{x:,.10g}")
        panels[-1].set_xlim(0, times[-1] if len(times) and times[-1] > 0 else 1)


def _minutes_or_seconds(seconds: np.ndarray, what: str) -> tuple[np.ndarray, str]:
    if len(seconds) and seconds[-1] > 600:
        return seconds / 60, f"time of {what} (minutes)"
    return seconds, f"time of {what} (seconds)"


def _duration(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.0f} s"


def _draw_first_token(
    axes: Axes,
    times: np.ndarray,
    ms_to_first_token: Sequence[float],
    report: ReplayReport,
) -> None:
    from matplotlib.ticker import LogLocator

    seconds = np.array(ms_to_first_token, float) / 1000
    axes.plot(times, seconds, ".", markersize=2, color=_FIRST_TOKEN, alpha=0.5)
    if len(seconds) and seconds.max() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
        axes.set_ylim(max(1e-3, seconds[seconds > 0].min() / 2), 2 * seconds.max())
    axes.yaxis.set_major_formatter("{x:,g} s")
    _finish(
        axes,
        f"Time to first token: mean {_duration(report.mean_ms_to_first_token)}, "
        f"99th percentile {_duration(report.p99_ms_to_first_token)}",
    )


def draw_comparison(comparison: Comparison, path: str | os.PathLike) -> None:
    """Plot the hit rates of all policies by pool size. Raises the same errors as `draw`."""
    sizes, rates_of = comparison.sizes, comparison.token_hit_rates
    title = f"{comparison.trace}: {comparison.requests:,} requests\nChoose {comparison.choice}"
    with _figure(title, path, figsize=_ONE_PANEL) as axes:
        for (name, rates), color in zip(rates_of.items(), itertools.cycle(_COLORS)):
            axes.plot(sizes, rates, marker="o", markersize=4, color=color, linewidth=2, label=name)
        if comparison.optimum is not None:
            style = {"color": _GRAY, "linewidth": 1, "linestyle": "--", "marker": "o"}
            axes.plot(sizes, comparison.optimum, label="optimum (Belady)", markersize=2, **style)
        _finish_hit_rates(axes, comparison.block_size, "Token hit rate by eviction policy")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)


def _show_percents(axes: Axes) -> None:
    """Label the axis with percents, with a decimal where steps of whole percents are too coarse."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _finish_hit_rates(axes: Axes, block_size: int, title: str) -> None:
    top = max((max(line.get_ydata(), default=0.0) for line in axes.lines), default=0.0)
    axes.set_xscale("log")
    axes.set_ylim(0, min(1.0, 1.1 * max(top, 0.01)))
    _show_percents(axes)
    axes.set_xlabel(f"blocks of {block_size} tokens")
    _finish(axes, title)


def draw_fleet_plan(plan: FleetPlan, trace: str, path: str | os.PathLike) -> None:
    """Plot the time to first token of all fleets by size. Raises the same errors as `draw`."""
    title = f"Fleets for {trace}: time to first token (dashed: required; circle: recommended)"
    with _figure(title, path, figsize=_ONE_PANEL) as axes:
        _draw_times(axes, plan)


def _draw_times(axes: Axes, plan: FleetPlan) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    lines: dict[str, list[tuple[float, float]]] = {}
    for each in plan.reports:
        if each.rejected_requests:
            continue
        count = each.fleet["replicas"] + each.fleet["decode_replicas"]
        points = lines.setdefault(_fleet_name(each.fleet), [])
        points.append((count, max(each.p99_ms_to_first_token, 1.0)))
        if each is plan.recommended:
            axes.plot(*points[-1], marker="o", markersize=14, color=_GRAY, fillstyle="none")
    for (name, points), color in zip(lines.items(), itertools.cycle(_COLORS)):
        axes.plot(*zip(*sorted(points)), marker="o", markersize=4, color=color, label=name)
    axes.axhline(plan.p99_ms, color=_GRAY, linewidth=1, linestyle="--")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlabel("replicas")
    _finish(axes, "p99 in ms")


_TIERS = ("host_blocks", "store_blocks")


def _fleet_name(fleet: dict[str, Any]) -> str:
    tiers = [f"{fleet[name]:,} {name[:-7]} blocks" for name in _TIERS if fleet[name]]
    peers = ["peers"] if fleet["peers"] else []
    pools = ["decode replicas"] if fleet["decode_replicas"] else []
    return ", ".join([fleet["router"], *tiers, *peers, *pools])


def _title(report: ReplayReport) -> str:
    rejected = f" ({report.rejected_requests:,} rejected)" if report.rejected_requests else ""
    groups = report.groups or []
    shared = f"for {len(groups)} groups" if len(groups) > 1 else f"of {report.block_size} tokens"
    most = "at most " if report.service else ""
    return (
        f"Prefix cache replay of {report.trace}\n"
        f"{report.requests:,} requests{rejected}, {most}{report.concurrency} concurrent, "
        f"{report.capacity_blocks:,} blocks {shared}"
        + (f"; {_speeds(report.service)}" if report.service else "")
        + _overloaded(report.overload)
    )


def _speeds(service: str) -> str:
    prefill, decode = service.split(",")
    return f"prefill {prefill}, decode {decode} tokens/s"


def _overloaded(overload: str | None) -> str:
    return "" if overload is None else f"\nOverloaded: {overload}"


def _draw_hit_rate(axes: Axes, times: np.ndarray, series: Series, report: ReplayReport) -> None:
    hits, tokens = np.cumsum([0, *series.hit_tokens]), np.cumsum([0, *series.prompt_tokens])
    since_start = hits[1:] / np.maximum(tokens[1:], 1)
    recent = _moving_sum(series.hit_tokens) / np.maximum(_moving_sum(series.prompt_tokens), 1)
    label = f"last {_window(len(times)):,} requests"
    axes.plot(times, recent, color=_HITS, alpha=0.35, linewidth=1, label=label)
    axes.plot(times, since_start, color=_HITS, linewidth=2, label="cumulative")
    highest = max([0.1, *recent, *since_start])
    axes.set_ylim(0, min(1.0, np.ceil(11 * highest) / 10))
    _show_percents(axes)
    _finish(axes, f"Token hit rate: {report.token_hit_rate:.2%} in total")


def _draw_evictions(axes: Axes, times: np.ndarray, series: Series) -> None:
    evicted = np.array(series.evicted_blocks, np.int64)
    axes.plot(times, evicted, color=_EVICTIONS, linewidth=2)
    axes.set_ylim(0, 1.05 * max([1, *evicted]))
    _finish(axes, f"Evicted blocks: {max([0, *evicted]):,} in total")


def _draw_used_blocks(axes: Axes, times: np.ndarray, series: Series, report: ReplayReport) -> None:
    window = _window(len(times))
    mean = _moving_sum(series.used_blocks) / np.minimum(np.arange(1, len(times) + 1), window)
    axes.plot(
        times, series.used_blocks, color=_USED, alpha=0.35, linewidth=0.7, label="each request"
    )
    axes.plot(times, mean, color=_USED, linewidth=2, label=f"mean of the last {window:,}")
    most = max([1, *series.used_blocks])
    axes.set_ylim(0, 1.05 * most)
    if report.capacity_blocks <= 1.3 * most:  # otherwise the limit would flatten the curve
        axes.set_ylim(0, 1.05 * report.capacity_blocks)
        axes.axhline(report.capacity_blocks, color=_GRAY, linewidth=1, ls="--", label="capacity")
    _finish(axes, f"Blocks in use: peak {report.peak_used_blocks:,} of {report.capacity_blocks:,}")


def _draw_misses(axes: Axes, times: np.ndarray, series: Series) -> None:
    tokens = np.maximum(_moving_sum(series.prompt_tokens), 1)
    shares = {
        reason: _moving_sum(missed) / tokens
        for reason, missed in series.missed_tokens.items()
        if any(missed)
    }
    if shares:
        axes.stackplot(times, *shares.values(), labels=[*shares], colors=_SHADES, linewidth=0)
    axes.set_ylim(0, 1)
    _show_percents(axes)
    _finish(axes, f"Missed prompt tokens (last {_window(len(times)):,} requests)")


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_GRAY)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.1}
        # The legend is above the plot, in one line beside the title, because it would hide lines inside.
        size = {"fontsize": 9} if len(labels) <= 4 else {"fontsize": 7, "handlelength": 1}
        axes.legend(ncols=len(labels), frameon=False, **size, **place)


def _window(num_requests: int) -> int:
    return max(num_requests // _WINDOW_SHARE, 1)


def _moving_sum(values: list[int]) -> np.ndarray:
    """Return, for each entry, the sum of the entries in the window that ends with this entry."""
    sums = np.cumsum([0, *values])
    ends = np.arange(1, len(values) + 1)
    return sums[ends] - sums[np.maximum(ends - _window(len(values)), 0)]
