"""The three places an op runs: the CPU op, the CUDA kernel emulated on the CPU, the CUDA op."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kvcache.ops  # noqa: F401  (registers torch.ops.kvcache)
from tests.emulation import ASAN, emulated_ops


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    @property
    def ops(self):
        return emulated_ops() if self.name == "emulated" else torch.ops.kvcache

    def tensor(self, *args, **kwargs) -> torch.Tensor:
        return torch.tensor(*args, **kwargs, device=self.device)


_CPU = pytest.param(Backend("cpu", "cpu"), id="cpu")
_EMULATED = pytest.param(Backend("emulated", "cpu"), id="emulated")
_CUDA = pytest.param(Backend("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu)


def _each(*backends):
    # Under AddressSanitizer only the kernels are of interest.
    chosen = [_EMULATED] if ASAN else list(backends)
    return pytest.mark.parametrize("backend", chosen)


each_backend = _each(_CPU, _EMULATED, _CUDA)
# Where values live on a device, and are checked only in the checked mode.
each_device_backend = _each(_EMULATED, _CUDA)
# The ops that users call: with fake implementations.
each_real_backend = _each(_CPU, _CUDA)
