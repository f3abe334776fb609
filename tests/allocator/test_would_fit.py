# SPDX-License-Identifier: Apache-2.0
"""Checks the results of `would_fit` by running random requests to completion, each alone in an
empty manager.
"""

import random

import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, Status, StepReport
from tests.machinery.shared import sampled
from tests.simulator.engine import MIXES

LONGEST, SEEDS_PER_TEST = 40, 50
NO_BUFFERS = [
    mix for mix in MIXES if not {each[0] for each in mix} & {"cross_attention", "circular_window"}
]


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
