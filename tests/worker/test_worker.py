# SPDX-License-Identifier: Apache-2.0
import dataclasses
import pickle
import pydoc
import sys

import numpy as np
import pytest
import torch

from kvcache import (
    Admit,
    KVCacheManager,
    KVStorage,
    Pages,
    Request,
    StepPlan,
    StepReport,
    Worker,
)
from kvcache.allocator import check_invariants
from kvcache.compat.vllm_block_table import BlockTable, MultiGroupBlockTable
from kvcache.step import Answers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def content(table):
    rows = table.get_numpy_array()
    return [rows[i, :n].tolist() for i, n in enumerate(table.num_blocks_per_row)]


def plan(step_id=7, **sections):
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
    return StepPlan(step_id, **{**base, **arrays})


def worker():
    storage = KVStorage(num_blocks=20, block_size=4, num_kv_heads=1, head_size=2)
    return Worker(storage, BlockTable(4, 4, 5, 16, False, "cpu", 4))


def pairs(*values):
    return np.array(values, np.int32).reshape(-1, 2)


def numbered(storage) -> None:
    """Fill each page with its number plus 100 times the layer."""
    for layer in range(storage.num_layers):
        for page in range(storage.num_blocks):
            for cache in (storage.key_cache(layer), storage.value_cache(layer)):
                cache[page] = page + 100 * layer


def numbers(storage, layer=0) -> list[int]:
    """Return the number stored in each page, after checking that all elements of K and V are equal."""
    caches = storage.key_cache(layer), storage.value_cache(layer)
    found = [sorted({x for cache in caches for x in cache[i].flatten().tolist()})
             for i in range(storage.num_blocks)]  # fmt: skip
    assert all(len(each) == 1 for each in found)
    return [int(each[0]) for each in found]


def appended(*arrays):
    """Return the fields of a plan that appends to rows, from rows, splits and ids of one group."""
    rows, splits, ids = (np.array(each, np.int32) for each in arrays)
    return {"append_rows": rows, "append_splits": [splits], "append_ids": [ids]}


def replaced(*entries):
    return {"replace": [np.array(entries, np.int32).reshape(-1, 3)]}


