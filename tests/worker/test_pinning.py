# SPDX-License-Identifier: Apache-2.0
"""Host memory for pages: size, start address, pinning, and error messages."""

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import threading

import numpy as np
import pytest
import torch

from kvcache import Pages, SwapEngine
from kvcache.native import load
from kvcache.worker.pages import pinning
from kvcache.worker.pages.page_copy import PageCopy


def test_host_tier_larger_than_memory_is_rejected():
    with pytest.raises(MemoryError, match=r"this needs .* GiB: expected at most the"):
        Pages.allocate(2, [[1 << 20]]).on_host(1 << 30)


def test_memory_that_cannot_be_pinned_stays_pageable_with_a_warning(monkeypatch):
    pages = Pages.allocate(4, [[100, 28]] * 2)
    reported = []
    released = []

    def register(address, num_bytes, device):
        reported.append(num_bytes)
        if len(reported) == 3:
            raise pinning._PinningError("cudaHostRegister of 1048576 bytes: out of memory")

    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(pinning, "_register", register)
    monkeypatch.setattr(pinning, "_unpin", lambda addresses, *_: released.extend(addresses))
    with pytest.warns(
        RuntimeWarning, match="0.0 GiB of host memory could not be pinned; copies will"
    ):
        host = pages.on_host(2000, pin_memory=True)
    assert (
        len(reported) >= 3 and len(released) == len(reported) - 1
    )  # chunks that were already pinned are unpinned again
    PageCopy(pages, host).copy(np.array([[1, 1999]]))
    assert torch.equal(host.layer(0)[1999], torch.cat([pages.fragment(r)[1] for r in (0, 1)]))


def test_chunks_end_at_page_boundaries_and_their_sum_is_reported(monkeypatch):
    registered, reported = [], []
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(pinning, "_register", lambda *chunk: registered.append(chunk[:2]))
    monkeypatch.setattr(pinning, "_unpin", lambda *_: None)
    host = Pages.allocate(4, [[100, 28]] * 2).on_host(
        2000, pin_memory=True, progress=lambda done, total: reported.append((done, total))
    )
    stride = int(host.strides[0])
    assert stride == 256 and host.pages_per_chunk * stride == 1 << 16
    assert sorted(registered) == [
        (host.memory.data_ptr() + at, min(1 << 16, 2000 * 256 - at))
        for at in range(0, 2000 * 256, 1 << 16)
    ]
    assert host.memory.data_ptr() % 4096 == 0
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1] == (2000 * 256, 2000 * 256)


def is_resident(address, num_bytes):
    """Return, for each system page of the memory, whether it is resident."""
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    done = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages
    )
    assert done == 0, os.strerror(ctypes.get_errno())
    return [page & 1 == 1 for page in pages]


