# SPDX-License-Identifier: Apache-2.0
"""Tests of block stores on a local disk (NIXL's POSIX plug-in) and in Mooncake Store, with the real
backends.
"""

from __future__ import annotations

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
from kvcache.events import BlockRemoved
from kvcache_exchange.store import Circuit, DiskStore, MooncakeStore, StoreError, open_store
from kvcache_lab_tests.test_replay import as_workload
from tests.machinery import mooncake_master
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
        master = request.getfixturevalue("master")
        store = MooncakeStore(master.address, segment_bytes="64MiB")
    yield Opened(store)
    store.close()


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


@needs_mooncake
def test_url_of_a_mooncake_store_sets_its_options(master):
    store = open_store(f"mooncake://{master.address}?protocol=tcp", "64MiB")
    opened = Opened(store, 1)
    opened.fill(0)
    assert store.put(["url"], opened.values(0)) == [True]
    store.close()


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


def test_empty_batch_makes_no_call(opened):
    assert opened.store.exists([]) == opened.store.put([], []) == opened.store.get([], []) == []


def prompts(*tokens):
    return as_workload(tokens)


def serve(user, number, choose, families):
    """Serve `number` more requests, and run several steps after each request."""
    for _ in range(number):
        head = choose.choice(families)[: choose.randint(8, 50)]
        user.add(prompts([*head, choose.randrange(1000)])[0])
        user.waiting[-1].request = type(user.waiting[-1].request)(
            f"r{user.num_finished}-{choose.random()}", user.waiting[-1].item.token_ids
        )
        for _ in range(3):
            user.step()
            for each in [*user.running.values()]:
                if not each.num_left:
                    user.finish(each)
    user.run()


# NIXL's POSIX plug-in -----------------------------------------------------------------------------------


@needs_nixl
def test_least_recently_used_value_is_evicted_first(tmp_path):
    opened = Opened(DiskStore(tmp_path, 4096 + 3 * 8192))
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
    store.close()


@needs_nixl
def test_blocks_survive_a_restart(tmp_path):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    opened.fill(*range(5))
    opened.store.put([*"abcde"], opened.values(*range(5)))
    opened.store.remove(["b"])
    opened.store.close()
    again = Opened(DiskStore(tmp_path, "1MiB"))
    assert again.store.keys() == [*"acde"]
    assert again.store.get([*"abcde"], again.values(*range(5))) == [
        VALUE_BYTES, -1, VALUE_BYTES, VALUE_BYTES, VALUE_BYTES,
    ]  # fmt: skip
    again.rows[1] = opened.rows[1]
    assert np.array_equal(again.rows[:5], opened.rows[:5])
    again.store.close()
    smaller = Opened(DiskStore(tmp_path, 4096 + 3 * 8192))
    assert len(smaller.store.keys()) <= 3
    smaller.store.close()


@needs_nixl
def test_values_of_another_size_replace_earlier_values(tmp_path, caplog):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    opened.store.put(["a"], opened.values(0))
    opened.store.close()
    other = Opened(DiskStore(tmp_path, "1MiB"), value_bytes=6000)
    assert other.store.keys() == []
    assert "contains blocks in another format, which are replaced" in caplog.text
    other.store.close()


@needs_nixl
def test_full_disk_stores_nothing_more(tmp_path, monkeypatch):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    opened.fill(0)
    assert opened.store.put(["a"], opened.values(0)) == [True]
    move = opened.store._move

    def fails(operation, *arguments):
        if operation == "WRITE":
            raise RuntimeError("NIXL_ERR_BACKEND")
        move(operation, *arguments)

    monkeypatch.setattr(opened.store, "_move", fails)
    with pytest.raises(RuntimeError):
        opened.store.put(["b"], opened.values(1))
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    assert opened.store.put(["b", "c"], opened.values(1, 2)) == [False, False]
    assert opened.store.get(["a"], opened.values(3)) == [VALUE_BYTES]
    assert opened.store.exists([*"abc"]) == [True, False, False]
    assert opened.store.put(["a"], opened.values(2)) == [False]
    assert (opened.store.take_evicted(), opened.store.keys()) == (["a"], [])
    opened.store.close()


@needs_nixl
@pytest.mark.parametrize("header", [b"[" * 4096, b"\xff" * 4096, b"{}", b""])
def test_meaningless_header_is_replaced(tmp_path, header):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    opened.store.put(["a"], opened.values(0))
    opened.store.close()
    path = tmp_path / "blocks.kv"
    path.write_bytes(header + path.read_bytes()[len(header) :] if header else b"")
    again = Opened(DiskStore(tmp_path, "1MiB"))
    assert again.store.put(["b"], again.values(0)) == [True]
    again.store.close()
    third = Opened(DiskStore(tmp_path, "1MiB"))
    assert third.store.exists(["b"]) == [True]
    third.store.close()


