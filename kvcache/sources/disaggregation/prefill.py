# SPDX-License-Identifier: Apache-2.0
"""A source that requests prefills from another server and loads the resulting KV."""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.allocator.request import Request
from kvcache.checks import MAX_INT64, instance, integer, shown
from kvcache.sources.base import Arrived, LoadStats
from kvcache.sources.circuit import Circuit
from kvcache.sources.disaggregation.connector import Connector
from kvcache.sources.disaggregation.options import checked_seconds
from kvcache.step import StepReport

_log = logging.getLogger(__name__)
PREFILL_PATH = "/prefill"
_MOST_AT_ONCE = 16  # maximum number of concurrent requests
_MOST_REPLY = 1 << 26  # maximum size of a reply in bytes
_BUSY = 429


class PrefillRefusedError(ValueError):
    """Raised if the peer refuses to prefill for this engine. The message contains the reason."""


@dataclass
class PrefillStats(LoadStats):
    """The counts that a `RemotePrefill` has accumulated since it was created."""

    asked_requests: int = 0
    """Number of prompts sent to the peer for prefill."""

    unanswered_requests: int = 0
    """Number of prompts for which no offer arrived because the peer was unreachable, late, or
    failed.
    """

    unasked_requests: int = 0
    """Number of prompts not sent to the peer, because earlier prompts failed or were refused."""


@dataclass(eq=False)
class _Prefill:
    """A prompt that was sent to the peer."""

    request: Request
    answer: Future[Mapping[str, Any]] | None  # None once the response was taken or abandoned
    deadline: float


class RemotePrefill:
    """A `KVSource` that requests prefills from another server and loads their KV with a connector.

    `match` sends the prompt to the peer's `/prefill` endpoint and returns None until the peer's
    offer arrives. The KV is then loaded in the same way as by `Connector`. Each request is sent
    once. A prompt is computed locally if the peer is unreachable, is late or refuses, or if fewer
    than `min_tokens` of its tokens are missing from the local cache.

    Args:
        connector: The connector of the engine that loads the KV.
        address: HTTP address of the peer, as "HOST:PORT".
        timeout_s: Maximum time in seconds to wait for an offer, including the peer's prefill.
        min_tokens: Minimum number of tokens after the local hit for which a prompt is sent to the
            peer.
        circuit: Circuit breaker that decides when to retry a failing peer.

    Raises:
        ValueError: `address` is not HOST:PORT, or a number is out of range.
    """

    name = "prefill"

    def __init__(
        self,
        connector: Connector,
        address: str,
        *,
        timeout_s: float = 10.0,
        min_tokens: int = 32,
        circuit: Circuit | None = None,
    ) -> None:
        instance(connector, Connector, "connector")
        self._connector = connector
        self._host, self._port = host_and_port(address)
        self._timeout_s = checked_seconds(timeout_s, "timeout_s")
        self._min_tokens = integer(min_tokens, "min_tokens", 1, MAX_INT64)
        if circuit is not None:
            instance(circuit, Circuit, "circuit")
        self._circuit = Circuit() if circuit is None else circuit
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, "kvcache prefill")
        self._prefills: dict[str, _Prefill] = {}
        self._late: list[Future[Mapping[str, Any]]] = []  # pending responses to abandoned prompts
        self._asked = self._unanswered = self._unasked = self._refused = 0

    @property
    def stats(self) -> PrefillStats:
        """Counts since the source was created."""
        counts = asdict(self._connector.stats)
        counts["refused_requests"] += self._refused
        return PrefillStats(
            **counts,
            asked_requests=self._asked,
            unanswered_requests=self._unanswered,
            unasked_requests=self._unasked,
        )

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
        """Whether any loads, quarantined blocks, leases or late responses are left."""
        return self._connector.is_busy or bool(self._late)

    def match(self, request: Request) -> int | None:
        """Return the number of tokens after the local hit that the peer has computed, or None if
        the peer has not finished.

        Raises:
            ValueError: The peer refuses, or its offer is incompatible with this engine.
        """
        instance(request, Request, "request")
        prefill = self._prefills.get(request.request_id)
        if prefill is None or prefill.request is not request:
            num_missing = request.num_tokens - 1 - self._connector.hit_tokens(request)
            if num_missing < self._min_tokens:
                return 0
            prefill = self._prefills[request.request_id] = self._ask(request)
        if prefill.answer is None:
            return self._connector.match(request)
        if not prefill.answer.done():
            if time.monotonic() < prefill.deadline:
                return None
            self._give_up(prefill)
            self._fail(f"no answer within {self._timeout_s:g} s")
            return 0
        answer, prefill.answer = prefill.answer, None
        try:
            offer = answer.result()
        except PrefillRefusedError:
            self._circuit.failed()  # it would also refuse later prompts
            self._refused += 1
            raise
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return 0
        self._circuit.worked()
        return self._connector.match(request, offer)

    def begin(self, request: Request) -> None:
        """Begin to load the tokens that `match` found. See `Connector.begin`."""
        self._connector.begin(request)

    def poll(self) -> list[Arrived]:
        """Return the loads that have ended since the last call."""
        done = [answer for answer in self._late if answer.done()]
        for answer in done:
            self._late.remove(answer)
            if not answer.cancelled() and answer.exception() is None:
                try:
                    self._connector.decline(answer.result())
                except ValueError as error:
                    _log.warning("the peer sent an invalid offer: %s", error)
        return self._connector.poll()

    def save(self, report: StepReport) -> None:
        """Do nothing, because the peer keeps its own blocks."""
        self._connector.save(report)

    def cancel(self, request: Request) -> None:
        """Free a request that is matched or loading, and end its load."""
        instance(request, Request, "request")
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is not None:
            self._give_up(prefill)
        self._connector.cancel(request)

    def close(self) -> None:
        """End all requests to the peer, and close the connector."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._connector.close()

    def _ask(self, request: Request) -> _Prefill:
        if not self._circuit.allows():
            self._unasked += 1
            return _Prefill(request, None, 0.0)
        self._asked += 1
        body = {"prompt": request.token_ids[:-1].tolist(), "peer": self._connector.describe()}
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        answer = self._threads.submit(self._fetch, json.dumps(body).encode())
        return _Prefill(request, answer, time.monotonic() + self._timeout_s)

    def _fetch(self, body: bytes) -> Mapping[str, Any]:
        """Fetch the peer's offer.

        Runs in a thread. Raises PrefillRefusedError if the peer refuses.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", PREFILL_PATH, body, headers)
            reply = connection.getresponse()
            data = json.loads(reply.read(_MOST_REPLY))
        finally:
            connection.close()
        if reply.status == 200:
            return data["offer"]
        message = f"{self._host}:{self._port} answers {reply.status}: {data['error']['message']}"
        if 400 <= reply.status < 500 and reply.status != _BUSY:
            raise PrefillRefusedError(message)
        raise ConnectionError(message)

    def _give_up(self, prefill: _Prefill) -> None:
        if prefill.answer is not None:
            prefill.answer.cancel()
            self._late.append(prefill.answer)
            prefill.answer = None

    def _fail(self, reason: str) -> None:
        self._unanswered += 1
        self._circuit.failed()
        _log.warning("the prefill server at %s:%d: %s", self._host, self._port, reason)


def host_and_port(address: str) -> tuple[str, int]:
    """Split "HOST:PORT" or "[HOST]:PORT". Raises ValueError for any other form."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"address is {shown(address)}: expected HOST:PORT")
    return host, int(port)
