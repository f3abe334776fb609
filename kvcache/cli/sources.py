# SPDX-License-Identifier: Apache-2.0
"""The options --store, --prefill and --prefill-from: sources of external KV."""

from __future__ import annotations

import argparse
import hashlib
import json
import uuid
from typing import TYPE_CHECKING

from kvcache.cli.errors import MissingError, UsageError, quoted
from kvcache.cli.modules import require_module
from kvcache.cli.parsing import number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcache.assembly import KVCache
    from kvcache.sources import KVSource
    from kvcache.sources.disaggregation import Connector


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
        help="prefill prompts for other servers, which load the KV with --prefill-from",
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
        "--transport",
        choices=("gloo", "nixl"),
        default="gloo",
        help="transport of KV between servers; default gloo",
    )


def check_source_options(args: argparse.Namespace) -> None:
    """Check the options before a model is loaded. Raise UsageError or MissingError if one fails."""
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
        from kvcache.sources.disaggregation.prefill import host_and_port

        try:
            host_and_port(args.prefill_from)
        except ValueError:
            given = quoted(args.prefill_from)
            raise UsageError(f"--prefill-from is {given}: expected HOST:PORT") from None


def make_sources(
    args: argparse.Namespace, model: PreTrainedModel, cache: KVCache, *, announce: bool
) -> tuple[list[KVSource], Connector | None]:
    """Create the KV sources of a model's cache.

    Args:
        args: Parsed options.
        model: The model. A digest of its weights identifies the KV.
        cache: The model's cache.
        announce: Whether cache events are published, including the store's events.

    Returns:
        The sources in order of preference, and the connector if this server prefills for others.
    """
    is_transferring = args.prefill or args.prefill_from is not None
    sources: list[KVSource] = []
    if args.store is None and not is_transferring:
        return sources, None
    weights, connector = weights_digest(model), None
    if is_transferring:
        connector = _connector(args, weights, cache)
    if args.store is not None:
        sources.append(_store(args, weights, cache, announce))
    if args.prefill_from is not None:
        from kvcache.sources.disaggregation import RemotePrefill

        timeout_s = args.prefill_timeout
        sources.append(RemotePrefill(connector, args.prefill_from, timeout_s=timeout_s))
    elif connector is not None:
        sources.append(connector)
    return sources, connector if args.prefill else None


def _connector(args: argparse.Namespace, weights: str, cache: KVCache) -> Connector:
    from kvcache.kinds import kind_class
    from kvcache.sources.disaggregation import (
        CacheRank,
        Connector,
        ConnectorOptions,
        layouts_of_plan,
    )

    option = "--prefill" if args.prefill else "--prefill-from"
    if any(not kind_class(group.kind).pages.has_slots for group in cache.plan.groups):
        raise UsageError(f"{option}: MODEL has recurrent layers: expected attention layers only")
    engine_id = uuid.uuid4().hex
    try:
        layouts = layouts_of_plan(cache.plan, cache.storages, engine_id=engine_id)
        options = ConnectorOptions(
            host=args.host, transport=args.transport, timeout_s=args.prefill_timeout
        )
        rank = CacheRank(layouts, cache.storages, options=options)
        model = {"weights": weights}
        return Connector(cache.manager, [rank], engine_id=engine_id, model=model, options=options)
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: {error}") from None


def _store(args: argparse.Namespace, weights: str, cache: KVCache, announce: bool) -> KVSource:
    from kvcache.sources.store import StoreError, StoreTier, open_store

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
    """Return a digest of a model's configuration and weights, which identifies the model's KV."""
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
