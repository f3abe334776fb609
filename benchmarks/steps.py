# SPDX-License-Identifier: Apache-2.0
"""Measures each call of a decode step, and `Engine.step` beside a loop over the same public calls."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks import peers
from benchmarks.measure import Result, median_times, one_thread, seconds_per_call
from benchmarks.tables import NumpyTables
from kvcache import (
    BlockTables,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Request,
    TableShape,
    Worker,
    build,
    plan_cache,
)
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.batch import Batch

_IN_A_ROW = 16  # steps of the engine, and of the loop, that are timed together
_CALLS = ("step", "apply", "slots", "report")
# (rows, does each row need a block?) -> limits in us of `Worker.apply` and of the whole step.
_BARS = {
    (8, False): (3, 30),
    (256, False): (3, 100),
    (8, True): (3, 8),
    (256, True): (None, 25),
    (1024, True): (None, None),
}


def all_results() -> Iterator[Result]:
    for (num_rows, allocates), (apply_bar, step_bar) in _BARS.items():
        us = _calls(num_rows, allocates)
        peer, whole = us.pop("peer", None), sum(us[name] for name in _CALLS)
        name = f"all calls of a decode step, {num_rows} rows"
        name += ", a block per row" if allocates else ""
        against = "" if peer is None else "Python, row by row; numpy slot mapping"
        yield Result(name, "us", whole, peer, against, step_bar)
        for call in _CALLS:
            yield Result(
                f"{name}: {call}", "us", us[call], bar=apply_bar if call == "apply" else None
            )
    with one_thread():
        for num_requests in (8, 64, 256):
            yield _engine_result(num_requests)


class _FreeModel:
    """A model whose forward pass takes no time."""

    vocab_size = 100

    def __init__(self, num_requests: int) -> None:
        layers = [LayerSpec("layer", "full_attention", 16, 1, 8)]
        plan = plan_cache(layers, 2**26, max_model_len=2048, max_num_batched_tokens=2**14)
        self.cache = build(plan, max_num_reqs=num_requests)
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(num_requests, self.vocab_size, generator=generator)

    def forward(self, batch: Batch | None = None) -> torch.Tensor:
        return self._logits


def _engine_result(num_requests: int) -> Result:
    engine = Engine(_FreeModel(num_requests))
    prompts = [np.arange(1, 33 + i % 16) for i in range(num_requests)]
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=1900))
    loop = _loop_by_hand(_FreeModel(num_requests), prompts)
    for _ in range(20):
        assert len(engine.step()) == num_requests
        next(loop)
    turns = [seconds_per_call(call, _IN_A_ROW) for call in (engine.step, lambda: next(loop))]
    ours, peer = (taken / _IN_A_ROW for taken in median_times(*turns, rounds=60))
    name = f"Engine.step, greedy decode of {num_requests} requests, free model"
    return Result(name, "us", ours * 1e6, peer * 1e6, "loop by hand", 2 * peer * 1e6)


def _loop_by_hand(model: _FreeModel, prompts: list[np.ndarray]) -> Iterator[None]:
    """Decode one token per request in each step, with the calls shown in docs/serving.md."""
    manager, worker, tables = model.cache.manager, model.cache.worker, model.cache.tables
    requests = [Request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    plan = manager.step(new=requests)
    manager.report(worker.apply(plan))
    rows, counts = plan.rows, np.ones(len(requests), np.int64)
    positions = np.array([request.num_tokens for request in requests])
    while True:
        for request, token in zip(requests, model.forward().argmax(-1).tolist()):
            request.append_tokens([token])
        plan = manager.step(rows, counts)
        report = worker.apply(plan)
        tables.compute_slot_mapping(rows, positions)
        tables.commit_slot_mapping(len(rows))
        manager.report(report)
        positions += 1
        yield


def _calls(num_rows: int, allocates: bool) -> dict[str, float]:
    """Return the median microseconds of each call of a decode step, and of the baseline's step.

    If the step allocates, blocks have one token, so that every row needs a block. Otherwise, no row
    does. Tokens are appended and hashed, and the baseline, Python code with NumPy tables, runs in turn.
    """
    num_steps, size, prompt = (400, 1, 16) if allocates else (64, 16, 20)
    longest = prompt + num_steps
    num_blocks = num_rows * (-(-longest // size) + 1) + 1
    manager = KVCacheManager(
        size,
        num_blocks,
        longest + size,
        enable_caching=not allocates,
        num_preallocate_tokens=0 if allocates else num_steps,
        max_num_reqs=num_rows,
    )
    shape = TableShape(size, -(-longest // size) + 1)
    tables = BlockTables([shape], max_num_reqs=num_rows, max_num_tokens=num_rows * prompt)
    worker = Worker(KVStorage(num_blocks, size, 1, 1), tables)
    prompts = [np.arange(prompt, dtype=np.int32) + i for i in range(num_rows)]
    plan = manager.step(new=[Request(f"r{i}", each) for i, each in enumerate(prompts)])
    manager.report(worker.apply(plan))
    rows, ones = plan.rows, np.ones(num_rows, np.int32)
    positions = np.full(num_rows, prompt, np.int64)
    peer = None if allocates else _python_step(prompts, size, num_blocks)
    taken = defaultdict(list)
    for _ in range(num_steps):
        if peer:
            start = time.perf_counter_ns()
            peer(positions)
            taken["peer"].append(time.perf_counter_ns() - start)
        at = [time.perf_counter_ns()]
        plan = manager.step(rows, ones, token_ids=None if allocates else ones)
        at.append(time.perf_counter_ns())
        report = worker.apply(plan)
        at.append(time.perf_counter_ns())
        tables.compute_slot_mapping(rows, positions)
        tables.commit_slot_mapping(num_rows)
        at.append(time.perf_counter_ns())
        manager.report(report)
        at.append(time.perf_counter_ns())
        assert len(plan.append_ids[0]) == (num_rows if allocates else 0) and report.completed
        positions += 1
        for name, start, stop in zip(_CALLS, at, at[1:]):
            taken[name].append(stop - start)
    return {name: statistics.median(times) / 1e3 for name, times in taken.items()}


def _python_step(
    prompts: list[np.ndarray], size: int, num_blocks: int
) -> Callable[[np.ndarray], None]:
    """Return a decode step in Python, row by row, with slot mapping in NumPy."""
    cache, num_rows = peers.PrefixCache(num_blocks), len(prompts)
    running = [peers.Sequence(cache, each.tolist(), size) for each in prompts]
    tables, rows = NumpyTables(1, num_rows, 64, num_rows), np.arange(num_rows)
    for row, sequence in enumerate(running):
        tables.append_row(0, sequence.table, row)

    def step(positions: np.ndarray) -> None:
        new = peers.decode_step(cache, running, size, [1] * num_rows)
        for row, blocks in enumerate(new):
            if blocks:
                tables.append_row(0, blocks, row)
        tables.slot_mapping(rows, positions, size)

    return step
