# SPDX-License-Identifier: Apache-2.0
"""Tokenizes chats up to the model's maximum length."""

from __future__ import annotations

from kvcache_serve.server.body_reader import apart
from kvcache_serve.server.errors import CONTEXT_CODE, AskError
from kvcache_serve.server.request_fields import Message
from kvcache_serve.server.texts import Texts


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
