# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of hints: hints from callers, and the receipts that callers receive."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvcache.checks import MAX_INT32, integer, number, shown, text

INTENTS = ("prefetch", "pin")
"""The intents of hints."""

STATUSES = ("done", "partly", "refused")
_MAX_SECONDS = 2.0**31


@dataclass(frozen=True, kw_only=True)
class Hint:
    """Advice about the KV of a token prefix. The prefix itself is passed with the hint.

    - "prefetch": load the prefix from the host tier and from sources into the device's cache.
    - "pin": evict the prefix last, until a deadline.

    Args:
        intent: One of `INTENTS`.
        num_tokens: Number of leading tokens of the prefix to which the hint applies. None: all.
        ttl_s: For pin, the number of seconds until the deadline, at most 600. None: 60. For
            prefetch, how long the hint may wait for free blocks and sources, at most 30 seconds.
            None: 30.
        session: For pin, the name of a session. The pin replaces the session's previous pin.

    Raises:
        TypeError, ValueError: A field has the wrong type or value, or does not apply to the intent.

    Example:
        >>> Hint(intent="pin", ttl_s=30).ttl_s
        30
    """

    intent: str
    num_tokens: int | None = None
    ttl_s: float | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.intent, str) or self.intent not in INTENTS:
            raise ValueError(
                f"intent is {shown(self.intent)}: expected one of {', '.join(INTENTS)}"
            )
        if self.num_tokens is not None:
            integer(self.num_tokens, "num_tokens", least=1)
        if self.ttl_s is not None and not 0 < number(self.ttl_s, "ttl_s") < _MAX_SECONDS:
            raise ValueError(f"ttl_s is {shown(self.ttl_s)}: expected seconds, more than 0")
        if self.session is not None:
            text(self.session, "session")
            if self.intent != "pin":
                raise ValueError(
                    f"session is {shown(self.session)} with intent {self.intent!r}: expected it only "
                    "with pin"
                )


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The result of a hint.

    Only full blocks are cached. With 16 tokens per block, for example, a hint for 100 tokens is
    "done" once it has been carried out for the first 96 tokens.

    Attributes:
        intent: The hint's intent.
        status: "done", "partly" or "refused".
        num_tokens: Number of tokens for which the hint was carried out. For a prefetch, this is the
            number of leading tokens that are now on the device, including tokens that were on the
            device before.
        num_asked_tokens: Number of tokens to which the hint refers.
        reason: Why the hint was not carried out completely. None if it was carried out completely.
        ttl_s: For pin: the duration in seconds that was granted.
    """

    intent: str
    status: str
    num_tokens: int = 0
    num_asked_tokens: int = 0
    reason: str | None = None
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        text(self.intent, "intent")
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
        return {name: value for name, value in found.items() if value is not None}
