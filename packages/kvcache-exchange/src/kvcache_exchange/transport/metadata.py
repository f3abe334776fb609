# SPDX-License-Identifier: Apache-2.0
"""The information that a peer needs to connect, as JSON. All fields are validated when it is parsed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

import numpy as np

from kvcache.checks import shown

TRANSPORT_VERSION = 5
MOST_METADATA = 16 << 20  # maximum size of metadata in bytes
MOST_NAME = 256  # maximum length of a name in characters
LEAST_PIECE, MOST_PIECE = 1 << 12, 1 << 28  # minimum and maximum size of a piece in bytes


@dataclass(frozen=True)
class Metadata:
    """The version, transport, name, address and memory of one side of a connection.

    Attributes:
        incarnation: Random value drawn at each start. It distinguishes a restarted side from its
            predecessor.
        regions: (address, bytes, kind of memory: "cpu", "cuda:<number>", or "other").
        piece_bytes: Piece size of the staging memory. A connection uses the smaller of the two
            sides' values.
        digest: Whether received data must be verified with digests. Enabled for both sides if
            either side requests it.
    """

    transport: str
    agent: str
    incarnation: str
    host: str
    port: int
    regions: list[list[int | str]]
    piece_bytes: int
    digest: bool
    version: int = TRANSPORT_VERSION

    def to_bytes(self) -> bytes:
        """Serialize to JSON."""
        return json.dumps(asdict(self)).encode()

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted start addresses and the end addresses of the regions, int64[r] each."""
        rows = [each[:2] for each in sorted(self.regions)]
        table = np.array(rows, np.int64).reshape(-1, 2)
        return table[:, 0], np.maximum.accumulate(table[:, 0] + table[:, 1])

    def kinds(self) -> np.ndarray:
        """Return each region's kind of memory, in the order of `bounds`, str[r]."""
        return np.array([kind for *_, kind in sorted(self.regions)], str)


def parse_metadata(data: bytes, transport: str) -> Metadata:
    """Deserialize metadata.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: The data is invalid, or is from another version or transport.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"metadata is {shown(data)}: expected bytes")
    if len(data) > MOST_METADATA:
        raise ValueError(f"metadata has {len(data)} bytes: expected at most {MOST_METADATA}")
    try:
        values = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise ValueError(f"metadata is {shown(bytes(data))}: expected JSON") from None
    if not isinstance(values, dict):
        raise ValueError(f"metadata is {shown(values)}: expected a JSON object")
    version = values.get("version")
    if type(version) is not int or version != TRANSPORT_VERSION:
        raise ValueError(
            f"version of the metadata is {shown(version)}: expected {TRANSPORT_VERSION}, the "
            "version of this library"
        )
    if values.get("transport") != transport:
        raise ValueError(
            f"transport of the metadata is {shown(values.get('transport'))}: expected {transport!r}"
        )
    expected = {
        "transport": str, "agent": str, "incarnation": str, "host": str, "port": int,
        "regions": list, "piece_bytes": int, "digest": bool, "version": int,
    }  # fmt: skip
    if values.keys() != expected.keys():
        raise ValueError(
            f"metadata has fields {shown(sorted(values))}: expected {sorted(expected)}"
        )
    for name, kind in expected.items():
        if type(values[name]) is not kind:
            raise ValueError(
                f"{name} of the metadata is {shown(values[name])}: expected {kind.__name__}"
            )
    check_agent(values["agent"])
    if not re.fullmatch("[0-9a-f]{32}", values["incarnation"]):
        raise ValueError(
            f"incarnation of the metadata is {shown(values['incarnation'])}: expected 32 digits"
        )
    if not 0 < len(values["host"]) <= MOST_NAME or not values["host"].isprintable():
        raise ValueError(f"host of the metadata is {shown(values['host'])}: expected an address")
    if not 0 < values["port"] < 2**16:
        raise ValueError(f"port of the metadata is {values['port']}: expected 1 to 65535")
    if not LEAST_PIECE <= values["piece_bytes"] <= MOST_PIECE:
        raise ValueError(
            f"piece_bytes of the metadata is {values['piece_bytes']}: "
            f"expected {LEAST_PIECE} to {MOST_PIECE}"
        )
    for region in values["regions"]:
        if (
            not isinstance(region, list)
            or [type(each) for each in region] != [int, int, str]
            or not 0 < region[0] <= region[0] + region[1] < 2**62
            or region[1] < 1
            or not re.fullmatch("cpu|cuda:[0-9]{1,3}|other", region[2])
        ):
            raise ValueError(
                f"regions of the metadata holds {shown(region)}: expected [address, bytes, kind], of "
                "memory of kind cpu, cuda:<number> or other"
            )
    return Metadata(**values)


def check_agent(agent: str) -> str:
    """Check that a side's name has 1 to 256 printable characters. Raises TypeError or ValueError."""
    if not isinstance(agent, str):
        raise TypeError(f"agent is {shown(agent)}: expected a string")
    if not 0 < len(agent) <= MOST_NAME or not agent.isprintable():
        raise ValueError(f"agent is {shown(agent)}: expected 1 to {MOST_NAME} printable characters")
    return agent
