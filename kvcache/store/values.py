"""The form of a stored value: a header, and the bytes of a page.

    digest 16 | magic 8 | page bytes 8 | fingerprint 16 | group 4 | hash bytes 4 | hash 32 | zeros | page

The digest, XXH3 with 128 bits, is of all that follows it. It finds what went wrong by accident, not what
somebody has forged.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from kvcache.native.load import core

HEADER_BYTES = 128
_DIGEST_BYTES = 16
_MAGIC = b"kvcblk1\n"
_FIELDS = struct.Struct("<8sQ16sII32s")


class BlockKey(NamedTuple):
    """A cached block: its group, and its hash."""

    group: int
    block_hash: bytes


def key_text(fingerprint: bytes, key: BlockKey) -> str:
    """The key under which a store has a block.

    >>> key_text(bytes(16), BlockKey(0, b"hash"))
    'kvcache-00000000000000000000000000000000-0-68617368'
    """
    return f"{_prefix(fingerprint)}{key.group}-{key.block_hash.hex()}"


def key_of_text(fingerprint: bytes, text: str) -> BlockKey | None:
    """The inverse; None for a key of another fingerprint."""
    prefix = _prefix(fingerprint)
    group, _, block_hash = text[len(prefix) :].partition("-")
    if not text.startswith(prefix) or not group.isdecimal():
        return None
    return BlockKey(int(group), bytes.fromhex(block_hash))


def seal(value: np.ndarray, fingerprint: bytes, key: BlockKey) -> None:
    """Writes the header of a value, uint8[128 + page bytes], whose page is there."""
    value[_DIGEST_BYTES:HEADER_BYTES] = _header(len(value), fingerprint, key)
    value[:_DIGEST_BYTES] = np.frombuffer(core.xxh3_128(value[_DIGEST_BYTES:]), np.uint8)


def fault(value: np.ndarray, num_bytes: int, fingerprint: bytes, key: BlockKey) -> str | None:
    """What is wrong with a value of which so many bytes came: "missing", "misfit", "corrupt", or None."""
    if num_bytes < 0:
        return "missing"
    if num_bytes != len(value):
        return "misfit"
    if value[:_DIGEST_BYTES].tobytes() != core.xxh3_128(value[_DIGEST_BYTES:]):
        return "corrupt"
    if not np.array_equal(value[_DIGEST_BYTES:HEADER_BYTES], _header(len(value), fingerprint, key)):
        return "misfit"
    return None


def _prefix(fingerprint: bytes) -> str:
    return f"kvcache-{fingerprint.hex()}-"


def _header(value_bytes: int, fingerprint: bytes, key: BlockKey) -> np.ndarray:
    header = np.zeros(HEADER_BYTES - _DIGEST_BYTES, np.uint8)
    packed = _FIELDS.pack(
        _MAGIC,
        value_bytes - HEADER_BYTES,
        fingerprint,
        key.group,
        len(key.block_hash),
        key.block_hash,
    )
    header[: len(packed)] = np.frombuffer(packed, np.uint8)
    return header
