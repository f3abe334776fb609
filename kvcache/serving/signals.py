"""Sections of code that a signal handler cannot interrupt, so that one that raises cannot tear them."""

from __future__ import annotations

import _signal  # `signal.getsignal` makes an enum of each answer, which takes longer than all the rest
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = sorted(map(int, signal.valid_signals()))
Handler = Callable[[int, FrameType | None], object]


class SignalHold:
    """Holds signal handlers back while its ``with`` block runs; they run, and may raise, at its end.

    CPython runs handlers in the main thread between two bytecodes. A handler that raises (Ctrl-C raises
    KeyboardInterrupt) may therefore end any statement, and leave half a change behind. In the main thread
    each handler written in Python is replaced for the duration of the block by a stand-in that notes the
    signal. When the block ends, the handlers are put back and the noted signals are raised again. Other
    threads run no handlers, and there nothing is replaced. Exceptions that no handler raises
    (`PyThreadState_SetAsyncExc`) are not held back.

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
            # A handler that was back already may have raised: stand-ins that are left only pass on.
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
        """Runs the handlers of all noted signals; what they raise comes out when all have run."""
        if self.noted:
            number = self.noted.pop(0)
            try:
                signal.raise_signal(number)
            finally:
                self._run_noted()


class _StandIn:
    """A handler that notes the signal while its hold says so, and passes it on otherwise."""

    __slots__ = ("handler", "hold")

    def __init__(self, handler: Handler, hold: SignalHold) -> None:
        self.handler, self.hold = handler, hold

    def __call__(self, number: int, frame: FrameType | None) -> object:
        if not self.hold.are_held:
            return self.handler(number, frame)
        if number not in self.hold.noted:  # as the system does: two that wait are one
            self.hold.noted.append(number)
        return None
