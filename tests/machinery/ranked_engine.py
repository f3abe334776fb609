# SPDX-License-Identifier: Apache-2.0
"""An engine whose ranks are separate processes, with a store that survives these processes.

The model is a tiny Llama with tensor, pipeline or decode context parallelism.

    python -m tests.machinery.ranked_engine [--requests 200] [--kills 20]

This program serves requests with each form of parallelism, kills ranks at random moments, and
compares all answers with those of the unsharded model. Ranks exchange values only through the
scheduler, which sums them, so the other ranks survive a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from kvcache import (
    Admit,
    BlockTables,
    ContextParallel,
    External,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Request,
    Status,
    StepReport,
    Worker,
    plan_cache,
)
from kvcache.allocator import check_invariants
from kvcache_exchange.store import BlockStore, Share, StoreRank, StoreTier, cache_identity
from kvcache_exchange.store.orders import RankDescription
from tests.machinery.dense_models import dense, greedy
from tests.machinery.forked import context

BLOCK, NUM_BLOCKS, NUM_LAYERS, MAX_LEN = 8, 49, 2, 256


class RankDied(Exception):
    """Raised if a rank's process has ended."""


class FileStore(BlockStore):
    """A store with one file per value in a folder. A process that is killed may leave a partial
    file.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def open(self, memory, value_bytes):
        pass

    def exists(self, keys):
        return [(self.folder / key).exists() for key in keys]

    def put(self, keys, values):
        for key, value in zip(keys, values):
            with (self.folder / key).open("wb") as file:
                file.write(value[: len(value) // 2])
                file.flush()
                file.write(value[len(value) // 2 :])
        return [True] * len(keys)

    def get(self, keys, values):
        time.sleep(random.choice([0, 0, 0.01]))  # so that ranks are also killed during loads
        sizes = []
        for key, value in zip(keys, values):
            try:
                found = np.fromfile(self.folder / key, np.uint8)
            except FileNotFoundError:
                sizes.append(-1)
                continue
            sizes.append(len(found))
            value[: len(found)] = found[: len(value)]
        return sizes

    def remove(self, keys):
        for key in keys:
            (self.folder / key).unlink(missing_ok=True)

    def close(self):
        pass


@dataclass(frozen=True)
class Parallel:
    """Sizes of tensor, pipeline and decode context parallelism. At most one of these sizes is above
    1.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    host_blocks: int = 0  # blocks in the host tier, if any; some of its swaps fail on one rank

    @property
    def num_ranks(self):
        return self.tp * self.pp * self.dcp

    def layers(self, rank):
        per_stage = NUM_LAYERS // self.pp
        first = rank * per_stage if self.pp > 1 else 0
        return first, first + per_stage

    def share(self, rank, num_heads):
        return Share.of_rank(
            num_layers=NUM_LAYERS, num_heads=num_heads, layers=self.layers(rank),
            tp_rank=rank if self.tp > 1 else 0, tp_size=self.tp,
            cp_rank=rank if self.dcp > 1 else 0, cp_world_size=self.dcp,
        )  # fmt: skip

    def context(self, rank=0):
        return ContextParallel(dcp_world_size=self.dcp, dcp_rank=rank if self.dcp > 1 else 0)


def plan_of(parallel, rank):
    config = dense("llama", NUM_LAYERS).config
    first, end = parallel.share(rank, config.num_key_value_heads).heads
    layers = [
        LayerSpec(f"{i}", "full_attention", BLOCK, end - first, config.head_dim, dtype="float64")
        for i in range(*parallel.layers(rank))
    ]
    options = {"max_model_len": MAX_LEN, "context_parallel": parallel.context()}
    page_bytes = plan_cache(layers, 1 << 30, **options).page_bytes
    return plan_cache(layers, page_bytes * NUM_BLOCKS, **options)


# A rank's process --------------------------------------------------------------------------------------


class Stopped(Exception):
    """Raised if the scheduler has aborted the step."""


