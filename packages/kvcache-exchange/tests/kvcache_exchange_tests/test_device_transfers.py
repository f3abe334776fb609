# SPDX-License-Identifier: Apache-2.0
"""Transports, fetching, disaggregation and stores with device tensors and concurrent computation on
another stream.

The CUDA runtime without a GPU delays streams, and `torch.cuda._sleep` delays one of them further.
There, a stand-in replaces NIXL. Like RDMA, it ignores streams and moves bytes immediately.
"""

import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from kvcache import Admit, External, GroupSpec, KVStorage, Pages, Request
from kvcache.transfer import (
    CacheDescription,
    memory,
    permute_pages,
    plan_transfer,
    region_addresses,
)
from kvcache.transfer.fetching import GroupFetch, fetch
from kvcache.worker.pages import pinning
from kvcache_exchange.transport.connection import StagedTransfer
from kvcache_exchange.transport.factory import make_transport
from kvcache_exchange.transport.nixl_agent import Reach
from kvcache_exchange.transport.nixl_direct import DirectTransfer
from tests.machinery.disaggregation_engine import Engine
from tests.machinery.gpu_less import counts
from tests.machinery.nixl_stand_in import nixl_agent, stand_in
from tests.machinery.stores import MemoryStore, StoreUser

pytestmark = pytest.mark.gpu
NAMES = ["tcp", "nixl"]
CYCLES_PER_S = 2e9  # clock rate assumed for torch.cuda._sleep
NUM_BLOCKS = 65
GROUP = GroupSpec("full_attention", 4)


