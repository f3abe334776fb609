"""Checks of a plan's page moves: before a byte moves, all pages are there and each is written once."""

from __future__ import annotations

import numpy as np

from kvcache.plan import StepPlan


def check_page_moves(plan: StepPlan, num_blocks: int, num_host_blocks: int) -> None:
    """ValueError or TypeError unless the plan's pages are there, and each is written at most once.

    Within a section the order does not matter: `copy` reads no page that it writes. A page of the host
    is not both written and read: no plan needs it, and it would have to wait for itself.
    """
    out = integers(plan.swap_out, "swap_out", (2,))
    copy = integers(plan.copy, "copy", (2,))
    zero = integers(plan.zero, "zero", ())
    back = integers(plan.swap_in, "swap_in", (2,))
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
    _check_apart("copy writes to page", copy[:, 1], "copy", copy[:, 0])


def check_range(name: str, what: str, ids: np.ndarray, least: int, size: int) -> None:
    """ValueError unless all ids are of [least, size)."""
    wrong = np.flatnonzero((ids < least) | (ids >= size))
    if len(wrong):
        raise ValueError(
            f"{name}[{wrong[0]}] {what} {ids[wrong[0]]}: expected {least} to {size - 1}"
        )


def check_once(what: str, ids: np.ndarray) -> None:
    """ValueError unless all ids differ."""
    found, counts = np.unique(ids, return_counts=True)
    if len(found) and counts.max() > 1:
        raise ValueError(f"{what} {found[counts.argmax()]} twice: expected one write per page")


def integers(values: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """int64[n, *shape]; nothing is cut off. ValueError or TypeError for anything else."""
    array = np.asarray(values)
    if array.shape[1:] != shape or array.ndim != 1 + len(shape):
        wanted = ", ".join(["n", *map(str, shape)])
        raise ValueError(f"{name} has shape {list(array.shape)}: expected [{wanted}]")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array.astype(np.int64)


def _check_apart(what: str, ids: np.ndarray, other: str, others: np.ndarray) -> None:
    both = np.intersect1d(ids, others)
    if len(both):
        raise ValueError(f"{what} {both[0]}, and {other} reads it: expected one of the two")
