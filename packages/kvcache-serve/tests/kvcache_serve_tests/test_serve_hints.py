# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("httpx")

from prometheus_client.parser import text_string_to_metric_families

from kvcache_serve_tests.test_serve import GREETING, HTTP, dense_answer, serving

PROMPT = (GREETING * 4)[:101]


@pytest.fixture(scope="module")
def served():
    with serving(eviction="priority", enable_events=True) as running:
        yield running


def post(served, path="/v1/kv_hints", **body):
    return HTTP.post(served.url + path, json={"model": "llama"} | body)


def hint(served, *hints):
    answer = post(served, prompt=PROMPT, kv_hints=list(hints))
    assert answer.status_code == 200, answer.text
    return answer.json()["receipts"]


def complete(served, **body):
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    return post(served, "/v1/completions", **asked | body)


def test_hint_prefetches_what_was_moved_to_the_host(served):
    answer = complete(served).json()
    for first in "abc":  # other prompts, which fill the device
        complete(served, prompt=first * 240)
    (receipt,) = hint(served, {"intent": "prefetch"})
    assert receipt == {
        **{"intent": "prefetch", "status": "done"},
        **{"num_tokens": 96, "num_asked_tokens": 101},
    }
    again = complete(served).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    text = dense_answer(PROMPT, 4)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"] == text
    served.wait_until(lambda state: state["hints"]["used_tokens"] == 96)
    families = text_string_to_metric_families(HTTP.get(f"{served.url}/metrics").text)
    values = {
        (sample.name, sample.labels.get("intent"), sample.labels.get("status")): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["kvcache_hint_receipts_total", "prefetch", "done"] == 1
    assert values["kvcache_hint_prefetched_tokens_total", None, None] == 96
    assert values["kvcache_hint_used_tokens_total", None, None] == 96
    served.wait_until_empty()


def test_hints_that_cannot_be_carried_out_are_refused_one_by_one(served):
    receipts = hint(served, {"intent": "pin", "num_tokens": 9000}, {"intent": "prefetch"})
    assert receipts[0]["status"] == "refused"
    assert receipts[0]["reason"] == "num_tokens is 9000: expected at most 101, the number of tokens"
    assert receipts[1]["status"] == "done"


@pytest.mark.parametrize(("value", "message", "param"), [
    ([{}], "kv_hints[0]: intent is missing", "kv_hints[0]"),
    (
        [{"intent": "pin"}, {"intent": "demote"}],
        "kv_hints[1]: intent is 'demote': expected one of prefetch, pin",
        "kv_hints[1]",
    ),
    (
        [{"intent": "pin", "color": 3}],
        "kv_hints[0]: 'color' is unknown: expected one of intent, num_tokens, session,",
        "kv_hints[0]",
    ),
    ([{"intent": "pin"}] * 33, "kv_hints: List should have at most 32 items", "kv_hints"),
    (5, "kv_hints: Input should be a valid list", "kv_hints"),
])  # fmt: skip
def test_invalid_hints_are_rejected(served, value, message, param):
    answer = post(served, prompt=PROMPT, kv_hints=value)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(message)


def test_hints_need_one_prompt(served):
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        error = post(served, kv_hints=[], **wrong).json()["error"]
        assert error["param"] == "prompt" and "expected exactly one of the two" in error["message"]
    assert "prompt is 3" in post(served, kv_hints=[], prompt=3).json()["error"]["message"]


def test_hints_of_untrusted_clients_are_rejected():
    with serving(trust_clients=False) as served:
        answer = post(served, prompt=PROMPT, kv_hints=[{"intent": "pin"}])
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("kv_hints is given: expected none")


def test_chats_accept_hints(served):
    chat = [{"role": "user", "content": PROMPT[:80]}]
    post(served, "/v1/chat/completions", messages=chat, max_tokens=2)
    answer = post(served, messages=chat, kv_hints=[{"intent": "prefetch"}]).json()
    assert answer["receipts"][0]["status"] == "done"
