# SPDX-License-Identifier: Apache-2.0
"""A failure in one request of a step ends only this request. All other requests keep their tokens."""

import gc
import itertools

import pytest

pytest.importorskip("transformers")

from kvcache.allocator import check_invariants
from kvcache_serve.engine import Engine, Generation, SamplingParams
from kvcache_serve.engine.sampling import Sampler
from kvcache_serve.engine.transformers import attach
from tests.machinery.dense_models import dense, greedy
from tests.machinery.shared import spread

PROMPTS = [list(range(i, 20 + i)) for i in (1, 60, 120)]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def make_engine():
    made = []

    def make(**options):
        paged = attach(dense("llama", 2), "1MiB", max_model_len=128, max_num_seqs=8)
        made.append(Engine(paged, **options))
        return made[-1]

    yield make
    for engine in made:
        manager = engine.cache.manager
        check_invariants(manager)
        assert engine.num_unfinished == 0
        assert manager.pool.num_free == manager.pool.num_total
        engine.model.detach()


class Others:
    """Requests that run next to the failing one. Each must generate the model's own tokens."""

    def __init__(self, engine):
        self.engine, self.got = engine, {}
        params = SamplingParams(max_tokens=10)
        self.generations = [engine.add(prompt, params) for prompt in PROMPTS]

    def run(self):
        """Run the engine until it is idle. Return the deltas of all requests outside this group."""
        own = {generation.request_id: [] for generation in self.generations}
        deltas = []
        while self.engine.num_unfinished:
            for delta in self.engine.step():
                if delta.request_id in own:
                    own[delta.request_id] += delta.token_ids
                else:
                    deltas.append(delta)
        model = dense("llama", 2)
        for prompt, generation in zip(PROMPTS, self.generations):
            wanted = greedy(model, prompt, 10)
            assert generation.samples[0].token_ids == own[generation.request_id] == wanted
        return deltas


def spoil(engine, monkeypatch, prompt, spoiled):
    """From the second step on, modify this prompt's rows of logits with `spoiled`."""
    forward = engine.model.forward

    def wrong(batch):
        logits = forward(batch).clone()
        ends = batch.num_logits.cumsum()
        for i, (start, length) in enumerate(zip(batch.starts, batch.seq_lens)):
            if start >= len(prompt) and length > len(prompt) and batch.rows[i] in rows():
                spoiled(logits[ends[i] - batch.num_logits[i] : ends[i]])
        return logits

    def rows():
        manager = engine.cache.manager
        return [
            manager.row(sample.request)
            for sample in engine.scheduler.admitted
            if sample.generation.prompt.tolist() == prompt
        ]

    monkeypatch.setattr(engine.model, "forward", wrong)


def spoil_after(engine, monkeypatch, token):
    """Make all rows of logits that follow this token NaN."""
    forward = engine.model.forward

    def wrong(batch):
        logits = forward(batch).clone()
        logits[batch.token_ids[batch.logits_indices] == token] = NAN
        return logits

    monkeypatch.setattr(engine.model, "forward", wrong)


def drafter_of(prompt, answer, count=4):
    """Return a drafter that proposes the next `count` tokens of the answer to this prompt."""

    def draft(request):
        if request.token_ids[: len(prompt)].tolist() != prompt:
            return []
        known = request.num_tokens - len(prompt)
        return answer[known : known + count]

    return draft


def served_alone(engine, prompt, **params):
    """Serve one request. Return its sample, the tokens of all its deltas, and its last delta."""
    generation = engine.add(prompt, SamplingParams(**params))
    deltas = []
    while engine.num_unfinished:
        deltas += engine.step()
    return generation.samples[0], [token for each in deltas for token in each.token_ids], deltas[-1]


def all_nan(logits):
    logits[:] = NAN


def one_nan(logits):
    logits[..., 7] = NAN


def one_inf(logits):
    logits[..., 7] = INF


def all_masked(logits):
    logits[:] = -INF


