# SPDX-License-Identifier: Apache-2.0
"""Serves random requests from tiny pools, and counts the steps until every request has ended.

The model is a table: the logits of a token are a row that the hash of all tokens up to this one selects.
It reads these tokens from the pages, so that a wrong block gives another answer, and costs
microseconds.

`python -m tests.machinery.progress --runs N --seed S` performs N runs with the seeds S, S + 1, and so on.
"""

import argparse
import dataclasses
import functools
import time
import zlib

import numpy as np
import torch

from kvcache import LayerSpec, build, plan_cache
from kvcache.allocator import check_invariants
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.sampling import Sampler

VOCAB_SIZE = 8


@functools.cache
def _table(vocab_size):
    return torch.from_numpy(np.random.default_rng(1).normal(size=(1021, vocab_size)))


def logits_after(tokens, vocab_size=VOCAB_SIZE):
    """Return the logits [vocab_size] of the token that follows `tokens`."""
    rows = _table(vocab_size)
    return rows[zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % len(rows)]


class TableModel:
    """A model of `Engine`, whose K are the numbers of the tokens."""

    def __init__(self, cache, vocab_size=VOCAB_SIZE):
        self.cache, self.vocab_size = cache, vocab_size
        self._keys = cache.storages[0].key_cache(0).numpy()[..., 0, 0]  # by block and offset

    def forward(self, batch):
        size = self._keys.shape[1]
        self._keys[np.divmod(batch.slots(0).numpy(), size)] = batch.token_ids.numpy()
        context = batch.context(0)
        known = self._keys[np.divmod(context.slots.numpy(), size)].astype(np.int32)
        rows = []
        for i in range(len(batch)):
            tokens = known[context.ends[i] - context.lengths[i] : context.ends[i]]
            stops = range(len(tokens) - batch.num_logits[i] + 1, len(tokens) + 1)
            rows += [self.logits_after(tokens[:stop]) for stop in stops]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size, dtype=torch.float64)

    def logits_after(self, tokens):
        """Return the logits [vocab_size] of the token that follows `tokens`."""
        return logits_after(tokens, self.vocab_size)


def answer_of(prompt, params, index):
    """Return the model's own answer for one sample."""
    sampler = Sampler(params, index) if params.temperature else None
    tokens = list(prompt)
    while True:
        logits = logits_after(tokens)
        tokens.append(int(logits.argmax()) if sampler is None else sampler.token(logits))
        answer = tokens[len(prompt) :]
        if len(answer) == params.max_tokens or tokens[-1] in params.stop_token_ids:
            return answer


class ProgressRun:
    """One engine with random settings whose pool holds one request of the maximum length or, in some
    runs, not even that.

    `num_steps` is the number of steps until all requests have ended, and `most_steps` is the bound of
    `kvcache_serve.engine.scheduler.Scheduler`.
    """

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
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
        self.num_rows = int(rng.integers(1, 7))
        self.cache = build(
            dataclasses.replace(plan, num_pages=pages + 1),
            max_num_reqs=self.num_rows,
            num_host_blocks=host + 1 if host else 0,
            num_speculative_tokens=num_drafts,
            enable_caching=bool(rng.random() < 0.6),
            num_preallocate_tokens=int(rng.choice([0, 0, 8])),
            watermark=float(rng.choice([0, 0, 0, 0.2, 0.5])),
            **host_options,
        )
        self.preemption = str(rng.choice(["swap", "recompute"]))
        self.settings = {
            **{"block": block, "budget": budget, "drafts": num_drafts, "kind": kind},
            **{"pages": pages, "enough": enough, "host": host, "max_model_len": max_model_len},
            **{"rows": self.num_rows, "preemption": self.preemption},
        }
        self.engine = Engine(
            TableModel(self.cache),
            preemption=self.preemption,
            max_num_batched_tokens=budget,
            drafter=self._draft if num_drafts else None,
        )
        self.num_drafts, self.max_model_len, self.budget = num_drafts, max_model_len, budget
        self.requests = []
        self.num_steps = self.num_compared = self.num_refused = 0

    def run(self, num_requests=4):
        engine, rng = self.engine, self.rng
        left = int(rng.integers(1, num_requests + 1))
        while left or engine.num_unfinished:
            if left and (not engine.num_unfinished or rng.random() < 0.3):
                left -= 1
                self._add()
                continue
            engine.step()
            self.num_steps += 1
            assert self.num_steps <= self.most_steps, "a request does not end"
        check_invariants(self.cache.manager)
        assert self.cache.manager.pool.num_free == self.cache.manager.pool.num_total
        for generation in self.requests:
            self._compare(generation)

    @property
    def most_steps(self):
        tokens = sequences = 0
        for generation in self.requests:
            tokens += generation.params.n * generation.params.max_tokens
            sequences += generation.params.n
        chunks = self.max_model_len  # a step computes at least one token of the first sequence
        return (tokens + sequences) * chunks * (self.num_rows + 2)

    def _draft(self, request):
        return self.rng.integers(0, VOCAB_SIZE, self.rng.integers(0, self.num_drafts + 1)).tolist()

    def _add(self):
        rng = self.rng
        length = int(rng.integers(1, self.max_model_len))
        prompt = rng.integers(0, VOCAB_SIZE, length).tolist()
        if self.requests and rng.random() < 0.5:
            prompt = [*self.requests[-1].prompt.tolist(), *prompt][:length]
        options = {"max_tokens": int(rng.integers(1, self.max_model_len - length + 1))}
        if rng.random() < 0.7:
            options["n"] = int(rng.integers(1, self.num_rows + 1))
        if rng.random() < 0.6:
            options |= {"temperature": 1.0, "seed": int(rng.integers(1000))}
        if rng.random() < 0.2:
            options["stop_token_ids"] = (int(rng.integers(VOCAB_SIZE)),)
        params = SamplingParams(**options)
        self.requests.append(self.engine.add(prompt, params, priority=int(rng.integers(2))))

    def _compare(self, generation):
        samples, params = generation.samples, generation.params
        reasons = {sample.finish_reason for sample in samples}
        assert reasons <= {"stop", "length", "refused"}, reasons
        if "refused" in reasons:
            assert self.is_too_small, "a request that fits was refused"
            assert all(
                str(self.cache.manager.pool.num_total) in str(sample.error)
                for sample in samples
                if sample.finish_reason == "refused"
            )
            self.num_refused += 1
            return
        wanted = [answer_of(generation.prompt, params, i) for i in range(params.n)]
        assert [sample.token_ids for sample in samples] == wanted
        self.num_compared += len(samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, compared, refused, steps, most, bad = time.monotonic(), 0, 0, 0, 0.0, 0
    for seed in range(args.seed, args.seed + args.runs):
        run = ProgressRun(seed)
        try:
            run.run()
        except Exception as error:
            bad += 1
            print(
                f"seed {seed}: {type(error).__name__}: {str(error)[:200]} {run.settings}",
                flush=True,
            )
            continue
        compared, refused = compared + run.num_compared, refused + run.num_refused
        steps, most = steps + run.num_steps, max(most, run.num_steps / run.most_steps)
    print(
        f"{args.runs} runs from seed {args.seed}: {bad} failed; {compared} answers identical, "
        f"{refused} requests refused, {steps} steps, at most {most:.2f} of the bound, "
        f"{time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
