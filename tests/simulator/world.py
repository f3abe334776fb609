# SPDX-License-Identifier: Apache-2.0
"""The world of the simulator: all engines and what connects them, driven by one seed."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.simulator.engine import Engine

OPERATIONS_PER_SEED = 300


class World:
    """Everything that one seed describes. Operation i depends on the seed, on i, and on the state, so that
    a run with fewer operations is also a run.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.script = seed, []
        self.engines = [Engine(f"e{i}", random.Random(f"{seed}.{i}"), self.script.append) for i in range(2)]

    def run(self, operations: Iterable[int]) -> None:
        for i in operations:
            rng = random.Random(f"{self.seed}/{i}")
            self.script.append(f"# operation {i}")
            rng.choice(self.engines).operate(rng)
        for engine in self.engines:
            engine.close(random.Random(f"{self.seed}/end"))


def run(seed: int, operations: Iterable[int] = range(OPERATIONS_PER_SEED)) -> World:
    world = None
    try:
        world = World(seed)
        world.run(operations)
    except BaseException as error:
        error.add_note(f"found by tests.simulator with --seed {seed}")
        error.script = world.script if world else []
        raise
    return world
