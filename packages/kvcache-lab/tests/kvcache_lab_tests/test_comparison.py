# SPDX-License-Identifier: Apache-2.0
"""Comparisons of eviction policies with each other and with the offline optimum."""

import itertools
import json

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import Comparison, Replayer, WorkloadRequest, chat_workload, compare, optimum


def prompts(*tokens):
    """Return requests with these prompts, in blocks of one token."""
    none = np.empty(0, np.int64)
    return [
        WorkloadRequest(i, 0, np.array(each, np.int32), 0, none) for i, each in enumerate(tokens)
    ]


def best_of_all(chains, capacity, holds_running=False):
    """Return the maximum number of hits over all choices of which blocks to keep after each request."""
    best = {frozenset(): 0}
    for chain in chains:
        keys = [tuple(chain[: k + 1]) for k in range(len(chain))]
        if holds_running and len(keys) > capacity:
            continue
        after = {}
        for cached, hits in best.items():
            hits += next((i for i, key in enumerate(keys) if key not in cached), len(keys))
            there = cached | set(keys)
            for kept in itertools.combinations(sorted(there), min(capacity, len(there))):
                if not holds_running or set(keys) <= set(kept):
                    after[frozenset(kept)] = max(after.get(frozenset(kept), 0), hits)
        best = after
    return max(best.values())


@pytest.mark.parametrize("holds_running", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_optimum_is_the_best_eviction_sequence(seed, holds_running):
    rng = np.random.default_rng(seed)
    chains = [[0, *rng.integers(1, 3, rng.integers(0, 3))] for _ in range(8)]
    for capacity in (1, 2, 3, 4)[holds_running:]:
        served = [each for each in chains if not holds_running or len(each) <= capacity]
        found = optimum(prompts(*chains), 1, capacity, holds_running=holds_running)
        hits = found * sum(map(len, served))
        assert round(hits, 6) == best_of_all(chains, capacity, holds_running)


def test_hit_rates_equal_single_replays():
    requests = list(chat_workload(200))
    seen = []
    found = compare(
        requests,
        ["lru", "priority:default_priority=50"],
        [100, 400],
        trace="chats",
        block_size=16,
        on_request=lambda: seen.append(1),
    )
    assert (found.trace, found.requests, found.block_size) == ("chats", 200, 16)
    assert found.sizes == (100, 400) and len(seen) == 800
    for size, rate, best in zip(
        found.sizes, found.token_hit_rates["lru"], found.optimum, strict=True
    ):
        alone = Replayer(block_size=16, num_blocks=size + 1).run(requests)
        assert rate == alone.token_hit_rate <= best
    assert compare(requests, ["lru"], [50], block_size=16, with_optimum=False).optimum is None
    with pytest.raises(ValueError, match="'x': expected one of"):
        compare(requests, ["x"], [50], block_size=16)
    with pytest.raises(ValueError, match="output_length is -1: expected"):
        WorkloadRequest(0, 0, np.zeros(4, np.int32), -1, np.zeros(0, np.int64))


@pytest.mark.parametrize(("rates", "says"), [
    ({"lru": [0.2, 0.5], "a": [0.2, 0.504]}, "lru: no other policy has 1% more hits at any"),
    (
        {"lru": [0.2, 0.5], "a": [0.3, 0.4]},
        "a: most hits at 1 of 2 sizes, at the others at most 20.0 %",
    ),
    ({"lru": [0.0, 0.0], "a": [0.0, 0.1]}, "a: most hits at 2 of 2 sizes"),
    ({"a": [0.1], "b": [0.2]}, "b: most hits at 1 of 1 sizes"),
    ({"lru": [0.0], "a": [0.0]}, "none: no policy has a hit"),
])  # fmt: skip
def test_summary_recommends_a_policy(rates, says):
    sizes = tuple(range(1, 1 + len(next(iter(rates.values())))))
    assert Comparison("", 1, 16, sizes, rates).choice.startswith(says)


@pytest.mark.slow
def test_command_compares_policies(capsys, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    plot = str(tmp_path / "policies.png")
    argv = ["replay", "--requests", "100", "--compare", "--sizes", "101,33"]
    assert main([*argv, "--plot", plot]) == 0
    out = capsys.readouterr().out
    for text in ("chat (seed 0)", "32", "100", "lru", "learned", "optimum", "Choose "):
        assert text in out
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == [32, 100] and len(found["optimum"]) == 2
    assert list(found["token_hit_rates"]) == ["lru", "learned"]
    hybrid = ["--groups", "full_attention,sliding_window:window=64", "--host-blocks", "50"]
    assert main([*argv, "--json", *hybrid]) == 0
    assert json.loads(capsys.readouterr().out)["optimum"] is None
