# SPDX-License-Identifier: Apache-2.0
"""Readers of traces: detection of the format, names of formats, and malformed lines."""

import gzip
import json
import warnings

import numpy as np
import pytest

from kvcache.cli import main
from kvcache_lab import TraceError, optimum, read_trace, register_trace_form, trace_forms
from kvcache_lab.traces import registry

TOKENS = [1, 5, 2**31 - 1]
VLLM = (
    "INFO 07-30 12:34:5{s} [logger.py:41] Received request cmpl-{s}: prompt: 'a prompt_token_ids: [9]', "
    "params: SamplingParams(n=1, stop=[], max_tokens=16), prompt_token_ids: {ids}, "
    "prompt_embeds shape: None, lora_request: None."
)
VLLM_DEBUG = (
    "DEBUG 07-30 12:34:5{s} [logger.py:39] Request chat-{s} details: prompt: None, "
    "prompt_token_ids: {ids}, prompt_embeds shape: None."
)
SGLANG = (
    "[2025-07-30 12:34:5{s}] Receive: obj=GenerateReqInput(rid='7', text={text}, input_ids={ids}, "
    "sampling_params={{'stop': [1, 2]}})"
)
NOISE = ["INFO 07-30 12:34:50 [api.py] Started", "Uvicorn running", "{not JSON", '{"a": 1}']
BAILIAN = {"chat_id": 7, "timestamp": 61.114, "input_length": 40, "output_length": 3, "turn": 1}
BAILIAN |= {"hash_ids": [3, 4, 9]}
MOONCAKE = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def written(tmp_path, *lines):
    path = tmp_path / "trace"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


@pytest.mark.parametrize(("form", "lines", "arrivals", "lengths", "answers"), [
    ("mooncake", [MOONCAKE], [5], [600], [7]),
    ("bailian", [BAILIAN, {**BAILIAN, "hash_ids": [3, 4]}], [61_114] * 2, [40, 40], [3, 3]),
    ("tokens", [{"token_ids": TOKENS}, {"input_ids": [1]}], [0, 0], [3, 1], [0, 0]),
    ("tokens", [{"prompt_token_ids": TOKENS, "timestamp": 9, "output_length": 4}], [9], [3], [4]),
    ("text", [{"prompt": "Hi, you there!"}, {"messages": MESSAGES}], [0, 0], [5, 16], [0, 0]),
    (
        "vllm_log",
        [*NOISE[:2], VLLM.format(s=1, ids=TOKENS), VLLM_DEBUG.format(s=3, ids=[4])],
        [0, 2_000],
        [3, 1],
        [0, 0],
    ),
    (
        "sglang_log",
        [
            *NOISE[:2],
            SGLANG.format(s=1, text=None, ids=TOKENS),
            SGLANG.format(s=5, text=repr('it\'s "me"\n'), ids=None),
        ],
        [0, 4_000],
        [3, 6],
        [0, 0],
    ),
])  # fmt: skip
def test_each_format_is_detected_and_read(tmp_path, form, lines, arrivals, lengths, answers):
    path = written(tmp_path, *lines)
    requests = list(read_trace(path))
    assert [each.index for each in requests] == list(range(len(requests)))
    assert [each.arrival_ms for each in requests] == arrivals
    assert [each.num_tokens for each in requests] == lengths == [len(r.content) for r in requests]
    if form in ("tokens", "vllm_log"):
        assert requests[0].token_ids.tolist() == TOKENS
    assert [each.output_length for each in requests] == answers
    assert all(each.token_ids.dtype == np.int32 for each in requests)
    again = list(read_trace(path, form))
    for one, two in zip(requests, again, strict=True):
        assert np.array_equal(one.token_ids, two.token_ids)
        assert np.array_equal(one.content, two.content)
    assert form in trace_forms()


def test_equal_prefixes_hit_and_partial_blocks_do_not(tmp_path):
    rest = {**BAILIAN, "hash_ids": [3, 4]}  # the last 8 tokens have no hash id
    requests = list(read_trace(written(tmp_path, BAILIAN, rest, rest, {**BAILIAN, "chat_id": 8})))
    assert optimum(requests, 16, 100) == 3 * 32 / 160
    # The same hits as those of the first request.
    assert optimum(requests, 8, 100) == (32 + 32 + 40) / 160
    texts = [{"prompt": "a b c d"}, {"prompt": "a b c e"}, {"prompt": "a  b\nc d"}]
    assert optimum(list(read_trace(written(tmp_path, *texts))), 1, 100) == (3 + 4) / 12


