# SPDX-License-Identifier: Apache-2.0
"""A hit token is a token that a request did not have to compute, because another request had."""

import random

import pytest

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    Request,
    RequestState,
    Status,
    StepReport,
)
from kvcache.allocator.manager import check_invariants
from tests.machinery.shared import run_seeds


def make(**options) -> KVCacheManager:
    return KVCacheManager(16, 65, 2048, num_preallocate_tokens=0, **options)


def counts(manager: KVCacheManager) -> tuple[int, int, int]:
    stats = manager.cache.stats
    return stats.num_requests, stats.query_tokens, stats.hit_tokens


def test_later_hits_are_counted_in_the_window_that_contains_the_request():
    manager, request, other = make(), Request("r", range(100)), Request("o", range(100))
    manager.step(new=[Admit(request, 40)])
    manager.free(request)
    manager.step(new=[other])  # hits 32 tokens
    for i in range(999):  # the window has 1,000 requests
        short = Request(f"short {i}", [7])
        manager.step(new=[short])
        manager.free(short)
    manager.step(new=[request])  # hits 56 tokens, and is no longer in the window
    recent, group = manager.cache.stats.recent, manager.cache.stats.groups[0]
    assert counts(manager) == (1001, 200 + 999, 32 + 56)
    assert (recent.query_tokens, recent.hit_tokens) == (100 + 999, 32)
    assert group.hit_blocks == 5


def test_another_manager_counts_the_request_again():
    request = Request("r", range(100))
    for _ in range(2):
        manager = make()
        manager.step(new=[request])
        manager.free(request)
        assert counts(manager) == (1, 100, 0)


def run_requests(seed: int) -> None:
    """Run random requests. For each, an oracle keeps the prompt tokens that it has had: hit, received
    or computed. Only tokens of a hit that it has not had count.
    """
    choose = random.Random(seed)
    groups = [GroupSpec("full_attention", 4)]
    if choose.random() < 0.4:
        groups.append(GroupSpec("sliding_window", 4, {"window": choose.randint(1, 12)}))
    manager = KVCacheManager.for_groups(
        groups, choose.choice([20, 40, 60]), 256, num_preallocate_tokens=0, num_host_blocks=20
    )
    requests: list[Request] = []
    had: dict[str, set[int]] = {}
    prompts: dict[str, int] = {}  # number of tokens at the first admission
    hits: dict[str, int] = {}
    receiving: dict[str, int] = {}  # length of the hit before the tokens that have not arrived
    running: dict[str, int] = {}  # rows
    for number in range(choose.randint(4, 24)):
        idle = [each for each in requests if each.request_id not in running]
        operation = choose.choice(["new", "new", "again", "decode", "free", "arrive", "swap"])
        if operation in ("new", "again"):
            if operation == "again" and idle:
                request = choose.choice(idle)
            else:
                shared = choose.choice([0, 5, 12, 20])
                tokens = [
                    *range(shared),
                    *(1000 * number + i for i in range(choose.randint(1, 12))),
                ]
                request = Request(f"r{number}", tokens)
                requests.append(request)
            name = request.request_id
            known = manager.cache.cached_tokens(request).with_host
            most = request.num_tokens - 1 - known
            external = choose.randint(1, most) if most > 0 and choose.random() < 0.3 else 0
            delayed = external > 0 and choose.random() < 0.6
            count = None if delayed else choose.choice([None, 1, 6])
            ask = Admit(request, count, External(external, delayed) if external else None)
            plan = manager.step(new=[ask])
            if plan.status[0] != Status.SERVED:
                continue
            start = int(plan.num_computed_tokens[0]) - external
            assert not external or start == known
            first = prompts.setdefault(name, request.num_tokens)
            mine = had.setdefault(name, set())
            hits[name] = hits.get(name, 0) + len(set(range(min(start, first))) - mine)
            mine |= set(range(start if delayed else manager.num_computed_tokens(request)))
            running[name] = manager.row(request)
            if delayed:
                receiving[name] = start
        elif running:
            name = choose.choice([*running])
            request = next(each for each in requests if each.request_id == name)
            if name in receiving:
                start = receiving.pop(name)
                most = manager.num_computed_tokens(request) - start
                arrived = choose.choice([most, choose.randint(0, most)])
                had[name] |= set(range(start + arrived))
                stop = manager.finish_receiving(request, arrived)
                if stop > start + arrived:  # another request has cached a longer prefix
                    hits[name] += len(set(range(min(stop, prompts[name]))) - had[name])
                had[name] |= set(range(stop))
            elif operation == "free" or request.num_tokens > 60:
                manager.free(request)
                del running[name]
            elif operation == "swap" and manager.state(request) is RequestState.RUNNING:
                manager.step(swap_out=[running[name]])
            else:
                left = request.num_tokens - manager.num_computed_tokens(request)
                ids = [] if left > 1 else [5000 + number]
                count = choose.randint(1, max(left, 1))
                plan = manager.step(
                    [running[name]], [count], token_ids=ids, num_token_ids=[len(ids)]
                )
                if plan.status[0] == Status.SERVED:
                    had[name] |= set(range(manager.num_computed_tokens(request)))
        manager.report(StepReport(manager.step().step_id, True))
        assert counts(manager) == (len(prompts), sum(prompts.values()), sum(hits.values()))
        for request in requests:
            assert manager.cache.hit_tokens(request) == hits.get(request.request_id, 0)
    check_invariants(manager)


NUM_CASES, CASES_PER_TEST = 12_000, 300


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.exhaustive if first else [])
        for first in range(0, NUM_CASES, CASES_PER_TEST)
    ],
)
def test_hits_are_the_tokens_that_other_requests_have_computed(first):
    run_seeds(run_requests, range(first, first + CASES_PER_TEST))
