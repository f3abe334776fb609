# SPDX-License-Identifier: Apache-2.0
"""Tests of blocks in a store outside the engine. Whatever the store does, contents must be correct
and nothing may leak.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    Pages,
    Request,
    StepReport,
    SwapEngine,
)
from kvcache.allocator import check_invariants
from kvcache_exchange.store import Circuit, StoredPrefixes, StoreTier, fingerprint
from kvcache_exchange.store import tier as tier_module
from kvcache_exchange.store.value_format import BlockKey, faults, key_of_text, key_text, seal
from kvcache_lab_tests.test_replay import as_workload
from tests.machinery.shared import sampled
from tests.machinery.simulated_device import SimulatedStreams
from tests.machinery.stores import FAULTS, MemoryStore, StoreUser, patient

FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 6})
STATE = GroupSpec("recurrent", 4)
MIXES = {
    "full": ([FULL], None),
    "window": ([WINDOW], None),
    "state": ([STATE], None),
    "full and window": ([FULL, WINDOW], None),
    "full and state": ([FULL, STATE], None),
    "all": ([FULL, WINDOW, STATE, GroupSpec("chunked_local", 4, {"chunk_size": 8})], None),
    "inside blocks": ([GroupSpec("full_attention", 8)], 2),
    "unequal blocks": (
        [GroupSpec("full_attention", 8), GroupSpec("sliding_window", 12, {"window": 9})], 4,
    ),
    "state inside blocks": ([GroupSpec("full_attention", 8), STATE], 2),
    "not cached": (
        [FULL, GroupSpec("full_attention", 4, cached=False, transferred=False)], None,
    ),
    "a drafter": ([FULL, GroupSpec("full_attention", 4, drafts=True)], None),
}  # fmt: skip
LONG = [*range(30)]


def prompts(*tokens):
    return as_workload(tokens)


def a_user(store=None, groups=(FULL,), **options):
    return StoreUser(MemoryStore() if store is None else store, [*groups], **options)


# Sharing through a store --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 90])
@pytest.mark.parametrize("mix", MIXES)
def test_blocks_computed_by_one_engine_are_loaded_by_another(mix, num_host_blocks):
    groups, hash_block_size = MIXES[mix]
    options = {
        "groups": groups, "hash_block_size": hash_block_size, "num_host_blocks": num_host_blocks,
        "host_write": "through",
    }  # fmt: skip
    store = MemoryStore()
    one = a_user(store, **options)
    one.run(*prompts(LONG, [*range(14), *range(50, 60)]))
    one.settle()
    one.end()
    other = a_user(store, **options)
    longer, *_ = prompts([*range(30), *range(70, 80)])
    other.run(longer)
    # The hit ends at the largest common multiple of the groups' block sizes within the prompt. A
    # drafter recomputes the last block. With states inside blocks, nothing is loaded: steps end at
    # token 28, the end of the prompt's last hash block, so no state is cached at token 24.
    assert other.num_loaded == {"unequal blocks": 24, "inside blocks": 24, "a drafter": 24,
                                "state inside blocks": 0}.get(mix, 28)  # fmt: skip
    assert other.tier.stats.loaded_tokens == other.num_loaded
    other.end()


def test_blocks_on_the_device_are_not_loaded():
    user = a_user()
    user.run(*prompts(LONG))
    user.settle()
    user.run(*prompts(LONG, [*range(20), 99])[1:])
    assert (user.num_loaded, user.num_hit) == (0, 20)
    user.end()


def test_load_begins_after_the_hit():
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    other = a_user(store, num_blocks=12)
    other.run(*prompts(LONG[:9]))
    other.run(*prompts(LONG, LONG)[1:])
    assert (other.num_hit, other.num_loaded) == (8, 8 + 20)
    other.end()


def test_loaded_blocks_are_hits_for_other_requests():
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    other = a_user(store)
    for item in prompts(LONG, [*range(28), 5]):
        other.run(item)
    assert (other.num_loaded, other.num_hit) == (28, 28)
    other.end()


@pytest.mark.parametrize("difference", [{"model": "other"}, {"hash_seed": "other"}])
def test_another_fingerprint_finds_nothing(difference):
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    other = a_user(store, **difference)
    other.run(*prompts(LONG))
    assert other.num_loaded == 0
    other.end()


def test_lookup_of_a_waiting_request_is_repeated(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = MemoryStore()
    one, other = a_user(store), a_user(store, timeout_s=0.2)
    request = Request("a", LONG)
    while other.tier.match(request) is None:
        time.sleep(0.001)
    assert other.tier.match(request) == 0
    one.run(*prompts(LONG))
    one.settle()
    now[0] += 0.1
    assert other.tier.match(request) == 0
    now[0] += 0.15
    deadline = time.monotonic() + 20
    while not other.tier.match(request):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert other.tier.match(request) == 28
    one.end()
    other.end()


@pytest.mark.parametrize("tokens", [[*range(20)], [*range(50, 80)]])
def test_reused_request_name_has_a_separate_lookup(tokens):
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    other = a_user(store)

    def match(request):
        while (found := other.tier.match(request)) is None:
            time.sleep(0.001)
        return found

    assert match(Request("x", LONG)) == 28
    assert match(Request("x", tokens)) == (16 if tokens[0] == 0 else 0)
    assert match(Request("x", LONG)) == 28
    other.end()


def test_tier_follows_the_epoch_of_the_manager():
    user = a_user()
    user.run(*prompts(LONG))
    user.settle()
    user.manager.cache.start_epoch("newer")
    assert match_of(user, LONG) == 0
    user.manager.cache.start_epoch("newest")
    user.run(*prompts(LONG, LONG)[1:])
    user.settle()
    user.manager.cache.start_epoch("newer")  # the former weights again, which stored nothing
    assert match_of(user, LONG) == 0
    user.manager.cache.start_epoch("newest")
    assert match_of(user, LONG) == 28
    user.end()


def test_engines_share_a_store_while_the_versions_of_their_weights_are_equal():
    store = MemoryStore()
    one = a_user(store)
    one.manager.cache.start_epoch("step 1")
    one.run(*prompts(LONG))
    one.settle()
    other = a_user(store)
    found = [match_of(other, LONG)]
    for version in ("step 1", "step 2", None):
        other.manager.cache.start_epoch(version)
        found.append(match_of(other, LONG))
    assert found == [0, 28, 0, 0]
    one.end()
    other.end()


def test_tier_created_after_a_new_epoch_uses_its_version():
    store = MemoryStore()
    found = []
    for version in (None, "newer", "newer"):
        manager = KVCacheManager(16, 9, 128, enable_events=True)
        if version is not None:
            manager.cache.start_epoch(version)
        tier = StoreTier(manager, KVStorage(9, 16, 1, 8).pages, store, model="tiny")
        found.append(tier._ranks[0]._fingerprint)
        tier.close()
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("has_begun", [True, False])
def test_load_in_flight_at_a_new_epoch_loads_nothing(has_begun):
    user = a_user()
    user.run(*prompts(LONG))
    user.settle()
    assert user.manager.cache.reset()
    request = Request("x", LONG)
    while (count := user.tier.match(request)) is None:
        time.sleep(0.001)
    plan = user.manager.step(new=[Admit(request, external=External(count, delayed=True))])
    user.manager.report(StepReport(plan.step_id, completed=True))
    if not has_begun:
        user.manager.cache.start_epoch("newer")
        with pytest.raises(ValueError, match="without a new epoch"):
            user.tier.begin(request)
    else:
        user.tier.begin(request)
        user.manager.cache.start_epoch("newer")
        (arrived,) = user.tier.poll()
        assert arrived.num_computed_tokens == arrived.num_loaded_tokens == 0
        assert arrived.error == "the weights have changed"
    user.tier.cancel(request)
    user.end()


def match_of(user, tokens):
    request = Request("probe", tokens)
    while (found := user.tier.match(request)) is None:
        time.sleep(0.001)
    return found


def test_new_epoch_finds_no_blocks_of_the_earlier_one():
    user = a_user()
    user.run(*prompts(LONG))
    user.settle()
    user.manager.cache.start_epoch("newer")
    user.run(*prompts(LONG, LONG)[1:])
    assert (user.num_loaded, user.num_hit) == (0, 0)
    user.settle()
    user.manager.cache.reset()
    user.run(*prompts(LONG, LONG, LONG)[2:])
    assert user.num_loaded == 28
    user.end()


@pytest.mark.parametrize("options", [{"read_cache": False}, {"cache_salt": "mine"}])
def test_requests_that_may_not_read_load_nothing(options):
    user = a_user()
    user.run(*prompts(LONG))
    user.settle()
    user.manager.cache.reset()
    user.add(prompts(LONG, LONG)[1], **options)
    user.run()
    assert user.num_loaded == 0
    user.end()


def test_invalid_blocks_are_removed_from_the_store():
    user = a_user()
    user.run(*prompts(LONG))
    user.settle()
    assert len(user.store.values) == 7
    blocks = user.manager.cache.find_prefix(Request("probe", LONG)).block_ids
    user.tier.invalidate(blocks[3:4])
    user.settle()
    deadline = time.monotonic() + 20
    while len(user.store.values) > 3:
        assert time.monotonic() < deadline
        user.tier.poll()
        time.sleep(0.001)
    assert len(user.store.values) == 3
    user.end()
    assert len(told(user)) == 3


class Gated(MemoryStore):
    """A store whose `exists` method blocks while the gate is closed.

    The first `num_failures` calls to `remove` fail.
    """

    def __init__(self, num_failures=0):
        super().__init__()
        self.gate, self.num_failures = threading.Event(), num_failures
        self.gate.set()

    def exists(self, keys):
        assert self.gate.wait(20)
        return super().exists(keys)

    def remove(self, keys):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("remove failed")
        super().remove(keys)


def begin_a_put(user, item):
    """Run a step of a request while its puts are waiting for a blocked call."""
    user.add(item)
    while user.tier.match(user.waiting[-1].request) is None:
        time.sleep(0.001)
    user.store.gate.clear()
    user.tier.match(Request("probe", range(500, 540)))
    user.step()


@pytest.mark.parametrize("num_host_blocks", [0, 90])
def test_pending_put_does_not_store_invalid_blocks(num_host_blocks):
    user = a_user(Gated(), num_host_blocks=num_host_blocks, host_write="through")
    begin_a_put(user, prompts(LONG)[0])
    while not user.tier._num_writing:  # the blocks are written to the host one step later
        user.step()
    assert not user.store.values
    (running,) = user.running.values()
    blocks = user.manager.block_ids(running.request)[:1]
    user.restart(user.tier.invalidate(blocks))
    user.store.gate.set()
    user.settle()
    assert not user.store.values and not told(user)
    assert user.tier.stats.dropped_blocks > 0
    user.run()  # this step recomputes the request
    user.step()
    user.settle()
    assert len(user.store.values) == 7
    user.end()


@pytest.mark.parametrize("num_failures", [1, 5])
def test_failed_removal_is_retried(num_failures):
    user = a_user(Gated(num_failures), circuit=patient())
    user.run(*prompts(LONG))
    user.settle()
    blocks = user.manager.cache.find_prefix(Request("probe", LONG)).block_ids
    user.tier.invalidate(blocks[3:4])
    deadline = time.monotonic() + 20
    while len(user.store.values) > 3:
        assert time.monotonic() < deadline
        user.tier.poll()
        time.sleep(0.001)
    assert user.tier.stats.errors == num_failures
    user.end()
    assert len(told(user)) == 3


def test_nothing_is_loaded_before_invalid_blocks_are_removed():
    user = a_user(Gated(1000))
    user.run(*prompts(LONG))
    user.settle()
    user.tier.invalidate(user.manager.cache.find_prefix(Request("probe", LONG)).block_ids[:1])
    user.manager.cache.reset()
    user.run(*prompts(LONG, LONG)[1:])
    assert user.num_loaded == 0 and user.num_finished == 2 and len(user.store.values) == 7
    while user.tier._num_writing:  # from here on, a put in flight would succeed
        user.tier.poll()
    user.store.num_failures = 0
    user.end()
    assert not user.store.values


def test_put_in_flight_at_a_new_epoch_is_not_announced():
    user = a_user(Gated())
    user.run(*prompts(LONG))
    user.settle()
    user.events += user.tier.drain_events()
    assert len(told(user)) == 7
    user.manager.cache.reset()
    begin_a_put(user, prompts(LONG, [*range(100, 130)])[1])
    assert user.tier._num_writing and len(user.store.values) == 7
    user.manager.cache.start_epoch("newer")
    user.store.gate.set()
    for each in [*user.running.values()]:
        user.finish(each)
    user.settle()
    user.end()
    assert len(user.store.values) > 7 and not told(user)


def test_events_of_the_manager_are_kept_if_the_store_cannot_list_its_keys():
    store = MemoryStore()
    store.knows_keys = False
    user = a_user(store)
    user.run(*prompts(LONG))
    user.settle()
    events = user.events + user.tier.drain_events()
    assert {each.medium for each in events} == {"gpu"}
    assert len(user.store.values) == 7
    user.end()


def test_host_tier_selects_the_blocks_written_to_the_store():
    user = a_user(num_blocks=9, num_host_blocks=30, host_write="back")
    user.run(*prompts(LONG[:9]))
    user.settle()
    assert not user.store.values
    user.run(*prompts(*([i] * 24 for i in range(100, 103))))
    user.settle()
    assert len(user.store.values) == user.manager.cache.stats.host.written_blocks > 0
    user.end()


# Invalid behavior of a store ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "counter"),
    [
        ("missing", "missing_blocks"),
        ("corrupt", "corrupt_blocks"),
        ("short", "misfit_blocks"),
        ("other", "misfit_blocks"),
        ("raises", "errors"),
        ("slow", "timeouts"),
    ],
)
def test_invalid_result_is_counted_as_a_miss(wrong, counter):
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    store.fault = lambda: wrong
    store.capacity = 1 << 30
    store.slow_s = 60
    other = a_user(store, timeout_s=0.05 if wrong == "slow" else 30.0)
    begun = time.monotonic()
    other.run(*prompts(LONG))
    assert time.monotonic() - begun < 15  # the engine does not wait for calls to the store
    assert other.num_loaded < 28 and other.num_finished == 1
    assert getattr(other.tier.stats, counter) > 0
    store.fault = lambda: None
    store.goes_on.set()
    other.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer", [5, None, [], [True], [-1], ["x"] * 7, [None] * 7, [1 << 70] * 7, [9] * 8]
)
@pytest.mark.parametrize("method", ["exists", "get", "put", "take_evicted"])
def test_result_of_an_unexpected_type_is_a_failure(method, answer):
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    if method == "put":
        store.values.clear()
    other = a_user(store)
    setattr(store, method, lambda *_: answer)
    other.run(*prompts(LONG))
    other.settle()
    # Seven truthy values.
    is_right = method == "exists" and answer in (["x"] * 7, [1 << 70] * 7)
    is_right |= method == "take_evicted" and answer in ([], ["x"] * 7)
    assert other.num_loaded == (28 if is_right else 0)
    assert other.num_finished == 1 and not other.tier._saves
    delattr(store, method)
    other.end()


def test_too_few_sizes_are_an_error():
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    other = a_user(store)
    get = store.get
    store.get = lambda keys, values: get(keys, values)[:1]
    other.run(*prompts(LONG))
    assert other.num_loaded == 0 and other.tier.stats.errors > 0
    other.end()


@pytest.mark.parametrize("keys", [None, 5, [5], ["0-zz"], ["0-"], ["0-00"], ["9-" + "00" * 32]])
def test_invalid_keys_are_ignored(keys):
    store = MemoryStore()
    user = a_user(store)
    prefix = key_text(user.tier._ranks[0]._fingerprint, BlockKey(0, b""))[:-2]
    user.end()
    if isinstance(keys, list) and keys != [5]:
        keys = [prefix + key for key in keys]
    store.keys = lambda: keys
    store.take_evicted = lambda: keys
    other = a_user(store, circuit=patient())
    other.run(*prompts(LONG))
    assert other.num_finished == 1 and not told(other)
    del store.keys, store.take_evicted
    other.settle()
    other.end()


def test_corrupt_value_is_removed():
    store = MemoryStore()
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    key = next(iter(store.values))
    store.values[key][-1] ^= 1
    other = a_user(store)
    other.run(*prompts(LONG))
    other.settle()
    assert other.num_loaded == 0 and other.tier.stats.corrupt_blocks == 1
    third = a_user(store)  # the block was stored again
    third.run(*prompts(LONG))
    assert third.num_loaded == 28
    other.end()
    third.end()


def test_full_store_rejects_further_values():
    store = MemoryStore(fault=lambda: "full")
    user = a_user(store)
    user.run(*prompts(LONG))
    user.settle()
    assert not store.values and user.tier.stats.refused_blocks == 7
    user.end()


def test_dead_store_is_probed_periodically():
    now = [0.0]
    store = MemoryStore(fault=lambda: "raises")
    user = a_user(store, circuit=Circuit(num_failures=2, retry_s=0.3, clock=lambda: now[0]))
    for i, item in enumerate(prompts(*([i] * 9 for i in range(40)))):
        user.run(item)
        now[0] += 0.05
        if i == 5:
            assert user.tier.is_dead
    asked = user.tier.stats.errors
    assert 2 < asked < 20 and user.tier.stats.unasked > 10
    store.fault = lambda: None
    now[0] += 30
    user.run(*prompts(*([200] * 9 for _ in range(41)))[-1:])
    user.settle()
    assert not user.tier.is_dead and store.values
    user.end()


def test_hanging_call_does_not_block_other_requests():
    is_over = threading.Event()

    class Stuck(MemoryStore):
        def exists(self, keys):
            is_over.wait(60)
            return super().exists(keys)

    store = Stuck()
    user = a_user(store, timeout_s=0.05)
    begun = time.monotonic()
    for item in prompts(*([i] * 9 for i in range(10))):
        user.run(item)
    assert time.monotonic() - begun < 15
    assert not user.tier.close(0.1)
    is_over.set()
    assert user.tier.close(60) and store.is_closed


def test_cancelled_load_releases_everything():
    store = MemoryStore(slow_s=0.2)
    one = a_user(store)
    one.run(*prompts(LONG))
    one.settle()
    one.end()
    other = a_user(store)
    other.add(prompts(LONG)[0])
    while not other.receiving:
        other.step()
        if other.tier.stats.lookups:
            store.fault = lambda: "slow"
    other.cancel(next(iter(other.receiving.values())))
    # Reallocates the pages that the load would have filled.
    other.run(*prompts([7] * 30, [8] * 30)[1:])
    store.fault = lambda: None
    other.end()


# Random schedules ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(30), 5))
def test_content_is_correct_for_any_store_behavior(seed):
    """Every token that is read is compared to the expected token, and the events must match the
    store's final contents.
    """
    choose = random.Random(seed)
    groups, hash_block_size = MIXES[[*MIXES][seed % len(MIXES)]]
    faults = choose.sample(FAULTS, choose.randint(0, 4))
    rate = choose.choice([0.0, 0.1, 0.4])

    def fault_now():
        return choose.choice(faults) if faults and choose.random() < rate else None

    store = MemoryStore(choose.choice([10, 60, 1000]), fault_now, slow_s=0.02)
    options = {}
    if choose.random() < 0.5:
        options = {
            "num_host_blocks": choose.randint(5, 60) * len(groups),
            "host_write": choose.choice(["back", "through"]),
            "write_from": choose.choice(["host", "device"]),
        }
    user = a_user(
        store, groups, num_blocks=choose.randint(20, 40) * len(groups), circuit=patient(),
        hash_block_size=hash_block_size, staging_blocks=choose.randint(2, 12),
        timeout_s=choose.choice([0.01, 5.0]), **options,
    )  # fmt: skip
    families = [[choose.randrange(1000) for _ in range(60)] for _ in range(4)]
    for number in range(40):
        head = choose.choice(families)[: choose.randint(1, 50)]
        tail = [choose.randrange(1000) for _ in range(choose.randint(1, 8))]
        item = prompts(*[[0]] * number, [*head, *tail])[-1]
        user.add(item)
        for _ in range(choose.randint(1, 6)):
            user.step(chunk=choose.choice([8, 16, 64]))
            check_invariants(user.manager)
            for each in [*user.running.values()]:
                if not each.num_left and choose.random() < 0.7:
                    user.finish(each)
            if user.receiving and choose.random() < 0.1:
                user.cancel(choose.choice([*user.receiving.values()]))
            if choose.random() < 0.05 and user.running:
                request = choose.choice([*user.running.values()]).request
                blocks = user.manager.block_ids(request)
                user.restart(user.tier.invalidate(blocks[blocks > 0][-2:]))
            if choose.random() < 0.03:
                user.manager.cache.reset()
            if choose.random() < 0.02:
                user.new_weights(choose.choice([None, "a", "b"]))
            if choose.random() < 0.3:
                time.sleep(0.002)
    user.run()
    store.fault = lambda: None
    time.sleep(0.03)
    user.settle()
    if seed % 3 == 0:
        user.add(prompts(*[[0]] * 99, families[1][:30])[-1])
        user.step()
        user.new_weights("newer")  # invalidate while loads and puts are in flight
        user.run(*prompts(*[[0]] * 100, families[0][:40])[-1:])
        user.settle()
    user.end()
    assert told(user) == {
        key for text in store.values if (key := key_of_text(user.tier._ranks[0]._fingerprint, text))
    }


@pytest.mark.parametrize("seed", sampled(range(100), 3))
def test_content_is_correct_while_engines_with_a_common_store_change_their_weights(seed):
    choose = random.Random(seed)
    groups, hash_block_size = MIXES[[*MIXES][seed % len(MIXES)]]
    store = MemoryStore(choose.choice([60, 1000]))
    users = [
        a_user(store, groups, num_blocks=30 * len(groups), hash_block_size=hash_block_size,
               announce=False)
        for _ in range(3)
    ]  # fmt: skip
    families = [[choose.randrange(1000) for _ in range(60)] for _ in range(2)]
    for number in range(60):
        user = choose.choice(users)
        head = choose.choice(families)[: choose.randint(1, 50)]
        user.add(prompts(*[[0]] * number, [*head, choose.randrange(1000)])[-1])
        for _ in range(choose.randint(1, 6)):
            choose.choice(users).step(chunk=choose.choice([8, 16, 64]))
            for each in users:
                for running in [*each.running.values()]:
                    if not running.num_left:
                        each.finish(running)
        if choose.random() < 0.1:
            version = choose.choice([None, "a", "b"])
            for each in users if choose.random() < 0.5 else [user]:
                each.new_weights(version)
    for user in users:
        user.run()
        user.settle()
    for user in users:
        user.end()


def told(user):
    """Return the store's contents, according to the events with medium "storage"."""
    has = set()
    for event in user.events:
        if event.medium != "storage":
            continue
        keys = {BlockKey(event.group, each.tobytes()) for each in event.block_hashes}
        has = has - keys if type(event).__name__ == "BlockRemoved" else has | keys
    return has


