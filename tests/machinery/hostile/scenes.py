# SPDX-License-Identifier: Apache-2.0
"""Objects in a known state, right calls of them, and queries that reveal the state.

The wrong calls are derived from the right ones: with other arguments (`wrong_calls.py`), with failed
allocations (`out_of_memory.py`), and with interrupts (`interrupts.py`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch

import kvcache
from kvcache import (
    Admit,
    AttentionMetadataBuilder,
    BlockPool,
    BlockTables,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Request,
    StepPlan,
    StepReport,
    SwapEngine,
    Worker,
    compat,
    eviction_names,
    hash_blocks,
    plan_cache,
)
from kvcache.allocator import RequestState, check_invariants
from kvcache.compat import BlockSpaceManager
from kvcache.step import NO_REPLACE
from kvcache.worker import SwapError
from tests.machinery.hostile.state import answer
from tests.simulator.sequences import Group, Seq, Status

Call = tuple[str, Callable, dict[str, object]]


def call(name: str, function: Callable, /, **arguments: object) -> Call:
    return name, function, arguments


class Scene:
    """Base class of scenes. Each object of a scene is made anew, so that a call may change it."""

    is_constant = False  # whether no call changes the scene
    spares_torch = False  # whether torch's own allocations never fail, because torch may then abort

    def calls(self) -> Iterator[Call]:
        """Yield the name, the function and the right arguments of each call."""
        raise NotImplementedError

    def queries(self) -> Iterator[Callable[[], object]]:
        """Yield calls that together reveal the complete state. They may change the state."""
        return iter(())

    def refusals(self) -> list[Callable[[], object]]:
        """Return calls that a broken object must reject. The first does not change an intact one."""
        return []

    def progress(self) -> dict[str, object]:
        """Return values of which a call changes each one either completely or not at all."""
        return {}

    def end(self) -> None:
        """Check that everything can be released, exactly once."""

    def free_all(self) -> None:
        """Release everything, which must also work for a broken object."""

    def right_call(self, at: int) -> Callable[[], object]:
        """Return call number `at` with its arguments."""
        _, function, arguments = next(itertools.islice(self.calls(), at, None))
        return functools.partial(function, **arguments)

    def follow(self) -> list[object]:
        """Return the answers of all queries."""
        return [answer(each) for each in self.queries()]

    def draw(self, rng: random.Random) -> tuple[str, Callable, dict[str, object], list[str]]:
        """Draw a call.

        Return the call's name, function and valid arguments, and the optional parameters that may
        be made invalid.
        """
        some = [each for each in self.calls() if each[2]]
        name, function, arguments = rng.choice(some)
        further = [each for each in _names_of(function) if each not in arguments]
        return name, function, arguments, further

    def right_value(self, name: str, rng: random.Random) -> object:
        """Return a valid value for an optional argument, or None if none is known."""
        return None

    def others(self) -> list[object]:
        """Return valid objects to pass where an object of another type is expected."""
        found = [[*x.values()] if isinstance(x, dict) else [x] for x in vars(self).values()]
        return [each for values in found for each in values]

    def close(self) -> None:
        """Release the scene's resources."""


def _names_of(function: Callable) -> tuple[str, ...]:
    """Return the names of a function's named parameters, except for devices."""
    is_method = inspect.ismethod(function)
    return _names_of_function(function.__func__ if is_method else function)[is_method:]


@functools.lru_cache(maxsize=500)
def _names_of_function(function: Callable) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a native function
        return ()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(x.name for x in parameters if x.kind in named and x.name != "device")


FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 6})
WIDE = GroupSpec("sliding_window", 8, {"window": 16})
STATE = GroupSpec("recurrent", 4)
DRAFTS = GroupSpec("recurrent", 4, {"num_speculative_blocks": 2})


