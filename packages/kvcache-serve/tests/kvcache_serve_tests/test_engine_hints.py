# SPDX-License-Identifier: Apache-2.0
"""Hints in an engine with a tiny model: answers never change, and the sanitizer finds no wrong KV."""

import logging
import random

import numpy as np
import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")

from kvcache import Request
from kvcache_exchange.hints import Hint, limits
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import attach
from kvcache_serve_tests.test_engine_sources import LONG, MemoryStore, a_tier, answer, settle
from tests.machinery.dense_models import dense, greedy

logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def large_share(monkeypatch):
    """Let hints use more of a small pool."""
    monkeypatch.setattr(limits, "SHARE", 0.6)


def an_engine(make_source=None, **options):
    """Create an engine whose sanitizer stops at wrong KV."""
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 64, "num_preallocate_tokens": 0}
    paged = attach(dense("llama", 2), "256KiB", enable_events=True, **sizes, **options)
    sources = [] if make_source is None else [make_source(paged.cache)]
    return Engine(paged, sources=sources, sanitizer="stop")


def receipt_of(engine, **hint):
    pending = engine.hint(LONG, Hint(**hint))
    while pending.receipt is None:
        engine.step()
    return pending.receipt


def test_prefetch_loads_from_the_store_before_the_request():
    store = MemoryStore()
    first = an_engine(a_tier(store))
    expected = answer(first)
    settle(first)
    first.close()
    store.is_closed = False
    engine = an_engine(a_tier(store))
    receipt = receipt_of(engine, intent="prefetch")
    assert (receipt.status, receipt.num_tokens) == ("done", 80)
    assert answer(engine) == expected == greedy(dense("llama", 2), LONG, 4)
    assert engine.metrics.cached_prompt_tokens == 80
    assert engine.sources[0].stats.loads == 1 and engine.hints.stats.used_tokens == 80
    settle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["priority", "learned"])
def test_random_hints_never_change_answers(eviction):
    rng = random.Random(3)
    store = MemoryStore()
    engine = an_engine(
        lambda cache: a_tier(store, host_pages=cache.host_pages)(cache),
        host_budget="512KiB",
        eviction=eviction,
    )
    prompts = [LONG, LONG[:50] + [3, 4, 5], [9, *LONG[1:70]]]
    expected = [greedy(dense("llama", 2), prompt, 4) for prompt in prompts]
    pending = []
    for _ in range(60):
        prompt = rng.choice(prompts)
        if rng.random() < 0.3:
            settle(engine)
            ids = np.arange(1, engine.cache.manager.pool.num_blocks)
            engine.cache.manager.cache.evict(ids)
        pending.append(engine.hint(prompt, Hint(intent=rng.choice(["prefetch", "pin"]))))
        if rng.random() < 0.5:
            number = rng.randrange(3)
            assert answer(engine, prompts[number]) == expected[number]
        engine.step()
    while engine.hints.num_pending:
        engine.step()
    assert all(each.receipt is not None for each in pending)
    done = {each.hint.intent for each in pending if each.receipt.status == "done"}
    assert done == {"prefetch", "pin"} and engine.hints.stats.used_tokens
    assert not engine.sanitizer.reports
    settle(engine)
    engine.close()


def test_closing_an_engine_refuses_pending_hints():
    engine = an_engine(host_budget="512KiB")
    pending = engine.hint(LONG, Hint(intent="prefetch"))
    engine.close()
    assert pending.receipt.reason == "the engine is closing"


def test_invalid_hints_are_rejected():
    engine = an_engine()
    for tokens, hint, message in (
        ("text", Hint(intent="pin"), "tokens is 'text': expected token IDs"),
        ([], Hint(intent="pin"), "tokens is empty"),
        ([9999999], Hint(intent="pin"), "tokens has tokens from 9999999"),
        ([1] * 129, Hint(intent="pin"), "tokens has 129 entries: expected at most 128"),
        ([1], {"intent": "pin"}, "hint"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            engine.hint(tokens, hint)
    assert engine.hints.num_pending == 0


def test_salt_separates_hints():
    engine = an_engine(host_budget="512KiB")
    engine.add(LONG, SamplingParams(max_tokens=1), cache_salt="a")
    while engine.num_unfinished:
        engine.step()
    for salt, status in ((None, "refused"), ("b", "refused"), ("a", "done")):
        assert engine.hint(LONG, Hint(intent="pin"), cache_salt=salt).receipt.status == status


def test_failing_store_is_named_in_the_receipt():
    store = MemoryStore()
    first = an_engine(a_tier(store))
    answer(first)
    settle(first)
    first.close()
    store.is_closed = False
    engine = an_engine(a_tier(store))
    get = store.get

    def failing(keys, values):
        store.fault = lambda: "corrupt"
        return get(keys, values)

    store.get = failing
    receipt = receipt_of(engine, intent="prefetch")
    assert receipt.status != "done" and receipt.reason == "the digest of a block is wrong"
    cached = engine.cache.manager.cache.cached_tokens(Request("q", LONG))
    assert receipt.num_tokens == cached.on_device < 80
    store.fault = lambda: None
    assert answer(engine) == greedy(dense("llama", 2), LONG, 4)
    settle(engine)