class TestLogits:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("spoiled", "params"),
        spread(
            itertools.product(
                (all_nan, one_nan, one_inf, all_masked), ({}, {"temperature": 1.0}, {"n": 3})
            ),
            5,
        ),
    )
    def test_invalid_logits_end_only_their_own_request(
        self, make_engine, monkeypatch, spoiled, params
    ):
        engine = make_engine()
        others = Others(engine)
        prompt = list(range(200, 230))
        spoil(engine, monkeypatch, prompt, spoiled)
        failing = engine.add(prompt, SamplingParams(max_tokens=10, **params), priority=-1)
        deltas = others.run()
        assert failing.is_finished
        for sample in failing.samples:
            assert sample.finish_reason == "error"
            assert "logits of request 'request-3' are NaN or inf, or all -inf" in str(sample.error)
        ended = [delta for delta in deltas if delta.finish_reason]
        assert [delta.finish_reason for delta in ended] == ["error"] * len(failing.samples)
        assert ended[0].error is failing.samples[0].error
        assert engine.metrics.failed_sequences == len(failing.samples)
        assert engine.metrics.failed_steps == 0

    def test_invalid_logits_after_a_rejected_draft_have_no_effect(self, make_engine, monkeypatch):
        prompt, wrong = list(range(200, 230)), 7
        wanted = greedy(dense("llama", 2), prompt, 10)
        assert wrong not in wanted
        engine = make_engine(drafter=lambda request: [wrong, wrong])
        spoil_after(engine, monkeypatch, wrong)
        sample, tokens, _ = served_alone(engine, prompt, max_tokens=10)
        assert sample.finish_reason == "length"
        assert tokens == sample.token_ids == wanted
        assert engine.metrics.drafted_tokens > 0 == engine.metrics.accepted_drafts

    @pytest.mark.parametrize("is_drafted", [False, True])
    @pytest.mark.parametrize("num_good", [1, 2, 4])
    def test_tokens_before_invalid_logits_are_returned(
        self, make_engine, monkeypatch, num_good, is_drafted
    ):
        prompt = list(range(200, 230))
        answer = greedy(dense("llama", 2), prompt, 10)
        last = answer[num_good - 1]
        assert last not in answer[: num_good - 1]
        engine = make_engine(drafter=drafter_of(prompt, answer) if is_drafted else None)
        spoil_after(engine, monkeypatch, last)
        sample, tokens, end = served_alone(engine, prompt, max_tokens=10, logprobs=0)
        assert sample.finish_reason == end.finish_reason == "error"
        assert "are NaN or inf" in str(end.error) and sample.error is end.error
        assert tokens == sample.token_ids == answer[:num_good]
        assert len(sample.logprobs) == num_good

    @pytest.mark.parametrize("wrong", [lambda x: x[:, :-1], lambda x: x[:-1], lambda x: x[0]])
    def test_logits_with_an_invalid_shape_fail_the_step(self, make_engine, monkeypatch, wrong):
        engine = make_engine()
        others = Others(engine)
        with monkeypatch.context() as patch:
            forward = engine.model.forward
            patch.setattr(engine.model, "forward", lambda batch: wrong(forward(batch)))
            with pytest.raises(ValueError, match=r"model.forward returned logits of shape \["):
                engine.step()
        assert engine.metrics.failed_steps == 1
        others.run()

    @pytest.mark.slow
    @pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}])
    def test_masked_logits_are_not_an_error(self, make_engine, monkeypatch, params):
        engine = make_engine()
        others = Others(engine)
        prompt = list(range(200, 230))

        def mask(logits):
            logits[..., 3:] = -INF

        spoil(engine, monkeypatch, prompt, mask)
        masked = engine.add(prompt, SamplingParams(max_tokens=6, **params))
        others.run()
        for sample in masked.samples:
            assert sample.finish_reason == "length"
            assert all(token < 3 for token in sample.token_ids[1:])


