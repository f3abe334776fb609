# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a GPU: stages that fail, hang, crash or print garbage, and machines that lack
tools.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import build as build_stage
from benchmarks.gpu import checks, machine, rehearsal, say, sizes, table, workspace
from benchmarks.gpu.report import Report
from benchmarks.gpu.run import Run
from benchmarks.gpu.stages import FIRST, SECOND, STAGES, Stage, of_lease
from tests.machinery import roots
from tests.machinery.shared import REPO, sampled


def stage(name, code, limit_s=30.0, **options):
    program = (sys.executable, "-c", textwrap.dedent(code))
    options = {"log": "checks", "answers": "a question", "needs_build": False, **options}
    return Stage(name, limit_s, program, **options)


class Runner:
    """A run of fake stages, with its output and the files that it writes."""

    def __init__(self, folder, total_s=120.0):
        self.printed = []
        self.report = Report(folder / "results", "gpu-fake", {"commit": "abc"})
        self.run = Run(self.report, folder, dict(os.environ), total_s, say=self.printed.append)

    def all(self, *stages):
        return self.run.all(stages)

    @property
    def stages(self):
        return json.loads(self.report.path.read_text())["lease 1"]["stages"]

    @property
    def text(self):
        return "\n".join(self.printed)


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


GOOD = 'print(\'{"case": 1, "us": 2.5}\'); print(\'{"learned": "it is fast"}\')'


def test_rows_and_findings_are_kept_and_reported(runner):
    assert runner.all(stage("one", GOOD))
    found = runner.stages["one"]
    assert found["status"] == "ok" and found["rows"] == [{"case": 1, "us": 2.5}]
    assert found["learned"] == ["it is fast"] and "it is fast" in runner.text


@pytest.mark.slow
@pytest.mark.parametrize(("code", "status"), [
    ("raise SystemExit(7)", "exit code 7"),
    ("1 / 0", "exit code 1"),
    ("import os; os.kill(os.getpid(), 11)", "died by SIGSEGV"),
    ("import os; os.kill(os.getpid(), 9)", "died by SIGKILL"),
    ("import time; time.sleep(60)", "ran longer than 5 s"),
    ('print(\'{"failed": "op x: wrong"}\')', "1 failed"),
])  # fmt: skip
def test_failed_stage_keeps_its_output_and_the_next_stage_runs(runner, code, status):
    limit_s = 30.0
    bad = f"print('{{\"case\": 3}}', flush=True); print('in the log', flush=True); {code}"
    if "sleep" in code:  # on a busy machine, an interpreter may take a second to start
        bad = "import os; os.write(1, b'{\"case\": 3}\\nin the log\\n'); " + code
        limit_s = 5.0
    assert not runner.all(stage("bad", bad, limit_s), stage("good", GOOD))
    found = runner.stages
    assert found["bad"]["status"] == status
    assert found["bad"]["rows"] == [{"case": 3}] and "in the log" in found["bad"]["output"]
    assert "in the log" in (runner.report.folder / "gpu-fake-checks.log").read_text()
    assert found["good"]["status"] == "ok"


def alive(marker):
    found = []
    for path in (p for p in os.listdir("/proc") if p.isdigit()):
        try:
            with open(f"/proc/{path}/cmdline", "rb") as file:
                found += [path] if marker.encode() in file.read() else []
        except OSError:
            pass
    return found


