# SPDX-License-Identifier: Apache-2.0
"""`SwapEngine`: stream dependencies on a simulated device, failures, and races on a real device."""

import os
import random
import time

import numpy as np
import pytest
import torch

from kvcache import KVStorage, Pages, StepPlan, SwapEngine, Worker, ops
from kvcache.compat.vllm_block_table import BlockTable
from kvcache.step import NO_REPLACE
from kvcache.worker import SwapError
from kvcache.worker.swap.calibration import Calibration
from tests.machinery.shared import sampled
from tests.machinery.simulated_device import SimulatedStreams

LAYERS = 3
# With this calibration, single pages use the kernel, and several pages use staging.
MIXED = Calibration("a test", *[((0, ((0, "kernel"),)), (2 * LAYERS + 1, ((0, "staging"),)))] * 2)
FORMS = {
    "kernel": {"method": "kernel"},
    "copy engine": {"method": "copy_engine"},
    "staging of one page": {"method": "staging", "staging_bytes": 1},
    "staging": {"method": "staging"},
    "now staging, now the kernel": {"calibration": MIXED, "staging_bytes": 1},
}


def pairs(*values):
    return np.array(values, np.int64).reshape(-1, 2)


class Race:
    """Computes, swaps out, reuses and swaps in pages in a random sequence of calls, and compares
    every read.

    The expected results are those of immediate execution: `device` and `host` track the last value
    written to each page. The simulated device executes the work later, in a random legal order.
    """

    def __init__(self, seed: int, **form) -> None:
        self.random = random.Random(seed)
        self.streams = SimulatedStreams(seed)
        self.pages = Pages.allocate(12, [[8, 8]] * LAYERS)
        self.host_pages = self.pages.on_host(10)
        self.engine = SwapEngine(self.pages, self.host_pages, streams=self.streams, **form)
        self.device = dict.fromkeys(range(1, 12), 0)
        self.host: dict[int, int] = {}
        self.arriving = {}  # page -> swap-in job for which no call has waited yet
        self.number = 0
        self.wrong = 0
        self.reads = 0
        for page in self.device:
            self._put(page, 0)

    def _put(self, page, number):
        for region in range(len(self.pages.sizes)):
            self.pages.fragment(region)[page] = number % 251

    def compute_write(self):
        chosen = self.random.sample(sorted(self.device), self.random.randint(1, 4))
        self.engine.before_write(np.array(chosen))
        for page in chosen:
            self.number += 1
            self.device[page] = self.number
            self.streams.launch(
                self.streams.compute, lambda page=page, number=self.number: self._put(page, number)
            )

    def compute_read(self, pages=None):
        for page in pages or self.random.sample(sorted(self.device), 4):
            if page in self.arriving:
                self.engine.before_read(self.arriving.pop(page))
            expected = self.device[page] % 251

            def look(page=page, expected=expected):
                self.reads += 1
                for region in range(len(self.pages.sizes)):
                    self.wrong += int((self.pages.fragment(region)[page] != expected).any())

            self.streams.launch(self.streams.compute, look)

    def swap_out(self):
        n = self.random.randint(1, 4)
        chosen = self.random.sample(sorted(self.device), n)
        targets = self.random.sample(range(1, 10), n)
        for page, target in zip(chosen, targets):
            self.host[target] = self.device[page]
        self.engine.swap_out(pairs(*zip(chosen, targets)))

    def swap_in(self):
        if not self.host:
            return
        chosen = self.random.choices(sorted(self.host), k=self.random.randint(1, 4))
        targets = self.random.sample(sorted(self.device), len(chosen))
        for page, target in zip(chosen, targets):
            self.device[target] = self.host[page]
        moves = pairs(*zip(chosen, targets))
        job = self.engine.swap_in(moves, expedited=self.random.random() < 0.4)
        self.arriving |= dict.fromkeys(targets, job)

    def run(self, num_calls):
        calls = [self.compute_write, self.compute_read, self.swap_out, self.swap_in]
        for _ in range(num_calls):
            self.random.choice(calls)()
            if self.random.random() < 0.5:
                self.streams.advance(self.random.randint(0, 8))
        self.compute_read(sorted(self.device))
        assert self.streams.advance() == 0, "streams wait for each other"
        self.engine.wait(timeout_s=0)
        return self.wrong