class ManagerScene(Scene):
    """A manager with steps in flight, and its requests, by name.

    Requests a to d were admitted by `step` and have grown; d is swapped out if there is a host tier.
    Requests e and f were freed, and their blocks are cached. Without states, j was admitted with
    blocks that are not filled, and k is receiving. All others are new; h shares a prefix with a.
    """

    def __init__(self, *groups: GroupSpec, **options: object) -> None:
        self.manager = m = KVCacheManager.for_groups(
            groups, 40 * len(groups), 256, num_preallocate_tokens=0, enable_events=True, **options
        )
        m.cache.set_now(1)
        sizes = {name: (100 * i, 13 + 2 * i) for i, name in enumerate("abcdefghijk")}
        sizes |= {"l": (1200, 120), "m": (1200, 30), "n": (1200, 40), "o": (1200, 130)}
        tokens = {name: range(first, first + n) for name, (first, n) in sizes.items()}
        tokens["h"] = [*range(13), *range(800, 811)]
        tokens["f"] = [*range(400, 417), 3, 4, 5, 6]
        self.requests = r = {
            name: Request(name, ids, lora=("alpha", "/alpha") if name in "cf" else None)
            for name, ids in tokens.items()
        }
        m.step(new=self.of("ef"))
        m.free(*self.of("ef"))
        m.step(new=self.of("abcd"))
        m.cache.pin("s", r["b"])
        m.report(StepReport(1, True))
        m.cache.set_now(2)
        self.has_states = any(group.kind == "recurrent" for group in groups)
        num_of_b = 1 if STATE in groups else 2
        m.step(self.rows("abcd"), [1, num_of_b, 1, 1], token_ids=[5, 6, 7, 8])
        m.cache.drain_events()
        if not self.has_states:
            m.admit(Admit(r["j"], num_tokens=9), ())
            m.admit(Admit(r["k"], external=External(16, delayed=True)), ())
        if m.host_pool is not None:
            m.step(swap_out=self.rows("d"))
        else:
            m.step(self.rows("d"), [1], token_ids=[9])
        self.has_drafts = DRAFTS in groups
        if self.has_drafts:
            m.step(self.rows("ab"), [3, 3], token_ids=[7, 8])
        for name in "ghi":  # hash now, so that hashing does not allocate during the call under test
            m.cache.find_prefix(r[name])
        r["z"] = Request("z", r["a"].token_ids)

    def rows(self, names: str) -> list[int]:
        return [self.manager.row(each) for each in self.of(names)]

    def of(self, names: str) -> list[Request]:
        return [self.requests[name] for name in names]

    def blocks(self, name: str, n: int, group: int = 0) -> list[int]:
        return self.manager.block_ids(self.requests[name], group)[-n:].tolist()

    def free(self, names: str) -> Callable:
        return functools.partial(self.manager.free, *self.of(names))

    def calls(self) -> Iterator[Call]:
        m, cache, r = self.manager, self.manager.cache, self.requests
        a, b, e, h = self.of("abeh")
        yield call("step, new", m.step, new=self.of("gh"))
        yield call("step, new with many tokens", m.step, new=self.of("l"))
        new = [Admit(each, num_lookahead_tokens=3) for each in self.of("gei")]
        if not self.has_drafts:
            yield call(
                "step, rows", m.step, rows=self.rows("abc"), num_tokens=[9, 5, 1],
                token_ids=[1, 2, 3, 4], num_token_ids=[2, 1, 1],
            )  # fmt: skip
            rows = {"rows": self.rows("ab"), "num_tokens": [7, 6]}
            yield call("step, rows and new", m.step, **rows, new=new)
        yield call("step, one new", m.step, new=[Admit(r["g"], 4, num_reserved_blocks=1)])
        yield call("step, read", m.step, new=[r["g"], Admit(e, read_cache=True)])
        yield call("step, external tokens", m.step, new=[Admit(r["g"], external=External(8))])
        yield call("free", self.free("a"))
        yield call("free several", self.free("abcd"))
        yield call(
            "free with retention", self.free("a"), retention=[(0, 4, 5, None), (4, 9, 50, 3.0)]
        )
        yield call("free, blocks are kept", self.free("b"), keep_blocks=True)
        yield call("report, completed", m.report, report=StepReport(3, True))
        failed = StepReport(2, True, self.blocks("a", 2), [])
        yield call("report, failed pages", m.report, report=failed)
        failed = StepReport(2, False, self.blocks("b", 1))
        yield call("report, not completed", m.report, report=failed)
        yield call("abort", m.abort, step_id=2)
        yield call("invalidate", m.invalidate, ids=self.blocks("a", 3))
        yield call("pin", cache.pin, session="t", request=a)
        yield call("pin again", cache.pin, session="s", request=a)
        yield call("unpin", cache.unpin, session="s")
        yield call("evict", cache.evict, ids=self.blocks("a", 3))
        yield call("start_epoch", cache.start_epoch)
        yield call("forget_adapter", cache.forget_adapter, name="alpha")
        yield call("reset", cache.reset)
        yield call("reset of a group", cache.reset, group=0)
        yield call("drain_events", cache.drain_events)
        yield call("clear_stats", cache.clear_stats)
        yield call("set_now", cache.set_now, seconds=5)
        yield call("stats", lambda: cache.stats)
        yield call("cached_tokens", cache.cached_tokens, request=h, read_cache=None)
        yield call("would_fit", m.would_fit, request=Admit(h, 4))
        yield call("find_prefix", cache.find_prefix, request=e, read_cache=True)
        yield call("hashes", cache.hashes, request=e)
        yield call("hashes of a new request", cache.hashes, request=r["o"])
        yield call("append_tokens", a.append_tokens, token_ids=range(600))
        for owner, name in ((m, "num_computed_tokens"), (m, "row"), (m, "state"), (m, "block_ids")):
            yield call(name, getattr(owner, name), request=a)
        yield call("access", cache.access, request=a, now=2.0)
        yield call(
            "common", cache.num_common_prefix_blocks, request=a, num_running_requests=1, group=0
        )
        yield call("find", cache.find, hashes=cache.hashes(e), group=0)
        yield call("hashes_of", cache.hashes_of, ids=[1, 2], medium="gpu")
        if not self.has_states:
            yield call("step, share", m.step, new=self.of("mn"))
            yield call(
                "step, rejected", m.step, rows=self.rows("ab"), num_tokens=[3, 3],
                num_rejected_tokens=[0, 1], token_ids=[4, 5], num_lookahead_tokens=1,
            )  # fmt: skip
            receiving = Admit(r["g"], external=External(8, delayed=True))
            yield call("step that receives", m.step, new=[receiving])
            yield call("reject_tokens", m.reject_tokens, request=b, num_tokens=1)
            yield call("fork", m.fork, parent=a, child=r["z"])
            found = cache.find_prefix(h).block_ids
            yield call("admit", m.admit, request=Admit(h, num_tokens=9), computed_blocks=found)
            yield call("finish_receiving", m.finish_receiving, request=r["k"], num_tokens=9)
            yield call("free while receiving", self.free("k"), keep_blocks=True)
            yield call("extend", m.extend, request=r["j"], num_tokens=20, num_lookahead_tokens=2)
        if m.host_pool is not None:
            yield call("step, swap out", m.step, swap_out=self.rows("ab"))
            swapped = {"swap_out": self.rows("a"), "rows": self.rows("c"), "num_tokens": [1]}
            yield call("step, rows and swap out", m.step, **swapped, token_ids=[7])
            yield call("step, swap in", m.step, rows=self.rows("d"), num_tokens=[1], token_ids=[7])
            yield call("step, from the host", m.step, new=self.of("oef"))
            failed = StepReport(3, True, [], failed_host_pages=[1, 2])
            yield call("report, failed host pages", m.report, report=failed)
        if self.has_drafts:
            yield call("step, drafts", m.step, rows=self.rows("c"), num_tokens=[3], token_ids=[7])
            yield call(
                "step, more drafts", m.step, rows=self.rows("ab"), num_tokens=[3, 3],
                num_rejected_tokens=[1, 0], token_ids=range(5), num_token_ids=[2, 3],
            )  # fmt: skip
            yield call("reject_tokens, drafts", m.reject_tokens, request=a, num_tokens=2)
            yield call("free, drafts", self.free("ab"))
            failed = StepReport(4, True, self.blocks("a", 1, group=1))
            yield call("report, failed page of drafts", m.report, report=failed)
            yield call("abort, drafts", m.abort, step_id=4)

    def refusals(self) -> list[Callable[[], object]]:
        m, (a, g) = self.manager, self.of("ag")
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
            lambda: m.fork(a, self.requests["z"]),
            lambda: m.extend(a, 1),
            lambda: m.state(a) is RequestState.SWAPPED_OUT,
            lambda: m.finish_receiving(a),
            lambda: m.admit(Admit(Request("y", range(9)), num_tokens=4), ()),
            lambda: m.cache.evict([1]),
            lambda: m.cache.reset(),
        ]

    def queries(self) -> Iterator[Callable[[], object]]:
        m, groups = self.manager, range(len(self.manager.groups))
        yield lambda: check_invariants(m)
        for request in self.requests.values():
            for g in groups:
                yield lambda r=request, g=g: m.block_ids(r, g)
            yield lambda r=request: (m.num_computed_tokens(r), m.state(r))
            yield lambda r=request: r.token_ids
        for pool in filter(None, (m.pool, m.host_pool)):
            for count in ("num_free", "num_cached", "num_evicted", "num_pinned", "peak_used"):
                yield lambda p=pool, c=count: getattr(p, c)
        yield lambda: (m.pool.num_fenced, m.pool.num_kept, m.pool.num_loading)
        yield lambda: m.cache.stats
        yield lambda: m.cache.drain_events()
        for request in self.of("aefghi"):
            yield lambda r=request: (m.cache.cached_tokens(r), m.cache.find_prefix(r))
        yield m.step  # shows which rows are cleared or sent again
        yield lambda: m.abort(3)
        yield lambda: m.step(self.rows("abcd"), [3, 2, 1, 4])
        yield lambda: m.step(new=self.of("gh"))
        yield lambda: m.report(StepReport(5, True))
        yield lambda: m.abort(6)
        yield lambda: m.free(*self.of("abcdefghijlmnoz"))
        yield lambda: m.free(*self.of("k"), keep_blocks=True)
        yield lambda: m.cache.unpin("s")
        yield m.step
        yield lambda: m.report(StepReport(7, True))
        yield lambda: check_invariants(m)
        for i in range(4):  # evict blocks to reveal the eviction order
            yield lambda i=i: m.step(new=[Request(f"x{i}", range(5000 + 40 * i, 5037 + 40 * i))])
        yield lambda: m.cache.stats
        yield lambda: m.cache.drain_events()
        yield lambda: check_invariants(m)

    def progress(self) -> dict[str, object]:
        """Return the computed and the known tokens of each request."""
        m = self.manager
        return {
            name: (m.num_computed_tokens(r) if self.is_admitted(r) else None, r.num_tokens)
            for name, r in self.requests.items()
        }

    def check(self) -> None:
        """Check that exactly the admitted requests have blocks."""
        m = self.manager
        check_invariants(m)
        rows = []
        for request in filter(self.is_admitted, self.requests.values()):
            rows.append(m.row(request))
            if m.state(request) is not RequestState.SWAPPED_OUT:
                m.block_ids(request)
        assert len({*rows}) == len(rows) == m._native.num_rows

    def end(self) -> None:
        """Check that all blocks are released and that none is freed twice."""
        self.check()
        m = self.manager
        for request in self.requests.values():
            if self.is_admitted(request) and m.state(request) is RequestState.RECEIVING:
                m.free(request, keep_blocks=True)
            m.free(request)
            with contextlib.suppress(ValueError):  # no blocks were kept
                m.release_blocks(request)
        if m.last_step_id >= 0:
            m.report(StepReport(m.last_step_id, True))
        for session in ("s", "t"):
            m.cache.unpin(session)
        assert m._native.num_rows == 0 and m.pool.num_free == m.pool.num_total
        other = Request("other", range(500, 520))
        m.step(new=[other])
        num_free = m.pool.num_free
        self.free_all()  # already freed above, so this call must change nothing
        assert m.pool.num_free == num_free and self.is_admitted(other)
        m.free(other)
        check_invariants(m)

    def is_admitted(self, request: Request) -> bool:
        """Return whether the manager knows the request."""
        try:
            self.manager.row(request)
        except ValueError:
            return False
        return True

    def free_all(self) -> None:
        self.manager.free(*self.requests.values())


