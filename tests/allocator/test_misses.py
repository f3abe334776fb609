# SPDX-License-Identifier: Apache-2.0
"""Tests for the reasons of cache misses (`explain_misses`)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request
from kvcache.allocator import MISS_REASONS, MissReport
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcache.step import StepPlan, StepReport

BLOCK = 4


@dataclass
class Oracle:
    """Records the whole history of a cache from its events."""

    manager: KVCacheManager
    cached: dict[str, set[bytes]] = field(default_factory=lambda: {"gpu": set(), "cpu": set()})
    left: dict[bytes, str] = field(default_factory=dict)  # why each block last left the cache
    seen: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    def drain(self, reason: str = "evicted") -> None:
        for event in self.manager.cache.drain_events():
            medium = self.cached[event.medium]
            if isinstance(event, BlockStored):
                medium.update(bytes(each) for each in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    medium.discard(bytes(each))
                    self.left[bytes(each)] = reason
            elif isinstance(event, AllBlocksCleared):
                self.left.update(dict.fromkeys(medium, "removed"))
                medium.clear()

    def is_cached(self, block: bytes) -> bool:
        return block in self.cached["gpu"] or block in self.cached["cpu"]

    def hashes(self, request: Request) -> list[bytes]:
        return [bytes(each) for each in self.manager.cache.hashes(request)]

    def expected(self, request: Request, num_hit: int) -> dict[str, int]:
        """Return the expected missed tokens, keyed by reason, of a request that is about to be
        admitted.
        """
        tokens, blocks = request.token_ids.tolist(), self.hashes(request)
        last = (len(tokens) - 1) // BLOCK  # number of blocks that a hit can include
        first = num_hit // BLOCK
        gone = [
            i for i in range(first, last) if self.is_cached(blocks[i]) or blocks[i] in self.left
        ]
        out = dict.fromkeys(MISS_REASONS, 0)
        stop = max(gone, default=first - 1) + 1
        lost = [i for i in range(first, stop) if not self.is_cached(blocks[i])]
        reason = self.left[blocks[lost[0]]] if lost else "evicted"
        out[reason] = (stop - first) * BLOCK
        ahead = [self._num_equal(blocks, self.hashes(other)) for other in self.running]
        flying = min(max([stop, *ahead]), last)
        out["in_flight"] = (flying - stop) * BLOCK
        alike = [
            self._num_equal(tokens, other.token_ids.tolist()) // BLOCK
            for other in self.seen[-64:]
            if other.cache_salt != request.cache_salt
        ]
        keyed = min(max([flying, *alike]), last)
        out["other_keys"] = (keyed - flying) * BLOCK
        out["new"] = (last - keyed) * BLOCK
        out["tail"] = len(tokens) - last * BLOCK
        return out

    @staticmethod
    def _num_equal(one: list, other: list) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
        )


def _manager(**options) -> KVCacheManager:
    options = {"explain_misses": 1, "enable_events": True, "num_preallocate_tokens": 0, **options}
    return KVCacheManager(BLOCK, options.pop("num_gpu_blocks", 41), 400, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_miss_reasons_match_an_oracle_that_records_every_event(seed: int) -> None:
    draw = random.Random(seed)
    eviction = draw.choice(["lru", "learned", "last_access"])
    options = {"num_host_blocks": 31} if seed % 3 == 1 else {}
    manager = _manager(eviction=eviction, **options)
    manager.cache.set_now(0)
    oracle, total = Oracle(manager), dict.fromkeys(MISS_REASONS, 0)
    texts = [[draw.randrange(1000) for _ in range(200)] for _ in range(3)]
    left: dict[str, int] = {}  # number of tokens left to compute, keyed by running request
    for i in range(150):
        manager.cache.set_now(i)
        # Compute a chunk of a running prompt, or finish the request.
        if left and draw.random() < 0.6:
            request = oracle.running[draw.randrange(len(oracle.running))]
            if left[request.request_id] == 0:
                manager.free(request)
                oracle.running.remove(request)
                del left[request.request_id]
            else:
                count = min(left[request.request_id], 8)
                plan = manager.step([manager.row(request)], [count])
                if plan.status[0] == 0:
                    left[request.request_id] -= count
                else:
                    manager.free(request)
                    oracle.running.remove(request)
                    del left[request.request_id]
            oracle.drain()
            continue
        if draw.random() < 0.05:
            manager.cache.evict([draw.randrange(1, 41)])
            oracle.drain("removed")
        if draw.random() < 0.03 and manager.cache.reset():
            oracle.drain("removed")
        text = draw.choice(texts)
        tokens = text[: draw.randrange(1, 100)]
        tokens = tokens + [draw.randrange(1000) for _ in range(draw.randrange(12))]
        salt = draw.choice([None, None, None, "a"])
        request = Request(f"r{i}", tokens, cache_salt=salt)
        num_tokens = draw.choice([8, None])
        num_hit = manager.cache.cached_tokens(request).with_host
        expected = oracle.expected(request, num_hit)
        before = manager.cache.explain(request)
        plan = manager.step(new=[Admit(request, num_tokens)])
        if plan.status[-1] != 0:
            oracle.drain()
            continue
        assert int(plan.num_computed_tokens[-1]) == num_hit
        report = manager.cache.explain(request)
        found = {reason: report.missed_tokens.get(reason, 0) for reason in MISS_REASONS}
        assert found == expected
        # `explain` gives the same result before the admission
        assert before.missed_tokens == report.missed_tokens
        assert sum(found.values()) == report.num_tokens - report.hit_tokens == len(tokens) - num_hit
        for reason, count in expected.items():
            total[reason] += count
        left[request.request_id] = len(tokens) - manager.num_computed_tokens(request)
        oracle.running.append(request)
        oracle.seen.append(request)
        oracle.drain()
        if options:
            manager.report(_completed(plan))
            oracle.drain()
    stats = manager.cache.stats
    assert stats.missed_tokens == total
    assert sum(total.values()) == stats.query_tokens - stats.hit_tokens
    assert total["evicted"] and total["new"] and total["other_keys"]
    manager.cache.clear_stats()
    assert not any(manager.cache.stats.missed_tokens.values())


def _explained(manager: KVCacheManager, request: Request | Admit) -> MissReport:
    manager.step(new=[request])
    return manager.cache.explain(request.request if isinstance(request, Admit) else request)


def test_not_read_not_taken_external_and_tail_tokens_have_their_own_reasons() -> None:
    manager = _manager()
    manager.step(new=[Request("a", range(20))])
    report = _explained(manager, Admit(Request("b", range(20)), read_cache=False))
    assert report.missed_tokens == {"not_read": 20}  # reported, but not counted
    assert manager.cache.stats.missed_tokens["not_read"] == 0
    assert sum(manager.cache.stats.missed_tokens.values()) == 20  # the counts of request a
    c = Request("c", range(20))
    manager.admit(c, manager.cache.find_prefix(c).block_ids[:1])
    assert manager.cache.explain(c).missed_tokens == {"not_taken": 12, "tail": 4}
    report = _explained(manager, Admit(Request("d", range(500, 520)), external=External(8)))
    assert report.missed_tokens == {"external": 8, "new": 8, "tail": 4}
    manager = _manager(enable_caching=False)
    assert _explained(manager, Request("a", range(20))).missed_tokens == {"not_read": 20}
    assert manager.cache.stats.missed_tokens["not_read"] == 20
    drafting = GroupSpec("full_attention", BLOCK, drafts=True)
    manager = KVCacheManager.for_groups([drafting], 100, 400, explain_misses=1)
    manager.step(new=[Request("a", range(16))])
    report = _explained(manager, Request("b", range(16)))
    assert (report.hit_tokens, report.missed_tokens) == (12, {"tail": 4})


@pytest.mark.parametrize("by_step", [True, False])
def test_host_blocks_above_the_limit_are_reported_as_not_loaded(by_step: bool) -> None:
    manager = _manager(num_gpu_blocks=11, num_host_blocks=21)
    for name, tokens in (("a", range(20)), ("big", range(100, 140))):
        request = Request(name, tokens)
        manager.report(_completed(manager.step(new=[request])))
        manager.free(request)
    b = Request("b", range(20))
    assert manager.cache.cached_tokens(b) == (0, 16, 4)
    if by_step:
        manager.step(new=[Admit(b, max_host_blocks=3)])
    else:
        manager.admit(b)  # loads nothing from the host
    assert manager.cache.explain(b).missed_tokens == {"not_loaded": 16, "tail": 4}


def test_tokens_after_an_uncached_window_are_reported_as_boundary() -> None:
    groups = [GroupSpec("full_attention", BLOCK), GroupSpec("sliding_window", BLOCK, {"window": 8})]
    manager = KVCacheManager.for_groups(
        groups, 100, 400, explain_misses=1, retention_interval=0, num_preallocate_tokens=0
    )
    manager.step(new=[Request("a", range(60))])
    report = _explained(manager, Request("b", [*range(40), *range(100, 120)]))
    assert report.missed_tokens == {"boundary": 40, "new": 16, "tail": 4}
    # From now on, the window at the end of the shared prefix is retained.
    report = _explained(manager, Request("c", [*range(40), *range(200, 220)]))
    assert (report.hit_tokens, report.missed_tokens) == (40, {"new": 16, "tail": 4})


def test_cached_blocks_beyond_a_hit_are_not_reported_as_evicted() -> None:
    """Hits are shorter than the cached prefix because a drafter recomputes a block, or because
    block sizes differ between groups.
    """
    drafting = [GroupSpec("full_attention", BLOCK, drafts=True)]
    sizes = [GroupSpec("full_attention", 2 * BLOCK), GroupSpec("full_attention", BLOCK)]
    for groups, num_tokens, expected in ((drafting, 16, (12, 4)), (sizes, 14, (8, 4))):
        manager = KVCacheManager.for_groups(groups, 100, 400, explain_misses=1)
        manager.step(new=[Request("a", range(num_tokens))])
        report = manager.cache.explain(Request("b", [*range(num_tokens), *range(100, 120)]))
        assert (report.hit_tokens, report.missed_tokens["boundary"]) == expected
        assert "evicted" not in report.missed_tokens


def test_an_image_later_in_the_prompt_does_not_change_the_reason_before_it() -> None:
    manager = _manager()
    a, b = (
        Request(name, range(100, 160), mm_items=[(image, 50, 4)])
        for name, image in (("a", "x"), ("b", "y"))
    )
    manager.step(new=[Admit(a, 8)])
    report = manager.cache.explain(b)
    assert report.missed_tokens["in_flight"] == 40
    # These tokens are in the block that contains the image and in the block after it.
    assert report.missed_tokens["other_keys"] == 8


@pytest.mark.parametrize(("start", "tokens", "taker"), [
    (0, range(500, 660), "a new request without a hit"),
    (20, [*range(100, 120), *range(500, 640)], "a new request with a hit"),
])  # fmt: skip
def test_report_contains_the_policy_the_time_and_the_cause_of_an_eviction(
    start: int, tokens: range, taker: str
) -> None:
    manager = _manager(eviction="last_access" if start == 0 else "lru")
    manager.cache.set_now(10)
    for name, first in (("a", 0), ("other", 100)):
        request = Request(name, range(first, first + 20))
        manager.step(new=[request])
        manager.free(request)
    manager.cache.set_now(12)
    big = Request("big", tokens)
    manager.step(new=[big])
    manager.free(big)
    manager.cache.set_now(15.5)
    report = manager.cache.explain(Request("b", range(20)))
    assert report.missed_tokens["evicted"] == 16
    assert report.lost_seconds_ago == 3.5
    assert (report.evicted_by, report.evicted_for) == (
        "last_access" if start == 0 else "lru",
        taker,
    )
    assert f"16 evicted (3.5 s earlier, by {report.evicted_by}, for {taker})" in str(report)


def test_report_names_the_most_similar_recent_request_and_the_first_difference() -> None:
    manager = _manager()
    manager.step(new=[Request("a", range(30)), Request("b", [*range(20), 99, 98], cache_salt="s")])
    report = manager.cache.explain(Request("c", [*range(21), *range(50, 60)]))
    assert (report.nearest_id, report.nearest_tokens, report.differs_in) == ("a", 21, None)
    assert "equal to a up to token 21" in str(report)
    report = manager.cache.explain(Request("d", [*range(20), 99, 98]))
    assert (report.nearest_id, report.nearest_tokens, report.differs_in) == ("b", 22, "cache_salt")


def test_tokens_that_the_parent_of_a_fork_has_not_computed_are_not_hits() -> None:
    """Regression: all tokens of a fork were reported as hits."""
    manager = _manager(num_gpu_blocks=41)
    parent = Request("a", range(40))
    manager.step(new=[Admit(parent, 8)])
    child = Request("b", [*range(8), *range(100, 140)])
    manager.fork(parent, child)
    report = manager.cache.explain(child)
    assert report.hit_tokens == manager.num_computed_tokens(child) == 8
    assert report.missed_tokens == {"not_read": 40}
    assert manager.cache.stats.missed_tokens["not_read"] == 0


def test_rows_of_an_earlier_epoch_are_not_reported_as_in_flight() -> None:
    """Regression: blocks that their row never publishes were reported as being computed."""
    manager = _manager(num_gpu_blocks=41)
    manager.step(new=[Admit(Request("a", range(40)), 8)])
    later = Request("b", range(40))
    assert manager.cache.explain(later).missed_tokens == {"in_flight": 28, "tail": 4}
    manager.cache.start_epoch()
    assert "in_flight" not in manager.cache.explain(later).missed_tokens


def test_items_of_another_length_are_other_keys() -> None:
    """Regression: blocks were compared by hashes, which do not contain the lengths of items."""
    manager = _manager(num_gpu_blocks=41)
    manager.step(new=[Admit(Request("a", range(40), mm_items=[("image", 4, 4)]), 8)])
    report = manager.cache.explain(Request("b", range(40), mm_items=[("image", 4, 8)]))
    assert report.hit_tokens == 4
    assert report.missed_tokens == {"other_keys": 32, "tail": 4}
    assert report.differs_in == "mm_items"


@pytest.mark.parametrize("first_row", [0, 22])
def test_other_prompt_embeddings_are_other_keys(first_row: int) -> None:
    """Regression: only the numbers of rows were compared."""
    manager = _manager(num_gpu_blocks=41)
    rows = np.zeros((40, 8), np.float32)
    manager.step(new=[Request("a", [-1] * 40, prompt_embeds=rows)])
    others = rows.copy()
    others[first_row] = 1
    report = manager.cache.explain(Request("b", [-1] * 40, prompt_embeds=others))
    assert report.hit_tokens == first_row // BLOCK * BLOCK
    assert report.missed_tokens == {"other_keys": 36 - report.hit_tokens, "tail": 4}
    assert report.differs_in == "prompt_embeds"


def test_report_names_the_policy_of_the_tier_that_evicted_last() -> None:
    """Regression: an eviction from the host was attributed to the policy of the device."""
    options = {"eviction": "last_access", "host_eviction": "lru", "num_host_blocks": 5}
    manager = _manager(num_gpu_blocks=13, **options)

    def serve(request: Request, *args: list[int]) -> None:
        manager.report(StepReport(manager.step(*args, new=[request]).step_id, True))

    first, second = Request("a", range(17)), Request("b", range(300, 344))
    serve(first)
    manager.free(first)
    running = Request("c", range(500, 600))
    manager.report(StepReport(manager.step(new=[Admit(running, 4)]).step_id, True))
    serve(second)  # moves the blocks of the first request to the host
    manager.free(second)
    asked = Request("d", range(17))
    assert manager.cache.cached_tokens(asked).with_host == 16
    plan = manager.step([manager.row(running)], [32])  # moves the blocks of the second one there
    manager.report(StepReport(plan.step_id, True))
    assert manager.cache.cached_tokens(asked).with_host == 0
    assert manager.cache.explain(asked).evicted_by == "lru"


def test_sampling_keeps_the_sum_and_finds_most_of_the_evicted_tokens() -> None:
    found = {}
    for one_of in (1, 8):
        manager = _manager(num_gpu_blocks=1001, explain_misses=one_of)
        draw, prompts = random.Random(1), []
        for i in range(60):
            if i >= 20 and i % 2:
                tokens = [*prompts[i - 20], 7, 8, 9]
            else:
                tokens = [draw.randrange(10**6) for _ in range(draw.randrange(300, 390))]
            prompts.append(tokens[:380])
            request = Request(f"r{i}", prompts[i])
            manager.step(new=[request])
            manager.free(request)
        found[one_of] = manager.cache.stats.missed_tokens
    assert sum(found[1].values()) == sum(found[8].values())
    assert found[1]["evicted"] > 3000
    assert 0.9 < found[8]["evicted"] / found[1]["evicted"] <= 1


def test_recent_requests_are_released_eventually() -> None:
    manager = _manager()
    for i in range(200):
        request = Request(f"r{i}", range(i, i + 20))
        manager.step(new=[request])
        manager.free(request)
    assert manager.cache.explain(Request("again", range(100, 120))).nearest_id is None
    assert manager.cache.explain(Request("again", range(199, 219))).nearest_id == "r199"


def test_explain_is_rejected_without_the_option() -> None:
    manager = KVCacheManager(BLOCK, 41, 400)
    with pytest.raises(ValueError, match="explain_misses is None: expected a manager with this"):
        manager.cache.explain(Request("a", range(8)))
    assert manager.cache.stats.missed_tokens is None


def _completed(plan: StepPlan) -> StepReport:
    return StepReport(plan.step_id, completed=True)
