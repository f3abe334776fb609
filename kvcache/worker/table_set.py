"""The tables of all cache groups in one memory: changed, uploaded and read by one call for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache import ops
from kvcache._native import core
from kvcache.plan import StepPlan
from kvcache.worker.buffer import BufferView, HostDeviceBuffer

Ids = Sequence[int] | np.ndarray
ALL_GROUPS = -1


@dataclass(frozen=True)
class TableLayout:
    """One group's table. Widths in allocation blocks, sizes in tokens."""

    block_size: int  # of an allocation block, on one rank
    kernel_block_size: int  # of a table entry, on one rank; divides block_size
    max_num_blocks: int  # allocation blocks per row
    world_size: int = 1  # context-parallel workers that the tokens are spread over
    rank: int = 0
    interleave: int = 1  # consecutive tokens on one of them; divides kernel_block_size
    window: int = 0  # tokens that a query sees, 0 for all
    has_slots: bool = True

    @property
    def ratio(self) -> int:
        """Kernel blocks per allocation block."""
        return self.block_size // self.kernel_block_size

    @property
    def num_columns(self) -> int:
        """Table entries per row."""
        return self.max_num_blocks * self.ratio

    @property
    def tokens_per_column(self) -> int:
        """Tokens, over all ranks, that a table entry stands for."""
        return self.kernel_block_size * self.world_size


