# SPDX-License-Identifier: Apache-2.0
"""Tests of simulated fleets: each replica behaves as in a replay of its own requests, and plans
find the smallest sufficient fleet.
"""

import json
from dataclasses import fields

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import Replayer, WorkloadRequest, chat_workload
from kvcache_lab.content import prefix_keys
from kvcache_lab.fleet import (
    ROUTERS,
    Fleet,
    FleetReport,
    Hardware,
    HardwareError,
    plan_fleet,
    read_hardware,
    simulate_fleet,
)
from kvcache_lab.fleet.hardware import example_hardware
from kvcache_lab.fleet.planning import _smallest
from kvcache_lab.fleet.sessions import Sessions

HARDWARE = Hardware(prefill_speed=2000.0, decode_speed=20.0)


def chats(num=400, seed=0):
    return lambda: chat_workload(num, seed)


def request(index, tokens, arrival_ms=None, answer=10):
    tokens = np.array(tokens, np.int32)
    arrival = 100 * index if arrival_ms is None else arrival_ms
    return WorkloadRequest(index, arrival, tokens, answer, prefix_keys(tokens))


def replayed(requests, fleet, hardware=HARDWARE):
    replayer = Replayer(
        **{"num_blocks": fleet.num_blocks, "block_size": fleet.block_size},
        **{"concurrency": fleet.concurrency, "service": hardware.service},
    )
    return replayer.run(requests)


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
def test_one_replica_behaves_as_in_a_timed_replay(router):
    fleet = Fleet(replicas=1, num_blocks=401, router=router, concurrency=8)
    report, expected = simulate_fleet(chats(), fleet, HARDWARE), replayed(chats()(), fleet)
    assert report.device_hit_tokens == expected.hit_tokens > 0
    assert report.rejected_requests == expected.rejected_requests == 0
    assert report.p99_ms_to_first_token == pytest.approx(expected.p99_ms_to_first_token, abs=1e-3)
    assert report.mean_ms_to_first_token == pytest.approx(expected.mean_ms_to_first_token, abs=1e-3)


def sessions_of(block_size, prompts):
    sessions = Sessions(block_size)
    return [sessions.of(request(i, tokens)) for i, tokens in enumerate(prompts)]


def test_requests_continue_the_session_whose_last_prompt_they_extend():
    system = [*range(8)]
    turns = {
        "a1": [*system, *range(100, 110)],
        "b1": [*system, *range(200, 206)],
        "a2": [*system, *range(100, 130)],
        "b2": [*system, *range(200, 240)],
        "edit of a1": [*system, *range(100, 110), *range(300, 320)],
        "a3": [*system, *range(100, 150)],
        "short": [1, 2],
    }
    found = dict(zip(turns, sessions_of(4, turns.values())))
    assert found == {"a1": 0, "b1": 1, "a2": 0, "b2": 1, "edit of a1": 2, "a3": 0, "short": 3}


def test_prompts_that_grow_or_whose_end_is_replaced_stay_in_their_session():
    """Agents replace the last message with the next one."""
    chat = [*range(3000)]
    assert set(sessions_of(512, [chat[: 1100 + 8 * i] for i in range(40)])) == {0}
    history = [*range(9000)]
    prompts = [
        [*history[: 480 + 150 * i], *range(10_000 + 100 * i, 10_040 + 100 * i)] for i in range(50)
    ]
    assert set(sessions_of(16, prompts)) == {0}
    assert sessions_of(16, [history[:2000], [*history[:900], *range(50_000, 50_900)]]) == [0, 1]


def test_prefix_aware_routing_serves_a_prompt_where_it_is_cached_unless_the_wait_is_longer():
    fleet = Fleet(replicas=2, num_blocks=201, router="prefix")
    prompt = [*range(1600)]
    # The second request hits. The third request would wait 400 ms for a hit of 1,600 tokens, which
    # saves 800 ms.
    hit = [request(0, prompt, 0), request(1, [*prompt, 1], 2000)]
    report = simulate_fleet(lambda: hit, fleet, HARDWARE)
    assert report.device_hit_tokens == 1600
    # 2,000 tokens without a hit keep the first replica busy for 1 s, which is longer than a prefill
    # on the other replica.
    busy = [request(0, prompt, 0), request(1, range(5000, 7000), 1000), request(2, prompt, 1001)]
    both = Fleet(replicas=1, num_blocks=301, router="prefix")
    assert simulate_fleet(lambda: busy, both, HARDWARE).device_hit_tokens == 1584
    apart = [request(0, prompt, 0), *(request(i, [*prompt, i], 801) for i in (1, 2, 3))]
    assert simulate_fleet(lambda: apart, fleet, HARDWARE).device_hit_tokens == 3 * 1600


