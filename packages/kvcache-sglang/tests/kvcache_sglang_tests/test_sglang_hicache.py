# SPDX-License-Identifier: Apache-2.0
"""HiCache pages in kvcache's stores: bytes are verified, and every fault counts as a miss."""

import contextlib
import json
import random
import signal
import time
import types

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvcache_sglang import hicache
from kvcache_sglang.hicache import HiCacheStore
from tests.machinery.sglang_engine import write_model
from tests.machinery.sglang_process import SGLangEngine
from tests.machinery.stores import FAULTS, MemoryStore

LAYERS, PAGE, HEADS, SIZE, PAGES = 3, 4, 2, 8, 40
LAYOUTS = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, SIZE),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, SIZE),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, SIZE),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, SIZE),
}
MODEL = types.SimpleNamespace(model_path="tiny", revision=None)


def host_pool(layout="layer_first", seed=0):
    """Return a stand-in for SGLang's host pool, without its allocator."""
    generator = torch.Generator().manual_seed(seed)
    pool = types.SimpleNamespace(
        **{"layout": layout, "page_size": PAGE, "layer_num": LAYERS, "head_num": HEADS},
        **{"head_dim": SIZE, "dtype": torch.bfloat16, "size": PAGES * PAGE},
        kv_buffer=torch.randn(LAYOUTS[layout], generator=generator).bfloat16(),
    )
    for name in ("get_data_page", "set_from_flat_data_page"):
        setattr(pool, name, getattr(MHATokenToKVPoolHost, name).__get__(pool))
    return pool


def config(**extra):
    own = {"backend_name": "kvcache", "interface_v1": 1, "store": "memory://", "capacity": "1MiB"}
    return HiCacheStorageConfig(
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0},
        **{"attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False},
        **{"is_page_first_layout": False, "model_name": "tiny", "extra_config": own | extra},
    )


@pytest.fixture
def stores(monkeypatch):
    """The stores opened by a test, keyed by place."""
    found = {}

    def open_store(place, capacity):
        return found.setdefault(place, MemoryStore())

    monkeypatch.setattr(hicache, "open_store", open_store)
    monkeypatch.setattr(hicache, "get_model", lambda: MODEL)
    return found


def storage(pool, **extra):
    made = HiCacheStore(config(**extra))
    made.register_mem_pool_host(pool)
    return made


def keys_of(first, count):
    return [f"{number:064x}" for number in range(first, first + count)]


def slots_of(pages):
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])


def pages_of(pool, pages):
    return [pool.get_data_page(page * PAGE).clone() for page in pages]


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_pages_are_read_back_byte_for_byte(layout, stores):
    pool = host_pool(layout)
    made, keys = storage(pool), keys_of(0, 20)
    wanted = pages_of(pool, range(20))
    assert made.batch_exists(keys) == 0 and not made.exists(keys[0])
    assert made.batch_set_v1(keys, slots_of(range(20))) == [True] * 20
    assert made.batch_exists([*keys, "f" * 64]) == 20 and made.exists(keys[3])
    assert made.batch_get_v1(keys, slots_of(range(20, 40))) == [True] * 20
    assert same(pages_of(pool, range(20, 40)), wanted)
    other = host_pool(layout, seed=1)  # a second engine
    assert storage(other).batch_get_v1(keys, slots_of(range(20))) == [True] * 20
    assert same(pages_of(other, range(20)), wanted)
    made.clear()
    assert made.batch_exists(keys) == 0


