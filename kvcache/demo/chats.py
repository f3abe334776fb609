# SPDX-License-Identifier: Apache-2.0
"""Chats of several users with several turns each, starting with a shared system prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcache.checks import MAX_INT64, integer, integers, listed

_MOST_USERS, _MOST_TOKENS = 2**16, 2**20  # these sizes are generated within seconds


@dataclass(slots=True)
class Chat:
    """One user's chat: the remaining messages, and all tokens so far."""

    messages: list[list[int]]
    history: list[int]
    num_samples: int = 1  # answers to each message; the chat continues after the first
    turns: list[tuple[list[int], list[list[int]]]] = field(default_factory=list)  # prompt, answers

    def next_prompt(self) -> list[int]:
        """Return the history followed by the next message."""
        return [*self.history, *self.messages[len(self.turns)]]

    def end_turn(self, prompt: list[int], answers: list[list[int]]) -> None:
        """Record the answers to a prompt. The chat continues after the first answer.

        Raises TypeError or ValueError if tokens are invalid or `answers` is empty.
        """
        tokens = integers(prompt, "prompt", ()).tolist()
        all_answers = [
            integers(each, f"answers[{i}]", ()).tolist()
            for i, each in enumerate(listed(answers, "answers"))
        ]
        if not all_answers:
            raise ValueError("answers is empty: expected one or more")
        self.turns.append((tokens, all_answers))
        self.history = tokens + all_answers[0]

    @property
    def is_over(self) -> bool:
        """Whether every message was answered."""
        return len(self.turns) == len(self.messages)


def make_chats(
    num_users: int, num_turns: int, max_tokens: int, vocab_size: int, seed: int
) -> list[Chat]:
    """Generate chats of at most `max_tokens` tokens that start with one of two system prompts.

    One eighth of `max_tokens` is the system prompt. The rest is divided among the turns, and half of each
    turn is for the answer. Every fourth user requests three answers to each message. Raises TypeError or
    ValueError if a size is out of range.
    """
    seed = integer(seed, "seed", 0, MAX_INT64)
    num_users = integer(num_users, "num_users", most=_MOST_USERS)
    num_turns = integer(num_turns, "num_turns", 1, _MOST_TOKENS)
    max_tokens = integer(max_tokens, "max_tokens", 1, _MOST_TOKENS)
    vocab_size = integer(vocab_size, "vocab_size", 2)
    rng = np.random.default_rng(seed)
    system_length = max(1, max_tokens // 8)
    systems = [rng.integers(1, vocab_size, system_length).tolist() for _ in range(2)]
    longest = max(1, answer_length(num_turns, max_tokens))
    chats = []
    for user in range(num_users):
        lengths = rng.integers(max(1, longest // 4), longest + 1, num_turns)
        messages = [rng.integers(1, vocab_size, length).tolist() for length in lengths]
        chats.append(Chat(messages, systems[user % 2], num_samples=3 if user % 4 == 3 else 1))
    return chats


def answer_length(num_turns: int, max_tokens: int) -> int:
    """Return the answer length with which the chats of `make_chats` stay within `max_tokens`."""
    return (max_tokens - max_tokens // 8 - 1) // (2 * num_turns)
