# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_device_backend

INT32 = torch.int32


@st.composite
def updates(draw):
    """Draw (tables, updates, expected tables)."""
    size = draw(st.integers(1, 600))
    tables = torch.arange(size, dtype=INT32)
    segments, values, after = [], [], tables.clone()
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=12, unique=True)))
    for start, stop in list(itertools.pairwise(cuts))[::2]:
        segments.append((start, stop - start, len(values)))
        new = list(range(10_000 + start, 10_000 + stop))
        values += new
        after[start:stop] = torch.tensor(new, dtype=INT32)
    header = 1 + 3 * len(segments)
    places = [x for start, n, at in segments for x in (start, n, header + at)]
    slack = [-7] * draw(st.integers(0, 5))
    return tables, torch.tensor([len(segments), *places, *values, *slack], dtype=INT32), after


@each_backend
@given(case=updates())
def test_segments_are_written_only_at_their_destinations(backend, case):
    tables, update, after = case
    on = tables.to(backend.device)
    backend.ops.update_block_tables(on, update.to(backend.device))
    assert torch.equal(on.cpu(), after)


@each_backend
@pytest.mark.parametrize("longest", [1, 4, 5, 150])
@pytest.mark.parametrize("num_segments", [31, 700, 1100])
def test_one_call_writes_many_segments_of_any_length(backend, num_segments, longest):
    """The launch has fewer warps than segments, and the segments have mixed lengths."""
    generator = torch.Generator().manual_seed(num_segments + longest)
    lengths = torch.randint(0, longest + 1, (num_segments,), generator=generator)
    gaps = torch.randint(0, 3, (num_segments,), generator=generator)
    starts = (lengths + gaps).cumsum(0) - lengths
    places = 1 + 3 * num_segments + lengths.cumsum(0) - lengths
    values = torch.arange(10_000, 10_000 + int(lengths.sum()))
    update = torch.cat(
        [torch.tensor([num_segments]), torch.stack([starts, lengths, places], 1).flatten(), values]
    ).to(INT32)
    tables = -torch.arange(int(starts[-1] + lengths[-1]) + 5, dtype=INT32)
    after = tables.clone()
    after[
        torch.repeat_interleave(starts - lengths.cumsum(0) + lengths, lengths)
        + torch.arange(int(lengths.sum()))
    ] = values.to(INT32)
    on = tables.to(backend.device)
    backend.ops.update_block_tables(on, update.to(backend.device))
    assert torch.equal(on.cpu(), after)


BAD_UPDATES = {
    r"updates\[0\], the number of segments, is negative": [[-1], [2, 0, 1, 4, 9], [2**31 - 1, 0]],
    "segment 0 of updates lies outside": [
        [1, 4, 2, 4, 9, 9],  # extends past the end of the tables
        [1, -1, 1, 4, 9],
        [1, 0, -1, 4, 9],
        [1, 0, 1, 5, 9],  # has values past the end of the buffer
        [1, 0, 1, -1, 9],
        [1, 2**31 - 1, 2**31 - 1, 4, 9],
    ],
}


