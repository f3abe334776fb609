# SPDX-License-Identifier: Apache-2.0
"""Argument checks. Each function returns the checked value, or raises an error that states the
argument's name and value.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import fields
from itertools import islice
from numbers import Real
from operator import index
from threading import TIMEOUT_MAX
from types import UnionType
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np

MAX_INT32 = 2**31 - 1  # block ids and sizes are int32
MAX_INT64 = 2**63 - 1
MAX_LAYERS = 4096  # maximum number of layers in a model, to bound per-layer work
_MOST_SHOWN = 200  # maximum length of a shown value, in characters
_MOST_DIMENSIONS = 8  # maximum nesting depth of lists; no argument needs more than 3
_NO_NESTING = (str, bytes, range, memoryview)  # sequence types whose entries are never sequences
_Sizes = TypeVar("_Sizes", bound=NamedTuple)


def integer(value: int, name: str, least: int = 0, most: int = MAX_INT32) -> int:
    """Return an integer in [least, most]. Raises TypeError or ValueError."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = index(value)  # converts numpy integers, which would overflow
    except (TypeError, RuntimeError):  # a meta tensor raises RuntimeError
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}: expected an integer")
    if not least <= number <= most:
        raise ValueError(f"{name} is {shown(number)}: expected {least} to {most}")
    return number


def number(value: float, name: str, expected: str = "a number") -> float:
    """Return a real number, but no bool, as a float. Raises TypeError or ValueError."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, float | int | Real):
        raise TypeError(f"{name} is {shown(value)}: expected {expected}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} is {shown(value)}: expected {expected} that a float can hold"
        ) from None


def seconds(value: float, name: str) -> float:
    """Return a finite duration from 0 to the longest supported wait. Raises TypeError or ValueError."""
    found = number(value, name, "seconds")
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} is {value}: expected finite seconds, 0 or more")
    return min(found, TIMEOUT_MAX)


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def byte_count(value: int | str, name: str, least: int = 1) -> int:
    """Return bytes, given as an integer or with a unit ("1.5 GiB"). Raises TypeError or ValueError."""
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
    """Format a value for an error message. Long values are truncated. Never raises."""
    try:
        text = repr(value)
    except Exception:  # the value's `__repr__` failed, or the value contains a huge integer
        kind = type(value).__name__
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {kind}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def num_entries(values: Sized, name: str, expected: str = "a sequence") -> int:
    """Return the number of entries of an argument, which may be infinite, without reading them.

    Raises TypeError if the argument has no length, and ValueError if the length exceeds an int32.
    """
    try:
        count = math.prod(values.shape) if hasattr(values, "shape") else len(values)
    except OverflowError:
        count = MAX_INT64
    except (TypeError, ValueError):  # a negative length raises ValueError
        raise TypeError(f"{name} is {shown(values)}: expected {expected}") from None
    if not isinstance(count, int):  # for example, a nested tensor
        raise TypeError(f"{name} has no fixed number of entries: expected {expected}")
    if count > MAX_INT32:
        raise ValueError(f"{name} has {shown(count)} entries: expected at most {MAX_INT32}")
    return count


def listed(values: Iterable, name: str, expected: str = "a sequence") -> list:
    """Return the entries of a sized iterable as a list. Raises TypeError or ValueError."""
    num_entries(values, name, expected)
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {shown(values)}: expected {expected}") from None


def as_array(values: object, name: str) -> np.ndarray:
    """Return an array of any dtype. Raises TypeError or ValueError if numpy cannot create one."""
    if hasattr(values, "__len__"):
        num_entries(values, name)
        if isinstance(values, Sequence) and not isinstance(values, _NO_NESTING):
            _check_nested(values, name, depth=1)
    try:
        if isinstance(values, range):  # NumPy would convert its entries one by one
            return np.arange(values.start, values.stop, values.step)
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {shown(values)}: expected an array of integers") from None


def _check_nested(values: Sequence, name: str, depth: int) -> None:
    """Check the lengths of nested sequences, all of which NumPy reads before it compares them."""
    for i, entry in enumerate(islice(values, len(values))):
        if i == 0 and isinstance(entry, int | float):
            return  # NumPy does not read any sequences after a number
        if not hasattr(entry, "__len__"):
            continue
        inner = f"{name}[{i}]"
        num_entries(entry, inner)
        if isinstance(entry, Sequence) and not isinstance(entry, _NO_NESTING):
            if depth == _MOST_DIMENSIONS:
                raise ValueError(f"{inner} is a sequence: expected at most {depth} dimensions")
            _check_nested(entry, inner, depth + 1)


def flag(value: bool, name: str) -> bool:
    """Return True or False. Raises TypeError for any other value."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {shown(value)}: expected True or False")
    return bool(value)


def instance(value: object, kind: type | UnionType, name: str) -> None:
    """Raise TypeError unless the value is an instance of `kind`."""
    if not isinstance(value, kind):
        kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
        expected = " or ".join(each.__name__ for each in kinds)
        raise TypeError(f"{name} is {shown(value)}: expected a {expected}")


def one_of(value: str, name: str, known: Collection[str]) -> str:
    """Return one of the known strings. Raises ValueError for any other value."""
    if not isinstance(value, str) or value not in known:
        expected = f"one of {', '.join(known)}" if len(known) > 2 else " or ".join(map(repr, known))
        raise ValueError(f"{name} is {shown(value)}: expected {expected}")
    return value


