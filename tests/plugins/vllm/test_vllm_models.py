"""Tiny models in vLLM say the same with kvcache's manager as with vLLM's own, whatever befalls requests.

`make test-vllm` runs this with vLLM; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("vllm")

from tests.machinery.vllm_models import ENGINES, OPTIONS, behaviours, write_config

NAMES = {
    "llama": list(ENGINES),
    "qwen3": ["vllm", "ours async", "ours drafts"],
    "gemma3": ["vllm", "ours", "ours async", "ours drafts"],
    "deepseek_v3": ["vllm", "ours", "vllm async", "ours async"],
    "granite4": ["vllm", "ours", "ours async"],
}
CASES = [(model, engine) for model, engines in NAMES.items() for engine in engines]


@pytest.fixture(scope="module")
def of_model(tmp_path_factory):
    """How requests fare with a tiny model, by engine."""
    known = {}

    def of(name):
        if name not in known:
            folder = write_config(tmp_path_factory.mktemp(name), name)
            known[name] = behaviours(folder, NAMES[name], **OPTIONS[name])
        return known[name]

    return of


@pytest.fixture(params=CASES, ids=[" ".join(case) for case in CASES])
def case(request, of_model):
    """(model, engine, how requests fared, and how they did with vLLM's own manager)."""
    model, engine = request.param
    found = of_model(model)
    assert found[engine]["manager"] == (
        "VllmCacheManager" if engine.startswith("ours") else "KVCacheManager"
    )
    own = "vllm" if has_prefix_cache(model) else engine.replace("ours", "vllm")
    return model, engine, found[engine], found[own]


def has_prefix_cache(model):
    """vLLM's backend of MLA for the CPU has none, nor chunks of prompts."""
    return model != "deepseek_v3"


def test_in_a_roomy_pool(case):
    model, _, found, own = case
    first, second = found["roomy"]["answers"]
    assert first == second == own["roomy"]["answers"][0]
    assert first[0] != first[1], "answers do not depend on the first half"
    assert found["roomy"]["preemptions"] == 0
    assert (found["roomy"]["hits"] > 0) == has_prefix_cache(model)


def test_in_a_tight_pool(case):
    model, engine, found, own = case
    assert found["tight"]["answers"] == own["tight"]["answers"]
    assert found["tight"]["preemptions"] > 0
    assert (found["tight"]["hits"] > 0) == has_prefix_cache(model)
    if "drafts" in engine:
        assert 0 < found["tight"]["accepted"] < found["tight"]["drafts"]


def test_several_samples_of_a_prompt(case):
    _, engine, found, own = case
    if "drafts" in engine:
        return  # what is drawn depends on the drafts
    samples = found["samples"]["answers"]
    assert samples == own["samples"]["answers"]
    assert all(len({tuple(each) for each in of_prompt}) == 3 for of_prompt in samples)


def test_aborts_in_every_phase(case):
    model, engine, found, own = case
    phases = {"waiting", "running"}
    if has_prefix_cache(model):
        phases.add("prompt")
    if (model, engine) != ("gemma3", "ours drafts"):  # its aborts leave room for all others
        phases.add("preempted")
    assert set(found["aborts"]["aborted"]) == phases
    check_tokens(model, found, own, "aborts")


def test_the_prefix_cache_is_reset_as_requests_run(case):
    model, _, found, own = case
    resets = found["resets"]
    assert resets["answers"] == [False, True, True, True, True]
    check_tokens(model, found, own, "resets")
    assert resets["again"]["hits"] == 0
    assert resets["again"]["answers"] == own["resets"]["again"]["answers"]


def test_the_pool_ends_empty(case):
    _, _, found, _ = case
    assert found["usage"] < 1e-9 and found["is_reset"]


def check_tokens(model, found, own, phase):
    """Those of requests that finished are whole; those of aborted ones are as far as they came."""
    requests = found[phase]["requests"]
    if not has_prefix_cache(model):
        # Tokens depend on who shares a step there. Steps are the same as with vLLM's own manager.
        assert requests == own[phase]["requests"]
        return
    for request, [tokens] in zip(requests, own["tight"]["answers"], strict=True):
        assert request["tokens"] == tokens[: len(request["tokens"])]
        assert request["ended"] == "aborted" or request["tokens"] == tokens
