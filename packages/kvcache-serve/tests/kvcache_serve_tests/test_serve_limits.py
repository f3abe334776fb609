# SPDX-License-Identifier: Apache-2.0
"""Rejected requests, time limits for clients, and server shutdown."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("httpx")

import openai

from kvcache_serve.server import ByteTexts, Limits
from kvcache_serve.server.admission import Admission, Busy
from kvcache_serve.server.body_reader import parsed
from kvcache_serve.server.engine_loop import EngineError
from kvcache_serve.server.errors import AskError
from kvcache_serve.server.request_fields import AskedChat, AskedCompletion
from kvcache_serve.server.texts import AnswerText
from kvcache_serve_tests.test_serve import GREETING, HTTP, dense_answer, serving

BODY = {"model": "llama", "prompt": GREETING, "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with serving(limits=Limits(max_waiting=3), trust_clients=False, max_num_seqs=4) as running:
        yield running


@pytest.fixture(scope="module")
def impatient():
    """A server that disconnects slow clients after short timeouts. On a busy machine, any client
    may be too slow for it.
    """
    limits = Limits(request_seconds=0.6, stall_seconds=0.6, keep_alive_seconds=30)
    with serving(limits=limits) as running:
        yield running


def post(served, path="/v1/completions", **asked):
    content = json.dumps({"prompt": GREETING} | BODY | asked if "completions" in path else asked)
    return HTTP.post(served.url + path, content=content, timeout=30)


def post_raw(served, content, path="/v1/completions"):
    return HTTP.post(served.url + path, content=content, timeout=30)


def message_of(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


class TestBodies:
    @pytest.mark.parametrize("asked,expected", [
        ({"prompt": "\ud800"}, "prompt is"),
        ({"prompt": ["fine", "\udfff"]}, "prompt[1] is"),
        ({"stop": "\ud800"}, "stop is"),
        ({"stop": ["a", "b\udc00"]}, "stop[1] is"),
        ({"user": "\ud800"}, "user is"),
        ({"model": "\ud800"}, "model is"),
        ({"\ud800": 1}, "a name in the body is"),
        ({"stream_options": {"\udc00": 1}}, "a name in stream_options is"),
    ])  # fmt: skip
    def test_errors_name_the_field_with_a_lone_surrogate(self, served, asked, expected):
        message = message_of(post(served, **asked))
        assert message.startswith(expected) and "expected text that UTF-8 can hold" in message

    @pytest.mark.parametrize("content", ["[" * 500 + "]" * 500, "[" * 10**4, '{"prompt":' * 400])
    def test_deep_bodies_are_rejected(self, served, content):
        message_of(post_raw(served, content))
        nested = json.dumps(BODY | {"prompt": 0}).replace(": 0", ": " + "[" * 90 + "]" * 90, 1)
        assert "nests too deeply" in message_of(post_raw(served, nested))

    def test_body_of_many_bytes_is_rejected(self, served):
        most = 2**16 + 32 * 256
        assert f"expected at most {most}" in message_of(post(served, user="x" * most), 413)
        assert post(served, user="x" * (most - 500)).status_code == 200

    def test_long_text_is_rejected_before_it_is_tokenized(self, served, monkeypatch):
        seen = []
        monkeypatch.setattr(ByteTexts, "encode", lambda _, text: seen.append(text) or [1])
        for prompt, name in (("x" * 257, "prompt"), (["a", "x" * 257], "prompt[1]")):
            message = message_of(post(served, prompt=prompt))
            assert message.startswith(f"{name} has 257 characters: expected at most 256")
        chat = {"model": "llama", "messages": [{"role": "user", "content": "x" * 257}]}
        answer = HTTP.post(f"{served.url}/v1/chat/completions", json=chat)
        assert message_of(answer).startswith("messages has 257 characters: expected at most 256")
        assert seen == []

    def test_number_of_prompts_in_a_body_is_limited(self, served):
        message = message_of(post(served, prompt=[[1]] * 65, n=2))
        assert message.startswith("prompt has 65 entries, and n is 2: expected at most 128 choices")
        answer = post(served, prompt=[[1]] * 64, n=2, max_tokens=1)
        assert len(answer.json()["choices"]) == 128

    @pytest.mark.parametrize("stop,expected", [
        (["z"] * 17, "stop has 17 strings: expected at most 16"),
        ("z" * 129, "stop has a string of 129 characters: expected at most 128"),
        ([1], "stop"),
    ], ids=["many", "long", "number"])  # fmt: skip
    def test_stop_texts_are_limited(self, served, stop, expected):
        assert message_of(post(served, stop=stop)).startswith(expected)


class TestFields:
    """Valid and invalid field values, without a server."""

    @staticmethod
    def refusal(body, kind=AskedCompletion):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with pytest.raises(AskError) as told:
            parsed(content, kind)
        return str(told.value)

    @pytest.mark.parametrize("asked", [
        *({"max_tokens": value} for value in (True, "5", "1_0", 5.0)),
        *({"temperature": value} for value in (True, "0", "nan")),
        *({"top_p": True}, {"top_p": " 0.5 "}, {"top_k": True}, {"seed": True}, {"seed": "7"}),
        *({"n": value} for value in (True, "2", 2.0)),
        *({"stream": value} for value in ("off", "no", 0, 1)),
        *({"best_of": True}, {"best_of": "1"}, {"priority": "1"}, {"user": 5}, {"model": 5}),
    ], ids=str)  # fmt: skip
    def test_types_are_not_converted(self, asked):
        (name,) = asked
        assert self.refusal(BODY | asked).startswith(f"{name}: Input should be")

    def test_best_of_must_equal_the_number_of_returned_samples(self):
        for n, best_of in ((3, 1), (1, 3)):
            message = self.refusal(BODY | {"n": n, "best_of": best_of})
            assert message == f"best_of is {best_of}: expected {n}, the value of n"
        assert parsed(json.dumps(BODY | {"n": 3, "best_of": 3}).encode(), AskedCompletion).n == 3

    @pytest.mark.parametrize("message,expected", [
        ({"name": "bob"}, "messages[0].name is 'bob': not supported by this server"),
        (
            {"tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls is [{'id': '1'}]: not supported by this server",
        ),
        ({"content": None}, "messages[0].content: Input should be a text or a list of text parts"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "x": 1}]},
            "messages[0].content[1].x is 1: not supported by this server",
        ),
        ({"content": ["a"]}, "messages[0].content[0] is 'a': expected an object"),
        ({"content": [{"type": "image_url", "text": ""}]}, "messages[0].content[0].type: Input"),
    ])  # fmt: skip
    def test_no_field_of_a_message_is_dropped(self, message, expected):
        messages = [{"role": "user", "content": "x"} | message]
        assert self.refusal({"model": "llama", "messages": messages}, AskedChat).startswith(
            expected
        )

    @pytest.mark.parametrize("asked,expected", [
        (
            {"stream": True, "stream_options": {"include_usage": True, "x": 1}},
            "stream_options.x is 1: not supported by this server",
        ),
        ({"stream": True, "stream_options": 5}, "stream_options is 5: expected an object"),
        ({"stream_options": {}}, "stream_options is given: expected it only if stream"),
        ({"stop": 5}, "stop: Input should be a text or a list of texts"),
        ({"stop": ["a", 5]}, "stop[1]: Input should be"),
        ({"model": None}, "model: Input should be"),
    ], ids=str)  # fmt: skip
    def test_errors_name_the_field(self, asked, expected):
        assert self.refusal(BODY | asked).startswith(expected)

    def test_two_token_limits_of_a_chat_must_agree(self):
        chat = {"model": "llama", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        message = self.refusal(chat | {"max_completion_tokens": 9}, AskedChat)
        assert message.startswith("max_completion_tokens is 9 and max_tokens is 5: expected only")
        for limit in (5, None):
            parsed(json.dumps(chat | {"max_completion_tokens": limit}).encode(), AskedChat)

    @pytest.mark.parametrize("value", ["4", "9" * 5000], ids=["small", "huge"])
    def test_duplicate_field_names_are_rejected(self, value):
        content = json.dumps(BODY)[:-1] + f', "max_tokens": {value}}}'
        expected = "the body has 'max_tokens' twice in one object: expected each name once"
        assert self.refusal(content.encode()) == expected


class TestHttp:
    @pytest.mark.parametrize("coding", ["gzip", "GZIP", "identity, br"])
    def test_compressed_body_is_rejected(self, served, coding):
        answer = HTTP.post(
            f"{served.url}/v1/completions", json=BODY, headers={"content-encoding": coding}
        )
        coding = coding.removeprefix("identity, ")
        assert message_of(answer, 415) == f"content-encoding is '{coding}': expected identity"
        assert answer.headers["accept-encoding"] == "identity"


class TestTrust:
    @pytest.mark.parametrize("asked", [{"cache_salt": "a"}, {"priority": -1}])
    def test_clients_are_not_trusted_by_default(self, served, asked):
        (name,) = asked
        message = message_of(post(served, **asked))
        assert message.startswith(f"{name} is given: expected none") and "--trust" in message


class TestAnswers:
    @pytest.mark.parametrize("is_stream", [False, True])
    def test_failed_row_is_an_error_only_for_its_own_client(self, served, is_stream):
        forward = served.forward

        def spoilt(batch):
            logits = forward(batch).clone()
            ends = batch.num_logits.cumsum()
            for i, length in enumerate(batch.seq_lens):
                if length > 90:
                    logits[ends[i] - batch.num_logits[i] : ends[i]] = float("nan")
            return logits

        served.forward = spoilt
        other = []
        thread = threading.Thread(target=lambda: other.append(post(served, max_tokens=12)))
        try:
            thread.start()
            with pytest.raises(openai.APIError, match="are NaN or inf"):
                asked = {"prompt": "x" * 88, "max_tokens": 20, "stream": is_stream}
                list(served.complete(**asked))
            thread.join()
        finally:
            served.forward = forward
        assert other[0].json()["choices"][0]["text"] == dense_answer(GREETING)

    @pytest.mark.slow
    def test_excess_waiting_requests_are_rejected(self, served):
        served.slow_seconds = 0.2
        asked = {"max_tokens": 60}
        threads = [threading.Thread(target=lambda: post(served, **asked)) for _ in range(7)]
        try:
            for thread in threads:
                thread.start()
            served.wait_until(lambda _: len(served.admission._first) == 3)
            answer = post(served)
            assert "3 requests are waiting" in message_of(answer, 429)
            assert answer.headers["retry-after"] == "1"
        finally:
            served.slow_seconds = 0.0
            for thread in threads:
                thread.join()
        assert post(served).status_code == 200

    @pytest.mark.slow
    def test_request_with_many_prompts_does_not_delay_others(self, served):
        forward, may_go_on = served.forward, served.may_go_on
        # For each step, whether the batch has the other request, which is recognized by its longer
        # prompt.
        steps = []

        def logged(batch):
            steps.append(any(length > 40 for length in batch.seq_lens))
            return forward(batch)

        asked = {"prompt": [[i, 1] for i in range(24)], "max_tokens": 30}
        many = threading.Thread(target=lambda: post(served, **asked))
        served.forward = logged
        # Pause the engine while it serves the many prompts, until the other request has been
        # admitted.
        served.hold = lambda _: len(steps) == 10
        served.may_go_on = lambda: served.admission._num_requests == 2
        try:
            many.start()
            served.wait_until(lambda _: len(steps) == 10)
            assert post(served, max_tokens=3).status_code == 200
        finally:
            served.hold = None
            many.join()
            served.forward, served.may_go_on = forward, may_go_on
        last = max(i for i, has_short in enumerate(steps) if has_short)
        assert last < 40 and len(steps) > 6 * 30


@contextmanager
def connected(served):
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(25)  # shorter than any of the default limits
        yield connection


def rest_of(connection):
    """Receive until the server closes the connection, and return the data."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def awaited(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"


