"""Blocks of the engine's tensors to host memory and back: a worker's side of the host tier."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvcache.integrations.vllm.offloading.host_manager import HostChunks
from kvcache.worker.pages.pages import Pages
from kvcache.worker.swap.engine import SwapEngine
from kvcache.worker.swap.job import SwapJob

_log = init_logger("vllm.kvcache")  # below vllm's, whose messages are shown
_SECONDS_BETWEEN_LOGS = 5.0
_NO_PAIRS = np.empty((0, 2), np.int64)


@dataclass
class _Transfer:
    """One job of vLLM. `pages`: host pages that it fills, or reads."""

    is_load: bool
    pages: np.ndarray
    began: float
    job: SwapJob | None = None
    error: Exception | None = None
    ended: float | None = None


class HostWorker(OffloadingWorker):
    """Moves blocks by a `SwapEngine`. A chunk is `blocks_per_chunk` pages of host memory.

    `kv_caches`: vLLM's tensors, on a CUDA device or the CPU; what no layer uses of a page does not move.
    Host memory for `num_chunks` chunks is pinned, in pieces, where the tensors are on a CUDA
    device. MemoryError where the host has too little.

    No call raises for a transfer that fails. vLLM takes every job for a success, so a failed one is
    reported as one without bytes. Host pages that a store did not fill are remembered: a load that reads
    one of them fails, and moves nothing. `take_failed_loads` names the loads.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_chunks: int, blocks_per_chunk: int
    ) -> None:
        device = Pages.over(_without_padding(kv_caches))
        num_pages = (num_chunks + 1) * blocks_per_chunk  # chunk 0 is none
        progress = _Progress(num_pages * device.page_bytes)
        self.host = device.on_host(num_pages, progress=progress)
        self.swap = SwapEngine(device, self.host)
        self._per_chunk = blocks_per_chunk
        self._is_filled = np.zeros(num_pages, bool)
        self._filler = np.full(num_pages, -1, np.int64)  # the last job that was to fill each page
        self._transfers: dict[int, _Transfer] = {}
        self._failed_loads: set[int] = set()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: HostChunks) -> bool:
        """Starts copying blocks to chunks."""
        all_pages = self._pages_of(dst_spec.chunks).ravel()
        self._is_filled[all_pages], self._filler[all_pages] = False, job_id
        pairs = self._pairs(src_spec, dst_spec, must_fill=True)
        transfer = _Transfer(False, pairs[:, 1], time.perf_counter())
        self._start(job_id, transfer, pairs)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: HostChunks,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Starts copying chunks to blocks. expedited: from vLLM 0.33 on; loads wait for no store here."""
        pairs = self._pairs(dst_spec, src_spec, must_fill=False)
        transfer = _Transfer(True, pairs[:, 1], time.perf_counter())
        if len(pairs) < len(dst_spec.block_ids) or not self._is_filled[pairs[:, 1]].all():
            transfer.error = RuntimeError("a store did not fill all of its pages")
            pairs = _NO_PAIRS
        self._start(job_id, transfer, pairs[:, ::-1])
        return True

    def get_finished(self) -> list[TransferResult]:
        """The jobs that are over, each once."""
        done = []
        for job_id, transfer in list(self._transfers.items()):
            if not self._is_over(transfer):
                continue
            del self._transfers[job_id]
            done.append(self._result(job_id, transfer))
        return done

    def take_failed_loads(self) -> set[int]:
        """Jobs that `get_finished` returned, and whose blocks were not loaded, since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Waits until these jobs are over."""
        for job_id in job_ids:
            transfer = self._transfers.get(job_id)
            while transfer is not None and not self._is_over(transfer):
                time.sleep(50e-6)

    def shutdown(self) -> None:
        """Waits until no job is under way."""
        self.wait(set(self._transfers))

    def _pages_of(self, chunks: np.ndarray) -> np.ndarray:
        """int64[n, blocks_per_chunk]: host pages."""
        return chunks.astype(np.int64)[:, None] * self._per_chunk + np.arange(self._per_chunk)

    def _pairs(self, gpu: GPULoadStoreSpec, host: HostChunks, *, must_fill: bool) -> np.ndarray:
        """int64[n, 2]: device block and host page. A group may begin inside its first chunk.

        `must_fill`: and ends with its last one. Where a group does not, a block inside is missing (it
        has left the window), and vLLM does not say which: the group is left out.
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

    def _start(self, job_id: int, transfer: _Transfer, pairs: np.ndarray) -> None:
        try:
            move = self.swap.swap_in if transfer.is_load else self.swap.swap_out
            transfer.job = move(pairs)
        except (RuntimeError, ValueError, MemoryError) as error:
            transfer.error = error
        self._transfers[job_id] = transfer
        self._is_over(transfer)  # on the CPU it is: its time ends here

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
            _log.warning("a load from host memory failed, its tokens are computed anew: %s", error)
        else:
            _log.warning("a store to host memory failed, its blocks are no hits: %s", error)
        return TransferResult(job_id, True)  # vLLM asserts that it was one


def _without_padding(kv_caches: CanonicalKVCaches) -> list[torch.Tensor]:
    """The tensors [blocks, bytes], without what no layer uses of a page."""
    used: dict[int, int] = {}
    for ref in (ref for group in kv_caches.group_data_refs for ref in group):
        used[ref.tensor_idx] = max(used.get(ref.tensor_idx, 0), ref.page_size_bytes)
    return [
        each.tensor[:, : used.get(number, each.page_size_bytes)]
        for number, each in enumerate(kv_caches.tensors)
    ]


class _Progress:
    """Logs how far pinning has come: at the start, every few seconds, and at the end."""

    def __init__(self, num_bytes: int) -> None:
        _log.info("the host tier: %.2f GiB of host memory", num_bytes / 2**30)
        self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS

    def __call__(self, done: int, total: int) -> None:
        if done == total or time.monotonic() >= self._next:
            _log.info("the host tier: pinned %.2f of %.2f GiB", done / 2**30, total / 2**30)
            self._next = time.monotonic() + _SECONDS_BETWEEN_LOGS
