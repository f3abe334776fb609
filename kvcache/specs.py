"""Value objects that describe a deployment; no torch, no state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ContextParallel:
    """Sizes and ranks of prefill (PCP) and decode (DCP) context parallelism.

    A group's tokens are spread over `world_size` workers; this one is `rank`.

    >>> ContextParallel(pcp_world_size=2, pcp_rank=1, dcp_world_size=4, dcp_rank=2).rank
    6
    """

    pcp_world_size: int = 1
    pcp_rank: int = 0
    dcp_world_size: int = 1
    dcp_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("pcp", "dcp"):
            size, rank = getattr(self, f"{kind}_world_size"), getattr(self, f"{kind}_rank")
            if size < 1:
                raise ValueError(f"{kind}_world_size is {size}: expected 1 or more")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank is {rank}: expected 0 to {size - 1}")

    @property
    def world_size(self) -> int:
        """Workers that one group's tokens are spread over."""
        return self.pcp_world_size * self.dcp_world_size

    @property
    def rank(self) -> int:
        """Place of this worker among them: `pcp_rank * dcp_world_size + dcp_rank`."""
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank
