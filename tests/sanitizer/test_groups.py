# SPDX-License-Identifier: Apache-2.0
"""The tokens that a group's queries read according to the sanitizer match the attention kinds in
`kvcache.kinds`.
"""

import sys

import numpy as np
import pytest

from kvcache.kinds import kind_class, kind_names, make_kind
from kvcache.sanitizer import SanitizedGroup
from kvcache_serve.engine.sanitizing import _KINDS as KINDS


def options_of(name, rng) -> tuple[dict[str, int], dict[str, int]]:
    """Return random options for a kind and for the sanitizer's group of this kind."""
    size = int(rng.integers(1, 100))
    if name == "sliding_window":
        return {"window": size}, {"window": size}
    if name == "chunked_local":
        return {"chunk_size": size}, {"chunk": size}
    if name == "circular_window":
        return {"window": size, "buffer": 8 * size}, {"window": size, "columns": size}
    return {}, {}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_first_needed_token_equals_that_of_the_kind(name):
    rng = np.random.default_rng(0)
    for _ in range(50):
        options, group_options = options_of(name, rng)
        kind, group = make_kind(name, options), SanitizedGroup(KINDS[name], 8, **group_options)
        positions = rng.integers(0, 1000, 20)
        expected = [kind.first_needed_token(position) for position in positions.tolist()]
        assert group.first_needed(positions).tolist() == expected, (options, positions)


def test_every_built_in_kind_is_compared():
    # Docstring examples and other tests may have registered additional kinds and second names.
    built_in = {
        each
        for each in kind_names()
        if not each.startswith("test_")
        and vars(sys.modules[kind_class(each).__module__]).get(kind_class(each).__name__)
        and kind_class(each).__module__.startswith("kvcache.")
    }
    assert built_in - {"cross_attention"} == set(KINDS)
