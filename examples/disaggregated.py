# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two processes, with different tensor-parallel sizes, block sizes and layouts.

The prefill engine (TP 2, block size 16, HND) computes a prompt and publishes the prompt's blocks under a
lease. The decode engine (TP 1, block size 32, NHD) loads the blocks and compares every byte of the
prompt's KV. All other messages between the engines are JSON.
"""

import json
import time
from multiprocessing import get_context

import torch

from kvcache import Admit, External, KVCacheManager, KVStorage, LayerSpec, Request, plan_cache
from kvcache_exchange.disaggregation import CacheRank, Connector, ConnectorOptions, layouts_of_plan

HEADS, SIZE, LAYERS, MAX_LEN = 4, 64, 4, 2048
PROMPT = [(7 * i) % 1000 for i in range(1500)]
# Remove `transport` to use NIXL.
OPTIONS = ConnectorOptions(transport="tcp", lease_s=30, timeout_s=20)


class Engine:
    """An engine's manager, the pages of each rank, and the connector to other engines."""

    def __init__(self, engine_id: str, tp_size: int, block_size: int, layout: str) -> None:
        shape = {"num_kv_heads": HEADS // tp_size, "head_size": SIZE, "dtype": "float32"}
        layers = [LayerSpec(f"{i}", "full_attention", block_size, **shape) for i in range(LAYERS)]
        plan = plan_cache(layers, 2**25, max_model_len=MAX_LEN)
        self.pages = [KVStorage.for_plan(plan, layout=layout)[0] for _ in range(tp_size)]
        self.manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, MAX_LEN)
        layouts = layouts_of_plan(plan, self.pages[:1], engine_id=engine_id, tp_size=tp_size)
        self.ranks = [
            CacheRank(layouts, [pages], rank=rank, options=OPTIONS)
            for rank, pages in enumerate(self.pages)
        ]
        self.connector = Connector(self.manager, self.ranks, engine_id=engine_id, options=OPTIONS)

    def parts(self, request: Request, first: int, end: int):
        """Yield, for each layer and rank, the slots of K and V and the values that the model computes."""
        positions = torch.arange(first, end)
        blocks = torch.from_numpy(self.manager.block_ids(request))
        size = self.manager.block_sizes[0]
        at = blocks[positions // size].long(), positions % size
        token = torch.from_numpy(request.token_ids[first:end])[:, None, None]
        for rank, pages in enumerate(self.pages):
            heads = HEADS // len(self.pages)
            head = torch.arange(rank * heads, (rank + 1) * heads)[None, :, None]
            for layer in range(LAYERS):
                for part, cache in enumerate((pages.key_cache(layer), pages.value_cache(layer))):
                    value = token + 1000 * positions[:, None, None] + head * 7 + layer * 3 + part
                    yield cache, at, (value + torch.arange(SIZE)).float()

    def compute(self, request: Request, first: int, end: int) -> None:
        for cache, at, value in self.parts(request, first, end):
            cache[at] = value


def prefill(pipe) -> None:
    engine = Engine("prefill", tp_size=2, block_size=16, layout="HND")
    while (prompt := pipe.recv()) is not None:
        begun = time.perf_counter()
        request = Request("r1", prompt)
        step = engine.manager.step(new=[request])
        engine.compute(request, int(step.num_computed_tokens[0]), len(prompt))
        offer = engine.connector.publish(request)  # instead of `manager.free`
        pipe.send((json.dumps(offer), time.perf_counter() - begun))
        while engine.connector.num_leased_requests:  # an engine polls once per step
            engine.connector.poll()
            time.sleep(0.001)
        pipe.send(engine.manager.pool.num_total - engine.manager.pool.num_free)
    for rank in engine.ranks:
        rank.close()


def decode(engine: Engine, offer: str) -> tuple[dict[str, float], int]:
    """Load the blocks and compute the last token. Return the seconds per phase and the number of compared
    bytes.
    """
    times, num_compared, last = {}, 0, time.perf_counter()
    request = Request("r1", [*PROMPT, 5])

    def done(phase: str) -> None:
        nonlocal last
        times[phase], last = time.perf_counter() - last, time.perf_counter()

    # `match` raises ValueError if the offer is invalid.
    count = engine.connector.match(request, json.loads(offer))
    engine.manager.step(new=[Admit(request, external=External(count, delayed=True))])
    done("check, allocate")
    engine.connector.begin(request)
    while not (loaded := engine.connector.poll()):
        time.sleep(0.0005)
    done("connect, pull")
    # After an error, an engine recomputes the remaining tokens.
    assert loaded[0].error is None, loaded[0].error
    for cache, at, right in engine.parts(request, 0, count):
        assert torch.equal(cache[at], right)
        num_compared += right.nbytes
    done("verify")
    step = engine.manager.step([engine.manager.row(request)], [1])
    engine.compute(request, int(step.num_computed_tokens[0]), request.num_tokens)
    done("decode a token")
    engine.manager.free(request)
    return times, num_compared


if __name__ == "__main__":
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    engine = Engine("decode", tp_size=1, block_size=32, layout="NHD")
    for attempt in ("first", "connected"):
        ours.send(PROMPT)
        offer, seconds = ours.recv()
        times, num_compared = decode(engine, offer)
        for phase, spent in {"prefill": seconds, **times}.items():
            print(f"{attempt:10} {phase:16} {spent * 1000:8.1f} ms")
        assert ours.recv() == 0, "blocks are still held after the reader has finished"
        engine.manager.cache.reset()
    ours.send(None)
    process.join()
    for rank in engine.ranks:
        rank.close()
    print(f"{num_compared:,} bytes of {len(PROMPT)} tokens were correct in both loads")
    num_read = engine.connector.num_received_bytes
    print(
        f"{num_read:,} bytes were read in both loads; slots after the last token were not compared"
    )
