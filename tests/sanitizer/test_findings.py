# SPDX-License-Identifier: Apache-2.0
"""Each kind of finding, caused deliberately by otherwise correct calls."""

import numpy as np
import pytest

from kvcache.sanitizer import ReportKind, SanitizedGroup, Sanitizer, SanitizerError

FULL = SanitizedGroup("full", 4)


def sanitizer_of(*groups, **options) -> Sanitizer:
    return Sanitizer(groups or [FULL], 16, num_host_blocks=8, log=lambda report: None, **options)


def write(sanitizer, name, tokens, blocks, start=0, group=0):
    """Observe a request's tokens from `start` on, and observe that their KV is written to its
    blocks.
    """
    if sanitizer.num_tokens(name) < start:
        sanitizer.observe_request(name, tokens[:start])
    elif sanitizer.num_tokens(name) < 0:
        sanitizer.observe_request(name, [])
    count, size = len(tokens) - start, sanitizer.groups[group].block_size
    sanitizer.observe_tokens([name], [start], [count], tokens[start:])
    places = np.arange(start, len(tokens))
    slots = np.array(blocks)[places // size] * size + places % size
    sanitizer.observe_write(group, [name], [start], [count], slots, [blocks])


def read(sanitizer, name, length, blocks, start=0, group=0):
    sanitizer.observe_read(group, [name], [start], [length], np.array([blocks]))


def only(sanitizer, kind):
    (report,) = sanitizer.reports
    assert report.kind == kind, report
    return report


def test_wrong_block_names_both_requests():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3, 4, 5], [3, 1])
    write(sanitizer, "b", [9, 8, 7, 6, 5], [4, 2])
    read(sanitizer, "b", 5, [4, 1])
    report = only(sanitizer, ReportKind.WRONG_CONTENT)
    assert (report.request, report.position, report.block, report.offset) == ("b", 4, 1, 0)
    assert (report.writer, report.writer_position) == ("a", 4) and report.num_slots == 1
    lines = str(report).splitlines()
    assert 6 <= len(lines) <= 17 and "'a'" in lines[2]


@pytest.mark.parametrize("change", [{"adapter": "x"}, {"salt": "x"}, {"images": [(0, 2, "x")]}])
def test_adapters_salts_and_images_are_part_of_the_content(change):
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3], [1])
    sanitizer.observe_request("b", [1, 2, 3], **change)
    read(sanitizer, "b", 3, [1])
    only(sanitizer, ReportKind.WRONG_CONTENT)


def test_read_of_a_freed_block_is_reported():
    sanitizer = sanitizer_of()
    sanitizer.observe_allocation("a", [1, 2])
    write(sanitizer, "a", [1, 2, 3, 4, 5], [1, 2])
    read(sanitizer, "a", 5, [1, 2])
    sanitizer.observe_step()
    sanitizer.observe_free("a", [1])
    write(sanitizer, "a", [1, 2, 3, 4, 5, 6], [1, 2], start=5)
    read(sanitizer, "a", 6, [1, 2], start=5)
    report = only(sanitizer, ReportKind.FREED_AND_READ)
    assert report.block == 1 and [each.kind for each in report.events] == [
        *("allocated", "written", "freed")
    ]


def test_overwritten_shared_block_is_reported():
    sanitizer = sanitizer_of()
    for name in "ab":
        sanitizer.observe_allocation(name, [1])
    write(sanitizer, "a", [1, 2, 3], [1])
    write(sanitizer, "b", [1, 2, 3], [1], start=2)  # overwriting with equal content is harmless
    sanitizer.observe_step()
    sanitizer.reports.clear()
    write(sanitizer, "b", [1, 2, 9], [1], start=2)
    report = only(sanitizer, ReportKind.WRITE_TO_SHARED)
    assert report.request == "b" and "2 holders" in report.found


def test_slot_outside_the_pool_is_reported():
    sanitizer = sanitizer_of()
    sanitizer.observe_request("a", [1, 2])
    sanitizer.observe_write(0, ["a"], [0], [2], [4, 1_000_000])
    only(sanitizer, ReportKind.SLOT_MISMATCH)


def test_block_outside_the_pool_is_reported():
    sanitizer = sanitizer_of()
    sanitizer.observe_request("a", [1, 2])
    read(sanitizer, "a", 2, [99])
    assert "does not exist" in only(sanitizer, ReportKind.WRONG_CONTENT).found


