# SPDX-License-Identifier: Apache-2.0
"""Tests of a store tier over several ranks. The tier must return a single result for all ranks,
whatever a rank or its store does.
"""

from __future__ import annotations

import pickle
import random
import time
from collections import deque
from dataclasses import replace

import pytest

from kvcache import (
    Admit,
    ContextParallel,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    Pages,
    Request,
    StepReport,
)
from kvcache_exchange.store import Share, StoreRank, StoreTier, cache_identity, fingerprint
from kvcache_exchange_tests.test_store import LONG, MIXES
from kvcache_lab.running import Running
from kvcache_lab.verifier import KVVerifier
from tests.machinery.shared import sampled
from tests.machinery.stores import FAULTS, MemoryStore, StoreUser, patient

FULL = GroupSpec("full_attention", 4)


class Link:
    """A connection to a rank. It delivers orders at the latest before the next plan.

    Results are delayed, or never delivered (`is_silent`). Orders and results are pickled.
    """

    def __init__(self, rank, choose=None):
        self.rank, self.choose = rank, random.Random(0) if choose is None else choose
        self.description = pickle.loads(pickle.dumps(rank.description))
        self.orders, self.results = deque(), deque()
        self.lag, self.is_silent = 0.0, False

    def begin(self, orders):
        self.orders.append(pickle.dumps(orders))

    def deliver(self):
        while self.orders:
            self.rank.begin(pickle.loads(self.orders.popleft()))

    def work(self):
        """Run the rank between steps."""
        self.deliver()
        if (results := self.rank.take_results()) is not None:
            self.results.append(pickle.dumps(results))

    def take_results(self):
        if self.choose.random() >= self.lag:
            self.work()
        if self.is_silent or not self.results or self.choose.random() < self.lag:
            return None
        return pickle.loads(self.results.popleft())

    def close(self, timeout_s):
        self.deliver()
        return self.rank.close(timeout_s)


class RankedVerifier:
    """The verifiers of all ranks, which have different numbers of layers."""

    def __init__(self, num_ranks, **sizes):
        self.of_rank = [KVVerifier(num_layers=2 + i, **sizes) for i in range(num_ranks)]
        self.links = []

    def reserve(self, num_tokens):
        for each in self.of_rank:
            each.reserve(num_tokens)

    def apply(self, plan):
        for link, verifier in zip(self.links, self.of_rank):
            link.deliver()
            verifier.apply(plan)
            link.deliver()

    def check_arrival(self, span):
        return self._first(each.check_arrival(span) for each in self.of_rank)

    def check(self, span):
        return self._first(each.check(span) for each in self.of_rank)

    def write(self, span):
        for each in self.of_rank:
            each.write(span)

    @staticmethod
    def _first(found):
        return max(found, key=lambda each: each[0])


class RankedUser(StoreUser):
    """An engine with a rank for each of the given stores."""

    def __init__(self, stores, groups=(FULL,), choose=None, **options):
        self.stores, self.choose = stores, choose
        super().__init__(None, [*groups], **options)

    @property
    def verifiers(self):
        return self.verifier.of_rank

    def make_verifier(self, **sizes):
        return RankedVerifier(len(self.stores), **sizes)

    def make_tier(self, of_tier, of_rank):
        self.of_rank = of_rank | {"with_host": of_tier["write_from"] in ("auto", "host")}
        self.links = [self.make_link(i) for i in range(len(self.stores))]
        self.verifier.links = self.links
        return StoreTier.over(self.manager, self.links, **of_tier)

    def make_link(self, i):
        given = dict(self.of_rank)
        verifier = self.verifier.of_rank[i]
        host = verifier._host if given.pop("with_host") else None
        given |= self.of_verifier(verifier) | {"host_pages": host, "rank": f"stage {i}"}
        if given["circuit"] is not None:
            given["circuit"] = patient()
        identity = pickle.loads(pickle.dumps(cache_identity(self.manager)))
        rank = StoreRank(identity, verifier.storage.pages, self.stores[i], **given)
        return Link(rank, self.choose)

    def kill(self, i):
        """End a rank before it has received its last orders, and replace it with a new rank."""
        self.links[i].rank.close(10)
        lose(self.verifier.of_rank[i])
        self.links[i] = self.make_link(i)
        self.tier.replace_rank(i, self.links[i])
        for each in [*self.receiving.values()]:
            self.cancel(each)
            self.waiting.append(Running(each.item, each.request, 0))
        for each in [*self.running.values()]:
            self.manager.free(each.request)
            self.waiting.append(Running(each.item, each.request, 0))
        self.running.clear()
        assert self.manager.cache.reset()

    def ranks(self):
        return [(link.rank, store) for link, store in zip(self.links, self.stores)]

    def end(self):
        for each in self.links:
            each.lag, each.is_silent = 0.0, False
        super().end()
        for each in self.links:
            each.work()


