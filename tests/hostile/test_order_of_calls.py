# SPDX-License-Identifier: Apache-2.0
"""Calls that are out of order or that come from several processes and threads, as specified in
docs/order.md.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvcache import (
    Admit,
    KVCacheManager,
    KVStorage,
    Request,
    StepReport,
    Worker,
    hash_blocks,
)
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager
from kvcache.compat.vllm_block_table import BlockTable
from tests.machinery.hostile.instants import Alarm


def make(**options) -> KVCacheManager:
    return KVCacheManager(4, 41, 64, num_preallocate_tokens=0, **options)


def make_worker() -> Worker:
    storage = KVStorage(num_blocks=41, block_size=4, num_kv_heads=1, head_size=2)
    table = BlockTable(
        block_size=4, max_num_reqs=4, max_num_blocks_per_req=16, max_num_batched_tokens=64
    )
    return Worker(storage, table)


def tables_of(worker: Worker) -> np.ndarray:
    return worker.tables.table_set._arena.np.copy()


# --- plans ----------------------------------------------------------------------------------------


def three_plans() -> tuple[KVCacheManager, list]:
    manager = make()
    plans = [manager.step(new=[Request("a", range(10))])]
    plans += [manager.step([0], [1], token_ids=[10 + i]) for i in range(2)]
    plans.append(manager.step(new=[Request("b", range(100, 109))]))
    return manager, plans


@pytest.mark.parametrize(
    ("order", "message"),
    [
        *((order, "each plan is applied once, in order") for order in ((0, 0), (0, 1, 2, 3, 0))),
        ((0, 1, 1), "step_id 1: expected 2 or later, because step 1 was applied"),
        ((1,), "follows step 0, but no plan was applied yet: apply the plan of step 0 first"),
        ((0, 2), "follows step 1, but step 0 was applied last: apply the plan of step 1 first, or"),
        ((0, 3), "apply the plans of steps 1 to 2 first, or abort these steps"),
    ],
)
def test_repeated_or_early_plan_is_rejected_and_changes_nothing(order, message):
    worker, (_, plans) = make_worker(), three_plans()
    for i in order[:-1]:
        worker.apply(plans[i])
    before = tables_of(worker)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            worker.apply(plans[order[-1]])
    assert (tables_of(worker) == before).all()


def test_after_the_abort_of_a_lost_plan_the_next_plan_resends_its_tables():
    manager, plans = three_plans()
    worker = make_worker()
    worker.apply(plans[0])
    assert manager.abort(1) == {"a": 10, "b": 0}
    assert manager.last_step_id == 0
    worker.apply(manager.step([0, 1], [1, 9]))
    counts = worker.tables.table_set.counts
    assert counts[0][:2].tolist() == [3, 3]


# --- reports --------------------------------------------------------------------------------------


def test_repeated_reports_change_nothing_and_unknown_steps_are_rejected():
    manager, _ = three_plans()
    assert manager.report(StepReport(1, True)) == {}
    assert manager.report(StepReport(1, True)) == {}  # repeated report
    assert manager.report(StepReport(0, True)) == {}  # the step is already complete
    free = manager.pool.num_free
    for step_id in (-1, 4, 99):
        with pytest.raises(ValueError, match=rf"step_id is {step_id}"):
            manager.report(StepReport(step_id, True))
        with pytest.raises(ValueError, match=rf"{step_id}"):
            manager.abort(step_id)
    with pytest.raises(ValueError, match=r"1"):
        manager.report(StepReport(1, False))  # already reported as completed
    assert manager.pool.num_free == free
    assert manager.abort(2) == {"a": 11, "b": 0}
    assert manager.abort(2) == {}  # repeated abort
    check_invariants(manager)


# --- pickles --------------------------------------------------------------------------------------


def test_plans_and_reports_pickle():
    worker, twin, (_, plans) = make_worker(), make_worker(), three_plans()
    for plan in plans:
        report = worker.apply(pickle.loads(pickle.dumps(plan)))
        assert pickle.loads(pickle.dumps(report)) == twin.apply(plan)
    assert (tables_of(worker) == tables_of(twin)).all()


def test_pickled_request_is_a_copy_with_separate_tokens():
    manager = make()
    request = Request("a", range(9), lora=("l", "/l"), cache_salt="s", session="t")
    manager.step(new=[request])
    again = pickle.loads(pickle.dumps(request))
    request.append_tokens([7])
    assert again.token_ids.tolist() == [*range(9)]
    assert (again.lora, again.cache_salt, again.session) == (("l", "/l"), "s", "t")
    # A manager identifies a request by its id.
    assert manager.row(again) == manager.row(request)
    with pytest.raises(ValueError, match=r"request 'a' is already admitted"):
        manager.step(new=[again])
    assert manager.cache.find_prefix(again).num_tokens == 8


@pytest.mark.parametrize(
    "what",
    [
        make,
        lambda: BlockSpaceManager(4, 9, 9),
        make_worker,
    ],
    ids=["KVCacheManager", "BlockSpaceManager", "Worker"],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_of_pickling_native_state_names_the_class(what, protocol):
    made = what()
    with pytest.raises(TypeError, match=rf"a {type(made).__name__} cannot be pickled: expected "):
        pickle.dumps(made, protocol)


# --- fork -----------------------------------------------------------------------------------------


def in_child(work) -> str:
    """Run `work` in a forked process, and return its result or error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_has_a_separate_manager():
    manager, request = make(), Request("a", range(10))
    manager.step(new=[request])

    def work():
        manager.free(request)
        manager.step(new=[Request("b", range(20))])
        check_invariants(manager)
        return manager.pool.num_free

    assert in_child(work) == "35"
    assert manager.pool.num_free == 37 and manager.block_ids(request).tolist() == [1, 2, 3]
    check_invariants(manager)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_copies_pages_without_the_threads_of_its_parent():
    script = """
import os, torch
from kvcache.worker import KVStorage, Pages
torch.set_num_threads(2)
pages, pairs = Pages.allocate(20, [[1 << 20]]), [(i, 10 + i) for i in range(1, 10)]
storage, rows = KVStorage(512, 16, 8, 128, dtype="float32"), torch.ones(4096, 8, 128)
slots = torch.arange(16, 16 + 4096)
def work():
    pages.copy(pairs)
    storage.write(0, rows, rows, slots)
work()
child = os.fork()
if not child:  # uses numpy, because torch's own operations would hang
    of_pages, of_storage = pages.layer(0).numpy(), storage.key_cache(0).numpy()
    of_pages[1] = 7
    of_storage.fill(0)
    work()
    right = (of_pages[11] == 7).all() and (of_storage[1:257] == 1).all()
    os._exit(0 if right else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_forked_process_has_no_worker():
    worker, (_, plans) = make_worker(), three_plans()
    worker.apply(plans[0])
    answer = in_child(lambda: worker.apply(plans[1]))
    assert answer.startswith(f"RuntimeError: the worker belongs to process {os.getpid()}, but this")
    worker.apply(plans[1])


# --- threads --------------------------------------------------------------------------------------


def in_thread(work) -> str:
    answer = []

    def run():
        try:
            answer.append(str(work()))
        except Exception as error:
            answer.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answer[0]


@pytest.mark.parametrize("call", [
    lambda m, r: m.step(),
    lambda m, r: m.free(r),
    lambda m, r: m.report(StepReport(0, True)),
    lambda m, r: m.admit(Admit(Request("b", range(5)), num_tokens=5), ()),
    lambda m, r: m.cache.drain_events(),
])  # fmt: skip
def test_manager_belongs_to_the_thread_that_first_used_it(call):
    manager, request = make(), Request("a", range(10))
    manager.step(new=[request])
    answer = in_thread(lambda: call(manager, request))
    assert answer.startswith("RuntimeError: called from thread ") and "belongs to" in answer
    assert manager.pool.num_free == 37
    check_invariants(manager)


# --- long work ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    """Return as many int32 token ids as this machine can hash in 0.3 s, between 1 and 39 million, for
    which the pool has room beside another request.
    """
    million = np.arange(1_000_000, dtype=np.int32) % 1000
    started = time.thread_time()  # thread time, because other processes may use the core
    hash_blocks(million, 16)
    return np.tile(million, min(max(round(0.3 / (time.thread_time() - started)), 1), 39))


def long_prompt_manager() -> KVCacheManager:
    return KVCacheManager(16, 2_500_001, 2**26, num_preallocate_tokens=0)


@contextmanager
def handler_while_hashing(manager: KVCacheManager, handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` once from a signal handler, while the manager hashes a prompt."""

    def ring(*_):
        try:
            manager.cache.unpin("nobody")
        except RuntimeError:  # a call is being made
            signal.setitimer(signal.ITIMER_REAL, 0)
            handler()

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["hash_blocks", "step", "find_prefix"])
def test_hashing_millions_of_tokens_is_interrupted_and_changes_nothing(work, prompt):
    manager = long_prompt_manager()
    request = Request("a", prompt)
    call = {
        "hash_blocks": lambda: hash_blocks(prompt, 16),
        "step": lambda: manager.step(new=[request]),
        "find_prefix": lambda: manager.cache.find_prefix(request),
    }[work]
    with Alarm() as alarm:
        assert alarm.interrupts(0.02, call)
    assert manager.pool.num_free == manager.pool.num_total and manager.last_step_id == -1
    check_invariants(manager)
    manager.step(new=[request])
    assert len(manager.block_ids(request)) == len(prompt) // 16