class TestSlowClients:
    @pytest.mark.slow
    @pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD, HEAD + b"\r\n{"])
    def test_connection_with_half_a_request_is_closed(self, impatient, sent):
        started = time.monotonic()
        with connected(impatient) as connection:
            connection.sendall(sent)
            rest_of(connection)
        assert 0.3 < time.monotonic() - started < 25

    def test_connection_that_sends_single_bytes_is_closed(self, impatient):
        with connected(impatient) as connection:
            with pytest.raises(OSError):
                for _ in range(500):
                    connection.sendall(b"G")
                    time.sleep(0.05)
            rest_of(connection)

    @pytest.mark.slow
    def test_answer_may_take_longer_than_the_request_time_limit(self, impatient):
        impatient.slow_seconds = 0.05
        answer = post(impatient, max_tokens=30)
        impatient.slow_seconds = 0.0
        assert answer.json()["usage"]["completion_tokens"] == 30

    @pytest.mark.slow
    def test_client_that_does_not_read_is_disconnected(self):
        body = json.dumps(BODY | {"max_tokens": 200, "stream": True, "prompt": [[5]] * 40})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        limits = Limits(stall_seconds=0.5, grace_seconds=0.1)
        with serving(limits=limits) as running, socket.socket() as connection:
            running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(running.listener.getsockname())
            connection.sendall((head + body).encode())
            running.wait_until(lambda state: state["metrics"]["aborted_requests"] > 0, 60)
            running.wait_until_empty()

    def test_burst_of_connections_closes_the_earliest_ones(self):
        limits = Limits(max_connections=5, request_seconds=60, grace_seconds=0.1)
        with serving(limits=limits) as running:
            where = running.listener.getsockname()
            silent = [socket.create_connection(where)]
            awaited(lambda: len(running.connections) == 1)
            (first,) = running.connections
            may_go_on = threading.Event()
            first.loop.call_soon_threadsafe(may_go_on.wait, 60)
            silent += [socket.create_connection(where) for _ in range(19)]
            last = {each.getsockname() for each in silent[-5:]}
            may_go_on.set()
            awaited(lambda: {each.client for each in list(running.connections)} == last)
            for each in silent[:-5]:
                each.settimeout(30)
                assert rest_of(each) == b""
            for each in silent:
                each.close()


