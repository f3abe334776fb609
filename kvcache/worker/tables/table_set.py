# SPDX-License-Identifier: Apache-2.0
"""The block tables of all cache groups, in one shared buffer. Each call serves all groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import as_array, instance, integer, num_entries, shown
from kvcache.native.load import core
from kvcache.specs import MAX_GROUPS
from kvcache.step import StepPlan
from kvcache.worker.tables.buffer import BufferView, HostDeviceBuffer
from kvcache.worker.tables.table_shape import TableShape, table_groups

Ids = Sequence[int] | np.ndarray
ALL_GROUPS = -1
SHARED_PLACES = -1


class _SlotCall(NamedTuple):
    """The part of the slot mappings that one call fills: the part for one group, or for all groups."""

    # The group's index in the slot buffer, or SHARED_PLACES for all groups that share positions.
    place: int
    fields: torch.Tensor  # the op's argument `groups`
    slots: BufferView


class TableSet:
    """The tables, counts and slot mappings of all groups. A `GroupTable` is a view of one group.

    Native code changes the rows on the host; each call may change any number of rows and groups. The
    native tables also track which changes are not on the device yet, so no change is lost if an
    interrupt occurs. On a CUDA device, `commit_updates` uploads the changes since the last call in
    one copy and applies them in one launch. `commit_rows` uploads whole rows instead.
    """

    def __init__(
        self,
        shapes: Sequence[TableShape],
        max_num_reqs: int,
        num_rows: int,
        num_slots: int,
        pin_memory: bool,
        device: torch.device,
        slot_dtype: torch.dtype,
    ) -> None:
        self.shapes = list(shapes)
        self.max_num_reqs = max_num_reqs
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.device = device
        self.pin_memory = pin_memory
        num_groups = len(self.shapes)
        sizes = [num_rows * shape.num_columns for shape in shapes]
        offsets = [sum(sizes[:g]) for g in range(num_groups)]
        num_ids = sum(sizes)
        _check_sizes(self.shapes, num_ids + num_groups * num_rows)

        # All tables, followed by the number of kernel blocks in each row of each group.
        shape = (num_ids + num_groups * num_rows,)
        self._arena = HostDeviceBuffer(shape, torch.int32, device, pin_memory)
        self._counts = BufferView(self._arena, num_ids, (num_groups, num_rows))
        self.counts: np.ndarray = self._counts.np
        self.tables = [
            BufferView(self._arena, at, (num_rows, each.num_columns))
            for at, each in zip(offsets, shapes)
        ]
        self._on_cuda = device.type == "cuda"
        slots_fit = 2**31 if slot_dtype == torch.int32 else 2**63
        self._native = core.HostTables(
            self._arena.np,
            num_rows,
            [
                (
                    at,
                    each.num_columns,
                    each.ratio,
                    min(2**31 // each.ratio, slots_fit // each.block_size),
                )
                for at, each in zip(offsets, shapes)
            ],
            track=self._on_cuda,
        )
        self._fields = table_groups(shapes, num_rows)
        self._identity = torch.arange(num_rows, dtype=torch.int32, device="cpu")
        self._device_identity = self._identity.to(device) if self._on_cuda else self._identity
        self._make_slots(slot_dtype, pin_memory)
        # The capacity is a quarter of the tables' size. Beyond that, uploading whole tables is
        # equally fast. Two buffers alternate, so packing the next step's changes need not wait for
        # the last launch.
        capacity = max(shape[0] // 4, 1024)
        self._updates = [
            HostDeviceBuffer((capacity,), torch.int32, device, pin_memory)
            for _ in range(2 if self._on_cuda else 0)
        ]
        # Rows in batch order, at a fixed address for captured graphs. Zeros denote the null block.
        # On a CPU, this memory is committed lazily.
        self._batch_arena = torch.zeros(
            num_ids, dtype=torch.int32, device=device if self._on_cuda else "cpu"
        )
        self._batch = [
            self._batch_arena[at : at + size].view(num_rows, each.num_columns)
            for at, size, each in zip(offsets, sizes, shapes)
        ]
        self._batch_tokens = 0  # maximum number of tokens that any gather has filled so far

    def _make_slots(self, dtype: torch.dtype, pin_memory: bool) -> None:
        """Create the slot mappings, and the op's arguments for each group and for all groups."""
        n = self.num_slots
        with_slots = [g for g, each in enumerate(self.shapes) if each.slot_mapping]
        self._circular = [g for g in with_slots if self.shapes[g].circular]
        own = [g for g in with_slots if self.shapes[g].encoder or self.shapes[g].circular]
        shared = [g for g in with_slots if g not in own]
        encoders = [g for g in with_slots if self.shapes[g].encoder]
        # Groups that share positions come first, because calls for all groups serve them together.
        # Circular groups follow, because each has its own positions.
        groups = shared + self._circular + encoders
        self._slots = HostDeviceBuffer((len(groups) * n,), dtype, self.device, pin_memory)
        self._slots.cpu.fill_(-1)
        self._slots.gpu.fill_(-1)
        every = BufferView(self._slots, 0, (len(shared), n))
        self._slot_views = {}
        self._slot_calls = {ALL_GROUPS: _SlotCall(SHARED_PLACES, self.fields(shared), every)}
        for i, g in enumerate(groups):
            view = BufferView(self._slots, i * n, (1, n))
            fields = self._fields[g : g + 1].clone()
            self._slot_calls[g] = _SlotCall(i, fields, view)
            self._slot_views[g] = BufferView(self._slots, i * n, (n,))
        self._slots_in_one_memory = self._slots.gpu is self._slots.cpu
        self._host_slots = core.HostSlots(
            self._arena.np,
            self.counts,
            self.num_rows,
            self._fields[groups].tolist(),
            len(shared),
            self._slots.np,
            n,
            self._slots_in_one_memory,
        )
        # Attribute lookups are cached because they take a significant part of a decode step.
        self._compute, self._commit = self._host_slots.compute, self._host_slots.commit
        self._num_shared = len(shared)
        self._replayed: set[int] = set()  # groups whose slots a replayed graph may recompute

    def slot_mapping(self, group: int) -> BufferView:
        """Return the slot mapping [num_slots] of a group. Raises ValueError if the group has none."""
        self._slot_call(group)  # raises for a group without a slot mapping
        return self._slot_views[group]

    def num_computed_slots(self, group: int) -> int | None:
        """Number of tokens whose slots are on the device. None if a graph replay may change it."""
        at = self._slot_call(group).place
        return None if at in self._replayed else self._host_slots.num_on_device(at)

    # Rows ------------------------------------------------------------------------------------------

    @property
    def num_applied(self) -> int:
        """Number of plans applied so far."""
        return self._native.num_applied

    def apply(self, plan: StepPlan, num_blocks: int = -1, num_applied: int = -1) -> bool:
        """Apply a plan, unless more than `num_applied` plans (-1: any) were applied before."""
        instance(plan, StepPlan, "plan")
        return self.for_write().apply_plan(plan, num_blocks, self._host_slots, num_applied)

    def begin_step(self) -> None:
        """Begin a step that changes no tables: upload earlier changes, invalidate old slots."""
        if self._native.is_changed:
            self.commit_updates()
        self._host_slots.begin_step()

    def for_write(self) -> core.HostTables:
        """Return the native tables, whose calls change rows, once no upload reads the host side."""
        self._arena.before_write()
        return self._native

    def clear(self, group: int = ALL_GROUPS) -> None:
        """Zero block IDs and counts, on the host and on the device."""
        native = self.for_write()
        if group == ALL_GROUPS:
            native.clear()
            self._arena.gpu.zero_()
            self._batch_arena.zero_()
            native.mark_clean()
            return
        native.clear_rows(np.arange(self.num_rows, dtype=np.int32), group)
        self.tables[group].np[:] = 0  # also zeroes entries that a caller wrote directly
        self.tables[group].gpu.zero_()
        self._counts.gpu[group].zero_()
        native.mark_sent(group)

    # Uploads ---------------------------------------------------------------------------------------

    def commit_updates(self) -> None:
        """Upload all changes since the last call to the device."""
        if not self._native.is_changed:
            return
        if not self._on_cuda:
            self._arena.upload(0, len(self._arena.cpu))
            self._native.mark_clean()
            return
        self._updates.reverse()
        updates = self._updates[0]
        updates.before_write()
        used = self._native.pack(updates.np)
        if 0 <= used <= len(updates.np):
            if updates.np[0] > 0:
                updates.upload(0, used)
                updates.begin_use()
                ops.update_block_tables(self._arena.gpu, updates.gpu)
                updates.note_use()
        else:
            self._arena.upload(0, len(self._arena.cpu))
        self._native.mark_clean()  # last, so that after an interrupt, the next call uploads again

    def commit_rows(self, group: int, num_rows: int) -> None:
        """Upload the first `num_rows` rows of one group, and all counts."""
        self.tables[group].upload(integer(num_rows, "num_reqs", most=self.num_rows))
        self._counts.upload(len(self.shapes))
        self._native.mark_sent(group)  # the caller chooses which rows to upload

    def require_committed(self, groups: list[int]) -> None:
        """Raise RuntimeError if changes to these groups' rows were not uploaded to the GPU."""
        if not self._on_cuda:  # other devices read the host tables
            return
        lacking = [g for g in groups if self._native.is_group_changed(g)]
        if lacking:
            raise RuntimeError(
                f"the tables of groups {lacking} have changes that were not uploaded: "
                "call commit_updates first"
            )

    def commit_slots(self, num_tokens: int, group: int = ALL_GROUPS) -> None:
        """Upload whole slot mappings, with -1 for all entries after the first `num_tokens`."""
        call = self._slot_calls.get(group) or self._slot_call(group)
        self._slots.before_write()
        if self._slots_in_one_memory and not self._circular:
            self._commit(call.place, num_tokens)
            return
        circular = self._circular if group == ALL_GROUPS else ()
        for each in (call, *(self._slot_calls[g] for g in circular)):
            self._commit(each.place, num_tokens)
            if not self._slots_in_one_memory:
                each.slots.upload(len(each.slots.cpu))

    # Slots and batch order -------------------------------------------------------------------------

    def compute_slots(
        self,
        rows: np.ndarray | torch.Tensor | None,
        positions: np.ndarray | torch.Tensor,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
        group: int = ALL_GROUPS,
    ) -> None:
        """Compute the slots of one group or of all. See `TableCalls.compute_slot_mapping`."""
        call = self._slot_calls.get(group)
        if type(positions) is np.ndarray and call is not None and not self._circular:
            self._slots.before_write()
            if self._compute(call.place, rows, positions, query_start_loc):
                return
        if self._circular and positions is not None:
            if group == ALL_GROUPS:
                self._check_circular(rows, positions, query_start_loc)
            positions = self._in_places(positions, group)
        self._compute_slots(rows, positions, query_start_loc, group)
        if group == ALL_GROUPS:
            for g in self._circular:
                self._compute_slots(rows, self._in_places(positions, g), query_start_loc, g)

    def _check_circular(self, rows: object, positions: object, query_start_loc: object) -> None:
        """Validate a circular group's arguments on the host before any group's slots change."""
        given = (rows, positions, query_start_loc)
        if not any(map(is_on_device, given)):
            for g in self._circular:
                self.slots_of(*given, g)

    def _compute_slots(
        self,
        rows: np.ndarray | torch.Tensor | None,
        positions: np.ndarray | torch.Tensor,
        query_start_loc: np.ndarray | torch.Tensor | None,
        group: int,
    ) -> None:
        """Compute the slots of groups that share a launch, or of a circular group."""
        if positions is None:
            raise TypeError("positions is missing: expected int64[num_tokens]")
        given = (rows, positions, query_start_loc)
        on_device = any(map(is_on_device, given))
        if on_device and not self._on_cuda:  # the device has no kernels, so compute on the host
            rows, positions, query_start_loc = _on_cpu(*given)
            self._compute_slots(rows, positions, query_start_loc, group)
            self.commit_slots(len(positions), group)
            return
        call = self._slot_call(group)
        if not on_device:
            self._slots.before_write()
            self._host_slots.compute(call.place, *self._on_host(*given))
            return
        self._slots_on_device(call.fields, *given, out=call.slots.gpu)
        self._host_slots.note_on_device(call.place, len(positions))
        if torch.cuda.is_current_stream_capturing():
            places = range(self._num_shared) if group == ALL_GROUPS else [call.place]
            self._replayed.update(places)

    def slots_of(
        self,
        rows: np.ndarray | torch.Tensor | None,
        positions: np.ndarray | torch.Tensor,
        query_start_loc: np.ndarray | torch.Tensor | None,
        group: int,
    ) -> torch.Tensor:
        """Return the slots of one group in new memory. See `GroupTable.slots_of`."""
        if positions is None:
            raise TypeError("positions is missing: expected int64[num_tokens]")
        call = self._slot_call(group)
        given = (rows, self._in_places(positions, group), query_start_loc)
        if self._on_cuda and any(isinstance(x, torch.Tensor) and x.is_cuda for x in given):
            return self._slots_on_device(call.fields, *given)
        given = _on_cpu(*given)
        slots = self._host_slots.slots_of(call.place, *self._on_host(*given))
        return torch.from_numpy(slots).to(self.device)

    def _in_places(
        self, positions: np.ndarray | torch.Tensor, group: int
    ) -> np.ndarray | torch.Tensor:
        """Wrap positions to select columns of a circular group's table."""
        if group == ALL_GROUPS or not self.shapes[group].circular:
            return positions
        if isinstance(positions, torch.Tensor):
            # Devices other than GPUs may not support these operations.
            of, given = (
                torch,
                positions if positions.is_cuda else cpu_tensor(positions, "positions"),
            )
        else:
            of, given = np, _one_dimensional(positions, torch.int64, "positions")
        # Keep negative positions unchanged, so that they are rejected later.
        places = of.where(given < 0, given, given % self.shapes[group].num_places)
        return places.to(positions.device) if of is torch else places

    def _on_host(
        self, rows: object, positions: object, query_start_loc: object
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Convert the arguments of a slot mapping to numpy arrays, for the host."""
        if rows is None:
            rows = self._identity_of(query_start_loc, on_host=True)
        if query_start_loc is not None:
            query_start_loc = _one_dimensional(query_start_loc, torch.int32, "query_start_loc")
        return (
            _one_dimensional(rows, torch.int32, "req_indices"),
            _one_dimensional(positions, torch.int64, "positions"),
            query_start_loc,
        )

    def _slots_on_device(
        self,
        fields: torch.Tensor,
        rows: object,
        positions: torch.Tensor,
        query_start_loc: object,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute slots from the device tables in one launch, into `out` or new memory."""
        if rows is None:
            rows = self._identity_of(query_start_loc, on_host=False)
        if query_start_loc is not None:
            query_start_loc = _tensor(query_start_loc, torch.int32, "query_start_loc")
        is_own = out is None
        if is_own:
            out = torch.empty((1, len(positions)), dtype=torch.int64, device=self.device)
        ops.slot_mapping(
            self._arena.gpu,
            fields,
            self.num_rows,
            _tensor(rows, torch.int32, "req_indices"),
            query_start_loc,
            _tensor(positions, torch.int64, "positions"),
            self._counts.gpu,
            out,
        )
        return out[0] if is_own else out

    def gather(
        self,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> list[torch.Tensor]:
        """Gather all groups' rows in batch order. See `BlockTables.gather`."""
        if max_num_tokens is None:
            max_num_tokens = self.longest_row()
        else:
            max_num_tokens = integer(max_num_tokens, "max_num_tokens", most=2**64)
        instance(idx_mapping, torch.Tensor, "idx_mapping")
        if num_computed_tokens is not None:
            instance(num_computed_tokens, torch.Tensor, "num_computed_tokens")
        if not self._on_cuda:
            idx_mapping = cpu_tensor(idx_mapping, "idx_mapping")
            if num_computed_tokens is not None:
                num_computed_tokens = cpu_tensor(num_computed_tokens, "num_computed_tokens")
        # Fill at least as many columns as before, because otherwise an earlier batch's entries would
        # remain. The number is set before the launch, so that it is known even after an interrupt.
        before = self._batch_tokens
        self._batch_tokens = most = min(max(before, max_num_tokens), 2**31 - 1)
        on_cpu = not self._on_cuda
        try:
            ops.gather_block_tables(
                self._arena.cpu if on_cpu else self._arena.gpu,
                self._fields,
                self.num_rows,
                idx_mapping,
                num_computed_tokens,
                most,
                self._batch_arena,
            )
        except RuntimeError:  # rejected, so nothing was filled
            self._batch_tokens = before
            raise
        rows = [table[: len(idx_mapping)] for table in self._batch]
        return rows if self._on_cuda else [table.to(self.device) for table in rows]

    def attention_metadata(
        self,
        fields: torch.Tensor,
        requests: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        max_num_tokens: int,
        outputs: tuple[torch.Tensor | None, ...],
        on_host: bool,
    ) -> None:
        """Build metadata for `requests`: rows, query lengths and sequence lengths."""
        ops.attention_metadata(
            self._arena.cpu if on_host else self._arena.gpu,
            fields,
            self.num_rows,
            *requests,
            self._counts.cpu if on_host else self._counts.gpu,
            max_num_tokens,
            *outputs,
        )

    def longest_row(self, groups: list[int] | None = None, rows: np.ndarray | None = None) -> int:
        """Return the most tokens that any of these rows (None: all) can hold, by the host's counts."""
        if groups is None:
            groups = range(len(self.shapes))
        if rows is not None:
            rows = rows[(rows >= 0) & (rows < self.num_rows)]
        longest = 0
        for g in groups:
            counts = self.counts[g] if rows is None else self.counts[g][rows]
            columns = int(counts.max(initial=0))
            longest = max(longest, columns * self.shapes[g].tokens_per_column)
        return longest

    def fields(self, groups: list[int]) -> torch.Tensor:
        """Return the value of the ops' `groups` argument for these groups."""
        return self._fields[groups].contiguous()

    def identity(self, n: int, on_host: bool) -> torch.Tensor:
        """Return int32[n] row indices that assign row i to request i."""
        if n > self.num_rows:
            raise ValueError(
                f"there are {n} requests without rows: expected at most {self.num_rows}"
            )
        return (self._identity if on_host else self._device_identity)[:n]

    def _identity_of(
        self, query_start_loc: Ids | torch.Tensor | None, on_host: bool
    ) -> torch.Tensor:
        """Return row indices that assign row i to request i, for all requests in `query_start_loc`."""
        if query_start_loc is None:
            raise ValueError("neither req_indices nor query_start_loc is given: expected one")
        num_requests = len(query_start_loc) - 1
        if not 0 <= num_requests <= self.num_rows:
            raise ValueError(
                f"query_start_loc has {num_requests + 1} entries: expected 1 to {self.num_rows + 1}"
            )
        return self.identity(num_requests, on_host)

    def _slot_call(self, group: int) -> _SlotCall:
        if group not in self._slot_calls:
            raise ValueError(f"group {group} has no slot mapping")
        return self._slot_calls[group]


def _check_sizes(shapes: Sequence[TableShape], num_entries: int) -> None:
    """Reject sizes that the ops would reject later, before anything is allocated."""
    if len(shapes) > MAX_GROUPS:
        raise ValueError(f"there are {len(shapes)} groups: expected at most {MAX_GROUPS}")
    if num_entries >= 2**31:
        raise ValueError(f"the tables would have {num_entries} entries: expected fewer than 2^31")
    for g, shape in enumerate(shapes):
        if shape.tokens_per_column >= 2**31:
            raise ValueError(
                f"group {g} has {shape.tokens_per_column} tokens per block over all ranks: "
                "expected fewer than 2^31"
            )


def is_on_device(value: object) -> bool:
    """Return whether an argument is a tensor on a device other than the CPU."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _tensor(values: object, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return tensors unchanged, and integer arrays and lists as CPU tensors of the op's dtype."""
    return values if isinstance(values, torch.Tensor) else host_tensor(values, dtype, name)


def _on_cpu(rows: object, positions: object, query_start_loc: object) -> list:
    """Return the arguments of a slot mapping, with tensors moved to the CPU."""
    names = ("req_indices", "positions", "query_start_loc")
    return [
        cpu_tensor(each, name) if isinstance(each, torch.Tensor) else each
        for each, name in zip((rows, positions, query_start_loc), names)
    ]


def cpu_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Move a tensor to the CPU. Raises TypeError or ValueError if it has no data or no fixed size."""
    num_entries(tensor, name)
    try:
        return tensor.cpu()
    except NotImplementedError:
        raise TypeError(f"{name} is on {tensor.device}: expected a device with memory") from None


def _one_dimensional(values: object, dtype: torch.dtype, name: str) -> np.ndarray:
    """Convert integers of any type to an array with the dtype that the host's slot mapping expects."""
    array = host_tensor(values, dtype, name).numpy()
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {list(array.shape)}: expected one dimension")
    return array


def host_tensor(values: object, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Convert integers of any type to a CPU tensor with the op's dtype (int32 or int64)."""
    if isinstance(values, torch.Tensor):
        values = cpu_tensor(values, name)
    array = as_array(values, name)
    if array.ndim == 0:
        raise ValueError(f"{name} has shape []: expected one dimension")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    wanted = np.int32 if dtype == torch.int32 else np.int64
    if array.dtype != wanted and array.size and array.dtype.itemsize >= np.dtype(wanted).itemsize:
        limits = np.iinfo(wanted)
        wrong = np.flatnonzero((array < limits.min) | (array > limits.max))
        if wrong.size:
            raise ValueError(f"{name}[{wrong[0]}] is {array[wrong[0]]}: expected {wanted.__name__}")
    array = np.ascontiguousarray(array, wanted)
    # Even a contiguous array may have a negative stride if it has a single entry.
    is_plain = array.flags.writeable and min(array.strides) >= 0
    return torch.from_numpy(array if is_plain else array.copy())


def checked_device(device: torch.device | str) -> torch.device:
    """Convert a device or its name to a `torch.device`. Raises TypeError or ValueError."""
    expected = "expected a torch.device or its name"
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device is {shown(device)}: {expected}")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {shown(device)}: {expected}") from None
