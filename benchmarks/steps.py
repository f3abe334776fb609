# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a decode step.

Each call is measured in a step that allocates a block for every row. In addition, `Engine.step` is
compared with a loop over the same public calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Result, median_times, seconds_per_call
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

_STEPS, _PROMPT = 400, 16
_IN_A_ROW = (
    16  # number of consecutive steps of the engine, and of the loop, that are timed together
)
# Number of rows -> upper bounds in us for `Worker.apply` and for the whole step.
_BARS = {8: (3.0, 8.0), 256: (None, 25.0), 1024: (None, None)}


def all_results() -> Iterator[Result]:
    for num_rows, (apply_bar, step_bar) in _BARS.items():
        parts = _seconds(num_rows)
        label = f"decode step that allocates a block per row, {num_rows} rows"
        yield Result(label, "us", sum(parts.values()) * 1e6, bar=step_bar)
        for name, seconds in parts.items():
            bar = apply_bar if name == "apply" else None
            yield Result(f"  {name}", "us", seconds * 1e6, bar=bar)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # on a busy machine, the threads of small operations would wait for each other
    for num_requests in (8, 64, 256):
        yield _engine_result(num_requests)
    torch.set_num_threads(num_threads)


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
    return Result(
        f"Engine.step, greedy decode of {num_requests} requests, free model",
        "us",
        ours * 1e6,
        peer * 1e6,
        "loop by hand",
        bar=2 * peer * 1e6,
    )


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


def _seconds(num_rows: int) -> dict[str, float]:
    """Return the median time of each call. Blocks have one token, so each token needs a block."""
    num_blocks = num_rows * (_PROMPT + _STEPS) + 1
    manager = KVCacheManager(
        1, num_blocks, _PROMPT + _STEPS, enable_caching=False, num_preallocate_tokens=0
    )
    storage = KVStorage(num_blocks=num_blocks, block_size=1, num_kv_heads=1, head_size=1)
    shape = TableShape(block_size=1, max_num_blocks=_PROMPT + _STEPS)
    tables = BlockTables([shape], max_num_reqs=num_rows, max_num_tokens=num_rows * _PROMPT)
    worker = Worker(storage, tables)
    plan = manager.step(new=[Request(f"r{i}", np.arange(_PROMPT)) for i in range(num_rows)])
    manager.report(worker.apply(plan))
    rows, counts = plan.rows, np.ones(num_rows, np.int64)
    positions = np.full(num_rows, _PROMPT, np.int64)
    taken: dict[str, list[int]] = {"step": [], "apply": [], "slots": [], "commit": [], "report": []}
    now = time.perf_counter_ns
    for _ in range(_STEPS):
        at = [now()]
        plan = manager.step(rows=rows, num_tokens=counts)
        at.append(now())
        report = worker.apply(plan)
        at.append(now())
        tables.compute_slot_mapping(rows, positions)
        at.append(now())
        tables.commit_slot_mapping(num_rows)
        at.append(now())
        manager.report(report)
        at.append(now())
        assert len(plan.append_ids[0]) == num_rows
        positions += 1
        for times, start, stop in zip(taken.values(), at, at[1:]):
            times.append(stop - start)
    return {name: statistics.median(times) / 1e9 for name, times in taken.items()}
