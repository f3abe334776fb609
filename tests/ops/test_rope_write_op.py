# SPDX-License-Identifier: Apache-2.0
"""RMS norm, rotary embedding and write in one op, compared with these steps in PyTorch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import ops
from tests.machinery.backends import each_backend, each_device_backend, each_real_backend
from tests.ops.test_token_io_fp8_op import WIDE, same
from tests.ops.test_token_io_op import LAYOUTS, make_cache, random_tensor, to_device

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


# A reference -----------------------------------------------------------------------------------------


def normed(x, weight, eps):
    """Return x after RMS norm. The squares are summed in 32 lanes, and the lanes in halves."""
    wide, size = x.float(), x.shape[-1]
    squares = torch.nn.functional.pad(wide * wide, (0, -size % 32)).unflatten(-1, (-1, 32))
    lanes = torch.zeros_like(squares[..., 0, :])
    for part in squares.unbind(-2):
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        lanes = sum(lanes.chunk(2, -1))
    roots = np.sqrt((lanes / size + eps).numpy())  # torch's is not always the nearest number
    scaled = wide * (1 / torch.from_numpy(roots))
    if weight.dtype == x.dtype:
        return scaled.to(x.dtype) * weight
    return (scaled * weight).to(x.dtype)


def rotated(x, cos_sin, is_neox):
    size = cos_sin.shape[-1]
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)
    part = x[..., :size].float()
    first, second = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
    parts = [first * cos - second * sin, second * cos + first * sin]
    whole = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return torch.cat([whole.to(x.dtype), x[..., size:]], -1)


def reference(
    positions,
    query,
    key,
    value,
    cos_sin_cache,
    key_cache,
    value_cache,
    slot_mapping,
    k_scale=None,
    v_scale=None,
    scale_rule=0,
    is_neox=True,
    rotates_value=False,
    q_weight=None,
    k_weight=None,
    eps=1e-6,
):
    """Write to the caches. Return the query, key and value."""
    cos_sin = cos_sin_cache[positions.long()]
    query = query if q_weight is None else normed(query, q_weight, eps)
    key = key if k_weight is None else normed(key, k_weight, eps)
    query = rotated(query, cos_sin, is_neox)
    if rotates_value:
        value = rotated(value, cos_sin, is_neox)
    else:
        key = rotated(key, cos_sin, is_neox)
    caches = key_cache, value_cache
    tokens = [each.contiguous() for each in (key, value)]
    ops.write_kv(*tokens, *caches, slot_mapping, k_scale, v_scale, scale_rule)
    return query, key, value


# Tests -----------------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """Return (query, key and value as columns of one tensor, their shapes, other arguments, outputs)."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, layout = draw(st.sampled_from(WIDE)), draw(st.sampled_from(LAYOUTS))
    num_blocks, block_size, heads = (draw(st.integers(*each)) for each in ((2, 4), (1, 9), (1, 3)))
    query_heads = draw(st.integers(0, 5))
    sizes = [draw(st.sampled_from([1, 2, 6, 7, 32, 40, 64, 68, 132])) for _ in "qkv"]
    rotates_value = draw(st.booleans())
    most = min(sizes[0], sizes[2 if rotates_value else 1]) // 2
    rotary_dim = 2 * draw(st.sampled_from([most, most, most // 2, 0]))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[
        : draw(st.sampled_from([9, 3, 0]))
    ]
    slots[torch.rand(len(slots), generator=generator) < 0.2] = -1
    n = len(slots)

    def numbers(*shape, dtype=dtype):
        ordinary = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-30, 15))
        share = draw(st.sampled_from([0.0, 0.0, 0.05, 1.0]))
        is_odd = torch.rand(shape, generator=generator) < share
        return torch.where(is_odd, random_tensor(shape, dtype, generator), ordinary.to(dtype))

    shapes = [(n, query_heads, sizes[0]), (n, heads, sizes[1]), (n, heads, sizes[2])]
    width = sum(count * size for _, count, size in shapes)
    qkv = numbers(n, width + draw(st.integers(0, 3)))
    other_dtype = st.sampled_from([dtype, torch.float32])
    call = {"is_neox": draw(st.booleans()), "rotates_value": rotates_value}
    call |= {"scale_rule": draw(st.integers(0, 3)), "eps": draw(st.sampled_from([1e-6, 1e-5, 0.0]))}
    call["positions"] = torch.randint(0, 8, (n,), generator=generator)
    if draw(st.booleans()):
        call["positions"] = call["positions"].int()
    cos_sin = numbers(8, rotary_dim + draw(st.integers(0, 2)), dtype=draw(other_dtype))
    call["cos_sin_cache"] = cos_sin[:, :rotary_dim]
    call["slot_mapping"] = slots
    for name, size in (("q_weight", sizes[0]), ("k_weight", sizes[1])):
        if draw(st.booleans()):
            call[name] = numbers(size, dtype=draw(other_dtype))
    for side, size in zip(("key", "value"), sizes[1:]):
        formats = [dtype, dtype, *FP8, torch.int8, *([] if size % 2 else [torch.uint8])]
        page = draw(st.sampled_from(formats))
        of_cache = (num_blocks, block_size, heads)
        stored = size // 2 if page == torch.uint8 else size
        call[f"{side}_cache"] = make_cache((*of_cache, stored), page, layout, generator)
        if page == torch.uint8 or (page != dtype and draw(st.booleans())):
            groups = draw(st.sampled_from([n for n in (1, 2, 4) if stored % n == 0]))
            is_nvfp4 = page == torch.uint8 and draw(st.booleans())
            scale_dtype = torch.float8_e4m3fn if is_nvfp4 else torch.float32
            scale = make_cache((*of_cache, groups), scale_dtype, layout, generator)
        elif page != dtype:
            scale = (
                2.0
                ** torch.randint(
                    -9, 9, (draw(st.sampled_from([heads, heads, 1])),), generator=generator
                )
                * 1.1
            )
        else:
            continue
        call[f"{side[0]}_scale"] = scale
    outs = [
        draw(st.sampled_from(["none", "apart", "in place"]))
        for is_allowed in (True, True, rotates_value)
        if is_allowed
    ]
    return qkv, shapes, call, outs


