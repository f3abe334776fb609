"""The worker's block table: which block holds which part of each row's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcache import ops
from kvcache.worker.buffer import HostDeviceBuffer


def _integers(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    array = np.ascontiguousarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array


def _int32(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    return _integers(values, name).astype(np.int32, copy=False)


class BlockTable:
    """Block ids per row, on the host with a mirror on the device, and the slot mapping of a step.

    `block_table`: int32[max_num_reqs, max_num_blocks_per_req]. `slot_mapping`:
    int64[max_num_batched_tokens]. Both have `.np`, `.cpu` and `.gpu` faces, one memory where the
    device is the CPU, at addresses that never change: a CUDA graph captured once stays valid.

    Changes go to the host side; `commit_block_table` and `commit_slot_mapping` upload them in the
    order of the current stream, without waiting. The methods here may be called again at once (they
    wait for a running upload by themselves); who writes into `.np` directly calls
    `block_table.before_write()` first.

    >>> table = BlockTable(16, 4, 8, 64, False, "cpu", 16)
    >>> table.add_row([7, 9], 0)
    >>> table.compute_slot_mapping(np.array([0, 0], np.int32), np.array([3, 17]))
    >>> table.slot_mapping.np[:3]
    array([115, 145,  -1])
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        kernel_block_size: int,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("max_num_reqs", max_num_reqs),
            ("max_num_blocks_per_req", max_num_blocks_per_req),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}: expected 1 or more")
        if kernel_block_size != block_size:
            raise ValueError(
                f"kernel_block_size is {kernel_block_size}, block_size {block_size}: "
                "expected them to be equal"
            )
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = torch.device(device)
        self.block_table = self._buffer(
            (max_num_reqs, max_num_blocks_per_req), torch.int32, pin_memory
        )
        self.num_blocks_per_row = np.zeros(max_num_reqs, np.int32)
        self.slot_mapping = self._buffer((max_num_batched_tokens,), torch.int64, pin_memory)

    def append_row(self, block_ids: Sequence[int] | np.ndarray, row: int) -> None:
        """Adds block ids behind those of a row; an empty list is a no-op, an overflow a ValueError."""
        self._check_row(row, "row")
        ids = _int32(block_ids, "block_ids")
        self._check_width(int(self.num_blocks_per_row[row]), len(ids), row)
        self._append(ids, row)

    def add_row(self, block_ids: Sequence[int] | np.ndarray, row: int) -> None:
        """Sets a row to these block ids."""
        self._check_row(row, "row")
        ids = _int32(block_ids, "block_ids")
        self._check_width(0, len(ids), row)
        self.clear_row(row)
        self._append(ids, row)

    def clear_row(self, row: int) -> None:
        """Empties a row: its ids become the null block."""
        self._check_row(row, "row")
        self.block_table.before_write()
        self.block_table.np[row, : self.num_blocks_per_row[row]] = 0
        self.num_blocks_per_row[row] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """Row `tgt` takes over what `src` holds, and `src` is cleared; onto itself: nothing."""
        self._check_row(src, "src")
        self._check_row(tgt, "tgt")
        if src == tgt:
            return
        self.clear_row(tgt)
        n = self.num_blocks_per_row[src]
        self.block_table.np[tgt, :n] = self.block_table.np[src, :n]
        self.num_blocks_per_row[tgt] = n
        self.clear_row(src)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchanges two rows."""
        self._check_row(src, "src")
        self._check_row(tgt, "tgt")
        self.block_table.before_write()
        self.block_table.np[[src, tgt]] = self.block_table.np[[tgt, src]]
        self.num_blocks_per_row[[src, tgt]] = self.num_blocks_per_row[[tgt, src]]

    def check(
        self,
        clear_rows: np.ndarray,
        append_rows: np.ndarray,
        append_splits: np.ndarray,
        append_ids: np.ndarray,
        replace: np.ndarray,
    ) -> None:
        """ValueError where `apply` of the same would name an unknown row or column or overflow."""
        for rows, name in (
            (clear_rows, "clear_rows"),
            (append_rows, "append_rows"),
            (replace[:, 0], "replace"),
        ):
            if len(rows) and not (rows.min() >= 0 and rows.max() < self.max_num_reqs):
                raise ValueError(
                    f"{name} names rows {rows.min()} to {rows.max()}: "
                    f"expected 0 to {self.max_num_reqs - 1}"
                )
        if len(append_splits) != len(append_rows) + 1 or append_splits[-1] != len(append_ids):
            raise ValueError(
                f"append_splits does not fit {len(append_rows)} append_rows and "
                f"{len(append_ids)} append_ids"
            )
        counts = self.num_blocks_per_row.copy()
        counts[clear_rows] = 0
        np.add.at(counts, append_rows, np.diff(append_splits))
        wide = np.flatnonzero(counts > self.max_num_blocks_per_req)
        if len(wide):
            raise ValueError(
                f"row {wide[0]} would have {counts[wide[0]]} blocks: "
                f"expected at most {self.max_num_blocks_per_req}"
            )
        columns = replace[:, 1]
        if len(columns) and not (
            columns.min() >= 0 and columns.max() < self.max_num_blocks_per_req
        ):
            raise ValueError(
                f"replace names columns {columns.min()} to {columns.max()}: "
                f"expected 0 to {self.max_num_blocks_per_req - 1}"
            )

    def apply(
        self,
        clear_rows: np.ndarray,
        append_rows: np.ndarray,
        append_splits: np.ndarray,
        append_ids: np.ndarray,
        replace: np.ndarray,
    ) -> None:
        """The table part of a `StepPlan` for this table's group, which `check` has let through."""
        for row in clear_rows.tolist():
            self.clear_row(row)
        splits = append_splits.tolist()
        for i, row in enumerate(append_rows.tolist()):
            self._append(append_ids[splits[i] : splits[i + 1]], row)
        if len(replace):
            self.block_table.before_write()
            self.block_table.np[replace[:, 0], replace[:, 1]] = replace[:, 2]

    def commit_block_table(self, num_reqs: int) -> None:
        """Uploads the first `num_reqs` rows; the host side may be changed by the methods at once."""
        self._check_count(num_reqs, "num_reqs", self.max_num_reqs)
        self.block_table.upload(num_reqs)

    def compute_slot_mapping(self, req_indices: np.ndarray, positions: np.ndarray) -> None:
        """Fills the host side of `slot_mapping` for tokens at `positions` of rows `req_indices`.

        req_indices: int32[n] or int64[n], -1 for tokens of a dummy request; positions: int64[n].
        Entries from n to the buffer's end become -1. Upload by `commit_slot_mapping`.
        """
        self.slot_mapping.before_write()
        ops.slot_mapping(
            self.block_table.cpu,
            torch.from_numpy(_int32(req_indices, "req_indices")),
            torch.from_numpy(_integers(positions, "positions").astype(np.int64, copy=False)),
            self.block_size,
            self.slot_mapping.cpu,
        )

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Uploads the whole slot mapping: what lies behind `num_tokens` is -1 on the device too."""
        self._check_count(num_tokens, "num_tokens", self.max_num_batched_tokens)
        self.slot_mapping.upload(self.max_num_batched_tokens)

    def clear(self) -> None:
        """Zeroes all ids and counts, on the host and on the device."""
        self.block_table.before_write()
        self.block_table.cpu.zero_()
        self.num_blocks_per_row[:] = 0
        self.block_table.gpu.zero_()

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """int32[num_reqs, max_num_blocks_per_req] on the device, a view."""
        return self.block_table.gpu[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """int32[max_num_reqs, max_num_blocks_per_req] on the host, a view."""
        return self.block_table.cpu

    def get_numpy_array(self) -> np.ndarray:
        """The host side as numpy, a view."""
        return self.block_table.np

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> HostDeviceBuffer:
        return HostDeviceBuffer(shape, dtype, self.device, pin)

    def _append(self, ids: np.ndarray, row: int) -> None:
        start = int(self.num_blocks_per_row[row])
        self.block_table.before_write()
        self.block_table.np[row, start : start + len(ids)] = ids
        self.num_blocks_per_row[row] = start + len(ids)

    def _check_row(self, row: int, name: str) -> None:
        if not 0 <= row < self.max_num_reqs:
            raise ValueError(f"{name} is {row}: expected 0 to {self.max_num_reqs - 1}")

    def _check_width(self, start: int, n: int, row: int) -> None:
        if start + n > self.max_num_blocks_per_req:
            raise ValueError(
                f"row {row} has {start} blocks and would get {n} more: "
                f"expected at most {self.max_num_blocks_per_req} in all"
            )

    @staticmethod
    def _check_count(count: int, name: str, most: int) -> None:
        if not 0 <= count <= most:
            raise ValueError(f"{name} is {count}: expected 0 to {most}")
