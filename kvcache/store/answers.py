"""What a store answers, checked in its thread: whatever it is, the tier goes on with what it expects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

from kvcache.checks import num_entries
from kvcache.store.base import StoreError

_T = TypeVar("_T")


def flags(answer: Any, count: int, method: str) -> list[bool]:
    """A bool for each of `count` keys; StoreError for another answer.

    >>> flags((1, False), 2, "exists")
    [True, False]
    """
    return _each(answer, bool, count, method, "bools")


def sizes(answer: Any, count: int, method: str) -> list[int]:
    """An integer for each of `count` keys; StoreError for another answer."""
    return _each(answer, operator.index, count, method, "integers")


def texts(answer: Any, method: str) -> list[str]:
    """A list of keys; StoreError for another answer."""
    return _each(answer, _text, None, method, "keys")


def _each(
    answer: Iterable[Any], convert: Callable[[Any], _T], count: int | None, method: str, what: str
) -> list[_T]:
    expected = f"expected {what}" if count is None else f"expected {count} {what}, one for each key"
    try:
        # Of an answer without an end, one entry more than expected; keys come in what has a length.
        most = num_entries(answer, method) if count is None else count + 1
        found = [convert(each) for each in islice(answer, most)]
    except (TypeError, ValueError) as error:
        raise StoreError(f"{method} answered {_short(answer)}: {expected}") from error
    if count is not None and len(found) != count:
        more = " or more" if len(found) > count else ""
        raise StoreError(f"{method} answered {len(found)}{more} {what}: {expected}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a key is {_short(value)}: expected a str")
    return value


def _short(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= 60 else f"{found[:60]}..."
