# SPDX-License-Identifier: Apache-2.0
"""Routers, which choose the replica of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.allocator import Request
from kvcache.replay.workload import WorkloadRequest


class ReplicaState(Protocol):
    """The state of a replica at the arrival of a request."""

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
        """Return the position of the replica that serves the request."""


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
        chosen, self._next = self._next, (self._next + 1) % len(replicas)
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
    """Serves all requests of a session on the replica with the least load at its first request."""

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
        if session not in self._chosen:
            self._chosen[session] = self._least_loaded.choose(replicas, item, request, session)
        return self._chosen[session]


class PrefixAware:
    """Chooses the replica with the earliest first token, given the prefix that it has cached.

    The index is exact: it asks each replica's manager.
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


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": SessionAffinity,
    "prefix": PrefixAware,
}
