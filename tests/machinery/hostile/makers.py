# SPDX-License-Identifier: Apache-2.0
"""Objects for the fuzzer that cannot be created just by calling a constructor with valid arguments."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

import kvcache
import kvcache.layouts as layouts
import kvcache.transfer as transfer
import kvcache_lab
from kvcache import (
    Admit,
    BlockPool,
    External,
    GroupSpec,
    GroupTable,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    Request,
    StepPlan,
    StepReport,
    SwapEngine,
    compat,
    hash_blocks,
    plan_cache,
)
from kvcache.compat import ascend_block_table, vllm_block_table
from kvcache.sanitizer import SanitizedGroup, Sanitizer
from kvcache.worker import HostDeviceBuffer
from kvcache_exchange import disaggregation, store
from kvcache_exchange.hints import Hint
from kvcache_exchange.router_events import EventPublisher, EventSubscriber
from kvcache_exchange.store import StoreRank
from kvcache_exchange.transport import make_transport
from kvcache_serve import engine, server
from kvcache_serve.demo import DemoReport
from kvcache_serve.engine import Batch
from kvcache_serve.engine.transformers import attach
from kvcache_serve.engine.transformers.tiny_models import tiny_model
from kvcache_serve.server import engine_loop
from kvcache_serve.server.engine_loop import Answer
from tests.machinery import tokenizers
from tests.machinery.hostile.ops import Calls
from tests.machinery.stores import MemoryStore
from tests.simulator.sequences import Group, Seq, Status

if TYPE_CHECKING:
    from tests.machinery.hostile.world import World

TOKENS = 18  # number of tokens of the request, all of which are computed
SIZES = {"block_size": 4, "num_kv_heads": 2, "head_size": 8}


class Model:
    """A model that implements what `Engine` needs, with arbitrary logits."""

    vocab_size = 50

    def __init__(self, cache: kvcache.KVCache) -> None:
        self.cache = cache

    def forward(self, batch: object) -> torch.Tensor:
        out = torch.zeros(len(batch.logits_indices), self.vocab_size)
        out[:, 7] = 1.0
        return out


class Tokenizer:
    """A stand-in for a transformers tokenizer that implements what `TokenizerTexts` needs."""

    eos_token_id = 1

    def get_vocab(self) -> dict[str, int]:
        return {chr(token): token for token in range(128)}

    def encode(self, text: str, **options: object) -> list[int]:
        return [*text.encode()]

    def decode(self, ids: list[int], **options: object) -> str:
        return bytes(each % 128 for each in ids).decode()

    def apply_chat_template(self, messages: list, **options: object) -> list[int]:
        return [1, 2, 3]


def table(w: World) -> GroupTable:
    sizes = {"max_num_reqs": 4, "max_num_tokens": 16, "device": w.device}
    table = kvcache.BlockTables([kvcache.TableShape(4, 8)], **sizes)[0]
    table.add_row([3, 4], 0)
    table.commit_updates()
    return table


def engine_tables(of: type, w: World) -> object:
    """Return tables of an engine with a row."""
    if issubclass(of, kvcache.BlockTables):
        made = of(4, 32, 16, False, "cpu", [4, 8])
        made.add_row([[5, 6, 7], [2, 3]], 0)
    else:
        made = of(4, 4, 8, 16)
        made.add_row([3, 4], 0)
    return made


def engine_request(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, all_token_ids=[*range(TOKENS)], num_computed_tokens=0)


def engine_manager(w: World) -> compat.KVCacheManager:
    """Return a manager with one request."""
    manager, request = compat.KVCacheManager(4, 40, 64), w.get("engine request")
    manager.allocate_slots(request, TOKENS, ())
    request.num_computed_tokens = TOKENS
    return manager


def tables(w: World) -> kvcache.BlockTables:
    groups = [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 8, {"window": 12})]
    sizes = {"max_num_reqs": 4, "max_model_len": 32, "max_num_tokens": 16}
    tables = kvcache.BlockTables.for_groups(groups, **sizes, device=w.device)
    tables.add_row(([5, 6, 7], [2, 3]), 0)
    tables.commit_updates()
    return tables


def plan(w: World) -> kvcache.CachePlan:
    layers = [LayerSpec(f"l{i}", "full_attention", **SIZES, dtype="float32") for i in range(2)]
    layers.append(LayerSpec("w", "sliding_window", **SIZES, dtype="float32", options={"window": 8}))
    return plan_cache(layers, 2**16, max_model_len=64, max_num_batched_tokens=64)


def cache(w: World) -> kvcache.KVCache:
    options = {"enable_events": True, "explain_misses": 1, "device": w.device}
    return kvcache.build(w.get("CachePlan"), max_num_reqs=6, num_host_blocks=6, **options)


def sanitizer(w: World) -> Sanitizer:
    """Make a sanitizer with a token group, a recurrent group, and the request "a"."""
    groups = [SanitizedGroup("full", 4), SanitizedGroup("state", 4)]
    made = Sanitizer(groups, 9, log=lambda report: None)
    made.observe_request("a", range(6))
    return made


def steps(w: World) -> SimpleNamespace:
    """Make a manager with requests in every state, and a worker that has applied its plans."""
    cache = w.get("KVCache")
    manager, tokens = cache.manager, [list(range(100 * i, 100 * i + TOKENS)) for i in range(8)]
    request, slots, old = (Request(name, tokens[i]) for i, name in enumerate(("a", "s", "o")))
    plan = manager.step(new=[request, old])
    cache.worker.apply(plan)
    report = StepReport(plan.step_id, completed=True)
    manager.report(report)
    manager.free(old)
    manager.admit(Admit(slots, num_tokens=TOKENS), ())
    receiving = Request("r", tokens[4])
    plan = manager.step(new=[Admit(receiving, external=External(8, delayed=True))])
    cache.worker.apply(plan)
    manager.cache.pin("pinned", request)
    cache.tables.compute_slot_mapping(np.array([0], np.int32), np.array([TOKENS - 1]))
    cache.tables.commit_slot_mapping(1)
    return SimpleNamespace(
        request=request, slots=slots, receiving=receiving, plan=plan, report=report,
        next_plan=None, waiting=Request("n", tokens[5]), child=Request("c", [*tokens[0], 7]),
    )  # fmt: skip


def pool(w: World) -> BlockPool:
    pool = BlockPool(20, eviction="learned")
    pool.allocate(5)
    pool.publish([1, 2, 3], hashes()[:3])
    pool.release([3])
    return pool


def hashes() -> np.ndarray:
    return hash_blocks(range(40), 8)


def sequences(w: World) -> SimpleNamespace:
    manager = w.get("BlockSpaceManager")
    groups = [Group(f"g{i}", [Seq(i, list(range(20 * i, 20 * i + TOKENS)))]) for i in (1, 2)]
    for group in groups:
        manager.allocate(group)
        group.set_status(Status.RUNNING)
    manager.mark_blocks_as_computed(groups[0], TOKENS)
    manager.swap_out(groups[1])
    groups[1].set_status(Status.SWAPPED)
    return SimpleNamespace(running=groups[0], swapped=groups[1])


def storage(w: World) -> KVStorage:
    made = KVStorage(12, **SIZES, num_layers=2, dtype=torch.float32, device=w.device)
    made.pages.memory.zero_()
    return made


def step_plan(w: World) -> StepPlan:
    none, ids = np.zeros(0, np.int32), np.array([1, 2], np.int32)
    return StepPlan(
        1, none, none, none, append_rows=ids[:1], append_splits=[ids - 1], append_ids=[ids[:1]],
        replace=[np.zeros((0, 3), np.int32)],
    )  # fmt: skip


def multi_plan(w: World) -> StepPlan:
    """Return a plan for the tables of two groups."""
    plan = step_plan(w)
    twice = {name: getattr(plan, name) * 2 for name in ("append_splits", "append_ids", "replace")}
    return StepPlan(
        1, plan.rows, plan.status, plan.num_computed_tokens, append_rows=plan.append_rows, **twice
    )


def descriptions(name: str) -> transfer.CacheDescription:
    return transfer.CacheDescription(
        engine_id=name, num_layers=2, total_num_kv_heads=2, head_size=8, block_size=4,
        dtype="float32",
    )  # fmt: skip


def states(name: str) -> transfer.StateDescription:
    tensor = transfer.StateTensor(sections=((2, 4),), dtype="float32")
    return transfer.StateDescription(engine_id=name, num_layers=2, tensors=(tensor,))


def transport(w: World) -> transfer.Transport:
    memory = w.get("transfer memory")
    one, other = (make_transport(name, "tcp") for name in ("one", "other"))
    w.on_close += [one.close, other.close]
    for each in (one, other):
        each.register([(memory.ctypes.data, memory.nbytes)])
    one.connect(other.metadata())
    return one


def group_fetch(w: World) -> transfer.GroupFetch:
    plan = transfer.plan_transfer(descriptions("one"), descriptions("other"), 0)
    memory = w.get("transfer memory")
    half = memory.nbytes // 2
    regions = np.arange(16) * 256
    regions = regions[: len(regions)]
    count = transfer.region_addresses(descriptions("one"), w.get("Pages"), 0)
    near = memory.ctypes.data + np.arange(len(count)) * 4096
    return transfer.GroupFetch(plan, np.array([1, 2]), np.array([2, 1]), near, {0: near + half})


def a_read(w: World) -> transfer.Transfer:
    transport, memory = w.get("Transport"), w.get("transfer memory").ctypes.data
    return transport.read("other", np.array([memory]), np.array([memory + 4096]), np.array([64]))


def make_engine(w: World) -> engine.Engine:
    made = engine.Engine(Model(w.get("KVCache")))
    for name in ("running", "waiting"):
        made.add([1, 2, 3, 4, 5], engine.SamplingParams(max_tokens=8, n=2), request_id=name)
    made.step()
    return made


def scheduled(w: World) -> SimpleNamespace:
    scheduler = engine.Scheduler(w.get("manager alone"), max_num_batched_tokens=64)
    sequence = engine.Sequence(Request("q", range(10)), num_rows=2)
    scheduler.add(sequence)
    return SimpleNamespace(scheduler=scheduler, sequence=sequence, step=scheduler.schedule())


def ended_step(w: World) -> object:
    """Complete a step and return its sequence."""
    scheduler = w.get("Scheduler")
    scheduler.complete(w.get("ScheduledStep"))
    return w.get("Sequence")


def answer(w: World) -> object:
    async def make() -> Answer:
        return Answer(w.get("EngineLoop"), 1)

    answer = asyncio.run(make())
    answer.generation = w.get("Engine").generations[0]
    return answer


def connectors(w: World) -> SimpleNamespace:
    """Make a sender with a published offer, and a receiver."""
    from tests.machinery.disaggregation_engine import Engine

    tokens = range(2 * TOKENS)
    one, other = (Engine(name, block=16, num_blocks=80) for name in ("one", "other"))
    w.on_close += [one.close, other.close]
    request = Request("r", tokens)
    one.prefill(request)
    offer = json.loads(json.dumps(one.connector.publish(request)))
    computed = Request("computed", range(50, 50 + 2 * TOKENS))
    one.prefill(computed)
    return SimpleNamespace(one=one, other=other, request=request, offer=offer, computed=computed)


def stored(w: World) -> SimpleNamespace:
    """Make a tier, and a request of which it may store the blocks."""
    groups = [GroupSpec("full_attention", 4)]
    manager = KVCacheManager.for_groups(
        groups, 12, 64, num_preallocate_tokens=0, enable_events=True
    )
    request = Request("stored", range(TOKENS))
    plan = manager.step(new=[request])
    tier = store.StoreTier(manager, w.get("Pages"), MemoryStore(), model="m", staging_bytes=8192)
    w.on_close.append(tier.close)
    report = StepReport(plan.step_id, True)
    return SimpleNamespace(tier=tier, manager=manager, request=request, report=report)


def new_rank(w: World) -> object:
    """Make a rank that can replace the tier's rank."""
    return store_rank(w, "")


