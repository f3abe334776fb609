import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache import BlockTable, KVStorage, StepPlan, Worker

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(device="cpu", rows=4, width=5, block_size=4, tokens=16):
    return BlockTable(block_size, rows, width, tokens, device == "cuda", device, block_size)


def content(table):
    rows = table.get_numpy_array()
    return [rows[i, :n].tolist() for i, n in enumerate(table.num_blocks_per_row)]


def test_rows_are_added_appended_and_cleared():
    table = make()
    table.add_row([3, 4], 1)
    table.append_row([5], 1)
    table.append_row([], 1)
    assert content(table) == [[], [3, 4, 5], [], []]
    table.add_row([9], 1)
    assert content(table)[1] == [9]
    table.clear_row(1)
    assert content(table)[1] == [] and not table.get_numpy_array().any()


def test_move_clears_the_row_it_leaves():
    table = make()
    table.add_row([3, 4], 1)
    table.add_row([6, 7, 8], 2)
    table.move_row(1, 2)
    assert content(table) == [[], [], [3, 4], []]
    assert table.get_numpy_array()[1].tolist() == [0] * 5
    assert table.get_numpy_array()[2].tolist() == [3, 4, 0, 0, 0]
    table.move_row(2, 2)
    assert content(table)[2] == [3, 4]


def test_swap_exchanges_rows():
    table = make()
    table.add_row([3, 4], 1)
    table.add_row([6, 7, 8], 2)
    table.swap_row(1, 2)
    assert content(table) == [[], [6, 7, 8], [3, 4], []]


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
def test_a_commit_under_way_does_not_see_what_is_written_after_it():
    table = make("cuda", rows=4096, width=2048)
    for value in (1, 2, 3):
        table.block_table.before_write()
        table.block_table.np[:] = value
        table.commit_block_table(4096)
        table.add_row([99], 4095)
        assert int(table.get_device_tensor()[4095, 0]) == value


def test_on_the_cpu_both_sides_are_one_memory():
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.append_row([1], 4), "row is 4: expected 0 to 3"),
        (lambda t: t.add_row([1], -1), "row is -1: expected 0 to 3"),
        (lambda t: t.clear_row(9), "row is 9"),
        (lambda t: t.move_row(0, 7), "tgt is 7"),
        (lambda t: t.swap_row(-2, 1), "src is -2"),
        (lambda t: t.append_row([1, 2, 3, 4], 1), "row 1 has 2 blocks and would get 4 more"),
        (lambda t: t.add_row(range(6), 1), "row 1 has 0 blocks and would get 6 more"),
        (lambda t: t.commit_block_table(5), "num_reqs is 5: expected 0 to 4"),
        (lambda t: t.commit_slot_mapping(-1), "num_tokens is -1: expected 0 to 16"),
    ],
)
def test_a_wrong_call_is_named_and_changes_nothing(call, message):
    table = make()
    table.add_row([3, 4], 1)
    with pytest.raises(ValueError, match=message):
        call(table)
    assert content(table) == [[], [3, 4], [], []]


@pytest.mark.parametrize(
    ("rows", "positions", "message"),
    [
        ([0, 4], [0, 0], r"row_indices\[1\] is 4"),
        ([0], [20], r"positions\[0\] is 20: expected 0 to 19"),
        ([0], [0, 1], "row_indices has shape"),
        ([0] * 17, [0] * 17, r"out has shape \[16\]: expected at least 17"),
    ],
)
def test_a_wrong_slot_mapping_call_is_named_and_changes_nothing(rows, positions, message):
    table = make()
    table.slot_mapping.np[:] = 5
    with pytest.raises(RuntimeError, match=message):
        table.compute_slot_mapping(np.array(rows), np.array(positions))
    assert set(table.slot_mapping.np.tolist()) == {5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, 1, False, "cpu", 0), "block_size is 0"),
        ((4, 0, 1, 1, False, "cpu", 4), "max_num_reqs is 0"),
        ((4, 1, -1, 1, False, "cpu", 4), "max_num_blocks_per_req is -1"),
        ((4, 1, 1, 0, False, "cpu", 4), "max_num_batched_tokens is 0"),
        ((4, 1, 1, 1, False, "cpu", 2), "kernel_block_size is 2, block_size 4"),
    ],
)
def test_wrong_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockTable(*arguments)


