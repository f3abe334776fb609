# SPDX-License-Identifier: Apache-2.0
"""Drafts and rejections. Small worlds (`tests/simulator`) check that no step releases what a step with
undecided drafts reads.
"""

import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request
from kvcache.allocator.manager import check_invariants
from tests.machinery.shared import manager_of
from tests.machinery.steps import FULL


def make(*groups: GroupSpec) -> KVCacheManager:
    return manager_of(*groups or [FULL], max_model_len=256)


# Only drafts can be rejected ----------------------------------------------------------------------------

KNOWN = "num_rejected_tokens of row 0 is 1: expected at most 0, its drafts"


def test_step_rejects_no_known_token():
    manager, request = make(), Request("r", [1, 2])
    manager.step(new=[request])
    manager.step([0], [1], token_ids=[3])
    for ids in ({"token_ids": [4]}, {}):
        with pytest.raises(ValueError, match=KNOWN):
            manager.step([0], [1], num_rejected_tokens=[1], **ids)
        with pytest.raises(ValueError, match=KNOWN):
            manager.step([0], [0], num_rejected_tokens=[1], **ids)
    assert (manager.num_computed_tokens(request), request.num_tokens) == (3, 3)


def test_reject_tokens_rejects_no_known_token():
    manager, request = make(), Request("r", [1, 2])
    manager.admit(request)
    request.append_tokens([3])
    manager.extend(request, 1)
    with pytest.raises(ValueError, match=KNOWN):
        manager.reject_tokens(request, 1)
    assert manager.num_computed_tokens(request) == 3


def test_prompt_tokens_cannot_be_rejected():
    manager, request = make(), Request("r", range(7))
    manager.step(new=[Admit(request, num_lookahead_tokens=3)])
    with pytest.raises(ValueError, match=KNOWN):
        manager.step([0], [0], num_rejected_tokens=[1])


def test_advance_accepts_no_new_token_in_place_of_a_known_one():
    manager, request = make(), Request("r", [1, 2])
    manager.admit(request)
    manager.advance([0], [2], [3], token_ids=[3], num_token_ids=[1])
    expected = "start of row 0 is 2 with new token_ids: expected at least 3"
    with pytest.raises(ValueError, match=expected):
        manager.advance([0], [2], [3], token_ids=[4], num_token_ids=[1])
    assert request.token_ids.tolist() == [1, 2, 3]
    assert manager.advance([0], [2], [3]) == [()]  # computes the known token 3 again


@pytest.mark.parametrize("how", ["abort", "invalidate"])
def test_after_an_abort_a_row_continues_after_the_certain_tokens(how):
    window = GroupSpec("sliding_window", 2, {"window": 5})
    manager, request = make(GroupSpec("full_attention", 2), window), Request("r", range(10))
    manager.step(new=[request])
    manager.step([0], [4], token_ids=[10])  # token 10 is certain; 11 to 13 are drafts
    step = manager.step([0], [4], token_ids=[], num_token_ids=[0])
    if how == "abort":
        assert manager.abort(step.step_id) == {"r": 11}
    else:
        assert manager.invalidate([manager.block_ids(request)[13 // 2]]) == {"r": 11}
    with pytest.raises(ValueError, match="expected at most 0"):
        manager.step([0], [4], num_rejected_tokens=[3])
    plan = manager.step([0], [4], token_ids=[], num_token_ids=[0])
    assert plan.num_computed_tokens.tolist() == [11]
    assert manager.block_ids(request, 1)[7 // 2] > 0  # token 11 reads tokens 7 to 10
    check_invariants(manager)


def test_states_need_the_result_of_the_last_step_before_the_next():
    states = GroupSpec("recurrent", 16, {"num_speculative_blocks": 3})
    manager, request = make(GroupSpec("full_attention", 16), states), Request("r", range(10))
    manager.step(new=[request])
    manager.step([0], [4], token_ids=[1])
    expected = "row 0 has [23] drafts of its last step that are neither rejected nor known"
    for arguments in ({}, {"num_rejected_tokens": [0]}, {"num_rejected_tokens": [1]}):
        with pytest.raises(ValueError, match=expected):
            manager.step([0], [4], **arguments)
    assert manager.num_computed_tokens(request) == 14
    plan = manager.step([0], [4], token_ids=[2, 3], num_token_ids=[2], num_rejected_tokens=[2])
    assert plan.num_computed_tokens.tolist() == [12]


def test_the_first_token_of_the_last_step_is_certain():
    """Rejected drafts cannot belong to the step before the last one, because that step had none."""
    ring = GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False)  # 16 slots
    manager = KVCacheManager.for_groups([ring], 60, 64, num_preallocate_tokens=0)
    manager.step(new=[Request("a", range(6))])
    late = {"token_ids": [], "num_token_ids": [0]}
    for num_tokens in (1, 1, 4):  # no token becomes known; the last step has three drafts
        manager.step([0], [num_tokens], **late)
    # The step reads the five tokens before token 9, so 11 slots remain.
    assert manager.step([0], [11], **late, num_rejected_tokens=[3]).num_tokens.tolist() == [11]
