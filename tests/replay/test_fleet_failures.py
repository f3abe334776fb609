# SPDX-License-Identifier: Apache-2.0
"""Tests of failures in simulated fleets: replicas, stores and routers that lose their state, and
broken links.
"""

import json
import random

import numpy as np
import pytest
import torch

from kvcache.cli import main
from kvcache.replay import ChatShape, WorkloadRequest, chat_workload
from kvcache.replay.content import prefix_keys
from kvcache.replay.fleet import (
    FAILURE_KINDS,
    ROUTERS,
    Failure,
    Fleet,
    Hardware,
    failure_table,
    plan_fleet,
    simulate_failures,
    simulate_fleet,
)
from kvcache.replay.fleet.recovery import _recovered_s
from kvcache.replay.fleet.simulation import Simulation

HARDWARE = Hardware(1000.0, 10.0, bytes_per_token=1e3)
PROMPT = [*range(1600)]


def request(index, tokens, arrival_ms, answer=1):
    tokens = np.array(tokens, np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, answer, prefix_keys(tokens))


def run(requests, fleet, *failures, hardware=HARDWARE):
    """Return the simulation, and the replica and hits for each attempt to serve a request."""
    attempts = []
    simulation = Simulation(
        *(fleet, hardware),
        failures=[Failure.parse(each) for each in failures],
        on_request=lambda item, replica, served: attempts.append((item.index, replica, served)),
    )
    simulation.run(requests)
    return simulation, attempts


def placed(attempts):
    return [(index, replica, served.num_hit) for index, replica, served in attempts]


def test_requests_of_a_dead_replica_are_resent_and_its_cache_is_lost():
    fleet = Fleet(2, 401, router="round_robin")
    requests = [
        # The first token is at 1.6 s, and the answer ends at 11.6 s.
        request(0, PROMPT, 0, answer=100),
        request(1, [7], 0, answer=1),
        request(2, range(3000, 4600), 0),  # waits until 1.6 s; the first token is at 3.2 s
        request(3, [7], 2500),
        request(4, PROMPT, 9000),
    ]
    simulation, attempts = run(requests, fleet, "replica:0@2s+5s")
    assert placed(attempts) == [
        *((0, 0, 0), (1, 1, 0), (2, 0, 0)),
        *((0, 1, 0), (2, 1, 0)),  # resent at 2 s to the only remaining replica
        *((3, 1, 0), (4, 0, 0)),
    ]
    assert simulation.num_resent == 2 and simulation.num_delayed == 0
    # Request 0 had its first token before the failure. Request 2 waits for request 0's prefill.
    assert [round(each) for each in simulation.outcomes.ms_to_first_token] == [
        *(1600, 1, 5200, 2701, 1600),
    ]
    assert simulation.report.requests == 5 and simulation.report.prompt_tokens == 3 * 1600 + 2
    # Replica 0 computed for 2 s before it died, and for 1.6 s after its repair.
    assert simulation._replicas[0].computed_ms == 2000 + 1600


def test_requests_wait_while_no_replica_can_be_reached():
    fleet = Fleet(1, 401, router="prefix")
    requests = [request(0, PROMPT, 0), request(1, PROMPT, 3000), request(2, PROMPT, 20_000)]
    for failure, hits in (("replica:0@2.5s+4s", 0), ("router_link:0@2.5s+4s", 1584)):
        simulation, attempts = run(requests, fleet, failure)
        assert placed(attempts)[1:] == [(1, 0, hits), (2, 0, 1584)]
        wait = 3500 + 1600 - hits
        assert simulation.outcomes.ms_to_first_token[1] == pytest.approx(wait)
        assert (simulation.num_resent, simulation.num_delayed) == (0, 1)


