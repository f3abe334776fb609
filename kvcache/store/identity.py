"""What must be equal for a block of one engine to be a block of another."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvcache.allocator import KVCacheManager
from kvcache.checks import text

if TYPE_CHECKING:
    from kvcache.worker import Pages

FORMAT_VERSION = 1
FINGERPRINT_BYTES = 16


def fingerprint(
    manager: KVCacheManager, pages: Pages | None, *, model: str, rank: str = ""
) -> bytes:
    """16 bytes of all that values depend on besides their hash.

    These are the version of the values' format; how blocks are hashed (algorithm, seed, bytes, tokens);
    kind, options and block size of every group; of `pages` the bytes of each fragment and the formats of
    blocks (dtype, shape, order in memory); and what only the caller knows: `model` names weights,
    quantisation and scales, `rank` the part of layers and heads that this process has.

    >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
    >>> one, other = (fingerprint(manager, None, model=name) for name in ("llama", "llama-fp8"))
    >>> len(one), one == other
    (16, False)
    """
    described = {
        "version": FORMAT_VERSION,
        "model": text(model, "model"),
        "rank": text(rank, "rank"),
        "hash": [
            manager.hash_algorithm,
            manager.options.hash_seed,
            manager.hash_bytes,
            manager.hash_block_size,
        ],
        "groups": [
            [spec.kind, sorted(spec.options.items()), spec.block_size, size, spec.cached]
            for spec, size in zip(manager.groups, manager.block_sizes)
        ],
    }
    if pages is not None:
        described["pages"] = [pages.sizes.tolist(), pages.layers.tolist(), repr(pages.formats)]
    encoded = json.dumps(described, sort_keys=True).encode()
    return hashlib.sha256(encoded).digest()[:FINGERPRINT_BYTES]
