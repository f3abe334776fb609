"""What `would_fit` promises comes true: random requests, run to their end in a manager of their own."""

import pytest

from kvcache import KVCacheManager, Request, Status, StepReport
from tests.allocator_driver import LONGEST, MIXES, Chooser, groups_of
from tests.model import CIRCULAR, ENCODER
from tests.shared import sampled

SEEDS_PER_TEST = 50
NO_BUFFERS = [
    mix
    for mix in MIXES
    if all(kind.model(size).pages not in (ENCODER, CIRCULAR) for kind, size in mix[0])
]


def run(manager: KVCacheManager, request: Request, chunk: int) -> list[int]:
    """The answers to a request that is served alone, chunk by chunk."""
    plan = manager.step(new=[request], new_num_tokens=[chunk])
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
    choose = Chooser(seed)
    kinds, hash_block_size = choose.pick(NO_BUFFERS)
    specs, _ = groups_of(choose, kinds)
    manager = KVCacheManager.for_groups(
        specs,
        choose.integer(4, 12) * len(kinds),
        LONGEST,
        watermark=choose.pick([0.0, 0.0, 0.2]),
        num_preallocate_tokens=choose.pick([0, 5, 12]),
        hash_block_size=hash_block_size,
        fence_frees=choose.chance(2),
    )
    for i in range(8):
        request = Request(f"r{i}", range(choose.integer(1, LONGEST)))
        chunk = choose.pick([1, 3, 8, LONGEST])
        expected = manager.would_fit(request, chunk, whole=True)
        statuses = run(manager, request, chunk)
        outcomes[expected] += 1
        if expected == Status.SERVED:
            assert set(statuses) == {Status.SERVED}, f"seed {seed}, request {i}"
        if expected == Status.NEVER:
            assert set(statuses) != {Status.SERVED}, f"seed {seed}, request {i}"
        if statuses[0] == Status.SERVED and choose.chance(2):
            manager.free(request)


@pytest.mark.parametrize("first", sampled(range(0, 1_000, SEEDS_PER_TEST)))
def test_what_is_said_of_a_whole_prompt_comes_true(first):
    outcomes = {Status.SERVED: 0, Status.WAIT: 0, Status.NEVER: 0}
    for seed in range(first, first + SEEDS_PER_TEST):
        check(seed, outcomes)
    assert all(outcomes.values()), outcomes
