# SPDX-License-Identifier: Apache-2.0
"""Multiple cache groups that share one pool. Each test covers one behavior."""

from dataclasses import replace

import numpy as np
import pytest

from kvcache import Admit, ContextParallel, External, GroupSpec, KVCacheManager, Request
from kvcache.allocator import check_invariants
from kvcache.kinds import (
    AttentionKind,
    KindProperties,
    contents,
    kind_class,
    kind_names,
    make_kind,
    register,
    registry,
)
from kvcache.native.load import core
from tests.machinery.shared import manager_of
from tests.machinery.steps import ENCODER, FULL, STATE, WINDOW, go, hit, ids, new


def make(*groups, **options):
    return manager_of(*groups, **{"max_model_len": 200, **options})


@pytest.mark.parametrize(("kind", "options", "reads_from"), [
    ("full_attention", {}, {0: 0, 9: 0}),
    ("sliding_window", {"window": 1}, {0: 0, 9: 9}),
    ("sliding_window", {"window": 6}, {0: 0, 5: 0, 6: 1, 9: 4}),
    ("chunked_local", {"chunk_size": 8}, {0: 0, 7: 0, 8: 8, 15: 8, 16: 16}),
    ("circular_window", {"window": 6, "buffer": 13}, {0: 0, 5: 0, 6: 1, 9: 4}),
    ("recurrent", {}, {0: 0, 1: 0, 9: 8}),
    ("cross_attention", {}, {9: 0}),
])  # fmt: skip
def test_kind_defines_the_first_needed_token(kind, options, reads_from):
    native = make_kind(kind, options)
    assert {n: native.first_needed_token(n) for n in reads_from} == reads_from


def test_kind_defines_page_content_and_the_window_of_its_table():
    options = {"sliding_window": {"window": 6}, "chunked_local": {"chunk_size": 8}}
    options["circular_window"] = {"window": 6, "buffer": 13}
    # Only built-in kinds are compared, because other tests register additional kinds.
    ours = [n for n in kind_names() if kind_class(n).__module__ == f"kvcache.kinds.{n}"]
    kinds = {n: make_kind(n, options.get(n, {})) for n in ours}
    assert {(name, kind.pages.name, kind.window) for name, kind in kinds.items()} == {
        *{("full_attention", "tokens", None), ("sliding_window", "tokens", 6)},
        *{("chunked_local", "tokens", None), ("circular_window", "circular", 6)},
        *{("recurrent", "state", None), ("cross_attention", "encoder", None)},
    }


def test_a_kind_may_have_a_second_name_and_options_with_defaults():
    register("test_mamba")(kind_class("recurrent"))
    assert make_kind("test_mamba", {}).pages is contents.STATE

    @register("test_lookback")
    class Lookback(AttentionKind):
        def __init__(self, *, segment, lookback=1):
            super().__init__()
            self.tokens = (segment, lookback)

        def first_needed_token(self, num_computed_tokens):
            return 0

    assert make_kind("test_lookback", {"segment": 8}).tokens == (8, 1)
    with pytest.raises(
        ValueError,
        match=r"^options of kind 'test_lookback' are {'lookback': 2}: "
        r"expected segment=N \[lookback=N\]$",
    ):
        make_kind("test_lookback", {"lookback": 2})


class Keeps(AttentionKind):
    def first_needed_token(self, num_computed_tokens):
        return 0


class TakesAnything(Keeps):
    def __init__(self, **options):
        super().__init__()


class OfStates(Keeps):
    pages = contents.STATE


def derived(name, **members):
    """Return a subclass of a built-in kind."""
    return type("Derived", (kind_class(name),), members)


class InTwoSteps(derived("sliding_window", first_needed_token=lambda self, n: 0)):
    """A method overridden in an intermediate base class also counts as overridden."""


