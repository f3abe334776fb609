# SPDX-License-Identifier: Apache-2.0
"""Checks that `Engine` neither loses nor duplicates a token if a signal handler raises."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from kvcache.allocator import check_invariants
from kvcache_serve.engine import Engine, Generation, NgramDrafter, SamplingParams
from kvcache_serve.engine.transformers import attach
from tests.machinery.dense_models import VOCAB_SIZE, dense
from tests.machinery.hostile.instants import Alarm, Interrupt, interrupted_at

_OPTIONS = {
    "plain": {},
    "by swap": {"preemption": "swap"},
    "by recompute": {"preemption": "recompute"},
    "with drafts": {"drafter": NgramDrafter()},
}


def make_engine(name: str) -> Engine:
    """Make an engine with these options, a host tier, and a pool for three requests of the maximum
    length.
    """
    budget = "256KiB" if name == "plain" else "96KiB"
    paged = attach(
        dense("llama", 2),
        budget,
        max_model_len=64,
        max_num_seqs=8,
        host_budget="1MiB",
        num_speculative_tokens=4 if name == "with drafts" else 0,
        num_preallocate_tokens=0,
    )
    return Engine(paged, **_OPTIONS[name])


class Served:
    """An engine's requests, and the tokens that `step` has returned for each."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.generations: list[Generation] = []
        self.got: dict[tuple[str, int], list[int]] = {}

    def add(self) -> None:
        """Add six requests: greedy, sampled, and with several samples."""
        for i in range(6):
            prompt = [self.rng.randrange(1, VOCAB_SIZE) for _ in range(self.rng.randint(3, 30))]
            options = [{}, {"temperature": 1.0, "seed": i}, {"n": 3, "temperature": 1.0, "seed": i}]
            params = SamplingParams(max_tokens=self.rng.randint(2, 12), **options[i % 3])
            self.generations.append(self.engine.add(prompt, params))

    def take(self, stepped: list[list]) -> None:
        """Record the tokens returned by calls of `step`, and clear the list."""
        for delta in (delta for deltas in stepped for delta in deltas):
            self.got.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        stepped.clear()

    def answers(self) -> list[list[list[int]]]:
        """Return the tokens of every sample."""
        return [[sample.token_ids for sample in each.samples] for each in self.generations]

    def check(self, answers: list[list[list[int]]]) -> None:
        """Check that all requests have finished correctly and that each token was returned once.

        `answers`: the answers of an undisturbed engine.
        """
        assert self.answers() == answers
        for generation in self.generations:
            for index, sample in enumerate(generation.samples):
                assert sample.finish_reason in ("stop", "length")
                assert self.got[generation.request_id, index] == sample.token_ids
        manager = self.engine.cache.manager
        check_invariants(manager)
        assert manager.pool.num_free == manager.pool.num_total
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def undisturbed(name: str, seed: int) -> list[list[list[int]]]:
    """Return the answers of an undisturbed engine to the requests of this seed."""
    engine = make_engine(name)
    served, stepped = Served(engine, seed), []
    served.add()
    while engine.num_unfinished:
        stepped.append(engine.step())
    served.take(stepped)
    served.check(served.answers())
    engine.model.detach()
    return served.answers()


def run_to_end(served: Served, step: Callable[[Callable], bool], most: int = 3_000) -> int:
    """Run the engine to its end by calling `step`, which may be interrupted.

    Return the number of interrupts.
    """
    engine, stepped, num_interrupts = served.engine, [], 0
    for _ in range(most):
        if not engine.num_unfinished:
            return num_interrupts
        num_interrupts += step(lambda: stepped.append(engine.step()))
        served.take(stepped)
    raise AssertionError("the engine does not end")


def check_each_instant(name: str, first: int, stride: int) -> int:
    """Interrupt one step at every `stride`-th instant in turn. Return the number of interrupts."""
    answers, at = undisturbed(name, 1), first
    before = signal.signal(signal.SIGUSR1, _raise)
    engine = make_engine(name)
    served = Served(engine, 1)
    served.add()

    def step(call: Callable) -> bool:
        nonlocal at
        at += stride
        return interrupted_at(at, call, lambda: signal.raise_signal(signal.SIGUSR1))

    def step_mostly(call: Callable) -> bool:
        nonlocal at
        was_interrupted = step(call)
        if not was_interrupted:
            at = first  # the call has fewer instants
        return was_interrupted

    try:
        num_interrupts = run_to_end(served, step_mostly)
        served.check(answers)
    finally:
        signal.signal(signal.SIGUSR1, before)
        engine.model.detach()
    return num_interrupts


class EngineRun:
    """Interrupts steps at random instants with the system timer."""

    def __init__(self, seed: int) -> None:
        self.rng, self.seed = random.Random(seed), seed

    def run(self, alarm: Alarm, count: int) -> int:
        """Run until `count` interrupts have occurred. Return the number of steps."""
        num_steps = 0
        while count > 0:
            name = self.rng.choice([*_OPTIONS])
            self.seed += 1
            answers = undisturbed(name, self.seed)
            engine = make_engine(name)
            served = Served(engine, self.seed)
            served.add()

            def step(call: Callable) -> bool:
                nonlocal num_steps, count
                num_steps += 1
                if self.rng.random() < 0.3:
                    call()
                    return False
                was_interrupted = alarm.interrupts(self.rng.uniform(1e-5, 8e-3), call)
                count -= was_interrupted
                return was_interrupted

            run_to_end(served, step)
            served.check(answers)
            engine.model.detach()
        return num_steps


def _raise(*_: object) -> None:
    raise Interrupt
