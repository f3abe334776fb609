# SPDX-License-Identifier: Apache-2.0
"""The paths that NIXL transfers use, and the checks of fragments at the start of every transfer."""

import contextlib
import gc
import importlib.util
import mmap
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache import Pages
from kvcache.transfer.transport.base import TransferError
from kvcache.transfer.transport.spans import Spans, joined
from kvcache_exchange.transport import nixl_lane
from kvcache_exchange.transport.connection import StagedTransfer
from kvcache_exchange.transport.nixl_agent import Reach
from kvcache_exchange.transport.nixl_direct import DirectTransfer
from kvcache_exchange.transport.registered import RegisteredMemory, check_apart, check_within
from tests.machinery.forked import Forked, send
from tests.machinery.shared import sampled
from tests.machinery.transport_peer import Side

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
)
HERE, THERE = Reach("here", False), Reach("there", False)


@pytest.mark.parametrize(
    ("one", "other", "is_reached"),
    [
        (HERE, HERE, True),
        (HERE, THERE, False),
        (HERE, Reach("there", True), False),
        (Reach("here", True), Reach("there", True), True),
        (Reach(None, False), Reach(None, False), False),
    ],
)
def test_memory_is_reachable_locally_or_by_rdma(one, other, is_reached):
    assert one.reaches(other) is other.reaches(one) is is_reached


@pytest.mark.parametrize(
    "allowed",
    ["tcp", "tcp,self", "self", "tcp, self", "tcp,cuda_copy", "tcp,sockcm", "^cma,sm,rc", "^all"],
)
def test_memory_is_unreachable_with_tcp_only(monkeypatch, allowed):
    monkeypatch.setenv("UCX_TLS", allowed)
    assert Reach.of_this().machine is None


def say_machine(commands, *, allowed):
    os.environ["UCX_TLS"] = allowed
    send(commands, machine=Reach.of_this().machine)


@pytest.mark.parametrize("allowed", sampled(["all", "tcp,cma", " sm", "^tcp", "rc,cuda_ipc"], 1))
def test_processes_of_one_machine_report_the_same_machine(monkeypatch, allowed):
    monkeypatch.setenv("UCX_TLS", allowed)
    with Forked(say_machine, allowed=allowed) as other:
        assert Reach.of_this().machine == other.greeting["machine"] is not None


@pytest.mark.parametrize(
    "reach",
    [None, [], ["x"], ["x", 1], [1, True], ["x", None], ["x" * 129, True], {"machine": "x"}],
)
def test_invalid_reach_is_rejected(reach):
    hello = {"slots": [8] * 4, "direct": False, "reach": reach}
    with pytest.raises(ValueError, match="expected a machine name, and true or false"):
        nixl_lane._check_hello(hello)