DERIVED = "expected a class derived from AttentionKind, or from one kind of this"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("recurrent", Keeps, "name is 'recurrent': expected a name that is not in use"),
        ("", Keeps, "name is '': expected a non-empty name"),
        ("test_x", Keeps(), "expected a class derived from AttentionKind"),
        # The native manager accepts none of these.
        ("test_x", KindProperties, "expected a class derived from AttentionKind"),
        (
            "test_x",
            type("A", (KindProperties,), {"first_needed_token": lambda self, n: n}),
            DERIVED,
        ),
        ("test_x", type("A", (KindProperties, core.FullAttention), {"pages": "state"}), DERIVED),
        ("test_x", type("A", (Keeps, kind_class("sliding_window")), {}), DERIVED),
        ("test_x", AttentionKind, "does not define first_needed_token: expected this method"),
        ("test_x", InTwoSteps, "overrides first_needed_token of SlidingWindow, which"),
        (
            "test_x",
            derived("full_attention", pages="state"),
            "which the native manager does not call",
        ),
        ("test_x", derived("recurrent", pages="tokens"), "overrides pages of Recurrent"),
        (
            "test_x",
            derived("sliding_window", window=property(lambda self: 99)),
            "overrides window of",
        ),
        ("test_x", TakesAnything, r"takes \*\*options: expected named arguments"),
        ("test_x", OfStates, "pages of kind 'test_x' is 'state': expected 'tokens'"),
    ],
)
def test_invalid_kind_is_rejected(name, kind, message):
    is_value = name != "test_x" or kind is OfStates
    with pytest.raises(ValueError if is_value else TypeError, match=message):
        register(name)(kind)
    assert "test_x" not in kind_names()


@pytest.mark.parametrize("base", [AttentionKind, kind_class("sliding_window")])
def test_kind_constructor_without_super_call_is_reported(monkeypatch, base):
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))

    def forgetful(self, *, reach: int) -> None:
        self.reach = reach

    members = {"__init__": forgetful}
    if base is AttentionKind:
        members["first_needed_token"] = lambda self, n: max(n - self.reach, 0)
    register("forgetful")(type("Forgetful", (base,), members))
    for make in (
        lambda: make_kind("forgetful", {"reach": 3}),
        lambda: KVCacheManager.for_groups([GroupSpec("forgetful", 4, {"reach": 3})], 9, 64),
    ):
        with pytest.raises(TypeError, match=r"kind 'forgetful', <.*does not call super\(\)"):
            make()


def test_kind_may_derive_from_a_built_in_kind_with_other_options():
    @register("test_window_of_8")
    class WindowOf8(kind_class("sliding_window")):
        def __init__(self, *, chunks=1):
            super().__init__(window=8 * chunks)

        def max_live_tokens(self, num_tokens, step_tokens):
            return super().max_live_tokens(num_tokens, step_tokens) + 1

    kind = make_kind("test_window_of_8", {"chunks": 2})
    assert (kind.window, kind.first_needed_token(20), kind.max_live_tokens(9, 1)) == (16, 5, 17)
    manager = make(GroupSpec("test_window_of_8", 4))
    a = new(manager, "a", 40, 8)
    go(manager, a, 8, 8)
    assert ids(manager, a)[:3] == [0, 0, 3]  # token 16 attends to tokens 9 and later


def cached_columns(manager, request, group):
    """Look up the request's hashes in this group, and return the columns of the cached blocks."""
    found = manager.cache.find(manager.cache.hashes(request), group).device
    return np.flatnonzero(found >= 0).tolist()


@pytest.mark.parametrize(("interval", "window", "states"), [
    (None, [*range(10)], [3, 7, 9]),
    (0, [8, 9], [9]),
    (16, [2, 3, 6, 7, 8, 9], [3, 7, 9]),
    (32, [6, 7, 8, 9], [7, 9]),
])  # fmt: skip
def test_the_retention_interval_selects_window_blocks_and_states(interval, window, states):
    manager = make(FULL, WINDOW, STATE, num_blocks=81, retention_interval=interval)
    a = new(manager, "a", 43, 16)
    go(manager, a, 16, 8, 3, 1)
    assert [cached_columns(manager, a, g) for g in range(3)] == [[*range(10)], window, states]
    assert hit(manager, 43) == 40
    check_invariants(manager)


def test_a_shared_prefix_is_retained_when_a_second_request_reads_it():
    manager = make(FULL, WINDOW, num_blocks=81, retention_interval=0)
    hits = []
    for i in range(3):  # prompts that share 22 tokens
        request = Request(f"r{i}", [*range(22), *range(100 * i + 100, 100 * i + 120)])
        hits += manager.step(new=[request]).num_computed_tokens.tolist()
        manager.free(request)
    assert hits == [0, 0, 20]
    found = manager.cache.find_prefix(Request("q", [*range(12), *range(900, 910)]))
    assert (found.num_tokens, found.num_shared_tokens) == (0, 12)


