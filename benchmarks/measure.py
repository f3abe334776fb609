# SPDX-License-Identifier: Apache-2.0
"""Computes medians on a shared machine. Alternatives are measured in turn in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcache_lab.bandwidth import (
    median_times as median_times,
)


@dataclass(frozen=True)
class Result:
    """One line of the report. `bar` and `goal` are targets from PEER_FIGURES, in `unit`."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    peer_name: str = ""
    bar: float | None = None
    goal: float | None = None
    higher_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """Return the factor by which the result is better than the peer."""
        if self.peer is None or not self.ours or not self.peer:
            return None
        return self.ours / self.peer if self.higher_is_better else self.peer / self.ours

    @property
    def reaches_bar(self) -> bool | None:
        if self.bar is None:
            return None
        return self.ours >= self.bar if self.higher_is_better else self.ours <= self.bar


def seconds_per_call(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return a function that calls `function` `calls` times, so that short calls are timed together."""

    def repeated() -> None:
        for _ in range(calls):
            function()

    return repeated


def lines_of(r: Result) -> Iterator[str]:
    """Yield the lines of the report for one result."""

    def cell(value: float | None, width: int) -> str:
        return f"{'-' if value is None else f'{value:.3g}':>{width}}"

    mark = {True: "", False: "  MISSED", None: ""}[r.reaches_bar]
    ratio = "-" if r.ratio is None else f"{r.ratio:.1f}x"
    yield (
        f"{r.name[:57]:58}{cell(r.ours, 12)}{cell(r.peer, 12)}{ratio:>8}"
        f"{cell(r.bar, 9)}{cell(r.goal, 8)}  {r.unit}{mark}"
        + (f"  (peer: {r.peer_name})" if r.peer_name else "")
    )