@pytest.mark.slow
@pytest.mark.parametrize("seeds", sampled([range(6), range(6, 30)]), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_reads_are_correct_under_any_stream_order(form, seeds):
    for seed in seeds:
        race = Race(seed, **FORMS[form])
        assert race.run(40) == 0, f"seed {seed}"
        assert race.reads >= 12


@pytest.mark.parametrize("direction", ["out", "in"])
def test_staging_halves_overlap_with_transfers(direction):
    worker, streams = simulated_worker(method="staging", staging_bytes=1)
    ran = []
    launch = streams.launch

    def noted(stream, work):
        swap_stream = worker.engine._swap_streams[direction]
        name = "bus" if stream is swap_stream.stream else "relayout"
        launch(stream, lambda: (ran.append(name), work()))

    streams.launch = noted
    pages = [(1, 1), (2, 2), (3, 3), (4, 4)]
    getattr(worker.engine, f"swap_{direction}")(pairs(*pages))
    staging = worker.engine._swap_streams[direction].staging
    first = "relayout" if direction == "out" else "bus"
    last = "bus" if direction == "out" else "relayout"
    # While `last` makes no progress, `first` can process exactly two pages, one per half of the
    # staging memory.
    only_first = [s for s in streams._streams if s is not staging.last]
    everything, streams._streams = streams._streams, only_first
    streams.advance()
    assert ran == [first, first]
    streams._streams = everything
    streams.advance()
    assert sorted(ran) == ["bus"] * 4 + ["relayout"] * 4 and ran[-1] == last


def held_back(form, seed=0):
    """Return an engine, its simulated streams and a swap-in that does not start."""
    race = Race(seed, **FORMS[form])
    for r in range(len(race.host_pages.sizes)):
        race.host_pages.fragment(r)[:] = torch.arange(10, dtype=torch.uint8)[:, None]
    regular = race.engine.swap_in(pairs((1, 3), (2, 4)))
    race.streams.held = [race.engine._swap_streams["in"].stream]
    return race.engine, race.streams, regular


def values(pages, *numbers):
    """Return the value of each page, whose bytes are all equal."""
    found = [
        {value for r in range(len(pages.sizes)) for value in pages.fragment(r)[n].tolist()}
        for n in numbers
    ]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


@pytest.mark.parametrize("form", FORMS)
def test_expedited_swap_in_overtakes_regular_swap_in(form):
    swap, streams, regular = held_back(form)
    expedited = swap.swap_in(pairs((2, 5), (6, 7)), expedited=True)
    streams.advance()
    assert expedited.poll() and not regular.poll() and not swap.is_idle
    assert values(swap.device, 5, 7, 3, 4) == [2, 6, 0, 0]
    streams.held = []
    streams.advance()
    swap.wait(timeout_s=0)
    assert values(swap.device, 5, 7, 3, 4) == [2, 6, 1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_swap_ins_of_the_same_device_page_run_in_order(form):
    swap, streams, regular = held_back(form)
    expedited = swap.swap_in(pairs((6, 4)), expedited=True)
    last = swap.swap_in(pairs((7, 4)))
    streams.advance()
    assert not expedited.poll() and not regular.poll()
    streams.held = [swap._swap_streams["expedited"].stream]
    streams.advance()
    assert regular.poll() and not last.poll() and values(swap.device, 4) == [2]
    streams.held = []
    streams.advance()
    swap.wait(timeout_s=0)
    assert values(swap.device, 3, 4) == [1, 7]


def test_failed_expedited_swap_in_is_reported():
    swap, streams, regular = held_back("kernel")
    streams.fails = {streams.launches + 1}
    expedited = swap.swap_in(pairs((6, 7), (7, 8)), expedited=True)
    streams.advance()
    with pytest.raises(SwapError, match="expedited swap-in 2 of 2 pages failed: CUDA error: plan"):
        expedited.wait(timeout_s=0)
    assert swap.invalid_pages(expedited).tolist() == [7, 8]
    streams.held = []
    streams.advance()
    regular.wait(timeout_s=0)
    assert swap.invalid_pages(regular).tolist() == []


def test_expedited_swap_in_of_a_host_page_whose_swap_out_failed_is_invalid():
    swap, streams, _ = held_back("kernel")
    streams.fails = {streams.launches + 1}
    swap.swap_out(pairs((5, 6)))
    expedited = swap.swap_in(pairs((6, 7), (8, 9)), expedited=True)
    streams.advance()
    expedited.wait(timeout_s=0)
    assert swap.invalid_pages(expedited).tolist() == [7]


# --- the worker -----------------------------------------------------------------------------------


def plan(step_id=7, **sections):
    none = np.zeros(0, np.int32)
    base = StepPlan(
        step_id, none, np.empty(0, np.uint8), none,
        append_splits=[np.zeros(1, np.int32)], append_ids=[none], replace=[NO_REPLACE],
    )  # fmt: skip
    for name, value in sections.items():
        setattr(base, name, value)
    return base


def simulated_worker(seed=0, **options):
    storage = KVStorage(12, 4, 1, 8, num_layers=LAYERS, dtype=torch.float32)
    streams = SimulatedStreams(seed)
    worker = Worker(
        storage, BlockTable(4, 4, 5, 16, False, "cpu", 4), storage.pages.on_host(9),
        streams=streams, **options,
    )  # fmt: skip
    return worker, streams


def test_report_is_available_once_the_bytes_have_moved():
    worker, streams = simulated_worker()
    step = worker.start(plan(swap_out=pairs((3, 1))))
    assert step.poll() is None
    with pytest.raises(TimeoutError, match=r"swap-out 1 has not finished after 0.01 s"):
        step.wait(timeout_s=0.01)
    streams.advance()
    report = step.wait()
    assert report == step.poll()
    assert (report.step_id, report.completed, report.failed_pages) == (7, True, [])
    assert worker.start(plan(8)).poll().step_id == 8  # there is no work to wait for


@pytest.mark.parametrize("failing", [1, 2])
def test_report_lists_pages_of_failed_job(failing):
    worker, streams = simulated_worker(method="kernel")
    streams.fails = {failing}
    step = worker.start(plan(swap_out=pairs((3, 1), (4, 2)), swap_in=pairs((5, 6), (7, 8))))
    streams.advance()
    report = step.wait(timeout_s=5)
    assert (report.failed_host_pages, report.failed_pages) == (
        ([1, 2], []) if failing == 1 else ([], [6, 8])
    )
    (error,) = step.errors
    what = "swap-out 1" if failing == 1 else "swap-in 2"
    assert str(error) == f"{what} of 2 pages failed: CUDA error: planted"
    streams.fails = set()
    after = worker.start(plan(8, swap_out=pairs((3, 1))))
    streams.advance()
    assert after.wait(timeout_s=5).failed_host_pages == []


def test_error_of_a_late_failure_names_the_job():
    worker, _ = simulated_worker(method="kernel")

    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    job = worker.engine.swap_in(pairs((1, 3)))
    job.done = Broken()
    with pytest.raises(SwapError, match="swap-in 1 of 1 pages failed: CUDA error: an illegal"):
        job.wait(timeout_s=5)
    assert job.poll() and isinstance(job.error, SwapError)


def test_waiting_for_all_reports_a_failure_once():
    worker, streams = simulated_worker(method="kernel")
    streams.fails = {1}
    worker.engine.swap_out(pairs((3, 1)))
    other = worker.engine.swap_in(pairs((5, 6)))
    with pytest.raises(TimeoutError, match=r"one of 2 swaps has not finished after 0.01 s"):
        worker.engine.wait(timeout_s=0.01)
    streams.advance()
    with pytest.raises(SwapError, match="swap-out 1 of 1 pages failed"):
        worker.engine.wait(timeout_s=5)
    assert other.poll() and other.error is None
    worker.engine.wait(timeout_s=0)  # the error has already been raised


def test_page_loaded_from_unfilled_host_page_is_reported():
    worker, streams = simulated_worker(method="kernel")
    streams.fails = {1}
    first = worker.start(plan(1, swap_out=pairs((3, 1), (4, 2))))
    second = worker.start(plan(2, swap_in=pairs((2, 6), (5, 7))))
    third = worker.start(plan(3, swap_out=pairs((3, 2))))  # this swap-out fills the host page
    fourth = worker.start(plan(4, swap_in=pairs((2, 8))))
    streams.advance()
    assert first.wait(5).failed_host_pages == [1, 2]
    assert second.wait(5).failed_pages == [6]
    assert (third.wait(5).failed_host_pages, fourth.wait(5).failed_pages) == ([], [])


def test_late_swap_out_failure_is_detected_without_polling():
    """The failure is detected although only the swap-in is polled."""
    worker, streams = simulated_worker(method="kernel")
    swap = worker.engine
    out = swap.swap_out(pairs((3, 1), (4, 2)))
    back = swap.swap_in(pairs((2, 6), (5, 7)))
    streams.advance()

    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: planted")

    out.done = Broken()
    assert back.poll() and back.error is None
    assert swap.invalid_pages(back).tolist() == [6]
    assert out.error is not None


@pytest.mark.parametrize("method", ["kernel", "copy_engine", "staging"])
def test_calls_during_capture_are_rejected_and_launch_nothing(method):
    worker, streams = simulated_worker(method=method)
    swap = worker.engine
    swap.before_write(np.array([3]))
    job = swap.swap_in(pairs((1, 3)))
    queued, launches = [len(stream) for stream in streams._streams], streams.launches
    streams.capturing = True
    for name, call in {
        "swap_out": lambda: swap.swap_out(pairs((3, 1))),
        "swap_in": lambda: swap.swap_in(pairs((1, 4))),
        "before_read": lambda: swap.before_read(job),
        "before_write": lambda: swap.before_write(np.array([3])),
        "order_after_swap_ins": swap.order_after_swap_ins,
        "Worker.start": lambda: worker.start(plan(swap_out=pairs((3, 1)))),
    }.items():
        with pytest.raises(
            RuntimeError, match=f"{name} was called while the current stream is cap"
        ):
            call()
    assert [len(stream) for stream in streams._streams] == queued
    assert streams.launches == launches and swap._num_jobs == 1
    streams.capturing = False
    swap.before_read(job)
    after = [swap.swap_out(pairs((3, 1))), swap.swap_in(pairs((2, 4)))]
    streams.advance()
    swap.wait(timeout_s=0)
    assert job.poll() and all(each.poll() and each.error is None for each in after)
    streams.capturing = True  # without a job in flight, there is nothing to wait for
    swap.before_write(np.array([3]))
    swap.order_after_swap_ins()


def test_two_threads_may_poll_jobs():
    worker, streams = simulated_worker(method="kernel")
    swap_stream = worker.engine._swap_streams["out"]
    job = worker.engine.swap_out(pairs((3, 1)))
    streams.advance()
    poll = job.poll

    def poll_while_another_thread_forgets():
        swap_stream.in_flight.pop(job.number, None)
        return poll()

    job.poll = poll_while_another_thread_forgets
    swap_stream.forget()
    assert worker.engine.is_idle


@pytest.fixture
def asked(monkeypatch):
    """Record and return the engines used for copies."""
    found = []
    copy_blocks = ops.copy_blocks

    def spy(source, destination, regions, pages, *args):
        found.append(args[2])
        copy_blocks(source, destination, regions, pages, *args)

    monkeypatch.setattr(ops, "copy_blocks", spy)
    return found


@pytest.mark.parametrize("method", ["copy_engine", "staging"])
def test_swap_in_waits_for_swap_out_of_same_page(asked, method):
    worker, streams = simulated_worker(method=method)
    del asked[:]

    def engines_of_bus(*launched):
        """Return the engines used for the copies over the bus.

        `SwapStaging` adds a kernel copy for each copy over the bus, which is left out here.
        """
        for launch, pages in launched:
            launch(pairs(*pages))
        streams.advance()
        bus = [each for each in asked if each != ops.KERNEL]
        del asked[:]
        return sorted(bus)

    swap_out, swap_in = worker.engine.swap_out, worker.engine.swap_in
    in_order, any_order = ops.COPY_ENGINE, ops.COPY_ENGINE_SETTLED
    assert engines_of_bus((swap_out, [(3, 1)]), (swap_in, [(1, 4)])) == [in_order, in_order]
    assert engines_of_bus((swap_in, [(1, 5)])) == [any_order]  # the swap-out has finished
    another = (swap_out, [(3, 2)]), (swap_in, [(1, 6)])
    assert engines_of_bus(*another) == [in_order, any_order]
    one_of_two = (swap_out, [(5, 2)]), (swap_in, [(1, 6), (2, 7)])
    assert engines_of_bus(*one_of_two) == [in_order, in_order]


def test_staging_without_memory_falls_back_with_a_warning(monkeypatch):
    def no_memory(self, num_bytes):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    monkeypatch.setattr(Pages, "staging", no_memory)
    with pytest.warns(
        RuntimeWarning, match="64 MiB of device memory for staging are not available"
    ):
        worker, streams = simulated_worker()
    several = pairs(*zip(range(1, 9), range(8, 0, -1)))
    assert worker.engine.method_for("out", several) == "kernel"
    step = worker.start(plan(swap_out=pairs((3, 1))))
    streams.advance()
    assert step.wait(5).failed_host_pages == []
    with pytest.raises(torch.OutOfMemoryError):
        simulated_worker(method="staging")


# For each of two pages: the launch to staging, and the one from staging.
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_partially_failed_job_ends_after_its_launched_work(direction, failing):
    for seed in range(20):
        worker, streams = simulated_worker(seed, method="staging", staging_bytes=1)
        streams.fails = {failing}
        job = getattr(worker.engine, f"swap_{direction}")(pairs((3, 1), (4, 2)))
        assert job.error is not None and not job.poll()
        while not job.poll():
            streams.advance(1)
        staging = worker.engine._swap_streams[direction].staging
        assert not any(map(callable, [*staging.first, *staging.last]))


# --- rejected arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(("moves", "num_runs"), [
    ([(1, 2), (2, 3)], 1),
    ([(2, 3), (1, 2)], 1),  # both sides are in descending order
    ([(1, 3), (2, 2)], 2),
    ([(1, 1), (2, 3)], 2),
    ([(1, 1), (3, 3)], 2),
])  # fmt: skip
def test_runs_need_consecutive_pages_on_both_sides(moves, num_runs):
    pages = Pages.allocate(6, [[256]])
    swaps = SwapEngine(pages, pages.on_host(4))
    assert swaps.num_fragments("out", pairs(*moves)) == num_runs