@contextmanager
def side_stream():
    """Return a context whose current stream does not synchronize with the default stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    torch.cuda.synchronize()


def pages_on(device, page_bytes, seed=None):
    """Return pages of two layers in two allocations that are filled with random bytes or zeros."""
    found = []
    for layer in range(2):
        memory = torch.zeros(NUM_BLOCKS, page_bytes, dtype=torch.uint8)
        if seed is not None:
            rng = np.random.default_rng((seed, layer))
            memory = torch.from_numpy(rng.integers(0, 256, memory.shape, np.uint8))
        found.append(memory.to(device))
    torch.cuda.synchronize()
    return Pages.over(found), found


class Sides:
    """Two transports in this process, each of which has pages and additional host memory, like a
    rank.
    """

    def __init__(self, name, devices, page_bytes, **options):
        self.stack = ExitStack()
        self.moved = self.stack.enter_context(stand_in())
        self.page_bytes, self.sides = page_bytes, []
        self.beside = [np.arange(64) * (seed + 1) for seed in range(2)]
        for seed, (agent, device) in enumerate(zip("ab", devices)):
            pages, layers = pages_on(device, page_bytes, seed)
            side = make_transport(agent, name, timeout_s=20, **options)
            self.stack.callback(side.close)
            side.register(pages)
            side.register([(self.beside[seed].ctypes.data, self.beside[seed].nbytes)])
            self.sides.append((side, pages, layers))
        self.peer = self.sides[0][0].connect(self.sides[1][0].metadata())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def read(self, local_ids, remote_ids, size=None):
        """Start a read of the first bytes of these pages in both layers."""
        at = [
            np.concatenate(
                [pages.base + pages.offsets[r] + np.array(ids) * pages.strides[r] for r in range(2)]
            )
            for (_, pages, _), ids in zip(self.sides, (local_ids, remote_ids))
        ]
        length = np.full(len(at[0]), size or self.page_bytes)
        return self.sides[0][0].read(self.peer, *at, length)

    def contents(self, number):
        return torch.stack([layer.cpu() for layer in self.sides[number][2]])


HERE, THERE = [3, 9, 4, 60, 11, 1], [7, 2, 64, 5, 33, 8]


@pytest.mark.parametrize(
    "devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids="-".join
)
@pytest.mark.parametrize("page_bytes", [96, 4096, 300 << 10])
@pytest.mark.parametrize("name", NAMES)
def test_pages_move_between_devices(name, page_bytes, devices):
    with side_stream(), Sides(name, devices, page_bytes) as both:
        expected = [both.contents(number) for number in range(2)]
        expected[0][:, HERE] = expected[1][:, THERE]
        both.read(HERE, THERE).wait(20)
        assert all(torch.equal(both.contents(number), expected[number]) for number in range(2))


@pytest.mark.parametrize(
    ("page_bytes", "path"), [(128 << 10, StagedTransfer), (256 << 10, DirectTransfer)]
)
def test_device_memory_moves_directly_alongside_registered_host_memory(page_bytes, path):
    with Sides("nixl", ("cuda", "cuda"), page_bytes) as both:
        move = both.read(HERE, THERE)
        move.wait(20)
        assert type(move) is path
        if path is DirectTransfer:
            assert both.moved == [("READ", "VRAM", "VRAM", page_bytes)] * (2 * len(HERE))
        # Words in host memory, such as a lease, can be read as well.
        words = [np.array([each.ctypes.data]) for each in both.beside]
        side = both.sides[0][0]
        side.read(both.peer, *words, np.array([512])).wait(20)
        assert (both.beside[0] == both.beside[1]).all()


@pytest.mark.parametrize("size", [4 << 10, 16 << 10])
def test_remote_device_memory_moves_directly_from_8_kib(monkeypatch, size):
    told = iter([Reach("here", True), Reach("there", True)])
    monkeypatch.setattr(Reach, "of_this", lambda: next(told))
    with Sides("nixl", ("cuda", "cuda"), size) as both:
        move = both.read(HERE, THERE)
        move.wait(20)
        assert type(move) is (DirectTransfer if size >= 8 << 10 else StagedTransfer)


def test_device_memory_is_not_registered_as_host_memory():
    with Sides("tcp", ("cuda", "cuda"), 4096) as both:
        side, pages, _ = both.sides[0]
        before = side.memory.regions
        said = r"on cpu, some of which are already registered on cuda:0: expected cuda:0"
        with pytest.raises(ValueError, match=said):
            side.register([(both.beside[0].ctypes.data, 8), (pages.base + 64, 64)])
        assert side.memory.regions == before


def test_device_memory_unsupported_by_nixl_is_not_registered(monkeypatch):
    monkeypatch.setattr(nixl_agent, "refuses", "VRAM")
    pages, _ = pages_on("cuda", 4096)
    with stand_in():
        side = make_transport("a", "nixl")
        with pytest.raises(
            RuntimeError, match=r"VRAM with other processes .*, or direct_bytes=None"
        ):
            side.register(pages)
        assert side.memory.regions == []
        side.close()
        packs = make_transport("a", "nixl", direct_bytes=None)
        packs.register(pages)
        packs.close()


needs_counts = pytest.mark.skipif(
    not counts.is_available(), reason="only the runtime without a GPU counts calls"
)
COUNTED = (
    "copies", "batches", "pageable_copies", "legacy_work", "launches", "waits", "allocations",
    "pointer_queries",
)  # fmt: skip


@needs_counts
@pytest.mark.parametrize("num_fragments", [32, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_staged_transfers_make_the_expected_calls(name, num_fragments):
    """Counts the calls in the second of two reads, of 16 pages in two allocations or of 1,000 small
    fragments in one allocation.
    """
    with Sides(name, ("cuda", "cuda"), 4096) as both:
        ids = np.arange(1, 33, 2)
        at = np.arange(num_fragments) * 64

        def read():
            if num_fragments == 32:
                return both.read(ids, ids[::-1])
            ends = [pages.base + each for (_, pages, _), each in zip(both.sides, (at, at[::-1]))]
            return both.sides[0][0].read(both.peer, *ends, np.full(num_fragments, 16))

        read().wait(20)
        torch.cuda.synchronize()
        with counts.counted() as found:
            read().wait(20)
        costs = {each: found[each] for each in COUNTED if found[each]}
        assert costs == {"launches": 2}


@pytest.mark.parametrize("why", ["registered later", "too little may be locked"])
def test_unpinned_staging_transfers_correct_bytes(why, monkeypatch):
    def refuse(*_):
        raise pinning._PinningError("cudaHostRegister: out of memory")

    if why != "registered later":
        monkeypatch.setattr(pinning, "_register", refuse)
    with ExitStack() as stack:
        sides = [stack.enter_context(closing(make_transport(each, "tcp"))) for each in "ab"]
        pages = [pages_on("cuda", 4096, seed)[0] for seed in range(2)]
        words = [np.arange(8) * (seed + 1) for seed in range(2)]
        for side, own, beside in zip(sides, pages, words):
            side.register([(beside.ctypes.data, beside.nbytes)])
            if why != "registered later" or side is sides[1]:
                side.register(own)
        if why != "registered later":
            stack.enter_context(pytest.warns(RuntimeWarning, match="could not be pinned"))
        peer = sides[0].connect(sides[1].metadata())
        ends = [np.array([each.ctypes.data]) for each in words]
        sides[0].read(peer, *ends, np.array([64])).wait(20)
        sides[0].register(pages[0])
        at = [own.base + np.array(ids) * 4096 for own, ids in zip(pages, (HERE, THERE))]
        sides[0].read(peer, *at, np.full(len(HERE), 4096)).wait(20)
        mine, theirs = (own.layer(0).cpu() for own in pages)
        assert torch.equal(mine[HERE], theirs[THERE])


def test_staging_does_not_affect_a_capture():
    with Sides("tcp", ("cuda", "cuda"), 4096) as both, side_stream() as side:
        x = torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="global")
        try:
            x.add_(1)
            both.read(HERE, THERE).wait(20)
            x.add_(1)
        finally:
            graph.capture_end()
        graph.replay()
        side.synchronize()
        assert x.tolist() == [2] * 8
        assert torch.equal(both.contents(0)[:, HERE], both.contents(1)[:, THERE])


@pytest.fixture
def entered(monkeypatch):
    """Record the names of threads that make the pages' device current."""
    found, enter = set(), torch.cuda.set_device

    def note(device):
        assert torch.device(device) == torch.device("cuda", 0)
        found.add(threading.current_thread().name)
        enter(device)

    monkeypatch.setattr(torch.cuda, "set_device", note)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_transport_threads_set_the_current_device(name, entered):
    with Sides(name, ("cuda", "cuda"), 256 << 10) as both:
        both.read(HERE, THERE).wait(20)
        both.read(HERE, THERE, 16).wait(20)
        assert {"kvcache greeting", "kvcache bytes to a", "kvcache bytes from b"} <= entered
        assert ("kvcache direct b" in entered) == (name == "nixl")
        assert threading.current_thread().name not in entered


