# SPDX-License-Identifier: Apache-2.0
"""Block stores on a local disk (NIXL's POSIX plug-in) and in Mooncake Store, with the real backends.

Full disks, and truncated or corrupted files, cause only misses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest

from kvcache import GroupSpec
from kvcache_exchange.store import Circuit, DiskStore, MooncakeStore, StoreError, open_store
from tests.machinery import mooncake_master
from tests.machinery.shared import sampled
from tests.machinery.stores import MemoryStore, StoreUser, patient

VALUE_BYTES = 5000
NUM_KILLS = 3
FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 6})
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
)
needs_mooncake = pytest.mark.skipif(
    not mooncake_master.is_installed(), reason="Mooncake is not installed"
)
ENGINES = [
    "memory",
    pytest.param("disk", marks=needs_nixl),
    pytest.param("mooncake", marks=needs_mooncake),
]


@pytest.fixture(scope="module")
def master():
    with mooncake_master.Master() as master:
        yield master


class Opened:
    """A store and its memory, which contains one value per row."""

    def __init__(self, store, num_values=3000, value_bytes=VALUE_BYTES):
        self.store = store
        stride = -(-value_bytes // 64) * 64
        self.memory = np.zeros(num_values * stride, np.uint8)
        self.rows = self.memory.reshape(num_values, stride)[:, :value_bytes]
        store.open(self.memory, value_bytes)

    def values(self, *rows):
        return [self.rows[row] for row in rows]

    def fill(self, *rows):
        for row in rows:
            self.rows[row] = np.random.default_rng(row).integers(0, 256, self.rows.shape[1])


@pytest.fixture(params=ENGINES)
def opened(request, tmp_path):
    if request.param == "memory":
        store = MemoryStore()
    elif request.param == "disk":
        store = DiskStore(tmp_path / "new" / "folder", "64MiB")
    else:
        store = MooncakeStore(request.getfixturevalue("master").address, segment_bytes="64MiB")
    yield Opened(store)
    store.close()


@pytest.fixture
def disk(tmp_path):
    """Open stores in the folder, and close each before the next one and at the end."""
    made = []

    def make(capacity="1MiB", folder=tmp_path, **options):
        close()
        made.append(Opened(DiskStore(folder, capacity), **options))
        return made[-1]

    def close():
        for each in made:
            each.store.close()

    yield make
    close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mooncake://", "expected mooncake://HOST:PORT"),
        ("mooncake://master", "expected mooncake://HOST:PORT"),
        ("mooncake://master:99999", "expected mooncake://HOST:PORT"),
        ("mooncake://a@master:1", "expected mooncake://HOST:PORT"),
        ("mooncake://master:1/path", "expected mooncake://HOST:PORT"),
        ("mooncake://master:1?hosts=", "with hosts: expected host, protocol, devices, metadata"),
    ],
)
def test_invalid_url_of_a_mooncake_store_is_rejected(url, expected):
    with pytest.raises(ValueError, match=re.escape(f"place is '{url}'") + ".*" + expected):
        open_store(url)


def test_stored_values_are_read_back(opened):
    store, keys = opened.store, [f"a {i}" for i in range(2500)]
    opened.fill(*range(2500))
    expected = opened.rows[:2500].copy()
    assert store.exists(keys) == [False] * 2500
    assert all(store.put(keys, opened.values(*range(2500))))
    assert store.exists([*keys, "b"]) == [True] * 2500 + [False]
    opened.rows[:] = 0
    sizes = store.get([*keys, "b"], opened.values(*range(2501)))
    assert sizes == [VALUE_BYTES] * 2500 + [-1]
    assert np.array_equal(opened.rows[:2500], expected) and not opened.rows[2500].any()


def test_removed_value_is_not_found(opened):
    opened.fill(0, 1)
    assert opened.store.put(["c", "d"], opened.values(0, 1)) == [True, True]
    opened.store.remove(["c", "e"])
    assert opened.store.exists(["c", "d", "e"]) == [False, True, False]
    assert opened.store.get(["c", "d"], opened.values(2, 3)) == [-1, VALUE_BYTES]
    assert np.array_equal(opened.rows[3], opened.rows[1])


@contextlib.contextmanager
def failing_moves(store, is_failing, error=RuntimeError):
    """Make NIXL fail if `is_failing` says so of an operation and its positions."""
    move = store._move

    def moves(operation, values, places, entries=()):
        if is_failing(operation, places):
            raise error("NIXL_ERR_BACKEND")
        move(operation, values, places, entries)

    store._move = moves
    yield
    store._move = move


@needs_nixl
def test_least_recently_used_value_is_evicted_first(tmp_path, disk):
    opened = disk(4096 + 3 * 8192)
    store = opened.store
    opened.fill(0, 1, 2, 3)
    assert store.capacity == 3
    assert store.put(["a", "b", "c"], opened.values(0, 1, 2)) == [True] * 3
    assert store.get(["a"], opened.values(9)) == [VALUE_BYTES]
    assert store.put(["d"], opened.values(3)) == [True]
    assert (store.take_evicted(), store.keys()) == (["b"], ["c", "a", "d"])
    assert os.path.getsize(tmp_path / "blocks.kv") == 4096 + 3 * 8192
    assert store.put([*"efgh"], opened.values(0, 1, 2, 3)) == [True, True, True, False]
    assert sorted(store.take_evicted()) == ["a", "c", "d"]


@needs_nixl
def test_blocks_survive_a_restart(disk):
    opened = disk()
    opened.fill(*range(5))
    opened.store.put([*"abcde"], opened.values(*range(5)))
    opened.store.remove(["b"])
    again = disk()
    assert again.store.keys() == [*"acde"]
    sizes = again.store.get([*"abcde"], again.values(*range(5)))
    assert sizes == [VALUE_BYTES, -1, VALUE_BYTES, VALUE_BYTES, VALUE_BYTES]
    again.rows[1] = opened.rows[1]
    assert np.array_equal(again.rows[:5], opened.rows[:5])
    assert len(disk(4096 + 3 * 8192).store.keys()) <= 3


@needs_nixl
def test_values_of_another_size_replace_earlier_values(disk, caplog):
    opened = disk()
    opened.store.put(["a"], opened.values(0))
    assert disk(value_bytes=6000).store.keys() == []
    assert "contains blocks in another format, which are replaced" in caplog.text


@needs_nixl
def test_full_disk_stores_nothing_more(disk, monkeypatch):
    opened = disk()
    opened.fill(0)
    assert opened.store.put(["a"], opened.values(0)) == [True]
    with failing_moves(opened.store, lambda operation, _: operation == "WRITE"):
        with pytest.raises(RuntimeError):
            opened.store.put(["b"], opened.values(1))
        full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda folder: full)
        assert opened.store.put(["b", "c"], opened.values(1, 2)) == [False, False]
        assert opened.store.get(["a"], opened.values(3)) == [VALUE_BYTES]
        assert opened.store.exists([*"abc"]) == [True, False, False]
        assert opened.store.put(["a"], opened.values(2)) == [False]
        assert (opened.store.take_evicted(), opened.store.keys()) == (["a"], [])


@needs_nixl
@pytest.mark.parametrize("header", [b"[" * 4096, b"\xff" * 4096, b"{}", b""])
def test_meaningless_header_is_replaced(tmp_path, disk, header):
    opened = disk()
    opened.store.put(["a"], opened.values(0))
    opened.store.close()
    path = tmp_path / "blocks.kv"
    path.write_bytes(header + path.read_bytes()[len(header) :] if header else b"")
    again = disk()
    assert again.store.put(["b"], again.values(0)) == [True]
    assert disk().store.exists(["b"]) == [True]


def refused_folder(tmp_path, how):
    """Create a folder that is not private to this user, or a folder that contains such a file."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    file = folder / "blocks.kv"
    if how == "a link to a folder":
        link = tmp_path / "link"
        link.symlink_to(folder)
        return link
    if how == "a file":
        file.touch()
        return file
    if how in ("a folder of another user", "a folder that others write to"):
        os.chown(folder, 12345, -1) if "user" in how else folder.chmod(0o1777)
        return folder
    if how == "a link to a file":
        file.symlink_to(tmp_path / "secret")
    elif how == "a pipe":
        os.mkfifo(file, 0o600)
    else:
        file.touch(mode=0o600)
        if how == "a file of another user":
            os.chown(file, 12345, -1)
        elif how == "a file that others write to":
            file.chmod(0o660)
        else:
            os.link(file, tmp_path / "other")
    return folder


