# SPDX-License-Identifier: Apache-2.0
"""The server with OpenAI's client, with clients that disconnect, with a failing model, and with its
page in a browser.
"""

import asyncio
import itertools
import json
import logging
import queue
import re
import shutil
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("httpx")

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from kvcache import hash_blocks
from kvcache.allocator import check_invariants
from kvcache.cli import main
from kvcache_serve.cli import serve as command
from kvcache_serve.engine import Engine
from kvcache_serve.engine.transformers import attach
from kvcache_serve.server import ByteTexts, EngineLoop, Limits, Server, make_app
from kvcache_serve.server.texts import AnswerText, TokenizerTexts
from tests.machinery.dense_models import dense, greedy
from tests.machinery.http.process import ServeProcess, ask

NUMBERS = itertools.count()
# The default client would load the TLS certificates for each request.
HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
GREETING = "Hello, what a fine day it is today, is it not?"


class Served:
    """A server that runs in a thread, with its engine and clients."""

    def __init__(self, port, loop):
        self.loop, self.engine, self.url = loop, loop.engine, f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.slow_seconds = 0.0
        self.forward = self.engine.model.forward
        self.num_failures = 0
        self.engine.model.forward = self._forward
        # If this function returns True for the state before a step, the engine pauses until a
        # request is added or ends. Meanwhile, the state that clients see is up to date.
        self.hold = None
        self.may_go_on = lambda: not loop._inbox.empty()
        self._engine_step, self.engine.step = self.engine.step, self._step

    def _step(self):
        if (hold := self.hold) is not None:
            self.loop._look()
            is_held, until = hold(self.loop.state), time.monotonic() + 30
            while is_held and self.hold and not self.may_go_on() and time.monotonic() < until:
                time.sleep(0.002)
        return self._engine_step()

    def _forward(self, batch):
        time.sleep(self.slow_seconds)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("the model is out of order")
        return self.forward(batch)

    def state(self):
        return HTTP.get(f"{self.url}/state").json()

    def wait_until(self, holds, seconds=60):
        until = time.monotonic() + seconds
        while not holds(self.state()):
            assert time.monotonic() < until, self.state()
            time.sleep(0.02)

    def wait_until_empty(self):
        """Wait until no request is left and no page is held."""
        self.wait_until(lambda state: state["num_sequences"] == 0)
        self.wait_until(lambda s: s["pool"]["held"] == s["pool"]["held_cached"] == 0)
        told = queue.SimpleQueue()

        def look(engine):  # called in the engine's thread
            manager = engine.cache.manager
            try:
                check_invariants(manager)
                told.put((engine.num_unfinished, manager.pool.num_free - manager.pool.num_total))
            except BaseException as error:
                told.put(error)

        self.loop.call(look)
        assert told.get(timeout=60) == (0, 0)

    def complete(self, **asked):
        return self.client.completions.create(
            **({"model": "llama", "temperature": 0, "prompt": GREETING, "max_tokens": 12} | asked)
        )


@contextmanager
def serving(texts=None, publisher=None, limits=None, trust_clients=True, api_key=None, **options):
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, "host_budget": "2MiB"} | options
    engine = Engine(attach(dense("llama"), "1MiB", **options))
    loop = EngineLoop(engine, publisher)
    limits = limits or Limits(grace_seconds=0.5)
    texts = texts or ByteTexts()
    more = {"limits": limits, "trust_clients": trust_clients, "api_key": api_key}
    app = make_app(loop, texts, "llama", **more)
    server = Server(app, port=0, log_level="error")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    listener = server.servers[0].sockets[0]
    served = Served(listener.getsockname()[1], loop)
    served.listener, served.admission = listener, app.state.admission
    served.connections = server.server_state.connections
    served.stop = lambda: (setattr(server, "should_exit", True), thread.join())
    try:
        yield served
    finally:
        served.slow_seconds, served.hold = 0, None
        served.stop()
        engine.model.forward = served.forward
        engine.model.detach()


@pytest.fixture(scope="module")
def shared_server():
    with serving() as served:
        yield served


