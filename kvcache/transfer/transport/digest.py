"""The digests by which a side finds that something else arrived than was sent, or asked for.

A request has a digest of its own; each piece that answers it has one of the request, of the piece's
number and of its bytes, which both sides compute from what they know of the request themselves. So
bytes that another request asked for, or those of another piece, differ. Frames have a digest of their
number and content (`channel`).
"""

from __future__ import annotations

import torch

from kvcache.native.load import core

_PART = 1 << 20  # bytes: in a cache while they are copied and digested


def digest_of(piece: torch.Tensor) -> str:
    """XXH3 (128 bits) of the XXH3 of each mebibyte: finds what goes wrong on the way, not who forges."""
    data = piece.numpy()
    parts = [core.xxh3_128(data[at : at + _PART].tobytes()) for at in range(0, len(data), _PART)]
    return core.xxh3_128(b"".join(parts)).hex()


def digest_of_request(kind: str, tag: int, payload: bytes, message: bytes) -> str:
    """That of a request: what it is, its tag, its spans as they are sent, and the message behind them."""
    head = f"{kind} {tag} {len(payload)} {len(message)} ".encode()
    return core.xxh3_128(head + payload + message).hex()


def digest_of_answer(request: str, number: int, piece: str) -> str:
    """That of a piece, of which `piece` is the digest of its bytes, as an answer to a request."""
    return core.xxh3_128(f"{request} {number} {piece}".encode()).hex()
