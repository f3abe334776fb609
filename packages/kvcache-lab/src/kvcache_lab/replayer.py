# SPDX-License-Identifier: Apache-2.0
"""Replays a workload through the manager: admits, steps and frees requests, and counts hits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING

from kvcache.allocator import (
    MISS_REASONS,
    Admit,
    CacheArguments,
    External,
    KVCacheManager,
    Request,
)
from kvcache.checks import MAX_INT32, instance, integer, number
from kvcache.events import CacheEvent
from kvcache.kinds import kind_class
from kvcache.specs import GroupSpec
from kvcache.step import Status, StepPlan, StepReport
from kvcache_exchange.cli.option_text import join_options
from kvcache_lab.audit import Audit
from kvcache_lab.groups import checked_groups
from kvcache_lab.report import ReplayReport
from kvcache_lab.running import Running
from kvcache_lab.service import Service, ServiceClock, overload
from kvcache_lab.stored import ExternalTokens, SimulatedStore
from kvcache_lab.workload import WorkloadRequest, check_arrival, checked_workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvcache_lab.verifier import KVVerifier

_NO_LENGTH_LIMIT = 2**31 - 1  # requests are limited only by the pool size
_TOLERANCE_MS = 1e-6


@dataclass
class Series:
    """Data for plots, with one entry per request, recorded right after the request's admission."""

    prompt_tokens: list[int] = field(default_factory=list)  # 0 for rejected requests
    hit_tokens: list[int] = field(default_factory=list)
    evicted_blocks: list[int] = field(default_factory=list)  # cumulative number of evicted blocks
    used_blocks: list[int] = field(default_factory=list)  # blocks that running requests hold
    # Missed tokens by reason, or 0 for rejected requests. Empty without `explain_misses`.
    missed_tokens: dict[str, list[int]] = field(default_factory=dict)
    # Arrival times. Empty in untimed replays.
    arrival_ms: list[float] = field(default_factory=list)
    # Times to first token, or 0 for rejected requests. Empty in untimed replays.
    ms_to_first_token: list[float] = field(default_factory=list)


