# SPDX-License-Identifier: Apache-2.0
import gc
import os
import signal
import zlib

# This must be set before torch is imported, and subprocesses inherit it. pytest-xdist already keeps
# all cores busy, so additional OpenMP threads would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# The CI profile is derandomized, so that every failure is reproducible. Set
# `HYPOTHESIS_PROFILE=random` to explore new examples.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=25)
settings.register_profile("exhaustive", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
# This profile is for tools such as compute-sanitizer, which slow each launch down by a factor of
# 100.
settings.register_profile("few", derandomize=True, deadline=None, max_examples=5)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell's background jobs ignore SIGINT, and the subprocesses of tests would inherit this. Restore
# the default handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


num_without_gpu = pytest.StashKey[int]()
REAL_PARTS = ("NIXL", "Mooncake", "no browser")  # searched for in the skip reasons of tests


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection while pytest collects tests, and then freeze all objects, because
    they stay alive until the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--share", metavar="K/N", help="run only the Kth of N shares of the tests, from 1/N to N/N"
    )


def _unit(item):
    """Return what a test cannot be separated from: its file if the file is marked in_order, or only
    the test itself.
    """
    return item.location[0] if item.get_closest_marker("in_order") else item.nodeid


@pytest.hookimpl(trylast=True)  # after -m and -k, so that only selected tests are counted
def pytest_collection_modifyitems(config, items):
    """Deselect the tests of other shares. If torch finds no CUDA device, also deselect tests marked
    gpu.

    The terminal summary reports how many tests marked gpu were deselected.
    """
    if share := config.getoption("--share"):
        k, n = map(int, share.split("/"))
        if not 1 <= k <= n:
            raise pytest.UsageError(f"--share is {share}: expected K/N with 1 <= K <= N")
        others = [item for item in items if zlib.crc32(_unit(item).encode()) % n != k - 1]
        config.hook.pytest_deselected(items=others)
        others = set(others)
        items[:] = [item for item in items if item not in others]
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    config.stash[num_without_gpu] = len(needs_gpu)


def pytest_sessionfinish(session):
    # With pytest-xdist, every worker collects all tests.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_without_gpu"] = session.config.stash.get(
            num_without_gpu, 0
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if output := getattr(node, "workeroutput", None):  # missing if the worker has crashed
        node.config.stash[num_without_gpu] = output["num_without_gpu"]


def pytest_terminal_summary(terminalreporter, config):
    if left_out := config.stash.get(num_without_gpu, 0):
        terminalreporter.line(f"{left_out} tests marked gpu were not run: no CUDA device")
    skipped = [str(each.longrepr) for each in terminalreporter.getreports("skipped")]
    if absent := sum(any(part in each for part in REAL_PARTS) for each in skipped):
        terminalreporter.line(
            f"{absent} tests that need NIXL, Mooncake or a browser were skipped: run make test-real"
        )
    if absent := sum("'vllm'" in each for each in skipped):
        terminalreporter.line(f"{absent} files that need vLLM were skipped: run make test-vllm")
    if any("'sglang'" in each for each in skipped):
        terminalreporter.line("files that need SGLang were skipped: run make test-sglang")
