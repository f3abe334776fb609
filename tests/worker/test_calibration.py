# SPDX-License-Identifier: Apache-2.0
"""Selection of copy methods by fragment size: thresholds and calibration files."""

import numpy as np
import pytest
import torch

from kvcache import Pages, SwapEngine
from kvcache.worker.swap.calibration import DEFAULT, Calibration, calibration_of, load, path_for
from tests.machinery.simulated_device import SimulatedStreams

KIB = 1024
KERNEL_ALWAYS = ((0, ((0, "kernel"),)),)


@pytest.mark.parametrize(("direction", "fragment", "number", "method"), [
    ("in", 4 * KIB, 1, "kernel"),
    ("in", 64 * KIB - 1, 8191, "kernel"),
    ("in", 64 * KIB - 1, 8192, "staging"),
    ("in", 64 * KIB, 1, "copy_engine"),
    ("in", 64 * KIB, 8192, "copy_engine"),
    ("out", 128 * KIB - 1, 8192, "kernel"),
    ("out", 4 * KIB, 100_000, "kernel"),
    ("out", 1024 * KIB, 5000, "copy_engine"),
])  # fmt: skip
def test_built_in_thresholds_are_those_measured_on_an_h200(direction, fragment, number, method):
    assert DEFAULT.method(direction, fragment, number) == method
    assert "H200" in DEFAULT.machine


def test_calibration_is_stored_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steps = ((0, "kernel"), (100, "staging"))
    mine = Calibration("NVIDIA H200", KERNEL_ALWAYS, ((0, steps), (40, ((0, "kernel"),))), 3)
    path = path_for(mine.machine)
    assert path == tmp_path / "kvcache" / "calibration-nvidia-h200.json"
    mine.save(path)
    assert load(path) == mine and not list(path.parent.glob("*.tmp"))
    monkeypatch.setenv("KVCACHE_CALIBRATION", str(tmp_path / "other.json"))
    assert path_for("anything") == tmp_path / "other.json"
    assert calibration_of(torch.device("cpu")) is DEFAULT


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not a valid calibration"),
    ("[1]", "is not a valid calibration"),
    ('{"version": 2, "machine": "a"}', "is not a valid calibration: .*missing"),
    ('{"version": 2, "machine": "a", "out": [[0, [[0, "dma"]]]], "in_": [[0, [[0, "kernel"]]]]}',
     "out has 'dma': expected one of kernel, copy_engine, staging"),
    ('{"version": 2, "machine": "a", "out": [[0, [[5, "kernel"]]]], "in_": [[0, []]]}',
     r"out has steps that begin at \[5\]: expected ascending sizes from 0"),
    ('{"version": 2, "machine": "a", "out": [[5, [[0, "kernel"]]]], "in_": [[0, []]]}',
     r"out begins at \[5\]: expected ascending numbers of fragments from 0"),
    (
        '{"version": 2, "machine": "a", "out": [[0, [[0, "kernel"]]]], '
        '"in_": [[0, [[0, "kernel"]]]], "num_thread_blocks": 0}',
        "num_thread_blocks is 0: expected 1 or more",
    ),
    ('{"machine": "a", "out": [[0, "kernel"]], "in_": [[0, "kernel"]], "num_thread_blocks": 8}',
     "version is 1: expected 2; run `kvcache bench --calibrate` again"),
])  # fmt: skip
def test_file_without_calibration_is_reported(tmp_path, text, message):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def engine(sizes, packed=False, **options):
    pages = Pages.allocate(40, sizes)
    pages = pages.on_host(40) if packed else pages
    return SwapEngine(pages, pages.on_host(40), streams=SimulatedStreams(0), **options)


# Thresholds that depend only on the fragment size, and on the number of fragments.
BY_SIZE = Calibration(
    "a test",
    ((0, ((0, "staging"), (28 * KIB, "copy_engine"))),),
    ((0, ((0, "kernel"), (28 * KIB, "copy_engine"))),),
)
BY_NUMBER = Calibration(
    "a test",
    ((0, ((0, "copy_engine"),)), (32, BY_SIZE.out[0][1])),
    ((0, ((0, "copy_engine"),)), (32, BY_SIZE.in_[0][1])),
)


def ids(*values):
    return np.array(values).reshape(-1, 2)


def test_method_depends_on_contiguity_of_both_sides():
    apart = engine([[8 * KIB, 8 * KIB]] * 4, calibration=BY_SIZE)
    scattered, run = ids(1, 9, 5, 2), np.stack([np.arange(1, 9), np.arange(21, 29)], 1)
    assert apart.fragment_bytes("out", scattered) == 8 * KIB
    # Layers are not adjacent on the host, so the fragments of consecutive pages are not merged.
    assert apart.fragment_bytes("out", run) == 8 * KIB
    assert [apart.method_for(d, run) for d in ("out", "in")] == ["staging", "kernel"]
    packed = engine([[8 * KIB, 8 * KIB]], packed=True, calibration=BY_SIZE)
    assert packed.fragment_bytes("in", ids(1, 9, 5, 2)) == 16 * KIB
    assert packed.fragment_bytes("in", run) == 8 * 16 * KIB
    assert packed.fragment_bytes("in", run[::-1]) == 8 * 16 * KIB  # descending runs are merged, too
    assert packed.method_for("in", scattered) == "kernel"
    assert packed.method_for("in", run) == "copy_engine"
    # Each page is a single fragment, so staging has no benefit.
    assert packed.method_for("out", scattered) == "kernel"
    assert engine([[8]], method="staging").method_for("in", run) == "staging"
    on_cpu = SwapEngine(apart.device, apart.host)  # there is only one method on a CPU
    assert [on_cpu.method_for(d, run) for d in ("out", "in")] == ["kernel", "kernel"]


def test_method_depends_on_number_of_fragments():
    swaps = engine([[8 * KIB, 8 * KIB]] * 4, calibration=BY_NUMBER)  # 8 fragments per page
    few, many = ids(1, 9, 5, 2), ids(1, 9, 5, 2, 7, 4, 8, 1)
    assert [swaps.num_fragments("in", pairs) for pairs in (few, many)] == [16, 32]
    assert [swaps.method_for("in", pairs) for pairs in (few, many)] == ["copy_engine", "kernel"]
    assert [swaps.method_for("out", pairs) for pairs in (few, many)] == ["copy_engine", "staging"]


def test_requested_calibration_must_match_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVCACHE_CALIBRATION", raising=False)
    assert calibration_of(torch.device("cuda")) is DEFAULT
    monkeypatch.setenv("KVCACHE_CALIBRATION", str(tmp_path / "mine.json"))
    with pytest.raises(ValueError, match=r"mine.json is not a valid calibration"):
        calibration_of(torch.device("cuda"))
    Calibration("NVIDIA L4", KERNEL_ALWAYS, KERNEL_ALWAYS).save(tmp_path / "mine.json")
    with pytest.warns(
        RuntimeWarning, match="was measured on NVIDIA L4, but this machine is NVIDIA B200"
    ):
        assert calibration_of(torch.device("cuda")).machine == "NVIDIA L4"
