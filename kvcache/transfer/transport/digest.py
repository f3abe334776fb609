"""Digests that detect data which differs from what was sent or requested.

A request has its own digest. Each piece of the answer has a digest of the request's digest, the piece's
number and its bytes. Both sides compute it from their own knowledge of the request, so bytes of another
request or of another piece do not match. Frames have a digest of their number and content (`channel`).
"""

from __future__ import annotations

import torch

from kvcache.native.load import core

_PART = 1 << 20  # bytes that stay in a cache while they are copied and digested


def digest_of(piece: torch.Tensor) -> str:
    """Return the 128-bit XXH3 of each mebibyte's XXH3. Detects transmission errors, not forgery."""
    data = piece.numpy()
    parts = [core.xxh3_128(data[at : at + _PART].tobytes()) for at in range(0, len(data), _PART)]
    return core.xxh3_128(b"".join(parts)).hex()


def digest_of_request(kind: str, tag: int, payload: bytes, message: bytes) -> str:
    """Return the digest of a request: its kind, tag, serialized spans, and the message after them."""
    head = f"{kind} {tag} {len(payload)} {len(message)} ".encode()
    return core.xxh3_128(head + payload + message).hex()


def digest_of_answer(request: str, number: int, piece: str) -> str:
    """Return the digest of a piece in an answer, from the digest `piece` of its bytes."""
    return core.xxh3_128(f"{request} {number} {piece}".encode()).hex()
