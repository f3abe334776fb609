"""Streams and events, as the moving of pages needs them: of a CUDA device, or of the CPU.

`SwapEngine` says through these what must come before what; the tests put a third one in their place,
which carries work out in any order that the calls allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaTimeline:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.cuda.Stream:
        """A stream beside the current one."""
        return torch.cuda.Stream(self._device)

    def current(self) -> torch.cuda.Stream:
        """The caller's stream, on which the engine computes."""
        return torch.cuda.current_stream(self._device)

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """What `work` launches comes behind all that the stream already holds."""
        with torch.cuda.stream(stream):
            work()

    def allocate(self, stream: torch.cuda.Stream, make: Callable[[], T]) -> T:
        """What `make` allocates belongs to the stream: given back, it waits for the stream's work."""
        with torch.cuda.stream(stream):
            return make()

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind all that the stream holds now."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """What the stream gets from now on waits for the event."""
        stream.wait_event(event)


class _Past:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuTimeline:
    """The CPU: whatever is launched has happened when the call returns."""

    def new_stream(self) -> None:
        """No stream is needed."""

    def current(self) -> None:
        """No stream is needed."""

    def launch(self, stream: None, work: Callable[[], None]) -> None:
        """Does the work."""
        work()

    def allocate(self, stream: None, make: Callable[[], T]) -> T:
        """Nothing is to be said of it."""
        return make()

    def record(self, stream: None) -> _Past:
        """An event that has happened."""
        return _Past()

    def wait(self, stream: None, event: _Past) -> None:
        """Nothing is left to wait for."""


def timeline_of(device: torch.device) -> CudaTimeline | CpuTimeline:
    """A device's own."""
    return CudaTimeline(device) if device.type == "cuda" else CpuTimeline()