def store_rank(w: World, name: str = "another") -> object:
    given = {"model": "m", "rank": name, "staging_bytes": 8192}
    rank = StoreRank(w.get("StoreTier")._manager, w.get("Pages"), MemoryStore(), **given)
    w.on_close.append(rank.close)
    return rank


def disk(w: World) -> object:
    made, memory = store.DiskStore(w.get("folder") / "store", 2**16), w.get("store memory")
    made.open(memory.reshape(-1), 64)
    made.put(["k1"], [memory[0]])
    w.on_close.append(made.close)
    return made


def block_store(w: World) -> object:
    """Make a block store, which is on disk if NIXL is installed."""
    return w.get("DiskStore") if importlib.util.find_spec("nixl") else MemoryStore()


def folder(w: World) -> Path:
    folder = Path(tempfile.mkdtemp(dir="."))
    w.on_close.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


def trace(w: World) -> str:
    path = w.get("folder") / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    path.write_text(json.dumps(line) + "\n")
    return os.fspath(path)


def hardware(w: World) -> str:
    path = w.get("folder") / "hardware.json"
    path.write_text('{"prefill_speed": 1}')
    return os.fspath(path)


def publisher(w: World) -> object:
    publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    w.on_close.append(publisher.close)
    return publisher


def subscriber(w: World) -> object:
    publisher = w.get("EventPublisher")
    subscriber = EventSubscriber(
        publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=0.2
    )
    w.on_close.append(subscriber.close)
    return subscriber


