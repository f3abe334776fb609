# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two engines: correct bytes, rejections, faults, and the absence of leaks."""

import base64
import importlib.util
import itertools
import json
import math
import random
import re
import signal
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request
from kvcache.sources import Arrived, LoadStats
from kvcache.step import StepReport
from kvcache.transfer import CacheDescription
from kvcache_exchange.disaggregation import (
    Connector,
    ConnectorOptions,
    GroupLayout,
    Offer,
    RemotePrefill,
)
from kvcache_exchange.disaggregation import rank as rank_module
from kvcache_exchange.disaggregation.leases import Lease, Leases, done_message, is_lease_over
from kvcache_exchange.disaggregation.offer import RankAddress, digest_of, sealed
from kvcache_exchange.disaggregation.options import secret_from_environment
from kvcache_exchange.disaggregation.steps import RankHandshake, Results
from kvcache_exchange.transport import make_transport
from tests.machinery.disaggregation_engine import Engine, EngineProcess
from tests.machinery.disaggregation_faults import Faults
from tests.machinery.shared import sampled, seed_of_test

FULL, HYBRID, STATES = ["full"], ["full", "window"], ["full", "window", "state"]
TRANSPORTS = [
    "tcp",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
        ),
    ),
]


def tokens_of(rng, count):
    return [rng.randrange(50_000) for _ in range(count)]


@pytest.fixture
def engines():
    """Create engines in this process, and close the engines after the test."""
    with ExitStack() as stack:

        def make(engine_id, **options):
            return stack.enter_context(Engine(engine_id, **options))

        yield make


def send(sender, name, tokens, **options):
    """Publish an offer for a computed request, and return the offer after a JSON round trip."""
    request = Request(name, tokens)
    assert sender.prefill(request) is not None
    return offered(sender.connector, request, **options)


def check_load(receiver, request, offer, end):
    """Load the KV of a request and check the received bytes.

    Afterwards, compute the remaining tokens and free the request.
    """
    assert receiver.admit(request, offer)
    loaded = receiver.loaded(request)
    assert (loaded.num_computed_tokens, loaded.error) == (end, None)
    assert receiver.wrong(request, end) is None
    receiver.recompute(request, loaded)
    assert receiver.wrong(request, request.num_tokens) is None
    receiver.manager.free(request)


SIDES = [
    {"tp": 1, "block": 16},
    {"tp": 2, "block": 32, "layout": "HND"},
    {"tp": 4, "block": 64, "layout": "HND", "backend": "TRITON_ATTN"},
    {"tp": 1, "pp": 2, "block": 48},
    {"tp": 2, "pp": 2, "block": 16, "layout": "HND"},
]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [FULL, HYBRID, STATES], ids=["full", "hybrid", "states"])
@pytest.mark.parametrize("pair", sampled([[(4, 2)], [(0, 1), (3, 1)], None]), ids=str)
def test_transfers_between_different_engines(pair, kinds, engines):
    pairs = pair or [(a, b) for a in range(len(SIDES)) for b in range(len(SIDES))]
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    for here, there in pairs:
        with (
            Engine(f"p{here}", kinds=kinds, **SIDES[here]) as sender,
            Engine(f"d{there}", kinds=kinds, **SIDES[there]) as receiver,
        ):
            shared = tokens_of(rng, rng.randint(1, 200))
            # The requests share a prefix, so the receiver has hits before the loaded tokens.
            for number in range(3):
                tokens = [*shared, *tokens_of(rng, rng.randint(1, 100))]
                offer = send(sender, f"r{number}", tokens)
                check_load(receiver, Request(f"r{number}", [*tokens, 7]), offer, len(tokens))
            assert sender.drained() and receiver.drained()


