# SPDX-License-Identifier: Apache-2.0
"""Memory that a transport may access, and copies between this memory and staging memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import MAX_INT32, MAX_INT64, integer, listed
from kvcache.transfer import Spans
from kvcache.worker import Pages
from kvcache.worker.swap.job import until
from kvcache.worker.swap.streams import CudaStreams

_ONE_PAIR = np.zeros((1, 2), np.int32)


class Region(NamedTuple):
    """A region of registered memory, [begin, end), and a tensor whose storage contains it."""

    begin: int
    end: int
    memory: torch.Tensor

    @property
    def kind(self) -> str:
        """The kind of memory: "cpu", "cuda:<number>", or "other", which no other process can access."""
        device = self.memory.device
        if device.type == "cuda":
            return f"cuda:{device.index or 0}"
        return "cpu" if device.type == "cpu" else "other"


class _Known(NamedTuple):
    """A table of regions, sorted and stored as columns. It is immutable, so other threads can read
    the old table while it is being replaced.

    kinds: str[r]. places: int64[r, 2], the device index and storage index. owners: one tensor per
        storage.
    """

    regions: list[Region]
    begins: np.ndarray
    ends: np.ndarray
    kinds: np.ndarray
    places: np.ndarray
    owners: list[torch.Tensor]

    @classmethod
    def of(cls, regions: list[Region]) -> _Known:
        regions = sorted(regions, key=lambda each: (each.begin, each.end))
        kinds = np.array([each.kind for each in regions], str)
        storages = [(each.kind, _storage(each.memory)) for each in regions]
        owners = dict(zip(storages, (each.memory for each in regions)))
        numbers = {storage: i for i, storage in enumerate(owners)}
        _, devices = np.unique(kinds, return_inverse=True)
        places = np.stack([devices, np.array([numbers[each] for each in storages], np.int64)], 1)
        return cls(regions, *_bounds(regions), kinds, places, [*owners.values()])


class RegisteredMemory:
    """The memory that both sides' reads may access."""

    def __init__(self) -> None:
        self._known = _Known.of([])

    @property
    def regions(self) -> list[Region]:
        """Return all regions, sorted."""
        return self._known.regions

    def known(self, memory: Pages | Sequence[tuple[int, int]]) -> list[Region]:
        """Return the registered regions that `add` created for this memory."""
        found = _of_pages(memory) if isinstance(memory, Pages) else _of_host(memory)
        bounds = {(each.begin, each.end) for each in found}
        return [each for each in self.regions if (each.begin, each.end) in bounds]

    def add(self, memory: Pages | Sequence[tuple[int, int]]) -> list[Region]:
        """Add pages, or (address, bytes) of host memory.

        Returns:
            The new regions. Adjacent regions in the same allocation are merged.

        Raises:
            TypeError: A value has the wrong type. Nothing was added.
            ValueError: A size is below 1, or the memory is already registered under another device.
                Nothing was added.
        """
        found = _of_pages(memory) if isinstance(memory, Pages) else _of_host(memory)
        for each in found:
            self._check_kind(each)
        known = {(each.begin, each.end) for each in self.regions}
        new = [each for each in found if (each.begin, each.end) not in known]
        self._known = _Known.of(self.regions + new)
        return new

    def remove(self, regions: list[Region]) -> None:
        """Remove the regions that `add` returned."""
        gone = {(each.begin, each.end) for each in regions}
        self._known = _Known.of(
            [each for each in self.regions if (each.begin, each.end) not in gone]
        )

    def _check_kind(self, new: Region) -> None:
        for each in self.regions:
            if each.begin < new.end and new.begin < each.end and each.kind != new.kind:
                raise ValueError(
                    f"memory has bytes [{new.begin:#x}, {new.end:#x}) on {new.kind}, some "
                    f"of which are already registered on {each.kind}: expected {each.kind}"
                )

    @property
    def begins(self) -> np.ndarray:
        """Start addresses of all regions in ascending order, int64[r]."""
        return self._known.begins

    def kind_of(self, spans: Spans) -> str | None:
        """Return the kind of the regions that contain the given fragments, or None if there are
        several kinds.
        """
        return kind_within(spans, self._known.begins, self._known.kinds)

    @property
    def num_bytes(self) -> int:
        """Return the total size of all regions in bytes."""
        return int((self._known.ends - self._known.begins).sum())

    @property
    def cuda_device(self) -> torch.device | None:
        """Return the first CUDA device that has registered memory."""
        kinds = self._known.kinds.tolist()
        kind = next((each for each in kinds if each.startswith("cuda")), None)
        return None if kind is None else torch.device(kind)

    def enter_device(self) -> None:
        """Make the registered CUDA device current in the calling thread, which must be one of the
        transport's threads.
        """
        if (device := self.cuda_device) is not None:
            CudaStreams(device).enter()

    def check(self, spans: Spans, name: str) -> None:
        """Raise ValueError unless each fragment lies in a single registered region."""
        check_within(spans, self._known.begins, self._known.ends, name)

    def gather(self, tile: Spans, staging: torch.Tensor, streams: CopyStreams) -> None:
        """Concatenate a tile's fragments at the start of staging memory."""
        self._copy(tile, staging, streams, to_staging=True)

    def scatter(self, staging: torch.Tensor, tile: Spans, streams: CopyStreams) -> None:
        """Copy staging memory to a tile's fragments. This is the inverse of `gather`."""
        self._copy(tile, staging, streams, to_staging=False)

    def _copy(
        self, tile: Spans, staging: torch.Tensor, streams: CopyStreams, *, to_staging: bool
    ) -> None:
        """Copy all fragments on a device with one call of the op."""
        known, sizes = self._known, np.tile(tile.length, len(tile.bases))
        addresses, staged = tile.addresses(), np.cumsum(sizes) - sizes
        numbers = np.searchsorted(known.begins, addresses, "right") - 1
        devices, storages = known.places[numbers].T
        for device in np.unique(devices):
            own = devices == device
            memory = known.regions[int(numbers[np.argmax(own)])].memory
            owners = [each for each in known.owners if each.device == memory.device]
            table = None
            if memory.device.type == "cuda" and (storages == storages[0]).all():
                table = _factored(tile, memory)
            if table is None:
                columns = (addresses[own] - memory.data_ptr(), sizes[own], staged[own], sizes[own])
                table = np.stack([*columns, sizes[own]], axis=1), _ONE_PAIR
            rows, pairs = table
            if not to_staging:
                rows, pairs = rows[:, [2, 3, 0, 1, 4]], pairs[:, ::-1]
            counts = (pairs.max(axis=0) + 1).tolist()
            rows, pairs = (torch.from_numpy(np.ascontiguousarray(each)) for each in (rows, pairs))
            ends = (memory, staging) if to_staging else (staging, memory)
            streams.run(
                memory.device,
                lambda engine, e=ends, r=rows, p=pairs, c=counts, o=owners: ops.copy_blocks(
                    *e, r, p, *c, engine, 0, 0, o
                ),
            )