def engine(**options):
    pages = Pages.allocate(6, [[16]] * 2)
    return SwapEngine(pages, pages.on_host(4), **options)


@pytest.mark.parametrize(("call", "given", "message"), [
    ("swap_out", pairs((6, 1)), r"swap_out\[0\] reads page 6: expected 1 to 5"),
    ("swap_out", pairs((1, 1), (2, 4)), r"swap_out\[1\] writes to page 4: expected 1 to 3"),
    ("swap_in", pairs((4, 1)), r"swap_in\[0\] reads page 4: expected 1 to 3"),
    ("swap_in", pairs((1, 0)), r"swap_in\[0\] writes to page 0: expected 1 to 5"),
    ("swap_in", pairs((1, 2), (3, 2)), "swap_in writes to page 2 twice: expected one write"),
    ("swap_in", np.array([1, 2]), r"swap_in has shape \[2\]: expected \[n, 2\]"),
    ("swap_out", np.array([[1.5, 2]]), "swap_out has dtype float64: expected integers"),
    ("swap_out", np.array([[1, 1], [2**63, 2]], np.uint64),
     r"swap_out\[1\] has 9223372036854775808: expected int64"),
    ("before_write", [3, -6], r"before_write\[1\] is page -6: expected 0 to 5"),
    ("before_write", [100], r"before_write\[0\] is page 100: expected 0 to 5"),
    ("before_write", [1.5], "before_write has dtype float64: expected integers"),
])  # fmt: skip
def test_invalid_pages_move_nothing(call, given, message):
    e = engine()
    e.device.memory.fill_(3)
    e.host.memory.fill_(4)
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(e, call)(given)
    assert (e.device.memory == 3).all() and (e.host.memory == 4).all()