class Shard:
    """A rank's part of the model, its pages and its tables."""

    def __init__(self, parallel, rank, last_step_id):
        self.parallel, self.rank = parallel, rank
        model = dense("llama", NUM_LAYERS)
        self.inner, self.head, config = model.model, model.lm_head, model.config
        self.share = parallel.share(rank, config.num_key_value_heads)
        self.size = config.head_dim
        self.layers = self.inner.layers[slice(*parallel.layers(rank))]
        self.per_kv = config.num_attention_heads // config.num_key_value_heads
        per_rank = config.num_attention_heads // parallel.tp
        of_tp = rank if parallel.tp > 1 else 0
        self.queries = range(of_tp * per_rank, (of_tp + 1) * per_rank)
        width = config.intermediate_size // parallel.tp
        self.mlp = slice(of_tp * width, (of_tp + 1) * width)
        plan = plan_of(parallel, rank)
        self.storages = KVStorage.for_plan(plan)
        tables = BlockTables.for_groups(
            plan.groups, max_num_reqs=8, max_model_len=MAX_LEN, max_num_tokens=1024,
            context_parallel=parallel.context(rank),
        )  # fmt: skip
        pages = self.storages[0].pages
        host = pages.on_host(parallel.host_blocks) if parallel.host_blocks else None
        self.worker = Worker(self.storages, tables, host, last_step_id=last_step_id)
        self.table = tables[0]

    @torch.inference_mode()
    def forward(self, batch, x):
        """Compute a step. Yields values to be summed over all ranks, and receives the sums. Returns
        hidden states or, on the last stage, logits.

        `batch` contains the row, the first position and the token IDs of each request.
        """
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        if x is None:
            x = self.inner.embed_tokens(torch.cat([torch.tensor(ids) for _, _, ids in batch]))
        rows = np.concatenate([[row] * len(ids) for row, _, ids in batch]).astype(np.int32)
        positions = np.concatenate([np.arange(at, at + len(ids)) for _, at, ids in batch])
        slots = self.table.slots_of(rows, positions)
        angles = self.inner.rotary_emb(x[None], torch.from_numpy(positions)[None])
        first, end = (self.size * head for head in self.share.heads)
        own = slice(self.size * self.queries[0], self.size * (self.queries[-1] + 1))
        for number, layer in enumerate(self.layers):
            hidden = layer.input_layernorm(x)
            attention = layer.self_attn
            q = F.linear(hidden, attention.q_proj.weight[own])
            k, v = (F.linear(hidden, each.weight[first:end]) for each in
                    (attention.k_proj, attention.v_proj))  # fmt: skip
            q, k, v = (each.view(len(x), -1, self.size).transpose(0, 1)[None] for each in (q, k, v))
            q, k = apply_rotary_pos_emb(q, k, *angles)
            q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
            self.storages[0].write(number, k, v, slots)
            weighted, weights = self._attend(number, batch, q)
            if self.parallel.dcp > 1:
                both = yield torch.cat([weighted, weights], dim=-1)
                weighted, weights = both[..., :-1], both[..., -1:]
            out = (weighted / weights).reshape(len(x), -1)
            out = F.linear(out, attention.o_proj.weight[:, own])
            if self.parallel.tp > 1:
                out = yield out
            x = x + out
            hidden, mlp = layer.post_attention_layernorm(x), layer.mlp
            gate, up = (
                F.linear(hidden, each.weight[self.mlp]) for each in (mlp.gate_proj, mlp.up_proj)
            )
            out = F.linear(F.silu(gate) * up, mlp.down_proj.weight[:, self.mlp])
            if self.parallel.tp > 1:
                out = yield out
            x = x + out
        if self.parallel.layers(self.rank)[1] < NUM_LAYERS:
            return x
        last = np.cumsum([len(ids) for _, _, ids in batch]) - 1
        return self.head(self.inner.norm(x[last]))

    def _attend(self, layer, batch, q):
        """Return the weighted sum of the values on this rank and the sum of the weights."""
        weighted, weights, done = torch.zeros_like(q), torch.zeros_like(q[..., :1]), 0
        for row, at, ids in batch:
            stop = at + len(ids)
            slots = self.table.slots_of(np.full(stop, row, np.int32), np.arange(stop))
            keys, values = self.storages[0].gather(layer, slots)
            is_seen = torch.arange(stop) <= torch.arange(at, stop)[:, None]
            is_seen &= slots >= 0
            for head, number in enumerate(self.queries):
                kv = number // self.per_kv - self.share.heads[0]
                own = slice(done, done + len(ids))
                scores = q[own, head] @ keys[:, kv].T * self.size**-0.5
                exponents = torch.where(is_seen, scores.exp(), 0.0)
                weighted[own, head] = exponents @ values[:, kv]
                weights[own, head, 0] = exponents.sum(1)
            done += len(ids)
        return weighted, weights


