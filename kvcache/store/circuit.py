"""Whether a store that failed is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcache.checks import integer, seconds, shown


class Circuit:
    """Opens after failures in a row; then lets one question through from time to time.

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
        """Whether the store is taken for dead."""
        return self._num_failures >= self._most

    def allows(self) -> bool:
        """Whether to ask now; where the circuit is open, yes once in a while."""
        if not self.is_open:
            return True
        if self._clock() < self._retry_at:
            return False
        self._retry_at = self._clock() + self._retry_s  # one question, whose answer is waited for
        return True

    def worked(self) -> None:
        """The store has answered."""
        self._num_failures, self._retry_s = 0, self._first_s

    def failed(self) -> None:
        """The store has failed, or has not answered in time."""
        self._num_failures += 1
        if self.is_open:
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, self._longest_s)
