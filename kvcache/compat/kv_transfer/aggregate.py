# SPDX-License-Identifier: Apache-2.0
"""Merges the transfer reports of an engine's workers. Each worker sends one report per step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.checks import integer, listed, shown
from kvcache.compat.kv_transfer.cache_events import KVCacheEvents

_EVENTS_METHODS = ("add_events", "get_all_events", "increment_workers", "get_number_of_workers")


@dataclass
class KVConnectorOutput:
    """Report on the transfers of one step, from one worker or merged from all workers.

    An engine may pass objects of its own class instead. Attributes that the class lacks are treated as
    empty. Attributes that this class does not have must be empty or have their defaults.

    Args:
        finished_sending: Ids of requests whose KV has been sent completely.
        finished_recving: Ids of requests whose transfer to the worker has ended, including failed
            requests.
        failed_recving: Ids of requests whose KV could not be received completely. A worker also lists
            such a request in `finished_recving` once it has stopped receiving KV for the request.
        kv_connector_stats: An object with a method `aggregate(other)`, which returns the sum (or None if
            the object is updated in place), and optionally a method `is_empty()`.
        kv_connector_worker_meta: An object with `aggregate(other)`, as for `kv_connector_stats`.
        kv_cache_events: A `KVCacheEvents`, a list of events, or an object with `add_events`,
            `get_all_events`, `increment_workers` and `get_number_of_workers`.
        invalid_block_ids: Ids of blocks that could not be loaded.
        expected_finished_count: Number of reports after which a request is finished. Applies to requests
            that are first reported in this report or later. 0 keeps the current number.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    kv_connector_stats: object | None = None
    kv_connector_worker_meta: object | None = None
    kv_cache_events: object | None = None
    invalid_block_ids: set[int] | None = None
    expected_finished_count: int = 0


_MOST_IDS = 2**22  # ids of one report, so that a small pickled report cannot exhaust the memory
_KNOWN = tuple(known.name for known in dataclasses.fields(KVConnectorOutput))


