# SPDX-License-Identifier: Apache-2.0
"""Recurrent groups with speculative blocks, which allow drafts to be rejected without copying a
state.
"""

import numpy as np
import pytest

from kvcache import (
    Admit,
    BlockTables,
    ContextParallel,
    GroupSpec,
    LayerSpec,
    Request,
    Status,
    StepReport,
    plan_cache,
)
from kvcache.allocator import check_invariants
from kvcache.kinds import make_kind
from tests.machinery.shared import manager_of

FULL = GroupSpec("full_attention", 4)


def states(block_size=4, num_speculative_blocks=3):
    return GroupSpec("recurrent", block_size, {"num_speculative_blocks": num_speculative_blocks})


def start(manager, num_tokens=6):
    """Start a request whose second step computes a sampled token and three drafts.

    Return the request and its state pages.
    """
    request = Request("a", range(num_tokens))
    manager.step(new=[request])
    plan = manager.step([0], [4], token_ids=[num_tokens])
    assert plan.status.tolist() == [Status.SERVED]
    return request, manager.block_ids(request, 1).tolist()


def hit_length(manager, tokens):
    return manager.cache.find_prefix(Request("probe", tokens)).num_tokens


def test_accepted_drafts_swap_pages_without_copies():
    manager = manager_of(FULL, states(16))
    request, pages = start(manager)
    plan = manager.step([0], [4], token_ids=[7, 60], num_token_ids=[2], num_rejected_tokens=[2])
    assert plan.num_computed_tokens.tolist() == [8]
    assert len(plan.copy) == len(plan.zero) == 0
    assert plan.replace[1].tolist() == [[0, 0, pages[1]], [0, 1, pages[0]]]
    assert manager.block_ids(request, 1).tolist() == [pages[1], pages[0], *pages[2:]]
    # If all drafts are rejected, the state stays in its page, and the table is unchanged.
    plan = manager.step([0], [4], token_ids=[61], num_rejected_tokens=[3])
    assert plan.num_computed_tokens.tolist() == [9] and len(plan.replace[1]) == 0
    # All drafts are accepted.
    ids = manager.block_ids(request, 1).tolist()
    plan = manager.step([0], [1], token_ids=[62, 63, 64, 65], num_token_ids=[4])
    assert plan.num_computed_tokens.tolist() == [13]
    assert manager.block_ids(request, 1).tolist() == [ids[3], *ids[:3]]
    check_invariants(manager)


def test_more_drafts_than_pages_are_rejected_by_name():
    manager = manager_of(FULL, states(), states(8, 5))
    request = Request("a", range(6))
    manager.step(new=[request])
    expected = r"num_tokens of row 0 is 5: expected at most 4: 1 known or sampled tokens and 3"
    for wrong in (
        lambda: manager.step([0], [5]),
        lambda: manager.step([0], [5], token_ids=[6]),
        lambda: manager.would_fit(Admit(request, num_tokens=5)),
    ):
        with pytest.raises(ValueError, match=expected):
            wrong()
    assert request.num_tokens == manager.num_computed_tokens(request) == 6
    # The step computes two known tokens and three drafts.
    plan = manager.step([0], [5], token_ids=[6, 7], num_token_ids=[2])
    assert plan.num_tokens.tolist() == [5]
    assert [len(manager.block_ids(request, g)) for g in (1, 2)] == [1 + 4, 4]


def test_only_drafts_are_rejected():
    manager = manager_of(FULL, states())
    request, _ = start(manager)
    expected = r"num_rejected_tokens of row 0 is 4: expected at most 3, the drafts of its last step"
    with pytest.raises(ValueError, match=expected):
        manager.step([0], [1], num_rejected_tokens=[4])
    with pytest.raises(ValueError, match=expected):
        manager.reject_tokens(request, 4)
    manager.reject_tokens(request, 1)
    manager.reject_tokens(request, 2)
    with pytest.raises(ValueError, match=r"is 1: expected at most 0, the drafts"):
        manager.reject_tokens(request, 1)
    assert manager.num_computed_tokens(request) == 7


def test_boundary_passed_by_accepted_drafts_is_a_hit():
    manager = manager_of(FULL, states())
    request, pages = start(manager)  # states after 7, 8, 9 and 10 tokens
    assert pages[:1] == [0] and hit_length(manager, range(20)) == 0
    assert manager.pool.num_cached == 1  # only the first block of tokens; drafts are never cached
    plan = manager.step([0], [4], token_ids=[7, 8, 60], num_token_ids=[3], num_rejected_tokens=[1])
    assert len(plan.copy) == 0
    probe = Request("probe", [*range(9), 60])
    (_, found), num_hit, _ = manager.cache.find_prefix(probe)
    assert num_hit == 8 and found.tolist() == [0, pages[2]]
    now = manager.block_ids(request, 1).tolist()
    assert now[:2] == [0, 0] and now[2] == pages[3] and pages[2] not in now
    assert len(now) == 2 + 4  # a new page replaces the cached one


def test_row_without_new_tokens_accepts_a_rejection():
    manager = manager_of(FULL, states(16))
    request, pages = start(manager)
    plan = manager.step([0], [0], num_rejected_tokens=[2])
    assert plan.is_empty and manager.num_computed_tokens(request) == 8
    plan = manager.step([0], [1], token_ids=[60])
    assert plan.replace[1].tolist() == [[0, 0, pages[1]], [0, 1, pages[0]]]


