# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, make_dataclass

import numpy as np
import pytest

from kvcache import Admit, KVCacheManager, Request, Status, StepPlan, hash_blocks
from kvcache.allocator import check_invariants
from kvcache.native.load import core
from kvcache.step import NO_IDS, NO_PAIRS, NO_REPLACE, NO_SPLITS, PLAN_VERSION
from tests.machinery.shared import REPO


def make(num_blocks=11, block_size=4, **options):
    options = {"max_model_len": 64, "num_preallocate_tokens": 0, **options}
    return KVCacheManager(block_size, num_blocks, **options)


def state(manager):
    pool = manager.pool
    return pool.num_free, pool.num_cached, pool.num_evicted, manager.cache.stats


def test_the_last_token_is_always_computed():
    manager = make()
    manager.step(new=[Request("a", range(8))])
    ids, num_tokens, _ = manager.cache.find_prefix(Request("b", range(8)))
    assert (ids.tolist(), num_tokens) == ([1], 4)
    ids, num_tokens, _ = manager.cache.find_prefix(Request("c", range(9)))
    assert (ids.tolist(), num_tokens) == ([1, 2], 8)


def test_blocks_of_one_step_are_hits_for_later_plans_only():
    """Both requests in the step compute the same blocks, so each hash is cached twice."""
    manager = make()
    a, b = Request("a", range(10)), Request("b", range(10))
    assert manager.step(new=[a, b]).num_computed_tokens.tolist() == [0, 0]
    assert manager.pool.num_cached == 4
    assert manager.cache.find_prefix(Request("c", range(10))).block_ids.tolist() == [1, 2]
    # The block ids of a running request never change. Once the older copies are evicted, lookups
    # find the younger ones.
    assert manager.block_ids(b).tolist() == [4, 5, 6]
    manager.cache.evict([1, 2])
    assert manager.cache.find_prefix(Request("c", range(10))).block_ids.tolist() == [4, 5]


def test_request_that_does_not_fit_keeps_the_eviction_order():
    """Regression in an earlier implementation, which updated the recency of hit blocks before
    checking capacity.
    """
    manager = make(num_blocks=4)
    a, b = Request("a", range(4)), Request("b", range(100, 104))
    manager.step(new=[a, b])
    manager.free(a)
    manager.free(b)
    # Request c would hit a's block and need three more, but only two blocks are free, including the
    # hit block.
    assert manager.admit(Admit(Request("c", range(13)), num_tokens=9), [1]) is None
    assert manager.step(new=[Request("c", range(13))]).status.tolist() == [Status.NEVER]
    manager.step(new=[Request("d", range(50, 54)), Request("e", range(60, 64))])
    # The block of request a was evicted first.
    assert len(manager.cache.find_prefix(Request("f", range(5))).block_ids) == 0
    assert len(manager.cache.find_prefix(Request("g", range(100, 105))).block_ids) == 1


def test_admit_and_extend_return_new_blocks():
    manager = make()
    request = Request("a", range(6))
    assert manager.admit(Admit(request, num_tokens=6), ()).tolist() == [1, 2]
    assert manager.extend(request, 2).tolist() == []
    assert manager.extend(request, 1).tolist() == [3]
    assert manager.extend(request, 8 * 4) is None


def test_preallocation_stays_within_max_model_len_and_the_pool():
    manager = make(num_preallocate_tokens=8)
    a = Request("a", range(3))
    assert manager.admit(Admit(a, num_tokens=3), ()).tolist() == [1, 2, 3]
    assert manager.extend(a, 9).tolist() == []
    assert manager.extend(a, 1).tolist() == [4, 5, 6]
    b = Request("b", range(50, 60))
    # Only one of two blocks was preallocated.
    assert manager.admit(Admit(b, num_tokens=10), ()).tolist() == [7, 8, 9, 10]
    manager = make(num_preallocate_tokens=100, max_model_len=9)
    assert manager.admit(Admit(Request("a", range(3)), num_tokens=3), ()).tolist() == [1, 2, 3]


