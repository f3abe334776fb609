# SPDX-License-Identifier: Apache-2.0
"""Measures transports between two processes.

Contiguous and scattered reads are measured with the plain library, and scattered reads with
kvcache.

    python -m benchmarks.transports                   # every transport that is installed
    python -m benchmarks.transports --only nixl --json benchmarks/results/cpu.json
    UCX_TLS=tcp python -m benchmarks.transports --only nixl       # NIXL without shared memory

Each method moves the same bytes from one process into the memory of another. The plain library and
kvcache use separate pairs of processes. Only one pair runs at a time, because the thread of a NIXL
agent with default settings never sleeps and would compete with the measured method for a core. All
methods are measured in alternating rounds, so that other load on the machine affects them equally.
The received bytes are verified. `benchmarks.gpu.device_transfers` measures
device memory with the same pairs of processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu.costs import counted
from benchmarks.measure import add_json, save
from kvcache.worker.pages.pages import Pages
from kvcache_exchange.transport.factory import make_transport
from kvcache_exchange.transport.nixl_agent import nixl_kind

SIZES = ((256, 64 << 10), (4096, 16 << 10))  # number of blocks, bytes per block
POOL_BYTES = 128 << 20
ROUNDS = 15
SETTLE_S = 0.01  # seconds to wait after resuming processes
ANSWER_S = 60  # time limit for starting a process, and for a move
WAYS = ("contiguous", "scattered", "kvcache")
# An object to keep alive, and one function per method. Each function accepts local offsets, remote
# offsets, and the number of bytes per block.
Moves = tuple[object, dict[str, Callable[[np.ndarray, np.ndarray, int], None]]]


class SocketPeer:
    """A plain TCP connection, with one call per fragment to send or receive it."""

    def __init__(self, pool: torch.Tensor, is_server: bool, exchange: Callable) -> None:
        self.pool, self.is_server = memoryview(pool.numpy()), is_server
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = exchange(listener.getsockname()[1])
            if is_server:
                self.socket, _ = listener.accept()
            else:
                self.socket = socket.create_connection(("127.0.0.1", port))

    def move(self, offsets: np.ndarray, size: int) -> None:
        for at in offsets.tolist():
            left = self.pool[at : at + size]
            if self.is_server:
                self.socket.sendall(left)
                continue
            while left:
                left = left[self.socket.recv_into(left) :]


class NixlPeer:
    """Plain NIXL, with one descriptor per fragment. Both sides have the same kind of memory."""

    def __init__(self, agent: object, pool: torch.Tensor, peer: str, remote: int) -> None:
        self.agent, self.local, self.peer, self.remote = agent, pool.data_ptr(), peer, remote
        self.kind, self.device = nixl_kind(str(pool.device))

    def read(self, local: np.ndarray, remote: np.ndarray, size: int) -> None:
        lists = [
            self.agent.prep_xfer_dlist(name, self._rows(base + offsets, size), self.kind)
            for name, base, offsets in (
                ("NIXL_INIT_AGENT", self.local, local),
                (self.peer, self.remote, remote),
            )
        ]
        numbers = np.arange(len(local), dtype=np.int32)
        handle = self.agent.make_prepped_xfer("READ", lists[0], numbers, lists[1], numbers)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}")
        self.agent.release_xfer_handle(handle)
        for each in lists:
            self.agent.release_dlist_handle(each)

    def _rows(self, addresses: np.ndarray, size: int) -> np.ndarray:
        columns = [addresses, *(np.full_like(addresses, each) for each in (size, self.device))]
        return np.stack(columns, 1).astype("u8")


def plain_agent(pool: torch.Tensor) -> object:
    """Create a NIXL agent with default settings, on the loopback interface like kvcache's agents."""
    from nixl._api import nixl_agent, nixl_agent_config

    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    agent = nixl_agent(f"plain-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"]))
    kind, device = nixl_kind(str(pool.device))
    agent.register_memory([(pool.data_ptr(), pool.nbytes, device, "")], kind)
    return agent


