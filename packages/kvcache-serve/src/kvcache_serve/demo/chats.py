# SPDX-License-Identifier: Apache-2.0
"""Chats of several users with several turns each, starting with a shared system prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcache.checks import MAX_INT64, integer, integers, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_USERS, _MOST_TOKENS = 2**16, 2**20  # chats of these sizes are generated within seconds
_SYSTEM = "You are a helpful assistant. Answer in one short sentence."
_TOPICS = (
    (
        "What is the capital of France?",
        "Which river flows through it?",
        "Name a famous museum there.",
        "What food is it known for?",
    ),
    (
        "Why is the sky blue?",
        "And why is a sunset red?",
        "What color is the sky on Mars?",
        "What color is it at night?",
    ),
    (
        "How do bees make honey?",
        "How long does it take?",
        "Why do they need it?",
        "Do all bees make honey?",
    ),
    (
        "What is a cache in a computer?",
        "Why does it make programs faster?",
        "What happens when it is full?",
        "Give an example from daily life.",
    ),
)
_ANSWER = "(the answer)"  # placeholder for an answer when the chat template is applied


class Turn(NamedTuple):
    """One prompt of a chat, and the answers to this prompt."""

    prompt: list[int]
    answers: list[list[int]]
    num_cached_tokens: int = 0  # prompt tokens that were prefix hits
    dense_answers: tuple[list[int], ...] = ()  # answers with the model's own dense cache


@dataclass(slots=True)
class Chat:
    """One user's chat: its messages, and all tokens so far."""

    messages: list[list[int]]
    history: list[int]
    max_tokens: int = 16  # maximum length of each answer
    num_samples: int = 1  # answers per message; the chat continues with the first one
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an answer
    # Text of each message; empty if the messages are given as token ids.
    questions: tuple[str, ...] = ()
    turns: list[Turn] = field(default_factory=list)

    def next_prompt(self) -> list[int]:
        """Return the history followed by the next message."""
        return [*self.history, *self.messages[len(self.turns)]]

    def end_turn(
        self, prompt: list[int], answers: list[list[int]], num_cached_tokens: int = 0
    ) -> None:
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
        num_cached_tokens = integer(num_cached_tokens, "num_cached_tokens", most=len(tokens))
        self.turns.append(Turn(tokens, all_answers, num_cached_tokens))
        first = all_answers[0]
        # The next message begins with the end of the answer, which may have been cut off.
        is_ended = bool(first) and first[-1] in self.stop_token_ids
        self.history = tokens + (first[:-1] if is_ended else first)

    @property
    def is_over(self) -> bool:
        """Whether every message was answered."""
        return len(self.turns) == len(self.messages)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of the complete chat."""
        left = self.messages[len(self.turns) :]
        return len(self.history) + sum(map(len, left)) + len(left) * self.max_tokens


def make_chats(
    num_users: int, num_turns: int, max_tokens: int, vocab_size: int, seed: int
) -> list[Chat]:
    """Generate chats of at most `max_tokens` random tokens. Each starts with one of two system prompts.

    The system prompt uses one eighth of `max_tokens`. The remaining tokens are divided equally among the
    turns, and the answer uses half of each turn. Every fourth user requests three answers to each
    message. Raises TypeError or ValueError if a size is out of range.
    """
    seed = integer(seed, "seed", 0, MAX_INT64)
    num_users = integer(num_users, "num_users", most=_MOST_USERS)
    num_turns = integer(num_turns, "num_turns", 1, _MOST_TOKENS)
    max_tokens = integer(max_tokens, "max_tokens", 1, _MOST_TOKENS)
    vocab_size = integer(vocab_size, "vocab_size", 2)
    rng = np.random.default_rng(seed)
    system_length = max(1, max_tokens // 8)
    systems = [rng.integers(1, vocab_size, system_length).tolist() for _ in range(2)]
    longest = (max_tokens - system_length - 1) // (2 * num_turns)
    if longest < 1:
        raise ValueError(
            f"num_turns is {num_turns}: expected at most {max(0, max_tokens - system_length - 1) // 2} "
            f"with max_tokens {max_tokens}"
        )
    chats = []
    for user in range(num_users):
        lengths = rng.integers(max(1, longest // 4), longest + 1, num_turns)
        messages = [rng.integers(1, vocab_size, length).tolist() for length in lengths]
        chats.append(Chat(messages, systems[user % 2], longest, _num_samples(user)))
    return chats


def make_text_chats(
    tokenizer: PreTrainedTokenizerBase,
    num_users: int,
    num_turns: int,
    max_tokens: int = 40,
    stop_token_ids: tuple[int, ...] = (),
) -> list[Chat]:
    """Generate chats in English for a model with a chat template.

    Users ask about four topics in turn. Every fourth user requests three answers to each message.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        num_users: Number of chats.
        num_turns: Messages per chat. A chat repeats its questions after four messages.
        max_tokens: Maximum length of an answer.
        stop_token_ids: Tokens that end an answer.

    Returns:
        The chats.

    Raises:
        TypeError, ValueError: A size is out of range, or the tokenizer has no chat template.
    """
    num_users = integer(num_users, "num_users", most=_MOST_USERS)
    num_turns = integer(num_turns, "num_turns", 1, _MOST_TOKENS)
    max_tokens = integer(max_tokens, "max_tokens", 1, _MOST_TOKENS)
    stop_token_ids = tuple(integers(stop_token_ids, "stop_token_ids", ()).tolist())
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("tokenizer has no chat template: expected one")
    chats = []
    for user in range(num_users):
        topic = _TOPICS[user % len(_TOPICS)]
        asked = tuple(topic[turn % len(topic)] for turn in range(num_turns))
        messages = [
            tokenizer.encode(each, add_special_tokens=False) for each in _messages(tokenizer, asked)
        ]
        chats.append(Chat(messages, [], max_tokens, _num_samples(user), stop_token_ids, asked))
    return chats


def _messages(tokenizer: PreTrainedTokenizerBase, questions: tuple[str, ...]) -> list[str]:
    """Return, for each question, the text that the chat template puts between two answers."""
    said = [{"role": "system", "content": _SYSTEM}]
    for question in questions:
        said += [{"role": "user", "content": question}, {"role": "assistant", "content": _ANSWER}]
    text = tokenizer.apply_chat_template(said, tokenize=False)
    return text.split(_ANSWER)[:-1]


def _num_samples(user: int) -> int:
    return 3 if user % 4 == 3 else 1
