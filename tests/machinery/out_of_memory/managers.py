# SPDX-License-Identifier: Apache-2.0
"""Cases for every call of `KVCacheManager`, with different groups and policies, and with and
without a host tier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request, StepReport, eviction_names
from kvcache.allocator import RequestState, check_invariants
from tests.machinery.out_of_memory.trial import Case, Trial

FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 6})
STATE = GroupSpec("recurrent", 4)
DRAFTS = GroupSpec("recurrent", 4, {"num_speculative_blocks": 2})
NAMES = "abcdefghi"


class Managed:
    """A manager with two steps in flight, and its requests, keyed by name.

    Requests a to d were admitted by `step` and have grown. Requests e and f were freed, and their
    blocks are cached. Requests g, h and i are new, and h shares a prefix with a.
    """

    def __init__(self, groups: list[GroupSpec], **options: object) -> None:
        self.manager = m = KVCacheManager.for_groups(
            groups,
            num_gpu_blocks=40 * len(groups),
            max_model_len=256,
            num_preallocate_tokens=0,
            enable_events=True,
            fence_frees=True,
            **options,
        )
        m.cache.set_now(1)
        tokens = {name: range(i * 100, i * 100 + 13 + 2 * i) for i, name in enumerate(NAMES)} | {
            "h": [*range(13), *range(800, 811)],
            "f": [*range(400, 417), 3, 4, 5, 6],
        }
        self.requests = {
            name: Request(name, ids, lora=("alpha", "/alpha") if name in "cf" else None)
            for name, ids in tokens.items()
        }
        r = self.requests
        m.step(new=[r["e"], r["f"]])
        m.free(r["e"], r["f"])
        m.step(new=[r[name] for name in "abcd"])
        m.cache.pin("s", r["b"])
        m.report(StepReport(1, True))
        m.cache.set_now(2)
        num_drafts = int(STATE not in groups)
        m.step(self.rows("abcd"), [1, 1 + num_drafts, 1, 1], token_ids=[5, 6, 7, 8])
        m.cache.drain_events()
        if m.host_pool is not None:
            m.step(swap_out=self.rows("d"))
        else:
            m.step(self.rows("d"), [1], token_ids=[9])
        # Hash the requests now, so that hashing does not allocate during the call under test.
        for name in "ghi":
            m.cache.find_prefix(r[name])

    def rows(self, names: str) -> list[int]:
        return [self.manager.row(self.requests[name]) for name in names]

    def of(self, *names: str) -> list[Request]:
        return [self.requests[name] for name in names]

    def blocks(self, name: str, n: int) -> list[int]:
        return [int(b) for b in self.manager.block_ids(self.requests[name])[-n:]]

    def refusals(self) -> list[Callable[[], object]]:
        m, (a, g) = self.manager, self.of("a", "g")
        return [
            lambda: check_invariants(m),
            lambda: m.step(),
            lambda: m.pool.num_free,
            lambda: m.cache.find_prefix(g),
            lambda: m.report(StepReport(0, True)),
            lambda: m.abort(0),
            lambda: m.block_ids(a),
            lambda: m.cache.stats,
            lambda: m.cache.drain_events(),
            lambda: m.pool.num_fenced,
            lambda: m.cache.set_now(9),
            lambda: m.num_computed_tokens(a),
            lambda: m.fork(a, Request("z", a.token_ids)),
            lambda: m.extend(a, 1),
            lambda: m.state(a) is RequestState.SWAPPED_OUT,
            lambda: m.finish_receiving(a),
            lambda: m.admit(Admit(Request("y", range(9)), num_tokens=4), ()),
            lambda: m.cache.evict([1]),
            lambda: m.cache.reset(),
        ]

    def state(self) -> Iterator[Callable[[], object]]:
        m, groups = self.manager, range(len(self.manager.groups))
        yield lambda: check_invariants(m)
        for name in NAMES:
            request = self.requests[name]
            for g in groups:
                yield lambda r=request, g=g: m.block_ids(r, g)
            yield lambda r=request: m.num_computed_tokens(r)
            yield lambda r=request: r.token_ids
        for pool in filter(None, (m.pool, m.host_pool)):
            for count in ("num_free", "num_cached", "num_evicted", "num_pinned", "peak_used"):
                yield lambda p=pool, c=count: getattr(p, c)
        yield lambda: (m.pool.num_fenced, m.pool.num_kept, m.pool.num_loading)
        yield lambda: m.cache.stats
        yield lambda: [(type(e).__name__, e) for e in m.cache.drain_events()]
        for name in "aefghi":
            yield lambda r=self.requests[name]: m.cache.cached_tokens(r)
            yield lambda r=self.requests[name]: m.cache.find_prefix(r)
        yield m.step  # shows which rows are cleared or sent again
        yield lambda: m.abort(3)
        yield lambda: m.step(self.rows("abcd"), [3, 2, 1, 4])
        yield lambda: m.step(new=self.of("g", "h"))
        yield lambda: m.report(StepReport(5, True))
        yield lambda: m.abort(6)
        yield lambda: m.free(*self.requests.values())
        yield lambda: m.cache.unpin("s")
        yield m.step
        yield lambda: m.report(StepReport(7, True))
        yield lambda: check_invariants(m)
        # Evict blocks to reveal the eviction order.
        for i in range(4):
            yield lambda i=i: m.step(new=[Request(f"x{i}", range(5000 + 40 * i, 5037 + 40 * i))])
        yield lambda: m.cache.stats
        yield lambda: [(type(e).__name__, e) for e in m.cache.drain_events()]
        yield lambda: check_invariants(m)


def _calls(groups: list[GroupSpec], has_host: bool) -> dict[str, Callable[[Managed], object]]:
    """Return every call that changes state, and some that should not."""
    calls: dict[str, Callable[[Managed], object]] = {
        "step, rows": lambda s: s.manager.step(
            s.rows("abc"), [9, 5, 1], token_ids=[1, 2, 3, 4], num_token_ids=[2, 1, 1]
        ),
        "step, new": lambda s: s.manager.step(new=s.of("g", "h")),
        "step, new with many tokens": lambda s: s.manager.step(
            new=[Request("j", range(1200, 1320))]
        ),
        "step, rows and new": lambda s: s.manager.step(
            s.rows("ab"),
            [7, 6],
            new=[Admit(each, num_lookahead_tokens=3) for each in s.of("g", "e", "i")],
        ),
        "step, external tokens": lambda s: s.manager.step(
            new=[Admit(each, external=External(8)) for each in s.of("g")]
        ),
        "free": lambda s: s.manager.free(*s.of("a")),
        "free several": lambda s: s.manager.free(*s.of("a", "b", "c", "d")),
        "free with retention": lambda s: s.manager.free(
            *s.of("a"), retention=[(0, 4, 5, None), (4, 9, 50, 3.0)]
        ),
        "free, blocks are kept": lambda s: s.manager.free(*s.of("b"), keep_blocks=True),
        "report, completed": lambda s: s.manager.report(StepReport(3, True)),
        "report, failed pages": lambda s: s.manager.report(StepReport(2, True, s.blocks("a", 2))),
        "report, not completed": lambda s: s.manager.report(StepReport(2, False, s.blocks("b", 1))),
        "abort": lambda s: s.manager.abort(2),
        "invalidate": lambda s: s.manager.invalidate(s.blocks("a", 3)),
        "pin": lambda s: s.manager.cache.pin("t", s.requests["a"]),
        "pin again": lambda s: s.manager.cache.pin("s", s.requests["a"]),
        "unpin": lambda s: s.manager.cache.unpin("s"),
        "evict": lambda s: s.manager.cache.evict(s.blocks("a", 3)),
        "start_epoch": lambda s: s.manager.cache.start_epoch(),
        "forget_adapter": lambda s: s.manager.cache.forget_adapter("alpha"),
        "reset_prefix_cache": lambda s: s.manager.cache.reset(),
        "drain_events": lambda s: s.manager.cache.drain_events(),
        "clear_stats": lambda s: s.manager.cache.clear_stats(),
        "set_now": lambda s: s.manager.cache.set_now(5),
        "stats": lambda s: s.manager.cache.stats,
        "cached_tokens": lambda s: s.manager.cache.cached_tokens(s.requests["h"]),
        "would_fit": lambda s: s.manager.would_fit(s.requests["h"]).name,
        "find_prefix": lambda s: s.manager.cache.find_prefix(s.requests["e"]),
        "block_hashes": lambda s: s.manager.cache.hashes(s.requests["e"]),
        "append_tokens": lambda s: s.requests["a"].append_tokens(range(600)),
        "new request": lambda s: s.manager.cache.hashes(Request("k", range(90))).shape,
    }
    if STATE not in groups:
        calls |= {
            "step, share": lambda s: s.manager.step(
                new=[Request("j", range(1200, 1230)), Request("k", range(1200, 1240))]
            ),
            "step, rejected": lambda s: s.manager.step(
                s.rows("ab"), [3, 3], num_rejected_tokens=[0, 1], token_ids=[4, 5]
            ),
            "reject_tokens": lambda s: s.manager.reject_tokens(s.requests["b"], 1),
            "fork": lambda s: s.manager.fork(s.requests["a"], _child(s)),
            "admit": lambda s: s.manager.admit(
                Admit(s.requests["h"], num_tokens=9),
                s.manager.cache.find_prefix(s.requests["h"]).block_ids,
            ),
            "receive": _receive,
            "extend": _extend,
        }
    if has_host:
        calls |= {
            "step, swap out": lambda s: s.manager.step(swap_out=s.rows("ab")),
            "step, swap in": lambda s: s.manager.step(s.rows("d"), [1], token_ids=[7]),
            "step, from the host": lambda s: s.manager.step(
                new=[Request("j", range(1200, 1330)), *s.of("e", "f")]
            ),
            "report, failed host pages": lambda s: s.manager.report(
                StepReport(3, True, [], failed_host_pages=[1, 2])
            ),
        }
    return calls


# Calls for managers with state pages for drafts.
_DRAFT_CALLS: dict[str, Callable[[Managed], object]] = {
    "step, drafts": lambda s: _draft(s),
    "step, more drafts": lambda s: s.manager.step(
        s.rows("ab"), [3, 3], num_rejected_tokens=[1, 0], token_ids=range(5), num_token_ids=[2, 3]
    ),
    "reject_tokens, drafts": lambda s: s.manager.reject_tokens(s.requests["a"], 2),
    "swap out, drafts": lambda s: s.manager.step(swap_out=s.rows("ab")),
    "free, drafts": lambda s: s.manager.free(*s.of("a", "b")),
    "report, failed page of drafts": lambda s: s.manager.report(
        StepReport(4, True, [int(s.manager.block_ids(s.requests["a"], 1)[-1])])
    ),
    "abort, drafts": lambda s: s.manager.abort(4),
}


def _draft(s: Managed) -> object:
    return s.manager.step(s.rows("ab"), [3, 3], token_ids=[7, 8])


def _child(s: Managed) -> Request:
    return Request("z", s.requests["a"].token_ids)


def _receive(s: Managed) -> object:
    """Make two calls. If the second one fails, the first has already taken effect and is not
    repeated.
    """
    if s.manager._requests.find(s.requests["g"]) < 0:
        s.manager.admit(Admit(s.requests["g"], external=External(16, delayed=True)), ())
    return s.manager.finish_receiving(s.requests["g"], 9)


def _extend(s: Managed) -> object:
    return s.manager.extend(s.requests["i"], 20, 2)


def _trial(groups, options, call, prepare) -> Trial:
    managed = Managed(groups, **options)
    if prepare is not None:
        prepare(managed)
    return Trial(
        lambda: call(managed),
        managed.state,
        managed.refusals(),
        free=lambda: managed.manager.free(*managed.requests.values()),
    )


_PREPARED: dict[str, Callable[[Managed], object]] = {
    "receive": lambda s: s.manager.admit(
        Admit(s.requests["g"], external=External(16, delayed=True)), ()
    ),
    "extend": lambda s: s.manager.admit(Admit(s.requests["i"], num_tokens=9), ()),
    **dict.fromkeys([name for name in _DRAFT_CALLS if name != "step, drafts"], _draft),
}


def _cases(name: str, groups: list[GroupSpec], **options: object) -> list[Case]:
    calls = _DRAFT_CALLS if DRAFTS in groups else _calls(groups, "num_host_blocks" in options)
    return [
        Case(
            f"KVCacheManager, {name}: {call_name}",
            functools.partial(_trial, groups, options, call, _PREPARED.get(call_name)),
        )
        for call_name, call in calls.items()
    ]


def manager_families() -> dict[str, Callable[[], list[Case]]]:
    """Return the functions that create the cases for each kind of manager, keyed by name."""
    return {
        "manager of one group": lambda: _cases("one group", [FULL]),
        "manager with a host": lambda: _cases(
            "host",
            [FULL],
            num_host_blocks=20,
            host_write="through",
            eviction="learned",
            host_eviction="learned",
        ),
        "manager of three groups": lambda: _cases(
            "three groups", [FULL, WINDOW, STATE], num_host_blocks=60
        ),
        "manager with states of drafts": lambda: _cases(
            "states of drafts", [FULL, DRAFTS], num_host_blocks=60
        ),
    } | {
        f"manager with {policy}": lambda policy=policy: _cases(
            policy, [FULL, WINDOW], eviction=policy
        )
        for policy in eviction_names()
        if policy != "lru"
    }
