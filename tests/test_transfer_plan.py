"""Transfer plans: carried out on fake memories over all combinations, what is refused, what is merged."""

import itertools
import json
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvcache.transfer.description import PACKINGS, CacheDescription, Coordinates
from kvcache.transfer.plan import ReceivePermutation, plan_transfer
from kvcache.transfer.sharding import ranks_of_head
from kvcache.transfer.topology import KVTopology
from tests.transfer_plan_checker import Memory, Wrong, check
from tests.transfer_plan_table import HEADS, PARALLEL, SIZES, page_product, parallel_product, tally


def of(**values):
    return values


def cache(**changes):
    values = of(
        engine_id="a",
        num_layers=2,
        total_num_kv_heads=4,
        head_size=2,
        block_size=4,
        dtype="float32",
    )
    return CacheDescription(**{**values, **changes})


@pytest.mark.parametrize("quarter", range(4))
def test_every_parallel_size_and_number_of_heads(quarter):
    count = len(SIZES) ** 6 * len(HEADS) // 4  # 5,120
    end = None if quarter == 3 else (quarter + 1) * count
    counts, wrong = tally(itertools.islice(parallel_product(), quarter * count, end))
    assert not wrong
    assert counts["right"] + counts["right, permuted"] == counts.total() == count


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_every_layout_and_packing(parallel):
    some = itertools.islice(page_product([parallel], block_sizes=(4, 8)), 0, None, 7)
    counts, wrong = tally(some)
    assert not wrong and counts["right"]
    refused = counts["refused: cp_interleave"]  # 8 tokens in a block of 4
    assert set(counts) <= {"right", "right, permuted", "refused: cp_interleave"}
    assert counts.total() - refused > 40


@pytest.mark.parametrize("allow_permutation", [True, False])
@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (of(tp_size=3), of(tp_size=2)),
        (of(block_size=6), of(block_size=4)),
        (of(pp_size=3), of(pp_size=2)),
        (of(cp_world_size=3, cp_interleave=2), of(cp_world_size=2, block_size=6)),
        (of(cp_world_size=2, cp_interleave=2), of(cp_world_size=3, layout="HND")),
        (of(tp_size=6, cp_world_size=3), of(tp_size=4, pp_size=2, packing="block_major")),
    ],
)
def test_sizes_that_do_not_divide_each_other(local, remote, allow_permutation):
    sizes = of(num_layers=6, total_num_kv_heads=12)
    local, remote = cache(**sizes, **local), cache(**sizes, **remote)
    for rank in range(local.world_size):
        check(local, remote, rank, allow_permutation=allow_permutation, seed=rank)


# (local, remote) of one rank each and more, every kind of group among them.
PARTIAL = [
    (of(), of()),
    (of(block_size=8), of(block_size=2)),
    (of(block_size=8, layout="HND"), of(block_size=2, layout="HND", tp_size=2)),
    (of(block_size=2, layout="HND"), of(block_size=8, layout="HND", tp_size=2)),
    (of(block_size=2), of(block_size=8, layout="HND", packing="block_major")),
    (of(block_size=2, cp_world_size=2), of(block_size=4)),
    (of(block_size=4), of(block_size=2, cp_world_size=2, cp_interleave=2)),
    (of(cp_world_size=2, block_size=2), of(cp_world_size=2, block_size=4, layout="HND")),
    (of(cp_world_size=2, block_size=4), of(cp_world_size=2, block_size=2, layout="HND")),
    (of(block_size=4), of(block_size=6, packing="blocks_first")),
]


@pytest.mark.parametrize("allow_permutation", [True, False])
@pytest.mark.parametrize(("local", "remote"), PARTIAL)
def test_groups_of_which_only_some_tokens_are_wanted(local, remote, allow_permutation):
    local, remote = cache(**local), cache(**remote)
    whole = plan_transfer(local, remote, 0).tokens_per_group
    num_checked = 0
    for last in range(1, whole + 1):
        for first in range(0, last, local.tokens_per_page):
            for rank in range(local.world_size):
                check(
                    local, remote, rank, allow_permutation=allow_permutation, seed=last,
                    tokens=(first, last),
                )  # fmt: skip
                num_checked += 1
    assert num_checked >= whole


