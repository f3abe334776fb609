# SPDX-License-Identifier: Apache-2.0
"""Digests that detect data that differs from what was sent or requested.

Each request has a digest. In the response, each piece has a digest that covers the request's
digest, the piece's number and the piece's bytes. Each side computes the request's digest from its
own copy of the request, so bytes that belong to another request or another piece do not match. The
digest of a frame covers the frame's number and content (`channel`).
"""

from __future__ import annotations

import torch

from kvcache.native.load import core

_PART = 1 << 20  # bytes that stay in the CPU cache while they are copied and digested


def digest_of(piece: torch.Tensor) -> str:
    """Return the 128-bit XXH3 digest of the XXH3 digests of all mebibytes.

    Detects transmission errors, but not forgery.
    """
    data = piece.numpy()
    parts = [core.xxh3_128(data[at : at + _PART].tobytes()) for at in range(0, len(data), _PART)]
    return core.xxh3_128(b"".join(parts)).hex()


def digest_of_request(number: int, payload: bytes) -> str:
    """Return a request's digest, which covers its ID and serialized spans."""
    return core.xxh3_128(f"{number} ".encode() + payload).hex()


def digest_of_answer(request: str, number: int, piece: str) -> str:
    """Return the digest of a piece in a response. `piece` is the digest of the piece's bytes."""
    return core.xxh3_128(f"{request} {number} {piece}".encode()).hex()
