# SPDX-License-Identifier: Apache-2.0
"""Records of a sanitizer's calls, which can be replayed on another machine.

A record consists of a 10-byte header (magic, version) and chunks. A chunk consists of a 9-byte header
(kind, length, CRC-32) and a zlib payload. The first chunk describes the groups, and the last chunk is
empty. Tokens and names of requests are recorded only as keyed hashes.
"""

from __future__ import annotations

import json
import secrets
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from kvcache.sanitizer.requests import name_hash

if TYPE_CHECKING:
    from kvcache.sanitizer.groups import SanitizedGroup

MAGIC, VERSION = b"KVSANREC", 2
HEADER, CHUNK, CALL = struct.Struct("<8sH"), struct.Struct("<BII"), struct.Struct("<BBIBB")
ABOUT, CALLS, END = range(3)
FLUSH_BYTES, MAX_CHUNK_BYTES = 1 << 20, 1 << 26
DTYPES = (None, np.dtype("<i4"), np.dtype("<i8"))
NAMES = (
    *("reset", "step", "request", "tokens", "finish", "allocation", "free", "copy", "clear"),
    *("write", "load", "state_write", "read", "state_read", "slot_copy"),
    *("digests", "check_digests"),
)


class RecordError(ValueError):
    """Raised for a record that is truncated, damaged or forged.

    `sanitizer` contains the reports for the calls before the damage, or is None.
    """

    sanitizer: object = None


class Recorder:
    """Writes a sanitizer's calls to a file."""

    def __init__(
        self, file: str, groups: Sequence[SanitizedGroup], sizes: dict[str, int], every: int
    ) -> None:
        self._file = open(file, "wb")  # noqa: SIM115
        self._buffer, self._key = bytearray(), secrets.token_hex(8)
        self._file.write(HEADER.pack(MAGIC, VERSION))
        about = {"groups": [asdict(each) for each in groups], "every": every} | sizes
        self._write(ABOUT, json.dumps(about).encode())

    def write(
        self,
        name: str,
        request_ids: Sequence[str],
        group: int,
        arrays: Sequence[np.ndarray | None],
        numbers: Sequence[int],
    ) -> None:
        """Record one call."""
        if self._file.closed:
            return
        out = self._buffer
        out += CALL.pack(NAMES.index(name), group, len(request_ids), len(numbers), len(arrays))
        names = [name_hash(self._key, each) for each in request_ids]
        out += np.array([*names, *numbers], "<i8").tobytes()
        for array in arrays:
            if array is None:
                out += bytes(2)
                continue
            code = 1 if array.dtype == np.int32 else 2
            out += struct.pack(f"<BB{array.ndim}I", code, array.ndim, *array.shape)
            out += np.ascontiguousarray(array, DTYPES[code]).tobytes()
        if len(out) >= FLUSH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the remaining calls and the final chunk."""
        if not self._file.closed:
            self._flush()
            self._write(END, b"")
            self._file.close()

    def _flush(self) -> None:
        for first in range(0, len(self._buffer), MAX_CHUNK_BYTES):
            self._write(CALLS, bytes(self._buffer[first : first + MAX_CHUNK_BYTES]))
        self._buffer.clear()
        self._file.flush()

    def _write(self, kind: int, payload: bytes) -> None:
        packed = zlib.compress(payload, 1)
        self._file.write(CHUNK.pack(kind, len(packed), zlib.crc32(packed)) + packed)
