# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_device_backend

INT32 = torch.int32
FIELDS = ("offset", "columns", "block_size", "world", "rank", "interleave", "window", "counts_row")


def reference_slot(row_ids, position, block_size, world, rank, interleave):
    """Return the slot of a position according to the documented formula, or -1 if another rank
    holds the position.
    """
    virtual = block_size * world
    offset = position % virtual
    if (offset // interleave) % world != rank:
        return -1
    local = offset // (world * interleave) * interleave + offset % interleave
    return int(row_ids[position // virtual]) * block_size + local


def reference(tables, groups, num_rows, rows, positions, num_out):
    out = torch.full((len(groups), num_out), -1, dtype=torch.int64)
    for g, (offset, columns, *sizes, _window, _counts) in enumerate(groups.tolist()):
        table = tables[offset : offset + num_rows * columns].view(num_rows, columns)
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist())):
            if row >= 0:
                out[g, i] = reference_slot(table[row], position, *sizes)
    return out


@st.composite
def group_sizes(draw):
    interleave = draw(st.integers(1, 6))
    block_size = interleave * draw(st.integers(1, 12))
    world = draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    return draw(st.integers(1, 7)), block_size, world, draw(st.integers(0, world - 1)), interleave


@st.composite
def calls(draw):
    num_rows = draw(st.integers(1, 6))
    fields, offset = [], 0
    for columns, *sizes in draw(st.lists(group_sizes(), min_size=1, max_size=4)):
        fields.append((offset, columns, *sizes, 0, len(fields)))
        offset += num_rows * columns
    groups = torch.tensor(fields)
    num_positions = min(c * bs * world for _, c, bs, world, *_ in fields)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(0, 90), max_size=5))
    request_rows = torch.randint(-1, num_rows, (len(lengths),), generator=generator).to(INT32)
    return {
        "tables": torch.randint(0, 2**20, (offset,), generator=generator).to(INT32),
        "groups": groups,
        "num_rows": num_rows,
        "rows": request_rows,
        "query_start_loc": torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT32),
        "positions": torch.randint(0, num_positions, (sum(lengths),), generator=generator),
        "num_blocks_per_row": None,
    }, draw(st.integers(0, 200))


@each_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@given(case=calls())
def test_slots_of_random_groups_by_request_and_by_token(backend, dtype, case):
    call, tail = case
    lengths = call["query_start_loc"].diff()
    token_rows = call["rows"].repeat_interleave(lengths)
    num_out = len(call["positions"]) + tail
    want = reference(
        call["tables"], call["groups"], call["num_rows"], token_rows, call["positions"], num_out
    )
    on = {
        n: v.to(backend.device) if isinstance(v, torch.Tensor) and n != "groups" else v
        for n, v in call.items()
    }
    for form in (on, {**on, "rows": token_rows.to(backend.device), "query_start_loc": None}):
        out = torch.full((len(call["groups"]), num_out), 12345, dtype=dtype, device=backend.device)
        backend.ops.slot_mapping(**form, out=out)
        assert torch.equal(out.cpu().long(), want)


@each_backend
@pytest.mark.parametrize("num_requests", [1, 1023, 1024, 1025, 5000])
def test_requests_of_tokens_are_found_among_many(backend, num_requests):
    """Some requests have no tokens. A thread block stores 1,024 entries of query_start_loc."""
    generator = torch.Generator().manual_seed(num_requests)
    lengths = torch.randint(0, 3, (num_requests,), generator=generator)
    lengths[0], lengths[-1] = 2, 2
    positions = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    rows = torch.randint(-1, num_requests, (num_requests,), generator=generator).to(INT32)
    tables = torch.randint(0, 2**20, (num_requests * 10,), generator=generator).to(INT32)
    groups = torch.tensor([[0, 10, 4, 1, 0, 1, 0, 0]])
    want = torch.full((1, len(positions) + 300), -1)
    token_rows = rows.repeat_interleave(lengths)
    blocks = tables.view(-1, 10)[token_rows.long().clamp(min=0), positions // 4].long()
    want[0, : len(positions)] = torch.where(token_rows < 0, -1, blocks * 4 + positions % 4)
    start = torch.tensor([0, *lengths.cumsum(0)], dtype=INT32)
    out = torch.zeros_like(want).to(backend.device)
    on = [x.to(backend.device) for x in (rows, start, positions)]
    backend.ops.slot_mapping(tables.to(backend.device), groups, num_requests, *on, None, out)
    assert torch.equal(out.cpu(), want)


@each_backend
def test_tokens_after_the_last_request_get_no_slot(backend):
    """As in a captured graph, the buffer is longer than the total number of the requests' tokens."""
    call = arguments(backend, positions=backend.tensor([0, 5, 3, 7]))
    call["rows"] = backend.tensor([0, 1, -1], dtype=INT32)
    call["query_start_loc"] = backend.tensor([0, 1, 2, 3], dtype=INT32)
    backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [[12, 25, -1, -1]]
    call["rows"] = backend.tensor([0, 1], dtype=INT32)  # now, the last request has tokens
    call["query_start_loc"] = backend.tensor([0, 1, 2], dtype=INT32)
    backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [[12, 25, -1, -1]]


@each_backend
@given(st.integers(1, 2**31 - 1), st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=20))
def test_division_is_exact_for_every_block_size(backend, block_size, positions):
    """Positions up to 2^31 - 1 cover the division, which is implemented as a multiplication."""
    columns = max(positions) // block_size + 1
    if columns > 100_000 or columns * block_size > 2**31 - 1:
        positions = [p % block_size for p in positions]
        columns = 1
    tables = torch.zeros(columns, dtype=INT32)
    tables[0] = 0
    groups = torch.tensor([[0, columns, block_size, 1, 0, 1, 0, 0]])
    out = torch.zeros(1, len(positions), dtype=torch.int64, device=backend.device)
    call = (torch.zeros(len(positions), dtype=INT32), None, torch.tensor(positions))
    on = [None if x is None else x.to(backend.device) for x in call]
    backend.ops.slot_mapping(tables.to(backend.device), groups, 1, *on, None, out)
    assert out[0].tolist() == [p % block_size for p in positions]