def plain_moves(name: str, pool: torch.Tensor, is_server: bool, exchange: Callable) -> Moves:
    """Return the functions that move bytes with the plain library."""
    if name == "tcp":
        peer = SocketPeer(pool, is_server, exchange)

        def move(mine: np.ndarray, their: np.ndarray, size: int) -> None:
            peer.move(their if is_server else mine, size)

        return peer, dict.fromkeys(("contiguous", "scattered"), move)
    agent = plain_agent(pool)
    metadata, remote = exchange((agent.get_agent_metadata(), pool.data_ptr()))
    if is_server:
        return agent, {}
    reader = NixlPeer(agent, pool, agent.add_remote_agent(metadata).decode(), remote)
    return agent, dict.fromkeys(("contiguous", "scattered"), reader.read)


def kvcache_moves(
    name: str,
    pool: torch.Tensor,
    is_server: bool,
    exchange: Callable,
    options: Mapping[str, object],
) -> Moves:
    """Return the function that moves bytes with kvcache."""
    transport = make_transport("server" if is_server else "client", name, **options)
    transport.register(Pages.over([pool[None]]))
    metadata, remote = exchange((transport.metadata(), pool.data_ptr()))
    if is_server:
        return transport, {}
    peer = transport.connect(metadata)

    def move(mine: np.ndarray, their: np.ndarray, size: int) -> None:
        here, there = pool.data_ptr() + mine, remote + their
        transport.read(peer, here, there, np.full(len(mine), size)).wait(60)

    return transport, {"kvcache": move}