def test_lookahead_slots_are_allocated_and_never_cached():
    manager = make()
    plan = manager.step(new=[Admit(Request("a", range(4)), num_lookahead_tokens=5)])
    assert plan.append_ids[0].tolist() == [1, 2, 3]
    assert manager.pool.num_cached == 1


def test_request_may_opt_out_of_reading_and_writing_the_cache():
    manager = make()
    manager.step(new=[Request("a", range(10))])
    for name in ("read_cache", "write_cache"):
        with pytest.raises(TypeError, match=f"{name} is 'no': expected True or False"):
            Request("b", range(10), **{name: "no"})
    blind = Request("b", range(10), read_cache=False)
    assert manager.cache.find_prefix(blind).num_tokens == 0
    assert manager.step(new=[blind]).num_computed_tokens.tolist() == [0]
    assert manager.cache.stats.num_requests == 1
    cached = manager.pool.num_cached
    manager.step(new=[Request("c", range(50, 60), write_cache=False)])
    assert manager.pool.num_cached == cached


def test_reset_fails_while_any_block_is_held():
    manager = make()
    request = Request("a", range(10))
    manager.step(new=[request])
    assert manager.cache.reset() is False and manager.pool.num_cached == 2
    manager.free(request)
    assert manager.cache.reset() is True
    assert manager.cache.find_prefix(request).num_tokens == 0


def test_requests_wait_when_all_rows_are_in_use():
    manager = make(max_num_reqs=1)
    a, b = Request("a", range(3)), Request("b", range(5, 8))
    assert manager.step(new=iter([a, b])).status.tolist() == [Status.SERVED, Status.WAIT]
    assert manager.admit(Admit(b, num_tokens=3), ()) is None
    manager.free(a)
    assert manager.step(new=[b]).rows.tolist() == [0]


def test_rows_of_step_and_of_admit_cannot_be_mixed():
    manager = make()
    a, b = Request("a", range(4)), Request("b", range(50, 54))
    manager.step(new=[a])
    manager.admit(Admit(b, num_tokens=4), ())
    before = state(manager)
    with pytest.raises(ValueError, match="row 0 was admitted by step: expected it in"):
        manager.extend(a, 1)
    with pytest.raises(ValueError, match="row 1 was admitted by admit: expected extend"):
        manager.step([0, 1], [1, 1])
    assert state(manager) == before
    assert manager.extend(b, 1).tolist() == [3]
    plan = manager.step([0], [1])
    assert plan.append_rows.tolist() == [0] and plan.append_ids[0].tolist() == [4]


def test_call_from_another_thread_is_rejected_and_changes_nothing():
    manager, request, other = make(), Request("a", range(10)), Request("b", range(5))
    manager.step(new=[request])
    before, owner = state(manager), threading.get_ident()
    calls = [
        *(lambda: manager.step([0], [1]), lambda: manager.admit(Admit(other, num_tokens=5), ())),
        *(lambda: manager.free(request), lambda: manager.pool.num_free),
        *(lambda: manager.invalidate([1]), lambda: manager.would_fit(other)),
        *(lambda: manager.cache.find_prefix(other), lambda: manager.cache.reset()),
    ]  # fmt: skip

    def refused(call):
        thread = threading.get_ident()
        text = f"called from thread {thread}, but the manager belongs to thread {owner}, which used"
        with pytest.raises(RuntimeError, match=f"{text} it first: call it from one thread"):
            call()
        return True

    with ThreadPoolExecutor(1) as pool:
        assert all(pool.map(refused, calls))
    assert state(manager) == before


