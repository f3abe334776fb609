# SPDX-License-Identifier: Apache-2.0
"""Transfers of recurrent states on fake memory in which the value of each element identifies it."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from kvcache.transfer import StateDescription, StateTensor, plan_states
from tests.machinery.shared import sampled
from tests.machinery.transfer_plan_checker import held, of

BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1}
PAGES = 7


def stages_of(described):
    if described.stages is not None:
        return described.stages
    count = described.num_layers // described.pp_size
    return [(count, described.tp_size)] * described.pp_size


def rank_table(described):
    """Return (stage, layers of the stage, tp_rank, tp_size) for every rank, according to the
    definition.
    """
    found = []
    for _ in range(described.cp_world_size):
        first = 0
        for number, (count, tp_size) in enumerate(stages_of(described)):
            layers = range(first, first + count)
            found += [(number, layers, tp_rank, tp_size) for tp_rank in range(tp_size)]
            first += count
    return found


def names_of(described, rank, state):
    """Return int64[layers, bytes of a state] with a number for each byte of one state on a rank.

    The number depends on state, layer, tensor, global channel, row and byte of the element.
    """
    _, layers, tp_rank, tp_size = rank_table(described)[rank]
    parts = []
    for number, tensor in enumerate(described.tensors):
        item = BYTES[tensor.dtype]
        channels, first = [], 0
        for units, size in tensor.sections:
            for unit in held(units, tp_size, tp_rank):
                channels += range(first + unit * size, first + (unit + 1) * size)
            first += units * size
        whole = np.arange(described.num_layers * first * tensor.row_size * item)
        whole = whole.reshape(described.num_layers, first, tensor.row_size, item)
        mine = whole[layers.start : layers.stop, channels]
        if tensor.channels_last:
            mine = mine.swapaxes(1, 2)
        parts.append(mine.reshape(len(layers), -1) * 8 + number)
    return np.concatenate(parts, axis=1) + state * (1 << 40)


def memory_of(described, rank, pages):
    """Return int64[layers, bytes of all pages] with the number of each byte, or -1 outside of states."""
    names = [names_of(described, rank, state) for state in range(len(pages))]
    stage = rank_table(described)[rank][0]
    stride = described.page_stride or names[0].shape[1]
    stride = stride[stage] if isinstance(stride, tuple) else stride
    memory = np.full((len(names[0]), PAGES, stride), -1)
    for page, of_state in zip(pages, names):
        memory[:, page, : of_state.shape[1]] = of_state
    return memory.reshape(len(names[0]), -1)


def check(local, remote, rank, rng):
    plan = plan_states(local, remote, rank)
    mine = 1 + rng.permutation(PAGES - 1)[:3]
    theirs = [1 + rng.permutation(PAGES - 1)[:3] for _ in range(remote.world_size)]
    wanted = memory_of(local, rank, mine)
    sources = [memory_of(remote, each, pages) for each, pages in enumerate(theirs)]
    found = np.full_like(wanted, -1)
    runs = plan.apply(mine, dict(enumerate(theirs)))
    for source, from_region, start, region, at, length in zip(*(c.tolist() for c in runs.expand())):
        assert (found[region, at : at + length] == -1).all(), "written twice"
        found[region, at : at + length] = sources[source][from_region, start : start + length]
    assert np.array_equal(found, wanted)
    assert set(plan.remote_ranks) == set(runs.expand().remote_rank.tolist())
    assert plan.fragments.length.sum() == len(local.layers(rank)) * local.state_bytes(rank)
    assert runs.num_bytes == (wanted >= 0).sum()
    return plan


def drawn(rng):
    """Draw the state tensors of a model for both engines, each of which may store channels last."""
    sizes = [1, 2, 4, 8]
    tensors = []
    for _ in range(rng.integers(1, 4)):
        sections = [
            (int(rng.choice(sizes)), int(rng.integers(1, 4))) for _ in range(rng.integers(1, 4))
        ]
        row_size, dtype = int(rng.integers(1, 4)), str(rng.choice([*BYTES]))
        tensors.append(of(sections=sections, row_size=row_size, dtype=dtype))
    num_layers = int(rng.integers(1, 5))

    def engine(name):
        own = [StateTensor(channels_last=bool(rng.integers(2)), **tensor) for tensor in tensors]
        values = of(engine_id=name, num_layers=num_layers, tensors=own)
        values["cp_world_size"] = int(rng.integers(1, 3))
        if rng.integers(2):
            cuts = rng.choice(np.arange(1, num_layers), rng.integers(num_layers), replace=False)
            counts = np.diff([0, *np.sort(cuts), num_layers]).tolist()
            values["stages"] = [(count, int(rng.choice(sizes))) for count in counts]
        else:
            values["tp_size"] = int(rng.choice(sizes))
            values["pp_size"] = int(rng.choice([n for n in (1, 2, 4) if num_layers % n == 0]))
        described = StateDescription(**values)
        if rng.integers(2):
            return described
        largest = [sum(t.num_bytes(tp) for t in own) for _, tp in described.pipeline_stages]
        stride = max(largest) + 5 if rng.integers(2) else [size + 3 for size in largest]
        return replace(described, page_stride=stride)

    return engine("local"), engine("remote")


@pytest.mark.parametrize("seed", sampled(range(60), 6))
def test_every_state_byte_arrives_for_all_sizes(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        local, remote = drawn(rng)
        for rank in rng.permutation(local.world_size)[:6].tolist():
            check(local, remote, rank, rng)


MAMBA = of(
    num_layers=2,
    tensors=[
        StateTensor(sections=[(8, 4), (2, 6), (2, 6)], row_size=3),  # convolution: x, B, C
        StateTensor(sections=[(8, 1)], row_size=10, dtype="float32"),  # SSM: heads
    ],
)


def mamba(**changes):
    return StateDescription(**{"engine_id": "e", **MAMBA, **changes})


@pytest.mark.parametrize(("local", "remote", "ranks", "num_fragments"), [
    (of(), of(), [(0,)], 2),
    (of(tp_size=2), of(tp_size=2), [(0,), (1,)], 2),
    # The sections x and heads are read from 2 ranks, and B and C of one group from each rank.
    (of(), of(tp_size=2), [(0, 1)], 2 * 2 * 4),
    (of(tp_size=2), of(), [(0,), (0,)], 2 * 4),
    # 4 ranks share 2 groups, so B and C are read from one of the two ranks that have them
    (of(tp_size=2), of(tp_size=4), [(0, 1), (2, 3)], 2 * 4),
    (of(tp_size=4), of(tp_size=4), [(0,), (1,), (2,), (3,)], 2),
    (of(tp_size=2), of(stages=[(1, 1), (1, 4)]), [(0, 1, 2), (0, 3, 4)], 4 + 4),
])  # fmt: skip
def test_known_examples_have_the_expected_state_slices(local, remote, ranks, num_fragments):
    local, remote = mamba(**local), mamba(**remote)
    rng = np.random.default_rng(0)
    plans = [check(local, remote, rank, rng) for rank in range(local.world_size)]
    assert [plan.remote_ranks for plan in plans] == ranks
    assert plans[0].num_fragments == num_fragments


def test_description_round_trips_by_json_and_pickle():
    one = mamba(stages=[(1, 2), (1, 1)], page_stride=[500, 1000], cp_world_size=2)
    assert StateDescription.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(replace(one))
    values = one.to_dict()
    wrong_tensor = {**values["tensors"][0], "colour": 1}
    for wrong, message in (
        ({**values, "version": 7}, "version is 7, of engine"),
        ({**values, "colour": 1}, r"unknown fields \['colour'\]"),
        ({**values, "tensors": [wrong_tensor]}, r"unknown fields \['colour'\] of tensors\[0\]"),
        ({k: v for k, v in values.items() if k != "tensors"}, r"missing fields \['tensors'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            StateDescription.from_dict(wrong)
    with pytest.raises(TypeError, match="values is a list: expected a mapping"):
        StateDescription.from_dict([])


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: StateTensor(sections=[]), ValueError, "sections is empty"),
    (lambda: StateTensor(sections="ab"), TypeError, "sections is 'ab'"),
    (lambda: StateTensor(sections=[3]), TypeError, r"sections\[0\] is 3: expected \(units"),
    (lambda: StateTensor(sections=[(0, 1)]), ValueError, r"units of sections\[0\] is 0"),
    (lambda: StateTensor(sections=[(1, 1)], row_size=0), ValueError, "row_size is 0"),
    (lambda: StateTensor(sections=[(1, 1)], dtype="int3"), ValueError, "dtype is 'int3'"),
    (lambda: mamba(tp_size=3), ValueError, r"sections\[0\] has 8 units, tp_size is 3"),
    (lambda: mamba(pp_size=3), ValueError, "num_layers is 2, pp_size is 3"),
    (lambda: mamba(stages=[(1, 1)]), ValueError, "num_layers is 2: expected 1, the total"),
    (lambda: mamba(stages=[(2, 1)], tp_size=2), ValueError, "tp_size is 2: expected 1 with"),
    (lambda: mamba(tensors=[]), TypeError, "tensors is .*: expected one StateTensor or more"),
    (lambda: mamba(page_stride=3), ValueError, "page_stride is 3: expected 656 to"),
    (lambda: mamba(page_stride=[1, 2]), ValueError, "page_stride has 2 entries: expected 1"),
    (lambda: plan_states(mamba(), mamba(), 1), ValueError, "local_rank is 1: expected 0 to 0"),
    (lambda: plan_states(mamba(), mamba(num_layers=4), 0), ValueError,
     r"local num_layers is 2 \(engine 'e'\), but remote num_layers is 4"),
    (lambda: plan_states(mamba(), mamba(tensors=MAMBA["tensors"][::-1]), 0), ValueError,
     r"local tensors is .*remote tensors is .*: expected equal values"),
    (lambda: plan_states(mamba(), {}, 0), TypeError, "remote is \\{.*: expected a StateDesc"),
    (lambda: plan_states(mamba(), mamba(), 0).apply(np.array([1, 1]), np.array([1, 2])),
     ValueError, "local_pages has page 1 twice"),
])  # fmt: skip
def test_invalid_arguments_are_reported(call, error, message):
    with pytest.raises(error, match=message):
        call()
