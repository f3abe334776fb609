# SPDX-License-Identifier: Apache-2.0
"""Commands of packages that are not installed, or that cannot be imported."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvcache.cli import main, parts

BROKEN = "kvcache_no_such_module:COMMAND"


@pytest.fixture
def installed(monkeypatch):
    """Return a function that sets the entry points of all packages."""

    def install(*points):
        found = EntryPoints(points)
        monkeypatch.setattr(parts, "entry_points", lambda **wanted: found.select(**wanted))

    return install


@pytest.mark.parametrize("name", ["replay", "plan", "bench", "demo", "serve"])
def test_command_of_a_missing_package_names_the_extra(installed, capsys, name):
    installed()
    assert main([name, "--anything"]) == 1
    extra = "serve" if name in ("demo", "serve") else "lab"
    assert capsys.readouterr().err == (
        f"kvcache: kvcache {name} needs kvcache-{extra}, which is not installed: "
        f"pip install 'torch-kvcache[{extra}]'\n"
    )


def test_command_that_cannot_be_imported_does_not_stop_the_others(installed, capsys):
    installed(EntryPoint("replay", BROKEN, "kvcache.commands"))
    assert main(["--help"]) == 0
    assert main(["replay"]) == 1
    error = capsys.readouterr().err
    assert f"kvcache replay cannot be loaded ({BROKEN}): No module named" in error


def test_part_that_cannot_be_imported_is_reported(installed, capsys):
    installed(EntryPoint("diagnose_vllm", BROKEN, "kvcache.parts"))
    assert main(["doctor", "--vllm", "model"]) == 1
    assert f"--vllm cannot be loaded ({BROKEN}): No module named" in capsys.readouterr().err