@pytest.mark.slow
@pytest.mark.parametrize("work", ["step", "extend"])
def test_an_interrupt_while_a_running_row_is_hashed_changes_nothing(work, prompt):
    manager, request = long_prompt_manager(), Request("a", range(3))
    if work == "step":
        manager.step(new=[request])
        new = Request("b", prompt)
        call = lambda: manager.step([0], [1], token_ids=[7], new=[new])  # noqa: E731
    else:
        manager.admit(Admit(request, num_tokens=3), ())
        request.append_tokens(prompt)
        call = lambda: manager.extend(request, 13)  # noqa: E731  fills its first block
    before = request.num_tokens, manager.pool.num_free, manager.last_step_id
    with Alarm() as alarm:
        assert alarm.interrupts(0.02, call)
    assert (request.num_tokens, manager.pool.num_free, manager.last_step_id) == before
    assert manager.num_computed_tokens(request) == 3
    check_invariants(manager)
    call()
    assert manager.num_computed_tokens(request) == (4 if work == "step" else 16)


@pytest.mark.slow
def test_calls_of_a_signal_handler_while_a_prompt_is_hashed_are_rejected(prompt):
    manager, other, request = long_prompt_manager(), long_prompt_manager(), Request("a", prompt)
    errors = []

    def handler():
        for call in (
            lambda: manager.step(new=[Request("b", [1])]),
            lambda: other.cache.hashes(request),
            lambda: request.append_tokens([1]),
        ):
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))

    with handler_while_hashing(manager, handler):
        manager.step(new=[request])
    of_manager, of_other, of_request = errors
    assert "from a signal handler" in of_manager and "being hashed by a call" in of_other
    assert "token_ids were appended while" in of_request and request.num_tokens == len(prompt)
    check_invariants(manager)


