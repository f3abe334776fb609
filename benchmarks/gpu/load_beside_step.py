# SPDX-License-Identifier: Apache-2.0
"""Stage: loads KV from another process into pages while captured decode steps run.

The sender is an engine in a separate process with pages in host memory, so only the load disturbs
the steps. The sender's blocks have half the size and HND layout, so received pages are also
permuted. The stage first checks the bytes and order of each load, and then measures the slowdown of
the steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.gpu import say, sizes
from benchmarks.gpu.device_transfers import why_not
from kvcache import KVStorage, Request
from kvcache.sources import Arrived
from kvcache.worker.swap.streams import PolledEvent
from kvcache_exchange.transport.factory import TRANSPORTS
from kvcache_lab.bandwidth import hold
from tests.machinery.disaggregation_engine import Engine, EngineProcess

_BLOCK = 32
_NUM_TOKENS = 1024  # tokens per load; 64 MiB with the sizes below
_SIZES = {"num_layers": 16, "num_heads": 8, "head_size": 128}
_REHEARSED = {"num_layers": 2, "num_heads": 2, "head_size": 8}
_WIDTH, _NUM_PRODUCTS = 8192, 16  # square matrices per step: about 20 ms at 800 TFLOP/s
_IN_FLIGHT = 2
_LEAST_HELD_S = 0.3  # longer than it takes to start a load after a step
_ROUNDS = 5
_LOAD_S = 30.0  # time limit of a load
_POLL_S = 50e-6


def main() -> int:
    for name in TRANSPORTS:
        if (reason := why_not(name)) is not None:
            say.skipped(f"{reason}: loads over NIXL were not checked")
            continue
        with say.attempt(name):
            measure(name)
    return say.exit_code()


def measure(name: str) -> None:
    """Test one transport: check bytes and order, then measure the slowdown."""
    num_tokens = 2 * _BLOCK if sizes.REHEARSAL else _NUM_TOKENS
    shape = {**(_REHEARSED if sizes.REHEARSAL else _SIZES), "dtype": "bfloat16"}
    num_blocks = num_tokens // _BLOCK
    options = {"transport": name, "timeout_s": _LOAD_S}
    sender = EngineProcess(
        "sender", block=_BLOCK // 2, layout="HND", num_blocks=4 * num_blocks + 2,
        max_model_len=2 * num_tokens, options=options, **shape,
    )  # fmt: skip
    receiver = Engine(
        "receiver", block=_BLOCK, num_blocks=2 * num_blocks + 1, max_model_len=2 * num_tokens,
        options=options, manager={"enable_caching": False}, device="cuda", **shape,
    )  # fmt: skip
    with sender, receiver, torch.cuda.stream(torch.cuda.Stream()):
        loads = Loads(sender, receiver, num_tokens)
        step = Step(receiver.storages[0][0], num_blocks)
        rounds = sizes.repeats(_ROUNDS)
        loads.seconds_alone()  # also establishes the connection
        held_s = max(_LEAST_HELD_S, 4 * loads.seconds_alone())
        for number in range(rounds):
            check_order(loads, step, number, held_s)
        say.row(kind="order", transport=name, loads=rounds, bytes=loads.num_bytes)
        say.learned(
            f"{name}: {rounds} loads of {loads.num_bytes:,} bytes began only after the step that wrote "
            "to their pages, and the next step read the loaded bytes"
        )
        report_slowdown(name, loads, step, rounds)


class Step:
    """A decode step in a CUDA graph on the current stream.

    The step consists of matrix products, token writes and page reads.

    slots: int64[t], slots written at the end of the step; -1: none. watched: int64[n], pages read
    after the writes. seen: [layers, 2, n, ...], the contents of the watched pages.
    """

    def __init__(self, storage: KVStorage, num_watched: int) -> None:
        width = 64 if sizes.REHEARSAL else _WIDTH
        self._factors = torch.randn(2, width, width, device="cuda").bfloat16()
        self._product = torch.empty_like(self._factors[0])
        caches = [(storage.key_cache(i), storage.value_cache(i)) for i in range(storage.num_layers)]
        self.num_slots = storage.pages.num_blocks * storage.block_size
        self.slots = torch.full((self.num_slots,), -1, device="cuda")
        self.watched = torch.zeros(num_watched, dtype=torch.int64, device="cuda")
        token = caches[0][0].shape[2:]
        self._tokens = torch.randn(2, self.num_slots, *token, device="cuda").to(storage.dtype)
        self.seen = torch.empty(
            storage.num_layers, 2, num_watched, *caches[0][0].shape[1:],
            dtype=storage.dtype, device="cuda",
        )  # fmt: skip
        self._flights: list[torch.cuda.Event] = []

        def run() -> None:
            for _ in range(sizes.repeats(_NUM_PRODUCTS)):
                torch.matmul(*self._factors, out=self._product)
            for layer, parts in enumerate(caches):
                storage.write(layer, *self._tokens, self.slots)
                for part, cache in enumerate(parts):
                    torch.index_select(cache, 0, self.watched, out=self.seen[layer, part])

        run()  # loads kernels and creates the libraries' workspaces
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            run()

    def replay(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch the step, with at most `_IN_FLIGHT` steps in flight.

        Returns its start and end events.
        """
        if len(self._flights) > _IN_FLIGHT:
            self._flights.pop(0).synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        self._flights.append(end)
        return start, end


