# SPDX-License-Identifier: Apache-2.0
"""Tiny models with dense caches. An engine's answers are compared with those of the models."""

from functools import cache, wraps

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvcache_serve.engine.transformers.tiny_models import tiny_model

# These models cover every kind of layer: full attention, sliding windows, chunks, MLA, experts,
# sinks, and three forms of recurrent state.
MODELS = (
    *("llama", "qwen3", "gemma3", "deepseek_v3", "bamba", "qwen3_next"),
    *("gpt_oss", "llama4", "falcon_h1"),
)
RECURRENT = ("bamba", "qwen3_next", "falcon_h1")
VOCAB_SIZE = 512
# With more threads, concurrent test processes would wait for each other at every small matmul.
torch.set_num_threads(1)


@cache
def dense(name: str, num_layers: int = 4) -> PreTrainedModel:
    """Return a model in float64, so that rounding cannot decide between two nearly tied tokens."""
    model = tiny_model(name, dtype=torch.float64, **sizes_of(name, num_layers))
    if name in RECURRENT:
        forward = model.forward

        @wraps(forward)
        def in_float64(*args, **kwargs):
            with Float64():
                return forward(*args, **kwargs)

        model.forward = in_float64
    return model


class Float64(TorchFunctionMode):
    """Makes recurrent layers compute in float64.

    By default, they compute in float32 regardless of the model's dtype. In float32, the logits
    differ by up to 1e-4 depending on how a prompt is split into chunks, even with the model's own
    cache.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.float, torch.Tensor.to) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def sizes_of(name: str, num_layers: int) -> dict[str, object]:
    """Return the configuration options for a model with 2 or 4 layers.

    If there are two layers, they are of different kinds.
    """
    if num_layers == 4:
        return {}
    assert num_layers == 2
    local = {
        "gemma3": ["sliding_attention", "full_attention"],
        "gpt_oss": ["sliding_attention", "full_attention"],
        "qwen3_next": ["linear_attention", "full_attention"],
    }
    sizes: dict[str, object] = {"num_hidden_layers": 2}
    if name in local:
        sizes["layer_types"] = local[name]
    if name == "bamba":
        sizes["attn_layer_indices"] = [1]
    if name == "llama4":
        sizes |= {"no_rope_layers": [1, 0], "moe_layers": [1]}
    return sizes


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the model's own answer, generated over its dense cache."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the logits [len(answer), vocab_size] for each answer token, computed in one pass."""
    if not answer:
        return torch.zeros(0, VOCAB_SIZE)
    tokens = torch.tensor([[*prompt, *answer]])
    return model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