@pytest.fixture
def served(shared_server):
    """The server shared by all tests. After each test, it must have no requests left."""
    yield shared_server
    shared_server.slow_seconds = shared_server.num_failures = 0
    shared_server.hold = None
    shared_server.wait_until_empty()


def dense_answer(prompt, max_tokens=12):
    return ByteTexts().decode(greedy(dense("llama"), ByteTexts().encode(prompt), max_tokens))


class TestCompletions:
    def test_answer_equals_the_models_own_and_usage_reports_hits(self, served):
        prompt = GREETING + " One."
        for cached in (0, len(prompt) // 16 * 16):
            answer = served.complete(prompt=prompt)
            assert answer.choices[0].text == dense_answer(prompt)
            assert answer.choices[0].finish_reason == "length"
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 12)
            assert usage.total_tokens == len(prompt) + 12
            assert usage.prompt_tokens_details.cached_tokens == cached

    def test_different_salts_share_no_blocks(self, served):
        found = {}
        for salt in ("a", "b", "a"):
            answer = served.complete(prompt=GREETING + " Salt.", extra_body={"cache_salt": salt})
            found[salt] = answer.usage.prompt_tokens_details.cached_tokens
            if salt == "b":
                assert found == {"a": 0, "b": 0}
        assert found["a"] == 48

    @pytest.mark.slow
    def test_choices_of_several_prompts_and_samples_are_in_order(self, served):
        prompts = ["ab", [99, 100, 101], "ef"]
        for prompt in (prompts[0], prompts[1]):
            asked = {"n": 3, "seed": 5, "temperature": 1.0}
            answers = [served.complete(prompt=prompt, **asked) for _ in range(2)]
            texts = [[choice.text for choice in answer.choices] for answer in answers]
            assert texts[0] == texts[1] and len(set(texts[0])) == 3
        answer = served.complete(prompt=["ab", "ef"], n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [
            *[dense_answer("ab")] * 2,
            *[dense_answer("ef")] * 2,
        ]
        assert answer.usage.completion_tokens == 48
        tokens = served.complete(prompt=[[97, 98], [101, 102]])
        assert [each.text for each in tokens.choices] == [dense_answer("ab"), dense_answer("ef")]

    def test_answers_end_before_a_stop_text(self, served):
        whole = dense_answer(GREETING, 40)
        stop = whole[10:13]
        before = whole[: whole.index(stop)]
        for is_stream in (False, True):
            answer = served.complete(max_tokens=40, stop=[stop, "no such text"], stream=is_stream)
            if is_stream:
                choices = [each.choices[0] for each in answer]
                assert "".join(choice.text for choice in choices) == before
                assert choices[-1].finish_reason == "stop"
            else:
                assert answer.choices[0].text == before
                assert answer.choices[0].finish_reason == "stop"
                assert answer.usage.completion_tokens < 40

    def test_nothing_is_generated_after_a_stop_text(self, served, monkeypatch):
        served.slow_seconds = 0.02
        forward, steps = served.forward, itertools.count()

        def slower(batch):
            if next(steps) > 30:  # the stop text appears late in the answer
                time.sleep(0.3)
            return forward(batch)

        monkeypatch.setattr(served, "forward", slower)
        before = served.state()["metrics"]["generated_tokens"]
        stop = dense_answer(GREETING, 40)[5]
        list(served.complete(max_tokens=150, stop=stop, stream=True))
        served.wait_until_empty()
        assert served.state()["metrics"]["generated_tokens"] - before < 60

    @pytest.mark.slow
    def test_token_that_ends_an_answer_is_not_shown(self):
        token_ids = greedy(dense("llama"), ByteTexts().encode(GREETING), 30)
        texts = ByteTexts()
        texts.end_token_ids = (token_ids[20],)
        first = token_ids.index(token_ids[20])
        with serving(texts) as served:
            answer = served.complete(max_tokens=30)
        assert answer.choices[0].text == texts.decode(token_ids[:first])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == first + 1


class TestChat:
    MESSAGES = (
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "?"}],
        },
    )
    AS_TEXT = "system: Be short.\nuser: Who ?\nassistant: "

    def ask(self, served, **asked):
        return served.client.chat.completions.create(
            **({"model": "llama", "temperature": 0, "messages": self.MESSAGES} | asked)
        )

    def test_answer_can_be_sent_back_as_a_message(self, served):
        """The message is sent as clients do: as the object itself, or as all of its fields
        including nulls.
        """
        message = self.ask(served, max_tokens=9).choices[0].message
        texts = set()
        for each in (message, message.model_dump()):
            messages = [*self.MESSAGES, each, {"role": "user", "content": "And?"}]
            answer = self.ask(served, max_tokens=9, messages=messages)
            texts.add(answer.choices[0].message.content)
        whole = f"{self.AS_TEXT}{message.content}\nuser: And?\nassistant: "
        assert texts == {dense_answer(whole, 9)}


