"""`name[:option=value]...`: how the command line writes groups and policies."""

from __future__ import annotations

from collections.abc import Mapping


def parted(text: str) -> tuple[str, dict[str, str]]:
    """The name, and the options as they are written; ValueError where one is none, or comes twice."""
    name, *settings = text.split(":")
    options: dict[str, str] = {}
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not option or not equals:
            raise ValueError(f"{shown(text)}: {shown(setting)} is no option: expected option=value")
        if option in options:
            raise ValueError(f"{shown(text)}: {shown(option)} stands there twice: expected it once")
        options[option] = value
    return name, options


def joined(name: str, options: Mapping[str, float]) -> str:
    """What `parted` takes apart.

    >>> joined("s3_fifo", {"small_share": 0.2})
    's3_fifo:small_share=0.2'
    """
    return ":".join([name, *(f"{option}={value:g}" for option, value in options.items())])


def shown(text: str) -> str:
    """A value for an error: quoted, and shortened where it is endless."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
