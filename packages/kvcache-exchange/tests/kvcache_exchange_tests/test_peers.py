# SPDX-License-Identifier: Apache-2.0
"""Tests of prefixes loaded from peers: the index, offers of cached blocks, and what is counted. The
simulator runs engines with faulty peers.
"""

import contextlib
import http.server
import json
import queue
import re
import threading
import time
from concurrent.futures import Future
from typing import ClassVar

import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")
pytest.importorskip("zmq")

from kvcache import GroupSpec, Request
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.disaggregation.offer_calls import OfferRefusedError, OfferServer, offer_key
from kvcache_exchange.peers import EventIndex, PeerSource
from kvcache_exchange.peers import source as peer_source
from kvcache_exchange.router_events import EventPublisher, EventSubscriber
from kvcache_exchange.router_events.translator import EventTranslator
from kvcache_exchange_tests.test_disaggregation import lone
from tests.machinery.disaggregation_engine import Engine
from tests.machinery.shared import manager_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": ["x"]}, "address is 'x': expected HOST:PORT"),
        ({"peers": "a:1"}, "peers is 'a:1': expected a sequence of addresses"),
        ({"peers": ["a:1", "a:1"]}, "expected different addresses"),
        ({"min_tokens": 0}, "min_tokens is 0: expected 1"),
        ({"timeout_s": 0}, "timeout_s is 0.0: expected seconds above 0"),
        ({"lease_s": -1}, "lease_s is -1.0: expected seconds above 0"),
        ({"recheck_s": 0}, "recheck_s is 0.0: expected seconds above 0"),
        ({"max_kept_share": 2}, "max_kept_share is 2.0: expected 0 to 1"),
        ({"secret": "s"}, "secret is 's': expected a bytes"),
    ],
)
def test_invalid_arguments_of_a_source_are_rejected_by_name(options, message):
    connector, manager, _ = lone()
    options = {"peers": ["a:1"]} | options
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        PeerSource(manager, connector, options.pop("peers"), **options)


def test_offer_of_cached_blocks_is_bounded_and_changes_nothing_if_declined():
    connector, manager, _ = lone(num_blocks=11, max_num_reqs=1)
    request = Request("r", range(100))
    manager.step(new=[request])
    asked = Request("asked", [*range(100), 0])
    assert connector.publish_cached(asked) is None  # the only row is in use
    manager.free(request)
    before = manager.pool.num_free
    for options in ({"min_tokens": 97}, {"max_kept_blocks": 5}):
        assert connector.publish_cached(asked, **options) is None
    assert connector.publish_cached(Request("short", [0])) is None
    assert connector.publish_cached(Request("unknown", range(500, 600))) is None
    assert (manager.pool.num_free, connector.num_leased_requests) == (before, 0)
    offer = connector.publish_cached(asked, min_tokens=96, max_kept_blocks=6)
    assert offer["num_tokens"] == 96 and manager.pool.num_kept == 6
    more = Request("more", [*range(50), 0])
    assert connector.publish_cached(more, max_kept_blocks=8) is None
    assert connector.publish_cached(more, max_kept_blocks=9)["num_tokens"] == 48
    with pytest.raises(ValueError, match="lease_s is 0"):
        connector.publish_cached(asked, lease_s=0)
    with pytest.raises(ValueError, match="min_tokens is 0: expected 1"):
        connector.publish_cached(asked, min_tokens=0)
    with pytest.raises(ValueError, match="max_kept_blocks is -1: expected 0"):
        connector.publish_cached(asked, max_kept_blocks=-1)


def test_groups_without_cached_blocks_cannot_be_offered():
    refusal = pytest.raises(
        ValueError, match=r"group \d has kind 'recurrent': expected transferred="
    )
    with Engine("p", kinds=["full", "window", "state"]) as sender, refusal:
        sender.connector.publish_cached(Request("asked", range(100)))


FULL = GroupSpec("full_attention", 16)


def test_invalid_arguments_of_an_index_are_rejected_by_name():
    with pytest.raises(TypeError, match="view is 5: expected an object with apply and clear"):
        EventSubscriber("tcp://127.0.0.1:1", view=5)
    with pytest.raises(ValueError, match="the manager caches no blocks"):
        EventIndex(manager_of(FULL, enable_caching=False))


class Remote:
    """A peer process as seen through its HTTP server: its description and real events."""

    def __init__(self, engine_id):
        connector, self.manager, _ = lone(engine_id, enable_events=True)
        self.source = PeerSource(self.manager, connector, [])
        self.publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@a@b")
        self.changes, self.requests = {}, 0

    def cache(self, first):
        request = Request(f"r{first}", range(first, first + 50))
        self.manager.step(new=[request])
        self.manager.free(request)
        self.publisher.publish(self.manager.cache.drain_events())

    def described(self):
        self.requests += 1
        events = {name: getattr(self.publisher, name) for name in ENDPOINTS}
        return json.loads(json.dumps(self.source.describe() | {"events": events} | self.changes))


ENDPOINTS = ("endpoint", "replay_endpoint", "topic")


