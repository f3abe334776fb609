# SPDX-License-Identifier: Apache-2.0
"""Collects the model properties that must be equal in two engines that exchange KV."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NUM_SAMPLES, _SAMPLE_BYTES = 1024, 64  # number and size of the samples of each file
_VARIABLE_ROPE = "longrope", "su", "dynamic"
_OTHERS = "intermediate_size", "num_attention_heads", "num_experts_per_tok", "rms_norm_eps"


def model_values(
    config: Any,
    text_config: Any,
    *,
    num_kv_heads: int,
    head_size: int,
    dtype: Any,
    cache_dtype: str,
    quantization: str | None,
    name: str,
    revision: str | None = None,
    max_model_len: int,
    has_weights: bool = True,
) -> dict[str, Any]:
    """Return, as plain values, the model properties that must be equal in both engines.

    Args:
        config: The Hugging Face configuration.
        text_config: The configuration of the model's language part.
        num_kv_heads: Number of KV heads of the model.
        head_size: Elements of K per head.
        dtype: The torch dtype of the model.
        cache_dtype: The engine's option for the dtype of KV, or "auto".
        quantization: The engine's name for the quantization method.
        name: Folder or Hugging Face name of the model.
        revision: Revision of the model.
        max_model_len: Maximum sequence length of the engine.
        has_weights: Whether the weights are read from files. False: the weights are random.

    Returns:
        Plain values, by name.
    """
    rope = rope_values(text_config)
    if has_variable_rope(text_config):  # vLLM selects the scaling factors based on these lengths
        rope |= {"max_model_len": max_model_len}
        rope |= {"max_position_embeddings": text_config.max_position_embeddings}
    weights = "random"
    if has_weights:
        weights = weights_digest(name, revision) or f"{name} of revision {revision}"
    others = {each: getattr(text_config, each, None) for each in _OTHERS}
    return {
        "architectures": list(config.architectures or ()),
        "num_hidden_layers": text_config.num_hidden_layers,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "cache_dtype": cache_dtype,
        "quantization": quantization,
        **others,
        "rope": rope,
        "weights": weights,
    }


def has_variable_rope(config: Any) -> bool:
    """Return whether a token's rotary embedding depends on the sequence length."""
    values = rope_values(config)
    ropes = [values] if "rope_type" in values else values.values()  # or one per layer type
    return any(each["rope_type"] in _VARIABLE_ROPE for each in ropes)


def rope_values(config: Any) -> dict[str, Any]:
    """Return a model's rotary-embedding parameters in a form independent of the transformers
    version.

    Args:
        config: The configuration of a language model. transformers 5 has `rope_parameters`. Earlier
            versions have `rope_theta` and `rope_scaling`.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if found and all(isinstance(each, dict) for each in found.values()):  # one per layer type
        return {kind: _rope(each, config) for kind, each in sorted(found.items())}
    return _rope(found, config)


def _rope(found: dict[str, Any], config: Any) -> dict[str, Any]:
    values = {name: each for name, each in found.items() if each is not None and name != "type"}
    kind = found.get("rope_type") or found.get("type") or "default"
    values["rope_type"] = kind.removeprefix("deepseek_")  # which engines add when they load a model
    for name in ("rope_theta", "partial_rotary_factor"):
        if (value := values.get(name, getattr(config, name, None))) is not None:
            values[name] = float(value)
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    return dict(sorted(values.items()))


def weights_digest(name: str, revision: str | None = None) -> str | None:
    """Return a digest of samples from a model's weight files, or None if they are not on this
    machine.

    Models that were fine-tuned differently have equal configurations but different weights. The digest
    covers the size and 1,024 samples of each file.

    Args:
        name: Folder of the model, a weight file, or a Hugging Face name.
        revision: Revision of a Hugging Face name.
    """
    path = Path(name)
    if not path.exists():
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except Exception:  # not in the local cache; the exception type varies by version
            return None
    files = [path] if path.is_file() else sorted(path.iterdir())
    files = [each for each in files if each.suffix in _SUFFIXES]
    digest = hashlib.sha256()
    for each in files:
        size = each.stat().st_size
        digest.update(f"{each.name} {size}\n".encode())
        with each.open("rb") as file:
            for i in range(_NUM_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32] if files else None
