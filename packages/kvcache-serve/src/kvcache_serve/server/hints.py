# SPDX-License-Identifier: Apache-2.0
"""Hints from clients."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, model_validator

from kvcache.checks import shown
from kvcache_exchange.hints import Hint
from kvcache_serve.server.errors import AskError
from kvcache_serve.server.request_fields import Fields, Messages, refuse

_FIELDS = sorted(field.name for field in fields(Hint))


class AskedHints(Fields):
    """The body of /v1/kv_hints."""

    model: str
    prompt: Any = None  # a text or a list of tokens; validated by the endpoint
    messages: Messages | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    # The fields of each `Hint`, which `hint_of` validates.
    kv_hints: Annotated[list[dict[str, Any]], Field(max_length=32)]

    @model_validator(mode="after")
    def _has_one(self) -> AskedHints:
        if (self.prompt is None) == (self.messages is None):
            given = "neither is" if self.prompt is None else "both are"
            refuse(f"prompt and messages: {given} given, expected exactly one of the two", "prompt")
        return self


def hint_of(given: dict[str, Any], i: int) -> Hint:
    """Return the hint with these fields, the i-th of its request. Raises AskError if it is invalid."""
    where = f"kv_hints[{i}]"
    try:
        for name in given.keys() - set(_FIELDS):
            raise ValueError(f"{shown(name)} is unknown: expected one of {', '.join(_FIELDS)}")
        if "intent" not in given:
            raise ValueError("intent is missing")
        return Hint(**given)
    except (TypeError, ValueError) as error:
        raise AskError(f"{where}: {error}", param=where) from None