def test_routers_receive_events_of_the_store():
    """Events include parents and tokens even for blocks that have already been evicted from the
    device.

    A reset does not clear the store.
    """
    pytest.importorskip("msgspec")
    from kvcache_exchange.router_events import CacheView
    from kvcache_exchange.router_events.translator import EventTranslator
    from kvcache_exchange.router_events.wire import WireBatch, decode_batch, encode_batch

    store = MemoryStore(30)
    user = a_user(store, groups=[FULL, WINDOW], num_blocks=30)
    for item in prompts(LONG, [*range(14), *range(50, 60)], [*range(80, 110)]):
        user.run(item)
        user.settle()
    user.manager.cache.reset()
    user.settle()
    translator, view = EventTranslator(user.manager.options.hash_seed), CacheView()
    batch = WireBatch(0.0, translator.translate(user.events), 0)
    view.apply(decode_batch(encode_batch(batch)).events)
    expected = {}
    for text in store.values:
        key = key_of_text(user.tier._ranks[0]._fingerprint, text)
        expected.setdefault(key.group, set()).add(int.from_bytes(key.block_hash[-8:], "big"))
    assert set(view.places) == {("STORAGE", group) for group in expected}
    for group, hashes in expected.items():
        assert view.hashes("STORAGE", group) == hashes
        for each in hashes:
            block = view.block(each, "STORAGE", group)
            assert len(block.token_ids) == 4
    late = CacheView()
    late.apply(translator.snapshot())
    assert late.hashes("STORAGE") == view.hashes("STORAGE")
    user.end()


