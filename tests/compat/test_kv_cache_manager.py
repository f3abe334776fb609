# SPDX-License-Identifier: Apache-2.0
"""`kvcache.compat.kv_cache_manager`: a scheduler written for vLLM's first v1 manager, and errors."""

import gc
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache.allocator import Request, check_invariants
from kvcache.compat.kv_cache_manager import KVCacheBlock, KVCacheManager
from tests.compat.callers import load

THERE, HERE = "vllm.v1.core.kv_cache_manager", "kvcache.compat.kv_cache_manager"


class Some(SimpleNamespace):
    """An object that can be referenced weakly."""


@pytest.mark.parametrize("num_preallocate", [0, 5])
@pytest.mark.parametrize("seed", range(4))
def test_caller_hits_blocks_of_its_own_prefix_and_gets_free_ones(seed, num_preallocate):
    caller = load("scheduler", THERE, HERE)
    rng = random.Random(seed)
    size, num_blocks = rng.choice([2, 4]), rng.choice([12, 20, 40])
    max_len = (num_blocks - 1) * size
    log, seen, calls = [], {}, Counter()
    scheduler = caller.Scheduler(size, num_blocks, max_len, 12, num_preallocate, log)
    pool = scheduler.manager.manager.pool
    tables, ends, content = {}, {}, {}  # content: block -> tokens up to its end

    def follow(call, name, *values):
        if call == "common":
            alike = [len({*blocks}) == 1 for blocks in zip(*tables.values())]
            assert name == [*alike, False].index(False)
            return
        if call in ("free", "preempt"):
            del tables[name], ends[name]
            return
        tokens, (count, *hit, new) = seen[name].all_token_ids, values
        for i, block in enumerate(hit[0] if hit else []):
            assert content[block] == tokens[: (i + 1) * size]
            calls["hit"] += 1
        if new is None:
            return
        assert not {*new} & {block for table in tables.values() for block in table}
        if hit:
            tables[name], ends[name] = hit[0], len(hit[0]) * size
        tables[name] = [*tables[name], *new]
        ends[name] += count
        assert ends[name] <= len(tables[name]) * size
        for i, block in enumerate(tables[name][: ends[name] // size]):
            content[block] = tokens[: (i + 1) * size]

    stems = [[rng.randint(1, 9) for _ in range(rng.randint(1, 12))] for _ in range(2)]
    for step in range(150):
        if rng.random() < 0.4:
            prompt = rng.choice(stems) + [rng.randint(1, 3) for _ in range(rng.randint(0, 4))]
            seen[f"r{step}"] = request = caller.Request(f"r{step}", prompt, rng.randint(1, 12))
            if len(prompt) + request.num_answers <= max_len:
                scheduler.add(request)
        scheduler.step(lambda request: rng.randint(1, 3))
        for entry in log:
            follow(*entry)
            calls[entry[0]] += 1
        log.clear()
        check_invariants(scheduler.manager.manager)
        held = {block for table in tables.values() for block in table}
        assert pool.num_free == pool.num_total - len(held)
    assert calls["allocate"] > 20 and calls["append"] > 100 and calls["hit"] > 20
    if num_blocks == 12:
        assert calls["preempt"]


def request(name="r1", num_tokens=40, **extra):
    tokens = [*range(num_tokens)]
    return Some(request_id=name, all_token_ids=tokens, num_computed_tokens=0, **extra)


def manager(**options):
    return KVCacheManager(16, 9, 128, **{"num_preallocate_tokens": 0, **options})


def admitted(of, name="r1", num_tokens=40, **extra):
    each = request(name, num_tokens, **extra)
    assert of.allocate_slots(each, num_tokens, ()) is not None
    each.num_computed_tokens = num_tokens
    return each


def test_blocks_are_ints_with_the_attribute_of_vllms_blocks():
    m = manager()
    admitted(m)
    blocks, num_tokens = m.get_computed_blocks(request("r2"))
    assert blocks == [1, 2] and num_tokens == 32 and blocks[1].block_id == 2
    assert all(type(block) is KVCacheBlock for block in blocks)
    assert np.array(blocks).tolist() == [1, 2]
    popped = blocks.pop()
    assert m.allocate_slots(request("r2"), 24, blocks) == [4, 5] and popped == 2


def test_slots_of_drafts_are_never_cached():
    m = manager()
    each = request("r1", 30)
    assert m.allocate_slots(each, 30, [], 20) == [1, 2, 3, 4]
    each.num_computed_tokens = 30
    assert m.get_computed_blocks(request("r2", 64)) == ([1], 16)
    each.all_token_ids += [30]  # one real token, and three drafts
    assert m.append_slots(each, 4) == []
    each.num_computed_tokens += 2  # one draft was accepted
    each.all_token_ids += [31, 99]
    assert m.get_computed_blocks(request("r2", 64)) == ([1], 16)
    assert m.append_slots(each, 1) == []
    assert m.get_computed_blocks(request("r2", 64)) == ([1, 2], 32)


def test_requests_read_and_write_the_cache_as_they_say():
    m = manager()
    admitted(m, "r1", skip_writing_prefix_cache=True)
    assert m.get_computed_blocks(request("r2")) == ([], 0)
    admitted(m, "r2")
    assert m.get_computed_blocks(request("r3"))[1] == 32
    assert m.get_computed_blocks(request("r4", skip_reading_prefix_cache=True)) == ([], 0)
    prompt = Some(prompt_logprobs=1)
    assert m.get_computed_blocks(request("r5", sampling_params=prompt)) == ([], 0)
    assert m.get_computed_blocks(request("r6", 33))[1] == 32
    assert m.get_computed_blocks(request("r7", 32))[1] == 16  # the last token must run


IMAGE = {"mm_hashes": ["cat"], "mm_positions": [{"offset": 4, "length": 20}]}


@pytest.mark.parametrize("extra", [
    {"lora_request": Some(lora_name="a", lora_path="/a")},
    {"cache_salt": "s"},
    {"mm_features": [Some(identifier="cat", mm_position=Some(offset=4, length=20))]},
    {"prompt_embeds": np.ones((40, 2), np.float16)},
    IMAGE,
], ids=["lora", "salt", "image", "embeddings", "older image"])  # fmt: skip
def test_inputs_other_than_tokens_are_part_of_the_hashes(extra):
    m = manager()
    admitted(m, "r1", **extra)
    assert m.get_computed_blocks(request("r2")) == ([], 0)
    assert m.get_computed_blocks(request("r3", **extra))[1] == 32


def test_both_ways_to_name_images_give_equal_hashes():
    m = manager()
    admitted(m, "r1", **IMAGE)
    feature = Some(identifier="cat", mm_position=Some(offset=4, length=20))
    assert m.get_computed_blocks(request("r2", mm_features=[feature]))[1] == 32


def test_a_preempted_request_keeps_its_hashes_and_hits_its_blocks():
    m = manager()
    each = admitted(m)
    hashed = m._read(each)
    m.free(each)
    m.free(each)  # no effect
    each.num_computed_tokens = 0
    assert m._read(each) is hashed
    computed, _ = m.get_computed_blocks(each)
    assert computed == [1, 2] and m.allocate_slots(each, 8, computed) == [4]
    m.free(each)
    del each
    gc.collect()
    assert not m._seen


def test_another_object_of_the_same_name_is_the_same_request_while_it_has_blocks():
    m = manager()
    admitted(m, "r1")
    gc.collect()
    proxy = request("r1", 49)
    proxy.num_computed_tokens = 40
    assert m.append_slots(proxy, 9) == [4]
    with pytest.raises(ValueError, match="request 'r1' is already admitted"):
        m.allocate_slots(proxy, 1, ())
    m.free(proxy)
    assert m.manager.pool.num_free == 8
    changed = request("r1", 17)
    changed.all_token_ids[0] = 99  # another prompt under a name that was used before
    assert m.get_computed_blocks(changed) == ([], 0)


def test_requests_that_cannot_be_referenced_weakly_are_served():
    class Slotted:
        __slots__ = ("all_token_ids", "num_computed_tokens", "request_id")

    each = Slotted()
    each.request_id, each.all_token_ids, each.num_computed_tokens = "r1", [*range(40)], 0
    m = manager()
    assert m.allocate_slots(each, 40, ()) == [1, 2, 3]
    each.all_token_ids += [7] * 9
    each.num_computed_tokens = 40
    assert m.append_slots(each, 9) == [4]
    m.free(each)
    assert m.get_computed_blocks(each) == ([1, 2, 3], 48)


def test_common_prefix_and_reset():
    m = manager()
    first = admitted(m)
    second = request("r2")
    m.allocate_slots(second, 8, m.get_computed_blocks(second)[0])
    assert m.get_num_common_prefix_blocks(first, 2) == 2
    assert not m.reset_prefix_cache() and m.get_computed_blocks(request("r3"))[1] == 32
    m.free(first)
    m.free(second)
    assert m.reset_prefix_cache() and m.get_computed_blocks(request("r3")) == ([], 0)


def test_a_request_that_does_not_fit_changes_nothing():
    m = manager()
    first = admitted(m)
    m.free(first)  # its blocks are cached and free
    admitted(m, "r2", 5 * 16, cache_salt="other")
    third = request("r3", 128)
    computed, _ = m.get_computed_blocks(third)
    assert computed == [1, 2]
    before = m.manager.pool.num_free, m.manager.pool.num_evicted
    assert m.allocate_slots(third, 96, computed) is None  # the computed blocks are not free
    assert (m.manager.pool.num_free, m.manager.pool.num_evicted) == before
    assert m.get_computed_blocks(third)[0] == computed


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda m, r: m.allocate_slots(r, 0, ()), ValueError, "num_tokens is 0"),
    (lambda m, r: m.allocate_slots(r, 8, (), -1), ValueError, "num_lookahead_tokens is -1"),
    (lambda m, r: m.allocate_slots(r, 8, [77]), ValueError, "computed_blocks"),
    (lambda m, r: m.append_slots(r, 1), ValueError, "request 'r9' has no blocks"),
    (lambda m, r: m.get_num_common_prefix_blocks(r, 1), ValueError, "request 'r9' has no blocks"),
    (lambda m, r: m.get_computed_blocks(3), TypeError, "request is 3: expected .* request_id"),
    (lambda m, r: m.get_computed_blocks(Some(request_id="a")), TypeError, "with all_token_ids"),
    (lambda m, r: m.append_slots(m.own, 0), ValueError, "num_tokens is 0"),
    (lambda m, r: m.append_slots(m.own, 200), ValueError, "max_model_len"),
    (lambda m, r: m.get_num_common_prefix_blocks(m.own, 0), ValueError, "num_running_requests"),
    (lambda m, r: KVCacheManager(16, 9, 128, enable_caching=False).allocate_slots(r, 8, [1]),
     ValueError, "computed_blocks"),
    (lambda m, r: KVCacheManager(0, 9, 128), ValueError, "block_size is 0"),
    (lambda m, r: KVCacheManager(16, 9, 128, 0), ValueError, "window"),
])  # fmt: skip
def test_bad_arguments_are_named_and_change_nothing(call, error, message):
    m = manager()
    m.own = admitted(m)
    with pytest.raises(error, match=message):
        call(m, request("r9"))
    assert m.manager.pool.num_free == 5 and m.manager.num_computed_tokens(Request("r1", ())) == 40
    check_invariants(m.manager)


