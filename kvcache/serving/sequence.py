"""One sequence of tokens that is generated: its request, and what a scheduler must know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvcache.allocator import Request
from kvcache.checks import MAX_INT64, flag, instance, integer, listed, shown


class State(Enum):
    """Where a sequence is.

    - `WAITING`: it has no row; it was not admitted yet, or was preempted and is to be computed again.
    - `RUNNING`: it has a row, its blocks on the device.
    - `SWAPPED`: it has a row, its blocks on the host.
    - `FINISHED`: the manager does not know it any more.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, and what `Scheduler` needs to know besides.

    `rank`: sequences with a smaller one go first and are preempted last. `max_tokens`: known tokens at
    which it ends; no drafts go beyond. `num_rows`: the rows that it will need, forks to come included.
    `drafts`: tokens to be computed behind the known ones in the next step, to be accepted or not.
    TypeError or ValueError for values of another kind.
    """

    request: Request
    rank: tuple[int, int] = (0, 0)
    max_tokens: int | None = None
    num_rows: int = 1
    drafts: list[int] = field(default_factory=list)
    state: State = State.WAITING
    has_begun: bool = False  # it was admitted once, or forked; goes before those that have not
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # hit when it was first admitted; None before

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
        listed(self.drafts, "drafts", "a list of tokens")
