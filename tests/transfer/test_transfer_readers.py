# SPDX-License-Identifier: Apache-2.0
"""The readers of each source rank, compared with the plans of all readers, for all sizes."""

import numpy as np
import pytest

from kvcache.transfer import StateDescription, StateTensor, plan_transfer, source_readers
from tests.machinery.shared import sampled
from tests.machinery.transfer_plan_checker import cache, of
from tests.transfer.test_transfer_plan import drawn_side


@pytest.mark.parametrize("seed", sampled(range(80), 3))
def test_readers_equal_the_plans(seed):
    rng = np.random.default_rng(seed)
    for _ in range(6):
        heads, num_layers = int(rng.choice([1, 2, 4, 6])), int(rng.integers(2, 6))
        sides = [drawn_side(rng, heads, num_layers, 0) for _ in range(2)]
        sides[1]["is_mla"] = sides[0]["is_mla"]
        readers, source = (cache(**side) for side in sides)
        plans = [plan_transfer(readers, source, rank) for rank in range(readers.world_size)]
        assert source_readers(readers, source) == tuple(
            tuple(rank for rank, plan in enumerate(plans) if number in plan.remote_ranks)
            for number in range(source.world_size)
        )


def test_known_examples_have_the_expected_readers():
    wide, narrow = cache(tp_size=4), cache(tp_size=2)
    assert source_readers(wide, narrow) == ((0, 1), (2, 3))
    assert source_readers(narrow, wide) == ((0,), (0,), (1,), (1,))
    latent = of(is_mla=True, total_num_kv_heads=1)
    assert source_readers(cache(tp_size=4, **latent), cache(**latent)) == ((0, 1, 2, 3),)
    assert source_readers(cache(**latent), cache(tp_size=4, **latent)) == ((0,), (), (), ())
    spread = cache(cp_world_size=2, block_size=4, cp_interleave=4)
    assert source_readers(spread, cache()) == ((0, 1),)
    assert source_readers(cache(), spread) == ((0,), (0,))
    # One stage has 3 layers on one rank, and the other has 1 layer on four ranks.
    stages = cache(num_layers=4, stages=[(3, 1), (1, 4)])
    assert source_readers(cache(num_layers=4, tp_size=2), stages) == (
        (0, 1),
        (0,),
        (0,),
        (1,),
        (1,),
    )
    assert source_readers(stages, cache(num_layers=4, tp_size=2)) == ((0, 1, 2), (0, 3, 4))


def test_readers_of_states_equal_the_plans():
    wide, narrow = (
        StateDescription(
            engine_id="e",
            num_layers=2,
            tp_size=size,
            tensors=[StateTensor(sections=[(8, 4), (1, 6)])],
        )
        for size in (4, 2)
    )
    assert source_readers(wide, narrow) == ((0, 1), (2, 3))
    assert source_readers(narrow, wide) == ((0,), (0,), (1,), (1,))
    with pytest.raises(
        TypeError, match=r"source is CacheDescription.*: expected a StateDescription"
    ):
        source_readers(wide, cache())
    with pytest.raises(
        TypeError, match=r"source is StateDescription.*: expected a CacheDescription"
    ):
        source_readers(cache(), wide)


def test_other_content_is_reported():
    with pytest.raises(ValueError, match="readers num_layers is 2"):
        source_readers(cache(), cache(num_layers=4))