@needs_nixl
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a link to a folder", "is a link or not a folder: expected a folder"),
        ("a file", "is a link or not a folder: expected a folder"),
        ("a folder of another user", "belongs to user 12345: expected"),
        ("a folder that others write to", "has mode 1777: expected a mode in which only its owner"),
        ("a link to a file", "blocks.kv is a link: expected a file"),
        ("a file of another user", "blocks.kv' belongs to user 12345: expected"),
        (
            "a file that others write to",
            "blocks.kv' has mode 660: expected a mode in which only its owner",
        ),
        ("a file of two names", "or has 2 hard links: expected a file with one link"),
        ("a pipe", "is not a regular file, or has 1 hard links"),
    ],
)
def test_folder_not_private_to_this_user_is_rejected(tmp_path, how, message):
    if "another user" in how and os.geteuid() != 0:
        pytest.skip("only root can change the owner of a file")
    folder = refused_folder(tmp_path, how)
    with pytest.raises(StoreError, match=message):
        Opened(DiskStore(folder, "1MiB"))
    assert not (tmp_path / "secret").exists()


@needs_nixl
def test_new_folders_and_their_parents_are_private_to_this_user(tmp_path, disk):
    before = os.umask(0)
    try:
        disk(folder=tmp_path / "a" / "b")
    finally:
        os.umask(before)
    modes = [oct((tmp_path / each).stat().st_mode)[-3:] for each in ("a", "a/b", "a/b/blocks.kv")]
    assert modes == ["700", "700", "600"]


