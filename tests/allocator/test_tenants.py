# SPDX-License-Identifier: Apache-2.0
"""Two tenants that do not trust each other. These tests cover every verifiable sentence of
docs/security.md.
"""

from __future__ import annotations

import ast
import itertools

import numpy as np
import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport, hash_blocks
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager
from tests.machinery import roots
from tests.machinery.shared import REPO
from tests.simulator.sequences import Group, Seq

SALTS = [None, "", "a", "b", "cache_salt"]
TOKENS = range(24)
GROUPS = {
    "full": [GroupSpec("full_attention", 4)],
    "window": [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 4, {"window": 6})],
    "state": [GroupSpec("full_attention", 4), GroupSpec("recurrent", 4)],
    "inside blocks": [GroupSpec("full_attention", 8)],
}


def make(groups, num_blocks=60, **options):
    options = {"hash_block_size": 4, "num_preallocate_tokens": 0, "enable_events": True} | options
    return KVCacheManager.for_groups(groups, num_blocks, 64, **options)


def run(manager, name, salt, tokens=TOKENS):
    """Run a request to completion in steps of 8 tokens."""
    request = Request(name, tokens, cache_salt=salt)
    plan = manager.step(new=[Admit(request, num_tokens=8)])
    row = plan.rows[0]
    num_hit = int(plan.num_computed_tokens[0])
    manager.report(StepReport(plan.step_id, completed=True))
    while (left := len(tokens) - manager.num_computed_tokens(request)) > 0:
        plan = manager.step([row], [min(left, 8)])
        manager.report(StepReport(plan.step_id, completed=True))
    manager.free(request)
    check_invariants(manager)
    return num_hit


def stored_hashes(manager):
    return {
        bytes(each)
        for event in manager.cache.drain_events()
        for each in getattr(event, "block_hashes", ())
    }


@pytest.mark.parametrize(("mine", "theirs"), [*itertools.permutations(SALTS, 2)])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_another_salt_hits_nothing_on_the_device_and_shares_no_hash(groups, mine, theirs):
    manager = make(groups)
    assert run(manager, "mine", mine) == 0
    of_mine = stored_hashes(manager)
    probe = Request("probe", TOKENS, cache_salt=theirs)
    assert sum(manager.cache.cached_tokens(probe)) == 0
    assert manager.cache.find_prefix(probe).num_tokens == 0
    assert run(manager, "theirs", theirs) == 0
    assert of_mine and not of_mine & stored_hashes(manager)
    assert run(manager, "mine again", mine) > 0


@pytest.mark.parametrize("host_write", ["back", "through"])
def test_another_salt_loads_nothing_from_the_host(host_write):
    manager = make(GROUPS["full"], num_blocks=8, num_host_blocks=60, host_write=host_write)
    for name in ("mine", "mine again"):
        run(manager, name, "a")
    run(manager, "evicts", "a", range(100, 124))
    assert manager.host_pool.num_cached > 0
    probe = [Request(name, TOKENS, cache_salt=salt) for name, salt in (("p", "b"), ("q", "a"))]
    assert [sum(manager.cache.cached_tokens(each)) > 0 for each in probe] == [False, True]
    plan = manager.step(new=[Admit(probe[0], num_tokens=8)])
    assert plan.num_computed_tokens.tolist() == [0] and len(plan.swap_in) == 0


def test_session_pins_only_blocks_of_its_own_salt():
    manager = make(GROUPS["full"])
    run(manager, "mine", "a")
    assert manager.cache.pin("theirs", Request("probe", TOKENS, cache_salt="b")) == 0
    assert manager.cache.pin("mine", Request("probe", TOKENS, cache_salt="a")) == 6


def test_child_of_another_salt_is_rejected():
    manager = make(GROUPS["full"])
    parent = Request("parent", TOKENS, cache_salt="a")
    manager.step(new=[parent])
    with pytest.raises(ValueError, match="extra keys differ"):
        manager.fork(parent, Request("child", TOKENS, cache_salt="b"))
    check_invariants(manager)


def test_events_name_the_salt_and_their_hashes_follow_from_it():
    manager = make(GROUPS["full"])
    run(manager, "mine", "a")
    event = manager.cache.drain_events()[0]
    assert event.extra_keys[0] == (("cache_salt", "a"),)
    keys = [[("cache_salt", "a")], *[None] * 5]
    salted, plain = hash_blocks(TOKENS, 4, extra_keys=keys), hash_blocks(TOKENS, 4)
    assert np.array_equal(event.block_hashes, salted[: len(event.block_hashes)])
    assert (manager.cache.find(salted).device > 0).all()
    assert not (manager.cache.find(plain).device > 0).any()


def test_extra_hash_is_the_salt_of_a_sequence():
    manager = BlockSpaceManager(4, 40, 0, watermark=0, enable_caching=True)
    seqs = [Seq(name, [*TOKENS], extra=name[0]) for name in ("a1", "b1", "a2")]
    for each in seqs:
        group = Group(each.seq_id, [each])
        manager.allocate(group)
        manager.mark_blocks_as_computed(group, len(TOKENS))
    mine, theirs, again = ({*manager.get_block_table(each)} for each in seqs)
    assert not mine & theirs and len(mine & again) >= 5


def test_given_hashes_contain_no_salt():
    manager = make(GROUPS["full"])
    given = [bytes(each) for each in hash_blocks(TOKENS, 4)]
    manager.step(new=[Request("mine", TOKENS, cache_salt="a", block_hashes=given)])
    theirs = Request("theirs", TOKENS, cache_salt="b", block_hashes=given)
    assert manager.cache.find_prefix(theirs).num_tokens == 20


def test_another_seed_shares_no_hash():
    hashes = [
        {
            bytes(each)
            for each in make(GROUPS["full"], hash_seed=seed).cache.hashes(Request("r", TOKENS))
        }
        for seed in ("one", "other", "vllm-none-hash")
    ]
    assert all(not one & other for one, other in itertools.combinations(hashes, 2))
    # The default salt is public.
    assert hashes[2] == {bytes(each) for each in hash_blocks(TOKENS, 4)}


@pytest.mark.slow
def test_only_documented_modules_listen_and_none_unpickle_or_create_temporary_files():
    """Checks the section "Who may listen" of docs/security.md."""
    of_listeners = {"socket", "asyncio", "zmq"}
    listeners = {
        REPO / "packages/kvcache-serve/src/kvcache_serve/cli/serve.py",
        *(REPO / "packages/kvcache-serve/src/kvcache_serve/server").glob("*.py"),
        *(REPO / "packages/kvcache-exchange/src/kvcache_exchange/router_events").glob("*.py"),
        *(REPO / "packages/kvcache-exchange/src/kvcache_exchange/transport").glob("*.py"),
        # The module itself only connects to a server, but Mooncake's client listens.
        REPO / "packages/kvcache-exchange/src/kvcache_exchange/store/mooncake.py",
    }
    modules = {
        *["socket", "socketserver", "asyncio", "http", "zmq", "ssl", "tempfile", "pickle", "shelve"]
    }
    calls = {"eval", "exec"}
    # HTTP clients, which connect but do not listen
    clients = {
        REPO / "packages/kvcache-exchange/src/kvcache_exchange/disaggregation/offer_calls.py"
    }
    for path in roots.files(".py"):
        forbidden = modules - of_listeners if path in listeners else modules
        if path in clients:
            forbidden = forbidden - {"http"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & forbidden, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, path
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("/tmp"), path
            elif isinstance(node, ast.Attribute) and node.attr == "load":
                assert not (isinstance(node.value, ast.Name) and node.value.id == "torch"), path
