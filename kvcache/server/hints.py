# SPDX-License-Identifier: Apache-2.0
"""Hints from clients, in a field of completion requests or through a separate endpoint."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from kvcache.hints import Hint, Receipt, hints_of_envelope
from kvcache.server.engine_loop import EngineLoop
from kvcache.server.errors import AskError
from kvcache.server.request_fields import Fields, Messages, refuse

_TOO_LATE = (
    "a request loads its own prefix: expected the prefetch at /v1/kv_hints, before it arrives"
)


class AskedHints(Fields):
    """The body of /v1/kv_hints."""

    model: str
    prompt: Any = None  # a text or a list of tokens; validated by the endpoint
    messages: Messages | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    kv_hints: dict[str, Any]

    @model_validator(mode="after")
    def _has_one(self) -> AskedHints:
        if (self.prompt is None) == (self.messages is None):
            given = "neither is" if self.prompt is None else "both are"
            refuse(f"prompt and messages: {given} given, expected exactly one of the two", "prompt")
        return self


class Hints:
    """The hints of one request.

    Args:
        loop: The engine loop.
        envelope: The envelope, as parsed JSON.
        tokens: The tokens to which the hints apply. The tokens of an answer are appended to them.
        cache_salt: The request's salt.
        is_completion: Whether the hints accompany a completion, after which they are carried out.

    Raises:
        AskError: The envelope is malformed.
    """

    def __init__(
        self,
        loop: EngineLoop,
        envelope: dict[str, Any],
        tokens: list[int],
        cache_salt: str | None,
        *,
        is_completion: bool,
    ) -> None:
        self._loop, self._envelope, self._salt = loop, envelope, cache_salt
        self.tokens = list(tokens)
        try:
            hints = hints_of_envelope(envelope)
        except (TypeError, ValueError) as error:
            raise AskError(str(error), param=str(error).partition(" ")[0]) from None
        self._hints = [_too_late(each) for each in hints] if is_completion else hints

    async def receipts(self) -> dict[str, Any]:
        """Carry out the hints, and return their receipts in the envelope format."""
        hints = [each for each in self._hints if isinstance(each, Hint)]
        found = iter(await self._loop.receipts(self.tokens, hints, self._salt))
        receipts = [each if isinstance(each, Receipt) else next(found) for each in self._hints]
        return {
            "protocol_version": self._envelope["protocol_version"],
            "message_id": self._envelope["message_id"],
            "receipts": [each.to_dict() for each in receipts],
        }


def _too_late(hint: Hint | Receipt) -> Hint | Receipt:
    if isinstance(hint, Receipt) or hint.intent != "prefetch":
        return hint
    return Receipt(intent=hint.intent, action_id=hint.action_id, status="refused", reason=_TOO_LATE)
