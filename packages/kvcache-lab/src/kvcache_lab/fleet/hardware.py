# SPDX-License-Identifier: Apache-2.0
"""Speeds of a replica, read from a file that the user edits."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields

from kvcache.checks import number, shown, text
from kvcache.checks import path as checked_path
from kvcache_lab.service import OTHER_FIELDS, Service

_LINKS = ("host", "store", "peer", "transfer")
_MOST = 1e15  # maximum value of every field


class HardwareError(ValueError):
    """Raised if a hardware file is malformed. The message names the file and the field."""


@dataclass(frozen=True)
class Hardware:
    """Speeds of a replica.

    Args:
        prefill_speed: Prompt tokens that a replica computes per second. Tokens found in the cache
            are not computed.
        decode_speed: Tokens per second of each answer.
        prefill_ms: Fixed overhead of each prefill in milliseconds, in addition to the time for its
            tokens.
        attention_ns: Prefill time in nanoseconds per pair of a computed token and a token that it
            attends to. With long contexts, attention dominates the prefill time.
        interference: Fraction of a prefill's duration by which the replica's running answers are
            delayed. 0: answers continue during prefills. 1: answers pause during a prefill, which
            begins after their current step.
        bytes_per_token: Bytes of a token's K and V in all layers, summed over a replica's devices.
            Ignored for fleets with `Fleet.page_bytes`.
        host_gb_per_s: Bandwidth of loads from the host, in 10**9 bytes per second, like the other
            bandwidths.
        store_gb_per_s: Bandwidth of loads from the store, per replica.
        peer_gb_per_s: Bandwidth of loads from other replicas' caches, per replica.
        transfer_gb_per_s: Bandwidth of transfers from prefill replicas, per decode replica.

    Raises:
        TypeError, ValueError: A value is not a number, or is out of range.
    """

    prefill_speed: float = 20_000.0
    decode_speed: float = 50.0
    prefill_ms: float = field(default=0.0, kw_only=True)
    attention_ns: float = field(default=0.0, kw_only=True)
    interference: float = field(default=1.0, kw_only=True)
    bytes_per_token: float = 131_072.0  # 32 layers with 8 heads of 128 elements of 2 bytes
    host_gb_per_s: float = 20.0
    store_gb_per_s: float = 5.0
    peer_gb_per_s: float = 10.0
    transfer_gb_per_s: float = 10.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = number(getattr(self, each.name), each.name)
            may_be_zero = each.name in OTHER_FIELDS
            most = 1 if each.name == "interference" else _MOST
            if value < 0 or not (value or may_be_zero) or not value <= most:
                expected = f"0 to {most:g}" if may_be_zero else f"more than 0, at most {most:g}"
                raise ValueError(f"{each.name} is {shown(value)}: expected {expected}")

    @property
    def service(self) -> Service:
        """The speeds of prefill and decode."""
        return Service(
            *(self.prefill_speed, self.decode_speed),
            **{name: getattr(self, name) for name in OTHER_FIELDS},
        )

    def load_ms(self, link: str, num_bytes: int) -> float:
        """Return the duration in milliseconds of a load over `host`, `store`, `peer` or `transfer`.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        if text(link, "link") not in _LINKS:
            raise ValueError(f"link is {shown(link)}: expected one of {', '.join(_LINKS)}")
        num_bytes = number(num_bytes, "num_bytes")
        return num_bytes / (1e6 * getattr(self, f"{link}_gb_per_s"))


def read_hardware(path: str | os.PathLike) -> Hardware:
    """Read the fields of `Hardware` from a JSON object. Missing fields have their default values.

    Args:
        path: The file.

    Raises:
        HardwareError: The file does not contain a JSON object, or a field is unknown or invalid.
        OSError: The file cannot be read.
    """
    name = checked_path(path, "path")
    with open(name, encoding="utf-8") as file:
        try:
            entries = json.load(file)
        except (ValueError, RecursionError) as error:
            raise HardwareError(f"path is {name!r}: expected a JSON object ({error})") from None
    if not isinstance(entries, dict):
        raise HardwareError(f"path is {name!r}, with {shown(entries)}: expected a JSON object")
    known = [each.name for each in fields(Hardware)]
    for entry in entries:
        if entry not in known:
            raise HardwareError(
                f"path is {name!r}: {shown(entry)} is unknown: expected one of {', '.join(known)}"
            )
    try:
        return Hardware(**entries)
    except (TypeError, ValueError) as error:
        raise HardwareError(f"path is {name!r}: {error}") from None


def example_hardware() -> str:
    """Return the text of a file for `read_hardware`, with the default values of all fields."""
    return json.dumps(asdict(Hardware()), indent=2) + "\n"
