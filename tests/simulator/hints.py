# SPDX-License-Identifier: Apache-2.0
"""Hints of an engine: prefetches and pins of random prefixes, between other operations."""

from __future__ import annotations

import functools

from kvcache import Request, StepReport
from kvcache_exchange.hints import Hint, HintExecutor, Receipt, limits
from kvcache_exchange.hints.prefixes import HintedPrefix
from tests.simulator import walk
from tests.simulator.row import Wrong

LIMITS = {"SHARE": 0.4, "TTL_S": 3.0, "MAX_TTL_S": 8.0, "PREFETCH_TIMEOUT_S": 6.0}
HINT_NAMES = {
    "intent": lambda r: r.choice(["prefetch", "prefetch", "pin"]),
    "num_tokens": lambda r: r.choice([None, r.randint(1, 40)]),
    "ttl_s": lambda r: r.choice([0.5, 2.0, 50.0]),
    "session": lambda r: r.choice("ab"),
}


class Hints:
    """The part of an engine that carries out hints."""

    def set_up_hints(self) -> None:
        self.hints = HintExecutor(self.manager, sources=self.sources, clock=lambda: self.wire.now)
        self.hints.on_load = self.loaded_by_hint
        self.num_told = self.num_prefetched = 0

    def hint(self) -> None:
        """Submit a hint about the tokens of a request, which may be running, over or new."""
        known = [*self.rows.values(), *self.idle]
        row = self.rng.choice(known) if known and self.rng.random() < 0.7 else self.new_row()
        options = walk.options_of(self.rng, Hint, HINT_NAMES, 0.5, {"intent": 0, "session": 0})
        options["intent"] = HINT_NAMES["intent"](self.rng)
        if options["intent"] == "pin" and self.rng.random() < 0.5:
            options["session"] = HINT_NAMES["session"](self.rng)
        hint = Hint(**options)
        self.log(f"{self.name}: {hint} for {row.name}")
        self.hints.submit(row.request, hint, on_receipt=functools.partial(self.told, row.request))
        self.check_hints()

    def loaded_by_hint(self, request: Request, first: int, stop: int) -> None:
        self.num_loaded += stop - first

    def told(self, request: Request, receipt: Receipt) -> None:
        """Check what a receipt promises."""
        self.num_told += 1
        self.log(f"    {receipt}")
        if receipt.num_tokens > receipt.num_asked_tokens:
            raise Wrong(f"a receipt for more tokens than the hint names: {receipt}")
        if receipt.intent == "prefetch" and receipt.num_tokens:
            self.num_prefetched += 1
            prefix = HintedPrefix(self.manager, request, receipt.num_asked_tokens)
            if prefix.on_device() < receipt.num_tokens:
                raise Wrong(f"a receipt names tokens that are not on the device: {receipt}")
        if receipt.ttl_s is not None and not 0 < receipt.ttl_s <= limits.MAX_TTL_S:
            raise Wrong(f"a pin may last {receipt.ttl_s} s")

    def hint_step(self) -> None:
        """Make a step that admits only what hints need."""
        rng, hints = self.rng, self.hints
        if rng.random() < 0.1:
            hints.give_way()
        hints.expire()
        admits = hints.admits(rng.random() < 0.95, rng.choice([None, None, 1]))
        if not admits:
            return
        self.carry_out_all()
        plan = self.call(self.manager.step, new=admits)
        if plan is None:
            raise Wrong("a step with guests is rejected")
        self.in_flight.append(plan.step_id)
        hints.planned(plan.answers.new.status.tolist())
        for rank in self.ranks:
            rank.worker.apply(plan)
        if rng.random() < 0.1:
            self.in_flight.pop()
            self.returned(self.call(self.manager.abort, plan.step_id))
            hints.failed()
            self.after_abort()
            return
        if rng.random() < 0.05:
            self.weights()
        hints.begin()
        self.in_flight.clear()
        self.reading.clear()
        self.returned(self.call(self.manager.report, StepReport(plan.step_id, completed=True)))
        hints.completed()
        self.check_hints()

    def check_hints(self) -> None:
        """Check that hints use no more than their share."""
        hints, total = self.hints, self.manager.pool.num_total
        hints.expire()
        for ledger in (hints._pins.ledger, hints._prefetched):
            if sum(each.num_blocks for each in ledger.entries.values()) > ledger.most:
                raise Wrong("hints use more blocks than their share")
        if hints.num_pinned_blocks > int(limits.SHARE * total):
            raise Wrong("hints pin more blocks than their share")
        stats = hints.stats
        if stats.used_tokens + stats.unused_tokens > stats.prefetched_tokens:
            raise Wrong(f"statistics of hints do not add up: {stats}")
