# SPDX-License-Identifier: Apache-2.0
"""Functions that process the tokens of many requests in one call."""

import numpy as np
import pytest

from kvcache import KVCacheManager, Request
from kvcache.allocator.request import append_token_to_each, last_tokens


def tokens_of(requests):
    return [request.token_ids.tolist() for request in requests]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, list])
def test_each_request_gets_its_token(dtype):
    requests = [Request(f"r{i}", range(i)) for i in range(5)]
    tokens = [7, 0, 2**31 - 1, 3, 4]
    append_token_to_each(requests, tokens if dtype is list else np.array(tokens, dtype))
    assert tokens_of(requests) == [[*range(i), tokens[i]] for i in range(5)]


def test_no_request_changes_if_a_token_is_rejected():
    requests = [Request("a", [1]), Request("b", [2]), Request("c", [3])]
    with pytest.raises(ValueError, match=r"token_ids\[1\] is -1: expected 0 to 2147483647"):
        append_token_to_each(requests, np.array([5, -1, 6]))
    with pytest.raises(ValueError, match="token_ids has 2 entries: expected 3, one per request"):
        append_token_to_each(requests, np.array([5, 6]))
    with pytest.raises(TypeError, match="token_ids"):
        append_token_to_each(requests, np.array([0.5, 1, 2]))
    assert tokens_of(requests) == [[1], [2], [3]]


def test_no_request_changes_if_given_hashes_are_missing():
    hashes = [[b"x" * 32], []]
    requests = [
        Request("plain", [1]),
        Request("complete", [1, 2, 3], block_hashes=hashes[0]),
        Request("missing", [1], block_hashes=hashes[1]),
    ]
    manager = KVCacheManager(2, 65, 16, hash_algorithm="engine:test")
    plan = manager.step(new=requests[1:])
    assert plan.status.tolist() == [0, 0]
    hashes[0].append(b"y" * 32)
    with pytest.raises(ValueError, match="missing"):
        append_token_to_each(requests, np.array([5, 6, 7]))
    assert tokens_of(requests) == [[1], [1, 2, 3], [1]]


def test_last_tokens_are_returned_only_if_all_others_are_computed():
    requests = [Request("a", [1, 2, 3]), Request("b", [9])]
    assert last_tokens(requests, np.array([2, 0])).tolist() == [3, 9]
    assert last_tokens(requests, np.array([0, 2])[::-1]).tolist() == [3, 9]
    assert last_tokens(requests, np.array([2, 7, 0, 7])[::2]).tolist() == [3, 9]
    for computed in ([1, 0], [3, 0], [2, 1], [2, -1]):
        assert last_tokens(requests, np.array(computed)) is None
    assert last_tokens([], np.zeros(0, np.int64)).tolist() == []
    assert last_tokens([Request("c", [])], np.array([-1])) is None
    with pytest.raises(ValueError, match="num_computed has 1 entries: expected 2, one per request"):
        last_tokens(requests, np.array([2]))
