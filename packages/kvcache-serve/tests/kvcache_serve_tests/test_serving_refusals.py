# SPDX-License-Identifier: Apache-2.0
"""`kvcache_serve.engine` and `kvcache_serve.server` reject invalid values with an error that names the
argument, and leave their state unchanged.
"""

import asyncio
import math
from functools import partial

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from kvcache import Request
from kvcache_serve.engine import (
    Batch,
    Engine,
    NgramDrafter,
    SamplingParams,
    Scheduler,
    Sequence,
    pool_states,
)
from kvcache_serve.engine.transformers import attach
from kvcache_serve.server import ByteTexts, EngineLoop, Limits, Server, make_app
from kvcache_serve.server.engine_loop import EngineError
from tests.machinery.dense_models import dense


class World:
    """An engine, its components, and the arguments for calling them."""

    def __init__(self):
        self.paged = attach(dense("llama", 2), "1MiB", max_model_len=64, max_num_seqs=4)
        self.cache = self.paged.cache
        self.engine = Engine(self.paged)
        self.scheduler = Scheduler(self.cache.manager, max_num_batched_tokens=64)
        self.sequence = Sequence(Request("r", range(9)), max_tokens=20)
        self.scheduler.add(self.sequence)
        self.step = self.scheduler.schedule()
        self.cache.worker.apply(self.step.plan)
        self.loop = EngineLoop(self.engine)

    def batch(self, **options):
        arguments = {"rows": [0], "starts": [0], "token_ids": [range(9)], "num_drafts": [0]}
        return Batch(**({"cache": self.cache} | arguments | {"num_logits": [1]} | options))

    def of_scheduler(self, **options):
        return Scheduler(self.cache.manager, **({"max_num_batched_tokens": 4} | options))

    def calls(self):
        """Return (name of an argument, a call that passes it a value, values to reject)."""
        engine, scheduler, app = (
            self.engine,
            self.scheduler,
            partial(make_app, self.loop, ByteTexts()),
        )
        request, one = Request("other", range(5)), SamplingParams(max_tokens=1)
        by_name = [
            *((SamplingParams, name, [-1]) for name in ("max_tokens", "n", "temperature", "top_p")),
            *((SamplingParams, name, [1.5]) for name in ("top_k", "seed", "stop_token_ids")),
            *((NgramDrafter, name, [-1]) for name in ("num_tokens", "longest", "shortest")),
            (partial(Sequence, request), "rank", [(0,), (0, math.nan)]),
            *((partial(Sequence, request), name, [-1]) for name in ("max_tokens", "num_rows")),
            (partial(Sequence, request), "drafts", [0]),
            *((self.batch, name, [[10], [1.5]]) for name in ("rows", "num_drafts", "num_logits")),
            (self.batch, "starts", [[2**40]]),
            (self.batch, "token_ids", [[[1.5]], [[]]]),
            (self.batch, "cache", [0]),
            (self.of_scheduler, "max_num_batched_tokens", [0]),
            (self.of_scheduler, "preemption", ["a"]),
            (partial(Engine, self.paged), "preemption", ["a"]),
            (partial(Engine, self.paged), "drafter", [0]),
            (partial(Engine, self.paged), "max_num_batched_tokens", [0, 513]),
            (partial(engine.add, [1]), "request_id", ["", "\ud800"]),
            (partial(engine.add, [1]), "priority", [2**31]),
            (partial(engine.add, [1]), "cache_salt", [0, "\ud800"]),
            (partial(app, "a"), "limits", [0]),
            (partial(app, "a"), "trust_clients", [0]),
            *((Limits, name, [-1, math.nan]) for name in Limits.__dataclass_fields__),
        ]  # fmt: skip
        yield from ((name, lambda v, c=c, n=name: c(**{n: v}), more) for c, name, more in by_name)
        yield from (
            ("request", NgramDrafter(), []), ("request", Sequence, []), ("manager", pool_states, []),
            *(("group", getattr(self.batch(), each), [1, -1])
              for each in ("kind", "slots", "context", "state_pages")),
            ("sequence", scheduler.add, []), ("sequence", scheduler.num_pending, []),
            ("sequence", lambda v: scheduler.accept(v, [1]), []),
            ("sequence", scheduler.finish, [Sequence(request)]),
            ("token_ids", lambda v: scheduler.accept(self.sequence, v), [[2**31]]),
            ("num_rejected", lambda v: scheduler.accept(self.sequence, [1], v), [50]),
            ("parent", lambda v: scheduler.fork(v, Sequence(request)), [Sequence(request)]),
            ("child", lambda v: scheduler.fork(self.sequence, v), []),
            ("step", scheduler.complete, []), ("step", scheduler.fail, []),
            ("report", lambda v: scheduler.complete(self.step, v), []),
            ("medium", lambda v: pool_states(self.cache.manager, v), ["cpu"]),
            ("model", Engine, []), ("engine", EngineLoop, []), ("model_name", app, [""]),
            ("loop", lambda v: make_app(v, ByteTexts(), "a"), []), ("app", Server, []),
            ("prompt", engine.add, [[], [512], range(60), np.zeros((2, 2), int)]),
            ("params", lambda v: engine.add([1], v), []),
            ("n", lambda v: engine.add([1], SamplingParams(n=v)), [5]),
            ("params", lambda v: engine.check([1], v), []),
            ("request_id", engine.abort, []), ("request_id", lambda v: engine.stop(v, 0), []),
            ("index", lambda v: engine.stop("a", v), [-1]),
            ("prompt", engine.generate, [[[]], [-1]]),
            ("params", lambda v: engine.generate([[1]], v), [[one, one]]),
            ("prompt", lambda v: next(engine.stream(v)), [[1.5]]),
        )  # fmt: skip

    def state(self):
        """Return the state that a rejected call must not change."""
        scheduler, manager = self.scheduler, self.cache.manager
        return (
            [each.request.request_id for each in scheduler.waiting + scheduler.admitted],
            *(scheduler._in_flight, self.sequence.state, self.sequence.request.num_tokens),
            *(manager.last_step_id, manager.pool.num_free, self.engine.num_unfinished),
        )


