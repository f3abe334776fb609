# SPDX-License-Identifier: Apache-2.0
"""Statistics of a manager's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.allocator.misses import MISS_REASONS


@dataclass(frozen=True)
class HitStats:
    """Hit counts of requests that may read the cache. A request is counted at its first admission.

    If it is preempted and admitted again, only hits on tokens that it never had are added.
    """

    num_requests: int
    query_tokens: int  # known tokens of these requests
    hit_tokens: (
        int  # query tokens not computed by their request, because another one had computed them
    )
    host_hit_tokens: int = 0  # hit tokens from the first block found on the host onward

    @property
    def hit_rate(self) -> float:
        """Hit tokens per query token; 0.0 before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


@dataclass(frozen=True)
class GroupStats:
    """Counts of one group's whole blocks, for the requests included in `HitStats`."""

    query_blocks: int  # blocks of known tokens
    hit_blocks: int  # blocks within hits, including blocks that left a window
    stored_blocks: int  # blocks that entered the cache
    evicted_blocks: int  # cached blocks evicted since the manager was created

    @property
    def hit_rate(self) -> float:
        """Hit blocks per query block; 0.0 before the first query."""
        return self.hit_blocks / self.query_blocks if self.query_blocks else 0.0


@dataclass(frozen=True)
class HostStats:
    """Counts of blocks that moved between device and host."""

    written_blocks: int  # cached blocks that were written to the host
    unwritten_blocks: int  # cached blocks that were not written because no host page was free
    declined_blocks: int  # cached blocks not written because too few hits were expected
    loaded_blocks: int  # blocks loaded for hits on the host
    swapped_out_blocks: int  # blocks of swapped-out requests
    swapped_in_blocks: int
    evicted_blocks: int  # cached host pages evicted since the manager was created


@dataclass(frozen=True)
class PrefixCacheStats(HitStats):
    """Statistics since the manager was created, or since the last `clear_stats()`.

    Attributes:
        recent: Hit counts of the last 1,000 requests.
        groups: Block counts of each cache group.
        host: Counts of blocks that moved between device and host. None without a host tier.
        num_pins_broken: Number of pinned blocks evicted since the manager was created.
        missed_tokens: Query tokens that were not hits at the first admission, by reason (`MISS_REASONS`).
            None without `CacheOptions.explain_misses`.
        falls_back: Whether the device's eviction policy `learned` currently evicts in LRU order, because
            its own order is not known to achieve more hits. None for other policies.
    """

    recent: HitStats = HitStats(0, 0, 0)
    groups: tuple[GroupStats, ...] = ()
    host: HostStats | None = None
    num_pins_broken: int = 0
    missed_tokens: dict[str, int] | None = None
    falls_back: bool | None = None


def stats_of(native: tuple, num_pins_broken: int) -> PrefixCacheStats:
    """Convert the native manager's counts."""
    total, recent, groups, host, missed, falls_back = native
    return PrefixCacheStats(
        *total,
        HitStats(*recent),
        tuple(GroupStats(*each) for each in groups),
        None if host is None else HostStats(*host),
        num_pins_broken,
        None if missed is None else dict(zip(MISS_REASONS, missed, strict=True)),
        falls_back,
    )
