# SPDX-License-Identifier: Apache-2.0
"""Runs the code in README and docs/.

Also checks that the reference lists every public name and that the targets of links exist.
"""

import importlib
import inspect
import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu.machine import write_results
from kvcache import ops
from kvcache_vllm import refusals
from tests.machinery import roots
from tests.machinery.forked import run_code
from tests.machinery.pages import code_of
from tests.machinery.shared import REPO

DOCS = REPO / "docs"
PAGES = [*sorted(REPO.glob("*.md")), *sorted(DOCS.glob("*.md"))]


WITH_CODE = [page for page in PAGES if code_of(page).strip()]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_of_a_page_runs_in_order(page, tmp_path):
    # In a process of its own, because the code may register kinds and layouts.
    code, errors = run_code(code_of(page), tmp_path / "stderr")
    assert code == 0, errors


def test_pages_that_should_contain_code_contain_some():
    names = {page.name for page in WITH_CODE}
    assert {"README.md", "serving.md", "own_engine.md", "hybrid_models.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_table_has_a_header(page):
    """A blank line ends a table, so any rows after it would be rendered as text."""
    before, *lines = ["", *page.read_text().splitlines(), ""]
    for line, behind in itertools.pairwise(lines):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|(:?-+:?\|)+", behind.replace(" ", "")), line
        before = line


def referenced() -> set[str]:
    """Return the last component of every name that the reference documents."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    return {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}


def public_packages() -> list[str]:
    """Return the packages with public names. Plug-ins are excluded, because they are used through
    entry points.
    """
    packages = [path for path in roots.files("__init__.py") if "__all__" in path.read_text()]
    names = [roots.module_name(path) for path in packages]
    return [name for name in names if not name.startswith(("kvcache_sglang", "kvcache_vllm"))]


@pytest.mark.parametrize("name", public_packages())
def test_every_public_name_is_in_the_reference(name):
    if name in ("kvcache_exchange.router_events", "kvcache_exchange.peers"):
        pytest.importorskip("msgspec")
        pytest.importorskip("zmq")
    module = importlib.import_module(name)
    names = {each for each in module.__all__ if not inspect.ismodule(getattr(module, each))}
    assert names and names <= referenced()


def test_every_name_in_the_reference_exists():
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            module, _, name = path.rpartition(".")
            assert hasattr(importlib.import_module(module), name), path


def test_every_op_has_a_function_in_the_reference_of_ops():
    schemas = (REPO / "csrc" / "ops" / "schemas.h").read_text()
    names = re.findall(r'm\.def\(\s*"(\w+)\(', schemas)
    assert names and all(inspect.isfunction(getattr(ops, name)) for name in names)
    assert all(getattr(ops, name).__doc__ for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_have_existing_targets(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


PICTURES = sorted((DOCS / "images").glob("*.svg"))


def test_pictures_have_alternative_texts_and_are_shown():
    shown = [
        (page.name, *match)
        for page in PAGES
        for match in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
    ]
    assert all(text for _, text, _ in shown), shown
    assert {picture.name for picture in PICTURES} <= {path.rpartition("/")[2] for *_, path in shown}


def test_pages_contain_no_ascii_drawings():
    """ASCII drawings are unusable with screen readers and on narrow screens, so the pages use the
    pictures in `docs/images`.
    """
    for page in sorted(DOCS.rglob("*.md")):
        assert not re.search(r"\+--|--\+|^ {3,}\S.* --+> ", page.read_text(), re.M), page.name


def test_every_page_is_in_the_navigation():
    navigation = (REPO / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS))
        assert f": {name}\n" in navigation, f"{name} is missing in the nav of mkdocs.yml"


def test_every_page_is_linked_from_the_first_page():
    text = (DOCS / "index.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or re.search(rf"\]\({page.name}[)#]", text), page.name


def test_results_have_one_line_per_row(tmp_path):
    for path in (REPO / "benchmarks" / "results").glob("*.json"):
        write_results(tmp_path / path.name, json.loads(path.read_text()))
        assert (tmp_path / path.name).read_text() == path.read_text()


DECODE = "decode step, 1,024 rows, tokens and hashes too"


@pytest.mark.parametrize(("page", "name", "form", "factor"), [
    ("README.md", "block hash, 16 tokens, SHA-256 over canonical CBOR", "{:,.0f} ns",
     "{:.0f} times"),
    ("README.md", DECODE, "{:.2f} us", "{:.1f} times"),
    ("README.md", "trace replay, 16-token blocks (874 per request)", "{:.0f} us", "{:.1f} times"),
    ("docs/index.md", DECODE, "{:.2f} us", "{:.1f} times"),
])  # fmt: skip
def test_figures_of_the_first_pages_equal_the_results(page, name, form, factor):
    suite = json.loads((REPO / "benchmarks" / "results" / "cpu.json").read_text())["control"]
    (row,) = [row for row in suite["results"] if row["name"] == name]
    lines = re.split(r"\n\n|\n(?=\|)", (REPO / page).read_text())
    (line,) = [each for each in lines if form.format(row["ours"]) in each]
    assert form.format(row["peer"]) in line and factor.format(row["ratio"]) in line


def test_the_policy_in_the_extensions_page_is_the_one_that_is_compiled_and_tested():
    header = (REPO / "csrc/tests/segmented_lru.h").read_text()
    assert f"```cpp\n{header}```" in (REPO / "docs/extensions.md").read_text()


def test_table_of_what_is_refused_in_vllm_is_made_from_the_code():
    assert refusals.table() in (DOCS / "vllm.md").read_text()
    code = "".join(each.read_text() for each in Path(refusals.__file__).parent.glob("[!r]*.py"))
    unused = [name for name in refusals.REFUSALS if f'"{name}"' not in code]
    assert all(
        name.endswith("Spec") for name in unused
    )  # `group_specs` looks these up by class name
    text = str(refusals.refused("modules of MTP", "num_prefill_lookahead is 2"))
    assert text.startswith("num_prefill_lookahead is 2: ") and "; use one module, or serve" in text
