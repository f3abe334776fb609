# SPDX-License-Identifier: Apache-2.0
"""Routers, which choose the replica of each request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.allocator import Request
from kvcache.replay.workload import WorkloadRequest


class ReplicaState(Protocol):
    """The state of a replica at the arrival of a request."""

    number: int
    num_served: int

    def num_unfinished(self, now_ms: float) -> int:
        """Return the number of requests that have not ended."""

    def wait_ms(self, now_ms: float) -> float:
        """Return how long a prefill would wait for earlier ones."""

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return the time to the first token of a request, if it were served here."""


class Router(Protocol):
    """Chooses the replica of each request, in order of arrival.

    `keeps_sessions` is whether most requests of a session are served by the same replica. Only then does
    a sample of the sessions on fewer replicas have the hit rate of the fleet, and only then is `session`
    always the session of the request.
    """

    keeps_sessions: bool

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the position of the replica that serves the request, in the list of those that can be
        reached.
        """


class RoundRobin:
    """Chooses the replicas in turn."""

    keeps_sessions = False

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the replica after the last one."""
        chosen = _position(replicas, self._next) % len(replicas)
        self._next = replicas[chosen].number + 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests, then the shortest wait, then the fewest
    served requests.
    """

    keeps_sessions = False

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the replica with the least load."""
        now = item.arrival_ms
        loads = [
            (each.num_unfinished(now), each.wait_ms(now), each.num_served) for each in replicas
        ]
        return loads.index(min(loads))


class SessionAffinity:
    """Serves all requests of a session on the replica with the least load at its first request.

    If this replica cannot be reached, the session moves to another one.
    """

    keeps_sessions = True

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()
        self._chosen: dict[int, int] = {}

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the replica of the session."""
        if session in self._chosen:
            number = self._chosen[session]
            position = _position(replicas, number)
            if position < len(replicas) and replicas[position].number == number:
                return position
        chosen = self._least_loaded.choose(replicas, item, request, session)
        self._chosen[session] = replicas[chosen].number
        return chosen


class PrefixAware:
    """Chooses the replica with the earliest first token, given the prefix that it has cached.

    The index is exact: it asks each replica's manager. In simulations with failures, it follows the
    events of each replica, so that it can be lost.
    """

    keeps_sessions = True

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the replica with the earliest first token, then the fewest requests."""
        now = item.arrival_ms
        costs = [
            (each.first_token_ms(now, item, request), each.num_unfinished(now), each.num_served)
            for each in replicas
        ]
        return costs.index(min(costs))


def _position(replicas: Sequence[ReplicaState], number: int) -> int:
    """Return the position of the first replica with this number or a larger one."""
    return bisect_left(replicas, number, key=lambda each: each.number)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": SessionAffinity,
    "prefix": PrefixAware,
}
