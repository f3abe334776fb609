"""Checks of arguments. Each returns its argument, or raises an error with its name and value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence, Sized
from dataclasses import fields
from itertools import islice
from numbers import Real
from operator import index
from threading import TIMEOUT_MAX
from types import UnionType
from typing import NoReturn

import numpy as np

MAX_INT32 = 2**31 - 1  # ids and sizes of blocks are int32
MAX_INT64 = 2**63 - 1
MAX_LAYERS = 4096  # of a model: what is done per layer ends soon
_MOST_SHOWN = 200  # characters
_MOST_DIMENSIONS = 8  # of lists in lists; no argument has more than 3
_NO_NESTING = (str, bytes, range, memoryview)  # sequences of no sequences


def integer(value: int, name: str, least: int = 0, most: int = MAX_INT32) -> int:
    """A whole number of [least, most]. TypeError or ValueError."""
    try:
        number = index(value)  # also of numpy's integers, which would overflow
    except (TypeError, RuntimeError):  # RuntimeError: of a tensor that has no value
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}: expected an integer")
    if not least <= number <= most:
        raise ValueError(f"{name} is {shown(number)}: expected {least} to {most}")
    return number


def number(value: float, name: str, expected: str = "a number") -> float:
    """A real number as a float, also one of numpy's; not True or False. TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, float | int | Real):
        raise TypeError(f"{name} is {shown(value)}: expected {expected}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} is {shown(value)}: expected {expected} that a float can hold"
        ) from None


def seconds(value: float, name: str) -> float:
    """A duration: finite, 0 or more; at most what the system can wait. TypeError or ValueError."""
    found = number(value, name, "seconds")
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} is {value}: expected finite seconds, 0 or more")
    return min(found, TIMEOUT_MAX)


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def byte_count(value: int | str, name: str, least: int = 1) -> int:
    """Bytes, as an integer or a text with a unit ("1.5 GiB", "64MiB"). TypeError or ValueError."""
    if not isinstance(value, str):
        return integer(value, name, least, MAX_INT64)
    text = value.strip()
    units = [unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)]
    try:
        count = float(text.removesuffix(units[0])) * _UNITS[units[0]]
        if not least <= count <= MAX_INT64:
            raise ValueError
    except (IndexError, ValueError):
        raise ValueError(
            f"{name} is {shown(value)}: expected {least} bytes or more, as a number or as "
            f"{', '.join(f'2{unit}' for unit in _UNITS)}"
        ) from None
    return int(count)


def shown(value: object) -> str:
    """What came, for an error; cut off where it is long. Never raises: every error shows its value so.

    >>> shown(10**5000)  # Python writes no more than 4,300 digits
    'an integer of 16610 bits'
    """
    try:
        text = repr(value)
    except Exception:  # of the value's own, or of an integer in it
        kind = type(value).__name__
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {kind}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def num_entries(values: Sized, name: str, expected: str = "a sequence") -> int:
    """How many entries an argument has, before any is looked at: it may be without an end.

    TypeError for what does not say how many it has, ValueError for more than an int32 counts.
    """
    try:
        count = math.prod(values.shape) if hasattr(values, "shape") else len(values)
    except OverflowError:
        count = MAX_INT64
    except (TypeError, ValueError):  # ValueError: of a length below 0
        raise TypeError(f"{name} is {shown(values)}: expected {expected}") from None
    if not isinstance(count, int):  # of nested tensors
        raise TypeError(f"{name} has no fixed number of entries: expected {expected}")
    if count > MAX_INT32:
        raise ValueError(f"{name} has {shown(count)} entries: expected at most {MAX_INT32}")
    return count


def listed(values: Iterable, name: str, expected: str = "a sequence") -> list:
    """The entries of an iterable that says how many it has. TypeError or ValueError."""
    num_entries(values, name, expected)
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {shown(values)}: expected {expected}") from None


def as_array(values: object, name: str) -> np.ndarray:
    """An array of whatever dtype; TypeError or ValueError for what numpy makes none of."""
    if hasattr(values, "__len__"):
        num_entries(values, name)
        if isinstance(values, Sequence) and not isinstance(values, _NO_NESTING):
            _check_nested(values, name, depth=1)
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {shown(values)}: expected an array of integers") from None


def _check_nested(values: Sequence, name: str, depth: int) -> None:
    """`num_entries` of each sequence in a sequence: numpy reads all of it before it compares lengths."""
    for i, entry in enumerate(islice(values, len(values))):
        if i == 0 and isinstance(entry, int | float):
            return  # numpy reads no sequence behind a number
        if not hasattr(entry, "__len__"):
            continue
        inner = f"{name}[{i}]"
        num_entries(entry, inner)
        if isinstance(entry, Sequence) and not isinstance(entry, _NO_NESTING):
            if depth == _MOST_DIMENSIONS:
                raise ValueError(f"{inner} is a sequence: expected at most {depth} dimensions")
            _check_nested(entry, inner, depth + 1)