def caches():
    """Return (storage, description) of both sides."""
    found = []
    for name, block, layout in (("local", 16, "NHD"), ("remote", 8, "HND")):
        storage = KVStorage(
            9, block, 2, 8, num_layers=2, dtype=torch.float32, backend="FLASHINFER", layout=layout,
            device="cuda",
        )  # fmt: skip
        cache = CacheDescription(
            engine_id=name, num_layers=2, total_num_kv_heads=2, head_size=8, dtype="float32",
            block_size=block, memory_order=storage.memory_order,
        )  # fmt: skip
        found.append((storage, cache))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["poll", "wait"])
def test_completed_fetch_has_local_order(name, how, monkeypatch):
    """This holds even if the permutation is slow and the model's stream waits for nothing."""

    def slow(*args):
        torch.cuda._sleep(int(0.5 * CYCLES_PER_S))
        permute_pages(*args)

    monkeypatch.setattr(memory, "permute_pages", slow)
    (mine, local), (theirs, remote) = caches()
    values = torch.arange(4 * 8 * 2 * 8, dtype=torch.float32).view(4, 8, 2, 8)
    for layer in range(2):
        for part, cache in enumerate((theirs.key_cache(layer), theirs.value_cache(layer))):
            cache[1:5] = (values + 1000 * (2 * layer + part)).cuda()
            mine.kv_caches[layer].zero_()
    torch.cuda.synchronize()
    with ExitStack() as stack, side_stream() as compute:
        stack.enter_context(stand_in())
        sides = [stack.enter_context(closing(make_transport(each, name))) for each in "ab"]
        for side, storage in zip(sides, (mine, theirs)):
            side.register(storage.pages)
        peer = sides[0].connect(sides[1].metadata())
        group = GroupFetch(
            plan_transfer(local, remote, 0), np.array([7, 3]), np.array([1, 2, 3, 4]),
            region_addresses(local, mine.pages), {0: region_addresses(remote, theirs.pages)}, mine,
        )  # fmt: skip
        found = torch.empty(2, 2, 2, 16, 2, 8, pin_memory=True)
        loads = []

        def load():  # runs in another thread, in which the default stream is current
            loads.append(fetch(sides[0], {0: peer}, [group], 0, 32))
            if how == "wait":
                loads[0].wait(20)
            while not loads[0].poll():
                time.sleep(0.001)

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        for layer in range(2):
            for part, cache in enumerate((mine.key_cache(layer), mine.value_cache(layer))):
                for at, page in enumerate((7, 3)):
                    found[layer, part, at].copy_(cache[page], non_blocking=True)
        compute.synchronize()
        assert loads[0].is_released
        for layer in range(2):
            for part in range(2):
                expected = values + 1000 * (2 * layer + part)
                assert torch.equal(found[layer, part].reshape(4, 8, 2, 8), expected)


