"""Environment variables that the ops read at each call, for as long as a `with` block."""

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
    """Emulated, ids on the "device" are host memory too. This makes kernels treat them as device ids."""
    return switched("KVCACHE_EMUL_DEVICE_IDS", where == "device")


def bulk_copies():
    """The kernel between a device and the host copies by bulk copies, where it can."""
    return switched("KVCACHE_BULK_COPIES", True)


def parameters(small: bool):
    """Launches with parameters of 4 KiB, as older drivers take them, or with all there are."""
    return switched("KVCACHE_SMALL_PARAMETERS", small)
