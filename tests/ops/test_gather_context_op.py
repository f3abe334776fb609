# SPDX-License-Identifier: Apache-2.0
"""The context of several requests is read through their block tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import ops
from tests.machinery.backends import (
    Backend,
    each_backend,
    each_device_backend,
)
from tests.machinery.emulation import emulated_ops
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
    after = [list(range(count)) for count in counts]
    is_sparse = draw(st.booleans())
    if is_sparse:  # positions in any order, with repetitions and -1
        lasts = [most - 1 - start for start in starts]
        after = [[draw(st.integers(-1, last)) for _ in x] for x, last in zip(after, lasts)]
    slots = [
        int(tables[r, (starts[r] + x) // block_size]) * block_size + (starts[r] + x) % block_size
        if x >= 0
        else -1
        for r in range(num_requests)
        for x in after[r]
    ]
    num_padding = draw(st.integers(0, 3))
    slots += [-1] * num_padding
    positions = int32([x for row in after for x in row] + [draw(st.integers(-9, 9))] * num_padding)
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
    given = [*caches, tables, cu_seq_lens, *outs, *scales, given_starts]
    return [*given, positions if is_sparse else None], torch.tensor(slots).long()


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
        "positions": int32([4, 0, -1, 4, 2, 0]),
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
    r"positions has dtype Long: expected Int": {"positions": torch.ones(6).long()},
    r"positions has shape \[5\]: expected size 6 in dimension 0, the tokens of key": {
        "positions": int32([0] * 5)
    },
    r"positions has shape \[3, 2\]: expected \[num_tokens\]": {
        "positions": torch.zeros(3, 2).int()
    },
    r"positions is not contiguous": {"positions": torch.zeros(12).int()[::2]},
    r"key shares memory with positions": {"positions": "key"},
    r"value has shape \[5, 1, 2\]: expected size 6": {"value": torch.ones(5, 1, 2)},
    r"key shares memory with key_cache": {"key": "key_cache"},
}


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    call = arguments(backend)
    for name, value in BAD[message].items():
        same = isinstance(value, str)
        if name == "positions" and same:
            call[name] = call[value].view(torch.int32).flatten()[:6]
        else:
            call[name] = (
                call[value].view(-1, 1, 2)[:6] if same else to_device(value, backend.device)
            )
    before = {name: each.clone() for name, each in call.items()}
    with pytest.raises(RuntimeError, match=message):
        backend.ops.gather_context(**call)
    assert all(torch.equal(call[name], before[name]) for name in call)


VALUES = {
    "token 0 has no entry in block_tables from 0 to 3": {"block_tables": int32([[3, 4], [2, 0]])},
    "token 4 has no entry in block_tables": {"seq_starts": int32([1, 4])},
    "token 1 has no entry in block_tables": {"seq_starts": int32([-1, 0])},
    "token 3 has no entry in block_tables": {"positions": int32([0, 0, 0, 5, 0, 0])},
    "token 5 has no entry in block_tables": {"positions": int32([0, 0, 0, 0, 0, -2])},
    "token 2 has no entry in block_tables": {"positions": int32([0, 0, 2**31 - 1, 0, 0, 0])},
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
    call["positions"] = None
    backend.ops.gather_context(**call)
    assert (call["key"][:5] == 7).all() and not (call["key"][5] == 7).any()


@each_device_backend
def test_unchecked_positions_outside_the_tables_are_skipped(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend)
    call["positions"] = int32([5, -2, -1, 0, 2**31 - 1, -(2**31)]).to(backend.device)
    backend.ops.gather_context(**call)
    kept = [bool((row == 7).all()) for row in call["key"]]
    assert kept == [True, True, False, False, True, True] and (call["key"][2] == 0).all()


@pytest.fixture
def emulated():
    found = emulated_ops()
    yield found
    found.map_host(0, 0, 0)


IN_PAGES = ("key_cache", "value_cache", "k_scale", "v_scale")


def host_call(op):
    """Return a call with fp8 caches and scales in them."""
    generator = torch.Generator().manual_seed(0)
    caches = [make_cache((4, 3, 2, 8), torch.float8_e4m3fn, "NHD", generator) for _ in range(2)]
    scales = [torch.rand(4, 3, 2, 2, generator=generator) for _ in range(2)]
    call = dict(zip(IN_PAGES, (*caches, *scales)))
    call |= {name: torch.full((6, 2, 8), 7.0) for name in ("key", "value")}
    if op == "gather_kv":
        return call | {"slot_mapping": torch.tensor([11, 3, -1, 0, 6, 4])}
    return arguments(Backend("cpu", "cpu")) | call


@pytest.mark.parametrize("op", ["gather_kv", "gather_context"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_host_memory_is_read_at_its_device_address(emulated, op, name):
    call = host_call(op)
    getattr(emulated, op)(**call)
    want = [call["key"].clone(), call["value"].clone()]
    seen = call[name].clone()  # what the device has at its own address
    emulated.map_host(call[name].data_ptr(), call[name].nbytes, seen.data_ptr())
    call[name].view(torch.uint8).fill_(1)
    call["key"].fill_(7), call["value"].fill_(7)
    getattr(emulated, op)(**call)
    assert torch.equal(bits(call["key"]), bits(want[0]))
    assert torch.equal(bits(call["value"]), bits(want[1]))


@pytest.mark.parametrize("op", ["gather_kv", "gather_context"])
@pytest.mark.parametrize("name", IN_PAGES)
@pytest.mark.parametrize("end", ["all", "last byte"])
def test_host_memory_that_is_not_pinned_is_rejected(emulated, op, name, end):
    call = host_call(op)
    size = call[name].nbytes
    skipped = 0 if end == "all" else size - 1
    emulated.map_host(call[name].data_ptr() + skipped, size - skipped, 0)
    with pytest.raises(RuntimeError, match=f"^{name} is host memory that is not pinned: expected"):
        getattr(emulated, op)(**call)
    assert (call["key"] == 7).all() and (call["value"] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gather_kv", "gather_context"])
def test_pages_in_pinned_host_memory(op):
    call = host_call(op)
    getattr(torch.ops.kvcache, op)(**call)
    there = {n: x.pin_memory() if n in IN_PAGES else x.cuda() for n, x in call.items()}
    there["key"].fill_(7), there["value"].fill_(7)
    getattr(torch.ops.kvcache, op)(**there)
    for name in ("key", "value"):
        assert torch.equal(bits(there[name].cpu()), bits(call[name]))
    for name in IN_PAGES:
        with pytest.raises(RuntimeError, match=f"^{name} is "):
            getattr(torch.ops.kvcache, op)(**{**there, name: there[name].clone()})
