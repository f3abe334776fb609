# SPDX-License-Identifier: Apache-2.0
"""The policy `learned` on two tiers: evicted pages and declined writes match those of the reference
model.
"""

import random

import numpy as np
import pytest

from kvcache import BlockPool
from tests.allocator.test_eviction import NUM_NODES, hash_of, hashes, parent_of, path_to
from tests.machinery.eviction_models import Learned, LearnedCopies, Pool
from tests.machinery.shared import sampled


class Driver:
    """Runs the same requests on two pools and on their reference models.

    A block evicted from the device is copied to the host.
    """

    def __init__(self, seed, cost):
        self.random = random.Random(seed)
        options = {"double_cost_tokens": cost} if cost else {}
        num_blocks, num_pages = self.random.randint(8, 20), self.random.randint(6, 30)
        self.device = BlockPool(num_blocks, "learned", options)
        self.host = BlockPool(num_pages, "learned", copies_of=self.device)
        self.device_model = Pool(num_blocks, Learned(num_blocks, cost))
        self.host_model = Pool(num_pages, LearnedCopies(num_pages, self.device_model.policy))
        self.held_pages = []
        self.now = 0.0
        self.num_copied = self.num_declined = self.num_loaded = self.num_again = 0

    def write(self, block):
        """Copy a block that is about to be evicted from the device to the host, if the expected
        hits justify the space.
        """
        cached = self.device_model.blocks[block].cached
        segment = self.device_model.policy.segment_of.get(block)
        number, group, _ = cached
        page = self.host_model.lookup(number, group)
        if page > 0:
            self.host.retain([page])
            self.host_model.retain([page])
            self.host.copy_again(page, self.device, block)
            self.host_model.policy.on_copy(page, segment)
            self.num_again += 1
        else:
            evicted = [] if self.host_model.empty else self.host_model.candidates()
            gain = self.host.gain_of_copy(self.device, block)
            assert gain == pytest.approx(self.host_model.policy.gain(segment, evicted), 1e-9, 1e-12)
            if self.random.random() < 0.5 and gain < 0.05:
                self.num_declined += 1
                return
            taken = self.host.allocate(1)
            expected = self.host_model.allocate(1)
            assert (None if taken is None else taken.tolist()) == expected
            if taken is None:
                return
            (page,) = expected
            self.host.publish_copy(page, self.device, block, is_chain=group != 1)
            self.host_model.publish_copy(page, cached, segment)
            self.num_copied += 1
        if self.random.random() < 0.05:  # a request still holds the page
            self.held_pages.append(page)
            return
        self.host.release([page])
        self.host_model.release([page])

    def allocate(self, n):
        """Allocate one block at a time, so that the model predicts each victim in advance."""
        assert n <= self.device_model.num_free()
        out = []
        for _ in range(n):
            if not self.device_model.empty and self.random.random() < 0.95:
                self.write(self.device_model.victim())
            (new,) = self.device.allocate(1).tolist()
            assert [new] == self.device_model.allocate(1)
            out.append(new)
        return out

    def publish(self, nodes, ids, group):
        for node, i in zip(nodes, ids, strict=True):
            parent = parent_of(node)
            self.device.publish([i], hashes([node]), group, hash_of(parent), group != 1)
            self.device_model.publish(i, node, group, parent if group != 1 else None)

    def request(self):
        group = self.random.choice([0, 0, 1, 2])
        nodes = path_to(self.random.randrange(NUM_NODES))
        held = []
        for node in nodes:
            found = self.device_model.lookup(node, group)
            if found < 0:
                break
            held.append(found)
        self.device.retain(held)
        self.device_model.retain(held)
        self.device.hit(held)
        for i in held:
            self.device_model.policy.on_hit(i)
        num_hit = len(held)
        pages = [self.host_model.lookup(node, group) for node in nodes[num_hit:]]
        pages = pages[: next((k for k, page in enumerate(pages) if page < 0), len(pages))]
        self.host.retain(pages)
        self.host_model.retain(pages)
        new = self.allocate(len(nodes) - num_hit)
        self.publish(nodes[num_hit:], new, group)
        # If the block is not moved, both copies are kept, as with min_gain_to_write.
        is_moved = self.random.random() < 0.7
        for page in pages:
            self.num_loaded += 1
            if is_moved:
                self.host.notify_load(page)
                self.host_model.policy.on_load(page)
        self.host.release(pages[::-1])
        self.host_model.release(pages[::-1])
        ids = [*held, *new][::-1]
        if self.random.random() < 0.9:
            size = self.random.choice([16, 5_000, 60_000])
            ends = [size * k for k in range(len(ids), 0, -1)]
            output = self.random.choice([0, 400])
            self.now += self.random.choice([0, 0.5, 5, 50])
            self.device.set_now(self.now)
            self.host.set_now(self.now)
            self.device_model.policy.set_now(self.now)
            self.device.notify_release(
                ids,
                ends,
                tokens_per_block=size,
                num_prefix_tokens=size * num_hit,
                num_output_tokens=output,
            )
            self.device_model.policy.on_release_all(ids, ends, size, 0, size * num_hit, output)
        self.device.release(ids)
        self.device_model.release(ids)

    def let_pages_go(self):
        self.host.release(self.held_pages)
        self.host_model.release(self.held_pages)
        self.held_pages = []

    def forget(self):
        for pool, model in ((self.device, self.device_model), (self.host, self.host_model)):
            i = self.random.choice(list(model.blocks))
            pool.evict([i])
            model.evict(i)

    def reset(self):
        if self.random.random() < 0.1:
            self.let_pages_go()
        assert self.host.reset() == self.host_model.reset()

    def step(self):
        operations = {self.request: 90, self.let_pages_go: 4, self.forget: 4, self.reset: 2}
        self.random.choices(list(operations), operations.values())[0]()
        for pool, model in ((self.device, self.device_model), (self.host, self.host_model)):
            pool.check_invariants()
            assert pool.num_evicted == model.num_evicted
            assert pool.num_free == model.num_free()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "cost"), sampled([(k, 100_000 * (k % 2)) for k in range(8)], 2))
