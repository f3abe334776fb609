"""A real `kvcache serve` process under random requests, and under hostile clients beside honest ones."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from tests.http import fuzz, storm
from tests.http.process import ServeProcess
from tests.shared import sampled


@pytest.mark.parametrize("seed", sampled(range(20), 1))
def test_random_requests_neither_crash_nor_hang_nor_get_500(seed):
    with ServeProcess(*fuzz.OPTIONS) as server:
        counts = fuzz.run(server, seed, 150)
    assert "Traceback" not in server.log
    assert counts["unnamed"] == 0
    assert counts["right: 200"] > 0 < counts["changed: 400"]


@pytest.mark.parametrize("seed", sampled(range(5), 1))
def test_honest_clients_get_their_answers_beside_hostile_ones(seed):
    _, num_wrong = storm.storm(1, seed, 0.2)
    assert num_wrong == 0
