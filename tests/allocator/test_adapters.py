# SPDX-License-Identifier: Apache-2.0
"""Tests of LoRA adapters whose weights change: versions in hashes, and `forget_adapter`.

The simulator (`tests/simulator`) checks that no request reads KV of forgotten weights.
"""

import numpy as np
import pytest

from kvcache import Admit, KVCacheManager, Request, hash_blocks
from kvcache.allocator import check_invariants
from kvcache.events import BlockRemoved, BlockStored
from kvcache_exchange.disaggregation.offer import digest_of
from kvcache_exchange.router_events.translator import EventTranslator

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


@pytest.mark.parametrize(("lora", "error", "message"), [
    ("alpha", TypeError, r"'alpha': expected \(name, path\) or \(name, path, version\)"),
    (("alpha",), ValueError, r"lora is \('alpha',\): expected \(name, path\) or"),
    ((*ALPHA, "2", "3"), ValueError, r"lora is .*: expected \(name, path\) or"),
    ((*ALPHA, 2), TypeError, r"lora\[2\]"),
    ((*ALPHA, "\ud800"), ValueError, r"lora\[2\]"),
])  # fmt: skip
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


@pytest.mark.parametrize(("options", "name", "error", "message"), [
    ({}, None, TypeError, "name"),
    ({}, ALPHA, TypeError, "name"),
    ({}, "\ud800", ValueError, "name"),
    ({"hash_algorithm": "engine:x"}, "alpha", ValueError, "hash_algorithm 'engine:x': expected"),
])  # fmt: skip
def test_forget_adapter_rejects_wrong_names_and_hashes_of_the_engine(options, name, error, message):
    manager = manager_of(**options)
    with pytest.raises(error, match=message):
        manager.cache.forget_adapter(name)
    if not options:
        request = Request("r", TOKENS, lora=ALPHA)
        expected = hash_blocks(TOKENS, 16, extra_keys=[[("lora", *ALPHA)]] * 4)
        assert (manager.cache.hashes(request) == expected).all()
