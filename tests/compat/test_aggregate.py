# SPDX-License-Identifier: Apache-2.0
"""Merges the reports of all workers, for known examples and for random steps that are compared with
a reference model.
"""

import copy
import random
import re
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache.compat import KVCacheEvents, KVConnectorOutput, KVOutputAggregator, yield_req_data
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcache.specs import GroupSpec
from tests.machinery.shared import sampled


class Output(SimpleNamespace):
    """The output class of an engine."""


class EmptyOutput(Output):
    def __bool__(self):
        return False


class Stats:
    def __init__(self, **counts):
        self.counts = +Counter(counts)

    def aggregate(self, other):
        self.counts += other.counts
        return self

    def is_empty(self):
        return not self.counts

    def __eq__(self, other):
        return type(self) is type(other) and self.counts == other.counts


class OtherStats(Stats):
    """Statistics whose `aggregate` modifies them in place and returns None."""

    def aggregate(self, other):
        self.counts += other.counts


def output(**report):
    return Output(kv_connector_output=KVConnectorOutput(**report))


def sending(*req_ids, **report):
    return output(finished_sending=set(req_ids), **report)


def recving(*req_ids, **report):
    return output(finished_recving=set(req_ids), **report)


NOTHING = KVConnectorOutput()


def merged_field(name, own):
    """Let each worker report one value of a field, and return the merged value."""
    outputs = [output(**{name: value}) for value in own]
    report = KVOutputAggregator(len(own)).aggregate(outputs).kv_connector_output
    return getattr(report, name)


def state(aggregator):
    return (
        aggregator.expected_finished_count,
        aggregator.remaining_sending,
        aggregator.remaining_recving,
        aggregator.remaining_failed_recving,
        copy.deepcopy(aggregator._state.pending),
        type(aggregator._state.empty),
    )


def test_request_finishes_after_every_worker_reported_it():
    aggregator = KVOutputAggregator(3)
    first = aggregator.aggregate([sending("a", "b"), sending("a"), output()])
    assert first.kv_connector_output.finished_sending is None
    assert aggregator.remaining_sending == {"a": 1, "b": 2}
    second = aggregator.aggregate([output(), sending("b"), sending("a", "b")])
    assert second.kv_connector_output.finished_sending == {"a", "b"}
    assert aggregator.remaining_sending == {}


def test_id_counts_once_per_report():
    aggregator = KVOutputAggregator(2)
    twice = output(finished_sending=iter(["a", "a"]), finished_recving=("b", "b"))
    report = aggregator.aggregate([twice, output()]).kv_connector_output
    assert report.finished_sending is None and report.finished_recving is None
    assert (aggregator.remaining_sending, aggregator.remaining_recving) == ({"a": 1}, {"b": 1})
    report = aggregator.aggregate([sending("a"), output()]).kv_connector_output
    assert report.finished_sending == {"a"}


@pytest.mark.parametrize("name", ["finished_sending", "finished_recving", "invalid_block_ids"])
@pytest.mark.parametrize("ids", ["ab", b"ab", bytearray(b"a"), {"a": 1}, 5, 0, [["a"]], [{"a"}]])
def test_invalid_ids_are_reported_with_their_worker(name, ids):
    aggregator = KVOutputAggregator(2)
    message = re.escape(f"{name} of worker 1 is {ids!r}: expected a set of ids")
    with pytest.raises(ValueError, match=message):
        aggregator.aggregate([sending("a"), output(**{name: ids})])
    assert aggregator.remaining_sending == {}


@pytest.mark.parametrize("name", ["finished_sending", "failed_recving", "invalid_block_ids"])
def test_a_report_with_too_many_ids_is_refused_before_they_are_read(name):
    aggregator = KVOutputAggregator(2)
    message = f"{name} of worker 1 has 1000000000000 ids: expected at most 4194304"
    with pytest.raises(ValueError, match=message):
        aggregator.aggregate([sending("a"), output(**{name: range(10**12)})])
    assert aggregator.remaining_sending == {}


