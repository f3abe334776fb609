# SPDX-License-Identifier: Apache-2.0
"""Fetching token ranges of a request in several groups, with null pages on either side."""

import ctypes
import random
import re
import time
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
from kvcache.transfer.transport.base import TransferError
from kvcache.worker.pages.pages import Pages
from kvcache_exchange.transport.factory import make_transport
from tests.machinery.shared import sampled, seed_of_test

HEADS, LAYERS, SIZE, SPARE = 4, 2, 8, 3
FORMS = [{"backend": name} for name in ("FLASH_ATTN", "FLASHINFER", "FLASH_ATTN_DIFFKV")]
FORMS += [{"backend": name, "cross_layers": True} for name in ("BLOCK_MAJOR", "TRITON_ATTN")]
EMPTY = -1.0


class Engine:
    """The pages of one rank, and the block table of one request.

    The value of each element encodes its token, layer, K or V, head and position. Pages that are
    not filled contain EMPTY.
    """

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
            v_head_size=cache.v_head_size,
            num_layers=LAYERS,
            dtype=torch.float32,
            layout=cache.layout,
            **rng.choice(FORMS),
        )
        self.cache = replace(cache, memory_order=self.storage.memory_order)
        ids = list(range(1, pages + SPARE))
        rng.shuffle(ids)
        self.ids = np.array(ids[:pages])
        self.ids[: rng.randint(0, pages) if window else 0] = 0  # pages outside the window are null
        for layer in range(LAYERS):
            for kv, part in enumerate(self.parts(layer)):
                part.fill_(EMPTY)
                if filled:
                    for token in range(num_tokens):
                        if (at := self.at(token)) is not None:
                            part[at] = self.value(token, layer, kv)

    def parts(self, layer):
        """Return K and V as [num_blocks, block_size, heads, SIZE]."""
        return self.storage.key_cache(layer), self.storage.value_cache(layer)

    def at(self, token):
        """Return (page, position in the page) of a token, or None if this rank does not have the
        token.
        """
        chunk, within = divmod(token, self.cache.cp_interleave)
        if chunk % self.cache.cp_world_size != self.cp_rank:
            return None
        mine = chunk // self.cache.cp_world_size * self.cache.cp_interleave + within
        page = self.ids[mine // self.cache.block_size]
        return None if page == 0 else (int(page), mine % self.cache.block_size)

    def value(self, token, layer, kv):
        """Return the values of a token's K or V as [heads, head size]."""
        head = torch.tensor(list(self.heads))[:, None]
        name = ((token * LAYERS + layer) * 2 + kv) * HEADS + head
        return (name * SIZE + torch.arange(self.cache.v_head_size if kv else SIZE)).float()

    def addresses(self):
        return region_addresses(self.cache, self.storage.pages, self.rank)

    def check(self, sources, first, end, num_tokens):
        """Check that tokens in the range are correct if some source has them, and that all others are
        correct or unchanged.
        """
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
                        if token is None:
                            # This slot holds no token of the request. It may contain garbage if its
                            # page has other tokens of the request, and must be EMPTY otherwise.
                            assert page in self.ids[self.ids > 0] or (got == EMPTY).all()
                            continue
                        right = self.value(token, layer, kv)
                        has = any(source.at(token) is not None for source in sources)
                        ok = torch.equal(got, right)
                        if first <= token < end and has:
                            assert ok, (token, layer, kv)
                        assert ok or (got == EMPTY).all(), (token, layer, kv)


def drawn(rng):
    v_head_size = rng.choice([SIZE, SIZE // 2])

    def side(name):
        return CacheDescription(
            engine_id=name,
            num_layers=LAYERS,
            total_num_kv_heads=HEADS,
            head_size=SIZE,
            v_head_size=v_head_size,
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
    """Return a local rank, all remote ranks that its plan reads from, and the plan."""
    local, remote = drawn(rng)
    num_tokens = rng.randint(1, 100)
    rank = rng.randrange(local.world_size)
    mine = Engine(local, rank, num_tokens, rng, window=rng.random() < 0.5, filled=False)
    windows = rng.random() < 0.5
    backends = rng.getstate()
    theirs = {}
    for number in range(remote.world_size):
        rng.setstate(backends)  # all ranks have the same layout and block table
        theirs[number] = Engine(remote, number, num_tokens, rng, window=windows, filled=True)
    plan = plan_transfer(mine.cache, theirs[0].cache, rank)
    return mine, theirs, plan, num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("trials", sampled([20, 200]))
def test_any_token_range_arrives_with_null_pages_on_both_sides(trials):
    seed = seed_of_test()
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


NUM_TOKENS = 21


def named(layer, kv):
    """Return [tokens, heads, SIZE] whose values encode token, layer, K or V, head and position."""
    token, head, place = torch.meshgrid(
        torch.arange(NUM_TOKENS), torch.arange(HEADS), torch.arange(SIZE), indexing="ij"
    )
    return ((((token * 8 + layer) * 2 + kv) * HEADS + head) * SIZE + place).float()


def cells(ids, block_size):
    """Return (blocks, positions in the blocks) for all tokens of a request with these blocks."""
    token = torch.arange(NUM_TOKENS)
    return torch.tensor(ids)[token // block_size], token % block_size


def test_stages_with_different_block_sizes_are_fetched_separately(transports):
    """Each stage is described as a separate engine, and so are the matching local layers."""
    storage = KVStorage(9, 4, HEADS, SIZE, num_layers=3, dtype=torch.float32, backend="FLASHINFER")
    ids = [3, 8, 1, 6, 4, 2]
    for layer in range(3):
        storage.kv_caches[layer].fill_(EMPTY)
    stages = [(range(2), 8, [5, 2, 7]), (range(2, 3), 16, [4, 1])]
    groups = []
    for number, (layers, block_size, their_ids) in enumerate(stages):
        theirs = KVStorage(9, block_size, HEADS, SIZE, num_layers=len(layers), dtype=torch.float32)
        for at, layer in enumerate(layers):
            for kv, part in enumerate((theirs.key_cache(at), theirs.value_cache(at))):
                part.fill_(EMPTY)
                part[cells(their_ids, block_size)] = named(layer, kv)
        remote = CacheDescription(
            engine_id=f"stage {number}", num_layers=len(layers), total_num_kv_heads=HEADS,
            head_size=SIZE, dtype="float32", block_size=block_size, memory_order=theirs.memory_order,
        )  # fmt: skip
        local = replace(remote, engine_id="d", block_size=4, memory_order=storage.memory_order)
        own = KVStorage.from_tensors([storage.kv_caches[i] for i in layers], backend="FLASHINFER")
        transports[0].register(own.pages)
        transports[1].register(theirs.pages)
        groups.append(
            GroupFetch(
                plan_transfer(local, remote, 0),
                np.array(ids),
                np.array(their_ids),
                region_addresses(local, own.pages),
                {0: region_addresses(remote, theirs.pages)},
                own,
            )
        )
    peer = transports[0].connect(transports[1].metadata())
    fetch(transports[0], {0: peer}, groups, 0, NUM_TOKENS).wait(10)
    for layer in range(3):
        for kv, part in enumerate((storage.key_cache(layer), storage.value_cache(layer))):
            assert torch.equal(part[cells(ids, 4)], named(layer, kv))
            assert (part[[0, 5, 7]] == EMPTY).all()


@pytest.mark.parametrize("local, remote, tokens, said", [
    ([1, 2], [1, 2], (0, 9), "end_token is 9: expected at most 8"),
    ([1, 2], [1, 2], (5, 4), "first_token is 5: expected 0 to 4"),
    ([1, 1], [1, 2], (0, 8), "local_ids has page 1 twice"),
    ([1, -2], [1, 2], (0, 8), "local_ids holds -2"),
    ([1, 2], [1, 2**31], (0, 8), "remote_ids holds 2147483648"),
    ([[1, 2]], [1, 2], (0, 8), "local_ids has shape [1, 2]"),
    ([1.5, 2], [1, 2], (0, 8), "local_ids has dtype float64"),
    ([1, 2], {1: [1, 2]}, (0, 8), "remote_ids is missing ranks [0] (ranks present: [1])"),
])  # fmt: skip
def test_invalid_tables_are_rejected(local, remote, tokens, said):
    cache = CacheDescription(
        engine_id="a", num_layers=1, total_num_kv_heads=1, head_size=8, block_size=4
    )
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        plan_range(plan_transfer(cache, cache, 0), local, remote, *tokens)


# Tests that use a transport.


@pytest.fixture
def transports():
    both = make_transport("local", "tcp", timeout_s=30), make_transport("remote", "tcp")
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


def test_one_fetch_transfers_all_groups(transports):
    seed = seed_of_test()
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
    deadline = time.monotonic() + 20
    while not (messages := transports[1].notifications()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert messages == [("local", b"done")]


def test_states_are_transferred_whole_and_null_states_skipped(transports):
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
    got.wait(20)
    for layer, fill in zip(memory[0], (11, 22)):
        assert (layer[3] == fill).all() and not layer[[0, 1, 2, 4]].any()
    assert got.missing[0].tolist() == [4]


def test_fetch_with_rejected_part_moves_nothing_more(transports):
    groups = [engines(random.Random(4))]
    mine, theirs, plan, num_tokens = groups[0]
    peers = registered(transports, groups)
    group = group_of(mine, theirs, plan)
    wrong = replace(group, local_addresses=group.local_addresses + 2**40)
    with pytest.raises(ValueError, match="local has bytes"):
        fetch(transports[0], peers, [wrong], 0, num_tokens)
    with pytest.raises(ValueError, match="peers of group 0 is missing rank"):
        fetch(transports[0], {}, [group], 0, num_tokens)
    assert all((part == EMPTY).all() for layer in range(LAYERS) for part in mine.parts(layer))


def test_fetch_from_departed_peer_fails_and_is_released(transports):
    groups = [engines(random.Random(6))]
    mine, theirs, plan, num_tokens = groups[0]
    peers = registered(transports, groups)
    transports[1].close()
    with pytest.raises(TransferError):
        fetch(transports[0], peers, [group_of(mine, theirs, plan)], 0, num_tokens).wait(20)


class HalfTransport:
    """A transport that rejects all reads except the first, which continues until the test ends it."""

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


def test_partially_rejected_fetch_reports_its_pages():
    """Reads that have started may still write to their pages, so the exception must list these
    pages.
    """
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