def test_block_that_the_sender_holds_partially_is_never_a_hit(engines):
    """The sender's window covers the last 48 tokens, in blocks of 16.

    The receiver's blocks have 64 tokens, so the first block that it receives is only partially
    filled.
    """
    sender, receiver = engines("p", kinds=HYBRID), engines("d", block=64, kinds=HYBRID)
    tokens = list(range(150))
    request = Request("a", tokens)
    sender.prefill(request)
    sender.manager.step([sender.manager.row(request)], [0])
    offer = offered(sender.connector, request)
    window = sender.kinds.index("window")
    assert offer["blocks"][window][:6] == [0] * 6 and all(offer["blocks"][window][6:])
    check_load(receiver, Request("a", [*tokens, 7]), offer, 150)
    # Tokens 64 to 95 are missing, but after a hit of 128 tokens, the window would cover tokens 81
    # and later.
    assert receiver.manager.cache.find_prefix(Request("b", tokens[:140])).num_tokens == 0
    assert sender.drained() and receiver.drained()


def layout(**changes):
    sizes = {"num_layers": 2, "total_num_kv_heads": 2, "head_size": 8, "block_size": 16}
    order = ("block", "kv", "token", "head", "element")
    description = CacheDescription(engine_id="p", **{**sizes, "memory_order": order, **changes})
    return GroupLayout(("a", "b"), description, 1, 50)


class NoRank:
    """A simulated rank that records its steps and returns the results that the test sets."""

    def __init__(self, layouts):
        self.handshake = RankHandshake(layouts, RankAddress("tcp", "bQ==", ((4096, 8192),), 64))
        self.steps, self.results = [], Results()

    def begin(self, step):
        self.steps.append(step)

    def take_results(self):
        found, self.results = self.results, Results()
        return found


def lone(
    engine_id="d", num_ranks=1, num_blocks=50, model=None, clock=None, block_size=16, **manager
):
    """Return (connector, manager, ranks) without a transport."""
    manager = KVCacheManager(block_size, num_blocks, 1024, num_preallocate_tokens=0, **manager)
    layouts = (layout(tp_size=num_ranks, block_size=block_size),)
    ranks = [NoRank(layouts) for _ in range(num_ranks)]
    connector = Connector(manager, ranks, engine_id=engine_id, model=model, clock=clock)
    return connector, manager, ranks


def computed(manager, name="r", tokens=None, **options):
    request = Request(name, range(70) if tokens is None else tokens, **options)
    manager.step(new=[request])
    return request


def offered(connector, request, **options):
    """Publish an offer, and return it after a JSON round trip."""
    return json.loads(json.dumps(connector.publish(request, **options)))


def an_offer(**changes):
    sender, manager, _ = lone("p", model=changes.pop("model", None), **changes)
    return offered(sender, computed(manager))


def asked(name="r", **options):
    return Request(name, range(71), **options)


def admitted(receiver, manager, name="r", offer=None):
    request = asked(name)
    count = receiver.match(request, offer or an_offer())
    manager.step(new=[Admit(request, external=External(count, delayed=True))])
    return request


def begun(receiver, manager, name="r", offer=None):
    request = admitted(receiver, manager, name, offer)
    receiver.begin(request)
    return request


def test_offer_is_plain_json_with_everything_a_reader_needs():
    offer = an_offer()
    assert sorted(offer) == [
        *("blocks", "digest", "engine_id", "groups", "identity", "lease", "num_tokens"),
        *("ranks", "request_id", "seal", "version"),
    ]
    for name in offer:
        with pytest.raises(ValueError, match=name):
            Offer.from_dict({key: value for key, value in offer.items() if key != name})
    assert Offer.from_dict(offer).to_dict() == offer
    assert offer["blocks"] == [[1, 2, 3, 4, 5]] and offer["digest"] == digest_of(
        range(70), None, []
    )


