# SPDX-License-Identifier: Apache-2.0
"""The server's engine loop and its clients, as one actor of the world."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvcache import KVCache, LayerSpec, build, plan_cache
from kvcache.allocator import Request, check_invariants
from kvcache.step import StepReport
from kvcache_exchange.hints import Hint
from kvcache_serve.engine import Engine, Generation, SamplingParams
from kvcache_serve.engine.sampling import Sampler
from tests.machinery.table_model import VOCAB_SIZE, TableModel, logits_after
from tests.simulator.row import Wrong

if TYPE_CHECKING:
    from kvcache_serve.server.engine_loop import Answer, EngineError, EngineLoop


class ModelFailed(Exception):
    """Raised in the forward pass, like a device error."""


def stepped_loop(engine: Engine) -> EngineLoop:
    """Return an engine loop without a thread. Each call of its method `turn` makes one turn."""
    from kvcache_serve.server.engine_loop import EngineLoop  # needs the extra `serve`

    class SteppedLoop(EngineLoop):
        def turn(self) -> None:
            self._hear(0.0)
            if self.engine.is_busy:
                self._step()
            self._publish()

    loop = SteppedLoop(engine)
    loop._is_started = True
    return loop


@dataclasses.dataclass(eq=False)
class Client:
    """A request of a client: what has arrived, by sample."""

    num_samples: int
    answer: Answer | None = None
    error: EngineError | None = None
    has_left: bool = False

    def __post_init__(self) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(self.num_samples)]
        self.reasons: list[str | None] = [None] * self.num_samples
        self.stopped: set[int] = set()  # samples that the client has stopped


class Served:
    """An engine loop and its clients. A subclass makes the engine, and knows the model's answers.

    Args:
        engine: The engine, whose drafter may be `draft`.
        cache: Its cache.
        seed: Determines what clients do if they leave early.
        failure_rate: How often a step fails.
        log: Is told what clients ask for.
    """

    vocab_size = VOCAB_SIZE
    is_too_small = False  # the pool may refuse requests
    checks_invariants = True

    def __init__(
        self, engine: Engine, cache: KVCache, seed: int, failure_rate: float, log: Callable
    ) -> None:
        self.engine, self.cache, self.seed, self.log = engine, cache, seed, log
        self.failure_rate, self.max_model_len = failure_rate, cache.plan.max_model_len
        self.generations: list[Generation] = []
        self.clients: list[Client] = []
        self.num_compared = self.num_turns = self.num_refused = 0
        self.loop, self.events = stepped_loop(engine), asyncio.new_event_loop()
        self.tasks: list[asyncio.Task] = []
        engine.hints._clock = lambda: float(self.num_turns)
        self._inject_failures()

    def logits(self, prompt: list[int], answer: list[int]) -> list:
        """Return the model's logits for each token of an answer."""
        raise NotImplementedError

    def run(self, num_requests: int = 12) -> None:
        """Serve some requests until all have ended, and compare the answers."""
        rng = random.Random(self.seed)
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
            check_invariants(self.cache.manager)

    def _turn(self) -> None:
        self.num_turns += self.engine.is_busy
        self.loop.turn()
        self.events.run_until_complete(asyncio.sleep(0))
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled():
                task.result()
        # From now on, cached content must come from the store.
        if self.engine.sources and self.num_turns % 16 == 0:
            self.cache.manager.cache.reset()

    def close(self, rng: random.Random) -> None:
        """Serve all requests that are left."""
        self.rng, first = np.random.default_rng(rng.getrandbits(64)), self.num_turns
        idle = 0
        while self.tasks or self.engine.is_busy:
            self._turn()
            idle = 0 if self.engine.is_busy else idle + 1
            if self.num_turns - first > self.most_turns or idle > 9:
                for task in self.tasks:
                    task.cancel()
                self.events.run_until_complete(asyncio.gather(*self.tasks, return_exceptions=True))
                self.events.close()
                raise Wrong("requests do not end")
        self.loop._look()

    @property
    def most_turns(self) -> int:
        """The bound of `kvcache_serve.engine.scheduler.Scheduler` without failures, and one with them."""
        if self.failure_rate:
            return 20_000
        tokens = sum(each.params.n * (each.params.max_tokens + 1) for each in self.generations)
        return tokens * self.max_model_len * (self.cache.manager.options.max_num_reqs + 2)

    def check_end(self) -> None:
        self.events.close()
        for source in self.engine.sources:
            assert source.close()
            for rank in source._ranks:
                assert rank._staging.num_free == rank._staging.num_values
        self.engine.close()  # pins of hints
        manager = self.cache.manager
        check_invariants(manager)
        for pool in filter(None, (manager.pool, manager.host_pool)):
            if pool.num_free != pool.num_total:
                raise Wrong(f"{pool.num_total - pool.num_free} blocks are held at the end")
        for client in self.clients:
            self._compare(client)

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
        longest = self.max_model_len - min(20, self.max_model_len // 4)
        prompt = prompt[:longest]
        most = max(1, min(60, longest - len(prompt)))
        count = 0 if prompt and 0.3 < kind < 0.6 else rng.integers(0, most)
        count += 0 if prompt else 1
        prompt = [*prompt, *rng.integers(1, self.vocab_size, count).tolist()]
        most = min(24, self.max_model_len - len(prompt))
        options: dict[str, object] = {"max_tokens": int(rng.integers(1, most + 1))}
        kind, rows = rng.random(), self.cache.manager.options.max_num_reqs
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
            options["stop_token_ids"] = tuple(
                rng.integers(1, self.vocab_size, self.vocab_size // 12 + 1).tolist()
            )
        self.log(f"server: a client asks for {prompt}, {options}")
        task = self._serve(
            Client(options.get("n", 1)),
            prompt,
            SamplingParams(**options),
            priority=int(rng.integers(2)),
            cache_salt=[None, "a"][int(rng.random() < 0.1)],
        )
        self.tasks.append(self.events.create_task(task))

    async def _serve(self, client: Client, prompt, params: SamplingParams, **options) -> None:
        from kvcache_serve.server.engine_loop import EngineError

        self.clients.append(client)
        most = int(self.rng.integers(1, 40)) if self.rng.random() < 0.2 else 1000
        try:
            async with self.loop.serving(prompt, params, **options) as client.answer:
                self.generations.append(client.answer.generation)
                async for delta in client.answer:
                    client.token_ids[delta.index] += delta.token_ids
                    client.reasons[delta.index] = delta.finish_reason
                    most -= 1
                    if most == 0 and self.seed % 2:  # reads no more
                        client.has_left = True
                        return
                    if most == 0 and delta.finish_reason is None:
                        client.stopped.add(delta.index)
                        client.answer.stop(delta.index)
        except EngineError as error:
            client.error = error
        except asyncio.CancelledError:
            client.has_left = True
            raise

    def draft(self, request) -> list[int]:
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
        return rng.integers(1, self.vocab_size, count).tolist()

    def _inject_failures(self) -> None:
        forward, apply = self.engine.model.forward, self.cache.worker.apply

        def failing_forward(batch):
            logits = forward(batch)
            if self.rng.random() < self.failure_rate:
                raise ModelFailed
            return logits

        def failing_apply(plan):
            report = apply(plan)
            if len(plan.swap_in) and self.rng.random() < 3 * self.failure_rate:
                page = int(self.rng.choice(plan.swap_in[:, 1]))
                for layer in range(self.cache.pages.num_layers):
                    # Corrupts the page that the plan swapped in.
                    self.cache.pages.layer(layer)[page] = 255
                return StepReport(plan.step_id, True, failed_pages=[page])
            return report

        self.engine.model.forward, self.cache.worker.apply = failing_forward, failing_apply

    def _compare(self, client: Client) -> None:
        if client.error is not None and not self.failure_rate:
            raise Wrong(f"a request fails: {client.error}")
        has_ended_early = client.has_left or client.error is not None
        generation = None if client.answer is None else client.answer.generation
        if generation is None:
            if not has_ended_early:
                raise Wrong("a request is not served")
            return
        prompt, params, name = generation.prompt.tolist(), generation.params, generation.request_id
        reasons = {sample.finish_reason for sample in generation.samples}
        allowed = {"stop", "length"} | ({"refused"} if self.is_too_small else set())
        if not reasons <= allowed | ({"abort"} if has_ended_early else set()):
            raise Wrong(f"{name} ends with {reasons}")
        if len(generation.samples) < params.n and not has_ended_early and "refused" not in reasons:
            raise Wrong(f"{name} has {len(generation.samples)} samples, not {params.n}")
        for sample, received in zip(generation.samples, client.token_ids):
            answer, reason = sample.token_ids, sample.finish_reason
            logits = self.logits(prompt, answer)
            sampler = Sampler(params, sample.index) if params.temperature else None
            wanted = [int(x.argmax()) if sampler is None else sampler.token(x) for x in logits]
            if answer != wanted:
                raise Wrong(f"{name}.{sample.index}: {answer}, not {wanted}")
            if not has_ended_early and client.reasons[sample.index] != reason:
                raise Wrong(f"{name}.{sample.index} is not told that it ends with {reason}")
            if received != (answer if not has_ended_early else answer[: len(received)]):
                raise Wrong(f"{name}.{sample.index} receives {received}: {answer}")
            if reason == "refused":
                self.num_refused += 1
                assert str(self.cache.manager.pool.num_total) in str(sample.error)
                continue
            is_stopped = bool(answer) and answer[-1] in params.stop_token_ids
            is_stopped |= sample.index in client.stopped and reason == "stop"
            assert reason == "abort" or is_stopped == (reason == "stop")
            assert reason != "length" or len(answer) == params.max_tokens
            assert not set(answer[:-1]) & set(params.stop_token_ids)
            self.num_compared += 1


class TableServer(Served):
    """A server of a model that costs nothing. Its pool holds one request of the maximum length or, in
    some runs, not even that.
    """

    def __init__(
        self, seed: int, failure_rate: float = 0.0, log: Callable = lambda line: None
    ) -> None:
        rng = np.random.default_rng(seed)
        block = int(rng.choice([1, 2, 4]))
        max_model_len = int(rng.integers(6, 25))
        budget = int(rng.choice([1, 2, 3, 8, 64]))
        num_drafts = int(rng.choice([0, 0, 1, 3]))
        layers = [LayerSpec("a", "full_attention", block, 1, 1, dtype="float32")]
        kind = rng.random()
        if kind < 0.2:
            layers.append(
                LayerSpec(
                    "b", "sliding_window", block, 1, 1, dtype="float32", options={"window": 3}
                )
            )
        elif kind < 0.35:
            options = {"num_speculative_blocks": num_drafts}
            size = 8 * block
            layers.append(
                LayerSpec(
                    "b", "recurrent", block, state_bytes=size, dtype="float32", options=options
                )
            )
        sizes = {"max_model_len": max_model_len, "max_num_batched_tokens": max(budget, 1)}
        plan = plan_cache(layers, 2**24, **sizes)
        enough = plan.pages_per_request(max_model_len)
        self.is_too_small = bool(rng.random() < 0.1)
        pages = max(1, enough - int(rng.integers(1, 4))) if self.is_too_small else enough
        pages += 0 if self.is_too_small else int(rng.choice([0, 0, 0, 1, 2, enough]))
        host = int(rng.choice([0, 0, 1, 2, enough, 4 * enough]))
        host_options = {}
        if host and rng.random() < 0.5:
            host_options["host_write"] = str(rng.choice(["back", "through"]))
        num_rows = int(rng.integers(1, 7))
        cache = build(
            dataclasses.replace(plan, num_pages=pages + 1),
            max_num_reqs=num_rows,
            num_host_blocks=host + 1 if host else 0,
            num_speculative_tokens=num_drafts,
            enable_caching=bool(rng.random() < 0.6),
            num_preallocate_tokens=int(rng.choice([0, 0, 8])),
            watermark=float(rng.choice([0, 0, 0, 0.2, 0.5])),
            **host_options,
        )
        engine = Engine(
            TableModel(cache),
            preemption=str(rng.choice(["swap", "recompute"])),
            max_num_batched_tokens=budget,
            drafter=self.draft if num_drafts else None,
        )
        self.num_drafts = num_drafts
        super().__init__(engine, cache, seed, failure_rate, log)

    def logits(self, prompt: list[int], answer: list[int]) -> list:
        return [logits_after([*prompt, *answer[:i]]) for i in range(len(answer))]

    def draft(self, request: Request) -> list[int]:
        return super().draft(request)[: self.num_drafts]