def test_admit_retains_the_given_lengths_of_prompt_and_shared_prefix():
    manager, a = make(FULL, WINDOW, retention_interval=0), Request("a", range(43))
    manager.admit(Admit(a, num_prompt_tokens=32, num_shared_tokens=12))
    assert cached_columns(manager, a, 1) == [1, 2, 5, 6]  # hits of 12 and 28 tokens


def test_completed_chunk_is_dropped_and_a_hit_may_end_at_its_end():
    manager = make(GroupSpec("chunked_local", 4, {"chunk_size": 8}))
    a = new(manager, "a", 24, 8, read_cache=False)
    assert go(manager, a, 8).replace[0].tolist() == [[0, 0, 0], [0, 1, 0]]
    # Tokens from 8 on attend to no earlier token, so any prompt has a hit of 8 tokens that needs no
    # blocks.
    found = manager.cache.find_prefix(Request("b", [7] * 12))
    assert (found.block_ids.tolist(), found.num_tokens) == ([0, 0], 8)


def test_groups_of_unequal_block_size_share_hashes_and_hit_at_common_multiples():
    """A chained hash covers the whole prefix, so each token is hashed only once for all block sizes."""
    manager = make(FULL, GroupSpec("sliding_window", 6, {"window": 6}))
    assert manager.cache.hash_block_size == 2
    new(manager, "a", 32)
    assert hit(manager, 32) == 24
    manager, a = make(FULL, GroupSpec("full_attention", 8)), Request("a", range(32))
    assert np.array_equal(manager.cache.hashes(a), make(FULL).cache.hashes(a))


def test_step_ends_at_the_end_of_the_shared_prefix():
    groups = [GroupSpec("full_attention", 64), GroupSpec("recurrent", 64)]
    manager = make(*groups, hash_block_size=4, num_blocks=80, max_model_len=1_000)
    ends = []
    for i in range(1, 4):
        request = Request(f"r{i}", [*range(50), *range(1000 * i, 1000 * i + 100)])
        plan = manager.step(new=[Admit(request, num_tokens=manager.checkpoint_tokens(request))])
        ends.append([plan.num_computed_tokens[0], manager.num_computed_tokens(request)])
        while (left := 150 - manager.num_computed_tokens(request)) > 0:
            go(manager, request, manager.checkpoint_tokens(request, left))
            ends[-1].append(manager.num_computed_tokens(request))
        manager.free(request)
    # The first request stores a state at the end of its prompt. The second also stores a state at
    # the end of the prefix shared with the first request, and the third request starts from there.
    assert ends == [[0, 148, 150], [0, 48, 148, 150], [48, 148, 150]]
    with pytest.raises(ValueError, match=r"^num_tokens is 0: expected 1 to 2147483647"):
        manager.checkpoint_tokens(Request("x", range(9)), 0)
    assert make(FULL).checkpoint_tokens(Request("x", range(9)), 7) == 7
    off = make(*groups, enable_caching=False, max_model_len=1_000)
    assert off.checkpoint_tokens(Request("x", range(150))) == 150


def test_encoder_blocks_are_allocated_at_admission_and_never_shared():
    manager = make(FULL, GroupSpec("cross_attention", 8))
    a, b = (Request(name, range(9), num_encoder_tokens=20) for name in "ab")
    assert [len(each) for each in manager.step(new=[a]).append_ids] == [3, 3]
    plan = manager.step([0], [4], new=[b])
    assert plan.num_computed_tokens.tolist() == [9, 0]
    assert [np.diff(splits).tolist() for splits in plan.append_splits] == [[1, 3], [0, 3]]
    assert manager.pool.num_cached == 0  # decoder KV depends on the encoder
    manager.free(a, b)
    assert manager.pool.num_free == manager.pool.num_total
    new(manager, "plain", 13)
    assert not a.read_cache and not a.write_cache
    assert hit(manager, 13) == 12
    probe = Request("encoder", range(13), num_encoder_tokens=4)
    assert manager.cache.find_prefix(probe).num_tokens == 0


