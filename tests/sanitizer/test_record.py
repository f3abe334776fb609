# SPDX-License-Identifier: Apache-2.0
"""Records of calls: replaying them gives the same findings as in the engine, and damaged files give
a one-line error.
"""

import zlib

import numpy as np
import pytest

from kvcache.cli import main
from kvcache.sanitizer import RecordError, SanitizedGroup, Sanitizer, replay_record
from kvcache.sanitizer import record as record_module
from kvcache.sanitizer import replay as replay_module

GROUPS = [SanitizedGroup("full", 4), SanitizedGroup("state", 4)]


def recorded(path, **options) -> Sanitizer:
    """Record calls of every kind, some of which cause findings."""
    options = {"num_host_blocks": 4, "log": lambda report: None, "record": path} | options
    sanitizer = Sanitizer(GROUPS, 16, **options)
    tokens = [5, 1_000_003, 7, 8, 9, 10]
    for step, (name, blocks) in enumerate({"alice": [1, 2], "bob": [3, 4]}.items()):
        sanitizer.observe_step(step)
        sanitizer.observe_request(name, tokens, salt=name, images=[(1, 2, "cat")])
        sanitizer.observe_allocation(name, [*blocks, 5 + step])
        slots = [4 * blocks[i // 4] + i % 4 for i in range(6)]
        sanitizer.observe_tokens([name], [0], [6], tokens)
        sanitizer.observe_write(0, [name], [0], [6], slots, np.array([blocks], np.int32))
        sanitizer.observe_read(0, [name], [0], [6], np.array([blocks], np.int32))
        sanitizer.observe_state_write(1, [name], [6], [5 + step])
        sanitizer.observe_state_read(1, [name], [6], [5])
    sanitizer.observe_copy([1], [2], dst_medium="host")
    sanitizer.observe_copy([2], [9], src_medium="host")
    sanitizer.observe_clear([2])
    sanitizer.observe_load(0, ["bob"], [0], [4], [[10]])
    sanitizer.observe_free("alice", [1])
    sanitizer.observe_read(0, ["bob"], [0], [6], [[1, 4]])
    sanitizer.finish("alice")
    sanitizer.observe_read(0, ["alice"], [0], [6], [[1, 2]])
    sanitizer.close()
    return sanitizer


def test_replay_has_the_same_findings(tmp_path):
    before = recorded(tmp_path / "a")
    after = replay_record(tmp_path / "a", log=lambda report: None)
    assert before.counts == after.counts and before.num_reports >= 3
    places, replayed = (
        [
            (r.kind, r.step, r.group, r.position, r.block, [event.kind for event in r.events])
            for r in each.reports
        ]
        for each in (before, after)
    )
    assert places == replayed
    assert (before.slots_read, before.slots_written) == (after.slots_read, after.slots_written)


def test_record_contains_neither_tokens_nor_request_names(tmp_path):
    recorded(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()[record_module.HEADER.size :]
    plain = b""
    while data:
        _, length, _ = record_module.CHUNK.unpack(data[: record_module.CHUNK.size])
        data = data[record_module.CHUNK.size :]
        plain += zlib.decompress(data[:length])
        data = data[length:]
    assert b"alice" not in plain and (1_000_003).to_bytes(4, "little") not in plain


def test_calls_longer_than_a_chunk_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "FLUSH_BYTES", 64)
    for module in (record_module, replay_module):
        monkeypatch.setattr(module, "MAX_CHUNK_BYTES", 200)
    before = recorded(tmp_path / "a")
    assert replay_record(tmp_path / "a", log=lambda report: None).counts == before.counts


def test_findings_before_the_end_of_a_truncated_record_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "FLUSH_BYTES", 1)
    before = recorded(tmp_path / "a")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-5])
    with pytest.raises(RecordError, match="cut off") as raised:
        replay_record(tmp_path / "b", log=lambda report: None)
    assert raised.value.sanitizer.counts == before.counts


def repacked(data: bytes, change) -> bytes:
    """Return a record whose calls were altered by `change`, with correct CRCs."""
    out, data = data[: record_module.HEADER.size], data[record_module.HEADER.size :]
    while data:
        kind, length, _ = record_module.CHUNK.unpack(data[: record_module.CHUNK.size])
        payload = zlib.decompress(data[record_module.CHUNK.size :][:length])
        data = data[record_module.CHUNK.size + length :]
        packed = zlib.compress(change(kind, payload))
        out += record_module.CHUNK.pack(kind, len(packed), zlib.crc32(packed)) + packed
    return out


@pytest.mark.parametrize("has_right_checksums", [False, True])
def test_forged_records_are_rejected_in_one_line(has_right_checksums, tmp_path, monkeypatch):
    recorded(tmp_path / "a")
    data, rng = (tmp_path / "a").read_bytes(), np.random.default_rng(5)

    def flipped(payload):
        payload = bytearray(payload)
        for _ in range(rng.integers(1, 4)):
            if payload:
                place, wild = rng.integers(len(payload)), rng.random() < 0.3
                payload[place] = 255 if wild else rng.integers(256)
        return bytes(payload[: rng.integers(len(payload) + 1)] if rng.random() < 0.2 else payload)

    monkeypatch.setattr(replay_module, "_MAX_BYTES", 1 << 24)
    num_refused = 0
    for _ in range(400):
        forged = (
            repacked(data, lambda kind, payload: flipped(payload))
            if has_right_checksums
            else flipped(data)
        )
        (tmp_path / "b").write_bytes(forged)
        try:
            replay_record(tmp_path / "b", log=lambda report: None)
        except RecordError as error:
            num_refused += 1
            assert "\n" not in str(error) and len(str(error)) < 400
    assert num_refused > 300


def test_huge_sizes_are_rejected_before_memory_is_allocated(tmp_path):
    recorded(tmp_path / "a")
    forged = repacked(
        (tmp_path / "a").read_bytes(),
        lambda kind, payload: payload.replace(b'"device": 16', b'"device": 1600000000'),
    )
    (tmp_path / "b").write_bytes(forged)
    with pytest.raises(RecordError, match="expected at most"):
        replay_record(tmp_path / "b")


def test_command_prints_reports(tmp_path, capsys):
    recorded(tmp_path / "a")
    assert main(["sanitize", str(tmp_path / "a")]) == 1
    printed = capsys.readouterr().out
    assert "wrong-state: request" in printed and "slots read" in printed
    assert main(["sanitize", "--json", str(tmp_path / "a")]) == 1
    assert '"kind": "wrong-state"' in capsys.readouterr().out


def test_command_exits_with_0_if_nothing_was_found(tmp_path, capsys):
    sanitizer = Sanitizer(GROUPS, 4, record=tmp_path / "a")
    sanitizer.observe_step()
    sanitizer.close()
    assert main(["sanitize", str(tmp_path / "a")]) == 0


@pytest.mark.parametrize("content", [None, b"", b"KVSANREC\x02\x00", b"KVSANREC\x01\x00"])
def test_command_rejects_other_files_in_one_line(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    assert main(["sanitize", str(tmp_path / "a")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1


def test_full_disk_ends_the_record_but_not_the_checks():
    sanitizer = Sanitizer([SanitizedGroup("full", 4)], 8, log=lambda report: None)
    sanitizer._recorder = type("Full", (), {"write": _fail, "close": _fail})()
    sanitizer.observe_request("a", [1])
    sanitizer.observe_write(0, ["a"], [0], [1], [4])
    sanitizer.observe_read(0, ["a"], [0], [1], [[2]])
    assert sanitizer.counts == {"read-before-written": 1}


def _fail(*arguments):
    raise OSError("No space left on device")
