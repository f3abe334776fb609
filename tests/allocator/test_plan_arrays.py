# SPDX-License-Identifier: Apache-2.0
"""A plan's arrays are created on first access, and their values do not depend on when that access
happens.
"""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from kvcache import GroupSpec, KVCacheManager, Request, StepPlan
from kvcache.allocator import check_invariants
from kvcache.step import NO_PAIRS


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
    assert is_made(plan, "step_id") and is_made(plan, "is_empty")
    assert not is_made(plan, "rows") and not is_made(plan, "copy")
    assert plan.status.tolist() == [0, 0, 0, 2]
    assert is_made(plan, "rows") and not is_made(plan, "copy")
    assert len(plan.append_ids) == 2
    assert is_made(plan, "copy") and plan.append_ids is plan.append_ids


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


def test_fields_may_be_set():
    plan = plan_with_everything()
    assert len(plan_with_everything().copy)
    plan.copy = NO_PAIRS
    assert len(plan.swap_in)  # creates every array that was not set explicitly
    assert plan.copy is NO_PAIRS


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
