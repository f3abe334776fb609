# SPDX-License-Identifier: Apache-2.0
"""Measures page copies on the CPU, beside torch indexing and a memcpy on as many threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Result, median_times
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache_lab.bandwidth import host_rates

NUM_BYTES = 256 << 20


def indexing(fragment: int, threads: int) -> Iterator[Result]:
    """Compare `copy_blocks` on pages of 16 layers with index_select and index_copy_ per layer."""
    layers = 16
    num_blocks = NUM_BYTES // (2 * layers * fragment)
    source = Pages.allocate(num_blocks, [[2 * fragment]] * layers)
    target = Pages.allocate(num_blocks, [[2 * fragment]] * layers)
    source.memory.random_(0, 256)
    target.memory.fill_(0)
    chance = np.random.default_rng(0)
    pairs = np.stack([chance.permutation(num_blocks) for _ in range(2)], 1).astype(np.int32)
    page_copy = PageCopy(source, target)
    read, written = torch.from_numpy(pairs).long().unbind(1)
    # The tensors are viewed as int64, because index_copy_ is five times slower on bytes.
    sources = [source.layer(i).view(torch.int64) for i in range(layers)]
    targets = [target.layer(i).view(torch.int64) for i in range(layers)]

    def by_indexing() -> None:
        for ours, theirs in zip(sources, targets):
            theirs.index_copy_(0, written, ours.index_select(0, read))

    seconds, peer = median_times(lambda: page_copy.copy(pairs), by_indexing)
    rates = [num_blocks * source.page_bytes / s / 1e9 for s in (seconds, peer)]
    name = f"copy_blocks, pages of {2 * fragment // 1024} KiB per layer, {threads} threads"
    yield Result(name, "GB/s", *rates, "index_select, index_copy_", rates[1], True)


def host_cost() -> Iterator[Result]:
    """Measure the host time of a call that moves no bytes: 1,000 pages with empty fragments."""
    pages = Pages.allocate(1001, [[0, 0]] * 80)
    ids = np.arange(1, 1001, dtype=np.int32)
    pairs = np.stack([ids, np.random.default_rng(0).permutation(ids)], 1)
    other = Pages.allocate(1001, [[0, 0]] * 80)
    page_copy = PageCopy(pages, other)
    (seconds,) = median_times(lambda: page_copy.copy(pairs), rounds=51)
    yield Result("copy_blocks, checks of 1,000 page pairs, 80 layers", "us", seconds * 1e6)


def all_results() -> Iterator[Result]:
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        for rate in host_rates(NUM_BYTES, (4096, 16 * 1024, 64 * 1024, 1 << 20)):
            kib = rate.fragment // 1024
            name = f"copy_blocks, host to host, {kib} KiB scattered, {count} threads"
            bar = 0.8 * rate.contiguous_gb_per_s if kib == 16 else None
            rates = rate.gb_per_s, rate.contiguous_gb_per_s
            yield Result(name, "GB/s", *rates, "one memcpy", bar, True)
        yield from indexing(16 * 1024, count)
    yield from host_cost()