@contextmanager
def closing(transport):
    try:
        yield transport
    finally:
        transport.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kinds", [["full"], ["full", "window", "state"]], ids=["full", "all"])
def test_load_waits_for_pending_writes_to_its_blocks(name, kinds):
    """The pending step was launched before its blocks were freed and allocated to the load."""
    options = {"transport": name}
    with ExitStack() as stack, side_stream():
        stack.enter_context(stand_in())
        sender, receiver = (
            stack.enter_context(
                Engine(each, kinds=kinds, block=block, device="cuda", options=options)
            )
            for each, block in (("p", 16), ("d", 32))
        )
        tokens = list(range(100))
        request, again = Request("r", tokens), Request("r", [*tokens, 7])
        assert sender.prefill(request) is not None
        torch.cuda.current_stream().synchronize()  # the tokens have been sampled
        offer = sender.connector.publish(request)
        pages = receiver.storages[0][0].pages
        torch.cuda._sleep(int(1.5 * CYCLES_PER_S))
        pages.zero(np.arange(1, pages.num_blocks))
        assert receiver.admit(again, offer)
        loaded = receiver.loaded(again)
        assert (loaded.num_computed_tokens, loaded.error) == (100, None)
        torch.cuda.synchronize()
        assert receiver.wrong(again, 100) is None
        receiver.recompute(again, loaded)
        receiver.manager.free(again)
        assert sender.drained() and receiver.drained()


def test_loads_cannot_start_during_capture(entered):
    with ExitStack() as stack, side_stream():
        sender, receiver = (
            stack.enter_context(Engine(each, device="cuda", options={"transport": "tcp"}))
            for each in "pd"
        )
        request, again = Request("r", range(40)), Request("r", [*range(40), 7])
        sender.prefill(request)
        torch.cuda.synchronize()
        offer = sender.connector.publish(request)
        count = receiver.connector.match(again, offer)
        plan = receiver.manager.step(new=[Admit(again, external=External(count, delayed=True))])
        receiver.apply(plan)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="global")
        with pytest.raises(
            RuntimeError, match="begin was called while the current stream is captured"
        ):
            receiver.connector.begin(again)
        graph.capture_end()
        receiver.connector.begin(again)
        assert receiver.loaded(again).error is None
        assert receiver.wrong(again, 40) is None
        assert {"kvcache loads", "kvcache call"} <= entered


@pytest.mark.parametrize("num_host_blocks", [0, 90])
def test_store_loads_follow_the_model_stream(num_host_blocks):
    with side_stream():
        store = MemoryStore()
        options = {"device": "cuda", "num_host_blocks": num_host_blocks, "host_write": "through"}
        one = StoreUser(store, [GROUP], **options)
        one.run([*range(30)], [*range(14), *range(50, 60)])
        one.settle()
        one.end()
        other = StoreUser(store, [GROUP], **options)
        other.run([*range(30), *range(70, 80)])
        assert other.num_loaded == 28
        other.end()
