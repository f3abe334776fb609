# SPDX-License-Identifier: Apache-2.0
"""Token I/O with scales in the cache, compared with PyTorch's conversions on the CPU, and for nvfp4
with a table of the 16 values of e2m1.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import ops
from tests.machinery.backends import each_backend
from tests.ops.test_token_io_fp8_op import WIDE, each_wide_dtype, same
from tests.ops.test_token_io_op import (
    LAYOUTS,
    group_arguments,
    make_cache,
    random_tensor,
    to_device,
)

RULES = [ops.TOKEN_HEAD, ops.TILE, ops.INDEXER, ops.INDEXER_POWER_OF_TWO]
E4M3 = torch.float8_e4m3fn
# (dtype of the cache, dtype of its scales): the last one is nvfp4.
FORMATS = [(each, torch.float32) for each in (E4M3, torch.float8_e5m2, torch.int8, torch.uint8)]
FORMATS += [(torch.uint8, E4M3)]
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([MAGNITUDES, -MAGNITUDES])  # of the codes 0 to 15 of e2m1
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
each_format = pytest.mark.parametrize(("format", "of_scales"), FORMATS)


# A reference -----------------------------------------------------------------------------------------


def rounded(x):
    """Round half away from zero. The sum is rounded to float32, as in vLLM's kernels."""
    return torch.trunc(x + torch.copysign(torch.tensor(0.5), x))


def power_of_two_from(scale):
    mantissa, exponent = torch.frexp(scale)  # mantissa: 0.5 to 1, or infinity or NaN
    power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(scale.isfinite(), power, scale)


def e2m1(x):
    """Return the codes of the nearest values. Ties go to the even code, and NaN to 7."""
    distances = (x.double().abs().clamp(max=6)[..., None] - MAGNITUDES.double()).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    code = (is_nearest * torch.tensor([2, 1] * 4)).argmax(-1) + 8 * x.signbit()
    return torch.where(x.isnan(), 7, code).byte()


def encode_nvfp4(groups):
    """Return (codes, scales) of float32[..., group size]."""
    largest = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1)
    scales = (largest * torch.tensor(1 / 6, dtype=torch.float32)).clamp(max=448)
    scales = torch.where(groups.isfinite().all(-1), scales, torch.nan).to(E4M3)
    factors = torch.where(scales.float() == 0, 0.0, 1 / scales.float())
    return e2m1(groups * factors[..., None]), scales


def encode(groups, format, of_scales, rule):
    """Return (codes, scales) of float32[..., group size]. Codes of int4 are not packed."""
    if of_scales == E4M3:
        return encode_nvfp4(groups)
    if format == torch.uint8:
        numbers = groups.nan_to_num(0.0, torch.inf, -torch.inf)
        least, most = numbers.amin(-1).clamp(max=0), numbers.amax(-1).clamp(min=0)
        scale = ((most - least) / 15).clamp(min=1e-6)
        is_number = groups.isfinite().all(-1) & scale.isfinite()
        zero = torch.where(is_number, rounded(-least / scale).clamp(0, 15), 0.0)
        codes = rounded(groups * (1 / scale)[..., None] + zero[..., None]).clamp(0, 15)
        bits = (scale.view(torch.int32) & -16) | zero.int()
        stored = torch.where(is_number, bits.view(torch.float32), torch.nan)
        return codes.nan_to_num(0).byte(), stored
    numbers = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1)
    if rule == ops.TOKEN_HEAD:
        scale = (numbers / MOST[format]).clamp(min=1e-6)
    elif rule == ops.TILE:
        scale = (numbers / MOST[format]).clamp(min=2.0**-126)
    else:
        scale = numbers.clamp(min=1e-4) / MOST[format]
        if rule == ops.INDEXER_POWER_OF_TWO:
            scale = power_of_two_from(scale)
    if format == torch.int8:
        scale = torch.where(groups.isfinite().all(-1), scale, torch.nan)
    each = scale[..., None]
    quotients = groups * (1 / each) if rule == ops.TOKEN_HEAD else groups / each
    if format == torch.int8:
        return rounded(quotients).clamp(-128, 127).nan_to_num(-128).to(torch.int8), scale
    return quotients.clamp(-MOST[format], MOST[format]).to(format), scale