def test_output_of_output_rank_keeps_other_fields():
    outputs = [sending("a"), Output(kv_connector_output=NOTHING, sampled=[1, 2]), sending("a")]
    merged = KVOutputAggregator(2).aggregate(outputs, output_rank=1)
    assert merged is outputs[1] and merged.sampled == [1, 2]
    assert merged.kv_connector_output.finished_sending == {"a"}


def test_empty_reports_become_none():
    for reports in ([None, None], [NOTHING, None], [KVConnectorOutput(set(), set())] * 2):
        outputs = [Output(kv_connector_output=report) for report in reports]
        merged = KVOutputAggregator(2).aggregate(outputs)
        assert merged.kv_connector_output == KVConnectorOutput(expected_finished_count=2)


@pytest.mark.parametrize(("count", "expected"), [(3, 3), (0, 8), (None, 8)])
def test_expected_count_comes_from_the_connector_or_the_world_size(count, expected):
    connector = SimpleNamespace(get_finished_count=lambda: count)
    assert KVOutputAggregator.from_connector(connector, 8).expected_finished_count == expected


def test_changed_count_applies_to_requests_reported_afterwards_in_worker_order():
    aggregator = KVOutputAggregator(3)
    aggregator.aggregate([sending("old"), output(), output()])
    # Worker 0 reports "early" before worker 1 changes the count. Worker 1 reports "late" together
    # with the change, which therefore applies to "late" only.
    outputs = [
        sending("early"),
        sending("late", expected_finished_count=2),
        sending("early", "old"),
    ]
    report = aggregator.aggregate(outputs).kv_connector_output
    assert report.finished_sending is None
    assert report.expected_finished_count == aggregator.expected_finished_count == 2
    assert aggregator.remaining_sending == {"old": 1, "early": 1, "late": 1}
    report = aggregator.aggregate([output(), output(), sending("late")]).kv_connector_output
    assert report.finished_sending == {"late"}


class MultiStats:
    """Statistics keyed by connector. `aggregate` adds the entries of connectors that it has not
    seen yet without copying them.
    """

    def __init__(self, **data):
        self.data = data

    def aggregate(self, other):
        for name, stats in other.data.items():
            if name in self.data:
                self.data[name].aggregate(stats)
            else:
                self.data[name] = stats
        return self

    def __eq__(self, other):
        return self.data == other.data


def nested_stats():
    return [MultiStats(a=Stats(n=1)), MultiStats(b=Stats(n=2)), MultiStats(b=Stats(n=3))]


def test_retry_counts_nested_statistics_once():
    aggregator, own = KVOutputAggregator(4), nested_stats()
    outputs = [output(kv_connector_stats=stats) for stats in own]
    with pytest.raises(ValueError, match="kv_cache_events of worker 3"):
        aggregator.aggregate([*outputs, output(kv_cache_events="stored")])
    merged = aggregator.aggregate([*outputs, output()]).kv_connector_output.kv_connector_stats
    assert merged == MultiStats(a=Stats(n=1), b=Stats(n=5))


def test_pending_statistics_and_events_do_not_alias_workers():
    aggregator, own = KVOutputAggregator(4), nested_stats()
    events = KVCacheEvents(["a"])
    outputs = [output(kv_connector_stats=stats) for stats in own]
    outputs[0].kv_connector_output.kv_cache_events = events
    aggregator.aggregate([None, *outputs])
    events.clear_events()
    for stats in own:
        for part in stats.data.values():
            part.counts.clear()
    merged = aggregator.aggregate([output()] * 4).kv_connector_output
    assert merged.kv_connector_stats == MultiStats(a=Stats(n=1), b=Stats(n=5))
    assert merged.kv_cache_events.get_all_events() == ["a"]


def test_empty_statistics_become_none():
    assert merged_field("kv_connector_stats", [Stats()]) is None


def stored(first, group=0):
    hashes = np.arange(first, first + 32, dtype=np.uint8).reshape(1, 32)
    return BlockStored(hashes, bytes(32), np.arange(16, dtype=np.int32), 16, group)


def removed(first):
    return BlockRemoved(np.full((1, 32), first, np.uint8), 0)


