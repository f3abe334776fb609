"""Options of the connector, from `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcache.checks import integer, number, shown


@dataclass(frozen=True)
class Options:
    """host, port: where a rank listens; rank r at `port + r`, or any port with 0. advertise: the address
    that consumers are told, None for host. transport: its name,
    None for the best there is. lease_s: how long blocks of a finished request are kept for readers.
    timeout_s: how long a load may take before the request is computed here. on_failure: "recompute", or
    "fail" for an error in place of an answer.

    TypeError or ValueError for an unknown option or a value out of range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    transport: str | None = None
    lease_s: float = 60.0
    timeout_s: float = 10.0
    on_failure: str = "recompute"

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise TypeError(f"host is {shown(self.host)}: expected a name or an address")
        integer(self.port, "port", 0, 65_535)
        if self.advertise is not None and not isinstance(self.advertise, str):
            raise TypeError(f"advertise is {shown(self.advertise)}: expected a name, or null")
        if self.transport is not None and not isinstance(self.transport, str):
            raise TypeError(f"transport is {shown(self.transport)}: expected a name, or null")
        for name in ("lease_s", "timeout_s"):
            value = number(getattr(self, name), name)
            if not 0 < value <= 86_400:
                raise ValueError(f"{name} is {value}: expected seconds above 0, up to 86400")
        if self.on_failure not in ("recompute", "fail"):
            raise ValueError(
                f"on_failure is {shown(self.on_failure)}: expected 'recompute' or 'fail'"
            )

    @classmethod
    def from_config(cls, extra: Mapping[str, Any]) -> Options:
        """From the extra configuration of vLLM's `--kv-transfer-config`."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(unknown)}: expected some of "
                f"{', '.join(known)}"
            )
        return cls(**extra)
