# SPDX-License-Identifier: Apache-2.0
"""Validates and converts arguments. Native code validates the lengths of arrays and the ranges of
counts.
"""

from __future__ import annotations

import numpy as np

from kvcache.checks import as_array, integers, one_of

MODES = ("report", "stop")


def checked_table(block_table: object, num_rows: int) -> np.ndarray:
    """Convert a block table to int32 or int64[num_rows, width]. Raises TypeError or ValueError."""
    is_array = type(block_table) is np.ndarray  # fast path
    table = block_table if is_array else as_array(block_table, "block_table")
    if table.ndim != 2 or len(table) != num_rows:
        raise ValueError(
            f"block_table has shape {list(table.shape)}: expected [{num_rows}, width], one row for "
            "each of request_ids"
        )
    if table.dtype in (np.int32, np.int64):
        return table
    return integers(table, "block_table", table.shape[1:])


def checked_int64(values: object, name: str) -> np.ndarray:
    """Convert an array to int64[n], without a copy if possible. Raises TypeError or ValueError."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return values
    return integers(values, name, ())


def checked_mode(mode: object, name: str) -> str:
    """Validate a mode, "report" or "stop", and return it. Raises ValueError for any other value."""
    return one_of(mode, name, MODES)
