# SPDX-License-Identifier: Apache-2.0
"""Replays a workload through replicas behind a router. Each replica has a real manager."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvcache.allocator import Request
from kvcache.checks import instance, plain_fields, shown
from kvcache_lab.fleet.hardware import Hardware
from kvcache_lab.fleet.outcomes import HIT_FIELDS, MOVED_FIELDS, Outcomes, percentile
from kvcache_lab.fleet.replica import DecodeReplica, Replica
from kvcache_lab.fleet.routers import ROUTERS
from kvcache_lab.fleet.sessions import Sessions
from kvcache_lab.fleet.sizes import Fleet
from kvcache_lab.running import Running
from kvcache_lab.stored import StoreContents
from kvcache_lab.workload import WorkloadRequest, check_arrival, checked_requests, checked_workload

_MOST_MS = 2**53 - 1  # floats represent all integers up to this one exactly
Workload = Sequence[WorkloadRequest] | Callable[[], Iterable[WorkloadRequest]]


@dataclass
class FleetReport:
    """Totals of a simulated fleet. Times are from arrival to first token, in milliseconds.

    Attributes:
        fleet: The fleet, as a dict.
        requests: Number of requests.
        rejected_requests: Requests that do not fit into a replica.
        prompt_tokens: Prompt tokens of the served requests.
        device_hit_tokens: Prompt tokens found on the device of the request's replica.
        host_hit_tokens: Prompt tokens loaded from the host of the request's replica.
        store_hit_tokens: Prompt tokens loaded from the store.
        peer_hit_tokens: Prompt tokens loaded from other replicas.
        token_hit_rate: Hit tokens of all tiers per prompt token.
        busy_share: Share of the time between the first and the last arrival that a replica spends
            on prefill, averaged over the replicas that compute prompts.
        busiest_share: The same share for the busiest replica. Above 1, this replica cannot keep up.
        answer_tokens_per_s: Answer tokens per second that the whole fleet generates, from the first
            arrival to the end of the last answer.
        loaded_bytes: Bytes that the whole fleet loads from hosts, the store and peers.
        decode_hit_tokens: Prompt tokens that decode replicas had cached.
        transferred_bytes: Bytes that decode replicas load from prefill replicas.
    """

    fleet: dict[str, Any]
    requests: int = 0
    rejected_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    store_hit_tokens: int = 0
    peer_hit_tokens: int = 0
    token_hit_rate: float = 0.0
    mean_ms_to_first_token: float = 0.0
    p50_ms_to_first_token: float = 0.0
    p99_ms_to_first_token: float = 0.0
    busy_share: float = 0.0
    busiest_share: float = 0.0
    answer_tokens_per_s: float = 0.0
    loaded_bytes: int = 0
    decode_hit_tokens: int = 0
    transferred_bytes: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def simulate_fleet(
    workload: Workload,
    fleet: Fleet,
    hardware: Hardware | None = None,
    *,
    on_request: Callable[[WorkloadRequest, int, Running], None] | None = None,
) -> FleetReport:
    """Replay a timed workload through a fleet.

    A router assigns each request to a replica when the request arrives, based on the replicas'
    state at this time. Each replica serves its requests in order, as in a timed replay
    (`Replayer`): prefills run one after another, and answers are generated concurrently. Requests
    that are waiting for their prefill already hold their blocks.

    With `Fleet.decode_replicas`, a second router assigns each computed prompt to a decode replica.
    The decode replica loads the tokens that it has not cached, and generates the answer. The time
    to first token includes this load. The replica that computed the prompt holds the prompt's
    blocks until the load has ended.

    Args:
        workload: The requests in order of arrival: a list, or a function that returns an iterator
            over them.
        fleet: The fleet.
        hardware: Speeds. None: the defaults of `Hardware`.
        on_request: Called for each computed prompt with the request, the position of its replica,
            and its hits and times.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is invalid, the workload has no arrival times, or requests are
            not in order of arrival.

    Example:
        >>> from kvcache_lab import chat_workload
        >>> fleet = Fleet(replicas=2, num_blocks=2_001, router="round_robin")
        >>> simulate_fleet(lambda: chat_workload(200), fleet).requests
        200
    """
    workload = repeatable(workload)
    if on_request is not None and not callable(on_request):
        raise TypeError(f"on_request is {shown(on_request)}: expected a function or None")
    instance(fleet, Fleet, "fleet")
    hardware = Hardware() if hardware is None else hardware
    instance(hardware, Hardware, "hardware")
    return Simulation(fleet, hardware, on_request=on_request).run(workload())


def repeatable(workload: Workload) -> Callable[[], Iterable[WorkloadRequest]]:
    """Return a function that returns an iterator over the workload's requests. Raises TypeError or
    ValueError for an invalid workload.
    """
    if callable(workload):
        return workload
    if not isinstance(workload, list | tuple):
        raise TypeError(
            f"workload is {shown(workload)}: expected a list of requests, or a function that returns them"
        )
    requests = checked_requests(workload, "workload")
    return lambda: requests


class Simulation:
    """A replay of a workload through a fleet.

    Attributes:
        report: The totals, after `run`.
        outcomes: One entry per request.
    """

    def __init__(
        self,
        fleet: Fleet,
        hardware: Hardware,
        *,
        on_request: Callable[[WorkloadRequest, int, Running], None] | None = None,
    ) -> None:
        self._fleet, self._hardware, self._on_request = fleet, hardware, on_request
        store: StoreContents = OrderedDict()
        self._prefills = [Replica(fleet, hardware, store) for _ in range(fleet.replicas)]
        for each in self._prefills if fleet.peers else ():
            each.peers = self._prefills
        decoding = replace(fleet, host_blocks=0, store_blocks=0, peers=False)
        answering = replace(hardware, prefill_ms=0.0, attention_ns=0.0, interference=0.0)
        self._decodes = [
            DecodeReplica(decoding, answering, store) for _ in range(fleet.decode_replicas)
        ]
        self._replicas = [*self._prefills, *self._decodes]
        make = ROUTERS[fleet.router]
        self._prefill_router, self._decode_router = make(), make()  # one for each pool
        # Computed prompts that wait for a decode replica: a heap ordered by time.
        self._ready: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.outcomes = Outcomes()
        self.report = FleetReport(asdict(fleet))

    def run(self, workload: Iterable[WorkloadRequest]) -> FleetReport:
        """Replay all requests, and return the report."""
        sessions = Sessions(self._fleet.block_size)
        first_ms, last_ms = None, 0
        for item in checked_workload(workload, None):
            check_arrival(item, last_ms)
            if item.arrival_ms > _MOST_MS:
                raise ValueError(
                    f"workload has request {item.index} at {item.arrival_ms} ms: expected at most "
                    f"{_MOST_MS}"
                )
            if first_ms is None:
                first_ms = item.arrival_ms
            last_ms = item.arrival_ms
            session = sessions.of(item) if self._prefill_router.uses_sessions else 0
            self._play(item.arrival_ms)
            self._prefill(item, session, self.outcomes.arrive(item))
        if first_ms is None:
            raise ValueError("workload is empty: expected one request or more")
        self._play(math.inf)
        if len(self.outcomes) > 1 and last_ms == first_ms:
            raise ValueError("all requests arrive at the same time: expected a trace with times")
        self._fill(first_ms, last_ms - first_ms)
        return self.report

    def _prefill(self, item: WorkloadRequest, session: int, place: int) -> None:
        """Compute a prompt and, unless there are decode replicas, its answer.

        `place` is the position of the request in the outcomes.
        """
        request, prompt, hold_ms = _request(item), item, 0.0
        if self._decodes:
            prompt = replace(item, output_length=0)
            missing = min(each.missing_bytes(prompt, request) for each in self._decodes)
            hold_ms = self._hardware.load_ms("transfer", missing)
        number = self._prefill_router.choose(self._prefills, prompt, request, session)
        served = self._prefills[number].serve(prompt, request, hold_ms)
        if served is None:
            return
        self.outcomes.compute(place, served)
        if self._on_request is not None:
            self._on_request(prompt, number, served)
        if not self._decodes:
            self.outcomes.answer(place, item, served)
            return
        ready_ms = math.ceil(served.first_ms)
        decode = partial(self._decode, item, session, place, ready_ms, served)
        heapq.heappush(self._ready, (ready_ms, next(self._numbers), decode))

    def _decode(
        self, item: WorkloadRequest, session: int, place: int, now_ms: int, computed: Running
    ) -> None:
        """Load a computed prompt and generate the answer."""
        tokens = np.append(item.token_ids, 0)  # the first token, which the prefill sampled
        answer = WorkloadRequest(item.index, now_ms, tokens, item.output_length, tokens[:0])
        request = _request(answer)
        number = self._decode_router.choose(self._decodes, answer, request, session)
        served = self._decodes[number].serve(answer, request)
        if served is None:
            self.outcomes.reject(place)
            return
        computed.end_ms = served.first_ms  # the prompt's blocks are held until this time
        self.outcomes.answer(place, item, served)

    def _play(self, until_ms: float) -> None:
        """Decode the prompts that are ready at the time `until_ms`."""
        while self._ready and self._ready[0][0] <= until_ms:
            heapq.heappop(self._ready)[-1]()

    def _fill(self, first_ms: int, span_ms: int) -> None:
        report, outcomes = self.report, self.outcomes
        report.requests = len(outcomes)
        report.rejected_requests = report.requests - outcomes.num_served
        for name in ("prompt_tokens", *HIT_FIELDS, *MOVED_FIELDS):
            setattr(report, name, int(outcomes.column(name).sum()))
        hits = sum(getattr(report, name) for name in HIT_FIELDS)
        report.token_hit_rate = hits / max(report.prompt_tokens, 1)
        times = outcomes.ms_to_first_token
        times = times if len(times) else np.zeros(1)
        report.mean_ms_to_first_token = float(times.mean())
        report.p50_ms_to_first_token, report.p99_ms_to_first_token = (
            percentile(times, percent) for percent in (50, 99)
        )
        if span_ms:
            busy = [each.computed_ms / span_ms for each in self._prefills]
            report.busy_share, report.busiest_share = sum(busy) / len(busy), max(busy)
        duration_ms = max(each.last_end_ms for each in self._replicas) - first_ms
        if duration_ms > 0:
            num_answered = int(outcomes.column("answer_tokens").sum())
            report.answer_tokens_per_s = 1000 * num_answered / duration_ms


def _request(item: WorkloadRequest) -> Request:
    """Return the request of a prompt or an answer."""
    return Request(f"{item.index}@{item.arrival_ms}", item.token_ids)