@pytest.mark.parametrize(("sections", "message"), [
    ({"clear_rows": np.array([-1])}, r"clear_rows\[0\] is -1: expected 0 or more"),
    (appended([0], [0, 1], [20]), r"append_ids\[0\]\[0\] is 20: expected a block of 0 to 19"),
    (appended([0], [0, 2], [1]), r"append_splits\[0\] does not fit: expected 2 numbers from 0 to 1"),
    (appended([0, 1], [0, 3, 1], [1]), r"append_splits\[0\] decreases at 2"),
    (appended([0], [0, 6], [1] * 6), "row 0 of group 0 has 0 blocks and would get 6 more"),
    (appended([0, 0], [0, 3, 6], [1] * 6), "row 0 of group 0 has 3 blocks and would get 3 more"),
    (replaced((1, 0, 1)), r"replace\[0\]\[0\] names column 0, but row 1 has 0 blocks"),
    # The same plan clears this row.
    (replaced((2, 0, 1)), "names column 0, but row 2 has 0 blocks"),
    (replaced((9, 1, 1)), "names row 9: expected 0 to 3"),
    ({"append_ids": [np.zeros(0, np.int32)] * 2},
     "append_splits has 1 entries, but append_ids has 2|append_ids has 2 groups: expected 1"),
    ({"version": 99}, "plan has version 99: expected 5"),
    ({"append_ids": [np.array([1.7])]}, r"append_ids\[0\] has dtype float64: expected integers"),
    ({"append_ids": [np.array([[1]], np.int32)]}, r"append_ids\[0\] has 2 dimensions: expected 1"),
    ({"append_splits": [[0.5]]}, r"append_splits\[0\] has dtype float64"),
    ({"replace": [np.zeros((1, 2), np.int32)]},
     r"replace\[0\]: expected an array of shape \[n, 3\]"),
    ({"replace": [np.array([[0, 4, 2**40]])]},
     r"replace\[0\]: expected a C-contiguous int32 array"),
    ({"replace": []}, "replace has 0 groups: expected 1, one per table"),
    ({"clear_rows": np.array([1.5])}, "clear_rows has dtype float64"),
    ({"copy": pairs((1, 20))}, r"copy\[0\] writes to page 20: expected 1 to 19"),
    ({"copy": pairs((1, 2), (20, 3))}, r"copy\[1\] reads page 20: expected 0 to 19"),
    ({"copy": pairs((1, 0))}, r"copy\[0\] writes to page 0: expected 1 to 19"),
    ({"copy": pairs((1, 2), (2, 3))}, "copy writes to page 2, and copy reads it: expected one"),
    ({"zero": np.array([3, 0])}, r"zero\[1\] writes to page 0: expected 1 to 19"),
    ({"copy": pairs((1, 2), (3, 2))}, "copy, zero and swap_in write to page 2 twice: expected"),
    ({"copy": pairs((1, 2)), "zero": np.array([4, 2])}, "write to page 2 twice"),
    ({"zero": np.array([[4]])}, r"zero has shape \[1, 1\]: expected \[n\]"),
    ({"copy": np.array([4])}, r"copy has shape \[1\]: expected \[n, 2\]"),
    ({"zero": np.array([1.5])}, "zero has dtype float64: expected integers"),
    ({"swap_out": pairs((20, 1))}, r"swap_out\[0\] reads page 20: expected 1 to 19"),
    ({"swap_out": pairs((3, 1), (4, 6))}, r"swap_out\[1\] writes to host page 6: expected 1 to 5"),
    ({"swap_out": pairs((3, 0))}, r"swap_out\[0\] writes to host page 0: expected 1 to 5"),
    ({"swap_in": pairs((6, 1))}, r"swap_in\[0\] reads host page 6: expected 1 to 5"),
    ({"swap_in": pairs((1, 0))}, r"swap_in\[0\] writes to page 0: expected 1 to 19"),
    ({"swap_in": pairs((1, 20))}, r"swap_in\[0\] writes to page 20: expected 1 to 19"),
    ({"swap_out": pairs((3, 1), (4, 1))}, "swap_out writes to host page 1 twice: expected one"),
    ({"swap_in": pairs((1, 4), (2, 4))}, "copy, zero and swap_in write to page 4 twice"),
    ({"swap_in": pairs((1, 4)), "copy": pairs((4, 5))},
     "swap_in writes to page 4, and copy reads it: expected one of the two"),
    ({"swap_out": pairs((3, 2)), "swap_in": pairs((2, 4))},
     "swap_out writes to host page 2, and swap_in reads it: expected one of the two"),
    ({"swap_out": np.array([3])}, r"swap_out has shape \[1\]: expected \[n, 2\]"),
    ({"swap_in": np.array([[1.5, 2]])}, "swap_in has dtype float64: expected integers"),
    ({"fresh": np.array([20])}, "has page 20: expected 1 to 19"),
    ({"fresh": np.array([5]), "copy": pairs((4, 5))}, "write to page 5 twice"),
    ({"fresh": np.array([5]), "copy": pairs((5, 6))}, "page 5, and copy reads it"),
    ({"fresh": np.array([0.5])}, "fresh has dtype float64"),
    # The pages are valid but the tables are not, so no byte may be moved.
    ({"copy": pairs((1, 2)), "clear_rows": np.array([-9])}, r"clear_rows\[0\] is -9"),
    ({"zero": np.array([3]), **appended([0], [0, 1], [20])}, r"append_ids\[0\]\[0\] is 20"),
    ({"swap_out": pairs((3, 2)), "clear_rows": np.array([-9])}, r"clear_rows\[0\] is -9"),
])  # fmt: skip
def test_invalid_plan_changes_nothing(sections, message):
    w = swapping(clear="fresh")
    w.tables.add_row([7, 8], 2)
    given = plan(clear_rows=np.array([2]))
    for name, value in sections.items():
        setattr(given, name, value)
    error = TypeError if "dtype" in message or "C-contiguous" in message else ValueError
    with pytest.raises(error, match=message):
        w.apply(given)
    assert content(w.tables) == [[], [], [7, 8], []]
    assert numbers(w.storages[0]) == list(range(20))
    assert host_numbers(w) == [0, -1, -2, -3, -4, -5]


