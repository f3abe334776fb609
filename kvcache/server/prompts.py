# SPDX-License-Identifier: Apache-2.0
"""Tokenizes texts and chats up to the model's maximum length, and provides endpoints for tokenization."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, model_validator

from kvcache.server.body_reader import apart, parsed, read_body
from kvcache.server.errors import CONTEXT_CODE, AskError
from kvcache.server.request_fields import Fields, Message, Messages, refuse
from kvcache.server.texts import NUM_BEFORE, Texts

_TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class AskedTokens(Fields):
    """The body of /tokenize, with a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True  # only for texts; chat templates add their own special tokens
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one(self) -> AskedTokens:
        if (self.prompt is None) == (self.messages is None):
            given = "neither is" if self.prompt is None else "both are"
            refuse(f"prompt and messages: {given} given, expected exactly one of the two", "prompt")
        return self


class AskedText(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: _TokenIds


class PromptReader:
    """Tokenizes prompts from clients. Overlong texts are rejected before tokenization."""

    def __init__(self, texts: Texts, max_model_len: int) -> None:
        self._texts, self._max_model_len = texts, max_model_len

    def check_length(self, name: str, size: int) -> None:
        """Reject a text with so many characters that it certainly has too many tokens."""
        most = self._max_model_len * self._texts.longest_token
        if size > most:
            raise AskError(
                f"{name} has {size} characters: expected at most {most}, because prompt and answer may "
                f"have {self._max_model_len} tokens (max_model_len)",
                param=name,
                code=CONTEXT_CODE,
            )

    async def chat_tokens(self, chat: list[Message]) -> list[int]:
        """Return the tokens of a chat, up to the start of the answer."""
        messages = [message.as_dict() for message in chat]
        size = sum(len(message["content"]) for message in messages)
        self.check_length("messages", size)
        try:
            return await apart(size, self._texts.encode_chat, messages)
        except Exception as error:
            # Templates may reject messages, for example because of the order of their roles.
            message = f"messages are rejected by the model's template: {error}"
            raise AskError(message, param="messages") from None

    async def tokenize(self, request: Request, most_bytes: int) -> dict[str, Any]:
        """Serve /tokenize. Uses vLLM's format."""
        body = await read_body(request, most_bytes)
        asked = await apart(len(body), parsed, body, AskedTokens)
        if asked.messages is not None:
            tokens = await self.chat_tokens(asked.messages)
        else:
            self.check_length("prompt", len(asked.prompt))
            tokens = await apart(
                len(asked.prompt), self._texts.encode, asked.prompt, asked.add_special_tokens
            )
        token_strs = None
        if asked.return_token_strs:
            token_strs = [
                self._texts.token(token, tokens[max(i - NUM_BEFORE, 0) : i])[0]
                for i, token in enumerate(tokens)
            ]
        return {
            "count": len(tokens),
            "max_model_len": self._max_model_len,
            "tokens": tokens,
            "token_strs": token_strs,
        }

    async def detokenize(self, request: Request, most_bytes: int) -> dict[str, Any]:
        """Serve /detokenize. Uses vLLM's format."""
        body = await read_body(request, most_bytes)
        asked = await apart(len(body), parsed, body, AskedText)
        return {"prompt": await apart(len(asked.tokens), self._texts.decode, asked.tokens)}
