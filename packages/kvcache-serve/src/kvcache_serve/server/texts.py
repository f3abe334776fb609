# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts and decodes answers with a checkpoint's tokenizer, or byte by byte without a
tokenizer.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcache.checks import MAX_INT32, check_range, integers, listed, shown
from kvcache.checks import text as checked_text
from kvcache_serve.server.stops import StopTexts

# Number of preceding tokens with which a token is decoded. One token would do, but special tokens, which
# have no text, may precede it.
_NUM_BEFORE = 8
# The characters that stand for bytes in the vocabularies of byte-level tokenizers (GPT-2).
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}


class Texts(Protocol):
    """The tokenizer interface that the endpoints use."""

    end_token_ids: tuple[int, ...]  # tokens that end an answer
    # Maximum number of characters per token. It implies a minimum number of tokens for a text.
    longest_token: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""

    def token(self, token_id: int, before: Sequence[int] = ()) -> tuple[str, bytes | None]:
        r"""Return a token's name, and the bytes that it adds to the text of the tokens `before` it.

        The name is the text, or `bytes:\xNN` for each byte of a token that is a byte or a part of a
        character. The bytes are None if the token is not part of texts.
        """

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

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text. There are no special tokens."""
        return list(checked_text(text, "text").encode())

    def token(self, token_id: int, before: Sequence[int] = ()) -> tuple[str, bytes]:
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
        vocabulary = tokenizer.get_vocab()
        self._names = {token: name for name, token in vocabulary.items()}
        self.longest_token = max(map(len, vocabulary))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self._tokenizer.encode(checked_text(text, "text"))

    def token(self, token_id: int, before: Sequence[int] = ()) -> tuple[str, bytes | None]:
        """Return the name and the bytes of a token. Special tokens have no bytes."""
        (token_id,) = _checked_tokens([token_id])
        before = _checked_tokens(before, "before")[-_NUM_BEFORE:]
        alone = self._text([token_id], skip_special_tokens=False)
        data = self._bytes_of(token_id, alone)
        if data is not None:
            return "bytes:" + "".join(rf"\x{byte:02x}" for byte in data), data
        known = self._text(before)
        text = self._text([*before, token_id])[len(known) :]
        if not text and alone and not self._text([token_id]):
            return alone, None
        return text, text.encode()

    def _bytes_of(self, token_id: int, alone: str) -> bytes | None:
        """Return the bytes of a token that is a byte, or that is decoded to replacement characters
        because it is only a part of a character. None for other tokens.
        """
        name = self._names.get(token_id, alone)
        if name == alone:
            return None
        if found := re.fullmatch(
            "<0x([0-9A-F]{2})>", name
        ):  # a byte of SentencePiece's byte fallback
            return bytes.fromhex(found[1])
        if "\ufffd" in alone and all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return None

    def _text(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        # Spaces before punctuation are kept, even if the tokenizer is configured to remove them.
        # Otherwise, a token could change the text of the tokens before it.
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
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
    """The text of an answer, which is updated as tokens arrive. It continues the text of the tokens
    `before` it, and ends before the first complete stop string.

    - `text`: the text that can be shown so far. Possible beginnings of a stop string, and characters
      with missing bytes, are held back until they are complete or `end` is called.
    - `before`: the last tokens before the next one, as context to decode it.
    - `num_decoded`: number of characters decoded so far, including those that are held back or stopped.
    - `piece`: the characters that the last token (or `end`) has completed.

    >>> answer = AnswerText(ByteTexts(), ["END"])
    >>> answer.add([72, 105, 32, 69, 78]), answer.add([33])
    ('Hi ', 'EN!')
    """

    def __init__(
        self, texts: Texts, stops: Sequence[str] | StopTexts, before: Sequence[int] = ()
    ) -> None:
        self._texts = texts
        self._stops = stops if isinstance(stops, StopTexts) else StopTexts(stops)
        self.before = tuple(before[-_NUM_BEFORE:])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = self.num_decoded = 0
        self._held = self.text = self.piece = ""
        self.is_stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens up to a stop string, and return the newly visible text. Sets `is_stopped` at a stop
        string.
        """
        start = len(self.text)
        for token in token_ids:
            if self.is_stopped:
                break
            self._decode(self._texts.token(token, self.before)[1] or b"")
            self.before = (*self.before, token)[-_NUM_BEFORE:]
        return self.text[start:]

    def end(self) -> str:
        """Return the text that was held back. Call this method after the last token."""
        start = len(self.text)
        if not self.is_stopped:
            self._decode(b"", final=True)
        if not self.is_stopped:
            self.text, self._held = self.text + self._held, ""
        return self.text[start:]

    def _decode(self, data: bytes, final: bool = False) -> None:
        """Decode bytes, and show all characters that cannot be the beginning of a stop string."""
        self.piece = self._decoder.decode(data, final)
        self.num_decoded += len(self.piece)
        held, stops = self._held + self.piece, self._stops
        for i, character in enumerate(self.piece if stops else ""):
            self._state = stops.step(self._state, character)
            if length := stops.num_stopped[self._state]:
                self.is_stopped = True
                self.text += held[: len(self._held) + i + 1 - length]
                return
        shown = len(held) - stops.num_held[self._state]
        self.text, self._held = self.text + held[:shown], held[shown:]
