# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import BlockTables, ContextParallel, GroupSpec, TableShape
from kvcache.compat.vllm_block_table import BlockTable, MultiGroupBlockTable
from kvcache.worker import AttentionMetadataBuilder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(device="cpu", rows=4, width=5, block_size=4, tokens=16):
    return BlockTable(block_size, rows, width, tokens, device == "cuda", device, block_size)


def content(table):
    rows = table.get_numpy_array()
    return [rows[i, :n].tolist() for i, n in enumerate(table.num_blocks_per_row)]


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_never_change_and_commits_reach_the_device(device):
    table = make(device)
    before = table.get_device_tensor().data_ptr(), table.slot_mapping.gpu.data_ptr()
    table.add_row([3, 4], 0)
    table.commit_block_table(1)
    table.compute_slot_mapping(np.array([0, 0]), np.array([1, 6]))
    table.commit_slot_mapping(2)
    assert table.get_device_tensor(1).cpu().tolist() == [[3, 4, 0, 0, 0]]
    assert table.slot_mapping.gpu.cpu().tolist() == [13, 18] + [-1] * 14
    table.clear()
    assert not table.get_device_tensor().any() and not table.get_cpu_tensor().any()
    assert (table.get_device_tensor().data_ptr(), table.slot_mapping.gpu.data_ptr()) == before


@pytest.mark.gpu
def test_commit_in_flight_ignores_later_writes():
    table = make("cuda", rows=4096, width=2048)
    for value in (1, 2, 3):
        table.block_table.before_write()
        table.block_table.np[:] = value
        table.commit_block_table(4096)
        table.add_row([99], 4095)
        assert int(table.get_device_tensor()[4095, 0]) == value


def test_cpu_tables_share_one_memory():
    table = make()
    assert table.block_table.gpu is table.block_table.cpu
    table.add_row([3], 0)
    assert table.get_device_tensor(1)[0, 0] == 3