def attached(w: World) -> object:
    paged = attach(w.get("PreTrainedModel"), "1MiB", max_model_len=64, max_num_seqs=4)
    w.on_close.append(paged.detach)
    return paged


def batch(w: World) -> object:
    cache = w.get("KVCache")
    plan = cache.manager.step(new=[Request("b", range(9)), Request("b2", range(30, 33))])
    cache.worker.apply(plan)
    return Batch(cache, plan.rows, plan.num_computed_tokens, [range(9), range(30, 33)])


def connector_output(w: World) -> object:
    return SimpleNamespace(kv_connector_output=compat.KVConnectorOutput(finished_sending={"a"}))


def op(name: str, index: int) -> Callable[[World], object]:
    def make(w: World) -> object:
        key = f"op {name}"
        if key not in w._made:
            w._made[key] = getattr(Calls(random.Random(3)), name)()
        return w._made[key][index]

    return make


def next_plan(w: World) -> StepPlan:
    """Return a plan that follows the last plan of the cache's manager and changes nothing."""
    last, none = w.get("steps").plan.step_id, np.zeros(0, np.int32)
    return StepPlan(
        last + 1, none, none, none, previous_step_id=last, append_rows=none,
        append_splits=[np.zeros(1, np.int32)] * 3, append_ids=[none] * 3,
        replace=[np.zeros((0, 3), np.int32)] * 3,
    )  # fmt: skip