def test_a_dead_store_is_empty_and_cannot_be_reached_for_a_time():
    fleet = Fleet(2, 401, router="round_robin", store_blocks=1000)
    other = [*range(5000, 6600)]
    requests = [
        *(request(0, PROMPT, 0), request(1, [7], 0)),
        *(request(2, [7], 9000), request(3, PROMPT, 9900)),  # hits in the store
        *(
            request(4, other, 11_000),
            request(5, [8], 11_000),
        ),  # not stored, because its prefill ends at 12.6 s, during the outage
        *(request(6, [8], 15_000), request(7, other, 15_000)),
        *(request(8, [8], 25_000), request(9, [*other, 1], 25_000)),
        *(request(10, [*other, 1], 30_000), request(11, [9], 30_000)),
    ]
    _, attempts = run(requests, fleet, "store@10s+10s")
    hits = {index: served.num_store_hit for index, _, served in attempts if served.num_store_hit}
    assert hits == {3: 1584}  # requests 9 and 10 hit on the device
    requests = [request(0, PROMPT, 0), request(1, [7], 0), request(2, [7], 20_000)]
    requests.append(request(3, PROMPT, 20_000))
    for failure, hit in (
        *(("store@10s", 0), ("store_link:1@10s+9s", 1584), ("store_link:1@10s+10.001s", 0)),
        *(("store_link:0@10s+90s", 1584), ("store@1s+0.5s", 1584), ("store@1s+0.601s", 0)),
        *(("store_link:0@1s+0.601s", 0), ("store_link:0@0s+0.5s", 0), ("store@90s+1s", 1584)),
    ):
        _, attempts = run(requests, fleet, failure)
        assert attempts[-1][-1].num_store_hit == hit, failure


def test_blocks_whose_prefill_a_replica_did_not_finish_are_not_in_the_store():
    fleet = Fleet(3, 401, router="round_robin", store_blocks=1000)
    requests = [request(0, PROMPT, 0), request(1, [7], 0), request(2, PROMPT, 2000)]
    _, attempts = run(requests, fleet, "replica:0@1s+90s")
    # The request is resent to replica 2 at 1 s. Its prefill ends at 2.6 s, after request 2 arrives.
    assert placed(attempts) == [(0, 0, 0), (1, 1, 0), (0, 2, 0), (2, 1, 0)]


def test_a_restarted_router_learns_the_blocks_that_are_stored_or_hit_again():
    fleet = Fleet(2, 401, router="prefix")
    first, second, longer = PROMPT, [*range(9000, 10_600)], [*PROMPT, *range(400)]
    requests = [
        request(0, first, 0, answer=300),  # runs until 31.6 s
        request(1, second, 10_000),
        # This request is sent to the replica that has cached its prompt, although that replica has
        # more requests.
        request(2, first, 11_000),
        request(3, [*first, 1], 20_000),  # not in the index: sent to the least loaded replica
        request(4, [*first, 2], 21_700),
        request(5, longer, 23_000),
    ]
    placed_without = placed(run(requests, fleet)[1])
    assert [replica for _, replica, _ in placed_without] == [0, 1, 0, 0, 0, 0]
    _, attempts = run(requests, fleet, "router@15s")
    assert placed(attempts)[3:] == [(3, 1, 0), (4, 1, 1600), (5, 1, 1600)]
    # The restarted router's index is empty, but the replica that it chooses has a hit. The router
    # learns of the cached blocks from this hit.
    requests = [
        *(
            request(0, first, 0),
            request(1, second, 0),
            request(2, [1], 10_000),
            request(3, [2], 10_100),
        ),
        *(
            request(4, [*first, 1], 20_000),
            request(5, [3], 30_000),
            request(6, [*first, 2], 40_000),
        ),
    ]
    _, attempts = run(requests, fleet, "router@15s")
    assert placed(attempts)[4:] == [(4, 0, 1600), (5, 1, 0), (6, 0, 1600)]


def test_a_restarted_router_forgets_sessions_and_requests_wait_for_it():
    fleet = Fleet(2, 401, router="session")
    requests = [
        *(request(0, PROMPT, 0, answer=300), request(1, [*PROMPT, 1], 15_500)),
        request(2, [*PROMPT, 1, 2], 25_000),
    ]
    assert [replica for _, replica, _ in run(requests, fleet)[1]] == [0, 0, 0]
    simulation, attempts = run(requests, fleet, "router@15s+2s")
    assert placed(attempts)[1:] == [(1, 1, 0), (2, 1, 1600)]
    assert simulation.outcomes.ms_to_first_token[1] == pytest.approx(1500 + 1601)


