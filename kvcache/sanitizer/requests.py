# SPDX-License-Identifier: Apache-2.0
"""The names and tokens of the observed requests."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Sequence

import numpy as np

from kvcache.checks import check_name, listed
from kvcache.native.load import core

NOBODY = -1
_MAX_NAMES = 65_536  # maximum number of ended requests whose names reports can still show


def name_hash(*names: object) -> int:
    """Return a nonzero hash below 2**63 that is the same in every process."""
    text = "\0".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 | 1


class ObservedRequests:
    """The rows of the observed requests, their serial numbers and the tags of their tokens.

    A row is an index that is reused after its request has ended. A serial number is never reused.
    """

    def __init__(self) -> None:
        self._key = secrets.randbits(63)  # prevents prompts from being chosen whose tags collide
        self._serials = itertools.count()
        self._names: dict[int, str] = {}
        self._ended: dict[str, int] = {}  # serial of the last ended request with each name
        self.reset()

    def reset(self) -> None:
        """Forget all requests. Reports can still show their names."""
        self.tags = core.RequestTags()
        self.reads: list[core.SlotReads] = []  # one per group; tracks which rows were checked
        self._rows: dict[str, int] = {}
        self._images: dict[int, list[tuple[int, int, int]]] = {}
        self._forget_last()

    def name(self, serial: int, default: str | None = "?") -> str | None:
        """Return a request's name, or the default if the request is not known."""
        return self._names.get(serial, default)

    def row(self, request_id: str) -> int:
        """Return a request's row, or -1 if the request is not known."""
        return self._rows.get(request_id, -1)

    def serial(self, request_id: str) -> int:
        """Return a request's serial number, or NOBODY if the request is not known."""
        row = self.row(request_id)
        return NOBODY if row < 0 else self.tags.serial(row)

    def ended(self, request_id: str) -> int:
        """Return the serial number of the last ended request with this name, or NOBODY."""
        return self._ended.get(request_id, NOBODY)

    def rows_of(self, request_ids: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """Return request names as a list, and their rows. Raises TypeError or ValueError."""
        last, rows = self._last
        if type(request_ids) is not list:
            request_ids = listed(request_ids, "request_ids", "a sequence of names")
        if request_ids != last:
            for name in request_ids:
                check_name(name, "a name in request_ids")
            rows = np.array([self._rows.get(name, -1) for name in request_ids], np.int64)
        return request_ids, rows

    def seed(self, adapter: object, salt: object) -> int:
        """Return the initial tag, before the first token, of requests with this adapter and salt."""
        return name_hash(adapter, salt) ^ self._key

    def begin(
        self, request_id: str, seed: int, images: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Begin a request. The tokens of a known one are dropped unless their tags stay the same."""
        row, images = self.row(request_id), list(images)
        if row < 0:
            serial = next(self._serials)
            row = self._rows[request_id] = self.tags.add(serial, seed)
            self._names[serial] = request_id
            if len(self._names) > _MAX_NAMES + len(self._rows):
                self._forget_names()
            self._forget_last()
        elif self.tags.seed(row) != seed or self._images.get(row, []) != images:
            self.tags.restart(row, seed)
            self._forget_checks(row)
        self._images.pop(row, None)
        if images:
            self._images[row] = images

    def finish(self, request_id: str) -> None:
        """End a request. Unknown names are ignored."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._ended[request_id] = self.tags.serial(row)
        self.tags.remove(row)
        self._images.pop(row, None)
        self._forget_checks(row)
        self._forget_last()

    def hashes(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """Return the hashes of new tokens and their positions, int64[t]. Raises ValueError."""
        if self._images:
            tokens, first = tokens.copy(), 0
            for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist()):
                own = tokens[first : first + count]
                for position, length, identity in self._images.get(row, ()):
                    own[max(position - start, 0) : max(position + length - start, 0)] += identity
                first += count
        return core.hash_tokens(starts, counts, tokens, self._key)

    def put(
        self,
        request_ids: list[str],
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        hashes: np.ndarray,
    ) -> list[list[int]]:
        """Set tokens, given by their hashes. Slots of replaced tokens must be checked again.

        Returns (index in `request_ids`, number of known tokens) of requests with a gap before `starts`.
        """
        gaps = self.tags.put(request_ids, rows, starts, counts, hashes, self.reads)
        return [] if gaps is None else gaps.tolist()

    def remember(self, request_ids: list[str], rows: np.ndarray) -> None:
        """Remember a step's requests, because the later calls in the step are for the same requests."""
        if not self.remembers(rows):
            self._last = list(request_ids), rows

    def remembers(self, rows: np.ndarray) -> bool:
        """Return whether these are the rows of the last step, all of which are known."""
        return rows is self._last[1]

    def _forget_last(self) -> None:
        self._last: tuple[list[str], np.ndarray] = [], np.zeros(0, np.int64)

    def _forget_checks(self, row: int) -> None:
        for each in self.reads:
            each.forget(row)

    def _forget_names(self) -> None:
        live = {self.tags.serial(row) for row in self._rows.values()}
        ended = [serial for serial in self._names if serial not in live]
        for serial in ended[: len(ended) // 2]:
            del self._names[serial]
        self._ended = {name: each for name, each in self._ended.items() if each in self._names}
