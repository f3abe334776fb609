# SPDX-License-Identifier: Apache-2.0
"""The options of a connector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.checks import flag, instance, integer, number, shown

# Environment variable with the secret that peers need to connect, for commands and plug-ins.
SECRET_VARIABLE = "KVCACHE_TRANSFER_SECRET"


def secret_from_environment() -> bytes:
    """Return the secret in `SECRET_VARIABLE`, or b"" if the variable is not set.

    Raises:
        ValueError: The variable is set, but blank. Peers would not be authenticated.
    """
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is None:
        return b""
    if not secret.strip():
        raise ValueError(
            f"${SECRET_VARIABLE} is empty: expected a secret; unset it to require none"
        )
    return os.fsencode(secret)


@dataclass(frozen=True)
class ConnectorOptions:
    """Options of a connector and its ranks.

    Args:
        host: Address on which ranks listen.
        port: Rank r listens on `port + r`. 0: any free port.
        advertise: Address that peers use to reach this engine. None: `host`.
        transport: Name of the transport. None: the preferred installed transport.
        lease_s: Seconds for which a finished request's blocks are kept for readers.
        timeout_s: Seconds after which a load fails and its tokens are computed locally.
        digest: Whether the transport verifies received data with a digest. If either engine enables
            this option, both sides use digests.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    transport: str | None = None
    lease_s: float = 60.0
    timeout_s: float = 10.0
    digest: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise TypeError(f"host is {shown(self.host)}: expected a name or an address")
        integer(self.port, "port", 0, 65_535)
        for name in ("advertise", "transport"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {shown(value)}: expected a name, or None")
        flag(self.digest, "digest")
        for name in ("lease_s", "timeout_s"):
            checked_seconds(getattr(self, name), name)

    @classmethod
    def from_config(cls, values: Mapping[str, Any], name: str) -> ConnectorOptions:
        """Create options from an engine's configuration. `name` is the configuration's name in
        error messages.

        Raises:
            TypeError, ValueError: As for the constructor, or an option is unknown.
        """
        instance(values, Mapping, name)
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known), key=str):
            raise ValueError(
                f"{name} has {', '.join(map(shown, unknown))}: expected some of {', '.join(known)}"
            )
        return cls(**values)

    def port_of(self, rank: int) -> int:
        """Return the port on which a rank listens."""
        return self.port + rank if self.port else 0


def checked_seconds(value: float, name: str) -> float:
    """Validate and return a duration in seconds, greater than 0 and at most a day. Raises TypeError
    or ValueError.
    """
    seconds = number(value, name)
    if not 0 < seconds <= 86_400:
        raise ValueError(f"{name} is {seconds}: expected seconds above 0, up to 86400")
    return seconds
