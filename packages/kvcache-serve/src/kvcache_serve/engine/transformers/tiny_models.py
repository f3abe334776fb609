# SPDX-License-Identifier: Apache-2.0
"""Small models with seeded random weights, for tests and the demo. No files are downloaded."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvcache.checks import MAX_INT64, instance, integer, shown, text

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # large weights, so that answers depend on the prompt
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LOCAL, _FULL = "sliding_attention", "full_attention"
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
# For each name: transformers' model type, and configuration values in addition to the sizes above.
_MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 8,
            "layer_types": [_LOCAL, _LOCAL, _LOCAL, _FULL],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 24,
            "layer_types": [_LOCAL, _FULL, _LOCAL, _FULL],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 1, 1, 0],
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "moe_layers": [1, 3],
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1, 3], "attn_rotary_emb": 16, **_MAMBA}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 128, **_MAMBA}),
    "qwen3_next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", _FULL, "linear_attention", _FULL],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    ),
}


def tiny_model_names() -> tuple[str, ...]:
    """Return the names that `tiny_model` accepts."""
    return tuple(_MODELS)


def tiny_model(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: object
) -> PreTrainedModel:
    """Create a model of a real architecture, small enough to compute in milliseconds.

    Args:
        name: One of `tiny_model_names()`.
        dtype: The dtype of the weights.
        seed: Determines the weights. PyTorch's global generator is not affected.
        sizes: Configuration values to replace.

    Raises:
        ValueError: The name is unknown.
    """
    if text(name, "name") not in _MODELS:
        raise ValueError(f"name is {shown(name)}: expected one of {', '.join(_MODELS)}")
    instance(dtype, torch.dtype, "dtype")
    seed = integer(seed, "seed", -MAX_INT64, MAX_INT64)
    model_type, own = _MODELS[name]
    config = AutoConfig.for_model(model_type, **(_SIZES | own | sizes))
    # The grouped expert kernels do not support float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **experts).eval()
