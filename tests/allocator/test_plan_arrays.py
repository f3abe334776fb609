# SPDX-License-Identifier: Apache-2.0
"""A plan's arrays are created on first access, and their values do not depend on when that access
happens.
"""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from kvcache import GroupSpec, KVCacheManager, Request, StepPlan, StepReport
from kvcache.allocator import check_invariants
from kvcache.step import NO_IDS, NO_PAIRS, NO_REPLACE

ANSWERS = ("rows", "status", "num_computed_tokens", "num_tokens", "num_running", "num_leaving")
CHANGES = [
    "clear_rows",
    "append_rows",
    "append_splits",
    "append_ids",
    "replace",
    "swap_out",
    "copy",
    "zero",
    "fresh",
    "swap_in",
]


def plan_with_everything() -> StepPlan:
    """Return a plan for two groups and a host tier that includes a swapped-in row, a swapped-out
    row, a new request and the copy of a fork.
    """
    groups = [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 4, {"window": 8})]
    manager = KVCacheManager.for_groups(
        groups, 64, 256, num_preallocate_tokens=0, num_host_blocks=32
    )
    a, b, c = Request("a", range(10)), Request("b", range(50, 61)), Request("c", range(90, 97))
    rows = manager.step(new=[a, b]).rows
    manager.step(swap_out=[rows[1]])
    manager.fork(a, Request("child", range(10)))
    gone = Request("gone", range(200, 210))
    manager.step(new=[gone])
    manager.free(gone)
    return manager.step(rows, [3, 1], new=[c, Request("big", range(240))], token_ids=[1, 2])


def is_made(plan: StepPlan, name: str) -> bool:
    try:
        vars(StepPlan)[name].__get__(plan)
    except AttributeError:
        return False
    return True


def values_of(plan: StepPlan) -> dict:
    def plain(value):
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tolist()
        return [plain(each) for each in value] if isinstance(value, list) else value

    return {each.name: plain(getattr(plan, each.name)) for each in dataclasses.fields(plan)}


def test_plan_arrays_are_built_on_first_access():
    plan = plan_with_everything()
    assert not any(is_made(plan, name) for name in (*ANSWERS, *CHANGES))
    assert is_made(plan, "step_id") and is_made(plan, "is_empty")
    assert plan.status.tolist() == [0, 0, 0, 2]
    assert all(is_made(plan, name) for name in ANSWERS)
    assert not any(is_made(plan, name) for name in CHANGES)
    assert len(plan.append_ids) == 2
    assert all(is_made(plan, name) for name in CHANGES)
    assert plan.append_ids is plan.append_ids


def test_example_plan_contains_every_kind_of_change():
    plan = plan_with_everything()
    for name in ("rows", "clear_rows", "append_rows", "copy", "swap_in"):
        assert len(getattr(plan, name)), name
    assert all(ids.dtype == np.int32 for ids in (*plan.append_ids, *plan.append_splits))
    assert plan.status.dtype == np.uint8
    assert plan.swap_in.shape[1:] == plan.copy.shape[1:] == (2,)
    assert any(entries.shape[1:] == (3,) and len(entries) for entries in plan.replace)


def test_arrays_outlive_their_plan_and_are_not_shared():
    manager = KVCacheManager(4, 32, 64, num_preallocate_tokens=0)
    request = Request("a", range(10))
    plan = manager.step(new=[request])
    ids = plan.append_ids[0]
    del plan
    manager.free(request)
    other = manager.step(new=[Request("b", range(40, 60))])
    assert ids.tolist() == [1, 2, 3]
    ids[0] = 9  # the caller may modify the array
    assert other.append_ids[0].tolist() == other.append_ids[0].copy().tolist()


@pytest.mark.parametrize("asked", [[], ["rows"], ["append_ids"], ["rows", "copy"]])
@pytest.mark.parametrize(
    "through", [*(lambda p, n=n: pickle.loads(pickle.dumps(p, n)) for n in range(6)), copy.copy]
)
def test_plan_pickles_whichever_fields_were_read(asked, through):
    wanted = values_of(plan_with_everything())
    plan = plan_with_everything()
    for name in asked:
        getattr(plan, name)
    again = through(plan)
    assert type(again) is StepPlan
    assert values_of(again) == wanted == values_of(plan)


