# SPDX-License-Identifier: Apache-2.0
"""An admitted request of a replay, and the tokens that a step computes for the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcache.allocator import Request
from kvcache_lab.workload import WorkloadRequest


@dataclass(slots=True, eq=False)
class Running:
    """A request of the workload, from admission until it is freed."""

    item: WorkloadRequest
    request: Request
    place: int  # index in the replayed part of the workload, starting at 0
    row: int = -1  # the request's row in the manager while it is admitted
    num_hit: int = 0  # number of hit tokens
    num_host_hit: int = 0  # hit tokens that start at the first block loaded from the host
    num_store_hit: int = 0  # hit tokens that were loaded from a store, at the end of the hit
    link: str = "store"  # where `num_store_hit` tokens were loaded from, in a fleet
    missed: dict[str, int] = field(default_factory=dict)  # `MissReport.missed_tokens`
    num_loaded_bytes: int = 0  # total bytes loaded for hits, in a fleet
    may_load: bool = True  # whether the request may load from a store
    num_computed: int = 0  # number of computed tokens, including the hit
    first_ms: float = 0.0  # time of the first token in a timed replay, set at admission
    end_ms: float = 0.0  # end time in a timed replay, set at admission
    checked_at: int = -1  # number of applied plans when the request's KV was last read

    @property
    def num_left(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        return self.item.num_tokens - self.num_computed


class Span(NamedTuple):
    """The tokens [start, stop) of an admitted request that one step computes.

    If `start` equals `stop`, no token is computed, and a check reads the tokens that the next token
    would attend to.
    """

    request: WorkloadRequest
    row: int
    block_ids: Sequence[np.ndarray]  # int32[k] per group: the row's blocks in the manager
    start: int
    stop: int
    num_hit: int = 0  # tokens that the request did not compute
