# SPDX-License-Identifier: Apache-2.0
"""The `--events` option and its related options, which publish cache events for routers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError, quoted
from kvcache.cli.output import say
from kvcache_exchange.cli.modules import require_module

if TYPE_CHECKING:
    from kvcache_exchange.router_events import EventPublisher


def add_events_options(sub: argparse.ArgumentParser) -> None:
    """Add the event options, all off by default."""
    for option, metavar, text in (
        ("--events", "ENDPOINT", "publish cache events at this address, e.g. tcp://127.0.0.1:5557"),
        ("--events-replay", "ENDPOINT", "replay missed events to readers at this address"),
        ("--events-topic", "TOPIC", "topic of the events, e.g. kv@POD@MODEL"),
        ("--events-encoding", "map|array", "encoding of each event (default: map, as vLLM)"),
    ):
        sub.add_argument(option, metavar=metavar, help=text)


def open_publisher(args: argparse.Namespace) -> EventPublisher | None:
    """Open the requested publisher.

    Raises UsageError if an option is invalid or given without `--events`, and MissingError if a
    required package is not installed.
    """
    if args.events is None:
        for name in ("events_replay", "events_topic", "events_encoding"):
            if (value := getattr(args, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is {quoted(value)}: expected only with --events")
        return None
    for module in ("msgspec", "zmq"):
        require_module(module, "--events", "pip install 'torch-kvcache[events]'")
    from kvcache_exchange.router_events import EventPublisher

    try:
        # Other machines may be able to reach the address, because the user chose it explicitly.
        publisher = EventPublisher(
            args.events,
            args.events_replay,
            args.events_topic or "",
            event_encoding=args.events_encoding or "map",
            allow_remote=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--events: {reason}") from None
    replayed = f", replayed at {publisher.replay_endpoint}" if publisher.replay_endpoint else ""
    say(f"cache events at {publisher.endpoint}{replayed}")
    return publisher