CHANGES = [
    (("version",), 1, "version of the offer is 1: expected 6; install the same version of kvcache"),
    (("num_tokens",), 0, "num_tokens is 0: expected 1"),
    (("num_tokens",), 97, "5 blocks of 16 tokens: expected enough for 97 tokens"),
    (("blocks", 0, 1), 50, "a block is 50: expected 0 to 49"),
    (("blocks", 0, 1), 0, "the sender has freed blocks that are still"),
    (("blocks",), [], "this is not an offer"),
    (("groups", 0, "description", "version"), 9, "version is 9"),
    (("groups", 0, "description", "dtype"), "float16", "dtype is 'bfloat16'"),
    (("groups", 0, "description", "head_size"), 4, "head_size is 8"),
    (("groups", 0, "description", "num_layers"), 4, "regions: expected"),
    (("groups", 0, "layers"), ["a"], "serve the same model"),
    (
        ("groups", 0, "interior"),
        "amx",
        "arrange a block as 'by token', but the remote engine's kernels use 'amx'",
    ),
    (("ranks", 0, "addresses", 0), [1], r"addresses of \[1\] regions: expected \[2\]"),
    (("ranks", 0, "metadata"), 5, "metadata is 5: expected text"),
    (("ranks",), [], "there are 0 ranks: expected"),
    (("lease", "slot"), 1 << 20, "slot is 1048576"),
    (("lease", "generation"), 0, "generation is 0"),
    (("lease",), None, "this is not an offer"),
    (("identity", "hashing", "seed"), "another", "set hash_seed to the same in both"),
    (("identity", "hashing", "algorithm"), "another", "set hash_algorithm to the same in both"),
    (
        ("identity", "model", "name"),
        "another",
        "name of the model is None here, but 'another' in engine 'p'",
    ),
    (("identity", "groups"), [], "groups of the model is"),
    (
        ("identity", "version"),
        "2",
        "version of the weights is '' here, but '2' in engine 'p': .*call start_epoch with the same",
    ),
    (("identity", "lookahead"), 1, "set num_hash_lookahead_tokens to the same in both"),
    (("identity", "hashing", "bytes"), 16, "set hash_bytes to the same in both"),
    (("identity", "hashing"), 3, "hashing is 3: expected a Mapping"),
    (("identity", "part"), 3, "part is 3: expected a Mapping"),
    (("identity",), None, "this is not an offer"),
    (("digest",), "another", "the offer is for other tokens"),
]


def changed(offer, path, change):
    """Replace one value of an offer. The seal stays as it was."""
    at = offer
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = change(at[path[-1]]) if callable(change) else change
    return offer


@pytest.mark.parametrize(("path", "value", "message"), CHANGES)
def test_changed_offer_is_rejected_in_one_line_and_nothing_moves(path, value, message):
    receiver, manager, (rank,) = lone()
    offer = sealed(changed(an_offer(), path, value))
    with pytest.raises(ValueError, match=message) as raised:
        receiver.match(asked(), offer)
    assert "\n" not in str(raised.value)
    assert manager.pool.num_free == 49 and rank.steps == []


def leaves(values, path=()):
    """Return the paths of all scalar values in a nested structure."""
    if isinstance(values, dict | list) and values:
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_any_changed_value_of_an_offer_is_detected():
    """A changed value is detected even if the new value is a block, address or slot of another
    request.
    """

    def another(value):
        if type(value) is bool:
            return not value
        return value + 1 if type(value) in (int, float) else "" if value == "another" else "another"

    for path in [*leaves(an_offer())]:
        with pytest.raises(ValueError, match=r"offer"):
            lone()[0].match(asked(), changed(an_offer(), path, another))


@pytest.mark.parametrize("value", [[], {}, {"version": 5}])
def test_non_offers_are_rejected(value):
    receiver = lone()[0]
    with pytest.raises(ValueError, match=r"version of the offer|not an offer"):
        receiver.match(asked(), value)
    assert receiver.stats.refused_requests == 1


def test_sender_is_notified_if_nothing_is_loaded():
    receiver, manager, (rank,) = lone()
    assert receiver.match(asked(read_cache=False), an_offer()) == 0
    manager.free(computed(manager, "own", range(64)))
    sender, theirs, _ = lone("p")
    offer = offered(sender, computed(theirs, tokens=range(64)))
    assert receiver.match(Request("r", range(65)), offer) == 0
    assert [len(step.unread) for step in rank.steps] == [1, 1]


def test_match_without_an_offer_uses_the_last_offer():
    receiver, _, (rank,) = lone()
    request = asked()
    assert receiver.match(request) == 0
    assert receiver.match(request, an_offer()) == receiver.match(request) == 70
    assert receiver.match(asked()) == 0  # another request with the same ID
    receiver.cancel(request)
    assert receiver.match(request) == 0 and len(rank.steps[-1].unread) == 1


