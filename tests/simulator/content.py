# SPDX-License-Identifier: Apache-2.0
"""What a page must hold: the KV of a token is a digest of everything that the token's KV depends on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
HEAD_SIZE = 8  # bytes of one digest


def mix(a: int, b: int) -> int:
    x = (a ^ (b * _ODD)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@cache
def owner_of(*parts: object) -> int:
    """Return a number for the weights, the adapter and the tenant that a token's KV belongs to."""
    found = 1
    for part in parts:
        for byte in repr(part).encode():
            found = mix(found, byte)
    return found


def extended(contents: list[int], units: Iterable[int], owner: int) -> list[int]:
    """Return the digests of further tokens after those in `contents`, of which the last one counts.

    `units` are the tokens, or other inputs at their positions.
    """
    last, found = contents[-1] if contents else 0, []
    for unit in units:
        last = mix(mix(last, owner), unit + 1)
        found.append(last)
    return found


@cache
def factors_of(layer: int, part: int, num_heads: int) -> np.ndarray:
    """Return the numbers by which a digest is multiplied to get the bytes of K (part 0) or V (part 1)
    in each head of a layer.
    """
    return np.array([mix(2 * layer + part, head) | 1 for head in range(num_heads)], np.uint64)
