# SPDX-License-Identifier: Apache-2.0
"""Keys that must be removed from a store before the store is used again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("kvcache")
_KEYS: dict[str, set[str]] = {}  # the pending keys of this process, by store


class PendingRemovals:
    """The removals from a store that are not known to be complete.

    Keys are recorded in a file before their removal begins, so that none is forgotten if the store
    fails and the process ends: the user's next process reads the file when it opens the store. The
    file is in `$XDG_STATE_HOME/kvcache` (`~/.local/state/kvcache`), because a store that has failed
    cannot be written.

    Args:
        store: Name of the store, which is equal in all processes that use the store.
    """

    def __init__(self, store: str) -> None:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        digest = hashlib.sha256(store.encode()).hexdigest()
        self._store, self._folder = store, Path(state, "kvcache", "removals", digest[:32])
        self._files: list[Path] = []  # files whose keys are pending in this process
        self._pending = _KEYS.setdefault(store, set())

    @property
    def keys(self) -> list[str]:
        """The keys still to be removed."""
        return sorted(self._pending)

    def add(self, keys: Iterable[str]) -> None:
        """Record keys before they are removed."""
        new = sorted(set(keys) - self._pending)
        self._pending.update(new)
        if not new:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.append(self._folder / uuid.uuid4().hex)
            data, flags = json.dumps(new).encode(), os.O_WRONLY | os.O_CREAT | os.O_EXCL
            for path, how in ((self._files[-1], flags), (self._folder, os.O_RDONLY)):
                fd = os.open(path, how, 0o600)
                try:
                    if how == flags and os.write(fd, data) != len(data):
                        raise OSError("the disk is full")
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            _log.warning(
                "removals from the store %r are not recorded, and are forgotten if they fail and this "
                "process ends: %s", self._store, error,
            )  # fmt: skip

    def load(self) -> None:
        """Read the keys that earlier processes have recorded. Raises OSError."""
        names, self._files = [], []
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(self._folder)
        for name in names:
            # A file that is missing belongs to a removal that is done. A file that is incomplete belongs
            # to one that has not begun, but that another process may be about to begin.
            with suppress(FileNotFoundError, ValueError):
                self._pending.update(json.loads((self._folder / name).read_bytes()))
                self._files.append(self._folder / name)

    def done(self, keys: Iterable[str]) -> None:
        """Forget keys that were removed. They include all keys known at the last `add` or `load`."""
        self._pending.difference_update(keys)
        for file in self._files:
            with suppress(OSError):  # removing the keys again does no harm
                file.unlink()
        self._files = []
        with suppress(OSError):  # the folder is missing, or has files of other processes
            self._folder.rmdir()