def columns(qkv, shapes):
    ends = [0]
    for _, heads, size in shapes:
        ends.append(ends[-1] + heads * size)
    return [qkv[:, a:b].unflatten(1, s[1:]) for a, b, s in zip(ends, ends[1:], shapes)]


@each_backend
@given(case=cases())
def test_results_are_those_of_the_steps(backend, case):
    qkv, shapes, call, outs = case
    there = {
        name: to_device(value, backend.device) if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    here = {
        name: to_device(value, "cpu") if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }
    want = reference(**dict(zip(("query", "key", "value"), columns(qkv, shapes))), **here)
    memory = to_device(qkv, backend.device)
    tokens = dict(zip(("query", "key", "value"), columns(memory, shapes)))
    expected = columns(qkv.clone(), shapes)
    found = list(tokens.values())
    for i, (name, out) in enumerate(zip(tokens, outs)):
        if out == "apart":
            wide = torch.full((*shapes[i][:2], shapes[i][2] + 1), 7.0).to(qkv.dtype)
            found.append(to_device(wide, backend.device)[..., :-1])
            expected.append(want[i])
        if out == "in place" or (i == 0 and out == "none"):
            expected[i].copy_(want[i])
        if out != "none":
            there[f"{name}_out"] = found[-1] if out == "apart" else tokens[name]
    backend.ops.rope_write_kv(**tokens, **there)
    for got, right in zip(found, expected, strict=True):
        assert same(got, right.contiguous())
    used = sum(heads * size for _, heads, size in shapes)
    assert same(memory[:, used:], qkv[:, used:])
    for name, value in here.items():
        if isinstance(value, torch.Tensor):
            assert same(there[name], value), name


@each_backend
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", WIDE)
def test_results_are_near_those_in_float64(backend, dtype, is_neox):
    """The reference above and the op could have the same mistake. Here, pairs are complex numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 96, generator=generator).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    positions = torch.tensor([0, 7, 3, 1, 2])
    angles = torch.outer(torch.arange(8.0), 0.5 ** torch.arange(32))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    cache = torch.zeros(2, 8, 2, 96, dtype=dtype, device=backend.device)
    nothing = [torch.empty(*n, 2, 0, dtype=dtype, device=backend.device) for n in ((5,), (2, 8))]
    call = [positions, x.clone(), x, nothing[0], cos_sin, cache, nothing[1], torch.arange(8, 13)]
    call = [each.to(backend.device) for each in call]
    weights = {"q_weight": weight.to(backend.device), "k_weight": weight.to(backend.device)}
    backend.ops.rope_write_kv(*call, is_neox=is_neox, **weights, eps=1e-5)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    part = exact[..., :64]
    pairs = (
        part.unflatten(-1, (2, 32)).transpose(-1, -2) if is_neox else part.unflatten(-1, (32, 2))
    )
    turn = torch.polar(torch.ones(5, 1, 32).double(), angles.double()[positions].unsqueeze(1))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = (turned.transpose(-1, -2) if is_neox else turned).flatten(-2)
    exact = torch.cat([turned, exact[..., 64:]], -1)
    for got in (call[1].cpu(), cache.view(16, 2, 96)[8:13].cpu()):
        assert (got - exact).abs().max() < 40 * torch.finfo(dtype).eps


FORMS = [(each, torch.float32) for each in (*FP8, torch.int8, torch.uint8)]
FORMS += [(torch.uint8, torch.float8_e4m3fn)]
FORMS += [(each, None) for each in (*FP8, torch.int8)]  # given scales


@each_backend
def test_ds_mla_rows_are_one_call(backend):
    """A latent is normed and quantized, and the rotary parts of key and query are rotated."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(4, 3, 192, generator=generator).bfloat16()
    latent = torch.randn(4, 512 + 64, generator=generator).bfloat16()
    weight = torch.randn(512, generator=generator).bfloat16()
    cos_sin = torch.randn(9, 64, generator=generator)
    positions, slots = torch.tensor([8, 0, 3, 5]), torch.tensor([9, 0, -1, 23])

    def run(op, device):
        rows = torch.zeros(3, 8, 656, dtype=torch.uint8, device=device)
        parts = rows[..., :512].view(torch.float8_e4m3fn), rows[..., 528:].view(torch.bfloat16)
        scales = rows[..., 512:528].view(torch.float32).unsqueeze(2)
        q, kv, turns, places = (each.clone().to(device) for each in (query, latent, cos_sin, slots))
        tokens = q[..., 128:], kv[:, None, :512], kv[:, None, 512:]
        caches = [each.unsqueeze(2) for each in parts]
        options = {"rotates_value": True, "is_neox": False, "k_weight": weight.to(device)}
        found = op(
            positions.to(device), *tokens, turns, *caches, places, scales, None, ops.TILE, **options
        )
        return rows, q, found

    wanted, _, (rotary, _, _) = run(reference, "cpu")
    rows, q, _ = run(backend.ops.rope_write_kv, backend.device)
    assert torch.equal(rows.cpu(), wanted)
    assert same(q, torch.cat([query[..., :128], rotary], -1))


def arguments(backend):
    call = {
        "positions": torch.tensor([0, 7, 3]),
        "query": torch.ones(3, 4, 8),
        "key": torch.ones(3, 2, 8),
        "value": torch.ones(3, 2, 6),
        "cos_sin_cache": torch.arange(64.0).view(8, 8),
        "key_cache": torch.zeros(2, 5, 2, 8),
        "value_cache": torch.zeros(2, 5, 2, 6),
        "slot_mapping": torch.tensor([5, -1, 9]),
        "q_weight": torch.ones(8),
        "k_weight": torch.ones(8),
        "query_out": torch.zeros(3, 4, 8),
        "key_out": torch.zeros(3, 2, 8),
    }
    return {name: each.to(backend.device) for name, each in call.items()}


BAD = {
    "positions has dtype Short: expected Int or Long": {"positions": torch.ones(3).short()},
    r"positions has shape \[2\]: expected size 3": {"positions": torch.ones(2).long()},
    r"positions has shape \[3, 1\]": {"positions": torch.ones(3, 1).long()},
    "positions is not contiguous": {"positions": torch.ones(6).long()[::2]},
    "query has dtype Half: expected Float": {"query": torch.ones(3, 4, 8).half()},
    r"query has shape \[3, 32\]: expected \[num_tokens, num_heads": {"query": torch.ones(3, 32)},
    r"query has shape \[2, 4, 8\]: expected size 3": {"query": torch.ones(2, 4, 8)},
    "query has stride 2 in its last": {"query": torch.ones(3, 4, 16)[..., ::2]},
    r"query has shape \[3, 1, 1025\]: expected a head size up to 1024": {
        "query": torch.ones(3, 1, 1025)
    },
    r"query has shape \[3, 65532, 8\]: expected fewer heads": {
        "query": torch.ones(3, 65532, 8),
        "query_out": torch.ones(3, 65532, 8),
    },
    "key has dtype Double: expected Float or Half": {
        "key": torch.ones(3, 2, 8).double(),
        "key_cache": torch.zeros(2, 5, 2, 8).double(),
    },
    r"key has shape \[1, 3, 2, 8\]": {"key": torch.ones(1, 3, 2, 8)},
    r"key_cache has shape \[1, 2, 5, 2, 8\]": {"key_cache": torch.zeros(1, 2, 5, 2, 8)},
    "value has dtype Half: expected Float": {
        "value": torch.ones(3, 2, 6).half(),
        "value_cache": torch.ones(2, 5, 2, 6).half(),
    },
    r"cos_sin_cache has shape \[8\]": {"cos_sin_cache": torch.ones(8)},
    r"cos_sin_cache has shape \[8, 7\]: expected an even rotary_dim": {
        "cos_sin_cache": torch.ones(8, 7)
    },
    r"cos_sin_cache has shape \[8, 10\]: expected an even rotary_dim up to .*, 8": {
        "cos_sin_cache": torch.ones(8, 10)
    },
    "cos_sin_cache has dtype Double": {"cos_sin_cache": torch.ones(8, 8).double()},
    "cos_sin_cache has stride 8 in its last": {"cos_sin_cache": torch.ones(8, 8).t()},
    r"q_weight has shape \[7\]: expected size 8": {"q_weight": torch.ones(7)},
    "k_weight has dtype Half: expected Float": {"k_weight": torch.ones(8).half()},
    "k_weight is not contiguous": {"k_weight": torch.ones(16)[::2]},
    r"query_out has shape \[3, 4, 9\]: expected size 8": {"query_out": torch.ones(3, 4, 9)},
    "query_out has elements that share memory": {
        "query_out": ("query_out", (3, 4, 8), 0, (0, 8, 1))
    },
    "key_out has dtype Half": {"key_out": torch.ones(3, 2, 8).half()},
    "key_out has stride 2": {"key_out": torch.ones(3, 2, 16)[..., ::2]},
    "value_out is given: expected None, because rotates_value is False": {
        "value_out": torch.ones(3, 2, 6)
    },
    "query_out shares memory with key: expected memory": {"query_out": ("key", (3, 4, 8), 0)},
    "query_out shares memory with query: expected memory": {"query_out": ("query", (3, 4, 8), 8)},
    "key_out shares memory with query_out": {"key_out": ("query_out", (3, 2, 8), 0)},
    "key_out shares memory with key_cache": {"key_out": ("key_cache", (3, 2, 8), 0)},
    "key_cache shares memory with cos_sin_cache": {"cos_sin_cache": ("key_cache", (8, 8), 0)},
    "key_cache shares memory with query": {"query": ("key_cache", (3, 4, 8), 0)},
    "value_cache shares memory with k_weight": {"k_weight": ("value_cache", (8,), 0)},
    "eps is -1": {"eps": -1.0},
    "eps is nan": {"eps": float("nan")},
    "scale_rule is 4": {"scale_rule": 4},
}


def changed(call, backend, **changes):
    """Return the arguments with changes: a value, or memory to share (name, shape, offset, strides)."""
    call = dict(call)
    for name, value in changes.items():
        if isinstance(value, tuple):
            other, shape, offset, *strides = value
            memory = call[other].untyped_storage()
            memory.resize_(4096)
            at = call[other].storage_offset() + offset
            strides = strides[0] if strides else torch.empty(shape).stride()
            value = torch.empty(0, device=backend.device).set_(memory, at, shape, strides)
        elif isinstance(value, torch.Tensor):
            value = to_device(value, backend.device)
        call[name] = value
    return call


def memories(call):
    return {
        name: torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage())
        for name, each in call.items()
        if isinstance(each, torch.Tensor)
    }


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    call = changed(arguments(backend), backend, **BAD[message])
    before = {name: each.clone() for name, each in memories(call).items()}
    with pytest.raises(RuntimeError, match=message):
        backend.ops.rope_write_kv(**call)
    for name, each in memories(call).items():
        assert torch.equal(each, before[name]), name


