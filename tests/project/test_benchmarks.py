# SPDX-License-Identifier: Apache-2.0
"""Tests of `make bench`: which figures it prints, and the files of results."""

import json
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks.measure import Result

FIGURES = [
    Result("fast", "us", 1.0, 10.0, "Python", bar=2.0),
    Result("over its bar", "us", 3.0, 30.0, "Python", bar=2.0),
    Result("under its bar", "GB/s", 3.0, bar=4.0, higher_is_better=True),
    Result("slower than before", "us", 1.0, 5.0, "Python"),
    Result("noise", "us", 1.0, 8.0, "Python"),
    Result("new", "us", 1.0, 0.5, "Python"),
]
RATIOS = {"fast": 10.0, "slower than before": 10.0, "noise": 10.0}


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Run `python -m benchmarks` with one suite of fixed figures, and return the printed lines."""
    committed = tmp_path / "cpu.json"
    rows = [{"name": name, "ratio": ratio} for name, ratio in RATIOS.items()]
    committed.write_text(json.dumps({"suite": {"results": rows}, "other": {"kept": 1}}))
    monkeypatch.setattr(command, "COMMITTED", committed)
    monkeypatch.setattr(command, "SUITES", {"suite": lambda: iter(FIGURES)})

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        assert command.main() == 0
        return capsys.readouterr().out.splitlines()

    return run


def test_bench_prints_only_the_figures_that_fell_behind_and_one_line(bench):
    *lines, summary = bench()
    assert [line.strip() for line in lines[1::2]] == [
        "behind its bar, 2 us",
        "behind its bar, 4 GB/s",
        "behind the committed ratio, 10x",
    ]
    for line, figure in zip(lines[::2], (FIGURES[1], FIGURES[2], FIGURES[3])):
        assert figure.name in line
    assert summary.startswith("3 of 6 figures fell behind")


def test_bench_json_replaces_the_section_of_a_suite_and_keeps_the_others(bench, monkeypatch):
    monkeypatch.setenv("KVCACHE_COMMIT", "abc")
    bench("--json", str(command.COMMITTED))
    written = json.loads(command.COMMITTED.read_text())
    assert written["other"] == {"kept": 1}
    assert written["suite"]["commit"] == "abc" and "torch" in written["suite"]
    assert [row["name"] for row in written["suite"]["results"]] == [each.name for each in FIGURES]
    assert written["suite"]["results"][2] == {
        "name": "under its bar", "unit": "GB/s", "ours": 3.0, "peer": None, "peer_name": "",
        "ratio": None,
    }  # fmt: skip


def test_committed_figures_have_one_name_each_and_sections_name_commit_and_machine():
    sections = json.loads(command.COMMITTED.read_text())
    names = [row["name"] for suite in command.SUITES for row in sections[suite]["results"]]
    assert len(names) == len(set(names)) == len(command.committed_ratios())
    assert all({"commit", "machine"} <= section.keys() for section in sections.values())
