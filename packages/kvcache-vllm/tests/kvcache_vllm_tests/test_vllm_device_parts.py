# SPDX-License-Identifier: Apache-2.0
"""Components of a vLLM worker, with device tensors and concurrent computation on another stream.

Uses a stand-in for vLLM.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvcache_exchange.disaggregation.leases import LeaseNumbers
from kvcache_exchange.disaggregation.offer import Offer
from kvcache_exchange.disaggregation.steps import Load
from kvcache_exchange.identity import KVIdentity
from tests.machinery import vllm_stand_in
from tests.machinery.nixl_stand_in import stand_in as nixl_stand_in

CYCLES_PER_S = 2e9  # clock rate assumed for torch.cuda._sleep
LAYERS, HEADS, SIZE, BLOCK, NUM_BLOCKS = 2, 2, 16, 8, 12


@pytest.fixture(autouse=True)
def stand_in():
    with vllm_stand_in.stand_in():
        yield


# Host tier ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_used_parts_of_a_page_are_stored_and_loaded(device):
    """The load is expedited, as in vLLM 0.33. The padding after each page's bytes must not change."""
    from kvcache_vllm.offloading.host_manager import HostChunks
    from kvcache_vllm.offloading.host_worker import HostWorker

    names = vllm_stand_in
    rng = np.random.default_rng(0)
    before = [torch.from_numpy(rng.integers(-128, 128, (40, size), np.int8)) for size in (160, 96)]
    tensors = [each.to(device) for each in before]
    refs = [[names.CanonicalKVCacheRef(0, 128)], [names.CanonicalKVCacheRef(0, 144)]]
    caches = names.CanonicalKVCaches(
        [names.CanonicalKVCacheTensor(each, each.shape[1]) for each in tensors],
        [[*group, names.CanonicalKVCacheRef(1, 96)] for group in refs],
    )
    worker = HostWorker(caches, num_chunks=4, blocks_per_chunk=2)
    assert worker.host.page_bytes == 144 + 96
    blocks, others = [7, 3, 20, 21], [30, 5, 6, 12]
    host = HostChunks(np.array([2, 1], np.int32), [2])
    gpu = names.GPULoadStoreSpec(blocks, [4], [0])
    if device == "cuda":  # the step that computes the blocks is still running
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
    try:
        if device == "cuda":
            torch.cuda._sleep(int(0.3 * CYCLES_PER_S))
        for tensor in tensors:
            tensor[others] = 1
        assert worker.submit_store(1, gpu, host)
        worker.wait({1})
        assert [each.transfer_size for each in worker.get_finished()] == [4 * 240]
        into = names.GPULoadStoreSpec(others, [4], [0])
        assert worker.submit_load(2, host, into, expedited=True)
        worker.wait({2})
        assert [each.transfer_size for each in worker.get_finished()] == [4 * 240]
        for tensor, was, used in zip(tensors, before, (144, 96)):
            now = tensor.cpu()
            assert torch.equal(now[others, :used], was[blocks, :used])
            assert (now[others, used:] == 1).all()
        worker.shutdown()
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_stream(torch.cuda.default_stream())


# Disaggregation -----------------------------------------------------------------------------------------


class Engine:
    """A worker of the vLLM connector, together with its caches."""

    def __init__(self, engine_id, name, fill):
        from kvcache_vllm.disaggregation.options import Options
        from kvcache_vllm.disaggregation.worker import TransferWorker

        layers = [f"layer{i}" for i in range(LAYERS)]
        shape = (NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE)
        self.caches = {each: torch.full(shape, fill, device="cuda") for each in layers}
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id=engine_id),
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        spec = SimpleNamespace(head_size=SIZE)
        group = SimpleNamespace(layer_names=layers, kv_cache_spec=spec)
        cache = SimpleNamespace(
            kv_cache_groups=[group], transfer_group_ids=[0], num_blocks=NUM_BLOCKS
        )
        self.worker = TransferWorker(Options(transport=name, timeout_s=20), config, cache)
        self.worker.register(self.caches)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tcp", "nixl"])
def test_load_waits_for_the_step_that_still_writes_to_its_blocks(name):
    from kvcache_vllm.disaggregation.steps import TransferMetadata

    with nixl_stand_in():
        sender, receiver = Engine("p", name, 0.0), Engine("d", name, -1.0)
        for layer, cache in enumerate(sender.caches.values()):
            cache.copy_(torch.arange(cache.numel()).view(cache.shape) + 0.5 * layer)
        torch.cuda.synchronize()
        handshake = sender.worker.handshake
        lease = LeaseNumbers().take("r", 60.0)
        offer = Offer(
            "p",
            "r",
            20,
            "0",
            KVIdentity({}),
            handshake.groups,
            ((4, 5, 9),),
            (handshake.address,),
            lease,
        )
        sender.worker.begin(TransferMetadata(leases={"r": (lease, 60.0)}))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        zeros = torch.zeros_like(receiver.caches["layer0"])
        # With asynchronous scheduling, the previous step is still running.
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(1.0 * CYCLES_PER_S))
            for cache in receiver.caches.values():
                cache.copy_(zeros)
            receiver.worker.begin(TransferMetadata(loads={"r": Load(offer, 0, 20, ([3, 8, 2],))}))
        deadline, received = time.monotonic() + 20, set()
        while not received:
            assert time.monotonic() < deadline
            _, received, failed = receiver.worker.take_results()
            assert not failed
            time.sleep(0.01)
        torch.cuda.synchronize()
        for mine, theirs in zip(receiver.caches.values(), sender.caches.values()):
            assert torch.equal(mine.cpu()[[3, 8, 2]], theirs.cpu()[[4, 5, 9]])
            assert (mine.cpu()[[0, 1, 4, 5, 6, 7, 9, 10, 11]] == 0).all()
        receiver.worker.close()
        sender.worker.close()


def test_reads_are_not_merged_across_allocations():
    """Layers are adjacent in memory, but belong to separate allocations on one or both sides."""
    from kvcache_exchange.plugins.moves import GroupPlan
    from kvcache_vllm.disaggregation.layout import layout_of_group

    shape = (4, HEADS, BLOCK, 2 * SIZE)
    caches = [torch.zeros(shape) for _ in range(LAYERS)]
    options = {"num_blocks": 4, "total_num_kv_heads": HEADS, "tp_size": 1}
    layout = layout_of_group(["0", "1"], caches, engine_id="e", **options)
    plan = GroupPlan(layout, layout, 0)
    size = caches[0].nbytes
    begins, there = np.array([1 << 20, (1 << 20) + size]), np.array([2 << 20, (2 << 20) + size])

    def lengths(*borders):
        blocks = [1, 2, 3], [1, 2, 3]
        moves = plan.moves(begins, {0: there}, [0, *blocks[0]], [0, *blocks[1]], *borders)
        return [n for each in moves for n in each.length.tolist()]

    page = size // 4
    assert lengths() == [3 * page, 3 * page]  # page 0 of the second layer lies in between
    everywhere = np.arange(4 * LAYERS) * page
    assert lengths(begins + page * 2, {}) == [page, 2 * page] * 2
    assert lengths(begins, {0: there + page * 2}) == [page, 2 * page] * 2
    assert lengths((1 << 20) + everywhere, {0: there}) == [page] * 6
