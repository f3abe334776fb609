# SPDX-License-Identifier: Apache-2.0
"""Hit rate curves computed from a sample of the blocks, compared with complete replays."""

import gzip
import json

import numpy as np
import pytest

from kvcache.cli import main
from kvcache.native.load import core
from kvcache_lab import (
    HitRateCurve,
    WorkloadRequest,
    chat_workload,
    compare,
    curve_table,
    hit_rate_curve,
    read_block_ids,
    read_trace,
    sampling,
)
from kvcache_lab.content import prefix_keys
from kvcache_lab.traces.block_ids import BlockIdRequest

BLOCK = 4


def request(index, tokens, arrival_ms=0):
    tokens = np.array(tokens, np.int32)
    return WorkloadRequest(index, arrival_ms, tokens, 3 * index % 400, prefix_keys(tokens))


def random_workload(seed, num=120):
    """Generate prompts that continue, repeat, fork or truncate earlier ones at any token, some of
    them at most one block long.
    """
    rng = np.random.default_rng(seed)
    prompts, requests = [[7] * 9], []
    for i in range(num):
        kind = rng.integers(5)
        before = prompts[rng.integers(len(prompts))]
        if kind == 0:
            tokens = rng.integers(0, 50, rng.integers(1, 3 * BLOCK)).tolist()
        elif kind == 1:
            tokens = list(before)  # repeats a prompt, whose last token is computed again
        else:
            kept = len(before) if kind == 2 else rng.integers(1, len(before) + 1)
            tokens = before[:kept] + rng.integers(0, 50, rng.integers(0, 20)).tolist()
        if rng.integers(3) == 0:
            tokens = (tokens + [1] * BLOCK)[
                : max(len(tokens) // BLOCK, 1) * BLOCK
            ]  # make the prompt consist of full blocks
        tokens = tokens[:80]
        prompts.append(tokens)
        requests.append(request(i, tokens, arrival_ms=int(1000 * i + rng.integers(900))))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_lru_curve_of_all_blocks_equals_replays_at_every_size(seed):
    requests = random_workload(seed)
    most = max(-(-r.num_tokens // BLOCK) for r in requests)
    sizes = [*range(1, 2 * most), 100, 1000]
    curve = hit_rate_curve(requests, ["lru"], sizes, block_size=BLOCK, rate=1)
    exact = compare(requests, ["lru"], sizes, block_size=BLOCK, with_optimum=False)
    assert curve.token_hit_rates == exact.token_hit_rates
    assert len({*curve.token_hit_rates["lru"]}) > 10


@pytest.mark.parametrize("policy", ["last_access", "priority"])
def test_curve_of_all_blocks_equals_replays_for_policies_without_hashes(policy):
    requests = random_workload(9)
    sizes = [5, 9, 20, 40, 70, 150]
    curve = hit_rate_curve(requests, [policy], sizes, block_size=BLOCK)
    exact = compare(requests, [policy], sizes, block_size=BLOCK, with_optimum=False)
    assert curve.token_hit_rates == exact.token_hit_rates


def test_learned_curve_of_all_blocks_is_close_to_replays():
    requests = list(chat_workload(400, 3))
    sizes = [400, 800, 1600]
    curve = hit_rate_curve(requests, ["learned"], sizes, block_size=16)
    exact = compare(requests, ["learned"], sizes, block_size=16, with_optimum=False)
    assert max(map(abs, curve.with_exact(exact).errors["learned"])) < 1


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "most"), [("lru", 1.5), ("learned", 2)])
def test_sampled_curve_is_close_to_replays(policy, most):
    requests = list(chat_workload(700, 1))
    sizes = [800, 1200, 1600]
    curve = hit_rate_curve(requests, [policy], sizes, block_size=16, rate=0.25)
    exact = compare(requests, [policy], sizes, block_size=16, with_optimum=False)
    assert curve.rate == 0.25
    assert max(map(abs, curve.with_exact(exact).errors[policy])) < most


def test_rate_halves_until_the_sample_is_small_enough(monkeypatch):
    requests = list(chat_workload(300))
    whole = sampling.sampled(requests, 16, None)
    assert whole.rate == 1
    monkeypatch.setattr(sampling, "MOST_USES", len(whole.keys) // 3)
    monkeypatch.setattr(sampling, "_BATCH_BLOCKS", 100)
    few = sampling.sampled(requests, 16, None)
    assert few.rate in (1 / 4, 1 / 8) and len(few.keys) <= len(whole.keys) // 3
    assert few.num_requests == whole.num_requests and few.num_blocks == whole.num_blocks
    # The sample is the same as if sampling had started at this rate.
    other = sampling.sampled(requests, 16, few.rate)
    for name in ("keys", "columns", "starts", "num_tokens", "start_ms", "end_ms"):
        assert np.array_equal(getattr(few, name), getattr(other, name)), name
    assert abs(few.num_distinct / whole.num_distinct - 1) < 0.15
    monkeypatch.setattr(sampling, "MOST_USES", len(whole.keys))
    monkeypatch.setattr(sampling, "MOST_REQUESTS", 100)
    assert len(sampling.sampled(requests, 16, None).num_tokens) <= 100


def test_either_all_uses_of_a_block_are_sampled_or_none():
    requests = list(chat_workload(200))
    whole, half = (sampling.sampled(requests, 16, rate) for rate in (1, 0.5))
    every, some = (dict(zip(*np.unique(s.keys, return_counts=True))) for s in (whole, half))
    assert some.items() <= every.items() and 0.4 < len(some) / len(every) < 0.6


def test_tokens_without_content_are_hashed():
    requests = random_workload(2)
    bare = [
        WorkloadRequest(r.index, r.arrival_ms, r.token_ids, r.output_length, np.zeros(0, np.int64))
        for r in requests
    ]
    sizes = [20, 50]
    curves = [hit_rate_curve(each, ["lru"], sizes, block_size=BLOCK) for each in (requests, bare)]
    assert curves[0] == curves[1]


def test_empty_workload_has_no_hits():
    curve = hit_rate_curve([], block_size=16)
    assert curve.sizes == (1,) and curve.token_hit_rates == {"lru": [0.0], "learned": [0.0]}


def test_default_sizes_reach_the_number_of_different_blocks():
    curve = hit_rate_curve(chat_workload(500), ["lru"], block_size=16)
    assert curve.sizes == tuple(sorted({*curve.sizes}))
    assert 512 <= curve.sizes[0] < 1024
    assert curve.distinct_blocks <= curve.sizes[-1] < 1.1 * curve.distinct_blocks
    rates = curve.token_hit_rates["lru"]
    assert rates == sorted(rates)


# --- block ids ------------------------------------------------------------------------------------

IDS = [[0, 1, 2], [0, 1, 3, 4], [5], [0, 1, 2, 6], [0, 7]]


def line(i, ids, size=512, rest=100):
    length = size * (len(ids) - 1) + rest
    return {"timestamp": 1000 * i, "input_length": length, "output_length": 9, "hash_ids": ids}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line(i, ids)) + "\n" for i, ids in enumerate(IDS)))
    return path


