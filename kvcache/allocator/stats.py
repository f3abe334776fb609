"""Counts of a manager's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.allocator.learned import LearnedReuse, reuse_of


@dataclass(frozen=True)
class HitStats:
    """Requests that may read the cache, counted when they are admitted."""

    num_requests: int
    query_tokens: int  # their known tokens
    hit_tokens: int  # of those, found in the cache
    host_hit_tokens: int = 0  # of those, from the first one on whose block was on the host

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token, 0.0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(frozen=True)
class GroupStats:
    """Whole blocks of one cache group, of the requests that `HitStats` counts."""

    query_blocks: int  # of their known tokens
    hit_blocks: int  # of those, within the hit: read, or left behind by a window
    recent_query_blocks: int  # the same of the last requests alone
    recent_hit_blocks: int
    stored_blocks: int  # put into the cache
    evicted_blocks: int  # taken for other content while cached; since the manager was made

    @property
    def hit_rate(self) -> float:
        """Hit blocks per queried block, 0.0 before the first query."""
        return self.hit_blocks / self.query_blocks if self.query_blocks else 0.0


@dataclass(frozen=True)
class DurationStats:
    """Durations in seconds. `buckets[i]`: how many of less than `2**i` ms that none before counts."""

    count: int
    total_s: float
    max_s: float
    buckets: tuple[int, ...]

    @property
    def mean_s(self) -> float:
        """0.0 where nothing was counted."""
        return self.total_s / self.count if self.count else 0.0


@dataclass(frozen=True)
class HostStats:
    """Pages that moved between device and host."""

    written_blocks: int  # cached blocks that went to the host
    unwritten_blocks: int  # that were to, and found no free page there
    declined_blocks: int  # of which too few hits were expected: host_write="learned"
    loaded_blocks: int  # of hits on the host
    swapped_out_blocks: int  # of requests
    swapped_in_blocks: int
    evicted_blocks: int  # cached on the host, taken for other content; since the manager was made


@dataclass(frozen=True)
class PrefixCacheStats(HitStats):
    """In total since the start or the last `clear_stats()`; `recent`: the last requests alone.

    `lifetime`, `idle`: of evicted blocks, the time since they were cached, and since they were last
    released; None unless residency is tracked. `host`: None without a host tier. `num_pins_broken`:
    pinned blocks that were evicted all the same, since the manager was made. `learned`: what the
    device's eviction policy has learned; None of a policy that does not learn.
    """

    recent: HitStats = HitStats(0, 0, 0)
    groups: tuple[GroupStats, ...] = ()
    lifetime: DurationStats | None = None
    idle: DurationStats | None = None
    host: HostStats | None = None
    num_pins_broken: int = 0
    learned: LearnedReuse | None = None


def stats_of(native: tuple, num_pins_broken: int, learned: list[float]) -> PrefixCacheStats:
    """From what the native manager counts."""
    total, recent, groups, lifetime, idle, host = native
    return PrefixCacheStats(
        *total,
        HitStats(*recent),
        tuple(GroupStats(*each) for each in groups),
        _durations(lifetime),
        _durations(idle),
        None if host is None else HostStats(*host),
        num_pins_broken,
        reuse_of(learned),
    )


def _durations(native: tuple | None) -> DurationStats | None:
    if native is None:
        return None
    count, total_ms, max_ms, buckets = native
    return DurationStats(count, total_ms / 1000, max_ms / 1000, tuple(buckets))
