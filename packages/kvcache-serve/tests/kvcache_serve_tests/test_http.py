# SPDX-License-Identifier: Apache-2.0
"""A `kvcache serve` process with random requests, and with hostile clients alongside honest ones."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from tests.machinery.http import fuzz, storm
from tests.machinery.http.process import ServeProcess
from tests.machinery.shared import sampled


@pytest.mark.slow
@pytest.mark.parametrize("seed,count", sampled([(0, 60), (1, 900)]))
def test_random_requests_never_crash_or_hang_the_server_or_return_500(seed, count):
    with ServeProcess(*fuzz.OPTIONS) as server:
        counts = fuzz.run(server, seed, count)
    assert "Traceback" not in server.log
    assert counts["unnamed"] == 0
    assert counts["right: 200"] > 0 < counts["changed: 400"]


@pytest.mark.slow
@pytest.mark.parametrize("turns,seed,per_turn", sampled([(1, 0, 2), (3, 1, 4)]))
def test_honest_clients_are_answered_despite_hostile_ones(turns, seed, per_turn):
    _, num_wrong = storm.storm(turns, seed, 0.2, per_turn=per_turn)
    assert num_wrong == 0
