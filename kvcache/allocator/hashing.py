"""Block hashes: SHA-256 chained over canonical CBOR, byte for byte the interoperable form.

`H([parent, [token ids], extra keys or null])`, the first parent being `H(seed)`; the CBOR is that of
RFC 8949 with every integer in its shortest form. Other programs and languages get the same hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcache._native import core

if TYPE_CHECKING:
    from kvcache.allocator.request import Request

DEFAULT_SEED = "vllm-none-hash"

# The native part finds libcrypto when it runs; where there is none, it asks this, per block.
core.set_sha256_fallback(lambda data: hashlib.sha256(data).digest())


def hash_blocks(
    token_ids: np.ndarray | Sequence[int],
    block_size: int,
    *,
    parent: bytes | None = None,
    extra_keys: Sequence[Sequence[tuple] | None] | None = None,
    seed: str = DEFAULT_SEED,
) -> np.ndarray:
    """Hashes of all full blocks of a prompt: uint8[num_tokens // block_size, 32].

    `token_ids`: integers 0 to 2**31 - 1 (an int32 array is the fast form). `parent`: the 32-byte
    hash of the block before, instead of the seed's. `extra_keys`: per full block a sequence of tuples
    of str, int, bytes or None, or None, as `request_extra_keys` makes them. Wrong lengths and values
    raise ValueError, wrong types TypeError.

    >>> hash_blocks(range(50), 16).shape
    (3, 32)
    """
    tokens = token_array(token_ids, "token_ids")
    chain = core.TokenChain(
        _positive(block_size, "block_size"),
        core.hash_seed(seed) if parent is None else bytes(parent),
        _encoded_blocks(extra_keys, len(tokens) // block_size),
    )
    chain.append(tokens)
    return chain.hashes()


def token_array(token_ids: np.ndarray | Iterable[int], name: str) -> np.ndarray:
    """Token ids as an int32 array; a range, list or other integer array is converted."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.int32 and token_ids.ndim == 1:
        return token_ids
    array = np.asarray(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids))
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions: expected 1")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    wrong = np.flatnonzero((array < 0) | (array > 0x7FFFFFFF))
    if wrong.size:
        raise ValueError(f"{name}[{wrong[0]}] is {array[wrong[0]]}: expected 0 to 2147483647")
    return array.astype(np.int32)


def encode_extra_keys(keys: Sequence[tuple] | None) -> bytes:
    """Canonical CBOR of one block's extra keys; b"" for none (which the hash holds as null)."""
    return _encode(list(keys)) if keys else b""


def request_extra_keys(
    request: Request, block_size: int, first: int, end: int
) -> list[list[tuple]]:
    """The extra keys of blocks `first` to `end - 1` of a request, in their fixed order.

    `("lora", name, path)` on every block; `("mm", identifier, image start - block start)` on every
    block the image touches; `("cache_salt", salt)` on the first block; `("prompt_embeds", digest)`.
    """
    keys: list[list[tuple]] = []
    for block in range(first, end):
        start, stop = block * block_size, (block + 1) * block_size
        found: list[tuple] = []
        if request.lora is not None:
            found.append(("lora", *request.lora))
        for identifier, offset, length in request.mm_items:
            if offset < stop and offset + length > start:
                found.append(("mm", identifier, offset - start))
        if request.cache_salt is not None and block == 0:
            found.append(("cache_salt", request.cache_salt))
        if request.prompt_embeds is not None and start < len(request.prompt_embeds):
            content = np.ascontiguousarray(request.prompt_embeds[start:stop])
            found.append(("prompt_embeds", hashlib.sha256(content.tobytes()).digest()))
        keys.append(found)
    return keys


def _encoded_blocks(extra_keys: Sequence | None, num_blocks: int) -> list[bytes]:
    if extra_keys is None:
        return []
    if len(extra_keys) != num_blocks:
        raise ValueError(
            f"extra_keys has {len(extra_keys)} entries: expected {num_blocks}, one per full block"
        )
    return [encode_extra_keys(keys) for keys in extra_keys]


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}: expected 1 or more")
    return value


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
            text = value.encode()
            return _head(_TEXT, len(text)) + text
        case bytes():
            return _head(_BYTES, len(value)) + value
        case list() | tuple():
            return _head(_ARRAY, len(value)) + b"".join(map(_encode, value))
    raise TypeError(
        f"extra key {value!r} has type {type(value).__name__}: "
        "expected str, int, bool, bytes, None or a list of them"
    )
