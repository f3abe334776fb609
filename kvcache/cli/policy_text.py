# SPDX-License-Identifier: Apache-2.0
"""Parses eviction policies and host write modes of a replay in command-line syntax."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.allocator import eviction_names, host_eviction_names
from kvcache.allocator.options import HOST_WRITES
from kvcache.checks import MAX_INT32
from kvcache.cli.option_text import quoted, split_options
from kvcache.native.load import core


def parse_eviction(text: str) -> tuple[str, dict[str, float]]:
    """Parse an eviction policy for the device from `name[:option=value]...`.

    Returns:
        The name and the options.

    Raises:
        ValueError: The text is invalid. The message names the policy, the value and the expected value.

    Example:
        >>> parse_eviction("learned:tenant_share=0.2")
        ('learned', {'tenant_share': 0.2})
    """
    return _parse_policy(text, eviction_names(), core.Eviction)


def parse_host_eviction(text: str) -> tuple[str, dict[str, float]]:
    """Parse an eviction policy for the host tier, which supports fewer policies than the device.

    Example:
        >>> parse_host_eviction("priority")
        Traceback (most recent call last):
        ValueError: 'priority': expected one of learned, lru
    """
    return _parse_policy(text, host_eviction_names(), core.Eviction.for_host)


def parse_host_write(text: str) -> dict[str, str | int | float]:
    """Parse `back`, `through`, `selective[:N]` or `learned[:G]` into options of `KVCacheManager`.

    Raises:
        ValueError: The text has any other form.

    Example:
        >>> parse_host_write("selective:3")
        {'host_write': 'selective', 'num_hits_to_write': 3}
    """
    mode, colon, count = text.partition(":")
    if mode not in HOST_WRITES or (colon and mode not in ("selective", "learned")):
        raise ValueError(
            f"{quoted(text)}: expected back, through, selective, selective:N, learned or learned:G"
        )
    if not colon:
        return {"host_write": mode}
    if mode == "learned":
        return {"host_write": mode, "min_gain_to_write": _parse_gain(count, text)}
    number = int(count) if count.isdecimal() and len(count) <= len(str(MAX_INT32)) else 0
    if not 1 <= number <= MAX_INT32:
        raise ValueError(f"{quoted(text)}: expected selective:N with N from 1 to {MAX_INT32}")
    return {"host_write": mode, "num_hits_to_write": number}


def _parse_policy(
    text: str, names: list[str], make: Callable[[str, dict[str, float]], core.Eviction]
) -> tuple[str, dict[str, float]]:
    name, values = split_options(text)
    if name not in names:
        raise ValueError(f"{quoted(text)}: expected one of {', '.join(names)}")
    options = {option: _parse_number(option, value, text) for option, value in values.items()}
    try:
        make(name, options)
    except ValueError as error:
        reason = str(error).partition(": ")[2]  # the part after the policy name
        raise ValueError(f"{quoted(text)}: {reason}") from None
    return name, options


def _parse_gain(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"{quoted(text)}: expected learned:G with G from 0 to 1")
    return number


def _parse_number(option: str, value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"{quoted(text)}: {quoted(option)} is {quoted(value)}: expected a number"
        ) from None