def test_quiet_rows_keep_their_blocks():
    """Up to `quiet_until` tokens, a row gets and drops no block."""
    manager = make()
    a = Request("a", range(5))
    manager.step(new=[a])
    assert manager.quiet_until.tolist() == [8]
    assert manager.step([0], [3]).is_empty and not manager.step([0], [1]).is_empty
    assert manager.quiet_until.tolist() == [12]
    a.append_tokens([1] * 4)
    manager.fork(a, Request("b", a.token_ids))
    assert manager.quiet_until.tolist() == [0, 0]  # they share a block that either may write
    window = make(sliding_window=6, num_preallocate_tokens=8)
    window.step(new=[Admit(Request("a", range(10)), 6)])
    assert window.quiet_until.tolist() == [9]  # token 9 reads tokens 4 and later, not block 0
    assert window.step([0], [3]).is_empty and not window.step([0], [1]).is_empty
    assert window.block_ids(Request("a", [0]))[0] == 0


def test_threads_sharing_a_request_get_its_hashes_or_an_error():
    """Each thread has its own manager. While one thread hashes, the others may find the hash chain
    changing.
    """
    tokens = np.arange(200_000, dtype=np.int32)
    want = hash_blocks(tokens, 4)
    request, found, refused = Request("a", tokens), [], []

    def ask() -> None:
        try:
            found.append(make().cache.hashes(request))
        except RuntimeError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found and len(found) + len(refused) == 4
    assert all("use a request in one call at a time" in text for text in refused)
    found.append(make().cache.hashes(request))
    assert all(np.array_equal(hashes, want) for hashes in found)


def bad_calls():
    unknown, other = Request("zz", range(5)), Request("yy", range(100, 105))
    yield lambda m, a: m.step([7], [1]), "row 7 is not in use"
    yield lambda m, a: m.step([-1], [1]), "row -1 is not in use"
    yield lambda m, a: m.step([0, 0], [1, 1]), "rows contains row 0 twice"
    yield lambda m, a: m.step([0], [-1]), "num_tokens is -1: expected 0 to 2147483647"
    yield lambda m, a: m.step([0], [1, 2]), "rows has 1 entries, but num_tokens has 2"
    yield lambda m, a: m.step([0], [60]), "would have 70 tokens: expected at most max_model_len"
    yield lambda m, a: m.step(new=[unknown, unknown]), r"new names request 'zz' twice"
    yield lambda m, a: m.step(new=[a]), "request 'a' is already admitted"
    yield lambda m, a: m.step(new=[Request("b", range(65))]), "a new request would have 65 tokens"
    yield lambda m, a: m.extend(unknown, 1), "request 'zz' is not admitted"
    yield lambda m, a: m.admit(Admit(unknown, num_tokens=0), ()), "num_tokens is 0: expected 1 to"
    yield lambda m, a: m.admit(Admit(a, num_tokens=3), ()), "request 'a' is already admitted"
    yield lambda m, a: m.admit(Admit(other, 1), [1]), r"computed_blocks\[0\] is block 1, which"
    yield lambda m, a: m.admit(Admit(unknown, 1), [99]), r"computed_blocks\[0\] is block 99"
    yield lambda m, a: m.admit(Admit(unknown, 1), [1, 2]), "computed_blocks has 2 blocks"
    yield lambda m, a: m.block_ids(unknown), "request 'zz' is not admitted"