class Liar(Seq):
    """A sequence that claims to have nine tokens."""

    def get_len(self) -> int:
        return 9


class SequenceScene(Scene):
    """A manager with running groups a, b and c, a swapped-out group s, and new groups. Groups b and
    c have two sequences, and c has an encoder.
    """

    def __init__(self, window: int | None, caching: bool) -> None:
        self.manager = m = BlockSpaceManager(
            4, 80, 60, sliding_window=window, enable_caching=caching, enable_events=caching
        )
        self.seqs = seqs = {
            name: Seq(i, [*range(100 * i, 100 * i + 10 + i)])
            for i, name in enumerate(("a", "b", "c", "s", "n", "m", "e", "x", "c0", "ce", "ne"))
        }
        seqs["m"].tokens = [*seqs["n"].tokens]
        seqs["c0"].tokens = [*seqs["c"].tokens]
        self.groups = groups = {name: Group(name, [seqs[name]]) for name in "absn"}
        groups["c"] = Group("c", [seqs["c"], seqs["c0"]], seqs["ce"])
        groups["two"] = Group("two", [seqs["n"], seqs["m"]])
        groups["encoder"] = Group("encoder", [seqs["n"]], seqs["e"])
        for name in "abcs":
            m.allocate(groups[name])
            groups[name].set_status(Status.RUNNING)
            m.mark_blocks_as_computed(groups[name], seqs[name].get_len())
            m.get_block_table(seqs[name])
        seqs["child"] = Seq(50, [*seqs["b"].tokens], Status.RUNNING)
        m.fork(seqs["b"], seqs["child"])
        groups["b"].seqs.append(seqs["child"])
        seqs["late"] = Seq(51, [*seqs["a"].tokens], Status.RUNNING)
        m.swap_out(groups["s"])
        groups["s"].set_status(Status.SWAPPED)
        for name in ("a", "b", "c", "c0"):
            seqs[name].tokens.append(7)
        seqs["child"].tokens.append(8)
        self.liar = Liar(7, [1, 2, 3])
        self.group_of_liar = Group("liar", [self.liar])
        self.grown = Seq(0, [*range(10), 5])

    def calls(self) -> Iterator[Call]:
        m, seqs, groups = self.manager, self.seqs, self.groups
        a, b, child = seqs["a"], seqs["b"], seqs["child"]
        yield call("can_allocate", m.can_allocate, seq_group=groups["n"], num_lookahead_slots=1)
        yield call("allocate", m.allocate, seq_group=groups["n"])
        yield call("allocate two sequences", m.allocate, seq_group=groups["two"])
        yield call("allocate with an encoder", m.allocate, seq_group=groups["encoder"])
        of_b = {"seq_group": groups["b"], "num_lookahead_slots": 2}
        yield call("can_append_slots", m.can_append_slots, **of_b)
        yield call("append_slots", m.append_slots, seq=a, num_lookahead_slots=3)
        yield call("append_slots, copying", m.append_slots, seq=b, num_lookahead_slots=0)
        yield call("fork", m.fork, parent_seq=a, child_seq=seqs["late"])
        yield call("can_swap_out", m.can_swap_out, seq_group=groups["a"])
        yield call("swap_out", m.swap_out, seq_group=groups["b"])
        yield call("swap_out with an encoder", m.swap_out, seq_group=groups["c"])
        yield call("can_swap_in", m.can_swap_in, seq_group=groups["s"], num_lookahead_slots=1)
        yield call("swap_in", m.swap_in, seq_group=groups["s"])
        yield call("free", m.free, seq=a)
        yield call("free, swapped out", m.free, seq=seqs["s"])
        yield call("free_cross", m.free_cross, seq_group=groups["c"])
        mark = {"seq_group": groups["b"], "token_chunk_size": 1}
        yield call("mark_blocks_as_computed", m.mark_blocks_as_computed, **mark)
        yield call("access", m.access_all_blocks_in_seq, seq=a, now=4.0)
        yield call("get_block_table", lambda seq: [*m.get_block_table(seq)], seq=child)
        yield call("get_cross_block_table", m.get_cross_block_table, seq_group=groups["c"])
        yield call("common", m.get_common_computed_block_ids, seqs=[a, b])
        yield call("get_num_cached_tokens", m.get_num_cached_tokens, seq=seqs["n"])
        yield call("remove", m.remove_seq_from_computed_blocks_tracker, seq=a)
        yield call("hit_rate", m.get_prefix_cache_hit_rate, device="gpu")
        yield call("reset_prefix_cache", m.reset_prefix_cache, device="gpu")
        yield call("drain_events", m.drain_events)
        yield call("stats", lambda: m.stats)

    def queries(self) -> Iterator[Callable[[], object]]:
        m, groups, every = self.manager, self.groups, self.seqs.values()
        yield m.check_invariants
        yield lambda: (m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks())
        for seq in every:
            yield lambda seq=seq: [*m.get_block_table(seq)]
            yield lambda seq=seq: m.get_num_cached_tokens(seq)
        yield lambda: m.stats
        yield lambda: m.drain_events()
        yield lambda: m.get_common_computed_block_ids([self.seqs["a"]])
        for name in "abc":
            yield lambda name=name: m.append_slots(self.seqs[name], 1)
        yield lambda: m.mark_blocks_as_computed(groups["a"], 1)
        yield lambda: m.can_swap_in(groups["s"], 0)
        yield lambda: m.swap_in(groups["s"])
        yield lambda: groups["s"].set_status(Status.RUNNING)
        for seq in every:
            yield lambda seq=seq: [*m.get_block_table(seq)]
        for name in ("c", "encoder"):
            yield lambda name=name: m.get_cross_block_table(groups[name])
            yield lambda name=name: m.free_cross(groups[name])
        yield m.check_invariants
        for seq in every:
            yield lambda seq=seq: m.free(seq)
        big = Seq(99, [*range(9000, 9150)])
        yield lambda: m.allocate(Group("big", [big]))  # reveals the eviction order
        yield lambda: [*m.get_block_table(big)]
        yield lambda: m.drain_events()
        yield m.check_invariants

    def refusals(self) -> list[Callable[[], object]]:
        m, groups, a = self.manager, self.groups, self.seqs["a"]
        return [
            m.check_invariants,
            lambda: m.can_allocate(groups["n"]),
            lambda: m.allocate(groups["n"]),
            lambda: m.can_append_slots(groups["a"], 0),
            lambda: m.append_slots(self.seqs["c"], 0),
            lambda: m.get_block_table(self.seqs["c"]),
            lambda: m.fork(a, Seq(70, [*a.tokens], Status.RUNNING)),
            lambda: m.swap_out(groups["a"]),
            lambda: m.get_num_free_gpu_blocks(),
            lambda: m.drain_events(),
            lambda: m.stats,
            lambda: m.reset_prefix_cache(),
        ]

    def free_all(self) -> None:
        for seq in self.seqs.values():
            self.manager.free(seq)

    def end(self) -> None:
        """Check that all sequences and groups can be freed, and that freeing them again changes
        nothing.
        """
        m = self.manager
        m.check_invariants()
        for _ in range(2):
            self.free_all()
            for group in self.groups.values():
                m.free_cross(group)
            m.check_invariants()
            assert (m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks()) == (79, 59)