def test_a_partial_group_reads_no_page_without_tokens():
    local, remote = cache(block_size=8), cache(block_size=2)
    plan = plan_transfer(local, remote, 0).for_tokens(3)
    assert plan.remote_pages_per_group == 2 and set(plan.fragments.remote_page) == {0, 1}
    sharded = cache(block_size=2, cp_world_size=4)  # each rank has one token of four
    assert plan_transfer(local, sharded, 0).for_tokens(2).remote_ranks == (0, 1)
    nothing = plan_transfer(sharded, local, 3).for_tokens(3)  # rank 3's first is token 3
    assert nothing.num_fragments == 0 and nothing.bytes_per_group == {}
    for wrong in (of(num_tokens=0), of(num_tokens=9), of(num_tokens=8, first_token=3)):
        with pytest.raises(ValueError, match=r"num_tokens is|first_token is"):
            plan_transfer(local, remote, 0).for_tokens(**wrong)


def spoiled(**changes):
    """A change of the plan: `changes` maps a column of places or runs to what becomes of it."""

    def change(plan):
        patterns = []
        for pattern in plan.patterns:
            places, runs = pattern.places.copy(), pattern.runs.copy()
            changes.get("places", lambda table: None)(places)
            changes.get("runs", lambda table: None)(runs)
            patterns.append(replace(pattern, places=places, runs=runs))
        return replace(plan, patterns=tuple(patterns))

    return change


def swap_k_and_v(places):
    places[0::2, :2], places[1::2, :2] = places[1::2, :2].copy(), places[0::2, :2].copy()


def shift(column, by):
    def change(table):
        table[:, column] += by

    return change


def next_token(runs):
    runs[:, 1] = (runs[:, 1] + 4 * ROW) % (4 * 4 * ROW)


def half(runs):
    runs[:, 4] //= 2


def read_again_from_a_replica(plan):
    first = plan.patterns[0]
    again = replace(first, remote_rank=first.remote_rank + 1)
    return replace(plan, patterns=(*plan.patterns, again))


def read_twice(plan):
    return replace(plan, patterns=plan.patterns * 2)


ROW = 2 * 4  # bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoiled(places=shift(1, ROW)), "an element is not where it belongs"),  # another head
        (spoiled(runs=next_token), "an element is not where it belongs"),
        (spoiled(places=shift(1, 2)), "within an element"),
        (spoiled(places=shift(1, -(10**6))), "leaves its region"),
        (spoiled(places=shift(0, 4)), "a region that is not there"),
        (spoiled(places=shift(3, ROW)), "not exactly the bytes"),
        (spoiled(places=swap_k_and_v), "an element is not where it belongs"),
        (spoiled(runs=half), "not exactly the bytes"),
        (read_again_from_a_replica, "a local byte is written twice"),
        (read_twice, "a remote byte is fetched twice"),
        (lambda plan: replace(plan, patterns=plan.patterns[1:]), "not exactly the bytes"),
    ],
    ids=[
        "head", "token", "torn", "outside", "region", "local offset", "K and V", "half", "replica",
        "twice", "missing",
    ],
)  # fmt: skip
def test_planted_defects_are_found(change, message):
    # Local rank 0 holds 2 of 4 heads: of one remote rank that holds all, or of two that hold one each.
    local = cache(tp_size=2)
    for remote in (cache(), cache(tp_size=8)):
        check(local, remote, 0)
    replicated = change is read_again_from_a_replica
    with pytest.raises(Wrong, match=message):
        check(local, cache(tp_size=8) if replicated else cache(), 0, change=change)


@pytest.mark.parametrize(
    "wrong", [ReceivePermutation(4, "NHD"), ReceivePermutation(8, "HND"), None]
)
def test_a_wrong_permutation_is_found(wrong):
    local, remote = cache(block_size=8), cache(block_size=4, layout="HND")
    check(local, remote, 0)
    with pytest.raises(Wrong, match="an element is not where it belongs"):
        check(local, remote, 0, change=lambda plan: replace(plan, permutation=wrong))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("head_size", 8),
        ("v_head_size", 1),
        ("num_layers", 4),
        ("total_num_kv_heads", 8),
    ],
)
def test_engines_that_cannot_hold_the_same_are_refused(field, value):
    local, remote = cache(engine_id="L"), cache(engine_id="R", **{field: value})
    here = getattr(local, field)
    with pytest.raises(
        ValueError, match=rf"local {field} is {here!r}.*remote {field} is {value!r}"
    ):
        plan_transfer(local, remote, 0)


