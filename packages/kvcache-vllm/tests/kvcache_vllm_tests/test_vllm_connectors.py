# SPDX-License-Identifier: Apache-2.0
"""Connectors of vLLM that hold blocks and read block hashes, with kvcache's manager."""

import collections
import types

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvcache_vllm.connectors import what_connector_lacks
from tests.machinery.vllm_connectors import CASES, CPU, REMOTE, STORE, run_case, transfer_config
from tests.machinery.vllm_models import behaviours, write_config
from tests.machinery.vllm_schedulers import NUM_SEEDS, PAIRS, engine_config, make_scheduler


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny model's configuration."""
    return write_config(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def manager(model):
    """Return kvcache's manager of a scheduler without a connector."""
    return make_scheduler(PAIRS[False][1], engine_config(model), ("full",), 40).kv_cache_manager


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decisions_and_transfers_are_the_same(case, model):
    counts = collections.Counter()
    for seed in range(NUM_SEEDS):
        counts += run_case(model, case, seed, 80)
    print(f"{case}: seeds 0 to {NUM_SEEDS - 1}, {dict(counts)}, 0 differences")
    num_transfers = counts["external tokens"] if case[0] == REMOTE else counts["stored blocks"]
    assert counts["requests"] > 20 and num_transfers > 100


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] != REMOTE and case[2] < 100], ids=str
)
def test_evicted_blocks_are_loaded_again(case, model):
    assert run_case(model, case, 1, 120)["loaded blocks"] > 0


def test_model_generates_the_same_tokens_with_loads(model):
    """The connector's worker side is vLLM's, except for streams, events and the copies themselves."""
    transfers = {"kv_connector": CPU, "kv_role": "kv_both"}
    transfers["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 26}
    found = behaviours(
        model,
        ["vllm", "ours"],
        is_short=True,
        num_gpu_blocks_override=40,
        kv_transfer_config=transfers,
    )
    assert [found[name].pop("manager") for name in found] == ["KVCacheManager", "VllmCacheManager"]
    assert found["ours"] == found["vllm"]
    assert found["ours"]["loads"]["external hits"] > 0
    assert found["ours"]["tight"]["preemptions"] > 0 and found["ours"]["is_reset"]


class Asks(KVConnectorBase_V1):
    """A connector that allocates blocks itself."""

    def bind_gpu_block_pool(self, gpu_block_pool):
        self.pool = gpu_block_pool

    def save(self):
        pool = self.pool
        for block in pool.get_new_blocks(1):
            pool.touch([block])


class Passes(KVConnectorBase_V1):
    """A connector that passes the manager to a function."""

    def bind_kv_cache_manager(self, kv_cache_manager):
        self.found = dir(kv_cache_manager)


class Lists(KVConnectorBase_V1):
    """A connector that keeps the pool in a list."""

    def bind_gpu_block_pool(self, gpu_block_pool):
        self.pools = [gpu_block_pool]


class Aliases(KVConnectorBase_V1):
    """A connector whose method has another name in the source."""

    bind_gpu_block_pool = Asks.save


class Unreadable(KVConnectorBase_V1):
    """A connector without source code."""

    __module__ = "unreadable"


class TestRefusals:
    @pytest.mark.parametrize("connector,options,message", [
        (KVConnectorFactory.get_connector_class_by_name(CPU), {}, ""),
        (KVConnectorFactory.get_connector_class_by_name(CPU), {"lazy_offload": True},
         "uses block_pool.free_block_queue of"),
        (KVConnectorFactory.get_connector_class_by_name("HiSparseConnector"), {},
         "uses the manager in get_hisparse_coordinator() of"),
    ])  # fmt: skip
    def test_vllms_connectors(self, connector, options, message, manager):
        lacks = what_connector_lacks(connector, options, manager)
        assert lacks.startswith(message) and bool(lacks) == bool(message)

    def test_what_is_missing_is_named(self, manager, monkeypatch):
        lacks = what_connector_lacks(Asks, {}, manager)
        assert "block_pool.get_new_blocks" in lacks and "the manager in dir()" in lacks
        assert "touch" not in lacks and "block_pool in a form that this check" in lacks
        assert "bind_gpu_block_pool in a form" in what_connector_lacks(Aliases, {}, manager)
        monkeypatch.setitem(__import__("sys").modules, "unreadable", types.ModuleType("unreadable"))
        assert "has no source code" in what_connector_lacks(Unreadable, {}, manager)

    def test_scheduler_does_not_start(self, model):
        config = engine_config(model, kv_transfer_config=transfer_config(CPU, 60))
        config.kv_transfer_config.kv_connector_extra_config["lazy_offload"] = True
        make_scheduler(PAIRS[False][0], config, ("full",), 40)
        with pytest.raises(ValueError, match=f"kv_connector is {CPU}, which uses block_pool.free_"):
            make_scheduler(PAIRS[False][1], config, ("full",), 40)

    @pytest.mark.parametrize("name", [CPU, STORE, "OffloadingConnector"])
    def test_states_are_not_stored(self, name, model):
        """Connectors that only load states are not affected."""
        groups = ("mamba align", "full")
        scheduler = make_scheduler(PAIRS[False][1], engine_config(model), groups, 40)
        lacks = [
            what_connector_lacks(
                KVConnectorFactory.get_connector_class_by_name(each), {}, scheduler.kv_cache_manager
            )
            for each in (name, "NixlConnector")
        ]
        assert "stores states at block boundaries" in lacks[0] and lacks[1] == ""

    @pytest.mark.parametrize("name", ["ref_count", "reset_hash"])
    def test_missing_attributes_raise_an_error_when_they_are_read(self, name, manager):
        pool = manager.block_pool
        for part, owner in (("block", pool.blocks[1]), ("block_pool", pool)):
            with pytest.raises(AttributeError, match=rf"{part}\.{name} of vLLM's KV cache manager"):
                getattr(owner, name)
        with pytest.raises(IndexError, match="block_id is 40: expected 0 to 39"):
            pool.blocks[40]


def test_blocks_of_the_pool_are_the_same_objects_in_each_call(manager):
    pool = manager.block_pool
    assert pool.blocks[0] is pool.null_block and pool.blocks[3] is pool.blocks[3]
    assert pool.blocks[3] in [pool.blocks[2], pool.blocks[3]]
    with pytest.raises(TypeError, match="unhashable"):
        {pool.blocks[3]}
