# SPDX-License-Identifier: Apache-2.0
"""Digests that detect data which differs from what was sent or requested.

A request has a digest. The digest of each piece of the response covers the request's digest, the
piece's number and its bytes. Each side computes it from its own copy of the request, so bytes of
another request or another piece do not match. The digest of a frame covers its number and content
(`channel`).
"""

from __future__ import annotations

import torch

from kvcache.native.load import core

_PART = 1 << 20  # number of bytes that stay in a cache while they are copied and digested


def digest_of(piece: torch.Tensor) -> str:
    """Return the 128-bit XXH3 over the XXH3 digests of each mebibyte.

    Detects transmission errors, but not forgery.
    """
    data = piece.numpy()
    parts = [core.xxh3_128(data[at : at + _PART].tobytes()) for at in range(0, len(data), _PART)]
    return core.xxh3_128(b"".join(parts)).hex()


def digest_of_request(kind: str, tag: int, payload: bytes, message: bytes) -> str:
    """Return the digest of a request, over its kind, tag, serialized spans and message."""
    head = f"{kind} {tag} {len(payload)} {len(message)} ".encode()
    return core.xxh3_128(head + payload + message).hex()


def digest_of_answer(request: str, number: int, piece: str) -> str:
    """Return the digest of a piece of a response. `piece` is the digest of its bytes."""
    return core.xxh3_128(f"{request} {number} {piece}".encode()).hex()
