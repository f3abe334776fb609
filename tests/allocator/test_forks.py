# SPDX-License-Identifier: Apache-2.0
"""Forks and copy-on-write: rows share blocks until one row writes to them."""

import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport
from kvcache.allocator import check_invariants

FULL = GroupSpec("full_attention", 4)


def make(num_blocks=20, groups=(FULL,), **options):
    options = {"num_preallocate_tokens": 0} | options
    return KVCacheManager.for_groups(groups, num_blocks, 64, **options)


def admit(manager, name, tokens, **options):
    request = Request(name, tokens, **options)
    manager.step(new=[request])
    return request


def child_of(manager, parent, name, *more):
    """Fork a child from the parent's computed tokens, and append these tokens to the child."""
    computed = manager.num_computed_tokens(parent)
    child = Request(name, [*parent.token_ids[:computed].tolist(), *more])
    assert manager.fork(parent, child) >= 0
    return child


def serve(manager, *requests, num_tokens=1, **options):
    rows = [manager.row(request) for request in requests]
    return manager.step(rows, [num_tokens] * len(rows), **options)


def ids(manager, request, group=0):
    return manager.block_ids(request, group).tolist()


def test_the_first_write_to_a_shared_block_copies_and_replaces_it():
    manager = make()
    parent = admit(manager, "parent", range(10))
    child = child_of(manager, parent, "child", 7)
    manager.step()
    plan = serve(manager, parent)
    assert plan.copy.tolist() == [[3, 4]]
    assert plan.replace[0].tolist() == [[0, 2, 4]]
    assert ids(manager, parent) == [1, 2, 4]
    assert ids(manager, child) == [1, 2, 3]
    plan = serve(manager, child)  # only the child still holds the block, so nothing is copied
    assert len(plan.copy) == len(plan.replace[0]) == 0
    check_invariants(manager)


def test_fork_without_a_free_row_changes_nothing():
    manager = make(max_num_reqs=1)
    parent = admit(manager, "parent", range(10))
    assert manager.fork(parent, Request("child", range(10))) == -1
    assert manager.pool.ref_counts([1]).tolist() == [1]


@pytest.mark.parametrize(("fork", "message"), [
    (lambda m, p: m.fork(p, p), "'parent' is already admitted"),
    (lambda m, p: m.fork(Request("who", [1]), Request("c", [1])), "'who' is not admitted"),
    (lambda m, p: m.fork(p, Request("c", [*range(9), 99])), "tokens or extra keys differ"),
    (lambda m, p: m.fork(p, Request("c", range(9))), "tokens or extra keys differ"),
    (lambda m, p: m.fork(p, Request("c", range(65))), "would have 65 tokens"),
])  # fmt: skip
def test_invalid_forks_are_rejected_and_change_nothing(fork, message):
    manager = make()
    parent = admit(manager, "parent", range(10))
    with pytest.raises(ValueError, match=message):
        fork(manager, parent)
    check_invariants(manager)
    assert manager.pool.ref_counts([1, 2, 3]).tolist() == [1, 1, 1]
    assert len(manager.step().append_rows) == 0


def test_fork_requires_drafts_to_be_confirmed_or_rejected():
    manager = make()
    parent = admit(manager, "parent", range(10))
    serve(manager, parent, num_tokens=3)
    child = Request("child", range(10))
    with pytest.raises(ValueError, match="13 computed tokens, of which 10 are known"):
        manager.fork(parent, child)
    manager.reject_tokens(parent, 3)
    assert manager.fork(parent, child) == 1


def test_requests_admitted_by_admit_cannot_be_forked():
    manager = make()
    request = Request("r", range(10))
    manager.admit(Admit(request, num_tokens=10), ())
    with pytest.raises(ValueError, match="expected a request that step admitted"):
        manager.fork(request, Request("child", range(10)))


@pytest.mark.parametrize("leaves", [False, True])
def test_failed_page_outside_the_parents_window_affects_the_child(leaves):
    window = GroupSpec("sliding_window", 4, {"window": 4})
    manager = make(groups=[window], enable_caching=False)
    parent = Request("parent", range(40))
    manager.step(new=[Admit(parent, num_tokens=8)])
    failed = ids(manager, parent)[0]
    manager.step([0], [8])
    assert ids(manager, parent)[0] == 0  # the null block: the parent has dropped the page
    child_of(manager, parent, "child", *range(16, 40))
    if leaves:
        manager.free(parent)
    told = {"child": 0} if leaves else {"parent": 0, "child": 0}
    assert manager.report(StepReport(0, True, [failed])) == told
    check_invariants(manager)
