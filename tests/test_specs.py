# SPDX-License-Identifier: Apache-2.0
"""Specs of layers and groups, and planning a pool from layers and a byte budget."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.kinds import AttentionKind, KindError, kind_class, make_kind, register, registry
from kvcache.memory_plan import MAX_GROUPS, plan_cache
from kvcache.specs import ELEMENT_BYTES, ContextParallel, GroupSpec, LayerSpec

KIB = 2**10
GIB = 2**30


def attention(kind, count, *, block_size=16, heads=8, head_size=128, **more):
    """Return layers that, by default, have 64 KiB per block of 16 tokens."""
    return [
        LayerSpec(f"{kind}.{i}", kind, block_size, heads, head_size, **more) for i in range(count)
    ]


def recurrent(count, state_bytes, block_size=1, prefix="recurrent"):
    return [
        LayerSpec(f"{prefix}.{i}", "recurrent", block_size, state_bytes=state_bytes)
        for i in range(count)
    ]


def shape(plan):
    """Return (kind, block size, number of layers) for each group."""
    return [(group.kind, group.block_size, len(group.layers)) for group in plan.groups]


# --- a group --------------------------------------------------------------------------------------


def test_group_specs_are_compared_by_value():
    options = {"window": 4}
    group = GroupSpec("sliding_window", 16, options, layers=["a", "b"])
    options["window"] = 5
    assert group == GroupSpec("sliding_window", 16, {"window": 4}, False, ("a", "b"))
    assert group != replace(group, options=options)
    assert group.options == {"window": 4} and group.options["window"] == 4
    assert len({group, pickle.loads(pickle.dumps(group)), replace(group)}) == 1
    assert repr(group.options) == "{'window': 4}"


@pytest.mark.parametrize(("replicated", "tokens"), [(False, 96), (True, 16)])
def test_block_of_a_sharded_group_covers_the_tokens_of_all_ranks(replicated, tokens):
    cp = ContextParallel(pcp_world_size=2, dcp_world_size=3)
    assert GroupSpec("full_attention", 16, replicated=replicated).tokens_per_block(cp) == tokens


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"kind": ""}, ValueError, "kind is '': expected a non-empty name"),
    ({"block_size": 0}, ValueError, "block_size is 0: expected 1 to 2147483647"),
    ({"block_size": True}, TypeError, "block_size is True: expected an integer"),
    ({"options": {1: 2}}, TypeError, "options is {1: 2}: expected string keys"),
    ({"options": {"a": "b"}}, TypeError, "options['a'] is 'b': expected an integer"),
    ({"layers": "a"}, TypeError, "layers is 'a': expected a sequence of names"),
    ({"replicated": "no"}, TypeError, "replicated is 'no': expected True or False"),
])  # fmt: skip
def test_invalid_group_is_rejected(wrong, error, message):
    with pytest.raises(error) as caught:
        GroupSpec(**{"kind": "full_attention", "block_size": 16, **wrong})
    assert str(caught.value) == message


@pytest.mark.parametrize(("sizes", "error", "message"), [
    ((2.0,), TypeError, "pcp_world_size is 2.0: expected an integer"),
    ((1, 0, 2, 2), ValueError, "dcp_rank is 2: expected 0 to 1"),
])  # fmt: skip
def test_invalid_context_parallelism_is_rejected(sizes, error, message):
    with pytest.raises(error) as caught:
        ContextParallel(*sizes)
    assert str(caught.value) == message


def test_sizes_of_numpy_do_not_overflow():
    cp = ContextParallel(np.int8(100), np.int8(99), np.int8(100), np.int8(99))
    assert (cp.world_size, cp.rank) == (10_000, 9_999)


# --- a layer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "bytes_per_token"), [
    (LayerSpec("x", "full_attention", 16, 8, 128), 8 * 256 * 2),
    (LayerSpec("x", "full_attention", 16, 8, 128, dtype="float32"), 8 * 256 * 4),
    (LayerSpec("x", "full_attention", 16, 4, 192, 128), 4 * 320 * 2),
    (LayerSpec("mla", "full_attention", 64, 1, 576, v_head_size=0), 576 * 2),
    (LayerSpec("packed mla", "full_attention", 64, 1, 656, 0, dtype="uint8"), 656),
    (LayerSpec("x", "full_attention", 16, 8, 128, None, "float8_e4m3fn", {}, False, 0, 64),
     8 * 256 + 64),
])  # fmt: skip
def test_bytes_per_token_depend_on_heads_and_dtype(layer, bytes_per_token):
    assert layer.bytes_per_token == bytes_per_token
    assert layer.page_bytes(48) == 48 * bytes_per_token


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"name": ""}, ValueError, "name is '': expected a non-empty name"),
    ({"head_size": 0}, ValueError, "head_size is 0: expected 1 to 2147483647"),
    ({"replicated": "no"}, TypeError, "replicated is 'no': expected True or False"),
    ({"dtype": ["x"]}, TypeError, "dtype is ['x']: expected a torch.dtype or its name"),
    (
        {"dtype": "int64"},
        ValueError,
        "dtype is 'int64': expected one of float32, float16, bfloat16, float8_e4m3fn, "
        "float8_e5m2, uint8, int8, float64",
    ),
    ({"kind": "sliding_window"}, ValueError,
     "options of kind 'sliding_window' are {}: expected window=N"),
    ({"kind": "chunked_local", "options": {"window": 8}}, ValueError,
     "options of kind 'chunked_local' are {'window': 8}: expected chunk_size=N"),
    ({"options": {"window": 8}}, ValueError,
     "options of kind 'full_attention' are {'window': 8}: expected none"),
    ({"state_bytes": 8}, ValueError,
     "state_bytes is 8: expected 0 for kind 'full_attention', which keeps no state"),
    ({"kind": "recurrent", "state_bytes": 8}, ValueError,
     "num_kv_heads is 8: expected 0 for a state"),
    ({"kind": "recurrent"}, ValueError, "state_bytes is 0: expected 1 to 2147483647"),
    (
        {"kind": "cross_attention", "drafts": True},
        ValueError,
        "drafts is True: expected False for kind 'cross_attention', whose pages hold no K and V of "
        "tokens",
    ),
])  # fmt: skip
def test_invalid_layer_is_rejected(wrong, error, message):
    right = {"name": "x", "kind": "full_attention", "block_size": 16}
    with pytest.raises(error) as caught:
        LayerSpec(**{**right, "num_kv_heads": 8, "head_size": 128, **wrong})
    assert str(caught.value) == message


def test_state_cannot_be_uncached():
    with pytest.raises(ValueError, match="cached is False: expected True for kind 'recurrent'"):
        LayerSpec("a", "recurrent", 1, state_bytes=8, cached=False)
    for spec in (GroupSpec, lambda *some, **more: LayerSpec("a", *some, 1, 8, **more)):
        for name in ("cached", "transferred"):
            with pytest.raises(TypeError, match=f"{name} is 0: expected True or False"):
                spec("full_attention", 16, **{name: 0})


# --- plans of models ------------------------------------------------------------------------------


def test_model_with_one_kind_of_layers_has_one_group():
    plan = plan_cache(attention("full_attention", 32), GIB, max_model_len=4000)
    assert plan.groups == (
        GroupSpec("full_attention", 16, layers=[f"full_attention.{i}" for i in range(32)]),
    )
    assert (plan.layer_page_bytes, plan.page_bytes, plan.num_pages) == (64 * KIB, 2048 * KIB, 512)
    assert plan.padding_bytes == (0,)
    assert plan.layers == tuple(attention("full_attention", 32))
    assert [plan.pages_per_request(n) for n in (1, 16, 17, 4000)] == [1, 1, 2, 250]
    assert plan.max_concurrency == 511 / 250
    with pytest.raises(ValueError, match=r"^num_tokens is 0: expected 1 to 2147483647$"):
        plan.pages_per_request(0)


def interleaved(num, every):
    """Return layers with windows, in which each `every`-th layer has full attention."""
    full, window = ("full_attention", {}), ("sliding_window", {"window": 1024})
    kinds = [full if i % every == every - 1 else window for i in range(num)]
    return [LayerSpec(f"{i}", kind, 16, 8, 128, options=o) for i, (kind, o) in enumerate(kinds)]


WINDOW, FULL, STATE = "sliding_window", "full_attention", "recurrent"
MLA = {"block_size": 64, "heads": 1, "v_head_size": 0}
# Layers, arguments of plan_cache, the groups as (kind, block size, number of layers), the padding of
# each group, and pages per request by number of tokens.
PLANS = {
    "five sliding layers per full layer form groups of equal size":
        # 1023 + 2048 live tokens span 192 blocks, or 193 if they do not start at a block boundary.
        (interleaved(30, 6), {"max_model_len": 32768, "max_num_batched_tokens": 2048},
         [(WINDOW, 16, 5)] * 5 + [(FULL, 16, 5)], [0] * 6, {32768: 5 * 193 + 2048, 1000: 6 * 63}),
    "three chunked local layers per full layer form groups of equal size":
        (attention("chunked_local", 36, options={"chunk_size": 8192}) + attention(FULL, 12),
         {"budget_bytes": 80 * GIB, "max_model_len": 2**20, "max_num_batched_tokens": 4096},
         [("chunked_local", 16, 12)] * 3 + [(FULL, 16, 12)], [0] * 4,
         {2**20: 3 * ((8192 + 4096) // 16 + 1) + 2**16}),
    "a window includes the query itself":  # 16 + 16 tokens that may start inside a block
        (attention(WINDOW, 1, options={"window": 17}), {"max_num_batched_tokens": 16},
         [(WINDOW, 16, 1)], [0], {4096: 3}),
    "without a step limit, a window group holds every token":
        (attention(WINDOW, 1, options={"window": 64}), {}, [(WINDOW, 16, 1)], [0], {4096: 256}),
    # With eight layers per group, there are 5 + 1 groups. With two layers per group, there would be
    # 19 + 4 groups, which would hardly save memory.
    "the last group is smaller if numbers of layers share no divisor":
        (attention(WINDOW, 37, options={"window": 1024}) + attention(FULL, 8),
         {"budget_bytes": 80 * GIB, "max_model_len": 2**17, "max_num_batched_tokens": 2048},
         [(WINDOW, 16, 8)] * 4 + [(WINDOW, 16, 5), (FULL, 16, 8)], [0] * 4 + [3 * 64 * KIB, 0], {}),
    # The pages of 800-token blocks would be smaller than the state.
    "a state raises the block size of attention":
        (recurrent(6, 3_300_000) + attention(FULL, 2), {"max_model_len": 131072},
         [(STATE, 816, 2)] * 3 + [(FULL, 816, 2)], [2 * (816 * 4096 - 3_300_000)] * 3 + [0],
         {131072: 3 * 2 + 161}),
    "a state smaller than a block is padded":
        (recurrent(2, 1000) + attention(FULL, 2), {}, [(STATE, 16, 2), (FULL, 16, 2)],
         [2 * (64 * KIB - 1000), 0], {}),
    "a state is stored at its own block size":
        (recurrent(1, 3_300_000, block_size=256) + attention(FULL, 1), {},
         [(STATE, 1024, 1), (FULL, 1024, 1)], [1024 * 4096 - 3_300_000, 0], {}),
    # Attention blocks are only as large as the state requires.
    "states may have a separate interval":
        (recurrent(6, 3_300_000, block_size=256) + attention(FULL, 2),
         {"max_model_len": 131072, "state_interval": 512},
         [(STATE, 512, 2)] * 3 + [(FULL, 816, 2)], [2 * (816 * 4096 - 3_300_000)] * 3 + [0],
         {131072: 3 * 2 + 161}),
    "a model with only states keeps its block size":
        (recurrent(2, 4000, 64) + recurrent(2, 1000, 64, "small"), {},
         [(STATE, 64, 2)] * 2, [0, 6000], {4096: 4}),
    "a layer with few bytes per token gets larger blocks":
        (attention(FULL, 4, head_size=576, **MLA)
         + [LayerSpec(f"indexer.{i}", FULL, 64, 1, 128, 0, "uint8", scale_bytes_per_token=4)
            for i in range(4)],
         {}, [(FULL, 64, 4), (FULL, 512, 4)], [0, 4 * 64 * (576 * 2 - 8 * 132)], {}),
    "unequal heads per kind get unequal block sizes":
        (attention(FULL, 2, heads=4) + attention(WINDOW, 2, heads=16, options={"window": 512}),
         {"max_num_batched_tokens": 1024}, [(FULL, 64, 2), (WINDOW, 16, 2)], [0, 0],
         {4096: 64 + 97}),
    # For some layers, blocks of 81 * 16 tokens would fit, but hits could then only end at multiples
    # of 22,032 tokens.
    "padded block sizes keep a common boundary":
        (recurrent(1, 3_300_000) + attention(FULL, 1)
         + attention(WINDOW, 1, heads=5, options={"window": 512}), {},
         [(STATE, 816, 1), (FULL, 816, 1), (WINDOW, 816, 1)], None, {}),
    "block sizes whose common multiple is too large are adjusted":
        (attention(FULL, 1) + [LayerSpec("other", FULL, 24, num_kv_heads=5, head_size=128)], {},
         [(FULL, 16, 1), (FULL, 24, 1)], [0, 16 * 4096 - 24 * 2560], {}),
    "states with different dtypes do not share a group":
        ([*recurrent(1, 4000, 16), LayerSpec("b", STATE, 16, state_bytes=4000, dtype="float32")], {},
         [(STATE, 16, 1)] * 2, [0, 0], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plan(name):
    layers, arguments, groups, padding, pages = PLANS[name]
    plan = plan_cache(layers, **{"budget_bytes": 10 * GIB, "max_model_len": 4096, **arguments})
    assert shape(plan) == groups
    assert padding is None or plan.padding_bytes == tuple(padding)
    assert {n: plan.pages_per_request(n) for n in pages} == pages
    assert plan.num_pages == arguments.get("budget_bytes", 10 * GIB) // plan.page_bytes


@pytest.mark.parametrize(("layers", "interval", "error", "message"), [
    (attention("full_attention", 1), 512, ValueError,
     "state_interval is 512: expected None, as no layer keeps a state"),
    (
        recurrent(1, 100, block_size=6) + recurrent(1, 100, block_size=8, prefix="other"),
        512,
        ValueError,
        "state_interval is 512: expected a multiple of 24, because the block_size of every "
        "layer that "
        "keeps a state must divide it",
    ),
])  # fmt: skip
def test_invalid_interval_is_rejected(layers, interval, error, message):
    with pytest.raises(error) as caught:
        plan_cache(layers, GIB, max_model_len=64, state_interval=interval)
    assert str(caught.value) == message


def test_context_parallelism_distributes_tokens_of_all_but_replicated_groups():
    layers = attention("full_attention", 2) + attention("cross_attention", 2, replicated=True)
    cp = ContextParallel(dcp_world_size=4)
    plan = plan_cache(layers, GIB, max_model_len=4096, context_parallel=cp)
    assert [group.replicated for group in plan.groups] == [False, True]
    assert plan.pages_per_request(4096) == 64 + 256 and plan.context_parallel == cp


def test_only_equal_layers_share_a_group():
    """Layers with equal bytes per token, but different shapes or dtypes, do not share a group."""
    base = LayerSpec("base", WINDOW, 16, 8, 128, options={"window": 64})
    others = [
        {"dtype": "float16"}, {"options": {"window": 128}}, {"num_kv_heads": 7},
        {"num_kv_heads": 4, "head_size": 256}, {"head_size": 96, "v_head_size": 160},
        {"dtype": "int8", "head_size": 252, "scale_bytes_per_token": 8 * 8},
    ]  # fmt: skip
    layers = [
        replace(base, name=f"{i}{pair}", **other)
        for i, other in enumerate([{}, *others])
        for pair in "ab"
    ]
    plan = plan_cache(layers, GIB, max_model_len=4096)
    assert [group.layers for group in plan.groups] == [(f"{i}a", f"{i}b") for i in range(7)]


def test_encoder_has_a_separate_maximum_length():
    layers = attention("full_attention", 2) + attention("cross_attention", 2)
    plan = plan_cache(layers, GIB, max_model_len=64, max_encoder_tokens=1500)
    assert plan.max_encoder_tokens == 1500
    assert plan.pages_per_request(64) == 4 + 94 and plan.pages_per_request(1) == 1 + 94
    plan = plan_cache(layers, GIB, max_model_len=64)
    assert plan.max_encoder_tokens == 64 and plan.pages_per_request(1) == 1 + 4
    assert plan_cache(layers[:2], GIB, max_model_len=64).max_encoder_tokens == 0
    message = "max_model_len 64 and max_encoder_tokens 1500 needs .* a max_model_len of at most 0$"
    with pytest.raises(ValueError, match=message):
        plan_cache(layers, 2**20, max_model_len=64, max_encoder_tokens=1500)


def test_pool_has_at_most_as_many_pages_as_ids():
    layers = attention("full_attention", 1, block_size=1, heads=1, head_size=1)
    assert plan_cache(layers, 2**40, max_model_len=1).num_pages == 2**31 - 1


# --- user-defined kinds ---------------------------------------------------------------------------


@register("test_last_segments")
class LastSegments(AttentionKind):
    """Each token attends to its own segment and to the previous one."""

    def __init__(self, *, segment):
        super().__init__()
        self.segment = segment

    def first_needed_token(self, num_computed_tokens):
        return max(num_computed_tokens // self.segment - 1, 0) * self.segment


def test_user_defined_kind_is_planned_from_its_first_needed_token():
    layers = attention("test_last_segments", 2, options={"segment": 32})
    plan = plan_cache(layers, GIB, max_model_len=100_000, max_num_batched_tokens=64)
    # Up to 63 tokens before the step, plus the 64 tokens of the step, span 8 or 9 blocks.
    assert [plan.pages_per_request(n) for n in (1, 16, 17, 90, 127, 128, 144, 100_000)] == [
        1, 1, 2, 6, 8, 8, 9, 9,
    ]  # fmt: skip
    for n in (1, 50, 144, 1000):
        assert plan.pages_per_request(n) >= blocks_touched(plan.groups[0], plan, n)


def test_kind_that_reads_more_than_its_window_is_rejected(monkeypatch):
    class Wrong(AttentionKind):
        window = 8

        def first_needed_token(self, num_computed_tokens):
            return max(0, num_computed_tokens - 8)

    monkeypatch.setitem(registry._KINDS, "test_wrong", Wrong)
    layer = LayerSpec("a", "test_wrong", 4, num_kv_heads=1, head_size=4)
    says = r"Wrong.window is 8: expected 9 or more, as first_needed_token\(8\) is 0$"
    with pytest.raises(KindError, match=says):
        plan_cache([layer], 2**16, max_model_len=64)
    monkeypatch.setattr(Wrong, "window", "x")
    with pytest.raises(KindError, match=r"Wrong.window is 'x': expected an integer"):
        plan_cache([layer], 2**16, max_model_len=64)
    monkeypatch.setattr(Wrong, "window", 9)
    plan_cache([layer], 2**16, max_model_len=64)


@pytest.mark.parametrize(("answer", "says"), [
    (lambda n: n + 1, r"Wrong.first_needed_token\(0\) is 1: expected 0 to 0$"),
    (lambda n: -n, r"Wrong.first_needed_token\(1\) is -1: expected 0 to 1$"),
    (lambda n: None, r"Wrong.first_needed_token\(0\) is None: expected an integer$"),
    (lambda n: 1 // (n - 3), r"Wrong.first_needed_token\(0\) is -1"),
    (lambda n: 0 // (n - 3), r"Wrong.first_needed_token\(3\) raised ZeroDivisionError: "),
    (  # the result decreases between calls
        lambda n: n if n < 40 else n - 8,
        r"Wrong.first_needed_token\(40\) is 32: expected 39 or more, the value for 39$",
    ),
])  # fmt: skip
def test_kind_with_invalid_results_is_rejected(monkeypatch, answer, says):
    class Wrong(AttentionKind):
        def first_needed_token(self, num_computed_tokens):
            return answer(num_computed_tokens)

    monkeypatch.setitem(registry._KINDS, "test_wrong", Wrong)
    with pytest.raises(KindError, match=says):
        plan_cache(attention("test_wrong", 1), GIB, max_model_len=64)


def plan_own(monkeypatch, base=AttentionKind, length=100, step=16, **members):
    monkeypatch.setitem(registry._KINDS, "test_own", type("Own", (base,), members))
    sizes = {"state_bytes": 64} if not base.pages.has_slots else {"num_kv_heads": 1, "head_size": 8}
    return plan_cache(
        [LayerSpec("own", "test_own", 8, **sizes)],
        GIB,
        max_model_len=length,
        max_num_batched_tokens=step,
    )


@pytest.mark.parametrize(("base", "members", "says"), [
    # The number of pages is derived from a bound on live tokens that is too low.
    (AttentionKind,
     {"first_needed_token": lambda self, n: 0, "max_live_tokens": lambda self, n, step: step},
     r"Own.max_pages\(100, 16, 8\) is 3: expected 4 or more, as Own.first_needed_token\(9\)"),
    (kind_class("full_attention"), {"max_pages": lambda self, *_: 12},
     r"\(100, 16, 8\) is 12: expected 13 or more, as Own.first_needed_token\(81\) is 0$"),
    (kind_class("recurrent"), {"max_pages": lambda self, *_: 1},
     r"\(100, 16, 8\) is 1: expected 2 or more, as its pages hold 'state'$"),
    (kind_class("cross_attention"), {"max_pages": lambda self, *_: 12},
     r"\(100, 16, 8\) is 12: expected 13 or more, as its pages hold 'encoder'$"),
    (kind_class("full_attention"), {"max_live_tokens": lambda self, *_: 15},
     r"^Own.max_live_tokens\(100, 16\) is 15: expected 16 to "),
    (kind_class("full_attention"), {"max_live_tokens": lambda self, *_: None},
     r"^Own.max_live_tokens\(100, 16\) is None: expected an integer$"),
    (kind_class("full_attention"), {"max_pages": lambda self, *_: -5},
     r"^Own.max_pages\(100, 16, 8\) is -5: expected 1 to "),
    (kind_class("full_attention"), {"max_pages": lambda self, *_: 1 // 0},
     r"^Own.max_pages\(100, 16, 8\) raised ZeroDivisionError: "),
])  # fmt: skip
def test_formula_of_a_derived_kind_is_also_checked(monkeypatch, base, members, says):
    with pytest.raises(KindError, match=says):
        plan_own(monkeypatch, base, **members)


@settings(max_examples=50)
@given(window=st.integers(1, 60), length=st.integers(1, 90), step=st.integers(1, 40))
def test_formula_is_rejected_exactly_where_a_step_touches_more_blocks(window, length, step):
    with pytest.MonkeyPatch.context() as monkeypatch:
        rule = {"first_needed_token": lambda self, n: max(n - window + 1, 0)}
        plan = plan_own(monkeypatch, length=length, step=step, **rule)
        touched = blocks_touched(plan.groups[0], plan, length)
        plan_own(monkeypatch, length=length, step=step, max_pages=lambda *_: touched, **rule)
        if touched > 1:
            with pytest.raises(KindError, match=f"is {touched - 1}: expected {touched} or more"):
                less = touched - 1
                plan_own(monkeypatch, length=length, step=step, max_pages=lambda *_: less, **rule)


# --- impossible plans -----------------------------------------------------------------------------


def test_error_of_a_small_budget_states_what_is_missing_and_what_fits():
    layers = attention("full_attention", 2)
    with pytest.raises(ValueError) as caught:
        plan_cache(layers, 10**6, max_model_len=8192)
    assert str(caught.value) == (
        "budget_bytes is 1000000 (976.56 KiB): one request of max_model_len 8192 needs "
        "67174400 (64.06 MiB), 66174400 (63.11 MiB) more; "
        "the budget holds a max_model_len of at most 112"
    )
    assert plan_cache(layers, 67174400, max_model_len=8192).max_concurrency >= 1


def test_more_different_layer_specs_than_groups_are_rejected():
    layers = [
        LayerSpec(f"layers.{i}", "sliding_window", 16, 8, 128, options={"window": 1 + i})
        for i in range(MAX_GROUPS + 1)
    ]
    assert len(plan_cache(layers[1:], GIB, max_model_len=64).groups) == MAX_GROUPS
    with pytest.raises(ValueError, match=r"^layers have 33 different specs: expected at most 32$"):
        plan_cache(layers, GIB, max_model_len=64)


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"layers": []}, ValueError, "layers is empty: expected at least one LayerSpec"),
    ({"layers": ["a"]}, TypeError, "a layer is 'a': expected a LayerSpec"),
    ({"layers": 2 * attention("full_attention", 1)}, ValueError,
     "two layers have the name 'full_attention.0': expected unique names"),
    ({"budget_bytes": -1}, ValueError, "budget_bytes is -1: expected 0 to 9223372036854775807"),
    ({"layer_page_bytes": 65535}, ValueError,
     "layer_page_bytes is 65535: expected 65536 to 9223372036854775807"),
    (
        {"layer_page_bytes": 65537},
        ValueError,
        "layer_page_bytes is 65537: expected a multiple of 2, so that it holds whole elements of "
        "every "
        "layer's dtype",
    ),
    ({"layers": LayerSpec}, TypeError,
     "layers is <class 'kvcache.specs.LayerSpec'>: expected an iterable of LayerSpec"),
    ({"max_encoder_tokens": 8}, ValueError,
     "max_encoder_tokens is 8: expected None, as no layer's kind has an encoder"),
    ({"layers": attention("cross_attention", 1), "max_encoder_tokens": 0}, ValueError,
     "max_encoder_tokens is 0: expected 1 to 2147483647"),
])  # fmt: skip
def test_invalid_input_is_rejected(wrong, error, message):
    right = {"layers": attention("full_attention", 1), "budget_bytes": GIB, "max_model_len": 64}
    with pytest.raises(error) as caught:
        plan_cache(**{**right, **wrong})
    assert str(caught.value) == message


def test_group_with_layers_of_a_drafter_is_a_drafting_group():
    layers = attention("full_attention", 4) + attention(
        "sliding_window", 10, options={"window": 64}
    )
    layers.insert(2, replace(layers[0], name="mtp.0", drafts=True))
    plan = plan_cache(layers, GIB, max_model_len=4096)
    assert shape(plan) == [("full_attention", 16, 5), ("sliding_window", 16, 5)] + [
        ("sliding_window", 16, 5)
    ]
    assert [group.drafts for group in plan.groups] == [True, False, False]


def test_uncached_or_untransferred_layers_have_separate_groups():
    layers = [
        *attention("full_attention", 2),
        LayerSpec("uncached", "full_attention", 16, 8, 128, cached=False),
        LayerSpec("scratch", "full_attention", 16, 8, 128, transferred=False),
    ]
    plan = plan_cache(layers, GIB, max_model_len=64)
    found = {each.layers: (each.cached, each.transferred, each.drafts) for each in plan.groups}
    assert found[("uncached",)] == (False, True, False)
    assert found[("scratch",)] == (True, False, False)
    scratch = next(i for i, each in enumerate(plan.groups) if not each.transferred)
    assert plan.transferred_groups == tuple(i for i in range(len(plan.groups)) if i != scratch)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_circular_buffer_must_hold_the_window_and_a_step():
    def planned(buffer, step, length=1024):
        options = {"window": 100, "buffer": buffer}
        layers = attention("circular_window", 1, options=options)
        return plan_cache(layers, GIB, max_model_len=length, max_num_batched_tokens=step)

    plan = planned(160, 61)  # the buffer has 10 blocks
    assert plan.pages_per_request(1024) == 10 and plan.pages_per_request(40) == 3
    says = (
        r"^options of CircularWindow have buffer 144: expected 160 or more, "
        r"window - 1 plus the 61 tokens of a step$"
    )
    with pytest.raises(KindError, match=says):
        planned(144, 61)
    assert planned(129, 45)  # the buffer is rounded up to whole blocks, 144 tokens
    assert planned(100, 1024, length=100)  # the buffer never wraps around
    with pytest.raises(
        ValueError, match=r"^buffer is 99: expected 100 to 2147483647 \(the window\)$"
    ):
        planned(99, 1)


# --- random layers and budgets --------------------------------------------------------------------


@st.composite
def cases(draw):
    """Draw (layers, arguments of plan_cache without the budget), with up to four kinds of layers
    and lengths up to 300.
    """
    layers = []
    kinds = draw(st.lists(st.sampled_from(range(5)), min_size=1, max_size=4))
    for kind in kinds:
        spec = {"block_size": draw(st.sampled_from([1, 4, 8, 12]))}
        spec |= {"dtype": draw(st.sampled_from(["bfloat16", "float32", "int8"]))}
        if kind == 3:
            spec |= {"kind": "recurrent", "state_bytes": draw(st.integers(1, 5000))}
        else:
            reach = draw(st.integers(1, 100))
            spec |= (
                {"kind": "sliding_window", "options": {"window": reach}},
                {"kind": "chunked_local", "options": {"chunk_size": reach}},
                {"kind": "full_attention"},
                {},
                {"kind": "cross_attention"},
            )[kind]
            spec |= {
                "num_kv_heads": draw(st.integers(1, 5)),
                "head_size": draw(st.sampled_from([3, 8])),
            }
            spec |= {"replicated": draw(st.booleans())}
        first, count = len(layers), draw(st.integers(1, 12))
        layers += [LayerSpec(f"layers.{first + i}", **spec) for i in range(count)]
    arguments = {
        "max_model_len": draw(st.integers(1, 300)),
        "max_num_batched_tokens": draw(st.none() | st.integers(1, 100)),
        "context_parallel": ContextParallel(dcp_world_size=draw(st.integers(1, 3))),
    }
    if 4 in kinds:
        arguments["max_encoder_tokens"] = draw(st.none() | st.integers(1, 300))
    return draw(st.permutations(layers)), arguments


def blocks_touched(group, plan, num_tokens):
    """Compute by brute force the maximum number of blocks that contain a token that a step reads or
    writes.
    """
    tokens, step = group.tokens_per_block(plan.context_parallel), plan.max_num_batched_tokens
    if group.kind == "cross_attention":
        return -(-plan.max_encoder_tokens // tokens)
    most = 0
    for start in range(num_tokens):
        stop = min(start + step, num_tokens)
        first = 0
        if group.kind.startswith("test_"):
            first = make_kind(group.kind, group.options).first_needed_token(start)
        elif group.kind == "sliding_window":
            first = max(0, start - group.options["window"] + 1)
        elif group.kind == "chunked_local":
            first = start - start % group.options["chunk_size"]
        most = max(most, (stop - 1) // tokens - first // tokens + 1)
    return most


def least_budget(layers, arguments):
    """Return the required number of bytes, as stated in the error for a budget of 0."""
    with pytest.raises(ValueError, match="needs") as caught:
        plan_cache(layers, 0, **arguments)
    return int(str(caught.value).split(" needs ")[1].split()[0])


@given(case=cases(), slack=st.integers(0, 200_000))
def test_every_layer_has_its_share_and_one_request_fits_the_pool(case, slack):
    layers, arguments = case
    budget = least_budget(layers, arguments) + slack
    plan = plan_cache(layers, budget, **arguments)
    by_name = {layer.name: layer for layer in layers}
    assert plan.layers == tuple(layers)
    assert sorted(n for group in plan.groups for n in group.layers) == sorted(by_name)
    assert len(plan.groups) <= MAX_GROUPS
    share = plan.layer_page_bytes
    assert all(share % ELEMENT_BYTES[layer.dtype] == 0 for layer in layers)
    assert plan.page_bytes == share * max(len(group.layers) for group in plan.groups)
    for group, padding in zip(plan.groups, plan.padding_bytes, strict=True):
        members = [by_name[name] for name in group.layers]
        data = [layer.page_bytes(group.block_size) for layer in members]
        assert max(data) <= share and sum(data) + padding == plan.page_bytes
        for layer in members:
            assert (layer.kind, layer.options, layer.replicated) == (
                group.kind,
                group.options,
                group.replicated,
            )
            assert group.block_size % layer.block_size == 0
    assert plan.num_pages == budget // plan.page_bytes
    assert plan.max_concurrency >= 1
    assert plan.num_pages > plan.pages_per_request(plan.max_model_len)


@settings(max_examples=50)
@given(case=cases())
def test_a_request_never_touches_more_blocks_than_planned(case):
    layers, arguments = case
    plan = plan_cache(layers, GIB, **arguments)
    length = plan.max_model_len
    planned = plan.pages_per_request(length)
    states = sum(2 for group in plan.groups if group.kind == "recurrent")
    others = [group for group in plan.groups if group.kind != "recurrent"]
    assert planned >= states + sum(blocks_touched(group, plan, length) for group in others)
    whole = [
        group if group.kind == "cross_attention" else replace(group, kind="full_attention")
        for group in others
    ]
    assert planned <= states + sum(blocks_touched(group, plan, length) for group in whole)


@pytest.mark.slow
@settings(max_examples=50)
@given(case=cases())
def test_fewer_groups_would_need_over_10_percent_more_bytes(case):
    layers, arguments = case
    plan = plan_cache(layers, GIB, **arguments)
    length, share = plan.max_model_len, plan.layer_page_bytes
    chosen = plan.pages_per_request(length) * plan.page_bytes
    sizes = {}  # (group without its layers, properties of a layer) -> number of such layers
    by_name = {layer.name: layer for layer in layers}
    for group in plan.groups:
        alike = [replace(by_name[name], name="any", block_size=1) for name in group.layers]
        assert alike == [alike[0]] * len(alike)
        key = (replace(group, layers=()), alike[0])
        sizes[key] = sizes.get(key, 0) + len(group.layers)
    others = []
    for per_group in range(1, len(layers) + 1):
        groups = [key[0] for key, n in sizes.items() for _ in range(-(-n // per_group))]
        if len(groups) <= MAX_GROUPS:
            other = replace(plan, groups=tuple(groups))
            needed = other.pages_per_request(length) * per_group * share
            others.append((len(groups), needed))
    least = min(needed for _, needed in others)
    assert chosen <= 1.1 * least
    assert (len(plan.groups), chosen) == min(each for each in others if each[1] <= 1.1 * least)


@given(case=cases(), part=st.floats(0, 1, exclude_max=True))
def test_reported_maximum_length_fits_and_no_longer_one_does(case, part):
    layers, arguments = case
    needed = least_budget(layers, arguments)
    budget = int(needed * part)
    with pytest.raises(ValueError) as caught:
        plan_cache(layers, budget, **arguments)
    assert re.search(rf", {needed - budget} \([0-9.]+ [KMG]iB\) more;", str(caught.value))
    fits = int(str(caught.value).rsplit(" ", 1)[1])
    assert 0 <= fits < arguments["max_model_len"]
    if fits:
        assert plan_cache(layers, budget, **{**arguments, "max_model_len": fits})
    for longer in (fits + 1, (fits + 1 + arguments["max_model_len"]) // 2):
        with pytest.raises(ValueError, match=f"at most {fits}$"):
            plan_cache(layers, budget, **{**arguments, "max_model_len": longer})
    with pytest.raises(ValueError, match=r", 1 \(0.00 KiB\) more"):
        plan_cache(layers, needed - 1, **arguments)


# --- the length that fits, and padding --------------------------------------------------------------


def test_max_model_len_is_fitted_to_the_budget():
    layers = attention("full_attention", 2)
    plan = plan_cache(layers, 10**6, max_model_len=8192, fit_max_model_len=True)
    # Each layer needs 7 pages of 64 KiB for 112 tokens, and one more page is the null page.
    assert (plan.max_model_len, plan.max_num_batched_tokens, plan.num_pages) == (112, 112, 15)
    assert plan == plan_cache(layers, 10**6, max_model_len=112)
    enough = {"max_model_len": 8192, "max_num_batched_tokens": 64}
    fitted = plan_cache(layers, GIB, fit_max_model_len=True, **enough)
    assert fitted == plan_cache(layers, GIB, **enough)
    assert plan_cache(layers, 10**6, fit_max_model_len=True, **enough).max_num_batched_tokens == 64
    with pytest.raises(ValueError, match=r"max_model_len 8192 needs .* of at most 0$"):
        plan_cache(layers, 10**5, fit_max_model_len=True, **enough)


def test_caller_may_set_the_page_bytes_per_layer():
    layers = [
        *attention("full_attention", 2),
        *attention("sliding_window", 2, heads=4, options={"window": 64}),
    ]
    plain = plan_cache(layers, GIB, max_model_len=1024)
    assert (plain.layer_page_bytes, plain.page_bytes) == (64 * KIB, 128 * KIB)
    plan = plan_cache(layers, GIB, max_model_len=1024, layer_page_bytes=96 * KIB)
    assert (plan.layer_page_bytes, plan.page_bytes) == (96 * KIB, 192 * KIB)
    assert shape(plan) == shape(plain) == [("full_attention", 16, 2), ("sliding_window", 32, 2)]
    assert plan.padding_bytes == (64 * KIB, 64 * KIB)
    assert plan.num_pages == GIB // (192 * KIB)
    assert plan_cache(layers, GIB, max_model_len=1024, layer_page_bytes=64 * KIB) == plain


@pytest.mark.parametrize(("name", "value", "error"), [
    ("page_bytes", Decimal(4096), TypeError),
    ("max_model_len", -1, ValueError),
    ("max_num_batched_tokens", None, TypeError),
])  # fmt: skip
def test_plan_with_an_invalid_number_is_rejected_by_name(name, value, error):
    layers = [LayerSpec(f"layers.{i}", "full_attention", 16, 2, 64) for i in range(2)]
    plan = plan_cache(layers, 2**23, max_model_len=256)
    with pytest.raises(error, match=f"{name} of the plan is"):
        replace(plan, **{name: value})
