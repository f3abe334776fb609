# SPDX-License-Identifier: Apache-2.0
"""The commands in docs/vllm*.md run as pasted, and the servers that they start answer OpenAI's client.

These tests run in `make test-vllm` and are skipped where vLLM is not installed. They run in order
and share the servers that the pages start.
"""

import random
import re
import time
import urllib.request

import pytest

pytest.importorskip("vllm")

import openai

from tests.machinery.pasted import Pages, blocks_of
from tests.machinery.shared import REPO
from tests.machinery.vllm_models import MODELS
from tests.machinery.vllm_weights import write_llama, write_tokenizer

pytestmark = pytest.mark.in_order
DOCS = sorted((REPO / "docs").glob("vllm*.md"))
BLOCKS = [
    pytest.param(page.name, block, id=f"{page.stem}: {block.name}")
    for page in DOCS
    for block in blocks_of(page.read_text())
    if block.kind == "run"
]
NOT_RUN = {"install"}  # downloads gigabytes
# Options that are required on a CPU, and options for small pools.
SERVE_OPTIONS = "--enforce-eager --dtype float32 --max-model-len 1024"
POOLS = dict.fromkeys(["allocator", "prefill", "decode"], "--num-gpu-blocks-override 64")
POOLS["host tier"] = "--num-gpu-blocks-override 10"
ENVIRONMENT = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    # Each server's worker runs in the engine's process, so a server has only two processes.
    **{"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    **{"VLLM_LOGGING_LEVEL": None, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
}
GENERATED = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    write_llama(model, MODELS["llama"])
    write_tokenizer(model, MODELS["llama"]["vocab_size"])
    folder = tmp_path_factory.mktemp("pasted")
    started = Pages(DOCS, folder, model, SERVE_OPTIONS, POOLS, ENVIRONMENT)
    yield started
    started.close()


@pytest.mark.parametrize("page,block", BLOCKS)
def test_commands_of_a_page_run_as_pasted(page, block, pages):
    pages.check(page, block)


def test_code_blocks_without_a_run_marker_are_rejected():
    blocks = [block for page in DOCS for block in blocks_of(page.read_text())]
    assert {block.name for block in blocks if block.kind == "not run"} == NOT_RUN


# --- requests of OpenAI's client ---


def client(pages, name):
    """Return a client of a server. The client does not retry."""
    address = pages.wait_for(name)
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


def model_of(pages):
    return client(pages, "allocator").models.list().data[0].id


def complete(at, model, prompt, max_tokens=12, **more):
    """Return the generated tokens."""
    options = GENERATED | {"extra_body": GENERATED["extra_body"] | more}
    answer = at.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, **options)
    return answer.choices[0].token_ids


def prompts(seed, count, least=150, most=600):
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [
        [rng.randrange(3, 512) for _ in range(rng.randrange(least, most))] for _ in range(count)
    ]


