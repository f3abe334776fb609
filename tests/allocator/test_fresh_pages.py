# SPDX-License-Identifier: Apache-2.0
"""`StepPlan.fresh` lists the pages whose old content must not be read: the pages that the step gives to
rows, except those that another section of the plan fills.
"""

from kvcache import Admit, External, GroupSpec, Request
from tests.machinery.shared import manager_of

FULL, STATE = GroupSpec("full_attention", 4), GroupSpec("recurrent", 8)


def test_a_hit_is_not_fresh():
    manager = manager_of(FULL)
    assert manager.step(new=[Request("a", range(10))]).fresh.tolist() == [1, 2, 3]
    plan = manager.step(new=[Request("b", range(11))])
    assert plan.append_ids[0].tolist() == [1, 2, 4] and plan.fresh.tolist() == [4]


def test_pages_that_a_copy_fills_are_not_fresh():
    manager = manager_of(FULL)
    parent = Request("a", range(6))
    manager.step(new=[parent])
    manager.fork(parent, Request("child", range(6)))
    plan = manager.step([0], [3])
    assert plan.copy.tolist() == [[2, 3]] and plan.fresh.tolist() == [4]


def test_pages_that_are_swapped_in_are_not_fresh():
    manager = manager_of(FULL, num_host_blocks=9)
    manager.step(new=[Request("a", range(8))])
    manager.step(swap_out=[0])
    plan = manager.step([0], [1])
    assert len(plan.swap_in) == 2
    assert set(plan.fresh) == set(plan.append_ids[0]) - set(plan.swap_in[:, 1])


def test_a_new_state_is_zeroed_and_a_loaded_state_is_fresh():
    manager = manager_of(FULL, STATE)
    plan = manager.step(new=[Request("a", range(8))])
    state = plan.append_ids[1].tolist()
    assert plan.zero.tolist() == state and plan.fresh.tolist() == plan.append_ids[0].tolist()
    loads = Admit(Request("b", range(50, 60)), external=External(8))
    plan = manager.step(new=[loads])
    assert plan.append_ids[1][-1] in plan.fresh and plan.zero.size == 0


def test_an_aborted_plan_passes_its_fresh_pages_on():
    manager = manager_of(FULL)
    a, b = Request("a", range(8)), Request("b", range(20, 30))
    manager.step(new=[a])
    plan = manager.step([0], [4], new=[b])
    manager.abort(plan.step_id)
    plan = manager.step([0, 1], [4, 10])
    assert set(plan.fresh) == {*manager.block_ids(a)[2:], *manager.block_ids(b)}


def test_blocks_behind_a_load_are_fresh_again_after_an_abort():
    manager = manager_of(FULL)
    request = Request("a", range(11))
    load = Admit(request, external=External(8, delayed=True), num_lookahead_tokens=6)
    manager.abort(manager.step(new=[load]).step_id)
    manager.abort(manager.step().step_id)  # the plan that lists them again may be aborted as well
    blocks = manager.block_ids(request).tolist()
    assert len(blocks) == 4
    assert manager.step().fresh.tolist() == blocks[2:]  # a load may already have filled the others
    assert manager.step().fresh.size == 0
