# SPDX-License-Identifier: Apache-2.0
"""Hints from clients, in a field of completion requests or through a separate endpoint."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvcache.checks import shown
from kvcache.hints import Hint
from kvcache.server.engine_loop import EngineLoop
from kvcache.server.errors import AskError
from kvcache.server.request_fields import Fields, HintList, Messages, refuse

_FIELDS = sorted(field.name for field in fields(Hint))


class AskedHints(Fields):
    """The body of /v1/kv_hints."""

    model: str
    prompt: Any = None  # a text or a list of tokens; validated by the endpoint
    messages: Messages | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    kv_hints: HintList

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
        hints: The fields of each `Hint`, as parsed JSON.
        tokens: The tokens to which the hints apply. The tokens of an answer are appended to them.
        cache_salt: The request's salt.
        is_completion: Whether the hints accompany a completion, after which they are carried out.

    Raises:
        AskError: A hint is invalid.
    """

    def __init__(
        self,
        loop: EngineLoop,
        hints: list[dict[str, Any]],
        tokens: list[int],
        cache_salt: str | None,
        *,
        is_completion: bool,
    ) -> None:
        self._loop, self._salt = loop, cache_salt
        self.tokens = list(tokens)
        self._hints = [_hint(each, i, is_completion) for i, each in enumerate(hints)]

    async def receipts(self) -> list[dict[str, Any]]:
        """Carry out the hints, and return their receipts, in order."""
        receipts = await self._loop.receipts(self.tokens, self._hints, self._salt)
        return [each.to_dict() for each in receipts]


def _hint(given: dict[str, Any], i: int, is_completion: bool) -> Hint:
    where = f"kv_hints[{i}]"
    try:
        for name in given.keys() - set(_FIELDS):
            raise ValueError(f"{shown(name)} is unknown: expected one of {', '.join(_FIELDS)}")
        if "intent" not in given:
            raise ValueError("intent is missing")
        hint = Hint(**given)
        if is_completion and hint.intent == "prefetch":
            raise ValueError(
                "intent is 'prefetch': expected it at /v1/kv_hints, before the request, which loads its "
                "own prefix"
            )
    except (TypeError, ValueError) as error:
        raise AskError(f"{where}: {error}", param=where) from None
    return hint