def test_cache_events_of_all_workers_are_combined_and_counted():
    """Equal events are distinct objects, because each worker sends its events through a separate
    pipe.
    """
    own = [
        [stored(1), stored(2), removed(1), AllBlocksCleared()],
        KVCacheEvents([stored(2), removed(1), stored(3)]),
        [stored(3), removed(1), stored(2), stored(2, group=1)],
    ]
    events = merged_field("kv_cache_events", own)
    assert events.get_number_of_workers() == 3
    assert len(events.get_all_events()) == 11
    assert events.get_common_events() == [own[0][1], own[0][2]]
    assert own[1].get_number_of_workers() == 1 and len(own[1].get_all_events()) == 3


def test_events_are_common_once_all_workers_reported_them():
    events = KVCacheEvents(["stored", "removed", "stored"])
    assert events.get_common_events() == ["stored", "removed", "stored"]
    events.merge(KVCacheEvents(["stored", "removed", "removed"]))
    assert events.get_common_events() == ["stored", "removed"]
    events.increment_workers()
    events.add_events(["stored"])
    assert events.get_common_events() == ["stored"]
    assert events.get_number_of_workers() == 3
    events.clear_events()
    assert events.get_all_events() == [] and events.get_number_of_workers() == 3
    assert repr(events) == "<KVCacheEvents workers=3, events=0>"
    with pytest.raises(ValueError, match="count is 0: expected 1 to 4096"):
        events.increment_workers(0)


class CountedEvents:
    """Events as represented in serving engines: a counter of events and the number of workers."""

    def __init__(self, *events):
        self.counter, self.workers = Counter(events), 1

    def add_events(self, events):
        self.counter.update(events)

    def get_all_events(self):
        return list(self.counter.elements())

    def increment_workers(self, count=1):
        self.workers += count

    def get_number_of_workers(self):
        return self.workers


@pytest.mark.parametrize("workers", [(2, 1, 3), (1, 3, 1), (1, 1, 2)])
def test_engine_events_may_cover_several_workers(workers):
    own = [CountedEvents("a"), CountedEvents("a", "b"), CountedEvents()]
    for events, count in zip(own, workers, strict=True):
        events.workers = count
    events = merged_field("kv_cache_events", own)
    assert events.get_number_of_workers() == sum(workers)
    assert events.counter == {"a": 2, "b": 1}
    assert tuple(events.workers for events in own) == workers


