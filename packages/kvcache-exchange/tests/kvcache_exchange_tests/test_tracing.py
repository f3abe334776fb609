# SPDX-License-Identifier: Apache-2.0
"""Spans of steps, swaps and loads, recorded with the OpenTelemetry SDK."""

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvcache import Admit, External, LayerSpec, Request, build, plan_cache
from kvcache.allocator.manager import KVCacheManager
from kvcache.sources.base import LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache_exchange.tracing import disable_tracing, enable_tracing

EXPORTER = InMemorySpanExporter()


@pytest.fixture
def spans(monkeypatch):
    """Enable tracing, and provide a function that returns the finished spans."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    EXPORTER.clear()
    enable_tracing("opentelemetry")
    yield EXPORTER.get_finished_spans
    disable_tracing()


def make():
    layers = [LayerSpec("a", "full_attention", 4, 1, 8)]
    plan = plan_cache(layers, 2**12, max_model_len=64)
    return build(plan, max_num_reqs=2, num_host_blocks=20)


def test_steps_and_swaps_are_spans_and_swap_spans_are_inside_apply(spans):
    cache = make()
    manager = cache.manager
    for i in range(20):
        request = Request(f"r{i}", range(100 * i, 100 * i + 40))
        manager.report(cache.worker.apply(manager.step(new=[request])))
        manager.free(request)
    names = [each.name for each in spans()]
    assert names.count("kvcache.step") == names.count("kvcache.apply") == 20
    apply = {each.context.span_id for each in spans() if each.name == "kvcache.apply"}
    swaps = [each for each in spans() if each.name == "kvcache.swap_out"]
    assert swaps and all(each.parent.span_id in apply for each in swaps)


@pytest.mark.parametrize("how", ["finish", "disable"])
def test_load_is_one_span_from_start_to_end(spans, how):
    manager = KVCacheManager(4, 20, 64)
    loads = SourceLoads(manager, LoadStats())
    request = Request("r", range(20))
    load = loads.match(request, 0, 12)
    manager.step(new=[Admit(request, external=External(12, delayed=True))])
    loads.begin(load)
    assert "kvcache.load" not in [each.name for each in spans()]
    if how == "disable":
        disable_tracing()
    else:
        loads.finish(load)
    (span,) = [each for each in spans() if each.name == "kvcache.load"]
    assert span.attributes == {"kvcache.request_id": "r", "kvcache.num_tokens": 12}


def test_methods_are_untouched_while_tracing_is_disabled():
    before = KVCacheManager.step, SourceLoads.begin
    assert not hasattr(before[0], "__wrapped__")
    enable_tracing("opentelemetry")
    assert KVCacheManager.step.__wrapped__ is before[0]
    disable_tracing()
    disable_tracing()
    assert (KVCacheManager.step, SourceLoads.begin) == before


@pytest.mark.parametrize(
    ("backends", "error", "message"),
    [
        ((), ValueError, r"backends is \(\): expected opentelemetry or nvtx, or both"),
        (("otel",), ValueError, r"backends is \('otel',\): expected"),
        (("nvtx",), RuntimeError, "NVTX"),
    ],
)
def test_invalid_backends_are_reported_and_nothing_is_traced(backends, error, message):
    import torch

    if backends == ("nvtx",) and torch.version.cuda:
        pytest.skip("this build of torch includes NVTX")
    with pytest.raises(error, match=message):
        enable_tracing(*backends)
    assert not hasattr(KVCacheManager.step, "__wrapped__")


def test_tracing_cannot_be_enabled_twice(spans):
    with pytest.raises(RuntimeError, match="already enabled"):
        enable_tracing("opentelemetry")
