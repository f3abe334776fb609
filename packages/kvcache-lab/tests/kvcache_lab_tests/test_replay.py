# SPDX-License-Identifier: Apache-2.0
"""Replays: trace readers, content keys, exact hits, and the errors that verification detects."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_lab import (
    ChatShape,
    Mismatch,
    Replayer,
    Series,
    WorkloadRequest,
    chat_workload,
    read_mooncake,
)
from kvcache_lab.content import VOCABULARY, prefix_keys
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


def as_tuples(requests):
    return [(r.arrival_ms, r.token_ids.tolist(), r.output_length) for r in requests]


def test_equal_seeds_give_equal_workloads():
    assert as_tuples(chat_workload(40, seed=3)) == as_tuples(chat_workload(40, seed=3))
    assert as_tuples(chat_workload(20, seed=3)) == as_tuples(chat_workload(40, seed=3))[:20]
    assert as_tuples(chat_workload(40, seed=3)) != as_tuples(chat_workload(40, seed=4))


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
    empty = Replayer(block_size=16, num_blocks=2).run([])
    assert (empty.requests, empty.token_hit_rate, empty.us_per_request["total"]) == (0, 0.0, 0.0)


def test_oldest_request_finishes_to_free_space():
    prompts = [[i] * 8 for i in range(6)]  # each prompt needs two blocks, and the pool has four
    report = Replayer(block_size=4, num_blocks=5, concurrency=6).run(as_workload(prompts))
    assert (report.rejected_requests, report.peak_used_blocks) == (0, 4)
    assert report.evicted_blocks == 8


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


def test_storage_larger_than_memory_is_rejected():
    with pytest.raises(MemoryError, match=r"verification needs .* GiB on cpu: expected at most"):
        KVVerifier(block_size=512, num_blocks=2**31 - 1)


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
