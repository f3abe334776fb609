# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from hypothesis import given

from kvcache import AttentionMetadataBuilder, BlockTables, ContextParallel, TableShape
from kvcache.compat.vllm_block_table import BlockTable, MultiGroupBlockTable
from kvcache.worker.tables import attention_metadata
from tests.machinery.paged_attention import BatchOfTokens, flash_attention, flash_infer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INT32 = torch.int32


def make_tables(device="cpu", pin_memory=False, **options):
    """Make tables for a full-attention group and a group with a window of 9 tokens.

    Blocks have 8 tokens, and rows 0 to 2 have slots for up to 64 tokens.
    """
    tables = BlockTables(
        [TableShape(8, 8), TableShape(16, 4, kernel_block_size=8, window=9, **options)],
        max_num_reqs=4, max_num_tokens=16, pin_memory=pin_memory, device=device,
    )  # fmt: skip
    for row, (full, windowed) in enumerate([([1, 2, 3], [4, 5]), ([6], [7]), (range(9, 17), [8])]):
        tables.add_row((full, windowed), row)
    tables.commit_updates()
    return tables


def contents(batch):
    """Return all tensors of a batch as lists, keyed by group and name."""
    found = {"query_start_loc": batch.query_start_loc.tolist()}
    for g, group in batch.groups.items():
        for name in group.__slots__:
            value = getattr(group, name, None)
            if isinstance(value, torch.Tensor) and not name.endswith("_cpu"):
                found[g, name] = value.tolist()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_metadata_of_a_mixed_batch_is_correct_for_two_groups(device):
    builder = AttentionMetadataBuilder(make_tables(device))
    batch = builder.build([2, 0], [5, 1], [16, 24], num_padded_reqs=3, num_padded_tokens=8)
    assert (batch.num_reqs, batch.num_tokens) == (3, 8)
    assert (batch.max_query_len, batch.max_seq_len) == (5, 24)
    assert batch.query_start_loc.tolist() == [0, 5, 6, 6]
    full, windowed = batch[0], batch[1]
    assert full.seqused_k.tolist() == windowed.seqused_k.tolist() == [16, 24, 0]
    assert full.block_table[:, :4].tolist() == [[9, 10, 11, 12], [1, 2, 3, 0], [0, 0, 0, 0]]
    # Positions 11 to 15 attend to positions 3 and later. Position 23 attends to positions 15 and
    # later, so column 0 is hidden.
    assert windowed.block_table[:, :4].tolist() == [[16, 17, 0, 0], [0, 9, 10, 11], [0, 0, 0, 0]]
    assert full.paged_kv_indptr.tolist() == [0, 2, 5, 5]
    assert full.paged_kv_indices.tolist() == [9, 10, 1, 2, 3]
    assert full.paged_kv_last_page_len.tolist() == [8, 8, 0]
    assert windowed.paged_kv_indptr.tolist() == [0, 2, 4, 4]
    assert windowed.paged_kv_indices.tolist() == [16, 17, 9, 10]
    assert windowed.paged_kv_last_page_len.tolist() == [8, 8, 0]
    assert (full.block_size, full.window, windowed.window) == (8, None, 9)
    assert full.paged_kv_indptr_cpu.tolist() == full.paged_kv_indptr.tolist()
    assert full.paged_kv_last_page_len_cpu.tolist() == [8, 8, 0]
    assert batch.query_start_loc_cpu.tolist() == [0, 5, 6, 6]
    for tensor in (full.seqused_k, full.block_table, full.paged_kv_indices, batch.query_start_loc):
        assert tensor.dtype == INT32 and tensor.device.type == device and tensor.stride(-1) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_lists_arrays_and_tensors_are_equivalent(device):
    builder = AttentionMetadataBuilder(make_tables(device))
    given = [2, 0, -1], [5, 1, 0], [16, 24, 99]
    want = contents(builder.build(*given))
    forms = [
        [np.array(x) for x in given],
        [np.array(x, np.int32) for x in given],
        [torch.tensor(x) for x in given],
        [torch.tensor(x, dtype=INT32) for x in given],
    ]
    for form in forms:
        assert contents(builder.build(*form)) == want
    by_row = contents(builder.build([0, 1], [1, 1], [24, 8]))
    assert contents(builder.build(None, [1, 1], [24, 8])) == by_row


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_keep_addresses_but_no_data_of_earlier_batches(device):
    tables = make_tables(device)
    builder = AttentionMetadataBuilder(tables)

    def addresses(batch):
        tensors = [batch.query_start_loc]
        for group in batch.groups.values():
            tensors += [group.seqused_k, group.block_table, group.paged_kv_indices]
            tensors += [group.paged_kv_indptr, group.paged_kv_last_page_len]
        return [tensor.data_ptr() for tensor in tensors]

    first = builder.build([2, 0, 1], [1, 1, 1], [16, 24, 8])
    places = addresses(first)
    second = builder.build([1], [1], [8], num_padded_reqs=3)
    assert addresses(second) == places
    assert second[0].block_table.tolist() == [[6] + [0] * 7, [0] * 8, [0] * 8]
    everything = builder._buffers[4].gpu.cpu()
    assert everything.tolist()[:1] == [6] and not everything[1:12].any()


