"""Chats with a common system prompt: several users, each with several turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Chat:
    """One user's chat: the messages to come, and all tokens so far."""

    messages: list[list[int]]
    history: list[int]
    num_samples: int = 1  # answers to the last message; the first of them goes on
    turns: list[tuple[list[int], list[list[int]]]] = field(default_factory=list)  # prompt, answers

    def next_prompt(self) -> list[int]:
        """The history with the next message."""
        return [*self.history, *self.messages[len(self.turns)]]

    def end_turn(self, prompt: list[int], answers: list[list[int]]) -> None:
        """Notes the answers to a prompt; the chat goes on behind the first."""
        self.turns.append((prompt, answers))
        self.history = [*prompt, *answers[0]]

    @property
    def is_over(self) -> bool:
        """Whether every message was answered."""
        return len(self.turns) == len(self.messages)


def make_chats(
    num_users: int, num_turns: int, max_tokens: int, vocab_size: int, seed: int
) -> list[Chat]:
    """Chats that begin with one of two system prompts, and are at most `max_tokens` long.

    An eighth of `max_tokens` is the system prompt, the rest is divided among the turns, half of each for
    the answer. Every fourth user wants three answers to each message.
    """
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
    """Tokens of an answer, with which chats of `make_chats` stay within `max_tokens`."""
    return (max_tokens - max_tokens // 8 - 1) // (2 * num_turns)
