# SPDX-License-Identifier: Apache-2.0
"""Events in the format that routers read, including those of host blocks, and a reader's view."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("msgspec")

import msgspec

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport, hash_blocks
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcache_exchange.router_events.chains import chains
from kvcache_exchange.router_events.translator import EventTranslator
from kvcache_exchange.router_events.view import CacheView
from kvcache_exchange.router_events.wire import (
    WireBatch,
    WireCleared,
    WireError,
    WireRemoved,
    WireStored,
    decode_batch,
    decode_sequence,
    encode_batch,
    encode_sequence,
    wire_hash,
)
from tests.machinery.cache_user import cached, shown
from tests.machinery.shared import seed_of_test

SEED = "vllm-none-hash"


def make(**options):
    options = {"enable_events": True, "num_preallocate_tokens": 0} | options
    return KVCacheManager(4, 30, 200, **options)


def through_bytes(events):
    return decode_batch(encode_batch(WireBatch(1.5, events, 0))).events


class Reader:
    """An event translator and a view that is updated with the translated events."""

    def __init__(self, seed=SEED):
        self.translator = EventTranslator(seed)
        self.view = CacheView()

    def take(self, manager):
        events = through_bytes(self.translator.translate(manager.cache.drain_events()))
        self.view.apply(events)
        return events


def test_a_batch_is_an_array_and_events_are_maps_with_all_required_keys():
    manager = make()
    manager.step(new=[Request("a", range(9))])
    events = EventTranslator(SEED).translate(manager.cache.drain_events())
    plain = msgspec.msgpack.decode(encode_batch(WireBatch(2.5, events, 3)))
    expected = hash_blocks(range(8), 4)
    assert plain == [
        2.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [int.from_bytes(each[-8:].tobytes(), "big") for each in expected],
                "parent_block_hash": None,
                "token_ids": [*range(8)],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ],
        3,
    ]
    others = encode_batch(WireBatch(0.5, [WireRemoved([7], "CPU", 1), WireCleared()], 0))
    assert msgspec.msgpack.decode(others)[1] == [
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 1},
        {"type": "AllBlocksCleared"},
    ]


# The positions that llm-d's decoder reads, and those that must be present. Source: the repository
# llm-d/llm-d-kv-cache, pkg/kvevents/engineadapter/vllm_adapter.go, convertBlockStoredEvent and
# convertBlockRemovedEvent, at commit 7be76e119ca50c5700b3bca65a19b6a0218a9b62 (after v0.8.1). v0.7.0
# (1c435cbbb1d253e5e767559bdecd2e06e0b1e5b4) ends after "extra_keys" and ignores what follows.
LLM_D_STORED = (
    *("tag", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
LLM_D_REMOVED = ("tag", "block_hashes", "medium", "group_idx")
LLM_D_NEVER_NIL = ("tag", "block_hashes", "token_ids", "block_size")


@pytest.mark.parametrize("kind", ["full_attention", "sliding_window"])
def test_arrays_have_the_order_that_llm_d_reads(kind):
    """Batches are exactly [ts, events, data_parallel_rank], because llm-d decodes them into a struct of
    three fields (msgpackVLLMEventBatch) with msgpack v5.4.1, which rejects other lengths.
    """
    spec = GroupSpec(kind, 4, {"window": 8} if kind == "sliding_window" else {})
    manager = KVCacheManager.for_groups(
        [spec], 4, 200, enable_events=True, num_preallocate_tokens=0, num_host_blocks=9
    )
    requests = [
        Request("a", range(9), lora=("adapter", "path"), cache_salt="s"),
        Request("b", range(8), mm_items=[("image", 1, 5)]),
        Request("c", range(8)),
    ]
    translator, tags = EventTranslator(SEED), set()
    for request in requests:
        manager.step(new=[request])
        manager.free(request)
    manager.cache.reset()
    events = translator.translate(manager.cache.drain_events())
    arrays = msgspec.msgpack.decode(encode_batch(WireBatch(2.5, events, 3), "array"))
    maps = msgspec.msgpack.decode(encode_batch(WireBatch(2.5, events, 3)))
    assert [len(arrays), len(maps), arrays[0], arrays[2]] == [3, 3, 2.5, 3]
    for array, as_map in zip(arrays[1], maps[1], strict=True):
        tags.add(array[0])
        order = {"BlockStored": LLM_D_STORED, "BlockRemoved": LLM_D_REMOVED}.get(array[0], ("tag",))
        named = dict(zip(order, array, strict=True))
        assert all(named[name] is not None for name in LLM_D_NEVER_NIL if name in named)
        assert named.pop("tag") == as_map.pop("type")
        as_map.pop("session_id", None)
        assert {name: value for name, value in named.items() if as_map.get(name) != value} == {}
        if keys := named.get("extra_keys"):  # convertExtraKeys: one array or nil per block
            assert len(keys) == len(named["block_hashes"])
            assert all(each is None or isinstance(each, list) for each in keys)
    assert tags == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


@pytest.mark.parametrize("rest", [[], ["GPU"], ["GPU", {"cache_salt": "s"}], ["GPU", *[None] * 7]])
def test_arrays_of_other_publishers_are_read(rest):
    array = ["BlockStored", [7], None, [1, 2], 2, None, *rest]
    (event,) = decode_batch(msgspec.msgpack.encode([1.0, [array]])).events
    assert event == WireStored([7], None, [1, 2], 2, None, rest[0] if rest else None, None)


def test_sequence_numbers_are_8_bytes_big_endian():
    assert encode_sequence(258) == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert decode_sequence(encode_sequence(2**63 - 1)) == 2**63 - 1
    for frame, message in (
        (b"", "has 0 bytes: expected 8"),
        (bytes(9), "has 9 bytes"),
        (b"\xff" * 8, "is -1: expected 0 or more"),
        ((2**63).to_bytes(8, "big"), "expected 0 or more"),
    ):
        with pytest.raises(WireError, match=message):
            decode_sequence(frame)


def stored(**changes):
    fields = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5, 6, 7, 8]}
    fields |= {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None} | changes
    return {"type": "BlockStored"} | fields


@pytest.mark.parametrize(
    "batch",
    [
        [1.0, [{"type": "BlockMoved"}], 0],
        [1.0, [{"block_hashes": [1], "medium": None}], 0],
        [1.0, [stored(token_ids=[1])], 0],
        [1.0, [["BlockStored", [7], None, [1], 2]], 0],
        [1.0, [["BlockStored", [7], None, [1, 2], 2, None], stored()], 0],
        [1.0, [stored(block_size=0, token_ids=[])], 0],
        [1.0, [stored(extra_keys=[None])], 0],
        [1.0, [stored(block_hashes=[-1, 2.5])], 0],
        [1.0, [{k: v for k, v in stored().items() if k != "lora_id"}], 0],
        ["late", [], 0],
        {"ts": 1.0},
        [],
    ],
)
def test_payloads_that_are_not_batches_are_rejected(batch):
    with pytest.raises(WireError):
        decode_batch(msgspec.msgpack.encode(batch))


def test_bytes_that_are_not_msgpack_are_rejected():
    whole = msgspec.msgpack.encode([1.0, [stored()], 0])
    assert decode_batch(whole).events[0].token_ids == [5, 6, 7, 8]
    for payload in (b"", b"\xc1", whole[:-1], whole + b"\0", b"\x91" * 5000, b"cos\nsystem\n."):
        with pytest.raises(WireError):
            decode_batch(payload)


def test_digests_and_keys_of_later_versions_are_read():
    (event,) = decode_batch(
        msgspec.msgpack.encode([1.0, [stored(block_hashes=[b"a" * 32, b"b" * 32], news=1)]])
    ).events
    view = CacheView()
    view.apply([event])
    assert view.hashes() == {b"a" * 32, b"b" * 32}
    assert view.block(b"b" * 32).parent == b"a" * 32


def test_first_blocks_have_no_parent_and_later_blocks_have_one():
    for options, seed in (({}, SEED), ({"hash_seed": "secret"}, "secret")):
        for algorithm in ("sha256_cbor", "xxh3_128_cbor"):
            manager = make(hash_algorithm=algorithm, **options)
            reader = Reader(seed)
            manager.step(new=[Request("a", range(9))])
            (first,) = reader.take(manager)
            manager.step(new=[Request("b", range(13))])
            (second,) = reader.take(manager)
            assert first.parent_block_hash is None
            assert second.parent_block_hash == first.block_hashes[1]


def test_engine_hashes_after_the_first_block_have_a_parent():
    manager = make(hash_algorithm="engine:x", hash_bytes=5)
    hashes = [bytes([i] * 5) for i in range(1, 4)]
    reader = Reader()
    manager.step(new=[Request("a", range(5), block_hashes=hashes[:1])])
    events = reader.take(manager)
    manager.step(new=[Request("b", range(13), block_hashes=hashes)])
    events += reader.take(manager)
    assert [event.parent_block_hash for event in events] == [None, wire_hash(hashes[0])]
    assert events[1].block_hashes == [wire_hash(each) for each in hashes[1:]]


def test_extra_keys_are_untagged_one_entry_per_block():
    manager = KVCacheManager.for_groups(
        [GroupSpec("full_attention", 4)], 30, 64, enable_events=True, hash_block_size=2
    )
    request = Request(
        "r",
        range(13),
        lora=("sql", "/a"),
        mm_items=[("cat", 3, 4), ("dog", 11, 2)],
        cache_salt="t",
        session="s",
    )
    manager.step(new=[request])
    (event,) = Reader().take(manager)
    assert event.extra_keys == [("sql", "t", ["cat", 3]), ("sql", ["cat", -1]), ("sql", ["dog", 3])]
    assert (event.lora_name, event.session_id) == ("sql", "s")
    embeds = np.arange(12, dtype=np.float32).reshape(4, 3)
    manager.step(new=[Request("e", range(5), prompt_embeds=embeds)])
    (event,) = Reader().take(manager)
    assert [len(key) for key in event.extra_keys[0]] == [32, 32]  # one entry per hash block


def test_attention_kinds_have_the_names_that_routers_use():
    groups = [
        GroupSpec("full_attention", 8),
        GroupSpec("sliding_window", 4, {"window": 6}),
        GroupSpec("chunked_local", 4, {"chunk_size": 64}),
        GroupSpec("recurrent", 8),
    ]
    manager = KVCacheManager.for_groups(groups, 60, 200, enable_events=True)
    row = manager.step(new=[Admit(Request("r", range(41)), num_tokens=16)]).rows[0]
    manager.step([row], [20])
    events = Reader().take(manager)
    named = {
        e.group_idx: (e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window, e.block_size)
        for e in events
    }
    assert named == {
        0: ("full_attention", None, 8),
        1: ("sliding_window", 6, 4),
        2: ("chunked_local_attention", None, 4),
        3: ("mamba", None, 8),
    }


def done(manager, plan):
    manager.report(StepReport(plan.step_id, completed=True))


def test_events_of_host_blocks_have_parents_and_tokens():
    manager = make(num_host_blocks=20, host_write="through")
    reader = Reader()
    request = Request("a", range(13), lora=("sql", "/a"), session="s")
    done(manager, manager.step(new=[request]))
    done(manager, manager.step())
    events = [event for event in reader.take(manager) if event.medium == "CPU"]
    hashes = [wire_hash(each.tobytes()) for each in manager.cache.hashes(request)]
    # The hashes are in token order, although the manager writes the last blocks first.
    assert [event.block_hashes for event in events] == [hashes]
    (event,) = events
    assert event.parent_block_hash is None and event.token_ids == [*range(12)]
    assert (event.block_size, event.group_idx) == (4, 0)
    assert (event.lora_name, event.extra_keys) == ("sql", [("sql",)] * 3)


def digests(*values):
    return np.array([[*bytes(31), value] for value in values], np.uint8)


def test_single_medium_is_cleared_by_removed_events():
    translator, view = EventTranslator(SEED), CacheView()
    tokens = np.arange(8, dtype=np.int32)
    on_device = BlockStored(digests(1, 2), digests(9)[0].tobytes(), tokens, 4, 0)
    on_host = BlockStored(digests(2), None, np.array([], np.int32), 4, 0, "cpu")
    view.apply(translator.translate([on_device, on_host]))
    assert shown(view) == {("GPU", 0, 1), ("GPU", 0, 2), ("CPU", 0, 2)}
    cleared = translator.translate([AllBlocksCleared("gpu")])
    assert cleared == [WireRemoved([1, 2], "GPU", 0)]
    view.apply(cleared)
    assert shown(view) == {("CPU", 0, 2)}
    again = CacheView()
    again.apply(translator.snapshot())
    assert shown(again) == {("CPU", 0, 2)} and again.block(2, "CPU").token_ids == (4, 5, 6, 7)
    assert translator.translate([AllBlocksCleared("cpu")]) == [WireCleared()]
    assert translator.translate([BlockRemoved(digests(5), 3)]) == [WireRemoved([5], "GPU", 3)]


def test_host_blocks_have_no_tokens_if_their_events_were_dropped():
    """vLLM publishes such events, without tokens, for its own host tier."""
    translator = EventTranslator(SEED)
    on_host = BlockStored(digests(2, 1), None, np.array([], np.int32), 4, 0, "cpu")
    (event,) = through_bytes(translator.translate([AllBlocksCleared("gpu", 5), on_host])[1:])
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([2, 1], None, [])
    view = CacheView()
    view.apply([event])
    assert view.block(1, "CPU").parent is None and view.block(1, "CPU").token_ids == ()


def test_parents_are_reported_before_children():
    parents = {5: 4, 3: 2, 4: 3, 2: 1, 30: 2, 31: 30, 7: None, 8: 9}
    runs = list(chains(parents))
    assert sorted(each for run in runs for each in run) == sorted(parents)
    seen = set()
    for run in runs:
        assert parents[run[0]] in seen or parents[run[0]] not in parents
        assert all(parents[block] == before for before, block in pairwise(run))
        seen |= set(run)
    assert sorted(map(len, runs)) == [1, 1, 2, 4]


def stored_ids(events):
    """Return the first token of each block that was stored on the device."""
    return [
        event.token_ids[4 * i]
        for event in events
        if isinstance(event, WireStored) and event.medium == "GPU"
        for i in range(len(event.block_hashes))
    ]


@pytest.fixture
def loading():
    """A manager, a reader, and a request that loads blocks 0 and 4 and computes block 100."""
    manager, reader = make(num_host_blocks=20), Reader()
    first = Request("a", range(9))
    done(manager, manager.step(new=[first]))
    manager.free(first)
    done(manager, manager.step(new=[other := Request("b", range(500, 616))]))  # evicts them
    manager.free(other)
    reader.take(manager)
    plan = manager.step(new=[Request("c", [*range(8), *range(100, 105)])])
    assert plan.num_computed_tokens.tolist() == [8]
    return manager, reader, plan


def test_blocks_are_published_after_their_parents_are_loaded(loading):
    manager, reader, plan = loading
    assert 100 not in stored_ids(reader.take(manager))
    done(manager, plan)
    assert stored_ids(reader.take(manager)) == [0, 4, 100]
    assert shown(reader.view) == cached(manager)


def test_blocks_whose_parents_never_arrive_are_published_after_some_batches(loading):
    manager, reader, _ = loading
    assert 100 not in stored_ids(reader.take(manager))
    translator = reader.translator
    batches = [stored_ids(translator.translate([])) for _ in range(70)]
    assert [each for each in batches if each] == [[100]] and batches.index([100]) == 62


def test_held_blocks_that_are_removed_are_not_published(loading):
    manager, reader, plan = loading
    reader.take(manager)
    manager.report(StepReport(plan.step_id, completed=False))
    events = reader.take(manager)
    assert 100 not in stored_ids(events) and shown(reader.view) == cached(manager)
    assert not reader.translator._groups[0].held


def test_view_counts_blocks_as_a_publisher_with_duplicates_does():
    """Compare random announcements with a counter.

    vLLM announces each of several blocks with the same hash, and the removal of each of them.
    """
    seed = seed_of_test()
    print(f"seed {seed}")
    choose, view, blocks = random.Random(seed), CacheView(), Counter()
    for _ in range(3000):
        medium, group = choose.choice(["GPU", "CPU"]), choose.randrange(2)
        hashes = [choose.randrange(6) for _ in range(choose.choice([1, 1, 2]))]
        told = None if medium == "GPU" and choose.random() < 0.3 else medium
        places = [(medium, group, each) for each in hashes]
        if choose.random() < 0.02:
            view.apply([WireCleared()])
            blocks.clear()
        elif choose.random() < 0.5:
            tokens = [1] * len(hashes)
            view.apply([WireStored(hashes, None, tokens, 1, None, told, None, None, group)])
            blocks.update(places)
        else:
            view.apply([WireRemoved(hashes, told, group)])
            for place in places:
                blocks[place] = max(blocks[place] - 1, 0)
        found = {(m, g, h) for m, g in view.places for h in view.hashes(m, g)}
        assert found == {each for each, count in blocks.items() if count}
    view.apply([WireCleared()])
    assert len(view) == 0 and not view._copies


def test_held_events_expire_parents_first():
    """The parent of a held block is itself held later, because its own parent is not loaded."""
    manager, reader = make(), Reader()
    manager.step(new=[Request("a", range(4))])
    reader.take(manager)
    group = reader.translator._groups[0]

    def store(block, parent, medium="GPU"):
        event = WireStored([block], parent, [block] * 4, 4, None, medium, None)
        return [each.block_hashes for each in group.store(event, bytes(16))]

    assert [store(1, None), store(2, 1)] == [[[1]], [[2]]]
    store(1, None, "CPU"), store(2, 1, "CPU")
    group.remove([1, 2], "GPU")
    batches = []
    for held in ((3, 2), (2, 1), *[None] * 70):
        assert held is None or store(*held) == []
        batches.append([each.block_hashes for each in group.end_step()])
    assert [each for each in batches if each] == [[[2], [3]]]
