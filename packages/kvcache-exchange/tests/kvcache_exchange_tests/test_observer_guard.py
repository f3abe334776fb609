# SPDX-License-Identifier: Apache-2.0
"""The guard that keeps an engine running if its observer fails."""

import numpy as np
import pytest

from kvcache.sanitizer import SanitizedGroup, Sanitizer, SanitizerError
from kvcache_exchange.plugins.guard import ObserverGuard


def sanitizer_of(mode):
    groups = [SanitizedGroup("full", 4), SanitizedGroup("state", 4)]
    return Sanitizer(groups, 16, num_host_blocks=8, mode=mode, log=lambda report: None)


@pytest.mark.parametrize("mode", ["report", "stop"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s.observe_tokens(["a"], [-1], [1], [4]),
        lambda s: s.observe_tokens(["a"], [0], [2], [4]),
        lambda s: s.observe_tokens(["a", "a"], [0, 0], [1, 1], [4, 5]),
        lambda s: s.observe_tokens(["a"], [2**30], [1], [4]),
        lambda s: s.observe_tokens(["a"], [5], [1], [4]),
        lambda s: s.observe_write(0, ["a"], [0], [2], [4], [[1]]),
        lambda s: s.observe_write(0, ["a"], [0], [9], range(9), [[1]]),
        lambda s: s.observe_read(0, ["a"], [0], [3], np.zeros((1, 0), int)),
        lambda s: s.observe_read(0, ["a"], [0], [-1], [[1]]),
        lambda s: s.observe_read(0, ["a"], [0, 1], [1], [[1]]),
        lambda s: s.observe_state_read(1, ["a"], [-1], [1]),
        lambda s: s.observe_state_write(1, ["a"], [0], [1]),
        lambda s: s.observe_load(0, ["a"], [0], [9], [[1]]),
        lambda s: s.observe_allocation("a", [99]),
        lambda s: s.observe_free("a", [-2]),
        lambda s: s.observe_copy([1], [99]),
        lambda s: s.observe_copy([1, 2], [3]),
        lambda s: s.observe_clear([99]),
        lambda s: np.zeros((1, 2))[0, 5],  # a column of a block table
        lambda s: {"a": 1}["b"],  # a request that was never announced
    ],
)
def test_what_an_engine_does_never_switches_the_observer_off(wrong, mode):
    sanitizer = sanitizer_of(mode)
    guard = ObserverGuard(sanitizer)
    sanitizer.observe_request("a", [1, 2, 3])
    for _ in range(2):
        if mode == "stop":
            with pytest.raises(SanitizerError):
                guard(wrong, sanitizer)
        else:
            guard(wrong, sanitizer)
    assert sanitizer.counts.total() == 1 and guard.failure is None


def test_failure_of_an_observer_is_raised_at_each_call_in_stop_mode():
    guard = ObserverGuard(sanitizer_of("stop"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            guard(lambda: 1 / 0)