def test_replicas_share_a_store_and_loads_take_time():
    hardware = Hardware(2000.0, 20.0, bytes_per_token=1e6, store_gb_per_s=1.0, host_gb_per_s=10.0)
    prompt = [*range(160)]
    fleet = Fleet(replicas=2, num_blocks=41, router="round_robin", store_blocks=100)
    pair = [request(0, prompt, 0), request(1, prompt, 1000), request(2, range(900, 910), 2000)]
    report = simulate_fleet(lambda: pair, fleet, hardware)
    assert (report.device_hit_tokens, report.store_hit_tokens) == (0, 144)
    assert report.loaded_bytes == 144_000_000
    # Computing 160 tokens takes 80 ms, and computing 10 tokens takes 5 ms. The second request loads
    # for 144 ms and computes 16 tokens.
    assert report.mean_ms_to_first_token == pytest.approx((80 + (144 + 8) + 5) / 3)


def test_prefills_delay_the_answers_of_their_replica():
    """With one running request per replica, a request waits for the delayed end of another request."""
    first, second = request(0, range(40), 0, 10), request(1, range(100, 140), 50, 10)
    third = request(2, range(200, 240), 60, 0)
    fleet = Fleet(1, 201, concurrency=2)
    for interference, start_ms in ((0.0, 150), (1.0, 200)):
        hardware = Hardware(1000.0, 100.0, prefill_ms=10.0, interference=interference)
        times = {}
        report = simulate_fleet(
            *([first, second, third], fleet, hardware),
            on_request=lambda item, replica, served, t=times: t.__setitem__(item.index, served),
        )
        # The first request's answer runs from 50 ms to 150 ms, and the second request's prefill
        # takes 50 ms.
        assert [each.first_ms for each in times.values()] == [50, 100, start_ms + 50]
        # The third request's prefill delays the second request's answer if this answer is still
        # running.
        last_ms = {0.0: 200, 1.0: 250}[interference]
        assert report.answer_tokens_per_s == pytest.approx(20_000 / last_ms)
        assert report.busy_share == pytest.approx(3 * 50 / 60)


def test_loads_of_a_replica_share_the_bandwidth():
    hardware = Hardware(1e6, 20.0, bytes_per_token=1e6, store_gb_per_s=1.0, interference=0.0)
    prompts = [[*range(1000 * i, 1000 * i + 161)] for i in range(4)]
    fleet = Fleet(replicas=2, num_blocks=401, router="round_robin", store_blocks=500)
    first = [request(2 * i, prompt, 10 * i) for i, prompt in enumerate(prompts)]
    filler = [request(2 * i + 1, [7], 10 * i) for i in range(4)]
    requests = [each for pair in zip(first, filler) for each in pair]
    # The other replica then loads all four prompts at once, which takes 160 ms per prompt.
    requests.append(request(8, [7], 5000))
    for i, prompt in enumerate(prompts):
        requests += [request(9 + 2 * i, prompt, 5000), request(10 + 2 * i, [7], 5000)]
    found = {}
    simulate_fleet(
        *(requests, fleet, hardware),
        on_request=lambda item, replica, served: found.setdefault(item.index, served),
    )
    loaded = [found[9 + 2 * i] for i in range(4)]
    assert [each.num_store_hit for each in loaded] == [160] * 4
    assert [round(each.first_ms) for each in loaded] == [5160, 5320, 5480, 5640]


def test_routers_consider_the_wait_for_running_requests_and_spread_idle_time():
    hardware = Hardware(1e5, 1.0)
    fleet = Fleet(replicas=2, num_blocks=401, router="prefix", concurrency=1)
    prompt = [*range(1600)]
    pair = [request(0, prompt, 0, 100), request(1, [*prompt, 1], 1000)]
    assert simulate_fleet(pair, fleet, hardware).mean_ms_to_first_token < 20
    for router in ROUTERS:
        fleet, counts = Fleet(replicas=4, num_blocks=401, router=router), [0] * 4
        apart = [request(i, range(1000 * i, 1000 * i + 40), 10_000 * i, 1) for i in range(40)]
        simulate_fleet(
            *(apart, fleet, HARDWARE),
            on_request=lambda item, replica, served, c=counts: c.__setitem__(
                replica, c[replica] + 1
            ),
        )
        assert counts == [10] * 4, router


@pytest.mark.parametrize("first", [1, 3])
def test_the_search_ends_at_any_number_of_replicas(first):
    for needed in range(1, 71):
        simulated = []

        def simulate(count, needed=needed, simulated=simulated):
            simulated.append(count)
            return FleetReport(
                {}, p99_ms_to_first_token=1.0 if count >= needed else 6 + 100 / count
            )

        found = _smallest(simulate, 5.0, first, 64)
        fast = [count for count in simulated if count >= needed]
        assert (min(fast) == needed == found) if needed <= 64 else not fast and found is None
        assert len(simulated) == len({*simulated}) <= 14


def test_the_search_goes_on_while_a_replica_is_overloaded():
    """A router may send all long prompts to one of 1, 2, 4 or 8 replicas."""

    def simulate(count):
        is_fast = count > 8
        return FleetReport(
            {}, p99_ms_to_first_token=1.0 if is_fast else 9.0, busiest_share=0.5 if is_fast else 2.5
        )

    assert _smallest(simulate, 5.0, 1, 1024) == 9


@pytest.mark.slow
def test_plans_without_a_sufficient_fleet_report_the_reason():
    plan = plan_fleet(chats(), Fleet(replicas=1, num_blocks=11), p99_ms=100.0)
    assert plan.recommended is None
    assert "of 400 requests do not fit into a replica with 10 blocks of 16 tokens" in plan.reason
    assert len(plan.reports) == 1  # more replicas would not help
    plan = plan_fleet(
        *(chats(), Fleet(replicas=1, num_blocks=501)),
        **{"p99_ms": 1.0, "hardware": HARDWARE, "most_replicas": 3},
    )
    assert plan.recommended is None and "the fastest fleet, 3 replicas" in plan.reason


@pytest.mark.parametrize(("options", "message"), [
    ({"replicas": 0}, "replicas is 0: expected 1 to 2147483647"),
    ({"router": "random"}, "router is 'random': expected one of round_robin, "),
    ({"num_blocks": 1}, "num_blocks is 1: expected 2 to 2147483647"),
    ({"host_blocks": -1}, "host_blocks is -1: expected 0 to 2147483647"),
])  # fmt: skip
def test_invalid_fleets_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Fleet(**{"replicas": 1, "num_blocks": 100} | options)


def test_traces_without_times_or_order_are_rejected():
    same = [request(i, range(20), 0) for i in range(3)]
    with pytest.raises(ValueError, match="all requests arrive at the same time"):
        simulate_fleet(lambda: same, Fleet(1, 100))
    backwards = [request(0, range(20), 50), request(1, range(20), 40)]
    with pytest.raises(ValueError, match="request 1 arrives at 40 ms, but the previous"):
        simulate_fleet(lambda: backwards, Fleet(1, 100))
    with pytest.raises(
        TypeError, match="workload is 5: expected a list of requests, or a function"
    ):
        simulate_fleet(5, Fleet(1, 100))
    with pytest.raises(ValueError, match="workload is empty: expected one request or more"):
        plan_fleet([], Fleet(1, 100), p99_ms=1.0)
    with pytest.raises(ValueError, match="routers is empty: expected one value or more"):
        plan_fleet(same, Fleet(1, 100), p99_ms=1.0, routers=[])


@pytest.mark.parametrize(("text", "message"), [
    ('{"prefill_speed": 1, "speed": 2}', "'speed' is unknown: expected one of prefill_speed"),
    ('{"host_gb_per_s": 0}', "host_gb_per_s is 0.0: expected more than 0"),
    ('{"prefill_ms": -1.0}', "prefill_ms is -1.0: expected 0 to 1e"),
    ('{"prefill_ms": "much"}', "prefill_ms is 'much': expected a number"),
    ('{"prefill_ms": Infinity}', "prefill_ms is inf: expected 0 to 1e"),
    ("prefill_ms", "expected a JSON object"),
    ("[1]", "expected a JSON object"),
])  # fmt: skip
def test_hardware_files_are_checked(text, message, tmp_path):
    path = tmp_path / "hardware.json"
    path.write_text(text)
    with pytest.raises(HardwareError, match=message):
        read_hardware(path)


@pytest.mark.slow
def test_the_command_writes_an_example_that_it_reads(tmp_path, capsys):
    path, plot = tmp_path / "hardware.json", tmp_path / "plan.png"
    pytest.importorskip("matplotlib")
    assert main(["plan", "--write-hardware", str(path)]) == 0
    assert read_hardware(path) == Hardware()
    options = ["--requests", "100", "--num-blocks", "801", "--router", "prefix"]
    arguments = ["plan", *options, "--hardware", str(path), "--host-blocks", "0,100"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    assert "Choose 1 replica with the router prefix." in capsys.readouterr().out
    assert plot.stat().st_size > 10_000
    assert main([*arguments, "--json", "--replicas", "1,2"]) == 0
    assert len(json.loads(capsys.readouterr().out)["reports"]) == 4


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--router", "random"], 2, "--router has 'random': expected names of round_robin"),
    (["--p99", "0"], 2, "--p99 is '0': expected more than 0 milliseconds"),
    (["--hardware", "none.json"], 2, "--hardware is 'none.json': expected a readable file"),
    (["--num-blocks", "5"], 1, "no fleet is recommended: 100 of 100 requests do not fit"),
    (["--eviction", "random"], 2, "eviction"),
    (["none.jsonl"], 2, "TRACE is 'none.jsonl': expected an existing file"),
])  # fmt: skip
def test_the_command_reports_invalid_input_in_one_line(arguments, code, message, capsys):
    if "none.jsonl" not in arguments:
        arguments = [*arguments, "--requests", "100"]
    assert main(["plan", *arguments]) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0]


@pytest.mark.parametrize("name", [each.name for each in fields(Hardware)])
@pytest.mark.parametrize(
    "value", [None, "x", [], {}, True, 10**400, float("nan"), float("inf"), -1]
)
def test_a_hardware_file_with_a_wrong_field_ends_in_one_line(tmp_path, capsys, name, value):
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps({**json.loads(example_hardware()), name: value}))
    assert main(["plan", "--requests", "5", "--hardware", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and name in error