def test_invalid_values_are_rejected_by_the_name_of_their_argument():
    """`tests/hostile` derives further invalid values."""
    world = World()
    before = world.state()
    for name, call, values in world.calls():
        for value in (object(), *values):
            with pytest.raises((TypeError, ValueError)) as told:
                call(value)
            message = str(told.value)
            assert name in message and "expected" in message and len(message) < 600, message
            assert world.state() == before
    world.scheduler.fail(world.step)
    world.scheduler.finish(world.sequence)
    assert world.cache.manager.pool.num_free == world.cache.manager.pool.num_total
    world.paged.detach()


class TestLifeOfTheEngineLoop:
    @pytest.fixture
    def loop(self):
        paged = attach(dense("llama", 2), "1MiB", max_model_len=64, max_num_seqs=4)
        yield EngineLoop(Engine(paged))
        paged.detach()

    @staticmethod
    async def serve(loop, max_tokens=2):
        async with loop.serving([1, 2, 3], SamplingParams(max_tokens=max_tokens)) as answer:
            return [delta async for delta in answer]

    def refused(self, loop, expected):
        with pytest.raises(EngineError, match=expected) as told:
            asyncio.run(asyncio.wait_for(self.serve(loop), 10))
        assert told.value.status == 503

    def test_requests_before_start_and_after_stop_are_rejected_immediately(self, loop):
        self.refused(loop, "has not been started")
        loop.start()
        assert asyncio.run(self.serve(loop))[-1].finish_reason == "length"
        loop.stop()
        self.refused(loop, "the server is stopping")
        loop.end_all(EngineError("of no effect"))
        self.refused(loop, "the server is stopping")

    def test_start_is_allowed_once_and_only_before_stop(self, loop):
        with pytest.raises(RuntimeError, match="expected start before stop"):
            loop.stop()
        loop.start()
        with pytest.raises(RuntimeError, match="can be called only once"):
            loop.start()
        loop.stop()
        loop.stop()
        with pytest.raises(RuntimeError, match="can be called only once"):
            loop.start()

    @pytest.mark.slow
    def test_every_request_submitted_around_a_stop_ends(self, loop):
        """No request waits forever, whether it is submitted before, during or after the stop."""

        async def serve_all():
            tasks = [asyncio.create_task(self.serve(loop, 40)) for _ in range(8)]
            await asyncio.sleep(0.02)
            stopping = asyncio.create_task(asyncio.to_thread(loop.stop))
            while not stopping.done():
                tasks.append(asyncio.create_task(self.serve(loop, 40)))
                await asyncio.sleep(0)
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

        loop.start()
        ends = asyncio.run(serve_all())
        assert len(ends) > 8 and {type(end) for end in ends} <= {list, EngineError}
        assert EngineError in {type(end) for end in ends}
        assert loop.engine.num_unfinished == 0