class NoLength(list):
    """A list that the tables accept as a list but that numpy treats as a single object."""

    def __len__(self):
        return -1  # noqa: PLE0303


def test_ids_that_numpy_rejects_change_nothing_in_a_plan_with_swaps():
    w = swapping()
    append_plan = plan(swap_out=pairs((1, 1)), **appended([0], [0, 1], [7]))
    given = plan(swap_out=pairs((1, 1)), **appended([0], [0, 1], [7]))
    given.append_ids = [NoLength([7])]
    with pytest.raises((TypeError, ValueError), match=r"append_ids\[0\]"):
        w.apply(given)
    assert w.apply(append_plan).completed


@pytest.mark.parametrize("name", ["append_ids", "replace"])
def test_field_with_too_many_groups_is_rejected_in_a_plan_with_swaps(name):
    w = swapping()
    given = plan(swap_out=pairs((1, 1)))
    setattr(given, name, np.broadcast_to(np.int32(1), (2**40, 2)))
    with pytest.raises(ValueError, match=f"^{name} has {2**41} entries: expected at most"):
        w.apply(given)
    assert w.apply(plan(swap_out=pairs((1, 1)))).completed


# --- swaps ----------------------------------------------------------------------------------------


def swapping(device="cpu", num_layers=2, layout="NHD", **options):
    """Make a worker whose 20 device pages contain their ids and whose 6 host pages contain the
    negated ids. In layer 1, the absolute values are higher by 100.
    """
    storage = KVStorage(
        20, 4, 1, 8, num_layers=num_layers, dtype=torch.float32, device=device, layout=layout
    )
    numbered(storage)
    host = storage.pages.on_host(6)
    for region, layer in enumerate(host.layers):
        for page in range(6):
            host.fragment(region).view(torch.float32)[page] = -page - 100 * int(layer)
    return Worker(storage, BlockTable(4, 4, 5, 16, False, device, 4), host, **options)


def host_numbers(w, layer=0) -> list[int]:
    found = [sorted(set(page.tolist())) for page in w.host.layer(layer).view(torch.float32)]
    assert all(len(each) == 1 for each in found)
    return [int(each[0]) for each in found]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("device", DEVICES)
def test_plan_sections_are_applied_in_order(device, layout):
    w = swapping(device, layout=layout)
    given = plan(
        swap_out=pairs((5, 3), (6, 1)),  # must read the contents before the plan
        copy=pairs((9, 5), (7, 8)),
        zero=np.array([6]),
        swap_in=pairs((4, 11), (2, 12)),
        **appended([1], [0, 2], [11, 12]),
    )
    report = w.apply(given)
    assert (report.step_id, report.completed) == (7, True)
    for layer, more in enumerate((0, 100)):
        expected = [-more, 6 + more, -2 - more, 5 + more, -4 - more, -5 - more]
        assert host_numbers(w, layer) == expected
        found = numbers(w.storages[0], layer)
        assert found[4:10] == [4 + more, 9 + more, 0, 7 + more, 7 + more, 9 + more]
        assert found[11:13] == [-4 - more, -2 - more]
    assert content(w.tables) == [[], [11, 12], [], []]


def test_sections_may_be_lists_or_empty_arrays():
    w = swapping()
    w.apply(plan(swap_out=[(3, 1)], copy=[[7, 8]], zero=[9], swap_in=[]))
    assert host_numbers(w)[1] == 3 and numbers(w.storages[0])[7:10] == [7, 7, 0]
    w.apply(plan(8, swap_out=np.zeros(0, np.int32), copy=np.zeros(0), zero=[], swap_in=()))


