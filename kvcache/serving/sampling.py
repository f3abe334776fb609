"""How the next token is chosen from logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kvcache.checks import MAX_INT32, MAX_INT64, integer, listed, number


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer is generated. TypeError or ValueError for values out of range.

    - `max_tokens`: of the answer, 1 or more.
    - `temperature`: 0 takes the most likely token; above, tokens are drawn from logits divided by it. Any
      number above 0 is served, however small: the differences to the largest logit are divided, so that
      the most likely token is drawn where they are too large for a float.
    - `top_k`: only so many most likely tokens are drawn from; None: all. `top_p`: only the most likely
      ones that together have this probability.
    - `seed`: the draws of a sample depend on it, on the sample's number and on nothing else in the batch;
      None: they differ each time.
    - `n`: samples, which share the prompt's blocks.
    - `beam_width`: above 1, the answer's samples are the best that a beam search of this width finds, by
      the sum of the log probabilities; only with temperature 0 and n 1.
    - `stop_token_ids`: an answer ends with one of these.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    beam_width: int = 1
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # What is checked is what is kept: plain numbers, whatever kind of number came.
        keep = functools.partial(object.__setattr__, self)
        for name in ("max_tokens", "n", "beam_width"):
            keep(name, integer(getattr(self, name), name, least=1))
        keep("temperature", number(self.temperature, "temperature"))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: expected 0 or more, finite")
        keep("top_p", number(self.top_p, "top_p"))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: expected above 0, at most 1")
        if self.top_k is not None:
            keep("top_k", integer(self.top_k, "top_k", least=1))
        if self.seed is not None:
            keep("seed", integer(self.seed, "seed", -MAX_INT64, MAX_INT64))
        if self.beam_width > 1 and (self.n > 1 or self.temperature):
            raise ValueError(
                f"beam_width is {self.beam_width} with n {self.n} and temperature {self.temperature}: "
                "expected n 1 and temperature 0"
            )
        stops = tuple(
            integer(token, f"stop_token_ids[{i}]", most=MAX_INT32)
            for i, token in enumerate(listed(self.stop_token_ids, "stop_token_ids"))
        )
        keep("stop_token_ids", stops)


class Sampler:
    """Draws the tokens of one sample, by a generator of its own."""

    def __init__(self, params: SamplingParams, nth: int) -> None:
        self._params = params
        self._generator = None
        if params.temperature:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                # Neighbouring seeds and samples must not draw the same.
                self._generator.manual_seed(hash((params.seed, nth)) & MAX_INT64)

    def token(self, logits: torch.Tensor) -> int:
        """The next token, of logits [vocab_size]."""
        if self._generator is None:
            return int(logits.argmax())
        logits = logits.double().cpu()
        # At most 0, and 0 for the largest: a temperature too small to divide by makes -inf, never NaN.
        weights = self._weights((logits - logits.max()) / self._params.temperature)
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        top_k, top_p = self._params.top_k, self._params.top_p
        if top_k is not None and top_k < len(logits):
            least = logits.topk(top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        weights = logits.softmax(-1)
        if top_p < 1:
            ordered, order = weights.sort(descending=True)
            # A token stays if those before it do not reach top_p yet.
            ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
            weights = torch.zeros_like(weights).scatter_(0, order, ordered)
        return weights
