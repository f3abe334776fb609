# SPDX-License-Identifier: Apache-2.0
"""Sections of code that signal handlers cannot interrupt."""

from __future__ import annotations

import _signal  # `signal.getsignal` is slow because it converts each result to an enum
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = sorted(map(int, signal.valid_signals()))
Handler = Callable[[int, FrameType | None], object]


class SignalHold:
    """Delays signal handlers until the end of its ``with`` block. They then run, and may raise
    exceptions.

    CPython runs handlers in the main thread between two bytecodes. A handler that raises an exception
    (Ctrl-C raises KeyboardInterrupt) can therefore interrupt any statement and leave a change
    incomplete. In the main thread, each handler written in Python is replaced during the block by a
    stand-in that records the signal. At the end of the block, the handlers are restored and the
    recorded signals are raised again. In other threads, handlers are not replaced, because these
    threads never run signal handlers. Exceptions that are not raised by a handler
    (`PyThreadState_SetAsyncExc`) are not delayed.

    >>> with SignalHold() as hold:
    ...     signal.raise_signal(signal.SIGINT)
    ...     assert hold.noted == [signal.SIGINT]
    Traceback (most recent call last):
    KeyboardInterrupt
    """

    __slots__ = ("_stand_ins", "are_held", "is_over", "noted")

    def __init__(self) -> None:
        self.are_held = self.is_over = False
        self.noted: list[int] = []
        self._stand_ins: list[tuple[int, _StandIn]] = []

    def __enter__(self) -> SignalHold:
        try:
            self._replace()
            self.are_held = True
        except BaseException:
            self.is_over = True
            self._put_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back()
        finally:
            # If a restored handler raised an exception, the remaining stand-ins stay installed and
            # only forward signals.
            self.are_held = False
            self.is_over = True
            self._run_noted()

    def _replace(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                while isinstance(handler, _StandIn) and handler.hold.is_over:
                    handler = handler.handler
                stand_in = _StandIn(handler, self)
                self._stand_ins.append((number, stand_in))
                _signal.signal(number, stand_in)

    def _put_back(self) -> None:
        for number, stand_in in self._stand_ins:
            if _signal.getsignal(number) is stand_in:
                _signal.signal(number, stand_in.handler)

    def _run_noted(self) -> None:
        """Run the handlers of all recorded signals.

        Exceptions propagate after all handlers have run.
        """
        if self.noted:
            number = self.noted.pop(0)
            try:
                signal.raise_signal(number)
            finally:
                self._run_noted()


class _StandIn:
    """A signal handler that records signals while its hold is active, and forwards them otherwise."""

    __slots__ = ("handler", "hold")

    def __init__(self, handler: Handler, hold: SignalHold) -> None:
        self.handler, self.hold = handler, hold

    def __call__(self, number: int, frame: FrameType | None) -> object:
        if not self.hold.are_held:
            return self.handler(number, frame)
        # Like the operating system, do not queue a pending signal twice.
        if number not in self.hold.noted:
            self.hold.noted.append(number)
        return None
