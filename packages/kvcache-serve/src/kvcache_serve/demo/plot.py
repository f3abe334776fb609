# SPDX-License-Identifier: Apache-2.0
"""Plots a demo step by step: pool states, hits and swaps."""

from __future__ import annotations

import os

import numpy as np

from kvcache.checks import path as checked_path
from kvcache_serve.demo.report import DemoReport, summary
from kvcache_serve.demo.serve_chats import Course

_HELD, _SHARED, _CACHED, _EMPTY = "#2166ac", "#92c5de", "#a6dba0", "#dddddd"
_HITS, _OUT, _IN, _WAITING = "#1b7837", "#b2182b", "#e08214", "#762a83"


def draw(course: Course, report: DemoReport, path: str | os.PathLike) -> None:
    """Write the figure to `path`. Needs matplotlib. Raises OSError if the file cannot be written."""
    path = checked_path(path, "path")
    import matplotlib

    matplotlib.use("Agg")  # this backend writes only files and works without a display
    from matplotlib import pyplot as plt

    figure, (pool, hits, swaps) = plt.subplots(
        3, 1, sharex=True, figsize=(9, 8.5), height_ratios=(3, 2, 2), layout="constrained"
    )
    steps = np.arange(1, len(course.held) + 1)
    by_state = [np.array(each) for each in (course.held, course.held_cached, course.cached)]
    empty = course.num_blocks - sum(by_state)
    labels = ("held", "held and cached", "cached, can be evicted", "empty")
    colors = (_HELD, _SHARED, _CACHED, _EMPTY)
    pool.stackplot(steps, *by_state, empty, labels=labels, colors=colors)
    pool.set_ylim(0, course.num_blocks)
    pool.set_title(f"Pool of {course.num_blocks:,} blocks, by state", loc="left", fontsize=10)

    asked = np.maximum(course.prompt_tokens, 1)
    hits.plot(steps, np.array(course.hit_tokens) / asked, color=_HITS, linewidth=2)
    hits.set_ylim(0, 1)
    hits.yaxis.set_major_formatter("{x:.0%}")
    hits.set_title(
        f"Cumulative hit rate of prompt tokens: {report.hit_rate:.0%} for new requests",
        loc="left",
        fontsize=10,
    )

    swaps.plot(steps, course.pages_out, color=_OUT, linewidth=2, label="pages out")
    swaps.plot(steps, course.pages_in, color=_IN, linewidth=2, label="pages in")
    swaps.set_ylim(bottom=0)
    swaps.yaxis.set_major_formatter("{x:,.0f}")
    others = swaps.twinx()
    others.plot(
        steps, np.add(course.swapped, course.waiting), color=_WAITING, linewidth=1, alpha=0.6,
        label="waiting sequences (right)",
    )  # fmt: skip
    others.set_ylim(bottom=0)
    swaps.set_title("Swaps (cumulative)", loc="left", fontsize=10)
    swaps.set_xlabel("steps")
    swaps.set_xlim(1, max(len(steps), 2))
    lines = [*swaps.get_lines(), *others.get_lines()]
    # The legend is next to the title, so that it does not cover a curve.
    above = {"loc": "lower right", "bbox_to_anchor": (1, 0.985), "fontsize": 8, "frameon": False}
    pool.legend(ncols=4, **above)
    swaps.legend(lines, [line.get_label() for line in lines], ncols=3, **above)
    for axes in (hits, swaps):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{report.requests:,} chat turns served by {report.model}, {report.tokens_per_second:,.0f} "
        f"tokens/s\n{summary(report)}",
        x=0.02,
        ha="left",
        fontsize=11,
        linespacing=1.5,
        parse_math=False,
    )
    try:
        figure.savefig(path, dpi=130)
    finally:
        plt.close(figure)
