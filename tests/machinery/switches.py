# SPDX-License-Identifier: Apache-2.0
"""Sets environment variables that the ops read at each call, for the duration of a `with` block."""

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
    """Choose where ids appear to lie.

    The emulator's "device" memory is host memory, so this makes kernels treat ids as device ids.
    """
    return switched("KVCACHE_EMUL_DEVICE_IDS", where == "device")


def bulk_copies():
    """Make the kernel between device and host use bulk copies where possible."""
    return switched("KVCACHE_BULK_COPIES", True)


def parameters(small: bool):
    """Limit kernel parameters to 4 KiB, as with older drivers, or allow the full size."""
    return switched("KVCACHE_SMALL_PARAMETERS", small)
