# SPDX-License-Identifier: Apache-2.0
"""`kvcache.compat.kv_transfer`: workers written for vLLM's helpers of KV connectors, beside numpy, and
wrong arguments of the names that no other test covers.
"""

from types import SimpleNamespace as Some

import numpy as np
import pytest
import torch

from kvcache import layouts
from kvcache.compat import kv_transfer
from kvcache.compat.kv_transfer import TpKVTopology, get_kv_connector_cache_layout
from tests.compat.callers import load

THERE = "vllm.distributed.kv_transfer.kv_connector.utils"
HERE = "kvcache.compat.kv_transfer"
HEADS, WIDTH, SIZE = 4, 4, 8


def kv_of(req_id, block, layer):
    """Return the KV of a block, [tokens, heads, width]."""
    rng = np.random.default_rng([ord(req_id), block, layer])
    return rng.random((SIZE, HEADS, WIDTH), np.float32)


def step_of(new, cached=(), resumed=()):
    return Some(
        scheduled_new_reqs=[Some(req_id=name, block_ids=(ids,)) for name, ids in new],
        scheduled_cached_reqs=Some(
            req_ids=[name for name, _ in cached],
            new_block_ids=[(ids,) for _, ids in cached],
            resumed_req_ids={*resumed},
        ),
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("remote_block_size", [8, 4, 2])
def test_caller_receives_and_offloads_blocks(layout, remote_block_size):
    caller = load("decode_worker", THERE, HERE)
    worker = caller.DecodeWorker(0, 1, SIZE, HEADS, layout)
    worker.meet("prefill", 1, remote_block_size)
    layers = [*worker.caches.values()]

    def read(rank, req_id, block, cache):
        assert rank == 0
        (layer,) = [i for i, each in enumerate(layers) if each is cache]
        kv = kv_of(req_id, block, layer).reshape(-1, remote_block_size, HEADS, WIDTH)
        return torch.from_numpy(np.ascontiguousarray(kv.transpose(0, 2, 1, 3)).ravel())

    step = step_of([("a", [1, 4])], [("b", [2]), ("c", [6])], resumed={"c"})
    assert worker.receive("prefill", step, read) == [("a", False), ("b", False), ("c", True)]
    for layer, cache in enumerate(layers):
        for name, block in (("a", 1), ("a", 4), ("b", 2), ("c", 6)):
            assert np.array_equal(cache[block].numpy(), kv_of(name, block, layer))
        assert not cache[[0, 3, 5, 7]].any()
    worker.to_host([4, 2], [1, 2])
    for cache in layers:
        cache.zero_()
    worker.from_host([1, 2], [5, 3])
    for layer, cache in enumerate(layers):
        assert np.array_equal(cache[5].numpy(), kv_of("a", 4, layer))
        assert np.array_equal(cache[3].numpy(), kv_of("b", 2, layer))


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("remote", [1, 2, 4, 8])
def test_caller_reads_each_head_once(tp_size, remote):
    caller = load("decode_worker", THERE, HERE)
    for rank in range(tp_size):
        topology = caller.DecodeWorker(rank, tp_size, SIZE, 8, "HND").topology
        topology.remote_tp_size["prefill"] = remote
        topology.remote_block_size["prefill"] = 4
        heads = range(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)
        expected = sorted({head * remote // 8 for head in heads})
        found = topology.get_target_remote_ranks_from_engine_id("prefill")
        assert found == [(each, 0, each) for each in expected]
        assert topology.get_target_remote_ranks(remote) == found
        ratio = tp_size // remote if tp_size >= remote else -(remote // tp_size)
        assert topology.tp_ratio_from_engine_id("prefill") == topology.tp_ratio(remote) == ratio
        assert (
            topology.block_size_ratio(4) == 2 == topology.block_size_ratio_from_engine_id("prefill")
        )
        assert not topology.is_kv_replicated("prefill")
    topology.remote_tp_size["wide"] = 16
    topology.remote_block_size["wide"] = 4
    assert topology.is_kv_replicated("wide") and topology.replicates_kv_cache("wide")


def test_layout_is_the_one_that_the_connector_requires(caplog):
    class Connector:
        @classmethod
        def get_required_kvcache_layout(cls, vllm_config):
            return vllm_config

    assert get_kv_connector_cache_layout(Connector, "HND") == "HND"
    assert get_kv_connector_cache_layout(Connector(), "NHD") == "NHD"
    layouts._log_default.cache_clear()
    with caplog.at_level("INFO", "kvcache"):
        assert [get_kv_connector_cache_layout(Connector) for _ in range(3)] == ["NHD"] * 3
        assert get_kv_connector_cache_layout() == "NHD"
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match=r"connector 'Connector' requires.* is 'LBHNC'"):
        get_kv_connector_cache_layout(Connector(), "LBHNC")
    with pytest.raises(TypeError, match="connector is 3: expected an object with get_required"):
        get_kv_connector_cache_layout(3)


SIZES = {"a": 2, "b": 4}
BLOCKS = {"a": 16, "b": 32}


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((2, SIZES, False, 8, "FLASH_ATTN", "a", BLOCKS), ValueError, "tp_rank is 2"),
    ((0, SIZES, False, 8, "FLASH_ATTN", "c", BLOCKS), ValueError, "remote_tp_size .* 'c'"),
    ((0, SIZES, False, 8, "FLASH_ATTN", "a", {}), ValueError, "remote_block_size .* 'a'"),
    ((0, [2], False, 8, "FLASH_ATTN", "a", BLOCKS), TypeError, "remote_tp_size is"),
    ((0, SIZES, 1, 8, "FLASH_ATTN", "a", BLOCKS), TypeError, "is_mla is 1"),
    ((0, SIZES, True, 8, "FLASH_ATTN", "a", BLOCKS), ValueError, "is_mla is True"),
    ((0, SIZES, False, 7, "FLASH_ATTN", "a", BLOCKS), ValueError, "7"),
    ((0, SIZES, False, 8, "NONE", "a", BLOCKS), ValueError, "NONE"),
    ((0, SIZES, False, 8, [], "a", BLOCKS), ValueError, "attn_backend is empty"),
    ((0, SIZES, False, 8, "FLASH_ATTN", "a", BLOCKS, (2, 3)), ValueError, "tensor_shape is"),
])  # fmt: skip
def test_bad_arguments_of_the_topology_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        TpKVTopology(*arguments)


