# SPDX-License-Identifier: Apache-2.0
"""The engine with real model architectures: under any schedule, answers equal those computed with
the model's own dense cache.
"""

import logging
import os

import numpy as np
import pytest
import torch

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")

from kvcache import plan_cache
from kvcache.allocator import check_invariants
from kvcache.formats import format_names
from kvcache.worker import KVStorage
from kvcache_serve.engine import Engine, NgramDrafter, SamplingParams
from kvcache_serve.engine.transformers import attach, layer_specs
from kvcache_serve.engine.transformers.tiny_models import tiny_model
from tests.machinery.dense_models import MODELS, VOCAB_SIZE, Float64, dense, greedy, logits_of
from tests.machinery.shared import sampled
from tests.simulator.served_models import ModelServer

logging.getLogger("transformers").setLevel(logging.ERROR)
# Number of sequences per model. With 200, the tests take twenty minutes.
NUM_SEQUENCES = int(os.environ.get("KVCACHE_ENGINE_SEQUENCES", "6"))


def tight(
    name, *, requests=1.7, host="8MiB", max_model_len=128, num_drafts=4, model=None, **options
):
    """Attach a model with a pool that holds this many requests of maximum length."""
    model = model or dense(name)
    sizes = {"num_speculative_tokens": num_drafts}
    plan = plan_cache(
        layer_specs(model, **sizes), 2**30, max_model_len=max_model_len, max_num_batched_tokens=64
    )
    pages = int(plan.pages_per_request(max_model_len) * requests) + 1
    return attach(
        model,
        pages * plan.page_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=64,
        host_budget=host,
        num_preallocate_tokens=0,
        **sizes,
        **options,
    )


@pytest.fixture
def paged(request):
    """Attach models for a test.

    After the test, each model is detached, and its pool must be empty and intact.
    """
    made = []

    def make(*args, **options):
        made.append(tight(*args, **options))
        return made[-1]

    yield make
    for each in made:
        manager = each.cache.manager
        check_invariants(manager)
        assert manager.pool.num_free == manager.pool.num_total
        each.detach()


