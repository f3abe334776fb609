# SPDX-License-Identifier: Apache-2.0
"""Tests of LoRA adapters whose weights change: versions in hashes, and `forget_adapter`."""

import pickle
import random

import numpy as np
import pytest
import torch

from kvcache import (
    Admit,
    External,
    KVCacheManager,
    LayerSpec,
    Request,
    Status,
    build,
    hash_blocks,
    plan_cache,
)
from kvcache.allocator import RequestState, check_invariants
from kvcache.events import BlockRemoved, BlockStored
from kvcache.sources.base import LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache_exchange.disaggregation.offer import digest_of
from kvcache_exchange.router_events.translator import EventTranslator
from tests.machinery.shared import context_of, sampled, seed_of_test

ALPHA, BETA = ("alpha", "/adapters/alpha"), ("beta", "/adapters/beta")
TOKENS = list(range(64))


def manager_of(**options):
    return KVCacheManager(16, 60, 1024, num_preallocate_tokens=0, **options)


def hit(manager, lora, tokens=TOKENS):
    return manager.cache.cached_tokens(Request("probe", [*tokens, 1], lora=lora)).with_host


# Versions ----------------------------------------------------------------------------------------------


def test_a_version_follows_the_path_in_the_key_and_without_one_the_key_is_unchanged():
    manager = manager_of()
    for lora in (ALPHA, (*ALPHA, "2"), (*ALPHA, "")):
        hashes = manager.cache.hashes(Request("r", TOKENS, lora=lora))
        keys = [[("lora", *lora)]] * 4
        assert (hashes == hash_blocks(TOKENS, 16, extra_keys=keys)).all()
        assert (hashes == hash_blocks(TOKENS, 16, extra_keys=keys, seed="vllm-none-hash")).all()


def test_versions_share_nothing_with_each_other_or_with_other_names_and_paths():
    loras = [None, ALPHA, BETA, (*ALPHA, "1"), (*ALPHA, "2"), (*ALPHA, ""), ("alpha", "/a", "1")]
    loras += [("alpha", "/adapters/alpha1"), ("alpha1", "/adapters/alpha"), ("alpha", "1", "/a")]
    manager, found = manager_of(), {}
    for number, lora in enumerate(loras):
        assert hit(manager, lora) == 0
        request = Request(f"{number}", TOKENS, lora=lora)
        manager.step(new=[request])
        found[manager.cache.hashes(request)[0].tobytes()] = lora
        manager.free(request)
    assert len(found) == len(loras) and all(hit(manager, lora) == 64 for lora in loras)


def test_events_and_offer_digests_contain_the_version():
    manager = manager_of(enable_events=True)
    request = Request("r", TOKENS, lora=(*ALPHA, "2"))
    manager.step(new=[request])
    (event,) = manager.cache.drain_events()
    assert event.lora == (*ALPHA, "2") and event.extra_keys[3] == (("lora", *ALPHA, "2"),)
    (wire,) = EventTranslator("vllm-none-hash").translate([event])
    assert wire.lora_name == "alpha" and wire.parent_block_hash is None
    digests = {digest_of(TOKENS, lora, []) for lora in (ALPHA, (*ALPHA, "2"), (*ALPHA, "3"))}
    assert len(digests) == 3


def test_a_request_with_a_version_can_be_pickled():
    request = pickle.loads(pickle.dumps(Request("r", TOKENS, lora=[*ALPHA, "2"])))
    assert request.lora == (*ALPHA, "2")


@pytest.mark.parametrize(
    "lora,error,message",
    [
        (
            "alpha",
            TypeError,
            r"lora is 'alpha': expected \(name, path\) or \(name, path, version\)",
        ),
        (("alpha",), ValueError, r"lora is \('alpha',\): expected \(name, path\) or"),
        ((*ALPHA, "2", "3"), ValueError, r"lora is .*: expected \(name, path\) or"),
        ((*ALPHA, 2), TypeError, r"lora\[2\]"),
        ((*ALPHA, None), TypeError, r"lora\[2\]"),
        ((*ALPHA, "\ud800"), ValueError, r"lora\[2\]"),
    ],
)
def test_invalid_versions_are_rejected(lora, error, message):
    with pytest.raises(error, match=message):
        Request("r", TOKENS, lora=lora)