def test_mla_and_heads_are_refused_before_what_follows_from_it():
    latent = cache(is_mla=True, total_num_kv_heads=1)
    with pytest.raises(ValueError, match=r"local is_mla is True.*remote is_mla is False"):
        plan_transfer(latent, cache(), 0)
    with pytest.raises(ValueError, match="local_rank is 2: expected 0 to 1"):
        plan_transfer(cache(tp_size=2), cache(), 2)
    with pytest.raises(TypeError, match="remote is a dict"):
        plan_transfer(cache(), cache().to_dict(), 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (of(tp_size=3), "total_num_kv_heads is 4, tp_size is 3"),
        (of(pp_size=4), "num_layers is 2, pp_size is 4"),
        (of(cp_interleave=3), "cp_interleave is 3: expected a divisor of block_size, 4"),
        (of(block_size=0), "block_size is 0"),
        (of(layout="DHN"), "layout is 'DHN': expected one of NHD, HND"),
        (of(packing="loose"), "packing is 'loose'"),
        (of(dtype="int3"), "dtype is 'int3'"),
        (of(is_mla=True), "total_num_kv_heads is 4: expected 1 with is_mla"),
        (of(is_mla=True, total_num_kv_heads=1, v_head_size=2), "v_head_size is 2: expected 0"),
        (of(version=2), "version is 2: expected 1"),
    ],
)
def test_descriptions_of_what_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        cache(**values)