@pytest.mark.parametrize("block_size", [512, 1024, 256, 1, 100])
def test_block_ids_give_the_keys_of_the_tokens(trace, block_size):
    found, wanted = {}, {}
    for ids, tokens in zip(read_block_ids(trace), read_trace(trace), strict=True):
        assert isinstance(ids, BlockIdRequest)
        assert (ids.arrival_ms, ids.num_tokens) == (tokens.arrival_ms, tokens.num_tokens)
        keys, content = ids.block_keys(block_size), tokens.content[block_size - 1 :: block_size]
        assert len(keys) == len(content)
        for key, other in zip(keys.tolist(), content.tolist()):
            assert found.setdefault(key, other) == other and wanted.setdefault(other, key) == key


def test_bailian_blocks_without_an_id_are_unique(tmp_path):
    path = tmp_path / "trace"
    record = {"chat_id": 7, "timestamp": 1.5, "input_length": 40, "output_length": 3}
    path.write_text((json.dumps({**record, "hash_ids": [3, 4]}) + "\n") * 2)
    first, second = read_block_ids(path)
    assert first.block_keys(16).tolist() == [3, 4] and len(first.ids) == 3
    assert first.ids[2] != second.ids[2]


def test_formats_without_block_ids_are_read_with_tokens(tmp_path):
    path = tmp_path / "trace"
    path.write_text('{"token_ids": [1, 2, 3]}\n')
    assert isinstance(next(read_block_ids(path)), WorkloadRequest)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": [], "c": [0, 12,3 ,\t4], "d": -7, "e": "x y", "f": 61.125, "g": -0.5}',
        '{"a":576460752303423488,"a":2}\r\n',
        '{ "\u00e9" : "\u65e5\u672c" } ',
    ],
)
def test_records_are_parsed_like_json(text):
    found = core.parse_record(text.encode(), 99)
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}
    assert plain == json.loads(text)
    assert [*map(type, plain.values())] == [*map(type, json.loads(text).values())]


