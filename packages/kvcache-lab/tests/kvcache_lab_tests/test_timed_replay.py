# SPDX-License-Identifier: Apache-2.0
"""Replays with arrival times, in which running requests hold their blocks."""

import json

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import Replayer, Series, Service, WorkloadRequest, read_trace
from kvcache_lab.content import prefix_keys
from kvcache_lab.traces.fields import TraceError

# 1 ms per prompt token and 10 ms per answer token
SERVICE = Service(prefill_speed=1_000, decode_speed=100)


def request(index, arrival_ms, first, num_tokens, answer):
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, answer, prefix_keys(tokens, 0))


def replayed(requests, num_blocks=100, concurrency=10, **options):
    replayer = Replayer(
        block_size=4, num_blocks=num_blocks, concurrency=concurrency, service=SERVICE, **options
    )
    return replayer.run(requests)


def test_prefill_is_serial_and_decode_is_concurrent():
    # The first tokens follow after 40, 80 and 100 ms, and the requests end after 240, 130 and 400
    # ms.
    requests = [request(0, 0, 0, 40, 20), request(1, 0, 100, 40, 5), request(2, 10, 200, 20, 30)]
    report = replayed(requests)
    assert (report.service, report.concurrency) == ("1000,100", 10)
    assert (report.duration_s, report.peak_running) == (0.4, 3)
    assert report.mean_ms_to_first_token == pytest.approx((40 + 80 + 90) / 3, abs=1e-3)
    assert report.p99_ms_to_first_token == 90
    assert report.hit_tokens == report.rejected_requests == 0


def test_prefills_have_a_fixed_time_and_delay_the_running_answers():
    requests = [
        request(0, 0, 0, 40, 10),  # would end at 145 ms without the other requests
        request(1, 50, 100, 40, 1),  # the first answer's current step ends at 55 ms
        request(2, 60, 200, 40, 0),  # waits for the second prefill
        request(3, 300, 300, 40, 1),  # no other request runs
    ]
    for interference, begin_ms, end_ms in ((0.0, 50, 145), (0.5, 52.5, 190), (1.0, 55, 235)):
        options = {"prefill_ms": 4.18, "attention_ns": 1000.0}  # 0.82 ms for pairs of 40 tokens
        service = Service(1_000, 100, interference=interference, **options)
        replayer = Replayer(block_size=4, num_blocks=100, concurrency=10, service=service)
        running = [replayer.arrive(each) for each in requests]
        firsts = [45, begin_ms + 45, begin_ms + 90, 345]
        assert [round(each.first_ms, 6) for each in running] == firsts
        # The second request's answer is delayed by the third one's prefill.
        ends = [end_ms, begin_ms + 55 + 45 * interference, begin_ms + 90, 355]
        assert [round(each.end_ms, 6) for each in running] == ends
        report = replayer.finish()
        assert report.duration_s == 0.355
        assert report.overload is None
    assert report.service == "1000,100 prefill_ms=4.18 attention_ns=1000 interference=1"


def test_an_answer_that_ends_when_a_prefill_begins_is_not_delayed():
    service = Service(20_000, 50, interference=1)
    for arrival_ms in range(1, 21):
        replayer = Replayer(block_size=4, num_blocks=30_000, concurrency=9, service=service)
        first = replayer.arrive(request(0, 0, 0, 4, 1))
        second = replayer.arrive(request(1, arrival_ms, 1000, 100_000, 0))
        assert first.end_ms == pytest.approx(20.2) and second.first_ms == pytest.approx(5020.2)


def test_speeds_are_parsed_as_they_are_printed():
    for text in ("20000,50", "1,2,3 prefill_ms=5", "1,2,3,4 attention_ns=0.5 interference=1"):
        assert str(Service.parse(text)) == text
    for text in ("", "1,2 x=1", "1,2 prefill_ms", "1,2 prefill_ms=1 prefill_ms=1"):
        with pytest.raises(ValueError, match="expected speeds in tokens per second"):
            Service.parse(text)
    assert Service(decode_speed=1e-306).compute_ms(1000, 0) == 50
    replayer = Replayer(
        block_size=4, num_blocks=30, concurrency=9, service=Service(1000, 1e-306, interference=1)
    )
    assert [replayer.arrive(request(i, i, 9 * i, 8, 1)).first_ms for i in range(2)] == [8, 16]


