# SPDX-License-Identifier: Apache-2.0
"""Replays a workload with a prefill pool and a decode pool, and with simulated transfers.

Managers, leases and the connector are real, but no bytes are moved. The duration of a load is
computed from its number of tokens and the given bandwidth.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kvcache.allocator import Admit, CacheArguments, External, KVCacheManager, Request
from kvcache.checks import instance, integer, number, plain_fields, shown
from kvcache.checks import text as checked_text
from kvcache.kinds import kind_class
from kvcache.sources import Arrived
from kvcache.specs import GroupSpec
from kvcache.step import Status
from kvcache.transfer import CacheDescription, StateDescription, StateTensor
from kvcache_exchange.disaggregation.connector import Connector
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.leases import Leases, Progress, done_message, read_slot
from kvcache_exchange.disaggregation.offer import RankAddress
from kvcache_exchange.disaggregation.options import ConnectorOptions
from kvcache_exchange.disaggregation.steps import RankHandshake, Results, Step
from kvcache_lab.groups import checked_groups
from kvcache_lab.report import overload_rows
from kvcache_lab.service import Service, overload
from kvcache_lab.workload import WorkloadRequest, check_arrival, checked_workload

if TYPE_CHECKING:
    from rich.table import Table
    from typing_extensions import Unpack

_NO_LENGTH_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Disaggregation:
    """The prefill pool and the link between the two pools.

    Args:
        prefill_blocks: Size of the prefill pool, including its null block.
        lease_s: Seconds for which the prefill pool keeps the blocks of a prompt.
        bytes_per_token: Size of one token's K and V in all layers.
        gb_per_s: Bandwidth of each load in 10**9 bytes per second.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> Disaggregation.parse("5001:lease_s=10")
        Disaggregation(prefill_blocks=5001, lease_s=10.0, bytes_per_token=131072.0, gb_per_s=10.0)
    """

    prefill_blocks: int
    lease_s: float = 60.0
    bytes_per_token: float = 131_072.0  # 32 layers with 8 heads of 128 elements of 2 bytes
    gb_per_s: float = 10.0

    def __post_init__(self) -> None:
        integer(self.prefill_blocks, "prefill_blocks", 2)
        for name in ("lease_s", "bytes_per_token", "gb_per_s"):
            value = number(getattr(self, name), name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}: expected more than 0")

    @classmethod
    def parse(cls, text: str) -> Disaggregation:
        """Parse `blocks[:option=value]...`. Raises TypeError or ValueError for any other text."""
        checked_text(text, "text")
        blocks, *options = text.split(":")
        known = [each.name for each in fields(cls)][1:]
        values: dict[str, float] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in known or name in values:
                raise ValueError(
                    f"text has {shown(option)}: expected one of {', '.join(known)}, once, as "
                    "option=number"
                )
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"{name} is {shown(value)}: expected a number") from None
        try:
            return cls(int(blocks), **values)
        except ValueError as error:
            if "expected" in str(error):
                raise
            raise ValueError(f"{shown(blocks)}: expected a number of blocks") from None


@dataclass
class DisaggregationReport:
    """Totals of one replay.

    Hit tokens are tokens that were cached in a pool. Times are in milliseconds, from arrival to
    first token.

    Attributes:
        requests: Requests in the workload.
        loaded_requests: Requests that loaded tokens from the prefill pool.
        local_requests: Requests whose tokens were all cached in the decode pool.
        lease_over_requests: Requests whose lease expired. The decode side computes their prompts.
        prefill_full_requests: Requests that did not fit into the prefill pool. The decode side
            computes their prompts.
        unfinished_loads: Requests whose load completed, but whose next token no longer fit into the
            pool. The decode side computes their prompts.
        rejected_requests: Requests that do not fit into the decode pool.
        overload: Reason why the modeled engines cannot keep up with the arrivals. None: they can
            keep up.
    """

    trace: str
    block_size: int
    prefill_blocks: int
    decode_blocks: int
    lease_s: float
    gb_per_s: float
    service: str
    concurrency: int
    requests: int = 0
    prompt_tokens: int = 0
    loaded_requests: int = 0
    local_requests: int = 0
    lease_over_requests: int = 0
    prefill_full_requests: int = 0
    unfinished_loads: int = 0
    rejected_requests: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    prefill_hit_tokens: int = 0
    decode_hit_tokens: int = 0
    prefill_computed_tokens: int = 0
    decode_computed_tokens: int = 0
    prefill_evicted_blocks: int = 0
    decode_evicted_blocks: int = 0
    peak_leased_blocks: int = 0
    peak_leased_requests: int = 0
    prefill_peak_used_blocks: int = 0
    decode_peak_used_blocks: int = 0
    held_blocks_at_end: int = 0
    duration_s: float = 0.0
    mean_ms_to_first_token: float = 0.0
    p99_ms_to_first_token: float = 0.0
    overload: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


@dataclass
class DisaggregationSeries:
    """Data for plots, with one entry per served request, recorded when its answer begins."""

    time_s: list[float] = field(default_factory=list)  # time of the first token
    ms_to_first_token: list[float] = field(default_factory=list)
    # Blocks that hold prompts in progress or are leased.
    prefill_used_blocks: list[int] = field(default_factory=list)
    decode_used_blocks: list[int] = field(default_factory=list)
    # Requests that wait for their prefill or load to begin.
    num_waiting: list[int] = field(default_factory=list)


@dataclass
class _Task:
    """A request that has arrived and has not finished."""

    item: WorkloadRequest
    request: Request
    offer: dict | None = None
    num_read: int = 0  # number of tokens that are being loaded


class _SimulatedRank:
    """A rank that moves no bytes. Leases are real, whereas loads only take up time."""

    def __init__(self, layouts: tuple[GroupLayout, ...], now: Callable[[], float]) -> None:
        address = RankAddress("simulated", "", tuple(((0,),) * len(layouts)), 0)
        self.handshake = RankHandshake(layouts, address)
        self.leases, self._now = Leases(now), now
        self.seconds_of: Callable[[int], float] = lambda num_tokens: 0.0
        self.sender: _SimulatedRank | None = None
        self._loads: dict[str, tuple[float, Any]] = {}
        self.next_end: float | None = None  # end time of the most recent load, in seconds

    def begin(self, step: Step) -> None:
        for request_id, lease in step.leases.items():
            self.leases.begin(request_id, *lease)
        for request_id in step.ends:
            self.leases.end(request_id)
        for request_id, load in step.loads.items():
            self.next_end = self._now() + self.seconds_of(load.end_token - load.first_token)
            self._loads[request_id] = self.next_end, load.offer
        for offer in step.unread:
            self._tell(offer)

    def advance(self, request_id: str, progress: Progress) -> None:
        self.leases.advance(request_id, progress)

    def take_results(self) -> Results:
        results = Results(sent=self.leases.ended())
        for request_id, (end, offer) in list(self._loads.items()):
            if end > self._now():
                continue
            del self._loads[request_id]
            slot = self.sender.leases.slots[offer.lease.slot]
            if read_slot(slot, offer.lease.generation).is_over:
                results.failed[request_id] = "the lease has ended"
                results.released.add(request_id)
            else:
                results.received.add(request_id)
            self._tell(offer)
        return results

    def _tell(self, offer: Any) -> None:
        self.sender.leases.note(
            done_message(offer.request_id, offer.lease.generation, num_readers=1), "decode"
        )


@dataclass
class _Side:
    """A pool with its rank and connector."""

    manager: KVCacheManager
    rank: _SimulatedRank
    connector: Connector


class DisaggregatedReplayer:
    """Replays timed requests with separate prefill and decode pools.

    Prompts are computed one after another in the prefill pool and published under a lease. The
    decode pool loads them in order of publication as soon as it has room, and holds their blocks
    until the answer ends. If a prompt does not fit into the prefill pool, or its lease expires
    during the load, the decode side computes the prompt at the speed of the prefill side, without
    delaying other prompts. No blocks are allocated for answers.

    Args:
        between: The prefill pool and the link between the pools.
        num_blocks: Size of the decode pool, including its null block.
        block_size: Tokens per block of one full-attention group. Alternative to `groups`.
        groups: The cache groups of both pools.
        concurrency: Maximum number of requests that load or run.
        service: Speeds of prefill and decode. `interference` is ignored, because prefills and
            answers run in separate pools.
        series: Collects one entry per served request.
        options: Fields of `CacheOptions` for both pools.

    Example:
        >>> from kvcache_lab import chat_workload
        >>> replayer = DisaggregatedReplayer(Disaggregation(4_001), block_size=16, num_blocks=4_001)
        >>> replayer.run(chat_workload(100)).requests
        100
    """

    def __init__(
        self,
        between: Disaggregation,
        *,
        num_blocks: int,
        block_size: int | None = None,
        groups: Sequence[GroupSpec] | None = None,
        concurrency: int = 256,
        service: Service | None = None,
        series: DisaggregationSeries | None = None,
        **options: Unpack[CacheArguments],
    ) -> None:
        instance(between, Disaggregation, "between")
        integer(num_blocks, "num_blocks", 2)
        if service is not None:
            instance(service, Service, "service")
        if series is not None:
            instance(series, DisaggregationSeries, "series")
        self._series = series
        # Times of the first and of the last arrival.
        self._arrivals_ms: tuple[float, float] | None = None
        self._last_wait_ms = 0.0
        self._now, self._between, self._service = 0.0, between, service or Service()
        specs = checked_groups(block_size, groups)
        self._concurrency = integer(concurrency, "concurrency", 1)
        self._prefill = self._side("prefill", specs, between.prefill_blocks, options)
        self._decode = self._side("decode", specs, num_blocks, options)
        self._decode.rank.sender = self._prefill.rank
        self._decode.rank.seconds_of = self._load_seconds
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: deque[_Task] = deque()
        self._loading: dict[str, _Task] = {}
        self._num_running = 0  # number of running answers
        self._to_prefill: deque[_Task] = deque()
        self._is_prefilling = False
        self._first_ms: list[float] = []
        self._computed_s = 0.0  # total duration of all prefills
        self.report = DisaggregationReport(
            trace="",
            block_size=self._decode.manager.block_sizes[0],
            prefill_blocks=between.prefill_blocks,
            decode_blocks=num_blocks,
            lease_s=between.lease_s,
            gb_per_s=between.gb_per_s,
            service=str(self._service),
            concurrency=self._concurrency,
        )

    def run(
        self,
        workload: Iterable[WorkloadRequest],
        trace: str = "",
        on_request: Callable[[], None] | None = None,
    ) -> DisaggregationReport:
        """Replay all requests to completion.

        Args:
            workload: The requests in order of arrival.
            trace: Name of the trace in the report.
            on_request: Called when a request arrives.

        Returns:
            The report.
        """
        instance(trace, str, "trace")
        for item in checked_workload(workload, on_request):
            _, last_ms = self._arrivals_ms or (0, 0)
            check_arrival(item, last_ms)
            self._at(item.arrival_ms / 1000, lambda item=item: self._arrive(item))
            # Process only the events up to this arrival. Requests that are read later may arrive
            # before the remaining events.
            self._play(item.arrival_ms / 1000)
            if on_request is not None:
                on_request()
        self._play(float("inf"))
        return self._finished(trace)

    def _side(
        self,
        engine_id: str,
        specs: Sequence[GroupSpec],
        num_blocks: int,
        options: CacheArguments,
    ) -> _Side:
        manager = KVCacheManager.for_groups(
            specs, num_blocks, _NO_LENGTH_LIMIT, num_preallocate_tokens=0, **options
        )
        layouts = tuple(_layout(engine_id, spec, num_blocks) for spec in specs)
        rank = _SimulatedRank(layouts, lambda: self._now)
        connector = Connector(
            manager,
            [rank],
            engine_id=engine_id,
            options=ConnectorOptions(lease_s=self._between.lease_s, timeout_s=86_400.0),
            clock=lambda: self._now,
        )
        return _Side(manager, rank, connector)

    def _load_seconds(self, num_tokens: int) -> float:
        return num_tokens * self._between.bytes_per_token / (self._between.gb_per_s * 1e9)

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def _play(self, until: float) -> None:
        """Process all events up to this time."""
        while self._events and self._events[0][0] <= until:
            seconds, _, event = heapq.heappop(self._events)
            self._now = max(self._now, seconds)
            self._poll()
            event()
            self._poll()
            self._admit_waiting()

    def _poll(self) -> None:
        self._prefill.connector.poll()  # releases expired leases
        for loaded in self._decode.connector.poll():
            self._take(self._loading.pop(loaded.request.request_id), loaded)
        self._prefill.connector.poll()  # releases leases whose reader has finished

    # The prefill side.

    def _arrive(self, item: WorkloadRequest) -> None:
        """Queue a request's prompt. Prompts are computed one at a time in order of arrival."""
        first, _ = self._arrivals_ms or (item.arrival_ms, 0)
        self._arrivals_ms = first, item.arrival_ms
        self.report.requests += 1
        self.report.prompt_tokens += item.num_tokens
        self._to_prefill.append(_Task(item, Request(str(item.index), item.token_ids)))
        self._prefill_next()

    def _prefill_next(self) -> None:
        while self._to_prefill and not self._is_prefilling:
            self._begin_prefill(self._to_prefill.popleft())

    def _begin_prefill(self, task: _Task) -> None:
        status, num_hit = _compute(self._prefill.manager, task.request)
        if status != Status.SERVED:
            self.report.prefill_full_requests += 1
            self._wait_for_decode(task)
            return
        num_computed = task.item.num_tokens - num_hit
        self.report.prefill_hit_tokens += num_hit
        self.report.prefill_computed_tokens += num_computed
        self._is_prefilling = True
        seconds = self._service.compute_ms(task.item.num_tokens, num_hit) / 1000
        self._computed_s += seconds
        self._at(self._now + seconds, lambda: self._publish(task))

    def _publish(self, task: _Task) -> None:
        task.offer = self._prefill.connector.publish(task.request)
        report, connector = self.report, self._prefill.connector
        # No prompt is being computed, so no other request holds blocks.
        pool = self._prefill.manager.pool
        report.peak_leased_blocks = max(report.peak_leased_blocks, pool.num_total - pool.num_free)
        report.peak_leased_requests = max(
            report.peak_leased_requests, connector.num_leased_requests
        )
        self._wait_for_decode(task)
        self._is_prefilling = False
        self._prefill_next()

    # The decode side.

    def _wait_for_decode(self, task: _Task) -> None:
        """Add the first token, which the prefill side has sampled, and queue the request for decoding."""
        tokens = [*task.item.token_ids.tolist(), 0]
        task.request = Request(task.request.request_id, tokens)
        self._waiting.append(task)

    def _admit_waiting(self) -> None:
        while self._waiting and self._num_running + len(self._loading) < self._concurrency:
            status = self._admit(self._waiting[0])
            if status == Status.WAIT and (self._num_running or self._loading):
                return
            task = self._waiting.popleft()
            if status != Status.SERVED:
                self.report.rejected_requests += 1
                self._decode.connector.cancel(task.request)

    def _admit(self, task: _Task) -> Status:
        connector, manager = self._decode.connector, self._decode.manager
        num_read = 0
        if task.offer is not None:
            num_read = connector.match(task.request, task.offer)
        if num_read == 0:
            status, num_hit = _compute(manager, task.request)
            if status == Status.SERVED:
                self.report.local_requests += task.offer is not None
                self._answer(task, num_hit)
            return status
        plan = manager.step(new=[Admit(task.request, external=External(num_read, delayed=True))])
        if plan.status[0] == Status.SERVED:
            task.num_read = num_read
            self.report.decode_hit_tokens += int(plan.num_computed_tokens[0]) - num_read
            connector.begin(task.request)
            self._loading[task.request.request_id] = task
            self._at(self._decode.rank.next_end, lambda: None)
        return Status(plan.status[0])

    def _take(self, task: _Task, loaded: Arrived) -> None:
        manager, report = self._decode.manager, self.report
        if loaded.error is None:
            report.loaded_requests += 1
            report.loaded_tokens += task.num_read
            plan = manager.step([manager.row(task.request)], [1])
            if plan.status[0] == Status.SERVED:
                self._run(task, 1)
                return
            report.unfinished_loads += 1
        else:
            report.lease_over_requests += 1
        manager.free(task.request)
        task.offer = None
        self._waiting.appendleft(task)

    def _answer(self, task: _Task, num_hit: int) -> None:
        self.report.decode_hit_tokens += num_hit
        self._run(task, task.request.num_tokens - num_hit)

    def _run(self, task: _Task, num_computed: int) -> None:
        """Compute the missing tokens and then the answer.

        The blocks are held until the answer ends.
        """
        self.report.decode_computed_tokens += num_computed
        seconds = num_computed / self._service.prefill_speed
        if num_computed > 1:  # Otherwise, the token is computed in a step with the other answers.
            num_tokens = task.request.num_tokens
            seconds = self._service.compute_ms(num_tokens, num_tokens - num_computed) / 1000
        first = self._now + seconds
        self._first_ms.append(first * 1000 - task.item.arrival_ms)
        self._last_wait_ms = self._first_ms[-1]
        if self._series is not None:
            self._record(first)
        self._num_running += 1
        end = first + task.item.output_length / self._service.decode_speed
        self._at(end, lambda: self._end(task))

    def _record(self, first: float) -> None:
        series = self._series
        series.time_s.append(first)
        series.ms_to_first_token.append(self._first_ms[-1])
        for used, side in (
            (series.prefill_used_blocks, self._prefill),
            (series.decode_used_blocks, self._decode),
        ):
            used.append(side.manager.pool.num_total - side.manager.pool.num_free)
        series.num_waiting.append(len(self._to_prefill) + len(self._waiting))

    def _end(self, task: _Task) -> None:
        self._num_running -= 1
        self._decode.manager.free(task.request)

    def _finished(self, trace: str) -> DisaggregationReport:
        report = self.report
        report.trace = trace
        report.duration_s = round(self._now, 3)
        self._now += self._between.lease_s  # lets leases without a reader expire
        self._poll()
        for side, manager in (("prefill", self._prefill.manager), ("decode", self._decode.manager)):
            setattr(report, f"{side}_evicted_blocks", manager.pool.num_evicted)
            setattr(report, f"{side}_peak_used_blocks", manager.pool.peak_used)
            report.held_blocks_at_end += manager.pool.num_total - manager.pool.num_free
        report.loaded_bytes = int(report.loaded_tokens * self._between.bytes_per_token)
        first_ms, last_ms = self._arrivals_ms or (0, 0)
        report.overload = overload(1000 * self._computed_s, last_ms - first_ms, self._last_wait_ms)
        times = sorted(self._first_ms) or [0.0]
        report.mean_ms_to_first_token = round(sum(times) / len(times), 3)
        report.p99_ms_to_first_token = round(times[(99 * len(times) - 1) // 100], 3)
        return report


def _compute(manager: KVCacheManager, request: Request) -> tuple[Status, int]:
    """Admit a request, and compute its tokens in steps that end where states are kept.

    Return the status of the last step, and the number of hit tokens. A request that does not fit
    is freed.
    """
    plan = manager.step(new=[Admit(request, manager.checkpoint_tokens(request))])
    status, num_hit = Status(plan.status[0]), int(plan.num_computed_tokens[0])
    while status == Status.SERVED and (count := manager.checkpoint_tokens(request)):
        status = Status(manager.step([manager.row(request)], [count]).status[0])
    if status != Status.SERVED:
        manager.free(request)
    return status, num_hit


def disaggregation_table(report: DisaggregationReport) -> Table:
    """Return the report as a rich table."""
    instance(report, DisaggregationReport, "report")
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Replay of {escape(report.trace)}, disaggregated", show_header=False)
    table.add_column("what", style="cyan")
    table.add_column("value", justify="right", style="bold", no_wrap=True)
    table.add_column("note", style="dim")
    size = f"blocks of {report.block_size} tokens"
    sections = [
        [
            ("requests", report.requests, f"{report.prompt_tokens:,} prompt tokens"),
            ("loaded", report.loaded_requests, "from the prefill pool"),
            ("local", report.local_requests, "fully cached in the decode pool"),
            ("lease over", report.lease_over_requests, "computed by the decode side"),
            ("prefill full", report.prefill_full_requests, "computed by the decode side"),
            ("no room after load", report.unfinished_loads, "loads, computed by the decode side"),
            ("rejected", report.rejected_requests, "did not fit into the decode pool"),
        ],
        [
            ("moved", f"{report.loaded_bytes / 1e9:,.2f} GB", f"{report.loaded_tokens:,} tokens"),
            ("peak leased", report.peak_leased_blocks, f"blocks, for {report.lease_s:g} s"),
            ("", report.peak_leased_requests, "requests"),
        ],
    ]
    for side in ("prefill", "decode"):
        of = {name: getattr(report, f"{side}_{name}") for name in _OF_SIDE}
        sections.append(
            [
                (f"{side} pool", of["blocks"] - 1, size),
                ("hit", of["hit_tokens"], "tokens cached in the pool"),
                ("computed", of["computed_tokens"], "tokens"),
                ("evicted", of["evicted_blocks"], "blocks"),
                ("peak in use", of["peak_used_blocks"], "blocks"),
            ]
        )
    sections.append(
        [
            ("duration", f"{report.duration_s:,.1f}", "seconds of the workload"),
            ("first token", f"{report.mean_ms_to_first_token:,.1f}", "ms after arrival, mean"),
            ("", f"{report.p99_ms_to_first_token:,.1f}", "ms after arrival, 99th percentile"),
            *overload_rows(report.overload),
        ]
    )
    for section in sections:
        for what, value, note in section:
            table.add_row(what, value if isinstance(value, str) else f"{value:,}", note)
        table.add_section()
    return table


_OF_SIDE = ("blocks", "hit_tokens", "computed_tokens", "evicted_blocks", "peak_used_blocks")


def _layout(engine_id: str, spec: GroupSpec, num_blocks: int) -> GroupLayout:
    """Return the layout of a model with one byte per token. No bytes are moved."""
    if not kind_class(spec.kind).pages.has_slots:
        tensors = (StateTensor(sections=[(1, 1)], dtype="uint8"),)
        description = StateDescription(engine_id=engine_id, num_layers=1, tensors=tensors)
    else:
        description = CacheDescription(
            engine_id=engine_id,
            num_layers=1,
            total_num_kv_heads=1,
            head_size=1,
            block_size=spec.block_size,
            memory_order=("block", "kv", "token", "head", "element"),
            dtype="uint8",
        )
    return GroupLayout((spec.kind,), description, 1, num_blocks, spec=spec.summary)
