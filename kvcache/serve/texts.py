"""Texts to tokens and back: by a checkpoint's tokenizer, or by bytes where a model has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Texts(Protocol):
    """What the endpoints need of a tokenizer."""

    end_token_ids: tuple[int, ...]  # answers end with one of these

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a chat's messages, up to where the answer begins."""


class ByteTexts:
    """Each byte of UTF-8 is a token; higher tokens are shown by their number.

    >>> texts = ByteTexts()
    >>> texts.encode("é!"), texts.decode([195, 169, 33, 300])
    ([195, 169, 33], 'é!<300>')
    """

    end_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of bytes; what is no UTF-8 becomes the replacement character."""
        data = b"".join(
            bytes([token]) if token < 256 else f"<{token}>".encode() for token in token_ids
        )
        return data.decode(errors="replace")

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The messages in lines, each after its role."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))


class TokenizerTexts:
    """By a tokenizer of transformers, with its chat template where it has one."""

    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.end_token_ids = () if end is None else (end,)

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """By the chat template; without one, the messages in lines, each after its role."""
        if not getattr(self._tokenizer, "chat_template", None):
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self.encode("".join([*lines, "assistant: "]))
        return list(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )


class AnswerText:
    """The text of one answer as its tokens come, which ends before a stop text.

    `text` is what may be shown so far. What may still become a stop text, or a character of which only
    some bytes are there, is held back until `end`.

    >>> answer = AnswerText(ByteTexts(), ["END"])
    >>> answer.add([72, 105, 32, 69, 78]), answer.add([33])
    ('Hi ', 'EN!')
    """

    def __init__(self, texts: Texts, stops: Sequence[str]) -> None:
        self._texts, self._stops = texts, [stop for stop in stops if stop]
        self._token_ids: list[int] = []
        self._shown = 0
        self.text = ""
        self.is_stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add to what may be shown; sets `is_stopped` at a stop text."""
        self._token_ids += token_ids
        whole = self._texts.decode(self._token_ids)
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return self._show(whole[: min(found)])
        safe = whole.rstrip("\ufffd")
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(safe)), 0, -1):
                if safe.endswith(stop[:size]):
                    safe = safe[:-size]
                    break
        return self._show(safe)

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.is_stopped else self._show(self._texts.decode(self._token_ids))

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        if new:
            self.text, self._shown = text, len(text)
        return new