def test_invalid_options_are_reported():
    with pytest.raises(ValueError, match="expected one of kernel, copy_eng"):
        engine(method="dma")
    with pytest.raises(TypeError, match="calibration is 'fast': expected a Calibration or None"):
        engine(calibration="fast")
    with pytest.raises(ValueError, match="staging_bytes is -1: expected 0 to"):
        engine(staging_bytes=-1)
    pages = Pages.allocate(6, [[16]] * 2)
    with pytest.raises(
        ValueError, match="source's pages have 2 fragments in 2 layers, but the dest"
    ):
        SwapEngine(pages, Pages.allocate(6, [[16]]))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", [{}, {"backend": "BLOCK_MAJOR", "cross_layers": True}])
def test_compute_swap_out_reuse_swap_in_on_a_device(form, backend):
    """Like `Race` on the simulated device, but with real streams and slow copies."""
    storage = KVStorage(
        40, 64, 4, 128, num_layers=LAYERS, dtype=torch.float32, device="cuda", **backend
    )
    pages = storage.pages
    host = pages.on_host(40)
    options = {**FORMS[form]}
    swap = SwapEngine(pages, host, **options)
    chance = random.Random(0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    device, hosted = dict.fromkeys(range(1, 40), 0.0), {}
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)

    def look(page):
        for layer in range(LAYERS):
            for cache in (storage.key_cache(layer), storage.value_cache(layer)):
                wrong.add_((cache[page] != device[page]).sum())

    for layer in range(LAYERS):
        storage.key_cache(layer).zero_()
        storage.value_cache(layer).zero_()
    # Run the given number of steps, or by default for 3 s and at least until pages have been
    # reused.
    steps = int(os.environ.get("KVCACHE_TEST_SWAP_STEPS", "0"))
    deadline = time.monotonic() + 3
    number = 0
    last = torch.cuda.current_stream()
    while number < (steps or 2000) and (steps or number <= 20 or time.monotonic() < deadline):
        stream = chance.choice(streams)  # callers that switch streams must order them themselves
        stream.wait_stream(last)
        last = stream
        with torch.cuda.stream(stream):
            swap.order_after_swap_ins()
            number += 1
            chosen = chance.sample(sorted(device), 6)
            swap.before_write(np.array(chosen))
            for page in chosen[:3]:
                device[page] = float(number)
                for layer in range(LAYERS):
                    storage.key_cache(layer)[page] = number
                    storage.value_cache(layer)[page] = number
            targets = chance.sample(range(1, 40), 3)
            swap.swap_out(pairs(*zip(chosen[:3], targets)))
            hosted |= {target: device[page] for page, target in zip(chosen, targets)}
            swap.before_write(np.array(chosen[:3]))
            for page in chosen[:3]:
                device[page] = -float(number)
                for layer in range(LAYERS):
                    storage.key_cache(layer)[page] = -number
                    storage.value_cache(layer)[page] = -number
            back = chance.choices(sorted(hosted), k=3)
            job = swap.swap_in(pairs(*zip(back, chosen[3:])), expedited=chance.random() < 0.4)
            for page, target in zip(back, chosen[3:]):
                device[target] = hosted[page]
            swap.before_read(job)
            for page in chosen:
                look(page)
    swap.wait(timeout_s=30)
    torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kernel", "copy_engine", "staging"])
