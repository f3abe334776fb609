"""Merges the reports that the workers of an engine make of transfers, one each per step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcache.checks import instance, integer, listed, shown
from kvcache.transfer.connector.cache_events import KVCacheEvents

Rule = Callable[[object, object], object]

_EVENTS_METHODS = ("add_events", "get_all_events", "increment_workers", "get_number_of_workers")


@dataclass
class KVConnectorOutput:
    """A report on the transfers of a step, by one worker's connector or by all workers together.

    An engine may pass objects of a class of its own, with these attributes (those it lacks count as
    empty) and others (`KVOutputAggregator.register_rule`).

    `finished_sending`, `finished_recving`: ids of requests. `failed_recving`: requests of which
    something could not be received; a worker names them in `finished_recving` too, as soon as it has
    ended receiving them. `kv_connector_stats`: an object with `aggregate(other)`, which returns the sum
    (or None where it has changed itself), and optionally `is_empty()`. `kv_connector_worker_meta`: an
    object with `aggregate(other)`, likewise. `kv_cache_events`: `KVCacheEvents`, a list of events, or
    an object with `add_events`, `get_all_events`, `increment_workers` and `get_number_of_workers`.
    `invalid_block_ids`: blocks that could not be loaded. `expected_finished_count`: how many reports a
    request needs to be finished, for requests first reported from now on; 0 keeps the current number.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None
    kv_connector_stats: object | None = None
    kv_connector_worker_meta: object | None = None
    kv_cache_events: object | None = None
    invalid_block_ids: set[int] | None = None
    expected_finished_count: int = 0


