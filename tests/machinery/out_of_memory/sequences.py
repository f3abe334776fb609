# SPDX-License-Identifier: Apache-2.0
"""Cases for every call of `BlockSpaceManager`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcache.compat import BlockSpaceManager
from tests.machinery.out_of_memory.trial import Case, Trial
from tests.machinery.sequence_driver import Group, Seq, Status


class Spaced:
    """A manager with running groups a, b and c, a swapped-out group s, and a new group n. Group b
    has two sequences.
    """

    def __init__(self, window: int | None, caching: bool) -> None:
        self.manager = m = BlockSpaceManager(
            4, 60, 40, sliding_window=window, enable_caching=caching, enable_events=caching
        )
        self.seqs = {
            name: Seq(i, [*range(100 * i, 100 * i + 10 + i)]) for i, name in enumerate("abcsnmex")
        }
        seqs = self.seqs
        self.groups = {name: Group(name, [seqs[name]]) for name in "acsn"}
        self.groups["b"] = Group("b", [seqs["b"]])
        seqs["m"].tokens = [*seqs["n"].tokens]
        self.groups["two"] = Group("two", [seqs["n"], seqs["m"]])
        self.groups["encoder"] = Group("encoder", [seqs["n"]], seqs["e"])
        for name in "abcs":
            m.allocate(self.groups[name])
            self.groups[name].set_status(Status.RUNNING)
            m.mark_blocks_as_computed(self.groups[name], seqs[name].get_len())
            m.get_block_table(seqs[name])
        self.child = Seq(50, [*seqs["b"].tokens], Status.RUNNING)
        m.fork(seqs["b"], self.child)
        self.groups["b"].seqs.append(self.child)
        self.late = Seq(51, [*seqs["a"].tokens], Status.RUNNING)
        m.swap_out(self.groups["s"])
        self.groups["s"].set_status(Status.SWAPPED)
        for name in "abc":
            seqs[name].tokens.append(7)
        self.child.tokens.append(8)

    def state(self) -> Iterator[Callable[[], object]]:
        m, groups = self.manager, self.groups
        every = [*self.seqs.values(), self.child, self.late]
        yield m.check_invariants
        yield lambda: (m.get_num_free_gpu_blocks(), m.get_num_free_cpu_blocks())
        for seq in every:
            yield lambda seq=seq: [*m.get_block_table(seq)]
            yield lambda seq=seq: m.get_num_cached_tokens(seq)
        yield lambda: m.stats
        yield lambda: [(type(e).__name__, e) for e in m.drain_events()]
        yield lambda: m.get_common_computed_block_ids([self.seqs["a"]])
        for name in "abc":
            yield lambda name=name: m.append_slots(self.seqs[name], 1)
        yield lambda: m.mark_blocks_as_computed(groups["a"], 1)
        yield lambda: m.can_swap_in(groups["s"], 0).name
        yield lambda: m.swap_in(groups["s"])
        yield lambda: groups["s"].set_status(Status.RUNNING)
        for seq in every:
            yield lambda seq=seq: [*m.get_block_table(seq)]
        yield lambda: m.get_cross_block_table(groups["encoder"])
        yield lambda: m.free_cross(groups["encoder"])
        yield m.check_invariants
        for seq in every:
            yield lambda seq=seq: m.free(seq)
        big = Seq(99, [*range(9000, 9150)])
        yield lambda: m.allocate(Group("big", [big]))  # reveals the eviction order
        yield lambda: [*m.get_block_table(big)]
        yield lambda: [(type(e).__name__, e) for e in m.drain_events()]
        yield m.check_invariants

    def refusals(self) -> list[Callable[[], object]]:
        m, groups, a = self.manager, self.groups, self.seqs["a"]
        return [
            m.check_invariants,
            lambda: m.can_allocate(groups["n"]),
            lambda: m.allocate(groups["n"]),
            lambda: m.can_append_slots(groups["c"], 0),
            lambda: m.append_slots(self.seqs["c"], 0),
            lambda: m.get_block_table(self.seqs["c"]),
            lambda: m.fork(a, Seq(70, [*a.tokens], Status.RUNNING)),
            lambda: m.swap_out(groups["c"]),
            lambda: m.get_num_free_gpu_blocks(),
            lambda: m.drain_events(),
            lambda: m.stats,
            lambda: m.reset_prefix_cache(),
        ]


_CALLS: dict[str, Callable[[Spaced], object]] = {
    "can_allocate": lambda s: s.manager.can_allocate(s.groups["n"]).name,
    "allocate": lambda s: s.manager.allocate(s.groups["n"]),
    "allocate two sequences": lambda s: s.manager.allocate(s.groups["two"]),
    "allocate with an encoder": lambda s: s.manager.allocate(s.groups["encoder"]),
    "can_append_slots": lambda s: s.manager.can_append_slots(s.groups["b"], 2),
    "append_slots": lambda s: s.manager.append_slots(s.seqs["a"], 3),
    "append_slots, copying": lambda s: s.manager.append_slots(s.seqs["b"], 0),
    "fork": lambda s: s.manager.fork(s.seqs["a"], s.late),
    "swap_out": lambda s: s.manager.swap_out(s.groups["b"]),
    "can_swap_in": lambda s: s.manager.can_swap_in(s.groups["s"], 1).name,
    "swap_in": lambda s: s.manager.swap_in(s.groups["s"]),
    "free": lambda s: s.manager.free(s.seqs["a"]),
    "free, swapped out": lambda s: s.manager.free(s.seqs["s"]),
    "mark_blocks_as_computed": lambda s: s.manager.mark_blocks_as_computed(s.groups["b"], 1),
    "access_all_blocks_in_seq": lambda s: s.manager.access_all_blocks_in_seq(s.seqs["a"], 4.0),
    "get_block_table": lambda s: [*s.manager.get_block_table(s.child)],
    "get_num_cached_tokens": lambda s: s.manager.get_num_cached_tokens(s.seqs["n"]),
    "reset_prefix_cache": lambda s: s.manager.reset_prefix_cache(),
    "drain_events": lambda s: s.manager.drain_events(),
    "stats": lambda s: s.manager.stats,
}


def _trial(window: int | None, caching: bool, call: Callable[[Spaced], object]) -> Trial:
    spaced = Spaced(window, caching)
    return Trial(
        lambda: call(spaced),
        spaced.state,
        spaced.refusals(),
        free=lambda: [spaced.manager.free(seq) for seq in spaced.seqs.values()],
    )


def sequence_cases() -> list[Case]:
    """Return the cases for managers with and without a window, and with and without caching."""
    return [
        Case(
            f"BlockSpaceManager, window={window}, caching={caching}: {name}",
            lambda window=window, caching=caching, call=call: _trial(window, caching, call),
        )
        for window, caching in ((None, True), (8, True), (None, False))
        for name, call in _CALLS.items()
    ]
