# SPDX-License-Identifier: Apache-2.0
"""Drafts and rejections, also with two steps in flight whose results are not known.

An oracle records which token each page holds, and checks every read of attention and of states on
the device, where a step begins after the drafts that were accepted.
"""

import random
from collections import defaultdict

import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request
from kvcache.allocator.manager import check_invariants
from tests.machinery.shared import run_seeds

FULL = GroupSpec("full_attention", 4)


def make(*groups: GroupSpec, num_blocks: int = 40) -> KVCacheManager:
    options = {"num_preallocate_tokens": 0}
    return KVCacheManager.for_groups(groups or [FULL], num_blocks, 256, **options)


# Only drafts can be rejected ----------------------------------------------------------------------------

KNOWN = "num_rejected_tokens of row 0 is 1: expected at most 0, its drafts"


def test_step_rejects_no_known_token():
    manager, request = make(), Request("r", [1, 2])
    manager.step(new=[request])
    manager.step([0], [1], token_ids=[3])
    for ids in ({"token_ids": [4]}, {}):
        with pytest.raises(ValueError, match=KNOWN):
            manager.step([0], [1], num_rejected_tokens=[1], **ids)
        with pytest.raises(ValueError, match=KNOWN):
            manager.step([0], [0], num_rejected_tokens=[1], **ids)
    assert (manager.num_computed_tokens(request), request.num_tokens) == (3, 3)


def test_reject_tokens_rejects_no_known_token():
    manager, request = make(), Request("r", [1, 2])
    manager.admit(request)
    request.append_tokens([3])
    manager.extend(request, 1)
    with pytest.raises(ValueError, match=KNOWN):
        manager.reject_tokens(request, 1)
    assert manager.num_computed_tokens(request) == 3


def test_prompt_tokens_cannot_be_rejected():
    manager, request = make(), Request("r", range(7))
    manager.step(new=[Admit(request, num_lookahead_tokens=3)])
    with pytest.raises(ValueError, match=KNOWN):
        manager.step([0], [0], num_rejected_tokens=[1])


def test_drafts_can_be_rejected_after_the_token_that_replaces_them_was_appended():
    manager, request = make(), Request("r", range(4))
    manager.admit(request)
    manager.extend(request, 4)  # slots 4 to 7, three of which hold drafts
    request.append_tokens([4, 50])
    manager.reject_tokens(request, 3)
    assert manager.num_computed_tokens(request) == 5
    manager.extend(request, 1)
    with pytest.raises(ValueError, match=KNOWN):
        manager.reject_tokens(request, 1)


def test_advance_accepts_no_new_token_in_place_of_a_known_one():
    manager, request = make(), Request("r", [1, 2])
    manager.admit(request)
    manager.advance([0], [2], [3], token_ids=[3], num_token_ids=[1])
    expected = "start of row 0 is 2 with new token_ids: expected at least 3"
    with pytest.raises(ValueError, match=expected):
        manager.advance([0], [2], [3], token_ids=[4], num_token_ids=[1])
    assert request.token_ids.tolist() == [1, 2, 3]
    assert manager.advance([0], [2], [3]) == [()]  # computes the known token 3 again


def test_admit_and_step_give_slots_to_known_tokens_only():
    manager = KVCacheManager(4, 40, 400, num_preallocate_tokens=0)
    first = Request("a", range(16))
    manager.admit(Admit(first, 16))
    manager.free(first)
    second, third = Request("b", range(16)), Request("c", range(16))
    assert len(manager.admit(Admit(second, 16, num_lookahead_tokens=5))) == 3  # 4 + 5 slots
    manager.step(new=[Admit(third, 16, num_lookahead_tokens=5)])
    for request in (second, third):
        assert manager.num_computed_tokens(request) == 16
        assert len(manager.block_ids(request)) == 6


