# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token from logits."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvcache.checks import MAX_INT32, MAX_INT64, integer, listed, number


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for generating an answer. Raises TypeError or ValueError for invalid values.

    - `max_tokens`: the maximum length of the answer, at least 1.
    - `temperature`: 0 selects the most likely token. Otherwise logits are divided by the
      temperature before sampling. Any positive value is valid: with a temperature so small that a
      scaled logit would overflow, only the most likely token is sampled.
    - `top_k`: sample from the `top_k` most likely tokens. None: all tokens.
    - `top_p`: sample from the most likely tokens that together reach this probability.
    - `seed`: seed of the random draws, which depend only on the seed and the sample's index, not on
      other requests in the batch. None: a random seed.
    - `n`: the number of samples. They share the prompt's blocks.
    - `stop_token_ids`: tokens that end the answer.
    - `repetition_penalty`: a value above 1 makes tokens that occur in the prompt or the answer less
      likely, and a value below 1 makes them more likely. Positive logits are divided by the penalty,
      and negative logits are multiplied by it (CTRL, Keskar et al., 2019).
    - `logprobs`: return the log probability of each generated token and, at each position, of the
      `logprobs` most likely tokens, computed before the penalty and the temperature are applied. None:
      no log probabilities.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Store the validated values, converted to plain numbers.
        keep = functools.partial(object.__setattr__, self)
        for name in ("max_tokens", "n"):
            keep(name, integer(getattr(self, name), name, least=1))
        keep("temperature", number(self.temperature, "temperature"))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}: expected a finite number, at least 0"
            )
        keep("top_p", number(self.top_p, "top_p"))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: expected a number above 0 and at most 1")
        if self.top_k is not None:
            keep("top_k", integer(self.top_k, "top_k", least=1))
        if self.seed is not None:
            keep("seed", integer(self.seed, "seed", -MAX_INT64, MAX_INT64))
        keep("repetition_penalty", number(self.repetition_penalty, "repetition_penalty"))
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}: expected a finite number above 0"
            )
        if self.logprobs is not None:
            keep("logprobs", integer(self.logprobs, "logprobs", most=MAX_INT32))
        stops = tuple(
            integer(token, f"stop_token_ids[{i}]", most=MAX_INT32)
            for i, token in enumerate(listed(self.stop_token_ids, "stop_token_ids"))
        )
        keep("stop_token_ids", stops)


class TokenLogprob(NamedTuple):
    """The log probability of a generated token, and the most likely tokens at the same position.

    - `logprob`: natural logarithm of the generated token's probability.
    - `top`: (token, log probability) of the most likely tokens, in descending order.
    """

    logprob: float
    top: list[tuple[int, float]]


def token_logprob(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return the log probabilities of `token` and of the `num_top` most likely tokens, given logits
    [vocab_size].
    """
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.topk(min(num_top, len(logprobs)))
    return TokenLogprob(
        logprobs[token].item(), list(zip(best.indices.tolist(), best.values.tolist()))
    )


def penalize_repetition(
    logits: torch.Tensor, token_ids: Sequence[int] | np.ndarray, penalty: float
) -> torch.Tensor:
    """Return a copy of logits [vocab_size] in which tokens that occurred before are penalized."""
    seen = torch.as_tensor(np.unique(np.asarray(token_ids)), device=logits.device).long()
    penalized = logits.double()
    penalized = penalized.clone() if penalized is logits else penalized
    values = penalized[seen]
    values = torch.where(values > 0, values / penalty, values * penalty)
    # A tiny penalty must not make a logit infinite, because the sampling weights would then be NaN.
    penalized[seen] = values.clamp(max=torch.finfo(values.dtype).max)
    return penalized


def most_likely(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely token of each row of logits, int64[n], and its logit, float[n].

    Requires `torch.no_grad` or `torch.inference_mode`.
    """
    if not logits.is_cpu:
        largest, best = logits.max(-1)
        return best.cpu().numpy(), largest.double().cpu().numpy()
    # For 8 x 32,000 float32 values on one core with AVX-512, NumPy takes 17 us, `torch.max` 270 us and
    # `torch.argmax` 440 us. NumPy does not support bfloat16 and is slow for float16.
    rows = (logits.float() if logits.itemsize < 4 else logits).numpy()
    best = rows.argmax(-1)
    return best, rows[np.arange(len(rows)), best]


class Sampler:
    """Draws the tokens of one sample with a separate random generator."""

    def __init__(self, params: SamplingParams, nth: int) -> None:
        self._params = params
        self._random = None
        if params.temperature:
            seed = params.seed
            if seed is not None:
                # Adjacent seeds and samples must not share random numbers.
                digest = hashlib.sha256(f"{seed} {nth}".encode()).digest()
                seed = int.from_bytes(digest[:8], "little")
            self._random = np.random.default_rng(seed)

    def token(self, logits: torch.Tensor) -> int:
        """Return the next token given logits [vocab_size]."""
        if self._random is None:
            return int(logits.argmax())
        sums = self._weights(logits.double().cpu().numpy()).cumsum()
        drawn = min(self._random.random() * sums[-1], np.nextafter(sums[-1], 0))
        # Choose the first cumulative sum above the draw, so that a token with weight 0 is never chosen.
        return int(sums.searchsorted(drawn, "right"))

    def _weights(self, logits: np.ndarray) -> np.ndarray:
        """Return the unnormalized weight of each token."""
        top_k, top_p = self._params.top_k, self._params.top_p
        # The largest value is 0 and all others are negative, so dividing by a tiny temperature yields
        # -inf but never NaN.
        with np.errstate(over="ignore"):
            weights = np.exp((logits - logits.max()) / self._params.temperature)
        if top_k is not None and top_k < len(logits):
            least = np.partition(logits, -top_k)[-top_k]
            is_in = logits > least
            # Among equal logits, keep the first tokens, as with temperature 0.
            is_in[np.flatnonzero(logits == least)[: top_k - np.count_nonzero(is_in)]] = True
            weights[~is_in] = 0
        if top_p < 1:
            order = np.argsort(-weights, kind="stable")
            sums = weights[order].cumsum()
            # Keep a token if the tokens ranked above it do not reach top_p.
            weights[order[1:][sums[:-1] >= top_p * sums[-1]]] = 0
        return weights
