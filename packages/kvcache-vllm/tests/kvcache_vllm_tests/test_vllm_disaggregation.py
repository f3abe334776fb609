# SPDX-License-Identifier: Apache-2.0
"""Prefill in one vLLM engine and decode in another: under all faults, answers equal those of a
single engine.

Each engine is a process that serves a tiny Llama or Gemma 3 model on the CPU. These tests run in
`make test-vllm` and are skipped where vLLM is not installed.
"""

import copy
import json
import signal
import time

import pytest

pytest.importorskip("vllm")

from kvcache_exchange.disaggregation.offer import sealed
from tests.machinery.engine_process import some_prompts
from tests.machinery.shared import sampled
from tests.machinery.vllm_engine import MODULE, Engine
from tests.machinery.vllm_models import MODELS
from tests.machinery.vllm_weights import write_llama

SCHEDULER = "kvcache_vllm.VllmAsyncScheduler"
TIMEOUT_S = 15.0
# Some engines use kvcache's allocator, and the rest use vLLM's own.
ENGINES = {
    "tp1": {},
    "tp1 ours": {"scheduler_cls": SCHEDULER},
    "tp2": {"tensor_parallel_size": 2},
    "blocks of 64": {"block_size": 64, "scheduler_cls": SCHEDULER},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, MODELS["llama"])
    return str(folder)


@pytest.fixture(scope="module")
def engines(llama):
    """Engines that can prefill and decode."""
    started = {
        name: Engine(llama, "kv_both", extra={"timeout_s": TIMEOUT_S, "lease_s": 20}, **options)
        for name, options in ENGINES.items()
    }
    yield from closing(started)


@pytest.fixture
def victim(llama):
    """A producer that tests may stop or kill."""
    started = {"victim": Engine(llama, "kv_producer", extra={"lease_s": 1.0})}
    for engines in closing(started):
        yield engines["victim"]


def closing(started):
    try:
        for engine in started.values():
            assert engine.answer() == "ready"
        yield started
    finally:
        for engine in started.values():
            engine.end()
        for engine in started.values():
            engine.close()


def alone(engine, prompts, max_tokens=16):
    """Return an engine's answers, computed without blocks from another engine.

    The engine is empty before and after the call.
    """
    engine.wait_until_empty()
    tokens, num_computed = engine.decode(prompts, [None] * len(prompts), max_tokens)
    assert num_computed >= sum(map(len, prompts))
    engine.wait_until_empty()
    return tokens


@pytest.mark.parametrize("prefill,decode", [
    ("tp1", "tp1 ours"),
    ("tp1 ours", "tp1"),
    ("tp1", "tp2"),
    ("tp2", "tp1 ours"),
    ("tp1", "blocks of 64"),
    ("blocks of 64", "tp1"),
    ("tp2", "blocks of 64"),
    ("blocks of 64", "tp2"),
])  # fmt: skip
@pytest.mark.parametrize("seed", range(2))
def test_two_engines_generate_the_same_tokens_as_one(seed, prefill, decode, engines):
    prompts = some_prompts(seed)
    wanted = alone(engines[decode], prompts)
    engines[prefill].wait_until_empty()
    offers = engines[prefill].prefill(prompts)
    tokens, num_computed = engines[decode].decode(prompts, offers)
    assert tokens == wanted
    # Only the last token of each prompt was computed. All other prompt tokens were loaded.
    assert num_computed == len(prompts) * 16, "".join(engines[decode].errors)[-2000:]
    for name in (prefill, decode):
        engines[name].wait_until_empty()


def test_locally_cached_blocks_are_not_read(engines):
    (prompt,) = some_prompts(5, 1, 200, 201)
    prefill, decode = engines["tp1"], engines["tp1 ours"]
    wanted = alone(decode, [prompt])
    decode.run([prompt[:100]], 1)  # three of the prompt's blocks are now cached
    offers = prefill.prefill([prompt])
    stolen = copy.deepcopy(offers)
    stolen[0]["kvcache"]["blocks"][0][:3] = [0, 0, 0]
    stolen[0]["kvcache"] = sealed(stolen[0]["kvcache"])
    tokens, num_computed = decode.decode([prompt], stolen)
    assert (tokens, num_computed) == (wanted, 16)
    prefill.wait_until_empty()


def test_unneeded_offer_is_released_before_its_lease_expires(engines):
    (prompt,) = some_prompts(6, 1, 65, 66)
    prefill, decode = engines["tp1"], engines["tp1 ours"]
    wanted = alone(decode, [prompt])
    decode.run([prompt], 1)  # all tokens except the last are now cached
    offers = prefill.prefill([prompt])
    assert decode.decode([prompt], offers) == (wanted, 16)
    prefill.wait_until_empty(timeout_s=10)  # long before its lease expires