def test_loads_and_quarantined_blocks_are_counted():
    receiver, manager, (rank,) = lone()
    first = begun(receiver, manager, "a")
    rank.results = Results(received={"a"})
    assert receiver.poll() == [Arrived(first, 70, 70)]
    manager.free(first)
    manager.cache.reset()
    second = begun(receiver, manager, "b")
    held = len(manager.block_ids(second))
    rank.results = Results(failed={"b": "why"})
    assert receiver.poll() == [Arrived(second, None, 0, "why")]
    expected = LoadStats(2, 140, 70, failed_loads=1, failed_tokens=70, quarantined_loads=1)
    assert receiver.stats == expected
    assert receiver.num_quarantined_blocks == manager.pool.num_kept == held and receiver.is_busy
    rank.results = Results(released={"b"})
    assert receiver.poll() == [] and receiver.stats == expected
    assert receiver.num_quarantined_blocks == manager.pool.num_kept == 0 and not receiver.is_busy


def test_requests_with_inputs_that_a_server_does_not_receive_are_not_sent_to_it():
    source = RemotePrefill(lone()[0], "127.0.0.1:1")
    for options in ({"lora": ("a", "b")}, {"read_cache": False}, {"mm_items": [("i", 0, 3)]}):
        assert source.match(asked(**options)) == 0
    assert source.stats.asked_requests == 0


def test_each_value_of_the_model_is_compared_as_another_engine_receives_it():
    model = {"groups": 1, "sizes": (1, 2), 3: "x"}
    offer = an_offer(model=model)
    assert lone(model=model)[0].match(asked(), offer) == 70
    for name, other in (("groups", 2), ("sizes", [1]), (3, "y")):
        with pytest.raises(ValueError, match=f"{name} of the model is"):
            lone(model=model | {name: other})[0].match(asked(), offer)


@pytest.mark.parametrize("value", [object(), {1}, b"x", float("nan")])
def test_model_that_json_cannot_represent_is_rejected_before_an_offer(value):
    with pytest.raises((TypeError, ValueError), match=r"model is .*: expected JSON values"):
        lone(model={"name": value})


EMBEDS = np.ones((71, 4), np.float32)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ({}, {"tokens": range(60)}, "the request has 60 tokens, but the offer has 70"),
        ({}, {"tokens": [*range(69), 0, 1]}, "other tokens"),
        ({}, {"lora": ("a", "path")}, "another adapter"),
        ({}, {"cache_salt": "tenant"}, "other tokens"),
        ({}, {"mm_items": [("image", 3, 2)]}, "other tokens, images"),
        ({"prompt_embeds": EMBEDS}, {"prompt_embeds": 2 * EMBEDS}, "other tokens"),
        ({"prompt_embeds": EMBEDS}, {"prompt_embeds": EMBEDS.astype(np.float64)}, "other tokens"),
        ({"prompt_embeds": EMBEDS}, {}, "other tokens"),
        ({"lora": ("a", "/v1")}, {"lora": ("a", "/v2")}, "other tokens"),
        ({"mm_items": [("salt tenant", 0, 4)]}, {"cache_salt": "tenant"}, "other tokens"),
        ({"mm_items": [("image", 0, 4)]}, {"mm_items": [("image", 0, 60)]}, "other tokens"),
    ],
)
def test_digest_includes_everything_that_kv_depends_on(ours, theirs, message):
    sender, manager, _ = lone("p")
    offer = offered(sender, computed(manager, **ours))
    assert lone()[0].match(asked(**ours), offer) == 70
    tokens = theirs.pop("tokens", range(71))
    with pytest.raises(ValueError, match=message):
        lone()[0].match(Request("r", tokens, **theirs), offer)


def test_offer_with_states_requires_the_next_token(engines):
    sender, receiver = engines("p", kinds=STATES), engines("d", kinds=STATES)
    offer = send(sender, "r", range(40))
    with pytest.raises(ValueError, match="append the first token that the sender sampled"):
        receiver.connector.match(Request("r", range(40)), offer)


