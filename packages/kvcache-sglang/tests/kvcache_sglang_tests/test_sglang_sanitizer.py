# SPDX-License-Identifier: Apache-2.0
"""The sanitizer in SGLang reports nothing for SGLang itself, and finds all defects that are planted
in it.
"""

import json
import sys
import types

import numpy as np
import pytest

pytest.importorskip("sglang")

from kvcache.sanitizer import SanitizedGroup, Sanitizer
from kvcache_exchange.plugins.guard import ObserverGuard
from kvcache_sglang.sanitizer import findings, register
from kvcache_sglang.sanitizer.pages import HandedOutPages
from tests.machinery.sglang_defects import DEFECTS, ENGINES, HICACHE, find_all
from tests.machinery.sglang_engine import OPTIONS, in_a_process, write_model
from tests.machinery.shared import sampled

OVERLAP, MIXED = {"disable_overlap_schedule": False}, {"enable_mixed_chunk": True}
CLEAN = {
    "roomy": {},
    "tight": {"max_total_tokens": 640},
    "tight, overlap, mixed chunks": {"max_total_tokens": 640, **OVERLAP, **MIXED},
    "tokens, tight, overlap":
        {**{"max_total_tokens": 640, "page_size": 1, "chunked_prefill_size": 60}, **OVERLAP},
    "pages of 64, overlap, mixed chunks": {**{"max_total_tokens": 704, "page_size": 64},
        **{**OVERLAP, **MIXED}},
    "without a radix cache": {"max_total_tokens": 640, "disable_radix_cache": True, **OVERLAP},
    "hicache": {**HICACHE, **OVERLAP},
    "windows, overlap": {"family": "mellum", "max_total_tokens": 768, **OVERLAP},
    "windows, tokens": {**{"family": "mellum", "max_total_tokens": 640, "page_size": 1},
        **{"chunked_prefill_size": 60, **MIXED}},
}  # fmt: skip
WORKS = [
    {"seed": 1, "turns": 6, "new_tokens": 60, "aborts": True},
    {"seed": 2, "turns": 4, "new_tokens": 90, "at_once": 6, "keys": True},
]