def test_exception_in_a_user_defined_kind_keeps_every_block(monkeypatch):
    @register("test_broken")
    class Broken(AttentionKind):
        def first_needed_token(self, num_computed_tokens):
            raise KeyError("broken")

    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    manager = make(GroupSpec("test_broken", 4))
    a = new(manager, "a", 20, 4)
    go(manager, a, 4, 4)
    assert 0 not in ids(manager, a) and seen and seen[0].exc_type is KeyError
    check_invariants(manager)


def test_uncached_group_does_not_affect_hits():
    uncached = GroupSpec("full_attention", 4, cached=False)
    manager = make(FULL, uncached, enable_events=True)
    a = new(manager, "a", 20)
    assert manager.pool.num_cached == 5
    assert {event.group for event in manager.cache.drain_events()} == {0}
    plan = manager.step(new=[Request("b", range(22))])
    assert plan.num_computed_tokens.tolist() == [20]
    # In the uncached group, the columns of the hit contain null blocks.
    assert plan.append_ids[1].tolist() == [0] * 5 + [12]
    assert [group.hit_blocks for group in manager.cache.stats.groups] == [5, 0]
    check_invariants(manager)
    manager = make(uncached)  # if no group is cached, there are no hits
    manager.step(new=[a])
    assert manager.pool.num_cached == 0 and hit(manager, 22) == 0
    with pytest.raises(ValueError, match=r"^cached is False for a group of recurrent states"):
        make(FULL, GroupSpec("recurrent", 4, cached=False))


ROUND = GroupSpec("circular_window", 4, {"window": 6, "buffer": 13})


def test_step_needs_at_most_the_blocks_of_the_buffer():
    manager, a = make(ROUND, max_model_len=40), Request("a", range(40))
    says = (
        r"^a new request requests 40 slots including lookahead: expected at most 16, "
        r"because group 0 has space for 16 tokens and reads 0 of them$"
    )
    for call in (lambda: manager.step(new=[a]), lambda: manager.would_fit(a)):
        with pytest.raises(ValueError, match=says):
            call()
    manager.step(new=[Admit(a, 16)])
    says = r"^a row requests 12 slots .*: expected at most 11, .* and reads 5 of them$"
    with pytest.raises(ValueError, match=says):
        manager.step([0], [10], num_lookahead_tokens=2)
    manager.step([0], [9], num_lookahead_tokens=2)
    # Lookahead is truncated at max_model_len, because there are no slots beyond it.
    manager.step([0], [11])
    manager.step([0], [4], num_lookahead_tokens=50)
    assert manager.num_computed_tokens(a) == 40
    with pytest.raises(ValueError, match="expected at most 16"):
        manager.admit(Admit(Request("b", range(20)), num_tokens=14, num_lookahead_tokens=3), ())
    assert manager.pool.num_free == 36
    check_invariants(manager)


def test_cached_circular_group_disables_hits():
    manager = make(FULL, ROUND)
    new(manager, "a", 16)
    assert manager.pool.num_cached == 0 and hit(manager, 16) == 0
    manager = make(FULL, replace(ROUND, cached=False))
    go(manager, new(manager, "a", 24, 16), 8)
    assert hit(manager, 26) == 24
    plan = manager.step(new=[Admit(Request("b", range(26)), num_tokens=2)])
    assert plan.num_computed_tokens.tolist() == [24]
    # All blocks of the group are allocated and zeroed at admission.
    assert len(plan.append_ids[1]) == 4 and plan.zero.tolist() == plan.append_ids[1].tolist()
    check_invariants(manager)


def test_a_fork_copies_the_blocks_of_a_buffer_that_are_written():
    manager = make(ROUND)
    a = new(manager, "a", 40, 10)
    go(manager, a, 8)
    manager.fork(a, Request("b", range(30)))
    plan = go(manager, a, 3)  # tokens 18 to 20 are in columns 0 and 1
    assert plan.copy[:, 0].tolist() == [1, 2]
    assert ids(manager, a) == [*plan.copy[:, 1].tolist(), 3, 4]
    check_invariants(manager)


@pytest.mark.parametrize(("last", "resumes_at"), [(3, 13), (6, 0)])
def test_row_resumes_unless_its_window_was_overwritten(last, resumes_at):
    """The buffer has 16 slots. Token 13 attends to tokens 8 and later, and the first write that
    overwrites one of them is that of token 24.
    """
    manager = make(ROUND)
    a = new(manager, "a", 40, 13)
    plan = go(manager, a, last, last)
    assert manager.abort(plan.step_id - 1) == {"a": resumes_at}
    check_invariants(manager)


