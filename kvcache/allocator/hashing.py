"""Block hashes: SHA-256 chained over canonical CBOR, byte for byte the interoperable form.

`H([parent, [token ids], extra keys or null])`, the first parent being `H(seed)`; the CBOR is that of
RFC 8949 with every integer in its shortest form. Other programs and languages get the same hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.checks import text
from kvcache.native.load import core

DEFAULT_SEED = "vllm-none-hash"

# The native part finds libcrypto when it runs; where there is none, it asks this, per block.
core.set_sha256_fallback(lambda data: hashlib.sha256(data).digest())


def hash_blocks(
    token_ids: np.ndarray | Iterable[int],
    block_size: int,
    *,
    parent: bytes | None = None,
    extra_keys: Sequence[Sequence[tuple] | None] | None = None,
    seed: str = DEFAULT_SEED,
) -> np.ndarray:
    """Hashes of all full blocks of a prompt: uint8[num_tokens // block_size, 32].

    `token_ids`: integers 0 to 2**31 - 1 (an int32 array is the fast form). `parent`: the 32-byte
    hash of the block before, instead of the seed's. `extra_keys`: per full block None or a sequence
    of tuples of str, int, bytes or None, in the order that `csrc/core/hashing/extra_keys.h` gives. Wrong
    lengths and values raise ValueError, wrong types TypeError. Long prompts are hashed without the
    interpreter's lock.

    >>> hash_blocks(range(50), 16).shape
    (3, 32)
    """
    if parent is None:
        parent = hash_seed(seed, "seed")
    elif not isinstance(parent, bytes):
        raise TypeError(f"parent has type {type(parent).__name__}: expected 32 bytes")
    return core.hash_blocks(
        token_sequence(token_ids), block_size, parent, _encoded_blocks(extra_keys)
    )


def hash_seed(seed: str, name: str) -> bytes:
    """The parent of first blocks."""
    return core.hash_seed(text(seed, name))


def token_sequence(token_ids: np.ndarray | Iterable[int]) -> np.ndarray | list | tuple:
    """Token ids as the native code takes them: other iterables (a range) become a list."""
    if isinstance(token_ids, np.ndarray | list | tuple):
        return token_ids
    try:
        return list(token_ids)
    except TypeError:
        raise TypeError(f"token_ids is {token_ids!r}: expected integers") from None


def encode_extra_keys(keys: Sequence[tuple] | None, name: str = "keys") -> bytes:
    """Canonical CBOR of one block's extra keys; b"" for none (which the hash holds as null)."""
    if keys is None:
        return b""
    if not isinstance(keys, list | tuple):
        raise TypeError(f"{name} is {keys!r}: expected None or a list of tuples")
    for key in keys:
        if not isinstance(key, list | tuple):
            raise TypeError(f"{name} holds {key!r}: expected a tuple of str, int, bytes or None")
    return _encode(keys) if keys else b""


def _encoded_blocks(extra_keys: Sequence | None) -> list[bytes] | None:
    if extra_keys is None:
        return None
    if not isinstance(extra_keys, list | tuple):
        raise TypeError(f"extra_keys is {extra_keys!r}: expected a list, one entry per full block")
    return [encode_extra_keys(keys, f"extra_keys[{i}]") for i, keys in enumerate(extra_keys)]


_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in (0, 1, 2, 3, 4))


def _head(major: int, value: int) -> bytes:
    """Head of a CBOR item in its shortest form."""
    if value < 24:
        return bytes([major | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes([major | code]) + value.to_bytes(size, "big")
    raise ValueError(f"extra key {value} does not fit in 64 bits")


def _encode(value: object) -> bytes:
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int() | np.integer():
            number = int(value)
            return _head(_UNSIGNED, number) if number >= 0 else _head(_NEGATIVE, -1 - number)
        case str():
            encoded = text(value, "extra key").encode()
            return _head(_TEXT, len(encoded)) + encoded
        case bytes():
            return _head(_BYTES, len(value)) + value
        case list() | tuple():
            return _head(_ARRAY, len(value)) + b"".join(map(_encode, value))
    raise TypeError(
        f"extra key {value!r} has type {type(value).__name__}: "
        "expected str, int, bool, bytes, None or a list of them"
    )
