# SPDX-License-Identifier: Apache-2.0
"""A `kvcache serve` process with random requests of hostile clients alongside honest ones."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from tests.machinery.http import fuzz
from tests.machinery.http.process import ServeProcess
from tests.machinery.shared import sampled


@pytest.mark.slow
@pytest.mark.parametrize("seed,count", sampled([(0, 60), (1, 900)]))
def test_random_requests_never_crash_or_hang_the_server_or_change_the_answers_of_others(
    seed, count
):
    with ServeProcess(*fuzz.OPTIONS) as server:
        counts = fuzz.run(server, seed, count)
    assert "Traceback" not in server.log
    assert counts["unnamed"] == 0
    assert counts["right: 200"] > 0 < counts["changed: 400"]