class EngineScene(Scene):
    """A manager of another engine's interface, with a running and a waiting request."""

    def __init__(self) -> None:
        self.manager = compat.KVCacheManager(4, 40, 64, None, True, 0)
        self.running, self.waiting = (
            SimpleNamespace(request_id=name, all_token_ids=[*range(10)], num_computed_tokens=0)
            for name in "ab"
        )
        self.manager.allocate_slots(self.running, 10, ())
        self.running.num_computed_tokens = 10
        self.running.all_token_ids += [7] * 7

    def calls(self) -> Iterator[Call]:
        m, a, b = self.manager, self.running, self.waiting
        yield call("get_computed_blocks", m.get_computed_blocks, request=b)
        slots = {"num_tokens": 10, "computed_blocks": ()}
        yield call("allocate_slots", m.allocate_slots, request=b, **slots)
        yield call("append_slots", m.append_slots, request=a, num_tokens=7)
        yield call("free", m.free, request=a)

    def refusals(self) -> list[Callable[[], object]]:
        m, b = self.manager, self.waiting
        return [
            lambda: check_invariants(m.manager),
            lambda: m.get_computed_blocks(b),
            lambda: m.allocate_slots(b, 10, ()),
        ]

    def end(self) -> None:
        """Check that all requests can be freed, and admitted again with another prompt."""
        for request in (self.running, self.waiting):
            self.manager.free(request)
            self.manager.free(request)
        assert self.manager.manager.pool.num_free == 39
        for first, request in ((50, self.running), (60, self.waiting)):
            request.all_token_ids, request.num_computed_tokens = [first, *range(11)], 0
            assert self.manager.get_computed_blocks(request) == ([], 0)
            assert len(self.manager.allocate_slots(request, 12, ())) == 3
        check_invariants(self.manager.manager)

    def queries(self) -> Iterator[Callable[[], object]]:
        yield self.end