class TestSampling:
    @pytest.mark.slow
    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1.7e308])
    def test_extreme_temperatures_are_served(self, make_engine, temperature):
        engine = make_engine()
        others = Others(engine)
        params = SamplingParams(max_tokens=8, temperature=temperature)
        served = engine.add(range(200, 230), params, priority=-1)
        others.run()
        assert served.samples[0].finish_reason == "length"
        if temperature < 1:
            assert served.samples[0].token_ids == greedy(dense("llama", 2), [*range(200, 230)], 8)

    def test_failing_sampler_ends_only_its_own_sample(self, make_engine, monkeypatch):
        engine = make_engine()
        others = Others(engine)
        failing = engine.add(
            range(200, 230), SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=1)
        )
        token = Sampler.token

        def broken(sampler, logits):
            if failing.samples[1:] and sampler is failing.samples[1].sampler:
                raise MemoryError("no room")
            return token(sampler, logits)

        monkeypatch.setattr(Sampler, "token", broken)
        others.run()
        reasons = [sample.finish_reason for sample in failing.samples]
        assert reasons == ["length", "error", "length"]
        assert isinstance(failing.samples[1].error, MemoryError)

    def test_failing_fork_ends_only_its_own_request(self, make_engine, monkeypatch):
        engine = make_engine()
        others = Others(engine)
        fork = engine.scheduler.fork

        def broken(parent, child):
            if child.index == 2:
                raise MemoryError("no room")
            return fork(parent, child)

        monkeypatch.setattr(engine.scheduler, "fork", broken)
        failing = engine.add(range(200, 230), SamplingParams(max_tokens=6, temperature=1.0, n=3))
        others.run()
        assert [sample.finish_reason for sample in failing.samples] == ["error"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("drafts,expected", [
    ([-1], "drafts[0] is -1: expected 0 to 511"),
    ([3, 512], "drafts[1] is 512: expected 0 to 511"),
    ([1.5], "drafts[0] is 1.5: expected an integer"),
    ([None], "drafts[0] is None"),
    (7, "'int' object is not iterable"),
], ids=str)  # fmt: skip
def test_invalid_draft_ends_only_its_own_request(make_engine, drafts, expected):
    engine = make_engine(drafter=lambda request: drafts if request.token_ids[0] == 200 else [])
    others = Others(engine)
    failing = engine.add(range(200, 230), SamplingParams(max_tokens=6))
    (_, last) = others.run()
    assert last.finish_reason == "error" and expected in str(last.error)
    assert failing.samples[0].error is last.error


class TestIds:
    def test_request_ids_may_look_like_sample_ids(self, make_engine):
        engine = make_engine()
        others = Others(engine)
        like = [
            engine.add([9, 8, 7], SamplingParams(max_tokens=9), request_id=f"a.{i}") for i in (1, 2)
        ]
        internal = [each.samples[0].request.request_id for each in others.generations]
        like += [engine.add([9, 8], SamplingParams(max_tokens=9), request_id=id) for id in internal]
        params = SamplingParams(max_tokens=4, n=3, temperature=1.0)
        forked = engine.add(range(70, 90), params, request_id="a")
        others.run()
        assert all(sample.finish_reason == "length" for sample in forked.samples)
        assert all(each.samples[0].finish_reason == "length" for each in like)

    def test_generated_request_ids_are_unused(self, make_engine):
        engine = make_engine()
        engine.add([1, 2], SamplingParams(max_tokens=2), request_id="request-1")
        given = engine.add([3, 4], SamplingParams(max_tokens=2))
        assert given.request_id == "request-2"
        while engine.num_unfinished:
            engine.step()


class TestStreams:
    def test_streams_read_alternately_yield_all_tokens(self, make_engine):
        engine = make_engine()
        streams = [engine.stream(prompt, SamplingParams(max_tokens=6)) for prompt in PROMPTS]
        got = [[] for _ in streams]
        for _ in range(6):
            for stream, tokens in zip(streams, got):
                if delta := next(stream, None):
                    tokens += delta.token_ids
        for stream, tokens in zip(streams, got):
            tokens += [token for delta in stream for token in delta.token_ids]
        assert got == [greedy(dense("llama", 2), prompt, 6) for prompt in PROMPTS]


class TestFreeCallbacks:
    """The `free` callback of a request runs while the engine processes the tokens of a whole batch."""

    def run(self, engine, free, **params):
        params = SamplingParams(max_tokens=4, **params)
        ending = engine.add(PROMPTS[0], params, free=free)
        others = [engine.add(prompt, SamplingParams(max_tokens=9)) for prompt in PROMPTS[1:]]
        deltas = []
        while engine.num_unfinished:
            deltas.append(engine.step())
        return ending, others, deltas

    @pytest.mark.parametrize("is_drafted", [False, True])
    def test_failing_free_ends_only_its_own_request(self, make_engine, is_drafted):
        model = dense("llama", 2)
        answer = greedy(model, PROMPTS[0], 4)
        engine = make_engine(drafter=drafter_of(PROMPTS[0], answer) if is_drafted else None)

        def free(request):
            raise OSError("no connector")

        ending, others, deltas = self.run(engine, free, logprobs=0)
        (sample,) = ending.samples
        assert sample.finish_reason == "error" and isinstance(sample.error, OSError)
        assert engine.metrics.failed_sequences == 1
        own = [delta for step in deltas for delta in step if delta.request_id == ending.request_id]
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["error"]
        assert own[-1].error is sample.error
        assert [len(delta.token_ids) for delta in own] == ([1, 3] if is_drafted else [1] * 4)
        assert [token for delta in own for token in delta.token_ids] == sample.token_ids == answer
        assert [each for delta in own for each in delta.logprobs] == sample.logprobs
        for prompt, generation in zip(PROMPTS[1:], others):
            assert generation.samples[0].token_ids == greedy(model, prompt, 9)

    def test_request_aborted_during_free_gets_no_more_tokens(self, make_engine):
        engine = make_engine()

        def free(request):
            assert engine.abort(others[1].request_id)
            engine.cache.manager.free(request)

        others = []
        params = SamplingParams(max_tokens=4)
        ending = engine.add(PROMPTS[0], params, free=free)
        others += [engine.add(prompt, SamplingParams(max_tokens=9)) for prompt in PROMPTS[1:]]
        of_aborted = []
        while engine.num_unfinished:
            of_aborted += [d for d in engine.step() if d.request_id == others[1].request_id]
        assert ending.samples[0].finish_reason == "length"
        assert others[1].samples[0].finish_reason == "abort"
        assert [len(delta.token_ids) for delta in of_aborted] == [1, 1, 1]
        assert len(others[1].samples[0].token_ids) == 3
        model = dense("llama", 2)
        assert others[0].samples[0].token_ids == greedy(model, PROMPTS[1], 9)


class TestStop:
    PARAMS = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=1)

    def test_stop_ends_only_one_sample(self, make_engine):
        engine = make_engine()
        generation = engine.add(PROMPTS[0], self.PARAMS)
        engine.step()
        assert engine.stop(generation.request_id, 1)
        assert not engine.stop(generation.request_id, 1)
        while engine.num_unfinished:
            engine.step()
        ended = [(len(each.token_ids), each.finish_reason) for each in generation.samples]
        assert ended == [(6, "length"), (1, "stop"), (6, "length")]

    def test_samples_are_one_sequence_before_the_first_token(self, make_engine):
        engine = make_engine()
        generation = engine.add(PROMPTS[0], self.PARAMS)
        assert not engine.stop(generation.request_id, 1)
        assert engine.stop(generation.request_id, 0)
        assert generation.is_finished and engine.num_unfinished == 0


