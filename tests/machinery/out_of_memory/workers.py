# SPDX-License-Identifier: Apache-2.0
"""Cases for every call of block tables, `Worker`, `SwapEngine` and transfer plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kvcache import BlockTables, GroupSpec, KVStorage, StepPlan, SwapEngine, Worker
from kvcache.step import NO_REPLACE
from kvcache.worker import SwapError
from tests.machinery.out_of_memory.trial import Case, Trial

GROUPS = [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 4, {"window": 16})]


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _plan(step_id: int, **moves: object) -> StepPlan:
    """Return a plan that appends to rows 1 and 2 of both groups and clears row 3."""
    return StepPlan(
        step_id=step_id,
        rows=_ids(1, 2),
        status=np.zeros(2, np.uint8),
        num_computed_tokens=_ids(0, 0),
        clear_rows=_ids(3),
        append_rows=_ids(1, 2),
        append_splits=[_ids(0, 2, 3), _ids(0, 1, 2)],
        append_ids=[_ids(5, 6, 7), _ids(8, 9)],
        replace=[np.array([[0, 1, 11]], np.int32), NO_REPLACE],
        previous_step_id=step_id - 1,
        **moves,
    )


class Tabled:
    """Tables with three rows and computed slots, pages with different contents, and a host tier."""

    def __init__(self) -> None:
        self.tables = BlockTables.for_groups(
            GROUPS, max_num_reqs=6, max_model_len=64, max_num_tokens=32
        )
        storage = KVStorage(num_blocks=20, block_size=4, num_kv_heads=2, head_size=2)
        self.pages = storage.pages
        self.host = self.pages.on_host(10)
        for page in range(1, 20):
            self.pages.fragment(0)[page] = page
        for page in range(1, 10):
            self.host.fragment(0)[page] = 100 + page
        self.worker = Worker(storage, self.tables, self.host)
        for row in (0, 1, 3):
            self.tables.add_row([[1 + row, 2, 3], [4, 10 + row]], row)
        self.tables.commit_updates()
        self.tables.compute_slot_mapping(_ids(0, 1), np.array([2, 3]))
        self.tables.commit_slot_mapping(2)

    def state(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.worker.last_step_id
        for table in self.tables.block_tables:
            yield table.get_numpy_array
            yield lambda t=table: t.num_blocks_per_row
            yield lambda t=table: t.slot_mapping.np
        yield lambda: self.pages.fragment(0)
        yield lambda: self.host.fragment(0)
        yield self.tables.commit_updates
        for table in self.tables.block_tables:
            yield table.get_device_tensor
        yield lambda: self.worker.apply(_plan(self.worker.last_step_id + 1))
        for table in self.tables.block_tables:
            yield table.get_numpy_array
            yield table.get_device_tensor

    def refusals(self) -> list[Callable[[], object]]:
        plan = _plan(self.worker.last_step_id)  # an intact worker rejects this old plan
        return [lambda: self.worker.apply(plan), lambda: self.worker.start(plan)]


_MOVES = {
    "swap_out": np.array([[5, 3], [6, 4]], np.int32),
    "copy": np.array([[1, 12]], np.int32),
    "zero": _ids(13),
    "fresh": _ids(10),
    "swap_in": np.array([[5, 14]], np.int32),
}

_CALLS: dict[str, Callable[[Tabled], object]] = {
    "Worker.apply": lambda s: s.worker.apply(_plan(0)),
    "Worker.apply, moves": lambda s: s.worker.apply(_plan(0, **_MOVES)),
    "append_row": lambda s: s.tables.append_row([[7, 8], [9]], 1),
    "add_row": lambda s: s.tables.add_row([[7, 8], [9]], 1),
    "clear_row": lambda s: s.tables.clear_row(1),
    "clear_rows": lambda s: s.tables.clear_rows([1, 3]),
    "move_rows": lambda s: s.tables.move_rows([1, 3], [4, 5]),
    "swap_rows": lambda s: s.tables.swap_rows([1, 3], [3, 0]),
    "GroupTable.append_row": lambda s: s.tables[0].append_row([7, 8], 1),
    "GroupTable.move_row": lambda s: s.tables[0].move_row(1, 5),
    "compute_slot_mapping": lambda s: s.tables.compute_slot_mapping(
        _ids(0, 1, 3), np.array([1, 4, 7])
    ),
}


def _trial(call: Callable[[Tabled], object]) -> Trial:
    tabled = Tabled()
    return Trial(lambda: call(tabled), tabled.state, tabled.refusals())


class Swapping:
    """A swap engine. A failed job reports the failure, and its pages are then invalid."""

    def __init__(self) -> None:
        first = KVStorage(num_blocks=20, block_size=4, num_kv_heads=2, head_size=2)
        self.pages, self.host = first.pages, first.pages.on_host(10)
        self.pages.fragment(0)[:] = torch.arange(20)[:, None]
        self.engine = SwapEngine(self.pages, self.host)

    def swap(self) -> None:
        out = self.engine.swap_out(np.array([[3, 4], [5, 6]]))
        back = self.engine.swap_in(np.array([[6, 7]]))
        for job in (out, back):
            if not job.poll():
                raise RuntimeError("a job on the CPU is not done")
            if isinstance(job.error, SwapError):
                raise MemoryError  # the job ran out of memory

    def state(self) -> Iterator[Callable[[], object]]:
        yield self.swap
        yield lambda: self.pages.fragment(0)
        yield lambda: self.host.fragment(0)


def _swap_trial() -> Trial:
    swapping = Swapping()
    return Trial(swapping.swap, swapping.state, [])


def worker_cases() -> list[Case]:
    """Return the cases, which run on the CPU because `operator new` does not allocate GPU memory."""
    cases = [Case(f"tables: {name}", functools.partial(_trial, c)) for name, c in _CALLS.items()]
    return [*cases, Case("SwapEngine", _swap_trial)]