@dataclass
class EngineReport:
    """A report as in current engine versions: sets are empty by default, and there is one more
    attribute.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: object | None = None
    kv_cache_events: object | None = None
    kv_connector_worker_meta: object | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    expected_finished_count: int = 0
    loaded: dict[str, int] = field(default_factory=dict)

    def is_empty(self):
        return not (self.finished_sending or self.finished_recving or self.invalid_block_ids)


def engine(**report):
    return Output(kv_connector_output=EngineReport(**report))


def test_merged_report_has_engine_class_and_defaults():
    aggregator = KVOutputAggregator(2)
    none = [Output(kv_connector_output=None)] * 2
    assert type(aggregator.aggregate(none).kv_connector_output) is KVConnectorOutput
    merged = aggregator.aggregate([engine(), engine()]).kv_connector_output
    assert merged == EngineReport(expected_finished_count=2) and merged.is_empty()
    # As in the engine's aggregator, empty sets of finished ids become None, but empty sets of
    # invalid blocks and failures remain sets.
    assert merged.finished_sending is None and merged.finished_recving is None
    assert merged.invalid_block_ids == set() and merged.failed_recving == set()
    merged.invalid_block_ids.add(3)
    merged = aggregator.aggregate([engine(), engine()]).kv_connector_output
    assert merged.invalid_block_ids == set(), "a default was shared"
    none = [Output(kv_connector_output=None) for _ in range(2)]
    assert type(aggregator.aggregate(none).kv_connector_output) is EngineReport
    again = KVOutputAggregator(1).aggregate([Output(kv_connector_output=merged)])
    assert again.kv_connector_output.invalid_block_ids == set(), (
        "a merged report cannot be merged again"
    )


def test_failed_request_is_reported_after_all_workers_finish():
    aggregator = KVOutputAggregator(2)
    outputs = [engine(finished_recving={"a"}, failed_recving={"a"}), engine(finished_recving={"b"})]
    merged = aggregator.aggregate(outputs).kv_connector_output
    assert merged.failed_recving == set() and aggregator.remaining_failed_recving == {"a"}
    outputs = [engine(finished_recving={"b"}), engine(finished_recving={"a"})]
    merged = aggregator.aggregate(outputs).kv_connector_output
    assert merged.finished_recving == {"a", "b"} and merged.failed_recving == {"a"}
    assert aggregator.remaining_failed_recving == set()
    held = [None, engine(finished_recving={"c"}, failed_recving={"c"})]
    aggregator = KVOutputAggregator(1)
    assert aggregator.aggregate(held) is None
    merged = aggregator.aggregate([output(), output()]).kv_connector_output
    assert merged.finished_recving == merged.failed_recving == {"c"}


class WorkerMeta:
    def __init__(self, *tags):
        self.tags = set(tags)

    def aggregate(self, other):
        return WorkerMeta(*self.tags, *other.tags)


def test_metadata_of_all_workers_is_combined():
    own = [WorkerMeta("a"), None, WorkerMeta("b")]
    outputs = [engine(kv_connector_worker_meta=meta) for meta in own]
    merged = KVOutputAggregator(3).aggregate(outputs).kv_connector_output
    assert merged.kv_connector_worker_meta.tags == {"a", "b"} and own[0].tags == {"a"}
    merged = KVOutputAggregator(1).aggregate([engine()]).kv_connector_output
    assert merged.kv_connector_worker_meta is None


def test_unknown_nonempty_attribute_raises():
    aggregator = KVOutputAggregator(2)
    before = state(aggregator)
    message = re.escape(
        "loaded of worker 1 is {'a': 1}: expected an attribute of KVConnectorOutput"
    )
    with pytest.raises(ValueError, match=message):
        aggregator.aggregate([engine(finished_sending={"a"}), engine(loaded={"a": 1})])
    assert state(aggregator) == before
    plain = [Output(kv_connector_output=SimpleNamespace(a=None, b=())) for _ in range(2)]
    assert aggregator.aggregate(plain).kv_connector_output.b is None
    count = Output(kv_connector_output=SimpleNamespace(retries=0))
    with pytest.raises(ValueError, match="retries of worker 0 is 0: expected an attribute of"):
        aggregator.aggregate([count])


@dataclass(frozen=True)
class FrozenReport:
    finished_sending: frozenset = frozenset()
    expected_finished_count: int = 0


@dataclass(slots=True)
class OldReport:
    """A report class from an earlier engine version, with fewer attributes."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None


@pytest.mark.parametrize("kind", [FrozenReport, OldReport])
def test_reports_may_be_of_any_class_whose_attributes_can_be_set(kind):
    aggregator = KVOutputAggregator(2)
    outputs = [Output(kv_connector_output=kind({"a"})), Output(kv_connector_output=kind({"b"}))]
    merged = aggregator.aggregate(outputs).kv_connector_output
    assert type(merged) is kind and not merged.finished_sending
    outputs = [Output(kv_connector_output=kind(set())), Output(kv_connector_output=kind({"a"}))]
    merged = aggregator.aggregate(outputs).kv_connector_output
    assert type(merged) is kind and merged.finished_sending == {"a"}


def test_report_lacking_merged_fields_raises():
    aggregator = KVOutputAggregator(1)
    before = state(aggregator)
    old, new = Output(kv_connector_output=OldReport()), output(invalid_block_ids={1})
    with pytest.raises(ValueError, match="is a OldReport, whose invalid_block_ids cannot be set"):
        aggregator.aggregate([old, new])
    row = namedtuple("Row", "finished_sending")({"a"})
    with pytest.raises(ValueError, match="is a Row, whose finished_sending cannot be set"):
        aggregator.aggregate([Output(kv_connector_output=row)])
    assert state(aggregator) == before


