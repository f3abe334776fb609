# SPDX-License-Identifier: Apache-2.0
"""The option `engine_copies_states`: per-request calls with recurrent groups, whose states the
engine copies.
"""

import random

import pytest

from kvcache.allocator import Admit, KVCacheManager, Request, check_invariants
from kvcache.specs import GroupSpec
from kvcache.step import StepReport

BLOCK = 4
STATE, FULL = GroupSpec("recurrent", BLOCK), GroupSpec("full_attention", BLOCK)


def make(num_blocks=20, groups=(STATE, FULL), **options):
    options = {"num_preallocate_tokens": 0, "engine_copies_states": True} | options
    return KVCacheManager.for_groups(list(groups), num_blocks, 64, **options)


def tables(manager, request):
    return [manager.block_ids(request, group).tolist() for group in range(len(manager.groups))]


def test_state_moves_to_the_column_of_the_last_token_and_skipped_columns_are_null():
    manager = make()
    request = Request("r", range(20))
    states, attention = manager.admit(Admit(request, num_tokens=2), ())
    assert len(states) == 1 and len(attention) == 1
    states, attention = manager.extend(request, 1)  # the state is updated in place
    assert len(states) == 0 and len(attention) == 0
    states, attention = manager.extend(request, 13)
    assert states.tolist()[:2] == [0, 0] and states[2] > 0 and len(attention) == 3
    assert tables(manager, request)[0][:3] == [0, 0, 0]
    check_invariants(manager)


def test_page_left_by_a_state_is_freed_when_the_last_step_is_reported():
    manager = make()
    request = Request("r", range(20))
    first = manager.step()
    manager.admit(Admit(request, num_tokens=2), ())
    num_free = manager.pool.num_free
    # This call allocates one page per group. The old page of the state is released later.
    manager.extend(request, 4)
    assert manager.pool.num_free == num_free - 2
    second = manager.step()
    manager.report(StepReport(first.step_id, completed=True))
    assert manager.pool.num_free == num_free - 1
    manager.report(StepReport(second.step_id, completed=True))
    manager.free(request)
    assert manager.pool.num_free == manager.pool.num_total
    check_invariants(manager)


def test_only_states_at_block_ends_are_hits():
    manager = make()
    request = Request("a", range(12))
    manager.admit(Admit(request, num_tokens=4), ())  # ends at a block boundary
    manager.extend(request, 3)  # ends inside the second block
    manager.extend(request, 5)  # ends at the third block boundary
    manager.free(request)
    ids, num_tokens, _ = manager.cache.find_prefix(Request("b", range(12)))
    assert num_tokens == 4 and [len(each) for each in ids] == [1, 1]
    found = manager.cache.find_prefix(Request("b", range(13)))
    assert found.num_tokens == 12 and found.num_shared_tokens == 12
    found = manager.cache.find_prefix(Request("b", range(11)))
    # The last cached state is at 4 tokens, although 8 tokens are cached in the token group.
    assert (found.num_tokens, found.num_shared_tokens) == (4, 8)


def test_state_left_by_a_quiet_request_at_a_block_end_is_a_hit():
    manager = make()
    request = Request("a", range(3))
    manager.admit(Admit(request, num_tokens=3), ())
    row = manager.row(request)
    # The engine has computed token 3 without calling the manager, and continues with token 4.
    manager.advance([row], [4], [5], token_ids=[3, 4], num_token_ids=[2])
    manager.free(request)
    assert manager.cache.find_prefix(Request("b", range(6))).num_tokens == 4


DRAFTS = GroupSpec("recurrent", BLOCK, {"num_speculative_blocks": 2})


def test_pages_of_drafts_stay_in_their_columns():
    manager = make(groups=(DRAFTS, FULL))
    request = Request("r", range(3))
    first = manager.admit(Admit(request, num_tokens=3), ())[0].tolist()
    assert len(first) == 3  # the state and the states after two drafts
    row = manager.row(request)
    [(new, _)] = manager.advance([row], [3], [6])  # the last tokens are in the next block
    assert len(new) == 1 and tables(manager, request)[0] == [*first, *new]
    assert manager.advance([row], [4], [5]) == [()]  # both drafts were rejected
    assert tables(manager, request)[0] == [*first, *new]
    manager.advance([row], [5], [6])  # no draft can be rejected to the first block any more
    assert tables(manager, request)[0] == [0, *first[1:], *new]
    check_invariants(manager)
    manager.free(request)
    assert manager.pool.num_free == manager.pool.num_total


@pytest.mark.parametrize("num_skipped", [1, 2, 3])
def test_pages_of_drafts_in_skipped_columns_are_appended_again(num_skipped):
    manager = make(groups=(DRAFTS, FULL))
    request = Request("r", range(20))
    first = manager.admit(Admit(request, num_tokens=4), ())[0].tolist()
    stop = 4 * (num_skipped + 2)
    [(new, _)] = manager.advance([manager.row(request)], [4], [stop])
    table = tables(manager, request)[0]
    assert table[-len(new) :] == new and table[: num_skipped + 1] == [0] * (num_skipped + 1)
    assert (
        table[num_skipped + 1 :]
        == {
            1: [first[2], first[1], new[-1]],
            2: [first[1], first[2], new[-1]],
            3: [first[1], first[2], new[-1]],
        }[num_skipped]
    )
    check_invariants(manager)