# Components ---------------------------------------------------------------------------------------------


def test_value_describes_its_content():
    values = np.zeros((3, 128 + 500), np.uint8)
    values[:, 128:] = np.arange(500) % 256
    keys = [BlockKey(0, b"a" * 32), BlockKey(1, b"b" * 16)]
    seal(values, [0, 2], bytes(16), keys)
    size = values.shape[1]
    assert faults(values, [0, 2], [size, size], bytes(16), keys) == [None, None]
    assert faults(values, [0, 2], [-1, size - 1], bytes(16), keys) == ["missing", "misfit"]
    assert faults(values, [2, 0], [size, size], bytes(16), keys) == ["misfit", "misfit"]
    assert faults(values, [0, 2], [size, size], b"1" * 16, keys) == ["misfit", "misfit"]
    for at in (0, 20, 100, 128, size - 1):
        values[0, at] ^= 1
        assert faults(values, [0, 2], [size, size], bytes(16), keys) == ["corrupt", None]
        values[0, at] ^= 1
    for key in keys:
        assert key_of_text(bytes(16), key_text(bytes(16), key)) == key
        assert key_of_text(b"1" * 16, key_text(bytes(16), key)) is None
    for wrong in (
        "x-00",
        "0-zz",
        "0-0",
        "0-0 0",
        "00-00",
        "0",
        "",
        "-1-00",
        "0-AA",
        "9" * 5000 + "-00",
    ):
        assert key_of_text(bytes(16), "kvcache-" + "0" * 32 + "-" + wrong) is None
    with pytest.raises(ValueError, match="zip"):
        faults(values, [0, 2], [size], bytes(16), keys)


