"""Transports between two processes: contiguous, scattered as the library does it, and kvcache's.

    python -m benchmarks.transports                   # every transport that is installed
    python -m benchmarks.transports --only nixl --json benchmarks/results/transports.json
    UCX_TLS=tcp python -m benchmarks.transports --only nixl       # NIXL without shared memory

All three move the same number of bytes from one process into another one's memory. They are measured in
turn, round by round, so that what else the machine does disturbs all of them. The bytes are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.machine import commit, processor
from kvcache.transfer.transport.base import Transport, make_transport

SIZES = ((256, 64 << 10), (4096, 16 << 10))  # blocks, bytes
POOL_BYTES = 128 << 20
ROUNDS = 15
WAYS = ("contiguous", "scattered", "kvcache")


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
    """NIXL as it comes: one descriptor per fragment, with the transport's agent: each agent has a thread
    that keeps a core busy."""

    def __init__(self, transport: Transport, local: int, peer: str, remote: int) -> None:
        self.agent = transport.nixl._agent
        self.local, self.peer, self.remote = local, peer, remote

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


def exchanger(pipe: Connection) -> Callable[[object], object]:
    def exchange(value: object) -> object:
        pipe.send(value)
        return pipe.recv()

    return exchange


def serve(name: str, pipe: Connection) -> None:
    """The process that has the bytes."""
    torch.set_num_threads(1)
    pool = torch.from_numpy(np.random.default_rng(1).integers(0, 256, POOL_BYTES, np.uint8))
    transport = make_transport("server", name)
    transport.register([(pool.data_ptr(), pool.nbytes)])
    exchange = exchanger(pipe)
    exchange((transport.metadata(), pool.data_ptr()))
    raw = GlooPeer(pool, 0, exchange) if name == "gloo" else None
    while (command := pipe.recv()) is not None:
        raw.move(*command)
    transport.close()


def measure(name: str) -> list[dict]:
    """The process that gets them."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    server = context.Process(target=serve, args=(name, theirs), daemon=True)
    server.start()
    pool = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    transport = make_transport("client", name)
    transport.register([(pool.data_ptr(), pool.nbytes)])
    exchange = exchanger(pipe)
    metadata, remote = exchange(None)
    peer = transport.connect(metadata)
    if name == "gloo":
        raw = GlooPeer(pool, 1, exchange)
    else:
        agent = json.loads(metadata)["incarnation"]
        raw = NixlPeer(transport, pool.data_ptr(), agent, remote)
    expected = np.random.default_rng(1).integers(0, 256, POOL_BYTES, np.uint8)

    def move_raw(mine: np.ndarray, their: np.ndarray, size: int) -> None:
        if name == "gloo":
            pipe.send((their, size))
            raw.move(mine, size)
        else:
            raw.read(mine, their, size)

    def move_ours(mine: np.ndarray, their: np.ndarray, size: int) -> None:
        here, there = pool.data_ptr() + mine, remote + their
        transport.read(peer, here, there, np.full(len(mine), size)).wait(60)

    results = []
    for count, size in SIZES:
        total, rng = count * size, np.random.default_rng(2)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(ROUNDS + 2):
            for way in WAYS:
                mine, their = (rng.permutation(POOL_BYTES // size)[:count] * size for _ in "12")
                fragment = size
                if way == "contiguous":
                    mine, their, fragment = np.zeros(1, int), np.zeros(1, int), total
                pool.zero_()
                begin = time.perf_counter()
                (move_ours if way == "kvcache" else move_raw)(mine, their, fragment)
                took = time.perf_counter() - begin
                for m, t in zip(mine.tolist(), their.tolist()):
                    if not np.array_equal(
                        pool.numpy()[m : m + fragment], expected[t : t + fragment]
                    ):
                        raise AssertionError(f"{name} {way}: other bytes arrived")
                if number >= 2:  # the first ones connect, and touch memory
                    seconds[way].append(took)
        speed = {way: total / np.median(seconds[way]) / 1e9 for way in WAYS}
        best = {way: total / min(seconds[way]) / 1e9 for way in WAYS}
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
    pipe.send(None)
    transport.close()
    server.join(10)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports")
    parser.add_argument("--only", choices=("gloo", "nixl"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    args = parser.parse_args()
    installed = ["gloo"] + (["nixl"] if importlib.util.find_spec("nixl") else [])
    results = []
    print(f"{'GB/s, median (best)':28}" + "".join(f"{way:>16}" for way in WAYS))
    for name in [args.only] if args.only else installed:
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
