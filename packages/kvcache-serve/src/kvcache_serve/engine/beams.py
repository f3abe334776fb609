# SPDX-License-Identifier: Apache-2.0
"""Beam search: chooses the continuations of a request's beams."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch


class Beam(Protocol):
    """The interface that `Beams` requires of a beam."""

    token_ids: list[int]  # tokens after the prompt


class Choice(NamedTuple):
    """A decision to continue the beam `parent` with `token`.

    `score` is the sum of log probabilities including `token`.
    """

    parent: Beam
    token: int
    score: float


class Ended(NamedTuple):
    """A finished beam."""

    token_ids: list[int]
    score: float
    finish_reason: Literal["stop", "length"]


class Beams:
    """The beams of one request: at most `width` active beams, and the best finished beams.

    A beam finishes at a stop token or at `max_tokens`. The caller maintains the active beams in `scores`,
    starting with `first`. `best` contains the finished beams in descending order of score.
    """

    def __init__(
        self, first: Beam, width: int, max_tokens: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self.width, self.max_tokens = width, max_tokens
        self.stop_token_ids = stop_token_ids
        self.scores: dict[Beam, float] = {first: 0.0}
        self.best: list[Ended] = []
        self._candidates: dict[Beam, list[Choice]] = {}

    def add_logits(self, beam: Beam, logits: torch.Tensor) -> bool:
        """Add the logits [vocab_size] for the next token of a beam.

        Returns True once all active beams have logits.
        """
        gains = logits.double().log_softmax(-1)
        ends = {token: float(gains[token]) for token in self.stop_token_ids if token < len(gains)}
        # With this many candidates, enough beams stay active even if some beams finish.
        best = gains.topk(min(self.width + len(ends), len(logits)))
        tokens = dict(zip(best.indices.tolist(), best.values.tolist())) | ends
        self._candidates[beam] = [
            Choice(beam, token, self.scores[beam] + gain)
            for token, gain in tokens.items()
            if gain > -torch.inf  # masked tokens are never chosen
        ]
        return len(self._candidates) == len(self.scores)

    def choose(self) -> list[Choice]:
        """Return the continuations in descending order of score.

        Returns an empty list if `best` can no longer change.
        """
        candidates = [each for beam in self._candidates.values() for each in beam]
        candidates.sort(key=lambda choice: -choice.score)
        self._candidates = {}
        going_on: list[Choice] = []
        for parent, token, score in candidates:
            tokens = parent.token_ids
            if token in self.stop_token_ids:
                self.best.append(Ended([*tokens, token], score, "stop"))
            elif len(tokens) + 1 == self.max_tokens:
                self.best.append(Ended([*tokens, token], score, "length"))
            elif len(going_on) < self.width:
                going_on.append(Choice(parent, token, score))
        self.best.sort(key=lambda ended: -ended.score)
        del self.best[self.width :]
        # Scores never increase, so active beams can no longer enter `best`.
        if going_on and len(self.best) == self.width and self.best[-1].score >= going_on[0].score:
            return []
        return going_on
