"""Exceptions at chosen and at random instants of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType


class Interrupt(KeyboardInterrupt):
    """What the handler raises."""


def raise_interrupt() -> None:
    """As any code may."""
    raise Interrupt


def interrupted_at(
    n: int, call: Callable[[], object], strike: Callable[[], object] = raise_interrupt
) -> bool:
    """Runs `call` and raises at its n-th line, entry of a function or return from native code.

    False where it has fewer. These are the instants at which CPython runs signal handlers, and more.
    `strike`: what raises, or has a signal handler raise.
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
    """A signal of the system's timer, whose handler raises while a call runs."""

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
        """Whether the signal came within the call."""
        try:
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
            self._is_armed = False
        except Interrupt:
            return True
        return False
