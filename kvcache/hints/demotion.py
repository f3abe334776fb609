# SPDX-License-Identifier: Apache-2.0
"""Removes device blocks that also have a copy on the host."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.hints.prefixes import HintedPrefix


def drop_from_device(
    manager: KVCacheManager, prefix: HintedPrefix, first_token: int, pinned: Set[bytes]
) -> tuple[int, str]:
    """Remove the device blocks that have a copy on the host and are neither held by a request nor
    pinned.

    Args:
        manager: The manager.
        prefix: The prefix.
        first_token: Blocks that begin before this token are kept on the device.
        pinned: Hashes of pinned blocks.

    Returns:
        The number of tokens that are no longer on the device, and the reason why the other tokens
        were not removed.
    """
    before = prefix.on_device()
    ids, hashes, on_host = prefix.device_blocks(first_token)
    is_free = manager.pool.ref_counts(ids) == 0
    is_pinned = np.array([each in pinned for each in hashes], bool)
    manager.cache.evict(ids[on_host & is_free & ~is_pinned])
    reasons = [
        (~on_host, "the host tier has no room for the other blocks"),
        (~is_free, "requests hold the other blocks"),
        (is_pinned, "the other blocks are pinned"),
    ]
    reason = next(
        (reason for mask, reason in reasons if mask.any()), "the other blocks are not on the device"
    )
    return max(before - max(prefix.on_device(), first_token), 0), reason