def serve_rank(connection: Connection, parallel, rank, folder, identity, last_step_id, timeout_s):
    """Execute the scheduler's messages in order until it closes the connection."""
    is_later_stage = parallel.pp > 1 and rank > 0
    shard = Shard(parallel, rank, last_step_id)
    store = StoreRank(
        identity, shard.worker.pages, FileStore(folder), model="llama", rank=shard.share,
        staging_bytes=1 << 20, timeout_s=timeout_s,
        cp_kv_cache_interleave_size=1 if parallel.dcp > 1 else None,
    )  # fmt: skip
    connection.send(("ready", store.description))

    def next_message():
        """Wait for a message other than "orders". Meanwhile, execute the store's orders and send
        their results.
        """
        while True:
            if (results := store.take_results()) is not None:
                connection.send(("results", results))
            if not connection.poll(0.002):
                continue
            name, *arguments = connection.recv()
            if name != "orders":
                return name, arguments
            store.begin(*arguments)

    def answer_to(message):
        connection.send(message)
        name, arguments = next_message()
        if name == "stop":
            raise Stopped
        return arguments[0]

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, arguments = next_message()
            if name == "close":
                connection.send(("closed", store.close(10), store._staging.num_free))
                return
            if name == "stop":  # this rank has already completed the aborted step
                connection.send(("stopped",))
                continue
            plan, batch = arguments
            report = shard.worker.apply(plan)
            if len(plan.swap_in) and random.random() < 0.2:
                report.failed_pages.append(int(plan.swap_in[0, 1]))
                for region in range(len(shard.worker.pages.sizes)):
                    shard.worker.pages.fragment(region)[report.failed_pages[-1]] = 255
            result = None
            try:
                if batch:
                    x = torch.from_numpy(answer_to(("previous",))) if is_later_stage else None
                    result = run(shard.forward(batch, x), answer_to).numpy()
            except Stopped:
                connection.send(("stopped",))
                continue
            connection.send(("done", result, report))


def run(parts, answer_to):
    """Run a forward pass, and exchange each value that it yields."""
    try:
        part = next(parts)
        while True:
            part = parts.send(torch.from_numpy(answer_to(("sum", part.numpy()))))
    except StopIteration as ended:
        return ended.value


# The scheduler -----------------------------------------------------------------------------------------


