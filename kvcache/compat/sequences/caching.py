# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of sequences: marking blocks as computed, hits, eviction and events."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from kvcache.allocator.event_stream import events_of
from kvcache.allocator.stats import PrefixCacheStats, stats_of
from kvcache.compat.sequences.checks import device_name
from kvcache.compat.sequences.demand import num_skipped_blocks
from kvcache.compat.sequences.protocol import (
    SequenceGroupLike,
    SequenceLike,
)
from kvcache.compat.sequences.tables import SequenceTables
from kvcache.compat.sequences.tokens import Tokens
from kvcache.events import CacheEvent
from kvcache.native.load import core
from kvcache.specs import GroupSpec
from kvcache.step import NO_IDS


class SequenceCaching(SequenceTables):
    """Block tables with prefix caching: later sequences can hit full blocks that were computed."""

    @property
    def stats(self) -> PrefixCacheStats:
        """Prefix-cache statistics: totals, and counts for the last 1,000 queried sequences.

        Each call to `allocate` is counted as one query, regardless of the number of sequences. `host`
        counts swapped pages and is None without a host pool.
        """
        self._native.check_reader()
        return stats_of(self._native.stats(), self._pool.num_pins_broken, self._native.learned())

    def drain_events(self) -> list[CacheEvent]:
        """Return the cache events since the last call. Requires `enable_events`."""
        kind, options = "full_attention", {}
        if self.sliding_window is not None:
            kind, options = "sliding_window", {"window": self.sliding_window}
        group = GroupSpec(kind, self.block_size, options)
        waiting = self._native.waiting_events()
        events = events_of(waiting, [group], [self.block_size], self._tokens.key)
        self._native.drop_events()  # if an interrupt arrives before this line, the events stay queued
        return events

    @core.native_method
    def access_all_blocks_in_seq(self, seq: SequenceLike, now: float) -> None:
        """Record an access to a sequence's blocks, for the eviction policy "last_access".

        Args:
            seq: The sequence.
            now: Time of the access, on any clock.
        """

    @core.native_method
    def mark_blocks_as_computed(self, seq_group: SequenceGroupLike, token_chunk_size: int) -> None:
        """Mark the next tokens of the group's sequences as computed. Later sequences can then hit the
        blocks that these tokens fill.

        Applies to unfinished sequences on the device. Until the marked tokens cover the allocated prompt,
        only marked tokens are treated as computed. After that, each call marks at least all tokens that
        have slots, except the newest token and the lookahead slots. A step that accepts several drafts
        can therefore be marked as one token.

        Args:
            seq_group: The group.
            token_chunk_size: Number of newly computed tokens, including cached tokens.

        Raises:
            ValueError: With a sliding window, the call does not mark the whole prompt although some of
                its blocks were not allocated.
        """

    @core.native_method
    def get_common_computed_block_ids(self, seqs: Sequence[SequenceLike]) -> list[int]:
        """Return the leading blocks that all given sequences hit when they were allocated.

        Args:
            seqs: The sequences.

        Returns:
            The manager's own list. Copy it before changing it.
        """

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Return the number of cached tokens of a sequence, in full blocks.

        Before the allocation and while the sequence is swapped out, this is the number of tokens that
        the sequence would hit now. From the allocation until the whole prompt is marked as computed, it
        is the number of tokens hit at the allocation. After that, the sequence's own computed tokens are
        included. Do not call this method for a group with an encoder, because such a group never uses
        cached blocks.
        """
        known = self._allocated.get(core.seq_id_of(seq))
        if not self.enable_caching or (known is not None and not known.tokens.are_read):
            return 0
        if known is not None:
            if self._native.is_on_host(known.row):
                return self._hit_of(known.tokens)[1]
            if known.num_marked < known.num_prompt:
                return known.num_cached
            return max(known.num_cached, known.num_with_kv // self.block_size * self.block_size)
        tokens = self._tokens.read(seq)
        self._tokens.keep(seq, tokens)
        return self._hit_of(tokens)[1]

    def _hit_of(self, tokens: Tokens) -> tuple[list[np.ndarray], int]:
        """Return the blocks and the token count of the cached prefix that `allocate` uses.

        With a window, the hit is used only if the blocks from the hit's first needed block to the end
        of the prompt do not exceed the maximum number of blocks per sequence.
        """
        hits, num_cached, _ = self._native.lookup(tokens.chain)
        window, num_tokens = self.sliding_window, len(tokens.ids)
        if window is not None and num_cached:
            first = num_skipped_blocks(num_cached, self.block_size, window)
            if -(-num_tokens // self.block_size) - first > window // self.block_size + 2:
                return [NO_IDS], 0
        return hits, num_cached

    def remove_seq_from_computed_blocks_tracker(self, seq: SequenceLike) -> None:
        """Discard the hashes of a sequence that was queried but will not be allocated."""
        self._tokens.forget(core.seq_id_of(seq))

    def get_prefix_cache_hit_rate(self, device: Enum | str) -> float:
        """Return the fraction of full prompt blocks that were hits, or -1.0 without caching."""
        on_device = device_name(device) == "gpu"
        if not self.enable_caching:
            return -1.0
        return self.stats.groups[0].hit_rate if on_device else 0.0

    def reset_prefix_cache(self, device: Enum | str | None = None) -> bool:
        """Clear the prefix cache of one or both tiers.

        Args:
            device: "gpu" or "cpu". None: both.

        Returns:
            True if the cache was cleared. False if a block of the tier is in use; in this case, nothing
            has changed.
        """
        names = ("gpu", "cpu") if device is None else (device_name(device),)
        self._native.check_caller()
        pools = [self._pool] if "gpu" in names else []
        if "cpu" in names and self._host is not None:
            pools.append(self._host)
        return core.reset_pools(pools)
