# SPDX-License-Identifier: Apache-2.0
"""Builds tiny models of every causal architecture in transformers, with seeded random weights."""

from __future__ import annotations

import re

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 160
# (pattern, value): a configuration field is set to the value of the first pattern that matches its
# whole name. Fields whose default is None stay None, because they are derived from other fields.
_SIZES = [
    (re.compile(pattern), value)
    for pattern, value in [
        (r"(.*_)?vocab_size|pronunciation_vocab_size", VOCAB_SIZE),
        (r"(.*_)?hidden_size|d_model|n_embd|dim|(input_|output_|ple_)?embedding_size|lru_width", 64),
        (r"word_embed_proj_dim|emb_dim|embedding_dim|(attention_)?hidden_size|output_dim", 64),
        (r"(shape|pronunciation|ple)_embed_dim", 32),
        (r"(num_(hidden_)?|n_|decoder_|encoder_|num_decoder_|num_encoder_)layers?|num_blocks", 4),
        (r"(num_(attention_)?|n_|decoder_|encoder_|num_decoder_|num_encoder_)?"
         r"(attention_)?heads?|swa_num_attention_heads|linear_num_heads", 4),
        (r"num_heads", 4),
        (r"(swa_|global_)?num_(key_value|global_key_value|kv)_heads|num_query_groups", 2),
        (r"(swa_|global_|attention_|linear_|swa_v_)?head_dim|kv_channels|d_head|dim_head", 16),
        (r"attention_head_size", 16),
        (r".*intermediate_size(_mlp)?|(.*_)?ffn_dim|n_inner|(expert_)?ffn_hidden_size|d_inner|dff", 128),
        (r"dim_ff|feed_forward_size", 128),
        (r"(n_routed|num_local|num|moe_num)_experts|zero_expert_num", 4),
        (r"num_experts_per_tok(en)?|moe_topk|moe_k", 2),
        (r"n_group|topk_group|num_expert_group|n_shared_experts", 1),
        (r"kv_lora_rank", 32),
        (r"q_lora_rank", 24),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r"qk_nope_head_dim|v_head_dim", 16),
        (r"qk_head_dim", 24),
        (r"(max|n)_position(_embedding)?s|n_ctx|max_seq(uence)?_len(gth)?", 512),
        (r"max_(source|target)_positions|model_max_length|context_length", 512),
        (r"sliding_window(_size)?|attention_window_size|window_size|local_attention", 24),
        (r"local_attention_window_len", 24),
        (r"attention_chunk_size", 32),
        (r"(mamba_)?n_heads|mamba_num_heads|linear_num_value_heads|n_mamba_heads", 4),
        (r"linear_num_key_heads", 2),
        (r"mamba_d_head|mamba_head_?dim", 32),
        (r"linear_(key|value)_head_dim", 16),
        (r"mamba_(n|num)_groups|n_groups|mamba_ngroups", 1),
        (r"mamba_d_state|state_size|ssm_state_size", 16),
        (r"mamba_dt_rank|time_step_rank|.*_rank", 8),
        (r"mamba_chunk_size|chunk_size", 16),
        (r"mamba_d_ssm", 128),
        (r"n_(input|recurrent|output)_layers", 2),
        (r"initializer_range|init_std", 0.2),
        (r"first_k_dense_replace", 1),
        (r"tie_word_embeddings|use_mambapy", False),
        (r"(eos|bos|sep|cls|pad|decoder_start|forced_eos|forced_bos)_token_id", 0),
        (r".*dropout.*|.*_pdrop|.*layerdrop", 0.0),
        (r"is_decoder", True),
    ]
]  # fmt: skip
# Values that no pattern determines.
_LOCAL, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_OWN: dict[str, dict[str, object]] = {
    "bailing_hybrid": {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]},
    "bamba": {"attn_layer_indices": [1, 3], "attn_rotary_emb": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            _FULL: {"rope_type": "default", "rope_theta": 1e4},
            _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32},
    "gemma3n_text": {"layer_types": [_LOCAL, _FULL, _LOCAL, _FULL], "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL]},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 16},
    "reformer": {"attn_layers": ["local"] * 4, "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [16, 32]},
    "zamba": {"attention_hidden_size": 128},
    "zamba2": {"layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
        "attention_hidden_size": 128, "attention_head_dim": 32, "kv_channels": 32,
        "num_query_groups": 4},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_FLOAT32 = ("xglm", "xlnet", "xlstm")


def architectures() -> tuple[str, ...]:
    """Return every model type for which transformers registers a causal language model."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **fields: object) -> PreTrainedConfig:
    """Return the configuration of a model type with reduced sizes in all fields, including those of
    sub-configurations.
    """
    return CONFIG_MAPPING[model_type](**(_shrunk(CONFIG_MAPPING[model_type]) | fields))


def _shrunk(config_class: type[PreTrainedConfig]) -> dict[str, object]:
    model_type = config_class.model_type
    own = _OWN.get(model_type, {})
    try:
        config = config_class()
    except ValueError:
        config = config_class(**own)
    fields: dict[str, object] = {}
    for name, value in config.to_dict().items():
        if name in config.sub_configs:
            sub = getattr(config, name)
            fields[name] = None if sub is None else _shrunk(type(sub))
            continue
        for pattern, small in _SIZES:
            if pattern.fullmatch(name):
                if isinstance(value, int | float):
                    fields[name] = type(value)(small)
                break
    if "kv_lora_rank" in fields:  # MLA
        fields |= {"head_dim": 8, "num_key_value_heads": 4}
    return fields | own


def tiny_architecture(model_type: str, *, seed: int = 0, **fields: object) -> PreTrainedModel:
    """Return a tiny model in float64, or in float32 if it supports no other dtype.

    In float64, the scores of two tokens are practically never so close that rounding decides
    between the tokens. The weights depend only on `seed`. `fields` overrides fields of the
    configuration.
    """
    dtype = torch.float32 if model_type in _FLOAT32 else torch.float64
    config = tiny_config(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation="eager"
            )
        except (ValueError, TypeError):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        _widen(model)
    return model.eval()


def _widen(model: PreTrainedModel) -> None:
    """Widen the distribution of the weights, because with the usual initialization, answers hardly
    depend on the prompt.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 1.0 if id(parameter) in embeddings else 0.2)
        else:  # biases and scales: the default of some is 0, which would hide their effect
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name in ("forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, name, None)