def check_count(values: Sized, count: int, name: str, per: str) -> None:
    """Raise ValueError unless there are `count` entries. `per`: what each entry is for."""
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries: expected {count}, one per {per}")


def instances(
    values: Iterable, kind: type | UnionType, name: str, expected: str = "a sequence"
) -> list:
    """Return the entries of a sequence of instances of `kind`. Raises TypeError or ValueError."""
    found = listed(values, name, expected)
    for i, each in enumerate(found):
        instance(each, kind, f"{name}[{i}]")
    return found


def named_sizes(
    values: Sequence[Sequence[int]], kind: type[_Sizes], name: str, least: tuple[int, ...]
) -> tuple[_Sizes, ...]:
    """Return a sequence of named tuples of integers. `least`: the minimum of each field.

    Raises TypeError or ValueError.
    """
    expected = f"({', '.join(kind._fields)})"
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} is {shown(values)}: expected a sequence of {expected}")
    if not values:
        raise ValueError(f"{name} is empty: expected one or more")
    found = []
    for i, each in enumerate(listed(values, name)):
        if not isinstance(each, Sequence) or len(each) != len(kind._fields):
            raise TypeError(f"{name}[{i}] is {shown(each)}: expected {expected}")
        sizes = zip(kind._fields, each, least)
        found.append(kind(*(integer(n, f"{what} of {name}[{i}]", low) for what, n, low in sizes)))
    return tuple(found)


# Annotations of dataclass fields. `plain_fields` checks the ranges.
Count: TypeAlias = int  # 0 to 2**31 - 1
Size: TypeAlias = int  # 1 to 2**31 - 1
Name: TypeAlias = str  # not empty
Text: TypeAlias = str  # can be encoded as UTF-8

_OF_ANNOTATION = {
    "int": lambda value, name: integer(value, name, 0, MAX_INT64),
    "Count": integer,
    "Size": lambda value, name: integer(value, name, 1),
    "float": number,
    "bool": flag,
    "str": lambda value, name: instance(value, str, name) or value,
    "Text": lambda value, name: text(value, name),
    "Name": lambda value, name: check_name(value, name) or value,
}


def plain_fields(record: object) -> None:
    """Check the fields of a dataclass that have one of the above annotations, or one of them with
    `| None`, and convert numbers to built-in Python types.

    Called from `__post_init__`. Raises TypeError or ValueError.
    """
    for each in fields(record):
        kind, _, rest = each.type.partition(" | ")
        value = getattr(record, each.name)
        if kind in _OF_ANNOTATION and rest in ("", "None") and not (value is None and rest):
            object.__setattr__(record, each.name, _OF_ANNOTATION[kind](value, each.name))


def dtype_name(dtype: object, known: Iterable[str], name: str = "dtype") -> str:
    """Return the name of a dtype or of a `torch.dtype`. Raises TypeError or ValueError."""
    found = dtype
    # Checked by name, because this module does not import torch.
    if type(dtype).__module__ == "torch":
        found = str(dtype).removeprefix("torch.")
    if not isinstance(found, str):
        raise TypeError(f"{name} is {shown(dtype)}: expected a torch.dtype or its name")
    if found not in known:
        raise ValueError(f"{name} is {shown(found)}: expected one of {', '.join(known)}")
    return found


def text(value: str, name: str) -> str:
    """Return a string that UTF-8 can encode (no lone surrogates). Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}: expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {shown(value)}: expected text that UTF-8 can hold") from None
    return value


def path(value: str | os.PathLike[str], name: str) -> str:
    """Return a file name. File descriptors and bytes are rejected. Raises TypeError or ValueError."""
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
    """Raise TypeError or ValueError unless the value is a non-empty string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}: expected a string")
    if not value:
        raise ValueError(f"{name} is {shown(value)}: expected a non-empty name")


def integer_array(values: object, name: str) -> np.ndarray:
    """Return an array of any integer dtype and shape. Raises TypeError or ValueError."""
    array = as_array(values, name)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array


def check_range(name: str, what: str, ids: np.ndarray, least: int, size: int) -> None:
    """Raise ValueError unless all ids are in [least, size)."""
    are_wrong = (ids < least) | (ids >= size)
    if np.count_nonzero(are_wrong):  # four times as fast as `any` for a few ids
        i = int(are_wrong.argmax())
        raise ValueError(f"{name}[{i}] {what} {ids[i]}: expected {least} to {size - 1}")


def check_once(what: str, ids: np.ndarray) -> None:
    """Raise ValueError if an id is repeated."""
    ordered = np.sort(ids)
    is_repeated = ordered[1:] == ordered[:-1]
    if np.count_nonzero(is_repeated):
        raise ValueError(
            f"{what} {ordered[is_repeated.argmax()]} twice: expected one write per page"
        )


def integers(values: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return int64[n, *shape] without truncating values. Raises ValueError or TypeError."""
    array = as_array(values, name)
    if array.size == 0 and array.ndim <= 1 + len(shape):  # [] is accepted as an empty list of pairs
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
    """Raise TypeError, in `__reduce__` of a class whose native state is local to the process."""
    raise TypeError(f"a {type(value).__name__} cannot be pickled: expected {instead}")
