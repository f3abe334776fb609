"""Texts to tokens and back: by a checkpoint's tokenizer, or by bytes where a model has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcache.checks import MAX_INT32, check_range, integers, listed, shown
from kvcache.checks import text as checked_text
from kvcache.serve.stops import StopTexts


class Texts(Protocol):
    """What the endpoints need of a tokenizer."""

    end_token_ids: tuple[int, ...]  # answers end with one of these
    longest_token: int  # characters that one token stands for, at most: bounds the tokens of a text

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
    longest_token = 1

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(checked_text(text, "text").encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of bytes; what is no UTF-8 becomes the replacement character."""
        data = b"".join(
            bytes([token]) if token < 256 else f"<{token}>".encode()
            for token in _checked_tokens(token_ids)
        )
        return data.decode(errors="replace")

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The messages in lines, each after its role."""
        return self.encode(_in_lines(_checked_messages(messages)))


class TokenizerTexts:
    """By a tokenizer of transformers, with its chat template where it has one."""

    def __init__(self, tokenizer: object) -> None:
        for name in ("encode", "decode", "get_vocab", "eos_token_id"):
            if not hasattr(tokenizer, name):
                raise TypeError(f"tokenizer is {shown(tokenizer)}: expected one of transformers")
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.end_token_ids = () if end is None else (end,)
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return self._tokenizer.encode(checked_text(text, "text"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(_checked_tokens(token_ids), skip_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """By the chat template; without one, the messages in lines, each after its role."""
        messages = _checked_messages(messages)
        if not getattr(self._tokenizer, "chat_template", None):
            return self.encode(_in_lines(messages))
        return list(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )


def _checked_tokens(token_ids: Sequence[int]) -> list[int]:
    tokens = integers(token_ids, "token_ids", ())
    check_range("token_ids", "is", tokens, 0, MAX_INT32 + 1)
    return tokens.tolist()


def _checked_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Texts under role and content. TypeError or ValueError."""
    messages = listed(messages, "messages", "a list of messages")
    for i, message in enumerate(messages):
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            raise TypeError(f"messages[{i}] is {shown(message)}: expected its role and content")
        for name in ("role", "content"):
            checked_text(message[name], f"messages[{i}].{name}")
    return messages


def _in_lines(messages: list[dict[str, str]]) -> str:
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join([*lines, "assistant: "])


class AnswerText:
    """The text of one answer as its tokens come, which ends before the stop text that is whole first.

    `text` is what may be shown so far. What may still become a stop text, or a character of which only
    some bytes are there, is held back until `end`.

    >>> answer = AnswerText(ByteTexts(), ["END"])
    >>> answer.add([72, 105, 32, 69, 78]), answer.add([33])
    ('Hi ', 'EN!')
    """

    def __init__(self, texts: Texts, stops: Sequence[str] | StopTexts) -> None:
        self._texts = texts
        self._stops = stops if isinstance(stops, StopTexts) else StopTexts(stops)
        self._token_ids: list[int] = []
        self._state = self._num_read = self._shown = 0
        self.text = ""
        self.is_stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add to what may be shown; sets `is_stopped` at a stop text."""
        if self.is_stopped:
            return ""
        self._token_ids += token_ids
        return self._show(self._read(self._texts.decode(self._token_ids).rstrip("\ufffd")))

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.is_stopped:
            return ""
        whole = self._texts.decode(self._token_ids)
        before = self._read(whole)
        return self._show(before if self.is_stopped else whole)

    def _read(self, text: str) -> str:
        """What may be shown of a text: that before a stop text, or what may become one."""
        if not self._stops:
            return text
        for character in text[self._num_read :]:
            self._state = self._stops.step(self._state, character)
            self._num_read += 1
            if length := self._stops.num_stopped[self._state]:
                self.is_stopped = True
                return text[: self._num_read - length]
        return text[: self._num_read - self._stops.num_held[self._state]]

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        if new:
            self.text, self._shown = text, len(text)
        return new
