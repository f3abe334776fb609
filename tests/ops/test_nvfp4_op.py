# SPDX-License-Identifier: Apache-2.0
"""Token I/O in nvfp4, compared with a table of the 16 values of e2m1."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_real_backend
from tests.ops.test_group_scales_op import grouped
from tests.ops.test_token_io_fp8_op import WIDE, each_wide_dtype, same
from tests.ops.test_token_io_op import LAYOUTS, make_cache, random_tensor, to_device

E4M3 = torch.float8_e4m3fn
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([MAGNITUDES, -MAGNITUDES])  # of the codes 0 to 15


# A reference -----------------------------------------------------------------------------------------


def e2m1(x):
    """Return the codes of the nearest values. Ties go to the even code, and NaN to 7."""
    distances = (x.double().abs().clamp(max=6)[..., None] - MAGNITUDES.double()).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    code = (is_nearest * torch.tensor([2, 1] * 4)).argmax(-1) + 8 * x.signbit()
    return torch.where(x.isnan(), 7, code).byte()


def encode(groups):
    """Return (codes, scales) of float32[..., group size]."""
    largest = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1)
    scales = (largest * torch.tensor(1 / 6, dtype=torch.float32)).clamp(max=448)
    scales = torch.where(groups.isfinite().all(-1), scales, torch.nan).to(E4M3)
    factors = torch.where(scales.float() == 0, 0.0, 1 / scales.float())
    return e2m1(groups * factors[..., None]), scales


def packed(codes):
    """Flatten codes [..., groups, size] into the bytes of a head."""
    codes = codes.flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4


def decode(cache, scales, dtype):
    codes = torch.stack([cache & 15, cache >> 4], -1).flatten(-2).long()
    values = VALUES[codes].unflatten(-1, (scales.shape[-1], -1))
    return (values * scales.float()[..., None]).flatten(-2).to(dtype)


def expected_after_write(tokens, cache, slots, scales):
    """Return the contents of a cache and of its scales after a write."""
    block_size, first = cache.shape[-3], cache.ndim - 4
    codes, numbers = encode(grouped(tokens, scales.shape[-1]))
    cache, scales = cache.clone(), scales.clone()
    flat = cache.flatten(first, first + 1), scales.flatten(first, first + 1)
    for i, slot in enumerate(slots.tolist()):
        if slot >= block_size:
            for to, from_ in zip(flat, (packed(codes), numbers)):
                to.select(first, slot).copy_(from_.select(first, i))
    return [each.view_as(like) for each, like in zip(flat, (cache, scales))]


# Tests -----------------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    dtype, layers = draw(st.sampled_from(WIDE)), draw(st.sampled_from([(), (), (2,)]))
    num_blocks, block_size, heads = (draw(st.integers(*each)) for each in ((1, 4), (1, 9), (1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[: draw(st.integers(0, 9))]
    slots[torch.rand(len(slots), generator=generator) < 0.2] = -1
    tokens, caches, scales = [], [], []
    for _ in "kv":
        groups, size = draw(st.sampled_from([1, 2, 5, 33])), draw(st.sampled_from([16, 16, 2, 6]))
        shape = (*layers, len(slots), heads, groups * size)
        # Scales are subnormal, 0 or saturated for the smallest and largest of these exponents.
        ordinary = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-14, 14))
        is_odd = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.05, 1.0]))
        anything = random_tensor(shape, dtype, generator)
        tokens.append(torch.where(is_odd, anything, ordinary.to(dtype)))
        of_cache, layout = (*layers, num_blocks, block_size, heads), draw(st.sampled_from(LAYOUTS))
        caches.append(make_cache((*of_cache, groups * size // 2), torch.uint8, layout, generator))
        scales.append(make_cache((*of_cache, groups), E4M3, layout, generator))
    return tokens, caches, slots, scales


@each_backend
@given(case=cases())
def test_written_codes_and_scales_are_those_of_the_reference(backend, case):
    tokens, caches, slots, scales = case
    want = [expected_after_write(*each) for each in zip(tokens, caches, [slots] * 2, scales)]
    to = [to_device(each, backend.device) for each in (*tokens, *caches, slots, *scales)]
    backend.ops.write_kv(*to)
    for i, (cache, scale) in enumerate(want):
        assert same(to[2 + i], cache) and same(to[5 + i], scale)


@each_backend
@given(case=cases())
def test_gathered_elements_are_those_of_the_reference(backend, case):
    tokens, caches, slots, scales = case
    to = [to_device(each, backend.device) for each in (*caches, slots)]
    out = [torch.full_like(each, 7, device=backend.device) for each in tokens]
    backend.ops.gather_kv(*to, *out, *(to_device(each, backend.device) for each in scales))
    for token, cache, scale, got in zip(tokens, caches, scales, out):
        first = cache.ndim - 4
        flat = (each.flatten(first, first + 1) for each in (cache, scale))
        want = decode(*flat, token.dtype).index_select(first, slots.clamp(min=0))
        want.movedim(first, 0)[slots < cache.shape[-3]] = 0
        assert same(got, want)


def one_side(backend, key, num_groups):
    """Return the arguments of `write_kv` for a key without value, which fills block 1."""
    n, heads, head_size = key.shape
    cache = torch.zeros(2, n, heads, head_size // 2, dtype=torch.uint8)
    scale = torch.zeros(2, n, heads, num_groups).to(E4M3)
    nothing = torch.empty(n, heads, 0), torch.empty(2, n, heads, 0)
    slots = torch.arange(n, 2 * n)
    given = key, nothing[0].to(key.dtype), cache, nothing[1].to(key.dtype), slots, scale
    return [each.to(backend.device) for each in given]


@each_backend
def test_every_value_and_every_tie(backend):
    """The 6 in each group makes the scale 1, so that elements are rounded as they are."""
    inner = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    near = torch.cat([MAGNITUDES, inner, torch.tensor([2.0**-149, 2.0**-126, 1e-20])])
    near = torch.cat([near, *(near.nextafter(torch.tensor(x)) for x in (0.0, 6.0))])
    numbers = torch.cat([near, -near, torch.tensor([0.0, -0.0])])
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % 15)]).view(-1, 15)
    key = torch.cat([numbers, torch.full((len(numbers), 1), 6.0)], 1)[:, None]
    given = one_side(backend, key, 1)
    backend.ops.write_kv(*given)
    assert torch.equal(given[2][1].cpu(), packed(e2m1(key)[..., None, :]))
    assert (given[5][1].float() == 1).all()
    ties = e2m1(torch.cat([inner, -inner]))
    assert ties.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]


@each_backend
@each_wide_dtype
def test_groups_that_are_not_finite_are_read_as_nan(backend, dtype):
    key = torch.ones(4, 1, 32).to(dtype)
    key[0, 0, 3], key[1, 0, 3], key[2, 0, 3] = torch.nan, torch.inf, -torch.inf
    given = one_side(backend, key, 2)
    backend.ops.write_kv(*given)
    found = torch.zeros_like(given[0])
    backend.ops.gather_kv(given[2], given[3], given[4], found, given[1], given[5])
    assert found[:3, 0, :16].isnan().all() and not found[:, 0, 16:].isnan().any()
    assert (given[2][1, :3, 0, :8] == 0x77).all()


@each_backend
def test_scales_saturate_and_vanish(backend):
    key = torch.zeros(4, 1, 16)
    key[0, 0, 0], key[1, 0, 0], key[2, 0, 0] = 1e30, -6 * 2.0**-10, 6.5 * 2.0**-10
    given = one_side(backend, key, 1)
    backend.ops.write_kv(*given)
    assert given[5][1].flatten().tolist() == [448, 0, 2.0**-9, 0]
    found = torch.ones_like(given[0])
    backend.ops.gather_kv(given[2], given[3], given[4], found, given[1], given[5])
    assert found[:, 0, 0].tolist() == [448 * 6, 0, 3 * 2.0**-9, 0]


@each_backend
@each_wide_dtype
def test_error_is_at_most_a_step_and_a_half_of_the_scale(backend, dtype):
    """An element is at most 6.5 scales, because scales are rounded. A step is at most 2 scales."""
    key = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = one_side(backend, key, 4)
    backend.ops.write_kv(*given)
    found = torch.empty_like(given[0])
    backend.ops.gather_kv(given[2], given[3], given[4], found, given[1], given[5])
    scale = given[5][1].float().repeat_interleave(16, -1)
    assert ((found.float() - given[0].float()).abs() <= scale * (1 + 2**-7)).all()


@each_backend
@each_wide_dtype
def test_tokens_may_begin_at_any_element(backend, dtype):
    memory = torch.randn(1 + 6 * 3 * 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = []
    for key in (memory[1:].view(6, 3, 32), memory[1:].clone().view(6, 3, 32)):
        given = one_side(backend, key, 2)
        given[0] = memory.to(backend.device)[1:].view(6, 3, 32) if not found else given[0]
        backend.ops.write_kv(*given)
        out = torch.zeros_like(memory, device=backend.device)[1:].view(6, 3, 32)
        backend.ops.gather_kv(given[2], given[3], given[4], out, given[1], given[5])
        found.append((given[2].cpu(), out.cpu()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


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
    given = one_side(backend, torch.randn(3, 2, 32), 2)
    given[2] = torch.zeros(2, 3, 2, 16 if cache == torch.uint8 else 32).to(cache)
    given[2], given[5] = given[2].to(backend.device), given[5].float().to(scale)
    with pytest.raises(RuntimeError, match=message):
        backend.ops.write_kv(*given)
    assert not given[2].any()


@each_real_backend
def test_opcheck(backend):
    checks = ("test_autograd_registration", "test_faketensor")  # "test_schema" cannot compare e4m3
    given = one_side(backend, torch.randn(3, 2, 32), 2)
    torch.library.opcheck(torch.ops.kvcache.write_kv.default, tuple(given), test_utils=checks)


@each_real_backend
def test_torch_compile(backend):
    given = one_side(backend, torch.randn(3, 2, 32), 2)
    compiled = [each.clone() for each in given]
    torch.ops.kvcache.write_kv(*given)
    torch.compile(torch.ops.kvcache.write_kv, fullgraph=True, backend="eager")(*compiled)
    assert torch.equal(given[2], compiled[2]) and same(given[5].cpu(), compiled[5].cpu())
