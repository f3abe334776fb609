# SPDX-License-Identifier: Apache-2.0
"""Backends of an op: the CPU op, the CUDA kernel emulated on the CPU, and the CUDA op.

The emulator runs threads and blocks in a random order, or in ascending order under sanitizers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

import kvcache.ops  # noqa: F401  (registers torch.ops.kvcache)
from tests.machinery.emulation import ASAN, emulated_ops
from tests.machinery.shared import seed_of_test


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    any_order: bool = False  # emulated only: each test draws a random order of threads and blocks

    @property
    def ops(self):
        if self.name != "emulated":
            return torch.ops.kvcache
        if self.any_order:
            os.environ["KVCACHE_EMUL_SEED"] = str(seed_of_test())
        else:
            os.environ.pop("KVCACHE_EMUL_SEED", None)
        return emulated_ops()

    def tensor(self, *args, **kwargs) -> torch.Tensor:
        return torch.tensor(*args, **kwargs, device=self.device)


_CPU = pytest.param(Backend("cpu", "cpu"), id="cpu")
_EMULATED = pytest.param(Backend("emulated", "cpu"), id="emulated")
_ANY_ORDER = pytest.param(Backend("emulated", "cpu", any_order=True), id="emulated")
_CUDA = pytest.param(Backend("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu)


def _each(*backends):
    # Under sanitizers, only the kernels are tested, with threads in ascending order.
    chosen = [_EMULATED] if ASAN else list(backends)
    return pytest.mark.parametrize("backend", chosen)


each_backend = _each(_CPU, _ANY_ORDER, _CUDA)
# Backends that read index values on the device and validate them only in checked mode.
each_device_backend = _each(_ANY_ORDER, _CUDA)
# Backends of the public ops, which have fake implementations.
each_real_backend = _each(_CPU, _CUDA)