# forget_adapter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [{}, {"num_host_blocks": 40, "host_write": "through"}])
def test_forgotten_adapters_lose_their_blocks_on_both_tiers_and_others_keep_theirs(host):
    manager = manager_of(enable_events=True, **host)
    loras = [None, ALPHA, BETA, (*ALPHA, "2"), ("alphabet", "/adapters/alpha")]
    requests = [Request(f"{i}", TOKENS, lora=lora) for i, lora in enumerate(loras)]
    manager.step(new=requests)
    for _ in range(2):
        manager.step([0], [0])
    manager.free(requests[1])
    manager.cache.drain_events()
    gone = {h.tobytes() for i in (1, 3) for h in manager.cache.hashes(requests[i])}

    manager.cache.forget_adapter("alpha")
    removed = manager.cache.drain_events()
    assert all(isinstance(event, BlockRemoved) for event in removed)
    for medium in ("gpu", "cpu") if host else ("gpu",):
        found = [h for event in removed if event.medium == medium for h in event.block_hashes]
        assert {each.tobytes() for each in found} == gone and len(found) == len(gone)
    assert [hit(manager, lora) for lora in loras] == [64, 0, 64, 0, 64]
    check_invariants(manager)


def test_new_requests_of_a_forgotten_adapter_hit_each_other():
    manager = manager_of()
    for _ in range(3):
        first, second = (Request(name, TOKENS, lora=ALPHA) for name in "ab")
        assert manager.step(new=[first]).num_computed_tokens.tolist() == [0]
        assert manager.step(new=[second]).num_computed_tokens.tolist() == [48]
        for request in (first, second):
            manager.free(request)
        manager.cache.forget_adapter("alpha")
        assert hit(manager, ALPHA) == 0


def test_running_requests_publish_nothing_more_and_compute_everything_when_admitted_again():
    manager = manager_of()
    running, waiting = (Request(name, TOKENS, lora=ALPHA) for name in "ab")
    manager.step(new=[Admit(running, 32)])
    before = manager.cache.hashes(waiting)  # computed before the adapter is forgotten
    manager.cache.forget_adapter("alpha")
    manager.step([manager.row(running)], [32])
    assert (manager.cache.find(before).device == -1).all()
    assert manager.step(new=[waiting]).num_computed_tokens.tolist() == [0]
    assert hit(manager, ALPHA) == 64  # of `waiting`
    manager.free(waiting)
    manager.cache.evict(np.arange(1, 60))
    assert hit(manager, ALPHA) == 0
    manager.free(running)
    assert hit(manager, ALPHA) == 0
    assert manager.step(new=[running]).num_computed_tokens.tolist() == [0]
    assert hit(manager, ALPHA) == 64
    check_invariants(manager)


def test_running_requests_of_a_forgotten_adapter_can_be_forked_and_swapped():
    manager = manager_of(num_host_blocks=20)
    parent = Request("parent", TOKENS, lora=ALPHA)
    manager.step(new=[parent])
    manager.cache.forget_adapter("alpha")
    child = Request("child", TOKENS, lora=ALPHA)
    row = manager.fork(parent, child)
    for request in (parent, child):
        request.append_tokens([1] * 16)
    manager.step([manager.row(parent), row], [16, 16])
    assert hit(manager, ALPHA, [*TOKENS, *[1] * 16]) == 0
    manager.step(swap_out=[row])
    manager.step([0], [0])
    child.append_tokens([1])
    manager.step([row], [1])  # swapped in again
    assert manager.state(child) is RequestState.RUNNING
    assert hit(manager, ALPHA) == 0
    manager.free(parent), manager.free(child)
    check_invariants(manager)


def test_external_tokens_in_flight_are_not_published_under_a_forgotten_adapter():
    manager = manager_of()
    request = Request("r", TOKENS, lora=ALPHA)
    manager.step(new=[Admit(request, external=External(48, delayed=True))])
    manager.cache.forget_adapter("alpha")
    assert manager.finish_receiving(request, 48) == 48
    manager.step([manager.row(request)], [16])
    assert hit(manager, ALPHA) == 0


def test_a_request_that_restarts_after_its_adapter_was_forgotten_computes_everything_itself():
    manager = manager_of()
    request, shared = (Request(name, TOKENS, lora=ALPHA) for name in "ab")
    before = manager.cache.hashes(request)
    manager.step(new=[Admit(request, external=External(48, delayed=True))])
    manager.cache.forget_adapter("alpha")
    manager.step(new=[shared])
    assert manager.finish_receiving(request, 0) == 0  # restarts
    hashes = manager.cache.hashes(shared)
    manager.free(shared)
    manager.cache.evict(manager.cache.find(hashes).device)
    manager.step([manager.row(request)], [64])
    assert hit(manager, ALPHA) == 0 and (manager.cache.find(before).device == -1).all()
    check_invariants(manager)


def test_two_managers_never_compute_the_same_hashes_after_forgetting():
    managers = manager_of(), manager_of(), manager_of(hash_algorithm="xxh3_128_cbor")
    request, other = Request("r", TOKENS, lora=ALPHA), Request("o", TOKENS, lora=BETA)
    before = [manager.cache.hashes(request) for manager in managers]
    others = [manager.cache.hashes(other) for manager in managers]
    assert (before[0] == before[1]).all()
    found = {each.tobytes() for hashes in before for each in hashes}
    for _ in range(2):
        for manager in managers:
            manager.cache.forget_adapter("alpha")
            new = {each.tobytes() for each in manager.cache.hashes(request)}
            assert len(new) == 4 and found.isdisjoint(new)
            found |= new
    for manager, hashes in zip(managers, others):
        assert (manager.cache.hashes(other) == hashes).all()


