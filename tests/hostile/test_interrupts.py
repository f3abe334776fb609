# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that raise at every possible instant of every call."""

import pytest

from tests.machinery.hostile import interrupts
from tests.machinery.hostile.instants import Alarm
from tests.machinery.hostile.scenes import SCENES
from tests.machinery.shared import sampled

# An exception raised by a signal handler while a generator is being closed cannot propagate.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_FIRST = ["sequences", "requests of an engine", "manager, host", "manager, windows"]
_OTHERS = [name for name in SCENES if name.startswith(("manager", "sequences"))]


@pytest.mark.slow
@pytest.mark.parametrize("scene", sampled(dict.fromkeys([*_FIRST, *_OTHERS]), len(_FIRST)))
def test_each_call_takes_effect_or_not_and_everything_can_be_freed(scene):
    calls = [name for name, *_ in SCENES[scene]().calls()]
    counts = {name: interrupts.check_call(scene, at) for at, name in enumerate(calls)}
    assert all(counts.values()), counts


@pytest.mark.slow
@pytest.mark.parametrize("call", sampled(["Worker.apply, moves", "Worker.apply"]))
def test_worker_has_applied_the_plan_or_can_apply_it_or_is_broken(call):
    assert interrupts.check_worker(call) > 30


@pytest.mark.parametrize("call", interrupts.TABLE_CALLS)
def test_table_changes_reach_the_device_after_an_interrupt(call):
    assert interrupts.check_table(call) > 0


@pytest.mark.slow
def test_interrupted_aggregator_counts_reports_once():
    assert interrupts.check_aggregator() > 30


def test_events_are_either_all_kept_or_all_drained():
    assert interrupts.check_events() > 30


@pytest.mark.parametrize("seed", sampled(range(20), 4))
def test_interrupts_at_random_instants_keep_the_state_valid(seed):
    with Alarm() as alarm:
        interrupts.Serving(seed).run(alarm, 100)
