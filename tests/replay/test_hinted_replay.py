# SPDX-License-Identifier: Apache-2.0
"""Replays with hints: what prefetches gain, trace fields, verified bytes, and the command line."""

import gzip
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from kvcache.allocator import check_invariants
from kvcache.cli import main
from kvcache.hints import Hint, limits
from kvcache.replay import (
    Replayer,
    RequestHint,
    Series,
    Service,
    TraceError,
    WorkloadRequest,
    chat_workload,
    read_trace,
)
from kvcache.replay.hinted import DueHint, in_order, with_prefetches
from kvcache.replay.verifier import KVVerifier
from kvcache.replay.workload import MAX_LEAD_MS

SLOW = Service(8_000, 50, 20_000, 10_000)


def hints(*each):
    return tuple(RequestHint(Hint(intent=intent, **more), lead) for intent, lead, more in each)


def run(workload, **options):
    replayer = Replayer(
        **{"block_size": 16, "num_blocks": 401, "service": SLOW, "concurrency": 64} | options
    )
    report = replayer.run(workload)
    check_invariants(replayer.manager)
    pool = replayer.manager.pool
    assert (pool.num_free, pool.num_pinned) == (pool.num_total, 0)
    return report


@pytest.mark.parametrize(
    "tiers", [{"num_host_blocks": 8_001}, {"num_host_blocks": 201, "num_store_blocks": 8_000}]
)
def test_prefetches_raise_device_hits_and_shorten_the_wait(tiers):
    plain = run(chat_workload(120), **tiers)
    hinted = run(with_prefetches(chat_workload(120), 2), **tiers)
    assert plain.hints is None and plain.prefetched_tokens is None
    assert hinted.token_hit_rate == pytest.approx(plain.token_hit_rate, abs=0.01)
    assert hinted.device_hit_tokens > 1.1 * plain.device_hit_tokens
    assert hinted.mean_ms_to_first_token < 0.9 * plain.mean_ms_to_first_token
    assert 0.8 * hinted.prefetched_tokens < hinted.prefetched_hit_tokens
    assert sum(hinted.hints["prefetch"].values()) == 120


def item(index, arrival_ms, first, num_tokens, *each):
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, 0, np.zeros(0, np.int64), hints(*each))


def first_token_ms(workload, **options):
    series = Series()
    run(workload, num_host_blocks=200, num_blocks=24, series=series, concurrency=9, **options)
    return series.ms_to_first_token


def test_loads_from_the_host_take_time_one_after_another():
    prompts = [item(0, 0, 0, 160), item(1, 10_000, 500, 160), item(2, 20_000, 1_000, 336)]
    again = [item(3, 30_000, 0, 170), item(4, 30_000, 500, 170)]
    service = Service(8_000, 50, 100)
    times = first_token_ms([*prompts, *again], service=service)
    assert times[:3] == [20, 20, 42]
    assert times[3:] == [1_600 + 10 / 8, 3_200 + 10 / 8]


@pytest.mark.parametrize(("lead_ms", "rest_ms"), [(0, 1_600), (1_000, 600), (1_600, 0), (8_000, 0)])
def test_request_waits_for_the_rest_of_its_prefetch(lead_ms, rest_ms, monkeypatch):
    prompts = [item(0, 0, 0, 160), item(1, 10_000, 500, 368)]
    again = item(2, 30_000, 0, 170, ("prefetch", lead_ms, {}))
    monkeypatch.setattr(limits, "SHARE", 1.0)
    times = first_token_ms([*prompts, again], service=Service(8_000, 50, 100))
    assert times[2] == pytest.approx(rest_ms + 10 / 8)


def test_request_waits_for_the_rest_of_a_load_from_the_store(monkeypatch):
    prompts = [item(0, 0, 0, 160), item(1, 10_000, 500, 368)]
    again = item(2, 30_000, 0, 170, ("prefetch", 1_000, {}))
    monkeypatch.setattr(limits, "SHARE", 1.0)
    series = Series()
    report = run(
        [*prompts, again],
        num_blocks=24,
        num_store_blocks=900,
        series=series,
        service=Service(8_000, 50, math.inf, 100),
    )
    assert series.ms_to_first_token[2] == pytest.approx(600 + 10 / 8)
    assert report.prefetched_hit_tokens == report.device_hit_tokens == 160


