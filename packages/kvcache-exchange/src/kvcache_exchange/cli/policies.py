# SPDX-License-Identifier: Apache-2.0
"""Converts the options --eviction, --host-eviction and --host-write to fields of `CacheOptions`."""

from __future__ import annotations

import argparse

from kvcache.cli.errors import UsageError, quoted
from kvcache_exchange.cli.modules import import_module


def policy_options(args: argparse.Namespace, host_option: str) -> dict:
    """Return the `CacheOptions` fields that correspond to the given command-line options.

    Raises UsageError for malformed values, and if host-tier options are given without
    `host_option`.
    """
    has_host = getattr(args, host_option.removeprefix("--").replace("-", "_"))
    found = {}
    for option, value, name in (
        ("--eviction", args.eviction, "eviction"),
        ("--host-eviction", args.host_eviction, "host_eviction"),
        ("--host-write", args.host_write, None),
    ):
        if value is None:
            continue
        if option != "--eviction" and not has_host:
            raise UsageError(f"{option} is {quoted(value)}: expected only with {host_option}")
        policies = import_module("kvcache_exchange.cli.policy_text")
        try:
            if name is None:
                found |= policies.parse_host_write(value)
            else:
                is_host = name == "host_eviction"
                parse = policies.parse_host_eviction if is_host else policies.parse_eviction
                found[name], found[f"{name}_options"] = parse(value)
        except ValueError as error:
            raise UsageError(f"{option} is {error}") from None
    return found
