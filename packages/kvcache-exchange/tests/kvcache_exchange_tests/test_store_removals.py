# SPDX-License-Identifier: Apache-2.0
"""Removed values never return from the real stores, whichever call to the disk or to the master
fails, and after restarts.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache import GroupSpec, Request
from kvcache_exchange.store import DiskStore, MooncakeStore, StoreError, removals
from kvcache_exchange.store.removals import PendingRemovals
from tests.machinery import mooncake_master
from tests.machinery.nixl_stand_in import stand_in
from tests.machinery.shared import seed_of_test
from tests.machinery.stores import StoreUser, patient

VALUE_BYTES, NUM_VALUES = 3000, 16
SECTOR = 512
CAPACITY = 4096 + 6 * 4096  # six values
OF_DISK = ("pwrite", "fdatasync", "ftruncate")
KEYS = [f"key {i}" for i in range(9)]
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
)
STORES = [
    "stand-in",
    pytest.param("disk", marks=needs_nixl),
    pytest.param(
        "mooncake",
        marks=pytest.mark.skipif(
            not mooncake_master.is_installed(), reason="Mooncake is not installed"
        ),
    ),
]
WHENS = ["before", "after", "from then on"]


@pytest.fixture(autouse=True)
def state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for each in ("fsync", "fdatasync"):  # these calls only take time, unless they fail
        monkeypatch.setattr(os, each, lambda fd: None)
    return tmp_path / "state"


@pytest.fixture(scope="module")
def client():
    """A Mooncake client, with its memory."""
    with mooncake_master.Master() as master:
        store, memory = (
            MooncakeStore(master.address, segment_bytes="16MiB"),
            np.zeros(48_000, np.uint8),
        )
        store.open(memory, VALUE_BYTES)
        yield SimpleNamespace(client=store._client, memory=memory)
        store.close()


@pytest.fixture
def without_nixl():
    with stand_in():
        yield


def resources(kind, request):
    """Prepare a kind of store. Return a Mooncake client, or None for a disk store."""
    if kind in ("stand-in", "a power loss"):
        request.getfixturevalue("without_nixl")
    return request.getfixturevalue("client") if kind == "mooncake" else None


class Faults:
    """Makes one call fail: before or after it has taken effect, or together with all later calls."""

    def __init__(self, at, when):
        self.at, self.when = at, when
        self.num_calls = 0
        self.is_active = True
        self.on_failure = lambda: None  # called if `fdatasync` fails

    def call(self, function, *arguments, failure):
        number = self.num_calls
        self.num_calls += self.is_active
        if not self.is_active or number < self.at:
            return function(*arguments)
        if number > self.at and self.when != "from then on":
            return function(*arguments)
        if self.when == "after":
            function(*arguments)
        if getattr(function, "__name__", "") == "fdatasync":
            self.on_failure()
        return failure()


def broken_disk():
    raise OSError(5, "Input/output error")


class FaultyClient:
    """A Mooncake client whose calls may fail. Its set-up takes seconds, so it is done only once."""

    def __init__(self, client, faults):
        self._client, self._faults = client, faults
        self.setup = self.register_buffer = lambda *_: 0
        self.close = lambda: None

    def __getattr__(self, name):
        def call(keys, *others):
            failure, function = [-900] * len(keys), getattr(self._client, name)
            return self._faults.call(function, keys, *others, failure=lambda: failure)

        return call


class Tried:
    """A store that is restarted, and an oracle of which contents were removed.

    Every put stores a new content under its key. A content that was removed must never be read
    again, even if the call to `remove` has failed.
    """

    def __init__(self, folder, patches, client, faults, name=""):
        self.folder, self.client, self.faults, self.name = folder, client, faults, name
        self.memory = (
            np.zeros(NUM_VALUES * VALUE_BYTES, np.uint8) if client is None else client.memory
        )
        self.rows = self.memory.reshape(NUM_VALUES, VALUE_BYTES)
        self.contents = itertools.count(1)
        self.current: dict[str, set[int]] = {}  # contents that may be read
        self.key_of: dict[int, str] = {}
        self.store = None
        for each in OF_DISK if client is None else ():
            patches.setattr(os, each, self.faulty(getattr(os, each)))
        self.open()

    def faulty(self, function):
        def call(fd, *others):
            if self.store is None or fd != getattr(self.store, "_fd", None):
                return function(fd, *others)
            return self.faults.call(function, fd, *others, failure=broken_disk)

        return call

    def open(self):
        if self.client is None:
            self.store = DiskStore(self.folder, CAPACITY)
            move = self.store._move
            self.store._move = lambda *each: self.faults.call(move, *each, failure=broken_disk)
        else:
            self.store = MooncakeStore("localhost:1")
            self.store._reach = lambda: "localhost"
            self.store._new_client = lambda: FaultyClient(self.client.client, self.faults)
        self.attempt(self.store.open, self.memory, VALUE_BYTES)

    def attempt(self, function, *arguments):
        """Call a method of the store, which may fail."""
        try:
            return function(*arguments)
        except (OSError, StoreError, RuntimeError):
            return None

    def keys(self, numbers):
        return [f"{self.name}{KEYS[number]}" for number in numbers]

    def put(self, *numbers):
        rows = []
        for row, key in enumerate(self.keys(numbers)):
            content = next(self.contents)
            self.rows[row] = np.frombuffer(
                content.to_bytes(4, "little") * (VALUE_BYTES // 4), np.uint8
            )
            self.current.setdefault(key, set()).add(content)  # even if the call fails
            self.key_of[content] = key
            rows.append(self.rows[row])
        self.attempt(self.store.put, self.keys(numbers), rows)

    def remove(self, *numbers):
        for key in self.keys(numbers):
            self.current.pop(key, None)
        self.attempt(self.store.remove, self.keys(numbers))
        self.check()

    def check(self):
        """Check that only current contents are read.

        A tier verifies the digest and the key of each value. Here, a value is intact if it repeats
        the number of a content that was stored under the key.
        """
        keys = self.keys(range(len(KEYS)))
        self.rows[:] = 0
        sizes = self.attempt(self.store.get, keys, [*self.rows[: len(keys)]])
        for key, size, row in zip(keys, sizes or (), self.rows):
            words = row.view(np.int32)
            content = int(words[0])
            if size >= 0 and (words == content).all() and self.key_of.get(content) == key:
                assert content in self.current.get(key, ()), key

    def restart(self):
        """Continue in another process, after the fault."""
        self.attempt(self.store.close)
        self.faults.is_active = False
        removals._KEYS.clear()
        self.open()
        self.check()


class UnsyncedFile:
    """Records the writes to a file since the last `fdatasync`. A power loss undoes any of them.

    If `fdatasync` fails, the system regards the writes as done, and never repeats them.
    """

    def __init__(self, path, choose, patches):
        self.path, self.choose = path, choose
        self.synced: bytes = b""
        self.versions: dict[int, list[bytes]] = {}  # contents of a sector since then, oldest first
        self.sizes: list[int] = []
        self.calls = {name: getattr(os, name) for name in (*OF_DISK, "pwritev")}
        for name in self.calls:
            patches.setattr(os, name, getattr(self, name))

    def pwrite(self, fd, data, offset):
        return self.wrote(self.calls["pwrite"](fd, data, offset), offset)

    def pwritev(self, fd, data, offset):
        return self.wrote(self.calls["pwritev"](fd, data, offset), offset)

    def ftruncate(self, fd, size):
        before = os.fstat(fd).st_size
        self.calls["ftruncate"](fd, size)
        self.sizes.append(size)
        self.wrote(max(before - size, 0), size)

    def fdatasync(self, fd):
        self.synced = self.path.read_bytes()
        self.lose()

    def write_back(self):
        """Sometimes write some sectors without being asked."""
        if self.choose.random() < 0.5:
            return
        size = max([len(self.synced), *self.sizes])
        content = bytearray(self.synced.ljust(size, b"\0"))
        for at in [at for at in self.versions if self.choose.random() < 0.7]:
            content[at : at + SECTOR] = self.versions.pop(at)[-1]
        self.synced = bytes(content)

    def lose(self):
        self.versions, self.sizes = {}, []

    def wrote(self, size, offset):
        content = self.path.read_bytes()
        for at in range(offset // SECTOR * SECTOR, offset + size, SECTOR):
            sector = content[at : at + SECTOR].ljust(SECTOR, b"\0")
            self.versions.setdefault(at, []).append(sector)
        return size

    def crash(self):
        size = self.choose.choice([len(self.synced), *self.sizes])
        content = bytearray(
            self.synced.ljust(max([size, *(at + SECTOR for at in self.versions)]), b"\0")
        )
        for at, versions in self.versions.items():
            if number := self.choose.randrange(len(versions) + 1):
                content[at : at + SECTOR] = versions[number - 1]
        self.path.write_bytes(content[:size])
        self.synced = self.path.read_bytes()
        self.lose()


def run_in_order(tried):
    tried.put(0, 1, 2, 3)
    tried.remove(1)
    tried.put(4, 5, 6)  # fills the disk store
    tried.put(1, 7)  # the disk store evicts
    tried.remove(0, 1)  # the first may be evicted, the second is stored again
    tried.remove(8)
    tried.put(1, 2)
    tried.remove(2, 6)
    tried.check()


def run_at_random(tried, choose, after_each=lambda: None):
    for _ in range(choose.randrange(1, 10)):
        numbers = choose.sample(range(len(KEYS)), choose.randrange(1, 6))
        choose.choice([tried.put, tried.put, tried.remove])(*numbers)
        after_each()


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("kind", STORES)
def test_removed_values_never_return_whichever_call_fails(
    kind, when, tmp_path, monkeypatch, request
):
    client = resources(kind, request)
    for at in itertools.count():
        with monkeypatch.context() as patches:
            faults = Faults(at, when)
            tried = Tried(tmp_path / f"{at}", patches, client, faults, f"{when} {at} ")
            run_in_order(tried)
            num_calls = faults.num_calls
            tried.restart()
            tried.put(0, 1, 2)
            tried.remove(1)
            tried.restart()
            tried.store.close()
        if at >= num_calls:
            break
    print(f"{kind}: each of {at} calls has failed")
    assert at > 12


@pytest.mark.parametrize(
    "num_cases",
    [
        3,
        pytest.param(300, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("kind", [*STORES, "a power loss"])
def test_removed_values_never_return_in_random_runs(
    kind, num_cases, tmp_path, monkeypatch, request
):
    client = resources(kind, request)
    seed = seed_of_test()
    print(f"seed {seed}, {num_cases} cases")
    for case in range(num_cases):
        choose, folder = random.Random(f"{seed} {case}"), tmp_path / f"{case}"
        with monkeypatch.context() as patches:
            faults = Faults(choose.randrange(40), choose.choice(WHENS))
            disk = None
            if kind == "a power loss":
                disk = UnsyncedFile(folder / "blocks.kv", choose, patches)
                faults.on_failure = disk.lose
            tried = Tried(folder, patches, client, faults, f"{seed} {case} ")
            for _ in range(choose.randrange(2, 5)):
                run_at_random(tried, choose, disk.write_back if disk else lambda: None)
                if disk:
                    os.close(tried.store._fd)  # which releases the lock, and writes nothing
                    tried.store._fd = None
                    disk.crash()
                tried.restart()
                faults.is_active = choose.random() < 0.5  # another fault, if the first was not met
            faults.is_active = False
            tried.store.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_invalid_block_is_not_loaded_by_the_next_engine_although_the_disk_has_failed(
    tmp_path, monkeypatch, without_nixl
):
    def engine():
        store = DiskStore(tmp_path, "256KiB")
        return StoreUser(store, [GroupSpec("full_attention", 4)], circuit=patient())

    prompt, user = [*range(30)], engine()
    user.run(prompt)
    user.settle()
    assert user.tier.stats.stored_blocks == 7
    blocks = user.manager.cache.find_prefix(Request("probe", prompt)).block_ids
    with monkeypatch.context() as patches:
        for each in OF_DISK:
            patches.setattr(os, each, lambda *_: broken_disk())
        user.tier.invalidate(blocks[3:4])
        user.until(lambda: user.tier.stats.errors >= 3)
        assert user.tier.is_busy and user.tier.close(60)
    removals._KEYS.clear()  # the next engine is another process
    user = engine()
    user.run(prompt)
    assert user.num_loaded == 12  # the blocks before the invalid one
    user.settle()
    assert user.tier.stats.stored_blocks > 0
    user.end()


def test_earlier_value_of_a_removed_key_does_not_return(tmp_path, monkeypatch, without_nixl):
    """After an interrupted put, a file may have two values of a key."""
    tried = Tried(tmp_path, monkeypatch, None, Faults(1000, "before"))
    tried.put(0, 1)
    tried.store.close()
    path = tmp_path / "blocks.kv"
    path.write_bytes((content := path.read_bytes()) + content[4096:])
    tried.open()
    assert sorted(tried.store.keys()) == KEYS[:2] and len(tried.store._free) == 4
    tried.remove(0)
    tried.restart()
    assert tried.store.keys() == [KEYS[1]]
    tried.store.close()


def test_removal_that_could_not_be_recorded_is_repeated_in_the_same_process(
    tmp_path, monkeypatch, caplog, state_folder, without_nixl
):
    state_folder.write_text("not a folder")
    faults = Faults(0, "from then on")
    faults.is_active = False
    tried = Tried(tmp_path, monkeypatch, None, faults)
    tried.put(0, 1)
    faults.is_active = True
    tried.remove(0)
    assert "are not recorded, and are forgotten if they fail" in caplog.text
    tried.attempt(tried.store.close)
    faults.is_active = False
    tried.open()
    tried.check()
    assert tried.store.keys() == [KEYS[1]]
    tried.store.close()


def test_recorded_removals_are_read_by_later_processes(state_folder, monkeypatch):
    first = PendingRemovals("a store")
    first.add(["a", "b"])
    first.add(["b", "c"])
    (folder,) = (state_folder / "kvcache" / "removals").iterdir()
    assert sorted(json.loads(each.read_text()) for each in folder.iterdir()) == [["a", "b"], ["c"]]
    assert {oct(each.stat().st_mode)[-3:] for each in folder.iterdir()} == {"600"}
    removals._KEYS.clear()
    second, other = PendingRemovals("a store"), PendingRemovals("another store")
    assert second.keys == []
    second.load()
    other.load()
    assert second.keys == ["a", "b", "c"] and other.keys == []
    second.done(second.keys)
    assert second.keys == [] and not folder.exists()
    second.add(["d"])
    (folder / "incomplete").write_text('["e", "')
    removals._KEYS.clear()
    third = PendingRemovals("a store")
    third.load()
    assert third.keys == ["d"]


def test_file_that_another_process_is_still_writing_is_kept():
    writer, reader = PendingRemovals("shared"), PendingRemovals("shared")
    writer.add(["a"])
    (file,) = writer._files
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    reader.load()
    reader.done(reader.keys)
    file.write_bytes(whole)
    reader.load()
    assert reader.keys == ["a"]
    reader.done(["a"])
    assert not file.exists()


@pytest.mark.parametrize("codes", [[], [0], [0, -900], [0, 0, 0]])
def test_removal_is_repeated_unless_mooncake_confirms_each_key(monkeypatch, codes):
    """A client that cannot reach its master returns no code at all for some calls."""
    module = SimpleNamespace(MooncakeDistributedStore=object)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=module))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    client = SimpleNamespace(setup=lambda *_: 0, register_buffer=lambda *_: 0, close=lambda: None)
    client.batch_remove = lambda keys, force: client.codes
    store = MooncakeStore("unconfirmed:1")
    store._reach, store._new_client = lambda: "127.0.0.1", lambda: client
    memory = np.zeros(8, np.uint8)
    store.open(memory, 8)
    client.codes = codes
    for call in (lambda: store.remove(["a", "b"]), lambda: store.get(["a"], [memory])):
        with pytest.raises(
            StoreError, match=r"batch_remove returned .*: expected 2 times 0 or -704"
        ):
            call()
    client.codes = [0, -704]
    store.remove(["b"])
    assert store._removals.keys == []
    store.close()