VALUES = [
    "1,",
    ",1",
    "01",
    "-",
    "1.",
    ".5",
    "1e3",
    "true",
    "null",
    "{}",
    "NaN",
    "9" * 40,
    '"a\\n"',
    '"',
]
VALUES += [
    "[1,]",
    "[,1]",
    "[1 2]",
    "[01]",
    "[-1]",
    "[1.0]",
    "[true]",
    "[[1]]",
    '["1"]',
    "[100]",
    "[1",
]


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", "1", "{} {}", '{"a" 1}', '{"a": 1} x', "{a: 1}"]
)
def test_other_lines_are_left_to_the_json_parser(text):
    assert core.parse_record(text.encode(), 99) is None


@pytest.mark.parametrize("value", VALUES)
def test_other_values_are_left_to_the_json_parser(value):
    assert core.parse_record(f'{{"a": {value}}}'.encode(), 99) is None
    assert core.parse_record(f'{{"b": 1, "a": {value}}}\n'.encode(), 99) is None
    assert core.parse_record(b'{"a": "\xff"}', 99) is None
    assert core.parse_record(b'{"a": "\x01"}', 99) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hash_ids": [0, True]}, r"hash_ids\[1\] is true: expected a whole number"),
        ({"hash_ids": [0, 1.5]}, r"hash_ids\[1\] is 1.5: expected a whole number"),
        ({"hash_ids": [0, -1]}, r"hash_ids\[1\] is -1: expected a whole number"),
        ({"hash_ids": [10**11, 1]}, r"hash_ids\[0\] is 100000000000: expected a whole number"),
        ({"hash_ids": "x"}, 'hash_ids is "x": expected a list'),
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids has 4 entries: expected 2"),
        ({"input_length": [5, 6]}, r"input_length is \[5, 6\]: expected a whole number"),
        ({"timestamp": -1}, "timestamp is -1: expected a whole number"),
    ],
)
def test_malformed_lines_are_reported(tmp_path, change, says):
    path = tmp_path / "trace"
    lines = [json.dumps(line(0, [0, 1])), json.dumps({**line(1, [0, 2]), **change})]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"line 2: {says}"):
        hit_rate_curve(read_block_ids(path, "mooncake"), block_size=512)


def test_lists_inside_other_fields_are_ignored(tmp_path):
    path = tmp_path / "trace"
    record = line(0, [0, 1])
    ids = record.pop("hash_ids")
    path.write_text(json.dumps({**record, "meta": {"hash_ids": ids}}))
    with pytest.raises(ValueError, match="hash_ids is missing"):
        next(read_block_ids(path, "mooncake"))
    path.write_text(json.dumps({"meta": {"hash_ids": [9]}, **record, "hash_ids": ids}))
    assert next(read_block_ids(path)).ids.tolist() == ids


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policies": []}, "policies is empty: expected one or more"),
        ({"policies": ["x"]}, r"policies\[0\] is 'x': expected one of"),
        ({"sizes": []}, "sizes is empty: expected one or more"),
        ({"sizes": [0]}, r"sizes\[0\] is 0: expected 1 to"),
        ({"block_size": 0}, "block_size is 0: expected 1 to"),
        ({"rate": 0}, "rate is 0"),
        ({"rate": 1.5}, "rate is 1.5: expected a number above 0, at most 1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": "x"}, "rate is 'x'"),
        (
            {"rate": 1e-30, "workload": random_workload(1, 3)},
            "rate is 1e-30: expected a higher rate, because none of the .* blocks is sampled",
        ),
        ({"trace": 1}, "trace is 1"),
        ({"on_request": 1}, "on_request is 1: expected a function or None"),
        ({"workload": [1]}, r"workload\[0\] is 1: expected WorkloadRequest"),
        ({"workload": 1}, "workload is 1: expected requests"),
    ],
)
def test_wrong_arguments_are_rejected_by_name(change, says):
    arguments = {"workload": [], "block_size": 4, **change}
    with pytest.raises((TypeError, ValueError), match=says):
        hit_rate_curve(**arguments)


def test_only_comparisons_of_the_same_replays_are_combined():
    requests = random_workload(1, 20)
    curve = hit_rate_curve(requests, ["lru"], [10, 20], block_size=BLOCK)
    for sizes, size, of, says in (
        ([10], BLOCK, requests, "comparison has sizes"),
        ([10, 20], 2, requests, "comparison has block_size 2: expected 4"),
        ([10, 20], BLOCK, requests[1:], "comparison has requests 19: expected 20"),
    ):
        with pytest.raises(ValueError, match=says):
            curve.with_exact(compare(of, ["lru"], sizes, block_size=size, with_optimum=False))
    other = compare(requests, ["learned"], [10, 20], block_size=BLOCK, with_optimum=False)
    with pytest.raises(ValueError, match="exact has the policies learned: expected the policies"):
        curve.with_exact(other)


