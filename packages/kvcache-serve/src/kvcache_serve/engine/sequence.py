# SPDX-License-Identifier: Apache-2.0
"""A sequence: a request whose tokens are generated, and its scheduling state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvcache.allocator import Request
from kvcache.checks import MAX_INT32, MAX_INT64, flag, instance, integer, listed, shown


class State(Enum):
    """The scheduling state of a sequence.

    - `WAITING`: the sequence has no row, because it is new, or because it was preempted and will be
      recomputed.
    - `LOADING`: the sequence has a row, and a source is filling its blocks.
    - `RUNNING`: the sequence has a row and blocks on the device.
    - `SWAPPED`: the sequence has a row and blocks on the host.
    - `FINISHED`: the manager has freed the sequence.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request with its scheduling state.

    - `rank`: sequences with a smaller rank are served first and preempted last.
    - `max_tokens`: the number of known tokens at which the sequence ends. Drafts never exceed it.
    - `num_rows`: the number of rows that the sequence will need, including future forks.
    - `drafts`: unverified tokens to compute after the known tokens in the next step.

    Raises TypeError or ValueError for invalid values.
    """

    request: Request
    rank: tuple[int, int] = (0, 0)
    max_tokens: int | None = None
    num_rows: int = 1
    drafts: list[int] = field(default_factory=list)
    state: State = State.WAITING
    has_begun: bool = False  # admitted or forked earlier; has priority over new sequences
    num_preemptions: int = 0
    # Tokens that other requests had computed: hits (`PrefixCache.hit_tokens`) and cached loads. None:
    # not admitted yet.
    num_cached_tokens: int | None = None
    num_cached_loads: int = 0  # tokens loaded before the first preemption (`Arrived.are_cached`)
    num_loaded_tokens: int = 0  # tokens loaded from sources
    num_external_tokens: int = 0  # tokens that a source was expected to load at the last admission
    admitted_at: float | None = None  # `time.monotonic()` at the first admission
    failed_sources: list[object] = field(default_factory=list)  # sources that are not queried again
    most_new: int = MAX_INT32  # largest first chunk that may fit, with the watermark, into the pool

    def __post_init__(self) -> None:
        instance(self.request, Request, "request")
        rank = self.rank
        if not isinstance(rank, tuple) or len(rank) != 2:
            raise TypeError(f"rank is {shown(rank)}: expected a pair of integers")
        for i, part in enumerate(rank):
            integer(part, f"rank[{i}]", -MAX_INT64, MAX_INT64)
        if self.max_tokens is not None:
            integer(self.max_tokens, "max_tokens", least=1)
        integer(self.num_rows, "num_rows", least=1)
        instance(self.state, State, "state")
        flag(self.has_begun, "has_begun")
        integer(self.num_preemptions, "num_preemptions")
        if self.num_cached_tokens is not None:
            integer(self.num_cached_tokens, "num_cached_tokens")
        integer(self.num_loaded_tokens, "num_loaded_tokens")
        integer(self.num_external_tokens, "num_external_tokens")
        listed(self.drafts, "drafts", "a list of tokens")
        listed(self.failed_sources, "failed_sources", "a list of sources")
