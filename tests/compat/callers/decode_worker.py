# SPDX-License-Identifier: Apache-2.0
"""Workers that receive KV from prefill workers, written for vLLM's helpers of KV connectors."""

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import (
    TpKVTopology,
    copy_kv_blocks,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    yield_req_data,
)


class DecodeWorker:
    def __init__(self, rank, tp_size, block_size, num_heads, layout, num_blocks=8, num_layers=2):
        self.sizes, self.blocks = {"decode": tp_size}, {"decode": block_size}
        self.topology = TpKVTopology(
            tp_rank=rank,
            remote_tp_size=self.sizes,
            is_mla=False,
            total_num_kv_heads=num_heads,
            attn_backend="FLASH_ATTN",
            engine_id="decode",
            remote_block_size=self.blocks,
        )
        shape = (num_blocks, block_size, num_heads // tp_size, 4)
        self.layout = layout
        self.caches = {f"layer {i}": self._cache(shape) for i in range(num_layers)}
        self.host = {name: torch.zeros_like(cache) for name, cache in self.caches.items()}

    def _cache(self, shape):
        if self.layout == "NHD":
            return torch.zeros(shape)
        n, size, heads, width = shape
        return torch.zeros(n, heads, size, width).permute(0, 2, 1, 3)

    def meet(self, engine_id, tp_size, block_size):
        """Add a remote engine after construction, as a handshake does."""
        self.sizes[engine_id], self.blocks[engine_id] = tp_size, block_size

    def receive(self, engine_id, scheduler_output, read):
        """Load new blocks. `read` returns the bytes that a remote rank sends for a block."""
        got = []
        for req_id, groups, resumed in yield_req_data(scheduler_output):
            got.append((req_id, resumed))
            ranks = self.topology.get_target_remote_ranks_from_engine_id(engine_id)
            block_ids = torch.tensor(groups[0])
            for cache in self.caches.values():
                for block in groups[0]:
                    raw = torch.cat([read(rank[0], req_id, block, cache) for rank in ranks])
                    memory = cache if self.layout == "NHD" else cache.permute(0, 2, 1, 3)
                    memory[block] = raw.view(memory[block].shape)
                self.arrange(engine_id, cache, block_ids)
        return got

    def arrange(self, engine_id, cache, block_ids):
        ratio = self.topology.block_size_ratio_from_engine_id(engine_id)
        if self.layout == "HND" and ratio > 1:
            kv_postprocess_blksize_on_receive(cache, block_ids, ratio)
        elif self.layout == "NHD" and ratio > 1:
            kv_postprocess_blksize_and_layout_on_receive(cache, block_ids, ratio)
        elif self.layout == "NHD":
            kv_postprocess_layout_on_receive(cache, block_ids)

    def to_host(self, blocks, host_blocks):
        copy_kv_blocks(self.caches, self.host, blocks, host_blocks, "d2h")

    def from_host(self, host_blocks, blocks):
        copy_kv_blocks(self.host, self.caches, host_blocks, blocks, "h2d")