@pytest.mark.parametrize("asked,status,expected", [
    ({"prompt": ""}, 400, "prompt is empty"),
    ({"prompt": ["fine", ""]}, 400, "prompt[1] is empty"),
    ({"prompt": None}, 400, "prompt is None: expected a string or a list of tokens"),
    (
        {"prompt": "x" * 250},
        400,
        "prompt has 250 tokens and max_tokens is 12: expected at most 256",
    ),
    ({"max_tokens": 10**6}, 400, "expected at most 256 in total"),
    ({"prompt": [5, 600]}, 400, "prompt has the token 600: expected 0 to 511"),
    ({"prompt": [[1], [600]]}, 400, "prompt[1] has the token 600: expected 0 to 511"),
    ({"prompt": [5, 10**20]}, 400, f"prompt has the token {10**20}: expected 0 to 511"),
    ({"prompt": [[1, 2], "x"]}, 400, "prompt"),
    ({"model": "gpt-4"}, 404, "model is 'gpt-4': expected 'llama'"),
    ({"temperature": -0.5}, 400, "temperature: Input should be greater than or equal to 0"),
    ({"n": 0}, 400, "n: Input should be greater than or equal to 1"),
    ({"n": 100, "max_tokens": 1}, 400, "100"),
    ({"echo": True}, 400, "echo is True: not supported by this server, expected none"),
    ({"logprobs": 21}, 400, "logprobs: Input should be less than or equal to 20"),
    ({"extra_body": {"top_k": 0}}, 400, "top_k: Input should be greater than or equal to 1"),
    ({"extra_body": {"cache_salt": "\ud800"}}, 400, "cache_salt"),
    ({"seed": 2**63}, 400, "seed"),
], ids=lambda value: re.sub(r"\W+", "-", str(value))[:30])  # fmt: skip
def test_errors_of_invalid_requests_state_the_expected_value(served, asked, status, expected):
    # The bodies are sent without OpenAI's client, because it would reject some of them itself.
    asked = dict(asked)
    body = {"model": "llama", "prompt": "x", "max_tokens": 12} | asked.pop("extra_body", {}) | asked
    before = served.state()["metrics"]["requests"]
    answer = HTTP.post(
        f"{served.url}/v1/completions",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert expected in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] and isinstance(error["code"], str)
    assert error["param"].partition("[")[0] in body
    assert len(error["message"]) < 400
    served.wait_until_empty()
    assert served.state()["metrics"]["requests"] == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": "llama"}', b"\xff"])
def test_bodies_that_are_not_requests_are_rejected(served, body):
    headers = {"content-type": "application/json"}
    answer = HTTP.post(f"{served.url}/v1/completions", content=body, headers=headers)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message
    assert body != b"[]" or message == "the body is []: expected a JSON object"


