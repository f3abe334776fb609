"""What a manager counts, as Prometheus reads it.

Needs the package `prometheus_client` (`pip install kvcache[metrics]`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        "kvcache.metrics needs the package prometheus_client: pip install 'kvcache[metrics]'",
        name="prometheus_client",
    ) from None

from kvcache.allocator import KVCacheManager
from kvcache.allocator.stats import DurationStats
from kvcache.checks import check_name, instance, num_entries, shown
from kvcache.checks import text as checked_text

# Field of the statistics -> (name without prefix and suffix, help).
_HITS = {
    "num_requests": ("queried_requests", "requests that may read the cache, admitted"),
    "query_tokens": ("query_tokens", "known tokens of those requests"),
    "hit_tokens": ("hit_tokens", "query tokens that the cache had"),
    "host_hit_tokens": ("host_hit_tokens", "hit tokens from the first block on the host on"),
}
_GROUPS = {
    "query_blocks": ("query_blocks", "whole blocks of query tokens"),
    "hit_blocks": ("hit_blocks", "query blocks within the hit"),
    "stored_blocks": ("stored_blocks", "blocks that became cached on the device"),
    "evicted_blocks": ("evicted_blocks", "cached blocks of the device taken for other content"),
}
_PINS = {"num_pins_broken": ("broken_pins", "pinned blocks that were evicted all the same")}
_HOST = {
    "written_blocks": ("host_written_blocks", "cached blocks written to the host"),
    "unwritten_blocks": ("host_unwritten_blocks", "cached blocks that found no page on the host"),
    "declined_blocks": ("host_declined_blocks", "cached blocks of which few hits were expected"),
    "loaded_blocks": ("host_loaded_blocks", "blocks of hits loaded from the host"),
    "evicted_blocks": ("host_evicted_blocks", "cached pages of the host taken for other content"),
    "swapped_out_blocks": ("swapped_out_blocks", "blocks of requests swapped out to the host"),
    "swapped_in_blocks": ("swapped_in_blocks", "blocks of requests swapped in from the host"),
}
_STORE = {
    "lookups": ("store_lookups", "requests for which the store was asked"),
    "hit_tokens": ("store_hit_tokens", "tokens of loads from the store that were begun"),
    "loaded_tokens": ("store_loaded_tokens", "tokens that were loaded from the store"),
    "loaded_blocks": ("store_loaded_blocks", "blocks that were loaded from the store"),
    "loaded_bytes": ("store_loaded_bytes", "bytes that were loaded from the store"),
    "missing_blocks": ("store_missing_blocks", "blocks that the store no longer had"),
    "corrupt_blocks": ("store_corrupt_blocks", "blocks from the store with a wrong digest"),
    "misfit_blocks": ("store_misfit_blocks", "blocks from the store of another size or key"),
    "stored_blocks": ("store_stored_blocks", "blocks that were put into the store"),
    "stored_bytes": ("store_stored_bytes", "bytes that were put into the store"),
    "known_blocks": ("store_known_blocks", "blocks that were not put, as the store had them"),
    "refused_blocks": ("store_refused_blocks", "blocks for which the store had no room"),
    "dropped_blocks": ("store_dropped_blocks", "blocks that left the cache before they were put"),
    "evicted_blocks": ("store_evicted_blocks", "blocks that the store has evicted, if it says so"),
    "errors": ("store_errors", "calls of the store that failed"),
    "timeouts": ("store_timeouts", "waits for the store that were given up"),
    "unasked": ("store_unasked_lookups", "lookups while the store was taken for dead"),
}
_DURATIONS = {
    "lifetime": ("evicted_block_lifetime", "from caching to eviction"),
    "idle": ("evicted_block_idle", "from the last release to eviction"),
}
_POOLS = {
    "num_total": ("blocks", "blocks of the tier, without the null block"),
    "num_free": ("free_blocks", "blocks that nothing holds, cached or not"),
    "num_cached": ("cached_blocks", "blocks that are found under a hash, held or free"),
    "num_pinned": ("pinned_blocks", "cached blocks that a session has pinned"),
}
_LOADS = {"num_loading_blocks": ("loading_blocks", "blocks that are being loaded from the host")}
_PREFIX = "kvcache_"

Values = Mapping[Any, object]  # values of labels -> what has the fields of a table above


def checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Names and values of labels. TypeError or ValueError."""
    if labels is None:
        return {}
    instance(labels, Mapping, "labels")
    num_entries(labels, "labels")
    for name, value in labels.items():
        check_name(name, "a name in labels")
        checked_text(value, f"labels[{shown(name)}]")
    return dict(labels)


