# SPDX-License-Identifier: Apache-2.0
"""Options and checks of option values that several commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable

from kvcache.cli.errors import UsageError, quoted

# Copies of the constants in kvcache.checks. That module imports numpy, which --help must not load.
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1


def add_policy_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that `kvcache_exchange.cli.policies` reads."""
    for option, metavar, text in (
        (
            "--eviction",
            "P",
            "eviction policy as policy[:option=value]...; default lru",
        ),
        ("--host-eviction", "P", "eviction policy of the host tier"),
        (
            "--host-write",
            "MODE",
            "when cached blocks are written to the host: back (default; on eviction) or through (at "
            "once); with :G, such as back:0.05, only if G hits or more are expected",
        ),
    ):
        sub.add_argument(option, metavar=metavar, help=text)


def number(option: str, least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise UsageError(
                f"{option} is {quoted(text)}: expected a whole number from {least} to {most}"
            )
        return value

    return convert


def plot_file(text: str) -> str:
    # Use os.path, because pathlib raises an exception for names that are too long for the file
    # system.
    folder = os.path.dirname(text) or "."
    if os.path.splitext(text)[1].lower() != ".png":
        raise UsageError(f"--plot is {text!r}: expected a file name that ends in .png")
    if not os.path.isdir(folder):
        raise UsageError(f"--plot is {text!r}: expected an existing folder, not {folder!r}")
    if os.path.isdir(text):
        raise UsageError(f"--plot is {text!r}: expected a file, not a directory")
    return text


def device_name(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text):
        raise UsageError(f"--device is {quoted(text)}: expected cpu, cuda or cuda:N")
    return text