@pytest.mark.parametrize(("form", "line", "says"), [
    ("bailian", {**BAILIAN, "timestamp": -1}, "timestamp is -1: expected a number of seconds"),
    ("bailian", {**BAILIAN, "timestamp": True}, "timestamp is true: expected a number"),
    ("bailian", {**BAILIAN, "timestamp": 1e300}, "timestamp is 1e+300: expected a number"),
    (
        "bailian",
        {**BAILIAN, "hash_ids": [3]},
        "hash_ids has 1 entries: expected 2 or 3, one per 16",
    ),
    ("bailian", {**BAILIAN, "input_length": 32}, "hash_ids has 3 entries: expected 2, one per 16"),
    ("tokens", {"ids": [1]}, "token_ids is missing: expected one of token_ids, prompt_token_ids"),
    ("tokens", {"token_ids": []}, "token_ids is []: expected at least one token"),
    (
        "tokens",
        {"token_ids": [2**31]},
        r"token_ids[0] is 2147483648: expected a whole number from 0",
    ),
    ("tokens", {"token_ids": [1], "timestamp": 1.5}, "timestamp is 1.5: expected a whole number"),
    ("text", {"prompt": " \n"}, 'prompt is " \\n": expected at least one word'),
    ("text", {"prompt": 7}, "prompt is 7: expected a string"),
    (
        "text",
        {"messages": "a"},
        'messages is "a": expected a list of objects with role and content',
    ),
    ("text", {"messages": [{"role": "a"}]}, "content is missing: expected it in every line"),
    ("text", {"a": 1}, "prompt is missing: expected it in every line"),
    ("vllm_log", VLLM.format(s=1, ids=[2**31]), "has token 2147483648: expected at most"),
    (
        "sglang_log",
        "Receive: obj=GenerateReqInput(rid='7', sampling_params={})",
        "has neither input_ids nor text: expected a log with prompts (--log-requests-level 3)",
    ),
    # Lines that the fuzzer found.
    ("mooncake", {**MOONCAKE, "timestamp": 10**400}, "timestamp is 1000"),
    ("mooncake", {**MOONCAKE, "output_length": 2**31}, "output_length is 2147483648"),
    ("mooncake", {**MOONCAKE, "input_length": 10**30}, "input_length is 1000"),
    ("text", {"prompt": "a", "timestamp": 2**53}, "timestamp is 9007199254740992"),
    ("vllm_log", VLLM.format(s=1, ids="[1 2]"), 'has token "1 2"'),
    ("vllm_log", VLLM.format(s=1, ids=f"[{'9' * 5000}]"), "has token 9999"),
    ("sglang_log", SGLANG.format(s=5, text=r"'\x'", ids=None), r'text is "'),
    ("sglang_log", SGLANG.format(s=5, text=r"'\N{no such}'", ids=None), "text is "),
    ("mooncake", "[" * 100_000, "not JSON"),
    ("mooncake", "7", "is 7: expected a JSON object"),
    ("mooncake", {**MOONCAKE, "timestamp": -1}, "timestamp is -1: expected a whole number of 0"),
    ("mooncake", {**MOONCAKE, "input_length": True}, "input_length is true: expected a whole"),
    ("mooncake", {**MOONCAKE, "input_length": 2**24 + 512}, "expected at most 16777216"),
    ("mooncake", {**MOONCAKE, "output_length": None}, "output_length is null: expected a whole"),
    ("mooncake", {**MOONCAKE, "hash_ids": [0, 1.0]}, "hash_ids[1] is 1.0: expected a whole number"),
    ("mooncake", {**MOONCAKE, "hash_ids": [-4, 1]}, "hash_ids[0] is -4: expected a whole number"),
    ("mooncake", {**MOONCAKE, "hash_ids": [10**11, 1]}, "hash_ids[0] is 100000000000: expected"),
    ("mooncake", '{"hash_ids": ' + "[" * 900 + "]" * 900 + "}", "timestamp is missing"),
    ("mooncake", {**MOONCAKE, "hash_ids": "\ud800"}, r'hash_ids is "\ud800"'),
])  # fmt: skip
def test_malformed_line_is_reported(tmp_path, form, line, says):
    path = written(tmp_path, "", line)
    with pytest.raises(TraceError) as error:
        list(read_trace(path, form))
    assert str(error.value).startswith(f"{path}, line 2: ") and says in str(error.value)


