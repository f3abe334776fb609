# SPDX-License-Identifier: Apache-2.0
"""Replays with eviction policies and a host tier: exact hits, verified swaps, and errors that must
be detected.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import GroupSpec, eviction_names, host_eviction_names
from kvcache.allocator import check_invariants
from kvcache_exchange.cli.option_text import join_options
from kvcache_exchange.cli.policy_text import parse_eviction, parse_host_eviction, parse_host_write
from kvcache_lab import Replayer, chat_workload, read_mooncake
from kvcache_lab.verifier import KVVerifier
from kvcache_lab_tests.test_hybrid_replay import group_lists
from kvcache_lab_tests.test_replay import TRACE, as_workload, plant_in_step, workloads
from tests.machinery.shared import shared_file, spread

POLICIES = [*eviction_names(), "priority:default_priority=0"]
WRITES = ["back", "through", "back:0", "through:0.05", "back:0.05", "back:0.3"]


def tiered(
    specs, num_blocks, num_host_blocks, *, eviction="lru", host_eviction="lru", host_write="back",
    verify=True, concurrency=1, **options,
) -> Replayer:  # fmt: skip
    """Make a replayer.

    `specs` contains groups, or is the block size of a single full-attention group. Policies are
    given in command-line syntax.
    """
    if ":" in host_write:
        host_eviction = "learned"
    if host_eviction == "learned":
        eviction = "learned"
    name, own = parse_eviction(eviction)
    host_name, host_own = parse_host_eviction(host_eviction)
    groups = [GroupSpec("full_attention", specs)] if isinstance(specs, int) else specs
    verifier = KVVerifier(
        groups=groups, num_blocks=num_blocks, num_host_blocks=num_host_blocks,
        max_num_reqs=concurrency, num_layers=2, num_kv_heads=1,
    ) if verify else None  # fmt: skip
    return Replayer(
        groups=groups, num_blocks=num_blocks, concurrency=concurrency, verifier=verifier,
        eviction=name, eviction_options=own, num_host_blocks=num_host_blocks,
        host_eviction=host_name, host_eviction_options=host_own, **parse_host_write(host_write),
        **options,
    )  # fmt: skip


def assert_right(replayer, report) -> None:
    manager = replayer.manager
    assert report.mismatches == 0, report.mismatched_requests
    assert report.verified_tokens == report.prompt_tokens
    assert report.host_hit_tokens <= report.hit_tokens
    # All requests have been freed on both tiers.
    assert manager.pool.num_free == manager.pool.num_total
    assert manager.host_pool.num_free == manager.host_pool.num_total
    assert manager.pool.num_loading == 0
    check_invariants(manager)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [10_000, 1_000])
def test_unbounded_host_reaches_maximum_hits_of_published_trace(capacity):
    requests = read_mooncake(shared_file(TRACE))
    report = tiered(512, capacity + 1, 300_000, verify=False).run(requests)
    assert (report.hit_blocks, report.rejected_requests) == (105_592, 0)
    assert report.hit_tokens == 105_592 * 512 and round(report.token_hit_rate, 4) == 0.3734
    assert report.loaded_blocks <= report.host_hit_tokens // 512 < 105_592
    assert (report.host_evicted_blocks, report.unwritten_blocks) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "host_write", "eviction"),
    spread(itertools.product([250, 500], ["back", "through"], POLICIES), 4),
)
def test_unbounded_host_equals_unbounded_device(num_blocks, host_write, eviction):
    unbounded = Replayer(block_size=16, num_blocks=20_001).run(chat_workload(200, 3))
    assert unbounded.evicted_blocks == 0
    replayer = tiered(
        16, num_blocks, 20_001, eviction=eviction, host_write=host_write, verify=False
    )
    report = replayer.run(chat_workload(200, 3))
    assert (report.hit_tokens, report.rejected_requests) == (unbounded.hit_tokens, 0)
    assert report.evicted_blocks > 1_000 and report.loaded_blocks > 500
    alone = Replayer(block_size=16, num_blocks=num_blocks).run(chat_workload(200, 3))
    assert alone.hit_tokens < unbounded.hit_tokens


def test_small_host_increases_hits_and_evicts():
    none, some, more = (
        tiered(16, 150, size, verify=False).run(chat_workload(200, 3)) for size in (0, 300, 1_000)
    )
    assert none.hit_tokens < some.hit_tokens < more.hit_tokens
    assert some.host_evicted_blocks > more.host_evicted_blocks > 0
    assert some.loaded_blocks <= some.host_hit_tokens // 16 <= some.hit_blocks


def test_higher_gain_writes_fewer_blocks():
    every, some, few = (
        tiered(16, 300, 1_000, host_eviction="learned", host_write=mode, verify=False)
        .run(chat_workload(200, 3))
        .written_blocks
        for mode in ("back", "back:0.05", "back:0.5")
    )
    assert every > some > few


def test_report_contains_the_options():
    replayer = tiered(
        16, 150, 200, eviction="priority:default_priority=25", host_write="through", verify=False
    )
    report = replayer.run(chat_workload(20)).to_dict()
    assert report["eviction"] == "priority:default_priority=25"
    assert (report["host_blocks"], report["host_eviction"]) == (200, "lru")
    assert report["host_write"] == "through"


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 300])
@pytest.mark.parametrize("chunk_tokens", [None, 64])
def test_unbounded_store_equals_unbounded_device(num_host_blocks, chunk_tokens):
    options = {"block_size": 16, "chunk_tokens": chunk_tokens}
    unbounded = Replayer(num_blocks=20_001, **options).run(chat_workload(200, 3))
    replayer = Replayer(
        num_blocks=500, num_host_blocks=num_host_blocks, num_store_blocks=20_000,
        host_write="through", **options,
    )  # fmt: skip
    report = replayer.run(chat_workload(200, 3))
    assert (report.hit_tokens, report.rejected_requests) == (unbounded.hit_tokens, 0)
    assert report.store_hit_tokens == 16 * report.store_loaded_blocks > 5_000
    assert (report.host_hit_tokens or 0) + report.store_hit_tokens < report.hit_tokens
    assert report.store_evicted_blocks == 0
    assert replayer.manager.pool.num_free == replayer.manager.pool.num_total
    check_invariants(replayer.manager)


def test_simulated_store_cannot_be_verified():
    verifier = KVVerifier(num_blocks=40, block_size=16)
    with pytest.raises(ValueError, match="num_store_blocks is 9 with a verifier: expected 0"):
        Replayer(num_blocks=40, block_size=16, num_store_blocks=9, verifier=verifier)


@pytest.mark.slow
@given(
    workloads(),
    group_lists(),
    st.sampled_from([None, 1, 2]),
    st.none() | st.integers(1, 20),
    st.integers(6, 60),
    st.integers(1, 60),
    st.integers(1, 4),
    st.sampled_from(POLICIES),
    st.sampled_from(host_eviction_names()),
    st.sampled_from(WRITES),
)
def test_correct_tiered_cache_verifies(
    workload, specs, hash_block_size, chunk_tokens, capacity, host_capacity, concurrency,
    eviction, host_eviction, host_write,
):  # fmt: skip
    replayer = tiered(
        specs, capacity + 1, host_capacity + 1, eviction=eviction, host_eviction=host_eviction,
        host_write=host_write, concurrency=concurrency, chunk_tokens=chunk_tokens,
        hash_block_size=hash_block_size,
    )  # fmt: skip
    report = replayer.run(workload)
    assert_right(replayer, report)
    assert report.requests == len(workload)


# The pool has six blocks. The first prompt's two blocks are offloaded to the host, and the last
# prompt hits them there.
LEFT = as_workload([*(range(first, first + 9) for first in (0, 100, 200, 300)), [*range(8), 50]])


def without_loads(plan, number):
    plan.swap_in = plan.swap_in[:0]


def without_writes(plan, number):
    plan.swap_out = plan.swap_out[:0]


def loads_exchanged(plan, number):
    plan.swap_in = plan.swap_in.copy()
    plan.swap_in[:, 0] = plan.swap_in[::-1, 0]


def test_offloaded_blocks_are_hit_on_the_host():
    replayer = tiered(4, 7, 9)
    report = replayer.run(LEFT)
    assert_right(replayer, report)
    assert (report.hit_tokens, report.host_hit_tokens, report.loaded_blocks) == (8, 8, 2)


@pytest.mark.parametrize("defect", [without_loads, without_writes, loads_exchanged])
def test_wrong_swaps_are_detected(monkeypatch, defect):
    replayer = tiered(4, 7, 9)
    replayer.verifier.worker.host.memory.fill_(255)  # overwrites data from an earlier test
    plant_in_step(monkeypatch, replayer.manager, defect)
    report = replayer.run(LEFT)
    assert report.mismatches == 8
    (found,) = report.mismatched_requests
    assert (found.request, found.token, found.block_column) == (4, 0, 0)


def test_policies_are_parsed():
    for text in POLICIES:
        assert join_options(*parse_eviction(text)) == text
    assert parse_host_write("through") == {"host_write": "through"}
    assert parse_host_write("back:0.2") == {"host_write": "back", "min_gain_to_write": 0.2}
