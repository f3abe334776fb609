# SPDX-License-Identifier: Apache-2.0
"""Runs a tiny instance of every causal architecture in transformers over a paged cache and reports
the outcome.

The reference answers come from `generate`, called with one prompt at a time. The engine serves all
prompts together and splits them into chunks. The pool is small enough that some requests are
preempted, by swap and by recompute, and the second pass starts from prefix hits.
"""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from kvcache import plan_cache
from kvcache.allocator import check_invariants
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import PagedModel, UnsupportedModel, attach, layer_specs
from tests.machinery.dense_models import greedy
from tests.machinery.tiny_architectures import VOCAB_SIZE, tiny_architecture

_MAX_MODEL_LEN, MAX_TOKENS, _TOKENS_PER_STEP = 96, 10, 24
_REFUSED, _RIGHT, _WRONG, _RAISED = "refused", "right", "wrong", "raised"
_NOT_BUILT = "not built"  # transformers itself cannot build or run a tiny instance


class Verdict(NamedTuple):
    """The outcome for one architecture.

    The fields after `reason` are set only if the answers are correct.
    """

    answer: str
    reason: str = ""
    is_batched: bool | None = None
    num_preempted: int = 0
    num_cached_tokens: int = 0


def prompts() -> list[list[int]]:
    """Return prompts of different lengths, some shorter and some longer than a step, a block and a
    window.

    The fifth prompt shares a prefix with the first.
    """
    rng = np.random.default_rng(3)
    lines = [rng.integers(3, VOCAB_SIZE - 8, count).tolist() for count in (61, 38, 7, 1, 9, 26)]
    lines[4] = lines[0][:36] + lines[4]
    return lines


def judge(model_type: str) -> Verdict:
    """Build the model, generate reference answers, and compare an engine's answers with them."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some models print to stdout
            model = tiny_architecture(model_type)
            answers = [greedy(model, prompt, MAX_TOKENS) for prompt in prompts()]
    # The models in transformers may raise any exception.
    except Exception as error:
        return Verdict(_NOT_BUILT, _line(error))
    try:
        return judge_model(model, answers)
    except UnsupportedModel as error:
        return Verdict(_REFUSED, error.reason)
    except Exception as error:
        return Verdict(_RAISED, _line(error))


def judge_model(model: PreTrainedModel, answers: list[list[int]]) -> Verdict:
    """Compare an engine's answers to `prompts()` with the reference answers.

    The engine preempts requests, by swap and by recompute.
    """
    num_preempted = num_cached_tokens = 0
    paged = _in_tight_pool(model)
    try:
        for preemption in ("swap", "recompute"):  # the second pass starts from prefix hits
            engine = Engine(paged, preemption=preemption)
            found = engine.generate(prompts(), SamplingParams(max_tokens=MAX_TOKENS))
            for i, each in enumerate(found):
                if each.samples[0].token_ids != answers[i]:
                    return Verdict(
                        _WRONG,
                        f"prompt {i}, {preemption}: {each.samples[0].token_ids}, not {answers[i]}",
                        not paged.by_request,
                    )
            metrics, manager = engine.metrics, paged.cache.manager
            num_preempted += metrics.swapped_out_sequences + metrics.recomputed_sequences
            num_cached_tokens += metrics.cached_prompt_tokens
            check_invariants(manager)
            assert manager.pool.num_free == manager.pool.num_total, "blocks are still held"
    finally:
        paged.detach()
    is_batched = not paged.by_request
    return Verdict(_RIGHT, paged.why_by_request, is_batched, num_preempted, num_cached_tokens)


def _in_tight_pool(model: PreTrainedModel) -> PagedModel:
    sizes = {"max_model_len": _MAX_MODEL_LEN, "max_num_batched_tokens": _TOKENS_PER_STEP}
    plan = plan_cache(layer_specs(model), 2**40, **sizes)
    num_pages = int(plan.pages_per_request(_MAX_MODEL_LEN) * 1.5) + 1
    return attach(
        model,
        num_pages * plan.page_bytes,
        host_budget=4 * num_pages * plan.page_bytes,
        num_preallocate_tokens=0,
        **sizes,
    )


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
