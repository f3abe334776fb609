# SPDX-License-Identifier: Apache-2.0
"""A simple engine model that determines how long the requests of a timed replay run."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.checks import number, shown
from kvcache.checks import text as checked_text

# If the wait at the last arrival exceeds this value, the queue grew during the whole replay.
_LONG_WAIT_MS, _LONG_WAIT_SHARE = 10_000.0, 0.05


@dataclass(frozen=True)
class Service:
    """Speeds of prefill and decode. Prompts run one after another, and answers run concurrently.

    Args:
        prefill_speed: Prompt tokens per second, in total. Hits are not computed.
        decode_speed: Tokens per second of each answer.

    Raises:
        ValueError: A speed is not above 0.

    Example:
        >>> Service.parse("20000,50")
        Service(prefill_speed=20000.0, decode_speed=50.0)
    """

    prefill_speed: float = 20_000.0  # tokens per second, shared by all prompts
    decode_speed: float = 50.0  # tokens per second of each answer

    def __post_init__(self) -> None:
        for name in ("prefill_speed", "decode_speed"):
            speed = number(getattr(self, name), name)
            if not 0 < speed < float("inf"):
                raise ValueError(f"{name} is {speed}: expected more than 0 tokens per second")

    @classmethod
    def parse(cls, text: str) -> Service:
        """Parse `prefill,decode` in tokens per second.

        Raises TypeError or ValueError for any other text.
        """
        checked_text(text, "text")
        try:
            prefill, decode = map(float, text.split(","))
        except ValueError:
            raise ValueError(
                f"{shown(text)}: expected two speeds in tokens per second, P,D"
            ) from None
        return cls(prefill, decode)

    def __str__(self) -> str:
        return f"{self.prefill_speed:g},{self.decode_speed:g}"


def overload(
    service: Service, num_computed: int, span_ms: float, last_wait_ms: float
) -> str | None:
    """Return the reason why the modeled engine cannot keep up with the arrivals, or None if it can.

    Args:
        service: Speeds of the engine.
        num_computed: Number of computed prompt tokens, without hits.
        span_ms: Time from the first to the last arrival in milliseconds.
        last_wait_ms: Time in milliseconds that the last served request waited for its prefill to
            begin.
    """
    if not span_ms:
        return None  # all requests arrive at once
    load = 1000 * num_computed / service.prefill_speed / span_ms
    if load > 1:
        return (
            f"requests arrive within {span_ms / 1000:,.0f} s, and their prefill takes {load:.1f} times "
            "as long"
        )
    if last_wait_ms > max(_LONG_WAIT_MS, _LONG_WAIT_SHARE * span_ms):
        return (
            f"requests arrive within {span_ms / 1000:,.0f} s, and the last request "
            f"waited {last_wait_ms / 1000:,.0f} s for its prefill"
        )
    return None


class ServiceClock:
    """The clock of a timed replay, in milliseconds starting at 0."""

    def __init__(self, service: Service) -> None:
        self.now_ms = 0.0
        self._service = service
        self._prefill_free_ms = 0.0

    def reach(self, ms: float) -> None:
        """Advance the clock to `ms`. A time in the past has no effect."""
        self.now_ms = max(self.now_ms, ms)

    @property
    def prefill_free_ms(self) -> float:
        """The time at which the prefills of all admitted requests have ended."""
        return self._prefill_free_ms

    def admit(
        self, num_computed: int, num_answer: int, load_ms: float = 0.0
    ) -> tuple[float, float]:
        """Return the times at which a request admitted now produces its first token and ends.

        Args:
            num_computed: Prompt tokens to compute, without hits.
            num_answer: Tokens of the answer.
            load_ms: Time until its hits on other tiers are on the device. Other prefills continue.
        """
        begin = max(self.now_ms + load_ms, self._prefill_free_ms)
        first = self._prefill_free_ms = begin + 1000 * num_computed / self._service.prefill_speed
        return first, first + 1000 * num_answer / self._service.decode_speed
