# SPDX-License-Identifier: Apache-2.0
"""Creates a transport by name, or the preferred installed transport."""

from __future__ import annotations

import importlib.util

from kvcache.checks import shown
from kvcache.transfer import Transport

TRANSPORTS = ("nixl", "tcp")  # in order of preference


def make_transport(
    agent: str,
    name: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    **options: object,
) -> Transport:
    """Create a transport that listens for peers.

    Args:
        agent: Name that is unique among the peers.
        name: "nixl" or "tcp". None: NIXL if it is installed, otherwise TCP.
        host: Address to listen on.
        port: Port to listen on. 0: any free port.
        options: Further options:

            - `secret`: bytes that must be equal on both sides.
            - `timeout_s`: maximum duration of a transfer in seconds (30).
            - `piece_bytes`: size of each piece of staging memory (8 MiB). A connection has eight
            pieces.
            - `digest`: whether received data is verified with a digest (False). A mismatch fails the
              transfer.
            - `advertise`: address that peers use to connect (None: `host`). Required if `host`
              stands for all addresses of the machine.
            - `direct_bytes`: with NIXL, the minimum size of fragments that are not packed ("auto").
              See docs/transports.md.

    Returns:
        The transport.

    Raises:
        TypeError: An option is unknown or has the wrong type.
        ValueError: An option is out of range.
        ImportError: NIXL is requested but not installed.
        OSError: The address is in use.
    """
    if name is None:
        name = "nixl" if importlib.util.find_spec("nixl") else "tcp"
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ValueError(f"name is {shown(name)}: expected one of {', '.join(TRANSPORTS)}, or None")
    if name == "nixl":
        from kvcache_exchange.transport.nixl import NixlTransport as Chosen
    else:
        from kvcache_exchange.transport.tcp import TcpTransport as Chosen
    return Chosen(agent, host=host, port=port, **options)
