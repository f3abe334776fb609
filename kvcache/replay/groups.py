"""The cache groups of a replay, as the command line writes them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.allocator.groups import kind_names, make_kind
from kvcache.specs import MAX_GROUPS, GroupSpec

_REFUSED = "cross_attention"


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
        raise ValueError(f"it names {len(groups)} groups: expected at most {MAX_GROUPS}")
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


def check_replayable(group: GroupSpec) -> None:
    """ValueError or TypeError for a group that is no kind, has wrong options, or needs an encoder."""
    if group.kind == _REFUSED:
        others = ", ".join(name for name in kind_names() if name != _REFUSED)
        raise ValueError(
            f"kind is {_REFUSED!r}: expected one of {others} in a replay, "
            "whose prompts have no encoder tokens"
        )
    make_kind(group.kind, group.options)


def _group(text: str, block_size: int) -> GroupSpec:
    kind, *settings = text.split(":")
    if kind not in kind_names():
        raise ValueError(f"{text!r}: kind is {kind!r}: expected one of {', '.join(kind_names())}")
    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ValueError(f"{text!r}: {setting!r} is no option: expected option=value")
        if name in options:
            raise ValueError(f"{text!r}: {name} is given twice: expected it once")
        options[name] = _number(text, name, value)
    try:
        group = GroupSpec(kind, options.pop("block_size", block_size), options)
        check_replayable(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from None
    return group


def _number(text: str, name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{text!r}: {name} is {value!r}: expected a whole number") from None