def test_engine_description_must_match_its_manager():
    manager = KVCacheManager(32, 50, 1024)
    with pytest.raises(ValueError, match=r"blocks of \[16\] tokens: expected \[32\]"):
        Connector(manager, [NoRank((layout(),))], engine_id="d")
    manager = KVCacheManager(16, 50, 1024)
    with pytest.raises(ValueError, match="there are 1 ranks: expected 2"):
        Connector(manager, [NoRank((layout(tp_size=2),))], engine_id="d")
    ring = GroupSpec("circular_window", 16, {"window": 16, "buffer": 49}, cached=False)
    manager = KVCacheManager.for_groups([ring], 50, 1024)
    with pytest.raises(ValueError, match=r"kind 'circular_window'.*transferred=False"):
        Connector(manager, [NoRank((layout(),))], engine_id="d")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease_s": 0}, "lease_s is 0.0: expected seconds above 0"),
        ({"timeout_s": "1"}, "timeout_s is '1': expected a number"),
        ({"port": 70_000}, "port is 70000"),
        ({"host": ""}, "host is ''"),
        ({"digest": 1}, "digest is 1: expected True or False"),
        ({"transport": 3}, "transport is 3: expected a name, or None"),
    ],
)
def test_invalid_option_is_rejected_by_name(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ConnectorOptions(**options)


def test_leased_blocks_are_reused_once_the_last_rank_has_ended_its_lease():
    sender, manager, ranks = lone("p", num_ranks=2, num_blocks=11)
    assert sender.publish(computed(manager)) is not None
    assert manager.pool.num_free == 5 and sender.num_leased_requests == 1
    assert manager.step(new=[Request("s", range(1000, 1096))]).status.tolist() == [1]
    for rank, free in zip(ranks, (5, 10)):
        rank.results.sent.add("r")
        assert sender.poll() == []
        assert manager.pool.num_free == free
    assert sender.num_leased_requests == 0


def test_no_offer_is_made_without_a_free_lease_slot_or_for_a_leased_name():
    sender, manager, _ = lone("p")
    assert sender.publish(computed(manager)) is not None
    assert sender.publish(computed(manager)) is None and sender.num_leased_requests == 1
    while sender._numbers.take(str(len(sender._numbers)), 60):
        pass
    assert sender.publish(computed(manager, "s")) is None
    assert manager.pool.num_free == 44


@pytest.mark.parametrize("lease_s", ["5", math.nan, math.inf, -1, 0, True])
def test_lease_of_zero_seconds_is_rejected_and_holds_nothing(lease_s):
    sender, manager, (rank,) = lone("p")
    request = computed(manager)
    with pytest.raises((TypeError, ValueError), match=r"lease_s is .*: expected"):
        sender.publish(request, lease_s=lease_s)
    assert sender.num_leased_requests == 0 and rank.steps == []
    assert sender.publish(request) is not None


def test_unresponsive_rank_does_not_block_its_request():
    now = [0.0]
    receiver, manager, _ = lone(clock=lambda: now[0])
    begun(receiver, manager)
    assert receiver.poll() == []
    now[0] = 60.0
    (loaded,) = receiver.poll()
    assert loaded.num_computed_tokens is None and "did not answer in time" in loaded.error
    # The blocks stay in quarantine, because the rank may still write to them.
    assert manager.pool.num_kept == 5


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("moment", ["matched", "begun", "connecting", "one is connected"])
def test_cancel_before_the_first_connection_frees_the_senders_blocks(
    engines, monkeypatch, transport, tp, moment
):
    """The lease lasts an hour, so only the receiver's notice can end it."""
    options = {"transport": transport, "lease_s": 3600}
    sender, receiver = (
        engines(name, tp=size, options=options) for name, size in zip(("prefill", "decode"), tp)
    )
    request = Request("r", range(101))
    offer = send(sender, "r", range(100))
    goes_on, has_begun = threading.Event(), threading.Event()
    calls = itertools.count()
    for rank in receiver.ranks:
        connect = rank._reader.transport.connect

        def held(metadata, *, timeout_s, connect=connect):
            if moment != "one is connected" or next(calls) > 0:
                has_begun.set()
                assert goes_on.wait(60)
            return connect(metadata, timeout_s=timeout_s)

        monkeypatch.setattr(rank._reader.transport, "connect", held)
    if moment == "matched":
        assert receiver.connector.match(request, offer) == 100
    else:
        assert receiver.admit(request, offer)
    if moment == "connecting" or (moment == "one is connected" and tp != (1, 1)):
        assert has_begun.wait(60)
    receiver.connector.cancel(request)
    deadline = time.monotonic() + 60
    while receiver.connector.is_busy:  # the local blocks are free without a connection
        assert time.monotonic() < deadline
        receiver.connector.poll()
    goes_on.set()
    assert sender.drained(60) and receiver.drained(60)


def test_returning_request_is_matched_again():
    receiver, manager, (rank,) = lone()
    offer = an_offer()
    assert receiver.match(asked(), offer) == 70
    with pytest.raises(ValueError, match="the offer is for other tokens"):
        receiver.match(Request("r", range(500, 571)), offer)
    assert [each.request_id for step in rank.steps for each in step.unread] == ["r"]
    rank.steps.clear()
    # The same offer will still be read, so the sender does not receive an "unread" message.
    for _ in range(2):
        request = asked()
        assert receiver.match(request, offer) == 70
    assert rank.steps == []
    assert receiver.match(asked(), an_offer()) == 70
    assert [len(step.unread) for step in rank.steps] == [1]
    manager.step(new=[Admit(request, external=External(70, delayed=True))])
    with pytest.raises(ValueError, match="request 'r' has no load to begin"):
        receiver.begin(request)  # the last match was for another request object with this ID


def test_load_does_not_begin_if_the_hit_grew_before_the_step():
    receiver, manager, (rank,) = lone()
    request = Request("r", range(300))
    count = receiver.match(request, an_offer())
    computed(manager, "before", range(32))
    manager.step(new=[Admit(request, external=External(count, delayed=True))])
    message = r"admitted with 102 tokens.*expected 70, because its hit was 0"
    with pytest.raises(ValueError, match=message):
        receiver.begin(request)
    assert receiver.num_loading_requests == 0 and rank.steps == []
    receiver.cancel(request)
    assert [len(step.unread) for step in rank.steps] == [1]
    assert manager.pool.num_free == 47
    assert receiver.match(request, an_offer()) == 38


def check_failed_load(receiver, request, offer):
    """Begin a load that fails, check that the tokens are computed instead, and return the error."""
    assert receiver.admit(request, offer)
    loaded = receiver.loaded(request)
    assert loaded.error is not None
    receiver.recompute(request, loaded)
    assert receiver.wrong(request, request.num_tokens) is None
    receiver.manager.free(request)
    return loaded.error


@pytest.mark.parametrize("how", ["expired", "withdrawn"])
def test_lease_that_has_ended_fails_the_load_but_not_the_answer(engines, how):
    sender, receiver = engines("p"), engines("d", block=32)
    request = Request("r", range(100))
    sender.prefill(request)
    offer = offered(sender.connector, request, lease_s=0.05 if how == "expired" else None)
    if how == "withdrawn":
        sender.connector.withdraw(request)
    assert sender.drained()
    for first in range(5000, 9000, 1000):  # this request overwrites the offered blocks
        other = Request(f"from {first}", range(first, first + 900))
        sender.prefill(other)
        sender.manager.free(other)
    error = check_failed_load(receiver, Request("r", range(101)), offer)
    assert "the lease of request r has ended: set a longer lease_s in engine 'p'" in error
    assert receiver.drained()


@pytest.mark.parametrize("found", ["invalidate", "report", "abort", "new weights"])
def test_content_found_to_be_invalid_ends_all_leases(found):
    sender, manager, (rank,) = lone("p")
    page = manager.block_ids(request := computed(manager), 0)[0]
    offered(sender, request)
    manager.step(new=[Request("other", range(90, 99))])
    sender.poll()
    assert not any(step.ends for step in rank.steps)
    if found == "invalidate":
        manager.invalidate([page])
    elif found == "report":
        manager.report(StepReport(manager.last_step_id, True, failed_pages=[page]))
    elif found == "new weights":
        manager.cache.start_epoch("step 1")
    else:
        manager.abort(manager.last_step_id)
    sender.poll()
    assert [step.ends for step in rank.steps if step.ends] == [{"r"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rank: rank.update(transport="other"), "transport is 'tcp' here, but 'other' in engine"),
        (lambda rank: rank.update(metadata="!"), "base64|padding|Only"),
        (lambda rank: rank.update(metadata="e30="), "metadata"),
        (lambda rank: rank.update(addresses=[[4096] * 4]), "registered|memory"),
        (lambda rank: rank.update(leases=4096), "registered|memory"),
    ],
)  # fmt: skip
def test_offer_with_foreign_addresses_reads_nothing(change, message, engines):
    sender, receiver = engines("p"), engines("d")
    offer = send(sender, "r", range(50))
    change(offer["ranks"][0])
    error = check_failed_load(receiver, Request("r", range(51)), sealed(offer))
    assert re.search(message, error), error
    assert receiver.drained()


