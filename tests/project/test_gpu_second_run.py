# SPDX-License-Identifier: Apache-2.0
"""Stages of `make gpu` that move data between processes or load beside a step, with a stand-in for
NIXL and with planted defects.
"""

import contextlib
import json
import re
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import transports
from benchmarks.gpu import device_transfers, load_beside_step, say, sizes
from kvcache.transfer import fetching, memory
from kvcache.transfer.transport.spans import Spans
from kvcache.worker.pages import pinning
from kvcache.worker.swap.streams import _Past
from kvcache_exchange.disaggregation import rank
from kvcache_exchange.transport import registered
from kvcache_lab.bandwidth import hold
from tests.machinery import nixl_stand_in
from tests.machinery.gpu_less import counts


@pytest.fixture(autouse=True)
def no_failures(monkeypatch):
    monkeypatch.setattr(say, "_num_failed", 0)


def told(capsys):
    """Return the lines of a stage's output that follow the protocol."""
    return [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]


def failures(rows):
    return [row["failed"] for row in rows if "failed" in row]


# Transfers --------------------------------------------------------------------------------------------


class ThreadAsProcess:
    """A thread that replaces one process of a pair, because the stand-in's agents can only reach
    each other within one process.
    """

    pid = 0

    def __init__(self, target, args, daemon):
        def run():
            # The parent may already have closed the pipes.
            with contextlib.suppress(OSError, EOFError):
                target(*args)

        self._thread = threading.Thread(target=run, daemon=daemon)
        self.start, self.join = self._thread.start, self._thread.join

    def kill(self):
        pass


@pytest.fixture
def small(monkeypatch):
    """Use threads instead of processes, and transfer only a few bytes."""
    context = SimpleNamespace(Pipe=Pipe, Process=ThreadAsProcess)
    monkeypatch.setattr(transports, "get_context", lambda _: context)
    close = transports.Pair.close

    def close_pipes(pair):
        for pipe in pair.pipes:
            pipe.close()
        close(pair)

    monkeypatch.setattr(transports.Pair, "close", close_pipes)
    monkeypatch.setattr(transports.Pair, "_signal", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(device_transfers, "_TOTAL", 1 << 20)
    monkeypatch.setattr(device_transfers, "_ROUNDS", 1)
    monkeypatch.setattr(device_transfers, "why_not", lambda _: None)


needs_stand_in = pytest.mark.skipif(
    not counts.is_available(), reason="the stand-in can only access simulated memory"
)


@pytest.mark.gpu
@needs_stand_in
def test_device_memory_is_moved_over_nixl_directly_and_packed(small, capsys):
    with nixl_stand_in.stand_in() as moved:
        assert device_transfers.main(["nixl"]) == 0
        direct = {size for _, *kinds, size in moved if kinds == ["VRAM", "VRAM"]}
    assert {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20} <= direct
    rows = told(capsys)
    timed = {(row["way"], row["fragment"]) for row in rows if row.get("kind") == "transfer"}
    assert len(timed) == 5 + 5 + 4
    assert any(
        "14 of 14 kinds of transfers delivered the correct bytes" in str(row) for row in rows
    )
    assert all(row["contiguous_gb_per_s"] for row in rows if row.get("kind") == "transfer")


@pytest.mark.gpu
@needs_stand_in
def test_wrong_bytes_over_nixl_are_detected_and_not_timed(small, monkeypatch, capsys):
    copy = nixl_stand_in.ctypes.memmove

    def shifted(to, source, size):  # the last byte of each descriptor is not transferred
        copy(to, source, size - (size == 16 << 10))

    monkeypatch.setattr(nixl_stand_in.ctypes, "memmove", shifted)
    with nixl_stand_in.stand_in():
        assert device_transfers.main(["nixl"]) == 1
    rows = told(capsys)
    wrong = [text for text in failures(rows) if "wrong bytes arrived" in text]
    assert {text.split(":")[0] for text in wrong} >= {"direct, 16 KiB", "plain NIXL, 16 KiB"}
    timed = {(row["way"], row["fragment"]) for row in rows if row.get("kind") == "transfer"}
    assert ("direct", 64 << 10) in timed and ("direct", 16 << 10) not in timed


@pytest.mark.gpu
@needs_stand_in
def test_one_launch_per_fragment_is_detected(small, monkeypatch, capsys):
    scatter = registered.RegisteredMemory.scatter

    def one_by_one(memory, staging, tile, streams):
        sizes_ = np.tile(tile.length, len(tile.bases))
        for address, size, end in zip(tile.addresses(), sizes_, np.cumsum(sizes_)):
            one = Spans(np.array([address]), np.zeros(1, np.int64), np.array([size]))
            scatter(memory, staging[end - size : end], one, streams)

    monkeypatch.setattr(registered.RegisteredMemory, "scatter", one_by_one)
    assert device_transfers.main(["tcp"]) == 1
    (text,) = failures(told(capsys))
    assert text.startswith("staged, 4 KiB") and text.endswith(
        "launches and copies for 256 fragments"
    )


@pytest.mark.gpu
@needs_stand_in
@pytest.mark.filterwarnings("ignore:.*could not be pinned")
def test_unpinned_staging_memory_is_detected(small, monkeypatch, capsys):
    def refuse(*_):
        raise pinning._PinningError("cudaHostRegister: out of memory")

    monkeypatch.setattr(pinning, "_register", refuse)
    assert device_transfers.main(["tcp"]) == 1
    assert any("copies of pageable memory" in text for text in failures(told(capsys)))


# Loads ------------------------------------------------------------------------------------------------


def begin_at_once(monkeypatch):
    """Start loads without waiting for the previous step."""

    class Unordered(rank._QueuedStep):
        def __new__(cls, at, step, after=None):
            return super().__new__(cls, at, step, after and _Past())

    monkeypatch.setattr(rank, "_QueuedStep", Unordered)


def end_early(monkeypatch):
    """Complete loads while their pages are still being permuted."""
    permute = fetching.Fetch._permute

    def slow(*args):
        hold(2.0)  # longer than the steps in flight, even on a busy machine
        memory_permute(*args)

    def begin(fetch):
        permute(fetch)
        fetch._permuting = []

    memory_permute = memory.permute_pages
    monkeypatch.setattr(memory, "permute_pages", slow)
    monkeypatch.setattr(fetching.Fetch, "_permute", begin)


@pytest.mark.gpu
@pytest.mark.parametrize("defect", [begin_at_once, end_early])
def test_load_out_of_order_is_detected(defect, monkeypatch, capsys):
    defect(monkeypatch)
    monkeypatch.setattr(sizes, "REHEARSAL", True)
    monkeypatch.setattr(load_beside_step, "TRANSPORTS", ("tcp",))
    assert load_beside_step.main() == 1
    (text,) = failures(told(capsys))
    wrong = (
        r"tcp: AssertionError: (wrong bytes after the load|load 0: the next step read other bytes)"
    )
    assert re.match(wrong, text)
