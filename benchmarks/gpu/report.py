# SPDX-License-Identifier: Apache-2.0
"""The files of a run: a JSON file, rewritten after each stage, and several logs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path

from benchmarks.gpu import machine

# Limits per stage: characters at the beginning and at the end of its log, and number of rows.
_LOG_HEAD, _LOG_TAIL = 1 << 20, 1 << 18
_MAX_ROWS = 20_000


SECOND = "-second"  # the end of the name of a second lease's report
FIRST_SECTION, SECOND_SECTION = "lease 1", "lease 2"


class Report:
    """The results so far, which each `save` writes to a section of a file.

    `path`: the JSON file, which both leases share. Logs are written next to it.
    """

    def __init__(self, folder: Path, name: str, facts: dict, adds: bool = False) -> None:
        """`adds`: whether the stages of an existing section are kept unless they are run again.
        Otherwise, a file with such a section is kept as `NAME-before.json`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self._adds = folder, name, adds
        self.path = folder / f"{name.removesuffix(SECOND)}.json"
        self.section = SECOND_SECTION if name.endswith(SECOND) else FIRST_SECTION
        self.contents: dict = {**facts, "stages": {}}
        self._sections: dict = {}
        self._logs_begun: set[str] = set()
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._sections = dict(json.loads(self.path.read_text()))
        if adds:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self.contents["stages"] = dict(self._sections[self.section]["stages"])
        elif self.path.exists() and (self.section in self._sections or not self._sections):
            shutil.copyfile(self.path, folder / f"{name}-before.json")

    def log(self, section: str, stage: str, command: str) -> StageLog:
        """Create a stage's log, which becomes a part of the section's file."""
        path = self.folder / f"{self.name}-{section}.log"
        if section not in self._logs_begun:
            if not self._adds:
                path.write_bytes(b"")
            self._logs_begun.add(section)
        return StageLog(path, f"== {stage}: {command}")

    def save(self) -> None:
        """Write the JSON file atomically."""
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            machine.write_results(draft, {**self._sections, self.section: self.contents})
            draft.replace(self.path)
        finally:  # if the disk is full, the earlier file stays
            draft.unlink(missing_ok=True)


class StageLog:
    """The log of a stage.

    Lines are written as they arrive. If there are too many lines, only the first and the last are kept.
    """

    def __init__(self, path: Path, header: str) -> None:
        self._file = path.open("a", encoding="utf-8", errors="replace")
        self._start, self._written, self._dropped = time.monotonic(), 0, 0
        self._tail: list[str] = []
        self._tail_size = 0
        self.line(header)

    def line(self, text: str) -> None:
        """Add a line with the seconds since the start of the stage."""
        stamped = f"{time.monotonic() - self._start:7.2f} {text}\n"
        if self._written < _LOG_HEAD:
            self._file.write(stamped[:_LOG_HEAD])
            self._file.flush()
            self._written += len(stamped)
            return
        self._tail.append(stamped[-_LOG_TAIL:])
        self._tail_size += len(self._tail[-1])
        while self._tail_size > _LOG_TAIL and len(self._tail) > 1:
            self._tail_size -= len(self._tail.pop(0))
            self._dropped += 1

    def close(self, status: str) -> None:
        """Finish the stage's part of the log."""
        if self._dropped:
            self._file.write(f"... {self._dropped} lines left out ...\n")
        self._file.writelines(self._tail)
        self._file.write(f"== {status} after {time.monotonic() - self._start:.1f} s\n\n")
        self._file.close()


def parsed(line: str) -> dict | None:
    """Parse a line of the `say` protocol, or return None.

    Numbers that are invalid in JSON become null.
    """
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


class Outcome:
    """The results that a stage has reported so far."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.learned: list[str] = []
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.last: list[str] = []  # the last few lines outside the protocol

    def take(self, line: str) -> str | None:
        """Process a line of output. Returns the message for the user, if the line contains one."""
        fields = parsed(line)
        if fields is None:
            if line.strip():
                self.last = [*self.last[-11:], line[:500]]
            return None
        for kind in ("learned", "skipped", "failed"):
            if isinstance(fields.get(kind), str) and len(fields) == 1:
                getattr(self, kind).append(fields[kind])
                return fields[kind] if kind == "learned" else f"{kind}: {fields[kind]}"
        if len(self.rows) < _MAX_ROWS:
            self.rows.append(fields)
        return None

    def as_dict(self, status: str, seconds: float, limit_s: float) -> dict:
        """Return the JSON representation."""
        found: dict = {"status": status, "seconds": round(seconds, 1), "limit_s": round(limit_s, 1)}
        for kind in ("learned", "skipped", "failed"):
            if getattr(self, kind):
                found[kind] = getattr(self, kind)
        if status not in ("ok", "skipped"):
            found["output"] = self.last
        found["rows"] = self.rows
        return found
