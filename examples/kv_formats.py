# SPDX-License-Identifier: Apache-2.0
"""Serves a Llama and a DeepSeek-V3 with each quantized format, and compares their logits with those of a
bfloat16 cache:

    python examples/kv_formats.py

The models have real architectures, and small layers with random weights. Each prompt is computed in
chunks, and 24 tokens follow. The errors are those of the logits at each of these tokens, relative to the
norm of the logits. `top 1` is the fraction of tokens at which the largest logit is the same.
"""

import torch

from kvcache.formats import format_names
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import attach, layer_specs
from kvcache_serve.engine.transformers.tiny_models import tiny_model

# Heads and latents have the sizes of the full models. Smaller weights than the default make attention as
# smooth as in trained models.
MODELS = {
    "llama": {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "initializer_range": 0.05,
    },
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "initializer_range": 0.05,
    },
}
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 2, 160, 24


def logits_of(model, kv_cache_dtype, answers=None):
    """Return the logits [prompts, NEW_TOKENS, vocabulary], and the generated tokens.

    If `answers` is given, its tokens follow the prompts instead of the model's own.
    """
    paged = attach(model, "16MiB", max_model_len=256, kv_cache_dtype=kv_cache_dtype)
    engine = Engine(paged, sanitizer="stop")
    prompts = torch.randint(3, 512, (NUM_PROMPTS, PROMPT_TOKENS), generator=torch.Generator())
    seen, generated = [], []
    forward = paged.forward

    def recorded(batch):
        logits = forward(batch)
        if len(logits):
            seen.append(logits[-1].float())
        return logits

    paged.forward = recorded
    for i, prompt in enumerate(prompts.tolist()):
        if answers is None:
            (found,) = engine.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))
            generated.append(found.samples[0].token_ids)
            continue
        for n in range(NEW_TOKENS):  # the tokens computed before are prefix hits
            engine.generate([prompt + list(answers[i][:n])], SamplingParams(max_tokens=1))
    paged.detach()
    return torch.stack(seen).unflatten(0, (NUM_PROMPTS, NEW_TOKENS)), generated


def compare(name):
    """Print a table for one model."""
    model = tiny_model(name, dtype=torch.bfloat16, **MODELS[name])
    exact, answers = logits_of(model, "bfloat16")
    print(f"{name}, bfloat16: {layer_specs(model)[0].bytes_per_token} bytes per token and layer")
    print(f"{'kv_format':26}{'bytes':>7}{'median':>9}{'largest':>9}{'top 1':>7}")
    for kv_format in ("float8_e4m3fn", *format_names()):
        try:
            (spec, *_) = layer_specs(model, kv_cache_dtype=kv_format)
        except ValueError as error:
            print(f"{kv_format:26}  refused: {str(error).partition(': ')[2]}")
            continue
        logits, _ = logits_of(model, kv_format, answers)
        errors = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        print(
            f"{kv_format:26}{spec.bytes_per_token:7}{errors.median():9.2%}{errors.max():9.2%}{same:7.0%}"
        )


if __name__ == "__main__":
    for each in MODELS:
        compare(each)