def metrics(pages, name):
    """Return the values of all metrics, keyed by name and labels. The labels for engine and model
    are omitted.
    """
    with urllib.request.urlopen(f"{pages.wait_for(name)}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = {}
    for line in lines:
        if not line.startswith("#"):
            key, value = line.rsplit(" ", 1)
            key = re.sub(r'(engine|model_name)="[^"]*",?', "", key).replace(",}", "}")
            values[key.replace("{}", "")] = float(value)
    return values


class Growth:
    """Measures how much a server's metrics grow while requests run."""

    def __init__(self, pages, name):
        self._pages, self._name = pages, name
        self._before = metrics(pages, name)

    def __call__(self, key):
        return metrics(self._pages, self._name)[key] - self._before.get(key, 0)

    def reach(self, **wanted):
        """Wait until the prompt tokens from these sources have grown by these numbers. Metrics are
        updated after answers are sent.
        """
        deadline = time.monotonic() + 20
        while (found := {each: self.tokens(each) for each in wanted}) != wanted:
            assert time.monotonic() < deadline, f"{found}, expected {wanted}"
            time.sleep(0.2)

    def tokens(self, source):
        return self(f'vllm:prompt_tokens_by_source_total{{source="{source}"}}')


def test_the_decode_server_computes_only_the_last_token_of_each_prompt(pages):
    model, plain, proxy = model_of(pages), client(pages, "allocator"), client(pages, "proxy")
    asked = prompts(1, 4)
    wanted = [complete(plain, model, prompt) for prompt in asked]
    grown = Growth(pages, "decode")
    assert [complete(proxy, model, prompt) for prompt in asked] == wanted
    grown.reach(local_compute=4, external_kv_transfer=sum(map(len, asked)) - 4)
    assert grown("kvcache:failed_loads_total") == 0


def test_an_answer_is_streamed_through_the_proxy(pages):
    model, (prompt,) = model_of(pages), prompts(2, 1)
    wanted = complete(client(pages, "allocator"), model, prompt)
    stream = client(pages, "proxy").completions.create(
        model=model,
        prompt=prompt,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **GENERATED,
    )
    chunks = list(stream)
    parts = [chunk.choices[0].token_ids for chunk in chunks if chunk.choices]
    assert len(parts) > 3 and [token for part in parts for token in part or []] == wanted
    assert chunks[-1].usage.prompt_tokens == len(prompt)


def test_parameters_of_a_client_do_not_reach_the_decode_server(pages):
    model, (prompt,) = model_of(pages), prompts(3, 1)
    wanted = complete(client(pages, "allocator"), model, prompt)
    grown = Growth(pages, "decode")
    params = {"do_remote_prefill": True, "kvcache": {"ranks": []}}
    assert complete(client(pages, "proxy"), model, prompt, kv_transfer_params=params) == wanted
    grown.reach(local_compute=1)


def test_a_rejected_request_gets_the_error_of_vllm(pages):
    with pytest.raises(openai.BadRequestError, match=r"maximum context length|max_tokens"):
        complete(client(pages, "proxy"), model_of(pages), [3] * 100, max_tokens=5000)


def test_a_prompt_evicted_from_the_device_is_loaded_from_the_host(pages):
    """The device has 9 blocks of 128 tokens."""
    model, plain, tier = model_of(pages), client(pages, "allocator"), client(pages, "host tier")
    first, *others = prompts(4, 5, 600, 700)
    wanted = complete(plain, model, first)
    assert complete(tier, model, first) == wanted
    for prompt in others:
        complete(tier, model, prompt)
    grown = Growth(pages, "host tier")
    assert complete(tier, model, first) == wanted
    in_host = len(first) // 128 * 128
    grown.reach(local_compute=len(first) - in_host, external_kv_transfer=in_host, local_cache_hit=0)
    assert grown("vllm:external_prefix_cache_hits_total") == in_host
    assert grown("kvcache:loads_total") == 1 and grown("kvcache:failed_loads_total") == 0
    assert metrics(pages, "host tier")['kvcache:evicted_blocks_total{group="0"}'] > 0


# --- kills ---


def test_killed_decode_server_is_reported_and_works_after_a_restart(pages):
    model, proxy, (prompt,) = model_of(pages), client(pages, "proxy"), prompts(5, 1)
    wanted = complete(client(pages, "allocator"), model, prompt)
    stream = proxy.completions.create(
        model=model, prompt=prompt, max_tokens=400, stream=True, **GENERATED
    )
    next(stream)
    pages.kill("decode")
    with pytest.raises(openai.APIError, match=r"decode server http://localhost:.* failed"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match=r"decode server .* failed") as failed:
        complete(proxy, model, prompt)
    assert failed.value.status_code == 502
    pages.restart("decode")
    grown = Growth(pages, "decode")
    assert complete(proxy, model, prompt) == wanted
    grown.reach(local_compute=1, external_kv_transfer=len(prompt) - 1)


def test_killed_prefill_server_costs_no_answer(pages):
    """The server is killed between prefill and decode of one request."""
    model, plain, proxy = model_of(pages), client(pages, "allocator"), client(pages, "proxy")
    offered, other = prompts(6, 2)
    prefilled = client(pages, "prefill").completions.create(
        model=model,
        prompt=offered,
        max_tokens=1,
        extra_body={"kv_transfer_params": {"do_remote_decode": True}},
    )
    params = prefilled.kv_transfer_params
    assert params["do_remote_prefill"]
    pages.kill("prefill")
    decode = client(pages, "decode")
    found = complete(decode, model, offered, kv_transfer_params=params)
    assert found == complete(plain, model, offered)
    # Without a prefill server, the decode server computes the whole prompt.
    grown = Growth(pages, "decode")
    assert complete(proxy, model, other) == complete(plain, model, other)
    grown.reach(local_compute=len(other), external_kv_transfer=0)
    assert "the decode server computes the prompt" in pages.log("proxy")