class TestClientsThatGoAway:
    """In whichever phase a client disconnects, its request must end, and the pool must become empty."""

    def leave(self, served, phase, **asked):
        """Send a request, and disconnect as soon as `phase` appears in the server's state.

        The engine is held in this phase until the disconnect.
        """
        served.hold = phase
        prompt = f"{next(NUMBERS):<150}"  # none of the prompt's blocks are cached
        body = {"model": "llama", "temperature": 0, "prompt": prompt, "max_tokens": 100} | asked

        async def ask():
            async with httpx.AsyncClient(timeout=60) as client:
                request = asyncio.create_task(
                    client.post(f"{served.url}/v1/completions", json=body)
                )
                while not phase((await client.get(f"{served.url}/state")).json()):
                    assert not request.done(), request.result().text
                    await asyncio.sleep(0.005)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

        asyncio.run(ask())

    PHASES = {  # noqa: RUF012
        "prompt": lambda s: any(0 < x["computed"] < 150 for x in s["sequences"]),
        "answer": lambda s: any(x["tokens"] > 152 for x in s["sequences"]),
        "swapped": lambda s: any(x["state"] == "swapped" for x in s["sequences"]),
        "waiting": lambda s: any(x["state"] == "waiting" for x in s["sequences"]),
        "samples": lambda s: sum(x["state"] == "running" for x in s["sequences"]) == 3,
    }

    @pytest.mark.slow
    @pytest.mark.parametrize("is_stream", [False, True])
    @pytest.mark.parametrize("phase", ["prompt", "answer", "samples"])
    def test_disconnecting_while_a_request_runs_aborts_it(self, served, phase, is_stream):
        served.slow_seconds = 0.25 if phase == "prompt" else 0.02
        aborted = served.state()["metrics"]["aborted_requests"]
        n = 3 if phase == "samples" else 1
        self.leave(served, self.PHASES[phase], stream=is_stream, n=n)
        served.wait_until_empty()
        assert served.state()["metrics"]["aborted_requests"] == aborted + 1

    @pytest.mark.slow
    @pytest.mark.parametrize("is_stream", [False, True])
    @pytest.mark.parametrize("phase", ["waiting", "swapped"])
    def test_disconnecting_while_the_pool_is_full_frees_all_blocks(self, served, phase, is_stream):
        """Together, the prompts and their answers exceed the pool."""
        served.slow_seconds = 0.01
        prompts = [chr(97 + i) * 100 for i in range(9)]
        self.leave(served, self.PHASES[phase], prompt=prompts, max_tokens=150, stream=is_stream)
        served.wait_until_empty()

    @pytest.mark.slow
    def test_request_cancelled_before_the_engine_receives_it_is_dropped(self, served):
        """The request arrives while a step is being computed, and is cancelled before that step ends."""
        served.slow_seconds = 0.3
        served.hold = lambda state: state["num_sequences"] == 1
        first = threading.Thread(target=lambda: served.complete(max_tokens=3))
        first.start()
        served.wait_until(served.hold)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                HTTP.post(
                    f"{served.url}/v1/completions",
                    json={"model": "llama", "prompt": "abc", "max_tokens": 50},
                    timeout=httpx.Timeout(60, read=0.05),
                )
        served.hold = None
        first.join()


class TestFailures:
    def test_failed_step_is_computed_again(self, served):
        failed = served.engine.metrics.failed_steps
        served.num_failures = 2
        assert served.complete().choices[0].text == dense_answer(GREETING)
        assert served.engine.metrics.failed_steps == failed + 2

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_repeated_model_failures_end_the_requests(self, served, is_stream):
        served.num_failures = 3
        with pytest.raises(
            openai.APIError, match="RuntimeError: the model is out of order"
        ) as told:
            list(served.complete(stream=is_stream))
        assert is_stream or told.value.status_code == 500
        assert served.num_failures == 0
        served.wait_until_empty()
        assert served.complete().choices[0].text == dense_answer(GREETING)

    def test_failed_thread_is_reported(self, monkeypatch):
        with serving() as served:
            served.complete()

            def broken(*_):
                raise RuntimeError("no state")

            monkeypatch.setattr("kvcache_serve.server.engine_loop.snapshot", broken)
            for _ in range(2):  # the request that triggers the failure and the one after it
                with pytest.raises(openai.InternalServerError, match="no state"):
                    for _ in range(20):
                        served.complete(max_tokens=100)


