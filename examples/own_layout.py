# SPDX-License-Identifier: Apache-2.0
"""A custom cache layout in one file, used for storage, transfers and block copies.

In each block, the layout stores all data of one KV head together: K, followed by V. The heads of a
tensor-parallel rank are therefore contiguous in a page, and merging the pages of two ranks needs only a
few large copies.
"""

import ctypes

import numpy as np
import torch

from kvcache import KVStorage
from kvcache.compat import copy_kv_blocks
from kvcache.layouts import AttentionBackend, register_backend
from kvcache.transfer import CacheDescription, plan_transfer, region_addresses

# The complete description of the layout: the order in which a kernel indexes a layer's cache, and the
# memory order (outermost first).
HEAD_MAJOR = register_backend(
    AttentionBackend(
        "HEAD_MAJOR",
        dims=("block", "kv", "token", "head", "element"),
        nhd=("block", "head", "kv", "token", "element"),
        hnd=("block", "head", "kv", "token", "element"),
    )
)
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 8, 16, 9


def storage_of(num_kv_heads: int) -> KVStorage:
    """Create pages in the layout. Any device works."""
    return KVStorage(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        num_layers=LAYERS,
        dtype=torch.float16,
        backend="HEAD_MAJOR",
    )


def describe(engine_id: str, tp_size: int) -> CacheDescription:
    """Return the description for another engine. It contains only plain values, so the other engine need
    not know the name HEAD_MAJOR.
    """
    return CacheDescription(
        engine_id=engine_id,
        num_layers=LAYERS,
        total_num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        dtype="float16",
        tp_size=tp_size,
        memory_order=HEAD_MAJOR.memory_order("NHD"),
    )


# 1. Storage: a prefill engine with two ranks writes the KV of 32 tokens to blocks 3 and 5.
prefill = [storage_of(HEADS // 2) for _ in range(2)]
slots = torch.cat([torch.arange(BLOCK_SIZE) + block * BLOCK_SIZE for block in (3, 5)])
key, value = torch.randn(2, LAYERS, len(slots), HEADS, HEAD_SIZE).half()
for rank, storage in enumerate(prefill):
    mine = slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
    for layer in range(LAYERS):
        storage.write(
            layer, key[layer][:, mine].contiguous(), value[layer][:, mine].contiguous(), slots
        )
cache = prefill[0].kv_caches[0]
print(f"a kernel sees {list(cache.shape)} with strides {cache.stride()}")

# 2. Transfer: a decode engine with one rank loads both blocks into its blocks 7 and 2.
decode = storage_of(HEADS)
local, remote = describe("decode", tp_size=1), describe("prefill", tp_size=2)
plan = plan_transfer(local, remote, local_rank=0)
runs = plan.apply(np.array([[7], [2]]), np.array([[3], [5]]))
here = region_addresses(local, decode.pages)
there = [region_addresses(remote, storage.pages) for storage in prefill]
for rank, source, begin, target, to, length in zip(*(column.tolist() for column in runs.expand())):
    ctypes.memmove(int(here[target]) + to, int(there[rank][source]) + begin, length)
received = torch.cat([torch.arange(BLOCK_SIZE) + block * BLOCK_SIZE for block in (7, 2)])
for layer in range(LAYERS):
    found = decode.gather(layer, received)
    assert torch.equal(found[0], key[layer]) and torch.equal(found[1], value[layer])
print(
    f"{runs.num_bytes} bytes arrived in {runs.num_fragments} fragments: {len(slots)} tokens are correct"
)

# 3. Block copy: block 7 is copied to block 1 of another cache in host memory.
host = storage_of(HEADS)
names = [f"layers.{layer}" for layer in range(LAYERS)]
copy_kv_blocks(
    dict(zip(names, decode.kv_caches)),
    dict(zip(names, host.kv_caches)),
    [7],
    [1],
    "d2h",
    backend="HEAD_MAJOR",
)
for layer in range(LAYERS):
    assert torch.equal(host.kv_caches[layer][1], decode.kv_caches[layer][7])
print("block 7 was copied to block 1 in host memory")