@pytest.mark.parametrize("section", ["swap_out", "swap_in"])
def test_swaps_without_host_pages_change_nothing(section):
    w = worker()
    w.tables.add_row([7, 8], 2)
    numbered(w.storages[0])
    given = plan(clear_rows=np.array([2]), zero=np.array([3]), **{section: pairs((1, 2))})
    with pytest.raises(ValueError, match=f"plan has {section}: expected a worker that was given"):
        w.apply(given)
    assert content(w.tables) == [[], [], [7, 8], []]
    assert numbers(w.storages[0]) == list(range(20))


@pytest.mark.parametrize(("host", "message"), [
    ([[64]], "source's pages have 2 fragments in 2 layers, but the destination's have 1 in 1"),
    ([[64], [32]], "fragment 1 has 64 bytes of layer 1 in the source, but 32 bytes of layer 1 in"),
    ([[64, 64]], "fragment 1 has 64 bytes of layer 1 in the source, but 64 bytes of layer 0 in"),
])  # fmt: skip
def test_host_pages_must_match_the_storage(host, message):
    storage = KVStorage.over(Pages.allocate(8, [[64]] * 2), 4, 1, 4)
    with pytest.raises(ValueError, match=message):
        Worker(storage, BlockTable(4, 4, 5, 16, False, "cpu", 4), Pages.allocate(5, host))


# --- several groups over one memory ---------------------------------------------------------------


def hybrid_tables(block_sizes=(4, 8), **options):
    return MultiGroupBlockTable(4, 64, 16, False, "cpu", block_sizes, block_sizes, **options)


@pytest.mark.parametrize(("storages", "message"), [
    (lambda a, b: [KVStorage.over(a, 4, 1, 8)], "storage has 1 entries: expected 2"),
    (lambda a, b: [KVStorage.over(a, 4, 1, 8), KVStorage.over(b, 8, 1, 4)],
     "storage of group 1 does not use the pages of the other groups"),
    (lambda a, b: [KVStorage.over(a, 4, 1, 8)] * 2,
     "storage has block_size 4, but group 1 has 8: expected equal"),
])  # fmt: skip
def test_storages_must_share_pages_and_have_the_block_sizes_of_their_groups(storages, message):
    with pytest.raises(ValueError, match=message):
        Worker(storages(Pages.allocate(20, [[128]]), Pages.allocate(20, [[128]])), hybrid_tables())