def test_digests_equal_xxh3():
    from kvcache.native.load import core

    rows = np.random.default_rng(0).integers(0, 256, (5, 300), np.uint8)[:, :290]
    digests = core.xxh3_128_rows(rows, np.array([3, 1]), 7, 290)
    assert digests.shape == (2, 16)
    assert bytes(digests[0]) == core.xxh3_128(rows[3, 7:290].tobytes())
    assert bytes(digests[1]) == core.xxh3_128(rows[1, 7:290].tobytes())
    for wrong in ((rows, [5], 0, 9), (rows, [-1], 0, 9), (rows, [0], 9, 291), (rows, [0], 9, 8),
                  (rows[:, ::2], [0], 0, 9), (rows[0], [0], 0, 9)):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            core.xxh3_128_rows(wrong[0], np.array(wrong[1]), *wrong[2:])


def test_circuit_breaker_allows_one_trial_call_with_increasing_delay():
    now = [0.0]
    circuit = Circuit(2, 1.0, 3.0, lambda: now[0])
    circuit.failed()
    assert circuit.allows() and not circuit.is_open
    for wait in (1.0, 2.0, 3.0, 3.0):
        circuit.failed()
        assert circuit.is_open and not circuit.allows()
        now[0] += wait - 0.01
        assert not circuit.allows()
        now[0] += 0.02
        assert circuit.allows() and not circuit.allows()
    circuit.worked()
    assert circuit.allows() and not circuit.is_open


