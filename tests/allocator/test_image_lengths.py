# SPDX-License-Identifier: Apache-2.0
"""Two images with the same identifier but different numbers of tokens.

Engines compute equal hashes for both, but a request must never hit the KV of the other image. The
simulator (`tests/simulator`) also draws such images.
"""

import pytest

from kvcache import Admit, KVCacheManager, Request, StepReport
from kvcache.allocator import check_invariants

BLOCK = 4


def make(**options):
    options = {"num_preallocate_tokens": 0} | options
    return KVCacheManager(BLOCK, 40, 200, **options)


def image(name, length, num_tokens=20, start=4, identifier="img"):
    return Request(name, range(num_tokens), mm_items=[(identifier, start, length)])


def cached(manager, request):
    plan = manager.step(new=[request])
    manager.report(StepReport(plan.step_id, completed=True))
    manager.free(request)
    return plan


def hit(manager, request):
    return manager.cache.cached_tokens(request).on_device


def test_hashes_are_interoperable_for_any_length():
    manager = make()
    hashes = [manager.cache.hashes(image("r", length)).tolist() for length in (4, 3)]
    assert hashes[0][1] == hashes[1][1]


@pytest.mark.parametrize(("cached_length", "length"), [(5, 4), (4, 5), (12, 9), (3, 4)])
def test_an_image_of_another_length_ends_the_hit_before_it(cached_length, length):
    manager = make()
    cached(manager, image("a", cached_length))
    assert hit(manager, image("b", length)) == 4
    assert hit(manager, image("c", cached_length)) == 16
    ids, num_tokens, _ = manager.cache.find_prefix(image("d", length))
    assert (ids.tolist(), num_tokens) == ([1], 4)
    assert manager.step(new=[image("e", length)]).num_computed_tokens.tolist() == [4]
    check_invariants(manager)


def test_text_after_an_image_of_another_length_is_not_a_hit():
    """Text blocks after the images have equal hashes but different KV, because the text attends to
    the image.
    """
    manager = make()
    cached(manager, image("a", 5, num_tokens=40))
    other = image("b", 4, num_tokens=40)
    manager.step(new=[other])
    # Only the prompt that was cached first is found.
    assert hit(manager, image("c", 4, num_tokens=40)) == 4
    assert hit(manager, image("d", 5, num_tokens=40)) == 36


def test_blocks_of_another_image_length_are_rejected_as_computed_blocks():
    manager = make()
    cached(manager, image("a", 5))
    ids = manager.cache.find_prefix(image("b", 5)).block_ids
    with pytest.raises(ValueError, match=r"computed_blocks\[1\] is block 2, which does not"):
        manager.admit(Admit(image("c", 4), num_tokens=4), ids)
    assert len(manager.admit(Admit(image("d", 5), num_tokens=4), ids)) == 1


def test_each_of_several_or_overlapping_images_is_compared():
    manager = make()
    items = [("x", 2, 5), ("y", 6, 3), ("y", 12, 2)]
    cached(manager, Request("a", range(24), mm_items=items))
    assert hit(manager, Request("b", range(24), mm_items=items)) == 20
    for i, num_tokens in ((0, 0), (1, 4), (2, 12)):
        other = list(items)
        other[i] = (*items[i][:2], items[i][2] + 1)
        assert hit(manager, Request("c", range(24), mm_items=other)) == num_tokens


def test_hits_inside_blocks_require_equal_image_lengths():
    manager = KVCacheManager(16, 20, 200, hash_block_size=4, num_preallocate_tokens=0)
    manager.step(new=[image("a", 5, num_tokens=14)])
    for length, num_tokens in ((5, 12), (4, 4)):
        request = image("b", length, num_tokens=14)
        assert manager.cache.find_prefix(request).num_tokens == num_tokens
    plan = manager.step(new=[image("c", 4, num_tokens=14)])
    assert plan.num_computed_tokens.tolist() == [4] and plan.copy.tolist() == [[1, 2]]


def test_hits_on_the_host_require_equal_image_lengths():
    manager = KVCacheManager(
        BLOCK, 9, 64, num_host_blocks=20, host_write="through", num_preallocate_tokens=0
    )
    cached(manager, image("a", 5))
    cached(manager, Request("fill", range(100, 132)))
    assert hit(manager, image("b", 5)) == 0
    assert manager.cache.cached_tokens(image("b", 5)).with_host == 16
    assert manager.cache.cached_tokens(image("c", 4)).with_host == 4
    cached(manager, image("d", 5))  # loaded from the host
    assert hit(manager, image("e", 5)) == 16 and hit(manager, image("f", 4)) == 4
    check_invariants(manager)
