# SPDX-License-Identifier: Apache-2.0
"""A generated multi-turn chat workload: interleaved conversations with shared system prompts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcache.checks import MAX_INT64, instance, integer, listed, number, shown
from kvcache_lab.content import VOCABULARY, prefix_keys
from kvcache_lab.workload import WorkloadRequest

_MS_PER_ANSWER_TOKEN = 20
_MOST_PAUSE_MS = 1e12


@dataclass(frozen=True)
class ChatShape:
    """Parameters of the generated conversations. Ranges are (minimum, maximum), both inclusive.

    The first turn's prompt consists of a system prompt and a user message. The prompt of each later
    turn consists of the whole history, including answers, and a new user message. When a
    conversation ends, a new one begins.

    Args:
        num_conversations: Number of concurrent conversations.
        num_system_prompts: Number of distinct system prompts.
        system_tokens: Range of system prompt lengths.
        user_tokens: Range of user message lengths.
        answer_tokens: Range of answer lengths.
        turns: Range of the number of turns per conversation.
        mean_pause_ms: Mean time between an answer and the next turn, in milliseconds.
    """

    num_conversations: int = 16
    num_system_prompts: int = 3
    system_tokens: tuple[int, int] = (200, 600)
    user_tokens: tuple[int, int] = (20, 160)
    answer_tokens: tuple[int, int] = (40, 300)
    turns: tuple[int, int] = (1, 10)
    mean_pause_ms: float = 20_000.0

    def __post_init__(self) -> None:
        for name in ("num_conversations", "num_system_prompts"):
            object.__setattr__(self, name, integer(getattr(self, name), name, 1))
        for name in ("system_tokens", "user_tokens", "answer_tokens", "turns"):
            limits = listed(getattr(self, name), name, "(least, most)")
            if len(limits) != 2:
                raise ValueError(f"{name} is {shown(limits)}: expected (least, most)")
            least, most = (integer(each, name) for each in limits)
            if not 1 <= least <= most:
                raise ValueError(
                    f"{name} is ({least}, {most}): expected ascending numbers of at least 1"
                )
            object.__setattr__(self, name, (least, most))
        if not 0 <= number(self.mean_pause_ms, "mean_pause_ms") < _MOST_PAUSE_MS:
            raise ValueError(
                f"mean_pause_ms is {shown(self.mean_pause_ms)}: expected 0 to {_MOST_PAUSE_MS:g}"
            )


def chat_workload(
    num_requests: int, seed: int = 0, shape: ChatShape | None = None
) -> Iterator[WorkloadRequest]:
    """Generate chat turns in order of arrival. Equal arguments produce equal workloads.

    Args:
        num_requests: Number of turns.
        seed: Seed of the generator.
        shape: Parameters of the conversations. None: the defaults of `ChatShape`.

    Yields:
        The requests.

    Example:
        >>> [request.index for request in chat_workload(3, seed=1)]
        [0, 1, 2]
    """
    num_requests = integer(num_requests, "num_requests", 0, MAX_INT64)
    seed = integer(seed, "seed", 0, MAX_INT64)
    if shape is not None:
        instance(shape, ChatShape, "shape")
    return _Generator(np.random.default_rng(seed), shape or ChatShape()).run(num_requests)


class _History:
    """The tokens and content keys of one conversation, extended segment by segment."""

    def __init__(self, num_turns: int) -> None:
        self.token_ids = np.empty(0, np.int32)
        self.content = np.empty(0, np.int64)
        self.turns_left = num_turns

    def append(self, token_ids: np.ndarray) -> None:
        before = int(self.content[-1]) if len(self.content) else 0
        self.content = np.concatenate([self.content, prefix_keys(token_ids, before)])
        self.token_ids = np.concatenate([self.token_ids, token_ids])


class _Generator:
    def __init__(self, rng: np.random.Generator, shape: ChatShape) -> None:
        self.rng = rng
        self.shape = shape
        self.system_prompts = [
            self._tokens(shape.system_tokens) for _ in range(shape.num_system_prompts)
        ]

    def run(self, num_requests: int) -> Iterator[WorkloadRequest]:
        histories = [self._open() for _ in range(self.shape.num_conversations)]
        # Pairs of an arrival time in milliseconds and the index of a conversation.
        turns = [(self._pause_ms(), i) for i in range(len(histories))]
        heapq.heapify(turns)
        for index in range(num_requests):
            now_ms, which = turns[0]
            history = histories[which]
            history.append(self._tokens(self.shape.user_tokens))
            answer = self._tokens(self.shape.answer_tokens)
            yield WorkloadRequest(index, now_ms, history.token_ids, len(answer), history.content)
            history.append(answer)
            history.turns_left -= 1
            if history.turns_left == 0:
                histories[which] = self._open()
            answered_ms = now_ms + len(answer) * _MS_PER_ANSWER_TOKEN
            heapq.heapreplace(turns, (answered_ms + self._pause_ms(), which))

    def _open(self) -> _History:
        history = _History(self._between(self.shape.turns))
        history.append(self.system_prompts[self.rng.integers(len(self.system_prompts))])
        return history

    def _tokens(self, lengths: tuple[int, int]) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, self._between(lengths), dtype=np.int32)

    def _between(self, limits: tuple[int, int]) -> int:
        return int(self.rng.integers(limits[0], limits[1], endpoint=True))

    def _pause_ms(self) -> int:
        return int(self.rng.exponential(self.shape.mean_pause_ms))
