"""What a manager's options and `free` are given for eviction and for tiers, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcache.checks import integer
from kvcache.native.load import core

_MOST_BYTES = 2**62
HOST_WRITES = {
    "back": core.HostWrite.BACK,
    "through": core.HostWrite.THROUGH,
    "selective": core.HostWrite.SELECTIVE,
}


def eviction_of(policy: str, options: Mapping[str, float] | None, name: str) -> core.Eviction:
    """A policy and its options; `name` is what the policy's argument is called."""
    if not isinstance(policy, str):
        raise TypeError(f"{name} is {policy!r}: expected the name of a policy")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"{name}_options is {options!r}: expected a dict of numbers")
    numbers = {}
    for option, value in (options or {}).items():
        if not isinstance(option, str) or not isinstance(value, int | float):
            raise TypeError(f"{name}_options has {option!r}: {value!r}: expected a number by name")
        numbers[option] = float(value)
    return core.Eviction(policy, numbers)


def host_write_of(host_write: str) -> core.HostWrite:
    """When cached blocks are written to the host."""
    if not isinstance(host_write, str) or host_write not in HOST_WRITES:
        raise ValueError(f"host_write is {host_write!r}: expected one of {', '.join(HOST_WRITES)}")
    return HOST_WRITES[host_write]


def checked_page_bytes(value: int) -> int:
    """Bytes of a page; 0 for not known."""
    return integer(value, "page_bytes", most=_MOST_BYTES)


def checked_session(session: str) -> str:
    """The name under which somebody pins."""
    if not isinstance(session, str):
        raise TypeError(f"session is {session!r}: expected a string")
    return session


def checked_seconds(value: float, name: str, most: float = 2.0**50) -> float:
    """Seconds of a clock, 0 or more and finite."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}: expected a number")
    if not 0 <= value < most:
        raise ValueError(f"{name} is {value!r}: expected 0 or more, and a finite number")
    return value


def checked_retention(
    retention: Sequence[tuple[int, int, int, float | None]],
) -> list[tuple[int, int, int, int]]:
    """(first token, stop, priority, milliseconds or -1 for ever) each."""
    if not isinstance(retention, list | tuple):
        raise TypeError(f"retention is {retention!r}: expected a list of tuples")
    return [_checked_range(f"retention[{i}]", each) for i, each in enumerate(retention)]


def _checked_range(name: str, value: object) -> tuple[int, int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 4:
        raise TypeError(
            f"{name} is {value!r}: expected (first token, stop, priority, seconds or None)"
        )
    first = integer(value[0], f"{name}: first token")
    stop = integer(value[1], f"{name}: stop", least=first)
    priority = integer(value[2], f"{name}: priority", most=100)
    if value[3] is None:
        return first, stop, priority, -1
    return first, stop, priority, int(checked_seconds(value[3], f"{name}: seconds") * 1000)