def test_hints_of_a_trace_are_carried_out(tmp_path, capsys):
    tokens = [*range(100)]
    lines = [
        {"token_ids": tokens, "timestamp": 0, "hints": [{"intent": "pin", "ttl_s": 30}]},
        {"token_ids": [*range(200, 300)], "timestamp": 9_000},
        {"token_ids": [*range(1_000, 1_900)], "timestamp": 12_000},  # evicts the second prompt
        {
            "token_ids": [*range(200, 320)],
            "timestamp": 20_000,
            "hints": [{"intent": "prefetch", "lead_ms": 2_000, "action_id": "a"}],
        },
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    found = [each.hints for each in read_trace(path)]
    assert found[3] == hints(("prefetch", 2_000, {"action_id": "a"}))
    options = [str(path), "--block-size", "16", "--num-blocks", "60", "--host-blocks", "60"]
    assert main(["replay", *options, "--timed", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hints"]["pin"]["done"] == 1
    assert report["prefetched_tokens"] == report["prefetched_hit_tokens"] == 96
    assert report["device_hit_tokens"] == report["hit_tokens"] == 96
    assert main(["replay", *options, "--verify"]) == 0
    out = capsys.readouterr().out
    assert "hints: pin" in out and "hit rate on the device" in out
    assert main(["replay", *options, "--no-hints", "--json"]) == 0
    assert "hints" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "hints is 3: expected a list of objects"),
        ([3], "hints is [3]: expected a list of objects"),
        (
            [{"intent": "pin", "color": 1}],
            'hints[0]: "color" is unknown: expected one of action_id',
        ),
        ([{"ttl_s": 1}], "hints[0]: intent is missing"),
        ([{"intent": "prefetch"}], "hints[0]: lead_ms is None with intent 'prefetch'"),
        ([{"intent": "pin", "lead_ms": -1}], "hints[0]: lead_ms is -1: expected 0 to"),
        ([{"intent": "pin"}, {"intent": "x"}], "hints[1]: intent is 'x': expected one of"),
    ],
)
@pytest.mark.parametrize("content", [{"token_ids": [1, 2]}, {"prompt": "a b"}])
def test_invalid_hints_in_traces_are_rejected(tmp_path, value, message, content):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(content | {"hints": value}))
    with pytest.raises(TraceError) as told:
        list(read_trace(path))
    assert message in str(told.value) and "line 1" in str(told.value)


def test_verified_replay_with_hints_has_no_mismatch():
    verifier = KVVerifier(block_size=16, num_blocks=201, num_host_blocks=3_001, max_num_reqs=8)
    each = hints(("prefetch", 3_000, {}), ("pin", None, {"ttl_s": 5}))
    workload = [replace(item, hints=each[:: 1 + i % 2]) for i, item in enumerate(chat_workload(40))]
    report = run(
        workload,
        num_blocks=201,
        num_host_blocks=3_001,
        verifier=verifier,
        concurrency=4,
    )
    assert report.mismatches == 0 and report.hints["pin"]["partly"] >= 5


def test_hints_and_requests_are_ordered_by_time():
    items = [
        replace(each, index=i, arrival_ms=at, hints=hints(("prefetch", lead, {})))
        for i, (each, at, lead) in enumerate(
            zip(chat_workload(4), (0, 5_000, 6_000, MAX_LEAD_MS * 3), (10, 3_000, 5_500, 0))
        )
    ]
    found = [
        ("hint", each.at_ms) if isinstance(each, DueHint) else ("request", each.arrival_ms)
        for each in in_order(iter(items), is_timed=True)
    ]
    assert found == [
        *[("hint", 0), ("request", 0), ("hint", 500), ("hint", 2_000), ("request", 5_000)],
        *[("request", 6_000), ("hint", MAX_LEAD_MS * 3), ("request", MAX_LEAD_MS * 3)],
    ]
    with pytest.raises(ValueError, match="expected a timed trace in order of arrival"):
        list(in_order(reversed(items), is_timed=True))


def test_invalid_workload_hints_are_rejected():
    item = next(chat_workload(1))
    with pytest.raises(TypeError, match="hints is"):
        replace(item, hints=[1])
    with pytest.raises(TypeError, match="hints"):
        replace(item, hints=(1,))
    with pytest.raises(TypeError, match="hint"):
        RequestHint("pin")
    with pytest.raises(ValueError, match="lead_ms is 600001: expected 0 to 600000"):
        RequestHint(Hint(intent="pin"), 600_001)
    assert isinstance(item, WorkloadRequest)


def test_options_that_conflict_with_prefetch_are_rejected(capsys):
    for options, message in (
        (["--prefetch", "x"], "--prefetch is 'x': expected seconds from 0 to 600"),
        (["--prefetch", "601"], "--prefetch is '601': expected seconds"),
        (["--prefetch", "1", "--compare"], "--prefetch is given with --compare"),
        (["--prefetch", "1", "--curve"], "--prefetch is given with --curve"),
        (["--prefetch", "1", "--disaggregate", "500"], "--prefetch is given with --disaggregate"),
    ):
        assert main(["replay", *options]) == 2
        assert message in capsys.readouterr().err
