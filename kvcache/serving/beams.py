"""Beam search: which continuations of a request's beams go on."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch


class Beam(Protocol):
    """What a beam is to `Beams`: something that has tokens."""

    token_ids: list[int]  # behind the prompt


class Choice(NamedTuple):
    """A beam goes on from `parent` with `token`; the sum of its log probabilities is then `score`."""

    parent: Beam
    token: int
    score: float


class Ended(NamedTuple):
    """A beam that goes on no more."""

    token_ids: list[int]
    score: float
    finish_reason: Literal["stop", "length"]


class Beams:
    """The beams of one request: at most `width` that go on, and the best that have ended.

    A beam ends with a stop token or as long as `max_tokens`. `scores`: the beams that go on, which the
    caller sets (`first` is the one to begin with); `best`: those that have ended, the best first.
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
        """Takes the logits [vocab_size] behind a beam; whether all that go on have theirs now."""
        gains = logits.double().log_softmax(-1)
        ends = {token: float(gains[token]) for token in self.stop_token_ids if token < len(gains)}
        # With so many, enough go on where some end.
        best = gains.topk(min(self.width + len(ends), len(logits)))
        tokens = dict(zip(best.indices.tolist(), best.values.tolist())) | ends
        self._candidates[beam] = [
            Choice(beam, token, self.scores[beam] + gain)
            for token, gain in tokens.items()
            if gain > -torch.inf  # masked tokens never go on
        ]
        return len(self._candidates) == len(self.scores)

    def choose(self) -> list[Choice]:
        """The continuations that go on, the best first; none where `best` cannot change any more."""
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
        # A score only falls.
        if going_on and len(self.best) == self.width and self.best[-1].score >= going_on[0].score:
            return []
        return going_on
