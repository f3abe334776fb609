# SPDX-License-Identifier: Apache-2.0
"""Hints one by one: receipts, limits, precedence of requests, and invalid arguments."""

import numpy as np
import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport
from kvcache.allocator import check_invariants
from kvcache.sources import LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache_exchange.hints import Hint, HintExecutor, Receipt, limits
from kvcache_serve.engine import Scheduler, Sequence, State


@pytest.fixture
def whole_pool(monkeypatch):
    """Let hints use the whole pool."""
    monkeypatch.setattr(limits, "SHARE", 1.0)


class Slow:
    """A source that has every prompt's tokens, and whose loads end only when `ends` is set."""

    name, is_busy, num_quarantined_blocks, num_loading_requests = "slow", False, 0, 0

    def __init__(self, manager):
        self.manager, self.stats, self.ends, self.matches = manager, LoadStats(), False, 0
        self.loads = SourceLoads(manager, self.stats)

    def match(self, request):
        self.matches += 1
        first = self.manager.cache.cached_tokens(request).with_host
        stop = (request.num_tokens - 1) // 16 * 16
        if stop <= first or request in self.loads:
            return 0
        self.loads.match(request, first, stop)
        return stop - first

    def begin(self, request):
        self.loads.begin(self.loads.admitted(request))

    def poll(self):
        return [self.loads.finish(each) for each in self.loads.under_way if self.ends]

    def cancel(self, request):
        self.loads.forget(request.request_id)
        if request in self.loads:
            self.loads.finish(self.loads[request.request_id], 0, "canceled")
        self.loads.free(request)

    def save(self, report): ...

    def close(self): ...


