# SPDX-License-Identifier: Apache-2.0
"""Tests each documented rule of the manager of sequence groups.

The simulator (`tests/simulator/sequences.py`) makes random calls and checks what pages hold.
"""

import collections
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import numpy as np
import pytest

from kvcache.compat import AllocStatus, BlockSpaceManager
from kvcache.events import BlockRemoved, BlockStored
from tests.simulator.sequences import Group, Seq, Status

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER
Device = Enum("Device", ["GPU", "CPU"])


def make(num_gpu_blocks=11, num_cpu_blocks=11, block_size=4, watermark=0, **options):
    return BlockSpaceManager(block_size, num_gpu_blocks, num_cpu_blocks, watermark, **options)


def seq(seq_id, num_tokens, status=Status.WAITING, first=0):
    return Seq(seq_id, [*range(first, first + num_tokens)], status)


def admitted(manager, num_tokens=6, request_id="r", num_seqs=1, encoder=0, first=0):
    seqs = [seq(f"{request_id}{i}", num_tokens, first=first) for i in range(num_seqs)]
    group = Group(request_id, seqs, seq("encoder", encoder) if encoder else None)
    manager.allocate(group)
    group.set_status(Status.RUNNING)
    return group


def child_of(manager, parent, seq_id):
    child = Seq(seq_id, [*parent.tokens], Status.RUNNING, parent.extra)
    manager.fork(parent, child)
    return child


def swapped_out(manager, group):
    pairs = manager.swap_out(group)
    group.set_status(Status.SWAPPED)
    return pairs


def counts(manager):
    return manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()


# Two pools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cpu_blocks", [0, 1])
def test_swaps_are_rejected_without_a_host_pool(num_cpu_blocks):
    manager = make(num_cpu_blocks=num_cpu_blocks)
    group = admitted(manager)
    assert manager.get_num_free_cpu_blocks() == 0
    assert not manager.can_swap_out(group)
    assert manager.can_swap_in(group, 0) == NEVER
    for swap in (manager.swap_out, manager.swap_in):
        with pytest.raises(ValueError, match="num_cpu_blocks of 2 or more"):
            swap(group)


@pytest.mark.parametrize("error, arguments, named", [
    (ValueError, {"num_gpu_blocks": 1}, "num_gpu_blocks is 1"),
    (ValueError, {"num_cpu_blocks": -1}, "num_cpu_blocks is -1"),
    (ValueError, {"block_size": 0}, "block_size"),
    (ValueError, {"watermark": 1.5}, "watermark is 1.5"),
    (ValueError, {"sliding_window": 0}, "^sliding_window is 0: expected 2 or more"),
    (ValueError, {"max_model_len": 0}, "max_model_len"),
    (TypeError, {"block_size": True}, "block_size is True: expected an integer"),
    (TypeError, {"enable_caching": "no"}, "enable_caching is 'no': expected True or False"),
])  # fmt: skip
def test_invalid_arguments_are_reported(error, arguments, named):
    with pytest.raises(error, match=named):
        make(**arguments)


# Admission -------------------------------------------------------------------------------------------


def test_calls_that_do_not_fit_are_rejected_and_change_nothing():
    manager = make(num_gpu_blocks=3, num_cpu_blocks=2)
    with pytest.raises(ValueError, match="expected a call to can_allocate first"):
        manager.allocate(Group("r", [seq("r0", 9)]))
    assert counts(manager) == (2, 1)
    group = admitted(manager, 8)  # a sequence of the same id: the failed call kept no entry
    one = group.seqs[0]
    one.tokens += [1]
    with pytest.raises(ValueError, match="1 slots and 2 more, because only 0 blocks are free: exp"):
        manager.append_slots(one, 2)
    assert not manager.can_swap_out(group)
    with pytest.raises(ValueError, match="on the host, 1 blocks are free: expected a call to can_"):
        manager.swap_out(group)
    assert counts(manager) == (0, 1) and manager.get_block_table(one) == [1, 2]
    manager = make(num_gpu_blocks=4)
    group = admitted(manager, 8)
    swapped_out(manager, group)
    admitted(manager, 5, "s")
    assert manager.can_swap_in(group, 0) == LATER
    with pytest.raises(
        ValueError, match="on the device, 1 blocks are free: expected a call to can"
    ):
        manager.swap_in(group)
    assert counts(manager) == (1, 8)
    manager.check_invariants()


def test_sequences_of_a_group_share_the_prompt():
    manager = make()
    group = admitted(manager, 6, num_seqs=3)
    tables = [manager.get_block_table(each) for each in group.seqs]
    assert tables == [[1, 2]] * 3 and len({*map(id, tables)}) == 3
    assert counts(manager)[0] == 8
    for each in group.seqs[:2]:
        manager.free(each)
    assert counts(manager)[0] == 8
    manager.free(group.seqs[2])
    assert counts(manager)[0] == 10


def test_only_waiting_sequences_are_allocated():
    manager = make()
    group = Group("r", [seq(0, 4, Status.FINISHED_STOPPED), seq(1, 4)])
    manager.allocate(group)
    assert manager.get_block_table(group.seqs[1]) == [1]
    with pytest.raises(ValueError, match="seq 0 has no blocks"):
        manager.get_block_table(group.seqs[0])
    group.set_status(Status.RUNNING)
    for call in (manager.allocate, manager.can_allocate):
        with pytest.raises(ValueError, match="'r' has no WAITING sequence"):
            call(group)


