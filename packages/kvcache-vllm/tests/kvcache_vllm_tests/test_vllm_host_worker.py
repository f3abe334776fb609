# SPDX-License-Identifier: Apache-2.0
"""The worker side of kvcache's host tier in vLLM: stored bytes and failed swaps.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvcache.worker.swap import engine
from kvcache_vllm.offloading import HostWorker, host_worker
from kvcache_vllm.offloading.host_manager import HostChunks
from tests.machinery.simulated_device import SimulatedStreams


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

    @pytest.mark.parametrize("what", ["swap_out", "swap_in", "swap_in later"])
    def test_failed_swap_is_reported_as_a_failed_load(self, what, monkeypatch):
        worker = self.worker(0)
        name, _, is_later = what.partition(" ")
        swap = getattr(worker.swap, name)

        def fail(pairs, **options):
            if not is_later:
                raise RuntimeError("no luck")
            job = swap(pairs, **options)
            job.fail(RuntimeError("the device is lost"))
            return job

        monkeypatch.setattr(worker.swap, name, fail)
        stored, loaded = self.store_and_load(worker, [1, 2, 3], 0, 1)
        assert stored.success and loaded.success  # vLLM accepts no other value
        assert (stored.transfer_size is None) == (what == "swap_out")
        assert loaded.transfer_size is None and worker.take_failed_loads() == {2}
        monkeypatch.undo()
        assert self.store_and_load(worker, [1, 2, 3], 0, 1)[1].transfer_size == 3 * 256
        assert worker.take_failed_loads() == set()

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

        def fail(pairs, **options):
            raise RuntimeError("no luck")

        monkeypatch.setattr(worker.swap, "swap_out", fail)

        worker.submit_store(2, self.spec([([4, 5, 6], 0)]), host)
        worker.get_finished()
        worker.submit_load(3, host, self.spec([([4, 5, 6], 0)]))
        worker.get_finished()
        assert worker.take_failed_loads() == {3}


class TestExpeditedLoads:
    """One tensor and one block per chunk, on a simulated device. Chunk n contains block n's number.

    While the worker waits, the device executes its work, except on the streams that are held.
    """

    @pytest.fixture
    def worker(self, monkeypatch):
        self.streams = SimulatedStreams(0)
        monkeypatch.setattr(engine, "streams_of", lambda device: self.streams)
        clock = SimpleNamespace(**{**vars(time), "sleep": self.execute})
        monkeypatch.setattr(host_worker, "time", clock)
        self.blocks = torch.arange(20, dtype=torch.int8).repeat_interleave(64).view(20, 64)
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(self.blocks, 64)], [])
        worker = HostWorker(caches, num_chunks=9, blocks_per_chunk=1)
        worker.submit_store(0, self.blocks_of(*range(1, 10)), self.chunks(*range(1, 10)))
        worker.wait({0})
        assert [result.transfer_size for result in worker.get_finished()] == [9 * 64]
        return worker

    def execute(self, seconds):
        """Execute one item of the device's work. Fails if none can run."""
        before = sum(map(len, self.streams._streams))
        assert self.streams.advance(1) < before, "the worker waits for work that cannot run"

    def hold(self, worker, *names):
        self.streams.held = [worker.swap._swap_streams[name].stream for name in names]

    @staticmethod
    def chunks(*chunks):
        return HostChunks(np.array(chunks, np.int32), [len(chunks)])

    @staticmethod
    def blocks_of(*blocks):
        return GPULoadStoreSpec(list(blocks), [len(blocks)], [0])

    def values(self, *blocks):
        assert all(len(self.blocks[block].unique()) == 1 for block in blocks)
        return [int(self.blocks[block][0]) for block in blocks]

    @staticmethod
    def finished(worker):
        return {result.job_id: result.transfer_size for result in worker.get_finished()}

    def test_expedited_load_overtakes_a_regular_load(self, worker):
        self.hold(worker, "in")
        worker.submit_load(1, self.chunks(1, 2, 3), self.blocks_of(11, 12, 13))
        worker.submit_load(2, self.chunks(3, 4), self.blocks_of(14, 15), expedited=True)
        worker.wait({2})
        assert self.values(14, 15) == [3, 4] and self.values(11, 12, 13) == [11, 12, 13]
        assert self.finished(worker) == {2: 2 * 64}
        self.hold(worker)
        worker.wait({1})
        assert self.values(11, 12, 13) == [1, 2, 3] and self.finished(worker) == {1: 3 * 64}
        assert worker.take_failed_loads() == set()

    def test_expedited_load_of_a_chunk_being_stored_fails_without_waiting(self, worker):
        self.hold(worker, "in", "out")
        worker.submit_load(1, self.chunks(1), self.blocks_of(11))
        worker.submit_store(2, self.blocks_of(12), self.chunks(2))
        worker.submit_load(3, self.chunks(2), self.blocks_of(13), expedited=True)
        worker.wait({3})
        assert self.finished(worker) == {3: None} and worker.take_failed_loads() == {3}
        assert self.values(13) == [13]

    def test_shutdown_waits_for_expedited_loads(self, worker):
        self.hold(worker, "expedited")
        worker.submit_load(1, self.chunks(1), self.blocks_of(11), expedited=True)
        with pytest.raises(AssertionError, match="waits for work that cannot run"):
            worker.shutdown()
        self.hold(worker)
        worker.shutdown()
        assert self.values(11) == [1]
