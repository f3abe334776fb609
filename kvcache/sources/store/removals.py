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

from kvcache.sources.store.base import StoreError

_log = logging.getLogger("kvcache")
_KEYS: dict[str, set[str]] = {}  # the pending keys of this process, by store


class PendingRemovals:
    """The removals from a store that are not known to be complete.

    Keys are recorded in a file of the user before their removal begins. Therefore, no removal is
    forgotten if the store fails and the process ends: the next process reads the file when it opens
    the store. The files are in `$XDG_STATE_HOME/kvcache` (`~/.local/state/kvcache`), because a store
    that has failed cannot be written.

    Args:
        store: Name of the store, which is equal in all processes that use the store.
    """

    def __init__(self, store: str) -> None:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        digest = hashlib.sha256(store.encode()).hexdigest()
        self._store, self._folder = store, state / "kvcache" / "removals" / digest[:32]
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
        file = self._folder / f"{uuid.uuid4().hex}.json"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            with open(part, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
                json.dump(new, out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(file)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            _log.warning(
                "removals from the store %s are not recorded, and are forgotten if they fail and this "
                "process ends: %s", self._store, error,
            )  # fmt: skip
            return
        self._files.append(file)

    def load(self) -> None:
        """Read the keys that earlier processes have recorded. Raises OSError or StoreError."""
        self._files = [*self._folder.glob("*.json")]
        for file in self._files:
            try:
                self._pending.update(json.loads(file.read_bytes()))
            except FileNotFoundError:  # another process has just removed the keys
                continue
            except ValueError as error:
                raise StoreError(f"{file} is not a list of keys: {error}") from error

    def done(self, keys: Iterable[str]) -> None:
        """Forget keys that were removed. They include all keys known at the last `add` or `load`."""
        self._pending.difference_update(keys)
        for file in self._files:
            with suppress(OSError):  # removing the keys again does no harm
                file.unlink(missing_ok=True)
        self._files = []
        with suppress(OSError):  # the folder is missing, or has files of other processes
            self._folder.rmdir()
