"""Merges the reports that the workers of an engine make of transfers, one each per step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcache.checks import integer
from kvcache.transfer.connector.cache_events import KVCacheEvents

_EVENTS_METHODS = ("add_events", "get_all_events", "increment_workers", "get_number_of_workers")


@dataclass
class KVConnectorOutput:
    """A report on the transfers of a step, by one worker's connector or by all workers together.

    An engine may pass any object with these attributes; those it lacks count as empty.

    `finished_sending`, `finished_recving`: ids of requests. `kv_connector_stats`: an object with
    `aggregate(other)`, which returns the sum (or None where it has changed itself), and optionally
    `is_empty()`. `kv_cache_events`: `KVCacheEvents`, a list of events, or an object with `add_events`,
    `get_all_events`, `increment_workers` and `get_number_of_workers`. `invalid_block_ids`: blocks that
    could not be loaded. `expected_finished_count`: how many reports a request needs to be finished,
    for requests first reported from now on; 0 keeps the current number.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: object | None = None
    kv_cache_events: object | None = None
    invalid_block_ids: set[int] | None = None
    expected_finished_count: int = 0


class KVOutputAggregator:
    """Merges the workers' reports, step by step.

    `expected_finished_count`: how many reports a request needs to be finished, counted separately for
    sending and receiving; ValueError below 1.

    >>> from types import SimpleNamespace as Output
    >>> def outputs(*finished):
    ...     reports = [KVConnectorOutput(finished_sending=f) for f in finished]
    ...     return [Output(kv_connector_output=report) for report in reports]
    >>> aggregator = KVOutputAggregator(expected_finished_count=2)
    >>> aggregator.aggregate(outputs({"a", "b"}, {"a"})).kv_connector_output.finished_sending
    {'a'}
    >>> aggregator.remaining_sending
    {'b': 1}
    >>> aggregator.aggregate(outputs(None, {"b"})).kv_connector_output.finished_sending
    {'b'}
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected = integer(expected_finished_count, "expected_finished_count", 1)
        self._remaining_sending: dict[str, int] = {}
        self._remaining_recving: dict[str, int] = {}
        self._pending: _Merged | None = None  # merged reports that no output has carried yet

    @classmethod
    def from_connector(cls, connector: object, world_size: int) -> KVOutputAggregator:
        """An aggregator for `connector.get_finished_count()` reports, or `world_size` if 0 or None."""
        return cls(connector.get_finished_count() or world_size)

    @property
    def expected_finished_count(self) -> int:
        """How many reports a request needs to be finished, for requests that are not reported yet."""
        return self._expected

    @property
    def remaining_sending(self) -> dict[str, int]:
        """Requests that some workers have finished sending -> number of reports still missing."""
        return dict(self._remaining_sending)

    @property
    def remaining_recving(self) -> dict[str, int]:
        """Requests that some workers have finished receiving -> number of reports still missing."""
        return dict(self._remaining_recving)

    def aggregate(self, outputs: Sequence[object], output_rank: int = 0) -> object | None:
        """Returns the output of `output_rank` with the merged report as its `kv_connector_output`.

        outputs: one per worker, each with an attribute `kv_connector_output`: a report as
        `KVConnectorOutput`, or None.

        - A request is in `finished_sending` (`finished_recving`) of the call in which its last report
          came. An id counts once per report. Reports are counted, not workers: if a worker names a
          request again in a later call, that counts again.
        - Reports are merged in the order of workers. A worker's `expected_finished_count` holds from its
          own report on, for requests that are new.
        - Statistics are added up by type: `kv_connector_stats` is their sum, or `{type: sum}` where
          there are several types.
        - Events are kept by worker. A worker whose `kv_cache_events` is None is not counted among the
          workers of the events. One with an empty list is, so then no event is common to all.
        - Invalid block ids are united.

        Empty sets, statistics and events become None. The workers' reports are not changed, except in
        the output that is returned.

        Returns None where the output of `output_rank` is None or false. The merged report is then kept,
        and goes out with the next output that is not.

        ValueError, with nothing changed, where another worker's output is missing (None), `output_rank`
        is not a worker, or a report is invalid: events of different types, statistics that cannot be
        added, a negative count, or a string, mapping or number in place of a set of ids.
        """
        reports = _reports(outputs, output_rank)
        expected = self._expected
        merged = _Merged() if self._pending is None else copy.deepcopy(self._pending)
        sending: dict[str, int] = {}
        recving: dict[str, int] = {}
        for worker, report in reports:
            expected = _expected_count(report, worker) or expected
            ids = _ids(report, "finished_sending", worker)
            merged.sending |= _count(ids, expected, self._remaining_sending, sending)
            ids = _ids(report, "finished_recving", worker)
            merged.recving |= _count(ids, expected, self._remaining_recving, recving)
            merged.invalid_block_ids |= _ids(report, "invalid_block_ids", worker)
            merged.add_stats(getattr(report, "kv_connector_stats", None), worker)
            merged.add_events(getattr(report, "kv_cache_events", None), worker)
        output = outputs[output_rank] or None
        if output is not None:
            output.kv_connector_output = merged.report(expected)
        # Nothing below fails.
        self._expected = expected
        self._pending = merged if output is None else None
        _update_remaining(self._remaining_sending, sending)
        _update_remaining(self._remaining_recving, recving)
        return output


@dataclass
class _Merged:
    """The reports merged so far."""

    sending: set[str] = field(default_factory=set)
    recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    stats: dict[type, object] = field(default_factory=dict)
    events: dict[int, object] = field(default_factory=dict)  # by worker

    def add_stats(self, stats: object | None, worker: int) -> None:
        if stats is None:
            return
        if not callable(getattr(stats, "aggregate", None)):
            raise ValueError(
                f"kv_connector_stats of worker {worker} is {stats!r}: expected an object with aggregate"
            )
        if _is_empty(stats):
            return
        kind = type(stats)
        stats = copy.deepcopy(stats)  # the sum may keep references into it
        if kind not in self.stats:
            self.stats[kind] = stats
            return
        total = self.stats[kind].aggregate(stats)
        if total is not None:
            self.stats[kind] = total

    def add_events(self, events: object | None, worker: int) -> None:
        if events is None:
            return
        if isinstance(events, list | tuple):
            events = KVCacheEvents(events)
        for method in _EVENTS_METHODS:
            if not callable(getattr(events, method, None)):
                raise ValueError(
                    f"kv_cache_events of worker {worker} is {events!r}: expected an object with {method}"
                )
        for other, known in self.events.items():
            if type(known) is not type(events):
                raise ValueError(
                    f"kv_cache_events of worker {worker} is a {type(events).__name__}, of worker {other} "
                    f"a {type(known).__name__}: expected the same type"
                )
        if worker in self.events:
            self.events[worker].add_events(events.get_all_events())
        else:
            self.events[worker] = copy.deepcopy(events)

    def report(self, expected: int) -> KVConnectorOutput:
        stats = next(iter(self.stats.values())) if len(self.stats) == 1 else self.stats
        return KVConnectorOutput(
            finished_sending=self.sending or None,
            finished_recving=self.recving or None,
            kv_connector_stats=stats or None,
            kv_cache_events=self._all_events(),
            invalid_block_ids=self.invalid_block_ids or None,
            expected_finished_count=expected,
        )

    def _all_events(self) -> object | None:
        combined = None
        for _, events in sorted(self.events.items()):
            if combined is None:
                combined = events
            elif isinstance(combined, KVCacheEvents):
                combined.merge(events)
            else:
                combined.add_events(events.get_all_events())
                combined.increment_workers(events.get_number_of_workers())
        return combined if combined is not None and combined.get_all_events() else None


def _reports(outputs: Sequence[object], output_rank: int) -> list[tuple[int, object]]:
    """(worker, report) of the workers that report anything."""
    if not outputs:
        raise ValueError("outputs is empty: expected one per worker")
    integer(output_rank, "output_rank", 0, len(outputs) - 1)
    if all(output is None for output in outputs):
        return []
    reports = []
    for worker, output in enumerate(outputs):
        if output is None and worker != output_rank:
            raise ValueError(f"the output of worker {worker} is missing: expected one per worker")
        if output and not hasattr(output, "kv_connector_output"):
            raise ValueError(
                f"the output of worker {worker} is {output!r}: expected one with kv_connector_output"
            )
        report = getattr(output, "kv_connector_output", None)
        if report is not None:
            reports.append((worker, report))
    return reports


def _expected_count(report: object, worker: int) -> int:
    count = getattr(report, "expected_finished_count", None)
    return integer(count or 0, f"expected_finished_count of worker {worker}", 0)


def _ids(report: object, name: str, worker: int) -> set:
    """The ids of one report: each once, however often the worker names it there."""
    ids = getattr(report, name, None)
    if ids is None:
        return set()
    try:
        if isinstance(ids, str | bytes | bytearray | memoryview | Mapping):
            raise TypeError("this can be iterated over, but is not a set of ids")
        return set(ids)
    except TypeError as error:
        raise ValueError(
            f"{name} of worker {worker} is {ids!r}: expected a set of ids, each of which hashes"
        ) from error


def _count(
    req_ids: set[str], expected: int, remaining: dict[str, int], changed: dict[str, int]
) -> set[str]:
    """Counts one report of each request in `changed`; returns the requests that are finished."""
    finished = set()
    for req_id in req_ids:
        left = (changed.get(req_id, remaining.get(req_id)) or expected) - 1
        changed[req_id] = left
        if left == 0:
            finished.add(req_id)
    return finished


def _update_remaining(remaining: dict[str, int], changed: dict[str, int]) -> None:
    for req_id, left in changed.items():
        if left:
            remaining[req_id] = left
        else:
            remaining.pop(req_id, None)


def _is_empty(stats: object) -> bool:
    is_empty = getattr(stats, "is_empty", None)
    return bool(is_empty()) if callable(is_empty) else False