def lose(verifier):
    """Overwrite all of a rank's pages."""
    for pages in filter(None, (verifier.storage.pages, verifier._host)):
        for region in range(len(pages.sizes)):
            pages.fragment(region)[1:] = 255


def stores_of(num_ranks=2, **options):
    return [MemoryStore(**options) for _ in range(num_ranks)]


@pytest.fixture
def user_of():
    """Create engines, and check at the end of the test that nothing remains of their requests."""
    made = []

    def make(*args, **options):
        made.append(RankedUser(*args, **options))
        return made[-1]

    yield make
    for user in made:
        user.end()


def filled(num_ranks=2, groups=(FULL,), **options):
    """Return stores that contain the blocks of the prompt LONG."""
    stores = stores_of(num_ranks)
    user = RankedUser(stores, groups, **options)
    user.run(LONG)
    user.settle()
    user.end()
    return stores


def loading_long(user):
    """Run steps until the user loads the prompt LONG."""
    user.add(LONG)
    while not user.receiving:
        user.step()
    return user


def test_only_blocks_that_all_ranks_find_are_loaded(user_of):
    stores = filled()
    for store, place in zip(stores, (5, 3)):
        del store.values[[*store.values][place]]
    for num_loaded in (12, 28):  # the first engine stores the missing blocks on all ranks
        user = user_of(stores)
        user.run(LONG)
        assert user.num_loaded == num_loaded
        user.settle()


@pytest.mark.parametrize("during", ["lookup", "load"])
def test_rank_that_does_not_answer_is_a_miss(user_of, during):
    user = user_of(filled(), timeout_s=0.2)
    user.add(LONG)
    while during == "load" and not user.receiving:
        user.step()
    user.links[1].is_silent = True
    user.run([7] * 30, timeout_s=30)
    assert user.num_loaded == 0 and user.num_finished == 2
    user.links[1].is_silent = False
    user.manager.cache.reset()
    user.settle()
    user.run(LONG)
    assert user.num_loaded == 28


@pytest.mark.parametrize("replaced", [0, 1])
def test_replaced_rank_continues_with_its_store(user_of, replaced):
    user = loading_long(user_of(filled()))
    # The process of a rank ends, and its pages are lost.
    user.links[replaced].rank.close(10)
    lose(user.verifier.of_rank[replaced])
    link = user.links[replaced] = user.make_link(replaced)
    user.tier.replace_rank(replaced, link)
    user.run()
    assert user.num_loaded == 0 and user.num_finished == 1
    user.manager.cache.reset()
    user.run(LONG)
    assert user.num_loaded == 28
    user.manager.cache.start_epoch("newer")
    message = "rank was created for a manager with other groups, hashes or v"
    with pytest.raises(ValueError, match=message):
        user.tier.replace_rank(replaced, link)


def drawn_options(choose, groups):
    """Draw the options of an engine, and the behavior of its stores."""
    options = {
        "num_blocks": choose.randint(20, 40) * len(groups), "circuit": patient(),
        "staging_blocks": choose.randint(2, 12), "timeout_s": choose.choice([0.01, 5.0]),
    }  # fmt: skip
    if choose.random() < 0.5:
        options |= {
            "num_host_blocks": choose.randint(5, 60) * len(groups),
            "host_write": choose.choice(["back", "through"]),
            "write_from": choose.choice(["host", "device"]),
        }
    faults = choose.sample(FAULTS, choose.randint(0, 4))
    rate = choose.choice([0.0, 0.1, 0.4])

    def fault_now():
        return choose.choice(faults) if faults and choose.random() < rate else None

    return options, (choose.choice([10, 60, 1000]), fault_now, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(60), 5))
