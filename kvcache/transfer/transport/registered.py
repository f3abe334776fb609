"""Memory that a transport may touch, and the copies between it and staging memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import MAX_INT64, integer, listed
from kvcache.transfer.transport.spans import Spans
from kvcache.worker.pages.pages import Pages

_ONE_PAIR = torch.zeros((1, 2), dtype=torch.int32, device="cpu")


class Region(NamedTuple):
    """Registered memory, [begin, end), and the tensor that says on which device it lies."""

    begin: int
    end: int
    memory: torch.Tensor


class RegisteredMemory:
    """The memory that reads and writes of both sides may touch."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._owners: list[torch.Tensor] = []  # in whose memory the regions lie
        self._begins = np.empty(0, np.int64)
        self._ends = np.empty(0, np.int64)

    def add(self, memory: Pages | Sequence[tuple[int, int]]) -> list[Region]:
        """Adds pages, or (address, bytes) of host memory; returns what is new, merged where it meets.

        TypeError or ValueError, and nothing is added, for other values and for bytes below 1.
        """
        parts = _of_pages(memory) if isinstance(memory, Pages) else _of_host(memory)
        found = _merged(parts)
        known = {(each.begin, each.end) for each in self.regions}
        new = [each for each in found if (each.begin, each.end) not in known]
        if new:
            owners = {id(each.memory): each.memory for each in parts}
            self._owners += owners.values()
            self._owners += memory.others if isinstance(memory, Pages) else ()
        self.regions = sorted(self.regions + new, key=lambda each: (each.begin, each.end))
        self._begins, self._ends = _bounds(self.regions)
        return new

    @property
    def begins(self) -> np.ndarray:
        """int64[r], sorted: where the regions begin."""
        return self._begins

    @property
    def num_bytes(self) -> int:
        """The bytes of all regions."""
        return int((self._ends - self._begins).sum())

    def check(self, spans: Spans, name: str) -> None:
        """ValueError for fragments that do not lie in one registered region each."""
        check_within(spans, self._begins, self._ends, name)

    def memory_at(self, address: int) -> torch.Tensor:
        """The tensor of the region that holds an address."""
        return self.regions[int(np.searchsorted(self._begins, address, "right")) - 1].memory

    def gather(self, tile: Spans, staging: torch.Tensor) -> None:
        """Copies the fragments of a tile to the beginning of staging memory, one behind the other."""
        self._copy(tile, staging, to_staging=True)

    def scatter(self, staging: torch.Tensor, tile: Spans) -> None:
        """The inverse of `gather`."""
        self._copy(tile, staging, to_staging=False)

    def _copy(self, tile: Spans, staging: torch.Tensor, *, to_staging: bool) -> None:
        """One call of the op for all fragments: each is a region of one page."""
        addresses = tile.addresses()
        sizes = np.tile(tile.length, len(tile.bases))
        memory = self.memory_at(int(addresses[0]))
        there = (addresses - memory.data_ptr(), sizes)
        staged = (np.cumsum(sizes) - sizes, sizes)
        source, destination = (there, staged) if to_staging else (staged, there)
        table = torch.from_numpy(np.stack([*source, *destination, sizes], axis=1))
        owners = [each for each in self._owners if each.device == memory.device]
        ends = (memory, staging) if to_staging else (staging, memory)
        ops.copy_blocks(*ends, table, _ONE_PAIR, 1, 1, ops.COPY_ENGINE, 0, 0, owners)
        if memory.device.type == "cuda":
            torch.cuda.current_stream(memory.device).synchronize()


def check_within(spans: Spans, begins: np.ndarray, ends: np.ndarray, name: str) -> None:
    """ValueError for fragments that do not lie in one of the regions [begins, ends), sorted."""
    if spans.num_fragments == 0:
        return
    if len(spans.bases) == 1:
        first = spans.bases[0] + spans.offsets
        last = first + spans.length
    else:  # a base and all its runs lie in one region
        first = spans.bases + int(spans.offsets.min())
        last = spans.bases + int((spans.offsets + spans.length).max())
    grows = last > first  # not so where a sum was too large for an int64
    if len(begins) == 1 and grows.all() and begins[0] <= first.min() and last.max() <= ends[0]:
        return
    at = np.searchsorted(begins, first, "right") - 1
    inside = np.zeros(len(at), bool)
    if len(begins):
        inside = (at >= 0) & (last <= ends[at]) & grows
    if not inside.all():
        i = int(np.argmin(inside))
        raise ValueError(
            f"{name} has bytes [{first[i]:#x}, {last[i]:#x}): expected bytes of one registered region"
        )


def check_apart(spans: Spans, name: str) -> None:
    """ValueError for fragments that overlap."""
    if spans.num_fragments == 0:
        return
    if len(spans.bases) == 1:
        _check_apart(spans.bases[0] + spans.offsets, spans.length, name)
        return
    bases, offsets, longest = np.sort(spans.bases), spans.offsets, int(spans.length.max())
    first = int(offsets.min())
    extent = int((offsets + spans.length).max()) - first
    if int(np.diff(bases).min()) >= extent:  # each base's runs lie before those of the next one
        _check_apart(offsets, spans.length, name)
        return
    by_run = np.diff(np.sort(offsets))
    reach = int(bases[-1] - bases[0]) + longest
    is_by_run = not len(by_run) or int(by_run.min()) >= reach
    if (
        is_by_run and int(np.diff(bases).min()) >= longest
    ):  # or each run's bases, before the next run
        return
    _check_apart(spans.addresses(), np.tile(spans.length, len(spans.bases)), name)


def _check_apart(addresses: np.ndarray, length: np.ndarray, name: str) -> None:
    if len(addresses) == 1 or np.diff(np.sort(addresses)).min() >= length.max():
        return
    order = np.argsort(addresses, kind="stable")
    begin, end = addresses[order], (addresses + length)[order]
    meets = np.flatnonzero(begin[1:] < end[:-1])
    if len(meets):
        raise ValueError(f"{name} has byte {begin[meets[0] + 1]:#x} twice: expected each once")


def _of_pages(pages: Pages) -> list[Region]:
    begins = pages.base + pages.offsets
    ends = begins + (pages.num_blocks - 1) * pages.strides + pages.sizes
    return [Region(int(b), int(e), pages.memory) for b, e in zip(begins, ends) if e > b]


def _of_host(memory: Sequence[tuple[int, int]]) -> list[Region]:
    found = []
    for i, row in enumerate(listed(memory, "memory", "Pages, or (address, bytes) of each region")):
        row = listed(row, f"memory[{i}]", "(address, bytes)")
        if len(row) != 2:
            raise ValueError(f"memory[{i}] has {len(row)} entries: expected (address, bytes)")
        address = integer(row[0], f"memory[{i}][0]", 1, MAX_INT64)
        size = integer(row[1], f"memory[{i}][1]", 1, MAX_INT64 - address)
        view = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        found.append(Region(address, address + size, view))
    return found


def _merged(regions: list[Region]) -> list[Region]:
    merged: list[Region] = []
    for each in sorted(regions, key=lambda each: (each.begin, each.end)):
        if merged and each.begin <= merged[-1].end:
            last = merged.pop()
            each = Region(last.begin, max(last.end, each.end), last.memory)
        merged.append(each)
    return merged


def _bounds(regions: list[Region]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted begins; and to each the furthest end of a region that begins there or before."""
    begins = np.array([each.begin for each in regions], np.int64)
    ends = np.array([each.end for each in regions], np.int64)
    return begins, np.maximum.accumulate(ends) if len(ends) else ends
