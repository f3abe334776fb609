# SPDX-License-Identifier: Apache-2.0
"""Switches of the ops: environment variables read at each call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_BULK_COPIES = "KVCACHE_BULK_COPIES"


@contextlib.contextmanager
def bulk_copies(on: bool) -> Iterator[None]:
    """Enable or disable bulk copies in the kernel between device and host, within the block."""
    os.environ[_BULK_COPIES] = str(int(on))
    try:
        yield
    finally:
        del os.environ[_BULK_COPIES]
