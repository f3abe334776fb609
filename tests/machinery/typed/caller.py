# SPDX-License-Identifier: Apache-2.0
"""Correct calls, for which `mypy --strict` must report nothing."""

import numpy as np
import torch

import kvcache
from kvcache import (
    Admit,
    BlockPool,
    BlockTables,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    Request,
    Status,
    StepReport,
    TableShape,
    Worker,
    hash_blocks,
    plan_cache,
)
from kvcache.compat import BlockSpaceManager, ascend_block_table, vllm_block_table
from kvcache.compat import KVCacheManager as RequestManager
from kvcache.compat.kv_transfer import TpKVTopology
from kvcache.transfer import CacheDescription, plan_transfer


class EngineRequest:
    """An engine's request."""

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        self.request_id, self.all_token_ids, self.num_computed_tokens = request_id, tokens, 0


class Seq:
    """An engine's sequence."""

    def __init__(self, seq_id: int, tokens: list[int]) -> None:
        self.seq_id, self.tokens, self.status = seq_id, tokens, "WAITING"

    def get_len(self) -> int:
        return len(self.tokens)

    def get_token_ids(self) -> list[int]:
        return self.tokens


def serve() -> int:
    manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, enable_events=True)
    request = Request("r1", range(40), cache_salt="tenant")
    plan = manager.step(new=[request])
    ids = manager.block_ids(request)
    status = manager.would_fit(Admit(request, 1))
    if status is not Status.SERVED:
        manager.free(request)
    manager.report(StepReport(plan.step_id, True))
    return len(ids) + plan.num_running


def move() -> torch.Tensor:
    storage = KVStorage(num_blocks=9, block_size=16, num_kv_heads=2, head_size=8)
    tables = BlockTables([TableShape(16, 8)], max_num_reqs=4, max_num_tokens=64)
    worker = Worker(storage, tables, storage.pages.on_host(3))
    storage.write(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([17]))
    pages = Pages.allocate(3, [[64, 64]])
    return storage.gather(0, torch.tensor([17 + worker.last_step_id, pages.num_blocks]))[0]


def others() -> None:
    layers = [LayerSpec("l", "full_attention", 16, 2, 8)]
    cache = kvcache.build(plan_cache(layers, 2**20, max_model_len=64), max_num_reqs=2)
    cache.manager.step([], [])
    KVCacheManager.for_groups([GroupSpec("full_attention", 16)], 10, 64)
    description = CacheDescription(
        engine_id="a", num_layers=1, total_num_kv_heads=2, head_size=8, block_size=4
    )
    plan_transfer(description, description, 0).apply(np.array([[1]]), np.array([[1]]))
    pool = BlockPool(5)
    held = pool.allocate(2)
    if held is not None:
        pool.publish(held, hash_blocks(range(32), 16))
    sequences = BlockSpaceManager(16, num_gpu_blocks=9, num_cpu_blocks=0)
    free: int = sequences.get_num_free_gpu_blocks()
    table: list[int] = sequences.get_block_table(Seq(free, [1, 2]))
    del table
    blocks, count = RequestManager(16, 9, 128).get_computed_blocks(EngineRequest("r", [1, 2]))
    block_id: int = blocks[0].block_id + count
    del block_id


def block_tables() -> None:
    sizes = (4, 64, 32, False, "cpu", [16])
    begin, positions = torch.tensor([0, 1]), torch.tensor([3])
    tables = vllm_block_table.MultiGroupBlockTable(*sizes, [16], 0, 1)
    tables.compute_slot_mapping(1, begin, positions)
    tables[0].compute_slot_mapping(1, begin, positions)
    is_split: bool = tables[0].use_hybrid_blocks
    del is_split
    for table in tables.block_tables:
        table.compute_slot_mapping(1, begin, positions)
    npu = ascend_block_table.MultiGroupBlockTable(*sizes, 0, [4], [[16]], 1)
    npu[0].compute_slot_mapping_draft(np.array([0]), np.array([0]))
    sizes_of: tuple[int, int] = npu[0].blocks_per_phys_block, npu[0].logical_block_size
    del sizes_of


def topology_size(topology: TpKVTopology) -> int:
    return topology.remote_tp_size["a"]
