# SPDX-License-Identifier: Apache-2.0
"""Tests of fleets with separate prefill and decode replicas."""

import json

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import ChatShape, WorkloadRequest, chat_workload
from kvcache_lab.content import prefix_keys
from kvcache_lab.fleet import ROUTERS, Fleet, Hardware, plan_fleet, simulate_fleet
from kvcache_lab.fleet.planning import _search
from kvcache_lab.fleet.simulation import FleetReport, Simulation

HARDWARE = Hardware(1000.0, 10.0, bytes_per_token=1e6, transfer_gb_per_s=1.0)  # 1 ms per token
PROMPT = [*range(1600)]


def request(index, tokens, arrival_ms, answer=1):
    tokens = np.array(tokens, np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, answer, prefix_keys(tokens))


def run(requests, fleet, hardware=HARDWARE):
    simulation = Simulation(fleet, hardware)
    return simulation.run(requests), simulation


def test_prompts_are_loaded_by_the_decode_replica_unless_cached_there():
    fleet = Fleet(1, 401, decode_replicas=1, router="round_robin")
    requests = [request(0, PROMPT, 0, 10), request(1, [*PROMPT, 5], 10_000, 10)]
    report, simulation = run(requests, fleet)
    # Computing and loading 1,600 tokens take 1,600 ms each. For the second prompt, only one token
    # is computed and loaded.
    first, second = simulation.outcomes.ms_to_first_token
    assert (first, second) == (1600 + 1600 + 1, 1 + 1 + 1)
    assert report.device_hit_tokens == report.decode_hit_tokens == 1600
    assert report.transferred_bytes == 1601 * 1_000_000
    assert report.answer_tokens_per_s == pytest.approx(20 / 11.003)


def test_answers_do_not_delay_prefills_and_decode_replicas_bound_running_requests():
    requests = [request(i, range(3000 * i, 3000 * i + 16), i, 100) for i in range(6)]  # 10 s each
    together = Fleet(1, 401, concurrency=2, router="round_robin")
    assert run(requests, together)[0].p99_ms_to_first_token > 20_000
    fast = Hardware(1e6, 10.0, transfer_gb_per_s=1000.0)
    apart = Fleet(1, 401, concurrency=2, router="round_robin", decode_replicas=3)
    assert run(requests, apart, hardware=fast)[0].p99_ms_to_first_token < 10
    few = Fleet(1, 401, concurrency=2, router="round_robin", decode_replicas=2)
    assert run(requests, few, hardware=fast)[0].p99_ms_to_first_token > 9_000


def test_prompts_that_do_not_fit_a_decode_replica_are_rejected():
    fleet = Fleet(1, 101, decode_replicas=1)  # a decode replica also holds the first token
    report, _ = run([request(0, PROMPT, 0), request(1, range(160), 100)], fleet)
    assert (report.requests, report.rejected_requests, report.prompt_tokens) == (2, 1, 160)


@pytest.mark.parametrize(
    ("needed", "found"), [((5, 2), (5, 2)), ((1, 7), (1, 7)), ((3, 3), (3, 3))]
)
def test_the_search_finds_the_fewest_replicas_of_both_pools(needed, found):
    reports = []

    def simulate(fleet):
        fast = fleet.replicas >= needed[0] and fleet.decode_replicas >= needed[1]
        counts = {"replicas": fleet.replicas, "decode_replicas": fleet.decode_replicas}
        slow = 6 + 100 / (fleet.replicas * fleet.decode_replicas)
        reports.append(FleetReport(counts, p99_ms_to_first_token=1.0 if fast else slow))
        return reports[-1]

    def fewest(pair):
        reports.clear()
        _search(simulate, Fleet(1, 100), pair, 5.0, 64)
        fast = [each.fleet for each in reports if each.p99_ms_to_first_token < 5]
        pairs = [(each["replicas"], each["decode_replicas"]) for each in fast]
        assert len({*pairs}) == len(pairs) and len(reports) < 16
        return min(pairs, key=sum, default=None)

    assert fewest((None, None)) == found
    assert fewest((None, 64)) == (needed[0], 64) and fewest((64, None)) == (64, needed[1])
    assert fewest((needed[0], needed[1])) == needed and fewest((None, needed[1] - 1)) is None


@pytest.mark.slow
def test_plans_recommend_the_numbers_of_both_pools(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    workload = [*chat_workload(120, 3, ChatShape(num_conversations=20))]
    hardware = Hardware(400.0, 2.0)
    plan = plan_fleet(
        *(workload, Fleet(1, 401, concurrency=4)),
        **{"p99_ms": 8000.0, "hardware": hardware, "decode_replicas": [0, None, 20]},
    )
    assert {each.fleet["decode_replicas"] for each in plan.reports} >= {0, 20}
    apart = [each for each in plan.reports if each.fleet["decode_replicas"] not in (0, 20)]
    fast = [each for each in apart if each.p99_ms_to_first_token <= 8000.0]
    size = lambda report: report.fleet["replicas"] + report.fleet["decode_replicas"]  # noqa: E731
    assert fast and size(plan.recommended) <= min(map(size, fast))
    with pytest.raises(ValueError, match=r"decode_replicas\[1\] is -1: expected 0 to"):
        plan_fleet(workload, Fleet(1, 401), p99_ms=1.0, decode_replicas=[1, -1])
    arguments = ["plan", "--requests", "40", "--router", "session", "--decode-replicas", "auto"]
    assert main([*arguments, "--plot", str(tmp_path / "plan.png")]) == 0
    out = capsys.readouterr().out
    assert "Choose 1 prefill and 1 decode replica with the router session." in out
    assert "1 + 1" in out
    assert (
        main(["plan", "--requests", "40", "--decode-replicas", "0,2", "--replicas", "1", "--json"])
        == 0
    )
    reports = json.loads(capsys.readouterr().out)["reports"]
    assert [each["fleet"]["decode_replicas"] for each in reports] == [0, 2] * 4
    assert main(["plan", "--decode-replicas", "2,many"]) == 2
    error = capsys.readouterr().err
    assert "--decode-replicas is 'many': expected a whole number from 0" in error


@pytest.mark.parametrize("router", ROUTERS)
def test_all_routers_serve_all_requests_of_separate_pools(router):
    workload = [*chat_workload(100, 3, ChatShape(num_conversations=20))]
    fleet = Fleet(2, 401, decode_replicas=3, router=router, host_blocks=100, store_blocks=300)
    report = simulate_fleet(workload, fleet)
    assert (report.requests, report.rejected_requests) == (100, 0)
    assert 0 < report.transferred_bytes < report.prompt_tokens * Hardware().bytes_per_token
