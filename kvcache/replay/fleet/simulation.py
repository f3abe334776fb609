# SPDX-License-Identifier: Apache-2.0
"""Replays a workload through replicas behind a router. Each replica has a real manager."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvcache.allocator import Request
from kvcache.checks import MAX_INT32, instance, integer, plain_fields, shown, text
from kvcache.replay.fleet.hardware import Hardware
from kvcache.replay.fleet.routers import ROUTERS
from kvcache.replay.fleet.sessions import Sessions, share_of
from kvcache.replay.policies import parse_eviction
from kvcache.replay.replayer import Replayer
from kvcache.replay.running import Running
from kvcache.replay.stored import StoreContents
from kvcache.replay.workload import (
    WorkloadRequest,
    check_arrival,
    checked_requests,
    checked_workload,
)

_MOST_MS = 2**53 - 1  # floats represent integers up to here exactly
Workload = Sequence[WorkloadRequest] | Callable[[], Iterable[WorkloadRequest]]


@dataclass(frozen=True)
class Fleet:
    """Sizes of a fleet of equal replicas.

    Args:
        replicas: Number of replicas.
        num_blocks: Blocks of each replica on the device, including the null block.
        block_size: Tokens per block.
        host_blocks: Blocks of each replica on the host, including the null block. 0: no host tier.
        store_blocks: Blocks of the store that all replicas share. 0: no store.
        router: One of `ROUTERS`.
        concurrency: Maximum number of running requests per replica.
        eviction: Eviction policy of both tiers of a replica, as `policy[:option=value]...`.
        num_preallocate_tokens: Tokens that a replica preallocates for answers (`CacheOptions`).

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    replicas: int
    num_blocks: int
    block_size: int = 16
    host_blocks: int = 0
    store_blocks: int = 0
    router: str = "prefix"
    concurrency: int = 256
    eviction: str = "lru"
    num_preallocate_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            *(("replicas", 1), ("num_blocks", 2), ("block_size", 1)),
            *(("host_blocks", 0), ("store_blocks", 0), ("concurrency", 1)),
            ("num_preallocate_tokens", 0),
        ):
            integer(getattr(self, name), name, least)
        if self.host_blocks == 1:
            raise ValueError("host_blocks is 1: expected 0, or 2 or more with the null block")
        if text(self.router, "router") not in ROUTERS:
            raise ValueError(
                f"router is {shown(self.router)}: expected one of {', '.join(ROUTERS)}"
            )
        text(self.eviction, "eviction")
        try:
            parse_eviction(self.eviction)
        except ValueError as error:
            raise ValueError(f"eviction is {error}") from None


@dataclass
class FleetReport:
    """Totals of a simulated fleet. Times are from arrival to first token, in milliseconds.

    Attributes:
        fleet: The fleet, as a dict.
        simulated_replicas: Number of replicas that were simulated, with their share of the sessions.
        requests: Requests of the simulated sessions.
        rejected_requests: Requests that do not fit into a replica.
        prompt_tokens: Prompt tokens of the served requests.
        device_hit_tokens: Prompt tokens found on the device of the request's replica.
        host_hit_tokens: Prompt tokens loaded from the host of the request's replica.
        store_hit_tokens: Prompt tokens loaded from the store.
        token_hit_rate: Hit tokens of all tiers per prompt token.
        hit_rate_error: Standard error of the hit rate, estimated from samples. None: not sampled.
        p99_error: Standard error of `p99_ms_to_first_token`. None: not sampled.
        busy_share: Share of the time from the first arrival to the last that prefill takes, on
            average.
        busiest_share: This share for the busiest replica. Above 1, it cannot keep up.
        answer_tokens_per_s: Answer tokens of the whole fleet per second, from the first arrival to the
            last end.
        loaded_bytes: Bytes that the whole fleet loads from hosts and store.
        price_per_hour: Price of the whole fleet. None: no prices are known.
        watts: Power of the whole fleet. None: unknown.
    """

    fleet: dict[str, Any]
    simulated_replicas: int
    requests: int = 0
    rejected_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    store_hit_tokens: int = 0
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
    price_per_hour: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        plain_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


