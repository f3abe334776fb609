"""The engine in a thread of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvcache.checks import instance
from kvcache.metrics import CacheMetrics
from kvcache.serve.snapshot import snapshot
from kvcache.serving import Delta, Engine, Generation, SamplingParams

if TYPE_CHECKING:
    from kvcache.router_events import EventPublisher

_log = logging.getLogger(__name__)
_MAX_FAILURES = 3  # steps in a row, after which what is being served is given up
_SNAPSHOT_SECONDS = 0.2


class EngineError(Exception):
    """A request that was given up: the model failed, or the server stops. `status`: of HTTP."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class Answer:
    """One request: an async iterator of its `Delta`s, which ends when all samples have."""

    def __init__(self, loop: EngineLoop, num_samples: int) -> None:
        self.generation: Generation | None = None  # None until the engine has it
        self._loop = loop
        self._events = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._num_running = num_samples

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._num_running:
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            self._num_running -= delta.finish_reason is not None
            yield delta

    def stop(self, index: int) -> None:
        """Ends one sample, for example at a stop text; a last `Delta` says so."""
        self._loop.call(lambda engine: self._loop.stop_sample(self, index))

    def close(self) -> None:
        """Ends the request, if it has not ended; to be called whatever happens."""
        self._loop.call(lambda engine: self._loop.drop(self))

    def put(self, delta: Delta | Exception) -> None:
        """Called in the engine's thread."""
        self._events.call_soon_threadsafe(self._deltas.put_nowait, delta)


class EngineLoop:
    """Runs an engine in a thread: all calls of it are made there.

    The engine must not have been called before, since one thread calls it. `start` and `stop` frame its
    life. `state` is what the cache holds and `cache_metrics` what it counts, as of a moment ago.
    `publisher`: gets the cache's events, and is closed by `stop`; ValueError where the engine's manager
    has no `enable_events`.
    """

    def __init__(self, engine: Engine, publisher: EventPublisher | None = None) -> None:
        instance(engine, Engine, "engine")
        if publisher is not None and not engine.cache.manager.options.enable_events:
            raise ValueError("publisher is given: expected a manager with enable_events")
        self.engine = engine
        self._publisher = publisher
        self.cache_metrics = CacheMetrics()
        self._look()
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Answer] = {}  # of the requests that are being served
        self._thread = threading.Thread(target=self._run, name="kvcache engine", daemon=True)
        self._is_stopping = False
        self._refusal: EngineError | None = None  # of all that comes: nothing is served any more
        self._last_snapshot = 0.0
        self._num_failures = 0

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends what is being served, and the thread."""
        self._inbox.put(None)
        self._thread.join()
        if self._publisher is not None:
            self._publisher.close()

    def end_all(self, error: EngineError) -> None:
        """Ends what is being served, with this error, and refuses what comes; the thread goes on."""

        def end(engine: Engine) -> None:
            self._refusal = error
            self._give_up(error)

        self.call(end)

    def call(self, work: Callable[[Engine], object]) -> None:
        """Runs `work` in the engine's thread, some time later."""
        self._inbox.put(work)

    @asynccontextmanager
    async def serving(
        self, prompt: list[int], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Answer]:
        """A request that is served while the block goes on; what `Engine.add` raises comes out."""
        answer = Answer(self, params.beam_width if params.beam_width > 1 else params.n)
        try:
            await self._add(answer, prompt, params, options)
            yield answer
        finally:
            answer.close()

    async def _add(
        self, answer: Answer, prompt: list[int], params: SamplingParams, options: dict[str, Any]
    ) -> None:
        events = asyncio.get_running_loop()
        added: asyncio.Future[None] = events.create_future()

        def add(engine: Engine) -> None:
            error = self._refusal
            try:
                if error is not None:
                    raise error
                answer.generation = engine.add(prompt, params, **options)
                self._answers[answer.generation.request_id] = answer
            except Exception as raised:
                error = raised
            events.call_soon_threadsafe(_resolve, added, error)

        self.call(add)
        await added

    def drop(self, answer: Answer) -> None:
        """Ends a request that no one listens to any more; called in the engine's thread."""
        instance(answer, Answer, "answer")
        generation = answer.generation
        if generation is not None and self._answers.pop(generation.request_id, None):
            self.engine.abort(generation.request_id)  # nothing, where it has ended

    def stop_sample(self, answer: Answer, index: int) -> None:
        """Ends one sample of a request; called in the engine's thread."""
        instance(answer, Answer, "answer")
        request_id = answer.generation.request_id
        if self.engine.stop(request_id, index):
            self._tell(Delta(request_id, index, [], "stop"))

    def _run(self) -> None:
        try:
            self._serve()
            self._give_up(EngineError("the server is stopping", 503))
            self._look()
        except Exception as error:
            _log.exception("the engine's thread failed")
            self._refusal = EngineError(f"{type(error).__name__}: {error}")
            for answer in self._answers.values():
                answer.put(self._refusal)
            while not self._is_stopping:
                self._hear(may_wait=True)

    def _serve(self) -> None:
        while not self._is_stopping:
            self._hear(may_wait=self.engine.num_unfinished == 0)
            if self.engine.num_unfinished:
                self._step()
                self._publish()
            now = time.monotonic()
            if now - self._last_snapshot >= _SNAPSHOT_SECONDS or not self.engine.num_unfinished:
                self._last_snapshot = now
                self._look()

    def _look(self) -> None:
        self.state: dict[str, Any] = snapshot(self.engine)
        self.cache_metrics.observe(self.engine.cache.manager)

    def _hear(self, may_wait: bool) -> None:
        """Runs what callers asked for."""
        while not self._is_stopping:
            try:
                work = self._inbox.get(block=may_wait)
            except queue.Empty:
                return
            may_wait = False
            if work is None:
                self._is_stopping = True
                return
            try:
                work(self.engine)
            except Exception:
                _log.exception("a call of the engine failed")

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except Exception as error:
            # The step was undone: the next one computes it again.
            self._num_failures += 1
            _log.exception("step failed")
            if self._num_failures == _MAX_FAILURES:
                self._num_failures = 0
                self._give_up(EngineError(f"{type(error).__name__}: {error}"))
            return
        self._num_failures = 0
        for delta in deltas:
            self._tell(delta)

    def _publish(self) -> None:
        if self._publisher is None:
            return
        events = self.engine.cache.manager.drain_events()
        try:
            self._publisher.publish(events)
        except RuntimeError:  # answers are worth more than events
            _log.exception("cache events are not published any more")
            self._publisher = None

    def _tell(self, delta: Delta) -> None:
        answer = self._answers.get(delta.request_id)
        if answer is not None:
            answer.put(delta)

    def _give_up(self, error: EngineError) -> None:
        for answer in list(self._answers.values()):
            self.drop(answer)
            answer.put(error)


def _resolve(added: asyncio.Future[None], error: Exception | None) -> None:
    if added.done():  # cancelled
        return
    if error is None:
        added.set_result(None)
    else:
        added.set_exception(error)
