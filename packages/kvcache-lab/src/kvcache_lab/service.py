# SPDX-License-Identifier: Apache-2.0
"""A simple engine model that determines how long requests run in a timed replay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache.checks import integer, number, shown
from kvcache.checks import text as checked_text

# All fields of `Service` except the speeds.
OTHER_FIELDS = ("prefill_ms", "attention_ns", "interference")

# The engine is overloaded if the last request waits longer than both limits: a time in milliseconds, and
# a fraction of the time between the first and the last arrival.
_LONG_WAIT_MS, _LONG_WAIT_SHARE = 10_000.0, 0.05


@dataclass(frozen=True)
class Service:
    """Speeds of prefill and decode. Prefills run one after another, and answers are generated
    concurrently.

    Args:
        prefill_speed: Prompt tokens computed per second, in total. Tokens found in the cache are
            not computed.
        decode_speed: Tokens per second of each answer.
        host_speed: Tokens loaded from the host per second, one load after another. Infinite by
            default, so that loads take no time.
        store_speed: Tokens loaded from a store per second, one load after another. Infinite by
            default.
        prefill_ms: Fixed overhead of each prefill in milliseconds, in addition to the time for its
            tokens.
        attention_ns: Prefill time in nanoseconds per pair of a computed token and a token that it
            attends to.
        interference: Fraction of a prefill's duration by which running answers are delayed. 0:
            answers continue during prefills. 1: answers pause during a prefill, which begins after
            their current step.

    Raises:
        ValueError: A speed is not positive, or another value is out of range.

    Example:
        >>> Service.parse("20000,50").decode_speed
        50.0
    """

    prefill_speed: float = 20_000.0  # tokens per second, shared by all prompts
    decode_speed: float = 50.0  # tokens per second of each answer
    host_speed: float = math.inf
    store_speed: float = math.inf
    prefill_ms: float = 0.0
    attention_ns: float = 0.0
    interference: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prefill_speed", "decode_speed", "host_speed", "store_speed"):
            speed = number(getattr(self, name), name)
            may_be_infinite = name in ("host_speed", "store_speed")
            if not speed > 0 or (speed == math.inf and not may_be_infinite):
                raise ValueError(f"{name} is {speed}: expected more than 0 tokens per second")
        for name in ("prefill_ms", "attention_ns"):
            if not 0 <= number(getattr(self, name), name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 or more")
        if not 0 <= number(self.interference, "interference") <= 1:
            raise ValueError(f"interference is {self.interference}: expected 0 to 1")

    @classmethod
    def parse(cls, text: str) -> Service:
        """Parse `prefill,decode[,host[,store]][ name=value]...`, with speeds in tokens per second.

        The names are `prefill_ms`, `attention_ns` and `interference`. Raises TypeError or ValueError for
        any other text.
        """
        checked_text(text, "text")
        try:
            first, *rest = text.split()
            speeds = [float(each) for each in first.split(",")]
            others = {name: float(value) for name, value in (each.split("=") for each in rest)}
            if (
                not 2 <= len(speeds) <= 4
                or not {*others} <= {*OTHER_FIELDS}
                or len(others) < len(rest)
            ):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{shown(text)}: expected speeds in tokens per second, P,D, P,D,HOST or P,D,HOST,STORE, "
                f"and then NAME=VALUE with names from {', '.join(OTHER_FIELDS)}"
            ) from None
        return cls(*speeds, **others)

    def __str__(self) -> str:
        speeds = [self.prefill_speed, self.decode_speed, self.host_speed, self.store_speed]
        while speeds[-1] == math.inf:
            speeds.pop()
        shown_speeds = ",".join(f"{each:g}" for each in speeds)
        others = ((name, getattr(self, name)) for name in OTHER_FIELDS)
        return " ".join([shown_speeds, *(f"{name}={value:g}" for name, value in others if value)])

    def compute_ms(self, num_tokens: int, num_cached: int) -> float:
        """Return the duration of a prompt's prefill in milliseconds.

        Args:
            num_tokens: Tokens of the prompt.
            num_cached: Number of these tokens that are cached and therefore not computed.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        integer(num_tokens, "num_tokens", 0)
        integer(num_cached, "num_cached", 0, num_tokens)
        count = num_tokens - num_cached
        pairs = count * (num_cached + num_tokens + 1) / 2
        return (
            self.prefill_ms + 1000 * count / self.prefill_speed + 1e-6 * self.attention_ns * pairs
        )


def overload(computed_ms: float, span_ms: float, last_wait_ms: float) -> str | None:
    """Return why the modeled engine cannot keep up with the arrivals, or None if it can.

    Args:
        computed_ms: Total duration of all prefills in milliseconds.
        span_ms: Time from the first to the last arrival in milliseconds.
        last_wait_ms: Time in milliseconds that the last served request waited for its prefill to
            begin.
    """
    if not span_ms:
        return None  # all requests arrive at the same time
    load = computed_ms / span_ms
    if load > 1:
        return (
            f"requests arrive within {span_ms / 1000:,.0f} s, but their prefill takes {load:.1f} times "
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
        self._load_free_ms = {"host": 0.0, "store": 0.0}

    def reach(self, ms: float) -> None:
        """Advance the clock to `ms`. If `ms` is in the past, nothing changes."""
        self.now_ms = max(self.now_ms, ms)

    @property
    def prefill_free_ms(self) -> float:
        """The time at which the prefills of all admitted requests have ended."""
        return self._prefill_free_ms

    def load(self, tier: str, num_tokens: int) -> float:
        """Load tokens from the host or the store, after all earlier loads from the same tier.

        Returns the time at which the load ends.
        """
        if num_tokens == 0:
            return self.now_ms
        begin = max(self.now_ms, self._load_free_ms[tier])
        speed = getattr(self._service, f"{tier}_speed")
        end = self._load_free_ms[tier] = begin + 1000 * num_tokens / speed
        return end

    def begin_ms(self, ready_ms: float, answers_end_ms: float) -> float:
        """Return the time at which the next prefill begins.

        Args:
            ready_ms: Time from which the prefill could begin if nothing else ran.
            answers_end_ms: When the last running answer ends.
        """
        begin = max(ready_ms, self._prefill_free_ms)
        step_ms = 1000 / self._service.decode_speed
        if begin < answers_end_ms and math.isfinite(step_ms):
            num_steps = math.ceil((begin - self._prefill_free_ms) / step_ms - 1e-6)
            # Time left in the decode step that is running at `begin`.
            left_ms = self._prefill_free_ms + num_steps * step_ms - begin
            begin += self._service.interference * max(left_ms, 0.0)
        return begin

    def admit(
        self, compute_ms: float, num_answer: int, load_ms: float = 0.0, answers_end_ms: float = 0.0
    ) -> tuple[float, float, float]:
        """Admit a request at the current time.

        Args:
            compute_ms: Duration of the request's prefill.
            num_answer: Number of tokens in the answer.
            load_ms: Time until the request's hits on other tiers have been loaded to the device.
                Other prefills continue in the meantime.
            answers_end_ms: When the last running answer ends.

        Returns:
            The times at which the prefill begins, the first token is produced, and the answer ends.
        """
        begin = self.begin_ms(self.now_ms + load_ms, answers_end_ms)
        first = self._prefill_free_ms = begin + compute_ms
        return begin, first, first + 1000 * num_answer / self._service.decode_speed
