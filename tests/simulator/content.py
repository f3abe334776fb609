# SPDX-License-Identifier: Apache-2.0
"""What a page must hold: the KV of a token is a digest of everything that the token's KV depends on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
HEAD_SIZE = 8  # bytes of one digest


def mix(a: int, b: int) -> int:
    x = (a ^ (b * _ODD)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


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


def values_of(contents: Iterable[int], layer: int, part: int, num_heads: int) -> torch.Tensor:
    """Return the bytes of K (part 0) or V (part 1) of tokens in a layer: uint8[n, num_heads, 8]."""
    digests = np.array([*contents], np.uint64)
    odd = [mix(2 * layer + part, head) | 1 for head in range(num_heads)]
    values = digests[:, None] * np.array(odd, np.uint64)[None]
    return torch.from_numpy(values.view(np.uint8).reshape(len(digests), num_heads, HEAD_SIZE))
