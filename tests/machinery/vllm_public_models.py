# SPDX-License-Identifier: Apache-2.0
"""The fields that determine the KV cache, from the published configurations of six models."""

_LLAMA_LIKE = {"num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-5}

CONFIGS = {
    "Llama-3.1-8B":
        _LLAMA_LIKE | {**{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8},
        **{"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}},
    "Gemma-3-12B":
        {**{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256},
        **{"hidden_size": 3840, "intermediate_size": 15360, "num_key_value_heads": 8},
        **{"num_attention_heads": 16, "num_hidden_layers": 48, "vocab_size": 262208},
        **{"max_position_embeddings": 131072, "sliding_window": 1024, "rms_norm_eps": 1e-6},
        **{"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}},
    "gpt-oss-20b":
        {**{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64},
        **{"hidden_size": 2880, "intermediate_size": 2880, "num_key_value_heads": 8},
        **{"num_attention_heads": 64, "num_hidden_layers": 24, "vocab_size": 201088},
        **{"max_position_embeddings": 131072, "sliding_window": 128, "rms_norm_eps": 1e-5},
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
        "layer_types": ["sliding_attention", "full_attention"] * 12},
    "OLMo-2-7B": _LLAMA_LIKE | {**{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
        **{"hidden_size": 4096, "intermediate_size": 11008, "num_key_value_heads": 32},
        **{"vocab_size": 100352, "max_position_embeddings": 4096}},
    "DeepSeek-V3": {**{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61},
        **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"qk_nope_head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 256},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.5, "vocab_size": 129280, "rms_norm_eps": 1e-6},
        "max_position_embeddings": 163840},
    "Granite-4-tiny":
        {**{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
        **{"hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024},
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 40},
        **{"mamba_n_heads": 48, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64},
        **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256},
        **{"mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope"},
        **{"num_local_experts": 64, "num_experts_per_tok": 6, "vocab_size": 100352},
        **{"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 6},
        **{"attention_multiplier": 0.0078125, "rms_norm_eps": 1e-5},
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "max_position_embeddings": 131072},
}  # fmt: skip
