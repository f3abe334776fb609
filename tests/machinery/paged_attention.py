# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch, over dense KV and over paged KV with the metadata of two backends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvcache import BlockTables, ContextParallel, TableShape
from kvcache.worker import GroupMetadata

HEAD = 3


def attend(queries, keys, values, window):
    """Return (outputs, log-sum-exp of the scores) for one request.

    The queries belong to the request's last tokens.

    The query at position p attends to keys p - window + 1 to p, as with `window_size=(window - 1,
    0)` and `causal=True`. Other keys are not read.
    """
    outputs = torch.zeros(len(queries), HEAD, dtype=torch.float64)
    weights = torch.full((len(queries),), -torch.inf, dtype=torch.float64)
    for i, query in enumerate(queries):
        end = len(keys) - len(queries) + i + 1
        begin = 0 if window is None else max(0, end - window)
        if end > begin:
            scores = keys[begin:end] @ query
            weights[i] = scores.logsumexp(0)
            outputs[i] = scores.softmax(0) @ values[begin:end]
    return outputs, weights


def over_batch(queries, starts, keys_of, window, weights):
    """Compute attention for every request. `starts` delimits the queries of each request. Output
    rows that belong to no request are zero.
    """
    outputs = torch.zeros(len(queries), HEAD, dtype=torch.float64)
    sums = torch.full((len(queries),), -torch.inf, dtype=torch.float64)
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        outputs[start:stop], sums[start:stop] = attend(queries[start:stop], *keys_of(i), window)
    return (outputs, sums) if weights else outputs


def flash_attention(queries, cache, query_start_loc, group: GroupMetadata, weights=False):
    """Like `flash_attn_varlen_func(..., cu_seqlens_q, seqused_k, block_table, causal=True)`."""

    def keys_of(i):
        length = int(group.seqused_k[i])
        blocks = group.block_table[i, : -(-length // group.block_size)].long()
        return cache[:, blocks].flatten(1, 2)[:, :length]

    return over_batch(queries, query_start_loc.tolist(), keys_of, group.window, weights)


def flash_infer(queries, cache, query_start_loc, group: GroupMetadata, weights=False):
    """Like a causal `BatchPrefillWithPagedKVCacheWrapper`, which reads only the KV in the page list."""

    def keys_of(i):
        start, stop = group.paged_kv_indptr[i : i + 2].tolist()
        last = int(group.paged_kv_last_page_len[i])
        length = 0 if stop == start else (stop - start - 1) * group.block_size + last
        return cache[:, group.paged_kv_indices[start:stop].long()].flatten(1, 2)[:, :length]

    return over_batch(queries, query_start_loc.tolist(), keys_of, group.window, weights)


@dataclass
class BatchOfTokens:
    """Requests with K and V for every token, in several groups of one model."""

    block_sizes: list[int]
    windows: list[int | None]
    world_size: int
    interleave: int
    rows: list[int]
    query_lens: list[int]
    seq_lens: list[int]
    padding: int
    seed: int

    @staticmethod
    @st.composite
    def strategy(draw, world_sizes=(1,), windows=(None, 1, 3, 8), decode=False):
        num_groups, n = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        interleave = draw(st.integers(1, 2))
        block_sizes = [interleave * draw(st.integers(1, 3)) for _ in range(num_groups)]
        seq_lens = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
        return BatchOfTokens(
            block_sizes,
            [draw(st.sampled_from(windows)) for _ in range(num_groups)],
            draw(st.sampled_from(world_sizes)),
            interleave,
            draw(st.permutations(range(5)))[:n],
            [1 if decode else draw(st.integers(1, length)) for length in seq_lens],
            seq_lens,
            draw(st.integers(0, 2)),
            draw(st.integers(0, 2**31)),
        )

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape):
            return torch.randn(*shape, HEAD, generator=generator, dtype=torch.float64)

        self.queries = random(sum(self.query_lens))
        # [group][request]: K and V of the request's tokens, [2, seq_len, HEAD].
        self.kv = [[random(2, length) for length in self.seq_lens] for _ in self.block_sizes]

    def dense_attention(self, group):
        starts = np.cumsum([0, *self.query_lens]).tolist()
        return over_batch(
            self.queries, starts, self.kv[group].__getitem__, self.windows[group], False
        )

    def make_tables(self, rank=0):
        """Return block tables in which blocks are in random order and ids differ between groups."""
        cp = ContextParallel(dcp_world_size=self.world_size, dcp_rank=rank)
        tables = BlockTables(
            [
                TableShape(
                    size, -(-32 // (size * cp.world_size)),
                    window=window, context_parallel=cp, cp_kv_cache_interleave_size=self.interleave,
                )
                for size, window in zip(self.block_sizes, self.windows)
            ],
            max_num_reqs=7, max_num_tokens=256,
        )  # fmt: skip
        self.free = np.random.default_rng(self.seed).permutation(np.arange(1, 300)).tolist()
        for row, length in zip(self.rows, self.seq_lens):
            needed = [-(-length // (size * self.world_size)) for size in self.block_sizes]
            tables.add_row([[self.free.pop() for _ in range(n)] for n in needed], row)
        return tables

    def fill_caches(self, tables):
        """Return [2, blocks, block size, HEAD] for each group, filled through the slot mapping and
        NaN elsewhere.
        """
        rows = np.repeat(self.rows, self.seq_lens)
        positions = np.concatenate([np.arange(length) for length in self.seq_lens])
        tables.compute_slot_mapping(rows, positions)
        caches = []
        for g, block_size in enumerate(self.block_sizes):
            cache = torch.full((2, 300, block_size, HEAD), torch.nan, dtype=torch.float64)
            slots = tables[g].slot_mapping.cpu[: len(rows)]
            held = slots >= 0
            for i, window in [(i, self.windows[g]) for i in range(len(self.rows))]:
                if (
                    window is not None
                ):  # blocks to which no query of this step attends may belong to another request
                    first = self.seq_lens[i] - self.query_lens[i]
                    at = sum(self.seq_lens[:i])
                    hidden = max(0, first - window + 1) // block_size * block_size
                    held[at : at + hidden] = False
            tokens = torch.cat(self.kv[g], dim=1)
            cache.flatten(1, 2)[:, slots[held]] = tokens[:, held]
            caches.append(cache)
        return caches
