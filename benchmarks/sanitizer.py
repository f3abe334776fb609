# SPDX-License-Identifier: Apache-2.0
"""Measures the sanitizer's time per decode step and its memory use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Result, median_times
from kvcache.sanitizer import SanitizedGroup, Sanitizer

ROWS, TOKENS, BLOCK_SIZE = 256, 1024, 16
GROUPS = {"full": {}, "window": {"window": 512}, "chunk": {"chunk": 512}}


class Decoding:
    """Requests that decode one token per step, with a single cache group."""

    def __init__(self, kind: str, num_rows: int, num_tokens: int) -> None:
        rng = np.random.default_rng(0)
        width = num_tokens // BLOCK_SIZE + 64
        group = SanitizedGroup(kind, BLOCK_SIZE, **GROUPS[kind])
        self.sanitizer = Sanitizer([group], num_rows * width + 1, mode="stop")
        self.table = 1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
        self.names = [f"request-{row}" for row in range(num_rows)]
        self.lengths = num_tokens - rng.integers(
            0, BLOCK_SIZE, num_rows
        )  # blocks fill at different times
        self.ones = np.ones(num_rows, np.int64)
        self.tokens = rng.integers(0, 100_000, num_rows)
        rows = np.repeat(np.arange(num_rows), self.lengths)
        places = np.concatenate([np.arange(length) for length in self.lengths])
        for name, row, length in zip(self.names, self.table, self.lengths):
            self.sanitizer.observe_request(name, rng.integers(0, 100_000, length))
            self.sanitizer.observe_allocation(name, row)
        zeros = np.zeros(num_rows, np.int64)
        slots = self.slots(rows, places)
        self.sanitizer.observe_write(0, self.names, zeros, self.lengths, slots)
        self.sanitizer.observe_read(0, self.names, zeros, self.lengths, self.table)

    def slots(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        blocks = self.table[rows, places // BLOCK_SIZE].astype(np.int64)
        return blocks * BLOCK_SIZE + places % BLOCK_SIZE

    def prepare(self) -> None:
        """Build the arrays of the next step. In an engine, these arrays already exist."""
        self.lengths = self.lengths + 1
        self.starts = self.lengths - 1
        self.mapping = self.slots(np.arange(len(self.names)), self.starts)

    def prepare_with_free(self) -> None:
        """Build the arrays and free a block, so that all table entries are compared with block
        versions.
        """
        self.prepare()
        self.sanitizer.observe_free("another", [0])

    def begin(self) -> None:
        """Observe the tokens of the next step, which are the same for all groups."""
        self.sanitizer.observe_step()
        self.sanitizer.observe_tokens(self.names, self.starts, self.ones, self.tokens)

    def group(self) -> None:
        """Observe the writes and reads of one group."""
        sanitizer, names = self.sanitizer, self.names
        sanitizer.observe_write(0, names, self.starts, self.ones, self.mapping)
        sanitizer.observe_read(0, names, self.starts, self.lengths, self.table)


def all_results() -> Iterator[Result]:
    """Measure the observation of a step's tokens, and of its writes and reads for each kind of group."""
    shape = f"{ROWS} rows of {TOKENS:,} tokens"
    for kind in GROUPS:
        run = Decoding(kind, ROWS, TOKENS)
        for _ in range(20):
            run.prepare()
            run.begin()
            run.group()
        _, begin, group = median_times(run.prepare, run.begin, run.group, rounds=400)
        if kind == "full":
            yield Result(f"sanitizer, tokens of a decode step, {shape}", "us", begin * 1e6)
            name = f"sanitizer, step with one group, {shape}"
            yield Result(name, "us", (begin + group) * 1e6, bar=50)
        yield Result(f"sanitizer, {kind} group, {shape}", "us", group * 1e6)
        _, _, group = median_times(run.prepare_with_free, run.begin, run.group, rounds=400)
        yield Result(f"sanitizer, {kind} group after a free, {shape}", "us", group * 1e6)
    num_slots = run.sanitizer._blocks.device.num_blocks * BLOCK_SIZE
    size = run.sanitizer.num_bytes / num_slots
    yield Result("sanitizer, memory per slot, 16 tokens per block", "bytes", size)