@pytest.mark.parametrize(("call", "message"), list(bad_calls()))
def test_invalid_call_is_reported_and_changes_nothing(call, message):
    manager = make()
    request = Request("a", range(10))
    manager.step(new=[request])
    before = state(manager), manager.block_ids(request).tolist()
    with pytest.raises(ValueError, match=message):
        call(manager, request)
    assert (state(manager), manager.block_ids(request).tolist()) == before
    check_invariants(manager)


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m.step(new=[Request("b", [1]), 5]), r"new\[1\] is 5: expected a Request"),
    (lambda m: m.step(new=Request("b", [1])), r"new is Request\(.*\): expected a sequence"),
    (lambda m: m.step(new=[Request(["b"], [1])]), r"request_id is \['b'\]: expected a string"),
    (lambda m: m.step((i for i in [0]), [1]), "rows is <generator .*: expected a sequence of"),
    (lambda m: m.step([0], [None] * 99), r"num_tokens is \[None, .*\.\.\.: expected a sequence"),
    (lambda m: make(hash_seed=b"x"), "hash_seed is b'x': expected a string"),
])  # fmt: skip
def test_invalid_types_are_reported(call, message):
    """`tests/hostile/test_wrong_calls.py` passes wrong types to every public call."""
    manager = make()
    before = state(manager)
    with pytest.raises(TypeError, match=message):
        call(manager)
    assert state(manager) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", ["num_gpu_blocks=2**31 - 1", "num_gpu_blocks=9, num_host_blocks=2**31 - 1"]
)
def test_pools_larger_than_the_memory_are_reported(sizes):
    script = f"""
import resource
from kvcache import KVCacheManager
from kvcache.allocator import check_invariants
small = KVCacheManager(16, 9, 64)
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
try:
    KVCacheManager(16, max_model_len=64, {sizes})
except MemoryError as error:
    print(error)
small.step()
check_invariants(small)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "_blocks is 2147483647" in result.stdout
    assert "expected fewer blocks, because the system lacks memory for them" in result.stdout


def test_largest_sizes_do_not_overflow():
    """Regression: the sums of these numbers used to overflow."""
    largest = 2**31 - 1
    manager = KVCacheManager(1, 100, largest, num_preallocate_tokens=largest)
    request = Request("a", range(10))
    assert manager.step(new=[Admit(request, num_lookahead_tokens=20)]).append_splits[
        0
    ].tolist() == [0, 99]
    plan = manager.step([0], [largest - 10], num_lookahead_tokens=largest)
    assert plan.status.tolist() == [Status.NEVER]
    manager = KVCacheManager(largest, 3, largest, num_preallocate_tokens=largest)
    manager.step(new=[Request("a", range(10))])
    assert manager.step([0], [largest - 10]).status.tolist() == [Status.SERVED]
    with pytest.raises(ValueError, match="a row would have 4294967294 tokens"):
        manager.step([0], [largest])
    check_invariants(manager)


@pytest.mark.parametrize(("options", "message"), [
    ({"block_size": 0}, "block_size is 0: expected 1 to 2147483647"),
    ({"num_blocks": 1}, "num_gpu_blocks is 1: expected 2 to 2147483647"),
    ({"max_model_len": 0}, "max_model_len is 0"),
    ({"num_preallocate_tokens": -1}, "num_preallocate_tokens is -1"),
    ({"sliding_window": 0}, "window is 0: expected 1"),
    ({"hash_seed": "\ud800"}, r"hash_seed is '\\ud800': expected text that UTF-8 can hold"),
])  # fmt: skip
def test_invalid_sizes_and_texts_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_tokens_are_copied_and_checked_immediately():
    tokens = np.arange(10, dtype=np.int32)
    request = Request("a", tokens)
    tokens[:] = 99
    request.token_ids[:] = 98
    assert request.token_ids.tolist() == list(range(10))
    with pytest.raises(ValueError, match=r"token_ids\[1\] is -1: expected 0 to 2147483647"):
        Request("a", np.array([3, -1], np.int32))
    with pytest.raises(ValueError, match=r"token_ids\[0\] is 2147483648: expected 0 to 2147483647"):
        Request("a", [2**31])
    with pytest.raises(TypeError, match="token_ids is 5: expected integers"):
        Request("a", 5)


def test_hash_inputs_cannot_be_modified():
    request = Request("a", range(10), lora=["n", "p"], mm_items=[["i", 2, 3]], cache_salt="s")
    assert request.lora == ("n", "p") and request.mm_items == (("i", 2, 3),)
    for name in (
        *("lora", "mm_items", "cache_salt", "prompt_embeds"),
        *("read_cache", "write_cache", "token_ids", "num_tokens"),
    ):
        with pytest.raises(AttributeError):
            setattr(request, name, None)
    embeds = np.zeros((10, 4), np.float32)
    request = Request("a", range(10), prompt_embeds=embeds)
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_embeds[0] = 1
    assert embeds.flags.writeable  # the caller's array is unchanged


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"lora": ("a",)}, ValueError, r"lora is \('a',\): expected \(name, path\)"),
    ({"cache_salt": "\ud800"}, ValueError, "cache_salt is .*: expected text that UTF-8"),
    ({"mm_items": ["img"]}, TypeError, r"mm_items\[0\] is 'img': expected \(identifier, fir"),
    ({"mm_items": [("i", 0, 1), ("i", 1)]}, ValueError, r"mm_items\[1\] is \('i', 1\): expec"),
    ({"mm_items": [("i", -1, 3)]}, ValueError, r"mm_items\[0\]: 'i' starts at -1"),
    ({"mm_items": [("i", 0, 0)]}, ValueError, r"mm_items\[0\]: 'i' .* has 0 tokens"),
    ({"mm_items": [("i", 1, 2**31 - 1)]}, ValueError, "an end of at most 2147483647"),
    ({"prompt_embeds": [[1.0]]}, TypeError, "prompt_embeds has type list"),
    ({"prompt_embeds": np.array(1.0)}, ValueError, "prompt_embeds has 0 dimensions"),
])  # fmt: skip
def test_invalid_request_is_reported(options, error, message):
    with pytest.raises(error, match=message):
        Request("a", [1], **options)


def test_request_may_have_no_tokens_yet():
    """The request can be queried, and slots can be allocated for it. Its blocks are published once
    the tokens are known.
    """
    manager = make()
    request = Request("a", [])
    assert request.num_tokens == 0 and len(manager.cache.hashes(request)) == 0
    ids, num_tokens, _ = manager.cache.find_prefix(request)
    assert (len(ids), num_tokens) == (0, 0)
    expected = "the number of tokens of a new request is 0: expected 1 to 2147483647"
    for call in (lambda: manager.step(new=[request]), lambda: manager.would_fit(request)):
        with pytest.raises(ValueError, match=expected):
            call()
    size = manager.block_sizes[0]
    assert len(manager.admit(Admit(request, num_lookahead_tokens=2 * size), ())) >= 2
    assert manager.cache.stats.hit_rate == 0 and manager.pool.num_cached == 0
    request.append_tokens(range(2 * size + 1))
    manager.extend(request, 2 * size + 1)
    assert manager.pool.num_cached == 2
    check_invariants(manager)


def test_the_native_step_sets_every_field_of_a_plan():
    plan = make().step(new=[Request("a", range(10))])
    assert {field.name: hasattr(plan, field.name) for field in fields(StepPlan)} == {
        field.name: True for field in fields(StepPlan)
    }
    assert (plan.step_id, plan.version) == (0, PLAN_VERSION)
    assert [ids.tolist() for ids in plan.append_ids] == [[1, 2, 3]]
    assert plan.copy is NO_PAIRS
    assert plan.replace[0] is NO_REPLACE
    assert not plan.is_empty and plan.previous_step_id == -1
    manager = make()
    manager.step(new=[Request("a", range(10))])
    assert manager.step([0], [1]).append_splits[0] is NO_SPLITS  # the step allocates no block


@pytest.mark.parametrize(("left_out", "added", "message"), [
    ("copy", None, "the plan has no field 'copy': expected one for everything"),
    (None, "fence", "field 'fence' of the plan has no default"),
])  # fmt: skip
def test_plan_that_the_native_step_cannot_fill_is_rejected(left_out, added, message):
    names = [f.name for f in fields(StepPlan) if f.name not in (left_out, "version")]
    plan = make_dataclass("Plan", [*names, *filter(None, [added])])
    with pytest.raises(TypeError, match=message):
        core.use_plan_type(plan, NO_IDS, NO_SPLITS, NO_PAIRS, NO_REPLACE)
    assert isinstance(make().step(), StepPlan)


def test_read_cache_argument_overrides_the_request():
    """The argument of a call overrides the request's own setting, whichever of the two is True."""
    manager = make(num_preallocate_tokens=0)
    size = manager.block_sizes[0]
    manager.step(new=[Request("a", range(2 * size + 1))])
    hit = 2 * size
    reads = Request("b", range(2 * size + 1))
    opted_out = Request("c", range(2 * size + 1), read_cache=False)
    assert manager.cache.find_prefix(reads).num_tokens == hit
    assert manager.cache.find_prefix(reads, read_cache=False).num_tokens == 0
    assert manager.cache.find_prefix(opted_out).num_tokens == 0
    ids, num_tokens, _ = manager.cache.find_prefix(opted_out, read_cache=True)
    assert num_tokens == hit
    assert manager.cache.cached_tokens(opted_out).on_device == 0
    assert manager.cache.cached_tokens(opted_out, read_cache=True).on_device == hit
    with pytest.raises(ValueError, match="but the request has read_cache=False: expected none"):
        manager.admit(Admit(opted_out, num_tokens=1), ids)
    manager.admit(Admit(opted_out, num_tokens=1, read_cache=True), ids)
    assert manager.block_ids(opted_out)[:2].tolist() == ids.tolist()
    manager.free(opted_out)

    for of_call, want in ((None, [hit, 0]), (np.True_, [hit, hit]), (False, [0, 0])):
        plan = manager.step(new=[Admit(each, read_cache=of_call) for each in (reads, opted_out)])
        assert plan.num_computed_tokens.tolist() == want
        manager.free(reads, opted_out)
    with pytest.raises(TypeError, match=r"new\[0\].read_cache is 2: expected True or False"):
        manager.step(new=[Admit(reads, read_cache=2)])
    check_invariants(manager)


