"""Switches of the ops: environment variables that they read at each call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_BULK_COPIES = "KVCACHE_BULK_COPIES"


@contextlib.contextmanager
def bulk_copies(on: bool) -> Iterator[None]:
    """Whether the kernel between a device and the host copies by bulk copies within."""
    os.environ[_BULK_COPIES] = str(int(on))
    try:
        yield
    finally:
        del os.environ[_BULK_COPIES]