@pytest.mark.parametrize("status", [3, None])
def test_invalid_status_is_reported(status):
    manager = make(enable_caching=True)
    group = admitted(manager)
    group.set_status(status)
    message = f"status of seq 'r0' is {status}: expected an enum member or text"
    for call, *given in (
        *((manager.allocate,), (manager.can_allocate,), (manager.swap_out,)),
        *((manager.can_append_slots, 0), (manager.mark_blocks_as_computed, 6)),
    ):
        with pytest.raises(TypeError, match=message):
            call(group, *given)


def test_allocating_again_is_rejected():
    manager = make()
    group = admitted(manager)
    group.set_status(Status.WAITING)
    with pytest.raises(ValueError, match="seq 'r0' already has blocks"):
        manager.allocate(group)
    with pytest.raises(ValueError, match="'s' has seq 5 twice"):
        manager.allocate(Group("s", [seq(5, 4), seq(5, 4)]))
    assert counts(manager)[0] == 8


@pytest.mark.parametrize("caching", [False, True])
def test_sequences_of_a_group_must_have_the_same_prompt(caching):
    manager = make(enable_caching=caching)
    others = [seq(1, 5)] + [seq(1, 4, first=9), Seq(1, [0, 1, 2, 3], extra="x")] * caching
    for other in others:
        with pytest.raises(ValueError, match=r"seq 1 of seq_group 'r' .* expected the same prompt"):
            manager.allocate(Group("r", [seq(0, 4), other]))
    assert counts(manager)[0] == 10


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_encoder_has_a_separate_block_table(window, num_tokens):
    manager = make(sliding_window=window)
    group = admitted(manager, 4, encoder=num_tokens)
    table = manager.get_cross_block_table(group)
    assert table == [2, 3, 4][: -(-num_tokens // 4)]
    manager.free(group.seqs[0])
    assert manager.get_cross_block_table(group) == table
    manager.free_cross(group)
    manager.free_cross(group)
    assert counts(manager)[0] == 10
    with pytest.raises(ValueError, match="'r' has no cross-attention table"):
        manager.get_cross_block_table(group)


def test_can_allocate_includes_encoder_blocks():
    manager = make(num_gpu_blocks=5)
    group = Group("r", [seq(0, 8)], seq("e", 9))
    assert manager.can_allocate(group) == NEVER
    with pytest.raises(ValueError, match="can_allocate"):
        manager.allocate(group)
    assert counts(manager)[0] == 4
    group.encoder.tokens = [1]
    assert manager.can_allocate(group) == OK
    manager.allocate(group)
    other = Group("r", [seq(1, 1)], seq("e", 1))
    with pytest.raises(ValueError, match="'r' already has a cross-attention table"):
        manager.allocate(other)
    with pytest.raises(ValueError, match="the encoder of seq_group 's' has 0 tokens"):
        manager.allocate(Group("s", [seq(1, 1)], seq("e", 0)))


# Growth ----------------------------------------------------------------------------------------------


def test_append_slots_allocates_slots_for_new_tokens():
    manager = make()
    group = admitted(manager, 3)
    one = group.seqs[0]
    assert manager.append_slots(one, 0) == []
    one.tokens += [1]
    assert manager.append_slots(one, 0) == []
    assert manager.get_block_table(one) == [1]
    one.tokens += [1] * 4
    assert manager.append_slots(one, 3) == []  # slots of 8 tokens, and 3 lookahead slots
    assert manager.get_block_table(one) == [1, 2, 3]
    one.tokens += [1] * 3
    assert manager.append_slots(one, 0) == []  # the next tokens use the lookahead slots
    assert manager.get_block_table(one) == [1, 2, 3]
    assert manager.append_slots(one, 2) == []  # without a new token
    assert manager.get_block_table(one) == [1, 2, 3, 4]


def test_can_append_slots_counts_every_written_block():
    manager = make(num_gpu_blocks=6)  # 5 blocks
    group = admitted(manager, 6, num_seqs=2)  # 2 blocks
    assert manager.can_append_slots(group, 0)  # no slot is written
    # Slots 6 and 7 are in the same block, and each sequence needs its own copy of this block.
    assert manager.can_append_slots(group, 2)
    # Each sequence needs two blocks, but only three are free.
    assert not manager.can_append_slots(group, 3)
    group.seqs[1].status = Status.FINISHED_STOPPED
    assert manager.can_append_slots(group, 3)
    group.seqs[0].tokens += [1] * 8
    assert manager.can_append_slots(group, 2)  # slots 6 to 15: 3 blocks
    assert not manager.can_append_slots(group, 3)


def test_invalid_appends_are_reported():
    manager = make(max_model_len=8)
    group = admitted(manager, 6)
    one = group.seqs[0]
    short = seq("r0", 5, Status.RUNNING)
    for wrong, message in (
        (seq("x", 1, Status.RUNNING), "seq 'x' has no blocks"),
        (short, "seq 'r0' has 5 tokens: expected 6 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.append_slots(wrong, 4)
        with pytest.raises(ValueError, match=message):
            manager.can_append_slots(Group("s", [wrong]), 4)
    for nothing in (None, 0.0, ""):
        with pytest.raises(TypeError, match="num_lookahead_slots is "):
            manager.append_slots(one, nothing)  # also rejected without new tokens
    one.tokens += [1]
    with pytest.raises(ValueError, match="num_lookahead_slots is -1"):
        manager.append_slots(one, -1)
    one.tokens += [1, 1]
    with pytest.raises(ValueError, match="max_model_len"):
        manager.append_slots(one, 0)
    manager.check_invariants()


def test_length_of_token_ids_is_checked_with_caching():
    manager = make(enable_caching=True)
    one = admitted(manager, 6).seqs[0]
    one.tokens += [-1]
    with pytest.raises(ValueError, match="-1"):
        manager.append_slots(one, 0)
    one.tokens[-1] = 1
    one.get_len = lambda: 9
    with pytest.raises(ValueError, match=r"get_token_ids\(\) of seq 'r0' has 7 tokens: expected 9"):
        manager.append_slots(one, 0)
    other = seq("s", 4)
    other.get_len = lambda: 3
    with pytest.raises(ValueError, match=r"get_token_ids\(\) of seq 's' has 4 tokens: expected 3"):
        manager.allocate(Group("s", [other]))
    del one.get_len
    assert manager.append_slots(one, 0) == []
    manager.check_invariants()


def test_append_beyond_max_model_len_does_not_fit():
    manager = make(max_model_len=8)
    assert manager.can_allocate(Group("s", [seq("s", 9)])) == NEVER
    # Lookahead slots may extend beyond max_model_len.
    assert manager.can_allocate(Group("s", [seq("s", 8)]), 4) == OK
    with pytest.raises(ValueError, match="max_model_len"):
        manager.allocate(Group("s", [seq("s", 9)]))
    group = admitted(manager, 7)
    one = group.seqs[0]
    one.tokens += [1]
    assert manager.can_append_slots(group, 4)
    one.tokens += [1]
    assert not manager.can_append_slots(group, 0)
    swapped_out(manager, group)
    assert manager.can_swap_in(group, 0) == NEVER
    one.tokens.pop()
    assert manager.can_swap_in(group, 0) == OK


@pytest.mark.parametrize("length, error, named", [
    (True, TypeError, r"get_len\(\) of seq 'r0' is True: expected an integer"),
    (0, ValueError, r"get_len\(\) of seq 'r0' is 0: expected 1 to 2147483647"),
    (2**70, ValueError, r"get_len\(\) of seq 'r0' is 1180591620717411303424: expected 1 to"),
])  # fmt: skip
def test_invalid_length_is_reported(length, error, named):
    manager = make()
    group = admitted(manager, 6)
    (one,) = group.seqs
    one.get_len = lambda: length
    waiting = Group("w", [one])
    for call in (
        lambda: manager.append_slots(one, 3),
        lambda: manager.can_append_slots(group, 0),
        lambda: [group.set_status(Status.WAITING), manager.can_allocate(waiting)],
        lambda: [manager.free(one), manager.allocate(waiting)],
    ):
        with pytest.raises(error, match=named):
            call()
    assert counts(manager)[0] == 10


def test_bools_are_rejected_as_numbers():
    manager = make(enable_caching=True)
    group = admitted(manager)
    waiting = Group("w", [seq("w", 4)])
    calls = [
        (lambda: manager.can_allocate(waiting, True), "num_lookahead_slots is True"),
        (lambda: manager.can_append_slots(group, True), "num_lookahead_slots is True"),
        (lambda: manager.append_slots(group.seqs[0], False), "num_lookahead_slots is False"),
        (lambda: manager.can_swap_in(group, True), "num_lookahead_slots is True"),
        (lambda: manager.mark_blocks_as_computed(group, True), "token_chunk_size is True"),
        (lambda: manager.access_all_blocks_in_seq(group.seqs[0], True), "now is True"),
    ]
    for call, named in calls:
        with pytest.raises(TypeError, match=named):
            call()
    with pytest.raises(TypeError, match=r"extra_hash\(\) of seq 'x' is True"):
        manager.allocate(Group("x", [Seq("x", [1], extra=True)]))
    group.seqs[0].tokens += [7, True]
    calls = [lambda: manager.append_slots(group.seqs[0], 0)]
    calls += [lambda: manager.get_num_cached_tokens(Seq("y", [1, True]))]
    for call in calls:
        with pytest.raises(TypeError, match=r"token_ids\[\d\] is True: expected an integer"):
            call()


@pytest.mark.parametrize("window", [None, 5])
def test_block_table_is_a_single_list_updated_in_place(window):
    manager = make(num_gpu_blocks=60, num_cpu_blocks=60, sliding_window=window)
    group = admitted(manager, 6)
    one = group.seqs[0]
    table = manager.get_block_table(one)
    for i in range(20):
        one.tokens += [i] * (1 + i % 3)
        manager.append_slots(one, i % 5)
        assert manager.get_block_table(one) is table
        manager.check_invariants()
    table.append(5)
    with pytest.raises(RuntimeError, match="did the caller change a returned list"):
        manager.check_invariants()
    table.pop()
    before = [*table]
    swapped_out(manager, group)
    manager.swap_in(group)
    assert table == before and manager.get_block_table(one) is not table
    manager.check_invariants()


# Forks -----------------------------------------------------------------------------------------------


def test_a_fork_shares_all_blocks_until_the_first_write():
    for length, lookahead, pairs, tables in (
        (6, 0, [(2, 3)], ([1, 2], [1, 3])),  # the first write copies the partial block
        (8, 0, [], ([1, 2], [1, 2, 3])),  # a full block is not copied
        (7, 4, [(2, 4)], ([1, 2, 3], [1, 4, 5])),  # shared lookahead blocks are replaced
    ):
        manager = make()
        parent = admitted(manager, length).seqs[0]
        manager.append_slots(parent, lookahead)
        child = child_of(manager, parent, "c")
        assert manager.get_block_table(child) == manager.get_block_table(parent) == tables[0]
        child.tokens += [7, 7] if lookahead else [7]
        assert manager.append_slots(child, 0) == pairs
        assert [manager.get_block_table(each) for each in (parent, child)] == [*tables]
        if length % 4:
            parent.tokens += [8]
            assert manager.append_slots(parent, 0) == []  # only the parent still holds the block


def test_invalid_forks_are_reported():
    manager = make(enable_caching=True)
    group = admitted(manager, 6)
    parent = group.seqs[0]
    with pytest.raises(ValueError, match="child_seq 'r0' already has blocks"):
        manager.fork(parent, parent)
    with pytest.raises(ValueError, match="seq 'x' has no blocks"):
        manager.fork(seq("x", 6), seq("c", 6))
    with pytest.raises(
        ValueError, match="child_seq 'c' has 5 tokens: expected at least the 6 tokens of its parent"
    ):
        manager.fork(parent, seq("c", 5))
    with pytest.raises(ValueError, match="child_seq 'c' is 'x': expected the parent's extra_hash"):
        manager.fork(parent, Seq("c", [*parent.tokens], extra="x"))
    with pytest.raises(ValueError, match=r"get_token_ids\(\) of seq 'c' has 6 tokens: expected 7"):
        other = seq("c", 6)
        other.get_len = lambda: 7
        manager.fork(parent, other)
    with pytest.raises(ValueError, match="child_seq 'c' differs from its parent in tokens 2 to 5"):
        manager.fork(parent, Seq("c", np.array([0, 1, 2, 3, 50, 5]), Status.RUNNING))
    with pytest.raises(ValueError, match="in tokens 0 to 1"):
        manager.fork(admitted(manager, 2, "short").seqs[0], seq("c", 2, first=1))
    swapped_out(manager, group)
    with pytest.raises(ValueError, match="parent_seq 'r0' is swapped out"):
        manager.fork(parent, seq("c", 6))
    manager.check_invariants()


# Swaps -----------------------------------------------------------------------------------------------


def test_blocks_shared_by_sequences_are_swapped_once():
    manager = make()
    group = admitted(manager, 8)
    parent = group.seqs[0]
    child = child_of(manager, parent, "c")
    group.seqs.append(child)
    child.tokens += [7]
    manager.append_slots(child, 0)
    assert swapped_out(manager, group) == [(1, 1), (2, 2), (3, 3)]
    assert counts(manager) == (10, 7)
    assert manager.can_swap_in(group, 0) == OK
    assert manager.swap_in(group) == [(1, 4), (2, 5), (3, 6)]
    group.set_status(Status.RUNNING)
    assert manager.get_block_table(parent) == [4, 5]
    assert manager.get_block_table(child) == [4, 5, 6]
    assert counts(manager) == (7, 10)


def test_encoder_is_swapped_with_its_group():
    manager = make()
    group = admitted(manager, 4, encoder=6)
    assert len(swapped_out(manager, group)) == 3
    with pytest.raises(ValueError, match="the encoder of group 'r' is swapped out"):
        manager.get_cross_block_table(group)
    assert manager.swap_in(group) == [(1, 4), (2, 5), (3, 6)]
    assert manager.get_cross_block_table(group) == [5, 6]


def test_changed_watermark_applies_to_every_later_call():
    manager = make(num_gpu_blocks=9, watermark=0.25)  # 8 blocks, of which 2 are kept free
    group = Group("g", [seq("a", 28)])
    assert (manager.watermark_blocks, manager.can_allocate(group)) == (2, NEVER)
    for value, error in ((-1, ValueError), (2**31, ValueError), (True, TypeError)):
        with pytest.raises(error, match=r"^watermark_blocks is "):
            manager.watermark_blocks = value
    manager.watermark_blocks = 0
    assert (manager.watermark_blocks, manager.can_allocate(group)) == (0, OK)
    manager.allocate(group)
    group.set_status(Status.RUNNING)
    swapped_out(manager, group)
    assert manager.can_swap_in(group, 0) is OK
    manager.watermark_blocks = np.int64(3)
    assert manager.can_swap_in(group, 0) is LATER


def swap_in_case(size, window, length, num_seqs, num_new, lookahead, num_held):
    """Return the result of can_swap_in, and whether swap_in and append_slots succeed.

    A result of None means that the call was not attempted.

    Every sequence grows by `num_new` tokens before the swap, and half of the sequences grow by
    `num_new` more afterwards. Another group holds `num_held` blocks.
    """
    manager = make(8, 40, size, sliding_window=window)
    try:
        group = admitted(manager, length, num_seqs=num_seqs)
        for one in group.seqs:
            one.tokens += [1] * num_new
            manager.append_slots(one, 0)
        swapped_out(manager, group)
        if num_held:
            admitted(manager, num_held * size, "other")
    except ValueError:
        return None
    for one in group.seqs[: num_seqs // 2]:
        one.tokens += [5] * num_new
    answer = manager.can_swap_in(group, lookahead)
    try:
        manager.swap_in(group)
        for one in group.seqs:
            manager.append_slots(one, lookahead)
    except ValueError:
        return answer, False
    return answer, True


@pytest.mark.slow
@pytest.mark.parametrize("size, window", [(1, None), (2, None), (4, None), (2, 5), (4, 3)])
def test_can_swap_in_predicts_swap_in_and_append_slots(size, window):
    answers = collections.Counter()
    numbers = (range(1, 10), (1, 2, 3), (0, 1), (0, 1, 3, 6))
    for case in itertools.product(*numbers):
        alone = swap_in_case(size, window, *case, 0)
        for num_held in range(3):
            found = swap_in_case(size, window, *case, num_held)
            if found is None:
                continue
            assert found[0] == (OK if found[1] else LATER if alone[1] else NEVER), case
            answers[found[0]] += 1
    assert sum(answers.values()) > 400 and all(answers[each] for each in AllocStatus)


def test_invalid_swaps_are_reported():
    manager = make()
    group = admitted(manager, 6)
    one = group.seqs[0]
    with pytest.raises(ValueError, match="'r' has no SWAPPED sequence"):
        manager.swap_in(group)
    group.set_status(Status.SWAPPED)
    with pytest.raises(ValueError, match="'r' has no RUNNING sequence"):
        manager.swap_out(group)
    with pytest.raises(ValueError, match="seq 'r0' is on the device: expected one that is swapped"):
        manager.can_swap_in(group, 0)
    with pytest.raises(ValueError, match="seq 'x' has no blocks"):
        manager.swap_out(Group("s", [seq("x", 1, Status.RUNNING)]))
    group.set_status(Status.RUNNING)
    manager.swap_out(group)
    for call, *given in (
        *((manager.swap_out, group), (manager.get_block_table, one)),
        *((manager.access_all_blocks_in_seq, one, 1.0), (manager.append_slots, one, 0)),
    ):
        with pytest.raises(ValueError, match="seq 'r0' is swapped out: expected one on the device"):
            call(*given)
    manager.check_invariants()


# Windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 4, 7, 9])
def test_sequence_holds_only_the_blocks_of_its_window(window):
    manager = make(num_gpu_blocks=100, sliding_window=window)
    one = admitted(manager, 50).seqs[0]
    for _ in range(20):
        table = manager.get_block_table(one)
        # Column of the first block that the next token reads.
        first = (len(one.tokens) - window + 1) // 4
        assert not any(table[: max(first - 1, 0)]) and all(table[first:])
        held = sum(map(bool, table))
        assert held <= window // 4 + 2 and counts(manager)[0] == 99 - held
        one.tokens += [1]
        manager.append_slots(one, 0)


def test_hit_that_holds_more_blocks_than_fit_is_not_taken():
    manager = make(num_gpu_blocks=5, sliding_window=4, enable_caching=True)
    group = admitted(manager, 5)
    manager.mark_blocks_as_computed(group, 5)
    manager.free(group.seqs[0])
    long = Group("s", [seq("s", 30)])
    assert manager.get_num_cached_tokens(long.seqs[0]) == 0
    assert manager.can_allocate(long) == OK
    manager.allocate(long)
    assert manager.get_num_cached_tokens(long.seqs[0]) == 0
    manager.check_invariants()


@pytest.mark.parametrize("caching", [False, True])
def test_prompt_longer_than_the_window_rejects_chunked_prefill(caching):
    manager = make(num_gpu_blocks=30, sliding_window=8, enable_caching=caching)
    group = admitted(manager, 64, num_seqs=2)
    table = manager.get_block_table(group.seqs[0])
    assert table == [0] * 14 + [1, 2]
    for count in (0, 16, 63):
        with pytest.raises(
            ValueError,
            match="a prompt longer than the window is computed in one step: "
            "expected a token_chunk_size of 64",
        ):
            manager.mark_blocks_as_computed(group, count)
    assert manager.get_block_table(group.seqs[0]) == table
    assert manager.get_num_cached_tokens(seq("s", 65)) == 0
    manager.mark_blocks_as_computed(group, 64)
    assert manager.get_num_cached_tokens(seq("s", 65)) == 64 * caching
    for one in group.seqs:
        one.tokens += [64]
        manager.append_slots(one, 0)
    manager.mark_blocks_as_computed(group, 1)


def test_rejected_mark_changes_no_sequence():
    manager = make(num_gpu_blocks=30, sliding_window=8, enable_caching=True)
    short, long = admitted(manager, 8).seqs, admitted(manager, 20, "s", first=50).seqs
    with pytest.raises(ValueError, match="8 tokens of seq 's0' are marked"):
        manager.mark_blocks_as_computed(Group("both", [*short, *long]), 8)
    assert manager.get_num_cached_tokens(seq("t", 9)) == 0


def test_prompt_that_fits_the_window_may_be_computed_in_chunks():
    manager = make(num_gpu_blocks=30, sliding_window=8, enable_caching=True)
    group = admitted(manager, 10)  # the next tokens still attend to its first block
    manager.mark_blocks_as_computed(group, 5)
    manager.mark_blocks_as_computed(group, 5)
    again = admitted(manager, 15, "s")  # the prompt has a hit
    assert manager.get_num_cached_tokens(again.seqs[0]) == 8
    manager.mark_blocks_as_computed(again, 12)
    assert manager.get_num_cached_tokens(seq("t", 15)) == 12


# Prefix caching --------------------------------------------------------------------------------------


def test_only_computed_blocks_are_hits():
    manager = make(enable_caching=True)
    group = admitted(manager, 11)
    other = seq("s", 20)
    assert manager.get_num_cached_tokens(other) == 0
    manager.mark_blocks_as_computed(group, 5)
    assert manager.get_num_cached_tokens(other) == 4
    manager.mark_blocks_as_computed(group, 5)
    assert manager.get_num_cached_tokens(other) == 8
    manager.append_slots(group.seqs[0], 9)
    manager.mark_blocks_as_computed(group, 100)  # lookahead slots are never computed
    assert manager.get_num_cached_tokens(other) == 8
    assert manager.get_num_cached_tokens(seq("t", 8)) == 4  # the last token is computed
    manager.allocate(Group("s", [other]))
    assert manager.get_block_table(other)[:2] == [1, 2]


def test_marks_include_cached_tokens_and_never_exceed_the_length():
    manager = make(enable_caching=True)
    manager.mark_blocks_as_computed(admitted(manager, 9), 9)
    group = admitted(manager, 14, "s")
    assert manager.get_num_cached_tokens(group.seqs[0]) == 8
    manager.mark_blocks_as_computed(group, 11)  # of these 11 tokens, 8 were hits
    assert manager.get_num_cached_tokens(seq("t", 20)) == 8
    manager.mark_blocks_as_computed(group, 100)
    assert manager.get_num_cached_tokens(seq("t", 20)) == 12
    group.seqs[0].tokens += [14, 15]
    manager.append_slots(group.seqs[0], 0)
    assert manager.get_num_cached_tokens(seq("t", 20)) == 12
    manager.mark_blocks_as_computed(group, 2)
    assert manager.get_num_cached_tokens(seq("t", 20)) == 16


@pytest.mark.parametrize("num_accepted, lookahead", [(1, 0), (5, 0), (5, 6)])
def test_mark_after_the_prompt_covers_all_tokens_accepted_by_a_step(num_accepted, lookahead):
    """Engines report one computed token per decode step, regardless of the number of accepted drafts."""
    manager = make(num_gpu_blocks=30, enable_caching=True)
    group = admitted(manager, 8)
    manager.mark_blocks_as_computed(group, 5)
    manager.mark_blocks_as_computed(group, 3)
    one = group.seqs[0]
    while len(one.tokens) < 48:
        one.tokens += [*range(len(one.tokens), len(one.tokens) + num_accepted)]
        manager.append_slots(one, lookahead)
        manager.mark_blocks_as_computed(group, 1)
        # All tokens except the newest are computed, or all tokens if each step adds exactly one.
        num_computed = len(one.tokens) - (num_accepted > 1)
        assert manager.get_num_cached_tokens(seq("s", 60)) == num_computed // 4 * 4


def test_cached_tokens_include_own_tokens_once_the_prompt_is_computed():
    manager = make(num_gpu_blocks=30, enable_caching=True)
    group = admitted(manager, 9)
    one = group.seqs[0]
    manager.mark_blocks_as_computed(group, 5)
    assert manager.get_num_cached_tokens(one) == 0  # the same count as at allocation
    manager.mark_blocks_as_computed(group, 4)
    assert manager.get_num_cached_tokens(one) == 8
    child = child_of(manager, one, "c")
    child.tokens += [5, 6, 7]
    manager.append_slots(child, 0)
    assert manager.get_num_cached_tokens(child) == 8
    manager.mark_blocks_as_computed(Group("t", [child]), 3)
    assert manager.get_num_cached_tokens(child) == 12


def test_repeated_queries_hash_a_sequence_once_and_distinguish_others_of_its_id():
    manager = make(enable_caching=True)
    manager.mark_blocks_as_computed(admitted(manager, 12), 12)
    one = seq("s", 6)
    assert manager.get_num_cached_tokens(one) == 4
    assert manager.get_num_cached_tokens(Seq("s", [9] * 6)) == 0
    assert manager.get_num_cached_tokens(one) == 4
    one.tokens = [None] * 6 + [6, 7, 8]  # only new tokens are read
    assert manager.get_num_cached_tokens(one) == 8
    manager.remove_seq_from_computed_blocks_tracker(one)
    one.tokens = [*range(5)]
    assert manager.get_num_cached_tokens(one) == 4
    one.extra = "x"
    assert manager.get_num_cached_tokens(one) == 0


@pytest.mark.parametrize("extra", ["lora-a", 7])
def test_sequences_with_different_extra_hashes_share_no_blocks(extra):
    manager = make(enable_caching=True)
    one = Seq("a", [*range(8)], extra=extra)
    group = Group("r", [one])
    manager.allocate(group)
    manager.mark_blocks_as_computed(group, 8)
    assert manager.get_num_cached_tokens(seq("b", 9)) == 0
    assert manager.get_num_cached_tokens(Seq("c", [*range(9)], extra=extra)) == 8


def test_extra_hash_is_optional_and_checked():
    class Plain:
        seq_id, status = "p", "WAITING"

        def get_len(self):
            return 4

        def get_token_ids(self):
            return np.arange(4)

    manager = make(enable_caching=True)
    manager.allocate(Group("r", [Plain()]))
    with pytest.raises(TypeError, match=r"extra_hash\(\) of seq 'q' is 1.5"):
        manager.allocate(Group("s", [Seq("q", [1], extra=1.5)]))


def test_common_computed_blocks_are_hits_of_all_sequences():
    manager = make(num_gpu_blocks=40, enable_caching=True)
    manager.mark_blocks_as_computed(admitted(manager, 12), 12)
    long, short = (admitted(manager, n, str(n)).seqs[0] for n in (12, 7))
    assert manager.get_common_computed_block_ids([long]) == [1, 2]
    assert manager.get_common_computed_block_ids([long, short]) == [1]
    cold = admitted(manager, 8, "cold", first=50).seqs[0]
    assert manager.get_common_computed_block_ids([long, cold]) == []
    assert manager.get_common_computed_block_ids([]) == []


def test_the_least_recently_accessed_is_evicted_first():
    manager = make(num_gpu_blocks=5, enable_caching=True)
    groups = [admitted(manager, 5, name, first=n) for name, n in (("a", 10), ("b", 20))]
    for group, now in zip(groups, (2.0, 1.0)):
        manager.mark_blocks_as_computed(group, 5)
        manager.access_all_blocks_in_seq(group.seqs[0], now)
    for group in groups:
        manager.free(group.seqs[0])
    admitted(manager, 9, "c", first=30)  # two uncached blocks and one cached block
    assert manager.get_num_cached_tokens(seq("d", 5, first=20)) == 0
    assert manager.get_num_cached_tokens(seq("d", 5, first=10)) == 4


def test_longest_prefix_of_an_access_is_evicted_first():
    manager = make(num_gpu_blocks=4, enable_caching=True)
    group = admitted(manager, 12)
    manager.mark_blocks_as_computed(group, 12)
    manager.access_all_blocks_in_seq(group.seqs[0], 1.0)
    manager.free(group.seqs[0])
    admitted(manager, 1, "s", first=50)
    assert manager.get_num_cached_tokens(seq("t", 13)) == 8


def test_access_times_must_be_finite_numbers():
    manager = make(enable_caching=True)
    group = admitted(manager)
    for now in (None, float("nan"), float("inf")):
        with pytest.raises((TypeError, ValueError), match=rf"now is {now}: expected a (finite )?n"):
            manager.access_all_blocks_in_seq(group.seqs[0], now)
    manager.access_all_blocks_in_seq(group.seqs[0], np.float32(5.5))


def test_stats_report_blocks_and_tokens():
    manager = make(num_gpu_blocks=40, enable_caching=True)
    assert manager.stats.num_requests == 0
    manager.mark_blocks_as_computed(admitted(manager, 9), 9)
    group = admitted(manager, 10, "s", num_seqs=2)
    stats = manager.stats
    assert (stats.num_requests, stats.query_tokens, stats.hit_tokens) == (2, 19, 8)
    assert stats.recent == stats.recent.__class__(2, 19, 8)
    assert stats.groups[0].stored_blocks == 2 and stats.host.swapped_out_blocks == 0
    swapped_out(manager, group)
    assert manager.stats.host.swapped_out_blocks == 3
    assert make(num_cpu_blocks=0).stats.host is None


def test_events_report_stored_and_removed_blocks():
    manager = make(num_gpu_blocks=4, enable_caching=True, enable_events=True)
    group = admitted(manager, 9)
    manager.mark_blocks_as_computed(group, 9)
    (stored,) = manager.drain_events()
    assert isinstance(stored, BlockStored) and stored.medium == "gpu"
    assert stored.token_ids.tolist() == [*range(8)] and stored.block_size == 4
    manager.free(group.seqs[0])
    admitted(manager, 8, "s", first=50)  # one free block and the leaf
    (removed,) = manager.drain_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes.tolist() == stored.block_hashes[1:].tolist()


def test_hit_rate_counts_full_blocks():
    manager = make(num_gpu_blocks=40, enable_caching=True)
    assert [manager.get_prefix_cache_hit_rate(each) for each in (Device.GPU, "cpu")] == [0.0, 0.0]
    manager.mark_blocks_as_computed(admitted(manager, 9), 9)
    admitted(manager, 9, "s")
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.5  # 2 of 4 full blocks
    assert manager.get_prefix_cache_hit_rate(Device.CPU) == 0.0
    for device in (Device.GPU, Device.CPU, "gpu", "cpu"):
        assert make().get_prefix_cache_hit_rate(device) == -1.0
    with pytest.raises(ValueError, match="device is 'tpu'"):
        manager.get_prefix_cache_hit_rate("tpu")
    with pytest.raises(TypeError, match="device is 3"):
        manager.get_prefix_cache_hit_rate(3)


def test_reset_is_rejected_while_a_block_is_in_use():
    manager = make(enable_caching=True)
    group = admitted(manager, 9)
    manager.mark_blocks_as_computed(group, 9)
    assert not manager.reset_prefix_cache()
    swapped_out(manager, group)
    assert not manager.reset_prefix_cache(Device.CPU)
    assert manager.get_num_cached_tokens(seq("s", 9)) == 8
    assert manager.reset_prefix_cache(Device.GPU)
    assert manager.get_num_cached_tokens(seq("s", 9)) == 0
    manager.free(group.seqs[0])
    assert manager.reset_prefix_cache()
    with pytest.raises(ValueError, match="device is 'disk'"):
        manager.reset_prefix_cache("disk")


def test_manager_belongs_to_its_first_thread():
    manager = make()
    group = admitted(manager)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="thread"):
        pool.submit(manager.free, group.seqs[0]).result()
    assert manager.get_block_table(group.seqs[0]) == [1, 2]


# Calls during a call -----------------------------------------------------------------------------------


class Calling(Seq):
    """A sequence that calls the manager once when its status is read, as a signal handler might."""

    call = None

    @property
    def status(self):
        call, self.call = self.call, None
        if call:
            call()
        return self._status

    @status.setter
    def status(self, value):
        self._status = value


def calling(num_seqs, num_tokens=9):
    manager = make(20, enable_caching=True)
    seqs = [Calling(i, [*range(num_tokens)]) for i in range(num_seqs)]
    group = Group("r", seqs)
    manager.allocate(group)
    group.set_status(Status.RUNNING)
    return manager, seqs, group


@pytest.mark.parametrize("call", [
    lambda manager, group: manager.mark_blocks_as_computed(group, 9),
    lambda manager, group: manager.swap_out(group),
])  # fmt: skip
@pytest.mark.parametrize("takes_row", [False, True])
def test_nested_change_makes_the_outer_call_fail(call, takes_row):
    manager, seqs, group = calling(3)
    other = Group("other", [seq("other", 9, first=100)])
    for each in seqs:
        each.tokens = [*range(11)]

    def change():
        manager.free(seqs[0])
        if takes_row:
            manager.allocate(other)

    seqs[2].call = change
    message = r"another call changed the manager during this call|seq 0 has no blocks"
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(manager, group)
    manager.check_invariants()
    assert manager.get_num_cached_tokens(seq("again", 9, first=100)) == 0
    manager.allocate(Group("new", [seq("new", 3)]))
    manager.check_invariants()


def test_append_slots_fails_if_get_len_changes_the_manager():
    manager, (first, second), _ = calling(2)

    class Changes:
        seq_id, status = second.seq_id, Status.RUNNING

        def get_len(self):
            manager.free(first)
            return 10

        def get_token_ids(self):
            return [*range(10)]

    with pytest.raises(RuntimeError, match="another call changed the manager"):
        manager.append_slots(Changes(), 0)
    manager.check_invariants()


@pytest.mark.parametrize("replaced", [4, 5])
@pytest.mark.parametrize("kind", [list, tuple])
def test_allocated_sequences_only_grow(replaced, kind):
    """A replaced token in the last block with slots is rejected, so that no block is cached with the
    KV of other tokens.
    """
    manager = make(enable_caching=True)
    (one,) = admitted(manager, 6).seqs
    tokens = [*range(6), 9]
    tokens[replaced] = 77
    one.tokens = kind(tokens)
    expected = rf"get_token_ids\(\)\[{replaced}\] of seq 'r0' is 77: expected {replaced}, as"
    with pytest.raises(ValueError, match=expected):
        manager.append_slots(one, 0)
    one.tokens = [*range(6), 9]
    assert manager.append_slots(one, 0) == []
    manager.check_invariants()


@pytest.mark.parametrize("ids", [7, None, np.array(3)])
def test_token_ids_that_are_no_sequence_are_named(ids):
    class Wrong(Seq):
        def get_token_ids(self):
            return ids

    manager = make(enable_caching=True)
    (parent,) = admitted(manager).get_seqs()
    wrong = Wrong("w", [*parent.tokens], Status.WAITING)
    for call in (
        lambda: manager.allocate(Group("r", [wrong])),
        lambda: manager.fork(parent, wrong),
        lambda: manager.append_slots(Wrong(parent.seq_id, [*parent.tokens, 1], Status.RUNNING), 0),
    ):
        with pytest.raises(
            TypeError, match=r"get_token_ids\(\) of seq '\w+' is .*: expected a seq"
        ):
            call()


def test_a_group_whose_kind_is_no_truth_value_is_named():
    class Wrong(Group):
        def is_encoder_decoder(self):
            return np.zeros(2)

    for call in ("can_allocate", "allocate"):
        with pytest.raises(
            TypeError, match=r"is_encoder_decoder\(\) is .*: expected True or False"
        ):
            getattr(make(), call)(Wrong("r", [seq("a", 5)]))


class CallingForTokens(Seq):
    """A sequence that calls the manager once when its token ids are read."""

    call = None

    def get_token_ids(self):
        call, self.call = self.call, None
        if call is not None:
            call()
        return super().get_token_ids()


@pytest.mark.parametrize("verb", ["allocate", "fork"])
def test_nested_call_for_the_same_sequence_keeps_its_blocks(verb):
    manager = BlockSpaceManager(4, 20, 0, enable_caching=True)
    parent, inner, outer = Seq(1, range(9)), Seq(2, range(9)), CallingForTokens(2, range(9))
    if verb == "allocate":
        outer.call = lambda: manager.allocate(Group("r", [inner]))
        outer_call = functools.partial(manager.allocate, Group("r", [outer]))
    else:
        manager.allocate(Group("p", [parent]))
        outer.call = lambda: manager.fork(parent, inner)
        outer_call = functools.partial(manager.fork, parent, outer)
    with pytest.raises(RuntimeError, match="another call changed the manager"):
        outer_call()
    manager.check_invariants()
    manager.free(inner)
    manager.free(parent)
    assert manager.get_num_free_gpu_blocks() == 19
