# SPDX-License-Identifier: Apache-2.0
"""Token I/O between fp8 or int8 caches and tokens of a wider dtype, compared with PyTorch's
conversions on the CPU.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend
from tests.ops.test_token_io_op import (
    LAYOUTS,
    arguments,
    bits,
    fp8_arguments,
    make_cache,
    random_tensor,
    reference_gather,
    reference_write,
    to_device,
)

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
WIDE = [torch.float32, torch.float16, torch.bfloat16]
each_format = pytest.mark.parametrize("fp8", FORMATS[:2], ids=str)
each_wide_dtype = pytest.mark.parametrize("dtype", WIDE, ids=str)


def quantize(x, scale, fp8):
    if fp8 == torch.int8:  # ties away from zero; NaN becomes -128
        quotient = x.float() / scale
        rounded = torch.trunc(quotient + torch.copysign(torch.tensor(0.5), quotient))
        return rounded.nan_to_num(-128.0, 127.0, -128.0).clamp(-128, 127).to(fp8)
    largest = torch.finfo(fp8).max
    return (x.float() / scale).clamp(-largest, largest).to(fp8)


def dequantize(x, scale, dtype):
    return (x.float() * scale).to(dtype)


def same(got, want):
    """Compare bit patterns, with all NaNs considered equal."""
    got = got.cpu()
    if not want.is_floating_point():
        return torch.equal(got, want)
    numbers = ~want.isnan()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    got_bits, want_bits = (x.contiguous().view(integers)[numbers] for x in (got, want))
    return torch.equal(got.isnan(), ~numbers) and torch.equal(got_bits, want_bits)


@st.composite
def cases(draw):
    fp8, dtype = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(WIDE))
    layers = draw(st.sampled_from([(), (), (1,), (2,)]))
    num_blocks, block_size, heads = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 3)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[: draw(st.integers(0, 9))]
    slots[torch.rand(len(slots), generator=generator) < 0.2] = -1
    tokens, caches, scales = [], [], []
    for _ in "kv":
        head_size = draw(st.sampled_from([1, 3, 5, 20, 64]))
        layout = draw(st.sampled_from(LAYOUTS))
        shape = (*layers, len(slots), heads, head_size)
        ordinary = torch.randn(shape, generator=generator).to(dtype)
        anything = random_tensor(shape, dtype, generator)
        tokens.append(torch.where(torch.rand(shape, generator=generator) < 0.7, ordinary, anything))
        caches.append(
            make_cache((*layers, num_blocks, block_size, heads, head_size), fp8, layout, generator)
        )
        per_layer = draw(st.sampled_from([1, heads]))
        exponents = torch.randn((*layers, per_layer), generator=generator) * 4
        scales.append(torch.exp2(exponents))
    return tokens, caches, slots, scales


def broadcast(scale):
    """Reshape scales [..., 1 or heads] so that they broadcast to tokens [..., n, heads, head_size]."""
    return scale[..., None, :, None]


@each_backend
@given(case=cases())
def test_tokens_are_divided_by_their_scale_and_rounded_to_fp8(backend, case):
    tokens, caches, slots, scales = case
    moved = [to_device(cache, backend.device) for cache in caches]
    backend.ops.write_kv(
        *(to_device(t, backend.device) for t in tokens),
        *moved,
        slots.to(backend.device),
        *(scale.to(backend.device) for scale in scales),
    )
    for got, token, cache, scale in zip(moved, tokens, caches, scales):
        wanted = quantize(token, broadcast(scale), cache.dtype).view(torch.uint8)
        wanted = reference_write(wanted, cache.view(torch.uint8), slots).view(cache.dtype)
        assert same(got, wanted)


@each_backend
@given(case=cases())
def test_fp8_is_multiplied_by_its_scale_and_rounded_to_the_tokens_dtype(backend, case):
    tokens, caches, slots, scales = case
    moved = [to_device(token, backend.device) for token in tokens]
    backend.ops.gather_kv(
        *(to_device(cache, backend.device) for cache in caches),
        slots.to(backend.device),
        *moved,
        *(scale.to(backend.device) for scale in scales),
    )
    for got, cache, scale in zip(moved, caches, scales):
        wanted = reference_gather(cache.view(torch.uint8), slots).view(cache.dtype)
        assert same(got, dequantize(wanted, broadcast(scale), got.dtype))


def all_patterns(dtype):
    """Return every 16-bit pattern.

    For float32, return random patterns and all patterns near the rounding boundaries of fp8.
    """
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).to(torch.int32)
    # The sign, the exponent and 3 bits of the mantissa.
    halves = torch.arange(2**12).to(torch.int32) << 20
    around = torch.cat([halves + d for d in (-1, 0, 1, 2**19 - 1, 2**19, 2**19 + 1)])
    return torch.cat([anything, around]).to(torch.int32).view(torch.float32)


def through(backend, patterns, fp8, scale):
    """Write the patterns to an fp8 cache, and return its codes."""
    tokens = patterns.view(-1, 1, 64).to(backend.device)
    shape = (1 + len(tokens), 1, 1, 64)  # the null block comes first
    caches = [torch.zeros(shape, device=backend.device).to(fp8) for _ in "kv"]
    slots = 1 + torch.arange(len(tokens), device=backend.device)
    backend.ops.write_kv(tokens, tokens, *caches, slots, scale, scale)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    return caches[0][1:].flatten()


@each_backend
@each_format
@each_wide_dtype
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-3])
def test_every_bit_pattern_converts_like_pytorch(backend, fp8, dtype, scale):
    patterns = all_patterns(dtype)
    got = through(backend, patterns, fp8, backend.tensor([scale]))
    assert same(got, quantize(patterns, torch.tensor([scale]), fp8))


# The scales include zero, both signs, subnormal, tiny, huge and non-finite values, and a mantissa
# of all ones, with which quotients come closest to the midpoint between two codes.
UNUSUAL_SCALES = [
    0.0, -0.0, -0.37, 1e-45, 1e-39, 1.2e-38, 1e-25, 1e25, 3e38, -1e-41,
    float("inf"), float("-inf"), float("nan"), 2 - 2**-23, (2 - 2**-23) * 2**-10, 2.0**80, 2.0**-80,
]  # fmt: skip


@each_backend
@each_format
@each_wide_dtype
@pytest.mark.parametrize("scale", UNUSUAL_SCALES)
def test_unusual_scales_divide_like_pytorch(backend, fp8, dtype, scale):
    patterns = all_patterns(dtype)
    patterns = torch.cat([patterns[:: len(patterns) // 960][:960], patterns[-64:]])
    if dtype == torch.float32:
        near = torch.linspace(-500, 500, 62) * abs(scale)
        patterns[: len(near)] = torch.where(near.isfinite(), near, torch.ones(()))
        patterns[-4:] = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    got = through(backend, patterns, fp8, backend.tensor([scale]))
    assert same(got, quantize(patterns, torch.tensor([scale]), fp8))


@each_backend
@each_format
def test_per_head_scales_may_be_unusual(backend, fp8):
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.37, 0.0, 1e-39, -2.0, 1.0])
    key = torch.randn(9, 5, 24, generator=generator).bfloat16()
    caches = [torch.zeros(4, 4, 5, 24, device=backend.device).to(fp8) for _ in "kv"]
    slots = torch.tensor([7, -1, 4, 15, 11, 9, 6, -1, 5])
    on = backend.tensor(scales.tolist())
    backend.ops.write_kv(
        *[key.to(backend.device)] * 2, *caches, slots.to(backend.device), on, on.clone()
    )
    for cache in caches:
        got = cache.cpu().flatten(0, 1)[slots[slots >= 0]]
        assert same(got, quantize(key[slots >= 0], scales[:, None], fp8))


@each_backend
def test_only_k_may_be_fp8(backend):
    call = arguments(backend)
    call["key_cache"] = call["key_cache"].to(torch.float8_e4m3fn)
    before = call["value_cache"].clone()
    scale = backend.tensor(0.5)
    backend.ops.write_kv(**call, k_scale=scale)
    want = quantize(call["key"][2].cpu(), torch.tensor(0.5), torch.float8_e4m3fn)
    assert same(call["key_cache"][1, 4], want)
    assert torch.equal(
        call["value_cache"], reference_write(call["value"], before, call["slot_mapping"])
    )
    back = torch.zeros_like(call["key"])
    backend.ops.gather_kv(*list(call.values())[2:], back, call["value"], k_scale=scale)
    assert same(back[2], dequantize(want, 0.5, torch.float32))


WRONG = {
    "k_scale is None: expected scales, as key has dtype Float and key_cache Float8_e4m3fn": ((),
        {"k_scale": lambda scale: None}),
    "v_scale is None: expected scales, as value has dtype Float": ((),
        {"v_scale": lambda scale: None}),
    "k_scale has dtype Half: expected Float": ((), {"k_scale": lambda scale: scale.half()}),
    r"v_scale has shape \[3\]: expected \[1\] or \[2\]": ((),
        {"v_scale": lambda scale: scale.new_ones(3)}),
    r"k_scale has shape \[1, 2\]: expected \[1\] or \[2\]": ((), {"k_scale": lambda s: s[None]}),
    r"k_scale has shape \[\]: expected \[3, 1\] or \[3, 2\]": ((3,),
        {"k_scale": lambda s: s[0, 0]}),
    r"v_scale has shape \[2, 2\]: expected \[3, 1\] or \[3, 2\]": ((3,),
        {"v_scale": lambda s: s[:2]}),
    "k_scale is not contiguous": ((), {"k_scale": lambda scale: scale.new_ones(4)[::2]}),
    "key has dtype Double: expected Float8_e4m3fn as key_cache has": ((),
        {"key": lambda key: key.double()}),
    "value has dtype Float: expected Byte as value_cache has": ((),
        {"value_cache": lambda cache: cache.view(torch.uint8)}),
    "k_scale is given: expected None, as key has dtype Float8_e4m3fn and key_cache": ((),
        {"key": lambda key: key.to(torch.float8_e4m3fn)}),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("op", ["write_kv", "gather_kv"])
@pytest.mark.parametrize("message", WRONG)
def test_invalid_scale_writes_nothing(backend, op, message):
    layers, changes = WRONG[message]
    call = fp8_arguments(backend, layers)
    call.update({name: change(call[name]) for name, change in changes.items()})
    tensors = {name: tensor for name, tensor in call.items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match=message):
        getattr(backend.ops, op)(**call)
    for name, tensor in tensors.items():
        assert torch.equal(bits(tensor), bits(before[name]))