def test_text_with_an_unknown_escape_is_read_without_a_warning(tmp_path):
    path = written(tmp_path, SGLANG.format(s=5, text=r"'a\s b'", ids=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (request,) = read_trace(path, "sglang_log")
    assert request.num_tokens == 4  # a, a backslash, s, b


def test_block_size_of_mooncake_traces_is_inferred(tmp_path):
    lines = [
        {"timestamp": i, "input_length": n, "output_length": 1, "hash_ids": [*range(-(-n // 16))]}
        for i, n in enumerate([9, 40, 33])
    ]
    requests = list(read_trace(written(tmp_path, *lines)))
    assert [each.num_tokens for each in requests] == [9, 40, 33]
    assert optimum(requests, 16, 100) == 32 / 82
    wrong = {**lines[2], "hash_ids": [0, 1]}
    with pytest.raises(TraceError, match="line 3: hash_ids has 2 entries: expected 3, one per 16"):
        list(read_trace(written(tmp_path, *lines[:2], wrong)))
    odd = {**lines[0], "hash_ids": [0, 1]}
    with pytest.raises(TraceError, match="hash_ids has 2 entries: expected 1, one per 512"):
        list(read_trace(written(tmp_path, odd)))


def compressed(how, data):
    if how == "gzip":
        return gzip.compress(data)
    return pytest.importorskip("zstandard").compress(data)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_compressed_traces_are_read_directly(tmp_path, how):
    plain = written(tmp_path, *[{"prompt": f"a b {i}"} for i in range(20_000)])
    packed = tmp_path / "packed"
    data = plain.read_bytes()
    packed.write_bytes(compressed(how, data[:1_000]) + compressed(how, data[1_000:]))
    for one, two in zip(read_trace(plain), read_trace(packed), strict=True):
        assert np.array_equal(one.token_ids, two.token_ids)
    whole = packed.read_bytes()
    for damaged in (whole[:-9], whole[:40], whole[:100] + b"\0" * 50 + whole[150:]):
        packed.write_bytes(damaged)
        with pytest.raises(
            TraceError, match=r"packed, line \d+: (the compressed data is cut off|not)"
        ):
            list(read_trace(packed))


def test_zstandard_files_with_skippable_frames_and_large_windows_are_read(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    plain = written(tmp_path, *[{"prompt": f"a b {i}"} for i in range(20)])
    data = plain.read_bytes()
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    large = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = tmp_path / "packed"
    frames = [zstandard.compress(data), large.compress(data) + large.flush()]
    frames += [bytes([magic]) + b"\x2a\x4d\x18\x04\0\0\0abcd" + frames[0] for magic in (0x50, 0x5F)]
    for frame in frames:
        packed.write_bytes(frame)
        assert len(list(read_trace(packed))) == 20
        assert registry.is_compressed(packed)
    assert not registry.is_compressed(plain)


def test_missing_zstandard_package_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "trace.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    monkeypatch.setattr(registry, "zstandard", None)
    with pytest.raises(
        TraceError, match=r"trace.zst is compressed with .* install .torch-kvcache\[cli\]"
    ):
        list(read_trace(path))


def test_log_without_requests_is_reported(tmp_path):
    path = written(tmp_path, *NOISE[:2])
    with pytest.raises(TraceError, match="has no requests: expected requests of form 'vllm_log'"):
        list(read_trace(path, "vllm_log"))
    with pytest.raises(TraceError, match="line 1: not JSON"):
        list(read_trace(path))
    assert list(read_trace(written(tmp_path, ""))) == []


def test_unknown_formats_are_reported(tmp_path, capsys):
    path = written(tmp_path, MOONCAKE)
    with pytest.raises(
        ValueError, match="form is 'x': expected one of bailian, mooncake, sglang_log"
    ):
        read_trace(path, "x")
    assert main(["replay", str(path), "--format", "x"]) == 2
    assert "--format is 'x': expected one of bailian" in capsys.readouterr().err
    assert main(["replay", "--format", "text"]) == 2
    assert "--format is 'text': expected only with TRACE" in capsys.readouterr().err
    with pytest.raises(ValueError, match="name is 'text': expected a name that is not in use"):
        register_trace_form("text", lambda line, record: False)(iter)


def test_bailian_blocks_without_an_id_are_unique(tmp_path):
    record = {**BAILIAN, "hash_ids": [3, 4]}
    first, second = read_trace(written(tmp_path, record, record))
    assert np.array_equal(first.content[:32], second.content[:32])
    assert not {*first.content[32:].tolist()} & {*second.content[32:].tolist()}


def test_log_may_omit_the_time(tmp_path):
    lines = [VLLM_DEBUG.format(s=3, ids=[4]).partition("] ")[2], VLLM.format(s=3, ids=[5])]
    lines += ["07-99 12:34:55 " + VLLM_DEBUG.format(s=3, ids=[4]).partition("] ")[2]]
    assert [each.arrival_ms for each in read_trace(written(tmp_path, *lines))] == [0, 0, 0]
