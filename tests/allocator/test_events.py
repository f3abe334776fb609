# SPDX-License-Identifier: Apache-2.0
"""Contents of cache events, lookups by hash, and the hashes of given blocks."""

import numpy as np
import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport, hash_blocks
from kvcache.allocator import check_invariants
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored

GROUPS = [
    GroupSpec("full_attention", 8),
    GroupSpec("sliding_window", 4, {"window": 6}),
    GroupSpec("chunked_local", 4, {"chunk_size": 8}),
]


def make(**options):
    options = {"enable_events": True, "num_preallocate_tokens": 0} | options
    return KVCacheManager(4, 30, 200, **options)


def rows_of(embeds):
    return None if embeds is None else np.arange(embeds * 3, dtype=np.float32).reshape(embeds, 3)


def check_hashes(event):
    """Check that the block hashes can be recomputed from the event alone."""
    every = hash_blocks(
        event.token_ids,
        event.hash_block_size,
        parent=event.parent_hash,
        extra_keys=event.extra_keys,
        algorithm=event.hash_algorithm,
    )
    per_block = event.block_size // event.hash_block_size
    assert np.array_equal(every[per_block - 1 :: per_block], event.block_hashes)


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxh3_128_cbor"])
@pytest.mark.parametrize("options", [
    {},
    {"lora": ("sql", "/adapters/sql")},
    {"cache_salt": "tenant"},
    {"mm_items": [("cat", 3, 6), ("dog", 17, 9)]},
    {"prompt_embeds": rows_of(18)},
    {"lora": ("sql", "/a"), "mm_items": [("cat", 10, 30)], "cache_salt": "t"},
])  # fmt: skip
def test_hashes_follow_from_events(algorithm, options):
    manager = KVCacheManager.for_groups(
        GROUPS, 60, 200, enable_events=True, hash_algorithm=algorithm, hash_block_size=2
    )
    request = Request("r", range(40), session="chat-7", **options)
    row = manager.step(new=[Admit(request, num_tokens=16)]).rows[0]
    manager.step([row], [24])
    events = manager.cache.drain_events()
    assert {event.group for event in events} == {0, 1, 2}
    for event in events:
        assert isinstance(event, BlockStored) and event.hash_algorithm == algorithm
        assert event.hash_block_size == 2 and event.block_size == manager.block_sizes[event.group]
        has_labels = bool(options)
        assert event.session == "chat-7" and event.lora == request.lora
        assert (event.extra_keys is not None) <= has_labels
        check_hashes(event)
    kinds = {event.group: (event.group_kind, event.window) for event in events}
    assert kinds == {
        0: ("full_attention", None),
        1: ("sliding_window", 6),
        2: ("chunked_local", None),
    }


def test_events_contain_the_extra_keys_of_their_blocks():
    manager = make()
    lora = ("lora", "sql", "/a")
    request = Request(
        "r", range(13), lora=("sql", "/a"), mm_items=[("cat", 6, 3)], cache_salt="t", session="s"
    )
    manager.step(new=[request])
    (event,) = manager.cache.drain_events()
    assert event.extra_keys == (
        (lora, ("cache_salt", "t")),
        (lora, ("mm", "cat", 2)),
        (lora, ("mm", "cat", -2)),
    )
    assert (event.lora, event.session) == (("sql", "/a"), "s")
    plain = Request("p", range(50, 63))
    manager.step(new=[plain])
    (event,) = manager.cache.drain_events()
    assert (event.lora, event.session, event.extra_keys) == (None, None, None)


def test_blocks_of_two_requests_are_reported_in_two_events():
    """The second request continues the first, but belongs to another session."""
    manager = make()
    manager.step(new=[Request("a", range(9), session="one")])
    manager.step(new=[Request("b", range(17), session="two")])
    first, second = manager.cache.drain_events()
    assert (first.session, len(first.block_hashes)) == ("one", 2)
    assert (second.session, len(second.block_hashes)) == ("two", 2)
    assert second.parent_hash == first.block_hashes[1].tobytes()
    assert second.token_ids.tolist() == [*range(8, 16)]


# --- look-ups -------------------------------------------------------------------------------------


