# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel's basic blocks, one warp or part of a warp at a time.

In the order "serial", each warp runs until it must wait, threads of a warp that took different
branches meet again as early as possible, and asynchronous copies move their bytes as late as allowed.
Any other order is a seed: warps and parts of warps run in random order, and a copy moves its bytes
early or late.
"""

from __future__ import annotations

import random

import numpy as np

from tests.machinery.ptx.accesses import Accesses
from tests.machinery.ptx.program import Unknown
from tests.machinery.ptx.translate import END, Code

MOST_STEPS = 4_000_000  # basic blocks per launch
RANK_BITS = 24  # an address in the shared memory of a cluster has the rank + 1 above the offset
# An asynchronous copy of a thread, which numbers its groups.
COPY = np.dtype([(n, np.int64) for n in ("thread", "target", "source", "size", "group", "at")])
COPY = np.dtype([*COPY.descr, ("moved", bool)])


class Trap(Exception):
    """Raised for an error of the kernel that ends the launch."""


class Warp:
    def __init__(self, block: int, number: int, threads: np.ndarray):
        self.block, self.number = block, number
        self.parts = {0: threads}  # by the basic block that they run next
        self.num_alive = len(threads)

    def go(self, n: int, threads: np.ndarray) -> None:
        if n == END:
            self.num_alive -= len(threads)
        elif len(threads):
            there = self.parts.get(n, threads[:0])
            self.parts[n] = np.sort(np.concatenate([there, threads]))


class Machine:
    """Runs one launch. `ranges` are the bytes in global memory that it may access, by address."""

    def __init__(self, code: Code, launch, ranges: dict[int, np.ndarray], order: str):
        self.code, self.launch, self.order = code, launch, order
        self.serial, self.rng = order == "serial", random.Random(order)
        x, y, z = launch.block
        self.ids, self.at, self.steps = np.arange(x * y * z * launch.cluster), 0, 0
        self.rank, linear = np.divmod(self.ids, x * y * z)
        tid = (linear % x, linear // x % y, linear // (x * y))
        self.special = {"laneid": (linear % 32).astype(np.uint32)}
        for name, values in (("tid", tid), ("ntid", launch.block), ("nctaid", launch.grid)):
            self._set_special(name, values)
        self.parameters = views(np.frombuffer(launch.parameters, np.uint8))
        self.shared_bytes = code.kernel.shared_bytes + launch.dynamic_shared_bytes
        self.stride = -(-self.shared_bytes // 256) * 256  # of the cluster's blocks
        # One array holds the cluster's shared memory and copies of the ranges.
        self.ranges, end = sorted(ranges.items()), self.stride * launch.cluster
        self.bases = []
        for start, data in self.ranges:
            self.bases.append(end + start % 256)
            end = -(-(self.bases[-1] + len(data)) // 256) * 256
        self.bytes = np.zeros(end, np.uint8)
        for base, (_, data) in zip(self.bases, self.ranges, strict=True):
            self.bytes[base : base + len(data)] = data
        self.memory = views(self.bytes)
        # How many asynchronous copies read and write a byte.
        self.being_read, self.being_written = np.zeros((2, end), np.int16)
        self.accesses = Accesses(code.kernel, self.stride * launch.cluster, end)

    def _set_special(self, name: str, values) -> None:
        for axis, value in zip("xyz", values, strict=True):
            number = np.asarray(value, np.uint32)
            self.special[f"{name}.{axis}"] = np.broadcast_to(number, self.ids.shape)

    def run(self) -> Accesses:
        x, y, z = self.launch.grid
        blocks = np.array([(i, j, k) for k in range(z) for j in range(y) for i in range(x)])
        with np.errstate(all="ignore"):
            for first in range(0, len(blocks), self.launch.cluster):
                self._set_special("ctaid", blocks[first + self.rank].T)
                self._run_cluster()
                self.accesses.end(shared=True)
        self.accesses.end(shared=False)
        for base, (_, data) in zip(self.bases, self.ranges, strict=True):
            data[:] = self.bytes[base : base + len(data)]
        return self.accesses

    # Scheduling

    def _run_cluster(self) -> None:
        count = len(self.ids)
        self.registers = self.code.registers(count)
        shared = self.accesses.num_shared
        self.bytes[:shared] = np.frombuffer(self.rng.randbytes(shared), np.uint8)
        self.copies = np.zeros(0, COPY)
        self.groups = np.zeros(count, np.int64)  # committed, per thread
        self.arrived = np.zeros(count, bool)  # at the cluster's barrier
        self.released = np.zeros(count, bool)  # the arrival orders the thread's earlier accesses
        self.waited = np.full(count, not self.launch.is_dependent)  # for the preceding kernel
        self.accesses.begin_cluster()
        size = count // self.launch.cluster
        self.warps = [
            Warp(block, number, self.ids[block * size :][first : min(first + 32, size)])
            for block in range(self.launch.cluster)
            for number, first in enumerate(range(0, size, 32))
        ]
        while any(warp.num_alive for warp in self.warps):
            ready = [warp for warp in self.warps if self._ready(warp)]
            if ready:
                warp = ready[0] if self.serial else self.rng.choice(ready)
                steps = MOST_STEPS if self.serial else self.rng.choice((1, 4, 30))
                while steps and (parts := self._ready(warp)):
                    self._step(warp, parts)
                    steps -= 1
            else:
                self._end_barriers([warp for warp in self.warps if warp.num_alive])
        if len(self.copies):
            self.at = self.copies["at"][0]
            self._trap("the thread block ends before the copy")

    def _ready(self, warp: Warp) -> list[int]:
        """Return the basic blocks that threads of the warp can run now."""
        waits, alive = self.code.waits, warp.num_alive
        parts = warp.parts.items()
        return [n for n, t in parts if not waits[n] or (waits[n] == "warp" and len(t) == alive)]

    def _step(self, warp: Warp, parts: list[int]) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            self._trap("the launch does not end")
        n = min(parts) if self.serial else self.rng.choice(parts)
        threads = warp.parts.pop(n)
        if not self.serial and not self.code.waits[n] and self.rng.random() < 0.1:
            some = np.array([self.rng.random() < 0.5 for _ in threads])
            if some.any():
                warp.go(n, threads[~some])
                threads = threads[some]
        dense = threads[-1] - threads[0] + 1 == len(threads)
        w = slice(threads[0], threads[-1] + 1) if dense else threads
        self.warp = warp
        following = self.code.function(n)(self, self.registers, w)
        if isinstance(following, tuple):
            taken = np.broadcast_to(following[0], threads.shape)
            warp.go(following[1], threads[taken])
            warp.go(following[2], threads[~taken])
        else:
            warp.go(following, threads)

    def _end_barriers(self, alive: list[Warp]) -> None:
        """End the barriers at which all threads have arrived."""
        waits = {b: set() for b in range(self.launch.cluster)}  # by block
        for warp in alive:
            waits[warp.block] |= {self.code.waits[n] for n in warp.parts}
        ended = [block for block, waiting in waits.items() if waiting == {"block"}]
        passing = [warp for warp in alive if warp.block in ended]
        for block in ended:
            threads = self.rank == block
            self.waited[threads] |= self.waited[threads].any()
            self.accesses.passed[block] += 1
        if not ended:
            passing = alive
            threads = np.concatenate([t for warp in alive for t in warp.parts.values()])
            if set().union(*waits.values()) != {"cluster"} or not self.arrived[threads].all():
                self._trap("deadlock: not all threads arrive at a barrier")
            self.arrived[:] = False
            self.accesses.passed["cluster"] += bool(self.released[threads].all())
        for warp in passing:
            parts, warp.parts = warp.parts, {}
            for n, threads in parts.items():
                warp.go(n + 1, threads)

    def _text(self) -> str:
        return self.code.kernel.instructions[self.at].text

    def _trap(self, what: str) -> None:
        raise Trap(f"{what}: {self._text()}")

    # Called by basic blocks, for the threads w: memory

    def full(self, w, value) -> np.ndarray:
        return np.full(len(self.ids[w]), value)

    def _index(self, w, space: str, address: np.ndarray, size: int) -> np.ndarray:
        if (address % size).any():
            self._trap("misaligned address")
        if space == "global":
            index = np.full(len(address), -1)
            for base, (start, data) in zip(self.bases, self.ranges, strict=True):
                inside = (address >= start) & (address + size <= start + len(data))
                index[inside] = (address[inside] - start).astype(np.int64) + base
            if (index < 0).any():
                self._trap("address outside of the operator's tensors")
            return index
        offset = (address & (1 << RANK_BITS) - 1).astype(np.int64)
        rank = (address >> RANK_BITS).astype(np.int64) - 1
        rank = np.where(rank < 0, self.rank[w], rank)
        if (offset + size > self.shared_bytes).any() or (rank >= self.launch.cluster).any():
            self._trap("address outside of shared memory")
        alive = {warp.block for warp in self.warps if warp.num_alive}
        if not alive.issuperset(rank):
            self._trap("shared memory of a thread block that has ended")
        return rank * self.stride + offset

    def _access(self, w, index: np.ndarray, size: int, writes: bool) -> None:
        self._record(index, size, self.ids[w], self.at, writes)
        if index[0] >= self.accesses.num_shared and not self.waited[w].all():
            self._report("access before griddepcontrol.wait")
        if len(self.copies):
            every = spread(index, size)
            if self.being_written[every].any() or (writes and self.being_read[every].any()):
                self._report("access to bytes of a copy that was not waited for")

    def _record(self, index, size, threads, at: int, writes: bool, again: bool = False) -> None:
        warp = self.warp
        self.accesses.add(index, size, threads, warp.block, warp.number, at, writes, again)

    def _report(self, what: str) -> None:
        self.accesses.races.add(f"{what}: {self._text()}")

    def load(self, w, space: str, address, size: int, count: int) -> list[np.ndarray]:
        if space == "param":
            index, memory = address.astype(np.int64), self.parameters
        else:
            index, memory = self._index(w, space, address, size * count), self.memory
            self._access(w, index, size * count, writes=False)
        return [memory[size][index // size + n] for n in range(count)]

    def store(self, w, space: str, address, size: int, values: list) -> None:
        index = self._index(w, space, address, size * len(values))
        self._access(w, index, size * len(values), writes=True)
        for n, value in enumerate(values):
            self.memory[size][index // size + n] = value

    # Warps, clusters and dependent launches

    def _check_mask(self, mask) -> None:
        if (mask != 0xFFFFFFFF).any():
            raise Unknown("a warp operation of some lanes")

    def shuffle(self, w, kind: str, value, lanes, clamp, mask) -> tuple[np.ndarray, np.ndarray]:
        self._check_mask(mask)
        if kind not in ("bfly", "idx") or (clamp != 31).any():
            raise Unknown(f"shfl.{kind} within parts of a warp")
        lane = self.special["laneid"][w]
        source = (lane ^ lanes if kind == "bfly" else lanes) & 31
        values, there = np.zeros(32, value.dtype), np.zeros(32, bool)
        values[lane], there[lane] = value, True
        return np.where(there[source], values[source], value), there[source]

    def ballot(self, w, predicate, mask) -> np.ndarray:
        self._check_mask(mask)
        lanes = np.uint32(1) << self.special["laneid"][w]
        return self.full(w, np.bitwise_or.reduce(lanes * predicate))

    def warp_barrier(self, w, mask) -> None:
        self._check_mask(mask)
        self.accesses.passed[self.warp.block, self.warp.number] += 1

    def map_rank(self, address, rank) -> np.ndarray:
        return address + (rank + np.uint32(1) << np.uint32(RANK_BITS))

    def cluster_arrive(self, w, release: bool = True) -> None:
        if self.arrived[w].any():
            self._trap("a second arrival without wait")
        self.arrived[w], self.released[w] = True, release

    def dependency_wait(self, w) -> None:
        self.waited[w] = True

    # Asynchronous copies

    def async_copy(self, w, target, source, size) -> None:
        made = np.zeros(len(self.ids[w]), COPY)
        made["thread"], made["group"], made["at"] = self.ids[w], self.groups[w], self.at
        made["target"] = self._index(w, "shared", target, int(size))
        made["source"] = self._index(w, "global", source, int(size))
        made["size"] = size
        self._access(w, made["source"], int(size), writes=False)
        self._access(w, made["target"], int(size), writes=True)
        self.being_read[spread(made["source"], int(size))] += 1
        self.being_written[spread(made["target"], int(size))] += 1
        self.copies = np.concatenate([self.copies, made])
        if not self.serial and self.rng.random() < 0.5:
            self._move(np.arange(len(self.copies)) >= len(self.copies) - len(made))

    def _move(self, chosen: np.ndarray) -> None:
        moving = self.copies[chosen & ~self.copies["moved"]]
        self.copies["moved"][chosen] = True
        for size in np.unique(moving["size"]):
            copies = moving[moving["size"] == size]
            moved = self.bytes[spread(copies["source"], size)]
            self.bytes[spread(copies["target"], size)] = moved

    def commit(self, w) -> None:
        self.groups[w] += 1

    def wait_for_groups(self, w, left) -> None:
        """Make copies visible to the threads that wait for them."""
        done = np.isin(self.copies["thread"], self.ids[w])
        done &= self.copies["group"] < self.groups[self.copies["thread"]] - int(left)
        self._move(done)
        for at in np.unique(self.copies["at"][done]):
            copies = self.copies[done & (self.copies["at"] == at)]
            size = int(copies["size"][0])
            for end, pending in (("source", self.being_read), ("target", self.being_written)):
                pending[spread(copies[end], size)] -= 1
                self._record(copies[end], size, copies["thread"], at, end == "target", again=True)
        self.copies = self.copies[~done]


def views(data: np.ndarray) -> dict[int, np.ndarray]:
    return {size: data[: len(data) // size * size].view(f"u{size}") for size in (1, 2, 4, 8)}


def spread(index: np.ndarray, size: int) -> np.ndarray:
    return index[:, None] + np.arange(size)
