# SPDX-License-Identifier: Apache-2.0
"""Checks the requirements of a command: packages, native libraries and devices."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from kvcache.cli.errors import MissingError, UsageError


def require_module(module: str, purpose: str, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingError(f"{purpose} needs {module}, which is not installed: {remedy}")


def import_module(name: str) -> ModuleType:
    """Import a module that needs the native libraries, which may have to be built first."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise MissingError(f"{name} cannot be used: {reason} (see `kvcache doctor`)") from error


def check_cuda(device: str) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(
            f"--device is {device!r}: expected cpu, because torch {torch.__version__} finds no CUDA "
            "device"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise UsageError(f"--device is {device!r}: expected at most cuda:{count - 1}")
