"""Both planes in forty lines: plan a step, apply it, write and read KV through slot mapping."""

import numpy as np
import torch

from kvcache import BlockTable, KVCacheManager, KVStorage, Request, Worker

BLOCK_SIZE, NUM_BLOCKS, MAX_REQS, MAX_LEN = 16, 65, 4, 256

# Control plane: which blocks. Never imports torch; may live in another process than the worker.
manager = KVCacheManager(BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, max_num_reqs=MAX_REQS)

# Data plane: the bytes. Block 0 is the null block in both.
storage = KVStorage(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
table = BlockTable(BLOCK_SIZE, MAX_REQS, MAX_LEN // BLOCK_SIZE, 512, False, "cpu", BLOCK_SIZE)
worker = Worker(storage, table)


def run(request: Request) -> None:
    """Admits a request, computes what is not cached, reads all of it back."""
    plan = manager.step(new=[request])
    worker.apply(plan)
    row, start = int(plan.rows[0]), int(plan.num_computed_tokens[0])
    print(f"{request.request_id}: row {row}, {start} of {request.num_tokens} tokens cached")

    positions = np.arange(start, request.num_tokens)
    table.compute_slot_mapping(np.full(len(positions), row), positions)
    slots = table.slot_mapping.gpu[: len(positions)]
    key, value = torch.randn(2, len(positions), 2, 64)  # what the model would compute
    storage.write(0, key, value, slots)

    table.compute_slot_mapping(np.full(request.num_tokens, row), np.arange(request.num_tokens))
    keys, _ = storage.gather(0, table.slot_mapping.gpu[: request.num_tokens])
    assert torch.equal(keys[start:], key)


system_prompt = list(range(100))
first = Request("first", [*system_prompt, 1, 2, 3])
run(first)
manager.free(first)  # its blocks keep their content until they are taken
run(Request("second", [*system_prompt, 7, 8, 9]))
print(f"hit rate {manager.stats.hit_rate:.2f}, {manager.pool.num_free} blocks free")