def test_fork_starts_with_only_the_accepted_state():
    manager = manager_of(FULL, states(16))
    parent, pages = start(manager)
    manager.reject_tokens(parent, 1)
    parent.append_tokens([7, 8])
    child = Request("child", [*range(9), 100])
    row = manager.fork(parent, child)
    assert manager.block_ids(child, 1).tolist() == [pages[2]]
    assert manager.block_ids(parent, 1).tolist() == [pages[2], pages[0], pages[1], pages[3]]
    with pytest.raises(ValueError, match=r"expected at most 0, the drafts"):
        manager.reject_tokens(parent, 1)
    plan = manager.step([row, 0], [4, 4], token_ids=[9], num_token_ids=[0, 1])
    first = manager.block_ids(child, 1).tolist()
    # The row has one page for its state and three more for drafts.
    assert plan.copy[:, 0].tolist()[-1] == pages[2] and len(first) == 4
    assert not set(first) & set(manager.block_ids(parent, 1).tolist())
    check_invariants(manager)


def test_failed_state_page_that_a_swap_released_restarts_the_row():
    manager = manager_of(FULL, states(16), num_host_blocks=20)
    _, pages = start(manager)
    manager.step(swap_out=[0])  # accepts all drafts, and releases the page of the first state
    assert manager.report(StepReport(1, True, failed_pages=[pages[0]])) == {"a": 0}


def test_swap_out_accepts_drafts_so_that_a_circular_buffer_has_space_for_all_other_slots():
    circular = GroupSpec("circular_window", 4, {"window": 5, "buffer": 12}, cached=False)
    manager = manager_of(FULL, states(16), circular, num_host_blocks=20)
    start(manager)
    manager.step(swap_out=[0])
    with pytest.raises(
        ValueError, match="requests 9 slots including lookahead: expected at most 8"
    ):
        manager.step([0], [1], num_lookahead_tokens=[8])
    plan = manager.step([0], [1], num_lookahead_tokens=[7])
    assert plan.status.tolist() == [Status.SERVED]
    check_invariants(manager)


def test_pages_for_drafts_are_planned_and_requested():
    kind = make_kind("recurrent", {"num_speculative_blocks": 3})
    assert [kind.max_pages(64, 8, size) for size in (16, 4, 2, 1)] == [5, 5, 6, 8]
    full, pages = LayerSpec("full", "full_attention", 16, 8, 128), []
    for options in ({}, {"num_speculative_blocks": 3}):
        state = LayerSpec("mamba", "recurrent", 16, state_bytes=2**16, options=options)
        pages.append(plan_cache([full, state], 2**26, max_model_len=64).pages_per_request(64))
    assert pages == [4 + 2, 4 + 5]
    manager = manager_of(FULL, states(16), num_blocks=7)  # two blocks of tokens, and one state page
    request = Request("a", range(8))
    for lookahead, status in ((2, Status.SERVED), (3, Status.NEVER)):
        ask = Admit(request, num_tokens=8, num_lookahead_tokens=lookahead)
        assert manager.would_fit(ask, whole=True) == status
    manager.step(new=[request])
    assert manager.would_fit(Admit(request, num_tokens=3)) == Status.SERVED
    assert manager.step([0], [4]).status.tolist() == [Status.NEVER]


def test_tables_have_columns_for_the_drafts_at_the_longest_sequence():
    groups = [FULL, states(4)]
    manager = manager_of(*groups, max_model_len=16)
    tables = BlockTables.for_groups(groups, max_num_reqs=2, max_model_len=16, max_num_tokens=16)
    assert [table.max_num_blocks_per_req for table in tables.block_tables] == [4, 4 + 3]
    request = Request("a", range(13))
    tables.apply(manager.step(new=[Admit(request, num_tokens=12)]))
    tables.apply(manager.step([0], [4]))
    pages = tables[1].state_pages([0], [16], [3])
    assert pages.tolist() == [manager.block_ids(request, 1).tolist()[3:]]
    assert tables[1].state_pages(np.array([0]), np.array([13]), np.array([0])).tolist() == [
        [pages[0, 0], 0, 0, 0]
    ]
    with pytest.raises(
        ValueError, match=r"num_drafts is \[4\]: expected at most num_speculative_blocks \(3\)"
    ):
        tables[1].state_pages([0], [16], [4])
    with pytest.raises(ValueError, match=r"has a slot mapping: expected a recurrent group"):
        tables[0].state_pages([0], [16], [3])


def test_columns_count_blocks_over_all_context_parallel_ranks():
    tables = BlockTables.for_groups(
        [states(4, 1)], max_num_reqs=1, max_model_len=32, max_num_tokens=8,
        context_parallel=ContextParallel(dcp_world_size=2),
    )  # fmt: skip
    tables.add_row([[0, 5, 6]], 0)
    assert tables[0].state_pages([0], [10], [1]).tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("num_blocks", "expected"), [(-1, "is -1: expected 0 to"), ("3", "expected an integer")]
)
def test_the_number_of_pages_for_drafts_is_checked(num_blocks, expected):
    options = {"num_speculative_blocks": num_blocks}
    with pytest.raises((TypeError, ValueError), match=expected):
        LayerSpec("mamba", "recurrent", 16, state_bytes=64, options=options)
