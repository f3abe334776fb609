# SPDX-License-Identifier: Apache-2.0
"""New weights while engines exchange KV: KV of earlier weights is neither offered nor used."""

import json
import time

import pytest

from kvcache import Request
from kvcache_exchange.disaggregation.steps import Results
from kvcache_exchange_tests.test_disaggregation import (
    admitted,
    asked,
    begun,
    computed,
    lone,
    offered,
)
from tests.machinery.disaggregation_engine import Engine

TOKENS = list(range(70))
CHANGED = "the weights have changed"


def offer_of(sender, name="r"):
    return offered(sender[0], computed(sender[1], name))


@pytest.mark.parametrize("version", [None, "step 1", 1])
def test_offer_made_before_a_new_epoch_is_refused_after_it(version):
    sender, receiver = lone("p"), lone("d")
    offer = offer_of(sender)
    receiver[1].cache.start_epoch(version)
    sender[1].cache.start_epoch(version)
    message = r"^version of the weights is '.+' here, but '' in engine 'p'"
    with pytest.raises(ValueError, match=message):
        receiver[0].match(asked(), offer)
    assert receiver[0].stats.refused_requests == 1


def test_offers_are_accepted_again_once_both_engines_name_the_same_weights():
    sender, receiver = lone("p"), lone("d")
    for version in ("step 1", "step 2"):
        sender[1].cache.start_epoch(version)
        offer = offer_of(sender, version)
        message = f"version of the weights is '.*' here, but '{version}' in engine 'p'"
        with pytest.raises(ValueError, match=message):
            receiver[0].check_peer(json.loads(json.dumps(sender[0].describe())))
        with pytest.raises(ValueError, match=message):
            receiver[0].match(asked(version), offer)
        receiver[1].cache.start_epoch(version)
        receiver[0].check_peer(sender[0].describe())
        assert receiver[0].match(asked(version), offer) == 70


def test_unnamed_weights_are_known_to_one_engine_alone():
    one, other = lone("p"), lone("d")
    for _, manager, _ in (one, other):
        manager.cache.start_epoch()
    assert one[1].cache.model_version != other[1].cache.model_version
    with pytest.raises(ValueError, match="version of the weights is 'unnamed "):
        other[0].match(asked(), offer_of(one))


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        (7, ValueError, "is 7: expected another name than that of the current weights, '7'"),
        ("7", ValueError, "is '7': expected another name"),
        ("", ValueError, "is '': expected another name"),
        (True, TypeError, "is True: expected a string"),
        (1.5, TypeError, "is 1.5: expected a string"),
        ("\ud800", ValueError, "is .*: expected text that UTF-8 can hold"),
    ],
)
def test_versions_are_validated_before_the_epoch_starts(version, error, message):
    manager = lone("p")[1]
    manager.cache.start_epoch(7)
    computed(manager)
    with pytest.raises(error, match=f"model_version {message}"):
        manager.cache.start_epoch(version)
    assert (manager.cache.epoch, manager.cache.model_version) == (1, "7")
    assert manager.cache.find_prefix(Request("b", TOKENS)).num_tokens == 64


def test_new_epoch_ends_all_leases():
    connector, manager, (rank,) = lone("p")
    for name in "ab":
        offer_of((connector, manager), name)
    manager.cache.start_epoch("step 1")
    assert connector.poll() == []
    assert rank.steps[-1].ends == {"a", "b"}
    rank.results = Results(sent={"a", "b"})
    connector.poll()
    assert connector.num_leased_requests == manager.pool.num_kept == 0
    assert manager.pool.num_free == manager.pool.num_total


@pytest.mark.parametrize("how", ["publish", "fork"])
def test_request_that_runs_across_an_epoch_is_not_offered(how):
    connector, manager, (rank,) = lone("p")
    request = computed(manager)
    assert not manager.cache.is_stale(request)
    manager.cache.start_epoch("step 1")
    assert manager.cache.is_stale(request)
    if how == "fork":
        child = Request("child", TOKENS)
        manager.fork(request, child)
        assert connector.publish(child) is None
        manager.free(request)
    else:
        assert connector.publish(request) is None
    assert rank.steps == [] and manager.pool.num_free == manager.pool.num_total
    again = computed(manager)
    assert not manager.cache.is_stale(again) and connector.publish(again) is not None


