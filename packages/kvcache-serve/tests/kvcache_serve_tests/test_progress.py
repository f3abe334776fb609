# SPDX-License-Identifier: Apache-2.0
"""Every request ends: the number of steps is bounded, however small the pool is."""

import asyncio
import dataclasses
import os

import pytest

from kvcache import KVCacheManager, LayerSpec, Request, build, plan_cache
from kvcache_serve.engine import Engine, SamplingParams, Scheduler, Sequence, State
from tests.machinery.table_model import TableModel
from tests.simulator.served import TableServer, stepped_loop

# KVCACHE_TEST_SEED=<number> selects other runs.
SEED = 1_000_000 * int(os.environ.get("KVCACHE_TEST_SEED", 0))


def engine_of(num_blocks, max_model_len, *, num_host_blocks=0, **options):
    """Return an engine with blocks of four tokens."""
    layers = [LayerSpec("a", "full_attention", 4, 1, 1, dtype="float32")]
    plan = plan_cache(layers, 2**20, max_model_len=max_model_len, max_num_batched_tokens=64)
    cache = build(
        dataclasses.replace(plan, num_pages=num_blocks + 1),
        max_num_reqs=8,
        num_host_blocks=num_host_blocks,
        num_preallocate_tokens=0,
    )
    return Engine(TableModel(cache), **options)


def finish(engine, most):
    """Step until all requests have ended, and return their last deltas."""
    last = []
    for _ in range(most):
        last += [delta for delta in engine.step() if delta.finish_reason]
        if not engine.num_unfinished:
            return last
    raise AssertionError(f"requests are unfinished after {most} steps")


def check_runs(first, count):
    for seed in range(SEED + first, SEED + first + count):
        try:
            TableServer(seed).run(4)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_random_requests_end_within_the_bound_with_the_models_answers(first):
    check_runs(first, 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1_000, 13_000, 100))
def test_many_random_requests_end_within_the_bound_with_the_models_answers(first):
    check_runs(first, 100)


class TestNeverFits:
    @pytest.mark.parametrize("params", [{}, {"n": 2, "temperature": 1.0}], ids=str)
    def test_request_that_outgrows_the_pool_is_refused_with_the_numbers(self, params):
        engine = engine_of(2, 16)
        generation = engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=9, **params))
        other = engine.add([3], SamplingParams(max_tokens=5))
        deltas = finish(engine, most=100)
        error = next(delta.error for delta in deltas if delta.finish_reason == "refused")
        expected = (
            "'request-0' needs at least 3 blocks for 9 tokens: expected at most 2, all blocks"
        )
        assert expected in str(error)
        assert {sample.finish_reason for sample in generation.samples} == {"refused"}
        assert other.samples[0].finish_reason == "length"
        assert engine.cache.manager.pool.num_free == 2

    def test_answer_ends_if_the_request_is_refused_before_its_samples_are_forked(self):
        loop, reasons = stepped_loop(engine_of(2, 16)), []

        async def read():
            params = SamplingParams(max_tokens=5, n=2, temperature=1.0)
            async with loop.serving([1, 2, 3, 4, 5, 6, 7, 1, 2], params) as answer:
                reasons.extend([delta.finish_reason async for delta in answer])

        async def serve():
            reading = asyncio.create_task(read())
            for _ in range(100):
                loop.turn()
                await asyncio.sleep(0)
            assert reading.done() and await reading is None

        asyncio.run(serve())
        assert reasons == ["refused"]

    def test_chunk_that_exceeds_the_pool_without_the_watermark_is_computed_in_parts(self):
        manager = KVCacheManager(4, 5, 16, watermark=0.5, num_preallocate_tokens=0)
        scheduler = Scheduler(manager, max_num_batched_tokens=64)
        sequence = Sequence(Request("r", range(14)))
        scheduler.add(sequence)
        computed = 0
        while computed < 14:
            step = scheduler.schedule()
            assert not step.refused
            computed += step.num_tokens
            scheduler.complete(step)
        assert sequence.state is State.RUNNING


class TestOrder:
    def test_sequences_of_equal_rank_are_preempted_in_reverse_order_of_admission(self):
        """Samples share the rank of their request. Without an order among them, each of two
        could preempt the other one before it has computed its tokens again.
        """
        manager = KVCacheManager(4, 5, 16, num_preallocate_tokens=0)
        scheduler = Scheduler(manager, max_num_batched_tokens=64, preemption="recompute")
        first, second = (Sequence(Request(f"r{i}", [i] * length)) for i, length in ((0, 6), (1, 8)))
        scheduler.add(first), scheduler.add(second)
        for _ in range(3):  # the second sequence is the first one that needs another block
            scheduler.complete(scheduler.schedule())
            for each in (first, second):
                if each.state is State.RUNNING and not scheduler.num_pending(each):
                    scheduler.accept(each, [7])
        assert (first.num_preemptions, second.num_preemptions) == (0, 0)
        scheduler.complete(scheduler.schedule())
        assert (first.state, second.state) == (State.RUNNING, State.RUNNING)

    def test_small_sequence_does_not_pass_a_waiting_one(self):
        manager = KVCacheManager(4, 5, 16, num_preallocate_tokens=0)
        scheduler = Scheduler(manager, max_num_batched_tokens=64)
        first, large, small = (
            Sequence(Request(f"r{i}", [i] * length)) for i, length in enumerate((7, 12, 3))
        )
        scheduler.add(first), scheduler.add(large)
        scheduler.complete(scheduler.schedule())
        scheduler.add(small)
        scheduler.accept(first, [5])
        scheduler.complete(scheduler.schedule())
        assert (large.state, small.state) == (State.WAITING, State.WAITING)
        scheduler.finish(first)
        scheduler.complete(scheduler.schedule())
        assert (large.state, small.state) == (State.RUNNING, State.WAITING)