class Network:
    """The peer at the address a:1. It may be replaced or down."""

    def __init__(self, monkeypatch, remote):
        self.remote = remote
        monkeypatch.setattr(OfferServer, "fetch", lambda server, path: self._fetch(path))
        connector, manager, (rank,) = lone("own")
        rank.close = lambda: None
        self.source = PeerSource(manager, connector, ["a:1"], recheck_s=0.05)

    def _fetch(self, path):
        assert path == "/peer"
        if self.remote is None:
            raise ConnectionRefusedError("it is down")
        return self.remote.described()

    def wait(self, condition):
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, self.source.errors
            time.sleep(0.01)

    def count(self, first):
        """Return how many tokens of a prompt the peer has cached according to the index."""
        asked = Request("q", range(first, first + 100))
        return self.source._index.num_tokens(asked).get("a:1", 0)

    def is_refused(self, message):
        return re.search(message, self.source.errors["a:1"] or "") is not None


@pytest.fixture
def remote():
    made = Remote("theirs")
    yield made
    made.publisher.close()


@pytest.fixture
def network(monkeypatch, remote):
    made = Network(monkeypatch, remote)
    yield made
    made.source.close()


def test_index_follows_a_peer_across_its_end_and_restart(network, remote, caplog):
    caplog.set_level("INFO")
    remote.cache(0)
    network.wait(lambda: network.count(0) == 48)
    network.wait(lambda: network.source.errors == {"a:1": None})
    remote.cache(1000)
    network.wait(lambda: network.count(1000) == 48)
    network.remote = None
    network.wait(lambda: network.is_refused("it is down"))
    assert network.count(0) == 0
    again = network.remote = Remote("restarted")
    again.cache(2000)
    network.wait(lambda: network.count(2000) == 48)
    network.wait(lambda: network.source.errors == {"a:1": None})
    assert network.count(0) == 0
    again.publisher.close()
    assert "peer a:1 is not used: it is down" in caplog.text and "peer a:1 is used" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peer": {"version": 1}}, "version of the peer is 1: expected 6"),
        ({"peer": None}, "values is None: expected a Mapping"),
        ({"peer": "own"}, "the address is that of this server itself"),
        ({"events": None}, "events of the peer are None: expected its endpoints"),
        ({"events": {"endpoint": 5}}, "endpoint of the peer's events is 5"),
        ({"events": {"endpoint": "x", "topic": 5}}, "topic of the peer's events is 5"),
        ({"events": {"endpoint": "x:y"}}, "endpoint is 'x:y'"),
    ],
)
def test_incompatible_peer_is_refused_by_name(network, remote, caplog, changes, message):
    own = network.source.describe()["peer"]
    remote.changes = {"peer": own} if changes == {"peer": "own"} else changes
    network.wait(lambda: network.is_refused(message))
    before = remote.requests
    # The peer is checked again, in case it was restarted.
    network.wait(lambda: remote.requests > before + 1)
    assert len(re.findall(f"peer a:1 is not used: .*{message}", caplog.text)) == 1
    remote.changes = {}
    network.wait(lambda: network.source.errors["a:1"] is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 32}, r"block_sizes is \[16\] here, but \[32\] in the peer: expected equal"),
        ({"hash_block_size": 8}, "hash_block_size is 16 here, but 8 in the peer"),
        ({"model": {"weights": "other"}}, "weights of the model is None here, but 'other' in eng"),
    ],
)
def test_peer_with_other_blocks_or_another_model_is_refused_by_name(options, message):
    engines = lone("a"), lone("b", **options)
    own, theirs = (PeerSource(manager, connector, []) for connector, manager, _ in engines)
    with pytest.raises(ValueError, match=message):
        own.check_peer(theirs.describe())


