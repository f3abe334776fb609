# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP: as a field of a completion, and at an endpoint of their own."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("httpx")

from prometheus_client.parser import text_string_to_metric_families

from tests.server.test_serve import GREETING, HTTP, dense_answer, serving

PROMPT = (GREETING * 4)[:101]


@pytest.fixture(scope="module")
def served():
    with serving(eviction="priority", enable_events=True) as running:
        yield running


def action(intent, action_id=None, **payload):
    return {
        **{"action_id": action_id or intent, "action_type": f"kv.{intent}"},
        **{"action_version": "1.0", "payload": payload},
    }


def envelope(*actions):
    return {"protocol_version": "0.1", "message_id": "m7", "actions": list(actions)}


def post(served, path="/v1/kv_hints", **body):
    return HTTP.post(served.url + path, json={"model": "llama"} | body)


def hint(served, *actions, prompt=PROMPT):
    answer = post(served, prompt=prompt, kv_hints=envelope(*actions))
    assert answer.status_code == 200, answer.text
    return answer.json()["receipts"]


def complete(served, **body):
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    return post(served, "/v1/completions", **asked | body)


def test_completion_demotes_its_own_kv_and_a_hint_prefetches_it_again(served):
    answer = complete(served, kv_hints=envelope(action("demote", "a1"))).json()
    assert answer["kv_receipts"] == {
        **{"protocol_version": "0.1", "message_id": "m7"},
        "receipts": [
            {
                **{"intent": "demote", "action_id": "a1", "status": "done"},
                **{"num_tokens": 96, "num_asked_tokens": 105},
            }
        ],
    }
    served.wait_until(lambda state: state["pool"]["cached"] == 0)
    (receipt,) = hint(served, action("prefetch"))
    assert (receipt["status"], receipt["num_tokens"]) == ("done", 96)
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


def test_stream_ends_with_receipts(served):
    with HTTP.stream(
        "POST",
        f"{served.url}/v1/completions",
        json={
            **{"model": "llama", "prompt": PROMPT, "max_tokens": 2, "stream": True},
            "kv_hints": envelope(
                action("pin", session="s", ttl_s=5), action("retain", priority=80, ttl_s=5)
            ),
        },
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    receipts = json.loads(lines[-2])["kv_receipts"]["receipts"]
    assert [(each["intent"], each["status"], each["ttl_s"]) for each in receipts] == [
        ("pin", "done", 5.0),
        ("retain", "done", 5.0),
    ]
    served.wait_until(lambda state: state["hints"]["pinned_blocks"] == 6)


def test_hints_that_cannot_be_carried_out_are_refused_one_by_one(served):
    receipts = hint(
        served,
        action("share"),
        action("fetch"),
        action("pin", ttl_s=-1),
        action("pin", "far", num_tokens=9000),
        action("retain", priority=101),
        action("retain", "no", color=3),
    )
    assert [(each["status"], each["reason"]) for each in receipts] == [
        (
            "refused",
            "no source of the engine can publish KV: expected a Connector among the sources",
        ),
        (
            "refused",
            "action_type is 'kv.fetch': expected one of kv.prefetch, kv.demote, kv.pin, kv.retain, "
            "kv.share",
        ),
        ("refused", "ttl_s is -1: expected seconds, more than 0"),
        ("refused", "num_tokens is 9000: expected at most 101, the number of tokens"),
        ("refused", "priority is 101: expected 0 to 100"),
        (
            "refused",
            "payload has 'color': expected one of first_token, num_tokens, priority, session, ttl_s",
        ),
    ]
    answer = complete(served, kv_hints=envelope(action("prefetch"))).json()
    assert answer["kv_receipts"]["receipts"][0]["reason"].startswith("a request loads its own")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"kv_hints": {}}, "kv_hints.actions is missing", "kv_hints.actions"),
        (
            {"kv_hints": envelope() | {"protocol_version": "9"}},
            "kv_hints.protocol_version is '9': expected '0.1'",
            "kv_hints.protocol_version",
        ),
        ({"kv_hints": envelope() | {"more": 1}}, "kv_hints has 'more'", "kv_hints"),
        ({"kv_hints": envelope(3)}, "kv_hints.actions[0] is 3", "kv_hints.actions[0]"),
        (
            {"kv_hints": envelope(*[action("pin", str(i)) for i in range(33)])},
            "kv_hints.actions has 33 entries: expected at most 32",
            "kv_hints.actions",
        ),
        (
            {"kv_hints": envelope(action("pin"), action("pin"))},
            "kv_hints.actions has 'pin' twice",
            "kv_hints.actions",
        ),
        ({"kv_hints": 5}, "kv_hints: Input should be a valid dictionary", "kv_hints"),
    ],
)
def test_malformed_envelopes_are_rejected(served, body, message, param):
    for answer in (complete(served, **body), post(served, prompt=PROMPT, **body)):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(message)


def test_hints_need_one_prompt(served):
    answer = complete(served, prompt=["a", "b"], kv_hints=envelope())
    assert answer.json()["error"]["message"] == (
        "kv_hints is given with 2 prompts and n 1: expected a single prompt and a single sample"
    )
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        error = post(served, kv_hints=envelope(), **wrong).json()["error"]
        assert error["param"] == "prompt" and "expected exactly one of the two" in error["message"]
    assert "prompt is 3" in post(served, kv_hints=envelope(), prompt=3).json()["error"]["message"]


def test_hints_of_untrusted_clients_are_rejected():
    with serving(trust_clients=False) as served:
        for answer in (
            complete(served, kv_hints=envelope()),
            post(served, prompt=PROMPT, kv_hints=envelope()),
        ):
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("kv_hints is given: expected none")


def test_chats_accept_hints(served):
    chat = [{"role": "user", "content": PROMPT[:80]}]
    answer = post(
        served,
        "/v1/chat/completions",
        messages=chat,
        max_tokens=2,
        kv_hints=envelope(action("pin", session="s", ttl_s=1)),
    ).json()
    assert answer["kv_receipts"]["receipts"][0]["status"] == "done"
    answer = post(served, messages=chat, kv_hints=envelope(action("demote", session="s"))).json()
    assert answer["receipts"][0]["status"] == "done"
