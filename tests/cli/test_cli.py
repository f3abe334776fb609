# SPDX-License-Identifier: Apache-2.0
"""The command line: JSON output, one-line errors and lazy imports."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvcache
from kvcache.cli import doctor, main
from kvcache_lab.cli.replay import _num_expected
from tests.machinery.shared import REPO, sampled

LINE = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
TOTALS = {
    "requests", "prompt_tokens", "hit_blocks", "hit_tokens", "token_hit_rate", "evicted_blocks",
    "rejected_requests", "us_per_request", "block_size", "num_blocks", "capacity_blocks",
    "peak_used_blocks", "cached_blocks", "trace",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text((json.dumps(LINE) + "\n") * 3)
    return str(path)


def run_json(capsys, *argv) -> dict:
    """Run a replay and return its JSON object. Nothing else may be printed to stdout."""
    assert main(["replay", *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    return json.loads(out)


def spawn(*argv, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvcache", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPO, **pipes, **kwargs)


# --- replay ---------------------------------------------------------------------------------------


def test_replay_of_a_trace_reports_its_totals(capsys, trace):
    found = run_json(capsys, trace)
    assert found.keys() >= TOTALS
    assert "mismatches" not in found
    assert found["trace"] == "small.jsonl"
    assert (found["requests"], found["prompt_tokens"], found["hit_blocks"]) == (3, 1800, 2)
    assert (found["block_size"], found["num_blocks"], found["capacity_blocks"]) == (
        512, 10_001, 10_000,
    )  # fmt: skip


def test_command_line_options_reach_the_replay(capsys, trace):
    found = run_json(
        capsys, trace, "--block-size", "16", "--num-blocks", "101", "--limit", "2",
        "--concurrency", "2", "--verify", "--device", "cpu",
    )  # fmt: skip
    assert (found["block_size"], found["num_blocks"], found["requests"]) == (16, 101, 2)
    assert (found["concurrency"], found["hit_blocks"], found["peak_used_blocks"]) == (2, 37, 39)
    assert (found["verified_tokens"], found["mismatches"]) == (1200, 0)


def test_replay_without_a_trace_uses_chats(capsys):
    found = run_json(capsys, "--seed", "5", "--requests", "30", "--num-blocks", "400")
    assert (found["trace"], found["block_size"], found["requests"]) == ("chat (seed 5)", 16, 30)
    same = run_json(capsys, "--seed", "5", "--requests", "30", "--num-blocks", "400")
    other = run_json(capsys, "--seed", "6", "--requests", "30", "--num-blocks", "400")
    assert found["hit_tokens"] == same["hit_tokens"] != other["hit_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--timed"]])
def test_plot_option_writes_a_figure(capsys, trace, tmp_path, options):
    pytest.importorskip("matplotlib")
    run_json(capsys, trace, *options, "--plot", str(tmp_path / "figure.png"))
    content = (tmp_path / "figure.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


@pytest.mark.slow
def test_reasons_of_misses_are_printed(capsys, tmp_path):
    assert main(["replay", "--requests", "60", "--why", "--num-blocks", "200"]) == 0
    printed = capsys.readouterr().out
    assert "missed tokens" in printed and "evicted" in printed and "not seen before" in printed
    plain = run_json(capsys, "--requests", "60", "--num-blocks", "200")
    found = run_json(capsys, "--requests", "60", "--num-blocks", "200", "--why")
    assert sum(found.pop("missed_tokens").values()) == found["prompt_tokens"] - found["hit_tokens"]
    for each in (plain, found):
        del each["us_per_request"]
    assert found == plain
    path = tmp_path / "figure.png"
    run_json(capsys, "--requests", "20", "--why", "--timed", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv", [["plan"], ["replay", "--timed"], ["replay", "--timed", "--compare", "lru"]]
)
def test_unordered_trace_prints_one_line(capsys, tmp_path, argv):
    path = tmp_path / "back.jsonl"
    path.write_text("".join(json.dumps({**LINE, "timestamp": at}) + "\n" for at in (9, 4)))
    assert error_of(capsys, argv[0], str(path), *argv[1:]) == (
        "kvcache: back.jsonl: request 1 arrives at 4 ms, but the previous request at 9 ms: expected a "
        "timed trace in order of arrival\n"
    )


@pytest.mark.parametrize("limit", [None, 2, 9])
def test_number_of_expected_requests_is_unknown_for_compressed_traces(trace, tmp_path, limit):
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(Path(trace).read_bytes()))
    args = argparse.Namespace(trace=trace, limit=limit)
    assert _num_expected(args) == min(3, limit or 3)
    args.trace = str(packed)
    assert _num_expected(args) == limit


def arriving_each_second(tmp_path, output_length) -> str:
    """Write a trace of 20 prompts of one block, and return its path."""
    path = tmp_path / "each_second.jsonl"
    lines = ({**LINE, "timestamp": 1000 * i, "input_length": 512, "hash_ids": [i],
              "output_length": output_length} for i in range(20))  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_warning_reports_an_overloaded_engine(capsys, tmp_path):
    path = arriving_each_second(tmp_path, 1)
    found = run_json(capsys, path, "--timed", "100,50")
    says = "requests arrive within 19 s, but their prefill takes 5.4 times as long"
    assert found["overload"] == says
    assert main(["replay", path, "--timed", "100,50"]) == 0
    assert "overloaded" in capsys.readouterr().out
    assert run_json(capsys, path, "--timed", "10000,50").get("overload") is None


def test_waiting_for_blocks_is_reported_as_overload(capsys, tmp_path):
    path = arriving_each_second(tmp_path, 100)
    found = run_json(capsys, path, "--timed", "10000,20", "--num-blocks", "3")
    assert found["overload"].startswith("requests arrive within 19 s, and the last request waited ")


# --- groups ---------------------------------------------------------------------------------------


def test_groups_are_replayed_verified_and_reported(capsys):
    found = run_json(
        capsys, "--requests", "40", "--verify", "--concurrency", "3", "--chunk-tokens", "100",
        "--hash-block-size", "4",
        "--groups", "full_attention,sliding_window:window=100:block_size=8,recurrent:block_size=64",
    )  # fmt: skip
    assert (found["mismatches"], found["verified_tokens"]) == (0, found["prompt_tokens"])
    assert (found["hash_block_size"], found["chunk_tokens"]) == (4, 100)
    assert [(each["kind"], each["block_size"], each["options"]) for each in found["groups"]] == [
        ("full_attention", 16, {}),
        ("sliding_window", 8, {"window": 100}),
        ("recurrent", 64, {}),
    ]
    hits = [each["hit_blocks"] for each in found["groups"]]
    assert min(hits) > 0 and sum(hits) == found["hit_blocks"]
    for each in found["groups"]:
        assert each.keys() >= {"stored_blocks", "evicted_blocks"}


def test_table_has_one_row_per_group(capsys):
    groups = "full_attention,sliding_window:window=64"
    assert main(["replay", "--requests", "20", "--groups", groups]) == 0
    out = capsys.readouterr().out
    for text in ("full_attention", "sliding_window window=64", "over all groups", "stored"):
        assert text in out


@pytest.mark.parametrize(("groups", "says"), [
    ("fast_attention", "'fast_attention': its kind is 'fast_attention': expected one of chunked"),
    ("", "'': its kind is '': expected one of"),
    ("sliding_window:block_size=8",
     "'sliding_window:block_size=8': options of kind 'sliding_window' are {}: expected window=N"),
    ("chunked_local:size=3", "'chunked_local' are {'size': 3}: expected chunk_size=N"),
    ("sliding_window:window=0", "'sliding_window:window=0': window is 0: expected 1 to"),
    ("sliding_window:window=" + "9" * 5000, "...': expected a whole number of at most"),
    ("sliding_window:window", "'window' is not an option: expected option=value"),
    ("sliding_window:window=1:window=2", "'window' is given twice: expected it once"),
    ("full_attention:block_size=0", "block_size is 0: expected 1 to 2147483647"),
    ("full_attention,cross_attention", "in a replay, whose prompts have no encoder tokens"),
    (",".join(["full_attention"] * 33), "33 groups: expected at most 32"),
])  # fmt: skip
def test_invalid_groups_print_one_line(capsys, groups, says):
    error = error_of(capsys, "replay", "--groups", groups, "--json")
    assert error.startswith("kvcache: --groups has ") and says in error
    # Ignore the kinds registered by other tests.
    own = re.sub(r"\btest_\w+, |, test_\w+", "", error)
    assert len(own) < 400


OWN_KIND = str(REPO / "examples" / "own_attention_kind.py")


def test_imported_attention_kind_is_replayed_and_verified(capsys):
    found = run_json(
        capsys, "--requests", "40", "--verify", "--concurrency", "3", "--chunk-tokens", "48",
        "--import", OWN_KIND, "--import", OWN_KIND,
        "--groups", "full_attention,segment_local:segment=32:lookback=2:block_size=8",
    )  # fmt: skip
    assert (found["mismatches"], found["verified_tokens"]) == (0, found["prompt_tokens"])
    assert found["groups"][1]["kind"] == "segment_local"
    assert found["groups"][1]["options"] == {"segment": 32, "lookback": 2}
    assert found["groups"][1]["hit_blocks"] > 0
    error = error_of(
        capsys, "replay", "--import", OWN_KIND, "--groups", "segment_local:lookback=2", "--json"
    )
    assert "'segment_local' are {'lookback': 2}: expected segment=N [lookback=N]" in error


@pytest.mark.parametrize(("text", "says"), [
    (None, "expected an existing file, FILE.py"),
    ("x = 1\n1 / 0\n", "it raised ZeroDivisionError: division by zero, line 2"),
    ("def", "it raised SyntaxError: "),
    ("raise SystemExit(3)", "it raised SystemExit: 3, line 1"),
    (
        "from kvcache.kinds import AttentionKind, register\n"
        "register('full_attention')(AttentionKind)\n",
        "ValueError: name is 'full_attention': expected a name that is not in use, line 2",
    ),
])  # fmt: skip
def test_failed_import_prints_one_line(capsys, tmp_path, text, says):
    path = tmp_path / "kind.py"
    if text is not None:
        path.write_text(text)
    error = error_of(capsys, "replay", "--import", str(path), "--json")
    assert error.startswith("kvcache: --import is '") and says in error


def test_invalid_attention_kind_prints_one_line(capsys, tmp_path):
    path = tmp_path / "kind.py"
    path.write_text(
        "from kvcache.kinds import AttentionKind, register\n"
        "@register('test_negative')\n"
        "class Negative(AttentionKind):\n"
        "    def first_needed_token(self, num_computed_tokens):\n"
        "        return -1\n"
    )
    arguments = ("--verify", "--import", str(path), "--groups", "test_negative", "--json")
    error = error_of(capsys, "replay", *arguments)
    assert error == (
        "kvcache: --groups is 'test_negative': Negative.first_needed_token(0) is -1: expected 0 to 0\n"
    )


@pytest.mark.parametrize("groups", [[], ["--groups", "full_attention,recurrent:block_size=24"]])
def test_hash_block_size_must_divide_blocks(capsys, groups):
    error = error_of(capsys, "replay", "--hash-block-size", "7", *groups, "--json")
    least = 8 if groups else 16
    assert "--hash-block-size is 7: expected a divisor of every group's block size" in error
    assert error.endswith(f"so of {least}\n")


# --- eviction and the host tier -------------------------------------------------------------------


def test_replay_reports_the_hits_of_a_store(capsys):
    found = run_json(capsys, "--requests", "100", "--num-blocks", "150", "--store-blocks", "3000")
    assert found["hit_tokens"] > found["store_hit_tokens"] > 0
    assert found["store_blocks"] == 3000 and found["store_evicted_blocks"] == 0
    assert (
        main(["replay", "--requests", "100", "--num-blocks", "150", "--store-blocks", "3000"]) == 0
    )
    assert "store hits" in capsys.readouterr().out


TIERED = ("--requests", "200", "--num-blocks", "400", "--host-blocks", "2000")


@pytest.mark.slow
def test_replay_with_a_host_tier_is_verified_and_reported(capsys):
    found = run_json(
        capsys, *TIERED, "--requests", "60", "--num-blocks", "200", "--verify",
        "--concurrency", "3", "--chunk-tokens", "64",
        "--groups", "full_attention,sliding_window:window=64,recurrent",
        "--eviction", "learned", "--host-eviction", "learned",
        "--host-write", "back:0.01",
    )  # fmt: skip
    assert (found["mismatches"], found["verified_tokens"]) == (0, found["prompt_tokens"])
    assert (found["eviction"], found["host_eviction"]) == ("learned", "learned")
    assert (found["host_blocks"], found["host_write"]) == (2000, "back:0.01")
    assert found["hit_tokens"] > found["host_hit_tokens"] > 0
    assert found["written_blocks"] > 0 < found["loaded_blocks"]


def test_table_has_a_host_section(capsys):
    assert main(["replay", *TIERED, "--eviction", "learned", "--host-write", "through"]) == 0
    out = capsys.readouterr().out
    for text in (
        "learned",
        "host capacity",
        "1,999",
        "write through, lru",
        "host hits",
        "host loads",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--eviction", "x"], "--eviction is 'x': expected one of last_access, learned, lru, prior"),
        (
            ["--eviction", "priority:share=1"],
            "--eviction is 'priority:share=1': option 'share' is 1: expected one of the options 'default",
        ),
        (["--eviction", "learned:share=1"], "option 'share' is 1: expected no options"),
        (["--eviction", "priority:share"], "'share' is not an option: expected option=value"),
        (["--eviction", "x" * 999], "...': expected one of"),
        (["--compare", "lru", "--eviction", "lru"], "--eviction is given with --compare: expected"),
        (["--compare", "--why"], "--why is given with"),
        (["--compare", "--verify"], "--verify is given with --compare: expected only one of the two"),
        (["--sizes", "100"], "--sizes is given without --compare: expected both, or use --num-blocks"),
        (["--compare", "--sizes", "9,1"], "--sizes is '1': expected a whole number from 2 to"),
        (["--host-blocks", "1"], "--host-blocks is 1: expected 2 or more (one is the null block)"),
        (["--store-blocks", "9", "--verify"], "--store-blocks is 9 with --verify: expected only one"),
        (["--compare", "--store-blocks", "9"], "--store-blocks is given with --compare: expected"),
        (
            ["--store-blocks", "9", "--groups", "full_attention:cached=0"],
            "--groups is 'full_attention:cached=0': group 0 has cached=False and transferred=True",
        ),
        (["--host-write", "back"], "--host-write is 'back': expected only with --host-blocks"),
        (["--host-eviction", "lru"], "--host-eviction is 'lru': expected only with --host-blocks"),
        (
            ["--host-blocks", "9", "--host-eviction", "priority"],
            "--host-eviction is 'priority': expected one of learned, lru",
        ),
        *(
            (["--host-blocks", "9", "--host-write", value], f"--host-write is {value!r}: expected {says}")
            for value, says in (
                ("never", "back, back:G, through or through:G"),
                ("back:1.1", "a gain G from 0 to 1"),
            )
        ),
        (
            ["--host-blocks", "2147483647", "--verify"],
            "--num-blocks 1025 and --host-blocks 2147483647 and --concurrency 1 is too much to verify",
        ),
    ],
)  # fmt: skip
def test_invalid_policies_and_host_tiers_print_one_line(capsys, argv, says):
    error = error_of(capsys, "replay", *argv, "--json")
    assert says in error and len(error) < 400


# --- wrong KV -------------------------------------------------------------------------------------


def write_nothing(verifier, span):
    """Replace `KVVerifier.write`: clear the pages instead, because they may contain data from an
    earlier replay.
    """
    verifier.storage.pages.layer(0).zero_()


def test_wrong_kv_is_reported_with_exit_code_1(capsys, monkeypatch, trace):
    from kvcache_lab.verifier import KVVerifier

    monkeypatch.setattr(KVVerifier, "write", write_nothing)
    assert main(["replay", trace, "--verify", "--json", "--limit", "1"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["mismatches"] == 600
    assert found["mismatched_requests"] == [
        {"request": 0, "token": 0, "block_column": 0, "block_id": 1}
    ]
    assert err == "kvcache: request 0, token 0: wrong KV in block 1 (block column 0)\n"


def test_many_requests_with_wrong_kv_are_summarized(capsys, monkeypatch):
    from kvcache_lab.verifier import KVVerifier

    monkeypatch.setattr(KVVerifier, "write", write_nothing)
    assert main(["replay", "--requests", "15", "--verify", "--json"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 11
    assert err[-1] == "kvcache: wrong KV in 5 more requests"


# --- demo and doctor ------------------------------------------------------------------------------


def test_replay_demo_prints_a_summary(capsys, monkeypatch):
    monkeypatch.setattr("kvcache_lab.cli.replay._DEMO", ["--requests", "100", "--verify"])
    assert main(["demo", "--replay"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Shown: 100 turns of interleaved chats" in out
    assert "had exactly its own K and V." in out


def test_doctor_checks_every_component(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("python", "numpy", "torch", "_core", "SHA-256", "CPU ops", "nvcc"):
        assert name in out


def test_doctor_lists_missing_packages(capsys, monkeypatch):
    def broken():
        raise ImportError("no such thing\nand a long story")

    monkeypatch.setattr(doctor, "_torch", broken)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert {"what": "torch", "found": "missing: no such thing", "ok": False} in found["rows"]
    assert [row["what"] for row in found["rows"] if not row["ok"]] == ["torch"]


# --- errors ---------------------------------------------------------------------------------------


def error_of(capsys, *argv, code=2) -> str:
    """Run a command that must fail with this exit code and print a single line to stderr. Return
    the line.
    """
    assert main(list(argv)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcache: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "option",
    [
        "--block-size", "--num-blocks", "--limit", "--concurrency", "--requests", "--seed",
        "--hash-block-size", "--chunk-tokens", "--host-blocks",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["-1", "many", "1.5", "", "nan", "9" * 5000])
def test_invalid_count_names_the_option(capsys, option, value):
    error = error_of(capsys, "replay", option, value, "--json")
    shown = value if len(value) < 40 else "9" * 37 + "..."
    assert f"{option} is '{shown}': expected a whole number from " in error


@pytest.mark.parametrize(("argv", "says"), [
    ([], "COMMAND"),
    (["fly"], "'fly'"),
    (["replay", "--fly"], "'--fly' is unknown: expected an option that `kvcache replay --help`"),
    (["demo", "--replay", "--json"], "--json cannot be combined with --replay"),
    (["demo", "--replay", "--users", "2"], "--users cannot be combined with --replay"),
    (["demo", "--users", "0"], "--users is '0': expected a whole number from 1 to 1000"),
    (["demo", "--plot", "no/such/a.png"], "--plot is 'no/such/a.png': expected an existing"),
    (["replay", "--limit"], "--limit: expected one argument"),
    (["replay", "--num-blocks", "1"], "--num-blocks is '1': expected a whole number from 2"),
    (["replay", "no/such.jsonl"], "TRACE is 'no/such.jsonl': expected an existing file"),
    (["replay", "."], "TRACE is '.': expected a file, not a directory"),
    (["replay", "--device", "abacus"], "--device is 'abacus': expected cpu, cuda or cuda:N"),
    (["replay", "--plot", "no/such/a.png"], "--plot is 'no/such/a.png': expected an existing"),
    (["replay", "--plot", "a.jpeg"], "--plot is 'a.jpeg': expected a file name that ends in"),
    (["replay", "--verify", "--block-size", "2147483647", "--num-blocks", "2"],
     "--block-size 2147483647 with --num-blocks 2 and --concurrency 1 is too much to verify"),
    (["replay", "--verify", "--num-blocks", "2147483647"],
     "--block-size 16 with --num-blocks 2147483647 and --concurrency 1 is too much to verify"),
    (["replay", "--verify", "--groups", "full_attention", "--num-blocks", "2147483647"],
     "--groups 'full_attention' with --num-blocks 2147483647 and --concurrency 1 is"),
    (["replay", "--fly" * 99], "'--fly--fly--fly--fly--fly--fly--fly--...' is unknown"),
])  # fmt: skip
def test_invalid_usage_prints_one_line(capsys, argv, says):
    assert says in error_of(capsys, *argv)


def test_version_option_prints_the_package_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"kvcache {kvcache.__version__}\n", "")


@pytest.mark.parametrize(("option", "value"), [("--seed", "3"), ("--requests", "3")])
def test_chat_options_conflict_with_a_trace(capsys, trace, option, value):
    says = f"{option} is {value}: expected only without TRACE"
    assert says in error_of(capsys, "replay", trace, option, value)


def test_cuda_device_requires_cuda(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        name, says = "cuda:99", "--device is 'cuda:99': expected at most cuda:"
    else:
        name, says = "cuda", "--device is 'cuda': expected cpu"
    assert says in error_of(capsys, "replay", "--device", name, "--json")


@pytest.mark.parametrize("options", [[], ["--compare"]])
def test_empty_trace_prints_one_line(capsys, tmp_path, options):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    error = error_of(capsys, "replay", str(path), *options, "--json")
    assert f"TRACE is '{path}': expected one request or more, the file has none" in error


@pytest.mark.parametrize("width", ["40", "60", "80"])
def test_tables_fit_narrow_terminals(capsys, monkeypatch, trace, width):
    monkeypatch.setenv("COLUMNS", width)
    for argv in (
        ["replay", trace, "--timed", "--host-blocks", "9", "--store-blocks", "9"],
        ["replay", trace, "--compare", "lru,learned", "--sizes", "11,21,31"],
        ["doctor"],
    ):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert "…" not in out and max(map(len, out.splitlines())) <= int(width)


def test_plot_needs_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = str(tmp_path / "a.png")
    error = error_of(capsys, "replay", "--json", "--plot", path, code=1)
    assert (
        "--plot needs matplotlib, which is not installed: pip install 'torch-kvcache[cli]'" in error
    )


# --- the process ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "unwanted"), [
    (["--help"], ["torch", "numpy", "rich", "matplotlib", "kvcache._core"]),
    (["replay", "--help"], ["torch", "numpy", "rich", "matplotlib", "kvcache._core"]),
    (["replay", "--requests", "5", "--json"], ["torch", "rich", "matplotlib"]),
])  # fmt: skip
def test_heavy_modules_are_imported_lazily(argv, unwanted):
    script = (
        "import sys; from kvcache.cli import main; code = main(sys.argv[1:]); "
        f"print([m for m in {unwanted!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, *argv]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--json"], []])
def test_closed_pipe_exits_quietly(argv):
    process = spawn("replay", "--requests", "5", *argv)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 130


FULL = "kvcache: standard output cannot be written: No space left on device\n"
CLOSED = "kvcache: standard output is closed: expected it open, /dev/null at least\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", sampled(["", "1"]))
@pytest.mark.parametrize("argv", [["replay", "--requests", "5", "--json"], ["doctor"]])
def test_full_disk_prints_one_line(argv, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    assert in_shell(argv, ">/dev/full", environment) == (1, "", FULL)


@pytest.mark.parametrize("argv", [["replay", "--requests", "5", "--json"], ["doctor"], ["--help"]])
def test_closed_stdout_prints_one_line(argv):
    assert in_shell(argv, ">&-") == (1, "", CLOSED)


@pytest.mark.slow
def test_closed_or_full_stderr_affects_neither_stdout_nor_exit_code():
    code, out, _ = in_shell(["replay", "--requests", "5", "--json"], "2>&-")
    assert code == 0 and json.loads(out)["requests"] == 5
    assert in_shell(["replay", "--limit", "0"], "2>&-") == (2, "", "")
    if os.path.exists("/dev/full"):
        assert in_shell(["replay", "--limit", "0"], "2>/dev/full") == (2, "", "")


def in_shell(argv, redirection, environment=None) -> tuple[int, str, str]:
    """Run a command with shell redirection. Return its exit code, stdout and stderr."""
    command = shlex.join([sys.executable, "-m", "kvcache", *argv])
    done = subprocess.run(
        ["sh", "-c", f"{command} {redirection}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_progress_bar_appears_only_on_a_terminal_without_json(trace):
    assert "3/3" in terminal_output("replay", trace)
    assert terminal_output("replay", trace, "--json") == ""


def terminal_output(*argv) -> str:
    """Run a command on a terminal. It must succeed. Return its stderr."""
    terminal, stderr = os.openpty()
    command = [sys.executable, "-m", "kvcache", *argv]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
    )
    assert done.returncode == 0
    os.set_blocking(terminal, False)
    try:
        return os.read(terminal, 1 << 16).decode()
    except BlockingIOError:  # nothing was written
        return ""
    finally:
        os.close(stderr)
        os.close(terminal)


@pytest.mark.slow
def test_interrupt_exits_quietly(tmp_path):
    fifo = tmp_path / "endless.jsonl"
    os.mkfifo(fifo)
    process = spawn("replay", str(fifo), "--json")
    with open(fifo, "w") as trace:  # opening the FIFO blocks until the reader has opened it
        trace.write(json.dumps(LINE) + "\n")
        trace.flush()
        wait_until_asleep(process.pid)  # the process has read the line and waits for more
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def wait_until_asleep(pid: int, timeout_s: float = 60.0) -> None:
    """Wait until a process has used no CPU time for half a second."""
    deadline, last, quiet = time.monotonic() + timeout_s, None, 0
    while quiet < 10:
        assert time.monotonic() < deadline, f"process {pid} does not become idle"
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        times = fields[10:12]  # user and system time
        quiet = quiet + 1 if state == "S" and times == last else 0
        last = times
        time.sleep(0.05)


def test_python_m_returns_the_exit_code():
    process = spawn("replay", "--limit", "0")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "kvcache: --limit is '0': expected a whole number from 1 to 2147483647\n"