def test_rejected_drafts_are_not_content():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3, 4], [1])
    read(sanitizer, "a", 4, [1])
    # Tokens 3 and 4 were rejected, and token 9 is not written.
    sanitizer.observe_tokens(["a"], [2], [1], [9])
    read(sanitizer, "a", 3, [1], start=2)
    assert only(sanitizer, ReportKind.WRONG_CONTENT).position == 2


def test_recurrent_states_and_their_copies_are_checked():
    sanitizer = sanitizer_of(SanitizedGroup("state", 4))
    sanitizer.observe_request("a", [1, 2, 3, 4, 5])
    sanitizer.observe_state_read(0, ["a"], [0], [1])
    sanitizer.observe_state_write(0, ["a"], [3], [1])
    sanitizer.observe_state_read(0, ["a"], [3], [1])
    sanitizer.observe_state_write(0, ["a", "a"], [4, 5], [1, 2])
    sanitizer.observe_copy([2], [3])
    sanitizer.observe_state_read(0, ["a"], [5], [3])
    assert not sanitizer.reports
    sanitizer.observe_state_read(0, ["a"], [5], [1])
    report = only(sanitizer, ReportKind.WRONG_STATE)
    assert report.writer_position == 3


def test_swaps_keep_content_and_exchanged_pages_are_reported():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2])
    sanitizer.observe_copy([1, 2], [3, 4], dst_medium="host")
    sanitizer.observe_clear([1, 2])
    sanitizer.observe_copy([3, 4], [6, 5], src_medium="host")
    read(sanitizer, "a", 8, [6, 5])
    assert not sanitizer.reports
    read(sanitizer, "a", 8, [5, 6])
    report = sanitizer.reports[0]
    assert report.kind == ReportKind.WRONG_CONTENT and "host block 4" in str(report)


def test_only_tokens_that_windows_and_chunks_read_are_checked():
    sanitizer = sanitizer_of(
        SanitizedGroup("window", 4, window=3), SanitizedGroup("chunk", 4, chunk=4)
    )
    tokens = [*range(9)]
    for group, blocks in ((0, [1, 2, 3]), (1, [4, 5, 6])):
        write(sanitizer, "a", tokens, blocks, group=group)
    read(sanitizer, "a", 9, [0, 2, 3], start=8, group=0)
    read(sanitizer, "a", 9, [0, 0, 6], start=8, group=1)
    assert not sanitizer.reports and sanitizer.slots_read == 3 + 1
    read(sanitizer, "a", 9, [0, 0, 3], start=8, group=0)
    assert "null block" in only(sanitizer, ReportKind.WRONG_CONTENT).found


