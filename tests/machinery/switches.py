# SPDX-License-Identifier: Apache-2.0
"""Context managers that set environment variables, which the ops read on each call."""

from __future__ import annotations

import contextlib
import os


@contextlib.contextmanager
def switched(name: str, on: bool):
    if on:
        os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def ids_from(where: str):
    """Make ids appear to be in device memory or in host memory.

    Because the emulator's "device" memory is host memory, this is needed to make kernels treat ids
    as device ids.
    """
    return switched("KVCACHE_EMUL_DEVICE_IDS", where == "device")


def parameters(small: bool):
    """Limit the kernel parameters to 4 KiB, as with older drivers, or permit the full size."""
    return switched("KVCACHE_SMALL_PARAMETERS", small)
