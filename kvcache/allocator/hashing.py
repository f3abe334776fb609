# SPDX-License-Identifier: Apache-2.0
"""Block hashes, computed as a chained digest over canonical CBOR. They are byte-identical to the
block hashes of other engines, such as vLLM.

The hash of a block is `H([parent, [token ids], extra keys or null])`, and the first parent is `H(seed)`.
The CBOR follows RFC 8949, with every integer in its shortest form. H is SHA-256 ("sha256_cbor",
32 bytes) or 128-bit XXH3 ("xxh3_128_cbor", 16 bytes).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.checks import integer, listed, shown, text
from kvcache.native.load import core

DEFAULT_SEED = "vllm-none-hash"
"""Default seed of the first block's hash, as in vLLM."""
DEFAULT_ALGORITHM = "sha256_cbor"
_ENGINE = "engine:"  # name prefix of hash algorithms that the engine implements
_MOST_BYTES = 32


def hash_blocks(
    token_ids: np.ndarray | Iterable[int],
    block_size: int,
    *,
    parent: bytes | None = None,
    extra_keys: Sequence[Sequence[tuple] | None] | None = None,
    seed: str = DEFAULT_SEED,
    algorithm: str = DEFAULT_ALGORITHM,
) -> np.ndarray:
    """Hash all full blocks of a prompt.

    Long prompts are hashed without the GIL.

    Args:
        token_ids: 32-bit integers. An int32 array is fastest.
        block_size: Tokens per block.
        parent: Hash of the block that precedes the first block. None: the hash of the seed.
        extra_keys: For each full block, None or a sequence of tuples of str, int, bytes or None, in
            the order defined in `csrc/core/hashing/extra_keys.h`.
        seed: Seed whose hash is the parent of the first block. Ignored if `parent` is given.
        algorithm: "sha256_cbor", or "xxh3_128_cbor", which is faster but not cryptographic.

    Returns:
        uint8[num_tokens // block_size, 32], or 16 bytes per hash with XXH3.

    Raises:
        ValueError: A length or value is invalid.
        TypeError: An argument has the wrong type.

    >>> hash_blocks(range(50), 16).shape
    (3, 32)
    """
    num_bytes = hash_bytes_of(algorithm, name="algorithm", engines=False)
    if parent is None:
        parent = hash_seed(seed, "seed", algorithm)
    elif not isinstance(parent, bytes):
        raise TypeError(f"parent has type {type(parent).__name__}: expected {num_bytes} bytes")
    return core.hash_blocks(
        token_sequence(token_ids), block_size, parent, encoded_blocks(extra_keys), algorithm
    )


def hash_seed(seed: str, name: str, algorithm: str = DEFAULT_ALGORITHM) -> bytes:
    """Return the hash of the seed, which is the parent hash of every sequence's first block."""
    return core.hash_seed(text(seed, name), algorithm)


class HashKey(NamedTuple):
    """Hash parameters that are the same for all requests."""

    block_size: int  # tokens per hash
    parent: bytes  # parent hash of first blocks; its length is the length of every hash
    algorithm: str
    num_lookahead: int = 0  # tokens after a block that its hash also covers
    # (name, parent) of each adapter whose requests have another parent, see `forget_adapter`.
    forgotten: tuple[tuple[str, bytes], ...] = ()

    def of_adapter(self, name: str | None) -> HashKey:
        """Return the key of requests that use an adapter (None: no adapter)."""
        parent = dict(self.forgotten).get(name, self.parent)
        return self._replace(parent=parent, forgotten=())

    def forget_adapter(self, name: str) -> HashKey:
        """Return a key with which requests of an adapter have hashes that no other key creates."""
        parent = hash_seed(secrets.token_hex(32), "seed", self.algorithm)
        kept = tuple(each for each in self.forgotten if each[0] != name)
        return self._replace(forgotten=(*kept, (name, parent)))

    @property
    def is_given(self) -> bool:
        """Whether the engine computes the hashes. If so, requests must contain them."""
        return self.algorithm.startswith(_ENGINE)


