# SPDX-License-Identifier: Apache-2.0
"""Parses the cache groups of a replay in command-line syntax."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.checks import MAX_INT32
from kvcache.kinds import kind_class, kind_names, make_kind
from kvcache.specs import MAX_GROUPS, GroupSpec
from kvcache_exchange.cli.option_text import quoted, split_options


def parse_groups(text: str, block_size: int) -> list[GroupSpec]:
    """Parse groups from `kind[:option=value]...`, separated by commas.

    Args:
        text: The groups. The option `block_size` sets a group's allocation block size in tokens,
            and `cached=0` disables caching. All other options are options of the kind.
        block_size: Default allocation block size in tokens.

    Raises:
        ValueError: The text is invalid. The message names the group, the value and the expected value.

    Example:
        >>> for group in parse_groups("full_attention,sliding_window:window=1024:block_size=16", 32):
        ...     print(group.kind, group.block_size, group.options)
        full_attention 32 {}
        sliding_window 16 {'window': 1024}
    """
    groups = [_parse_group(part.strip(), block_size) for part in text.split(",")]
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"{len(groups)} groups: expected at most {MAX_GROUPS}")
    return groups


def groups_text(groups: Sequence[GroupSpec]) -> str:
    """Return the text that `parse_groups` parses.

    Example:
        >>> groups_text([GroupSpec("sliding_window", 16, {"window": 1024})])
        'sliding_window:block_size=16:window=1024'
    """
    return ",".join(
        ":".join([group.kind, *(f"{name}={value}" for name, value in _settings(group).items())])
        for group in groups
    )


def _settings(group: GroupSpec) -> dict[str, int]:
    cached = {} if group.cached else {"cached": 0}
    return {"block_size": group.block_size, **cached, **group.options}


def checked_groups(block_size: int | None, groups: Sequence[GroupSpec] | None) -> list[GroupSpec]:
    """Return `groups`, or one full-attention group.

    Raises ValueError unless exactly one argument is None.
    """
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
    """Raise ValueError for an unknown kind, invalid options, or a kind with an encoder."""
    if make_kind(group.kind, group.options).pages.of_encoder:
        raise ValueError(
            f"kind is {group.kind!r}: expected {_replayable()} in a replay, "
            "whose prompts have no encoder tokens"
        )


def _parse_group(text: str, block_size: int) -> GroupSpec:
    kind, values = split_options(text)
    if kind not in kind_names():
        raise ValueError(f"{quoted(text)}: its kind is {quoted(kind)}: expected {_replayable()}")
    options = {name: _parse_number(name, value, text) for name, value in values.items()}
    try:
        size, cached = options.pop("block_size", block_size), options.pop("cached", 1)
        if cached not in (0, 1):
            raise ValueError(f"cached is {cached}: expected 0 or 1")
        group = GroupSpec(kind, size, options, cached=bool(cached))
        check_replayable(group)
    except ValueError as error:
        raise ValueError(f"{quoted(text)}: {error}") from None
    return group


def _parse_number(name: str, value: str, text: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = MAX_INT32 + 1
    if abs(number) > MAX_INT32:
        raise ValueError(
            f"{quoted(text)}: {quoted(name)} is {quoted(value)}: "
            f"expected a whole number of at most {MAX_INT32}"
        )
    return number


def _replayable() -> str:
    names = [name for name in kind_names() if not kind_class(name).pages.of_encoder]
    return "one of " + ", ".join(names)
