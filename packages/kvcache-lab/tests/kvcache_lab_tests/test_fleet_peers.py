# SPDX-License-Identifier: Apache-2.0
"""Tests of replicas that load tokens from other replicas."""

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import ChatShape, WorkloadRequest, chat_workload
from kvcache_lab.content import prefix_keys
from kvcache_lab.fleet import ROUTERS, Fleet, Hardware, plan_fleet, simulate_fleet
from kvcache_lab.fleet.simulation import Simulation

HARDWARE = Hardware(1000.0, 10.0, bytes_per_token=1e6, peer_gb_per_s=10.0, store_gb_per_s=5.0)
PROMPT = [*range(1600)]


def request(index, tokens, arrival_ms, answer=1):
    tokens = np.array(tokens, np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, answer, prefix_keys(tokens))


def run(requests, fleet):
    """Return the simulation and, for each request, the replica, its own hits, and its hits on other
    replicas.
    """
    served_by = []
    simulation = Simulation(
        *(fleet, HARDWARE),
        on_request=lambda item, replica, served: served_by.append(
            (replica, served.num_hit, served.num_store_hit, served.link)
        ),
    )
    simulation.run(requests)
    return simulation, served_by


def test_replicas_load_prefixes_from_each_other_once_they_are_computed():
    fleet = Fleet(2, 401, router="round_robin", peers=True)
    for arrival_ms, loaded in ((1, 0), (1599, 0), (1600, 1584)):
        pair = [request(0, PROMPT, 0), request(1, PROMPT, arrival_ms)]
        simulation, served_by = run(pair, fleet)
        assert served_by[1][1:3] == (loaded, loaded)
    assert simulation.report.peer_hit_tokens == 1584
    assert simulation.report.loaded_bytes == 1584 * 1_000_000
    # 1,584 tokens are loaded in 158.4 ms, and 16 tokens are computed in 16 ms.
    assert simulation.outcomes.ms_to_first_token[1] == pytest.approx(158.4 + 16)
    # Only the blocks after the replica's own longest hit are loaded. They are then cached on this
    # replica.
    requests = [
        *(request(0, PROMPT, 0), request(1, PROMPT[:800], 5000)),
        *(request(2, [9], 6000), request(3, [*PROMPT, 1], 7000), request(4, [9], 8000)),
        request(5, [*PROMPT, 1, 2], 9000),
    ]
    _, served_by = run(requests, fleet)
    assert [each[1:3] for each in served_by[1::2]] == [(784, 784), (1600, 800), (1600, 0)]


def test_tokens_on_the_host_of_a_peer_are_loaded_and_the_longest_source_is_used():
    fleet = Fleet(2, 111, router="round_robin", peers=True, host_blocks=300)
    other = [*range(4000, 5600)]
    requests = [request(0, PROMPT, 0), request(1, [9], 0), request(2, other, 3000)]
    requests.append(request(3, PROMPT, 9000))  # the first prompt has been evicted from the device
    assert run(requests, fleet)[1][3][1:] == (1584, 1584, "peer")
    both = Fleet(2, 111, router="round_robin", peers=True, store_blocks=250)
    _, served_by = run(requests, both)
    assert served_by[3][1:] == (1584, 1584, "store")  # the peer has evicted the prompt
    requests[2] = request(2, [8], 3000)
    assert run(requests, both)[1][3][1:] == (1584, 1584, "peer")


@pytest.mark.parametrize("router", ROUTERS)
def test_peers_never_reduce_hits_of_unlimited_caches(router):
    workload = [*chat_workload(100, 3, ChatShape(num_conversations=20))]
    alone = simulate_fleet(workload, Fleet(1, 20_001, router=router))
    fleet = Fleet(3, 20_001, router=router, peers=True)
    report = simulate_fleet(workload, fleet, Hardware(peer_gb_per_s=1e6))
    lost = alone.token_hit_rate - report.token_hit_rate
    assert -1e-9 <= lost < 0.02  # only hits on prompts that are still being computed
    # `prefix` finds everything on one replica, except when this replica is busy.
    share = report.peer_hit_tokens / report.prompt_tokens
    assert share < 0.05 if router == "prefix" else share > 0
    assert simulate_fleet(workload, Fleet(3, 20_001, router=router)).peer_hit_tokens == 0


def test_plans_compare_fleets_with_and_without_peers(capsys):
    workload = [*chat_workload(60, 3, ChatShape(num_conversations=20))]
    plan = plan_fleet(
        workload, Fleet(1, 401, router="round_robin"), p99_ms=1e6, replicas=[2], peers=[False, True]
    )
    without, with_peers = plan.reports
    assert with_peers.token_hit_rate > without.token_hit_rate
    assert with_peers.fleet["peers"] and not without.fleet["peers"]
    with pytest.raises(TypeError, match=r"peers\[0\] is 1: expected True or False"):
        plan_fleet(workload, Fleet(1, 401), p99_ms=1.0, peers=[1])
    arguments = ["plan", "--requests", "40", "--replicas", "2", "--router", "session", "--peers"]
    assert main([*arguments, "yes"]) == 0
    assert "2 replicas with the router session, loads from peers" in capsys.readouterr().out
    assert main([*arguments, "maybe"]) == 2
    assert "--peers is 'maybe': expected no, yes or no,yes" in capsys.readouterr().err