def test_a_wrong_index_costs_only_a_prefill():
    fleet = Fleet(2, 401, router="prefix")
    requests = [request(0, PROMPT, 0), request(1, PROMPT, 5000), request(2, PROMPT, 9000)]
    simulation = Simulation(fleet, HARDWARE, failures=[Failure("router_link", 1e6, replica=0)])
    simulation._replicas[1]._index = simulation._replicas[0]._index
    attempts = []
    simulation._on_request = lambda item, replica, served: attempts.append(
        (replica, served.num_hit)
    )
    simulation.run(requests)
    assert attempts == [(0, 0), (1, 0), (0, 1584)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "host_blocks"), [("prefix", 0), ("prefix", 300), ("session", 0)]
)
def test_routers_that_follow_events_choose_like_routers_that_query_managers(router, host_blocks):
    shape = ChatShape(num_conversations=30)
    fleet = Fleet(3, 151, router=router, host_blocks=host_blocks, concurrency=4, store_blocks=200)
    workload = [*chat_workload(120, 7, shape)]
    hardware = Hardware(2000.0, 20.0)
    exact, without = run(workload, fleet, hardware=hardware)
    # The failure occurs after the last arrival.
    following, attempts = run(workload, fleet, "router_link:0@1000000s+1s", hardware=hardware)
    assert placed(attempts) == placed(without)
    assert following.report == exact.report and exact.report.token_hit_rate > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_served_by_a_replica_that_can_be_reached(seed):
    rng = random.Random(seed)
    router = rng.choice([*ROUTERS])
    fleet = Fleet(
        *(rng.randrange(1, 5), rng.randrange(250, 400)),
        **{"router": router, "host_blocks": rng.choice([0, 200]), "store_blocks": 100},
        concurrency=rng.randrange(1, 9),
    )
    workload = [*chat_workload(120, seed, ChatShape(num_conversations=20))]
    span_s = (workload[-1].arrival_ms - workload[0].arrival_ms) // 1000
    failures = []
    for _ in range(rng.randrange(1, 8)):
        kind = rng.choice(FAILURE_KINDS)
        replica = rng.randrange(fleet.replicas) if kind not in ("store", "router") else None
        failures.append(Failure(kind, rng.randrange(span_s), rng.randrange(60), replica))
    hardware = Hardware(rng.choice([300.0, 5000.0]), 10.0)
    down = {number: [] for number in range(fleet.replicas)}
    for each in failures:
        if each.kind in ("replica", "router_link"):
            down[each.replica].append((1000 * each.at_s, 1000 * (each.at_s + each.lasts_s)))
    first_ms, served_at = workload[0].arrival_ms, {}

    def check(item, replica, served):
        ms = item.arrival_ms - first_ms
        assert not any(begin <= ms < end for begin, end in down[replica])
        assert served.num_hit < item.num_tokens and served.first_ms >= item.arrival_ms
        served_at.setdefault(item.index, []).append(ms)

    simulation = Simulation(
        *(fleet, hardware),
        **{"failures": sorted(failures, key=lambda each: each.at_s), "on_request": check},
    )
    report = simulation.run(workload)
    assert report.requests == len(served_at) == 120 and report.rejected_requests == 0
    assert sum(map(len, served_at.values())) == 120 + simulation.num_resent
    assert report.prompt_tokens == sum(each.num_tokens for each in workload)
    assert (simulation.outcomes.ms_to_first_token > 0).all()
    assert min(each.computed_ms for each in simulation._replicas) >= 0


@pytest.mark.slow
def test_reports_compare_phases_with_an_undisturbed_run():
    workload = [*chat_workload(600, 1, ChatShape(num_conversations=60))]
    fleet = Fleet(2, 1501, router="session")
    failures = [Failure("replica", 60.0, 20.0, 1), Failure("router", 65.0)]
    hardware = Hardware(2000.0, 20.0, price_per_hour=3.0)
    found = simulate_failures(workload, fleet, failures[::-1], hardware)
    assert found.failures == ["replica:1@60s+20s", "router@65s"]
    assert found.undisturbed == simulate_fleet(workload, fleet, hardware)
    assert found.report.price_per_hour == 6.0
    before, during, after = (found.phases[name] for name in ("before", "during", "after"))
    assert before.requests + during.requests + after.requests == 600
    assert during.token_hit_rate < during.undisturbed_hit_rate - 0.02
    assert 20 <= found.recovery_s < 200
    first_s = workload[0].arrival_ms / 1000
    arrived = [each.arrival_ms / 1000 - first_s for each in workload]
    assert after.requests == sum(each >= 60 + found.recovery_s for each in arrived)
    assert len(found.time_s) == len(found.hit_rates) == len(found.undisturbed_hit_rates) == 500
    json.dumps(found.to_dict())
    never = simulate_failures(
        workload, fleet, [Failure("replica", arrived[-1] - 1, 0, 0)], hardware
    )
    assert never.recovery_s is None and never.phases["after"].requests == 0
    assert "not recovered" in failure_table(never).caption


