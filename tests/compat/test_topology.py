# SPDX-License-Identifier: Apache-2.0
"""The ranks of a remote engine that hold a worker's KV, compared with a brute-force computation for
all sizes.
"""

import copy
import itertools
import pickle
from dataclasses import replace

import pytest

from kvcache.compat import KVTopology, RemoteEngine
from kvcache.transfer import AttentionBackend, CacheDescription, heads_of_rank
from kvcache.worker import KVStorage
from tests.machinery.shared import spread

SIZES = [1, 2, 4, 8]


def topology(tp_rank=0, tp_size=1, **options):
    return KVTopology("local", tp_rank=tp_rank, tp_size=tp_size, **options)


def workers(tp_size, pp_size, heads, is_mla=False):
    for pp_rank, tp_rank in itertools.product(range(pp_size), range(tp_size)):
        yield topology(
            tp_rank,
            tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            total_num_kv_heads=heads,
            is_mla=is_mla,
        )


def holding(heads, stages, pp_size, pp_rank, tp_size, tp_rank):
    """Return the set of (head, stage) pairs that a rank holds.

    The model is divided into as many stages as the longer of the two pipelines has.
    """
    per_rank = stages // pp_size
    own = range(pp_rank * per_rank, (pp_rank + 1) * per_rank)
    return set(itertools.product(heads_of_rank(heads, tp_size, tp_rank), own))


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "heads"), spread(itertools.product(SIZES, SIZES, [*SIZES, "mla"]), 17)
)
def test_targets_hold_every_needed_head_once(tp_size, pp_size, heads):
    is_mla, heads = heads == "mla", 1 if heads == "mla" else heads
    for remote_tp, remote_pp in itertools.product(SIZES, SIZES):
        stages = max(pp_size, remote_pp)
        for local in workers(tp_size, pp_size, 8 if is_mla else heads, is_mla):
            needed = holding(heads, stages, pp_size, local.pp_rank, tp_size, local.tp_rank)
            targets = local.get_target_remote_ranks(remote_tp, remote_pp)
            assert targets == sorted(set(targets))
            read = []
            for global_rank, pp_rank, tp_rank in targets:
                assert global_rank == pp_rank * remote_tp + tp_rank
                assert 0 <= pp_rank < remote_pp and 0 <= tp_rank < remote_tp
                held = holding(heads, stages, remote_pp, pp_rank, remote_tp, tp_rank)
                assert held & needed, "nothing is read from a target"
                read += held & needed
            assert len(read) == len(set(read)), "a head of a layer is read twice"
            assert set(read) == needed


@pytest.mark.parametrize("heads", SIZES)
def test_equal_engines_read_same_rank(heads):
    for tp_size, pp_size in itertools.product(SIZES, SIZES):
        for rank, local in enumerate(workers(tp_size, pp_size, heads)):
            own = (rank, local.pp_rank, local.tp_rank)
            assert local.get_target_remote_ranks(tp_size, pp_size) == [own]


