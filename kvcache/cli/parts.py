# SPDX-License-Identifier: Apache-2.0
"""Finds what other packages add to the `kvcache` command, through entry points.

The group `kvcache.commands` contains subcommands, each a `Command`. The group `kvcache.parts` contains
functions that a command of one package takes from another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvcache.cli.errors import MissingError

# Subcommands and parts of kvcache's own packages -> the extra that installs the package.
_EXTRAS = {
    **dict.fromkeys(("replay", "plan", "bench", "replay_demo"), "lab"),
    **dict.fromkeys(("demo", "serve", "model_layers"), "serve"),
    "diagnose_vllm": "vllm",
}
_COMMANDS = ("replay", "plan", "bench", "demo", "serve")


@dataclass(frozen=True)
class Command:
    """A subcommand of `kvcache`.

    Args:
        text: One line for `kvcache --help`.
        run: Runs the command and returns the exit code.
        add_options: Adds the options of the command to its parser.
    """

    text: str
    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None]


def commands() -> dict[str, Command]:
    """Return all installed subcommands. One that cannot be imported fails when it is run."""
    found = {each.name: each for each in entry_points(group="kvcache.commands")}
    order = [*(name for name in _COMMANDS if name in found), *sorted({*found} - {*_COMMANDS})]
    return {name: _loaded(found[name]) for name in order}


def _loaded(found: EntryPoint) -> Command:
    try:
        return found.load()
    except ImportError as error:
        reason = f"kvcache {found.name} cannot be loaded ({found.value}): {error}"

    def run(args: argparse.Namespace) -> int:
        raise MissingError(reason)

    return Command(reason, run, lambda sub: None)


def require_command(name: str) -> None:
    """Raise MissingError if a subcommand belongs to a package of kvcache that is not installed."""
    if name in _COMMANDS and not entry_points(group="kvcache.commands", name=name):
        raise _missing(name, f"kvcache {name}")


def part(name: str, purpose: str) -> Any:
    """Return the entry point `name` of the group `kvcache.parts`, which a package provides.

    `purpose` is what it is needed for, such as "--model". Raises MissingError, which names the extra that
    installs the package.
    """
    for found in entry_points(group="kvcache.parts", name=name):
        try:
            return found.load()
        except ImportError as error:
            raise MissingError(f"{purpose} cannot be loaded ({found.value}): {error}") from None
    raise _missing(name, purpose)


def _missing(name: str, purpose: str) -> MissingError:
    extra = _EXTRAS[name]
    return MissingError(
        f"{purpose} needs kvcache-{extra}, which is not installed: "
        f"pip install 'torch-kvcache[{extra}]'"
    )
