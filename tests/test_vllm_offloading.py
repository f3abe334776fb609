"""kvcache's host tier in vLLM's offloading: chats with tiny models, and what is refused.

`make test-vllm` runs this with vLLM; elsewhere it is skipped.
"""

import json

import pytest

pytest.importorskip("vllm")

from kvcache.integrations.vllm.offloading import HostTierOptions
from tests.test_vllm import MODELS
from tests.vllm_chats import TIER, ChatsFailed, chats

OPTIONS = {"cpu_bytes_to_use": 256 << 20, "offload_prompt_only": False}
SIZES = {"llama": {"num_blocks": 100}, "gemma3": {"num_blocks": 160}}
OURS = {"scheduler_cls": "kvcache.integrations.vllm.Scheduler"}
OURS_ASYNC = {"scheduler_cls": "kvcache.integrations.vllm.AsyncScheduler", "is_async": True}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A model's folder, and what chats with it say without a tier."""
    known = {}

    def of(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            (folder / "config.json").write_text(json.dumps(MODELS[name]))
            known[name] = str(folder), chats(str(folder), **SIZES[name])
            assert known[name][1]["hits"] == [0, 0, 0]
        return known[name]

    return of


@pytest.mark.parametrize("scheduler", [{}, OURS, OURS_ASYNC], ids=["vllm", "ours", "ours async"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chats_say_the_same_and_hit(name, scheduler, without):
    folder, expected = without(name)
    found = chats(folder, tier=OPTIONS, **SIZES[name], **scheduler)
    assert found["answers"] == expected["answers"]
    assert found["hits"][0] == 0 and min(found["hits"][1:]) > 0.8 * min(found["prompts"][1:])
    assert found["manager"] == ("VllmCacheManager" if scheduler else "KVCacheManager")
    assert found["usage"] == 0 and found["is_reset"]
    assert found["metrics"]["vllm:kv_offload_load_bytes"] > 0


@pytest.mark.parametrize("scheduler", [{}, OURS], ids=["vllm", "ours"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_swaps_that_fail_are_misses(name, scheduler, without):
    folder, expected = without(name)
    # vLLM's scheduler stops for ever in a pool that two requests do not fit into: the one whose load
    # failed is before the one that holds blocks. Here they fit.
    sizes = SIZES[name] if scheduler or name == "llama" else {"num_blocks": 400}
    found = chats(folder, tier=OPTIONS, fail_every=5, **sizes, **scheduler)
    assert found["answers"] == expected["answers"]
    assert found["failed"] > 5 and found["hits"][2] > 0 and found["usage"] == 0
    assert found["metrics"]["vllm:kv_offload_host_failed_loads"] > 0


@pytest.mark.parametrize("name,size", [("llama", "12 MiB"), ("gemma3", "40 MiB")])
def test_several_blocks_a_chunk_and_a_small_host(name, size, without):
    """What the host cannot hold is evicted, and computed anew."""
    folder, expected = without(name)
    tier = OPTIONS | {"blocks_per_chunk": 3, "cpu_bytes_to_use": size, "eviction": "learned"}
    found = chats(folder, tier=tier, events=True, **SIZES[name], **OURS)
    assert found["answers"] == expected["answers"] and found["hits"][2] > 0
    assert found["metrics"]["vllm:kv_offload_host_evicted_chunks"] > 0


class TestRefusals:
    """Before a request is served, in one line that says what to change."""

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({}, ValueError, "has no cpu_bytes_to_use: expected the bytes of host memory"),
            ({"cpu_bytes_to_use": 0}, ValueError, "cpu_bytes_to_use is 0: expected"),
            ({"cpu_bytes_to_use": "much"}, ValueError, "cpu_bytes_to_use is 'much': expected"),
            (
                {"eviction": "priority"},
                ValueError,
                "eviction is 'priority': expected one of learned",
            ),
            ({"eviction": 3}, ValueError, "eviction is 3: expected one of"),
            (
                {"eviction_options": {"share": 1}},
                ValueError,
                "^eviction 'lru': option 'share' is 1",
            ),
            (
                {"eviction_options": [1]},
                TypeError,
                r"eviction_options is \[1\]: expected numbers by",
            ),
            (
                {"store": "evict"},
                ValueError,
                "store is 'evict': expected 'through' or 'selective' .vLLM",
            ),
            (
                {"store": "learned"},
                ValueError,
                "store is 'learned': expected 'through' or 'selective'",
            ),
            ({"store": None}, ValueError, "store is None: expected 'through' or 'selective'"),
            ({"num_requests_to_store": 0}, ValueError, "num_requests_to_store is 0: expected 1"),
            ({"eviction_policy": "lru"}, ValueError, "has 'eviction_policy': expected eviction"),
            ({"blocks": 4}, ValueError, "has 'blocks': expected one of cpu_bytes_to_use"),
        ],
    )
    def test_options(self, options, error, message):
        own = {"cpu_bytes_to_use": 1 << 20} | options if options else {}
        with pytest.raises(error, match=message):
            HostTierOptions.of(own)

    @pytest.mark.parametrize(
        ("tier", "connector", "message"),
        [
            (
                OPTIONS | {"spec_name": "KVCacheOffloadingSpec", "spec_module_path": TIER},
                None,
                "kv_transfer_config has no kv_connector_module_path: expected",
            ),
            (OPTIONS | {"cpu_bytes_to_use": 64}, TIER, "cpu_bytes_to_use is 64: expected at least"),
            (
                OPTIONS | {"spec_name": "CPUOffloadingSpec"},
                TIER,
                "spec_name is 'CPUOffloadingSpec'",
            ),
        ],
        ids=["vLLM's connector", "no chunk", "another spec"],
    )
    def test_at_the_start_of_the_engine(self, tier, connector, message, without):
        folder, _ = without("llama")
        with pytest.raises(ChatsFailed, match=message):
            chats(folder, tier=tier, connector=connector, num_turns=1)
