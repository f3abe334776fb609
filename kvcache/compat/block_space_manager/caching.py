# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of sequences: marking blocks as computed, hits, eviction and events."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from os.path import commonprefix

import numpy as np

from kvcache.allocator import PrefixCacheStats, Request
from kvcache.checks import integer, listed, shown
from kvcache.compat.block_space_manager.protocol import (
    SWAPPED,
    SequenceGroupLike,
    SequenceLike,
    device_name,
    id_of,
    num_skipped_blocks,
    seqs_of,
    status_of,
)
from kvcache.compat.block_space_manager.tables import SequenceTables
from kvcache.events import CacheEvent
from kvcache.step import NO_IDS


class SequenceCaching(SequenceTables):
    """Block tables with prefix caching: later sequences can hit full blocks that were computed."""

    @property
    def stats(self) -> PrefixCacheStats:
        """Prefix-cache statistics: totals, and counts for the last 1,000 queried sequences.

        Each call to `allocate` is counted as one query, regardless of the number of sequences. `host`
        counts swapped pages and is None without a host pool.
        """
        return self._manager.cache.stats

    def drain_events(self) -> list[CacheEvent]:
        """Return the cache events since the last call. Requires `enable_events`."""
        return self._manager.cache.drain_events()

    def access_all_blocks_in_seq(self, seq: SequenceLike, now: float) -> None:
        """Record an access to a sequence's blocks, for the eviction policy "last_access".

        Args:
            seq: The sequence.
            now: Time of the access, on any clock.
        """
        since = self._num_changes
        each = self._known(seq)
        if each.table is None:
            self._check_tier(each, "seq", id_of(seq), on_host=False)
        if self._num_changes != since:
            self._fail_nested()
        self._held.access(each.row, now)

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
        count = integer(token_chunk_size, "token_chunk_size")
        if not self._enable_caching and self._window is None:
            return
        since = self._num_changes
        marks = []
        for seq in seqs_of(seq_group):
            each, status = self._find(seq), status_of(seq)
            if each is None or status == SWAPPED or status.startswith("FINISHED"):
                continue
            num_marked = num_with_kv = min(each.num_marked + count, each.num_tokens)
            if num_marked >= each.num_prompt:
                # After the prompt, a step may accept several tokens, whatever number it marks.
                num_with_kv = max(num_marked, each.num_tokens - 1)
            elif each.skips_blocks:
                raise ValueError(
                    f"{num_marked} tokens of seq {shown(id_of(seq))} are marked as computed, but a "
                    "prompt longer than the window is computed in one step: expected a "
                    f"token_chunk_size of {each.num_prompt}"
                )
            marks.append((each, num_marked, num_with_kv))
        self._begin_change(since)
        for each, num_marked, num_with_kv in marks:
            if self._enable_caching:
                self._held.mark_computed(each.row, num_with_kv)
            if num_with_kv > each.num_with_kv:
                each.num_with_kv = num_with_kv
            each.num_marked = num_marked

    def get_common_computed_block_ids(self, seqs: Sequence[SequenceLike]) -> list[int]:
        """Return the leading blocks that all given sequences hit when they were allocated.

        Args:
            seqs: The sequences.
        """
        since, common = self._num_changes, None
        self._held.check_reader()
        for seq in seqs if isinstance(seqs, list) else listed(seqs, "seqs", "a list"):
            each = self._known(seq)
            hits = (each.table or self._table(each, seq))[: each.num_cached // self._block_size]
            common = hits if common is None else commonprefix([common, hits])
        if self._num_changes != since:
            self._fail_nested()
        return common or []

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Return the number of cached tokens of a sequence, in full blocks.

        Before the allocation and while the sequence is swapped out, this is the number of tokens that
        the sequence would hit now. From the allocation until the whole prompt is marked as computed, it
        is the number of tokens hit at the allocation. After that, the sequence's own computed tokens are
        included. Do not call this method for a group with an encoder, because such a group never uses
        cached blocks.
        """
        each = self._find(seq)
        if not self._enable_caching or (each is not None and not each.reads_ids):
            return 0
        if each is not None:
            if self._held.is_on_host(each.row):
                return self._hit_of(each.request)[1]
            if each.num_marked < each.num_prompt:
                return each.num_cached
            return max(each.num_cached, each.num_with_kv // self._block_size * self._block_size)
        request = self._tokens.read(seq)
        self._tokens.keep(seq, request)
        return self._hit_of(request)[1]

    def _hit_of(self, request: Request) -> tuple[list[np.ndarray], int]:
        """Return the blocks and the token count of the cached prefix that `allocate` uses.

        With a window, the hit is used only if the blocks from the hit's first needed block to the end
        of the prompt do not exceed the maximum number of blocks per sequence.
        """
        ids, num_cached, _ = self._manager.cache.find_prefix(request, whole_blocks=True)
        window, size = self._window, self._block_size
        if window is not None and num_cached:
            first = num_skipped_blocks(num_cached, size, window)
            if -(-request.num_tokens // size) - first > window // size + 2:
                return [NO_IDS], 0
        return [ids], num_cached

    def remove_seq_from_computed_blocks_tracker(self, seq: SequenceLike) -> None:
        """Discard the hashes of a sequence that was queried but will not be allocated."""
        self._tokens.forget(id_of(seq))

    def get_prefix_cache_hit_rate(self, device: Enum | str) -> float:
        """Return the fraction of full prompt blocks that were hits, or -1.0 without caching."""
        on_device = device_name(device) == "gpu"
        if not self._enable_caching:
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
        return self._held.reset("gpu" in names, "cpu" in names)
