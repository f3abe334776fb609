"""Eviction and writes to the host of a replay, as the command line writes them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.allocator import eviction_names
from kvcache.allocator.options import HOST_WRITES
from kvcache.native.load import core
from kvcache.replay.written import parted, shown

_MOST = 2**31 - 1  # hits


HOST_POLICIES = ("lru", "s3_fifo", "segmented_lru")  # the host is told of nothing that others need


def parse_eviction(text: str, names: Sequence[str] | None = None) -> tuple[str, dict[str, float]]:
    """Name and options of a policy, one of `names` (None: all), from `name[:option=value]...`.

    ValueError, which names what is wrong and what was expected.

    >>> parse_eviction("s3_fifo:small_share=0.2")
    ('s3_fifo', {'small_share': 0.2})
    """
    name, written = parted(text)
    names = names or eviction_names()
    if name not in names:
        raise ValueError(f"{shown(text)}: expected one of {', '.join(names)}")
    options = {option: _number(option, value, text) for option, value in written.items()}
    try:
        core.Eviction(name, options)
    except ValueError as error:
        reason = str(error).removeprefix(f"eviction '{name}': ")
        raise ValueError(f"{shown(text)}: {reason}") from None
    return name, options


def parse_host_write(text: str) -> dict[str, str | int]:
    """What a manager is told for `back`, `through` or `selective[:N]`.

    >>> parse_host_write("selective:3")
    {'host_write': 'selective', 'num_hits_to_write': 3}
    """
    mode, colon, count = text.partition(":")
    if mode not in HOST_WRITES or (colon and mode != "selective"):
        raise ValueError(f"{shown(text)}: expected back, through, selective or selective:N")
    if not colon:
        return {"host_write": mode}
    number = int(count) if count.isdecimal() and len(count) <= len(str(_MOST)) else 0
    if not 1 <= number <= _MOST:
        raise ValueError(f"{shown(text)}: expected selective:N with N from 1 to {_MOST}")
    return {"host_write": mode, "num_hits_to_write": number}


def _number(option: str, value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"{shown(text)}: {shown(option)} is {shown(value)}: expected a number"
        ) from None
