# SPDX-License-Identifier: Apache-2.0
"""The `--curve` option of `kvcache replay`."""

from __future__ import annotations

import argparse

from kvcache.cli.errors import UsageError
from kvcache.cli.modules import import_module


def check_curve(args: argparse.Namespace) -> None:
    """Parse the policies in `args.curve` in place. Raise UsageError for conflicting options."""
    if args.curve is None:
        for option, given in (("--rate", args.rate is not None), ("--exact", args.exact)):
            if given:
                raise UsageError(f"{option} is given without --curve: expected both, or neither")
        return
    for option, given in (
        ("--num-blocks", args.num_blocks),
        ("--eviction", args.eviction),
        ("--compare", args.compare is not None),
        ("--timed", args.timed is not None),
        ("--groups", args.groups is not None),
        ("--concurrency", args.concurrency),
        ("--hash-block-size", args.hash_block_size),
        ("--chunk-tokens", args.chunk_tokens),
        ("--host-blocks", args.host_blocks),
        ("--store-blocks", args.store_blocks),
        ("--verify", args.verify),
        ("--why", args.why),
        ("--prefetch", args.prefetch is not None),
    ):
        if given:
            raise UsageError(
                f"{option} is given with --curve: expected only one of the two, because a curve "
                "covers one full-attention group and one request at a time, at several sizes"
            )
    replay = import_module("kvcache_lab")
    policies = import_module("kvcache.cli.policy_text")
    args.curve = args.curve.split(",") if args.curve else [*replay.CURVE_POLICIES]
    for text in args.curve:
        try:
            policies.parse_eviction(text)
        except ValueError as error:
            raise UsageError(f"--curve has {error}") from None
    if args.sizes is not None:  # sizes include the null block, like --num-blocks
        args.sizes = tuple(sorted({size - 1 for size in args.sizes}))
