# SPDX-License-Identifier: Apache-2.0
"""All sequences of calls to small managers, up to a depth (see `small_worlds`)."""

import pytest

from kvcache import KVCacheManager
from tests.machinery.shared import spread
from tests.simulator import small_worlds
from tests.simulator.small_worlds import Run, World, all_worlds, explore

FEW, MANY = 60, 6_000  # calls per world: a tenth of a second, or about six seconds


def names(worlds):
    return [each.name for each in worlds]


def world_of(name: str) -> World:
    return next(each for each in all_worlds() if each.name == name)


def test_a_manager_is_right_after_few_calls():
    results = [explore(world, FEW, test_every=20) for world in all_worlds()[::5]]
    print(*results, sep="\n")
    assert all(each.depth > 0 for each in results)


@pytest.mark.slow
@pytest.mark.parametrize("name", spread(names(all_worlds()), 8))
def test_a_manager_is_right_after_all_short_sequences(name):
    result = explore(world_of(name), MANY)
    print(result)
    assert result.depth >= 3


def test_every_kind_pair_and_call_has_a_world():
    worlds = all_worlds()
    assert len(set(names(worlds))) == len(worlds)
    for calls in small_worlds.CALLS:
        kinds = {each.kinds for each in worlds if each.calls == calls}
        wanted = set(small_worlds.KINDS) - ({"recurrent"} if calls == "direct" else set())
        assert wanted <= {kind for each in kinds for kind in each}
    called = {name for calls in small_worlds.CALLS.values() for name in calls.split()}
    made = {name[3:] for name in vars(Run) if name.startswith("do_")}
    assert called == made | small_worlds.STEPS.keys()


# Planted defects, which the worlds must detect -------------------------------------------------------


def test_a_missing_copy_is_detected(monkeypatch):
    carry_out = Run.carry_out

    def without_copies(self, plan):
        plan.copy = plan.copy[:0]
        carry_out(self, plan)

    monkeypatch.setattr(Run, "carry_out", without_copies)
    with pytest.raises(AssertionError, match="reads wrong KV"):
        explore(world_of("full+window/share"), 1000)


def test_an_invalidation_without_effect_is_detected(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "invalidate", lambda self, ids: {})
    with pytest.raises(AssertionError, match="wrong KV"):
        explore(world_of("full/fail"), 1000)


def test_an_abort_without_effect_is_detected(monkeypatch):
    report = KVCacheManager.report
    monkeypatch.setattr(
        KVCacheManager, "report", lambda self, of: report(self, of) if of.completed else {}
    )
    with pytest.raises(AssertionError, match="wrong KV"):
        explore(world_of("full/torn"), 1000)


def test_a_key_without_the_order_of_free_blocks_is_detected(monkeypatch):
    """The test of keys finds that unlike states have one key."""
    parts = Run.parts
    monkeypatch.setattr(Run, "parts", lambda self: (parts(self) or [()])[:3])
    with pytest.raises(AssertionError, match=r"differs|other calls"):
        explore(world_of("full/cache"), 2000, test_every=1)
