# SPDX-License-Identifier: Apache-2.0
"""Requests offers from servers over HTTP, in threads, and passes the offers to a connector."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.allocator import Request
from kvcache.checks import instance, shown
from kvcache.sources import Arrived
from kvcache.step import StepReport
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.disaggregation.connector import Connector
from kvcache_exchange.disaggregation.options import checked_seconds

_log = logging.getLogger("kvcache.exchange")
_MOST_AT_ONCE = 16  # maximum number of concurrent requests
_MOST_REPLY = 1 << 26  # maximum size of a reply in bytes
_BUSY = 429

OfferValues = Mapping[str, Any]  # an offer, as returned by `Connector.publish`


class OfferRefusedError(ValueError):
    """Raised if a server refuses to offer KV to this engine. The message contains the reason."""


def offer_key(secret: bytes) -> str:
    """Return the key that a server with this transfer secret expects from other servers.

    The key is derived from the secret, so that HTTP requests do not reveal the secret itself.
    """
    return hmac.new(secret, b"kvcache offers", hashlib.sha256).hexdigest()


class OfferServer:
    """A server that offers KV, and the circuit breaker that decides when to call it again.

    Args:
        address: HTTP address, as "HOST:PORT".
        timeout_s: Timeout of a request in seconds.
        circuit: The circuit breaker. None: the default.
        secret: The secret of both servers' transports. b"": the server checks no key.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        circuit: Circuit | None = None,
        secret: bytes = b"",
    ) -> None:
        self.host, self._port = host_and_port(address)
        self.address = address
        self.timeout_s = checked_seconds(timeout_s, "timeout_s")
        if circuit is not None:
            instance(circuit, Circuit, "circuit")
        self.circuit = Circuit() if circuit is None else circuit
        self._headers = {"content-type": "application/json"}
        instance(secret, bytes, "secret")
        if secret:
            self._headers["authorization"] = f"Bearer {offer_key(secret)}"

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, and return the reply's JSON value. Blocks until the reply has arrived.

        Args:
            path: Path of the request.
            body: Body of a POST request. None: a GET request.

        Raises:
            OfferRefusedError: The server refuses, with its reason.
            OSError, ValueError: The server is unreachable, late or busy, or its reply is malformed.
        """
        connection = http.client.HTTPConnection(self.host, self._port, timeout=self.timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data, self._headers)
            reply = connection.getresponse()
            content = reply.read(_MOST_REPLY)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        try:
            value = json.loads(content)
            reason = None if reply.status == 200 else value["error"]["message"]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise ConnectionError(
                f"{self.address} answers {reply.status} with {shown(content)}: expected the JSON of a "
                "kvcache server"
            ) from None
        if reason is None:
            return value
        message = f"{self.address} answers {reply.status}: {reason}"
        if 400 <= reply.status < 500 and reply.status != _BUSY:
            raise OfferRefusedError(message)
        raise ConnectionError(message)


@dataclass(eq=False)
class _OfferCall:
    """A request for an offer. `server` is None if no server was asked."""

    request: Request
    server: OfferServer | None = None
    answer: Future[OfferValues | None] | None = None  # None once the reply was taken or abandoned
    deadline: float = 0.0


class OfferCalls:
    """One source's requests for offers, keyed by request ID. Each request is sent at most once.

    Args:
        connector: The connector that loads the offered KV.
        name: Name of the source, for threads and messages.
    """

    def __init__(self, connector: Connector, name: str) -> None:
        self._connector, self._name = connector, name
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, f"kvcache {name}")
        self._calls: dict[str, _OfferCall] = {}
        self._late: list[Future[OfferValues | None]] = []  # pending replies to abandoned requests
        self.asked = self.unanswered = self.unasked = self.refused = self.missed = 0

    @property
    def has_late(self) -> bool:
        """Whether replies to abandoned requests are pending."""
        return bool(self._late)

    def knows(self, request: Request) -> bool:
        """Return whether `ask` or `skip` was called for this request object."""
        call = self._calls.get(request.request_id)
        return call is not None and call.request is request

    def skip(self, request: Request) -> None:
        """Record that no server is asked for this request."""
        self._calls[request.request_id] = _OfferCall(request)

    def ask(
        self,
        request: Request,
        servers: Sequence[OfferServer],
        fetch: Callable[[OfferServer], OfferValues | None],
    ) -> None:
        """Ask the first server whose circuit breaker allows it for an offer, in a thread.

        `fetch` returns the server's offer, or None if the server has too little to offer.
        """
        server = next((each for each in servers if each.circuit.allows()), None)
        if server is None:
            self.unasked += 1
            self.skip(request)
            return
        self.asked += 1
        answer = self._threads.submit(fetch, server)
        deadline = time.monotonic() + server.timeout_s
        self._calls[request.request_id] = _OfferCall(request, server, answer, deadline)

    def match(self, request: Request) -> int | None:
        """Return the number of tokens after the local hit that are offered, or None if the reply is
        pending.

        Raises:
            ValueError: The server refuses, or its offer is incompatible with this engine.
        """
        call = self._calls[request.request_id]
        if call.answer is None:
            return self._connector.match(request)
        if not call.answer.done():
            if time.monotonic() < call.deadline:
                return None
            self._give_up(call)
            self._fail(call.server, f"no answer within {call.server.timeout_s:g} s")
            return 0
        answer, call.answer = call.answer, None
        try:
            offer = answer.result()
        except OfferRefusedError:
            call.server.circuit.failed()  # the server would also refuse later requests
            self.refused += 1
            raise
        except Exception as error:
            self._fail(call.server, f"{type(error).__name__}: {error}")
            return 0
        if offer is None:
            call.server.circuit.failed()
            self.missed += 1
            return 0
        call.server.circuit.worked()
        try:
            return self._connector.match(request, offer)
        except ValueError:
            self._late.append(answer)  # `poll` declines the offer
            raise

    def poll(self) -> list[Arrived]:
        """Decline late offers, and return the connector's loads that have ended."""
        done = [answer for answer in self._late if answer.done()]
        for answer in done:
            self._late.remove(answer)
            if answer.cancelled() or answer.exception() is not None or answer.result() is None:
                continue
            try:
                self._connector.decline(answer.result())
            except ValueError as error:
                _log.warning("source %r received an invalid offer: %s", self._name, error)
        return self._connector.poll()

    def cancel(self, request: Request) -> None:
        """Abandon a request, and cancel its load."""
        call = self._calls.pop(request.request_id, None)
        if call is not None:
            self._give_up(call)
        self._connector.cancel(request)

    def close(self) -> None:
        """Abandon all requests, and close the connector."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._connector.close()

    def _give_up(self, call: _OfferCall) -> None:
        if call.answer is not None:
            call.answer.cancel()
            self._late.append(call.answer)
            call.answer = None

    def _fail(self, server: OfferServer, reason: str) -> None:
        self.unanswered += 1
        server.circuit.failed()
        _log.warning("source %r: the server at %s: %s", self._name, server.address, reason)


def host_and_port(address: str) -> tuple[str, int]:
    """Split "HOST:PORT" or "[HOST]:PORT". Raises ValueError for any other form."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"address is {shown(address)}: expected HOST:PORT")
    return host, int(port)


