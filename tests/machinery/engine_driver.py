# SPDX-License-Identifier: Apache-2.0
"""Runs an engine with random requests over a tiny model, and checks its answers.

The reference is the model's own answer to each prompt.

`python -m tests.machinery.engine_driver --runs N --seed S [--model NAME]` performs N runs with the
seeds S, S + 1, and so on. With `--judge`, the program continues after wrong answers and failures,
and prints the findings of the sanitizer and of the comparison as JSON (`Judgement`).
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import time

import numpy as np
import torch

from kvcache import plan_cache
from kvcache.allocator import check_invariants
from kvcache.step import StepReport
from kvcache_exchange.store import StoreTier
from kvcache_serve.engine import Engine, Generation, SamplingParams
from kvcache_serve.engine.sampling import Sampler
from kvcache_serve.engine.transformers import attach, layer_specs
from tests.machinery.dense_models import MODELS, VOCAB_SIZE, dense, logits_of
from tests.machinery.stores import FAULTS, MemoryStore, patient


class ModelFailed(Exception):
    """Raised in the forward pass, like a device error."""


class WrongAnswer(AssertionError):
    """Raised if an answer differs from the model's own answer."""


class EngineRun:
    """A run of an engine with random settings. The pool is slightly larger than one request.

    `with_store` adds an in-memory store with random faults of every kind, at a random rate.
    `checks_invariants`: whether to check the manager's invariants occasionally.
    """

    def __init__(
        self, name: str, seed: int, with_store: bool = False, checks_invariants: bool = True
    ) -> None:
        self.name, self.seed, self.checks_invariants = name, seed, checks_invariants
        self.rng = rng = np.random.default_rng([seed, MODELS.index(name)])
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
        self.engine = Engine(
            self.paged,
            preemption=str(rng.choice(["swap", "recompute"])),
            drafter=self._draft if rng.random() < 0.5 else None,
            sources=[self._tier()] if with_store else [],
        )
        self.max_model_len = max_model_len
        self.failure_rate = float(rng.choice([0, 0, 0.03]))
        self.generations: list[Generation] = []
        self.num_compared = 0
        self._inject_failures()

    def run(self, num_requests: int = 12) -> None:
        """Add, step and abort requests until every request has ended. Then compare the answers."""
        engine, rng = self.engine, self.rng
        left, num_steps = num_requests, 0
        while left or engine.is_busy:
            draw = rng.random()
            if left and draw < 0.25:
                left -= 1
                self._add()
            elif draw > 0.995 and engine.num_unfinished:
                victim = engine.generations[rng.integers(engine.num_unfinished)]
                engine.abort(victim.request_id)
            else:
                with contextlib.suppress(ModelFailed):
                    engine.step()
                num_steps += 1
                # From now on, cached content must come from the store.
                if engine.sources and num_steps % 16 == 0:
                    self.paged.cache.manager.cache.reset()
                assert num_steps < 20_000, "the run does not end"
            if rng.random() < 0.05 and self.checks_invariants:
                check_invariants(self.paged.cache.manager)
        for source in engine.sources:
            assert source.close()
            for rank in source._ranks:
                assert rank._staging.num_free == rank._staging.num_values
        manager = self.paged.cache.manager
        check_invariants(manager)
        assert manager.pool.num_free == manager.pool.num_total, "blocks are still held"
        if manager.host_pool is not None:
            assert manager.host_pool.num_free == manager.host_pool.num_total, "pages are still held"
        self.paged.detach()
        for generation in self.generations:
            self._compare(generation)

    def _tier(self) -> StoreTier:
        rng = np.random.default_rng([self.seed, 7])
        rate, cache = float(rng.choice([0, 0.05, 0.2])), self.paged.cache
        store = MemoryStore(
            capacity=int(rng.choice([20, 1000])),
            fault=lambda: str(rng.choice(FAULTS)) if rng.random() < rate else None,
        )
        return StoreTier(
            cache.manager,
            cache.pages,
            store,
            model=self.name,
            host_pages=cache.host_pages,
            staging_bytes=int(rng.choice([3, 30])) * (cache.pages.page_bytes + 192),
            timeout_s=float(rng.choice([0.02, 5])),
            circuit=patient(),
        )

    def _add(self) -> None:
        rng = self.rng
        prompt: list[int] = []
        kind = rng.random()
        if self.generations and kind < 0.75:
            before = self.generations[rng.integers(len(self.generations))]
            prompt = before.prompt.tolist()
            if kind < 0.3:  # the next turn of a conversation
                prompt += before.samples[0].token_ids
            elif kind < 0.4:
                prompt = prompt[: rng.integers(1, len(prompt) + 1)]
        prompt = prompt[: self.max_model_len - 20]
        most = max(1, min(60, self.max_model_len - 20 - len(prompt)))
        count = 0 if prompt and 0.3 < kind < 0.6 else rng.integers(0 if prompt else 1, most)
        prompt = [*prompt, *rng.integers(1, VOCAB_SIZE, count).tolist()]
        most = min(24, self.max_model_len - len(prompt))
        options: dict[str, object] = {"max_tokens": int(rng.integers(1, most + 1))}
        kind, rows = rng.random(), self.engine.scheduler.manager.options.max_num_reqs
        if kind < 0.25:
            options["n"] = int(rng.integers(1, rows + 1))
        if rng.random() < 0.3:
            options |= {
                "temperature": float(rng.choice([0.5, 1.0])),
                "seed": int(rng.integers(1000)),
                "top_k": [None, 5][rng.integers(2)],
                "top_p": float(rng.choice([1.0, 0.8])),
            }
        if rng.random() < 0.2:
            options["stop_token_ids"] = tuple(rng.integers(1, VOCAB_SIZE, 40).tolist())
        generation = self.engine.add(
            prompt,
            SamplingParams(**options),
            priority=int(rng.integers(2)),
            cache_salt=[None, "a"][int(rng.random() < 0.1)],
        )
        self.generations.append(generation)

    def _draft(self, request) -> list[int]:
        """Draft either random tokens or, with some errors, the tokens that followed the same tokens
        in an earlier answer.
        """
        rng, tokens = self.rng, request.token_ids.tolist()
        count = int(rng.integers(0, 6))
        for generation in self.generations:
            for sample in generation.samples:
                whole = sample.request.token_ids.tolist()
                if len(whole) > len(tokens) and whole[: len(tokens)] == tokens:
                    drafts = whole[len(tokens) : len(tokens) + count]
                    return [t if rng.random() < 0.8 else 7 for t in drafts]
        return rng.integers(1, VOCAB_SIZE, count).tolist()

    def _inject_failures(self) -> None:
        forward, apply = self.paged.forward, self.paged.cache.worker.apply

        def failing_forward(batch):
            logits = forward(batch)
            if self.rng.random() < self.failure_rate:
                raise ModelFailed
            return logits

        def failing_apply(plan):
            report = apply(plan)
            if len(plan.swap_in) and self.rng.random() < 3 * self.failure_rate:
                page = int(self.rng.choice(plan.swap_in[:, 1]))
                for layer in range(self.paged.cache.pages.num_layers):
                    # Corrupts the page that the plan swapped in.
                    self.paged.cache.pages.layer(layer)[page] = 255
                return StepReport(plan.step_id, True, failed_pages=[page])
            return report

        self.paged.forward, self.paged.cache.worker.apply = failing_forward, failing_apply

    def _compare(self, generation: Generation) -> None:
        prompt, params = generation.prompt.tolist(), generation.params
        for sample in generation.samples:
            answer = sample.token_ids
            logits = logits_of(self.model, prompt, answer)
            sampler = Sampler(params, sample.index) if params.temperature else None
            wanted = [int(x.argmax()) if sampler is None else sampler.token(x) for x in logits]
            if answer != wanted:
                raise WrongAnswer(f"{generation.request_id}.{sample.index}: {answer}, not {wanted}")
            reason = sample.finish_reason
            is_stopped = bool(answer) and answer[-1] in params.stop_token_ids
            assert reason == "abort" or is_stopped == (reason == "stop")
            assert reason != "length" or len(answer) == params.max_tokens
            assert not set(answer[:-1]) & set(params.stop_token_ids)
            self.num_compared += 1


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
        run = EngineRun(name, seed, checks_invariants=False)
        is_wrong = False
        try:
            run.run()
        except WrongAnswer:
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

    def _has_wrong_answers(self, run: EngineRun) -> bool:
        for generation in run.generations:
            if any(sample.finish_reason is None for sample in generation.samples):
                continue
            try:
                run._compare(generation)
            except WrongAnswer:
                return True
        return False


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--judge", action="store_true", help="print all findings as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.judge:
        judgement = Judgement()
        for seed in range(args.seed, args.seed + args.runs):
            judgement.judge(args.model or MODELS[seed % len(MODELS)], seed)
        print(json.dumps(dataclasses.asdict(judgement)))
        return
    compared, totals, start = 0, {}, time.monotonic()
    for seed in range(args.seed, args.seed + args.runs):
        run = EngineRun(args.model or MODELS[seed % len(MODELS)], seed)
        try:
            run.run()
        except BaseException:
            print(f"model {run.name}, seed {seed}", flush=True)
            raise
        compared += run.num_compared
        for name, count in run.engine.metrics.as_dict().items():
            totals[name] = totals.get(name, 0) + count
    print(f"{args.runs} runs, {compared} answers identical, {time.monotonic() - start:.0f} s")
    print({name: round(count) for name, count in totals.items()})


if __name__ == "__main__":
    main()
