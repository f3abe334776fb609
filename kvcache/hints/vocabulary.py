# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of hints: hints from callers, and the receipts that callers receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.checks import MAX_INT32, integer, number, shown, text

INTENTS = ("prefetch", "demote", "pin", "retain", "share")
"""The intents of hints."""

STATUSES = ("done", "partly", "refused")
_MAX_SECONDS = 2.0**31
_MAX_PRIORITY = 100

# The intents to which each optional field applies.
_APPLIES_TO = {
    "first_token": ("demote", "retain"),
    "ttl_s": ("prefetch", "pin", "retain", "share"),
    "priority": ("retain",),
    "session": ("demote", "pin"),
}


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Advice about the KV of a token prefix. The prefix itself is passed with the hint.

    - "prefetch": load the prefix from the host tier and from sources into the device's cache.
    - "demote": move the prefix from the device to the host tier.
    - "pin": evict the prefix last, until a deadline.
    - "retain": assign an eviction priority to the prefix, until a deadline.
    - "share": offer the prefix to another engine.

    Args:
        intent: One of `INTENTS`.
        action_id: A name that the receipt repeats.
        num_tokens: Number of leading tokens of the prefix to which the hint applies. None: all.
        first_token: The first token to demote or retain. Earlier tokens are not affected.
        ttl_s: For pin and retain, the number of seconds until the deadline. For share, the duration
            of the offer. For prefetch, how long the hint may wait for free blocks and sources.
            None: the budget's default. The budget also limits the value.
        priority: For retain, from 0 to 100. Lower priorities are evicted first.
        session: Name of a session, for pin and demote. A pin replaces the session's previous pin,
            and a demotion removes it.

    Raises:
        TypeError, ValueError: A field has the wrong type or value, or does not apply to the intent.

    Example:
        >>> Hint(intent="pin", ttl_s=30).ttl_s
        30
    """

    intent: str
    action_id: str = ""
    num_tokens: int | None = None
    first_token: int = 0
    ttl_s: float | None = None
    priority: int | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.intent, str) or self.intent not in INTENTS:
            raise ValueError(
                f"intent is {shown(self.intent)}: expected one of {', '.join(INTENTS)}"
            )
        text(self.action_id, "action_id")
        integer(self.first_token, "first_token")
        if self.num_tokens is not None:
            integer(self.num_tokens, "num_tokens", least=self.first_token + 1)
        if self.ttl_s is not None and not 0 < number(self.ttl_s, "ttl_s") < _MAX_SECONDS:
            raise ValueError(f"ttl_s is {shown(self.ttl_s)}: expected seconds, more than 0")
        if self.intent == "retain" and self.priority is None:
            raise ValueError("priority is None with intent 'retain': expected 0 to 100")
        if self.priority is not None:
            integer(self.priority, "priority", most=_MAX_PRIORITY)
        if self.session is not None:
            text(self.session, "session")
        for name, intents in _APPLIES_TO.items():
            is_given = getattr(self, name) != getattr(Hint, name)
            if is_given and self.intent not in intents:
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))} with intent {self.intent!r}: expected it "
                    f"only with {' or '.join(intents)}"
                )


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The result of a hint.

    Only full blocks are cached. With 16 tokens per block, for example, a hint for 100 tokens is
    "done" once it has been carried out for the first 96 tokens.

    Attributes:
        intent: The hint's intent. For an action that is not a hint, the action's type
            (`hints_of_envelope`).
        action_id: The hint's action ID.
        status: "done", "partly" or "refused".
        num_tokens: Number of tokens for which the hint was carried out. For a prefetch, this is the
            number of leading tokens that are now on the device, including tokens that were on the
            device before.
        num_asked_tokens: Number of tokens to which the hint refers.
        reason: Why the hint was not carried out completely. None if it was carried out completely.
        ttl_s: For pin, retain and share: the duration in seconds that the budget granted.
        offer: For share: the offer, to be passed to the other engine's `Connector.match`.
    """

    intent: str
    action_id: str = ""
    status: str
    num_tokens: int = 0
    num_asked_tokens: int = 0
    reason: str | None = None
    ttl_s: float | None = None
    offer: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        text(self.intent, "intent")
        text(self.action_id, "action_id")
        if self.status not in STATUSES:
            raise ValueError(
                f"status is {shown(self.status)}: expected one of {', '.join(STATUSES)}"
            )
        integer(self.num_asked_tokens, "num_asked_tokens")
        integer(self.num_tokens, "num_tokens", most=MAX_INT32)
        if (self.status == "done") != (self.reason is None):
            raise ValueError(
                f"status is {self.status!r} and reason is {shown(self.reason)}: expected a reason unless "
                "the hint is done"
            )
        if self.status == "refused" and self.num_tokens:
            raise ValueError(f"num_tokens is {self.num_tokens} in a refusal: expected 0")

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as JSON values, without the fields that do not apply.

        Example:
            >>> Receipt(intent="pin", status="done", num_tokens=32, num_asked_tokens=40).to_dict()
            {'intent': 'pin', 'status': 'done', 'num_tokens': 32, 'num_asked_tokens': 40}
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None and value != ""}
