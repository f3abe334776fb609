# SPDX-License-Identifier: Apache-2.0
"""A small engine for disaggregation tests.

It has a manager and the pages of all ranks; each KV value identifies its token.
"""

import contextlib
import glob
import time

import torch

from kvcache import (
    Admit,
    External,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Request,
    Status,
    plan_cache,
)
from kvcache.allocator import check_invariants
from kvcache.transfer import StateTensor
from kvcache_exchange.disaggregation import CacheRank, Connector, ConnectorOptions, layouts_of_plan
from tests.machinery.forked import Forked, received, send

HEADS, SIZE, LAYERS, WINDOW = 4, 8, 4, 48
STATE = [
    StateTensor(sections=[(HEADS, 4), (2, 8)], row_size=3, dtype="float32"),
    StateTensor(sections=[(HEADS, 2)], row_size=5, dtype="float32"),
]


class Engine:
    """An engine with all its ranks in this process."""

    def __init__(
        self, engine_id, *, tp=1, pp=1, block=16, layout="NHD", backend="FLASHINFER",
        kinds=("full",), num_blocks=200, dtype="float32", model=None, options=None, secret="",
        manager=None, device="cpu", num_heads=HEADS, head_size=SIZE, num_layers=LAYERS,
        max_model_len=1024,
    ):  # fmt: skip
        self.num_heads, self.head_size = num_heads, head_size
        shape = {"num_kv_heads": num_heads // tp, "head_size": head_size, "dtype": dtype}
        layers = []
        for i in range(num_layers // pp):  # layers per pipeline stage
            for kind in kinds:
                name = f"{kind}.{i}"
                if kind == "full":
                    layers.append(LayerSpec(name, "full_attention", block, **shape))
                elif kind == "window":
                    window = {"options": {"window": WINDOW}}
                    layers.append(LayerSpec(name, "sliding_window", block, **shape, **window))
                else:
                    size = sum(tensor.num_bytes(tp) for tensor in STATE)
                    layers.append(
                        LayerSpec(name, "recurrent", block, state_bytes=size, dtype="float32")
                    )
        page = plan_cache(layers, 1 << 40, max_model_len=max_model_len).page_bytes
        self.plan = plan_cache(layers, page * num_blocks, max_model_len=max_model_len)
        self.tp, self.per_stage, self.num_ranks = tp, num_layers // pp, tp * pp
        self.kinds = [group.layers[0].split(".")[0] for group in self.plan.groups]
        options = ConnectorOptions(**{"transport": "tcp", "timeout_s": 60.0, **(options or {})})
        self.storages = [
            KVStorage.for_plan(self.plan, backend=backend, layout=layout, device=device)
            for _ in range(self.num_ranks)
        ]
        # Memory that an earlier engine used could contain the KV that a test expects to be loaded.
        for pages in self.all_pages():
            for layer in range(pages.num_layers):
                pages.layer(layer).fill_(0)
        self.manager = KVCacheManager.for_groups(
            self.plan.groups, self.plan.num_pages, max_model_len, num_preallocate_tokens=0,
            **(manager or {}),
        )  # fmt: skip
        states = {g: STATE for g, kind in enumerate(self.kinds) if kind == "state"}
        layers = {
            g: [f"{kind}.{i}" for i in range(num_layers)] for g, kind in enumerate(self.kinds)
        }
        layouts = layouts_of_plan(
            self.plan, self.storages[0], engine_id=engine_id, tp_size=tp, pp_size=pp,
            states=states, layers=layers,
        )  # fmt: skip
        self.ranks = [
            CacheRank(layouts, storages, rank=rank, options=options, secret=secret.encode())
            for rank, storages in enumerate(self.storages)
        ]
        self.connector = Connector(
            self.manager, self.ranks, engine_id=engine_id, model=model, options=options
        )

    def close(self):
        for rank in self.ranks:
            rank.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # The "model": values that encode token, position, layer, head and element index.

    def values(self, rank, layer, part, tokens, first):
        """Return [n, heads, head_size] for tokens that start at position `first`."""
        heads, rank = self.num_heads // self.tp, rank % self.tp
        head = torch.arange(rank * heads, (rank + 1) * heads)[None, :, None]
        place = torch.arange(self.head_size)[None, None, :]
        token = torch.tensor(tokens, dtype=torch.int64)[:, None, None]
        position = torch.arange(first, first + len(tokens))[:, None, None]
        mixed = token * 131 + position * 17 + layer * 1009 + part * 503 + head * 53 + place
        return (mixed % 65_521).float()

    def state(self, rank, layer, tokens):
        """Return the rank's part of the state after `tokens`, as one row of elements."""
        rank, found = rank % self.tp, []
        seed = (sum(tokens) * 31 + len(tokens)) % 4093
        for t, tensor in enumerate(STATE):
            for s, (units, unit_size) in enumerate(tensor.sections):
                per_rank = units // self.tp if units >= self.tp else 1
                begin = rank * units // self.tp
                unit = torch.arange(begin, begin + per_rank)[:, None, None]
                channel = torch.arange(unit_size)[None, :, None]
                row = torch.arange(tensor.row_size)[None, None, :]
                mixed = (seed + layer * 7 + t * 3 + s) * 100 + unit * 37 + channel * 11 + row
                found.append((mixed % 65_521).float().reshape(-1))
        return torch.cat(found)

    def rank_layers(self):
        """Yield (rank, index of the layer on the rank, index of the layer among all layers of its
        kind).
        """
        for rank in range(self.num_ranks):
            for at in range(self.per_stage):
                yield rank, at, rank // self.tp * self.per_stage + at

    def each_page(self, request, group, first, end):
        """Yield (block, slots, token positions) for each block that holds tokens of [first, end)."""
        size = self.manager.block_sizes[group]
        for number, block in enumerate(self.manager.block_ids(request, group).tolist()):
            low, high = max(first, number * size), min(end, (number + 1) * size)
            if block and low < high:
                yield block, slice(low - number * size, high - number * size), (low, high)

    def compute(self, request, first, end):
        """Write the KV of tokens [first, end) to all layers."""
        tokens = request.token_ids.tolist()
        for group, kind in enumerate(self.kinds):
            for rank, at, layer in self.rank_layers():
                storage = self.storages[rank][group]
                if kind == "state":
                    page = self.state_page(request, group, end)
                    row = self.state(rank, layer, tokens[:end])
                    storage.key_cache(at)[page].view(-1)[: len(row)] = row
                    continue
                for block, slots, (low, high) in self.each_page(request, group, first, end):
                    for part, cache in enumerate((storage.key_cache(at), storage.value_cache(at))):
                        cache[block, slots] = self.values(
                            rank, layer, part, tokens[low:high], low
                        ).to(cache.dtype)

    def state_page(self, request, group, end):
        size = self.manager.block_sizes[group]
        return int(self.manager.block_ids(request, group)[(end - 1) // size])

    def wrong(self, request, end):
        """Describe an incorrect value that the token after the first `end` tokens would read, or
        return None.
        """
        tokens = request.token_ids.tolist()
        for group, kind in enumerate(self.kinds):
            first = max(end - WINDOW + 1, 0) if kind == "window" else 0
            for rank, at, layer in self.rank_layers():
                storage = self.storages[rank][group]
                if kind == "state":
                    row = self.state(rank, layer, tokens[:end])
                    page = self.state_page(request, group, end)
                    if not torch.equal(storage.key_cache(at)[page].view(-1)[: len(row)].cpu(), row):
                        return f"state of layer {layer}, rank {rank}"
                    continue
                seen = 0
                for block, slots, (low, high) in self.each_page(request, group, first, end):
                    seen += high - low
                    for part, cache in enumerate((storage.key_cache(at), storage.value_cache(at))):
                        right = self.values(rank, layer, part, tokens[low:high], low)
                        if not torch.equal(cache[block, slots].cpu(), right.to(cache.dtype)):
                            return f"{kind} layer {layer}, rank {rank}, tokens {low} to {high}"
                if seen != end - first:
                    return f"{kind}: {seen} tokens of {end - first}"
        return None

    def all_pages(self):
        """Return the pages of all ranks."""
        return [*{id(each[0].pages): each[0].pages for each in self.storages}.values()]

    # Engine steps.

    def apply(self, plan):
        for pages in self.all_pages():
            for layer in range(pages.num_layers):
                memory = pages.layer(layer)
                for source, target in plan.copy.tolist():
                    memory[target] = memory[source]
                for page in plan.zero.tolist():
                    memory[page] = 0

    def prefill(self, request):
        """Compute the tokens of a request that follow its prefix hit.

        Return the hit length, or None if the request waits.
        """
        plan = self.manager.step(new=[request])
        if plan.status.tolist() != [Status.SERVED]:
            return None
        self.apply(plan)
        hit = int(plan.num_computed_tokens[0])
        self.compute(request, hit, request.num_tokens)
        return hit

    def admit(self, request, offer):
        """Admit a request, and begin to load its KV from a peer.

        Return False if there is nothing to load or the request must wait. Raises ValueError if the
        request is rejected.
        """
        count = self.connector.match(request, offer)
        if count == 0:
            return False
        plan = self.manager.step(new=[Admit(request, external=External(count, delayed=True))])
        if plan.status.tolist() != [Status.SERVED]:
            return False
        self.apply(plan)
        self.connector.begin(request)
        return True

    def loaded(self, request, timeout_s=100):
        """Wait until a load has ended, and return its result."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for each in self.connector.poll():
                assert each.request is request
                return each
            time.sleep(0.001)
        raise AssertionError(f"no result for request {request.request_id} within {timeout_s} s")

    def recompute(self, request, loaded):
        """Continue after a load, which may have failed, by computing the remaining known tokens."""
        if loaded is None or loaded.num_computed_tokens is None:
            assert self.prefill(request) is not None
            return
        left = request.num_tokens - loaded.num_computed_tokens
        plan = self.manager.step([self.manager.row(request)], [left])
        assert plan.status.tolist() == [Status.SERVED]
        self.apply(plan)
        self.compute(request, loaded.num_computed_tokens, request.num_tokens)

    def drained(self, timeout_s=100):
        """Wait up to `timeout_s` until no request, reader or transport holds a block.

        Return False after a timeout.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.connector.poll()
            if self.is_empty:
                check_invariants(self.manager)
                return True
            time.sleep(0.01)
        return False

    @property
    def is_empty(self):
        pool, connector = self.manager.pool, self.connector
        return (
            pool.num_free == pool.num_total
            and self.manager.pool.num_kept == 0
            and connector.num_leased_requests == connector.num_loading_requests == 0
        )


class EngineProcess(Forked):
    """An engine in a separate process, controlled by a test."""

    def __init__(self, engine_id, **options):
        self._options = {"engine_id": engine_id, **options}
        self.start()

    def start(self):
        """Start the process. A killed process restarts under the same name."""
        super().__init__(serve, **self._options)


def queued_s():
    """Return the longest total time, in seconds, that a thread of this process has waited for a
    core.
    """
    found = []
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError), open(path) as file:
            found.append(int(file.read().split()[1]) / 1e9)
    return max(found, default=0.0)


def load_all(engine, requests):
    """Load requests in parallel, compute missing tokens, and free the requests.

    Return one result per request.
    """
    results, waiting = [], {}
    for each in requests:
        request = Request(each["id"], each["tokens"])
        result = {"id": each["id"], "error": None, "wrong": None}
        result |= {"wait_s": 0.0, "starved_s": 0.0}
        results.append(result)
        try:
            if each["offer"] is not None and engine.admit(request, each["offer"]):
                waiting[each["id"]] = request, result, time.monotonic(), queued_s()
                continue
            result["error"] = "not loaded"
            engine.connector.cancel(request)
        except ValueError as refusal:
            result["error"] = f"refused: {refusal}"
        finish(engine, request, None, result)
    while waiting:
        for loaded in engine.connector.poll():
            request, result, begun, queued = waiting.pop(loaded.request.request_id)
            result["wait_s"], result["error"] = time.monotonic() - begun, loaded.error
            result["starved_s"] = queued_s() - queued
            if loaded.num_computed_tokens:
                result["wrong"] = engine.wrong(request, loaded.num_computed_tokens)
            finish(engine, request, loaded, result)
        time.sleep(0.001)
    return results


def finish(engine, request, loaded, result):
    engine.recompute(request, loaded)
    result["wrong"] = result["wrong"] or engine.wrong(request, request.num_tokens)
    engine.manager.free(request)


def serve(commands, **options):
    """Execute commands until the test process ends, and maintain leases meanwhile."""
    torch.set_num_threads(1)
    with Engine(**options) as engine:
        send(commands, ready=True)
        while True:
            engine.connector.poll()
            if commands.poll(0.005):
                send(commands, **obey(engine, received(commands)))


def obey(engine, command):
    """Execute a command, and return the response."""
    match command["command"]:
        case "prefill":
            request, offer = Request(command["id"], command["tokens"]), None
            hit = engine.prefill(request)
            if hit is not None:
                offer = engine.connector.publish(request, lease_s=command.get("lease_s"))
            return {"offer": offer, "hit": hit}
        case "load":
            return {"results": load_all(engine, command["requests"])}
        case "drained":
            return {"drained": engine.drained(command.get("seconds", 10))}