@pytest.mark.slow
def test_a_signal_handler_cannot_change_the_arrays_of_a_step(prompt):
    manager = long_prompt_manager()
    manager.step(new=[Request("a", range(3))])
    rows, counts = np.array([0], np.int32), np.array([1], np.int32)
    new = Request("b", prompt)

    def handler():
        rows[0], counts[0] = 5, 100

    with handler_while_hashing(manager, handler):
        plan = manager.step(rows, counts, new=[new])
    assert (rows[0], counts[0]) == (5, 100)  # the step was executed
    assert plan.rows.tolist() == [0, 1]
    assert plan.num_tokens.tolist()[0] == 1
    check_invariants(manager)


def test_other_threads_run_while_a_prompt_is_hashed(prompt):
    counts, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1
            time.sleep(0.001)

    hashing, most = long_prompt_manager(), 0
    thread = threading.Thread(target=count)
    thread.start()
    for number in range(20):  # other processes may occupy the core of the thread
        before = counts[0]
        hashing.cache.hashes(Request(str(number), prompt))
        most = max(most, counts[0] - before)
        if most >= 5:
            break
    stop.set()
    thread.join()
    assert most >= 5


def test_an_interrupt_by_another_thread_ends_hashing(prompt):
    manager = long_prompt_manager()
    timer = threading.Timer(0.02, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for number in range(100):  # the timer's thread may start late
            manager.cache.hashes(Request(str(number), prompt))
    timer.join()
