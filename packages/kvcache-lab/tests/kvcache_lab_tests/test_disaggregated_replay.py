# SPDX-License-Identifier: Apache-2.0
"""Replays with separate prefill and decode pools: computed tokens, transfers and leases."""

import json
import random

import numpy as np
import pytest

from kvcache.allocator import check_invariants
from kvcache.cli import main
from kvcache_lab import (
    DisaggregatedReplayer,
    Disaggregation,
    Service,
    WorkloadRequest,
    chat_workload,
)
from kvcache_lab.content import prefix_keys
from kvcache_lab.groups import parse_groups
from tests.machinery.shared import sampled, seed_of_test

# 1 ms per prompt token and 10 ms per answer token
SERVICE = Service(prefill_speed=1_000, decode_speed=100)


def request(index, arrival_ms, first, num_tokens, answer):
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, answer, prefix_keys(tokens, 0))


def replayed(requests, prefill=100, decode=100, lease_s=60.0, concurrency=10, **options):
    # With these options, loading a token takes one millisecond.
    between = Disaggregation(prefill, lease_s=lease_s, bytes_per_token=1e6, gb_per_s=1.0)
    options = {"block_size": 4} if "groups" not in options else options
    replayer = DisaggregatedReplayer(
        between, num_blocks=decode, concurrency=concurrency, service=SERVICE, **options
    )
    report = replayer.run(requests)
    assert report.held_blocks_at_end == 0
    for side in (replayer._prefill, replayer._decode):
        check_invariants(side.manager)
        assert side.manager.pool.num_kept == 0
    assert report.requests == report.rejected_requests + len(replayer._first_ms)
    return report


def test_prompt_is_computed_once_and_loaded():
    report = replayed([request(0, 0, 0, 40, 20)])
    assert (report.loaded_requests, report.loaded_tokens, report.loaded_bytes) == (
        1,
        40,
        40_000_000,
    )
    assert (report.prefill_computed_tokens, report.decode_computed_tokens) == (40, 1)
    assert report.peak_leased_blocks == 10
    # The first token follows 40 ms of prefill, 40 ms of loading, and 1 ms to compute one token.
    assert report.mean_ms_to_first_token == 81
    assert report.duration_s == pytest.approx(0.281)


def test_each_engine_hits_its_own_cache():
    report = replayed([request(0, 0, 0, 40, 20), request(1, 1000, 0, 60, 5)])
    assert (report.prefill_hit_tokens, report.decode_hit_tokens) == (40, 40)
    assert report.loaded_tokens == 60


def test_decode_hits_are_not_loaded():
    report = replayed([request(0, 0, 0, 40, 20), request(1, 1000, 0, 40, 5)])
    assert (report.loaded_requests, report.local_requests) == (1, 1)


def test_decode_side_recomputes_after_lease_expiry():
    report = replayed([request(0, 0, 0, 40, 20)], lease_s=0.03)
    assert (report.loaded_requests, report.lease_over_requests) == (0, 1)
    assert report.decode_computed_tokens == 41


def test_blocks_under_lease_fill_the_prefill_pool():
    """The decode side runs one request at a time, so the blocks of later prompts stay leased."""
    requests = [request(i, 0, 100 * i, 40, 100) for i in range(4)]
    report = replayed(requests, prefill=21, concurrency=1)
    assert report.prefill_full_requests == 1
    assert (report.peak_leased_blocks, report.peak_leased_requests) == (20, 2)
    assert report.loaded_requests == 3


def test_unordered_trace_is_rejected():
    with pytest.raises(
        ValueError, match="request 1 arrives at 50 ms, but the previous request at 100"
    ):
        replayed([request(0, 100, 0, 40, 0), request(1, 50, 100, 40, 0)])


def test_request_larger_than_the_decode_pool_is_rejected():
    report = replayed([request(0, 0, 0, 80, 5), request(1, 0, 500, 20, 5)], decode=12)
    assert (report.rejected_requests, report.loaded_requests) == (1, 1)


HYBRIDS = ["full_attention,sliding_window:window=16", "full_attention,recurrent"]


@pytest.mark.slow
@pytest.mark.parametrize("groups", sampled([HYBRIDS[0], None, HYBRIDS[1]]))
def test_random_workloads_release_all_blocks(groups):
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(5):
        options = {} if groups is None else {"groups": parse_groups(groups, 4)}
        requests, at = [], 0
        for index in range(60):
            at += rng.randrange(200)
            first = rng.choice([0, 0, 1000, rng.randrange(10**6)])
            requests.append(request(index, at, first, rng.randint(1, 120), rng.randint(0, 30)))
        report = replayed(
            requests,
            rng.randint(20, 150),
            rng.randint(70, 200),
            rng.choice([0.02, 0.2, 5.0]),
            rng.randint(1, 8),
            **options,
        )
        assert report.requests == 60
        done = report.loaded_requests - report.unfinished_loads + report.local_requests
        assert done <= 60 - report.rejected_requests


@pytest.mark.slow
def test_command_prints_a_table_and_json(capsys):
    arguments = ["replay", "--disaggregate", "301:lease_s=5", "--num-blocks", "801"]
    arguments += ["--requests", "60"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 60 and report["loaded_requests"] > 0
    assert report["lease_s"] == 5 and report["decode_blocks"] == 801
    between = Disaggregation(301, lease_s=5)
    again = DisaggregatedReplayer(between, block_size=16, num_blocks=801)
    assert again.run(chat_workload(60), "chat (seed 0)").to_dict() == report
    assert main(arguments) == 0
    assert "peak leased" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options,message",
    [
        (["x"], "--disaggregate is 'x': 'x': expected a number of blocks"),
        (["1"], "prefill_blocks is 1: expected 2"),
        (["9:lease_s=0"], "lease_s is 0.0: expected more than 0"),
        (["9:lease_s=x"], "lease_s is 'x': expected a number"),
        (["9:leases=2"], "'leases=2': expected one of lease_s, bytes_per_token, gb_per_s"),
        (["9", "--verify"], "--verify is given with --disaggregate: expected only one of the two"),
        (
            ["9", "--compare"],
            "--compare is given with --disaggregate: expected only one of the two",
        ),
        (["9", "--store-blocks", "9"], "--store-blocks is given with --disaggregate"),
        (["9", "--host-blocks", "9"], "--host-blocks is given with --disaggregate"),
    ],
)
def test_invalid_options_are_rejected(options, message, capsys):
    assert main(["replay", "--disaggregate", *options]) == 2
    assert message in capsys.readouterr().err
