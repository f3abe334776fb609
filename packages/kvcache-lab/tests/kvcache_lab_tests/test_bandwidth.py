# SPDX-License-Identifier: Apache-2.0
"""Measurements of page copies, calibration, and the output of `kvcache bench`."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvcache.cli import main
from kvcache.worker.swap.calibration import calibration_of, load
from kvcache_lab import bandwidth
from kvcache_lab.bandwidth import steps_of

KIB = 1024


def test_thresholds_lie_between_measured_sizes_and_counts():
    measured = [(4096, "staging"), (8192, "staging"), (16384, "kernel"), (32768, "copy_engine")]
    assert steps_of(measured) == ((0, "staging"), (12288, "kernel"), (24576, "copy_engine"))
    assert steps_of([(4096, "kernel")]) == ((0, "kernel"),)
    few, many = ((0, "copy_engine"),), ((0, "kernel"), (100, "copy_engine"))
    assert steps_of([(16, few), (64, many), (4096, many)]) == ((0, few), (40, many))


def test_slow_submission_limits_the_sustained_bandwidth():
    rate = bandwidth.Rate("in", 4 * KIB, "copy_engine", 50.0, 55.0, None, 1000, 100.0, True)
    assert rate.sustained_gb_per_s == pytest.approx(1000 * 4 * KIB / 100e-6 / 1e9)
    assert replace(rate, submit_us=1.0).sustained_gb_per_s == 50.0
    assert bandwidth.Rate("host", 4 * KIB, "cpu", 9.0, 10.0).sustained_gb_per_s == 9.0


def test_cpu_rates_count_moved_bytes(monkeypatch):
    moved = []
    monkeypatch.setattr(
        bandwidth, "median_times", lambda *functions: [(f() and 0) or 0.5 for f in functions]
    )
    original = bandwidth.PageCopy.copy

    def copy(self, pairs):
        if self.source is not self.destination:
            assert self.source.memory.float().std() > 50  # contents are initialized and vary
            moved.append(len(pairs) * self.source.page_bytes)
        original(self, pairs)

    monkeypatch.setattr(bandwidth.PageCopy, "copy", copy)
    (rate,) = bandwidth.host_rates(8 << 20, (64 * KIB,))
    assert (rate.direction, rate.fragment) == ("host", 64 * KIB)
    assert moved == [8 << 20]
    assert rate.gb_per_s == pytest.approx(moved[0] / 0.5 / 1e9)
    assert rate.contiguous_gb_per_s == pytest.approx((8 << 20) / 0.5 / 1e9)


@pytest.mark.slow
def test_bench_prints_a_table_or_json(capsys):
    assert main(["bench", "--mib", "8", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [rate["fragment"] for rate in report["rates"]] == list(bandwidth.FRAGMENTS)
    assert all(rate["share"] > 0 for rate in report["rates"])
    assert main(["bench", "--mib", "8", "--device", "cpu"]) == 0
    assert "4,096 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "code", "message"), [
    (["bench", "--mib", "3"], 2, "--mib is '3': expected a whole number from 8 to 65536"),
    (["bench", "--device", "tpu"], 2, "--device is 'tpu': expected cpu, cuda or cuda:N"),
    (["bench", "--device", "cuda:99999999999"], 2, "--device is 'cuda:99999999999': expected"),
    (["bench", "--device", "cuda:\u0663"], 2, "--device is 'cuda:\u0663': expected cpu, cuda"),
    (["bench", "--mib", "65536"], 2, "--mib is 65536: expected less, this needs 256.2 GiB"),
    (["bench", "--device", "cpu", "--calibrate"], 1, "there is no CUDA device: nothing to cal"),
])  # fmt: skip
def test_bench_reports_invalid_arguments(capsys, argv, code, message):
    assert main(argv) == code
    assert message in capsys.readouterr().err


def cpu_pools(num_bytes=1 << 20, pool_bytes=16 << 20):
    return bandwidth.Pools(torch.device("cpu"), num_bytes, pool_bytes)


@pytest.mark.parametrize("num_bytes", [1 << 20, 100 << 20])
def test_measured_pages_are_scattered_over_the_pool(num_bytes):
    pools = cpu_pools(num_bytes)
    for fragment in bandwidth.FRAGMENTS:
        pages, host = pools.pages(fragment)
        assert pages.num_blocks == host.num_blocks
        assert pages.num_bytes == host.num_bytes == pools.size >= 16 << 20
        assert set(pages.sizes) == {fragment} and set(host.sizes) == {fragment}
        pairs = pools.pairs(pages)
        assert len(pairs) == max(num_bytes // pages.page_bytes, 2)
        for side in pairs.T:
            assert len(set(side)) == len(side) and side.min() >= 1
            assert len(side) < 20 or np.ptp(side) > 0.7 * pages.num_blocks


def test_calibration_distinguishes_numbers_of_fragments(monkeypatch):
    """The measurements, rather than the built-in values, select the copy engine for few fragments
    and the kernel for many small ones.
    """

    def rates(
        pools, fragments, methods, calibration, directions, rounds=5, counts=(64,), **options
    ):
        for fragment in fragments:
            for method in methods:
                for direction in directions:
                    for count in sorted({min(n, pools.num_bytes // fragment) for n in counts}):
                        few = count < 256 or fragment >= 64 * KIB
                        fast = method == ("copy_engine" if few else "kernel")
                        for blocks in options.get("thread_blocks") or (None,):
                            yield bandwidth.Rate(
                                direction, fragment, method, 50.0 if fast else 5.0, 55.0,
                                blocks, count,
                            )  # fmt: skip

    monkeypatch.setattr(bandwidth, "device_rates", rates)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    pools = SimpleNamespace(device=torch.device("cuda"), num_bytes=256 << 20)
    found = bandwidth.calibrate(pools)
    assert found.num_thread_blocks == 1
    for direction in ("out", "in"):
        assert found.method(direction, 4 * KIB, 32) == "copy_engine"
        assert found.method(direction, 4 * KIB, 256) == "kernel"
        assert found.method(direction, 4 * KIB, 100_000) == "kernel"
        assert found.method(direction, 1024 * KIB, 100_000) == "copy_engine"


@pytest.mark.gpu
# This test takes minutes on the runtime without a GPU, where `make gpu-rehearsal` also runs it.
@pytest.mark.exhaustive
def test_swaps_use_the_calibration_of_the_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVCACHE_CALIBRATION", str(tmp_path / "here.json"))
    monkeypatch.setattr(bandwidth, "FRAGMENTS", (16 * KIB, 1024 * KIB))
    assert main(["bench", "--calibrate", "--mib", "16", "--pool-mib", "32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = load(tmp_path / "here.json")
    assert report["calibration"]["machine"] == found.machine == torch.cuda.get_device_name()
    assert calibration_of(torch.device("cuda")) == found


class FakeDevice:
    """A simulated device with its own clock that replaces torch's streams and events."""

    def __init__(self, monkeypatch) -> None:
        # The current host time, and the time at which the device will have finished its work.
        self.host_s = self.device_s = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing=False) -> None:
                self.at = None

            def record(self, stream=None) -> None:
                device.device_s = self.at = max(device.device_s, device.host_s)

            def query(self) -> bool:
                return self.at <= device.host_s

            def synchronize(self) -> None:
                device.host_s = max(device.host_s, self.at)

            def elapsed_time(self, end) -> float:
                return (end.at - self.at) * 1e3

        cuda = {
            "Event": Event,
            "current_stream": lambda *_: None,
            "synchronize": lambda *_: self._wait(),
            "_sleep": lambda cycles: self.work(cycles / 2e9),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: self.host_s)

    def work(self, seconds: float) -> None:
        """Submit device work from the host without waiting for it."""
        self.device_s = max(self.device_s, self.host_s) + seconds

    def _wait(self) -> None:
        self.host_s = max(self.host_s, self.device_s)


