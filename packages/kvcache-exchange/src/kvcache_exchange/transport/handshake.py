# SPDX-License-Identifier: Apache-2.0
"""The handshake in which both sides of a connection authenticate each other.

The connecting side sends hello, the listener answers with a proof that it knows the secret, and the
connecting side then sends its own proof. Only after this exchange does the listener read the
connecting side's metadata and report that the connection is ready.

The proofs cover the dialed address and the address that the listener advertises. Therefore, if the
connecting side was lured to an attacker's address, it rejects proofs that the attacker relays from
the real listener.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable

from kvcache.checks import shown
from kvcache_exchange.transport.channel import ChannelError, receive_frame, send_frame
from kvcache_exchange.transport.metadata import (
    MOST_METADATA,
    TRANSPORT_VERSION,
    Metadata,
    parse_metadata,
)

_HANDSHAKE_S = 5.0  # seconds after which an incomplete handshake is dropped
_NONCE_BYTES = 32
CROSSING = "both sides connect at the same time, and the other call stands"  # reason for a refusal


class RefusedError(ConnectionError):
    """Raised if the other side refused the connection. The message contains the reason."""


def greet(
    sock: socket.socket, mine: Metadata, theirs: Metadata, secret: bytes, deadline: float
) -> None:
    """Perform the connecting side's part of the handshake. Raises ConnectionError or TimeoutError."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    hello = {
        "op": "hello",
        "version": TRANSPORT_VERSION,
        "transport": mine.transport,
        "from": mine.incarnation,
        "to": theirs.incarnation,
        "nonce": nonce,
        "address": address_of(theirs),
    }
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    send_frame(sock, hello)
    answer = _expect(sock, "hello", deadline)
    nonces = (nonce, _text(answer, "nonce"))
    between = (mine.incarnation, theirs.incarnation, address_of(theirs))
    if not hmac.compare_digest(_text(answer, "proof"), _proof(secret, "to", nonces, between)):
        raise RefusedError(
            f"agent {theirs.agent!r} has a different secret: expected the same secret on both sides"
        )
    send_frame(sock, {"op": "proof", "proof": _proof(secret, "from", nonces, between)})
    _expect(sock, "metadata", deadline)
    send_frame(sock, {"op": "metadata"}, mine.to_bytes())
    _expect(sock, "ready", deadline)


def welcome(
    sock: socket.socket,
    mine: Metadata,
    secret: bytes,
    admit: Callable[[Metadata], str | None],
) -> Metadata | None:
    """Perform the listener's part of the handshake. Returns the peer's metadata, or None if the
    peer was refused.

    `admit` returns a reason to refuse the peer, or None. Raises OSError if the peer disconnects or
    does not answer.
    """
    deadline = time.monotonic() + _HANDSHAKE_S
    hello, _ = receive_frame(sock, most_payload=0, deadline=deadline)
    reason = None
    if hello.get("op") != "hello" or hello.get("version") != TRANSPORT_VERSION:
        reason = f"version is {shown(hello.get('version'))}: expected {TRANSPORT_VERSION}"
    elif hello.get("transport") != mine.transport:
        reason = f"transport is {shown(hello.get('transport'))}: expected {mine.transport!r}"
    elif hello.get("to") != mine.incarnation:
        reason = f"agent {mine.agent!r} was restarted: expected its new metadata"
    elif hello.get("from") == mine.incarnation:
        reason = "the incarnation is the listener's own: expected the incarnation of another side"
    elif hello.get("address") != address_of(mine):
        reason = f"address is {shown(hello.get('address'))}: expected {address_of(mine)!r}"
    if reason is not None:
        send_frame(sock, {"op": "refused", "reason": reason})
        return None
    nonces = (_text(hello, "nonce"), secrets.token_hex(_NONCE_BYTES))
    between = (_text(hello, "from"), mine.incarnation, address_of(mine))
    answer = {"op": "hello", "nonce": nonces[1], "proof": _proof(secret, "to", nonces, between)}
    send_frame(sock, answer)
    proof = _expect(sock, "proof", deadline)
    if not hmac.compare_digest(_text(proof, "proof"), _proof(secret, "from", nonces, between)):
        send_frame(sock, {"op": "refused", "reason": "the secret differs"})
        return None
    send_frame(sock, {"op": "metadata"})
    header, payload = receive_frame(sock, most_payload=MOST_METADATA, deadline=deadline)
    try:
        if header["op"] != "metadata":
            raise ValueError(f"op is {shown(header['op'])}: expected 'metadata'")
        theirs = parse_metadata(payload, mine.transport)
        if theirs.incarnation != between[0]:
            raise ValueError("the metadata and the hello are from different sides")
        reason = admit(theirs)
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        send_frame(sock, {"op": "refused", "reason": reason})
        return None
    send_frame(sock, {"op": "ready"})
    return theirs


def address_of(side: Metadata) -> str:
    """Return a side's address, taken from its metadata."""
    return f"{side.host}:{side.port}"


def _proof(secret: bytes, role: str, nonces: tuple[str, str], between: tuple[str, str, str]) -> str:
    """Return a proof that this side knows the secret.

    `between` contains the incarnations of both sides, connecting side first, and the listener's
        address.
    """
    said = "\n".join(("kvcache transport", role, *nonces, *between))
    return hmac.new(secret, said.encode(), "sha256").hexdigest()


def _expect(sock: socket.socket, op: str, deadline: float) -> dict:
    header, _ = receive_frame(sock, most_payload=0, deadline=deadline)
    if header["op"] == "refused":
        raise RefusedError(str(header.get("reason"))[:1000])
    if header["op"] != op:
        raise ChannelError(f"op is {shown(header['op'])}: expected {op!r}")
    return header


def _text(header: dict, name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isascii():
        raise ChannelError(f"{name} is {shown(value)}: expected a short string")
    return value
