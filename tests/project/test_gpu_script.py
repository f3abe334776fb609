# SPDX-License-Identifier: Apache-2.0
"""`make gpu` without a GPU: stages that fail, hang, crash or print garbage, and machines that lack
tools.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import build as build_stage
from benchmarks.gpu import (
    checks,
    facts,
    machine,
    process,
    rehearsal,
    say,
    sizes,
    swaps,
    table,
    workspace,
)
from benchmarks.gpu.report import Outcome, Report, StageLog
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
    ("import time; time.sleep(60)", "ran longer than 1 s"),
    ('print(\'{"failed": "op x: wrong"}\')', "1 failed"),
])  # fmt: skip
def test_failed_stage_keeps_its_output_and_the_next_stage_runs(runner, code, status):
    # On a busy machine, an interpreter may take a second to start. Only the stage that sleeps may
    # reach its time limit.
    limit_s = 1.0 if "sleep" in code else 30.0
    bad = f"print('{{\"case\": 3}}', flush=True); print('in the log', flush=True); {code}"
    if "sleep" in code:
        bad = "import os; os.write(1, b'{\"case\": 3}\\nin the log\\n'); " + code
        limit_s = 5.0
        status = "ran longer than 5 s"
    assert not runner.all(stage("bad", bad, limit_s), stage("good", GOOD))
    found = runner.stages
    assert found["bad"]["status"] == status
    assert found["bad"]["rows"] == [{"case": 3}] and "in the log" in found["bad"]["output"]
    assert "in the log" in (runner.report.folder / "gpu-fake-checks.log").read_text()
    assert found["good"]["status"] == "ok"


def test_results_are_on_disk_before_the_next_stage_begins(runner):
    look = f"""
        import json
        stages = json.load(open({str(runner.report.path)!r}))["lease 1"]["stages"]
        print(json.dumps({{"seen": sorted(stages)}}))
    """
    assert runner.all(stage("one", GOOD), stage("two", look))
    assert runner.stages["two"]["rows"] == [{"seen": ["one"]}]


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


def test_log_keeps_the_beginning_and_the_end_of_long_output(tmp_path):
    log = StageLog(tmp_path / "log", "== stage")
    for i in range(60_000):
        log.line(f"{i:<60}")
    log.close("ok")
    text = (tmp_path / "log").read_text()
    assert len(text) < 2 << 20 and "lines left out" in text
    assert (
        " 0  " in text and " 59999 " in text and text.rstrip().splitlines()[-1].startswith("== ok")
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [FIRST, SECOND])
def test_stages_leave_few_files_with_plain_names(runner, number):
    sections = [stage(each.name, GOOD, log=each.log) for each in of_lease(number)]
    assert runner.all(*sections)
    names = sorted(path.name for path in runner.report.folder.iterdir())
    assert len(names) + 1 <= 8  # the calibration adds one more file
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


@pytest.mark.slow
def test_stages_after_the_time_limit_are_reported_as_not_run(tmp_path):
    runner = Runner(tmp_path, total_s=8.0)
    assert not runner.all(stage("long", "import time; time.sleep(60)", 4.0), stage("late", GOOD))
    assert runner.stages["long"]["status"] == "ran longer than 4 s"
    assert runner.stages["late"]["status"] == "not run: no time left"


def test_stages_that_need_libraries_do_not_run_without_them(runner):
    build = stage("build", "raise SystemExit(1)")
    assert not runner.all(build, stage("op", GOOD, needs_build=True), stage("free", GOOD))
    assert runner.stages["op"]["status"] == "not run: no libraries were built"
    assert runner.stages["free"]["status"] == "ok"


def test_missing_package_fails_only_its_own_stage(runner):
    assert not runner.all(stage("tests", GOOD, needs=("no_such_package",)), stage("good", GOOD))
    assert "no_such_package" in runner.stages["tests"]["status"]
    assert runner.stages["good"]["status"] == "ok"


def test_stage_that_only_skips_is_reported_as_skipped(runner):
    assert runner.all(stage("replay", 'print(\'{"skipped": "no such tool here"}\')'))
    assert runner.stages["replay"]["status"] == "skipped"
    assert "no such tool here" in runner.text


def test_stage_receives_its_limit_and_environment(runner):
    code = """
        import json, os
        print(json.dumps({k: os.environ[k] for k in ("KVCACHE_STAGE_LIMIT", "MINE")}))
    """
    assert runner.all(stage("one", code, 17.0, environment={"MINE": "yes"}))
    assert runner.stages["one"]["rows"] == [{"KVCACHE_STAGE_LIMIT": "17.0", "MINE": "yes"}]


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


@pytest.fixture
def no_programs(monkeypatch, tmp_path):
    """Simulate a machine without git, make and nvidia-smi."""
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("KVCACHE_COMMIT", raising=False)


def test_commit_is_read_without_git(no_programs, monkeypatch, tmp_path):
    assert machine.commit(tmp_path) == "unknown"
    (tmp_path / "COMMIT").write_text("f00d\n")
    assert machine.commit(tmp_path) == "f00d"
    monkeypatch.setenv("KVCACHE_COMMIT", "beef")
    assert machine.commit(tmp_path) == "beef"


def test_driver_version_is_read_without_nvidia_smi(no_programs, monkeypatch, tmp_path):
    version = tmp_path / "version"
    monkeypatch.setattr(machine, "_DRIVER_FILE", version)
    assert machine.driver()  # read without nvidia-smi and without the version file
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.4  Tue Sep\nGCC: 12.2\n"
    )
    assert machine.driver() == "580.1.4"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1.5  Rel\n")
    assert machine.driver() == "580.1.5"


def test_sources_differ_with_a_changed_file(tmp_path):
    workspace.make(tmp_path)
    before = machine.sources_digest(tmp_path)
    assert before == machine.sources_digest(REPO)
    path = tmp_path / "csrc" / "ops" / "schemas.h"
    path.write_text(path.read_text() + "\n")
    assert machine.sources_digest(tmp_path) != before


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


def test_manifest_records_what_the_libraries_were_built_with(tmp_path):
    workspace.write_manifest(tmp_path, environment={**os.environ, "KVCACHE_CUDA_ARCHS": "90"})
    facts = json.loads((tmp_path / workspace.MANIFEST).read_text())
    version = importlib.metadata.version("torch")
    assert facts["torch"] == version and {"archs", "cuda"} <= set(facts)
    has_nvcc = machine.find_tool("nvcc") is not None
    assert facts["archs"] == (["90"] if has_nvcc else [])
    assert f"torch {version}" in workspace.built_with(tmp_path)


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


def test_built_libraries_that_do_not_load_fail_the_build(carrying, monkeypatch, capsys):
    _, package, built = carrying
    monkeypatch.setattr(build_stage, "loading_problem", lambda: "no kernel image")
    assert build_stage.provide(package, None, "90") == 1 and built == [(True, "90")]
    assert '"libraries"' not in capsys.readouterr().out


@pytest.mark.parametrize(("why", "warm_up", "problem"), [
    ("None", "lambda: None", None),
    ("'libkvcache_cuda is not usable: the driver is too old'", "lambda: None", "not usable"),
    ("None", "lambda: exec('raise RuntimeError(\"no code for sm_90\")')", "no code for sm_90"),
])  # fmt: skip
def test_libraries_that_cannot_be_used_are_a_problem(tmp_path, monkeypatch, why, warm_up, problem):
    package = tmp_path / "kvcache"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ops.py").write_text(f"warm_up = {warm_up}\n")
    native = f"why_no_cuda = lambda: {why}\ndescribe = lambda: {{'libkvcache_cuda': 'here'}}\n"
    (package / "native").mkdir()
    (package / "native" / "__init__.py").touch()
    (package / "native" / "load.py").write_text(native)
    monkeypatch.chdir(tmp_path)
    found = build_stage.loading_problem()
    assert (found is None) if problem is None else problem in found


def test_workspace_contains_no_built_library(tmp_path):
    workspace.make(tmp_path)
    assert (tmp_path / "kvcache" / "ops.py").exists() and (tmp_path / "csrc" / "ops").is_dir()
    assert not list(tmp_path.rglob("*.so")) and not (tmp_path / "build").exists()


def in_bare_tree(folder, program):
    """Run a program in a copy of the checkout that has no built libraries and cannot build any."""
    workspace.make(folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "KVCACHE_JIT_DIR": str(folder / "jit"),
        "CXX": "no-such-compiler",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_machine_facts_need_no_built_libraries(tmp_path):
    done = in_bare_tree(
        tmp_path,
        """
        import sys
        from benchmarks.gpu import facts, sizes
        for name, fact in {**facts.of_host(), **facts.of_tools()}.items():
            fact()
        print(sizes.available_host_bytes() > 0, "kvcache.native.load" in sys.modules)
        """,
    )
    assert (done.stdout, done.stderr) == ("True False\n", "")
    assert not (tmp_path / "jit").exists()


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


def test_list_names_every_stage_in_its_order(capsys):
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "facts", "build", "first-contact", "checks", "kernels", "swaps", "beside-matmul",
        "load-beside-step", "tcp", "endurance", "replay",
    ]  # fmt: skip
    assert command.main(["--lease", "2", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "facts", "build", "failed-tests", "swaps-again",
    ]  # fmt: skip


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


def test_second_lease_reads_the_files_of_the_first_and_keeps_them(tmp_path, monkeypatch):
    first, second = (command.parse(each) for each in ([], ["--lease", "2"]))
    assert command.report_name(first, "NVIDIA H100") == "gpu-nvidia-h100"
    name = command.report_name(second, "NVIDIA H100")
    assert name == "gpu-nvidia-h100-second"
    rehearsed = command.parse(["--lease", "2", "--rehearse"])
    assert command.report_name(rehearsed, "NVIDIA H100") == "rehearsal-second"
    monkeypatch.setattr(machine, "REPO", tmp_path)
    committed = tmp_path / "benchmarks" / "results" / "gpu-nvidia-h100.json"
    report = Report(tmp_path / "out", name, {})
    beside = report.folder / "gpu-nvidia-h100.json"
    assert command.of_first(report, ".json") == beside
    committed.parent.mkdir(parents=True)
    committed.touch()
    assert command.of_first(report, ".json") == committed
    # The first lease writes its own files even if there are committed ones.
    assert command.of_first(Report(report.folder, "gpu-nvidia-h100", {}), ".json") == beside
    beside.touch()
    assert command.of_first(report, ".json") == beside


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


def test_carried_libraries_are_used_if_they_are_in_the_usual_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "REPO", tmp_path)
    monkeypatch.delenv("KVCACHE_LIBRARIES", raising=False)
    assert command.parse([]).libraries is None
    (tmp_path / command.LIBRARIES).mkdir(parents=True)
    assert command.parse([]).libraries == tmp_path / command.LIBRARIES
    assert command.parse(["--rehearse"]).libraries is None
    assert command.parse(["--libraries", "/x"]).libraries.as_posix() == "/x"


def test_first_line_names_libraries_driver_and_clocks(tmp_path):
    workspace.write_manifest(tmp_path, environment={**os.environ, "KVCACHE_CUDA_ARCHS": "90"})
    known = {"torch": "2.11.0", "driver": "580.1", "pcie_link_and_clocks": "5, 16, 3201 MHz"}
    line = command.first_line(command.parse(["--libraries", str(tmp_path)]), known)
    for text in (str(tmp_path), "torch 2.11.0", "driver 580.1", "3201 MHz", machine.commit()):
        assert text in line
    assert "built here" in command.first_line(command.parse(["--libraries", "/none"]), {})


def test_machine_without_headers_can_only_use_carried_libraries(monkeypatch):
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: "/no/such/folder")
    (text,) = (text for text in machine.lacks(needs_build=True) if "Python.h" in text)
    assert text.startswith("Python's headers (/no/such/folder/Python.h")
    assert "make gpu-libraries" in text
    assert not [text for text in machine.lacks(needs_build=False) if "Python.h" in text]


def test_python_without_headers_is_not_used_for_a_build(tmp_path, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no Python 9\.9 with its headers"):
        workspace.python_with_headers("9.9")
    program = tmp_path / "versions" / "9.9.1" / "bin" / "python9.9"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 9.9 {tmp_path}\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"no Python 9\.9 with its headers"):
        workspace.python_with_headers("9.9")
    (tmp_path / "Python.h").touch()
    assert workspace.python_with_headers("9.9") == str(program)


def test_failed_build_keeps_the_libraries_of_an_earlier_one(tmp_path, monkeypatch):
    (tmp_path / "old.so").touch()
    with pytest.raises(RuntimeError, match="the build failed"):
        workspace.build_for(tmp_path, "/bin/false", "90")
    assert [path.name for path in tmp_path.iterdir()] == ["old.so"]


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


def test_unusable_libraries_do_not_hide_what_a_build_lacks(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        machine, "lacks", lambda needs_build: asked.append(needs_build) or ["the program g++"]
    )
    assert command.main(["--libraries", str(tmp_path)]) == 1
    assert asked == [True]
    shown = capsys.readouterr()
    assert shown.err == "make gpu: this machine lacks the program g++\n"
    assert shown.out.startswith(f"the libraries are not used: {tmp_path} has no readable")


def test_facts_that_crash_end_the_run_with_their_reason(tmp_path, monkeypatch, capsys):
    def crashes(facts, started):
        facts.take("ImportError: libcudart.so.13: cannot open shared object file")
        return [], "exit code 1"

    monkeypatch.setattr(machine, "lacks", lambda needs_build: [])
    monkeypatch.setattr(command, "look_at", crashes)
    assert command.main(["--results", str(tmp_path)]) == 1
    assert "exit code 1: ImportError: libcudart.so.13" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_too_old_driver_is_named(monkeypatch, capsys):
    def refuses():
        warnings.warn(
            "The NVIDIA driver on your system is too old (found version 12020)", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", refuses)
    monkeypatch.setattr(machine, "driver", lambda: "535.1")
    assert facts.main() == 1
    (row,) = (json.loads(x) for x in capsys.readouterr().out.splitlines() if x.startswith("{"))
    (text,) = row["lacks"]
    assert "driver 535.1" in text and "too old (found version 12020)" in text


def test_full_disk_ends_the_run_in_one_line_and_keeps_earlier_results(tmp_path, monkeypatch):
    report = Report(tmp_path, "gpu", {"commit": "abc"})
    report.save()
    before = report.path.read_bytes()
    report.contents["more"] = 1
    write = type(report.path).write_text

    def full(path, text, *args, **options):
        write(path, text[:5], *args, **options)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(type(report.path), "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report.save()
    assert report.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_results_go_to_the_given_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("GPU_RESULTS", raising=False)
    assert command.results_of(command.parse([])) == REPO / "benchmarks" / "results"
    assert command.results_of(command.parse(["--rehearse"])) == REPO / "build" / "rehearsal"
    monkeypatch.setenv("GPU_RESULTS", str(tmp_path))
    assert command.results_of(command.parse([])) == tmp_path
    assert command.results_of(command.parse(["--results", "/x"])).as_posix() == "/x"


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


def test_repeated_swap_measurement_replaces_the_first_one():
    rows = [rate("in", 4 << 10, 20.0), rate("out", 4 << 10, 45.0), rate("in", 4 << 10, 40.0)]
    found = table.bar_rows({"stages": {"swaps": {"rows": rows}}})
    assert [(row["name"].split(",")[0], row["gb_per_s"]) for row in found] == [
        ("swap in", 40.0), ("swap out", 45.0),
    ]  # fmt: skip


@pytest.fixture
def fake_bench(monkeypatch):
    """Replace the measurements with functions that only record their names."""
    bandwidth, calls = swaps.bandwidth, []
    found = bandwidth.Rate("in", 4 << 10, "kernel", 40.0, 50.0, 8, 100)

    def device_rates(pools, calibration=None, **_):
        calls.append(("swaps", calibration.machine))
        yield found

    def calibrate(pools, progress):
        calls.append("calibrate")
        progress(found)
        return dataclasses.replace(swaps.DEFAULT, machine="measured")

    monkeypatch.setattr(bandwidth, "device_rates", device_rates)
    monkeypatch.setattr(bandwidth, "calibrate", calibrate)
    monkeypatch.setattr(swaps, "make_pools", lambda num_bytes: calls.append("pools"))
    monkeypatch.setattr(swaps, "beside_a_loop", lambda *_: calls.append("loop"))
    monkeypatch.setattr(swaps, "batches", lambda *_: calls.append("batches"))
    monkeypatch.setattr(swaps, "sweep", lambda *_: iter([calls.append("sweep")] * 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(say, "_num_failed", 0)
    monkeypatch.delenv("KVCACHE_CALIBRATION_TO", raising=False)
    return calls


def test_swaps_are_measured_before_and_after_the_calibration_with_the_same_pools(fake_bench):
    assert swaps.main([]) == 0
    built_in = swaps.DEFAULT.machine
    assert fake_bench == [
        "pools", ("swaps", built_in), "calibrate", ("swaps", "measured"), "loop", "batches",
        "sweep",
    ]  # fmt: skip


def test_swaps_are_measured_twice_in_the_second_lease(fake_bench, tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    dataclasses.replace(swaps.DEFAULT, machine="first lease").save(path)
    monkeypatch.setenv("KVCACHE_CALIBRATION_TO", str(path))
    assert swaps.main(["--again"]) == 0
    assert fake_bench == ["pools", ("swaps", "first lease"), ("swaps", "first lease")]


def test_calibration_ends_at_the_time_limit_and_the_rest_runs(fake_bench, monkeypatch, capsys):
    left = iter([60.0, 0.5])
    monkeypatch.setattr(say, "seconds_left", lambda: next(left))
    assert swaps.main([]) == 1
    swapped = ("swaps", swaps.DEFAULT.machine)
    assert fake_bench == ["pools", swapped, "calibrate", "loop", "batches", "sweep"]
    assert "calibration: TimeoutError: no time left" in capsys.readouterr().out


def test_device_pool_is_not_limited_by_host_memory(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(sizes, "available_host_bytes", lambda: 10 << 30)
    assert sizes.pool_bytes(16 << 30, on_host=False) == 16 << 30
    assert capsys.readouterr().out == ""
    # In addition, a host pool of the same size is needed.
    assert sizes.pool_bytes(16 << 30) == 4 << 30
    assert "too little memory" in capsys.readouterr().out
    assert sizes.pool_bytes(64 << 30, on_host=False) == 28 << 30


def test_available_memory_respects_the_container_limit(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes.pinning(), "_CONTAINER_LIMIT", limit)
    assert sizes.available_host_bytes() > 1 << 20
    limit.write_text("1048576\n")
    assert sizes.available_host_bytes() == 1 << 20


def test_table_lists_every_stage_and_its_outcome(runner):
    runner.all(stage("one", GOOD), stage("bad", "raise SystemExit(3)"))
    lines = list(table.stage_lines(runner.report.contents))
    assert "ok: it is fast" in lines[1]
    assert "FAILED (exit code 3)" in lines[2]


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
def test_file_that_times_out_keeps_its_counts(tmp_path, monkeypatch, capsys):
    slow = "import time; time.sleep(600)"
    file = pytest_file(tmp_path, "pass", "pass", "assert False", SKIP, "pass", slow)
    for limit_s in (8, 60):  # a busy machine may take longer to reach the slow test
        monkeypatch.setattr(say, "_num_failed", 0)
        found = checks.tested([str(file)], "test_x.py", limit_s)
        if found["passed"] == 3:
            break
    assert (found["passed"], found["broken"], found["skipped"]) == (3, 1, 1)
    assert found["status"].startswith("ran longer than") and say._num_failed == 1


@pytest.mark.slow
def test_run_without_a_passed_test_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(say, "_num_failed", 0)
    monkeypatch.setattr(checks, "gpu_test_files", lambda folder: [pytest_file(tmp_path)])
    monkeypatch.setattr(checks, "_TOOLS", {})
    assert checks.main([]) == 1
    assert '{"failed": "no test passed"}' in capsys.readouterr().out


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


def test_process_reports_lines_as_they_are_printed(tmp_path):
    arrived, seen = [], tmp_path / "seen"
    code = f"""if True:
        import pathlib, time
        print("first", flush=True)
        while not pathlib.Path({str(seen)!r}).exists():
            time.sleep(0.01)
        print("last", end="")
    """
    ended = process.run(
        [sys.executable, "-c", code], 60, lambda line: (arrived.append(line), seen.touch())
    )
    assert ended.status == "ok" and arrived == ["first", "last"]


def test_outcome_accepts_only_lines_of_the_protocol():
    outcome = Outcome()
    assert outcome.take('{"learned": "x", "also": 1}') is None
    assert outcome.rows == [{"learned": "x", "also": 1}] and not outcome.learned
    assert outcome.take('{"failed": "y"}') == "failed: y"
