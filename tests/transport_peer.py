"""A peer in a process of its own, for `test_transports.py`: `python -m tests.transport_peer NAME AGENT`.

It registers memory with a known pattern, tells its metadata, and obeys one JSON command per line. With
`--lie` it breaks the protocol in one way; with `--delay` a step takes longer.
"""

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvcache.transfer.transport import base, connection, handshake, lane
from tests.shared import REPO

POOL_BYTES = 1 << 20
_FRAGMENT = 4096


def pattern(seed: int) -> np.ndarray:
    """uint8[POOL_BYTES] that a seed determines."""
    return np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)


class Peer:
    """The process, as a test sees it. Leaving the block kills it."""

    def __init__(
        self,
        name: str,
        agent: str = "peer",
        *,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        command = [*within, sys.executable, "-m", "tests.transport_peer", name, agent]
        for option, value in options.items():
            command += [f"--{option.replace('_', '-')}", str(value)]
        environment = {**os.environ, "PYTHONPATH": str(REPO), **(environment or {})}
        self.process = subprocess.Popen(
            command, cwd=REPO, env=environment, stdin=-1, stdout=-1, text=True
        )
        self.pid = self.process.pid
        told = self._answer(60)
        self.metadata, self.address = told["metadata"].encode(), told["address"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, command: str, timeout_s: float = 20, **arguments: object) -> dict:
        """What it answers."""
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer(timeout_s)

    def tell(self, command: str, **arguments: object) -> None:
        """A command without an answer."""
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def _answer(self, timeout_s: float) -> dict:
        selector = selectors.DefaultSelector()
        selector.register(self.process.stdout, selectors.EVENT_READ)
        assert selector.select(timeout_s), f"the peer did not answer within {timeout_s} s"
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)


def lie(how: str) -> None:
    """Breaks the protocol."""
    if how == "version":
        handshake.TRANSPORT_VERSION += 1
    if how == "corrupt":  # behind the digest
        real = lane.digest_of

        def changed(piece: torch.Tensor) -> str:
            digest = real(piece)
            piece[0] ^= 1
            return digest

        lane.digest_of = changed
    start = connection.Connection.put

    def put(self: connection.Connection, header: dict, payload: bytes = b"") -> None:
        if how == "size" and header["op"] == "start":
            header = {**header, "bytes": header["bytes"] + 1}
        if how == "id" and header["op"] == "start":
            header = {**header, "id": header["id"] + 1}
        if how == "tag" and header["op"] == "start":
            header = {**header, "tag": header["tag"] + 2}
        if how == "twice" and header["op"] == "start":
            start(self, header, payload)
        if how == "landed" and header["op"] == "accept":
            header = {**header, "op": "landed"}
        if how == "op" and header["op"] == "start":
            header = {**header, "op": "begin"}
        start(self, header, payload)

    connection.Connection.put = put


def delay(what: str) -> None:
    """Lets a step take half a second longer."""
    if what == "open":
        real = connection.Connection.open

        def slow(self: connection.Connection, lane: object) -> None:
            time.sleep(0.5)
            real(self, lane)

        connection.Connection.open = slow


def attempt(
    transport: base.Transport,
    pool: np.ndarray,
    timeout_s: float,
    *,
    kind: str,
    metadata: str,
    address: int,
    size: int,
    source: int,
) -> dict:
    """Connects where it is not connected, and moves the first bytes of `pattern(source)`."""
    begin, error, is_right = time.monotonic(), None, None
    at = np.random.default_rng(0).permutation(size // _FRAGMENT) * _FRAGMENT
    pool[:size] = pattern(source)[:size] if kind == "write" else 0
    try:
        peer = transport.connect(metadata.encode(), timeout_s=timeout_s)
        move = getattr(transport, kind)
        move(peer, pool.ctypes.data + at, address + at, np.full(len(at), _FRAGMENT)).wait(timeout_s)
        is_right = bool((pool[:size] == pattern(source)[:size]).all())
    except (ConnectionError, base.TransferError, ValueError) as raised:
        error = str(raised)
    return {"error": error, "is_right": is_right, "seconds": time.monotonic() - begin}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("agent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--secret", default="")
    parser.add_argument("--lie", default="")
    parser.add_argument("--delay", default="")
    parser.add_argument("--digest", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NIXL logs to stdout
    lie(args.lie)
    delay(args.delay)
    pool = pattern(args.seed)
    transport = base.make_transport(
        args.agent,
        args.name,
        secret=args.secret.encode(),
        host=args.host,
        timeout_s=args.timeout_s,
        digest=bool(args.digest),
    )
    transport.register([(pool.ctypes.data, pool.nbytes)])

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    told = transport.metadata().decode()
    if args.lie == "version":
        told = json.dumps({**json.loads(told), "version": handshake.TRANSPORT_VERSION})
    answer(metadata=told, address=pool.ctypes.data)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("command"):
            case "notifications":
                deadline, found = time.monotonic() + 10, []
                while len(found) < command["least"] and time.monotonic() < deadline:
                    found += transport.notifications()
                    time.sleep(0.01)
                answer(found=[(peer, message.decode()) for peer, message in found])
            case "busy":  # holds the interpreter's main thread
                end = time.monotonic() + command["seconds"]
                while time.monotonic() < end:
                    pass
            case "pool":
                answer(hex=pool[command["first"] : command["last"]].tobytes().hex())
            case "connect":
                try:
                    peer = transport.connect(command["metadata"].encode(), timeout_s=5)
                    answer(peer=peer)
                except (ConnectionError, ValueError) as error:
                    answer(error=str(error))
            case "read":
                here = pool.ctypes.data + np.array(command["local"])
                read = transport.read(
                    command["peer"], here, np.array(command["remote"]), np.array(command["length"])
                )
                read.wait(5)
                answer(done=True)
            case "attempt":
                answer(**attempt(transport, pool, args.timeout_s, **command))
            case "fill":
                pool[:] = command["value"]
                answer(done=True)
    transport.close()


if __name__ == "__main__":
    main()
