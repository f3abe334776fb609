# SPDX-License-Identifier: Apache-2.0
"""Checks the results of `would_fit` by running random requests to completion, each alone in an
empty manager.
"""

import random

import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, Status, StepReport
from kvcache.allocator import check_invariants
from tests.machinery.shared import manager_of, sampled
from tests.simulator.engine import MIXES

LONGEST, SEEDS_PER_TEST = 40, 50
NO_BUFFERS = [
    mix for mix in MIXES if not {each[0] for each in mix} & {"cross_attention", "circular_window"}
]


def test_request_that_fits_only_without_its_hit_is_served():
    """The pool has 4 pages. A hit of 4 tokens would need 3 blocks and 2 states.

    Without the hit, it needs 3 blocks and only one state.
    """
    manager = manager_of(GroupSpec("full_attention", 4), GroupSpec("recurrent", 4), num_blocks=5)
    first, request = Request("a", range(4)), Request("b", range(12))
    manager.step(new=[first])
    manager.free(first)
    assert manager.cache.find_prefix(request).num_tokens == 4
    assert manager.would_fit(request) == Status.SERVED
    assert manager.would_fit(request, whole=True) == Status.SERVED
    # The second chunk updates the state in place.
    assert manager.would_fit(Admit(request, num_tokens=8), whole=True) == Status.SERVED
    plan = manager.step(new=[request])
    assert plan.status.tolist() == [Status.SERVED]
    assert (plan.num_computed_tokens.tolist(), plan.num_tokens.tolist()) == ([0], [12])
    assert (manager.cache.stats.query_tokens, manager.cache.stats.hit_tokens) == (16, 0)
    check_invariants(manager)


def test_request_waits_if_its_partial_hit_fits_later():
    """The pool has 8 pages.

    With its hit of 46 tokens, the request needs 5 blocks and 2 copy sources. With a hit of 24
    tokens, it would need 10 blocks.
    """
    manager = manager_of(
        GroupSpec("sliding_window", 8, {"window": 6}),
        GroupSpec("sliding_window", 12, {"window": 6}),
        num_blocks=9,
        hash_block_size=2,
    )
    first, other = Request("a", range(47)), Request("x", range(100, 112))
    assert run(manager, first, 1)[-1] == Status.SERVED
    manager.free(first)
    manager.step(new=[other])
    request = Request("b", [*range(46), *range(200, 214)])
    assert manager.would_fit(request) == Status.WAIT
    assert manager.step(new=[request]).status.tolist() == [Status.WAIT]
    manager.free(other)
    plan = manager.step(new=[request])
    assert plan.status.tolist() == [Status.SERVED] and plan.num_computed_tokens.tolist() == [46]


def run(manager: KVCacheManager, request: Request, chunk: int) -> list[int]:
    """Serve a request alone, in chunks, and return the status of each step."""
    plan = manager.step(new=[Admit(request, num_tokens=chunk)])
    statuses = plan.status.tolist()
    while statuses[-1] == Status.SERVED:
        manager.report(StepReport(plan.step_id, completed=True))
        left = request.num_tokens - manager.num_computed_tokens(request)
        if left == 0:
            break
        plan = manager.step([manager.row(request)], [min(chunk, left)])
        statuses += plan.status.tolist()
    return statuses


def check(seed: int, outcomes: dict[int, int]) -> None:
    rng = random.Random(seed)
    kinds = rng.choice(NO_BUFFERS)
    manager = KVCacheManager.for_groups(
        [GroupSpec(kind, size, options) for kind, size, options in kinds],
        rng.randint(4, 12) * len(kinds),
        LONGEST,
        watermark=rng.choice([0.0, 0.0, 0.2]),
        num_preallocate_tokens=rng.choice([0, 5, 12]),
        hash_block_size=rng.choice([None, 2]),
        fence_frees=rng.random() < 0.5,
    )
    for i in range(8):
        request = Request(f"r{i}", range(rng.randint(1, LONGEST)))
        chunk = rng.choice([1, 3, 8, LONGEST])
        expected = manager.would_fit(Admit(request, num_tokens=chunk), whole=True)
        statuses = run(manager, request, chunk)
        outcomes[expected] += 1
        if expected == Status.SERVED:
            assert set(statuses) == {Status.SERVED}, f"seed {seed}, request {i}"
        if expected == Status.NEVER:
            assert set(statuses) != {Status.SERVED}, f"seed {seed}, request {i}"
        if statuses[0] == Status.SERVED and rng.random() < 0.5:
            manager.free(request)


@pytest.mark.parametrize("first", sampled(range(0, 1_000, SEEDS_PER_TEST)))
def test_would_fit_of_a_whole_prompt_is_correct(first):
    outcomes = {Status.SERVED: 0, Status.WAIT: 0, Status.NEVER: 0}
    for seed in range(first, first + SEEDS_PER_TEST):
        check(seed, outcomes)
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize(
    ("other", "num_free"),
    [(GroupSpec("sliding_window", 4, {"window": 4}), 6), (GroupSpec("recurrent", 4), 5)],
)
def test_whole_prompt_fits_if_later_chunks_release_the_hit(other, num_free):
    """The hit covers 8 of 16 tokens. Its window block or state is released before the last chunk
    needs the page.
    """
    manager = manager_of(GroupSpec("full_attention", 4), other, num_blocks=num_free + 1)
    first, request = Request("a", range(8)), Request("b", range(16))
    manager.step(new=[first])
    manager.free(first)
    assert manager.cache.find_prefix(request).num_tokens == 8
    assert manager.would_fit(Admit(request, num_tokens=4), whole=True) == Status.SERVED
    assert run(manager, request, 4)[-1] == Status.SERVED
    assert manager.num_computed_tokens(request) == 16


def test_state_continues_in_its_page_if_there_is_no_other():
    """The pool has 3 pages, for 2 blocks and one state. The state at the end of the first block is
    updated in place and is no longer cached.
    """
    manager = manager_of(GroupSpec("full_attention", 4), GroupSpec("recurrent", 4), num_blocks=4)
    request = Request("a", range(4))
    manager.step(new=[request])
    page = manager.block_ids(request, 1).tolist()[-1]
    assert manager.cache.find_prefix(Request("b", range(5))).num_tokens == 4
    plan = manager.step([0], [1], token_ids=[4])
    assert plan.status.tolist() == [Status.SERVED] and not plan.copy.size
    assert manager.block_ids(request, 1).tolist() == [0, page]
    assert manager.cache.find_prefix(Request("b", range(5))).num_tokens == 0
    check_invariants(manager)
