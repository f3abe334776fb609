# SPDX-License-Identifier: Apache-2.0
"""Exports a manager's statistics to Prometheus.

Requires the package `prometheus_client` (`pip install 'torch-kvcache[metrics]'`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        "kvcache.metrics needs the package prometheus_client: pip install 'torch-kvcache[metrics]'",
        name="prometheus_client",
    ) from None

from kvcache.allocator import KVCacheManager
from kvcache.checks import check_name, instance, num_entries, shown
from kvcache.checks import text as checked_text

# Maps each field of the statistics to (name without prefix and suffix, help text).
_HITS = {
    "num_requests": ("queried_requests", "admitted requests that may use the prefix cache"),
    "query_tokens": ("query_tokens", "tokens looked up in the prefix cache"),
    "hit_tokens": ("hit_tokens", "tokens found in the prefix cache"),
    "host_hit_tokens": (
        "host_hit_tokens",
        "hit tokens from the first block found on the host onward",
    ),
}
_GROUPS = {
    "query_blocks": ("query_blocks", "full blocks looked up in the prefix cache"),
    "hit_blocks": ("hit_blocks", "blocks used as prefix hits"),
    "stored_blocks": ("stored_blocks", "blocks newly cached on the device"),
    "evicted_blocks": ("evicted_blocks", "cached blocks evicted from the device"),
}
_MISSES = {"tokens": ("missed_tokens", "query tokens that were not found in the cache, by reason")}
_PINS = {"num_pins_broken": ("broken_pins", "pinned blocks that were evicted")}
_HOST = {
    "written_blocks": ("host_written_blocks", "cached blocks written to the host"),
    "unwritten_blocks": (
        "host_unwritten_blocks",
        "cached blocks not written because the host was full",
    ),
    "declined_blocks": (
        "host_declined_blocks",
        "cached blocks not written because few hits were expected",
    ),
    "loaded_blocks": ("host_loaded_blocks", "hit blocks loaded from the host"),
    "evicted_blocks": ("host_evicted_blocks", "cached blocks evicted from the host"),
    "swapped_out_blocks": ("swapped_out_blocks", "blocks of requests swapped out to the host"),
    "swapped_in_blocks": ("swapped_in_blocks", "blocks of requests swapped in from the host"),
}
_STORE = {
    "lookups": ("store_lookups", "requests looked up in the store"),
    "hit_tokens": ("store_hit_tokens", "tokens of started loads from the store"),
    "loaded_tokens": ("store_loaded_tokens", "tokens loaded from the store"),
    "loads": ("store_loads", "started loads from the store"),
    "failed_loads": ("store_failed_loads", "loads from the store that did not deliver all tokens"),
    "failed_tokens": ("store_failed_tokens", "tokens of failed loads from the store"),
    "quarantined_loads": ("store_quarantined_loads", "failed loads whose blocks were quarantined"),
    "refused_requests": ("store_refused_requests", "requests refused by the store"),
    "loaded_blocks": ("store_loaded_blocks", "blocks loaded from the store"),
    "loaded_bytes": ("store_loaded_bytes", "bytes loaded from the store"),
    "missing_blocks": ("store_missing_blocks", "blocks missing from the store at load time"),
    "corrupt_blocks": ("store_corrupt_blocks", "blocks loaded with a wrong digest"),
    "misfit_blocks": ("store_misfit_blocks", "blocks loaded with a wrong size or key"),
    "stored_blocks": ("store_stored_blocks", "blocks written to the store"),
    "stored_bytes": ("store_stored_bytes", "bytes written to the store"),
    "known_blocks": ("store_known_blocks", "blocks not written because the store had them"),
    "refused_blocks": ("store_refused_blocks", "blocks rejected because the store was full"),
    "dropped_blocks": ("store_dropped_blocks", "blocks dropped before they were written"),
    "evicted_blocks": ("store_evicted_blocks", "blocks evicted by the store, if it reports them"),
    "errors": ("store_errors", "failed calls to the store"),
    "timeouts": ("store_timeouts", "timeouts while waiting for the store"),
    "unasked": ("store_unasked_lookups", "lookups skipped because the store was considered down"),
}
_POOLS = {
    "num_total": ("blocks", "blocks of the tier, excluding the null block"),
    "num_free": ("free_blocks", "free blocks, cached or not"),
    "num_cached": ("cached_blocks", "cached blocks, held or free"),
    "num_pinned": ("pinned_blocks", "cached blocks pinned by sessions"),
}
_LOADS = {"num_loading": ("loading_blocks", "blocks being loaded from the host")}
_LEARNED = {"falls_back": ("eviction_falls_back", "1 while learned eviction follows LRU, else 0")}
_PREFIX = "kvcache_"

Values = Mapping[Any, object]  # label values -> an object with the fields of one table above


def checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Check the names and values of labels. Raises TypeError or ValueError."""
    if labels is None:
        return {}
    instance(labels, Mapping, "labels")
    num_entries(labels, "labels")
    for name, value in labels.items():
        check_name(name, "a name in labels")
        checked_text(value, f"labels[{shown(name)}]")
    return dict(labels)


