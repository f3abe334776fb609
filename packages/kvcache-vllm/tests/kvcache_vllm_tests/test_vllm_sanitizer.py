# SPDX-License-Identifier: Apache-2.0
"""The sanitizer in vLLM detects defects planted in vLLM's own code.

`make test-vllm` also runs all other vLLM tests under the sanitizer, which must report nothing.
"""

import os
import types

import pytest

pytest.importorskip("vllm")

import numpy as np

from kvcache.sanitizer import SanitizedGroup, Sanitizer
from kvcache_vllm.sanitizer import findings, register
from kvcache_vllm.sanitizer.holds import Holds
from kvcache_vllm.sanitizer.observer import WorkerObserver
from tests.machinery.vllm_defects import find_all

CASES = [
    ("llama", "vllm"),
    ("granite4", "vllm"),
    ("llama", "vllm drafts"),
    ("llama", "tier"),
    pytest.param("gemma3", "vllm", marks=pytest.mark.exhaustive),
    pytest.param("llama", "ours async", marks=pytest.mark.exhaustive),
]


RUNNERS = {
    "first": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "second": {
        **{"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    },
}


@pytest.mark.parametrize("runner", [
    "first", pytest.param("second", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_wrong_inputs_of_layers_are_found_in_the_same_step(runner):
    """The second runner computes in Triton's interpreter, with which all forms take ten minutes."""
    found = find_all("llama", "vllm", RUNNERS[runner], of_inputs=True)
    assert len(found) >= 30
    for each in found:
        assert each["planted"] and each["found_at"] == each["planted_at"], each


def test_correct_runs_of_the_second_runner_have_no_findings():
    """`find_all` checks a run without defects first. One form shows that the runner is observed."""
    (found,) = find_all("llama", "vllm", RUNNERS["second"], True, ["token_of_another_row first"])
    assert found["found_at"] == found["planted_at"] is not None


@pytest.mark.parametrize(("model", "engine"), CASES)
def test_each_planted_defect_is_found(model, engine):
    found = find_all(model, engine)
    for each in found:
        print(
            f"{each['name']}: planted at step {each['planted_at']}, found at step "
            f"{each['found_at']} as {each['kind']}; the engine: {each['engine']}"
        )
    assert found and all(each["planted"] for each in found)
    # The engine may fail before it reads any wrong KV.
    missed = [each for each in found if each["kind"] is None and each["engine"] == "answered"]
    assert not missed
    for each in found:
        assert each["kind"] is None or each["found_at"] >= each["planted_at"], each
        # Some defects corrupt vLLM's pool, so that later runs fail even without a defect.
        assert each["slots_read"] and each.get("broken") != "reports", each


def test_plug_in_does_nothing_without_the_variable(monkeypatch):
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(WorkerWrapperBase, "initialize_from_config", lambda *arguments: None)
    before = WorkerWrapperBase.initialize_from_config
    monkeypatch.setitem(os.environ, "KVCACHE_SANITIZE", "0")
    register()
    assert WorkerWrapperBase.initialize_from_config is before
    monkeypatch.setitem(os.environ, "KVCACHE_SANITIZE", "1")
    register()
    register()
    assert WorkerWrapperBase.initialize_from_config.__wrapped__ is before


def test_unknown_model_runners_are_rejected_and_the_engine_continues(monkeypatch, caplog):
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(WorkerWrapperBase, "initialize_from_config", lambda *arguments: "done")
    monkeypatch.setitem(os.environ, "KVCACHE_SANITIZE", "1")
    register()
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = types.SimpleNamespace(model_runner=types.SimpleNamespace())
    assert wrapper.initialize_from_config([]) == "done"
    (record,) = caplog.records
    reason = (
        "the model runner is types.SimpleNamespace: expected one of vLLM's GPUModelRunner classes"
    )
    assert record.message == f"The KV cache sanitizer is off: {reason}"
    with pytest.raises(ValueError, match=f"the sanitizer is off: {reason}"):
        findings(wrapper.worker)
    monkeypatch.setitem(os.environ, "KVCACHE_SANITIZE", "stop")
    with pytest.raises(ValueError, match=reason):
        wrapper.initialize_from_config([])


def test_findings_are_not_available_from_a_worker_without_a_sanitizer():
    worker = types.SimpleNamespace(model_runner=types.SimpleNamespace())
    with pytest.raises(ValueError, match="start it with KVCACHE_SANITIZE=1"):
        findings(worker)


class Pool:
    """The blocks of two groups, as reported to a worker."""

    def __init__(self):
        groups = [SanitizedGroup("full", 4), SanitizedGroup("window", 4, window=8)]
        self.sanitizer = Sanitizer(groups, 32, log=lambda report: None)
        self.holds = Holds(self.sanitizer, [0, 1], [4, 4])

    def holders(self, *blocks):
        return self.sanitizer._blocks.device.blocks["num_holders"][list(blocks)].tolist()


def test_waiting_requests_release_blocks_that_are_allocated_to_others():
    pool = Pool()
    pool.holds.scheduled = {"a"}
    pool.holds.take("a", ([1, 2], [3, 4]), 0)
    pool.holds.scheduled = {"b"}
    pool.holds.take("b", ([2, 9], [5, 6]), 0)
    assert pool.holds.of("a") == [[1, 0], [3, 4]] and pool.holders(1, 2, 9) == [1, 1, 1]


def test_waiting_requests_keep_blocks_that_others_hit():
    pool = Pool()
    pool.holds.scheduled = {"a"}
    pool.holds.take("a", ([1, 2, 3], [4, 5, 6]), 0)
    pool.holds.scheduled = {"b"}
    pool.holds.take("b", ([1, 2, 7], [0, 5, 8]), 8)
    assert pool.holders(1, 2, 3, 5, 7) == [2, 2, 1, 2, 1]
    assert pool.holds.exclusive("b", 0, [1, 2, 7]) == [0, 0, 7]


def test_prefill_checkpoints_are_states():
    sanitizer = Sanitizer([SanitizedGroup("state", 1)], 16, log=lambda report: None)
    observer = types.SimpleNamespace(sanitizer=sanitizer)
    sanitizer.observe_request("a", range(6))
    sanitizer.observe_request("b", range(9))
    layer = types.SimpleNamespace(
        checkpoint_meta=types.SimpleNamespace(
            request_rows=as_tensor([0, 1]), offsets=[0, 4], state_indices=as_tensor([0, 7])
        )
    )
    WorkerObserver._observe_checkpoints(observer, 0, ["a", "b"], np.array([0, 0]), layer)
    sanitizer.observe_request("c", range(4))
    sanitizer.observe_state_read(0, ["c"], [4], [7])
    assert not sanitizer.reports
    sanitizer.observe_state_read(0, ["b"], [5], [7])
    assert sanitizer.counts == {"wrong-state": 1}


def as_tensor(values):
    import torch

    return torch.tensor(values)
