# SPDX-License-Identifier: Apache-2.0
"""The reference scheduler, without a model or KV: which sequences compute, wait or are preempted."""

import numpy as np
import pytest

from kvcache import KVCacheManager, Request
from kvcache.allocator import check_invariants
from kvcache_serve.engine import Scheduler, Sequence, State

BLOCK = 16


class Course:
    """Runs a scheduler whose steps all succeed. After each step, every sequence receives its
    sampled token.
    """

    def __init__(self, num_blocks, budget=64, *, num_rows=8, host_blocks=0, preemption="swap"):
        options = {"num_host_blocks": host_blocks} if host_blocks else {}
        self.manager = KVCacheManager(
            BLOCK,
            num_blocks + 1,  # plus the null block
            256,
            max_num_reqs=num_rows,
            num_preallocate_tokens=0,
            **options,
        )
        self.scheduler = Scheduler(
            self.manager, max_num_batched_tokens=budget, preemption=preemption
        )
        self.num_added = 0

    def add(self, num_tokens, priority=0, *, shares=(), **options):
        """Add a sequence that starts with `shares` and continues with unique tokens."""
        own = 1_000 * (self.num_added + 1) + np.arange(num_tokens - len(shares))
        request = Request(f"r{self.num_added}", [*shares, *own])
        sequence = Sequence(request, rank=(priority, self.num_added), **options)
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """Run the next step, and return the number of tokens that it computes for each sequence."""
        step = self.scheduler.schedule()
        self.scheduler.complete(step)
        for sequence, has_logits in zip(step.sequences, step.num_logits):
            if has_logits:
                self.scheduler.accept(sequence, [7])
        check_invariants(self.manager)
        return {s.request.request_id: len(ids) for s, ids in zip(step.sequences, step.token_ids)}

    def until(self, holds, most=100):
        for _ in range(most):
            if holds():
                return
            self.step()
        raise AssertionError(f"the condition did not hold within {most} steps")


class TestBudget:
    def test_drafts_are_scheduled_before_prompts_of_a_better_rank(self):
        course = Course(40, budget=8)
        decoding = course.add(3, priority=1)
        course.step()
        course.add(30, priority=0)
        assert course.step() == {"r0": 1, "r1": 7}
        decoding.drafts = [1, 2]
        assert course.step() == {"r0": 3, "r1": 5}

    def test_cached_tokens_do_not_count_against_the_budget(self):
        course = Course(40, budget=64)
        first = course.add(64)
        course.step()
        for _ in range(2):
            course.add(68, shares=first.request.token_ids[:64].tolist())
        course.scheduler.finish(first)
        course.scheduler.max_num_batched_tokens = 10
        assert course.step() == {"r1": 4, "r2": 4}

    def test_number_of_drafts_is_limited_by_length_and_budget(self):
        course = Course(40, budget=8)
        one, other = course.add(3, max_tokens=7), course.add(3, max_tokens=100)
        course.step()
        one.drafts, other.drafts = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]
        # The first sequence is limited by its maximum of 7 tokens, including the sampled one, and
        # the second by the token budget.
        assert course.step() == {"r0": 3, "r1": 5}
        assert (len(one.drafts), len(other.drafts)) == (0, 0)  # no drafts were accepted


class TestOrder:
    def test_sequences_of_equal_rank_are_served_in_arrival_order(self):
        course = Course(40, num_rows=1)
        sequences = [Sequence(Request(f"s{i}", [i, 2, 3])) for i in range(3)]
        for sequence in sequences:
            course.scheduler.add(sequence)
        for sequence in sequences:
            course.step()
            assert sequence.state is State.RUNNING
            course.scheduler.finish(sequence)

    def test_smaller_ranks_are_served_first(self):
        course = Course(40, num_rows=1)
        course.add(5, priority=2), course.add(5, priority=1), course.add(5, priority=3)
        order = []
        while course.scheduler.num_unfinished:
            order += course.step()
            course.scheduler.finish(course.scheduler.admitted[0])
        assert order == ["r1", "r0", "r2"]

    def test_preempted_sequences_return_before_new_ones_of_better_rank(self):
        course = Course(4, preemption="recompute")
        first, second = course.add(30, priority=1), course.add(30, priority=2)
        course.until(lambda: second.num_preemptions == 1)
        new = course.add(30, priority=0)
        course.scheduler.finish(first)
        course.step()  # there is space for only one of the two
        assert (second.state, new.state) == (State.RUNNING, State.WAITING)


class TestRows:
    def test_request_reserves_rows_only_until_its_forks(self):
        course = Course(40, num_rows=3)
        parent, other = course.add(20, num_rows=2), course.add(20, num_rows=2)
        assert course.step() == {"r0": 20}
        assert other.state is State.WAITING  # needs two rows, but only one is free
        child = Sequence(Request("child", parent.request.token_ids[:20]), rank=(0, 0))
        assert course.scheduler.fork(parent, child)
        third = course.add(20)
        course.scheduler.finish(other)
        course.step()
        assert third.state is State.RUNNING

    def test_a_fork_without_a_row_waits(self):
        course = Course(40, num_rows=1)
        parent = course.add(20)
        course.step()
        child = Sequence(Request("child", parent.request.token_ids), rank=(0, 1))
        assert not course.scheduler.fork(parent, child)
        assert child.state is State.WAITING
        course.scheduler.finish(parent)
        assert course.step() == {"child": 5}  # the tokens after a cached block
        course.scheduler.finish(child)
        assert course.manager.pool.num_free == course.manager.pool.num_total


