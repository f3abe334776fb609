import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends import each_backend, each_device_backend, each_real_backend
from tests.emulation import ASAN


def reference(block_table, rows, positions, block_size, num_out):
    """A4 of the contract, token by token."""
    out = torch.full((num_out,), -1, dtype=torch.int64)
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
        if row >= 0:
            block = int(block_table[row, position // block_size])
            out[i] = block * block_size + position % block_size
    return out


@st.composite
def calls(draw):
    block_size = draw(st.integers(1, 48))
    num_rows, num_columns = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    num_tokens, tail = draw(st.integers(0, 300)), draw(st.integers(0, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (
        torch.randint(0, 2**31 - 1, (num_rows, num_columns), generator=generator).int(),
        torch.randint(-1, num_rows, (num_tokens,), generator=generator).int(),
        torch.randint(0, num_columns * block_size, (num_tokens,), generator=generator),
        block_size,
        num_tokens + tail,
    )


@each_backend
@given(call=calls())
def test_slots_of_random_tables(backend, call):
    table, rows, positions, block_size, num_out = call
    out = torch.full((num_out,), 12345, dtype=torch.int64, device=backend.device)
    to = [t.to(backend.device) for t in (table, rows, positions)]
    backend.ops.slot_mapping(*to, block_size, out)
    assert torch.equal(out.cpu(), reference(table, rows, positions, block_size, num_out))


def arguments(backend, **changes):
    call = {
        "block_table": backend.tensor([[3, 4], [5, 6]], dtype=torch.int32),
        "row_indices": backend.tensor([0, 1, -1], dtype=torch.int32),
        "positions": backend.tensor([0, 5, 2]),
        "block_size": 4,
        "out": backend.tensor([7, 7, 7, 7]),
    }
    return {**call, **changes}


@each_backend
def test_the_tail_and_dummy_requests_get_no_slot(backend):
    call = arguments(backend)
    backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [12, 25, -1, -1]


BAD = {
    "block_table has dtype Long": lambda b: {"block_table": b.tensor([[3, 4], [5, 6]])},
    "row_indices has dtype Long": lambda b: {"row_indices": b.tensor([0, 1, -1])},
    "positions has dtype Int": lambda b: {"positions": b.tensor([0, 5, 2], dtype=torch.int32)},
    "out has dtype Int": lambda b: {"out": b.tensor([7] * 4, dtype=torch.int32)},
    r"block_table has shape \[2\]: expected \[num_rows, num_columns\]": lambda b: {
        "block_table": b.tensor([3, 4], dtype=torch.int32)
    },
    r"row_indices has shape \[2\]: expected size 3": lambda b: {
        "row_indices": b.tensor([0, 1], dtype=torch.int32)
    },
    r"out has shape \[2\]: expected at least 3": lambda b: {"out": b.tensor([7, 7])},
    "block_table is not contiguous": lambda b: {
        "block_table": b.tensor([[3, 4], [5, 6]], dtype=torch.int32).t()
    },
    "positions is not contiguous": lambda b: {"positions": b.tensor([0, 1, 5, 1, 2, 1])[::2]},
    "out is not contiguous": lambda b: {"out": b.tensor([7] * 8)[::2]},
    "block_size is 0: expected 1 or more": lambda b: {"block_size": 0},
    "block_size is -4: expected 1 or more": lambda b: {"block_size": -4},
}


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_a_wrong_argument_is_named_and_nothing_is_written(backend, message):
    call = arguments(backend, **BAD[message](backend))
    before = call["out"].clone()
    with pytest.raises(RuntimeError, match=message):
        backend.ops.slot_mapping(**call)
    assert torch.equal(call["out"], before)


BAD_VALUES = {
    r"row_indices\[1\] is 2: expected -1 \(a dummy request\) to 1": {"row_indices": [0, 2, -1]},
    r"row_indices\[2\] is -2": {"row_indices": [0, 1, -2]},
    r"positions\[1\] is 8: expected 0 to 7, as a row has 2 blocks of 4": {"positions": [0, 8, 2]},
    r"positions\[0\] is -1": {"positions": [-1, 8, 2]},
}


@each_backend
@pytest.mark.parametrize("message", BAD_VALUES)
def test_a_value_out_of_range_is_named_and_nothing_is_written(backend, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend)
    for name, value in BAD_VALUES[message].items():
        call[name] = backend.tensor(value, dtype=call[name].dtype)
    with pytest.raises(RuntimeError, match=message):
        backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [7, 7, 7, 7]


@each_device_backend
def test_unchecked_values_out_of_range_get_no_slot_on_a_device(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend, positions=backend.tensor([2**62, -5, 2]))
    backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [-1, -1, -1, -1]


@pytest.mark.skipif(ASAN, reason="opcheck is about the op, not the kernel")
@each_real_backend
def test_opcheck(backend):
    call = arguments(backend)
    torch.library.opcheck(torch.ops.kvcache.slot_mapping.default, (), call)