class Pair:
    """Two connected sides. The first reads from the second."""

    def __init__(self, num_bytes, name="nixl", **options):
        options = {"num_bytes": num_bytes, "timeout_s": 30, **options}
        self.sides = Side(name, "a", **options), Side(name, "b", seed=1, **options)
        self.mine, self.theirs = (each.pool for each in self.sides)
        self.sides[0].connect(self.sides[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.sides:
            each.transport.close()

    def read(self, local, remote, size):
        return self.sides[0].read(self.sides[1], local, remote, size)

    def expected(self, local, remote, size):
        found = np.zeros_like(self.mine)
        for mine, theirs in zip(local.tolist(), remote.tolist()):
            found[mine:][:size] = self.theirs[theirs:][:size]
        return found


@needs_nixl
@pytest.mark.parametrize(
    ("other", "options", "size", "path"),
    [
        (HERE, {}, 8 << 10, DirectTransfer),
        (HERE, {}, (8 << 10) - 8, StagedTransfer),
        (THERE, {}, 64 << 10, StagedTransfer),
        (THERE, {"direct_bytes": 1024}, 1024, DirectTransfer),
        (THERE, {"direct_bytes": "64 KiB"}, 1024, StagedTransfer),
        (HERE, {"direct_bytes": None}, 64 << 10, StagedTransfer),
        (HERE, {"digest": True}, 64 << 10, StagedTransfer),
    ],
)
def test_direct_path_is_used_if_faster(monkeypatch, other, options, size, path):
    told = iter([HERE, other, HERE, other])
    monkeypatch.setattr(Reach, "of_this", lambda: next(told))
    with Pair(1 << 20, **options) as pair:
        at = np.arange(0, 1 << 20, 128 << 10)
        move = pair.read(at, at[::-1], size)
        move.wait(10)
        assert type(move) is path
        assert (pair.mine == pair.expected(at, at[::-1], size)).all()


@needs_nixl
def test_long_block_lists_are_split_among_threads():
    """NIXL splits lists of at least 1,024 descriptors.

    Here, the lists have uneven lengths and a random order.
    """
    with Pair(24 << 20) as pair:
        for seed, count in enumerate((1023, 1024, 1025, 2901)):
            rng = np.random.default_rng(seed)
            local, remote = ((rng.permutation(3000)[:count] << 13) for _ in "12")
            pair.mine[:] = 0
            move = pair.read(local, remote, 8 << 10)
            move.wait(20)
            assert type(move) is DirectTransfer
            assert (pair.mine == pair.expected(local, remote, 8 << 10)).all()


@needs_nixl
def test_idle_agent_yields_the_core():
    """With NIXL's defaults, the threads of both agents would each occupy a core."""
    with Pair(1 << 20) as pair:
        pair.read(0, 0, 1 << 20).wait(10)
        begin = time.process_time()
        time.sleep(1)
        assert time.process_time() - begin < 0.2


@pytest.mark.parametrize("are_apart", [True, False])
def test_regions_end_at_allocation_boundaries(are_apart):
    """An RDMA registration must not span two allocations, even if they are adjacent."""
    mapped = mmap.mmap(-1, 2 << 12)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    apart = [
        torch.frombuffer(mapped, dtype=torch.uint8, count=1 << 12, offset=at) for at in (0, 1 << 12)
    ]
    halves = apart if are_apart else [whole[: 1 << 12], whole[1 << 12 :]]
    found = RegisteredMemory().add(Pages.over([each.view(4, 1 << 10) for each in halves]))
    begins = [each.begin - whole.data_ptr() for each in found]
    assert begins == ([0, 1 << 12] if are_apart else [0])


@pytest.mark.parametrize("num_regions", [0, 1, 3])
def test_fragments_must_lie_in_registered_regions(num_regions):
    """The expected results are computed with Python integers, which do not overflow."""
    rng = random.Random(num_regions)
    begins = np.array(sorted(rng.sample(range(1, 9), num_regions)), np.int64) * 1000
    ends = begins + 700
    seen = set()
    for _ in range(400):
        base, count = rng.choice([0, 0, 500, 2**62]), rng.randint(1, 3)
        bases = [base] * rng.randint(1, 2)
        near = [rng.randint(0, 9900) - base, 1000 - base, 1699 - base]
        offsets = [rng.choice([*near, 2**62]) for _ in range(count)]
        length = [rng.choice([1, 8, 700, 701, 2**60]) for _ in range(count)]
        spans = Spans(*(np.array(each, np.int64) for each in (bases, offsets, length)))

        def lie_within(regions, first, last):
            return any(b <= first and last <= e for b, e in regions)

        regions = list(zip(begins.tolist(), ends.tolist()))
        ranges = [(base + o, base + o + n) for o, n in zip(offsets, length)]
        if len(bases) > 1:  # all runs with the same base must lie in one region
            ranges = [(min(first for first, _ in ranges), max(last for _, last in ranges))]
        is_within = all(lie_within(regions, *each) for each in ranges)
        seen.add(is_within)
        if is_within:
            check_within(spans, begins, ends, "local")
        else:
            with pytest.raises(ValueError, match="expected bytes of one registered region"):
                check_within(spans, begins, ends, "local")
    assert seen == ({True, False} if num_regions else {False})


def test_overflowing_peer_addresses_are_rejected():
    """The end of the last run overflows, and all other runs lie outside the region."""
    begin, base = 2**46, 2**62
    offsets = np.array([begin - base] + [begin + 2**21 - base] * 64 + [2**62])
    spans = Spans(np.array([base, base]), offsets, np.full(66, 4096))
    with pytest.raises(ValueError, match="expected bytes of one registered region"):
        check_within(spans, np.array([begin]), np.array([begin + 2**20]), "the request")


def test_adjacent_fragments_are_disjoint_and_overlapping_are_not():
    rng = random.Random(0)
    seen = set()
    for _ in range(800):
        count = rng.randint(1, 4)
        bases = [rng.randint(0, 60) for _ in range(rng.choice([1, 1, 2, 3]))]
        offsets = [rng.randint(0, 40) for _ in range(count)]
        length = [rng.randint(1, 12) for _ in range(count)]
        touched = [b + o + i for b in bases for o, n in zip(offsets, length) for i in range(n)]
        is_apart = len(touched) == len(set(touched))
        seen.add((is_apart, len(bases) > 1))
        spans = Spans(*(np.array(each, np.int64) for each in (bases, offsets, length)))
        if is_apart:
            check_apart(spans, "local")
        else:
            with pytest.raises(ValueError, match="twice: expected each once"):
                check_apart(spans, "local")
    assert len(seen) == 4


def test_runs_are_merged_within_regions_of_both_sides():
    rng = random.Random(0)
    for _ in range(400):
        count = rng.randint(0, 6)
        length = np.array([rng.randint(1, 3) for _ in range(count)], np.int64)
        sides = []
        for _ in "12":
            gaps = np.array([rng.choice([0, 0, 0, 2]) for _ in range(count)], np.int64)
            sides.append(np.cumsum(gaps + np.concatenate([[0], length])[:count]))
        local = Spans.of(sides[0], length, "local")
        remote = local.beside(sides[1], "remote")
        borders = tuple(np.array(sorted(rng.sample(range(20), 2)), np.int64) for _ in "12")
        expected = []
        for mine, theirs, n in zip(*(each.tolist() for each in (*sides, length))):
            last = expected[-1] if expected else None
            if (
                last
                and (last[0] + last[2], last[1] + last[2]) == (mine, theirs)
                and mine not in borders[0]
                and theirs not in borders[1]
            ):
                last[2] += n
            else:
                expected.append([mine, theirs, n])
        got = joined(local, remote, borders)
        columns = [got[0].offsets, got[1].offsets, got[0].length]
        assert np.stack(columns, 1).tolist() == expected
        assert (got[1].length == got[0].length).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tcp", pytest.param("nixl", marks=needs_nixl)])
@pytest.mark.parametrize("num_pieces", [1, 3, 4, 5, 6, 7, 9, 14])
def test_pieces_arrive_in_order_at_slow_receiver(name, num_pieces):
    """Regression: pieces that had to wait for space were sent in the order of their staging memory."""
    piece = 1 << 20
    options = {"direct_bytes": None} if name == "nixl" else {}
    with Pair(num_pieces * piece, name, piece_bytes=piece, **options) as pair:
        pair.theirs[:] = np.repeat(np.arange(1, num_pieces + 1, dtype=np.uint8), piece)
        memory = pair.sides[0].transport.memory
        scatter = memory.scatter

        def slow_scatter(*args):
            time.sleep(0.02)
            scatter(*args)

        memory.scatter = slow_scatter
        pair.read(0, 0, num_pieces * piece).wait(30)
        assert (pair.mine == pair.theirs).all()


@needs_nixl
def test_close_ends_threads_after_a_failed_read(monkeypatch):
    """Regression: pieces in flight kept NIXL's agent and its threads alive."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    before = _threads()
    with Pair(64 << 20) as pair:
        _, incoming = pair.sides[0].transport._connections["b"]._flows
        incoming._say = lambda op, **values: None  # the receiver no longer frees space
        at = np.arange(0, 64 << 20, 4096)
        move = pair.read(at, at[::-1], 4096)
        time.sleep(0.05)
        pair.sides[1].transport.disconnect("a")
        with pytest.raises(TransferError):
            move.wait(20)
    _wait_for_ends_of_threads(before)


@needs_nixl
def test_close_while_a_piece_starts_ends_threads(monkeypatch):
    """Regression: a piece that was queued after the lane's close kept the agent alive until Python
    collected reference cycles.
    """
    before = _threads()
    gc.disable()
    try:
        with Pair(1 << 20, direct_bytes=None) as pair:
            lane = pair.sides[1].transport._connections["a"].lane
            start = lane._agent.begin

            def begin(*args):
                handle = start(*args)
                pair.sides[1].transport.disconnect("a")
                return handle

            monkeypatch.setattr(lane._agent, "begin", begin)
            move = pair.read(0, 0, 1 << 20)
            with pytest.raises(TransferError):
                move.wait(20)
            monkeypatch.undo()
        pair = lane = start = begin = move = None
        _wait_for_ends_of_threads(before)
    finally:
        gc.enable()


def _wait_for_ends_of_threads(before):
    """Wait until all threads that have started since `before` have ended."""
    deadline = time.monotonic() + 60
    while left := [name for task, name in _threads().items() if task not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _threads():
    """Return the names of this process's threads, keyed by their IDs."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found[task.name] = (task / "comm").read_text().strip()
    return found


@needs_nixl
@pytest.mark.parametrize("how", ["disconnect", "cancel", "close"])
@pytest.mark.parametrize("delay_ms", [4, 20])
def test_released_pages_are_not_written(monkeypatch, how, delay_ms):
    """Regression: NIXL reported that transfers of a removed peer had ended, but continued them."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # 64 MiB take about 0.1 s
    count, size = 4096, 16 << 10
    with Pair(count * size, direct_bytes=1024) as pair:
        pair.theirs[:] = 7
        at = np.random.default_rng(delay_ms).permutation(count) * size
        move = pair.read(at, np.arange(count) * size, size)
        time.sleep(delay_ms / 1000)
        if how == "disconnect":
            pair.sides[0].transport.disconnect("b")
        elif how == "cancel":
            move.cancel("for a test")
        else:
            pair.sides[0].transport.close()
        deadline = time.monotonic() + 10
        while not move.is_released:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        pair.mine[:] = 3
        time.sleep(0.2)
        assert (pair.mine == 3).all()
