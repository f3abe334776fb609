# SPDX-License-Identifier: Apache-2.0
"""How ops find the tables of several cache groups in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from kvcache.checks import instances, integer
from kvcache.worker.tables.table_shape import TableShape


def table_groups(shapes: Sequence[TableShape], num_rows: int) -> torch.Tensor:
    """Return the argument `groups` of the ops that read block tables, such as `ops.slot_mapping`.

    The tables of all groups are concatenated in one tensor, each of shape [num_rows, num_columns].

    Args:
        shapes: The shape of each group's table.
        num_rows: Number of rows of each table.

    Returns:
        int64[len(shapes), 8] on the CPU. For each group: offset of its table, columns, kernel block
        size, context-parallel world size, rank, interleave, window (0: none), and the group's number,
        which is its row in `num_blocks_per_row`.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> table_groups([TableShape(16, 4), TableShape(16, 4, window=24)], num_rows=8).tolist()
        [[0, 4, 16, 1, 0, 1, 0, 0], [32, 4, 16, 1, 0, 1, 24, 1]]
    """
    shapes = instances(shapes, TableShape, "shapes")
    num_rows = integer(num_rows, "num_rows", 1)
    offsets = accumulate((each.num_columns * num_rows for each in shapes), initial=0)
    fields = [
        (
            offset,
            each.num_columns,
            each.kernel_block_size,
            each.world_size,
            each.rank,
            each.cp_kv_cache_interleave_size,
            each.window or 0,
            group,
        )
        for group, (offset, each) in enumerate(zip(offsets, shapes))
    ]
    return torch.tensor(fields, dtype=torch.int64, device="cpu").view(-1, 8)
