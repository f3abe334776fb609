# SPDX-License-Identifier: Apache-2.0
"""Events of a prefix cache, emitted when blocks become available for hits or stop being available.

Events are plain data in chronological order. A hash is reported as stored when the first block with this
hash is cached, and as removed when the last such block is evicted. In between, caching or evicting other
blocks with the same hash emits no events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence were cached.

    - `block_hashes`: uint8[n, hash_bytes].
    - `parent_hash`: the hash of the block that precedes the first block. For the first block of a
      sequence, this is the hash of the seed, or None with an algorithm "engine:NAME".
    - `token_ids`: int32[n * block_size].
    - `block_size`: tokens per block.
    - `group`: the index of the cache group. `group_kind` is its attention kind, and `window` its
      sliding window in tokens.
    - `medium`: "gpu" for the device, "cpu" for the host tier, or "storage" for a store
      (`kvcache_exchange.store.StoreTier`).
    - `lora`, `session`: LoRA adapter and session of the request that computed the blocks.
    - `extra_keys`: one entry per hash block of `hash_block_size` tokens, either a tuple of keys or
      None. The whole field is None if no block has keys.
    - `root_hash`: the `parent_hash` of a sequence's first block, if it is not the hash of the seed
      because the adapter was forgotten (`PrefixCache.forget_adapter`).
    - `lookahead_token_ids`: int32[n, num_hash_lookahead_tokens], the tokens after each block that the
      block's hash also covers, or None if hashes cover only their blocks.

    A reader can compute the hashes from the event. The following call returns the same hashes as
    `cache.hashes`:

        hash_blocks(event.token_ids, event.hash_block_size, parent=event.parent_hash,
                    extra_keys=event.extra_keys, algorithm=event.hash_algorithm)

    If blocks are larger than hash blocks, the call also returns the hashes of the hash blocks inside
    each block.

    In events of the host tier, the parent, the tokens and the request fields are None or empty,
    because the device's events already reported them. The blocks of such an event need not be
    consecutive.
    """

    block_hashes: np.ndarray
    parent_hash: bytes | None
    token_ids: np.ndarray
    block_size: int
    group: int
    medium: str = "gpu"
    hash_algorithm: str = "sha256_cbor"
    hash_block_size: int = 0  # tokens per hash; 0: block_size
    group_kind: str = "full_attention"
    window: int | None = None  # sliding window in tokens
    lora: tuple[str, ...] | None = None  # (name, path) or (name, path, version)
    session: str | None = None
    extra_keys: tuple[tuple[tuple, ...] | None, ...] | None = None
    lookahead_token_ids: np.ndarray | None = None
    root_hash: bytes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.hash_block_size, int) and self.hash_block_size == 0:
            object.__setattr__(self, "hash_block_size", self.block_size)


@dataclass(frozen=True, eq=False, slots=True)
class BlockRemoved:
    """The last blocks with the hashes `block_hashes`, uint8[n, hash_bytes], are no longer available."""

    block_hashes: np.ndarray
    group: int
    medium: str = "gpu"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All hashes on this medium were removed, in every group.

    This event is also emitted after events have been dropped. Events are dropped when the queue of
    undrained events exceeds 2**20 events or a total of 2**24 tokens. The reader must then discard all
    hashes that it has recorded for the medium. Hashes reported after this event are cached. Hashes from
    dropped events may also be cached.

    `num_dropped`: number of dropped events on all media together, reported in the event for "gpu".
    0 if the event reports a reset.
    """

    medium: str = "gpu"
    num_dropped: int = 0


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
