# SPDX-License-Identifier: Apache-2.0
"""Extensions in other packages: they are found through entry points, and skipped if they fail."""

import subprocess
import sys

import pytest

from tests.machinery.shared import REPO

MODULE = """
import numpy as np

from kvcache.kinds import AttentionKind, register
from kvcache.layouts import AttentionBackend, register_backend
from kvcache_lab import WorkloadRequest, register_trace_form
from kvcache_lab.content import prefix_keys
from kvcache_exchange.store import BlockStore, register_store

@register("segments")
class Segments(AttentionKind):
    def __init__(self, *, segment: int) -> None:
        super().__init__()
        self.segment = segment

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.segment * self.segment

register_backend(AttentionBackend("OURS", ("block", "token", "head", "element")))

@register_trace_form("ours", lambda line, record: line.text.startswith(b"ours "))
def read(lines):
    for index, line in enumerate(lines):
        tokens = np.arange(int(line.text.split()[1]), dtype=np.int32)
        yield WorkloadRequest(index, 0, tokens, 1, prefix_keys(tokens))

class Memory(BlockStore):
    def __init__(self, url, capacity_bytes):
        self.url, self.capacity_bytes = url, capacity_bytes
    def open(self, memory, value_bytes): ...
    def exists(self, keys): ...
    def put(self, keys, values): ...
    def get(self, keys, values): ...
    def remove(self, keys): ...
    def close(self): ...

register_store("memory")(Memory)
"""
BROKEN = "raise RuntimeError('no such accelerator')"


@pytest.fixture
def run(tmp_path):
    """Return a function that runs code in an environment with an installed package that has
    extensions.
    """

    def install(name, module):
        (tmp_path / f"{name}.py").write_text(module)
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[kvcache.extensions]\nours = {name}\n")

    install("a_package", MODULE)
    install("broken_package", BROKEN)

    def run(code):
        path = f"import sys; sys.path[:0] = [{str(REPO)!r}, {str(tmp_path)!r}]\n"
        done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr

    return run


def test_kinds_and_backends_of_other_packages_are_found_by_name(run):
    said, _ = run(
        "from kvcache import GroupSpec, KVCacheManager, Request\n"
        "from kvcache.layouts import backend, backend_names\n"
        "groups = [GroupSpec('segments', 4, {'segment': 8})]\n"
        "manager = KVCacheManager.for_groups(groups, 20, 100)\n"
        "assert len(manager.step(new=[Request('r', range(20))]).rows) == 1\n"
        "print(*backend('OURS').shape(10, 16, 8, 64), 'OURS' in backend_names())"
    )
    assert said == ["10", "16", "8", "64", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "ours"])
def test_trace_formats_of_other_packages_are_found_by_name_and_content(run, tmp_path, form):
    (tmp_path / "trace").write_text("ours 7\nours 9\n")
    said, _ = run(
        "from kvcache_lab import read_trace, trace_forms\n"
        f"print(*(each.num_tokens for each in read_trace({str(tmp_path / 'trace')!r}, {form!r})))\n"
        "print('ours' in trace_forms())"
    )
    assert said == ["7", "9", "True"]


def test_stores_of_other_packages_are_selected_by_the_scheme_of_a_url(run):
    said, _ = run(
        "from kvcache_exchange.store import open_store\n"
        "store = open_store('memory://here', '2MiB')\n"
        "print(store.url, store.capacity_bytes)\n"
        "try:\n"
        "    open_store('redis://there')\n"
        "except ValueError as error:\n"
        "    print(*error.args)"
    )
    assert said[:2] == ["memory://here", str(2**21)]
    wrong = "place is 'redis://there': expected a folder, or a URL with memory://, mooncake://"
    assert " ".join(said[2:]) == wrong


def test_failing_extension_is_reported_and_skipped(run):
    _, warned = run("from kvcache.kinds import kind_names\nassert 'segments' in kind_names()")
    assert "extension ours = broken_package of broken_package is skipped" in warned
    assert "RuntimeError: no such accelerator" in warned


def test_built_in_names_load_no_extensions(run):
    said, _ = run(
        "from kvcache import GroupSpec\n"
        "from kvcache.layouts import backend\n"
        "GroupSpec('full_attention', 16), backend('FLASH_ATTN')\n"
        "print('a_package' in sys.modules)"
    )
    assert said == ["False"]