@each_backend
@pytest.mark.parametrize("message", BAD_UPDATES)
def test_invalid_updates_write_nothing(backend, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    for values in BAD_UPDATES[message]:
        tables = backend.tensor([1, 2, 3, 4, 5], dtype=INT32)
        with pytest.raises(RuntimeError, match=message):
            backend.ops.update_block_tables(tables, backend.tensor(values, dtype=INT32))
        assert tables.tolist() == [1, 2, 3, 4, 5]


@each_device_backend
def test_unchecked_invalid_updates_write_nothing(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    for values in itertools.chain(*BAD_UPDATES.values()):
        tables = backend.tensor([1, 2, 3, 4, 5], dtype=INT32)
        backend.ops.update_block_tables(tables, backend.tensor(values, dtype=INT32))
        assert tables.tolist() == [1, 2, 3, 4, 5]


def reference_gather(tables, groups, num_rows, idx, computed, max_tokens, out):
    out = out.clone()
    for offset, columns, block_size, world, _, _, window, _ in groups.tolist():
        span = block_size * world
        for i, row in enumerate(idx.tolist()):
            for column in range(min(columns, -(-max_tokens // span))):
                hidden = window and (column + 1) * span <= int(computed[i]) - window + 1
                source = 0 if row < 0 or hidden else int(tables[offset + row * columns + column])
                out[offset + i * columns + column] = source
    return out


@st.composite
def gathers(draw):
    num_rows, offset, fields = draw(st.integers(1, 6)), 0, []
    for _ in range(draw(st.integers(1, 3))):
        columns, world = draw(st.integers(1, 150)), draw(st.sampled_from([1, 2]))
        block_size, window = draw(st.integers(1, 9)), draw(st.sampled_from([0, 1, 5, 40]))
        fields.append((offset, columns, block_size, world, 0, 1, window, 0))
        offset += num_rows * columns
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n = draw(st.integers(0, num_rows))
    # Offsets make the addresses aligned to one, two or four ids, equally or differently on both
    # sides.
    in_tables, in_out = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return {
        "tables": torch.randint(1, 999, (in_tables + offset,), generator=generator).to(INT32)[
            in_tables:
        ],
        "groups": torch.tensor(fields),
        "num_rows": num_rows,
        "idx_mapping": torch.randint(-1, num_rows, (n,), generator=generator).to(INT32),
        "num_computed_tokens": torch.randint(0, 300, (n,), generator=generator).to(INT32),
        "max_num_tokens": draw(st.integers(0, 1500)),
        "out": torch.full((in_out + offset,), -5, dtype=INT32)[in_out:],
    }


def to_device(tensor, device):
    """Move a tensor without changing its alignment relative to four ids, which `.to` would improve."""
    if device == "cpu":
        return tensor
    skipped = tensor.storage_offset()
    whole = torch.empty(skipped + tensor.numel(), dtype=tensor.dtype, device=device)
    return whole[skipped:].copy_(tensor)


@each_backend
@given(call=gathers())
def test_rows_are_in_batch_order_without_hidden_blocks(backend, call):
    want = reference_gather(*call.values())
    on = {
        n: to_device(v, backend.device) if isinstance(v, torch.Tensor) and n != "groups" else v
        for n, v in call.items()
    }
    backend.ops.gather_block_tables(**on)
    assert torch.equal(on["out"].cpu(), want)


def gather_arguments(backend, **changes):
    call = {
        "tables": backend.tensor([3, 4, 5, 6], dtype=INT32),
        "groups": torch.tensor([[0, 2, 4, 1, 0, 1, 0, 0]]),
        "num_rows": 2,
        "idx_mapping": backend.tensor([1, -1], dtype=INT32),
        "num_computed_tokens": backend.tensor([0, 0], dtype=INT32),
        "max_num_tokens": 8,
        "out": backend.tensor([9, 9, 9, 9], dtype=INT32),
    }
    return {**call, **changes}


@each_backend
@pytest.mark.parametrize(("name", "make", "message"), [
    ("idx_mapping", lambda b: b.tensor([0]), "idx_mapping has dtype Long"),
    ("idx_mapping", lambda b: b.tensor([0, 1, 0], dtype=INT32),
     "idx_mapping has 3 entries: expected at most num_rows, which is 2"),
    ("num_computed_tokens", lambda b: b.tensor([0], dtype=INT32), r"shape \[1\]: expected size"),
    ("max_num_tokens", lambda b: -1, "max_num_tokens is -1"),
    ("out", lambda b: b.tensor([9] * 3, dtype=INT32),
     r"out has shape \[3\]: expected the tables of 1 groups to fit"),
])  # fmt: skip
def test_invalid_gather_argument_is_rejected(backend, name, make, message):
    call = gather_arguments(backend, **{name: make(backend)})
    before = call["out"].clone()
    with pytest.raises(RuntimeError, match=message):
        backend.ops.gather_block_tables(**call)
    assert torch.equal(call["out"], before)


@each_backend
def test_tables_cannot_be_gathered_onto_themselves(backend):
    call = gather_arguments(backend)
    call["out"] = call["tables"]
    with pytest.raises(
        RuntimeError, match="out shares memory with tables: expected memory of its own"
    ):
        backend.ops.gather_block_tables(**call)


@each_backend
def test_index_out_of_range_writes_nothing(backend, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    call = gather_arguments(backend, idx_mapping=backend.tensor([0, 2], dtype=INT32))
    with pytest.raises(RuntimeError, match=r"idx_mapping\[1\] is 2: expected -1"):
        backend.ops.gather_block_tables(**call)
    assert call["out"].tolist() == [9] * 4


@each_device_backend
def test_unchecked_index_out_of_range_gives_a_null_row(backend, monkeypatch):
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    call = gather_arguments(backend, idx_mapping=backend.tensor([2**31 - 1, -9], dtype=INT32))
    backend.ops.gather_block_tables(**call)
    assert call["out"].tolist() == [0] * 4


@each_backend
def test_updates_inside_the_tables_are_rejected(backend):
    both = backend.tensor([1, 0, 1, 4, 900000], dtype=INT32)
    with pytest.raises(RuntimeError, match="tables shares memory with updates"):
        backend.ops.update_block_tables(both, both)