def _hashes(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint8)[:, None].repeat(32, 1)


class PoolScene(Scene):
    """A pool with held blocks, cached free blocks, and pinned blocks."""

    def __init__(self, eviction: str) -> None:
        self.pool = pool = BlockPool(30, eviction=eviction)
        self.held = pool.allocate(6)
        self.free = pool.allocate(8)
        pool.publish(self.held[:4], _hashes(1, 4))
        pool.publish(self.free, _hashes(11, 8))
        pool.set_now(1.0)
        pool.notify_release(self.free, np.arange(4, 36, 4), num_prefix_tokens=8)
        pool.release(self.free[::-1].copy())
        pool.pin(self.free[:2])

    def calls(self) -> Iterator[Call]:
        p, held, free = self.pool, self.held, self.free
        yield call("allocate", p.allocate, n=3)
        yield call("allocate, evicting", p.allocate, n=20)
        yield call("retain", p.retain, ids=[*held[:2], *free[3:6]])
        yield call("release", p.release, ids=held)
        published = {"ids": held[4:], "hashes": _hashes(40, 2), "group": 3, "parent": b"p" * 32}
        yield call("publish", p.publish, **published, is_chain=True)
        yield call("publish again", p.publish, ids=held[4:], hashes=_hashes(1, 2))
        yield call("lookup", p.lookup, hashes=_hashes(1, 4), group=0, prefix=True)
        yield call("evict", p.evict, ids=[*held, *free])
        yield call("hit", p.hit, ids=free[2:6])
        released = {"ids": held[:4], "prefix_tokens": np.arange(4, 20, 4), "tokens_per_block": 4}
        yield call("notify_release", p.notify_release, **released, retention=[(0, 9, 70, 4.0)])
        yield call("access", p.access, ids=free[2:6], now=3.0)
        yield call("set_now", p.set_now, seconds=2.0)
        yield call("pin", p.pin, ids=free[1:6])
        yield call("unpin", p.unpin, ids=free[:2])
        yield call("is_pinned", p.is_pinned, id=1)
        yield call("ref_counts", p.ref_counts, ids=held)
        yield call("reset", p.reset)

    def queries(self) -> Iterator[Callable[[], object]]:
        pool, every = self.pool, np.arange(1, 30)
        yield pool.check_invariants
        for count in ("num_free", "num_cached", "num_evicted", "num_pinned", "peak_used"):
            yield lambda c=count: getattr(pool, c)
        yield lambda: pool.ref_counts(every)
        yield lambda: [pool.is_pinned(i) for i in range(1, 30)]
        for group in (0, 3):
            yield lambda g=group: pool.lookup(_hashes(0, 60), g, prefix=False)
        for _ in range(20):  # reveals the eviction order
            yield lambda: pool.allocate(1)
        yield lambda: pool.ref_counts(every)
        yield pool.check_invariants

    def refusals(self) -> list[Callable[[], object]]:
        pool = self.pool
        return [
            pool.check_invariants,
            lambda: pool.allocate(1),
            lambda: pool.release(self.held[:1]),
            lambda: pool.retain(self.held[:1]),
            lambda: pool.publish(self.held[:0], _hashes(0, 0)),
            lambda: pool.lookup(_hashes(1, 1)),
            lambda: pool.evict([1]),
            lambda: pool.reset(),
            lambda: pool.num_free,
            lambda: pool.pin([]),
        ]


