# SPDX-License-Identifier: Apache-2.0
"""The behavior that clients, routers and load generators expect from OpenAI-compatible servers,
including vLLM's.
"""

import threading

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("httpx")

import openai
from prometheus_client.parser import text_string_to_metric_families

import kvcache
from kvcache_serve.server import ByteTexts
from kvcache_serve_tests.test_serve import GREETING, HTTP, dense_answer, serving
from tests.machinery.dense_models import dense, greedy

KEY = "a secret of the tests"
CHAT = ({"role": "user", "content": "Who?"},)
CHAT_TEXT = "user: Who?\nassistant: "


@pytest.fixture(scope="module")
def served():
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def locked():
    """A server with an API key."""
    with serving(api_key=KEY) as running:
        yield running


def chat(served, **asked):
    asked = {"model": "llama", "temperature": 0, "max_tokens": 6, "messages": CHAT} | asked
    return served.client.chat.completions.create(**asked)


def post(served, path, body):
    return HTTP.post(served.url + path, json=body)


class TestEndpoints:
    def test_model_is_retrieved_by_name(self, served):
        assert [each.id for each in served.client.models.list()] == ["llama"]
        model = served.client.models.retrieve("llama")
        assert (model.id, model.max_model_len) == ("llama", 256)
        with pytest.raises(openai.NotFoundError) as told:
            served.client.models.retrieve("org/other")
        assert (told.value.code, told.value.param) == ("model_not_found", "model")

    def test_pages_that_need_the_internet_are_disabled(self, served):
        for path in ("/docs", "/redoc"):
            assert HTTP.get(served.url + path).status_code == 404


class TestFields:
    @pytest.mark.slow
    def test_ignore_eos_and_stop_token_ids_are_applied(self):
        token_ids = greedy(dense("llama"), ByteTexts().encode(GREETING), 30)
        end, stop = token_ids[10], token_ids[20]
        with serving(ByteTexts([end])) as served:
            for more, last in (({}, end), ({"ignore_eos": True}, None)):
                for stops in ([], [stop]):
                    extra = more | {"stop_token_ids": stops}
                    answer = served.complete(max_tokens=30, extra_body=extra)
                    ends = {last, *stops} - {None}
                    wanted = next((i for i, t in enumerate(token_ids) if t in ends), None)
                    assert answer.choices[0].finish_reason == ("stop" if ends else "length")
                    assert answer.choices[0].text == ByteTexts().decode(token_ids[:wanted])

    def test_fields_without_effect_are_accepted(self, served):
        answer = chat(
            served,
            **{"response_format": {"type": "text"}, "parallel_tool_calls": False, "user": "me"},
            **{"metadata": {"a": "b"}, "tool_choice": "none", "stream": True},
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            stream_options={"include_usage": True},
            extra_body={"top_k": -1, "min_p": 0},
        )
        text = "".join(piece.choices[0].delta.content for piece in answer if piece.choices)
        assert text == dense_answer(CHAT_TEXT, 6)

    def test_usage_is_in_each_event_if_requested(self, served):
        options = {"include_usage": True, "continuous_usage_stats": True}
        pieces = list(served.complete(stream=True, stream_options=options))
        counts = [piece.usage.completion_tokens for piece in pieces]
        assert counts == sorted(counts) and counts[-1] == 12 and len(counts) > 5

    @pytest.mark.parametrize("asked,param,code", [
        ({"response_format": {"type": "json_object"}}, "response_format.type", "unsupported_value"),
        ({"tool_choice": "auto"}, "tool_choice", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"frequency_penalty": 1}, "frequency_penalty", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ], ids=str)  # fmt: skip
    def test_unsupported_configurations_and_requests_are_reported(self, served, asked, param, code):
        with pytest.raises(openai.BadRequestError, match="not supported by this server") as told:
            chat(served, **asked)
        assert (told.value.param, told.value.code) == (param, code)
        assert told.value.type == "invalid_request_error"


class TestLogprobs:
    def test_log_probabilities_cover_all_tokens_even_if_a_stop_text_hides_some(self, served):
        stop = dense_answer(GREETING, 40)[10:13]
        answer = served.complete(logprobs=0, max_tokens=40, stop=stop)
        assert answer.choices[0].finish_reason == "stop"
        logprobs = answer.choices[0].logprobs
        assert len(logprobs.tokens) == answer.usage.completion_tokens
        assert logprobs.top_logprobs == [{}] * len(logprobs.tokens)

    def test_top_logprobs_need_logprobs(self, served):
        with pytest.raises(openai.BadRequestError, match="only if logprobs is true") as told:
            chat(served, top_logprobs=2)
        assert told.value.param == "top_logprobs"


