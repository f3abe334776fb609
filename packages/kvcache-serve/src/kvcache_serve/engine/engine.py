# SPDX-License-Identifier: Apache-2.0
"""A small engine that runs a model with continuous batching. The model accesses a `KVCache` by slots."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Literal, Protocol

import numpy as np
import torch

from kvcache.allocator import Request
from kvcache.assembly import KVCache
from kvcache.checks import (
    check_name,
    instance,
    integer,
    integers,
    listed,
    seconds,
    shown,
    text,
)
from kvcache.events import CacheEvent
from kvcache.sanitizer import Sanitizer
from kvcache.sources import KVSource
from kvcache.step import StepPlan, StepReport
from kvcache_exchange.hints import Hint, HintExecutor, PendingHint, Receipt
from kvcache_serve.engine.batch import Batch, following
from kvcache_serve.engine.drafters import Drafter
from kvcache_serve.engine.generation import Delta, Generation, Sample
from kvcache_serve.engine.metrics import Metrics, Timer
from kvcache_serve.engine.output_processor import OutputProcessor
from kvcache_serve.engine.sampling import SamplingParams, most_likely
from kvcache_serve.engine.sanitizing import observer_of
from kvcache_serve.engine.scheduler import ScheduledStep, Scheduler
from kvcache_serve.engine.sequence import State
from kvcache_serve.engine.signals import SignalHold

_MAX_PRIORITY = 2**31
_IDLE_S = 0.0005  # pause in seconds after a step that could only wait for sources


class Model(Protocol):
    """The model interface of `Engine`.

    `kvcache_serve.engine.transformers.attach` creates an implementation.
    """

    cache: KVCache
    vocab_size: int

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch and write the K and V of its tokens.

        Returns logits [len(logits_indices), vocab_size].
        """