class HashScene(Scene):
    """A manager, and requests whose block hashes are given by the engine."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(4, 40, 160, num_preallocate_tokens=0)
        self.hashes = [bytes([i]) * 32 for i in range(5)]
        self.request = Request("a", range(20), block_hashes=self.hashes)
        self.manager.cache.find_prefix(self.request)
        self.hashes += [bytes([i]) * 32 for i in range(5, 40)]
        self.new = Request("c", range(120), block_hashes=[bytes([i]) * 32 for i in range(30)])

    def calls(self) -> Iterator[Call]:
        yield call("append_tokens", self.request.append_tokens, token_ids=[7] * 140)
        yield call("find_prefix", self.manager.cache.find_prefix, request=self.new)

    def queries(self) -> Iterator[Callable[[], object]]:
        yield lambda: check_invariants(self.manager)
        yield lambda: self.request.num_tokens
        yield lambda: self.manager.step(new=[Admit(self.request, num_tokens=20)])
        yield lambda: self.manager.cache.hashes(self.request)
        yield lambda: check_invariants(self.manager)
        yield lambda: self.manager.free(self.request)
        again = Request("b", range(24), block_hashes=[bytes([i]) * 32 for i in range(6)])
        yield lambda: self.manager.cache.find_prefix(again)


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


GROUPS = [FULL, GroupSpec("sliding_window", 4, {"window": 16})]
_MOVES = {
    "swap_out": np.array([[5, 3], [6, 4]], np.int32),
    "copy": np.array([[1, 12]], np.int32),
    "zero": _ids(13),
    "fresh": _ids(10),
    "swap_in": np.array([[5, 14]], np.int32),
}


def step_plan(step_id: int, **moves: object) -> StepPlan:
    """Return a plan that appends to rows 1 and 2 of both groups and clears row 3."""
    return StepPlan(
        step_id=step_id,
        rows=_ids(1, 2),
        status=np.zeros(2, np.uint8),
        num_computed_tokens=_ids(0, 0),
        clear_rows=_ids(3),
        append_rows=_ids(1, 2),
        append_splits=[_ids(0, 2, 3), _ids(0, 1, 2)],
        append_ids=[_ids(5, 6, 7), _ids(8, 9)],
        replace=[np.array([[0, 1, 11]], np.int32), NO_REPLACE],
        previous_step_id=step_id - 1,
        **moves,
    )


class WorkerScene(Scene):
    """Tables with three rows and computed slots, pages with different contents, and a host tier."""

    def __init__(self, device: str = "cpu") -> None:
        sizes = {"max_num_reqs": 6, "max_model_len": 64, "max_num_tokens": 32, "device": device}
        self.tables = BlockTables.for_groups(GROUPS, **sizes)
        sizes = {"num_blocks": 20, "block_size": 4, "num_kv_heads": 2, "head_size": 2}
        self.storage = KVStorage(**sizes, device=device)
        self.pages = self.storage.pages
        self.host = self.pages.on_host(10)
        for page in range(1, 20):
            self.pages.fragment(0)[page] = page
        for page in range(1, 10):
            self.host.fragment(0)[page] = 100 + page
        self.worker = Worker(self.storage, self.tables, self.host)
        for row in (0, 1, 3):
            self.tables.add_row([[1 + row, 2, 3], [4, 10 + row]], row)
        self.tables.commit_updates()
        self.tables.compute_slot_mapping(_ids(0, 1), np.array([2, 3]))
        self.tables.commit_slot_mapping(2)
        self.builder = AttentionMetadataBuilder(self.tables)

    def calls(self) -> Iterator[Call]:
        t, one, w = self.tables, self.tables[0], self.worker
        yield call("Worker.apply", w.apply, plan=step_plan(0))
        yield call("Worker.apply, moves", w.apply, plan=step_plan(0, **_MOVES))
        yield call("tables.apply", t.apply, plan=step_plan(0), num_blocks=20)
        for name in ("append_row", "add_row"):
            yield call(f"tables.{name}", getattr(t, name), block_ids=[[7, 8], [9]], row=1)
            yield call(f"table.{name}", getattr(one, name), block_ids=[7, 8], row=1)
        yield call("clear_row", t.clear_row, row=1)
        yield call("table.clear_row", one.clear_row, row=0)
        yield call("clear_rows", t.clear_rows, rows=[1, 3])
        for name in ("move_row", "swap_row"):
            yield call(f"table.{name}", getattr(one, name), src=1, tgt=5)
        for name, tgt in (("move_rows", [4, 5]), ("swap_rows", [3, 0])):
            yield call(f"tables.{name}", getattr(t, name), src=[1, 3], tgt=tgt)
            yield call(f"table.{name}", getattr(one, name), src=[1, 3], tgt=tgt)
        slots = {"req_indices": _ids(0, 1, 3), "positions": np.array([1, 4, 7])}
        yield call("compute_slot_mapping", t.compute_slot_mapping, **slots)
        yield call("commit_slot_mapping", t.commit_slot_mapping, num_tokens=2)
        yield call("commit_block_table", t.commit_block_table, num_reqs=2)
        mapped = {"block_ids": [1, 2], "blocks_per_kv_block": 2}
        yield call("map_to_kernel_blocks", one.map_to_kernel_blocks, **mapped)

    def queries(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.worker.last_step_id
        for table in self.tables.block_tables:
            yield table.get_numpy_array
            yield lambda t=table: t.num_blocks_per_row
            yield lambda t=table: t.slot_mapping.np
        yield lambda: self.pages.fragment(0)
        yield lambda: self.host.fragment(0)
        yield self.tables.commit_updates
        for table in self.tables.block_tables:
            yield table.get_device_tensor
        yield lambda: self.builder.build(rows=[1], query_lens=[1], seq_lens=[9])
        yield lambda: self.worker.apply(step_plan(self.worker.last_step_id + 1))
        for table in self.tables.block_tables:
            yield table.get_numpy_array
            yield table.get_device_tensor

    def refusals(self) -> list[Callable[[], object]]:
        plan = step_plan(self.worker.last_step_id)  # an intact worker rejects this old plan
        return [lambda: self.worker.apply(plan), lambda: self.worker.start(plan)]


class SwapScene(Scene):
    """A swap engine. A failed job reports the failure, and its pages are then invalid."""

    def __init__(self) -> None:
        self.pages = KVStorage(num_blocks=20, block_size=4, num_kv_heads=2, head_size=2).pages
        self.host = self.pages.on_host(10)
        self.pages.fragment(0)[:] = torch.arange(20)[:, None]
        self.engine = SwapEngine(self.pages, self.host)

    def swap(self, out: object, back: object) -> None:
        for job in (self.engine.swap_out(out), self.engine.swap_in(back)):
            if not job.poll():
                raise RuntimeError("a job on the CPU is not done")
            if isinstance(job.error, SwapError):
                raise MemoryError  # the job ran out of memory

    def calls(self) -> Iterator[Call]:
        pairs = np.array([[3, 4], [5, 6]])
        yield call("swap", self.swap, out=pairs, back=np.array([[6, 7]]))

    def queries(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.swap(np.array([[3, 4], [5, 6]]), np.array([[6, 7]]))
        yield lambda: self.pages.fragment(0)
        yield lambda: self.host.fragment(0)


class OptionScene(Scene):
    """Managers and pools with each policy, and requests with each kind of contents. Constructors
    with their other arguments are among the public calls (`world.py`).
    """

    is_constant = spares_torch = True

    def calls(self) -> Iterator[Call]:
        items = {"mm_items": [("i", 0, 2)], "prompt_embeds": np.zeros((3, 2), np.float32)}
        yield call("Request, items", Request, request_id="r", token_ids=[1, 2, 3], **items)
        more = {"lora": ("a", "b"), "num_encoder_tokens": 3, "block_hashes": [bytes(32)]}
        yield call("Request, given hashes", Request, request_id="r", token_ids=[1] * 4, **more)
        extra = {"seed": "0", "extra_keys": [None, [("a", 1)]]}
        yield call("hash_blocks", hash_blocks, token_ids=range(9), block_size=4, **extra)
        for name, options in {
            "three groups": {"groups": [FULL, WINDOW, DRAFTS]},
            "other kinds": {
                "groups": [
                    GroupSpec("chunked_local", 4, {"chunk_size": 8}),
                    GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False),
                    GroupSpec("cross_attention", 4),
                ],
                "max_encoder_tokens": 8,
            },
            "a host": {"num_host_blocks": 20, "host_eviction": "learned", "eviction": "learned"},
            "events": {"enable_events": True, "fence_frees": True, "watermark": 0.1},
            "hashes inside blocks": {"hash_block_size": 2},
            "xxh3": {"hash_algorithm": "xxh3_128_cbor"},
            **{policy: {"eviction": policy} for policy in eviction_names()},
        }.items():
            given = {"groups": [FULL], "num_gpu_blocks": 40, "max_model_len": 64, **options}
            yield call(f"KVCacheManager with {name}", KVCacheManager.for_groups, **given)
        for policy in eviction_names():
            given = {"num_blocks": 30, "eviction": policy, "eviction_options": {}}
            yield call(f"BlockPool with {policy}", BlockPool, **given)
        given = {"block_size": 4, "num_gpu_blocks": 20, "num_cpu_blocks": 10, "watermark": 0.1}
        given |= {"sliding_window": 8, "enable_caching": True}
        yield call("BlockSpaceManager", BlockSpaceManager, **given)
        limits = {"max_num_reqs": 4, "max_model_len": 64, "max_num_tokens": 32}
        yield call("BlockTables", BlockTables.for_groups, groups=GROUPS, **limits)
        layers = [LayerSpec(f"l{i}", "full_attention", 4, 2, 8) for i in range(2)]
        layers.append(LayerSpec("w", "sliding_window", 4, 2, 8, options={"window": 8}))
        budget = {"layers": layers, "budget_bytes": 2**18, "max_model_len": 64}
        yield call("plan_cache", plan_cache, **budget)
        plan = plan_cache(**budget)
        yield call("build", kvcache.build, plan=plan, max_num_reqs=2, num_host_blocks=3)


HOST = {"num_host_blocks": 60, "fence_frees": True}
SCENES: dict[str, Callable[[], Scene]] = {
    "manager": lambda: ManagerScene(FULL),
    "manager, host": lambda: ManagerScene(
        FULL, num_host_blocks=20, host_write="through", eviction="learned", host_eviction="learned",
        fence_frees=True,
    ),
    "manager, windows": lambda: ManagerScene(FULL, WIDE, fence_frees=True),
    "manager, states": lambda: ManagerScene(FULL, WINDOW, STATE, **HOST),
    "manager, drafts": lambda: ManagerScene(FULL, DRAFTS, **HOST),
    **{
        f"manager, {policy}": lambda policy=policy: ManagerScene(FULL, WINDOW, eviction=policy)
        for policy in eviction_names()
        if policy != "lru"
    },
    "sequences": lambda: SequenceScene(window=None, caching=True),
    "sequences, window": lambda: SequenceScene(window=8, caching=True),
    "sequences, not cached": lambda: SequenceScene(window=None, caching=False),
    "requests of an engine": EngineScene,
    **{f"pool, {policy}": functools.partial(PoolScene, policy) for policy in eviction_names()},
    "given hashes": HashScene,
    "worker": WorkerScene,
    "swaps": SwapScene,
    "options": OptionScene,
}  # fmt: skip
