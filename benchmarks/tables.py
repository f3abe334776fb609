# SPDX-License-Identifier: Apache-2.0
"""Measures block tables and slot mapping on the CPU with one thread, beside plain NumPy code."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Result, median_times, one_thread, seconds_per_call
from kvcache import BlockTables, StepPlan, TableShape, ops
from kvcache.native import build
from kvcache.step import NO_REPLACE

GROUPS, BUFFER = 4, 8192


class NumpyTables:
    """The baseline: an int32 array per group and a loop over rows, as in engines."""

    def __init__(self, num_groups: int, num_rows: int, width: int, num_slots: int) -> None:
        self.tables = [np.zeros((num_rows, width), np.int32) for _ in range(num_groups)]
        self.counts = [np.zeros(num_rows, np.int32) for _ in range(num_groups)]
        self.slots = np.zeros((num_groups, num_slots), np.int64)

    def append_row(self, g: int, ids: list[int], row: int) -> None:
        start = self.counts[g][row]
        self.counts[g][row] += len(ids)
        self.tables[g][row, start : start + len(ids)] = ids

    def slot_mapping(self, rows: np.ndarray, positions: np.ndarray, block_size: int) -> None:
        for g, table in enumerate(self.tables):
            blocks = table.ravel()[rows * table.shape[1] + positions // block_size]
            np.add(blocks * block_size, positions % block_size, out=self.slots[g, : len(rows)])


def slot_mapping() -> Iterator[Result]:
    rng = np.random.default_rng(0)
    for name, num_rows, num_tokens, bar in (
        ("decode, 1024 requests", 1024, 1024, 14),
        ("prefill of 8192 tokens, 8 requests", 8, 8192, 30),
    ):
        width = 512
        tables = torch.from_numpy(
            rng.integers(1, 1 << 20, GROUPS * num_rows * width).astype(np.int32)
        )
        size = num_rows * width
        groups = torch.tensor([[g * size, width, 16, 1, 0, 1, 0, g] for g in range(GROUPS)])
        counts = torch.full((GROUPS, num_rows), width, dtype=torch.int32)
        lengths = np.full(num_rows, num_tokens // num_rows)
        rows = np.repeat(np.arange(num_rows), lengths).astype(np.int32)
        start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        first = rng.integers(0, width * 16 - lengths[0], num_rows)
        positions = first[rows] + np.arange(num_tokens) - start[rows]
        out = torch.empty(GROUPS, BUFFER, dtype=torch.int64)
        peer = NumpyTables(GROUPS, num_rows, width, BUFFER)
        for g in range(GROUPS):
            peer.tables[g][:] = tables[g * size : (g + 1) * size].view(num_rows, width).numpy()
        wide = rows.astype(np.int64)
        by_token = (torch.from_numpy(rows), None)
        by_request = (torch.arange(num_rows, dtype=torch.int32), torch.from_numpy(start))
        where = torch.from_numpy(positions)

        def ours(form: tuple, checks: torch.Tensor | None) -> None:
            ops.slot_mapping(tables, groups, num_rows, *form, where, checks, out)  # noqa: B023

        calls = 50
        unchecked, by_start, checked, numpy = median_times(
            seconds_per_call(lambda: ours(by_token, None), calls),  # noqa: B023
            seconds_per_call(lambda: ours(by_request, None), calls),  # noqa: B023
            seconds_per_call(lambda: ours(by_token, counts), calls),  # noqa: B023
            seconds_per_call(lambda: peer.slot_mapping(wide, positions, 16), calls),  # noqa: B023
        )
        assert np.array_equal(out.numpy()[:, :num_tokens], peer.slots[:, :num_tokens])
        to_us = 1e6 / calls
        label = f"slot mapping, {name}, 4 groups"
        yield Result(label, "us", unchecked * to_us, numpy * to_us, "numpy, no padding", bar)
        yield Result(f"{label}, by query_start_loc", "us", by_start * to_us, bar=bar)
        yield Result(f"{label}, every row's length checked", "us", checked * to_us, bar=bar)


def plain_loop(folder: str) -> Callable[..., None]:
    """Return the baseline: `plain_loop.cpp`, compiled with this library's flags."""
    library = Path(folder) / "plain_loop.so"
    source = Path(__file__).with_name("plain_loop.cpp")
    subprocess.run(
        [*build.cxx_command(), *build.CXX_FLAGS, "-shared", str(source), "-o", str(library)],
        check=True,
    )
    return ctypes.CDLL(str(library)).plain_slots


