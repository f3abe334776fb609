# SPDX-License-Identifier: Apache-2.0
"""Calls each op once on seeded random inputs, so that results can be compared between devices.

A case takes a device and a size factor relative to the smallest case, and returns tensors on the CPU.
The stages first-contact and checks share these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvcache import ops
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages

Case = Callable[[str, int], list[torch.Tensor]]
_HEADS, _HEAD_SIZE, _BLOCK_SIZE = 8, 128, 16


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _int32(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def _tables(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables and `groups` of two groups, with 32 and 16 columns and blocks of 16 and 32
    tokens.
    """
    columns = (32, 16)
    groups = [[0, 32, 16, 1, 0, 1, 0, 0], [32 * num_rows, 16, 32, 1, 0, 1, 0, 1]]
    entries = torch.randint(1, 1 << 20, (num_rows * sum(columns),), generator=_seeded())
    return entries.int(), torch.tensor(groups)


def slot_mapping(device: str, size: int) -> list[torch.Tensor]:
    """Map requests with 7 tokens each. One request is padding."""
    num_rows = 8 * size
    tables, groups = _tables(num_rows)
    rows = _int32(torch.randperm(num_rows, generator=_seeded()))
    rows[1] = -1
    start = _int32(torch.arange(num_rows + 1) * 7)
    positions = torch.randint(0, 512, (7 * num_rows,), generator=_seeded())
    out = torch.full((2, 7 * num_rows + 9), -7, device=device)
    ops.slot_mapping(
        tables.to(device), groups, num_rows, rows.to(device), start.to(device),
        positions.to(device), None, out,
    )  # fmt: skip
    return [out.cpu()]


def update_block_tables(device: str, size: int) -> list[torch.Tensor]:
    """Write segments of 1 to 5 entries. Segments start 8 entries apart."""
    count = 64 * size
    lengths = torch.randint(1, 6, (count,), generator=_seeded())
    starts = torch.arange(count) * 8
    at = 1 + 3 * count + torch.cumsum(lengths, 0) - lengths
    places = torch.stack([starts, lengths, at], 1).flatten()
    values = torch.arange(int(lengths.sum())) + 10_000
    packed = _int32(torch.cat([torch.tensor([count]), places, values])).to(device)
    tables = _int32(torch.arange(8 * count)).to(device)
    ops.update_block_tables(tables, packed)
    return [tables.cpu()]


def gather_block_tables(device: str, size: int) -> list[torch.Tensor]:
    """Gather rows in random order. One row is padding."""
    num_rows = 8 * size
    tables, groups = _tables(num_rows)
    order = _int32(torch.randperm(num_rows, generator=_seeded()))
    order[2] = -1
    out = torch.full_like(tables, -7).to(device)
    computed = _int32(torch.randint(0, 500, (num_rows,), generator=_seeded()))
    ops.gather_block_tables(
        tables.to(device), groups, num_rows, order.to(device), computed.to(device), 512, out
    )
    return [out.cpu()]


def attention_metadata(device: str, size: int) -> list[torch.Tensor]:
    """Build metadata for requests with 1 to 5 tokens.

    One request is padding, and the outputs have space for two more requests.
    """
    num_reqs = 8 * size
    tables, groups = _tables(num_reqs)
    groups[1, 6] = 100  # sliding window, in tokens
    rows = _int32(torch.randperm(num_reqs, generator=_seeded()))
    rows[3] = -1
    query_lens = _int32(torch.randint(1, 6, (num_reqs,), generator=_seeded()))
    seq_lens = _int32(torch.randint(6, 513, (num_reqs,), generator=_seeded()))
    counts = torch.tensor([[32], [16]], dtype=torch.int32).expand(2, num_reqs).contiguous()
    room = num_reqs + 2
    shapes = [(room + 1,), (2, room), (room * 48,), (2, room + 1), (room * 48,), (2, room)]
    outs = [torch.full(shape, -7, dtype=torch.int32, device=device) for shape in shapes]
    there = [each.to(device) for each in (rows, query_lens, seq_lens, counts)]
    ops.attention_metadata(tables.to(device), groups, num_reqs, *there, 512, *outs)
    return [out.cpu() for out in outs]


