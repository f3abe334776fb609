# SPDX-License-Identifier: Apache-2.0
"""The metrics that Prometheus scrapes from a manager.

The metrics equal the manager's counters and never decrease.
"""

import random
import subprocess
import sys
import threading

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcache import KVCacheManager, Request, StepReport
from kvcache.metrics import CacheMetrics
from tests.machinery.cache_user import CacheUser


def scrape(metrics):
    """Parse the metrics like Prometheus. Return a dict that maps (name, label values) to values."""
    registry = CollectorRegistry()
    registry.register(metrics)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def served(**options):
    manager = KVCacheManager(4, 30, 200, num_preallocate_tokens=0, **options)
    for name, last in (("a", 5), ("b", 6)):
        request = Request(name, [*range(13), last])
        plan = manager.step(new=[request])
        manager.report(StepReport(plan.step_id, completed=True))
        manager.free(request)
    return manager


def test_missed_tokens_are_counted_by_reason():
    manager, metrics = served(explain_misses=1), CacheMetrics()
    metrics.observe(manager)
    found = scrape(metrics)
    missed = {name[1]: n for name, n in found.items() if name[0] == "kvcache_missed_tokens_total"}
    assert missed == manager.cache.stats.missed_tokens
    assert {reason: n for reason, n in missed.items() if n} == {"new": 12, "tail": 4}
    manager.cache.clear_stats()
    metrics.observe(manager)
    # The counter never decreases.
    assert scrape(metrics)["kvcache_missed_tokens_total", "new"] == 12


def test_metrics_equal_the_managers_counters():
    manager, metrics = served(), CacheMetrics()
    assert scrape(metrics) == {}  # no manager has been observed yet
    metrics.observe(manager)
    found = scrape(metrics)
    expected = {
        ("kvcache_queried_requests_total",): 2,
        ("kvcache_query_tokens_total",): 28,
        ("kvcache_hit_tokens_total",): 12,
        ("kvcache_host_hit_tokens_total",): 0,
        ("kvcache_query_blocks_total", "0", "full_attention"): 6,
        ("kvcache_hit_blocks_total", "0", "full_attention"): 3,
        ("kvcache_stored_blocks_total", "0", "full_attention"): 3,
        ("kvcache_evicted_blocks_total", "0", "full_attention"): 0,
        ("kvcache_broken_pins_total",): 0,
        ("kvcache_blocks", "device"): 29,
        ("kvcache_free_blocks", "device"): 29,
        ("kvcache_cached_blocks", "device"): 3,
        ("kvcache_pinned_blocks", "device"): 0,
        ("kvcache_loading_blocks",): 0,
    }
    assert found == expected


def test_metrics_follow_a_running_manager_on_both_tiers():
    rng = random.Random(3)
    user, metrics = CacheUser(rng), CacheMetrics({"engine": "e0"})
    for _ in range(300):
        user.work()
    metrics.observe(user.manager)
    found, stats = scrape(metrics), user.manager.cache.stats
    for group, counts in enumerate(stats.groups):
        kind = user.manager.groups[group].kind
        for name in ("query", "hit", "stored", "evicted"):
            value = found[f"kvcache_{name}_blocks_total", "e0", str(group), kind]
            assert value == getattr(counts, f"{name}_blocks")
    for name in ("written", "unwritten", "declined", "loaded", "evicted"):
        assert found[f"kvcache_host_{name}_blocks_total", "e0"] == getattr(
            stats.host, f"{name}_blocks"
        )
    for name in ("swapped_out", "swapped_in"):
        assert found[f"kvcache_{name}_blocks_total", "e0"] == getattr(stats.host, f"{name}_blocks")
    assert found["kvcache_host_written_blocks_total", "e0"] > 0
    assert found["kvcache_host_loaded_blocks_total", "e0"] > 0
    for tier, pool in (("device", user.manager.pool), ("host", user.manager.host_pool)):
        assert found["kvcache_blocks", "e0", tier] == pool.num_total
        assert found["kvcache_cached_blocks", "e0", tier] == pool.num_cached
        assert found["kvcache_free_blocks", "e0", tier] == pool.num_free


def test_counters_never_decrease_during_random_calls():
    rng, metrics, before = random.Random(11), CacheMetrics(), {}
    user = CacheUser(rng)
    for _ in range(400):
        user.work()
        if rng.random() < 0.05:
            user.manager.cache.clear_stats()
        if rng.random() < 0.02:
            user = CacheUser(rng)
        if rng.random() < 0.5:
            metrics.observe(user.manager)
            found = scrape(metrics)
            for key, value in found.items():
                if key[0].endswith("_total"):
                    assert value >= before.get(key, 0), key
            before = found
    assert before["kvcache_query_tokens_total",] > 1000


def test_metrics_are_observed_in_the_managers_thread_and_read_in_any():
    manager, metrics, told = served(), CacheMetrics(), []
    metrics.observe(manager)

    def elsewhere():
        told.append(scrape(metrics)["kvcache_query_tokens_total",])
        try:
            metrics.observe(manager)
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert told[0] == 28 and "thread" in told[1]
    assert scrape(metrics)["kvcache_query_tokens_total",] == 28


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
try:
    import MODULE
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize(("module", "blocked", "needed", "extra"), [
    ("kvcache.metrics", "prometheus_client", "package prometheus_client", "metrics"),
    ("kvcache_exchange.router_events", "zmq", "packages msgspec and pyzmq", "events"),
    ("kvcache_exchange.router_events", "msgspec", "packages msgspec and pyzmq", "events"),
])  # fmt: skip
def test_error_names_the_missing_package_and_its_extra(module, blocked, needed, extra):
    code = WITHOUT.replace("MODULE", module).replace("BLOCKED", repr(blocked))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{module} needs the {needed}: pip install 'torch-kvcache[{extra}]'\n", (
        done
    )


def test_metrics_include_a_store_only_if_there_is_one():
    from dataclasses import fields

    from kvcache_exchange.store import StoreStats

    manager, metrics, stats = served(), CacheMetrics(), StoreStats()
    for i, field in enumerate(fields(stats)):
        setattr(stats, field.name, i + 1)
    metrics.observe(manager)
    assert not [name for name, *_ in scrape(metrics) if "store_" in name]
    metrics.observe(manager, stats)
    found = {name: value for (name, *_), value in scrape(metrics).items() if "_store_" in name}
    assert sorted(found.values()) == [i + 1 for i in range(len(fields(stats)))]
    assert found["kvcache_store_loaded_tokens_total"] == stats.loaded_tokens