def test_content_is_correct_for_any_behavior_of_ranks_and_stores(user_of, seed):
    choose = random.Random(seed)
    groups, hash_block_size = MIXES[[*MIXES][seed % len(MIXES)]]
    options, behavior = drawn_options(choose, groups)
    stores = [MemoryStore(*behavior) for _ in range(choose.randint(1, 3))]
    user = user_of(stores, groups, choose, hash_block_size=hash_block_size, **options)

    def before_step():
        for link in user.links:
            if choose.random() < 0.3:
                link.lag = choose.choice([0.0, 0.3, 0.8])
                link.is_silent = user.tier._timeout_s < 1 and choose.random() < 0.1
                link.work()
        if choose.random() < 0.02:
            user.kill(choose.randrange(len(stores)))

    user.serve(choose, 40, before_step=before_step, new_weights=0.01)
    for link in user.links:
        link.is_silent = False
    user.run()
    for link, store in zip(user.links, stores):
        link.lag, store.fault = 0.0, lambda: None
    user.settle()
    user.end()
    until = time.monotonic() + 60  # the last calls of a slow store end
    while any(link.results for link in user.links) or user.told != user.held:
        assert time.monotonic() < until, user.told ^ user.held
        user.tier._take_over()


def invalidated(user):
    """Invalidate blocks in the middle of a running request. Return the keys of the removed
    blocks.
    """
    request = next(iter(user.running.values())).request
    hashes = user.manager.cache.hashes(request)
    user.restart(user.tier.invalidate(user.manager.block_ids(request)[2:3]))
    return {each.tobytes().hex() for each in hashes[2:6]}


def holding_long(user):
    """Return the user with a running request for the prompt LONG, whose blocks are on the device and
    in the stores.
    """
    user.add(LONG)
    while not user.running or user.tier.num_waiting_blocks:
        user.step()
    return user


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("has_new_weights", [False, True])
def test_blocks_invalidated_before_a_rank_died_are_removed_by_its_successor(
    user_of, is_broken, has_new_weights
):
    user = holding_long(user_of(stores_of(2)))
    store = user.stores[1]
    if is_broken:  # the rank has received the order, but its store fails to remove the blocks
        store.fault = lambda: "raises"
    invalid = invalidated(user)
    assert user.tier.is_busy
    if is_broken:
        user.links[1].work()
    store.fault = lambda: None
    user.links[1].orders.clear()  # the process is killed
    user.links[1].rank._invalid.clear()
    user.links[1].rank.close(10)
    if has_new_weights:  # the blocks must not return with the former weights
        user.manager.cache.start_epoch("newer")
    user.links[1] = user.make_link(1)
    user.tier.replace_rank(1, user.links[1])
    user.tier.cancel(next(iter(user.running.values())).request)
    user.running.clear()
    assert user.manager.cache.reset()
    assert user.tier.is_busy
    user.settle()
    for store in user.stores:
        assert store.values and not any(text.split("-")[-1] in invalid for text in store.values)


def test_lookup_ends_once_one_rank_finds_nothing(user_of):
    stores = filled()
    stores[0].values.clear()
    user = user_of(stores, timeout_s=60)
    user.links[1].is_silent = True
    user.run(LONG)
    assert user.num_loaded == 0
    user.links[1].is_silent = False
    user.settle()


def test_blocks_wait_until_a_dead_rank_reports_its_trial(user_of):
    user = user_of(stores_of(2), circuit=patient())
    user.stores[1].fault = lambda: "raises"
    user.run(range(20), range(50, 70), range(80, 100))
    assert user.tier.is_dead and user.tier.num_waiting_blocks
    user.until(lambda: user.tier.num_waiting_blocks == len(user.tier._waiting)
               and user.links[1].rank._circuit.would_allow)  # fmt: skip
    user.tier.poll()
    # The lookup is the trial call. Its answer has been sent, but not received yet.
    for store in user.stores:
        store.fault = lambda: "slow"
    user.links[1].is_silent = True
    request = Request("trial", LONG)
    assert user.tier.match(request) is None
    dropped = user.tier.stats.dropped_blocks
    user.tier.save(StepReport(user.manager.last_step_id, True))
    assert not user.tier._saves
    user.links[1].is_silent = False
    for store in user.stores:
        store.fault = lambda: None
    user.tier.cancel(request)
    user.settle()
    assert not user.tier.is_dead and user.tier.stats.dropped_blocks == dropped


def manager_of(dcp_world_size=1, groups=None, **options):
    groups = [GroupSpec("full_attention", 16)] if groups is None else groups
    options |= {"context_parallel": ContextParallel(dcp_world_size=dcp_world_size)}
    return KVCacheManager.for_groups(
        groups, 9, 64, enable_events=True, num_preallocate_tokens=0, **options
    )