class TestShutdown:
    def stream(self, served, got, **asked):
        with HTTP.stream(
            "POST", f"{served.url}/v1/completions", json=BODY | asked, timeout=30
        ) as answer:
            got.extend(answer.iter_lines())

    @pytest.mark.slow
    @pytest.mark.parametrize("grace,is_whole", [(20, True), (0.3, False)])
    def test_streams_finish_or_end_with_an_error(self, grace, is_whole):
        asked = {"max_tokens": 60 if is_whole else 200, "stream": True}
        with serving(limits=Limits(grace_seconds=grace)) as running:
            running.slow_seconds, got = 0.02, []
            running.hold = lambda state: state["num_sequences"] == 1
            thread = threading.Thread(target=self.stream, args=(running, got), kwargs=asked)
            thread.start()
            running.wait_until(running.hold)
            running.hold = None
            running.stop()
            thread.join()
            assert running.engine.num_unfinished == 0
        lines = [line for line in got if line]
        assert (lines[-1] == "data: [DONE]") == is_whole
        if not is_whole:
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert "the server is shutting down" in error["message"]
            assert error["type"] == "server_error" and error["code"] == "service_unavailable"

    @pytest.mark.slow
    def test_new_requests_get_503_while_answers_finish(self):
        with serving(limits=Limits(grace_seconds=30)) as running:
            running.slow_seconds, got = 0.02, []
            running.hold = lambda state: state["num_sequences"] == 1
            asked = {"max_tokens": 60, "stream": True}
            thread = threading.Thread(target=self.stream, args=(running, got), kwargs=asked)
            thread.start()
            running.wait_until(running.hold)
            stopping = threading.Thread(target=running.stop)
            stopping.start()
            awaited(lambda: HTTP.get(f"{running.url}/health").status_code == 503)
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", {})):
                answer = HTTP.post(running.url + path, json=body)
                assert "the server is shutting down" in message_of(answer, 503)
                assert answer.json()["error"]["code"] == "service_unavailable"
            running.hold = None
            stopping.join()
            thread.join()
        assert [line for line in got if line][-1] == "data: [DONE]"

    def test_incomplete_request_does_not_delay_shutdown(self):
        with serving(limits=Limits(grace_seconds=0.2)) as running, connected(running) as connection:
            connection.sendall(HEAD + b"\r\n{")
            time.sleep(0.2)
            started = time.monotonic()
            running.stop()
            assert time.monotonic() - started < 20  # a client may take 30 s to send a request

    def test_requests_without_streaming_get_503_at_shutdown(self):
        with serving(limits=Limits(grace_seconds=0.2), max_num_seqs=1) as running:
            running.slow_seconds, answers = 0.02, []
            threads = [
                threading.Thread(target=lambda: answers.append(post(running, max_tokens=200)))
                for _ in range(3)  # one request runs, and two wait
            ]
            running.hold = lambda state: state["num_sequences"] == 1
            for thread in threads:
                thread.start()
            running.wait_until(running.hold)
            running.wait_until(lambda _: len(running.admission._first) == 2)
            running.hold = None
            running.stop()
            for thread in threads:
                thread.join()
        assert len(answers) == 3
        for answer in answers:
            assert "the server is shutting down" in message_of(answer, 503)


