# SPDX-License-Identifier: Apache-2.0
"""Records a launch's memory accesses, finds data races, and counts memory transactions."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.machinery.ptx.program import Kernel

SECTOR, BANK, BANKS = 32, 4, 32
# Columns of a record of one thread's access. Accesses are ordered if they are of one cluster, thread
# block or warp, and the number of barriers that it had passed differs.
COLUMNS = ("cluster", "cluster_epoch", "block", "block_epoch", "warp", "warp_epoch", "thread")
RECORD = np.dtype(
    [(n, np.int64) for n in ("index", *COLUMNS, "size", "writes", "at", "again", "access")]
)


class Accesses:
    """All accesses of a launch. Shared memory has the first `num_shared` indices."""

    def __init__(self, kernel: Kernel, num_shared: int, num_bytes: int):
        self.kernel, self.num_shared, self.num_bytes = kernel, num_shared, num_bytes
        self.races: set[str] = set()
        # Transactions of "loads", "stores" and "shared" memory that the warps ask for, with key 0, and
        # the fewest that could suffice, with key 1. Bytes of global memory that threads access.
        self.transactions: Counter = Counter()
        self.cluster = -1
        self.recorded: dict[bool, list[np.ndarray]] = {True: [], False: []}  # by whether shared

    def begin_cluster(self) -> None:
        self.cluster += 1
        self.passed: Counter = Counter()  # barriers

    def add(self, index, size, threads, block, warp, at: int, writes: bool, again: bool) -> None:
        """Record an access of some threads of a warp, by the instruction `at`.

        `again`: the end of an access that began earlier.
        """
        if len(index) == 0:
            return
        records = np.zeros(len(threads), RECORD)
        records["index"], records["thread"] = index, threads
        passed = self.passed
        epochs = (passed["cluster"], block, passed[block], warp, passed[block, warp])
        for name, value in zip(RECORD.names[1:], (self.cluster, *epochs), strict=False):
            records[name] = value
        records["size"], records["writes"], records["at"], records["again"] = (
            size,
            writes,
            at,
            again,
        )
        self.recorded[bool(index[0] < self.num_shared)].append(records)

    def end(self, shared: bool) -> None:
        """Analyze the accesses to the shared memory of a cluster, or to global memory."""
        lists, self.recorded[shared] = self.recorded[shared], []
        if not lists:
            return
        records = np.concatenate(lists)
        records["access"] = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
        self._find_races(records)
        records = records[records["again"] == 0]
        if shared:
            self._count("shared", *wavefronts(records))
        else:
            self.transactions["bytes", 0] += int(records["size"].sum())
            self._count("loads", *sectors(records[records["writes"] == 0]))
            self._count("stores", *sectors(records[records["writes"] == 1]))

    def _count(self, name: str, asked: int, fewest: int) -> None:
        self.transactions.update({(name, 0): asked, (name, 1): fewest})

    def _find_races(self, records: np.ndarray) -> None:
        unit = int(records["size"].min())
        records, index = pieces(records, unit)
        # Sort only what several threads touch and one of them writes.
        thread = records["cluster"] << 20 | records["thread"]
        owner, mixed, written = np.zeros((3, self.num_bytes // unit), np.int64)
        owner[index] = thread
        mixed[index[owner[index] != thread]] = 1
        written[index[records["writes"] == 1]] = 1
        chosen = (mixed & written)[index] == 1
        records, index = records[chosen], index[chosen]
        if len(records) == 0:
            return
        sorting = np.lexsort([*(records[name] for name in COLUMNS[::-1]), index])
        records, index = records[sorting], index[sorting]
        begins = np.diff(index, prepend=-1) != 0  # of groups whose accesses no barrier orders
        for actor in ("cluster", "block", "warp", "thread"):
            starts = np.flatnonzero(begins)
            least = np.minimum.reduceat(records[actor], starts)
            several = np.maximum.reduceat(records[actor], starts) != least
            written = np.maximum.reduceat(records["writes"], starts) == 1
            bad = np.flatnonzero(several & written)[:9]
            for start, end in zip(starts[bad], np.append(starts, len(index))[bad + 1], strict=True):
                numbers = np.unique(records["at"][start:end])
                texts = (self.kernel.instructions[n].text for n in numbers)
                self.races.add(f"data race: {' and '.join(texts)}")
            for name in (actor, f"{actor}_epoch") if actor != "thread" else ():
                begins |= np.diff(records[name], prepend=-1) != 0


def pieces(records: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Split accesses into pieces of at most `unit` bytes. Return the records and numbers of pieces."""
    count = np.maximum(records["size"] // unit, 1)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    each = np.repeat(np.arange(len(records)), count)
    return records[each], records["index"][each] // unit + within


def distinct(group: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    keys = np.unique(group << 40 | value)
    return keys >> 40, keys & (1 << 40) - 1


def fewest(group: np.ndarray, records: np.ndarray, unit: int) -> int:
    """Return the fewest units that could contain the distinct bytes of each group of records."""
    groups, first = np.unique(group, return_index=True)
    of, _ = distinct(group, records["index"])
    num_bytes = np.bincount(of)[groups] * records["size"][first]
    return int((-(-num_bytes // unit)).sum())


def sectors(records: np.ndarray) -> tuple[int, int]:
    """Return the sectors of global memory that the accesses ask for, and the fewest possible."""
    if len(records) == 0:
        return 0, 0
    asked = distinct(records["access"], records["index"] // SECTOR)[0]
    return len(asked), fewest(records["access"], records, SECTOR)


def wavefronts(records: np.ndarray) -> tuple[int, int]:
    """Return the passes over the banks of shared memory, and the fewest possible."""
    if len(records) == 0:
        return 0, 0
    # Wide accesses are served in parts of the warp that take 128 bytes.
    records["access"] *= 4
    records["access"] += records["thread"] % 32 * np.maximum(records["size"] // BANK, 1) // 32
    split, word = pieces(records, BANK)
    part, word = distinct(split["access"], word)
    banks, conflicts = np.unique(part * BANKS + word % BANKS, return_counts=True)
    _, starts = np.unique(banks // BANKS, return_index=True)
    asked = int(np.maximum.reduceat(conflicts, starts).sum())
    return asked, fewest(records["access"], records, BANK * BANKS)
