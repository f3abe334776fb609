# SPDX-License-Identifier: Apache-2.0
"""Failures of a step that are reported only after its rows have released the computed blocks."""

import pytest

from kvcache import Admit, GroupSpec, Request, StepReport
from tests.machinery.shared import manager_of

FULL, STATE = GroupSpec("full_attention", 4), GroupSpec("recurrent", 4)
DRAFTS = GroupSpec("recurrent", 4, {"num_speculative_blocks": 3})


def cached(manager):
    """Return the cached full-attention pages for tokens 0 to 19, or -1 for each block that is not
    cached.
    """
    return manager.cache.find(manager.cache.hashes(Request("probe", range(20))), 0).device.tolist()


def fail(manager, page, step_id=0):
    return manager.report(StepReport(step_id, True, failed_pages=[page]))


@pytest.mark.parametrize("fence_frees", [False, True])
def test_aborted_tokens_are_not_hits_of_their_row(fence_frees):
    """The abort makes the row restart from its own blocks, whose state was copied from the failed
    page.
    """
    manager, request = manager_of(FULL, STATE, fence_frees=fence_frees), Request("a", range(20))
    manager.step(new=[Admit(request, num_tokens=3)])
    page = int(manager.block_ids(request, 1)[0])
    manager.step([0], [5])  # the step copies the state
    plan = manager.step([0], [1])
    assert manager.report(StepReport(plan.step_id, completed=False)) == {"a": 8}
    assert fail(manager, page) == {"a": 0}
    assert set(cached(manager)) == {-1} and len(manager.block_ids(request, 0)) == 0


def test_abort_affects_rows_that_released_blocks():
    """Step 2 fills the page that step 1 began to write, and is aborted. The page's failure is
    reported for an earlier step.
    """
    request = Request("a", range(26))
    manager = manager_of(GroupSpec("full_attention", 8), STATE, hash_block_size=4)
    manager.step(new=[Admit(request, num_tokens=8)])
    manager.step([0], [4])
    page = int(manager.block_ids(request, 0)[1])
    plan = manager.step([0], [4])
    manager.free(request)
    manager.report(StepReport(plan.step_id, completed=False))
    probe = manager.cache.hashes(Request("probe", range(20)))
    assert manager.cache.find(probe, 1).device[2] > 0  # this is the state after 12 tokens
    fail(manager, page)
    assert manager.cache.find(probe, 1).device[2] == -1


def test_failed_blocks_held_before_a_restart_are_found():
    manager, request = manager_of(FULL, STATE), Request("a", range(20))
    manager.step(new=[Admit(request, num_tokens=6)])
    page = int(manager.block_ids(request, 1)[1])
    plan = manager.step([0], [1])
    assert manager.report(StepReport(plan.step_id, completed=False)) == {"a": 0}
    fail(manager, page)
    assert set(cached(manager)) == {-1}


@pytest.mark.parametrize("state", [STATE, DRAFTS])
@pytest.mark.parametrize("comes_back", [False, True])
def test_invalid_blocks_leave_the_cache_after_swapping_back(state, comes_back):
    manager, request = manager_of(FULL, state, num_host_blocks=20), Request("a", range(10))
    manager.step(new=[Admit(request, num_tokens=8)])
    page = int(manager.block_ids(request, 1)[-1])
    manager.step(swap_out=[0])
    if comes_back:
        manager.step([0], [1])
    assert fail(manager, page) == {"a": 0}
    assert set(cached(manager)) == {-1}


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("draft", [0, 1, 2, 3])
def test_failed_draft_page_is_found_after_its_row_is_freed(settled, draft):
    """There are states after 9, 10, 11 and 12 tokens, and all drafts are accepted. The request is
    freed before or after the next step.
    """
    manager, request = manager_of(FULL, DRAFTS), Request("a", range(8))
    manager.step(new=[request])
    plan = manager.step([0], [4], token_ids=[8])
    pages = manager.block_ids(request, 1).tolist()[2:]
    request.append_tokens([9, 10, 11, 12])
    if settled:
        manager.step([0], [1])
    manager.free(request)
    fail(manager, pages[draft], plan.step_id)
    assert manager.cache.find_prefix(Request("q", range(20))).num_tokens <= 8
    assert cached(manager)[2] == -1


def test_swapped_draft_state_is_invalid_from_its_page_start():
    manager = manager_of(FULL, DRAFTS, num_host_blocks=20)
    request, other = Request("a", range(6)), Request("b", range(6), read_cache=False)
    manager.step(new=[Admit(request, num_tokens=5)])
    manager.step(new=[Admit(other, num_tokens=4)])
    manager.step([0], [4], token_ids=[6])
    page = int(manager.block_ids(request, 1)[1])
    manager.step(swap_out=[0])
    assert fail(manager, page)["a"] == 0
    assert manager.cache.find_prefix(Request("c", range(6))).num_tokens == 0
