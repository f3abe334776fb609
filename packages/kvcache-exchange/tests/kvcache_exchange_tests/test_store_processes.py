# SPDX-License-Identifier: Apache-2.0
"""Tests that answers are correct when rank processes are killed and their store survives."""

import random

import pytest

pytest.importorskip("transformers")

from tests.machinery.ranked_engine import FORMS, prompts_of, serve


@pytest.mark.slow
def test_answers_are_correct_although_ranks_are_killed(tmp_path):
    loaded = {}
    for name in ("TP 2", "PP 2", "TP 4"):
        prompts, num_kills = prompts_of(random.Random(3), 20), int(name != "TP 4")
        found = serve(FORMS[name], tmp_path, prompts, num_kills)
        assert found["wrong"] == found["hung"] == 0, (name, found)
        assert found["deaths"] == sum(found["kills"].values()) == num_kills
        loaded[name] = found["loaded_tokens"]
    # The four ranks in "TP 4" have the same shares as the two ranks in "TP 2", so they load the
    # blocks that those ranks stored.
    assert loaded["TP 4"] > loaded["TP 2"] > 0, loaded


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMS)
def test_answers_are_correct_in_longer_runs(tmp_path, name, seed):
    found = serve(FORMS[name], tmp_path, prompts_of(random.Random(seed), 60), 6, seed)
    assert found["wrong"] == found["hung"] == 0 and found["deaths"] == 6, found