def test_metrics_are_parsed_by_prometheus(served):
    served.complete()
    served.wait_until_empty()
    text = HTTP.get(f"{served.url}/metrics").text
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    state = served.state()
    assert found["kvcache_requests_total", "llama"] == state["metrics"]["requests"] > 0
    assert found["kvcache_generated_tokens_total", "llama"] == state["metrics"]["generated_tokens"]
    for tier, name in (("pool", "device"), ("host", "host")):
        states = state[tier]
        assert found["kvcache_blocks", "llama", name] == sum(states.values())
        assert (
            found["kvcache_cached_blocks", "llama", name]
            == states["cached"] + states["held_cached"]
        )
        assert found["kvcache_free_blocks", "llama", name] == states["cached"] + states["empty"]
    assert (
        found["kvcache_hit_tokens_total", "llama"] <= found["kvcache_query_tokens_total", "llama"]
    )
    assert found["kvcache_query_tokens_total", "llama"] > 0
    assert found["kvcache_sequences", "llama", "running"] == 0


class TestEvents:
    @pytest.mark.slow
    def test_router_receives_the_cached_blocks(self):
        pytest.importorskip("zmq")
        from kvcache_exchange.router_events import EventPublisher, EventSubscriber
        from kvcache_exchange.router_events.wire import wire_hash
        from tests.machinery.cache_user import cached, shown

        local = "tcp://127.0.0.1:0"
        publisher = EventPublisher(local, local, topic="kv@a@llama")
        with serving(publisher=publisher, enable_events=True) as served:
            places = publisher.endpoint, publisher.replay_endpoint
            with EventSubscriber(*places, topic="kv@a@llama") as reader:
                for i in range(12):  # more blocks than the pool has
                    served.complete(prompt=chr(97 + i) * 200, max_tokens=5)
                served.wait_until_empty()
                told = queue.SimpleQueue()
                served.loop.call(lambda engine: told.put(cached(engine.cache.manager)))
                expected = told.get(timeout=60)
                assert {medium for medium, _, _ in expected} == {"GPU", "CPU"}
                until = time.monotonic() + 60
                while not (reader.catch_up() and shown(reader.view) == expected):
                    assert time.monotonic() < until
                prompt = ByteTexts().encode("l" * 200)
                hashes = hash_blocks(prompt, 16)
                assert reader.view.num_leading([wire_hash(each.tobytes()) for each in hashes]) == 12
        with pytest.raises(RuntimeError, match="the publisher is closed"):
            publisher.publish([])

    @pytest.mark.slow
    def test_answers_continue_if_events_fail(self):
        pytest.importorskip("zmq")
        from kvcache_exchange.router_events import EventPublisher

        publisher = EventPublisher("tcp://127.0.0.1:0")
        publisher.close()
        with serving(publisher=publisher, enable_events=True) as served:
            assert served.complete().choices[0].text == dense_answer(GREETING)

    def test_events_require_a_manager_with_events(self):
        pytest.importorskip("zmq")
        from kvcache_exchange.router_events import EventPublisher

        engine = Engine(attach(dense("llama"), "1MiB", max_model_len=256))
        with (
            EventPublisher("tcp://127.0.0.1:0") as publisher,
            pytest.raises(ValueError, match="expected a manager with enable_events"),
        ):
            EngineLoop(engine, publisher)
        engine.model.detach()


class TestTokenizers:
    """Tokenizers like those of published checkpoints."""

    WORDS = ("<unk>", "<eos>", "<end>", "it", "'", "s", "do", "n't", ".", "here")

    def tokenizer(self, **options):
        tokenizers = pytest.importorskip("tokenizers")
        transformers = pytest.importorskip("transformers")
        words = {word: i for i, word in enumerate(self.WORDS)}
        own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=own, unk_token="<unk>", eos_token="<eos>", **options
        )

    @pytest.mark.parametrize("generation_ends,model_ends,expected", [
        ([2, 3], 4, (1, 2, 3, 4)), (2, None, (1, 2)), (None, [5, 1], (1, 5)),
        (None, None, (1,)), (-1, None, (1,)),
    ], ids=str)  # fmt: skip
    def test_answers_end_with_any_of_the_checkpoints_end_tokens(
        self, tmp_path, generation_ends, model_ends, expected
    ):
        model = dense("llama")
        before = model.generation_config.eos_token_id, model.config.eos_token_id
        model.generation_config.eos_token_id, model.config.eos_token_id = (
            generation_ends,
            model_ends,
        )
        model.name_or_path = str(tmp_path)
        try:
            assert command._texts(str(tmp_path), model).end_token_ids == tuple(
                each for each in expected if each != 1 or model_ends == [5, 1]
            )  # byte tokenizer
            self.tokenizer().save_pretrained(tmp_path)
            assert command._texts(str(tmp_path), model).end_token_ids == expected
        finally:
            model.generation_config.eos_token_id, model.config.eos_token_id = before
            model.name_or_path = ""

    @pytest.mark.parametrize("stops", [[], ["here"]])
    def test_stream_has_the_same_text_if_the_tokenizer_cleans_up_spaces(self, stops):
        tokenizer = self.tokenizer(clean_up_tokenization_spaces=True)
        answer = AnswerText(TokenizerTexts(tokenizer), stops)
        streamed = "".join(answer.add([token]) for token in (3, 4, 5, 6, 7, 9, 8)) + answer.end()
        assert streamed == answer.text == ("it ' s do n't " if stops else "it ' s do n't here .")