VALUES = {
    r"positions\[1\] is 8: expected 0 to 7, the rows of cos_sin_cache": {
        "positions": torch.tensor([0, 8, 3])
    },
    r"positions\[2\] is -1: expected 0 to 7": {"positions": torch.tensor([0, 1, -1]).int()},
    r"slot_mapping\[0\] is 10: expected -1 \(no slot\) to 9": {
        "slot_mapping": torch.tensor([10, -1, 9])
    },
}


@each_backend
@pytest.mark.parametrize("message", VALUES)
def test_invalid_value_writes_nothing(backend, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = changed(arguments(backend), backend, **VALUES[message])
    with pytest.raises(RuntimeError, match=message):
        backend.ops.rope_write_kv(**call)
    for name in ("key_cache", "value_cache", "query_out", "key_out"):
        assert not call[name].any()


@each_device_backend
def test_unchecked_tokens_with_invalid_values_are_skipped(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    positions = torch.tensor([2**62, 7, 3])
    slots = torch.tensor([5, 2**40, 9])
    call = changed(arguments(backend), backend, positions=positions, slot_mapping=slots)
    backend.ops.rope_write_kv(**call)
    for name in ("query_out", "key_out"):
        assert not call[name][0].any() and call[name][1:].any((1, 2)).all()
    for name in ("key_cache", "value_cache"):
        is_written = call[name].flatten(0, 1).any(2).any(1)
        assert is_written.nonzero().flatten().tolist() == [9]


@each_real_backend
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_function_gives_the_same(backend, in_place):
    call = arguments(backend)
    call["key_cache"], call["value_cache"] = (call[f"{x}_cache"] + 7 for x in ("key", "value"))
    tokens = ("query", "key", "value")

    def step(qkv, given):
        parts = dict(zip(tokens, columns(qkv * 2, [call[name].shape for name in tokens])))
        if in_place:
            parts |= {"query_out": None, "key_out": parts["key"]}
        ops.rope_write_kv(**{**given, **parts})
        return parts["query"] + 1, parts["key"] + 1

    qkv = torch.randn(3, 60, generator=torch.Generator().manual_seed(2)).to(backend.device)
    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = {name: each.clone() for name, each in call.items()}
        found.append([*function(qkv, given), *given.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found))