def with_admission(test):
    """Run a coroutine with an admission of 4 rows and at most 3 waiting requests as a test."""
    return lambda self: asyncio.run(asyncio.wait_for(test(self, Admission(4, 3)), 10))


class TestAdmission:
    """Admission of requests to a limited number of rows."""

    def hold(self, admission, release, count=1, *, is_first=True, priority=0, log=None, name=None):
        """Start a task that logs its name and then holds rows until `release`."""

        async def holding():
            async with admission.rows(count, is_first=is_first, priority=priority):
                if log is not None:
                    log.append(name)
                await release.wait()

        return asyncio.create_task(holding())

    @with_admission
    async def test_further_prompts_use_at_most_half_of_the_rows_without_other_requests(self, _):
        release, log = asyncio.Event(), []
        hold = partial(self.hold, Admission(8, 3), release, log=log)
        tasks = [hold(name="first")]
        tasks += [hold(name=f"further {i}", is_first=False) for i in range(3)]
        tasks += [hold(name="other")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sorted(log) == ["first", "further 0", "further 1", "further 2", "other"]
        release.set()
        await asyncio.gather(*tasks)

    @with_admission
    async def test_further_prompts_use_at_most_an_eighth_of_the_rows_with_two_other_requests(
        self, _
    ):
        admission, release, log = Admission(16, 3), asyncio.Event(), []
        hold = partial(self.hold, admission, release, log=log)
        tasks = [hold(name="first"), hold(name="other")]
        await asyncio.sleep(0)
        tasks += [hold(name=f"further {i}", is_first=False) for i in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sorted(log) == ["first", "other"]
        release.set()
        await asyncio.gather(*tasks)
        assert len(log) == 5
        async with admission.rows(16, is_first=True, priority=0):
            pass  # all rows are free again

    @with_admission
    async def test_smaller_priority_is_served_first(self, admission):
        release, log = asyncio.Event(), []
        first = self.hold(admission, release, 4)
        await asyncio.sleep(0)
        tasks = [self.hold(admission, release, 4, priority=p, log=log, name=p) for p in (2, 1, 3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="3 requests are waiting: expected fewer than 3"):
            admission.check()
        release.set()
        await asyncio.gather(first, *tasks)
        assert log == [1, 2, 3]

    @with_admission
    async def test_all_waiting_requests_receive_the_error(self, admission):
        release = asyncio.Event()
        tasks = [self.hold(admission, release, 4) for _ in range(3)]
        await asyncio.sleep(0)
        error = EngineError("it is over", 503)
        admission.close(error)
        release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results == [None, error, error]
        with pytest.raises(EngineError, match="it is over"):
            admission.check()


class TestStopTexts:
    @pytest.mark.parametrize("seed", range(20))
    def test_first_complete_stop_text_matches_a_plain_search(self, seed):
        import random

        rng = random.Random(seed)
        word = lambda most: "".join(rng.choice("abé") for _ in range(rng.randint(1, most)))  # noqa: E731
        stops, text = [word(6) for _ in range(rng.randint(1, 5))], word(40)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        wanted = text
        if ends:
            first = min(ends)
            longest = max(len(s) for s in stops if text[:first].endswith(s))
            wanted = text[: first - longest]
        for size in (1, 2, 7, 100):
            answer, shown, tokens = AnswerText(ByteTexts(), stops), "", ByteTexts().encode(text)
            for i in range(0, len(tokens), size):  # also inside the two bytes of "é"
                shown += answer.add(tokens[i : i + size])
            shown += answer.end()
            assert shown == answer.text == wanted
            assert answer.is_stopped == bool(ends)


class TestFraming:
    """A request whose end can be read in two ways is rejected, and its connection is closed."""

    LATER = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    def exchange(self, served, version, headers, body):
        lines = [f"POST /v1/completions {version}".encode(), b"Host: x", *headers]
        data = b"\r\n".join(lines) + b"\r\n\r\n" + body + self.LATER
        with socket.create_connection(served.listener.getsockname()) as connection:
            connection.settimeout(30)
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    @pytest.mark.parametrize("version,headers,body,message", [
        ("HTTP/1.1", [b"Content-Length: 2", b"Content-Length: 2"], b"{}", b"has several values"),
        ("HTTP/1.1", [b"Content-Length: 2", b"content-length: 40"], b"{}", b"has several values"),
        ("HTTP/1.1", [b"Content-Length: 2, 2"], b"{}", b"has several values"),
        (
            *("HTTP/1.1", [b"Content-Length: 4", b"Transfer-Encoding: chunked"]),
            *(b"0\r\n\r\n", b"transfer-encoding is given with content-length"),
        ),
        (
            *("HTTP/1.1", [b"tRANSFER-eNCODING: chunked", b"content-length: 4"]),
            *(b"0\r\n\r\n", b"transfer-encoding is given with content-length"),
        ),
        ("HTTP/1.0", [b"Transfer-Encoding: chunked"], b"0\r\n\r\n", b"with HTTP/1.0"),
        ("HTTP/1.1", [b"X: a", b" Content-Length: 4", b"Content-Length: 2"], b"{}", b"second line"),
        ("HTTP/1.1", [b"Transfer-Encoding:", b"\tchunked"], b"0\r\n\r\n", b"second line"),
        (
            "HTTP/1.1",
            [b"Transfer-Encoding: identity", b"Content-Length: 2"],
            b"{}",
            b"is given with",
        ),
        ("HTTP/1.1", [b"Transfer-Encoding: identity"], b"", b"Invalid HTTP request"),
        ("HTTP/1.1", [b"Transfer-Encoding: gzip, chunked"], b"0\r\n\r\n", b"Invalid HTTP request"),
        ("HTTP/1.1", [b"Content-Length : 2"], b"{}", b"Invalid HTTP request"),
        ("HTTP/1.1", [b"Content-Length: +2"], b"{}", b"Invalid HTTP request"),
    ], ids=lambda value: value.decode() if isinstance(value, bytes) else None)  # fmt: skip
    def test_ambiguous_request_is_rejected(self, served, version, headers, body, message):
        answer = self.exchange(served, version, headers, body)
        assert answer.startswith(b"HTTP/1.1 400 ") and message in answer
        assert answer.count(b"HTTP/1.1 ") == 1 and b'"version"' not in answer

    def test_ambiguous_request_after_another_one_is_rejected(self, served):
        both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        second = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + both
        answer = self.exchange(served, "HTTP/1.1", [b"Content-Length: 2"], b"{}" + second)
        assert answer.count(b"HTTP/1.1 ") == 2 and b'"version"' not in answer

    @pytest.mark.parametrize("headers,body", [
        ([b"Content-Length: 2"], b"{}"),
        ([b"Transfer-Encoding: chunked"], b"2\r\n{}\r\n0\r\n\r\n"),
    ])  # fmt: skip
    def test_unambiguous_requests_share_a_connection(self, served, headers, body):
        answer = self.exchange(served, "HTTP/1.1", headers, body)
        assert answer.count(b"HTTP/1.1 ") == 2 and b'"version"' in answer


@pytest.mark.parametrize("options,expected", [
    ({"max_body_bytes": 0}, "max_body_bytes is 0: expected 1"),
    ({"max_choices": 1.5}, "max_choices is 1.5: expected an integer"),
    ({"grace_seconds": float("nan")}, "grace_seconds is nan: expected finite seconds"),
    ({"request_seconds": "1"}, "request_seconds is '1': expected seconds"),
    ({"max_waiting": -1}, "max_waiting is -1: expected 1"),
])  # fmt: skip
def test_invalid_limits_are_reported(options, expected):
    with pytest.raises((TypeError, ValueError)) as told:
        Limits(**options)
    assert str(told.value).startswith(expected)