def test_pages_of_the_wrong_shape_are_rejected():
    for num_bytes, message in (
        (126, "pages have 126 bytes, 126 apart: expected a multiple of 2, and 128 or more"),
        (129, "pages have 129 bytes, 129 apart: expected a multiple of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            KVStorage.over(Pages.allocate(4, [[num_bytes]]), 4, 1, 8)
    with pytest.raises(TypeError, match="expected a Pages"):
        KVStorage.over([torch.zeros(4, 128)], 4, 1, 8)
    with pytest.raises(
        ValueError, match="layer 0 in a page are 2 separate fragments: expected contiguous"
    ):
        KVStorage.over(Pages.allocate(4, [[64, 64]]), 4, 1, 8)
    with pytest.raises(ValueError, match=r"layers\[1\] is 2: expected 0 to 1"):
        KVStorage.over(Pages.allocate(4, [[128]] * 2), 4, 1, 8, layers=[0, 2])
    with pytest.raises(ValueError, match="layers has 1048576 entries: expected at most 2"):
        KVStorage.over(Pages.allocate(4, [[128]] * 2), 4, 1, 8, layers=bytes(2**20))


# --- order of plans -------------------------------------------------------------------------------


def planes(**options):
    """Make a manager and a worker whose tables have 4 rows."""
    manager = KVCacheManager(16, 65, 256, num_preallocate_tokens=0, **options)
    return manager, Worker(KVStorage(65, 16, 1, 8), BlockTable(16, 4, 16, 512, False, "cpu", 16))


def test_plans_of_aborted_steps_may_be_skipped():
    manager, w = planes(max_num_reqs=4)
    request = Request("a", range(20))
    w.apply(manager.step(new=[request]))
    manager.step([0], [16])
    manager.abort(1)
    late = manager.step([0], [1])
    manager.abort(2)
    given = manager.step([0], [40])
    assert (given.step_id, given.previous_step_id) == (3, 0)
    w.apply(given)
    with pytest.raises(ValueError, match=r"step_id 2: expected 4 or later, because step 3"):
        w.apply(late)
    assert content(w.tables)[0] == manager.block_ids(request).tolist()
    w.apply(manager.step([0], [1]))
    manager.abort(4)  # the step was executed, but its results are discarded
    w.apply(manager.step([0], [16]))
    assert content(w.tables)[0] == manager.block_ids(request).tolist()


def test_reported_and_old_steps_count_as_predecessor():
    manager, w = planes(max_num_reqs=4)
    w.apply(manager.step(new=[Request("a", range(20))]))
    for _ in range(2 * 64 + 3):
        given = manager.step([0], [1])
        assert given.previous_step_id == given.step_id - 1
        manager.report(w.apply(given))
    manager.abort(manager.step([0], [1]).step_id)
    assert manager.step().previous_step_id == given.step_id


def test_manager_with_more_rows_than_tables_makes_progress():
    manager, w = planes()  # the manager admits any number of requests
    requests = [Request(f"r{i}", range(20)) for i in range(5)]
    for request in requests[:4]:
        assert w.apply(manager.step(new=[request])).completed
    refused = manager.step(new=[requests[4]])
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"append_rows\[0\] is 4: expected 0 to 3, the rows of the tables \(a manager admits",
        ):
            w.apply(refused)
    manager.abort(refused.step_id)
    manager.free(requests[4])
    # Clears row 4, which does not exist in the tables.
    assert w.apply(manager.step([0], [1])).completed
    assert content(w.tables)[0] == manager.block_ids(requests[0]).tolist()
    manager.free(requests[1])
    plan = manager.step(new=[Request("r5", range(20))])
    assert plan.rows.tolist() == [1] and w.apply(plan).completed


def test_a_plan_that_changes_nothing_counts_as_a_step():
    manager, w = planes(max_num_reqs=4)
    request = Request("a", range(20))
    first = manager.step(new=[request])
    assert not first.is_empty
    w.apply(first)
    w.tables.compute_slot_mapping(np.zeros(20, np.int32), np.arange(20))
    assert w.tables.num_computed_slots == 20
    empty = manager.step([0], [1])
    assert empty.is_empty and pickle.loads(pickle.dumps(empty)).is_empty
    # Fields of the copy may have been assigned.
    assert not dataclasses.replace(empty, step_id=5).is_empty
    report = w.apply(empty)
    assert report == StepReport(1, True) and w.last_step_id == 1
    assert w.tables.num_computed_slots == 0  # the slots of the previous step are no longer valid
    assert manager.report(report) == {}
    step = w.start(manager.step([0], [1]))
    assert step.poll() == step.wait() == StepReport(2, True)
    with pytest.raises(ValueError, match="step_id 1: expected 3 or later"):
        w.apply(empty)
    w.tables.compute_slot_mapping(np.zeros(20, np.int32), np.arange(20))
    w.apply(manager.step([0], [1]))  # unlike above, no field of the plan was read
    assert w.tables.num_computed_slots == 0
    manager.step([0], [1])
    with pytest.raises(ValueError, match="step_id 5 and follows step 4"):
        w.start(manager.step([0], [1]))


# --- results of a plan ----------------------------------------------------------------------------


def test_results_of_a_plan_are_split_by_kind_of_request():
    manager = KVCacheManager(
        4, 12, 400, max_num_reqs=4, num_preallocate_tokens=0, num_host_blocks=9
    )
    a, b = Request("a", range(6)), Request("b", range(50, 60))
    manager.step(new=[Admit(a, num_tokens=6), Admit(b, num_tokens=3)])
    given = manager.step(
        [0], [2], swap_out=[1], new=[Request("c", range(9)), Request("d", range(300))]
    )
    rows, leaving, new = given.answers
    assert (given.num_running, given.num_leaving) == (1, 1)
    assert [x.tolist() for x in rows] == [[0], [0], [6], [2]]
    assert [x.tolist() for x in leaving] == [[1], [0], [3], [0]]
    # Request c hits a's first block. Request d never fits, even without its hit.
    assert [x.tolist() for x in new] == [[2, -1], [0, 2], [4, 0], [5, 0]]
    assert given.answers.new.num_tokens.base is not None  # the array is a view
    assert given.num_tokens.tolist() == [2, 0, 5, 0]
    waiting = manager.step([0, 2], [30, 1])
    assert waiting.status.tolist() == [1, 0] and waiting.num_tokens.tolist() == [0, 1]


def test_row_with_zero_tokens_gets_no_blocks():
    manager, w = planes(max_num_reqs=4)
    a, b = Request("a", range(16)), Request("b", range(100, 110))
    w.apply(manager.step(new=[a, b]))
    given = manager.step([0, 1], [0, 2], token_ids=[7, 8], num_lookahead_tokens=40)
    assert given.status.tolist() == [0, 0] and given.num_tokens.tolist() == [0, 2]
    assert given.num_computed_tokens.tolist() == [16, 10]
    # Lookahead blocks are only allocated for the other row.
    assert given.append_rows.tolist() == [1]
    assert (a.num_tokens, b.num_tokens) == (17, 11)
    w.apply(given)
    w.apply(nothing := manager.step([0, 1], [0, 0], num_rejected_tokens=[0, 1]))
    assert nothing.is_empty and manager.num_computed_tokens(b) == 11
    assert manager.abort(nothing.step_id) == {}
    check_invariants(manager)
    for rows, tokens, message in (
        ([0], [-1], "num_tokens is -1: expected 0 to 2147483647"),
        ([0, 0], [0, 0], "rows contains row 0 twice"),
        ([0], [0], None),
    ):
        if message is None:
            assert manager.step(rows, tokens).num_tokens.tolist() == [0]
            continue
        with pytest.raises(ValueError, match=message):
            manager.step(rows, tokens)


def test_help_documents_every_plan_field():
    for cls in (StepPlan, StepReport):
        for each in dataclasses.fields(cls):
            assert f"`{each.name}`" in cls.__doc__, each.name
    assert "int32[m, 3]: row, column and new ID" in pydoc.render_doc(StepPlan)
    assert "the position of the request's first new token" in pydoc.render_doc(Answers)


# --- slots outside a window -----------------------------------------------------------------------


CHANGES = "clear_rows append_rows append_splits append_ids replace swap_out copy zero swap_in"


@pytest.mark.parametrize("name", [*CHANGES.split(), None])
def test_a_plan_is_applied_after_one_of_its_fields_was_assigned_or_deleted(name):
    manager, w = planes(max_num_reqs=4)
    given = manager.step(new=[Request("a", range(40))])
    if name is None:
        assert given.append_ids[0].tolist() == [1, 2, 3]
        del given.append_ids
    else:
        setattr(given, name, getattr(pickle.loads(pickle.dumps(given)), name))
    assert w.apply(given) == StepReport(0, True)
    assert content(w.tables)[0] == [1, 2, 3]


def test_fields_of_a_plan_are_found_by_names_that_are_not_interned():
    manager, _ = planes(max_num_reqs=4)
    for name in ("rows zero " + CHANGES).split():
        assert getattr(manager.step(), name) is not None


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 40])
def test_page_moves_assigned_to_a_plan_are_executed(num_tokens, is_read):
    manager, w = planes(max_num_reqs=4)
    keys = w.storages[0].key_cache(0).fill_(7.0)
    given = manager.step(new=[Request("a", range(num_tokens))] if num_tokens else [])
    assert not is_read or given.replace
    given.zero = np.array([3, 5], np.int32)
    w.apply(given)
    assert {page for page in range(65) if not keys[page].any()} == {3, 5}
    for wrong in ([[1, 999]], "garbage"):
        given = manager.step()
        given.copy = wrong
        with pytest.raises(ValueError, match=r"^copy"):
            w.apply(given)
        manager.abort(given.step_id)


