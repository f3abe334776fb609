# SPDX-License-Identifier: Apache-2.0
"""The worker side of kvcache's host tier in vLLM: stored bytes and failed swaps.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvcache.plugins.vllm.offloading import HostWorker
from kvcache.plugins.vllm.offloading.host_manager import HostChunks


class TestWorker:
    """Two tensors with different page sizes and three blocks per chunk, on the CPU."""

    PER_CHUNK = 3

    def worker(self, seed):
        torch.manual_seed(seed)
        self.tensors = [
            torch.randint(-128, 128, (40, size), dtype=torch.int8) for size in (160, 96)
        ]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in self.tensors], []
        )
        return HostWorker(caches, num_chunks=8, blocks_per_chunk=self.PER_CHUNK)

    def page(self, block):
        return [tensor[block].tolist() for tensor in self.tensors]

    @staticmethod
    def finished(worker):
        return {result.job_id: result for result in worker.get_finished()}

    @pytest.mark.parametrize("seed", range(5))
    def test_loaded_bytes_equal_stored_bytes(self, seed):
        """Groups may start inside a chunk, and the last chunk of a load may be partial."""
        rng = np.random.default_rng(seed)
        worker = self.worker(seed)
        free = rng.permutation(np.arange(1, 40))
        groups, chunks = [], rng.permutation(np.arange(1, 9)).astype(np.int32)
        counts = [2, 0, 1] if seed % 2 else [3, 2, 1]
        for count in counts:
            skip = int(rng.integers(self.PER_CHUNK)) if count else 0
            size = count * self.PER_CHUNK - skip
            groups.append((free[:size].tolist(), 3 * self.PER_CHUNK + skip))
            free = free[size:]
        before = [[self.page(block) for block in blocks] for blocks, _ in groups]
        host = HostChunks(chunks[: sum(counts)], [count for count in counts if count])
        assert worker.submit_store(1, self.spec(groups), host)
        (result,) = worker.get_finished()
        sizes = [len(blocks) for blocks, _ in groups]
        assert result.success and result.transfer_size == sum(sizes) * (160 + 96)
        for tensor in self.tensors:
            tensor.zero_()
        cut = int(rng.integers(self.PER_CHUNK))
        targets, ids = [], iter(rng.permutation(np.arange(1, 40)).tolist())
        for group, (blocks, first) in enumerate(groups):
            num = max(len(blocks) - cut * (group == 0), 0)
            targets.append(([next(ids) for _ in range(num)], first))
        assert worker.submit_load(2, host, self.spec(targets))
        assert self.finished(worker)[2].transfer_size == sum(len(b) for b, _ in targets) * 256
        for pages, (blocks, _) in zip(before, targets):
            assert [self.page(block) for block in blocks] == pages[: len(blocks)]
        touched = {block for blocks, _ in targets for block in blocks}
        assert all(not any(map(any, self.page(b))) for b in range(40) if b not in touched)
        assert worker.take_failed_loads() == set()

    @staticmethod
    def spec(groups):
        """Return vLLM's spec from (blocks, index of the first block) per group."""
        return GPULoadStoreSpec(
            [block for blocks, _ in groups for block in blocks],
            [len(blocks) for blocks, _ in groups],
            [first for _, first in groups],
        )

    def store_and_load(self, worker, blocks, first, num_chunks):
        """Store blocks, load them again, and return both results."""
        host = HostChunks(np.arange(1, num_chunks + 1, dtype=np.int32), [num_chunks])
        assert worker.submit_store(1, self.spec([(blocks, first)]), host)
        stored = self.finished(worker)[1]
        assert worker.submit_load(2, host, self.spec([(blocks, first)]))
        return stored, self.finished(worker)[2]

    @pytest.mark.parametrize("what", ["swap_out", "swap_in"])
    def test_failed_swap_is_reported_as_a_failed_load(self, what, monkeypatch):
        def fail(pairs):
            raise RuntimeError("no luck")

        worker = self.worker(0)
        monkeypatch.setattr(worker.swap, what, fail)
        stored, loaded = self.store_and_load(worker, [1, 2, 3], 0, 1)
        assert stored.success and loaded.success  # vLLM accepts no other value
        assert (stored.transfer_size is None) == (what == "swap_out")
        assert loaded.transfer_size is None and worker.take_failed_loads() == {2}
        monkeypatch.undo()
        assert self.store_and_load(worker, [1, 2, 3], 0, 1)[1].transfer_size == 3 * 256
        assert worker.take_failed_loads() == set()

    def test_job_that_fails_later_is_reported(self, monkeypatch):
        worker = self.worker(0)
        swap_in = worker.swap.swap_in

        def late(pairs):
            job = swap_in(pairs)
            job.fail(RuntimeError("the device is lost"))
            return job

        monkeypatch.setattr(worker.swap, "swap_in", late)
        assert self.store_and_load(worker, [1, 2, 3], 0, 1)[1].transfer_size is None
        assert worker.take_failed_loads() == {2}

    def test_blocks_that_leave_a_gap_are_not_stored(self):
        """vLLM does not report where the gap is, so the chunks may be [4, 5, 6] and [-, 8, 9], or
        [4, 5, -] and [6, 8, 9].
        """
        worker = self.worker(0)
        stored, loaded = self.store_and_load(worker, [4, 5, 6, 8, 9], 0, 2)
        assert stored.transfer_size == 0
        assert loaded.transfer_size is None and worker.take_failed_loads() == {2}

    def test_page_before_the_window_is_not_stored(self):
        worker = self.worker(0)
        host = HostChunks(np.array([1], np.int32), [1])
        worker.submit_store(1, self.spec([([5, 6], 1)]), host)
        worker.get_finished()
        worker.submit_load(2, host, self.spec([([7, 8, 9], 0)]))
        worker.submit_load(3, host, self.spec([([7, 8], 1)]))
        worker.get_finished()
        assert worker.take_failed_loads() == {2}
        assert self.page(7) == self.page(5) and self.page(8) == self.page(6)

    def test_outdated_store_does_not_fill_a_reassigned_chunk(self, monkeypatch):
        """After a reset, vLLM reassigns a chunk whose store is still in flight."""
        worker = self.worker(0)
        host = HostChunks(np.array([1], np.int32), [1])
        worker.submit_store(1, self.spec([([1, 2, 3], 0)]), host)

        def fail(pairs):
            raise RuntimeError("no luck")

        monkeypatch.setattr(worker.swap, "swap_out", fail)

        worker.submit_store(2, self.spec([([4, 5, 6], 0)]), host)
        worker.get_finished()
        worker.submit_load(3, host, self.spec([([4, 5, 6], 0)]))
        worker.get_finished()
        assert worker.take_failed_loads() == {3}