@pytest.mark.parametrize(("local", "remote_tp", "remote_pp", "targets"), [
    # More local than remote ranks: several local ranks read from the same remote rank.
    ({"tp_rank": 3, "tp_size": 4, "total_num_kv_heads": 8}, 2, 1, [(1, 0, 1)]),
    # Fewer local than remote ranks: each local rank reads from several remote ranks.
    ({"tp_rank": 1, "tp_size": 2, "total_num_kv_heads": 8}, 4, 1, [(2, 0, 2), (3, 0, 3)]),
    # The remote side replicates heads: the local rank reads from one rank per head.
    ({"tp_rank": 0, "tp_size": 1, "total_num_kv_heads": 2}, 8, 1, [(0, 0, 0), (4, 0, 4)]),
    # Both sides replicate heads: readers of the same head use different replicas.
    ({"tp_rank": 3, "tp_size": 4, "total_num_kv_heads": 2}, 8, 1, [(6, 0, 6)]),
    # With pipeline stages, global ranks are numbered across all stages.
    ({"tp_rank": 0, "tp_size": 1, "pp_rank": 1, "pp_size": 2, "total_num_kv_heads": 2}, 2, 4,
     [(4, 2, 0), (5, 2, 1), (6, 3, 0), (7, 3, 1)]),
    # With MLA, one rank has the complete KV, regardless of the number of heads.
    ({"tp_rank": 1, "tp_size": 2, "total_num_kv_heads": 128, "is_mla": True}, 8, 1, [(4, 0, 4)]),
])  # fmt: skip
def test_known_examples_have_the_expected_targets(local, remote_tp, remote_pp, targets):
    asked = KVTopology("local", **local)
    assert asked.get_target_remote_ranks(remote_tp, remote_pp) == targets
    asked = asked.with_remote("remote", RemoteEngine(remote_tp, remote_pp))
    assert asked.get_target_remote_ranks_from_engine_id("remote") == targets


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("other", [1, 2, 4, 6])
def test_ratios_are_negative_if_remote_is_larger(size, other):
    a = topology(0, size, pp_size=size, block_size=size, is_mla=True)
    b = topology(0, other, pp_size=other, block_size=other, is_mla=True)
    a = a.with_remote("b", RemoteEngine(other, other, other))
    asked = {
        "tp_size": (lambda: a.tp_ratio(other), lambda: a.tp_ratio_from_engine_id("b"), b.tp_ratio),
        "pp_size": (lambda: a.pp_ratio(other), None, b.pp_ratio),
        "block_size": (
            lambda: a.block_size_ratio(other),
            lambda: a.block_size_ratio_from_engine_id("b"),
            b.block_size_ratio,
        ),
    }
    for name, (by_size, by_id, inverse) in asked.items():
        if size % other and other % size:
            message = f"local {name} is {size}, remote {name} is {other}: expected one to divide"
            for call in filter(None, (by_size, by_id)):
                with pytest.raises(ValueError, match=message):
                    call()
            continue
        expected = size // other if size >= other else -(other // size)
        assert by_size() == expected and (by_id is None or by_id() == expected)
        assert inverse(size) == (1 if size == other else -expected)


def test_heads_are_replicated_with_more_ranks_or_mla():
    local = topology(0, 4, total_num_kv_heads=4)
    for tp_size, replicated in (2, False), (4, False), (8, True):
        asked = local.with_remote("remote", RemoteEngine(tp_size))
        assert asked.is_kv_replicated("remote") is replicated
        assert asked.replicates_kv_cache("remote") is replicated
    assert not local.is_kv_replicated("local")
    assert topology(0, 8, total_num_kv_heads=4).replicates_kv_cache("local")
    mla = topology(0, 1, is_mla=True, total_num_kv_heads=128).with_remote("r", RemoteEngine(2))
    assert mla.replicates_kv_cache("r") and mla.replicates_kv_cache("local")
    assert not mla.is_kv_replicated("r")


NB, BS, H, D, L = 10, 16, 4, 64, 32


@pytest.mark.parametrize(
    ("backend", "layout", "shape", "blocks_first", "split", "cross_layers", "position"),
    [
        ("FLASH_ATTN", "NHD", None, False, True, False, -3),
        ("FLASH_ATTN", "NHD", (2, NB, BS, H, D), False, True, False, -3),
        ("FLASH_ATTN", "HND", (2, NB, BS, H, D), False, True, False, -3),
        ("FLASH_ATTN", "NHD", (NB, L, 2, BS, H, D), False, False, True, -3),
        ("FLASH_ATTN", "HND", (NB, H, L, 2, BS, D), False, False, True, -2),
        ("FLASHINFER", "NHD", (NB, 2, BS, H, D), True, False, False, -3),
        ("FLASHINFER", "HND", (NB, 2, H, L, BS, D), True, False, True, -2),
        ("TRITON_ATTN", "HND", (NB, H, L, 2, BS, D), True, False, True, -2),
        ("FLASH_ATTN_DIFFKV", "NHD", (NB, BS, H, 2 * D), True, False, False, -3),
        ("MLA", "NHD", (NB, BS, D), False, False, False, -2),
        ("MLA", "HND", (NB, L, BS, D), False, False, True, -2),
    ],
)
def test_kv_cache_shape_is_classified_by_its_backend(
    backend, layout, shape, blocks_first, split, cross_layers, position
):
    asked = topology(
        backend=backend, is_mla=backend == "MLA", tensor_shape=shape, kv_cache_layout=layout
    )
    assert asked.is_kv_layout_blocks_first is blocks_first
    assert asked.split_k_and_v is split
    assert asked.cross_layers_blocks is cross_layers
    assert asked.block_size_position == position
    if shape is not None:
        assert shape[position] == BS


