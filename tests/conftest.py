# SPDX-License-Identifier: Apache-2.0
import gc
import os
import signal
import zlib

# Set before torch is imported; subprocesses inherit it. pytest-xdist already keeps all cores busy,
# so more OpenMP threads would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# CI is derandomized, so that a failure reproduces for everyone. `HYPOTHESIS_PROFILE=random`
# explores new examples.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=25)
settings.register_profile("exhaustive", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
# For tools such as compute-sanitizer, which make each launch 100 times slower.
settings.register_profile("few", derandomize=True, deadline=None, max_examples=5)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell's background job ignores SIGINT, and test subprocesses would inherit that. Restore the
# handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


num_without_gpu = pytest.StashKey[int]()
REAL_PARTS = ("NIXL", "Mooncake", "no browser")  # in the reasons of skipped tests


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without garbage collection, and then freeze the collected objects, which live to the
    end.
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


@pytest.hookimpl(trylast=True)  # after -m and -k, so that only selected tests are counted
def pytest_collection_modifyitems(config, items):
    """Deselect tests of other shares, and those marked gpu if torch finds no CUDA device.

    The summary reports the number of deselected tests that are marked gpu.
    """
    if share := config.getoption("--share"):
        k, n = map(int, share.split("/"))
        if not 1 <= k <= n:
            raise pytest.UsageError(f"--share is {share}: expected K/N with 1 <= K <= N")
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % n != k - 1]
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
    if output := getattr(node, "workeroutput", None):  # None if the worker has crashed
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
