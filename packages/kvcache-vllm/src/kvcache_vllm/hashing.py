# SPDX-License-Identifier: Apache-2.0
"""Computes vLLM's block hashes natively, with identical bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvcache.allocator.hashing import encoded_blocks
from kvcache.native.load import core
from kvcache_vllm import private
from kvcache_vllm.held import HashSpan

# Maps vLLM's hash function names to kvcache's algorithms that produce identical bytes.
_ALGORITHMS = {"sha256_cbor": "sha256_cbor", "xxhash_cbor": "xxh3_128_cbor"}
_HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
Hasher = Callable[[Request], Sequence[bytes]]


class RequestHashes(core.HashedTokens):
    """The `block_hashes` of a vLLM request: packed hashes and the request's tokens.

    Attributes:
        discarded: Maps a block's hash to the tokens after the block that the hash covers. An entry is
            added if a session discards one of these tokens. None: not recorded.
    """

    __slots__ = ("_after_last", "discarded", "num_hashed")

    def __init__(
        self, block_size: int, parent: bytes, algorithm: str, num_lookahead: int = 0
    ) -> None:
        super().__init__(block_size, parent, algorithm, num_lookahead)
        self.num_hashed = 0
        self.discarded: dict[bytes, list[int]] | None = None
        self._after_last: list[int] = []

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Do nothing, because the native hasher has already added the hashes that vLLM appends here."""

    def clear(self) -> None:
        """Remove all hashes."""
        del self[:]

    def __eq__(self, other: object) -> bool:
        return list(self) == (other if isinstance(other, list) else list(other))

    __hash__ = None

    def __add__(self, other: Sequence[bytes]) -> list[bytes]:
        return [*self, *other]

    def __reduce__(self) -> tuple:
        """Pickle and copy this object as a list, like vLLM's own."""
        return list, (list(self),)

    def note_last(self, tokens: list[int]) -> None:
        """Record the tokens after the last block that are covered by the last block's hash."""
        self._after_last = tokens

    def __delitem__(self, blocks: slice) -> None:
        if self._after_last and self.discarded is not None:
            self.discarded[self[-1]] = self._after_last
        self._after_last = []
        super().__delitem__(blocks)
        self.num_hashed = len(self)


def hash_bytes_of(name: str) -> int:
    """Return the digest size of a `prefix_caching_hash_algo`. Raises ValueError if it is unknown."""
    if name not in _HASH_BYTES:
        raise ValueError(
            f"prefix_caching_hash_algo is {name!r}: expected one of {', '.join(_HASH_BYTES)}"
        )
    return _HASH_BYTES[name]


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable, num_hash_lookahead_tokens: int = 0
) -> Hasher:
    """Return a hasher, as vLLM's function of this name does, with native code for CBOR hashes."""
    algorithm = _ALGORITHMS.get(caching_hash_fn.__name__)
    span = HashSpan(hash_block_size, num_hash_lookahead_tokens)
    num_lookahead = span.num_lookahead
    if algorithm is None:
        lookahead = (num_lookahead,) if num_lookahead else ()  # vLLM 0.32 has no such parameter
        make = kv_cache_utils.get_request_block_hasher
        theirs = make(hash_block_size, caching_hash_fn, *lookahead)
        theirs.span = span
        return theirs

    def hash_new_blocks(request: Request) -> tuple[()]:
        """Hash the full blocks that `request.block_hashes` lacks."""
        known = request.block_hashes
        if type(known) is not RequestHashes:
            parent = kv_cache_utils.NONE_HASH
            known = request.block_hashes = RequestHashes(
                hash_block_size, parent, algorithm, num_lookahead
            )
        stop = span.num_blocks(request.num_tokens)
        if known.num_hashed < stop:
            known.extend_to(
                private.token_ids(request),
                _extra_keys(request, known.num_hashed, stop, hash_block_size, num_lookahead),
            )
            known.num_hashed = stop
            # vLLM sets `resumable` only after it has hashed the prompt.
            if num_lookahead and getattr(request, "resumable", False):
                after = request.all_token_ids[stop * hash_block_size :]
                known.note_last(after if len(after) == num_lookahead else [])
        return ()

    # A token can complete a block only at multiples of the block size plus the lookahead.
    hash_new_blocks.span = span
    return hash_new_blocks


def _extra_keys(
    request: Request, start: int, stop: int, size: int, num_lookahead: int
) -> list[bytes] | None:
    """Return the extra keys of blocks `start` to `stop - 1` as CBOR, following vLLM's rules; None
    if there are none. The extra keys of a block also cover the `num_lookahead` tokens after it.
    """
    if not (
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
    ):
        return None
    keys, item = [], 0
    for first in range(start * size, stop * size, size):
        last = first + size + num_lookahead
        if num_lookahead:
            own, item = kv_cache_utils.generate_lookahead_block_hash_extra_keys(
                request, first, first + size, last, item
            )
        else:
            own, item = kv_cache_utils.generate_block_hash_extra_keys(request, first, last, item)
        keys.append(own)
    return encoded_blocks(keys)
