"""Events of a prefix cache: blocks that can be found, and blocks that no longer can.

Events are plain data, in the order in which they happened. A hash is stored when its first block is
cached and removed when its last one leaves; further blocks with the same hash emit no events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence were cached.

    `block_hashes`: uint8[n, 32]. `parent_hash`: that of the block before the first (of a first
    block: the hash of the seed), 32 bytes. `token_ids`: int32[n * block_size]. `block_size`: tokens.
    `medium`: "gpu", or "cpu" for the host tier. Events of the host tier have no parent and no tokens
    (None and empty: the device's events had them), and their blocks need not be consecutive.
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
