# SPDX-License-Identifier: Apache-2.0
"""The worker side of the host tier: copies blocks between the engine's tensors and host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvcache.worker import Pages, SwapEngine, SwapJob
from kvcache_vllm.offloading.host_manager import HostChunks

_log = logging.getLogger("vllm.kvcache")  # a child of vllm's logger, so that messages are shown
_SECONDS_BETWEEN_LOGS = 5.0
_NO_PAIRS = np.empty((0, 2), np.int64)


@dataclass
class _Transfer:
    """One of vLLM's transfer jobs. `pages`: the host pages that the job writes or reads."""

    is_load: bool
    pages: np.ndarray
    began: float
    job: SwapJob | None = None
    error: Exception | None = None
    ended: float | None = None


class HostWorker(OffloadingWorker):
    """Copies blocks with a `SwapEngine`. A chunk consists of `blocks_per_chunk` pages of host
    memory.

    A failed transfer raises no error. vLLM assumes that every job succeeds, so a failed job is
    reported as successful with 0 bytes. A load fails, and copies nothing, if one of its host pages
    was not filled by a store. `take_failed_loads` returns the failed loads.

    Args:
        kv_caches: vLLM's tensors on a CUDA device or the CPU. Unused bytes of a page are not
            copied.
        num_chunks: Number of host memory chunks. If the tensors are on a CUDA device, the memory is
            pinned piece by piece.
        blocks_per_chunk: Blocks per chunk.

    Raises:
        MemoryError: The host has too little memory.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_chunks: int, blocks_per_chunk: int
    ) -> None:
        device = Pages.over(_without_padding(kv_caches))
        num_pages = (num_chunks + 1) * blocks_per_chunk  # chunk 0 is the null chunk
        progress = _Progress(num_pages * device.page_bytes)
        self.host = device.on_host(num_pages, progress=progress)
        self.swap = SwapEngine(device, self.host)
        self._per_chunk = blocks_per_chunk
        self._is_filled = np.zeros(num_pages, bool)
        self._filler = np.full(num_pages, -1, np.int64)  # the last store job of each page
        self._transfers: dict[int, _Transfer] = {}
        self._failed_loads: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: HostChunks) -> bool:
        """Start copying blocks to chunks."""
        all_pages = self._pages_of(dst_spec.chunks).ravel()
        self._is_filled[all_pages], self._filler[all_pages] = False, job_id
        pairs = self._pairs(src_spec, dst_spec, must_fill=True)
        transfer = _Transfer(False, pairs[:, 1], time.perf_counter())
        self._start(job_id, transfer, self.swap.swap_out, pairs)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: HostChunks,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start copying chunks to blocks.

        With `expedited` (vLLM 0.33), the load does not queue behind regular loads, because vLLM
        waits for it within the step.
        """
        pairs = self._pairs(dst_spec, src_spec, must_fill=False)
        transfer = _Transfer(True, pairs[:, 1], time.perf_counter())
        if len(pairs) < len(dst_spec.block_ids) or not self._is_filled[pairs[:, 1]].all():
            transfer.error = RuntimeError("a store has not filled all host pages of this load")
            pairs = _NO_PAIRS
        move = partial(self.swap.swap_in, expedited=expedited)
        self._start(job_id, transfer, move, pairs[:, ::-1])
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return each completed job once."""
        done = []
        for job_id, transfer in list(self._transfers.items()):
            if not self._is_over(transfer):
                continue
            del self._transfers[job_id]
            done.append(self._result(job_id, transfer))
        return done

    def take_failed_loads(self) -> set[int]:
        """Return the failed loads among the jobs that `get_finished` returned since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have completed."""
        for job_id in job_ids:
            transfer = self._transfers.get(job_id)
            while transfer is not None and not self._is_over(transfer):
                time.sleep(50e-6)

    def shutdown(self) -> None:
        """Wait until no job is in flight."""
        self.wait(set(self._transfers))

    def _pages_of(self, chunks: np.ndarray) -> np.ndarray:
        """Return the host pages of chunks, int64[n, blocks_per_chunk]."""
        return chunks.astype(np.int64)[:, None] * self._per_chunk + np.arange(self._per_chunk)

    def _pairs(self, gpu: GPULoadStoreSpec, host: HostChunks, *, must_fill: bool) -> np.ndarray:
        """Return (device block, host page) pairs as int64[n, 2]. A group may begin inside its first
        chunk.

        With `must_fill`, a group must end at the end of its last chunk. Otherwise, one of its
        blocks has left the window, and the group is skipped because vLLM does not report which
        block it was.
        """
        pages, blocks, first, block = [], [], 0, 0
        counts = iter(host.counts)
        for size, index in zip(gpu.group_sizes, gpu.block_indices):
            if size == 0:
                continue
            num_chunks, skip = next(counts, 0), index % self._per_chunk
            own = self._pages_of(host.chunks[first : first + num_chunks]).ravel()[skip:]
            if len(own) == size or (len(own) > size and not must_fill):
                pages.append(own[:size])
                blocks.append(gpu.block_ids[block : block + size])
            first, block = first + num_chunks, block + size
        if not pages:
            return _NO_PAIRS
        return np.stack([np.concatenate(blocks), np.concatenate(pages)], axis=1).astype(np.int64)

    def _start(
        self,
        job_id: int,
        transfer: _Transfer,
        move: Callable[[np.ndarray], SwapJob],
        pairs: np.ndarray,
    ) -> None:
        try:
            transfer.job = move(pairs)
        except (RuntimeError, ValueError, MemoryError) as error:
            transfer.error = error
        self._transfers[job_id] = transfer
        self._is_over(transfer)  # on the CPU, the job completes here, so its duration is measured

    def _is_over(self, transfer: _Transfer) -> bool:
        if transfer.ended is None and (transfer.job is None or transfer.job.poll()):
            transfer.ended = time.perf_counter()
        return transfer.ended is not None

    def _result(self, job_id: int, transfer: _Transfer) -> TransferResult:
        error = transfer.error or (transfer.job and transfer.job.error)
        if error is None:
            if not transfer.is_load:
                own = self._filler[transfer.pages] == job_id
                self._is_filled[transfer.pages[own]] = True
            num_bytes = len(transfer.pages) * self.host.page_bytes
            return TransferResult(job_id, True, num_bytes, transfer.ended - transfer.began)
        if transfer.is_load:
            self._failed_loads.add(job_id)
            _log.warning("a load from host memory failed, its tokens are recomputed: %s", error)
        else:
            _log.warning("a store to host memory failed, its blocks cannot be hit: %s", error)
        return TransferResult(job_id, True)  # vLLM asserts success


def _without_padding(kv_caches: CanonicalKVCaches) -> list[torch.Tensor]:
    """Return the tensors [blocks, bytes] without the unused bytes of a page."""
    used: dict[int, int] = {}
    for ref in (ref for group in kv_caches.group_data_refs for ref in group):
        used[ref.tensor_idx] = max(used.get(ref.tensor_idx, 0), ref.page_size_bytes)
    return [
        each.tensor[:, : used.get(number, each.page_size_bytes)]
        for number, each in enumerate(kv_caches.tensors)
    ]


class _Progress:
    """Log the progress of pinning: at the start, every few seconds, and at the end."""

    def __init__(self, num_bytes: int) -> None:
        _log.info("the host tier: %.2f GiB of host memory", num_bytes / 2**30)
        self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS

    def __call__(self, done: int, total: int) -> None:
        if done == total or time.monotonic() >= self._next:
            _log.info("the host tier: pinned %.2f of %.2f GiB", done / 2**30, total / 2**30)
            self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS
