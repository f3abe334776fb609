# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized KV: bytes are used only by the scales with which they were written."""

import json

import pytest
import torch

from kvcache import KVCacheManager, KVStorage, LayerSpec, Request, plan_cache
from kvcache_exchange.disaggregation import CacheRank, Connector, ConnectorOptions, layouts_of_plan
from kvcache_exchange.store import StoreTier, fingerprint
from tests.machinery.disaggregation_engine import Engine
from tests.machinery.stores import MemoryStore

OPTIONS = ConnectorOptions(transport="tcp", timeout_s=5)


def layer(name="a", **changes):
    sizes = {"num_kv_heads": 2, "head_size": 8, "dtype": "float8_e4m3fn", **changes}
    return LayerSpec(name, "full_attention", 16, **sizes)


def plan_of(*layers):
    return plan_cache(layers or [layer()], 2**16, max_model_len=128)


def scaled(k_scale=0.02, v_scale=0.02, *, heads=1, plan=None):
    """Return a plan and its storages, with these scales in each layer and head."""
    plan = plan or plan_of()
    storages = KVStorage.for_plan(plan)
    for each in storages:
        shape = each.num_layers, heads
        each.set_scales(torch.full(shape, k_scale), torch.full(shape, v_scale))
    return plan, storages


class Side:
    """An engine with one rank."""

    def __init__(self, name, plan, storages, **more):
        self.manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, 128)
        layouts = layouts_of_plan(plan, storages, engine_id=name, **more)
        self.rank = CacheRank(layouts, storages, options=OPTIONS)
        self.connector = Connector(self.manager, [self.rank], engine_id=name, options=OPTIONS)

    def offer(self):
        request = Request("sent", range(40))
        self.manager.step(new=[request])
        return json.loads(json.dumps(self.connector.publish(request)))


@pytest.fixture
def side():
    made = []

    def make(*arguments, **options):
        made.append(Side(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.rank.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_scale": 0.5}, "local k_scale of layer 0, head 0 is 0.5"),
        ({"v_scale": 0.5}, "local v_scale of layer 0, head 0 is 0.5"),
        ({"k_scale": 0.5, "heads": 2}, "local k_scale of layer 0, head 0 is 0.5"),
        ({"k_scale": 0.5, "is_mla": True}, "local k_scale of layer 0, head 0 is 0.5"),
    ],
)
def test_offer_written_with_other_scales_is_refused(side, changes, message):
    is_mla = changes.pop("is_mla", False)  # latents have one scale
    latents = layer(num_kv_heads=1, head_size=32, is_mla=True)
    plan, same = (plan_of(latents), {"v_scale": 1.0}) if is_mla else (None, {})
    sender = side("p", *scaled(plan=plan, **same))
    receiver = side("d", *scaled(plan=plan, **same, **changes))
    with pytest.raises(ValueError, match=message):
        receiver.connector.match(Request("asked", range(41)), sender.offer())
    with pytest.raises(ValueError, match=message):
        receiver.connector.check_peer(sender.connector.describe())


@pytest.mark.parametrize("heads", [None, 1, 2])
def test_offer_with_equal_scales_is_accepted_in_any_form(side, heads):
    plan = plan_of()
    if heads is None:  # scales of one equal no scales
        sender, receiver = side("p", *scaled(1.0, 1.0)), side("d", plan, KVStorage.for_plan(plan))
    else:
        sender, receiver = side("p", *scaled()), side("d", *scaled(heads=heads))
    assert receiver.connector.match(Request("asked", range(41)), sender.offer()) == 40


def test_scales_are_fixed_while_a_rank_describes_them_to_others(side):
    plan, storages = scaled()
    one = side("p", plan, storages)
    before = storages[0].k_scale.clone()
    scale = torch.ones(1, 1)
    message = "the scales are already known to other engines or to a store"
    with pytest.raises(ValueError, match=message):
        storages[0].set_scales(scale, scale)
    assert torch.equal(storages[0].k_scale, before)
    one.rank.close()
    storages[0].set_scales(scale, scale)
    manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, 128, enable_events=True)
    tier = StoreTier(manager, storages[0].pages, MemoryStore(), model="m")
    message = "expected set_scales before CacheRank, StoreRank or StoreTier"
    with pytest.raises(ValueError, match=message):
        storages[0].set_scales(scale, scale)
    assert tier.close()
    layouts = layouts_of_plan(plan, storages, engine_id="q")
    storages[0].set_scales(2 * scale, scale)
    with pytest.raises(ValueError, match="storages has another k_scale on rank 0 than its layout"):
        CacheRank(layouts, storages, options=OPTIONS)


