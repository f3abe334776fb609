# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step with 64 requests and a tiny model, and kvcache's share of this time.

`python -m benchmarks.engine_step [--model NAME] [--requests N]`. The model is minimal, so kvcache's
measured shares are upper bounds. Requires the extra `transformers`.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import attach
from kvcache_serve.engine.transformers.tiny_models import tiny_model


class Timed:
    """Measures the seconds spent in calls to one method of an object."""

    def __init__(self, owner: object, name: str) -> None:
        self.seconds = 0.0
        call = getattr(owner, name)
        setattr(owner, name, self._timing(call))

    def _timing(self, call: Callable) -> Callable:
        def timed(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(name: str, num_requests: int, num_steps: int = 150) -> dict[str, float]:
    """Return the median time of each part of a decode step, in microseconds."""
    torch.set_num_threads(1)
    paged = attach(
        tiny_model(name),
        "64MiB",
        max_model_len=512,
        max_num_seqs=num_requests,
        max_num_batched_tokens=4096,
    )
    engine = Engine(paged)
    rng = np.random.default_rng(0)
    for i in range(num_requests):
        engine.add(rng.integers(1, 512, 60 + i % 16), SamplingParams(max_tokens=400))
    for _ in range(5):
        engine.step()
    cache = paged.cache
    parts = {
        "manager.step": Timed(cache.manager, "step"),
        "manager.report": Timed(cache.manager, "report"),
        "worker.apply": Timed(cache.worker, "apply"),
        "slot mapping": Timed(cache.tables, "compute_slot_mapping"),
        "K and V: write": Timed(cache.storages[0], "write"),
        "K and V: gather": Timed(cache.storages[0], "gather"),
        "model, these included": Timed(paged, "forward"),
        "engine.step": Timed(engine, "step"),
    }
    rows = []
    for _ in range(num_steps):
        before = {part: each.seconds for part, each in parts.items()}
        engine.step()
        rows.append({part: each.seconds - before[part] for part, each in parts.items()})
    paged.detach()
    return {part: float(np.median([row[part] for row in rows])) * 1e6 for part in parts}


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama")
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args()
    found = measure(args.model, args.requests)
    whole = found["engine.step"]
    print(
        f"{args.model}, {args.requests} requests: a decode step takes {whole:,.0f} us on the host"
    )
    for part, micros in found.items():
        print(f"  {part:24} {micros:10,.1f} us  {micros / whole:6.2%}")
    rest = whole - found["model, these included"]
    print(f"  {'all but the model':24} {rest:10,.1f} us  {rest / whole:6.2%}")


if __name__ == "__main__":
    main()
