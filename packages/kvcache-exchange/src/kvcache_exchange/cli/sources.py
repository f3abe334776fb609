# SPDX-License-Identifier: Apache-2.0
"""The options --store, --prefill, --prefill-from and --peer: sources of external KV."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import json
import uuid
from typing import TYPE_CHECKING

from kvcache.cli.errors import MissingError, UsageError, quoted
from kvcache_exchange.cli.modules import require_module
from kvcache_exchange.cli.parsing import MAX_INT32, number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcache.assembly import KVCache
    from kvcache.sources import KVSource
    from kvcache_exchange.disaggregation import Connector
    from kvcache_exchange.peers import PeerSource


def add_source_options(sub: argparse.ArgumentParser) -> None:
    """Add the options of all sources. All sources are off by default."""
    sub.add_argument(
        "--store",
        metavar="DIR|URL",
        help="store computed KV blocks in this folder, in the Mooncake store with its master at "
        "mooncake://HOST:PORT, or at the URL of a registered store, and load them from there",
    )
    sub.add_argument(
        "--store-capacity",
        metavar="BYTES",
        help="size of the store; the least recently used blocks are evicted; default 10GiB. For "
        "Mooncake: memory of this server that the store may use; default 1GiB",
    )
    sub.add_argument(
        "--prefill",
        action="store_true",
        help="prefill prompts for other servers, which load the KV if they run with --prefill-from",
    )
    sub.add_argument(
        "--prefill-from",
        metavar="HOST:PORT",
        help="server that runs with --prefill; it prefills prompts, and their KV is loaded from it; "
        "prompts are computed locally while that server does not respond",
    )
    sub.add_argument(
        "--prefill-timeout",
        metavar="SECONDS",
        type=number("--prefill-timeout", 1, 86_400),
        default=10,
        help="timeout for a prefill, and for loading its KV; default 10",
    )
    sub.add_argument(
        "--peer",
        metavar="HOST:PORT[,HOST:PORT]",
        help="servers that run with --peer; prefixes that they have cached are loaded from them, and "
        "prefixes cached here are offered to them",
    )
    sub.add_argument(
        "--peer-timeout",
        metavar="SECONDS",
        type=number("--peer-timeout", 1, 86_400),
        default=2,
        help="timeout for a peer's offer, and for loading the offered KV; default 2",
    )
    sub.add_argument(
        "--peer-min-tokens",
        metavar="N",
        type=number("--peer-min-tokens", 1, MAX_INT32),
        default=64,
        help="minimum number of tokens after the local hit to load from a peer; default 64",
    )
    sub.add_argument(
        "--transport",
        choices=("tcp", "nixl"),
        default="tcp",
        help="transport of KV between servers; default tcp",
    )


def check_source_options(args: argparse.Namespace) -> None:
    """Check the options before a model is loaded. Raise UsageError or MissingError if a check
    fails.
    """
    if args.store is None and args.store_capacity is not None:
        raise UsageError("--store-capacity is given: expected only with --store")
    is_folder = args.store is not None and "://" not in args.store
    for is_given, option, module in (
        (is_folder, "--store", "nixl"),
        ((args.store or "").startswith("mooncake://"), "--store", "mooncake"),
        (args.transport == "nixl", "--transport nixl", "nixl"),
    ):
        if is_given:
            require_module(module, option, f"pip install 'torch-kvcache[{module}]'")
    if args.prefill_from is not None:
        _check_address(args.prefill_from, "--prefill-from")
    secret = transfer_secret()
    has_key, is_offering = args.api_key is not None, args.prefill or args.peer is not None
    if has_key and is_offering and not secret:
        option = "--prefill" if args.prefill else "--peer"
        raise UsageError(
            f"--api-key is given with {option}: expected ${_secret_variable()} as well, because other "
            "servers do not send the API key"
        )
    if args.peer is not None:
        _check_peers(args)


def _secret_variable() -> str:
    from kvcache_exchange.disaggregation.options import SECRET_VARIABLE

    return SECRET_VARIABLE


def _check_address(address: str, option: str) -> None:
    from kvcache_exchange.disaggregation.offer_calls import host_and_port

    try:
        host_and_port(address)
    except ValueError:
        raise UsageError(f"{option} is {quoted(address)}: expected HOST:PORT") from None


def _check_peers(args: argparse.Namespace) -> None:
    """Check the peers, and choose the endpoints at which they read this server's events."""
    for module in ("msgspec", "zmq"):
        require_module(module, "--peer", "pip install 'torch-kvcache[events]'")
    peers = args.peer.split(",")
    for peer in peers:
        _check_address(peer, "--peer")
    if len(set(peers)) < len(peers):
        raise UsageError(f"--peer is {quoted(args.peer)}: expected each address once")
    if is_loopback(args.host):
        endpoint = "tcp://[::1]:0" if ":" in args.host else "tcp://127.0.0.1:0"
        args.events = args.events or endpoint
        args.events_replay = args.events_replay or endpoint
        return
    for option, value in (("--events", args.events), ("--events-replay", args.events_replay)):
        if value is None:
            raise UsageError(
                f"--peer is given with --host {args.host}: expected {option} ENDPOINT as well, an "
                "address that only peers can reach, because events contain the tokens of prompts"
            )
    if not transfer_secret():
        raise UsageError(
            f"--peer is given with --host {args.host}: expected ${_secret_variable()} as well, a secret "
            "that all peers share, because peers can read cached KV"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a host name
        return host == "localhost"


def transfer_secret() -> bytes:
    """Return the secret that this server shares with the servers with which it exchanges KV."""
    from kvcache_exchange.disaggregation.options import secret_from_environment

    try:
        return secret_from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None


def make_sources(
    args: argparse.Namespace, model: PreTrainedModel, cache: KVCache, *, announce: bool
) -> tuple[list[KVSource], Connector | None, PeerSource | None]:
    """Create the KV sources of a model's cache.

    Args:
        args: Parsed options.
        model: The model. A digest of its weights is used to identify its KV.
        cache: The model's cache.
        announce: Whether cache events are published, including the store's events.

    Returns:
        The sources in order of preference, the connector if this server prefills for other servers,
        and the source that loads from peers.
    """
    sources: list[KVSource] = []
    connector = peers = None
    options = (args.store, args.prefill_from, args.peer)
    if not args.prefill and all(each is None for each in options):
        return sources, None, None
    weights = weights_digest(model)
    if args.peer is not None:
        connector = _connector(args, "--peer", args.peer_timeout, weights, cache)
        peers = _peers(args, connector, cache)
        sources.append(peers)
    if args.store is not None:
        sources.append(_store(args, weights, cache, announce))
    if args.prefill_from is not None:
        from kvcache_exchange.disaggregation import RemotePrefill

        # Each source polls its own connector.
        timeout_s = args.prefill_timeout
        own = _connector(args, "--prefill-from", timeout_s, weights, cache)
        sources.append(
            RemotePrefill(own, args.prefill_from, timeout_s=timeout_s, secret=transfer_secret())
        )
        connector = connector or own
    elif args.prefill and connector is None:
        connector = _connector(args, "--prefill", args.prefill_timeout, weights, cache)
        sources.append(connector)
    return sources, connector if args.prefill else None, peers


def _connector(
    args: argparse.Namespace, option: str, timeout_s: float, weights: str, cache: KVCache
) -> Connector:
    from kvcache.kinds import kind_class
    from kvcache_exchange.disaggregation import (
        CacheRank,
        Connector,
        ConnectorOptions,
        layouts_of_plan,
    )

    if any(not kind_class(group.kind).pages.has_slots for group in cache.plan.groups):
        raise UsageError(f"{option}: MODEL has recurrent layers: expected attention layers only")
    engine_id = uuid.uuid4().hex
    try:
        layouts = layouts_of_plan(cache.plan, cache.storages, engine_id=engine_id)
        options = ConnectorOptions(host=args.host, transport=args.transport, timeout_s=timeout_s)
        rank = CacheRank(layouts, cache.storages, options=options, secret=transfer_secret())
        model = {"weights": weights}
        return Connector(cache.manager, [rank], engine_id=engine_id, model=model, options=options)
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: {error}") from None


def _peers(args: argparse.Namespace, connector: Connector, cache: KVCache) -> PeerSource:
    from kvcache_exchange.peers import PeerSource

    try:
        return PeerSource(
            cache.manager,
            connector,
            args.peer.split(","),
            min_tokens=args.peer_min_tokens,
            timeout_s=args.peer_timeout,
            lease_s=3 * args.peer_timeout,  # allow time to send the offer and to load the KV
            secret=transfer_secret(),
        )
    except ValueError as error:
        connector.close()
        raise UsageError(f"--peer: {error}") from None


def _store(args: argparse.Namespace, weights: str, cache: KVCache, announce: bool) -> KVSource:
    from kvcache_exchange.store import StoreError, StoreTier, open_store

    try:
        return StoreTier(
            cache.manager,
            cache.pages,
            open_store(args.store, args.store_capacity),
            model=weights,
            host_pages=cache.host_pages,
            write_from="device",
            announce=announce,
        )
    except ModuleNotFoundError as error:
        raise MissingError(f"--store: {error}") from None
    except (OSError, StoreError, ValueError) as error:
        raise UsageError(f"--store: {error}") from None


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model's configuration and weights. The digest identifies the model's
    KV.
    """
    import torch

    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        values = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        digest.update(values.cpu().numpy())
    return digest.hexdigest()