class TestErrors:
    @pytest.mark.parametrize("asked,kind,param,code", [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
        ({"prompt": "x" * 250}, openai.BadRequestError, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 300}, openai.BadRequestError, "prompt", "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"temperature": "1"}, openai.BadRequestError, "temperature", "invalid_type"),
        ({"prompt": [5, 600]}, openai.BadRequestError, "prompt", "invalid_value"),
    ], ids=str)  # fmt: skip
    def test_client_raises_the_expected_error_classes(self, served, asked, kind, param, code):
        with pytest.raises(kind) as told:
            served.complete(**asked)
        assert (told.value.param, told.value.code) == (param, code)
        assert told.value.body.keys() == {"message", "type", "param", "code"}

    def test_error_names_a_missing_field(self, served):
        error = post(served, "/v1/completions", {"model": "llama"}).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


class TestApiKey:
    def test_requests_require_the_api_key(self, locked):
        client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0)
        assert client.models.retrieve("llama").id == "llama"
        with pytest.raises(openai.AuthenticationError) as told:
            locked.complete()
        assert (told.value.code, told.value.type) == ("invalid_api_key", "invalid_request_error")
        assert KEY not in told.value.message

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/llama"])
    @pytest.mark.parametrize("header", [None, "Basic x", f"Bearer {KEY}x"])
    def test_other_headers_are_rejected(self, locked, path, header):
        headers = {} if header is None else {"authorization": header}
        answer = HTTP.get(locked.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_api_key_is_checked_before_the_body(self, locked, path):
        assert post(locked, path, {}).status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        assert HTTP.post(locked.url + path, json={}, headers=headers).status_code == 400

    def test_probes_require_no_api_key(self, locked):
        assert HTTP.get(f"{locked.url}/health").content == b""
        assert HTTP.get(f"{locked.url}/version").json() == {"version": kvcache.__version__}
        for path in ("/health", "/version", "/metrics", "/state", "/"):
            assert HTTP.get(locked.url + path).status_code == 200


class TestMetrics:
    def samples(self, served):
        text = HTTP.get(f"{served.url}/metrics").text
        return {
            (sample.name, sample.labels.get("le")): sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def test_histograms_count_requests_and_tokens(self):
        with serving() as served:
            served.complete(max_tokens=5, n=2)
            served.complete(prompt=["a", "b"], max_tokens=3)
            served.wait_until_empty()
            found = self.samples(served)
        value = lambda name, le=None: found[f"kvcache_{name}", le].value  # noqa: E731
        for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
            assert value(f"{name}_seconds_count") == 3
        assert value("inter_token_latency_seconds_count") == 2 * 4 + 2 * 2
        assert value("request_prompt_tokens_sum") == len(GREETING) + 2
        assert value("request_generation_tokens_sum") == 2 * 5 + 2 * 3
        assert value("request_generation_tokens_bucket", "4.0") == 2
        first = value("time_to_first_token_seconds_sum")
        assert 0 < value("request_queue_time_seconds_sum") <= first
        assert first < value("e2e_request_latency_seconds_sum")
        assert {sample.labels["model_name"] for sample in found.values()} == {"llama"}

    @pytest.mark.slow
    def test_load_metric_counts_running_and_waiting_requests(self):
        with serving(max_num_seqs=2) as served:
            served.hold = lambda state: state["num_sequences"] == 2
            client = served.client.with_options(timeout=30)
            streams = [client.completions.create(model="llama", prompt="a" * 40, stream=True)]
            threads = [threading.Thread(target=served.complete) for _ in range(3)]
            for thread in threads:
                thread.start()
            served.wait_until(lambda _: served.admission.num_waiting == 2)
            served.wait_until(lambda state: state["pool"]["held"] > 0)
            found = self.samples(served)
            served.hold = None
            for thread in threads:
                thread.join()
            streams[0].close()
            served.wait_until_empty()
            after = self.samples(served)
        value = lambda found, name: found[f"kvcache_{name}", None].value  # noqa: E731
        assert value(found, "requests_running") + value(found, "requests_waiting") == 4
        assert value(found, "requests_waiting") >= 2
        assert 0 < value(found, "usage_ratio") <= 1
        assert [value(after, f"requests_{x}") for x in ("running", "waiting")] == [0, 0]
        assert value(after, "usage_ratio") == 0