def test_fingerprint_covers_everything_that_must_be_equal():
    def of(model="m", rank="", sizes=((512, 512),), groups=(FULL,), **options):
        manager = KVCacheManager.for_groups([*groups], 9, 64, **options)
        pages = Pages.allocate(9, sizes)
        return fingerprint(manager, pages, model=model, rank=rank, contents="k, v")

    assert of() == of(num_host_blocks=5, eviction="learned")
    different = [
        of(), of(model="n"), of(rank="1"), of(sizes=((512, 256),)), of(sizes=((1024,),)),
        of(groups=(FULL, WINDOW)), of(groups=(WINDOW,)), of(groups=(GroupSpec("full_attention", 8),)),
        of(hash_seed="s"), of(hash_algorithm="xxh3_128_cbor"), of(hash_block_size=2),
        of(hash_algorithm="engine:x", hash_bytes=32),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [FULL, GroupSpec("cross_attention", 4)],
            "group 1 has kind 'cross_attention': expected transferred=False",
        ),
        ([FULL, GroupSpec("full_attention", 4, cached=False)], "group 1 has cached=False and"),
        ([FULL, GroupSpec("full_attention", 4, transferred=False)], "group 1 has cached=True and"),
        (
            [FULL, GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False)],
            "group 1 has kind 'circular_window'",
        ),
    ],
)
def test_groups_that_a_store_cannot_fill_are_rejected_by_name(groups, message):
    manager = KVCacheManager.for_groups(groups, 30, 64, enable_events=True)
    with pytest.raises(ValueError, match=message):
        StoredPrefixes(manager)


