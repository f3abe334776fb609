# SPDX-License-Identifier: Apache-2.0
"""`kvcache serve` with sources of external KV. Each server runs in a separate process."""

import importlib.util
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from tests.machinery import mooncake_master
from tests.machinery.http.process import ServeProcess, ask
from tests.machinery.shared import sampled

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
)
needs_mooncake = pytest.mark.skipif(
    not mooncake_master.is_installed(), reason="Mooncake is not installed"
)
PROMPT = [(7 * i) % 251 + 1 for i in range(200)]


def answer(server, prompt=PROMPT, **fields):
    """Generate a greedy answer of twelve tokens. Return (text, number of cached prompt tokens)."""
    body = {"model": "llama", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    reply = ask(server.port, "POST", "/v1/completions", body)
    assert reply.status == 200, reply
    value = json.loads(reply.body)
    return value["choices"][0]["text"], value["usage"]["prompt_tokens_details"]["cached_tokens"]


def counts(server, name):
    """Return the counters of one of a server's sources."""
    (source,) = [each for each in server.state()["sources"] if each["name"] == name]
    return source["counts"]


def num_computed(server):
    return server.state()["metrics"]["computed_tokens"]


def wait_for_counts(server, name, **wanted):
    """Wait until a source has these counters. `/state` may lag a step behind the answer."""
    wait_until(lambda: counts(server, name).items() >= wanted.items())


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone():
    """Return the answer of a server without sources."""
    with ServeProcess() as server:
        assert server.state()["sources"] == []
        assert b"kvcache_source" not in ask(server.port, "GET", "/metrics").body
        yield answer(server)[0]


@needs_nixl
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_server_loads_blocks_stored_by_the_earlier_one(alone, tmp_path, end):
    options = ("--store", str(tmp_path / "kv"), "--store-capacity", "64MiB")
    with ServeProcess(*options) as server:
        assert answer(server) == (alone, 0)
        if end == signal.SIGKILL:  # a server that shuts down normally stores pending blocks first
            wait_until(lambda: counts(server, "store")["stored_blocks"] == 211 // 16)
        server.send_signal(end)
        wait_until(lambda: not server.is_running)
    with ServeProcess(*options) as server:
        assert answer(server) == (alone, 192)
        wait_for_counts(server, "store", loads=1, loaded_tokens=192, failed_tokens=0)
        text = ask(server.port, "GET", "/metrics").body.decode()
        assert 'kvcache_source_loaded_tokens_total{model_name="llama",source="store"} 192.0' in text
        assert 'kvcache_source_quarantined_blocks{model_name="llama",source="store"} 0.0' in text
        server.wait_until_empty()


@needs_nixl
def test_unusable_store_does_not_stop_the_server(alone, tmp_path):
    options = ("--store", str(tmp_path / "kv"))
    # A folder can be used by only one server.
    with ServeProcess(*options) as first, ServeProcess(*options) as second:
        assert answer(first) == answer(second) == (alone, 0)
        wait_until(lambda: counts(second, "store")["errors"] > 0)


@needs_mooncake
def test_servers_share_a_mooncake_store(alone):
    with mooncake_master.Master() as master:
        options = ("--store", f"mooncake://{master.address}", "--store-capacity", "64MiB")
        with ServeProcess(*options) as first, ServeProcess(*options) as second:
            assert answer(first) == (alone, 0)
            wait_until(lambda: counts(first, "store")["stored_blocks"] == 211 // 16)
            assert answer(second) == (alone, 192)
            wait_for_counts(second, "store", loads=1, loaded_tokens=192, failed_tokens=0)
            for each in (first, second):
                each.wait_until_empty()


def behind(prefill, *options):
    """Return a server whose prompts are prefilled by another server."""
    return ServeProcess("--prefill-from", f"127.0.0.1:{prefill.port}", *options)


@pytest.mark.slow
def test_prompt_is_prefilled_by_another_server(alone):
    with ServeProcess("--prefill") as prefill, behind(prefill, "--block-size", "32") as server:
        assert answer(server) == (alone, 0)  # computed for this request, so not cached
        wait_for_counts(server, "prefill", asked_requests=1, loaded_tokens=199)
        wait_until(lambda: num_computed(server) == 1 + 11)
        wait_until(lambda: num_computed(prefill) == 199)
        text = ask(server.port, "GET", "/metrics").body.decode()
        assert (
            'kvcache_source_loaded_tokens_total{model_name="llama",source="prefill"} 199.0' in text
        )
        # Nearly the whole prompt is in the server's own cache.
        assert answer(server) == (alone, 192)
        wait_for_counts(server, "prefill", asked_requests=1)
        for each in (prefill, server):
            each.wait_until_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "reason"), [
    ({"args": ["--prefill"], "model": "qwen3"}, "weights of the model is"),
    ({"args": []}, "answers 404"),
])  # fmt: skip
def test_server_that_does_not_match_is_rejected_by_name(alone, options, reason):
    model = options.get("model", "llama")
    with ServeProcess(*options["args"], model=model) as prefill:
        with behind(prefill) as server:
            assert answer(server) == (alone, 0)
            wait_for_counts(server, "prefill", refused_requests=1, loads=0)
            assert num_computed(prefill) == 0
        assert reason in server.log


@pytest.mark.slow
@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGSTOP]))
def test_requests_survive_the_end_of_the_prefill_server(number):
    prompts = [[i + 1, *PROMPT] for i in range(16)]
    with ServeProcess() as server:
        wanted = [answer(server, prompt)[0] for prompt in prompts]
    # Connections to a killed server are refused immediately.
    timeout = "30" if number == signal.SIGKILL else "1"
    with (
        ServeProcess("--prefill") as prefill,
        behind(prefill, "--prefill-timeout", timeout) as server,
        ThreadPoolExecutor(6) as threads,
    ):
        answers = [threads.submit(answer, server, prompt) for prompt in prompts[:13]]
        wait_until(lambda: sum(each.done() for each in answers) >= 4)
        prefill.send_signal(number)
        answers += [threads.submit(answer, server, prompt) for prompt in prompts[13:]]
        assert [each.result(120)[0] for each in answers] == wanted
        for name in ("loaded_tokens", "unanswered_requests"):
            wait_until(lambda n=name: counts(server, "prefill")[n] > 0)
        if number == signal.SIGSTOP:
            prefill.send_signal(signal.SIGCONT)
        server.wait_until_empty()


@pytest.mark.parametrize(("options", "message"), [
    (("--store", "x://y"), "--store: place is 'x://y': expected a folder, or a URL"),
    (("--store-capacity", "1GiB"), "--store-capacity is given: expected only with --store"),
    (("--prefill-from", "x"), "--prefill-from is 'x': expected HOST:PORT"),
    (("--prefill", "bamba"), "--prefill: MODEL has recurrent layers"),
])  # fmt: skip
def test_invalid_options_are_rejected_by_name(options, message):
    with pytest.raises(RuntimeError, match=message):
        if options[-1] == "bamba":
            ServeProcess("--prefill", model="bamba")
        else:
            ServeProcess(*options)
