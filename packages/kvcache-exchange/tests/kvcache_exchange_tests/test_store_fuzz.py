# SPDX-License-Identifier: Apache-2.0
"""Tests that stores with wrong results, full disks, and truncated or corrupted files cause only
misses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import resource
import subprocess
import threading
import time

import pytest

from kvcache import GroupSpec
from kvcache.allocator import check_invariants
from kvcache_exchange.store import BlockStore, DiskStore
from kvcache_lab_tests.test_replay import as_workload
from tests.machinery.shared import sampled
from tests.machinery.stores import MemoryStore, StoreUser, patient

FULL = GroupSpec("full_attention", 4)
MIXES = ([FULL], [FULL, GroupSpec("sliding_window", 4, {"window": 6}), GroupSpec("recurrent", 4)])
NONSENSE = (
    None, 3, "x", b"x", [None], [2**70], [-(2**70)], [1.5], [float("nan")], {}, object(), [[]],
    "kvcache-", ["\ud800"], [""], ["kvcache-" + "0" * 32 + "-99999-00"],
)  # fmt: skip
_STEP_S = 5.0  # time limit in seconds for an engine's call on a busy machine
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
)


class LyingStore(BlockStore):
    """A store whose calls may fail in any way or return any value.

    Calls that hang continue once `gate` is opened.
    """

    knows_keys = True

    def __init__(self, choose, rate):
        self.true, self.choose, self.rate = MemoryStore(60), choose, rate
        self.gate = threading.Event()
        self.lies = 0
        self.is_closed = False

    def _lies(self, *ways):
        """Return how the call misbehaves, or None if it succeeds. Any call may raise an exception
        or hang.
        """
        if self.choose.random() >= self.rate:
            return None
        self.lies += 1
        way = self.choose.choice(("raises", "slow", "nonsense", "endless", *ways))
        if way == "raises":
            raise self.choose.choice(
                (OSError("gone"), ValueError("x" * 9999), MemoryError(), KeyboardInterrupt(),
                 SystemExit(3), StopIteration(), RecursionError())
            )  # fmt: skip
        if way == "slow":
            self.gate.wait(
                self.choose.choice((0.01, 0.2, 30.0 if self.choose.random() < 0.2 else 0))
            )
        return way

    def _answer(self, way, answer):
        if way == "nonsense":
            return self.choose.choice(NONSENSE)
        if way == "endless":
            return itertools.repeat(self.choose.choice((True, 1, "x")))
        if way == "reordered":
            self.choose.shuffle(answer)
        elif way == "short":
            answer = answer[:-1]
        elif way == "long":
            answer = [*answer, *answer[:1]]
        return answer

    def open(self, memory, value_bytes):
        self._lies()
        self.true.open(memory, value_bytes)

    def exists(self, keys):
        way = self._lies("reordered", "short", "long", "all", "none")
        answer = self.true.exists(keys)
        answer = {"all": [True] * len(keys), "none": [False] * len(keys)}.get(way, answer)
        return self._answer(way, answer)

    def put(self, keys, values):
        way = self._lies("reordered", "short", "long", "only says so", "garbles", "wrong keys")
        if way == "only says so":
            return [True] * len(keys)
        if way == "garbles":
            values = [value.copy() for value in values]
            values[0][self.choose.randrange(len(values[0]))] ^= 1 << self.choose.randrange(8)
        if way == "wrong keys":
            values = values[1:] + values[:1]
        return self._answer(way, self.true.put(keys, values))

    def get(self, keys, values):
        way = self._lies(
            "reordered", "short", "long", "flips", "swaps", "other keys", "part", "sizes"
        )
        known = [*self.true.values]
        if way == "other keys" and known:
            keys = [self.choose.choice(known) for _ in keys]
        answer = self.true.get(keys, values)
        if way == "flips":
            value = self.choose.choice(values)
            value[self.choose.randrange(len(value))] ^= 1 << self.choose.randrange(8)
        elif way == "swaps":
            copies = [value.copy() for value in values]
            self.choose.shuffle(copies)
            for value, copy in zip(values, copies):
                value[:] = copy
        elif way == "part":
            values[-1][self.choose.randrange(len(values[-1])) :] = 0
        elif way == "sizes":
            answer = [self.choose.choice((size, 0, -1, -5, size + 1, size - 1)) for size in answer]
        return self._answer(way, answer)

    def remove(self, keys):
        if self._lies("keeps") != "keeps":
            self.true.remove(keys)

    def keys(self):
        way = self._lies("reordered", "short", "long")
        return self._answer(way, self.true.keys())

    def take_evicted(self):
        way = self._lies("reordered", "short", "long", "all")
        return self._answer(way, self.true.keys() if way == "all" else self.true.take_evicted())

    def close(self):
        self.is_closed = True


def timed(call, *arguments, **options):
    """Make a call, and check that it returns quickly without raising an exception."""
    begin = time.monotonic()
    answer = call(*arguments, **options)
    assert time.monotonic() - begin < _STEP_S
    return answer


def serve(user, choose, count, tick=lambda: None):
    """Serve requests with shared prefixes, and compare every token that is read."""
    families = [[choose.randrange(1000) for _ in range(60)] for _ in range(3)]
    for number in range(count):
        head = choose.choice(families)[: choose.randint(1, 50)]
        tail = [choose.randrange(1000) for _ in range(choose.randint(1, 8))]
        user.add(as_workload([[0]] * number + [[*head, *tail]])[-1])
        for _ in range(choose.randint(1, 4)):
            tick()
            timed(user.step, chunk=choose.choice([8, 16, 64]))
            for each in [*user.running.values()]:
                if not each.num_left and choose.random() < 0.7:
                    user.finish(each)
            if user.receiving and choose.random() < 0.1:
                timed(user.cancel, choose.choice([*user.receiving.values()]))
            if user.running and choose.random() < 0.05:
                blocks = user.manager.block_ids(choose.choice([*user.running.values()]).request, 0)
                user.restart(timed(user.tier.invalidate, blocks[blocks > 0][-2:]))
            if choose.random() < 0.1:
                user.manager.cache.reset()
    user.run()
    check_invariants(user.manager)


@pytest.mark.parametrize("seed", sampled(range(40), 5))
def test_incorrect_store_results_cause_no_wrong_hit_hang_or_error(seed):
    choose = random.Random(seed)
    store = LyingStore(choose, choose.choice([0.1, 0.3, 0.7, 1.0]))
    groups = MIXES[seed % len(MIXES)]
    user = StoreUser(
        store, groups, num_blocks=30 * len(groups), circuit=patient(), timeout_s=0.05,
        num_host_blocks=choose.choice([0, 40]) * len(groups), host_write="through",
    )  # fmt: skip
    serve(user, choose, 25)
    store.rate = 0
    store.gate.set()  # let hanging calls return
    user.end()
    assert store.lies


# Disks --------------------------------------------------------------------------------------------------


def disk_user(folder, choose, groups=MIXES[0]):
    return StoreUser(
        DiskStore(folder, "300KiB"), groups, num_blocks=30 * len(groups), circuit=patient()
    )


@needs_nixl
@pytest.mark.parametrize("seed", sampled(range(40), 6))
def test_damaged_disk_file_never_causes_a_wrong_hit(seed, tmp_path):
    """The file is damaged while a store has it open, and also between two engines: bits are
    flipped, the end is truncated, holes are punched, and old copies are restored.
    """
    choose = random.Random(seed)
    path = tmp_path / "blocks.kv"
    copies = []

    def damage():
        if not path.exists() or choose.random() < 0.5:
            return
        content = path.read_bytes()
        size = len(content)
        how = choose.choice(("flip", "flip", "flip", "tear", "hole", "copy", "restore", "shift"))
        at = choose.randrange(max(size, 1))
        with path.open("r+b") as file:
            if how == "tear":
                file.truncate(at)
            elif how == "copy":
                copies.append(content)
            elif how == "restore" and copies:  # restore contents from an earlier time
                file.write(choose.choice(copies))
            elif size:
                file.seek(at)
                file.write({
                    "flip": bytes([content[at] ^ 1 << choose.randrange(8)]),
                    "hole": bytes(min(5000, size - at)),
                    "shift": content[: size - at],
                }.get(how, b""))  # fmt: skip

    for _ in range(3):
        user = disk_user(tmp_path, choose)
        serve(user, choose, 12, damage)
        user.end()
        damage()


@contextlib.contextmanager
def small_disk(folder):
    """Limit a folder to 128 KiB by mounting a small disk or, if none can be mounted, by a file size
    limit.
    """
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode == 0:
        try:
            yield "a small disk"
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, before[1]))  # Python ignores SIGXFSZ
    try:
        yield "a limit of file sizes"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs_nixl
@pytest.mark.parametrize("seed", [1, 2])
def test_full_disk_stores_nothing_more_and_returns_no_wrong_values(seed, tmp_path):
    choose = random.Random(seed)
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    with small_disk(folder) as what:
        print(what)
        for _ in range(2):
            user = disk_user(folder, choose)
            serve(user, choose, 15)
            stats = user.tier.stats
            assert stats.errors + stats.refused_blocks > 0, stats
            user.end()


@needs_nixl
def test_failing_system_calls_of_a_disk_are_misses(tmp_path, monkeypatch):
    choose = random.Random(3)
    user = disk_user(tmp_path, choose)
    for name in ("pwrite", "pread", "ftruncate", "statvfs", "fstat"):
        real = getattr(os, name)

        def fails(*arguments, real=real):
            if threading.current_thread().name == "kvcache store" and choose.random() < 0.5:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, name, fails)
    serve(user, choose, 15)
    monkeypatch.undo()
    user.end()