class Replica:
    """A replica with its own manager and clock."""

    def __init__(self, fleet: Fleet, hardware: Hardware, store: StoreContents, blocks: int) -> None:
        name, values = parse_eviction(fleet.eviction)
        options: dict[str, Any] = {"eviction": name, "eviction_options": values}
        if fleet.host_blocks:
            options |= {"host_eviction": name, "host_eviction_options": values}
            options["num_host_blocks"] = fleet.host_blocks
        self._hardware, self._concurrency = hardware, fleet.concurrency
        self._ends: list[float] = []  # a heap
        self._links = {"host": 0.0, "store": 0.0}  # when their loads have ended
        self._replayer = Replayer(
            num_blocks=fleet.num_blocks,
            block_size=fleet.block_size,
            concurrency=fleet.concurrency,
            service=hardware.service,
            num_preallocate_tokens=fleet.num_preallocate_tokens,
            num_store_blocks=blocks,
            store_contents=store,
            **options,
        )
        self.num_served = self.num_computed = 0
        self.last_end_ms = 0.0

    def num_unfinished(self, now_ms: float) -> int:
        """Return the number of requests that have not ended."""
        while self._ends and self._ends[0] <= now_ms:
            heapq.heappop(self._ends)
        return len(self._ends)

    def wait_ms(self, now_ms: float) -> float:
        """Return how long a prefill would wait for earlier ones and for a running request to end."""
        start = max(now_ms, self._replayer.prefill_free_ms)
        too_many = self.num_unfinished(now_ms) - self._concurrency + 1
        if too_many > 0:
            start = max(start, heapq.nsmallest(too_many, self._ends)[-1])
        return start - now_ms

    def first_token_ms(self, now_ms: float, item: WorkloadRequest, request: Request) -> float:
        """Return the time to the first token of a request, if it were served here.

        Blocks in the store are not considered, because all replicas can load them.
        """
        cached = self._replayer.manager.cache.cached_tokens(request)
        num_cached = min(cached.with_host, item.num_tokens - 1)
        wait_ms = self.wait_ms(now_ms)
        loaded_ms = self._loaded_ms(now_ms, "host", max(num_cached - cached.on_device, 0)) - now_ms
        computed_ms = 1000 * (item.num_tokens - num_cached) / self._hardware.prefill_speed
        return max(wait_ms, loaded_ms) + computed_ms

    def serve(self, item: WorkloadRequest, request: Request) -> Running | None:
        """Serve a request. Return it with its hits and times, or None if it does not fit."""
        served = self._replayer.arrive(item, request, self._load_ms)
        if served is not None:
            self.num_served += 1
            heapq.heappush(self._ends, served.end_ms)
            self.last_end_ms = max(self.last_end_ms, served.end_ms)
            self.num_computed += item.num_tokens - served.num_hit
        return served

    def _load_ms(self, running: Running) -> float:
        now_ms = self._replayer.now_ms
        tokens = {"host": running.num_host_hit, "store": running.num_store_hit}
        for link, count in tokens.items():
            if count:
                self._links[link] = self._loaded_ms(now_ms, link, count)
        ended = [self._links[link] for link, count in tokens.items() if count]
        return max(ended, default=now_ms) - now_ms

    def _loaded_ms(self, now_ms: float, link: str, num_tokens: int) -> float:
        """Return when a load that begins after earlier ones has ended."""
        if not num_tokens:
            return now_ms
        bytes_per_ms = 1e6 * getattr(self._hardware, f"{link}_gb_per_s")
        duration_ms = num_tokens * self._hardware.bytes_per_token / bytes_per_ms
        return max(now_ms, self._links[link]) + duration_ms


