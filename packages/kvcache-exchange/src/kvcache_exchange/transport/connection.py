# SPDX-License-Identifier: Apache-2.0
"""A connection to a peer. It handles the requests of both sides and the transfers that they start."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.checks import shown
from kvcache.transfer import Spans, Transfer, TransferError
from kvcache_exchange.transport.channel import Channel, ChannelError
from kvcache_exchange.transport.digest import digest_of_request
from kvcache_exchange.transport.lane import Incoming, Job, Lane, Outgoing
from kvcache_exchange.transport.metadata import Metadata

if TYPE_CHECKING:
    from kvcache_exchange.transport.registered import RegisteredMemory

MOST_MESSAGE = 1 << 20  # maximum size of a message in bytes
MOST_NOTIFICATIONS = 1 << 16  # maximum number of messages that `notifications` has not returned yet
_MOST_WAITING = 1 << 12  # maximum number of a peer's reads in flight
_MOST_TIMES = 4  # maximum mean number of times that a request may reference a registered byte
_MOST_ID = 1 << 28


@dataclass(frozen=True)
class LocalSide:
    """The options and memory that a transport shares with its connections."""

    memory: RegisteredMemory
    timeout_s: float
    piece_bytes: int
    digest: bool


class StagedTransfer(Transfer):
    """A transfer through staging memory. Only a `Flow` accesses local memory."""

    def __init__(self, connection: Connection, num_bytes: int, timeout_s: float) -> None:
        self.peer, self.num_bytes = connection.peer.agent, num_bytes
        self._connection = connection
        self.deadline = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._is_done, self._error = False, None
        self._has_ended = threading.Event()
        self.number = -1  # ID of the transfer, unique on its connection
        self.request = ""  # digest of the request, if enabled
        self._job: Job | None = None

    def poll(self) -> bool:
        with self._lock:
            if self._is_done:
                return True
            error = self._error
        if error is None and time.monotonic() > self.deadline:
            error = f"not finished within {self.timeout_s:g} s"
            self.cancel(error)
            return self.poll()
        if error is not None:
            raise TransferError(f"transfer with agent {self.peer!r} failed: {error}")
        return False

    def cancel(self, reason: str) -> None:
        if self.fail(reason):
            self._connection.give_up(self)

    @property
    def job(self) -> Job | None:
        """The job that moves the bytes, or None until the peer has responded."""
        return self._job

    @job.setter
    def job(self, job: Job) -> None:
        with self._lock:
            self._job = job
            if self._error is not None:
                job.stop()

    @property
    def is_released(self) -> bool:
        return self.has_ended and (self._job is None or self._job.is_idle)

    @property
    def has_ended(self) -> bool:
        """Return whether the transfer has completed or failed."""
        return self._is_done or self._error is not None

    def _wait_for_end(self, timeout_s: float) -> None:
        self._has_ended.wait(min(timeout_s, max(self.deadline - time.monotonic(), 0.0) + 1e-3))

    def finish(self, tell: Callable[[bool], None] = lambda is_done: None) -> None:
        """Mark the transfer as complete.

        Calls `tell` with True, or with False if the transfer had already failed.
        """
        with self._lock:
            tell(self._error is None)
            if self._error is None:
                self._is_done = True
        self._has_ended.set()

    def fail(self, reason: str) -> bool:
        """Mark the transfer as failed. Returns whether it was in flight until now."""
        with self._lock:
            if self._is_done or self._error is not None:
                return False
            if self._job is not None:
                self._job.stop()  # set first, because `is_released` is read without the lock
            self._error = reason
        self._has_ended.set()
        return True


class Connection:
    """A connection to one peer, which exchanges frames:

    - `pull` (id, spans): the peer reads. Answered with `start` (id), then pieces, then `done` (id,
      message).
    - `refused` (id, reason): the request is refused; sent instead of another response.
    - `piece` (id, bytes): a read's next piece is in the next slot, or follows (`Lane`).
    - `taken`: the slot of the earliest piece is free again.
    - `end` (id): no further piece of a canceled read will be sent.
    - `cancel` (id): the peer has canceled its read. Answered with `end` unless all pieces were sent.
    - If digests are enabled, `pull`, `piece` and every frame (`Channel`) carry a digest.
    - `message`: a notification.
    - `lane`: a frame that is passed to the lane while it opens.
    - `ready`: sent once by the listener when its lane is open. `connect` returns only after this
      frame, when both sides may start transfers.

    In each direction, bytes are sent in the order of the `start` frames.
    """

    def __init__(self, local: LocalSide, peer: Metadata, *, is_caller: bool) -> None:
        self.peer = peer
        self.bounds, self.kinds = peer.bounds(), peer.kinds()
        self.piece_bytes = min(peer.piece_bytes, local.piece_bytes)
        self.has_digest = peer.digest or local.digest
        self.reason: str | None = None  # why the connection ended
        self.is_ready = threading.Event()  # also set once the connection has ended
        # Set once this side's lane is open or the connection has ended.
        self._is_open = threading.Event()
        self._peer_is_open = not is_caller
        self._local, self.is_caller = local, is_caller
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._transfers: dict[int, tuple[StagedTransfer, Spans | None, bytes]] = {}
        # Failed transfers that the peer has not released: when each transfer failed, by ID.
        self._given_up: dict[int, float] = {}
        self._pulls: dict[int, Job] = {}  # the peer's reads, by ID
        self._incoming: dict[int, Job] = {}  # this side's reads that have started, by ID
        self._messages: deque[bytes] = deque()
        self.lane: Lane | None = None
        self.channel: Channel | None = None
        self._flows: tuple[Outgoing, Incoming] | tuple[()] = ()
        self._on_lane_frame: Callable[[dict, bytes], None] = lambda header, payload: None

    def attach(self, channel: Channel) -> None:
        """Start reading frames."""
        self.channel = channel
        channel.start()

    def on_lane_frame(self, handler: Callable[[dict, bytes], None]) -> None:
        """Set the function that handles the lane's frames."""
        self._on_lane_frame = handler

    def open(self, lane: Lane) -> None:
        """Start the threads that move bytes over the lane."""
        self.lane = lane
        self._flows = tuple(
            kind(
                lane,
                self._local.memory,
                self.fail,
                self._say,
                self._local.timeout_s,
                has_digest=self.has_digest,
                name=f"kvcache bytes {direction} {self.peer.agent}",
            )
            for kind, direction in ((Outgoing, "to"), (Incoming, "from"))
        )
        with self._lock:
            self._is_open.set()
            if self._peer_is_open:
                self.is_ready.set()
        if self.reason is not None:
            self.close()
        elif not self.is_caller:
            with suppress(TransferError):  # the connection has ended
                self.put({"op": "ready"})

    def is_calling(self, peer: Metadata) -> bool:
        """Return whether this side is connecting to this incarnation of the peer."""
        is_it = self.peer.incarnation == peer.incarnation
        return is_it and self.is_caller and not self.is_ready.is_set()

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until both sides may start transfers.

        Raises ConnectionError, or TimeoutError at `deadline`.
        """
        if not self.is_ready.wait(max(deadline - time.monotonic(), 0)):
            raise TimeoutError("the peer did not answer in time")
        if self.reason is not None:
            raise ConnectionError(self.reason)

    @property
    def threads(self) -> list[threading.Thread]:
        """Return the threads that end with the connection."""
        found = [flow.thread for flow in self._flows]
        for part in (self.channel, self.lane):
            found += part.threads if part is not None else ()
        return found

    @property
    def copying(self) -> list[threading.Thread]:
        """Return the threads that may access registered memory. After `close`, none are added."""
        found = [flow.thread for flow in self._flows if flow.is_copying]
        if self.lane is not None:
            found += [thread for thread in self.lane.threads if thread.is_alive()]
        return found

    @property
    def is_needed(self) -> bool:
        """Whether messages have not been taken yet, or threads are running."""
        return bool(self._messages) or any(thread.is_alive() for thread in self.threads)

    def begin(self, local: Spans, remote: Spans, notify: bytes, timeout_s: float) -> StagedTransfer:
        """Start a read of validated spans."""
        transfer = StagedTransfer(self, local.num_bytes, timeout_s)
        if local.num_fragments == 0:
            transfer.finish()
            if notify:
                self.put({"op": "message"}, notify)
            return transfer
        payload = remote.to_bytes()
        number = self.track(transfer, local, notify)
        header = {"op": "pull", "id": number}
        if self.has_digest:
            transfer.request = digest_of_request(number, payload)
            header["digest"] = transfer.request
        self.put(header, payload)
        return transfer

    def track(self, transfer: StagedTransfer, local: Spans | None, notify: bytes) -> int:
        """Assign an ID to a new transfer, and track the transfer so that it fails if the connection
        ends.

        Raises TransferError like `put`.
        """
        with self._lock:
            if self.reason is not None:
                raise TransferError(f"agent {self.peer.agent!r} is not connected: {self.reason}")
            number = transfer.number = next(self._ids) % _MOST_ID
            self._transfers[number] = (transfer, local, notify)
        return number

    def untrack(self, number: int) -> None:
        """Stop tracking a transfer that both sides have released."""
        with self._lock:
            self._transfers.pop(number, None)
            self._given_up.pop(number, None)

    def give_up(self, transfer: StagedTransfer) -> None:
        """Notify the peer of a failed transfer.

        Other transfers continue if the peer releases the failed transfer in time.
        """
        with self._lock:
            if transfer.number not in self._transfers:
                return
            self._given_up[transfer.number] = time.monotonic()
        with suppress(TransferError):  # the connection has ended
            self.put({"op": "cancel", "id": transfer.number})

    def check_alive(self) -> None:
        """End the connection if the peer has not released a transfer in time."""
        with self._lock:
            since = min(self._given_up.values(), default=None)
        if since is not None and time.monotonic() > since + self._local.timeout_s:
            self.fail(f"the peer has not answered for {self._local.timeout_s:g} s")

    def put(self, header: dict, payload: bytes = b"") -> None:
        """Queue a frame for the peer. Raises TransferError if the connection has ended."""
        if self.reason is not None:
            raise TransferError(f"agent {self.peer.agent!r} is not connected: {self.reason}")
        try:
            self.channel.put(header, payload)
        except ChannelError as error:
            self.fail(str(error))
            raise TransferError(f"agent {self.peer.agent!r} is not connected: {error}") from None

    def take_messages(self) -> list[bytes]:
        """Return the messages received since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def fail(self, reason: str, linger_s: float = 0.0) -> None:
        """End the connection, failing all its transfers. See `close` for `linger_s`."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            transfers, self._transfers = self._transfers, {}
        for transfer, *_ in transfers.values():
            transfer.fail(reason)
        self.close(linger_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the channel and the flows, after sending queued frames for up to `linger_s`."""
        if self.channel is not None:
            self.channel.close(linger_s)
        for flow in self._flows:
            flow.close()
        if self.lane is not None:
            self.lane.close()
        self._is_open.set()
        self.is_ready.set()

    # Handlers for the peer's frames. An exception in a handler ends the connection.

    def on_frame(self, header: dict, payload: bytes) -> None:
        """Handle a frame from the peer. Raises ValueError if the frame violates the protocol."""
        op = header["op"]
        if op == "lane":
            self._on_lane_frame(header, payload)
            return
        if op == "ready":
            self._on_ready()
            return
        # The peer may be ready first. All frames that are needed to open the lane have arrived.
        self._is_open.wait()
        if self.reason is not None:
            return
        if op == "message":
            self._notify(payload)
            return
        if op == "taken":
            self._flows[0].taken()
            return
        number = header.get("id")
        if type(number) is not int or not 0 <= number < _MOST_ID:
            raise ValueError(f"id is {shown(number)}: expected 0 to {_MOST_ID - 1}")
        handler = {
            "pull": self._on_pull,
            "start": self._on_start,
            "done": self._on_done,
            "refused": self._on_refused,
            "piece": self._on_piece,
            "end": self._on_end,
            "cancel": self._on_cancel,
        }.get(op)
        if handler is None:
            raise ValueError(f"op is {shown(op)}: expected an op of this version")
        handler(number, header, payload)

    def _on_ready(self) -> None:
        with self._lock:
            if self._peer_is_open:
                raise ValueError("unexpected ready: expected it once, from the listening side")
            self._peer_is_open = True
            if self._is_open.is_set():
                self.is_ready.set()

    def _on_pull(self, number: int, header: dict, payload: bytes) -> None:
        request = self._digest(number, header, payload)
        spans = None if request is None else self._checked(number, payload)
        if spans is None:
            return
        if number in self._pulls:
            raise ValueError(f"id of a pull is {number}: expected an id that is not in use")
        if len(self._pulls) >= _MOST_WAITING:
            reason = f"{len(self._pulls)} reads are waiting: expected fewer than {_MOST_WAITING}"
            self.put({"op": "refused", "id": number, "reason": reason})
            return
        job = self._pulls[number] = Job(spans, number, self.piece_bytes, request=request)
        self.put({"op": "start", "id": number, "bytes": spans.num_bytes})
        self._flows[0].put(job)

    def _digest(self, number: int, header: dict, payload: bytes) -> str | None:
        """Verify a received request and return its digest ("" without digests), or None if the
        request was refused.
        """
        if not self.has_digest:
            return ""
        found = digest_of_request(number, payload)
        if header.get("digest") == found:
            return found
        reason = "the request differs from what was sent: the digests differ"
        self.put({"op": "refused", "id": number, "reason": reason})
        return None

    def _checked(self, number: int, payload: bytes) -> Spans | None:
        """Validate a request's spans and return them, or None if the request was refused."""
        try:
            spans = Spans.from_bytes(payload)
            if spans.num_fragments == 0:
                raise ValueError("spans have no fragments: expected one or more")
            most = _MOST_TIMES * self._local.memory.num_bytes
            if spans.num_bytes > most:
                raise ValueError(
                    f"the request has {spans.num_bytes} bytes: expected at most {most}, "
                    f"{_MOST_TIMES} times the registered bytes"
                )
            self._local.memory.check(spans, "the request")
        except ValueError as error:
            self.put({"op": "refused", "id": number, "reason": str(error)})
            return None
        return spans

    def _on_start(self, number: int, header: dict, payload: bytes) -> None:
        size = header.get("bytes")
        transfer, local, _ = self._transfers.get(number, (None, None, b""))
        if local is None or transfer.job is not None:
            raise ValueError(f"id of a start is {number}: expected the id of a new transfer")
        if size != local.num_bytes:
            raise ValueError(f"start announces {shown(size)} bytes: expected {local.num_bytes}")
        transfer.job = self._incoming[number] = Job(
            local, number, self.piece_bytes, lambda: self._have_read(number), transfer.request
        )

    def _say(self, op: str, **values: object) -> None:
        self.put({"op": op, **values})

    def _on_piece(self, number: int, header: dict, payload: bytes) -> None:
        self._flows[1].receive(self._started(number), header)

    def _on_end(self, number: int, header: dict, payload: bytes) -> None:
        if number not in self._given_up:
            raise ValueError(f"the data of pull {number} ended early: expected all bytes")
        self._flows[1].end(self._started(number))

    def _started(self, number: int) -> Job:
        if (job := self._incoming.get(number)) is None:
            raise ValueError(f"id of a piece is {number}: expected the id of a read in progress")
        return job

    def _have_read(self, number: int) -> None:
        transfer, _, notify = self._transfers[number]
        if self._incoming.pop(number).is_spoiled:
            transfer.fail("the received bytes differ from the sent bytes: their digests differ")
        transfer.finish(
            lambda is_done: self.put({"op": "done", "id": number}, notify if is_done else b"")
        )
        self.untrack(number)

    def _on_done(self, number: int, header: dict, payload: bytes) -> None:
        if self._pulls.pop(number, None) is None:
            raise ValueError(f"id of a done is {number}: expected the id of a pull")
        if payload:
            self._notify(payload)

    def _on_cancel(self, number: int, header: dict, payload: bytes) -> None:
        # If the read no longer exists, it has completed.
        if (job := self._pulls.get(number)) is not None:
            job.stop()

    def _on_refused(self, number: int, header: dict, payload: bytes) -> None:
        transfer = self._transfers.get(number, (None,))[0]
        if transfer is None or transfer.job is not None:
            raise ValueError(f"id of a refusal is {number}: expected the id of a new transfer")
        self.untrack(number)
        transfer.fail(f"the peer refused: {str(header.get('reason'))[:1000]}")

    def _notify(self, message: bytes) -> None:
        if len(message) > MOST_MESSAGE or len(self._messages) >= MOST_NOTIFICATIONS:
            raise ValueError(
                f"a message has {len(message)} bytes, and {len(self._messages)} messages are waiting: "
                f"expected at most {MOST_MESSAGE} bytes, and fewer than {MOST_NOTIFICATIONS} messages"
            )
        self._messages.append(message)
