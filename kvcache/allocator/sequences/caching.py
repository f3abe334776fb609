"""Prefix caching of sequences: marks, hits, eviction and events."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvcache.allocator.event_stream import events_of
from kvcache.allocator.sequences.checks import device_name
from kvcache.allocator.sequences.protocol import (
    FINISHED,
    SWAPPED,
    SequenceGroupLike,
    SequenceLike,
    status_name,
)
from kvcache.allocator.sequences.tables import SequenceTables
from kvcache.allocator.stats import PrefixCacheStats, stats_of
from kvcache.checks import integer
from kvcache.events import CacheEvent
from kvcache.specs import GroupSpec


class SequenceCaching(SequenceTables):
    """Tables whose full blocks, once they are computed, later sequences find."""

    @property
    def stats(self) -> PrefixCacheStats:
        """How much was found in the cache, in total and of the last 1,000 sequences asked for.

        Counted at `allocate`, once per group. `host`: pages that were swapped; None without a host
        pool.
        """
        self._native.check_reader()
        return stats_of(self._native.stats(), self._pool.num_pins_broken)

    def drain_events(self) -> list[CacheEvent]:
        """Events of what entered and left the cache since the last call; see `enable_events`."""
        kind, options = "full_attention", {}
        if self.sliding_window is not None:
            kind, options = "sliding_window", {"window": self.sliding_window}
        group = GroupSpec(kind, self.block_size, options)
        return events_of(self._native.drain_events(), [group], [self.block_size], self._tokens.key)

    def access_all_blocks_in_seq(self, seq: SequenceLike, now: float) -> None:
        """The sequence's blocks are used at `now`, any clock's: older ones are evicted first.

        So with `eviction="last_access"`; other policies do not ask for it.
        """
        known = self._on_device(seq)
        try:
            self._native.access(known.row, now)
        except TypeError:
            raise TypeError(f"now is {now!r}: expected a number") from None

    def mark_blocks_as_computed(self, seq_group: SequenceGroupLike, token_chunk_size: int) -> None:
        """`token_chunk_size` more tokens of the group's sequences, cached ones among them, have KV.

        Of those on the device that have not finished. Full blocks of such tokens become hits. While
        the sum of marks has not reached the prompt (as it was allocated), they alone count; from then
        on each mark says that at least all tokens with slots before the newest one have KV, lookahead
        not counted: a step that accepts several drafted tokens may be marked as one.

        With a sliding window there is no chunked prefill: a prompt without a hit of which blocks were
        skipped, because it is longer than the window, is marked in one call, else ValueError.
        """
        count = integer(token_chunk_size, "token_chunk_size")
        if not self.enable_caching and self.sliding_window is None:
            return
        marks = []
        for seq in seq_group.get_seqs():
            known = self._allocated.get(seq.seq_id)
            name = status_name(seq)
            if known is None or name == SWAPPED or name.startswith(FINISHED):
                continue
            marks.append((known, known.marks_with(count, seq.seq_id)))
        for known, num_marked in marks:
            if self.enable_caching:
                self._native.mark_computed(known.row, known.num_computed(num_marked))
            known.num_marked = num_marked

    def get_common_computed_block_ids(self, seqs: Sequence[SequenceLike]) -> list[int]:
        """Leading blocks that were hits of all these sequences when they were allocated."""
        common: list[int] | None = None
        for seq in seqs:
            known = self._on_device(seq)
            hits = self._native.blocks(known.row, 0).tolist()
            hits = hits[: known.num_cached // self.block_size]
            common = hits if common is None else _common_prefix(common, hits)
        return common or []

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Tokens that were hits when the sequence was allocated; before, those that are now."""
        known = self._allocated.get(seq.seq_id)
        if known is not None:
            return known.num_cached
        if not self.enable_caching:
            return 0
        tokens = self._tokens.read(seq)
        self._tokens.keep(seq, tokens)
        return self._native.lookup(tokens.chain)[1]

    def remove_seq_from_computed_blocks_tracker(self, seq: SequenceLike) -> None:
        """Forgets the hashes of a sequence that was asked for and will not be allocated."""
        self._tokens.forget(seq)

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
        if any(pool.num_free != pool.num_total for pool in pools):
            return False
        for pool in pools:
            pool.reset()
        return True


def _common_prefix(a: list[int], b: list[int]) -> list[int]:
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:n]
