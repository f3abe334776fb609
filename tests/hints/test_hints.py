# SPDX-License-Identifier: Apache-2.0
"""Hints one by one: receipts, budgets, precedence of requests, and invalid arguments."""

import numpy as np
import pytest

from kvcache import KVCacheManager, Request, StepReport
from kvcache.allocator import check_invariants
from kvcache.engine import Scheduler, Sequence, State
from kvcache.hints import Hint, HintBudget, HintExecutor, Receipt, hints_of_envelope
from kvcache.hints.envelope import MAX_ACTIONS
from kvcache.sources import LoadStats
from kvcache.sources.loads import SourceLoads

ALL = {"prefetch_share": 1.0, "pin_share": 1.0, "retain_share": 1.0}


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

    def __init__(self, num_blocks=17, sources=(), budget=None, num_reqs=4, **options):
        self.manager = KVCacheManager(
            16, num_blocks, 512, num_preallocate_tokens=0, max_num_reqs=num_reqs, **options
        )
        self.sources = [each(self.manager) for each in sources]
        self.now = 0.0
        self.scheduler = Scheduler(self.manager, max_num_batched_tokens=512, sources=self.sources)
        self.hints = self.scheduler.hints = HintExecutor(
            self.manager,
            sources=self.sources,
            budget=HintBudget(**(budget or ALL)),
            clock=lambda: self.now,
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


# Pins ---------------------------------------------------------------------------------------------------


def test_pin_ends_at_its_deadline():
    engine = Engine()
    engine.serve(range(64))
    receipt = engine.hint(range(64), intent="pin", ttl_s=5, action_id="x")
    assert receipt == Receipt(
        intent="pin", action_id="x", status="done", num_tokens=64, num_asked_tokens=64, ttl_s=5
    )
    assert engine.hints.next_deadline == 5 and engine.manager.pool.num_pinned == 4
    engine.now = 4.9
    engine.step()
    assert engine.manager.pool.num_pinned == 4
    engine.now = 5.0
    engine.step()
    assert engine.manager.pool.num_pinned == 0 and engine.hints.next_deadline is None


def test_pins_share_a_budget_that_no_client_exceeds():
    engine = Engine(budget={"pin_share": 0.25})  # 4 of 16 blocks
    engine.serve(range(96))
    receipt = engine.hint(range(96), intent="pin")
    assert outcome(receipt) == ("partly", 64, "pin_share allows 4 blocks")
    for i in range(20):
        engine.serve(range(100 + i, 132 + i))
        receipt = engine.hint(range(100 + i, 132 + i), intent="pin", session=str(i))
        assert outcome(receipt) == ("refused", 0, "pin_share allows 4 blocks")
    assert engine.manager.pool.num_pinned == 4
    assert engine.hint(range(96), intent="pin", ttl_s=1).num_tokens == 64  # replaces the first one
    engine.now = 1.0
    assert engine.hint(range(119, 151), intent="pin").status == "done"


def test_pin_of_a_session_replaces_its_earlier_pin():
    engine = Engine(budget={"pin_share": 0.3})
    engine.serve(range(64))
    assert engine.hint(range(32), intent="pin", session="s").num_tokens == 32
    assert engine.hint(range(64), intent="pin", session="s").num_tokens == 64
    assert engine.manager.pool.num_pinned == engine.hints.num_pinned_blocks == 4


def test_long_pin_is_granted_less_time():
    engine = Engine(budget=ALL | {"max_ttl_s": 100})
    engine.serve(range(64))
    receipt = engine.hint(range(64), intent="pin", ttl_s=1000)
    assert outcome(receipt) == ("partly", 64, "max_ttl_s allows 100 seconds")
    assert receipt.ttl_s == 100


def test_prefetch_does_not_evict_pinned_blocks():
    engine = Engine(num_blocks=9, num_host_blocks=30)
    engine.serve(range(96))
    assert engine.hint(range(96), intent="demote").status == "done"
    engine.serve(range(200, 264))
    assert engine.hint(range(200, 264), intent="pin").status == "done"
    receipt = engine.hint(range(96), intent="prefetch", ttl_s=1, most_steps=3)
    assert receipt is None  # 4 of 8 blocks are not enough
    engine.now = 2.0
    receipt = engine.hint(range(48), intent="prefetch")
    assert receipt.num_tokens == 48 and engine.on_device(range(200, 264)) == 64
    assert engine.hints.stats.receipts["prefetch"] == {"done": 1, "partly": 0, "refused": 1}


# Prefetch, demote, retain -------------------------------------------------------------------------------


def test_budget_limits_what_clients_prefetch():
    engine = Engine(budget={"prefetch_share": 0.25, "prefetch_ttl_s": 60}, num_host_blocks=60)
    for i in (0, 100, 200):
        engine.serve(range(i, i + 96))
        assert engine.hint(range(i, i + 96), intent="demote").status == "done"
    receipt = engine.hint(range(96), intent="prefetch")
    assert outcome(receipt) == ("partly", 64, "prefetch_share allows 4 blocks")
    receipt = engine.hint(range(100, 196), intent="prefetch")
    assert outcome(receipt) == ("refused", 0, "prefetch_share allows 4 blocks")
    engine.serve([*range(64), 7])  # hits the prefetched blocks, which then no longer count
    assert engine.hints.stats.used_tokens == 64
    assert engine.hint(range(100, 196), intent="prefetch").num_tokens == 64
    engine.now = 61.0
    assert engine.hint(range(200, 296), intent="prefetch").num_tokens == 64
    assert engine.hints.stats.unused_tokens == 64


def test_evicted_prefetched_tokens_are_not_counted_as_used():
    engine = Engine(num_host_blocks=60)
    engine.serve(range(64))
    engine.hint(range(64), intent="demote")
    engine.hint(range(64), intent="prefetch")
    found = engine.manager.cache.find(engine.manager.cache.hashes(Request("q", range(64))))
    engine.manager.cache.evict(found.device[2:])
    engine.serve([*range(64), 7])
    stats = engine.hints.stats
    assert (stats.prefetched_tokens, stats.used_tokens, stats.unused_tokens) == (64, 32, 32)


def test_demotion_keeps_blocks_of_requests_and_pins():
    engine = Engine(num_host_blocks=30)
    engine.serve(range(96))
    running = Request("running", range(33))
    plan = engine.manager.step(new=[running])  # holds two blocks
    engine.manager.report(StepReport(plan.step_id, True))
    receipt = engine.hint(range(96), intent="demote")
    assert outcome(receipt) == ("partly", 64, "requests hold the other blocks")
    engine.manager.free(running)
    engine.hint(range(96), intent="prefetch")
    assert engine.hint(range(48), intent="pin", session="s").status == "done"
    receipt = engine.hint(range(96), intent="demote")
    assert outcome(receipt) == ("partly", 48, "the other blocks are pinned")
    receipt = engine.hint(range(96), intent="demote", session="s")  # ends the session's own pin
    assert receipt.status == "partly" and engine.on_device(range(96)) == 0


def test_demotion_of_a_range_leaves_earlier_tokens():
    engine = Engine(num_host_blocks=30)
    engine.serve(range(96))
    receipt = engine.hint(range(96), intent="demote", first_token=32)
    assert outcome(receipt) == ("done", 64, None) and engine.on_device(range(96)) == 32
    assert receipt.num_asked_tokens == 64


def test_demotion_without_room_on_the_host_drops_nothing():
    engine = Engine(num_host_blocks=3)
    engine.serve(range(96))
    receipt = engine.hint(range(96), intent="demote")
    assert outcome(receipt) == ("refused", 0, "the host tier has no room for the other blocks")
    assert engine.on_device(range(96)) == 96


def test_retained_blocks_are_evicted_after_others():
    engine = Engine(num_blocks=13, eviction="priority")
    engine.serve(range(80))
    receipt = engine.hint(range(80), intent="retain", priority=90, ttl_s=10)
    assert outcome(receipt) == ("done", 80, None) and receipt.ttl_s == 10
    for i in range(1, 5):
        engine.serve(range(100 * i, 100 * i + 64))
    assert engine.on_device(range(80)) == 80


@pytest.mark.parametrize(
    ("options", "hint", "reason"),
    [
        (
            {},
            {"intent": "retain", "priority": 3},
            "eviction is 'lru': expected priority or learned",
        ),
        ({}, {"intent": "demote"}, "there is no host tier"),
        ({}, {"intent": "share"}, "no source of the engine can publish KV"),
        ({}, {"intent": "prefetch"}, "there is neither a host tier nor a source"),
        ({}, {"intent": "pin"}, "no block of the prefix is on the device"),
        ({}, {"intent": "pin", "num_tokens": 65}, "num_tokens is 65: expected at most 64"),
        ({}, {"intent": "pin", "num_tokens": 15}, "the tokens fill no whole block"),
        ({}, {"intent": "demote", "first_token": 64}, "first_token is 64: expected less than 64"),
        ({"enable_caching": False}, {"intent": "pin"}, "the manager caches no blocks"),
        ({"num_host_blocks": 9}, {"intent": "prefetch"}, "no tier and no source has more"),
        ({"num_host_blocks": 9}, {"intent": "demote"}, "no block is on the device"),
        (
            {"eviction": "priority"},
            {"intent": "retain", "priority": 3},
            "no block of the prefix is on the device",
        ),
    ],
)
def test_hints_that_cannot_be_carried_out_are_refused(options, hint, reason):
    engine = Engine(**options)
    receipt = engine.hint(range(64), **hint)
    assert (receipt.status, receipt.num_tokens) == ("refused", 0)
    assert receipt.reason.startswith(reason)
    assert engine.hints.num_pending == 0


def test_prefix_as_long_as_a_request_may_be_is_prefetched():
    engine = Engine(num_blocks=40, num_host_blocks=60)
    engine.serve(range(511))
    assert engine.hint(range(512), intent="demote").num_tokens == 496
    assert engine.hint(range(512), intent="prefetch").num_tokens == 496


# Precedence of requests ---------------------------------------------------------------------------------


def test_loads_give_way_to_requests_that_need_their_blocks():
    engine = Engine(sources=[Slow])
    pending = engine.hints.submit(Request("of", range(161)), Hint(intent="prefetch"))
    engine.step()
    assert engine.manager.pool.num_free == 16 - 10 and pending.receipt is None
    engine.sources[0].match = lambda request: 0
    engine.serve(range(300, 500))  # needs 13 blocks
    assert outcome(pending.receipt) == ("refused", 0, "requests needed the blocks")
    assert engine.manager.pool.num_free == 16


def test_loads_give_way_to_requests_that_need_a_row():
    engine = Engine(sources=[Slow], num_reqs=1)
    pending = engine.hints.submit(Request("of", range(33)), Hint(intent="prefetch"))
    engine.step()
    engine.sources[0].match = lambda request: 0
    engine.serve(range(300, 310))
    assert pending.receipt.reason == "requests needed the blocks"


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
    engine.scheduler.add(Sequence(Request("a", range(100, 164))))
    step = engine.scheduler.schedule()
    engine.scheduler.complete(step)  # its sequence continues to run and holds the only row
    pending = engine.hints.submit(Request("of", range(64)), Hint(intent="demote"))
    for _ in range(3):
        engine.scheduler.accept(step.sequences[0], [5])
        engine.scheduler.complete(engine.scheduler.schedule())
        assert pending.receipt is None
    engine.now = 2.5
    engine.scheduler.accept(step.sequences[0], [5])
    engine.scheduler.complete(engine.scheduler.schedule())
    assert pending.receipt.reason == "neither blocks nor sources were available in time"


def test_queue_of_hints_is_limited():
    engine = Engine(sources=[Slow], budget=ALL | {"max_pending": 3, "max_active": 2})
    pending = [
        engine.hints.submit(Request("of", range(i, i + 33)), Hint(intent="prefetch"))
        for i in range(0, 500, 100)
    ]
    assert [each.receipt is None for each in pending] == [True, True, True, False, False]
    assert pending[3].receipt.reason == "3 hints are waiting: expected fewer than max_pending"
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


# Arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"intent": "fetch"},
            "intent is 'fetch': expected one of prefetch, demote, pin, retain, share",
        ),
        ({"intent": 3}, "intent is 3: expected one of"),
        ({"intent": "pin", "action_id": 3}, "action_id is 3: expected a string"),
        ({"intent": "pin", "num_tokens": 0}, "num_tokens is 0: expected 1 to"),
        ({"intent": "pin", "num_tokens": True}, "num_tokens is True: expected an integer"),
        ({"intent": "demote", "num_tokens": 5, "first_token": 5}, "num_tokens is 5: expected 6 to"),
        ({"intent": "demote", "first_token": -1}, "first_token is -1: expected 0 to"),
        ({"intent": "pin", "first_token": 5}, "first_token is 5 with intent 'pin'"),
        ({"intent": "pin", "ttl_s": 0}, "ttl_s is 0: expected seconds, more than 0"),
        ({"intent": "pin", "ttl_s": float("nan")}, "ttl_s is nan: expected seconds, more than 0"),
        ({"intent": "pin", "ttl_s": "5"}, "ttl_s is '5': expected a number"),
        ({"intent": "demote", "ttl_s": 5}, "ttl_s is 5 with intent 'demote'"),
        ({"intent": "retain"}, "priority is None with intent 'retain': expected 0 to 100"),
        ({"intent": "retain", "priority": 101}, "priority is 101: expected 0 to 100"),
        ({"intent": "pin", "priority": 0}, "priority is 0 with intent 'pin'"),
        ({"intent": "share", "session": "s"}, "session is 's' with intent 'share'"),
        ({"intent": "pin", "session": b"s"}, "session is b's': expected a string"),
        ({"intent": "pin", "session": np.ones(2)}, "session is array"),
    ],
)
def test_invalid_hints_are_rejected(fields, message):
    with pytest.raises((TypeError, ValueError)) as told:
        Hint(**fields)
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pin_share": 1.5}, "pin_share is 1.5: expected a fraction from 0 to 1"),
        ({"prefetch_share": "x"}, "prefetch_share is 'x': expected a fraction from 0 to 1"),
        ({"max_ttl_s": 0}, "max_ttl_s is 0: expected seconds, more than 0"),
        ({"ttl_s": 700}, "ttl_s is 700 and max_ttl_s is 600.0"),
        ({"max_pending": 0}, "max_pending is 0: expected 1 to"),
        ({"max_active": 1.5}, "max_active is 1.5: expected an integer"),
    ],
)
def test_invalid_budgets_are_rejected(fields, message):
    with pytest.raises((TypeError, ValueError)) as told:
        HintBudget(**fields)
    assert str(told.value).startswith(message)


