"""vLLM's block hashes, computed natively: the same bytes."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvcache.allocator import hash_blocks

# vLLM's name of a hash function -> kvcache's algorithm of the same bytes.
_ALGORITHMS = {"sha256_cbor": "sha256_cbor", "xxhash_cbor": "xxh3_128_cbor"}
_HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
Hasher = Callable[[Request], list[bytes]]


def hash_bytes_of(name: str) -> int:
    """Bytes of the hashes of a `prefix_caching_hash_algo`; ValueError for one that is not known."""
    if name not in _HASH_BYTES:
        raise ValueError(
            f"prefix_caching_hash_algo is {name!r}: expected one of {', '.join(_HASH_BYTES)}"
        )
    return _HASH_BYTES[name]


def get_request_block_hasher(hash_block_size: int, caching_hash_fn: Callable) -> Hasher:
    """In place of vLLM's function of this name: native for CBOR, vLLM's own for pickled tokens."""
    algorithm = _ALGORITHMS.get(caching_hash_fn.__name__)
    if algorithm is None:
        return kv_cache_utils.get_request_block_hasher(hash_block_size, caching_hash_fn)

    def hash_new_blocks(request: Request) -> list[bytes]:
        """The hashes of full blocks that `request.block_hashes` lacks."""
        num_hashed = len(request.block_hashes)
        start = num_hashed * hash_block_size
        stop = request.num_tokens // hash_block_size * hash_block_size
        if start >= stop:
            return []
        parent = request.block_hashes[-1] if num_hashed else kv_cache_utils.NONE_HASH
        hashes = hash_blocks(
            request._all_token_ids[start:stop],
            hash_block_size,
            parent=parent,
            extra_keys=_extra_keys(request, start, stop, hash_block_size),
            algorithm=algorithm,
        )
        packed, size = hashes.tobytes(), hashes.shape[1]
        return [packed[i : i + size] for i in range(0, len(packed), size)]

    return hash_new_blocks


def _extra_keys(request: Request, start: int, stop: int, size: int) -> list | None:
    """Of each block, by vLLM's own rules; None where none has any."""
    if not (
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
    ):
        return None
    keys, item = [], 0
    for first in range(start, stop, size):
        own, item = kv_cache_utils.generate_block_hash_extra_keys(
            request, first, first + size, item
        )
        keys.append(own)
    return keys
