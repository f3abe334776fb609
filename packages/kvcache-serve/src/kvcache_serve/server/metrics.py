# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics for the engine and its cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache.sanitizer import ReportKind
from kvcache_serve.server.admission import Admission
from kvcache_serve.server.engine_loop import EngineLoop
from kvcache_serve.server.request_log import RequestLog


class _EngineCollector(Collector):
    """Exports a snapshot of the engine: its counters, the number of sequences by state, and its
    sources' counters.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for name, value in state["metrics"].items():
            unit = " (seconds)" if name.endswith("_seconds") else ""
            text = f"{name.replace('_', ' ')} since the start{unit}"
            yield CounterMetricFamily(f"kvcache_{name}", text, value)
        sequences = GaugeMetricFamily("kvcache_sequences", "sequences by state", labels=["state"])
        for name in ("running", "loading", "swapped", "waiting"):
            count = sum(each["state"] == name for each in state["sequences"])
            sequences.add_metric([name], count)
        yield sequences
        yield from self._of_hints()
        yield from self._of_sanitizer()
        yield from self._of_sources()

    def _of_hints(self) -> Iterator[Metric]:
        hints = self._state["hints"]
        receipts = CounterMetricFamily(
            "kvcache_hint_receipts", "receipts of hints", labels=["intent", "status"]
        )
        for intent, by_status in hints["receipts"].items():
            for status, count in by_status.items():
                receipts.add_metric([intent, status], count)
        yield receipts
        for name, text in (
            ("prefetched_tokens", "tokens that hints loaded to the device"),
            ("used_tokens", "prefetched tokens that a request hit in time"),
            ("unused_tokens", "prefetched tokens that no request hit in time"),
        ):
            yield CounterMetricFamily(f"kvcache_hint_{name}", text, hints[name])
        for name, text in (
            ("pending", "hints without a receipt"),
            ("pinned_blocks", "blocks that pins from hints use"),
        ):
            yield GaugeMetricFamily(f"kvcache_hint_{name}", text, hints[name])

    def _of_sanitizer(self) -> Iterator[Metric]:
        sanitizer = self._state["sanitizer"]
        if sanitizer["mode"] == "off":
            return
        reports = CounterMetricFamily(
            "kvcache_sanitizer_reports", "findings of the KV cache sanitizer", labels=["kind"]
        )
        for kind in map(str, ReportKind):
            reports.add_metric([kind], sanitizer["counts"].get(kind, 0))
        yield reports
        for name in ("slots_read", "slots_written"):
            text = f"{name.replace('_', ' ')} that the sanitizer has followed"
            yield CounterMetricFamily(f"kvcache_sanitizer_{name}", text, sanitizer[name])

    def _of_sources(self) -> Iterator[Metric]:
        sources = self._state["sources"]
        families: dict[str, Metric] = {}
        for source in sources:
            for name, value in source["counts"].items():
                full_name = f"kvcache_source_{name}"
                if full_name not in families:
                    text = f"{name.replace('_', ' ')} of the source since the start"
                    families[full_name] = CounterMetricFamily(full_name, text, labels=["source"])
                families[full_name].add_metric([source["name"]], value)
        for name, text in (
            ("loading_requests", "requests whose blocks the source may still write to"),
            ("quarantined_blocks", "blocks in quarantine"),
        ):
            family = GaugeMetricFamily(f"kvcache_source_{name}", text, labels=["source"])
            for source in sources:
                family.add_metric([source["name"]], source[name])
            families[family.name] = family
        yield from families.values() if sources else ()


class _LoadCollector(Collector):
    """Exports metrics that load balancers compare: the number of requests by state, and the cache
    usage.
    """

    def __init__(self, state: dict[str, Any], admission: Admission, log: RequestLog) -> None:
        self._state, self._admission, self._log = state, admission, log

    def collect(self) -> Iterator[Metric]:
        admitted = [each.admitted_at is not None for each in self._log.running]
        num_waiting = self._admission.num_waiting + admitted.count(False)
        pool = self._state["pool"]
        num_held = pool["held"] + pool["held_cached"]
        yield GaugeMetricFamily(
            "kvcache_requests_running", "Requests that hold blocks.", admitted.count(True)
        )
        yield GaugeMetricFamily(
            "kvcache_requests_waiting", "Requests that wait for a row or for blocks.", num_waiting
        )
        yield GaugeMetricFamily(
            "kvcache_usage_ratio",
            "Device blocks held by requests, as a fraction of all blocks.",
            num_held / sum(pool.values()),
        )


class _LabelledCollector(Collector):
    """Adds labels to every sample that other collectors return."""

    def __init__(self, labels: dict[str, str], collectors: list[Collector]) -> None:
        self._labels, self._collectors = labels, collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for family in collector.collect():
                labelled = Metric(family.name, family.documentation, family.type, family.unit)
                labelled.samples = [
                    sample._replace(labels=self._labels | sample.labels)
                    for sample in family.samples
                ]
                yield labelled


def metrics_text(model_name: str, loop: EngineLoop, admission: Admission, log: RequestLog) -> bytes:
    """Return all metrics in Prometheus text format, with the label `model_name`."""
    registry = CollectorRegistry()
    parts = [
        _EngineCollector(loop.state),
        _LoadCollector(loop.state, admission, log),
        loop.cache_metrics,
        log,
    ]
    registry.register(_LabelledCollector({"model_name": model_name}, parts))
    return generate_latest(registry)