class OfferSource:
    """Base class of the `KVSource` classes that ask other servers for offers.

    A subclass defines `name` and `match`, which calls `OfferCalls.ask` for a new request.
    """

    name: str

    def __init__(self, connector: Connector) -> None:
        instance(connector, Connector, "connector")
        self._connector = connector
        self._calls = OfferCalls(connector, self.name)

    def _counts(self) -> dict[str, int]:
        """Return the fields of the statistics that all of these sources have."""
        counts, calls = asdict(self._connector.stats), self._calls
        counts["refused_requests"] += calls.refused
        return counts | {
            "asked_requests": calls.asked,
            "unanswered_requests": calls.unanswered,
            "unasked_requests": calls.unasked,
        }

    @property
    def num_loading_requests(self) -> int:
        """Number of requests whose blocks may still be written to, including those in quarantine."""
        return self._connector.num_loading_requests

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks in quarantine."""
        return self._connector.num_quarantined_blocks

    @property
    def is_busy(self) -> bool:
        """Whether any loads, quarantined blocks, leases or late replies are left."""
        return self._connector.is_busy or self._calls.has_late

    @staticmethod
    def _may_ask(request: Request) -> bool:
        """Return whether a request may use KV that depends only on the tokens and the salt, which are
        the only inputs that servers receive.
        """
        is_plain = request.lora is None and not request.mm_items and request.prompt_embeds is None
        return request.read_cache and is_plain

    def begin(self, request: Request) -> None:
        """Begin to load the tokens that `match` found. See `Connector.begin`."""
        self._connector.begin(request)

    def poll(self) -> list[Arrived]:
        """Return the loads that have ended since the last call, and free the blocks of ended leases."""
        return self._calls.poll()

    def save(self, report: StepReport) -> None:
        """Do nothing, because the servers keep their own blocks."""
        self._connector.save(report)

    def cancel(self, request: Request) -> None:
        """Free a request that is matched or loading, and end its load."""
        instance(request, Request, "request")
        self._calls.cancel(request)

    def close(self) -> None:
        """End all requests to servers, and close the connector."""
        self._calls.close()
