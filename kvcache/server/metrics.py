"""Prometheus metrics of the engine and its cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache.metrics import CacheMetrics


class _EngineCollector(Collector):
    """Exports a snapshot of the engine with counters, sequences by state, and counters of sources."""

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
        yield from self._of_sources()

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


def metrics_text(state: dict[str, Any], cache: CacheMetrics) -> bytes:
    """Return the engine's snapshot and the cache's counters as metrics in Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(state))
    registry.register(cache)
    return generate_latest(registry)