def test_invalid_arguments_of_an_executor_are_rejected():
    manager = KVCacheManager(16, 9, 128)
    hints, request = HintExecutor(manager), Request("r", range(40))
    for call, message in (
        (lambda: HintExecutor(3), "manager"),
        (lambda: HintExecutor(manager, sources=3), "sources is 3"),
        (lambda: HintExecutor(manager, budget=3), "budget"),
        (lambda: HintExecutor(manager, clock=3), "clock is 3"),
        (lambda: HintExecutor(manager, synchronize=3), "synchronize is 3"),
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


def test_envelope_keeps_good_actions_beside_bad_ones():
    def action(kind, version="1.0", **payload):
        return {
            **{"action_id": f"{kind}{version}", "action_type": kind},
            **{"action_version": version, "payload": payload},
        }

    found = hints_of_envelope(
        {
            **{"protocol_version": "0.1", "message_id": "m"},
            "actions": [
                action("kv.pin", ttl_s=3, session=None),
                action("kv.pin", "2.0"),
                action("pin"),
            ],
        }
    )
    assert found[0] == Hint(intent="pin", action_id="kv.pin1.0", ttl_s=3)
    assert found[1].reason == "action_version is '2.0': expected '1.0'"
    assert found[2].reason.startswith("action_type is 'pin': expected one of kv.prefetch")
    assert found[2].action_id == "pin1.0" and found[2].intent == "pin"


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        (3, "kv_hints is 3"),
        ({}, "kv_hints.actions is missing"),
        ({"actions": "abc"}, "kv_hints.actions is 'abc': expected a list of actions"),
        ({"message_id": 3}, "kv_hints.message_id is 3: expected a string"),
        ({"actions": [{}]}, "kv_hints.actions[0].action_id is missing"),
        (
            {
                "actions": [
                    {"action_id": "a", "action_type": "t", "action_version": 1, "payload": {}}
                ]
            },
            "kv_hints.actions[0].action_version is 1: expected a string",
        ),
        (
            {
                "actions": [
                    {"action_id": "a", "action_type": "t", "action_version": "", "payload": []}
                ]
            },
            "kv_hints.actions[0].payload",
        ),
        ({"actions": [{}] * (MAX_ACTIONS + 1)}, f"kv_hints.actions has {MAX_ACTIONS + 1} entries"),
    ],
)
def test_malformed_envelopes_are_rejected(envelope, message):
    whole = {"protocol_version": "0.1", "message_id": "m", "actions": []}
    is_partial = isinstance(envelope, dict) and envelope
    with pytest.raises((TypeError, ValueError)) as told:
        hints_of_envelope(whole | envelope if is_partial else envelope)
    assert str(told.value).startswith(message)
