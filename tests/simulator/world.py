# SPDX-License-Identifier: Apache-2.0
"""The world of the simulator: all engines and what connects them, driven by one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvcache import LayerSpec
from tests.simulator.engine import EXCHANGEABLE, Engine
from tests.simulator.exchange import Wire
from tests.simulator.node import Node
from tests.simulator.peers import Network
from tests.simulator.sequences import Sequences
from tests.simulator.served import TableServer

OPERATIONS_PER_SEED = 500
MOST_TRIALS = 400  # runs with fewer operations


def exchangeable(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose blocks other engines can load, if its kind allows it."""
    if layer.kind not in EXCHANGEABLE:
        return layer
    return replace(layer, cached=True, transferred=True)


class World:
    """Everything that one seed describes. An operation depends on the seed, on its number and on the
    state, so that a run with fewer operations is also a run.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.script = seed, []
        rng = random.Random(f"{seed}")
        self.wire = Wire(rng)
        size = rng.choice([2, 2, 3])
        self.network = self.wire.network = Network(self.wire, rng, size)
        self.wire.patches += self.network.patches
        self.layers = Engine.draw_layers(rng)
        # Engines exchange KV if their blocks have the same hashes and the same bytes.
        self.shared = {
            "hash_seed": "s",
            "hash_algorithm": rng.choice(["sha256_cbor", "xxh3_128_cbor"]),
            "hash_bytes": None,
            "num_hash_lookahead_tokens": 0,
            "hash_block_size": rng.choice([None, None, 1, 2, 4]),
            "kernel_sizes": rng.choice([None, None, None, [2], [1]]),
            "num_ranks": rng.choice(
                [1, 1, 1, 1 + any(each.kind == "recurrent" for each in self.layers)]
            ),
            "is_tp": rng.random() < 0.9,
        }
        if self.shared["num_ranks"] == 1 and rng.random() < 0.1:
            self.shared |= {"num_ranks": 2, "is_tp": False}
        if rng.random() < 0.2:  # the engine computes hashes
            self.shared |= {"hash_algorithm": "engine:blake2b", "hash_bytes": 16}
            self.shared["num_hash_lookahead_tokens"] = rng.choice([0, 1, 2])
        if rng.random() < 0.85:  # most engines can exchange KV
            self.layers = [exchangeable(each) for each in self.layers]
            self.shared |= {"kernel_sizes": None, "enable_caching": True}
        self.kill_rate = rng.choice([0, 0, 0.01])
        self.num_kills = 0
        with self.wire:
            self.engines = [self.start(i, f"{seed}.{i}") for i in range(size)]
        self.spaces = []
        if rng.random() < 0.2:
            self.spaces = [Sequences("s", random.Random(f"{seed}.s"), self.script.append)]
        self.served = []
        if rng.random() < 0.05:
            self.served = [TableServer(seed, rng.choice([0.0, 0.0, 0.03]), self.script.append)]

    def start(self, number: int, seed: str) -> Node:
        rng = random.Random(seed)
        return Node(number, rng, self.layers, self.shared, self.wire, self.script.append)

    def kill(self, rng: random.Random, operation: int) -> None:
        """Replace an engine by one that has nothing. Its loads and leases are gone."""
        self.num_kills += 1
        number = rng.randrange(len(self.engines))
        self.script.append(f"# kill e{number}")
        self.network.forget(self.engines[number])
        self.engines[number] = self.start(number, f"{self.seed}.{number}.{operation}")
        self.wire.offers = [each for each in self.wire.offers if each[0] in self.engines]

    def run(self, operations: Sequence[int], checks_all: bool = False) -> None:
        """`checks_all`: check what is cached after each operation, not only occasionally."""
        with self.wire:
            for i in operations:
                rng = random.Random(f"{self.seed}/{i}")
                self.script.append(f"# operation {i}")
                if rng.random() < self.kill_rate:
                    self.kill(rng, i)
                awake = [each for each in self.engines if not each.is_stopped]
                others = [*(24 * self.spaces), *(4 * self.served)]
                actors = [self.wire, self.network, *(4 * awake), *others]
                actor = rng.choice(actors)
                actor.operate(rng)
                if checks_all and actor in awake:
                    actor.check_all()
            self.end(random.Random(f"{self.seed}/end"))

    def counts(self) -> Counter:
        """Return what has happened, to be printed."""
        found = +Counter(self.network.counts)
        found["answers of a server"] = sum(each.num_compared for each in self.served)
        for engine in self.engines:
            found += engine.counts()
        return found

    def end(self, rng: random.Random) -> None:
        self.network.settle(rng)
        for each in [*self.engines, *self.spaces, *self.served]:
            each.close(rng)
        for _ in range(4):  # canceled loads end, and so do leases
            self.wire.now += 100.0
            for engine in self.engines:
                for source in engine.sources:
                    source.poll()
            while any(engine.mover and engine.mover.loads for engine in self.engines):
                for engine in self.engines:
                    for name in [*(engine.mover.loads if engine.mover else ())]:
                        engine.mover.work(name, rng)
        for each in [*self.engines, *self.spaces, *self.served]:
            each.check_end()


def run(
    seed: int, operations: Sequence[int] = range(OPERATIONS_PER_SEED), checks_all: bool = False
) -> World:
    """Run one seed. The script of a failed run is the attribute `script` of its exception."""
    script: list[str] = []
    try:
        world = World(seed)
        script = world.script
        world.run(operations, checks_all)
    except Exception as error:
        error.add_note(f"found by python -m tests.simulator --seed {seed}")
        error.script = script
        raise
    return world


def failure_of(seed: int, operations: Sequence[int]) -> Exception | None:
    try:
        run(seed, operations, checks_all=True)
    except Exception as error:
        return error
    return None


def shrunk(
    seed: int, operations: Sequence[int] = range(OPERATIONS_PER_SEED)
) -> tuple[list[int], Exception]:
    """Return a small set of operations that fails with the same type of error, and its error."""
    left, error, trials = [*operations], failure_of(seed, operations), 0
    assert error is not None, f"seed {seed} does not fail"
    size = len(left) // 2
    while size:
        for first in range(len(left) - size, -1, -size):
            if (trials := trials + 1) > MOST_TRIALS:
                return left, error
            fewer = left[:first] + left[first + size :]
            found = failure_of(seed, fewer)
            if type(found) is type(error):
                left, error = fewer, found
        size //= 2
    return left, error