def test_events_after_forgetting_contain_everything_to_compute_the_hashes():
    manager = manager_of(enable_events=True)
    manager.cache.forget_adapter("alpha")
    manager.step(new=[Request("r", TOKENS, lora=ALPHA), Request("o", TOKENS, lora=BETA)])
    events = manager.cache.drain_events()
    for event in events:
        assert isinstance(event, BlockStored) and event.extra_keys[0] == (("lora", *event.lora),)
        hashes = hash_blocks(
            event.token_ids, 16, parent=event.parent_hash, extra_keys=event.extra_keys
        )
        assert (hashes == event.block_hashes).all()
    assert [event.root_hash is None for event in events] == [False, True]
    # Readers on the wire see the first block of a sequence.
    assert [w.parent_block_hash for w in EventTranslator("vllm-none-hash").translate(events)] == [
        None,
        None,
    ]


def test_a_match_or_load_from_before_is_not_used():
    manager = manager_of()
    loads = SourceLoads(manager, LoadStats())
    matched, loading = (Request(name, TOKENS, lora=ALPHA) for name in "ab")
    loads.match(matched, 0, 48), loads.match(loading, 0, 48)
    manager.step(
        new=[Admit(each, external=External(48, delayed=True)) for each in (matched, loading)]
    )
    load = loads.admitted(loading)
    loads.begin(load)
    manager.cache.forget_adapter("beta")
    assert loads.matched(matched) is not None
    manager.cache.forget_adapter("alpha")
    assert loads.matched(matched) is None
    with pytest.raises(ValueError, match="'a' has no load to begin"):
        loads.admitted(matched)
    arrived = loads.finish(load)
    assert (arrived.num_computed_tokens, arrived.num_loaded_tokens) == (0, 0)
    assert arrived.error == "its adapter was forgotten"


def test_given_hashes_of_a_forgotten_adapter_are_rejected_because_they_do_not_change():
    manager = manager_of()
    given = [each.tobytes() for each in manager.cache.hashes(Request("r", TOKENS, lora=ALPHA))]
    running, new = (Request(n, TOKENS, lora=ALPHA, block_hashes=[*given]) for n in "ab")
    manager.step(new=[running])
    assert hit(manager, ALPHA) == 64
    manager.cache.forget_adapter("alpha")
    assert hit(manager, ALPHA) == 0
    with pytest.raises(ValueError, match="block_hashes of request 'b' are given: expected None"):
        manager.step(new=[new])
    running.append_tokens([1])
    manager.step([manager.row(running)], [1])
    assert (manager.cache.find(given).device == -1).all()
    manager.step(new=[Request("o", TOKENS, lora=BETA, block_hashes=[*given])])
    check_invariants(manager)


def test_names_that_were_never_used_can_be_forgotten():
    manager = manager_of()
    manager.cache.forget_adapter("")
    manager.step(new=[Request("r", TOKENS), Request("e", TOKENS, lora=("", ""))])
    manager.cache.forget_adapter("")
    assert (hit(manager, None), hit(manager, ("", ""))) == (64, 0)


@pytest.mark.parametrize(
    "options,name,error,message",
    [
        ({}, None, TypeError, "name"),
        ({}, ALPHA, TypeError, "name"),
        ({}, "\ud800", ValueError, "name"),
        (
            {"hash_algorithm": "engine:x"},
            "alpha",
            ValueError,
            "hash_algorithm 'engine:x': expected",
        ),
    ],
)
def test_forget_adapter_rejects_wrong_names_and_hashes_of_the_engine(options, name, error, message):
    manager = manager_of(**options)
    with pytest.raises(error, match=message):
        manager.cache.forget_adapter(name)
    if not options:
        request = Request("r", TOKENS, lora=ALPHA)
        expected = hash_blocks(TOKENS, 16, extra_keys=[[("lora", *ALPHA)]] * 4)
        assert (manager.cache.hashes(request) == expected).all()


# Random operations on real pages -----------------------------------------------------------------------