class Replayer:
    """Replays prompts through `KVCacheManager.step` and `free`, as a scheduler would.

    If `concurrency` requests are running or the blocks of a new request do not fit, the oldest
    running request finishes. A request that does not fit even into an empty pool is rejected. With
    a host tier, each step is reported as completed before the next step begins, so later steps can
    hit all loaded blocks.

    A prompt is computed in one step or, with `chunk_tokens` or recurrent states, in several steps
    that also compute chunks of all other unfinished prompts. With recurrent states, chunks end at
    positions whose states are cached (`KVCacheManager.checkpoint_tokens`). If a chunk does not fit,
    the oldest completely computed request finishes. If there is none, the request to which the
    chunk belongs is rejected.

    With a `service`, requests arrive at the times given in the workload. Each request waits until
    fewer than `concurrency` requests are running and enough blocks are free. It then holds the
    blocks of its prompt until it ends. Requests finish in order of their end times. No blocks are
    allocated for answers.

    Args:
        block_size: Tokens per block for a single full-attention group. Alternative to `groups`.
        groups: The cache groups.
        num_blocks: Pool size, including the null block.
        concurrency: Maximum number of running requests.
        verifier: A verifier with the same groups, which writes and reads real KV after every plan.
        series: Receives one entry per request.
        num_store_blocks: Number of blocks in a `SimulatedStore` below the other tiers. Incompatible
            with `verifier`.
        source: Function that receives the manager and returns a source of tokens to use instead of
            the store.
        num_preallocate_tokens: Number of tokens to preallocate (`CacheOptions`).
        chunk_tokens: Maximum number of tokens in a prefill chunk. None: no limit.
        service: Speeds for a timed replay.
        options: Fields of `CacheOptions`.

    Example:
        >>> from kvcache_lab import chat_workload
        >>> Replayer(block_size=16, num_blocks=4_001).run(chat_workload(100)).requests
        100
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int | None = None,
        groups: Sequence[GroupSpec] | None = None,
        chunk_tokens: int | None = None,
        concurrency: int = 1,
        service: Service | None = None,
        verifier: KVVerifier | None = None,
        num_store_blocks: int = 0,
        source: Callable[[KVCacheManager], ExternalTokens] | None = None,
        num_preallocate_tokens: int = 0,
        series: Series | None = None,
        **options: Unpack[CacheArguments],
    ) -> None:
        for name, value in (("concurrency", concurrency), ("chunk_tokens", chunk_tokens)):
            if value is not None and integer(value, name, -MAX_INT32) < 1:
                raise ValueError(f"{name} is {value}: expected 1 or more")
        integer(num_blocks, "num_blocks", 2)
        integer(num_store_blocks, "num_store_blocks")
        for name, value, kind in (("service", service, Service), ("series", series, Series)):
            if value is not None:
                instance(value, kind, name)
        if num_store_blocks and verifier is not None:
            raise ValueError(
                f"num_store_blocks is {num_store_blocks} with a verifier: expected 0, because the store "
                "is simulated without content"
            )
        announce = options.get("enable_events", False)
        if num_store_blocks:
            options["enable_events"] = True
        self.manager = KVCacheManager.for_groups(
            checked_groups(block_size, groups),
            num_blocks,
            _NO_LENGTH_LIMIT,
            num_preallocate_tokens=num_preallocate_tokens,
            **options,
        )
        self._store = None if source is None else source(self.manager)
        if num_store_blocks:
            self._store = SimulatedStore(self.manager, num_store_blocks, announce=announce)
        self.concurrency = concurrency
        self.chunk_tokens = chunk_tokens
        self.service = service
        self.verifier = verifier
        self.series = series
        self._audit = None if verifier is None else Audit(verifier, self.manager)
        self._reports_groups = groups is not None
        self._num_blocks = num_blocks
        self._has_states = any(
            not kind_class(group.kind).pages.has_slots for group in self.manager.groups
        )
        self._has_chunks = chunk_tokens is not None or self._has_states
        self._running: list[Running] = []  # oldest first
        self._clock = None if service is None else ServiceClock(service)
        if service is not None:
            self.manager.cache.set_now(0.0)  # queries also need the time, so set it before any call
        self._first_arrival_ms: float | None = None
        self._last_arrival_ms = 0
        self._last_wait_ms = 0.0  # how long the last served request waited for its prefill
        self._computed_ms = 0.0  # total duration of all prefills
        # Times from arrival to first token, of all served requests.
        self._first_token_ms: list[float] = []
        self._peak_running = 0
        self._num_requests = self._num_rejected = self._num_out_of_order = 0
        self._prompt_tokens = self._hit_tokens = self._host_hit_tokens = 0
        self._store_hit_tokens = 0
        # Missed tokens of the served requests by reason. Empty without `explain_misses`.
        self._missed: dict[str, int] = {}
        if self.manager.options.explain_misses is not None:
            # External tokens are hits.
            self._missed = {reason: 0 for reason in MISS_REASONS if reason != "external"}
        self._hash_ns = self._step_ns = self._free_ns = 0

    def run(
        self,
        workload: Iterable[WorkloadRequest],
        trace: str = "",
        on_request: Callable[[], None] | None = None,
    ) -> ReplayReport:
        """Replay all requests and free them.

        Args:
            workload: The requests.
            trace: Name of the trace in the report.
            on_request: Called after each request.

        Returns:
            The report.
        """
        instance(trace, str, "trace")
        for item in checked_workload(workload, on_request):
            self.arrive(item)
            if on_request is not None:
                on_request()
        return self.finish(trace)

    def finish(self, trace: str = "") -> ReplayReport:
        """Finish all running requests, and return the report of all requests so far."""
        while self._running:
            self._make_room()
        return self._report(trace)

    def drain_events(self) -> list[CacheEvent]:
        """Return the cache events since the last call."""
        return (self.manager.cache if self._store is None else self._store).drain_events()

    def arrive(
        self,
        item: WorkloadRequest,
        request: Request | None = None,
        load_ms: Callable[[Running], float] | None = None,
    ) -> Running | None:
        """Replay the next request of the workload, up to its admission.

        Args:
            item: The request.
            request: The manager's request, if it has already been created.
            load_ms: In a timed replay, a function that returns how long the request's hits on other
                tiers take to load.

        Returns:
            The admitted request, or None if it was rejected. In a timed replay, its attributes
            `first_ms` and `end_ms` are set.
        """
        instance(item, WorkloadRequest, "item")
        if request is not None:
            instance(request, Request, "request")
        if self._clock is not None:
            check_arrival(item, self._last_arrival_ms)
            if self._first_arrival_ms is None:
                self._first_arrival_ms = item.arrival_ms
            self._last_arrival_ms = item.arrival_ms
            self._let_time_pass(item.arrival_ms)
        else:
            self._num_out_of_order += item.arrival_ms < self._last_arrival_ms
            self._last_arrival_ms = max(item.arrival_ms, self._last_arrival_ms)
        self._num_requests += 1
        while len(self._running) >= self.concurrency:
            self._make_room()
        if self._clock is None:  # the previous requests have ended before this one arrives
            self.manager.cache.set_now(self._last_arrival_ms / 1000)
        if request is None:
            request = Request(str(item.index), item.token_ids)
        start = perf_counter_ns()
        self.manager.cache.hashes(request)
        self._hash_ns += perf_counter_ns() - start
        if self._audit is not None:
            self._audit.reserve(item.num_tokens)
        new = Running(item, request, self._num_requests - 1)
        is_served = self._admit(new)
        if not is_served:
            self._num_rejected += 1
        elif self._clock is not None:
            wait_ms = self._load_ms(new) if load_ms is None else load_ms(new)
            compute_ms = self.service.compute_ms(item.num_tokens, new.num_hit)
            begin_ms, new.first_ms, new.end_ms = self._clock.admit(
                compute_ms,
                item.output_length,
                wait_ms,
                self._answers_end_ms,
            )
            self._computed_ms += compute_ms
            self._first_token_ms.append(new.first_ms - item.arrival_ms)
            self._last_wait_ms = begin_ms - item.arrival_ms
            self._delay_answers(new, begin_ms, self.service.interference * compute_ms)
        if self._store is not None:
            self._store.complete(new.first_ms)
        self._peak_running = max(self._peak_running, len(self._running))
        if self.series is not None:
            self._record(new, is_served)
        return new if is_served else None

    @property
    def _answers_end_ms(self) -> float:
        """The time at which the last running answer ends, or 0.0."""
        if not self.service.interference:
            return 0.0  # the result is not used
        return max((each.end_ms for each in self._running if each.item.output_length), default=0.0)

    def _delay_answers(self, new: Running, begin_ms: float, delay_ms: float) -> None:
        """Delay the answers that are running when the new request's prefill begins."""
        for each in self._running if delay_ms else ():
            # Despite rounding errors, an answer that ends when the prefill begins is not delayed.
            if (
                each is not new
                and each.item.output_length
                and each.end_ms > begin_ms + _TOLERANCE_MS
            ):
                each.end_ms += delay_ms

    def begin_ms(self, ready_ms: float) -> float:
        """Return the time at which the next prefill begins if its request is ready at `ready_ms`.

        Without a `service`, prefills take no time, and this is `ready_ms`.
        """
        if self._clock is None:
            return number(ready_ms, "ready_ms")
        return self._clock.begin_ms(ready_ms, self._answers_end_ms)

    @property
    def now_ms(self) -> float:
        """The time of the replay in milliseconds, which may be after the last arrival."""
        return self._last_arrival_ms if self._clock is None else self._clock.now_ms

    @property
    def prefill_free_ms(self) -> float:
        """The time at which the prefills of all admitted requests end, in a timed replay."""
        return self._clock.prefill_free_ms

    def _load_ms(self, new: Running) -> float:
        """Return how long it takes to load a request's hits on other tiers."""
        ready_ms = self._clock.load("store", new.num_store_hit)
        return max(ready_ms, self._clock.load("host", new.num_host_hit)) - self._clock.now_ms

    def _admit(self, new: Running) -> bool:
        """Admit the request, or reject it and return False."""
        if self._has_chunks and self._never_fits(new):
            return False  # reject the request even if its first chunks fit
        while True:
            status = self._step(new)
            if status == Status.SERVED:
                return True
            # The request may fit without the tokens from the store.
            if new.num_store_hit and self._store.is_optional:
                new.num_store_hit, new.may_load = 0, False
                continue
            if status == Status.NEVER or not self._running:
                return False
            self._make_room()

    def _never_fits(self, new: Running) -> bool:
        """Return True if the prompt does not fit even into an empty pool."""
        start = perf_counter_ns()
        status = self.manager.would_fit(
            Admit(new.request, num_tokens=self.chunk_tokens), whole=True
        )
        self._step_ns += perf_counter_ns() - start
        return status == Status.NEVER

    def _let_time_pass(self, until_ms: float) -> None:
        """Advance the clock to `until_ms`, and finish the requests that end earlier."""
        while self._running and self._next(self._running).end_ms <= until_ms:
            self._make_room()
        self._clock.reach(until_ms)
        self.manager.cache.set_now(self._clock.now_ms / 1000)

    @staticmethod
    def _next(running: Sequence[Running]) -> Running:
        """Return the request that finishes first or, in an untimed replay, the oldest request."""
        return min(running, key=lambda each: each.end_ms)

    def _make_room(self) -> None:
        """Run steps until the prompt of the next request is computed, and finish that request."""
        first = self._next(self._running)
        while first.num_left:
            self._step()
            if first not in self._running:  # the request was rejected
                return
        self._finish(first)

    def _step(self, new: Running | None = None) -> Status | None:
        """Compute a chunk of every unfinished prompt, and admit the new request if possible.

        Returns the status of the new request, or None if `new` is None.
        """
        has_host = self.manager.host_pool is not None
        num_host_hit = self.manager.cache.stats.host_hit_tokens if has_host else 0
        computing = []
        if self._has_chunks:
            computing = [each for each in self._running if each.num_left]
        counts = [self._chunk(each, each.num_computed) for each in computing]
        plan = self._plan(computing, counts, new)
        status = plan.status.tolist()
        starts = plan.num_computed_tokens.tolist()
        served = []
        for running, count, row_status, start in zip(computing, counts, status, starts):
            if row_status == Status.SERVED:
                running.num_computed += count
                served.append((running, start))
        if new is not None and status[-1] == Status.SERVED:
            self._running.append(new)
            new.row, new.num_hit = int(plan.rows[-1]), starts[-1]
            new.num_computed = self.manager.num_computed_tokens(new.request)
            if self._missed:
                new.missed = self.manager.cache.explain(new.request).missed_tokens
            if new.num_store_hit:
                self._store.load(new.request, new.num_hit, new.num_store_hit)
            if has_host:
                new.num_host_hit = self.manager.cache.stats.host_hit_tokens - num_host_hit
            served.append((new, new.num_hit))
        if self._audit is not None:
            self._audit.apply(plan, served)
        if has_host:
            start = perf_counter_ns()
            self.manager.report(StepReport(plan.step_id, completed=True))
            self._step_ns += perf_counter_ns() - start
        if self._store is not None:
            self._store.save()
        for running, row_status in zip(computing, status):
            if row_status != Status.SERVED:
                self._handle_unserved(running, Status(row_status))
        return None if new is None else Status(status[-1])

    def _plan(self, computing: list[Running], counts: list[int], new: Running | None) -> StepPlan:
        arguments = {}
        if computing:
            arguments["rows"], arguments["num_tokens"] = [each.row for each in computing], counts
        if new is not None:
            external, count, num_reserved = None, None, 0
            if self._store is not None and new.may_load:
                new.num_store_hit = self._store.match(new.request, self.now_ms)
                external = External(new.num_store_hit)
            if self._has_chunks:
                count = self._chunk(new, 0)
            if computing:
                # Admit a new request only if all its blocks fit in addition to all blocks that
                # unfinished prompts still need. This ensures that a later chunk can fail to fit
                # only if its prompt runs alone.
                num_reserved = self._num_blocks_left(new, count) + sum(
                    self._num_blocks_left(each, each.num_computed) for each in computing
                )
            arguments["new"] = [
                Admit(new.request, count, external, num_reserved_blocks=num_reserved)
            ]
        start = perf_counter_ns()
        plan = self.manager.step(**arguments)
        self._step_ns += perf_counter_ns() - start
        return plan

    def _chunk(self, running: Running, start: int) -> int:
        """Return the number of tokens that the next step computes, starting at token `start`."""
        if self._has_states:
            return self.manager.checkpoint_tokens(running.request, self.chunk_tokens)
        return min(self.chunk_tokens, running.item.num_tokens - start)

    def _num_blocks_left(self, running: Running, num_computed: int) -> int:
        """Return an upper bound on the number of blocks that the rest of a prompt needs."""
        num_tokens, sizes = running.item.num_tokens, self.manager.block_sizes
        return sum(-(-num_tokens // size) - num_computed // size for size in sizes)

    def _handle_unserved(self, running: Running, status: Status) -> None:
        """Finish the oldest computed request or, if there is none, reject the request whose chunk
        did not fit.
        """
        computed = [each for each in self._running if not each.num_left]
        if computed and status == Status.WAIT:
            self._finish(self._next(computed))
        else:
            self._reject(running)

    def _finish(self, running: Running) -> None:
        if self._clock is not None:
            self._clock.reach(running.end_ms)
            self.manager.cache.set_now(self._clock.now_ms / 1000)
        if self._audit is not None:
            self._audit.finish(running)
        self._prompt_tokens += running.item.num_tokens
        self._hit_tokens += running.num_hit
        self._host_hit_tokens += running.num_host_hit
        self._store_hit_tokens += running.num_store_hit
        for reason in self._missed:
            self._missed[reason] += running.missed.get(reason, 0)
        self._free(running)

    def _reject(self, running: Running) -> None:
        self._num_rejected += 1
        series = self.series
        if series is not None and running.place < len(series.prompt_tokens):
            for of in (series.prompt_tokens, series.hit_tokens, *series.missed_tokens.values()):
                of[running.place] = 0
        self._free(running)

    def _free(self, running: Running) -> None:
        self._running.remove(running)
        start = perf_counter_ns()
        self.manager.free(running.request, num_output_tokens=running.item.output_length)
        self._free_ns += perf_counter_ns() - start

    def _record(self, new: Running, is_served: bool) -> None:
        pool, series = self.manager.pool, self.series
        series.prompt_tokens.append(new.item.num_tokens if is_served else 0)
        series.hit_tokens.append(new.num_hit if is_served else 0)
        series.evicted_blocks.append(pool.num_evicted)
        series.used_blocks.append(pool.num_total - pool.num_free)
        for reason in self._missed:
            series.missed_tokens.setdefault(reason, []).append(new.missed.get(reason, 0))
        if self._clock is not None:
            series.arrival_ms.append(new.item.arrival_ms)
            series.ms_to_first_token.append(self._first_token_ms[-1] if is_served else 0.0)

    def _report(self, trace: str) -> ReplayReport:
        pool, block_size = self.manager.pool, self.manager.block_sizes[0]
        groups = self._groups()
        is_hybrid = len(groups) > 1
        options = self.manager.options
        eviction = join_options(options.eviction, options.eviction_options or {})
        report = ReplayReport(
            trace=trace,
            block_size=block_size,
            num_blocks=self._num_blocks,
            capacity_blocks=pool.num_total,
            concurrency=self.concurrency,
            requests=self._num_requests,
            prompt_tokens=self._prompt_tokens,
            hit_blocks=sum(group["hit_blocks"] for group in groups)
            if is_hybrid
            else self._hit_tokens // block_size,
            hit_tokens=self._hit_tokens,
            token_hit_rate=self._hit_tokens / max(self._prompt_tokens, 1),
            evicted_blocks=pool.num_evicted,
            rejected_requests=self._num_rejected,
            peak_used_blocks=pool.peak_used,
            cached_blocks=pool.num_cached,
            us_per_request=self._us_per_request(),
            hash_block_size=options.hash_block_size,
            chunk_tokens=self.chunk_tokens,
            groups=groups if self._reports_groups else None,
            eviction=None if eviction == "lru" else eviction,
            missed_tokens=dict(self._missed) or None,
            out_of_order_requests=self._num_out_of_order or None,
        )
        if self.manager.host_pool is not None:
            self._add_host_counts(report)
        if isinstance(self._store, SimulatedStore):
            report.store_blocks = self._store.num_blocks
            report.store_hit_tokens = self._store_hit_tokens
            report.store_stored_blocks = self._store.num_stored
            report.store_loaded_blocks = self._store.num_loaded
            report.store_evicted_blocks = self._store.num_evicted
        if self._store is not None or self.manager.host_pool is not None:
            loaded = self._host_hit_tokens + self._store_hit_tokens
            report.device_hit_tokens = self._hit_tokens - loaded
        if self._clock is not None:
            self._add_times(report)
        if self._audit is not None:
            report.verify_us_per_request = self._us(self._audit.ns)
            report.verified_tokens = self._prompt_tokens  # over all finished requests
            report.mismatches = self._audit.num_mismatches
            report.mismatched_requests = list(self._audit.mismatches.values())
        return report

    def _add_host_counts(self, report: ReplayReport) -> None:
        counts = self.manager.cache.stats.host
        report.host_blocks = self.manager.host_pool.num_blocks
        options = self.manager.options
        report.host_write = options.host_write
        if options.min_gain_to_write is not None:
            report.host_write += f":{options.min_gain_to_write:g}"
            report.declined_blocks = counts.declined_blocks
        report.host_eviction = join_options(
            options.host_eviction, options.host_eviction_options or {}
        )
        report.host_hit_tokens = self._host_hit_tokens
        report.host_evicted_blocks = counts.evicted_blocks
        report.written_blocks = counts.written_blocks
        report.unwritten_blocks = counts.unwritten_blocks
        report.loaded_blocks = counts.loaded_blocks

    def _add_times(self, report: ReplayReport) -> None:
        report.service = str(self.service)
        report.duration_s = round(self._clock.now_ms / 1000, 3)
        report.peak_running = self._peak_running
        report.overload = overload(
            self._computed_ms,
            self._last_arrival_ms - (self._first_arrival_ms or 0),
            self._last_wait_ms,
        )
        times = self._first_token_ms or [0.0]
        report.mean_ms_to_first_token = round(sum(times) / len(times), 3)
        report.p99_ms_to_first_token = round(sorted(times)[(99 * len(times) - 1) // 100], 3)

    def _groups(self) -> list[dict]:
        """Return the spec and the counts of each group."""
        return [
            {
                "kind": group.kind,
                "block_size": group.block_size,
                "options": dict(group.options),
                **asdict(stats),
            }
            for group, stats in zip(self.manager.groups, self.manager.cache.stats.groups)
        ]

    def _us_per_request(self) -> dict[str, float]:
        phases = {"hash": self._hash_ns, "step": self._step_ns, "free": self._free_ns}
        phases["total"] = sum(phases.values())
        return {name: self._us(ns) for name, ns in phases.items()}

    def _us(self, ns: int) -> float:
        return round(ns / 1000 / max(self._num_requests, 1), 3)