class Loads:
    """Loads from the sender into the receiver's pages, for consecutive requests with the same tokens."""

    def __init__(self, sender: EngineProcess, receiver: Engine, num_tokens: int) -> None:
        self._sender, self.receiver = sender, receiver
        self._tokens = list(range(num_tokens))
        self._count = 0
        pages = receiver.storages[0][0].pages
        self.num_bytes = num_tokens // _BLOCK * pages.page_bytes

    def publish(self) -> tuple[Request, dict]:
        """Return the next request and the sender's offer of its KV."""
        name, self._count = f"r{self._count}", self._count + 1
        told = self._sender.ask("prefill", timeout_s=60, id=name, tokens=self._tokens)
        return Request(name, [*self._tokens, 7]), told["offer"]

    @contextmanager
    def begun(self, request: Request, offer: dict) -> Iterator[Request]:
        """Start a load after the work launched on the current stream.

        The load's blocks are freed when it ends.
        """
        assert self.receiver.admit(request, offer), f"{request.request_id} was not admitted"
        try:
            yield request
        finally:
            self.receiver.manager.free(request)

    def seconds_alone(self) -> float:
        """Measure a load without concurrent steps."""
        published = self.publish()
        begin = time.perf_counter()
        with self.begun(*published) as request:
            while not self.poll(request):
                time.sleep(_POLL_S)
            return time.perf_counter() - begin

    def poll(self, request: Request) -> bool:
        """Return whether the load has finished. Raises AssertionError if it failed."""
        for loaded in self.receiver.connector.poll():
            count = len(self._tokens)
            assert loaded == Arrived(request, count, count), f"the load ended as {loaded}"
            return True
        return False

    def check(self, request: Request) -> None:
        """Raise AssertionError unless every token of the load is in the pages."""
        wrong = self.receiver.wrong(request, len(self._tokens))
        assert wrong is None, f"wrong bytes after the load: {wrong}"

    def blocks(self, request: Request) -> torch.Tensor:
        """Return the pages of the loaded tokens, int64[n]."""
        ids = self.receiver.manager.block_ids(request)[: len(self._tokens) // _BLOCK]
        return torch.from_numpy(ids.astype(np.int64))


def check_order(loads: Loads, step: Step, number: int, held_s: float) -> None:
    """Start a load after a step that still writes to the load's pages, and read the pages in a
    later step.

    The first step is delayed so long that a load that does not wait for this step would finish
    before it.
    """
    published = loads.publish()
    step.slots.copy_(torch.arange(step.num_slots))
    hold(held_s)
    step.replay()
    written = PolledEvent()
    written.record()
    with loads.begun(*published) as request:
        time.sleep(held_s / 2)
        assert not written.query(), f"load {number} began too late, so the test is inconclusive"
        step.slots.fill_(-1)
        steps_until_loaded(loads, step, request)
        step.watched.copy_(loads.blocks(request).pin_memory(), non_blocking=True)
        step.replay()
        torch.cuda.current_stream().synchronize()
        loads.check(request)
        pages = loads.blocks(request).cuda()
        storage = loads.receiver.storages[0][0]
        for layer in range(storage.num_layers):
            for part, cache in enumerate((storage.key_cache(layer), storage.value_cache(layer))):
                assert torch.equal(step.seen[layer, part], cache[pages]), (
                    f"load {number}: the next step read other bytes in layer {layer}"
                )


def steps_until_loaded(
    loads: Loads, step: Step, request: Request
) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Launch steps until a load finishes. Return the events around each step without waiting."""
    events, deadline = [], time.monotonic() + _LOAD_S
    while not loads.poll(request):
        assert time.monotonic() < deadline, f"no load within {_LOAD_S:g} s"
        events.append(step.replay())
    return events


def milliseconds(steps: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    """Return the duration of each step, after all steps have ended."""
    torch.cuda.current_stream().synchronize()
    return [start.elapsed_time(end) for start, end in steps]


def report_slowdown(name: str, loads: Loads, step: Step, rounds: int) -> None:
    """Measure steps alone, loads alone, and both together."""
    for _ in range(_IN_FLIGHT):
        step.replay()
    alone = [step.replay() for _ in range(sizes.repeats(50))]
    step_ms = statistics.median(milliseconds(alone))
    seconds: dict[str, list[float]] = {"alone": [], "beside": []}
    beside: list[float] = []
    for _ in range(rounds):
        seconds["alone"].append(loads.seconds_alone())
        published = loads.publish()
        begin = time.perf_counter()
        with loads.begun(*published) as request:
            steps = steps_until_loaded(loads, step, request)
            beside += milliseconds(steps)
            seconds["beside"].append(time.perf_counter() - begin)
    rates = {
        each: loads.num_bytes / statistics.median(taken) / 1e9 for each, taken in seconds.items()
    }
    assert beside, "no step ran during a load, so the test is inconclusive"
    slower = statistics.median(beside) / max(step_ms, 1e-6)
    say.row(
        kind="slowdown", transport=name, step_ms=step_ms, slowdown=slower, steps=len(beside),
        load_gb_per_s=rates["alone"], load_gb_per_s_beside=rates["beside"], bytes=loads.num_bytes,
    )  # fmt: skip
    say.learned(
        f"{name}: a step of {step_ms:.1f} ms takes {slower:.2f} times as long during a load; loads "
        f"{rates['alone']:.2f} GB/s alone, {rates['beside']:.2f} during steps"
    )


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
