# SPDX-License-Identifier: Apache-2.0
"""Parses eviction policies and host write modes of a replay in command-line syntax."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.allocator import eviction_names, host_eviction_names
from kvcache.allocator.options import HOST_WRITES
from kvcache.native.load import core
from kvcache_exchange.cli.option_text import quoted, split_options


def parse_eviction(text: str) -> tuple[str, dict[str, float]]:
    """Parse an eviction policy for the device from `name[:option=value]...`.

    Returns:
        The name and the options.

    Raises:
        ValueError: The text is invalid. The message names the policy, the value and the expected value.

    Example:
        >>> parse_eviction("priority:default_priority=50")
        ('priority', {'default_priority': 50.0})
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


def parse_host_write(text: str) -> dict[str, str | float]:
    """Parse `back[:G]` or `through[:G]` into options of `KVCacheManager`.

    Raises:
        ValueError: The text has any other form.

    Example:
        >>> parse_host_write("back:0.05")
        {'host_write': 'back', 'min_gain_to_write': 0.05}
    """
    mode, colon, gain = text.partition(":")
    if mode not in HOST_WRITES:
        raise ValueError(f"{quoted(text)}: expected back, back:G, through or through:G")
    if not colon:
        return {"host_write": mode}
    return {"host_write": mode, "min_gain_to_write": _parse_gain(gain, text)}


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
        raise ValueError(f"{quoted(text)}: expected a gain G from 0 to 1")
    return number


def _parse_number(option: str, value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"{quoted(text)}: {quoted(option)} is {quoted(value)}: expected a number"
        ) from None