class CacheMetrics(Collector):
    """A `prometheus_client` collector for one manager.

    Call `observe` in the manager's thread whenever new values are needed. `collect` returns the
    values of the last `observe`, from any thread.

    Counters never decrease. The counts of another manager, or of the same manager after `clear_stats`,
    are added to the previous counts. Call `observe` immediately before and after `clear_stats`;
    otherwise counts may be lost.

    Args:
        labels: Names and values of labels that are attached to every metric.

    Example:
        >>> from kvcache import Request
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, num_preallocate_tokens=0)
        >>> metrics = CacheMetrics()
        >>> plan = manager.step(new=[Request("r1", range(40))])
        >>> metrics.observe(manager)
        >>> {family.name: family.samples[0].value for family in metrics.collect()}["kvcache_free_blocks"]
        5
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        labels = checked_labels(labels)
        self._label_names, self._label_values = [*labels], tuple(labels.values())
        self._before: dict[tuple[str, ...], float] = {}  # sums of the counts that were reset
        self._last: dict[tuple[str, ...], float] = {}
        self._manager: weakref.ref[KVCacheManager] | None = None
        self._families: list[Metric] = []

    def observe(self, manager: KVCacheManager, store: object = None) -> None:
        """Read the manager's counts.

        Args:
            manager: The manager.
            store: The `stats` of the manager's `StoreTier`, if it has one.

        Raises:
            TypeError: `manager` or `store` does not have the expected attributes.
            RuntimeError: The method was not called from the manager's thread.
        """
        instance(manager, KVCacheManager, "manager")
        if store is not None and not all(isinstance(getattr(store, n, None), int) for n in _STORE):
            raise TypeError(f"store is {shown(store)}: expected the stats of a StoreTier")
        stats = manager.cache.stats
        if self._manager is None or self._manager() is not manager:
            self._manager = weakref.ref(manager)
            for key in self._last:
                self._begin_anew(key)
        groups = {
            (str(number), group.kind): counts
            for number, (group, counts) in enumerate(zip(manager.groups, stats.groups))
        }
        counters = partial(self._made, CounterMetricFamily)
        gauges = partial(self._made, GaugeMetricFamily)
        families = [*counters(_HITS, [], {(): stats})]
        families += counters(_GROUPS, ["group", "kind"], groups)
        if stats.missed_tokens is not None:
            missed = {
                (reason,): SimpleNamespace(tokens=count)
                for reason, count in stats.missed_tokens.items()
            }
            families += counters(_MISSES, ["reason"], missed)
        families += counters(_PINS, [], {(): stats})
        if stats.host is not None:
            families += counters(_HOST, [], {(): stats.host})
        if store is not None:
            families += counters(_STORE, [], {(): store})
        pools = {("device",): manager.pool}
        if manager.host_pool is not None:
            pools["host",] = manager.host_pool
        families += gauges(_POOLS, ["tier"], pools)
        families += gauges(_LOADS, [], {(): manager.pool})
        if stats.falls_back is not None:
            families += gauges(_LEARNED, [], {(): stats})
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last `observe`, or no metrics if it was never called."""
        return self._families

    def _made(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        table: Mapping[str, tuple[str, str]],
        labels: list[str],
        values: Values,
    ) -> Iterator[Metric]:
        for field, (name, text) in table.items():
            family = kind(_PREFIX + name, text, labels=self._label_names + labels)
            for of_labels, counts in values.items():
                value = getattr(counts, field)
                if kind is CounterMetricFamily:
                    value = self._risen((name, *of_labels), value)
                family.add_metric([*self._label_values, *of_labels], value)
            yield family

    def _risen(self, key: tuple[str, ...], count: float) -> float:
        """Return the count plus the total of all counts before resets."""
        if count < self._last.get(key, 0):
            self._begin_anew(key)
        self._last[key] = count
        return self._before.get(key, 0) + count

    def _begin_anew(self, key: tuple[str, ...]) -> None:
        self._before[key] = self._before.get(key, 0) + self._last[key]
        self._last[key] = 0