def test_engine_events_without_entries_are_kept_if_truthy():
    events = merged_field("kv_cache_events", [CountedEvents() for _ in range(2)])
    assert type(events) is CountedEvents and events.workers == 2 and not events.get_all_events()
    assert not KVCacheEvents() and not KVCacheEvents([]).merge(KVCacheEvents())
    assert KVCacheEvents().merge(KVCacheEvents(["a"]))


@pytest.mark.parametrize("empty", [lambda r: None, lambda r: EmptyOutput(kv_connector_output=r)])
def test_empty_output_of_output_rank_keeps_reports(empty):
    aggregator = KVOutputAggregator(2)
    first = [
        empty(NOTHING),
        sending("a", "b", invalid_block_ids={5}, kv_connector_stats=Stats(bytes=1)),
        sending("a", kv_cache_events=["stored"], expected_finished_count=3),
    ]
    assert aggregator.aggregate(first) is None
    assert aggregator.remaining_sending == {"b": 1}
    last = [
        output(kv_cache_events=["stored"], kv_connector_stats=Stats(bytes=2)),
        output(),
        output(),
    ]
    report = aggregator.aggregate(last).kv_connector_output
    assert report.finished_sending == {"a"} and report.invalid_block_ids == {5}
    # The result is the same as if every worker had made all of its reports in this step.
    assert report.kv_connector_stats == Stats(bytes=3)
    assert report.kv_cache_events.get_common_events() == ["stored"]
    assert report.expected_finished_count == 3
    again = aggregator.aggregate([output(), output(), output()]).kv_connector_output
    assert again == KVConnectorOutput(expected_finished_count=3), "reported twice"


def test_step_without_outputs_is_none():
    aggregator = KVOutputAggregator(2)
    aggregator.aggregate([None, sending("a")])
    before = state(aggregator)
    assert aggregator.aggregate([None, None], output_rank=1) is None
    assert state(aggregator) == before


class FailingStats(Stats):
    def aggregate(self, other):
        raise ValueError("these do not add up")


class Silent:
    pass


BAD = [
    ([sending("a"), None, sending("a")], "the output of worker 1 is missing"),
    ([sending("a"), sending("a"), Silent()], "the output of worker 2 is .*kv_connector_output"),
    *(
        (
            [sending("a"), sending("a"), output(**report)],
            f"{next(iter(report))} of worker 2 is {message}",
        )
        for report, message in (
            ({"finished_recving": "a"}, "'a'"),
            ({"expected_finished_count": -1}, "-1"),
            (
                {"kv_connector_stats": {"bytes": 1}},
                "{'bytes': 1}: expected an object with aggregate",
            ),
            ({"kv_cache_events": "stored"}, "'stored': expected an object with add_events"),
        )
    ),
    (
        [output(kv_cache_events=["a"]), sending("a"), output(kv_cache_events=CountedEvents())],
        "kv_cache_events of worker 2 is a CountedEvents, but that of worker 0 is a KVCacheEvents",
    ),
    ([output(kv_connector_stats=FailingStats(a=1))] * 3, "these do not add up"),
    ([], "outputs is empty"),
]