def a_rank(manager, rank="", **options):
    given = {"pages": KVStorage(9, 16, 2, 8).pages, "store": MemoryStore(), "model": "m"} | options
    return StoreRank(manager, given.pop("pages"), given.pop("store"), rank=rank, **given)


def shares_of(num_ranks, num_heads, **sizes):
    options = {"num_layers": 1, "num_heads": num_heads, "tp_size": num_ranks, **sizes}
    return [Share.of_rank(**options, tp_rank=i) for i in range(num_ranks)]


def test_ranks_with_equal_shares_have_equal_fingerprints():
    manager, pages = manager_of(), KVStorage(9, 16, 1, 8).pages
    found = [fingerprint(manager, pages, model="m", rank=each) for each in shares_of(8, 4)]
    assert [found.index(each) for each in found] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert fingerprint(manager, pages, model="m", rank=shares_of(4, 4)[3]) == found[-1]


STATES = [GroupSpec("full_attention", 16), GroupSpec("recurrent", 16)]
HEADS = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 32})]


@pytest.mark.parametrize("groups", [STATES, HEADS])
def test_replicas_of_a_head_with_different_parts_of_the_rest_have_different_fingerprints(groups):
    """They hold other parts of a state, or other heads of a group with more heads."""
    manager, pages = manager_of(groups=groups), Pages.allocate(9, [[4096]])

    def found(**changes):
        options = {"model": "m", "contents": "bytes"}
        shares = [replace(each, **changes) for each in shares_of(4, 1, num_layers=2)]
        return [fingerprint(manager, pages, rank=each, **options) for each in shares]

    assert len(set(found())) == 4
    assert len(set(found(tp=(1, 4)))) == 1
    message = "with tp=None, but the manager has states or several groups"
    with pytest.raises(ValueError, match=message):
        found(tp=None)


PARALLEL = {
    "TP 2": [{"tp_rank": i, "tp_size": 2} for i in range(2)],
    "TP 4": [{"tp_rank": i, "tp_size": 4} for i in range(4)],
    "PP 2": [{"layers": (2 * i, 2 * i + 2)} for i in range(2)],
    "DCP 2": [{"cp_rank": i, "cp_world_size": 2} for i in range(2)],
}


class Parallel:
    """An engine whose ranks store their own parts of each block in a common store."""

    def __init__(self, form, store, groups, num_heads=2):
        self.shares = [
            Share.of_rank(num_layers=4, num_heads=num_heads, **each) for each in PARALLEL[form]
        ]
        self.manager = manager_of(self.shares[0].cp_world_size, groups)
        self.pages = [Pages.allocate(9, [[64]]) for _ in self.shares]
        options = {"contents": "bytes", "cp_kv_cache_interleave_size": 1, "store": store}
        self.ranks = [a_rank(self.manager, share, pages=pages, **options)
                      for share, pages in zip(self.shares, self.pages)]  # fmt: skip
        self.tier = StoreTier.over(self.manager, self.ranks)

    def step(self, *new):
        plan = self.manager.step(new=list(new))
        report = StepReport(plan.step_id, completed=True)
        self.manager.report(report)
        return report

    def parts(self, request):
        """Yield each rank's page of each group, and a number that is equal for equal parts."""
        for group in range(len(self.manager.groups)):
            page = int(self.manager.block_ids(request, group)[0])
            for share, pages in zip(self.shares, self.pages):
                of_head = (share.layers, share.heads, share.cp_rank)
                yield pages.fragment(0)[page], hash(of_head if group == 0 else share) % 250

    def store(self, request):
        report = self.step(Admit(request, request.num_tokens - 1))
        for page, number in self.parts(request):
            page[:] = number
        self.tier.save(report)
        while self.tier.is_busy:
            self.tier.poll()
            self.tier.save(self.step())
        self.manager.free(request)

    def load(self, request):
        while (count := self.tier.match(request)) is None:
            time.sleep(0.001)
        self.step(Admit(request, external=External(count, delayed=True)))
        self.tier.begin(request)
        while not (arrived := self.tier.poll()):
            time.sleep(0.001)
        assert arrived[0].num_computed_tokens == count == request.num_tokens - 1
        for page, number in self.parts(request):
            assert (page == number).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader", "groups", "num_heads"),
    [
        ("TP 2", "TP 2", STATES, 2),
        ("TP 4", "TP 4", STATES, 1),
        ("TP 4", "TP 4", STATES, 2),
        ("TP 4", "TP 4", STATES, 4),
        ("TP 2", "TP 4", None, 2),  # ranks with equal shares load the same values
        ("PP 2", "PP 2", None, 2),
        ("DCP 2", "DCP 2", None, 2),
    ],
)
def test_each_rank_loads_its_own_part_of_a_block_from_a_common_store(
    writer, reader, groups, num_heads
):
    store = MemoryStore()
    one, other = (Parallel(form, store, groups, num_heads) for form in (writer, reader))
    num_tokens = one.manager.block_sizes[0] + 1
    one.store(Request("a", range(num_tokens)))
    other.load(Request("b", range(num_tokens)))
    assert one.tier.close() and other.tier.close()


