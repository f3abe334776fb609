# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime without a GPU, used from Python: torch operators, kernels and messages."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.machinery.gpu_less import __main__ as gpu_less
from tests.machinery.gpu_less import build

ON_IT = "KVCACHE_GPULESS_RUNTIME" in os.environ
on_it = pytest.mark.skipif(not ON_IT, reason="needs the runtime without a GPU: `make gpu-less`")


@pytest.mark.parametrize(("command", "status"), [("test", 0), ("build", 0), ("run", 2)])
def test_missing_nvcc_is_reported(monkeypatch, capsys, command, status):
    rules = build._build_rules()
    monkeypatch.setattr(rules, "cuda_home", lambda: None)
    monkeypatch.setattr(build, "_build_rules", lambda: rules)
    monkeypatch.setattr(sys, "argv", ["gpu_less", command, *(["--", "true"] * (command == "run"))])
    assert gpu_less.main() == status
    assert capsys.readouterr().out.startswith("SKIPPED: the CUDA runtime without a GPU: no nvcc")


@pytest.mark.gpu
@on_it
def test_every_kernel_of_the_cuda_library_runs_on_the_emulator():
    import kvcache.ops  # noqa: F401  (loads the library)
    from tests.machinery.gpu_less import plugin

    assert plugin.num_bound_kernels() > 0
    assert plugin.unbound_kernels() == []


EXPRESSIONS = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "comparison": lambda x: (x > 3).nonzero(),
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "type": lambda x: x.t().to(torch.int16),
    "assignment": lambda x: x.clone().index_fill_(0, torch.tensor([1], device=x.device), 9.0),
    "strided": lambda x: x.t()[1:].add_(1).contiguous(),
    "several results": lambda x: torch.sort(x, descending=True)[1],
    "made": lambda x: torch.full_like(x, 3) + torch.ones(4, device=x.device),
    "matrix": lambda x: x @ x.t(),
    "expanded": lambda x: x[:1].expand(3, 4).clone(),
    "empty": lambda x: x[:0] + 1,
}


@pytest.mark.gpu
@on_it
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_operators_match_the_cpu(name):
    x = torch.arange(12.0).reshape(3, 4)
    on_device = EXPRESSIONS[name](x.cuda())
    assert on_device.is_cuda
    assert torch.equal(on_device.cpu(), EXPRESSIONS[name](x.clone()))


def _seen_by_another_stream(wait: bool) -> set[float]:
    seen = set()
    pinned = torch.empty(1, pin_memory=True)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(40):
        x = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            x.fill_(1)
        with torch.cuda.stream(second):
            if wait:
                second.wait_stream(first)
            pinned.copy_(x, non_blocking=True)
        torch.cuda.synchronize()
        seen.add(float(pinned[0]))
    return seen


@pytest.mark.gpu
@on_it
def test_operator_writes_are_late_and_stream_ordered():
    assert _seen_by_another_stream(wait=True) == {1.0}
    assert _seen_by_another_stream(wait=False) == {0.0, 1.0}


@pytest.mark.gpu
@on_it
def test_an_operator_in_a_capture_runs_with_the_graph():
    x = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y = x * 2
    assert x.tolist() == [0, 0, 0]
    for times in (1, 2):
        graph.replay()
        assert x.tolist() == [times] * 3 and y.tolist() == [2 * times] * 3


WAITING = {
    "a value": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "mask of rows": lambda x: x[x[:, 0] > 1, 2],
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "assignment by mask": lambda x: x.index_put_((x > 1,), x[0, 1]),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.flatten().long()),
    "bincount": lambda x: torch.bincount(x.flatten().long()),
    "equal": lambda x: torch.equal(x, x + 1),
}
NOT_WAITING = {
    "fill by mask": lambda x, ids: x.__setitem__(x > 1, 9.0),
    "index": lambda x, ids: x[ids],
    "where of three": lambda x, ids: torch.where(x > 1, x, 0.0),
    "repeat_interleave": lambda x, ids: torch.repeat_interleave(ids, output_size=0),
}


@pytest.mark.gpu
@on_it
@pytest.mark.parametrize("name", WAITING)
def test_operator_that_waits_for_the_device_invalidates_a_capture(name):
    x = torch.arange(12.0, device="cuda").reshape(3, 4)
    broken = pytest.raises(RuntimeError, match="failed due to a previous error during capture")
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    with broken, torch.cuda.graph(torch.cuda.CUDAGraph()), refused:
        WAITING[name](x)


@pytest.fixture
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@on_it
@pytest.mark.parametrize("name", WAITING)
def test_operator_that_waits_raises_where_waiting_is_forbidden(no_waiting, name):
    x = torch.arange(12.0, device="cuda").reshape(3, 4)
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        WAITING[name](x)


@pytest.mark.gpu
@on_it
@pytest.mark.parametrize("name", NOT_WAITING)
def test_operators_with_known_shapes_are_captured_and_never_wait(no_waiting, name):
    x = torch.arange(12.0, device="cuda").reshape(3, 4)
    ids = torch.zeros(2, dtype=torch.int64, device="cuda")
    NOT_WAITING[name](x, ids)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        NOT_WAITING[name](x, ids)