def test_computed_tokens_attend_to_hits():
    service = Service(attention_ns=1e6, prefill_speed=1_000)
    assert service.compute_ms(10, 0) == 10 + sum(range(1, 11))
    assert service.compute_ms(10, 6) == 4 + 7 + 8 + 9 + 10
    assert service.compute_ms(10, 10) == 0


def test_request_that_does_not_fit_waits_for_the_next_end():
    # The pool has 12 blocks. The second request arrives at 50 ms and waits for blocks that the
    # first request holds until 240 ms.
    requests = [request(0, 0, 0, 40, 20), request(1, 50, 100, 40, 0)]
    report = replayed(requests, num_blocks=13)
    assert (report.peak_running, report.rejected_requests) == (1, 0)
    assert report.mean_ms_to_first_token == (40 + 190 + 40) / 2
    one_at_a_time = replayed(requests, concurrency=1)
    assert one_at_a_time.mean_ms_to_first_token == report.mean_ms_to_first_token
    both = replayed(requests)
    assert both.peak_running == 2
    assert both.mean_ms_to_first_token == 40


@pytest.mark.parametrize("form", ["token_ids", "prompt"])
@pytest.mark.parametrize("timed_first", [True, False])
def test_timestamps_must_be_in_all_lines_or_none(tmp_path, form, timed_first):
    content = {"token_ids": [1, 2], "prompt": "some words"}[form]
    lines = [{form: content, "timestamp": 5}, {form: content}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines if timed_first else lines[::-1])))
    with pytest.raises(
        TraceError, match=r"line 2: timestamp .*: expected it in each line or in none"
    ):
        list(read_trace(path))


def test_command_line_runs_timed_replays(capsys):
    assert main(["replay", "--requests", "60", "--timed", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["service"], found["concurrency"]) == ("20000,50", 256)
    assert found["peak_running"] > 1
    assert main(["replay", "--requests", "60", "--timed", "5000,20", "--concurrency", "3"]) == 0
    text = capsys.readouterr().out
    assert "5000,20" in text and "at most 3 concurrent" in text and "first token" in text
    assert main(["replay", "--requests", "60", "--timed", "--compare", "lru,learned"]) == 0
    assert "optimum" not in capsys.readouterr().out
    for text, says in (
        ("5", "'5': expected speeds in tokens per second, P,D, P,D,HOST or P,D,HOST,STORE"),
        ("x,2", "'x,2': expected speeds"),
        ("1,2,3,4,5", "'1,2,3,4,5': expected speeds"),
        ("1,2,0", "host_speed is 0.0: expected more than 0"),
        ("1,2,3,nan", "store_speed is nan: expected more than 0"),
        ("0,2", "prefill_speed is 0.0: expected more than 0 tokens per second"),
        ("1,nan", "decode_speed is nan: expected more than 0"),
        ("1,inf", "decode_speed is inf: expected more than 0"),
    ):
        assert main(["replay", "--timed", text]) == 2
        assert says in capsys.readouterr().err


def test_invalid_speeds_are_reported():
    with pytest.raises(TypeError, match="prefill_speed is 'x': expected a number"):
        Service(prefill_speed="x")
    with pytest.raises(ValueError, match="decode_speed is -1"):
        Service(decode_speed=-1)
    with pytest.raises(ValueError, match="prefill_ms is -1: expected 0 or more"):
        Service(prefill_ms=-1)
    with pytest.raises(ValueError, match=r"interference is 1\.5: expected 0 to 1"):
        Service(interference=1.5)


def test_loads_from_the_host_take_time_one_after_another():
    prompts = [request(0, 0, 0, 160, 0), request(1, 10_000, 500, 160, 0)]
    prompts += [request(2, 20_000, 1_000, 336, 0)]
    again = [request(3, 30_000, 0, 170, 0), request(4, 30_000, 500, 170, 0)]
    series = Series()
    replayer = Replayer(
        **{"block_size": 16, "num_blocks": 24, "num_host_blocks": 200, "concurrency": 9},
        **{"service": Service(8_000, 50, 100), "series": series},
    )
    replayer.run([*prompts, *again])
    times = series.ms_to_first_token
    assert times[:3] == [20, 20, 42]
    assert times[3:] == [1_600 + 10 / 8, 3_200 + 10 / 8]
