# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that raise at every possible instant of every call."""

import itertools

import pytest

from tests.machinery.interrupts import others
from tests.machinery.interrupts.instants import Alarm, interrupted_at
from tests.machinery.interrupts.managers import CALLS, OPTIONS, Serving, prepared
from tests.machinery.shared import sampled

# An exception raised by a signal handler while a generator is being closed cannot propagate.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@pytest.mark.parametrize("options", sampled(sorted(OPTIONS, reverse=True), 2))
@pytest.mark.parametrize("call", CALLS)
def test_request_is_either_admitted_and_can_be_freed_or_unknown(call, options):
    if call == "step that swaps" and options != "with a host":
        return
    for n in itertools.count(1):
        managed = prepared(options)
        if not interrupted_at(n, lambda managed=managed: CALLS[call](managed)):
            break
        managed.check_all_can_be_freed()
    assert n > 1


@pytest.mark.parametrize("call", others.SEQUENCE_CALLS)
def test_sequence_has_either_freeable_blocks_or_none(call):
    assert others.check_sequences(call) > 1


@pytest.mark.parametrize("call", others.REQUEST_CALLS)
def test_request_of_an_engine_has_either_freeable_blocks_or_none(call):
    assert others.check_requests(call) > 1


@pytest.mark.slow
@pytest.mark.parametrize("with_moves", sampled([True, False]))
def test_worker_has_applied_the_plan_or_can_apply_it_or_is_broken(with_moves):
    assert others.check_worker(with_moves) > 30


@pytest.mark.parametrize("call", others.TABLE_CALLS)
def test_table_changes_reach_the_device_after_an_interrupt(call):
    assert others.check_table(call) > 1


@pytest.mark.slow
def test_interrupted_aggregator_counts_reports_once():
    assert others.check_aggregator() > 30


def test_events_are_either_all_kept_or_all_drained():
    assert others.check_events() > 30


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_interrupts_at_random_instants_keep_the_state_valid(seed):
    with Alarm() as alarm:
        Serving(seed).run(alarm, 100)