class Engine:
    """Serves requests with a model whose K and V are stored in a `KVCache`.

    `add` adds a request, `step` computes one step and returns the new tokens, and `abort` ends a request
    at any time. `generate` serves a list of prompts until all of them are finished, and `stream` serves
    a single prompt.

    - `preemption`: see `Scheduler`.
    - `drafter`: proposes draft tokens, which the same step verifies. The answers do not depend on
      the drafter.
    - `sources`: sources of KV outside the engine, in order of preference. A request loads from the
      first source that has KV for more of the request's tokens than the local cache. Tokens whose KV
      does not arrive in time are computed, so answers do not depend on sources. Sources must be
      created for the cache's manager. A store also receives the blocks that steps compute.
    - `sanitizer`: with "report" or "stop", all KV that attention reads is checked
      (`docs/sanitizer.md`). May also be a `Sanitizer` created by `sanitizer_of(cache)`. None: the
      sanitizer is enabled by KVCACHE_SANITIZE=1 or KVCACHE_SANITIZE=stop in the environment.

    An engine must be used from a single thread. `step` handles these failures:

    - If the model raises an exception, the exception propagates and the step is undone. The next
      `step` computes the same tokens again.
    - If a single request fails, because its logits contain NaN or inf or because its drafter,
      sampler or `free` raises an exception, the request ends with `finish_reason` "error". The
      attribute `error` of its last `Delta` and of its `Sample` contains the cause. Other requests
      are not affected. Logits of -inf are allowed as long as a row has a finite value.
    - If a request does not fit even into an empty pool, it ends with `finish_reason` "refused", and
      `error` states the number of blocks. All other requests end after a bounded number of steps (see
      `Scheduler`), because samples that do not fit together are computed one after another.
    - If a signal arrives (Ctrl-C), its handler runs only after the step, including the forward pass,
      has completed. If the handler raises an exception, the next `step` returns the tokens, so no
      tokens are lost or duplicated. `num_unfinished` includes requests whose last tokens have not
      been returned. `add`, `abort` and `stop` delay handlers in the same way.

    >>> from kvcache_serve.engine.transformers import attach
    >>> from kvcache_serve.engine.transformers.tiny_models import tiny_model
    >>> engine = Engine(attach(tiny_model("llama"), "1MiB", max_model_len=128))
    >>> for delta in engine.stream(range(40), SamplingParams(max_tokens=2)):
    ...     print(delta.index, len(delta.token_ids), delta.finish_reason)
    0 1 None
    0 1 length
    """

    def __init__(
        self,
        model: Model,
        *,
        preemption: Literal["swap", "recompute"] = "swap",
        max_num_batched_tokens: int | None = None,
        drafter: Drafter | None = None,
        sources: SequenceOf[KVSource] = (),
        sanitizer: Sanitizer | str | None = None,
    ) -> None:
        instance(getattr(model, "cache", None), KVCache, "model.cache")
        self.model, self.cache, self.drafter = model, model.cache, drafter
        integer(model.vocab_size, "model.vocab_size", least=1)
        if drafter is not None and not callable(drafter):
            raise TypeError(
                f"drafter is {shown(drafter)}: expected a function that takes a request"
            )
        planned = self.cache.plan.max_num_batched_tokens
        most = planned if max_num_batched_tokens is None else max_num_batched_tokens
        # The cache was planned for steps of at most `planned` tokens.
        most = integer(most, "max_num_batched_tokens", least=1, most=planned)
        self.scheduler = Scheduler(
            self.cache.manager,
            max_num_batched_tokens=most,
            preemption=preemption,
            sources=sources,
            synchronize=torch.cuda.synchronize if self.cache.pages.device.type == "cuda" else None,
        )
        self._observer = observer_of(self.cache, self.scheduler, sanitizer)
        self.sources = tuple(self.scheduler.sources)
        taps = [source for source in self.sources if hasattr(source, "drain_events")]
        if len(taps) > 1:
            raise ValueError(
                f"sources has {len(taps)} stores: expected at most one, because a store drains the "
                "cache's events"
            )
        self._event_tap = taps[0] if taps else self.cache.manager.cache
        self._last_report: StepReport | None = None
        self._is_saved = True  # whether the last report was passed to the sources
        self.metrics = Metrics()
        self._outputs = OutputProcessor(self.scheduler, self.metrics)
        self._num_added = 0
        # The rows and the batch of the last step in which all sequences decoded.
        self._last_decode: tuple[np.ndarray | None, Batch | None] = (None, None)
        self._scheduling = Timer(self.metrics, "schedule_seconds")
        self._computing = Timer(self.metrics, "model_seconds")
        self._sampling = Timer(self.metrics, "sample_seconds")
        self._inference_mode = torch.inference_mode()

    @property
    def sanitizer(self) -> Sanitizer | None:
        """The sanitizer, whose attribute `reports` lists its findings. None if it is disabled."""
        return None if self._observer is None else self._observer.sanitizer

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended, or whose last `Delta` has not been returned by
        `step`.
        """
        outputs = self._outputs
        if not outputs.deltas:
            return len(outputs.generations)
        return len(outputs.generations.keys() | {delta.request_id for delta in outputs.deltas})

    @property
    def generations(self) -> list[Generation]:
        """The unfinished requests, in order of arrival."""
        return list(self._outputs.generations.values())

    @property
    def is_busy(self) -> bool:
        """Whether there is work left for `step`: unfinished requests, quarantined loads, or blocks to
        store.
        """
        is_idle = self.num_unfinished == 0 and self._is_saved and not self.hints.num_pending
        return not is_idle or any(source.is_busy for source in self.sources)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all requests, write the blocks that are still queued for a store, and close the sources.

        Args:
            timeout_s: Timeout for the store in seconds. Blocks that are still queued after this time
                are not stored.
        """
        until = time.monotonic() + seconds(timeout_s, "timeout_s")
        for generation in self.generations:
            self.abort(generation.request_id)
        with SignalHold():
            self.hints.close()
        while self.is_busy and self._is_storing and time.monotonic() < until:
            self.step()
        for source in self.sources:
            source.close()

    @property
    def _is_storing(self) -> bool:
        """Whether blocks of previous steps are still queued for a store that has not failed."""
        if self._event_tap is self.cache.manager.cache or self._event_tap.is_dead:
            return False
        return not self._is_saved or self._event_tap.num_waiting_blocks > 0

    def drain_events(self) -> list[CacheEvent]:
        """Return the cache events since the last call.

        Also works if a store among the sources drains the manager's events.
        """
        return self._event_tap.drain_events()

    def add(
        self,
        prompt: SequenceOf[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        free: Callable[[Request], object] | None = None,
    ) -> Generation:
        """Add a request. Its samples grow with each `step`.

        Args:
            prompt: Token IDs.
            params: Sampling parameters.
            request_id: An ID that no unfinished request uses. None: an ID is generated.
            priority: Requests with smaller values are served first.
            cache_salt: Requests with different salts never share blocks.
            free: Function that is called with the manager's request, instead of
                `KVCacheManager.free`, when the answer is complete. For example, `Connector.publish`
                offers the request's KV to another engine. Only for requests with one sample.

        Returns:
            The added request. If a signal handler raises an exception, check `generations` to see
            whether the request was added.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The prompt is empty or contains unknown token IDs, prompt and answer exceed
                `max_model_len`, the request has more samples than there are rows, or the ID is in
                use.
        """
        params = SamplingParams() if params is None else params
        tokens = self.check(prompt, params)
        request_id = self._checked_id(request_id)
        priority = integer(priority, "priority", -_MAX_PRIORITY, _MAX_PRIORITY - 1)
        rank = (priority, self._num_added)
        if free is not None and (params.n > 1 or not callable(free)):
            raise ValueError(
                f"free is {shown(free)}, n is {params.n}: expected a function that takes a request, and "
                "a single sample"
            )
        generation = Generation(request_id, tokens, params, rank, cache_salt, free)
        first = self._outputs.new_sample(generation, tokens, params.n)
        generation.samples.append(first)
        with SignalHold():
            self.scheduler.add(first)
            self._outputs.generations[request_id] = generation
            self._num_added += 1
            self.metrics.requests += 1
            self.metrics.prompt_tokens += len(tokens)
        return generation

    def hint(
        self,
        tokens: SequenceOf[int] | np.ndarray,
        hint: Hint,
        *,
        cache_salt: str | None = None,
        on_receipt: Callable[[Receipt], object] | None = None,
    ) -> PendingHint:
        """Submit a hint about the KV of a token prefix. `step` carries it out.

        Args:
            tokens: Token IDs of the prefix, such as a conversation so far.
            hint: The hint.
            cache_salt: The salt of the requests that the hint is about.
            on_receipt: Called with the receipt, in the engine's thread.

        Returns:
            The hint. Its `receipt` is None until the hint has been carried out or refused.

        Raises:
            TypeError, ValueError: An argument is invalid, or the prefix is empty or contains unknown
                token IDs.

        Example:
            >>> from kvcache_serve.engine.transformers import attach
            >>> from kvcache_serve.engine.transformers.tiny_models import tiny_model
            >>> engine = Engine(attach(tiny_model("llama"), "1MiB", max_model_len=128))
            >>> _ = engine.generate([range(40)], SamplingParams(max_tokens=1))
            >>> engine.hint(range(40), Hint(intent="pin", ttl_s=30)).receipt.num_tokens
            32
        """
        instance(hint, Hint, "hint")
        tokens, most = self._checked_tokens(tokens, "tokens"), self.cache.plan.max_model_len
        if len(tokens) > most:
            raise ValueError(
                f"tokens has {len(tokens)} entries: expected at most {most}, max_model_len"
            )
        request = Request("kv-hint", tokens, cache_salt=cache_salt)
        with SignalHold():
            return self.hints.submit(request, hint, on_receipt=on_receipt)

    @property
    def hints(self) -> HintExecutor:
        """The executor of hints, with its counts."""
        return self.scheduler.hints

    def abort(self, request_id: str) -> bool:
        """End a request and release its blocks.

        Returns False if no unfinished request has this ID.
        """
        check_name(request_id, "request_id")
        with SignalHold():
            generation = self._outputs.generations.get(request_id)
            if generation is None:
                return False
            self._outputs.end_all(generation, "abort")
            self.metrics.aborted_requests += 1
            return True

    def stop(self, request_id: str, index: int) -> bool:
        """End one sample as if it had reached a stop token.

        Before the first token, all samples of a request are still one sequence, sample 0: stopping
        sample 0 ends the whole request, and the other samples cannot be stopped yet.

        If the request's `free` raises an exception, the sample ends with this error instead
        (`Sample.error`).

        Returns False if the sample has already ended or does not exist yet.
        """
        check_name(request_id, "request_id")
        index = integer(index, "index")
        with SignalHold():
            generation = self._outputs.generations.get(request_id)
            samples = [] if generation is None else generation.samples
            if index >= len(samples) or samples[index].finish_reason is not None:
                return False
            self._outputs.end(samples[index], "stop")
            return True

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int] | np.ndarray],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Generate answers for a list of prompts, while continuing to serve other requests.

        Args:
            prompts: Token IDs of each prompt. If any prompt is invalid, no prompt is added.
            params: Sampling parameters for all prompts, or one set per prompt.

        Returns:
            One request per prompt, in the same order.
        """
        prompts = listed(prompts, "prompts", "a sequence of prompts")
        is_one = params is None or isinstance(params, SamplingParams)
        each = [params] * len(prompts) if is_one else listed(params, "params")
        if len(each) != len(prompts):
            raise ValueError(
                f"params has {len(each)} entries: expected {len(prompts)}, one per prompt"
            )
        default = SamplingParams()
        each = [default if own is None else own for own in each]
        tokens = [
            self.check(prompt, own, name=f"prompts[{i}]")
            for i, (prompt, own) in enumerate(zip(prompts, each))
        ]
        generations: list[Generation] = []
        try:
            with SignalHold():
                for prompt, own in zip(tokens, each):
                    generations.append(self.add(prompt, own))
            while not all(generation.is_finished for generation in generations):
                self.step()
        except BaseException:
            with SignalHold():
                for generation in generations:
                    self.abort(generation.request_id)
            raise
        return generations

    def stream(
        self,
        prompt: SequenceOf[int] | np.ndarray,
        params: SamplingParams | None = None,
        **options: object,
    ) -> Iterator[Delta]:
        """Yield the answer to one prompt as its tokens are generated. Closing the iterator ends the
        request.

        Several streams of one engine can be read alternately. Each stream yields all tokens of its
        own request.
        """
        generation = self.add(prompt, params, **options)
        # Number of tokens yielded per sample. None after the sample's last `Delta` was yielded.
        sent: list[int | None] = []
        try:
            while True:
                # Another stream may run a step during a yield and finish the request.
                is_finished = generation.is_finished
                yield from self._unsent(generation, sent)
                if is_finished:
                    return
                if not generation.is_finished:
                    self.step()
        finally:
            self.abort(generation.request_id)

    def step(self) -> list[Delta]:
        """Compute one step and return the new tokens of its samples.

        Returns an empty list if no work is left.
        """
        with SignalHold():
            self._run_step()
        # Signal handlers run only at calls, so none can run between the next line and the return.
        deltas, self._outputs.deltas = self._outputs.deltas, []
        return deltas

    def _run_step(self) -> None:
        """Compute one step and append its results to the outputs."""
        with self._scheduling:
            step = self._begin_step()
        if step is None:
            return
        try:
            with self._inference_mode:
                logits = self._forward(step) if step.sequences else None
                tokens = None if logits is None else most_likely(logits)
        except BaseException:
            self._undo(step)
            raise
        with self._sampling:
            if self.sources:
                self._last_report, self._is_saved = StepReport(step.plan.step_id, True), False
            self.scheduler.complete(step)
            if tokens is not None:
                self._outputs.take(step, logits, *tokens)
        if not step.sequences and self.scheduler.is_waiting_for_sources:
            time.sleep(_IDLE_S)

    def _begin_step(self) -> ScheduledStep | None:
        """Schedule a step and apply its plan. Returns None if there is nothing to compute."""
        if self.drafter is not None:
            self._draft()
        self._save()
        step = self.scheduler.schedule()
        if step is None:
            if self.is_busy:
                time.sleep(_IDLE_S)
            return None
        self._count(step)
        try:
            if self._observer is not None:
                self._observer.scheduled(step)
            report = self.cache.worker.apply(step.plan)
            if self._observer is not None:
                self._observer.applied(step, report)
        except BaseException:
            self._undo(step)
            raise
        self._count_pages(step.plan)
        for sample in step.refused:
            delta = self._outputs.end(sample, "refused", self._shortage(sample))
            self._outputs.deltas.append(delta)
        if report.failed_pages or report.failed_host_pages:
            self.scheduler.complete(step, report)
            self.metrics.failed_steps += 1
            return None
        self.scheduler.begin_loads(step)
        return step

    def _shortage(self, sample: Sample) -> Exception:
        num_tokens, total = sample.request.num_tokens, self.cache.manager.pool.num_total
        needed = max(self.cache.plan.pages_per_request(num_tokens), total + 1)
        request_id = shown(sample.generation.request_id)
        return ValueError(
            f"request {request_id} needs at least {needed} blocks for {num_tokens} tokens: expected at "
            f"most {total}, all blocks of the pool"
        )

    def _save(self) -> None:
        """Pass the last step's blocks to the sources. Called before the next step is planned."""
        if self._last_report is not None:
            for source in self.sources:
                source.save(self._last_report)
        self._is_saved = True

    def _undo(self, step: ScheduledStep) -> None:
        self.scheduler.fail(step)
        self.metrics.failed_steps += 1

    def _forward(self, step: ScheduledStep) -> torch.Tensor:
        with self._scheduling:
            batch = self._batch(step)
            if self._observer is not None:
                self._observer.computes(step, batch)
        with self._computing:
            logits = self.model.forward(batch)
        wanted = (batch.logits_indices.shape[0], self.model.vocab_size)
        if logits.shape != wanted:
            raise ValueError(
                f"model.forward returned logits of shape {list(logits.shape)}: expected {list(wanted)}"
            )
        return logits

    def _batch(self, step: ScheduledStep) -> Batch:
        """Return the batch of a step. As long as the same sequences decode, only the inputs that change
        are computed.
        """
        rows, last = self._last_decode
        if step.rows is rows:
            return following(last, step.starts, step.token_ids[:, 0])
        batch = Batch(
            self.cache,
            step.rows,
            step.starts,
            step.token_ids,
            num_drafts=step.num_drafts,
            num_logits=step.num_logits,
        )
        if step.rows is step.decoding.rows:
            self._last_decode = step.rows, batch
        return batch

    def _unsent(self, generation: Generation, sent: list[int | None]) -> Iterator[Delta]:
        """Yield the tokens that were added to the samples since `sent`, and update `sent`."""
        for index, sample in enumerate(generation.samples):
            if index == len(sent):
                sent.append(0)
            if sent[index] is None:
                continue
            token_ids, reason = sample.token_ids[sent[index] :], sample.finish_reason
            if token_ids or reason:
                logprobs = None if sample.logprobs is None else sample.logprobs[sent[index] :]
                sent[index] = sent[index] + len(token_ids) if reason is None else None
                yield Delta(generation.request_id, index, token_ids, reason, sample.error, logprobs)

    def _draft(self) -> None:
        for sample in self.scheduler.admitted.copy():
            if sample.state is State.RUNNING:
                is_decoding = sample.request.num_tokens > len(sample.generation.prompt)
                try:
                    sample.drafts = self._drafts_of(sample.request) if is_decoding else []
                except Exception as error:
                    self._outputs.deltas.append(self._outputs.end(sample, "error", error))

    def _drafts_of(self, request: Request) -> list[int]:
        drafts, most = list(self.drafter(request)), self.model.vocab_size - 1
        if all(type(token) is int and 0 <= token <= most for token in drafts):
            return drafts
        return [integer(token, f"drafts[{i}]", 0, most) for i, token in enumerate(drafts)]

    def _count(self, step: ScheduledStep) -> None:
        metrics = self.metrics
        metrics.steps += 1
        metrics.computed_tokens += step.num_tokens
        if self.drafter is not None:
            metrics.drafted_tokens += int(step.num_drafts.sum())
        metrics.swapped_out_sequences = self.scheduler.num_swapped_out
        metrics.recomputed_sequences = self.scheduler.num_recomputed

    def _count_pages(self, plan: StepPlan) -> None:
        """Count the pages of an applied plan. Reading the plan before `apply` would delay `apply`."""
        if plan.is_empty:
            return
        metrics = self.metrics
        metrics.swapped_out_pages += len(plan.swap_out)
        metrics.swapped_in_pages += len(plan.swap_in)
        metrics.copied_pages += len(plan.copy)

    def _checked_id(self, request_id: str | None) -> str:
        if request_id is None:
            ids = (f"request-{number}" for number in itertools.count(self._num_added))
            return next(each for each in ids if each not in self._outputs.generations)
        check_name(request_id, "request_id")
        if text(request_id, "request_id") in self._outputs.generations:
            raise ValueError(
                f"request_id is {shown(request_id)}: expected an ID that no unfinished request uses"
            )
        return request_id

    def check(
        self,
        prompt: SequenceOf[int] | np.ndarray,
        params: SamplingParams,
        *,
        name: str = "prompt",
    ) -> np.ndarray:
        """Validate a prompt in the same way as `add`, and return its tokens as int32. Thread-safe.

        Args:
            prompt: Token IDs.
            params: Sampling parameters.
            name: The name of the prompt in error messages.

        Raises:
            TypeError, ValueError: See `add`.
        """
        instance(params, SamplingParams, "params")
        tokens = self._checked_tokens(prompt, name)
        most = self.cache.plan.max_model_len
        if len(tokens) + params.max_tokens > most:
            raise ValueError(
                f"{name} has {len(tokens)} tokens and max_tokens is {params.max_tokens}: expected at "
                f"most {most} in total, max_model_len"
            )
        num_rows = self.scheduler.max_num_rows
        if params.n > num_rows:
            raise ValueError(
                f"n is {params.n}: expected at most {num_rows}, the manager's max_num_reqs"
            )
        return tokens

    def _checked_tokens(self, prompt: SequenceOf[int] | np.ndarray, name: str) -> np.ndarray:
        if isinstance(prompt, (str, bytes)):
            raise TypeError(
                f"{name} is {shown(prompt)}: expected token IDs; a tokenizer encodes text into them"
            )
        tokens = integers(prompt, name, ())
        if len(tokens) == 0:
            raise ValueError(f"{name} is empty: expected one token or more")
        if tokens.min() < 0 or tokens.max() >= self.model.vocab_size:
            raise ValueError(
                f"{name} has tokens from {tokens.min()} to {tokens.max()}: expected 0 to "
                f"{self.model.vocab_size - 1}, the model's token IDs"
            )
        return tokens.astype(np.int32)