def test_a_fleet_has_recovered_once_its_hit_rate_is_close_for_a_whole_window():
    times = np.arange(10.0)
    close = np.ones(10, bool)
    assert _recovered_s(times, close, 2.5, 3) == 3.0
    close[[4, 6]] = False
    assert _recovered_s(times, close, 2.5, 3) == 7.0
    assert _recovered_s(times, close, 2.5, 4) is None
    assert _recovered_s(times, close, 0.0, 4) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica:3@60s+30s", Failure("replica", 60.0, 30.0, 3)),
        ("store@1.5", Failure("store", 1.5)),
        ("router_link:0@0+1", Failure("router_link", 0.0, 1.0, 0)),
    ],
)
def test_failures_round_trip_through_text(text, expected):
    assert Failure.parse(text) == expected == Failure.parse(str(expected))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replica", "'replica': expected kind"),
        ("replica:3@", "expected kind"),
        ("replica:x@3", "expected kind"),
        ("replica:3@1+1+1", "expected kind"),
        (
            "disk@3",
            "kind is 'disk': expected one of replica, store, router, store_link, router_link",
        ),
        ("replica@3", "replica is None: expected the position of a replica for replica"),
        ("store:1@3", "replica is 1: expected None for store"),
        ("store@-1", "at_s is -1.0: expected 0 to 1e"),
        ("store@nan", "at_s is nan: expected 0 to 1e"),
        ("store@1+1e99", "lasts_s is 1e"),
    ],
)
def test_invalid_failures_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        Failure.parse(text)


def test_failures_that_do_not_apply_to_the_fleet_are_rejected():
    workload = [request(0, PROMPT, 0), request(1, PROMPT, 1000)]
    for failure, options, message in (
        ("replica:2@1", {}, r"failures\[0\] is replica:2@1s: expected a replica from 0 to 1"),
        ("store@1", {}, r"failures\[0\] is store@1s: expected a fleet with store_blocks"),
        ("router@1", {"tolerance": 0.0}, "tolerance is 0.0: expected more than 0, less than 1"),
        ("router@1", {"window": 0}, "window is 0: expected 1 to"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate_failures(workload, Fleet(2, 401), [Failure.parse(failure)], **options)
    router = [Failure.parse("router@1")]
    assert simulate_failures(workload, Fleet(2, 401), router, window=torch.tensor(2)).window == 2
    with pytest.raises(ValueError, match="failures is empty: expected one failure or more"):
        simulate_failures(workload, Fleet(2, 401), [])
    failures = [Failure.parse("replica:4@1")]
    with pytest.raises(
        ValueError, match="most_replicas is 4: expected 5 or more, because replica 4"
    ):
        plan_fleet(workload, Fleet(1, 401), p99_ms=1.0, failures=failures, most_replicas=4)
    with pytest.raises(ValueError, match="expected a replica from 0 to 3"):
        plan_fleet(workload, Fleet(1, 401), p99_ms=1.0, failures=failures, replicas=[5, 4])
    with pytest.raises(ValueError, match="expected a fleet with store_blocks"):
        plan_fleet(
            *(workload, Fleet(1, 401)),
            **{"p99_ms": 1.0, "failures": [Failure.parse("store@1")], "store_blocks": [9, 0]},
        )


@pytest.mark.slow
def test_plans_simulate_the_failures_of_the_best_fleet_of_each_router(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plan.png"
    arguments = [
        "plan",
        "--requests",
        "150",
        "--router",
        "prefix,session",
        "--fail",
        "replica:1@20s+5s",
    ]
    assert main([*arguments, "--fail", "router@30s", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "2 replicas, session: replica:1@20s+5s, router@30s" in out
    assert plot.stat().st_size > 10_000
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [each["fleet"]["replicas"] for each in plan["reports"]] == [2, 2]
    assert [each["report"]["fleet"]["router"] for each in plan["failures"]] == ["prefix", "session"]
    assert main(["plan", "--fail", "replica:1@x"]) == 2
    assert "--fail: 'replica:1@x': expected kind[:replica]@seconds" in capsys.readouterr().err
