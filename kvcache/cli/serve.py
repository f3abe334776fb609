"""The command `kvcache serve`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from kvcache.cli.errors import UsageError
from kvcache.cli.events import add_events_options, open_publisher
from kvcache.cli.models import load_model
from kvcache.cli.modules import check_cuda, require_module
from kvcache.cli.output import say
from kvcache.cli.parsing import MAX_INT32, MAX_INT64, add_policy_options, device_name, number
from kvcache.cli.policies import policy_options

if TYPE_CHECKING:
    from fastapi import FastAPI
    from transformers import PreTrainedModel

    from kvcache.router_events import EventPublisher
    from kvcache.serve import Texts

_SWITCH_SECONDS = 0.0005  # after which the engine's thread and the event loop's let each other run


_OF_MODEL = {  # defaults
    "--max-model-len": "the model's, or as many as fit",
    "--max-body-bytes": "64 KiB and 32 bytes for each token of --max-model-len",
}


def add_serve_options(sub: argparse.ArgumentParser) -> None:
    """MODEL and all options, each value checked by itself."""
    sub.add_argument(
        "model",
        metavar="MODEL",
        help="the folder of a checkpoint, or a tiny model by name (llama, gemma3, ...), which says "
        "nothing of sense",
    )
    for option, metavar, default, text in (
        ("--host", "ADDRESS", "127.0.0.1", "to listen at; there is no authentication"),
        ("--budget", "BYTES", "64MiB", "of the pool, as 2GiB"),
        ("--host-budget", "BYTES", None, "of the tier in host memory"),
    ):
        text += f"; default {default or 'none'}"
        sub.add_argument(option, metavar=metavar, default=default, help=text)
    add_policy_options(sub)
    add_events_options(sub)
    for option, least, most, default, text in (
        ("--port", 0, 65_535, 8_000, "0: any that is free"),
        ("--max-body-bytes", 1, MAX_INT64, None, "of a request's body"),
        ("--max-model-len", 1, MAX_INT32, None, "tokens of a prompt and its answer"),
        ("--max-num-seqs", 1, 65_536, 32, "sequences at a time"),
        ("--max-num-batched-tokens", 1, MAX_INT32, 512, "of a step"),
        ("--block-size", 1, MAX_INT32, 16, "tokens"),
    ):
        shown = _OF_MODEL.get(option) if default is None else default
        check = number(option, least, most)
        sub.add_argument(
            option, metavar="N", type=check, default=default, help=f"{text}; default {shown}"
        )
    for option, choices, text in (
        ("--preemption", ("swap", "recompute"), "of sequences that no longer fit"),
        ("--dtype", ("float32", "bfloat16", "float16"), "of a checkpoint"),
        ("--drafts", ("none", "ngram"), "guesses of tokens to come, by the text so far"),
    ):
        sub.add_argument(option, choices=choices, default=choices[0], help=text)
    for option, default, text in (
        ("--request-timeout", 30, "in which a whole request has to arrive"),
        ("--grace", 10, "for answers that are under way when the server stops"),
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
        help="take cache_salt and priority from requests, behind a proxy that sets them",
    )
    sub.add_argument("--device", default="cpu", type=device_name, help="of the model; default cpu")


def run_serve(args: argparse.Namespace) -> int:
    """`kvcache serve`; returns the exit code when the server is interrupted."""
    remedy = "pip install 'kvcache[serve]'"
    for name in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client"):
        require_module(name, "a server", remedy)
    if args.device != "cpu":
        check_cuda(args.device)
    options = policy_options(args, "--host-budget")
    with _listening(args.host, args.port) as listener:
        publisher = open_publisher(args)
        app = _app(args, options | {"enable_events": publisher is not None}, publisher)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(
            f"serving {_name(args.model)} at http://{shown}:{port}/v1, the cache at http://{shown}:{port}/"
        )
        from kvcache.serve import Server

        sys.setswitchinterval(_SWITCH_SECONDS)
        Server(app, log_level="error").run(sockets=[listener])
    return 0


def _name(model: str) -> str:
    """What clients call the model."""
    return os.path.basename(os.path.normpath(model))


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"--host is {host!r}, --port is {port}: expected an address and a port that are free here "
            f"({error.strerror})"
        ) from None


def _app(args: argparse.Namespace, options: dict, publisher: EventPublisher | None) -> FastAPI:
    model = load_model(args.model, "MODEL", args.dtype, args.device)
    from kvcache.integrations.transformers import attach
    from kvcache.serve import EngineLoop, Limits, make_app
    from kvcache.serving import Engine, NgramDrafter

    drafter = NgramDrafter() if args.drafts == "ngram" else None
    try:
        paged = attach(
            model,
            _byte_count(args.budget),
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            host_budget=_byte_count(args.host_budget or "0"),
            num_speculative_tokens=0 if drafter is None else drafter.num_tokens,
            **options,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    engine = Engine(paged, preemption=args.preemption, drafter=drafter)
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
    )


def _byte_count(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _texts(name: str, model: PreTrainedModel) -> Texts:
    """The checkpoint's own tokenizer; bytes, where it has none and the model has a token for each."""
    from kvcache.serve import ByteTexts, TokenizerTexts

    if not os.path.isdir(name):
        return ByteTexts()
    from transformers import AutoTokenizer

    try:
        return TokenizerTexts(AutoTokenizer.from_pretrained(name, local_files_only=True))
    except (OSError, ValueError) as error:
        if model.get_output_embeddings().weight.shape[0] < 256:
            raise UsageError(
                f"MODEL is {name!r}: expected a tokenizer in it, or 256 tokens or more ({error})"
            ) from None
    say(f"{name} has no tokenizer: each byte is a token")
    return ByteTexts()