def test_a_plan_that_a_signal_handler_applies_during_apply_is_applied_once():
    manager, w = planes(max_num_reqs=4)
    w.apply(manager.step(new=[Request("a", range(20))]))
    given = manager.step([0], [20])

    def handler(frame, event, argument):
        if frame.f_code.co_name == "_apply_to_tables":
            sys.settrace(None)
            w.apply(given)

    sys.settrace(handler)
    try:
        with pytest.raises(RuntimeError, match="another call applied a plan during this call"):
            w.apply(given)
    finally:
        sys.settrace(None)
    assert content(w.tables)[0] == [1, 2, 3] and w.last_step_id == given.step_id
    w.apply(manager.step([0], [1]))


def test_apply_reads_the_plan_after_the_number_of_blocks():
    manager, w = planes(max_num_reqs=4)
    given = manager.step(new=[Request("a", range(40))])

    class Releases:
        def __index__(self):
            given._held = None
            return 65

    with pytest.raises(ValueError, match="PyCapsule"):
        w.tables.apply(given, Releases())
    assert content(w.tables)[0] == []


def test_reports_of_ranks_are_combined():
    reports = [StepReport(4, True, [9, 2], [1]), StepReport(4, True, [2], [])]
    assert StepReport.of_ranks(reports) == StepReport(4, True, [2, 9], [1])
    reports.append(StepReport(4, False))
    assert not StepReport.of_ranks(reports).completed
    with pytest.raises(
        ValueError, match=r"reports\[1\] is of step 5: expected 4, as in reports\[0\]"
    ):
        StepReport.of_ranks([StepReport(4, True), StepReport(5, True)])
    with pytest.raises(ValueError, match="reports is empty: expected one report per rank"):
        StepReport.of_ranks([])


