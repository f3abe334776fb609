# SPDX-License-Identifier: Apache-2.0
"""A cached token is a token that a request did not have to compute, because another request had."""

import numpy as np
import pytest

from kvcache import KVCacheManager, Request
from kvcache.sources import Arrived
from kvcache.sources.base import LoadStats
from kvcache_serve.engine import Scheduler, Sequence


class Source:
    """A source that has the first `num_tokens` tokens of every request."""

    name = "source"
    num_loading_requests = num_quarantined_blocks = 0
    is_busy = False

    def __init__(self, num_tokens, are_cached=True, arrives=True):
        self.num_tokens, self.are_cached, self.arrives = num_tokens, are_cached, arrives
        self.manager, self.loading, self.stats = None, [], LoadStats()

    def match(self, request):
        known = self.manager.cache.cached_tokens(request).with_host
        return max(min(self.num_tokens, request.num_tokens - 1) - known, 0)

    def begin(self, request):
        self.loading.append(request)

    def poll(self):
        found = []
        for request in self.loading:
            count = self.num_tokens if self.arrives else 0
            computed = self.manager.finish_receiving(request, None if self.arrives else 0)
            error = None if self.arrives else "lost"
            found.append(Arrived(request, computed, count, error, are_cached=self.are_cached))
        self.loading = []
        return found

    def save(self, report): ...
    def cancel(self, request): ...
    def close(self): ...


class Course:
    """A scheduler whose model samples the token 7."""

    def __init__(self, *sources, num_blocks=60, **options):
        self.manager = KVCacheManager(16, num_blocks, 512, num_preallocate_tokens=0)
        for source in sources:
            source.manager = self.manager
        options = {"max_num_batched_tokens": 512, "sources": sources, **options}
        self.scheduler = Scheduler(self.manager, **options)

    def add(self, name, tokens, **options):
        sequence = Sequence(Request(name, tokens), **options)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        step = self.scheduler.schedule()
        if step is None:
            return
        self.scheduler.begin_loads(step)
        for sequence, count in zip(step.sequences, np.asarray(step.num_logits).tolist()):
            if count:
                self.scheduler.accept(sequence, [7])
        self.scheduler.complete(step)


def test_preempted_sequence_does_not_count_its_own_blocks():
    course = Course(preemption="recompute")
    sequence = course.add("a", range(100))
    course.step()
    course.scheduler._recompute(sequence)
    course.step()
    assert sequence.num_preemptions == 1 and sequence.num_cached_tokens == 0
    assert course.manager.cache.stats.hit_tokens == 0


def test_preempted_sequence_counts_what_other_requests_computed_meanwhile():
    course = Course(preemption="recompute", max_num_batched_tokens=32)
    sequence = course.add("a", range(100))
    course.step()
    course.scheduler._recompute(sequence)
    course.manager.step(new=[Request("b", range(100))])  # hits 32 tokens
    course.step()
    # 96 tokens are cached, 32 of which the sequence has computed itself.
    assert sequence.num_cached_tokens == 64


@pytest.mark.parametrize(("are_cached", "counted"), [(True, 80), (False, 0)])
def test_tokens_of_a_source_count_unless_they_were_computed_for_the_request(are_cached, counted):
    course = Course(Source(80, are_cached))
    sequence = course.add("a", range(90))
    course.step()
    course.step()
    assert sequence.num_loaded_tokens == 80 and sequence.num_cached_tokens == counted
    stats = course.manager.cache.stats
    assert (stats.num_requests, stats.query_tokens, stats.hit_tokens) == (1, 90, 0)


def test_request_that_reads_no_cache_is_not_loaded_from_a_source():
    course = Course(Source(80))
    sequence = Sequence(Request("a", range(90), read_cache=False))
    course.scheduler.add(sequence)
    course.step()
    assert sequence.num_loaded_tokens == 0 and sequence.request.num_tokens == 91