def test_only_calls_of_the_engine_serve_states_of_drafts():
    manager = make(groups=(DRAFTS, FULL))
    with pytest.raises(ValueError, match=r"^step cannot serve groups with num_speculative_blocks"):
        manager.step(new=[Request("r", range(9))])
    with pytest.raises(
        ValueError, match=r"hash_block_size is 2, and groups\[0\] has num_speculative"
    ):
        make(groups=(DRAFTS, FULL), hash_block_size=2)


class Engine:
    """An engine that copies states at the start of each step and writes new states at its end.

    A page's content is represented by a digest of the tokens.
    """

    def __init__(self, seed, num_blocks, groups):
        self.rng = random.Random(seed)
        self.manager = make(num_blocks, groups)
        self.specs = list(groups)
        self.slots, self.tables, self.requests = {}, {}, {}
        self.num_computed, self.step_id = {}, None
        self.hits = self.preemptions = 0
        self.heads = [[self.rng.randrange(9) for _ in range(30)] for _ in range(3)]

    def digest(self, tokens, count):
        return hash(tuple(tokens[:count]))

    def step(self, number):
        manager, rng = self.manager, self.rng
        plan = manager.step()
        if self.step_id is not None:
            manager.report(StepReport(self.step_id, completed=True))
        self.step_id = plan.step_id
        filled, spans, self.new = set(), [], set()

        def served(name, start, stop):
            request = self.requests[name]
            spans.append((name, start, stop))
            ids = manager.block_ids(request, 0)
            filled.update(ids[start // BLOCK : stop // BLOCK].tolist())

        for name in sorted(self.requests, key=lambda _: rng.random()):
            request, start = self.requests[name], self.num_computed[name]
            stop = min(start + rng.choice([1, 1, 3, 4, 9]), request.num_tokens)
            new = manager.extend(request, stop - start)
            if new is None:  # the request is freed and resubmitted with a new id
                self.preemptions += 1
                manager.free(request)
                del self.requests[name]
                continue
            for own, more in zip(self.tables[name], new):
                own.extend(more.tolist())
                self.new.update(more.tolist())
            self.num_computed[name] = stop
            served(name, start, stop)
        if len(self.requests) < 6 and rng.random() < 0.6:
            self.admit(f"r{number}", filled, served)
        self.check_reads(spans)
        self.write(spans)
        for name, _, stop in spans:
            request = self.requests[name]
            if stop == request.num_tokens and rng.random() < 0.5:
                if stop < 60:
                    request.append_tokens([rng.randrange(9)])
                    continue
                manager.free(request)
                del self.requests[name]
            elif rng.random() < 0.05 or stop == request.num_tokens:
                manager.free(request)
                del self.requests[name]
        check_invariants(manager)

    def admit(self, name, filled, served):
        rng, manager = self.rng, self.manager
        head = rng.choice(self.heads)
        tokens = head[: rng.randrange(len(head))] + [
            rng.randrange(9) for _ in range(rng.randrange(1, 20))
        ]
        request = Request(name, tokens)
        ids, start, _ = manager.cache.find_prefix(request)
        if start and int(ids[0][-1]) in filled:
            return  # only this step computes the state
        count = min(rng.choice([1, 4, 8, 30]), len(tokens) - start)
        new = manager.admit(Admit(request, num_tokens=count), ids if start else ())
        if new is None:
            return
        self.hits += start > 0
        self.requests[name], self.num_computed[name] = request, start + count
        self.tables[name] = [
            ids[g].tolist() * bool(start) + new[g].tolist() for g in range(len(new))
        ]
        self.new.update(*(each.tolist() for each in new))
        served(name, start, start + count)

    def check_reads(self, spans):
        for name, start, stop in spans:
            tokens = self.requests[name].token_ids.tolist()
            if start:
                block = self.tables[name][0][(start - 1) // BLOCK]
                assert self.slots[0, block] == self.digest(tokens, start), f"{name} at {start}"
                # While states are copied, newly allocated pages are zeroed or overwritten.
                is_new = block in self.new and (stop - 1) // BLOCK != (start - 1) // BLOCK
                assert not is_new, "a page is allocated from which a state is still copied"
            for group in range(1, len(self.specs)):
                window = self.specs[group].options.get("window", 99)
                for at in range(max(start - window + 1, 0), start):
                    block = self.tables[name][group][at // BLOCK]
                    assert self.slots[group, block, at % BLOCK] == self.digest(tokens, at + 1)

    def write(self, spans):
        for name, start, stop in spans:
            tokens = self.requests[name].token_ids.tolist()
            self.slots[0, self.tables[name][0][(stop - 1) // BLOCK]] = self.digest(tokens, stop)
            for group in range(1, len(self.specs)):
                for at in range(start, stop):
                    block = self.tables[name][group][at // BLOCK]
                    assert block != 0
                    self.slots[group, block, at % BLOCK] = self.digest(tokens, at + 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [25, 35, 400])
@pytest.mark.parametrize(
    "groups", [(STATE, FULL), (STATE, FULL, GroupSpec("sliding_window", BLOCK, {"window": 6}))]
)
def test_every_step_continues_from_the_state_of_its_tokens(groups, num_blocks):
    hits = preemptions = 0
    for seed in range(10):
        print(f"seed {seed}, {num_blocks} blocks")
        engine = Engine(seed, num_blocks, groups)
        for number in range(150):
            engine.step(number)
        hits, preemptions = hits + engine.hits, preemptions + engine.preemptions
    assert hits > 0 and (preemptions > 0) == (num_blocks < 400)
