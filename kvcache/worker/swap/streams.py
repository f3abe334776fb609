"""Streams and events for moving pages, on a CUDA device or on the CPU.

`SwapEngine` orders its work with these. The tests use a third implementation, which runs the work in any
order that the calls allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch


class CudaStreams:
    """The streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def new_stream(self) -> torch.cuda.ExternalStream:
        """A new stream of high priority; `close` destroys it.

        It is not from torch's pool, which hands out 32 streams in turn: swaps would soon share theirs
        with other work.
        """
        handle = torch.ops.kvcache._stream_create(self._device.index)
        return torch.cuda.ExternalStream(handle, device=self._device)

    def close(self, streams: Iterable[torch.cuda.ExternalStream]) -> None:
        """Waits until the work in the streams is done, and destroys them."""
        for step in (torch.ops.kvcache._stream_synchronize, torch.ops.kvcache._stream_destroy):
            for stream in streams:
                step(self._device.index, stream.cuda_stream)

    def enter(self) -> None:
        """Makes the device the calling thread's current one: of a thread that is nobody else's."""
        torch.cuda.set_device(self._device)

    def current(self) -> torch.cuda.Stream:
        """The caller's stream, on which the engine computes."""
        return torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        """Whether the caller's stream is being captured in a CUDA graph."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Runs `work`; its launches come after the work that is in the stream."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: torch.cuda.Stream) -> PolledEvent:
        """An event after the work that is in the stream now."""
        event = PolledEvent()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: PolledEvent) -> None:
        """Later launches on the stream wait for the event."""
        stream.wait_event(event)


class PolledEvent(torch.cuda.Event):
    """An event that may be polled while a graph is captured, by any thread.

    torch's own query invalidates the captures of all threads. A flag in pinned memory, written in
    stream order, would need a write per event and would not show a failure of the device.
    """

    def query(self) -> bool:
        """Whether the event has happened. RuntimeError where the device has failed."""
        return torch.ops.kvcache._event_query(self.cuda_event)


class _Past:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuStreams:
    """The CPU: launched work is done when the call returns."""

    def new_stream(self) -> None:
        """No stream is needed."""

    def close(self, streams: Iterable[None]) -> None:
        """No stream was made."""

    def enter(self) -> None:
        """Nothing is to be entered."""

    def current(self) -> None:
        """No stream is needed."""

    def is_capturing(self) -> bool:
        """The CPU captures nothing."""
        return False

    def launch(self, stream: None, work: Callable[[], None]) -> None:
        """Does the work."""
        work()

    def record(self, stream: None) -> _Past:
        """An event that has happened."""
        return _Past()

    def wait(self, stream: None, event: _Past) -> None:
        """Nothing is left to wait for."""


Event = PolledEvent | _Past


@functools.cache
def own_stream(device: torch.device) -> tuple[CudaStreams | CpuStreams, torch.cuda.Stream | None]:
    """A stream of this device for work beside the engine's, the same for the life of the process."""
    streams = streams_of(device)
    return streams, streams.new_stream()


def streams_of(device: torch.device) -> CudaStreams | CpuStreams:
    """The streams of a device: CUDA's or the CPU's."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