def work(
    name: str,
    options: Mapping[str, object] | None,
    device: str,
    pool_bytes: int,
    is_server: bool,
    pipe: Connection,
    other: Connection,
) -> None:
    """Run one process of a pair, which executes requests from `pipe` until it is killed."""
    torch.set_num_threads(1)

    def exchange(value: object) -> object:
        other.send(value)
        return other.recv()

    try:
        drawn = np.random.default_rng(1).integers(0, 256, pool_bytes, np.uint8)
        expected = torch.from_numpy(drawn).to(device)
        pool, wanted = expected.clone(), torch.empty_like(expected)
        finish(pool)
        if options is None:
            _kept, moves = plain_moves(name, pool, is_server, exchange)
        else:
            _kept, moves = kvcache_moves(name, pool, is_server, exchange, options)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    pipe.send("ready")
    while True:
        way, mine, their, size, counts = pipe.recv()
        if is_server:
            if way in moves:
                moves[way](mine, their, size)
            continue
        pool.zero_()
        wanted.zero_()
        to, source = (torch.from_numpy(each // size).to(device) for each in (mine, their))
        wanted.view(-1, size)[to] = expected.view(-1, size)[source]
        finish(pool)
        try:
            with counted() if counts else nullcontext({}) as costs:
                begin = time.perf_counter()
                moves[way](mine, their, size)
                took = time.perf_counter() - begin
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            continue
        pipe.send((took, torch.equal(pool, wanted), costs))


def finish(memory: torch.Tensor) -> None:
    """Wait for the device, because transfers are not ordered with its work."""
    if memory.is_cuda:
        torch.cuda.synchronize()


class Move(NamedTuple):
    """The duration of a move and, in `costs`, the move's device work if it was counted."""

    seconds: float
    costs: dict[str, int]


class Pair:
    """A pair of processes that are stopped except during a move.

    options: options of kvcache's transport, or None for the plain library.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None,
        device: str = "cpu",
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        context = get_context("spawn")
        between = context.Pipe()
        self.name, self._pool_bytes, self.is_open = name, pool_bytes, True
        self.pipes, self.processes = [], []
        for is_server in (True, False):
            pipe, theirs = context.Pipe()
            args = (name, options, device, pool_bytes, is_server, theirs, between[is_server])
            self.processes.append(context.Process(target=work, args=args, daemon=True))
            self.processes[-1].start()
            self.pipes.append(pipe)
        starting = list(self.pipes)
        while starting:  # the first failure is the cause, and the other process only times out
            if (told := self._answer(starting)) != "ready":
                self.close()
                raise RuntimeError(f"{name}: {told}")
        self._signal(signal.SIGSTOP)

    def move(
        self, way: str, count: int, size: int, rng: np.random.Generator, *, counts: bool = False
    ) -> Move:
        """Move randomly scattered blocks, or for "contiguous" a single block of the same total size.

        Raises AssertionError if the received bytes differ from those sent, and RuntimeError if the move
        fails. In the latter case, both processes are terminated.
        """
        mine, their = (rng.permutation(self._pool_bytes // size)[:count] * size for _ in "12")
        if way == "contiguous":
            mine, their, size = np.zeros(1, int), np.zeros(1, int), count * size
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        for pipe in self.pipes:
            pipe.send((way, mine, their, size, counts))
        told = self._answer([self.pipes[1]])
        if isinstance(told, str):
            self.close()
            raise RuntimeError(f"{self.name}, {way}: {told}")
        self._signal(signal.SIGSTOP)
        took, same, costs = told
        if not same:
            raise AssertionError(f"{way}: wrong bytes arrived")
        return Move(took, costs)

    @staticmethod
    def _answer(pipes: list[Connection]) -> object:
        """Return the first message from any of the pipes, and remove that pipe from the list."""
        ready = wait(pipes, ANSWER_S)
        if not ready:
            return f"no answer within {ANSWER_S} s"
        pipes.remove(ready[0])
        try:
            return ready[0].recv()
        except EOFError:
            return "the process has ended"

    def close(self) -> None:
        """Terminate both processes, which may be stopped."""
        self.is_open = False
        for process in self.processes:
            process.kill()
            process.join(10)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)


def measure(name: str) -> list[dict]:
    """Measure every size and method in turn."""
    with ExitStack() as stack:
        pairs = [stack.enter_context(closing(Pair(name, options))) for options in (None, {})]
        return measure_pairs(name, *pairs)


def measure_pairs(name: str, plain: Pair, ours: Pair) -> list[dict]:
    """Measure the process pair of the plain library and the process pair of kvcache."""
    results = []
    for count, size in SIZES:
        total, rng = count * size, np.random.default_rng(2)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(ROUNDS + 2):
            for way in WAYS:
                pair = plain if way in ("contiguous", "scattered") else ours
                took = pair.move(way, count, size, rng).seconds
                if number >= 2:  # the first rounds establish connections and touch the memory
                    seconds[way].append(took)
        speed = {way: total / np.median(took) / 1e9 for way, took in seconds.items()}
        best = {way: total / min(took) / 1e9 for way, took in seconds.items()}
        results.append(
            {
                "transport": name,
                "blocks": count,
                "block_bytes": size,
                "GB_per_s": speed,
                "best_GB_per_s": best,
                "to_scattered": speed["kvcache"] / speed["scattered"],
                "to_contiguous": speed["kvcache"] / speed["contiguous"],
            }
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports")
    parser.add_argument("--only", choices=("tcp", "nixl"))
    add_json(parser)
    args = parser.parse_args()
    installed = ["tcp"] + (["nixl"] if importlib.util.find_spec("nixl") else [])
    results = []
    for name in [args.only] if args.only else installed:
        print(f"{'GB/s, median (best)':28}" + "".join(f"{way:>16}" for way in WAYS))
        for r in measure(name):
            results.append(r)
            cells = "".join(
                f"{r['GB_per_s'][way]:>8.2f} ({r['best_GB_per_s'][way]:5.2f})" for way in WAYS
            )
            print(
                f"{name:5}{r['blocks']:>6} x {r['block_bytes'] >> 10:>2} KiB       {cells}  "
                f"{r['to_scattered']:.1f}x scattered, {r['to_contiguous']:.2f}x contiguous",
                flush=True,
            )
    with_tls = f", UCX_TLS={os.environ['UCX_TLS']}" if "UCX_TLS" in os.environ else ""
    save(args.json, f"transports{with_tls}", {"load": os.getloadavg()[0], "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
