# SPDX-License-Identifier: Apache-2.0
"""Adds the `kvcache:` metrics to vLLM's `/metrics` endpoint.

The engine core adds the manager's counts to `num_kv_fetch_reqs_by_stage`, a dictionary of integers
in the statistics that it sends to the API server. vLLM reads only its own keys, and logs them if
any value in the dictionary is not 0. The counts are therefore encoded in the keys. In the API
server, vLLM creates the logger below through the entry point group `vllm.stat_logger_plugins`.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

_PREFIX = "kvcache:"
# Maps the key of a count to its help text. For example, "evicted_blocks 1" is the count of group 1.
_COUNTERS = {
    "native_calls": "Calls in which the manager changed blocks of requests.",
    "loads": "KV loads from a connector that have ended.",
    "failed_loads": "KV loads that did not deliver all tokens, or were aborted.",
    "broken_pins": "Pinned blocks that were evicted.",
    "stored_blocks": "Blocks that entered the prefix cache.",
    "evicted_blocks": "Cached blocks that were evicted.",
}
_GAUGES = {
    "cached_blocks": "Cached blocks, held or free.",
    "free_blocks": "Blocks that no request holds, cached or not.",
}
_LABELS = ["model_name", "engine"]
_BY_GROUP = {"stored_blocks", "evicted_blocks"}
_metrics: dict[str, Counter | Gauge] = {}  # created once per process


def add_counts(stats: SchedulerStats, counts: dict[str, int]) -> None:
    """Add the manager's counts to the statistics of a step."""
    stats.num_kv_fetch_reqs_by_stage.update(
        {f"{_PREFIX}{key}={count}": 0 for key, count in counts.items()}
    )


class KVCacheStatLogger(StatLoggerBase):
    """Exports the counts of kvcache's managers, or nothing if there is no such manager."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._model = vllm_config.model_config.served_model_name
        self._engine = engine_index
        self._last: dict[tuple[int, str], int] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
        **more: Any,
    ) -> None:
        """Update the metrics from the statistics of a step."""
        if scheduler_stats is None:
            return
        engine = self._engine if engine_idx is None else engine_idx
        for key in scheduler_stats.num_kv_fetch_reqs_by_stage:
            if key.startswith(_PREFIX):
                name, _, count = key.removeprefix(_PREFIX).partition("=")
                self._set(engine, name, int(count))

    def _set(self, engine: int, key: str, value: int) -> None:
        name, _, group = key.partition(" ")
        labels = [self._model, str(engine), *([group] if name in _BY_GROUP else [])]
        metric = _metric(name).labels(*labels)
        if name in _GAUGES:
            metric.set(value)
            return
        before = self._last.get((engine, key), 0)
        self._last[engine, key] = value
        metric.inc(value - before if value >= before else value)  # the engine was restarted

    def log_engine_initialized(self) -> None:
        """Do nothing: the scheduler logs a line at startup."""


def _metric(name: str) -> Counter | Gauge:
    if name not in _metrics:
        make, text = (Gauge, _GAUGES[name]) if name in _GAUGES else (Counter, _COUNTERS[name])
        labels = [*_LABELS, "group"] if name in _BY_GROUP else _LABELS
        _metrics[name] = make(_PREFIX + name, text, labels)
    return _metrics[name]
