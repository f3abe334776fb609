# SPDX-License-Identifier: Apache-2.0
"""Admission of prompts in chunks or as a whole, and of requests that share a prefix within one step."""

import pytest

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request, Status


def make(num_blocks=10, block_size=4, max_model_len=2048, **options):
    options = {"num_preallocate_tokens": 0, **options}
    return KVCacheManager(block_size, num_blocks, max_model_len, **options)


# A first chunk that fits is served ---------------------------------------------------------------------


def test_chunk_that_fits_is_served_even_if_the_whole_prompt_never_fits():
    """The pool has 10 blocks of 4 tokens. The prompt has 41 tokens and is computed in chunks of 4."""
    manager, request = make(), Request("a", range(41))
    assert manager.would_fit(Admit(request, num_tokens=4)) == Status.SERVED
    assert manager.would_fit(Admit(request, num_tokens=4), whole=True) == Status.NEVER
    assert manager.would_fit(request) == Status.NEVER
    assert manager.step(new=[request]).status.tolist() == [Status.NEVER]
    assert manager.step(new=[Admit(request, num_tokens=4)]).status.tolist() == [Status.SERVED]
    for _ in range(8):
        assert manager.step([0], [4]).status.tolist() == [Status.SERVED]
    assert manager.would_fit(Admit(request, num_tokens=4)) == Status.NEVER
    assert manager.step([0], [4]).status.tolist() == [Status.NEVER]


def test_admit_serves_a_chunk_and_distinguishes_never_from_wait():
    manager, request, other = make(), Request("a", range(41)), Request("b", range(50, 91))
    assert manager.admit(Admit(request, num_tokens=4), ()).tolist() == [1]
    assert manager.extend(request, 30) is not None
    assert manager.admit(Admit(other, num_tokens=4), ()) is None
    assert manager.would_fit(Admit(other, num_tokens=4)) == Status.WAIT
    assert manager.would_fit(Admit(other, num_tokens=4), whole=True) == Status.NEVER
    assert manager.extend(request, 3) is None
    assert (
        manager.would_fit(Admit(request, num_tokens=3))
        == manager.would_fit(request)
        == Status.NEVER
    )
    assert manager.would_fit(Admit(request, num_tokens=2)) == Status.SERVED


@pytest.mark.parametrize("num_groups", [1, 2])
def test_admit_takes_the_prefix_that_a_lookup_returned(num_groups):
    groups = [GroupSpec("full_attention", 4)] * num_groups
    manager = KVCacheManager.for_groups(groups, 17, 64, num_preallocate_tokens=0)
    first = Request("a", range(16))
    manager.admit(first)
    request = Request("b", range(20))
    prefix = manager.cache.find_prefix(request)
    assert prefix.num_tokens == 16
    manager.admit(request, prefix)
    for group in range(num_groups):
        held = manager.block_ids(request, group)
        assert held[:4].tolist() == manager.block_ids(first, group).tolist() and len(held) == 5


def test_request_whose_hit_exceeds_the_admission_limit_is_admitted():
    """The request was running alone and therefore grew into the blocks below the watermark.

    When the request is readmitted, its hit alone exceeds the admission limit.
    """
    manager = KVCacheManager(4, 11, 64, num_preallocate_tokens=0, watermark=0.2)
    request = Request("a", range(36))
    manager.step(new=[Admit(request, num_tokens=4)])
    for _ in range(8):
        assert manager.step([0], [4]).status.tolist() == [Status.SERVED]
    manager.free(request)
    assert manager.step(new=[Request("b", range(99, 135))]).status.tolist() == [Status.NEVER]
    other = Request("c", range(50, 52))
    manager.step(new=[other])
    assert manager.would_fit(Admit(request, num_tokens=4)) == Status.WAIT
    manager.free(other)
    plan = manager.step(new=[Admit(request, num_tokens=4)])
    assert (plan.status.tolist(), plan.num_computed_tokens.tolist()) == ([Status.SERVED], [32])


def test_swapped_rows_share_no_blocks_with_rows_swapped_in_by_an_earlier_step():
    manager = KVCacheManager(4, 9, 64, num_preallocate_tokens=0, num_host_blocks=9)
    request, child = Request("a", range(16)), Request("b", range(17))
    manager.step(new=[request])
    manager.fork(request, child)
    manager.step(swap_out=[0, 1])
    manager.step([0], [1], token_ids=[16])
    assert manager.would_fit(Admit(child, num_tokens=1)) == Status.WAIT
    assert manager.step([1], [1]).status.tolist() == [Status.WAIT]


def test_would_fit_accepts_the_options_of_step():
    manager, request = make(), Request("a", range(30))
    assert manager.would_fit(Admit(request, num_tokens=28)) == Status.SERVED
    assert manager.would_fit(Admit(request, num_tokens=28, num_reserved_blocks=3)) == Status.WAIT
    assert manager.would_fit(Admit(request, num_tokens=28, num_lookahead_tokens=12)) == Status.NEVER
    assert manager.would_fit(Admit(request, num_tokens=28, external=External(12))) == Status.SERVED
    with pytest.raises(ValueError, match=r"external.num_tokens is 30: expected at most 29"):
        manager.would_fit(Admit(request, num_tokens=1, external=External(30)))
    with pytest.raises(ValueError, match=r"whole and external.delayed are both set"):
        manager.would_fit(
            Admit(request, num_tokens=0, external=External(3, delayed=True)), whole=True
        )
    manager.step(new=[request])
    with pytest.raises(
        ValueError, match=r"request 'a' is already admitted: expected only num_tokens and"
    ):
        manager.would_fit(Admit(request, num_tokens=1), whole=True)
    assert manager.pool.num_free == 1


# Whole prompts in chunks -------------------------------------------------------------------------------