class TableSet:
    """Tables, counts and slot mappings of all groups; `BlockTable` shows one of them.

    Rows are changed on the host, natively, for any number of rows and groups per call. On a CUDA
    device `commit_updates` brings the device's tables up to date: what changed since the last time
    travels in one copy and is put in place by one launch. `commit_rows` uploads whole rows instead.
    """

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        num_rows: int,
        num_slots: int,
        pin_memory: bool,
        device: torch.device,
        slot_dtype: torch.dtype,
    ) -> None:
        self.layouts = list(layouts)
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.device = device
        sizes = [num_rows * layout.num_columns for layout in layouts]
        offsets = [sum(sizes[:g]) for g in range(len(sizes))]
        self._arena = HostDeviceBuffer((sum(sizes),), torch.int32, device, pin_memory)
        self._counts = torch.zeros(len(layouts), num_rows, dtype=torch.int32)
        self.counts: np.ndarray = self._counts.numpy()  # kernel blocks per row
        on_cuda = device.type == "cuda"
        self._native = core.HostTables(
            self._arena.np,
            self.counts,
            num_rows,
            [(at, each.num_columns, each.ratio) for at, each in zip(offsets, layouts)],
            track=on_cuda,
        )
        self.tables = [
            BufferView(self._arena, at, (num_rows, each.num_columns))
            for at, each in zip(offsets, layouts)
        ]
        self._with_slots = [g for g, layout in enumerate(layouts) if layout.has_slots]
        shape = (len(self._with_slots) * num_slots,)
        self._slots = HostDeviceBuffer(shape, slot_dtype, device, pin_memory)
        self._slots.cpu.fill_(-1)
        self._slots.gpu.fill_(-1)
        self._slot_views = {
            g: BufferView(self._slots, i * num_slots, (num_slots,))
            for i, g in enumerate(self._with_slots)
        }
        fields = [
            (
                at,
                each.num_columns,
                each.kernel_block_size,
                each.world_size,
                each.rank,
                each.interleave,
                each.window,
                g,
            )
            for g, (at, each) in enumerate(zip(offsets, layouts))
        ]
        self._fields = torch.tensor(fields, dtype=torch.int64)
        self._slot_fields = self._fields[self._with_slots].contiguous()
        self._identity = torch.arange(num_rows, dtype=torch.int32)
        self._device_identity = self._identity.to(device)
        # A quarter of the tables: with more changed than that, whole tables travel as fast.
        capacity = max(sum(sizes) // 4, 64)
        self._updates = (
            HostDeviceBuffer((capacity,), torch.int32, device, pin_memory) if on_cuda else None
        )
        self._batch: list[torch.Tensor] | None = None
        self._batch_arena: torch.Tensor | None = None
        self._batch_tokens = 0  # the most that any gather so far has filled
        self._stale = False  # a device without kernels of ours lacks changes

    def slot_mapping(self, group: int) -> BufferView:
        """[num_slots] of a group; ValueError for a group without slot mapping."""
        if group not in self._slot_views:
            raise ValueError(f"group {group} has no slot mapping")
        return self._slot_views[group]

    # Rows ------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, num_blocks: int = -1) -> None:
        """The table part of a plan, for all groups; an unknown row, an overflow, a column that a row
        has not or an id outside [0, num_blocks) is a ValueError, and nothing is changed."""
        self._arena.before_write()
        self._native.apply(
            plan.clear_rows,
            plan.append_rows,
            plan.append_splits,
            plan.append_ids,
            plan.replace,
            num_blocks,
        )
        self._stale = True

    def append_row(self, group: int, block_ids: Ids, row: int, reset: bool = False) -> None:
        """Adds allocation blocks to a row of one group, which is emptied first where asked."""
        self._arena.before_write()
        self._native.append_row(group, row, block_ids, reset)
        self._stale = True

    def move_rows(self, src: Ids, tgt: Ids, group: int = ALL_GROUPS) -> None:
        """Each row src[i] moves to tgt[i], one after the other, and leaves an empty row."""
        self._arena.before_write()
        self._native.move_rows(src, tgt, group)
        self._stale = True

    def swap_rows(self, src: Ids, tgt: Ids, group: int = ALL_GROUPS) -> None:
        """Exchanges each pair of rows, one after the other."""
        self._arena.before_write()
        self._native.swap_rows(src, tgt, group)
        self._stale = True

    def clear_rows(self, rows: Ids, group: int = ALL_GROUPS) -> None:
        """Empties rows: their ids become the null block."""
        self._arena.before_write()
        self._native.clear_rows(rows, group)
        self._stale = True

    def clear(self) -> None:
        """Zeroes all ids and counts, on the host and on the device."""
        self._arena.before_write()
        self._native.clear()
        self._arena.gpu.zero_()
        if self._batch_arena is not None:
            self._batch_arena.zero_()
        self._native.mark_clean()
        self._stale = False

    # Uploads ---------------------------------------------------------------------------------------

    def commit_updates(self) -> None:
        """Brings the device's tables up to date with every change made here since the last time."""
        if self._updates is None:
            if self._stale and self.device.type != "cpu":
                self._arena.upload(0, len(self._arena.cpu))
            self._stale = False
            return
        self._updates.before_write()
        used = self._native.pack(self._updates.np)
        if 0 <= used <= len(self._updates.np):
            if self._updates.np[0] > 0:
                self._updates.upload(0, used)
                ops.update_block_tables(self._arena.gpu, self._updates.gpu)
        else:
            self._arena.upload(0, len(self._arena.cpu))
        self._native.mark_clean()

    def commit_rows(self, group: int, num_rows: int) -> None:
        """Uploads the first rows of one group whole."""
        self.tables[group].upload(_count(num_rows, "num_reqs", self.num_rows))

    def commit_slots(self, num_tokens: int, group: int = ALL_GROUPS) -> None:
        """Uploads slot mappings whole: what lies behind `num_tokens` is -1 on the device too."""
        _count(num_tokens, "num_tokens", self.num_slots)
        if group == ALL_GROUPS:
            self._slots.upload(0, len(self._slots.cpu))
        else:
            self.slot_mapping(group).upload(self.num_slots)

    # Slots and batch order -------------------------------------------------------------------------

    def compute_slots(
        self,
        rows: np.ndarray | torch.Tensor | None,
        positions: np.ndarray | torch.Tensor,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
        group: int = ALL_GROUPS,
    ) -> None:
        """Slots of all groups, or of one, by one launch; see `BlockTable.compute_slot_mapping`."""
        tensors = [x for x in (rows, positions, query_start_loc) if isinstance(x, torch.Tensor)]
        on_device = any(x.device.type != "cpu" for x in tensors)
        if rows is None:
            if query_start_loc is None:
                raise ValueError("neither req_indices nor query_start_loc is given: expected one")
            num_requests = len(query_start_loc) - 1
            if not 0 <= num_requests <= self.num_rows:
                raise ValueError(
                    f"query_start_loc has {num_requests + 1} entries: "
                    f"expected 1 to {self.num_rows + 1}"
                )
            identity = self._device_identity if on_device else self._identity
            rows = identity[:num_requests]
        place = slice(None) if group == ALL_GROUPS else self._place(group)
        slots = self._slots.gpu if on_device else self._slots.cpu
        if not on_device:
            self._slots.before_write()
        ops.slot_mapping(
            self._arena.gpu if on_device else self._arena.cpu,
            self._slot_fields[place],
            self.num_rows,
            _tensor(rows, torch.int32, "req_indices"),
            None
            if query_start_loc is None
            else _tensor(query_start_loc, torch.int32, "query_start_loc"),
            _tensor(positions, torch.int64, "positions"),
            None if on_device else self._counts,
            slots.view(-1, self.num_slots)[place],
        )

    def gather(
        self,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> list[torch.Tensor]:
        """Rows in batch order, all groups by one launch; see `MultiGroupBlockTable`."""
        if self._batch_arena is None:
            self._batch_arena = torch.zeros_like(self._arena.gpu)
            self._batch = [
                self._batch_arena[view._offset : view._offset + view.gpu.numel()].view_as(view.gpu)
                for view in self.tables
            ]
        if max_num_tokens is None:
            columns = self.counts.max(axis=1, initial=0).tolist()
            longest = (n * each.tokens_per_column for n, each in zip(columns, self.layouts))
            max_num_tokens = max(longest, default=0)
        # Never fewer columns than before: what an earlier batch left there must not stay.
        self._batch_tokens = max(self._batch_tokens, max_num_tokens)
        ops.gather_block_tables(
            self._arena.gpu,
            self._fields,
            self.num_rows,
            idx_mapping,
            num_computed_tokens,
            self._batch_tokens,
            self._batch_arena,
        )
        return [table[: len(idx_mapping)] for table in self._batch]

    def _place(self, group: int) -> slice:
        self.slot_mapping(group)  # raises for a group without
        place = self._with_slots.index(group)
        return slice(place, place + 1)


def _count(count: int, name: str, most: int) -> int:
    if not 0 <= count <= most:
        raise ValueError(f"{name} is {count}: expected 0 to {most}")
    return count


def _tensor(values: object, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Tensors as they are; integer arrays and lists as a CPU tensor of the dtype the op takes."""
    if isinstance(values, torch.Tensor):
        return values
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    wanted = np.int32 if dtype == torch.int32 else np.int64
    if array.dtype != wanted and array.size and array.dtype.itemsize >= np.dtype(wanted).itemsize:
        limits = np.iinfo(wanted)
        wrong = np.flatnonzero((array < limits.min) | (array > limits.max))
        if wrong.size:
            raise ValueError(f"{name}[{wrong[0]}] is {array[wrong[0]]}: expected {wanted.__name__}")
    array = np.ascontiguousarray(array, wanted)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
