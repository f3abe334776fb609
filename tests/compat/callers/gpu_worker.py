# SPDX-License-Identifier: Apache-2.0
"""A worker's persistent batch, written for vLLM's block tables."""

import numpy as np
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable


class Batch:
    """Rows of running requests. A finished request's row is filled by the last one."""

    def __init__(self, max_reqs, max_len, max_tokens, block_sizes, kernel_sizes):
        device = torch.device("cpu")
        sizes = (max_reqs, max_len, max_tokens, False, device, block_sizes, kernel_sizes)
        self.tables = MultiGroupBlockTable(*sizes, cp_kv_cache_interleave_size=1)
        self.names, self.starts = [], {}

    def add(self, name, block_ids):
        self.tables.add_row(block_ids, len(self.names))
        self.names.append(name)
        self.starts[name] = 0

    def append(self, name, block_ids):
        self.tables.append_row(block_ids, self.names.index(name))

    def remove(self, name):
        row, last = self.names.index(name), len(self.names) - 1
        self.tables.clear_row(row)
        if row != last:
            self.tables.move_row(last, row)
        self.names[row] = self.names[last]
        self.names.pop()
        del self.starts[name]

    def reorder(self, first, second):
        i, j = self.names.index(first), self.names.index(second)
        self.tables.swap_row(i, j)
        self.names[i], self.names[j] = second, first

    def step(self, num_tokens, older=False):
        """Run `num_tokens[name]` tokens of each request. Returns the slots of each group."""
        counts = [num_tokens[name] for name in self.names]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        spans = [
            range(self.starts[name], self.starts[name] + n) for name, n in zip(self.names, counts)
        ]
        positions = np.concatenate([np.array(span, np.int64) for span in spans])
        num_reqs = len(self.names)
        self.tables.commit_block_table(num_reqs)
        if older:
            rows = np.repeat(np.arange(num_reqs, dtype=np.int32), counts)
            self.tables.compute_slot_mapping(rows, positions)
            self.tables.commit_slot_mapping(len(positions))
        else:
            places = torch.from_numpy(starts), torch.from_numpy(positions)
            self.tables.compute_slot_mapping(num_reqs, *places)
        for name, n in zip(self.names, counts):
            self.starts[name] += n
        return [self.slots_of(table, starts) for table in self.tables.block_tables]

    def slots_of(self, table, starts):
        slots = table.slot_mapping.gpu.tolist()
        assert set(slots[starts[-1] :]) <= {-1}
        assert table.get_device_tensor(len(self.names)).shape[1] == table.max_num_blocks_per_req
        return {name: slots[i:j] for name, i, j in zip(self.names, starts, starts[1:])}