_KNOWN = tuple(known.name for known in dataclasses.fields(KVConnectorOutput))


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
        self._state = _State(integer(expected_finished_count, "expected_finished_count", 1))
        self._rules: dict[str, Rule] = {}

    @classmethod
    def from_connector(cls, connector: object, world_size: int) -> KVOutputAggregator:
        """An aggregator for `connector.get_finished_count()` reports, or `world_size` if 0 or None."""
        if not callable(getattr(connector, "get_finished_count", None)):
            raise TypeError(
                f"connector is {shown(connector)}: expected an object with get_finished_count"
            )
        world_size = integer(world_size, "world_size", 1)
        return cls(connector.get_finished_count() or world_size)

    @property
    def expected_finished_count(self) -> int:
        """How many reports a request needs to be finished, for requests that are not reported yet."""
        return self._state.expected

    @property
    def remaining_sending(self) -> dict[str, int]:
        """Requests that some workers have finished sending -> number of reports still missing."""
        return dict(self._state.remaining_sending)

    @property
    def remaining_recving(self) -> dict[str, int]:
        """Requests that some workers have finished receiving -> number of reports still missing."""
        return dict(self._state.remaining_recving)

    @property
    def remaining_failed_recving(self) -> set[str]:
        """Requests reported as failed to receive, and not as finished since by all workers."""
        return set(self._state.failed_recving)

    def begin_receiving(self, request_id: str) -> None:
        """Says that the workers begin to receive for this request; for engines that use ids again.

        A failure that a worker named after the last `finished_recving` of the id, too late, is dropped.
        Without this call it counts for the next use of the id: the reports do not say which use they
        mean. TypeError for an id that is no string. ValueError, with nothing changed, where reports on
        an earlier use are missing, or no output has carried them yet.
        """
        instance(request_id, str, "request_id")
        state = self._state
        left = state.remaining_recving.get(request_id)
        if left is not None:
            raise ValueError(
                f"request {request_id!r} is being received, and {left} reports are missing: expected "
                "finished_recving of an earlier use first"
            )
        if state.pending is not None and request_id in state.pending.recving:
            raise ValueError(
                f"request {request_id!r} was received, and no output has said so yet: expected "
                "another call of aggregate first"
            )
        self._state = replace(state, failed_recving=state.failed_recving - {request_id})

    def register_rule(self, name: str, rule: Rule) -> None:
        """Says how to merge an attribute of an engine's own reports that `KVConnectorOutput` lacks.

        rule: called as `rule(merged, reported)` with what the workers before have reported and what the
        next one has, both copies; returns the two merged. The first report is taken as it is, and None
        is no report. What a rule raises, `aggregate` raises, with nothing changed.

        ValueError for a name that has a rule already, be it registered or that of a known attribute;
        TypeError for a name that is no string or a rule that cannot be called.

        >>> from types import SimpleNamespace as Some
        >>> aggregator = KVOutputAggregator(2)
        >>> aggregator.register_rule("loaded", set.union)
        >>> workers = [Some(kv_connector_output=Some(loaded={layer})) for layer in (3, 5)]
        >>> aggregator.aggregate(workers).kv_connector_output.loaded
        {3, 5}
        """
        if not isinstance(name, str):
            raise TypeError(f"name is {shown(name)}: expected that of an attribute")
        if not callable(rule):
            raise TypeError(f"rule is {shown(rule)}: expected a function of two values")
        if name in _KNOWN or name in self._rules:
            kind = "built in" if name in _KNOWN else repr(self._rules[name])
            raise ValueError(f"name is {name!r}, which has a rule ({kind}): expected one without")
        self._rules[name] = rule

    def aggregate(self, outputs: Sequence[object], output_rank: int = 0) -> object | None:
        """Returns the output of `output_rank` with the merged report as its `kv_connector_output`.

        outputs: one per worker, each with an attribute `kv_connector_output`: a report as
        `KVConnectorOutput`, or None.

        - A request is in `finished_sending` (`finished_recving`) of the call in which its last report
          came. An id counts once per report. Reports are counted, not workers: if a worker names a
          request again in a later call, that counts again.
        - A request is in `failed_recving` of the call in which it is in `finished_recving`, if any
          worker has named it there by then. One named later counts for the next use of the id, unless
          `begin_receiving` is called.
        - Reports are merged in the order of workers. A worker's `expected_finished_count` holds from its
          own report on, for requests that are new.
        - Statistics are added up by type: `kv_connector_stats` is their sum, or `{type: sum}` where
          there are several types. `kv_connector_worker_meta` is the sum of all.
        - Events are kept by worker. A worker whose `kv_cache_events` is None is not counted among the
          workers of the events. One with an empty list is, so then no event is common to all.
        - Invalid block ids are united.
        - Other attributes are merged by their rule (`register_rule`).

        The merged report is of the class of the first report (where no worker reports anything, of
        the last one seen; at first `KVConnectorOutput`). A field that no worker reported has the
        class's default, if it is a dataclass, else None: so `invalid_block_ids` is an empty set
        where the engine's class has that by default. Empty statistics become None, and events that
        are false: lists and `KVCacheEvents` without an event, while an engine's own events without
        one stay, unless they say otherwise (`__bool__`). The workers' reports are not changed,
        except in the output that is returned.

        Returns None where the output of `output_rank` is None or false. The merged report is then kept,
        and goes out with the next output that is not.

        ValueError, with nothing changed, where another worker's output is missing (None), `output_rank`
        is not a worker, or a report is invalid: events of different types, statistics that cannot be
        added, a negative count, a string, mapping or number in place of a set of ids, or an attribute
        without a rule that says something.
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
            merged.add_others(report, worker, self._rules)
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
        # One after the other without a call between: no interrupt comes between them.
        output.kv_connector_output, self._state = report, state
        return output


@dataclass(frozen=True)
class _State:
    """What an aggregator knows. Each call makes a new one, and puts it in place when all is done."""

    expected: int
    remaining_sending: dict[str, int] = field(default_factory=dict)
    remaining_recving: dict[str, int] = field(default_factory=dict)
    failed_recving: set[str] = field(default_factory=set)  # reported as failed, not finished yet
    pending: _Merged | None = None  # merged reports that no output has carried yet
    # A report that says nothing, of the engine's class.
    empty: object = field(default_factory=KVConnectorOutput)


@dataclass
class _Merged:
    """The reports merged so far."""

    sending: set[str] = field(default_factory=set)
    recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    stats: dict[type, object] = field(default_factory=dict)
    worker_meta: object | None = None
    events: dict[int, object] = field(default_factory=dict)  # by worker
    others: dict[str, object] = field(default_factory=dict)  # by attribute

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

    def add_others(self, report: object, worker: int, rules: Mapping[str, Rule]) -> None:
        """Adds the attributes that `KVConnectorOutput` lacks, by their rules."""
        for name in _attributes(report):
            value = getattr(report, name, None)
            if name in _KNOWN or value is None:
                continue
            if name in rules:
                value = copy.deepcopy(value)  # what is merged may keep references into it
                first = name not in self.others
                self.others[name] = value if first else rules[name](self.others[name], value)
            elif not _says_nothing(report, name):
                raise ValueError(
                    f"{name} of worker {worker} is {value!r}: expected an attribute of "
                    "KVConnectorOutput, or a rule to merge it, given to register_rule"
                )

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

    def report(self, empty: object, failed: set[str], expected: int) -> object:
        """All of it as a report of the class of `empty`, with its values where nothing was reported."""
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
        values = {name: value for name, value in values.items() if value} | self.others
        report = _emptied(empty)
        for name in (*_KNOWN, *self.others):
            if name in values or not hasattr(report, name):
                # A class may lack what the aggregator knows anyway, and what no worker reported.
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
    """(worker, report) of the workers that report anything."""
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
                f"the output of worker {worker} is {shown(output)}: expected one with "
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
            f"{name} of worker {worker} is {shown(ids)}: expected a set of ids, each of which hashes"
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


def _remaining(before: dict[str, int], changed: dict[str, int]) -> dict[str, int]:
    return {req_id: left for req_id, left in (before | changed).items() if left}


def _check_addable(value: object, name: str, worker: int) -> None:
    if not callable(getattr(value, "aggregate", None)):
        raise ValueError(
            f"{name} of worker {worker} is {value!r}: expected an object with aggregate"
        )


def _sum(total: object | None, value: object) -> object:
    value = copy.deepcopy(value)  # the sum may keep references into it
    if total is None:
        return value
    added = total.aggregate(value)
    return total if added is None else added


def _is_empty(stats: object) -> bool:
    is_empty = getattr(stats, "is_empty", None)
    return bool(is_empty()) if callable(is_empty) else False


def _attributes(report: object) -> list[str]:
    """The public attributes of a report: a dataclass's fields, else the instance's own and slots."""
    if dataclasses.is_dataclass(report):
        return [each.name for each in dataclasses.fields(report) if not each.name.startswith("_")]
    names = dict.fromkeys((*getattr(report, "__dict__", ()), *getattr(report, "_fields", ())))
    names |= {name: None for name in _KNOWN if hasattr(report, name)}  # a property, say
    for kind in type(report).__mro__:
        slots = vars(kind).get("__slots__", ())
        names |= dict.fromkeys([slots] if isinstance(slots, str) else slots)
    return [name for name in names if not name.startswith("_")]


def _default(report: object, name: str) -> object:
    """A new default value of an attribute of the report's class; None where it has none."""
    if dataclasses.is_dataclass(report):
        for each in dataclasses.fields(report):
            if each.name == name and each.default is not dataclasses.MISSING:
                return each.default
            if each.name == name and each.default_factory is not dataclasses.MISSING:
                return each.default_factory()
    return None


def _says_nothing(report: object, name: str) -> bool:
    """Whether an attribute is an empty container or what the report's class has by default."""
    value = getattr(report, name)
    if hasattr(value, "__len__"):
        return len(value) == 0
    default = _default(report, name)
    return value is default or (type(value) is type(default) and bool(value == default))


def _emptied(report: object) -> object:
    """A copy of a report in which every attribute has its default, or is None without one."""
    emptied = copy.copy(report)
    for name in _attributes(report):
        _assign(emptied, name, _default(report, name))
    return emptied


def _assign(report: object, name: str, value: object, *, optional: bool = False) -> None:
    """Sets an attribute, of a frozen dataclass too. ValueError where that is impossible, unless
    `optional`."""
    try:
        try:
            setattr(report, name, value)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(report, name, value)
    except (AttributeError, TypeError) as error:
        if not optional:
            raise ValueError(
                f"a report is a {type(report).__name__}, whose {name} cannot be set: expected one of a "
                "class with that attribute"
            ) from error