def can_populate():
    with mmap.mmap(-1, mmap.PAGESIZE) as one:
        try:
            one.madvise(pinning._MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


@pytest.mark.skipif(not can_populate(), reason="MADV_POPULATE_WRITE requires Linux 5.14")
def test_memory_is_touched_by_several_threads_before_it_is_registered(monkeypatch):
    """The last chunk ends inside a system page."""
    registered = []

    def host_register(device, address, num_bytes):
        registered.append((num_bytes, all(is_resident(address, num_bytes))))
        return 0

    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 4 << 20)
    monkeypatch.setattr("kvcache.native.load.why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.ops.kvcache, "_host_register", host_register, raising=False)
    monkeypatch.setattr(pinning, "_unpin", lambda *_: None)
    memory, per_chunk, _ = pinning.allocate_host(50_001, 320, torch.device("cuda", 0))
    assert sum(num_bytes for num_bytes, _ in registered) == 50_001 * 320
    assert len(registered) == -(-50_001 // per_chunk) > 3
    assert all(resident for _, resident in registered) and not memory.any()


def test_errors_of_the_progress_callback_propagate(monkeypatch):
    monkeypatch.setattr(pinning, "_register", lambda *_: None)
    monkeypatch.setattr(pinning, "_unpin", lambda *_: None)

    def progress(done, total):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        Pages.allocate(2, [[64]]).on_host(4, pin_memory=True, progress=progress)


def test_container_memory_limit_is_respected(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(pinning, "_CONTAINER_LIMIT", limit)
    limit.write_text("1000\n")
    with pytest.raises(MemoryError, match=r"expected at most the 0.0 GiB that the host has"):
        Pages.allocate(2, [[64]]).on_host(100)
    limit.write_text("max\n")
    Pages.allocate(2, [[64]]).on_host(100)


@pytest.fixture
def another_default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device("cpu")


def test_host_pages_are_on_the_host_for_any_default_device(another_default_device):
    assert Pages.allocate(2, [[64]]).on_host(4).memory.device.type == "cpu"


def test_pinning_without_cuda_warns():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        Pages.allocate(2, [[64]]).on_host(4, pin_memory=True)


def test_storage_starts_at_the_first_pinned_byte(monkeypatch):
    """torch checks the first byte of a tensor's storage to determine whether the tensor is pinned."""
    registered = []
    monkeypatch.setattr(pinning, "_register", lambda *chunk: registered.append(chunk[:2]))
    monkeypatch.setattr(pinning, "_unpin", lambda *_: None)
    host = Pages.allocate(4, [[5000]]).on_host(100, pin_memory=True)
    storage = host.memory.untyped_storage()
    assert min(registered)[0] == storage.data_ptr() == host.memory.data_ptr()
    assert storage.data_ptr() % (2 << 20) == 0  # the memory is aligned to a huge page
    assert sum(size for _, size in registered) == storage.nbytes() == host.memory.numel()


def test_host_memory_requests_huge_pages_and_outlives_its_mapping_object(monkeypatch):
    advice = []

    class Mapping(mmap.mmap):
        def madvise(self, option):
            advice.append(option)
            raise OSError(errno.EINVAL, "a kernel without huge pages")

    monkeypatch.setattr(pinning.mmap, "mmap", Mapping)
    memory = Pages.allocate(2, [[64]]).on_host(4).memory
    assert advice == [mmap.MADV_HUGEPAGE]
    memory.fill_(7)
    assert memory.unique().tolist() == [7]


def test_failed_mapping_raises_memory_error(monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pinning.mmap, "mmap", refuse)
    with pytest.raises(
        MemoryError, match=r"0.0 GiB of host memory: the system refuses to map it \(Cannot"
    ):
        Pages.allocate(2, [[64]]).on_host(4)


@pytest.mark.parametrize(("limit", "advice"), [
    (64 << 20, r"The limit of locked memory is 64.0 MiB \(`ulimit -l`\): raise it"),
    (resource.RLIM_INFINITY, "Locked memory is not limited here: free memory of the host, or"),
])  # fmt: skip
def test_failed_registration_suggests_a_remedy(monkeypatch, limit, advice):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    registering_gives(monkeypatch, 2)
    with pytest.warns(RuntimeWarning, match="could not be pinned") as warned:
        _, per_chunk, keep = pinning.allocate_host(4, 64, torch.device("cuda", 0))
    text = str(warned[0].message)
    assert "cudaHostRegister of 256 bytes: out of memory (2). " in text
    assert re.search(advice, text) and "pin_memory=False" in text
    assert (per_chunk, keep) == (0, None)
    registering_gives(monkeypatch, 1)  # another error contains no advice about memory
    with pytest.warns(RuntimeWarning, match=r"of 256 bytes: invalid argument \(1\)$"):
        pinning.allocate_host(4, 64, torch.device("cuda", 0))


def test_failed_unpinning_is_reported(monkeypatch, caplog):
    registering_gives(monkeypatch, 0)
    memory, _, keep = pinning.allocate_host(4, 64, torch.device("cuda", 0))
    monkeypatch.setattr(torch.ops.kvcache, "_host_unregister", lambda *_: 1, raising=False)
    del keep
    gc.collect()
    (line,) = caplog.messages
    assert line == f"cudaHostUnregister of {memory.data_ptr():#x}: invalid argument (1)"


def registering_gives(monkeypatch, error):
    """Replaces the function that registers memory with CUDA, so that every registration gives this
    result.
    """

    class Cudart:
        cudaError = int

        @staticmethod
        def cudaGetErrorString(error):
            return {1: "invalid argument", 2: "out of memory"}[error]

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(load, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.ops.kvcache, "_host_register", lambda *_: error, raising=False)


def is_mapped_in_a_fork(memory):
    """Return whether this page of the memory is in the address space of a forked child."""
    address = memory.data_ptr() + memory.numel() // 2
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as lines:
            spans = [line.split()[0].split("-") for line in lines]
        os._exit(any(int(a, 16) <= address < int(b, 16) for a, b in spans))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("can_be_pinned", [True, False])
def test_forked_process_does_not_copy_pinned_memory(monkeypatch, can_be_pinned):
    registering_gives(monkeypatch, 0 if can_be_pinned else 1)
    monkeypatch.setattr(torch.ops.kvcache, "_host_unregister", lambda *_: 0, raising=False)
    expected = contextlib.nullcontext() if can_be_pinned else pytest.warns(RuntimeWarning)
    with expected:
        memory, _, keep = pinning.allocate_host(64, 1 << 20, torch.device("cuda", 0))
    assert is_mapped_in_a_fork(memory) == (not can_be_pinned)
    memory.fill_(7)  # the page is still in the parent
    assert int(memory[-1]) == 7
    del keep


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_chunk_is_recognized_as_pinned(monkeypatch):
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1 << 20)
    pages = Pages.allocate(4, [[5000, 3000]] * 2, device="cuda")
    host = pages.on_host(1000)
    assert host.is_pinned and host.memory.is_pinned()
    stride = int(host.strides[0])
    starts = range(0, host.num_blocks, host.pages_per_chunk)
    assert len(starts) > 3
    for page in starts:
        byte = (ctypes.c_char * 1).from_address(host.base + page * stride)
        assert torch.frombuffer(byte, dtype=torch.uint8).is_pinned(), f"page {page}"
    SwapEngine(pages, host, method="kernel").swap_out(np.array([[1, 999]])).wait(10)
    assert torch.equal(host.layer(1)[999], torch.cat([pages.fragment(r)[1] for r in (2, 3)]).cpu())


@pytest.mark.gpu
def test_host_pages_are_pinned_in_chunks_and_unpinned(monkeypatch):
    monkeypatch.setattr(pinning, "_CHUNK_BYTES", 1 << 20)
    seen = []
    pages = Pages.allocate(4, [[5000, 3000]] * 2, device="cuda")
    host = pages.on_host(1000, progress=lambda done, total: seen.append((done, total)))
    assert host.is_pinned and len(seen) > 3 and seen[-1][0] == seen[-1][1]
    assert host.pages_per_chunk % 64 == 0 and host.pages_per_chunk < 1000
    pages.memory.random_()
    for method in ("kernel", "copy_engine", "staging"):
        swap = SwapEngine(pages, host, method=method)
        # This run of pages crosses the boundary between two pinned chunks.
        last = host.pages_per_chunk
        swap.swap_out(np.array([[1, last - 1], [2, last], [3, last + 1]])).wait(10)
        for region in range(len(pages.sizes)):  # K and V of a layer are not adjacent
            got = host.fragment(region)[last - 1 : last + 2]
            assert torch.equal(got, pages.fragment(region)[1:4].cpu()), f"region {region}"


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["pinning", "unpinning"])
def test_pinning_does_not_invalidate_a_capture_of_another_thread(what):
    pages = Pages.allocate(9, [[512, 512]] * 2, device="cuda")
    held = [pages.on_host(64)] if what == "unpinning" else []

    def pin_or_unpin():
        if what == "pinning":
            held.append(pages.on_host(64))
        else:
            held.clear()
            gc.collect()

    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        x.add_(1)
        thread = threading.Thread(target=pin_or_unpin)
        thread.start()
        thread.join()
    graph.replay()
    assert x.tolist() == [1] * 8
    assert all(host.is_pinned for host in held) and len(held) == (what == "pinning")
