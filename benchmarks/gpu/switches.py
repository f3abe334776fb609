# SPDX-License-Identifier: Apache-2.0
"""Switches of the ops whose defaults are not decided until both values were measured on a GPU.

`SWITCHES` lists all of them. Each is an environment variable that the ops read at each call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# What each switch enables. All are off by default.
SWITCHES = {
    "KVCACHE_PDL": "programmatic dependent launch of the small kernels of a step",
}


@contextlib.contextmanager
def switched(name: str, on: bool) -> Iterator[None]:
    """Set one of `SWITCHES` within the block."""
    if name not in SWITCHES:
        raise ValueError(f"name is {name!r}: expected one of {', '.join(SWITCHES)}")
    before = os.environ.get(name)
    os.environ[name] = str(int(on))
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def dependent_launches(on: bool) -> contextlib.AbstractContextManager[None]:
    """Enable or disable dependent launches of a step's small kernels, within the block."""
    return switched("KVCACHE_PDL", on)
