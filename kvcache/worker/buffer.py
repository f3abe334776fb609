"""A tensor with a host side and a device side, and uploads that are safe without waiting."""

from __future__ import annotations

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
        self.cpu = torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu = self.cpu if device.type == "cpu" else torch.zeros_like(self.cpu, device=device)
        self._uploaded = torch.cuda.Event() if device.type == "cuda" and pin_memory else None
        self._pending = False

    def before_write(self) -> None:
        """Returns once no upload reads the host side any more."""
        if self._pending:
            self._uploaded.synchronize()
            self._pending = False

    def upload(self, n: int) -> None:
        """Copies the first `n` entries (rows) to the device, in the order of the current stream."""
        if self.gpu is self.cpu or n == 0:
            return
        self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(self.gpu.device))
            self._pending = True
