# SPDX-License-Identifier: Apache-2.0
"""Makes calls that must change nothing: reads, and calls with a wrong argument."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvcache import KVCacheManager, Request, StepReport
from kvcache.kinds import KindProperties
from tests.simulator import walk
from tests.simulator.row import Row, Wrong, differing

SESSIONS = ("one", "two")


ADMIT_NAMES: dict[str, Callable] = {
    "num_lookahead_tokens": lambda r: r.choice([0, 0, 2]),
    "num_reserved_blocks": lambda r: r.choice([0, 1]),
    "max_host_blocks": lambda r: r.choice([0, 2, 99]),
    "num_prompt_tokens": lambda r: None,
    "num_shared_tokens": lambda r: 0,
}

# Public calls that an operation above makes. All others must change nothing.
OPERATIONS = {
    *("step", "admit", "extend", "advance", "fork", "free", "reject_tokens", "report", "abort"),
    *("invalidate", "finish_receiving", "hold_blocks", "release_blocks", "take_copies"),
    "for_groups",
    *("reset", "evict", "pin", "unpin", "access", "set_now", "clear_stats", "start_epoch"),
    *("forget_adapter", "drain_events"),
}
# Calls that accept every value of some argument.
UNSAFE = {"for_groups"}


class WalkedCalls:
    """The part of an engine that makes calls by walking over signatures."""

    manager: KVCacheManager
    kinds: list[KindProperties]
    rows: dict[int, Row]
    idle: list[Row]
    hashing: tuple[int, int]
    rng: random.Random

    def snapshot(self) -> dict:
        raise NotImplementedError

    def call(self, function: Callable, *args: object, **kwargs: object) -> object:
        raise NotImplementedError

    def targets(self) -> list[object]:
        return [self.manager, self.manager.cache, self.manager.pool]

    def names(self) -> dict[str, Callable]:
        """Return how to draw arguments that mean something at this moment."""
        manager = self.manager
        known = [*self.rows.values(), *self.idle]

        def request(r):
            unknown = Request("unknown", [1], block_hashes=[] if self.hashing[0] else None)
            return r.choice(known).request if known else unknown

        def some_ids(r):
            return [r.randint(0, manager.pool.num_total) for _ in range(r.randint(0, 3))]

        return ADMIT_NAMES | {
            "request": request,
            "parent": request,
            "child": lambda r: Request("child", [1, 2, 3]),
            "requests": request,
            "blocks": request,
            "group": lambda r: r.randrange(len(self.kinds)),
            "ids": some_ids,
            "id": lambda r: r.randint(0, manager.pool.num_total),
            "medium": lambda r: r.choice(["gpu", "cpu"]),
            "hashes": lambda r: manager.cache.hashes(request(r)) if known else [],
            "session": lambda r: r.choice(SESSIONS),
            "new": lambda r: [],
            "report": lambda r: StepReport(r.randint(0, 99), True),
            "computed_blocks": lambda r: None,
        }

    def reads(self) -> None:
        """Make calls that change nothing: all public ones that are not operations."""
        owner = self.rng.choice(self.targets())
        calls = {n: c for n, c in walk.public_calls(owner).items() if n not in OPERATIONS}
        before = self.snapshot()
        if calls and self.rng.random() < 0.8:
            call = calls[self.rng.choice(sorted(calls))]
            args, kwargs = walk.arguments_of(self.rng, call, self.names())
            self.call(call, *args, **kwargs)
        elif values := walk.public_values(owner):
            getattr(owner, self.rng.choice(values))
        if (after := self.snapshot()) != before:
            raise Wrong(f"a call that reads has changed the engine: {differing(before, after)}")

    def wrong_call(self) -> None:
        """Make a call with an argument of the wrong type or out of range. It must change nothing, whether
        it is rejected or not.
        """
        owner = self.rng.choice(self.targets())
        calls = {n: c for n, c in walk.public_calls(owner).items() if n not in UNSAFE}
        if not calls:
            return
        call = calls[self.rng.choice(sorted(calls))]
        args, kwargs = walk.arguments_of(self.rng, call, self.names())
        places = [*range(len(args)), *kwargs]
        if not places:
            return
        place, value = self.rng.choice(places), self.rng.choice(walk.GARBAGE)
        if call.__name__ == "start_epoch" and isinstance(value, int):
            return  # any integer is a version
        if isinstance(place, int):
            args[place] = value
        else:
            kwargs[place] = value
        before = self.snapshot()
        try:
            self.log(f"{self.name}.{call.__qualname__}(*{args}, **{kwargs})")
            call(*args, **kwargs)
        except (ValueError, TypeError) as error:
            if len(str(error)) < 10:
                raise Wrong(f"unclear error: {error!r}") from error
        else:
            raise Wrong(f"{call.__qualname__} accepts {value!r} as argument {place}")
        if (after := self.snapshot()) != before:
            raise Wrong(f"a wrong call has changed the engine: {differing(before, after)}")
