# SPDX-License-Identifier: Apache-2.0
"""Failures of a simulated fleet, and how to parse them from text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.checks import instances, integer, number, shown
from kvcache.checks import text as checked_text
from kvcache.replay.fleet.sizes import Fleet

_MOST_S = 1e9
_OF_REPLICA = ("replica", "store_link", "router_link")
FAILURE_KINDS = ("replica", "store", "router", "store_link", "router_link")
_FORM = re.compile(
    r"(?P<kind>[a-z_]+)(:(?P<replica>\d+))?@(?P<at>[^s+@]+)s?(\+(?P<lasts>[^s+@]+)s?)?"
)


@dataclass(frozen=True)
class Failure:
    """A failure that occurs at a given time in a simulation.

    Args:
        kind: What fails:

            - `replica`: A replica dies. Its requests are resent to other replicas. After `lasts_s`
              seconds, the replica restarts with an empty cache.
            - `store`: The store loses its content, and cannot be reached for `lasts_s` seconds.
            - `router`: The router restarts and knows nothing about the caches and sessions. Requests
              that arrive within `lasts_s` seconds wait.
            - `store_link`: A replica cannot reach the store for `lasts_s` seconds.
            - `router_link`: The router cannot reach a replica for `lasts_s` seconds. The replica
              completes the requests that it has already received.
        at_s: Seconds from the first arrival to the failure.
        lasts_s: Seconds from the failure to its repair.
        replica: Position of the replica, for `replica`, `store_link` and `router_link`. Decode replicas
            follow the prefill replicas.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> Failure.parse("replica:3@60s+30s")
        Failure(kind='replica', at_s=60.0, lasts_s=30.0, replica=3)
    """

    kind: str
    at_s: float
    lasts_s: float = 0.0
    replica: int | None = None

    def __post_init__(self) -> None:
        if checked_text(self.kind, "kind") not in FAILURE_KINDS:
            raise ValueError(
                f"kind is {shown(self.kind)}: expected one of {', '.join(FAILURE_KINDS)}"
            )
        for name in ("at_s", "lasts_s"):
            value = number(getattr(self, name), name)
            if not 0 <= value <= _MOST_S:
                raise ValueError(f"{name} is {shown(value)}: expected 0 to {_MOST_S:g} seconds")
            object.__setattr__(self, name, value)
        if self.kind in _OF_REPLICA:
            if self.replica is None:
                raise ValueError(
                    f"replica is None: expected the position of a replica for {self.kind}"
                )
            integer(self.replica, "replica")
        elif self.replica is not None:
            raise ValueError(f"replica is {shown(self.replica)}: expected None for {self.kind}")

    @classmethod
    def parse(cls, text: str) -> Failure:
        """Parse `kind[:replica]@seconds[+seconds]`. Raises TypeError or ValueError for any other text."""
        found = _FORM.fullmatch(checked_text(text, "text"))
        try:
            if found is None:
                raise ValueError
            at_s, lasts_s = float(found["at"]), float(found["lasts"] or 0)
        except ValueError:
            raise ValueError(
                f"{shown(text)}: expected kind[:replica]@seconds[+seconds], such as replica:3@60s+30s"
            ) from None
        replica = None if found["replica"] is None else int(found["replica"])
        return cls(found["kind"], at_s, lasts_s, replica)

    def __str__(self) -> str:
        replica = "" if self.replica is None else f":{self.replica}"
        lasts = f"+{self.lasts_s:g}s" if self.lasts_s else ""
        return f"{self.kind}{replica}@{self.at_s:g}s{lasts}"

    @property
    def begin_ms(self) -> int:
        """Milliseconds from the first arrival to the failure."""
        return round(1000 * self.at_s)

    @property
    def end_ms(self) -> int:
        """Milliseconds from the first arrival to the repair."""
        return self.begin_ms + math.ceil(1000 * self.lasts_s)


def checked_failures(failures: Sequence[Failure], fleet: Fleet | None) -> list[Failure]:
    """Validate the failures and return them in order of time. Raises TypeError, or ValueError if a
    failure does not apply to the fleet.
    """
    found = instances(failures, Failure, "failures", "failures")
    for i, each in enumerate(found if fleet is not None else ()):
        if each.replica is not None and each.replica >= fleet.all_replicas:
            raise ValueError(
                f"failures[{i}] is {each}: expected a replica from 0 to {fleet.all_replicas - 1}"
            )
        if each.kind in ("store", "store_link") and not fleet.store_blocks:
            raise ValueError(f"failures[{i}] is {each}: expected a fleet with store_blocks")
    return sorted(found, key=lambda each: each.at_s)
