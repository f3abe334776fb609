# SPDX-License-Identifier: Apache-2.0
"""Runs an engine in a separate thread, for use from an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache.checks import instance
from kvcache.metrics import CacheMetrics
from kvcache_exchange.hints import Hint, Receipt
from kvcache_serve.engine import Delta, Engine, Generation, SamplingParams
from kvcache_serve.server.snapshot import snapshot

if TYPE_CHECKING:
    from kvcache_exchange.router_events import EventPublisher

_log = logging.getLogger("kvcache.serve")
T = TypeVar("T")
_MAX_FAILURES = 3  # consecutive failed steps after which all requests are ended
_SNAPSHOT_SECONDS = 0.2
_SOURCES_SECONDS = 0.005  # pause in seconds after a step in which only sources were active


class EngineError(Exception):
    """Raised if a request ends because the model has failed or the server is stopping.

    `status`: the HTTP status.
    """

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class Answer:
    """The answer to one request, as an async iterator over `Delta` objects.

    The iterator ends when all samples have ended.
    """

    def __init__(self, loop: EngineLoop, num_samples: int) -> None:
        self.generation: Generation | None = None  # None until the engine has added the request
        self._loop = loop
        self._events = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._num_running = num_samples

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._num_running:
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            if delta.finish_reason is not None:
                # If the first sample ends before its first token, there are no other samples.
                is_only = self.generation is not None and len(self.generation.samples) == 1
                self._num_running = 0 if is_only else self._num_running - 1
            yield delta

    def stop(self, index: int) -> None:
        """End one sample, for example at a stop string. The iterator still yields a last `Delta`."""
        with suppress(EngineError):  # the thread has stopped and ended all samples
            self._loop.call(lambda engine: self._loop.stop_sample(self, index))

    def close(self) -> None:
        """End the request if it is still running. This method must always be called."""
        with suppress(EngineError):  # the thread has stopped and ended all requests
            self._loop.call(lambda engine: self._loop.drop(self))

    @staticmethod
    def put_all(deltas: list[tuple[Answer, Delta | Exception]]) -> None:
        """Pass each delta to its answer. Called from the engine's thread.

        Each event loop is woken only once for all deltas, because waking an event loop needs a
        system call.
        """
        by_events: dict[asyncio.AbstractEventLoop, list[tuple[Answer, Delta | Exception]]] = {}
        for answer, delta in deltas:
            by_events.setdefault(answer._events, []).append((answer, delta))
        for events, own in by_events.items():
            events.call_soon_threadsafe(_put, own)


class EngineLoop:
    """Runs an engine in a separate thread, which makes all calls to the engine.

    Call `start` once, and `stop` at the end. `state` is a recent snapshot of the cache, and
    `cache_metrics` contains the cache's counters.

    Args:
        engine: An engine that no thread has used yet.
        publisher: Publisher that receives the cache events. `stop` closes it.

    Raises:
        ValueError: `publisher` is given, but the engine's manager does not have `enable_events`
            set.
    """

    def __init__(self, engine: Engine, publisher: EventPublisher | None = None) -> None:
        instance(engine, Engine, "engine")
        if publisher is not None and not engine.cache.manager.options.enable_events:
            raise ValueError("publisher is given: expected a manager with enable_events")
        self.engine, self.publisher = engine, publisher
        self._publisher = publisher  # None once the publisher has failed
        self.cache_metrics = CacheMetrics()
        self._look()
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Answer] = {}  # answers to requests being served
        # Receipts for which clients are waiting.
        self._hinting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Receipt]]] = []
        self._thread = threading.Thread(target=self._run, name="kvcache engine", daemon=True)
        # Ensures that no work is queued after the None that stops the thread.
        self._lock = threading.Lock()
        self._is_started = self._is_stopped = False  # whether `start` and `stop` were called
        self._is_stopping = False  # whether the thread has received the None that stops it
        self._refusal: EngineError | None = None  # error for new requests after `end_all`
        self._last_snapshot = 0.0
        self._num_failures = 0

    def start(self) -> None:
        """Start the thread. A second call raises RuntimeError, because a loop runs only once."""
        with self._lock:
            if self._is_started:
                raise RuntimeError(
                    "the engine loop has already been started; start() can be called only once"
                )
            self._thread.start()
            self._is_started = True

    def stop(self) -> None:
        """End all requests and stop the thread. A second call has no effect.

        Raises:
            RuntimeError: `start` was not called.
        """
        with self._lock:
            if not self._is_started:
                raise RuntimeError(
                    "the engine loop has not been started: expected start before stop"
                )
            if not self._is_stopped:
                self._is_stopped = True
                self._inbox.put(None)
        self._thread.join()
        if self._publisher is not None:
            self._publisher.close()

    def end_all(self, error: EngineError) -> None:
        """End all requests with this error, and reject new requests. The thread keeps running."""

        def end(engine: Engine) -> None:
            self._refusal = error
            self._give_up(error)

        # If the loop is not running, there are no requests, and new requests are already rejected.
        with suppress(EngineError):
            self.call(end)

    def check(self) -> None:
        """Raise the EngineError that a new request would currently receive. Return if the request
        would be accepted.
        """
        with self._lock:
            self._check_running()
        if self._refusal is not None:
            raise self._refusal

    def _check_running(self) -> None:
        if not self._is_started:
            raise EngineError("the engine loop has not been started", 503)
        if self._is_stopped:
            raise EngineError("the server is stopping", 503)

    def call(self, work: Callable[[Engine], object]) -> None:
        """Queue `work` to run in the engine's thread.

        Raises:
            EngineError: With status 503 before `start` and after `stop`, because no thread would run
                `work`.
        """
        with self._lock:
            self._check_running()
            self._inbox.put(work)

    @asynccontextmanager
    async def serving(
        self, prompt: list[int], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Answer]:
        """Serve a request during an `async with` block.

        Raises any error that `Engine.add` raises, and EngineError before `start` and after `stop`.
        """
        answer = Answer(self, params.n)
        try:
            await self._add(answer, prompt, params, options)
            yield answer
        finally:
            answer.close()

    async def _add(
        self, answer: Answer, prompt: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        def add(engine: Engine) -> None:
            if self._refusal is not None:
                raise self._refusal
            answer.generation = engine.add(prompt, params, **options)
            self._answers[answer.generation.request_id] = answer

        await self.ask(add)

    async def ask(self, work: Callable[[Engine], T]) -> T:
        """Run `work` in the engine's thread, and return its result.

        Raises any error that `work` raises, and EngineError before `start` and after `stop`.
        """
        events = asyncio.get_running_loop()
        done: asyncio.Future[T] = events.create_future()

        def run(engine: Engine) -> None:
            result = error = None
            try:
                result = work(engine)
            except Exception as raised:
                error = raised
            events.call_soon_threadsafe(_resolve, done, result, error)

        self.call(run)
        return await done

    async def receipts(
        self, tokens: list[int], hints: list[Hint], cache_salt: str | None
    ) -> list[Receipt]:
        """Submit hints about the KV of a token prefix, and return their receipts.

        Raises any error that `Engine.hint` raises, and EngineError before `start` and after `stop`.
        """
        events = asyncio.get_running_loop()
        answers: list[asyncio.Future[Receipt]] = [events.create_future() for _ in hints]

        def submit(engine: Engine) -> None:
            self._hinting = [each for each in self._hinting if not each[1].done()]
            for hint, answer in zip(hints, answers):
                self._hinting.append((events, answer))
                try:
                    if self._refusal is not None:
                        raise self._refusal
                    engine.hint(
                        tokens,
                        hint,
                        cache_salt=cache_salt,
                        on_receipt=partial(_tell_receipt, events, answer),
                    )
                except Exception as error:
                    events.call_soon_threadsafe(_resolve, answer, None, error)

        self.call(submit)
        return list(await asyncio.gather(*answers))

    def drop(self, answer: Answer) -> None:
        """End a request whose client has stopped reading. Called in the engine's thread."""
        instance(answer, Answer, "answer")
        generation = answer.generation
        if generation is not None and self._answers.pop(generation.request_id, None):
            self.engine.abort(generation.request_id)  # no effect if the request has already ended

    def stop_sample(self, answer: Answer, index: int) -> None:
        """End one sample of a request. Called in the engine's thread."""
        instance(answer, Answer, "answer")
        request_id = answer.generation.request_id
        if self.engine.stop(request_id, index):
            self._tell([Delta(request_id, index, [], "stop")])

    def _run(self) -> None:
        try:
            self._serve()
            self._give_up(EngineError("the server is stopping", 503))
            self.engine.close()
            self._look()
        except Exception as error:
            _log.exception("the engine's thread failed")
            self._refusal = EngineError(f"{type(error).__name__}: {error}")
            Answer.put_all([(answer, self._refusal) for answer in self._answers.values()])
            for events, receipt in self._hinting:
                events.call_soon_threadsafe(_resolve, receipt, None, self._refusal)
            while not self._is_stopping:
                self._hear(wait_s=None)

    def _serve(self) -> None:
        while not self._is_stopping:
            if self.engine.num_unfinished:
                self._hear(wait_s=0.0)
            else:
                self._hear(wait_s=_SOURCES_SECONDS if self.engine.is_busy else None)
            if self.engine.is_busy:
                self._step()
            self._publish()  # calls between steps also change the cache
            now = time.monotonic()
            if now - self._last_snapshot >= _SNAPSHOT_SECONDS or not self.engine.is_busy:
                self._last_snapshot = now
                self._look()

    def _look(self) -> None:
        self.state: dict[str, Any] = snapshot(self.engine)
        self.cache_metrics.observe(self.engine.cache.manager)

    def _hear(self, wait_s: float | None) -> None:
        """Run the work that callers have submitted.

        Waits for work for up to `wait_s` seconds, or indefinitely if `wait_s` is None.
        """
        while not self._is_stopping:
            try:
                work = self._inbox.get(wait_s != 0, wait_s)
            except queue.Empty:
                return
            wait_s = 0.0
            if work is None:
                self._is_stopping = True
                return
            try:
                work(self.engine)
            except Exception:
                _log.exception("a call to the engine failed")

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except Exception as error:
            # The step was undone. The next step computes the same tokens again.
            self._num_failures += 1
            _log.exception("step failed")
            if self._num_failures == _MAX_FAILURES:
                self._num_failures = 0
                self._give_up(EngineError(f"{type(error).__name__}: {error}"))
            return
        self._num_failures = 0
        self._tell(deltas)

    def _publish(self) -> None:
        if self._publisher is None:
            return
        events = self.engine.drain_events()
        try:
            self._publisher.publish(events)
        except RuntimeError:  # a failure to publish events must not end requests
            _log.exception("cache events are no longer published")
            self._publisher = None

    def _tell(self, deltas: list[Delta]) -> None:
        answers = self._answers
        Answer.put_all(
            [(answers[each.request_id], each) for each in deltas if each.request_id in answers]
        )

    def _give_up(self, error: EngineError) -> None:
        answers = list(self._answers.values())
        for answer in answers:
            self.drop(answer)
        Answer.put_all([(answer, error) for answer in answers])


def _put(deltas: list[tuple[Answer, Delta | Exception]]) -> None:
    for answer, delta in deltas:
        answer._deltas.put_nowait(delta)


def _resolve(done: asyncio.Future[T], result: T | None, error: Exception | None) -> None:
    if done.done():  # the caller was cancelled
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def _tell_receipt(
    events: asyncio.AbstractEventLoop, answer: asyncio.Future[Receipt], receipt: Receipt
) -> None:
    events.call_soon_threadsafe(_resolve, answer, receipt, None)
