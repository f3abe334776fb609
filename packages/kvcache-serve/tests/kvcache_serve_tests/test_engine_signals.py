# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that raise while an engine is running: no token is lost or duplicated, and no
call hangs.
"""

import signal

import pytest

pytest.importorskip("transformers")

from kvcache.allocator import check_invariants
from kvcache_serve.engine import SamplingParams
from kvcache_serve.engine.signals import SignalHold
from tests.machinery.hostile import engines
from tests.machinery.hostile.instants import Alarm, interrupted_at
from tests.machinery.shared import sampled

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["by swap", "plain", "by recompute", "with drafts"]))
def test_signals_at_many_instants_lose_no_token(name):
    # The strides 61 and 997 are prime, so that each step is interrupted at different lines.
    for first, stride in ((3, 61), (40, 61), (500, 997)):
        assert engines.check_each_instant(name, first, stride) > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(20)))
def test_interrupts_at_random_instants_keep_the_state_valid(seed):
    with Alarm() as alarm:
        assert engines.EngineRun(1_000 * seed).run(alarm, 30) >= 30


@pytest.fixture
def engine():
    made = engines.make_engine("plain")
    yield made
    for generation in made.generations:
        made.abort(generation.request_id)
    manager = made.cache.manager
    check_invariants(manager)
    assert manager.pool.num_free == manager.pool.num_total
    made.model.detach()


class TestStep:
    def test_signal_during_a_forward_pass_is_handled_after_it(self, engine, monkeypatch):
        forward = engine.model.forward

        def interrupted(batch):
            signal.raise_signal(signal.SIGINT)
            return forward(batch)

        monkeypatch.setattr(engine.model, "forward", interrupted)
        generation = engine.add(range(1, 9), SamplingParams(max_tokens=3))
        for count in (1, 2, 3):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert len(generation.samples[0].token_ids) == count
        assert engine.metrics.failed_steps == 0
        assert [len(delta.token_ids) for delta in engine.step()] == [1, 1, 1]

    def test_next_step_returns_the_last_tokens_of_an_interrupted_step(self, engine, monkeypatch):
        generation = engine.add(range(1, 9), SamplingParams(max_tokens=1))
        complete = engine.scheduler.complete
        monkeypatch.setattr(
            engine.scheduler,
            "complete",
            lambda *args: (complete(*args), signal.raise_signal(signal.SIGINT)),
        )
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert generation.is_finished and engine.num_unfinished == 1
        (delta,) = engine.step()
        assert delta.token_ids == generation.samples[0].token_ids
        assert delta.finish_reason == "length" and engine.num_unfinished == 0


class TestSignalHold:
    def test_nested_hold_defers_signals_to_the_outer_hold(self):
        with pytest.raises(KeyboardInterrupt), SignalHold() as outer:
            with SignalHold():
                signal.raise_signal(signal.SIGINT)
            assert outer.noted == [signal.SIGINT]

    def test_handler_set_during_a_hold_stays_installed(self):
        handler = lambda *_: None  # noqa: E731
        before = signal.getsignal(signal.SIGUSR1)
        try:
            with SignalHold():
                signal.signal(signal.SIGUSR1, handler)
            assert signal.getsignal(signal.SIGUSR1) is handler
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_replacement_handlers_of_interrupted_holds_do_not_accumulate(self):
        """An interrupt while handlers are being restored may leave replacement handlers installed.
        The next hold must unwrap them.
        """
        before = signal.signal(signal.SIGUSR1, engines._raise)
        try:
            for at in range(1, 400, 3):
                interrupted_at(
                    at, lambda: SignalHold().__enter__().__exit__(None, None, None),
                    lambda: signal.raise_signal(signal.SIGUSR1),
                )  # fmt: skip
            with SignalHold():
                pass
            found, depth = signal.getsignal(signal.SIGUSR1), 0
            while found is not engines._raise:
                found, depth = found.handler, depth + 1
            assert depth <= 1
        finally:
            signal.signal(signal.SIGUSR1, before)
            signal.signal(signal.SIGINT, signal.default_int_handler)
