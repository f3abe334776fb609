# SPDX-License-Identifier: Apache-2.0
"""The sanitizer in the engine: correct runs cause no reports, and planted defects are reported."""

import dataclasses
import os

import numpy as np
import pytest

from kvcache import Request
from kvcache.sanitizer import SanitizedGroup, Sanitizer, SanitizerError
from kvcache_serve.engine import Engine, SamplingParams, sanitizer_of
from kvcache_serve.engine.transformers import attach, layer_specs
from tests.machinery.dense_models import MODELS, dense
from tests.simulator.served_models import ModelServer

RUNS = int(os.environ.get("KVCACHE_SANITIZER_RUNS", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("with_store", [False, True], ids=["plain", "store"])
@pytest.mark.parametrize("name", MODELS)
def test_random_workloads_have_no_reports(name, with_store, monkeypatch):
    monkeypatch.setenv("KVCACHE_SANITIZE", "stop")
    for seed in range(RUNS):
        print(f"seed {seed}")
        run = ModelServer(name, 3000 + seed, with_store)
        run.run()
        sanitizer = run.engine.sanitizer
        assert (
            not sanitizer.reports and sanitizer.slots_read > 100 and sanitizer.slots_written > 100
        )


def engine_of(name="llama", *, pages=40, host_pages=0, **options) -> Engine:
    model = dense(name, 2)
    plan_options = {"block_size": 4, "num_speculative_tokens": 3}
    per_page = attach(model, 2**24, max_model_len=64, **plan_options)
    page_bytes = per_page.cache.plan.page_bytes
    per_page.detach()
    paged = attach(
        model,
        pages * page_bytes,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        host_budget=host_pages * page_bytes,
        **plan_options,
    )
    return Engine(paged, sanitizer=sanitizer_of(paged.cache, log=lambda report: None), **options)


def serve(engine, num_tokens=8, **params):
    """Serve four prompts, two of which share a prefix, and return the kinds of the reports."""
    prompts = [[*range(20)], [*range(16), 40, 41], [*range(50, 63)], [*range(70, 81)]]
    engine.generate(prompts, SamplingParams(max_tokens=num_tokens, **params))
    engine.generate(prompts[::-1], SamplingParams(max_tokens=num_tokens))
    engine.model.detach()
    return {str(report.kind) for report in engine.sanitizer.reports}


def change_plan(engine, change):
    """Replace the fields that `change(plan)` returns in each plan that the worker applies."""
    apply = engine.cache.worker.apply

    def changed(plan):
        fields = {} if plan.is_empty else change(plan)
        if not fields:
            return apply(plan)
        given = {
            each.name: getattr(plan, each.name) for each in dataclasses.fields(plan) if each.init
        }
        return apply(type(plan)(**(given | fields)))

    engine.cache.worker.apply = changed


def names_two(engine) -> bool:
    """Return whether some report names both the reading request and another request that wrote."""
    return any(
        report.writer not in (None, report.request)
        or any(other in report.found for other in ("'request", "holders"))
        for report in engine.sanitizer.reports
    )


def test_wrong_block_in_the_table_is_reported():
    engine = engine_of()

    def change(plan):
        if len(plan.append_rows) < 2:
            return {}
        ids, splits = plan.append_ids[0].copy(), plan.append_splits[0]
        ids[splits[1]] = ids[0]
        return {"append_ids": [ids]}

    change_plan(engine, change)
    assert {"two-writers", "wrong-content"} & serve(engine) and names_two(engine)


def shift_slots(engine):
    """Make the engine write each token to the slot before its own."""
    tables = engine.cache.tables
    compute = tables.compute_slot_mapping

    def shifted(*args):
        compute(*args)
        slots = tables[0].slot_mapping.np
        slots[slots > 0] -= 1  # slot 0 is in the null block, so the result is a valid slot

    tables.compute_slot_mapping = shifted


def test_slots_off_by_one_are_reported():
    engine = engine_of()
    shift_slots(engine)
    assert "slot-mismatch" in serve(engine)


def test_copy_on_write_that_keeps_the_shared_block_is_reported():
    engine = engine_of()

    def change(plan):
        if len(plan.copy) == 0:
            return {}
        source = dict(plan.copy[:, ::-1].tolist())
        append = [
            np.array([source.get(i, i) for i in ids.tolist()], np.int32) for ids in plan.append_ids
        ]
        replace = []
        for each in plan.replace:
            each = each.copy()
            each[:, 2] = [source.get(i, i) for i in each[:, 2].tolist()]
            replace.append(each)
        return {"append_ids": append, "replace": replace}

    change_plan(engine, change)
    engine.generate([[*range(18)]], SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=3))
    engine.model.detach()
    kinds = {str(report.kind) for report in engine.sanitizer.reports}
    assert kinds & {"two-writers", "write-to-shared"} and names_two(engine)


def small_pool(**options) -> Engine:
    return engine_of(pages=18, host_pages=40, preemption="swap", **options)


@pytest.mark.slow
def test_exchanged_pages_of_a_swap_in_are_reported():
    engine = small_pool()

    def change(plan):
        if len(plan.swap_in) < 2:
            return {}
        pairs = plan.swap_in.copy()
        pairs[:2, 1] = pairs[1::-1, 1]
        return {"swap_in": pairs}

    change_plan(engine, change)
    assert "wrong-content" in serve(engine, 30)


def test_row_that_outlives_its_request_is_reported():
    engine = engine_of()
    forward, calls = engine.model.forward, []

    def finishing(batch):
        calls.append(batch)
        if len(calls) == 3:
            engine.sanitizer.finish(engine._observer._last[1][0])
        return forward(batch)

    engine.model.forward = finishing
    assert "stale-row" in serve(engine)


@pytest.mark.slow
def test_window_block_dropped_too_early_is_reported():
    engine = engine_of("gemma3")

    def change(plan):
        (g,) = [g for g, group in enumerate(engine.sanitizer.groups) if group.kind == "window"]
        if len(plan.replace[g]) == 0:
            return {}
        more = plan.replace[g].copy()
        more[:, 1] += 1
        replace = list(plan.replace)
        replace[g] = np.concatenate([replace[g], more])
        return {"replace": replace}

    change_plan(engine, change)
    assert "wrong-content" in serve(engine, 30)


def test_environment_variable_enables_the_sanitizer(monkeypatch):
    paged = attach(dense("llama", 2), 2**20, max_model_len=64)
    assert Engine(paged).sanitizer is None
    monkeypatch.setenv("KVCACHE_SANITIZE", "stop")
    assert Engine(paged).sanitizer.mode == "stop"
    monkeypatch.setenv("KVCACHE_SANITIZE", "yes")
    with pytest.raises(ValueError, match="KVCACHE_SANITIZE is 'yes': expected one of '1'"):
        Engine(paged)
    paged.detach()


def test_stop_mode_ends_the_step_before_the_model_computes():
    engine = engine_of()
    engine.sanitizer.mode = "stop"
    shift_slots(engine)
    with pytest.raises(SanitizerError, match="slot-mismatch"):
        serve(engine)
    assert engine.metrics.computed_tokens and not engine.metrics.generated_tokens
    engine.model.detach()


def test_sanitizer_of_another_cache_is_rejected():
    engine = engine_of()
    with pytest.raises(ValueError, match="expected sanitizer_of"):
        Engine(engine.model, sanitizer=Sanitizer([SanitizedGroup("full", 4)], 7))
    with pytest.raises(TypeError, match="expected a Sanitizer or a mode"):
        Engine(engine.model, sanitizer=3)
    assert layer_specs(dense("llama", 2), block_size=4)
    engine.model.detach()


@pytest.mark.parametrize("mode", ["report", "stop"])
def test_failure_of_the_observer_ends_the_engine_only_in_stop_mode(mode, monkeypatch):
    engine = engine_of()
    engine._observer.sanitizer.mode = mode
    monkeypatch.setattr(Sanitizer, "observe_tokens", lambda *arguments: 1 / 0)
    if mode == "stop":
        with pytest.raises(ZeroDivisionError):
            serve(engine, 1)
        return
    serve(engine, 1)
    assert engine._observer.guard.failure == "ZeroDivisionError: division by zero"


def test_stop_mode_never_computes_from_a_wrong_block():
    engine = engine_of()
    prompt = list(range(40))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    engine.sanitizer.mode = "stop"
    blocks = engine.cache.manager.cache.find_prefix(Request("x", prompt)).block_ids
    engine.sanitizer.observe_clear([int(blocks[0])])  # the block is lost, but stays in the cache
    generation = engine.add([*prompt, 5], SamplingParams(max_tokens=2))
    for _ in range(3):
        with pytest.raises(SanitizerError):
            engine.step()
    assert not generation.samples or not len(generation.samples[0].token_ids)
    engine.model.detach()