def test_a_description_crosses_by_json_and_pickle():
    one = cache(tp_size=2, layout="HND", cp_world_size=2, v_head_size=1)
    assert CacheDescription.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(replace(one))
    values = one.to_dict()
    without = {name: value for name, value in values.items() if name != "num_layers"}
    for wrong, message in (
        ({**values, "version": 7, "new": 1}, "version is 7: expected 1"),
        ({**values, "colour": 1}, r"unknown fields \['colour'\]"),
        (without, r"missing fields \['num_layers'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheDescription.from_dict(wrong)
    state = pickle.dumps(one).replace(b"version\x94K\x01", b"version\x94K\x05")
    with pytest.raises(ValueError, match="version is 5: expected 1"):
        pickle.loads(state)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("values", [of(v_head_size=1), of(is_mla=True, total_num_kv_heads=1)])
def test_place_is_where_the_plain_definition_has_it(packing, layout, values):
    one = cache(packing=packing, layout=layout, **values)
    memory = Memory(one, np.array([0]), np.array([[0]]), 1)
    sizes = [one.head_size, one.v_head_size][: len(one.row_bytes)]
    assert memory.region_length.tolist() == (one.region_bytes // 4).tolist()
    for layer, part, token, head in itertools.product(
        range(2), range(len(sizes)), range(4), range(one.total_num_kv_heads)
    ):
        region, offset = one.place(layer, part, token, head)
        element = memory.elements[0, memory.region_start[region] + offset // 4]
        code = ((token * 2 + layer) * one.total_num_kv_heads + head) * 2 + part
        assert element == code * max(sizes)


def test_ranks_are_numbered_context_pipeline_tensor():
    one = cache(tp_size=2, pp_size=2, cp_world_size=3)
    for number, at in enumerate(itertools.product(range(3), range(2), range(2))):
        assert one.coordinates(number) == at and one.rank_of(Coordinates(*at)) == number


@pytest.mark.parametrize(("heads", "is_mla"), [(2, False), (1, True)])
@pytest.mark.parametrize("sizes", list(itertools.product(SIZES, (1, 2), (1, 2, 4), (2, 8), (1, 2))))
def test_readers_are_spread_evenly_over_replicas(heads, is_mla, sizes):
    tp, pp, cp, remote_tp, remote_pp = sizes
    common = of(total_num_kv_heads=heads, is_mla=is_mla)
    local = cache(tp_size=tp, pp_size=pp, cp_world_size=cp, **common)
    remote = cache(tp_size=remote_tp, pp_size=remote_pp, **common)
    readers = Counter()
    for rank in range(local.world_size):
        plan = plan_transfer(local, remote, rank)
        for source in plan.remote_ranks:
            readers[source] += 1
            assert set(remote.layers(source)) & set(local.layers(rank))
    for pp_rank, head in itertools.product(range(remote_pp), range(heads)):
        tp_ranks = ranks_of_head(heads, remote_tp, head)
        counts = [readers[remote.rank_of(Coordinates(0, pp_rank, tp_rank))] for tp_rank in tp_ranks]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("heads", "is_mla"), [(1, True), (1, False), (2, False), (4, False), (8, False)]
)
def test_ranks_are_those_of_the_topology(heads, is_mla):
    num_checked = 0
    stages = (1, 2, 4)
    for tp, pp, remote_tp, remote_pp in itertools.product(SIZES, stages, SIZES, stages):
        common = of(num_layers=4, total_num_kv_heads=heads, is_mla=is_mla)
        local = cache(tp_size=tp, pp_size=pp, **common)
        remote = cache(tp_size=remote_tp, pp_size=remote_pp, **common)
        for rank in range(local.world_size):
            _, pp_rank, tp_rank = local.coordinates(rank)
            topology = KVTopology(
                "a", tp_rank=tp_rank, tp_size=tp, pp_rank=pp_rank, pp_size=pp,
                total_num_kv_heads=heads, is_mla=is_mla,
            )  # fmt: skip
            targets = topology.get_target_remote_ranks(remote_tp, remote_pp)
            ranks = plan_transfer(local, remote, rank).remote_ranks
            assert ranks == tuple(number for number, _, _ in targets)
            num_checked += 1
    assert num_checked == (1 + 2 + 4 + 8) * (1 + 2 + 4) * len(SIZES) * len(stages)


@pytest.mark.parametrize(
    ("local", "remote", "permutation", "num_fragments"),
    [
        # Two layers, K and V: four parts.
        (of(), of(), None, 4),
        (of(packing="block_major"), of(packing="block_major"), None, 1),
        (of(packing="block_major"), of(packing="blocks_first"), None, 2),
        (of(packing="blocks_first"), of(packing="apart"), None, 4),
        (of(), of(layout="HND"), (4, "HND"), 4),
        (of(layout="HND"), of(), (4, "NHD"), 4),
        (of(packing="block_major"), of(packing="block_major", layout="HND"), (4, "HND"), 1),
        (of(layout="HND", block_size=16), of(layout="HND"), (4, "HND"), 16),
        (of(layout="HND"), of(layout="HND", block_size=16), (16, "HND"), 16),
        (of(block_size=16), of(), None, 16),  # NHD of another block size is the same rows
        (of(block_size=16), of(layout="HND", tp_size=2), (4, "HND"), 32),
        (of(), of(tp_size=2), None, 2 * 4 * 4),  # heads of two ranks, token by token
        (of(layout="HND"), of(tp_size=2), (4, "NHD"), 2 * 4 * 4),
        (of(tp_size=4), of(layout="HND", tp_size=4), None, 4),  # one head: the same order
        (of(cp_world_size=2), of(layout="HND"), None, 64),
        (of(cp_world_size=2), of(layout="HND", cp_world_size=2), (4, "HND"), 4),
        (of(cp_world_size=2, cp_interleave=2), of(layout="HND", cp_world_size=2), None, 64),
    ],
)
def test_the_fewest_fragments_are_chosen(local, remote, permutation, num_fragments):
    plan = plan_transfer(cache(**local), cache(**remote), 0)
    assert (plan.permutation, plan.num_fragments) == (permutation, num_fragments)
    exact = plan_transfer(cache(**local), cache(**remote), 0, allow_permutation=False)
    assert exact.permutation is None
    assert exact.num_fragments > num_fragments or permutation is None
    assert len(plan.fragments.length) == num_fragments


@pytest.mark.parametrize("packings", list(itertools.product(PACKINGS, repeat=2)))
@pytest.mark.parametrize(("local", "remote"), [*PARTIAL, (of(tp_size=2), of(tp_size=8))])
def test_no_two_fragments_could_be_one(local, remote, packings):
    local, remote = ({**side, "packing": p} for side, p in zip((local, remote), packings))
    f = plan_transfer(cache(**local), cache(**remote), 0, allow_permutation=False).fragments
    ends = set(
        zip(
            f.remote_rank, f.remote_page, f.remote_region, f.remote_offset + f.length,
            f.local_page, f.local_region, f.local_offset + f.length,
        )
    )  # fmt: skip
    begins = set(zip(*f[:-1]))
    assert len(begins) == len(f.length) and not ends & begins


def test_neighbouring_pages_that_move_whole_are_one_run():
    plan = plan_transfer(cache(), cache(), 0)
    assert plan.is_whole_pages and plan.bytes_per_group == {0: 4 * 4 * 4 * 8}
    pages = np.arange(10, dtype=np.int32)[:, None]
    assert plan.apply(pages, pages + 5).num_fragments == 4
    assert plan.apply(pages[::-1], pages[::-1] + 5).num_fragments == 4
    assert plan.apply(pages, pages[::-1]).num_fragments == 40
    assert plan.apply(pages[:0], pages[:0]).num_fragments == 0
    parts = plan_transfer(cache(block_size=16), cache(), 0)  # four remote pages fill a local one
    assert not parts.is_whole_pages
    remote = np.arange(40).reshape(10, 4)
    assert parts.apply(pages, remote).num_fragments == 4
    remote[3, 2] = 77
    assert parts.apply(pages, remote).num_fragments == 4 * 3
    torn = plan_transfer(cache(tp_size=2), cache(), 0)
    assert not torn.is_whole_pages and torn.apply(pages, pages).num_fragments == 160


def test_pages_that_do_not_fit_are_refused():
    plan = plan_transfer(cache(), cache(tp_size=2), 0)
    pages = np.zeros((3, 1), np.int32)
    for local, remote, error, message in (
        (pages[:, 0], pages, ValueError, r"local_pages has shape \[3\]: expected \[groups, 1\]"),
        (pages, pages[:2], ValueError, "rank 0 has 2 groups, local_pages 3"),
        (pages, {0: pages}, ValueError, r"remote_pages has ranks \[0\]: expected also \[1\]"),
        (pages - 1, pages, ValueError, "local_pages holds -1"),
        (pages, pages.astype(float), TypeError, "remote_pages has dtype float64"),
    ):
        with pytest.raises(error, match=message):
            plan.apply(local, remote)


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (of(block_size=8), of(block_size=2, layout="HND")),
        (of(block_size=8, layout="HND"), of(block_size=2, layout="HND")),
        (of(block_size=2, layout="HND"), of(block_size=8, layout="HND")),
        (of(block_size=4, layout="HND"), of(block_size=4, layout="NHD")),
    ],
)
def test_the_permutation_is_the_one_of_the_op(local, remote):
    import torch

    from kvcache import KVStorage
    from kvcache.transfer import permute_received_blocks

    local, remote = cache(**local), cache(**remote)
    plan = plan_transfer(local, remote, 0)
    pages = np.array([[5, 2, 7, 1], [0, 4, 3, 6]])[:, : plan.local_pages_per_group]
    memory = Memory(local, np.array([0]), pages.reshape(1, -1), 8)
    elements = np.random.default_rng(0).permutation(len(memory.elements[0])).astype(np.float32)
    storage = KVStorage(
        8, local.block_size, 4, 2, num_layers=2, dtype=torch.float32, layout=local.layout
    )
    for layer, part in itertools.product(range(2), range(2)):
        fragment = storage.pages.fragment(2 * layer + part).view(torch.float32)
        fragment.copy_(torch.from_numpy(memory.part(elements, layer, part)))
    caches = [c for i in range(2) for c in (storage.key_cache(i), storage.value_cache(i))]
    permute_received_blocks(caches, pages, **plan.permutation._asdict())
    memory.permute(elements, pages, *plan.permutation)
    for layer, part in itertools.product(range(2), range(2)):
        got = storage.pages.fragment(2 * layer + part).view(torch.float32).numpy()
        assert np.array_equal(got, memory.part(elements, layer, part))