@given(st.integers(1, 9), st.lists(st.integers(1, 100), max_size=6), st.data())
def test_slots_follow_the_formula(block_size, ids, data):
    table = BlockTable(block_size, 2, 6, 64, False, "cpu", block_size)
    table.add_row(ids, 1)
    positions = data.draw(
        st.lists(st.integers(0, len(ids) * block_size - 1), max_size=64) if ids else st.just([])
    )
    table.compute_slot_mapping(np.full(len(positions), 1), np.array(positions, np.int64))
    slots = [ids[p // block_size] * block_size + p % block_size for p in positions]
    assert table.slot_mapping.np.tolist() == slots + [-1] * (64 - len(slots))


ZERO = np.array([0])
INVALID_CALLS = [
    (lambda t: t.append_row([1], 4), "row is 4: expected 0 to 3"),
    (lambda t: t.add_row([1], -1), "row is -1: expected 0 to 3"),
    (lambda t: t.clear_row(9), r"rows\[0\] is 9: expected 0 to 3"),
    (lambda t: t.move_row(0, 7), r"tgt\[0\] is 7"),
    (lambda t: t.swap_row(-2, 1), r"src\[0\] is -2"),
    (lambda t: t.append_row([1, 2, 3, 4], 0), "row 0 .* has 2 blocks and would get 4 more"),
    (lambda t: t.add_row(range(6), 0), "row 0 .* has 0 blocks and would get 6 more"),
    (lambda t: t.append_row([-1], 0), r"block_ids\[0\] is -1: expected 0 to"),
    (lambda t: t.append_row([2**31], 0), r"block_ids\[0\] is 2147483648"),
    (lambda t: t.append_row([2**32 + 7], 0), "block_ids"),
    (lambda t: t.append_row(range(2**31, 2**31 + 1), 0), "expected a 32-bit integer"),
    (lambda t: t.append_row(5, 0), "block_ids"),
    (lambda t: t.append_row([[1, 2], [3, 4]], 0), "block_ids"),
    (lambda t: t.append_row(np.array([2**63], np.uint64), 0), "block_ids"),
    (lambda t: t.commit_block_table(5), "num_reqs is 5: expected 0 to 4"),
    (lambda t: t.get_device_tensor(5), "num_reqs is 5: expected 0 to 4"),
    (lambda t: t.commit_slot_mapping(-1), "num_tokens is -1: expected 0 to 16"),
    (lambda t: t.compute_slot_mapping(np.array([0, 4]), np.array([0, 0])),
     r"req_indices\[1\] is 4"),
    (lambda t: t.compute_slot_mapping(ZERO, np.array([20])),
     r"positions\[0\] is 20: expected 0 to 19"),
    (lambda t: t.compute_slot_mapping(ZERO, np.array([8])),
     r"positions\[0\] is 8: expected less, because row 0 holds no block for it"),
    (lambda t: t.compute_slot_mapping(ZERO, np.array([0, 1])),
     "req_indices has 1 entries, but positions has 2"),
    (lambda t: t.compute_slot_mapping(np.array([0] * 17), np.array([0] * 17)),
     r"positions has 17 entries: expected at most 16, the tokens of a step \(max_num"),
    (lambda t: t.compute_slot_mapping(positions=ZERO), "neither req_indices nor query_start_loc"),
    (lambda t: t.compute_slot_mapping(np.array([2**32]), ZERO),
     r"req_indices\[0\] is 4294967296: expected int32"),
    (lambda t: t.compute_slot_mapping(np.zeros((1, 2), np.int32), np.zeros(2, np.int64)),
     r"req_indices has shape \[1, 2\]: expected"),
    (lambda t: t.compute_slot_mapping(np.zeros(2, np.int32), np.zeros((2, 1), np.int64)),
     r"positions has shape \[2, 1\]: expected"),
    (lambda t: t.compute_slot_mapping(np.zeros(2, np.int32), t.slot_mapping.np[:2]),
     "shares memory with the slot mapping"),
    (lambda t: t.compute_slot_mapping(query_start_loc=np.arange(6), positions=np.arange(5)),
     "query_start_loc has 6 entries: expected 1 to 5"),
]  # fmt: skip
CALLS_OF_WRONG_TYPES = [
    (lambda t: t.append_row([1.5], 0), "block_ids has dtype float64: expected integers"),
    (lambda t: t.compute_slot_mapping(ZERO, np.array([1.5])), "positions has dtype float64"),
    (lambda t: t.compute_slot_mapping(ZERO), "positions is missing"),
]  # fmt: skip


def with_errors(values, types):
    """Return cases with the error that is expected: ValueError or TypeError."""
    return [*((ValueError, *each) for each in values), *((TypeError, *each) for each in types)]


@pytest.mark.parametrize(
    ("error", "call", "message"), with_errors(INVALID_CALLS, CALLS_OF_WRONG_TYPES)
)
def test_invalid_call_changes_nothing(error, call, message):
    table = make()
    table.add_row([3, 4], 0)
    table.slot_mapping.np[:] = 5
    with pytest.raises(error, match=message):
        call(table)
    assert content(table) == [[3, 4], [], [], []]
    assert set(table.slot_mapping.np.tolist()) == {5}


FIRST = (16, 4, 8, 64)
GROUPS_FIRST = (4, 64, 32, False, "cpu")
SIZES = ["kernel_block_sizes", "max_num_blocks", "slot_mapping", "replicated", "kernel_sizes"]


def groups(**options):
    return MultiGroupBlockTable(*GROUPS_FIRST, [16, 32], **options)


INVALID_TABLES = [
    (lambda: BlockTable(0, 1, 1, 1, False, "cpu", 0), "block_size is 0"),
    (lambda: BlockTable(4, 0, 1, 1, False, "cpu", 4), "max_num_reqs is 0"),
    (lambda: BlockTable(4, 1, -1, 1, False, "cpu", 4), "max_num_blocks_per_req is -1"),
    (lambda: BlockTable(4, 1, 1, 0, False, "cpu", 4), "max_num_batched_tokens is 0"),
    (lambda: BlockTable(4, 1, 1, 1, False, "cpu", 3),
     "kernel_block_size 3 does not divide block_size 4"),
    (lambda: BlockTable(4, 1, 1, 1, False, "cpu", -2), "kernel_block_size is -2: expected 1 to"),
    (lambda: BlockTable(48, 2, 3, 16, False, "cpu", kernel_sizes=[32, 64]),
     r"none of kernel_sizes \[32, 64\] divides block_size 48"),
    (lambda: BlockTable(48, 2, 3, 16, False, "cpu", 16, kernel_sizes=[16]),
     r"kernel_block_size is 16 and kernel_sizes \[16\]: expected"),
    (lambda: MultiGroupBlockTable(1, 16, 4, False, "cpu", [4] * 33), "33 groups"),
    (lambda: BlockTable(16, 2**16, 2**16, 16, False, "cpu", 1), "fewer than 2\\^31"),
    (lambda: TableShape(4, 1, window=2**31), "window is 2147"),
    (lambda: TableShape(16, 16, encoder=True, circular=True), "encoder and circular"),
    (lambda: groups(kernel_sizes=[[8], [12]]),
     r"none of kernel_sizes \[12\] divides block_size 32"),
    *((lambda name=name: groups(**{name: [[1]] * 3 if name == "kernel_sizes" else [1] * 3}),
       f"{name} has 3 entries, but block_sizes has 2: expected equal lengths") for name in SIZES),
]  # fmt: skip
TABLES_OF_WRONG_TYPES = [
    # Misplaced arguments: the error names the keyword.
    (lambda: BlockTable(*FIRST, False, "cpu", [16, 8]),
     r"kernel_block_size is \[16, 8\]: expected an integer; .* kernel_sizes=\[16, 8\]"),
    (lambda: BlockTable(*FIRST, False, "cpu", None, 1, 2),
     "9 positional arguments, the last 2: expected at most 8; pass kernel_sizes, num_spec"),
    (lambda: BlockTable(*FIRST, False, "cpu", kernel_sizes=16),
     r"kernel_sizes is 16: expected a list of candidates, such as \[16\]"),
    (lambda: BlockTable(*FIRST, False, "cpu", 16, [1]),
     r"cp_kv_cache_interleave_size is \[1\]: expected an integer"),
    (lambda: MultiGroupBlockTable(*GROUPS_FIRST, 16),
     "block_sizes is 16: expected a list, one size per group"),
    (lambda: MultiGroupBlockTable(*GROUPS_FIRST, [16], 0),
     "kernel_block_sizes is 0: expected a list, one entry per group"),
    (lambda: MultiGroupBlockTable(*GROUPS_FIRST, [16], [[16]]),
     r"kernel_block_size is \[16\]: expected an integer; .* kernel_sizes=\[16\]"),
    (lambda: MultiGroupBlockTable(*GROUPS_FIRST, [16], None, [4], max_num_blocks=[4]),
     r"num_speculative_tokens is \[4\]: expected an integer, because max_num_blocks is given"),
    (lambda: MultiGroupBlockTable(*GROUPS_FIRST, [16], None, 0, 1, 2),
     "10 positional arguments, the last 2: expected at most 9"),
    (lambda: MultiGroupBlockTable(*GROUPS_FIRST, [16], kernel_sizes=16),
     "kernel_sizes is 16: expected a list, one entry per group"),
    (lambda: groups(kernel_sizes=[[8], 8]), r"kernel_sizes is 8: .* such as \[8\]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "make_tables", "message"), with_errors(INVALID_TABLES, TABLES_OF_WRONG_TYPES)
)
def test_invalid_tables_are_rejected(error, make_tables, message):
    with pytest.raises(error, match=message):
        make_tables()


def test_allocation_block_is_divided_into_kernel_blocks():
    table = BlockTable(32, 2, 3, 16, False, "cpu", 8)
    table.add_row([5, 1], 0)
    assert table.get_numpy_array()[0].tolist() == [20, 21, 22, 23, 4, 5, 6, 7, 0, 0, 0, 0]
    assert table.num_blocks_per_row[0] == 8 and table.get_cpu_tensor().shape == (2, 12)
    table.compute_slot_mapping(np.array([0, 0]), np.array([9, 33]))
    assert table.slot_mapping.np[:2].tolist() == [21 * 8 + 1, 4 * 8 + 1]
    with pytest.raises(ValueError, match="has 2 blocks and would get 2 more: expected at most 3"):
        table.append_row([1, 2], 0)


@pytest.mark.parametrize(
    ("kernel_sizes", "chosen"),
    [(None, 48), ([0], 48), ([32, 16], 16), ([0, 12], 12), ([-1, 48, 16], 48)],
)
def test_first_candidate_that_divides_is_the_kernel_block_size(kernel_sizes, chosen):
    table = BlockTable(48, 2, 3, 16, False, "cpu", kernel_sizes=kernel_sizes)
    assert table.kernel_block_size == chosen
    table.add_row([1], 0)
    # Slots are also correct if the kernel block size is not the first candidate.
    table.compute_slot_mapping(np.array([0]), np.array([17]))
    assert table.slot_mapping.np[0] == 48 + 17


def test_context_parallelism_distributes_tokens():
    """With 4 ranks, an interleave of 2 and blocks of 4 tokens, rank 1 has tokens 2 and 3 of every 8."""
    cp = ContextParallel(pcp_world_size=2, pcp_rank=0, dcp_world_size=2, dcp_rank=1)
    table = BlockTable(4, 2, 3, 40, False, "cpu", 4, 2, context_parallel=cp)
    table.add_row([7, 9], 0)
    table.compute_slot_mapping(np.zeros(32, np.int32), np.arange(32))
    slots = table.slot_mapping.np[:32].tolist()
    local = {i: slot for i, slot in enumerate(slots) if slot >= 0}
    assert local == {2: 28, 3: 29, 10: 30, 11: 31, 18: 36, 19: 37, 26: 38, 27: 39}
    with pytest.raises(ValueError, match="cp_kv_cache_interleave_size 3 does not divide"):
        BlockTable(4, 2, 3, 16, False, "cpu", 4, 3, context_parallel=cp)


def test_rows_and_slots_include_engine_padding():
    """The padding of slots counts only the prefill ranks."""
    options = {"num_speculative_tokens": 2, "pcp_padding": True}
    for cp in (ContextParallel(pcp_world_size=2), ContextParallel(2, dcp_world_size=4)):
        table = BlockTable(
            4, 3, 2, 16, False, "cpu", 4, context_parallel=cp, slot_mapping_dtype=torch.int32,
            **options,
        )  # fmt: skip
        assert table.get_cpu_tensor().shape == (9, 2) and table.max_num_reqs == 3
        assert table.slot_mapping.cpu.shape == (16 + 2 * 2 * 3,)
        assert table.slot_mapping.cpu.dtype == torch.int32
    tables = MultiGroupBlockTable(
        3, 64, 16, False, "cpu", [4, 9], cp_kv_cache_interleave_size=2, context_parallel=cp,
        pcp_padding=True, replicated=[False, True],
    )  # fmt: skip
    assert tables[0].slot_mapping.cpu.shape == (16 + 2 * 2 * 3,)
    tables.add_row(([1], [2]), 0)
    tables.compute_slot_mapping(np.zeros(5, np.int32), np.arange(5))
    assert tables[1].slot_mapping.np[:6].tolist() == [18, 19, 20, 21, 22, -1]


def test_rows_may_be_given_by_query_start_loc():
    table = make()
    table.add_row([3, 4], 0)
    table.add_row([6], 1)
    start, positions = np.array([0, 2, 3]), np.array([0, 5, 1])
    table.compute_slot_mapping(query_start_loc=start, positions=positions)
    assert table.slot_mapping.np[:4].tolist() == [12, 17, 25, -1]
    table.compute_slot_mapping(np.array([1, -1]), positions % 4, query_start_loc=start)
    assert table.slot_mapping.np[:4].tolist() == [24, 25, -1, -1]


@pytest.mark.parametrize("device", DEVICES)
def test_only_updates_reach_the_device(device):
    tables = multi(device)
    tables.add_row(([1, 2], [3]), 0)
    tables.add_row(([5], [6]), 2)
    tables.commit_updates()
    tables.swap_row(0, 2)
    tables.append_row(([9], []), 1)
    tables.clear_row(0)
    tables.commit_updates()
    for table in tables:
        assert torch.equal(table.get_device_tensor().cpu(), table.get_cpu_tensor())
    if device != "cpu":  # rows that were not reported as changed are not uploaded
        tables[0].get_numpy_array()[3, 0] = 99
        tables.commit_updates()
        assert int(tables[0].get_device_tensor()[3, 0]) == 0
        tables.commit_block_table(4)
        assert int(tables[0].get_device_tensor()[3, 0]) == 99


def multi(device="cpu", **options):
    return MultiGroupBlockTable(4, 64, 16, False, device, [8, 16], [8, 8], **options)


def test_one_call_accepts_arrays_of_rows():
    tables = multi()
    for row in range(3):
        tables.add_row(([row + 1], [row + 1]), row)
    tables.swap_rows([0, 1], [1, 2])  # swaps are applied in order
    assert content(tables[0]) == [[2], [3], [1], []]
    tables.move_rows(np.array([2, 0]), np.array([3, 2]))
    assert content(tables[0]) == [[], [3], [2], [1]]
    tables.clear_rows([1, 3])
    assert content(tables[0]) == [[], [], [2], []]
    with pytest.raises(ValueError, match="src has 2 entries, but tgt has 1"):
        tables.move_rows([0, 1], [2])


def test_overflow_in_one_group_changes_no_group():
    tables = multi()
    tables.add_row(([1], [1]), 0)
    with pytest.raises(ValueError, match="row 0 of group 1 has 1 blocks and would get 4 more"):
        tables.append_row(([2], [2, 3, 4, 5]), 0)
    with pytest.raises(ValueError, match="block_ids has 1 groups: expected 2"):
        tables.append_row(([2],), 0)
    with pytest.raises(TypeError, match=r"_ids\[1\] has dtype float64"):
        tables.append_row(([2], [1.5]), 0)
    assert content(tables[0])[0] == [1] and content(tables[1])[0] == [2, 3]


def test_table_widths_include_context_parallelism_and_speculation():
    cp = ContextParallel(dcp_world_size=4)
    tables = MultiGroupBlockTable(
        2,
        100,
        16,
        False,
        "cpu",
        [8, 8, 8],
        context_parallel=cp,
        num_speculative_tokens=5,
        replicated=[False, True, False],
        max_num_blocks=[None, None, 9],
    )
    # max(ceil(100 / 32), 6), ceil(100 / 8) for the replicated group, and the given value
    assert [table.max_num_blocks_per_req for table in tables] == [6, 13, 9]
    assert tables[0].get_cpu_tensor().shape[0] == 2 * 6


def test_group_may_have_no_slot_mapping():
    tables = multi(slot_mapping=[False, True])
    tables.add_row(([5], [2]), 0)
    tables.compute_slot_mapping(np.array([0]), np.array([1]))
    assert tables[1].slot_mapping.np[0] == 33
    with pytest.raises(ValueError, match="group 0 has no slot mapping"):
        tables[0].slot_mapping  # noqa: B018
    with pytest.raises(ValueError, match="group 0 has no slot mapping"):
        tables[0].compute_slot_mapping(np.array([0]), np.array([1]))


def test_one_list_of_kernel_sizes_serves_all_groups():
    tables = MultiGroupBlockTable(4, 64, 16, False, "cpu", [8, 16], kernel_sizes=[[16, 8]])
    assert [table.kernel_block_size for table in tables] == [8, 16]


@pytest.mark.parametrize("device", DEVICES)
def test_gather_returns_batch_order_without_hidden_blocks(device):
    shapes = [TableShape(8, 8), TableShape(16, 4, kernel_block_size=8, window=9)]
    tables = BlockTables(shapes, max_num_reqs=4, max_num_tokens=16, device=device)
    tables.add_row(([1, 2, 3], [4, 5]), 0)
    tables.add_row(([6], [7]), 2)
    tables.commit_updates()
    rows, computed = (
        torch.tensor(x, dtype=torch.int32).to(device) for x in ([2, 0, -1], [0, 23, 0])
    )
    full, windowed = tables.gather(rows, computed)
    assert full[:, :4].tolist() == [[6, 0, 0, 0], [1, 2, 3, 0], [0, 0, 0, 0]]
    # Token 23 attends to tokens 15 to 23, so the first column (tokens 0 to 7) is hidden.
    assert windowed[:, :4].tolist() == [[14, 15, 0, 0], [0, 9, 10, 11], [0, 0, 0, 0]]
    tables.clear_row(0)
    tables.commit_updates()
    again, _ = tables.gather(rows)  # at the same address
    assert again.data_ptr() == full.data_ptr()
    assert again.tolist() == [[6] + [0] * 7, [0] * 8, [0] * 8]


@pytest.mark.gpu
def test_captured_graph_serves_later_steps():
    """Captures a step, changes positions, tables and batch in place, and replays the graph."""
    tables = BlockTables(
        [TableShape(16, 16), TableShape(32, 8, window=20)],
        max_num_reqs=8,
        max_num_tokens=64,
        device="cuda",
    )
    positions = torch.zeros(64, dtype=torch.int64, device="cuda")
    start = torch.zeros(9, dtype=torch.int32, device="cuda")
    rows = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    computed = torch.zeros(8, dtype=torch.int32, device="cuda")

    def step():
        tables.compute_slot_mapping(rows, positions, query_start_loc=start)
        return tables.gather(rows, computed, max_num_tokens=256)

    step()
    assert tables[0].num_computed_slots == 64
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = step()
    assert tables[0].num_computed_slots is None  # a later replay may compute different slots
    generator = np.random.default_rng(0)
    for _ in range(5):
        for row in range(8):
            tables.add_row((generator.integers(1, 99, 16), generator.integers(1, 99, 8)), row)
        tables.commit_updates()
        n = int(generator.integers(1, 8))
        lengths = generator.integers(1, 8, n)
        starts = np.concatenate([[0], np.cumsum(lengths), np.full(8 - n, lengths.sum())])
        start.copy_(torch.from_numpy(starts))
        chosen = np.concatenate([generator.permutation(8)[:n], np.full(8 - n, -1)])
        rows.copy_(torch.from_numpy(chosen))
        where = generator.integers(0, 256, 64)
        positions.copy_(torch.from_numpy(where))
        computed.fill_(100)
        graph.replay()
        torch.cuda.synchronize()
        token_rows = np.repeat(chosen[:n], lengths)
        for g, size in enumerate((16, 32)):
            table = tables[g].get_numpy_array()
            want = table[token_rows, where[: len(token_rows)] // size].astype(np.int64) * size
            want += where[: len(token_rows)] % size
            slots = tables[g].slot_mapping.gpu.cpu().numpy()
            assert slots[: len(want)].tolist() == want.tolist()
            assert set(slots[len(want) :].tolist()) <= {-1}
            hidden = 0 if g == 0 else (100 - 20 + 1) // size
            for i in range(8):
                row = table[chosen[i]].copy() if chosen[i] >= 0 else np.zeros_like(table[0])
                row[:hidden] = 0
                assert gathered[g][i].tolist() == row.tolist()


@pytest.mark.gpu
def test_step_neither_allocates_nor_synchronizes():
    tables = BlockTables(
        [TableShape(16, 64)] * 2, max_num_reqs=64, max_num_tokens=512, device="cuda"
    )
    rows = torch.arange(64, dtype=torch.int32, device="cuda")
    positions = torch.zeros(64, dtype=torch.int64, device="cuda")

    def step():
        for row in range(64):
            tables[0].append_row([row + 1], row)
        tables.commit_updates()
        tables.compute_slot_mapping(rows, positions)
        tables.gather(rows)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    names = [event.key for event in profile.key_averages()]
    # The profiler ends with a cudaDeviceSynchronize. No other synchronizing call is allowed.
    waits = [n for n in names if n in ("cudaStreamSynchronize", "cudaEventSynchronize")]
    assert not waits and not [n for n in names if "cudaMalloc" in n]


class OtherDevice:
    """Simulates a device to which torch can only copy, by using separate host memory for it."""

    def __init__(self, monkeypatch):
        import kvcache.worker.tables.buffer as buffer

        def zeros(shape, dtype, device):
            assert device.type == "meta"
            return torch.zeros(shape, dtype=dtype)

        monkeypatch.setattr(buffer, "device_zeros", zeros)

    def tables(self, **options):
        return multi("meta", **options)


def test_num_tokens_on_device_counts_committed_slots(monkeypatch):
    tables = OtherDevice(monkeypatch).tables()
    tables.add_row(([5, 6], [2]), 0)
    assert [table.num_computed_slots for table in tables.block_tables] == [0, 0]
    tables.compute_slot_mapping(np.array([0, 0]), np.array([1, 9]))
    assert tables[0].num_computed_slots == 0
    tables.commit_slot_mapping(16)
    assert [table.num_computed_slots for table in tables.block_tables] == [2, 2]
    tables[0].compute_slot_mapping(np.array([0]), np.array([1]))
    assert [table.num_computed_slots for table in tables.block_tables] == [0, 2]
    tables[0].commit_slot_mapping(1)
    assert [table.num_computed_slots for table in tables.block_tables] == [1, 2]
    tables.compute_slot_mapping(np.zeros(3, np.int32), np.arange(3))
    tables.commit_slot_mapping(1)
    assert [table.num_computed_slots for table in tables.block_tables] == [1, 1]


def test_sizes_of_numpy_do_not_overflow():
    sizes = (np.int8(16), np.int8(100), np.int8(100), np.int8(8))
    table = BlockTable(*sizes, kernel_sizes=[np.int8(4)])
    assert table.block_table.np.shape == (100, 400) and type(table.max_num_reqs) is int
    tables = MultiGroupBlockTable(
        np.int16(300), np.int16(1024), np.int16(32), False, "cpu", np.array([16, 32], np.int8),
        kernel_sizes=[np.array([8], np.int8)], max_num_blocks=np.array([100, 120], np.int8),
        num_speculative_tokens=np.int8(3),
        context_parallel=ContextParallel(dcp_world_size=np.int8(2)),
    )  # fmt: skip
    shapes = [table.block_table.np.shape for table in tables.block_tables]
    assert shapes == [(1200, 200), (1200, 480)]
    tables.add_row(([5], [2]), 0)
    tables.compute_slot_mapping(np.array([0]), np.array([2]))
    assert [table.slot_mapping.np[0] for table in tables.block_tables] == [5 * 16 + 1, 2 * 32 + 1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_commit_clears_a_tail_written_by_the_caller(dtype):
    """Entries after the step's slots are cleared, whoever wrote them.

    Engines write to the buffer directly for PCP padding and dummy runs.
    """
    table = BlockTable(4, 4, 5, 16, slot_mapping_dtype=dtype)
    table.add_row([3, 4], 0)
    table.slot_mapping.gpu[2:9] = 200
    table.compute_slot_mapping(np.zeros(3, np.int32), np.arange(3))
    table.slot_mapping.cpu[14] = 7
    table.commit_slot_mapping(3)
    assert table.slot_mapping.gpu.tolist() == [12, 13, 14] + [-1] * 13
    table.slot_mapping.gpu[3] = 9  # padding token
    table.commit_slot_mapping(4)
    assert table.slot_mapping.gpu.tolist() == [12, 13, 14, 9] + [-1] * 12
    table.commit_slot_mapping(16)
    table.commit_slot_mapping(2)
    assert table.slot_mapping.gpu.tolist() == [12, 13] + [-1] * 14


class FakeEvent:
    def __init__(self, log):
        self.log = log

    def query(self):
        """Return False in the first call, and True afterwards."""
        self.log.append("poll")
        return len(self.log) > 1

    def record(self, stream):
        self.log.append("record")


@pytest.mark.parametrize("change", [
    lambda t: t.add_row(([1], [1]), 0),
    lambda t: t.append_row(([1], [1]), 0),
    lambda t: t[0].append_row([1], 0),
    lambda t: t.clear_row(0),
    lambda t: t.move_row(0, 1),
    lambda t: t.swap_row(0, 1),
    lambda t: t.clear(),
    lambda t: t[0].clear(),
    lambda t: t[0].block_table.before_write(),
    lambda t: t.compute_slot_mapping(np.array([2]), np.array([0])),
    lambda t: t.commit_slot_mapping(1),
])  # fmt: skip
def test_changes_wait_for_an_upload_in_flight(change):
    tables, log = multi(), []
    tables.add_row(([1], [1]), 2)
    for buffer in (tables.table_set._arena, tables.table_set._slots):
        buffer._uploaded, buffer._pending = FakeEvent(log), True
    change(tables)
    assert log == ["poll", "poll"]
    change(tables)
    assert log == ["poll", "poll"]  # a completed upload is not polled again


def test_row_may_be_set_to_its_own_slice():
    """To roll back a row, a caller may pass ids that are a slice of the table itself."""
    table = make()
    table.add_row([3, 4, 5], 1)
    table.add_row(table.get_numpy_array()[1, :2], 1)
    assert content(table)[1] == [3, 4]
    tables = multi()
    tables.add_row(([3, 4, 5], [6, 7]), 1)
    tables.add_row((tables[0].get_numpy_array()[1, :2], tables[1].get_numpy_array()[1, :1]), 2)
    assert content(tables[0])[2] == [3, 4] and content(tables[1])[2] == [24, 25]
    tables.move_rows(tables[0].get_numpy_array()[0, :1], [3])  # move row 0 to row 3
    assert content(tables[0])[3] == []


def test_tampered_counts_stay_in_bounds():
    table = make()
    table.num_blocks_per_row[1] = 40
    table.clear_row(1)
    table.num_blocks_per_row[2] = -5
    table.append_row([3], 2)
    assert content(table) == [[], [], [3], []]


def test_failed_gather_does_not_affect_the_next():
    tables = multi()
    tables.add_row(([3], [5]), 0)
    idx = torch.tensor([0], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_num_tokens is -1"):
        tables.gather(idx, max_num_tokens=-1)
    with pytest.raises(RuntimeError, match="idx_mapping"):
        tables.gather(torch.tensor([9], dtype=torch.int32))
    assert tables.gather(idx, max_num_tokens=2**63)[0][0, 0] == 3
    assert tables[1].gather(idx)[0, :2].tolist() == [10, 11]


def test_kernel_blocks_that_do_not_fit_int32_are_rejected():
    with pytest.raises(ValueError, match=r"block_ids\[1\] is 536870912: expected 0 to 536870911"):
        BlockTable.map_to_kernel_blocks([1, 2**29], 4)
    with pytest.raises(TypeError, match="block_ids has dtype float64"):
        BlockTable.map_to_kernel_blocks([1.7], 4)
    table = BlockTable(32, 4, 5, 16, False, "cpu", 8)
    with pytest.raises(ValueError, match="expected 0 to 536870911"):
        table.add_row([2**29], 0)
    narrow = BlockTable(4, 4, 5, 16, False, "cpu", 4, slot_mapping_dtype=torch.int32)
    with pytest.raises(ValueError, match="expected 0 to 536870911"):
        narrow.add_row([2**29], 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_shorter_step_clears_slots_of_longer_step(dtype):
    table = BlockTable(4, 4, 5, 16, False, "cpu", 4, slot_mapping_dtype=dtype)
    table.add_row([3, 4, 5, 6], 0)
    for n in (16, 2, 9, 0, 1):
        for positions in (np.arange(n), np.arange(n)[::-1].copy()):  # ascending or descending
            table.compute_slot_mapping(np.zeros(n, np.int32), positions)
            assert table.slot_mapping.np.tolist() == [*(12 + positions), *[-1] * (16 - n)]


def test_rows_and_positions_accept_any_integer_type():
    table = make()
    table.add_row([3, 4], 0)
    for rows, positions in (
        ([0, 0], [1, 6]),
        (np.zeros(2, np.int64), np.array([1, 6], np.int32)),
        (np.zeros(4, np.int32)[::2], np.array([1, 0, 6, 0])[::2]),
        (torch.zeros(2, dtype=torch.int32), torch.tensor([1, 6])),
    ):
        table.slot_mapping.np[:] = -1
        table.compute_slot_mapping(rows, positions)
        assert table.slot_mapping.np[:3].tolist() == [13, 18, -1]


def test_circular_group_columns_wrap_around():
    groups = [
        GroupSpec("full_attention", 4),
        GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}),
    ]
    sizes = {"max_num_reqs": 2, "max_model_len": 40, "max_num_tokens": 16}
    for kernel_sizes in (None, [2]):
        tables = BlockTables.for_groups(groups, kernel_sizes=kernel_sizes, **sizes)
        assert tables[1].shape.max_num_blocks == 4 and tables[1].shape.num_places == 16
        tables.add_row((range(1, 11), [5, 6, 7, 8]), 1)
        positions = np.array([0, 5, 15, 16, 31, 33, 39])
        tables.compute_slot_mapping(np.full(7, 1), positions)
        tables.commit_slot_mapping(7)
        rounded = np.array([5, 6, 7, 8])[positions % 16 // 4] * 4 + positions % 4
        assert tables[1].slot_mapping.np[:8].tolist() == [*rounded.tolist(), -1]
        assert tables[0].slot_mapping.np[:7].tolist() == (positions + 4).tolist()
        tables[1].compute_slot_mapping(np.full(7, 1), torch.from_numpy(positions))
        assert tables[1].slot_mapping.np[:7].tolist() == rounded.tolist()
        with pytest.raises((ValueError, RuntimeError), match=r"positions\[0\] is -1"):
            tables[1].compute_slot_mapping(np.array([1]), np.array([-1]))
        assert AttentionMetadataBuilder(tables).groups == [0]
        with pytest.raises(ValueError, match=r"expected no circular groups \(\[1\]\)"):
            AttentionMetadataBuilder(tables, groups=[0, 1])


def test_circular_tables_wrap_around_under_context_parallelism():
    group = GroupSpec("circular_window", 4, {"window": 6, "buffer": 20})
    sizes = {"max_num_reqs": 1, "max_model_len": 100, "max_num_tokens": 16}
    positions, found = np.arange(40, 56), {}
    for rank in range(2):
        cp = ContextParallel(dcp_world_size=2, dcp_rank=rank)
        tables = BlockTables.for_groups([group], context_parallel=cp, **sizes)
        tables.add_row(([3, 4, 5],), 0)  # 24 tokens
        tables.compute_slot_mapping(np.zeros(16, np.int32), positions)
        for position, slot in zip(positions.tolist(), tables[0].slot_mapping.np.tolist()):
            if slot >= 0:
                found[position] = rank, slot
    place = positions % 24
    assert found == {
        int(p): (int(at) % 2, (3 + int(at) // 8) * 4 + int(at) % 8 // 2)
        for p, at in zip(positions, place)
    }


def test_positions_rejected_by_circular_group_change_nothing():
    shapes = [TableShape(16, 16), TableShape(16, 3, circular=True)]
    tables = BlockTables(shapes, max_num_reqs=4, max_num_tokens=64)
    tables.add_row(([1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13]), 0)
    tables.compute_slot_mapping(np.zeros(3, np.int32), np.array([0, 50, 100]))
    before = [group.slot_mapping.np[:3].tolist() for group in tables.block_tables]
    assert before[1] == [176, 178, 180]
    for positions in (np.array([1, 200]), np.array([1, -48]), [1, -1]):
        with pytest.raises(ValueError, match="positions"):
            tables.compute_slot_mapping(np.zeros(2, np.int32), positions)
        for group, slots in zip(tables.block_tables, before, strict=True):
            assert group.slot_mapping.np[:3].tolist() == slots
            assert group.num_computed_slots == 3
    with pytest.raises(ValueError, match=r"positions\[0\] is -48"):
        tables[1].slots_of([0], [-48])


def test_default_device_does_not_move_tables():
    groups = [GroupSpec("full_attention", 16)]
    sizes = {"max_num_reqs": 4, "max_model_len": 64, "max_num_tokens": 32}
    with torch.device("meta"):
        tables = BlockTables.for_groups(groups, **sizes)
        tables.add_row([[3, 5]], 1)
        tables.compute_slot_mapping(np.array([1, 1]), np.array([2, 17]))
    assert tables[0].slot_mapping.gpu[:3].tolist() == [50, 81, -1]
    assert tables[0].block_table.gpu[1].tolist() == [3, 5, 0, 0]


def test_groups_of_tables_share_context_parallelism():
    split = TableShape(16, 4, context_parallel=ContextParallel(dcp_world_size=2))
    sizes = {"max_num_reqs": 4, "max_num_tokens": 32}
    with pytest.raises(
        ValueError, match=r"shapes\[1\] has ContextParallel.*expected the context_parallel of"
    ):
        BlockTables([split, TableShape(16, 4)], **sizes)
    with pytest.raises(ValueError, match="shapes is empty: expected one TableShape per group"):
        BlockTables([], **sizes)
    with pytest.raises(TypeError, match=r"shapes\[0\] is 16: expected a TableShape"):
        BlockTables([16], **sizes)


def test_tables_from_engine_arguments_equal_tables_from_shapes():
    cp = ContextParallel(dcp_world_size=2, dcp_rank=1)
    engine = MultiGroupBlockTable(
        4, 64, 32, False, "cpu", [16, 32, 64],
        kernel_sizes=[[8], [24, 16], [0]], num_speculative_tokens=1, cp_kv_cache_interleave_size=2,
        context_parallel=cp, slot_mapping=[True, True, False], replicated=[False, True, False],
    )  # fmt: skip
    common = {"context_parallel": cp, "cp_kv_cache_interleave_size": 2}
    shapes = [
        TableShape(16, 2, 8, **common),
        TableShape(32, 2, 16, replicated=True, **common),
        TableShape(64, 2, slot_mapping=False, **common),
    ]
    tables = BlockTables(shapes, max_num_reqs=4, max_num_tokens=32, num_speculative_tokens=1)
    assert [table.shape for table in engine] == [table.shape for table in tables] == shapes
    assert engine[0].block_table.np.shape == tables[0].block_table.np.shape == (8, 4)