class KVOutputAggregator:
    """Merges the workers' reports of each step.

    Args:
        expected_finished_count: Number of reports after which a request is finished, counted separately
            for sending and receiving.

    Raises:
        ValueError: `expected_finished_count` is below 1.

    Example:
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
        self._state = _State(integer(expected_finished_count, "expected_finished_count", 1))

    @classmethod
    def from_connector(cls, connector: object, world_size: int) -> KVOutputAggregator:
        """Create an aggregator that expects the number of reports stated by a connector.

        Args:
            connector: An object with `get_finished_count()`.
            world_size: Number of reports to expect if `get_finished_count()` returns 0 or None.

        Returns:
            A new aggregator.

        Raises:
            TypeError: `connector` has no `get_finished_count` method.
        """
        if not callable(getattr(connector, "get_finished_count", None)):
            raise TypeError(
                f"connector is {shown(connector)}: expected an object with get_finished_count"
            )
        world_size = integer(world_size, "world_size", 1)
        return cls(connector.get_finished_count() or world_size)

    @property
    def expected_finished_count(self) -> int:
        """Number of reports after which a request that has not been reported yet is finished."""
        return self._state.expected

    @property
    def remaining_sending(self) -> dict[str, int]:
        """Number of missing reports for each request that only some workers have finished sending."""
        return dict(self._state.remaining_sending)

    @property
    def remaining_recving(self) -> dict[str, int]:
        """Number of missing reports for each request that only some workers have finished receiving."""
        return dict(self._state.remaining_recving)

    @property
    def remaining_failed_recving(self) -> set[str]:
        """Ids of failed requests for which reports from some workers are still missing."""
        return set(self._state.failed_recving)

    def aggregate(self, outputs: Sequence[object], output_rank: int = 0) -> Any:
        """Merge the reports of all workers into the output of one worker.

        - A request appears in the merged `finished_sending` (`finished_recving`) in the call that
          receives its last report. An id is counted once per report. The aggregator counts reports, not
          workers: if a worker lists a request again in a later call, the request is counted again.
        - When a request appears in the merged `finished_recving`, it also appears in `failed_recving` if
          any worker has reported it as failed by then. A later failure is attributed to the next use of
          the id.
        - Reports are merged in worker order. A worker's `expected_finished_count` applies to new
          requests, starting with the requests in the same report.
        - Statistics are summed by type: `kv_connector_stats` is the sum, or `{type: sum}` if there are
          several types. `kv_connector_worker_meta` is the sum over all workers.
        - Events are kept per worker. A worker whose `kv_cache_events` is None is not counted as a worker.
          A worker with an empty list is counted, so that no event is common to all workers.
        - `invalid_block_ids` is the union over all workers.

        The merged report has the class of the first report. If no worker reports anything, it has
        the class of the last merged report, initially `KVConnectorOutput`. A field that no worker
        reported has its default value if the class is a dataclass, and None otherwise. For example,
        `invalid_block_ids` is an empty set if that is the default in the engine's class. Empty
        statistics, empty lists of events and empty `KVCacheEvents` are replaced by None. An engine's own
        events object without events is kept unless its `__bool__` returns False. The workers' reports
        are not modified, except in the returned output.

        Args:
            outputs: One output per worker. Each has an attribute `kv_connector_output`: a
                `KVConnectorOutput`, a similar object, or None.
            output_rank: Index of the output to return.

        Returns:
            The output of `output_rank` with the merged report as its `kv_connector_output`. None if that
            output is None or falsy; the merged report is then kept and returned with the next output.

        Raises:
            ValueError: The output of a worker other than `output_rank` is None, `output_rank` is out of
                range, or a report is invalid. A report is invalid if it has events of a different
                type, statistics that cannot be added, a negative count, a string, mapping or number in
                place of a set of ids, or a non-empty attribute that `KVConnectorOutput` lacks. Nothing
                has changed.
        """
        reports = _reports(outputs, output_rank)
        before = self._state
        expected = before.expected
        merged = _Merged() if before.pending is None else copy.deepcopy(before.pending)
        failed = set(before.failed_recving)
        sending: dict[str, int] = {}
        recving: dict[str, int] = {}
        for worker, report in reports:
            expected = _expected_count(report, worker) or expected
            ids = _ids(report, "finished_sending", worker)
            merged.sending |= _count(ids, expected, before.remaining_sending, sending)
            ids = _ids(report, "finished_recving", worker)
            merged.recving |= _count(ids, expected, before.remaining_recving, recving)
            failed |= _ids(report, "failed_recving", worker)
            merged.invalid_block_ids |= _ids(report, "invalid_block_ids", worker)
            merged.add_stats(getattr(report, "kv_connector_stats", None), worker)
            merged.add_worker_meta(getattr(report, "kv_connector_worker_meta", None), worker)
            merged.add_events(getattr(report, "kv_cache_events", None), worker)
            _check_attributes(report, worker)
        empty = _emptied(reports[0][1]) if reports else before.empty
        output = outputs[output_rank] or None
        state = _State(
            expected,
            _remaining(before.remaining_sending, sending),
            _remaining(before.remaining_recving, recving),
            failed if output is None else failed - merged.recving,
            merged if output is None else None,
            empty,
        )
        if output is None:
            self._state = state
            return None
        report = merged.report(empty, failed & merged.recving, expected)
        # Signal handlers run only at calls, so none can run between these two assignments.
        output.kv_connector_output, self._state = report, state
        return output


@dataclass(frozen=True)
class _State:
    """State of an aggregator. Each call to `aggregate` creates a new state and assigns it at its end."""

    expected: int
    remaining_sending: dict[str, int] = field(default_factory=dict)
    remaining_recving: dict[str, int] = field(default_factory=dict)
    failed_recving: set[str] = field(default_factory=set)  # reported as failed, not yet finished
    pending: _Merged | None = None  # merged reports not yet returned in an output
    # An empty report, as an instance of the engine's `KVConnectorOutput` class.
    empty: object = field(default_factory=KVConnectorOutput)


@dataclass
class _Merged:
    """Merged contents of the reports so far."""

    sending: set[str] = field(default_factory=set)
    recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    stats: dict[type, object] = field(default_factory=dict)
    worker_meta: object | None = None
    events: dict[int, object] = field(default_factory=dict)  # keyed by worker

    def add_stats(self, stats: object | None, worker: int) -> None:
        if stats is None:
            return
        _check_addable(stats, "kv_connector_stats", worker)
        if not _is_empty(stats):
            self.stats[type(stats)] = _sum(self.stats.get(type(stats)), stats)

    def add_worker_meta(self, meta: object | None, worker: int) -> None:
        if meta is None:
            return
        _check_addable(meta, "kv_connector_worker_meta", worker)
        self.worker_meta = _sum(self.worker_meta, meta)

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
                    f"kv_cache_events of worker {worker} is a {type(events).__name__}, but that "
                    f"of worker {other} is a {type(known).__name__}: expected the same type"
                )
        if worker in self.events:
            self.events[worker].add_events(events.get_all_events())
        else:
            self.events[worker] = copy.deepcopy(events)

    def report(self, empty: object, failed: set[str], expected: int) -> object:
        """Return the merged report, in which all other fields have the values of `empty`."""
        stats = next(iter(self.stats.values())) if len(self.stats) == 1 else self.stats
        values = {
            "finished_sending": self.sending,
            "finished_recving": self.recving,
            "failed_recving": failed,
            "kv_connector_stats": stats,
            "kv_connector_worker_meta": self.worker_meta,
            "kv_cache_events": self._all_events(),
            "invalid_block_ids": self.invalid_block_ids,
            "expected_finished_count": expected,
        }
        values = {name: value for name, value in values.items() if value}
        report = _emptied(empty)
        for name in _KNOWN:
            if name in values or not hasattr(report, name):
                # The engine's class may lack fields that no worker reported or that only the
                # aggregator tracks.
                optional = name not in values or name == "expected_finished_count"
                _assign(report, name, values.get(name), optional=optional)
        return report

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
        return combined


def _reports(outputs: Sequence[object], output_rank: int) -> list[tuple[int, object]]:
    """Return `(worker, report)` for each worker that reports anything."""
    outputs = listed(outputs, "outputs")
    if not outputs:
        raise ValueError("outputs is empty: expected one per worker")
    integer(output_rank, "output_rank", 0, len(outputs) - 1)
    if all(output is None for output in outputs):
        return []
    reports = []
    for worker, output in enumerate(outputs):
        if output is None and worker != output_rank:
            raise ValueError(f"the output of worker {worker} is missing: expected one per worker")
        try:
            is_wrong = output and not hasattr(output, "kv_connector_output")
        except (TypeError, ValueError, RuntimeError):  # an array has no truth value
            is_wrong = True
        if is_wrong:
            raise ValueError(
                f"the output of worker {worker} is {shown(output)}: expected an object with "
                "kv_connector_output"
            )
        report = getattr(output, "kv_connector_output", None)
        if report is not None:
            reports.append((worker, report))
    return reports


def _expected_count(report: object, worker: int) -> int:
    count = getattr(report, "expected_finished_count", None)
    return integer(count or 0, f"expected_finished_count of worker {worker}", 0)


def _ids(report: object, name: str, worker: int) -> set:
    """Return the ids of one report as a set."""
    ids = getattr(report, name, None)
    if ids is None:
        return set()
    try:
        if isinstance(ids, str | bytes | bytearray | memoryview | Mapping):
            raise TypeError("iterable, but not a set of ids")
        if hasattr(ids, "__len__") and len(ids) > _MOST_IDS:
            raise ValueError(
                f"{name} of worker {worker} has {len(ids)} ids: expected at most {_MOST_IDS}"
            )
        return set(ids)
    except TypeError as error:
        raise ValueError(
            f"{name} of worker {worker} is {shown(ids)}: expected a set of ids, which must be hashable"
        ) from error


def _count(
    req_ids: set[str], expected: int, remaining: dict[str, int], changed: dict[str, int]
) -> set[str]:
    """Count one report for each request in `changed`, and return the requests that are now finished."""
    finished = set()
    for req_id in req_ids:
        left = (changed.get(req_id, remaining.get(req_id)) or expected) - 1
        changed[req_id] = left
        if left == 0:
            finished.add(req_id)
    return finished


def _remaining(before: dict[str, int], changed: dict[str, int]) -> dict[str, int]:
    return {req_id: left for req_id, left in (before | changed).items() if left}


def _check_addable(value: object, name: str, worker: int) -> None:
    if not callable(getattr(value, "aggregate", None)):
        raise ValueError(
            f"{name} of worker {worker} is {value!r}: expected an object with aggregate"
        )


def _sum(total: object | None, value: object) -> object:
    value = copy.deepcopy(value)  # the sum may keep references to `value`
    if total is None:
        return value
    added = total.aggregate(value)
    return total if added is None else added


def _is_empty(stats: object) -> bool:
    is_empty = getattr(stats, "is_empty", None)
    return bool(is_empty()) if callable(is_empty) else False


def _attributes(report: object) -> list[str]:
    """Return the fields of a dataclass, or the public attributes and slots of another instance."""
    if dataclasses.is_dataclass(report):
        return [each.name for each in dataclasses.fields(report) if not each.name.startswith("_")]
    names = dict.fromkeys((*getattr(report, "__dict__", ()), *getattr(report, "_fields", ())))
    names |= {name: None for name in _KNOWN if hasattr(report, name)}  # for example, properties
    for kind in type(report).__mro__:
        slots = vars(kind).get("__slots__", ())
        names |= dict.fromkeys([slots] if isinstance(slots, str) else slots)
    return [name for name in names if not name.startswith("_")]


def _default(report: object, name: str) -> object:
    """Return a new default value of an attribute of the report's class, or None."""
    if dataclasses.is_dataclass(report):
        for each in dataclasses.fields(report):
            if each.name == name and each.default is not dataclasses.MISSING:
                return each.default
            if each.name == name and each.default_factory is not dataclasses.MISSING:
                return each.default_factory()
    return None