# A process in its own session whose parent has exited can no longer be attributed to a stage.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("new_session", "ends"), sampled([(True, False), (False, False), (False, True)])
)
def test_processes_started_by_a_stage_end_with_it(runner, tmp_path, new_session, ends):
    marker = f"stage-child-of-{os.getpid()}-{new_session}-{ends}"
    ready = tmp_path / "ready"
    child = (
        f"import time, pathlib; pathlib.Path({str(ready)!r}).touch(); time.sleep(600) # {marker}"
    )
    code = f"""
        import pathlib, subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session={new_session})
        while not pathlib.Path({str(ready)!r}).exists():
            time.sleep(0.01)
        print("started", flush=True)
        {"time.sleep(0)" if ends else "time.sleep(600)"}
    """
    start = time.monotonic()
    runner.all(stage("parent", code, 60 if ends else 8))
    assert time.monotonic() - start < 50
    assert ready.exists()
    deadline = time.monotonic() + 20
    while alive(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(marker)


GARBAGE = [
    b"\xff\xfe\x00\x01\n",
    b'{not json}\n{\n[1, 2]\n"text"\n',
    b'{"us": NaN, "rate": Infinity, "large": 1e999}\n',
    b'{"case": "\\ud800"}\n{"learned": "\\udfff"}\n',
    b"[" * 100_000 + b"\n" + b'{"a":' * 100_000 + b"\n",
    b"x" * 3_000_000,
    b'{"n": ' + b"9" * 5000 + b"}\n",
    b"\r\n\r\n{}\n",
    b'{"learned": 3}\n{"failed": null}\n',
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_garbage_in_the_output_affects_neither_the_run_nor_the_json(runner, tmp_path, number):
    (tmp_path / "garbage").write_bytes(GARBAGE[number])
    path = str(tmp_path / "garbage")
    write = f"import sys; sys.stdout.buffer.write(open({path!r}, 'rb').read())"
    assert runner.all(stage("garbage", write), stage("good", GOOD))

    def no_constant(text):
        raise AssertionError(f"{text} is no JSON")

    found = json.loads(runner.report.path.read_text(), parse_constant=no_constant)["lease 1"]
    assert found["stages"]["good"]["status"] == "ok"
    if number == 2:
        assert found["stages"]["garbage"]["rows"] == [{"us": None, "rate": None, "large": None}]


@pytest.mark.slow
def test_stages_after_the_time_limit_are_reported_as_not_run(tmp_path):
    runner = Runner(tmp_path, total_s=8.0)
    assert not runner.all(stage("long", "import time; time.sleep(60)", 4.0), stage("late", GOOD))
    assert runner.stages["long"]["status"] == "ran longer than 4 s"
    assert runner.stages["late"]["status"] == "not run: no time left"


def test_stages_that_lack_something_are_named_and_the_others_run(runner):
    """A stage may lack the libraries, a package, or a tool, for which it skips itself."""
    assert not runner.all(
        stage("build", "raise SystemExit(1)"),
        stage("op", GOOD, needs_build=True),
        stage("tests", GOOD, needs=("no_such_package",)),
        stage("replay", 'print(\'{"skipped": "no such tool here"}\')'),
        stage("free", GOOD),
    )
    found = {name: each["status"] for name, each in runner.stages.items()}
    assert found["op"] == "not run: no libraries were built" and found["free"] == "ok"
    assert "no_such_package" in found["tests"]
    assert found["replay"] == "skipped" and "no such tool here" in runner.text


def test_interrupted_run_keeps_earlier_results(runner):
    def interrupt(text):
        if "now" in text:
            raise KeyboardInterrupt

    runner.run._say = interrupt
    with pytest.raises(KeyboardInterrupt):
        runner.all(
            stage("one", GOOD),
            stage("two", 'print(\'{"case": 9}\'); print(\'{"learned": "now"}\')'),
        )
    assert runner.stages["one"]["status"] == "ok"
    assert runner.stages["two"]["status"] == "interrupted"
    assert runner.stages["two"]["rows"] == [{"case": 9}]


def test_carried_libraries_must_match_the_sources(tmp_path):
    with pytest.raises(ValueError, match=workspace.MANIFEST):
        workspace.carried(tmp_path)
    workspace.write_manifest(tmp_path)
    with pytest.raises(ValueError, match=r"has no libkvcache_cpu\.so"):
        workspace.carried(tmp_path)
    for name in workspace.OPS:
        (tmp_path / name).touch()
    assert [path.name for path in workspace.carried(tmp_path)] == sorted(workspace.OPS)
    manifest = json.loads((tmp_path / workspace.MANIFEST).read_text())
    manifest["sources"] = "0" * 16
    (tmp_path / workspace.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="built from the sources 0000000000000000"):
        workspace.carried(tmp_path)


@pytest.fixture
def carrying(tmp_path, monkeypatch):
    """A package without libraries, carried libraries, and a build stage that writes empty files."""
    given, package = tmp_path / "given", tmp_path / "kvcache"
    given.mkdir()
    package.mkdir()
    workspace.write_manifest(given)
    for name in (build_stage.CORE, *workspace.OPS):
        (given / name).write_text("carried")
    built = []

    def fake(with_cuda, arch):
        built.append((with_cuda, arch))
        for name in (build_stage.CORE, *workspace.OPS):
            if not (package / name).exists():
                (package / name).write_text("built")

    monkeypatch.setattr(build_stage, "build", fake)
    monkeypatch.setattr(say, "_num_failed", 0)
    return given, package, built


def test_carried_libraries_that_do_not_load_are_rebuilt(carrying, monkeypatch, capsys):
    given, package, built = carrying
    problems = ["undefined symbol: no_such_function", None]
    monkeypatch.setattr(build_stage, "loading_problem", lambda: problems.pop(0))
    assert build_stage.provide(package, given, "90") == 1
    assert built == [(True, "90")]
    assert {path.read_text() for path in package.glob("*.so")} == {"built"}
    rows = [json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert "no_such_function" in next(row["failed"] for row in rows if "failed" in row)
    assert any("libraries" in row for row in rows)  # the other stages run afterwards


def test_carried_libraries_that_load_are_used_and_nothing_is_built(carrying, monkeypatch):
    given, package, built = carrying
    monkeypatch.setattr(build_stage, "loading_problem", lambda: None)
    assert build_stage.provide(package, given, "90") == 0 and built == []
    assert {path.read_text() for path in package.glob("*.so")} == {"carried"}


def gpu(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine lacks none of the tools")
def test_make_gpu_lists_missing_tools_and_leaves_no_files(tmp_path):
    done = gpu("--results", str(tmp_path))
    assert done.returncode == 1
    assert "make gpu: this machine lacks" in done.stderr
    assert "CUDA" in done.stderr and not list(tmp_path.iterdir())


def test_only_option_includes_the_build_and_rejects_unknown_stages(capsys):
    assert [each.name for each in command.chosen(FIRST, ["swaps"])] == ["build", "swaps"]
    assert [each.name for each in command.chosen(SECOND, ["nixl"])] == ["build", "nixl"]
    # The facts stage runs before the build and does not need it.
    assert command.chosen(FIRST, ["facts"]) == []
    assert [each.name for each in command.chosen(FIRST, ["build"])] == ["build"]
    for number in (FIRST, SECOND):
        assert command.chosen(number, None) == of_lease(number)[1:]
    for other in (["--only", "everything"], ["--lease", "3"]):
        with pytest.raises(SystemExit):
            command.parse(other)
        assert re.search(f"invalid choice: '?{other[-1]}", capsys.readouterr().err)


@pytest.mark.parametrize(("lease", "option"), [("", ""), ("1", " --lease 1"), ("2", " --lease 2")])
def test_make_gpu_forwards_its_variables(lease, option):
    for target, first in (("gpu", "--results x"), ("gpu-rehearsal", "--rehearse")):
        done = subprocess.run(
            ["make", "-n", target, f"LEASE={lease}", "PYTHON=p", "GPU_RESULTS=x"],
            capture_output=True, text=True, cwd=REPO,
        )  # fmt: skip
        assert f"p -m benchmarks.gpu {first}{option}" in done.stdout
        assert ("--lease" in done.stdout) == bool(lease)
        command.parse(f"{first}{option}".split())


def test_chosen_stages_are_added_to_the_results_and_a_new_run_keeps_them_aside(tmp_path):
    report = Report(tmp_path, "gpu", {})
    report.contents["stages"] = {"kernels": {"rows": [1]}, "nixl": {"rows": [2]}}
    report.save()
    log = report.log("rates", "kernels", "")
    log.close("ok")
    only = Report(tmp_path, "gpu", {}, True)
    only.contents["stages"]["nixl"] = {"rows": [3]}
    only.save()
    only.log("rates", "nixl", "").close("ok")
    stages = {"kernels": {"rows": [1]}, "nixl": {"rows": [3]}}
    assert json.loads(report.path.read_text()) == {"lease 1": {"stages": stages}}
    assert (tmp_path / "gpu-rates.log").read_text().count("== ok") == 2
    second = Report(tmp_path, "gpu-second", {"commit": "abc"})
    second.save()
    both = {"lease 1": {"stages": stages}, "lease 2": {"commit": "abc", "stages": {}}}
    assert second.path == report.path and json.loads(report.path.read_text()) == both
    assert not list(tmp_path.glob("*-before.json"))
    Report(tmp_path, "gpu", {}).save()
    assert json.loads(report.path.read_text()) == {**both, "lease 1": {"stages": {}}}
    assert json.loads((tmp_path / "gpu-before.json").read_text()) == both


def test_facts_that_crash_end_the_run_with_their_reason(tmp_path, monkeypatch, capsys):
    def crashes(facts, started):
        facts.take("ImportError: libcudart.so.13: cannot open shared object file")
        return [], "exit code 1"

    monkeypatch.setattr(machine, "lacks", lambda needs_build: [])
    monkeypatch.setattr(command, "look_at", crashes)
    assert command.main(["--results", str(tmp_path)]) == 1
    assert "exit code 1: ImportError: libcudart.so.13" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_stage_program_exists():
    for each in STAGES:
        module = each.command[2]
        assert (REPO / (module.replace(".", "/") + ".py")).is_file(), module


def test_impossible_rehearsal_gives_the_reason(monkeypatch, tmp_path, capsys):
    from tests.machinery.gpu_less import build

    def unavailable():
        raise build.Unavailable("no nvcc found")

    monkeypatch.setattr(build, "build", unavailable)
    monkeypatch.delenv("KVCACHE_GPULESS_RUNTIME", raising=False)
    assert command.main(["--rehearse", "--results", str(tmp_path)]) == rehearsal.UNAVAILABLE
    assert "SKIPPED" in (out := capsys.readouterr().out) and "no nvcc found" in out


def rate(direction, fragment, gb_per_s):
    return {
        "kind": "swap", "direction": direction, "fragment": fragment,
        "method": "kernel", "gb_per_s": gb_per_s, "contiguous_gb_per_s": 50.0,
    }  # fmt: skip


def test_expected_bars_are_shown_beside_the_measurements():
    contents = {
        "stages": {
            "swaps": {
                "rows": [
                    rate("in", 4 << 10, 38.0),
                    rate("in", 8 << 10, 10.0),
                    rate("out", 16 << 10, 44.0),
                    rate("both", 4 << 20, 45.0),
                    {"kind": "trial"},
                ]
            },
            "kernels": {
                "rows": [
                    {"kernel": "permute_blocks_", "case": "a", "gb_per_s": 3400.0, "of_copy": 0.8},
                    {"kernel": "write_kv", "case": "b", "gb_per_s": 1.0, "of_copy": 0.1},
                ]
            },
        }
    }
    rows = table.bar_rows(contents)
    assert [(row["bar"], row["reached"]) for row in rows] == [
        (0.75, True), (None, None), (0.90, False), (0.90, True), (0.85, False),
    ]  # fmt: skip
    assert rows[-1]["beside"] == pytest.approx(4250)
    lines = list(table.bar_lines(rows))
    assert sum("MISSED" in line for line in lines) == 2 and "76%" in lines[1]


def test_available_memory_respects_the_container_limit(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes.pinning(), "_CONTAINER_LIMIT", limit)
    assert sizes.available_host_bytes() > 1 << 20
    limit.write_text("1048576\n")
    assert sizes.available_host_bytes() == 1 << 20


def test_counts_are_parsed_from_pytest_output():
    assert checks.counts(["...", "3 failed, 41 passed, 2 skipped, 7 deselected in 9.31s"]) == {
        "passed": 41, "broken": 3, "skipped": 2,
    }  # fmt: skip
    assert checks.counts(["1 passed, 2 errors in 0.5s"])["broken"] == 2
    assert checks.counts(["Fatal Python error: Segmentation fault"])["passed"] == 0


def pytest_file(folder, *tests):
    lines = ["import pytest"]
    for number, body in enumerate(tests):
        lines += ["@pytest.mark.gpu", f"def test_{number}():", f"    {body}"]
    (folder / "test_x.py").write_text("\n".join(lines))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    return folder / "test_x.py"


SKIP = "pytest.skip('no device')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "status", "num_failed"),
    sampled([((SKIP, SKIP), "all skipped", 1), ((SKIP, "pass"), "ok", 0), ((), "ok", 0)]),
)
def test_file_whose_tests_are_all_skipped_is_a_failure(
    tmp_path, monkeypatch, capsys, tests, status, num_failed
):
    monkeypatch.setattr(say, "_num_failed", 0)
    found = checks.tested([str(pytest_file(tmp_path, *tests))], "test_x.py", 60)
    assert found["status"] == status and say._num_failed == num_failed


@pytest.mark.slow
def test_only_tests_that_failed_in_the_first_lease_run_again(tmp_path, monkeypatch, capsys):
    file = pytest_file(tmp_path, "assert False", "pass", "assert True")
    rows = [
        {"tool": "memcheck", "status": "exit code 9"},
        {"file": "test_y.py", "status": "ok", "names": []},
        {"file": file.name, "status": "exit code 1", "names": [f"FAILED {file}::test_2"]},
    ]
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"lease 1": {"stages": {"checks": {"rows": rows}}}}))
    monkeypatch.setattr(say, "_num_failed", 0)
    monkeypatch.setenv("KVCACHE_FIRST_RESULTS", str(results))
    assert checks.main(["--failed"]) == 0
    (row,) = (json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{"))
    assert (row["file"], row["passed"], row["broken"]) == (file.name, 1, 0)
    monkeypatch.setenv("KVCACHE_FIRST_RESULTS", str(tmp_path / "none.json"))
    assert checks.main(["--failed"]) == 0
    assert "no results of the first lease" in capsys.readouterr().out


def test_files_with_gpu_tests_are_found():
    names = [path.name for path in checks.gpu_test_files(REPO)]
    assert {"test_token_io_op.py", *checks._REHEARSED} <= set(names)
    assert "test_hashing.py" not in names
    # The tests of these files are all skipped on a GPU, or test stages of the second run.
    left_out = {"test_gpu_less.py", "test_call_counts.py", "test_gpu_second_run.py"}
    files = {path.name for path in roots.test_files()}
    assert not left_out & set(names) and left_out <= files
