# SPDX-License-Identifier: Apache-2.0
"""Measures attention metadata on the CPU with one thread, beside NumPy code like that in engines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Result, median_times, one_thread, seconds_per_call
from kvcache import AttentionMetadataBuilder, BlockTables, TableShape

BLOCK_SIZE, MAX_LEN, WINDOWS = 16, 8192, (None, 1024, None, 1024)
WIDTH = MAX_LEN // BLOCK_SIZE


class NumpyMetadata:
    """The baseline.

    For each group, the baseline indexes table rows, computes cumulative sums and masks pages.
    """

    def __init__(self, tables: list[np.ndarray], max_num_reqs: int) -> None:
        n = max_num_reqs
        self.tables = tables
        self.start = np.zeros(n + 1, np.int32)
        self.seqused = np.zeros((len(tables), n), np.int32)
        self.batch = [np.zeros((n, WIDTH), np.int32) for _ in tables]
        self.indptr = np.zeros((len(tables), n + 1), np.int32)
        self.indices = [np.zeros(n * WIDTH, np.int32) for _ in tables]
        self.last = np.zeros((len(tables), n), np.int32)
        self.columns = np.arange(WIDTH, dtype=np.int32)

    def build(self, rows: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray) -> None:
        n = len(rows)
        np.cumsum(query_lens, out=self.start[1 : n + 1])
        used = -(-int(seq_lens.max()) // BLOCK_SIZE)
        ends = -(-seq_lens // BLOCK_SIZE)
        for g, (table, window) in enumerate(zip(self.tables, WINDOWS)):
            self.seqused[g, :n] = seq_lens
            batch = self.batch[g][:n, :used]
            np.take(table[:, :used], rows, axis=0, out=batch, mode="clip")
            visible = self.columns[:used] < ends[:, None]
            if window is not None:
                hidden = np.maximum(seq_lens - query_lens - window + 1, 0) // BLOCK_SIZE
                seen = self.columns[:used] >= hidden[:, None]
                batch *= seen
                visible &= seen
                np.cumsum(ends - hidden, out=self.indptr[g, 1 : n + 1])
            else:
                np.cumsum(ends, out=self.indptr[g, 1 : n + 1])
            self.indices[g][: self.indptr[g, n]] = batch[visible]
            rest = seq_lens % BLOCK_SIZE
            self.last[g, :n] = np.where((rest == 0) & (seq_lens != 0), BLOCK_SIZE, rest)


def cases() -> Iterator[tuple[str, int, int]]:
    """Yield (name, number of requests, tokens per request in the step)."""
    for n in (8, 256, 1024):
        yield f"decode of {n} requests, 4 groups", n, 1
    yield "prefill of 8 requests, 4 groups", 8, 1024


def batch_of(num_reqs: int, query_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows, query_lens, seq_lens): about 2,000 tokens per request, rows in random order."""
    rng = np.random.default_rng(0)
    seq_lens = rng.integers(1024, 3072, num_reqs).astype(np.int32)
    return (
        rng.permutation(num_reqs).astype(np.int32),
        np.full(num_reqs, query_len, np.int32),
        seq_lens,
    )


def tables_of(num_reqs: int, device: str = "cpu") -> BlockTables:
    """Create four groups, two with a sliding window. Rows hold blocks for 3,072 tokens."""
    tables = BlockTables(
        [TableShape(BLOCK_SIZE, -(-MAX_LEN // BLOCK_SIZE), window=window) for window in WINDOWS],
        max_num_reqs=num_reqs, max_num_tokens=64, device=device,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    for row in range(num_reqs):
        tables.add_row(rng.integers(1, 1 << 20, (4, 3072 // BLOCK_SIZE)), row)
    tables.commit_updates()
    return tables


def all_results() -> Iterator[Result]:
    with one_thread():
        for name, num_reqs, query_len in cases():
            yield from one_case(name, num_reqs, query_len)


def one_case(name: str, num_reqs: int, query_len: int) -> Iterator[Result]:
    tables = tables_of(num_reqs)
    builder = AttentionMetadataBuilder(tables)
    peer = NumpyMetadata([table.get_numpy_array() for table in tables], num_reqs)
    batch = batch_of(num_reqs, query_len)
    built = builder.build(*batch)
    peer.build(*batch)
    for g in range(4):
        used = peer.indptr[g, -1]
        assert np.array_equal(built[g].paged_kv_indices.numpy(), peer.indices[g][:used])
        assert np.array_equal(built[g].paged_kv_indptr.numpy(), peer.indptr[g])
        shown = -(-built.max_seq_len // BLOCK_SIZE)
        assert np.array_equal(built[g].block_table[:, :shown].numpy(), peer.batch[g][:, :shown])
        assert np.array_equal(built[g].seqused_k.numpy(), peer.seqused[g])
    # With a GPU, the host's only work in each step is to process the lengths, start the copy and
    # launch the kernel.
    lengths = AttentionMetadataBuilder(tables, flash_attn=False, flashinfer=False)
    calls = 50
    build, numpy, host = median_times(
        seconds_per_call(lambda: builder.build(*batch), calls),
        seconds_per_call(lambda: peer.build(*batch), calls),
        seconds_per_call(lambda: lengths.build(*batch), calls),
    )
    to_us = 1e6 / calls
    yield Result(f"metadata, {name}", "us", build * to_us, numpy * to_us, "numpy")
    yield Result(f"metadata, {name}, lengths only", "us", host * to_us)
