# SPDX-License-Identifier: Apache-2.0
"""A store in a file on a local disk, accessed through NIXL's POSIX plug-in."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import struct
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import numpy as np

from kvcache.checks import MAX_INT64, byte_count, check_count, instance, integer, listed, path, text
from kvcache_exchange.store.base import BlockStore, StoreError
from kvcache_exchange.store.removals import PendingRemovals

_log = logging.getLogger("kvcache")
_FILE = "blocks.kv"
_VERSION = 2
_ALIGNMENT = 4096
_SPIN_S, _POLL_S = 200e-6, 50e-6
_TIMEOUT_S = 60.0
# The entry before each value in the file contains a CRC-32 of the other fields, the time of
# storage, and the key.
_ENTRY = struct.Struct("<IQB207s")
_ENTRY_BYTES = 256
_MOST_KEY_BYTES = 207
_BLOCKS_PER_CALL = 256


class DiskStore(BlockStore):
    """A store in a folder on a local disk, with LRU eviction.

    The folder and its missing parents are created with mode 700. An existing folder, and the file
    in it, must belong to the user of this process, must not be symbolic links, and must not be
    writable by others. The file must have no other hard links. Only one store at a time can use a
    folder.

    Values persist across restarts. If the version or size of values has changed, the file is
    replaced. After a crash, a value that was being written is either missing or has a wrong digest.
    If the disk is full, new values are rejected. Values that cannot be read are dropped. A removed
    value never returns, whatever fails (`PendingRemovals`).

    Args:
        folder: The folder.
        capacity_bytes: Maximum size of the file, in bytes or as a string with a unit.

    Raises:
        ModuleNotFoundError: NIXL is not installed (extra `nixl`).
        StoreError: The folder or file belongs to another user, or is writable by other users.
        TypeError: `folder` is not a path.
    """

    knows_keys = True

    def __init__(self, folder: str | os.PathLike, capacity_bytes: int | str) -> None:
        self.folder = Path(path(folder, "folder"))
        self._capacity_bytes = byte_count(capacity_bytes, "capacity_bytes")
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ModuleNotFoundError(
                f"DiskStore needs NIXL ({error}): pip install 'torch-kvcache[nixl]'", name="nixl"
            ) from error
        self._new_agent = lambda: nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=[]))
        if os.path.lexists(self.folder):
            os.close(self._open_folder())  # reject an invalid folder now, not in a tier's thread
        self._agent = self._fd = None
        self._memory = np.zeros(0, np.uint8)
        self._registered: list = []
        self._entries = np.zeros((_BLOCKS_PER_CALL, _ENTRY_BYTES), np.uint8)
        # Each value's position in the file, by key. The least recently used value comes first.
        self._places: OrderedDict[str, int] = OrderedDict()
        self._free: list[int] = []
        self._num_places = 0  # number of positions in the file, which grows on demand
        self._doubtful: set[int] = set()  # positions whose entry in the file may be wrong
        self._evicted: list[str] = []
        self._sequence = 0

    @property
    def capacity(self) -> int:
        """Maximum number of values in the file. 0 before `open`."""
        return len(self._places) + len(self._free)

    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Open the file.

        Raises StoreError if the folder is in use or the capacity is too small. May also raise
        OSError.
        """
        memory = _checked_bytes(memory, "memory")
        value_bytes = integer(value_bytes, "value_bytes", 1, MAX_INT64)
        stride = -(-(_ENTRY_BYTES + value_bytes) // _ALIGNMENT) * _ALIGNMENT
        capacity = (self._capacity_bytes - _ALIGNMENT) // stride
        if capacity < 1:
            raise StoreError(
                f"capacity_bytes is {self._capacity_bytes}: expected {stride + _ALIGNMENT} or more, "
                f"because value_bytes is {value_bytes}"
            )
        self.close()
        self._value_bytes, self._stride, self._memory = value_bytes, stride, memory
        for each in reversed([self.folder, *self.folder.parents]):
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
        within = self._open_folder()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                self._fd = os.open(_FILE, flags, 0o600, dir_fd=within)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise StoreError(f"{self.folder / _FILE} is a link: expected a file") from error
        finally:
            os.close(within)
        _check_own(self._fd, self.folder / _FILE, is_folder=False)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"{self.folder} is in use by another store") from error
        self._begin(capacity)
        self._agent = self._new_agent()
        self._agent.create_backend("POSIX")
        end = _ALIGNMENT + capacity * self._stride
        self._registered = [
            self._agent.register_memory([tuple(row)], kind, backends=["POSIX"])
            for row, kind in (
                ((memory.ctypes.data, memory.nbytes, 0, ""), "DRAM"),
                ((self._entries.ctypes.data, self._entries.nbytes, 0, ""), "DRAM"),
                ((0, end, self._fd, ""), "FILE"),
            )
        ]

    def _open_folder(self) -> int:
        """Open the folder and return its file descriptor.

        Raises StoreError if the folder is missing or not private to this user.
        """
        try:
            found = os.open(
                self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise StoreError(
                f"folder {str(self.folder)!r} is a link or not a folder: expected a folder"
            ) from error
        try:
            _check_own(found, self.folder, is_folder=True)
        except BaseException:
            os.close(found)
            raise
        return found

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether the store contains a value."""
        keys = _checked_keys(keys)
        return [key in self._places for key in keys]

    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Write values, evicting the least recently used values if necessary."""
        keys, values = self._checked(keys, values)
        for key in keys:
            if (size := len(key.encode())) > _MOST_KEY_BYTES:
                raise StoreError(
                    f"keys has a key of {size} bytes: expected at most {_MOST_KEY_BYTES}"
                )
        for first in range(0, len(keys), _BLOCKS_PER_CALL):
            stop = first + _BLOCKS_PER_CALL
            self._put(keys[first:stop], values[first:stop])
        return [key in self._places for key in keys]

    def _put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> None:
        last = dict(zip(keys, values))  # for a repeated key, the last value is stored
        places: dict[str, int] = {}
        errors: list[Exception | None] = []
        try:
            for key in last:
                place = self._places.pop(key, None)
                if place is not None:
                    self._evicted.append(key)  # unless it is stored again
                else:
                    place = self._free.pop() if self._free else self._evict()
                if place is not None:
                    places[key] = place
            end = max(places.values(), default=-1) + 1
            if end > self._num_places:
                os.ftruncate(self._fd, self._offset(end))
                self._num_places = end
            entries = [self._entry(key) for key in places]
            errors = self._move_each(
                "WRITE", [last[key] for key in places], [*places.values()], entries
            )
            if places and all(errors):
                raise errors[0]
        except Exception:
            disk = os.statvfs(self.folder)
            if disk.f_bavail * disk.f_frsize < len(keys) * self._stride:
                return  # the disk is full
            raise
        finally:
            for (key, place), error in zip_longest(places.items(), errors, fillvalue=True):
                if error is None:
                    self._places[key] = place
                else:
                    self._discard(place)

    def get(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[int]:
        """Read values into `values`.

        Return the size of each value in bytes, or -1 if it is missing. A value that cannot be read
        is dropped and counts as missing.
        """
        keys, values = self._checked(keys, values)
        found = [i for i, key in enumerate(keys) if key in self._places]
        errors = self._move_each(
            "READ", [values[i] for i in found], [self._places[keys[i]] for i in found]
        )
        if found and all(errors):
            os.stat(self.folder / _FILE)  # raises OSError if not only these values have failed
        sizes = [-1] * len(keys)
        for i, error in zip(found, errors):
            if error is None:
                sizes[i] = self._value_bytes
                self._places.move_to_end(keys[i])
            elif (place := self._places.pop(keys[i], None)) is not None:
                self._evicted.append(keys[i])
                self._discard(place)
        return sizes

    def remove(self, keys: Sequence[str]) -> None:
        """Remove values, and wait until they are gone from the disk.

        If this method raises an exception, the values can no longer be read, and the next `remove`
        or `open` repeats the removal. Both fail until it succeeds.
        """
        keys = _checked_keys(keys)
        self._check_open()
        self._removals.add(keys)
        for key in keys:
            if (place := self._places.pop(key, None)) is not None:
                self._evicted.append(key)
                self._free.append(place)
                self._doubtful.add(place)
        self._settle()

    def keys(self) -> list[str]:
        """Return all keys, least recently used first."""
        return list(self._places)

    def take_evicted(self) -> list[str]:
        """Return the keys that were evicted or removed since the last call and have not been stored
        again.
        """
        evicted, self._evicted = self._evicted, []
        return [key for key in dict.fromkeys(evicted) if key not in self._places]

    def close(self) -> None:
        """Close the file, which remains on the disk."""
        agent, fd = self._agent, self._fd
        self._agent = self._fd = None
        if agent is not None:
            for each in self._registered:
                agent.deregister_memory(each, backends=["POSIX"])
        if fd is not None:
            os.close(fd)
        self._registered, self._evicted = [], []
        self._places.clear()
        self._free.clear()
        self._doubtful.clear()

    def _checked(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> tuple[list, list]:
        """Check keys and values.

        There must be one value per key, and all values must lie in the memory passed to `open`.
        """
        keys, values = _checked_keys(keys), listed(values, "values")
        self._check_open()
        check_count(values, len(keys), "values", "key")
        begin = self._memory.ctypes.data
        last = begin + self._memory.nbytes - self._value_bytes
        for i, value in enumerate(values):
            _checked_bytes(value, f"values[{i}]")
            if value.nbytes != self._value_bytes or not begin <= value.ctypes.data <= last:
                raise ValueError(
                    f"values[{i}] has {value.nbytes} bytes: expected {self._value_bytes}, in the memory "
                    "that was passed to open"
                )
        return keys, values

    def _check_open(self) -> None:
        if self._agent is None:
            raise StoreError("the store is not open: call open first")

    def _discard(self, place: int) -> None:
        """Free a position at which a read or write has failed. It is reused last."""
        self._free.insert(0, place)
        self._doubtful.add(place)

    def _settle(self) -> None:
        """Correct the doubtful entries, and wait until they are on the disk.

        Removed values are overwritten, too, up to the digest. Otherwise, the next put of the key at
        the same position could restore them, if it is interrupted after it has written its entry.
        """
        if self._doubtful:
            keys = {place: key for key, place in self._places.items()}
            end = max(keys, default=-1) + 1
            if end < self._num_places:  # needs no space on the disk, in contrast to a write
                os.ftruncate(self._fd, self._offset(end))
                self._num_places = end
            nothing = bytes(_ENTRY_BYTES + min(self._value_bytes, _ENTRY_BYTES))
            for place in sorted(each for each in self._doubtful if each < end):
                data = self._entry(keys[place]) if place in keys else nothing
                if os.pwrite(self._fd, data, self._offset(place)) != len(data):
                    raise StoreError(f"{self.folder / _FILE} was not written: expected free space")
        removed = self._removals.keys
        try:
            os.fdatasync(self._fd)
        except OSError:  # the system may regard pages as written that it has not written
            self._doubtful.update(range(self._num_places))
            raise
        self._doubtful.clear()
        self._removals.done(removed)

    def _evict(self) -> int | None:
        """Evict the least recently used value and return its position, or None if the store is empty."""
        if not self._places:
            return None
        key, place = self._places.popitem(last=False)
        self._evicted.append(key)
        return place

    def _begin(self, capacity: int) -> None:
        """Read the file's entries, or create the file."""
        form = {"version": _VERSION, "value_bytes": self._value_bytes, "stride": self._stride}
        size = os.fstat(self._fd).st_size
        found_form = _form_of(os.pread(self._fd, _ALIGNMENT, 0))
        identity = found_form.pop("id", None) if isinstance(found_form, dict) else None
        if found_form != form or not isinstance(identity, str):
            if size:
                _log.warning(
                    "%s contains blocks in another format, which are replaced", self.folder
                )
            os.ftruncate(self._fd, 0)
            identity, size = uuid.uuid4().hex, 0
            form["id"] = identity
            os.pwrite(self._fd, json.dumps(form).encode().ljust(_ALIGNMENT), 0)
        self._removals = PendingRemovals(f"disk {identity}")
        # The file ends after the last position that was in use, so opening takes little time.
        self._num_places = -(-max(size - _ALIGNMENT, 0) // self._stride)
        if self._num_places > capacity:
            os.ftruncate(self._fd, self._offset(capacity))
            self._num_places = capacity
        found = []
        for place in range(self._num_places):
            try:
                packed = os.pread(self._fd, _ENTRY_BYTES, self._offset(place))
            except OSError:
                packed = b"\xff"
            entry = _entry_of(packed)
            if entry is not None:
                found.append((*entry, place))
            elif any(packed):
                self._doubtful.add(place)
        found.sort()
        self._sequence = found[-1][0] + 1 if found else 0
        self._removals.load()
        removed = set(self._removals.keys)
        for _, key, place in found:
            earlier = self._places.pop(key, None)  # keep the most recent value of each key
            if earlier is not None:
                self._doubtful.add(earlier)
            if key in removed:
                self._doubtful.add(place)
            else:
                self._places[key] = place
        used = set(self._places.values())
        self._free = [place for place in reversed(range(capacity)) if place not in used]
        if self._doubtful or removed:
            self._settle()

    def _entry(self, key: str) -> bytes:
        """Return the entry that describes a value in the file."""
        encoded = key.encode()
        body = _ENTRY.pack(0, self._sequence, len(encoded), encoded)[4:]
        self._sequence += 1
        return (zlib.crc32(body).to_bytes(4, "little") + body).ljust(_ENTRY_BYTES, b"\0")

    def _offset(self, place: int) -> int:
        return _ALIGNMENT + place * self._stride

    def _move_each(
        self,
        operation: str,
        values: list[np.ndarray],
        places: list[int],
        entries: Sequence[bytes] = (),
    ) -> list[Exception | None]:
        """Read or write values, and return for each value the error that prevented it."""
        try:
            self._move(operation, values, places, entries)
            return [None] * len(values)
        except TimeoutError:
            raise
        except Exception as error:
            if len(values) == 1:
                return [error]
        half = len(values) // 2
        return [
            error
            for part in (slice(half), slice(half, None))
            for error in self._move_each(operation, values[part], places[part], entries[part])
        ]

    def _move(
        self,
        operation: str,
        values: list[np.ndarray],
        places: list[int],
        entries: Sequence[bytes] = (),
    ) -> None:
        """Read or write values, and write their entries. Raises an exception on failure."""
        count, num_entries = len(values), len(entries)
        if count == 0:
            return
        local, remote = np.zeros((2, count + num_entries, 3), np.uint64)
        offsets = np.array([self._offset(place) for place in places], np.uint64)
        local[:count, 0] = [value.ctypes.data for value in values]
        local[:count, 1] = self._value_bytes
        remote[:count, 0] = offsets + np.uint64(_ENTRY_BYTES)
        if entries:
            self._entries[:num_entries] = np.frombuffer(b"".join(entries), np.uint8).reshape(
                num_entries, _ENTRY_BYTES
            )
            begin = self._entries.ctypes.data
            local[count:, 0] = begin + np.arange(num_entries) * _ENTRY_BYTES
            local[count:, 1] = _ENTRY_BYTES
            remote[count:, 0] = offsets
        remote[:, 1], remote[:, 2] = local[:, 1], self._fd
        agent = self._agent
        sides = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "FILE")
        handle = agent.initialize_xfer(operation, *sides, agent.name)
        try:
            state, begun = agent.transfer(handle), time.monotonic()
            while state == "PROC":
                passed = time.monotonic() - begun
                if passed > _TIMEOUT_S:
                    raise TimeoutError(f"{operation} of {count} blocks takes too long")
                if passed > _SPIN_S:
                    time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise StoreError(f"{operation} of {count} blocks ended with state {state}")


def _checked_keys(keys: Sequence[str]) -> list[str]:
    return [text(key, f"keys[{i}]") for i, key in enumerate(listed(keys, "keys"))]


def _checked_bytes(array: np.ndarray, name: str) -> np.ndarray:
    """Return a contiguous uint8[n] view of an array. Raises TypeError or ValueError for unsuitable
    arrays.
    """
    instance(array, np.ndarray, name)
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.dtype}{list(array.shape)}: expected contiguous uint8[n]"
        )
    return array


def _check_own(fd: int, path: Path, *, is_folder: bool) -> None:
    """Raise StoreError unless the folder or file belongs to this user and is writable only by this
    user.
    """
    found = os.fstat(fd)
    what = "folder" if is_folder else "file"
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{what} {str(path)!r} belongs to user {found.st_uid}: expected {os.geteuid()}, the user "
            "of this process"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"{what} {str(path)!r} has mode {stat.S_IMODE(found.st_mode):o}: expected a mode in which "
            "only its owner may write (chmod go-w)"
        )
    if not is_folder and (not stat.S_ISREG(found.st_mode) or found.st_nlink != 1):
        raise StoreError(
            f"file {str(path)!r} is not a regular file, or has {found.st_nlink} hard links: expected "
            "a file with one link"
        )


def _form_of(block: bytes) -> object:
    try:
        return json.loads(block.decode())
    except (ValueError, RecursionError):
        return None


def _entry_of(packed: bytes) -> tuple[int, str] | None:
    """Return the time of storage and the key of an entry, or None for an empty entry."""
    if len(packed) < _ENTRY.size:
        return None
    crc, sequence, length, key = _ENTRY.unpack(packed[: _ENTRY.size])
    if length == 0 or crc != zlib.crc32(packed[4 : _ENTRY.size]):
        return None
    try:
        return sequence, key[:length].decode()
    except ValueError:
        return None