def test_replays_on_a_pool_check_their_arguments():
    pool, hashes = core.BlockPool(5), np.zeros((1, 32), np.uint8)
    row, ends = np.array([[1, 0, 1, 1, 1, 0, 0, 0, 4]], np.int64), np.array([4], np.int64)
    assert core.replay_requests(pool, row, hashes, ends, 4) == (0, 1)
    assert core.replay_requests(pool, row, hashes, ends, 4) == (1, 1)
    for column, value in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 2), (4, -1), (1, -1), (8, 0)):
        wrong = row.copy()
        wrong[0, column] = value
        with pytest.raises(ValueError, match=r"requests\[0\] has inconsistent block counts"):
            core.replay_requests(pool, wrong, hashes, ends, 4)
    with pytest.raises(ValueError, match="ends has a number below 1"):
        core.replay_requests(pool, row, hashes, ends - 4, 4)
    with pytest.raises(ValueError, match="ends has 1 entries, but hashes has 0"):
        core.replay_requests(pool, row, hashes[:0], ends, 4)
    with pytest.raises(
        TypeError, match=r"requests: expected a C-contiguous int64 array of shape \[n, 9\]"
    ):
        core.replay_requests(pool, row[:, :8], hashes, ends, 4)
    held = pool.allocate(1)
    with pytest.raises(ValueError, match="the pool has held blocks: expected none"):
        core.replay_requests(pool, row, hashes, ends, 4)
    pool.release(held)
    pool.check_invariants()


# --- command --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_prints_the_curve_and_its_error(capsys, trace, tmp_path):
    plot = tmp_path / "curve.png"
    argv = ["replay", str(trace), "--curve", "--exact", "--sizes", "4,7,11"]
    assert main([*argv, "--json", "--plot", str(plot)]) == 0
    record = json.loads(capsys.readouterr().out)
    errors = record.pop("errors")
    curve = HitRateCurve(**record)
    assert curve.sizes == [3, 6, 10] and curve.rate == 1 and curve.requests == 5
    assert [*curve.token_hit_rates] == ["lru", "learned"] and errors["lru"] == [0, 0, 0]
    assert curve.to_dict() == {**record, "errors": errors}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(argv) == 0
    out = capsys.readouterr().out
    for text in (
        "lru",
        "learned",
        "exact",
        "100.0000%",
        "error of lru: at most 0.00 percentage points",
    ):
        assert text in " ".join(out.split())


def test_command_reads_compressed_traces_and_chats(capsys, trace, tmp_path):
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(trace.read_bytes()))
    assert main(["replay", str(path), "--curve", "lru", "--limit", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3
    assert main(["replay", "--curve", "learned:tenant_share=0.2", "--rate", "0.5", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rate"] == 0.5 and [*record["token_hit_rates"]] == ["learned:tenant_share=0.2"]
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["replay", str(path), "--curve"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cut off or damaged" in error


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rate", "0.5"], "--rate is given without --curve"),
        (["--exact"], "--exact is given without --curve"),
        (["--curve", "--rate", "0"], "--rate is '0': expected a number above 0, at most 1"),
        (["--curve", "--rate", "x"], "--rate is 'x': expected a number above 0"),
        (
            ["--curve", "--rate", "1e-99"],
            "--rate: rate is 1e-99: expected a higher rate, because none of",
        ),
        (["--curve", "x"], "--curve has 'x': expected one of last_access"),
        (["--curve", "--sizes", "1"], "--sizes is '1': expected a whole number from 2"),
        *(
            (["--curve", *other], f"{other[0]} is given with --curve: expected only one of the two")
            for other in (
                ["--num-blocks", "9"],
                ["--eviction", "lru"],
                ["--compare"],
                ["--timed"],
                ["--groups", "full_attention"],
                ["--concurrency", "2"],
                ["--hash-block-size", "4"],
                ["--chunk-tokens", "9"],
                ["--host-blocks", "9"],
                ["--store-blocks", "9"],
                ["--verify"],
                ["--why"],
            )
        ),
    ],
)
def test_conflicting_options_print_one_line(capsys, argv, says):
    assert main(["replay", *argv]) == 2
    out, error = capsys.readouterr()
    assert out == "" and says in error and error.count("\n") == 1


def test_table_has_one_row_per_size():
    curve = hit_rate_curve(random_workload(1), ["lru"], [20, 10], block_size=BLOCK)
    assert curve_table(curve).row_count == 2
    assert curve_table(hit_rate_curve([], block_size=4)).row_count == 1
