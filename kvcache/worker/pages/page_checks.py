# SPDX-License-Identifier: Apache-2.0
"""Checks, before anything is copied, that a plan's pages are in range and written at most once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.checks import check_once, check_range, integers
from kvcache.step import StepPlan


@dataclass
class PageMoves:
    """The validated sections of a plan: copies as int64[n, 2], and pages to zero as int64[n]."""

    swap_out: np.ndarray
    copy: np.ndarray
    zero: np.ndarray
    swap_in: np.ndarray


def checked_page_moves(
    plan: StepPlan, num_blocks: int, num_host_blocks: int, clears_fresh: bool = False
) -> PageMoves:
    """Return a plan's page moves, after checking that pages are in range and written at most once.

    The order of entries within a section does not matter. Only `swap_out` may read a page that
    another section writes, so copies, zeroing and swap-ins are independent of each other. A plan
    must not both write and read a host page. `clears_fresh`: whether to zero the pages in `fresh`.
    Raises TypeError or ValueError.
    """
    moves = PageMoves(
        integers(plan.swap_out, "swap_out", (2,)),
        integers(plan.copy, "copy", (2,)),
        integers(plan.zero, "zero", ()),
        integers(plan.swap_in, "swap_in", (2,)),
    )
    if clears_fresh and len(fresh := integers(plan.fresh, "fresh", ())):
        check_range("fresh", "has page", fresh, 1, num_blocks)
        moves.zero = np.concatenate([moves.zero, np.setdiff1d(fresh, moves.zero)])
    out, copy, zero, back = moves.swap_out, moves.copy, moves.zero, moves.swap_in
    if not (len(out) or len(copy) or len(zero) or len(back)):
        return moves
    check_range("swap_out", "reads page", out[:, 0], 1, num_blocks)
    check_range("swap_out", "writes to host page", out[:, 1], 1, num_host_blocks)
    check_range("copy", "reads page", copy[:, 0], 0, num_blocks)
    check_range("copy", "writes to page", copy[:, 1], 1, num_blocks)
    check_range("zero", "writes to page", zero, 1, num_blocks)
    check_range("swap_in", "reads host page", back[:, 0], 1, num_host_blocks)
    check_range("swap_in", "writes to page", back[:, 1], 1, num_blocks)
    written = np.concatenate([copy[:, 1], zero, back[:, 1]])
    check_once("copy, zero and swap_in write to page", written)
    check_once("swap_out writes to host page", out[:, 1])
    _check_apart("swap_out writes to host page", out[:, 1], "swap_in", back[:, 0])
    for name, ids in (("copy", copy[:, 1]), ("zero", zero), ("swap_in", back[:, 1])):
        _check_apart(f"{name} writes to page", ids, "copy", copy[:, 0])
    return moves


def _check_apart(what: str, ids: np.ndarray, other: str, others: np.ndarray) -> None:
    both = np.intersect1d(ids, others)
    if len(both):
        raise ValueError(f"{what} {both[0]}, and {other} reads it: expected one of the two")
