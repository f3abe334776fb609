# SPDX-License-Identifier: Apache-2.0
"""Replays records of a sanitizer's calls."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from kvcache.checks import integer, path
from kvcache.sanitizer.findings import MEDIA
from kvcache.sanitizer.groups import SanitizedGroup
from kvcache.sanitizer.record import (
    ABOUT,
    CALL,
    CALLS,
    CHUNK,
    DTYPES,
    END,
    HEADER,
    MAGIC,
    MAX_CHUNK_BYTES,
    NAMES,
    VERSION,
    RecordError,
)
from kvcache.sanitizer.report import Report
from kvcache.sanitizer.sanitizer import Sanitizer

_MAX_REQUESTS, _MAX_TAGS = 100_000, 1 << 27
_MAX_BYTES = 1 << 32  # of the sanitizer's shadow state


def replay_record(
    record: str | os.PathLike[str], *, log: Callable[[Report], object] | None = None
) -> Sanitizer:
    """Repeat the calls in a record, and return the resulting sanitizer with its reports.

    Args:
        record: A file that was written by `Sanitizer(record=...)`.
        log: Function that is called with each report.

    Returns:
        A sanitizer in the state after the last recorded call.

    Raises:
        RecordError: The file is not a record, or it is truncated, damaged or forged.
        OSError: The file cannot be read.

    Example:
        >>> replay_record(__file__)
        Traceback (most recent call last):
        ...
        kvcache.sanitizer.record.RecordError: not a record of the sanitizer: expected magic KVSANREC
    """
    sanitizer, number = None, 0
    with open(path(record, "record"), "rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise RecordError("not a record of the sanitizer: expected magic KVSANREC")
        version = HEADER.unpack(header)[1]
        if version != VERSION:
            raise RecordError(f"record has version {version}: expected {VERSION}")
        try:
            rest = bytearray()
            for number, (kind, payload) in enumerate(_chunks(file)):  # noqa: B007
                if kind == ABOUT and sanitizer is None:
                    sanitizer = _sanitizer_of(json.loads(payload), log)
                elif kind == CALLS and sanitizer is not None:
                    rest += payload
                    _replay(sanitizer, rest)
                elif kind == END and sanitizer is not None and not rest:
                    return sanitizer
                else:
                    raise ValueError(f"unexpected chunk of kind {kind}")
            raise ValueError("the record is cut off")
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
        ) as error:
            failure = RecordError(f"chunk {number} of the record is invalid: {error!r}"[:300])
        except (ValueError, struct.error, zlib.error) as error:
            failure = RecordError(f"chunk {number} of the record is invalid: {error}"[:300])
        failure.sanitizer = sanitizer
        raise failure from None


def _chunks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while head := file.read(CHUNK.size):
        if len(head) < CHUNK.size:
            raise ValueError("the record is cut off")
        kind, length, checksum = CHUNK.unpack(head)
        if length > MAX_CHUNK_BYTES + 1024:
            raise ValueError(f"length is {length}: expected at most {MAX_CHUNK_BYTES}")
        packed = file.read(length)
        if len(packed) < length:
            raise ValueError("the record is cut off")
        if zlib.crc32(packed) != checksum:
            raise ValueError("the CRC differs")
        unpack = zlib.decompressobj()
        payload = unpack.decompress(packed, MAX_CHUNK_BYTES)
        if not unpack.eof or unpack.unused_data:
            raise ValueError(f"expected one zlib stream of at most {MAX_CHUNK_BYTES} bytes")
        yield kind, payload


def _sanitizer_of(about: object, log: Callable[[Report], object] | None) -> Sanitizer:
    if not isinstance(about, dict) or not isinstance(about.get("groups"), list):
        raise ValueError("expected a description of groups")
    groups = [SanitizedGroup(**group) for group in about["groups"]]
    sizes = [integer(about[name], name, 0) for name in MEDIA]
    stride = max((group.block_size for group in groups), default=1)
    needed = sum(sizes) * (16 * stride + 512)
    if needed > _MAX_BYTES:
        raise ValueError(f"it needs {needed} bytes: expected at most {_MAX_BYTES}")
    return Sanitizer(groups, sizes[0], num_host_blocks=sizes[1], every=about["every"], log=log)


def _replay(sanitizer: Sanitizer, data: bytearray) -> None:
    """Repeat all complete calls at the start of `data`, and remove them from `data`."""
    at = 0
    while True:
        try:
            call, end = _parse(data, at)
        except EOFError:
            break
        at = end
        _repeat(sanitizer, *call)
    del data[:at]
    if len(data) > 2 * MAX_CHUNK_BYTES:
        raise ValueError("a call is too large")


def _parse(data: bytearray, at: int) -> tuple[tuple, int]:
    def take(size: int) -> memoryview:
        nonlocal at
        if size > len(data) - at:
            raise EOFError
        at += size
        return memoryview(data)[at - size : at]

    code, group, num_names, num_numbers, num_arrays = CALL.unpack(take(CALL.size))
    values = np.frombuffer(take(8 * (num_names + num_numbers)), "<i8").tolist()
    names, numbers = [f"request-{each:016x}" for each in values[:num_names]], values[num_names:]
    arrays = []
    for _ in range(num_arrays):
        dtype, ndim = take(2)
        if dtype == 0:
            arrays.append(None)
            continue
        if dtype > 2 or ndim not in (1, 2):
            raise ValueError("an array is invalid")
        shape = struct.unpack(f"<{ndim}I", take(4 * ndim))
        size = int(np.prod(shape, dtype=object)) * DTYPES[dtype].itemsize
        arrays.append(np.frombuffer(bytes(take(size)), DTYPES[dtype]).reshape(shape))
    if code >= len(NAMES):
        raise ValueError(f"call {code} is unknown")
    return (NAMES[code], group, names, numbers, arrays), at


def _repeat(
    sanitizer: Sanitizer,
    name: str,
    group: int,
    names: list[str],
    numbers: list[int],
    arrays: list[np.ndarray | None],
) -> None:
    requests = sanitizer._requests
    if name == "reset":
        sanitizer.reset()
    elif name == "step":
        sanitizer.observe_step(*numbers)
    elif name == "request":
        (seed, encoder), (one,) = numbers, names
        if requests.tags.num_rows >= _MAX_REQUESTS or seed < 0:
            raise ValueError(f"expected at most {_MAX_REQUESTS} requests at a time")
        requests.begin(one, seed, encoder)
    elif name == "tokens":
        starts, counts, hashes, *tree = arrays
        if hashes.size + requests.tags.num_tags > _MAX_TAGS:
            raise ValueError(f"expected at most {_MAX_TAGS} tokens")
        names, rows = requests.rows_of(names)
        if rows.min(initial=0) < 0 or len(set(names)) < len(rows):
            raise ValueError("tokens of a request are missing")
        requests.put(names, rows, starts, counts, hashes, *tree)
    elif name == "finish":
        sanitizer.finish(*names)
    elif name in ("allocation", "free"):
        getattr(sanitizer, f"observe_{name}")(*names, *arrays, group=group)
    elif name == "slot_copy":
        sanitizer.observe_slot_copy(group, *arrays)
    elif name == "digests":
        sanitizer.observe_digests(group, *arrays)
    elif name == "check_digests":
        sanitizer.check_digests(group, *arrays)
    elif name == "copy":
        source, target = (MEDIA[number] for number in numbers)
        sanitizer.observe_copy(*arrays, src_medium=source, dst_medium=target)
    elif name == "clear":
        sanitizer.observe_clear(*arrays, medium=MEDIA[numbers[0]])
    else:
        getattr(sanitizer, f"observe_{name}")(group, names, *arrays)