def test_endpoints_on_all_addresses_are_reached_at_the_address_of_the_peer(network):
    (watch,) = network.source._watches.values()
    reached = [watch._reachable(f"tcp://{host}:5") for host in ("0.0.0.0", "*", "[::]", "b")]
    assert reached == ["tcp://a:5", "tcp://a:5", "tcp://a:5", "tcp://b:5"]
    watch.server.host = "::1"
    assert watch._reachable("tcp://*:5") == "tcp://[::1]:5"
    assert watch._reachable("ipc:///tmp/x") == "ipc:///tmp/x"


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that answers each request with the next reply from a list."""

    replies: ClassVar[list] = []
    seen: ClassVar[list] = []

    def do_GET(self):
        status, content = self.replies.pop(0)
        self.seen.append((self.command, self.path, self.headers["authorization"]))
        self.rfile.read(int(self.headers["content-length"] or 0))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def test_replies_of_servers_are_offers_refusals_or_failures():
    refusal = json.dumps({"error": {"message": "too old"}}).encode()
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{listener.server_port}"
        server = OfferServer(address, timeout_s=5, secret=b"s")
        Answers.replies = [(200, b'{"offer": 1}'), (200, b"{}")]
        assert server.fetch("/a", {"x": 1}) == {"offer": 1} and server.fetch("/b") == {}
        key = f"Bearer {offer_key(b's')}"
        assert Answers.seen == [("POST", "/a", key), ("GET", "/b", key)]
        for status, content, error, message in (
            (404, refusal, OfferRefusedError, "answers 404: too old"),
            (429, refusal, ConnectionError, "answers 429: too old"),
            (503, refusal, ConnectionError, "answers 503: too old"),
            (200, b"<html>", ConnectionError, "answers 200 with b'<html>': expected the JSON of"),
            (500, b"[]", ConnectionError, r"answers 500 with b'\[\]': expected the JSON of"),
            (200, b"[" * 100_000, ConnectionError, "expected the JSON of a kvcache server"),
        ):
            Answers.replies = [(status, content)]
            with pytest.raises(error, match=message):
                server.fetch("/a", {})
        listener.shutdown()


LONG = list(range(100))


class Asking:
    """An engine that knows what a peer has cached. Both are without ranks; the simulator moves KV."""

    class Watch:
        error = None

        def __init__(self, server, *_):
            self.server = server

        def stop(self): ...

        join = stop

    def __init__(self, monkeypatch, num_peers=1, answer=None, **options):
        monkeypatch.setattr(peer_source, "PeerWatch", self.Watch)
        monkeypatch.setattr(OfferServer, "fetch", lambda server, _, body: self.fetch(server, body))
        connector, self.manager, (self.rank,) = lone("own")
        self.rank.close = lambda: None
        self.answer, self.peers, self.asked = answer, {}, queue.SimpleQueue()
        addresses = [f"a:{i + 1}" for i in range(num_peers)]
        self.source = PeerSource(self.manager, connector, addresses, min_tokens=16, **options)
        for address in addresses:
            theirs, manager, _ = lone(address, enable_events=True)
            self.peers[address] = PeerSource(manager, theirs, []), manager

    def cache(self, address, tokens):
        """Let a peer compute a prompt, and announce it."""
        _, manager = self.peers[address]
        request = Request("computed", tokens)
        manager.step(new=[request])
        manager.free(request)
        events = EventTranslator(manager.options.hash_seed).translate(manager.cache.drain_events())
        self.source._index.view(address).apply(events)

    def fetch(self, server, body):
        if self.answer is not None:
            return self.answer()
        self.asked.put((server.address, body, offered := Future()))
        return {"offer": offered.result(30)}

    def match(self, tokens=LONG, **options):
        """Return how many tokens the source finds for a new request, once it knows."""
        request, until = Request("r", tokens, **options), time.monotonic() + 30
        while (found := self.source.match(request)) is None:
            assert time.monotonic() < until
            if not self.asked.empty():
                address, body, offered = self.asked.get()
                peer, _ = self.peers[address]
                offered.set_result(peer.offer(body["prompt"], min_tokens=body["min_tokens"]))
        self.source.cancel(request)
        return found


@pytest.fixture
def asking(monkeypatch):
    made = []

    def make(*args, **options):
        made.append(Asking(monkeypatch, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.source.close()


def raises(error):
    def answer():
        raise error

    return answer


def test_peer_with_the_longest_prefix_is_asked(asking):
    engine = asking(num_peers=2)
    engine.cache("a:1", LONG[:60])
    engine.cache("a:2", LONG)
    assert engine.match() == 96
    offered = [peer.stats.offered_tokens for peer, _ in engine.peers.values()]
    assert offered == [0, 96] and engine.source.stats.asked_requests == 1
    request = Request("own", LONG)
    engine.manager.step(new=[request])
    engine.manager.free(request)
    assert engine.match() == 0  # the local hit is long enough
    assert engine.source.stats.asked_requests == 1


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (raises(OfferRefusedError("not for you")), "refused_requests"),
        (raises(ConnectionRefusedError()), "unanswered_requests"),
        (lambda: {"offer": None}, "missed_requests"),
        (lambda: {"offer": {"version": 9}}, "refused_requests"),
        ("loses blocks", "missed_requests"),
    ],
)
def test_request_that_a_peer_does_not_serve_is_counted(asking, caplog, answer, count):
    engine = asking(answer=None if answer == "loses blocks" else answer)
    engine.cache("a:1", LONG)
    if answer == "loses blocks":
        engine.peers["a:1"][1].cache.reset()
    with contextlib.suppress(ValueError):  # a refusal
        assert engine.match() == 0
    stats = engine.source.stats
    assert (stats.asked_requests, getattr(stats, count)) == (1, 1)
    if count == "unanswered_requests":
        assert "the server at a:1: ConnectionRefusedError" in caplog.text


def test_failing_peer_gets_no_requests_until_its_breaker_allows_it(asking):
    engine = asking(answer=raises(ConnectionRefusedError()))
    (watch,) = engine.source._watches.values()
    watch.server.circuit = Circuit(num_failures=1, retry_s=60)
    engine.cache("a:1", LONG)
    assert [engine.match() for _ in range(3)] == [0, 0, 0]
    stats = engine.source.stats
    assert (stats.asked_requests, stats.unasked_requests) == (1, 2)
