# SPDX-License-Identifier: Apache-2.0
"""Routers, which choose a replica for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcache.allocator import Request
from kvcache_lab.workload import WorkloadRequest


class ReplicaState(Protocol):
    """The state of a replica when a request arrives."""

    num_served: int

    def num_unfinished(self, now_ms: float) -> int:
        """Return the number of requests that have not ended."""

    def wait_ms(self, now_ms: float) -> float:
        """Return how long a prefill would wait for earlier prefills."""

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return the time to first token that a request would have if this replica served it."""


class Router(Protocol):
    """Chooses a replica for each request, in order of arrival.

    Only if `uses_sessions` is true, the argument `session` is the request's session.
    """

    uses_sessions: bool

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the index of the chosen replica in `replicas`."""


class RoundRobin:
    """Chooses the replicas in a fixed cyclic order."""

    uses_sessions = False

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the index of the replica that follows the previously chosen replica."""
        chosen = self._next % len(replicas)
        self._next += 1
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest unfinished requests. Ties are broken by the shortest
    wait, and then by the fewest served requests.
    """

    uses_sessions = False

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the index of the replica with the least load."""
        now = item.arrival_ms
        loads = [
            (each.num_unfinished(now), each.wait_ms(now), each.num_served) for each in replicas
        ]
        return loads.index(min(loads))


class SessionAffinity:
    """Sends all requests of a session to the replica that has the least load when the session's
    first request arrives.
    """

    uses_sessions = True

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
        """Return the index of the replica that serves the session."""
        if session not in self._chosen:
            chosen = self._least_loaded.choose(replicas, item, request, session)
            self._chosen[session] = chosen
        return self._chosen[session]


class PrefixAware:
    """Chooses the replica with the earliest first token, given the prefix that the replica has
    cached.

    The router queries each replica's manager, so its knowledge is exact.
    """

    uses_sessions = False

    def choose(
        self,
        replicas: Sequence[ReplicaState],
        item: WorkloadRequest,
        request: Request,
        session: int,
    ) -> int:
        """Return the index of the replica with the earliest first token. Ties are broken by the
        fewest unfinished requests, and then by the fewest served requests.
        """
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