def test_many_concurrent_requests_complete_in_small_pools(engines):
    prompts = some_prompts(7, 40, 100, 300)
    for prefill, decode in (("tp1 ours", "tp1"), ("tp1", "tp1 ours")):
        wanted = alone(engines[decode], prompts)
        offers = []
        for first in range(0, 40, 10):
            offers = engines[prefill].prefill(prompts[first : first + 10])
            tokens, _ = engines[decode].decode(prompts[first : first + 10], offers)
            assert tokens == wanted[first : first + 10]
        engines[prefill].wait_until_empty()
        engines[decode].wait_until_empty()


def broken(offer, path, value):
    changed = copy.deepcopy(offer)
    at = changed["kvcache"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    # Otherwise, only the invalid seal would be reported.
    changed["kvcache"] = sealed(changed["kvcache"])
    return changed


WRONG = {
    "a hash seed": (("identity", "hashing", "seed"), "0" * 16, "set PYTHONHASHSEED to the same"),
    "a hash algorithm": (("identity", "hashing", "algorithm"), "xxhash",
        "set --prefix-caching-hash-algo"),
    "another model": (("identity", "model", "head_size"), 64, "serve the same model"),
    "another prompt": (("digest",), "0" * 64, "the offer is for other tokens"),
    "freed blocks": (("blocks", 0, 0), 0, "a window's blocks"),
    "a lease that has ended": (("lease", "generation"), 1, "has ended"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_invalid_offer_is_rejected_in_one_line_and_the_request_computed(what, engines):
    path, value, message = WRONG[what]
    prompts = some_prompts(8, 2, 100, 200)
    decode = engines["tp1 ours"]
    wanted = alone(decode, prompts)
    offers = engines["tp1"].prefill(prompts)
    before = decode.said(message)
    began = time.monotonic()
    tokens, num_computed = decode.decode(prompts, [broken(offers[0], path, value), offers[1]])
    assert time.monotonic() - began < TIMEOUT_S
    assert tokens == wanted
    assert num_computed >= len(prompts[0]) + 15
    assert decode.said(message) - before == 1
    decode.wait_until_empty()


def test_expired_lease_is_detected_even_if_blocks_hold_other_tokens(engines, victim):
    prompts = some_prompts(9, 3, 200, 300)
    decode = engines["tp1"]
    wanted = alone(decode, prompts)
    offers = victim.prefill(prompts)
    time.sleep(1.2)
    victim.wait_until_empty()  # the blocks are released when the leases expire
    victim.run(some_prompts(10, 16, 250, 300), 4)  # overwrites all of the victim's blocks
    before = decode.said("has ended: set a longer lease_s")
    tokens, _ = decode.decode(prompts, offers)
    assert tokens == wanted and decode.said("has ended: set a longer lease_s") - before == 3
    decode.wait_until_empty()


@pytest.mark.parametrize("is_reading", [False, True])
def test_requests_are_computed_if_the_producer_is_killed(is_reading, engines, victim):
    """It is killed before the reads begin, or while they wait for it."""
    prompts = some_prompts(11, 3, 100, 300)
    decode = engines["tp1 ours"]
    wanted = alone(decode, prompts)
    if is_reading:
        assert decode.decode(prompts, victim.prefill(prompts))[1] == 3 * 16
        decode.wait_until_empty()
    offers = victim.prefill(prompts)
    victim.signal(signal.SIGSTOP if is_reading else signal.SIGKILL)
    began = time.monotonic()
    decode.send("run", prompts, 16, offers)
    if is_reading:
        while decode.ask("held")[1] == 0.0:
            assert time.monotonic() - began < TIMEOUT_S - 1
        victim.signal(signal.SIGKILL)
    assert [each[0] for each in decode.answer()] == wanted
    assert time.monotonic() - began < TIMEOUT_S * (1 if is_reading else 2)
    decode.wait_until_empty()


def test_requests_are_computed_while_the_producer_sleeps(engines):
    """vLLM 0.33 unmaps the caches while an engine sleeps, so requests with offers from this engine
    recompute their prompts.
    """
    prompts = some_prompts(20, 3, 100, 300)
    prefill, decode = engines["tp1"], engines["tp1 ours"]
    wanted = alone(decode, prompts)
    for _ in range(2):
        assert decode.decode(prompts, prefill.prefill(prompts)) == (wanted, 3 * 16)
        decode.wait_until_empty()
        offers = prefill.prefill(prompts)
        for _ in range(2):  # the second call has no effect
            assert prefill.ask("connector", "unregister_kv_caches")
        tokens, num_computed = decode.decode(prompts, offers)
        assert tokens == wanted and num_computed >= sum(map(len, prompts))
        decode.wait_until_empty()
        for _ in range(2):
            assert prefill.ask("connector", "restore_kv_caches")
        prefill.wait_until_empty()
    assert decode.decode(prompts, prefill.prefill(prompts)) == (wanted, 3 * 16)


@pytest.mark.parametrize("is_connected", [False, True])
def test_requests_are_computed_if_the_producer_does_not_answer(is_connected, engines, victim):
    prompts = some_prompts(12, 3, 100, 300)
    decode = engines["tp1"]
    wanted = alone(decode, prompts)
    if is_connected:
        assert decode.decode(prompts, victim.prefill(prompts))[1] == 3 * 16
        decode.wait_until_empty()
    offers = victim.prefill(prompts)
    victim.signal(signal.SIGSTOP)
    began = time.monotonic()
    tokens, _ = decode.decode(prompts, offers)
    took = time.monotonic() - began
    # The requests wait concurrently.
    assert tokens == wanted and TIMEOUT_S - 0.1 < took < 2 * TIMEOUT_S
    decode.wait_until_empty()
    victim.signal(signal.SIGCONT)
    victim.wait_until_empty()
    time.sleep(TIMEOUT_S)  # an unreachable peer is not retried during this time
    assert decode.decode(prompts, victim.prefill(prompts)) == (wanted, 3 * 16)
    decode.wait_until_empty()


def test_request_can_be_aborted_while_it_is_loaded(engines, victim):
    prompts = some_prompts(14, 3, 100, 300)
    decode = engines["tp1 ours"]
    decode.wait_until_empty()
    offers = victim.prefill(prompts)
    victim.signal(signal.SIGSTOP)
    began = time.monotonic()
    decode.send("run", prompts, 16, offers)
    while decode.ask("held")[1] == 0.0:  # no block is allocated yet
        assert time.monotonic() - began < TIMEOUT_S - 1
    time.sleep(0.5)
    assert decode.ask("abort") is True
    assert decode.ask("held")[0] == 3  # the transfers may still write to their blocks
    victim.signal(signal.SIGCONT)
    decode.wait_until_empty()
    victim.wait_until_empty()


@pytest.mark.parametrize("is_ours", sampled([True, False]))
def test_blocks_outside_the_window_are_not_read(is_ours, tmp_path):
    """In Gemma 3, blocks outside the window are null blocks and are not read."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma3"]))
    options = {"load_format": "dummy", "num_gpu_blocks_override": 600}
    if is_ours:
        options["scheduler_cls"] = SCHEDULER
    started = {
        role: Engine(str(tmp_path), role, **options) for role in ("kv_producer", "kv_consumer")
    }
    for engines in closing(started):
        prefill, decode = engines.values()
        prompts = some_prompts(15, 8, 20, 600)
        wanted = alone(decode, prompts)
        tokens, num_computed = decode.decode(prompts, prefill.prefill(prompts))
        assert tokens == wanted and num_computed == 8 * 16
        # The producer has released the block in which the last token's window begins, so the
        # consumer recomputes the prompt.
        (prompt,) = some_prompts(16, 1, 32 * 6 + 127, 32 * 6 + 128)
        wanted = alone(decode, [prompt])
        tokens, num_computed = decode.decode([prompt], prefill.prefill([prompt]))
        assert tokens == wanted
        assert num_computed == (len(prompt) + 15 if decode.said("a window's blocks") else 16)
        for engine in (prefill, decode):
            engine.wait_until_empty()


def test_allocator_host_tier_and_disaggregation_work_together(engines, llama):
    """Blocks are received from another engine, offloaded to the host, and loaded again after they
    were evicted from the device.
    """
    transfer = {"transport": "tcp", "timeout_s": TIMEOUT_S}
    parts = [
        {**{"kv_connector": "KVCacheConnector", "kv_connector_module_path": MODULE},
         **{"kv_role": "kv_both", "kv_connector_extra_config": transfer}},
        {"kv_connector": "OffloadingConnector",
         "kv_connector_module_path": "kvcache_vllm.offloading",
         **{"kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28}}},
    ]  # fmt: skip
    several = {
        **{"kv_connector": "MultiConnector", "kv_role": "kv_both"},
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": parts},
    }
    started = {"all": Engine(llama, None, scheduler_cls=SCHEDULER, kv_transfer_config=several)}
    for consumer in closing(started):
        consumer = consumer["all"]
        prompts, others = some_prompts(11, least=100), some_prompts(12, count=24, least=200)
        wanted = alone(engines["tp1"], prompts)
        offers = engines["tp1 ours"].prefill(prompts)
        tokens, num_computed = consumer.decode(prompts, offers)
        assert tokens == wanted
        assert num_computed == len(prompts) * 16, "".join(consumer.errors)[-2000:]
        consumer.run(others)  # evicts the received blocks
        tokens, num_computed = consumer.decode(prompts, [None] * len(prompts))
        assert tokens == wanted
        computed_at_least = sum(map(len, prompts))
        assert num_computed < computed_at_least, "nothing was loaded from the host"
        engines["tp1 ours"].wait_until_empty()
        consumer.wait_until_empty()
