# SPDX-License-Identifier: Apache-2.0
"""Raises exceptions at chosen or random instants of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType


class Interrupt(KeyboardInterrupt):
    """The exception that the signal handler raises."""


def raise_interrupt() -> None:
    """Raise Interrupt, as a signal handler may."""
    raise Interrupt


def interrupted_at(
    n: int, call: Callable[[], object], strike: Callable[[], object] = raise_interrupt
) -> bool:
    """Run `call` and raise at its n-th instant: a line, a function entry, or a return from native
    code.

    Returns False if `call` has fewer instants. The instants include every point at which CPython
    runs signal handlers. `strike` is a function that raises or makes a signal handler raise.
    """
    left, is_active = n, False

    def pass_instant() -> None:
        nonlocal left
        left -= is_active
        if left == 0 and is_active:
            strike()

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if event in ("call", "line"):
            pass_instant()
        return trace

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_return":
            pass_instant()

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        is_active = True
        call()
    except Interrupt:
        pass
    finally:
        is_active = False
        sys.setprofile(None)
        sys.settrace(None)
    return left <= 0


class Alarm:
    """A timer signal whose handler raises during a call."""

    def __enter__(self) -> Alarm:
        self._is_armed = False
        self._before = signal.signal(signal.SIGALRM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise Interrupt

    def interrupts(self, seconds: float, call: Callable[[], object]) -> bool:
        """Run `call`. Return whether the signal interrupted it."""
        try:
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
            self._is_armed = False
        except Interrupt:
            return True
        return False
