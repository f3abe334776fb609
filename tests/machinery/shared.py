"""What several tests need: files outside the project, samples of values, managers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache import GroupSpec, KVCacheManager

REPO = Path(__file__).resolve().parents[2]
SHARED = REPO.parent / "shared"


def shared_file(name: str) -> Path:
    """The path of a file of `../shared`; skips the test where it is not there."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not there: no folder 'shared' with it beside the project")
    return path


def sampled(values, num_first: int = 1) -> list:
    """Values for `parametrize`, tuples for several names; all but the first are marked exhaustive."""
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    rest = [pytest.param(*value, marks=pytest.mark.exhaustive) for value in each[num_first:]]
    return [*(pytest.param(*value) for value in each[:num_first]), *rest]


def spread(values, num: int) -> list:
    """As `sampled`, with `num` values that lie evenly among all."""
    values = list(values)
    first = [values[i * len(values) // num] for i in range(num)]
    return sampled([*first, *(value for value in values if value not in first)], num)


def manager_of(
    *groups: GroupSpec, num_blocks: int = 41, max_model_len: int = 64, **options
) -> KVCacheManager:
    """A manager of these groups, which preallocates no slots unless it is told to."""
    options = {"num_preallocate_tokens": 0, **options}
    return KVCacheManager.for_groups(groups, num_blocks, max_model_len, **options)
