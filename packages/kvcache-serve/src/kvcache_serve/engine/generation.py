# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine, their samples, and the new tokens that each step generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from kvcache.allocator import Request
from kvcache_serve.engine.sampling import Sampler, SamplingParams, TokenLogprob
from kvcache_serve.engine.sequence import Sequence

FinishReason = Literal["stop", "length", "abort", "refused", "error"]


class Delta(NamedTuple):
    """The new tokens of a sample, and the finish reason if the sample has ended."""

    request_id: str
    index: int  # index of the sample
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # the cause if finish_reason is "error" or "refused"
    logprobs: list[TokenLogprob] | None = None  # one per token if `SamplingParams.logprobs` is set


@dataclass(eq=False, slots=True)
class Sample(Sequence):
    """One sample of a request."""

    generation: Generation | None = None
    index: int = 0
    sampler: Sampler | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # the cause if finish_reason is "error" or "refused"
    logprobs: list[TokenLogprob] | None = None  # one per token if `SamplingParams.logprobs` is set

    @property
    def token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.request.token_ids[len(self.generation.prompt) :].tolist()


@dataclass(eq=False, slots=True)
class Generation:
    """A request with its `params.n` samples."""

    request_id: str
    prompt: np.ndarray
    params: SamplingParams
    rank: tuple[int, int]
    cache_salt: str | None
    free: Callable[[Request], object] | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were not computed because other requests had computed them."""
        return self.samples[0].num_cached_tokens or 0
