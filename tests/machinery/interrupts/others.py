# SPDX-License-Identifier: Apache-2.0
"""Checks `BlockSpaceManager`, `Worker`, block tables and `KVOutputAggregator` under interrupts.

If a signal handler raises, the call takes effect completely or not at all, or its object reports
that it is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from kvcache import BlockTables, GroupTable, KVCacheManager, Request, TableShape
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager, KVConnectorOutput, KVOutputAggregator
from kvcache.compat import KVCacheManager as KVCacheManagerOfEngines
from kvcache.worker.tables import buffer
from tests.machinery.interrupts.instants import interrupted_at
from tests.machinery.out_of_memory.workers import Tabled, _plan
from tests.machinery.sequence_driver import Group, Seq, Status


def each_instant(make: Callable, call: Callable, check: Callable) -> int:
    """Interrupt `call` at each instant, and check the object that `make` created.

    Return the number of instants.
    """
    n = 0
    while True:
        n += 1
        made = make()
        was_interrupted = interrupted_at(n, lambda made=made: call(made))
        check(made)
        if not was_interrupted:
            return n


class Sequences:
    """A manager with a running group (two sequences and an encoder) and a waiting group."""

    def __init__(self) -> None:
        self.manager = BlockSpaceManager(4, 40, 40, enable_caching=True)
        tokens = [*range(10)]
        self.running = Group("a", [Seq("a0", tokens), Seq("a1", tokens)], Seq("ae", [*range(6)]))
        self.waiting = Group("b", [Seq("b0", [*range(9)])], Seq("be", [*range(5)]))
        self.child = Seq("c", tokens, Status.RUNNING)
        self.manager.allocate(self.running)
        self.running.set_status(Status.RUNNING)
        self.running.seqs[0].tokens = [*tokens, 10]

    def check(self) -> None:
        """Check that all sequences and groups can be freed, and that freeing them again changes
        nothing.
        """
        manager = self.manager
        manager.check_invariants()
        everything = [*self.running.seqs, *self.waiting.seqs, self.child]
        for _ in range(2):
            for seq in everything:
                manager.free(seq)
            for group in (self.running, self.waiting):
                manager.free_cross(group)
            manager.check_invariants()
            assert manager.get_num_free_gpu_blocks() == 39
            assert manager.get_num_free_cpu_blocks() == 39


SEQUENCE_CALLS = {
    "allocate": lambda s: s.manager.allocate(s.waiting),
    "append_slots": lambda s: s.manager.append_slots(s.running.seqs[0], 3),
    "fork": lambda s: s.manager.fork(s.running.seqs[1], s.child),
    "free": lambda s: s.manager.free(s.running.seqs[0]),
    "free_cross": lambda s: s.manager.free_cross(s.running),
    "swap_out": lambda s: s.manager.swap_out(s.running),
    "mark": lambda s: s.manager.mark_blocks_as_computed(s.running, 4),
    "get_num_cached_tokens": lambda s: s.manager.get_num_cached_tokens(s.waiting.seqs[0]),
}


def check_sequences(call: str) -> int:
    """Check a call at each instant. Return the number of instants."""
    return each_instant(Sequences, SEQUENCE_CALLS[call], Sequences.check)


class EngineRequests:
    """A manager of another engine's interface, with a running and a waiting request."""

    def __init__(self) -> None:
        self.manager = KVCacheManagerOfEngines(4, 40, 64, None, True, 0)
        self.running, self.waiting = (
            SimpleNamespace(request_id=name, all_token_ids=[*range(10)], num_computed_tokens=0)
            for name in ("a", "b")
        )
        self.manager.allocate_slots(self.running, 10, ())
        self.running.num_computed_tokens = 10
        self.running.all_token_ids += [7] * 7

    def check(self) -> None:
        """Check that all requests can be freed, and admitted again with another prompt."""
        for request in (self.running, self.waiting):
            self.manager.free(request)
            self.manager.free(request)
        assert self.manager.manager.pool.num_free == 39
        for first, request in ((50, self.running), (60, self.waiting)):
            request.all_token_ids, request.num_computed_tokens = [first, *range(11)], 0
            assert self.manager.get_computed_blocks(request) == ([], 0)
            assert len(self.manager.allocate_slots(request, 12, ())) == 3
        check_invariants(self.manager.manager)


