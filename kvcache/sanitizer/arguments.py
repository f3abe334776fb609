# SPDX-License-Identifier: Apache-2.0
"""Checked arguments. Native calls check lengths and ranges of counts."""

from __future__ import annotations

import numpy as np

from kvcache.checks import as_array, integers, shown

MODES = ("report", "stop")


def checked_table(block_table: object, num_rows: int) -> np.ndarray:
    """Return int32 or int64[num_rows, width]. Raises TypeError or ValueError."""
    is_array = type(block_table) is np.ndarray  # saves time
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
    """Return int64[n], without a copy if possible. Raises TypeError or ValueError."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return values
    return integers(values, name, ())


def checked_mode(mode: object, name: str) -> str:
    """Return "report" or "stop". Raises ValueError."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"{name} is {shown(mode)}: expected {' or '.join(map(repr, MODES))}")
    return mode