def test_other_models_layouts_and_ranks_do_not_share_values(stores, monkeypatch):
    pool, keys = host_pool(), keys_of(0, 4)
    storage(pool).batch_set_v1(keys, slots_of(range(4)))
    assert storage(host_pool("page_first")).batch_exists(keys) == 0
    changed = config()
    changed.tp_rank, changed.tp_size = 1, 2
    other = HiCacheStore(changed)
    other.register_mem_pool_host(pool)
    assert other.batch_exists(keys) == 0
    monkeypatch.setattr(MODEL, "model_path", "another")
    assert storage(pool).batch_exists(keys) == 0
    monkeypatch.undo()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_store_is_a_miss_and_changes_no_page(fault, stores, monkeypatch):
    pool, keys = host_pool(), keys_of(0, 8)
    made = storage(pool)
    (store,) = stores.values()
    if fault == "full":
        store.fault = lambda: fault
        assert made.batch_set_v1(keys, slots_of(range(8))) == [False] * 8
        assert made.stats["full"] == 8
        return
    made.batch_set_v1(keys, slots_of(range(8)))
    before = pages_of(pool, range(PAGES))
    store.fault = lambda: fault
    found = made.batch_get_v1(keys, slots_of(range(20, 28)))
    store.fault = lambda: None
    for number, is_read in enumerate(found):
        wanted = before[number] if is_read else before[20 + number]
        assert torch.equal(pool.get_data_page((20 + number) * PAGE), wanted)
    expected = {
        **{"missing": ("missing", 8), "corrupt": ("corrupt", 1), "short": ("misfit", 1)},
        **{"other": ("misfit", 2), "raises": ("failures", 1), "slow": ("read", 8)},
    }
    name, count = expected[fault]
    assert made.stats[name] == count
    assert found.count(False) == {"raises": 8, "slow": 0}.get(fault, count)
    # The bad values were removed, so that they can be written again.
    if fault in ("corrupt", "other"):
        assert not all(made.exists(key) for key in keys)


def test_failing_stores_are_not_called_for_a_while_and_then_opened_again(stores):
    pool, keys = host_pool(), keys_of(0, 2)
    made = storage(pool)
    (store,) = stores.values()
    made.batch_set_v1(keys, slots_of(range(2)))
    store.fault = lambda: "raises"
    for _ in range(10):
        assert made.batch_exists(keys) == 0
    assert made.stats["failures"] == 3  # after three failures, the store is no longer called
    store.fault = lambda: None
    assert made.batch_exists(keys) == 0
    time.sleep(1.1)
    opened = store.num_opened
    assert made.batch_exists(keys) == 2 and store.num_opened == opened + 1


@pytest.mark.parametrize("fails", [False, True])
def test_updates_of_the_weights_at_runtime_switch_the_storage_off(fails, stores, monkeypatch):
    from sglang.srt.managers.scheduler_components import weight_updater

    class Updater:
        def update(self, recv_req):
            if fails:
                raise RuntimeError(recv_req)
            return recv_req

        update_weights_from_disk = update_weights_from_distributed = update
        update_weights_from_tensor = update_weights_from_ipc = update

    monkeypatch.setattr(weight_updater, "SchedulerWeightUpdaterManager", Updater)
    pool, keys = host_pool(), keys_of(0, 2)
    made = storage(pool)
    assert made.batch_set_v1(keys, slots_of(range(2))) == [True] * 2
    assert made.batch_exists(keys) == 2
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        assert Updater().update_weights_from_tensor("weights") == "weights"
    assert made.batch_exists(keys) == 0
    assert made.batch_get_v1(keys, slots_of(range(2))) == [False] * 2
    assert made.batch_set_v1(keys, slots_of(range(2))) == [False] * 2
    # Pools registered later are disabled, too.
    made.register_mem_host_pool_v2(host_pool("page_first"), PoolName.SWA)
    window = PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=slots_of(range(2)))
    assert made.batch_set_v2([window]) == {PoolName.SWA: [False] * 2}