REQUEST_CALLS = {
    "get_computed_blocks": lambda s: s.manager.get_computed_blocks(s.waiting),
    "allocate_slots": lambda s: s.manager.allocate_slots(s.waiting, 10, ()),
    "append_slots": lambda s: s.manager.append_slots(s.running, 7),
    "free": lambda s: s.manager.free(s.running),
}


def check_requests(call: str) -> int:
    """Check a call at each instant. Return the number of instants."""
    return each_instant(EngineRequests, REQUEST_CALLS[call], EngineRequests.check)


def check_worker(with_moves: bool) -> int:
    """Check that the plan has been applied or can still be applied, or that the worker reports that
    it is broken.
    """
    whole = Tabled()
    moves = {"swap_out": np.array([[3, 5]], np.int32), "copy": np.array([[1, 15]], np.int32)}
    plan = _plan(0, **moves if with_moves else {})
    whole.worker.apply(plan)
    tables = whole.tables.table_set._arena.np.copy()

    def check(made: Tabled) -> None:
        if made.worker.last_step_id < 0:
            try:
                made.worker.apply(plan)
            except RuntimeError as error:
                assert "the worker is broken" in str(error)
                return
        assert (made.tables.table_set._arena.np == tables).all()
        with pytest.raises((ValueError, RuntimeError), match=r"step_id 0|the worker is broken"):
            made.worker.apply(plan)

    return each_instant(Tabled, lambda made: made.worker.apply(plan), check)


def _with_device() -> GroupTable:
    """Return a table whose device copy is separate memory."""
    other = mock.patch.object(
        buffer, "device_zeros", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype)
    )
    with other:
        table = BlockTables(
            [TableShape(4, 8)], max_num_reqs=4, max_num_tokens=16, device=torch.device("meta")
        )[0]
    table.add_row([1, 2, 3], 0)
    table.commit_updates()
    return table


TABLE_CALLS = {
    "add_row": lambda table: table.add_row([7, 8], 1),
    "append_row": lambda table: table.append_row([9], 0),
    "move_row": lambda table: table.move_row(0, 2),
    "swap_row": lambda table: table.swap_row(0, 3),
    "clear_row": lambda table: table.clear_row(0),
    "commit_updates": lambda table: (table.add_row([5], 3), table.commit_updates()),
}


def check_table(call: str) -> int:
    """Check that the next `commit_updates` uploads every change on the host."""

    def check(table: GroupTable) -> None:
        table.commit_updates()
        arena = table.table_set._arena
        assert (arena.np == arena.gpu.numpy()).all()

    return each_instant(_with_device, TABLE_CALLS[call], check)


def check_aggregator() -> int:
    """Check that each report is counted exactly once.

    The call is repeated unless its output shows that it has completed.
    """

    def make() -> SimpleNamespace:
        aggregator = KVOutputAggregator(2)
        reports = [KVConnectorOutput(finished_sending={"a", "b"}), KVConnectorOutput({"a"})]
        outputs = [SimpleNamespace(kv_connector_output=each) for each in reports]
        return SimpleNamespace(aggregator=aggregator, outputs=outputs, first=reports[0])

    def check(made: SimpleNamespace) -> None:
        if made.outputs[0].kv_connector_output is made.first:
            assert made.aggregator.remaining_sending == {}
            made.aggregator.aggregate(made.outputs)
        assert made.outputs[0].kv_connector_output.finished_sending == {"a"}
        assert made.aggregator.remaining_sending == {"b": 1}

    return each_instant(make, lambda made: made.aggregator.aggregate(made.outputs), check)


def check_events() -> int:
    """Check that either all events remain or all were drained."""

    def make() -> KVCacheManager:
        manager = KVCacheManager(4, 20, 64, enable_events=True)
        manager.step(new=[Request("a", range(8))])
        return manager

    def check(manager: KVCacheManager) -> None:
        events = manager.cache.drain_events()
        assert [len(event.block_hashes) for event in events] in ([2], [])

    return each_instant(make, lambda manager: manager.cache.drain_events(), check)