def test_number_of_cached_views_is_limited():
    count = attention_metadata.MAX_CACHED_VIEWS + 5
    tables = BlockTable(4, count, 1, 16, False, "cpu", 4)
    for row in range(count):
        tables.add_row([row + 1], row)
    builder = AttentionMetadataBuilder(tables)
    for n in [*range(count + 1), *range(0, count, 7)]:
        batch = builder.build(None, [1] * n, [3] * n)
        assert batch[0].paged_kv_indices.tolist() == list(range(1, n + 1))
        assert batch.query_start_loc.tolist() == list(range(n + 1))
    assert len(builder._views) <= attention_metadata.MAX_CACHED_VIEWS


def test_only_requested_outputs_are_built():
    tables = make_tables()
    flash = AttentionMetadataBuilder(tables, flashinfer=False).build([0], [1], [24])[0]
    assert flash.block_table.tolist()[0][:3] == [1, 2, 3]
    infer = AttentionMetadataBuilder(tables, flash_attn=False).build([0], [1], [24])[0]
    assert infer.paged_kv_indices.tolist() == [1, 2, 3]
    for built, name, option in [
        (infer, "block_table", "flash_attn=True"),
        (flash, "paged_kv_indptr", "flashinfer=True"),
        (flash, "paged_kv_indices", "flashinfer=True"),
        (flash, "paged_kv_last_page_len", "flashinfer=True"),
        (flash, "paged_kv_indptr_cpu", "flashinfer=True, and lengths on the host"),
        (flash, "paged_kv_last_page_len_cpu", "flashinfer=True, and lengths on the host"),
    ]:
        with pytest.raises(AttributeError, match=f"{name} was not built: .* with {option}$"):
            getattr(built, name)
    with pytest.raises(AttributeError, match="GroupMetadata has no attribute 'block_tabel'"):
        infer.block_tabel  # noqa: B018
    assert "block_table" not in repr(infer)


def test_only_groups_with_tables_are_served_by_default():
    tables = make_tables(slot_mapping=False)
    assert list(AttentionMetadataBuilder(tables).build([0], [1], [9]).groups) == [0]
    both = AttentionMetadataBuilder(tables, groups=[1, 0]).build([0], [1], [9])
    assert both[1].paged_kv_indices.tolist() == [8, 9]
    assert both[0].paged_kv_indices.tolist() == [1, 2]
    # The builder also accepts one of several tables.
    one = AttentionMetadataBuilder(tables[1]).build([0], [1], [9])
    assert list(one.groups) == [1] and one[1].paged_kv_indices.tolist() == [8, 9]