@needs_nixl
def test_folder_can_be_used_by_only_one_store(tmp_path, disk):
    disk()
    with pytest.raises(StoreError, match="is in use by another store"):
        Opened(DiskStore(tmp_path, "1MiB"))
    disk()  # after the first one was closed


@needs_nixl
def test_insufficient_capacity_and_long_keys_are_reported(tmp_path, disk):
    with pytest.raises(StoreError, match="capacity_bytes is 9000: expected 12288 or more"):
        Opened(DiskStore(tmp_path, 9000))
    opened = disk()
    with pytest.raises(StoreError, match="keys has a key of 300 bytes: expected at most 207"):
        opened.store.put(["a", "b" * 300], opened.values(0, 1))
    assert opened.store.exists(["a"]) == [False]


@needs_nixl
@pytest.mark.parametrize("lost", [[0], [3], [1, 5], [*range(6)]])
def test_unreadable_values_are_missing_and_can_be_stored_again(disk, lost):
    keys, opened = [*"abcdef"], disk()
    store = opened.store
    opened.fill(*range(6))
    assert all(store.put(keys, opened.values(*range(6))))
    bad = {store._places[keys[i]] for i in lost}
    with failing_moves(store, lambda what, places: what == "READ" and bad.intersection(places)):
        expected = [-1 if i in lost else VALUE_BYTES for i in range(6)]
        assert store.get(keys, opened.values(*range(10, 16))) == expected
        assert store.exists(keys) == [size > 0 for size in expected]
        assert store.take_evicted() == [keys[i] for i in lost]
        assert all(store.put(keys, opened.values(*range(6))))
        assert store.get(keys, opened.values(*range(10, 16))) == [VALUE_BYTES] * 6
        assert np.array_equal(opened.rows[10:16], opened.rows[:6])
        assert store.get([keys[lost[0]]], opened.values(9)) == [VALUE_BYTES]


@needs_nixl
def test_nothing_is_dropped_while_the_file_system_fails(disk, monkeypatch):
    opened = disk()
    assert opened.store.put(["a", "b"], opened.values(0, 1)) == [True, True]
    with monkeypatch.context() as patches, failing_moves(opened.store, lambda *_: True, OSError):
        patches.setattr(os, "stat", lambda *_: opened.store._move(None, None, None))
        with pytest.raises(OSError, match="NIXL_ERR_BACKEND"):
            opened.store.get(["a", "b"], opened.values(2, 3))
    assert opened.store.get(["a", "b"], opened.values(2, 3)) == [VALUE_BYTES] * 2


@needs_nixl
def test_value_that_cannot_be_written_is_refused_alone(disk):
    opened = disk()
    with failing_moves(opened.store, lambda what, places: what == "WRITE" and 1 in places):
        assert opened.store.put([*"abc"], opened.values(0, 1, 2)) == [True, False, True]
        # These are stored at other positions.
        assert opened.store.put([*"bd"], opened.values(3, 4)) == [True, True]
        assert opened.store.exists([*"abcd"]) == [True] * 4


def disk_user(folder, capacity="300KiB", groups=(FULL,), **options):
    store = DiskStore(folder, capacity)
    return StoreUser(store, [*groups], num_blocks=30 * len(groups), circuit=patient(), **options)


@needs_nixl
@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW, GroupSpec("recurrent", 4)]])
def test_engine_works_with_a_disk_that_is_too_small(tmp_path, groups):
    choose, num_loaded = random.Random(1), 0
    for _ in range(3):  # each engine starts with the store of the previous engine
        user = disk_user(tmp_path, "170KiB", groups)
        user.run([*range(30)])
        user.serve(choose, 40, invalidate=0, new_weights=0)
        user.run([*range(30)])
        user.settle()
        assert len(user.told) == user.store.capacity - len(user.store._free)
        user.end()
        num_loaded += user.tier.stats.loaded_blocks
    assert num_loaded > 0 and user.tier.stats.evicted_blocks > 0
    assert user.tier.stats.errors == user.tier.stats.corrupt_blocks == 0


