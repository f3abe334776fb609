"""Requests that an engine serves: their samples, and what a step adds to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from kvcache.serving.beams import Beams
from kvcache.serving.sampling import Sampler, SamplingParams
from kvcache.serving.sequence import Sequence

FinishReason = Literal["stop", "length", "abort", "refused", "error"]


class Delta(NamedTuple):
    """Tokens that a sample has got, and how it ended, if it did."""

    request_id: str
    index: int  # of the sample
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # why it ended, where finish_reason is "error"


@dataclass(eq=False, slots=True)
class Sample(Sequence):
    """One sample of a request, or one beam: a sequence that tokens are drawn for."""

    generation: Generation | None = None
    index: int = 0
    sampler: Sampler | None = None
    finish_reason: FinishReason | None = None
    score: float | None = None  # of a beam: the sum of its tokens' log probabilities
    error: Exception | None = None  # why it ended, where finish_reason is "error"

    @property
    def token_ids(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.request.token_ids[len(self.generation.prompt) :].tolist()


@dataclass(eq=False, slots=True)
class Generation:
    """A request with its samples, `params.n` of them, or `params.beam_width` in the end."""

    request_id: str
    prompt: np.ndarray
    params: SamplingParams
    rank: tuple[int, int]
    cache_salt: str | None
    samples: list[Sample] = field(default_factory=list)
    beams: Beams | None = None
    num_sequences: int = 0  # made so far

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the cache when the request was first admitted."""
        return self.samples[0].num_cached_tokens or 0