@pytest.mark.parametrize(("outputs", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_failed_call_changes_nothing(outputs, message):
    aggregator = KVOutputAggregator(3)
    held = output(kv_connector_stats=Stats(a=1), expected_finished_count=4)
    aggregator.aggregate([None, sending("a"), held])
    before = state(aggregator)
    with pytest.raises(ValueError, match=message):
        aggregator.aggregate(outputs)
    assert state(aggregator) == before


def test_output_whose_report_cannot_be_set_changes_nothing():
    aggregator = KVOutputAggregator(1)
    before = state(aggregator)
    frozen = namedtuple("Frozen", "kv_connector_output")(NOTHING)
    with pytest.raises(AttributeError):
        aggregator.aggregate([frozen, sending("a")])
    assert state(aggregator) == before


@pytest.mark.parametrize("rank", [-1, 2])
def test_output_rank_must_be_a_worker(rank):
    aggregator = KVOutputAggregator(2)
    with pytest.raises(ValueError, match=f"output_rank is {rank}: expected 0 to 1"):
        aggregator.aggregate([sending("a"), sending("a")], output_rank=rank)
    assert aggregator.remaining_sending == {}


@pytest.mark.parametrize("count", [0, -3])
def test_expected_count_below_one_is_rejected(count):
    with pytest.raises(ValueError, match=f"expected_finished_count is {count}"):
        KVOutputAggregator(count)


class Model:
    """The reference model: records every report and the pending results that no output has returned
    yet.
    """

    def __init__(self, expected):
        self.expected = expected
        # Maps each id to [number of reports expected, number of reports received].
        self.reports = {"sending": {}, "recving": {}}
        self.carry = {"sending": set(), "recving": set(), "invalid": set()}
        self.stats, self.events, self.failed = {}, {}, set()

    def step(self, reports):
        for worker, report in enumerate(reports):
            if report is None:
                continue
            if report.expected_finished_count:
                self.expected = report.expected_finished_count
            for kind in ("sending", "recving"):
                for req_id in getattr(report, f"finished_{kind}") or ():
                    count = self.reports[kind].setdefault(req_id, [self.expected, 0])
                    count[1] += 1
                    if count[0] == count[1]:
                        del self.reports[kind][req_id]
                        self.carry[kind].add(req_id)
            self.carry["invalid"] |= report.invalid_block_ids or set()
            self.failed |= report.failed_recving or set()
            if report.kv_connector_stats is not None:
                kind = type(report.kv_connector_stats)
                self.stats[kind] = (
                    self.stats.get(kind, Counter()) + report.kv_connector_stats.counts
                )
            if report.kv_cache_events is not None:
                self.events.setdefault(worker, []).extend(report.kv_cache_events)

    def remaining(self, kind):
        return {req_id: want - got for req_id, (want, got) in self.reports[kind].items()}

    def check(self, report, kind):
        assert type(report) is kind
        empty = set() if kind is EngineReport else None
        assert report.finished_sending == (self.carry["sending"] or None)
        assert report.finished_recving == (self.carry["recving"] or None)
        assert report.invalid_block_ids == (self.carry["invalid"] or empty)
        assert report.failed_recving == (self.failed & self.carry["recving"] or empty)
        self.failed -= self.carry["recving"]
        assert report.expected_finished_count == self.expected
        stats = report.kv_connector_stats
        stats = {} if stats is None else stats if isinstance(stats, dict) else {type(stats): stats}
        assert {k: s.counts for k, s in stats.items()} == {k: c for k, c in self.stats.items() if c}
        if not any(self.events.values()):
            assert report.kv_cache_events is None
        else:
            by_worker = [self.events[worker] for worker in sorted(self.events)]
            assert report.kv_cache_events.get_all_events() == [*chain(*by_worker)]
            common = Counter(by_worker[0])
            for events in by_worker:
                common &= Counter(events)
            assert Counter(report.kv_cache_events.get_common_events()) == common
        for carried in (*self.carry.values(), self.stats, self.events):
            carried.clear()


def random_report(rng, kind):
    def ids():
        some = {f"r{rng.randrange(12)}" for _ in range(rng.choice([0, 1, 3]))}
        return some or rng.choice([None, set()])

    if rng.random() < 0.1:
        return None
    report = kind(ids(), ids())
    if rng.random() < 0.2:
        report.failed_recving = set(ids() or ())
    if rng.random() < 0.2:
        kind = rng.choice([Stats, OtherStats])
        report.kv_connector_stats = kind(**{rng.choice("ab"): rng.randrange(3)})
    if rng.random() < 0.3:
        report.kv_cache_events = [rng.choice("xyz") for _ in range(rng.randrange(4))]
    if rng.random() < 0.2:
        report.invalid_block_ids = {rng.randrange(50) for _ in range(rng.randrange(3))}
    if rng.random() < 0.05:
        report.expected_finished_count = rng.randint(1, 6)
    return report


def corrupted(outputs, rank, rng):
    """Return the same outputs with one error inserted."""
    bad = copy.deepcopy(outputs)
    others = [worker for worker in range(len(bad)) if worker != rank]
    if others and bad[rank] is not None and rng.random() < 0.5:
        bad[rng.choice(others)] = None
        return bad
    report = KVConnectorOutput(finished_sending={"r0", "bad"}, kv_connector_stats=object())
    bad[rng.randrange(len(bad))] = Output(kv_connector_output=report)
    return bad


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_random_steps_match_the_model(seed):
    """25,000 steps in total, with empty outputs, failing calls and changing counts."""
    rng = random.Random(seed)
    world = rng.randint(1, 7)
    expected = rng.choice([world, rng.randint(1, 9)])
    aggregator, model = KVOutputAggregator(expected), Model(expected)
    kind = rng.choice([KVConnectorOutput, EngineReport])
    seen = KVConnectorOutput
    for _ in range(1250):
        rank = rng.randrange(world)
        reports = [random_report(rng, kind) for _ in range(world)]
        outputs = [Output(kv_connector_output=copy.deepcopy(report)) for report in reports]
        form = rng.random()
        if form < 0.15:
            outputs[rank] = reports[rank] = None
        elif form < 0.3:
            outputs[rank] = EmptyOutput(**vars(outputs[rank]))
        if rng.random() < 0.05:
            before = state(aggregator)
            with pytest.raises(ValueError):
                aggregator.aggregate(corrupted(outputs, rank, rng), rank)
            assert repr(state(aggregator)[:4]) == repr(before[:4]), f"seed {seed}"
        merged = aggregator.aggregate(outputs, rank)
        model.step(reports)
        seen = kind if any(report is not None for report in reports) else seen
        assert merged is (outputs[rank] if form >= 0.3 else None)
        if merged is not None:
            model.check(merged.kv_connector_output, seen)
        assert aggregator.remaining_sending == model.remaining("sending"), f"seed {seed}"
        assert aggregator.remaining_recving == model.remaining("recving"), f"seed {seed}"
        for own, given in zip(outputs, reports, strict=True):
            if own is not merged and own is not None:
                assert own.kv_connector_output == given, "a worker's own report was changed"


# Iterating over the requests of a scheduler step.


def step_of(new, req_ids, new_block_ids, resumed):
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=b) for r, b in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=req_ids, new_block_ids=new_block_ids, resumed_req_ids=resumed
        ),
    )