class EngineBackend:
    """A backend class like those in serving engines."""

    stride_order = (1, 4, 0, 2, 3, 5)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        assert block_size % 16 == 0
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension=False):
        assert include_num_layers_dimension
        return cls.stride_order


def test_engine_backend_defines_the_shape():
    asked = topology(backend=EngineBackend, tensor_shape=(NB, 2, BS, H, D))
    assert asked.is_kv_layout_blocks_first and not asked.split_k_and_v
    assert asked.block_size_position == -3
    packed = replace(asked, tensor_shape=(NB, H, L, 2, BS, D))
    assert packed.cross_layers_blocks and packed.block_size_position == -2


def test_engine_backend_with_a_wrong_shape_or_order_is_rejected():
    shape = staticmethod(lambda *_, **sizes: (2, 4096, 11, 576))
    with pytest.raises(ValueError, match=r"backend returned the shape \(2, 4096, 11, 576\)"):
        topology(backend=type("Blockless", (), {"get_kv_cache_shape": shape}))
    wrong = type("Disordered", (EngineBackend,), {"stride_order": (0, 1, 2, 3, 4, 4)})
    with pytest.raises(ValueError, match=r"backend returned the stride order \(0, 1, 2, 3, 4, 4\)"):
        topology(backend=wrong, tensor_shape=(1,) * 6)


def test_a_described_backend_needs_no_registration():
    mine = AttentionBackend("UNREGISTERED", ("block", "head", "kv", "token", "element"))
    asked = topology(backend=mine)
    assert asked.is_kv_layout_blocks_first and asked.block_size_position == -2
    with pytest.raises(ValueError, match="backend 'UNREGISTERED' has no order"):
        topology(backend=mine, tensor_shape=(L, NB, H, 2, BS, D))


def test_engines_are_added_without_changing_the_topology():
    first = topology(0, 2, total_num_kv_heads=8)
    second = first.with_remote("a", RemoteEngine(4, 2, 32))
    third = second.with_remote("b", RemoteEngine(1))
    assert (first.remotes, list(third.remotes)) == ({}, ["a", "b"])
    assert third.with_remote("a", RemoteEngine(4, 2, 32)) == third
    assert third.engine("a").world_size == 8
    assert third.engine("local") == RemoteEngine(2, 1, 16)
    with pytest.raises(
        ValueError, match=r"remote is RemoteEngine\(tp_size=8.*expected .*=4.* engine 'a'"
    ):
        third.with_remote("a", RemoteEngine(8))
    with pytest.raises(ValueError, match="engine 'local' is the local engine"):
        third.with_remote("local", RemoteEngine(8))
    with pytest.raises(TypeError, match="remote is 8: expected a RemoteEngine"):
        third.with_remote("c", 8)


@pytest.mark.parametrize(
    "copied",
    [lambda t: t, replace, copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))],
)
def test_remotes_are_read_only(copied):
    first = topology(remotes={"a": RemoteEngine(4)})
    asked = copied(first)
    assert asked == first and hash(asked) == hash(first)
    assert asked.remotes == {"a": RemoteEngine(4)} and dict(asked.remotes) == asked.remotes
    assert repr(asked.remotes) == repr({"a": RemoteEngine(4)})
    with pytest.raises(TypeError):
        asked.remotes["b"] = RemoteEngine(1)
    with pytest.raises(TypeError):
        del asked.remotes["a"]
    for method in ("update", "clear", "pop", "popitem", "setdefault"):
        assert not hasattr(asked.remotes, method)
    assert list(asked.with_remote("b", RemoteEngine(1)).remotes) == ["a", "b"]
    assert list(asked.remotes) == ["a"]


