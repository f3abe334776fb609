# SPDX-License-Identifier: Apache-2.0
"""Runs a verifier alongside a replay and summarizes its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING

from kvcache.allocator import KVCacheManager
from kvcache.step import StepPlan
from kvcache_lab.mismatch import Mismatch
from kvcache_lab.running import Running, Span

if TYPE_CHECKING:
    from kvcache_lab.verifier import KVVerifier


class Audit:
    """Applies every plan, writes and reads the KV of every computed chunk, and rereads each request's
    KV before the request is freed.

    Verification is timed separately (`ns`), so the replay's timings do not include it.
    """

    def __init__(self, verifier: KVVerifier, manager: KVCacheManager) -> None:
        self.verifier = verifier
        self.num_mismatches = 0
        self.mismatches: dict[int, Mismatch] = {}  # the first mismatch in each request
        self.ns = 0
        self._manager = manager
        self._num_plans = 0

    def reserve(self, num_tokens: int) -> None:
        """Prepare the admission of a request with `num_tokens` tokens."""
        with self._timed():
            self.verifier.reserve(num_tokens)

    def apply(self, plan: StepPlan, served: Sequence[tuple[Running, int]]) -> None:
        """Verify a plan. `served` lists the plan's requests, each with its first computed token."""
        with self._timed():
            self._num_plans += 1
            # Every plan is applied, because even a plan that admits no request clears the rows of
            # finished requests.
            self.verifier.apply(plan)
            spans = [self._span(running, start) for running, start in served]
            # As in an engine, the step reads the KV that earlier steps wrote for the step's rows.
            self._count(self.verifier.check_arrival, spans)
            for span in spans:
                self.verifier.write(span)
            self._count(self.verifier.check, spans)
            for running, _ in served:
                running.checked_at = self._num_plans

    def finish(self, running: Running) -> None:
        """Check, before a request is freed, that later admissions have not overwritten its blocks."""
        if running.checked_at != self._num_plans:
            with self._timed():
                self._count(self.verifier.check, [self._span(running, running.num_computed)])

    def _span(self, running: Running, start: int) -> Span:
        groups = range(len(self._manager.groups))
        block_ids = [self._manager.block_ids(running.request, g) for g in groups]
        return Span(
            running.item, running.row, block_ids, start, running.num_computed, running.num_hit
        )

    def _count(self, check: Callable, spans: Sequence[Span]) -> None:
        for span in spans:
            count, first = check(span)
            self.num_mismatches += count
            if first is not None:
                self.mismatches.setdefault(span.request.index, first)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter_ns()
        try:
            yield
        finally:
            self.ns += perf_counter_ns() - start