@pytest.mark.parametrize("submit_s", [20e-6, 300e-6, 8e-3])
def test_swap_time_excludes_submission(monkeypatch, submit_s):
    device = FakeDevice(monkeypatch)

    def launch():
        device.host_s += submit_s  # time for Python, ids and checks of regions
        device.work(5e-3)

    timing = bandwidth.device_seconds(launch, rounds=3)
    assert timing.device_s == pytest.approx(5e-3)
    assert timing.submit_s == pytest.approx(submit_s) and timing.is_hidden


def test_blocking_submission_is_not_reported_as_hidden(monkeypatch):
    device = FakeDevice(monkeypatch)

    def launch():
        torch.cuda.synchronize()
        device.work(5e-3)

    assert not bandwidth.device_seconds(launch, rounds=3).is_hidden


def test_all_measurements_share_the_pools_and_the_contiguous_copy(monkeypatch):
    """Pinning gigabytes of host memory for each measurement took longer than the measurements."""
    contiguous, tried = [], []
    monkeypatch.setattr(
        bandwidth, "_contiguous_gb_per_s", lambda *args: contiguous.append(args[-1]) or 50.0
    )

    def timing(engine, pairs, direction, rounds):
        tried.append((engine.device.memory.data_ptr(), engine.host.memory.data_ptr()))
        return bandwidth.Timing(1.0 / min(engine.calibration.num_thread_blocks, 8), 0.1, True)

    monkeypatch.setattr(bandwidth, "_swap_timing", timing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    pools = cpu_pools()
    assert bandwidth.calibrate(pools).num_thread_blocks == 8
    assert set(tried) == {(pools._memory.data_ptr(), pools._host.data_ptr())}
    assert sorted(contiguous) == ["in", "out"]
