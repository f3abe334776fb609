# SPDX-License-Identifier: Apache-2.0
"""Writes random weights of a tiny Llama model to files, because vLLM's `dummy` weights differ
between ranks.
"""

import itertools
import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

_QKV = "q_proj", "k_proj", "v_proj"


def write_llama(folder, config, seed=0):
    """Write the configuration and random weights of a model to a folder that vLLM can load.

    If `config` is that of a DeepSeek model, its layers have MLA and no experts.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config.get("head_dim") or config["v_head_dim"]
    q, kv = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads

    def weights(*shape, scale=0.2):
        return torch.randn(*shape, generator=generator) * scale

    tensors = {
        "model.embed_tokens.weight": weights(config["vocab_size"], hidden, scale=1.0),
        "lm_head.weight": weights(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (config["intermediate_size"], hidden),
            "mlp.up_proj": (config["intermediate_size"], hidden),
            "mlp.down_proj": (hidden, config["intermediate_size"]),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if rank := config.get("kv_lora_rank"):
            shapes = {name: shape for name, shape in shapes.items() if name[10:] not in _QKV}
            nope, rope, q_rank = (
                config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank")
            )
            num_heads = config["num_attention_heads"]
            shapes |= {
                "self_attn.q_a_proj": (q_rank, hidden),
                "self_attn.q_b_proj": (num_heads * (nope + rope), q_rank),
                "self_attn.kv_a_proj_with_mqa": (rank + rope, hidden),
                "self_attn.kv_b_proj": (num_heads * (nope + heads), rank),
            }
            norms |= {"self_attn.q_a_layernorm": q_rank, "self_attn.kv_a_layernorm": rank}
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": weights(*shape) for name, shape in shapes.items()}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": heads, "self_attn.k_norm": heads}
        tensors |= {f"{prefix}{name}.weight": torch.ones(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder, vocab_size):
    """Write a tokenizer with a token per byte and additional tokens that occur in no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"token{number}" for number in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def fill_at_random():
    """Patch vLLM to use `dummy` weights that are large enough for answers to depend on more than
    the last token.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = _fill


def _fill(loader, model, model_config):
    generator = torch.Generator().manual_seed(0)
    for name, tensor in sorted(model.state_dict().items()):
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith(".A"):  # the decay rate of states
            values = -0.2 - 0.3 * values.abs()
        elif tensor.ndim < 2:  # the weights of norms
            values = 1 + 0.1 * values
        elif "embed" not in name:
            values *= 0.2
        elif model_config.hf_config.tie_word_embeddings:  # otherwise, the model repeats each token
            values *= 0.05
        tensor.copy_(values)


def without_checkpoints():
    """Disable Mamba 2 states inside a prompt's chunk.

    With these states, vLLM's CPU kernels fail (`IndexError` in `mamba_mixer2.py`, "index 3 is out
    of bounds for dimension 0 with size 2").
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def convolve_accepted_drafts():
    """Make Mamba 2 continue its convolution after the last accepted draft, as on GPUs. vLLM's function
    for CPUs ignores `num_accepted_tokens`.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    original = mamba_mixer2.causal_conv1d_update

    def update(x, states, weight, bias, activation, *, num_accepted_tokens=None, **options):
        if num_accepted_tokens is None:
            return original(x, states, weight, bias, activation, **options)
        indices, starts = options["conv_state_indices"], options["query_start_loc"].tolist()
        out, width = torch.empty_like(x), weight.shape[1]
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            if not (index := int(indices[row].view(-1)[0])):
                continue
            first = int(num_accepted_tokens[row]) - 1
            # [dim, tokens]: the tokens before the step's first token, and the step's tokens
            line = torch.cat([states[index][:, first : first + width - 1], x[start:stop].T], 1)
            found = (line.unfold(1, width, 1) * weight[:, None]).sum(-1)
            found = found if bias is None else found + bias[:, None]
            out[start:stop] = (F.silu(found) if activation in ("silu", "swish") else found).T
            states[index][:, : line.shape[1] - 1] = line[:, 1:]
        return out

    mamba_mixer2.causal_conv1d_update = update