class Engine:
    """A scheduler with a clock, without a model."""

    def __init__(self, num_blocks=17, sources=(), num_reqs=4, **options):
        self.manager = KVCacheManager(
            16, num_blocks, 512, num_preallocate_tokens=0, max_num_reqs=num_reqs, **options
        )
        self.sources = [each(self.manager) for each in sources]
        self.now = 0.0
        self.scheduler = Scheduler(self.manager, max_num_batched_tokens=512, sources=self.sources)
        self.hints = self.scheduler.hints = HintExecutor(
            self.manager, sources=self.sources, clock=lambda: self.now
        )

    def step(self):
        step = self.scheduler.schedule()
        if step is not None:
            self.scheduler.begin_loads(step)
            self.scheduler.complete(step)
            for sequence, count in zip(step.sequences, step.num_logits.tolist()):
                if count:
                    self.scheduler.finish(sequence)
        check_invariants(self.manager)

    def serve(self, tokens):
        sequence = Sequence(Request(f"r{id(tokens)}", tokens))
        self.scheduler.add(sequence)
        while sequence.state is not State.FINISHED:
            self.step()

    def leave_on_host(self, tokens):
        """Keep the host's copies of a prefix only."""
        request = Request("leaving", [*tokens[: len(tokens) // 16 * 16], 0], write_cache=False)
        plan = self.manager.step(new=[Admit(request, 1)])
        self.manager.report(StepReport(plan.step_id, True))
        plan = self.manager.step(swap_out=[self.manager.row(request)])
        self.manager.report(StepReport(plan.step_id, True))
        self.manager.free(request)
        found = self.manager.cache.find(self.manager.cache.hashes(request))
        self.manager.cache.evict(found.device[found.device > 0])

    def hint(self, tokens, most_steps=9, **hint):
        pending = self.hints.submit(Request("of", tokens), Hint(**hint))
        for _ in range(most_steps):
            if pending.receipt is not None:
                break
            self.step()
        return pending.receipt

    def on_device(self, tokens):
        return self.manager.cache.cached_tokens(Request("q", [*tokens, 0])).on_device


def outcome(receipt):
    return receipt.status, receipt.num_tokens, receipt.reason


def test_pin_ends_at_its_deadline_or_with_the_next_pin_of_its_session():
    engine = Engine()
    engine.serve(range(64))
    receipt = engine.hint(range(64), intent="pin", ttl_s=5)
    assert receipt == Receipt(
        intent="pin", status="done", num_tokens=64, num_asked_tokens=64, ttl_s=5
    )
    assert engine.manager.pool.num_pinned == 4
    engine.now = 4.9
    engine.step()
    assert engine.manager.pool.num_pinned == 4
    engine.now = 5.0
    engine.step()
    assert engine.manager.pool.num_pinned == 0
    assert engine.hint(range(32), intent="pin", session="s").num_tokens == 32
    receipt = engine.hint(range(64), intent="pin", session="s", ttl_s=1000)
    assert outcome(receipt) == ("partly", 64, "a pin lasts at most 600 seconds")
    assert receipt.ttl_s == 600 and engine.hints.num_pinned_blocks == 4


def test_pins_share_a_limit_that_no_client_exceeds():
    engine = Engine()  # pins may use 4 of 16 blocks
    engine.serve(range(96))
    receipt = engine.hint(range(96), intent="pin")
    assert outcome(receipt) == ("partly", 64, "pins may use at most 4 blocks")
    for i in range(20):
        engine.serve(range(100 + i, 132 + i))
        receipt = engine.hint(range(100 + i, 132 + i), intent="pin", session=str(i))
        assert outcome(receipt) == ("refused", 0, "pins may use at most 4 blocks")
    assert engine.manager.pool.num_pinned == 4
    assert engine.hint(range(96), intent="pin", ttl_s=1).num_tokens == 64  # replaces the first one
    engine.now = 1.0
    assert engine.hint(range(119, 151), intent="pin").status == "done"


def test_a_share_limits_what_clients_prefetch():
    engine = Engine(num_host_blocks=60)
    for i in (0, 100, 200):
        engine.serve(range(i, i + 96))
        engine.leave_on_host(range(i, i + 96))
    receipt = engine.hint(range(96), intent="prefetch")
    assert outcome(receipt) == ("partly", 64, "prefetches may use at most 4 blocks")
    receipt = engine.hint(range(100, 196), intent="prefetch")
    assert outcome(receipt) == ("refused", 0, "prefetches may use at most 4 blocks")
    engine.serve([*range(64), 7])  # hits the prefetched blocks, which then no longer count
    assert engine.hints.stats.used_tokens == 64
    assert engine.hint(range(100, 196), intent="prefetch").num_tokens == 64
    engine.now = 61.0
    assert engine.hint(range(200, 296), intent="prefetch").num_tokens == 64
    assert engine.hints.stats.unused_tokens == 64


def test_evicted_prefetched_tokens_are_not_counted_as_used():
    engine = Engine(num_host_blocks=60)
    engine.serve(range(64))
    engine.leave_on_host(range(64))
    engine.hint(range(64), intent="prefetch")
    found = engine.manager.cache.find(engine.manager.cache.hashes(Request("q", range(64))))
    engine.manager.cache.evict(found.device[2:])
    engine.serve([*range(64), 7])
    stats = engine.hints.stats
    assert (stats.prefetched_tokens, stats.used_tokens, stats.unused_tokens) == (64, 32, 32)


@pytest.mark.parametrize(
    ("options", "hint", "reason"),
    [
        ({}, {"intent": "prefetch"}, "there is neither a host tier nor a source"),
        ({}, {"intent": "pin"}, "no block of the prefix is on the device"),
        ({}, {"intent": "pin", "num_tokens": 65}, "num_tokens is 65: expected at most 64"),
        ({}, {"intent": "pin", "num_tokens": 15}, "the tokens fill no whole block"),
        ({"enable_caching": False}, {"intent": "pin"}, "the manager caches no blocks"),
        ({"num_host_blocks": 9}, {"intent": "prefetch"}, "no tier and no source has more"),
    ],
)
def test_hints_that_cannot_be_carried_out_are_refused(options, hint, reason):
    engine = Engine(**options)
    receipt = engine.hint(range(64), **hint)
    assert (receipt.status, receipt.num_tokens) == ("refused", 0)
    assert receipt.reason.startswith(reason)
    assert engine.hints.num_pending == 0


def test_prefetches_are_refused_without_steps():
    groups = [
        GroupSpec("full_attention", 16),
        GroupSpec("recurrent", 16, options={"num_speculative_blocks": 1}),
    ]
    options = {"num_host_blocks": 9, "engine_copies_states": True}
    manager = KVCacheManager.for_groups(groups, 20, 128, **options)
    hint = Hint(intent="prefetch")
    receipt = HintExecutor(manager).submit(Request("of", range(64)), hint).receipt
    assert receipt.reason == "the manager serves no steps"


@pytest.mark.usefixtures("whole_pool")
def test_loads_give_way_to_requests_that_need_their_blocks():
    engine = Engine(sources=[Slow])
    pending = engine.hints.submit(Request("of", range(161)), Hint(intent="prefetch"))
    engine.step()
    assert engine.manager.pool.num_free == 16 - 10 and pending.receipt is None
    engine.sources[0].match = lambda request: 0
    engine.serve(range(300, 500))  # needs 13 blocks
    assert outcome(pending.receipt) == ("refused", 0, "requests needed the blocks")
    assert engine.manager.pool.num_free == 16


def test_failed_step_frees_the_rows_of_its_hints():
    engine = Engine(num_host_blocks=16)
    engine.serve(range(70))
    engine.leave_on_host(range(64))
    pending = engine.hints.submit(Request("of", range(64)), Hint(intent="prefetch"))
    for _ in range(3):
        step = engine.scheduler.schedule()
        assert engine.hints.num_rows == 1
        engine.scheduler.fail(step)
        assert engine.hints.num_rows == 0
        check_invariants(engine.manager)
    while pending.receipt is None:
        engine.step()
    assert outcome(pending.receipt) == ("done", 64, None)


def test_request_waits_for_the_prefetch_of_its_prefix():
    engine = Engine(sources=[Slow])
    pending = engine.hints.submit(Request("of", range(64)), Hint(intent="prefetch"))
    engine.step()
    sequence = Sequence(Request("r", range(70)))
    engine.scheduler.add(sequence)
    for _ in range(5):
        engine.step()
        assert sequence.state is State.WAITING
    engine.sources[0].ends, source = True, engine.sources[0]
    engine.step()
    assert outcome(pending.receipt) == ("done", 64, None)
    assert sequence.num_cached_tokens == 64 and source.stats.loads == 1


def test_hints_wait_while_a_request_holds_the_only_row_and_then_time_out():
    engine = Engine(num_host_blocks=30, num_reqs=1)
    engine.serve(range(64))
    engine.leave_on_host(range(64))
    engine.scheduler.add(Sequence(Request("a", range(100, 164))))
    step = engine.scheduler.schedule()
    engine.scheduler.complete(step)  # its sequence continues to run and holds the only row
    pending = engine.hints.submit(Request("of", range(64)), Hint(intent="prefetch"))
    for _ in range(3):
        engine.scheduler.accept(step.sequences[0], [5])
        engine.scheduler.complete(engine.scheduler.schedule())
        assert pending.receipt is None
    engine.now = 30.5
    engine.scheduler.accept(step.sequences[0], [5])
    engine.scheduler.complete(engine.scheduler.schedule())
    assert pending.receipt.reason == "neither blocks nor sources were available in time"


@pytest.mark.usefixtures("whole_pool")
def test_queue_of_hints_is_limited(monkeypatch):
    monkeypatch.setattr(limits, "MAX_PENDING", 3)
    monkeypatch.setattr(limits, "MAX_ACTIVE", 2)
    engine = Engine(sources=[Slow])
    pending = [
        engine.hints.submit(Request("of", range(i, i + 33)), Hint(intent="prefetch"))
        for i in range(0, 500, 100)
    ]
    assert [each.receipt is None for each in pending] == [True, True, True, False, False]
    assert pending[3].receipt.reason == "3 hints are waiting: expected fewer than 3"
    engine.step()
    assert engine.hints.num_rows == 2
    engine.hints.close()
    assert {each.receipt.reason for each in pending[:3]} == {"the engine is closing"}
    assert engine.manager.pool.num_free == 16 and engine.hints.num_rows == 0


def test_failing_load_is_reported():
    engine = Engine(sources=[Slow])
    source = engine.sources[0]
    source.poll = lambda: [
        source.loads.finish(each, 16, "the disk is gone") for each in source.loads.under_way
    ]
    assert outcome(engine.hint(range(64), intent="prefetch")) == ("partly", 16, "the disk is gone")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intent": "demote"}, "intent is 'demote': expected one of prefetch, pin"),
        ({"intent": 3}, "intent is 3: expected one of"),
        ({"intent": "pin", "num_tokens": 0}, "num_tokens is 0: expected 1 to"),
        ({"intent": "pin", "num_tokens": True}, "num_tokens is True: expected an integer"),
        ({"intent": "pin", "ttl_s": 0}, "ttl_s is 0: expected seconds, more than 0"),
        ({"intent": "pin", "ttl_s": float("nan")}, "ttl_s is nan: expected seconds, more than 0"),
        ({"intent": "pin", "ttl_s": "5"}, "ttl_s is '5': expected a number"),
        ({"intent": "prefetch", "session": "s"}, "session is 's' with intent 'prefetch'"),
        ({"intent": "pin", "session": b"s"}, "session is b's': expected a string"),
        ({"intent": "pin", "session": np.ones(2)}, "session is array"),
    ],
)
def test_invalid_hints_are_rejected(fields, message):
    with pytest.raises((TypeError, ValueError)) as told:
        Hint(**fields)
    assert str(told.value).startswith(message)


def test_invalid_arguments_of_an_executor_are_rejected():
    manager = KVCacheManager(16, 9, 128)
    hints, request = HintExecutor(manager), Request("r", range(40))
    for call, message in (
        (lambda: HintExecutor(3), "manager"),
        (lambda: HintExecutor(manager, sources=3), "sources is 3"),
        (lambda: HintExecutor(manager, clock=3), "clock is 3"),
        (lambda: hints.submit([1], Hint(intent="pin")), "of"),
        (lambda: hints.submit(request, "pin"), "hint"),
        (lambda: hints.submit(request, Hint(intent="pin"), on_receipt=3), "on_receipt is 3"),
        (lambda: hints.planned([0]), "statuses has 1 entries: expected 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert hints.num_pending == 0


def test_invalid_receipts_are_rejected():
    for fields, message in (
        ({"status": "pending"}, "status is 'pending'"),
        ({"status": "partly"}, "expected a reason unless the hint is done"),
        ({"status": "done", "reason": "x"}, "expected a reason unless the hint is done"),
        ({"status": "refused", "reason": "x", "num_tokens": 3}, "num_tokens is 3 in a refusal"),
    ):
        with pytest.raises(ValueError, match=message):
            Receipt(intent="pin", **fields)