@pytest.mark.parametrize("name", sampled(sorted(CLEAN, key=lambda name: name != "tight")))
def test_sglang_itself_has_no_findings(name):
    arguments = json.dumps(CLEAN[name]), json.dumps(WORKS)
    results = in_a_process("tests.machinery.sglang_engine", *arguments)
    for each in results:
        counts = {key: each[key] for key in ("requests", "cached_tokens", "retractions", "aborts")}
        read = each["findings"]["slots_read"]
        print(f"{name}: {counts}, {read} slots read, {each['findings']['reports'][:1]}")
        assert each["error"] is None
        assert each["findings"]["off"] is None and not each["findings"]["unchecked"]
        assert not each["findings"]["reports"] and each["findings"]["slots_read"] > 50_000
    if "radix" not in name:
        assert all(each["cached_tokens"] for each in results)
    if name not in ("roomy", "pages of 64, overlap, mixed chunks"):
        assert sum(each["retractions"] for each in results)
    assert results[0]["aborts"]
    if name == "hicache":
        assert results[0]["findings"]["pages_loaded"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
def test_each_planted_defect_is_found(engine):
    clean, *found = find_all(engine)
    assert clean["kind"] is None and clean["off"] is None and clean["engine"] == "answered"
    assert {each["name"] for each in found} == {
        name for name, (_, engines) in DEFECTS.items() if engine in engines
    }
    for each in found:
        print(
            f"{each['name']}: planted at step {each['planted_at']}, found at step "
            f"{each['found_at']} as {each['kind']}; the engine: {each['engine']}"
        )
    for each in found:
        assert each["planted_at"] is not None and each["kind"] is not None, each
        assert each["off"] is None and each["found_at"] >= each["planted_at"], each


@pytest.mark.exhaustive
def test_mode_stop_ends_the_scheduler_before_the_wrong_read():
    clean, *found = in_a_process(
        "tests.machinery.sglang_defects", "hicache", KVCACHE_SANITIZE="stop"
    )
    assert clean["engine"] == "answered"
    for each in found:
        assert each["engine"].startswith(f"step {each['found_at']}: SanitizerError"), each


def generate(folder, mode):
    """Generate with SGLang's engine and all of its processes. Return the tokens and the server
    information.
    """
    code = (
        "import json, sys\n"
        "from sglang import Engine\n"
        "if __name__ == '__main__':\n"
        "    engine = Engine(**json.loads(sys.argv[1]))\n"
        "    sampling = {'max_new_tokens': 12, 'temperature': 0, 'ignore_eos': True}\n"
        "    prompts = [list(range(3, 80)), list(range(3, 60)) + [200] * 30]\n"
        "    made = [engine.generate(input_ids=prompts, sampling_params=sampling) for _ in '12']\n"
        "    print(json.dumps([made[1], engine.get_server_info()], default=str))\n"
        "    engine.shutdown()\n"
    )
    (folder / "engine_of_test.py").write_text(code)
    options = json.dumps({"model_path": write_model("llama"), **OPTIONS})
    path = f"{folder}:{':'.join(filter(None, sys.path))}"
    return in_a_process("engine_of_test", options, PYTHONPATH=path, KVCACHE_SANITIZE=mode)


@pytest.mark.exhaustive
def test_the_plug_in_is_loaded_by_the_scheduler_process(tmp_path):
    answers, info = generate(tmp_path, "stop")
    (found,) = findings(info)
    assert not found["reports"] and found["off"] is None and found["slots_read"] > 1000
    assert answers[0]["meta_info"]["cached_tokens"]


def test_engines_without_the_variable_have_no_findings():
    with pytest.raises(ValueError, match="expected KVCACHE_SANITIZE=1"):
        findings({"internal_states": [{}]})


def test_the_plug_in_does_nothing_without_the_variable(monkeypatch):
    class Scheduler:
        def run_event_loop(self):
            pass

        def get_internal_state(self, request):
            pass

    before = Scheduler.run_event_loop
    module = types.SimpleNamespace(Scheduler=Scheduler)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", module)
    monkeypatch.setenv("KVCACHE_SANITIZE", "0")
    register()
    assert Scheduler.run_event_loop is before
    monkeypatch.setenv("KVCACHE_SANITIZE", "1")
    register()
    register()
    assert Scheduler.run_event_loop.__wrapped__ is before


@pytest.mark.parametrize("mode", ["1", "stop"])
def test_old_versions_are_refused(mode, monkeypatch, caplog):
    import sglang

    from kvcache_sglang.sanitizer import _observed

    monkeypatch.setattr(sglang, "__version__", "0.5.9")
    monkeypatch.setenv("KVCACHE_SANITIZE", mode)
    ran = []
    loop = _observed(ran.append)
    message = "the version of SGLang is 0.5.9: expected 0.5.23 or later"
    if mode == "stop":
        with pytest.raises(ValueError, match=message):
            loop(object())
        assert not ran
    else:
        loop(object())
        assert len(ran) == 1
        assert caplog.messages == [f"The KV cache sanitizer is off: {message}"]


class Tensor(np.ndarray):
    """A tensor of slots that supports the operations used by `HandedOutPages`."""

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


def slots(*values):
    return np.array(values).view(Tensor)


class Allocator:
    page_size, free_group = 4, None

    def alloc(self, count):
        return slots(*range(4, 4 + count))

    def alloc_extend(self, found):
        return found

    alloc_decode = alloc_extend

    def _release_page_ids(self, pages):
        pass

    def clear(self):
        pass


@pytest.fixture
def pages():
    sanitizer = Sanitizer([SanitizedGroup("full", 4)], 16, log=lambda report: None)
    found = HandedOutPages(sanitizer, ObserverGuard(sanitizer), 0, Allocator(), 8, 0)
    found.install()
    found.holders = lambda: sanitizer._blocks.device.blocks["num_holders"][:4].tolist()
    return found


def test_pages_are_held_until_the_allocator_gets_them_back(pages):
    pages._allocator.alloc(8)
    pages.take("a", np.array([4, 8]))
    pages._allocator._release_page_ids(slots(2))
    assert pages.holders() == [0, 1, 0, 0]
    pages._allocator.clear()
    assert pages.holders() == [0, 0, 0, 0]
