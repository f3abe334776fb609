# SPDX-License-Identifier: Apache-2.0
"""Checks `KVCacheManager` under interrupts.

After an interrupt, each request is either admitted and can be freed, or is unknown to the manager.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request, StepReport
from kvcache.allocator import RequestState, check_invariants
from tests.machinery.interrupts.instants import Alarm

GROUPS = {
    "one group": [GroupSpec("full_attention", 4)],
    "two groups": [
        GroupSpec("full_attention", 4),
        GroupSpec("sliding_window", 8, {"window": 16}),
    ],
}


def is_admitted(manager: KVCacheManager, request: Request) -> bool:
    """Whether the manager knows the request."""
    try:
        manager.row(request)
    except ValueError:
        return False
    return True


class Managed:
    """A manager and every request that it may know."""

    def __init__(self, groups: str = "one group", **options: object) -> None:
        self.manager = KVCacheManager.for_groups(
            GROUPS[groups], 61, 64, num_preallocate_tokens=0, enable_events=True, **options
        )
        self.requests: dict[str, Request] = {}

    def request(self, name: str, num_tokens: int = 11, first: int = 0) -> Request:
        lora = ("alpha", "/alpha") if name == "b" else None
        self.requests[name] = Request(name, range(first, first + num_tokens), lora=lora)
        return self.requests[name]

    def check(self) -> None:
        """Check that exactly the admitted requests have blocks."""
        check_invariants(self.manager)
        admitted = [r for r in self.requests.values() if is_admitted(self.manager, r)]
        rows = [self.manager.row(r) for r in admitted]
        assert len({*rows}) == len(rows) == self.manager._native.num_rows
        for request in admitted:
            assert self.manager.num_computed_tokens(request) <= request.num_tokens
            if self.manager.state(request) is not RequestState.SWAPPED_OUT:
                self.manager.block_ids(request)

    def free(self, request: Request) -> None:
        """Free a request in any state."""
        manager = self.manager
        if is_admitted(manager, request) and manager.state(request) is RequestState.RECEIVING:
            manager.free(request, keep_blocks=True)
        manager.free(request)
        with contextlib.suppress(ValueError):  # no blocks were kept
            manager.release_blocks(request)

    def check_all_can_be_freed(self) -> None:
        """Check that all blocks are released and that none is freed twice."""
        self.check()
        for request in self.requests.values():
            self.free(request)
        last = self.manager.last_step_id
        if last >= 0:
            self.manager.report(StepReport(last, True))
        pool = self.manager.pool
        assert self.manager._native.num_rows == 0 and pool.num_free == pool.num_total
        other = Request("other", range(500, 520))
        self.manager.step(new=[other])
        num_free = pool.num_free
        # Already freed above, so this call must change nothing.
        self.manager.free(*self.requests.values())
        assert pool.num_free == num_free and is_admitted(self.manager, other)
        self.manager.free(other)
        check_invariants(self.manager)


def _running(**options: object) -> Managed:
    """Return a manager with two running requests, an admitted request with unfilled blocks, and a
    receiving request.
    """
    s = Managed(**options)
    s.manager.step(new=[s.request("a"), s.request("b", 9, 100)])
    s.manager.admit(Admit(s.request("c", 12, 200), num_tokens=6), ())
    s.manager.admit(Admit(s.request("d", 13, 300), external=External(8, delayed=True)), ())
    return s


Call = Callable[[Managed], object]

CALLS: dict[str, Call] = {
    "step": lambda s: s.manager.step(
        [0, 1], [1, 1], token_ids=[7, 8], new=[s.request("e"), s.request("f", 60, 400)]
    ),
    "step that receives": lambda s: s.manager.step(
        new=[Admit(s.request("e", 10, 600), external=External(8, delayed=True))]
    ),
    "step that swaps": lambda s: s.manager.step([1], [1], swap_out=[0], token_ids=[7]),
    "admit": lambda s: s.manager.admit(Admit(s.request("e", 10, 600), num_tokens=10), ()),
    "extend": lambda s: s.manager.extend(s.requests["c"], 5),
    "fork": lambda s: s.manager.fork(s.requests["a"], s.request("e")),
    "free": lambda s: s.manager.free(s.requests["a"]),
    "free all": lambda s: s.manager.free(*[s.requests[name] for name in "abc"]),
    "free with keep_blocks": lambda s: s.manager.free(s.requests["d"], keep_blocks=True),
    "finish_receiving": lambda s: s.manager.finish_receiving(s.requests["d"]),
    "report": lambda s: s.manager.report(StepReport(0, True)),
    "report of a failure": lambda s: s.manager.report(
        StepReport(0, True, failed_pages=[int(s.manager.block_ids(s.requests["a"])[0])])
    ),
    "abort": lambda s: s.manager.abort(0),
    "invalidate": lambda s: s.manager.invalidate([1]),
    "reject_tokens": lambda s: s.manager.reject_tokens(s.requests["c"], 0),
    "pin": lambda s: s.manager.cache.pin("session", s.requests["a"]),
    "would_fit": lambda s: s.manager.would_fit(s.request("e", 30, 600)),
    "cached_tokens": lambda s: s.manager.cache.cached_tokens(s.requests["a"]),
    "drain_events": lambda s: s.manager.cache.drain_events(),
    "append_tokens": lambda s: s.requests["a"].append_tokens([1, 2, 3]),
    "start_epoch": lambda s: s.manager.cache.start_epoch(),
    "forget_adapter": lambda s: s.manager.cache.forget_adapter("alpha"),
}

OPTIONS = {
    "plain": {},
    "fenced": {"fence_frees": True},
    "with a host": {"num_host_blocks": 30},
    "two groups": {"groups": "two groups"},
}


def prepared(options: str) -> Managed:
    """Return a manager in the state in which the calls are made."""
    return _running(**OPTIONS[options])


class Serving(Managed):
    """Random calls, some of which are interrupted at a random instant."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(**self.random.choice([*OPTIONS.values()]))
        self.manager.step(new=[self.request("r0")])
        self.num_named = 1

    def _some(self) -> Request:
        return self.requests[self.random.choice([*self.requests])]

    def _step(self) -> object:
        running = [
            r
            for r in self.requests.values()
            if is_admitted(self.manager, r)
            and self.manager._native.by_step(self.manager.row(r))
            and self.manager.state(r) is not RequestState.RECEIVING
            and self.manager.num_computed_tokens(r) < 60
        ]
        chosen = self.random.sample(running, min(len(running), 3))
        for request in chosen:
            if request.num_tokens == self.manager.num_computed_tokens(request):
                request.append_tokens([self.random.randrange(50)])
        self.num_named += 1
        new = [self.request(f"r{self.num_named}", self.random.randint(1, 30))]
        rows = [self.manager.row(r) for r in chosen]
        swapped = [row for row in rows if self.random.random() < 0.1 and self.manager.host_pool]
        rows = [row for row in rows if row not in swapped]
        return lambda: self.manager.step(
            rows, [1] * len(rows), token_ids=[], num_token_ids=[0] * len(rows), new=new,
            swap_out=[row for row in swapped if not self._is_out(row)],
        )  # fmt: skip

    def _is_out(self, row: int) -> bool:
        return self.manager._native.is_on_host(row)

    def _allocate(self) -> object:
        self.num_named += 1
        request = self.request(f"r{self.num_named}", self.random.randint(1, 30))
        return lambda: self.manager.admit(Admit(request, num_tokens=request.num_tokens), ())

    def _fork(self) -> object:
        parent = self._some()
        self.num_named += 1
        child = Request(f"r{self.num_named}", parent.token_ids)
        self.requests[child.request_id] = child
        return lambda: self.manager.fork(parent, child)

    def call(self) -> Callable[[], object]:
        """Return a random call. A rejected call must not change anything."""
        some, other, last = self._some(), self._some(), self.manager.last_step_id
        calls = [
            self._step,
            self._step,
            self._allocate,
            self._fork,
            lambda: lambda: self.manager.free(some),
            lambda: lambda: self.manager.free(some, other),
            lambda: lambda: self.manager.report(StepReport(last, True)),
            lambda: lambda: self.manager.abort(last),
            lambda: lambda: self.manager.invalidate([self.random.randint(1, 60)]),
            lambda: lambda: self.manager.cache.drain_events(),
        ]
        call = self.random.choice(calls)()

        def refused_or_done() -> None:
            with contextlib.suppress(ValueError):
                call()

        return refused_or_done

    def run(self, alarm: Alarm, count: int) -> int:
        """Run until `count` interrupts have occurred. Return the number of calls."""
        num_calls = 0
        while count > 0:
            num_calls += 1
            call = self.call()
            if alarm.interrupts(self.random.uniform(1e-6, 6e-5), call):
                count -= 1
                self.check()
            if len(self.requests) > 12 or self.random.random() < 0.02:
                self.check_all_can_be_freed()
                self.requests.clear()
                self.request("r0")
        self.check_all_can_be_freed()
        return num_calls
