# SPDX-License-Identifier: Apache-2.0
"""Test cases for each public op and class on a device. The results are compared with those on the CPU.

A case takes the name of a device and returns values and tensors, which may be on any device. For a
name that does not support the device, the case specifies the start of the expected error message.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields

import numpy as np
import torch

import kvcache
from kvcache import Admit, External, GroupSpec, LayerSpec, Request, ops, plan_cache
from kvcache.compat import (
    copy_kv_blocks,
)
from kvcache.transfer import (
    CacheDescription,
    GroupFetch,
    fetch,
    plan_transfer,
    region_addresses,
)
from kvcache.worker import (
    KVStorage,
    Pages,
    SwapEngine,
)
from kvcache_exchange.disaggregation import CacheRank, Connector, ConnectorOptions, layouts_of_plan
from kvcache_exchange.transport import make_transport
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import attach, layer_specs
from kvcache_serve.engine.transformers.tiny_models import tiny_model
from tests.machinery.hostile.ops import Calls, Placed, make_wrong
from tests.machinery.hostile.scenes import WorkerScene
from tests.machinery.hostile.state import answer
from tests.machinery.hostile.world import is_of_package, walked
from tests.machinery.shared import context_of, manager_of
from tests.machinery.stores import MemoryStore, StoreUser


@dataclass(frozen=True)
class Case:
    """The expected behavior of a public name on a device.

    `run` returns the values to compare with those on the CPU. `refusal` is the start of the
    expected error message, or None if the device is supported. `ops_needed` is set if the device
    must implement more operators than views, fills and copies.
    """

    run: Callable[[str], object]
    refusal: str | None = None
    ops_needed: bool = False


CASES: dict[str, Case] = {}

# Packages whose public names are in the matrix, except for modules that do not use torch.
PACKAGES = (
    "kvcache", "kvcache.worker", "kvcache.transfer", "kvcache_serve.engine",
    "kvcache_exchange.store", "kvcache_exchange.disaggregation",
    "kvcache_serve.engine.transformers",
)  # fmt: skip
NO_TENSORS = {
    "PrefillStats", "RemotePrefill", "UnsupportedModel", "source_readers", "Delta", "TokenLogprob",
    "table_groups", "Generation", "Metrics", "NgramDrafter", "PoolStates", "Sample",
    "SamplingParams", "ScheduledStep", "Scheduler", "Sequence", "State", "pool_states",
    "sanitizer_of", "DiskStore", "open_store", "register_store", "MooncakeStore", "StoreRankLink",
}  # fmt: skip


def case(*names: str, ops_needed: bool = False, refusal: str | None = None) -> Callable:
    """Register a function as the test case for public names."""

    def added(run: Callable[[str], object]) -> Callable:
        CASES.update((name, Case(run, refusal, ops_needed)) for name in names)
        return run

    return added


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(values: object, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


# Ops ---------------------------------------------------------------------------------------------------

_NUM_CALLS = 200  # number of calls per op, half of which have an invalid argument


def _goes_backwards(regions: object) -> bool:
    """Return whether these are the regions of a copy and have negative strides."""
    is_table = isinstance(regions, torch.Tensor) and regions.dtype == torch.int64
    return is_table and regions.ndim == 2 and bool((regions[:, 1:4:2] < 0).any())


def _fuzzed(name: str) -> Callable[[str], object]:
    def run(device: str) -> list:
        answers, num_refused = [], 0
        for seed in range(10_000):
            rng = random.Random(f"{name} {seed}")
            args = getattr(Calls(rng), name)()
            if seed % 2:
                make_wrong(rng, name, args)
            if any(isinstance(each, int) and each == 2**31 - 1 for each in args):
                continue  # the page count exceeds the memory, which the CPU op does not check
            if name == "copy_blocks" and any(map(_goes_backwards, args)):
                # Other devices reject these, because torch has no views with negative strides.
                continue
            placed = Placed(name, args, device, seed)
            before = placed.contents()
            try:
                getattr(ops, name)(*placed.args)
                is_refused = False
            except (RuntimeError, TypeError) as error:
                # Torch raises a TypeError if the arguments do not match the schema.
                by_torch = str(error).startswith("kvcache::")
                assert by_torch or "\n" not in str(error), str(error)
                is_refused = True
            if is_refused:
                assert placed.contents() == before, (name, seed)
                num_refused += 1
            answers.append((is_refused, placed.contents()))
            if len(answers) == _NUM_CALLS:
                break
        assert 0 < num_refused < len(answers)
        return answers

    return run


for _name in ops._ON_HOST:
    case(f"ops.{_name}")(_fuzzed(_name))


@case("ops.warm_up", refusal="device is sealed:0: expected a CUDA device")
def _(device: str) -> None:
    ops.warm_up(torch.device(device, 0))


# Tables ------------------------------------------------------------------------------------------------


@case(
    "GroupTable", "TableShape", "BlockTables", "AttentionMetadataBuilder", "AttentionMetadata",
    "GroupMetadata",
)  # fmt: skip
def _(device: str) -> object:
    """Every right call of the scene, followed by its queries."""
    answers = []
    for at in range(len([*WorkerScene(device).calls()])):
        scene = WorkerScene(device)
        answers.append([answer(scene.right_call(at)), scene.follow()])
    scene = WorkerScene(device)
    rows, positions = ints([0, 1, 3], device), ints([1, 4, 7], device, torch.int64)
    for options in ({}, {"query_start_loc": ints([0, 1, 2, 3], device)}):
        scene.tables.compute_slot_mapping(rows, positions, **options)
        answers.append([table.slot_mapping.gpu.clone() for table in scene.tables.block_tables])
    lengths = ints([1, 2, 1], device), ints([5, 7, 6], device)
    batch = scene.builder.build(rows, *lengths, num_padded_reqs=4)
    for part in (batch, *batch.groups.values()):
        values = [getattr(part, each.name) for each in fields(part)]
        answers.append([x.clone() if isinstance(x, torch.Tensor) else x for x in values])
    return [[x for x in each if not isinstance(x, dict)] for each in answers]


_DERIVED = (
    "kvcache.Pages", "kvcache.KVStorage", "kvcache.GroupTable", "kvcache.BlockTables",
    "kvcache.AttentionMetadata", "kvcache.SwapEngine", "kvcache.KVCache.", "kvcache.Worker",
    "kvcache.compat.kv_postprocess", "kvcache.transfer.permute", "kvcache.worker.HostDevice",
)  # fmt: skip


@case(
    "Pages", "KVStorage", "HostDeviceBuffer", "permute_received_blocks",
    "kv_postprocess_blksize_on_receive", "kv_postprocess_layout_on_receive",
    "kv_postprocess_blksize_and_layout_on_receive",
)  # fmt: skip
def _(device: str) -> object:
    """The right call of each public name. Compares its result, its arguments, and all pages."""
    answers = []
    for name, make in walked().items():
        if name.startswith(_DERIVED):
            scene = make(device=device)
            result = scene.function(**scene.right)
            pages = [each.memory for each in scene.others() if isinstance(each, Pages)]
            values = [*scene.right.values(), *(result if type(result) is list else [result])]
            answers.append((name, *pages, *(each for each in values if not is_of_package(each))))
    assert len(answers) > 70
    return answers


# Storage and pages -------------------------------------------------------------------------------------


def engines_caches(device: str, num_blocks: int = 9, kv_dim: int = 0) -> list[torch.Tensor]:
    """Return three layers that are allocated separately.

    With `kv_dim` 1, K and V of a block are adjacent.
    """
    shape = [num_blocks, 16, 8]
    shape.insert(kv_dim, 2)
    return [randn(*shape, seed=i).to(device) for i in range(3)]


@case("SwapEngine", "SwapJob", "SwapError")
def _(device: str) -> object:
    found = []
    for number, options in enumerate(
        (
            {},
            {"method": "staging", "staging_bytes": 4096},
            {"method": "copy_engine"},
            {"method": "kernel"},
        )
    ):
        # Either the host pages are views of separate tensors, or they are packed and the device's
        # pages have separate fragments.
        apart = number % 2
        caches = engines_caches(device, kv_dim=apart)
        pages = Pages.over(
            [[cache[:, 0], cache[:, 1]] for cache in caches] if apart else caches, 1 - apart
        )
        host = pages.on_host(20) if apart else Pages.over(engines_caches("cpu", 20), 1)
        host.zero(np.arange(20))
        engine = SwapEngine(pages, host, **options)
        engine.swap_out(np.array([[1, 5], [2, 6], [8, 7]])).wait(5)
        engine.before_write(np.array([1, 2]))
        job = engine.swap_in(np.array([[5, 3], [7, 4], [9, 8]]))
        engine.before_read(job)
        engine.order_after_swap_ins()
        job.wait(5)
        found += [*caches, *(host.fragment(i).clone() for i in range(len(host.sizes)))]
        found.append(engine.invalid_pages(job))
        engine.wait(5)
    return found


def small_cache(device: str) -> kvcache.KVCache:
    layers = [
        LayerSpec(f"layers.{i}", "full_attention", 16, 2, 8, dtype="float32") for i in range(2)
    ]
    plan = plan_cache(layers, 2**18, max_model_len=256, max_num_batched_tokens=64)
    return kvcache.build(plan, device=device, max_num_reqs=8, num_host_blocks=65)


@case("Worker", "PendingStep", "KVCache", "build")
def _(device: str) -> object:
    cache, found = small_cache(device), []
    manager, tables = cache.manager, cache.tables
    cache.pages.memory.zero_()

    def run(plan: object) -> None:
        pending = cache.worker.start(plan)
        for row, first, count in zip(plan.rows, plan.num_computed_tokens, plan.num_tokens):
            positions = np.arange(first, first + count)
            tables.compute_slot_mapping(np.full(count, row, np.int32), positions)
            tables.commit_slot_mapping(int(count))
            for layer in ("layers.0", "layers.1"):
                tokens = randn(count, 2, 8, seed=int(first)).to(device)
                cache.write(layer, tokens, tokens)
        manager.report(pending.wait(5))
        found.append(cache.pages.memory.clone())
        found.append([table.get_device_tensor().clone() for table in tables.block_tables])

    first, second = Request("a", range(40)), Request("b", range(40))
    run(manager.step(new=[first]))
    run(manager.step([0], [1], token_ids=[7]))
    found += context_of(cache, "layers.1", [0], [41])
    run(manager.step(swap_out=[0]))
    run(manager.step(new=[second]))
    run(manager.step([manager.row(first)], [1], token_ids=[8]))
    third = Request("c", first.token_ids)
    rows = [manager.row(first), manager.fork(first, third)]
    run(manager.step(rows, [1, 1], token_ids=[9, 10]))
    found += context_of(cache, "layers.0", rows, [43, 43])
    return [*found, cache.kv_cache("layers.1")]


# Transfer ----------------------------------------------------------------------------------------------


def placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a tensor to a device with the same strides."""
    place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return place.copy_(tensor)


