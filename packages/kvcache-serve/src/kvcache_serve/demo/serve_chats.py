# SPDX-License-Identifier: Apache-2.0
"""Serves chats with an engine, and compares every answer with the model's own dense cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_serve.demo.chats import Chat
from kvcache_serve.demo.report import DemoReport
from kvcache_serve.engine import Engine, Generation, SamplingParams, State, pool_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_HOST_SHARE = 4  # size of the host tier, in multiples of the pool size


@dataclass(slots=True)
class Course:
    """The state after each step. All lists have the same length."""

    num_blocks: int = 0
    held: list[int] = field(default_factory=list)  # blocks held by sequences, not cached
    held_cached: list[int] = field(default_factory=list)  # blocks held by sequences, cached
    cached: list[int] = field(default_factory=list)  # free blocks, cached
    hit_tokens: list[int] = field(default_factory=list)  # prefix-hit tokens, cumulative
    prompt_tokens: list[int] = field(default_factory=list)  # tokens of admitted prompts, cumulative
    pages_out: list[int] = field(default_factory=list)  # pages swapped out, cumulative
    pages_in: list[int] = field(default_factory=list)  # pages swapped in, cumulative
    swapped: list[int] = field(default_factory=list)  # sequences on the host
    waiting: list[int] = field(default_factory=list)  # sequences without a row


def serve_chats(
    model: PreTrainedModel,
    name: str,
    chats: list[Chat],
    *,
    seed: int = 0,
    pool_share: float = 0.2,
    kv_cache_dtype: str | None = None,
    course: Course | None = None,
    on_step: Callable[[Engine, int], None] | None = None,
    on_compared: Callable[[], None] | None = None,
) -> DemoReport:
    """Serve concurrent chats from a small pool, then compare the answers with a dense cache.

    If a user requests several answers, they are sampled with seed `seed`. All other answers use greedy
    decoding.

    Args:
        model: The transformers model.
        name: Name of the model in the report.
        chats: The chats (`make_chats`, `make_text_chats`). Served turns are added to these objects.
        seed: Seed of the samples.
        pool_share: Size of the pool, as a fraction of the blocks that all chats need.
        kv_cache_dtype: The dtype of K and V in the pool. None: the model's dtype. With another dtype,
            answers may differ from those of the dense cache.
        course: Object in which the state after each step is recorded.
        on_step: Called after each step with the engine and the number of turns that ended in the step.
        on_compared: Called after each compared turn.

    Returns:
        The results.

    Raises:
        ValueError: The chats are empty, or a chat is too long for the model.
    """
    from kvcache.memory_plan import plan_cache
    from kvcache_serve.engine.transformers import attach, layer_specs

    if not chats:
        raise ValueError("chats is empty: expected one or more")
    longest = max(chat.longest for chat in chats)
    sizes = {"max_model_len": longest, "max_num_batched_tokens": 256}
    specs = layer_specs(model, kv_cache_dtype=kv_cache_dtype)
    plan = plan_cache(specs, 2**40, **sizes)
    needed = len(chats) * plan.pages_per_request(longest)
    num_pages = max(int(needed * pool_share), plan.pages_per_request(longest)) + 1
    paged = attach(
        model,
        num_pages * plan.page_bytes,
        max_num_seqs=3 * len(chats),
        host_budget=_HOST_SHARE * num_pages * plan.page_bytes,
        kv_cache_dtype=kv_cache_dtype,
        eviction="learned",
        host_write="back",
        **sizes,
    )
    engine = Engine(paged)
    start = time.perf_counter()
    try:
        most_tokens = _serve(engine, chats, seed, course, on_step)
    finally:
        paged.detach()
    seconds = time.perf_counter() - start
    dense_start = time.perf_counter()
    num_sequences = num_identical = num_agreeing = 0
    for chat in chats:
        for number, turn in enumerate(chat.turns):
            params = _params(chat, number, seed)
            dense = tuple(
                _dense_answer(model, turn.prompt, params, i) for i in range(len(turn.answers))
            )
            chat.turns[number] = turn._replace(dense_answers=dense)
            num_sequences += len(dense)
            for answer, expected in zip(turn.answers, dense):
                num_identical += answer == expected
                num_agreeing += len(os.path.commonprefix([answer, expected]))
            if on_compared is not None:
                on_compared()
    metrics, manager = engine.metrics, paged.cache.manager
    token_bytes = sum(layer.bytes_per_token for layer in layer_specs(model))
    return DemoReport(
        model=name,
        requests=metrics.requests,
        sequences=num_sequences,
        identical_sequences=num_identical,
        agreeing_tokens=num_agreeing,
        kv_cache_dtype=kv_cache_dtype,
        prompt_tokens=metrics.prompt_tokens,
        cached_prompt_tokens=metrics.cached_prompt_tokens,
        generated_tokens=metrics.generated_tokens,
        steps=metrics.steps,
        seconds=seconds,
        kvcache_seconds=metrics.schedule_seconds,
        pool_bytes=num_pages * plan.page_bytes,
        host_bytes=_HOST_SHARE * num_pages * plan.page_bytes,
        dense_bytes=most_tokens * token_bytes,
        swapped_out_sequences=metrics.swapped_out_sequences,
        recomputed_sequences=metrics.recomputed_sequences,
        swapped_out_pages=metrics.swapped_out_pages,
        swapped_in_pages=metrics.swapped_in_pages,
        copied_pages=metrics.copied_pages,
        forked_sequences=metrics.forked_sequences,
        evicted_blocks=manager.pool.num_evicted,
        dense_seconds=time.perf_counter() - dense_start,
    )


def _serve(
    engine: Engine,
    chats: list[Chat],
    seed: int,
    course: Course | None,
    on_step: Callable[[Engine, int], None] | None,
) -> int:
    """Serve all chats.

    Returns:
        The maximum, over all steps, of the total final length of the running requests, in tokens.
    """
    serving: dict[str, tuple[Chat, Generation]] = {}

    def begin(chat: Chat) -> None:
        params = _params(chat, len(chat.turns), seed)
        generation = engine.add(chat.next_prompt(), params)
        serving[generation.request_id] = (chat, generation)

    most = 0
    for chat in chats:
        begin(chat)
    while serving:
        engine.step()
        ended = [name for name, (_, generation) in serving.items() if generation.is_finished]
        most = max(most, sum(_final_tokens(each) for _, each in serving.values()))
        for name in ended:
            chat, generation = serving.pop(name)
            answers = [each.token_ids for each in generation.samples]
            chat.end_turn(generation.prompt.tolist(), answers, generation.num_cached_tokens)
            if not chat.is_over:
                begin(chat)
        if course is not None:
            _note(course, engine)
        if on_step is not None:
            on_step(engine, len(ended))
    return most


def _final_tokens(generation: Generation) -> int:
    params = generation.params
    return params.n * (len(generation.prompt) + params.max_tokens)


def _params(chat: Chat, turn: int, seed: int) -> SamplingParams:
    params = {"max_tokens": chat.max_tokens, "stop_token_ids": chat.stop_token_ids}
    if chat.num_samples == 1:
        return SamplingParams(**params)
    return SamplingParams(
        **params, n=chat.num_samples, temperature=0.8, top_p=0.95, seed=seed + turn
    )


def _dense_answer(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, index: int
) -> list[int]:
    """Return the answer that `generate` produces with the model's own cache."""
    import torch
    from transformers import LogitsProcessorList

    from kvcache_serve.engine.sampling import Sampler

    sampler = Sampler(params, index)

    def drawn(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        token = sampler.token(logits[0])
        return torch.full_like(logits, -torch.inf).index_fill_(
            1, torch.tensor([token], device=logits.device), 0.0
        )

    tokens = torch.tensor([prompt], device=model.device)
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([drawn]),
    )
    return answer[0, len(prompt) :].tolist()


def _note(course: Course, engine: Engine) -> None:
    pool, metrics, scheduler = engine.cache.manager.pool, engine.metrics, engine.scheduler
    stats = engine.cache.manager.cache.stats
    states = pool_states(engine.cache.manager)
    course.num_blocks = pool.num_total
    course.held.append(states.held)
    course.held_cached.append(states.held_cached)
    course.cached.append(states.cached)
    course.hit_tokens.append(stats.hit_tokens)
    course.prompt_tokens.append(stats.query_tokens)
    course.pages_out.append(metrics.swapped_out_pages)
    course.pages_in.append(metrics.swapped_in_pages)
    course.swapped.append(sum(each.state is State.SWAPPED for each in scheduler.admitted))
    course.waiting.append(len(scheduler.waiting))
