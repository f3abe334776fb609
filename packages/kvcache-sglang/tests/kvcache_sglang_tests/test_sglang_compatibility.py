# SPDX-License-Identifier: Apache-2.0
"""Which versions of SGLang the plug-ins accept, and how they name what is missing."""

import pytest

pytest.importorskip("sglang")

import sglang
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvcache_sglang import compatibility

PLUG_INS = ("EXCHANGE", "HICACHE", "SANITIZER")


@pytest.mark.parametrize("name", PLUG_INS)
def test_later_versions_with_the_same_interfaces_are_accepted_with_a_warning(
    name, monkeypatch, caplog
):
    uses = getattr(compatibility, name)
    compatibility.check_version(uses)
    assert not caplog.messages
    for version in ("0.5.24", "0.6.0rc1", "1.0"):
        monkeypatch.setattr(sglang, "__version__", version)
        compatibility.check_version(uses)
        assert caplog.messages[-1].startswith(f"SGLang {version} has all that kvcache uses")


@pytest.mark.parametrize("name", PLUG_INS)
def test_earlier_versions_are_rejected(name, monkeypatch):
    for version in ("0.5.22", "0.4.99", "0.5.3"):
        monkeypatch.setattr(sglang, "__version__", version)
        with pytest.raises(ValueError, match=f"version of SGLang is {version}: expected 0.5.23 or"):
            compatibility.check_version(getattr(compatibility, name))


def _new_parameter(self, recv_req, urgency):
    pass


def _renamed_parameter(self, names):
    pass


def _optional_parameter(self, recv_req, urgency=1):
    pass


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "value", "message"),
    [
        ("EXCHANGE", Scheduler, "abort_request", None, "Scheduler.abort_request is missing"),
        ("EXCHANGE", Req, "finished", None, "Req.finished is missing"),
        (
            *("EXCHANGE", Scheduler, "abort_request", _new_parameter),
            r"Scheduler.abort_request has the parameters self, recv_req, urgency \(expected self, ",
        ),
        (
            "HICACHE",
            HiCacheStorage,
            "batch_exists",
            _renamed_parameter,
            "batch_exists has the param",
        ),
        ("SANITIZER", Scheduler, "run_batch", None, "Scheduler.run_batch is missing"),
    ],
)
def test_what_a_version_lacks_is_named(name, owner, attribute, value, message, monkeypatch):
    if value is None:
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, value)
    for version in (sglang.__version__, "0.9.0"):
        monkeypatch.setattr(sglang, "__version__", version)
        with pytest.raises(ValueError, match=message):
            compatibility.check_version(getattr(compatibility, name))


def test_new_parameters_with_defaults_are_accepted(monkeypatch):
    monkeypatch.setattr(Scheduler, "abort_request", _optional_parameter)
    compatibility.check_version(compatibility.EXCHANGE)


def test_classes_that_are_missing_are_named():
    uses = {"sglang.srt.managers.scheduler:Planner": {}, "sglang.nothing:Planner": {}}
    with pytest.raises(
        ValueError, match=r"scheduler:Planner is missing; sglang\.nothing:Planner is m"
    ):
        compatibility.check_version(uses)