class CacheMetrics(Collector):
    """A collector of `prometheus_client` over one manager.

    `observe` reads the manager, in the manager's thread, as often as figures are wanted; `collect` gives
    what was read last, in any thread. `labels`: names and values that every figure carries.

    Counters never fall: what another manager, or the same one after `clear_stats`, counts is added to
    what was counted before. Observe just before and after `clear_stats`; else what was counted in
    between may be missing.

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
        self._before: dict[tuple[str, ...], float] = {}  # of counters that began anew
        self._last: dict[tuple[str, ...], float] = {}
        self._manager: weakref.ref[KVCacheManager] | None = None
        self._families: list[Metric] = []

    def observe(self, manager: KVCacheManager, store: object = None) -> None:
        """Reads the counts. TypeError for what has none, RuntimeError in another thread than the
        manager's.

        `store`: the `stats` of the manager's `StoreTier`, where it has one.
        """
        instance(manager, KVCacheManager, "manager")
        if store is not None and not all(isinstance(getattr(store, n, None), int) for n in _STORE):
            raise TypeError(f"store is {shown(store)}: expected the stats of a StoreTier")
        stats = manager.stats
        if self._manager is None or self._manager() is not manager:
            self._manager = weakref.ref(manager)
            for key in self._last:
                self._begin_anew(key)
        groups = {
            (str(number), group.kind): counts
            for number, (group, counts) in enumerate(zip(manager.groups, stats.groups))
        }
        families = self._counters(_HITS, [], {(): stats})
        families += self._counters(_GROUPS, ["group", "kind"], groups)
        families += self._counters(_PINS, [], {(): stats})
        if stats.host is not None:
            families += self._counters(_HOST, [], {(): stats.host})
        if store is not None:
            families += self._counters(_STORE, [], {(): store})
        pools = {("device",): manager.pool}
        if manager.host_pool is not None:
            pools["host",] = manager.host_pool
        families += self._gauges(_POOLS, ["tier"], pools)
        families += self._gauges(_LOADS, [], {(): manager})
        for field, (name, text) in _DURATIONS.items():
            durations = getattr(stats, field)
            if durations is not None:
                families.append(self._histogram(name, text, durations))
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The figures, as of the last `observe`; none before the first."""
        return self._families

    def _counters(
        self, table: Mapping[str, tuple[str, str]], labels: list[str], values: Values
    ) -> list[Metric]:
        families: list[Metric] = []
        for field, (name, text) in table.items():
            family = CounterMetricFamily(_PREFIX + name, text, labels=self._label_names + labels)
            for of_labels, counts in values.items():
                count = self._risen((name, *of_labels), getattr(counts, field))
                family.add_metric([*self._label_values, *of_labels], count)
            families.append(family)
        return families

    def _gauges(
        self, table: Mapping[str, tuple[str, str]], labels: list[str], values: Values
    ) -> list[Metric]:
        families: list[Metric] = []
        for field, (name, text) in table.items():
            family = GaugeMetricFamily(_PREFIX + name, text, labels=self._label_names + labels)
            for of_labels, counts in values.items():
                family.add_metric([*self._label_values, *of_labels], getattr(counts, field))
            families.append(family)
        return families

    def _histogram(self, name: str, text: str, durations: DurationStats) -> Metric:
        family = HistogramMetricFamily(f"{_PREFIX}{name}_seconds", text, labels=self._label_names)
        buckets, cumulative = [], 0.0
        for i, count in enumerate(durations.buckets):
            cumulative += self._risen((name, str(i)), count)
            buckets.append((str(2**i / 1000), cumulative))
        buckets.append(("+Inf", self._risen((name, "count"), durations.count)))
        total = self._risen((name, "total"), durations.total_s)
        family.add_metric(self._label_values, buckets, total)
        return family

    def _risen(self, key: tuple[str, ...], count: float) -> float:
        """The count with all that was counted before it began anew."""
        if count < self._last.get(key, 0):
            self._begin_anew(key)
        self._last[key] = count
        return self._before.get(key, 0) + count

    def _begin_anew(self, key: tuple[str, ...]) -> None:
        self._before[key] = self._before.get(key, 0) + self._last[key]
        self._last[key] = 0
