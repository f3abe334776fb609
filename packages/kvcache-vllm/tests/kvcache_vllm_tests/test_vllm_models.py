# SPDX-License-Identifier: Apache-2.0
"""Tiny models in vLLM give the same answers with kvcache's manager as with vLLM's own, even with
preemptions and aborts.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import pytest

pytest.importorskip("vllm")

from tests.machinery.vllm_models import ENGINES, OPTIONS, behaviours, write_config
from tests.machinery.vllm_schedulers import IS_032

# These models run only a few requests in each pool.
SHORT = ["gemma2", "gpt_oss", "mistral", "olmo2", "phi3"]
NAMES = {
    "llama": [name for name in ENGINES if "known" not in name],
    "qwen3": ["vllm", "ours async", "ours drafts"],
    "gemma3": ["vllm", "ours", "ours async", "ours drafts"],
    "deepseek_v3": ["vllm", "ours", "vllm async", "ours async"],
    "granite4": ["vllm", "ours", "ours async"],
    **{name: ["vllm", "ours"] for name in SHORT},
}
IN_CI = ("llama", "gemma3", "granite4", "gpt_oss")  # all other models are marked exhaustive
CASES = [
    pytest.param(
        (model, engine),
        id=f"{model} {engine}",
        marks=[] if model in IN_CI else pytest.mark.exhaustive,
    )
    for model, engines in NAMES.items()
    for engine in engines
]
LONG_CASES = [case for case in CASES if case.values[0][0] not in SHORT]


@pytest.fixture(scope="module")
def of_model(tmp_path_factory):
    """Return a function that returns the results of requests to a tiny model, keyed by engine."""
    known = {}

    def of(name):
        if name not in known:
            folder = write_config(tmp_path_factory.mktemp(name), name)
            is_short = name in SHORT
            known[name] = behaviours(folder, NAMES[name], is_short=is_short, **OPTIONS[name])
        return known[name]

    return of


@pytest.fixture(params=CASES)
def case(request, of_model):
    """A case: (model, engine, results, results with vLLM's own manager)."""
    return results(of_model, *request.param)


@pytest.fixture(params=LONG_CASES)
def long_case(request, of_model):
    """A case of a model that runs all phases."""
    return results(of_model, *request.param)


def results(of_model, model, engine):
    """Return the case for a model and an engine."""
    found = of_model(model)
    assert found[engine]["manager"] == (
        "VllmCacheManager" if engine.startswith("ours") else "KVCacheManager"
    )
    own = "vllm" if has_prefix_cache(model) else engine.replace("ours", "vllm")
    return model, engine, found[engine], found[own]


def has_prefix_cache(model):
    """Return whether the model supports prefix caching and chunked prompts.

    vLLM's MLA backend for CPUs supports neither.
    """
    return model != "deepseek_v3"


def test_answers_in_a_large_pool_equal_vllms(case):
    model, _, found, own = case
    first, second = found["roomy"]["answers"]
    assert first == second == own["roomy"]["answers"][0]
    assert first[0] != first[1], "answers do not depend on the first half"
    assert found["roomy"]["preemptions"] == 0
    assert (found["roomy"]["hits"] > 0) == has_prefix_cache(model)


def test_answers_in_a_tight_pool_equal_vllms(case):
    model, engine, found, own = case
    assert found["tight"]["answers"] == own["tight"]["answers"]
    assert found["tight"]["preemptions"] > 0
    assert (found["tight"]["hits"] > 0) == has_prefix_cache(model)
    if "drafts" in engine:
        assert 0 < found["tight"]["accepted"] < found["tight"]["drafts"]


def test_several_samples_of_a_prompt_equal_vllms(long_case):
    _, engine, found, own = long_case
    if "drafts" in engine:
        return  # sampling depends on the drafts
    samples = found["samples"]["answers"]
    assert samples == own["samples"]["answers"]
    assert all(len({tuple(each) for each in of_prompt}) == 3 for of_prompt in samples)


def test_requests_can_be_aborted_in_every_phase(long_case):
    model, engine, found, own = long_case
    phases = {"waiting", "running"}
    if has_prefix_cache(model):
        phases.add("prompt")
    # In the excluded case, the aborted requests leave enough space for all others, so none is
    # preempted.
    if (model, engine) != ("gemma3", "ours drafts"):
        phases.add("preempted")
    assert set(found["aborts"]["aborted"]) == phases
    check_tokens(model, found, own, "aborts")


def test_prefix_cache_can_be_reset_while_requests_run(long_case):
    model, _, found, own = long_case
    resets = found["resets"]
    assert resets["answers"] == [False, True, True, True, True]
    check_tokens(model, found, own, "resets")
    assert resets["again"]["hits"] == 0
    assert resets["again"]["answers"] == own["resets"]["again"]["answers"]


def test_pool_is_empty_at_the_end(case):
    _, _, found, _ = case
    assert found["usage"] < 1e-9 and found["is_reset"]


@pytest.mark.skipif(IS_032, reason="vLLM 0.32's states of drafts are not tested")
def test_drafts_do_not_change_the_answers_of_a_model_with_states(tmp_path):
    """Without prefix caching, because the copies of mode `align` need Triton."""
    engines = ["vllm", "vllm drafts known", "ours drafts known"]
    options = OPTIONS["granite4"] | {"enable_prefix_caching": False}
    folder = write_config(tmp_path, "granite4")
    found = behaviours(folder, engines, is_short=True, **options)
    assert found["ours drafts known"]["manager"] == "VllmCacheManager"
    for engine in engines:
        for pool in ("roomy", "tight"):
            assert found[engine][pool]["answers"] == found["vllm"][pool]["answers"]
            if engine != "vllm":
                assert 0 < found[engine][pool]["accepted"] < found[engine][pool]["drafts"]
        assert found[engine]["usage"] < 1e-9 and found[engine]["is_reset"]


def check_tokens(model, found, own, phase):
    """Check that finished requests have all expected tokens, and that aborted requests have a
    prefix of them.
    """
    requests = found[phase]["requests"]
    if not has_prefix_cache(model):
        # Without prefix caching, tokens depend on the other requests in a step, but the steps equal
        # those with vLLM's own manager.
        assert requests == own[phase]["requests"]
        return
    for request, [tokens] in zip(requests, own["tight"]["answers"], strict=True):
        assert request["tokens"] == tokens[: len(request["tokens"])]
        assert request["ended"] == "aborted" or request["tokens"] == tokens