def test_circular_windows_are_checked():
    sanitizer = sanitizer_of(SanitizedGroup("circular", 4, window=5, columns=2))
    sanitizer.observe_request("a", range(12))
    for first in (0, 4, 8):
        slots = [4 * (1 + first // 4 % 2) + i for i in range(4)]
        sanitizer.observe_write(0, ["a"], [first], [4], slots, [[1, 2]])
        read(sanitizer, "a", first + 4, [1, 2], start=first)
    assert not sanitizer.reports
    read(sanitizer, "a", 12, [1, 2], start=6)
    assert only(sanitizer, ReportKind.WRONG_CONTENT).position == 2


def test_read_of_another_groups_block_is_reported():
    sanitizer = sanitizer_of(FULL, SanitizedGroup("full", 8))
    write(sanitizer, "a", [1, 2, 3], [1])
    read(sanitizer, "a", 3, [1], group=1)
    assert "of group 0" in only(sanitizer, ReportKind.WRONG_CONTENT).found


def test_loaded_content_is_trusted():
    sanitizer = sanitizer_of(FULL, SanitizedGroup("state", 4))
    sanitizer.observe_request("a", range(6))
    sanitizer.observe_load(0, ["a"], [0], [6], [[1, 2]])
    sanitizer.observe_load(1, ["a"], [0], [6], [[3]])
    read(sanitizer, "a", 6, [1, 2])
    sanitizer.observe_state_read(1, ["a"], [6], [3])
    assert not sanitizer.reports


def test_each_finding_is_reported_once_and_all_are_counted():
    sanitizer = sanitizer_of(max_reports=1)
    write(sanitizer, "a", [1] * 8, [1, 2])
    for _ in range(3):
        read(sanitizer, "a", 8, [4, 5])
        read(sanitizer, "a", 8, [1, 2])
    assert len(sanitizer.reports) == 1 and sanitizer.counts.total() == 2


STATE = SanitizedGroup("state", 4)


def _begin(s, name, tokens=(1, 2, 3)):
    s.observe_request(name, tokens)


def _digests(s, name):
    _begin(s, name, [1, 2, 3, 4])
    s.observe_load(0, [name], [0], [4], [[2]])
    s.check_digests(0, [2], [9])


# For each kind, the correct calls before the defect, and the step of a request that is wrong. The
# step can be repeated.
DEFECTS = {
    "wrong-content": (lambda s: write(s, "v", [9] * 3, [3]), lambda s,
        name: (_begin(s, name), read(s, name, 3, [3]))),
    "read-before-written": (lambda s: None, lambda s,
        name: (_begin(s, name), read(s, name, 3, [3]))),
    "freed-and-read": (
        lambda s: (
            s.observe_allocation("v", [3]),
            write(s, "v", [1, 2, 3], [3]),
            s.observe_free("v", [3]),
        ),
        lambda s, name: (_begin(s, name), read(s, name, 3, [3])),
    ),
    "write-after-free": (lambda s: (s.observe_allocation("v", [3]), s.observe_free("v", [3])),
        lambda s, name: write(s, name, [1, 2, 3], [3])),
    "two-writers": (lambda s: s.observe_allocation("v", [3]), lambda s,
        name: write(s, name, [1, 2, 3], [3])),
    "write-to-shared": (
        lambda s: (
            [s.observe_allocation(each, [3]) for each in ("v", "w")],
            write(s, "v", [1, 2, 3], [3]),
        ),
        lambda s, name: write(s, name, [7, 8], [3]),
    ),
    "null-block-write": (lambda s: None, lambda s, name: write(s, name, [1], [0])),
    "slot-mismatch": (lambda s: None, lambda s,
        name: (_begin(s, name), s.observe_write(0, [name], [0], [1], [5], [[2]]))),
    "stale-row": (lambda s: None, lambda s,
        name: (_begin(s, name), s.finish(name), read(s, name, 1, [1]))),
    "read-beyond-length": (lambda s: None, lambda s,
        name: (write(s, name, [1, 2], [3]), read(s, name, 3, [3]))),
    "wrong-state": (lambda s: (_begin(s, "v"), s.observe_state_write(1, ["v"], [2], [3])),
        lambda s, name: (_begin(s, name), s.observe_state_read(1, [name], [3], [3]))),
    "wrong-load": (lambda s: (write(s, "v", [1, 2, 3, 4], [1]), s.observe_digests(0, [1], [5])),
        _digests),
    "skipped-token": (lambda s: None, lambda s,
        name: (_begin(s, name), s.observe_tokens([name], [4], [1], [5]))),
    "invalid-input": (lambda s: None, lambda s, name: s.reject(name, "expected another")),
}  # fmt: skip


def test_every_kind_has_a_defect():
    assert set(DEFECTS) == {str(kind) for kind in ReportKind}


@pytest.mark.parametrize("kind", DEFECTS)
def test_stop_raises_at_each_try_and_for_each_request(kind):
    sanitizer = sanitizer_of(FULL, STATE, mode="stop", every=3)
    prepare, wrong = DEFECTS[kind]
    prepare(sanitizer)
    sanitizer.observe_step(3)
    for num_requests, name in enumerate(["a", "a", "b", "a"], 1):
        for _ in range(3):  # the step is repeated, also in steps that are not sampled
            with pytest.raises(SanitizerError) as raised:
                wrong(sanitizer, name)
            assert raised.value.report.kind == kind and raised.value.report.request == name
            sanitizer.observe_step()
        if kind == "invalid-input":  # reported once per call
            continue
        sanitizer.finish(name)
        if kind not in ("stale-row", "wrong-load"):  # the step begins the request; "v" was loaded
            assert sanitizer.counts == {kind: num_requests}


def test_tokens_after_a_skipped_token_are_checked():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3], [1, 2])
    for start in (4, 5):
        sanitizer.observe_tokens(["a"], [start], [1], [7])
        sanitizer.observe_write(0, ["a"], [start], [1], [4 + start], [[1, 2]])
        read(sanitizer, "a", start + 1, [1, 2], start=start)
    assert sanitizer.counts == {"skipped-token": 1, "read-before-written": 1}
    write(sanitizer, "a", [1, 2, 3, 4, 7, 7], [1, 2], start=3)  # the token is computed after all
    read(sanitizer, "a", 6, [1, 2], start=3)
    assert sanitizer.counts.total() == 2