SHARE = {"num_layers": 4, "num_heads": 4}


def check_rejected(manager, links, message, error=ValueError):
    with pytest.raises(error, match=message):
        StoreTier.over(manager, links)
    for each in links:
        assert not hasattr(each, "close") or each.close()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "ranks is empty: expected one rank or more"),
        (["", ""], r"ranks\[1\] has rank '', as ranks\[0\]: expected another one, or a Share"),
        (["a", "b", "a"], r"ranks\[2\] has rank 'a', as ranks\[0\]"),
        ([Share((0, 4), 4, (0, 2), 4), "b", Share((0, 4), 4, (0, 2), 4)], r"ranks\[2\] has rank Share"),
        (
            [Share.of_rank(**SHARE, tp_rank=0, tp_size=2)],
            r"ranks lack layer 0, head 2 \(context-parallel rank 0\)",
        ),
        (
            [Share.of_rank(**SHARE, layers=(0, 2)), Share.of_rank(**SHARE, layers=(3, 4))],
            r"ranks lack layer 2, head 0",
        ),
        (
            [Share.of_rank(**SHARE, cp_rank=1, cp_world_size=2)] * 2,
            r"ranks lack layer 0, head 0 \(context-parallel rank 0\): expected each part",
        ),
        (
            [Share.of_rank(**SHARE), Share.of_rank(num_layers=5, num_heads=4)],
            r"ranks\[1\] has layers 0 to 4 of 5, heads 0 to 3 of 4: expected a share of the same model",
        ),
    ],
)  # fmt: skip
def test_ranks_that_do_not_hold_each_block_once_are_rejected(ranks, message):
    manager = manager_of(max([1, *(getattr(each, "cp_world_size", 1) for each in ranks)]))
    links = [a_rank(manager, each, cp_kv_cache_interleave_size=1) for each in ranks]
    check_rejected(manager, links, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "n"}, r"ranks\[1\] has model 'n': expected 'm'"),
        ({"manager": {"hash_seed": "s"}}, r"ranks\[1\] was created for a manager with other groups"),
        (
            {"pages": Pages.allocate(8, [[64]]), "contents": "c"},
            r"ranks\[1\] has 8 pages: expected 9, as in the manager's pool",
        ),
        (
            {"host_pages": KVStorage(9, 16, 2, 8).pages},
            r"ranks\[1\] has host_pages: expected none, because write_from is 'device'",
        ),
    ],
)  # fmt: skip
def test_ranks_of_another_engine_are_rejected(options, message):
    own = manager_of(**options.pop("manager", {}))
    manager = manager_of()
    check_rejected(manager, [a_rank(manager, "0"), a_rank(own, "1", **options)], message)


def test_rank_that_is_passed_twice_is_rejected():
    manager, share = manager_of(), Share.of_rank(num_layers=1, num_heads=1)
    links = [a_rank(manager, share, pages=KVStorage(9, 16, 1, 8).pages) for _ in range(2)]
    with pytest.raises(ValueError, match=r"ranks\[1\] is ranks\[0\]: expected another rank"):
        StoreTier.over(manager, [links[0], links[0]])
    tier = StoreTier.over(manager, links)
    with pytest.raises(ValueError, match=r"rank is already rank 0 of this tier: expected a new"):
        tier.replace_rank(1, links[0])
    assert tier.close()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (((0, 0), 2, (0, 2), 2), ValueError, r"layers\[1\] is 0: expected 1 to 2"),
        (((0, 3), 2, (0, 2), 2), ValueError, r"layers\[1\] is 3: expected 1 to 2"),
        (((0, 1, 2), 2, (0, 2), 2), ValueError, r"layers is \(0, 1, 2\): expected the first one"),
        (((0, 2), 2, (2, 3), 2), ValueError, r"heads\[0\] is 2: expected 0 to 1"),
        (((0, 2), 2, 3, 2), TypeError, "heads is 3: expected"),
        (((0, 2), 2, (0, 2), 2, 1), ValueError, "cp_rank is 1: expected 0"),
        (((0, 2), 2, (0, 2), 2, 0, 1, (2, 2)), ValueError, r"tp\[0\] is 2: expected 0 to 1"),
        (((0, 2), 2, (0, 2), 2, 0, 1, (2,)), ValueError, r"tp is \(2,\): expected the rank and"),
    ],
)
def test_invalid_shares_are_rejected_by_name(given, error, message):
    with pytest.raises(error, match=message):
        Share(*given)