@case("copy_kv_blocks")
def _(device: str) -> object:
    found = []
    # If the memory order differs from that on the host, copies go through additional host memory.
    for is_hnd in (False, True):
        host = {str(i): randn(9, 16, 2, 8, seed=i) for i in range(3)}
        there = {
            name: placed(each.zero_() if not is_hnd else _hnd(each).zero_(), device)
            for name, each in {name: each.clone() for name, each in host.items()}.items()
        }
        back = {name: torch.zeros_like(each) for name, each in host.items()}
        with torch.device("meta"):  # a default device must have no effect
            copy_kv_blocks(host, there, [1, 0, 5], [0, 1, 6], "h2d")
            copy_kv_blocks(there, back, [0, 1, 6], [2, 3, 4], "d2h")
        found += [*there.values(), *back.values()]
    return found


def _hnd(cache: torch.Tensor) -> torch.Tensor:
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


# Two engines. The sender has smaller blocks and another layout, so received blocks are permuted.
_TOKENS = 40


class Side:
    """A storage, its description, and the locations of 40 tokens."""

    def __init__(self, name: str, block_size: int, layout: str, device: str) -> None:
        shape = {"num_kv_heads": 2, "head_size": 8, "num_layers": 2, "dtype": "float32"}
        self.storage = KVStorage(
            12, block_size, **shape, layout=layout, device=device, backend="FLASHINFER"
        )
        self.description = CacheDescription(
            engine_id=name, num_layers=2, total_num_kv_heads=2, head_size=8, dtype="float32",
            block_size=block_size, memory_order=self.storage.memory_order,
        )  # fmt: skip
        self.ids = np.arange(1, 1 + -(-_TOKENS // block_size))
        positions = torch.arange(_TOKENS)
        self.slots = (torch.from_numpy(self.ids)[positions // block_size] * block_size).add(
            positions % block_size
        )

    def addresses(self) -> np.ndarray:
        return region_addresses(self.description, self.storage.pages)


def _fetched(kind: str, device: str, **options: object) -> list:
    sender, receiver = Side("there", 16, "HND", device), Side("here", 32, "NHD", device)
    key, value = (randn(2, _TOKENS, 2, 8, seed=i).to(device) for i in range(2))
    for layer in range(2):
        sender.storage.write(layer, key[layer], value[layer], sender.slots.to(device))
    with ExitStack() as stack:
        transports = []
        for side in (sender, receiver):
            transport = make_transport(side.description.engine_id, kind, timeout_s=20, **options)
            stack.callback(transport.close)
            transport.register(side.storage.pages)
            transports.append(transport)
        transports[1].connect(transports[0].metadata())
        plan = plan_transfer(receiver.description, sender.description, 0)
        group = GroupFetch(
            plan, receiver.ids, sender.ids, receiver.addresses(), {0: sender.addresses()},
            storage=receiver.storage,
        )  # fmt: skip
        under_way = fetch(transports[1], {0: "there"}, [group], 0, _TOKENS)
        deadline = time.monotonic() + 30
        while not under_way.poll():
            transports[0].notifications()
            assert time.monotonic() < deadline, "no bytes"
            time.sleep(0.001)
    slots = receiver.slots.to(device)
    found = [receiver.storage.gather(layer, slots) for layer in range(2)]
    return [*found[0], *found[1], under_way.num_bytes]


@case("Fetch", "GroupFetch", "fetch", "permute_pages", "region_addresses")
def _(device: str) -> object:
    return _fetched("tcp", device)


@case("Transport", "Transfer", "make_transport")
def _(device: str) -> object:
    found = _fetched("tcp", device, digest=True)
    # NIXL never reads this device's memory directly.
    if importlib.util.find_spec("nixl") is not None:
        found += [_fetched("nixl", device, direct_bytes=0)]
    return found


@case("CacheRank", "Connector", "layouts_of_plan")
def _(device: str) -> object:
    """One engine computes a request and another loads it into larger blocks."""
    layers = {
        size: [LayerSpec(f"l{i}", "full_attention", size, 2, 8, dtype="float32") for i in range(2)]
        for size in (16, 32)
    }
    tokens = list(range(_TOKENS))
    with ExitStack() as stack:
        sides = []
        for name, size, layout in (("prefill", 16, "HND"), ("decode", 32, "NHD")):
            plan = plan_cache(layers[size], 2**18, max_model_len=256)
            storages = KVStorage.for_plan(plan, layout=layout, device=device)
            manager = manager_of(*plan.groups, num_blocks=plan.num_pages, max_model_len=256)
            options = ConnectorOptions(transport="tcp")
            layouts = layouts_of_plan(plan, storages, engine_id=name)
            rank = stack.enter_context(closing(CacheRank(layouts, storages, options=options)))
            connector = Connector(manager, [rank], engine_id=name, options=options)
            sides.append((manager, storages[0], connector))
        (manager, storage, sender), (to_manager, to_storage, receiver) = sides
        request = Request("r", tokens)
        manager.step(new=[request])
        key, value = (randn(2, _TOKENS, 2, 8, seed=i).to(device) for i in range(2))
        for layer in range(2):
            slots = _slots(manager, request, storage, device)
            storage.write(layer, key[layer], value[layer], slots)
        loaded = Request("r", [*tokens, 7])
        count = receiver.match(loaded, sender.publish(request))
        to_manager.step(new=[Admit(loaded, external=External(count, delayed=True))])
        receiver.begin(loaded)
        deadline = time.monotonic() + 30
        while not (done := receiver.poll()):
            sender.poll()
            assert time.monotonic() < deadline, "the load hangs"
            time.sleep(0.001)
        assert done[0].error is None, done[0].error
        slots = _slots(to_manager, loaded, to_storage, device)[:_TOKENS]
        return [count, *to_storage.gather(0, slots), *to_storage.gather(1, slots)]


def _slots(manager: object, request: Request, storage: KVStorage, device: str) -> torch.Tensor:
    size = storage.block_size
    positions = torch.arange(request.num_tokens)
    blocks = torch.from_numpy(manager.block_ids(request).astype(np.int64))
    return (blocks[positions // size] * size + positions % size).to(device)


# Store, model and engine -------------------------------------------------------------------------------


@case("StoreTier", "StoreRank", ops_needed=True)
def _(device: str) -> object:
    """The second engine loads what the first computed. Every token that either engine reads is
    checked.
    """
    store, found = MemoryStore(), []
    for num_host_blocks in (0, 30):
        for _ in range(2):
            options = {"num_host_blocks": num_host_blocks, "device": device}
            user = StoreUser(store, [GroupSpec("full_attention", 16)], **options)
            user.run(np.arange(100) + num_host_blocks)
            user.settle()
            user.end()
            found += [user.num_loaded, user.num_finished]
    assert found[2] > 0
    return found


@case("Engine", "PagedModel", "attach", "Batch", "Context", ops_needed=True)
def _(device: str) -> object:
    """The engine generates the same tokens as on the CPU, with prefix hits and swapped-out
    sequences.
    """
    found = []
    for name, options in (("llama", {"host_budget": 1 << 20}), ("bamba", {})):
        model = attach(tiny_model(name).to(device), "1MiB", max_model_len=128, **options)
        engine = Engine(model)
        for _ in range(2):
            prompts = [range(40), range(5, 30), [*range(40), 3]]
            answers = engine.generate(prompts, SamplingParams(max_tokens=6))
            found += [list(answer.samples[0].token_ids) for answer in answers]
    return found


@case("layer_specs", ops_needed=True)
def _(device: str) -> object:
    return [str(each) for each in layer_specs(tiny_model("llama").to(device))]
