# SPDX-License-Identifier: Apache-2.0
"""The common base of transports whose peers request bytes over a channel and receive them, packed,
over a lane.
"""

from __future__ import annotations

import atexit
import ipaddress
import logging
import secrets
import socket
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvcache.checks import byte_count, flag, instance, integer, seconds, shown
from kvcache.transfer import Spans, Transfer, TransferError, Transport
from kvcache_exchange.transport.channel import MOST_PAYLOAD, Channel
from kvcache_exchange.transport.connection import MOST_MESSAGE, Connection, LocalSide
from kvcache_exchange.transport.handshake import CROSSING, greet, welcome
from kvcache_exchange.transport.lane import Lane
from kvcache_exchange.transport.metadata import (
    LEAST_PIECE,
    MOST_PIECE,
    Metadata,
    check_agent,
    parse_metadata,
)
from kvcache_exchange.transport.registered import (
    Region,
    RegisteredMemory,
    check_apart,
    check_within,
)

if TYPE_CHECKING:
    from kvcache.worker import Pages

_MOST_GREETING = 64  # maximum number of sides that connect at the same time
_PIECE_BYTES = 8 << 20  # default piece size in bytes; tuned only on a machine with two busy cores
_CALL_S = 0.005  # interval in seconds at which to check whether a peer has connected
_RETRY_S = 0.05  # pause in seconds after a failure to accept a connection
# Seconds for which `close` sends queued frames, and for which it then waits for threads that do not
# copy.
_LINGER_S = 1.0
_COPY_S = 0.005  # interval in seconds at which to check whether copies have ended
_log = logging.getLogger("kvcache.exchange")

