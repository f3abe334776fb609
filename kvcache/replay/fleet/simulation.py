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
from kvcache.checks import MAX_INT32, instance, integer, plain_fields, shown
from kvcache.replay.fleet.hardware import Hardware
from kvcache.replay.fleet.outcomes import HIT_FIELDS, MOVED_FIELDS, Outcomes, percentile
from kvcache.replay.fleet.replica import DecodeReplica, Replica
from kvcache.replay.fleet.routers import ROUTERS
from kvcache.replay.fleet.sessions import Sessions, share_of
from kvcache.replay.fleet.sizes import Fleet
from kvcache.replay.running import Running
from kvcache.replay.stored import StoreContents
from kvcache.replay.workload import (
    WorkloadRequest,
    check_arrival,
    checked_requests,
    checked_workload,
)

_MOST_MS = 2**53 - 1  # floats represent all integers up to this one exactly
Workload = Sequence[WorkloadRequest] | Callable[[], Iterable[WorkloadRequest]]


@dataclass
class FleetReport:
    """Totals of a simulated fleet. Times are from arrival to first token, in milliseconds.

    Attributes:
        fleet: The fleet, as a dict.
        simulated_replicas: Number of simulated replicas. They serve a proportional share of the
            sessions.
        requests: Number of requests in the simulated sessions.
        rejected_requests: Requests that do not fit into a replica.
        prompt_tokens: Prompt tokens of the served requests.
        device_hit_tokens: Prompt tokens found on the device of the request's replica.
        host_hit_tokens: Prompt tokens loaded from the host of the request's replica.
        store_hit_tokens: Prompt tokens loaded from the store.
        peer_hit_tokens: Prompt tokens loaded from other replicas.
        token_hit_rate: Hit tokens of all tiers per prompt token.
        hit_rate_error: Standard error of the hit rate, estimated from samples. None if the fleet
            was not sampled.
        p99_error: Standard error of `p99_ms_to_first_token`. None if the fleet was not sampled.
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
    simulated_replicas: int
    requests: int = 0
    rejected_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    store_hit_tokens: int = 0
    peer_hit_tokens: int = 0
    token_hit_rate: float = 0.0
    hit_rate_error: float | None = None
    mean_ms_to_first_token: float = 0.0
    p50_ms_to_first_token: float = 0.0
    p99_ms_to_first_token: float = 0.0
    p99_error: float | None = None
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
    max_replicas: int = 64,
    num_samples: int = 4,
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

    A fleet without decode replicas that is larger than `max_replicas` is sampled if its router
    keeps each session on one replica. Each of `num_samples` samples simulates a random fraction of
    the sessions on a fleet and a store that are smaller by the same factor. The standard error over
    the samples is reported. It does not include the bias of small fleets, in which more sessions
    with a common prefix share a replica.

    Args:
        workload: The requests in order of arrival: a list, or a function that returns an iterator
            over them. The function is called once per sample.
        fleet: The fleet.
        hardware: Speeds. None: the defaults of `Hardware`.
        max_replicas: Maximum number of replicas without sampling.
        num_samples: Number of samples, at least 2.
        on_request: Called for each computed prompt with the request, the position of its replica,
            and its hits and times.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is invalid, the workload has no arrival times, or requests are
            not in order of arrival.

    Example:
        >>> from kvcache.replay import chat_workload
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
    integer(max_replicas, "max_replicas", 1, MAX_INT32)
    integer(num_samples, "num_samples", 2, MAX_INT32)
    is_small = fleet.all_replicas <= max_replicas or fleet.decode_replicas
    if is_small or not ROUTERS[fleet.router]().keeps_sessions:
        return Simulation(fleet, hardware, on_request=on_request).run(workload())
    num_shares = -(-fleet.replicas // max_replicas)
    shares = [
        Simulation(
            *(fleet, hardware),
            **{"num_shares": num_shares, "share": share, "on_request": on_request},
        ).run(workload())
        for share in range(min(num_samples, num_shares))
    ]
    return _combined(shares, num_shares, fleet)


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
    """A replay of one share of the sessions.

    Attributes:
        report: The totals, after `run`.
        outcomes: One entry per request.
    """

    def __init__(
        self,
        fleet: Fleet,
        hardware: Hardware,
        *,
        num_shares: int = 1,
        share: int = 0,
        on_request: Callable[[WorkloadRequest, int, Running], None] | None = None,
    ) -> None:
        self._fleet, self._hardware = fleet, hardware
        self._num_shares, self._share, self._on_request = num_shares, share, on_request
        self._store: StoreContents = OrderedDict()
        store_blocks = fleet.store_blocks and max(fleet.store_blocks // num_shares, 1)
        shared = {"store": self._store, "store_blocks": store_blocks}
        num_replicas = max(round(fleet.replicas / num_shares), 1)
        self._prefills = [Replica(fleet, hardware, **shared) for _ in range(num_replicas)]
        for each in self._prefills if fleet.peers else ():
            each.peers = self._prefills
        decoding = replace(fleet, host_blocks=0, store_blocks=0, peers=False)
        answering = replace(hardware, prefill_ms=0.0, attention_ns=0.0, interference=0.0)
        self._decodes = [
            DecodeReplica(decoding, answering, **shared) for _ in range(fleet.decode_replicas)
        ]
        self._replicas = [*self._prefills, *self._decodes]
        make = ROUTERS[fleet.router]
        self._prefill_router, self._decode_router = make(), make()  # one for each pool
        # Computed prompts that wait for a decode replica: a heap ordered by time.
        self._ready: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.outcomes = Outcomes()
        self.report = FleetReport(asdict(fleet), num_replicas)

    def run(self, workload: Iterable[WorkloadRequest]) -> FleetReport:
        """Replay all requests, and return the report."""
        sessions = Sessions(self._fleet.block_size)
        needs_sessions = self._num_shares > 1 or self._prefill_router.keeps_sessions
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
            session = sessions.of(item) if needs_sessions else 0
            if self._num_shares > 1 and share_of(session, self._num_shares) != self._share:
                continue
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
        _set_hit_rate(report)
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


def _combined(shares: list[FleetReport], num_shares: int, fleet: Fleet) -> FleetReport:
    """Return the combined report of several samples: sums of counts, and means of rates with
    standard errors.
    """
    served = [each for each in shares if each.requests]
    if len(served) < 2:
        raise ValueError(
            f"{len(served)} samples of 1/{num_shares} of the sessions have requests: expected 2 or more "
            "(use a longer trace, or a larger max_replicas)"
        )
    total = FleetReport(asdict(fleet), served[0].simulated_replicas)
    for name in ("requests", "rejected_requests", "prompt_tokens", *HIT_FIELDS):
        setattr(total, name, sum(getattr(each, name) for each in served))
    _set_hit_rate(total)
    for name in ("mean", "p50", "p99"):
        name = f"{name}_ms_to_first_token"
        setattr(total, name, float(np.mean([getattr(each, name) for each in served])))
    total.busy_share = float(np.mean([each.busy_share for each in served]))
    total.busiest_share = max(each.busiest_share for each in served)
    total.answer_tokens_per_s = num_shares * float(
        np.mean([each.answer_tokens_per_s for each in served])
    )
    total.loaded_bytes = int(num_shares * np.mean([each.loaded_bytes for each in served]))
    total.hit_rate_error = _standard_error([each.token_hit_rate for each in served])
    total.p99_error = _standard_error([each.p99_ms_to_first_token for each in served])
    return total


def _set_hit_rate(report: FleetReport) -> None:
    hits = sum(getattr(report, name) for name in HIT_FIELDS)
    report.token_hit_rate = hits / max(report.prompt_tokens, 1)


def _standard_error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5)