def test_new_requests_precede_cached_ones():
    step = step_of(
        [("n1", ([1, 2], [3])), ("n2", ([4], []))],
        ["c1", "c2", "c3"],
        [([5], [6]), None, ([7, 8], [])],
        {"c3", "n1"},
    )
    assert list(yield_req_data(step)) == [
        ("n1", ([1, 2], [3]), False),
        ("n2", ([4], []), False),
        ("c1", ([5], [6]), False),
        ("c2", None, False),
        ("c3", ([7, 8], []), True),
    ]
    assert list(yield_req_data(step_of([], [], [], set()))) == []


def test_unequal_lengths_raise_before_yielding():
    step = step_of([("n1", ([1],))], ["c1", "c2"], [([5],)], set())
    with pytest.raises(ValueError, match="2 entries, but new_block_ids has 1: expected equal"):
        yield_req_data(step)


def test_untransferred_groups_give_connectors_no_blocks():
    groups = [
        GroupSpec("full_attention", 16),
        GroupSpec("full_attention", 16, transferred=False),
        GroupSpec("recurrent", 16),
    ]
    step = step_of([("a", ([1, 2], [3], [4]))], ["b", "c"], [([5], [6], [7]), None], {"c"})
    assert list(yield_req_data(step, groups)) == [
        ("a", ([1, 2], [], [4]), False),
        ("b", ([5], [], [7]), False),
        ("c", None, True),
    ]
    assert list(yield_req_data(step, groups[:1] * 3)) == list(yield_req_data(step))
    with pytest.raises(
        ValueError, match="has block ids of 3 groups: expected 2, one per entry of groups"
    ):
        list(yield_req_data(step, groups[:2]))
