# SPDX-License-Identifier: Apache-2.0
"""Interrupts each right call at each instant, or random calls at random instants.

A call takes effect completely or not at all, or its object reports that it is broken. After an
interrupt, each request is either admitted and can be freed, or is unknown to the manager.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kvcache import BlockTables, GroupTable, KVCacheManager, Request, TableShape
from kvcache.compat import KVConnectorOutput, KVOutputAggregator
from kvcache.worker.tables import buffer
from tests.machinery.hostile.instants import Alarm, interrupted_at
from tests.machinery.hostile.scenes import (
    SCENES,
    WorkerScene,
)


def each_instant(make: Callable, call: Callable, check: Callable) -> int:
    """Interrupt `call` at each instant, and check the object that `make` created.

    Return the number of interrupts.
    """
    n = 0
    while True:
        made = make()
        was_interrupted = interrupted_at(n + 1, lambda made=made: call(made))
        check(made)
        if not was_interrupted:
            return n
        n += 1


def check_call(scene: str, at: int) -> int:
    """Check call number `at` of a scene at each instant. Return the number of interrupts."""
    calls: list[Callable] = []

    def make() -> object:
        made = SCENES[scene]()
        calls[:] = [made.right_call(at)]
        return made

    before, done = make(), make()
    calls[0]()
    allowed = before.progress(), done.progress()

    def check(made: object) -> None:
        for name, value in made.progress().items():
            assert value in [each[name] for each in allowed], name
        made.end()

    return each_instant(make, lambda made: calls[0](), check)


def check_worker(call: str) -> int:
    """Check that the plan has been applied or can still be applied, or that the worker reports that
    it is broken.
    """

    def plan_of(made: WorkerScene) -> object:
        return next(arguments["plan"] for name, _, arguments in made.calls() if name == call)

    whole = WorkerScene()
    plan = plan_of(whole)
    whole.worker.apply(plan)
    tables = whole.tables.table_set._arena.np.copy()

    def check(made: WorkerScene) -> None:
        if made.worker.last_step_id < 0:
            try:
                made.worker.apply(plan)
            except RuntimeError as error:
                assert "the worker is broken" in str(error)
                return
        assert (made.tables.table_set._arena.np == tables).all()
        with pytest.raises((ValueError, RuntimeError), match=r"step_id 0|the worker is broken"):
            made.worker.apply(plan)

    return each_instant(WorkerScene, lambda made: made.worker.apply(plan), check)


def _with_device() -> GroupTable:
    """Return a table whose device copy is separate memory."""
    other = mock.patch.object(
        buffer, "device_zeros", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype)
    )
    with other:
        shape, device = TableShape(4, 8), torch.device("meta")
        table = BlockTables([shape], max_num_reqs=4, max_num_tokens=16, device=device)[0]
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
        reports = [KVConnectorOutput(finished_sending={"a", "b"}), KVConnectorOutput({"a"})]
        outputs = [SimpleNamespace(kv_connector_output=each) for each in reports]
        return SimpleNamespace(aggregator=KVOutputAggregator(2), outputs=outputs, first=reports[0])

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


class Serving:
    """Right calls of the managers' scenes in random order, some interrupted at a random instant. A
    call that an earlier one has made wrong is rejected.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = [name for name in SCENES if name.startswith("manager")]

    def run(self, alarm: Alarm, count: int) -> int:
        """Run until `count` interrupts have occurred. Return the number of calls."""
        num_calls = 0
        while count > 0:
            scene = SCENES[self.random.choice(self.names)]()
            calls = [functools.partial(f, **arguments) for _, f, arguments in scene.calls()]
            for call in self.random.sample(calls, len(calls)):
                num_calls += 1

                def refused_or_done(call: Callable = call) -> None:
                    with contextlib.suppress(ValueError):
                        call()

                if alarm.interrupts(self.random.uniform(1e-6, 6e-5), refused_or_done):
                    count -= 1
                    scene.check()
            scene.end()
        return num_calls