def test_hashes_are_found_on_their_tier_and_hashes_of_blocks_are_returned():
    manager = make(num_host_blocks=20, host_write="through")
    request = Request("a", range(13))
    step = manager.step(new=[request])
    hashes = manager.cache.hashes(request)
    device = step.append_ids[0][:3].tolist()
    assert manager.cache.find(hashes).device.tolist() == device
    assert manager.cache.find(hashes).host.tolist() == [-1, -1, -1]
    written = manager.step()
    manager.report(StepReport(written.step_id, completed=True))
    pages = dict(written.swap_out.tolist())
    found = manager.cache.find([each.tobytes() for each in hashes])
    assert found.host.tolist() == [pages[block] for block in device]
    for ids, medium in ((device, "gpu"), (found.host, "cpu")):
        known = manager.cache.hashes_of(ids, medium)
        assert np.array_equal(known.hashes, hashes) and known.groups.tolist() == [0, 0, 0]
    manager.cache.evict(device[:1])
    assert manager.cache.find(hashes).device.tolist() == [-1, *device[1:]]
    known = manager.cache.hashes_of(device)
    assert known.groups.tolist() == [-1, 0, 0] and not known.hashes[0].any()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda c: c.find([bytes(31)]), ValueError, r"hashes\[0\] has 31 bytes: expected 32"),
    (lambda c: c.find(["a"]), TypeError, r"hashes\[0\] is 'a': expected bytes"),
    (lambda c: c.find(bytes(32)), TypeError, "expected an array or a list of bytes"),
    (lambda c: c.find(np.zeros((1, 16), np.uint8)), TypeError, r"of shape \[n, 32\]"),
    (lambda c: c.find([], group=1), ValueError, "group is 1: expected 0 to 0"),
    (lambda c: c.hashes_of([30]), ValueError, "ids holds block 30: expected 1 to 29"),
    (lambda c: c.hashes_of([1], "disk"), ValueError, "medium is 'disk': expected 'gpu'"),
    (lambda c: c.hashes_of([1], "cpu"), ValueError, "there is no host tier"),
])  # fmt: skip
def test_invalid_lookups_are_reported(call, error, message):
    with pytest.raises(error, match=message):
        call(make().cache)


# --- reset of one group ---------------------------------------------------------------------------


def test_reset_can_be_limited_to_one_group():
    manager = KVCacheManager.for_groups(
        GROUPS[:2], 40, 200, enable_events=True, num_host_blocks=30, host_write="through"
    )
    request = Request("a", range(24))
    manager.step(new=[request])
    assert not manager.cache.reset(group=1)  # a request holds blocks of the group
    manager.report(StepReport(manager.step().step_id, completed=True))
    manager.free(request)
    hashes = manager.cache.hashes(request)
    before = [manager.cache.find(hashes, group) for group in (0, 1)]
    assert all((tier > 0).any() for found in before for tier in found)
    manager.cache.drain_events()
    assert manager.cache.reset(group=1)
    after = [manager.cache.find(hashes, group) for group in (0, 1)]
    for tier in (0, 1):
        assert np.array_equal(before[0][tier], after[0][tier])
        assert (after[1][tier] == -1).all()
    events = manager.cache.drain_events()
    assert all(isinstance(event, BlockRemoved) and event.group == 1 for event in events)
    assert {event.medium for event in events} == {"gpu", "cpu"}
    assert manager.cache.cached_tokens(request).with_host == 0
    check_invariants(manager)
    with pytest.raises(ValueError, match="group is 2: expected 0 to 1"):
        manager.cache.reset(group=2)
    assert manager.cache.reset()
    assert [type(event) for event in manager.cache.drain_events()] == [AllBlocksCleared] * 2


# --- negative token ids ---------------------------------------------------------------------------


def test_negative_tokens_need_extra_keys_or_block_hashes():
    expected = r"token_ids\[1\] is -1: expected 0 to 2147483647 \(below 0 only where extra keys or"
    with pytest.raises(ValueError, match=expected):
        Request("r", [1, -1])
    manager = make()
    text, image = Request("t", range(6)), Request("i", range(6), mm_items=[("cat", 2, 9)])
    rows = manager.step(new=[text, image]).rows
    with pytest.raises(ValueError, match=r"token_ids\[0\] is -1: expected 0 to 2147483647"):
        manager.step(rows, [1, 1], token_ids=[-1, -1])
    with pytest.raises(ValueError, match=r"token_ids\[1\] is -7"):
        manager.step(rows, [2, 1], token_ids=[7, -7, -7], num_token_ids=[2, 1])
    assert (text.num_tokens, image.num_tokens) == (6, 6)
    manager.step(rows, [1, 1], token_ids=[7, -1])
    assert image.token_ids.tolist() == [*range(6), -1]
    given = Request("g", [-5] * 4, block_hashes=[bytes(32)])
    embeds = Request("e", [-5] * 4, prompt_embeds=rows_of(4))
    assert (manager.step(new=[given, embeds]).status == 0).all()


@pytest.mark.slow
def test_undrained_events_are_bounded_and_dropped_events_are_counted():
    manager = KVCacheManager(1, 2**17 + 2, 2**17, enable_events=True, num_preallocate_tokens=0)
    for i in range(9):  # each stores 2**17 blocks and evicts the previous ones
        request = Request("r", np.arange(2**17) + i)
        assert len(manager.step(new=[request]).rows) == 1
        manager.free(request)
    num_stored, num_removed = 9 * 2**17, 8 * 2**17 - 8
    cleared, *later = manager.cache.drain_events()
    assert cleared == AllBlocksCleared("gpu", cleared.num_dropped) and cleared.num_dropped >= 2**20
    waiting = sum(len(event.block_hashes) for event in later)
    assert cleared.num_dropped + waiting in range(
        num_stored + num_removed - 20, num_stored + num_removed + 20
    )
    assert not any(isinstance(event, AllBlocksCleared) for event in later)
    manager.cache.reset()
    assert manager.cache.drain_events() == [AllBlocksCleared()]
