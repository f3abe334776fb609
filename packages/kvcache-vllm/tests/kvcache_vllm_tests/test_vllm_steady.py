# SPDX-License-Identifier: Apache-2.0
"""Steady decode steps equal those of vLLM's own scheduler in every field and attribute.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import pytest

pytest.importorskip("vllm")

from kvcache_vllm import VllmAsyncScheduler, VllmScheduler, known_sources
from kvcache_vllm import scheduler as ours_scheduler
from kvcache_vllm.compatibility import TESTED
from tests.machinery.vllm_models import write_config
from tests.machinery.vllm_schedulers import engine_config, make_scheduler
from tests.machinery.vllm_steady import SteadySides


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_second_runner", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_most_steps_of_long_answers_are_steady(is_async, is_second_runner, policy, llama):
    config = engine_config(llama, is_async=is_async, events=True, scheduling_policy=policy)
    sides = SteadySides(7, config, ("full",), 3_000, is_second_runner=is_second_runner)
    counts = sides.run(250)
    assert counts["steady"] > counts["steps"] / 2
    assert counts["steady updates"] > counts["steps"] / 3
    assert min(counts[each] for each in ("stops", "repeats", "logprobs", "structured", "lora")) > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_steady_steps_occur_in_a_tight_pool(is_async, llama):
    config = engine_config(llama, is_async=is_async, max_model_len=300)
    counts = SteadySides(3, config, ("full",), 60, share=0.1).run(200)
    assert counts["preemptions"] > 0 and counts["steady"] > 30  # requests wait in most steps


@pytest.mark.parametrize("groups", ["window full", "mamba align, full"])
@pytest.mark.parametrize("is_async", [False, True])
def test_steady_steps_occur_with_other_groups(groups, is_async, llama):
    config = engine_config(llama, is_async=is_async)
    groups = tuple(groups.split(", ") if "," in groups else groups.split())
    counts = SteadySides(5, config, groups, 3_000, exact="mamba align" not in groups).run(200)
    assert counts["steady"] > counts["steps"] / 3


def test_sources_of_tested_versions_are_recognized():
    assert [each.rpartition(".")[0] for each in known_sources.KNOWN_SOURCES] == list(TESTED)
    for scheduler in (VllmScheduler, VllmAsyncScheduler):
        assert known_sources.has_known_sources(scheduler, ours_scheduler._WithManager)


@pytest.mark.parametrize("name", ["_update_after_schedule", "_free_request"])
def test_changed_method_disables_steady_steps(name, llama):
    class Changed(VllmScheduler):
        pass

    setattr(Changed, name, lambda self, *args: getattr(super(Changed, self), name)(*args))
    scheduler = make_scheduler(Changed, engine_config(llama), ("full",), 100)
    assert scheduler.steady is None
