# SPDX-License-Identifier: Apache-2.0
"""`kvcache_serve.engine` and `kvcache_serve.server` reject invalid values with an error that names the
argument, and leave their state unchanged.
"""

import asyncio
import math

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

HUGE = 10**5_000  # more digits than Python converts to text
NUMBERS = [math.nan, math.inf, -math.inf, 1.5, -1, HUGE, -HUGE, "1", None, [], {}, True, object()]
OBJECTS = [None, 0, 1.5, "a", [], {}, object(), HUGE, [HUGE]]
NO_TEXTS = [value for value in OBJECTS if value != "a"]
LISTS = [None, 0, 1.5, math.nan, "a", [1.5], ["a"], [None], [[1]], {1: 2}, [HUGE], [-1], object()]


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

    def state(self):
        """Return the state that a rejected call must not change."""
        scheduler, manager = self.scheduler, self.cache.manager
        return (
            [each.request.request_id for each in scheduler.waiting + scheduler.admitted],
            *(scheduler._in_flight, self.sequence.state, self.sequence.request.num_tokens),
            *(manager.last_step_id, manager.pool.num_free, self.engine.num_unfinished),
        )


@pytest.fixture(scope="module")
def world():
    made = World()
    yield made
    made.scheduler.fail(made.step)
    made.scheduler.finish(made.sequence)
    assert made.cache.manager.pool.num_free == made.cache.manager.pool.num_total
    made.paged.detach()


