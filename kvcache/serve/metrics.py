"""The figures of the engine and its cache as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache.metrics import CacheMetrics


class _EngineCollector(Collector):
    """A snapshot of the engine: counts, and sequences by state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for name, value in state["metrics"].items():
            unit = " (seconds)" if name.endswith("_seconds") else ""
            text = f"{name.replace('_', ' ')} since the start{unit}"
            yield CounterMetricFamily(f"kvcache_{name}", text, value)
        sequences = GaugeMetricFamily("kvcache_sequences", "sequences by state", labels=["state"])
        for name in ("running", "swapped", "waiting"):
            count = sum(each["state"] == name for each in state["sequences"])
            sequences.add_metric([name], count)
        yield sequences


def metrics_text(state: dict[str, Any], cache: CacheMetrics) -> bytes:
    """The text form of Prometheus: the engine's snapshot, and what was observed of the cache."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(state))
    registry.register(cache)
    return generate_latest(registry)
