# SPDX-License-Identifier: Apache-2.0
"""Replays with prefetches: what they gain, verified bytes, and the command line."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from kvcache.allocator import check_invariants
from kvcache.cli import main
from kvcache_exchange.hints import limits
from kvcache_lab import Replayer, Series, Service, WorkloadRequest, chat_workload
from kvcache_lab.hinted import DuePrefetch, with_prefetches
from kvcache_lab.verifier import KVVerifier

SLOW = Service(8_000, 50, 20_000, 10_000)


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
    hinted = run(chat_workload(120), prefetch_s=2, **tiers)
    assert plain.hints is None and plain.prefetched_tokens is None
    assert hinted.token_hit_rate == pytest.approx(plain.token_hit_rate, abs=0.01)
    assert hinted.device_hit_tokens > 1.1 * plain.device_hit_tokens
    assert hinted.mean_ms_to_first_token < 0.9 * plain.mean_ms_to_first_token
    assert 0.8 * hinted.prefetched_tokens < hinted.prefetched_hit_tokens
    assert sum(hinted.hints.values()) == 120


def item(index, arrival_ms, first, num_tokens):
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, 0, np.zeros(0, np.int64))


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
    again = item(2, 30_000, 0, 170)
    monkeypatch.setattr(limits, "SHARE", 1.0)
    times = first_token_ms(
        [*prompts, again], service=Service(8_000, 50, 100), prefetch_s=lead_ms / 1_000
    )
    assert times[2] == pytest.approx(rest_ms + 10 / 8)


def test_request_waits_for_the_rest_of_a_load_from_the_store(monkeypatch):
    prompts = [item(0, 0, 0, 160), item(1, 10_000, 500, 368)]
    again = item(2, 30_000, 0, 170)
    monkeypatch.setattr(limits, "SHARE", 1.0)
    series = Series()
    report = run(
        [*prompts, again],
        num_blocks=24,
        num_store_blocks=900,
        series=series,
        service=Service(8_000, 50, math.inf, 100),
        prefetch_s=1,
    )
    assert series.ms_to_first_token[2] == pytest.approx(600 + 10 / 8)
    assert report.prefetched_hit_tokens == report.device_hit_tokens == 160


def test_prefetches_of_a_command_are_reported(tmp_path, capsys):
    lines = [
        {"token_ids": [*range(200, 300)], "timestamp": 9_000},
        {"token_ids": [*range(1_000, 1_940)], "timestamp": 12_000},  # evicts the first prompt
        {"token_ids": [*range(200, 320)], "timestamp": 20_000},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    options = [str(path), "--block-size", "16", "--num-blocks", "60", "--host-blocks", "60"]
    options = ["replay", *options, "--prefetch", "2"]
    assert main([*options, "--timed", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(report["hints"].values()) == 3
    assert report["prefetched_tokens"] == report["prefetched_hit_tokens"] == 96
    assert report["device_hit_tokens"] == report["hit_tokens"] == 96
    assert main([*options, "--verify"]) == 0
    out = capsys.readouterr().out
    assert "prefetch hints" in out and "hit rate on the device" in out


def test_verified_replay_with_prefetches_has_no_mismatch():
    verifier = KVVerifier(block_size=16, num_blocks=201, num_host_blocks=3_001, max_num_reqs=8)
    report = run(
        chat_workload(40),
        num_blocks=201,
        num_host_blocks=3_001,
        verifier=verifier,
        concurrency=4,
        prefetch_s=3,
    )
    assert report.mismatches == 0 and report.prefetched_tokens > 0


def test_prefetches_and_requests_are_ordered_by_time():
    items = [
        replace(each, index=i, arrival_ms=at)
        for i, (each, at) in enumerate(zip(chat_workload(4), (0, 2_000, 5_000, 9_000)))
    ]

    def found(is_timed):
        return [
            ("hint", each.at_ms) if isinstance(each, DuePrefetch) else ("request", each.arrival_ms)
            for each in with_prefetches(iter(items), 3_000, is_timed=is_timed)
        ]

    assert found(True) == [
        *[("hint", 0), ("request", 0), ("hint", 0), ("request", 2_000), ("hint", 2_000)],
        *[("request", 5_000), ("hint", 6_000), ("request", 9_000)],
    ]
    assert found(False)[:4] == [("hint", 0), ("request", 0), ("hint", 2_000), ("request", 2_000)]
    items.reverse()
    with pytest.raises(ValueError, match="expected a timed trace in order of arrival"):
        found(True)
    with pytest.raises(ValueError, match="prefetch_s is 601: expected seconds from 0 to 600"):
        Replayer(block_size=16, num_blocks=10, prefetch_s=601)


def test_options_that_conflict_with_prefetch_are_rejected(capsys):
    for options, message in (
        (["--prefetch", "x"], "--prefetch is 'x': expected seconds from 0 to 600"),
        (["--prefetch", "601"], "--prefetch is '601': expected seconds"),
        (["--prefetch", "1", "--compare"], "--prefetch is given with --compare"),
    ):
        assert main(["replay", *options]) == 2
        assert message in capsys.readouterr().err