def drafting(group):
    return replace(group, drafts=True)


def test_drafting_group_recomputes_the_last_block_of_its_hit():
    for groups in ([drafting(FULL)], [drafting(FULL), WINDOW], [FULL, drafting(WINDOW)]):
        manager = make(*groups)
        new(manager, "a", 17)
        # The drafter recomputes the block of the last token.
        assert [hit(manager, n) for n in (17, 16, 15, 4)] == [12, 12, 8, 0]
    # The whole window of a shorter hit must still be cached.
    manager = make(drafting(WINDOW))
    a = new(manager, "a", 20)
    page = ids(manager, a)[2]
    manager.free(a)
    manager.cache.evict([page])
    # Hits of 16 and 12 tokens would read the evicted block 2. For a hit of 8 tokens, the drafter
    # would need block 2, because a drafting group drops the last block of its hit.
    assert hit(manager, 30) == 4


@pytest.mark.parametrize("group", [STATE, ENCODER])
def test_only_groups_that_store_tokens_may_draft(group):
    with pytest.raises(ValueError, match=r"^groups\[1\] has drafts=True, but its kind does not"):
        make(FULL, drafting(group))
    with pytest.raises(TypeError, match=r"^drafts is 1: expected True or False"):
        GroupSpec("full_attention", 4, drafts=1)


def partial(num_blocks=40):
    """A manager whose hits may end inside blocks of 16 tokens, and a request that others hit."""
    manager = make(GroupSpec("full_attention", 16), hash_block_size=4, num_blocks=num_blocks)
    return manager, new(manager, "a", 30)


def admit_hit(manager, name, **options):
    """Admit a request with its hit of 28 tokens by a call."""
    request = Request(name, range(30))
    found = manager.cache.find_prefix(request).block_ids
    return request, manager.admit(Admit(request, num_tokens=2, **options), found)


def test_per_request_calls_find_and_copy_hits_inside_blocks():
    manager, _ = partial()
    b = Request("b", range(30))
    found = manager.cache.find_prefix(b)
    assert (found.block_ids.tolist(), found.num_tokens) == ([1, 2], 28)
    assert manager.cache.find_prefix(b, whole_blocks=True)[1] == 16
    assert manager.cache.cached_tokens(b).on_device == 16  # hits consist of whole blocks only
    b, pages = admit_hit(manager, "b")
    assert pages.tolist() == [3] and manager.take_copies().tolist() == [[2, 3]]
    assert manager.take_copies().shape == (0, 2)
    assert ids(manager, b) == [1, 3] and manager.num_computed_tokens(b) == 30
    manager.extend(b, 1)
    check_invariants(manager)


def test_sources_and_destinations_are_held_until_their_copies_are_taken():
    manager, a = partial(num_blocks=5)
    manager.free(a)
    manager.free(admit_hit(manager, "b")[0])
    check_invariants(manager)
    assert manager.pool.num_free == 2  # the pending copy holds block 2 and the block of b
    large = Admit(Request("c", range(100, 148)), num_tokens=48)
    assert manager.admit(large, ()) is None and not manager.cache.reset()
    assert manager.take_copies().tolist() == [[2, 3]]
    assert manager.pool.num_free == 4 and len(manager.admit(large, ())) == 3
    check_invariants(manager)


def test_requests_continue_only_after_copies_are_taken():
    """This prevents an engine that ignores copies from reading slots that were never written."""
    manager, _ = partial()
    b, _ = admit_hit(manager, "b")
    for go_on in (
        lambda: manager.extend(b, 1),
        lambda: manager.advance([manager.row(b)], [30], [31]),
    ):
        with pytest.raises(ValueError, match="expected a call to take_copies before"):
            go_on()
    admit_hit(manager, "c")  # several requests may be admitted before the copies are taken
    assert manager.take_copies().tolist() == [[2, 3], [2, 4]]
    assert manager.extend(b, 1) is not None
    check_invariants(manager)


def test_external_tokens_after_a_hit_inside_a_block_are_rejected():
    manager, _ = partial()
    b = Request("b", range(60))
    ask = Admit(b, num_tokens=2, external=External(8))
    with pytest.raises(ValueError, match=r"^external.num_tokens is 8 after a hit of 28"):
        manager.admit(ask, manager.cache.find_prefix(b).block_ids)
    whole = manager.cache.find_prefix(b, whole_blocks=True).block_ids
    assert len(manager.admit(ask, whole)) == 1


