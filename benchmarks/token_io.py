# SPDX-License-Identifier: Apache-2.0
"""Measures writing and gathering tokens on the CPU with one thread, compared with indexing in
torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.measure import Result, median_times
from kvcache import ops

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 1024, 16, 8, 128
NUM_TOKENS = 8192
PEER = "torch indexing"


def make_caches(layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    order = (BLOCK_SIZE, HEADS) if layout == "NHD" else (HEADS, BLOCK_SIZE)
    caches = [torch.zeros(NUM_BLOCKS, *order, HEAD_SIZE, dtype=dtype) for _ in "kv"]
    return caches if layout == "NHD" else [cache.transpose(1, 2) for cache in caches]


def written_slots(generator: torch.Generator) -> torch.Tensor:
    """Return distinct slots in random order.

    The null block is excluded because writes to it are dropped.
    """
    return (
        torch.randperm((NUM_BLOCKS - 1) * BLOCK_SIZE, generator=generator)[:NUM_TOKENS] + BLOCK_SIZE
    )


def plain(layout: str) -> Iterator[Result]:
    """Measure writing and gathering bfloat16 tokens without conversion."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_TOKENS, HEADS, HEAD_SIZE)
    tokens = [torch.randn(shape, generator=generator).bfloat16() for _ in "kv"]
    caches, theirs = make_caches(layout, torch.bfloat16), make_caches(layout, torch.bfloat16)
    slots = written_slots(generator)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    back, answer = ([torch.empty_like(t) for t in tokens] for _ in range(2))

    def peer_write() -> None:
        for cache, token in zip(theirs, tokens, strict=True):
            if layout == "NHD":
                cache.view(-1, HEADS, HEAD_SIZE)[slots] = token
            else:
                cache[blocks, offsets] = token

    def peer_gather() -> None:
        for cache, out in zip(theirs, answer, strict=True):
            if layout == "NHD":
                torch.index_select(cache.view(-1, HEADS, HEAD_SIZE), 0, slots, out=out)
            else:
                out.copy_(cache[blocks, offsets])

    write, written, gather, gathered = median_times(
        lambda: ops.write_kv(*tokens, *caches, slots),
        peer_write,
        lambda: ops.gather_kv(*caches, slots, *back),
        peer_gather,
    )
    assert all(torch.equal(a, b) for a, b in zip(caches, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(back, answer, strict=True))
    yield from lines(f"{layout}, bf16", tokens, write, written, gather, gathered)


def fp8(layout: str, dtype: torch.dtype) -> Iterator[Result]:
    """Measure the conversion from bfloat16 to fp8 and back, with one scale for all heads."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_TOKENS, HEADS, HEAD_SIZE)
    tokens = [torch.randn(shape, generator=generator).bfloat16() for _ in "kv"]
    caches, theirs = make_caches(layout, dtype), make_caches(layout, dtype)
    slots = written_slots(generator)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    scale, largest = torch.tensor([0.37]), torch.finfo(dtype).max
    back = [torch.empty_like(t) for t in tokens]
    answer = []

    def peer_write() -> None:
        for cache, token in zip(theirs, tokens, strict=True):
            scaled = (token.float() / scale).clamp(-largest, largest)
            cache.view(torch.uint8)[blocks, offsets] = scaled.to(dtype).view(torch.uint8)

    def peer_gather() -> None:
        answer.clear()
        for cache in theirs:
            found = cache.view(torch.uint8)[blocks, offsets].view(dtype)
            answer.append((found.float() * scale).bfloat16())

    write, written, gather, gathered = median_times(
        lambda: ops.write_kv(*tokens, *caches, slots, scale, scale),
        peer_write,
        lambda: ops.gather_kv(*caches, slots, *back, scale, scale),
        peer_gather,
    )
    for ours, wanted in zip([*caches, *back], [*theirs, *answer], strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
    name = str(dtype).removeprefix("torch.")
    yield from lines(f"{layout}, bf16 in {name}", tokens, write, written, gather, gathered)


def lines(case: str, tokens: list[torch.Tensor], *seconds: float) -> Iterator[Result]:
    """Convert the seconds of both writes and both gathers (kvcache, baseline) to GB/s of K and V."""
    payload = sum(token.numel() * token.element_size() for token in tokens)
    write, peer_write, gather, peer_gather = (payload / s / 1e9 for s in seconds)
    name = f"of {NUM_TOKENS} tokens, {case}"
    yield Result(f"write {name}", "GB/s", write, peer_write, PEER, higher_is_better=True)
    yield Result(f"gather {name}", "GB/s", gather, peer_gather, PEER, higher_is_better=True)


def all_results() -> Iterator[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for layout in ("NHD", "HND"):
            yield from plain(layout)
        yield from fp8("NHD", torch.float8_e4m3fn)
        yield from fp8("HND", torch.float8_e4m3fn)
        yield from fp8("NHD", torch.float8_e5m2)
    finally:
        torch.set_num_threads(threads)
