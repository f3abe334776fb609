"""Replays a workload against the manager: who runs, who waits, what was hit, how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING

from kvcache.allocator import KVCacheManager, Request
from kvcache.plan import Status, StepPlan
from kvcache.replay.report import Mismatch, ReplayReport
from kvcache.replay.workload import WorkloadRequest

if TYPE_CHECKING:
    from kvcache.replay.verifier import KVVerifier

_NO_LENGTH_LIMIT = 2**31 - 1  # the pool alone decides what fits


@dataclass
class Series:
    """One entry per request of the workload, taken right after it was admitted, for the plots."""

    prompt_tokens: list[int] = field(default_factory=list)  # of this request; 0 if rejected
    hit_tokens: list[int] = field(default_factory=list)  # of this request
    evicted_blocks: list[int] = field(default_factory=list)  # so far
    used_blocks: list[int] = field(default_factory=list)  # held by running requests


@dataclass(slots=True)
class _Running:
    item: WorkloadRequest
    request: Request
    row: int
    checked_at: int = -1  # number of plans applied when its KV was last read


class Replayer:
    """Replays prompts through `KVCacheManager.step` and `free`, as a simulated scheduler.

    `num_blocks` counts the null block. Up to `concurrency` requests run at a time; when another one
    needs their place or their blocks, the oldest finishes. What does not fit even then counts as
    rejected. `verifier`: writes and reads real KV behind every plan. `series`: filled per request.

    >>> from kvcache.replay import chat_workload
    >>> Replayer(block_size=16, num_blocks=4_001).run(chat_workload(100)).requests
    100
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        concurrency: int = 1,
        verifier: KVVerifier | None = None,
        series: Series | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: expected 1 or more")
        self.manager = KVCacheManager(
            block_size, num_blocks, _NO_LENGTH_LIMIT, num_preallocate_tokens=0
        )
        self.concurrency = concurrency
        self.verifier = verifier
        self.series = series
        self._num_blocks = num_blocks
        self._running: deque[_Running] = deque()
        self._num_requests = self._num_rejected = 0
        self._prompt_tokens = self._hit_tokens = 0
        self._hash_ns = self._step_ns = self._free_ns = self._verify_ns = 0
        self._num_plans = 0
        self._verified_tokens = self._num_mismatches = 0
        self._mismatches: dict[int, Mismatch] = {}  # first of each request

    def run(
        self,
        workload: Iterable[WorkloadRequest],
        trace: str = "",
        on_request: Callable[[], None] | None = None,
    ) -> ReplayReport:
        """Replays all requests and frees them; `on_request` is called after each, for progress."""
        for item in workload:
            self._replay(item)
            if on_request is not None:
                on_request()
        while self._running:
            self._finish_oldest()
        return self._report(trace)

    def _replay(self, item: WorkloadRequest) -> None:
        self._num_requests += 1
        while len(self._running) >= self.concurrency:
            self._finish_oldest()
        request = Request(str(item.index), item.token_ids)
        start = perf_counter_ns()
        self.manager.block_hashes(request)
        self._hash_ns += perf_counter_ns() - start
        plan = self._admit(request)
        num_hit = 0
        if plan is None:
            self._num_rejected += 1
        else:
            num_hit = int(plan.num_computed_tokens[0])
            self._prompt_tokens += item.num_tokens
            self._hit_tokens += num_hit
            self._start(_Running(item, request, int(plan.rows[0])), num_hit)
        if self.series is not None:
            self._record(0 if plan is None else item.num_tokens, num_hit)

    def _admit(self, request: Request) -> StepPlan | None:
        """The plan that admits the request, or None when it is rejected."""
        while True:
            plan = self._step(request)
            status = plan.status[0]
            if status == Status.SERVED:
                return plan
            if status == Status.NEVER or not self._running:
                return None
            self._finish_oldest()

    def _step(self, request: Request) -> StepPlan:
        start = perf_counter_ns()
        plan = self.manager.step(new=[request])
        self._step_ns += perf_counter_ns() - start
        self._num_plans += 1
        if self.verifier is not None:
            # A plan that admits nobody still clears rows of those who left: every plan is applied.
            start = perf_counter_ns()
            self.verifier.apply(plan)
            self._verify_ns += perf_counter_ns() - start
        return plan

    def _start(self, running: _Running, num_computed_tokens: int) -> None:
        self._running.append(running)
        if self.verifier is not None:
            start = perf_counter_ns()
            self.verifier.write(running.item, running.row, num_computed_tokens)
            self._verify_ns += perf_counter_ns() - start
            self._check(running)
            self._verified_tokens += running.item.num_tokens

    def _finish_oldest(self) -> None:
        running = self._running.popleft()
        # Somebody was admitted since its KV was last read: did its blocks stay its own?
        if self.verifier is not None and running.checked_at != self._num_plans:
            self._check(running)
        start = perf_counter_ns()
        self.manager.free(running.request)
        self._free_ns += perf_counter_ns() - start

    def _check(self, running: _Running) -> None:
        start = perf_counter_ns()
        block_ids = self.manager.block_ids(running.request)
        count, first = self.verifier.check(running.item, running.row, block_ids)
        self._num_mismatches += count
        if first is not None:
            self._mismatches.setdefault(running.item.index, first)
        running.checked_at = self._num_plans
        self._verify_ns += perf_counter_ns() - start

    def _record(self, prompt_tokens: int, hit_tokens: int) -> None:
        pool, series = self.manager.pool, self.series
        series.prompt_tokens.append(prompt_tokens)
        series.hit_tokens.append(hit_tokens)
        series.evicted_blocks.append(pool.num_evicted)
        series.used_blocks.append(pool.num_total - pool.num_free)

    def _report(self, trace: str) -> ReplayReport:
        pool, block_size = self.manager.pool, self.manager.block_size
        report = ReplayReport(
            trace=trace,
            block_size=block_size,
            num_blocks=self._num_blocks,
            capacity_blocks=pool.num_total,
            concurrency=self.concurrency,
            requests=self._num_requests,
            prompt_tokens=self._prompt_tokens,
            hit_blocks=self._hit_tokens // block_size,
            hit_tokens=self._hit_tokens,
            token_hit_rate=self._hit_tokens / max(self._prompt_tokens, 1),
            evicted_blocks=pool.num_evicted,
            rejected_requests=self._num_rejected,
            peak_used_blocks=pool.peak_used,
            cached_blocks=pool.num_cached,
            us_per_request=self._us_per_request(),
        )
        if self.verifier is not None:
            report.verify_us_per_request = self._us(self._verify_ns)
            report.verified_tokens = self._verified_tokens
            report.mismatches = self._num_mismatches
            report.mismatched_requests = list(self._mismatches.values())
        return report

    def _us_per_request(self) -> dict[str, float]:
        phases = {"hash": self._hash_ns, "step": self._step_ns, "free": self._free_ns}
        phases["total"] = sum(phases.values())
        return {name: self._us(ns) for name, ns in phases.items()}

    def _us(self, ns: int) -> float:
        return round(ns / 1000 / max(self._num_requests, 1), 3)
