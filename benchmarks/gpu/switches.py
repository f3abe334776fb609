"""Switches of the ops: environment variables read at each call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_BULK_COPIES = "KVCACHE_BULK_COPIES"


@contextlib.contextmanager
def bulk_copies(on: bool) -> Iterator[None]:
    """Set whether the kernel between device and host uses bulk copies in the block."""
    os.environ[_BULK_COPIES] = str(int(on))
    try:
        yield
    finally:
        del os.environ[_BULK_COPIES]
