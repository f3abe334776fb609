# SPDX-License-Identifier: Apache-2.0
"""Updating the batch of a decode step for the next decode step."""

import numpy as np
import pytest

from kvcache import LayerSpec, Request, build, plan_cache
from kvcache_serve.engine.batch import Batch, following

TOKENS = [range(5), range(20, 32)]
ARRAYS = ["rows", "starts", "query_lens", "seq_lens", "num_drafts", "num_logits"]
TENSORS = ["token_ids", "positions", "logits_indices"]


@pytest.fixture
def cache():
    layers = [
        LayerSpec("a", "full_attention", 4, 1, 8),
        LayerSpec("b", "sliding_window", 4, 1, 8, options={"window": 6}),
    ]
    return build(plan_cache(layers, 2**18, max_model_len=64), max_num_reqs=4)


def steps_of(cache, num_steps):
    """Yield rows, starts and tokens of decode steps whose plans have been applied."""
    requests = [Request(f"r{i}", tokens) for i, tokens in enumerate(TOKENS)]
    plan = cache.manager.step(new=requests)
    report = cache.worker.apply(plan)
    for nth in range(num_steps):
        cache.manager.report(report)
        for request in requests:
            request.append_tokens([40 + nth])
        plan = cache.manager.step(plan.rows, [1, 1])
        report = cache.worker.apply(plan)
        yield plan.rows, plan.num_computed_tokens.astype(np.int64), np.full(2, 40 + nth)


def as_lists(batch):
    contexts = [batch.context(group) for group in range(2)]
    return (
        [getattr(batch, name).tolist() for name in ARRAYS + TENSORS],
        [batch.query_start_loc.tolist(), batch.num_tokens, len(batch)],
        [batch.slots(group).tolist() for group in range(2)],
        [(each.slots.tolist(), each.firsts.tolist(), each.lengths.tolist()) for each in contexts],
    )


def test_updated_batch_equals_a_new_batch(cache):
    batch = None
    for rows, starts, tokens in steps_of(cache, 9):
        new = as_lists(Batch(cache, rows, starts, tokens[:, None]))
        if batch is not None:
            batch = following(batch, starts, tokens)
            assert as_lists(batch) == new
        batch = batch or Batch(cache, rows, starts, tokens[:, None])


def test_earlier_batch_keeps_its_inputs(cache):
    """A GPU may still be reading the inputs of the earlier batch."""
    steps = steps_of(cache, 2)
    rows, starts, tokens = next(steps)
    batch = Batch(cache, rows, starts, tokens[:, None])
    before = [getattr(batch, name).tolist() for name in ARRAYS + TENSORS]
    _, starts, tokens = next(steps)
    following(batch, starts, tokens)
    assert [getattr(batch, name).tolist() for name in ARRAYS + TENSORS] == before
