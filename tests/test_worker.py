import numpy as np
import pytest
import torch

from kvcache import BlockTable, KVStorage, StepPlan, Worker

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def content(table):
    rows = table.get_numpy_array()
    return [rows[i, :n].tolist() for i, n in enumerate(table.num_blocks_per_row)]


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
    return Worker(storage, BlockTable(4, 4, 5, 16, False, "cpu", 4))


def test_a_plan_clears_appends_and_replaces():
    w = worker()
    w.tables.add_row([7, 8], 2)
    report = w.apply(
        plan(
            clear_rows=np.array([2]),
            append_rows=np.array([2, 0]),
            append_splits=[[0, 1, 3]],
            append_ids=[[3, 4, 5]],
            replace=[[(0, 1, 9)]],
        )
    )
    assert content(w.tables) == [[4, 9], [], [3], []]
    assert (report.step_id, report.completed) == (7, True)


def append(rows, splits, ids):
    return {"append_rows": np.array(rows), "append_splits": [splits], "append_ids": [ids]}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"clear_rows": np.array([4])}, r"clear_rows\[0\] is 4: expected 0 to 3"),
        ({"append_rows": np.array([-1])}, r"append_rows\[0\] is -1: expected 0 to 3"),
        (append([0], [0, 1], [20]), r"append_ids\[0\]\[0\] is 20: expected a block of 0 to 19"),
        (append([0], [0, 1], [-3]), r"append_ids\[0\]\[0\] is -3"),
        (
            append([0], [0, 2], [1]),
            r"append_splits\[0\] does not fit: expected 2 numbers from 0 to 1",
        ),
        (append([0], [1, 2], [1, 2]), r"append_splits\[0\] does not fit"),
        (append([0, 1], [0, 3, 1], [1]), r"append_splits\[0\] decreases at 2"),
        (append([0], [0], []), r"append_splits\[0\] does not fit"),
        (append([0], [0, 6], [1] * 6), "row 0 of group 0 has 0 blocks and would get 6 more"),
        (append([0, 0], [0, 3, 6], [1] * 6), "row 0 of group 0 has 3 blocks and would get 3 more"),
        ({"replace": [[(1, 0, 1)]]}, r"replace\[0\]\[0\] names column 0, but row 1 has 0 blocks"),
        ({"replace": [[(2, 0, 1)]]}, "names column 0, but row 2 has 0 blocks"),  # it was cleared
        ({"replace": [[(9, 1, 1)]]}, "names row 9: expected 0 to 3"),
        ({"append_ids": [[], []]}, "append_splits has 1 entries, append_ids has 2"),
        ({"version": 99}, "plan has version 99: expected 1"),
    ],
)
def test_a_plan_that_does_not_fit_is_named_and_changes_nothing(sections, message):
    w = worker()
    w.tables.add_row([7, 8], 2)
    with pytest.raises(ValueError, match=message):
        w.apply(plan(**{"clear_rows": np.array([2]), **sections}))
    assert content(w.tables) == [[], [], [7, 8], []]


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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"append_ids": [np.array([1.7])]},
            r"append_ids\[0\] has dtype float64: expected integers",
        ),
        (
            {"append_ids": [np.array([[1]], np.int32)]},
            r"append_ids\[0\] has 2 dimensions: expected 1",
        ),
        ({"append_splits": [[0.5]]}, r"append_splits\[0\] has dtype float64"),
        (
            {"replace": [np.zeros((1, 2), np.int32)]},
            r"replace\[0\]: expected an array of shape \[n, 3\]",
        ),
        (
            {"replace": [np.array([[0, 4, 2**40]])]},
            r"replace\[0\]: expected a C-contiguous int32 array",
        ),
        ({"replace": []}, "replace has 0 groups: expected 1, one per table"),
        ({"clear_rows": np.array([1.5])}, "clear_rows has dtype float64"),
    ],
)
def test_a_plan_of_wrong_types_is_named_and_changes_nothing(sections, message):
    w = worker()
    w.tables.add_row([7, 8], 2)
    given = plan(clear_rows=np.array([2], np.int32))
    for name, value in sections.items():
        setattr(given, name, value)
    with pytest.raises((ValueError, TypeError), match=message):
        w.apply(given)
    assert content(w.tables) == [[], [], [7, 8], []]


def test_storage_and_tables_of_different_block_size_are_refused():
    storage = KVStorage(num_blocks=20, block_size=8, num_kv_heads=1, head_size=2)
    with pytest.raises(ValueError, match="storage has block_size 8, group 0 4: expected the same"):
        Worker(storage, BlockTable(4, 4, 5, 16, False, "cpu", 4))