def test_a_request_aborted_while_the_model_runs_gets_no_token(make_engine, monkeypatch):
    engine = make_engine()
    others = Others(engine)
    generation = engine.add(range(150, 170), SamplingParams(max_tokens=9))
    forward = engine.model.forward

    def aborting(batch):
        logits = forward(batch)
        if len(generation.samples[0].token_ids) == 3:
            engine.abort(generation.request_id)
        return logits

    monkeypatch.setattr(engine.model, "forward", aborting)
    deltas = others.run()
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    assert generation.samples[0].finish_reason == "abort"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [-1, 2.7, 2**31])
def test_sampler_without_a_result_ends_only_its_own_sample(make_engine, monkeypatch, wrong):
    engine = make_engine()
    others = Others(engine)
    drawn = iter([3, 4])
    monkeypatch.setattr(Sampler, "token", lambda self, logits: next(drawn, wrong))
    generation = engine.add(range(150, 170), SamplingParams(max_tokens=9, temperature=0.5))
    *good, last = others.run()
    assert [delta.token_ids for delta in good] == [[3], [4]]
    assert last.finish_reason == "error" and last.token_ids == []
    assert generation.samples[0].token_ids == [3, 4]


def test_finished_requests_are_not_kept_alive(make_engine):
    engine = make_engine()
    engine.add(PROMPTS[0], SamplingParams(max_tokens=4), request_id="not kept alive")
    while engine.num_unfinished:
        engine.step()
    engine.step()
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, Generation)]
    assert "not kept alive" not in [each.request_id for each in alive]


def test_rejected_requests_are_returned_even_if_the_model_fails(make_engine, monkeypatch):
    engine = make_engine()
    others = Others(engine)
    schedule, victim = (
        engine.scheduler.schedule,
        engine.add([4, 5, 6], SamplingParams(max_tokens=3)),
    )

    def refusing():
        monkeypatch.setattr(engine.scheduler, "schedule", schedule)
        step = schedule()
        engine.scheduler.finish(victim.samples[0])
        step.refused.append(victim.samples[0])
        return step

    def fail(_):
        monkeypatch.setattr(engine.model, "forward", forward)
        raise RuntimeError("out of order")

    forward = engine.model.forward
    monkeypatch.setattr(engine.scheduler, "schedule", refusing)
    monkeypatch.setattr(engine.model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of order"):
        engine.step()
    (delta,) = others.run()
    assert delta.finish_reason == "refused"
