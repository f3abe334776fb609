# SPDX-License-Identifier: Apache-2.0
"""Validates the results of a store's methods. Validation runs in the store's thread, so the tier
receives only valid values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

from kvcache.checks import num_entries
from kvcache_exchange.store.base import StoreError

_T = TypeVar("_T")


def flags(answer: Any, count: int, method: str) -> list[bool]:
    """Return one bool for each of `count` keys. Raises StoreError for any other result.

    Example:
        >>> flags((1, False), 2, "exists")
        [True, False]
    """
    return _each(answer, bool, count, method, "bools")


def sizes(answer: Any, count: int, method: str) -> list[int]:
    """Return one integer for each of `count` keys. Raises StoreError for any other result."""
    return _each(answer, operator.index, count, method, "integers")


def texts(answer: Any, method: str) -> list[str]:
    """Return a list of keys. Raises StoreError for any other result."""
    return _each(answer, _text, None, method, "keys")


def _each(
    answer: Iterable[Any], convert: Callable[[Any], _T], count: int | None, method: str, what: str
) -> list[_T]:
    expected = f"expected {what}" if count is None else f"expected {count} {what}, one for each key"
    try:
        # Read at most one entry more than expected, because an iterator may be infinite. If the
        # expected number of entries is not known, the result must have a length.
        most = num_entries(answer, method) if count is None else count + 1
        found = [convert(each) for each in islice(answer, most)]
    except (TypeError, ValueError) as error:
        raise StoreError(f"{method} returned {_short(answer)}: {expected}") from error
    if count is not None and len(found) != count:
        more = " or more" if len(found) > count else ""
        raise StoreError(f"{method} returned {len(found)}{more} {what}: {expected}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a key is {_short(value)}: expected a str")
    return value


def _short(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= 60 else f"{found[:60]}..."