def kept(w: World) -> Request:
    """Free a request but keep its blocks."""
    manager = w.get("KVCacheManager")
    manager.free(w.get("Request"), keep_blocks=True)
    return w.get("Request")


def fp8(w: World) -> KVStorage:
    """Make a storage in which scales are stored next to the tokens."""
    return KVStorage(8, **SIZES, num_layers=2, dtype=torch.float8_e4m3fn, device=w.device)


def empty_pages(w: World) -> Pages:
    pages = Pages.allocate(8, [[256]], device=w.device)
    pages.memory.zero_()
    return pages


def scaled(w: World) -> KVStorage:
    options = {"dtype": torch.float8_e4m3fn, "scale_bytes_per_token": 8, "device": w.device}
    made = KVStorage(8, **SIZES, num_layers=2, **options)
    made.pages.memory.zero_()
    return made


def state_batch(w: World) -> object:
    layer = LayerSpec("s", "recurrent", 4, state_bytes=64, dtype="float32")
    cache = kvcache.build(plan_cache([layer], 2**14, max_model_len=32), max_num_reqs=2)
    plan = cache.manager.step(new=[Request("b", range(9))])
    cache.worker.apply(plan)
    return Batch(cache, plan.rows, plan.num_computed_tokens, [range(9)])


def encoder(w: World) -> Group:
    """Make a sequence group with an encoder and a cross-attention table."""
    group = Group("e", [Seq(22, [1, 2])], Seq(23, [1] * 5))
    w.get("BlockSpaceManager").allocate(group)
    return group


def begun(w: World) -> Request:
    """Admit a request with an offer at the receiver, so that its KV can be loaded."""
    made = w.get("connectors")
    request = Request("new", range(2 * TOKENS))
    count = made.other.connector.match(request, made.offer)
    plan = made.other.manager.step(new=[Admit(request, external=External(count, delayed=True))])
    made.other.apply(plan)
    return request


