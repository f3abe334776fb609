"""Events of a prefix cache: blocks that can be found, and blocks that no longer can.

Events are plain data, in the order in which they happened. A hash is stored when its first block is
cached and removed when its last one leaves; further blocks with the same hash emit no events. With
`announce_reused`, blocks that a request hits are stored again (`is_reused`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence were cached; or, with `is_reused`, are hit by a request.

    `block_hashes`: uint8[n, hash_bytes]. `parent_hash`: that of the block before the first (of a first
    block: the hash of the seed, or None where only the engine knows the algorithm). `token_ids`:
    int32[n * block_size]. `block_size`: tokens. `group`: the number of the cache group, `group_kind` its
    attention kind, and `window` the tokens of its sliding window. `medium`: "gpu", "cpu" for the host
    tier, or "storage" for a store (`kvcache.store.StoreTier`). `lora` and `session` are those of the
    request that has computed, or hit, the blocks;
    `extra_keys` has one entry per hash block of `hash_block_size` tokens, a tuple of its keys or None,
    or is None where no block has any. So a block's hash follows from its event:

        hash_blocks(event.token_ids, event.hash_block_size, parent=event.parent_hash,
                    extra_keys=event.extra_keys, algorithm=event.hash_algorithm)

    gives `block_hashes`, or, where blocks are larger than hash blocks, those and the ones between.

    Events of the host tier have no parent, no tokens, and nothing of a request (None and empty: the
    device's events had them), and their blocks need not be consecutive.
    """

    block_hashes: np.ndarray
    parent_hash: bytes | None
    token_ids: np.ndarray
    block_size: int
    group: int
    medium: str = "gpu"
    hash_algorithm: str = "sha256_cbor"
    hash_block_size: int = 0  # tokens; 0: as block_size
    group_kind: str = "full_attention"
    window: int | None = None  # tokens
    lora: tuple[str, str] | None = None  # (name, path)
    session: str | None = None
    extra_keys: tuple[tuple[tuple, ...] | None, ...] | None = None
    is_reused: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.hash_block_size, int) and self.hash_block_size == 0:
            object.__setattr__(self, "hash_block_size", self.block_size)


@dataclass(frozen=True, eq=False, slots=True)
class BlockRemoved:
    """No block is found under these hashes, uint8[n, hash_bytes], any more."""

    block_hashes: np.ndarray
    group: int
    medium: str = "gpu"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No hash stored before on this medium is found any more, in any group.

    Also where events were dropped, as more than 2**20 of them, or of 2**24 tokens, were waiting to be
    drained: the reader forgets what it knows of the medium. What it then knows is cached; more may be.
    `num_dropped`: how many events that were, of all mediums, in that of "gpu"; 0 in a reset.
    """

    medium: str = "gpu"
    num_dropped: int = 0


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
