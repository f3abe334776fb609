# SPDX-License-Identifier: Apache-2.0
"""The command-line syntax of groups and policies: `name[:option=value]...`."""

from __future__ import annotations

from collections.abc import Mapping


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """Split the text into a name and options.

    Raises ValueError for malformed or repeated options.
    """
    name, *settings = text.split(":")
    options: dict[str, str] = {}
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not option or not equals:
            raise ValueError(
                f"{quoted(text)}: {quoted(setting)} is not an option: expected option=value"
            )
        if option in options:
            raise ValueError(f"{quoted(text)}: {quoted(option)} is given twice: expected it once")
        options[option] = value
    return name, options


def join_options(name: str, options: Mapping[str, float]) -> str:
    """Join a name and options into the text that `split_options` parses.

    Example:
        >>> join_options("priority", {"default_priority": 50})
        'priority:default_priority=50'
    """
    return ":".join([name, *(f"{option}={value:g}" for option, value in options.items())])


def quoted(text: str) -> str:
    """Quote a value for an error message, truncated to 60 characters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