def test_dataclasses_replace_keeps_the_arrays_of_a_plan():
    plan = plan_with_everything()
    other = dataclasses.replace(plan, step_id=99)
    assert other.step_id == 99
    assert other.append_ids is plan.append_ids


def test_empty_sections_are_shared():
    manager = KVCacheManager(4, 32, 64)
    plan = manager.step()
    assert plan.clear_rows is NO_IDS and plan.zero is NO_IDS
    assert plan.copy is NO_PAIRS and plan.swap_in is NO_PAIRS
    assert plan.replace[0] is NO_REPLACE
    assert plan.rows.shape == plan.status.shape == (0,)


def test_missing_plan_field_raises_attribute_error():
    plan = KVCacheManager(4, 32, 64).step()
    with pytest.raises(AttributeError, match="'StepPlan' object has no attribute 'colour'"):
        plan.colour  # noqa: B018
    by_hand = StepPlan(0, *[np.zeros(0, np.int32)] * 3)
    assert by_hand.copy is NO_PAIRS
    with pytest.raises(AttributeError, match="colour"):
        by_hand.colour  # noqa: B018
    del by_hand.rows
    with pytest.raises(AttributeError):
        by_hand.rows  # noqa: B018


def test_fields_may_be_set():
    plan = plan_with_everything()
    assert len(plan_with_everything().copy)
    plan.copy = NO_PAIRS
    assert len(plan.swap_in)  # creates every array that was not set explicitly
    assert plan.copy is NO_PAIRS


def state_after(manager: KVCacheManager) -> list:
    """Return values that reveal the manager's state: its counts, and the block ids that it
    allocates next, in order.
    """
    check_invariants(manager)
    answers = [manager.pool.num_free, manager.pool.num_cached]
    plan = manager.step(new=[Request("next", range(500, 570))])
    return [*answers, values_of(plan), manager.pool.num_evicted]


@pytest.mark.parametrize("options", [{}, {"fence_frees": True}, {"eviction": "learned"}])
@pytest.mark.parametrize("host", [0, 16])
def test_requests_freed_in_one_call_are_freed_one_after_the_other(options, host):
    managers = [
        KVCacheManager(4, 40, 256, num_preallocate_tokens=0, num_host_blocks=host, **options)
        for _ in range(2)
    ]
    for manager, at_once in zip(managers, (True, False)):
        requests = [Request(str(i), range(i, i + 5 + 3 * i)) for i in range(5)]
        plan = manager.step(new=requests)
        for request in requests:
            request.append_tokens([7, 8, 9])
        manager.step(plan.rows, [3] * 5)
        manager.report(StepReport(1, True))
        leaving = [requests[3], requests[0], requests[4]]
        if at_once:
            manager.free(*leaving, num_output_tokens=2)
        else:
            for request in leaving:
                manager.free(request, num_output_tokens=2)
        assert [manager._requests.find(r) >= 0 for r in requests] == [
            False,
            True,
            True,
            False,
            False,
        ]
    assert state_after(managers[0]) == state_after(managers[1])


def test_batch_free_counts_each_known_request_once():
    manager = KVCacheManager(4, 40, 256, num_preallocate_tokens=0)
    a, b = Request("a", range(10)), Request("b", range(20, 26))
    manager.step(new=[a, b])
    manager.free()
    manager.free(a, Request("unknown", [1]), a)
    assert (manager.pool.num_free, manager.row(b)) == (39 - 2, 1)
    manager.free(a, b)
    assert manager.pool.num_free == 39
    check_invariants(manager)


def test_no_request_is_freed_if_one_argument_is_not_a_request():
    manager = KVCacheManager(4, 40, 256, num_preallocate_tokens=0)
    a, b = Request("a", range(10)), Request("b", range(20, 26))
    manager.step(new=[a, b])
    for wrong in ([a, None], [a, [b]], [a, "b"]):
        with pytest.raises(TypeError, match=r"request is .*: expected a Request"):
            manager.free(*wrong)
    assert (manager.row(a), manager.row(b), manager.pool.num_free) == (0, 1, 39 - 5)
