# SPDX-License-Identifier: Apache-2.0
"""Operator cases that run every kernel which has a barrier, wait or fence.

`CASES` contains the cases of `op_cases`, and small cases for other instantiations of the kernels.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import op_cases
from kvcache import ops


def _random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).byte()


def permute(num_heads: int, row_bytes: int, ratio: int, device: str, size: int):
    """Permute blocks of 32 tokens. The widest vectors have as many bytes as a row, at most 16."""
    cache = _random_bytes(4 * size, 32, num_heads, row_bytes)
    ids = torch.arange(2 * size, dtype=torch.int32).view(-1, max(1, -ratio)) * 2
    remote = 32 // ratio if ratio > 0 else 32 * -ratio
    ops.permute_blocks_(cache, torch.tensor([0]), ids, remote, True)
    return [cache]


def run_op(name: str, tokens: list, caches: list, scales: list, size: int) -> None:
    """Call an op with 12 tokens per block in K and V."""
    num_tokens = 12 * size
    if "gather_context" in name:
        tables = torch.arange(2 * size, dtype=torch.int32).flip(0).view(2, -1) % size
        lens = torch.tensor([0, 5, num_tokens - 1], dtype=torch.int32)
        starts = torch.tensor([3, 0], dtype=torch.int32)
        scales = scales or [None, None]
        positions = (torch.arange(num_tokens) * 5 % 12 - 1).int() if "sparse" in name else None
        ops.gather_context(*caches, tables, lens, *tokens, *scales, starts, positions)
        return
    slots = torch.arange(num_tokens) * 5 % (16 * size)
    if name == "write_kv":
        ops.write_kv(*tokens, *caches, slots, *scales)
    else:
        ops.gather_kv(*caches, slots, *tokens, *scales)


def tokens(name: str, element: torch.dtype, page: torch.dtype, width: int, device: str, size: int):
    """Write or gather tokens with one head of this width."""
    key = [_random_bytes(12 * size, 1, width).float().to(element) for _ in range(2)]
    caches = [_random_bytes(size, 16, 1, width).float().to(page) for _ in range(2)]
    scales = [torch.tensor([0.75])] * 2 if element != page else []
    run_op(name, key, caches, scales, size)
    return [each.view(torch.uint8) for each in (*key, *caches)]


def groups(
    name: str,
    element: torch.dtype,
    page: torch.dtype,
    width: int,
    device: str,
    size: int,
    scale: torch.dtype = torch.float32,
):
    """Write or gather tokens with two groups per head, whose scales are in the cache."""
    codes = 2 if page == torch.uint8 else 1
    key = [(_random_bytes(12 * size, 2, 2 * width).float() - 128).to(element) for _ in range(2)]
    caches = [_random_bytes(size, 16, 2, 2 * width // codes) for _ in range(2)]
    # NaN has several codes of fp8.
    caches = [each.float().to(page) if page in _FP8 else each.view(page) for each in caches]
    scales = [torch.full((size, 16, 2, 2), 0.75).to(scale) for _ in range(2)]
    run_op(name, key, caches, scales, size)
    return [each.view(torch.uint8) for each in (*key, *caches, *scales)]


def rope(
    element: torch.dtype,
    page: torch.dtype,
    in_groups: bool,
    device: str,
    size: int,
    scale: torch.dtype = torch.float32,
):
    """Norm, rotate and write tokens whose heads end within a warp's second round of elements."""
    num_tokens, head_size, codes = 6 * size, 40, 2 if page == torch.uint8 else 1
    query, key, value = (
        (_random_bytes(num_tokens, heads, head_size).float() - 128).to(element)
        for heads in (3, 2, 2)
    )
    caches = [_random_bytes(size, 16, 2, head_size // codes).float().to(page) for _ in "kv"]
    scales: list = [None, None]
    if in_groups:
        scales = [torch.full((size, 16, 2, 2), 0.75).to(scale) for _ in "kv"]
    elif page != element:
        scales = [torch.tensor([0.75]), torch.tensor([0.5, 0.25])]
    angles = torch.outer(torch.arange(8.0), 0.5 ** torch.arange(18))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(element)
    weight, outs = torch.linspace(0.5, 1.5, head_size), [torch.zeros_like(x) for x in (query, key)]
    positions, slots = torch.arange(num_tokens) % 8, torch.arange(num_tokens) * 5 % (16 * size)
    given = [
        positions.int() if in_groups else positions,
        query,
        key,
        value,
        cos_sin,
        *caches,
        slots,
    ]
    is_neox = element != torch.float16
    weights = weight.to(element), weight
    ops.rope_write_kv(*given, *scales, 0, is_neox, False, *weights, 1e-6, *outs)
    written = (*outs, *caches, *(each for each in scales if in_groups))
    return [each.view(torch.uint8) for each in written]


def slots(by_request: bool, dtype: torch.dtype, device: str, size: int):
    groups = torch.tensor([[0, 32, 16, 1, 0, 1, 0, 0]])
    tables = torch.arange(32 * 8, dtype=torch.int32)
    start = torch.arange(0, 57, 7, dtype=torch.int32)
    positions = torch.arange(56) * 9 % 512
    out = torch.full((1, 60), -7, dtype=dtype)
    rows = torch.arange(8 if by_request else 56, dtype=torch.int32) % 8
    query_start = start if by_request else None
    ops.slot_mapping(tables, groups, 8, rows, query_start, positions, None, out)
    return [out]


CASES = {name: case for name, case in op_cases.CASES.items() if "copy engine" not in name}
CASES |= {
    f"permute_blocks_ rows of {row_bytes} bytes, NHD of {32 * max(1, -ratio)}": partial(
        permute, 8, row_bytes, ratio
    )
    for row_bytes in (8, 4, 2, 1)
    for ratio in (1, -2)
}
CASES["permute_blocks_ 32 heads, NHD of 32"] = partial(permute, 32, 256, 1)
CASES |= {
    f"slot_mapping {dtype}, by request {by_request}": partial(slots, by_request, dtype)
    for dtype in (torch.int32, torch.int64)
    for by_request in (True, False)
}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)
_FORMS = [
    (element, page, width)
    for element in _ELEMENTS
    for page in (*_FP8, torch.int8)
    for width in (16, 1)
]
_FORMS += [(torch.bfloat16, torch.bfloat16, width) for width in (8, 4, 2, 1)]
_FORMS.append((_FP8[0], _FP8[0], 1))
_OPS = ("write_kv", "gather_kv", "gather_context")
CASES |= {
    f"{name} {element} {page} {width}": partial(tokens, name, element, page, width)
    for element, page, width in _FORMS
    for name in _OPS
}
CASES |= {
    f"{name} {element} {page} in groups of {width}": partial(groups, name, element, page, width)
    for element in _ELEMENTS
    for page in (*_FP8, torch.int8, torch.uint8)
    for width in (64, 2)
    for name in _OPS
}
CASES |= {
    f"{name} {element} nvfp4 in groups of {width}": partial(
        groups, name, element, torch.uint8, width, scale=_FP8[0]
    )
    for element in _ELEMENTS
    for width in (16, 2)
    for name in _OPS
}
CASES |= {
    f"sparse gather_context {page}": partial(
        case, "sparse gather_context", torch.bfloat16, page, 64
    )
    for case, page in ((tokens, torch.bfloat16), (groups, _FP8[0]))
}
CASES |= {
    f"rope_write_kv {element} {page}{' in groups' * in_groups}": partial(
        rope, element, page, in_groups
    )
    for element, page, in_groups in (
        (torch.float32, torch.float32, False),
        (torch.float16, torch.uint8, True),
        (torch.float16, torch.float8_e5m2, False),
        (torch.bfloat16, torch.int8, False),
        (torch.bfloat16, torch.int8, True),
        (torch.bfloat16, torch.float8_e4m3fn, False),
        (torch.bfloat16, torch.float8_e4m3fn, True),
    )
} | {"rope_write_kv nvfp4": partial(rope, torch.bfloat16, torch.uint8, True, scale=_FP8[0])}


def size_of(name: str) -> int:
    """Return a size at which each warp repeats its loop over chunks, and each thread its loops."""
    return 9 if "host" in name else 2  # 288 chunks, for 128 warps
