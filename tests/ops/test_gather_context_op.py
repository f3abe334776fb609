# SPDX-License-Identifier: Apache-2.0
"""The context of several requests is read through their block tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import ops
from tests.machinery.backends import each_backend, each_device_backend, each_real_backend
from tests.ops.test_token_io_op import bits, make_cache, to_device

FORMATS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def cases(draw):
    """Return the arguments of `gather_context`, and the slots of its tokens."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_blocks, block_size, columns = (draw(st.integers(*n)) for n in ((1, 6), (1, 5), (1, 4)))
    num_requests = draw(st.integers(0, 5))
    tables = torch.randint(0, num_blocks, (num_requests, columns + 3), generator=generator)
    tables = tables.int()[:, :columns]
    most = columns * block_size
    counts = [draw(st.integers(0, most)) for _ in range(num_requests)]
    starts = [draw(st.integers(0, most - count)) for count in counts]
    cu_seq_lens = int32([sum(counts[:r]) for r in range(num_requests + 1)])
    slots = [
        int(tables[r, position // block_size]) * block_size + position % block_size
        for r in range(num_requests)
        for position in range(starts[r], starts[r] + counts[r])
    ]
    slots += [-1] * draw(st.integers(0, 3))
    format, layers = draw(st.sampled_from(FORMATS)), draw(st.sampled_from([(), (2,)]))
    dtype = format if format.itemsize > 1 else torch.bfloat16
    caches, outs, scales = [], [], []
    for size in (8, draw(st.sampled_from([0, 4]))):
        stored = size // 2 if format == torch.uint8 else size
        shape = *layers, num_blocks, block_size, 2
        caches.append(make_cache((*shape, stored), format, "NHD", generator))
        scales.append(torch.rand(*shape, 1, generator=generator) if format.itemsize == 1 else None)
        outs.append(torch.full((*layers, len(slots), 2, size), 7.0).to(dtype))
    given_starts = int32(starts) if any(starts) or draw(st.booleans()) else None
    return [*caches, tables, cu_seq_lens, *outs, *scales, given_starts], torch.tensor(slots).long()


@each_backend
@given(case=cases())
def test_tokens_are_those_of_the_slots(backend, case):
    arguments, slots = case
    want = [each.clone() for each in arguments[4:6]]
    ops.gather_kv(*arguments[:2], slots, *want, *arguments[6:8])
    there = [each if each is None else to_device(each, backend.device) for each in arguments]
    backend.ops.gather_context(*there)
    for got, expected in zip(there[4:6], want):
        assert torch.equal(bits(got.cpu()), bits(expected))


def arguments(backend):
    cache = torch.arange(24.0, device=backend.device).view(4, 3, 1, 2)
    call = {
        "key_cache": cache,
        "value_cache": cache + 100,
        "block_tables": int32([[3, 1], [2, 0]]),
        "cu_seq_lens": int32([0, 4, 6]),
        "key": torch.full((6, 1, 2), 7.0),
        "value": torch.full((6, 1, 2), 7.0),
        "seq_starts": int32([1, 0]),
    }
    return {name: each.to(backend.device) for name, each in call.items()}


BAD = {
    r"block_tables has dtype Long: expected Int": {"block_tables": torch.ones(2, 2).long()},
    r"block_tables has shape \[2\]: expected \[num_requests, num_columns\]": {
        "block_tables": int32([1, 2])
    },
    r"block_tables has stride 2 in its last dimension": {
        "block_tables": torch.ones(2, 4).int()[:, ::2]
    },
    r"cu_seq_lens has shape \[2\]: expected size 3 in dimension 0": {"cu_seq_lens": int32([0, 6])},
    r"seq_starts has shape \[1\]: expected size 2": {"seq_starts": int32([1])},
    r"value has shape \[5, 1, 2\]: expected size 6": {"value": torch.ones(5, 1, 2)},
    r"key shares memory with key_cache": {"key": "key_cache"},
}


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    call = arguments(backend)
    for name, value in BAD[message].items():
        same = isinstance(value, str)
        call[name] = call[value].view(-1, 1, 2)[:6] if same else value.to(backend.device)
    before = {name: each.clone() for name, each in call.items()}
    with pytest.raises(RuntimeError, match=message):
        backend.ops.gather_context(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


VALUES = {
    "token 2 has no entry in block_tables from 0 to 3": {"block_tables": int32([[3, 4], [2, 0]])},
    "token 5 has no entry in block_tables": {"seq_starts": int32([1, 5])},
    "token 0 has no entry in block_tables": {"seq_starts": int32([-1, 0])},
}


@each_backend
@pytest.mark.parametrize("message", VALUES)
def test_invalid_value_writes_nothing(backend, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend)
    call |= {name: each.to(backend.device) for name, each in VALUES[message].items()}
    with pytest.raises(RuntimeError, match=message):
        backend.ops.gather_context(**call)
    assert (call["key"] == 7).all()


@each_backend
@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([1, 4, 6], r"cu_seq_lens\[0\] is 1: expected 0"),
        ([0, 4, 3], r"cu_seq_lens\[2\] is 3: expected 4 to 6"),
        ([0, 4, 7], r"cu_seq_lens\[2\] is 7: expected 4 to 6"),
    ],
)
def test_lengths_that_do_not_fit_are_rejected(backend, lens, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend) | {"cu_seq_lens": int32(lens).to(backend.device)}
    with pytest.raises(RuntimeError, match=message):
        backend.ops.gather_context(**call)
    assert (call["key"] == 7).all()


@each_device_backend
def test_unchecked_tokens_outside_the_tables_are_skipped(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend)
    call["block_tables"] = int32([[-5, 9], [2, 0]]).to(backend.device)
    call["seq_starts"] = int32([1, -1]).to(backend.device)
    backend.ops.gather_context(**call)
    assert (call["key"][:5] == 7).all() and not (call["key"][5] == 7).any()


@each_real_backend
def test_opcheck(backend):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    call = arguments(backend)
    torch.library.opcheck(torch.ops.kvcache.gather_context.default, (), call, test_utils=checks)
