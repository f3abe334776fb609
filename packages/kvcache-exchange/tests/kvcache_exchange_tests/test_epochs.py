# SPDX-License-Identifier: Apache-2.0
"""New weights while engines exchange KV: KV of earlier weights is neither offered nor used."""

import json

import pytest

from kvcache import Request
from kvcache_exchange_tests.test_disaggregation import (
    admitted,
    asked,
    begun,
    computed,
    lone,
    offered,
)

TOKENS = list(range(70))
CHANGED = "the weights have changed"


def offer_of(sender, name="r"):
    return offered(sender[0], computed(sender[1], name))


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