@needs_nixl
def test_repeated_key_in_one_put_stores_the_last_value_once(tmp_path):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    opened.fill(0, 1, 2)
    capacity = opened.store.capacity
    assert opened.store.put(["a", "b", "a"], opened.values(0, 1, 2)) == [True] * 3
    assert opened.store.capacity == capacity and opened.store.keys() == ["a", "b"]
    assert opened.store.get(["a"], opened.values(9)) == [VALUE_BYTES]
    assert np.array_equal(opened.rows[9], opened.rows[2])
    opened.store.close()


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
def test_new_folders_and_their_parents_are_private_to_this_user(tmp_path):
    before = os.umask(0)
    try:
        Opened(DiskStore(tmp_path / "a" / "b", "1MiB")).store.close()
    finally:
        os.umask(before)
    assert [oct((tmp_path / each).stat().st_mode)[-3:] for each in ("a", "a/b", "a/b/blocks.kv")] == [
        "700", "700", "600"
    ]  # fmt: skip


@needs_nixl
def test_folder_can_be_used_by_only_one_store(tmp_path):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    with pytest.raises(StoreError, match="is in use by another store"):
        Opened(DiskStore(tmp_path, "1MiB"))
    opened.store.close()
    Opened(DiskStore(tmp_path, "1MiB")).store.close()


@needs_nixl
def test_insufficient_capacity_and_long_keys_are_reported(tmp_path):
    with pytest.raises(StoreError, match="capacity_bytes is 9000: expected 12288 or more"):
        Opened(DiskStore(tmp_path, 9000))
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    with pytest.raises(StoreError, match="keys has a key of 300 bytes: expected at most 207"):
        opened.store.put(["a", "b" * 300], opened.values(0, 1))
    assert opened.store.exists(["a"]) == [False]
    opened.store.close()


@needs_nixl
@pytest.mark.parametrize("damage", ["truncated", "garbled", "entry"])
def test_damaged_file_is_a_miss(tmp_path, damage):
    def make():
        return StoreUser(DiskStore(tmp_path, "1MiB"), [FULL], circuit=patient())

    user = make()
    user.run(*prompts([*range(30)]))
    user.settle()
    user.end()
    path = tmp_path / "blocks.kv"
    if damage == "truncated":
        os.truncate(path, 4096 + 8192 + 50)
    else:
        content = bytearray(path.read_bytes())
        step = 300 if damage == "garbled" else 4096
        for at in range(4096 + 5, len(content), step):
            content[at] ^= 1
        path.write_bytes(content)
    again = make()
    again.run(*prompts([*range(30)]))
    assert again.num_finished == 1 and again.num_loaded < 28
    again.settle()
    again.end()
    third = make()
    third.run(*prompts([*range(30)]))
    assert third.num_loaded == 28
    third.end()


@needs_nixl
@pytest.mark.parametrize("lost", [[0], [3], [1, 5], [*range(6)]])
def test_unreadable_values_are_missing_and_can_be_stored_again(tmp_path, monkeypatch, lost):
    keys, opened = [*"abcdef"], Opened(DiskStore(tmp_path, "1MiB"))
    store, move = opened.store, opened.store._move
    opened.fill(*range(6))
    assert all(store.put(keys, opened.values(*range(6))))
    bad = {store._places[keys[i]] for i in lost}

    def fails(operation, values, places, entries=()):
        if operation == "READ" and bad.intersection(places):
            raise RuntimeError("NIXL_ERR_BACKEND")
        move(operation, values, places, entries)

    monkeypatch.setattr(store, "_move", fails)
    expected = [-1 if i in lost else VALUE_BYTES for i in range(6)]
    assert store.get(keys, opened.values(*range(10, 16))) == expected
    assert store.exists(keys) == [size > 0 for size in expected]
    assert store.take_evicted() == [keys[i] for i in lost]
    assert all(store.put(keys, opened.values(*range(6))))
    assert store.get(keys, opened.values(*range(10, 16))) == [VALUE_BYTES] * 6
    assert np.array_equal(opened.rows[10:16], opened.rows[:6])
    assert store.get([keys[lost[0]]], opened.values(9)) == [VALUE_BYTES]
    store.close()


@needs_nixl
def test_nothing_is_dropped_while_the_file_system_fails(tmp_path, monkeypatch):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    store = opened.store
    assert store.put(["a", "b"], opened.values(0, 1)) == [True, True]

    def fails(*_):
        raise OSError("Transport endpoint is not connected")

    with monkeypatch.context() as patches:
        patches.setattr(store, "_move", fails)
        patches.setattr(os, "stat", fails)
        with pytest.raises(OSError, match="not connected"):
            store.get(["a", "b"], opened.values(2, 3))
    assert store.get(["a", "b"], opened.values(2, 3)) == [VALUE_BYTES] * 2
    store.close()


@needs_nixl
def test_value_that_cannot_be_written_is_refused_alone(tmp_path, monkeypatch):
    opened = Opened(DiskStore(tmp_path, "1MiB"))
    store, move = opened.store, opened.store._move

    def fails(operation, values, places, entries=()):
        if operation == "WRITE" and 1 in places:
            raise RuntimeError("NIXL_ERR_BACKEND")
        move(operation, values, places, entries)

    monkeypatch.setattr(store, "_move", fails)
    assert store.put([*"abc"], opened.values(0, 1, 2)) == [True, False, True]
    assert store.put([*"bd"], opened.values(3, 4)) == [True, True]  # at other positions
    assert store.exists([*"abcd"]) == [True] * 4
    store.close()


