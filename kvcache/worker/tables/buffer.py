"""A tensor with a host side and a device side, and uploads that are safe without waiting."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from kvcache.worker.swap.streams import PolledEvent

_HUGE_PAGE = 1 << 21  # bytes
_MOST_IN_HUGE_PAGES = 1 << 26  # bytes


class HostDeviceBuffer:
    """`.np` and `.cpu`: the host side; `.gpu`: the device side, at an address that never changes.

    On the CPU all three are one memory. `upload` is asynchronous from pinned memory; `before_write`
    waits until the last upload has read the host side, so call it before changing `.np` or `.cpu`.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> None:
        on_cpu = device.type == "cpu"
        # Where nothing is uploaded, nothing needs pinning.
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
        self._is_unrecorded = False  # a launch whose event is not recorded yet

    def before_write(self) -> None:
        """Returns once no upload reads the host side any more."""
        if self._pending:
            # Waiting for the event would invalidate the graph captures of all threads; polling does
            # not. An upload is over within microseconds.
            if self._is_unrecorded:  # an interrupt came between a launch and its event
                torch.cuda.current_stream(self.gpu.device).synchronize()
            while not self._uploaded.query():
                time.sleep(0)
            self._pending = self._is_unrecorded = False

    def upload(self, start: int, stop: int) -> None:
        """Copies entries (rows) start to stop - 1 to the device, in the order of the current stream.

        RuntimeError while a CUDA graph is captured on it: a replay would read what the host side
        holds by then, and there would be no upload to wait for.
        """
        if self.gpu is self.cpu or start >= stop:
            return
        if self._uploaded is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured: uploads from the host come before or after"
            )
        if self._pending:  # the last upload may have been on another stream
            torch.cuda.current_stream(self.gpu.device).wait_event(self._uploaded)
        self.begin_use()
        self.gpu[start:stop].copy_(self.cpu[start:stop], non_blocking=True)
        self.note_use()

    def begin_use(self) -> None:
        """Before a launch that reads the buffer, which `note_use` follows."""
        self._pending = self._is_unrecorded = self._uploaded is not None

    def note_use(self) -> None:
        """Makes the next write wait for all that was launched on the current stream so far."""
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(self.gpu.device))
            self._pending, self._is_unrecorded = True, False


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that asks for huge pages, as numpy's large arrays do: rows are read all over it.
    Not where so much memory would hardly be touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not _HUGE_PAGE <= num_bytes <= _MOST_IN_HUGE_PAGES:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    # Whole huge pages: those that an array covers in part are small ones.
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = np.zeros(size + _HUGE_PAGE, np.uint8)
    first = -memory.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The device side of a buffer; the tests put CPU memory in its place."""
    return torch.zeros(shape, dtype=dtype, device=device)


class BufferView:
    """Part of a one-dimensional buffer under a shape of its own, with `.np`, `.cpu` and `.gpu` too."""

    def __init__(self, buffer: HostDeviceBuffer, offset: int, shape: tuple[int, ...]) -> None:
        part = slice(offset, offset + math.prod(shape))
        self.cpu = buffer.cpu[part].view(shape)
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu = self.cpu if buffer.gpu is buffer.cpu else buffer.gpu[part].view(shape)
        self._buffer, self._offset = buffer, offset
        self._row = math.prod(shape[1:])

    def before_write(self) -> None:
        """Returns once no upload reads the host side any more."""
        self._buffer.before_write()

    def upload(self, num_rows: int) -> None:
        """Copies the first rows (entries, of one dimension) to the device; see the buffer."""
        self._buffer.upload(self._offset, self._offset + num_rows * self._row)
