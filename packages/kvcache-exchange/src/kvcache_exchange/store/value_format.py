# SPDX-License-Identifier: Apache-2.0
"""The format of a stored value: a header, followed by the bytes of a page.

    digest 16 | magic 8 | page bytes 8 | fingerprint 16 | group 4 | hash bytes 4 | hash 32 | zeros | page

The digest is a 128-bit XXH3 hash of all bytes that follow it. It detects accidental corruption, but
not forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.native.load import core

HEADER_BYTES = 128
_DIGEST_BYTES = 16
_MAGIC = b"kvcblk1\n"
_FIELDS = struct.Struct("<8sQ16sII32s40x")


class BlockKey(NamedTuple):
    """The key of a cached block: its group and its hash."""

    group: int
    block_hash: bytes


def key_text(fingerprint: bytes, key: BlockKey) -> str:
    """Return the string that a store uses as the key of a block.

    Example:
        >>> key_text(bytes(16), BlockKey(0, b"hash"))
        'kvcache-00000000000000000000000000000000-0-68617368'
    """
    return f"{_prefix(fingerprint)}{key.group}-{key.block_hash.hex()}"


def key_of_text(fingerprint: bytes, text: str) -> BlockKey | None:
    """Parse a key created by `key_text`. Returns None if the fingerprint differs or the key is
    malformed.
    """
    prefix = _prefix(fingerprint)
    if not text.startswith(prefix):
        return None
    group, _, block_hash = text[len(prefix) :].partition("-")
    try:
        key = BlockKey(int(group), bytes.fromhex(block_hash))
    except ValueError:
        return None
    return key if text == key_text(fingerprint, key) else None


def seal(
    values: np.ndarray, numbers: Sequence[int], fingerprint: bytes, keys: Sequence[BlockKey]
) -> None:
    """Write the header of each value. `values` is uint8[n, 128 + page bytes]; its rows already
    contain the page bytes.

    Pass many values per call, because each call releases the GIL and may have to wait to reacquire
    it.
    """
    values[numbers, _DIGEST_BYTES:HEADER_BYTES] = _headers(values.shape[1], fingerprint, keys)
    values[numbers, :_DIGEST_BYTES] = _digests(values, numbers)


def faults(
    values: np.ndarray,
    numbers: Sequence[int],
    sizes: Sequence[int],
    fingerprint: bytes,
    keys: Sequence[BlockKey],
) -> list[str | None]:
    """Return each value's fault, given the received sizes: "missing", "misfit", "corrupt", or None
    for a valid value.

    Raises ValueError if `sizes` and the values differ in length.
    """
    digests = (values[numbers, :_DIGEST_BYTES] == _digests(values, numbers)).all(axis=1)
    expected = _headers(values.shape[1], fingerprint, keys)
    fits = (values[numbers, _DIGEST_BYTES:HEADER_BYTES] == expected).all(axis=1)
    found: list[str | None] = []
    for size, is_whole, is_own in zip(sizes, digests.tolist(), fits.tolist(), strict=True):
        if size < 0:
            found.append("missing")
        elif size != values.shape[1]:
            found.append("misfit")
        elif not is_whole:
            found.append("corrupt")
        else:
            found.append(None if is_own else "misfit")
    return found


def _prefix(fingerprint: bytes) -> str:
    return f"kvcache-{fingerprint.hex()}-"


def _digests(values: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    which = np.asarray(numbers, np.int64)
    return core.xxh3_128_rows(values, which, _DIGEST_BYTES, values.shape[1])


def _headers(value_bytes: int, fingerprint: bytes, keys: Sequence[BlockKey]) -> np.ndarray:
    """Return the headers without their digests, uint8[n, 112]."""
    page_bytes = value_bytes - HEADER_BYTES
    packed = [
        _FIELDS.pack(_MAGIC, page_bytes, fingerprint, group, len(block_hash), block_hash)
        for group, block_hash in keys
    ]
    return np.frombuffer(b"".join(packed), np.uint8).reshape(len(keys), -1)
