# SPDX-License-Identifier: Apache-2.0
"""Checked arguments and ranges of tokens."""

from __future__ import annotations

import numpy as np

from kvcache.checks import MAX_INT32, as_array, check_range, integers


def checked_table(block_table: object, num_rows: int) -> np.ndarray:
    """Return int32 or int64[num_rows, width]. Raises TypeError or ValueError."""
    table = as_array(block_table, "block_table")
    if table.ndim != 2 or len(table) != num_rows:
        raise ValueError(f"block_table has shape {list(table.shape)}: expected [{num_rows}, width]")
    if table.dtype in (np.int32, np.int64):
        return table
    return integers(table, "block_table", table.shape[1:])


def check_width(table: np.ndarray, width: int) -> None:
    """Raise ValueError if a block table has fewer columns than `width`."""
    if table.shape[1] < width:
        raise ValueError(f"block_table has {table.shape[1]} columns: expected {width}")


def checked_int64(values: object, name: str) -> np.ndarray:
    """Return int64[n], without a copy if possible. Raises TypeError or ValueError."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return values
    return integers(values, name, ())


def checked_counts(name: str, values: object, num_rows: int) -> np.ndarray:
    """Return int64[num_rows] of values from 0 to MAX_INT32. Raises TypeError or ValueError."""
    array = checked_int64(values, name)
    if len(array) != num_rows:
        raise ValueError(
            f"{name} has {len(array)} entries: expected {num_rows}, one per request_id"
        )
    if not 0 <= np.bitwise_or.reduce(array) <= MAX_INT32:  # negative or large if any entry is
        check_range(name, "is", array, 0, MAX_INT32 + 1)
    return array


def run_starts(values: np.ndarray, indices: np.ndarray | None = None) -> np.ndarray:
    """Return the indices at which the value differs from that at the index before."""
    indices = np.arange(len(values)) if indices is None else indices
    is_first = np.ones(len(indices), bool)
    is_first[1:] = values[indices[1:]] != values[indices[:-1]]
    return indices[is_first]


def spread(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token of ranges [start, start + count) its range and its position."""
    if (counts == 1).all():
        return np.arange(len(counts)), starts
    of_tokens = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return of_tokens, np.arange(len(of_tokens)) + np.repeat(starts - first, counts)


def first_of_each(mask: np.ndarray, *keys: np.ndarray) -> list[int]:
    """Return the first index of each combination of keys among the entries of a mask."""
    found: dict[tuple, int] = {}
    for i in np.flatnonzero(mask).tolist():
        found.setdefault(tuple(int(key[i]) for key in keys), i)
    return list(found.values())
