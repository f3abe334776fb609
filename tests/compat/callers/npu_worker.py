# SPDX-License-Identifier: Apache-2.0
"""A step of a worker with drafts, written for the block tables of vLLM's NPU variant."""

import numpy as np
import torch
from vllm_ascend.worker.block_table import BlockTable, MultiGroupBlockTable


class Spec:
    def __init__(self, kind):
        self.kv_cache_spec = kind()


class MambaSpec:
    pass


class FullAttentionSpec:
    pass


GROUPS = [Spec(FullAttentionSpec), Spec(MambaSpec)]


def one_table(block_size, kernel_sizes, num_drafts):
    return BlockTable(block_size, 4, 8, 64, False, torch.device("cpu"), kernel_sizes, 1, num_drafts)


def all_tables(block_sizes, kernel_sizes, max_num_blocks, groups=None):
    return MultiGroupBlockTable(
        4,
        256,
        64,
        False,
        torch.device("cpu"),
        block_sizes,
        2,
        max_num_blocks,
        kernel_sizes,
        1,
        groups,
    )


def run(table, rows, starts, counts):
    """Return the slots of a step, and those of two drafts after each request's tokens."""
    for row, block_ids in enumerate(rows):
        table.add_row(block_ids, row)
    table.commit_block_table(len(rows))
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts)])
    begin = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    table.compute_slot_mapping(len(rows), begin, torch.from_numpy(positions))
    step = table.slot_mapping.gpu[: len(positions)].tolist()
    indices = np.repeat(np.arange(len(rows), dtype=np.int32), 2)
    drafts = np.concatenate([[s + n, s + n + 1] for s, n in zip(starts, counts)])
    table.compute_slot_mapping_draft(indices, drafts)
    return step, table.slot_mapping.gpu[: len(drafts)].tolist(), drafts
