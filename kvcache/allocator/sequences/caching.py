"""Prefix caching of sequences: marks, hits, eviction and events."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from kvcache.allocator.event_stream import events_of
from kvcache.allocator.sequences.checks import device_name
from kvcache.allocator.sequences.demand import num_skipped_blocks
from kvcache.allocator.sequences.protocol import (
    SequenceGroupLike,
    SequenceLike,
)
from kvcache.allocator.sequences.tables import SequenceTables
from kvcache.allocator.sequences.tokens import Tokens
from kvcache.allocator.stats import PrefixCacheStats, stats_of
from kvcache.events import CacheEvent
from kvcache.native.load import core
from kvcache.specs import GroupSpec
from kvcache.step import NO_IDS


class SequenceCaching(SequenceTables):
    """Tables whose full blocks, once they are computed, later sequences find."""

    @property
    def stats(self) -> PrefixCacheStats:
        """How much was found in the cache, in total and of the last 1,000 sequences asked for.

        Counted at `allocate`, once per group. `host`: pages that were swapped; None without a host
        pool.
        """
        self._native.check_reader()
        return stats_of(self._native.stats(), self._pool.num_pins_broken, self._native.learned())

    def drain_events(self) -> list[CacheEvent]:
        """Events of what entered and left the cache since the last call; see `enable_events`."""
        kind, options = "full_attention", {}
        if self.sliding_window is not None:
            kind, options = "sliding_window", {"window": self.sliding_window}
        group = GroupSpec(kind, self.block_size, options)
        waiting = self._native.waiting_events()
        events = events_of(waiting, [group], [self.block_size], self._tokens.key)
        self._native.drop_events()  # an interrupt before leaves them waiting
        return events

    @core.native_method
    def access_all_blocks_in_seq(self, seq: SequenceLike, now: float) -> None:
        """The sequence's blocks are used at `now`, any clock's: older ones are evicted first.

        So with `eviction="last_access"`; other policies do not ask for it.
        """

    @core.native_method
    def mark_blocks_as_computed(self, seq_group: SequenceGroupLike, token_chunk_size: int) -> None:
        """`token_chunk_size` more tokens of the group's sequences, cached ones among them, have KV.

        Of those on the device that have not finished. Full blocks of such tokens become hits. While
        the sum of marks has not reached the prompt (as it was allocated), they alone count; from then
        on each mark says that at least all tokens with slots before the newest one have KV, lookahead
        not counted: a step that accepts several drafted tokens may be marked as one.

        With a sliding window there is no chunked prefill: a prompt without a hit of which blocks were
        skipped, because it is longer than the window, is marked in one call, else ValueError.
        """

    @core.native_method
    def get_common_computed_block_ids(self, seqs: Sequence[SequenceLike]) -> list[int]:
        """Leading blocks that were hits of all these sequences when they were allocated.

        The manager's own list: copy it to change it.
        """

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Tokens of a sequence that are cached, in full blocks.

        Before it is allocated, and while it is swapped out: those that are hits now (which a group
        with an encoder does not take: do not ask for its sequences then). Until its whole
        prompt is marked as computed: those that were hits when it was allocated. From then on, also
        its own computed ones.
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
        """The cached prefix that `allocate` takes: its blocks, and how many tokens.

        All is held from what the hit's end reads to the end of the prompt. With a window that is
        taken only where it is no more than a sequence may hold.
        """
        hits, num_cached, _ = self._native.lookup(tokens.chain)
        window, num_tokens = self.sliding_window, len(tokens.ids)
        if window is not None and num_cached:
            first = num_skipped_blocks(num_cached, self.block_size, window)
            if -(-num_tokens // self.block_size) - first > window // self.block_size + 2:
                return [NO_IDS], 0
        return hits, num_cached

    def remove_seq_from_computed_blocks_tracker(self, seq: SequenceLike) -> None:
        """Forgets the hashes of a sequence that was asked for and will not be allocated."""
        self._tokens.forget(core.seq_id_of(seq))

    def get_prefix_cache_hit_rate(self, device: Enum | str) -> float:
        """Hit blocks per full block of all prompts; -1.0 without caching. None hits the host's."""
        on_device = device_name(device) == "gpu"
        if not self.enable_caching:
            return -1.0
        return self.stats.groups[0].hit_rate if on_device else 0.0

    def reset_prefix_cache(self, device: Enum | str | None = None) -> bool:
        """Forgets all cached blocks of the device ("gpu"), the host ("cpu"), or both.

        False, with nothing changed, while a block there is in use.
        """
        names = ("gpu", "cpu") if device is None else (device_name(device),)
        self._native.check_caller()
        pools = [self._pool] if "gpu" in names else []
        if "cpu" in names and self._host is not None:
            pools.append(self._host)
        return core.reset_pools(pools)