def called_slot_mapping() -> Iterator[Result]:
    """Measure a complete `compute_slot_mapping` call for a decode step, including checks and padding."""
    num_rows, width = 1024, 512
    rng = np.random.default_rng(0)
    tables = BlockTables(
        [TableShape(16, width)] * GROUPS, max_num_reqs=num_rows, max_num_tokens=BUFFER
    )
    for row in range(num_rows):
        tables.add_row([rng.integers(1, 1 << 20, width) for _ in range(GROUPS)], row)
    ids = np.stack([table.get_numpy_array() for table in tables.block_tables])
    rows = np.arange(num_rows, dtype=np.int32)
    positions = rng.integers(0, width * 16, num_rows)
    slots = np.zeros((GROUPS, BUFFER), np.int64)
    sizes = map(ctypes.c_int64, (GROUPS, num_rows, width, num_rows, 16, BUFFER))
    num_groups, n, columns, num_tokens, block_size, num_slots = sizes
    addresses = (ctypes.c_void_p(a.ctypes.data) for a in (ids, rows, positions, slots))
    at_ids, at_rows, at_positions, at_slots = addresses
    with tempfile.TemporaryDirectory() as folder:
        plain = partial(
            plain_loop(folder), at_ids, num_groups, n, columns, at_rows, at_positions, num_tokens,
            block_size, at_slots, num_slots,
        )  # fmt: skip
        calls = 50
        ours, peer = median_times(
            seconds_per_call(lambda: tables.compute_slot_mapping(rows, positions), calls),
            seconds_per_call(plain, calls),
        )
    for g, table in enumerate(tables.block_tables):
        assert np.array_equal(table.slot_mapping.np[:num_rows], slots[g, :num_rows])
        assert (table.slot_mapping.np[num_rows:] == -1).all()
    ours, peer = ours * 1e6 / calls, peer * 1e6 / calls
    name = f"compute_slot_mapping, decode, {num_rows} requests, {GROUPS} groups"
    yield Result(name, "us", ours, peer, "plain C++ loop, no padding", peer / 2.5)


def rows() -> Iterator[Result]:
    num_rows, width = 1024, 1024
    tables = BlockTables([TableShape(16, width)] * GROUPS, max_num_reqs=num_rows, max_num_tokens=64)
    peer = NumpyTables(GROUPS, num_rows, width, 64)
    all_rows = np.arange(num_rows, dtype=np.int32)
    splits = [np.arange(num_rows + 1, dtype=np.int32)] * GROUPS
    ids = [np.full(num_rows, 7, np.int32)] * GROUPS
    plan = StepPlan(
        0, all_rows, np.zeros(num_rows, np.uint8), all_rows,
        append_rows=all_rows, append_splits=splits, append_ids=ids, replace=[NO_REPLACE] * GROUPS,
    )  # fmt: skip

    def theirs() -> None:
        for count in peer.counts:
            count[:] = 0
        for g in range(GROUPS):
            for row in range(num_rows):
                peer.append_row(g, [7], row)

    # The rows have room for all rounds.
    batch, loop = median_times(lambda: tables.apply(plan), theirs, rounds=101)
    ours_us, peer_us = (each * 1e6 / (num_rows * GROUPS) for each in (batch, loop))
    name = "append one block to 1024 rows of 4 groups, one call"
    yield Result(name, "us/row", ours_us, peer_us, "numpy, row by row", 0.1)

    long = np.arange(512, dtype=np.int32)
    calls = 1000
    one, other = median_times(
        seconds_per_call(lambda: tables[0].add_row(long, 3), calls),
        seconds_per_call(
            lambda: (peer.counts[0].__setitem__(3, 0), peer.append_row(0, long, 3)), calls
        ),
    )
    yield Result(
        "add_row of 512 blocks", "us", one * 1e6 / calls, other * 1e6 / calls, "numpy", 1.0
    )


def all_results() -> Iterator[Result]:
    with one_thread():
        yield from called_slot_mapping()
        yield from slot_mapping()
        yield from rows()
