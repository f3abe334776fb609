# SPDX-License-Identifier: Apache-2.0
"""Registers trace formats by name, and detects the format of a file."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from kvcache.checks import path as checked_path
from kvcache.checks import shown
from kvcache.extensions import load_extensions
from kvcache_lab.traces.fields import Line, TraceError, quoted
from kvcache_lab.workload import WorkloadRequest

try:
    import zstandard
except ImportError:  # needed only for Zstandard files
    zstandard = None
_ZstdError = zlib.error if zstandard is None else zstandard.ZstdError

Reader = Callable[[Iterator[Line]], Iterator[WorkloadRequest]]
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f
_MOST_LOOKED_AT = 10_000  # maximum number of log lines before the first request
MOST_LINE_BYTES = 2**26  # exceeds the size of a prompt with several million tokens


class _ZstdStream(io.RawIOBase):
    """The decompressed content of a file of Zstandard frames.

    Unlike `zstandard.stream_reader`, it raises EOFError if the last frame is truncated.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest = file, memoryview(b"")
        self._begin_frame()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._rest:
            is_over = self._frame.eof
            data = self._frame.unused_data if is_over else b""
            data = data or self._file.read(2**10)  # decompresses to at most 32 MiB
            if is_over:
                if not data:
                    return 0
                self._begin_frame()
            elif not data:
                raise EOFError("the last frame is incomplete")
            self._rest = memoryview(self._frame.decompress(data))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def _begin_frame(self) -> None:
        # Allows all windows of `zstd --long`. Only the used part of a window occupies memory.
        largest = 2**zstandard.WINDOWLOG_MAX
        self._frame = zstandard.ZstdDecompressor(max_window_size=largest).decompressobj()


class _TraceFormat(NamedTuple):
    read: Reader
    has: Callable[[Line, dict | None], bool]


_FORMS: dict[str, _TraceFormat] = {}


def register_trace_form(
    name: str, has: Callable[[Line, dict | None], bool]
) -> Callable[[Reader], Reader]:
    """Register a reader for a trace format.

    Args:
        name: Name of the format.
        has: Returns whether a line belongs to this format, given the line and its JSON object (or
            None).

    Returns:
        A decorator for the reader, a function that receives the nonblank lines and yields their
        requests.

    Raises:
        ValueError: The name is already registered.
    """

    def registered(read: Reader) -> Reader:
        if name in _FORMS:
            raise ValueError(f"name is {shown(name)}: expected a name that is not in use")
        _FORMS[name] = _TraceFormat(read, has)
        return read

    return registered


def trace_forms() -> list[str]:
    """Return the sorted names of all formats, including those of extensions."""
    load_extensions()
    return sorted(_FORMS)


def read_trace(path: str | os.PathLike, form: str | None = None) -> Iterator[WorkloadRequest]:
    """Yield the requests of a trace file, read line by line. Blank lines are skipped.

    Args:
        path: The file. May be compressed with gzip or Zstandard.
        form: One of `trace_forms()`. None: detected from the first lines, with Mooncake's format as the
            default.

    Raises:
        TypeError, ValueError: `path` is not a path or the format is unknown. Raised by the call itself.
        TraceError: A line is malformed or has more than 64 MiB, compressed data is damaged, or the
            package zstandard is missing. Raised when the line is reached.
        OSError: The file cannot be read.

    Example:
        >>> next(read_trace("mooncake_conversation.jsonl")).num_tokens  # doctest: +SKIP
        6758
    """
    return _requests(*_checked(path, form))


def _checked(path: str | os.PathLike, form: str | None) -> tuple[str, str | None]:
    name = checked_path(path, "path")
    if form is not None and not (
        isinstance(form, str) and (form in _FORMS or form in trace_forms())
    ):
        raise ValueError(f"form is {shown(form)}: expected one of {', '.join(trace_forms())}")
    return name, form


def _requests(name: str, form: str | None) -> Iterator[WorkloadRequest]:
    with open(name, "rb") as file:
        lines = _lines(_decompressed(file, name), name)
        if form is None:
            form, lines = _shown(lines)
        found = False
        for request in _FORMS[form].read(lines):
            found = True
            yield request
        if not found and form.endswith("_log"):
            raise TraceError(f"{name} has no requests: expected requests of form {form!r}")


def is_compressed(path: str | os.PathLike) -> bool:
    """Return whether `read_trace` decompresses the file."""
    with open(path, "rb") as file:
        return _compression(file.read(4)) is not None


def _compression(magic: bytes) -> str | None:
    if magic.startswith(b"\x1f\x8b"):
        return "gzip"
    # `pzstd` writes a skippable frame first.
    if magic == _ZSTD_MAGIC or (magic[1:] == _SKIPPABLE_MAGIC and magic[0] >> 4 == 5):
        return "zstd"
    return None


def _decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Return a stream of the file's content, decompressed if necessary."""
    how = _compression(file.peek(4)[:4])
    if how is None:
        return file
    if how == "gzip":
        return gzip.GzipFile(fileobj=file)
    if zstandard is None:
        raise TraceError(
            f"{name} is compressed with Zstandard, but the package zstandard is not installed: "
            "pip install 'torch-kvcache[cli]'"
        )
    return io.BufferedReader(_ZstdStream(file))


def _lines(file: BinaryIO, name: str) -> Iterator[Line]:
    """Yield the lines that are not blank."""
    for number in itertools.count(1):
        try:
            text = file.readline(MOST_LINE_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error, _ZstdError) as error:
            raise TraceError(
                f"{name}, line {number}: the compressed data is cut off or damaged ({error}): expected a "
                "complete file"
            ) from None
        if not text:
            return
        if len(text) > MOST_LINE_BYTES:
            raise TraceError(
                f"{name}, line {number}: has more than {MOST_LINE_BYTES} bytes: expected one request"
            )
        if not text.isspace():
            yield Line(text, f"{name}, line {number}")


def _shown(lines: Iterator[Line]) -> tuple[str, Iterator[Line]]:
    """Detect the format, and return it with an iterator over all lines.

    Raises TraceError if a JSON object matches no known format.
    """
    load_extensions()
    seen: list[Line] = []
    for line in itertools.islice(lines, _MOST_LOOKED_AT):
        seen.append(line)
        record = _object(line)
        for name, form in _FORMS.items():
            if form.has(line, record):
                return name, itertools.chain(seen, lines)
        if record is not None:
            raise TraceError(
                f"{line.where}: {quoted(record)} has no known format: expected one of the fields "
                "hash_ids, token_ids, prompt and messages, or a format given by name"
            )
        if line.text.lstrip().startswith((b"{", b"[{")):
            break  # not a log: logs do not start with such lines
    return "mooncake", itertools.chain(seen, lines)


def _object(line: Line) -> dict | None:
    try:
        record = json.loads(line.text.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
