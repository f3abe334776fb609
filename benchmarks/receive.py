# SPDX-License-Identifier: Apache-2.0
"""Measures the conversion of received bf16 blocks to the local layout on the CPU with one thread."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.measure import Result, median_times, one_thread
from kvcache import transfer

BLOCKS, HEADS, HEAD_SIZE = 512, 8, 128


def plain(cache: torch.Tensor, ids: torch.Tensor, ratio: int, local_hnd: bool) -> None:
    """Run the baseline, which copies the blocks, permutes the copy, and copies it back."""
    _, size, heads, head_size = cache.shape
    blocks = cache.index_select(0, ids)
    received = (blocks.transpose(1, 2) if local_hnd else blocks).reshape(
        -1, ratio, heads, size // ratio, head_size
    )
    cache.index_copy_(0, ids, received.transpose(2, 3).reshape(-1, size, heads, head_size))


def scattered_blocks(block_size: int, layout: str, ratio: int) -> Iterator[Result]:
    order = (HEADS, block_size) if layout == "HND" else (block_size, HEADS)
    cache = torch.randn(2 * BLOCKS, *order, HEAD_SIZE).bfloat16()
    cache = cache.transpose(1, 2) if layout == "HND" else cache
    ids = torch.randperm(2 * BLOCKS)[:BLOCKS]
    copied = cache[ids].clone()
    target = torch.empty_like(copied)
    size = block_size // ratio

    def ours() -> None:
        transfer.permute_received_blocks(cache, ids, remote_block_size=size)

    def theirs() -> None:
        plain(cache, ids, ratio, layout == "HND")

    same = cache.clone()
    ours()
    plain(same, ids, ratio, layout == "HND")
    assert torch.equal(cache, same)
    taken, peer, memcpy = median_times(ours, theirs, lambda: target.copy_(copied))
    payload = copied.numel() * copied.element_size() / 1e9
    name, rate = f"received {layout}, block {block_size}, remote {size} HND", payload / taken
    plainly = "index_select, permute, index_copy_"
    yield Result(name, "GB/s", rate, payload / peer, plainly, 4, True)
    name = f"{name}, beside one copy of as many bytes"
    yield Result(name, "GB/s", rate, payload / memcpy, "torch copy_", None, True)


def all_results() -> Iterator[Result]:
    torch.manual_seed(0)
    with one_thread():
        for block_size in (16, 32, 64, 128):
            yield from scattered_blocks(block_size, "HND", 2)
            yield from scattered_blocks(block_size, "NHD", 2)
            yield from scattered_blocks(block_size, "NHD", 1)