@pytest.mark.parametrize("how", ["abort", "invalidate"])
def test_after_an_abort_a_row_continues_after_the_certain_tokens(how):
    window = GroupSpec("sliding_window", 2, {"window": 5})
    manager, request = make(GroupSpec("full_attention", 2), window), Request("r", range(10))
    manager.step(new=[request])
    manager.step([0], [4], token_ids=[10])  # token 10 is certain; 11 to 13 are drafts
    step = manager.step([0], [4], token_ids=[], num_token_ids=[0])
    if how == "abort":
        assert manager.abort(step.step_id) == {"r": 11}
    else:
        assert manager.invalidate([manager.block_ids(request)[13 // 2]]) == {"r": 11}
    with pytest.raises(ValueError, match="expected at most 0"):
        manager.step([0], [4], num_rejected_tokens=[3])
    plan = manager.step([0], [4], token_ids=[], num_token_ids=[0])
    assert plan.num_computed_tokens.tolist() == [11]
    assert manager.block_ids(request, 1)[7 // 2] > 0  # token 11 reads tokens 7 to 10
    check_invariants(manager)


def test_states_need_the_result_of_the_last_step_before_the_next():
    states = GroupSpec("recurrent", 16, {"num_speculative_blocks": 3})
    manager, request = make(GroupSpec("full_attention", 16), states), Request("r", range(10))
    manager.step(new=[request])
    manager.step([0], [4], token_ids=[1])
    expected = "row 0 has [23] drafts of its last step that are neither rejected nor known"
    for arguments in ({}, {"num_rejected_tokens": [0]}, {"num_rejected_tokens": [1]}):
        with pytest.raises(ValueError, match=expected):
            manager.step([0], [4], **arguments)
    assert manager.num_computed_tokens(request) == 14
    plan = manager.step([0], [4], token_ids=[2, 3], num_token_ids=[2], num_rejected_tokens=[2])
    assert plan.num_computed_tokens.tolist() == [12]


# Two steps in flight ------------------------------------------------------------------------------------


class Device:
    """The pages of a device, and the table of one row. A page maps slots to tokens, or "state" to the
    tokens that the state summarizes.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pages = defaultdict(dict)
        self.tables = [[] for _ in manager.groups]

    def apply(self, plan, row: int) -> None:
        copied = {source: dict(self.pages[source]) for source, _ in plan.copy.tolist()}
        for source, page in plan.copy.tolist():
            self.pages[page] = copied[source]
        for page in plan.zero.tolist():
            self.pages[page] = {}
        if row in plan.clear_rows:
            self.tables = [[] for _ in self.tables]
        for table, splits, ids, replaced in zip(
            self.tables, plan.append_splits, plan.append_ids, plan.replace
        ):
            for i, each in enumerate(plan.append_rows.tolist()):
                if each == row:
                    table += ids[splits[i] : splits[i + 1]].tolist()
            for each, column, page in replaced.tolist():
                if each == row:
                    table[column] = page

    def run(self, text: list[int], start: int, num_sure: int) -> None:
        """Compute text[start:]. Tokens from `num_sure` on are drafts."""
        for group, size, table in zip(self.manager.groups, self.manager.block_sizes, self.tables):
            options = group.options or {}
            if group.kind == "recurrent":
                pages = [page for page in table if page]
                if start:
                    assert self.pages[pages[0]]["state"] == text[:start], "wrong state"
                for i in range(len(text) - num_sure + 1):
                    self.pages[pages[i]]["state"] = text[: num_sure + i]
                continue
            for position in range(start, len(text)):
                assert table[position // size], "KV is written to the null page"
                self.pages[table[position // size]][position % size] = text[: position + 1]
            for position in range(start, len(text)):
                first = 0
                if group.kind == "sliding_window":
                    first = max(position - options["window"] + 1, 0)
                if group.kind == "chunked_local":
                    first = position // options["chunk_size"] * options["chunk_size"]
                for read in range(first, position):
                    found = self.pages[table[read // size]].get(read % size)
                    assert found == text[: read + 1], f"token {position} reads {read}: wrong KV"


def overwrite_free_blocks(manager: KVCacheManager, device: Device, name: str) -> None:
    """Let another request take some free blocks and write to them."""
    other = Request(name, [999] * 8, read_cache=False)
    plan = manager.step(new=[other])
    for ids in plan.append_ids:
        for page in ids.tolist():
            device.pages[page] = dict.fromkeys([*range(16), "state"], "other")
    manager.free(other)


def run_drafts(seed: int) -> None:
    """Run one request with drafts. The result of a step is known when the step after the next is
    planned or, for states, when the next step is planned.
    """
    choose = random.Random(seed)
    size, num_drafts = choose.choice([1, 2, 4]), choose.randint(1, 4)
    window, chunk = choose.randint(1, 9), choose.randint(1, 9)
    groups = [GroupSpec("full_attention", size)]
    if choose.random() < 0.8:
        groups.append(GroupSpec("sliding_window", size, {"window": window}))
    if choose.random() < 0.4:
        groups.append(GroupSpec("chunked_local", size, {"chunk_size": chunk}))
    has_states = choose.random() < 0.3
    if has_states:
        options = {"num_speculative_blocks": num_drafts}
        groups.append(GroupSpec("recurrent", size, options))
    ways = ["optimistic"] if has_states else ["optimistic", "lookahead", "advance"]
    way, tells = choose.choice(ways), has_states or choose.random() < 0.5
    delay = 0 if has_states else choose.randint(0, 1)  # further steps planned before the result
    manager = KVCacheManager.for_groups(groups, 400, 256, num_preallocate_tokens=0)
    device = Device(manager)
    text = [choose.randrange(100) for _ in range(choose.randint(1, 12))]
    request = Request("r", text)
    if way == "advance":
        manager.admit(request)
        device.tables = [manager.block_ids(request, g).tolist() for g in range(len(groups))]
    else:
        device.apply(manager.step(new=[request]), 0)
    device.run(text, 0, len(text))
    certain = told = len(text)  # what the scheduler knows, including the token that was sampled
    text = [*text, choose.randrange(100)]
    results = []  # (number of rejected drafts, tokens) of steps whose result is not known
    for number in range(choose.randint(2, 8)):
        rejected, ids = 0, []
        if number == 0:
            ids = text[told:]
        if len(results) > delay:
            rejected, known = results.pop(0)
            certain += num_drafts - rejected
            ids = known[told:]
        if not tells:
            ids = []
        told += len(ids)
        if has_states and number and choose.random() < 0.5:
            before = manager.num_computed_tokens(request)
            if rejected < num_drafts:
                with pytest.raises(ValueError, match="neither rejected nor known"):
                    manager.step([0], [1 + num_drafts], num_rejected_tokens=[rejected])
            assert manager.num_computed_tokens(request) == before
        if way == "optimistic":
            device.apply(
                manager.step(
                    [0],
                    [1 + num_drafts],
                    token_ids=ids,
                    num_token_ids=[len(ids)],
                    num_rejected_tokens=[rejected],
                ),
                0,
            )
        elif way == "lookahead":
            computed = manager.num_computed_tokens(request)
            plan = manager.step(
                [0],
                [certain + 1 - computed],
                token_ids=ids,
                num_token_ids=[len(ids)],
                num_lookahead_tokens=num_drafts * (1 + len(results)) + len(results),
            )
            device.apply(plan, 0)
        else:
            stop = certain + (1 + len(results)) * (1 + num_drafts)
            start = certain if not tells or certain >= told - len(ids) else told - len(ids)
            assert (
                manager.advance([0], [start], [stop], token_ids=ids, num_token_ids=[len(ids)])[0]
                is not None
            )
            device.tables = [manager.block_ids(request, g).tolist() for g in range(len(groups))]
        start = len(text) - 1  # where the device continues
        drafts = [choose.randrange(100) for _ in range(num_drafts)]
        num_sure = max(start + 1, request.num_tokens) if has_states else start + 1
        device.run([*text, *drafts], start, num_sure)
        overwrite_free_blocks(manager, device, f"f{number}")
        num_accepted = choose.choice([0, num_drafts, choose.randint(0, num_drafts)])
        text = [*text, *drafts[:num_accepted], choose.randrange(100)]
        results.append((num_drafts - num_accepted, text))
        if way != "optimistic":
            certain += 1
    check_invariants(manager)


NUM_CASES, CASES_PER_TEST = 12_000, 300


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.exhaustive if first else [])
        for first in range(0, NUM_CASES, CASES_PER_TEST)
    ],
)
def test_no_step_releases_what_a_step_with_undecided_drafts_reads(first):
    run_seeds(run_drafts, range(first, first + CASES_PER_TEST))


def test_the_first_token_of_the_last_step_is_certain():
    """Rejected drafts cannot belong to the step before the last one, because that step had none."""
    ring = GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False)  # 16 slots
    manager = KVCacheManager.for_groups([ring], 60, 64, num_preallocate_tokens=0)
    manager.step(new=[Request("a", range(6))])
    late = {"token_ids": [], "num_token_ids": [0]}
    for num_tokens in (1, 1, 4):  # no token becomes known; the last step has three drafts
        manager.step([0], [num_tokens], **late)
    # The step reads the five tokens before token 9, so 11 slots remain.
    assert manager.step([0], [11], **late, num_rejected_tokens=[3]).num_tokens.tolist() == [11]