@pytest.mark.parametrize(("num_tokens", "longest"), [(8, 4), (9, 4), (10, 8)])
def test_only_blocks_with_known_hashes_are_loaded(num_tokens, longest):
    options = {"hash_algorithm": "engine:x", "num_hash_lookahead_tokens": 2}
    prefixes = StoredPrefixes(KVCacheManager(4, 30, 64, **options))
    hashes = [bytes([i]) * 32 for i in range((num_tokens - 2) // 4)]
    request = Request("a", range(num_tokens), block_hashes=hashes)
    assert prefixes.longest(request) == longest
    assert len(prefixes.candidates(request, 0)) == longest // 4


@pytest.mark.parametrize(
    ("manager", "options", "error", "message"),
    [
        ({"enable_events": False}, {}, ValueError, "manager has enable_events=False: expected True"),
        ({"enable_caching": False}, {}, ValueError, "the manager caches no blocks"),
        ({}, {"model": 3}, TypeError, "model is 3: expected"),
        ({}, {"write_from": "disk"}, ValueError, "write_from is 'disk': expected 'auto', 'device'"),
        ({}, {"write_from": "host"}, ValueError, "expected a manager with num_host_blocks, and host_"),
        ({"num_host_blocks": 9}, {}, ValueError, "expected a manager with num_host_blocks, and host_"),
        ({}, {"timeout_s": 0}, ValueError, "timeout_s is 0: expected seconds, more than 0"),
        ({}, {"staging_bytes": -1}, ValueError, "staging_bytes is -1: expected 0 to"),
        ({}, {"pages": Pages.allocate(5, [[8]])}, ValueError, "pages has 5 pages: expected 9"),
        ({}, {"store": "disk"}, TypeError, "store is 'disk': expected"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_rejected_by_name(manager, options, error, message):
    manager = KVCacheManager(4, 9, 64, **{"enable_events": True, **manager})
    given = {"pages": Pages.allocate(9, [[64]]), "store": MemoryStore(), "model": "m"}
    given |= {"contents": "bytes", **options}
    before = threading.active_count()
    with pytest.raises(error, match=message):
        StoreTier(manager, **given)
    assert threading.active_count() == before


def test_load_is_rejected_for_a_request_that_is_not_receiving():
    user = a_user()
    request = Request("a", range(20))
    user.manager.step(new=[request])
    with pytest.raises(ValueError, match="'a' has no load to begin: call match"):
        user.tier.begin(request)
    user.tier.cancel(request)
    user.end()


def test_puts_are_not_issued_while_a_later_step_is_planned():
    user = a_user()
    first = user.manager.step(new=[Request("a", range(20))])
    second = user.manager.step([0], [1])
    for plan, num_put in ((first, 0), (second, 5)):
        report = StepReport(plan.step_id, completed=True)
        user.manager.report(report)
        user.tier.save(report)
        deadline = time.monotonic() + 20
        while len(user.store.values) < num_put and time.monotonic() < deadline:
            user.tier.save(report)
            time.sleep(0.001)
        assert len(user.store.values) == num_put
    user.manager.free(Request("a", [1]))


# Streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(20), 3))
def test_copies_are_ordered_on_late_streams(seed):
    """The test uses few pages and a simulated device that runs streams in any order that events
    permit.
    """
    choose, streams = random.Random(seed), SimulatedStreams(seed)
    manager = KVCacheManager(4, 16, 64, num_preallocate_tokens=0, enable_events=True)
    pages, store = Pages.allocate(16, [[64, 64]] * 2), MemoryStore()
    given = {"model": "m", "contents": "bytes", "staging_bytes": 6 * 512, "timeout_s": 20}
    tier = StoreTier(manager, pages, store, **given)
    (rank,) = tier._ranks
    rank._swaps = SwapEngine(pages, rank._staging.pages, method="kernel", streams=streams)
    wrong, num_checked = [], 0

    def content(tokens):
        return zlib.crc32(repr(tokens).encode()) % 251

    def compute(blocks, tokens, num_loaded):
        """Read the loaded blocks and write all other blocks on the stream."""
        for i, block in enumerate(blocks):
            expected = content(tokens[: 4 * (i + 1)])
            for region in range(4):
                fragment = pages.fragment(region)[block]
                if 4 * i >= num_loaded:
                    fragment.fill_(expected)
                elif (fragment != expected).any():
                    wrong.append((i, block))

    def wait_for(answer):
        deadline = time.monotonic() + 20
        while (found := answer()) in (None, []):
            assert time.monotonic() < deadline
            streams.advance(choose.randint(0, 3))
            time.sleep(0)
        return found

    families = [[choose.randrange(99) for _ in range(40)] for _ in range(3)]
    for number in range(60):
        tokens = [*choose.choice(families)[: choose.randint(8, 40)], 100 + number]
        request = Request(f"r{number}", tokens)
        external = wait_for(lambda r=request: tier.match(r))
        plan = manager.step(
            new=[
                Admit(
                    request,
                    num_tokens=0 if external else len(tokens),
                    external=External(external, delayed=external > 0),
                )
            ]
        )
        start = int(plan.num_computed_tokens[0])
        if external:
            tier.begin(request)
            (received,) = wait_for(tier.poll)
            start = received.num_computed_tokens
            plan = manager.step([manager.row(request)], [len(tokens) - start])
        num_checked += external
        blocks = manager.block_ids(request).tolist()
        streams.launch(streams.current(), lambda b=blocks, t=tokens, n=start: compute(b, t, n))
        report = StepReport(plan.step_id, completed=True)
        manager.report(report)
        tier.save(report)
        manager.free(request)
        if choose.random() < 0.3:
            manager.cache.reset()
        streams.advance(choose.randint(0, 3))
    while tier._num_writing or rank._arriving:
        streams.advance(1)
        tier.poll()
        time.sleep(0)
    streams.advance()
    assert tier.close(20) and not wrong and num_checked > 100
    assert rank._staging.num_free == rank._staging.num_values
