# SPDX-License-Identifier: Apache-2.0
"""Buffers with a host side and a device side, with race-free asynchronous uploads."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from kvcache.worker.swap.streams import PolledEvent

_HUGE_PAGE = 1 << 21  # huge page size in bytes
_MOST_IN_HUGE_PAGES = 1 << 26  # maximum size in bytes of a buffer in huge pages


class HostDeviceBuffer:
    """A buffer on the host (`.np`, `.cpu`) with a mirror on the device (`.gpu`).

    The device address never changes. On a CPU device, all three share the same memory. `upload` is
    asynchronous if the host side is pinned. Before changing `.np` or `.cpu`, call `before_write`,
    which waits until the last upload has read the host side.

    Args:
        shape: Shape of the buffer.
        dtype: Element type.
        device: Device of `.gpu`.
        pin_memory: Whether to pin the host side. Ignored on a CPU device.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> None:
        on_cpu = device.type == "cpu"
        # Pinning is useful only for uploads.
        pinned = pin_memory and not on_cpu
        self.cpu = (
            torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
            if pinned
            else _zeros(shape, dtype)
        )
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu = self.cpu if on_cpu else device_zeros(shape, dtype, device)
        self._uploaded = PolledEvent() if device.type == "cuda" else None
        self._pending = False
        self._is_unrecorded = False  # whether the event after a launch is still to be recorded

    def before_write(self) -> None:
        """Wait until no upload reads the host side."""
        if self._pending:
            if self._is_unrecorded:  # an interrupt came between the launch and its event
                torch.cuda.current_stream(self.gpu.device).synchronize()
            # Poll the event, because waiting for it would invalidate the graph captures of all
            # threads. An upload completes within microseconds.
            while not self._uploaded.query():
                time.sleep(0)
            self._pending = self._is_unrecorded = False

    def upload(self, start: int, stop: int) -> None:
        """Upload entries (rows) `start` to `stop - 1` in stream order, on the current stream.

        Args:
            start: First entry.
            stop: End of the entries, exclusive.

        Raises:
            RuntimeError: A CUDA graph is being captured on the stream. Each replay of the graph
                would read the host side at the time of the replay, and `before_write` could not
                wait for this.
        """
        if self.gpu is self.cpu or start >= stop:
            return
        if self._uploaded is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured: upload from the host before or after the capture"
            )
        if self._pending:  # the last upload may be on another stream
            torch.cuda.current_stream(self.gpu.device).wait_event(self._uploaded)
        self.begin_use()
        self.gpu[start:stop].copy_(self.cpu[start:stop], non_blocking=True)
        self.note_use()

    def begin_use(self) -> None:
        """Prepare for a launch that reads the buffer. Call `note_use` afterwards."""
        self._pending = self._is_unrecorded = self._uploaded is not None

    def note_use(self) -> None:
        """Make the next write wait for all work launched on the current stream so far."""
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(self.gpu.device))
            self._pending, self._is_unrecorded = True, False


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in huge pages, because accesses are scattered over the buffer.

    Buffers larger than `_MOST_IN_HUGE_PAGES` use ordinary pages, because typically only a small
    part of such a buffer is used.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not _HUGE_PAGE <= num_bytes <= _MOST_IN_HUGE_PAGES:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    # Round up to whole huge pages, because the kernel does not use huge pages for partially covered
    # ranges.
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = np.zeros(size + _HUGE_PAGE, np.uint8)
    first = -memory.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a buffer's device side. Tests replace this function to use CPU memory."""
    return torch.zeros(shape, dtype=dtype, device=device)


class BufferView:
    """A reshaped slice of a one-dimensional buffer, with `.np`, `.cpu` and `.gpu`."""

    def __init__(self, buffer: HostDeviceBuffer, offset: int, shape: tuple[int, ...]) -> None:
        part = slice(offset, offset + math.prod(shape))
        self.cpu = buffer.cpu[part].view(shape)
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu = self.cpu if buffer.gpu is buffer.cpu else buffer.gpu[part].view(shape)
        self._buffer, self._offset = buffer, offset
        self._row = math.prod(shape[1:])

    def before_write(self) -> None:
        """Wait until no upload reads the host side."""
        self._buffer.before_write()

    def upload(self, num_rows: int) -> None:
        """Upload the first `num_rows` rows. See `HostDeviceBuffer.upload`."""
        self._buffer.upload(self._offset, self._offset + num_rows * self._row)