def test_pools_of_hybrid_models_are_stored_and_read_back(stores):
    pool, window = host_pool(), host_pool("page_first", seed=3)
    made = storage(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    made.register_mem_host_pool_v2(window, PoolName.SWA)
    keys = keys_of(0, 8)
    made.batch_set_v1(keys, slots_of(range(8)))
    trailing = PoolTransfer(
        **{"name": PoolName.SWA, "keys": keys[4:6], "host_indices": slots_of([4, 5])},
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    assert made.batch_set_v2([trailing]) == {PoolName.SWA: [True, True]}
    found = made.batch_exists_v2([*keys, "e" * 64], [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.SWA: 6}
    whole = PoolTransfer(name=PoolName.SWA, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert made.batch_exists_v2(keys, [whole]).kv_hit_pages == 0
    wanted = pages_of(window, [4, 5])
    window.kv_buffer.zero_()
    assert made.batch_get_v2([trailing]) == {PoolName.SWA: [True, True]}
    assert same(pages_of(window, [4, 5]), wanted)
    short = PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=slots_of([1]))
    assert made.batch_get_v2([short]) == {PoolName.SWA: [False] * 8}


@pytest.mark.parametrize("extra,message", [
    ({"interface_v1": 0}, "interface_v1 is missing"),
    ({"store": None}, "store is None"),
    ({"folder": "/x"}, "options folder: expected store, capacity"),
    ({"store": "nothing://x"}, r"place is 'nothing://x': expected a folder"),
    ({"store": "/tmp/x", "capacity": "many"}, "capacity is 'many'"),
])  # fmt: skip
def test_wrong_options_are_rejected_at_startup(extra, message, monkeypatch):
    monkeypatch.setattr(hicache, "get_model", lambda: MODEL)
    with pytest.raises((TypeError, ValueError), match=message):
        storage(host_pool(), **extra)


ENGINE = {
    **{"dtype": "bfloat16", "page_size": 16, "max_total_tokens": 768, "max_running_requests": 4},
    **{"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct"},
    **{"hicache_mem_layout": "layer_first", "hicache_write_policy": "write_through"},
    **{"hicache_storage_backend": "dynamic", "chunked_prefill_size": 128},
    "hicache_storage_prefetch_policy": "wait_complete",
}


def engine(folder, **options):
    extra = {
        **{"backend_name": "kvcache", "interface_v1": 1, "prefetch_threshold": 16},
        **{"module_path": hicache.__name__, "class_name": "HiCacheStore"},
        **{"store": str(folder), "capacity": "16MiB"},
    }
    options = {**ENGINE, "hicache_storage_backend_extra_config": json.dumps(extra), **options}
    environment = {"KVCACHE_TESTS_HICACHE": "1"}
    made = SGLangEngine(write_model("llama"), environment=environment, **options)
    made.answer()
    return made


@pytest.mark.exhaustive
def test_pages_on_a_disk_survive_a_kill_and_corrupt_ones_are_computed(tmp_path):
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randrange(60, 250))] for _ in range(10)]
    folder, made = tmp_path / "kv", []
    try:
        made.append(engine(folder))
        wanted = [made[0].run([prompt], 8)[0]["tokens"] for prompt in prompts]
        time.sleep(2)  # the backup runs in another thread
        made[0].signal(signal.SIGKILL)
        made[0].process.wait()
        (file,) = folder.glob("*/blocks.kv")
        made.append(engine(folder))
        found = [made[1].run([prompt], 8)[0] for prompt in prompts]
        assert [each["tokens"] for each in found] == wanted
        from_disk = sum(each["storage"] for each in found)
        assert from_disk > 0.5 * sum(map(len, prompts))
        made[1].signal(signal.SIGKILL)
        made[1].process.wait()
        data = bytearray(file.read_bytes())
        step = len(data) // 40
        for at in range(8192, len(data), step):  # corrupts some pages, headers and unused bytes
            data[at] ^= 0xFF
        file.write_bytes(data)
        made.append(engine(folder))
        found = [made[2].run([prompt], 8)[0] for prompt in prompts]
        assert [each["tokens"] for each in found] == wanted
        assert sum(each["storage"] for each in found) < from_disk
        assert made[2].said("values were corrupt")
    finally:
        for each in made:
            each.close()
