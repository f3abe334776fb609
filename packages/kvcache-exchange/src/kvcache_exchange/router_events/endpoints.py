# SPDX-License-Identifier: Apache-2.0
"""Checks endpoints and binds sockets."""

from __future__ import annotations

import ipaddress

import zmq

from kvcache.checks import instance, shown, text

_TRANSPORTS = ("tcp", "ipc", "inproc")


def checked_endpoint(endpoint: str, name: str, allow_remote: bool) -> str:
    """Check an endpoint that is to be bound.

    Valid endpoints are tcp on a loopback address, ipc, inproc and, with `allow_remote`, tcp on any
    address.

    Raises a TypeError or ValueError that names the argument.
    """
    text(endpoint, name)
    transport, separator, place = endpoint.partition("://")
    if transport not in _TRANSPORTS or not separator or not place:
        raise ValueError(
            f"{name} is {shown(endpoint)}: expected tcp://ADDRESS:PORT, ipc:// or inproc://"
        )
    if transport == "tcp" and not allow_remote and not _is_loopback(place):
        raise ValueError(
            f"{name} is {shown(endpoint)}: expected a loopback address such as 127.0.0.1; readers on "
            "other machines need allow_remote=True"
        )
    return endpoint


def checked_context(
    context: zmq.Context[zmq.Socket[bytes]] | None,
) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the given context, or the process-wide context for None.

    Raises TypeError for any other type.
    """
    if context is None:
        return zmq.Context.instance()
    instance(context, zmq.Context, "context")
    return context


def _is_loopback(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # "*", or a host name, which may resolve to any address


def bound(socket: zmq.Socket[bytes], endpoint: str, name: str) -> str:
    """Bind the socket and return its endpoint. On failure, close the socket and raise OSError."""
    try:
        socket.ipv6 = "[" in endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(error.errno, f"{name} is {shown(endpoint)}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
