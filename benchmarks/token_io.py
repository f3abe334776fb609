# SPDX-License-Identifier: Apache-2.0
"""Measures writing and gathering tokens on the CPU with one thread, beside indexing in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.measure import Result, median_times, one_thread
from kvcache import ops
from kvcache.worker import KVStorage

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


def one_case(layout: str, dtype: torch.dtype) -> Iterator[Result]:
    """Measure writing and gathering bfloat16 tokens, fp8 caches with one scale for all heads."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_TOKENS, HEADS, HEAD_SIZE)
    tokens = [torch.randn(shape, generator=generator).bfloat16() for _ in "kv"]
    caches, theirs = make_caches(layout, dtype), make_caches(layout, dtype)
    slots = written_slots(generator)
    back, answer = ([torch.empty_like(t) for t in tokens] for _ in range(2))
    is_fp8, largest = dtype != torch.bfloat16, torch.finfo(dtype).max
    scale = torch.tensor([0.37])
    scales = (scale, scale) if is_fp8 else ()
    # The peer indexes slots or, in the layout HND, blocks and offsets. It indexes bytes of fp8 caches.
    at = (slots,) if layout == "NHD" else (slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    flat = [cache.view(-1, HEADS, HEAD_SIZE) if layout == "NHD" else cache for cache in theirs]
    flat = [each.view(torch.uint8) if is_fp8 else each for each in flat]

    def peer_write() -> None:
        for cache, token in zip(flat, tokens, strict=True):
            if is_fp8:
                scaled = (token.float() / scale).clamp(-largest, largest)
                token = scaled.to(dtype).view(torch.uint8)
            cache[at] = token

    def peer_gather() -> None:
        for cache, out in zip(flat, answer, strict=True):
            if is_fp8:
                out.copy_(cache[at].view(dtype).float() * scale)
            elif layout == "NHD":
                torch.index_select(cache, 0, slots, out=out)
            else:
                out.copy_(cache[at])

    seconds = median_times(
        lambda: ops.write_kv(*tokens, *caches, slots, *scales),
        peer_write,
        lambda: ops.gather_kv(*caches, slots, *back, *scales),
        peer_gather,
    )
    for ours, wanted in zip([*caches, *back], [*theirs, *answer], strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
    payload = sum(token.numel() * token.element_size() for token in tokens)
    write, peer_write_rate, gather, peer_gather_rate = (payload / s / 1e9 for s in seconds)
    case = f"of {NUM_TOKENS} tokens, {layout}, bf16"
    case += f" in {str(dtype).removeprefix('torch.')}" if is_fp8 else ""
    yield Result(f"write {case}", "GB/s", write, peer_write_rate, PEER, higher_is_better=True)
    yield Result(f"gather {case}", "GB/s", gather, peer_gather_rate, PEER, higher_is_better=True)


def of_format(name: str) -> Iterator[Result]:
    """Measure bfloat16 tokens in a format with one scale per token and head."""
    storage = KVStorage(NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, kv_format=name)
    generator, largest = torch.Generator().manual_seed(0), 127 if name.startswith("int8") else 448
    key, value = torch.randn(2, NUM_TOKENS, HEADS, HEAD_SIZE, generator=generator).bfloat16()
    slots = written_slots(generator)
    caches = [storage.key_cache(0), storage.value_cache(0)]
    theirs = [
        torch.zeros(NUM_BLOCKS * BLOCK_SIZE, *each.shape[2:]).to(each.dtype) for each in caches
    ]
    scales = [torch.zeros(NUM_BLOCKS * BLOCK_SIZE, HEADS, 1) for _ in caches]
    out = torch.empty_like(torch.stack([key, value]))

    def peer_write() -> None:
        for token, cache, scale in zip((key, value), theirs, scales):
            token = token.float()
            scales_of_tokens = (token.abs().amax(-1, keepdim=True) / largest).clamp_min(1e-6)
            token = token * scales_of_tokens.reciprocal()
            if largest == 127:
                token = token + 0.5 * token.sign()
            cache.view(torch.uint8)[slots] = token.to(cache.dtype).view(torch.uint8)
            scale[slots] = scales_of_tokens

    def peer_gather() -> None:
        for cache, scale, found in zip(theirs, scales, out):
            found.copy_(cache.view(torch.uint8)[slots].view(cache.dtype).float() * scale[slots])

    back = [None]

    def gather() -> None:
        back[0] = storage.gather(0, slots)

    write, peer_write_s, gather_s, peer_gather_s = median_times(
        lambda: storage.write(0, key, value, slots), peer_write, gather, peer_gather
    )
    assert all(map(torch.equal, back[0], out))
    payload = 2 * key.numel() * key.element_size() / 1e9
    case = f"of {NUM_TOKENS} tokens, bf16 in {name}"
    for what, ours, peers in (("write", write, peer_write_s), ("gather", gather_s, peer_gather_s)):
        yield Result(
            f"{what} {case}", "GB/s", payload / ours, payload / peers, PEER, higher_is_better=True
        )


def norm_rope_write() -> Iterator[Result]:
    """Measure `rope_write_kv` with 32 query heads, beside its steps in torch."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(NUM_TOKENS // 8, 32 + 2 * HEADS, HEAD_SIZE, generator=generator).bfloat16()
    query, key, value = qkv.split([32, HEADS, HEADS], dim=1)
    angles = torch.outer(torch.arange(4096.0), 1e4 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    weight, positions = torch.ones(HEAD_SIZE).bfloat16(), torch.arange(len(qkv))
    slots, out = written_slots(generator)[: len(qkv)], torch.empty_like(query)
    caches, theirs = make_caches("NHD", torch.bfloat16), make_caches("NHD", torch.bfloat16)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.rms_norm(x, (HEAD_SIZE,), weight, 1e-6).float()
        (a, b), (cos, sin) = x.chunk(2, -1), cos_sin[positions].unsqueeze(1).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()

    def peer() -> None:
        rotated(query)
        for cache, token in zip(theirs, (rotated(key), value)):
            cache.view(-1, HEADS, HEAD_SIZE)[slots] = token

    given = positions, query, key, value, cos_sin, *caches, slots
    options = {"q_weight": weight, "k_weight": weight, "query_out": out}
    ours, peer_s = median_times(lambda: ops.rope_write_kv(*given, **options), peer)
    assert (caches[0].float() - theirs[0].float()).abs().max() < 0.1
    name = f"norm, rope and write of {len(qkv)} tokens, 32 and {HEADS} heads, bf16"
    yield Result(name, "us/token", ours * 1e6 / len(qkv), peer_s * 1e6 / len(qkv), "torch")


def all_results() -> Iterator[Result]:
    bf16, e4m3, e5m2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
    with one_thread():
        for layout, dtype in (
            *(("NHD", bf16), ("HND", bf16)),
            *(("NHD", e4m3), ("HND", e4m3), ("NHD", e5m2)),
        ):
            yield from one_case(layout, dtype)
        for name in ("fp8_e4m3_token_head", "int8_token_head"):
            yield from of_format(name)
        yield from norm_rope_write()
