# SPDX-License-Identifier: Apache-2.0
"""kvcache's host tier in vLLM's offloading connector: chats with tiny models, and rejected options.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import pytest

pytest.importorskip("vllm")

from kvcache_vllm.offloading import HostTierOptions
from tests.machinery.shared import sampled
from tests.machinery.vllm_chats import TIER, chats_each
from tests.machinery.vllm_models import write_config

OPTIONS = {"cpu_bytes_to_use": 256 << 20, "offload_prompt_only": False}
SIZES = {"llama": {"num_blocks": 100}, "gemma3": {"num_blocks": 160}}
OURS = {"scheduler_cls": "kvcache_vllm.VllmScheduler"}
OURS_ASYNC = {"scheduler_cls": "kvcache_vllm.VllmAsyncScheduler", "is_async": True}


SCHEDULERS = {"vllm": {}, "ours": OURS, "ours async": OURS_ASYNC}
SMALL_HOSTS = {"llama": "12 MiB", "gemma3": "40 MiB"}
REFUSED = {
    "vLLM's connector": {
        "tier": OPTIONS | {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": TIER},
        "connector": None,
    },
    "no chunk": {"tier": OPTIONS | {"cpu_bytes_to_use": 64}},
    "another spec": {"tier": OPTIONS | {"spec_name": "CPUOffloadingSpec"}},
}


def variants(name):
    """Return the options for chats with a model, keyed by purpose."""
    sizes = SIZES[name]
    found = {"without": sizes}
    for each, options in SCHEDULERS.items():
        found[each] = {"tier": OPTIONS, **sizes, **options}
        if each != "ours async":
            found[f"{each} failing"] = {**found[each], "fail_every": 5}
    if name == "gemma3":
        # If the pool cannot hold two requests, vLLM's scheduler stalls forever, because the request
        # whose load failed is queued ahead of the request that holds the blocks. A larger pool
        # avoids this.
        found["vllm failing"]["num_blocks"] = 400
    tier = {"blocks_per_chunk": 3, "cpu_bytes_to_use": SMALL_HOSTS[name], "eviction": "learned"}
    found["small host"] = {"tier": OPTIONS | tier, "events": True, **sizes, **OURS}
    if name == "llama":
        found |= {each: options | {"num_turns": 1} for each, options in REFUSED.items()}
    return found


@pytest.fixture(scope="module")
def chats_of(tmp_path_factory):
    """Return a function that returns the results of chats with a model, keyed by purpose. All chats
    run in one process.
    """
    known = {}

    def of(name):
        if name not in known:
            folder = write_config(tmp_path_factory.mktemp(name), name)
            asked = variants(name)
            found = chats_each([{"model": folder, **options} for options in asked.values()])
            known[name] = dict(zip(asked, found))
            assert known[name]["without"]["hits"] == [0, 0, 0]
        return known[name]

    return of


@pytest.fixture
def served(chats_of):
    """Return a function that returns the results for a model and a purpose, and the results without
    a host tier.
    """

    def of(name, shown):
        found = chats_of(name)
        assert "error" not in found[shown], found[shown]["error"]
        return found[shown], found["without"]

    return of


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", sampled(SIZES))
def test_chats_have_the_same_output_and_hits(name, scheduler, served):
    found, expected = served(name, scheduler)
    assert found["answers"] == expected["answers"]
    assert found["hits"][0] == 0 and min(found["hits"][1:]) > 0.8 * min(found["prompts"][1:])
    assert found["manager"] == ("KVCacheManager" if scheduler == "vllm" else "VllmCacheManager")
    assert found["usage"] == 0 and found["is_reset"]
    assert found["metrics"]["vllm:kv_offload_load_bytes"] > 0


@pytest.mark.parametrize("scheduler", ["vllm", "ours"])
@pytest.mark.parametrize("name", sampled(SIZES))
def test_failed_swaps_are_misses(name, scheduler, served):
    found, expected = served(name, f"{scheduler} failing")
    assert found["answers"] == expected["answers"]
    assert found["failed"] > 5 and found["hits"][2] > 0 and found["usage"] == 0
    assert found["metrics"]["vllm:kv_offload_host_failed_loads"] > 0


@pytest.mark.parametrize("name", sampled(SIZES))
def test_chunks_of_several_blocks_fit_a_small_host(name, served):
    """Chunks that no longer fit on the host are evicted, and their tokens are recomputed."""
    found, expected = served(name, "small host")
    assert found["answers"] == expected["answers"]
    assert sum(found["hits"]) > 0  # hits of the last turn depend on the times of the requests
    assert found["metrics"]["vllm:kv_offload_host_evicted_chunks"] > 0


class TestRefusals:
    """Unsupported options are rejected before any request is served, with a one-line error that
    says what to change.
    """

    @pytest.mark.parametrize(("options", "error", "message"), [
        ({}, ValueError, "has no cpu_bytes_to_use: expected the bytes of host memory"),
        ({"cpu_bytes_to_use": 0}, ValueError, "cpu_bytes_to_use is 0: expected"),
        ({"eviction": "priority"}, ValueError, "eviction is 'priority': expected one of learned"),
        ({"eviction_options": {"share": 1}}, ValueError, "^eviction 'lru': option 'share' is 1"),
        ({"eviction_options": [1]}, TypeError,
         r"eviction_options is \[1\]: expected a dict of numbers"),
        ({"store": "evict"}, ValueError,
         "store is 'evict': expected 'through' or 'selective' .vLLM"),
        ({"num_requests_to_store": 0}, ValueError, "num_requests_to_store is 0: expected 1"),
        ({"eviction_policy": "lru"}, ValueError, "has 'eviction_policy': expected eviction"),
        ({"sync_load_budget_bytes": 1}, ValueError,
         "has 'sync_load_budget_bytes': expected nothing, because a failed load"),
        ({"blocks": 4}, ValueError, "has 'blocks': expected one of cpu_bytes_to_use"),
    ])  # fmt: skip
    def test_invalid_options_are_rejected_with_the_expected_values(self, options, error, message):
        own = {"cpu_bytes_to_use": 1 << 20} | options if options else {}
        with pytest.raises(error, match=message):
            HostTierOptions.of(own)

    @pytest.mark.parametrize(("shown", "message"), [
        ("vLLM's connector", "kv_transfer_config has no kv_connector_module_path: expected"),
        ("no chunk", "cpu_bytes_to_use is 64: expected at least"),
        ("another spec", "spec_name is 'CPUOffloadingSpec'"),
    ])  # fmt: skip
    def test_invalid_options_stop_the_engine_at_startup(self, shown, message, chats_of):
        assert message in chats_of("llama")[shown]["error"]