def plan(**sections):
    def ids(*values):
        return np.array(values, np.int32)

    base = {
        "rows": ids(),
        "status": np.empty(0, np.uint8),
        "num_computed_tokens": ids(),
        "append_splits": [ids(0)],
        "append_ids": [ids()],
        "replace": [np.empty((0, 3), np.int32)],
    }
    arrays = {
        name: [np.array(v, np.int32) for v in value] if name in base and name != "rows" else value
        for name, value in sections.items()
    }
    arrays = {
        n: np.array(v, np.int32) if not isinstance(v, list | int) else v for n, v in arrays.items()
    }
    return StepPlan(7, **{**base, **arrays})


def worker():
    storage = KVStorage(num_blocks=20, block_size=4, num_kv_heads=1, head_size=2)
    return Worker(storage, [make()])


def test_a_plan_clears_appends_and_replaces():
    w = worker()
    w.tables[0].add_row([7, 8], 2)
    report = w.apply(
        plan(
            clear_rows=np.array([2]),
            append_rows=np.array([2, 0]),
            append_splits=[[0, 1, 3]],
            append_ids=[[3, 4, 5]],
            replace=[[(0, 1, 9)]],
        )
    )
    assert content(w.tables[0]) == [[4, 9], [], [3], []]
    assert (report.step_id, report.completed) == (7, True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"clear_rows": np.array([4])}, "clear_rows names rows 4 to 4: expected 0 to 3"),
        (
            {"append_rows": np.array([0]), "append_splits": [[0, 1]], "append_ids": [[20]]},
            "blocks 20",
        ),
        (
            {"append_rows": np.array([0]), "append_splits": [[0, 1]], "append_ids": [[0]]},
            "blocks 0",
        ),
        (
            {"append_rows": np.array([0]), "append_splits": [[0, 2]], "append_ids": [[1]]},
            "append_splits",
        ),
        (
            {"append_rows": np.array([0]), "append_splits": [[0, 6]], "append_ids": [[1] * 6]},
            "row 0 would have 6 blocks: expected at most 5",
        ),
        ({"replace": [[(0, 5, 1)]]}, "replace names columns 5 to 5"),
        ({"replace": [[(9, 1, 1)]]}, "replace names rows 9 to 9"),
        ({"append_ids": [[], []]}, "plan has 2 groups: expected 1"),
        ({"version": 99}, "plan has version 99: expected 1"),
    ],
)
def test_a_plan_that_does_not_fit_is_named_and_changes_nothing(sections, message):
    w = worker()
    w.tables[0].add_row([7, 8], 2)
    with pytest.raises(ValueError, match=message):
        w.apply(plan(**{"clear_rows": np.array([2]), **sections}))
    assert content(w.tables[0]) == [[], [], [7, 8], []]


@pytest.mark.parametrize("section", ["swap_out", "copy", "zero", "swap_in"])
def test_a_section_that_this_worker_cannot_apply_is_named(section):
    w = worker()
    with pytest.raises(NotImplementedError, match=section):
        w.apply(plan(**{section: np.array([[1, 2]])}))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("device", DEVICES)
def test_storage_gives_back_what_was_written(layout, device):
    storage = KVStorage(6, 4, 2, 8, num_layers=3, dtype=torch.float16, device=device, layout=layout)
    slots = torch.tensor([5, 23, -1, 4], device=device)
    written = []
    for layer in range(3):
        key = torch.randn(4, 2, 8).half().to(device)
        value = torch.randn(4, 2, 8).half().to(device)
        storage.write(layer, key, value, slots)
        key[2] = value[2] = 0
        written.append((key, value))
    for layer, (key, value) in enumerate(written):
        found = storage.gather(layer, slots)
        assert torch.equal(found[0], key) and torch.equal(found[1], value)
        assert torch.equal(storage.key_cache(layer)[5, 3], key[1])
    assert not storage.key_cache(0)[0].any()  # the null block is zero


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"head_size": -1}, "head_size is -1"),
        ({"layout": "DNH"}, "layout is 'DNH': expected one of NHD, HND"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_wrong_storage_sizes_are_named(change, message):
    call = {"num_blocks": 2, "block_size": 4, "num_kv_heads": 1, "head_size": 8, **change}
    with pytest.raises(ValueError, match=message):
        KVStorage(**call)
    with pytest.raises(ValueError, match="layer is 1: expected 0 to 0"):
        KVStorage(2, 4, 1, 8).key_cache(1)
