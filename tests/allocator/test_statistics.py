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


def test_request_that_is_preempted_and_recomputed_does_not_hit_its_own_blocks():
    manager, request = make(), Request("r", range(512))
    manager.step(new=[request])
    for i in range(30):
        manager.step([0], [1], token_ids=[1000 + i])
    manager.free(request)
    plan = manager.step(new=[Admit(request, num_prompt_tokens=512)])
    assert plan.num_computed_tokens.tolist() == [528]  # uses its blocks, which are not counted
    assert counts(manager) == (1, 512, 0)
    assert manager.cache.hit_tokens(request) == 0
    assert manager.cache.stats.groups[0].hit_blocks == 0


def test_swapped_out_request_is_not_counted_again():
    manager, request = make(num_host_blocks=65), Request("r", range(512))
    manager.report(StepReport(manager.step(new=[request]).step_id, True))
    manager.report(StepReport(manager.step(swap_out=[0]).step_id, True))
    manager.step([0], [1], token_ids=[1])
    assert counts(manager) == (1, 512, 0)


def test_preempted_request_hits_tokens_that_it_never_had():
    manager, request = make(), Request("r", range(100))
    manager.step(new=[Admit(request, 40)])
    manager.free(request)
    other = Request("other", range(100))
    manager.step(new=[other])  # hits 32 tokens of the request
    assert counts(manager) == (2, 200, 32)
    manager.step(new=[request])  # hits 96 tokens, 40 of which it has computed itself
    assert counts(manager) == (2, 200, 32 + 56)
    assert manager.cache.hit_tokens(request) == 56 and manager.cache.stats.recent.hit_tokens == 88


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


def test_request_whose_load_failed_is_counted_once():
    manager, request = make(), Request("r", range(200))
    manager.step(new=[Admit(request, external=External(64, delayed=True))])
    manager.free(request, keep_blocks=True)
    manager.release_blocks(request)
    manager.step(new=[request])
    assert counts(manager) == (1, 200, 0)


def test_external_tokens_are_no_hits_even_after_a_preemption():
    manager, request = make(), Request("r", range(200))
    manager.step(new=[Admit(request, external=External(64, delayed=True))])
    manager.finish_receiving(request)
    manager.free(request)
    manager.step(new=[request])
    assert counts(manager) == (1, 200, 0)


def test_tokens_that_did_not_arrive_are_hits_if_another_request_computes_them():
    manager, request = make(), Request("r", range(200))
    manager.step(new=[Admit(request, external=External(64, delayed=True))])
    manager.step(new=[Request("other", range(200))])
    assert manager.finish_receiving(request, 0) == 192
    assert counts(manager) == (2, 400, 192)


def test_fork_that_is_preempted_adds_nothing():
    manager, parent = make(), Request("p", range(64))
    manager.step(new=[parent])
    child = Request("c", range(65))
    manager.fork(parent, child)
    manager.free(child)
    manager.step(new=[child])
    assert counts(manager) == (1, 64, 0)


@pytest.mark.parametrize("is_running", [True, False])
def test_request_whose_adapter_was_forgotten_is_not_counted_again(is_running):
    manager = make()
    request, other = (Request(name, range(100), lora=("a", "/a")) for name in ("r", "other"))
    manager.step(new=[request])
    if not is_running:
        manager.free(request)
    manager.cache.forget_adapter("a")
    if is_running:
        manager.free(request)
    manager.step(new=[other])
    plan = manager.step(new=[request])
    assert plan.num_computed_tokens.tolist() == [96]
    assert counts(manager) == (2, 200, 0)
    assert manager.cache.hit_tokens(request) == 0


def test_another_manager_counts_the_request_again():
    request = Request("r", range(100))
    for _ in range(2):
        manager = make()
        manager.step(new=[request])
        manager.free(request)
        assert counts(manager) == (1, 100, 0)


def test_missed_tokens_are_those_of_the_first_admission():
    manager, request = make(explain_misses=8), Request("r", range(100))
    for _ in range(3):
        manager.step(new=[request])
        manager.free(request)
    assert sum(manager.cache.stats.missed_tokens.values()) == 100


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