class Driver:
    """Runs random requests of several adapters on real pages of both tiers.

    The KV of a token is a number that stands for the adapter, how often it was forgotten when the
    token was computed, and all tokens up to this one.
    """

    LORAS = (None, ALPHA, (*ALPHA, "2"), BETA)

    def __init__(self, rng):
        self.rng = rng
        layers = [LayerSpec("full", "full_attention", 4, 1, 1, dtype="float32")]
        if rng.random() < 0.5:
            window = {"options": {"window": 7}}
            layers += [LayerSpec("window", "sliding_window", 4, 1, 1, dtype="float32", **window)]
        plan = plan_cache(layers, 1 << 40, max_model_len=64)
        plan = plan_cache(layers, plan.page_bytes * rng.randint(40, 80), max_model_len=64)
        self.cache = build(
            plan,
            max_num_reqs=6,
            num_preallocate_tokens=0,
            num_host_blocks=rng.choice([0, 30]),
            hash_block_size=rng.choice([4, 2]),
            enable_events=True,
        )
        self.manager = self.cache.manager
        self.epochs = {"alpha": 0, "beta": 0}
        self.numbers = {}
        self.running = {}  # request -> KV of its computed tokens
        self.waiting = []
        self.count = self.num_hits = 0

    def value(self, request, position):
        name = None if request.lora is None else request.lora[0]
        key = (
            request.lora,
            self.epochs.get(name),
            tuple(request.token_ids[: position + 1].tolist()),
        )
        return float(self.numbers.setdefault(key, len(self.numbers) + 1))

    def new(self):
        self.count += 1
        prefix = [self.rng.randint(0, 1)] * self.rng.randint(1, 24)
        tokens = [*prefix, *(self.rng.randint(0, 1) for _ in range(self.rng.randint(0, 3)))]
        return Request(f"{self.count}", tokens, lora=self.rng.choice(self.LORAS))

    def step(self):
        for request in self.running:
            if request.num_tokens < 60 and self.rng.random() < 0.8:
                request.append_tokens([self.rng.randint(0, 1)])
        rows = {r: request for request in self.running if (r := self.manager.row(request)) >= 0}
        counts = [request.num_tokens - len(self.running[request]) for request in rows.values()]
        new = []
        while self.waiting and len(rows) + len(new) < 6 and self.rng.random() < 0.8:
            new.append(self.waiting.pop())
        plan = self.manager.step(list(rows), counts, new=new)
        self.manager.report(self.cache.worker.apply(plan))
        for request, status, start, n in zip(
            [*rows.values(), *new], plan.status, plan.num_computed_tokens.tolist(), plan.num_tokens
        ):
            if status != Status.SERVED:
                continue
            kv = self.running.setdefault(request, [self.value(request, i) for i in range(start)])
            self.num_hits += request in new and start > 0
            assert len(kv) == start
            self.compute(request, kv, int(n))
        self.waiting += [request for request in new if request not in self.running]

    def compute(self, request, kv, num_tokens):
        row, start = self.manager.row(request), len(kv)
        for name in [layer.name for layer in self.cache.plan.layers]:
            key, _ = context_of(self.cache, name, [row], [start])
            first = 0 if name == "full" else max(start - 6, 0)
            assert key[first:, 0, 0].tolist() == kv[first:], (request.lora, name, start)
        kv += [self.value(request, i) for i in range(start, start + num_tokens)]
        values = torch.tensor(kv[start:]).reshape(-1, 1, 1)
        for name in [layer.name for layer in self.cache.plan.layers]:
            table = self.cache.tables[self.cache.group(name)]
            slots = table.slots_of([row] * num_tokens, range(start, start + num_tokens))
            self.cache.write(name, values, values, torch.as_tensor(slots))

    def leave(self):
        if self.running:
            request = self.rng.choice(list(self.running))
            del self.running[request]
            self.manager.free(request)
            if self.rng.random() < 0.5:  # preempted
                self.waiting.append(request)

    def fork(self):
        if self.running and len(self.running) < 6:
            parent = self.rng.choice(list(self.running))
            self.count += 1
            child = Request(f"{self.count}", parent.token_ids, lora=parent.lora)
            if self.manager.fork(parent, child) >= 0:
                self.running[child] = list(self.running[parent])

    def forget(self):
        name = self.rng.choice(list(self.epochs))
        self.epochs[name] += 1
        self.manager.cache.forget_adapter(name)

    def run(self, num_operations):
        for _ in range(num_operations):
            kind = self.rng.choices(["new", "step", "leave", "fork", "forget"], [6, 8, 3, 1, 1])[0]
            if kind == "new":
                self.waiting.append(self.new())
            else:
                getattr(self, kind)()
        check_invariants(self.manager)


@pytest.mark.parametrize("num_operations", sampled([200, 20_000]))
def test_random_requests_never_read_kv_of_forgotten_weights(num_operations):
    seed = seed_of_test()
    print(f"seed {seed}")
    rng, num_hits = random.Random(seed), 0
    for _ in range(0, num_operations, 100):
        driver = Driver(rng)
        driver.run(100)
        num_hits += driver.num_hits
    assert num_hits >= num_operations // 1000