def arguments(backend, **changes):
    call = {
        "tables": backend.tensor([3, 4, 5, 6], dtype=INT32),
        "groups": torch.tensor([[0, 2, 4, 1, 0, 1, 0, 0]]),
        "num_rows": 2,
        "rows": backend.tensor([0, 1, -1], dtype=INT32),
        "query_start_loc": None,
        "positions": backend.tensor([0, 5, 2]),
        "num_blocks_per_row": None,
        "out": backend.tensor([[7, 7, 7, 7]]),
    }
    return {**call, **changes}


def group(**changes):
    fields = dict(zip(FIELDS, (0, 2, 4, 1, 0, 1, 0, 0)))
    return torch.tensor([[{**fields, **changes}[name] for name in FIELDS]])


BAD = {
    "tables has dtype Long": lambda b: {"tables": b.tensor([3, 4, 5, 6])},
    "tables is not contiguous": lambda b: {"tables": b.tensor([3, 0] * 4, dtype=INT32)[::2]},
    r"tables has shape \[2, 2\]": lambda b: {"tables": b.tensor([[3, 4], [5, 6]], dtype=INT32)},
    "rows has dtype Long": lambda b: {"rows": b.tensor([0, 1, -1])},
    r"rows has shape \[2\]: expected size 3": lambda b: {"rows": b.tensor([0, 1], dtype=INT32)},
    "positions has dtype Int": lambda b: {"positions": b.tensor([0, 5, 2], dtype=INT32)},
    "positions is not contiguous": lambda b: {"positions": b.tensor([0, 1, 5, 1, 2, 1])[::2]},
    "out has dtype Float": lambda b: {"out": b.tensor([[7.0] * 4])},
    r"out has shape \[4\]": lambda b: {"out": b.tensor([7] * 4)},
    r"out has shape \[1, 2\]: expected at least 3": lambda b: {"out": b.tensor([[7, 7]])},
    r"out has shape \[2, 4\]: expected size 1": lambda b: {"out": b.tensor([[7] * 4] * 2)},
    "out is not contiguous": lambda b: {"out": b.tensor([[7] * 8])[:, ::2]},
    "query_start_loc has dtype Long": lambda b: {"query_start_loc": b.tensor([0, 1, 2, 3])},
    r"query_start_loc has shape \[3\]: expected size 4":
        lambda b: {"query_start_loc": b.tensor([0, 1, 2], dtype=INT32)},
    r"groups has shape \[1, 6\]": lambda b: {"groups": torch.zeros(1, 6, dtype=torch.int64)},
    "groups has dtype Int": lambda b: {"groups": group().int()},
    "groups has 33 groups: expected at most 32": lambda b: {"groups": group().repeat(33, 1)},
    r"groups\[0\] has block size 0": lambda b: {"groups": group(block_size=0)},
    r"groups\[0\] has columns -1": lambda b: {"groups": group(columns=-1)},
    r"groups\[0\] has world size 0": lambda b: {"groups": group(world=0)},
    r"groups\[0\] has world size 2147483647": lambda b: {"groups": group(world=2**31 - 1)},
    r"groups\[0\] has rank 2": lambda b: {"groups": group(world=2, rank=2)},
    r"groups\[0\] has interleave 3: expected a divisor": lambda b: {"groups": group(interleave=3)},
    r"groups\[0\] has window -1": lambda b: {"groups": group(window=-1)},
    r"groups\[0\] has row of counts -1": lambda b: {"groups": group(counts_row=-1)},
    r"groups\[0\] refers to row 1 of num_blocks_per_row, which has 1":
        lambda b: {"groups": group(counts_row=1),
        "num_blocks_per_row": b.tensor([[2, 2]], dtype=INT32)},
    r"num_blocks_per_row has shape \[1, 3\]: expected size 2":
        lambda b: {"num_blocks_per_row": b.tensor([[2, 2, 2]], dtype=INT32)},
    "num_blocks_per_row has dtype Long": lambda b: {"num_blocks_per_row": b.tensor([[2, 2]])},
    r"groups\[0\] has offset 1: expected a table that lies within":
        lambda b: {"groups": group(offset=1)},
    r"groups\[0\] has offset -1": lambda b: {"groups": group(offset=-1)},
    r"groups\[0\] has offset 0: expected a table": lambda b: {"groups": group(columns=2**31 - 1)},
    "num_rows is 0": lambda b: {"num_rows": 0},
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    call = arguments(backend, **BAD[message](backend))
    before = call["out"].clone()
    with pytest.raises(RuntimeError, match=message):
        backend.ops.slot_mapping(**call)
    assert torch.equal(call["out"], before)


START = [0, 1, 2, 3]
BAD_VALUES = {
    r"rows\[1\] is 2: expected -1 \(a dummy request\) to 1": {"rows": [0, 2, -1]},
    r"rows\[2\] is -2": {"rows": [0, 1, -2]},
    r"positions\[1\] is 8: expected 0 to 7, because a row": {"positions": [0, 8, 2]},
    r"positions\[0\] is -1": {"positions": [-1, 8, 2]},
    r"positions\[1\] is 4294967296": {"positions": [0, 2**32, 2]},
    r"query_start_loc\[2\] is wrong: expected numbers from 0 to 3":
        {"query_start_loc": [0, 2, 1, 3]},
    r"query_start_loc\[0\] is wrong": {"query_start_loc": [-1, 2, 2, 3]},
    r"query_start_loc\[3\] is wrong": {"query_start_loc": [0, 2, 2, 4]},
    "the row of token 1 is 2: expected -1": {"query_start_loc": START, "rows": [0, 2, -1]},
    r"positions\[1\] is 5: expected less, because row 1 holds no block for it":
        {"num_blocks_per_row": [[2, 1]]},
    r"positions\[1\] is 9": {"query_start_loc": START, "positions": [0, 9, 2]},
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("message", BAD_VALUES)
def test_value_out_of_range_writes_nothing(backend, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = arguments(backend)
    for name, value in BAD_VALUES[message].items():
        call[name] = backend.tensor(value, dtype=torch.int64 if name == "positions" else INT32)
    with pytest.raises(RuntimeError, match=message):
        backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [[7, 7, 7, 7]]


@each_backend
def test_invalid_table_entry_gives_no_slot(backend):
    """The entry is written directly, because the classes reject negative ids. It must never produce
    a slot of another block.
    """
    call = arguments(backend, tables=backend.tensor([3, 4, 5, -1], dtype=INT32))
    for position in (4, 5, 6, 7):
        call["positions"] = backend.tensor([0, position, 2])
        backend.ops.slot_mapping(**call)
        assert call["out"].tolist() == [[12, -1, -1, -1]]


@each_device_backend
def test_unchecked_values_out_of_range_get_no_slot(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend, positions=backend.tensor([2**62, -5, 2]))
    backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [[-1, -1, -1, -1]]
    for start in ([-9, 1, 2, 3], [0, 2**30, 2, 3], [5, 4, 3, 2], [3, 3, 3, 2**31 - 1]):
        call = arguments(backend, query_start_loc=backend.tensor(start, dtype=INT32))
        call["rows"] = backend.tensor([5, 2**31 - 1, -7], dtype=INT32)
        backend.ops.slot_mapping(**call)
        assert call["out"].tolist() == [[-1, -1, -1, -1]]


@each_backend
def test_output_overlapping_an_input_is_rejected(backend):
    call = arguments(backend)
    call["positions"] = call["out"].view(-1)[:3]
    with pytest.raises(RuntimeError, match="out shares memory with positions"):
        backend.ops.slot_mapping(**call)


@each_device_backend
def test_unchecked_positions_beyond_a_row_get_no_slot(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = arguments(backend, num_blocks_per_row=backend.tensor([[2, 1]], dtype=INT32))
    call["positions"] = backend.tensor([7, 4, 2])
    backend.ops.slot_mapping(**call)
    assert call["out"].tolist() == [[19, -1, -1, -1]]