@pytest.mark.parametrize("kind", ["recurrent", "full_attention"])
def test_only_steps_hit_states_and_uncached_groups_inside_blocks(kind):
    other = GroupSpec(kind, 16, cached=kind == "recurrent")
    manager = make(GroupSpec("full_attention", 16), other, hash_block_size=4)
    new(manager, "a", 28)
    assert hit(manager, 30) % 16 == 0


def test_blocks_cover_the_tokens_of_all_context_parallel_ranks():
    cp = ContextParallel(pcp_world_size=2, dcp_world_size=2)
    replicated = GroupSpec("full_attention", 4, replicated=True)
    manager = make(FULL, replicated, context_parallel=cp, enable_events=True)
    assert manager.block_sizes == (16, 4) and manager.cache.hash_block_size == 4
    plan = manager.step(new=[Request("a", range(40))])
    assert [len(each) for each in plan.append_ids] == [3, 10]
    assert hit(manager, 40) == 32
    stored = manager.cache.drain_events()
    assert {(event.group, event.block_size) for event in stored} == {(0, 16), (1, 4)}
    with pytest.raises(ValueError, match="computed_blocks"):
        manager.admit(Admit(Request("b", range(40)), num_tokens=1), [[1], [2]])


def test_recurrent_groups_require_steps():
    manager, a = make(STATE), Request("a", range(4))
    with pytest.raises(ValueError, match="admit cannot return the required copies of states"):
        manager.admit(Admit(a, num_tokens=4), ())
    manager.step(new=[a])
    with pytest.raises(ValueError, match=r"cannot undo tokens without num_speculative_blocks"):
        manager.step([0], [1], num_rejected_tokens=[1])


def test_step_ignores_changes_that_a_kind_makes_to_its_arrays():
    rows = np.array([0, 1], np.int32)

    @register("test_meddling")
    class Meddling(AttentionKind):
        def first_needed_token(self, num_computed_tokens):
            rows[1] = 1_000_000
            return 0

    manager = make(GroupSpec("test_meddling", 4))
    manager.step(new=[Request("a", range(4)), Request("b", range(4))])
    rows[1] = 1
    plan = manager.step(rows, np.array([3, 3], np.int32))
    assert plan.rows.tolist() == [0, 1]
    check_invariants(manager)


def test_kind_that_calls_back_is_rejected_and_an_inconsistent_one_is_called_once():
    asked = []

    @register("test_wavering")
    class Wavering(AttentionKind):
        def first_needed_token(self, num_computed_tokens):
            asked.append(num_computed_tokens)
            with pytest.raises(RuntimeError, match="another call of this manager is in progress"):
                manager.step()
            return num_computed_tokens - len(asked) % 7

    manager = make(GroupSpec("test_wavering", 4))
    for name in "abcd":
        request = new(manager, name, 40, 8)
        go(manager, request, 8, 8)
        check_invariants(manager)
        manager.free(request)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(("groups", "options", "message"), [
    ([], {}, "groups has 0 entries: expected 1 to 32"),
    ([GroupSpec("ful", 4)], {}, "kind is 'ful': expected one of "),
    ([GroupSpec("sliding_window", 4)], {}, "options of kind 'sliding_window' are {}"),
    ([GroupSpec("full_attention", 4, {"x": 1})], {}, "are {'x': 1}: expected none"),
    ([GroupSpec("sliding_window", 4, {"window": 0})], {}, "window is 0: expected"),
    ([FULL], {"hash_block_size": 3}, "hash_block_size is 3: expected a divisor"),
    ([FULL, WINDOW], {"retention_interval": 6}, "expected None, 0 or a multiple of 4, where"),
    ([FULL], {"watermark": 1.5}, "watermark is 1.5: expected a fraction"),
    ([GroupSpec("full_attention", 2**31 - 1), GroupSpec("full_attention", 2**31 - 3)], {},
     "the least common multiple of the groups' block sizes is "),
])  # fmt: skip
def test_invalid_groups_and_options_are_reported(groups, options, message):
    with pytest.raises(ValueError, match=message):
        make(*groups, **options)