def token_io(
    name: str, dtype: torch.dtype, layout: str, device: str, size: int, in_groups: bool = False
) -> list[torch.Tensor]:
    """Run `write_kv`, `rope_write_kv`, `gather_kv` or `gather_context`. Every seventh token has no slot.
    `in_groups`: each token and head has a scale in the cache, and uint8 holds int4.
    """
    num_tokens = 24 * size
    num_blocks = 2 * num_tokens // _BLOCK_SIZE + 1
    order = (_BLOCK_SIZE, _HEADS) if layout == "NHD" else (_HEADS, _BLOCK_SIZE)
    caches = []
    for sign in (1, -1):  # K and V differ
        shape = (num_blocks, *order, _HEAD_SIZE // (2 if dtype == torch.uint8 else 1))
        drawn = torch.randn(shape, generator=_seeded()).mul(sign).bfloat16()
        cache = (drawn if dtype.is_floating_point else drawn.abs() * 16).to(dtype).to(device)
        caches.append(cache if layout == "NHD" else cache.transpose(1, 2))
    shape = (num_tokens, _HEADS, _HEAD_SIZE)
    tokens = [
        torch.randn(shape, generator=_seeded()).mul(sign).bfloat16().to(device) for sign in (1, -1)
    ]
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, generator=_seeded())[:num_tokens]
    slots[::7] = -1
    scale = torch.linspace(0.2, 0.9, _HEADS).to(device)
    scales = [] if dtype == torch.bfloat16 else [scale, scale]
    if in_groups:
        scales = [scale.repeat(num_blocks, _BLOCK_SIZE, 1).unsqueeze(3) for _ in "kv"]
    written = [*caches, *(scales if in_groups else ())]
    if name == "write_kv":
        ops.write_kv(*tokens, *caches, slots.to(device), *scales)
        return [each.cpu().contiguous().view(torch.uint8) for each in written]
    if name == "rope_write_kv":
        query, positions = tokens[1].clone(), (torch.arange(num_tokens) % 64).to(device)
        angles = torch.outer(torch.arange(64.0), 0.8 ** torch.arange(32))
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
        weights = [torch.linspace(0.5, 2, _HEAD_SIZE).bfloat16().to(device)] * 2
        both = scales or [None, None]
        given = [positions, query, *tokens, cos_sin, *caches, slots.to(device), *both]
        ops.rope_write_kv(*given, 0, True, False, *weights)
        return [each.cpu().contiguous().view(torch.uint8) for each in (query, *written)]
    if name == "gather_context":
        tables = _int32(torch.arange(2 * (num_blocks // 2)).view(2, -1).flip(1)).to(device)
        lens = _int32(torch.tensor([0, num_tokens // 3, num_tokens])).to(device)
        ops.gather_context(*caches, tables, lens, *tokens, *(scales or [None, None]))
        return [token.cpu().view(torch.uint8) for token in tokens]
    ops.gather_kv(*caches, slots.to(device), *tokens, *scales)
    return [token.cpu().view(torch.uint8) for token in tokens]


def _filled(device: str, size: int, fragment: int) -> Pages:
    pages = Pages.allocate(16 * size + 1, [[fragment, fragment]] * 2, device=device)
    shape = (pages.memory.numel() // 8,)
    drawn = torch.randint(-(2**63), 2**63 - 1, shape, generator=_seeded())
    pages.memory.copy_(drawn.view(torch.uint8))
    return pages


def _pairs(num_blocks: int) -> np.ndarray:
    """Return pairs of pages to copy. No page is both read and written."""
    ids = torch.randperm(num_blocks - 1, generator=_seeded())[: (num_blocks - 1) // 2 * 2] + 1
    return ids.view(-1, 2).int().numpy()


def copy_within(fragment: int, ids_there: bool, device: str, size: int) -> list[torch.Tensor]:
    """Copy pages within one memory and clear two pages. Ids are on the device or on the CPU."""
    pages = _filled(device, size, fragment)
    pairs = _pairs(pages.num_blocks)
    pairs[:2, 0] = -1
    PageCopy(pages, pages).copy(torch.from_numpy(pairs).to(device) if ids_there else pairs)
    return [pages.memory.cpu()]


def copy_host(direction: str, engine: int, device: str, size: int) -> list[torch.Tensor]:
    """Copy pages to or from pinned host memory."""
    pages = _filled(device, size, 4096)
    num_blocks = pages.num_blocks
    host = pages.on_host(num_blocks)
    host.memory.copy_(
        torch.randint(0, 256, host.memory.shape, generator=_seeded(), dtype=torch.uint8)
    )
    source, target = (pages, host) if direction == "out" else (host, pages)
    stream = torch.cuda.Stream() if device == "cuda" else None  # batched copies need a stream
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        PageCopy(source, target).copy(_pairs(num_blocks), engine=engine)
    if stream is not None:
        stream.synchronize()
    return [target.memory.cpu().clone()]


def permute_blocks(layout: str, ratio: int, device: str, size: int) -> list[torch.Tensor]:
    """Permute received blocks of 32 tokens, from remote blocks of equal, smaller or larger size."""
    num_blocks, block_size = 8 * size, 32
    order = (_HEADS, block_size) if layout == "HND" else (block_size, _HEADS)
    shape = (num_blocks, *order, _HEAD_SIZE)
    drawn = torch.randn(shape, generator=_seeded()).bfloat16().to(device)
    cache = drawn.transpose(1, 2) if layout == "HND" else drawn
    remote = block_size // ratio if ratio > 0 else block_size * -ratio
    ids = torch.randperm(num_blocks, generator=_seeded())[: num_blocks // 2].int()
    indices = ids.view(-1, max(1, -ratio)).contiguous()
    ops.permute_blocks_(cache, torch.tensor([0]), indices.to(device), remote, True)
    return [drawn.cpu().view(torch.uint8)]


_BF16, _E4M3, _E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2

CASES: dict[str, Case] = {
    "slot_mapping": slot_mapping,
    "update_block_tables": update_block_tables,
    "gather_block_tables": gather_block_tables,
    "attention_metadata": attention_metadata,
    "write_kv bf16 NHD": partial(token_io, "write_kv", _BF16, "NHD"),
    "write_kv bf16 HND": partial(token_io, "write_kv", _BF16, "HND"),
    "write_kv e4m3 NHD": partial(token_io, "write_kv", _E4M3, "NHD"),
    "write_kv e5m2 HND": partial(token_io, "write_kv", _E5M2, "HND"),
    "gather_kv bf16 HND": partial(token_io, "gather_kv", _BF16, "HND"),
    "gather_kv e4m3 NHD": partial(token_io, "gather_kv", _E4M3, "NHD"),
    "write_kv e4m3 per token and head": partial(token_io, "write_kv", _E4M3, "NHD", in_groups=True),
    "write_kv int8 per token and head, HND": partial(
        token_io, "write_kv", torch.int8, "HND", in_groups=True
    ),
    "write_kv int4 per token and head": partial(
        token_io, "write_kv", torch.uint8, "NHD", in_groups=True
    ),
    "gather_kv e4m3 per token and head": partial(
        token_io, "gather_kv", _E4M3, "NHD", in_groups=True
    ),
    "gather_kv int4 per token and head": partial(
        token_io, "gather_kv", torch.uint8, "NHD", in_groups=True
    ),
    "rope_write_kv bf16": partial(token_io, "rope_write_kv", _BF16, "NHD"),
    "rope_write_kv e4m3 per token and head": partial(
        token_io, "rope_write_kv", _E4M3, "HND", in_groups=True
    ),
    "gather_context bf16": partial(token_io, "gather_context", _BF16, "NHD"),
    "gather_context e4m3 per token and head": partial(
        token_io, "gather_context", _E4M3, "NHD", in_groups=True
    ),
    "copy_blocks 4 KiB": partial(copy_within, 4096, False),
    "copy_blocks 4 KiB, ids on the device": partial(copy_within, 4096, True),
    "copy_blocks 24 bytes": partial(copy_within, 24, False),
    "copy_blocks to the host, kernel": partial(copy_host, "out", ops.KERNEL),
    "copy_blocks from the host, kernel": partial(copy_host, "in", ops.KERNEL),
    "copy_blocks to the host, copy engine": partial(copy_host, "out", ops.COPY_ENGINE),
    "copy_blocks from the host, copy engine": partial(copy_host, "in", ops.COPY_ENGINE),
    "permute_blocks_ HND of 16": partial(permute_blocks, "HND", 2),
    "permute_blocks_ NHD of 32": partial(permute_blocks, "NHD", 1),
    "permute_blocks_ NHD of 64": partial(permute_blocks, "NHD", -2),
    "permute_blocks_ NHD of 128": partial(permute_blocks, "NHD", -4),
}
