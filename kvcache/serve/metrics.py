"""A snapshot of the engine as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class _Collector:
    """What is counted is a counter, what is held at the moment a gauge."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        for name, value in state["metrics"].items():
            unit = " (seconds)" if name.endswith("_seconds") else ""
            text = f"{name.replace('_', ' ')} since the start{unit}"
            yield CounterMetricFamily(f"kvcache_{name}", text, value)
        for tier in ("pool", "host"):
            if state[tier] is not None:
                blocks = GaugeMetricFamily(
                    f"kvcache_{tier}_blocks", f"blocks of the {tier} by state", labels=["state"]
                )
                for name, count in state[tier].items():
                    blocks.add_metric([name], count)
                yield blocks
        yield CounterMetricFamily("kvcache_evicted_blocks", "cached blocks taken", state["evicted"])
        yield GaugeMetricFamily(
            "kvcache_hit_rate", "hit tokens per queried token", state["hit_rate"]
        )
        sequences = GaugeMetricFamily("kvcache_sequences", "sequences by state", labels=["state"])
        for name in ("running", "swapped", "waiting"):
            count = sum(each["state"] == name for each in state["sequences"])
            sequences.add_metric([name], count)
        yield sequences


def metrics_text(state: dict[str, Any]) -> bytes:
    """The text form of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Collector(state))
    return generate_latest(registry)
