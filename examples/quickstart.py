# SPDX-License-Identifier: Apache-2.0
"""The control plane and the data plane in forty lines: plan the memory, plan a step, apply the plan, and
write and read KV by layer.

Change LAYERS to describe another model.
"""

import numpy as np
import torch

import kvcache
from kvcache import LayerSpec, Request, plan_cache

SHAPE = {"num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
WINDOW = {"options": {"window": 64}}
LAYERS = [LayerSpec(f"full.{i}", "full_attention", block_size=16, **SHAPE) for i in range(2)]
LAYERS += [LayerSpec(f"local.{i}", "sliding_window", 16, **SHAPE, **WINDOW) for i in range(2)]

plan = plan_cache(LAYERS, budget_bytes=2**23, max_model_len=256)
cache = kvcache.build(plan, max_num_reqs=4)
manager, tables = cache.manager, cache.tables


def run(request: Request) -> None:
    """Admit a request, compute its uncached tokens, and read back all of its KV."""
    step = manager.step(new=[request])
    cache.worker.apply(step)
    row, start = int(step.rows[0]), int(step.num_computed_tokens[0])
    print(f"{request.request_id}: row {row}, {start} of {request.num_tokens} tokens cached")

    positions = np.arange(start, request.num_tokens)
    tables.compute_slot_mapping(req_indices=np.full(len(positions), row), positions=positions)
    tables.commit_slot_mapping(num_tokens=len(positions))
    for layer in LAYERS:
        key, value = torch.randn(2, len(positions), 2, 64)  # computed by the model
        cache.write(layer.name, key, value)
        keys, values = cache.gather(layer.name, cache.slots(layer.name, len(positions)))
        assert torch.equal(keys, key) and torch.equal(values, value)


system_prompt = list(range(100))
first = Request("first", [*system_prompt, 1, 2, 3])
run(first)
manager.free(first)  # the blocks keep their content until they are reused
run(Request("second", [*system_prompt, 7, 8, 9]))
print(f"hit rate {manager.cache.stats.hit_rate:.2f}, {manager.pool.num_free} blocks free")
