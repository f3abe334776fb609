"""Checks where a socket listens, and makes sockets that do."""

from __future__ import annotations

import ipaddress

import zmq

from kvcache.checks import instance, shown, text

_TRANSPORTS = ("tcp", "ipc", "inproc")


def checked_endpoint(endpoint: str, name: str, allow_remote: bool) -> str:
    """An endpoint to bind: tcp at a loopback address, ipc or inproc; with `allow_remote` any of tcp.

    TypeError or ValueError, which names the argument.
    """
    text(endpoint, name)
    transport, separator, place = endpoint.partition("://")
    if transport not in _TRANSPORTS or not separator or not place:
        raise ValueError(
            f"{name} is {shown(endpoint)}: expected tcp://ADDRESS:PORT, ipc:// or inproc://"
        )
    if transport == "tcp" and not allow_remote and not _is_loopback(place):
        raise ValueError(
            f"{name} is {shown(endpoint)}: expected a loopback address as 127.0.0.1; readers on other "
            "machines need allow_remote=True"
        )
    return endpoint


def checked_context(
    context: zmq.Context[zmq.Socket[bytes]] | None,
) -> zmq.Context[zmq.Socket[bytes]]:
    """None: the process's own. TypeError."""
    if context is None:
        return zmq.Context.instance()
    instance(context, zmq.Context, "context")
    return context


def _is_loopback(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may mean any address; or *


def bound(socket: zmq.Socket[bytes], endpoint: str, name: str) -> str:
    """Binds, and returns where; OSError, with the socket closed, where that cannot be."""
    try:
        socket.ipv6 = "[" in endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(error.errno, f"{name} is {shown(endpoint)}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