@pytest.mark.parametrize("options,expected", [
    (["no-such"], "MODEL is 'no-such': expected one of llama"),
    (["llama", "--budget", "much"], "budget is 'much': expected 1 bytes or more"),
    (["llama", "--budget", "2KiB"], "budget"),
    (["llama", "--max-model-len", "0"], "--max-model-len is '0': expected a whole number from 1"),
    (["llama", "--port", "65536"], "--port is '65536': expected a whole number from 0 to 65535"),
    (["llama", "--eviction", "random"], "--eviction is 'random': expected"),
    (
        ["llama", "--host-write", "through"],
        "--host-write is 'through': expected only with --host-b",
    ),
    (["llama", "--preemption", "pray"], "--preemption: invalid choice: 'pray'"),
    (["llama", "--device", "tpu"], "--device is 'tpu': expected cpu, cuda or cuda:N"),
    (["llama", "--host", "no.such.host.invalid"], "--host is 'no.such.host.invalid'"),
    (
        ["llama", "--events-topic", "kv@a@b"],
        "--events-topic is 'kv@a@b': expected only with --events",
    ),
    (
        ["llama", "--port", "0", "--events", "nowhere"],
        "--events: endpoint is 'nowhere': expected tcp://ADDRESS:PORT",
    ),
    ([], "the following arguments are required: MODEL"),
    (["llama", "--api-key", "key "], "--api-key: expected printable ASCII characters, without sp"),
    (["llama", "--api-key", "k", "--prefill"], "--api-key is given with --prefill: expected $K"),
    (["llama", "--trace", "otel"], "--trace: invalid choice: 'otel'"),
    (["llama", "--log-level", "loud"], "--log-level: invalid choice: 'loud'"),
], ids=lambda value: re.sub(r"\W+", "-", str(value))[:30])  # fmt: skip
def test_invalid_usage_prints_one_line_on_stderr(options, expected, capsys):
    assert main(["serve", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcache: ") and expected in error and error.count("\n") == 1


@pytest.mark.parametrize("variable,value,expected", [
    ("KVCACHE_API_KEY", "", "$KVCACHE_API_KEY: expected printable ASCII characters"),
    ("KVCACHE_API_KEY", " wxyz", "$KVCACHE_API_KEY: expected printable ASCII character"),
    ("KVCACHE_TRANSFER_SECRET", "", "$KVCACHE_TRANSFER_SECRET is empty: expected a secret"),
    ("KVCACHE_TRANSFER_SECRET", "\n", "$KVCACHE_TRANSFER_SECRET is empty: expected a secret"),
])  # fmt: skip
def test_blank_secrets_in_the_environment_are_rejected(
    variable, value, expected, monkeypatch, capsys
):
    """An empty variable, such as one of a missing file, must not switch protection off."""
    monkeypatch.setenv(variable, value)
    assert main(["serve", "llama"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcache: " + expected) and error.count("\n") == 1
    if value.strip():
        assert value not in error


@pytest.mark.parametrize("key", ["", "key ", "é"])
def test_key_that_no_header_can_carry_is_rejected(key):
    engine = Engine(attach(dense("llama", 2), "1MiB", max_model_len=64))
    with pytest.raises(ValueError, match="api_key: expected printable ASCII"):
        make_app(EngineLoop(engine), ByteTexts(), "llama", api_key=key)
    engine.model.detach()


def test_nvtx_needs_a_cuda_build_of_torch(capsys):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this build of torch includes NVTX")
    assert main(["serve", "llama", "--trace", "nvtx"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvcache: --trace nvtx: NVTX functions not installed")
    assert error.count("\n") == 1


def test_port_in_use_is_reported(served, capsys):
    port = served.url.rpartition(":")[2]
    assert main(["serve", "llama", "--port", port]) == 2
    assert (
        f"--port is {port}: expected an address and a port that are free" in capsys.readouterr().err
    )


def test_invalid_checkpoint_folder_is_rejected(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path)]) == 2
    assert "expected the folder of a checkpoint that transformers loads" in capsys.readouterr().err


class TestProcess:
    """The log that a server process writes to stderr."""

    @pytest.mark.slow
    def test_log_has_a_line_per_request_and_none_per_probe(self):
        with ServeProcess("--log-level", "info") as server:
            assert ask(server.port, "POST", "/v1/completions", b"{}").status == 400
            assert ask(server.port, "GET", "/health").status == 200
            assert ask(server.port, "GET", "/state").status == 200
        loading, serving_at = server.start.splitlines()
        assert loading.endswith(": building llama with random weights on cpu")
        assert serving_at.startswith("kvcache: serving llama at http://127.0.0.1:")
        lines = [line for line in server.log.splitlines() if "POST" in line]
        assert len(lines) == 1 and '"POST /v1/completions HTTP/1.1" 400' in lines[0]
        assert "/health" not in server.log and "/state" not in server.log

    @pytest.mark.slow
    def test_open_address_without_a_key_is_warned_about(self):
        with ServeProcess("--host", "0.0.0.0") as server:
            pass
        assert "warning: --host is 0.0.0.0 and no --api-key is given" in server.start
        assert "POST" not in server.log
        with ServeProcess("--host", "0.0.0.0", "--api-key", "k") as server:
            pass
        assert "warning" not in server.start


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    with playwright.sync_playwright() as running:
        try:
            opened = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.mark.slow
def test_page_shows_requests_and_cache_in_a_browser(served, browser):
    page = browser.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(served.url)
    page.wait_for_function("document.querySelectorAll('.tile').length === 6")
    served.slow_seconds = 0.02
    asking = threading.Thread(
        target=lambda: served.complete(prompt=[chr(97 + i) * 90 for i in range(9)], max_tokens=150)
    )
    asking.start()
    page.wait_for_function("document.querySelectorAll('#sequences tr').length === 9")
    page.wait_for_function("document.querySelector('#sequences').textContent.includes('swapped')")
    held = page.locator("#pool-key").inner_text()
    assert "held by sequences" in held and "cached, can be evicted" in held
    assert "KV" not in page.title() and page.title() == "kvcache"
    assert "Host tier" in page.locator("#host-title").inner_text()
    served.slow_seconds = 0.0
    asking.join()
    page.wait_for_function("document.querySelectorAll('#sequences tr').length === 0")
    tiles = page.locator("#tiles").inner_text()
    assert "hit rate of prompt tokens" in tiles
    assert str(served.state()["metrics"]["finished_requests"]) in tiles
    assert complaints == []
    page.close()


def test_reasons_of_misses_are_logged_and_counted(caplog):
    with serving(explain_misses=1) as served, caplog.at_level(logging.INFO, "kvcache.serve"):
        for _ in range(2):
            served.complete(prompt=GREETING, max_tokens=3)
        served.wait_until_empty()
        text = HTTP.get(f"{served.url}/metrics").text
    for reason, count in (("new", 32.0), ("tail", 2.0 * len(GREETING) - 64)):
        labels = f'model_name="llama",reason="{reason}"'
        assert f"kvcache_missed_tokens_total{{{labels}}} {count}" in text
    first, second = (
        each.getMessage() for each in caplog.records if "prompt tokens" in each.getMessage()
    )
    assert "32 not seen before" in first and "at the end of the prompt" in second
    assert "not seen before" not in second
