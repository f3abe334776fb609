"""A tensor with a host side and a device side, and uploads that are safe without waiting."""

from __future__ import annotations

import math

import numpy as np
import torch


class HostDeviceBuffer:
    """`.np` and `.cpu`: the host side; `.gpu`: the device side, at an address that never changes.

    On the CPU all three are one memory. `upload` is asynchronous from pinned memory; `before_write`
    waits until the last upload has read the host side, so call it before changing `.np` or `.cpu`.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> None:
        pin_memory = (
            pin_memory and device.type != "cpu"
        )  # where nothing is uploaded, nothing to pin
        self.cpu = torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)
        self.np: np.ndarray = self.cpu.numpy()
        on_cpu = device.type == "cpu"
        self.gpu = self.cpu if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self._uploaded = torch.cuda.Event() if device.type == "cuda" and pin_memory else None
        self._pending = False

    def before_write(self) -> None:
        """Returns once no upload reads the host side any more."""
        if self._pending:
            self._uploaded.synchronize()
            self._pending = False

    def upload(self, start: int, stop: int) -> None:
        """Copies entries (rows) start to stop - 1 to the device, in the order of the current stream."""
        if self.gpu is self.cpu or start >= stop:
            return
        self.gpu[start:stop].copy_(self.cpu[start:stop], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(self.gpu.device))
            self._pending = True


class BufferView:
    """Part of a one-dimensional buffer under a shape of its own, with the same three faces."""

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
