# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker, which decides when to call a failing store or peer again."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.checks import integer, seconds, shown


class Circuit:
    """A circuit breaker that opens after consecutive failures.

    While the circuit is open, it allows one trial call per retry interval. The interval doubles
    after each failed trial.

    Args:
        num_failures: Number of consecutive failures after which the circuit opens.
        retry_s: Seconds until the first trial call.
        max_retry_s: Upper limit of the interval, in seconds.
        clock: Function that returns the time in seconds.

    Example:
        >>> circuit = Circuit(num_failures=1, retry_s=60)
        >>> circuit.failed()
        >>> circuit.allows(), circuit.is_open
        (False, True)
        >>> circuit.worked()
        >>> circuit.allows()
        True
    """

    def __init__(
        self,
        num_failures: int = 3,
        retry_s: float = 1.0,
        max_retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not callable(clock):
            raise TypeError(f"clock is {shown(clock)}: expected a function that returns seconds")
        self._most = integer(num_failures, "num_failures", 1)
        self._first_s = self._retry_s = seconds(retry_s, "retry_s")
        self._longest_s = seconds(max_retry_s, "max_retry_s")
        self._clock = clock
        self._num_failures = 0
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open, that is, whether the store or peer is considered dead."""
        return self._num_failures >= self._most

    @property
    def would_allow(self) -> bool:
        """Whether `allows` would return True. Does not count as a trial call."""
        return not self.is_open or self._clock() >= self._retry_at

    def allows(self) -> bool:
        """Return whether a call is allowed now.

        An open circuit allows one call per retry interval.
        """
        if not self.is_open:
            return True
        if not self.would_allow:
            return False
        self._retry_at = self._clock() + self._retry_s  # no further trial until then
        return True

    def worked(self) -> None:
        """Record a successful call, which closes the circuit."""
        self._num_failures, self._retry_s = 0, self._first_s

    def failed(self) -> None:
        """Record a failed or timed-out call."""
        self._num_failures += 1
        if self.is_open:
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, self._longest_s)
