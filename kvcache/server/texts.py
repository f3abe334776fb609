# SPDX-License-Identifier: Apache-2.0
"""Tokenizes and detokenizes texts with a checkpoint's tokenizer, or byte by byte without a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcache.checks import MAX_INT32, check_range, integers, listed, shown
from kvcache.checks import text as checked_text
from kvcache.server.stops import StopTexts


class Texts(Protocol):
    """The tokenizer interface that the endpoints use."""

    end_token_ids: tuple[int, ...]  # tokens that end an answer
    # Maximum number of characters per token. It implies a minimum number of tokens for a text.
    longest_token: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt."""

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        """Return a token's text, and its bytes if they are known."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a chat, up to the start of the answer."""


class ByteTexts:
    """Encodes each UTF-8 byte as a token. Tokens above 255 are decoded as numbers.

    `end_token_ids`: tokens that end an answer.

    >>> texts = ByteTexts()
    >>> texts.encode("é!"), texts.decode([195, 169, 33, 300])
    ([195, 169, 33], 'é!<300>')
    """

    longest_token = 1

    def __init__(self, end_token_ids: Sequence[int] = ()) -> None:
        self.end_token_ids = tuple(_checked_tokens(end_token_ids, "end_token_ids"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of a text. There are no special tokens."""
        return list(checked_text(text, "text").encode())

    def token(self, token_id: int) -> tuple[str, bytes]:
        r"""Return a character, `bytes:\xNN` for a part of a character, or `<N>` for a token above
        255.
        """
        (token_id,) = _checked_tokens([token_id])
        if 128 <= token_id < 256:
            return rf"bytes:\x{token_id:02x}", bytes([token_id])
        text = self.decode([token_id])
        return text, text.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens as UTF-8. Invalid bytes are replaced by the replacement character."""
        data = b"".join(
            bytes([token]) if token < 256 else f"<{token}>".encode()
            for token in _checked_tokens(token_ids)
        )
        return data.decode(errors="replace")

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Encode each message as a line that starts with its role."""
        return self.encode(_in_lines(_checked_messages(messages)))


class TokenizerTexts:
    """Uses a transformers tokenizer, with its chat template if it has one.

    `end_token_ids`: tokens that end an answer, in addition to the tokenizer's end token.
    """

    def __init__(self, tokenizer: object, end_token_ids: Sequence[int] = ()) -> None:
        for name in ("encode", "decode", "get_vocab", "eos_token_id"):
            if not hasattr(tokenizer, name):
                raise TypeError(
                    f"tokenizer is {shown(tokenizer)}: expected a transformers tokenizer"
                )
        self._tokenizer = tokenizer
        ends = set(_checked_tokens(end_token_ids, "end_token_ids"))
        if tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        self.end_token_ids = tuple(sorted(ends))
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt."""
        text = checked_text(text, "text")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        """Return the text and the bytes of a token, which may be a special token. The bytes are
        None if the token is only part of a character.
        """
        text = self._tokenizer.decode(
            _checked_tokens([token_id]), clean_up_tokenization_spaces=False
        )
        return text, None if "\ufffd" in text else text.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens.

        Spaces before punctuation are kept, even if the tokenizer is configured to remove them.
        Removing these spaces would break streaming: an answer's text might then not start with the
        text of its first tokens.
        """
        return self._tokenizer.decode(
            _checked_tokens(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Apply the chat template, or encode each message as a line that starts with its role."""
        messages = _checked_messages(messages)
        if not getattr(self._tokenizer, "chat_template", None):
            return self.encode(_in_lines(messages))
        return list(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )


def _checked_tokens(token_ids: Sequence[int], name: str = "token_ids") -> list[int]:
    tokens = integers(token_ids, name, ())
    check_range(name, "is", tokens, 0, MAX_INT32 + 1)
    return tokens.tolist()


def _checked_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the messages with only their role and content. Raises TypeError or ValueError unless
    both are strings.
    """
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
    """The text of an answer, which is updated as tokens arrive. The text ends before the first
    complete stop string.

    `text` is the text that can be shown so far. Possible beginnings of a stop string, and
    characters with missing bytes, are held back until they are complete or `end` is called.

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
        """Add tokens and return the newly visible text. Sets `is_stopped` at a stop string."""
        if self.is_stopped:
            return ""
        self._token_ids += token_ids
        return self._show(self._read(self._texts.decode(self._token_ids).rstrip("\ufffd")))

    def end(self) -> str:
        """Return the text that was held back. Call this method after the last token."""
        if self.is_stopped:
            return ""
        whole = self._texts.decode(self._token_ids)
        before = self._read(whole)
        return self._show(before if self.is_stopped else whole)

    def _read(self, text: str) -> str:
        """Return the visible part, up to a stop string or a possible prefix of a stop string."""
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
