"""Integers of more than 4,300 digits, which Python refuses to print: errors still name the argument."""

from __future__ import annotations

import pytest

from kvcache import (
    BlockPool,
    BlockSpaceManager,
    GroupSpec,
    KVCacheManager,
    LayerSpec,
    LearnedReuse,
    Request,
    StepReport,
    plan_cache,
)
from kvcache.checks import shown
from kvcache.serving import SamplingParams
from kvcache.transfer import CacheDescription

HUGE = 10**5000
SHAPE = {"total_num_kv_heads": 1, "head_size": 8, "block_size": 4}


def manager():
    return KVCacheManager(16, 9, 128)


CALLS = {
    "block_size": lambda: KVCacheManager(HUGE, 9, 128),
    "num_gpu_blocks": lambda: KVCacheManager(16, HUGE, 128),
    "rows": lambda: manager().step([HUGE], [1]),
    "num_tokens": lambda: manager().step([0], [HUGE]),
    "token_ids": lambda: Request("r", [HUGE]),
    "mm_items": lambda: Request("r", [1], mm_items=[("i", HUGE, 1)]),
    "cache_salt": lambda: Request("r", [1], cache_salt=HUGE),
    "lora": lambda: Request("r", [1], lora=HUGE),
    "step_id": lambda: manager().abort(HUGE),
    "report.step_id": lambda: manager().report(StepReport(HUGE, True)),
    "seconds": lambda: manager().set_now(HUGE),
    "turn": lambda: manager().free(Request("q", [1]), turn=HUGE),
    "num_blocks": lambda: BlockPool(HUGE),
    "watermark": lambda: BlockSpaceManager(16, 9, 9, watermark=HUGE),
    "LayerSpec block_size": lambda: LayerSpec("a", "full_attention", HUGE, 1, 8),
    "options window": lambda: GroupSpec("sliding_window", 4, {"window": HUGE}),
    "budget_bytes": lambda: plan_cache(
        [LayerSpec("a", "full_attention", 16, 1, 8)], HUGE, max_model_len=64
    ),
    "max_tokens": lambda: SamplingParams(max_tokens=HUGE),
    "num_layers": lambda: CacheDescription(engine_id="e", num_layers=HUGE, **SHAPE),
    "reached": lambda: LearnedReuse([[HUGE]], [[1]]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_huge_integer_is_refused_by_argument(name):
    with pytest.raises((TypeError, ValueError), match=name.split()[-1].split(".")[-1]) as caught:
        CALLS[name]()
    assert "set_int_max_str_digits" not in str(caught.value)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize("name", ["an integer", "a list", "an object"])
def test_a_value_without_repr_is_shown_by_type(name):
    value = {"an integer": HUGE, "a list": [HUGE], "an object": Unprintable()}[name]
    assert shown(value) == f"of type {type(value).__name__} without a printable value"
    with pytest.raises(TypeError) as got:
        Request("r", [1], cache_salt=value)
    assert str(got.value) == f"cache_salt is {shown(value)}: expected a string"