def test_scales_of_all_ranks_are_required_where_ranks_differ():
    plan, storages = scaled(heads=2)
    message = "scales is None, and group 0 has fp8 scales on this rank"
    for sizes in ({"tp_size": 2}, {"pp_size": 2, "layers": {0: ("a", "b")}}):
        with pytest.raises(ValueError, match=message):
            layouts_of_plan(plan, storages, engine_id="p", **sizes)
    scale = [[0.02, 0.02, 0.5, 0.5]]  # of all heads of two ranks
    layouts = layouts_of_plan(plan, storages, engine_id="p", tp_size=2, scales={0: (scale, scale)})
    assert layouts[0].description.k_scale == tuple(map(tuple, scale))
    CacheRank(layouts, storages, rank=0, options=OPTIONS).close()
    with pytest.raises(ValueError, match="storages has another k_scale on rank 1 than its layout"):
        CacheRank(layouts, storages, rank=1, options=OPTIONS)


def test_stored_blocks_of_other_scales_have_other_keys():
    found = set()
    for scales in ((1.0, 1.0), (0.02, 0.02), (0.5, 0.02), (0.02, 0.5)):
        plan, storages = scaled(*scales)
        manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, 128)
        found.add(fingerprint(manager, storages[0].pages, model="m"))
        if scales == (1.0, 1.0):
            assert found == {fingerprint(manager, KVStorage.for_plan(plan)[0].pages, model="m")}
    assert len(found) == 4
    window = LayerSpec(
        "b", "sliding_window", 16, 2, 8, dtype="float8_e4m3fn", options={"window": 32}
    )
    plan, of_two = plan_of(layer(), window), set()
    for scaled_group in range(2):  # two groups over the same pages
        storages = KVStorage.for_plan(plan)
        storages[scaled_group].set_scales(torch.full((1, 1), 0.5), torch.ones(1, 1))
        manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, 128)
        of_two.add(fingerprint(manager, storages[0].pages, model="m"))
    assert len(of_two) == 2


def test_scales_in_pages_belong_to_heads_and_are_compared(side):
    plans = [plan_of(layer(dtype="uint8", scale_bytes_per_token=n)) for n in (0, 8)]
    sides = [side(f"e{i}", plan, KVStorage.for_plan(plan)) for i, plan in enumerate(plans)]
    for one, other in (sides, sides[::-1]):
        with pytest.raises(ValueError, match="scale_bytes_per_head is"):
            one.connector.check_peer(other.connector.describe())
    plan = plan_of(layer(dtype="uint8", scale_bytes_per_token=3))
    with pytest.raises(
        ValueError, match="scale_bytes_per_token 3: expected a multiple of its 2 KV"
    ):
        layouts_of_plan(plan, KVStorage.for_plan(plan), engine_id="p")


@pytest.mark.slow
def test_scales_in_pages_are_loaded_with_their_tokens(side):
    plan, found = plan_of(layer(dtype="uint8", scale_bytes_per_token=8)), []
    storages = [KVStorage.for_plan(plan) for _ in range(2)]
    sender, receiver = (side(f"e{i}", plan, each) for i, each in enumerate(storages))
    written = torch.arange(storages[0][0].scale_cache(0).numel()) % 251
    storages[0][0].scale_cache(0).copy_(written.view(storages[0][0].scale_cache(0).shape))
    storages[1][0].scale_cache(0).zero_()
    offer = sender.offer()
    engine = Engine.__new__(Engine)
    engine.manager, engine.connector = receiver.manager, receiver.connector
    engine.storages = [storages[1]]
    request = Request("asked", range(41))
    assert engine.admit(request, offer) and engine.loaded(request).num_computed_tokens == 40
    theirs = torch.tensor(offer["blocks"][0][:2])
    found = torch.tensor(receiver.manager.block_ids(request)[:2].tolist())
    assert torch.equal(storages[1][0].scale_cache(0)[found], storages[0][0].scale_cache(0)[theirs])