def decode(codes, scales, format, dtype):
    if scales.dtype == E4M3:
        return (VALUES[codes.long()] * scales.float()[..., None]).to(dtype)
    if format == torch.uint8:
        bits = scales.view(torch.int32)
        numbers = codes.float() - (bits & 15)[..., None]
        return (numbers * (bits & -16).view(torch.float32)[..., None]).to(dtype)
    return (codes.float() * scales[..., None]).to(dtype)


def grouped(tokens, num_groups):
    return tokens.float().unflatten(-1, (num_groups, -1))


def packed(codes, format):
    """Flatten codes [..., groups, size] into the bytes of a head."""
    codes = codes.flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4 if format == torch.uint8 else codes


# Tests -----------------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    (format, of_scales), dtype, rule = (
        draw(st.sampled_from(each)) for each in ([*FORMATS, FORMATS[-1]], WIDE, RULES)
    )
    num_blocks, block_size, heads = (draw(st.integers(*each)) for each in ((1, 4), (1, 9), (1, 3)))
    layers = draw(st.sampled_from([(), (), (2,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[: draw(st.integers(0, 9))]
    slots[torch.rand(len(slots), generator=generator) < 0.2] = -1
    tokens, caches, scales = [], [], []
    for _ in "kv":
        groups, size = (
            draw(st.sampled_from([1, 1, 2, 5, 33])),
            draw(st.sampled_from([2, 6, 8, 16, 68, 132])),
        )
        head_size = groups * (size if format == torch.uint8 else size - draw(st.integers(0, 1)))
        shape = (*layers, len(slots), heads, head_size)
        ordinary = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-30, 15))
        anything = random_tensor(shape, dtype, generator)
        share = draw(st.sampled_from([0.0, 0.05, 1.0]))
        is_odd = torch.rand(shape, generator=generator) < share
        tokens.append(torch.where(is_odd, anything, ordinary.to(dtype)))
        of_cache, layout = (*layers, num_blocks, block_size, heads), draw(st.sampled_from(LAYOUTS))
        num_bytes = head_size // (2 if format == torch.uint8 else 1)
        caches.append(make_cache((*of_cache, num_bytes), format, layout, generator))
        scales.append(make_cache((*of_cache, groups), of_scales, layout, generator))
    return tokens, caches, slots, scales, rule


def expected_after_write(tokens, cache, slots, scales, rule):
    """Return the contents of a cache and of its scales after a write."""
    block_size, first = cache.shape[-3], cache.ndim - 4
    groups = grouped(tokens, scales.shape[-1])
    codes, numbers = encode(groups, cache.dtype, scales.dtype, rule)
    cache, scales = cache.clone(), scales.clone()
    flat = cache.flatten(first, first + 1), scales.flatten(first, first + 1)
    for i, slot in enumerate(slots.tolist()):
        if slot >= block_size:
            for to, from_ in zip(flat, (packed(codes, cache.dtype), numbers)):
                to.select(first, slot).copy_(from_.select(first, i))
    return [each.view_as(like) for each, like in zip(flat, (cache, scales))]


@each_backend
@given(case=cases())
def test_written_codes_and_scales_are_those_of_the_reference(backend, case):
    tokens, caches, slots, scales, rule = case
    want = [expected_after_write(*each, rule) for each in zip(tokens, caches, [slots] * 2, scales)]
    to = [to_device(each, backend.device) for each in (*tokens, *caches, slots, *scales)]
    backend.ops.write_kv(*to, rule)
    for i, (cache, scale) in enumerate(want):
        assert same(to[2 + i], cache) and same(to[5 + i], scale)


@each_backend
@given(case=cases())
def test_gathered_elements_are_those_of_the_reference(backend, case):
    tokens, caches, slots, scales, _ = case
    to = [to_device(each, backend.device) for each in (*caches, slots)]
    out = [torch.full_like(each, 7, device=backend.device) for each in tokens]
    backend.ops.gather_kv(*to, *out, *(to_device(each, backend.device) for each in scales))
    for token, cache, scale, got in zip(tokens, caches, scales, out):
        first, format = cache.ndim - 4, cache.dtype
        codes = cache.flatten(first, first + 1)
        if format == torch.uint8:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        codes = codes.unflatten(-1, (scale.shape[-1], -1))
        numbers = scale.flatten(first, first + 1)
        want = decode(codes, numbers, format, token.dtype).flatten(-2)
        want = want.index_select(first, slots.clamp(min=0))
        want.movedim(first, 0)[slots < cache.shape[-3]] = 0
        assert same(got, want)


def one_side(backend, key, format, of_scales, num_groups=1):
    """Return the arguments of `write_kv` for a key without value, which fills block 1."""
    n, heads, head_size = key.shape
    cache = torch.zeros(2, n, heads, head_size // (2 if format == torch.uint8 else 1)).to(format)
    scale = torch.zeros(2, n, heads, num_groups).to(of_scales)
    nothing = torch.empty(n, heads, 0), torch.empty(2, n, heads, 0)
    slots = torch.arange(n, 2 * n)
    given = key, nothing[0].to(key.dtype), cache, nothing[1].to(key.dtype), slots, scale
    return [each.to(backend.device) for each in given]


def read_back(backend, given):
    found = torch.zeros_like(given[0])
    backend.ops.gather_kv(given[2], given[3], given[4], found, given[1], given[5])
    return found.cpu()


@each_backend
@each_format
@each_wide_dtype
def test_error_is_at_most_half_a_step(backend, format, of_scales, dtype):
    key = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = one_side(backend, key, format, of_scales)
    backend.ops.write_kv(*given)
    error = (read_back(backend, given).float() - key.float()).abs()
    if of_scales == E4M3:
        # An element is at most 6.5 scales, because scales are rounded. A step is at most 2 scales.
        assert (error <= given[5][1].cpu().float() * (1 + 2**-7)).all()
        return
    step = {torch.int8: 1 / 127, torch.uint8: 2 / 15, E4M3: 1 / 8}.get(format, 1 / 4)
    assert (error <= key.float().abs().amax(-1, keepdim=True) * (step / 2 + 2**-7)).all()


@each_backend
def test_every_value_and_every_tie_of_e2m1(backend):
    """The 6 in each group makes the scale 1, so that elements are rounded as they are."""
    inner = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    near = torch.cat([MAGNITUDES, inner, torch.tensor([2.0**-149, 2.0**-126, 1e-20])])
    near = torch.cat([near, *(near.nextafter(torch.tensor(x)) for x in (0.0, 6.0))])
    numbers = torch.cat([near, -near, torch.tensor([0.0, -0.0])])
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % 15)]).view(-1, 15)
    key = torch.cat([numbers, torch.full((len(numbers), 1), 6.0)], 1)[:, None]
    given = one_side(backend, key, torch.uint8, E4M3)
    backend.ops.write_kv(*given)
    assert torch.equal(given[2][1].cpu(), packed(e2m1(key)[..., None, :], torch.uint8))
    assert (given[5][1].float() == 1).all()
    ties = e2m1(torch.cat([inner, -inner]))
    assert ties.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ds_mla_rows_are_one_write(backend, dtype):
    """A row of 656 bytes: a latent of 512 fp8 codes, four scales, and 64 elements of the rotary part."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(3, 8, 656, dtype=torch.uint8, device=backend.device)
    latent = rows[..., :512].view(torch.float8_e4m3fn).unsqueeze(2)
    scales = rows[..., 512:528].view(torch.float32).unsqueeze(2)
    rope = rows[..., 528:].view(dtype).unsqueeze(2)
    tokens = [torch.randn(6, 1, n, generator=generator).to(dtype) for n in (512, 64)]
    slots = torch.tensor([9, 8, -1, 23, 3, 15])
    codes, numbers = encode(grouped(tokens[0], 4), E4M3, None, ops.TILE)
    want = torch.zeros_like(rows, device="cpu")
    for i in (0, 1, 3, 5):
        parts = codes[i].flatten(), numbers[i].flatten(), tokens[1][i].flatten()
        row = torch.cat([each.contiguous().view(torch.uint8) for each in parts])
        want.view(-1, 656)[slots[i]] = row
    to = [each.to(backend.device) for each in (*tokens, slots)]
    backend.ops.write_kv(*to[:2], latent, rope, to[2], scales, None, ops.TILE)
    assert torch.equal(rows.cpu(), want)


@each_backend
@each_format
@each_wide_dtype
def test_tokens_may_begin_at_any_element(backend, format, of_scales, dtype):
    """Narrow vectors must not be wider than the alignment of the tokens."""
    memory = torch.randn(1 + 6 * 3 * 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = []
    for is_aligned in (False, True):
        given = one_side(backend, memory[1:].view(6, 3, 32), format, of_scales, num_groups=2)
        if not is_aligned:
            given[0] = memory.to(backend.device)[1:].view(6, 3, 32)
        backend.ops.write_kv(*given)
        out = torch.zeros_like(memory, device=backend.device)[1:].view(6, 3, 32)
        backend.ops.gather_kv(given[2], given[3], given[4], out, given[1], given[5])
        found.append((given[2].cpu(), out.cpu()))
    assert same(found[0][0], found[1][0]) and same(found[0][1], found[1][1])


@each_backend
def test_keys_of_an_indexer_have_their_scales_at_the_end_of_the_block(backend):
    blocks = torch.zeros(3, 16 * (128 + 4), dtype=torch.uint8, device=backend.device)
    keys = blocks[:, : 16 * 128].view(torch.float8_e4m3fn).view(3, 16, 1, 128)
    scales = blocks[:, 16 * 128 :].view(torch.float32).view(3, 16, 1, 1)
    key = torch.randn(5, 1, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    slots = torch.tensor([17, 47, 31, 32, 20])
    nothing = torch.empty(5, 1, 0), torch.empty(3, 16, 1, 0)
    for rule in (ops.INDEXER, ops.INDEXER_POWER_OF_TWO):
        to = [each.to(backend.device) for each in (key, nothing[0], nothing[1], slots)]
        backend.ops.write_kv(to[0], to[1], keys, to[2], to[3], scales, None, rule)
        codes, numbers = encode(grouped(key, 1), E4M3, None, rule)
        for i, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, 16)
            row = blocks[block].cpu()
            assert same(
                row[at * 128 : (at + 1) * 128].view(torch.float8_e4m3fn), codes[i].flatten()
            )
            assert same(row[16 * 128 :].view(torch.float32)[at], numbers[i].flatten()[0])


BAD = {
    r"k_scale has shape \[2, 5, 2, 3\]: expected a last dimension that divides the head size, 4": {
        "k_scale": torch.ones(2, 5, 2, 3)
    },
    r"k_scale has shape \[2, 5, 1, 1\]: expected size 2 in dimension 2, as in the cache": {
        "k_scale": torch.ones(2, 5, 1, 1)
    },
    "k_scale has dtype Half: expected Float": {"k_scale": torch.ones(2, 5, 2, 1).half()},
    r"k_scale has shape \[2, 5, 2\]: expected \[1\] or \[2\], or the shape of the cache": {
        "k_scale": torch.ones(2, 5, 2)
    },
    r"key has shape \[3, 2, 4\]: expected size 8 in dimension 2, twice the bytes per head": {
        "key_cache": torch.ones(2, 5, 2, 4, dtype=torch.uint8)
    },
    "v_scale shares memory with k_scale: expected separate memory": {"v_scale": "k_scale"},
    "k_scale is given: expected None, as key has dtype Float and key_cache Float": {
        "key_cache": torch.ones(2, 5, 2, 4)
    },
}


@each_backend
@pytest.mark.parametrize(
    ("op", "message"),
    [
        (op, message)
        for op in ("write_kv", "gather_kv")
        for message in BAD
        if op == "write_kv" or "shares" not in message
    ],
)
def test_invalid_scales_write_nothing(backend, op, message):
    call = group_arguments(backend)
    for name, value in BAD[message].items():
        call[name] = call[value] if isinstance(value, str) else value.to(backend.device)
    before = {name: tensor.clone() for name, tensor in call.items()}
    with pytest.raises(RuntimeError, match=message):
        getattr(backend.ops, op)(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@each_backend
@pytest.mark.parametrize(
    ("cache", "scale", "message"),
    [
        (torch.uint8, torch.float16, "k_scale has dtype Half: expected Float or Float8_e4m3fn"),
        (torch.uint8, torch.float8_e5m2, "k_scale has dtype Float8_e5m2: expected Float or"),
        (torch.int8, E4M3, "k_scale has dtype Float8_e4m3fn: expected Float"),
    ],
)
def test_scales_of_another_dtype_write_nothing(backend, cache, scale, message):
    given = one_side(backend, torch.randn(3, 2, 32), cache, torch.float32, num_groups=2)
    given[5] = given[5].to(scale)
    with pytest.raises(RuntimeError, match=message):
        backend.ops.write_kv(*given)
    assert not given[2].any()
