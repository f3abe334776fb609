# SPDX-License-Identifier: Apache-2.0
"""`make test-vllm VLLM=newest`: the newest vLLM on PyPI, or a clear failure."""

import sys

from tests.machinery import vllm_environment

LISTED = "vllm (0.41.1)\nAvailable versions: 0.41.1, 0.41.0, 0.33.0\n"


def answer(monkeypatch, text):
    monkeypatch.setattr(vllm_environment, "call", lambda command: text)


def test_newest_version_is_read_from_the_index(monkeypatch):
    answer(monkeypatch, "WARNING: experimental\n" + LISTED)
    assert vllm_environment.newest_on_pypi() == "0.41.1"


def test_missing_version_fails_with_the_reason(monkeypatch, capsys):
    answer(monkeypatch, "nothing")
    monkeypatch.setattr(sys, "argv", ["vllm_environment", "--vllm", "newest"])
    assert vllm_environment.main() == 1
    assert "FAILED: tests with the newest vLLM: pip index versions vllm" in capsys.readouterr().out


def test_other_versions_are_skipped_if_they_cannot_be_installed(monkeypatch, capsys):
    def install(version):
        raise vllm_environment.Unavailable(f"no {version}")

    monkeypatch.setattr(vllm_environment, "_install", install)
    monkeypatch.setattr(sys, "argv", ["vllm_environment", "--vllm", "0.32.0"])
    assert vllm_environment.main() == 0
    assert "SKIPPED: tests with vLLM: no 0.32.0" in capsys.readouterr().out