_open: weakref.WeakSet[StagedTransport] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop the transports' threads, because the interpreter's exit would kill threads in native code."""
    for transport in list(_open):
        try:
            transport.close()
        except TimeoutError as error:
            _log.error("the transport of agent %r was not closed: %s", transport.agent, error)


class StagedTransport(Transport):
    """Listens for peers, and keeps one connection to each of them."""

    def __init__(
        self,
        agent: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes = b"",
        timeout_s: float = 30.0,
        piece_bytes: int = _PIECE_BYTES,
        digest: bool = False,
        advertise: str | None = None,
    ) -> None:
        self.agent = check_agent(agent)
        if not isinstance(secret, bytes):
            raise TypeError(f"secret is a {type(secret).__name__}: expected bytes")
        self.timeout_s = seconds(timeout_s, "timeout_s")
        if not 0 < self.timeout_s < 1e6:
            raise ValueError(f"timeout_s is {timeout_s}: expected seconds, more than 0")
        self.piece_bytes = byte_count(piece_bytes, "piece_bytes", LEAST_PIECE)
        if self.piece_bytes > MOST_PIECE:
            raise ValueError(f"piece_bytes is {piece_bytes}: expected at most {MOST_PIECE}")
        self.digest = flag(digest, "digest")
        self.address = _address(host, advertise)
        self._secret = secret
        self.incarnation = secrets.token_hex(16)
        self.memory = RegisteredMemory()
        self._side = LocalSide(self.memory, self.timeout_s, self.piece_bytes, self.digest)
        self._connections: dict[str, Connection] = {}
        # Ended connections with untaken messages or running threads, and the names of their peers.
        self._ended: list[tuple[str, Connection]] = []
        self._lock = threading.Lock()
        self._greeting = threading.Semaphore(_MOST_GREETING)
        self._is_closed = False
        self._is_withdrawing = False  # while memory is being unregistered, no peer may connect
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(
            (host, integer(port, "port", 0, 2**16 - 1)), family=family, backlog=128
        )
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(
            target=self._listen, name=f"kvcache transport {agent}", daemon=True
        )
        self._thread.start()
        _open.add(self)

    # Methods that each transport implements.

    def _on_registered(self, memory: list[Region]) -> None:
        """Called with new regions when memory is registered."""

    def _on_unregistered(self, memory: list[Region]) -> None:
        """Called with regions to unregister, after all connections that may access them have ended."""

    @abstractmethod
    def _open_lane(self, connection: Connection, channel: Channel, *, timeout_s: float) -> Lane:
        """Attach a connection's channel and open its lane to the peer. Both sides do so at the same
        time.
        """

    # The `Transport` interface.

    def register(self, memory: Pages | Sequence[tuple[int, int]]) -> None:
        self._check_open()
        new = self.memory.add(memory)
        try:
            self._on_registered(new)
        except BaseException:
            self.memory.remove(new)
            raise

    def unregister(self, memory: Pages | Sequence[tuple[int, int]]) -> None:
        self._check_open()
        regions = self.memory.known(memory)
        if not regions:
            return
        with self._lock:
            self._is_withdrawing = True
        try:
            self._end_all("its memory was unregistered")
            self._on_unregistered(regions)
            self.memory.remove(regions)
        finally:
            self._is_withdrawing = False

    def metadata(self) -> bytes:
        self._check_open()
        return self._metadata().to_bytes()

    def connect(self, metadata: bytes, *, timeout_s: float = 10.0) -> str:
        self._check_open()
        deadline = time.monotonic() + seconds(timeout_s, "timeout_s")
        theirs = parse_metadata(metadata, self.name)
        if theirs.agent == self.agent:
            raise ValueError(
                f"agent of the metadata is {theirs.agent!r}: expected the metadata of another agent"
            )
        # Without this check, the peer could reflect this side's proof.
        if theirs.incarnation == self.incarnation:
            raise ValueError(
                "incarnation of the metadata is this side's own: expected the incarnation of another side"
            )
        with self._lock:
            self._check_open()
            if self._is_withdrawing:
                raise ConnectionError(f"agent {self.agent!r} is unregistering memory")
            known = connection = self._live(theirs.agent)
            if known is not None:
                self._check_same(known, theirs)
            else:
                connection = Connection(self._side, theirs, is_caller=True)
                self._admit(connection)
        try:
            if known is None:
                self._call(connection, deadline)
            connection.wait_until_ready(deadline)
        except BaseException as error:
            if known is None:
                connection.fail(f"the peer was not reached: {error}")
                with self._lock:
                    if self._connections.get(theirs.agent) is connection:
                        self._retire(theirs.agent)
            if not isinstance(error, OSError | ValueError):  # such as an invalid host name
                raise
            if CROSSING in (str(error), connection.reason) and self._await_call(theirs, deadline):
                return theirs.agent
            raise ConnectionError(
                f"agent {theirs.agent!r} at {theirs.host}:{theirs.port} was not connected: {error}"
            ) from error
        return theirs.agent

    def send(self, peer: str, message: bytes) -> None:
        self._of_peer(peer).put({"op": "message"}, _checked_message(message, "message"))

    def notifications(self) -> list[tuple[str, bytes]]:
        with self._lock:
            all_peers = [*self._ended, *self._connections.items()]
            found = [(name, each) for name, known in all_peers for each in known.take_messages()]
            self._forget_ended()
        return found

    def peers(self) -> list[str]:
        with self._lock:
            return [
                name
                for name, known in self._connections.items()
                if known.reason is None and known.is_ready.is_set()
            ]

    def disconnect(self, peer: str) -> None:
        instance(peer, str, "peer")
        with self._lock:
            connection = self._connections.get(peer)
            if connection is None:
                raise ValueError(
                    f"peer is {shown(peer)}: expected one of {list(self._connections)}"
                )
            self._retire(peer)
        connection.fail("it was disconnected")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        with suppress(OSError):  # some systems report that a listening socket is not connected
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(self.timeout_s)
        self._end_all("the transport was closed", _LINGER_S)

    # Connections.

    def _end_all(self, reason: str, linger_s: float = 0.0) -> None:
        """End all connections after sending queued frames for up to `linger_s`, and wait until no
        thread accesses registered memory for them.

        Raises TimeoutError if a thread still does so after the transport's timeout.
        """
        with self._lock:
            for name in list(self._connections):
                self._retire(name)
            ended = [known for _, known in self._ended]
        for connection in ended:
            connection.fail(reason, linger_s)
            connection.close()  # another thread may have ended the connection, but not closed it yet

        def copying() -> list[threading.Thread]:
            found = [thread for connection in ended for thread in connection.copying]
            return [thread for thread in found if thread is not threading.current_thread()]

        deadline = time.monotonic() + self.timeout_s
        while (left := copying()) and time.monotonic() < deadline:
            left[0].join(_COPY_S)
        # The other threads end soon.
        deadline = time.monotonic() + _LINGER_S
        for thread in [thread for connection in ended for thread in connection.threads]:
            # A thread that is not alive may not have started yet.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        if left := copying():
            raise TimeoutError(
                f"{left[0].name} still accesses registered memory after {self.timeout_s:g} s"
            )

    def _metadata(self) -> Metadata:
        regions = [[each.begin, each.end - each.begin, each.kind] for each in self.memory.regions]
        return Metadata(
            self.name,
            self.agent,
            self.incarnation,
            self.address,
            self.port,
            regions,
            self.piece_bytes,
            self.digest,
        )

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_RETRY_S)  # for example, too many open files
                continue
            if not self._greeting.acquire(blocking=False):
                sock.close()  # too many connections are waiting for a handshake
                continue
            try:
                threading.Thread(
                    target=self._welcome, args=(sock,), name="kvcache greeting", daemon=True
                ).start()
            except RuntimeError:  # the process cannot start a thread
                self._greeting.release()
                sock.close()
                time.sleep(_RETRY_S)

    def _welcome(self, sock: socket.socket) -> None:
        """Perform the listener's handshake with a connecting side. Runs in a separate thread."""
        self.memory.enter_device()
        admitted: list[Connection] = []

        def admit(theirs: Metadata) -> str | None:
            with self._lock:
                if self._is_closed:
                    return f"agent {self.agent!r} is closed"
                if self._is_withdrawing:
                    return f"agent {self.agent!r} is unregistering memory"
                known = self._live(theirs.agent)
                if known is not None and known.is_calling(theirs):
                    if self.incarnation < theirs.incarnation:
                        return CROSSING
                    known.fail(CROSSING)
                    known = None
                if theirs.agent == self.agent or known is not None:
                    return f"agent {theirs.agent!r} is already connected: expected another name"
                admitted.append(Connection(self._side, theirs, is_caller=False))
                self._admit(admitted[0])
            return None

        try:
            try:
                theirs = welcome(sock, self._metadata(), self._secret, admit)
            finally:
                self._greeting.release()
            if theirs is None:
                sock.close()
                return
            self._establish(admitted[0], sock, time.monotonic() + self.timeout_s)
        except OSError as error:
            sock.close()
            for connection in admitted:
                connection.fail(str(error))

    def _await_call(self, theirs: Metadata, deadline: float) -> bool:
        """Wait until the peer connects. The peer's connection replaces the one opened by this side.

        Returns whether the peer is connected.
        """
        while time.monotonic() < deadline:
            with self._lock:
                known = self._live(theirs.agent)
            if known is not None and known.peer.incarnation == theirs.incarnation:
                with suppress(OSError):
                    known.wait_until_ready(deadline)
                    return True
            time.sleep(_CALL_S)
        return False

    def _call(self, connection: Connection, deadline: float) -> None:
        theirs = connection.peer
        left = max(deadline - time.monotonic(), 1e-3)
        sock = socket.create_connection((theirs.host, theirs.port), timeout=left)
        try:
            greet(sock, self._metadata(), theirs, self._secret, deadline)
        except BaseException:
            sock.close()
            raise
        self._establish(connection, sock, deadline)

    def _establish(self, connection: Connection, sock: socket.socket, deadline: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(
            sock,
            connection.peer.agent,
            connection.on_frame,
            connection.fail,
            self.timeout_s,
            has_digest=connection.has_digest,
        )
        try:
            left = max(deadline - time.monotonic(), 1e-3)
            lane = self._open_lane(connection, channel, timeout_s=left)
        except (RuntimeError, OSError) as error:
            connection.fail(f"its lane was not opened: {error}")
            raise ConnectionError(f"its lane was not opened: {error}") from error
        connection.open(lane)

    def _admit(self, connection: Connection) -> None:
        """Replace an ended connection to a peer of the same name. The caller holds the lock."""
        self._retire(connection.peer.agent)
        self._connections[connection.peer.agent] = connection

    def _retire(self, name: str) -> None:
        """Move a connection to `_ended`. The caller holds the lock."""
        self._forget_ended()
        if (ended := self._connections.pop(name, None)) is not None:
            self._ended.append((name, ended))

    def _forget_ended(self) -> None:
        self._ended = [each for each in self._ended if each[1].is_needed]

    def _live(self, name: str) -> Connection | None:
        known = self._connections.get(name)
        if known is not None:
            known.check_alive()
        return known if known is not None and known.reason is None else None

    def _check_same(self, known: Connection, theirs: Metadata) -> None:
        if known.peer.incarnation != theirs.incarnation:
            raise ValueError(
                f"agent {theirs.agent!r} is connected from {known.peer.host}:{known.peer.port}: use "
                "another name, or disconnect it first"
            )

    # Transfers.

    def _borders(self, peer: str) -> tuple[np.ndarray, np.ndarray]:
        return self.memory.begins[1:], self._of_peer(peer).bounds[0][1:]

    def _begin(
        self,
        peer: str,
        local: Spans,
        remote: Spans,
        notify: bytes,
        timeout_s: float | None,
    ) -> Transfer:
        connection = self._of_peer(peer)
        notify = _checked_message(notify, "notify")
        timeout_s = self.timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        self.memory.check(local, "local")
        check_within(remote, *connection.bounds, "remote")
        check_apart(local, "local")
        if 8 * (2 + len(remote.bases) + 2 * len(remote.length)) > MOST_PAYLOAD:
            raise ValueError(
                f"remote has {len(remote.length)} runs: expected at most {MOST_PAYLOAD // 16}"
            )
        return self._start(connection, local, remote, notify, timeout_s)

    def _start(
        self,
        connection: Connection,
        local: Spans,
        remote: Spans,
        notify: bytes,
        timeout_s: float,
    ) -> Transfer:
        """Start a read of validated spans."""
        return connection.begin(local, remote, notify, timeout_s)

    def _of_peer(self, peer: str) -> Connection:
        self._check_open()
        instance(peer, str, "peer")
        with self._lock:
            connection = self._connections.get(peer)
        if connection is None:
            raise ValueError(f"peer is {shown(peer)}: expected one of {list(self._connections)}")
        if connection.reason is None and not connection.is_ready.is_set():
            raise TransferError(f"agent {peer!r} is not connected yet")
        connection.check_alive()
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the transport of agent {self.agent!r} is closed")


def _is_everywhere(host: str) -> bool:
    """Return whether a host stands for all of this machine's addresses."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # it is a host name
        return False


def _address(host: str, advertise: str | None) -> str:
    """Return the address to which peers connect."""
    for value, name in ((host, "host"), (advertise, "advertise")):
        if not isinstance(value, str) and (name == "host" or value is not None):
            raise TypeError(f"{name} is {shown(value)}: expected a name or an address")
    address = host if advertise is None else advertise
    if _is_everywhere(address):
        name = "host" if advertise is None else "advertise"
        raise ValueError(
            f"{name} is {address!r}, which peers cannot reach: set advertise to an address at "
            "which peers reach this machine"
        )
    return address


def _checked_message(message: bytes, name: str) -> bytes:
    if not isinstance(message, bytes):
        raise TypeError(f"{name} is a {type(message).__name__}: expected bytes")
    if len(message) > MOST_MESSAGE:
        raise ValueError(f"{name} has {len(message)} bytes: expected at most {MOST_MESSAGE}")
    return message
