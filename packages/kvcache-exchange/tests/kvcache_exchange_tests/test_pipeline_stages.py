# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages that hold different layers: planning, transfers, and ranks that are rejected because
they group layers differently.
"""

import random
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    Request,
    build,
    plan_cache,
)
from kvcache.transfer import (
    CacheDescription,
    StateDescription,
    StateTensor,
    plan_states,
    plan_transfer,
)
from kvcache_exchange.disaggregation import CacheRank, Connector, ConnectorOptions, layouts_of_plan
from kvcache_exchange.store import Share, StoreRank, StoreTier
from tests.machinery.shared import sampled, seed_of_test
from tests.machinery.stores import MemoryStore

STATE = [StateTensor(sections=[(6, 4)], row_size=5, dtype="float32")]
OPTIONS = ConnectorOptions(transport="tcp", timeout_s=30)


def layer(number, kind, block_size=16, **options):
    """Return a layer: "f" full attention, "w" or "v" a window, "m" MLA, "s" a state."""
    name, shape = f"{number}", {"num_kv_heads": 2, "head_size": 8, "dtype": "float32", **options}
    if kind == "s":
        num_bytes = STATE[0].num_bytes(1)
        return LayerSpec(name, "recurrent", block_size, dtype="float32", state_bytes=num_bytes)
    if kind == "m":
        shape |= {"num_kv_heads": 1, "head_size": 12, "is_mla": True}
    if kind in "wv":
        window = {"options": {"window": 48 if kind == "w" else 32}}
        return LayerSpec(name, "sliding_window", block_size, **shape, **window)
    return LayerSpec(name, "full_attention", block_size, **shape)


def stages_of(patterns, block_size=16, **options):
    """Return the layers of each stage. `patterns` is, for example, "fww|wfw"."""
    found, number = [], 0
    for pattern in patterns.split("|"):
        own = enumerate(pattern, number)
        found.append([layer(i, kind, block_size, **options) for i, kind in own])
        number += len(pattern)
    return found


def plans_of(patterns, block_size=16, **options):
    """Return the plans of stages of up to 4 layers of up to 3 kinds.

    A request of 256 tokens needs at most 16 pages in each of 12 groups, and there is a null page.
    """
    stages, sizes = stages_of(patterns, block_size, **options), {"max_model_len": 256}
    largest = max(p.page_bytes for p in plan_cache(stages=stages, budget_bytes=1 << 40, **sizes))
    return plan_cache(stages=stages, budget_bytes=largest * 200, **sizes)


def random_stages(rng):
    """Draw the layers of 1 to 5 stages, of up to 6 kinds and formats."""
    formats = [
        {"kind": "full_attention"},
        {"kind": "full_attention", "num_kv_heads": 4},
        {"kind": "full_attention", "num_kv_heads": 1, "head_size": 40, "is_mla": True},
        {"kind": "sliding_window", "options": {"window": 100}},
        {"kind": "sliding_window", "options": {"window": 64}, "cached": False},
        {"kind": "recurrent", "state_bytes": 4096},
    ]
    formats = rng.sample(formats, rng.randint(1, len(formats)))
    stages, number = [], 0
    for _ in range(rng.randint(1, 5)):
        own = []
        for _ in range(rng.randint(1, 8)):
            spec = {"num_kv_heads": 2, "head_size": 8, **rng.choice(formats)}
            if spec["kind"] == "recurrent":
                del spec["num_kv_heads"], spec["head_size"]
            elif not spec.get("is_mla") and spec.get("cached", True):
                spec["drafts"] = rng.random() < 0.05
            own.append(LayerSpec(f"{number}", block_size=16, dtype="float32", **spec))
            number += 1
        stages.append(own)
    return stages


def check_plans(stages, plans, budget):
    assert len(plans) == len(stages)
    for own, plan in zip(stages, plans):
        assert plan.layers == tuple(own)
        names = [name for group in plan.groups for name in group.layers]
        assert sorted(names) == sorted(each.name for each in own)  # each layer once
        assert plan.num_pages == plans[0].num_pages and plan.num_pages * plan.page_bytes <= budget
        assert [replace(group, layers=()) for group in plan.groups] == [
            replace(group, layers=()) for group in plans[0].groups
        ]
        assert max(len(group.layers) for group in plan.groups) * plan.layer_page_bytes == (
            plan.page_bytes
        )
        specs = {each.name: each for each in own}
        for group, example, padding in zip(plan.groups, plan.examples, plan.padding_bytes):
            used = sum(specs[name].page_bytes(group.block_size) for name in group.layers)
            assert used + padding == plan.page_bytes
            for name in group.layers:
                like = replace(example, name=name, drafts=specs[name].drafts)
                assert specs[name] == like and (specs[name].kind, group.options) == (
                    group.kind,
                    specs[name].options,
                )
    for of_stages in zip(*(plan.groups for plan in plans)):  # no group is empty on all stages
        drafts = {s.name for own in stages for s in own if s.drafts}
        names = {name for group in of_stages for name in group.layers}
        assert names and of_stages[0].drafts == bool(drafts & names)


@pytest.mark.parametrize("num_cases", sampled([60, 10_000]))
def test_plans_of_stages_have_equal_groups_and_pages_and_each_layer_once(num_cases):
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(num_cases):
        stages, budget = random_stages(rng), 1 << rng.randint(24, 30)
        sizes = {"max_model_len": 512, "max_num_batched_tokens": rng.choice([None, 64])}
        plans = plan_cache(stages=stages, budget_bytes=budget, **sizes)
        check_plans(stages, plans, budget)
        if len(stages) == 1:
            alone = plan_cache(stages[0], budget, **sizes)
            assert replace(plans[0], examples=()) == alone


@pytest.mark.parametrize(
    "layers,stages,error,message",
    [
        (None, None, TypeError, "layers is None: expected an iterable of LayerSpec"),
        ([layer(0, "f")], [[layer(0, "f")]], TypeError, "expected no layers with stages"),
        (None, [], ValueError, "stages is empty"),
        (None, [[layer(0, "f")], []], ValueError, r"stages\[1\] is empty"),
        (None, [[layer(0, "f")], 5], TypeError, r"stages\[1\] is 5: expected an iterable"),
        (None, 5, TypeError, "stages is 5"),
        (None, [[layer(0, "f")], [layer(0, "f")]], ValueError, "two layers have the name '0'"),
        (None, [[layer(0, "f")], ["a"]], TypeError, "a layer is 'a': expected a LayerSpec"),
        (None, "no budget", TypeError, "budget_bytes is None"),
    ],
)
def test_invalid_stages_are_rejected_by_name(layers, stages, error, message):
    budget = 2**20
    if stages == "no budget":
        stages, budget = stages_of("f|f"), None
    with pytest.raises(error, match=message):
        plan_cache(layers, budget, stages=stages, max_model_len=64)


def test_a_cache_can_be_built_for_a_stage_without_layers_of_a_group():
    plans = plans_of("ff|ww|sf", block_size=32)
    caches = [
        build(plan, max_num_reqs=2, kernel_sizes=[16], num_preallocate_tokens=0) for plan in plans
    ]
    manager = caches[0].manager  # serves all stages
    step = manager.step(new=[Request("r", range(100))])
    for cache in caches:
        cache.worker.apply(step)
        for name in (each.name for each in cache.plan.layers if not each.state_bytes):
            key = torch.rand(20, 2, 8)
            slots = cache.tables[cache.group(name)].slots_of([0] * 20, range(80, 100))
            cache.write(name, key, key, slots)
            assert torch.equal(cache.gather(name, slots)[0], key)
    empty = [[s.num_layers for s in cache.storages].count(0) for cache in caches]
    assert min(empty) >= 1


class Engine:
    """An engine with `tp` ranks per pipeline stage. Each KV value identifies its layer, token and
    head.
    """

    def __init__(self, name, patterns, block_size=16, tp=1, stack=None):
        self.plans, self.tp = plans_of(patterns, block_size, num_kv_heads=4 // tp), tp
        self.storages = [KVStorage.for_plan(plan) for plan in self.plans for _ in range(tp)]
        for storages in self.storages:
            for number in range(storages[0].pages.num_layers):
                storages[0].pages.layer(number).fill_(0)
        groups = self.plans[0].groups
        states = {g: STATE for g, group in enumerate(groups) if group.kind == "recurrent"}
        self.ranks = []
        for r, storages in enumerate(self.storages):
            given = {"engine_id": name, "stages": self.plans, "states": states, "tp_size": tp}
            layouts = layouts_of_plan(self.plans[r // tp], storages, **given)
            self.ranks.append(CacheRank(layouts, storages, rank=r, options=OPTIONS))
            stack.callback(self.ranks[-1].close)
        self.manager = KVCacheManager.for_groups(
            groups, self.plans[0].num_pages, 256, num_preallocate_tokens=0
        )
        self.connector = Connector(self.manager, self.ranks, engine_id=name, options=OPTIONS)

    def places(self, request, first, end):
        """Yield (tensor, value) for each layer, token and head, or for each layer's last state."""
        for r, storages in enumerate(self.storages):
            for g, group in enumerate(self.plans[r // self.tp].groups):
                table, size = self.manager.block_ids(request, g), self.manager.block_sizes[g]
                for at, name in enumerate(group.layers):
                    key = storages[g].key_cache(at)
                    if group.kind == "recurrent":
                        yield key[int(table[(end - 1) // size]), 0], int(name) * 1000 + end
                        continue
                    begin, heads = (
                        max(first, end - group.options.get("window", end) + 1),
                        4 // self.tp,
                    )
                    is_mla = storages[g].num_kv_heads == 1 and storages[g].v_head_size == 0
                    for token in range(begin, end):
                        block = int(table[token // size])
                        assert block > 0, (name, token)
                        for head, place in enumerate(key[block, token % size]):
                            number = 0 if is_mla else r % self.tp * heads + head
                            yield place, int(name) * 1000 + token + 100_000 * number

    def prefill(self, request, chunk):
        self.manager.step(new=[Admit(request, min(chunk, request.num_tokens))])
        row, done = self.manager.row(request), 0
        while True:
            end = self.manager.num_computed_tokens(request)
            for place, value in self.places(request, done, end):
                place.fill_(value)
            done = end
            if done == request.num_tokens:
                return self.connector.publish(request)
            self.manager.step([row], [min(chunk, request.num_tokens - done)])

    def load(self, request, offer):
        count = self.connector.match(request, offer)
        self.manager.step(new=[Admit(request, external=External(count, delayed=True))])
        self.connector.begin(request)
        while not (arrived := self.connector.poll()):
            time.sleep(0.001)
        return arrived[0]


def check_transfer(patterns, sizes, num_tokens, chunk, tp=(1, 1)):
    with ExitStack() as stack:
        sender = Engine("p", patterns, sizes[0], tp[0], stack)
        receiver = Engine("d", patterns, sizes[1], tp[1], stack)
        offer = sender.prefill(Request("a", range(num_tokens)), chunk)
        again = Request("a", [*range(num_tokens), 1])
        arrived = receiver.load(again, offer)
        assert (arrived.num_computed_tokens, arrived.error) == (num_tokens, None)
        for place, value in receiver.places(again, 0, num_tokens):
            assert (place == value).all(), (patterns, value)


@pytest.mark.parametrize(
    ("patterns", "sizes", "num_tokens", "tp"),
    [
        ("fww|wfw", (16, 16), 160, (1, 1)),
        ("ff|ww", (16, 16), 160, (1, 1)),
        ("sf|fm|w", (16, 16), 160, (1, 1)),
        ("fw|wwf", (16, 32), 100, (2, 1)),  # stages and tensor-parallel ranks
    ],
)
def test_stages_that_group_layers_differently_load_every_layer(patterns, sizes, num_tokens, tp):
    check_transfer(patterns, sizes, num_tokens, 64, tp)


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", sampled([25, 500]))
def test_random_stages_load_every_layer(num_cases):
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(num_cases):
        kinds = rng.choice(["fw", "fwv", "fm", "fmw", "fs", "fws"])
        count = rng.randint(2, 4)
        patterns = "|".join(
            "".join(rng.choice(kinds) for _ in range(rng.randint(1, 4))) for _ in range(count)
        )
        if set(patterns) <= set("s|"):
            continue
        sizes = (16, 16) if "s" in patterns else (rng.choice([16, 32]), rng.choice([16, 32]))
        # With MLA, whose pages do not depend on the number of ranks, other sizes mean other groups.
        tp = (1, 1) if set(patterns) & set("sm") else (rng.choice([1, 2]), rng.choice([1, 2]))
        print(patterns, sizes, tp)
        check_transfer(patterns, sizes, rng.randint(1, 200), rng.choice([16, 64, 256]), tp)


def test_a_rank_without_layers_of_a_group_reads_nothing_and_serves_nothing():
    common = {"engine_id": "e", "num_layers": 3, "total_num_kv_heads": 2, "head_size": 8}
    orders = [
        ("kv", "block", "token", "head", "element"),
        ("block", "layer", "kv", "token", "head", "element"),
    ]
    for order in orders:
        stages = [(0, 1), (3, 2), (0, 2)]
        some = CacheDescription(**common, block_size=4, stages=stages, memory_order=order)
        whole = CacheDescription(**common, block_size=8, memory_order=order)
        found = [plan_transfer(some, whole, rank).remote_ranks for rank in range(5)]
        assert found == [(), (0,), (0,), (), ()]
        assert plan_transfer(whole, some, 0).remote_ranks == (1, 2)
    states = {"engine_id": "e", "num_layers": 2, "tensors": STATE}
    some, whole = StateDescription(**states, stages=[(0, 2), (2, 2)]), StateDescription(**states)
    found = [plan_states(some, whole, rank).remote_ranks for rank in range(4)]
    assert found == [(), (), (0,), (0,)]
    assert plan_states(whole, some, 0).remote_ranks == (2, 3)


def test_the_summary_of_a_group_covers_every_field_except_its_layers():
    one = GroupSpec("sliding_window", 16, {"window": 48}, layers=("a",))
    changes = {
        "kind": "chunked_local", "block_size": 32, "options": {"window": 49}, "replicated": True,
        "cached": False, "transferred": False, "drafts": True,
    }  # fmt: skip
    assert {*changes, "layers"} == {each.name for each in fields(GroupSpec)}
    assert replace(one, layers=("b",)).summary == one.summary
    found = {replace(one, **{name: value}).summary for name, value in changes.items()}
    assert len(found | {one.summary}) == len(changes) + 1


def manager_of(plan):
    return KVCacheManager.for_groups(plan.groups, plan.num_pages, 256, enable_events=True)


def separately_planned(patterns):
    return [plan_cache(own, 2**20, max_model_len=256) for own in stages_of(patterns)]


def handed(ranks):
    """Return ranks of other processes, of which the manager's process has the handshakes only."""
    return [SimpleNamespace(handshake=rank.handshake) for rank in ranks]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": "recurrent() in blocks of 16 tokens"}, "has group 1 with spec"),
        ({"layers": ("x", "y", "z", "u")}, "has group 1 with layers"),
        ({"num_blocks": 59}, "has group 1 with num_blocks 59: expected 200"),
        ({"interior": "vec"}, "has group 1 with interior 'vec'"),
        ({"head_size": 4}, "has group 1 with head_size 4: expected 8"),
        ({"stages": None, "pp_size": 2}, "has group 1 with pp_size 2: expected 1"),
        (None, "has 1 groups: expected 2"),
    ],
)
def test_connector_rejects_any_rank_whose_layouts_differ(change, message):
    with ExitStack() as stack:
        engine = Engine("e", "fwww|fwff", stack=stack)
        ranks = handed(engine.ranks)
        first, second = ranks[1].handshake.groups
        if change is None:
            changed = (first,)
        elif set(change) <= {"spec", "layers", "num_blocks", "interior"}:
            changed = first, replace(second, **change)
        else:
            changed = first, replace(second, description=replace(second.description, **change))
        ranks[1].handshake = replace(ranks[1].handshake, groups=changed)
        with pytest.raises(ValueError, match=rf"ranks\[1\] {message}"):
            Connector(engine.manager, ranks, engine_id="e")


def test_connector_rejects_ranks_in_another_order_or_number():
    with ExitStack() as stack:
        engine = Engine("e", "fw|fw", stack=stack)
        for ranks, message in (
            (engine.ranks[::-1], r"ranks\[0\] is rank 1: expected rank 0"),
            (engine.ranks[:1] * 2, r"ranks\[1\] is rank 0: expected rank 1"),
            (engine.ranks[:1], "there are 1 ranks: expected 2"),
        ):
            with pytest.raises(ValueError, match=message):
                Connector(engine.manager, ranks, engine_id="e")


@pytest.mark.parametrize("contents", [None, "storages", "text"])
def test_store_rejects_pages_of_a_stage_that_groups_layers_differently(contents):
    plans = separately_planned("fww|wfw")
    manager, storages = manager_of(plans[0]), KVStorage.for_plan(plans[1])
    given = {None: None, "storages": storages, "text": "kv"}[contents]
    with pytest.raises(ValueError, match=r"^pages were created for groups .*plan_cache\(stages=\)"):
        StoreRank(manager, storages[0].pages, MemoryStore(), model="m", contents=given)


def test_a_store_holds_the_blocks_of_stages_that_were_planned_together():
    plans, ranks = plans_of("ff|ww"), []
    manager = manager_of(plans[0])
    for i, plan in enumerate(plans):
        share = Share.of_rank(num_layers=4, num_heads=2, layers=(2 * i, 2 * i + 2))
        pages = KVStorage.for_plan(plan)[0].pages
        ranks.append(StoreRank(manager, pages, MemoryStore(), model="m", rank=share))
    assert StoreTier.over(manager, ranks).close()


@pytest.mark.parametrize(
    "given,error,message",
    [
        ({"pp_size": 2}, TypeError, "pp_size is 2: expected no pp_size with stages"),
        ({"layers": {}}, TypeError, "layers is {}: expected no layers with stages"),
        ({"stages": 3}, TypeError, "stages is 3"),
        ({"stages": "others"}, ValueError, "plan is not one of stages"),
        ({"stages": "separate"}, ValueError, r"stages\[1\] has \d+ pages and the groups"),
    ],
)
def test_layouts_reject_stages_that_were_not_planned_together(given, error, message):
    plans = plans_of("fw|wf")
    if given.get("stages") == "others":
        given = {"stages": plans_of("ff|ww")}
    elif given.get("stages") == "separate":
        given = {"stages": [plans[0], *separately_planned("fww|wfw")]}
    storages = KVStorage.for_plan(plans[0])
    with pytest.raises(error, match=message):
        layouts_of_plan(plans[0], storages, engine_id="e", **{"stages": plans, **given})


def test_a_plan_needs_the_format_of_a_group_without_layers():
    plan = plans_of("ff|ww")[0]
    for examples in ((), plan.examples[:1]):
        with pytest.raises(ValueError, match=r"plan\.groups\[1\] has no layers: expected layers"):
            KVStorage.for_plan(replace(plan, examples=examples))
    assert isinstance(KVStorage.for_plan(plan)[1].pages, Pages)