def test_requests_that_contradict_themselves_are_refused():
    m = manager()
    each = admitted(m)
    each.all_token_ids.pop()
    with pytest.raises(
        ValueError, match="all_token_ids of request 'r1' has 39 tokens: expected 40"
    ):
        m.append_slots(each, 1)
    each.all_token_ids.append(39)
    each.num_computed_tokens = 41
    with pytest.raises(ValueError, match=r"request.num_computed_tokens is 41: expected .* 40"):
        m.append_slots(each, 1)
    each.num_computed_tokens = "40"
    with pytest.raises(TypeError, match=r"request.num_computed_tokens is '40'"):
        m.append_slots(each, 1)
    each.num_computed_tokens = 40
    each.status = "WAITING"
    with pytest.raises(ValueError, match="status of request 'r1' is WAITING: expected RUNNING"):
        m.get_num_common_prefix_blocks(each, 1)
    assert m.append_slots(each, 1) == []


def place(offset, length):
    return SimpleNamespace(offset=offset, length=length)


@pytest.mark.parametrize(("attributes", "error", "message"), [
    ({"mm_positions": [place(0, 4)]}, ValueError, "mm_positions has 1 entries, but mm_hashes"),
    ({"mm_hashes": ["a"]}, ValueError, "mm_positions has 0 entries, but mm_hashes has 1"),
    ({"mm_features": [3]}, TypeError, r"mm_features\[0\] is 3: expected .* identifier"),
    ({"mm_features": [SimpleNamespace(identifier="a", mm_position=3)]}, TypeError,
     r"mm_features\[0\].mm_position is 3: expected .* offset"),
    ({"mm_hashes": ["a"], "mm_positions": [{"offset": 0}]}, ValueError,
     r"mm_positions\[0\] is {'offset': 0}: expected a key 'length'"),
    ({"lora_request": 3}, TypeError, "lora_request is 3: expected .* lora_name"),
    ({"request_id": 3}, TypeError, "request_id is 3: expected a string"),
])  # fmt: skip
def test_attributes_that_the_hashes_cannot_use_are_named(attributes, error, message):
    each = request()
    vars(each).update(attributes)
    m = manager()
    calls = [lambda: m.get_computed_blocks(each), lambda: m.allocate_slots(each, 40, ())]
    if "request_id" in attributes:
        calls += [lambda: m.append_slots(each, 1), lambda: m.free(each)]
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    assert m.manager.pool.num_free == 8


def test_multimodal_items_may_be_arrays_and_dictionaries():
    m = manager()
    each = request(mm_hashes=np.array(["a", "b"]), mm_positions=[place(0, 4), place(20, 4)])
    assert m.allocate_slots(each, 40, ()) == [1, 2, 3]
    spans = [{"offset": 0, "length": 4}, {"offset": 20, "length": 4}]
    assert m.get_computed_blocks(request("r2", mm_hashes=["a", "b"], mm_positions=spans))[1] == 32
    assert m.get_computed_blocks(request("r3", mm_hashes=["a", "c"], mm_positions=spans))[1] == 16


def test_an_error_of_a_requests_own_code_is_raised():
    class Lazy(Some):
        @property
        def all_token_ids(self):
            return self.prompt

    with pytest.raises(AttributeError, match="prompt"):
        manager().get_computed_blocks(Lazy(request_id="r1"))


def test_tokens_of_full_blocks_are_not_computed_again():
    m = manager()
    each = admitted(m)
    each.num_computed_tokens = 31
    with pytest.raises(
        ValueError, match="num_computed_tokens of request 'r1' is 31, num_tokens is 9"
    ):
        m.append_slots(each, 9)
    each.num_computed_tokens = 32
    assert m.append_slots(each, 8) == []