def test_topology_of_the_older_name_knows_engines_of_its_mappings_only():
    backends = [Some(name="unused")]
    backends[0] = "FLASHINFER"
    sizes, blocks = dict(SIZES), dict(BLOCKS)
    topology = TpKVTopology(1, sizes, False, 8, backends, "a", blocks, (9, 2, 16, 4, 4))
    assert topology.is_kv_layout_blocks_first and not topology.split_k_and_v
    assert (topology.tp_size, topology.block_size) == (2, 16)
    with pytest.raises(ValueError, match="engine_id is 'c': expected one of remote_tp_size"):
        topology.tp_ratio_from_engine_id("c")
    sizes["c"] = 1
    with pytest.raises(ValueError, match="engine_id is 'c': expected one of remote_block_size"):
        topology.tp_ratio_from_engine_id("c")
    blocks["c"] = 16
    assert topology.tp_ratio_from_engine_id("c") == 2
    sizes["d"] = blocks["d"] = 3
    with pytest.raises(ValueError, match="local engine 'a', remote engine 'd'"):
        topology.get_target_remote_ranks_from_engine_id("d")
    with pytest.raises(TypeError, match="add the engine to remote_tp_size"):
        topology.with_remote("d", kv_transfer.RemoteEngine())


def test_wrong_id_lists_copy_nothing():
    src, dst = {"a": torch.ones(4, 2)}, {"a": torch.zeros(4, 2)}
    for given, message in (
        (([0, 1], [0], "h2d"), "src_block_ids has 2 entries, but dst_block_ids has 1"),
        (([0], [4], "h2d"), "dst_block_ids"),
        (([0], [1], "d2d"), "direction is 'd2d'"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_transfer.copy_kv_blocks(src, dst, *given)
    assert not dst["a"].any()


def test_a_step_without_cached_requests_is_named():
    step = Some(scheduled_new_reqs=[], scheduled_cached_reqs=None)
    with pytest.raises(TypeError, match=r"scheduled_cached_reqs is None: expected .* req_ids"):
        kv_transfer.yield_req_data(step)