def test_every_evicted_page_matches_the_model(seed, cost):
    driver = Driver(seed, cost)
    for _ in range(600):
        driver.step()
    assert min(driver.num_copied, driver.num_loaded) > 50 and driver.num_again > 10
    assert driver.host_model.num_evicted > 50


@pytest.mark.exhaustive
def test_every_evicted_page_matches_the_model_over_20_000_requests():
    driver = Driver(100, 0)
    for _ in range(20_000):
        driver.step()
    assert driver.num_declined > 10


def released(pool, first, answer, held=()):
    """Release a prompt of three blocks with an answer of `answer` tokens. Return its blocks."""
    ids = pool.allocate(3).tolist()
    pool.publish(ids, hashes(range(first, first + 3)))
    ends = [3 * 512, 2 * 512, 512]
    pool.notify_release(ids[::-1], ends, tokens_per_block=512, num_output_tokens=answer)
    pool.release(ids[::-1])
    return ids


def test_loaded_page_is_evicted_first():
    device = BlockPool(20, "learned")
    host = BlockPool(4, "learned", copies_of=device)
    blocks = released(device, 0, 0)
    pages = host.allocate(3).tolist()
    for page, block in zip(pages, blocks, strict=True):
        host.publish_copy(page, device, block, is_chain=False)
    host.notify_load(pages[1])
    host.release(pages)
    assert host.allocate(1).tolist() == [pages[1]]
    assert host.allocate(1).tolist() == [pages[0]]


def test_gain_of_a_copy_is_its_expected_hits():
    """A block that no request has released yet has no statistics, so a copy is assumed to have the
    full gain.
    """
    device = BlockPool(20, "learned")
    host = BlockPool(3, "learned", copies_of=device)
    (held,) = device.allocate(1).tolist()
    device.publish([held], hashes([9]))
    assert host.gain_of_copy(device, held) == 1
    block = released(device, 0, 0)[0]
    assert 0 < host.gain_of_copy(device, block) < 1
    plain = BlockPool(3, "lru", copies_of=device)
    assert plain.gain_of_copy(device, block) == 1


def test_invalid_calls_are_reported_and_change_nothing():
    device, other = BlockPool(9, "learned"), BlockPool(9)
    host = BlockPool(9, "learned", copies_of=device)
    with pytest.raises(
        ValueError, match="'learned' for both, because the host learns from releases"
    ):
        BlockPool(9, "learned", copies_of=other)
    with pytest.raises(ValueError, match="option 'double_cost_tokens' is 5: expected no options"):
        BlockPool(9, "learned", {"double_cost_tokens": 5}, copies_of=device)
    with pytest.raises(ValueError, match="host_eviction is 'priority': expected one of learned, l"):
        BlockPool(9, "priority", copies_of=device)
    block = released(device, 0, 0)[0]
    (page,) = host.allocate(1).tolist()
    for call, text in (
        (
            lambda: host.publish_copy(page, device, 8),
            "source_id is block 8, which is not published",
        ),
        (lambda: host.publish_copy(page, device, 9), "source_id holds block 9: expected 1 to 8"),
        (lambda: host.publish_copy(0, device, block), "ids holds block 0: expected 1 to 8"),
        (
            lambda: host.copy_again(page, device, block),
            f"id is block {page}, which is not both cach",
        ),
        (lambda: host.notify_load(page), f"id is block {page}, which is not both cached and held"),
        (lambda: host.notify_load(-1), "id holds block -1: expected 1 to 8"),
        (lambda: host.gain_of_copy(device, 8), "source_id is block 8, which is not published"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    host.check_invariants()
    assert host.num_cached == 0
    host.publish_copy(page, device, block)
    assert host.lookup(hashes([0])).tolist() == [page]
    with pytest.raises(TypeError):
        host.publish_copy(page, None, block)
    np.testing.assert_array_equal(host.ref_counts([page]), [1])