@needs_nixl
def test_opening_reads_only_positions_that_were_in_use(tmp_path, monkeypatch):
    """A file of 20 GiB has 2,621,440 positions."""
    opened, read, calls = Opened(DiskStore(tmp_path, "20GiB")), os.pread, []
    assert opened.store.put(["a", "b"], opened.values(0, 1)) == [True, True]
    assert os.path.getsize(tmp_path / "blocks.kv") == 4096 + 2 * 8192
    opened.store.close()
    monkeypatch.setattr(os, "pread", lambda *each: calls.append(each) or read(*each))
    again = Opened(DiskStore(tmp_path, "20GiB"))
    assert again.store.keys() == ["a", "b"] and again.store.capacity == 2_621_439
    assert len(calls) == 3  # the file's header and two entries
    again.store.remove(["b"])  # the last value
    assert os.path.getsize(tmp_path / "blocks.kv") == 4096 + 8192
    again.store.close()


@needs_nixl
@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW, GroupSpec("recurrent", 4)]])
def test_engine_works_with_a_disk_that_is_too_small(tmp_path, groups):
    choose = random.Random(1)
    families = [[choose.randrange(1000) for _ in range(60)] for _ in range(4)]
    num_loaded = 0  # the number of blocks that are loaded in time depends on the machine
    for _ in range(3):  # each engine starts with the store of the previous engine
        user = StoreUser(DiskStore(tmp_path, "170KiB"), groups, num_blocks=40 * len(groups))
        for _ in range(8):
            serve(user, 8, choose, families)
            user.manager.cache.reset()
        user.settle()
        told = set()
        for event in user.events:
            if event.medium == "storage":
                each = {(event.group, block_hash.tobytes()) for block_hash in event.block_hashes}
                told = told - each if isinstance(event, BlockRemoved) else told | each
        assert len(told) == user.store.capacity - len(user.store._free)
        user.end()
        num_loaded += user.tier.stats.loaded_blocks
    assert num_loaded > 20 and user.tier.stats.evicted_blocks > 0
    assert user.tier.stats.errors == user.tier.stats.corrupt_blocks == 0


# Mooncake Store -----------------------------------------------------------------------------------------


@needs_mooncake
def test_blocks_are_loaded_from_mooncake_by_another_engine(master):
    groups = [FULL, WINDOW]
    one = StoreUser(MooncakeStore(master.address, segment_bytes="64MiB"), groups, model="mooncake")
    one.run(*prompts([*range(30)]))
    one.settle()
    other = StoreUser(MooncakeStore(master.address), groups, model="mooncake")
    other.run(*prompts([*range(30)]))
    assert other.num_loaded == 28, other.tier.stats
    other.end()
    one.end()


@needs_mooncake
def test_engine_continues_while_the_master_is_restarted():
    choose = random.Random(2)
    families = [[choose.randrange(1000) for _ in range(60)] for _ in range(4)]
    with mooncake_master.Master() as master:
        store = MooncakeStore(master.address, segment_bytes="64MiB")
        circuit = Circuit(num_failures=2, retry_s=0.1, max_retry_s=0.3)
        user = StoreUser(store, [FULL, WINDOW], num_blocks=80, timeout_s=0.5, circuit=circuit)

        def loads_something(num_requests=12):
            before = user.tier.stats.loaded_blocks
            for _ in range(200):
                user.manager.cache.reset()
                serve(user, num_requests, choose, families)
                if user.tier.stats.loaded_blocks > before:
                    return True
                time.sleep(0.1)
            return False

        assert loads_something()
        for _ in range(NUM_KILLS):
            master.kill()
            begun, errors = time.monotonic(), user.tier.stats.errors
            user.manager.cache.reset()
            serve(user, 12, choose, families)
            took = time.monotonic() - begun
            assert took < 20 and user.tier.stats.errors > errors
            loaded = user.tier.stats.loaded_blocks
            # The engine continues without the store, and without delays.
            serve(user, 12, choose, families)
            assert user.tier.stats.loaded_blocks == loaded
            master.start()
            assert loads_something(), user.tier.stats
        print(user.tier.stats)
        user.settle()
        user.end()
    assert user.num_finished > 100


@needs_mooncake
def test_master_that_starts_late_is_found():
    with mooncake_master.Master() as master:
        master.kill()
        user = StoreUser(
            MooncakeStore(master.address, segment_bytes="64MiB"), [FULL], timeout_s=0.5,
            circuit=Circuit(num_failures=1, retry_s=0.2, max_retry_s=0.2),
        )  # fmt: skip
        begun = time.monotonic()
        user.run(*prompts([*range(30)]))
        assert time.monotonic() - begun < 15 and user.num_finished == 1
        master.start()
        deadline = time.monotonic() + 60
        while not user.tier.stats.stored_blocks:
            assert time.monotonic() < deadline, user.tier.stats
            user.manager.cache.reset()
            user.run(*prompts([*range(30)]))
            time.sleep(0.1)
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
