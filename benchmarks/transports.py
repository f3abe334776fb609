"""Transports between two processes: contiguous, scattered as the library does it, and kvcache's.

    python -m benchmarks.transports                   # every transport that is installed
    python -m benchmarks.transports --only nixl --json benchmarks/results/transports.json
    UCX_TLS=tcp python -m benchmarks.transports --only nixl       # NIXL without shared memory

Each moves the same bytes from one process into another one's memory. The library as it comes and kvcache
have two processes each, of which one pair runs at a time, and the other is stopped: the thread of a NIXL
agent with default settings never sleeps, and would take a core from whatever is measured. All ways are
measured in turn, round by round, so that what else the machine does disturbs all of them. "own agent":
scattered blocks as the library moves them, between agents that kvcache has set up. Bytes are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.machine import commit, processor
from kvcache.transfer.transport.base import make_transport

SIZES = ((256, 64 << 10), (4096, 16 << 10))  # blocks, bytes
POOL_BYTES = 128 << 20
ROUNDS = 15
SETTLE_S = 0.01  # after processes were continued
WAYS = {
    "gloo": ("contiguous", "scattered", "kvcache"),
    "nixl": ("contiguous", "scattered", "own agent", "kvcache"),
}
Move = Callable[
    [np.ndarray, np.ndarray, int], None
]  # local and remote offsets, bytes of each block
Moves = tuple[object, dict[str, Move]]  # what must live on, and a function for each way


class GlooPeer:
    """torch.distributed as it comes: one isend and irecv per fragment."""

    def __init__(self, pool: torch.Tensor, rank: int, exchange: Callable[[object], object]) -> None:
        self.pool, self.rank = pool, rank
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) if rank else None
        port = exchange(store.port if store else None)
        store = store or dist.TCPStore("127.0.0.1", port, 2, False)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        self.group = dist.ProcessGroupGloo(store, rank, 2, options)

    def move(self, offsets: np.ndarray, size: int) -> None:
        move = self.group.recv if self.rank else self.group.send
        works = [move([self.pool[at : at + size]], 1 - self.rank, 0) for at in offsets.tolist()]
        for work in works:
            work.wait()


class NixlPeer:
    """NIXL as it comes: one descriptor per fragment."""

    def __init__(self, agent: object, local: int, peer: str, remote: int) -> None:
        self.agent, self.local, self.peer, self.remote = agent, local, peer, remote

    def read(self, local: np.ndarray, remote: np.ndarray, size: int) -> None:
        lists = [
            self.agent.prep_xfer_dlist(name, self._rows(base + offsets, size), "DRAM")
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

    @staticmethod
    def _rows(addresses: np.ndarray, size: int) -> np.ndarray:
        return np.stack([addresses, np.full_like(addresses, size), 0 * addresses], 1).astype("u8")


def plain_agent(pool: torch.Tensor) -> object:
    """NIXL's agent with default settings, on the loopback as kvcache's is."""
    from nixl._api import nixl_agent, nixl_agent_config

    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    agent = nixl_agent(f"plain{os.getpid()}", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(pool.data_ptr(), pool.nbytes, 0, "")], "DRAM")
    return agent


def plain_moves(name: str, pool: torch.Tensor, is_server: bool, exchange: Callable) -> Moves:
    """The library as it comes."""
    if name == "gloo":
        peer = GlooPeer(pool, 0 if is_server else 1, exchange)

        def move(mine: np.ndarray, their: np.ndarray, size: int) -> None:
            peer.move(their if is_server else mine, size)

        return peer, dict.fromkeys(("contiguous", "scattered"), move)
    agent = plain_agent(pool)
    metadata, remote = exchange((agent.get_agent_metadata(), pool.data_ptr()))
    if is_server:
        return agent, {}
    reader = NixlPeer(agent, pool.data_ptr(), agent.add_remote_agent(metadata).decode(), remote)
    return agent, dict.fromkeys(("contiguous", "scattered"), reader.read)


def kvcache_moves(name: str, pool: torch.Tensor, is_server: bool, exchange: Callable) -> Moves:
    """kvcache, and the library with its agent."""
    transport = make_transport("server" if is_server else "client", name)
    transport.register([(pool.data_ptr(), pool.nbytes)])
    metadata, remote = exchange((transport.metadata(), pool.data_ptr()))
    if is_server:
        return transport, {}
    peer = transport.connect(metadata)

    def move(mine: np.ndarray, their: np.ndarray, size: int) -> None:
        here, there = pool.data_ptr() + mine, remote + their
        transport.read(peer, here, there, np.full(len(mine), size)).wait(60)

    moves = {"kvcache": move}
    if name == "nixl":
        agent, theirs = transport.nixl._agent, json.loads(metadata)["incarnation"]
        moves["own agent"] = NixlPeer(agent, pool.data_ptr(), theirs, remote).read
    return transport, moves


def work(name: str, is_plain: bool, is_server: bool, pipe: Connection, other: Connection) -> None:
    """One process of a pair: does what comes through `pipe`, until it is killed."""
    torch.set_num_threads(1)
    expected = np.random.default_rng(1).integers(0, 256, POOL_BYTES, np.uint8)
    pool = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    if is_server:
        pool.numpy()[:] = expected

    def exchange(value: object) -> object:
        other.send(value)
        return other.recv()

    make = plain_moves if is_plain else kvcache_moves
    _kept, moves = make(name, pool, is_server, exchange)
    pipe.send("ready")
    while True:
        way, mine, their, size = pipe.recv()
        if is_server:
            if way in moves:
                moves[way](mine, their, size)
            continue
        pool.zero_()
        begin = time.perf_counter()
        moves[way](mine, their, size)
        took = time.perf_counter() - begin
        blocks = zip(mine.tolist(), their.tolist())
        same = all(
            np.array_equal(pool.numpy()[m : m + size], expected[t : t + size]) for m, t in blocks
        )
        pipe.send((took, same))


class Pair:
    """Two processes; they are stopped but for the time of a move."""

    def __init__(self, name: str, *, is_plain: bool) -> None:
        context = get_context("spawn")
        between = context.Pipe()
        self.pipes, self.processes = [], []
        for is_server in (True, False):
            pipe, theirs = context.Pipe()
            args = (name, is_plain, is_server, theirs, between[is_server])
            self.processes.append(context.Process(target=work, args=args, daemon=True))
            self.processes[-1].start()
            self.pipes.append(pipe)
        for pipe in self.pipes:
            if not pipe.poll(60) or pipe.recv() != "ready":
                self.close()
                raise RuntimeError(f"{name}: a process did not become ready within 60 s")
        self._signal(signal.SIGSTOP)

    def move(self, way: str, mine: np.ndarray, their: np.ndarray, size: int) -> float:
        """Seconds that a move took."""
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        for pipe in self.pipes:
            pipe.send((way, mine, their, size))
        took, same = self.pipes[1].recv()
        self._signal(signal.SIGSTOP)
        if not same:
            raise AssertionError(f"{way}: other bytes arrived")
        return took

    def close(self) -> None:
        """Ends both, which are stopped."""
        for process in self.processes:
            process.kill()
            process.join(10)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)


def measure(name: str) -> list[dict]:
    """Every size and way, in turn."""
    with ExitStack() as stack:
        pairs = [
            stack.enter_context(closing(Pair(name, is_plain=plain))) for plain in (True, False)
        ]
        return measure_pairs(name, *pairs)


def measure_pairs(name: str, plain: Pair, ours: Pair) -> list[dict]:
    """That of the library's processes, and of kvcache's."""
    results = []
    for count, size in SIZES:
        total, rng = count * size, np.random.default_rng(2)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS[name]}
        for number in range(ROUNDS + 2):
            for way in WAYS[name]:
                mine, their = (rng.permutation(POOL_BYTES // size)[:count] * size for _ in "12")
                fragment = size
                if way == "contiguous":
                    mine, their, fragment = np.zeros(1, int), np.zeros(1, int), total
                pair = plain if way in ("contiguous", "scattered") else ours
                took = pair.move(way, mine, their, fragment)
                if number >= 2:  # the first ones connect, and touch memory
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
    parser.add_argument("--only", choices=("gloo", "nixl"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    args = parser.parse_args()
    installed = ["gloo"] + (["nixl"] if importlib.util.find_spec("nixl") else [])
    results = []
    for name in [args.only] if args.only else installed:
        print(f"{'GB/s, median (best)':28}" + "".join(f"{way:>16}" for way in WAYS[name]))
        for r in measure(name):
            results.append(r)
            cells = "".join(
                f"{r['GB_per_s'][way]:>8.2f} ({r['best_GB_per_s'][way]:5.2f})" for way in WAYS[name]
            )
            print(
                f"{name:5}{r['blocks']:>6} x {r['block_bytes'] >> 10:>2} KiB       {cells}  "
                f"{r['to_scattered']:.1f}x scattered, {r['to_contiguous']:.2f}x contiguous",
                flush=True,
            )
    if args.json:
        told = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {processor()}",
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
            "UCX_TLS": os.environ.get("UCX_TLS"),
            "commit": commit(),
            "results": results,
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