def prompts_of(seed, count, longest=70):
    """Return prompts, every third of which shares a prefix with an earlier one."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i in range(count):
        shared = prompts[rng.integers(i)][: rng.integers(1, 60)] if i % 3 == 2 else []
        fresh = rng.integers(1, VOCAB_SIZE, rng.integers(1, longest - len(shared))).tolist()
        prompts.append(shared + fresh)
    return prompts


def mostly_right(answers, rng):
    """Return a drafter that proposes the correct answers with every fifth token wrong."""

    def draft(request):
        tokens = request.token_ids.tolist()
        for prompt, answer in answers:
            whole = prompt + answer
            if whole[: len(tokens)] == tokens:
                count = rng.integers(0, 5)
                return [
                    t if rng.random() < 0.8 else 7 for t in whole[len(tokens) : len(tokens) + count]
                ]
        return []

    return draft


def check_all_the_ways(name, count, paged, max_tokens=40, requests=1.7):
    """Serve every prompt with each preemption mode, with and without drafts, and then again from
    the cache.
    """
    model = dense(name)
    prompts = prompts_of(MODELS.index(name), count)
    answers = [greedy(model, prompt, max_tokens) for prompt in prompts]
    rng = np.random.default_rng(0)
    drafter = mostly_right(list(zip(prompts, answers)), rng)
    for preemption, drafts in (("swap", None), ("recompute", None), ("swap", drafter)):
        model_in_pool = paged(name, requests=requests, num_drafts=4 if drafts else 0)
        engine = Engine(model_in_pool, preemption=preemption, drafter=drafts)
        for _ in range(2):
            found = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
            assert [each.samples[0].token_ids for each in found] == answers
        longest = max(range(count), key=lambda i: len(prompts[i]))
        for _ in range(2):  # served alone, so that no other prompt evicts it from the cache
            (found,) = engine.generate([prompts[longest]], SamplingParams(max_tokens=max_tokens))
            assert found.samples[0].token_ids == answers[longest]
        metrics = engine.metrics
        assert found.num_cached_tokens > 0 and metrics.cached_prompt_tokens > 0
        if preemption == "recompute":
            assert metrics.recomputed_sequences > 0 == metrics.swapped_out_sequences
        elif not drafts:  # the pages planned for drafts make swaps unnecessary
            assert metrics.swapped_out_sequences > 0 and metrics.swapped_in_pages > 0
        assert bool(drafts) == (metrics.accepted_drafts > 0)
        assert metrics.drafted_tokens > metrics.accepted_drafts or not drafts


# The other models are covered by the exhaustive variant below and by the random runs.
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["gemma3", "llama", "bamba"]))
def test_answers_equal_those_of_the_dense_cache(name, paged):
    check_all_the_ways(name, 5, paged, max_tokens=24, requests=1.3)


@pytest.mark.gpu
@pytest.mark.parametrize("name,preemption,is_own_stream", [
    ("llama", "recompute", False),
    ("gemma3", "swap", True),
    ("deepseek_v3", "swap", False),
    ("bamba", "swap", True),
])  # fmt: skip
def test_answers_on_a_gpu_equal_those_of_the_dense_cache(name, preemption, is_own_stream, paged):
    """Runs on the default stream, and on a stream that does not synchronize with it."""
    prompts = prompts_of(MODELS.index(name), 5)
    answers = [greedy(dense(name), prompt, 16) for prompt in prompts]
    model = tiny_model(name, dtype=torch.float64).to("cuda")
    engine = Engine(paged(name, model=model, requests=1.3, num_drafts=0), preemption=preemption)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if is_own_stream else torch.cuda.default_stream()
    with Float64(), torch.cuda.stream(stream):
        for _ in range(2):
            found = engine.generate(prompts, SamplingParams(max_tokens=16))
            assert [each.samples[0].token_ids for each in found] == answers
    metrics = engine.metrics
    assert metrics.swapped_out_sequences + metrics.recomputed_sequences > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_answers_of_many_sequences_equal_those_of_the_dense_cache(name, paged):
    check_all_the_ways(name, NUM_SEQUENCES, paged)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled([3, 0, 6, 1, 2, 4, 5, 7, 8]))
def test_answers_of_random_runs_equal_those_of_the_dense_cache(seed):
    ModelServer(MODELS[seed % len(MODELS)], seed).run()


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(100, 130, 10))
def test_answers_of_many_random_runs_equal_those_of_the_dense_cache(first):
    for seed in range(first, first + 10):
        ModelServer(MODELS[seed % len(MODELS)], seed).run()


@pytest.mark.slow
def test_samples_of_a_seed_do_not_depend_on_the_batch(paged):
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3, n=3)
    prompts = prompts_of(1, 6)
    alone = [Engine(paged("llama")).generate([prompt], params)[0] for prompt in prompts]
    together = Engine(paged("llama"), drafter=NgramDrafter()).generate(prompts, params)
    for one, other in zip(alone, together):
        samples = [[sample.token_ids for sample in each.samples] for each in (one, other)]
        assert samples[0] == samples[1]
        assert len(set(map(tuple, samples[0]))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, NgramDrafter()], ids=["alone", "drafts"])
def test_log_probabilities_equal_those_of_the_dense_model(drafter, paged):
    model = paged("llama")
    engine = Engine(model, drafter=drafter)
    prompt = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]
    params = SamplingParams(max_tokens=24, logprobs=2)
    deltas = list(engine.stream(prompt, params))
    tokens = [token for delta in deltas for token in delta.token_ids]
    found = [each for delta in deltas for each in delta.logprobs]
    assert tokens == greedy(dense("llama"), prompt, 24)
    wanted = logits_of(dense("llama"), prompt, tokens).log_softmax(-1)
    assert len(found) == len(wanted) == 24
    for each, token, row in zip(found, tokens, wanted):
        assert each.logprob == pytest.approx(row[token].item(), abs=1e-9)
        assert [top for top, _ in each.top] == row.topk(2).indices.tolist()
    (generation,) = engine.generate([prompt], params)
    assert [each.logprob for each in generation.samples[0].logprobs] == pytest.approx(
        [each.logprob for each in found]
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, NgramDrafter()], ids=["alone", "drafts"])
def test_repetition_penalty_equals_that_of_transformers(drafter, paged):
    engine = Engine(paged("llama"), drafter=drafter)
    prompt = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]
    params = SamplingParams(max_tokens=24, repetition_penalty=1.5)
    (generation,) = engine.generate([prompt], params)
    found = dense("llama").generate(
        torch.tensor([prompt]),
        **{"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False},
        repetition_penalty=1.5,
    )
    assert generation.samples[0].token_ids == found[0, len(prompt) :].tolist()
    assert generation.samples[0].token_ids != greedy(dense("llama"), prompt, 24)


def test_samples_share_prompt_blocks_and_copy_blocks_on_write(paged):
    engine = Engine(paged("llama"))
    params = SamplingParams(max_tokens=4, n=4, temperature=1.0, seed=0)
    engine.generate([list(range(1, 41))], params)
    assert engine.metrics.forked_sequences == 3
    # The block of tokens 32 to 39 is copied for all samples but one.
    assert engine.metrics.copied_pages == 3
    assert engine.metrics.computed_tokens == 40 + 4 * 3


class TestLowPrecision:
    """With a bf16 or quantized cache, the error of the logits is similar to that of a dense cache of
    the same precision.
    """

    @pytest.mark.slow
    @torch.inference_mode()
    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", *format_names()])
    def test_logits(self, dtype):
        name = "deepseek_v3" if dtype == "fp8_ds_mla" else "llama"
        sizes = {"fp8_ds_mla": {"kv_lora_rank": 128}}.get(dtype, {"head_dim": 128})
        exact = tiny_model(name, dtype=torch.float32, **sizes)
        model = tiny_model(
            name, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32, **sizes
        )
        paged = attach(model, "2MiB", max_model_len=128, kv_cache_dtype=dtype)
        engine, seen = Engine(paged), []
        forward = paged.forward
        paged.forward = lambda batch: seen.append(forward(batch)) or seen[-1]
        prompt = prompts_of(4, 1)[0]
        (found,) = engine.generate([prompt], SamplingParams(max_tokens=20))
        answer = found.samples[0].token_ids
        paged.detach()
        wanted = logits_of(exact, prompt, answer)
        ours = (torch.cat(seen).float() - wanted).norm() / wanted.norm()
        if dtype == "bfloat16":
            dense_error = logits_of(model, prompt, answer).float() - wanted
        else:
            dense_error = rounded_logits(exact, prompt, answer, dtype) - wanted
        theirs = dense_error.norm() / wanted.norm()
        assert 0 < ours < 1.25 * theirs + 1e-6, (ours, theirs)


@torch.inference_mode()
def rounded_logits(model, prompt, answer, dtype):
    """Return the logits of a dense cache with K and V in fp8 or in a quantized format."""
    from transformers import DynamicCache

    def rounded(key, value):
        """Round K and V, [1, heads, t, size]."""
        if dtype == "float8_e4m3fn":
            return [x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value)]
        heads, n, size = key.shape[1:]
        storage = KVStorage(2, n, heads, size, v_head_size=value.shape[-1], kv_format=dtype)
        wide = torch.bfloat16 if dtype == "fp8_ds_mla" else key.dtype
        slots = torch.arange(n, 2 * n)
        storage.write(0, *(x[0].transpose(0, 1).to(wide) for x in (key, value)), slots)
        return [x.transpose(0, 1)[None].to(key.dtype) for x in storage.gather(0, slots, wide)]

    class Rounded(DynamicCache):
        def update(self, key, value, *args, **kwargs):
            return super().update(*rounded(key, value), *args, **kwargs)

    tokens = torch.tensor([[*prompt, *answer]])
    output = model(tokens, past_key_values=Rounded(config=model.config), use_cache=True)
    return output.logits[0, len(prompt) - 1 : -1]


@pytest.mark.slow
def test_prompts_of_one_token_start_from_an_empty_state(paged):
    """Stale states of earlier requests must not be read."""
    engine = Engine(paged("bamba", requests=1.3))
    prompts = [*prompts_of(2, 4), [7], [9]]
    found = engine.generate(prompts, SamplingParams(max_tokens=6))
    answers = [greedy(dense("bamba"), prompt, 6) for prompt in prompts]
    assert [each.samples[0].token_ids for each in found] == answers
    found = engine.generate([[11], [12]], SamplingParams(max_tokens=6))
    answers = [greedy(dense("bamba"), prompt, 6) for prompt in ([11], [12])]
    assert [each.samples[0].token_ids for each in found] == answers
