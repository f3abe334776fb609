"""Failures of a step that are reported when its rows have let go of what it computed."""

import pytest

from kvcache import GroupSpec, Request, StepReport
from tests.shared import manager_of

FULL, STATE = GroupSpec("full_attention", 4), GroupSpec("recurrent", 4)
DRAFTS = GroupSpec("recurrent", 4, {"num_speculative_blocks": 3})


def cached(manager):
    """Pages of full attention that are found for tokens 0 to 19."""
    return manager.find_hashes(manager.block_hashes(Request("probe", range(20))), 0).device.tolist()


def fail(manager, page, step_id=0):
    return manager.report(StepReport(step_id, True, failed_pages=[page]))


@pytest.mark.parametrize("fence_frees", [False, True])
def test_what_a_row_computed_before_an_abort_is_not_its_hit(fence_frees):
    """The abort starts the row anew from its own blocks; their state came from the failed page."""
    manager, request = manager_of(FULL, STATE, fence_frees=fence_frees), Request("a", range(20))
    manager.step(new=[request], new_num_tokens=[3])
    page = int(manager.block_ids(request, 1)[0])
    manager.step([0], [5])  # copies the state
    plan = manager.step([0], [1])
    assert manager.report(StepReport(plan.step_id, completed=False)) == {"a": 8}
    assert fail(manager, page) == {"a": 0}
    assert set(cached(manager)) == {-1} and len(manager.block_ids(request, 0)) == 0


@pytest.mark.parametrize("how", ["free", "take_cached"])
def test_what_an_abort_makes_unfindable_is_known_of_a_row_that_let_go_of_it(how):
    """Step 2 fills the page of step 1's tokens, and comes to nothing; the failure is step 1's."""
    request = Request("a", range(26))
    manager = manager_of(GroupSpec("full_attention", 8), STATE, hash_block_size=4)
    manager.step(new=[request], new_num_tokens=[8])
    manager.step([0], [4])
    page = int(manager.block_ids(request, 0)[1])
    if how == "free":
        plan = manager.step([0], [4])
        manager.free(request)
    else:
        other = Request("b", range(26), read_cache=False)
        plan = manager.step([0], [4], new=[other], new_num_tokens=[24])
        manager.step([1], [1])
        assert manager.take_cached(request) == 24
    manager.report(StepReport(plan.step_id, completed=False))
    probe = manager.block_hashes(Request("probe", range(20)))
    assert manager.find_hashes(probe, 1).device[2] > 0  # the state after 12 tokens
    fail(manager, page)
    assert manager.find_hashes(probe, 1).device[2] == -1


@pytest.mark.parametrize("how", ["abort", "take_cached"])
def test_what_a_row_held_before_it_started_anew_is_known(how):
    manager, request = manager_of(FULL, STATE), Request("a", range(20))
    manager.step(new=[request], new_num_tokens=[6])
    page = int(manager.block_ids(request, 1)[1])
    if how == "abort":
        plan = manager.step([0], [1])
        assert manager.report(StepReport(plan.step_id, completed=False)) == {"a": 0}
    else:
        other = Request("b", range(20), read_cache=False)
        manager.step(new=[other], new_num_tokens=[8])
        manager.step([1], [5])
        assert manager.take_cached(request) == 8
    fail(manager, page)
    assert set(cached(manager)) == {-1}


@pytest.mark.parametrize("state", [STATE, DRAFTS])
@pytest.mark.parametrize("comes_back", [False, True])
def test_what_was_swapped_out_and_came_back_leaves_the_cache(state, comes_back):
    manager, request = manager_of(FULL, state, num_host_blocks=20), Request("a", range(10))
    manager.step(new=[request], new_num_tokens=[8])
    page = int(manager.block_ids(request, 1)[-1])
    manager.step(swap_out=[0])
    if comes_back:
        manager.step([0], [1])
    assert fail(manager, page) == {"a": 0}
    assert set(cached(manager)) == {-1}


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("draft", [0, 1, 2, 3])
def test_a_failed_page_of_a_draft_is_known_of_a_row_that_left(settled, draft):
    """States after 9, 10, 11 and 12 tokens, all accepted, the request freed before or after."""
    manager, request = manager_of(FULL, DRAFTS), Request("a", range(8))
    manager.step(new=[request])
    plan = manager.step([0], [4], token_ids=[8])
    pages = manager.block_ids(request, 1).tolist()[2:]
    request.append_tokens([9, 10, 11, 12])
    if settled:
        manager.step([0], [1])
    manager.free(request)
    fail(manager, pages[draft], plan.step_id)
    assert manager.get_computed_blocks(Request("q", range(20)))[1] <= 8
    assert cached(manager)[2] == -1


def test_a_state_that_drafts_left_behind_at_a_swap_is_bad_from_where_it_came_into_its_page():
    manager = manager_of(FULL, DRAFTS, num_host_blocks=20)
    request, other = Request("a", range(6)), Request("b", range(6), read_cache=False)
    manager.step(new=[request], new_num_tokens=[5])
    manager.step(new=[other], new_num_tokens=[4])
    manager.step([0], [4], token_ids=[6])
    page = int(manager.block_ids(request, 1)[1])
    manager.step(swap_out=[0])
    assert fail(manager, page)["a"] == 0
    assert manager.get_computed_blocks(Request("c", range(6)))[1] == 0
