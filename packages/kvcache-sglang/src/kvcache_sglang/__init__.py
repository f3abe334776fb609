# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill and decode between SGLang and another engine, and SGLang's prefix cache:

    KVCACHE_EXCHANGE='{"port": 7000}' sglang serve MODEL --page-size 64
    sglang serve MODEL --page-size 64 --radix-cache-backend kvcache

SGLang loads the plug-ins. Without the variable and the option, they neither import nor change any
part of SGLang. The value is a JSON object with options of `ConnectorOptions`, or `{}`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from kvcache_sglang.options import BACKEND, VARIABLE

_SCHEDULER = "sglang.srt.managers.scheduler"


def register_prefix_cache() -> None:
    """Make `--radix-cache-backend kvcache` available in processes that run a scheduler."""
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.mem_cache import registry

    if BACKEND not in registry.registered_radix_cache_backends():
        registry.register_radix_cache_backend(BACKEND, _make_cache)


def _make_cache(context: Any) -> Any:
    from kvcache_sglang.prefix_cache import make_cache

    return make_cache(context)


def register() -> None:
    """Enable the exchange of KV in this process's scheduler if KVCACHE_EXCHANGE is set.

    If these options, SGLang's version or SGLang's own options are not supported, the engine logs
    the reason and does not start.
    """
    if VARIABLE not in os.environ:
        return
    # SGLang loads plug-ins in each of its processes. Only processes that run a scheduler have
    # imported it.
    module = sys.modules.get(_SCHEDULER)
    if module is None:
        return
    from kvcache_exchange.plugins.wrapping import wrap_once
    from kvcache_sglang.weights import wrap_weight_updates

    # SGLang ignores errors raised here, so `_creating` and `_starting` perform all checks.
    wrap_once(module.Scheduler, "__init__", _creating)
    wrap_weight_updates()  # the scheduler has not been created yet
    for name, wrap in (
        ("get_init_info", _starting),
        ("run_event_loop", _running),
        ("process_input_requests", _polling),
        ("handle_generate_request", _receiving),
        ("abort_request", _aborting),
        ("is_fully_idle", _idle),
        ("flush_cache", _flushing),
        ("get_internal_state", _describing),
    ):
        wrap_once(module.Scheduler, name, wrap)
    wrap_once(module.SchedulerOutputStreamer, "stream_output", _sending)
    wrap_once(module.ScheduleBatch, "retract_decode", _retracting)


def exchange_of(owner: Any) -> Any:
    """Return the `Exchange` of a scheduler, one of its batches or its output streamer, or None."""
    return getattr(owner.tree_cache, "kvcache_exchange", None)


def _creating(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(scheduler: Any, *arguments: Any, **options: Any) -> None:
        from kvcache_sglang.compatibility import EXCHANGE, check_version

        check_version(EXCHANGE)
        original(scheduler, *arguments, **options)

    return __init__


def _starting(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_init_info(scheduler: Any) -> Any:  # called before the engine is reported as ready
        from kvcache_sglang.exchange import Exchange
        from kvcache_sglang.options import options_from_environment

        if exchange_of(scheduler) is None:
            exchange = Exchange(scheduler, options_from_environment())
            scheduler.tree_cache.kvcache_exchange = exchange
        return original(scheduler)

    return get_init_info


def _running(original: Callable) -> Callable:
    @functools.wraps(original)
    def run_event_loop(scheduler: Any) -> None:
        try:
            original(scheduler)
        finally:
            if (exchange := exchange_of(scheduler)) is not None:
                exchange.close()

    return run_event_loop


def _polling(original: Callable) -> Callable:
    @functools.wraps(original)
    def process_input_requests(scheduler: Any, *arguments: Any, **options: Any) -> Any:
        if (exchange := exchange_of(scheduler)) is not None:
            exchange.poll()
        return original(scheduler, *arguments, **options)

    return process_input_requests


def _receiving(original: Callable) -> Callable:
    @functools.wraps(original)
    def handle_generate_request(scheduler: Any, recv_req: Any, **options: Any) -> None:
        exchange = exchange_of(scheduler)

        def go_on() -> None:
            original(scheduler, recv_req, **options)

        if exchange is None or not exchange.load(recv_req, go_on):
            go_on()

    return handle_generate_request


def _aborting(original: Callable) -> Callable:
    @functools.wraps(original)
    def abort_request(scheduler: Any, recv_req: Any, **options: Any) -> Any:
        if (exchange := exchange_of(scheduler)) is not None:
            exchange.cancel("" if recv_req.abort_all else recv_req.rid)
        return original(scheduler, recv_req, **options)

    return abort_request


def _idle(original: Callable) -> Callable:
    @functools.wraps(original)
    def is_fully_idle(scheduler: Any, for_health_check: bool = False, **options: Any) -> bool:
        exchange = exchange_of(scheduler)
        if exchange is not None and exchange.num_loads and not for_health_check:
            return False
        return original(scheduler, for_health_check, **options)

    return is_fully_idle


def _flushing(original: Callable) -> Callable:
    @functools.wraps(original)
    def flush_cache(scheduler: Any, *arguments: Any, **options: Any) -> bool:
        if (exchange := exchange_of(scheduler)) is not None:
            exchange.cancel("")
            exchange.wait_for_released_slots()
            if scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
                exchange.end_leases()
        return original(scheduler, *arguments, **options)

    return flush_cache


def _retracting(original: Callable) -> Callable:
    @functools.wraps(original)
    def retract_decode(batch: Any, *arguments: Any, **options: Any) -> Any:
        if (exchange := exchange_of(batch)) is not None:
            exchange.end_leases()  # if leases lock the pool, SGLang would abort the last request
        return original(batch, *arguments, **options)

    return retract_decode


def _describing(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_internal_state(scheduler: Any, recv_req: Any) -> Any:
        output = original(scheduler, recv_req)
        if (exchange := exchange_of(scheduler)) is not None:
            output.internal_state["kvcache_exchange"] = exchange.describe()
        return output

    return get_internal_state


def _sending(original: Callable) -> Callable:
    @functools.wraps(original)
    def stream_output(streamer: Any, reqs: list, *arguments: Any, **options: Any) -> None:
        if (exchange := exchange_of(streamer)) is not None:
            for request in reqs:
                exchange.publish(request)
        return original(streamer, reqs, *arguments, **options)

    return stream_output