@pytest.mark.parametrize("value", ["", " \n"])
def test_blank_secret_in_the_environment_is_rejected(value, monkeypatch):
    monkeypatch.delenv("KVCACHE_TRANSFER_SECRET", raising=False)
    assert secret_from_environment() == b""
    monkeypatch.setenv("KVCACHE_TRANSFER_SECRET", value)
    with pytest.raises(ValueError, match=r"\$KVCACHE_TRANSFER_SECRET is empty: expected a secret"):
        secret_from_environment()


def test_peer_without_the_secret_is_rejected(engines):
    sender, receiver = engines("p", secret="a"), engines("d", secret="b")
    check_failed_load(receiver, Request("r", range(51)), send(sender, "r", range(50)))
    assert receiver.drained()


def test_new_sender_can_use_the_name_of_a_stopped_one(engines):
    receiver = engines("decode", options={"timeout_s": 3.0})
    with EngineProcess("prefill") as stopped, EngineProcess("prefill") as started:
        old, unread = (
            stopped.ask("prefill", id=name, tokens=[*range(60)])["offer"] for name in "rs"
        )
        check_load(receiver, Request("r", range(61)), old, 60)
        receiver.manager.cache.reset()
        stopped.signal(signal.SIGSTOP)
        waiting = Request("s", range(61))
        assert receiver.admit(waiting, unread)
        time.sleep(0.1)
        new = started.ask("prefill", id="t", tokens=[*range(100, 160)])["offer"]
        request = Request("t", range(100, 161))
        assert receiver.admit(request, new)
        loaded = [receiver.connector.poll()]
        until(lambda: loaded.append(receiver.connector.poll()) or sum(map(len, loaded)) == 2)
        ended = {each.request.request_id: each for found in loaded for each in found}
        assert (ended["t"].num_computed_tokens, ended["t"].error) == (60, None)
        assert receiver.wrong(request, 60) is None and ended["s"].error is not None
        receiver.recompute(waiting, ended["s"])
        assert receiver.wrong(waiting, 61) is None
        for each in (waiting, request):
            receiver.manager.free(each)
        # An old offer must not replace the new sender as the owner of the peer's name.
        again = Request("r", range(61))
        receiver.manager.cache.reset()
        assert receiver.admit(again, old)
        assert "is connected" in receiver.loaded(again).error
        receiver.manager.free(again)
        stopped.signal(signal.SIGCONT)
        assert receiver.drained()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_stopped_and_restarted_engines_change_no_answer(transport):
    """`python -m benchmarks.disaggregation` runs a longer version of this test."""
    seed = seed_of_test()
    print(f"seed {seed}")
    counts = {"num_requests": 16, "num_kills": 2, "num_stops": 2}
    found = Faults(seed, **counts, transport=transport, margin_s=8.0).run()
    print(found)
    assert found["wrong"] == found["hanging"] == found["leaked"] == 0
    assert found["loaded"] > 0


