"""The cache groups of a replay, as the command line writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvcache.kinds import kind_names, make_kind
from kvcache.replay.written import parted, shown
from kvcache.specs import MAX_GROUPS, GroupSpec

_MOST = 2**31 - 1  # tokens
_REFUSED = "cross_attention"
# For messages: what the kinds of this project take.
_OPTION_OF = {"chunked_local": "chunk_size", "sliding_window": "window"}
_WITHOUT_OPTIONS = ("full_attention", "recurrent")


def parse_groups(text: str, block_size: int) -> list[GroupSpec]:
    """Groups from `kind[:option=value]...`, separated by commas.

    The option `block_size` is the group's allocation block (default: `block_size`, tokens); all others
    are the kind's. ValueError, which names what is wrong and what was expected.

    >>> for group in parse_groups("full_attention,sliding_window:window=1024:block_size=16", 32):
    ...     print(group.kind, group.block_size, group.options)
    full_attention 32 {}
    sliding_window 16 {'window': 1024}
    """
    groups = [_group(part.strip(), block_size) for part in text.split(",")]
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"{len(groups)} groups: expected at most {MAX_GROUPS}")
    return groups


def given_groups(block_size: int | None, groups: Sequence[GroupSpec] | None) -> list[GroupSpec]:
    """The groups, or one of full attention; ValueError unless exactly one of the two is given."""
    if (block_size is None) == (groups is None):
        raise ValueError(
            f"block_size is {block_size} and groups is {groups}: expected exactly one of the two"
        )
    if groups is None:
        return [GroupSpec("full_attention", block_size)]
    if len(groups) == 0:
        raise ValueError("groups is empty: expected at least one GroupSpec")
    for group in groups:
        check_replayable(group)
    return list(groups)


def state_tokens(groups: Sequence[GroupSpec]) -> int:
    """Tokens after each multiple of which all recurrent groups can store a state; 1 without any."""
    return math.lcm(*(group.block_size for group in groups if group.kind == "recurrent"))


def check_replayable(group: GroupSpec) -> None:
    """ValueError or TypeError for a group that is no kind, has wrong options, or needs an encoder."""
    if group.kind == _REFUSED:
        raise ValueError(
            f"kind is {_REFUSED!r}: expected {_replayable()} in a replay, "
            "whose prompts have no encoder tokens"
        )
    make_kind(group.kind, group.options)


def _group(text: str, block_size: int) -> GroupSpec:
    kind, written = parted(text)
    if kind not in kind_names():
        raise ValueError(f"{shown(text)}: its kind is {shown(kind)}: expected {_replayable()}")
    options = {name: _number(name, value, text) for name, value in written.items()}
    try:
        group = GroupSpec(kind, options.pop("block_size", block_size), options)
        check_replayable(group)
    except TypeError as error:
        wanted = f"{_OPTION_OF[kind]}=N" if kind in _OPTION_OF else f"others ({error})"
        if kind in _WITHOUT_OPTIONS:
            wanted = "none"
        raise ValueError(
            f"{shown(text)}: its options besides block_size are {options}: expected {wanted}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{shown(text)}: {error}") from None
    return group


def _number(name: str, value: str, text: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = _MOST + 1
    if abs(number) > _MOST:
        raise ValueError(
            f"{shown(text)}: {shown(name)} is {shown(value)}: "
            f"expected a whole number of at most {_MOST}"
        )
    return number


def _replayable() -> str:
    return "one of " + ", ".join(name for name in kind_names() if name != _REFUSED)