def test_sampling_checks_only_some_steps():
    sanitizer = sanitizer_of(every=2)
    sanitizer.observe_request("a", [1])
    sanitizer.observe_step(1)
    read(sanitizer, "a", 1, [1])
    assert not sanitizer.reports
    sanitizer.observe_step(2)
    read(sanitizer, "a", 1, [1])
    assert len(sanitizer.reports) == 1


def test_reset_forgets_requests_and_contents():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2], [1])
    sanitizer.reset()
    assert sanitizer.num_tokens("a") == -1
    sanitizer.observe_request("a", [1, 2])
    read(sanitizer, "a", 2, [1])
    only(sanitizer, ReportKind.READ_BEFORE_WRITTEN)


@pytest.mark.parametrize(("call", "message"), [
    (lambda s: SanitizedGroup("ring", 4), "kind is 'ring': expected one of 'full'"),
    (lambda s: SanitizedGroup("window", 4), "window is 0: expected"),
    (lambda s: Sanitizer([], 4), "groups is empty"),
    (lambda s: Sanitizer([FULL], 4, mode="off"), "mode is 'off': expected 'report' or 'stop'"),
    (lambda s: s.observe_write(1, ["a"], [0], [1], [4]), "group is 1: expected 0 to 0"),
    (lambda s: s.observe_write(0, ["a"], [0], [1], [4]), "'a' has 0 known tokens: expected 1"),
    (lambda s: s.observe_tokens(["a"], [99999], [1], [4]), r"starts\[0\] is 99999: expected at"),
    (lambda s: s.observe_tokens(["a"], [0], [2], [4]), "token_ids has 1 entries: expected 2"),
    (lambda s: s.observe_read(0, ["a"], [0], [9], [[1]]), "block_table has 1 columns"),
    (lambda s: s.observe_copy([1], [2], dst_medium="disk"), "dst_medium is 'disk': expected"),
    (lambda s: s.observe_free("a", [99]), r"blocks\[0\] is 99: expected 0 to 15"),
    (lambda s: s.observe_state_read(0, ["a"], [1], [1]), "expected a group of states"),
])  # fmt: skip
def test_invalid_arguments_are_rejected_in_one_line(call, message):
    sanitizer = sanitizer_of()
    sanitizer.observe_request("a", [])
    with pytest.raises(ValueError, match=message):
        call(sanitizer)


def test_states_and_pages_outside_the_pool_are_reported():
    sanitizer = sanitizer_of(SanitizedGroup("state", 4))
    sanitizer.observe_request("a", [1, 2, 3])
    sanitizer.observe_state_write(0, ["a"], [3], [-1])
    report = only(sanitizer, ReportKind.SLOT_MISMATCH)
    assert (report.expected, report.found) == ("a page from 0 to 15", "page -1")
    sanitizer.observe_state_read(0, ["a"], [3], [99])
    assert sanitizer.counts["wrong-state"] == 1
    with pytest.raises(ValueError, match="pages has 1 entries: expected 2, one per request_id"):
        sanitizer.observe_state_write(0, ["a", "a"], [3, 3], [1])


def test_content_with_many_digests_stays_unchecked():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3, 4], [1])
    for digest in range(32):
        sanitizer.observe_digests(0, [1], [digest])
    assert sanitizer.check_digests(0, [1], [0]) == 1
    sanitizer.observe_digests(0, [1], [32])
    assert sanitizer.check_digests(0, [1], [77]) == 0 and not sanitizer.reports


def test_loaded_bytes_are_compared_by_digest():
    sanitizer = sanitizer_of()
    write(sanitizer, "a", [1, 2, 3, 4], [1])
    sanitizer.observe_digests(0, [1], [5])
    sanitizer.finish("a")
    sanitizer.observe_request("b", [1, 2, 3, 4])
    sanitizer.observe_load(0, ["b"], [0], [4], [[2]])
    assert sanitizer.check_digests(0, [2], [5]) == 1 and not sanitizer.reports
    assert sanitizer.check_digests(0, [2], [6]) == 1
    report = only(sanitizer, ReportKind.WRONG_LOAD)
    assert (report.request, report.position, report.block) == ("b", 0, 2)


def test_request_listed_twice_is_rejected():
    sanitizer = sanitizer_of()
    sanitizer.observe_request("a", range(10))
    with pytest.raises(ValueError, match="request_ids has 'a' twice"):
        sanitizer.observe_tokens(["a", "a"], [0, 10], [1, 1], [1, 2])
    assert sanitizer.num_tokens("a") == 10
