"""The options --events, --events-replay and --events-topic: cache events for routers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError, quoted
from kvcache.cli.modules import require_module
from kvcache.cli.output import say

if TYPE_CHECKING:
    from kvcache.events import CacheEvent
    from kvcache.router_events import EventPublisher

_SECONDS_TO_END = 60  # for what waits to be published when a replay ends


def add_events_options(sub: argparse.ArgumentParser) -> None:
    """All three; each is off by default."""
    for option, metavar, text in (
        ("--events", "ENDPOINT", "to publish cache events at, as tcp://127.0.0.1:5557"),
        ("--events-replay", "ENDPOINT", "where readers ask for events that they missed"),
        ("--events-topic", "TOPIC", "of the events, as kv@POD@MODEL"),
    ):
        sub.add_argument(option, metavar=metavar, help=text)


def open_publisher(args: argparse.Namespace) -> EventPublisher | None:
    """The publisher that was asked for. UsageError, or MissingError without its packages."""
    if args.events is None:
        for name in ("events_replay", "events_topic"):
            if (value := getattr(args, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is {quoted(value)}: expected only with --events")
        return None
    for module in ("msgspec", "zmq"):
        require_module(module, "--events", "pip install 'kvcache[events]'")
    from kvcache.router_events import EventPublisher

    try:
        # The command line names the address, so other machines may be meant.
        publisher = EventPublisher(
            args.events, args.events_replay, args.events_topic or "", allow_remote=True
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--events: {reason}") from None
    replayed = f", replayed at {publisher.replay_endpoint}" if publisher.replay_endpoint else ""
    say(f"cache events at {publisher.endpoint}{replayed}")
    return publisher


@contextmanager
def events_published(
    publisher: EventPublisher | None,
    drain_events: Callable[[], list[CacheEvent]],
    on_request: Callable[[], None] | None,
) -> Iterator[Callable[[], None] | None]:
    """Yields what to call after each request; it also publishes, where there is a publisher."""
    if publisher is None:
        yield on_request
        return

    def publish() -> None:
        publisher.publish(drain_events())
        if on_request is not None:
            on_request()

    try:
        yield publish
        publisher.publish(drain_events())
    finally:
        publisher.close(_SECONDS_TO_END)