def test_immediate_swap_in_reads_new_bytes(method):
    """The caller does not wait between the two calls.

    Host pages must not be read before they are filled.
    """
    pages = Pages.allocate(9, [[4096, 4096]] * 2, device="cuda")
    swap = SwapEngine(pages, pages.on_host(9), method=method)
    for number in range(1, 21):
        for region in range(4):
            pages.fragment(region)[1:3] = number
        torch.cuda.synchronize()
        swap.swap_out(pairs((1, 3), (2, 6)))
        swap.swap_in(pairs((3, 5), (6, 6))).wait(timeout_s=30)
        for region in range(4):
            assert (pages.fragment(region)[5:7] == number).all()


@pytest.mark.gpu
def test_staging_occupies_few_multiprocessors(monkeypatch):
    asked = []
    copy_blocks = ops.copy_blocks

    def spy(*args):
        asked.append((args[6], args[8]))  # engine and number of thread blocks
        copy_blocks(*args)

    monkeypatch.setattr(ops, "copy_blocks", spy)
    pages = Pages.allocate(9, [[4096, 4096]] * 2, device="cuda")
    swap = SwapEngine(pages, pages.on_host(9), method="staging")
    del asked[:]
    swap.swap_out(pairs((1, 3)))
    swap.wait(timeout_s=30)
    gathering = [blocks for engine, blocks in asked if engine == ops.KERNEL]
    assert len(asked) == 2 and gathering == [16]


@pytest.mark.gpu
def test_kernel_requires_pinned_host_memory():
    pages = Pages.allocate(4, [[64]], device="cuda")
    with pytest.raises(ValueError, match="method is 'kernel' and the host's pages are not pinned"):
        SwapEngine(pages, pages.on_host(4, pin_memory=False), method="kernel")
    swap = SwapEngine(pages, pages.on_host(4, pin_memory=False))
    assert swap.method_for("in", pairs((1, 2))) == "copy_engine"