def test_request_that_was_freed_and_admitted_again_is_offered():
    connector, manager, _ = lone("p")
    request = computed(manager)
    manager.cache.start_epoch("step 1")
    manager.free(request)
    assert connector.publish_cached(Request("x", [*TOKENS, 0])) is None  # of earlier weights
    manager.step(new=[request])
    offer = connector.publish(request)
    assert offer["identity"]["version"] == "step 1" and offer["num_tokens"] == 70


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_load_in_flight_at_a_new_epoch_is_canceled_and_quarantined(num_ranks):
    receiver, manager, ranks = lone("d", num_ranks)
    begun(receiver, manager)
    manager.cache.start_epoch("step 1")
    (arrived,) = receiver.poll()
    assert (arrived.num_computed_tokens, arrived.num_loaded_tokens) == (None, 0)
    assert arrived.error == CHANGED and all(rank.steps[-1].cancels == {"r"} for rank in ranks)
    assert receiver.num_quarantined_blocks == manager.pool.num_kept > 0
    for rank in ranks:
        rank.results.released.add("r")
    assert receiver.poll() == [] and manager.pool.num_free == manager.pool.num_total


def test_load_that_arrived_with_the_new_epoch_loads_no_tokens():
    receiver, manager, (rank,) = lone("d")
    request = begun(receiver, manager)
    rank.results.received.add("r")
    manager.cache.start_epoch("step 1")
    (arrived,) = receiver.poll()
    assert (arrived.num_computed_tokens, arrived.error) == (0, CHANGED)
    manager.step([manager.row(request)], [71])
    manager.free(request)
    assert manager.cache.find_prefix(asked("x")).num_tokens == 64  # of the present weights


@pytest.mark.parametrize("is_admitted", [False, True])
def test_match_of_earlier_weights_is_not_loaded_and_its_sender_is_notified(is_admitted):
    receiver, manager, (rank,) = lone("d")
    request, offer = asked(), offer_of(lone("p"))
    if is_admitted:
        request = admitted(receiver, manager, offer=offer)
    else:
        assert receiver.match(request, offer) == 70
    manager.cache.start_epoch()
    if is_admitted:
        with pytest.raises(ValueError, match=r"'r' has no load to begin: .*without a new epoch"):
            receiver.begin(request)
    else:
        assert receiver.match(request) == 0
    assert [len(step.unread) for step in rank.steps] == [1]
    receiver.cancel(request)
    assert manager.pool.num_free == manager.pool.num_total


def test_lookahead_tokens_on_which_kv_depends_must_be_equal():
    options = {"hash_algorithm": "engine:x", "num_hash_lookahead_tokens": 1, "hash_bytes": 16}
    connector, manager, _ = lone("p", **options)
    hashes = [bytes([i] * 16) for i in range(4)]
    offer = offered(connector, computed(manager, block_hashes=hashes))
    # The KV of the last token depends on a token that is not known.
    assert offer["num_tokens"] == 69
    receiver = lone("d", **options)[0]
    assert receiver.match(Request("a", [*TOKENS, 1], block_hashes=hashes), offer) == 69
    with pytest.raises(ValueError, match="the offer is for other tokens"):
        receiver.match(Request("b", [*TOKENS[:69], 3, 1], block_hashes=hashes), offer)
    with pytest.raises(ValueError, match="the request has 69 tokens, but the offer has 70"):
        receiver.match(Request("c", TOKENS[:69], block_hashes=hashes), offer)


@pytest.mark.slow
@pytest.mark.parametrize("has_arrived", [False, True])
def test_load_over_a_transport_ends_without_tokens_at_a_new_epoch(has_arrived):
    with Engine("p") as sender, Engine("d") as receiver:
        request = Request("r", range(200))
        sender.prefill(request)
        offer = offered(sender.connector, request)
        again = Request("r", [*range(200), 7])
        assert receiver.admit(again, offer)
        if has_arrived:
            until = time.monotonic() + 30
            while not (rank := receiver.ranks[0])._results.received:
                assert rank._thread.is_alive() and time.monotonic() < until
                time.sleep(0.001)
        receiver.manager.cache.start_epoch("step 1")
        sender.manager.cache.start_epoch("step 1")
        loaded = receiver.loaded(again)
        assert (loaded.num_loaded_tokens, loaded.error) == (0, CHANGED)
        receiver.recompute(again, loaded)
        assert receiver.wrong(again, again.num_tokens) is None
        receiver.manager.free(again)
        assert sender.drained() and receiver.drained()