@pytest.mark.parametrize("clear", ["zero", "fresh"])
def test_new_pages_are_zeroed_if_the_worker_is_told_to(clear):
    storage = KVStorage(num_blocks=20, block_size=4, num_kv_heads=1, head_size=2)
    w = Worker(storage, BlockTable(4, 4, 5, 16, False, "cpu", 4), clear=clear)
    storage.pages.memory.fill_(7)
    moves = []
    w.on_move = lambda section, pages: moves.append((section, pages.tolist()))
    w.apply(plan(zero=np.array([3]), fresh=np.array([5, 6]), copy=np.array([[4, 2]])))
    cleared = [3, 5, 6] if clear == "fresh" else [3]
    assert moves == [("copy", [[4, 2]]), ("zero", cleared)]
    content = storage.kv_caches[0].view(torch.uint8).reshape(20, -1)
    assert [page for page in range(20) if not content[page].any()] == cleared


@pytest.mark.parametrize(("make", "message"), [
    (lambda w: Worker(7, w.tables), "storage is 7: expected a KVStorage"),
    (lambda w: Worker([*w.storages, 7], w.tables), r"storage\[1\] is 7: expected a KVStorage"),
    (lambda w: Worker(w.storages, 7), "tables is 7: expected a GroupTable or BlockTables"),
    (lambda w: Worker(w.storages, w.tables, 7), "host is 7: expected a Pages"),
    (lambda w: Worker(w.storages, w.tables, last_step_id="1"), "last_step_id is '1': expected an int"),
    (lambda w: Worker(w.storages, w.tables, last_step_id=-2), "last_step_id is -2: expected -1 to"),
    (lambda w: Worker(w.storages, w.tables, staging_bytes=2), "staging_bytes is given without host"),
    *((lambda w, value=value: Worker(w.storages, w.tables, clear=value),
       "clear is .*: expected 'zero' or 'fresh'") for value in ("all", None, np.zeros(2))),
    *((lambda w, name=name: getattr(w, name)(7), "plan is 7: expected a StepPlan")
      for name in ("apply", "start")),
    (lambda w: w.tables.apply(7), "plan is 7: expected a StepPlan"),
])  # fmt: skip
def test_wrong_arguments_are_rejected_by_name(make, message):
    w = worker()
    with pytest.raises((TypeError, ValueError), match=message):
        make(w)
    assert w.last_step_id == -1 and content(w.tables)[0] == []