@pytest.mark.parametrize("ask", [
    "engine",
    "tp_ratio_from_engine_id",
    "block_size_ratio_from_engine_id",
    "is_kv_replicated",
    "replicates_kv_cache",
    "get_target_remote_ranks_from_engine_id",
])  # fmt: skip
def test_unknown_engine_error_lists_known_engines(ask):
    asked = topology(remotes={"a": RemoteEngine(1)})
    with pytest.raises(ValueError, match="engine_id is 'b': expected one of 'local', 'a'"):
        getattr(asked, ask)("b")


@pytest.mark.parametrize(("call", "message"), [
    (lambda: topology(2, 2), "tp_rank is 2: expected 0 to 1"),
    (lambda: topology(0, 0), "tp_size is 0"),
    (lambda: topology(0, 3, total_num_kv_heads=4, remotes={"pre": RemoteEngine(3)}),
     "^total_num_kv_heads is 4, tp_size is 3"),
    (lambda: topology(pp_rank=4, pp_size=4), "pp_rank is 4: expected 0 to 3"),
    (lambda: topology(total_num_kv_heads=0), "total_num_kv_heads is 0"),
    (lambda: topology(0, 2, total_num_kv_heads=3), "total_num_kv_heads is 3, tp_size is 2:"),
    (lambda: topology(backend="FLASH"), "backend is 'FLASH': expected one of "),
    (lambda: topology(is_mla=True, backend="FLASH_ATTN"),
     "is_mla is True, but backend 'FLASH_ATTN'"),
    (lambda: topology(backend="MLA"), "is_mla is False, but backend 'MLA'"),
    (lambda: topology(kv_cache_layout="DHN"), "kv_cache_layout is 'DHN'"),
    (lambda: topology(tensor_shape=(2, NB, BS, H)), "4 dimensions: expected 5, .* or 6"),
    (lambda: RemoteEngine(0), "tp_size is 0"),
    (lambda: topology().tp_ratio(0), "remote tp_size is 0"),
    (lambda: topology(0, 4, total_num_kv_heads=12).get_target_remote_ranks(6),
     "local tp_size is 4, remote tp_size is 6"),
    (lambda: topology(pp_size=2).get_target_remote_ranks(1, 3),
     "local pp_size is 2, remote pp_size is 3"),
    (lambda: topology(0, 1, total_num_kv_heads=4).get_target_remote_ranks(3),
     "total_num_kv_heads is 4, remote tp_size is 3: expected one to divide the other"),
])  # fmt: skip
def test_invalid_arguments_are_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("ask", "message"), [
    ("tp_ratio_from_engine_id", "local tp_size is 4, remote tp_size is 6"),
    ("block_size_ratio_from_engine_id", "local block_size is 32, remote block_size is 48"),
    ("get_target_remote_ranks_from_engine_id", "local pp_size is 2, remote pp_size is 3"),
])  # fmt: skip
def test_errors_name_the_engine_and_the_side(ask, message):
    asked = topology(0, 4, pp_size=2, block_size=32, total_num_kv_heads=12)
    asked = asked.with_remote("pre", RemoteEngine(6, 3, 48))
    message = f"^local engine 'local', remote engine 'pre': {message}: expected one to divide"
    with pytest.raises(ValueError, match=message):
        getattr(asked, ask)("pre")


