# SPDX-License-Identifier: Apache-2.0
"""Streams and events for moving pages, on a CUDA device or on the CPU.

`SwapEngine` orders its work with these streams and events. Tests use a third implementation, which
runs the work in any order that the calls permit.
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
        """Create a high-priority stream. `close` destroys it.

        torch's stream pool is not used, because it assigns 32 streams in rotation, and swaps would
        soon share a stream with other work.
        """
        handle = torch.ops.kvcache._stream_create(self._device.index)
        return torch.cuda.ExternalStream(handle, device=self._device)

    def close(self, streams: Iterable[torch.cuda.ExternalStream]) -> None:
        """Wait until the work in the streams has finished, then destroy the streams."""
        for step in (torch.ops.kvcache._stream_synchronize, torch.ops.kvcache._stream_destroy):
            for stream in streams:
                step(self._device.index, stream.cuda_stream)

    def enter(self) -> None:
        """Make the device current for the calling thread, which must be dedicated to this device."""
        torch.cuda.set_device(self._device)

    def current(self) -> torch.cuda.Stream:
        """Return the current stream, on which the engine computes."""
        return torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured on the current stream."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Run `work` with the stream as the current one, after the work already in it."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: torch.cuda.Stream) -> PolledEvent:
        """Record an event after the work that is currently in the stream."""
        event = PolledEvent()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: PolledEvent) -> None:
        """Make work that is launched on the stream later wait for the event."""
        stream.wait_event(event)


class PolledEvent(torch.cuda.Event):
    """An event that any thread may poll while a graph is being captured.

    torch's own query would invalidate the captures of all threads. An alternative, a flag in pinned
    memory that is written in stream order, would need one write per event and would not reveal a
    device failure.
    """

    def query(self) -> bool:
        """Return whether the event has completed. Raises RuntimeError if the device has failed."""
        return torch.ops.kvcache._event_query(self.cuda_event)


class _Past:
    """An event that has already completed."""

    def query(self) -> bool:
        return True


class CpuStreams:
    """The CPU's counterpart of `CudaStreams`. Launched work has finished when the call returns."""

    def _nothing(self, *_: object) -> None:
        """Do nothing."""

    new_stream = close = enter = current = wait = _nothing

    def is_capturing(self) -> bool:
        """Return False, because the CPU has no graph captures."""
        return False

    def launch(self, stream: None, work: Callable[[], None]) -> None:
        """Run `work`."""
        work()

    def record(self, stream: None) -> _Past:
        """Return a completed event."""
        return _Past()


Event = PolledEvent | _Past


@functools.cache
def own_stream(device: torch.device) -> tuple[CudaStreams | CpuStreams, torch.cuda.Stream | None]:
    """Return the stream for work that runs beside the engine's work, always the same one."""
    streams = streams_of(device)
    return streams, streams.new_stream()


def streams_of(device: torch.device) -> CudaStreams | CpuStreams:
    """Return the streams of a device, `CudaStreams` or `CpuStreams`."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
