# SPDX-License-Identifier: Apache-2.0
"""Reads trace lines and their JSON fields, with checks that report the location of an error."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from kvcache.checks import MAX_INT32

_MOST_TIME = 2**53 - 1  # seconds or milliseconds; floats represent integers up to it exactly


class TraceError(ValueError):
    """Raised if a trace line is malformed. The message names the file, line, field and value."""


class Line(NamedTuple):
    text: bytes
    where: str  # file and line number, for error messages


def record_of(line: Line) -> dict:
    try:
        record = json.loads(line.text.decode())
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{line.where}: not JSON ({error}): expected one object per line"
        ) from None
    if not isinstance(record, dict):
        raise TraceError(f"{line.where}: is {quoted(record)}: expected a JSON object")
    return record


def field(record: dict, name: str, line: Line) -> object:
    if name not in record:
        raise TraceError(f"{line.where}: {name} is missing: expected it in every line")
    return record[name]


def count(record: dict, name: str, least: int, line: Line, *, most: float = MAX_INT32) -> int:
    """Return a field that contains a number of tokens."""
    return _whole(record, name, least, most, line)


def milliseconds(record: dict, name: str, line: Line) -> int:
    """Return a field that contains a time in milliseconds."""
    return _whole(record, name, 0, _MOST_TIME, line)


def check_times(record: dict, line: Line, expected: bool | None) -> bool:
    """Return whether a line has a `timestamp`.

    Raises TraceError if the result differs from `expected`.
    """
    found = "timestamp" in record
    if expected not in (None, found):
        what = "is missing" if expected else f"is {quoted(record['timestamp'])}"
        raise TraceError(f"{line.where}: timestamp {what}: expected it in each line or in none")
    return found


def _whole(record: dict, name: str, least: int, most: float, line: Line) -> int:
    value = field(record, name, line)
    if type(value) is not int or value < least:  # a bool is an int, but not a count
        raise TraceError(
            f"{line.where}: {name} is {quoted(value)}: expected a whole number of {least} or more"
        )
    if value > most:
        raise TraceError(f"{line.where}: {name} is {quoted(value)}: expected at most {most}")
    return value


def seconds(record: dict, name: str, line: Line) -> int:
    """Return a field that contains a time in seconds, converted to milliseconds."""
    value = field(record, name, line)
    if type(value) not in (int, float) or not 0 <= value < _MOST_TIME:
        raise TraceError(
            f"{line.where}: {name} is {quoted(value)}: expected a number of seconds, 0 or more"
        )
    return round(1000 * value)


def whole_numbers(record: dict, name: str, most: int, line: Line) -> list[int]:
    """Return a field that contains a list of integers from 0 to `most`."""
    values = field(record, name, line)
    if not isinstance(values, list):
        raise TraceError(
            f"{line.where}: {name} is {quoted(values)}: expected a list of whole numbers"
        )
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= most:
            raise TraceError(
                f"{line.where}: {name}[{i}] is {quoted(value)}: "
                f"expected a whole number from 0 to {most}"
            )
    return values


def token_ids(record: dict, name: str, line: Line) -> np.ndarray:
    """Return a field that contains one or more token ids, as int32[n]."""
    ids = whole_numbers(record, name, MAX_INT32, line)
    if not ids:
        raise TraceError(f"{line.where}: {name} is []: expected at least one token")
    return np.array(ids, np.int32)


def quoted(value: object) -> str:
    """Return a value in JSON syntax, truncated if long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= 40 else text[:37] + "..."