def flag(value: bool, name: str) -> bool:
    """True or False, and no other. TypeError."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {shown(value)}: expected True or False")
    return bool(value)


def instance(value: object, kind: type | UnionType, name: str) -> None:
    """TypeError unless it is an instance of this class, or of one of several."""
    if not isinstance(value, kind):
        kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
        expected = " or ".join(each.__name__ for each in kinds)
        raise TypeError(f"{name} is {shown(value)}: expected a {expected}")


def instances(
    values: Iterable, kind: type | UnionType, name: str, expected: str = "a sequence"
) -> list:
    """The entries of a sequence, each an instance of `kind`. TypeError or ValueError."""
    found = listed(values, name, expected)
    for i, each in enumerate(found):
        instance(each, kind, f"{name}[{i}]")
    return found


_OF_ANNOTATION = {
    "int": lambda value, name: integer(value, name, 0, MAX_INT64),
    "float": number,
    "str": lambda value, name: instance(value, str, name) or value,
}


def plain_fields(record: object) -> None:
    """For `__post_init__` of a dataclass: its fields are what they are annotated as.

    Those that are int (0 or more), float or str, or one of these or None; kept as Python's own numbers.
    TypeError or ValueError.
    """
    for each in fields(record):
        kind, _, rest = each.type.partition(" | ")
        value = getattr(record, each.name)
        if kind in _OF_ANNOTATION and not (value is None and rest == "None"):
            object.__setattr__(record, each.name, _OF_ANNOTATION[kind](value, each.name))


def dtype_name(dtype: object, known: Iterable[str], name: str = "dtype") -> str:
    """The name of a dtype ("bfloat16"), given as that or as a torch.dtype. TypeError or ValueError."""
    found = dtype
    if type(dtype).__module__ == "torch":  # which is not imported here
        found = str(dtype).removeprefix("torch.")
    if not isinstance(found, str):
        raise TypeError(f"{name} is {shown(dtype)}: expected a torch.dtype or its name")
    if found not in known:
        raise ValueError(f"{name} is {shown(found)}: expected one of {', '.join(known)}")
    return found


def text(value: str, name: str) -> str:
    """A string that UTF-8 can hold: no lone surrogate. TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}: expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {shown(value)}: expected text that UTF-8 can hold") from None
    return value


def path(value: str | os.PathLike[str], name: str) -> str:
    """The name of a file; no file descriptor and no bytes. TypeError or ValueError."""
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str):
        raise TypeError(f"{name} is {shown(value)}: expected a string or an os.PathLike")
    try:
        encoded = os.fsencode(found)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise ValueError(f"{name} is {shown(found)}: expected the name of a file")
    return found


def check_name(value: str, name: str) -> None:
    """A string that is not empty. TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}: expected a string")
    if not value:
        raise ValueError(f"{name} is {shown(value)}: expected a name that is not empty")


def check_range(name: str, what: str, ids: np.ndarray, least: int, size: int) -> None:
    """ValueError unless all ids are of [least, size)."""
    wrong = np.flatnonzero((ids < least) | (ids >= size))
    if len(wrong):
        raise ValueError(
            f"{name}[{wrong[0]}] {what} {ids[wrong[0]]}: expected {least} to {size - 1}"
        )


def check_once(what: str, ids: np.ndarray) -> None:
    """ValueError unless all ids differ."""
    found, counts = np.unique(ids, return_counts=True)
    if len(found) and counts.max() > 1:
        raise ValueError(f"{what} {found[counts.argmax()]} twice: expected one write per page")


def integers(values: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """int64[n, *shape]; nothing is cut off. ValueError or TypeError for anything else."""
    array = as_array(values, name)
    if array.size == 0 and array.ndim <= 1 + len(shape):  # also [], of whatever was to be pairs
        return np.zeros((0, *shape), np.int64)
    if array.shape[1:] != shape or array.ndim != 1 + len(shape):
        wanted = ", ".join(["n", *map(str, shape)])
        raise ValueError(f"{name} has shape {list(array.shape)}: expected [{wanted}]")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    if array.dtype == np.uint64:
        wrong = np.argwhere(array > np.iinfo(np.int64).max)
        if len(wrong):
            raise ValueError(f"{name}[{wrong[0][0]}] has {array[tuple(wrong[0])]}: expected int64")
    return array.astype(np.int64)


def refuse_pickle(value: object, instead: str) -> NoReturn:
    """For `__reduce__` of what has native state of its process."""
    raise TypeError(f"a {type(value).__name__} is not pickled: expected {instead}")
