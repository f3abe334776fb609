# SPDX-License-Identifier: Apache-2.0
"""`kvcache doctor --vllm` for the configurations of public models, without weights.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import json

import pytest

pytest.importorskip("vllm")

from kvcache.cli import main
from tests.machinery import vllm_schedulers  # noqa: F401  settings of the environment
from tests.machinery.shared import sampled
from tests.machinery.vllm_public_models import CONFIGS


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Write the configuration of a model to a folder and return its path."""

    def write(name):
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"} | CONFIGS[name]))
        return str(folder)

    return write


def told(capsys, *arguments):
    """Run the doctor. Return its exit status and its output without line breaks."""
    status = main(["doctor", "--vllm", *arguments])
    return status, " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("name", sampled(reversed(CONFIGS), 3))
def test_public_models_are_served(name, folder_of, capsys):
    arguments = folder_of(name), "--max-model-len", "4096", "--tensor-parallel-size", "8"
    status, said = told(capsys, *arguments)
    assert status == 0, said
    assert CONFIGS[name]["architectures"][0] in said
    assert "no difference from vLLM's manager" in said
    assert "serve with --scheduler-cls kvcache_vllm.Vllm" in said


def test_doctor_lists_the_groups(folder_of, capsys):
    _, said = told(capsys, folder_of("gpt-oss-20b"), "--max-model-len", "4096")
    assert "2 groups (sliding_window of 128 tokens (window 128), full_attention of 128" in said


def test_doctor_accepts_all_options_of_vllm_serve(folder_of, capsys):
    options = ["--port", "8000", "--host", "0.0.0.0", "--api-key", "secret"]
    options += ["--tensor-parallel-size", "8", "--decode-context-parallel-size", "2"]
    options += ["--max-model-len", "1024"]
    status, said = told(capsys, folder_of("OLMo-2-7B"), *options)
    assert status == 0, said


def test_without_the_hybrid_manager_layers_with_windows_are_served(folder_of, capsys):
    options = "--max-model-len", "4096", "--disable-hybrid-kv-cache-manager"
    status, said = told(capsys, folder_of("gpt-oss-20b"), *options)
    assert status == 0 and "1 group (full_attention of 128 tokens)" in said, said


def connector(name, module, **extra):
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config["kv_connector_module_path"] = f"kvcache_vllm.{module}"
    return "--kv-transfer-config", json.dumps(config)


def multi(*connectors):
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"connectors": connectors}
    return "--kv-transfer-config", json.dumps(config)


WHISPER = {
    **{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
    **{"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "num_hidden_layers": 4},
    **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "max_target_positions": 448},
}


def test_models_that_cannot_be_created_here_are_undecided(tmp_path, capsys):
    """The processor of Whisper needs a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"} | WHISPER))
    status, said = told(capsys, str(tmp_path))
    assert status == 0, said
    assert "vLLM cannot create the model here: ValueError: WhisperMultiModalProcessor" in said
    assert "conclusion undecided: --scheduler-cls kvcache_vllm.Vllm" in said


@pytest.mark.parametrize("content,message", [
    ('{"model_type":', "is not a valid JSON file"),
    ('{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": "x"}',
     "Field 'hidden_size' expected int, got str (value: 'x')"),
    ('{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 0}',
     "vLLM cannot create the model here: ZeroDivisionError"),
])  # fmt: skip
def test_malformed_configurations_are_named(content, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    status, said = told(capsys, str(tmp_path))
    assert status == 1 and message in said, said


@pytest.mark.parametrize("options,message", [
    (["--kv-transfer-config",
      '{"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", '
      '"kv_connector_extra_config": {"lazy_offload": true}}'],
     "SimpleCPUOffloadConnector uses block_pool.free_block_queue of vLLM's own KV cache manager"),
    (["--kv-transfer-config", '{"kv_connector": "None", "kv_role": "kv_both"}'],
     "Unsupported connector type: None"),
    (multi({"kv_connector": "NixlConnector", "kv_role": "kv_both"},
           {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"lazy_offload": True}}),
     "connector SimpleCPUOffloadConnector uses block_pool.free_block_queue"),
    (multi(), "connectors is []: expected a list of configurations"),
    ([*connector("KVCacheConnector", "disaggregation", nope=1)], "connector KVCacheConnector: "),
    ([*connector("KVCacheConnector", "disaggregation"), "--pipeline-parallel-size", "2"],
     "pipeline_parallel_size is 2: this connector supports only 1"),
    ([*connector("OffloadingConnector", "offloading", spec_name="Spec")],
     "connector OffloadingConnector: Unsupported spec type: Spec"),
    ([*connector("OffloadingConnector", "offloading", spec_name="KVCacheOffloadingSpec",
                 spec_module_path="kvcache_vllm.offloading", cpu_bytes_to_use="much")],
     "cpu_bytes_to_use is 'much'"),
    (["--additional-config", '{"kvcache": {"evict": "lru"}}'], "option 'evict' for kvcache"),
    (["--no-such-option"], "vLLM rejects them: unrecognized arguments: --no-such-option"),
])  # fmt: skip
def test_unsupported_configurations_and_requests_are_reported(options, message, folder_of, capsys):
    status, said = told(capsys, folder_of("OLMo-2-7B"), *options)
    assert status == 1 and message in said, said
    assert "conclusion serve with vLLM's own scheduler" in said or "rejects" in said


def test_missing_model_is_a_usage_error(capsys):
    assert main(["doctor", "--vllm"]) == 2
    assert "--vllm: expected a model" in capsys.readouterr().err
