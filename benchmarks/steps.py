"""A decode step in which every row gets a block: what each call of a user's step costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Result
from kvcache import (
    BlockTables,
    KVCacheManager,
    KVStorage,
    Request,
    TableShape,
    Worker,
)

_STEPS, _PROMPT = 400, 16
# By rows: upper bounds in us of `Worker.apply`, and of the whole step.
_BARS = {8: (3.0, 8.0), 256: (None, 25.0), 1024: (None, None)}


def all_results() -> Iterator[Result]:
    for num_rows, (apply_bar, step_bar) in _BARS.items():
        parts = _seconds(num_rows)
        label = f"decode step that allocates a block per row, {num_rows} rows"
        yield Result(label, "us", sum(parts.values()) * 1e6, bar=step_bar)
        for name, seconds in parts.items():
            bar = apply_bar if name == "apply" else None
            yield Result(f"  {name}", "us", seconds * 1e6, bar=bar)


def _seconds(num_rows: int) -> dict[str, float]:
    """Return the median of each call; blocks of one token, so that each token needs a block."""
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
