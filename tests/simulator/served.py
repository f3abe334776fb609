# SPDX-License-Identifier: Apache-2.0
"""The server's engine loop over a tiny model, and its clients. The reference is the model itself.

`python -m tests.simulator.served N` performs N runs, and prints as JSON what the comparison and the
sanitizer found (`Judgement`).
"""

import asyncio
import dataclasses
import json
import logging
import random
import sys
from collections.abc import Callable

import numpy as np
import torch

from kvcache import plan_cache
from kvcache.allocator import check_invariants
from kvcache.step import StepReport
from kvcache_exchange.hints import Hint
from kvcache_exchange.store import StoreTier
from kvcache_serve.engine import Engine, Generation, SamplingParams
from kvcache_serve.engine.sampling import Sampler
from kvcache_serve.engine.transformers import attach, layer_specs
from kvcache_serve.server.engine_loop import Answer, EngineError, EngineLoop
from tests.machinery.dense_models import MODELS, VOCAB_SIZE, dense, logits_of
from tests.machinery.stores import FAULTS, MemoryStore, patient
from tests.simulator.row import Wrong


class ModelFailed(Exception):
    """Raised in the forward pass, like a device error."""


class SteppedLoop(EngineLoop):
    """An engine loop whose turns the simulator makes, without its thread."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._is_started = True

    def turn(self) -> None:
        self._hear(0.0)
        if self.engine.is_busy:
            self._step()
        self._publish()


@dataclasses.dataclass(eq=False)
class Client:
    """A request of a client: what has arrived, by sample."""

    num_samples: int
    answer: Answer | None = None
    error: EngineError | None = None

    def __post_init__(self) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(self.num_samples)]
        self.reasons: list[str | None] = [None] * self.num_samples
        self.stopped: set[int] = set()  # samples that the client has stopped


class EngineRun:
    """An engine loop with random settings and its clients, as one actor of the world. The pool is
    slightly larger than one request.

    `with_store` adds an in-memory store with random faults of every kind, at a random rate.
    `checks_invariants`: whether to check the manager's invariants occasionally.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        with_store: bool = False,
        checks_invariants: bool = True,
        log: Callable = lambda line: None,
    ) -> None:
        self.name, self.seed, self.checks_invariants, self.log = name, seed, checks_invariants, log
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
        self.clients: list[Client] = []
        self.num_compared = self.num_turns = 0
        self.loop, self.events = SteppedLoop(self.engine), asyncio.new_event_loop()
        self.tasks: list[asyncio.Task] = []
        self._inject_failures()

    def run(self, num_requests: int = 12) -> None:
        """Serve some requests until all have ended, and compare the answers."""
        rng = random.Random(f"{self.name}.{self.seed}")
        while len(self.clients) < num_requests:
            self.operate(rng)
        self.close(rng)
        self.check_end()

    def operate(self, rng: random.Random) -> None:
        """A client comes, leaves or hints, or the loop makes a turn."""
        self.rng = np.random.default_rng(rng.getrandbits(64))
        draw = self.rng.random()
        if draw < 0.2 and len(self.tasks) < 12:
            self._add()
        elif draw > 0.99 and self.tasks:
            self.tasks[self.rng.integers(len(self.tasks))].cancel()  # the connection is lost
        elif draw > 0.98 and self.generations:
            tokens = self.generations[-1].prompt.tolist()
            intent = str(self.rng.choice(["prefetch", "pin"]))
            hints = self.loop.receipts(tokens, [Hint(intent=intent)], None)
            self.tasks.append(self.events.create_task(hints))
        else:
            self._turn()
        if self.rng.random() < 0.05 and self.checks_invariants:
            check_invariants(self.paged.cache.manager)

    def _turn(self) -> None:
        self.num_turns += 1
        self.loop.turn()
        self.events.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled():
                task.result()
        # From now on, cached content must come from the store.
        if self.engine.sources and self.num_turns % 16 == 0:
            self.paged.cache.manager.cache.reset()

    def close(self, rng: random.Random) -> None:
        """Serve all requests that are left."""
        self.rng, first = np.random.default_rng(rng.getrandbits(64)), self.num_turns
        while self.tasks or self.engine.is_busy:
            self._turn()
            if self.num_turns - first > 20_000:
                raise Wrong("requests do not end")
        self.loop._look()

    def check_end(self) -> None:
        self.events.close()
        for source in self.engine.sources:
            assert source.close()
            for rank in source._ranks:
                assert rank._staging.num_free == rank._staging.num_values
        self.engine.close()  # pins of hints
        manager = self.paged.cache.manager
        check_invariants(manager)
        for pool in filter(None, (manager.pool, manager.host_pool)):
            if pool.num_free != pool.num_total:
                raise Wrong(f"{pool.num_total - pool.num_free} blocks are held at the end")
        self.paged.detach()
        for client in self.clients:
            self._compare(client)

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
        self.log(f"{self.name}: a client asks for {prompt}, {options}")
        task = self._serve(
            Client(options.get("n", 1)),
            prompt,
            SamplingParams(**options),
            priority=int(rng.integers(2)),
            cache_salt=[None, "a"][int(rng.random() < 0.1)],
        )
        self.tasks.append(self.events.create_task(task))

    async def _serve(self, client: Client, prompt, params: SamplingParams, **options) -> None:
        self.clients.append(client)
        most = int(self.rng.integers(1, 40)) if self.rng.random() < 0.2 else 1000
        try:
            async with self.loop.serving(prompt, params, **options) as client.answer:
                self.generations.append(client.answer.generation)
                async for delta in client.answer:
                    client.token_ids[delta.index] += delta.token_ids
                    client.reasons[delta.index] = delta.finish_reason
                    most -= 1
                    if most == 0 and self.seed % 2:
                        return  # reads no more
                    if most == 0 and delta.finish_reason is None:
                        client.stopped.add(delta.index)
                        client.answer.stop(delta.index)
        except EngineError as error:
            client.error = error

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

    def _compare(self, client: Client) -> None:
        if client.answer is None or client.answer.generation is None:
            return
        generation = client.answer.generation
        prompt, params = generation.prompt.tolist(), generation.params
        for sample, received in zip(generation.samples, client.token_ids):
            answer, reason = sample.token_ids, sample.finish_reason
            logits = logits_of(self.model, prompt, answer)
            sampler = Sampler(params, sample.index) if params.temperature else None
            wanted = [int(x.argmax()) if sampler is None else sampler.token(x) for x in logits]
            if answer != wanted:
                raise Wrong(f"{generation.request_id}.{sample.index}: {answer}, not {wanted}")
            is_whole = client.reasons[sample.index] in ("stop", "length")
            if received != (answer if is_whole else answer[: len(received)]):
                raise Wrong(f"{generation.request_id}.{sample.index} receives {received}: {answer}")
            is_stopped = bool(answer) and answer[-1] in params.stop_token_ids
            is_stopped |= sample.index in client.stopped and reason == "stop"
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

    def _has_wrong_answers(self, run: EngineRun) -> bool:
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
