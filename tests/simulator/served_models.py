# SPDX-License-Identifier: Apache-2.0
"""A server of a tiny model of transformers. The reference is the model itself.

`python -m tests.simulator.served_models N` performs N runs, and prints as JSON what the comparison and
the sanitizer found (`Judgement`).
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable

import numpy as np
import torch

from kvcache import plan_cache
from kvcache_exchange.store import StoreTier
from kvcache_serve.engine import Engine
from kvcache_serve.engine.transformers import attach, layer_specs
from tests.machinery.dense_models import MODELS, VOCAB_SIZE, dense, logits_of
from tests.machinery.stores import FAULTS, MemoryStore, patient
from tests.simulator.row import Wrong
from tests.simulator.served import Served


class ModelServer(Served):
    """A server whose pool is slightly larger than one request.

    `with_store` adds an in-memory store with random faults of every kind, at a random rate.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self, name: str, seed: int, with_store: bool = False, log: Callable = lambda line: None
    ) -> None:
        rng = np.random.default_rng([seed, MODELS.index(name)])
        self.model = dense(name, 2)
        block_size = int(rng.choice([4, 8, 16]))
        max_model_len = int(rng.integers(64, 140))
        max_num_batched_tokens = int(rng.choice([8, 24, 64, 256]))
        num_drafts = int(rng.integers(1, 5))
        sizes = {"block_size": block_size, "num_speculative_tokens": num_drafts}
        plan = plan_cache(
            layer_specs(self.model, **sizes),
            2**30,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        pages = int(plan.pages_per_request(max_model_len) * rng.choice([1.0, 1.3, 2.0, 6.0])) + 1
        host_pages = int(rng.choice([0, 0.3, 3.0]) * pages)
        options: dict[str, object] = {
            "eviction": str(rng.choice(["lru", "learned"])),
            "num_preallocate_tokens": int(rng.choice([0, 64])),
            "enable_caching": bool(rng.random() < 0.9),
        }
        if with_store:
            options |= {"enable_events": True, "enable_caching": True}
        if host_pages and rng.random() < 0.7:
            options["host_write"] = str(rng.choice(["back", "through"]))
        self.paged = attach(
            self.model,
            pages * plan.page_bytes,
            max_model_len=max_model_len,
            max_num_seqs=int(rng.integers(1, 9)),
            max_num_batched_tokens=max_num_batched_tokens,
            host_budget=host_pages * plan.page_bytes,
            **sizes,
            **options,
        )
        engine = Engine(
            self.paged,
            preemption=str(rng.choice(["swap", "recompute"])),
            drafter=self.draft if rng.random() < 0.5 else None,
            sources=[self._tier(name, seed)] if with_store else [],
        )
        super().__init__(engine, self.paged.cache, seed, float(rng.choice([0, 0, 0.03])), log)

    def logits(self, prompt: list[int], answer: list[int]) -> list:
        return [*logits_of(self.model, prompt, answer)]

    def check_end(self) -> None:
        super().check_end()
        self.paged.detach()

    def _tier(self, name: str, seed: int) -> StoreTier:
        rng = np.random.default_rng([seed, 7])
        rate, cache = float(rng.choice([0, 0.05, 0.2])), self.paged.cache
        store = MemoryStore(
            capacity=int(rng.choice([20, 1000])),
            fault=lambda: str(rng.choice(FAULTS)) if rng.random() < rate else None,
        )
        return StoreTier(
            cache.manager,
            cache.pages,
            store,
            model=name,
            host_pages=cache.host_pages,
            staging_bytes=int(rng.choice([3, 30])) * (cache.pages.page_bytes + 192),
            timeout_s=float(rng.choice([0.02, 5])),
            circuit=patient(),
        )


@dataclasses.dataclass
class Judgement:
    """The findings from several runs of an engine that may be defective.

    A run is wrong if any of its answers differs from the model's own. `reported`: number of runs
    with sanitizer reports, keyed by the kind of the first report. `failures`: number of runs that
    ended with an error, keyed by the error's text.
    """

    runs: int = 0
    wrong: int = 0
    wrong_and_reported: int = 0
    reported: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: dict[str, int] = dataclasses.field(default_factory=dict)

    def judge(self, name: str, seed: int) -> None:
        """Perform one run. The environment must enable the sanitizer (KVCACHE_SANITIZE=report)."""
        run = ModelServer(name, seed)
        run.checks_invariants = False
        is_wrong = False
        try:
            run.run()
        except Wrong:
            is_wrong = True
        except Exception as failure:
            _count(self.failures, f"{type(failure).__name__}: {failure}"[:120])
            is_wrong = self._has_wrong_answers(run)
        reports = run.engine.sanitizer.reports
        self.runs += 1
        self.wrong += is_wrong
        self.wrong_and_reported += is_wrong and bool(reports)
        if reports:
            _count(self.reported, reports[0].kind)

    def _has_wrong_answers(self, run: ModelServer) -> bool:
        for client in run.clients:
            try:
                run._compare(client)
            except Wrong:
                return True
        return False


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    judgement = Judgement()
    for seed in range(int(sys.argv[1])):
        judgement.judge(MODELS[seed % len(MODELS)], seed)
    print(json.dumps(dataclasses.asdict(judgement)))


if __name__ == "__main__":
    main()