@dataclass
class _Share:
    """Results of one share of the sessions."""

    report: FleetReport
    first_token_ms: list[float] = field(default_factory=list)
    num_answered: int = 0
    span_ms: float = 0.0  # from the first arrival to the last
    duration_ms: float = 0.0  # from the first arrival to the last end


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

    A router assigns each request at its arrival, from the state at this time. A replica serves its
    requests in order, as in a timed replay (`Replayer`): prefills run one after another, and answers
    concurrently. Its cache holds the blocks of requests that still wait for their prefill.

    A larger fleet than `max_replicas` is sampled if its router keeps sessions on one replica. Each of
    `num_samples` samples has a random share of the sessions, and a fleet and store that are smaller by
    the same factor. The standard error over the samples is reported. It does not include the bias of
    small fleets, in which more sessions share a replica with others that have the same prefix.

    Args:
        workload: The requests in order of arrival, as a list or as a function that returns an iterator
            over them, which is called once per sample.
        fleet: The fleet.
        hardware: Speeds and prices. None: the defaults of `Hardware`.
        max_replicas: Maximum number of replicas without sampling.
        num_samples: Number of samples, at least 2.
        on_request: Called for each served request, with the position of its replica and its hits.

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
    for tier in ("host", "store"):
        name = f"{tier}_price_per_gib_hour"
        is_missing = hardware.price_per_hour is not None and getattr(hardware, name) is None
        if is_missing and getattr(fleet, f"{tier}_blocks"):
            raise ValueError(
                f"{name} is None: expected a price, because the fleet has {tier} blocks"
            )
    integer(max_replicas, "max_replicas", 1, MAX_INT32)
    integer(num_samples, "num_samples", 2, MAX_INT32)
    if fleet.replicas <= max_replicas or not ROUTERS[fleet.router]().keeps_sessions:
        share = _simulate(workload, fleet, hardware, 1, 0, on_request)
        return _priced(share.report, fleet, hardware)
    num_shares = -(-fleet.replicas // max_replicas)
    shares = [
        _simulate(workload, fleet, hardware, num_shares, share, on_request)
        for share in range(min(num_samples, num_shares))
    ]
    return _combined(shares, num_shares, fleet, hardware)


def repeatable(workload: Workload) -> Callable[[], Iterable[WorkloadRequest]]:
    """Return a function that returns the requests of a workload. Raises TypeError or ValueError."""
    if callable(workload):
        return workload
    if not isinstance(workload, list | tuple):
        raise TypeError(
            f"workload is {shown(workload)}: expected a list of requests, or a function that returns them"
        )
    requests = checked_requests(workload, "workload")
    return lambda: requests


def _simulate(
    workload: Callable[[], Iterable[WorkloadRequest]],
    fleet: Fleet,
    hardware: Hardware,
    num_shares: int,
    share: int,
    on_request: Callable[[WorkloadRequest, int, Running], None] | None,
) -> _Share:
    num_replicas = max(round(fleet.replicas / num_shares), 1)
    store: StoreContents = OrderedDict()
    store_blocks = fleet.store_blocks and max(fleet.store_blocks // num_shares, 1)
    replicas = [Replica(fleet, hardware, store, store_blocks) for _ in range(num_replicas)]
    router, sessions = ROUTERS[fleet.router](), Sessions(fleet.block_size)
    needs_sessions = num_shares > 1 or router.keeps_sessions
    result = _Share(FleetReport(asdict(fleet), num_replicas))
    report, first_ms, last_ms = result.report, None, 0
    for item in checked_workload(workload(), None):
        check_arrival(item, last_ms)
        if item.arrival_ms > _MOST_MS:
            raise ValueError(
                f"workload has request {item.index} at {item.arrival_ms} ms: expected at most {_MOST_MS}"
            )
        first_ms, last_ms = item.arrival_ms if first_ms is None else first_ms, item.arrival_ms
        session = sessions.of(item) if needs_sessions else 0
        if num_shares > 1 and share_of(session, num_shares) != share:
            continue
        request = Request(str(item.index), item.token_ids)
        chosen = router.choose(replicas, item, request, session)
        served = replicas[chosen].serve(item, request)
        report.requests += 1
        if served is None:
            report.rejected_requests += 1
            continue
        report.prompt_tokens += item.num_tokens
        report.host_hit_tokens += served.num_host_hit
        report.store_hit_tokens += served.num_store_hit
        report.device_hit_tokens += served.num_hit - served.num_host_hit - served.num_store_hit
        result.first_token_ms.append(served.first_ms - item.arrival_ms)
        result.num_answered += item.output_length
        if on_request is not None:
            on_request(item, chosen, served)
    if first_ms is None:
        raise ValueError("workload is empty: expected one request or more")
    result.span_ms = last_ms - first_ms
    result.duration_ms = max(each.last_end_ms for each in replicas) - first_ms
    if report.requests > 1 and not result.span_ms:
        raise ValueError("all requests arrive at the same time: expected a trace with times")
    _fill(result, [each.num_computed for each in replicas], hardware)
    return result


def _fill(result: _Share, num_computed: list[int], hardware: Hardware) -> None:
    report = result.report
    _set_hit_rate(report)
    times = np.array(result.first_token_ms or [0.0])
    report.mean_ms_to_first_token = float(times.mean())
    report.p50_ms_to_first_token, report.p99_ms_to_first_token = (
        float(np.percentile(times, percent, method="inverted_cdf")) for percent in (50, 99)
    )
    if result.span_ms:
        busy = [1000 * each / hardware.prefill_speed / result.span_ms for each in num_computed]
        report.busy_share, report.busiest_share = sum(busy) / len(busy), max(busy)
    if result.duration_ms > 0:
        report.answer_tokens_per_s = 1000 * result.num_answered / result.duration_ms
    loaded = report.host_hit_tokens + report.store_hit_tokens
    report.loaded_bytes = int(loaded * hardware.bytes_per_token)


def _combined(
    shares: list[_Share], num_shares: int, fleet: Fleet, hardware: Hardware
) -> FleetReport:
    """Return the report of several samples: sums of counts, and means of rates with their errors."""
    served = [each.report for each in shares if each.report.requests]
    if len(served) < 2:
        raise ValueError(
            f"{len(served)} samples of 1/{num_shares} of the sessions have requests: expected 2 or more "
            "(use a longer trace, or a larger max_replicas)"
        )
    total = FleetReport(asdict(fleet), served[0].simulated_replicas)
    for name in (
        *("requests", "rejected_requests", "prompt_tokens", "device_hit_tokens"),
        *("host_hit_tokens", "store_hit_tokens"),
    ):
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
    return _priced(total, fleet, hardware)


def _set_hit_rate(report: FleetReport) -> None:
    hits = report.device_hit_tokens + report.host_hit_tokens + report.store_hit_tokens
    report.token_hit_rate = hits / max(report.prompt_tokens, 1)


def _standard_error(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def _priced(report: FleetReport, fleet: Fleet, hardware: Hardware) -> FleetReport:
    if hardware.price_per_hour is not None:
        gib = hardware.bytes_per_token * fleet.block_size / 2**30  # per block
        host = fleet.host_blocks and fleet.host_blocks * gib * hardware.host_price_per_gib_hour
        store = fleet.store_blocks and fleet.store_blocks * gib * hardware.store_price_per_gib_hour
        report.price_per_hour = fleet.replicas * (hardware.price_per_hour + host) + store
    report.watts = None if hardware.watts is None else fleet.replicas * hardware.watts
    return report
