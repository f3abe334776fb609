# SPDX-License-Identifier: Apache-2.0
"""Checks laws of the manager over 96,000 random operations on mixed groups.

Failures found by random runs are kept as fixed cases in test_groups.py, test_manager_life.py and
test_hybrid_replay.py ("found by a random run"). Seeds are not kept, because the operations that a
seed produces change whenever an operation is added to the driver.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.machinery.allocator_driver import OPERATIONS_PER_SEED, Driver, drive
from tests.machinery.group_mixes import MIXES, Chooser
from tests.machinery.shared import sampled

NUM_SEEDS = 192  # 96,000 operations including exhaustive tests; `make soak` runs more
SEEDS_PER_TEST = len(MIXES)  # covers every mix of groups once


@pytest.mark.slow
@pytest.mark.parametrize("first", sampled(range(0, NUM_SEEDS, SEEDS_PER_TEST)))
def test_random_operations_keep_the_laws(first):
    print(f"seeds {first} to {first + SEEDS_PER_TEST - 1}, {OPERATIONS_PER_SEED} operations each")
    for seed in range(first, first + SEEDS_PER_TEST):
        drive(seed, OPERATIONS_PER_SEED)


class HypothesisChooser(Chooser):
    """Draws choices through Hypothesis, so that it can shrink failing sequences of operations."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def integer(self, least: int, most: int) -> int:
        return self.data.draw(st.integers(least, most))


class ManagerUnderLaws(RuleBasedStateMachine):
    """Hypothesis chooses the operations and shrinks failing sequences."""

    @initialize(data=st.data())
    def start(self, data):
        self.driver = Driver(HypothesisChooser(data))

    def run(self, data, operation):
        self.driver.choose = HypothesisChooser(data)
        getattr(self.driver, operation)()
        self.driver.compare()

    @rule(data=st.data())
    def step(self, data):
        self.run(data, "step")

    @rule(data=st.data(), operation=st.sampled_from(["free", "tokens_arrive", "report", "abort"]))
    def change(self, data, operation):
        self.run(data, operation)

    @rule(data=st.data(), operation=st.sampled_from(["invalidate", "reset", "wrong_call", "ask"]))
    def disturb(self, data, operation):
        self.run(data, operation)

    @precondition(lambda self: not self.driver.has_state)
    @rule(
        data=st.data(),
        operation=st.sampled_from(["admit_alone", "extend", "advance", "reject"]),
    )
    def one_request(self, data, operation):
        self.run(data, operation)


TestManagerUnderLaws = ManagerUnderLaws.TestCase
TestManagerUnderLaws.settings = settings(stateful_step_count=30)