@needs_nixl
@pytest.mark.parametrize("seed", sampled(range(40), 6))
def test_damaged_disk_file_never_causes_a_wrong_hit(seed, tmp_path):
    """The file is damaged while a store has it open, and also between two engines: bits are
    flipped, the end is truncated, holes are punched, and old copies are restored.
    """
    choose, path, copies = random.Random(seed), tmp_path / "blocks.kv", []

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
        user = disk_user(tmp_path)
        user.serve(choose, 12, before_step=damage, new_weights=0)
        user.run()
        user.end()
        damage()


@needs_nixl
def test_failing_disk_causes_only_misses(tmp_path, monkeypatch):
    choose = random.Random(3)

    def fails(real, *arguments):
        if threading.current_thread().name == "kvcache store" and choose.random() < 0.5:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    for _ in range(2):
        user = disk_user(tmp_path / "disk")
        for name in ("pwrite", "pread", "ftruncate", "statvfs", "fstat"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *given, real=real: fails(real, *given))
        user.serve(choose, 15, new_weights=0)
        user.run()
        monkeypatch.undo()
        assert user.tier.stats.errors + user.tier.stats.refused_blocks > 0, user.tier.stats
        user.end()


@needs_mooncake
def test_engine_continues_while_the_master_is_down_and_finds_it_again():
    """The master is down at first, and is killed and restarted three times."""
    choose = random.Random(2)
    with mooncake_master.Master() as master:
        master.kill()
        store = MooncakeStore(master.address, segment_bytes="64MiB")
        circuit = Circuit(num_failures=2, retry_s=0.1, max_retry_s=0.3)
        user = StoreUser(store, [FULL, WINDOW], num_blocks=80, timeout_s=0.5, circuit=circuit)

        def serve():
            user.manager.cache.reset()
            user.serve(choose, 12, invalidate=0, cancel=0, new_weights=0)
            user.run([*range(30)], timeout_s=20)
            user.manager.cache.reset()

        def loads_something():
            before, deadline = user.tier.stats.loaded_blocks, time.monotonic() + 60
            while user.tier.stats.loaded_blocks == before:
                assert time.monotonic() < deadline, user.tier.stats
                serve()

        serve()
        for _ in range(NUM_KILLS):
            master.start()
            loads_something()
            master.kill()
            errors = user.tier.stats.errors
            serve()
            assert user.tier.stats.errors > errors
            loaded = user.tier.stats.loaded_blocks
            serve()  # without the store, and without delays
            assert user.tier.stats.loaded_blocks == loaded
        master.start()
        loads_something()
        user.settle()
        user.end()


@needs_mooncake
def test_engine_continues_while_the_master_hangs_during_the_set_up():
    """The engine makes steps as long as the set-up lasts. With the GIL held, it would make none."""
    with mooncake_master.Master() as master:
        store = MooncakeStore(master.address)
        master.process.send_signal(signal.SIGSTOP)
        ended, found = threading.Event(), []

        def open_store():
            try:
                store.open(np.zeros(4096, np.uint8), 4096)
            except StoreError as error:
                found.append(error)
            ended.set()

        thread = threading.Thread(target=open_store)
        thread.start()
        num_steps = 0
        while not ended.wait(0.001):
            num_steps += 1
        thread.join()
        assert len(found) == 1 and "does not answer" in str(found[0]) and num_steps > 100
        master.process.send_signal(signal.SIGCONT)
        store.open(np.zeros(4096, np.uint8), 4096)
        store.close()


@needs_mooncake
def test_unreadable_value_in_mooncake_is_stored_again(master, monkeypatch):
    store = MooncakeStore(master.address, segment_bytes="64MiB")
    opened, keys = Opened(store, 9), ["unreadable", "readable"]
    opened.fill(0, 1, 2)
    assert store.put(keys, opened.values(0, 1)) == [True, True]
    client = store._client

    class Failing:
        def __getattr__(self, name):
            return getattr(client, name)

        def batch_get_into(self, some, *others):
            client.batch_get_into(some, *others)
            return [-800 if key == "unreadable" else VALUE_BYTES for key in some]

    store._client = Failing()
    assert store.get(keys, opened.values(3, 4)) == [-1, VALUE_BYTES]
    assert store.exists(keys) == [False, True]
    assert store.get(keys[:1], opened.values(3)) == [-1]
    store._client = client
    assert store.put(keys[:1], opened.values(2)) == [True]
    assert store.get(keys, opened.values(3, 4)) == [VALUE_BYTES] * 2
    assert np.array_equal(opened.rows[3:5], opened.rows[[2, 1]])
    store.close()
