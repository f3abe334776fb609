"""An admitted request of a replay, and the chunk of it that a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcache.allocator import Request
from kvcache.replay.workload import WorkloadRequest


@dataclass(slots=True, eq=False)
class Running:
    """A request of the workload until it is freed."""

    item: WorkloadRequest
    request: Request
    place: int  # in the workload as far as it was replayed, from 0
    row: int = -1  # while it is admitted
    num_hit: int = 0  # tokens
    num_host_hit: int = 0  # of those, from the first block on that was loaded from the host
    num_store_hit: int = 0  # of those, the last ones, that a store had
    may_load: bool = True  # from a store
    num_computed: int = 0  # tokens, the hit included
    end_ms: float = 0.0  # of a timed replay, once it was admitted
    checked_at: int = -1  # number of plans applied when its KV was last read

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that are not computed yet."""
        return self.item.num_tokens - self.num_computed


class Span(NamedTuple):
    """Tokens [start, stop) of an admitted request: those that one step computes.

    With start = stop no token is computed; reading it reads what the next token would attend to.
    """

    request: WorkloadRequest
    row: int
    block_ids: Sequence[np.ndarray]  # per group int32[k], the request's as the manager has them
    start: int
    stop: int
    num_hit: int = 0  # tokens that the request did not compute
