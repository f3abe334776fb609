# SPDX-License-Identifier: Apache-2.0
"""Figures, their bars, and the files of results. Alternatives are measured in turn in one process."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.gpu.machine import commit, processor, write_results
from kvcache_lab.bandwidth import median_times as median_times

# On shared machines, the ratio of two times that were measured in turn varies by up to this factor.
TOLERANCE = 1.5
_COLUMNS = ("name", "unit", "ours", "peer", "peer_name")  # bars are declared in the code only


@dataclass(frozen=True)
class Result:
    """A figure. `bar` is its limit in `unit`, which assumes an idle machine."""

    name: str
    unit: str
    ours: float
    peer: float | None = None
    peer_name: str = ""
    bar: float | None = None
    higher_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """Return the factor by which the result is better than the peer."""
        if self.peer is None or not self.ours or not self.peer:
            return None
        return self.ours / self.peer if self.higher_is_better else self.peer / self.ours

    def row(self) -> dict:
        """Return the figure as a row of a file of results."""
        row = {name: value for name, value in vars(self).items() if name in _COLUMNS}
        return {**row, "ratio": self.ratio}

    def fell_behind(self, committed: Mapping[str, float | None]) -> str:
        """Return what the figure fell behind, or an empty string.

        `committed`: the committed ratios by name. Times are not compared with committed times, because
        machines are shared.
        """
        if self.bar is not None:
            reaches = self.ours >= self.bar if self.higher_is_better else self.ours <= self.bar
            if not reaches:
                return f"behind its bar, {self.bar:.3g} {self.unit}"
        before = committed.get(self.name)
        if before is None or self.ratio is None or self.ratio * TOLERANCE >= before:
            return ""
        return f"behind the committed ratio, {before:.3g}x"

    def line(self) -> str:
        cells = [
            "-" if each is None else f"{each:.3g}" for each in (self.ours, self.peer, self.bar)
        ]
        ratio = "-" if self.ratio is None else f"{self.ratio:.1f}x"
        against = f" (peer: {self.peer_name})" if self.peer_name else ""
        return f"{cells[0]:>9} {cells[1]:>9} {ratio:>8} {cells[2]:>9} {self.unit:11} {self.name}{against}"


HEADER = f"{'ours':>9} {'peer':>9} {'ratio':>8} {'bar':>9} {'unit':11} figure"


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread. On a busy machine, threads of small operations wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds_per_call(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """Return a function that calls `function` `calls` times, so that short calls are timed together."""

    def repeated() -> None:
        for _ in range(calls):
            function()

    return repeated


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for `save`."""
    text = "also put the figures into this file, in a section of their own"
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)


def save(path: Path | None, section: str, figures: Mapping[str, object]) -> None:
    """Write a benchmark's figures, the machine and the commit to a section of a file, if one is given."""
    if path is None:
        return
    contents = json.loads(path.read_text()) if path.exists() else {}
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {processor()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
    }
    write_results(path, {**contents, section: {**about, **figures}})
