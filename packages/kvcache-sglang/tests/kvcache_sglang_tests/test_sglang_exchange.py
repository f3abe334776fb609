# SPDX-License-Identifier: Apache-2.0
"""Prefill in vLLM and decode in SGLang, and vice versa: under all faults, answers equal those of a
single engine.

Each engine runs with all of its processes and with a tiny model on the CPU. vLLM runs in a separate
environment.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from kvcache_exchange.disaggregation.offer import sealed
from kvcache_sglang.options import options_from_environment
from tests.machinery import roots
from tests.machinery.engine_process import some_prompts
from tests.machinery.ports import free_port
from tests.machinery.sglang_process import STUBS, SGLangEngine
from tests.machinery.shared import REPO, sampled
from tests.machinery.vllm_engine import Engine
from tests.machinery.vllm_environment import FOLDERS, NEWEST
from tests.machinery.vllm_weights import write_llama, write_tokenizer

VLLM = FOLDERS / NEWEST / "bin" / "python"
TIMEOUT_S, PAGE = 10.0, 64
TINY = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512},
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"},
    **{"rope_theta": 10000.0, "attention_bias": False},
}
MODELS = {
    "llama": TINY,
    "qwen3": {**TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    # vLLM's CPU kernel for MLA supports only these sizes of latent vectors.
    "deepseek": {
        **{name: value for name, value in TINY.items() if name != "head_dim"},
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512},
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
        **{"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        **{"routed_scaling_factor": 1.0, "moe_layer_freq": 1},
        "rope_scaling": {  # SGLang supports MLA without it only on GPUs
            **{"type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0},
            **{"original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1},
            **{"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
}
ENGINES = {
    "tp1, blocks of 32": {"block_size": 32},
    "tp2, blocks of 64": {"block_size": 64, "tensor_parallel_size": 2},
    "mla": {"block_size": 16, "max_num_batched_tokens": 1024,
        "attention_config": {"backend": "CPU_MLA"}},
}  # fmt: skip
OPTIONS = {"timeout_s": TIMEOUT_S, "lease_s": 30}

needs_vllm = pytest.mark.skipif(
    not VLLM.exists(), reason=f"there is no vLLM in {VLLM}: run make test-vllm once"
)


class Engines:
    """Engines that serve the same model. vLLM engines are started when they are first used."""

    def __init__(self, folder, environment=None, **options):
        self.folder, self.started = folder, {}
        self.sglang = SGLangEngine(folder, extra=OPTIONS, environment=environment, **options)
        self.sglang.answer()

    def vllm(self, name="tp1, blocks of 32", **options):
        if name not in self.started:
            options |= ENGINES[name]
            engine = Engine(self.folder, "kv_both", extra=OPTIONS, python=VLLM, **options)
            assert engine.answer() == "ready"
            self.started[name] = engine
        return self.started[name]

    def close(self):
        for engine in (self.sglang, *self.started.values()):
            engine.end()
        for engine in (self.sglang, *self.started.values()):
            engine.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, config in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        write_llama(folder, config)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def engines(folders):
    made = Engines(folders["llama"])
    yield made
    made.close()


def offers_of(answers):
    """Return the offers in vLLM's responses."""
    return [each["kvcache"] for each in answers]


def params_of(offers):
    """Return the `kv_transfer_params` for requests to vLLM."""
    return [each and {"do_remote_prefill": True, "kvcache": each} for each in offers]


def alone(engine, prompts):
    """Return an engine's answers, computed without KV from another engine."""
    engine.wait_until_empty()
    tokens, _ = engine.decode(prompts, [None] * len(prompts))
    engine.wait_until_empty()
    return tokens