def to_load(w: World) -> Request:
    """Admit a request whose KV can be loaded, because the store has the KV of another request with
    the same tokens.
    """
    made = w.get("stored")
    made.manager.report(made.report)
    made.tier.save(made.report)
    while made.tier.num_waiting_blocks:
        made.tier.save(made.report)
    made.manager.free(made.request)
    made.manager.cache.reset()
    request = Request("loaded", range(TOKENS))
    while (count := made.tier.match(request)) is None:
        pass
    made.manager.step(new=[Admit(request, external=External(count, delayed=True))])
    return request


def states_table(w: World) -> GroupTable:
    groups = [GroupSpec("recurrent", 4)]
    sizes = {"max_num_reqs": 4, "max_model_len": 32, "max_num_tokens": 16}
    tables = kvcache.BlockTables.for_groups(groups, **sizes, device=w.device)
    tables.add_row(([5],), 0)
    tables.commit_updates()
    return tables[0]


def chat_tokenizer() -> object:
    return tokenizers.chat_tokenizer()


def demo_report() -> object:
    names = inspect.signature(DemoReport).parameters
    texts = {"model": "tiny", "kv_cache_dtype": None}
    return DemoReport(**{name: texts.get(name, 3) for name in names})


def third(w: World) -> bytes:
    w.get("Transport")
    third = make_transport("third", "tcp")
    w.on_close.append(third.close)
    return third.metadata()


def paged_batch(w: World) -> object:
    cache = w.get("PagedModel").cache
    plan = cache.manager.step(new=[Request("p", range(9))])
    cache.worker.apply(plan)
    return Batch(cache, plan.rows, plan.num_computed_tokens, [range(9)])