def _factored(tile: Spans, memory: torch.Tensor) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the table and pairs for `ops.copy_blocks` that copy fragments in one storage.

    With one row per run and one pair per base, far fewer launches are needed than with one row per
    fragment. Returns None if the fragments do not have this form.
    """
    bases, runs, length = tile.bases, tile.offsets, tile.length
    # With one base and runs of equal length, treat the runs as bases of a single run.
    if len(bases) == 1 and (length == length[0]).all():
        bases, runs, length = bases[0] + runs, np.zeros(1, np.int64), length[:1]
    first = int(bases.min())
    step = int(np.gcd.reduce(bases - first))
    ids = (bases - first) // max(step, 1)
    if ids.max() >= MAX_INT32 or len(np.unique(ids)) < len(ids):
        return None
    rows = np.empty((len(runs), 5), np.int64)
    rows[:, 0], rows[:, 1] = first - memory.data_ptr() + runs, step
    rows[:, 2], rows[:, 3] = np.cumsum(length) - length, length.sum()
    rows[:, 4] = length
    return rows, np.stack([ids, np.arange(len(ids))], axis=1).astype(np.int32)


class CopyStreams:
    """The streams that one thread uses for copies, one per CUDA device, separate from the engine's
    streams.

    The thread waits for copies by polling their events, which does not invalidate graph captures.
    If `staging_is_pinned` is False, kernels cannot access staging memory, so the slower copy engine
    is used.
    """

    def __init__(self) -> None:
        self.staging_is_pinned = False
        self._by_device: dict[torch.device, tuple[CudaStreams, torch.cuda.Stream]] = {}

    def run(self, device: torch.device, copy: Callable[[int], None]) -> None:
        """Call `copy(engine)` and wait until the copy has finished.

        Raises RuntimeError if the device has failed.
        """
        if device.type != "cuda":
            copy(ops.COPY_ENGINE)
            return
        if device not in self._by_device:
            ops.warm_up(device)
            streams = CudaStreams(device)
            self._by_device[device] = streams, streams.new_stream()
        streams, stream = self._by_device[device]
        engine = ops.KERNEL if self.staging_is_pinned else ops.COPY_ENGINE
        streams.launch(stream, lambda: copy(engine))
        until(streams.record(stream).query, None, "a copy")

    def close(self) -> None:
        """Destroy the streams after their work has finished."""
        while self._by_device:
            _, (streams, stream) = self._by_device.popitem()
            streams.close([stream])


def kind_within(spans: Spans, begins: np.ndarray, kinds: np.ndarray) -> str | None:
    """Return the kind of the regions that contain the given fragments, or None if there are several
    kinds.
    """
    first = spans.bases + (spans.offsets if len(spans.bases) == 1 else int(spans.offsets.min()))
    found = set(kinds[np.searchsorted(begins, first, "right") - 1].tolist())
    return found.pop() if len(found) == 1 else None


def check_within(spans: Spans, begins: np.ndarray, ends: np.ndarray, name: str) -> None:
    """Raise ValueError unless each fragment lies within one of the sorted regions [begins, ends)."""
    if spans.num_fragments == 0:
        return
    if len(spans.bases) == 1:
        first = spans.bases[0] + spans.offsets
        last = first + spans.length
    else:  # a base and all of its runs must be in one region
        first = spans.bases + int(spans.offsets.min())
        last = spans.bases + int((spans.offsets + spans.length).max())
    grows = last > first  # false if a sum overflows int64
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
    """Raise ValueError if fragments overlap."""
    if spans.num_fragments == 0:
        return
    if len(spans.bases) == 1:
        _check_apart(spans.bases[0] + spans.offsets, spans.length, name)
        return
    bases, offsets, longest = np.sort(spans.bases), spans.offsets, int(spans.length.max())
    first = int(offsets.min())
    extent = int((offsets + spans.length).max()) - first
    if int(np.diff(bases).min()) >= extent:  # all runs of each base precede those of the next base
        _check_apart(offsets, spans.length, name)
        return
    by_run = np.diff(np.sort(offsets))
    reach = int(bases[-1] - bases[0]) + longest
    is_by_run = not len(by_run) or int(by_run.min()) >= reach
    # The other disjoint case: all fragments of each run precede those of the next run.
    if is_by_run and int(np.diff(bases).min()) >= longest:
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
    owners = [pages.owner(i) for i in range(len(begins))]
    storages = [_storage(owner) for owner in owners]
    by_storage = dict(zip(storages, owners))
    rows = zip(begins.tolist(), ends.tolist(), storages)
    merged = _merged([row for row in rows if row[1] > row[0]])
    return [Region(begin, end, by_storage[storage]) for begin, end, storage in merged]


def _of_host(memory: Sequence[tuple[int, int]]) -> list[Region]:
    found = []
    for i, row in enumerate(listed(memory, "memory", "Pages, or (address, bytes) of each region")):
        row = listed(row, f"memory[{i}]", "(address, bytes)")
        if len(row) != 2:
            raise ValueError(f"memory[{i}] has {len(row)} entries: expected (address, bytes)")
        address = integer(row[0], f"memory[{i}][0]", 1, MAX_INT64)
        size = integer(row[1], f"memory[{i}][1]", 1, MAX_INT64 - address)
        found.append((address, address + size, 0))  # all host ranges count as one storage
    return [Region(begin, end, _host_view(begin, end)) for begin, end, _ in _merged(found)]


def _host_view(begin: int, end: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (end - begin)).from_address(begin), dtype=torch.uint8)


def _merged(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge adjacent and overlapping ranges in the same storage. `ranges`: (begin, end, storage).

    Ranges in different storages stay separate, because RDMA registers one allocation at a time.
    """
    merged: list[tuple[int, int, int]] = []
    for begin, end, storage in sorted(ranges):
        if merged and begin <= merged[-1][1] and storage == merged[-1][2]:
            last_begin, last_end, _ = merged.pop()
            begin, end = last_begin, max(last_end, end)
        merged.append((begin, end, storage))
    return merged


def _storage(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


def _bounds(regions: list[Region]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted start addresses of the regions and, for each, the maximum end address among
    the regions that start at or before it.
    """
    begins = np.array([each.begin for each in regions], np.int64)
    ends = np.array([each.end for each in regions], np.int64)
    return begins, np.maximum.accumulate(ends) if len(ends) else ends
