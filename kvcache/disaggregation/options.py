"""Options of a connector."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.checks import flag, integer, number, shown


@dataclass(frozen=True)
class ConnectorOptions:
    """host, port: where a rank listens; rank r at `port + r`, or any port with 0. advertise: the address
    that peers are told, None for host. transport: its name, None for the best there is. lease_s: how
    long blocks of a finished request are kept for readers. timeout_s: how long a load may take before
    the request is computed here. digest: whether the transport compares what arrives with a digest of
    what was sent; one side is enough.

    TypeError or ValueError for a value out of range.
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
                raise TypeError(f"{name} is {shown(value)}: expected a name, or null")
        flag(self.digest, "digest")
        for name in ("lease_s", "timeout_s"):
            checked_seconds(getattr(self, name), name)

    def port_of(self, rank: int) -> int:
        """Where a rank listens."""
        return self.port + rank if self.port else 0


def checked_seconds(value: float, name: str) -> float:
    """Seconds above 0, up to a day. TypeError or ValueError."""
    seconds = number(value, name)
    if not 0 < seconds <= 86_400:
        raise ValueError(f"{name} is {seconds}: expected seconds above 0, up to 86400")
    return seconds