def test_uneven_heads_are_rejected_immediately():
    message = (
        "^local engine 'local', remote engine 'pre': total_num_kv_heads is 4, remote tp_size is 3: "
        "expected one to divide the other$"
    )
    with pytest.raises(ValueError, match=message):
        topology(0, 1, total_num_kv_heads=4).with_remote("pre", RemoteEngine(3))
    with pytest.raises(ValueError, match=message):
        topology(0, 1, total_num_kv_heads=4, remotes={"pre": RemoteEngine(3)})
    known = topology(0, 1, total_num_kv_heads=6).with_remote("pre", RemoteEngine(3))
    with pytest.raises(ValueError, match=message):
        replace(known, total_num_kv_heads=4)
    mla = topology(0, 1, is_mla=True, total_num_kv_heads=4).with_remote("pre", RemoteEngine(3))
    assert mla.get_target_remote_ranks_from_engine_id("pre") == [(0, 0, 0)]


UNLIKE = RemoteEngine(stages=[(3, 1), (1, 4)])


def with_stages(stages, pp_rank, tp_rank, **options):
    tp_size = stages[pp_rank][1]
    return KVTopology(
        "local", tp_rank, tp_size, pp_rank=pp_rank, pp_size=len(stages), stages=stages, **options
    )


def test_uneven_stages_have_the_expected_targets():
    asked = [
        topology(rank, 2, total_num_kv_heads=4).with_remote("pre", UNLIKE) for rank in range(2)
    ]
    found = [each.get_target_remote_ranks_from_engine_id("pre") for each in asked]
    assert found == [[(0, 0, 0), (1, 1, 0), (2, 1, 1)], [(0, 0, 0), (3, 1, 2), (4, 1, 3)]]
    sender = with_stages(UNLIKE.stages, 0, 0, total_num_kv_heads=4)
    assert sender.engine("local").world_size == 5 and sender.engine("local").tp_sizes == (1, 4)
    assert asked[0].is_kv_replicated("pre") is False
    assert topology(total_num_kv_heads=2, remotes={"pre": UNLIKE}).is_kv_replicated("pre")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RemoteEngine(2, stages=[(1, 2)]), "tp_size is 2: expected 1, because stages"),
        (lambda: RemoteEngine(stages=[(1, 0)]), r"tp_size of stages\[0\] is 0"),
        (lambda: with_stages([(1, 2)], 0, 2), "tp_rank is 2: expected 0 to 1"),
        (
            lambda: KVTopology("a", 0, 1, pp_size=2, stages=[(1, 1)]),
            "pp_size is 2: expected 1, the number of stages",
        ),
        (lambda: KVTopology("a", 0, 1, stages=[(1, 2)]), "tp_size is 1: expected 2, the tp_size of"),
        (
            lambda: with_stages([(2, 1), (3, 1)], 0, 0, remotes={"r": UNLIKE})
            .get_target_remote_ranks_from_engine_id("r"),
            "local stages hold 5 layers, but remote stages hold 4: expected equal numbers",
        ),
        (
            lambda: with_stages([(2, 1), (3, 1)], 0, 0).get_target_remote_ranks(1, 2),
            "num_layers is 5, pp_size is 2",
        ),
        (
            lambda: topology(remotes={"r": UNLIKE}).tp_ratio_from_engine_id("r"),
            r"stages have tp_size \[1, 4\]: expected the same tp_size for all stages",
        ),
        (
            lambda: topology(total_num_kv_heads=3, remotes={"r": UNLIKE}),
            "total_num_kv_heads is 3, remote tp_size is 4",
        ),
    ],
)  # fmt: skip
def test_invalid_stages_are_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_stages_must_be_pairs():
    for stages in ("ab", 3, [3]):
        with pytest.raises(TypeError, match=r"stages.* is .*: expected .*\(num_layers, tp_size\)"):
            RemoteEngine(stages=stages)
    with pytest.raises(ValueError, match="stages is empty"):
        RemoteEngine(stages=[])


def test_default_backend_is_that_of_a_storage():
    storage = KVStorage(5, 16, num_kv_heads=4, head_size=8)
    topology = KVTopology("a", 0, 1, total_num_kv_heads=4, tensor_shape=storage.kv_caches[0].shape)
    assert topology.is_kv_layout_blocks_first and not topology.split_k_and_v
    described = CacheDescription(
        engine_id="a", num_layers=1, total_num_kv_heads=4, head_size=8, block_size=16
    )
    assert described.memory_order == storage.memory_order