class TestPreemption:
    @pytest.mark.parametrize("preemption", ["swap", "recompute"])
    def test_last_rank_is_preempted_and_returns(self, preemption):
        course = Course(6, host_blocks=20, preemption=preemption)
        first, second = course.add(40), course.add(40)
        gone = State.SWAPPED if preemption == "swap" else State.WAITING
        course.until(lambda: second.num_preemptions == 1)
        assert (first.state, second.state) == (State.RUNNING, gone)
        known = second.request.num_tokens
        course.scheduler.finish(first)
        course.until(lambda: second.state is State.RUNNING, most=2)
        assert second.request.num_tokens >= known and second.num_preemptions == 1
        counts = course.scheduler.num_swapped_out, course.scheduler.num_recomputed
        assert counts == ((1, 0) if preemption == "swap" else (0, 1))

    def test_sequences_of_better_rank_are_not_preempted(self):
        """A sequence with the lowest-priority rank waits for blocks itself. No other sequence is
        preempted for it.
        """
        course = Course(6, preemption="recompute")
        first, second = course.add(45), course.add(40, priority=1)
        course.step()
        course.until(lambda: first.state is not State.RUNNING or second.state is not State.RUNNING)
        assert (first.state, second.state) == (State.RUNNING, State.WAITING)

    def test_no_sequence_is_admitted_while_a_running_one_waits(self):
        course = Course(7, preemption="recompute")
        first, second = course.add(31), course.add(90, priority=1)
        assert course.step() == {"r0": 31, "r1": 33}
        assert course.step() == {"r0": 1}  # "r1" needs three blocks, but only two are free
        new = course.add(1, priority=-1)
        assert course.step() == {"r0": 1} and new.state is State.WAITING
        # The second sequence has the lowest priority, so no other sequence is preempted for it.
        assert second.state is State.RUNNING
        course.scheduler.finish(first)
        assert course.step() == {"r1": 57}
        assert course.step() == {"r1": 1, "r2": 1}

    def test_preempted_sequence_that_ends_before_its_swap_is_forgotten(self):
        course = Course(4, preemption="recompute")
        first, second = course.add(32), course.add(31, priority=1)
        course.step()
        course.step()
        assert course.scheduler._victim is second
        course.scheduler.finish(second)
        assert course.step() == {"r0": 1}
        assert course.scheduler.num_recomputed == 0 and first.num_preemptions == 0


class TestErrors:
    def test_only_one_step_can_be_in_progress(self):
        course = Course(8)
        course.add(20)
        step = course.scheduler.schedule()
        with pytest.raises(RuntimeError, match=f"step {step.plan.step_id} is in progress"):
            course.scheduler.schedule()
        course.scheduler.fail(step)
        with pytest.raises(ValueError, match="step is not in progress"):
            course.scheduler.complete(step)
        assert course.step() == {"r0": 20}

    def test_adding_a_sequence_twice_is_rejected(self):
        course = Course(8)
        sequence = course.add(20)
        with pytest.raises(ValueError, match="sequence 'r0' is waiting: expected a new sequence"):
            course.scheduler.add(sequence)

    def test_free_must_be_callable(self):
        course = Course(8)
        sequence = course.add(20)
        with pytest.raises(TypeError, match="free is 7: expected a callable or None"):
            course.scheduler.finish(sequence, free=7)
        assert course.step() == {"r0": 20}

    def test_sequence_needing_more_rows_than_exist_is_rejected(self):
        course = Course(8, num_rows=2)
        with pytest.raises(ValueError, match="sequence 'r0' needs 3 rows: expected at most 2"):
            course.add(20, num_rows=3)
        assert course.scheduler.num_unfinished == 0

    def test_rejected_accept_keeps_the_arrays_of_the_decode_step(self):
        """Regression, found by the fuzzer: the step's arrays were dropped before the error was
        raised.
        """
        course = Course(8)
        sequence = course.add(5)
        course.step(), course.step()
        kept = course.scheduler._decoding
        with pytest.raises(ValueError, match="num_rejected_tokens of row 0 is 17"):
            course.scheduler.accept(sequence, [1], 17)
        assert kept is not None and course.scheduler._decoding is kept
        assert course.step() == {"r0": 1}

    def test_step_without_available_tokens_is_rejected(self):
        course = Course(8)
        sequence = course.add(20)
        course.scheduler.complete(course.scheduler.schedule())
        with pytest.raises(RuntimeError, match="none of the 1 unfinished sequences has tokens"):
            course.scheduler.schedule()
        course.scheduler.accept(sequence, [1])
        assert course.step() == {"r0": 1}