@pytest.mark.parametrize("identity", ["", "[]", "3", "{}", '{"format": 3}', "[" * 100_000, None])
def test_text_that_is_not_an_identity_is_rejected(identity):
    message = r"manager is .*: expected a manager, or the result of ca"
    if identity is None:  # the identity of another version
        identity = cache_identity(manager_of()).replace('"format": 3', '"format": 2')
        message = "manager has format 2: expected 3"
    with pytest.raises(ValueError, match=message):
        fingerprint(identity, None, model="m")


def test_links_and_orders_that_do_not_fit_are_rejected():
    one, share = manager_of(), shares_of(2, 1, num_layers=2)[0]
    states, hosted = manager_of(groups=STATES), manager_of(num_host_blocks=5)
    halves, cp = manager_of(dcp_world_size=2), {"cp_kv_cache_interleave_size": 1}
    on_host = KVStorage(5, 16, 2, 8).pages
    for manager, links, message in (
        (one, [3], r"ranks\[0\] is 3: expected a StoreRank, or a StoreRankLink"),
        (
            states,
            [a_rank(states, share, pages=Pages.allocate(9, [[4096]]), contents="b")],
            "ranks lack layer 0, tensor-parallel part 1",
        ),
        (  # otherwise, ranks that hold different tokens would use equal keys
            halves,
            [a_rank(halves, Share.of_rank(num_layers=1, num_heads=2), **cp) for _ in range(2)],
            r"ranks\[0\] has rank layers 0 .*cp_world_size=1: expected cp_world_size=2",
        ),
        (
            hosted,
            [a_rank(hosted, "0", host_pages=on_host), a_rank(hosted, "1")],
            r"ranks\[1\].host_pages has 0 pages: expected 5",
        ),
    ):
        check_rejected(manager, links, message, (TypeError, ValueError))
    with pytest.raises(ValueError, match="tp_size is 3: expected a divisor or a multiple of num_h"):
        Share.of_rank(num_layers=1, num_heads=4, tp_size=3)
    rank = a_rank(one)
    for orders, message in ((["stop"], r"orders\[0\] is 'stop': expected"), (3, "orders is 3")):
        with pytest.raises(TypeError, match=message):
            rank.begin(orders)
    assert rank.close()


@pytest.mark.parametrize("fault", ["corrupt", "raises", "slow"])
@pytest.mark.parametrize("failing", [0, 1])
def test_fault_of_one_rank_is_a_miss_for_all(user_of, failing, fault):
    stores = filled()
    store = stores[failing]
    store.slow_s, get = 60, store.get

    def failing_get(keys, values):
        store.fault = lambda: fault
        return get(keys, values)

    store.get = failing_get
    user = user_of(stores, timeout_s=0.3 if fault == "slow" else 30.0)
    user.run(LONG)
    assert user.num_loaded < 28 and user.num_finished == 1
    assert user.tier.stats.failed_loads == 1
    store.fault = lambda: None
    store.goes_on.set()


def test_results_are_used_although_steps_take_longer_than_the_timeout(user_of):
    user, request, found = user_of(filled(), timeout_s=0.02), Request("r", LONG), []
    for _ in range(5):
        found.append(user.tier.match(request))
        time.sleep(0.03)
    assert 28 in found
    user.tier.cancel(request)


def test_silent_rank_counts_as_one_timeout_per_lookup(user_of):
    user, request = user_of(filled(3), timeout_s=0.05), Request("r", LONG)
    for link in user.links:
        link.is_silent = True
    assert user.tier.match(request) is None
    time.sleep(0.1)
    assert user.tier.match(request) == 0
    for link in user.links:
        link.is_silent = False
    user.tier.cancel(request)
    user.settle()
    assert user.tier.stats.timeouts == 1