class TestAdvance:
    """`advance`, which combines `reject_tokens` and `extend` for many rows, given start and stop
    positions.
    """

    def admitted(self, num_blocks=11):
        manager = KVCacheManager(4, num_blocks, 64, num_preallocate_tokens=0)
        requests = [Request(f"r{i}", range(i, i + 6)) for i in range(3)]
        for request in requests:
            manager.admit(Admit(request, num_tokens=6), ())
        return manager, requests

    def test_each_request_gets_its_missing_blocks(self):
        manager, requests = self.admitted()
        before = [manager.block_ids(request).tolist() for request in requests]
        answers = manager.advance([0, 1, 2], [6, 5, 8], [7, 9, 14])
        assert answers[0] == ()
        for request, blocks, answer in zip(requests[1:], before[1:], answers[1:]):
            assert [len(ids) for ids in answer] == [len(answer[0])]
            assert manager.block_ids(request).tolist() == blocks + answer[0]
        assert [manager.num_computed_tokens(request) for request in requests] == [7, 9, 14]

    @pytest.mark.parametrize(
        "starts,stops,message",
        [
            ([6, 9], [7, 10], "start of row 1 is 9: expected at most 8, the number of its slots"),
            ([6, 6], [7, 6], "stop of row 1 is 6: expected more than the row's start, 6"),
            ([6, 3], [7, 9], "num_rejected_tokens of row 1 is 3: expected at most 2"),
            ([6, -1], [7, 1], "start of row 1 is -1: expected at least 0"),
            ([6, 6], [7, 65], "65 tokens"),
            ([6], [7], "rows has 2 .* starts has 1"),
        ],
    )
    def test_rejected_calls_change_nothing(self, starts, stops, message):
        manager, requests = self.admitted()
        with pytest.raises(ValueError, match=message):
            manager.advance([0, 1], starts, stops)
        for rows, message in (([0, 0], "rows contains row 0 twice"), ([0, 7], "row 7")):
            with pytest.raises(ValueError, match=message):
                manager.advance(rows, [6, 6], [7, 7])
        assert [manager.num_computed_tokens(request) for request in requests] == [6, 6, 6]
        check_invariants(manager)
