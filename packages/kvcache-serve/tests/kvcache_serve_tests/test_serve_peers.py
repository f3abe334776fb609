# SPDX-License-Identifier: Apache-2.0
"""`kvcache serve` processes that are peers of each other, without a router that knows their caches."""

import json
import random
import signal
import time
from contextlib import ExitStack

import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("zmq")

from kvcache.cli import main
from kvcache_exchange.disaggregation import CacheRank, Connector, layouts_of_plan
from kvcache_exchange.disaggregation.offer_calls import OfferServer, offer_key
from kvcache_exchange.peers import PeerSource
from kvcache_exchange.router_events import EventPublisher
from kvcache_serve.cli.models import load_model
from kvcache_serve.engine import Engine
from kvcache_serve.engine.transformers import attach
from kvcache_serve.server import ByteTexts, EngineLoop, make_app
from kvcache_serve_tests.test_serve_sources import counts, needs_nixl, wait_for_counts, wait_until
from tests.machinery.dense_models import greedy
from tests.machinery.http.process import ServeProcess, ask, connect, reply_of, request_of
from tests.machinery.ports import free_port
from tests.machinery.shared import sampled

SECRET = {"KVCACHE_TRANSFER_SECRET": "a secret of this test"}


def peers_of(size, *options, environment=SECRET):
    """Return processes that are peers of each other, not yet entered."""
    ports = [free_port() for _ in range(size)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return [
        ServeProcess(
            *("--port", str(port), "--max-model-len", "512", "--peer-timeout", "5"),
            *("--peer", ",".join(each for each in addresses if each != f"127.0.0.1:{port}")),
            *options,
            environment=environment,
        )
        for port in ports
    ]


def complete(server, prompt, num_tokens=4):
    """Return the text of a greedy answer, and the number of cached prompt tokens."""
    body = {"model": "llama", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    reply = ask(server.port, "POST", "/v1/completions", body)
    assert reply.status == 200, reply
    value = json.loads(reply.body)
    return value["choices"][0]["text"], value["usage"]["prompt_tokens_details"]["cached_tokens"]


def peers(server):
    """Return why each peer of a server is not used. None: it is used."""
    return server.state()["peers"]


def chats(rng, count):
    """Return the prompts of growing chats that share a system prompt."""
    system, histories = [rng.randrange(3, 250) for _ in range(70)], [[] for _ in range(5)]
    for _ in range(count):
        which = rng.randrange(len(histories))
        if not histories[which] or len(histories[which]) > 350:
            histories[which] = [*system]
        histories[which] += [rng.randrange(3, 250) for _ in range(rng.randrange(5, 40))]
        yield [*histories[which]]


@pytest.mark.parametrize(
    "transport",
    [pytest.param("tcp", marks=pytest.mark.exhaustive), pytest.param("nixl", marks=needs_nixl)],
)
def test_peers_behind_a_round_robin_load_prefixes_from_each_other(transport):
    model, rng, num_cached = load_model("llama", "MODEL"), random.Random(5), 0
    with ExitStack() as stack:
        servers = [stack.enter_context(each) for each in peers_of(3, "--transport", transport)]
        wait_until(lambda: all(set(peers(each).values()) == {None} for each in servers))
        alive = servers
        for number, prompt in enumerate(chats(rng, 40)):
            if number == 25:
                servers[0].send_signal(signal.SIGKILL)
                wait_until(lambda: not servers[0].is_running)
                alive = servers[1:]
            server = alive[number % len(alive)]
            text, cached = complete(server, prompt)
            assert text == ByteTexts().decode(greedy(model, prompt, 4)), number
            num_cached += cached
            if number == 24:
                for each in servers:
                    wait_until(lambda s=each: counts(s, "peers")["loaded_tokens"] > 0)
                before = counts(servers[0], "peers")["loaded_tokens"]
        for each in alive:
            each.wait_until_empty()
        own = [counts(each, "peers") for each in alive]
        loaded = before + sum(each["loaded_tokens"] for each in own)
        # The other hits are in the servers' own caches.
        assert 0 < loaded < num_cached
        assert all(each["offered_requests"] > 0 for each in own)
        assert all(each["failed_tokens"] == 0 for each in own)
        text = ask(alive[0].port, "GET", "/metrics").body.decode()
        assert 'kvcache_source_loaded_tokens_total{model_name="llama",source="peers"}' in text


def offer_of(server, body, key=None):
    """Request an offer. Return (status, the reply's JSON value)."""
    more = "" if key is None else f"Authorization: Bearer {key}\r\n"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with connect(server.port, 60) as connection:
        connection.sendall(request_of("POST", "/peer/offer", content, more=more))
        reply = reply_of(connection, 60)
    return reply.status, json.loads(reply.body)


@pytest.mark.slow
def test_strangers_get_no_offers_and_peers_cannot_exhaust_the_pool():
    (server,) = [ServeProcess("--peer", "127.0.0.1:1", "--port", "0", environment=SECRET)]
    key, prompt = offer_key(SECRET["KVCACHE_TRANSFER_SECRET"].encode()), [*range(1, 200)]
    with server:
        complete(server, prompt)
        for wrong, came in ((None, "missing"), ("x", "wrong"), ("a secret of this test", "wrong")):
            status, value = offer_of(server, {"prompt": prompt, "min_tokens": 1}, wrong)
            assert status == 401 and f"the key of this peer is {came}" in value["error"]["message"]
        assert ask(server.port, "GET", "/peer").status == 401
        assert ask(server.port, "POST", "/prefill", {"prompt": prompt}).status == 404
        for body, expected in (
            ({"prompt": prompt}, "min_tokens"),
            ({"prompt": [], "min_tokens": 1}, "prompt"),
            ({"prompt": [-1], "min_tokens": 1}, "prompt[0]"),
            ({"prompt": ["a"], "min_tokens": 1}, "prompt[0]"),
            ({"prompt": prompt, "min_tokens": 0}, "min_tokens"),
            ({"prompt": prompt, "min_tokens": 1, "peer": {}}, "peer"),
            (b"nonsense", "the body is not JSON"),
        ):
            status, value = offer_of(server, body, key)
            assert status == 400 and expected in value["error"]["message"]
        asked = {"prompt": prompt, "min_tokens": 1}
        status, value = offer_of(server, asked, key)
        assert (status, value["offer"]["num_tokens"]) == (200, 192)
        assert offer_of(server, asked | {"min_tokens": 193}, key) == (200, {"offer": None})
        assert offer_of(server, asked | {"cache_salt": "s"}, key) == (200, {"offer": None})
        # A prompt beyond the model's maximum length is shortened, not refused.
        status, value = offer_of(server, {"prompt": prompt * 40, "min_tokens": 1}, key)
        assert (status, value["offer"]["num_tokens"]) == (200, 192)
        start = time.monotonic()
        offers = [offer_of(server, asked, key)[1]["offer"] for _ in range(150)]
        num_leases = 1 + int((time.monotonic() - start) // 10)  # a lease ends after 10 s
        total = sum(server.state()["pool"].values())
        most = total // 4 // 12 * num_leases  # of 12 blocks each
        num_declined = sum(each is None for each in offers)
        assert len(offers) - num_declined <= most
        wait_for_counts(server, "peers", declined_requests=2 + num_declined)
        server.wait_until_empty()  # leases end even if no peer reads


@pytest.mark.parametrize(("options", "expected"), [
    (["--peer", "x"], "--peer is 'x': expected HOST:PORT"),
    (["--peer", "a:1,,b:1"], "--peer is '': expected HOST:PORT"),
    (["--peer", "a:1,a:1"], "--peer is 'a:1,a:1': expected each address once"),
    (["--peer", "a:1", "--host", "0.0.0.0"], "with --host 0.0.0.0: expected --events ENDPOINT"),
    (
        ["--peer", "a:1", "--host", "0.0.0.0", "--events", "tcp://127.0.0.1:0"],
        "with --host 0.0.0.0: expected --events-replay ENDPOINT",
    ),
    (
        [
            "--peer",
            "a:1",
            "--host",
            "::",
            "--events",
            "tcp://x:1",
            "--events-replay",
            "tcp://x:2",
        ],
        "with --host ::: expected $KVCACHE_TRANSFER_SECRET as well",
    ),
    (["--peer", "a:1", "--api-key", "k"], "--api-key is given with --peer: expected $KVCACHE_TR"),
    (["--peer-timeout", "0"], "--peer-timeout is '0': expected a whole number from 1"),
    (["--peer-min-tokens", "0"], "--peer-min-tokens is '0': expected a whole number from 1"),
])  # fmt: skip
def test_invalid_options_of_peers_are_rejected_by_name(options, expected, capsys):
    assert main(["serve", "llama", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcache: ") and expected in error and error.count("\n") == 1


@pytest.mark.parametrize("model", sampled(["bamba", "qwen3_next"]))
def test_models_with_states_are_rejected_by_name(model, capsys):
    assert main(["serve", model, "--port", "0", "--peer", "a:1"]) == 2
    assert "--peer: MODEL has recurrent layers" in capsys.readouterr().err


def test_applications_without_a_key_for_peers_or_without_events_are_rejected():
    paged = attach(load_model("llama", "MODEL"), "1MiB", max_model_len=128, enable_events=True)
    cache = paged.cache
    layouts = layouts_of_plan(cache.plan, cache.storages, engine_id="a")
    connector = Connector(cache.manager, [CacheRank(layouts, cache.storages)], engine_id="a")
    source = PeerSource(cache.manager, connector, [])
    engine = Engine(paged, sources=[source])
    with EventPublisher("tcp://127.0.0.1:0") as publisher:
        loop = EngineLoop(engine, publisher)
        for name, value in (("connector", connector), ("peers", source)):
            message = f"api_key is given with {name}: expected transfer_secret as well"
            with pytest.raises(ValueError, match=message):
                make_app(loop, ByteTexts(), "m", api_key="k", **{name: value})
        with pytest.raises(TypeError, match="peers is 5: expected a PeerSource"):
            make_app(loop, ByteTexts(), "m", peers=5)
        with pytest.raises(TypeError, match="transfer_secret is 's': expected a bytes"):
            make_app(loop, ByteTexts(), "m", transfer_secret="s")
        app = make_app(loop, ByteTexts(), "m", peers=source, transfer_secret=b"s", api_key="k")
        assert {"/peer", "/peer/offer"} <= set(app.openapi()["paths"])
    with pytest.raises(ValueError, match="peers is given: expected a loop with a publisher"):
        make_app(EngineLoop(engine), ByteTexts(), "m", peers=source)
    engine.close()


def test_key_of_offers_does_not_reveal_the_secret():
    assert offer_key(b"one") != offer_key(b"two") and b"one".hex() not in offer_key(b"one")
    assert (
        OfferServer("a:1", timeout_s=1, secret=b"one")
        ._headers["authorization"]
        .endswith(offer_key(b"one"))
    )
    assert "authorization" not in OfferServer("a:1", timeout_s=1)._headers
