# SPDX-License-Identifier: Apache-2.0
"""Selects tokens from each step's logits, and ends samples and requests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from kvcache.allocator import Request
from kvcache.allocator.request import append_token_to_each, last_tokens
from kvcache.checks import MAX_INT32, integer, shown
from kvcache_serve.engine.generation import Delta, FinishReason, Generation, Sample
from kvcache_serve.engine.metrics import Metrics
from kvcache_serve.engine.sampling import Sampler, TokenLogprob, penalize_repetition, token_logprob
from kvcache_serve.engine.scheduler import ScheduledStep, Scheduler
from kvcache_serve.engine.sequence import State

# Counter for the prefix of generated request IDs. These IDs are unique and never equal an ID chosen by
# a caller.
_NUMBERS = itertools.count()
_NONES = itertools.repeat(None)
_FINISH_REASON = attrgetter("finish_reason")


@dataclass(slots=True)
class _Columns:
    """Data of samples that decode together, collected once for many steps of `OutputProcessor`.

    - `are_individual`: whether a sample must be processed individually, because other samples
      will be forked from it, its `free` may change other requests, or its logits are needed
      for log probabilities or a penalty.
    """

    sequences: list[Sample]
    ids: list[str]
    indices: list[int]
    # Both lists contain (position, value) only for the samples that have a value.
    samplers: list[tuple[int, Sampler]]
    stops: list[tuple[int, tuple[int, ...]]]
    are_individual: bool

    @classmethod
    def of(cls, samples: list[Sample]) -> _Columns:
        ids, indices, samplers, stops = [], [], [], []
        are_individual = False
        for i, sample in enumerate(samples):
            generation = sample.generation
            params = generation.params
            ids.append(generation.request_id)
            indices.append(sample.index)
            if sample.sampler is not None:
                samplers.append((i, sample.sampler))
            if params.stop_token_ids:
                stops.append((i, params.stop_token_ids))
            has_forks = len(generation.samples) < params.n
            if has_forks or generation.free is not None:
                are_individual = True
            if params.logprobs is not None or params.repetition_penalty != 1:
                are_individual = True
        return cls(samples, ids, indices, samplers, stops, are_individual)


class OutputProcessor:
    """Appends tokens to the samples of an engine's requests, and forks and ends these samples.

    - `generations`: the unfinished requests, keyed by ID.
    - `deltas`: results that `Engine.step` has not returned yet.
    """

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self.scheduler, self.metrics = scheduler, metrics
        self.generations: dict[str, Generation] = {}
        self.deltas: list[Delta] = []
        self._columns: _Columns | None = None  # data of the last step's `decoding`

    def new_sample(
        self, generation: Generation, token_ids: np.ndarray, num_rows: int = 1
    ) -> Sample:
        """Create the next sequence of a request, without scheduling it."""
        params, number = generation.params, len(generation.samples)
        name = f"sequence-{next(_NUMBERS)}"
        return Sample(
            Request(name, token_ids, cache_salt=generation.cache_salt),
            rank=generation.rank,
            max_tokens=len(generation.prompt) + params.max_tokens,
            num_rows=num_rows,
            generation=generation,
            index=number,
            sampler=Sampler(params, number) if params.temperature else None,
            logprobs=None if params.logprobs is None else [],
        )

    def take(
        self, step: ScheduledStep, logits: torch.Tensor, best: np.ndarray, largest: np.ndarray
    ) -> None:
        """Choose tokens from logits for each sequence whose known tokens are all computed.

        Args:
            step: The completed step.
            logits: [n, vocab_size], where n is the sum of `step.num_logits`.
            best: int64[n]. The most likely token of each row.
            largest: float[n]. The largest logit of each row. NaN or inf if any logit of the row is NaN
                or inf, and -inf if all logits are -inf.
        """
        are_finite = np.isfinite(largest)
        at = self._take_decoding(step, logits, best, are_finite)
        if at == len(step.sequences):
            return
        if any(sample.sampler is not None for sample in step.sequences[at:]):
            logits = logits.cpu()  # copy to the host once, not for each draw
        stops = step.starts[at:] + list(map(len, step.token_ids[at:])) - step.num_drafts[at:]
        rest = step.sequences[at:], step.num_logits[at:].tolist(), stops.tolist()
        best, are_finite = best.tolist(), are_finite.tolist()
        for sample, count, stop in zip(*rest):
            rows = slice(at, at + count)
            at += count
            # The model may have ended a request, or appended a token to it.
            has_changed = sample.state is State.FINISHED or sample.request.num_tokens != stop
            if count == 0 or has_changed:
                continue
            generation = sample.generation
            try:
                if not are_finite[rows.start]:
                    raise ValueError(
                        f"logits of request {shown(generation.request_id)} are NaN or inf, or all -inf: "
                        "expected finite logits, and -inf only for some"
                    )
                samples = self._with_new_samples(sample)
            except Exception as error:
                self.deltas += self.end_all(generation, "error", error)
                continue
            for each in samples:
                try:
                    delta = self._extend(each, logits, rows.start, best[rows], are_finite[rows])
                except Exception as error:
                    delta = self.end(each, "error", error)
                self.deltas.append(delta)

    def _take_decoding(
        self, step: ScheduledStep, logits: torch.Tensor, best: np.ndarray, are_finite: np.ndarray
    ) -> int:
        """Append a token to each sequence of `step.decoding`. The only work per sequence is to create
        its `Delta`.

        Returns the number of these sequences, or 0 if one of them must be processed individually.
        """
        decoding = step.decoding
        if self._columns is None or self._columns.sequences is not decoding.sequences:
            self._columns = _Columns.of(decoding.sequences)
        columns, num = self._columns, len(decoding)
        samples = decoding.sequences
        if columns.are_individual or np.count_nonzero(are_finite[:num]) < num:
            return 0
        # The model may have ended a request, or appended a token to it.
        if any(map(_FINISH_REASON, samples)):
            return 0
        if last_tokens(decoding.requests, decoding.num_computed - 1) is None:
            return 0
        if columns.samplers:
            logits = logits[:num].cpu()  # copy to the host once, not for each draw
        tokens = best[:num].astype(np.int32)
        errors: dict[int, Exception] = {}
        for i, sampler in columns.samplers:
            try:
                tokens[i] = integer(sampler.token(logits[i]), "token", most=MAX_INT32)
            except Exception as error:
                errors[i] = error
        full = (decoding.max_tokens - decoding.num_computed <= 1).nonzero()[0]
        reasons: dict[int, FinishReason] = dict.fromkeys(full.tolist(), "length")
        for i, stops in columns.stops:
            if tokens[i] in stops:
                reasons[i] = "stop"
        requests = decoding.requests
        if errors:
            drawn = [i for i in range(num) if i not in errors]
            append_token_to_each([requests[i] for i in drawn], tokens[drawn])
        else:
            append_token_to_each(requests, tokens)
        self.metrics.generated_tokens += num - len(errors)
        # `tuple.__new__` is twice as fast as the constructor of a named tuple.
        fields = zip(columns.ids, columns.indices, [[t] for t in tokens.tolist()], *[_NONES] * 3)
        deltas = list(map(tuple.__new__, itertools.repeat(Delta), fields))
        for i in sorted(reasons | errors):
            if i in errors:
                deltas[i] = self.end(samples[i], "error", errors[i])
            else:
                self.end(samples[i], reasons[i])
                deltas[i] = deltas[i]._replace(finish_reason=reasons[i])
        self.deltas += deltas
        return num

    def _extend(
        self,
        sample: Sample,
        logits: torch.Tensor,
        at: int,
        best: list[int],
        are_finite: list[bool],
    ) -> Delta:
        """Accept drafts up to the first one that differs from the sample's own choice, and append one
        more token. Behind a draft whose own logits are not finite, nothing is accepted: unless the
        sample ends with this token, the next step computes its logits again and reports the error.
        """
        params, drafts = sample.generation.params, sample.drafts
        picks: list[int] = []
        logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        room = params.max_tokens - (sample.request.num_tokens - len(sample.generation.prompt))
        reason: FinishReason | None = None
        for i in range(len(best)):
            row = logits[at + i]
            if params.repetition_penalty != 1:
                known = np.concatenate([sample.request.token_ids, np.int32(picks)])
                row = penalize_repetition(row, known, params.repetition_penalty)
                best[i] = int(row.argmax())
            token = best[i] if sample.sampler is None else sample.sampler.token(row)
            picks.append(token)
            if logprobs is not None:
                logprobs.append(token_logprob(logits[at + i], token, params.logprobs))
            if token in params.stop_token_ids:
                reason = "stop"
            elif len(picks) == room:
                reason = "length"
            if reason or i == len(drafts) or drafts[i] != token or not are_finite[i + 1]:
                break
        self.metrics.generated_tokens += len(picks)
        self.metrics.accepted_drafts += len(picks) - 1
        self.scheduler.accept(sample, picks, num_rejected=len(best) - len(picks))
        if logprobs is not None:
            sample.logprobs += logprobs
        if reason:
            return self.end(sample, reason)._replace(token_ids=picks, logprobs=logprobs)
        request_id = sample.generation.request_id
        return Delta(request_id, sample.index, picks, logprobs=logprobs)

    def _with_new_samples(self, sample: Sample) -> list[Sample]:
        """Return the sample and, if its first token is being chosen, the samples forked from it."""
        generation = sample.generation
        if len(generation.samples) < generation.params.n:
            while len(generation.samples) < generation.params.n:
                generation.samples.append(self._fork(sample))
            return generation.samples.copy()
        return [sample]

    def _fork(self, parent: Sample) -> Sample:
        """Create a sequence that continues from its parent's current state."""
        child = self.new_sample(parent.generation, parent.request.token_ids)
        self.scheduler.fork(parent, child)
        self.metrics.forked_sequences += 1
        return child

    def end_all(
        self, generation: Generation, reason: FinishReason, error: Exception | None = None
    ) -> list[Delta]:
        """End all unfinished samples of a request."""
        for each in (*self.scheduler.admitted, *self.scheduler.waiting):
            if each.generation is generation:  # includes forks
                self.scheduler.finish(each)
        running = [sample for sample in generation.samples if sample.finish_reason is None]
        return [self.end(sample, reason, error) for sample in running]

    def end(self, sample: Sample, reason: FinishReason, error: Exception | None = None) -> Delta:
        """Release the resources of a sample. The request ends with its last sample.

        If the request's `free` raises an exception, the sample ends with this error.
        """
        self._columns = None  # so that this reference does not keep the sample alive
        generation = sample.generation
        free = generation.free if reason in ("stop", "length") else None
        try:
            self.scheduler.finish(sample, free=free)
        except Exception as failure:
            if free is None:
                raise
            return self.end(sample, "error", failure)
        sample.finish_reason, sample.error = reason, error
        if error is not None:
            self.metrics.failed_sequences += 1
        if generation.is_finished and self.generations.pop(generation.request_id, None):
            self.metrics.finished_requests += 1
            self.metrics.cached_prompt_tokens += generation.num_cached_tokens
        return Delta(generation.request_id, sample.index, [], reason, error)
