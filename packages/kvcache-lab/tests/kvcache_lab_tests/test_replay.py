# SPDX-License-Identifier: Apache-2.0
"""Replays: trace readers, content keys, exact hits, and the errors that verification detects."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.allocator import check_invariants
from kvcache_lab import (
    ChatShape,
    Mismatch,
    Replayer,
    Series,
    TraceError,
    WorkloadRequest,
    chat_workload,
    read_mooncake,
)
from kvcache_lab.content import VOCABULARY, kv_of_content, prefix_keys
from kvcache_lab.report import report_table
from kvcache_lab.verifier import KVVerifier
from tests.machinery.shared import sampled, shared_file

TRACE = "traces/mooncake_conversation.jsonl"

# --- trace reader ---------------------------------------------------------------------------------

GOOD = {"timestamp": 5, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 128_001]}


def write_trace(tmp_path, *lines) -> str:
    path = tmp_path / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return str(path)


def test_trace_line_becomes_a_request(tmp_path):
    path = write_trace(tmp_path, GOOD, "", "  ", {**GOOD, "timestamp": 9})
    first, second = read_mooncake(path)
    assert (first.index, first.arrival_ms, first.output_length, first.num_tokens) == (0, 5, 7, 1025)
    assert (second.index, second.arrival_ms) == (1, 9)
    assert first.token_ids.dtype == np.int32 and first.content.dtype == np.int64
    assert len(first.content) == 1025
    assert first.token_ids.min() >= 0 and first.token_ids.max() < VOCABULARY


@pytest.mark.parametrize(("line", "says"), [
    ("{", "not JSON"),
    ("\ufffe", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ([1, 2], "is [1, 2]: expected a JSON object"),
    ("7", "is 7: expected a JSON object"),
    *(({k: v for k, v in GOOD.items() if k != name}, f"{name} is missing") for name in GOOD),
    ({**GOOD, "timestamp": -1}, "timestamp is -1: expected a whole number of 0 or more"),
    ({**GOOD, "timestamp": 1.5}, "timestamp is 1.5: expected a whole number"),
    ({**GOOD, "input_length": True}, "input_length is true: expected a whole number"),
    ({**GOOD, "input_length": 0}, "input_length is 0: expected a whole number of 1 or more"),
    ({**GOOD, "input_length": 1025.0}, "input_length is 1025.0: expected a whole number"),
    ({**GOOD, "output_length": "7"}, 'output_length is "7": expected a whole number'),
    ({**GOOD, "output_length": None}, "output_length is null: expected a whole number"),
    ({**GOOD, "hash_ids": "012"}, 'hash_ids is "012": expected a list'),
    ({**GOOD, "hash_ids": [0, 1.0, 2]}, "hash_ids[1] is 1.0: expected a whole number"),
    ({**GOOD, "hash_ids": [0, 1, False]}, "hash_ids[2] is false: expected a whole number"),
    ({**GOOD, "hash_ids": [-4, 1, 2]}, "hash_ids[0] is -4: expected a whole number from 0"),
    ({**GOOD, "hash_ids": [VOCABULARY**2, 1, 2]}, "hash_ids[0] is 16384000000: expected"),
    ({**GOOD, "hash_ids": [0, 1]}, "hash_ids has 2 entries: expected 3"),
    ({**GOOD, "input_length": 1024}, "hash_ids has 3 entries: expected 2"),
    (
        {**GOOD, "input_length": 10**4000},
        "input_length is 1000000000000000000000000000000000000...: expected at most 16777216",
    ),
])  # fmt: skip
def test_malformed_line_is_reported(tmp_path, line, says):
    path = write_trace(tmp_path, GOOD, "", line)
    reader = read_mooncake(path)
    next(reader)  # the lines before the malformed one are valid and are served first
    with pytest.raises(TraceError) as error:
        next(reader)
    assert f"{path}, line 3: " in str(error.value)
    assert says in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_prompt_beyond_the_limit_is_refused_before_it_is_expanded(tmp_path):
    ids = list(range(2**24 // 512 + 1))
    path = write_trace(tmp_path, {**GOOD, "input_length": 512 * len(ids), "hash_ids": ids})
    with pytest.raises(TraceError, match="input_length is 16777728: expected at most 16777216"):
        next(read_mooncake(path))


def test_invalid_utf8_is_reported(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TraceError, match="line 1: not JSON"):
        next(read_mooncake(path))


# --- content keys ---------------------------------------------------------------------------------


def assert_keys_stand_for_prefixes(requests) -> None:
    """Check, over all tokens of all requests, that keys identify prefixes."""
    prefix_of, key_of = {}, {}
    for request in requests:
        for i, key in enumerate(request.content.tolist()):
            prefix = request.token_ids[: i + 1].tobytes()
            assert prefix_of.setdefault(key, prefix) == prefix
            assert key_of.setdefault(prefix, key) == key


def test_trace_keys_identify_prefixes(tmp_path):
    # The blocks with ids 1, 128001 and 256001 start with the same token, as do those with ids 5 and
    # 128005.
    prompts = [([0, 1], 514), ([0, 128_001], 520), ([0, 256_001], 513), ([0], 512), ([0, 1], 1024)]
    prompts += [([128_005, 3], 600), ([128_005], 70), ([5], 70), ([0, 128_002, 6], 1026)]
    lines = [{**GOOD, "input_length": n, "hash_ids": ids} for ids, n in prompts]
    assert_keys_stand_for_prefixes(read_mooncake(write_trace(tmp_path, *lines)))


def test_chat_keys_identify_prefixes():
    shape = ChatShape(
        num_conversations=3, num_system_prompts=2, system_tokens=(5, 9), user_tokens=(1, 6),
        answer_tokens=(1, 9), turns=(1, 5),
    )  # fmt: skip
    assert_keys_stand_for_prefixes(chat_workload(60, seed=4, shape=shape))


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.integers(0, 30))
def test_segmented_keys_equal_keys_computed_immediately(tokens, cut):
    tokens = np.array(tokens, np.int32)
    head = prefix_keys(tokens[:cut])
    tail = prefix_keys(tokens[cut:], int(head[-1]) if len(head) else 0)
    assert np.array_equal(np.concatenate([head, tail]), prefix_keys(tokens))


def test_kv_differs_by_token_and_by_feature():
    factors = np.arange(1, 17, 2, dtype=np.uint64).reshape(2, 4)
    kv = kv_of_content(np.arange(1000), factors * np.uint64(0x9E3779B97F4A7C15))
    assert kv.shape == (2, 1000, 4) and kv.dtype == np.int32
    assert len(np.unique(kv)) > 0.999 * kv.size


# --- chat workload --------------------------------------------------------------------------------


def as_tuples(requests):
    return [(r.arrival_ms, r.token_ids.tolist(), r.output_length) for r in requests]


def test_equal_seeds_give_equal_workloads():
    assert as_tuples(chat_workload(40, seed=3)) == as_tuples(chat_workload(40, seed=3))
    assert as_tuples(chat_workload(20, seed=3)) == as_tuples(chat_workload(40, seed=3))[:20]
    assert as_tuples(chat_workload(40, seed=3)) != as_tuples(chat_workload(40, seed=4))


def test_chats_arrive_in_order_and_interleaved():
    requests = list(chat_workload(200, seed=1))
    assert [r.index for r in requests] == list(range(200))
    arrivals = [r.arrival_ms for r in requests]
    assert arrivals == sorted(arrivals)
    last_of: dict[int, int] = {}  # last content key of each prompt -> request
    gaps = []
    for request in requests:
        earlier = [last_of[key] for key in request.content.tolist() if key in last_of]
        gaps += [request.index - max(earlier)] if earlier else []
        last_of[int(request.content[-1])] = request.index
    assert len(gaps) > 100  # most turns continue an earlier prompt
    # usually, other prompts arrive in between
    assert sum(gap > 1 for gap in gaps) > 0.8 * len(gaps)


def test_prompt_is_history_plus_new_message():
    shape = ChatShape(
        num_conversations=1, num_system_prompts=1, system_tokens=(10, 10), user_tokens=(7, 7),
        turns=(5, 5),
    )  # fmt: skip
    requests = list(chat_workload(6, shape=shape))
    assert requests[0].num_tokens == 17
    for before, after in itertools.pairwise(requests[:5]):
        assert after.num_tokens == before.num_tokens + before.output_length + 7
        assert np.array_equal(after.token_ids[: before.num_tokens], before.token_ids)
    new_chat = requests[5]
    assert new_chat.num_tokens == 17
    assert np.array_equal(new_chat.token_ids[:10], requests[0].token_ids[:10])
    assert not np.array_equal(new_chat.token_ids, requests[0].token_ids)


@pytest.mark.parametrize(("shape", "says"), [
    ({"num_conversations": 0}, "num_conversations is 0"),
    ({"turns": (3, 2)}, r"turns is \(3, 2\)"),
    ({"user_tokens": (0, 2)}, r"user_tokens is \(0, 2\)"),
    ({"mean_pause_ms": -1.0}, "mean_pause_ms is -1.0"),
])  # fmt: skip
def test_invalid_chat_shape_is_rejected(shape, says):
    with pytest.raises(ValueError, match=says):
        ChatShape(**shape)


# --- exact hits -----------------------------------------------------------------------------------


@dataclass
class ReferenceCache:
    """Implements the rules of traces/README.md with dictionaries, sharing no code with the replayer."""

    block_size: int
    capacity: int
    uncached_free: deque = field(default_factory=deque)
    cached_free: OrderedDict = field(default_factory=OrderedDict)  # least recently released first
    # Cached block -> all tokens up to the end of the block.
    prefix_of: dict = field(default_factory=dict)
    # All tokens up to the end of a block -> blocks with this prefix, oldest first.
    blocks_of: dict = field(default_factory=dict)
    references: dict = field(default_factory=dict)
    hits: int = 0
    evicted: int = 0

    def __post_init__(self):
        self.uncached_free.extend(range(self.capacity))

    def hit_blocks(self, tokens: tuple) -> list[int]:
        found = []
        for i in range((len(tokens) - 1) // self.block_size):
            blocks = self.blocks_of.get(tokens[: (i + 1) * self.block_size])
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def allocate(self, tokens: tuple) -> list[int] | None:
        found = self.hit_blocks(tokens)
        num_new = -(-len(tokens) // self.block_size) - len(found)
        free_hits = sum(block in self.cached_free for block in found)
        if num_new > len(self.uncached_free) + len(self.cached_free) - free_hits:
            return None
        for block in found:
            self.cached_free.pop(block, None)
        taken = found + [self.take() for _ in range(num_new)]
        for block in taken:
            self.references[block] = self.references.get(block, 0) + 1
        for i in range(len(found), len(tokens) // self.block_size):
            prefix = tokens[: (i + 1) * self.block_size]
            self.prefix_of[taken[i]] = prefix
            self.blocks_of.setdefault(prefix, []).append(taken[i])
        self.hits += len(found)
        return taken

    def take(self) -> int:
        if self.uncached_free:
            return self.uncached_free.popleft()
        block, _ = self.cached_free.popitem(last=False)
        self.blocks_of[self.prefix_of.pop(block)].remove(block)
        self.evicted += 1
        return block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.prefix_of:
                    self.cached_free[block] = None
                else:
                    self.uncached_free.append(block)


def reference_replay(cache: ReferenceCache, workload, concurrency: int) -> int:
    """Replay on the reference cache, and return the number of rejected requests."""
    running, rejected = deque(), 0
    for item in workload:
        tokens = tuple(item.token_ids.tolist())
        while len(running) >= concurrency:
            cache.release(running.popleft())
        if -(-len(tokens) // cache.block_size) > cache.capacity:
            rejected += 1
            continue
        while (taken := cache.allocate(tokens)) is None:
            cache.release(running.popleft())
        running.append(taken)
    return rejected


def as_workload(prompts) -> list[WorkloadRequest]:
    requests = []
    for i, prompt in enumerate(prompts):
        tokens = np.array(prompt, np.int32)
        requests.append(WorkloadRequest(i, i, tokens, 1, prefix_keys(tokens)))
    return requests


@st.composite
def workloads(draw):
    """Draw prompts with only two token values, each of which may continue part of an earlier prompt."""
    prompts = []
    for _ in range(draw(st.integers(1, 25))):
        head = draw(st.sampled_from(prompts)) if prompts and draw(st.booleans()) else []
        head = head[: draw(st.integers(0, 24))]
        prompts.append(head + draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)))
    return as_workload(prompts)


@given(workloads(), st.integers(1, 5), st.integers(1, 24), st.integers(1, 4))
def test_hits_equal_the_reference_cache(workload, block_size, capacity, concurrency):
    cache = ReferenceCache(block_size, capacity)
    rejected = reference_replay(cache, workload, concurrency)
    replayer = Replayer(block_size=block_size, num_blocks=capacity + 1, concurrency=concurrency)
    report = replayer.run(workload)
    assert report.hit_blocks == cache.hits
    assert report.evicted_blocks == cache.evicted
    assert report.cached_blocks == len(cache.prefix_of)
    assert report.rejected_requests == rejected
    check_invariants(replayer.manager)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "hit_blocks", "hit_rate"),
    sampled(
        [
            (30_000, 95_336, 0.3371),
            (1_000, 12_988, 0.0459),
            (10_000, 62_001, 0.2192),
            (50_000, 102_723, 0.3632),
            (100_000, 104_926, 0.3710),
            (182_790, 105_592, 0.3734),  # enough capacity for every distinct block of the trace
        ]
    ),
)
def test_published_trace_has_the_documented_hits(capacity, hit_blocks, hit_rate):
    path = shared_file(TRACE)
    report = Replayer(block_size=512, num_blocks=capacity + 1).run(read_mooncake(path))
    assert (report.requests, report.prompt_tokens) == (12_031, 144_793_823)
    assert report.hit_blocks == hit_blocks
    assert report.hit_tokens == hit_blocks * 512
    assert round(report.token_hit_rate, 4) == hit_rate
    assert report.rejected_requests == 0
    assert report.capacity_blocks == capacity


def test_oversized_requests_are_rejected_and_others_served():
    long, short = list(range(50)), list(range(9))
    report = Replayer(block_size=4, num_blocks=5).run(as_workload([short, long, short]))
    assert (report.requests, report.rejected_requests) == (3, 1)
    assert report.prompt_tokens == 18  # only served requests
    assert report.hit_blocks == 2
    assert report.token_hit_rate == 8 / 18


def test_oldest_request_finishes_to_free_space():
    prompts = [[i] * 8 for i in range(6)]  # each prompt needs two blocks, and the pool has four
    report = Replayer(block_size=4, num_blocks=5, concurrency=6).run(as_workload(prompts))
    assert (report.rejected_requests, report.peak_used_blocks) == (0, 4)
    assert report.evicted_blocks == 8


def test_times_are_per_request_and_sum_to_the_total():
    report = Replayer(block_size=16, num_blocks=2_001).run(chat_workload(50))
    times = report.us_per_request
    assert set(times) == {"hash", "step", "free", "total"}
    assert all(value > 0 for value in times.values())
    assert times["total"] == pytest.approx(times["hash"] + times["step"] + times["free"], abs=0.01)


def test_empty_workload_has_a_report():
    report = Replayer(block_size=16, num_blocks=2).run([])
    assert (report.requests, report.token_hit_rate, report.us_per_request["total"]) == (0, 0.0, 0.0)


def test_concurrency_must_be_positive():
    with pytest.raises(ValueError, match="concurrency is 0: expected 1 or more"):
        Replayer(block_size=16, num_blocks=2, concurrency=0)


# --- verification ---------------------------------------------------------------------------------


def verifying(block_size=4, num_blocks=33, concurrency=1, **knobs) -> Replayer:
    verifier = KVVerifier(
        block_size=block_size, num_blocks=num_blocks, max_num_reqs=concurrency, **knobs
    )
    return Replayer(
        block_size=block_size, num_blocks=num_blocks, concurrency=concurrency, verifier=verifier
    )


@pytest.mark.slow
@given(
    workloads(),
    st.integers(1, 5),
    st.integers(24, 40),
    st.integers(1, 4),
    st.sampled_from(["NHD", "HND"]),
    st.integers(1, 2),
)
def test_correct_cache_verifies(workload, block_size, capacity, concurrency, layout, num_layers):
    replayer = verifying(
        block_size, capacity + 1, concurrency, layout=layout, num_layers=num_layers,
        num_kv_heads=3, head_size=2, chunk_tokens=7,
    )  # fmt: skip
    report = replayer.run(workload)
    assert (report.mismatches, report.mismatched_requests) == (0, [])
    assert report.verified_tokens == report.prompt_tokens
    if report.rejected_requests == 0:
        assert report.verified_tokens == sum(item.num_tokens for item in workload)


@pytest.mark.slow
def test_the_published_trace_verifies():
    requests = itertools.islice(read_mooncake(shared_file(TRACE)), 300)
    report = verifying(512, 2_001, 3).run(requests)
    assert report.hit_blocks > 300 and report.evicted_blocks > 1_000
    assert report.mismatches == 0
    assert report.verified_tokens == report.prompt_tokens


def plant_in_step(monkeypatch, manager, change) -> None:
    """Call `change(plan, number)` to modify every plan that the manager returns."""
    step, number = manager.step, itertools.count()

    def changed(*args, **kwargs):
        plan = step(*args, **kwargs)
        change(plan, next(number))
        return plan

    monkeypatch.setattr(manager, "step", changed)


def test_hit_on_tokens_never_computed_is_detected(monkeypatch):
    replayer = verifying()
    prompts = as_workload([range(0, 10), range(100, 111), range(200, 210)])

    def claim_eight_tokens(plan, number):
        if number == 1:
            plan.num_computed_tokens[0] = 8

    plant_in_step(monkeypatch, replayer.manager, claim_eight_tokens)
    report = replayer.run(prompts)
    # The first request wrote blocks 1 to 3. The second is allocated the partial block 3 and the
    # unused blocks 4 and 5.
    (mismatch,) = report.mismatched_requests
    assert (mismatch.request, mismatch.token, mismatch.block_column) == (1, 0, 0)
    assert report.mismatches == 8


def test_hit_on_another_prompts_block_is_detected(monkeypatch):
    replayer = verifying()
    shared = list(range(8))
    prompts = as_workload([[*shared, 1], [50] * 9, [*shared, 2]])
    blocks_of = {}

    def swap_the_hit(plan, number):
        blocks_of[number] = plan.append_ids[0].copy()
        if number == 2:
            plan.append_ids[0][1] = blocks_of[1][1]

    plant_in_step(monkeypatch, replayer.manager, swap_the_hit)
    report = replayer.run(prompts)
    assert report.hit_blocks == 2
    block_id = int(blocks_of[1][1])
    assert report.mismatched_requests == [Mismatch(2, 4, 1, block_id)]
    assert report.mismatches == 4
    named = f"request 2, token 4: wrong KV in block {block_id} (block column 1)"
    assert str(report.mismatched_requests[0]) == named


def test_two_tokens_in_one_slot_are_detected(monkeypatch):
    replayer = verifying()
    table = replayer.verifier.table
    compute = table.compute_slot_mapping

    def collide(req_indices, positions):
        compute(req_indices, positions)
        table.slot_mapping.np[5] = table.slot_mapping.np[6]

    monkeypatch.setattr(table, "compute_slot_mapping", collide)
    report = replayer.run(as_workload([range(10)]))
    # Token 5 was not written to its own slot. If token 6 was written before token 5, it was
    # overwritten.
    assert report.mismatched_requests == [Mismatch(0, 5, 1, 2)]
    assert report.mismatches in (1, 2)


def test_block_reused_while_held_is_detected(monkeypatch):
    replayer = verifying(concurrency=3)
    first_blocks = []

    def hand_out_again(plan, number):
        if number == 0:
            first_blocks.extend(plan.append_ids[0].tolist())
        if number == 1:
            plan.append_ids[0][0] = first_blocks[1]

    plant_in_step(monkeypatch, replayer.manager, hand_out_again)
    report = replayer.run(as_workload([range(0, 10), range(100, 110), range(200, 210)]))
    # The thief writes to the blocks in its table, so both of its reads of the block that the
    # manager allocated fail. The victim's block is read again before the victim is freed.
    thief, victim = report.mismatched_requests
    assert (thief.request, thief.token, thief.block_column) == (1, 0, 0)
    assert victim == Mismatch(0, 4, 1, first_blocks[1])
    assert report.mismatches == 4 + 2 * 4


def test_overwritten_cached_block_is_detected():
    replayer = verifying()
    prompts = as_workload([range(10), [*range(8), 77, 78]])

    def workload():
        yield prompts[0]
        replayer.verifier.storage.value_cache(0).view(torch.int32)[2, 3, 1, 1] += 1
        yield prompts[1]

    report = replayer.run(workload())
    assert report.hit_blocks == 2
    assert report.mismatched_requests == [Mismatch(1, 7, 1, 2)]
    assert report.mismatches == 1


BLOCK = 16


@pytest.mark.parametrize("wrong", [
    lambda slots: slots // BLOCK * BLOCK + BLOCK - 1 - slots % BLOCK,  # reversed in its block
    lambda slots: (slots // BLOCK % 1_024 + 1) * BLOCK + slots % BLOCK,  # in the block behind
    lambda slots: (slots + 1) % (1_025 * BLOCK),  # one further
], ids=["reversed", "next block", "next slot"])  # fmt: skip
def test_slots_wrong_for_both_write_and_read_are_detected(monkeypatch, wrong):
    replayer = verifying(BLOCK, 1_025, 3)
    table = replayer.verifier.table
    compute = table.compute_slot_mapping

    def shifted(req_indices, positions):
        compute(req_indices, positions)
        slots = table.slot_mapping.np[: len(positions)]
        slots[:] = wrong(slots)

    monkeypatch.setattr(table, "compute_slot_mapping", shifted)
    report = replayer.run(chat_workload(20, 1))
    assert report.mismatches >= 0.99 * report.verified_tokens
    assert report.mismatched_requests[0].request == report.mismatched_requests[0].token == 0


def test_swapped_key_and_value_are_detected(monkeypatch):
    replayer = verifying(BLOCK, 1_025)
    storage = replayer.verifier.storage
    write, gather = storage.write, storage.gather
    monkeypatch.setattr(storage, "write", lambda i, k, v, slots: write(i, v, k, slots))
    monkeypatch.setattr(storage, "gather", lambda i, slots: gather(i, slots)[::-1])
    report = replayer.run(chat_workload(20, 1))
    assert report.mismatches == report.verified_tokens > 0


def test_table_without_the_managers_blocks_is_detected(monkeypatch):
    replayer = verifying()

    def another_block(plan, number):
        plan.append_ids[0][0] = 30

    plant_in_step(monkeypatch, replayer.manager, another_block)
    report = replayer.run(as_workload([range(10)]))
    assert report.mismatched_requests == [Mismatch(0, 0, 0, 1)]
    assert report.mismatches == 4


def test_wrong_gather_of_correct_storage_is_detected(monkeypatch):
    replayer = verifying()
    storage = replayer.verifier.storage
    gather = storage.gather
    monkeypatch.setattr(storage, "gather", lambda i, slots: gather(i, slots.flip(0)))
    report = replayer.run(as_workload([range(10)]))
    assert report.mismatches == 10


def test_storage_larger_than_memory_is_rejected():
    with pytest.raises(MemoryError, match=r"verification needs .* GiB on cpu: expected at most"):
        KVVerifier(block_size=512, num_blocks=2**31 - 1)


# --- series and figure ----------------------------------------------------------------------------


def test_series_sum_to_the_totals():
    series = Series()
    replayer = Replayer(block_size=16, num_blocks=301, concurrency=3, series=series)
    prompts = [*chat_workload(80, seed=2), *as_workload([range(10_000)])]
    report = replayer.run(prompts)
    assert len(series.hit_tokens) == report.requests == 81
    assert sum(series.prompt_tokens) == report.prompt_tokens
    assert sum(series.hit_tokens) == report.hit_tokens
    assert series.evicted_blocks[-1] == report.evicted_blocks > 0
    assert max(series.used_blocks) == report.peak_used_blocks
    assert series.prompt_tokens[-1] == 0 and report.rejected_requests == 1


@pytest.mark.parametrize("tiers", [{}, {"num_store_blocks": 2_000}, {"num_host_blocks": 2_001}])
def test_reasons_of_misses_sum_to_the_missed_tokens(tiers):
    series = Series()
    replayer = Replayer(
        **{"block_size": 16, "num_blocks": 301, "explain_misses": 1, **tiers}, series=series
    )
    prompts = [*chat_workload(80, seed=2), *as_workload([range(10_000)])]
    report = replayer.run(prompts)
    assert report.store_hit_tokens != 0  # None without a store
    missed = report.missed_tokens
    assert sum(missed.values()) == report.prompt_tokens - report.hit_tokens
    assert "external" not in missed
    assert (missed["evicted"] > 0) != bool(tiers) and missed["new"] > 0 and missed["tail"] > 0
    assert {reason: sum(counts) for reason, counts in series.missed_tokens.items()} == missed
    assert {len(counts) for counts in series.missed_tokens.values()} == {81}
    assert Replayer(block_size=16, num_blocks=301).run(chat_workload(2)).missed_tokens is None


def test_requests_with_earlier_timestamps_are_reported():
    def report(*arrivals_ms):
        items = [
            replace(each, arrival_ms=at)
            for each, at in zip(chat_workload(len(arrivals_ms)), arrivals_ms, strict=True)
        ]
        return Replayer(block_size=16, num_blocks=301).run(items)

    jumped = report(0, 1_000, 10**9, 2_000, 3_000, 10**9)
    assert jumped.out_of_order_requests == 2
    assert any("out of order" in str(row) for row in report_table(jumped).columns[0].cells)
    for ordered in (report(0, 0, 0), report(5, 5, 7)):
        assert ordered.out_of_order_requests is None
        assert "out of order" not in report_table(ordered).columns[0].cells


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"explain_misses": 1}])
@pytest.mark.parametrize("num_requests", [0, 1, 60])
def test_figure_is_written(tmp_path, num_requests, options):
    pytest.importorskip("matplotlib")
    from kvcache_lab.plots import draw

    series = Series()
    replayer = Replayer(block_size=16, num_blocks=301, series=series, **options)
    report = replayer.run(chat_workload(num_requests), "a $ name_with $ signs")
    draw(series, report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_request_of_the_wrong_type_does_not_move_the_clock():
    replayer = Replayer(block_size=16, num_blocks=20)
    item = next(iter(chat_workload(1)))
    with pytest.raises(TypeError, match="request is 'a': expected a Request"):
        replayer.arrive(item, "a")
    assert replayer.now_ms == 0


def test_requests_of_an_untimed_replay_end_before_the_clock_moves(monkeypatch):
    """The clock follows the arrivals, also while they are at 0."""
    calls = []
    replayer = Replayer(block_size=16, num_blocks=9)
    free, set_now = replayer.manager.free, replayer.manager.cache.set_now
    monkeypatch.setattr(
        replayer.manager, "free", lambda *a, **k: (calls.append("free"), free(*a, **k))
    )
    monkeypatch.setattr(
        replayer.manager.cache, "set_now", lambda now: (calls.append(now), set_now(now))
    )
    for i, arrival_ms in enumerate((0, 0, 5_000)):
        tokens = np.arange(16, dtype=np.int32)
        replayer.arrive(WorkloadRequest(i, arrival_ms, tokens, 1, prefix_keys(tokens)))
    assert calls == [0, "free", 0, "free", 5]