def in_pages(prompts):
    """Return the number of tokens that SGLang can load: whole pages before the last token."""
    return sum((len(each) - 1) // PAGE * PAGE for each in prompts)


def both_ways(sglang, vllm, seeds, count=6):
    for seed in seeds:
        prompts = some_prompts(seed, count)
        wanted = alone(sglang, prompts)
        assert alone(vllm, prompts) == wanted
        # KV is transferred from vLLM to SGLang.
        found = sglang.decode(prompts, offers_of(vllm.prefill(prompts)))
        assert found == (wanted, sum(map(len, prompts)) - in_pages(prompts))
        for engine in (vllm, sglang):
            engine.wait_until_empty()
        # KV is transferred from SGLang to vLLM.
        offers = sglang.prefill(prompts)
        offered = [0 if each is None else each["num_tokens"] for each in offers]
        assert offered == [len(each) // PAGE * PAGE for each in prompts]
        tokens, computed = vllm.decode(prompts, params_of(offers))
        loaded = [min(n, len(each) - 1) for n, each in zip(offered, prompts)]
        assert tokens == wanted
        assert computed == sum(len(p) - n + 15 for p, n in zip(prompts, loaded))
        for engine in (vllm, sglang):
            engine.wait_until_empty()


@needs_vllm
@pytest.mark.parametrize("name", sampled(list(ENGINES)[:2]))
def test_two_engines_generate_the_same_tokens_as_one(name, engines):
    both_ways(engines.sglang, engines.vllm(name), range(3))


@pytest.mark.exhaustive
@needs_vllm
def test_two_qwen3_engines_generate_the_same_tokens_as_one(folders):
    made = Engines(folders["qwen3"])
    try:
        both_ways(made.sglang, made.vllm(), range(2))
    finally:
        made.close()


@needs_vllm
@pytest.mark.parametrize("name", sampled(["fp8_e4m3", "fp8_e5m2"]))
def test_engines_exchange_fp8(name, folders):
    """SGLang uses its pool for GPUs. vLLM calls e4m3 fp8."""
    made = Engines(folders["llama"], {"KVCACHE_TESTS_FP8": "1"}, kv_cache_dtype=name)
    try:
        vllm = made.vllm(kv_cache_dtype=name.replace("fp8_e4m3", "fp8"))
        both_ways(made.sglang, vllm, range(2))
        assert made.sglang.ask("state")["refused"] == 0
    finally:
        made.close()


@needs_vllm
def test_engines_exchange_latent_vectors(folders):
    made = Engines(folders["deepseek"], {"KVCACHE_TESTS_MLA": "1"})
    try:
        both_ways(made.sglang, made.vllm("mla"), range(2))
        assert made.sglang.ask("state")["refused"] == 0
    finally:
        made.close()


def test_fp8_scales_are_offered_where_they_are_applied_and_must_be_equal():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from kvcache_exchange.disaggregation.layout import check_like
    from kvcache_sglang.layout import layout_of_pool, scales_of

    pool = MHATokenToKVPool(
        **{"size": 256, "page_size": 64, "dtype": torch.float8_e4m3fn, "head_num": 2},
        **{"head_dim": 32, "layer_num": 2, "device": "cpu", "enable_memory_saver": False},
    )

    def layout(*scales, backends=("fa3", "triton")):
        layers = {
            str(number): types.SimpleNamespace(k_scale=k_scale, v_scale=v_scale)
            for number, (k_scale, v_scale) in enumerate(scales)
        }
        found = scales_of(layers, pool, set(backends))
        return layout_of_pool(pool, tuple(layers), 2, "e", 1, found)[0]

    plain, half = (None, None), (torch.tensor(0.5), torch.tensor(2.0))
    one = (torch.tensor(1.0),) * 2
    check_like([layout(plain, one, backends=["torch_native"])], [layout(one, plain)])
    check_like([layout(plain, half)], [layout(one, half)])
    assert layout(plain, half).description.v_scale == ((1.0,), (2.0,))
    with pytest.raises(ValueError, match="k_scale of layer 1, head 0"):
        check_like([layout(plain, half)], [layout(plain, one)])
    with pytest.raises(ValueError, match="expected scales of 1, or MHATokenToKVPool"):
        layout(plain, half, backends=["fa3", "torch_native"])


@needs_vllm
def test_local_prefixes_are_not_read_and_unneeded_offers_are_given_back(engines):
    sglang, vllm = engines.sglang, engines.vllm()
    (prompt,) = some_prompts(5, 1, 200, 201)
    (wanted,) = alone(sglang, [prompt])
    sglang.run([prompt[:100]], 1)  # one page is now cached
    offers = offers_of(vllm.prefill([prompt]))
    # This wrong block is never read, because its tokens are cached.
    offers[0]["blocks"][0][0] = offers[0]["blocks"][0][1]
    before = sglang.ask("state")
    assert sglang.decode([prompt], [sealed(offers[0])]) == ([wanted], 200 - 3 * PAGE)
    now = sglang.ask("state")
    assert now["loaded_tokens"] - before["loaded_tokens"] == 2 * PAGE
    vllm.wait_until_empty()
    offers = offers_of(vllm.prefill([prompt]))
    assert sglang.decode([prompt], offers) == ([wanted], 200 - 3 * PAGE)  # all pages are cached
    vllm.wait_until_empty(timeout_s=10)  # long before its lease expires
    sglang.wait_until_empty()


@pytest.mark.exhaustive
@needs_vllm
def test_many_requests_are_answered_by_a_pool_that_is_too_small(engines, folders):
    sglang = SGLangEngine(folders["llama"], extra=OPTIONS, max_total_tokens=1024)
    vllm = engines.vllm()
    try:
        sglang.answer()
        prompts = some_prompts(7, 40, 100, 300)
        wanted = alone(sglang, prompts)
        for first in range(0, 40, 10):
            some = slice(first, first + 10)
            tokens, _ = sglang.decode(prompts[some], offers_of(vllm.prefill(prompts[some])))
            assert tokens == wanted[some]
            offers = sglang.prefill(prompts[some])
            # Leases may hold at most half of the pool, so the other prompts get no offer.
            assert 0 < sum(each["num_tokens"] for each in offers if each) <= 512
            tokens, _ = vllm.decode(prompts[some], params_of(offers))
            assert tokens == wanted[some]
        for engine in (vllm, sglang):
            engine.wait_until_empty()
        print(sglang.ask("state"))
        assert sglang.ask("state")["loads"] > 3
    finally:
        sglang.close()


@needs_vllm
def test_requests_are_aborted_while_they_load(engines):
    sglang, vllm = engines.sglang, engines.vllm()
    prompts = some_prompts(12, 3, 100, 300)
    wanted = alone(sglang, prompts)
    offers = offers_of(vllm.prefill(prompts))
    vllm.signal(signal.SIGSTOP)
    try:
        sglang.send("run", prompts, 16, offers, False)
        while sglang.ask("state")["loading"] < 3:
            time.sleep(0.05)
        sglang.send("abort")
        answers = sglang.answer()
        assert [each["tokens"] for each in answers] == [None] * 3
    finally:
        vllm.signal(signal.SIGCONT)
    for engine in (vllm, sglang):
        engine.wait_until_empty(timeout_s=60)
    assert sglang.decode(prompts, [None] * 3)[0] == wanted
    sglang.wait_until_empty()


@pytest.mark.exhaustive
@needs_vllm
def test_requests_are_computed_after_a_sender_is_killed_or_a_lease_has_ended(engines, folders):
    """Leases end with a flush of the radix cache, with their expiry, or with SGLang's process."""
    vllm = engines.vllm()
    victim = SGLangEngine(folders["llama"], extra={**OPTIONS, "lease_s": 2.0})
    try:
        victim.answer()
        prompts = some_prompts(13, 3, 100, 300)
        wanted = alone(vllm, prompts)
        offers = victim.prefill(prompts)
        assert victim.ask("state")["leases"] == 3
        assert victim.ask("reset") is True and victim.ask("state")["leases"] == 0
        victim.run(some_prompts(14, 10, 250, 300), 4)  # overwrites the freed pages
        before = vllm.said("has ended: set a longer lease_s")
        assert vllm.decode(prompts, params_of(offers))[0] == wanted
        assert vllm.said("has ended: set a longer lease_s") == before + 3
        vllm.wait_until_empty()
        offers = victim.prefill(prompts)
        time.sleep(2.5)
        victim.wait_until_empty()  # the pages are released when the leases expire
        assert vllm.decode(prompts, params_of(offers))[0] == wanted
        vllm.wait_until_empty()
        offers = victim.prefill(prompts)
        victim.signal(signal.SIGKILL)
        began = time.monotonic()
        assert vllm.decode(prompts, params_of(offers))[0] == wanted
        assert time.monotonic() - began < TIMEOUT_S + 10
        vllm.wait_until_empty(timeout_s=60)
    finally:
        victim.close()


@needs_vllm
@pytest.mark.exhaustive
def test_pages_loaded_through_an_offer_are_kept_by_hicache(engines):
    """Pages loaded through an offer become hits, which HiCache copies to the host and back."""
    sglang = SGLangEngine(
        engines.folder,
        extra=OPTIONS,
        environment={"KVCACHE_TESTS_HICACHE": "1"},
        **{"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 1024},
        **{"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"},
        hicache_write_policy="write_through",
    )
    vllm = engines.vllm()
    try:
        sglang.answer()
        prompts = some_prompts(15, 8, 150, 300)
        wanted = alone(vllm, prompts)
        for _ in range(2):  # in the second round, some pages come from the host
            for prompt, tokens in zip(prompts, wanted):
                found = sglang.decode([prompt], offers_of(vllm.prefill([prompt])))
                assert found == ([tokens], len(prompt) - in_pages([prompt]))
                (offer,) = sglang.prefill([prompt])
                assert vllm.decode([prompt], params_of([offer]))[0] == [tokens]
        for engine in (vllm, sglang):
            engine.wait_until_empty()
    finally:
        sglang.close()


@needs_vllm
def test_a_paused_engine_ends_leases_and_loads_when_it_is_flushed(engines):
    sglang, vllm = engines.sglang, engines.vllm()
    prompts = some_prompts(16, 3, 100, 300)
    wanted = alone(sglang, prompts)
    to_vllm, to_sglang = sglang.prefill(prompts), offers_of(vllm.prefill(prompts))
    assert sglang.ask("reset") is True and sglang.ask("state")["leases"] == 0  # all pages are free
    before = sglang.ask("state")["failed"]
    vllm.signal(signal.SIGSTOP)
    try:
        sglang.send("run", prompts, 16, to_sglang, False)
        while sglang.ask("state")["loading"] < 3:
            time.sleep(0.05)
        sglang.send("pause", "in_place")
        assert sglang.ask("reset") is True
        now = sglang.ask("state")
        assert (now["leases"], now["loading"], now["failed"]) == (0, 0, before + 3)
    finally:
        vllm.signal(signal.SIGCONT)
    sglang.send("continue")
    assert [each["tokens"] for each in sglang.answer()] == wanted
    assert vllm.decode(prompts, params_of(to_vllm))[0] == wanted
    for engine in (vllm, sglang):
        engine.wait_until_empty(timeout_s=60)


@pytest.mark.exhaustive
@needs_vllm
def test_updated_weights_neither_use_nor_offer_the_kv_of_others(engines, folders, tmp_path):
    """Covers offers and loads that began before an update of the weights, and offers made after it."""
    write_llama(tmp_path, TINY, seed=1)
    vllm, sglang = engines.vllm(), SGLangEngine(folders["llama"], extra=OPTIONS)
    try:
        sglang.answer()
        prompts = some_prompts(17, 6, 100, 300)
        old = alone(vllm, prompts)
        assert alone(sglang, prompts) == old
        to_vllm, to_sglang = sglang.prefill(prompts[:3]), offers_of(vllm.prefill(prompts[3:]))
        vllm.signal(signal.SIGSTOP)
        try:
            sglang.send("run", prompts[3:], 16, to_sglang, False)
            while sglang.ask("state")["loading"] < 3:
                time.sleep(0.05)
            # otherwise, SGLang would not update before all requests have finished
            sglang.send("pause", "retract")
            assert sglang.ask("update", str(tmp_path)) is True
            now = sglang.ask("state")
            assert (now["leases"], now["loading"]) == (0, 0)
            sglang.send("continue")
            after = [each["tokens"] for each in sglang.answer()]
        finally:
            vllm.signal(signal.SIGCONT)
        assert vllm.decode(prompts[:3], params_of(to_vllm))[0] == old[:3]
        vllm.wait_until_empty(timeout_s=60)
        new = alone(sglang, prompts)
        assert after == new[3:] and all(a != b for a, b in zip(old, new))
        # Each engine rejects the other's offers, because the weights differ.
        before = (
            sglang.said("serve the same model in both engines"),
            vllm.said("updated at runtime"),
        )
        assert sglang.decode(prompts, offers_of(vllm.prefill(prompts)))[0] == new
        assert vllm.decode(prompts, params_of(sglang.prefill(prompts)))[0] == old
        assert sglang.ask("state")["loads"] == 0
        now = sglang.said("serve the same model in both engines"), vllm.said("updated at runtime")
        assert now == (before[0] + 6, before[1] + 6)
        for engine in (vllm, sglang):
            engine.wait_until_empty(timeout_s=60)
    finally:
        sglang.close()


@pytest.mark.exhaustive
def test_leases_end_before_a_running_request_is_retracted(engines, folders):
    sglang = SGLangEngine(
        folders["llama"],
        extra=OPTIONS,
        # SGLang then retracts requests even if the pool is large enough
        environment={"SGLANG_TEST_RETRACT": "1"},
    )
    try:
        sglang.answer()
        leased, others = some_prompts(18, 3, 129, 192), some_prompts(19, 4, 65, 100)
        wanted = [each["tokens"] for each in engines.sglang.run(others, 100)]
        assert [each["num_tokens"] for each in sglang.prefill(leased)] == [128] * 3
        assert sglang.ask("state")["leases"] == 3
        assert [each["tokens"] for each in sglang.run(others, 100)] == wanted
        assert sglang.said("Testing retraction.") and not sglang.said("has been aborted")
        assert sglang.ask("state")["leases"] == 0
        sglang.wait_until_empty()
    finally:
        sglang.close()


def test_weight_updates_that_kvcache_cannot_observe_are_rejected_at_startup():
    from kvcache_sglang.weights import check_observed

    def update_weights_from_disk(request):
        pass

    dispatcher = types.SimpleNamespace(_mapping={int: print, str: update_weights_from_disk})
    with pytest.raises(ValueError, match="update_weights_from_disk is not observed"):
        check_observed(types.SimpleNamespace(_request_dispatcher=dispatcher))


def test_prompts_that_hicache_still_copies_back_have_no_offer():
    from kvcache_sglang.exchange import Exchange

    exchange = types.SimpleNamespace(
        **{"_page_size": 4, "_tree": types.SimpleNamespace(ongoing_load_back={7: "a node"})},
        _match=lambda tokens, salt: ("a node", len(tokens)),
    )
    request = types.SimpleNamespace(origin_input_ids=[1] * 10, cache_salt=None)
    assert Exchange._offer(exchange, request) is None  # no lease is created


def serve(command, environment, port, log):
    """Start a server, wait until it responds, and return its process."""
    process = subprocess.Popen(
        [*map(str, command), "--port", str(port)],
        **{"stdout": log.open("w"), "stderr": subprocess.STDOUT, "cwd": REPO},
        **{"env": os.environ | environment, "start_new_session": True},
    )
    for _ in range(2000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    return process


def complete(port, prompt, **options):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.exhaustive
@needs_vllm
def test_a_proxy_combines_both_servers(folders, tmp_path):
    from tests.machinery.sglang_process import OPTIONS as SGLANG
    from tests.machinery.vllm_engine import ENVIRONMENT, MODULE

    folder = Path(folders["llama"])
    write_tokenizer(folder, TINY["vocab_size"])
    vllm, sglang, *proxies = (free_port() for _ in range(4))
    transfer = {
        **{"kv_connector": "KVCacheConnector", "kv_connector_module_path": MODULE},
        **{"kv_role": "kv_both", "kv_connector_extra_config": {"transport": "tcp"}},
    }
    flags = [
        *(f"--{name.replace('_', '-')}={value}" for name,
         value in SGLANG.items() if value is not True),
        "--disable-cuda-graph",
    ]  # fmt: skip
    flags = [each for each in flags if "skip-tokenizer" not in each]
    options = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", 1024]
    options += ["--enforce-eager", "--block-size", 32, "--num-gpu-blocks-override", 160]
    started = []
    try:
        started.append(
            serve(
                [VLLM.with_name("vllm"), "serve", folder, *options]
                + ["--kv-transfer-config", json.dumps(transfer)],
                ENVIRONMENT,
                vllm,
                tmp_path / "vllm.log",
            )
        )
        module = [sys.executable, "-m", "sglang.launch_server", "--model-path", folder]
        environment = {
            **{"PYTHONPATH": f"{roots.python_path()}:{STUBS}", "SGLANG_USE_CPU_ENGINE": "1"},
            **{"KVCACHE_EXCHANGE": '{"transport": "tcp"}', "OMP_NUM_THREADS": "1"},
        }
        log = tmp_path / "sglang.log"
        started.append(
            serve([*module, *flags, "--served-model-name", "tiny"], environment, sglang, log)
        )
        servers = f"http://127.0.0.1:{vllm}", f"sglang:http://127.0.0.1:{sglang}"
        for port, (prefill, decode) in zip(proxies, (servers, servers[::-1])):
            command = [sys.executable, "examples/prefill_decode_proxy.py"]
            command += ["--prefill", prefill, "--decode", decode]
            started.append(serve(command, {}, port, tmp_path / f"proxy{port}.log"))
        for port in proxies:
            for numbers in some_prompts(port % 2, 3, 100, 300):
                # Tokens below 256 are single bytes and are avoided: if a prompt ended inside a
                # multi-byte character, vLLM's answer would repeat part of the prompt.
                prompt = [256 + number % 256 for number in numbers]
                found = complete(port, prompt, max_tokens=8)
                wanted = complete(vllm, prompt, max_tokens=8)
                assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
        with urllib.request.urlopen(f"http://127.0.0.1:{sglang}/server_info", timeout=60) as answer:
            state = json.loads(answer.read())["internal_states"][0]["kvcache_exchange"]
        assert (state["loads"], state["offers"], state["failed"]) == (3, 3, 0)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_requests_whose_kv_depends_on_more_than_tokens_have_no_offer(engines):
    from kvcache_sglang.exchange import Exchange

    plain = {"mm_inputs": None, "lora_id": None, "cache_salt": "tenant"}
    assert not Exchange._has_other_inputs(types.SimpleNamespace(**plain))
    for name in ("mm_inputs", "multimodal_inputs", "input_embeds", "lora_id", "extra_key"):
        assert Exchange._has_other_inputs(types.SimpleNamespace(**plain | {name: "x"}))


@pytest.mark.parametrize("text,message", [
    ("{", "expected a JSON object"),
    ("[]", "KVCACHE_EXCHANGE is \\[\\]: expected a Mapping"),
    ('{"ports": 1}', "KVCACHE_EXCHANGE has 'ports': expected some of host, port"),
])  # fmt: skip
def test_wrong_options_are_rejected_at_startup(text, message, monkeypatch):
    monkeypatch.setenv("KVCACHE_EXCHANGE", text)
    with pytest.raises((TypeError, ValueError), match=message):
        options_from_environment()


@pytest.mark.exhaustive
@pytest.mark.parametrize("options,message", [
    ({"page_size": 1}, "SGLang uses --page-size 1"),
    ({"extra": {"ports": 1}}, "KVCACHE_EXCHANGE has 'ports': expected some of host, port"),
])  # fmt: skip
def test_unsupported_configurations_are_rejected_at_startup(options, message, folders):
    engine = SGLangEngine(folders["llama"], **{"extra": OPTIONS} | options)
    try:
        engine.process.wait(timeout=200)
        time.sleep(0.5)
        assert engine.said(message), "".join(engine.errors)[-2000:]
    finally:
        engine.close()


@pytest.mark.parametrize("model", sampled(["llama", "deepseek"]))
def test_tensor_parallel_ranks_agree_on_loads_and_leases(model, folders):
    """One engine has two ranks and kvcache's prefix cache. DeepSeek's KV is in fp8."""
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    own, environment, options = {"radix_cache_backend": "kvcache", "tp_size": 2}, {}, {}
    if model == "deepseek":
        environment = {"KVCACHE_TESTS_FP8": "1", "KVCACHE_TESTS_MLA": "1"}
        options = {"kv_cache_dtype": "fp8_e4m3"}
    two = SGLangEngine(
        folders[model], extra=OPTIONS, environment=cores | environment, **own, **options
    )
    one = SGLangEngine(folders[model], extra=OPTIONS, environment=environment, **options)
    try:
        for engine in (two, one):
            engine.answer()
        prompts = some_prompts(1, 6)
        wanted = alone(one, prompts)
        for sender, receiver in ((one, two), (two, one)):
            for engine in (one, two):
                engine.wait_until_empty()
                assert engine.ask("reset")
            found = receiver.decode(prompts, sender.prefill(prompts))
            assert found == (wanted, sum(map(len, prompts)) - in_pages(prompts))
        prompts = some_prompts(11, 3, 100, 300)
        wanted = alone(one, prompts)
        assert one.ask("reset")
        offers = one.prefill(prompts)
        one.signal(signal.SIGSTOP)
        try:
            assert two.decode(prompts, offers)[0] == wanted
            assert two.ask("state")["failed"] == 3
        finally:
            one.signal(signal.SIGCONT)
        for engine in (one, two):
            engine.wait_until_empty(timeout_s=60)
    finally:
        for engine in (two, one):
            engine.end()
        for engine in (two, one):
            engine.close()
