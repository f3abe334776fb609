# SPDX-License-Identifier: Apache-2.0
"""Blocks in a store outside the engine: whatever the store does, contents are correct and nothing
leaks.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    Pages,
    Request,
    StepReport,
    SwapEngine,
)
from kvcache_exchange.store import Circuit, StoredPrefixes, StoreTier, fingerprint
from kvcache_exchange.store import tier as tier_module
from kvcache_exchange.store.value_format import BlockKey, faults, key_of_text, key_text, seal
from tests.machinery.shared import sampled
from tests.machinery.simulated_device import SimulatedStreams
from tests.machinery.stores import MemoryStore, StoreUser, patient

FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 6})
STATE = GroupSpec("recurrent", 4)
MIXES = {
    "full": ([FULL], None),
    "window": ([WINDOW], None),
    "state": ([STATE], None),
    "full and window": ([FULL, WINDOW], None),
    "full and state": ([FULL, STATE], None),
    "all": ([FULL, WINDOW, STATE, GroupSpec("chunked_local", 4, {"chunk_size": 8})], None),
    "inside blocks": ([GroupSpec("full_attention", 8)], 2),
    "unequal blocks": (
        [GroupSpec("full_attention", 8), GroupSpec("sliding_window", 12, {"window": 9})], 4,
    ),
    "state inside blocks": ([GroupSpec("full_attention", 8), STATE], 2),
    "not cached": (
        [FULL, GroupSpec("full_attention", 4, cached=False, transferred=False)], None,
    ),
    "a drafter": ([FULL, GroupSpec("full_attention", 4, drafts=True)], None),
}  # fmt: skip
LONG = [*range(30)]


@pytest.fixture
def user_of():
    """Create engines, and check at the end of the test that nothing remains of their requests."""
    made = []

    def make(store=None, groups=(FULL,), **options):
        made.append(StoreUser(MemoryStore() if store is None else store, [*groups], **options))
        return made[-1]

    yield make
    for user in made:
        user.end()


def serving_long(user):
    """Serve the prompt LONG, and wait until its blocks are stored."""
    user.run(LONG)
    user.settle()
    return user


def filled(**options):
    """Return a store with the blocks of the prompt LONG."""
    store = MemoryStore()
    serving_long(StoreUser(store, [FULL], **options)).end()
    return store


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 90])
@pytest.mark.parametrize("mix", MIXES)
def test_blocks_computed_by_one_engine_are_loaded_by_another(user_of, mix, num_host_blocks):
    groups, hash_block_size = MIXES[mix]
    options = {
        "groups": groups, "hash_block_size": hash_block_size, "num_host_blocks": num_host_blocks,
        "host_write": "through",
    }  # fmt: skip
    store = MemoryStore()
    one = user_of(store, **options)
    one.run(LONG, [*range(14), *range(50, 60)])
    one.settle()
    other = user_of(store, **options)
    other.run([*range(30), *range(70, 80)])
    # The hit ends at the largest common multiple of the groups' block sizes within the prompt. A
    # drafter recomputes the last block. With states inside blocks, nothing is loaded: steps end at
    # token 28, the end of the prompt's last hash block, so no state is cached at token 24.
    assert other.num_loaded == {"unequal blocks": 24, "inside blocks": 24, "a drafter": 24,
                                "state inside blocks": 0}.get(mix, 28)  # fmt: skip
    assert other.tier.stats.loaded_tokens == other.num_loaded


def test_lookup_of_a_waiting_request_is_repeated(user_of, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = user_of()
    other, request = user_of(one.store, timeout_s=0.2), Request("a", LONG)
    assert other.match(request) == 0
    serving_long(one)
    now[0] += 0.1
    assert other.tier.match(request) == 0
    now[0] += 0.15
    other.until(lambda: other.tier.match(request))
    assert other.tier.match(request) == 28


@pytest.mark.parametrize("tokens", [[*range(20)], [*range(50, 80)]])
def test_reused_request_name_has_a_separate_lookup(user_of, tokens):
    user = user_of(filled())
    found = [user.match(Request("x", each)) for each in (LONG, tokens, LONG)]
    assert found == [28, 16 if tokens[0] == 0 else 0, 28]


def test_engines_share_a_store_while_the_versions_of_their_weights_are_equal(user_of):
    one, other = user_of(), None
    one.manager.cache.start_epoch("step 1")
    other = user_of(serving_long(one).store)
    found = [other.match(LONG)]
    for version in ("step 1", "step 2", None):
        other.manager.cache.start_epoch(version)
        found.append(other.match(LONG))
    assert found == [0, 28, 0, 0]


class Gated(MemoryStore):
    """A store whose `exists` method blocks while the gate is closed.

    The first `num_failures` calls to `remove` fail.
    """

    def __init__(self, num_failures=0):
        super().__init__()
        self.gate, self.num_failures = threading.Event(), num_failures
        self.gate.set()

    def exists(self, keys):
        assert self.gate.wait(20)
        return super().exists(keys)

    def remove(self, keys):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("remove failed")
        super().remove(keys)


def begin_a_put(user, tokens):
    """Run a step of a request while its puts are waiting for a blocked call."""
    user.add(tokens)
    user.match(user.waiting[-1].request)
    user.store.gate.clear()
    user.tier.match(Request("probe", range(500, 540)))
    user.step()


def blocks_of_long(user):
    return user.manager.cache.find_prefix(Request("probe", LONG)).block_ids


@pytest.mark.parametrize("num_failures", [0, 1, 5])
def test_invalid_blocks_are_removed_from_the_store_although_calls_fail(user_of, num_failures):
    user = serving_long(user_of(Gated(num_failures), circuit=patient()))
    assert len(user.store.values) == len(user.told) == 7
    user.tier.invalidate(blocks_of_long(user)[3:4])
    user.until(lambda: len(user.store.values) <= 3)
    user.settle()
    assert len(user.store.values) == len(user.told) == 3
    assert user.tier.stats.errors == num_failures


@pytest.mark.parametrize("num_host_blocks", [0, 90])
def test_pending_put_does_not_store_invalid_blocks(user_of, num_host_blocks):
    user = user_of(Gated(), num_host_blocks=num_host_blocks, host_write="through")
    begin_a_put(user, LONG)
    while not user.tier._num_writing:  # the blocks are written to the host one step later
        user.step()
    assert not user.store.values
    (running,) = user.running.values()
    user.restart(user.tier.invalidate(user.manager.block_ids(running.request)[:1]))
    user.store.gate.set()
    user.settle()
    assert not user.store.values and not user.told
    assert user.tier.stats.dropped_blocks > 0
    user.run()  # this step recomputes the request
    user.step()
    user.settle()
    assert len(user.store.values) == 7


def test_nothing_is_loaded_before_invalid_blocks_are_removed(user_of):
    user = serving_long(user_of(Gated(1000)))
    user.tier.invalidate(blocks_of_long(user)[:1])
    user.manager.cache.reset()
    user.run(LONG)
    assert user.num_loaded == 0 and user.num_finished == 2 and len(user.store.values) == 7
    user.until(lambda: not user.tier._num_writing)  # from here on, a put in flight would succeed
    user.store.num_failures = 0
    assert user.tier.close(60) and not user.store.values


def test_events_of_the_manager_are_kept_if_the_store_cannot_list_its_keys(user_of):
    store = MemoryStore()
    store.knows_keys = False
    user = serving_long(user_of(store))
    assert not user.told and {each.medium for each in user.events} == {"gpu"}
    assert len(user.store.values) == 7


def test_host_tier_selects_the_blocks_written_to_the_store(user_of):
    user = user_of(num_blocks=9, num_host_blocks=30, host_write="back")
    user.run(LONG[:9])
    user.settle()
    assert not user.store.values
    user.run(*([i] * 24 for i in range(100, 103)))
    user.settle()
    assert len(user.store.values) == user.manager.cache.stats.host.written_blocks > 0


def test_puts_are_not_issued_while_a_later_step_is_planned(user_of):
    user = user_of()
    first = user.manager.step(new=[Request("a", range(20))])
    second = user.manager.step([0], [1])
    for plan, num_put in ((first, 0), (second, 5)):
        report = StepReport(plan.step_id, completed=True)
        user.manager.report(report)
        user.until(lambda n=num_put, r=report: user.tier.save(r) or len(user.store.values) == n)
    user.manager.free(Request("a", [1]))


@pytest.mark.parametrize(
    ("wrong", "counter"),
    [
        ("missing", "missing_blocks"),
        ("corrupt", "corrupt_blocks"),
        ("short", "misfit_blocks"),
        ("other", "misfit_blocks"),
        ("raises", "errors"),
        ("slow", "timeouts"),
    ],
)
def test_invalid_result_is_counted_as_a_miss(user_of, wrong, counter):
    store = filled()
    store.fault, store.capacity, store.slow_s = lambda: wrong, 1 << 30, 60
    user = user_of(store, timeout_s=0.05 if wrong == "slow" else 30.0)
    user.run(LONG, timeout_s=15)  # the engine does not wait for calls to the store
    assert user.num_loaded < 28 and user.num_finished == 1
    assert getattr(user.tier.stats, counter) > 0
    store.fault = lambda: None
    store.goes_on.set()


def test_dead_store_is_probed_periodically(user_of):
    now = [0.0]
    store = MemoryStore(fault=lambda: "raises")
    user = user_of(store, circuit=Circuit(num_failures=2, retry_s=0.3, clock=lambda: now[0]))
    for i in range(40):
        user.run([i] * 9)
        now[0] += 0.05
        if i == 5:
            assert user.tier.is_dead
    assert 2 < user.tier.stats.errors < 20 and user.tier.stats.unasked > 10
    store.fault = lambda: None
    now[0] += 30
    user.run([200] * 9)
    user.settle()
    assert not user.tier.is_dead and store.values


def test_hanging_call_does_not_block_other_requests():
    is_over, store = threading.Event(), MemoryStore()
    exists = store.exists
    store.exists = lambda keys: is_over.wait(60) and exists(keys)
    user = StoreUser(store, [FULL], timeout_s=0.05)
    user.run(*([i] * 9 for i in range(10)), timeout_s=15)
    assert not user.tier.close(0.1)
    is_over.set()
    assert user.tier.close(60) and store.is_closed


NONSENSE = (
    None, 3, "x", b"x", [None], [2**70], [-(2**70)], [1.5], [float("nan")], {}, object(), [[]],
    "kvcache-", ["\ud800"], [""], ["kvcache-" + "0" * 32 + "-99999-00"],
)  # fmt: skip
EXCEPTIONS = (
    OSError("gone"), ValueError("x" * 9999), MemoryError(), KeyboardInterrupt(), SystemExit(3),
    StopIteration(), RecursionError(),
)  # fmt: skip


class LyingStore(MemoryStore):
    """A store whose calls may raise anything, take long, return anything, or change any byte.

    Calls that hang continue once `goes_on` is set.
    """

    def __init__(self, choose, rate):
        super().__init__(60)
        self.choose, self.rate, self.num_lies = choose, rate, 0
        for name in ("exists", "put", "get", "remove", "keys", "take_evicted"):
            setattr(self, name, lambda *given, name=name: self._call(name, *given))

    def _call(self, name, keys=(), values=()):
        method = getattr(MemoryStore, name)
        given = [keys, values][: method.__code__.co_argcount - 1]
        if self.choose.random() >= self.rate:
            return method(self, *given)
        self.num_lies += 1
        choose, known = self.choose, [*self.values]
        match choose.choice(("raises", "hangs", "nonsense", "endless", "keys", "bytes", "answer")):
            case "raises":
                raise choose.choice(EXCEPTIONS)
            case "hangs":
                self.goes_on.wait(choose.choice((0.01, 0.2, choose.choice((0, 0, 0, 0, 30.0)))))
            case "nonsense":
                return choose.choice(NONSENSE)
            case "endless":
                return itertools.repeat(choose.choice((True, 1, "x")))
            case "keys" if known and given:
                given[0] = [choose.choice(known) for _ in keys]
        answer = method(self, *given)
        if values:  # flip a bit of one value, swap two, or clear the rest of one
            value, other = choose.choice(values), choose.choice(values)
            value[choose.randrange(len(value))] ^= 1 << choose.randrange(8)
            value[:], other[:] = other.copy(), value.copy()
            other[choose.choice((0, len(other) // 2, len(other))) :] = 0
        if isinstance(answer, list):
            answer = choose.choice((
                answer[:-1], [*answer, *answer[:1]], choose.sample(answer, len(answer)),
                [choose.choice((each, 0, -1, -5, True)) for each in answer], known, answer,
            ))  # fmt: skip
        return answer


@pytest.mark.parametrize("seed", sampled(range(40), 5))
def test_incorrect_store_results_cause_no_wrong_hit_hang_or_error(user_of, seed):
    choose = random.Random(seed)
    groups = ([FULL], [FULL, WINDOW, STATE])[seed % 2]
    user = user_of(
        LyingStore(choose, choose.choice([0.1, 0.3, 0.7, 1.0])), groups, timeout_s=0.05,
        num_blocks=30 * len(groups), num_host_blocks=choose.choice([0, 40]) * len(groups),
        host_write="through", circuit=patient(),
    )  # fmt: skip
    user.serve(choose, 25, new_weights=0)
    user.run()
    user.store.rate = 0
    user.store.goes_on.set()
    assert user.store.num_lies


def test_value_describes_its_content():
    values = np.zeros((3, 128 + 500), np.uint8)
    values[:, 128:] = np.arange(500) % 256
    keys = [BlockKey(0, b"a" * 32), BlockKey(1, b"b" * 16)]
    seal(values, [0, 2], bytes(16), keys)
    size = values.shape[1]
    for rows, sizes, of, expected in (
        ([0, 2], [size, size], bytes(16), [None, None]),
        ([0, 2], [-1, size - 1], bytes(16), ["missing", "misfit"]),
        ([2, 0], [size, size], bytes(16), ["misfit", "misfit"]),
        ([0, 2], [size, size], b"1" * 16, ["misfit", "misfit"]),
    ):
        assert faults(values, rows, sizes, of, keys) == expected
    for at in (0, 20, 100, 128, size - 1):
        values[0, at] ^= 1
        assert faults(values, [0, 2], [size, size], bytes(16), keys) == ["corrupt", None]
        values[0, at] ^= 1
    for key in keys:
        assert key_of_text(bytes(16), key_text(bytes(16), key)) == key
        assert key_of_text(b"1" * 16, key_text(bytes(16), key)) is None
    for wrong in ["x-00", "0-zz", "0-0", "00-00", "0", "-1-00", "0-AA"] + [
        "",
        "0-0 0",
        "9" * 5000 + "-00",
    ]:
        assert key_of_text(bytes(16), "kvcache-" + "0" * 32 + "-" + wrong) is None
    with pytest.raises(ValueError, match="zip"):
        faults(values, [0, 2], [size], bytes(16), keys)


def test_digests_equal_xxh3():
    from kvcache.native.load import core

    rows = np.random.default_rng(0).integers(0, 256, (5, 300), np.uint8)[:, :290]
    digests = core.xxh3_128_rows(rows, np.array([3, 1]), 7, 290)
    assert digests.shape == (2, 16)
    assert [*map(bytes, digests)] == [core.xxh3_128(rows[i, 7:290].tobytes()) for i in (3, 1)]
    for wrong in ((rows, [5], 0, 9), (rows, [-1], 0, 9), (rows, [0], 9, 291), (rows, [0], 9, 8),
                  (rows[:, ::2], [0], 0, 9), (rows[0], [0], 0, 9)):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            core.xxh3_128_rows(wrong[0], np.array(wrong[1]), *wrong[2:])


def test_circuit_breaker_allows_one_trial_call_with_increasing_delay():
    now = [0.0]
    circuit = Circuit(2, 1.0, 3.0, lambda: now[0])
    circuit.failed()
    assert circuit.allows() and not circuit.is_open
    for wait in (1.0, 2.0, 3.0, 3.0):
        circuit.failed()
        assert circuit.is_open and not circuit.allows()
        now[0] += wait - 0.01
        assert not circuit.allows()
        now[0] += 0.02
        assert circuit.allows() and not circuit.allows()
    circuit.worked()
    assert circuit.allows() and not circuit.is_open


def test_fingerprint_covers_everything_that_must_be_equal():
    def of(model="m", rank="", sizes=((512, 512),), groups=(FULL,), **options):
        manager = KVCacheManager.for_groups([*groups], 9, 64, **options)
        pages = Pages.allocate(9, sizes)
        return fingerprint(manager, pages, model=model, rank=rank, contents="k, v")

    assert of() == of(num_host_blocks=5, eviction="learned")
    different = [
        of(), of(model="n"), of(rank="1"), of(sizes=((512, 256),)), of(sizes=((1024,),)),
        of(groups=(FULL, WINDOW)), of(groups=(WINDOW,)), of(groups=(GroupSpec("full_attention", 8),)),
        of(hash_seed="s"), of(hash_algorithm="xxh3_128_cbor"), of(hash_block_size=2),
        of(hash_algorithm="engine:x", hash_bytes=32),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (GroupSpec("cross_attention", 4), "has kind 'cross_attention': expected transferred=False"),
        (GroupSpec("full_attention", 4, cached=False), "has cached=False and"),
        (GroupSpec("full_attention", 4, transferred=False), "has cached=True and"),
        (GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False),
         "has kind 'circular_window'"),
    ],
)  # fmt: skip
def test_groups_that_a_store_cannot_fill_are_rejected_by_name(group, message):
    manager = KVCacheManager.for_groups([FULL, group], 30, 64, enable_events=True)
    with pytest.raises(ValueError, match=f"group 1 {message}"):
        StoredPrefixes(manager)


@pytest.mark.parametrize(("num_tokens", "longest"), [(8, 4), (9, 4), (10, 8)])
def test_only_blocks_with_known_hashes_are_loaded(num_tokens, longest):
    options = {"hash_algorithm": "engine:x", "num_hash_lookahead_tokens": 2}
    prefixes = StoredPrefixes(KVCacheManager(4, 30, 64, **options))
    hashes = [bytes([i]) * 32 for i in range((num_tokens - 2) // 4)]
    request = Request("a", range(num_tokens), block_hashes=hashes)
    assert prefixes.longest(request) == longest
    assert len(prefixes.candidates(request, 0)) == longest // 4


@pytest.mark.parametrize(
    ("manager", "options", "error", "message"),
    [
        ({"enable_events": False}, {}, ValueError, "manager has enable_events=False: expected True"),
        ({"enable_caching": False}, {}, ValueError, "the manager caches no blocks"),
        ({}, {"model": 3}, TypeError, "model is 3: expected"),
        ({}, {"write_from": "disk"}, ValueError, "write_from is 'disk': expected 'auto', 'device'"),
        ({}, {"write_from": "host"}, ValueError, "expected a manager with num_host_blocks, and host_"),
        ({"num_host_blocks": 9}, {}, ValueError, "expected a manager with num_host_blocks, and host_"),
        ({}, {"timeout_s": 0}, ValueError, "timeout_s is 0: expected seconds, more than 0"),
        ({}, {"staging_bytes": -1}, ValueError, "staging_bytes is -1: expected 0 to"),
        ({}, {"pages": Pages.allocate(5, [[8]])}, ValueError, "pages has 5 pages: expected 9"),
        ({}, {"store": "disk"}, TypeError, "store is 'disk': expected"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_rejected_by_name(manager, options, error, message):
    manager = KVCacheManager(4, 9, 64, **{"enable_events": True, **manager})
    given = {"pages": Pages.allocate(9, [[64]]), "store": MemoryStore(), "model": "m"}
    before = threading.active_count()
    with pytest.raises(error, match=message):
        StoreTier(manager, **{**given, "contents": "bytes", **options})
    assert threading.active_count() == before


@pytest.mark.parametrize("keys", [None, 5, [5], ["0-zz"], ["0-"], ["0-00"], ["9-" + "00" * 32]])
def test_invalid_keys_are_ignored(user_of, keys):
    store = MemoryStore()
    user = StoreUser(store, [FULL])
    prefix = key_text(user.tier._ranks[0]._fingerprint, BlockKey(0, b""))[:-2]
    user.end()
    if isinstance(keys, list) and keys != [5]:
        keys = [prefix + key for key in keys]
    store.keys = store.take_evicted = lambda: keys
    user = user_of(store, circuit=patient())
    user.run(LONG)
    assert user.num_finished == 1 and not user.told
    del store.keys, store.take_evicted
    user.settle()


@pytest.mark.parametrize("has_begun", [True, False])
def test_load_in_flight_at_a_new_epoch_loads_nothing(user_of, has_begun):
    user, request = serving_long(user_of()), Request("x", LONG)
    assert user.manager.cache.reset()
    external = External(user.match(request), delayed=True)
    plan = user.manager.step(new=[Admit(request, external=external)])
    user.manager.report(StepReport(plan.step_id, completed=True))
    if has_begun:
        user.tier.begin(request)
    user.manager.cache.start_epoch("newer")
    if has_begun:
        (arrived,) = user.tier.poll()
        assert arrived.num_computed_tokens == arrived.num_loaded_tokens == 0
        assert arrived.error == "the weights have changed"
    else:
        with pytest.raises(ValueError, match="without a new epoch"):
            user.tier.begin(request)
    user.tier.cancel(request)


# Streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(20), 3))
def test_copies_are_ordered_on_late_streams(seed):
    """The test uses few pages and a simulated device that runs streams in any order that events
    permit.
    """
    choose, streams = random.Random(seed), SimulatedStreams(seed)
    manager = KVCacheManager(4, 16, 64, num_preallocate_tokens=0, enable_events=True)
    pages, store = Pages.allocate(16, [[64, 64]] * 2), MemoryStore()
    given = {"model": "m", "contents": "bytes", "staging_bytes": 6 * 512, "timeout_s": 20}
    tier = StoreTier(manager, pages, store, **given)
    (rank,) = tier._ranks
    rank._swaps = SwapEngine(pages, rank._staging.pages, method="kernel", streams=streams)
    wrong, num_checked = [], 0

    def content(tokens):
        return zlib.crc32(repr(tokens).encode()) % 251

    def compute(blocks, tokens, num_loaded):
        """Read the loaded blocks and write all other blocks on the stream."""
        for i, block in enumerate(blocks):
            expected = content(tokens[: 4 * (i + 1)])
            for region in range(4):
                fragment = pages.fragment(region)[block]
                if 4 * i >= num_loaded:
                    fragment.fill_(expected)
                elif (fragment != expected).any():
                    wrong.append((i, block))

    def wait_for(answer):
        deadline = time.monotonic() + 20
        while (found := answer()) in (None, []):
            assert time.monotonic() < deadline
            streams.advance(choose.randint(0, 3))
            time.sleep(0)
        return found

    families = [[choose.randrange(99) for _ in range(40)] for _ in range(3)]
    for number in range(60):
        tokens = [*choose.choice(families)[: choose.randint(8, 40)], 100 + number]
        request = Request(f"r{number}", tokens)
        external = wait_for(lambda r=request: tier.match(r))
        plan = manager.step(
            new=[
                Admit(
                    request,
                    num_tokens=0 if external else len(tokens),
                    external=External(external, delayed=external > 0),
                )
            ]
        )
        start = int(plan.num_computed_tokens[0])
        if external:
            tier.begin(request)
            (received,) = wait_for(tier.poll)
            start = received.num_computed_tokens
            plan = manager.step([manager.row(request)], [len(tokens) - start])
        num_checked += external
        blocks = manager.block_ids(request).tolist()
        streams.launch(streams.current(), lambda b=blocks, t=tokens, n=start: compute(b, t, n))
        report = StepReport(plan.step_id, completed=True)
        manager.report(report)
        tier.save(report)
        manager.free(request)
        if choose.random() < 0.3:
            manager.cache.reset()
        streams.advance(choose.randint(0, 3))
    while tier._num_writing or rank._arriving:
        streams.advance(1)
        tier.poll()
        time.sleep(0)
    streams.advance()
    assert tier.close(20) and not wrong and num_checked > 100
    assert rank._staging.num_free == rank._staging.num_values


def test_tier_created_after_a_new_epoch_uses_its_version():
    store, found = MemoryStore(), []
    for version in (None, "newer", "newer"):
        manager = KVCacheManager(16, 9, 128, enable_events=True)
        if version is not None:
            manager.cache.start_epoch(version)
        tier = StoreTier(manager, KVStorage(9, 16, 1, 8).pages, store, model="tiny")
        found.append(tier._ranks[0]._fingerprint)
        tier.close()
    assert found[0] != found[1] == found[2]


def test_put_in_flight_at_a_new_epoch_is_not_announced(user_of):
    user = serving_long(user_of(Gated()))
    assert len(user.told) == 7
    user.manager.cache.reset()
    begin_a_put(user, [*range(100, 130)])
    assert user.tier._num_writing and len(user.store.values) == 7
    user.manager.cache.start_epoch("newer")
    user.store.gate.set()
    for each in [*user.running.values()]:
        user.finish(each)
    user.settle()
    assert user.tier.close(60) and len(user.store.values) > 7 and not user.told
