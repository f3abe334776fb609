# SPDX-License-Identifier: Apache-2.0
"""Hits of the learned policy on the conversation trace, on the agent trace, and on perturbed traces."""

import dataclasses
import functools

import numpy as np
import pytest

from benchmarks.eviction import replayed
from kvcache_lab import optimum, read_mooncake
from tests.machinery.shared import sampled, shared_file

TRACE, AGENTS = "traces/mooncake_conversation.jsonl", "traces/agents_claude_code.jsonl.gz"
# Maps the capacity in 512-token blocks to (minimum number of hit blocks, number with the offline
# optimum).
LEAST = {
    1_000: (21_500, 54_977),
    3_000: (37_400, 84_879),
    5_859: (50_300, 101_791),
    10_000: (65_600, 105_592),
    30_000: (95_300, 105_592),
    50_000: (102_700, 105_592),
}


@pytest.fixture(scope="module")
def conversations():
    no_content = np.empty(0, np.int64)  # the content is only needed for verification
    path = shared_file(TRACE)
    return [dataclasses.replace(each, content=no_content) for each in read_mooncake(path)]


@pytest.fixture(scope="module")
def on_two_tiers(conversations):
    """Return a function that replays the trace with the given options, caches the report, and
    returns it.
    """
    return functools.cache(lambda count, *options: replayed(conversations[:count], *options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [*LEAST][::2])
def test_learned_hits_on_the_conversation_trace_exceed_the_minimum(conversations, capacity):
    least, most = LEAST[capacity]
    assert least <= replayed(conversations, capacity, "learned").hit_tokens // 512 < most


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capacity", "least"), [(500, 0.34), (1_000, 0.47), (2_000, 0.685), (3_000, 0.81)]
)
def test_learned_hit_rate_on_the_agent_trace_exceeds_the_minimum(capacity, least):
    """The hit rates of LRU are 0.303, 0.431, 0.655 and 0.804."""
    requests = [*read_mooncake(shared_file(AGENTS))]
    assert replayed(requests, capacity, "learned").token_hit_rate > least


@pytest.mark.exhaustive
def test_learned_hits_on_two_tiers_exceed_the_minimum(on_two_tiers):
    """The minimum is the best result among the other pairs of policies in docs/eviction.md."""
    report = on_two_tiers(None, 1_000, "learned", 10_000, "learned", "back")
    assert 67_237 < report.hit_tokens // 512 < 105_592


@pytest.mark.slow
@pytest.mark.parametrize(
    "count,device,host,num_declined",
    sampled([(2_500, 500, 3_000, 30_000), (None, 1_000, 10_000, 50_000)]),
)
def test_learned_writes_fewer_bytes_per_host_hit(on_two_tiers, count, device, host, num_declined):
    """Compares writes of blocks that gain hits with writes of every evicted block, both under the
    same policies and under LRU.
    """
    back, plain, learned = (
        on_two_tiers(count, device, policy, host, policy, host_write)
        for policy, host_write in (("learned", "back"), ("lru", "back"), ("learned", "back:0.05"))
    )
    per_hit = [each.written_blocks * 512 / each.host_hit_tokens for each in (back, plain, learned)]
    assert per_hit[2] < 0.73 * min(per_hit[:2])
    assert learned.hit_tokens > max(0.96 * back.hit_tokens, 1.05 * plain.hit_tokens)
    assert learned.declined_blocks > num_declined and back.declined_blocks is None


@pytest.mark.exhaustive
def test_optimum_equals_beladys_algorithm(conversations):
    num_tokens = sum(each.num_tokens for each in conversations)
    for capacity, (_, most) in LEAST.items():
        assert round(optimum(conversations, 512, capacity) * num_tokens / 512) == most
