# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile traces cause one-line errors that name the file and line, but never a
traceback.
"""

import gzip
import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from kvcache.cli import main
from kvcache_lab import TraceError, read_mooncake, read_trace, trace_forms
from kvcache_lab_tests.test_traces import BAILIAN, MESSAGES, MOONCAKE, SGLANG, VLLM

SEED = int(os.environ.get("KVCACHE_FUZZ_SEED", "1"))
LINES = {
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "tokens": {"token_ids": [1, 2, 3], "timestamp": 3, "output_length": 2},
    "text": {"messages": MESSAGES, "timestamp": 3, "output_length": 2},
    "vllm_log": VLLM.format(s=1, ids=[1, 2, 3]),
    "sglang_log": SGLANG.format(s=5, text=repr('it\'s "me"\n'), ids=None),
}
JUNK = [
    "NaN", "-Infinity", "1e400", "-1", "1.5", "9" * 5000, "9" * 400, "2147483648", "true", "null",
    '"\\ud800"', '"\\u0000"', "[]", "{}", "[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900,
    "[1 2]", "[,]", "'\\x'", "'\\N{a}'", "Request a" + ": " * 3000, "\ufeff", "\r", "\0", "\x1b[2J",
]  # fmt: skip


def text_of(line):
    return line if isinstance(line, str) else json.dumps(line)


def mutated(rng, form):
    """Return a trace in the given format that is damaged in one or two places."""
    line = LINES[form]
    if isinstance(line, dict) and rng.random() < 0.5:
        line = dict(line)
        name = rng.choice([*line])
        if rng.random() < 0.2:
            del line[name]
        text = json.dumps({**line, name: "JUNK"}).replace('"JUNK"', rng.choice(JUNK))
    else:
        text = text_of(line)
    data = bytearray("\n".join([text_of(LINES[form]), text, text_of(LINES[form])]).encode())
    for _ in range(rng.choice([0, 1, 1, 2, 10])):
        at, kind = rng.randrange(len(data)), rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.choice([1, 2, 30])]
        elif kind == 2:
            data[at:at] = rng.choice(JUNK).encode("utf-8", "surrogatepass")
        elif kind == 3:
            data[at:at] = rng.randbytes(3)
        elif len(data) > 1:
            del data[at:]
        data = data or bytearray(b"\n")
    wrap = rng.randrange(20)
    if wrap == 0:
        return gzip.compress(bytes(data))[: rng.randrange(1, 60)]
    if wrap == 1:
        return bytes(data).decode(errors="replace").encode("utf-16")
    if wrap == 2:
        return b"\xef\xbb\xbf" + bytes(data)
    return bytes(data).replace(b"\n", b"\r\n") if wrap == 3 else bytes(data)


def check_read(path, form):
    """Read a trace. Any error must name the file and the line."""
    started = time.process_time()
    try:
        for request in read_trace(path, form):
            assert request.num_tokens > 0 and request.output_length >= 0
            if request.num_tokens > 10_000:
                break
    except TraceError as error:
        text = str(error)
        assert text.startswith(str(path)) and "expected" in text and len(text) < 600
        assert "\n" not in text
    assert time.process_time() - started < 3.0


@pytest.mark.slow
def test_damaged_traces_are_read_or_reported(tmp_path):
    rng, path = random.Random(SEED), tmp_path / "trace"
    for i in range(1500):
        form = rng.choice([*LINES])
        data = mutated(rng, form)
        path.write_bytes(data)
        try:
            check_read(path, rng.choice([form, form, None, rng.choice(trace_forms())]))
        except Exception as error:
            error.add_note(f"seed {SEED}, trace {i}, {form}: {data[:300]!r}")
            raise


def test_endless_line_is_rejected(monkeypatch):
    from kvcache_lab.traces import registry

    monkeypatch.setattr(registry, "MOST_LINE_BYTES", 2**16)
    with pytest.raises(TraceError, match="/dev/zero, line 1: has more than 65536 bytes: expected"):
        list(read_trace("/dev/zero"))


WRONG_PATHS = [0, 1, True, False, None, b"trace", bytearray(b"a"), 1.5, ["a"]]


@pytest.mark.parametrize("path", WRONG_PATHS, ids=repr)
@pytest.mark.parametrize("read", [read_trace, read_mooncake])
def test_invalid_path_types_are_rejected(read, path):
    with pytest.raises(TypeError, match=r"path is .*: expected a string or an os\.PathLike"):
        read(path)


@pytest.mark.parametrize("path", ["", "a\0b", Path("a\0b")], ids=repr)
def test_impossible_path_is_rejected(path):
    with pytest.raises(ValueError, match=r"path is .*: expected the name of a file"):
        read_trace(path)


def test_command_prints_one_line_for_non_traces(tmp_path, capsys):
    empty, fifo = tmp_path / "empty", tmp_path / "fifo"
    empty.touch()
    os.mkfifo(fifo)
    writer = subprocess.Popen(["sh", "-c", f"printf 'no trace\\n' > {fifo}"])
    for path in (tmp_path, empty, fifo, tmp_path / "none", "a" * 5000, "\udcff", "/dev/null"):
        code = main(["replay", str(path), "--num-blocks", "200"])
        out, err = capsys.readouterr()
        assert code in (0, 2) and err.count("\n") == (1 if code else 0) and "Traceback" not in out
    assert writer.wait() == 0