def _check_attributes(report: object, worker: int) -> None:
    """Check that the attributes that `KVConnectorOutput` does not have say nothing."""
    for name in _attributes(report):
        value = getattr(report, name, None)
        if name not in _KNOWN and value is not None and not _says_nothing(report, name):
            raise ValueError(
                f"{name} of worker {worker} is {value!r}: expected an attribute of KVConnectorOutput"
            )


def _says_nothing(report: object, name: str) -> bool:
    """Return whether an attribute is an empty container or equals the default of its class."""
    value = getattr(report, name)
    if hasattr(value, "__len__"):
        return len(value) == 0
    default = _default(report, name)
    return value is default or (type(value) is type(default) and bool(value == default))


def _emptied(report: object) -> object:
    """Return a copy of a report with all attributes set to their defaults, or None without a default."""
    emptied = copy.copy(report)
    for name in _attributes(report):
        _assign(emptied, name, _default(report, name))
    return emptied


def _assign(report: object, name: str, value: object, *, optional: bool = False) -> None:
    """Set an attribute, even of a frozen dataclass. Raise ValueError on failure unless `optional`."""
    try:
        try:
            setattr(report, name, value)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(report, name, value)
    except (AttributeError, TypeError) as error:
        if not optional:
            raise ValueError(
                f"a report is a {type(report).__name__}, whose {name} cannot be set: expected a report "
                "whose class has that attribute"
            ) from error