# An object of the world: made by a function, an attribute ("@") of another object, or a constant.
MAKERS: dict[str, object] = {
    "CachePlan": plan, "KVCache": cache, "Sanitizer": sanitizer, "steps": steps, "BlockPool": pool,
    "PrefixCache": "@KVCacheManager.cache",
    "KVCacheManager": lambda w: (w.get("KVCache").manager, w.get("steps"))[0],
    "manager alone": lambda w: KVCacheManager(4, 40, 64, max_num_reqs=4, num_preallocate_tokens=0),
    "Worker": "@KVCache.worker", "Request": "@steps.request", "StepReport": "@steps.report",
    "BlockSpaceManager": lambda w: compat.BlockSpaceManager(4, 40, 20, enable_caching=True),
    "sequences": sequences, "KVStorage": storage, "Pages": "@KVStorage.pages",
    "StepPlan": step_plan,
    "SwapEngine": lambda w: SwapEngine(w.get("Pages"), w.get("Pages").on_host(10)),
    "SwapJob": lambda w: w.get("SwapEngine").swap_out(np.array([[1, 2]], np.int32)),
    "PendingStep": lambda w: w.get("Worker").start(next_plan(w)), "GroupTable": table,
    "BlockTables": tables,
    **{
        f"{prefix}{name}": functools.partial(engine_tables, getattr(module, name))
        for prefix, module in (("", vllm_block_table), ("Ascend", ascend_block_table))
        for name in ("BlockTable", "MultiGroupBlockTable")
    },
    "V1KVCacheManager": engine_manager, "engine request": lambda w: engine_request("engine"),
    "TpKVTopology": lambda w: compat.TpKVTopology(
        0, {"a": 2, "b": 2}, False, 2, "FLASHINFER", "a", {"a": 4, "b": 4}),
    "AttentionMetadata": lambda w: w.get("AttentionMetadataBuilder").build(
        rows=[0], query_lens=[1], seq_lens=[5]),
    "GroupMetadata": lambda w: w.get("AttentionMetadata").groups[0],
    "HostDeviceBuffer": lambda w: HostDeviceBuffer((8,), torch.int32, torch.device(w.device), False),
    "KindProperties": "@kind", "AttentionKind": "@kind",
    "kind": lambda w: kvcache.kinds.make_kind("sliding_window", {"window": 8}),
    "EngineBackend": lambda w: layouts.backend("FLASHINFER"), "AttentionBackend": "@EngineBackend",
    "CacheDescription": lambda w: descriptions("a"), "StateDescription": lambda w: states("a"),
    "StateTensor": transfer.StateTensor(sections=((2, 4),), dtype="float32"),
    "TransferPlan": lambda w: transfer.plan_transfer(descriptions("a"), descriptions("b"), 0),
    "StateTransferPlan": lambda w: transfer.plan_states(states("a"), states("b"), 0),
    "Coordinates": lambda w: descriptions("a").coordinates(0),
    "Spans": lambda w: transfer.Spans.of(np.array([4096, 8192]), np.array([64, 64]), "spans"),
    "transfer memory": np.zeros(2**20, np.uint8), "Transport": transport,
    "DemoReport": lambda w: demo_report(), "Transfer": a_read, "GroupFetch": group_fetch,
    "Comparison": lambda w: kvcache_lab.compare(
        [w.get("WorkloadRequest")], ["lru"], [200], block_size=4),
    "Fetch": lambda w: transfer.fetch(
        w.get("Transport"), {0: "other"}, [w.get("GroupFetch")], 0, 8),
    "ReceivePermutation": transfer.ReceivePermutation(4, "HND"),
    "KVTopology": lambda w: compat.KVTopology("a", 0, 2, total_num_kv_heads=2, block_size=4)
    .with_remote("b", compat.RemoteEngine(2, block_size=4)),
    "Engine": make_engine, "Generation": lambda w: w.get("Engine").generations[0],
    "Model": lambda w: Model(w.get("KVCache")), "scheduled": scheduled,
    "Scheduler": "@scheduled.scheduler", "Sequence": "@scheduled.sequence",
    "ScheduledStep": "@scheduled.step", "ended sequence": ended_step, "Batch": batch,
    "Context": lambda w: w.get("Batch").context(0), "EngineError": engine_loop.EngineError("stopped"),
    "FastAPI": lambda w: server.make_app(w.get("EngineLoop"), w.get("Texts"), "m"),
    "EngineLoop": lambda w: server.EngineLoop(w.get("Engine")), "Answer": answer,
    "Texts": lambda w: server.ByteTexts(),
    "TokenizerTexts": lambda w: server.TokenizerTexts(Tokenizer()), "connectors": connectors,
    "Connector": "@connectors.one.connector", "CacheRank": lambda w: w.get("connectors").one.ranks[0],
    "Offer": lambda w: disaggregation.Offer.from_dict(w.get("connectors").offer),
    "GroupLayout": lambda w: w.get("Offer").groups[0],
    "Arrived": lambda w: kvcache.sources.Arrived(w.get("Request"), 8),
    "LoadStats": kvcache.sources.LoadStats(), "Hint": Hint(intent="pin"), "stored": stored,
    "StoreTier": "@stored.tier", "StoreRank": store_rank,
    "Share": store.Share((0, 2), 2, (0, 1), 1),
    "stored request": "@stored.request", "stored report": "@stored.report",
    "BlockStore": block_store, "DiskStore": disk, "store memory": np.zeros((4, 64), np.uint8),
    "folder": folder, "trace": trace, "EventPublisher": publisher, "EventSubscriber": subscriber,
    "PreTrainedModel": lambda w: tiny_model("llama"), "PagedModel": attached,
    "ReplayReport": lambda w: kvcache_lab.Replayer(num_blocks=40, block_size=4).run(
        [w.get("WorkloadRequest")]),
    "WorkloadRequest": lambda w: next(kvcache_lab.read_trace(w.get("trace"))),
}  # fmt: skip

# Objects on which methods are called, for methods that need an object other than the standard
# instance of their class.
ON: dict[str, Callable[[World], object]] = {
    "KVStorage.set_scales": lambda w: fp8(w),
    "GroupTable.state_pages": lambda w: states_table(w),
    "BlockTable.state_pages": lambda w: vllm_block_table.BlockTable(
        4, 4, 8, 16, slot_mapping=False
    ),
    "AscendBlockTable.state_pages": lambda w: ascend_block_table.BlockTable(
        4, 4, 8, 16, slot_mapping=False
    ),
    "KVStorage.scale_cache": lambda w: scaled(w),
    "Connector.begin": lambda w: w.get("connectors").other.connector,
    "Pages.layer": lambda w: empty_pages(w),
    "Batch.state_pages": lambda w: state_batch(w),
}
