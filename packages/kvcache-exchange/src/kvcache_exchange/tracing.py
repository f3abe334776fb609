# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans and NVTX ranges around steps, swaps and loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, Protocol

from kvcache.allocator import KVCacheManager
from kvcache.checks import shown
from kvcache.sources.loads import SourceLoad, SourceLoads
from kvcache.worker import SwapEngine, Worker

TraceBackend = Literal["opentelemetry", "nvtx"]


class _Ranges(Protocol):
    """Starts and ends trace ranges, either around one call or from one call to a later one."""

    def around(self, name: str) -> AbstractContextManager[object]: ...

    def begin(self, name: str, load: SourceLoad[Any]) -> object: ...

    def end(self, opened: Any) -> None: ...


_CALLS: dict[str, tuple[type, tuple[str, ...]]] = {
    "kvcache.step": (KVCacheManager, ("step", "admit", "extend")),
    "kvcache.apply": (Worker, ("apply", "start")),
    "kvcache.swap_out": (SwapEngine, ("swap_out",)),
    "kvcache.swap_in": (SwapEngine, ("swap_in",)),
}
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
# The open ranges of each load, keyed by the load's `id`, which stays unique because `SourceLoads`
# keeps the load until it ends.
_loads: dict[int, list[tuple[_Ranges, object]]] = {}


def enable_tracing(*backends: TraceBackend) -> None:
    """Trace each subsequent `step`, `admit`, `extend`, `apply`, swap and load in this process.

    Tracing replaces the methods by traced versions, so it has no cost while it is disabled. Enable
    tracing before managers and workers are created, because they may keep references to bound methods.
    The spans are named `kvcache.step`, `kvcache.apply`, `kvcache.swap_out`, `kvcache.swap_in` and
    `kvcache.load`. The span of a load ends when the load's KV has arrived or the load has failed, and
    has the attributes `kvcache.request_id` and `kvcache.num_tokens`.

    Args:
        backends: "opentelemetry" for spans of the configured tracer provider, "nvtx" for ranges that
            Nsight Systems shows.

    Raises:
        ValueError: No backend is given, or a backend is unknown.
        ModuleNotFoundError: `opentelemetry-api` is not installed.
        RuntimeError: Tracing is already enabled, or torch is built without NVTX.

    Example:
        >>> enable_tracing("opentelemetry")
        >>> disable_tracing()
    """
    if _originals:
        raise RuntimeError("tracing is already enabled: call disable_tracing() first")
    if not backends or any(each not in _BACKENDS for each in backends):
        raise ValueError(
            f"backends is {shown(backends)}: expected {' or '.join(_BACKENDS)}, or both"
        )
    ranges = [_BACKENDS[each]() for each in dict.fromkeys(backends)]
    for name, (owner, methods) in _CALLS.items():
        for method in methods:
            _replace(owner, method, functools.partial(_around, name, ranges))
    _replace(SourceLoads, "begin", functools.partial(_beginning, ranges))
    for method in ("finish", "drop", "quarantine"):
        _replace(SourceLoads, method, _ending)


def disable_tracing() -> None:
    """End all ranges and stop tracing. Does nothing if tracing is disabled."""
    for load in [*_loads]:
        _end(load)
    for (owner, method), original in _originals.items():
        setattr(owner, method, original)
    _originals.clear()


def _replace(
    owner: type, method: str, traced: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    original = getattr(owner, method)
    _originals[owner, method] = original
    setattr(owner, method, functools.wraps(original)(traced(original)))


def _around(name: str, ranges: list[_Ranges], original: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for each in ranges:
                stack.enter_context(each.around(name))
            return original(*args, **options)

    return traced


def _beginning(ranges: list[_Ranges], original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: Any, load: SourceLoad[Any]) -> None:
        original(self, load)
        _loads[id(load)] = [(each, each.begin("kvcache.load", load)) for each in ranges]

    return begin


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: Any, load: SourceLoad[Any], *args: Any, **options: Any) -> Any:
        _end(id(load))
        return original(self, load, *args, **options)

    return end


def _end(load: int) -> None:
    for each, opened in _loads.pop(load, ()):
        each.end(opened)


class _OpenTelemetry:
    def __init__(self) -> None:
        try:
            from opentelemetry.trace import get_tracer
        except ImportError as error:
            raise ModuleNotFoundError(
                f"tracing with opentelemetry needs its API ({error}): "
                "pip install opentelemetry-api",
                name="opentelemetry",
            ) from error
        self._tracer = get_tracer("kvcache")

    def around(self, name: str) -> AbstractContextManager[object]:
        return self._tracer.start_as_current_span(name)

    def begin(self, name: str, load: SourceLoad[Any]) -> object:
        attributes = {
            "kvcache.request_id": load.request.request_id,
            "kvcache.num_tokens": load.end_token - load.first_token,
        }
        return self._tracer.start_span(name, attributes=attributes)

    def end(self, opened: Any) -> None:
        opened.end()


class _Nvtx:
    def __init__(self) -> None:
        from torch.cuda import nvtx

        self._nvtx = nvtx
        nvtx.range_push("kvcache")  # raises RuntimeError if torch is built without NVTX
        nvtx.range_pop()

    def around(self, name: str) -> AbstractContextManager[object]:
        return self._nvtx.range(name)

    def begin(self, name: str, load: SourceLoad[Any]) -> object:
        return self._nvtx.range_start(f"{name} {load.request.request_id}")

    def end(self, opened: Any) -> None:
        self._nvtx.range_end(opened)


_BACKENDS: dict[str, Callable[[], _Ranges]] = {"opentelemetry": _OpenTelemetry, "nvtx": _Nvtx}