def until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_malformed_message_or_failed_iteration_does_not_end_the_thread(engines, monkeypatch):
    sender, receiver = engines("p"), engines("d")
    peer = make_transport("evil", "tcp")
    name = peer.connect(base64.b64decode(sender.ranks[0].handshake.address.metadata))
    for message in (b'{"done":"x","generation":Infinity,"readers":1}', b"[" * 100_000):
        peer.send(name, message)
    with monkeypatch.context() as patch:
        patch.setattr(sender.ranks[0]._reader.transport, "notifications", lambda: 1 / 0)
        time.sleep(0.2)
    check_load(receiver, Request("r", range(51)), send(sender, "r", range(50)), 50)
    assert sender.drained()
    peer.close()


def test_failed_thread_ends_loads_and_leases(engines, monkeypatch):
    monkeypatch.setattr(rank_module, "_MOST_WRONG", 2)
    sender, receiver = engines("p"), engines("d")
    offers = [send(sender, name, range(50)) for name in "rs"]
    for engine in (receiver, sender):
        monkeypatch.setattr(engine.ranks[0]._reader.transport, "notifications", lambda: 1 / 0)
        until(lambda engine=engine: not engine.ranks[0]._thread.is_alive())
    for name, offer in zip("rs", offers):
        assert "has failed" in check_failed_load(receiver, Request(name, range(51)), offer)
        receiver.manager.cache.reset()
    assert send(sender, "t", range(50)) is not None  # the lease expires immediately
    assert sender.drained() and receiver.drained()


