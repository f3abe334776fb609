# SPDX-License-Identifier: Apache-2.0
"""New weights, announced over HTTP."""

import queue

import pytest

from kvcache.events import AllBlocksCleared

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("httpx")

from kvcache_serve_tests.test_serve import GREETING, HTTP, serving

KEY = "a secret key"
PROMPT = (GREETING * 4)[:101]


def post(served, path, **body):
    headers = {"authorization": f"Bearer {KEY}"}
    return HTTP.post(served.url + path, json={"model": "llama"} | body, headers=headers)


def announce(served, **body):
    return post(served, "/v1/weights", **body)


def cached_tokens(served):
    answer = post(served, "/v1/completions", prompt=PROMPT, max_tokens=2)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_new_weights_are_announced_between_two_steps_and_empty_the_cache():
    with serving(api_key=KEY) as served:
        assert [cached_tokens(served) for _ in range(2)] == [0, 96]
        answer = announce(served, model_version="step 1")
        assert (answer.status_code, answer.json()) == (200, {"model_version": "step 1", "epoch": 1})
        assert [cached_tokens(served) for _ in range(2)] == [0, 96]
        assert announce(served, model_version="2").json() == {"model_version": "2", "epoch": 2}
        unnamed = [announce(served).json()["model_version"] for _ in range(2)]
        assert unnamed[0] != unnamed[1]
        assert cached_tokens(served) == 0
        # Rejected announcements change nothing.
        for body, status, param in (
            ({"model_version": unnamed[1]}, 400, "model_version"),
            ({"model_version": ""}, 400, "model_version"),
            ({"model_version": 1.5}, 400, "model_version"),
            ({"model_version": "3", "more": 1}, 400, "more"),
            ({"model": "gpt-4"}, 404, "model"),
        ):
            answer = announce(served, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
        assert cached_tokens(served) == 96
        refused = HTTP.post(f"{served.url}/v1/weights", json={"model": "llama"})
        assert refused.status_code == 401


class Published(queue.SimpleQueue):
    """Receives cache events in place of an `EventPublisher`."""

    def publish(self, events):
        for each in events:
            self.put(each)

    def close(self):
        pass


def test_idle_server_tells_readers_of_its_events_at_once_that_its_cache_is_empty():
    published = Published()
    with serving(publisher=published, api_key=KEY, enable_events=True) as served:
        assert cached_tokens(served) == 0
        served.wait_until_empty()
        assert announce(served, model_version="step 1").status_code == 200
        while not isinstance(published.get(timeout=20), AllBlocksCleared):
            pass


def test_weights_are_announced_only_by_trusted_clients():
    with serving(trust_clients=False) as served:
        answer = announce(served, model_version="step 1")
        assert answer.status_code == 403
        assert "expected a server that trusts its clients" in answer.json()["error"]["message"]
        assert served.loop.engine.cache.manager.cache.epoch == 0
