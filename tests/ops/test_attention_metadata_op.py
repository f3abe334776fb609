# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.machinery.backends import each_backend, each_device_backend

INT32 = torch.int32
OUTPUTS = (
    "query_start_loc", "seqused_k", "block_tables", "paged_kv_indptr", "paged_kv_indices",
    "paged_kv_last_page_len",
)  # fmt: skip
UNTOUCHED = -5


def local_positions(seq_len, block_size, world, rank, interleave):
    """Return the positions whose KV this rank holds, in column order."""
    span = block_size * world
    return [p for p in range(seq_len) if p % span // interleave % world == rank]


def reference_request(fields, row_ids, query_len, seq_len):
    """Return (tokens on this rank, row of the block table, page list, tokens in the last page)."""
    _, _, block_size, world, rank, interleave, window, _ = fields
    span = block_size * world
    first_query = seq_len - query_len

    def hidden(column):
        return bool(window) and all(
            position <= first_query - window
            for position in range(column * span, (column + 1) * span)
        )

    local = len(local_positions(seq_len, block_size, world, rank, interleave))
    num_pages = -(-local // block_size)
    table = [0 if hidden(c) else id for c, id in enumerate(row_ids)]
    pages = [id for c, id in enumerate(row_ids[:num_pages]) if not hidden(c)]
    return local, table, pages, local - (num_pages - 1) * block_size if pages else 0


def reference(call):
    """Compute every output entry by entry, as documented."""
    out = {name: call[name].clone() for name in OUTPUTS if call[name] is not None}
    groups, num_rows = call["groups"].tolist(), call["num_rows"]
    requests = list(
        zip(call["rows"].tolist(), call["query_lens"].tolist(), call["seq_lens"].tolist())
    )
    num_out = len(out["query_start_loc"]) - 1
    requests += [(-1, 0, 0)] * (num_out - len(requests))
    starts = itertools.accumulate((query_len for _, query_len, _ in requests), initial=0)
    out["query_start_loc"][:] = torch.tensor(list(starts), dtype=INT32)
    all_columns = sum(columns for _, columns, *_ in groups)
    at = 0
    for g, fields in enumerate(groups):
        offset, columns, block_size, world = fields[:4]
        written = min(columns, -(-call["max_num_tokens"] // (block_size * world)))
        lists, indptr = [], [0]
        for i, (row, query_len, seq_len) in enumerate(requests):
            begin = offset + row * columns
            row_ids = call["tables"][begin : begin + columns].tolist() if row >= 0 else []
            local, table, pages, last = (
                reference_request(fields, row_ids, query_len, seq_len)
                if row >= 0
                else (0, [0] * columns, [], 0)
            )
            out["seqused_k"][g, i] = local
            lists += pages
            indptr.append(len(lists))
            if "paged_kv_last_page_len" in out:
                out["paged_kv_last_page_len"][g, i] = last
            if "block_tables" in out:
                capacity = len(out["block_tables"]) // all_columns
                place = capacity * at + i * columns
                out["block_tables"][place : place + written] = torch.tensor(table[:written])
        if "paged_kv_indptr" in out:
            out["paged_kv_indptr"][g] = torch.tensor(indptr)
        if "paged_kv_indices" in out:
            place = len(out["paged_kv_indices"]) // all_columns * at
            lists += [0] * (num_out * written - len(lists))
            out["paged_kv_indices"][place : place + len(lists)] = torch.tensor(lists, dtype=INT32)
        at += columns
    assert num_rows * all_columns <= call["tables"].numel()
    return out


def outputs(num_groups, num_out, capacity, all_columns, slack=0):
    """Return output tensors filled with a value that no kernel writes.

    The outputs of consecutive groups are `slack` entries apart.
    """

    def per_group(n):
        return torch.full((num_groups, n + slack), UNTOUCHED, dtype=INT32)[:, :n]

    return {
        "query_start_loc": torch.full((num_out + 1,), UNTOUCHED, dtype=INT32),
        "seqused_k": per_group(num_out),
        "block_tables": torch.full((capacity * all_columns,), UNTOUCHED, dtype=INT32),
        "paged_kv_indptr": per_group(num_out + 1),
        "paged_kv_indices": torch.full((capacity * all_columns,), UNTOUCHED, dtype=INT32),
        "paged_kv_last_page_len": per_group(num_out),
    }


@st.composite
def groups(draw, num_rows):
    fields, offset = [], 0
    for _ in range(draw(st.integers(1, 3))):
        world = draw(st.sampled_from([1, 1, 2, 3]))
        interleave = draw(st.integers(1, 4))
        block_size = interleave * draw(st.integers(1, 4))
        columns, rank = draw(st.integers(1, 30)), draw(st.integers(0, world - 1))
        window = draw(st.sampled_from([0, 0, 1, 5, 40]))
        fields.append((offset, columns, block_size, world, rank, interleave, window, len(fields)))
        offset += num_rows * columns
    return fields


@st.composite
def calls(draw):
    num_rows = draw(st.integers(1, 6))
    fields = draw(groups(num_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spans = [block_size * world for _, _, block_size, world, *_ in fields]
    counts = torch.stack(
        [
            torch.randint(0, columns + 1, (num_rows,), generator=generator)
            for _, columns, *_ in fields
        ]
    ).to(INT32)
    longest = (counts * torch.tensor(spans)[:, None]).min(dim=0).values.tolist()
    n = draw(st.integers(0, 12))
    rows = torch.randint(-1, num_rows, (n,), generator=generator).to(INT32)
    seq_lens = [draw(st.integers(0, longest[row] if row >= 0 else 50)) for row in rows.tolist()]
    query_lens = [draw(st.sampled_from([0, 1, s // 2, s])) for s in seq_lens]
    query_lens = [min(q, s) for q, s in zip(query_lens, seq_lens)]
    num_out = n + draw(st.integers(0, 4))
    num_ids = sum(num_rows * columns for _, columns, *_ in fields)
    all_columns = sum(columns for _, columns, *_ in fields)
    call = {
        "tables": torch.randint(1, 9999, (num_ids,), generator=generator).to(INT32),
        "groups": torch.tensor(fields),
        "num_rows": num_rows,
        "rows": rows,
        "query_lens": torch.tensor(query_lens, dtype=INT32),
        "seq_lens": torch.tensor(seq_lens, dtype=INT32),
        "num_blocks_per_row": counts,
        "max_num_tokens": max([s for s, r in zip(seq_lens, rows) if r >= 0],
            default=0) + draw(st.integers(0, 100)),
        **outputs(len(fields), num_out, num_out + draw(st.integers(0, 3)), all_columns,
            draw(st.integers(0, 3))),
    }  # fmt: skip
    wanted = draw(st.sampled_from(["all", "flash_attn", "flashinfer", "lengths", "host"]))
    if wanted in ("flashinfer", "lengths", "host"):
        call["block_tables"] = None
    if wanted in ("flash_attn", "lengths", "host"):
        call["paged_kv_indices"] = None
    if wanted in ("flash_attn", "lengths"):
        call["paged_kv_indptr"] = call["paged_kv_last_page_len"] = None
    return call


def put(call, device):
    """Move the arguments to a device. Outputs keep their strides, and groups stay on the CPU."""

    def moved(tensor):
        if tensor.is_contiguous():
            return tensor.to(device, copy=True)
        base = torch.full((tensor.shape[0], tensor.stride(0)), UNTOUCHED, dtype=INT32)
        return base.to(device)[:, : tensor.shape[1]]

    return {
        name: moved(value) if isinstance(value, torch.Tensor) and name != "groups" else value
        for name, value in call.items()
    }


def check(backend, call):
    on = put(call, backend.device)
    backend.ops.attention_metadata(**on)
    for name, want in reference(call).items():
        assert torch.equal(on[name].cpu(), want), name
        base = on[name]._base  # the base tensor has gaps between its rows
        if base is not None:
            assert bool((base[:, want.shape[1] :] == UNTOUCHED).all()), name


def large(num_requests, columns=3, block_size=4):
    """Return arguments with more requests than a block has threads or a grid has tiles."""
    generator = torch.Generator().manual_seed(num_requests)
    num_rows = 7
    lens = torch.randint(0, columns * block_size + 1, (num_requests,), generator=generator)
    queries = (lens * torch.rand(num_requests, generator=generator)).long()
    return {
        "tables": torch.randint(1, 999, (num_rows * columns,), generator=generator).to(INT32),
        "groups": torch.tensor([[0, columns, block_size, 1, 0, 1, 6, 0]]),
        "num_rows": num_rows,
        "rows": torch.randint(-1, num_rows, (num_requests,), generator=generator).to(INT32),
        "query_lens": queries.to(INT32),
        "seq_lens": lens.to(INT32),
        "num_blocks_per_row": torch.full((1, num_rows), columns, dtype=INT32),
        "max_num_tokens": columns * block_size,
        **outputs(1, num_requests, num_requests, columns),
    }


@pytest.mark.slow
@each_backend
@given(call=calls())
def test_random_batches_match_the_reference(backend, call):
    check(backend, call)


@each_backend
@pytest.mark.parametrize("num_requests", [0, 1, 127, 128, 129, 300, 2000])
def test_batches_larger_than_one_thread_block_match_the_reference(backend, num_requests):
    check(backend, large(num_requests))


@each_backend
def test_row_longer_than_one_pass_of_a_thread_block_is_copied(backend):
    call = large(2, columns=5000)
    call["seq_lens"] = torch.tensor([20_000, 9_999], dtype=INT32)
    call["query_lens"] = torch.tensor([1, 9_000], dtype=INT32)
    call["rows"] = torch.tensor([3, 0], dtype=INT32)
    check(backend, call)


@pytest.mark.slow
@each_backend
def test_many_requests_exceed_the_largest_tiles(backend):
    """A thread block handles at most 255 requests, so the grid has more than 128 blocks."""
    check(backend, large(33_000, columns=1))


def arguments(backend, **changes):
    """Return arguments for one request in row 1, one in row 0, and padding. Each row has two blocks
    of 4 tokens.
    """
    call = {
        "tables": backend.tensor([3, 4, 5, 6], dtype=INT32),
        "groups": torch.tensor([[0, 2, 4, 1, 0, 1, 0, 0]]),
        "num_rows": 2,
        "rows": backend.tensor([1, 0], dtype=INT32),
        "query_lens": backend.tensor([1, 2], dtype=INT32),
        "seq_lens": backend.tensor([5, 2], dtype=INT32),
        "num_blocks_per_row": backend.tensor([[1, 2]], dtype=INT32),
        "max_num_tokens": 8,
        **put(outputs(1, 3, 3, 2), backend.device),
    }
    return {**call, **changes}


def assert_untouched(call):
    for name in OUTPUTS:
        if isinstance(call[name], torch.Tensor) and call[name].device.type != "meta":
            assert bool((call[name] == UNTOUCHED).all()), name


def ints(b, *values):
    return b.tensor(values, dtype=INT32)


BAD = {
    "rows has dtype Long": lambda b: {"rows": b.tensor([1, 0])},
    r"rows has shape \[1, 2\]": lambda b: {"rows": ints(b, 1, 0).view(1, 2)},
    r"query_lens has shape \[3\]: expected size 2 in dimension 0, as rows has":
        lambda b: {"query_lens": ints(b, 1, 2, 0)},
    r"seq_lens has shape \[1\]: expected size 2": lambda b: {"seq_lens": ints(b, 5)},
    "seq_lens is not contiguous": lambda b: {"seq_lens": ints(b, 5, 0, 2)[::2]},
    "max_num_tokens is -1": lambda b: {"max_num_tokens": -1},
    r"groups has shape \[2, 3\]": lambda b: {"groups": torch.zeros(2, 3, dtype=torch.int64)},
    "groups has no group": lambda b: {"groups": torch.zeros(0, 8, dtype=torch.int64)},
    r"num_blocks_per_row has shape \[1, 3\]: expected size 2":
        lambda b: {"num_blocks_per_row": ints(b, 1, 2, 2).view(1, 3)},
    r"groups\[0\] refers to row 1 of num_blocks_per_row, which has 1":
        lambda b: {"groups": torch.tensor([[0, 2, 4, 1, 0, 1, 0, 1]])},
    r"query_start_loc has shape \[2\]: expected at least 3 entries, one more than rows":
        lambda b: {"query_start_loc": torch.full((2,), UNTOUCHED, dtype=INT32, device=b.device)},
    "query_start_loc has dtype Long": lambda b: {"query_start_loc": b.tensor([UNTOUCHED] * 4)},
    r"seqused_k has shape \[1, 2\]: expected size 3 in dimension 1, one less than":
        lambda b: {"seqused_k": torch.full((1, 2), UNTOUCHED, dtype=INT32, device=b.device)},
    "seqused_k has stride 2 in dimension 1":
        lambda b: {"seqused_k": torch.full((1, 6), UNTOUCHED, dtype=INT32, device=b.device)[:, ::2]},
    r"block_tables has shape \[4\]: expected a multiple of 2 entries .* at least 6 for 3":
        lambda b: {"block_tables": torch.full((4,), UNTOUCHED, dtype=INT32, device=b.device)},
    r"paged_kv_indices has shape \[7\]: expected a multiple of 2":
        lambda b: {"paged_kv_indices": torch.full((7,), UNTOUCHED, dtype=INT32, device=b.device)},
    r"paged_kv_indices has shape \[8\]: expected \[6\], as block_tables has":
        lambda b: {"paged_kv_indices": torch.full((8,), UNTOUCHED, dtype=INT32, device=b.device)},
    r"paged_kv_indptr has shape \[1, 3\]: expected size 4":
        lambda b: {"paged_kv_indptr": torch.full((1, 3), UNTOUCHED, dtype=INT32, device=b.device)},
    "are None: expected all, none, or only paged_kv_indices": lambda b: {"paged_kv_indptr": None},
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("message", BAD)
def test_invalid_argument_writes_nothing(backend, message):
    call = arguments(backend, **BAD[message](backend))
    with pytest.raises(RuntimeError, match=message):
        backend.ops.attention_metadata(**call)
    assert_untouched(call)


BAD_VALUES = {
    r"rows\[1\] is 2: expected -1 \(a padded request\) to 1": {"rows": [1, 2]},
    r"rows\[0\] is -2": {"rows": [-2, 0]},
    r"query_lens\[1\] is -1: expected 0 or more": {"query_lens": [1, -1]},
    r"seq_lens\[0\] is 0: expected at least query_lens\[0\], which is 1": {"seq_lens": [0, 2]},
    r"seq_lens\[0\] is -1": {"seq_lens": [-1, 2], "query_lens": [0, 0]},
    r"seq_lens\[0\] is 9: expected at most 8, the number of tokens": {"seq_lens": [9, 2]},
    r"seq_lens\[0\] is 2147483647": {"seq_lens": [2**31 - 1, 2]},
    r"seq_lens\[1\] is 5: expected less, because row 0 of some group holds no block": {
        "seq_lens": [5, 5]
    },
    r"seq_lens\[0\] is 5: expected at most max_num_tokens, which is 4": {"max_num_tokens": 4},
    r"query_lens add up to 2\^31 or more": {"rows": [-1, -1], "query_lens": [2**31 - 1, 1]},
}


@each_backend
@pytest.mark.parametrize("message", BAD_VALUES)
def test_value_out_of_range_writes_nothing(backend, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_CHECKED", "1")
    changes = {
        name: value if isinstance(value, int) else ints(backend, *value)
        for name, value in BAD_VALUES[message].items()
    }
    call = arguments(backend, **changes)
    with pytest.raises(RuntimeError, match=message):
        backend.ops.attention_metadata(**call)
    assert_untouched(call)


@each_device_backend
@pytest.mark.parametrize("message", BAD_VALUES)
def test_unchecked_invalid_request_becomes_padding(backend, message, monkeypatch):
    """The invalid request keeps its query length, so that the token offsets of other requests do
    not change.
    """
    monkeypatch.delenv("KVCACHE_CHECKED", raising=False)
    changes = {
        name: value if isinstance(value, int) else ints(backend, *value)
        for name, value in BAD_VALUES[message].items()
    }
    call = arguments(backend, **changes)
    backend.ops.attention_metadata(**call)
    start = call["query_start_loc"].tolist()
    lens = [max(0, n) for n in call["query_lens"].tolist()]
    assert start == [min(s, 2**31 - 1) for s in (0, lens[0], sum(lens), sum(lens))]
    (indptr,) = call["paged_kv_indptr"].tolist()
    wrong = 1 if "[1]" in message.replace("\\", "") else 0
    assert indptr[wrong + 1] == indptr[wrong]
    assert call["seqused_k"][0, wrong] == 0
    written = 1 if call["max_num_tokens"] == 4 else 2
    assert call["block_tables"].view(3, 2)[wrong, :written].tolist() == [0] * written
    # The other request's metadata is still written.
    if "rows" not in changes and "max_num_tokens" not in changes:
        assert call["seqused_k"][0, 1 - wrong] > 0


@each_backend
def test_page_count_beyond_int32_is_rejected(backend):
    """All 2^11 requests use the same row of 2^20 pages. No page list is written, because its size
    is limited.
    """
    n, columns = 2**11, 2**20
    call = put(
        {
            "tables": torch.zeros(columns, dtype=INT32),
            "groups": torch.tensor([[0, columns, 1, 1, 0, 1, 0, 0]]),
            "num_rows": 1,
            "rows": torch.zeros(n, dtype=INT32),
            "query_lens": torch.ones(n, dtype=INT32),
            "seq_lens": torch.full((n,), columns - 1, dtype=INT32),
            "num_blocks_per_row": torch.tensor([[columns]], dtype=INT32),
            "max_num_tokens": columns,
            **{name: outputs(1, n, 0, 1)[name] for name in OUTPUTS},
            "block_tables": None,
            "paged_kv_indices": None,
        },
        backend.device,
    )
    with pytest.raises(
        RuntimeError, match=r"may have 2147483648 pages in groups\[0\], expected fewer than 2\^31"
    ):
        backend.ops.attention_metadata(**call)
    assert_untouched(call)
    call["max_num_tokens"] -= 1
    backend.ops.attention_metadata(**call)
    assert call["paged_kv_indptr"][0, -1] == n * (columns - 1)


@each_backend
def test_overlapping_outputs_are_rejected(backend):
    call = arguments(backend)
    call["seq_lens"] = call["block_tables"][:2]
    with pytest.raises(RuntimeError, match="block_tables shares memory with seq_lens"):
        backend.ops.attention_metadata(**call)
    call = arguments(backend)
    call["paged_kv_indices"] = call["block_tables"]
    with pytest.raises(RuntimeError, match="paged_kv_indices shares memory with block_tables"):
        backend.ops.attention_metadata(**call)
    assert_untouched(call)


@each_backend
@given(length=st.integers(0, 2**31 - 1), window=st.sampled_from([0, 1, 4096, 2**31 - 1]))
@example(length=2**31 - 1, window=1)
def test_largest_positions_do_not_overflow(backend, length, window):
    """Columns hold 2^30 tokens each, so positions reach 2^31 - 2. With a window, pages near the
    last position are hidden.
    """
    call = arguments(backend, groups=torch.tensor([[0, 2, 2**30, 1, 0, 1, window, 0]]))
    call["seq_lens"], call["query_lens"] = ints(backend, length, 0), ints(backend, 0, 0)
    call["max_num_tokens"] = 2**31 - 1
    backend.ops.attention_metadata(**call)
    hidden = bool(window) and length - window + 1 >= 2**30
    assert call["seqused_k"].tolist() == [[length, 0, 0]]
    assert call["block_tables"].tolist()[:2] == [0 if hidden else 5, 6]
    pages = -(-length // 2**30) - hidden
    assert call["paged_kv_indptr"].tolist() == [[0, pages, pages, pages]]


@pytest.mark.gpu
def test_captured_launch_uses_changed_inputs():
    """The launch is captured once, and its inputs are then changed in place.

    Replays use the new rows, lengths, tables and number of requests from the same tensors.
    """
    call = put(large(40, columns=9), "cuda")
    torch.ops.kvcache.attention_metadata(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.kvcache.attention_metadata(**call)
    generator = torch.Generator().manual_seed(7)
    for num_requests in (40, 3, 0, 17):
        other = large(40, columns=9)
        other["tables"] = torch.randint(1, 999, other["tables"].shape, generator=generator).to(
            INT32
        )
        other["seq_lens"] = torch.randint(1, 37, (40,), generator=generator).to(INT32)
        other["query_lens"] = torch.ones(40, dtype=INT32)
        other["rows"][num_requests:] = -1
        other["query_lens"][num_requests:] = 0
        for name in ("tables", "seq_lens", "query_lens", "rows"):
            call[name].copy_(other[name])
        graph.replay()
        for name, want in reference(other).items():
            assert torch.equal(call[name].cpu(), want), name