REQUEST = Request("other", range(5))
# Each entry has the name of an argument, a call that passes it a value, and the invalid values to
# pass.
CALLS = [
    *(
        (name, lambda w, v, name=name: SamplingParams(**{name: v}), NUMBERS)
        for name in ("max_tokens", "n")
    ),
    ("temperature", lambda w, v: SamplingParams(temperature=v), NUMBERS),
    ("top_p", lambda w, v: SamplingParams(top_p=v), NUMBERS),
    ("top_k", lambda w, v: SamplingParams(top_k=v), NUMBERS),
    ("seed", lambda w, v: SamplingParams(seed=v), NUMBERS),
    ("stop_token_ids", lambda w, v: SamplingParams(stop_token_ids=v), LISTS),
    *(
        (name, lambda w, v, name=name: NgramDrafter(**{name: v}), NUMBERS)
        for name in ("num_tokens", "longest", "shortest")
    ),
    ("request", lambda w, v: NgramDrafter()(v), OBJECTS),
    ("request", lambda w, v: Sequence(v), OBJECTS),
    ("rank", lambda w, v: Sequence(REQUEST, rank=v), [*OBJECTS, (0,), (0, math.nan), (HUGE, 0)]),
    ("max_tokens", lambda w, v: Sequence(REQUEST, max_tokens=v), NUMBERS),
    ("num_rows", lambda w, v: Sequence(REQUEST, num_rows=v), NUMBERS),
    ("drafts", lambda w, v: Sequence(REQUEST, drafts=v), [None, 0, 1.5, HUGE, object()]),
    ("cache", lambda w, v: w.batch(cache=v), OBJECTS),
    ("rows", lambda w, v: w.batch(rows=v), [*LISTS, [4], [2**31]]),
    ("starts", lambda w, v: w.batch(starts=v), [*LISTS, [2**40]]),
    ("token_ids", lambda w, v: w.batch(token_ids=v), [*LISTS, [[1.5]], [["a"]], [[HUGE]], [[]]]),
    ("num_drafts", lambda w, v: w.batch(num_drafts=v), [*LISTS, [9], [2**40]]),
    ("num_logits", lambda w, v: w.batch(num_logits=v), [*LISTS, [10], [2**40]]),
    ("group", lambda w, v: w.batch().kind(v), [*NUMBERS, 1]),
    ("group", lambda w, v: w.batch().slots(v), [*NUMBERS, 1]),
    ("group", lambda w, v: w.batch().context(v), [*NUMBERS, 1]),
    ("group", lambda w, v: w.batch().state_pages(v), [*NUMBERS, 1]),
    ("manager", lambda w, v: Scheduler(v, max_num_batched_tokens=4), OBJECTS),
    (
        "max_num_batched_tokens",
        lambda w, v: Scheduler(w.cache.manager, max_num_batched_tokens=v),
        [*NUMBERS, 0],
    ),
    (
        "preemption",
        lambda w, v: Scheduler(w.cache.manager, max_num_batched_tokens=4, preemption=v),
        OBJECTS,
    ),
    ("sequence", lambda w, v: w.scheduler.add(v), OBJECTS),
    ("sequence", lambda w, v: w.scheduler.num_pending(v), OBJECTS),
    ("sequence", lambda w, v: w.scheduler.accept(v, [1]), OBJECTS),
    ("sequence", lambda w, v: w.scheduler.finish(v), [*OBJECTS, Sequence(REQUEST)]),
    ("token_ids", lambda w, v: w.scheduler.accept(w.sequence, v), [*LISTS, [2**31]]),
    ("num_rejected", lambda w, v: w.scheduler.accept(w.sequence, [1], v), [*NUMBERS, 50]),
    ("parent", lambda w, v: w.scheduler.fork(v, Sequence(REQUEST)), [*OBJECTS, Sequence(REQUEST)]),
    ("child", lambda w, v: w.scheduler.fork(w.sequence, v), OBJECTS),
    ("step", lambda w, v: w.scheduler.complete(v), OBJECTS),
    ("step", lambda w, v: w.scheduler.fail(v), OBJECTS),
    ("report", lambda w, v: w.scheduler.complete(w.step, v), OBJECTS[1:]),
    ("manager", lambda w, v: pool_states(v), OBJECTS),
    ("medium", lambda w, v: pool_states(w.cache.manager, v), [*OBJECTS, "cpu"]),
    ("model", lambda w, v: Engine(v), OBJECTS),
    ("preemption", lambda w, v: Engine(w.paged, preemption=v), OBJECTS),
    ("drafter", lambda w, v: Engine(w.paged, drafter=v), OBJECTS[1:]),
    (
        "max_num_batched_tokens",
        lambda w, v: Engine(w.paged, max_num_batched_tokens=v),
        [*NUMBERS, 0, 513],
    ),
    ("prompt", lambda w, v: w.engine.add(v), [*LISTS, [], [512], range(60), np.zeros((2, 2), int)]),
    ("params", lambda w, v: w.engine.add([1], v), OBJECTS[1:]),
    ("params", lambda w, v: w.engine.check([1], v), OBJECTS),
    ("n", lambda w, v: w.engine.add([1], SamplingParams(n=v)), [5]),
    ("request_id", lambda w, v: w.engine.add([1], request_id=v), [*NO_TEXTS[1:], "", "\ud800"]),
    ("priority", lambda w, v: w.engine.add([1], priority=v), [*NUMBERS, 2**31]),
    ("cache_salt", lambda w, v: w.engine.add([1], cache_salt=v), [0, 1.5, [], "\ud800", HUGE]),
    ("request_id", lambda w, v: w.engine.abort(v), NO_TEXTS),
    ("request_id", lambda w, v: w.engine.stop(v, 0), NO_TEXTS),
    ("index", lambda w, v: w.engine.stop("a", v), NUMBERS),
    ("prompt", lambda w, v: w.engine.generate(v), [*LISTS[:8], [[1.5]], [[]], [HUGE], [-1]]),
    ("params", lambda w, v: w.engine.generate([[1]], v), [*OBJECTS[1:], [None, None]]),
    ("prompt", lambda w, v: next(w.engine.stream(v)), LISTS),
    ("engine", lambda w, v: EngineLoop(v), OBJECTS),
    ("loop", lambda w, v: make_app(v, ByteTexts(), "a"), OBJECTS),
    ("model_name", lambda w, v: make_app(w.loop, ByteTexts(), v), [*NO_TEXTS, ""]),
    ("limits", lambda w, v: make_app(w.loop, ByteTexts(), "a", limits=v), OBJECTS[1:]),
    ("trust_clients", lambda w, v: make_app(w.loop, ByteTexts(), "a", trust_clients=v), OBJECTS),
    ("app", lambda w, v: Server(v), OBJECTS),
    *(
        (name, lambda w, v, name=name: Limits(**{name: v}), NUMBERS)
        for name in Limits.__dataclass_fields__
    ),
]
# Pairs of an argument and a value that is invalid for other arguments but valid for this one.
RIGHT = {
    ("temperature", "1.5"), ("top_k", "None"), ("seed", "None"), ("seed", "-1"),
    ("max_tokens", "None"), ("priority", "-1"), ("max_num_batched_tokens", "None"),
    ("max_body_bytes", "None"), ("params", "[]"), ("prompt", "[]"),
    *((f"{name}_seconds", "1.5") for name in ("request", "stall", "keep_alive", "grace")),
    ("stop_token_ids", "{1: 2}"), ("drafts", "[]"), ("num_drafts", "None"), ("num_logits", "None"),
    ("token_ids", "[[1]]"),
}  # fmt: skip


def is_right(name, value):
    try:
        return (name, repr(value)) in RIGHT
    except ValueError:  # an integer with too many digits to be converted to text
        return False


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda i: f"{i}-{CALLS[i][0]}")
def test_invalid_values_are_rejected_by_the_name_of_their_argument(world, number):
    name, call, values = CALLS[number]
    before = world.state()
    for value in values:
        if is_right(name, value):
            continue
        with pytest.raises((TypeError, ValueError)) as told:
            call(world, value)
        message = str(told.value)
        assert name in message and "expected" in message, (value if value != HUGE else "", message)
        assert len(message) < 600
        assert world.state() == before


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
