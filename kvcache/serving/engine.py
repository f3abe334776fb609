"""A small engine: continuous batching over a `KVCache` and a model that reads and writes it by slots."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np
import torch

from kvcache.allocator import Request
from kvcache.assembly import KVCache
from kvcache.checks import check_name, instance, integer, integers, listed, shown, text
from kvcache.serving.batch import Batch
from kvcache.serving.beams import Beams
from kvcache.serving.drafters import Drafter
from kvcache.serving.generation import Delta, FinishReason, Generation, Sample
from kvcache.serving.metrics import Metrics
from kvcache.serving.sampling import Sampler, SamplingParams
from kvcache.serving.scheduler import ScheduledStep, Scheduler
from kvcache.serving.sequence import State
from kvcache.serving.signals import SignalHold
from kvcache.step import StepReport

# Of the requests that managers see: none of them is a caller's, and no two are alike.
_NUMBERS = itertools.count()
_MAX_PRIORITY = 2**31


class Model(Protocol):
    """What an `Engine` needs of a model; `kvcache.integrations.transformers.attach` makes one."""

    cache: KVCache
    vocab_size: int

    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes the batch's tokens, writes their K and V; logits [len(logits_indices), vocab_size]."""


class Engine:
    """Serves requests by a model whose K and V lie in a `KVCache`.

    `add` takes a request in, `step` computes one step and returns what came of it, `abort` ends a
    request at any time; `generate` does all for a list of prompts, `stream` for one. `preemption`: as of
    `Scheduler`. `drafter`: guesses tokens to come, which are computed in the same step and taken as far
    as the model would have chosen them; answers are the same with and without one.

    One thread calls an engine. What can go wrong in `step`:

    - The model fails: what it raised comes out, the step is undone, and the next `step` computes it
      again.
    - One request fails: it has logits that are NaN or inf, or its drafter or sampler raises. It ends with
      the finish_reason "error" and the `error` in its last `Delta` and its `Sample`; others are not
      affected. Logits of -inf are no error, as long as one of the row is finite.
    - A signal comes (Ctrl-C): its handler runs when the step is over, the model included. If it raises,
      the next `step` returns the tokens: none is lost or doubled. `num_unfinished` counts requests whose
      last tokens were not returned yet. Handlers wait for `add`, `abort` and `stop` in the same way.

    >>> from kvcache.integrations.transformers import attach
    >>> from kvcache.integrations.transformers.tiny_models import tiny_model
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
    ) -> None:
        instance(getattr(model, "cache", None), KVCache, "model.cache")
        self.model, self.cache, self.drafter = model, model.cache, drafter
        integer(model.vocab_size, "model.vocab_size", least=1)
        if drafter is not None and not callable(drafter):
            raise TypeError(f"drafter is {shown(drafter)}: expected a function of a request")
        planned = self.cache.plan.max_num_batched_tokens
        most = planned if max_num_batched_tokens is None else max_num_batched_tokens
        # The cache was planned for so many.
        most = integer(most, "max_num_batched_tokens", least=1, most=planned)
        self.scheduler = Scheduler(
            self.cache.manager, max_num_batched_tokens=most, preemption=preemption
        )
        self.metrics = Metrics()
        self._generations: dict[str, Generation] = {}  # unfinished
        self._deltas: list[Delta] = []  # that `step` has not returned yet
        self._num_added = 0

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and have not ended, or whose end `step` has not returned yet."""
        if not self._deltas:
            return len(self._generations)
        return len(self._generations.keys() | {delta.request_id for delta in self._deltas})

    @property
    def generations(self) -> list[Generation]:
        """The unfinished requests, in the order in which they came."""
        return list(self._generations.values())

    def add(
        self,
        prompt: SequenceOf[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """Takes a request in; its samples grow with each `step`.

        A smaller `priority` goes first. Requests with another `cache_salt` share no blocks. TypeError or
        ValueError for an empty prompt, tokens that the model has not, more tokens with the answer than
        `max_model_len`, more samples than rows, and an id that an unfinished request has. Where a signal
        handler raises, `generations` says whether the request was taken in.
        """
        params = SamplingParams() if params is None else params
        tokens = self.check(prompt, params)
        request_id = self._checked_id(request_id)
        priority = integer(priority, "priority", -_MAX_PRIORITY, _MAX_PRIORITY - 1)
        rank = (priority, self._num_added)
        generation = Generation(request_id, tokens, params, rank, cache_salt)
        first = self._new_sample(generation, tokens, num_rows=max(params.n, params.beam_width))
        if params.beam_width > 1:
            stops = params.stop_token_ids
            generation.beams = Beams(first, params.beam_width, params.max_tokens, stops)
        generation.samples.append(first)
        with SignalHold():
            self.scheduler.add(first)
            self._generations[request_id] = generation
            self._num_added += 1
            self.metrics.requests += 1
            self.metrics.prompt_tokens += len(tokens)
        return generation

    def abort(self, request_id: str) -> bool:
        """Ends a request and releases its blocks; False where none is being served by this id."""
        check_name(request_id, "request_id")
        with SignalHold():
            generation = self._generations.get(request_id)
            if generation is None:
                return False
            self._end_all(generation, "abort")
            self.metrics.aborted_requests += 1
            return True

    def stop(self, request_id: str, index: int) -> bool:
        """Ends one sample of a request, as at a stop token; False where it has ended, and of beams."""
        check_name(request_id, "request_id")
        index = integer(index, "index")
        with SignalHold():
            generation = self._generations.get(request_id)
            samples = [] if generation is None or generation.beams else generation.samples
            if index >= len(samples) or samples[index].finish_reason is not None:
                return False
            self._end(samples[index], "stop")
            return True

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int] | np.ndarray],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[Generation]:
        """The answers to prompts, in their order; what else is being served goes on besides.

        `params`: for all, or one for each. A prompt that is refused refuses all of them.
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
        tokens = [self.check(prompt, own) for prompt, own in zip(prompts, each)]
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
        """The answer to one prompt, as its tokens come; ends it where the caller stops to listen.

        Several streams of one engine may be read in turn: each has all of its own tokens.
        """
        generation = self.add(prompt, params, **options)
        sent: list[int | None] = []  # tokens of each sample, None when its end was
        try:
            while True:
                is_finished = generation.is_finished  # others' steps may finish it at a yield, too
                yield from self._unsent(generation, sent)
                if is_finished:
                    return
                if not generation.is_finished:
                    self.step()
        finally:
            self.abort(generation.request_id)

    def step(self) -> list[Delta]:
        """Computes one step; what samples have got by it. Empty where nothing is left to do."""
        with SignalHold():
            self._run_step()
        # No call stands between the next line and the caller's: here no handler can run.
        deltas, self._deltas = self._deltas, []
        return deltas

    def _run_step(self) -> None:
        """Adds to `_deltas`."""
        with self._timed("schedule_seconds"):
            if self.drafter is not None:
                self._draft()
            step = self.scheduler.schedule()
            if step is None:
                return
            self._count(step)
            try:
                report = self.cache.worker.apply(step.plan)
            except BaseException:
                self._undo(step)
                raise
            self._deltas += [self._end(sample, "refused") for sample in step.refused]
            if report.failed_pages or report.failed_host_pages:
                self.scheduler.complete(step, report)
                self.metrics.failed_steps += 1
                return
        try:
            logits = self._forward(step)
            best, are_finite = self._best(step, logits)
        except BaseException:
            self._undo(step)
            raise
        with self._timed("sample_seconds"):
            self.scheduler.complete(step, StepReport(step.plan.step_id, True))
            self._take(step, logits, best, are_finite)

    def _undo(self, step: ScheduledStep) -> None:
        self.scheduler.fail(step)
        self.metrics.failed_steps += 1

    @torch.inference_mode()
    def _forward(self, step: ScheduledStep) -> torch.Tensor | None:
        if not step.sequences:
            return None
        with self._timed("schedule_seconds"):
            batch = Batch(
                self.cache,
                step.rows,
                step.starts,
                step.token_ids,
                num_drafts=step.num_drafts,
                num_logits=step.num_logits,
            )
        with self._timed("model_seconds"):
            return self.model.forward(batch)

    def _best(
        self, step: ScheduledStep, logits: torch.Tensor | None
    ) -> tuple[list[int], list[int]]:
        """The likeliest token of each row, and whether a token can be chosen from the row at all.

        The largest logit tells: it is NaN where one is, inf where one is, and -inf where all are.
        """
        if logits is None:
            return [], []
        wanted = (sum(step.num_logits), self.model.vocab_size)
        if tuple(logits.shape) != wanted:
            raise ValueError(
                f"model.forward returned logits of shape {list(logits.shape)}: expected {list(wanted)}"
            )
        largest, best = logits.max(-1)
        best, are_finite = torch.stack([best, largest.isfinite().long()]).tolist()
        return best, are_finite

    def _take(
        self,
        step: ScheduledStep,
        logits: torch.Tensor | None,
        best: list[int],
        are_finite: list[int],
    ) -> None:
        """Tokens from logits, for each sequence whose known tokens are all computed."""
        at = 0
        stops = step.starts + list(map(len, step.token_ids)) - step.num_drafts
        for sample, count, stop in zip(step.sequences, step.num_logits, stops.tolist()):
            rows = slice(at, at + count)
            at += count
            # A beam before it in the batch may have ended it, or given it a token already, where it
            # was computed again.
            has_changed = sample.state is State.FINISHED or sample.request.num_tokens != stop
            if count == 0 or has_changed:
                continue
            generation = sample.generation
            try:
                if not all(are_finite[rows]):
                    raise ValueError(
                        f"logits of request {shown(generation.request_id)} are NaN or inf, or all -inf: "
                        "expected finite ones, and -inf only for some"
                    )
                if generation.beams is not None:
                    self._deltas += self._advance_beams(sample, logits[rows][-1])
                    continue
                samples = self._with_new_samples(sample)
            except Exception as error:
                self._deltas += self._end_all(generation, "error", error)
                continue
            for each in samples:
                try:
                    delta = self._extend(each, logits, rows.start, best[rows])
                except Exception as error:
                    delta = self._end(each, "error", error)
                self._deltas.append(delta)

    def _extend(self, sample: Sample, logits: torch.Tensor, at: int, best: list[int]) -> Delta:
        """Takes drafts as long as they are what the sample would have drawn, and one token more."""
        params, drafts = sample.generation.params, sample.drafts
        picks: list[int] = []
        room = params.max_tokens - (sample.request.num_tokens - len(sample.generation.prompt))
        reason: FinishReason | None = None
        for i in range(len(best)):
            token = best[i] if sample.sampler is None else sample.sampler.token(logits[at + i])
            picks.append(token)
            if token in params.stop_token_ids:
                reason = "stop"
            elif len(picks) == room:
                reason = "length"
            if reason or i == len(drafts) or drafts[i] != token:
                break
        self.metrics.generated_tokens += len(picks)
        self.metrics.accepted_drafts += len(picks) - 1
        self.scheduler.accept(sample, picks, num_rejected=len(best) - len(picks))
        if reason:
            self._end(sample, reason)
        return Delta(sample.generation.request_id, sample.index, picks, reason)

    def _with_new_samples(self, sample: Sample) -> list[Sample]:
        """The sample, and after the prompt those that begin with it."""
        generation = sample.generation
        if len(generation.samples) < generation.params.n:
            while len(generation.samples) < generation.params.n:
                generation.samples.append(self._fork(sample))
            return generation.samples.copy()
        return [sample]

    def _fork(self, parent: Sample) -> Sample:
        """A sequence that goes on as its parent does now."""
        child = self._new_sample(parent.generation, parent.request.token_ids)
        self.scheduler.fork(parent, child)
        self.metrics.forked_sequences += 1
        return child

    def _advance_beams(self, beam: Sample, logits: torch.Tensor) -> list[Delta]:
        generation, beams = beam.generation, beam.generation.beams
        if not beams.add_logits(beam, logits):
            return []  # it has nothing to compute until the others are as far
        choices = beams.choose()
        self.metrics.generated_tokens += len(choices)
        parents = [choice.parent for choice in choices]
        for each in beams.scores:
            if each not in parents:
                self.scheduler.finish(each)  # first: forks need rows
        if not choices:
            return self._end_beams(generation)
        scores = {}
        for i, (parent, token, score) in enumerate(choices):
            goes_on = self._fork(parent) if parent in parents[i + 1 :] else parent
            scores[goes_on] = (token, score)
        for each, (token, _) in scores.items():
            self.scheduler.accept(each, [token])
        beams.scores = {each: score for each, (_, score) in scores.items()}
        return []

    def _end_beams(self, generation: Generation) -> list[Delta]:
        """The best beams become the samples."""
        samples = []
        num_cached = generation.num_cached_tokens
        for i, (token_ids, score, _) in enumerate(generation.beams.best):
            sample = self._new_sample(generation, [*generation.prompt.tolist(), *token_ids])
            sample.index, sample.score, sample.num_cached_tokens = i, score, num_cached
            sample.state = State.FINISHED
            samples.append(sample)
        generation.samples = samples
        return [
            self._end(sample, ended.finish_reason)._replace(token_ids=ended.token_ids)
            for sample, ended in zip(samples, generation.beams.best)
        ]

    def _end_all(
        self, generation: Generation, reason: FinishReason, error: Exception | None = None
    ) -> list[Delta]:
        """Ends every sample of a request that has not ended, and its beams."""
        for each in (*self.scheduler.admitted, *self.scheduler.waiting):
            if each.generation is generation:  # beams and forks, too
                self.scheduler.finish(each)
        running = [sample for sample in generation.samples if sample.finish_reason is None]
        return [self._end(sample, reason, error) for sample in running]

    def _end(self, sample: Sample, reason: FinishReason, error: Exception | None = None) -> Delta:
        """Releases what a sample has; the request's last one ends the request."""
        generation = sample.generation
        self.scheduler.finish(sample)
        sample.finish_reason, sample.error = reason, error
        if error is not None:
            self.metrics.failed_sequences += 1
        if generation.is_finished and self._generations.pop(generation.request_id, None):
            self.metrics.finished_requests += 1
            self.metrics.cached_prompt_tokens += generation.num_cached_tokens
        return Delta(generation.request_id, sample.index, [], reason, error)

    def _unsent(self, generation: Generation, sent: list[int | None]) -> Iterator[Delta]:
        """What the samples have got beyond `sent`, which is brought up to date."""
        if generation.beams is not None and not generation.is_finished:
            return  # its samples are the best beams, in the end
        for index, sample in enumerate(generation.samples):
            if index == len(sent):
                sent.append(0)
            if sent[index] is None:
                continue
            token_ids, reason = sample.token_ids[sent[index] :], sample.finish_reason
            if token_ids or reason:
                sent[index] = sent[index] + len(token_ids) if reason is None else None
                yield Delta(generation.request_id, index, token_ids, reason, sample.error)

    def _draft(self) -> None:
        for sample in self.scheduler.admitted.copy():
            if sample.state is State.RUNNING and sample.generation.beams is None:
                is_decoding = sample.request.num_tokens > len(sample.generation.prompt)
                try:
                    sample.drafts = self._drafts_of(sample.request) if is_decoding else []
                except Exception as error:
                    self._deltas.append(self._end(sample, "error", error))

    def _drafts_of(self, request: Request) -> list[int]:
        drafts, most = list(self.drafter(request)), self.model.vocab_size - 1
        if all(type(token) is int and 0 <= token <= most for token in drafts):
            return drafts
        return [integer(token, f"drafts[{i}]", 0, most) for i, token in enumerate(drafts)]

    def _count(self, step: ScheduledStep) -> None:
        metrics, plan = self.metrics, step.plan
        metrics.steps += 1
        metrics.computed_tokens += sum(map(len, step.token_ids))
        metrics.drafted_tokens += sum(step.num_drafts)
        metrics.swapped_out_sequences = self.scheduler.num_swapped_out
        metrics.recomputed_sequences = self.scheduler.num_recomputed
        metrics.swapped_out_pages += len(plan.swap_out)
        metrics.swapped_in_pages += len(plan.swap_in)
        metrics.copied_pages += len(plan.copy)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.metrics, name, getattr(self.metrics, name) + time.perf_counter() - start)

    def _checked_id(self, request_id: str | None) -> str:
        if request_id is None:
            ids = (f"request-{number}" for number in itertools.count(self._num_added))
            return next(each for each in ids if each not in self._generations)
        check_name(request_id, "request_id")
        if text(request_id, "request_id") in self._generations:
            raise ValueError(
                f"request_id is {shown(request_id)}: expected one that is not being served"
            )
        return request_id

    def check(self, prompt: SequenceOf[int] | np.ndarray, params: SamplingParams) -> np.ndarray:
        """The tokens of a prompt that `add` would take, as int32; raises what it would. Any thread."""
        instance(params, SamplingParams, "params")
        tokens = integers(prompt, "prompt", ())
        if len(tokens) == 0:
            raise ValueError("prompt is empty: expected one token or more")
        if tokens.min() < 0 or tokens.max() >= self.model.vocab_size:
            raise ValueError(
                f"prompt has tokens from {tokens.min()} to {tokens.max()}: expected 0 to "
                f"{self.model.vocab_size - 1}, those of the model"
            )
        most = self.cache.plan.max_model_len
        if len(tokens) + params.max_tokens > most:
            raise ValueError(
                f"prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}: expected at "
                f"most {most} together, max_model_len"
            )
        num_rows = self.scheduler.max_num_rows
        for name in ("n", "beam_width"):
            if getattr(params, name) > num_rows:
                raise ValueError(
                    f"{name} is {getattr(params, name)}: expected at most {num_rows}, max_num_reqs of "
                    "the manager"
                )
        return tokens.astype(np.int32)

    def _new_sample(
        self, generation: Generation, token_ids: np.ndarray, num_rows: int = 1
    ) -> Sample:
        params, number = generation.params, generation.num_sequences
        generation.num_sequences += 1
        name = f"sequence-{next(_NUMBERS)}"
        return Sample(
            Request(name, token_ids, cache_salt=generation.cache_salt),
            rank=generation.rank,
            max_tokens=len(generation.prompt) + params.max_tokens,
            num_rows=num_rows,
            generation=generation,
            index=number,
            sampler=Sampler(params, number) if params.temperature else None,
        )
