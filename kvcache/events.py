"""What a prefix cache tells others about itself: which blocks became findable, and which left.

Plain data, in the order in which it happened. A hash is stored when its first block becomes findable
and removed when its last one goes: duplicates in between are not told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence became findable.

    `block_hashes`: uint8[n, 32]. `parent_hash`: that of the block before the first (of a first
    block: the hash of the seed), 32 bytes. `token_ids`: int32[n * block_size]. `block_size`: tokens.
    `medium`: "gpu", or "cpu" for the host tier; of blocks there parent and tokens are not told (None and
    empty: they were told when the blocks were on the device), and they need not be consecutive.
    """

    block_hashes: np.ndarray
    parent_hash: bytes | None
    token_ids: np.ndarray
    block_size: int
    group: int
    medium: str = "gpu"


@dataclass(frozen=True, eq=False, slots=True)
class BlockRemoved:
    """No block is found under these hashes, uint8[n, 32], any more."""

    block_hashes: np.ndarray
    group: int
    medium: str = "gpu"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No hash stored before on this medium is found any more, in any group."""

    medium: str = "gpu"


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