def hash_key(
    block_size: int, seed: str, algorithm: str, hash_bytes: int | None, num_lookahead: int = 0
) -> HashKey:
    """Validate the hash options of a manager and return them as `HashParameters`."""
    num_bytes = hash_bytes_of(algorithm, hash_bytes)
    if algorithm.startswith(_ENGINE):
        return HashKey(block_size, bytes(num_bytes), algorithm, num_lookahead)
    if num_lookahead:
        raise ValueError(
            f"num_hash_lookahead_tokens is {num_lookahead}: expected 0 with {algorithm}, whose hashes "
            "cover no tokens after a block"
        )
    return HashKey(block_size, hash_seed(seed, "hash_seed", algorithm), algorithm)


def hash_bytes_of(
    algorithm: str,
    hash_bytes: int | None = None,
    *,
    name: str = "hash_algorithm",
    engines: bool = True,
) -> int:
    """Return the bytes per hash of an algorithm, "engine:NAME" only with `engines`.

    `hash_bytes`: for "engine:NAME", the bytes per hash (None: 32). For any other algorithm, None or the
    algorithm's hash size. `name`: the argument's name in errors. Raises TypeError or ValueError.
    """
    known = core.hash_algorithm_names()
    if not isinstance(algorithm, str):
        raise TypeError(f"{name} is {shown(algorithm)}: expected a string")
    if engines and algorithm.startswith(_ENGINE) and algorithm != _ENGINE:
        return integer(
            _MOST_BYTES if hash_bytes is None else hash_bytes, "hash_bytes", 1, _MOST_BYTES
        )
    if algorithm not in known:
        given = ", or engine:NAME for hashes computed by the engine" if engines else ""
        raise ValueError(f"{name} is {shown(algorithm)}: expected one of {', '.join(known)}{given}")
    size = core.digest_bytes(algorithm)
    if hash_bytes is not None and integer(hash_bytes, "hash_bytes") != size:
        raise ValueError(f"hash_bytes is {hash_bytes}: expected {size} with {algorithm}")
    return size


def token_sequence(token_ids: np.ndarray | Iterable[int]) -> np.ndarray | list | tuple:
    """Convert token IDs for native code: arrays, lists and tuples stay, others become lists."""
    if isinstance(token_ids, np.ndarray | list | tuple):
        return token_ids
    return listed(token_ids, "token_ids", "integers")


def encode_extra_keys(keys: Sequence[tuple] | None, name: str = "keys") -> bytes:
    """Encode one block's extra keys as canonical CBOR, or b"" (hashed as null) without keys."""
    if keys is None:
        return b""
    if not isinstance(keys, list | tuple):
        raise TypeError(f"{name} is {shown(keys)}: expected None or a list of tuples")
    for key in keys:
        if not isinstance(key, list | tuple):
            raise TypeError(
                f"{name} holds {shown(key)}: expected a tuple of str, int, bytes or None"
            )
    return _encode(keys) if keys else b""


def encoded_blocks(extra_keys: Sequence | None) -> list[bytes] | None:
    """Apply `encode_extra_keys` to each block."""
    if extra_keys is None:
        return None
    if not isinstance(extra_keys, list | tuple):
        raise TypeError(
            f"extra_keys is {shown(extra_keys)}: expected a list, one entry per full block"
        )
    return [encode_extra_keys(keys, f"extra_keys[{i}]") for i, keys in enumerate(extra_keys)]


_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in (0, 1, 2, 3, 4))


def _head(major: int, value: int) -> bytes:
    """Encode the head of a CBOR item in its shortest form."""
    if value < 24:
        return bytes([major | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes([major | code]) + value.to_bytes(size, "big")
    raise ValueError(f"extra key {shown(value)} does not fit in 64 bits")


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
        f"extra key {shown(value)} has type {type(value).__name__}: "
        "expected str, int, bool, bytes, None or a list of them"
    )