@pytest.mark.parametrize("rank", range(4))
def test_context_parallel_lengths_are_local_and_bounded(rank):
    cp = ContextParallel(dcp_world_size=4, dcp_rank=rank)
    tables = MultiGroupBlockTable(
        2, 256, 64, False, "cpu", [8, 8],
        cp_kv_cache_interleave_size=2, context_parallel=cp, replicated=[False, True],
    )  # fmt: skip
    tables.add_row((range(1, 9), range(1, 33)), 0)
    builder = AttentionMetadataBuilder(tables)
    for length in range(1, 257):
        batch = builder.build([0], [1], [length])
        local = sum(p // 2 % 4 == rank for p in range(length))
        assert batch[0].seqused_k.tolist() == [local] and batch[1].seqused_k.tolist() == [length]
        assert local <= batch[0].max_seqlen_k <= min(length, local + 2)
        assert batch[1].max_seqlen_k == batch.max_seq_len == length


def test_bounds_below_the_batch_sizes_are_rejected():
    builder = AttentionMetadataBuilder(make_tables())
    batch = builder.build([0], [3], [20], max_query_len=8, max_seq_len=64, num_padded_tokens=3)
    assert (batch.max_query_len, batch.max_seq_len, batch.num_tokens) == (8, 64, 3)
    empty = builder.build([], [], [])
    assert (empty.max_query_len, empty.max_seq_len, empty.num_reqs) == (0, 0, 0)
    assert empty.query_start_loc.tolist() == [0] and empty[0].paged_kv_indices.numel() == 0


BAD = [
    (ValueError, "max_query_len is 2: expected at least 3", {"max_query_len": 2}),
    (ValueError, "max_seq_len is 19: expected at least 20", {"max_seq_len": 19}),
    (ValueError, "num_padded_tokens is 2: expected at least 3", {"num_padded_tokens": 2}),
    (ValueError, "num_padded_reqs is 0: expected at least 1", {"num_padded_reqs": 0}),
    (TypeError, "num_padded_reqs is 1.5: expected an integer", {"num_padded_reqs": 1.5}),
    (ValueError, r"max_seq_len is 10{12}: expected fewer than 2\^31", {"max_seq_len": 10**12}),
    (
        ValueError,
        "there are 5 requests including padding: expected at most max_num_reqs=4",
        {"num_padded_reqs": 5},
    ),
    (ValueError, r"seq_lens has shape \[2\]: expected \[1\]", {"seq_lens": [20, 3]}),
    (ValueError, r"rows has shape \[1, 1\]: expected \[1\]", {"rows": [[0]]}),
    (ValueError, r"query_lens has shape \[1, 1\]", {"query_lens": [[3]]}),
    (ValueError, "there are 5 requests without rows", {"rows": None, "query_lens": [1] * 5}),
    (TypeError, "seq_lens has dtype float64: expected integers", {"seq_lens": [20.0]}),
    (ValueError, r"seq_lens\[0\] is 4294967296: expected int32", {"seq_lens": [2**32]}),
    (ValueError, "query_lens is on the cpu: expected all arguments on one device", {
        "rows": torch.zeros(1, dtype=INT32, device="meta"),
        "seq_lens": torch.zeros(1, dtype=INT32, device="meta"),
    }),
    (RuntimeError, r"rows\[0\] is 4: expected -1 \(a padded request\) to 3", {"rows": [4]}),
    (RuntimeError, r"seq_lens\[0\] is 2: expected at least query_lens\[0\]", {"seq_lens": [2]}),
    (RuntimeError, r"query_lens\[0\] is -1", {"query_lens": [-1]}),
    (RuntimeError, r"seq_lens\[0\] is 65: expected at most 64", {"seq_lens": [65]}),
    (RuntimeError, r"seq_lens\[0\] is 25: .* row 0 of some group holds no block .* append", {
        "seq_lens": [25]
    }),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("error", "message", "change"), BAD, ids=[m for _, m, _ in BAD])
def test_invalid_batch_changes_nothing(device, error, message, change):
    builder = AttentionMetadataBuilder(make_tables(device))
    good = {"rows": [0], "query_lens": [3], "seq_lens": [20]}
    batch = builder.build(**good)
    before = contents(batch)
    with pytest.raises(error, match=message):
        builder.build(**{**good, **change})
    assert contents(batch) == before
    assert contents(builder.build(**good)) == before


def test_invalid_builder_is_rejected():
    tables = make_tables()
    for groups in ([], [2], [-1], [0, 0]):
        with pytest.raises(ValueError, match=r"groups is .*: expected one or more of 0 to 1"):
            AttentionMetadataBuilder(tables, groups=groups)
    with pytest.raises(ValueError, match="max_num_reqs is 0: expected 1"):
        AttentionMetadataBuilder(tables, 0)
    with pytest.raises(ValueError, match=r"expected fewer than 2\^31 table entries, with 16"):
        AttentionMetadataBuilder(tables, 2**30)
    for groups in (0, "0", ["a"], [0.0]):
        with pytest.raises(TypeError, match=r"groups is .*: expected one or more of 0 to 1"):
            AttentionMetadataBuilder(tables, groups=groups)
    with pytest.raises(TypeError, match="tables is None: expected a BlockTables or GroupTable"):
        AttentionMetadataBuilder(None)


@given(batch=BatchOfTokens.strategy(world_sizes=(2, 3), windows=(1, 3, 8), decode=True))
def test_window_with_context_parallelism_is_rejected(batch):
    for rank in range(batch.world_size):
        with pytest.raises(ValueError, match=r"group 0 has a window of .* context-parallel ranks"):
            AttentionMetadataBuilder(batch.make_tables(rank))


def columns_written(builder, monkeypatch):
    """Return a list to which each launch of a CPU builder appends its bound on the number of tokens."""
    bounds, launch = [], builder._tables.attention_metadata

    def record(fields, requests, max_num_tokens, *rest, **options):
        bounds.append(max_num_tokens)
        launch(fields, requests, max_num_tokens, *rest, **options)

    monkeypatch.setattr(builder._tables, "attention_metadata", record)
    return bounds


def test_long_row_slows_only_one_later_build(monkeypatch):
    tables = BlockTable(4, 4, 64, 16, False, "cpu", 4)
    tables.add_row(range(1, 65), 0)
    tables.add_row([70], 1)
    builder = AttentionMetadataBuilder(tables)
    bounds = columns_written(builder, monkeypatch)
    builder.build([0, 1], [1, 1], [256, 3])
    for _ in range(2):  # the long row still exists but is not in the batch
        assert builder.build([1], [1], [3])[0].block_table.tolist() == [[70] + [0] * 63]
    assert bounds == [256, 256, 4]
    # The previous batches did not overwrite the second row of the output.
    tables.add_row([71], 0)
    rows = builder.build([1, 0], [1, 1], [3, 3])[0].block_table.tolist()
    assert rows == [[70] + [0] * 63, [71] + [0] * 63]
    builder.build([0, 1], [1, 1], [3, 3])
    assert bounds[3:] == [256, 4]


@pytest.mark.slow
@given(batch=BatchOfTokens.strategy())
def test_paged_attention_equals_dense_attention(batch):
    """With the tensors for both backends, attention reads the correct K and V.

    Blocks to which no query may attend (the null block, free blocks, and blocks outside the window)
    contain NaN.
    """
    tables = batch.make_tables()
    caches = batch.fill_caches(tables)
    built = AttentionMetadataBuilder(tables).build(
        batch.rows,
        batch.query_lens,
        batch.seq_lens,
        num_padded_reqs=len(batch.rows) + batch.padding,
    )
    for g, cache in enumerate(caches):
        want = batch.dense_attention(g)
        for attention in (flash_attention, flash_infer):
            got = attention(batch.queries, cache, built.query_start_loc, built[g])
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@given(batch=BatchOfTokens.strategy(world_sizes=(2, 3), windows=(None,), decode=True))
def test_context_parallel_decode_equals_dense_attention(batch):
    """Each rank attends to its own tokens, and the outputs of the ranks are combined with their
    softmax weights.
    """
    parts = {name: [] for name in ("flash_attention", "flash_infer")}
    for rank in range(batch.world_size):
        tables = batch.make_tables(rank)
        caches = batch.fill_caches(tables)
        built = AttentionMetadataBuilder(tables).build(batch.rows, batch.query_lens, batch.seq_lens)
        for attention in (flash_attention, flash_infer):
            parts[attention.__name__].append(
                attention(batch.queries, caches[0], built.query_start_loc, built[0], weights=True)
            )
    for by_rank in parts.values():
        outputs = torch.stack([output for output, _ in by_rank])
        weights = torch.softmax(torch.stack([weight for _, weight in by_rank]), dim=0)
        got = (outputs * weights[..., None]).sum(0)
        torch.testing.assert_close(got, batch.dense_attention(0), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_device_lengths_match_without_synchronizing():
    tables = make_tables("cuda")
    builder = AttentionMetadataBuilder(tables)
    given = [2, 0, -1], [5, 1, 0], [16, 24, 0]
    want = contents(builder.build(*given))
    on_device = [torch.tensor(x, dtype=INT32, device="cuda") for x in given]
    builder.build(*on_device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = builder.build(*on_device)
        builder.build(*given)  # neither build waits, because there are two staging buffers
        batch = builder.build(*on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert not hasattr(batch[0], "paged_kv_indptr_cpu")
    assert not hasattr(batch, "query_start_loc_cpu")
    assert (batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (16, 16, 64)
    got = contents(batch)
    for name, value in want.items():
        if name[1] == "paged_kv_indices":  # the host does not know the number of pages
            assert got[name][: len(value)] == value and not any(got[name][len(value) :])
        else:
            assert got[name] == value, name


@pytest.mark.gpu
def test_captured_build_serves_later_batches():
    tables = make_tables("cuda")
    builder = AttentionMetadataBuilder(tables)
    eager = AttentionMetadataBuilder(tables)
    inputs = [torch.zeros(4, dtype=INT32, device="cuda") for _ in range(3)]
    inputs[0].fill_(-1)
    builder.build(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = builder.build(*inputs)
    for rows, query_lens, seq_lens in (
        ([2, 0, 1, -1], [5, 1, 2, 0], [16, 24, 8, 0]),
        ([1, -1, -1, -1], [1, 0, 0, 0], [3, 0, 0, 0]),
        ([0, 2, 2, 0], [1, 1, 16, 7], [9, 16, 16, 7]),
    ):
        for tensor, values in zip(inputs, (rows, query_lens, seq_lens)):
            tensor.copy_(torch.tensor(values, dtype=INT32))
        graph.replay()
        want = contents(eager.build(rows, query_lens, seq_lens, max_seq_len=64))
        for name, value in contents(batch).items():
            assert value[: len(want[name])] == want[name], name


def on_gpu(*lists):
    return [torch.tensor(values, dtype=INT32, device="cuda") for values in lists]


def captured_build(builder, *inputs, **options):
    """Capture a build after an eager build. Return (graph, batch)."""
    builder.build(*inputs, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = builder.build(*inputs, **options)
    return graph, batch


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_seq_len": 8}])
def test_replay_after_longer_eager_build_is_clean(options):
    tables = make_tables("cuda")
    builder = AttentionMetadataBuilder(tables)
    graph, batch = captured_build(builder, *on_gpu([1, -1], [1, 0], [8, 0]), **options)
    builder.build([2, 0], [1, 1], [16, 24])
    graph.replay()
    assert batch[0].block_table.tolist() == [[6] + [0] * 7, [0] * 8]
    assert batch[0].paged_kv_indices.tolist() == [6] + [0] * 15
    # A later eager build overwrites the results of the replay.
    tables.add_row((range(30, 38), [9]), 1)
    tables.commit_updates()
    graph.replay()
    assert builder.build([0], [1], [24])[0].block_table.tolist() == [[1, 2, 3] + [0] * 5]


@pytest.mark.gpu
def test_max_seq_len_bounds_lengths_of_every_batch():
    tables = make_tables("cuda")
    builder = AttentionMetadataBuilder(tables)
    builder.build([2, 0], [1, 1], [16, 24])
    for _ in range(2):
        batch = builder.build(*on_gpu([2, 1], [1, 1], [16, 8]), max_seq_len=8)
        assert batch[0].max_seqlen_k == 8 and batch[0].seqused_k.tolist() == [0, 8]
        assert batch[0].block_table.tolist() == [[0] * 8, [6] + [0] * 7]
        assert batch[0].paged_kv_indptr.tolist() == [0, 0, 1]
        assert batch[0].paged_kv_indices.tolist()[:2] == [6, 0]


@pytest.mark.gpu
def test_host_lengths_are_rejected_during_capture():
    tables = make_tables("cuda")
    builder = AttentionMetadataBuilder(tables)
    lengths = on_gpu([0], [1], [24])
    for _ in range(3):  # both staging buffers have been used
        want = contents(builder.build([0], [1], [24]))
    builder.build(*lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"capture.*: pass int32 tensors on the device"):
            builder.build([0], [1], [16])
        builder.build(*lengths)  # the capture continues
    for _ in range(3):
        assert contents(builder.build([0], [1], [24])) == want
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_tables_changed_during_capture_are_committed_afterwards():
    tables = make_tables("cuda", pin_memory=True)
    counts = torch.zeros(4, device="cuda")
    tables.commit_block_table(4)  # an upload that may still be in progress
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts.add_(1)
        tables.add_row(([40], [41]), 1)
        for commit in (tables.commit_updates, lambda: tables.commit_block_table(2)):
            with pytest.raises(RuntimeError, match="a CUDA graph is being captured: upload from"):
                commit()
    graph.replay()
    assert counts.tolist() == [1] * 4 and tables[0].block_table.gpu[1, 0] == 6
    tables.commit_updates()
    assert tables[0].block_table.gpu[1, 0] == 40


@pytest.mark.gpu
def test_uncommitted_changes_are_reported():
    tables = make_tables("cuda")
    builder, other = (AttentionMetadataBuilder(tables, groups=[g]) for g in (0, 1))
    before = contents(builder.build([0], [1], [24]))
    tables[0].append_row([33], 0)
    with pytest.raises(RuntimeError, match=r"groups \[0\] have changes .*: call commit_updates"):
        builder.build([0], [1], [25])
    other.build([0], [1], [24])
    tables.commit_updates()
    assert builder.build([0], [1], [25])[0].paged_kv_indices.tolist() == [1, 2, 3, 33]
    tables.add_row(([1, 2, 3], [4, 5]), 0)
    tables.commit_block_table(1)
    assert contents(builder.build([0], [1], [24])) == before


@pytest.mark.gpu
def test_zero_dimensional_device_length_is_rejected():
    builder = AttentionMetadataBuilder(make_tables("cuda"))
    scalar = torch.tensor(1, dtype=INT32, device="cuda")
    with pytest.raises(ValueError, match=r"query_lens has shape \[\]: expected \[num_requests\]"):
        builder.build(scalar, scalar, scalar)


def test_window_of_a_replicated_group_is_served():
    cp = ContextParallel(dcp_world_size=2, dcp_rank=1)
    tables = BlockTables(
        [
            TableShape(8, 8, window=9, context_parallel=cp, replicated=True),
            TableShape(8, 4, window=9, context_parallel=cp),
        ],
        max_num_reqs=2, max_num_tokens=64,
    )  # fmt: skip
    tables.add_row(([1, 2, 3], [4, 5]), 0)
    batch = AttentionMetadataBuilder(tables, groups=[0]).build([0], [1], [24])
    assert batch[0].block_table[0, :4].tolist() == [0, 2, 3, 0]
    with pytest.raises(
        ValueError, match="group 1 has a window of 9, and its tokens are spread over 2"
    ):
        AttentionMetadataBuilder(tables, groups=[0, 1])