class RankProcess:
    """A `StoreRankLink` to a rank's process."""

    def __init__(self, *arguments):
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve_rank, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.results, self.messages = deque(), deque()
        self.description: RankDescription = self.wait_for("ready", 180)[0]

    def begin(self, orders):
        self.tell("orders", orders)

    def take_results(self):
        self.read()
        return self.results.popleft() if self.results else None

    def close(self, timeout_s):
        self.tell("close")
        is_over, self.num_free = self.wait_for("closed", 60)
        self.process.join()
        return is_over

    def tell(self, *message):
        # If the rank has ended, the step detects this when it waits for the rank.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def read(self):
        """Receive the messages that the rank has sent. Sets `is_dead` if the rank has ended."""
        try:
            while self.connection.poll():
                name, *arguments = self.connection.recv()
                if name == "results":
                    self.results.append(*arguments)
                else:
                    self.messages.append((name, arguments))
        except (EOFError, ConnectionResetError):
            self.is_dead = True

    is_dead = False

    def wait_for(self, name, timeout_s):
        """Return the arguments of the next message with this name, and drop all other messages.
        Raises RankDied.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_dead:
            assert time.monotonic() < deadline, f"a rank hangs: no {name}"
            wait([self.connection], 0.1)
            self.read()
            while self.messages:
                found, arguments = self.messages.popleft()
                if found == name:
                    return arguments
        raise RankDied


@dataclass(eq=False)
class Served:
    """A request and its answer so far."""

    request: Request
    num_left: int
    num_computed: int = 0
    row: int = -1
    answer: list[int] = field(default_factory=list)


class RankedEngine:
    """A scheduler with a manager, a store tier, and a process for each rank."""

    def __init__(self, parallel, folder, timeout_s=10.0):
        self.parallel, self.folder, self.timeout_s = parallel, Path(folder), timeout_s
        plan = plan_of(parallel, 0)
        self.manager = KVCacheManager.for_groups(
            plan.groups, NUM_BLOCKS, MAX_LEN, num_preallocate_tokens=0, enable_events=True,
            max_num_reqs=4, context_parallel=parallel.context(), host_write="through",
            num_host_blocks=parallel.host_blocks,
        )  # fmt: skip
        self.ranks = [self.start(rank) for rank in range(parallel.num_ranks)]
        self.tier = StoreTier.over(self.manager, self.ranks, write_from="device")
        self.waiting: deque[Served] = deque()
        self.running: dict[str, Served] = {}
        self.receiving: dict[str, Served] = {}
        self.ended: list[Served] = []
        self.num_deaths = self.num_failed_pages = 0

    def start(self, rank):
        return RankProcess(
            self.parallel, rank, self.folder / self.parallel_name(rank),
            cache_identity(self.manager), self.manager.last_step_id, self.timeout_s,
        )  # fmt: skip

    def parallel_name(self, rank):
        """Return the folder name of a rank's store. Ranks that hold the same share of the KV use
        the same folder.
        """
        return str(self.parallel.share(rank, 2)).replace(" ", "-")

    def add(self, name, prompt, num_tokens):
        self.waiting.append(Served(Request(name, prompt), num_tokens))

    @property
    def is_busy(self):
        return bool(self.waiting or self.running or self.receiving)

    def step(self, kill=None):
        """Run a step. If a rank has died, replace it and recompute all requests."""
        try:
            self._step(kill)
        except RankDied:
            self._recover()

    def _step(self, kill):
        for each in self.ranks:
            each.read()
        for arrived in self.tier.poll():
            served = self.receiving.pop(arrived.request.request_id)
            served.num_computed = arrived.num_computed_tokens
            self.running[arrived.request.request_id] = served
        rows = [*self.running.values()]
        counts = [each.request.num_tokens - each.num_computed for each in rows]
        new, external = None, 0
        if self.waiting and len(self.running) + len(self.receiving) < 4:
            external = self.tier.match(self.waiting[0].request)
            if external is not None:
                new = self.waiting[0]
        admitted = []
        if new is not None:
            admitted = [
                Admit(new.request, external=External(external, delayed=True))
                if external
                else Admit(new.request, new.request.num_tokens)
            ]
        plan = self.manager.step([each.row for each in rows], counts, new=admitted)
        served = [
            (each, start)
            for each, start, status in zip(rows, plan.num_computed_tokens.tolist(), plan.status)
            if status == Status.SERVED
        ]
        is_admitted = new is not None and plan.status[-1] == Status.SERVED
        if is_admitted:
            self.waiting.popleft()
            new.row = int(plan.rows[-1])
            if external:
                self.receiving[new.request.request_id] = new
            else:
                self.running[new.request.request_id] = new
                served.append((new, int(plan.num_computed_tokens[-1])))
        batch = [
            (each.row, start, each.request.token_ids[start:].tolist()) for each, start in served
        ]
        for each in self.ranks:
            each.tell("plan", plan, batch)
        if is_admitted and external:
            self.tier.begin(new.request)
        if kill is not None:
            kill(self)
        logits, reports = self._run()
        report = StepReport.of_ranks(reports)
        self.num_failed_pages += len(report.failed_pages)
        affected = self.manager.report(report)
        for name, start in affected.items():
            if name in self.running:
                self.running[name].num_computed = start
        for (each, _), row in zip(served, () if logits is None else logits):
            if each.request.request_id in affected:
                continue
            each.num_computed = each.request.num_tokens
            token = int(row.argmax())
            each.answer.append(token)
            each.num_left -= 1
            each.request.append_tokens([token])
        self.tier.save(report)
        for each, _ in served:
            if not each.num_left:
                self.manager.free(each.request)
                self.ended.append(self.running.pop(each.request.request_id))
        if rows and not served:  # the pool is full: restart the last request
            self._restart(rows[-1])

    def _restart(self, served):
        self.running.pop(served.request.request_id, None)
        self.manager.free(served.request)
        served.num_computed, served.row = 0, -1
        self.waiting.appendleft(served)

    def _run(self):
        """Exchange the values that the ranks compute. Return the last stage's logits, and all
        reports.
        """
        deadline = time.monotonic() + 60
        done, reports, sums, previous = {}, {}, {}, None
        while len(done) < len(self.ranks):
            assert time.monotonic() < deadline, "the step hangs"
            wait([each.connection for each in self.ranks], 0.05)
            for i, rank in enumerate(self.ranks):
                rank.read()
                if rank.is_dead:
                    raise RankDied
                while rank.messages:
                    name, arguments = rank.messages.popleft()
                    if name == "sum":
                        sums[i] = arguments[0]
                    elif name == "done":
                        done[i], reports[i] = arguments
                    else:
                        assert name == "previous", name
                        previous = i
            if len(sums) == len(self.ranks):
                total = sum(sums.values())
                sums.clear()
                for each in self.ranks:
                    each.tell("answer", total)
            if previous is not None and previous - 1 in done:
                self.ranks[previous].tell("answer", done[previous - 1])
                previous = None
        return done[len(self.ranks) - 1], [*reports.values()]

    def _recover(self):
        """Replace dead ranks, and restart all requests, because their KV on the dead ranks is
        lost.
        """
        self.num_deaths += 1
        for rank in self.ranks:
            if not rank.is_dead:
                rank.tell("stop")
                with contextlib.suppress(RankDied):
                    rank.wait_for("stopped", 60)
        self.manager.abort(self.manager.last_step_id)
        for each in [*self.receiving.values()]:
            self.tier.cancel(each.request)
            self.waiting.appendleft(each)
        self.receiving.clear()
        for each in [*self.running.values()]:
            self._restart(each)
        for each in self.waiting:
            each.num_computed, each.row = 0, -1
        for i, rank in enumerate(self.ranks):
            if rank.is_dead:
                rank.process.join()
                self.ranks[i] = self.start(i)
                self.tier.replace_rank(i, self.ranks[i])
        assert self.manager.cache.reset()

    def settle(self):
        """Run steps without requests until no blocks are waiting to be stored."""
        deadline = time.monotonic() + 60
        while self.tier.is_busy:
            assert time.monotonic() < deadline, "puts do not end"
            self.step()
            time.sleep(0.002)

    def close(self):
        """Stop all ranks, and check that nothing leaks."""
        self.settle()
        assert self.tier.close(30)
        assert self.manager.pool.num_free == self.manager.pool.num_total
        check_invariants(self.manager)
        assert self.tier.num_loading_requests == self.tier.num_waiting_blocks == 0
        return self.tier.stats


def prompts_of(rng, number):
    """Return prompts with common prefixes, and the number of tokens to generate for each prompt."""
    vocabulary = dense("llama", NUM_LAYERS).config.vocab_size
    heads = [rng.choices(range(3, vocabulary), k=rng.randint(20, 90)) for _ in range(6)]
    return [
        (
            rng.choice(heads)[: rng.randint(10, 90)] + rng.choices(range(3, vocabulary), k=5),
            rng.randint(1, 6),
        )
        for _ in range(number)
    ]


def serve(parallel, folder, prompts, num_kills=0, seed=0):
    """Serve prompts, kill ranks at random moments, and check the answers. Returns counts."""
    rng = random.Random(seed)
    engine = RankedEngine(parallel, folder)
    begun, worst, answers, kills = time.monotonic(), 0.0, {}, Counter()
    per_kill = len(prompts) // num_kills if num_kills else 0

    def kill(engine):
        victim = sum(kills.values()) % len(engine.ranks)
        time.sleep(rng.choice([0.0, 0.001, 0.01]))
        os.kill(engine.ranks[victim].process.pid, signal.SIGKILL)
        kills[victim] += 1

    started, next_kill = {}, per_kill // 2
    for number, (prompt, num_tokens) in enumerate(prompts):
        engine.add(str(number), prompt, num_tokens)
        started[str(number)] = time.monotonic()
        is_due = per_kill and number == next_kill
        while is_due or len(engine.waiting) > 2 or (number == len(prompts) - 1 and engine.is_busy):
            busy = bool(engine.running or engine.receiving)
            engine.step(kill if is_due and busy else None)
            if is_due and busy:
                is_due, next_kill = False, next_kill + per_kill
            if rng.random() < 0.05 and not engine.running and not engine.receiving:
                engine.manager.cache.reset()
        for each in engine.ended:
            name = each.request.request_id
            worst = max(worst, time.monotonic() - started[name])
            answers[name] = each.answer
        engine.ended.clear()
    stats = engine.close()
    wrong = sum(
        answers.get(str(number)) != greedy(dense("llama", NUM_LAYERS), prompt, num_tokens)
        for number, (prompt, num_tokens) in enumerate(prompts)
    )
    return {
        "requests": len(prompts), "wrong": wrong, "hung": len(prompts) - len(answers),
        "kills": dict(kills), "deaths": engine.num_deaths, "loads": stats.loads,
        "loaded_tokens": stats.loaded_tokens, "failed_loads": stats.failed_loads,
        "corrupt_blocks": stats.corrupt_blocks + stats.misfit_blocks,
        "failed_pages": engine.num_failed_pages, "worst_s": round(worst, 2),
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


FORMS = {
    "TP 2": Parallel(tp=2),
    "PP 2": Parallel(pp=2),
    "DCP 2": Parallel(dcp=2),
    "TP 4": Parallel(tp=4),
    "TP 2 with a host tier": Parallel(tp=2, host_blocks=40),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=FORMS, action="append")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.form or FORMS:
            prompts = prompts_of(random.Random(args.seed), args.requests)
            print(name, serve(FORMS[name], folder, prompts, args.kills, args.seed), flush=True)


if __name__ == "__main__":
    main()
