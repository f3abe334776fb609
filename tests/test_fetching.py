"""Ranges of a request's tokens, of several groups, with null pages on either side."""

import ctypes
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcache import KVStorage
from kvcache.transfer import (
    CacheDescription,
    StateDescription,
    StateTensor,
    permute_pages,
    plan_states,
    plan_transfer,
    region_addresses,
)
from kvcache.transfer.fetching import GroupFetch, fetch
from kvcache.transfer.plan.token_range import plan_range
from kvcache.transfer.transport.base import TransferError, make_transport
from kvcache.worker.pages.pages import Pages
from tests.shared import sampled

HEADS, LAYERS, SIZE, SPARE = 4, 2, 8, 3
EMPTY = -1.0


class Engine:
    """One rank's pages and the block table of one request in them. An element names its token, layer, K
    or V, head and place; of pages that are not filled all are EMPTY."""

    def __init__(self, cache, rank, num_tokens, rng, *, window, filled):
        self.cache, self.rank = cache, rank
        self.heads = cache.heads(rank)
        self.cp_rank = cache.coordinates(rank).cp_rank
        pages = -(-num_tokens // cache.tokens_per_page)
        self.storage = KVStorage(
            pages + SPARE,
            cache.block_size,
            num_kv_heads=len(self.heads),
            head_size=SIZE,
            num_layers=LAYERS,
            dtype=torch.float32,
            layout=cache.layout,
            backend=rng.choice(["FLASH_ATTN", "FLASHINFER"]),
        )
        self.cache = replace(cache, memory_order=self.storage.memory_order)
        ids = list(range(1, pages + SPARE))
        rng.shuffle(ids)
        self.ids = np.array(ids[:pages])
        self.ids[: rng.randint(0, pages) if window else 0] = 0  # slid out of a window
        for layer in range(LAYERS):
            for kv, part in enumerate(self.parts(layer)):
                part.fill_(EMPTY)
                if filled:
                    for token in range(num_tokens):
                        if (at := self.at(token)) is not None:
                            part[at] = self.value(token, layer, kv)

    def parts(self, layer):
        """[num_blocks, block_size, heads, SIZE] of K and V."""
        return self.storage.key_cache(layer), self.storage.value_cache(layer)

    def at(self, token):
        """(page, token in it), or None where this rank does not have it."""
        chunk, within = divmod(token, self.cache.cp_interleave)
        if chunk % self.cache.cp_world_size != self.cp_rank:
            return None
        mine = chunk // self.cache.cp_world_size * self.cache.cp_interleave + within
        page = self.ids[mine // self.cache.block_size]
        return None if page == 0 else (int(page), mine % self.cache.block_size)

    def value(self, token, layer, kv):
        """[heads, SIZE]"""
        head = torch.tensor(list(self.heads))[:, None]
        name = ((token * LAYERS + layer) * 2 + kv) * HEADS + head
        return (name * SIZE + torch.arange(SIZE)).float()

    def addresses(self):
        return region_addresses(self.cache, self.storage.pages, self.rank)

    def check(self, sources, first, end, num_tokens):
        """Tokens of the range that a source has are right; others are right or untouched."""
        tables = {}
        for token in range(num_tokens):
            if (at := self.at(token)) is not None:
                tables[at] = token
        for layer in range(LAYERS):
            for kv, part in enumerate(self.parts(layer)):
                for page in range(part.shape[0]):
                    for slot in range(part.shape[1]):
                        token = tables.get((page, slot))
                        got = part[page, slot]
                        if (
                            token is None
                        ):  # no token of the request: garbage of a shared page, or EMPTY
                            assert page in self.ids[self.ids > 0] or (got == EMPTY).all()
                            continue
                        right = self.value(token, layer, kv)
                        has = any(source.at(token) is not None for source in sources)
                        ok = torch.equal(got, right)
                        if first <= token < end and has:
                            assert ok, (token, layer, kv)
                        assert ok or (got == EMPTY).all(), (token, layer, kv)


def drawn(rng):
    def side(name):
        return CacheDescription(
            engine_id=name,
            num_layers=LAYERS,
            total_num_kv_heads=HEADS,
            head_size=SIZE,
            dtype="float32",
            block_size=rng.choice([4, 8, 16, 6]),
            tp_size=rng.choice([1, 2, 4]),
            memory_order=("kv", "block", *rng.choice([("token", "head"), ("head", "token")]), "element"),
        )  # fmt: skip

    sides = [side("local"), side("remote")]
    if rng.random() < 0.3:
        with_ranks = rng.randrange(2)
        sides[with_ranks] = replace(
            sides[with_ranks], cp_world_size=2, cp_interleave=rng.choice([1, 2])
        )
    return sides


def engines(rng):
    """A local rank, and all remote ranks that its plan reads, with the plan."""
    local, remote = drawn(rng)
    num_tokens = rng.randint(1, 100)
    rank = rng.randrange(local.world_size)
    mine = Engine(local, rank, num_tokens, rng, window=rng.random() < 0.5, filled=False)
    windows = rng.random() < 0.5
    backends = rng.getstate()
    theirs = {}
    for number in range(remote.world_size):
        rng.setstate(backends)  # the same layout and table on all ranks
        theirs[number] = Engine(remote, number, num_tokens, rng, window=windows, filled=True)
    plan = plan_transfer(mine.cache, theirs[0].cache, rank)
    return mine, theirs, plan, num_tokens


@pytest.mark.parametrize("trials", sampled([40, 400]))
def test_any_range_of_tokens_with_null_pages_on_both_sides(trials):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    permuted = missing = 0
    for _ in range(trials):
        mine, theirs, plan, num_tokens = engines(rng)
        first = rng.randint(0, num_tokens)
        end = rng.randint(first, num_tokens)
        given = theirs[0].ids if rng.random() < 0.5 else {r: e.ids for r, e in theirs.items()}
        found = plan_range(plan, mine.ids, given, first, end)
        addresses = {rank: engine.addresses() for rank, engine in theirs.items()}
        here, moved = mine.addresses(), found.runs.expand()
        written = set()
        for rank, r, r_at, mine_r, at, n in zip(*(column.tolist() for column in moved)):
            begin = int(here[mine_r]) + at
            assert begin not in written
            written.add(begin)
            ctypes.memmove(begin, int(addresses[rank][r]) + r_at, n)
        permute_pages(
            mine.storage, found.permuted, plan.permutation if len(found.permuted) else None
        )
        permuted += len(found.permuted)
        sources = [theirs[rank] for rank in plan.remote_ranks]
        mine.check(sources, first, end, num_tokens)
        expected = []
        for page in mine.ids[mine.ids > 0]:
            tokens = [t for t in range(first, end) if (at := mine.at(t)) and at[0] == page]
            has = [t for t in tokens if any(s.at(t) is not None for s in sources)]
            if tokens and not has:
                expected.append(int(page))
        assert set(expected) >= set(found.missing.tolist())
        missing += len(found.missing)
    assert trials < 100 or (permuted and missing)


def test_an_empty_range_moves_nothing():
    rng = random.Random(0)
    mine, theirs, plan, num_tokens = engines(rng)
    found = plan_range(plan, mine.ids, theirs[0].ids, num_tokens, num_tokens)
    assert found.runs.num_bytes == 0 and len(found.permuted) == len(found.missing) == 0


@pytest.mark.parametrize(
    "local, remote, tokens, said",
    [
        ([1, 2], [1, 2], (0, 9), "end_token is 9: expected at most 8"),
        ([1, 2], [1, 2], (5, 4), "first_token is 5: expected 0 to 4"),
        ([1, 1], [1, 2], (0, 8), "local_ids has page 1 twice"),
        ([1, -2], [1, 2], (0, 8), "local_ids holds -2"),
        ([1, 2], [1, 2**31], (0, 8), "remote_ids holds 2147483648"),
        ([[1, 2]], [1, 2], (0, 8), "local_ids has shape [1, 2]"),
        ([1.5, 2], [1, 2], (0, 8), "local_ids has dtype float64"),
        ([1, 2], {1: [1, 2]}, (0, 8), "remote_ids has ranks [1]: expected also [0]"),
    ],
)
def test_wrong_tables_are_refused(local, remote, tokens, said):
    cache = CacheDescription(
        engine_id="a", num_layers=1, total_num_kv_heads=1, head_size=8, block_size=4
    )
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        plan_range(plan_transfer(cache, cache, 0), local, remote, *tokens)


# With a transport.


@pytest.fixture
def transports():
    both = make_transport("local", "gloo", timeout_s=10), make_transport("remote", "gloo")
    yield both
    for each in both:
        each.close()


def group_of(mine, theirs, plan):
    return GroupFetch(
        plan,
        mine.ids,
        theirs[0].ids,
        mine.addresses(),
        {rank: engine.addresses() for rank, engine in theirs.items()},
        mine.storage,
    )


def registered(transports, groups):
    local, remote = transports
    for mine, theirs, _, _ in groups:
        local.register(mine.storage.pages)
        for engine in theirs.values():
            remote.register(engine.storage.pages)
    peer = local.connect(remote.metadata())
    return {rank: peer for _, theirs, _, _ in groups for rank in theirs}


def test_all_groups_of_a_request_come_with_one_fetch(transports):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    groups = [engines(rng) for _ in range(3)]
    num_tokens = min(each[3] for each in groups)
    peers = registered(transports, groups)
    first = rng.randint(0, num_tokens - 1)
    got = fetch(
        transports[0],
        peers,
        [group_of(*each[:3]) for each in groups],
        first,
        num_tokens,
        notify=b"done",
    )
    got.wait(20)
    assert got.poll() and got.is_released and len(got.missing) == 3
    for mine, theirs, plan, all_tokens in groups:
        sources = [theirs[rank] for rank in plan.remote_ranks]
        mine.check(sources, first, num_tokens, all_tokens)
    while not (messages := transports[1].notifications()):
        pass
    assert messages == [("local", b"done")]


def test_states_come_whole_and_null_ones_are_skipped(transports):
    tensors = [StateTensor(sections=[(2, 4)], row_size=3, dtype="float32")]
    state = StateDescription(engine_id="a", num_layers=2, tensors=tensors)
    plan = plan_states(state, replace(state, engine_id="b"), 0)
    size = state.state_bytes(0)
    memory = [
        [torch.full((5, size), fill, dtype=torch.uint8) for fill in fills]
        for fills in ((0, 0), (11, 22))
    ]
    pages = [Pages.over(layers) for layers in memory]
    for transport, each in zip(transports, pages):
        transport.register(each)
    peer = transports[0].connect(transports[1].metadata())
    addresses = [region_addresses(state, each) for each in pages]
    group = GroupFetch(
        plan, np.array([3, 0, 4]), np.array([1, 2, 0]), addresses[0], {0: addresses[1]}
    )
    got = fetch(transports[0], {0: peer}, [group], 0, 1)
    got.wait(10)
    for layer, fill in zip(memory[0], (11, 22)):
        assert (layer[3] == fill).all() and not layer[[0, 1, 2, 4]].any()
    assert got.missing[0].tolist() == [4]


def test_a_fetch_whose_part_is_refused_moves_nothing_more(transports):
    groups = [engines(random.Random(4))]
    mine, theirs, plan, num_tokens = groups[0]
    peers = registered(transports, groups)
    group = group_of(mine, theirs, plan)
    wrong = replace(group, local_addresses=group.local_addresses + 2**40)
    with pytest.raises(ValueError, match="local has bytes"):
        fetch(transports[0], peers, [wrong], 0, num_tokens)
    with pytest.raises(ValueError, match="peers of group 0 has ranks"):
        fetch(transports[0], {}, [group], 0, num_tokens)
    assert all((part == EMPTY).all() for layer in range(LAYERS) for part in mine.parts(layer))


def test_a_fetch_from_a_peer_that_left_fails_and_is_released(transports):
    groups = [engines(random.Random(6))]
    mine, theirs, plan, num_tokens = groups[0]
    peers = registered(transports, groups)
    transports[1].close()
    with pytest.raises(TransferError):
        fetch(transports[0], peers, [group_of(mine, theirs, plan)], 0, num_tokens).wait(5)


class HalfTransport:
    """Refuses all reads but the first, which goes on until a test says that it is over."""

    def __init__(self):
        self.begun = None

    def read_spans(self, peer, local, remote, **options):
        if self.begun is not None:
            raise TransferError("the peer has gone")
        self.begun = HalfTransfer()
        return self.begun


class HalfTransfer:
    num_bytes, is_released = 1, False

    def cancel(self, reason):
        self.reason = reason


def test_pages_of_a_fetch_that_was_refused_in_the_midst_are_known():
    """What has begun may still write to them, so it must not be lost with an exception."""
    seed, transport = 0, HalfTransport()
    while True:
        mine, theirs, plan, num_tokens = engines(random.Random(seed))
        seed += 1
        if len(plan_range(plan, mine.ids, theirs[0].ids, 0, num_tokens).runs.by_rank) > 1:
            break
    remote = {rank: engine.addresses() for rank, engine in theirs.items()}
    group = GroupFetch(plan, mine.ids, theirs[0].ids, mine.addresses(), remote, mine.storage)
    found = fetch(transport, dict.fromkeys(remote, "peer"), [group], 0, num_tokens)
    with pytest.raises(TransferError, match="the peer has gone"):
        found.poll()
    assert not found.is_released and "the peer has gone" in transport.begun.reason
    transport.begun.is_released = True
    assert found.is_released