def test_failed_thread_fails_the_loads_in_progress(engines, monkeypatch):
    monkeypatch.setattr(rank_module, "_MOST_WRONG", 2)
    sender, receiver = engines("p"), engines("d")
    again = Request("r", range(51))
    # The load waits until its lease begins.
    monkeypatch.setattr(sender.ranks[0]._leases, "begin", lambda *_: None)
    assert receiver.admit(again, send(sender, "r", range(50)))
    time.sleep(0.1)
    monkeypatch.setattr(receiver.ranks[0]._reader.transport, "notifications", lambda: 1 / 0)
    loaded = receiver.loaded(again)
    assert "the thread that loads KV has failed" in loaded.error
    receiver.recompute(again, loaded)
    receiver.manager.free(again)
    assert receiver.drained()


def test_load_that_cannot_begin_fails_only_its_own_request(engines, monkeypatch):
    sender, receiver = engines("p"), engines("d")
    with monkeypatch.context() as patch:
        patch.setattr(receiver.ranks[0], "_begin_load", lambda load: 1 / 0)
        error = check_failed_load(receiver, Request("r", range(51)), send(sender, "r", range(50)))
        assert "did not begin: ZeroDivisionError" in error
    receiver.manager.cache.reset()
    check_load(receiver, Request("s", range(51)), send(sender, "s", range(50)), 50)
    assert receiver.drained()


def test_transfer_with_digests_and_a_request_name_that_begins_with_nul(engines):
    sender, receiver = (engines(name, options={"digest": True}) for name in "pd")
    assert all(each.ranks[0]._reader.transport.digest for each in (sender, receiver))
    check_load(receiver, Request("\0r", range(51)), send(sender, "\0r", range(50)), 50)
    assert sender.drained() and receiver.drained()


def test_a_lease_ends_when_all_readers_are_done():
    leases, lease = Leases(), Lease(3, 100, 0.0)
    assert is_lease_over(leases.slots[3], 100) is None
    leases.begin("r", lease, 60)
    assert is_lease_over(leases.slots[3], 100) is False
    message = done_message("r", 100, 2)
    assert json.loads(message) == {"done": "r", "generation": 100, "readers": 2}
    for peer in ("a", "a"):  # repeated messages from the same reader are counted once
        leases.note(message, peer)
    leases.note(done_message("r", 99, 1), "b")
    for garbage in (
        *(b"{", b"[]", b'{"done": [], "generation": 100, "readers": 1}', b"\xff", b"[" * 100_000),
        *(b'{"done": "r", "generation": 100, "readers": %s}' % each for each in (b"true", b"1.0")),
        b'{"done": "r", "generation": Infinity, "readers": 1}',
    ):
        leases.note(garbage, "b")
    assert leases.ended() == set() and len(leases) == 1
    leases.note(message, "b")
    assert leases.ended() == {"r"} and len(leases) == 0
    assert is_lease_over(leases.slots[3], 100) is True
